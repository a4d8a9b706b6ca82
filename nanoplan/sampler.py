"""Batched sampling over a KV cache: rows open, fork, are extended with observed tokens, step and close.

One object owns what a row is: its ids that are not cached yet, its length, its cache slot and its seed. A row
with one uncached id decodes, in one batch with every other row named in the same `step`; a row with more is
prefilled first, packed with all others that wait. A row's tokens depend on its seed, its index and its logits
alone: not on its neighbours or on the number of rows.

On a CPU a step costs what its rows and their lengths cost: attention reads runs of neighbouring slots, each
up to the longest row in it. On CUDA a step runs all slots up to the highest one named, in a few fixed shapes,
each captured once as a CUDA graph; slots that were not named compute something that nobody reads.

Where the kernels run, rows that were forked share the tokens up to the first fork: these stay in one slot and
are read once for all of them. What follows is each row's own; a later fork copies that, and shares on. On a
CPU a fork copies everything: sharing did not pay (docs/kernels.md).

Leaves out: stop tokens, budgets and text (rollout.py), speculative decoding, paging. Shape letters:
kernels/__init__.py.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.decode import MAX_HEADS
from nanoplan.cache import Cache, Decode, DecodeShared, Piece, Prefill, Segment, plan_segments
from nanoplan.draw import draw, id_hashes, noise_keys

MASK64 = 2**64 - 1


@dataclass(slots=True, eq=False)
class Row:
    """What the sampler knows of one open row."""

    slot: int  # cache slot
    seed: int  # of its noise, in [0, 2**64)
    cached: int  # tokens whose keys and values are cached
    pending: list[int]  # tokens that follow them; never empty
    shared: "Shared | None" = None  # its first tokens, where it has them in common with others

    @property
    def length(self) -> int:
        return self.cached + len(self.pending)

    @property
    def num_shared(self) -> int:
        return 0 if self.shared is None else self.shared.length


@dataclass(slots=True, eq=False)
class Shared:
    """The first tokens of rows that were forked from one another."""

    slot: int  # where they lie; always the slot of one of `rows`
    length: int  # how many
    rows: list[Row] = field(default_factory=list)  # that are open


class Shape(NamedTuple):
    """Of a decode step over slots: what a captured graph is good for."""

    width: int  # slots [0, width)
    longest: int  # tokens of its own slot that a row attends to, at most
    groups: int = 0  # rows of the table of shared tokens
    members: int = 0  # K of that table
    longest_shared: int = 0  # tokens of another slot that a row attends to, at most


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
        dtype: torch.dtype | None = None,
        graphs: bool = True,
    ):
        """Allocate the cache on the model's device.

        rows            rows open at once; None: as many as fit in 80 % of the free memory, at most 1024
        max_len         tokens of a row
        temperature     of the softmax that ids are drawn from; 0 takes the best id
        top_p, top_k, min_p  filters, for evaluation only
        prefill_tokens  most tokens of one prefill pass; bounds its activations
        dtype           in which the model computes keys and values; None: that of its weights
        graphs          on CUDA: replay decode steps as CUDA graphs (a mixture of experts never does)
        raises          ValueError: no room for the cache, a filter while training, a value out of range
        """
        self._check_settings(rows, max_len, temperature, top_p, top_k, min_p, training)
        self.model = model
        self.filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        self.max_len = max_len
        self.prefill_tokens = prefill_tokens
        self.version = 0  # of the weights: counts resets
        weight = next(model.parameters())
        self.device = weight.device
        self.cache = Cache(
            model.config, rows=rows, max_len=max_len, dtype=dtype or weight.dtype, device=self.device
        )
        self.hashes = id_hashes(model.num_ids).to(self.device)
        self.rows: dict[int, Row] = {}
        self.free_slots = list(range(self.cache.num_slots))  # a heap: lowest first, live rows stay dense
        self.next_handle = 0
        self.first_handle = 0  # of this version of the weights
        self.most_members = max(1, MAX_HEADS * model.config.num_kv_heads // model.config.num_heads)
        self.members = 2  # of the largest group so far: one that shrinks keeps its shape
        self.use_graphs = graphs and self.device.type == "cuda" and not model.config.num_experts
        self.graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.graphs_state = None  # what they were captured from, see _model_state
        self.graphs_checked = False  # since the last reset
        self.pool = torch.cuda.graph_pool_handle() if self.use_graphs else None  # memory they share

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

    @property
    def free(self) -> int:
        """Rows that can still be opened."""
        return len(self.free_slots)

    @property
    def cache_gb(self) -> float:
        """Size of the cache, 1e9 bytes; on a CPU, pages that no row has reached take no memory yet."""
        return sum(part.nbytes for layer in self.cache.layers for part in layer) / 1e9

    def open(self, ids: list[int], *, seed: int) -> int:
        """A new row that begins with `ids`; they are prefilled with other rows at the next `step` or `fork`.

        seed    any integer; noise depends on its lowest 64 bits
        raises  ValueError: no ids, an id outside [0, num_ids), more than max_len, no free row
        """
        if not ids:
            raise ValueError("open with no ids: a row needs at least one token to continue")
        self._check_ids(ids)
        self._check_length(len(ids), "open")
        return self._add(Row(self._take_slot(), seed & MASK64, 0, list(ids)))

    def fork(self, row: int, *, seed: int) -> int:
        """A second row with the same ids and its own seed. What the two do not share is copied.

        raises  ValueError: no free row
        """
        source = self._row(row)
        if len(source.pending) > 1:
            self._prefill_waiting()
        twin = Row(self._take_slot(), seed & MASK64, source.cached, list(source.pending))
        if self.cache.kernels and source.shared is None and source.cached:
            source.shared = Shared(source.slot, source.cached, [source])
        if source.shared is not None:
            twin.shared = source.shared
            twin.shared.rows.append(twin)
        self.cache.copy(source.slot, twin.slot, twin.num_shared, source.cached)
        return self._add(twin)

    def extend(self, row: int, ids: list[int]) -> None:
        """Append observed tokens; raises ValueError for an id out of range or a row beyond max_len."""
        state = self._row(row)
        self._check_ids(ids)
        self._check_length(state.length + len(ids), f"row {row}")
        state.pending.extend(ids)

    def close(self, row: int) -> None:
        """Give the row's slot back. Rows that share tokens in it go on: one of them moves in."""
        state = self._row(row)
        shared = state.shared
        if shared is not None:
            shared.rows.remove(state)
            if shared.slot == state.slot and shared.rows:
                heir = min(shared.rows, key=lambda other: other.cached)  # has the fewest tokens to move
                self.cache.copy(heir.slot, state.slot, shared.length, heir.cached)
                heir.slot, state.slot = state.slot, heir.slot
        heapq.heappush(self.free_slots, state.slot)
        del self.rows[row]

    def length(self, row: int) -> int:
        """Tokens in the row, sampled and observed."""
        return self._row(row).length

    def reset(self) -> None:
        """After a weight update, or any change of what the model computes: drop every row and its cache.

        Rows opened before cannot be continued: naming one raises.
        """
        self.version += 1
        self.rows.clear()
        self.free_slots = list(range(self.cache.num_slots))
        self.first_handle = self.next_handle
        self.graphs_checked = False

    @torch.no_grad()
    def step(self, rows: list[int]) -> tuple[list[int], list[float]]:
        """Sample one token for each named row and append it; all other rows wait untouched.

        returns  ids and their log-probs (nats, at the sampling temperature), in the order of `rows`
        raises   ValueError: a row that is closed, unknown, older than the last reset, named twice or full
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
        fixed = self.cache.kernels or self.device.type == "cuda"
        decode = self._decode_slots if fixed else self._decode_rows
        ids, logp = decode([states[i] for i in order])
        out_ids, out_logp = [0] * len(order), [0.0] * len(order)
        for i, token, lp in zip(order, ids, logp, strict=True):
            states[i].cached += 1
            states[i].pending[0] = out_ids[i] = token
            out_logp[i] = lp
        return out_ids, out_logp

    def _row(self, handle: int) -> Row:
        state = self.rows.get(handle)
        if state is not None:
            return state
        if not 0 <= handle < self.next_handle:
            raise ValueError(f"row {handle} was never opened")
        if handle < self.first_handle:
            raise ValueError(
                f"row {handle} was opened before the weight update that made version {self.version}; "
                "its cache is of the old weights, open a new row"
            )
        raise ValueError(f"row {handle} is closed")

    def _check_ids(self, ids: list[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.model.num_ids):
            bad = next(i for i in ids if not 0 <= i < self.model.num_ids)
            raise ValueError(f"id {bad} is outside the vocabulary [0, {self.model.num_ids})")

    def _check_length(self, length: int, what: str) -> None:
        if length > self.max_len:
            raise ValueError(
                f"{what}: {length} tokens exceed max_len={self.max_len}; raise it or stop earlier"
            )

    def _take_slot(self) -> int:
        if not self.free_slots:
            raise ValueError(f"all {self.cache.num_slots} rows are open; close one or raise rows")
        return heapq.heappop(self.free_slots)

    def _add(self, state: Row) -> int:
        self.rows[self.next_handle] = state
        self.next_handle += 1
        return self.next_handle - 1

    @torch.no_grad()
    def _prefill_waiting(self) -> None:
        """Cache all but the last token of every row, in passes of at most `prefill_tokens` tokens."""
        pieces: list[Piece] = []
        room = self.prefill_tokens
        for state in self.rows.values():
            while len(state.pending) > 1:
                num = min(room, len(state.pending) - 1)
                piece = Piece(state.slot, state.cached, state.pending[:num])
                if state.shared is not None:
                    piece.shared_slot, piece.shared = state.shared.slot, state.shared.length
                pieces.append(piece)
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

    def _forward(self, ids: Tensor, positions: Tensor, keys: Tensor, attend: Decode) -> Tensor:
        """ids, positions (R,) int64, keys (R, 2) int32 -> (2, R) float64: ids drawn and their log-probs."""
        drawn, logp = draw(self.model(ids, positions, attend), keys, self.hashes, **self.filters)
        return torch.stack([drawn.double(), logp.double()])  # one tensor, so one copy back to the host

    def _decode_rows(self, states: list[Row]) -> tuple[list[int], list[float]]:
        """One token for each of `states` (slots rising, one pending id each); work for these rows alone."""
        slots, lengths = [s.slot for s in states], [s.cached + 1 for s in states]
        ids, positions = [s.pending[0] for s in states], [s.cached for s in states]
        inputs = torch.tensor([slots, ids, positions])  # (3, R) int64
        segments = plan_segments(slots, lengths, overhead=self.cache.segment_overhead)
        attend = Decode(self.cache, inputs[0], inputs[2], segments)
        drawn, logp = self._forward(inputs[1], inputs[2], torch.from_numpy(_keys(states)), attend).tolist()
        return [int(i) for i in drawn], logp

    def _decode_slots(self, states: list[Row]) -> tuple[list[int], list[float]]:
        """The same over all slots up to the highest, in shapes that repeat, for CUDA graphs.

        A slot that is not named runs token 0 at its first free index: the key it leaves there lies beyond
        what its row sees, and the row's own next token overwrites it.
        """
        slots = [s.slot for s in states]
        groups = _groups(states, self.most_members)
        shape = self._shape(states, groups)
        host = np.zeros((5, shape.width), np.int64)  # ids, positions, two noise keys, shared tokens
        for s in self.rows.values():
            if s.slot < shape.width:
                host[1, s.slot] = s.cached
                host[4, s.slot] = s.num_shared
        host[0, slots] = [s.pending[0] for s in states]
        host[2:4, slots] = _keys(states).T
        inputs = torch.from_numpy(np.concatenate([host.ravel(), _table(groups, shape).ravel()]))
        if self.use_graphs:
            drawn = self._replay(shape, inputs)
        else:
            drawn = self._forward_slots(shape, inputs.to(self.device))
        ids, logp = drawn[:, slots].tolist()
        return [int(i) for i in ids], logp

    def _shape(self, states: list[Row], groups: list[list[Row]]) -> Shape:
        """The smallest of a few shapes that `states` (slots rising) fit in."""
        last = states[-1].slot
        width = min(_round_up(last + 1, 16 if last >= 8 else 4), self.cache.num_slots)
        own = max(s.cached + 1 - s.num_shared for s in states)
        longest = min(_round_up(own, 256), self.max_len)
        if not groups:
            return Shape(width, longest)
        num = _power_of_two(max(2, len(groups)))
        self.members = max(self.members, _power_of_two(max(len(rows) for rows in groups)))
        shared = min(_round_up(max(rows[0].num_shared for rows in groups), 256), self.max_len)
        return Shape(width, longest, num, self.members, shared)

    def _forward_slots(self, shape: Shape, inputs: Tensor) -> Tensor:
        """inputs (5 width + groups (2 + members),) int64 on the device, see `_decode_slots` and `_table`."""
        ids, positions, *keys, starts = inputs[: 5 * shape.width].view(5, shape.width)
        if self.cache.kernels:
            table = inputs[5 * shape.width :].view(shape.groups, 2 + shape.members)
            reach = shape.longest, shape.longest_shared
            attend = DecodeShared(self.cache, positions, starts, table, reach=reach)
        else:
            slots = torch.arange(shape.width, device=self.device)
            segment = Segment(0, shape.width, 0, shape.width, shape.longest)
            attend = Decode(self.cache, slots, positions, [segment])
        return self._forward(ids, positions, torch.stack(keys, 1).to(torch.int32), attend)

    def _replay(self, shape: Shape, inputs: Tensor) -> Tensor:
        """`_forward_slots` as a CUDA graph, captured at its shape's first use -> (2, width) on the host."""
        if not self.graphs_checked:
            if (state := _model_state(self.model)) != self.graphs_state:
                self.graphs.clear()
                self.graphs_state = state
            self.graphs_checked = True
        if shape not in self.graphs:
            fixed = inputs.to(self.device)
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # libraries set themselves up; it writes what the replay will write
                self._forward_slots(shape, fixed)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                drawn = self._forward_slots(shape, fixed)
            self.graphs[shape] = graph, fixed, drawn
        graph, fixed, drawn = self.graphs[shape]
        fixed.copy_(inputs)
        graph.replay()
        return drawn.cpu()


