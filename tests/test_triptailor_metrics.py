"""The tables' numbers, worked out by hand from a few stored items."""

import copy
import json

import pytest

from envs import BENCHMARKS, trips
from envs.triptailor_metrics import METRICS, compare_runs, difficulty, kind_win, llm_or_rm, metrics
from envs.triptailor_verify import CHECKS

triptailor = BENCHMARKS["triptailor"]


def item(pid, *, broken=(), official=(), days=3, calls=5, judges=None, win=None, route=None, tools=None):
    """A stored item; `broken` and `official` name the failing checks of the two scorings (None: no score)."""

    def checks(failing):
        return {check: check not in failing for check in CHECKS} | {"pass": not failing}

    facts = {"days": days, "calls_by_tool": tools or {"search_hotels": 1}, "cost": 1.0, "route_km": route}
    return {
        "id": f"test/{pid}",
        "strict": {**checks(broken), "reasons": []},
        "official": None if official is None else checks(official),
        "win": win,
        "calls": calls,
        "turns": 4,
        "tokens_sampled": 100 * pid,
        "tokens_observed": 50,
        "facts": facts | {"reference_route_km": [4.0, 0.0, None]},
        "judges": judges or {},
    }


def scored(kind, own, reference):
    return {"kind": kind, "own": own, "reference": reference}


ITEMS = [
    item(
        1, judges={"a": scored("llm", [4, 4], [3, 3]), "r": scored("rm", [1.0], [2.0])}, route=[2.0, 1.0, 3.0]
    ),
    item(
        2, broken=("budget", "within_sandbox"), judges={"a": scored("llm", [5, 5], [1, 1])}, days=4, calls=7
    ),
    item(3, broken=("meal_prices",), official=("budget",), days=7, calls=7, tools={"search_trains": 3}),
    item(4, judges={"a": scored("llm", [3, 3], [3, 3]), "r": scored("rm", [3.0], [2.0])}, win=0.5),
]


def test_rates_by_hand():
    # Catches: micro over plans instead of checks, macro as a mean, or a tie that counts as a win.
    found = METRICS(ITEMS)["all"]
    strict, official, judges = found["strict"], found["official"], found["judges"]
    assert found["plans"] == 4 and METRICS is metrics
    assert (strict["feasibility_micro"], strict["feasibility_macro"]) == (3.5 / 4, 3 / 4)
    assert (strict["rationality_micro"], strict["rationality_macro"]) == pytest.approx((3.6 / 4, 2 / 4))
    assert (strict["valid"], official["valid"]) == (0.5, 0.75)
    assert (strict["budget"], official["budget"], official["within_sandbox"]) == (0.75, 0.75, 1.0)
    assert judges["llm_win"] == pytest.approx(2 / 3) and judges["rm_win"] == 0.5
    assert judges["rubric_win"] is None
    # 1: llm wins; 2 and 3: not valid; 4: the reward model wins
    assert judges["strict_final_pass"] == 0.5 and judges["strict_final_surpass"] == 0.5
    assert judges["strict_strict_both"] == 0.0
    # officially 2 is valid, too, and 1, 2, 4 surpass; 3 is not valid
    assert judges["official_final_surpass"] == 0.75
    assert judges["strict_surpass"] == 0.0  # 1 has no "win", 2 and 3 are not valid, 4 only half of it
    assert found["per_judge"] == {
        "a": {"win_rate": pytest.approx(2 / 3), "plans": 3},
        "r": {"win_rate": 0.5, "plans": 2},
    }


def test_easy_and_hard():
    # Catches: 4-day trips among the easy ones.
    found = metrics(ITEMS)
    assert {name: part["plans"] for name, part in found.items()} == {"all": 4, "easy": 2, "hard": 2}
    assert found["easy"]["strict"]["valid"] == 1.0 and found["hard"]["strict"]["valid"] == 0.0
    assert [difficulty(x) for x in (*ITEMS, {})] == ["easy", "hard", "hard", "easy", ""]


def test_calls_turns_tokens_and_routes():
    # Catches: totals printed as means, or a ratio of means.
    found = metrics(ITEMS)["all"]
    assert found["calls_by_tool"] == {
        "search_hotels": {"per_plan": 0.75, "total": 3},
        "search_trains": {"per_plan": 0.75, "total": 3},
    }
    assert found["valid_by_calls"] == [
        {"calls": 5, "plans": 2, "valid": 1.0},
        {"calls": 7, "plans": 2, "valid": 0.0},
    ]
    assert found["effort"] == {"calls": 6.0, "turns": 4.0, "tokens_sampled": 250.0, "tokens_observed": 50.0}
    assert found["route"]["km"] == [2.0, 1.0, 3.0] and found["route"]["reference_km"] == [4.0, 0.0, None]
    assert found["route"]["ratio"] == [0.5, None, None]  # no ratio to a way of 0 km


