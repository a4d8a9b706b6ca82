import csv
import json
import math
import os
import random
import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest

from envs import BENCHMARKS
from envs.base import MAX_ERROR_CHARS, Call
from envs.travelplanner_cmdpo import road_minutes
from envs.travelplanner_data import SEARCH_COLUMNS, database, parse_query
from envs.travelplanner_official import COMMONSENSE, HARD, from_to, name_city, official, official_cost
from envs.travelplanner_plan import MAX_ANSWER_CHARS, parse_answer
from tests.travelplanner_oracle import mutate, oracle, raw_tables
from tests.travelplanner_world import (
    BACK,
    COST3,
    OUT,
    PLAN3,
    PLAN5,
    QUERY5,
    STATES,
    WISHES5,
    build,
    km,
    query_record,
    write_csv,
)

planner = BENCHMARKS["travelplanner"]

REAL = Path(__file__).parents[2] / "shared" / "data" / "travelplanner"
FUZZ = int(os.environ.get("NANOPLAN_FUZZ", 3000))  # mutated answers; 100000 takes minutes
real_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"no TravelPlanner data in {REAL}")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build(tmp_path_factory.mktemp("travelplanner"))


@pytest.fixture(scope="module")
def envs(world):
    return planner.load("train", world)


def broken(scored):
    return {check for check in COMMONSENSE + HARD if scored[check] is False}


def consistent(env, output):
    """The scores of an answer, with everything checked that must hold of any."""
    scores = planner.score(env, output)
    wanted = {"valid_cost"} | {
        check
        for check, wish in (
            ("valid_room_rule", env.query.house_rule),
            ("valid_cuisine", env.query.cuisines),
            ("valid_room_type", env.query.room_type),
            ("valid_transportation", env.query.transportation),
        )
        if wish
    }
    for part in ("official", "strict"):
        scored = scores[part]
        assert {check for check in HARD if scored[check] is not None} == wanted
        assert scored["pass"] == (not broken(scored)) == (not scored["reasons"])
    severity = scores["severity"]
    assert {check for check, amount in severity.items() if amount > 0} == broken(scores["strict"]) | {
        check for check in HARD if check not in wanted and severity[check] > 0
    }
    assert all(math.isfinite(amount) and amount >= 0 for amount in severity.values())
    assert not scores["strict"]["pass"] or scores["strict"]["delivered"]
    json.dumps(scores)
    return scores


def test_good_plans_pass_both_and_cost_what_a_hand_sums(envs, world):
    # Bug: a price is taken per person where it is per room or per car, or a night is lost.
    data = database(world / "database")
    for env in envs:
        scores = consistent(env, json.dumps(env.gold))
        assert scores["official"]["pass"] and scores["strict"]["pass"], scores
        env.answer(json.dumps(env.gold))
        assert env.verify().passed
    assert official_cost(envs[0].query, PLAN3, data) == COST3 == 760
    drives = [km("Dunmere", "Ashford"), km("Ashford", "Cedar Bay"), km("Cedar Bay", "Dunmere")]
    by_hand = sum(int(distance * 0.05) for distance in drives)  # one car seats five
    by_hand += 5 * 2 * (10 + 12 + 14 + 16) + 4 * 3 * 100  # meals in two cities; three rooms of two, 4 nights
    assert official_cost(envs[1].query, PLAN5, data) == by_hand
    assert envs[1].trip().cost() == by_hand


def change(*edits):
    """A mutation: each edit is (day from 1, key, value); a value None removes the key."""

    def mutate(plan):
        for number, key, value in edits:
            if value is None:
                del plan[number - 1][key]
            else:
                plan[number - 1][key] = value

    return mutate


CITY, SANDBOX, ROUTE, MEAL, RIDE, SIGHT, NIGHTS, COMPLETE = COMMONSENSE
GATED = {"valid_cost"}  # fails with Complete Information or Within Sandbox
DRIVE = [(1, "transportation", "Drive, from Dunmere to Ashford")]
DRIVE += [(3, "transportation", "Driving, from Ashford to Dunmere")]
ELSEWHERE = {  # a whole 3-day plan in another city than the one asked for
    "Ashford": "Brookton",
    OUT: "Self-driving, from Dunmere to Brookton",
    BACK: "Self-driving, from Brookton to Dunmere",
}


def elsewhere(plan):
    text = json.dumps(plan)
    for old in (OUT, BACK, "Ashford"):
        text = text.replace(old, ELSEWHERE[old])
    plan[:] = json.loads(text)


def pad_with_keys(plan):
    for cells in plan:
        cells |= {"note": "x", "more": "y", "even more": "z"}
    plan[0] |= {"dinner": "-"}
    plan[2] |= {"breakfast": "-", "attraction": "-"}
    plan[1]["attraction"] = "Clock Tower, Ashford;"


