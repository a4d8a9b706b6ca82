"""A TripTailor plan as data: read from an answer, resolved against the database, shown to a judge.

Nothing in a plan is trusted: what is shown and measured comes from the database (prices, names, times). Of
what is not there no word is shown, so that no text in a plan can speak to a judge.
"""

import json
import math
import re
from dataclasses import dataclass
from itertools import pairwise

import jsonschema

from envs.base import NO_PLAN_TEXT, PlanView, clip, json_path
from envs.triptailor_data import Place, Request, Ride, clock, in_part, km, minutes, normal
from envs.triptailor_database import Database

MAX_ANSWER_CHARS = 20_000  # of a final answer; ours
PRICE_TOLERANCE = 1.0  # ¥ a stated price may differ from the database's; ours
ROUTE_KM = 8.0  # km per leg at which the route feature falls to 1/e; ours
FULL_SLACK = 0.3  # share of the budget left over that scores 1; ours
MAX_NAME_CHARS = 160  # of a name or its tags in a view; ours
UNKNOWN = "a name that is not in the database"  # what a judge reads instead of a model's own words

_TEXT = {"type": "string", "minLength": 1, "maxLength": 120}
_PRICE = {"type": "number", "minimum": 0, "maximum": 1e6}


def _object(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "maxProperties": 12}


_ACTIVITY = _object(time=_TEXT, location=_TEXT, price=_PRICE, action={"enum": ["sightseeing", "dining"]})
_DAY = {"type": "array", "maxItems": 12, "items": _ACTIVITY}
_RIDE = _object(day={"type": "integer"}, mode=_TEXT, route=_TEXT, number=_TEXT, time=_TEXT, price=_PRICE)
_HOTEL = _object(day={"type": "integer"}, name=_TEXT, price_per_night=_PRICE)
PLAN_SCHEMA = _object(  # the official "Plan JSON"; further keys are allowed and never read
    hotel={"type": "array", "minItems": 1, "maxItems": 1, "items": _HOTEL},
    transportation={"type": "array", "minItems": 2, "maxItems": 2, "items": _RIDE},
    itinerary={"type": "object", "maxProperties": 30, "additionalProperties": _DAY},
)
_VALIDATOR = jsonschema.Draft202012Validator(PLAN_SCHEMA)


def parse_plan(text: str) -> dict:
    """The plan in a final answer: the first JSON object in it, in a code fence or not, after any
    </think>. Raises ValueError with a one-line reason: no JSON, NaN or infinite numbers, a key twice,
    nesting too deep, or a break of PLAN_SCHEMA."""
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueError(f"answer of {len(text)} characters, at most {MAX_ANSWER_CHARS}")
    text = text.rpartition("</think>")[2]
    start = text.find("{")
    if start < 0:
        raise ValueError("no JSON object in the answer")
    try:
        plan, _ = _DECODER.raw_decode(text, start)
        error = next(_VALIDATOR.iter_errors(plan), None)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if error is not None:
        raise ValueError(clip(f"{json_path(error)}{error.message}", 160))
    return plan


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _no_twins(pairs: list[tuple]) -> dict:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError("a key occurs twice in one JSON object")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_no_twins, parse_float=_finite, parse_constant=_finite)


@dataclass(slots=True)
class Priced:
    """One line of a plan beside what the database says of it."""

    kind: str  # hotel | ride | sight | restaurant
    stated: float  # ¥ in the plan
    name: str  # as the plan writes it
    found: Place | Ride | None  # None: not in the database
    start: int | None = None  # minutes of the day; None: no slot, or not readable
    end: int | None = None
    day: int = 0  # 1-based

    @property
    def price(self) -> float | None:
        """¥ by the database; of a train, the class whose fare is nearest to the stated price."""
        if self.found is None:
            return None
        fares = self.found.fares if isinstance(self.found, Ride) else (self.found.price,)
        return min(fares, key=lambda fare: abs(fare - self.stated))

    @property
    def mispriced(self) -> float:
        """¥ by which the stated price misses the database's; 0.0 within PRICE_TOLERANCE."""
        gap = 0.0 if self.price is None else abs(self.price - self.stated)
        return gap if gap > PRICE_TOLERANCE else 0.0


