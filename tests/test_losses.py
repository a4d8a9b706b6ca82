"""nanoplan.losses against numbers worked out by hand (B-numbers: known faults of other trainers)."""

import math

import pytest
import torch

from kernels.linear_logp import linear_logp
from nanoplan.batch import pack, pad_micro_batches
from nanoplan.losses import policy_loss, token_weights, truncated_ratio
from nanoplan.trajectory import Trajectory

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def batches(lengths, advantages, *, old_logp=None, max_tokens=1000):
    """Pack one trajectory per length, prompt of one token; old_logp flat or 0."""
    flat = iter(old_logp or [0.0] * sum(lengths))
    out = []
    for length in lengths:
        t = Trajectory()
        t.observe([0])
        for id in range(length):
            t.sample(id, next(flat))
        out.append(t)
    return pack(out, advantages, max_tokens=max_tokens)


def weights_of(batch, reduction, *, num_tokens, num_sequences, longest=8):
    return token_weights(
        batch,
        reduction=reduction,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_tokens_per_sequence=longest,
    )


PER_TOKEN = {2: [1.0, 3.0], 4: [2.0, 2.0, 2.0, 6.0]}  # losses per token of two sequences


@pytest.mark.parametrize("reduction, want", [("sequence", 2.5), ("token", 16 / 6), ("constant", 1.0)])
@pytest.mark.parametrize("max_tokens", [1000, 4])
def test_reductions_do_not_depend_on_the_split(reduction, want, max_tokens):
    """Catches B14: a mean per micro-batch, which gives 2.5 instead of 2.667 for the token mean."""
    parts = batches([2, 4], [1.0, 1.0], max_tokens=max_tokens)
    assert len(parts) == (1 if max_tokens == 1000 else 2)
    total = 0.0
    for part in parts:
        losses = torch.tensor([x for n in part.lengths.tolist() for x in PER_TOKEN[n]])
        total += float((weights_of(part, reduction, num_tokens=6, num_sequences=2) * losses).sum())
    assert total == pytest.approx(want, abs=1e-6)


def test_ranks_of_uneven_length_weigh_by_their_tokens():
    """Catches B15: each rank divides by its own tokens, and short ranks weigh more (2.5 instead of 2.667)."""
    rank0, rank1 = (batches([n], [1.0])[0] for n in (2, 4))
    sums = []
    for part, losses in ((rank0, [1.0, 3.0]), (rank1, [3.0] * 4)):
        weights = weights_of(part, "token", num_tokens=6, num_sequences=2)
        sums.append(
            float((weights * torch.tensor(losses)).sum()) * 2
        )  # dist.backward multiplies by world size
    assert sum(sums) / 2 == pytest.approx(16 / 6, abs=1e-6)


def test_first_step_is_reinforce():
    """Catches B13: ratio 1 is taken for no gradient, or the stored log-probs are not used at all."""
    (batch,) = batches([2], [2.0], old_logp=[-1.0, -2.0])
    logp = batch.old_logp.clone().requires_grad_()
    weights = weights_of(batch, "token", num_tokens=2, num_sequences=1)
    loss, metrics = policy_loss(logp, batch, weights=weights, **CLIP)
    loss.backward()
    assert float(loss.detach()) == -2.0
    assert logp.grad.tolist() == [-1.0, -1.0]
    assert float(metrics["clip_high"]) == float(metrics["clip_low"]) == 0.0
    stale = (batch.old_logp + 0.5).requires_grad_()
    assert float(policy_loss(stale, batch, weights=weights, **CLIP)[0].detach()) == pytest.approx(-2 * 1.28)