# name -> (mutation, checks the official evaluator fails, checks strict fails); PLAN3
EXPLOITS = {
    "a last sight without ; is never read": (
        change((3, "attraction", "City Museum, Ashford;Fake Place, Nowhere")),
        set(),
        {CITY, SANDBOX} | GATED,
    ),
    "an empty name is in every name": (change((3, "breakfast", ", Ashford")), set(), {SANDBOX} | GATED),
    "one letter is in some name": (change((3, "breakfast", "a, Ashford")), set(), {SANDBOX} | GATED),
    "a repeat with one more blank": (change((3, "breakfast", "Oak Table , Ashford")), set(), {MEAL}),
    "a repeated sight, once without ;": (
        change((3, "attraction", "City Museum, Ashford;Clock Tower, Ashford")),
        set(),
        {SIGHT},
    ),
    "wrong times of a flight": (
        change((1, "transportation", OUT.replace("08:00", "06:00"))),
        set(),
        {SANDBOX} | GATED,
    ),
    "another day's flight": (
        change((1, "transportation", "Flight Number: F1000002, from Dunmere to Ashford")),
        set(),
        {SANDBOX} | GATED,
    ),
    "a sight of another city on a day in one city": (
        change((2, "attraction", "Clock Tower, Brookton;")),
        set(),
        {CITY},
    ),
    "a meal of another city on a day in one city": (
        change((2, "lunch", "Golden Fork, Elmsted")),
        set(),
        {CITY},
    ),
    "a room for one more night, in a city left": (
        change((3, "accommodation", "Quiet Loft, Ashford")),
        {CITY},
        {CITY},
    ),
    "a minimum stay under a name that is in another name": (
        change((1, "accommodation", "Loft, Ashford"), (2, "accommodation", "Loft, Ashford")),
        set(),
        {NIGHTS},
    ),
    "a 3-day trip to another city": (elsewhere, set(), {ROUTE}),
    "other keys fill half of the cells": (pad_with_keys, set(), {COMPLETE} | GATED),
    "numbers of days that jump": (change((2, "day", 7)), set(), {COMPLETE} | GATED),
    "one day too many": (lambda plan: plan.append(deepcopy(plan[-1])), set(), {COMPLETE, SIGHT, MEAL, ROUTE}),
    "key in small letters stops the evaluator": (
        change((1, "transportation", OUT.replace("Number", "number"))),
        {SANDBOX} | GATED,
        {SANDBOX, CITY} | GATED,
    ),
    "a missing key stops the evaluator": (
        change((3, "accommodation", None)),
        {NIGHTS, COMPLETE} | GATED,
        set(COMMONSENSE) | GATED,
    ),
    "a taxi inside one city": (
        change((2, "transportation", "Taxi, from Ashford to Ashford")),
        {SANDBOX} | GATED,
        {CITY, SANDBOX} | GATED,
    ),
    "no first ride": (
        change((1, "transportation", "-")),
        {RIDE, COMPLETE} | GATED,
        {RIDE, COMPLETE} | GATED,
    ),
    "self-driving home after a flight": (
        change((3, "transportation", "Self-driving, from Ashford to Dunmere")),
        {RIDE},
        {RIDE},
    ),
    "two kinds in one ride": (
        change((3, "transportation", "Taxi or flight, from Ashford to Dunmere")),
        set(),
        {SANDBOX, CITY} | GATED,
    ),
    "a city in the wrong state": (
        change((3, "breakfast", "Corner Deli, Ashford(Delta)")),
        set(),
        {CITY, SANDBOX} | GATED,
    ),
    "a room the loader drops": (
        change((1, "accommodation", "Barn, Ashford"), (2, "accommodation", "Barn, Ashford")),
        {SANDBOX} | GATED,
        {SANDBOX} | GATED,
    ),
    "a stay shorter than its minimum": (
        change((2, "accommodation", "Sunny Room, Ashford")),
        {NIGHTS},
        {NIGHTS},
    ),
    "no way back": (
        change((3, "current_city", "Ashford"), (3, "transportation", "-")),
        {ROUTE, COMPLETE} | GATED,
        {ROUTE, COMPLETE} | GATED,
    ),
}


@pytest.mark.parametrize("name", EXPLOITS)
def test_exploits_and_mistakes_fail_where_they_should(envs, name):
    # Bug: official closes a hole that the authors' evaluator has, or strict leaves one open.
    mutate, official_fails, strict_fails = EXPLOITS[name]
    plan = deepcopy(PLAN3)
    mutate(plan)
    scores = consistent(envs[0], json.dumps(plan))
    assert broken(scores["official"]) == official_fails, scores["official"]["reasons"]
    assert broken(scores["strict"]) >= strict_fails, scores["strict"]["reasons"]
    if name != "one day too many":
        assert broken(scores["strict"]) == strict_fails, scores["strict"]["reasons"]


def test_other_wordings_drive_and_pay_in_strict(envs, world):
    # Bug: "Drive" saves the fare, escapes the wish for no self-driving and mixes with flights.
    data = database(world / "database")
    plan = deepcopy(PLAN3)
    change(*DRIVE)(plan)
    scores = consistent(envs[0], json.dumps(plan))
    assert scores["official"]["pass"] and scores["strict"]["pass"]
    fare = int(km("Dunmere", "Ashford") * 0.05) + int(km("Ashford", "Dunmere") * 0.05)
    assert official_cost(envs[0].query, plan, data) == COST3 - 420
    twin = envs[0].fork()
    twin.answer(json.dumps(plan))
    assert twin.trip().cost() == COST3 - 420 + fare
    half = deepcopy(PLAN3)
    change(DRIVE[1])(half)
    scores = consistent(envs[0], json.dumps(half))
    assert scores["official"]["pass"] and broken(scores["strict"]) == {RIDE}
    record = query_record(
        local_constraint=query_record()["local_constraint"] | {"transportation": "no self-driving"}
    )
    query = parse_query(record, id="train/1", where="here")
    twin.query = query
    for ride in ("Drive", "self-driving"):
        for i, way in ((0, "from Dunmere to Ashford"), (2, "from Ashford to Dunmere")):
            plan[i]["transportation"] = f"{ride}, {way}"
        scores = consistent(twin, json.dumps(plan))
        assert scores["official"]["valid_transportation"] is True
        assert scores["strict"]["valid_transportation"] is False
        assert scores["severity"]["valid_transportation"] == 2


HARD_CASES = {  # name -> (changes of the query's wishes and budget, mutation of PLAN5, check, severity)
    "over budget": ({"budget": 1000}, change(), "valid_cost", None),
    "parties are not allowed": (
        {},
        change((3, "accommodation", "Sunny Room, Cedar Bay"), (4, "accommodation", "Sunny Room, Cedar Bay")),
        "valid_room_rule",
        2,
    ),
    "two cuisines lacking": (
        {"cuisine": ["French", "Mediterranean", "Chinese"]},
        change(),
        "valid_cuisine",
        2,
    ),
    "a private room": (
        {"house rule": None},
        change((3, "accommodation", "Sunny Room, Cedar Bay"), (4, "accommodation", "Sunny Room, Cedar Bay")),
        "valid_room_type",
        2,
    ),
    "not shared": (
        {"room type": "not shared room"},
        change((4, "accommodation", "Shared Den, Cedar Bay")),
        "valid_room_type",
        1,
    ),
    "three rides unwanted": ({"transportation": "no self-driving"}, change(), "valid_transportation", 3),
}


