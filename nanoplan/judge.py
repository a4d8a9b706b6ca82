"""Who wins: a model's plan against the reference plan of its request.

A judge is any object with `name` and `compare(plan, reference, *, swap) -> outcome`, where the outcome is
"win", "loss", "tie" or "error" seen from `plan`, and swap=True means that the reference is shown first.
An exception is an error, an error is never a result: it is counted, and its reward is None.
"""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Protocol

from envs.base import PlanView
from nanoplan.reward import OUTCOMES

MAX_ERROR_CHARS = 200  # characters of one error text in a report; ours


class Judge(Protocol):
    name: str  # as printed in every table

    def compare(self, plan: PlanView, reference: PlanView, *, swap: bool) -> str: ...


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

    name = "rubric"
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
        ours, theirs = self.score(plan), self.score(reference)
        return "win" if ours > theirs else "loss" if ours < theirs else "tie"


def draw_swap(seed: int, key: str) -> bool:
    """Whether the reference is shown first in comparison `key`: a fair coin that depends on nothing but
    (seed, key), so neither on threads, nor on the rank, nor on how many comparisons came before."""
    return bool(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=1).digest()[0] & 1)


def judge_all(
    judge: Judge,
    pairs: list[tuple[PlanView, PlanView]],
    *,
    seed: int,
    keys: list[str] | None = None,
    workers: int = 8,
    on_error: Callable[[str], None] | None = None,
) -> list[str]:
    """For training: one comparison per pair, its order drawn at random, many at once in threads.

    pairs     (plan, reference)
    keys      name of each comparison, e.g. "7/train/12/3", which its order is drawn from; None: its index
    on_error  called with one text per failed comparison, in the calling thread
    returns   outcome of each pair, in order
    source    Anchored GRPO: order randomised in training
    """
    keys = [str(index) for index in range(len(pairs))] if keys is None else keys
    asked = [(key, *pair, draw_swap(seed, key)) for key, pair in zip(keys, pairs, strict=True)]
    return _ask(judge, asked, workers, on_error)


def win_rates(
    judge: Judge,
    pairs: list[tuple[PlanView, PlanView]],
    *,
    workers: int = 8,
    on_error: Callable[[str], None] | None = None,
) -> list[float | None]:
    """For evaluation: both orders of every pair.

    returns  per pair the share of the two orders that the plan won (0.0, 0.5 or 1.0; a tie is not a win),
             None if either comparison failed
    source   Anchored GRPO: both presentation orders averaged in evaluation
    """
    asked = [(str(i), *pair, swap) for i, pair in enumerate(pairs) for swap in (False, True)]
    outcomes = _ask(judge, asked, workers, on_error)
    rates: list[float | None] = []
    for first, second in zip(outcomes[::2], outcomes[1::2], strict=True):
        failed = "error" in (first, second)
        rates.append(None if failed else ((first == "win") + (second == "win")) / 2)
    return rates


def _ask(
    judge: Judge, asked: list[tuple[str, PlanView, PlanView, bool]], workers: int, on_error
) -> list[str]:
    def one(question) -> tuple[str, str]:
        key, plan, reference, swap = question
        try:
            outcome = judge.compare(plan, reference, swap=swap)
        except Exception as error:
            return "error", f"{key}: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        if outcome not in OUTCOMES:
            raise ValueError(f"judge {judge.name} answered {outcome!r}; must be one of {', '.join(OUTCOMES)}")
        return outcome, f"{key}: the judge reported an error" if outcome == "error" else ""

    with ThreadPoolExecutor(max(1, workers)) as pool:
        answers = list(pool.map(one, asked))
    for _, text in answers:
        if text and on_error is not None:
            on_error(text)
    return [outcome for outcome, _ in answers]
