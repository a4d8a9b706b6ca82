"""What every training script does around its own loss: load, open the run, step, export.

The order of events stays in each script's main; nothing here loops or knows what a loss is.
"""

import functools
import math
import random
import resource
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from nanoplan import checkpoint, config, dist, lora, weights
from nanoplan.chat import Chat
from nanoplan.log import RunLog, move_aside
from nanoplan.model import Model


def load_trained(
    name: str, *, dtype: torch.dtype, checkpointing: bool, lora_r: int, lora_alpha: float, seed: int,
    adapter: str = "",
) -> tuple[Chat, Model]:  # fmt: skip
    """A model that will learn, on this rank, and its chat.

    dtype    in which it computes. With adapters its frozen weights have it too; full fine-tuning keeps fp32
             weights, and FSDP casts
    lora_r   rank of new adapters; 0 without `adapter`: all weights learn
    adapter  folder or hub name of adapters to go on with; "" = none
    raises   ValueError as load_policy, add_lora and load_adapter
    """
    adapted = bool(lora_r or adapter)
    stored = dtype if adapted else torch.float32
    chat, model = weights.load_policy(name, dtype=stored, device=dist.device(), checkpointing=checkpointing)
    if lora_r:
        lora.add_lora(model, r=lora_r, alpha=lora_alpha, seed=seed)
    if adapter:
        lora.load_adapter(model, weights.fetch(adapter))
    return chat, dist.shard(model, lora=adapted, param_dtype=None if stored == dtype else dtype)


def adamw(model, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """The optimizer of what learns in the model, made after dist.shard; betas (0.9, 0.99)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)


def open_run(
    cfg, model, optimizer, state: dict, *, may_change: Collection[str], unit: str = "step",
    check: Callable[[dict], None] = lambda state: None,
) -> tuple[RunLog, dict]:  # fmt: skip
    """The run folder, and what the run continues from: an earlier run there is resumed or moved aside.

    cfg         the script's Config: out, resume
    state       of a run that has not begun, "step" included
    may_change  fields that may differ from the resumed run's
    unit        what a step is called
    check       raises ValueError for a state that cannot be continued, before anything is written
    """
    out = Path(cfg.out)
    if cfg.resume:
        changes = config.check_resume(cfg, out, allow=may_change)
        newest = checkpoint.latest(out / "checkpoints")
        if newest:
            state = state | checkpoint.load(newest, model, optimizer)
        check(state)
        run = RunLog(out, resume_step=state["step"])
        run.line(f"resume {out} after {unit} {state['step']}" + "".join(f"\n  {line}" for line in changes))
    else:
        if dist.is_main():
            move_aside(out)
        dist.barrier()
        run = RunLog(out)
    if dist.is_main():
        config.save(cfg, out)
    return run, state


def take_step(model, optimizer, *, max_norm: float, wanted: bool = True) -> dict[str, float]:
    """Clip the gradients, after dist.sync_grads, and move the weights; the gradients are gone then.

    wanted   False: all ranks have nothing to learn from, and leave the weights and moments as they are
    returns  {"grad_norm": before clipping, "skipped": 1.0 where it was not wanted or the norm not finite}
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = dist.clip_grad_norm(trained, max_norm)
    moves = math.isfinite(norm) and wanted
    if moves:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": norm, "skipped": float(not moves)}


def export(model, out: Path, *, folder: Path, base_name: str, adapted: bool) -> None:
    """Write the result: adapter/ in PEFT's format, or model/ as a Hugging Face folder. A collective.

    folder     of the model that training began with
    base_name  its name, as an adapter's config gives it
    """
    state = dist.full_state(model)
    if dist.is_main():
        if adapted:
            lora.save_adapter(model, out / "adapter", base_name=base_name, state=state)
        else:
            weights.save_model(model, out / "model", state=state, extra_files_from=folder)
    dist.barrier()


@functools.lru_cache(maxsize=4)
def epoch_order(num_items: int, key: str, epoch: int) -> list[int]:
    """Indices of all items, in the order in which an epoch takes them: a pure function of key and epoch."""
    return random.Random(f"{key}/{epoch}").sample(range(num_items), num_items)


def peak_gb() -> float:
    """Largest memory of this process so far, 1e9 bytes: the GPU's where there is one, else resident."""
    if dist.device().type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
