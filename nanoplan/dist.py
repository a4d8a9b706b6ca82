"""Processes: one or many, nccl or gloo, and who holds which part of the model.

The same script runs alone or under torchrun. A model is one of three things:
    alone       world 1: shard() leaves it as it is
    replicated  LoRA: every rank holds the frozen base and the adapters; sync_grads averages their gradients
    sharded     full fine-tuning: FSDP2, one group per block, one for embedding, norm and head (tied or not)
A training step, where num_tokens is summed over ranks and micro-batches before the first backward:
    for i, batch in enumerate(batches):          # as many on every rank (batch.pad_micro_batches)
        dist.backward(loss_sum / num_tokens, model, last=i == len(batches) - 1)
    dist.sync_grads(model)
    norm = dist.clip_grad_norm(params, max_norm)  # all ranks see one norm: not finite, all skip the step
Ranks average gradients; backward multiplies by the world size; nothing else does.

Not here: tensor, pipeline and hybrid parallelism.
"""

import contextlib
import datetime
import os
import random
import signal

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

BUCKET = 16 * 2**20  # elements of one all-reduce of adapter gradients; 64 MB in fp32
TIMEOUT = datetime.timedelta(hours=2)  # a rank may wait this long for another one's rollout

_stop = {"signal": 0}  # number of the signal that asked this process to leave; 0 = none


# processes


def init(seed: int | None = None) -> None:
    """Join the processes that torchrun describes in the environment; without it, be the only one.

    seed  seeds python's and torch's generators alike on every rank (model init, data order). What a rank
          draws on its own takes its seed from what it draws for (step, group, member), never from these.
    """
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    elif local_world > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _num_cores() // local_world))  # torchrun alone would leave each rank one
    if "RANK" in os.environ and not torch_dist.is_initialized():
        gpu = device() if torch.cuda.is_available() else None
        torch_dist.init_process_group(_backend(), timeout=TIMEOUT, device_id=gpu)
    if seed is not None:
        random.seed(seed)
        torch.manual_seed(seed)


def rank() -> int:
    return torch_dist.get_rank() if torch_dist.is_initialized() else 0


def world() -> int:
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def barrier() -> None:
    """Wait for every rank."""
    if world() > 1:
        torch_dist.barrier()


def close() -> None:
    """Leave the process group; a process that ends without it makes the others print errors."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def catch_sigterm() -> None:
    """From here on SIGTERM only sets the flag of stop_requested(); a second one ends the process at once."""

    def handler(number, frame):
        _stop["signal"] = number
        signal.signal(number, signal.SIG_DFL)

    _stop["signal"] = 0
    signal.signal(signal.SIGTERM, handler)


def got_sigterm() -> bool:
    """Whether this rank got SIGTERM. No collective: for cutting work short that ranks do each for themselves,
    since torchrun kills what has not left 30 s after the signal."""
    return _stop["signal"] != 0


def stop_requested() -> bool:
    """Whether any rank got SIGTERM. A collective: called once a step, it lets all leave at the same one."""
    return any_rank(got_sigterm())


# numbers over ranks


def any_rank(flag: bool) -> bool:
    """True on every rank if flag is true on one. A collective."""
    return bool(max_over_ranks(int(flag)))


def max_over_ranks(value: int) -> int:
    """Largest value over ranks, as after batch.pack for the common number of micro-batches. A collective."""
    return max(gather_objects([value]))


def sum_over_ranks(values: dict[str, float], maxes: tuple[str, ...] = ()) -> dict[str, float]:
    """Sum each value over ranks; those named in maxes take the largest instead. A collective.

    values  name -> number or 0-dim tensor, the same names on every rank
    """
    rows = gather_objects([{name: float(value) for name, value in values.items()}])
    assert all(row.keys() == rows[0].keys() for row in rows), [sorted(row) for row in rows]
    return {name: (max if name in maxes else sum)(row[name] for row in rows) for name in rows[0]}


def gather_objects(items: list) -> list:
    """Concatenate every rank's list in rank order, on every rank. Items are pickled. A collective."""
    if world() == 1:
        return list(items)
    parts: list = [None] * world()
    torch_dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


# the model over ranks