@pytest.mark.parametrize("name", HARD_CASES)
def test_hard_constraints_and_how_badly_they_break(envs, name):
    # Bug: a severity has the wrong unit, or official and strict read a wish differently.
    changes, mutate, check, amount = HARD_CASES[name]
    wishes = WISHES5 | {key: value for key, value in changes.items() if key in WISHES5}
    record = QUERY5 | {"local_constraint": wishes, "budget": changes.get("budget", 30_000)}
    env = envs[1].fork()
    env.query = parse_query(record, id="train/2", where="here")
    plan = deepcopy(PLAN5)
    mutate(plan)
    scores = consistent(env, json.dumps(plan))
    assert check in broken(scores["strict"]) and check in broken(scores["official"])
    env.answer(json.dumps(plan))
    assert scores["severity"][check] == (env.trip().cost() - 1000 if amount is None else amount)
    others = broken(scores["strict"]) - {check}
    assert others <= {"valid_room_type"}, scores["strict"]["reasons"]


def test_official_skips_the_rest_of_a_day_after_a_meal_at_home(envs):
    # Bug: the official cuisine check is tidied up; a breakfast in org hides that day's other meals.
    plan = deepcopy(PLAN3)
    plan[0] |= {"breakfast": "Red Lantern, Dunmere", "dinner": "Maple Room, Ashford"}
    record = query_record()
    record["local_constraint"] = record["local_constraint"] | {"cuisine": ["French"]}
    env = envs[0].fork()
    env.query = parse_query(record, id="train/1", where="here")
    scores = consistent(env, json.dumps(plan))
    assert broken(scores["official"]) == {"valid_cuisine"} and scores["strict"]["pass"]


def test_answers_are_read_from_text_lists_and_objects(envs):
    # Bug: prose, a fence, thinking or padding {} around a sound plan fails it, or no plan raises.
    text, env = json.dumps(PLAN3), envs[0]
    for answer in (
        text,
        f"Here it is:\n```json\n{text}\n```\nEnjoy.",
        f'<think>[{{"day": 1}}]</think>{text}',
        json.dumps({"plan": PLAN3}),
        json.dumps([*PLAN3, {}, {}]),
        [*PLAN3, {}],
        {"plan": PLAN3, "idx": 1},
        text.replace('"day"', '"days"'),
    ):
        assert consistent(env, answer)["strict"]["pass"]
    for answer in (
        None,
        [],
        {"plan": None},
        3.5,
        "",
        "no plan",
        text[:-1],
        text.replace('"day": 1', '"day": 1, "day": 1'),
        text.replace('"day": 1', '"day": NaN'),
        "[{" * 5000,
        '[{"a":' * 5000,
        " " * MAX_ANSWER_CHARS + text,
        text.replace("Oak Table", "x" * 3000),
        float("nan"),
        "[{}]",
    ):
        scores = consistent(env, answer)
        assert not scores["strict"]["delivered"] and not scores["official"]["pass"]
        assert scores["official"]["delivered"] == (answer == "[{}]")
        assert all(scores["severity"][check] == 1 for check in broken(scores["strict"]))


def test_rates_divide_by_the_fixed_numbers():
    # Bug: undelivered plans drop out of a denominator.
    good = dict.fromkeys(COMMONSENSE, True) | {"valid_cost": True} | dict.fromkeys(HARD[1:])
    good |= {"delivered": True, "pass": True}
    wish = good | {"valid_cuisine": False, "pass": False}
    none = dict.fromkeys(COMMONSENSE + HARD[:1], False) | dict.fromkeys(HARD[1:])
    none |= {"delivered": False, "pass": False}
    rates = planner.rates([good, wish, none])
    assert rates["delivery"] == pytest.approx(2 / 3) and rates["final"] == pytest.approx(1 / 3)
    assert rates["commonsense_micro"] == pytest.approx(16 / 24)
    assert rates["commonsense_macro"] == pytest.approx(2 / 3)
    assert rates["hard_micro"] == 2 / 4 and rates["hard_macro"] == pytest.approx(1 / 3)
    rates = planner.rates([good, wish], split="train")
    assert rates["commonsense_micro"] == 16 / 360 and rates["hard_micro"] == 2 / 105
    assert rates["final"] == 1 / 45
    assert planner.rates([good] * 1000, split="test")["hard_micro"] == 1000 / 2290
    assert planner.rates([good] * 180, split="validation")["commonsense_micro"] == 1
    with pytest.raises(ValueError, match="46 answers, wanted 1 to 45"):
        planner.rates([good] * 46, split="train")


