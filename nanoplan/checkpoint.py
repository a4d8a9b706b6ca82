"""Resume: what training changes, saved so that a kill at any moment leaves a whole checkpoint.

A checkpoint is a folder step_N: the trainable parameters and their optimizer state, each rank its part, in
torch.distributed.checkpoint's format; and state.json with counters and each rank's random generators. It is
written as step_N.tmp and renamed when every rank is done, so a folder without .tmp is complete. Names are
those of model.named_parameters(), so a run may go on with another number of processes.

Not here: frozen weights (they come from the base folder), hyperparameters (they come from the config; lr is a
function of the step), exports (weights.save_model, lora.save_adapter).
"""

import contextlib
import json
import os
import random
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from nanoplan import dist


def save(folder, step: int, model: nn.Module, optimizer, state: dict, *, keep: int = 2) -> Path:
    """Write folder/step_N and delete all but the newest `keep` checkpoints. A collective.

    folder     the run's checkpoints/ folder; made if it is missing
    step       number of finished steps
    optimizer  one torch optimizer or a list of them; made after dist.shard
    state      what else the run needs to go on, as JSON; rank 0's is kept
    returns    the checkpoint's path
    raises     OSError on every rank if a disk is full or broken: the older checkpoints are as they were
    """
    folder = Path(folder)
    final, temp = folder / f"step_{step}", folder / f"step_{step}.tmp"
    tensors, values = _collect(model, optimizer)
    generators = dist.gather_objects([_generators()])
    record = {"step": step, "world": dist.world(), "state": state, "optim": values, "generators": generators}

    def clear():
        if dist.is_main():
            shutil.rmtree(temp, ignore_errors=True)
            temp.mkdir(parents=True)

    def write():
        with _one_or_many() as no_dist:
            dcp.save(tensors, checkpoint_id=temp, no_dist=no_dist)

    def finish():
        if dist.is_main():
            _write_synced(temp / "state.json", json.dumps(record))
            _put_in_place(temp, final)

    for part in (clear, write, finish):
        _on_all_ranks(part, temp)
    if dist.is_main():
        _prune(folder, keep)
    return final


def latest(folder) -> Path | None:
    """The complete checkpoint with the highest step, or None; leftovers of killed saves do not count."""
    found = _complete(Path(folder))
    return found[-1] if found else None


def load(path, model: nn.Module, optimizer) -> dict:
    """Fill model and optimizer in place from a checkpoint; return the `state` given to save, and its `step`.

    Also sets python's and torch's random generators, if the number of processes is the one that saved.
    raises   ValueError if path is not complete, is damaged, or holds other parameters than the model trains
    """
    path = Path(path)
    if not _is_complete(path):
        raise ValueError(f"{path} is no complete checkpoint; give another step_N folder")
    record = json.loads((path / "state.json").read_text(encoding="utf-8"))
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    params = _trainable(model)
    _check_params(path, saved, params)
    tensors = {f"model.{name}": p.detach() for name, p in params.items()}
    tensors.update(_empty_state(saved, params))
    try:
        with _one_or_many() as no_dist:
            dcp.load(tensors, checkpoint_id=path, no_dist=no_dist)
    except CheckpointException as error:
        raise ValueError(f"{path} is damaged ({_cause(error)}); delete it to resume an older one") from None
    _fill_optimizers(optimizer, params, {**tensors, **record["optim"]})
    if record["world"] == dist.world():
        _set_generators(record["generators"][dist.rank()])
    return {**record["state"], "step": record["step"]}


# tensors