def shard(model: nn.Module, *, lora: bool, param_dtype: torch.dtype | None = None) -> nn.Module:
    """Spread model over the ranks, in place, and return it. Make the optimizer afterwards.

    lora         replicate: the frozen base stays whole on every rank
    param_dtype  full fine-tuning: compute in this dtype (bf16 on GPUs) from fp32 weights, gradients summed in
                 fp32; given, it shards at world 1 too, because FSDP is what casts
    raises       ValueError if the ranks hold different weights, or param_dtype is given with lora
    """
    if lora and param_dtype is not None:
        raise ValueError(
            f"param_dtype={param_dtype} is for full fine-tuning; load the frozen base in that dtype"
        )
    _check_equal(model)
    if lora or (world() == 1 and param_dtype is None):
        return model
    if not torch_dist.is_initialized():
        torch_dist.init_process_group(_backend(), store=torch_dist.HashStore(), rank=0, world_size=1)
    mesh = torch_dist.init_device_mesh(device().type, (world(),))
    # Inputs stay as the model made them: casting them would round the rotary tables to bf16.
    policy = MixedPrecisionPolicy(
        param_dtype, torch.float32 if param_dtype else None, cast_forward_inputs=False
    )
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def backward(loss: Tensor, model: nn.Module | None = None, *, last: bool = True) -> None:
    """Backward of this rank's part of the global loss: local sum over global count.

    model, last  a sharded model reduces its gradients in the last micro-batch only, and holds whole ones
                 until then; without model it reduces in each: the same gradients, more traffic, less memory
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    (loss * world()).backward()


def sync_grads(model: nn.Module) -> None:
    """After the last backward: average the gradients of a replicated model (a sharded one has done so).

    A parameter without a gradient here but with one elsewhere counts as zero; without one anywhere it keeps
    None.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, FSDPModule):
        assert any(p.grad is not None for p in params), (
            "no gradients: was the last backward called with last=False?"
        )
        return
    if world() == 1:
        return
    for bucket in _buckets(params):
        _average_grads(bucket)


def clip_grad_norm(params, max_norm: float) -> float:
    """Scale the gradients so that their norm over all ranks is at most max_norm; return the norm before.

    params    parameters of one model, after sync_grads
    max_norm  inf only measures
    returns   the global 2-norm, equal on every rank; gradients are left alone if it is not finite
    """
    params = [p for p in params if p.grad is not None]
    squares = 0.0
    for sharded in (False, True):  # plain and sharded tensors do not mix in one norm
        grads = [p.grad for p in params if isinstance(p.grad, DTensor) == sharded]
        if grads:
            norm = nn.utils.get_total_norm(grads)
            squares += (norm.full_tensor() if sharded else norm).item() ** 2
    total = squares**0.5
    if max_norm < total < float("inf"):
        for p in params:
            p.grad.mul_(max_norm / total)
    return total


@contextlib.contextmanager
def gathered(model: nn.Module):
    """Inside, every rank holds the whole weights of model, and forward passes are no collectives.

    For the rollout: ranks may run different numbers of forwards, without gradient. Entering is a collective.
    The weights' memory differs from one entry to the next, so CUDA graphs do not outlive the block.
    """
    if not isinstance(model, FSDPModule):
        yield model
        return
    parts = [model, *model.model.layers]
    for part in parts:
        part.unshard()
    model.set_reshard_after_forward(False)
    try:
        yield model
    finally:
        model.set_reshard_after_forward(True)
        model.set_reshard_after_forward(False, recurse=False)  # the rest is needed again at once in backward
        for part in parts:
            part.reshard()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer as a plain CPU tensor, on rank 0; {} on the others. A collective.

    Names of one tied parameter share one tensor. What lies whole on the CPU is returned itself, not a copy.
    """
    state, seen = {}, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            whole = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
            seen[id(value)] = whole.cpu() if is_main() else None
        state[name] = seen[id(value)]
    return state if is_main() else {}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # objects and counts go through gloo


def _check_equal(model):
    """Fail where ranks loaded different files or drew different adapters: averaging would hide it."""
    if world() == 1:
        return
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # sums of bit patterns are exact
    mine = [p.detach().view(ints[p.element_size()]).sum(dtype=torch.int64).item() for p in model.parameters()]
    for other, sums in enumerate(gather_objects([mine])):
        differ = [n for (n, _), a, b in zip(model.named_parameters(), mine, sums, strict=True) if a != b]
        if differ:
            raise ValueError(
                f"ranks {rank()} and {other} hold different weights ({differ[0]}, {len(differ)} in all); "
                "seed model and adapters alike on every rank, and load one folder"
            )


def _buckets(params):
    """Runs of params of one dtype with about BUCKET elements."""
    bucket: list = []
    for p in sorted(params, key=lambda p: str(p.dtype)):  # stable, so the same on every rank
        if bucket and (p.dtype != bucket[0].dtype or sum(q.numel() for q in bucket) + p.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


def _average_grads(params):
    """Replace each p.grad by its mean over ranks, in one all-reduce."""
    has = params[0].new_tensor(
        [float(p.grad is not None) for p in params]
    )  # (len(params),) 1 = has a gradient
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([has, *(g.flatten() for g in grads)])  # (len(params) + elements,)
    torch_dist.all_reduce(flat)
    sizes = [len(params), *(p.numel() for p in params)]
    has, *means = torch.split(flat, sizes)
    for p, anywhere, mean in zip(params, has.tolist(), means, strict=True):
        p.grad = (mean / world()).view_as(p) if anywhere else None