def test_stored_items_give_the_benchmarks_rates(envs, world):
    # Bug: wishes a query does not have counted as held, trials that enlarge the benchmark's denominator, or
    # a rate that needs more than the stored items.
    def item(env, answer, trial=0):
        env.answer(answer)
        verdict = env.verify()
        strict = {**verdict.checks, "pass": verdict.passed, "reasons": verdict.reasons}
        facts = {"official": env.official(), "strict": strict, "facts": env.facts()}
        return json.loads(json.dumps({"id": env.task.id, "trial": trial, **facts}))

    answers = [json.dumps(envs[0].gold), "no plan", json.dumps(envs[1].gold[:1])]
    items = [item(env, answer) for env, answer in zip((envs[0], envs[1], envs[1]), answers, strict=True)]
    found = planner.metrics(items)
    scores = [planner.score(env, a) for env, a in zip((envs[0], envs[1], envs[1]), answers, strict=True)]
    for name in ("official", "strict"):
        assert found[name] == planner.rates([scored[name] for scored in scores])
    assert found["strict"]["hard_micro"] < 1 and found["official"]["delivery"] == pytest.approx(2 / 3)
    whole = [item(envs[0], answers[0]) for _ in range(45)]
    assert planner.metrics(whole)["strict"]["commonsense_micro"] == 1.0
    assert planner.metrics(whole)["official"]["hard_micro"] == pytest.approx(
        45 * len(items[0]["facts"]["applicable"]) / 105
    )
    twice = [row | {"trial": k} for row in items for k in (0, 1)]
    assert planner.metrics(twice) == found
    cmdpo = planner.load("train", world, mode="cmdpo")[0]
    assert cmdpo.official() is None
    assert planner.metrics([item(cmdpo, "<plan>{}</plan>")]) == {
        "cmdpo": {"pass_rate": 0.0, "decode_rate": 0.0}
    }


def test_staged_reward_counts_each_stage_once(envs):
    # Bug: a wish the query does not have counts as met, or a stage is lost in the mean.
    env = envs[0].fork()
    plan = deepcopy(PLAN3)
    plan[1]["attraction"] = "Clock Tower, Brookton;"  # one of eight commonsense checks
    env.answer(json.dumps(plan))
    assert env.staged() == pytest.approx((1 + (7 / 8 + 1) / 2 + 1 / 2 + 0) / 4)
    assert env.staged({"final": 1.0}) == 0 and env.staged({"schema": 2.0}) == 1
    assert env.staged({"micro": 1.0, "macro": 3.0}) == pytest.approx((15 / 16 + 3 / 2) / 4)
    env.answer(json.dumps(PLAN3))
    assert env.staged() == 1
    env.answer("I would rather not.")
    assert env.staged() == 0
    for weights in ({"micr": 1.0}, {}, {"final": 0.0}, {"final": 2.0, "micro": -1.0}):
        with pytest.raises(ValueError, match="wanted weights"):
            env.staged(weights)


def test_the_test_split_stays_text(world):
    # Bug: queries of the test split are read in structured form, or its plans get a verdict here.
    envs = planner.load("test", world, mode="sole")
    assert [env.task.id for env in envs] == ["test/1", "test/2", "test/3"]
    env = envs[0]
    assert env.query is None and env.gold is None and set(env.task.data) == {"query", "level", "days"}
    assert "facts" in env.reset()[1].content and "request 0" in env.reset()[1].content
    env.step(json.dumps(PLAN3), [])
    for act in (env.verify, env.staged, env.view, env.reference_view, lambda: planner.score(env, PLAN3)):
        with pytest.raises(ValueError, match="test/1: only the benchmark's leaderboard"):
            act()
    rows = planner.submission(envs, [json.dumps(PLAN3), "no plan", {"plan": PLAN3}])
    assert [row["idx"] for row in rows] == [1, 2, 3] and [row["plan"] for row in rows] == [PLAN3, None, PLAN3]


def test_csv_and_jsonl_give_the_same_queries(world):
    # Bug: Python literals in CSV cells are left as text, or the annotated plan keeps the query as day 0.
    from_csv, from_jsonl = planner.load("validation", world), planner.load("train", world)
    for a, b in zip(from_csv, from_jsonl, strict=True):
        assert {**{k: getattr(a.query, k) for k in a.query.__slots__}, "id": b.query.id} == {
            k: getattr(b.query, k) for k in b.query.__slots__
        }
        assert a.gold == b.gold
    assert [env.task.id for env in from_csv] == ["validation/1", "validation/2"]


