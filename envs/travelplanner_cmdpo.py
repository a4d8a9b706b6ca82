"""CM-DPO's own plan schema on TravelPlanner's queries, and its pass rate: the third metric beside official
and strict, and not comparable with either, for it asks for the hard constraints only.

A plan is a <plan> block with items that name a key of the database; costs come from the database, never from
the stated prices; what does not validate is a decode failure and is never parsed again.
Source: CM-DPO, appendix 12. What the paper leaves open, and the reading taken: a key is a flight number, a
"Name, City", or, for type "flight" (there is no other type for rides), "taxi|self-driving, from A to B"; a
hotel is paid until the day of the next hotel, the last one until the last day; missing times get the most
generous value; the pace is the number of cities to visit; room rule, cuisine, room type and transportation
are the query's further hard constraints; prices are for all people, as in the benchmark.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise

import jsonschema

from envs.base import clip, json_path
from envs.travelplanner_data import ROOM_TYPES, Database, Place, Query
from envs.travelplanner_plan import DECODER, MAX_ANSWER_CHARS, SEATS, city_of

CHECKS = ("decode", "lookup", "cost", "time", "pace", "room_rule", "cuisine", "room_type", "transportation")
UNREACHABLE_MIN = 1440.0  # minutes that a way without a road counts; ours
KINDS = {"hotel": "accommodation", "restaurant": "restaurant", "activity": "attraction"}

_TEXT = {"type": "string", "minLength": 1, "maxLength": 200}
_TIME = {"type": "string", "pattern": r"^([01]?[0-9]|2[0-3]):[0-5]?[0-9]$"}
_PRICE = {"type": "number", "minimum": 0, "maximum": 1e6}
_ITEM = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "type": {"enum": ["flight", *KINDS]},
        "day": {"type": "integer", "minimum": 1, "maximum": 14},
        "start_time": _TIME,
        "end_time": _TIME,
        "stated_price": _PRICE,
        "db_lookup_key": _TEXT,
    },
    "required": ["name", "type", "day", "stated_price", "db_lookup_key"],
}
CMDPO_SCHEMA = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "minItems": 1, "maxItems": 100, "items": _ITEM},
        "total_stated_cost": _PRICE,
        "destinations_visited": {"type": "array", "maxItems": 20, "items": _TEXT},
    },
    "required": ["items", "total_stated_cost", "destinations_visited"],
}
_VALIDATOR = jsonschema.Draft202012Validator(CMDPO_SCHEMA)


@dataclass(slots=True)
class Step:
    """One item, resolved. Minutes count from the start of day 1."""

    kind: str  # flight | hotel | restaurant | activity
    day: int  # from 1
    start: int | None  # minutes, None: not stated
    end: int | None
    origin: str  # city where it starts; "" where the key is unknown
    city: str  # where it ends
    price: float | None  # $ for all people, a night for hotels; None: not in the database
    mode: str = ""  # of a ride: flight | taxi | self-driving
    place: Place | None = None


def decode(answer) -> dict:
    """The plan in a <plan> block (a dict is taken as its content). Raises ValueError with the reason."""
    if isinstance(answer, str):
        block = re.search(r"<plan>(.*?)</plan>", answer[:MAX_ANSWER_CHARS].rpartition("</think>")[2], re.S)
        if block is None:
            raise ValueError(f"no <plan> block in the first {MAX_ANSWER_CHARS} characters")
        try:
            answer = DECODER.decode(block[1])
        except RecursionError:
            raise ValueError("JSON nested too deeply") from None
    try:
        error = next(_VALIDATOR.iter_errors(answer), None)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if error is not None:
        raise ValueError(clip(f"{json_path(error)}{error.message}", 160))
    return answer


def cmdpo(query: Query, answer, data: Database) -> tuple[dict[str, bool | None], dict[str, float], list[str]]:
    """The hard constraints of an answer in CM-DPO's schema; PR is the share of answers without a False.

    returns  (check -> True, False, or None where the query has no such wish;
              check -> raw severity: $ over the budget, minutes short, cities short, numbers elsewhere;
              reasons)
    """
    wishes = (query.house_rule, query.cuisines, query.room_type, query.transportation)
    wanted = dict.fromkeys(CHECKS[:5], True) | dict(zip(CHECKS[5:], map(bool, wishes), strict=True))
    try:
        steps = resolve(query, decode(answer)["items"], data)
    except ValueError as error:
        checks = {check: False if wish else None for check, wish in wanted.items()}
        return checks, {check: float(wish) for check, wish in wanted.items()}, [f"decode: {error}"]
    late, way = _late(steps, data)
    cost = _cost(query, steps)
    cities = {step.city for step in steps} - {"", query.org}
    severity = {
        "decode": 0.0,
        "lookup": float(sum(step.price is None for step in steps)),
        "cost": max(0.0, cost - query.budget),
        "time": late + sum(UNREACHABLE_MIN for step in steps if step.day > query.days),
        "pace": float(max(0, query.num_cities - len(cities))),
        **_wishes(query, steps),
    }
    text = {
        "lookup": f"{severity['lookup']:g} items are not in the database",
        "cost": f"costs ${cost:g}, budget ${query.budget:g}",
        "time": f"{severity['time']:g} minutes short, {way or 'beyond the last day'}",
        "pace": f"{len(cities)} cities, wanted {query.num_cities}",
    }
    broken = [check for check in CHECKS if wanted[check] and severity[check]]
    reasons = [clip(f"{check}: {text.get(check, f'{severity[check]:g} broken')}", 200) for check in broken]
    return {c: severity[c] == 0 if wanted[c] else None for c in CHECKS}, severity, reasons


def resolve(query: Query, items: list[dict], data: Database) -> list[Step]:
    steps = []
    for item in items:
        offset = 1440 * (item["day"] - 1)
        start, end = (
            None if key not in item else offset + _minutes(item[key]) for key in ("start_time", "end_time")
        )
        if item["type"] == "flight":
            steps.append(_ride(query, item, start, data))
            continue
        name, _, city = item["db_lookup_key"].rpartition(",")
        city = city_of(city.strip(), data)
        place = data.exact.get((KINDS[item["type"]], name.strip(), city))
        step = Step(item["type"], item["day"], start, end, city, city, None, place=place)
        if place:
            rooms = math.ceil(query.people / place.occupancy) if place.occupancy else query.people
            step.price = place.price * rooms
        steps.append(step)
    return steps


def _minutes(text: str) -> int:
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)


def _ride(query: Query, item: dict, start: int | None, data: Database) -> Step:
    """A flight of that day at the database's times, or a road that takes the database's time."""
    key, day = item["db_lookup_key"].strip(), item["day"]
    for flight in data.flights.named(key):
        if day <= query.days and flight.date == query.dates[day - 1]:
            depart, arrive = (1440 * (day - 1) + _minutes(text) for text in (flight.depart, flight.arrive))
            arrive += 1440 if arrive < depart else 0
            ends, price = (flight.origin, flight.destination), flight.price * query.people
            return Step("flight", day, depart, arrive, *ends, price, mode="flight")
    match = re.fullmatch(r"(taxi|self-driving), from ([^,]+?) to ([^,]+)", key, re.I)
    if match is None:
        return Step("flight", day, start, None, "", "", None)
    mode, (origin, destination) = match[1].lower(), (city_of(match[i], data) for i in (2, 3))
    road = data.road(origin, destination)
    if road is None:
        return Step("flight", day, start, None, origin, destination, None, mode=mode)
    price = road.cost(mode) * math.ceil(query.people / SEATS[mode])
    end = None if start is None else start + road_minutes(road.duration)
    return Step("flight", day, start, end, origin, destination, price, mode=mode)


def road_minutes(duration: str) -> int:
    """Minutes of "14 hours 2 mins"."""
    hours, minutes = re.search(r"(\d+) hour", duration), re.search(r"(\d+) min", duration)
    return 60 * int(hours[1] if hours else 0) + int(minutes[1] if minutes else 0)


def _late(steps: list[Step], data: Database) -> tuple[float, str]:
    """Minutes by which gaps between neighbours (next start - this end) are shorter than the way, in all,
    and where this happens first."""
    late, first = 0.0, ""
    for step, after in pairwise(steps):
        end = 1440 * (step.day - 1) if step.end is None else step.end
        start = 1440 * after.day if after.start is None else after.start
        road = data.road(step.city, after.origin)
        way = 0.0 if step.city == after.origin else road_minutes(road.duration) if road else UNREACHABLE_MIN
        short = max(0.0, way - (start - end))
        late += short
        first = first or (f"first from {step.city} to {after.origin} on day {after.day}" if short else "")
    return late, first


def _cost(query: Query, steps: list[Step]) -> float:
    """$ by database prices, of what is found."""
    hotels = [step for step in steps if step.kind == "hotel"]
    leaves = [step.day for step in hotels[1:]] + [query.days]
    nights = {id(step): max(1, day - step.day) for step, day in zip(hotels, leaves, strict=False)}
    return sum((step.price or 0.0) * nights.get(id(step), 1) for step in steps)


def _wishes(query: Query, steps: list[Step]) -> dict[str, float]:
    """Numbers of stays against the house rule and the room type, cuisines never eaten, rides unwanted."""
    stays = [step.place for step in steps if step.kind == "hotel" and step.place]
    meals = [s.place for s in steps if s.kind == "restaurant" and s.place and s.city != query.org]
    eaten = {cuisine for place in meals for cuisine in place.cuisines}
    allowed = ROOM_TYPES.get(query.room_type)
    rule = f"No {query.house_rule}" if query.house_rule else None
    return {
        "room_rule": float(sum(rule in place.house_rules.split(" & ") for place in stays)),
        "cuisine": float(sum(cuisine not in eaten for cuisine in query.cuisines)),
        "room_type": float(sum(allowed is not None and place.room_type not in allowed for place in stays)),
        "transportation": float(sum(query.transportation == f"no {s.mode}" for s in steps if s.mode)),
    }
