"""From verdicts and judgements to advantages: plain numbers in, plain numbers out.

None stands for a reward that does not exist (the judge or the environment failed). It is never 0: a zero
would teach the model that a good plan is bad.
"""

import math

from envs.base import Verdict

OUTCOMES = ("win", "loss", "tie", "error")  # of a comparison, seen from the model's plan


def anchored_reward(verdict: Verdict, outcome: str) -> float | None:
    """Gate times comparison, R = C(tau) * 1[judge scores the plan above the reference].

    verdict  C = 1 iff verdict.passed
    outcome  "win" | "loss" | "tie" | "error", or "" when the judge was not asked since the gate is shut
    returns  1.0 or 0.0; a tie is not a win; None for "error", whatever the verdict: a broken episode has
             no plan to pass the gate with, and the model is not to blame
    raises   ValueError for an unknown outcome, or "" for a plan that passed the gate
    source   Anchored GRPO, reward with its gate
    """
    if outcome not in (*OUTCOMES, ""):
        raise ValueError(f"outcome={outcome!r}; must be one of {', '.join(OUTCOMES)}, or '' if not judged")
    if outcome == "error":
        return None
    if not verdict.passed:
        return 0.0
    if outcome == "":
        raise ValueError("outcome='' for a plan that passed all constraints; ask the judge first")
    return 1.0 if outcome == "win" else 0.0


def gated_score(verdict: Verdict, score: float | None, *, logit: bool = False) -> float | None:
    """Gate times a judge's score of the plan alone, in [0, 1].

    score   1 (worst) to 5, or a reward model's logit; None: the judge failed, or was not asked since the gate
            is shut
    returns 0.0 behind a shut gate; (score - 1) / 4, of a logit its sigmoid; None without a score
    raises  ValueError for a score outside [1, 5]
    source  Score GRPO, a baseline of Anchored GRPO; the scale and that the gate holds are our reading
    """
    if not verdict.passed:
        return 0.0
    if score is None:
        return None
    if logit:
        return 1 / (1 + math.exp(-max(-700.0, score)))
    if not 1 <= score <= 5:
        raise ValueError(f"score={score}; a judge's scores are 1 to 5")
    return (score - 1) / 4


def group_advantages(
    rewards: list[float | None], *, group: int, eps: float = 1e-6, scale: bool = True
) -> list[float]:
    """Center and scale rewards inside each run of `group` neighbours: A = (R - mean) / (std + eps).

    rewards  length num_groups * group, unitless, members of a group adjacent; None = no reward: left out
             of mean and std, and its advantage is 0.0
    scale    False: center only, A = R - mean (Dr. GRPO)
    returns  same length; exactly 0.0 for a group whose rewards are all equal (found by max == min: the mean
             of equal floats can be off by an ulp, which a small eps would blow up), or with fewer than two
    raises   ValueError if the length is not a multiple of group, group < 2, or a reward is not finite
    source   DeepSeekMath (arXiv:2402.03300); population std is our choice, peers differ
    """
    if group < 2:
        raise ValueError(f"group={group}; a reward is compared with its group, so group must be 2 or more")
    if len(rewards) % group:
        raise ValueError(f"{len(rewards)} rewards are no multiple of group={group}; pass whole groups")
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"rewards[{index}]={reward}; must be finite, or None for a failed judgement")
    advantages: list[float] = []
    for start in range(0, len(rewards), group):
        advantages += _one_group(rewards[start : start + group], eps, scale)
    return advantages


def _one_group(rewards: list[float | None], eps: float, scale: bool) -> list[float]:
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2 or max(known) == min(known):
        return [0.0] * len(rewards)
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / len(known))
    divisor = std + eps if scale else 1.0
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards]


def overlong_penalty(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Soft punishment of length, added to the reward: 0 up to max_tokens - cache_tokens, then a straight
    line down to -1 at max_tokens, -1 beyond.

    num_tokens  tokens the model sampled in the episode; observed tokens (tool results) do not count
    raises      ValueError unless 0 < cache_tokens <= max_tokens
    source      DAPO (arXiv:2503.14476) equation 13, L_max = max_tokens, L_cache = cache_tokens
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            f"cache_tokens={cache_tokens}, max_tokens={max_tokens}; need 0 < cache_tokens <= max_tokens"
        )
    over = num_tokens - (max_tokens - cache_tokens)
    return -min(1.0, max(0, over) / cache_tokens) if over > 0 else 0.0