@dataclass(slots=True)
class Trip:
    """A plan resolved against the database."""

    plan: dict  # meets PLAN_SCHEMA
    request: Request
    hotel: Priced
    rides: list[Priced]  # outbound, return
    days: dict[str, list[Priced]]  # "day_1" ... as the plan names them, activities in plan order

    def activities(self, kind: str) -> list[Priced]:
        """All sights or all restaurants of the trip, in plan order."""
        return [line for lines in self.days.values() for line in lines if line.kind == kind]

    def lines(self) -> list[Priced]:
        """Everything that is paid."""
        return [self.hotel, *self.rides, *self.activities("sight"), *self.activities("restaurant")]

    def cost(self) -> float:
        """¥ by database prices, the hotel for days - 1 nights; stated prices where there are no others."""
        prices = [line.stated if line.price is None else line.price for line in self.lines()]
        return prices[0] * (self.request.days - 1) + sum(prices[1:])


def slot(text: str) -> tuple[int | None, int | None]:
    """(start, end) in minutes of "HH:MM–HH:MM", en dash or hyphen; (None, None) if unreadable."""
    try:
        start, end = (minutes(part) for part in text.replace("–", "-").split("-"))
    except ValueError:
        return None, None
    return start, end


def resolve(plan: dict, request: Request, database: Database, *, by_number: bool = False) -> Trip:
    """A Trip from a plan that meets PLAN_SCHEMA. Of places with one name in one city, the one whose
    price is nearest to the stated one.

    by_number  a ride whose times or weekday are not the database's is the first of its mode and number; for
               the human plans, whose times differ from the schedule's now and then
    """

    def priced(kind, name, stated, time="", day=0):
        found = database.named(kind, request.destination, name)
        best = min(found, key=lambda place: abs(place.price - stated), default=None)
        return Priced(kind, stated, name, best, *slot(time), day)

    hotel = plan["hotel"][0]
    rides = []
    ways = (request.origin, request.destination), (request.destination, request.origin)
    for entry, way, weekday in zip(plan["transportation"], ways, request.weekdays, strict=True):
        found = _ride(entry, database.rides(*way), weekday, by_number=by_number)
        rides.append(Priced("ride", entry["price"], entry["number"], found, *slot(entry["time"])))
    kinds = {"sightseeing": "sight", "dining": "restaurant"}
    days = {}
    for key, activities in plan["itinerary"].items():
        day = int(key[4:]) if re.fullmatch(r"day_[1-9][0-9]?", key) else 0
        days[key] = [
            priced(kinds[a["action"]], a["location"], a["price"], a["time"], day) for a in activities
        ]
    return Trip(plan, request, priced("hotel", hotel["name"], hotel["price_per_night"]), rides, days)


def _ride(entry: dict, options: list[Ride], weekday: str, *, by_number: bool) -> Ride | None:
    """The option that an entry names: its mode ("train" may be a word among others), its number or one
    of the numbers joined by "/", running on the weekday, at these times."""
    mode = "train" if "train" in normal(entry["mode"]).split() else normal(entry["mode"])
    number, (start, end) = normal(entry["number"]), slot(entry["time"])
    named = []
    for ride in options:
        if ride.mode == mode and number in (normal(ride.number), *normal(ride.number).split("/")):
            named.append(ride)
            if (start, end) == (ride.depart, ride.arrive % 1440) and ride.runs(weekday):
                return ride
    return named[0] if named and by_number else None


def render(trip: Trip) -> str:
    """The one text of a plan: names, prices, times and tags as the database has them, activities in
    time order. Own and reference plans go through it, so a judge cannot tell them by their style. What the
    database does not have is shown as UNKNOWN; of the plan's own it keeps numbers alone."""
    request, text = trip.request, []
    for day in range(1, request.days + 1):
        text.append(f"Day {day}")
        if day == 1:
            text += [_ride_line(trip.rides[0], request.origin, request.destination), _hotel_line(trip.hotel)]
        for line in sorted(trip.days.get(f"day_{day}", []), key=lambda p: (p.start is None, p.start or 0)):
            text.append(_activity_line(line))
        if day == request.days:
            text.append(_ride_line(trip.rides[1], request.destination, request.origin))
    text.append(f"Total: ¥{trip.cost():g} of ¥{request.budget:g}")
    return "\n".join(text)


