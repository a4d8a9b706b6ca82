"""TravelPlanner's own evaluator, bug for bug: 8 commonsense and 5 hard constraints, and its cost.

Known holes, all kept: names match as substrings and the first row counts; on a day in one city the city is
compared letter by letter (issue #50); any wording other than flight, self-driving or taxi escapes every
check (#51); a last attraction without ";" is never read; dates and times of flights are not compared; the
destination of a 3-day trip is not compared. Where the evaluator stops with an exception, that check of that
plan fails here, so that one plan cannot end a run. envs/travelplanner_strict.py closes the holes.
Source: github.com/OSU-NLP-Group/TravelPlanner da7c1d4, evaluation/.
"""

import math
import re
from collections.abc import Callable
from itertools import groupby

from envs.travelplanner_data import ROOM_TYPES, Database, Place, Query

COMMONSENSE = (  # the paper's names: Within Current City, Within Sandbox, Reasonable City Route,
    "is_valid_information_in_current_city",
    "is_valid_information_in_sandbox",
    "is_reasonable_visiting_city",
    "is_valid_restaurants",  # Diverse Restaurants
    "is_valid_transportation",  # Non-conflicting Transportation
    "is_valid_attractions",  # Diverse Attractions
    "is_valid_accommodation",  # Minimum Nights Stay
    "is_not_absent",  # Complete Information
)
HARD = ("valid_cost", "valid_room_rule", "valid_cuisine", "valid_room_type", "valid_transportation")
MEALS = ("breakfast", "lunch", "dinner")
CELLS = ("transportation", "breakfast", "attraction", "lunch", "dinner", "accommodation")
NOT_NEEDED = "You don't need to fill in the information for this or later days."
STOPS = (KeyError, IndexError, TypeError, AttributeError, ValueError)  # what ends the official run


def from_to(text: str) -> tuple[str | None, str | None]:
    """The cities of "from A to B, ...". Long runs of blanks are cut first: the pattern is cubic in them."""
    match = re.search(r"from\s+(.+?)\s+to\s+([^,]+)", re.sub(r"(\s{4})\s+", r"\1", text))
    return match.groups() if match else (None, None)


def before_parenthesis(text: str) -> str:
    """What precedes the first "(...)" of one line."""
    if text is None:
        raise TypeError("no city")
    start = text.find("(")
    closed = start >= 0 and text.find(")", start) > 0 and "\n" not in text[:start]
    return text[:start] if closed else text


def name_city(text: str) -> tuple[str, str]:
    """The name and city of "Name, City(State)", split at the last comma; ("-", "-") if there is none."""
    comma = text.rfind(",")
    if comma < 0 or comma == len(text) - 1:
        return "-", "-"
    name = text[text.rfind("\n", 0, comma) + 1 : comma]
    return name.strip(), before_parenthesis(text[comma + 1 :].strip()).strip()


def applicable(query: Query) -> dict[str, bool]:
    """Hard constraint -> whether the query has it."""
    wishes = (True, query.house_rule, query.cuisines, query.room_type, query.transportation)
    return {check: bool(wish) for check, wish in zip(HARD, wishes, strict=True)}


def failed(query: Query) -> dict[str, bool | None]:
    """The checks of an answer that is no plan."""
    wanted = applicable(query)
    return {check: False if wanted.get(check, True) else None for check in COMMONSENSE + HARD}


def official(query: Query, plan, data: Database) -> tuple[dict[str, bool | None], list[str]]:
    """All 13 checks of a plan, and why those that fail do.

    plan     any JSON value; null, [] and the like are "not delivered" and fail everything
    returns  (check -> True, False, or None where the query has no such wish; one reason per failure)
    """
    wanted = applicable(query)
    if not plan:
        return dict.fromkeys(COMMONSENSE, False) | {c: False if wanted[c] else None for c in HARD}, [
            "no plan"
        ]
    checks, reasons = {}, []
    for name in COMMONSENSE:
        checks[name] = _run(name, _CHECKS[name], query, plan, data, reasons)
    judged = checks["is_not_absent"] and checks["is_valid_information_in_sandbox"]
    for name in HARD:
        checks[name] = False if wanted[name] else None
        if judged and wanted[name]:
            checks[name] = _run(name, _CHECKS[name], query, plan, data, reasons)
    if not judged:
        reasons.append("hard constraints: not judged, for Complete Information or Within Sandbox fails")
    return checks, reasons