def test_judges_that_failed_or_were_not_asked():
    # Catches: an error counted as a loss, one order of one judge deciding, or an unasked judge as unknown.
    won = scored("llm", [4, 2], [3, 2])
    assert kind_win({"judges": {"a": won, "b": scored("llm", [1, 1], [3, 1])}}, "llm") is False
    assert kind_win({"judges": {"a": won, "b": scored("llm", [], [])}}, "llm") is None
    assert kind_win({"judges": {"a": won}}, "llm") is True and kind_win({}, "llm") is None
    failed = scored("llm", [], [])
    assert llm_or_rm({"judges": {"a": failed, "r": scored("rm", [2.0], [1.0])}}) is True
    assert llm_or_rm({"judges": {"a": failed, "r": scored("rm", [1.0], [2.0])}}) is None
    assert llm_or_rm({"judges": {"r": scored("rm", [1.0], [2.0])}}) is False
    assert llm_or_rm({"judges": {"x": scored("rubric", [5.0], [2.0])}}) is None
    alone = metrics([item(1, judges={"a": failed})])["all"]["judges"]
    assert alone["strict_final_surpass"] is None and alone["strict_final_pass"] == 1.0


def test_what_is_not_stored_is_unknown():
    # Catches: KeyError on the items of another system, or a rate of 0 for what nobody measured.
    bare = {"id": "test/1", "strict": ITEMS[0]["strict"], "official": None, "win": None}
    bare |= dict.fromkeys(("calls", "turns", "tokens_sampled", "tokens_observed"))
    found = metrics([bare])
    assert set(found) == {"all"} and found["all"]["official"] is None and found["all"]["effort"] is None
    assert found["all"]["strict"]["valid"] == 1.0 and found["all"]["calls_by_tool"] == {}
    assert found["all"]["route"]["ratio"] == [None] * 3 and found["all"]["valid_by_calls"] == []
    assert metrics([])["all"]["plans"] == 0


def test_two_runs():
    # Catches: pairs by position, retained over all plans, or a sign that is turned round.
    before = [item(i, broken=() if i <= 4 else ("budget",)) for i in range(1, 11)]
    after = [item(i, broken=("budget",) if i in (4, 10) else ()) for i in range(11, 0, -1)]
    found = compare_runs(before, after)
    assert found["pairs"] == 10 and found["net"] == {"strict": 4, "official": 0}
    assert found["retained"]["strict"] == 3 / 4 and found["converted"]["strict"] == 5 / 6
    assert found["converted"]["official"] is None
    row = found["rates"]["strict.valid"]
    assert (row["a"], row["b"], row["pairs"]) == (0.4, 0.8, 10) and row["diff"] == pytest.approx(0.4)
    assert row["low"] < 0.4 < row["high"] and 0.01 < row["p"] < 0.5
    assert found["rates"]["official.valid"] | {"p": 1.0, "diff": 0.0} == found["rates"]["official.valid"]
    assert compare_runs(after, before)["rates"]["strict.valid"]["diff"] == pytest.approx(-0.4)
    with pytest.raises(ValueError, match="no request in common"):
        compare_runs(before, [item(99)])


def test_p_values_are_small_for_what_cannot_be_chance():
    # Catches: a p-value of a constant, or one that grows with the difference.
    before = [item(i, broken=("budget",) if i % 10 else ()) for i in range(1, 201)]
    after = [item(i, broken=("budget",) if i % 2 else ()) for i in range(1, 201)]
    found = [compare_runs(before, b, samples=2000)["rates"]["strict.valid"] for b in (after, before, after)]
    assert found[0]["p"] < 0.001 and found[1]["p"] == 1.0 and found[0] == found[2]


def test_numbers_do_not_depend_on_the_order_or_on_storing():
    # Catches: a table that a stored file does not give again.
    text = json.dumps(metrics(ITEMS))
    assert json.dumps(metrics(json.loads(json.dumps(ITEMS)))) == text
    before = copy.deepcopy(ITEMS)
    metrics(ITEMS)
    assert before == ITEMS


def test_facts_of_an_episode_are_what_the_metrics_read(tmp_path):
    # Catches: a field that the environment names otherwise than the table.
    envs = triptailor.load("test", trips.build(tmp_path, seed=1, train=0, test=4))
    items = []
    for env in envs:
        env.reset()
        env.call("search_hotels", {"city": env.request.destination})
        env.step(env.task.data["final_plan_json"], [])
        verdict = env.verify()
        strict = {**verdict.checks, "pass": verdict.passed, "reasons": verdict.reasons}
        row = {"id": env.task.id, "strict": strict, "official": env.official(), "win": 0.0, "calls": 1}
        items.append(row | {"facts": env.facts()})
    found = metrics(items)["all"]
    assert found["strict"]["valid"] == found["official"]["valid"] == 1.0
    assert found["route"]["ratio"] == [1.0] * 3 and found["calls_by_tool"]["search_hotels"]["total"] == 4
