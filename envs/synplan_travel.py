"""SynPlan-R's travel world: instances from a seed, the verifier, and a scripted planner that nearly fits.

A plan is a list of flights, hotels, meals and visits in the order in which they happen. The verifier takes
prices, schedules and durations from the database, whatever the plan states. Source: CM-DPO, sections 3 and 4,
appendices 10 to 12; readings in docs/deviations.md.
"""

import itertools
import json
import math
import random
from dataclasses import dataclass, replace

from envs.synplan_cities import CITIES, distance_km, flight_minutes, ground_minutes
from envs.synplan_draw import draw_feasible
from envs.synplan_verify import Entity, Instance, Profile, Report, draw_entry, look_up, report, soft_score
from envs.trip_tables import HOTEL_NOUNS, MEAL_NOUNS, SIGHTS, WORDS

DAY = 1440  # minutes
PRICES = {  # kind -> (median USD, sigma of the logarithm); a meal's are those of an activity
    "flight": (180, 0.5),
    "hotel": (130, 0.6),
    "restaurant": (40, 0.8),
    "activity": (40, 0.8),
}
ATTRIBUTES = ("boutique", "quiet", "family", "historic", "modern", "riverside", "vegetarian", "outdoor")
CARRIERS = ("Amber Air", "Coral Air", "Jade Air", "Maple Air", "Pearl Air", "Silver Air")
NOUNS = {"hotel": HOTEL_NOUNS, "restaurant": MEAL_NOUNS, "activity": tuple(SIGHTS.values())}
WORD_KIND = {"hotel": "hotel", "restaurant": "restaurant", "activity": "sight"}
VISIT_MIN = {"restaurant": (60, 90), "activity": (60, 120, 180)}  # minutes that a meal or a visit takes


@dataclass(frozen=True, slots=True)
class Size:
    """How large an instance is. The numbers of `paper` give the averages of Table 7."""

    cities: int  # visited one after the other
    days: tuple[int, int]  # fewest and most days of the trip, arrival included
    flights: int  # per leg
    hotels: int  # per city, like the next two
    restaurants: int
    activities: int
    more: float  # probability of one more activity in a city
    hours: float  # probability of the constraint `hours`
    prefs: tuple[int, ...]  # number of preferred attributes, drawn uniformly from these
    grid: int  # all times are multiples of so many minutes
    first: int  # minute after midnight from which flights leave
    late: float  # probability that a flight leaves in the evening
    compact: bool = False


SIZES = {
    "paper": Size(2, (3, 5), 5, 4, 5, 6, 0.6, 0.4, (1, 1, 2, 2, 3), 5, 360, 0.1),
    "tiny": Size(1, (2, 2), 4, 4, 0, 4, 0.0, 0.0, (1,), 30, 540, 0.1, True),
    "small": Size(1, (2, 2), 3, 3, 2, 3, 0.0, 0.4, (1, 2), 60, 360, 0.2, True),
}


# instances


def generate(id: str, rng: random.Random, size: str) -> Instance:
    """A travel instance that at least one plan satisfies. `query` is left empty."""
    return draw_feasible(id, lambda: _draw(id, rng, SIZES[size]), cheap_plan, careless, rng)


def _draw(id: str, rng: random.Random, size: Size) -> Instance:
    """Everything but the budget, which is set so high that it never binds."""
    route = _route(rng, size.cities)
    entities: list[Entity] = []
    for origin, city in itertools.pairwise(route):
        entities += _flights(rng, origin, city, size)
    for kind, count in (
        ("hotel", size.hotels),
        ("restaurant", size.restaurants),
        ("activity", size.activities),
    ):
        for city in route[1:]:
            more = kind == "activity" and rng.random() < size.more
            entities += _places(rng, kind, city, count + more, size, taken={e.name for e in entities})
    letters: dict[str, int] = {}
    keyed = []
    for entity in entities:
        letter = entity.kind[0].upper()
        letters[letter] = letters.get(letter, 0) + 1
        keyed.append(replace(entity, key=f"{letter}{letters[letter]}"))
    minutes = {(a, b): ground_minutes(a, b, size.grid) for a in route for b in route}
    days = rng.randint(*size.days)
    profile = Profile(
        budget=10**6,
        prefs=tuple(sorted(rng.sample(ATTRIBUTES, rng.choice(size.prefs)))),
        origin=route[0],
        start=60 * rng.choice((6, 7, 8)),
        end=(days - 1) * DAY + 60 * rng.choice((20, 21, 22)),
        hours=(60 * rng.choice((7, 8)), 60 * rng.choice((22, 23))) if rng.random() < size.hours else None,
    )
    draft = Instance(id, "travel", profile, {e.key: e for e in keyed}, minutes, compact=size.compact)
    visits = sum(slot.kind in VISIT_MIN for slot in slots(draft))
    pace = size.cities + visits - (0 if size.compact else rng.choice((0, 1, 1)))
    return replace(draft, profile=replace(profile, pace=pace))


