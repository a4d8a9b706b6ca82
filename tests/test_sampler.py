"""The sampler against full forward passes of the same model, rows against rows, draws against their law."""

import math

import numpy as np
import pytest
import torch

from nanoplan import cache
from nanoplan.cache import plan_segments
from nanoplan.draw import draw, exponential_noise, id_hashes, keep_mask, noise_keys
from nanoplan.model import Model, ModelConfig, Packed
from nanoplan.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")
V = 61


def make_model(seed=0, *, scale=0.3, **changes) -> Model:
    """A random model of two layers; `scale` large enough for a policy that is neither uniform nor certain."""
    fields = {
        "architecture": "Qwen3ForCausalLM", "vocab_size": V, "hidden_size": 16, "intermediate_size": 24,
        "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_theta": 10_000.0,
        "norm_eps": 1e-6, "tied": True, "qk_norm": True, "max_positions": 512,
    }  # fmt: skip
    model = Model(ModelConfig(**(fields | changes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * scale + (p.ndim == 1))
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


def ids_of(seed: int, num: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, num).tolist()


def full_logp(model, ids: list[int], temperature=1.0) -> list[float]:
    """Log-prob of every id after the first, from one forward pass as the trainer makes it."""
    with torch.no_grad():
        logp, _ = model(
            torch.tensor(ids), torch.arange(len(ids)), Packed(torch.tensor([0, len(ids)]), len(ids)),
            torch.tensor(ids[1:]), rows=torch.arange(len(ids) - 1), temperature=temperature,
        )  # fmt: skip
    return logp.tolist()


def run(sampler, row: int, steps: int) -> tuple[list[int], list[float]]:
    out = [sampler.step([row]) for _ in range(steps)]
    return [ids[0] for ids, _ in out], [logp[0] for _, logp in out]


def episode(model, sampler, temperature) -> None:
    """Open prompts, fork, sample, wait, observe, fork in the middle; every log-prob against the trainer's."""
    texts = {sampler.open(ids_of(i, 5 + 9 * i), seed=i): ids_of(i, 5 + 9 * i) for i in range(3)}
    logps = {row: [None] * (len(ids) - 1) for row, ids in texts.items()}

    def fork(row, seed):
        twin = sampler.fork(row, seed=seed)
        texts[twin], logps[twin] = list(texts[row]), list(logps[row])

    def sample(rows, steps):
        for _ in range(steps):
            for row, token, logp in zip(rows, *sampler.step(rows), strict=True):
                texts[row].append(token)
                logps[row].append(logp)

    for row in list(texts):
        fork(row, seed=100 + row)
    rows = list(texts)
    sample(rows, 4)
    sample(rows[1::2], 2)  # the others wait
    for i, row in enumerate(rows[1:5]):
        observed = ids_of(50 + i, (1, 2, 30, 7)[i])
        sampler.extend(row, observed)
        texts[row] += observed
        logps[row] += [None] * len(observed)
    fork(rows[3], seed=7)  # right after an observation
    sample(list(texts)[::-1], 3)
    fork(rows[0], seed=8)  # right after a sample
    sample(list(texts), 3)
    for row, ids in texts.items():
        assert sampler.length(row) == len(ids)
        for ours, full in zip(logps[row], full_logp(model, ids, temperature), strict=True):
            assert ours is None or abs(ours - full) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_is_the_trainers(model, temperature):
    """Catches: a wrong position, mask, cache write or temperature in prefill, prefixes, decode or fork."""
    episode(model, Sampler(model, rows=9, max_len=64, temperature=temperature), temperature)


def test_prefill_in_small_passes(model):
    """Catches: prompts cut at the pass limit losing their prefix."""
    episode(model, Sampler(model, rows=9, max_len=64, prefill_tokens=5), 1.0)


def test_scattered_segments(model):
    """Catches: segments with gaps or cuts that mix rows up (overhead 0 cuts at every change of length)."""
    for overhead in (0, 10**6):
        s = Sampler(model, rows=16, max_len=64)
        s.cache.segment_overhead = overhead
        for i in range(7):
            s.close(s.open(ids_of(i, 3), seed=0)) if i % 2 else s.open(ids_of(i, 3), seed=0)
        episode(model, s, 1.0)


def test_all_slots_in_fixed_shapes(model):
    """Catches: on the path of CUDA graphs, slots that are not named leaving a visible key, or being read."""
    s = Sampler(model, rows=9, max_len=64)
    s._decode_rows = s._decode_slots
    episode(model, s, 1.0)


def test_segments_cover_rows_once():
    """Catches: a slot left out of, or twice in, the plan; a length cut short."""
    rng = np.random.default_rng(0)
    for overhead in (0, 20, 10**6):
        slots = sorted(rng.choice(100, 40, replace=False).tolist())
        lengths = rng.integers(1, 90, 40).tolist()
        plan = plan_segments(slots, lengths, overhead=overhead)
        assert [i for s in plan for i in range(s.start, s.stop)] == list(range(40))
        for s in plan:
            assert (s.low, s.high) == (slots[s.start], slots[s.stop - 1] + 1)
            assert s.longest == max(lengths[s.start : s.stop])
    assert len(plan) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_lora_reaches_the_sampler(tied):
    """Catches: adapters left out of prefill, decode or the head while sampling (B48, B50)."""
    lora = pytest.importorskip("nanoplan.lora")
    model = make_model(architecture="LlamaForCausalLM", qk_norm=False, tied=tied)
    base = full_logp(model, ids_of(0, 20))
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    lora.add_lora(model, r=4, alpha=8.0, targets=names + (() if tied else ("lm_head",)))
    with torch.no_grad():
        for p in lora.trainable(model).values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    assert max(abs(a - b) for a, b in zip(base, full_logp(model, ids_of(0, 20)), strict=True)) > 0.1
    episode(model, Sampler(model, rows=9, max_len=64, temperature=0.7), 0.7)


def test_tokens_ignore_neighbours(model):
    """Catches: noise drawn from one stream for the batch, by slot, or by the order of opening."""
    prompts = [ids_of(i, 4 + i) for i in range(6)]
    alone = []
    for i, prompt in enumerate(prompts):
        s = Sampler(model, rows=1, max_len=40)
        alone.append(run(s, s.open(prompt, seed=i), 12)[0])
    s = Sampler(model, rows=10, max_len=40)
    s.open(ids_of(9, 20), seed=9)
    rows = [s.open(prompts[i], seed=i) for i in reversed(range(6))][::-1]
    together = [s.step(rows if t % 2 else rows[::-1])[0][:: 1 if t % 2 else -1] for t in range(12)]
    assert [list(t) for t in zip(*together, strict=True)] == alone
    assert len({tuple(t) for t in alone}) == 6


def test_fork_twins(model):
    """Catches: twins that share a cache slot, noise or pending ids; equal seeds must give equal futures."""
    s = Sampler(model, rows=4, max_len=64)
    a = s.open(ids_of(0, 9), seed=3)
    run(s, a, 3)
    s.extend(a, ids_of(1, 5))
    b, c = s.fork(a, seed=3), s.fork(a, seed=4)
    ids_b, logp_b = run(s, b, 8)
    s.extend(b, ids_of(2, 6))
    ids_a, logp_a = run(s, a, 8)
    assert ids_a == ids_b and np.allclose(logp_a, logp_b, atol=1e-5)
    assert run(s, c, 8)[0] != ids_a


def test_waiting_rows_are_untouched(model):
    """Catches: a row that waits for its tool being advanced, or written over, by other rows' steps."""
    s = Sampler(model, rows=3, max_len=64)
    a, b, c = (s.open(ids_of(i, 6), seed=i) for i in range(3))
    first = s.step([a, b, c])[0][1]
    for _ in range(5):
        s.step([a, c])
    assert s.length(b) == 7
    rest, _ = run(s, b, 5)
    lone = Sampler(model, rows=1, max_len=64)
    expected = run(lone, lone.open(ids_of(1, 6), seed=1), 6)[0]
    assert [first, *rest] == expected


def test_refill_after_close(model):
    """Catches: a reused slot that still shows its last tenant's keys."""
    s = Sampler(model, rows=2, max_len=64)
    a, b = s.open(ids_of(0, 40), seed=0), s.open(ids_of(1, 5), seed=1)
    s.step([a, b])
    s.close(a)
    assert s.free == 1
    c = s.open(ids_of(2, 7), seed=2)
    s.step([b, c])
    ids, _ = run(s, c, 4)
    assert c not in (a, b)
    lone = Sampler(model, rows=1, max_len=64)
    assert run(lone, lone.open(ids_of(2, 7), seed=2), 5)[0][1:] == ids


def test_cold_cache_after_update():
    """Catches: keys of the old weights being read after an update (B47)."""
    model = make_model()
    s = Sampler(model, rows=2, max_len=64)
    a = s.open(ids_of(0, 30), seed=0)
    before = run(s, a, 5)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    s.reset()
    assert s.version == 1 and s.free == 2
    for use in (lambda: s.step([a]), lambda: s.extend(a, [1]), lambda: s.fork(a, seed=0), lambda: s.close(a)):
        with pytest.raises(ValueError, match=f"row {a} was opened before the weight update"):
            use()
    warm = run(s, s.open(ids_of(0, 30), seed=0), 5)
    cold = Sampler(model, rows=1, max_len=64)
    assert warm == run(cold, cold.open(ids_of(0, 30), seed=0), 5)
    assert warm[1] != before[1]


def test_no_id_is_padding(model):
    """Catches: masks that compare ids, and so hide an end-of-sequence id that also pads (B39)."""
    s = Sampler(model, rows=3, max_len=64)
    prompts = [[5, 2, 7, 2, 2], [0, 0, 0], [2]]
    rows = [s.open(p, seed=i) for i, p in enumerate(prompts)]
    for _ in range(3):
        for prompt, token, logp in zip(prompts, *s.step(rows), strict=True):
            prompt.append(token)
            assert abs(full_logp(model, prompt)[-1] - logp) < 1e-4
    s.extend(rows[0], [2, 0])
    [token], [logp] = s.step(rows[:1])
    assert abs(full_logp(model, [*prompts[0], 2, 0, token])[-1] - logp) < 1e-4


def test_padded_vocabulary_is_never_drawn():
    """Catches: ids that the matrix has and the tokenizer does not (B43)."""
    model = make_model(scale=0.05)
    model.num_ids = 7
    s = Sampler(model, rows=8, max_len=64)
    rows = [s.open([1, 2], seed=i) for i in range(8)]
    drawn = [t for _ in range(60) for t in s.step(rows)[0]]
    assert set(drawn) == set(range(7))
    with pytest.raises(ValueError, match=r"id 7 is outside the vocabulary \[0, 7\)"):
        s.extend(rows[0], [3, 7])


def test_temperature_zero_is_argmax(model):
    """Catches: noise or a division by zero at temperature 0; the log-prob there is that of temperature 1."""
    s = Sampler(model, rows=2, max_len=64, temperature=0.0)
    rows, text = [s.open(ids_of(0, 9), seed=i) for i in range(2)], ids_of(0, 9)
    for _ in range(10):
        with torch.no_grad():
            n = len(text)
            logits = model(torch.tensor(text), torch.arange(n), Packed(torch.tensor([0, n]), n))[-1]
        ids, logp = s.step(rows)
        assert ids == [int(logits.argmax())] * 2
        assert logp[0] == pytest.approx(logits.log_softmax(-1).max().item(), abs=1e-4)
        text.append(ids[0])


def test_greedy_equals_transformers():
    """Catches: any difference from transformers' own cached generation on the same weights."""
    transformers = pytest.importorskip("transformers")
    model = make_model(architecture="LlamaForCausalLM", qk_norm=False, tied=False)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.config.to_hf())).eval()
    theirs.load_state_dict(model.state_dict())
    prompts = [ids_of(i, 4 + 7 * i) for i in range(3)]
    s = Sampler(model, rows=3, max_len=64, temperature=0.0)
    rows = [s.open(p, seed=0) for p in prompts]
    ours = list(zip(*(s.step(rows)[0] for _ in range(16)), strict=True))
    for prompt, ids in zip(prompts, ours, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert out[0, len(prompt) :].tolist() == list(ids)


def test_draws_follow_the_softmax():
    """Catches: a biased hash, a race that is not the softmax, dependence of neighbouring seeds or indices."""
    hashes, num = id_hashes(40), 40_000
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 1.5
    for temperature in (1.0, 0.5):
        p = (logits / temperature).softmax(-1).numpy()
        for seeds, indices in ((np.arange(num), np.full(num, 7)), (np.full(num, 7), np.arange(num))):
            keys = torch.from_numpy(noise_keys(seeds.astype(np.uint64), indices))
            ids, logp = draw(logits.repeat(num, 1), keys, hashes, temperature=temperature)
            assert np.allclose(logp.numpy(), np.log(p)[ids], atol=1e-5)
            counts = np.bincount(ids, minlength=40)
            chi2 = ((counts - num * p) ** 2 / (num * p)).sum()
            assert chi2 < 39 + 5 * math.sqrt(2 * 39)
            pairs = np.histogram2d(ids[:-1], ids[1:], bins=np.arange(41))[0]  # neighbours are independent
            expected = (num - 1) * np.outer(p, p)
            chi2 = ((pairs - expected) ** 2 / expected)[expected > 5].sum()
            assert chi2 < (expected > 5).sum() + 5 * math.sqrt(2 * (expected > 5).sum())


def test_noise_is_uniform_and_uncorrelated():
    """Catches: noise outside (0, 1), correlated across ids, rows or indices, or too coarse for rare ids."""
    seeds = np.arange(600, dtype=np.uint64) % 20
    keys = torch.from_numpy(noise_keys(seeds, np.arange(600) // 20))
    noise = -exponential_noise(keys, id_hashes(5000))  # Exp(1), (600, 5000)
    assert 0 < noise.min() < 3e-6 and noise.isfinite().all()
    u = 1 - noise.double().neg().exp().numpy()
    counts = np.histogram(u, bins=256, range=(0, 1))[0]
    chi2 = ((counts - u.size / 256) ** 2 / (u.size / 256)).sum()
    assert chi2 < 255 + 5 * math.sqrt(2 * 255)
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (u[:-20], u[20:])):  # ids, seeds, indices
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(a.size)


def test_filters_by_hand():
    """Catches: top-p that drops the id which crosses it; filters in another order than transformers'."""
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert keep_mask(p, top_k=0, top_p=0.6, min_p=0.0).tolist() == [[False, True, False, True]]
    assert keep_mask(p, top_k=0, top_p=0.3, min_p=0.0).tolist() == [[False, True, False, False]]
    assert keep_mask(p, top_k=3, top_p=1.0, min_p=0.0).tolist() == [[False, True, True, True]]
    assert keep_mask(p, top_k=2, top_p=0.6, min_p=0.0).tolist() == [[False, True, False, True]]  # 4/7 < 0.6
    assert keep_mask(p, top_k=0, top_p=1.0, min_p=0.6).tolist() == [[False, True, False, True]]


def test_filters_are_for_evaluation(model):
    """Catches: training on ids from a filtered distribution (B27); in evaluation only kept ids are drawn."""
    for bad in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match="while training"):
            Sampler(model, rows=1, max_len=8, **bad)
    s = Sampler(model, rows=32, max_len=8, top_k=2, training=False)
    rows = [s.open(ids_of(0, 5), seed=i) for i in range(32)]
    ids, logp = s.step(rows)
    assert len(set(ids)) == 2
    assert logp[0] == pytest.approx(full_logp(model, [*ids_of(0, 5), ids[0]])[-1], abs=1e-4)


def test_cache_that_does_not_fit(model, monkeypatch):
    """Catches: an allocation that dies in the middle of a run; the message says what to lower."""
    monkeypatch.setattr(cache, "free_bytes", lambda device: 10**9)
    message = r"rows=64 x max_len=100000 needs 1\.6 GB of cache, 1\.0 free; lower rows or max_len"
    with pytest.raises(ValueError, match=message):
        Sampler(model, rows=64, max_len=100_000)
    assert Sampler(model, rows=None, max_len=100_000).free == 31  # 25.6 MB a row, 80 % of what is free


def test_misuse_has_a_message(model):
    """Catches: silent acceptance of what would corrupt another row."""
    s = Sampler(model, rows=2, max_len=6)
    a = s.open([1, 2, 3], seed=0)
    b = s.open([1], seed=-5)  # any integer is a seed
    with pytest.raises(ValueError, match="no ids"):
        s.open([], seed=0)
    with pytest.raises(ValueError, match="7 tokens exceed max_len=6"):
        s.extend(a, [1] * 4)
    with pytest.raises(ValueError, match="id -1 is outside"):
        s.extend(a, [-1])
    with pytest.raises(ValueError, match="all 2 rows are open"):
        s.open([1], seed=0)
    with pytest.raises(ValueError, match="twice"):
        s.step([a, a])
    s.extend(a, [])
    run(s, a, 3)
    with pytest.raises(ValueError, match=f"row {a}: 7 tokens exceed max_len=6"):
        s.step([b, a])
    assert s.length(b) == 1 and s.step([]) == ([], [])
    s.close(b)
    with pytest.raises(ValueError, match=f"row {b} is closed"):
        s.step([b])
    with pytest.raises(ValueError, match="row 99 was never opened"):
        s.step([99])
