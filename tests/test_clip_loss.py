"""kernels.clip_loss against values by hand and the definition in float64. Torch, interpreted and on a GPU."""

import math

import pytest
import torch

from kernels.clip_loss import METRICS, clip_loss, clip_loss_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """Fill what torch.empty returns, so that a value which is read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def one(ratio, advantage, **options):
    """Loss and d loss / d ratio of a single token."""
    logp = torch.tensor([math.log(ratio)], device=DEVICE, requires_grad=True)
    zero, one = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    loss, _ = clip_loss(logp, zero, one * advantage, one, **{**CLIP, **options})
    loss.backward()
    return float(loss.detach()), float(logp.grad) / ratio


@pytest.mark.parametrize(
    "advantage, ratio, options, loss, grad",
    [
        (1, 1.26, {}, -1.26, -1),
        (1, 1.5, {}, -1.28, 0),
        (1, 0.5, {}, -0.5, -1),
        (-1, 0.5, {}, 0.8, 0),
        (-1, 3.5, {}, 3.5, 1),
        (-1, 3.5, {"dual_clip": 3.0}, 3.0, 0),
        (1, 3.5, {"dual_clip": 3.0}, -1.28, 0),
        (1, 1.26, {"clip_high": 0.25}, -1.25, 0),
        (0, 1.26, {}, 0.0, 0),
    ],
)
def test_clip_boundaries(advantage, ratio, options, loss, grad):
    """Catches B20: a bound on the wrong side, or a clip that also stops the gradient that would undo it."""
    assert one(ratio, advantage, **options) == pytest.approx((loss, grad), abs=2e-6)


@pytest.mark.parametrize("d, k3, grad", [(0.5, 0.148721, -0.648721), (-0.5, 0.106531, 0.393469)])
def test_kl_to_the_reference(d, k3, grad):
    """Catches B19: k3 with d of the wrong sign."""
    logp = torch.zeros(1, device=DEVICE, requires_grad=True)
    zero, one = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    loss, metrics = clip_loss(logp, zero, zero, one, ref_logp=one * d, kl_beta=2.0, **CLIP)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2 * k3, abs=2e-6)
    assert float(metrics["kl_ref"]) == pytest.approx(k3, abs=2e-6)
    assert float(logp.grad) == pytest.approx(2 * grad, abs=2e-6)


def case(N, seed=0, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    logp, old, ref = (-spread * torch.rand(3, N, generator=generator) * 3).unbind()
    advantages = torch.randn(N, generator=generator)
    weights = torch.rand(N, generator=generator) * (torch.rand(N, generator=generator) < 0.7)
    return [x.to(DEVICE) for x in (logp, old, advantages, weights, ref)]


@pytest.mark.parametrize("N", [1, 2, 1000, 1025, 4099])
@pytest.mark.parametrize("with_ref", [False, True])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_loss_and_gradient_equal_the_definition(N, with_ref, dual_clip):
    """Catches a hand-written gradient that is not the loss's, and a tail block that is lost."""
    logp, old, advantages, weights, ref = case(N)
    options = {**CLIP, "dual_clip": dual_clip, "ref_logp": ref if with_ref else None, "kl_beta": 0.3}
    ours, want = logp.clone().requires_grad_(), logp.double().requires_grad_()
    loss, _ = clip_loss(ours, old, advantages, weights, **options)
    if with_ref:
        options["ref_logp"] = ref.double()
    ref_loss = clip_loss_ref(want, old.double(), advantages.double(), weights.double(), **options)
    (3 * loss).backward()  # an upstream gradient that is not 1 (B69)
    (3 * ref_loss).backward()
    scale = float(weights.double().abs().sum()) + 1e-9
    assert abs(float(loss.detach()) - float(ref_loss.detach())) / scale < 3e-7
    torch.testing.assert_close(ours.grad.double(), want.grad, atol=2e-6, rtol=2e-6)


