"""The seven constraints of TripTailor in strict mode: nothing but the database decides.

Closes what the official evaluator leaves open (loose name matching, stated prices, empty itineraries,
no clock): names are exact after normal(), prices and times are the database's, slots are in order.
Constraints: TripTailor (arXiv:2508.01432), "feasibility" and "rationality"; the gate of Anchored GRPO.
"""

import math
import re
from functools import lru_cache

from envs.base import Verdict, clip
from envs.triptailor_data import clock, normal
from envs.triptailor_plan import Priced, Trip

CHECKS = (
    "within_sandbox",
    "complete_information",
    "budget",
    "diverse_restaurants",
    "diverse_attractions",
    "meal_prices",
    "visit_duration",
)
LATE_ARRIVAL = 18 * 60  # day 1 may be empty after this arrival, minutes of the day; ours
EARLY_DEPARTURE = 12 * 60  # the last day may be empty before this departure; ours


@lru_cache(maxsize=1 << 12)
def duration_bounds(text: str) -> tuple[float, float] | None:
    """Allowed minutes (both ends included) of a visit by its recommended duration, or None if the
    text says nothing.

    a-b hours   60a - 60 .. 60b + 60      a-b minutes  a .. b + 60      a-b days  360a - 60 .. 1440b
    "Over a" has no upper end, "Under b" no lower one.
    source   TripTailor eval.py, by execution. One deviation: "3–5 hours" with an en dash is read as
             3-5 hours; the official pattern reads 5 hours.
    """
    number = r"(\d+(?:\.\d+)?)"
    pattern = rf"(over |under )?{number}(?: ?- ?{number})? (minute|hour|day)s?"
    match = re.fullmatch(pattern, text.strip().lower().replace("–", "-"))
    if match is None:
        return None
    low = high = float(match[2])
    if match[3]:
        high = float(match[3])
    if match[1] == "over ":
        high = math.inf
    if match[1] == "under ":
        low = 0.0
    bounds = {
        "minute": (low, high + 60),
        "hour": (60 * low - 60, 60 * high + 60),
        "day": (360 * low - 60, 1440 * high),
    }[match[4]]
    return max(0.0, bounds[0]), bounds[1]


class Findings:
    """What is broken: amounts add up per check, reasons are kept for people."""

    def __init__(self):
        self.severity = dict.fromkeys(CHECKS, 0.0)
        self.reasons: list[str] = []

    def add(self, check: str, amount: float, reason: str):
        assert amount > 0, (check, amount)
        self.severity[check] += amount
        if len(self.reasons) < 20:
            self.reasons.append(clip(f"{check}: {reason}", 200))

    def verdict(self) -> Verdict:
        checks = {check: self.severity[check] == 0 for check in CHECKS}
        return Verdict(all(checks.values()), checks, self.severity, self.reasons)


def unreadable(reason: str) -> Verdict:
    """An answer that holds no plan fails all seven, with severity 1 each."""
    severity = dict.fromkeys(CHECKS, 1.0)
    return Verdict(False, dict.fromkeys(CHECKS, False), severity, [clip(f"no plan: {reason}", 200)])


def verify_strict(trip: Trip, pool: dict[str, set[str]] | None = None) -> Verdict:
    """The seven constraints. `pool` (kind -> normal names) narrows hotels, sights and restaurants to
    those handed to the planner.

    within_sandbox        hotel, both rides (mode, number, cities, weekday, times) and every activity are
                          in the database; severity: number of items that are not
    complete_information  see _complete; severity: number of gaps
    budget                nights x (days - 1) + rides + activities, database prices, <= budget. Stated
                          prices of hotel, rides and sights within ¥1 of the database's; severity: share
                          of the budget overspent or misstated, 1 per item without a price
    diverse_*             no name twice; severity: number of repeats
    meal_prices           database price in the requested range, stated price within ¥1 of it; severity: ¥
    visit_duration        see _times; severity: minutes outside, 60 per slot that cannot be read
    """
    findings = Findings()
    _sandbox(trip, pool or {}, findings)
    _complete(trip, findings)
    _budget(trip, findings)
    _diverse(trip.activities("restaurant"), "diverse_restaurants", findings)
    _diverse(trip.activities("sight"), "diverse_attractions", findings)
    _meals(trip, findings)
    _times(trip, findings)
    return findings.verdict()


def _sandbox(trip: Trip, pool: dict[str, set[str]], findings: Findings):
    city = trip.request.destination
    for line in trip.lines():
        if line.kind != "ride" and line.found is None:
            findings.add("within_sandbox", 1, f"no {line.kind} {line.name!r} in {city}")
        elif line.kind in pool and normal(line.name) not in pool[line.kind]:
            findings.add("within_sandbox", 1, f"{line.kind} {line.name!r} is not among the candidates")
    for line, entry, way in zip(trip.rides, trip.plan["transportation"], ("outbound", "return"), strict=True):
        if line.found is None:
            what = f"{entry['mode']!r} {line.name!r} at {entry['time']!r}"
            findings.add("within_sandbox", 1, f"{way}: no {what} on that route and weekday")