def _route(rng: random.Random, cities: int) -> list[str]:
    """Home and the cities to visit; neighbours at least 600 km apart and less than five hours of flight."""
    names = sorted(CITIES)
    while True:
        route = rng.sample(names, cities + 1)
        legs = [distance_km(a, b) for a, b in itertools.pairwise(route)]
        if all(600 <= leg <= 3000 for leg in legs):
            return route


def _price(rng: random.Random, kind: str) -> int:
    median, sigma = PRICES[kind]
    return max(1, round(median * math.exp(rng.gauss(0.0, sigma))))


def _flights(rng: random.Random, origin: str, city: str, size: Size) -> list[Entity]:
    minutes = flight_minutes(origin, city, size.grid)
    found = []
    for _ in range(size.flights):
        first, last = (
            (19 * 60, DAY - minutes - size.grid) if rng.random() < size.late else (size.first, 15 * 60)
        )
        depart = size.grid * rng.randint(first // size.grid, max(first, last) // size.grid)
        found.append((_price(rng, "flight"), min(depart, DAY - minutes - size.grid), rng.choice(CARRIERS)))
    if size.compact:
        found.sort()
    return [
        Entity("", name, "flight", price, city=city, origin=origin, depart=depart, minutes=minutes)
        for price, depart, name in found
    ]


def _places(rng, kind: str, city: str, count: int, size: Size, taken: set[str]) -> list[Entity]:
    nouns, words = NOUNS[kind], WORDS[WORD_KIND[kind]]
    free = [f"{word} {noun}" for word in words for noun in nouns if f"{word} {noun}" not in taken]
    prices = [_price(rng, kind) for _ in range(count)]
    found = []
    for name, price in zip(rng.sample(free, count), sorted(prices) if size.compact else prices, strict=True):
        many = 1 if size.compact else 3 if rng.random() < 0.1 else 2
        tags = tuple(sorted(rng.sample(ATTRIBUTES, many)))
        steps = VISIT_MIN.get(kind, (0,))
        minutes = size.grid * math.ceil(rng.choice(steps) / size.grid)
        found.append(Entity("", name, kind, price, tags, city=city, minutes=minutes))
    return found


# the verifier


def clock(text: str) -> int:
    """Minutes after midnight of "H:MM"."""
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)


def event(instance: Instance, entry: Entity, item: dict, *, free: int, city: str) -> tuple[int, int, int]:
    """When an item happens for a traveller who is in `city` and free at minute `free`.

    returns  (start, end, minutes by which it comes too early or runs past its day). Flights keep the
             database's schedule; a place without start_time begins as early as can be; no visit is
             shorter than the database says; a hotel is its check-in, which takes no time
    """
    ready = free + instance.minutes.get((city, entry.origin or entry.city), DAY)
    midnight = DAY * (int(item["day"]) - 1)
    if entry.kind == "flight":
        start = midnight + entry.depart
        return start, start + entry.minutes, max(0, ready - start)
    hours = instance.profile.hours
    opening = midnight + (hours[0] if hours and entry.kind != "hotel" else 0)
    start = midnight + clock(item["start_time"]) if "start_time" in item else max(ready, opening)
    end = start + entry.minutes
    if "end_time" in item and entry.kind != "hotel":
        end = max(end, midnight + clock(item["end_time"]))
    last = midnight + DAY - (entry.kind == "hotel")  # 0:00 belongs to the next day
    return start, end, max(0, ready - start) + max(0, end - last)