def _run(name: str, check: Callable, query: Query, plan, data: Database, reasons: list[str]) -> bool:
    try:
        reason = check(query, plan[: query.days], data)
    except STOPS as error:
        reason = f"the official evaluator stops with {type(error).__name__}"
    if reason:
        reasons.append(f"{name}: {reason}")
    return not reason


def _filled(day: dict, key: str) -> bool:
    """Whether a cell says something, a missing key being nothing."""
    return key in day and bool(day[key]) and day[key] != "-"


def _day_cities(day: dict) -> list[str] | str:
    """[A, B] of "from A to B"; of a day in one city its name as a string, which is issue #50."""
    if "from" in day["current_city"]:
        return [before_parenthesis(city) for city in from_to(day["current_city"])]
    return before_parenthesis(day["current_city"])


def _attractions(day: dict) -> list[str]:
    return day["attraction"].split(";")[:-1] if _filled(day, "attraction") else []


def _current_city(query: Query, days: list[dict], data: Database) -> str:
    for i, day in enumerate(days, start=1):
        cities = _day_cities(day)
        if _filled(day, "transportation") and not all(city in day["transportation"] for city in cities):
            return f"day {i}: the transportation does not name the day's cities"
        for meal in MEALS:
            if _filled(day, meal) and not any(city in day[meal] for city in cities):
                return f"day {i}: the {meal} is not in the day's cities"
        for attraction in _attractions(day):
            if not any(city in attraction for city in cities):
                return f"day {i}: the attraction {attraction[:60]!r} is not in the day's cities"
        if _filled(day, "accommodation") and cities[-1] not in day["accommodation"]:
            return f"day {i}: the accommodation is not in the day's last city"
    return ""


def _sandbox(query: Query, days: list[dict], data: Database) -> str:
    for i, day in enumerate(days, start=1):
        if day["transportation"] and day["transportation"] != "-" and not _ride_exists(day, data):
            return f"day {i}: the transportation is not in the database"
        for meal in MEALS:
            if _filled(day, meal) and not data.find("restaurant", *name_city(day[meal])):
                return f"day {i}: the {meal} is not in the database"
        for attraction in _attractions(day):
            if not data.find("attraction", *name_city(attraction)):
                return f"day {i}: the attraction {attraction[:60]!r} is not in the database"
        if _filled(day, "accommodation"):
            if not data.find("accommodation", *name_city(day["accommodation"])):
                return f"day {i}: the accommodation is not in the database"
    return ""


def _ends(day: dict) -> tuple[str | None, str | None]:
    """The cities that the transportation names, else those of current_city."""
    origin, destination = from_to(day["transportation"])
    return (origin, destination) if origin and destination else from_to(day["current_city"])


def _flight_number(text: str) -> str:
    return text.split("Flight Number: ")[1].split(",")[0]


def _ride_exists(day: dict, data: Database) -> bool:
    text, (origin, destination) = day["transportation"], _ends(day)
    if "flight number" in text.lower():
        ends = before_parenthesis(origin), before_parenthesis(destination)
        return any((f.origin, f.destination) == ends for f in data.flights.named(_flight_number(text)))
    if "self-driving" in text.lower() or "taxi" in text.lower():
        if origin is None:
            return False
        return data.road(before_parenthesis(origin), before_parenthesis(destination)) is not None
    return True  # issue #51


