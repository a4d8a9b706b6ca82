import csv
import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs import trips, triptailor
from envs.trip_planner import Options, plan_request, read_results, searches
from envs.triptailor_data import CSV_FILES, normal, parse_request

ROOT = Path(__file__).parents[1]
SLICES = ROOT.parent / "shared" / "data" / "triptailor"
FILES = {*CSV_FILES.values(), "train.json", "test.json", "infomation.json", "given_info_data.json"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return trips.build(tmp_path_factory.mktemp("world"), seed=3, train=60, test=40)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def records(folder, split):
    return json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))


def table(folder, kind):
    with open(folder / CSV_FILES[kind], encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_seed_gives_the_same_bytes_in_another_process(world, tmp_path):
    # Bug: set order, hash seeds or the clock leak into the world, so that ranks plan in different ones.
    command = [sys.executable, "-m", "envs.trips", "--out", str(tmp_path), "--seed", "3", "--train", "60"]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    subprocess.run([*command, "--test", "40"], check=True, cwd=ROOT, env=environment, capture_output=True)
    assert digests(tmp_path) == digests(world) and digests(world).keys() == FILES


def test_a_record_does_not_depend_on_how_many_there_are(world, tmp_path):
    # Bug: one random stream for all records, so that a longer train split changes the test split.
    trips.build(tmp_path, seed=3, train=5, test=7)
    for split, count in (("train", 5), ("test", 7)):
        assert records(tmp_path, split) == records(world, split)[:count]
    assert table(tmp_path, "hotel") == table(world, "hotel")


def test_seeds_differ_and_splits_are_disjoint(world, tmp_path):
    # Bug: the seed is ignored, or train and test are the same requests.
    trips.build(tmp_path, seed=4, train=60, test=40)
    other = digests(tmp_path)
    assert {name for name, digest in digests(world).items() if other[name] != digest} == FILES
    queries = {split: {record["query"] for record in records(world, split)} for split in ("train", "test")}
    assert len(queries["train"]) == 60 and not queries["train"] & queries["test"]


def test_every_reference_holds_and_fits_the_query(world):
    # Bug: a reference that breaks a constraint gives judges a plan that no gate would let through.
    for split in ("train", "test"):
        for env in triptailor.load(split, world):
            env.step(env.task.data["final_plan_json"], [])
            verdict = env.verify()
            assert verdict.passed, (env.task.id, verdict.reasons)
            assert env.view() == env.reference_view()
            assert env.request.category and all(env.request.weekdays) and all(env.request.parts)
            assert len(env.request.interests) == len(env.request.cuisines) == 2


def test_budget_and_meals_are_in_the_query(world):
    # Bug: test records state a budget that the query does not, which no planner could know.
    for record in records(world, "test"):
        bare = {key: value for key, value in record.items() if key not in ("budget", "meal_price_range")}
        assert parse_request(bare, split="test", where="") == parse_request(record, split="test", where="")
    assert not {"budget", "meal_price_range"} & records(world, "train")[0].keys()


def by_searching(env, rng, **how):
    """The scripted traveller with nothing but the tools' capped results."""
    calls = searches(env.request)
    messages, _ = env.step("", calls)
    options = read_results(env.request, calls, [message.content for message in messages])
    env.step(triptailor.to_json(plan_request(env.request, options, rng, **how)), [])
    return env.verify()


def test_cheap_plans_always_pass_and_beat_the_reference(world):
    # Bug: a world in which the gate cannot be passed, or the reference cannot be beaten.
    won = 0
    envs = triptailor.load("train", world, max_rows=4)
    for env in envs:
        verdict = by_searching(env, random.Random(0), cheap=True)
        assert verdict.passed, (env.task.id, verdict.reasons)
        won += sum(env.view().features.values()) > sum(env.reference_view().features.values())
    assert won > 0.75 * len(envs)


def test_careless_plans_break_only_the_budget_and_often(world):
    # Bug: budgets so wide that choosing by price teaches nothing, or so tight that chance never passes.
    failed = Counter()
    envs = triptailor.load("train", world, max_rows=5)
    for env in envs:
        verdict = by_searching(env, random.Random(env.task.id))
        failed.update(check for check, holds in verdict.checks.items() if not holds)
    assert set(failed) == {"budget"}
    assert 0.1 < failed["budget"] / len(envs) < 0.8


def test_names_are_two_words_and_unique_in_their_city(world):
    # Bug: two places share a name, so that a plan cannot say which it means.
    for kind, name, city in (
        ("hotel", "name", "real_city"),
        ("restaurant", "name", "real_city"),
        ("sight", "poiName", "city"),
    ):
        rows = table(world, kind)
        assert all(len(row[name].split()) == 2 for row in rows)
        assert len({(row[city], normal(row[name])) for row in rows}) == len(rows)
    numbers = [row["Flight Number"] for row in table(world, "flight")]
    assert len(set(numbers)) == len(numbers) and max(map(len, numbers)) == 4


def test_numbers_are_short(world):
    # Bug: prices like 117.5 or times like 09:47, which a small vocabulary cannot copy.
    for kind, field in (
        ("hotel", "avg_price"),
        ("restaurant", "avg_price"),
        ("sight", "price"),
        ("flight", "Price"),
    ):
        assert all(int(row[field]) % 5 == 0 and 0 <= int(row[field]) < 1000 for row in table(world, kind))
    assert {row["Departure Time"].split(":")[1] for row in table(world, "flight")} <= {"00", "30"}


@pytest.mark.parametrize("days", [(2, 2), (4, 7)])
def test_other_lengths_and_sizes(tmp_path, days):
    # Bug: long trips run out of restaurants or sights, and their references break.
    sizes = {"cities": 10, "hotels": 2, "restaurants": 28, "attractions": 24}
    trips.build(tmp_path, seed=0, train=25, test=0, days=days, **sizes)
    for env in triptailor.load("train", tmp_path):
        assert days[0] <= env.request.days <= days[1]
        env.step(env.task.data["final_plan_json"], [])
        assert env.verify().passed, env.verify().reasons
    assert len(table(tmp_path, "train")) == 10 * 9 * 2 * 2
    assert records(tmp_path, "test") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("cities", 1), ("cities", 11), ("restaurants", 11), ("attractions", 500), ("hotels", 0), ("train", -1)],
)
def test_sizes_out_of_range_are_named(tmp_path, name, value):
    # Bug: an endless search for city sites, or an IndexError from a word list.
    with pytest.raises(ValueError, match=rf"{name}={value}, wanted"):
        trips.build(tmp_path, seed=0, **{name: value})
    with pytest.raises(ValueError, match=r"days\[1\]=8"):
        trips.build(tmp_path, seed=0, days=(2, 8), restaurants=40, attractions=40)


