"""TripTailor's own evaluator, holes included: what its published numbers are made with.

Names match fuzzily, prices are the plan's, nothing is looked up but the request's information (the candidates
handed to a planner, or what the human plan used). Where the official script would stop with an exception, the
check that raised it fails here and the others go on. For rewards use envs/triptailor_verify.py.
Source: TripTailor (arXiv:2508.01432), eval.py, read and executed; fuzzywuzzy 0.18 on difflib for the names.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from difflib import SequenceMatcher
from functools import lru_cache

from envs.triptailor_plan import MAX_ANSWER_CHARS
from envs.triptailor_route import mean_leg_km
from envs.triptailor_verify import CHECKS

CRASHES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # on what a model may write
LEAST_PARTIAL = 90  # partial ratio at which a name is accepted
LEAST_RATIO = {"hotel": 80, "restaurant": 80, "sight": 50}  # ratio at which it is accepted too
NAME_KEYS = {  # the first that any row of the list has names all of them
    "hotel": ("Hotel Name", "name"),
    "sight": ("name_en", "poiName"),
    "restaurant": ("name_en", "name"),
}
LISTS = {"hotel": ("hotels", "hotel"), "sight": ("attractions",), "restaurant": ("restaurants",)}
KINDS = {"sightseeing": "sight", "dining": "restaurant"}
ROUTE_MODES = ("from and to the hotel", "without the hotel", "sights alone")


@dataclass(frozen=True, slots=True)
class Score:
    checks: dict[str, bool]  # the seven, by the names of envs/triptailor_verify.py
    cost: float | None  # ¥ by the plan's own prices; None where they cannot be added
    route_km: list[float] | None  # mean leg in km by ROUTE_MODES; None where a place has no match

    @property
    def passed(self) -> bool:
        return all(self.checks.values())


FAILED = Score(dict.fromkeys(CHECKS, False), None, None)


def score(text: str, info: dict, *, days: int, budget: float, meals: tuple[float, float]) -> Score:
    """The official verdict on a final answer.

    info   a record of given_info_data.json or infomation.json; its hotels lie under "hotels" or "hotel"
    """
    plan = read_plan(text)
    if plan is None:
        return FAILED
    sandbox = _tried(lambda: within_sandbox(plan, info), default={})
    cost = _tried(lambda: stated_cost(plan, days))
    verdicts = {
        "within_sandbox": lambda: all(sandbox.values()) if sandbox else False,
        "complete_information": lambda: complete_information(plan),
        "budget": lambda: cost is not None and bool(cost <= budget),
        "diverse_restaurants": lambda: no_repeats(plan, "dining"),
        "diverse_attractions": lambda: no_repeats(plan, "sightseeing"),
        "meal_prices": lambda: all(meals[0] <= price <= meals[1] for price in meal_prices(plan)),
        "visit_duration": lambda: sandbox.get("sight", False) and visit_durations(plan, info),
    }
    checks = {name: bool(_tried(verdicts[name], default=False)) for name in CHECKS}
    route = route_km(plan, info) if sandbox.get("sight") else None
    amount = _tried(lambda: float(0 + cost), math.nan)  # a text has none, a long integer cannot be stored
    return Score(checks, cost if math.isfinite(amount) else None, route)


def _tried(check: Callable, default=None):
    """What a check says, or the default where the official script would have stopped."""
    try:
        return check()
    except CRASHES:
        return default


def read_plan(text: str) -> dict | None:
    """The first JSON object of an answer, in a code fence or not, after any </think>; None if there is none.
    Read as json.loads reads it: NaN passes and of two equal keys the last counts."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = text.rpartition("</think>")[2]
    try:
        plan, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except (ValueError, RecursionError):
        return None
    return plan


def activities(plan: dict) -> list[dict]:
    """All entries of all days, in the plan's order."""
    itinerary = plan["itinerary"]
    return [entry for day in itinerary for entry in itinerary[day]]


def within_sandbox(plan: dict, info: dict) -> dict[str, bool]:
    """hotel, transportation, sight, restaurant -> whether all of that kind are in the information."""
    rides = plan["transportation"]
    found = {"hotel": find("hotel", plan["hotel"][0]["name"], info) is not None}
    found["transportation"] = len(rides) == 2
    if found["transportation"]:
        ways = zip(rides, (info["transport_otd"], info["transport_dto"]), strict=True)
        found["transportation"] = all([rides_there(entry, options) for entry, options in ways])
    found |= {"sight": True, "restaurant": True}
    for entry in activities(plan):
        kind = KINDS.get(entry["action"])
        if kind and find(kind, entry["location"], info) is None:
            found[kind] = False
    return found


def rides_there(entry: dict, options: dict) -> bool:
    """Whether the number is among a direction's flights or trains; nothing else of the ride is compared."""
    mode, number = entry["mode"].lower(), entry["number"]
    if mode == "flight":
        return any(option["Flight Number"] == number for option in options["flight_options"])
    if "train" in mode:
        numbers = [option["Train_Number"] for option in options["train_options"]]
        return any(number == other or number in other.split("/") for other in numbers)
    return False


def complete_information(plan: dict) -> bool:
    if not plan.get("hotel") or "transportation" not in plan or len(plan["transportation"]) != 2:
        return False
    wanted = ("number", "time", "price")
    return all(key in ride and ride[key] != "" for ride in plan["transportation"] for key in wanted)


def stated_cost(plan: dict, days: int) -> float:
    """¥ by the plan's own prices: days - 1 nights of the first hotel, the rides, everything else."""
    cost = plan["hotel"][0]["price_per_night"] * (days - 1)
    for entry in [*plan["transportation"], *activities(plan)]:
        cost += entry["price"]
    return cost


