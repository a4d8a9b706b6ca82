"""A scripted traveller for TripTailor worlds: which searches to make, and a plan from the rows found.

Deterministic given `rng`. envs/trips.py makes its reference plans with it; supervised traces of an
agent, good or clumsy, come from the same three functions: `searches`, `read_results`, `plan_request`
(and `spoil` for one deliberate mistake). Chooses from rows alone, as a model must.
"""

import json
import math
import random
from dataclasses import dataclass

from envs.base import Call
from envs.triptailor_data import Request, clock, in_part, minutes, normal
from envs.triptailor_plan import stems
from envs.triptailor_verify import duration_bounds

MISTAKES = ("repeat_restaurant", "repeat_attraction", "slot", "price", "name", "early")


@dataclass(slots=True)
class Options:
    """Rows as the tools return them; rides with "mode": "Train" or "Flight" on top."""

    outbound: list[dict]
    back: list[dict]
    hotels: list[dict]
    sights: list[dict]
    restaurants: list[dict]


def searches(request: Request, *, flights: bool = True, keywords: bool = True) -> list[Call]:
    """The calls that a plan needs, in a fixed order: trains and flights out and back, hotels of the
    wanted class, all sights (with `keywords` also one search per interest), meals in the range."""
    ways = (request.origin, request.destination), (request.destination, request.origin)
    ends = [{"origin": origin, "destination": destination} for origin, destination in ways]
    calls = [Call("search_trains", way) for way in ends]
    if flights:
        for way, day in zip(ends, request.weekdays, strict=True):
            calls.append(Call("search_flights", {**way, "weekday": day}))
    city = {"city": request.destination}
    calls.append(Call("search_hotels", city | ({"category": request.category} if request.category else {})))
    calls.append(Call("search_attractions", city))
    if keywords:
        calls += [Call("search_attractions", {**city, "keyword": wish}) for wish in request.interests]
    low, high = request.meals
    return [*calls, Call("search_restaurants", {**city, "min_price": low, "max_price": high})]


def read_results(request: Request, calls: list[Call], results: list[str]) -> Options:
    """Options from the texts that answered `calls`; error texts give no rows, repeated rows count once."""
    options = Options([], [], [], [], [])
    lists = {
        "search_hotels": options.hotels,
        "search_attractions": options.sights,
        "search_restaurants": options.restaurants,
    }
    for call, result in zip(calls, results, strict=True):
        rows = [] if result.startswith("Error") else json.loads(result)
        if call.name in ("search_trains", "search_flights"):
            there = normal(call.arguments["origin"]) == normal(request.origin)
            target = options.outbound if there else options.back
            mode = "Train" if call.name == "search_trains" else "Flight"
            rows = [{**row, "mode": mode} for row in rows]
        else:
            target = lists[call.name]
        target += [row for row in rows if row not in target]
    return options


