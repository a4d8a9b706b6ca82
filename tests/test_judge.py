"""Judges: position, errors, and the rubric's documented formula (spec B36, B37)."""

import threading

import pytest

from envs.base import PlanView
from nanoplan.judge import RubricJudge, draw_swap, judge_all, win_rates
from nanoplan.reward import anchored_reward, group_advantages
from tests.test_reward import PASSED


def view(wishes=0.5, route=0.5, pace=0.5, budget=0.5, text="") -> PlanView:
    return PlanView(text, {"wishes": wishes, "route": route, "pace": pace, "budget": budget})


class First:
    """Always prefers the plan that it is shown first."""

    name = "first"

    def compare(self, plan, reference, *, swap):
        return "loss" if swap else "win"


class Scripted:
    """Answers what the plan's text says; "timeout" raises."""

    name = "scripted"

    def compare(self, plan, reference, *, swap):
        if plan.text == "timeout":
            raise TimeoutError("no answer in 60 s")
        return plan.text


def test_rubric_formula():
    # weights that drift from the docstring: 1 + 4 * (3 * wishes + pace + route + budget) / 6
    judge = RubricJudge()
    assert judge.score(view(0, 0, 0, 0)) == 1.0
    assert judge.score(view(1, 1, 1, 1)) == 5.0
    assert judge.score(view(1, 0, 0, 0)) == 3.0
    for name in ("route", "pace", "budget"):
        assert judge.score(view(**{"wishes": 0, "route": 0, "pace": 0, "budget": 0, name: 1})) == 1.67
    assert judge.score(view(0.8, 0.25, 0.5, 0.9)) == 3.7  # 1 + 4 * (2.4 + 1.65) / 6
    assert sum(judge.weights.values()) == pytest.approx(1.0)


def test_rubric_compares_strictly():
    # equal scores count as a win, or noise below the rounding decides
    judge = RubricJudge()
    better, worse = view(wishes=0.9), view(wishes=0.2)
    for swap in (False, True):
        assert judge.compare(better, worse, swap=swap) == "win"
        assert judge.compare(worse, better, swap=swap) == "loss"
        assert judge.compare(worse, view(wishes=0.2001), swap=swap) == "tie"


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.1, None])
def test_rubric_refuses_bad_features(bad):
    # a missing or NaN feature compares as false and silently loses
    features = view().features
    if bad is None:
        del features["route"]
    else:
        features["route"] = bad
    with pytest.raises(ValueError, match="feature route="):
        RubricJudge().score(PlanView("", features))
    assert judge_all(RubricJudge(), [(PlanView("", features), view())], seed=0) == ["error"]


def test_position_bias_cancels():
    # B37: a judge that always prefers the first plan seems to prefer ours
    pairs = [(view(), view())] * 7
    assert win_rates(First(), pairs) == [0.5] * 7
    outcomes = judge_all(First(), pairs * 300, seed=0)
    assert 0.45 < outcomes.count("win") / len(outcomes) < 0.55  # 2100 fair coins: 0.5 +- 0.011


def test_order_depends_on_the_key_alone():
    # orders drawn from a shared stream move when a thread or a rank is faster, or when a pair is left out
    pairs, keys = [(view(), view())] * 20, [f"step 1/train/{i}" for i in range(20)]
    outcomes = judge_all(First(), pairs, seed=5, keys=keys)
    assert judge_all(First(), pairs[7:], seed=5, keys=keys[7:], workers=1) == outcomes[7:]
    assert outcomes != judge_all(First(), pairs, seed=6, keys=keys)
    assert outcomes == ["loss" if draw_swap(5, key) else "win" for key in keys]


def test_ties_are_not_wins():
    # a judge that says tie to everything gets a win rate of one half
    assert win_rates(Scripted(), [(view(text="tie"), view()), (view(text="win"), view())]) == [0.0, 1.0]


def test_errors_are_dropped_and_counted():
    # B36: 3 wins, 4 losses, 1 timeout; the timeout becomes a loss and the mean is over 8
    answers = ["win", "loss", "win", "timeout", "loss", "loss", "win", "loss"]
    pairs, errors = [(view(text=answer), view()) for answer in answers], []
    outcomes = judge_all(Scripted(), pairs, seed=0, on_error=errors.append)
    assert outcomes == ["error" if answer == "timeout" else answer for answer in answers]
    assert errors == ["3: TimeoutError: no answer in 60 s"]
    rewards = [anchored_reward(PASSED, outcome) for outcome in outcomes]
    advantages = group_advantages(rewards, group=8, scale=False)
    assert advantages[3] == 0.0
    assert [a for i, a in enumerate(advantages) if i != 3] == pytest.approx(
        [(answer == "win") - 3 / 7 for answer in answers if answer != "timeout"]
    )
    assert win_rates(Scripted(), pairs)[3] is None


def test_reported_errors_are_counted_and_unknown_words_refused():
    # a judge that answers "error" itself goes unreported; one that answers "A" is taken for a loss
    errors = []
    assert judge_all(Scripted(), [(view(text="error"), view())], seed=0, on_error=errors.append) == ["error"]
    assert len(errors) == 1
    with pytest.raises(ValueError, match="answered 'A'"):
        judge_all(Scripted(), [(view(text="A"), view())], seed=0)


def test_comparisons_run_side_by_side():
    # remote judges asked one after the other: a step takes minutes
    class Meet:
        name = "meet"
        barrier = threading.Barrier(4, timeout=20)

        def compare(self, plan, reference, *, swap):
            self.barrier.wait()
            return "win"

    assert judge_all(Meet(), [(view(), view())] * 8, seed=0, workers=4) == ["win"] * 8
    assert judge_all(Meet(), [], seed=0) == []
