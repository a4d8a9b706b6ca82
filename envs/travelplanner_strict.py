"""TravelPlanner's 13 constraints in strict mode: nothing but the database decides.

Closes what a policy learns of the official evaluator: names are exact, every attraction is read, a flight is
the one of that day, any wording other than flight or taxi is driving and pays, a day in one city is held to
that city, repeats are found in any spelling, the minimum stay holds for every place, a 3-day trip goes to
its destination. A plan that passes here passes the official evaluator too, except where an official
substring look-up takes another row than the one named (11 restaurants, 29 attractions, 2 accommodations),
where the nights in one place are spelled in two ways, or where its cuisine check skips the rest of a day
after a meal at home.
Constraints: TravelPlanner (arXiv:2402.01622).
"""

from itertools import groupby, pairwise

from envs.base import clip
from envs.travelplanner_data import ROOM_TYPES, Database
from envs.travelplanner_official import COMMONSENSE, HARD, MEALS, applicable
from envs.travelplanner_plan import Day, Item, Trip


class Findings:
    """What is broken: amounts add up per check, reasons are kept for people."""

    def __init__(self):
        self.severity = dict.fromkeys(COMMONSENSE + HARD, 0.0)
        self.reasons: list[str] = []

    def add(self, check: str, amount: float, reason: str):
        assert amount > 0, (check, amount)
        self.severity[check] += amount
        if len(self.reasons) < 20:
            self.reasons.append(clip(f"{check}: {reason}", 200))


def strict(trip: Trip, data: Database) -> tuple[dict[str, bool | None], dict[str, float], list[str]]:
    """All 13 checks of a plan, how badly each is broken, and why.

    returns  (check -> True, False, or None where the query has no such wish;
              check -> severity, 0.0 where it holds or does not apply;
              one line per broken rule, at most 20)

    Severity: $ over the budget; numbers of stays against the house rule or the room type, of cuisines never
    eaten, of rides against the wish; numbers of broken cells, nights, repeats or rules elsewhere. The hard
    constraints hold only if Complete Information and Within Sandbox do, as in the official rates; where
    that alone fails them, their severity is 1.
    """
    findings = Findings()
    for rule in (_current_city, _sandbox, _diverse, _conflicts, _nights, _complete, _cost, _stays, _wishes):
        rule(trip, findings)
    _route(trip, data, findings)
    gates = ("is_not_absent", "is_valid_information_in_sandbox")
    wanted = applicable(trip.query)
    if any(findings.severity[gate] for gate in gates):
        for check in HARD:
            if wanted[check] and not findings.severity[check]:
                findings.severity[check] = 1.0
        findings.reasons.append("hard constraints: fail with Complete Information or Within Sandbox")
    checks = {c: amount == 0 if wanted.get(c, True) else None for c, amount in findings.severity.items()}
    return checks, findings.severity, findings.reasons


def _current_city(trip: Trip, findings: Findings):
    def wrong(reason):
        findings.add("is_valid_information_in_current_city", 1, reason)

    for day in trip.days:
        cities = {day.origin, day.city} - {""}
        where = " or ".join(sorted(cities)) or "no known city"
        if day.ride and not (day.moves and (day.ride.origin, day.ride.destination) == (day.origin, day.city)):
            way = f"{day.origin} to {day.city}" if day.moves else f"a day in {day.city}"
            wrong(f"day {day.number}: {day.ride.text[:60]!r} on {way}")
        for item in day.items:
            stay = item.slot == "accommodation"
            if item.city not in ({day.city} - {""} if stay else cities):
                place = f"{item.name[:40]!r}, {item.city or 'no known city'}"
                wrong(f"day {item.day}: {item.slot} {place} on a day in {day.city if stay else where}")


def _sandbox(trip: Trip, findings: Findings):
    for day in trip.days:
        if day.ride and day.ride.price is None:
            reason = f"day {day.number}: no such ride that day: {day.ride.text[:80]!r}"
            findings.add("is_valid_information_in_sandbox", 1, reason)
        for item in day.items:
            if item.found is None:
                reason = (
                    f"day {item.day}: no {item.slot} {item.name[:60]!r} in {item.city or 'no known city'}"
                )
                findings.add("is_valid_information_in_sandbox", 1, reason)