def plan_request(
    request: Request,
    options: Options,
    rng: random.Random,
    *,
    cheap: bool = False,
    heed: float = 1.0,
    dinners: bool = True,
) -> dict:
    """A plan (official JSON) that holds all seven constraints, but for the budget, when the options
    allow one: rides that leave time, enough places, restaurants in the range.

    cheap    the cheapest of what is otherwise equal; else a random one
    heed     probability that a single wish (class, part of day, interest, cuisine, intensity) counts
    dinners  a second meal on every day but the last, as long as restaurants suffice
    raises   ValueError if there is no hotel, or no ride in a direction
    """

    def heeds() -> bool:
        return rng.random() < heed

    def pick(rows: list[dict], wanted) -> dict:
        kept = [row for row in rows if wanted(row)] if heeds() else []
        kept = kept or rows
        return min(kept, key=lambda row: row["price"]) if cheap else rng.choice(kept)

    for name in ("hotels", "outbound", "back"):
        if not getattr(options, name):
            raise ValueError(f"{request.id}: no rows for {name}; nothing to plan with")
    hotel = pick(options.hotels, lambda row: not request.category or row["category"] == request.category)
    usable = [
        [row for row in options.outbound if leaves_day(row, last=False)] or options.outbound,
        [row for row in options.back if leaves_day(row, last=True)] or options.back,
    ]
    rides = [
        pick(rows, lambda row, part=part: in_part(minutes(row["depart"]), part))
        for rows, part in zip(usable, request.parts, strict=True)
    ]
    pace = request.sights_per_day if heeds() else rng.choice((1, 2, 3))
    sights = wished_first(options.sights, request.interests, rng, heeds, cheap=cheap)
    meals = wished_first(options.restaurants, request.cuisines, rng, heeds, cheap=cheap)
    itinerary = fill_days(request.days, rides, pace, sights, meals, dinners=dinners)
    ways = (1, request.origin, request.destination), (request.days, request.destination, request.origin)
    return {
        "hotel": [{"day": 1, "name": hotel["name"], "price_per_night": hotel["price"]}],
        "transportation": [
            {
                "day": day,
                "mode": ride["mode"],
                "route": f"{origin} to {destination}",
                "number": ride["number"],
                "time": f"{ride['depart']}–{ride['arrive']}",
                "price": ride["price"],
            }
            for ride, (day, origin, destination) in zip(rides, ways, strict=True)
        ],
        "itinerary": itinerary,
    }


def leaves_day(ride: dict, *, last: bool) -> bool:
    """Whether a ride leaves room for lunch and a visit: arrives by 13:00, or departs from 14:00 on."""
    depart, arrive = minutes(ride["depart"]), minutes(ride["arrive"])
    return depart >= 14 * 60 if last else depart < arrive <= 13 * 60


def wished_first(
    rows: list[dict], wishes: tuple[str, ...], rng: random.Random, heeds, *, cheap: bool
) -> list[dict]:
    """All rows: one for each wish that is heeded and can be met, then the others."""
    rows = sorted(rows, key=lambda row: row["price"]) if cheap else rng.sample(rows, len(rows))
    texts = [normal(f"{row['name']} {row.get('tags', '')} {row.get('cuisine', '')}") for row in rows]
    first = []
    for words in map(stems, wishes):
        found = (i for i, text in enumerate(texts) if i not in first and any(word in text for word in words))
        best = next(found, None)
        if best is not None and heeds():
            first.append(best)
    return [rows[i] for i in first] + [row for i, row in enumerate(rows) if i not in first]


def fill_days(
    days: int, rides: list[dict], pace: int, sights: list[dict], meals: list[dict], *, dinners: bool
) -> dict[str, list[dict]]:
    """day_1 .. day_N. Wanted sights: `pace` on full days, half of it (rounded up) on the first and last;
    fewer, but one each, where sights are short. Lunch on every day before any dinner."""
    visits = [math.ceil(pace / 2) if day in (1, days) else pace for day in range(1, days + 1)]
    while sum(visits) > len(sights) and max(visits) > 1:
        visits[visits.index(max(visits))] -= 1
    num_dinners = max(0, min(days - 1, len(meals) - days)) if dinners else 0
    sights, meals = list(sights), list(meals)
    arrival, departure = minutes(rides[0]["arrive"]), minutes(rides[1]["depart"])
    itinerary = {}
    for day in range(1, days + 1):
        start = max(12 * 60, half_hour_after(arrival)) if day == 1 else 9 * 60
        end = departure if day == days else 22 * 60
        dinner = day <= num_dinners
        itinerary[f"day_{day}"] = fill_day(start, end, visits[day - 1], sights, meals, dinner=dinner)
    return itinerary


def half_hour_after(minute: int) -> int:
    return 30 * math.ceil(minute / 30)


