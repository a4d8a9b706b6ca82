"""Attention of one new token per row over the cache, the shared prompt of a group read once per group.

o_r = sum_c softmax_c(q_r . k_c / sqrt(E)) v_c over the tokens of the row's prefix (if any), then of its
suffix

A group of rows forked from one prompt has one copy of the prompt's keys and values. `_decode_partial` runs
once over the prefixes, where the rows of a group are the rows of one matrix product, and once over the
suffixes, one row each; every program covers SPLIT cache tokens of one key/value head and leaves (max, sum,
weighted values) in fp32. `_decode_merge` combines them. The split does not depend on the batch, so a row's
bits do not depend on its neighbours.

Bytes read per step and layer, 2 J E each token at bf16: sum of suffixes + one prefix per group, instead of
one per row. Qwen3-4B, 64 rows in groups of 8, prompt 4096, suffix 512: 11.98 -> 4.12 ms a step at 4.8 TB/s
(arithmetic, docs/kernels.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import INTERPRET, jit, runs_triton, tl, triton

SPLIT = 256  # cache tokens per program of _decode_partial
# By bytes per element; BN is cache tokens per step of its loop. The largest without spills (docs/kernels.md).
TILES = {
    2: {"BN": 64, "num_warps": 4, "num_stages": 3},
    4: {"BN": 16, "num_warps": 8, "num_stages": 2},
}
if INTERPRET:  # where an operation costs the same at any width
    TILES = {size: how | {"BN": SPLIT // 2} for size, how in TILES.items()}
MAX_HEADS = 64  # query heads per program, at most: rows of a group times H / J
LOG2E = math.log2(math.e)
LOW = -1e30  # stands for -inf: inf - inf never arises


@dataclass(slots=True)
class Prefix:
    """Keys and values that several rows share, stored once."""

    k: Tensor  # (slots, J, P, E) any strides, last contiguous
    v: Tensor  # (slots, J, P, E)
    lengths: Tensor  # (groups,) int32, tokens of each prefix, <= P; 0: none
    members: Tensor  # (groups, K) int32, rows of q that share it, padded with -1; no row is in two groups
    slots: Tensor | None = None  # (groups,) int32, where in k each prefix lies; None: group i in slot i


def decode_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    slots: Tensor,
    starts: Tensor | None = None,
    prefix: Prefix | None = None,
) -> Tensor:
    """Attention by its definition, row by row, in the inputs' dtype; the meaning of `decode`."""
    out = torch.zeros_like(q)
    owner = {} if prefix is None else _owners(prefix)
    for row in range(q.shape[0]):
        slot, start = int(slots[row]), 0 if starts is None else int(starts[row])
        own = slice(start, start + int(lengths[row]))
        keys, values = k[slot, :, own], v[slot, :, own]  # (J, length, E)
        if row in owner:
            group, shared = owner[row], int(prefix.lengths[owner[row]])
            at = group if prefix.slots is None else int(prefix.slots[group])
            keys = torch.cat([prefix.k[at, :, :shared], keys], dim=1)
            values = torch.cat([prefix.v[at, :, :shared], values], dim=1)
        if keys.shape[1]:
            heads = q[row].view(keys.shape[0], -1, q.shape[-1])  # (J, H / J, E)
            probs = (heads @ keys.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(dim=-1)
            out[row] = (probs @ values).reshape(q.shape[1:])
    return out


def _owners(prefix: Prefix) -> dict[int, int]:
    return {row: group for group, rows in enumerate(prefix.members.tolist()) for row in rows if row >= 0}


@jit
def _decode_partial(
    q_ptr,  # (R, H, E) queries, contiguous
    k_ptr,  # (slots, J, C, E)
    v_ptr,  # (slots, J, C, E), strides of k
    lengths_ptr,  # (streams,) int32, cache tokens to attend to
    slots_ptr,  # (streams,) int32, which slot a stream reads
    starts_ptr,  # (streams,) int32, from which token of it on
    members_ptr,  # (streams, K) int32, rows of q that read it, -1 for none
    m_ptr,  # (R, H, splits) fp32, out: maximum score of the split, log2 units
    s_ptr,  # (R, H, splits) fp32, out: sum of 2^(score - m), 0 where the split is empty
    o_ptr,  # (R, H, splits, E) fp32, out: sum of 2^(score - m) v; not written where the split is empty
    H,
    K,
    splits,  # of the whole buffer: prefixes' and suffixes'
    first_split,  # where this launch's splits begin
    stride_slot,
    stride_head,
    stride_token,
    scale,  # log2(e) / sqrt(E)
    PER_KV: tl.constexpr,  # H / J
    E: tl.constexpr,
    LOW: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,  # query heads per program, >= 16
    BN: tl.constexpr,
    BE: tl.constexpr,  # E rounded up to a power of two
    UP: tl.constexpr,  # convert to fp32 before products: the interpreter has no bf16
):
    per_stream = tl.cdiv(K * PER_KV, ROWS)
    stream = tl.program_id(0) // per_stream
    head_kv = tl.program_id(1)
    split = tl.program_id(2)
    # Query heads of this program: member i // PER_KV of the stream, its head i % PER_KV of this key/value
    # head.
    i = tl.program_id(0) % per_stream * ROWS + tl.arange(0, ROWS)
    row = tl.load(members_ptr + stream * K + i // PER_KV, mask=i < K * PER_KV, other=-1)
    head = head_kv * PER_KV + i % PER_KV
    query = row.to(tl.int64) * H + head  # index of (row, head)
    e = tl.arange(0, BE)
    q = tl.load(
        q_ptr + query[:, None] * E + e[None, :], mask=(row >= 0)[:, None] & (e < E)[None, :], other=0.0
    )
    if UP:
        q = q.to(tl.float32)
    length = tl.load(lengths_ptr + stream)
    offset = tl.load(slots_ptr + stream).to(tl.int64) * stride_slot + head_kv.to(tl.int64) * stride_head
    offset += tl.load(starts_ptr + stream).to(tl.int64) * stride_token
    m = tl.full((ROWS,), LOW, tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, BE), tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length), BN):
        token = start + tl.arange(0, BN)
        at = offset + token.to(tl.int64)[:, None] * stride_token + e[None, :]
        inside = (token < length)[:, None] & (e < E)[None, :]
        # What lies past a row's length was never written: it may be NaN, and 0 * NaN is NaN.
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        if UP:
            k, v = k.to(tl.float32), v.to(tl.float32)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        x = tl.where((token < length)[None, :], x, LOW)
        m_new = tl.maximum(m, tl.max(x, axis=1))
        grow = tl.exp2(m - m_new)
        p = tl.exp2(x - m_new[:, None])
        s = s * grow + tl.sum(p, axis=1)
        o = o * grow[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    out = query * splits + first_split + split
    tl.store(m_ptr + out, m, mask=row >= 0)
    tl.store(s_ptr + out, s, mask=row >= 0)
    written = (row >= 0) & (s > 0)
    tl.store(o_ptr + out[:, None] * E + e[None, :], o, mask=written[:, None] & (e < E)[None, :])


@jit
def _decode_merge(
    m_ptr,  # (R, H, splits) fp32
    s_ptr,  # (R, H, splits) fp32
    o_ptr,  # (R, H, splits, E) fp32
    out_ptr,  # (R, H, E), out
    splits,
    E: tl.constexpr,
    LOW: tl.constexpr,
    BE: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)  # index of (row, head)
    e = tl.arange(0, BE)
    m = LOW
    s = 0.0
    o = tl.zeros((BE,), tl.float32)
    for split in range(splits):
        s_split = tl.load(s_ptr + query * splits + split)
        m_split = tl.where(s_split > 0, tl.load(m_ptr + query * splits + split), LOW)
        written = (s_split + tl.zeros((BE,), tl.float32)) > 0
        o_split = tl.load(o_ptr + (query * splits + split) * E + e, mask=(e < E) & written, other=0.0)
        m_new = tl.maximum(m, m_split)
        grow, grow_split = tl.exp2(m - m_new), tl.exp2(m_split - m_new)
        s = s * grow + s_split * grow_split
        o = o * grow + o_split * grow_split
        m = m_new
    o = tl.where(s > 0, o / tl.where(s > 0, s, 1.0), 0.0)
    tl.store(out_ptr + query * E + e, o.to(out_ptr.dtype.element_ty), mask=e < E)


def _partial(q, k, v, lengths, slots, starts, members, longest: int, partials, first_split: int) -> None:
    """One launch of _decode_partial over streams (prefixes or suffixes); k and v (slots, J, C, E)."""
    assert k.stride() == v.stride() and k.stride(-1) == 1
    (_, H, E), J = q.shape, k.shape[1]
    streams, K = members.shape
    heads = K * (H // J)
    rows = min(MAX_HEADS, max(16, triton.next_power_of_2(heads)))
    _decode_partial[streams * triton.cdiv(heads, rows), J, triton.cdiv(longest, SPLIT)](
        q, k, v, lengths, slots, starts, members, *partials, H, K, partials[0].shape[2], first_split,
        *k.stride()[:3], LOG2E / math.sqrt(E), PER_KV=H // J, E=E, LOW=LOW, SPLIT=SPLIT, ROWS=rows,
        **TILES[k.element_size()], BE=max(16, triton.next_power_of_2(E)), UP=INTERPRET,
    )  # fmt: skip


def _decode_triton(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, slots: Tensor, starts: Tensor, longest: int, prefix
) -> Tensor:
    R, H, E = q.shape
    q = q.contiguous()
    prefix_splits = 0 if prefix is None else triton.cdiv(prefix.k.shape[2], SPLIT)
    splits = prefix_splits + triton.cdiv(longest, SPLIT)
    m = torch.empty(R, H, splits, dtype=torch.float32, device=q.device)
    s = torch.zeros_like(m)  # rows without a prefix write nothing in its splits
    partials = m, s, torch.empty(R, H, splits, E, dtype=torch.float32, device=q.device)
    if prefix is not None:
        where = _count(len(prefix.lengths), q.device) if prefix.slots is None else prefix.slots
        streams = prefix.lengths, where, torch.zeros_like(where), prefix.members
        streams = [x.contiguous() for x in streams]
        _partial(q, prefix.k, prefix.v, *streams, prefix.k.shape[2], partials, 0)
    alone = _count(R, q.device)[:, None]  # each row its own only member
    _partial(q, k, v, lengths, slots, starts, alone, longest, partials, prefix_splits)
    out = torch.empty_like(q)
    _decode_merge[(R * H,)](
        *partials, out, splits, E=E, LOW=LOW, BE=max(16, triton.next_power_of_2(E)), num_warps=1
    )
    return out


def _count(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=device)


@torch.compiler.disable
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    slots: Tensor | None = None,
    starts: Tensor | None = None,
    longest: int | None = None,
    prefix: Prefix | None = None,
) -> Tensor:
    """Attend from one query per row to the row's cached tokens: its prefix's, if it has one, then its own.

    q        (R, H, E) queries after RoPE, any float dtype
    k, v     (slots, J, C, E) the cache, strides equal and the last one 1; H a multiple of J. What lies
             outside a row's own tokens is not read
    lengths  (R,) int32, each row's own tokens in the cache, the new one included
    slots    (R,) int32, the cache slot of each row; None: row i reads slot i
    starts   (R,) int32, index of each row's first own token in its slot; None: 0
    longest  no length exceeds it; None: C. It bounds the programs, not what they read
    prefix   keys and values shared by groups of rows, or None; may lie in the same cache
    returns  (R, H, E); zeros for a row without any token
    raises   ValueError for shapes that do not fit
    """
    if q.shape[1] % k.shape[1] or k.shape != v.shape or k.shape[3] != q.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: wanted (R, H, E), (slots, J, C, E)"
        )
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"lengths {tuple(lengths.shape)}: wanted ({q.shape[0]},), one per row")
    if slots is None:
        slots = _count(q.shape[0], q.device)
    if not runs_triton(q):
        return decode_ref(q, k, v, lengths, slots=slots, starts=starts, prefix=prefix)
    if not len(q):
        return torch.empty_like(q)
    starts = torch.zeros_like(slots) if starts is None else starts
    lengths, slots, starts = (x.int().contiguous() for x in (lengths, slots, starts))
    return _decode_triton(q, k, v, lengths, slots, starts, longest or k.shape[2], prefix)