def _route(trip: Trip, data: Database, findings: Findings):
    """Leaves org on day 1, is back on the last day, no gap, no city twice, every city in dest."""
    query, days = trip.query, trip.days

    def wrong(reason):
        findings.add("is_reasonable_visiting_city", 1, reason)

    for day in days:
        if not day.origin or not day.city:
            wrong(f"day {day.number}: current_city names no known city")
        elif day.moves and day.origin == day.city:
            wrong(f"day {day.number}: from {day.origin} to itself")
    for day, at, end in ((days[0], days[0].origin, "starts"), (days[-1], days[-1].city, "ends")):
        if not day.moves or at != query.org:
            wrong(f"the trip {end} in {at or 'no known city'} without a ride, or not in {query.org}")
    for day, after in pairwise(days):
        if day.city != after.origin:
            wrong(f"day {after.number} starts in {after.origin!r}, the night before was in {day.city!r}")
    visits = [city for city, _ in groupby(day.city for day in days[:-1])]
    for i, city in enumerate(visits):
        if city in visits[:i] or city == query.org:
            wrong(f"{city} is visited twice")
        if city and query.dest != (city if query.days == 3 else data.states[city]):
            wrong(f"{city} is not {query.dest}" if query.days == 3 else f"{city} is not in {query.dest}")


def _diverse(trip: Trip, findings: Findings):
    kinds = {"is_valid_restaurants": MEALS, "is_valid_attractions": ("attraction",)}
    for check, slots in kinds.items():
        seen = set()
        for item in trip.items(*slots):
            if _key(item) in seen:
                findings.add(check, 1, f"day {item.day}: {item.name[:60]!r} again")
            seen.add(_key(item))


def _key(item: Item) -> tuple[str, str]:
    """The same for all spellings of a place: case and blanks do not count."""
    return " ".join(item.name.casefold().split()), item.city


def _conflicts(trip: Trip, findings: Findings):
    modes = {day.ride.mode for day in trip.days if day.ride}
    if trip.days[0].ride is None:
        findings.add("is_valid_transportation", 1, "no transportation on day 1")
    for other in ("flight", "taxi"):
        if {"self-driving", other} <= modes:
            findings.add("is_valid_transportation", 1, f"self-driving beside {other}")


def _nights(trip: Trip, findings: Findings):
    stays = [next((item for item in day.items if item.slot == "accommodation"), None) for day in trip.days]
    for _, run in groupby(stays, key=lambda item: item and _key(item)):
        run = list(run)
        lacking = run[0].found.min_nights - len(run) if run[0] and run[0].found else 0
        if lacking > 0:
            reason = f"{run[0].name[:60]!r} for {len(run)} nights, at least {run[0].found.min_nights:g}"
            findings.add("is_valid_accommodation", lacking, reason)


def _complete(trip: Trip, findings: Findings):
    query, days = trip.query, trip.days

    def gap(reason):
        findings.add("is_not_absent", 1, reason)

    if len(days) != query.days:
        gap(f"{len(days)} days, wanted {query.days}")
    num_cities = len({city for day in days for city in (day.origin, day.city)} - {query.org})
    if num_cities != query.num_cities:
        gap(f"visits {num_cities} cities, wanted {query.num_cities}")
    for i, day in enumerate(days, start=1):
        if day.number != i:
            gap(f"entry {i} has another day number")
        for lacking in _lacking(day, last=i == query.days):
            gap(f"day {i}: no {lacking}")
    if sum(day.num_cells for day in days) < 3 * query.days:
        gap("fewer than half of the cells are filled")


def _lacking(day: Day, *, last: bool) -> list[str]:
    """What a day must have and does not: a ride where it moves, else sights and three meals; a night."""
    have = {item.slot for item in day.items} | {"transportation" for _ in [day.ride] if day.ride}
    must = ["transportation"] if day.moves else ["attraction", *MEALS]
    return [slot for slot in must + ["accommodation"] * (not last) if slot not in have]


def _cost(trip: Trip, findings: Findings):
    cost, budget = trip.cost(), trip.query.budget
    if cost > budget:
        findings.add("valid_cost", cost - budget, f"costs ${cost:g}, budget ${budget:g}")


def _stays(trip: Trip, findings: Findings):
    query = trip.query
    allowed = ROOM_TYPES.get(query.room_type)
    for item in trip.items("accommodation"):
        place = item.found
        if place and query.house_rule and f"No {query.house_rule}" in place.house_rules.split(" & "):
            reason = f"day {item.day}: {item.name[:60]!r} has {place.house_rules!r}"
            findings.add("valid_room_rule", 1, reason)
        if place and allowed and place.room_type not in allowed:
            reason = f"day {item.day}: {item.name[:60]!r} is {place.room_type!r}, wanted {query.room_type}"
            findings.add("valid_room_type", 1, reason)


def _wishes(trip: Trip, findings: Findings):
    query = trip.query
    eaten = {c for i in trip.items(*MEALS) if i.found and i.city != query.org for c in i.found.cuisines}
    for cuisine in query.cuisines:
        if cuisine not in eaten:
            findings.add("valid_cuisine", 1, f"no {cuisine}")
    for day in trip.days:
        if day.ride and query.transportation == f"no {day.ride.mode}":
            reason = f"day {day.number}: wanted {query.transportation}"
            findings.add("valid_transportation", 1, reason)
