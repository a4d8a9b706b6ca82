"""A TravelPlanner plan as data: read from an answer, resolved against the database, shown to a judge.

An answer is a JSON list of days, or an object whose "plan" is that list; what stands around it is not read.
In the resolved Trip every cell is an exact name of the database or is not found.
"""

import json
import math
import re
from dataclasses import dataclass, field

from envs.base import PlanView
from envs.travelplanner_data import Database, Place, Query
from envs.travelplanner_official import CELLS, MEALS

MAX_ANSWER_CHARS = 20_000  # of a final answer; ours
MAX_CELL_CHARS = 2_000  # of one text in a plan; ours
MAX_DAYS = 14  # entries of a plan; ours
SEATS = {"taxi": 4, "self-driving": 5}  # people in one car


def parse_answer(answer) -> list:
    """The plan in a final answer: a text whose first "[{" after any </think> opens the JSON list of days, a
    list, or {"plan": list}.

    raises  ValueError with a one-line reason: no plan, too long, no JSON, a key twice, NaN
    """
    if not isinstance(answer, str):
        plan = answer.get("plan") if isinstance(answer, dict) else answer
        try:
            answer = json.dumps(plan, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("the answer is no JSON value") from None
    if len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(f"answer of {len(answer)} characters, at most {MAX_ANSWER_CHARS}")
    text = answer.rpartition("</think>")[2]
    start = re.search(r"\[\s*\{", text)
    if start is None:
        raise ValueError("no JSON list of days in the answer")
    try:
        plan, _ = DECODER.raw_decode(text, start.start())
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    for day in plan:
        for key, cell in day.items() if isinstance(day, dict) else ():
            if isinstance(cell, str) and len(cell) > MAX_CELL_CHARS:
                raise ValueError(f"{key[:20]!r} has {len(cell)} characters, at most {MAX_CELL_CHARS}")
    return plan


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _no_twins(pairs: list[tuple]) -> dict:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice in one JSON object")
    return dict(pairs)


DECODER = json.JSONDecoder(object_pairs_hook=_no_twins, parse_float=_finite, parse_constant=_finite)


@dataclass(slots=True)
class Item:
    """One place of a plan beside what the database says of it."""

    slot: str  # breakfast | lunch | dinner | attraction | accommodation
    day: int  # from 1
    name: str  # as written, outer blanks dropped
    city: str  # "" where it is no city of the database
    found: Place | None  # the exact name in that city; its first row where the name is there twice


@dataclass(slots=True)
class Ride:
    text: str
    mode: str  # flight | taxi | self-driving; any other wording counts as self-driving (issue #51)
    origin: str  # "" where unreadable
    destination: str
    price: float | None  # $ for all people; None: not in the database on that day


@dataclass(slots=True)
class Day:
    number: int  # from 1
    origin: str  # where the day starts; "" where current_city is unreadable
    city: str  # where it ends
    moves: bool  # current_city is "from A to B"
    ride: Ride | None
    items: list[Item] = field(default_factory=list)  # in the order of CELLS
    num_cells: int = 0  # of the six that say something


@dataclass(slots=True)
class Trip:
    query: Query
    days: list[Day]  # all that are not {}; there may be more or fewer than the query's

    def items(self, *slots: str) -> list[Item]:
        return [item for day in self.days for item in day.items if item.slot in slots]

    def cost(self) -> float:
        """$ for all people by database prices, of what is found; one night per day that names a place."""
        people = self.query.people
        total = sum(day.ride.price or 0.0 for day in self.days if day.ride)
        total += sum(item.found.price * people for item in self.items(*MEALS) if item.found)
        stays = [item.found for item in self.items("accommodation") if item.found]
        return total + sum(place.price * math.ceil(people / place.occupancy) for place in stays)


def city_of(text: str, data: Database) -> str:
    """The city in "Houston" or "Houston(Texas)"; "" if there is none, or not in that state."""
    match = re.fullmatch(r"([^()]+)(?:\(([^()]*)\))?", text)
    state = data.states.get(match[1]) if match else None
    return match[1] if state is not None and match[2] in (None, state) else ""


def resolve(query: Query, plan: list, data: Database) -> Trip:
    """A Trip from a plan. Raises ValueError with a one-line reason where an entry is no day.

    A day has "day" or "days", "current_city" and the six cells; further keys are allowed and never read; {}
    pads the end, as in the training plans.
    """
    while plan and plan[-1] == {}:
        plan = plan[:-1]
    if not 0 < len(plan) <= MAX_DAYS:
        raise ValueError(f"{len(plan)} days, wanted 1 to {MAX_DAYS}")
    for i, day in enumerate(plan, start=1):
        if problem := _not_a_day(day):
            raise ValueError(f"entry {i}: {problem}")
    return Trip(query, [_day(query, i, day, data) for i, day in enumerate(plan, start=1)])


def _not_a_day(day) -> str:
    """What an entry lacks; "" if it is a day."""
    if not isinstance(day, dict):
        return f"a {type(day).__name__}, wanted an object"
    for key in ("current_city", *CELLS):
        if not isinstance(day.get(key), str):
            return f"{key!r} is missing or no text"
    numbers = [day[key] for key in ("day", "days") if key in day]
    if not numbers or any(type(number) is not int for number in numbers):
        return "'day' is missing or no whole number"
    return ""


def _day(query: Query, number: int, cells: dict, data: Database) -> Day:
    texts = {key: "" if cells[key] == "-" else cells[key] for key in CELLS}
    match = re.fullmatch(r"from ([^,]+?) to ([^,]+)", cells["current_city"])
    ends = match.groups() if match else (cells["current_city"],) * 2
    origin, city = (city_of(end, data) for end in ends)
    date = query.dates[number - 1] if number <= query.days else ""
    ride = (
        _ride(texts["transportation"].strip(), date, query.people, data) if texts["transportation"] else None
    )
    day = Day(number, origin, city, match is not None, ride, num_cells=sum(map(bool, texts.values())))
    if any(cells.get(key, number) != number for key in ("day", "days")):
        day.number = 0  # misnumbered; Complete Information says so
    for slot in CELLS[1:]:
        kind = "restaurant" if slot in MEALS else slot
        pieces = texts[slot].split(";") if slot == "attraction" else [texts[slot]]
        if len(pieces) > 1 and not pieces[-1].strip():
            del pieces[-1]  # what the trailing ";" leaves
        for piece in pieces if texts[slot] else []:
            name, _, place = piece.rpartition(",")
            name, place = name.strip(), city_of(place.strip(), data)
            day.items.append(Item(slot, number, name, place, data.exact.get((kind, name, place))))
    return day


_FLIGHT = re.compile(
    r"Flight Number: (F[0-9]{7}), from ([^,]+?) to ([^,]+)"
    r"(?:, Departure Time: ([0-9:]+))?(?:, Arrival Time: ([0-9:]+))?"
)
_ROAD = re.compile(r"[^,\n]+, from ([^,]+?) to ([^,]+)(?:,.*)?")


def _ride(text: str, date: str, people: int, data: Database) -> Ride:
    """A flight counts if number, cities and date are those of one row, and its times if they are stated; a
    road if the database knows it, whatever the plan says of its length and cost."""
    kinds = [kind for kind in ("flight", "taxi", "self-driving") if kind in text.lower()] or ["self-driving"]
    match = (_FLIGHT if kinds == ["flight"] else _ROAD).fullmatch(text)
    if match is None or len(kinds) > 1:
        return Ride(text, kinds[0], "", "", None)
    if kinds == ["flight"]:
        number, origin, destination, *times = match.groups()
        origin, destination = city_of(origin, data), city_of(destination, data)
        for flight in data.flights.named(number):
            stated = [time or real for time, real in zip(times, (flight.depart, flight.arrive), strict=True)]
            if (flight.origin, flight.destination, flight.date, flight.depart, flight.arrive) == (
                origin,
                destination,
                date,
                *stated,
            ):
                return Ride(text, "flight", origin, destination, flight.price * people)
        return Ride(text, "flight", origin, destination, None)
    origin, destination = (city_of(end, data) for end in match.groups())
    road = data.road(origin, destination)
    cars = math.ceil(people / SEATS[kinds[0]])
    return Ride(text, kinds[0], origin, destination, road.cost(kinds[0]) * cars if road else None)


def render(trip: Trip) -> str:
    """The one text of a plan, from what was found in the database; what was not is shown as written."""
    lines = []
    for day in trip.days:
        way = f"from {day.origin} to {day.city}" if day.moves else day.city
        lines.append(f"Day {day.number}: {way}")
        if day.ride:
            price = "price unknown" if day.ride.price is None else f"${day.ride.price:g}"
            lines.append(f"  {day.ride.mode}, {day.ride.origin} to {day.ride.destination}, {price}")
        for item in day.items:
            price = f", ${item.found.price:g}" if item.found and item.slot != "attraction" else ""
            kind = f" ({_kind(item.found)})" if item.found and item.slot != "attraction" else ""
            lines.append(f"  {item.slot}: {plain(item.name)}, {item.city}{kind}{price}")
    lines.append(f"Total ${trip.cost():g} of ${trip.query.budget:g} for {trip.query.people}")
    return "\n".join(lines)


def _kind(place: Place) -> str:
    return ", ".join(place.cuisines) or f"{place.room_type}, {place.house_rules}"


def plain(text: str) -> str:
    """A model's own words on one line, with nothing that cannot be written as UTF-8."""
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())


def view(trip: Trip) -> PlanView:
    """Text and features of a plan; every feature in [0, 1], higher is better.

    budget   share of the budget left, by database prices
    filled   share of the six cells of each day that say something
    known    share of named places and rides that the database has
    """
    found = [item.found is not None for item in trip.items(*CELLS[1:])]
    found += [day.ride.price is not None for day in trip.days if day.ride]
    features = {
        "budget": min(1.0, max(0.0, 1 - trip.cost() / max(trip.query.budget, 1))),
        "filled": sum(day.num_cells for day in trip.days) / (6 * len(trip.days)),
        "known": sum(found) / max(1, len(found)),
    }
    return PlanView(render(trip), features)


NO_PLAN = PlanView("No plan.", {"budget": 0.0, "filled": 0.0, "known": 0.0})
