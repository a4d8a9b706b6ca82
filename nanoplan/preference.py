"""Preference losses on summed log-probs of pairs. Pure functions: tensors in, one loss per pair out.

Letters: w chosen, l rejected, |y| tokens of a completion, logpi(y) the sum of its log-probs under the policy,
logref(y) the same under the reference, h_y = logpi(y) - logref(y), D = h_w - h_l. Each loss is a (P,) tensor;
the caller divides its sum by the pairs of the whole step, over ranks and micro-batches, so that no way of
splitting a step changes its loss. What a loss needs of the whole step (KTO's z0, alpha-DPO's statistics,
C-DPO's multiplier) is an argument. Not here: where margins come from (nanoplan.pairs).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class PairLogps:
    """Log-probs of P pairs. The reference's are 0 for losses without one (SimPO)."""

    chosen: Tensor  # (P,) fp32, nats: logpi(w)
    rejected: Tensor  # (P,) fp32, nats: logpi(l)
    ref_chosen: Tensor  # (P,) fp32, nats: logref(w), no gradient
    ref_rejected: Tensor  # (P,) fp32, nats: logref(l), no gradient
    chosen_tokens: Tensor  # (P,) |w|
    rejected_tokens: Tensor  # (P,) |l|

    @property
    def gain_chosen(self) -> Tensor:
        """h_w"""
        return self.chosen - self.ref_chosen

    @property
    def gain_rejected(self) -> Tensor:
        """h_l"""
        return self.rejected - self.ref_rejected

    @property
    def delta(self) -> Tensor:
        """D = h_w - h_l"""
        return self.gain_chosen - self.gain_rejected

    def per_token(self) -> "PairLogps":
        """The same with means over tokens in place of sums."""
        w, l = self.chosen_tokens.clamp(min=1), self.rejected_tokens.clamp(min=1)
        return PairLogps(
            self.chosen / w, self.rejected / l, self.ref_chosen / w, self.ref_rejected / l,
            self.chosen_tokens, self.rejected_tokens,
        )  # fmt: skip


def severity_margin(severity: Tensor, *, scale: float) -> Tensor:
    """Return m = tanh(scale * severity), in [0, 1) for severity >= 0.

    severity  (P,) of the rejected plan; which unit gives `scale` its meaning, see nanoplan.pairs
    source    CM-DPO section 5.1; scale is the paper's lambda, 0.01
    """
    return torch.tanh(scale * severity)


def cmdpo(
    pairs: PairLogps, *, margin: Tensor, soft_gap: Tensor, feasible: Tensor, beta: float, gamma: float,
    alpha: float,
) -> Tensor:  # fmt: skip
    """-log sigma(beta D - gamma m) + alpha * 1[w feasible] * (S_w - S_l)^+ * (-log sigma(beta D))

    margin    (P,) m in [0, 1], from severity_margin
    soft_gap  (P,) S_w - S_l, soft-preference scores; only its positive part counts
    feasible  (P,) 1 where the chosen plan passes every hard constraint, else 0
    source    CM-DPO equations 5 to 7: beta 0.1, gamma 1.5, alpha 0.3. gamma m is subtracted from beta D, as
              algorithm 2 has it. gamma 0 and alpha 0 give DPO; with a constant offset it is ODPO
              (arXiv:2402.10571)
    """
    hard = -F.logsigmoid(beta * pairs.delta - gamma * margin)
    soft = -F.logsigmoid(beta * pairs.delta) * soft_gap.clamp(min=0)
    return hard + alpha * feasible * soft


def dpo(pairs: PairLogps, *, beta: float) -> Tensor:
    """-log sigma(beta D)                                                            (arXiv:2305.18290)"""
    return -F.logsigmoid(beta * pairs.delta)


def ipo(pairs: PairLogps, *, tau: float) -> Tensor:
    """(D - 1 / (2 tau))^2, D from sums as in the paper                              (arXiv:2310.12036)"""
    return (pairs.delta - 1 / (2 * tau)) ** 2


def ipo_normalised(pairs: PairLogps, *, tau: float) -> Tensor:
    """(D - 1 / (2 tau))^2, D from means over tokens: another function than the paper's, used by TRL"""
    return ipo(pairs.per_token(), tau=tau)


def kto(
    pairs: PairLogps, *, beta: float, z0: float, weight_chosen: float = 1.0, weight_rejected: float = 1.0
) -> Tensor:
    """Mean of weight_chosen * (1 - sigma(beta (h_w - z0))) and weight_rejected * (1 - sigma(beta (z0 - h_l)))

    A pair is one desirable and one undesirable example.
    z0      estimate of KL(policy || reference) for the step, from kto_z0; a number, so without gradient
    source  KTO (arXiv:2402.01306)
    """
    desirable = weight_chosen * (1 - torch.sigmoid(beta * (pairs.gain_chosen - z0)))
    undesirable = weight_rejected * (1 - torch.sigmoid(beta * (z0 - pairs.gain_rejected)))
    return (desirable + undesirable) / 2