def test_gspo_takes_one_ratio_per_sequence():
    """Catches B21: the sum of log-ratios for their mean, or token-level gradients."""
    (batch,) = batches([3], [1.0], old_logp=[0.0] * 3)
    logp = torch.tensor([0.2, -0.1, 0.05], requires_grad=True)
    weights = weights_of(batch, "sequence", num_tokens=3, num_sequences=1)
    loss, metrics = policy_loss(logp, batch, weights=weights, level="sequence", **CLIP)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-1.051271, abs=1e-6)
    assert logp.grad.tolist() == pytest.approx([-0.350424] * 3, abs=1e-6)
    assert float(metrics["ratio_max"]) == pytest.approx(1.051271, abs=1e-6)
    logp.grad = None
    policy_loss(logp, batch, weights=weights, **CLIP)[0].backward()
    assert logp.grad.tolist() == pytest.approx([-0.407134, -0.301612, -0.350424], abs=1e-6)


def test_gspo_does_not_mix_sequences():
    """Catches means taken over the packed batch."""
    (batch,) = batches([1, 3], [1.0, -1.0])
    logp = torch.tensor([0.1, 0.2, -0.1, 0.05], requires_grad=True)
    weights = weights_of(batch, "sequence", num_tokens=4, num_sequences=2)
    loss, _ = policy_loss(logp, batch, weights=weights, level="sequence", **CLIP)
    assert float(loss.detach()) == pytest.approx((-math.exp(0.1) + math.exp(0.05)) / 2, abs=1e-6)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_gspo_equals_grpo_for_sequences_of_one_token(reduction):
    """Catches a sequence ratio that differs from the token ratio where both are the same."""
    (batch,) = batches([1, 1, 1], [1.0, -1.0, 0.5], old_logp=[-1.0, -2.0, -0.5])
    logp = torch.tensor([-0.7, -2.5, -0.6], requires_grad=True)
    weights = weights_of(batch, reduction, num_tokens=3, num_sequences=3)
    grads = []
    for level in ("token", "sequence"):
        (grad,) = torch.autograd.grad(policy_loss(logp, batch, weights=weights, level=level, **CLIP)[0], logp)
        grads.append(grad)
    torch.testing.assert_close(*grads, atol=1e-7, rtol=0)


def test_equal_lengths_make_all_reductions_one_up_to_a_factor():
    """Catches B24: a flag that is read while the reduction stays another one."""
    (batch,) = batches([4, 4], [1.0, -1.0])
    token, sequence, constant = (
        weights_of(batch, r, num_tokens=8, num_sequences=2, longest=16)
        for r in ("token", "sequence", "constant")
    )
    torch.testing.assert_close(token, sequence)
    torch.testing.assert_close(token, constant * (16 / 4))


def test_truncated_correction_caps_and_carries_no_gradient():
    """Catches B29: a cap on the log, or a correction through which gradients flow."""
    log_ratio = torch.tensor([0.0, 0.5, 1.2, -3.0], requires_grad=True)
    ratio = truncated_ratio(log_ratio, torch.zeros(4), cap=2.0)
    assert ratio.tolist() == pytest.approx([1.0, 1.6487, 2.0, 0.0498], abs=1e-4)
    assert not ratio.requires_grad
    with pytest.raises(ValueError, match="truncated_is=0"):
        truncated_ratio(log_ratio, torch.zeros(4), cap=0.0)