@contextlib.contextmanager
def _one_or_many():
    """Whether torch shall do without a process group, and without its warning that it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield not torch_dist.is_initialized()


def _trainable(model) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _optimizers(optimizer) -> list:
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _collect(model, optimizer):
    """(tensors by "model.<param>" and "optim.<param>.<key>", the optimizers' plain numbers by such names)."""
    params = _trainable(model)
    names = {p: name for name, p in params.items()}
    tensors = {f"model.{name}": p.detach() for name, p in params.items()}
    values = {}
    for one in _optimizers(optimizer):
        for p, entries in one.state.items():
            assert p in names, f"the optimizer holds a {tuple(p.shape)} tensor that the model does not train"
            for key, value in entries.items():
                place = tensors if isinstance(value, torch.Tensor) else values
                place[f"optim.{names[p]}.{key}"] = value
    return tensors, values


def _check_params(path, saved, params):
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    there = {key[len("model.") :]: tuple(m.size) for key, m in saved.items() if key.startswith("model.")}
    differ = [n for n in {**there, **shapes} if there.get(n) != shapes.get(n)]
    if differ:
        old, new = there.get(differ[0], "absent"), shapes.get(differ[0], "absent")
        raise ValueError(
            f"{path} holds other parameters than the model trains: {differ[0]} is {old} there, {new} here "
            f"({len(differ)} differ in all); "
            "resume with the model and adapter flags of the run that saved it"
        )


def _empty_state(saved, params):
    """A tensor per saved optimizer entry: placed like its parameter, or on the CPU if shaped otherwise."""
    empty = {}
    for key, meta in saved.items():
        if key.startswith("optim."):
            p, dtype = params[key[len("optim.") :].rpartition(".")[0]].detach(), meta.properties.dtype
            like_param = meta.size == p.shape
            empty[key] = (
                torch.zeros_like(p, dtype=dtype) if like_param else torch.zeros(meta.size, dtype=dtype)
            )
    return empty


def _fill_optimizers(optimizer, params, entries):
    names = {p: name for name, p in params.items()}
    states: dict[str, dict] = {name: {} for name in params}
    for key, value in entries.items():
        if key.startswith("optim."):
            name, _, entry = key[len("optim.") :].rpartition(".")
            states[name][entry] = value
    for one in _optimizers(optimizer):
        one.state.clear()
        for group in one.param_groups:
            on_device = group.get("fused") or group.get(
                "capturable"
            )  # these count steps where the weights are
            for p in group["params"]:
                state = states.get(names.get(p), {})
                if on_device and isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(p.device)
                if state:
                    one.state[p] = state


# files


def _is_complete(path) -> bool:
    return path.suffix != ".tmp" and (path / "state.json").is_file() and (path / ".metadata").is_file()


def _complete(folder) -> list[Path]:
    """Complete checkpoints, oldest first. step_N.old is step_N during the moment in which it is replaced."""
    found = {}
    for path in folder.glob("step_*"):
        match = re.fullmatch(r"step_(\d+)(\.old)?", path.name)
        if match and _is_complete(path):
            found[int(match[1]), not match[2]] = path
    return [path for _, path in sorted(found.items())]


def _put_in_place(temp, final):
    """Rename temp to final; a checkpoint of the same step from before stays usable until then."""
    _sync_folder(temp)
    old = final.with_name(final.name + ".old")
    if final.exists():
        _delete(old)
        os.rename(final, old)
    os.rename(temp, final)
    _sync_folder(final.parent)
    _delete(old)


def _prune(folder, keep):
    assert keep >= 1, keep
    for path in [*_complete(folder)[:-keep], *folder.glob("step_*.tmp")]:
        _delete(path)


def _delete(path):
    """Remove a folder that no longer counts from its first moment on."""
    if path.suffix != ".tmp" and path.exists():
        temp = path.with_name(path.name + ".tmp")
        shutil.rmtree(temp, ignore_errors=True)
        os.rename(path, temp)
        path = temp
    shutil.rmtree(path, ignore_errors=True)


def _write_synced(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path):
    """Make renames and new names in path survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_all_ranks(part, temp):
    """Run part on every rank; if it failed on one, remove temp and raise the same OSError on all."""
    error = ""
    try:
        part()
    except (OSError, CheckpointException) as caught:
        error = f"rank {dist.rank()}: {_cause(caught)}"
    errors = [e for e in dist.gather_objects([error]) if e]
    if errors:
        if dist.is_main():
            shutil.rmtree(temp, ignore_errors=True)
        free_gb = shutil.disk_usage(_existing(temp)).free / 1e9
        raise OSError(
            f"checkpoint {temp.stem} was not saved in {temp.parent} ({errors[0]}; {free_gb:.1f} GB free); "
            "older checkpoints are as they were: free space or lower keep, then resume"
        )


def _existing(path):
    return next(p for p in [path, *path.absolute().parents] if p.exists())


def _cause(error) -> str:
    """The innermost message: torch's checkpoint errors wrap one exception per rank."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# random generators


def _generators() -> dict:
    """States of this rank's generators as JSON."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def _set_generators(states):
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(states["torch"])), dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(states["cuda"])), dtype=torch.uint8))