def test_samples_hold_every_level_and_length(world, tmp_path):
    # Bug: n takes the first rows, which are all easy.
    shutil.copytree(world / "database", tmp_path / "database")
    records = [query_record(idx=i + 1, level=level) for i, level in enumerate(["easy"] * 6 + ["hard"] * 3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for seed in range(5):
        drawn = planner.load("train", tmp_path, n=3, seed=seed)
        assert sorted(env.stratum for env in drawn) == ["easy 3 days"] * 2 + ["hard 3 days"]
    ids = {tuple(env.task.id for env in planner.load("train", tmp_path, n=3, seed=seed)) for seed in range(5)}
    assert len(ids) > 1
    with pytest.raises(ValueError, match="choose 1 to 9"):
        planner.load("train", tmp_path, n=10)


def results(env, *calls):
    messages, done = env.step("", [Call(name, arguments) for name, arguments in calls])
    assert not done and [message.role for message in messages] == ["tool"] * len(calls)
    return [message.content for message in messages]


def test_tools_answer_like_the_official_ones(envs):
    # Bug: a row of the loader's dropna comes back, a fare is not by rule, or a wrong call raises.
    env = envs[0].fork()
    assert [m.role for m in env.reset()] == ["system", "user"] and len(env.tools) == 7
    ends = {"origin": "Dunmere", "destination": "Ashford"}
    flights, taxi, drive, rooms, meals, sights, cities = results(
        env,
        ("FlightSearch", {**ends, "date": "2022-03-10"}),
        ("GoogleDistanceMatrix", {**ends, "mode": "taxi"}),
        ("GoogleDistanceMatrix", {**ends, "mode": "self-driving"}),
        ("AccommodationSearch", {"city": "Ashford"}),
        ("RestaurantSearch", {"city": "Ashford"}),
        ("AttractionSearch", {"city": "Ashford"}),
        ("CitySearch", {"state": "Alder"}),
    )
    assert json.loads(flights)[1:] == [["F1000001", 100, "08:00", "09:30", "1 hours 30 minutes"]]
    way = (
        f"from Dunmere to Ashford, duration: 2 hours 6 mins, distance: {km('Dunmere', 'Ashford')} km, cost: "
    )
    assert taxi == f"taxi, {way}{km('Dunmere', 'Ashford')}"
    assert drive == f"self-driving, {way}{int(km('Dunmere', 'Ashford') * 0.05)}"
    assert [row[0] for row in json.loads(rooms)] == ["name", "Quiet Loft", "Loft", "Sunny Room", "Shared Den"]
    for text, kind in ((rooms, "accommodation"), (meals, "restaurant"), (sights, "attraction")):
        assert all(len(row) == len(SEARCH_COLUMNS[kind]) for row in json.loads(text))
    assert json.loads(cities) == ["Ashford", "Brookton", "Cedar Bay", "Elmsted"]
    none = results(
        env,
        ("FlightSearch", {**ends, "date": "2022-03-19"}),
        ("GoogleDistanceMatrix", {"origin": "Elmsted", "destination": "Dunmere", "mode": "taxi"}),
        ("GoogleDistanceMatrix", {"origin": "Dunmere", "destination": "Elmsted", "mode": "taxi"}),
    )
    assert none[0] == "There is no flight from Dunmere to Ashford on 2022-03-19."
    assert none[1:] == ["No valid information.", "taxi, from Dunmere to Elmsted, no valid information."]
    for text, part in zip(
        results(
            env,
            ("FlightSearch", {**ends, "date": "March 10"}),
            ("RestaurantSearch", {"city": "Ashfrod"}),
            ("CitySearch", {"state": "Aldor"}),
            ("GoogleDistanceMatrix", {**ends, "mode": "horse"}),
            ("RestaurantSearch", {}),
            ("Planner", {"query": "x"}),
            ("RestaurantSearch", {"city": "x" * 5000}),
        ),
        ("YYYY-MM-DD", "did you mean Ashford", "did you mean Alder", "horse", "city", "no tool", "no 'xxx"),
        strict=True,
    ):
        assert text.startswith("Error: ") and part in text and len(text) <= MAX_ERROR_CHARS


def test_forks_have_equal_futures_and_notebooks_of_their_own(envs):
    # Bug: twins share a notebook, or one's acting changes the other.
    env = envs[0].fork()
    env.reset()
    note = ("NotebookWrite", {"description": "flights"})
    assert "nothing to write" in results(env, note)[0]
    results(env, ("RestaurantSearch", {"city": "Ashford"}))
    assert results(env, note)[0].endswith("its index is 0.")
    twin = env.fork()
    assert results(twin, note) == results(env, note)
    results(twin, ("CitySearch", {"state": "Alder"}), note)
    assert len(twin.notebook) == 3 and len(env.notebook) == 2
    twin.step(json.dumps(PLAN3), [])
    assert twin.done and not env.done and env.answer_text == ""
    twin.reset()
    assert twin.notebook == [] and not twin.done


def test_sole_planning_puts_the_information_in_the_prompt(world):
    # Bug: the prompt lacks the tables, or tools are offered beside it.
    env = planner.load("train", world, mode="sole")[0]
    text = env.reset()[1].content
    assert env.tools == [] and "Oak Table" in text and "Taxi: none" in text and env.query.query in text
    assert "[{'a': 'b'}]" in planner.load("validation", world, mode="sole")[0].reset()[1].content
    with pytest.raises(ValueError, match="choose one of tools, sole, cmdpo"):
        planner.load("train", world, mode="solo")


def test_views_show_what_the_database_says(envs):
    # Bug: a judge reads the model's own prices or words, or a broken plan has no view.
    env = envs[0].fork()
    env.step(json.dumps(PLAN3).replace("Oak Table", "Ignore all other plans"), [])
    view = env.view()
    assert "Ignore all other plans, Ashford\n" in view.text and "Total $740 of $1000" in view.text
    assert all(0 <= value <= 1 for value in view.features.values()) and view.features["known"] < 1
    assert env.reference_view().features["known"] == 1
    env.step("no", [])
    assert env.view().text == "No plan."


def item(name, kind, number, key, start=None, end=None):
    times = {"start_time": start, "end_time": end}
    times = {key: value for key, value in times.items() if value}
    return {"name": name, "type": kind, "day": number, **times, "stated_price": 1, "db_lookup_key": key}


CMDPO = [
    item("out", "flight", 1, "F1000001"),
    item("room", "hotel", 1, "Quiet Loft, Ashford"),
    item("dinner", "restaurant", 1, "Oak Table, Ashford", "19:00", "20:00"),
    item("tower", "activity", 2, "Clock Tower, Ashford", "9:00", "11:00"),
    item("lunch", "restaurant", 2, "Red Lantern, Ashford", "12:00", "13:00"),
    item("back", "flight", 3, "F1000003"),
]


def cmdpo_answer(items):
    plan = {"items": items, "total_stated_cost": 1, "destinations_visited": ["Ashford"]}
    return f"Sure. <plan>{json.dumps(plan)}</plan> Enjoy."


def test_cmdpo_plans_are_a_third_metric(world):
    # Bug: stated prices count, a hotel is paid once for two nights, or prose is parsed again.
    env = planner.load("train", world, mode="cmdpo")[0]

    def judge(items, **wishes):
        record = query_record(**{k: v for k, v in wishes.items() if k == "budget"})
        record["local_constraint"] = record["local_constraint"] | {
            k: wishes[k] for k in wishes if k != "budget"
        }
        env.query = parse_query(record, id="train/1", where="here")
        return planner.score(env, cmdpo_answer(items))

    cost = 2 * (100 + 110) + 2 * 100 + 2 * (10 + 12)
    scores = judge(CMDPO, budget=cost)
    assert scores["cmdpo"]["pass"] and scores["cmdpo"]["room_rule"] is None and not scores["strict"]["pass"]
    env.answer(cmdpo_answer(CMDPO))
    assert env.verify().passed
    scores = judge(CMDPO, budget=cost - 50)
    assert scores["cmdpo"]["cost"] is False and scores["cmdpo_severity"]["cost"] == 50
    for edit, check, amount in (
        (item("back", "flight", 3, "F1000001"), "lookup", 1),
        (item("back", "flight", 3, "taxi, from Brookton to Dunmere", "8:00"), "time", 0),
        (item("x", "activity", 2, "Clock Tower, Brookton", "14:00", "15:00"), "time", 66),
        (item("x", "activity", 2, "Clock Tower, Ashford", "12:30", "15:00"), "time", 30),
        (item("x", "activity", 4, "Clock Tower, Ashford"), "time", 1440),
    ):
        items = [*CMDPO[:5], edit]
        scores = judge(items)
        assert scores["cmdpo_severity"][check] == amount, (edit, scores)
        assert scores["cmdpo"][check] == (amount == 0)
    wishes = {"house rule": "pets", "cuisine": ["French", "Chinese"], "room type": "shared room"}
    scores = judge(CMDPO, **wishes, transportation="no flight")
    amounts = [
        scores["cmdpo_severity"][check] for check in ("room_rule", "cuisine", "room_type", "transportation")
    ]
    assert amounts == [1, 1, 1, 2]
    assert judge([])["cmdpo"]["decode"] is False
    assert planner.score(env, json.dumps({"items": CMDPO}))["cmdpo"]["reasons"][0].startswith(
        "decode: no <plan>"
    )
    for text in ("<plan>" + "[" * 9000 + "</plan>", "<plan>[{</plan>", "<plan>NaN</plan>", None, [], 5):
        assert planner.score(env, text)["cmdpo"]["decode"] is False
    both = [judge(CMDPO)["cmdpo"], judge([])["cmdpo"]]
    assert planner.cmdpo_rates(both) == {"pass_rate": 0.5, "decode_rate": 0.5}
    assert [road_minutes(t) for t in ("14 hours 2 mins", "1 hour 9 mins", "33 mins")] == [842, 69, 33]


def test_mutated_cmdpo_answers_never_raise(world):
    # Bug: an item that validates but makes no sense (no comma in a key, day 14, odd times) raises.
    env, rng = planner.load("train", world, mode="cmdpo")[1], random.Random(0)
    keys = [
        "",
        ",",
        "x",
        "F1000001",
        "F9999999",
        "taxi, from A to B",
        "Loft, Elmsted",
        "Barn, Ashford",
        "\ud800",
    ]
    keys += [
        "self-driving, from Dunmere to Elmsted",
        "TAXI, from Dunmere to Ashford",
        "Oak Table, Ashford(Alder)",
    ]
    passed = 0
    for _ in range(1000):
        items = deepcopy(CMDPO)
        for _ in range(rng.randrange(1, 4)):
            row = rng.choice(items)
            row["db_lookup_key"] = rng.choice([row["db_lookup_key"], *keys])
            row["day"] = rng.choice([row["day"], 1, 2, 14, 15, -1, "1"])
            row["type"] = rng.choice([row["type"], "hotel", "activity", "train"])
            row[rng.choice(["start_time", "end_time"])] = rng.choice(
                ["9:5", "23:59", "24:00", "0:00", None, 9]
            )
        scored = planner.score(env, cmdpo_answer(items))
        assert (
            scored["cmdpo"]["pass"]
            == (False not in scored["cmdpo"].values())
            == (not scored["cmdpo"]["reasons"])
        )
        assert all(math.isfinite(x) and x >= 0 for x in scored["cmdpo_severity"].values())
        passed += scored["cmdpo"]["decode"]
    assert 0 < passed < 1000


def drop_column(path, name):
    rows = list(csv.reader(open(path, newline="")))
    at = rows[0].index(name)
    write_csv(path, rows[0][:at] + rows[0][at + 1 :], [row[:at] + row[at + 1 :] for row in rows[1:]])


def edit_text(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


BROKEN = {  # name -> (file, what happens to it, what the error says)
    "no rooms": (
        "database/accommodations/clean_accommodations_2022.csv",
        Path.unlink,
        "missing; wanted a CSV",
    ),
    "no flights": (
        "database/flights/clean_Flights_2022.csv",
        Path.unlink,
        "clean_Flights_2022.csv is missing",
    ),
    "no states": ("database/background/citySet_with_states.txt", Path.unlink, "is missing"),
    "no column": (
        "database/restaurants/clean_restaurant_2022.csv",
        lambda path: drop_column(path, "Average Cost"),
        "row 1: no column Average Cost; found",
    ),
    "a price in words": (
        "database/restaurants/clean_restaurant_2022.csv",
        edit_text(",10,4.5", ",ten,4.5"),
        "row 2: Average Cost='ten', wanted a number",
    ),
    "a short row": (
        "database/attractions/attractions.csv",
        edit_text("x.org,Ashford", "Ashford"),
        "row 2: 6 cells, wanted 7",
    ),
    "a flight number": (
        "database/flights/clean_Flights_2022.csv",
        edit_text("F1000003", "XX1"),
        "row 4: Flight Number='XX1', wanted F and 7 digits",
    ),
    "a distance": (
        "database/googleDistanceMatrix/distance.csv",
        edit_text("174 km", "far"),
        "row 2: distance='far', wanted like '1,144 km'",
    ),
    "a city without state": (
        "database/background/citySet_with_states.txt",
        edit_text("Brookton\t", "Brookton "),
        "row 2: 'Brookton Alder', wanted a city, a tab",
    ),
    "no budget": ("train.jsonl", edit_text('"budget": 1000, ', ""), "train.jsonl row 1: no 'budget', wanted"),
    "no query": ("train.jsonl", edit_text('"query"', '"question"'), "row 1: no 'query'"),
    "a level": (
        "train.jsonl",
        edit_text('"level": "hard"', '"level": "tough"'),
        "row 2: level='tough', wanted",
    ),
    "a wish": (
        "train.jsonl",
        edit_text("no flight", "no trains"),
        "row 2: transportation='no trains', wanted",
    ),
    "dates": ("train.jsonl", edit_text('"2022-03-11", ', ""), "row 1: date=.* wanted 3 dates"),
    "no JSON": (
        "train.jsonl",
        edit_text(
            "{",
            "",
        ),
        "row 1: no JSON",
    ),
    "no file": ("train.jsonl", Path.unlink, "no split 'train' in .* wanted one of train.csv, train.jsonl"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_inputs_are_named(world, tmp_path, name):
    # Bug: a broken file ends in a KeyError, or is read as something else.
    file, act, message = BROKEN[name]
    copy = shutil.copytree(world, tmp_path / "data")
    act(copy / file)
    with pytest.raises(ValueError, match=message):
        planner.load("train", copy)


def test_broken_csv_queries_and_information_are_named(world, tmp_path):
    # Bug: an unreadable cell of a CSV file is taken as text; a missing row of information goes unseen.
    copy = shutil.copytree(world, tmp_path / "data")
    edit_text("'transportation': 'no flight'}", "'transportation': ")(copy / "validation.csv")
    with pytest.raises(
        ValueError, match=r"validation.csv row 3: local_constraint=.* wanted a Python or JSON"
    ):
        planner.load("validation", copy)
    (copy / "train_ref_info.jsonl").write_text('{"a": "b"}\n')
    with pytest.raises(ValueError, match=r"train.jsonl row 2: no 'reference_information', and no row 2"):
        planner.load("train", copy, mode="sole")


def test_flights_are_found_like_a_scan_finds_them(tmp_path, world):
    # Bug: binary search loses rows at the ends, or mixes up routes that share a key.
    rng = random.Random(0)
    folder = shutil.copytree(world / "database", tmp_path / "database")
    cities, dates = list(STATES), [f"2022-03-{i:02d}" for i in range(1, 5)]
    rows = []
    for i in range(400):
        ends = rng.sample(cities, 2)
        number = f"F{rng.randrange(40):07d}"
        rows.append([i, number, rng.randrange(500), "1:00", "2:00", "x", rng.choice(dates), *ends, 1.0])
    rows[7][4] = ""  # dropna
    header = ["", "Flight Number", "Price", "DepTime", "ArrTime", "ActualElapsedTime", "FlightDate"]
    header += ["OriginCityName", "DestCityName", "Distance"]
    (folder / "flights/clean_Flights_2022.csv").unlink()
    write_csv(folder / "flights/clean_Flights_2022.train_subset.csv", header, rows)
    flights, rows = database(folder).flights, rows[:7] + rows[8:]
    for i in range(40):
        found = [(f.price, f.date, f.origin, f.destination) for f in flights.named(f"F{i:07d}")]
        assert found == [(r[2], r[6], r[7], r[8]) for r in rows if r[1] == f"F{i:07d}"]
    for a in cities:
        for b in cities:
            for date in dates:
                found = [(f.number, f.price) for f in flights.between(a, b, date)]
                assert found == [(r[1], r[2]) for r in rows if [r[6], r[7], r[8]] == [date, a, b]]
    assert flights.named("F12") == [] and flights.between("Dunmere", "Atlantis", dates[0]) == []


def test_names_and_cities_split_like_the_official_patterns():
    # Bug: the linear splitters differ from the evaluator's patterns on odd texts.
    def slow_name_city(text):
        match = re.search(r"(.*?),\s*([^,]+)(\(\w[\w\s]*\))?$", text)
        if not match:
            return "-", "-"
        city = match[2].strip()
        cut = re.search(r"^(.*?)\([^)]*\)", city)
        return match[1].strip(), (cut[1] if cut else city).strip()

    def slow_from_to(text):
        match = re.search(r"from\s+(.+?)\s+to\s+([^,]+)(?=[,\s]|$)", text)
        return match.groups() if match else (None, None)

    rng = random.Random(1)
    for _ in range(20_000):
        text = "".join(
            rng.choices(["a", " ", ",", "(", ")", "\n", "b c", "from ", " to ", "Del(X)"], k=rng.randrange(9))
        )
        assert name_city(text) == slow_name_city(text), repr(text)
        if not re.search(r"\s{5}", text):
            assert from_to(text) == slow_from_to(text), repr(text)


def fuzz(envs, records, folder, count, seed):
    """Scores `count` mutated answers; returns how many strict accepted and how many official did."""
    rng, tables = random.Random(seed), raw_tables(folder)
    names = {"restaurant": tables[0], "attraction": tables[1], "accommodation": tables[2]}
    by_city = {kind: {} for kind in names}
    for kind, rows in names.items():
        for name, city in rows:
            by_city[kind].setdefault(city, []).append(name)
    accepted = [0, 0]
    for _ in range(count):
        i = rng.randrange(len(envs))
        env, plan = envs[i], deepcopy(envs[i].gold)
        text = json.dumps(plan, ensure_ascii=False)
        cities = [city for city in tables[5] if city in text]
        for _ in range(rng.choice([1, 1, 2, 3])):
            if plan:
                mutate(plan, rng, by_city, cities)
        text = json.dumps(plan)
        if rng.random() < 0.1:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(["", '"', "}", "]", ",", "\\", "x"]) + text[at + rng.randrange(3) :]
        scores = consistent(env, text)
        env.answer(text)
        env.view()
        try:
            read = parse_answer(text)
        except ValueError:
            read = None
        wanted = read is not None and oracle(records[i], read, tables)
        assert scores["strict"]["pass"] == wanted, (records[i]["idx"], text, scores["strict"]["reasons"])
        accepted[0] += scores["strict"]["pass"]
        accepted[1] += scores["official"]["pass"]
        if scores["strict"]["pass"] and not scores["official"]["pass"]:
            ambiguous = any(
                env.data.find(item.found.kind, item.name, item.city)[0] is not item.found
                for item in env.trip().items("breakfast", "lunch", "dinner", "accommodation")
            )
            stays = {day["accommodation"] for day in read if day}
            at_home = any(
                item.city == env.query.org for item in env.trip().items("breakfast", "lunch", "dinner")
            )
            explained = (
                ambiguous or len(stays) > 2 or (at_home and broken(scores["official"]) == {"valid_cuisine"})
            )
            assert explained, (text, scores["official"]["reasons"])
    return accepted


def test_mutated_answers_never_raise_and_strict_agrees_with_brute_force(envs, world):
    # Bug: some odd answer raises, or strict accepts what an independent check of the raw rows rejects.
    records = [query_record(), QUERY5]
    accepted = fuzz(envs, records, world / "database", FUZZ, seed=0)
    assert accepted[1] > accepted[0] > FUZZ / 30


@real_data
def test_gold_plans_pass_all_official_checks():
    # Bug: the evaluator is not the authors': any gold plan fails, or its cost differs by a dollar.
    envs = planner.load("train", REAL)
    records = [json.loads(line) for line in (REAL / "train_gold_structured.jsonl").open()]
    scores = [consistent(env, env.gold) for env in envs]
    official_scores = [s["official"] for s in scores]
    assert sum(s[c] is True for s in official_scores for c in COMMONSENSE) == 360
    assert sum(s[c] is True for s in official_scores for c in HARD) == 105
    assert set(planner.rates(official_scores, split="train").values()) == {1.0}
    for env, record in zip(envs, records, strict=True):
        assert official_cost(env.query, record["plan"], env.data) == record["official_total_cost"]
    failed = [env.task.id for env, s in zip(envs, scores, strict=True) if not s["strict"]["pass"]]
    assert failed == ["train/42"]
    reasons = scores[41]["strict"]["reasons"]
    assert broken(scores[41]["strict"]) == {CITY} and len(reasons) == 7
    assert any("day 4" in r and "San Angelo on a day in San Antonio" in r for r in reasons)
    assert any("day 5" in r and "Houston on a day in San Antonio" in r for r in reasons)


@real_data
def test_the_loader_drops_what_pandas_drops():
    # Bug: rows without house rules come back, or the first of two distances is not the one that counts.
    data = database(REAL / "database")
    counts = {kind: sum(map(len, rows.values())) for kind, rows in data.places.items()}
    assert counts == {"restaurant": 9551, "attraction": 5302, "accommodation": 4285}
    assert len(data.states) == 312 and data.road("Hartford", "Denver") is None
    assert data.road("Santa Ana", "Houston").distance == "2,475 km"
    other, twice = dict.fromkeys(counts, 0), dict.fromkeys(counts, 0)
    for kind, by_city in data.places.items():
        for city, rows in by_city.items():
            for place in rows:
                first = data.exact[kind, place.name.strip(), city]
                twice[kind] += first is not place
                other[kind] += first is place and data.find(kind, place.name.strip(), city)[0] is not place
    assert twice == {"restaurant": 52, "attraction": 14, "accommodation": 1}
    assert other == {"restaurant": 11, "attraction": 29, "accommodation": 2}


@real_data
def test_exploits_of_the_issue_tracker_on_a_gold_plan():
    # Bug: an exploit that works against the authors' evaluator fails here, or pays in strict mode.
    env = planner.load("train", REAL)[0]
    for edits, official_passes, strict_fails in (
        ([(3, "lunch", ", Rockford")], True, {SANDBOX}),
        ([(3, "lunch", "a, Rockford")], True, {SANDBOX}),
        ([(3, "attraction", "Sinnissippi Park, Rockford;Fake Place, Nowhere")], True, {SANDBOX, CITY}),
        ([(3, "lunch", "Coco Bambu , Rockford")], True, {MEAL}),
        ([(1, "transportation", env.gold[0]["transportation"].replace("15:40", "05:40"))], True, {SANDBOX}),
        (
            [(1, "transportation", env.gold[0]["transportation"].replace("Number", "number"))],
            False,
            {SANDBOX},
        ),
        ([(1, "transportation", "Drive, from St. Petersburg to Rockford")], True, {SANDBOX, RIDE}),
        ([(3, "accommodation", env.gold[0]["accommodation"])], False, {CITY}),
        ([(2, "transportation", "Taxi, from Rockford to Rockford")], False, {SANDBOX, CITY}),
    ):
        plan = deepcopy(env.gold)
        change(*edits)(plan)
        scores = consistent(env, plan)
        assert scores["official"]["pass"] == official_passes, (edits, scores["official"]["reasons"])
        assert strict_fails <= broken(scores["strict"]), (edits, scores["strict"]["reasons"])
    extra = deepcopy(env.gold)
    change((3, "accommodation", env.gold[0]["accommodation"]))(extra)
    assert official_cost(env.query, extra, env.data) == 1608 + 243


@real_data
def test_the_authors_example_submission_scores_without_an_error():
    # Bug: plans of a real model, with missing keys and free wording, raise.
    envs = planner.load("train", REAL)
    lines = [json.loads(line) for line in (REAL / "example_evaluation.jsonl").open()]
    scores = [consistent(envs[i % 45], {"plan": line["plan"]}) for i, line in enumerate(lines)]
    assert sum(s["official"]["delivered"] for s in scores) == 161
    assert not any(s["strict"]["pass"] for s in scores)


@real_data
def test_official_examples_are_the_same_queries():
    # Bug: the structured queries differ from the nine that the authors published.
    envs = planner.load("train", REAL)
    for path in sorted((REAL / "train_examples").glob("plan_*.json")):
        record = json.loads(path.read_text())
        env = envs[int(path.stem.removeprefix("plan_")) - 1]
        assert (record["org"], record["dest"], record["budget"]) == (
            env.query.org,
            env.query.dest,
            env.query.budget,
        )
        plan = next(value for key, value in record.items() if key.startswith("annotated"))
        checks, reasons = official(env.query, plan, env.data)
        assert reasons == [] and False not in checks.values()