def _ride_line(line: Priced, origin: str, destination: str) -> str:
    ride = line.found
    if ride is None:
        return f"{origin} to {destination}: {UNKNOWN}, ¥{line.stated:g}"
    times = f"{clock(ride.depart)}–{clock(ride.arrive)}"
    return (
        f"{times} {ride.mode.capitalize()} {plain(ride.number)}, {origin} to {destination}, ¥{line.price:g}"
    )


def _hotel_line(line: Priced) -> str:
    if line.found is None:
        return f"Hotel: {UNKNOWN}, ¥{line.stated:g} a night"
    return f"Hotel: {plain(line.found.name)} ({plain(line.found.tags)}), ¥{line.price:g} a night"


def _activity_line(line: Priced) -> str:
    times = "" if line.start is None or line.end is None else f"{clock(line.start)}–{clock(line.end)} "
    verb = {"sight": "Visit", "restaurant": "Eat at"}[line.kind]
    if line.found is None:
        return f"{times}{verb} {UNKNOWN}, ¥{line.stated:g}"
    tags = f" ({plain(line.found.tags)})" if line.found.tags else ""
    return f"{times}{verb} {plain(line.found.name)}{tags}, ¥{line.price:g}"


def view(trip: Trip) -> PlanView:
    """Text and features of a plan; every feature in [0, 1], higher is better.

    wishes  share of the request's interests, cuisines, hotel class and parts of the day that are met
    route   exp(-mean km per leg / ROUTE_KM); legs hotel, activities in time order, hotel, each day
    pace    1 - mean over days of |sights - wanted| / wanted; first and last day want half, rounded up
    budget  share of the budget left, by database prices, relative to FULL_SLACK
    """
    features = {"wishes": _wishes(trip), "route": _route(trip), "pace": _pace(trip)}
    slack = 1 - trip.cost() / max(trip.request.budget, 1)
    features["budget"] = min(1.0, max(0.0, slack / FULL_SLACK))
    return PlanView(render(trip), features, trip.request.query)


NO_PLAN = PlanView(NO_PLAN_TEXT, {"wishes": 0.0, "route": 0.0, "pace": 0.0, "budget": 0.0})


def _wishes(trip: Trip) -> float:
    request = trip.request
    met = []
    for wanted, kind in ((request.interests, "sight"), (request.cuisines, "restaurant")):
        chosen = [line.found for line in trip.activities(kind) if line.found]
        offered = normal(" ".join(f"{place.tags} {place.name}" for place in chosen))
        met += [any(stem in offered for stem in stems(wish)) for wish in wanted]
    if request.category:
        met.append(trip.hotel.found is not None and trip.hotel.found.tags == request.category)
    for line, part in zip(trip.rides, request.parts, strict=True):
        if part:
            met.append(line.found is not None and in_part(line.found.depart, part))
    return sum(met) / len(met) if met else 1.0


def stems(wish: str) -> list[str]:
    """What to look for in tags: the wish's words of four letters or more without a plural s, or all of
    the wish ("hot pot") where every word is shorter."""
    words = [word.removesuffix("s") for word in normal(wish).split() if len(word) >= 4]
    return words or [normal(wish)]


def plain(text: str) -> str:
    """A name on one line of bounded length."""
    return clip(" ".join(text.split()), MAX_NAME_CHARS)


def _route(trip: Trip) -> float:
    legs = []
    for lines in trip.days.values():
        stops = sorted((p for p in lines if p.found and p.start is not None), key=lambda p: p.start)
        places = [trip.hotel.found, *(stop.found for stop in stops), trip.hotel.found]
        legs += [km(a, b) for a, b in pairwise(places) if a and b and a is not b]
    legs = [leg for leg in legs if not math.isnan(leg)]
    return math.exp(-sum(legs) / len(legs) / ROUTE_KM) if legs else 0.0


def _pace(trip: Trip) -> float:
    scores = []
    for day in range(1, trip.request.days + 1):
        full = trip.request.sights_per_day
        wanted = full if 1 < day < trip.request.days else math.ceil(full / 2)
        seen = sum(line.day == day for line in trip.activities("sight"))
        scores.append(max(0.0, 1 - abs(seen - wanted) / wanted))
    return sum(scores) / len(scores)
