"""What a training step learns from its episodes, one function per reward.

Each takes the episodes and the judge and returns Feedback: verdicts, comparisons and rewards, one per
episode. A reward is None where the environment or the judge failed: it is then no part of its group.
"""

from collections.abc import Callable
from dataclasses import dataclass

from envs.base import NO_PLAN_TEXT, PlanView, Verdict
from nanoplan.evaluate import score_for_training
from nanoplan.judge import judge_all, score_all
from nanoplan.reward import anchored_reward, gated_score
from nanoplan.rollout import Episode


@dataclass(slots=True)
class Feedback:
    verdicts: list[Verdict]
    outcomes: list[str]  # win | loss | tie | error, or "" where no judge compared
    rewards: list[float | None]


@dataclass(frozen=True, slots=True)
class Asking:
    """How a judge is asked."""

    seed: int  # with keys, draws the order in which it sees a pair
    keys: list[str]  # a name per episode
    workers: int  # threads
    on_error: Callable[[str], None] | None = None  # called with one text per question that failed


def anchored(episodes: list[Episode], judge, asking: Asking) -> Feedback:
    """1 for a plan that passes every constraint and is preferred to the reference. Anchored GRPO."""
    verdicts, outcomes = score_for_training(
        episodes, judge, seed=asking.seed, keys=asking.keys, workers=asking.workers, on_error=asking.on_error
    )
    return Feedback(verdicts, outcomes, list(map(anchored_reward, verdicts, outcomes)))


def constraint(episodes: list[Episode], judge, asking: Asking) -> Feedback:
    """1 for a plan that passes every constraint; the judge is not asked. The paper's constraint-only GRPO."""
    verdicts, outcomes = _verify(episodes)
    rewards = [None if outcome else float(v.passed) for v, outcome in zip(verdicts, outcomes, strict=True)]
    return Feedback(verdicts, outcomes, rewards)


def score(episodes: list[Episode], judge, asking: Asking) -> Feedback:
    """A plan that passes every constraint gets the judge's score of it alone, without a reference, scaled to
    [0, 1]. The paper's Score GRPO; that it has the gate is our reading."""
    verdicts, outcomes = _verify(episodes)
    asked = [i for i, verdict in enumerate(verdicts) if verdict.passed and not outcomes[i]]
    views = [episodes[i].env.view() for i in asked]
    scores = score_all(judge, views, workers=asking.workers, on_error=asking.on_error)
    known = dict(zip(asked, scores, strict=True))
    outcomes = ["error" if known.get(i, 0.0) is None else outcome for i, outcome in enumerate(outcomes)]
    logit = judge.kind == "rm"
    rewards = [
        None if outcome else gated_score(verdict, known.get(i), logit=logit)
        for i, (verdict, outcome) in enumerate(zip(verdicts, outcomes, strict=True))
    ]
    return Feedback(verdicts, outcomes, rewards)


def ungated(episodes: list[Episode], judge, asking: Asking) -> Feedback:
    """1 for a plan that is preferred to the reference, whatever it breaks; 0 where there is no plan."""
    verdicts, outcomes = _verify(episodes)
    pairs = {i: _pair(episode) for i, episode in enumerate(episodes) if not outcomes[i]}
    pairs = {i: pair for i, pair in pairs.items() if pair[0].text != NO_PLAN_TEXT}
    drawn = judge_all(
        judge, list(pairs.values()), seed=asking.seed, keys=[asking.keys[i] for i in pairs],
        workers=asking.workers, on_error=asking.on_error,
    )  # fmt: skip
    for i, outcome in zip(pairs, drawn, strict=True):
        outcomes[i] = outcome
    rewards = [None if outcome == "error" else float(outcome == "win") for outcome in outcomes]
    return Feedback(verdicts, outcomes, rewards)


def staged(episodes: list[Episode], judge, asking: Asking) -> Feedback:
    """Partial credit of an environment that has it (`Env.staged`): schema, micro, macro, final."""
    verdicts, outcomes = _verify(episodes)
    rewards = [
        None if outcome else episode.env.staged() for episode, outcome in zip(episodes, outcomes, strict=True)
    ]
    return Feedback(verdicts, outcomes, rewards)


REWARDS = {function.__name__: function for function in (anchored, constraint, score, ungated, staged)}
COMPARES = ("anchored", "ungated")  # those that need a reference plan for every request


def _verify(episodes: list[Episode]) -> tuple[list[Verdict], list[str]]:
    broken = ["error" if episode.trajectory.broken else "" for episode in episodes]
    return [episode.env.verify() for episode in episodes], broken


def _pair(episode: Episode) -> tuple[PlanView, PlanView]:
    return episode.env.view(), episode.env.reference_view()