def kto_z0(mismatched_sum: float, count: float) -> float:
    """max(0, mean of h over prompts with a completion of another pair): sum and count over the whole step.

    raises  ValueError for count < 1: there is no estimate without a mismatched completion
    """
    if count < 1:
        raise ValueError(f"count={count}: KTO's z0 needs at least one mismatched completion")
    return max(0.0, mismatched_sum / count)


def simpo(pairs: PairLogps, *, beta: float, gamma: float) -> Tensor:
    """-log sigma(beta logpi(w)/|w| - beta logpi(l)/|l| - gamma), no reference       (arXiv:2405.14734)"""
    mean = pairs.per_token()
    return -F.logsigmoid(beta * (mean.chosen - mean.rejected) - gamma)


def dpop(pairs: PairLogps, *, beta: float, penalty: float) -> Tensor:
    """-log sigma(beta (D - penalty * max(0, -h_w))): the penalty is inside sigma    (arXiv:2402.13228)"""
    return -F.logsigmoid(beta * (pairs.delta - penalty * F.relu(-pairs.gain_chosen)))


def mmpo(pairs: PairLogps, *, beta: float, gap: Tensor, gamma: float) -> Tensor:
    """-p log sigma(beta D) - (1 - p) log sigma(-beta D), p = sigma(gamma * gap)     (arXiv:2410.03145)

    gap  (P,) by how much the chosen plan is better, a quality in any unit; 0 makes p one half
    """
    p = torch.sigmoid(gamma * gap)
    return -p * F.logsigmoid(beta * pairs.delta) - (1 - p) * F.logsigmoid(-beta * pairs.delta)


def alpha_gap(pairs: PairLogps) -> Tensor:
    """(P,) policy's minus reference's log-ratio of w to l, means over tokens, detached: what alpha-DPO
    standardises."""
    return pairs.per_token().delta.detach()


def alpha_dpo(
    pairs: PairLogps, *, beta: float, gamma: float, alpha: float, mean: float, std: float
) -> Tensor:
    """-log sigma(beta (logpi(w)/|w| - logpi(l)/|l|) - sg[gamma + alpha z]), z = (alpha_gap - mean) / std

    mean, std  of alpha_gap, running over steps (running_moments); std 0 gives z = 0: all gaps are equal
    source     alpha-DPO (arXiv:2410.10148)
    """
    own = pairs.per_token()
    gap = alpha_gap(pairs)
    z = (gap - mean) / std if std > 0 else torch.zeros_like(gap)
    return -F.logsigmoid(beta * (own.chosen - own.rejected) - gamma - alpha * z)


def running_moments(
    old: tuple[float, float] | None, mean: float, std: float, *, momentum: float = 0.9
) -> tuple[float, float]:
    """Exponential averages of a step's mean and std. They start at the first step with a spread, at its own
    values: policy and reference are equal before the first update, and an average with 0 would blow up z."""
    if old is None or old[1] == 0:
        return mean, std
    return momentum * old[0] + (1 - momentum) * mean, momentum * old[1] + (1 - momentum) * std


def modpo(pairs: PairLogps, *, beta: float, weight: float, other_gap: Tensor) -> Tensor:
    """-log sigma((beta / weight) D - ((1 - weight) / weight) * (r(w) - r(l)))       (arXiv:2310.03708)

    Two objectives: the pairs' order, which weighs `weight` in (0, 1], and another reward r.
    other_gap  (P,) r(w) - r(l); here the soft-preference scores
    """
    return -F.logsigmoid((beta * pairs.delta - (1 - weight) * other_gap) / weight)


def relabel(reward_gap: Tensor, cost_gap: Tensor, *, multiplier: float) -> Tensor:
    """C-DPO's label of a pair: +1 where w keeps its place by r - multiplier * c, -1 where l takes it.

    reward_gap  (P,) r(w) - r(l)
    cost_gap    (P,) c(w) - c(l), constraint costs
    A tie keeps the given order. source  C-DPO (arXiv:2403.02475)
    """
    return torch.where(reward_gap - multiplier * cost_gap < 0, -1.0, 1.0)


def cdpo_constrained(pairs: PairLogps, *, beta: float, label: Tensor) -> Tensor:
    """-log sigma(beta * label * D): DPO on the pairs as relabelled for the current multiplier

    label   (P,) +1 or -1, from relabel
    source  C-DPO (arXiv:2403.02475). Not cDPO, which smooths labels
    """
    return -F.logsigmoid(beta * label * pairs.delta)


def dual_step(multiplier: float, *, mean_cost: float, limit: float, lr: float) -> float:
    """C-DPO's dual ascent: [multiplier + lr * (mean_cost - limit)]^+, the mean over fresh samples."""
    return max(0.0, multiplier + lr * (mean_cost - limit))
