"""TripTailor's own evaluator rebuilt: its numbers on an official plan, its matcher, its crashes."""

import json
import math
import random
import shutil
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import pytest

from envs import BENCHMARKS, trips, triptailor_official
from envs.triptailor_data import in_part
from envs.triptailor_official import FAILED, match, official_bounds, partial_ratio, score, slot_minutes
from envs.triptailor_route import geodesic_km, mean_leg_km
from envs.triptailor_verify import CHECKS, duration_bounds

triptailor = BENCHMARKS["triptailor"]
SLICES = Path(__file__).parents[2] / "shared" / "data" / "triptailor"

INFO = {  # made up, in the layout of given_info_data.json
    "hotels": [
        {"name": "Amber Inn", "latitude": 30.0, "longitude": 114.0},
        {"name": "Jade Lodge", "latitude": 30.1, "longitude": 114.0},
    ],
    "transport_otd": {"flight_options": [{"Flight Number": "CA12"}], "train_options": []},
    "transport_dto": {"flight_options": [], "train_options": [{"Train_Number": "G1768/G1769"}]},
    "attractions": [
        {"poiName": "Heron Lake", "latitude": 30.0, "longitude": 114.1, "reference_time": "1-2 hours"},
        {"poiName": "Moonlit Temple", "latitude": 30.05, "longitude": 114.1, "reference_time": None},
        {"poiName": "Temple of the Crane", "latitude": 30.06, "longitude": 114.2, "reference_time": ""},
    ],
    "restaurants": [
        {"name": "Plum Table", "latitude": 30.0, "longitude": 114.05},
        {"name": "Mint Wok", "latitude": "30.02", "longitude": 114.0},
    ],
}
LIMITS = {"days": 2, "budget": 1000, "meals": (50, 100)}


def plan():
    def entry(time, location, price, action="sightseeing"):
        return {"time": time, "location": location, "price": price, "action": action}

    return {
        "hotel": [{"day": 1, "name": "Amber Inn", "price_per_night": 300}],
        "transportation": [
            {"day": 1, "mode": "Flight", "route": "A to B", "number": "CA12", "time": "x", "price": 200},
            {"day": 2, "mode": "High-speed Train", "number": "G1769", "time": "y", "price": 100},
        ],
        "itinerary": {
            "day_1": [
                entry("14:00–16:00", "Heron Lake", 40),
                entry("18:00–19:00", "Plum Table", 80, "dining"),
            ],
            "day_2": [entry("09:00–10:00", "Moonlit Temple", 0), entry("12:00", "Mint Wok", 50, "dining")],
        },
    }


def scored(content, info=INFO, **changes):
    text = content if isinstance(content, str) else json.dumps(content)
    return score(text, info, **(LIMITS | changes))


def failing(result):
    assert set(result.checks) == set(CHECKS) and result.passed == all(result.checks.values())
    assert all(type(holds) is bool for holds in result.checks.values())
    return {name for name, holds in result.checks.items() if not holds}


def changed(mutate):
    content = plan()
    mutate(content)
    return content


def lake(**fields):
    return lambda p: p["itinerary"]["day_1"][0].update(fields)


def hotel(**fields):
    return lambda p: p["hotel"][0].update(fields)


def ride(which, **fields):
    return lambda p: p["transportation"][which].update(fields)


def drop(key, *path):
    def mutate(p):
        for step in path:
            p = p[step]
        del p[key]

    return mutate