def _complete(trip: Trip, findings: Findings):
    """The official check (a hotel, two rides with number, time and price) is in PLAN_SCHEMA. Ours on
    top: rides on day 1 and day N with the right route, the hotel from day 1, the days day_1 .. day_N
    and no other; each full day has a sight and a meal, day 1 and day N an activity unless one arrives
    after 18:00 or leaves before 12:00; at least N - 1 sights and N - 1 meals in all."""
    days, request = trip.request.days, trip.request

    def gap(reason):
        findings.add("complete_information", 1, reason)

    ends = (1, request.origin, request.destination), (days, request.destination, request.origin)
    for entry, (day, origin, destination) in zip(trip.plan["transportation"], ends, strict=True):
        if entry["day"] != day or normal(entry["route"]) != normal(f"{origin} to {destination}"):
            wanted = f"day {day}, {origin} to {destination}"
            gap(f"ride on day {entry['day']}, {entry['route']!r}; wanted {wanted}")
    if trip.plan["hotel"][0]["day"] != 1:
        gap(f"hotel from day {trip.plan['hotel'][0]['day']}, wanted 1")
    wanted = [f"day_{day}" for day in range(1, days + 1)]
    for key in wanted:
        if key not in trip.days:
            gap(f"{key} is missing")
    for key in trip.days.keys() - set(wanted):
        gap(f"{key!r} is not a day of a {days}-day trip")
    for key in wanted[1:-1]:
        for kind in ("sight", "restaurant"):
            if key in trip.days and all(line.kind != kind for line in trip.days[key]):
                gap(f"{key} has no {kind}")
    late = trip.rides[0].found is not None and trip.rides[0].found.arrive > LATE_ARRIVAL
    early = trip.rides[1].found is not None and trip.rides[1].found.depart < EARLY_DEPARTURE
    for key, excused in ((wanted[0], late), (wanted[-1], early)):
        if trip.days.get(key) == [] and not excused:
            gap(f"{key} is empty")
    for kind in ("sight", "restaurant"):
        count = len(trip.activities(kind))
        if count < days - 1:
            gap(f"number of {kind}s {count} in {days} days, wanted at least {days - 1}")


def _budget(trip: Trip, findings: Findings):
    limit = max(trip.request.budget, 1)
    cost, budget = trip.cost(), trip.request.budget
    if cost > budget:
        findings.add("budget", (cost - budget) / limit, f"costs ¥{cost:g}, budget ¥{budget:g}")
    for line in trip.lines():
        if line.price is None:
            findings.add("budget", 1, f"the price of {line.name!r} is unknown")
        elif line.mispriced and line.kind != "restaurant":
            reason = f"{line.name!r} is stated at ¥{line.stated:g}, costs ¥{line.price:g}"
            findings.add("budget", line.mispriced / limit, reason)


def _diverse(lines: list[Priced], check: str, findings: Findings):
    seen = set()
    for line in lines:
        name = normal(line.name)
        if name in seen:
            findings.add(check, 1, f"{line.name!r} again")
        seen.add(name)


def _meals(trip: Trip, findings: Findings):
    low, high = trip.request.meals
    for line in trip.activities("restaurant"):
        if line.price is None:
            findings.add("meal_prices", max(high, 1), f"the price of {line.name!r} is unknown")
            continue
        outside = max(low - line.price, line.price - high, 0)
        if outside:
            reason = f"{line.name!r} costs ¥{line.price:g}, wanted ¥{low:g} to ¥{high:g}"
            findings.add("meal_prices", outside, reason)
        if line.mispriced:
            reason = f"{line.name!r} is stated at ¥{line.stated:g}, costs ¥{line.price:g}"
            findings.add("meal_prices", line.mispriced, reason)


def _times(trip: Trip, findings: Findings):
    """Every slot HH:MM–HH:MM with start before end; a day's activities in order without overlap; on
    day 1 after the arrival, on the last day before the departure; visits within duration_bounds."""

    def outside(amount, reason):
        findings.add("visit_duration", amount, reason)

    arrival, departure = (line.found for line in trip.rides)
    for key, lines in trip.days.items():
        free = arrival.arrive - 1440 * (lines[0].day - 1) if arrival and lines and lines[0].day else 0
        limit = departure.depart if departure and key == f"day_{trip.request.days}" else 1440
        for line in lines:
            if line.start is None or line.end is None or line.end <= line.start:
                outside(60, f"{key}: the slot of {line.name!r} is not HH:MM–HH:MM with start before end")
                continue
            if line.start < free:
                reason = f"{key}: {line.name!r} at {clock(line.start)}, free from {clock(free)}"
                outside(free - line.start, reason)
            if line.end > limit:
                reason = f"{key}: {line.name!r} until {clock(line.end)}, leaving at {clock(limit)}"
                outside(line.end - limit, reason)
            free = max(free, line.end)
    for line in trip.activities("sight"):
        bounds = duration_bounds(line.found.duration) if line.found else None
        if line.found is None:
            outside(60, f"the duration of {line.name!r} is unknown")
        elif bounds and line.start is not None and line.end > line.start:
            stay = line.end - line.start
            short = max(bounds[0] - stay, stay - bounds[1], 0)
            if short:
                outside(short, f"{stay} minutes at {line.name!r}, recommended {line.found.duration}")
