"""Batched sampling over a KV cache: rows open, fork, are extended with observed tokens, step and close.

One object owns what a row is: its ids that are not cached yet, its length, its cache slot and its seed. A row with one
uncached id decodes, in one batch with every other row named in the same `step`; a row with more is prefilled first,
packed with all other rows that wait for it. A row's tokens depend on its seed, its index and its logits alone: not on
its neighbours, on the number of rows or on the device.

Leaves out: stop tokens, budgets and text (rollout.py), speculative decoding, paging. Forks copy their prefix.
"""

import heapq
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of splitmix64
MASK64 = 2**64 - 1


# ---- noise and draw: pure functions


def mix64(x: np.ndarray) -> np.ndarray:
    """Scramble (n,) uint64 with splitmix64's finaliser (Steele et al. 2014); a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Two 32-bit keys for the token at `indices` (n,) of the rows seeded `seeds` (n,) uint64 -> (n, 2) int32."""
    keys = mix64(mix64(seeds) + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    keys = keys.view(np.uint32).reshape(-1, 2)
    keys[:, 1] |= 1  # the second key multiplies: odd, so that no bit is lost
    return keys.view(np.int32)


def id_hashes(num_ids: int) -> Tensor:
    """A fixed random-looking word for every vocabulary id -> (V,) int32."""
    return torch.from_numpy(mix64(np.arange(num_ids, dtype=np.uint64) + np.uint64(GOLDEN)).astype(np.uint32).view(np.int32))


def exponential_noise(keys: Tensor, hashes: Tensor) -> Tensor:
    """Minus one Exp(1) variable for each (key, id): log(1 - u) with u uniform in (0, 1).

    keys     (R, 2) int32 from `noise_keys`; hashes (V,) int32 from `id_hashes`
    returns  (R, V) fp32, strictly negative; the same integers on every device. u has 31 bits and is finest near 0,
             where the winners of a race are, so ids of probability 1e-9 keep their share
    """
    x = hashes[None, :] ^ keys[:, :1]  # (R, V) int32; products wrap
    x *= keys[:, 1:]
    x ^= x >> 15  # arithmetic shifts: the sign bit clears, 31 bits stay
    x *= -2073254261  # 0x846CA68B, from Wellons' lowbias32
    x ^= x >> 16
    return x.float().add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-24)).log1p_()


def keep_mask(p: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which ids stay when p (R, V) is filtered by top-k, then top-p, then min-p -> (R, V) bool; the best always stays.

    Order and meaning as in transformers: top-p adds up what top-k left, renormalised, and keeps the id that crosses it.
    """
    order = p.argsort(dim=-1, descending=True, stable=True)
    ranked = p.gather(-1, order)  # (R, V), best first
    keep = ranked >= min_p * ranked[:, :1]
    if top_k > 0:
        keep[:, top_k:] = False
        ranked[:, top_k:] = 0
    ranked /= ranked.sum(-1, keepdim=True)
    keep &= ranked.cumsum(-1) - ranked < top_p
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def draw(logits: Tensor, keys: Tensor, hashes: Tensor, *, temperature: float, top_k=0, top_p=1.0, min_p=0.0):
    """One id for each row by an exponential race (the Gumbel-max trick without its outer logarithm).

    logits   (R, V) fp32, overwritten; keys, hashes: see `exponential_noise`
    returns  ids (R,) int64, logp (R,) fp32 nats: of the unfiltered softmax(logits / temperature). Temperature 0 takes
             the best id and reports its log-prob at temperature 1
    """
    if temperature not in (0, 1):
        logits.mul_(1 / temperature)
    x = logits.sub_(logits.amax(-1, keepdim=True))  # (R, V) <= 0
    p = x.exp()
    lse = p.sum(-1).log()  # (R,)
    if temperature == 0:
        ids = x.argmax(-1)
    else:
        if top_k > 0 or top_p < 1 or min_p > 0:
            p *= keep_mask(p / p.sum(-1, keepdim=True), top_k=top_k, top_p=top_p, min_p=min_p)
        ids = p.div_(exponential_noise(keys, hashes)).argmin(-1)  # argmax of p / Exp(1) has distribution p
    return ids, x.gather(-1, ids[:, None])[:, 0] - lse


# ---- attention over the cache


@dataclass(slots=True)
class Segment:
    """Neighbouring slots whose attention is one matrix product, up to the longest length among them."""

    start: int  # the segment's first row in the decode batch
    stop: int  # and the one after its last
    low: int  # first slot
    high: int  # slot after the last; high - low > stop - start where slots between are not decoded
    longest: int  # cache tokens attended to


def plan_segments(slots: list[int], lengths: list[int], *, overhead: int) -> list[Segment]:
    """Cut the decoded slots (rising) into segments, so that little padding is read and few products are started.

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


def decode_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """One query token a row against its cache: q (R, H, E), k and v (R, J, C, E), bias (R, 1, 1, C) or None -> (R, H, E).

    The H/J query heads that share a key head are the rows of one matrix product. On the CPU plain products are twice
    as fast as SDPA, given k stored as (R, J, E, C).
    """
    R, H, E = q.shape
    q = q.view(R, k.shape[1], -1, E)  # (R, J, K, E)
    if q.dtype == torch.float32 and q.device.type == "cpu":
        scores = torch.matmul(q * E**-0.5, k.transpose(2, 3))  # (R, J, K, C)
        if bias is not None:
            scores += bias
        out = torch.matmul(scores.softmax(-1), v)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))
    return out.reshape(R, H, E)