def _groups(states: list[Row], most: int) -> list[list[Row]]:
    """The rows of `states` that share tokens, each list from one group and of at most `most` rows."""
    by_group: dict[Shared, list[Row]] = {}
    for state in states:
        if state.shared is not None:
            by_group.setdefault(state.shared, []).append(state)
    return [rows[i : i + most] for rows in by_group.values() for i in range(0, len(rows), most)]


def _table(groups: list[list[Row]], shape: Shape) -> np.ndarray:
    """Which slots read which shared tokens: (shape.groups, 2 + shape.members) int64, see DecodeShared."""
    table = np.full((shape.groups, 2 + shape.members), -1, np.int64)
    table[:, :2] = 0
    for line, rows in zip(table, groups, strict=False):
        line[:2] = rows[0].shared.slot, rows[0].shared.length
        line[2 : 2 + len(rows)] = [row.slot for row in rows]
    return table


def _keys(states: list[Row]) -> np.ndarray:
    """Noise keys (R, 2) int32 of the token that each row samples next."""
    return noise_keys(np.array([s.seed for s in states], np.uint64), np.array([s.cached + 1 for s in states]))


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length()


def _model_state(model) -> tuple:
    """What a captured graph depends on: where the weights lie and which adapters are on."""
    switches = tuple(m.on for m in model.modules() if hasattr(m, "on"))
    return tuple(p.data_ptr() for p in model.parameters()), switches