def verify(instance: Instance, plan: dict) -> Report:
    """Judge a plan that fits the schema. Never raises on its content."""
    profile, items = instance.profile, plan["items"]
    entries = [look_up(instance, item) for item in items]
    unknown = [item["db_lookup_key"] for item, entry in zip(items, entries, strict=True) if entry is None]
    pairs = [(entry, item) for entry, item in zip(entries, items, strict=True) if entry is not None]
    late, early, rule = _times(instance, pairs)
    paid = cost(instance, pairs)
    places = distinct_places(entry for entry, _ in pairs)
    nights = _unslept(instance, pairs)
    raw = {
        "lookup": (len(unknown), f"{len(unknown)} keys are not in the database: {', '.join(unknown[:3])}"),
        "stay": (nights, f"{nights} nights without a hotel in the city"),
        "cost": (max(0, paid - profile.budget), f"costs ${paid}, budget ${profile.budget}"),
        "time": (late + early, f"{late + early} minutes short between items or outside the dates"),
        "pace": (max(0, profile.pace - places), f"{places} cities and attractions, wanted {profile.pace}"),
    }
    if profile.hours is not None:
        raw["hours"] = (rule, f"{rule} minutes outside the daily hours")
    return report(instance, raw, soft=soft_score(instance, entries), cost=paid, items=items)


def _times(instance: Instance, pairs: list[tuple[Entity, dict]]) -> tuple[int, int, int]:
    """(minutes short between neighbours, minutes outside the window, minutes outside the daily hours)."""
    profile = instance.profile
    free, city, short, rule = profile.start, profile.origin, 0, 0
    first, last = profile.start, profile.end
    for entry, item in pairs:
        start, end, late = event(instance, entry, item, free=free, city=city)
        short += late
        first, last = min(first, start), max(last, end)
        if profile.hours is not None and entry.kind != "hotel":
            midnight = DAY * (int(item["day"]) - 1)
            rule += max(0, midnight + profile.hours[0] - start) + max(0, end - midnight - profile.hours[1])
        free, city = end, entry.city
    return short, profile.start - first + last - profile.end, rule


def num_days(profile: Profile) -> int:
    """Days that the window touches."""
    return profile.end // DAY + 1


def cost(instance: Instance, pairs: list[tuple[Entity, dict]]) -> int:
    """USD of found items by the database: a hotel until the next hotel's day, the last one until the end."""
    days = [int(item["day"]) for entry, item in pairs if entry.kind == "hotel"]
    until = iter([*days[1:], num_days(instance.profile)])
    total = 0
    for entry, item in pairs:
        nights = max(1, next(until) - int(item["day"])) if entry.kind == "hotel" else 1
        total += entry.price * nights
    return total


def distinct_places(entries) -> int:
    """Cities with a hotel, a meal or a visit, and restaurants and activities, each counted once."""
    found = set()
    for entry in entries:
        if entry.kind != "flight":
            found.add(("city", entry.city))
            found.add(("city", entry.city) if entry.kind == "hotel" else ("place", entry.key))
    return len(found)


def _unslept(instance: Instance, pairs: list[tuple[Entity, dict]]) -> int:
    """Nights of the window in which the last hotel taken is not in the city where the traveller is."""
    missing = 0
    for night in range(1, num_days(instance.profile)):
        before = [entry for entry, item in pairs if int(item["day"]) <= night]
        where = before[-1].city if before else instance.profile.origin
        hotels = [entry.city for entry in before if entry.kind == "hotel"]
        missing += not hotels or hotels[-1] != where
    return missing


