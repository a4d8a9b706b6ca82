"""Best-of-N: of several answers to a request, the one that a selector ranks first.

A selector is a function from answered episodes to one rank each, higher is better; of equal ranks the first
answer is taken, so that N = 1 is no selection. Source: the Best-of-N rows of Anchored GRPO.
"""

import math
from collections.abc import Callable

from envs.base import NO_PLAN_TEXT, Env
from nanoplan.evaluate import answered, score_for_report
from nanoplan.judge import Judge, score_all
from nanoplan.rollout import Episode

Selector = Callable[[list[Episode]], list]


def by_constraints(episodes: list[Episode]) -> list:
    """The filter: whether a plan passes every constraint. Needs no judge and no reference."""
    return [episode.env.verify().passed for episode in episodes]


def by_oracle(judges: list[Judge]) -> Selector:
    """What no selector can do better than: passes, and is preferred by the judges that will score it."""

    def rank(episodes: list[Episode]) -> list:
        items = score_for_report(episodes, judges)
        return [(item["strict"]["pass"], item["win"] or 0.0) for item in items]

    return rank


def by_score(judge: Judge, *, on_error: Callable[[str], None] | None = None) -> Selector:
    """The reranker, or the reward model: a judge's score of each plan alone, whatever it breaks; an answer
    without a plan, or one that the judge failed on, comes last."""

    def rank(episodes: list[Episode]) -> list:
        views = [episode.env.view() for episode in episodes]
        shown = [i for i, view in enumerate(views) if view.text != NO_PLAN_TEXT]
        scores = dict(zip(shown, score_all(judge, [views[i] for i in shown], on_error=on_error), strict=True))
        return [-math.inf if scores.get(i) is None else scores[i] for i in range(len(views))]

    return rank


def best_of(
    envs: list[Env], candidates: dict[str, list[str]], *, num: int, select: Selector
) -> dict[str, str]:
    """id -> the chosen one of the first `num` answers of each request that has some.

    raises  ValueError if a request has answers, but fewer than num
    """
    episodes, ids = [], []
    for env in envs:
        texts = candidates.get(env.task.id, [])
        if 0 < len(texts) < num:
            raise ValueError(f"{env.task.id} has {len(texts)} answers, best_of={num}; give as many trials")
        for text in texts[:num]:
            episodes.append(answered(env.fork(), text))
            ids.append(env.task.id)
    chosen: dict[str, tuple] = {}
    for id, episode, rank in zip(ids, episodes, select(episodes), strict=True):
        if id not in chosen or rank > chosen[id][0]:
            chosen[id] = rank, episode.env.answer_text
    return {id: text for id, (_, text) in chosen.items()}
