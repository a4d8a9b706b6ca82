"""Log-probs under a frozen reference: scored once, stored, and checked to belong to this model and this data.

The reference of a preference run is the policy as the stage finds it, whatever adapters it has then, so that
no second model is kept and no adapter is switched off. `score` packs as training does: where the packing is
the same too, a policy that has not moved gives the stored numbers bit for bit, and DPO starts at ln 2.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanoplan import dist
from nanoplan.batch import Batch, pack, pack_pairs, pad_micro_batches
from nanoplan.log import write_json
from nanoplan.model import Packed
from nanoplan.pairs import Pair
from nanoplan.trajectory import Trajectory


@dataclass(slots=True)
class Reference:
    model: str  # fingerprint of the weights that scored
    data: str  # fingerprint of the pairs, nanoplan.pairs.fingerprint
    chosen: list[float]  # (P,) nats, summed log-probs of the chosen completions
    rejected: list[float]  # (P,) nats
    mismatched: list[float]  # (P,) nats, of nanoplan.pairs.mismatches; empty unless KTO needs them

    def save(self, path: Path) -> None:
        """Write it in one piece, on rank 0."""
        if dist.is_main():
            write_json(path, asdict(self))
        dist.barrier()


def load(path: Path, *, model: str, data: str) -> Reference:
    """A stored reference.

    raises  ValueError if there is none, it is not whole, or it belongs to another model or other pairs
    """
    try:
        stored = Reference(**json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; leave it out to score the reference again") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no stored reference ({error}); delete it to score it again") from None
    for name, wanted in (("model", model), ("data", data)):
        if getattr(stored, name) != wanted:
            what = "other weights" if name == "model" else "other pairs, or in another order"
            raise ValueError(
                f"{path} was scored on {what} ({name} {getattr(stored, name)}, here {wanted}); delete it to "
                "score it again"
            )
    return stored


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """A hash of all weights, the same for any sharding: sums of their bit patterns. A collective."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    names, sums = [], []
    for name, p in model.named_parameters():
        own = (p.to_local() if isinstance(p, DTensor) else p).detach()
        whole = isinstance(p, DTensor) or dist.is_main()  # a replicated weight counts once
        bits = own.contiguous().view(ints[own.element_size()]).long() if whole else own.new_zeros(0).long()
        names.append(f"{name} {p.dtype} {tuple(p.shape)}")
        sums.append([int(bits.sum()), int((bits * bits).sum())])
    mod = 2**64
    parts = dist.gather_objects([sums])
    total = [[sum(part[i][k] for part in parts) % mod for k in (0, 1)] for i in range(len(names))]
    return hashlib.blake2b(repr((names, total)).encode(), digest_size=16).hexdigest()


def sequence_sums(logp: Tensor, batch: Batch) -> Tensor:
    """Sum of logp (N,) over each sequence of the batch, (S,); of a dummy's, (0,)."""
    sums = logp.new_zeros(len(batch.lengths)).index_add(0, batch.sequence, logp)
    return sums[: len(batch.index)]


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probs (N,) of the batch's targets."""
    attend = Packed(batch.cu_seqlens, batch.max_len)
    return model(batch.ids, batch.positions, attend, batch.targets, rows=batch.rows)[0]


@torch.no_grad()
def score_batches(model: nn.Module, batches: list[Batch]) -> dict[int, float]:
    """Index of each sequence of this rank's batches -> its summed log-prob. All ranks call it together."""
    device = dist.device()
    batches = pad_micro_batches(batches, dist.max_over_ranks(max(1, len(batches))), device=device)
    found: dict[int, float] = {}
    for batch in batches:
        sums = sequence_sums(forward(model, batch), batch)
        found |= zip(batch.index, sums.tolist(), strict=True)
    return found


def score_pairs(
    model: nn.Module, pairs: list[Pair], steps: list[list[int]], *, max_tokens: int
) -> tuple[list[float], list[float]]:
    """Summed log-probs of all chosen and of all rejected completions, (P,) each, on every rank.

    steps  this rank's pairs of each step, as training will pack them; over all ranks, each pair once
    """
    mine: list[tuple[int, float]] = []
    for step in steps:
        batches = pack_pairs([pairs[i].sides for i in step], max_tokens=max_tokens, device=dist.device())
        found = score_batches(model, batches)
        mine += [(2 * step[index // 2] + index % 2, value) for index, value in found.items()]
    values = dict(dist.gather_objects(mine))
    assert len(values) == 2 * len(pairs), (len(values), len(pairs))
    return [values[2 * i] for i in range(len(pairs))], [values[2 * i + 1] for i in range(len(pairs))]


def score_each(
    model: nn.Module, trajectories: list[Trajectory], steps: list[list[int]], *, max_tokens: int
) -> list[float]:
    """The same for single trajectories."""
    mine: list[tuple[int, float]] = []
    for step in steps:
        own = [trajectories[i] for i in step]
        found = score_batches(model, pack(own, [1.0] * len(own), max_tokens=max_tokens, device=dist.device()))
        mine += [(step[index], value) for index, value in found.items()]
    values = dict(dist.gather_objects(mine))
    return [values[i] for i in range(len(trajectories))]
