"""The KV cache of the rows being sampled, and the ways a model attends to it: decode and prefill.

Token i of a row lies at index i of the row's slot, or, where rows share their first tokens, of the slot of
one of them. Leaves out paging: a slot has room for max_len tokens, shared or not. Shape letters:
kernels/__init__.py.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import runs_triton
from kernels.decode import Prefix, decode


def free_bytes(device: torch.device) -> int:
    """Memory that a new allocation can have: of the GPU, or of this machine within its container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


class Cache:
    """Keys and values of `num_slots` rows: layers[i] = (keys, values), (slots, J, C, E) both."""

    def __init__(self, config, *, rows: int | None, max_len: int, dtype: torch.dtype, device: torch.device):
        """rows: slots, or None for as many as fit in 80 % of the free memory, at most 1024.

        raises  ValueError if the slots do not fit in the free memory
        """
        token_bytes = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize  # of one layer
        row_bytes = config.num_layers * max_len * token_bytes
        free = free_bytes(device)
        if rows is None:
            rows = max(1, min(1024, int(0.8 * free) // row_bytes))
        if rows * row_bytes > free:
            raise ValueError(
                f"rows={rows} x max_len={max_len} needs {rows * row_bytes / 1e9:.1f} GB of cache, "
                f"{free / 1e9:.1f} free; lower rows or max_len"
            )
        self.num_slots, self.dtype = rows, dtype
        # whether decode steps run kernels/decode.py, and forks share tokens
        self.kernels = runs_triton(torch.empty(0, device=device))
        self.segment_overhead = 400_000 // token_bytes  # tokens read in about 30 us, at 12 GB/s
        shape = (rows, config.num_kv_heads, max_len, config.head_dim)
        self.layers = [
            (_zeros(shape, dtype, device, by_channel=not self.kernels), _zeros(shape, dtype, device))
            for _ in range(config.num_layers)
        ]

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of one slot into another."""
        for keys, values in self.layers:
            keys[target, :, start:stop] = keys[source, :, start:stop]
            values[target, :, start:stop] = values[source, :, start:stop]


def _zeros(shape, dtype, device, *, by_channel: bool = False) -> Tensor:
    """On a CPU, pages that no row has reached take no memory. by_channel: as (slots, J, E, C)."""
    if by_channel and device.type == "cpu":
        return torch.zeros(*shape[:2], shape[3], shape[2], dtype=dtype).transpose(2, 3)
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(slots=True)
class Segment:
    """Neighbouring slots whose attention is one matrix product, up to the longest length among them."""

    start: int  # the segment's first row in the decode batch
    stop: int  # and the one after its last
    low: int  # first slot
    high: int  # slot after the last; high - low > stop - start where slots between are not decoded
    longest: int  # cache tokens attended to


def plan_segments(slots: list[int], lengths: list[int], *, overhead: int) -> list[Segment]:
    """Cut the decoded slots (rising) into segments, so that little padding is read and few products start.

    lengths   tokens attended to, a slot each
    overhead  what one more segment costs, in cache tokens of one row
    """
    segments = []
    start, longest = 0, lengths[0]
    for i in range(1, len(slots)):
        joined = (slots[i] + 1 - slots[start]) * max(longest, lengths[i])
        apart = (slots[i - 1] + 1 - slots[start]) * longest + lengths[i] + overhead
        if joined > apart:
            segments.append(Segment(start, i, slots[start], slots[i - 1] + 1, longest))
            start, longest = i, lengths[i]
        elif lengths[i] > longest:
            longest = lengths[i]
    segments.append(Segment(start, len(slots), slots[start], slots[-1] + 1, longest))
    return segments


def decode_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One query token a row against its cache, (R, H, E).

    q (R, H, E); k and v (R, J, C, E); bias (R, 1, 1, C), -inf where a row does not look. The H / J query
    heads that share a key head are the rows of one matrix product. On a CPU plain products are about twice as
    fast as SDPA, given keys stored as (R, J, E, C): 0.8 against 2.4 ms for R=32, H=9, J=3, E=64, C=400.
    """
    R, H, E = q.shape
    q = q.view(R, k.shape[1], -1, E)  # (R, J, K, E)
    if q.dtype == torch.float32 and q.device.type == "cpu":
        scores = torch.matmul(q * E**-0.5, k.transpose(2, 3))  # (R, J, K, C)
        scores += bias
        out = torch.matmul(torch.softmax(scores, -1, out=scores), v)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return out.reshape(R, H, E)


class Decode:
    """`attend` for one new token a row: stores its key and value, then attends to the row's cache."""

    def __init__(self, cache: Cache, slots: Tensor, positions: Tensor, segments: list[Segment]):
        """slots, positions (R,) int64: rising slots, and the index at which each new token is stored."""
        self.cache, self.slots, self.positions, self.segments = cache, slots, positions, segments
        self.members = [self._members(s) for s in segments]
        self.biases = [self._bias(s, m) for s, m in zip(segments, self.members, strict=True)]

    def _members(self, s: Segment) -> Tensor | None:
        """Places of a segment's rows among its slots, or None when every slot is decoded."""
        return None if s.high - s.low == s.stop - s.start else self.slots[s.start : s.stop] - s.low

    def _bias(self, s: Segment, members: Tensor | None) -> Tensor:
        last = self.positions[s.start : s.stop]
        if members is not None:
            last = last.new_zeros(s.high - s.low).index_copy_(0, members, last)
        hidden = torch.arange(s.longest, device=last.device) > last[:, None]  # (slots, C)
        bias = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=last.device)
        bias.masked_fill_(hidden, -math.inf)
        return bias[:, None, None, :]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.layers[layer]
        keys[self.slots, :, self.positions] = k
        values[self.slots, :, self.positions] = v
        outs = [self._segment(s, i, q[s.start : s.stop], keys, values) for i, s in enumerate(self.segments)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _segment(self, s: Segment, i: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        members = self.members[i]
        if members is not None:
            q = q.new_zeros(s.high - s.low, *q.shape[1:]).index_copy_(0, members, q)
        keys, values = keys[s.low : s.high, :, : s.longest], values[s.low : s.high, :, : s.longest]
        out = decode_attention(q, keys, values, self.biases[i])
        return out if members is None else out[members]


class DecodeShared:
    """As Decode, by kernels/decode.py: tokens that a group of rows shares are read once for all of them.

    A captured CUDA graph keeps shapes, `longest` and `longest_shared`; what the tensors say may change.
    """

    def __init__(
        self, cache: Cache, positions: Tensor, starts: Tensor, table: Tensor, *, reach: tuple[int, int]
    ):
        """Row i is slot i. Integers on the device:

        positions  (R,) index at which each row's new token is stored
        starts     (R,) index of each row's first token in its own slot, 0 without a share
        table      (groups, 2 + K) slot, number of shared tokens, and K rows that read them, -1 for none
        reach      most tokens that a row attends to, in its own slot and of those it shares
        """
        self.cache, self.positions = cache, positions
        self.longest, self.longest_shared = reach
        self.slots = torch.arange(len(positions), device=positions.device)
        self.own = {  # converted here, once for all layers
            "lengths": (positions + 1 - starts).int(), "slots": self.slots.int(), "starts": starts.int(),
        }  # fmt: skip
        self.shared = None
        if len(table):
            slots, lengths, members = table.int().split([1, 1, table.shape[1] - 2], dim=1)
            self.shared = {
                "lengths": lengths.flatten(),
                "members": members.contiguous(),
                "slots": slots.flatten(),
            }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.layers[layer]
        keys[self.slots, :, self.positions] = k
        values[self.slots, :, self.positions] = v
        prefix = None
        if self.shared is not None:
            reach = slice(0, self.longest_shared)
            prefix = Prefix(keys[:, :, reach], values[:, :, reach], **self.shared)
        return decode(q, keys, values, **self.own, longest=self.longest, prefix=prefix)


@dataclass(slots=True)
class Piece:
    """Tokens of one row inside a packed prefill."""

    slot: int  # cache slot
    cached: int  # tokens of the row that are cached already
    ids: list[int]  # the tokens to cache
    shared_slot: int = 0  # where the first `shared` of its cached tokens lie instead
    shared: int = 0


class Prefill:
    """`attend` for packed tokens of several rows: stores keys and values; a token sees its own row so far."""

    def __init__(self, cache: Cache, pieces: list[Piece], device: torch.device):
        self.cache, self.pieces = cache, pieces
        self.biases = [self._bias(len(p.ids), p.cached, device) if p.cached else None for p in pieces]

    def _bias(self, num: int, cached: int, device: torch.device) -> Tensor:
        """(num, cached + num): query i sees the prefix and the new tokens up to its own."""
        hidden = torch.full((num, cached + num), -math.inf, dtype=self.cache.dtype, device=device)
        return hidden.triu_(cached + 1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.layers[layer]
        out = torch.empty_like(q)
        start = 0
        for piece, bias in zip(self.pieces, self.biases, strict=True):
            stop, end = start + len(piece.ids), piece.cached + len(piece.ids)
            rk, rv = k[start:stop].transpose(0, 1), v[start:stop].transpose(0, 1)  # (J, n, E)
            keys[piece.slot, :, piece.cached : end] = rk
            values[piece.slot, :, piece.cached : end] = rv
            if piece.cached:
                rk, rv = _row(keys, piece, end).contiguous(), _row(values, piece, end)  # (J, C, E)
            J, K = rk.shape[0], q.shape[1] // rk.shape[0]
            rq = q[start:stop].unflatten(1, (J, K)).permute(2, 1, 0, 3)  # (K, J, n, E)
            a = F.scaled_dot_product_attention(
                rq, rk.expand(K, -1, -1, -1), rv.expand(K, -1, -1, -1),
                attn_mask=bias, is_causal=bias is None,
            )  # fmt: skip
            out[start:stop] = a.permute(2, 1, 0, 3).flatten(1, 2)
            start = stop
        return out


def _row(cache: Tensor, piece: Piece, end: int) -> Tensor:
    """Tokens [0, end) of a piece's row, (J, end, E), from a layer's keys or values."""
    own = cache[piece.slot, :, piece.shared : end]
    return torch.cat([cache[piece.shared_slot, :, : piece.shared], own], 1) if piece.shared else own