def _route(query: Query, days: list[dict], data: Database) -> str:
    route: list[str] = []
    for i, day in enumerate(days):
        cities = _day_cities(day)
        if i == 0 and isinstance(cities, list) and cities[0] != query.org:
            return f"day 1 starts in {cities[0]!r}, wanted {query.org}"
        route += [cities] if isinstance(cities, str) else cities
    if route[0] != route[-1]:
        return f"starts in {route[0]!r} and ends in {route[-1]!r}"
    if not _in_one_piece(route):
        return "a city is visited twice, or only passed through"
    for i, city in enumerate(route):
        if city not in data.states:
            return f"no city {city!r}"
        if 0 < i < len(route) - 1 and query.days > 3 and data.states[city] != query.dest:
            return f"{city} is not in {query.dest}"
    return ""


def _in_one_piece(route: list[str]) -> bool:
    """Whether no city comes back, the last entry aside, and each between the ends fills two entries."""
    seen: set[str] = set()
    at = 0
    for city, run in groupby(route):
        length = len(list(run))
        if city in seen and at not in (0, len(route) - 1):
            return False
        if length == 1 and 0 < at < len(route) - 1:
            return False
        seen.add(city)
        at += length
    return len(route) >= 3


def _restaurants(query: Query, days: list[dict], data: Database) -> str:
    return _repeated([day[meal] for day in days for meal in MEALS if _filled(day, meal)])


def _diverse_attractions(query: Query, days: list[dict], data: Database) -> str:
    return _repeated([piece for day in days for piece in _attractions(day)])


def _repeated(texts: list) -> str:
    twice = next((text for i, text in enumerate(texts) if text in texts[:i]), None)
    return "" if twice is None else f"{str(twice)[:60]!r} again"


def _conflicts(query: Query, days: list[dict], data: Database) -> str:
    if not days[0]["transportation"] or days[0]["transportation"] == "-":
        return "no transportation on day 1"
    texts = [day["transportation"].lower() for day in days if _filled(day, "transportation")]
    kinds = ("taxi", "self-driving", "flight")
    found = {next((kind for kind in kinds if kind in text), None) for text in texts}
    clash = "self-driving" in found and ("flight" in found or "taxi" in found)
    return "self-driving beside another kind" if clash else ""


def _nights(query: Query, days: list[dict], data: Database) -> str:
    if any("accommodation" not in day for day in days):
        return "a day has no accommodation"
    for text, run in groupby([day["accommodation"] for day in days]):
        if text in ("-", ""):
            continue
        found, nights = data.find("accommodation", *name_city(text)), len(list(run))
        if len(found) == 1 and nights < found[0].min_nights:
            return f"{text[:60]!r} for {nights} nights, at least {found[0].min_nights:g}"
    return ""


def _complete(query: Query, days: list[dict], data: Database) -> str:
    if sum(day != {} and day["current_city"] != NOT_NEEDED for day in days) != query.days:
        return f"wanted {query.days} days"
    cities: set[str] = set()
    for i, day in enumerate(days):
        found = _day_cities(day)
        if i == 0 and isinstance(found, list) and found[0] != query.org:
            return f"day 1 starts in {found[0]!r}, wanted {query.org}"
        cities.update([found] if isinstance(found, str) else found)
    if len(cities - {query.org}) != query.num_cities:
        return f"visits {len(cities - {query.org})} cities, wanted {query.num_cities}"
    for i, day in enumerate(days, start=1):
        if lacking := _lacking(day, last=i == query.days):
            return f"day {i}: no {lacking}"
    num_filled = sum(_filled(day, key) for day in days for key in day)
    return "fewer than half of the cells are filled" if num_filled / (6 * query.days) < 0.5 else ""


def _lacking(day: dict, *, last: bool) -> str:
    """What a day must have and does not; "" if it has everything."""
    city, nothing = day["current_city"], ("", "-")
    for key in CELLS:
        if key not in day:
            return key
    if ("from " in city or "to " in city) and day["transportation"] in nothing:
        return "transportation"
    if "from " not in city and " to " not in city and day["attraction"] in nothing:
        return "attraction"
    if not last and day["accommodation"] in nothing:
        return "accommodation"
    if "from " not in city and any(day[meal] in nothing for meal in MEALS):
        return "meal"
    return ""


