"""Rows that share their first tokens against rows that own copies: the same ids, log-probs and free rows.

The same file in torch (where kernels.decode is its plain definition), interpreted and on a GPU (as graphs).
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import PATH
from nanoplan.model import Model, ModelConfig, Packed
from nanoplan.sampler import Row, Sampler, Shape, Shared, _groups

pytestmark = pytest.mark.usefixtures("one_thread")
V = 61
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = PATH == "triton" and DEVICE == "cpu"  # about a twentieth of a second a layer and step


def make_model(*, layers=1 if INTERPRETED else 2, dtype=torch.float32) -> Model:
    model = Model(ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=V, hidden_size=16, intermediate_size=16,
        num_layers=layers, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=10_000.0, norm_eps=1e-6,
        tied=True, qk_norm=True, max_positions=2048,
    ))  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.ndim == 1))
    return model.to(DEVICE, dtype)


@pytest.fixture(scope="module")
def model():
    return make_model()


def ids_of(seed: int, num: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, num).tolist()


def sampler(model, *, shared: bool, **options) -> Sampler:
    """A sampler whose rows share tokens or not, whatever runs here. If they do, fresh memory is NaN."""
    s = Sampler(model, **({"rows": 4, "max_len": 64} | options))
    s.cache.kernels = shared
    for part in (x for layer in s.cache.layers for x in layer if shared):
        part.fill_(float("nan"))
    return s


def check(s: Sampler) -> None:
    """A slot has one owner, and what rows share lies in the slot of an open one of them."""
    states = list(s.rows.values())
    assert sorted([x.slot for x in states] + s.free_slots) == list(range(s.cache.num_slots))
    for shared in (x.shared for x in states if x.shared):
        assert all(x in states and x.shared is shared and x.cached >= shared.length for x in shared.rows)
        assert [x.slot for x in shared.rows].count(shared.slot) == 1


def play(s: Sampler, script: list[tuple]) -> dict:
    """Run (verb, names, argument) lines; returns what was drawn, {name: [(id, logp), ...]}."""
    rows, drawn = {}, {}
    for verb, names, argument in script:
        if verb == "open":
            rows[names] = s.open(argument, seed=len(rows))
        elif verb == "fork":
            rows[names] = s.fork(rows[argument], seed=len(rows))
        elif verb == "extend":
            s.extend(rows[names], argument)
        elif verb == "close":
            s.close(rows[names])
        else:
            for _ in range(argument):
                for name, *pair in zip(names, *s.step([rows[name] for name in names]), strict=True):
                    drawn.setdefault(name, []).append(pair)
        check(s)
    drawn["free"] = s.free
    return drawn


def compare(model, script: list[tuple], *, atol=1e-4, **options) -> Sampler:
    """Play the script with and without sharing; returns the sampler that shared."""
    s = sampler(model, shared=True, **options)
    ours, want = play(s, script), play(sampler(model, shared=False, **options), script)
    assert ours.pop("free") == want.pop("free")
    assert {k: [i for i, _ in x] for k, x in ours.items()} == {k: [i for i, _ in x] for k, x in want.items()}
    for name, pairs in ours.items():
        assert np.allclose([p for _, p in pairs], [p for _, p in want[name]], atol=atol, rtol=0), name
    return s


GROUP = [("open", "a", ids_of(0, 12)), ("fork", "b", "a"), ("fork", "c", "a")]


def test_forks_at_the_prompt(model):
    """Catches: a prompt counted twice or not at all, rows of a group mixed up, own tokens read as shared."""
    s = compare(model, [*GROUP, ("step", "abc", 3), ("extend", "b", ids_of(1, 25)), ("step", "ba", 2)])
    assert {x.num_shared for x in s.rows.values()} == {11}


def test_a_fork_at_the_prompt_copies_nothing(model):
    """Catches: a prompt that is copied, or read from the twin's slot (which holds NaN there)."""
    s = sampler(model, shared=True)
    a = s.open(ids_of(0, 12), seed=0)
    b = s.fork(a, seed=1)
    s.step([a, b])
    for keys, values in s.cache.layers:
        own = s.rows[b].slot
        assert keys[own, :, :11].isnan().all() and values[own, :, :11].isnan().all()
        assert keys[own, :, 11].isfinite().all()


def test_later_forks_and_forks_of_forks(model):
    """Catches: a fork in the middle that loses what was sampled since, or shares what is still written."""
    script = [
        *GROUP[:2], ("step", "ab", 2), ("fork", "c", "b"), ("step", "acb", 2), ("extend", "c", ids_of(1, 9)),
        ("fork", "d", "c"), ("step", "dcba", 2),
    ]  # fmt: skip
    s = compare(model, script)
    assert {x.num_shared for x in s.rows.values()} == {11}
    start = [("open", "a", [5]), ("fork", "b", "a"), ("step", "ab", 2)]  # nothing to share at the prompt
    compare(model, [*start, ("fork", "c", "a"), ("step", "bca", 1)])


def test_a_fork_right_after_a_sample_shares_all_before(model):
    """Catches: a row that was never forked copying its whole past at its first fork."""
    s = compare(model, [("open", "a", ids_of(0, 5)), ("step", "a", 4), ("fork", "b", "a"), ("step", "ba", 2)])
    assert {x.num_shared for x in s.rows.values()} == {8}


def test_a_closed_head_leaves_its_prompt(model):
    """Catches: a prompt overwritten by the next row in its slot, a slot that is not given back."""
    script = [
        *GROUP, ("step", "abc", 2), ("close", "a", None), ("open", "d", ids_of(2, 20)), ("fork", "e", "d"),
        ("step", "bced", 2), ("close", "c", None), ("close", "d", None), ("step", "be", 1),
        ("fork", "f", "b"), ("open", "g", [3]), ("step", "begf", 2),
    ]  # fmt: skip
    compare(model, script)


