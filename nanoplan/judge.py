"""Who wins: a model's plan against the reference plan of its request.

A judge is any object with `name` and `compare(plan, reference, *, swap) -> outcome`, where the outcome is
"win", "loss", "tie" or "error" seen from `plan`, and swap=True means that the reference is shown first.
One that can do more has `compare_many`, which is then asked for all comparisons at once and keeps the scores
behind them, and `score` or `score_many`, a plan's score without a reference. An exception is an error, an
error is never a result: it is counted, and its reward is None.

Here: the rules of comparing, and the judge that costs nothing. The others: llm_judge.py, reward_model.py;
judges.py makes one from a flag's text, judge_stats.py says what stored comparisons tell of the judges.
"""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from envs.base import PlanView
from nanoplan.reward import OUTCOMES

MAX_ERROR_CHARS = 200  # characters of one error text in a report; ours


class Judge(Protocol):
    name: str  # as printed in every table

    def compare(self, plan: PlanView, reference: PlanView, *, swap: bool) -> str: ...


class Question(NamedTuple):
    plan: PlanView  # the model's
    reference: PlanView
    swap: bool  # the reference is shown first


@dataclass(slots=True)
class Judged:
    """The answer to one question."""

    outcome: str  # of reward.OUTCOMES, seen from the plan
    own: float | None = None  # the plan's score; None where the judge gives none, or failed
    reference: float | None = None  # the reference's, on the same scale
    error: str = ""  # why there is no result


def by_scores(own: float, reference: float) -> Judged:
    """The plan wins if its score is strictly higher; equal scores are a tie."""
    return Judged("win" if own > reference else "loss" if own < reference else "tie", own, reference)


class RubricJudge:
    """A program, not a language model: the same score for the same plan, at no cost.

    score = 1 + 4 * (3 * wishes + pace + route + budget) / 6, rounded to 2 decimals, from 1 to 5

    wishes  share of the stated wishes met (interests, cuisines, hotel class)
    pace    visits per day against the intensity that was asked for
    route   shortness of the way between neighbouring places
    budget  slack left of the traveller's budget
    Each is a feature of the PlanView, in [0, 1], higher is better, computed by the benchmark. The weights
    follow TripTailor's six criteria at equal weight: experiences, cuisine and accommodation are wishes,
    itinerary intensity is pace, transportation is route, total budget is budget. Rounding makes plans
    that differ by less than anyone would notice a tie. The text is not read, so order cannot matter.
    """

    name, kind, family = "rubric", "rubric", "program"
    weights = MappingProxyType({"wishes": 3 / 6, "pace": 1 / 6, "route": 1 / 6, "budget": 1 / 6})

    def score(self, view: PlanView) -> float:
        """1 (worst) to 5. Raises ValueError for a feature that is missing or outside [0, 1]."""
        total = 0.0
        for name, weight in self.weights.items():
            value = view.features.get(name, math.nan)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"feature {name}={value}; the rubric judge needs a number in [0, 1]")
            total += weight * value
        return round(1 + 4 * total, 2)

    def compare(self, plan: PlanView, reference: PlanView, *, swap: bool) -> str:
        """ "win" iff the plan's score is strictly higher; `swap` changes nothing here."""
        return by_scores(self.score(plan), self.score(reference)).outcome

    def compare_many(self, questions: list[Question]) -> list[Judged]:
        """The same with the scores; a view that cannot be scored is an error of its own."""
        return compare_apart(self.score_many, questions)

    def score_many(self, views: list[PlanView]) -> list[float | Exception]:
        return [attempt(self.score, view) for view in views]


def draw_swap(seed: int, key: str) -> bool:
    """Whether the reference is shown first in comparison `key`: a fair coin that depends on nothing but
    (seed, key), so neither on threads, nor on the rank, nor on how many comparisons came before."""
    return bool(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=1).digest()[0] & 1)


def compare_apart(
    score_many: Callable[[list[PlanView]], list[float | Exception]], questions: list[Question]
) -> list[Judged]:
    """Comparisons by a judge that reads one plan at a time: all plans in one list, so that they can be scored
    in batches. `swap` means nothing to it."""
    scores = iter(score_many([view for plan, reference, _ in questions for view in (plan, reference)]))
    judged = []
    for own, reference in zip(scores, scores, strict=True):
        errors = [score for score in (own, reference) if isinstance(score, Exception)]
        judged.append(failed(errors[0]) if errors else by_scores(own, reference))
    return judged


