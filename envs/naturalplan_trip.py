"""NaturalPlan's trips: visit N cities for given numbers of days, by direct flights, some of them on given
days. The day of a flight belongs to both cities, so a stay starts on the day the one before ends.

Problem from the task's text, the official exact match, a verifier that accepts every valid trip, and the
set of valid trips. Benchmark: NaturalPlan (arXiv:2406.04520), evaluate_trip_planning.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from envs.base import PlanView, Verdict
from envs.naturalplan_answer import Findings, count, field, final_text, unreadable

CHECKS = ("readable", "cities", "stays", "dates", "flights", "windows")
HINT = (
    "Answer with the plan and nothing else, in this form:\n"
    "Here is the trip plan for visiting the 2 European cities for 7 days:\n\n"
    "**Day 1-3:** Arriving in A and visit A for 3 days.\n"
    "**Day 3:** Fly from A to B.\n"
    "**Day 3-7:** Visit B for 5 days."
)

_HEADER = re.compile(r"You plan to visit (\d+) European cities for (\d+) days in total\.", re.ASCII)
_FIXED = "You only take direct flights to commute between cities."
_FLIGHTS = "Here are the cities that have direct flights:"
_STAYS = [
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"You would like to visit (?P<city>\S+) for (?P<days>\d+) days?\.",
        r"You want to spend (?P<days>\d+) days? in (?P<city>\S+)\.",
        r"You plan to stay in (?P<city>\S+) for (?P<days>\d+) days?\.",
    )
]
_WINDOWS = [
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"During day (?P<first>\d+) and day (?P<last>\d+), you have to attend a .+ in (?P<city>\S+)\.",
        r"From day (?P<first>\d+) to day (?P<last>\d+), there is an? .+ in (?P<city>\S+)\.",
        r"You .+ (?:in|at) (?P<city>\S+) between day (?P<first>\d+) and day (?P<last>\d+)"
        r"(?: to tour together)?\.",
    )
]


class Stay(NamedTuple):
    city: str
    first: int  # day of arrival, from 1
    last: int  # day of departure


@dataclass(frozen=True, slots=True)
class Problem:
    days: int  # days of the whole trip
    stays: dict[str, int]  # city -> days wanted there
    windows: tuple[Stay, ...]  # days on which one has to be in a city
    flights: frozenset[tuple[str, str]]  # (from, to)
    gold: tuple[tuple[str, int], ...]  # (city, days) in the gold's order; what the official score compares


def stratum(record: dict, where: str) -> str:
    return f"{count(record, 'num_cities', where):2d} cities"


def parse_problem(record: dict, where: str) -> Problem:
    """Raises ValueError that names `where` and the field or the sentence that cannot be read."""
    text = field(record, "prompt_0shot", str, where)
    head, found, tail = text.partition(_FLIGHTS)
    total = _HEADER.match(head)
    if not found or total is None:
        raise ValueError(f"{where}: prompt_0shot={text[:60]!r}, wanted a trip task; fix the record")
    stays: dict[str, int] = {}
    windows = []
    for sentence in re.split(r"(?<=\.)\s+", head[total.end() :].strip()):
        if match := _first_match(_STAYS, sentence):
            stays[match["city"]] = int(match["days"])
        elif match := _first_match(_WINDOWS, sentence):
            windows.append(Stay(match["city"], int(match["first"]), int(match["last"])))
        elif sentence != _FIXED:
            raise ValueError(f"{where}: prompt_0shot says {sentence[:100]!r}, which is no known constraint")
    if len(stays) != int(total[1]) or any(window.city not in stays for window in windows):
        raise ValueError(f"{where}: prompt_0shot gives stays in {len(stays)} of {total[1]} cities")
    flights, gold_stays = _parse_flights(tail, where), _parse_gold(record, where)
    return Problem(int(total[2]), stays, tuple(windows), flights, gold_stays)


def _first_match(patterns: list[re.Pattern], sentence: str) -> re.Match | None:
    return next((match for pattern in patterns if (match := pattern.fullmatch(sentence))), None)


def _parse_flights(tail: str, where: str) -> frozenset[tuple[str, str]]:
    flights = set()
    for pair in tail.strip().partition("\n")[0].rstrip(".").split(", "):
        match = re.fullmatch(r"from (\S+) to (\S+)|(\S+) and (\S+)", pair)
        if match is None:
            raise ValueError(f"{where}: prompt_0shot has the flight {pair[:60]!r}, wanted 'A and B'")
        flights |= {match.group(1, 2)} if match[1] else {match.group(3, 4), match.group(4, 3)}
    return frozenset(flights)


def _parse_gold(record: dict, where: str) -> tuple[tuple[str, int], ...]:
    cities = [city for city in field(record, "cities", str, where).split("**") if city]
    durations = [days for days in field(record, "durations", str, where).split("**") if days]
    if len(cities) != len(durations) or not all(re.fullmatch("[0-9]{1,3}", days) for days in durations):
        raise ValueError(f"{where}: durations={record['durations']!r}, wanted {len(cities)} numbers A**B")
    return tuple(zip(cities, map(int, durations), strict=True))


def official(problem: Problem, answer: object) -> dict[str, bool]:
    """The official score, bug for bug: stays come from the days of the flights, not from the stated
    ranges; a city's origin counts for the first flight only; cities after the gold's last don't hurt.

    parsed  whether a plan was found at all
    """
    try:
        plan = _official_plan(answer) if isinstance(answer, str) else []
    except ValueError:  # a number of more digits than int() takes; the official script stops here
        plan = []
    exact = tuple(plan[: len(problem.gold)]) == problem.gold
    return {"parsed": bool(plan), "exact_match": exact, "pass": exact}


def _official_plan(text: str) -> list[tuple[str, int]]:
    r"""(city, days) of each stay. Lines are read with `\d+-\d+` and with `.*Day (\d+).*from (\w+) to (\w+)`,
    which is written so that a hostile line takes linear time."""
    flights, total, last = [], None, None
    for line in text.split("\n"):
        if header := re.search(r"European cities for (\d+) days", line):
            total = int(header[1])
        if visit := re.search(r"(?<!\d)\d+-(\d+)", line):
            last = int(visit[1])
            if last == total:
                break
        if flight := _last_flight(line):
            flights.append(flight)
    if last is None or not flights:
        return []
    cities = [flights[0][1]] + [flight[2] for flight in flights]
    ends = [1] + [int(flight[0]) for flight in flights] + [last]
    return [(city, b - a + 1) for city, (a, b) in zip(cities, pairwise(ends), strict=True)]


def _last_flight(line: str) -> tuple[str, str, str] | None:
    """(day, from, to) as the greedy pattern finds them: the last flight, and the last day before it."""
    ways = list(re.finditer(r"(?=from (\w+) to (\w+))", line))
    if not ways:
        return None
    days = [match for match in re.finditer(r"Day (\d+)", line) if match.end() <= ways[-1].start()]
    return (days[-1][1], ways[-1][1], ways[-1][2]) if days else None


class Plan(NamedTuple):
    """An answer as written; nothing is filled in."""

    stays: list[tuple[Stay, int | None]]  # and the stated number of days
    flights: list[tuple[int, str, str]]  # day, from, to
    totals: list[int]  # stated days of the whole trip


_LINE = re.compile(r"Days? ([0-9]{1,4})(?:\s?(?:-|–|—|to)\s?([0-9]{1,4}))?\s?:\s*(.*)", re.IGNORECASE)
_FLY = re.compile(r"(?:Fly|Take a (?:direct )?flight) from (\S+) to (\S+?)\.?", re.IGNORECASE)
_VISIT = re.compile(
    r"(?:Arriv(?:e|ing) in (\S+?),? and )?(?:visit|stay in) (\S+?)(?: for ([0-9]{1,4}) days?)?\.?",
    re.IGNORECASE,
)


def read_plan(answer: object) -> Plan:
    """The plan in an answer: lines "Day 1-4: Visit A for 4 days." and "Day 4: Fly from A to B.", with or
    without stars, bullets and quotes; lines whose first words are not "Day" and a number are prose.

    raises  ValueError with a one-line reason if there is none or a line of it cannot be read
    """
    plan = Plan([], [], [])
    for raw in final_text(answer).splitlines():
        line = raw.strip(" \t-•#>_\"'")
        if header := re.search(r"European cities for ([0-9]{1,4}) days", line):
            plan.totals.append(int(header[1]))
        if not re.match(r"[\W_]*days?\s*[0-9]", line, re.IGNORECASE):
            continue
        match = _LINE.fullmatch(line)
        visit = match and _VISIT.fullmatch(match[3])
        flight = match and _FLY.fullmatch(match[3])
        if visit and visit[1] in (None, visit[2]):
            stay = Stay(visit[2], int(match[1]), int(match[2] or match[1]))
            plan.stays.append((stay, int(visit[3]) if visit[3] else None))
        elif flight and match[2] is None:
            plan.flights.append((int(match[1]), flight[1], flight[2]))
        else:
            raise ValueError(f"cannot read {line[:80]!r}")
    if not plan.stays:
        raise ValueError("no line like 'Day 1-4: Visit A for 4 days.'")
    return plan


def verify(problem: Problem, answer: object) -> Verdict:
    """Strict: every trip that keeps the task's constraints passes, whatever the gold says.

    readable  the answer holds a plan; severity 1 in every check if not
    cities    each city once, no other; severity: cities missing, foreign or repeated
    stays     days per city as wanted and as stated; severity: days
    dates     from day 1 to the last, no gap, flights on the day of change; severity: days
    flights   one stated for each change of city, no other, and it exists; severity: number of flights
    windows   in the city on the given days; severity: days outside
    """
    try:
        plan = read_plan(answer)
    except ValueError as error:
        return unreadable(CHECKS, str(error))
    findings = Findings(CHECKS)
    _check_stays(problem, plan, findings)
    _check_dates(problem, plan, findings)
    _check_flights(problem, plan, findings)
    stays = {stay.city: stay for stay, _ in reversed(plan.stays)}
    for window in problem.windows:
        stay, length = stays.get(window.city), window.last - window.first + 1
        missed = length
        if stay:
            missed = min(length, max(0, stay.first - window.first) + max(0, window.last - stay.last))
        findings.add("windows", missed, f"{window.city} on days {window.first}-{window.last}")
    return findings.verdict()


def _check_stays(problem: Problem, plan: Plan, findings: Findings):
    seen = set()
    for stay, stated in plan.stays:
        wanted, length = problem.stays.get(stay.city), stay.last - stay.first + 1
        if wanted is None or stay.city in seen:
            findings.add("cities", 1, f"{stay.city} {'is not wanted' if wanted is None else 'again'}")
        else:
            findings.add("stays", abs(length - wanted), f"{length} days in {stay.city}, wanted {wanted}")
        if stated is not None:
            reason = f"days {stay.first}-{stay.last} in {stay.city} are said to be {stated}"
            findings.add("stays", abs(stated - length), reason)
        seen.add(stay.city)
    for city in problem.stays:
        findings.add("cities", city not in seen, f"{city} is missing")


def _check_dates(problem: Problem, plan: Plan, findings: Findings):
    first, last = plan.stays[0][0].first, plan.stays[-1][0].last
    findings.add("dates", abs(first - 1), f"starts on day {first}, wanted 1")
    findings.add("dates", abs(last - problem.days), f"ends on day {last}, wanted {problem.days}")
    for total in plan.totals:
        findings.add("dates", abs(total - problem.days), f"{total} days in all, wanted {problem.days}")
    for (a, _), (b, _) in pairwise(plan.stays):
        findings.add("dates", abs(b.first - a.last), f"{a.city} ends on day {a.last}, {b.city} {b.first}")


def _check_flights(problem: Problem, plan: Plan, findings: Findings):
    stated: dict[tuple[str, str], list[int]] = {}
    for day, *way in plan.flights:
        stated.setdefault(tuple(way), []).append(day)
    for (a, _), (b, _) in pairwise(plan.stays):
        way = f"from {a.city} to {b.city}"
        findings.add("flights", (a.city, b.city) not in problem.flights, f"there is none {way}")
        days = stated.get((a.city, b.city))
        if days:
            day = days.pop(0)
            findings.add("dates", abs(day - a.last), f"flies {way} on day {day}, wanted {a.last}")
        else:
            findings.add("flights", 1, f"does not fly {way}")
    for (a, b), days in stated.items():
        findings.add("flights", len(days), f"flies from {a} to {b}, which is no change of the stays")


def solutions(problem: Problem) -> Iterator[list[Stay]]:
    """Every valid trip, in the order in which the task names the cities."""

    def extend(trip: list[Stay]) -> Iterator[list[Stay]]:
        if len(trip) == len(problem.stays):
            if trip[-1].last == problem.days:
                yield trip
            return
        first = trip[-1].last if trip else 1
        visited = {stay.city for stay in trip}
        late = [w for w in problem.windows if w.city not in visited and w.first < first]
        for city, length in problem.stays.items():
            if late or city in visited or (trip and (trip[-1].city, city) not in problem.flights):
                continue
            stay = Stay(city, first, first + length - 1)
            pinned = [w for w in problem.windows if w.city == city]
            if all(stay.first <= w.first and w.last <= stay.last for w in pinned):
                yield from extend([*trip, stay])

    return extend([])


def render(problem: Problem, trip: list[Stay]) -> str:
    """The text of a trip, in the gold's words."""
    head = f"Here is the trip plan for visiting the {len(trip)} European cities for {problem.days} days:\n"
    lines = [head]
    for i, (city, first, last) in enumerate(trip):
        if i:
            lines.append(f"**Day {first}:** Fly from {trip[i - 1].city} to {city}.")
        visit = "Visit" if i else f"Arriving in {city} and visit"
        lines.append(f"**Day {first}-{last}:** {visit} {city} for {last - first + 1} days.")
    return "\n".join(lines)


def gold(problem: Problem) -> str:
    """The gold trip's text."""
    trip, day = [], 1
    for city, length in problem.gold:
        trip.append(Stay(city, day, day + length - 1))
        day += length - 1
    return render(problem, trip)


def view(problem: Problem, answer: object) -> PlanView:
    """What a judge sees: the trip in the gold's words. All valid trips are equally good."""
    try:
        plan = read_plan(answer)
    except ValueError:
        return PlanView("No plan.", {"constraints": 0.0})
    verdict = verify(problem, answer)
    share = sum(verdict.checks.values()) / len(CHECKS)
    return PlanView(render(problem, [stay for stay, _ in plan.stays]), {"constraints": share})