SANDBOX, COMPLETE, BUDGET, RESTAURANTS, SIGHTS, MEALS, DURATION = CHECKS
HOLES = {  # what the official evaluator accepts and strict scoring does not
    "every price 0 but the meals'": lambda p: (hotel(price_per_night=0)(p), ride(0, price=0)(p)),
    "price true": lake(price=True),
    "sight named by one letter": lake(location="a"),
    "sight named by a word": lake(location="Lake"),
    "sight half wrong": lake(location="Heron Bridge"),
    "the same sight twice in other words": lambda p: p["itinerary"]["day_2"].append(
        {"time": "11:00-12:00", "location": "heron lake park", "price": 0, "action": "sightseeing"}
    ),
    "an empty itinerary": lambda p: p.update(itinerary={}),
    "two hundred days": lambda p: p["itinerary"].update({f"day_{i}": [] for i in range(200)}),
    "ride at any time on any route": ride(0, time="03:00–03:01", route="Mars to Venus"),
    "half of a double number": ride(1, number="G1768"),
    "overlapping": lambda p: p["itinerary"]["day_1"].append(
        dict(p["itinerary"]["day_1"][0], location="lake t")
    ),
    "any other action": lambda p: p["itinerary"]["day_2"].append({"action": "sleeping", "price": 0}),
    "two hotels, the second invented": lambda p: p["hotel"].append({"name": "Palace", "price_per_night": 1}),
    "breakfast at 03:00": lambda p: p["itinerary"]["day_2"][1].update(time="03:00"),
}
FAILS = {
    "hotel unknown": (hotel(name="Zzz Qqq"), {SANDBOX}),
    "hotel without a name": (hotel(name=""), {SANDBOX}),
    "hotel a number": (hotel(name=7), {SANDBOX, DURATION}),
    "no hotel": (lambda p: p.update(hotel=[]), {SANDBOX, COMPLETE, BUDGET, DURATION}),
    "hotel not there": (drop("hotel"), {SANDBOX, COMPLETE, BUDGET, DURATION}),
    "night without a price": (drop("price_per_night", "hotel", 0), {BUDGET}),
    "night in words": (hotel(price_per_night="300"), {BUDGET}),
    "one ride": (lambda p: p["transportation"].pop(), {SANDBOX, COMPLETE}),
    "ride by boat": (ride(0, mode="Boat"), {SANDBOX}),
    "ride without a mode": (drop("mode", "transportation", 0), {SANDBOX, DURATION}),
    "outbound number on the way back": (ride(1, mode="Flight", number="CA12"), {SANDBOX}),
    "ride number in lower case": (ride(0, number="ca12"), {SANDBOX}),
    "time empty": (ride(0, time=""), {COMPLETE}),
    "number not there": (drop("number", "transportation", 1), {SANDBOX, COMPLETE, DURATION}),
    "sight unknown": (lake(location="Zzz"), {SANDBOX, DURATION}),
    "sight a list": (lake(location=["Heron Lake"]), {SANDBOX, SIGHTS, DURATION}),
    "no action": (drop("action", "itinerary", "day_1", 0), {SANDBOX, RESTAURANTS, SIGHTS, MEALS, DURATION}),
    "visit too long": (lake(time="09:00–13:00"), {DURATION}),
    "visit without a slot": (lake(time="afternoon"), {DURATION}),
    "visit over midnight": (lake(time="23:00–01:00"), {DURATION}),
    "slot a number": (lake(time=9), {DURATION}),
    "price below the range": (lambda p: p["itinerary"]["day_1"][1].update(price=49), {MEALS}),
    "price null": (lake(price=None), {BUDGET}),
    "price NaN": (lake(price=math.nan), {BUDGET}),
    "price huge": (lake(price=10**400), {BUDGET}),
    "over the budget": (lake(price=1000), {BUDGET}),
    "restaurant twice": (
        lambda p: p["itinerary"]["day_2"][1].update(location="PLUM TABLE"),
        {RESTAURANTS},
    ),
    "itinerary a list": (
        lambda p: p.update(itinerary=[[1]]),
        {SANDBOX, BUDGET, RESTAURANTS, SIGHTS, MEALS, DURATION},
    ),
}


def test_a_sound_plan_passes_and_its_numbers_are_right():
    # Catches: the last night paid, meals left out of the cost, or a route that forgets the hotel.
    result = scored(plan())
    assert failing(result) == set() and result.cost == 300 + 200 + 100 + 40 + 80 + 50
    home, lake_at, plum, temple, wok = (30, 114), (30, 114.1), (30, 114.05), (30.05, 114.1), (30.02, 114)
    day_1, day_2 = [home, lake_at, plum, home], [home, temple, wok, home]
    legs = [geodesic_km(a, b) for day in (day_1, day_2) for a, b in pairwise(day)]
    assert result.route_km[0] == pytest.approx(sum(legs) / 6)
    assert result.route_km[1] == pytest.approx((legs[1] + legs[4]) / 2) and result.route_km[2] == 0.0
    fenced = f"<think>{{}}</think>Here:\n```json\n{json.dumps(plan())}\n```"
    assert scored(fenced) == result
    texts = {"hotel": [{"name": "x", "price_per_night": "9"}], "transportation": [], "itinerary": {}}
    assert scored(texts).cost is None and BUDGET in failing(scored(texts))
    assert scored(changed(lake(price=10**4000))).cost is scored(changed(lake(price=math.inf))).cost is None
    assert (
        scored(plan(), {**{k: v for k, v in INFO.items() if k != "hotels"}, "hotel": INFO["hotels"]})
        == result
    )