def test_metrics_are_sums_over_weighted_tokens():
    """Catches B08: masked tokens in the ratio's mean (0.684 for 1.0), and clips counted on the wrong side."""
    ratio = torch.tensor([1.5, 0.5, 0.5, 3.5, 1.0, 7.0], device=DEVICE)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0], device=DEVICE)
    weights = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.0], device=DEVICE)
    logp = ratio.log().requires_grad_()
    loss, metrics = clip_loss(logp, torch.zeros_like(ratio), advantages, weights, dual_clip=3.0, **CLIP)
    got = {name: round(float(metrics[name]), 5) for name in METRICS}
    kl = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 0.5, 3.5, 1.0))
    assert got == {
        "tokens": 5.0,
        "clip_low": 1.0,
        "clip_high": 2.0,
        "ratio_sum": 7.0,
        "ratio_max": 3.5,
        "kl_old": round(kl, 5),
        "kl_ref": 0.0,
    }
    assert all(x.ndim == 0 and not x.requires_grad for x in metrics.values())
    assert loss.requires_grad


@pytest.mark.parametrize("far", [200.0, -200.0, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_far_log_ratios_stay_finite(far, advantage):
    """Catches exp(200) = inf in the loss and 0 * inf = NaN in its gradient (B19)."""
    logp = torch.tensor([far, -1.0], device=DEVICE, requires_grad=True)
    zero, one = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)
    loss, metrics = clip_loss(logp, zero, one * advantage, one, ref_logp=-one, kl_beta=0.1, **CLIP)
    loss.backward()
    values = torch.stack([loss.detach(), *metrics.values()])
    assert values.isfinite().all() and logp.grad.isfinite().all()
    assert float(logp.grad[0]) == 0.0  # both clamps hit


@pytest.mark.parametrize("N", [0, 5])
def test_nothing_to_train_on_gives_zeros(N):
    """Catches a division by the number of tokens: an all-masked batch, also one that holds NaN and inf."""
    logp = torch.full((N,), math.nan, device=DEVICE, requires_grad=True)
    zero = torch.zeros(N, device=DEVICE)
    loss, metrics = clip_loss(
        logp, zero - math.inf, zero, zero, ref_logp=zero + math.inf, kl_beta=1.0, **CLIP
    )
    loss.backward()
    assert float(loss.detach()) == 0.0 and logp.grad.tolist() == [0.0] * N
    assert [float(x) for x in metrics.values()] == [0.0] * len(METRICS)


def test_ties_at_the_edge_keep_their_gradient():
    """Catches a comparison that is not strict: a ratio exactly on the bound is not clipped."""
    logp = torch.tensor([0.0, 0.0], device=DEVICE, requires_grad=True)
    zero, one = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)
    advantages = torch.tensor([1.0, -1.0], device=DEVICE)
    loss, metrics = clip_loss(logp, zero, advantages, one, clip_low=0.0, clip_high=0.0)
    loss.backward()
    assert logp.grad.tolist() == [-1.0, 1.0]
    assert float(metrics["clip_low"]) == float(metrics["clip_high"]) == 0.0


def test_strided_inputs_and_a_second_backward():
    """Catches kernels that assume stride 1, and a stored gradient that the first backward spoils."""
    logp, old, advantages, weights, _ = case(65)
    wide = torch.stack([logp, logp + 1], dim=1)[:, 0].requires_grad_()
    wide_old = torch.stack([old, old], dim=1)[:, 1]
    want = logp.clone().requires_grad_()
    loss, _ = clip_loss(wide, wide_old, advantages, weights, **CLIP)
    (first,) = torch.autograd.grad(loss, wide, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, wide)
    (plain,) = torch.autograd.grad(clip_loss(want, old, advantages, weights, **CLIP)[0], want)
    assert torch.equal(first, plain) and torch.equal(second, 2 * plain)


def test_bad_shapes_and_clips_are_errors():
    """Catches broadcasting of a (1,) weight over the batch and a dual clip below the clip itself."""
    x = torch.zeros(3, device=DEVICE)
    with pytest.raises(ValueError, match=r"wanted \(N,\)"):
        clip_loss(x, x, x, x[:1], **CLIP)
    with pytest.raises(ValueError, match=r"dual_clip=0\.5"):
        clip_loss(x, x, x, x, dual_clip=0.5, **CLIP)
    with pytest.raises(ValueError, match=r"clip_low=-0\.1"):
        clip_loss(x, x, x, x, clip_low=-0.1, clip_high=0.2)