def attempt(function: Callable, *arguments):
    """The function's result, or the exception in its place."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def failed(error: Exception) -> Judged:
    """The answer that is none, with a bounded text."""
    return Judged("error", error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS])


def judge_all(
    judge: Judge,
    pairs: list[tuple[PlanView, PlanView]],
    *,
    seed: int,
    keys: list[str] | None = None,
    workers: int = 8,
    on_error: Callable[[str], None] | None = None,
) -> list[str]:
    """For training: one comparison per pair, its order drawn at random, all of them asked at once.

    pairs     (plan, reference)
    keys      name of each comparison, e.g. "7/train/12/3", which its order is drawn from; None: its index
    workers   threads for a judge that has only `compare`
    on_error  called with one text per failed comparison, in the calling thread
    returns   outcome of each pair, in order
    source    Anchored GRPO: order randomised in training
    """
    keys = [str(index) for index in range(len(pairs))] if keys is None else keys
    asked = [Question(*pair, draw_swap(seed, key)) for key, pair in zip(keys, pairs, strict=True)]
    return [judged.outcome for judged in _ask(judge, asked, keys, workers, on_error)]


def judge_both(
    judge: Judge,
    pairs: list[tuple[PlanView, PlanView]],
    *,
    workers: int = 8,
    on_error: Callable[[str], None] | None = None,
) -> list[dict]:
    """For evaluation: both orders of every pair, as records that can be stored beside the plans.

    returns  per pair {"kind", "family": of the judge, "outcomes": of the two orders, the plan shown first and
             then the reference, "own", "reference": scores of both orders, empty where a comparison failed
             or the judge gives none, "chars": lengths of the texts, "error": of the first failure, or ""}
    source   Anchored GRPO: both presentation orders in evaluation
    """
    asked = [Question(*pair, swap) for pair in pairs for swap in (False, True)]
    keys = [str(index) for index in range(len(pairs)) for _ in (False, True)]
    answers = _ask(judge, asked, keys, workers, on_error)
    records = []
    for (plan, reference), both in zip(pairs, zip(answers[::2], answers[1::2], strict=True), strict=True):
        scored = all(None not in (judged.own, judged.reference) for judged in both)
        records.append({
            "kind": getattr(judge, "kind", ""),
            "family": getattr(judge, "family", ""),
            "outcomes": [judged.outcome for judged in both],
            "own": [judged.own for judged in both] if scored else [],
            "reference": [judged.reference for judged in both] if scored else [],
            "chars": [len(plan.text), len(reference.text)],
            "error": next((judged.error for judged in both if judged.error), ""),
        })  # fmt: skip
    return records


def win_share(record: dict) -> float | None:
    """Share of the two orders of `judge_both` that the plan won: 0.0, 0.5 or 1.0, a tie is not a win; None if
    either comparison failed."""
    outcomes = record["outcomes"]
    return None if "error" in outcomes else outcomes.count("win") / len(outcomes)


def win_rates(
    judge: Judge,
    pairs: list[tuple[PlanView, PlanView]],
    *,
    workers: int = 8,
    on_error: Callable[[str], None] | None = None,
) -> list[float | None]:
    """`win_share` of every pair: both orders averaged."""
    return [win_share(record) for record in judge_both(judge, pairs, workers=workers, on_error=on_error)]


def score_all(
    judge,
    views: list[PlanView],
    *,
    workers: int = 8,
    on_error: Callable[[str], None] | None = None,
) -> list[float | None]:
    """Score of every plan without a reference (Score GRPO, rerankers); None where the judge failed.

    judge  has `score`, or `score_many`, which gives an exception in the place of a score it has not
    """
    many = getattr(judge, "score_many", None)
    answers = many(views) if many else _in_threads(lambda view: attempt(judge.score, view), views, workers)
    scores: list[float | None] = []
    for index, answer in enumerate(answers):
        scores.append(None if isinstance(answer, Exception) else answer)
        if isinstance(answer, Exception) and on_error is not None:
            on_error(f"{index}: {failed(answer).error}")
    return scores


def _ask(
    judge: Judge, asked: list[Question], keys: list[str], workers: int, on_error: Callable | None
) -> list[Judged]:
    """The answer to every question, in order; failures are reported under their key."""

    def one(question: Question) -> Judged:
        outcome = attempt(lambda: judge.compare(question.plan, question.reference, swap=question.swap))
        return failed(outcome) if isinstance(outcome, Exception) else Judged(outcome)

    many = getattr(judge, "compare_many", None)
    answers = many(asked) if many else _in_threads(one, asked, workers)
    for key, judged in zip(keys, answers, strict=True):
        if judged.outcome not in OUTCOMES:
            raise ValueError(
                f"judge {judge.name} answered {judged.outcome!r}; must be one of {', '.join(OUTCOMES)}"
            )
        if judged.outcome == "error":
            judged.error = judged.error or "the judge reported an error"
            if on_error is not None:
                on_error(f"{key}: {judged.error}"[:MAX_ERROR_CHARS])
    return answers


def _in_threads(one: Callable, items: list, workers: int) -> list:
    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(one, items))