def test_a_row_that_waits_is_not_written_over(model):
    """Catches: a waiting row, or the prompt in its slot, harmed by the steps of others."""
    script = [
        *GROUP, ("step", "abc", 1), ("step", "bc", 3), ("close", "b", None), ("step", "c", 2),
        ("step", "ac", 2),
    ]  # fmt: skip
    compare(model, script)


def test_after_a_reset_nothing_is_shared():
    """Catches: rows of new weights that read tokens cached under the old ones."""
    model = make_model()
    s = sampler(model, shared=True)
    before = play(s, [*GROUP, ("step", "bca", 2)])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    s.reset()
    assert s.free == 4
    script = [*GROUP, ("step", "cab", 2)]
    after, cold = play(s, script), play(sampler(model, shared=True), script)
    assert after == cold and after["a"] != before["a"]


def test_long_prompts_beside_short_rows(model):
    """Catches: a split of the prompt that is dropped, and rows of very different lengths in one launch."""
    script = [
        ("open", "a", ids_of(0, 600)), ("fork", "b", "a"), ("open", "c", [1, 2]),
        ("extend", "b", ids_of(1, 300)), ("fork", "d", "c"), ("step", "cbad", 2),
    ]  # fmt: skip
    compare(make_model(layers=1), script, max_len=1000)


def random_script(seed: int, *, lines: int, rows: int) -> list[tuple]:
    """Any order of calls that fits in `rows` rows of 64 tokens."""
    rng = np.random.default_rng(seed)
    script, lengths, names = [], {}, iter(range(10_000))
    while len(script) < lines:
        verb = rng.choice(["open", "fork", "fork", "extend", "close", "step", "step"])
        live = list(lengths)
        pick = live[rng.integers(len(live))] if live else None
        if verb == "open" and len(live) < rows:
            lengths[name := next(names)] = num = int(rng.integers(1, 20))
            script.append(("open", name, ids_of(name, num)))
        elif verb == "fork" and live and len(live) < rows:
            lengths[name := next(names)] = lengths[pick]
            script.append(("fork", name, pick))
        elif verb == "extend" and live and lengths[pick] < 50:
            lengths[pick] += (num := int(rng.integers(1, 9)))
            script.append(("extend", pick, ids_of(len(script), num)))
        elif verb == "close" and live:
            del lengths[pick]
            script.append(("close", pick, None))
        elif verb == "step":
            some = [name for name in live if lengths[name] < 62 and rng.random() < 0.7]
            for name in some:
                lengths[name] += 1
            script.append(("step", some, 1))
    return script


@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 12))
def test_any_order_of_calls(model, seed):
    """Catches: what the scripts above do not think of."""
    lines, rows = (36, 4) if INTERPRETED else (200, 11)
    compare(model, random_script(seed, lines=lines, rows=rows), rows=rows)


def test_half_precision_cache():
    """Catches: bf16 keys multiplied as integers by the interpreter, or scores rounded to bf16."""
    model = make_model(dtype=torch.bfloat16)
    s = sampler(model, shared=True)
    a = s.open(ids_of(0, 12), seed=0)
    texts = {a: ids_of(0, 12), s.fork(a, seed=1): ids_of(0, 12)}
    logps = {row: [] for row in texts}
    for _ in range(3):
        for row, token, logp in zip(texts, *s.step(list(texts)), strict=True):
            texts[row].append(token)
            logps[row].append(logp)
    for row, ids in texts.items():
        at = torch.tensor(ids, device=DEVICE)
        attend = Packed(torch.tensor([0, len(ids)], device=DEVICE), len(ids))
        with torch.no_grad():
            full = model(at, torch.arange(len(ids), device=DEVICE), attend)[11:-1].log_softmax(-1)
        full = full.gather(1, at[12:, None])[:, 0].tolist()
        assert np.allclose(logps[row], full, atol=0.1), (logps[row], full)


class NoSynchronisation(TorchDispatchMode):
    """Fails where the host would wait for, or depend on, what the device holds: a graph would keep it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(PATH == "torch", reason="the plain definition of kernels.decode reads lengths")
def test_a_step_can_be_captured(model):
    """Catches: a shape, a table or a length that a CUDA graph would freeze at its first value."""
    s = sampler(model, shared=True)
    rows = [s.open(ids_of(0, 12), seed=0)]
    rows.append(s.fork(rows[0], seed=1))
    s.step(rows)
    forward = s._forward_slots

    def watched(shape, inputs):
        with NoSynchronisation():
            return forward(shape, inputs)

    s._forward_slots = watched
    s.use_graphs = False
    s.step(rows)


def test_shapes_repeat():
    """Catches: a CUDA graph captured for nearly every step of a rollout."""
    s = sampler(make_model(layers=1), shared=True, rows=64, max_len=1024)
    rng, shapes = np.random.default_rng(0), set()
    groups = [Shared(8 * i, int(rng.integers(300, 500))) for i in range(8)]
    for i in range(64):
        shared = groups[i // 8]
        shared.rows.append(Row(i, 0, shared.length, [1], shared))
    rows = [row for shared in groups for row in shared.rows]
    for _ in range(400):
        for row in rows:
            row.cached += 1
        named = [row for row in rows if rng.random() < 0.9]  # the others wait for their tools
        shapes.add(s._shape(named, _groups(named, s.most_members)))
    assert shapes == {Shape(64, 256, 8, 8, 512), Shape(64, 512, 8, 8, 512)}
