"""nanoplan.preference against numbers worked out elsewhere, identities, and fp64 differences."""

import math

import pytest
import torch
import torch.nn.functional as F

from nanoplan import preference as p
from nanoplan.preference import PairLogps

LOG2 = math.log(2)


def pair(w=-10.0, l=-12.0, ref_w=-11.0, ref_l=-11.5, tokens=(5, 8), *, num=1) -> PairLogps:
    """`num` equal pairs in fp64, chosen and rejected with gradient."""
    values = [torch.full((num,), v, dtype=torch.float64) for v in (w, l, ref_w, ref_l)]
    return PairLogps(
        values[0].requires_grad_(), values[1].requires_grad_(), *values[2:],
        *(torch.full((num,), n) for n in tokens),
    )  # fmt: skip


def one(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


def hard(x, **options):
    margin = p.severity_margin(one(x), scale=0.01)
    return {"margin": margin, "soft_gap": one(0.0), "feasible": one(1.0)} | options


CM = {"beta": 0.1, "gamma": 1.5, "alpha": 0.3}
BELOW = {"w": -11.2, "l": -12.0}  # the chosen one lies below its reference


@pytest.mark.parametrize(("loss", "logps", "options", "want"), [
    (p.dpo, {}, {"beta": 0.1}, 0.620957),
    (p.ipo, {}, {"tau": 0.1}, 12.25),
    (p.ipo_normalised, {}, {"tau": 0.1}, 22.443906),
    (p.simpo, {}, {"beta": 2.0, "gamma": 1.0}, 2.126928),
    (p.dpop, {}, {"beta": 0.1, "penalty": 50}, 0.620957),
    (p.dpop, BELOW, {"beta": 0.1, "penalty": 5}, 0.728760),
    (p.dpop, BELOW, {"beta": 0.1, "penalty": 50}, 1.291419),
    (p.kto, {}, {"beta": 0.1, "z0": 0.3}, (0.482507 + 0.480011) / 2),
    (p.kto, {}, {"beta": 0.1, "z0": 0.3, "weight_rejected": 0.0}, 0.482507 / 2),
    (p.mmpo, {}, {"beta": 0.1, "gamma": 2.2, "gap": one(0.0)}, 0.695957),
    (p.mmpo, {}, {"beta": 0.1, "gamma": 2.2, "gap": one(0.5)}, 0.658418),
    (p.mmpo, {}, {"beta": 0.1, "gamma": 2.2, "gap": one(1.0)}, 0.635920),
    (p.mmpo, {}, {"beta": 0.1, "gamma": 2.2, "gap": one(2.0)}, 0.622776),
    (p.cmdpo, {}, CM | hard(87.0), 1.242620),
    (p.cmdpo, {}, CM | hard(1.0), 0.627923),
    (p.cmdpo, {}, CM | hard(87.0, soft_gap=one(0.25)), 1.289192),
    (p.cmdpo, {}, CM | hard(87.0, soft_gap=one(-0.25)), 1.242620),  # a preference given up costs nothing
    (p.cmdpo, {}, CM | hard(87.0, soft_gap=one(0.25), feasible=one(0.0)), 1.242620),
    # by hand: u = 2 (-10/5 + 12/8) - 1.4 - 0.5 z, z = (0.2625 - 0.1) / 0.5 = 0.325: log(1 + e^2.5625)
    (p.alpha_dpo, {}, {"beta": 2.0, "gamma": 1.4, "alpha": 0.5, "mean": 0.1, "std": 0.5}, 2.636783),
    # by hand: u = (0.1 * 1.5 - 0.5 * 0.25) / 0.5 = 0.05: log(1 + e^-0.05)
    (p.modpo, {}, {"beta": 0.1, "weight": 0.5, "other_gap": one(0.25)}, 0.668460),
    (p.cdpo_constrained, {}, {"beta": 0.1, "label": one(-1.0)}, 0.770957),  # 0.620957 + 0.15
])  # fmt: skip
def test_values(loss, logps, options, want):
    # Catches: a penalty outside sigma, a sum where a mean is meant, gamma inside beta, a swapped sign.
    assert float(loss(pair(**logps), **options).detach()) == pytest.approx(want, abs=1e-6)


def test_the_margin_in_numbers():
    # Catches: a margin without its tanh, or with the severity in another unit than its scale is for.
    margins = 1.5 * p.severity_margin(torch.tensor([87.0, 1.0, 0.0, 1e6]), scale=0.01)
    assert margins.tolist() == pytest.approx([1.052061, 0.015000, 0.0, 1.5], abs=1e-6)


SOME = [pair(), pair(**BELOW), pair(-3.0, -2.0, -2.5, -2.5, (1, 9)), pair(-1.0, -50.0, -8.0, -3.0, (30, 4))]


@pytest.mark.parametrize("x", SOME)
def test_identities(x):
    # Catches: a variant that does not fall back to what it varies.
    dpo = p.dpo(x, beta=0.1)
    zero, far = torch.zeros(1), torch.full((1,), 1e9)
    same = [
        p.cmdpo(x, margin=far, soft_gap=far, feasible=one(1.0), beta=0.1, gamma=0.0, alpha=0.0),
        p.cmdpo(x, margin=zero, soft_gap=-far, feasible=one(1.0), beta=0.1, gamma=1.5, alpha=0.3),
        p.dpop(x, beta=0.1, penalty=0.0),
        p.modpo(x, beta=0.1, weight=1.0, other_gap=far),
        p.mmpo(x, beta=0.1, gamma=1e9, gap=one(0.3)),
        p.cdpo_constrained(x, beta=0.1, label=one(1.0)),
    ]
    for other in same:
        assert float((other - dpo).detach()) == pytest.approx(0.0, abs=1e-12)
    swapped = PairLogps(
        x.rejected, x.chosen, x.ref_rejected, x.ref_chosen, x.rejected_tokens, x.chosen_tokens
    )
    both = torch.exp(-dpo) + torch.exp(-p.dpo(swapped, beta=0.1))
    assert float(both.detach()) == pytest.approx(1.0, abs=1e-12)
    simpo = p.simpo(x, beta=2.0, gamma=1.4)
    alpha = p.alpha_dpo(x, beta=2.0, gamma=1.4, alpha=0.0, mean=3.0, std=2.0)
    assert torch.equal(simpo, alpha)


def test_a_policy_that_is_its_reference():
    # Catches: a reference of other weights or other tokens: DPO is then not ln 2 and no reward is 0.
    x = pair(-10.0, -12.0, -10.0, -12.0)
    assert float(p.dpo(x, beta=0.1).detach()) == LOG2
    assert float(p.kto(x, beta=0.1, z0=0.0).detach()) == 0.5
    assert float(p.ipo(x, tau=0.1).detach()) == 25.0
    assert x.gain_chosen.item() == x.gain_rejected.item() == 0.0
    single = PairLogps(*(t.detach().float() for t in (x.chosen, x.rejected, x.ref_chosen, x.ref_rejected)),
                       x.chosen_tokens, x.rejected_tokens)  # fmt: skip
    assert torch.equal(p.dpo(single, beta=0.1), torch.tensor([LOG2]))


def per_pair(*values):
    return torch.tensor(values, dtype=torch.float64)


LOSSES = {
    "cmdpo": lambda x: p.cmdpo(
        x, margin=per_pair(0.1, 0.9, 0.5), soft_gap=per_pair(0.5, 0.2, -0.2), feasible=per_pair(1, 0, 1), **CM
    ),
    "dpo": lambda x: p.dpo(x, beta=0.1),
    "ipo": lambda x: p.ipo(x, tau=0.1),
    "ipo_normalised": lambda x: p.ipo_normalised(x, tau=0.1),
    "kto": lambda x: p.kto(x, beta=0.1, z0=0.3, weight_chosen=1.2, weight_rejected=0.7),
    "simpo": lambda x: p.simpo(x, beta=2.0, gamma=1.4),
    "dpop": lambda x: p.dpop(x, beta=0.1, penalty=50.0),
    "mmpo": lambda x: p.mmpo(x, beta=0.1, gamma=2.2, gap=per_pair(0.0, 0.4, 1.0)),
    "modpo": lambda x: p.modpo(x, beta=0.1, weight=0.7, other_gap=per_pair(0.5, -0.5, 0.0)),
    "cdpo_constrained": lambda x: p.cdpo_constrained(x, beta=0.1, label=per_pair(1, -1, 1)),
}


def three(w, l) -> PairLogps:
    refs = per_pair(-11, -9, -4), per_pair(-11.5, -8, -4.2)
    return PairLogps(w, l, *refs, torch.tensor([5, 3, 2]), torch.tensor([8, 3, 4]))


def alpha(x) -> torch.Tensor:
    return p.alpha_dpo(x, beta=2.0, gamma=1.4, alpha=0.5, mean=0.1, std=0.5)


@pytest.mark.parametrize("name", [*LOSSES, "alpha_dpo"])
def test_gradients_are_those_of_the_values(name):
    # Catches: a detached factor, a clamp that stops a gradient, a margin that learns.
    w, l = per_pair(-10.0, -9.5, -3.7), per_pair(-12.0, -7.0, -6.0)
    z = (p.alpha_gap(three(w, l)) - 0.1) / 0.5

    def alpha_with_z_held(x):
        own = x.per_token()
        return -F.logsigmoid(2.0 * (own.chosen - own.rejected) - 1.4 - 0.5 * z)

    loss = LOSSES.get(name, alpha)
    value = LOSSES.get(name, alpha_with_z_held)
    assert torch.equal(value(three(w, l)), loss(three(w, l)))
    a, b = w.clone().requires_grad_(), l.clone().requires_grad_()
    loss(three(a, b)).sum().backward()
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = 1e-6
        by_w = (value(three(w + step, l)) - value(three(w - step, l))).sum() / 2e-6
        by_l = (value(three(w, l + step)) - value(three(w, l - step))).sum() / 2e-6
        assert float(by_w) == pytest.approx(float(a.grad[i]), abs=1e-7), i
        assert float(by_l) == pytest.approx(float(b.grad[i]), abs=1e-7), i
    assert (a.grad != 0).all()


def test_alpha_dpo_is_constant_where_all_gaps_are():
    # Catches: a division by a spread of 0 at the first step, where policy and reference are equal.
    x = pair(-10.0, -12.0, -10.0, -12.0, num=3)
    gap = p.alpha_gap(x)
    assert gap.tolist() == [0.0] * 3 and not gap.requires_grad
    loss = p.alpha_dpo(x, beta=2.0, gamma=1.4, alpha=0.5, mean=0.0, std=0.0)
    assert torch.equal(loss, p.simpo(x, beta=2.0, gamma=1.4))
    assert p.running_moments(None, 2.0, 3.0) == (2.0, 3.0)  # not 0.2, 0.3: no start at 0
    assert p.running_moments((0.0, 0.0), 2.0, 3.0) == (2.0, 3.0)  # nor at a step whose gaps are equal
    assert p.running_moments((2.0, 3.0), 4.0, 1.0) == pytest.approx((2.2, 2.8))


def test_dpop_starts_as_dpo():
    # Catches: a penalty with a slope at the reference itself, penalty times DPO's, in the first update.
    grads = []
    for loss in (lambda x: p.dpop(x, beta=0.1, penalty=50.0), lambda x: p.dpo(x, beta=0.1)):
        x = pair(-10.0, -12.0, -10.0, -12.0)
        loss(x).sum().backward()
        grads.append((x.chosen.grad, x.rejected.grad))
    assert grads[0] == grads[1]


def test_no_loss_divides_by_an_empty_completion():
    # Catches: 0 / 0 in a length-normalised loss.
    x = pair(0.0, -12.0, 0.0, -11.5, (0, 8))
    for loss in (p.simpo(x, beta=2.0, gamma=1.4), p.ipo_normalised(x, tau=0.1)):
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(x.chosen.grad).all()


def test_extreme_log_probs_stay_finite():
    # Catches: log(sigmoid(x)) instead of logsigmoid: -inf, then NaN in backward.
    for sign in (1.0, -1.0):
        w, l = per_pair(*[-sign * 1e4] * 3), per_pair(*[sign * 1e4] * 3)
        for name, loss in LOSSES.items():
            a, b = w.clone().requires_grad_(), l.clone().requires_grad_()
            value = loss(three(a, b))
            value.sum().backward()
            assert torch.isfinite(value).all() and torch.isfinite(a.grad).all(), name


def test_kto_without_a_mismatch_is_refused():
    # Catches B33: a "mismatched" completion that is the matched one, or a negative KL.
    assert p.kto_z0(6.0, 4) == 1.5 and p.kto_z0(-6.0, 4) == 0.0
    with pytest.raises(ValueError, match="count=0"):
        p.kto_z0(0.0, 0)


def test_constrained_dpo():
    # Catches: a cost that is rewarded, labels from a multiplier of another step, one that turns negative.
    rewards, costs = torch.tensor([-0.5, -0.5, 0.5, 0.0]), torch.tensor([-0.4, -0.4, -0.4, 0.0])
    assert p.relabel(rewards, costs, multiplier=0.0).tolist() == [-1, -1, 1, 1]
    assert p.relabel(rewards, costs, multiplier=2.0).tolist() == [1, 1, 1, 1]
    assert p.dual_step(0.5, mean_cost=0.3, limit=0.1, lr=1e-3) == pytest.approx(0.5002)
    assert p.dual_step(0.0, mean_cost=0.0, limit=0.1, lr=1e-3) == 0.0