@pytest.mark.parametrize("case", HOLES)
def test_its_holes_are_kept(case):
    # Catches: an official column that is stricter than the published evaluator.
    assert failing(scored(changed(HOLES[case]))) == set()


@pytest.mark.parametrize("case", FAILS)
def test_what_it_fails_and_where_it_stops(case):
    # Catches: an exception that reaches the caller, or that fails checks which had their answer.
    mutate, expected = FAILS[case]
    assert failing(scored(changed(mutate))) == expected


@pytest.mark.parametrize(
    "text", ["", "none", "[1]", '{"hotel"', "{" * 5000, '{"a":' * 5000, "{" + " " * 30_000]
)
def test_no_plan_fails_all(text):
    # Catches: an unreadable answer that raises, or that is left out of the denominator.
    assert scored(text) == FAILED and failing(FAILED) == set(CHECKS)


def test_information_without_rows_or_coordinates():
    # Catches: an empty list of restaurants that passes every restaurant, or raises.
    assert failing(scored(plan(), {**INFO, "restaurants": []})) == {SANDBOX, DURATION}
    assert failing(scored(plan(), {})) == {SANDBOX, DURATION}
    nowhere = [{**row, "latitude": None} for row in INFO["hotels"]]
    result = scored(plan(), {**INFO, "hotels": nowhere})
    assert result.passed and result.route_km is None
    named = [{**row, "name": None} for row in INFO["hotels"]]
    assert SANDBOX in failing(scored(plan(), {**INFO, "hotels": named}))


PAIRS = [  # (a, b, ratio, partial ratio) as fuzzywuzzy 0.18 without Levenshtein gives them
    ("a", "lake", 40, 100),
    ("", "lake", 0, 0),
    ("lingshan grand buddha", "ling shan nian hua wan", 65, 67),
    ("temple hall", "temple", 71, 100),
    ("heron bridge", "heron lake", 64, 60),
    ("amber inn", "inn amber", 56, 71),
    ("inn amber", "amber inn", 56, 56),
]


@pytest.mark.parametrize(("a", "b", "ratio", "partial"), PAIRS)
def test_ratios_are_those_of_the_library(a, b, ratio, partial):
    # Catches: another similarity than the published one, or windows that miss the best place.
    assert round(100 * SequenceMatcher(None, a, b).ratio()) == ratio
    assert not a or partial_ratio(a, b) == partial


def test_shortcuts_change_no_match():
    # Catches: a bound that rejects what the full comparison accepts.
    rng = random.Random(0)
    words = ["lake", "temple", "crane", "heron", "old", "town", "of", "the", "garden", "museum", "a"]
    for _ in range(3000):
        a, b = (" ".join(rng.sample(words, rng.randint(1, 4))) for _ in range(2))
        if rng.random() < 0.5:
            cut = rng.randrange(len(b))
            a = b[:cut] + rng.choice("xyz ") + b[cut + 1 :]
        for least in (50, 80):
            ratio = round(100 * SequenceMatcher(None, a, b).ratio())
            accepted = a == b or ratio >= least or partial_ratio(a, b) >= 90
            assert match(a, b, least) == (ratio if accepted else None), (a, b)


def test_of_several_accepted_names_the_closest_wins():
    # Catches: the first accepted row taken, so that durations of another sight count.
    rows = [{"name_en": name} for name in ("Temple", "Temple of the Crane", "Moonlit Temple")]
    found = triptailor_official.find("sight", "temple of the crane.", {"attractions": rows})
    assert found is rows[1]
    assert triptailor_official.find("sight", "Temple", {"attractions": rows[1:] + rows[:1]}) is rows[0]


def test_durations_where_the_official_reading_differs():
    # Catches: the strict reading of an en dash in the official column, or bounds that are not its own.
    assert official_bounds("3–5 hours") == (240, 360) and duration_bounds("3–5 hours") == (120, 360)
    assert official_bounds("about 2 - 3 hours or so") == (60, 240)
    assert official_bounds("Over 3 hours") == (120, math.inf) and official_bounds("Under 1 hour") == (
        -60,
        120,
    )
    assert official_bounds("as you like") is None and official_bounds("20 minutes") == (20, 80)
    assert slot_minutes("9:00-10:5") == 65 and slot_minutes("24:00–25:00") is None