def fill_day(
    start: int, end: int, visits: int, sights: list[dict], meals: list[dict], *, dinner: bool
) -> list[dict]:
    """Activities between two minutes of the day. Lunch at noon (or on arrival until 14:00), visits from
    the start with an hour off after lunch, dinner at 18:00. Takes what it uses out of the two lists; a
    sight whose visit does not fit stays in them."""
    lunch = max(start, 12 * 60)
    blocks = [lunch] if lunch <= 14 * 60 and lunch + 60 <= end else []
    if dinner and start <= 18 * 60 and 19 * 60 <= end:
        blocks.append(18 * 60)
    entries = [(at, at + 60, meals.pop(0), "dining") for at in blocks if meals]
    busy = [(at, at + (120 if at == lunch else 60)) for at in blocks]
    cursor = start
    for sight in list(sights):
        if visits == 0:
            break
        length = stay(sight["duration"])
        begin = next_gap(cursor, length, busy)
        if begin + length <= end:
            entries.append((begin, begin + length, sight, "sightseeing"))
            sights.remove(sight)
            cursor, visits = begin + length, visits - 1
    entries.sort(key=lambda entry: entry[0])
    return [activity(*entry) for entry in entries]


def next_gap(cursor: int, length: int, busy: list[tuple[int, int]]) -> int:
    """First minute from `cursor` on at which `length` minutes touch no busy span."""
    for begin, end in sorted(busy):
        if cursor < end and cursor + length > begin:
            cursor = end
    return cursor


def stay(duration: str) -> int:
    """Minutes for a visit: the shortest recommended one, on the half hour; an hour if the text is empty."""
    low, high = duration_bounds(duration) or (0, 120)
    length = half_hour_after(int(low) + 60)
    return length if length <= high else 30 * int(high // 30)


def activity(begin: int, end: int, row: dict, action: str) -> dict:
    time = f"{clock(begin)}–{clock(end)}"
    return {"time": time, "location": row["name"], "price": row["price"], "action": action}


def plan_cost(plan: dict, days: int) -> float:
    """¥ by the plan's own prices: nights, rides, activities."""
    activities = [entry["price"] for entries in plan["itinerary"].values() for entry in entries]
    rides = [ride["price"] for ride in plan["transportation"]]
    return plan["hotel"][0]["price_per_night"] * (days - 1) + sum(rides) + sum(activities)


def spoil(plan: dict, rng: random.Random, mistake: str | None = None) -> dict:
    """A copy of a plan with one of MISTAKES (drawn by `rng` if None): a place named twice, a visit of a
    random length, a wrong price, a wrong word in a name, day 1 begun at 07:00. Not every draw breaks a
    constraint: a random length may be a fitting one."""
    plan = json.loads(json.dumps(plan))
    mistake = mistake or rng.choice(MISTAKES)
    if mistake not in MISTAKES:
        raise ValueError(f"mistake={mistake!r}, wanted one of {', '.join(MISTAKES)}")
    entries = [entry for day in plan["itinerary"].values() for entry in day]
    action = "dining" if mistake == "repeat_restaurant" else "sightseeing"
    same = [entry for entry in entries if entry["action"] == action]
    if mistake in ("repeat_restaurant", "repeat_attraction") and len(same) > 1:
        first, second = rng.sample(same, 2)
        second |= {"location": first["location"], "price": first["price"]}
    elif mistake == "slot" and same:
        entry = rng.choice(same)
        begin = minutes(entry["time"][:5])
        entry["time"] = f"{clock(begin)}–{clock(begin + rng.choice((30, 60, 120, 180, 240)))}"
    elif mistake == "price":
        rng.choice(entries)["price"] += 5 * rng.randint(1, 9)
    elif mistake == "name":
        entry, other = rng.sample(entries, 2)
        entry["location"] = f"{other['location'].split()[0]} {entry['location'].split()[-1]}"
    elif mistake == "early" and plan["itinerary"]["day_1"]:
        plan["itinerary"]["day_1"][0]["time"] = "07:00–08:00"
    return plan