def test_truncated_correction_is_not_applied_twice():
    """Catches a ratio against the sampler times the same ratio as a weight."""
    (batch,) = batches([3], [1.0], old_logp=[-1.0, -1.0, -1.0])
    logp = torch.tensor([-1.0, -0.5, 0.2], requires_grad=True)
    weights = weights_of(batch, "token", num_tokens=3, num_sequences=1)
    loss, metrics = policy_loss(logp, batch, weights=weights, truncated_is=2.0, **CLIP)
    loss.backward()
    rho = [1.0, math.exp(0.5), 2.0]
    assert float(metrics["ratio_max"]) == 1.0  # against the trainer's own log-probs
    assert logp.grad.tolist() == pytest.approx([-x / 3 for x in rho], abs=1e-6)
    old = torch.tensor([-1.0, -0.5, 0.0])  # a second update on the same batch
    logp.grad = None
    policy_loss(logp, batch, weights=weights, truncated_is=2.0, trainer_logp=old, **CLIP)[0].backward()
    rho[2] = 2.0
    want = [-rho[0] / 3, -rho[1] / 3, -rho[2] * math.exp(0.2) / 3]
    assert logp.grad.tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_penalty_values(level):
    """Catches B19: the sign of d, k3's gradient, and a sequence level that loses the KL term."""
    (batch,) = batches([2], [0.5])
    logp = torch.zeros(2, requires_grad=True)
    ref = torch.tensor([0.5, -0.5])
    kw = {"weights": torch.ones(2), "level": level, **CLIP}
    (plain,) = torch.autograd.grad(policy_loss(logp, batch, **kw)[0], logp)
    loss, metrics = policy_loss(logp, batch, ref_logp=ref, kl_beta=0.1, **kw)
    (grad,) = torch.autograd.grad(loss, logp)
    k3 = 0.148721 + 0.106531
    assert float(metrics["kl_ref"]) == pytest.approx(k3, abs=1e-6)
    assert float(loss.detach()) == pytest.approx(-1.0 + 0.1 * k3, abs=1e-6)
    assert (grad - plain).tolist() == pytest.approx([-0.0648721, 0.0393469], abs=1e-6)


def test_changing_other_rows_changes_nothing():
    """Catches B05: logits of rows 0 3 4 7 of p p a a o o a e reach the loss or its gradient."""
    t = Trajectory()
    t.observe([1, 2])
    t.sample(3, -1.0)
    t.sample(4, -1.0)
    t.observe([5, 6])
    t.sample(7, -1.0)
    t.sample(8, -1.0)
    (batch,) = pack([t], [1.0], max_tokens=100)
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(8, 16, generator=generator), torch.randn(9, 16, generator=generator)

    def loss_and_grad(hidden):
        hidden = hidden.clone().requires_grad_()
        logp, _ = linear_logp(hidden[batch.rows], head, batch.targets)
        weights = weights_of(batch, "token", num_tokens=4, num_sequences=1)
        loss = policy_loss(logp, batch, weights=weights, clip_low=1.0, clip_high=1e9)[0]
        loss.backward()
        return float(loss.detach()), hidden.grad

    loss, grad = loss_and_grad(hidden)
    assert grad.any(dim=1).nonzero()[:, 0].tolist() == [1, 2, 5, 6]
    changed = hidden.clone()
    changed[[0, 3, 4, 7]] += 5.0
    assert loss_and_grad(changed)[0] == loss


def test_a_dummy_adds_nothing():
    """Catches NaN from a division by the zero tokens of a dummy, in the loss or the metrics."""
    (dummy,) = pad_micro_batches([], 1)
    for level in ("token", "sequence"):
        for reduction in ("token", "sequence", "constant"):
            logp = torch.zeros(0, requires_grad=True)
            weights = weights_of(dummy, reduction, num_tokens=5, num_sequences=2)
            loss, metrics = policy_loss(logp, dummy, weights=weights, level=level, truncated_is=2.0, **CLIP)
            loss.backward()
            assert float(loss.detach()) == 0.0
            assert all(float(x) == 0.0 for x in metrics.values())


def test_bad_settings_are_errors():
    """Catches a misspelt reduction or level that falls back to a default."""
    (batch,) = batches([2], [1.0])
    with pytest.raises(ValueError, match="reduction='mean'"):
        weights_of(batch, "mean", num_tokens=2, num_sequences=1)
    with pytest.raises(ValueError, match="num_tokens=0"):
        weights_of(batch, "token", num_tokens=0, num_sequences=1)
    with pytest.raises(ValueError, match="level='word'"):
        policy_loss(torch.zeros(2), batch, weights=torch.ones(2), level="word", **CLIP)