# the scripted planner


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the plan that some entry is to fill."""

    kind: str
    city: str
    day: int


def slots(instance: Instance) -> list[Slot]:
    """What a plan for this instance holds: per city a flight and a hotel on the day of arrival, a meal that
    day and a visit and a meal on each other day; in compact worlds one of each on the day of arrival."""
    cities = list(dict.fromkeys(e.city for e in instance.entities.values() if e.kind == "flight"))
    kinds = [k for k in ("activity", "restaurant") if any(e.kind == k for e in instance.entities.values())]
    days = num_days(instance.profile)
    first = [1 + i * days // len(cities) for i in range(len(cities) + 1)]
    found = []
    for i, city in enumerate(cities):
        for day in range(first[i], first[i + 1]):
            arrival = day == first[i]
            visits = kinds if arrival == instance.compact else kinds[-1:] if arrival else []
            found += [Slot(kind, city, day) for kind in ["flight", "hotel"] * arrival + visits]
    return found


def options(instance: Instance, slot: Slot) -> list[Entity]:
    """Entries that fit a slot, in the order of the database."""
    return [e for e in instance.entities.values() if e.kind == slot.kind and e.city == slot.city]


def cheap_plan(instance: Instance) -> dict | None:
    """The cheapest entries everywhere, with the cheapest flights whose times fit; None if none do."""
    parts = slots(instance)
    legs = [sorted(options(instance, s), key=lambda e: e.price) for s in parts if s.kind == "flight"]
    ways = sorted(itertools.product(*legs), key=lambda way: sum(flight.price for flight in way))
    for way in ways:
        flights, taken, chosen = iter(way), set(), []
        for slot in parts:
            rest = [e for e in options(instance, slot) if e.key not in taken]
            entry = next(flights) if slot.kind == "flight" else min(rest, key=lambda e: (e.price, e.key))
            taken.add(entry.key)
            chosen.append((entry, slot.day))
        plan = compose(instance, chosen)
        if verify(instance, plan).passed:
            return plan
    return None


def careless(instance: Instance, rng: random.Random, heed: float = 0.5) -> dict:
    """A plan that adds up no prices: each entry is a preferred one with probability `heed`, else any."""
    taken: set[str] = set()
    chosen = []
    for slot in slots(instance):
        rest = [e for e in options(instance, slot) if e.key not in taken]
        liked = [e for e in rest if set(e.tags).intersection(instance.profile.prefs)]
        entry = draw_entry(instance, liked if liked and rng.random() < heed else rest, rng)
        taken.add(entry.key)
        chosen.append((entry, slot.day))
    return compose(instance, chosen)


def compose(instance: Instance, chosen: list[tuple[Entity, int]]) -> dict:
    """A plan of entries and their days, each as early as it can be after `USUAL` hours."""
    free, city, items = instance.profile.start, instance.profile.origin, []
    for entry, day in chosen:
        item = {"name": entry.name, "type": entry.kind, "day": day}
        start, end, _ = event(instance, entry, item, free=free, city=city)
        if not instance.compact:
            usual = USUAL.get(entry.kind, 0) + DAY * (day - 1)
            if entry.kind in VISIT_MIN and start < usual and usual + entry.minutes <= DAY * day:
                start, end = usual, usual + entry.minutes
            item |= {"start_time": time_text(start)}
            if entry.kind != "hotel":
                item |= {"end_time": time_text(end)}
        items.append(item | {"stated_price": entry.price, "db_lookup_key": entry.key})
        free, city = end, entry.city
    return total(instance, items)


USUAL = {"activity": 10 * 60, "restaurant": 18 * 60}  # minutes after midnight at which people begin


def time_text(minute: int) -> str:
    """ "HH:MM" of a minute counted from any midnight."""
    return f"{minute % DAY // 60:02d}:{minute % 60:02d}"


def total(instance: Instance, items: list[dict]) -> dict:
    """A plan of items, with its cost by the database and the cities it visits."""
    pairs = [(entry, item) for item in items if (entry := look_up(instance, item)) is not None]
    cities = list(dict.fromkeys(entry.city for entry, _ in pairs if entry.kind != "flight"))
    paid = cost(instance, pairs)
    return {"items": items, "total_stated_cost": paid, "destinations_visited": cities}


def draft(instance: Instance, rng: random.Random) -> dict:
    """A plan that nearly fits: the least too dear of a few careless ones; now and then one that fits the
    budget but begins a visit too early, leaves too late, or lacks a visit. Some break nothing."""
    plans = [careless(instance, rng) for _ in range(TRIES)]
    over = [(plan["total_stated_cost"] - instance.profile.budget, i) for i, plan in enumerate(plans)]
    dear = [(amount, i) for amount, i in over if amount > 0]
    fault = rng.choices(("cost", "time", "pace"), (0.7, 0.2, 0.1))[0]
    if fault == "cost" and dear:
        return plans[min(dear)[1]]
    plan = plans[min(over)[1]]
    visits = [i for i, item in enumerate(plan["items"]) if item["type"] in VISIT_MIN]
    if fault == "pace" and visits:
        gone = rng.choice(visits)
        return total(instance, [item for i, item in enumerate(plan["items"]) if i != gone])
    timed = [i for i in visits if "start_time" in plan["items"][i]]
    if fault == "time" and timed:
        hurry(plan["items"], rng.choice(timed), rng)
    return plan


TRIES = 5  # careless plans that a draft is the nearest miss of


def hurry(items: list[dict], i: int, rng: random.Random) -> None:
    """Begin item i before there is time to get there: some minutes after the one before it ends."""
    begin, end = clock(items[i]["start_time"]), clock(items[i]["end_time"])
    before = clock(items[i - 1].get("end_time", items[i - 1]["start_time"])) if i else begin
    same_day = i > 0 and items[i - 1]["day"] == items[i]["day"]
    earlier = max(0, (before if same_day else begin) - rng.choice((15, 30, 45, 60)))
    items[i] |= {"start_time": time_text(earlier), "end_time": time_text(earlier + end - begin)}


# the prompt


def prompt(instance: Instance) -> str:
    """The system text that states profile and database (appendix 13.1); a short form in compact worlds."""
    profile, rows = instance.profile, [_row(instance, entity) for entity in instance.entities.values()]
    start, end = (f"day {minute // DAY + 1} {time_text(minute)}" for minute in (profile.start, profile.end))
    prefs = ", ".join(profile.prefs)
    hours = [time_text(minute) for minute in profile.hours or ()]
    if instance.compact:
        rule = f" Between {hours[0]} and {hours[1]} only." if hours else ""
        city = next(entity.city for entity in instance.entities.values())
        return (
            f"Plan a trip from {profile.origin} to {city}. Budget {profile.budget}. From {start} to {end}. "
            f"Visit {profile.pace} places.{rule} Prefer {prefs}.\n" + "\n".join(rows)
        )
    rule = f"- No flight, meal or visit begins before {hours[0]} or ends after {hours[1]}\n" if hours else ""
    ways = [f"{a} - {b}: {n}" for (a, b), n in instance.minutes.items() if a <= b]
    return PROMPT.format(
        budget=profile.budget,
        start=start,
        end=end,
        origin=profile.origin,
        pace=profile.pace,
        hours=rule,
        prefs=prefs,
        ways="; ".join(ways),
        rows="\n".join(rows),
    )


PROMPT = """You are a travel planning assistant.
=== HARD CONSTRAINTS (must be satisfied) ===
- Total budget MUST NOT exceed ${budget}; a hotel is paid per night until the next hotel or the last day
- Travel dates: {start} to {end}; the traveller is in {origin} at the start and needs no way back
- Visit at least {pace} distinct cities/attractions (restaurants and activities count)
- All transit gaps (next.start - current.end) must be at least the travel duration from the database
{hours}=== SOFT PREFERENCES (best-effort) ===
- Preferred attributes: {prefs}
- Honour these when possible, NEVER violate hard constraints
=== GROUND TRUTH DATABASE ===
{rows}
minutes between cities, and within one: {ways}
=== OUTPUT ===
List the items in the order in which they happen; every night needs a hotel in the traveller's city.
item := {{"name": string, "type": "flight" | "hotel" | "restaurant" | "activity", "day": int, \
"start_time": "HH:MM", "end_time": "HH:MM", "stated_price": number, "db_lookup_key": string}}; \
a hotel has no end_time
Output a single <plan>{{"items": [item, ...], "total_stated_cost": number, "destinations_visited": \
[string, ...]}}</plan> block."""


def _row(instance: Instance, entity: Entity) -> str:
    """An entry of the database: a line of JSON, or of plain words in compact worlds."""
    times = [time_text(entity.depart), time_text(entity.depart + entity.minutes)]
    if instance.compact:
        if entity.kind == "flight":
            return f"{entity.key} {entity.name} {entity.price} {times[0]}-{times[1]}"
        length = f" {entity.minutes} min" if entity.minutes else ""
        return f"{entity.key} {entity.name} {entity.price} {' '.join(entity.tags)}{length}"
    row = {"key": entity.key, "name": entity.name, "type": entity.kind, "price": entity.price}
    if entity.kind == "flight":
        row |= {"from": entity.origin, "to": entity.city, "departs": times[0], "arrives": times[1]}
    else:
        row |= {"city": entity.city, "attributes": list(entity.tags)}
    return json.dumps(row | ({"minutes": entity.minutes} if entity.kind in VISIT_MIN else {}))