def official_cost(query: Query, plan: list[dict], data: Database) -> float:
    """Dollars for all people by database prices, of what is found. Raises KeyError, TypeError or the like
    where the official function does: a missing cell, a road without a price."""
    total = 0.0
    for day in plan[: query.days]:
        if day["transportation"] and day["transportation"] != "-":
            total += _fare(query, day, data)
        for meal in MEALS:
            if day[meal] and day[meal] != "-":
                found = data.find("restaurant", *name_city(day[meal]))
                total += found[0].price * query.people if found else 0
        if place := _stay(day, data):
            total += place.price * math.ceil(query.people / place.occupancy)
    return total


def _fare(query: Query, day: dict, data: Database) -> float:
    text, (origin, destination) = day["transportation"], _ends(day)
    if origin is None:
        return 0.0
    if "flight number" in text.lower():
        flights = data.flights.named(_flight_number(text))
        return flights[0].price * query.people if flights else 0.0
    for mode, seats in (("self-driving", 5), ("taxi", 4)):
        if mode in text.lower():
            road = data.road(before_parenthesis(origin), before_parenthesis(destination))
            if road is None:
                raise TypeError("a road without a price")
            return road.cost(mode) * math.ceil(query.people / seats)
    return 0.0


def _stay(day: dict, data: Database) -> Place | None:
    if not day["accommodation"] or day["accommodation"] == "-":
        return None
    return next(iter(data.find("accommodation", *name_city(day["accommodation"]))), None)


def _cost(query: Query, days: list[dict], data: Database) -> str:
    cost = official_cost(query, days, data)
    return "" if cost <= query.budget else f"costs ${cost:g}, budget ${query.budget:g}"


def _room_rule(query: Query, days: list[dict], data: Database) -> str:
    stays = (_stay(day, data) for day in days)
    bad = next((place for place in stays if place and f"No {query.house_rule}" in place.house_rules), None)
    return f"{bad.name[:60]!r} has {bad.house_rules!r}" if bad else ""


def _cuisine(query: Query, days: list[dict], data: Database) -> str:
    offered: set[str] = set()
    for day in days:
        for meal in MEALS:
            if not day[meal] or day[meal] == "-":
                continue
            name, city = name_city(day[meal])
            if city == query.org:
                break  # the rest of the day is skipped
            found = data.find("restaurant", name, city)
            menu = ", ".join(found[0].cuisines) if found else ""
            offered |= {cuisine for cuisine in query.cuisines if cuisine in menu}
    lacking = [cuisine for cuisine in query.cuisines if cuisine not in offered]
    return f"no {', '.join(lacking)}" if lacking else ""


def _room_type(query: Query, days: list[dict], data: Database) -> str:
    stays = (_stay(day, data) for day in days)
    allowed = ROOM_TYPES[query.room_type]
    bad = next((place for place in stays if place and place.room_type not in allowed), None)
    return f"{bad.name[:60]!r} is {bad.room_type!r}, wanted {query.room_type}" if bad else ""


def _transport_wish(query: Query, days: list[dict], data: Database) -> str:
    word = {"no flight": "Flight", "no self-driving": "Self-driving"}[query.transportation]
    texts = (day["transportation"] for day in days)
    return f"wanted {query.transportation}" if any(t and t != "-" and word in t for t in texts) else ""


_CHECKS: dict[str, Callable[[Query, list[dict], Database], str]] = {
    "is_valid_information_in_current_city": _current_city,
    "is_valid_information_in_sandbox": _sandbox,
    "is_reasonable_visiting_city": _route,
    "is_valid_restaurants": _restaurants,
    "is_valid_transportation": _conflicts,
    "is_valid_attractions": _diverse_attractions,
    "is_valid_accommodation": _nights,
    "is_not_absent": _complete,
    "valid_cost": _cost,
    "valid_room_rule": _room_rule,
    "valid_cuisine": _cuisine,
    "valid_room_type": _room_type,
    "valid_transportation": _transport_wish,
}
