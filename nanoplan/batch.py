"""Pack trajectories into flat micro-batches: no padding, and nothing that no gradient needs.

Zero-advantage trajectories are left out before the trunk; of the others, only the positions that predict a
sampled token reach the head. What follows the last sampled token is cut off. This file does not decide what a
token weighs (nanoplan.losses) or how many micro-batches other ranks run (nanoplan.dist).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanoplan.trajectory import Trajectory


@dataclass(slots=True)
class Batch:
    ids: Tensor  # (T,) int64, what the model reads, sequences one after the other
    positions: Tensor  # (T,) int64, from 0 in each sequence
    cu_seqlens: Tensor  # (S + 1,) int32, first row of each sequence, then T
    max_len: int  # tokens of the longest sequence
    rows: Tensor  # (N,) int64 into T: the row whose output predicts a sampled token; ascending
    targets: Tensor  # (N,) int64, the sampled token
    old_logp: Tensor  # (N,) fp32, nats, what the sampler said
    advantages: Tensor  # (N,) fp32, of the token's trajectory
    sequence: Tensor  # (N,) int64 into S: which sequence the token belongs to
    lengths: Tensor  # (S,) int64, sampled tokens of each sequence
    index: list[int]  # (S,) which trajectory given to `pack` each sequence is; empty for a dummy


def pack(
    trajectories: list[Trajectory],
    advantages: list[float],
    *,
    max_tokens: int,
    device: str | torch.device = "cpu",
    keep_zero: bool = False,
) -> list[Batch]:
    """Pack trajectories into few micro-batches of at most max_tokens and about equal size. Deterministic.

    advantages   one per trajectory
    max_tokens   tokens of a micro-batch, prompts and observations included
    keep_zero    keep trajectories of advantage 0, which a KL term still moves
    returns      batches in which sequences keep the order given; [] when nothing is left to train on
    raises       ValueError when one trajectory alone is longer than max_tokens or starts with a sampled
                 token, and for advantages that are not finite or not one per trajectory
    """
    if len(trajectories) != len(advantages):
        raise ValueError(
            f"{len(trajectories)} trajectories and {len(advantages)} advantages: wanted one each"
        )
    lengths: dict[int, int] = {}  # trajectory -> tokens the trunk reads: all before the last sampled one
    for i, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        assert len(trajectory.ids) == len(trajectory.sampled) == len(trajectory.logp)
        if advantage - advantage != 0:
            raise ValueError(
                f"advantage {i} is {advantage}: wanted a finite number; leave judge errors out as 0.0"
            )
        if not any(trajectory.sampled) or (advantage == 0 and not keep_zero):
            continue
        if trajectory.sampled[0]:
            raise ValueError(
                f"trajectory {i} starts with a sampled token: nothing predicts it; open with a prompt"
            )
        lengths[i] = _num_read(trajectory)
        if lengths[i] > max_tokens:
            raise ValueError(
                f"trajectory {i} has {lengths[i]} tokens, more than max_tokens={max_tokens}; raise it or "
                "lower the rollout's total token budget"
            )
    groups = balance(lengths, max_tokens=max_tokens)
    return [_batch(group, trajectories, advantages, lengths, device) for group in groups]


def pack_pairs(
    pairs: list[tuple[Trajectory, Trajectory]], *, max_tokens: int, device: str | torch.device = "cpu"
) -> list[Batch]:
    """Pack pairs as `pack` does, the two of a pair side by side in one micro-batch. Deterministic.

    returns  batches whose sequences are chosen, rejected, chosen, rejected, ...; sequence s is side s % 2 of
             a pair, and index[s] is 2 * the pair's place in `pairs` + side. advantages are 0
    raises   ValueError when a pair alone is longer than max_tokens, a side has nothing sampled, or starts
             with a sampled token
    """
    sides = [side for pair in pairs for side in pair]
    for i, side in enumerate(sides):
        assert len(side.ids) == len(side.sampled) == len(side.logp)
        if not any(side.sampled) or side.sampled[0]:
            fault = "starts with a sampled token" if any(side.sampled) else "has no sampled token"
            raise ValueError(f"{('chosen', 'rejected')[i % 2]} of pair {i // 2} {fault}; leave the pair out")
    lengths = {i: _num_read(side) for i, side in enumerate(sides)}
    both = {i: lengths[2 * i] + lengths[2 * i + 1] for i in range(len(pairs))}
    longest = max(both, key=both.__getitem__, default=0)
    if both and both[longest] > max_tokens:
        raise ValueError(
            f"pair {longest} has {both[longest]} tokens, more than max_tokens={max_tokens}; raise it"
        )
    groups = [
        [2 * i + side for i in group for side in (0, 1)] for group in balance(both, max_tokens=max_tokens)
    ]
    return [_batch(group, sides, [0.0] * len(sides), lengths, device) for group in groups]


def _num_read(trajectory: Trajectory) -> int:
    """Tokens that the trunk reads: all before the last sampled one."""
    return max(t for t, sampled in enumerate(trajectory.sampled) if sampled)


def balance(lengths: dict[int, int], *, max_tokens: int) -> list[list[int]]:
    """Split keys into groups of at most max_tokens in all: longest first, each into the emptiest group."""
    order = sorted(lengths, key=lambda i: (-lengths[i], i))
    count = -(-sum(lengths.values()) // max_tokens)
    while True:
        groups, sizes = [[] for _ in range(count)], [0] * count
        for i in order:
            emptiest = min(range(count), key=sizes.__getitem__)
            if sizes[emptiest] + lengths[i] > max_tokens:
                break
            groups[emptiest].append(i)
            sizes[emptiest] += lengths[i]
        else:
            return sorted(sorted(group) for group in groups if group)
        count += 1


def _batch(group, trajectories, advantages, lengths, device) -> Batch:
    ids, positions, cu, rows, targets, old_logp, sequence, counts = [], [], [0], [], [], [], [], []
    for s, i in enumerate(group):
        trajectory, start = trajectories[i], cu[-1]
        ids += trajectory.ids[: lengths[i]]
        positions += range(lengths[i])
        cu.append(start + lengths[i])
        at = [t for t, sampled in enumerate(trajectory.sampled) if sampled]
        rows += [start + t - 1 for t in at]  # the output at t - 1 predicts token t
        targets += [trajectory.ids[t] for t in at]
        old_logp += [trajectory.logp[t] for t in at]
        sequence += [s] * len(at)
        counts.append(len(at))

    def tensor(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        ids=tensor(ids, torch.int64),
        positions=tensor(positions, torch.int64),
        cu_seqlens=tensor(cu, torch.int32),
        max_len=max(lengths[i] for i in group),
        rows=tensor(rows, torch.int64),
        targets=tensor(targets, torch.int64),
        old_logp=tensor(old_logp, torch.float32),
        advantages=tensor([advantages[group[s]] for s in sequence], torch.float32),
        sequence=tensor(sequence, torch.int64),
        lengths=tensor(counts, torch.int64),
        index=list(group),
    )


def pad_micro_batches(batches: list[Batch], count: int, *, device: str | torch.device = "cpu") -> list[Batch]:
    """Append dummies until there are `count` micro-batches, so that every rank runs the same number.

    A dummy is one token without targets: its loss is a sum over nothing, exactly 0, and its backward gives
    every parameter a gradient of zeros, so that a rank without work takes part in each collective.
    raises  ValueError when there are more than `count` already: dropping one would lose samples
    """
    if len(batches) > count:
        raise ValueError(f"{len(batches)} micro-batches but count={count}; count is the maximum over ranks")

    def zeros(n, dtype):
        return torch.zeros(n, dtype=dtype, device=device)

    def dummy() -> Batch:
        return Batch(
            ids=zeros(1, torch.int64),
            positions=zeros(1, torch.int64),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=device),
            max_len=1,
            rows=zeros(0, torch.int64),
            targets=zeros(0, torch.int64),
            old_logp=zeros(0, torch.float32),
            advantages=zeros(0, torch.float32),
            sequence=zeros(0, torch.int64),
            lengths=zeros(1, torch.int64),
            index=[],
        )

    return batches + [dummy() for _ in range(count - len(batches))]