LENGTHS = [  # WGS 84, by geographiclib
    ((0.0, 0.0), (0.0, 90.0), 10018.754171394621),
    ((90.0, 0.0), (80.0, 0.0), 1116.8258573758496),
    ((10.0, 179.9), (10.0, -179.9), 21.927872477937367),
    ((30.0, 100.0), (30.0, 100.0), 0.0),
]


@pytest.mark.parametrize(("a", "b", "expected"), LENGTHS)
def test_geodesics_are_those_of_the_ellipsoid(a, b, expected):
    # Catches: a sphere (half a percent off), degrees for radians, or a date line crossed the long way.
    assert geodesic_km(a, b) == pytest.approx(expected, rel=1e-13) == geodesic_km(b, a)


def test_points_that_are_none():
    # Catches: a NaN that becomes a length, or an endless iteration on opposite points.
    for bad in ((math.nan, 0.0), (91.0, 0.0), (0.0, math.inf)):
        with pytest.raises(ValueError, match="latitude"):
            geodesic_km((0.0, 0.0), bad)
    with pytest.raises(ValueError, match="opposite"):
        geodesic_km((0.1, 0.0), (-0.2, 179.9))
    assert mean_leg_km([[], []]) == 0.0 == mean_leg_km([[]], home=(30.0, 114.0))


def test_requests_of_a_folder_are_scored_by_their_own_information(tmp_path):
    # Catches: train request 1 scored by the information of test request 1.
    folder = trips.build(tmp_path / "w", seed=2, train=3, test=3)
    for env in triptailor.load("test", folder):
        assert not env.official()["pass"] and env.facts()["route_km"] is None
        env.step(env.task.data["final_plan_json"], [])
        checks = env.official()
        assert checks["pass"] and set(checks) == {*CHECKS, "pass"}
        facts = env.facts()
        assert facts["route_km"] == facts["reference_route_km"] and facts["cost"] <= env.request.budget
        json.dumps(facts)
    train = triptailor.load("train", folder)[0]
    train.step(train.task.data["final_plan_json"], [])
    assert train.official() is None and train.facts()["route_km"] is None
    (folder / "given_info_data.json").rename(folder / "given_info_data_train.json")
    train, test = (triptailor.load(split, folder)[0] for split in ("train", "test"))
    assert train.information()["hotels"] and "hotel" in test.information()


def test_the_information_decides_which_rides_there_are(tmp_path):
    # Catches: official sandbox over the whole schedule: a ride out of the requested part of day is not handed
    # out with the human plan's information, though it goes.
    folder = trips.build(tmp_path / "w", seed=2, train=0, test=20)
    (folder / "given_info_data.json").unlink()
    found = set()
    for env in triptailor.load("test", folder):
        env.step(env.task.data["final_plan_json"], [])
        rides = env.trip().rides
        timely = all(in_part(r.found.depart, part) for r, part in zip(rides, env.request.parts, strict=True))
        assert env.verify().passed and env.official()["within_sandbox"] == timely
        found.add(timely)
    assert found == {True, False}


def test_the_official_plan_gives_the_official_numbers(tmp_path):
    # Catches: any difference from the published evaluator on the one complete record at hand.
    if not SLICES.is_dir():
        pytest.skip(f"no TripTailor slices at {SLICES}")
    record = json.loads((SLICES / "test_slice.json").read_text(encoding="utf-8"))[0]
    info = json.loads((SLICES / "infomation_slice.json").read_text(encoding="utf-8"))["1"]
    result = score(record["final_plan_json"], info, days=4, budget=2200, meals=(50, 100))
    assert result.passed and result.cost == 1834.5
    wanted = [14.872133640196108, 7.119056461863962, 14.821849599464445]
    assert result.route_km == pytest.approx(wanted, rel=1e-12)
    for path in SLICES.glob("*_slice.*"):
        shutil.copy(path, tmp_path / path.name.replace("_slice", ""))
    header = (tmp_path / "accommodations.csv").read_text(encoding="utf-8").partition("\n")[0]
    (tmp_path / "restaurants.csv").write_text(header + "\n", encoding="utf-8")
    env = triptailor.load("test", tmp_path)[0]
    env.step(record["final_plan_json"], [])
    assert env.official() == dict.fromkeys([*CHECKS, "pass"], True)
    assert env.facts()["route_km"] == env.facts()["reference_route_km"] == result.route_km
