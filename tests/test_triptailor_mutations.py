"""Ten thousand random changes of valid plans against a second reading of the rules, written apart."""

import copy
import json
import math
import random
from collections import Counter

import pytest
import triptailor_oracle

from envs import BENCHMARKS, trips

triptailor = BENCHMARKS["triptailor"]
MUTATIONS = 10_000
OFFICIAL_EVERY = 10  # its names take longer to compare than all else
JUNK = [
    None,
    True,
    False,
    "",
    " ",
    "a",
    "\ud800",
    "x" * 200,
    -1,
    0,
    1,
    2.0,
    1e9,
    math.nan,
    math.inf,
    10**400,
    [],
    {},
]
JUNK += [
    "day_1",
    "sightseeing",
    "dining",
    "Train",
    "Flight",
    "09:00–10:00",
    "9:00-9:30",
    "25:00–26:00",
    ["a"],
    {"a": 1},
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    sizes = {"cities": 4, "restaurants": 20, "attractions": 20}
    return trips.build(tmp_path_factory.mktemp("world"), seed=9, train=0, test=24, days=(2, 4), **sizes)


@pytest.fixture(scope="module")
def envs(world):
    return triptailor.load("test", world)


def nodes(value, path=()):
    """Every path of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from nodes(child, (*path, key))


def parent(plan, path):
    for key in path[:-1]:
        plan = plan[key]
    return plan


def entries(plan):
    return [(day, i) for day, items in plan["itinerary"].items() for i in range(len(items))]


def junk(plan, rng, env):
    path = rng.choice([p for p in nodes(plan) if p])
    parent(plan, path)[path[-1]] = rng.choice(JUNK)


def drop(plan, rng, env):
    path = rng.choice([p for p in nodes(plan) if p])
    del parent(plan, path)[path[-1]]


def swap(plan, rng, env):
    a, b = rng.choice(entries(plan)), rng.choice(entries(plan))
    days = plan["itinerary"]
    days[a[0]][a[1]], days[b[0]][b[1]] = days[b[0]][b[1]], days[a[0]][a[1]]


def double(plan, rng, env):
    day, i = rng.choice(entries(plan))
    plan["itinerary"][rng.choice(list(plan["itinerary"]))].append(copy.deepcopy(plan["itinerary"][day][i]))


def shift(plan, rng, env):
    """Other times for an entry, mostly sound ones."""
    day, i = rng.choice(entries(plan))
    start = 30 * rng.randint(14, 44)
    end = min(1439, start + 30 * rng.randint(0, 9))
    dash = rng.choice("–-")
    plan["itinerary"][day][i]["time"] = f"{start // 60:02d}:{start % 60:02d}{dash}{end // 60}:{end % 60:02d}"


def exchange(plan, rng, env):
    """Another place of the city (seldom of another) in an entry or as the hotel, at its price or near it."""
    kind = rng.choice(("hotel", "sight", "restaurant"))
    cities = env.data.places[kind]
    city = env.request.destination.casefold() if rng.random() < 0.9 else rng.choice(list(cities))
    place = rng.choice(cities[city])
    price = place.price + rng.choice((0, 0, 0, 0.5, -1, 1, 1.5, 5, -place.price))
    name = rng.choice((place.name, place.name.upper(), f" {place.name.replace(' ', '  ')}", place.name[:-1]))
    if kind == "hotel":
        plan["hotel"][0] |= {"name": name, "price_per_night": price}
        return
    action = {"sight": "sightseeing", "restaurant": "dining"}[kind]
    same = [(d, i) for d, i in entries(plan) if plan["itinerary"][d][i]["action"] == action]
    if same:
        day, i = rng.choice(same)
        plan["itinerary"][day][i] |= {"location": name, "price": price}


def travel(plan, rng, env):
    """Another ride, of any direction and weekday."""
    ends = (env.request.origin, env.request.destination)
    way = rng.choice((ends, ends[::-1]))
    ride = rng.choice(env.data.rides(*way))
    clock = [f"{t // 60 % 24:02d}:{t % 60:02d}" for t in (ride.depart, ride.arrive)]
    mode = rng.choice((ride.mode, ride.mode.upper(), f"High-speed {ride.mode}"))
    entry = {"mode": mode, "number": ride.number, "time": "–".join(clock), "price": rng.choice(ride.fares)}
    rng.choice(plan["transportation"]).update(entry)


def rename(plan, rng, env):
    days = plan["itinerary"]
    key = rng.choice(list(days))
    days[rng.choice(("day_1", "day_2", "day_9", "Day_1", "day_01", "1"))] = days.pop(key)


MUTATORS = [junk, drop, swap, double, shift, shift, exchange, exchange, exchange, travel, rename]


def mutated(env, rng):
    plan = json.loads(env.task.data["final_plan_json"])
    names = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        mutate = rng.choice(MUTATORS)
        names.append(mutate.__name__)
        try:
            mutate(plan, rng, env)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError):
            break  # an earlier mutation took what this one needs
    return json.dumps(plan), names


def test_no_random_change_passes_that_a_second_reading_rejects(world, envs):
    # Catches: a hole in strict scoring that no table of exploits has, and an exception out of a verifier.
    oracle, rng, seen = triptailor_oracle.Oracle(world), random.Random(0), Counter()
    for i in range(MUTATIONS):
        env = envs[i % len(envs)]
        text, names = mutated(env, rng)
        env.answer(text)
        verdict, request = env.verify(), env.request
        accepted = oracle.accepts(text, env.task.data, request.weekdays, request.meals)
        assert verdict.passed == accepted, (names, verdict.reasons, text)
        seen[accepted] += 1
        if i % OFFICIAL_EVERY == 0:
            official = env.official()
            assert set(official) == {*verdict.checks, "pass"} and env.view().features.keys()
            seen["official"] += official["pass"]
            seen["both"] += accepted
    # both kinds are common, so that agreement says something; the official evaluator lets more through
    assert seen[True] > 600 and seen[False] > 6000 and seen["official"] > 1.5 * seen["both"] > 150, seen


def test_the_second_reading_accepts_every_reference(world, envs):
    # Catches: an oracle that rejects everything and so never disagrees.
    oracle = triptailor_oracle.Oracle(world)
    for env in envs:
        text = env.task.data["final_plan_json"]
        assert oracle.accepts(text, env.task.data, env.request.weekdays, env.request.meals)
        assert not oracle.accepts(
            text, {**env.task.data, "budget": 100}, env.request.weekdays, env.request.meals
        )