class Decode:
    """`attend` for one new token a row: stores its key and value, then attends to the row's cache."""

    def __init__(self, cache, slots: Tensor, positions: Tensor, segments: list[Segment]):
        """slots, positions (R,) int64: rising slots, and the index at which each row's new token is stored."""
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
        bias = torch.zeros(hidden.shape, device=last.device).masked_fill_(hidden, -math.inf)
        return bias[:, None, None, :]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache[layer]
        keys[self.slots, :, self.positions] = k
        values[self.slots, :, self.positions] = v
        outs = [self._segment(s, i, q[s.start : s.stop], keys, values) for i, s in enumerate(self.segments)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _segment(self, s: Segment, i: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        members = self.members[i]
        if members is not None:
            q = q.new_zeros(s.high - s.low, *q.shape[1:]).index_copy_(0, members, q)
        out = decode_attention(q, keys[s.low : s.high, :, : s.longest], values[s.low : s.high, :, : s.longest], self.biases[i])
        return out if members is None else out[members]


@dataclass(slots=True)
class Piece:
    """Tokens of one row inside a packed prefill."""

    slot: int  # cache slot
    cached: int  # tokens of the row that are cached already
    ids: list[int]  # the tokens to cache


class Prefill:
    """`attend` for packed tokens of several rows: stores keys and values, each row attends to its own prefix and itself."""

    def __init__(self, cache, pieces: list[Piece], device: torch.device):
        self.cache, self.pieces = cache, pieces
        self.biases = [self._bias(len(p.ids), p.cached, device) if p.cached else None for p in pieces]

    @staticmethod
    def _bias(num: int, cached: int, device) -> Tensor:
        """(num, cached + num) fp32: query i sees the prefix and new tokens up to its own."""
        return torch.full((num, cached + num), -math.inf, device=device).triu_(cached + 1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache[layer]
        out = torch.empty_like(q)
        start = 0
        for piece, bias in zip(self.pieces, self.biases, strict=True):
            stop, end = start + len(piece.ids), piece.cached + len(piece.ids)
            rk, rv = k[start:stop].transpose(0, 1), v[start:stop].transpose(0, 1)  # (J, n, E)
            keys[piece.slot, :, piece.cached : end] = rk
            values[piece.slot, :, piece.cached : end] = rv
            if piece.cached:
                rk, rv = keys[piece.slot, :, :end].contiguous(), values[piece.slot, :, :end]  # (J, C, E)
            J, K = rk.shape[0], q.shape[1] // rk.shape[0]
            rq = q[start:stop].unflatten(1, (J, K)).permute(2, 1, 0, 3)  # (K, J, n, E)
            a = F.scaled_dot_product_attention(
                rq, rk.expand(K, -1, -1, -1), rv.expand(K, -1, -1, -1),
                attn_mask=None if bias is None else bias.to(q.dtype), is_causal=bias is None,
            )  # fmt: skip
            out[start:stop] = a.permute(2, 1, 0, 3).flatten(1, 2)
            start = stop
        return out


# ---- memory


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


# ---- the sampler


@dataclass(slots=True)
class Row:
    """What the sampler knows of one open row."""

    slot: int  # cache slot
    seed: int  # of its noise, in [0, 2**64)
    cached: int  # tokens whose keys and values are cached
    pending: list[int]  # tokens that follow them; never empty

    @property
    def length(self) -> int:
        return self.cached + len(self.pending)


class Sampler:
    """Rows of one model, sampled together. Rows are handles: integers that are never used twice."""

    def __init__(
        self,
        model,
        *,
        rows: int | None,
        max_len: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        training: bool = True,
        prefill_tokens: int = 4096,
    ):
        """Allocate the cache: `rows` rows of `max_len` tokens, in the model's dtype and on its device.

        rows            rows that can be open at once; None: as many as fit in 80 % of the free memory, at most 1024
        temperature     of the softmax that ids are drawn from; 0 takes the best id
        top_p, top_k, min_p  filters, for evaluation only
        prefill_tokens  most tokens of one prefill pass (bounds its activations)
        raises          ValueError: the cache does not fit in free memory; a filter with training=True; values out of range
        """
        self._check_settings(rows, max_len, temperature, top_p, top_k, min_p, training)
        self.model = model
        self.filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        self.max_len = max_len
        self.prefill_tokens = prefill_tokens
        self.version = 0  # of the weights: counts resets
        weight = next(model.parameters())
        self.device = weight.device
        self.cache = self._allocate(rows, weight.dtype)
        self.hashes = id_hashes(model.num_ids).to(self.device)
        self.rows: dict[int, Row] = {}
        self.free_slots = list(range(self.num_slots))  # a heap: the lowest free slot first, so that live rows stay dense
        self.next_handle = 0
        self.first_handle = 0  # of this version of the weights

    @staticmethod
    def _check_settings(rows, max_len, temperature, top_p, top_k, min_p, training) -> None:
        if (rows is not None and rows < 1) or max_len < 2:
            raise ValueError(f"rows={rows}, max_len={max_len}: want at least 1 row of at least 2 tokens")
        if not 0 <= temperature < math.inf or not 0 < top_p <= 1 or top_k < 0 or not 0 <= min_p <= 1:
            raise ValueError(
                f"temperature={temperature}, top_p={top_p}, top_k={top_k}, min_p={min_p}: "
                "want temperature >= 0, 0 < top_p <= 1, top_k >= 0, 0 <= min_p <= 1"
            )
        if training and (top_p < 1 or top_k > 0 or min_p > 0):
            raise ValueError(
                f"top_p={top_p}, top_k={top_k}, min_p={min_p} while training: ids would come from a filtered "
                "distribution, their log-probs and the gradient from the full one; leave them off, or pass "
                "training=False to evaluate"
            )

    def _allocate(self, rows: int | None, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Zeroed keys and values for each layer, (rows, J, C, E) each; sets num_slots and segment_overhead."""
        c = self.model.config
        columns = self.max_len + 1  # the last takes the writes of idle full rows in a CUDA graph
        row_bytes = 2 * c.num_layers * c.num_kv_heads * columns * c.head_dim * dtype.itemsize
        free = free_bytes(self.device)
        if rows is None:
            rows = max(1, min(1024, int(0.8 * free) // row_bytes))
        if rows * row_bytes > free:
            raise ValueError(
                f"rows={rows} x max_len={self.max_len} needs {rows * row_bytes / 1e9:.1f} GB of cache, "
                f"{free / 1e9:.1f} free; lower rows or max_len"
            )
        self.num_slots = rows
        self.segment_overhead = 400_000 // (2 * c.num_kv_heads * c.head_dim * dtype.itemsize)
        shape = (rows, c.num_kv_heads, columns, c.head_dim)
        transposed = (rows, c.num_kv_heads, c.head_dim, columns)  # see decode_attention; strides only, shapes agree

        def zeros() -> tuple[Tensor, Tensor]:  # on the CPU untouched pages take no memory
            if self.device.type == "cpu":
                keys = torch.zeros(transposed, dtype=dtype).transpose(2, 3)
            else:
                keys = torch.zeros(shape, dtype=dtype, device=self.device)
            return keys, torch.zeros(shape, dtype=dtype, device=self.device)

        return [zeros() for _ in range(c.num_layers)]

    # ---- rows

    @property
    def free(self) -> int:
        """Rows that can still be opened."""
        return len(self.free_slots)

    def open(self, ids: list[int], *, seed: int) -> int:
        """A new row that begins with `ids`; they are prefilled with other waiting rows at the next `step` or `fork`.

        raises  ValueError: no ids, an id outside [0, num_ids), more than max_len, no free row
        """
        if not ids:
            raise ValueError("open with no ids: a row needs at least one token to continue")
        self._check_ids(ids)
        self._check_length(len(ids), "open")
        return self._add(Row(self._take_slot(), seed & MASK64, 0, list(ids)))

    def fork(self, row: int, *, seed: int) -> int:
        """A second row with the same ids, its cache copied, and its own seed."""
        source = self._row(row)
        if len(source.pending) > 1:
            self._prefill_waiting()
        slot = self._take_slot()
        for tensors in self.cache:
            for t in tensors:
                t[slot, :, : source.cached] = t[source.slot, :, : source.cached]
        return self._add(Row(slot, seed & MASK64, source.cached, list(source.pending)))

    def extend(self, row: int, ids: list[int]) -> None:
        """Append observed tokens; raises ValueError for an id out of range or a row beyond max_len."""
        state = self._row(row)
        self._check_ids(ids)
        self._check_length(state.length + len(ids), f"row {row}")
        state.pending.extend(ids)

    def close(self, row: int) -> None:
        """Give the row's slot back."""
        heapq.heappush(self.free_slots, self._row(row).slot)
        del self.rows[row]

    def length(self, row: int) -> int:
        """Tokens in the row, sampled and observed."""
        return self._row(row).length

    def reset(self) -> None:
        """After a weight update: drop every row and what is cached of it; a row opened before cannot be continued."""
        self.version += 1
        self.rows.clear()
        self.free_slots = list(range(self.num_slots))
        self.first_handle = self.next_handle

    @torch.no_grad()
    def step(self, rows: list[int]) -> tuple[list[int], list[float]]:
        """Sample one token for each named row and append it; all other rows wait untouched.

        returns  ids and their log-probs (nats, at the sampling temperature), in the order of `rows`
        raises   ValueError: a row that is closed, unknown, older than the last reset, named twice, or max_len long
        """
        states = [self._row(r) for r in rows]
        if len(set(rows)) < len(rows):
            raise ValueError(f"step names a row twice: {rows}")
        for r, s in zip(rows, states, strict=True):
            self._check_length(s.length + 1, f"row {r}")
        if not states:
            return [], []
        if any(len(s.pending) > 1 for s in states):
            self._prefill_waiting()
        order = sorted(range(len(states)), key=lambda i: states[i].slot)
        ids, logp = self._decode([states[i] for i in order])
        out_ids, out_logp = [0] * len(order), [0.0] * len(order)
        for i, token, lp in zip(order, ids, logp, strict=True):
            states[i].cached += 1
            states[i].pending[0] = out_ids[i] = token
            out_logp[i] = lp
        return out_ids, out_logp

    # ---- checks

    def _row(self, handle: int) -> Row:
        state = self.rows.get(handle)
        if state is not None:
            return state
        if not 0 <= handle < self.next_handle:
            raise ValueError(f"row {handle} was never opened")
        if handle < self.first_handle:
            raise ValueError(f"row {handle} was opened before the last weight update (version {self.version}); open it again")
        raise ValueError(f"row {handle} is closed")

    def _check_ids(self, ids: list[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.model.num_ids):
            bad = next(i for i in ids if not 0 <= i < self.model.num_ids)
            raise ValueError(f"id {bad} is outside the vocabulary [0, {self.model.num_ids})")

    def _check_length(self, length: int, what: str) -> None:
        if length > self.max_len:
            raise ValueError(f"{what}: {length} tokens exceed max_len={self.max_len}; raise max_len or stop the row earlier")

    def _take_slot(self) -> int:
        if not self.free_slots:
            raise ValueError(f"all {self.num_slots} rows are open; close one or raise rows")
        return heapq.heappop(self.free_slots)

    def _add(self, state: Row) -> int:
        self.rows[self.next_handle] = state
        self.next_handle += 1
        return self.next_handle - 1

    # ---- passes of the model

    @torch.no_grad()
    def _prefill_waiting(self) -> None:
        """Cache all but the last token of every row, packed into passes of at most `prefill_tokens` tokens."""
        pieces: list[Piece] = []
        room = self.prefill_tokens
        for state in self.rows.values():
            while len(state.pending) > 1:
                num = min(room, len(state.pending) - 1)
                pieces.append(Piece(state.slot, state.cached, state.pending[:num]))
                state.cached += num
                del state.pending[:num]
                room -= num
                if room == 0:
                    self._prefill(pieces)
                    pieces, room = [], self.prefill_tokens
        if pieces:
            self._prefill(pieces)

    def _prefill(self, pieces: list[Piece]) -> None:
        ids = torch.tensor([i for p in pieces for i in p.ids], device=self.device)
        positions = np.concatenate([np.arange(p.cached, p.cached + len(p.ids)) for p in pieces])
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)  # no logits wanted
        attend = Prefill(self.cache, pieces, self.device)
        self.model(ids, torch.from_numpy(positions).to(self.device), attend, rows=nothing)

    def _decode(self, states: list[Row]) -> tuple[list[int], list[float]]:
        """One token for each of `states` (slots rising, one pending id each)."""
        slots = [s.slot for s in states]
        lengths = [s.cached + 1 for s in states]
        inputs = torch.tensor([slots, [s.cached for s in states], [s.pending[0] for s in states]], device=self.device)
        keys = noise_keys(np.array([s.seed for s in states], dtype=np.uint64), np.array(lengths))
        segments = plan_segments(slots, lengths, overhead=self.segment_overhead)
        attend = Decode(self.cache, inputs[0], inputs[1], segments)
        logits = self.model(inputs[2], inputs[1], attend)
        ids, logp = draw(logits, torch.from_numpy(keys).to(self.device), self.hashes, **self.filters)
        return ids.tolist(), logp.tolist()
