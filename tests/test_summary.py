import json

import pytest

from nanoplan import evaluate, report, summary


def item(id, passed, *, trial=0, official=None, stratum="", seconds=None, reasons=None, **more):
    reasons = ([] if passed else ["budget: over"]) if reasons is None else reasons
    base = {
        "id": id,
        "trial": trial,
        "output": "",
        "severity": {},
        "outcome": "",
        "win": None,
        "stop": "answer",
    }
    base |= dict.fromkeys(evaluate.PER_PLAN)
    strict = {"budget": passed, "pass": passed, "reasons": reasons}
    base |= {"strict": strict, "official": official, "stratum": stratum, "seconds": seconds}
    return base | more


def test_trials_are_averaged_per_request_before_anything_else():
    # Catches: trials taken as independent requests, a request with more trials that weighs more.
    items = [item("a", passed, trial=k) for k, passed in enumerate([True, True, False, False])]
    items += [item("b", True, trial=k) for k in range(4)]
    found = summary.summarize(items)
    row = found["success"]["strict"]
    assert (row["tasks"], row["trials"], row["mean"]) == (2, 4, 0.75) and row["sem"] == 0.25
    assert row["pass^"] == pytest.approx([0.75, (1 / 6 + 1) / 2, 0.5, 0.5]) and row["wilson"] is None
    assert row["bootstrap"] == [0.5, 1.0]
    assert found["strict"]["valid_rate"] == {"value": 0.75, "low": 0.5, "high": 1.0, "n": 8}
    assert found["counts"]["requests"] == 2 and found["counts"]["trials"] == 4
    assert found["success"]["official"] is None
    once = summary.summarize([item("a", True), item("b", False)])["success"]["strict"]
    assert once["wilson"] == pytest.approx([0.0945, 0.9055], abs=1e-4) and once["pass^"] == [0.5]


def test_strata_stand_in_natural_order_with_their_own_rates():
    # Catches: 10 before 2, a stratum's official rate taken from another's items.
    items = [item("a", True, stratum="trip 10 cities", official={"pass": False}, seconds=4.0)]
    items += [item("b", False, stratum="trip 3 cities", official={"pass": True}, seconds=2.0)]
    items += [item("c", True, stratum="trip 3 cities", official={"pass": True}, seconds=4.0)]
    found = summary.strata(items, seed=0)
    assert list(found) == ["trip 3 cities", "trip 10 cities"]
    assert found["trip 3 cities"]["strict"]["value"] == 0.5 and found["trip 3 cities"]["requests"] == 2
    assert found["trip 3 cities"]["official"]["value"] == 1.0 and found["trip 3 cities"]["seconds"] == 3.0
    assert summary.strata([item("a", True)], seed=0) == {}


def test_seconds_of_cached_replies_are_no_latency():
    # Catches: a second run of the same command that reports a model of no latency at all.
    items = [item(str(i), True, seconds=float(i)) for i in range(1, 6)]
    assert summary.latency(items) == {"mean": 3.0, "p50": 3.0, "p95": 4.8, "n": 5, "cached": 0}
    items[4]["cached"] = 2
    assert summary.latency(items)["mean"] == 2.5 and summary.latency(items)["cached"] == 1
    assert summary.latency([item("a", True)]) == {"mean": None, "p50": None, "p95": None, "n": 0, "cached": 0}


def test_answers_without_a_plan_are_told_from_bad_plans():
    # Catches: parse failures hidden among broken constraints, or a bad plan counted as unreadable.
    bad, none = item("a", False), item("b", False, reasons=["no plan: no JSON"])
    unread = item("c", False)
    unread["strict"]["readable"] = False
    missing = item("d", False, reasons=["undelivered: no line"], stop=evaluate.UNDELIVERED)
    assert [summary.parsed(x) for x in (bad, none, unread, missing)] == [True, False, False, False]
    found = summary.summarize([bad, none, unread, missing])
    assert found["counts"]["parse_failures"] == 3 and found["strict"]["decode_rate"]["value"] == 0.25


def test_costs_are_per_plan_and_in_all():
    # Catches: money per token where it is per million, a row of costs for a model that was not asked.
    rows = [
        {"queries": q, "prompt_tokens": 100 * q, "completion_tokens": 10 * q, "usd": 0.5 * q} for q in (1, 3)
    ]
    items = [item(str(i), True, **row) for i, row in enumerate(rows)]
    found = summary.costs(items)
    assert found["queries"]["value"] == 2 and found["prompt_tokens"]["value"] == 200 and found["usd"] == 2.0
    assert summary.costs([item("a", True)]) is None


def test_a_comparison_averages_trials_and_pairs_by_request():
    # Catches: the first trial compared with the first, whatever the others say.
    a = [item("x", k == 0, trial=k) for k in range(4)] + [item("y", False)]
    b = [item("y", True), item("x", True), item("z", True)]
    row = summary.compare(a, b, seed=0)["valid_rate"]
    assert (row["a"], row["b"], row["n"]) == (0.125, 1.0, 2) and row["diff"] == 0.875


def test_the_report_prints_what_is_known_and_dashes_for_the_rest():
    # Catches: a table that fails on a run without official scores, seconds or strata; shares in no percent,
    # 6,900 % plans; routes and rows by number of calls that only results.json has.
    about = {"bench": "x", "split": "test", "data": "d", "options": ["shots=0"], "model": "m", "adapter": ""}
    about |= {"agent": "", "method": "tools", "outputs": "", "judge": None, "judges": {}}
    items = [item("a", True, stratum="easy", seconds=1.5, official={"pass": True}), item("b", False)]
    found = {"official": {"delivery": 0.5}, "strict": {"delivery": 1.0, "effort": {"calls": 7.5}}}
    found["strict"] |= {"route": {"ratio": [1.25, 9.0, None]}, "empty": []}
    found["strict"]["valid_by_calls"] = [{"calls": 5, "plans": 69, "valid": 0.5}]
    full = report.table(about | summary.summarize(items) | {"metrics": found})
    for text in (
        "(shots=0): m",
        "| easy",
        "mean 1.50",
        "official pass",
        "delivery",
        "50.0 %",
        "effort.calls",
        "1.25",
        "69.00",
        "valid_by_calls.5.valid",
    ):
        assert text in full or text in full.replace("strict.", ""), text
    bare = report.table(about | summary.summarize([item("a", True)]) | {"metrics": {}})
    assert "official scoring is not built" in bare and "stratum" not in bare and "seconds" not in bare
    json.dumps(summary.summarize(items), allow_nan=False)
