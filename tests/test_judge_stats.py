"""What stored comparisons say of the judges, against numbers worked out by hand."""

import json

import pytest

from envs.base import PlanView
from nanoplan.judge import judge_both
from nanoplan.judge_stats import TABLE, family_gap, judges_table, panel_wins, statistics


def record(first, second, *, own=(), reference=(), chars=(10, 10), kind="llm", family="Google"):
    return {
        "kind": kind, "family": family, "outcomes": [first, second], "own": list(own),
        "reference": list(reference), "chars": list(chars), "error": "",
    }  # fmt: skip


def items(*records, name="j"):
    return [{"judges": {name: one}} for one in records]


def test_position_statistics():
    # Catches: a position bias computed from wins of the plan alone, or one that counts ties and failures.
    found = statistics(
        items(
            record("win", "win"), record("win", "loss"), record("win", "loss"), record("loss", "loss"),
            record("tie", "loss"), record("error", "win"),
        )
    )["j"]  # fmt: skip
    assert (found["pairs"], found["errors"]) == (6, 1)
    assert found["win_rate"] == pytest.approx((1 + 0.5 + 0.5) / 5)
    assert found["win_first"] == pytest.approx(3 / 5) and found["win_second"] == pytest.approx(1 / 5)
    decided = [1, 0, 1, 1, 1, 1, 0, 1, 1]  # of w-w, w-l, w-l, l-l, -l: whether who was shown first won
    assert found["first_wins"] == pytest.approx(sum(decided) / len(decided))
    assert found["flips"] == pytest.approx(3 / 5) and found["tie_rate"] == pytest.approx(1 / 10)
    assert found["low"] < found["win_rate"] < found["high"]


class First:
    name, kind, family = "first", "llm", "OpenAI"

    def compare(self, plan, reference, *, swap):
        return "loss" if swap else "win"


class Longest:
    name, kind, family = "longest", "llm", "Qwen"

    def compare(self, plan, reference, *, swap):
        return "win" if len(plan.text) > len(reference.text) else "loss"


def test_biased_judges_show_their_bias():
    # Catches: a position or length bias that the table does not show, or that it shows for the wrong judge.
    pairs = [(PlanView("x" * n, {}), PlanView("x" * 10, {})) for n in (5, 8, 20, 40)]
    stored = [{"judges": {}} for _ in pairs]
    for judge in (First(), Longest()):
        for item, one in zip(stored, judge_both(judge, pairs), strict=True):
            item["judges"][judge.name] = one
    stored = json.loads(json.dumps(stored))  # as read from a file
    found = statistics(stored)
    first, longest = found["first"], found["longest"]
    assert (first["win_rate"], first["first_wins"], first["flips"], first["longer_wins"]) == (0.5, 1, 1, None)
    assert (first["win_first"], first["win_second"]) == (1.0, 0.0)
    assert (longest["win_rate"], longest["first_wins"], longest["flips"], longest["longer_wins"]) == (
        0.5,
        0.5,
        0,
        1,
    )
    assert (longest["win_longer"], longest["win_shorter"]) == (1.0, 0.0)
    assert longest["length_ratio"] == pytest.approx((0.5 * 0.8 * 2 * 4) ** 0.25)
    text = judges_table(found)
    assert "100.0 %" in text and "longest" in text and "OpenAI" in text and text.count("\n") == 16
    assert family_gap(found, "Qwen") == 0.0 and family_gap(found, "Meta") is None


def test_nothing_known():
    # Catches: a division by zero where every comparison failed, or where a judge was not asked at all.
    found = statistics([{"judges": {"a": record("error", "error")}}, {"judges": {}}, {}])
    assert found["a"]["errors"] == 1 and found["a"]["win_rate"] is None and found["a"]["low"] is None
    assert "–" in judges_table(found)
    assert statistics([]) == {} and judges_table({})
    assert {found["a"][field] for field in TABLE.values()} == {None}


def test_panel_wins_are_by_mean_scores():
    # Catches: TripTailor's win taken for a vote; a tie that wins; a reward model's logits among the scores.
    a, b = {"own": (5, 2), "reference": (4, 3)}, {"own": (3, 3.5), "reference": (3, 3)}
    stored = [
        {"judges": {"a": record("win", "loss", **a), "b": record("tie", "win", **b)}},  # 3.5 + 3.25 > 3.5 + 3
        {"judges": {"a": record("win", "loss", **a)}},  # 3.5 against 3.5
        {"judges": {"a": record("error", "win"), "b": record("tie", "win", **b)}},  # b alone
        {"judges": {"rm": record("win", "win", own=(9, 9), reference=(1, 1), kind="rm")}},
        {},
    ]
    assert panel_wins(stored) == [True, False, True, None, None]
    assert panel_wins(stored, kind="rm") == [None, None, None, True, None]