def test_the_planner_names_what_is_missing(world):
    # Bug: an empty search result ends in IndexError from random.choice.
    request = triptailor.load("test", world, n=1)[0].request
    with pytest.raises(ValueError, match=rf"{request.id}: no rows for hotels"):
        plan_request(request, Options([], [], [], [], []), random.Random(0))


def test_day_texts_have_the_official_headings(world):
    # Bug: final_plan that a parser of the official texts cannot read.
    for record in records(world, "train")[:20]:
        first, *_, last = record["final_plan"]
        assert len(record["final_plan"]) == record["day"]
        title = f"**Day 1 Itinerary: {record['departure_city']} to {record['destination_city']} **"
        assert first.startswith(title) and last.startswith("**Itinerary for the Last Day of the Trip**")
        plan = json.loads(record["final_plan_json"])
        for day, text in enumerate(record["final_plan"], start=1):
            for entry in plan["itinerary"][f"day_{day}"]:
                assert f"### {entry['time']} | " in text and f" {entry['location']}\n" in text
        assert f"Check-in at {plan['hotel'][0]['name']}\n" in first


@pytest.fixture(scope="module")
def slices():
    if not SLICES.is_dir():
        pytest.skip(f"no TripTailor slices at {SLICES}")
    return SLICES


def test_csv_columns_are_the_official_ones(world, slices):
    # Bug: a column that only we know, or one that official readers miss.
    for kind in ("hotel", "sight", "flight", "train"):
        name = CSV_FILES[kind]
        with open(slices / name.replace(".csv", "_slice.csv"), encoding="utf-8", newline="") as file:
            assert next(csv.reader(file)) == list(table(world, kind)[0]), name
    assert list(table(world, "restaurant")[0]) == list(table(world, "hotel")[0])


def test_record_keys_are_the_official_ones(world, slices):
    # Bug: a key that official readers miss. Ours alone: final_plan_json in train records.
    def official(name):
        return json.loads((slices / f"{name}_slice.json").read_text(encoding="utf-8"))

    assert records(world, "test")[0].keys() == official("test")[0].keys()
    assert records(world, "train")[0].keys() == official("train")[1].keys() | {"final_plan_json"}
    theirs = official("infomation")["1"]
    ours = json.loads((world / "infomation.json").read_text(encoding="utf-8"))
    assert ours.keys() == {str(pid) for pid in range(1, 41)}
    assert ours["1"].keys() == theirs.keys()
    for key in ("hotel", "attractions", "restaurants"):
        assert ours["1"][key][0].keys() == theirs[key][0].keys(), key
    for way in ("transport_otd", "transport_dto"):
        assert ours["1"][way].keys() == theirs[way].keys()
        for kind, options in theirs[way].items():
            found = [option for info in ours.values() for option in info[way][kind]]
            assert not options or found[0].keys() == options[0].keys(), kind
    plan, official_plan = (
        json.loads(r[0]["final_plan_json"]) for r in (records(world, "test"), official("test"))
    )
    assert plan.keys() == official_plan.keys()
    assert plan["transportation"][0].keys() == official_plan["transportation"][0].keys()
    assert plan["itinerary"]["day_1"][0].keys() == official_plan["itinerary"]["day_1"][0].keys()


def test_candidates_hold_the_reference(world):
    # Bug: a pool without the places that the reference uses.
    for env in triptailor.load("test", world, pool="request"):
        env.step(env.task.data["final_plan_json"], [])
        assert env.verify().passed
        assert len(env.pool["hotel"]) <= 10
