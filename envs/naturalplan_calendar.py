"""NaturalPlan's calendars: find a time on the offered days at which everybody is free, by everybody's wishes.
All wishes are binding.

Problem from the task's text, the official exact match, a verifier that accepts every feasible time, and the
set of feasible times. Times are minutes after midnight.
Benchmark: NaturalPlan (arXiv:2406.04520), evaluate_calendar_scheduling.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from envs.base import PlanView, Verdict
from envs.naturalplan_answer import Findings, count, field, final_text, unreadable

CHECKS = ("readable", "day", "hours", "length", "busy", "wishes", "earliest")
HINT = "Answer with the time and nothing else, in this form:\nHere is the proposed time: Monday, 9:00 - 9:30"
DAY = 1440  # minutes
GRID = 30  # minutes; all schedules and wishes of the benchmark lie on it
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_DAY = "(?:" + "|".join(WEEK) + ")"
_CLOCK = "[0-9]{1,2}:[0-9]{2}"
_TASK = re.compile(
    rf"You need to schedule a meeting for (?P<people>[^.]+) for (?P<length>half an hour|one hour) between "
    rf"the work hours of (?P<opens>{_CLOCK}) to (?P<closes>{_CLOCK}) on (?:either )?(?P<days>[^.]+)\."
)
_SCHEDULES = re.compile(r"Here are the existing schedules for everyone during the days?:")
_FREE = re.compile(
    r"(\w+?)(?:'s calendar is wide open the entire| is free the entire| ?has no meetings the whole)"
    r" (?:day|week)\."
)
_BUSY = re.compile(r"(\w+) (?:is busy on|has meetings on|has blocked their calendar on) (.+?);?")
_SPAN = re.compile(rf"(?:({_DAY}) during )?({_CLOCK}) to ({_CLOCK})")
_LIMIT = rf"(?P<day>{_DAY})(?: (?P<side>before|after) (?P<time>{_CLOCK}))?\."
_WISH = re.compile(
    r"(?P<name>\w+) (?:would rather not meet|do(?:es)? not want to meet|can ?not meet|"
    rf"would like to avoid more meetings) on {_LIMIT}"
)
_MORE = re.compile(_LIMIT)
_EARLIEST = re.compile(
    r"(?:The group would like to meet|You would like to schedule the meeting)"
    r" at their (?:earlist|earliest) availability\."
)
_END = "Find a time that works for everyone's schedule and constraints."


class Slot(NamedTuple):
    day: str
    start: int  # minute
    end: int


@dataclass(frozen=True, slots=True)
class Problem:
    length: int  # minutes of the meeting
    days: tuple[str, ...]  # offered, in order
    opens: int  # minute at which work starts
    closes: int
    busy: dict[str, list[Slot]]  # person -> taken
    wishes: tuple[tuple[str, Slot], ...]  # person, time in which no meeting may lie
    earliest: bool  # the first feasible time is wanted
    gold: str


def stratum(record: dict, where: str) -> str:
    people, days = count(record, "num_people", where), count(record, "num_days", where)
    return f"{people:2d} people {days} days"


def parse_problem(record: dict, where: str) -> Problem:
    """Raises ValueError that names `where` and the field or the sentence that cannot be read."""
    prompt = field(record, "prompt_0shot", str, where)
    text = prompt.rpartition("TASK:")[2].rpartition("SOLUTION:")[0].strip()
    head, schedules, wanted = [*re.split(r"\s*\n\s*\n\s*", text, maxsplit=2), "", ""][:3]
    task, (title, *lines) = _TASK.fullmatch(head), [line.strip() for line in schedules.split("\n")]
    if task is None or not _SCHEDULES.fullmatch(title):
        raise ValueError(f"{where}: prompt_0shot={text[:80]!r}, wanted a calendar task; fix the record")
    people, days = (tuple(re.split(", | and | or ", task[key])) for key in ("people", "days"))
    busy = dict(_parse_schedule(line, where) for line in lines)
    if set(busy) != set(people) or not set(days) <= set(WEEK):
        raise ValueError(f"{where}: prompt_0shot has schedules of {', '.join(busy)}; wanted {task['people']}")
    wishes, earliest = _parse_wishes(wanted, where)
    if not {name for name, _ in wishes} <= set(people):
        raise ValueError(f"{where}: prompt_0shot has wishes of {wishes[0][0]}; wanted {task['people']}")
    length = 60 if task["length"] == "one hour" else 30
    opens, closes = minute(task["opens"]), minute(task["closes"])
    gold_text = field(record, "golden_plan", str, where)
    return Problem(length, days, opens, closes, busy, tuple(wishes), earliest, gold_text)


def _parse_schedule(line: str, where: str) -> tuple[str, list[Slot]]:
    if match := _FREE.fullmatch(line):
        return match[1], []
    match = _BUSY.fullmatch(line)
    slots: list[Slot] = []
    for part in match[2].split(", ") if match else [""]:
        span = _SPAN.fullmatch(part)
        if span is None or not (span[1] or slots):
            raise ValueError(f"{where}: prompt_0shot says {line[:100]!r}, which is no known schedule")
        slots.append(Slot(span[1] or slots[-1].day, minute(span[2]), minute(span[3])))
    return match[1], slots


def _parse_wishes(text: str, where: str) -> tuple[list[tuple[str, Slot]], bool]:
    """Forbidden times, and whether the earliest is wanted. A bare "Tuesday." goes on with the wish before."""
    wishes: list[tuple[str, Slot]] = []
    earliest = False
    for sentence in re.split(r"(?<=\.)\s+", text.strip()):
        match = _WISH.fullmatch(sentence) or (_MORE.fullmatch(sentence) if wishes else None)
        if match:
            name = match.groupdict().get("name") or wishes[-1][0]
            low = minute(match["time"]) if match["side"] == "after" else 0
            high = minute(match["time"]) if match["side"] == "before" else DAY
            wishes.append((name, Slot(match["day"], low, high)))
        elif _EARLIEST.fullmatch(sentence):
            earliest = True
        elif sentence != _END:
            raise ValueError(f"{where}: prompt_0shot says {sentence[:100]!r}, which is no known wish")
    return wishes, earliest


def minute(text: str) -> int:
    """Minutes after midnight of a time like "14:30", which may be past the end of the day."""
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def show(slot: Slot) -> str:
    times = [f"{time // 60}:{time % 60:02d}" for time in (slot.start, slot.end)]
    return f"{slot.day}, {times[0]} - {times[1]}"


def official(problem: Problem, answer: object) -> dict[str, bool]:
    """The official score, bug for bug: the first text like "Monday, 9:00 - 9:30" is compared with the gold's,
    and minutes other than 30 count as 0.

    parsed  whether there is such a text
    """
    found = _official_time(answer) if isinstance(answer, str) else None
    exact = found == _official_time(problem.gold)
    return {"parsed": found is not None, "exact_match": exact, "pass": exact}


def _official_time(text: str) -> tuple[str, float, float] | None:
    time = "([0-9]+):([0-9]+)"
    match = re.search(rf"(?<![A-Za-z])([A-Za-z]+), {time} - {time}", text)
    if match is None:
        return None
    start, end = (float(match[i]) + (0.5 if match[i + 1] == "30" else 0.0) for i in (2, 4))
    return match[1], start, end


_PHRASE = re.compile("proposed time", re.IGNORECASE)
_ANSWER = re.compile(
    r"\b([A-Za-z]+day)\b,?(?: at| from| during)? ?([0-9]+:[0-9]+) ?(?:-|–|—|to|until) ?([0-9]+:[0-9]+)"
    r"(?![0-9:])(?! ?[ap]\.?m)",
    re.IGNORECASE,
)


def read_time(answer: object) -> Slot:
    """The one time that an answer proposes, e.g. "Monday, 12:00 - 12:30": the first after each "proposed
    time" if those words occur, else any in the text.

    raises  ValueError with a one-line reason if there is none, or more than one
    """
    text = final_text(answer)
    matches = list(_ANSWER.finditer(text))
    if phrases := list(_PHRASE.finditer(text)):
        after = [[m for m in matches if m.start() >= phrase.end()] for phrase in phrases]
        matches = [found[0] for found in after if found]
    for time in (m[side] for m in matches for side in (2, 3)):
        if not re.fullmatch(_CLOCK, time):
            raise ValueError(f"{time[:20]!r} is no time of day")
    times = {Slot(m[1].capitalize(), minute(m[2]), minute(m[3])) for m in matches}
    if not times:
        raise ValueError("no time like 'Monday, 9:00 - 9:30'")
    if len(times) > 1:
        raise ValueError(f"{len(times)} different times; one is wanted")
    return times.pop()


def verify(problem: Problem, answer: object) -> Verdict:
    """Strict: every feasible time passes, on whatever minute it starts.

    readable  the answer proposes one time; severity 1 in every check if not
    day       one of those offered; severity: minutes of the meeting
    hours     within work hours; severity: minutes outside
    length    as wanted; severity: minutes
    busy      nobody has another meeting; severity: minutes of overlap, over all people
    wishes    no wish is broken; severity: minutes in forbidden times
    earliest  where the earliest time is wanted, not later than it; severity: minutes of work time later
    """
    try:
        slot = read_time(answer)
    except ValueError as error:
        return unreadable(CHECKS, str(error))
    return _check(problem, slot)


def _check(problem: Problem, slot: Slot) -> Verdict:
    findings = Findings(CHECKS)
    length = slot.end - slot.start
    findings.add("length", abs(length - problem.length), f"{length} minutes, wanted {problem.length}")
    if slot.day not in problem.days:
        findings.add("day", max(1, length), f"{slot.day}, wanted one of {', '.join(problem.days)}")
    outside = min(max(1, length), max(0, problem.opens - slot.start) + max(0, slot.end - problem.closes))
    findings.add("hours", outside, f"{show(slot)} is {outside} minutes outside work hours")
    for name, taken in problem.busy.items():
        for other in taken:
            findings.add("busy", _overlap(slot, other), f"{name} is busy on {show(other)}")
    for name, forbidden in problem.wishes:
        findings.add("wishes", _overlap(slot, forbidden), f"{name} does not want {show(forbidden)}")
    first = next(solutions(problem), None) if problem.earliest and slot.day in problem.days else None
    if first is not None:
        later = max(0, _work_minute(problem, slot) - _work_minute(problem, first))
        findings.add("earliest", later, f"{show(first)} would be earlier")
    return findings.verdict()


def _work_minute(problem: Problem, slot: Slot) -> int:
    return problem.days.index(slot.day) * (problem.closes - problem.opens) + slot.start


def _overlap(slot: Slot, other: Slot) -> int:
    """Minutes that both share."""
    return max(0, min(slot.end, other.end) - max(slot.start, other.start)) if slot.day == other.day else 0


def solutions(problem: Problem, step: int = GRID) -> Iterator[Slot]:
    """Every feasible time that starts on a multiple of `step` minutes, in order; only the first where the
    earliest is wanted. With the default it is the benchmark's set; step=1 gives all."""
    taken = [slot for slots in problem.busy.values() for slot in slots] + [slot for _, slot in problem.wishes]
    for day in problem.days:
        for start in range(problem.opens, problem.closes - problem.length + 1, step):
            slot = Slot(day, start, start + problem.length)
            if not any(_overlap(slot, other) for other in taken):
                yield slot
                if problem.earliest:
                    return


def render(problem: Problem, slot: Slot) -> str:
    """The text of a time, in the gold's words."""
    return f"Here is the proposed time: {show(slot)} "


def gold(problem: Problem) -> str:
    """The gold's text."""
    return problem.gold


def view(problem: Problem, answer: object) -> PlanView:
    """What a judge sees: the time. early: share of the offered work time that lies after its start."""
    try:
        slot = read_time(answer)
    except ValueError:
        return PlanView("No plan.", {"early": 0.0})
    if slot.day not in problem.days:
        return PlanView(show(slot), {"early": 0.0})
    span = problem.closes - problem.opens
    early = 1 - (_work_minute(problem, slot) - problem.opens) / (span * len(problem.days))
    return PlanView(show(slot), {"early": min(1.0, max(0.0, early))})