def no_repeats(plan: dict, action: str) -> bool:
    names = [entry["location"].lower() for entry in activities(plan) if entry["action"] == action]
    return len(set(names)) == len(names)


def meal_prices(plan: dict) -> list[float]:
    return [entry["price"] for entry in activities(plan) if entry["action"] == "dining"]


def visit_durations(plan: dict, info: dict) -> bool:
    """Whether every visit's slot fits what the matched sight recommends."""
    fit = True
    for entry in activities(plan):
        if entry["action"] == "sightseeing":
            row = find("sight", entry["location"], info)
            listed = any("recommended_duration" in other for other in _rows("sight", info))
            key = "recommended_duration" if listed else "reference_time"
            fit &= _tried(lambda e=entry, r=row, k=key: duration_fits(e["time"], r.get(k)), False)
    return fit


def duration_fits(time: str, recommended: str | None) -> bool:
    """Whether a slot's length is within the tolerance of a recommended duration; true where that says
    nothing. Bounds in minutes, both included: see duration_bounds of envs/triptailor_verify.py."""
    if recommended is None or recommended != recommended or recommended == "":
        return True
    bounds, length = official_bounds(recommended), slot_minutes(time)
    return bounds is None or (length is not None and bounds[0] <= length <= bounds[1])


def official_bounds(text: str) -> tuple[float, float] | None:
    """Like duration_bounds of the strict mode, but found anywhere in a text, with "-" alone between two
    numbers, so that "3–5 hours" is 5 hours."""
    number, unit = r"(\d+\.?\d*)", r"\s*(hour|minute|day)"
    pattern = rf"{number}\s*-\s*{number}{unit}|(Over|Under)\s*{number}{unit}|{number}{unit}"
    match = re.search(pattern, text)
    if match is None:
        return None
    low, high, unit, word, bound, of_bound, only, of_only = match.groups()
    if only:
        low, high, unit = only, only, of_only
    elif word:
        low, high, unit = (bound, "inf", of_bound) if word == "Over" else ("0", bound, of_bound)
    a, b = float(low), float(high)
    return {"minute": (a, b + 60), "hour": (60 * a - 60, 60 * b + 60), "day": (360 * a - 60, 1440 * b)}[unit]


def slot_minutes(text: str) -> int | None:
    """Length of "HH:MM-HH:MM" in minutes, negative over midnight; None where it cannot be read."""
    try:
        start, end = (datetime.strptime(part.strip(), "%H:%M") for part in text.replace("–", "-").split("-"))
    except ValueError:
        return None
    return int((end - start).total_seconds() / 60)


def route_km(plan: dict, info: dict) -> list[float] | None:
    """Mean leg in km by ROUTE_MODES; activities in the plan's order. None where the official script stops:
    a hotel, sight or restaurant without a match or without coordinates."""

    def place(kind, name):
        row = find(kind, name, info)
        return float(row["latitude"]), float(row["longitude"])

    def lengths():
        home, stops = place("hotel", plan["hotel"][0]["name"]), []
        for entries in plan["itinerary"].values():
            known = [(KINDS[e["action"]], e["location"]) for e in entries if e["action"] in KINDS]
            stops.append([(kind, place(kind, name)) for kind, name in known])
        points = [[point for _, point in day] for day in stops]
        sights = [[point for kind, point in day if kind == "sight"] for day in stops]
        return [mean_leg_km(points, home=home), mean_leg_km(points), mean_leg_km(sights)]

    return _tried(lengths)


def _rows(kind: str, info: dict) -> list[dict]:
    key = next(key for key in (*LISTS[kind], None) if key is None or key in info)
    return info[key]


def find(kind: str, name: str, info: dict) -> dict | None:
    """The row of the information that a name is taken for: of those accepted, the one of the highest ratio,
    the first of equals. Raises where the official script does: no rows, a row or a name that is no text."""
    rows = _rows(kind, info)
    key = next(key for key in NAME_KEYS[kind] if key == NAME_KEYS[kind][-1] or any(key in r for r in rows))
    best, best_ratio = None, -1
    if not rows:
        raise KeyError(key)
    name = name.lower()
    for row in rows:
        ratio = match(name, row[key].lower(), LEAST_RATIO[kind])
        if ratio is not None and ratio > best_ratio:
            best, best_ratio = row, ratio
    return best


@lru_cache(maxsize=1 << 16)
def match(a: str, b: str, least: int) -> int | None:
    """The ratio of two names (0 to 100) if they are accepted as one: a partial ratio of LEAST_PARTIAL or a
    ratio of `least`; else None."""
    if a == b:
        return 100
    if not a or not b:
        return None
    common = sum((Counter(a) & Counter(b)).values())  # no alignment can match more letters
    possible = common / (min(len(a), len(b)) + common) >= LEAST_PARTIAL / 200 - 0.01
    whole = 200 * common / (len(a) + len(b)) >= least - 1
    if not possible and not whole:
        return None
    ratio = round(100 * SequenceMatcher(None, a, b).ratio())
    return ratio if ratio >= least or (possible and partial_ratio(a, b) >= LEAST_PARTIAL) else None


def partial_ratio(a: str, b: str) -> int:
    """0 to 100: best ratio of the shorter text against windows of the longer that begin where a common block
    lets them; above 99.5 counts as 100."""
    short, long = (a, b) if len(a) <= len(b) else (b, a)
    best = 0.0
    for block in SequenceMatcher(None, short, long).get_matching_blocks():
        start = max(0, block.b - block.a)
        best = max(best, SequenceMatcher(None, short, long[start : start + len(short)]).ratio())
        if best > 0.995:
            return 100
    return round(100 * best)
