"""NaturalPlan's meetings: from 9:00AM at one place, meet as many friends as possible, each at their own
place, within their own hours, for at least some minutes.

Problem from the record's fields, the two official simulators, a verifier that accepts every best day, and
the set of best days. Times are minutes after midnight.
Benchmark: NaturalPlan (arXiv:2406.04520), evaluate_meeting_planning.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from envs.base import PlanView, Verdict
from envs.naturalplan_answer import Findings, count, field, final_text, unreadable

CHECKS = ("readable", "places", "travel", "times", "windows", "lengths", "friends")
HINT = (
    "Write the plan and nothing else, in this form:\n"
    "SOLUTION:You start at A at 9:00AM. You travel to B in 12 minutes and arrive at 9:12AM. "
    "You wait until 9:30AM. You meet P for 30 minutes from 9:30AM to 10:00AM."
)
DAY = 1440  # minutes
FAULTS = (ValueError, KeyError, IndexError, TypeError)  # what a wrong step can raise in the simulators


class Friend(NamedTuple):
    place: str
    opens: int  # minute from which the friend is there
    closes: int  # minute at which the friend leaves
    length: int  # minutes that a meeting takes at least


@dataclass(slots=True)
class Problem:
    place: str  # where the day starts
    time: int  # minute at which it starts
    friends: dict[str, Friend]
    travel: dict[str, dict[str, int]]  # from -> to -> minutes, not symmetric
    gold: list[str]  # the gold's sentences
    gold_count: int  # friends met by the gold in the official simulation
    most: int | None = None  # filled by most_friends() on first use


class Meeting(NamedTuple):
    friend: str
    start: int  # minute
    end: int


def stratum(record: dict, where: str) -> str:
    return f"{count(record, 'num_people', where):2d} people"


def parse_problem(record: dict, where: str) -> Problem:
    """Raises ValueError that names `where`, field and value."""
    rows = field(record, "constraints", list, where)
    travel = field(record, "dist_matrix", dict, where)
    gold = field(record, "golden_plan", list, where)
    try:
        place, time = rows[0]
        problem = Problem(place, clock(time), {}, travel, gold, 0)
        for name, spot, hours, length in rows[1:]:
            opens, closes = map(clock, hours.split(" to "))
            problem.friends[name] = Friend(spot, opens, closes, length)
            if not 0 < length < DAY:
                raise ValueError(f"{length!r} minutes with {name}")
    except (ValueError, TypeError, AttributeError) as error:
        wanted = "[place, '9:00AM'], then [friend, place, '9:00AM to 1:30PM', minutes]"
        raise ValueError(f"{where}: constraints: {str(error)[:80]}; wanted {wanted}") from None
    _check_travel(problem, where)
    if not all(isinstance(step, str) for step in gold):
        raise ValueError(f"{where}: golden_plan, wanted a list of sentences; fix the record")
    problem.gold_count = _simulate(problem, gold)
    return problem


def _check_travel(problem: Problem, where: str):
    places = {problem.place} | {friend.place for friend in problem.friends.values()}
    for a in places:
        row = problem.travel.get(a)
        for b in places - {a}:
            minutes = row.get(b) if isinstance(row, dict) else None
            if type(minutes) is not int or not 0 < minutes < DAY:
                wanted = "minutes as a whole number; fix the record"
                raise ValueError(f"{where}: dist_matrix[{a!r}][{b!r}]={minutes!r}, wanted {wanted}")


def clock(text: str) -> int:
    """Minutes after midnight of a time like "9:05AM". Raises ValueError for any other form."""
    match = re.fullmatch(r"(1[0-2]|0?[1-9]):([0-5]\d|\d)([AP])M", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text[:20]!r} is no time like 9:05AM")
    return int(match[1]) % 12 * 60 + int(match[2]) + (720 if match[3] in "Pp" else 0)


def show(minute: int) -> str:
    hour, minute = divmod(minute, 60)
    return f"{(hour + 11) % 12 + 1}:{minute:02d}{'PM' if hour % 24 >= 12 else 'AM'}"


def official(problem: Problem, answer: object) -> dict[str, bool]:
    """The official score, bug for bug: a simulation in which a meeting takes the required minimum whatever
    is stated, and which stops at the first wrong step and keeps what it has. Where the official script
    would stop altogether (unknown place or friend, a cut sentence), this counts as a wrong step.

    answer  text, or rows {location, person_name, start_time} (see rows_of), which the official script
            scores with its second validator
    parsed  whether any sentence (or row) has the form of a step
    """
    if (rows := rows_of(answer)) is not None:
        met, steps = _simulate_rows(problem, rows), len(rows)
    else:
        text = answer if isinstance(answer, str) else ""
        text = text.partition("SOLUTION:")[2].strip() if "SOLUTION:" in text else text
        plan = [step for part in text.split(".") if (step := part.strip())]
        met, steps = _simulate(problem, plan), sum(step.startswith(_STEPS) for step in plan)
    as_gold = met == problem.gold_count
    return {"parsed": steps > 0, "as_many_as_gold": as_gold, "pass": as_gold}


def rows_of(answer: object) -> list | None:
    """The rows of a plan in JSON: a list, an object with one under "plan", or the text of either; None for
    any other answer."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("[", "{"):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            return None
    plan = answer.get("plan") if isinstance(answer, dict) else answer
    return plan if isinstance(plan, list) else None


_STEPS = ("You start", "You travel", "You wait", "You meet")


def _between(step: str, before: str, after: str) -> str:
    """The official way to cut a name out of a sentence. Raises IndexError if `before` is not in it."""
    return step.split(before)[1].split(after)[0].strip()


def _simulate(problem: Problem, plan: list[str]) -> int:
    """Friends met before the first wrong step."""
    place, time, met = problem.place, problem.time, set()
    for step in plan:
        try:
            if step.startswith("You start"):
                continue
            elif step.startswith("You travel"):
                target = _between(step, "travel to ", " in")
                place, time = target, time + problem.travel[place][target]
            elif step.startswith("You wait"):
                until = clock(_between(step, "wait until ", "."))
                if until <= time:
                    break
                time = until
            elif step.startswith("You meet"):
                time = _meet(problem, _between(step, "meet ", " for"), place, time, met)
            else:
                break
        except FAULTS:
            break
    return len(met)


def _simulate_rows(problem: Problem, plan: list) -> int:
    """Friends met by a plan in JSON; its first row is the start and is skipped."""
    place, time, met = problem.place, problem.time, set()
    for row in plan[1:]:
        try:
            target = row["location"]
            if target and target != place:
                place, time = target, time + problem.travel[place][target]
            start = clock(row["start_time"])
            if start < time:
                break
            time = start
            if row["person_name"] in problem.friends:
                time = _meet(problem, row["person_name"], place, time, met)
        except FAULTS:
            break
    return len(met)


def _meet(problem: Problem, name: str, place: str, time: int, met: set[str]) -> int:
    """Add `name` to `met`; returns the end of the shortest meeting. Raises one of FAULTS if it cannot be."""
    friend = problem.friends[name]
    end = time + friend.length
    if name in met or place != friend.place or time < friend.opens or end > friend.closes:
        raise ValueError(f"no meeting with {name}")
    met.add(name)
    return end


class Step(NamedTuple):
    """One sentence as written; None is what it leaves out."""

    verb: str  # start | travel | wait | meet
    name: str = ""  # place or friend
    minutes: int | None = None  # stated length of a way or a meeting
    start: int | None = None  # minute: of the start, of the arrival, that is waited for, of a meeting's start
    end: int | None = None  # minute of a meeting's end


_TIME = r"([0-9]{1,2}:[0-9]{2} ?[AP]M)"
_SENTENCES = {
    "start": re.compile(rf"You start at (.+?)()(?: at {_TIME})?()", re.IGNORECASE),
    "travel": re.compile(
        rf"You travel to (.+?)(?: in ([0-9]{{1,4}}) minutes?)?(?:,? and arrive(?: there)? at {_TIME})?()",
        re.IGNORECASE,
    ),
    "wait": re.compile(rf"You wait until()() {_TIME}()", re.IGNORECASE),
    "meet": re.compile(
        rf"You meet (.+?)(?: for ([0-9]{{1,4}}) minutes?)?(?: from {_TIME} to {_TIME})?", re.IGNORECASE
    ),
}


def read_steps(problem: Problem, answer: object) -> list[Step]:
    """The steps of an answer: sentences that open with "You start", "travel", "wait" or "meet". What
    stands between them is prose. Or the rows of a plan in JSON.

    raises  ValueError with a one-line reason if there is no step or one of them cannot be read
    """
    if (rows := rows_of(answer)) is not None:
        return _read_rows(problem, rows)
    text = final_text(answer).partition("You are visiting San Francisco")[0]
    text = re.sub(r"\b([AaPp])\.[Mm]\.", r"\1M", text)
    steps = []
    for part in re.split(r"(?=\bYou (?:start|travel|wait|meet)\b)", text)[1:]:
        sentence = re.split(r"[.\n]", part, maxsplit=1)[0].strip(" \t\r,;")
        verb = re.match(r"You (\w+)", sentence)[1]
        match = _SENTENCES[verb].fullmatch(sentence)
        if match is None:
            raise ValueError(f"cannot read {sentence[:80]!r}")
        name, minutes, start, end = match.groups()
        times = [clock(time.replace(" ", "")) if time else None for time in (start, end)]
        steps.append(Step(verb, name, int(minutes) if minutes else None, *times))
    if not steps:
        raise ValueError("no sentence like 'You meet P for 30 minutes from 9:30AM to 10:00AM.'")
    return steps


def _read_rows(problem: Problem, rows: list) -> list[Step]:
    steps: list[Step] = []
    place = problem.place
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("start_time"), str):
            raise ValueError(f"row {i + 1}: wanted location, person_name and start_time")
        target, name = row.get("location") or place, row.get("person_name") or "N/A"
        if not isinstance(target, str) or not isinstance(name, str):
            raise ValueError(f"row {i + 1}: location and person_name are not text")
        time = clock(row["start_time"].replace(" ", ""))
        if i == 0:
            steps.append(Step("start", target, None, time))
        elif target != place:
            steps.append(Step("travel", target))
        steps.append(Step("wait", "", None, time))
        if name != "N/A":
            steps.append(Step("meet", name))
        place = target
    if not steps:
        raise ValueError("the plan has no rows")
    return steps


def verify(problem: Problem, answer: object) -> Verdict:
    """Strict: every day that keeps the constraints and meets as many friends as can be met passes. Stated
    times count, where there are any, so meetings may be longer than the minimum.

    readable  the answer holds a plan; severity 1 in every check if not
    places    known places and friends, each friend once and where they are; severity: number of errors
    travel    stated minutes and arrival are those of the travel distances; severity: minutes
    times     nothing happens before it can; severity: minutes too early
    windows   meetings within the friend's hours; severity: minutes outside
    lengths   at least the minimum, and as stated; severity: minutes
    friends   number of valid meetings; severity: friends missing to the most that can be met (to the
              gold's number while the answer has fewer)
    """
    try:
        steps = read_steps(problem, answer)
    except ValueError as error:
        return unreadable(CHECKS, str(error))
    findings = Findings(CHECKS)
    met = _follow(problem, steps, findings)
    wanted = problem.gold_count if met < problem.gold_count else most_friends(problem, met)
    findings.add("friends", max(0, wanted - met), f"meets {met}, wanted {wanted}")
    return findings.verdict()


def _follow(problem: Problem, steps: list[Step], findings: Findings) -> int:
    """Go through the day; returns the number of friends met without an error of the meeting itself."""
    place, time, seen, valid = problem.place, problem.time, set(), 0
    for step in steps:
        start = time if step.start is None else step.start
        if step.verb == "start":
            findings.add("places", step.name != problem.place, f"starts at {step.name}")
            findings.add("times", abs(start - problem.time), f"starts at {show(start)}")
        elif step.verb == "travel":
            place, time = _travel(problem, step, place, time, findings)
        elif step.verb == "wait":
            findings.add("times", max(0, time - start), f"waits until {show(start)} at {show(time)}")
            time = max(time, start)
        else:
            faults = sum(findings.severity.values())
            end = _meet_as_stated(problem, step, place, time, findings)
            findings.add("places", step.name in seen, f"meets {step.name} again")
            seen.add(step.name)
            valid += sum(findings.severity.values()) == faults
            time = max(time, end)
    return valid


def _travel(problem: Problem, step: Step, place: str, time: int, findings: Findings) -> tuple[str, int]:
    """Place and minute after the way, which takes its true time whatever is stated."""
    minutes = 0 if step.name == place else problem.travel.get(place, {}).get(step.name)
    if minutes is None:
        findings.add("places", 1, f"no way from {place} to {step.name}")
        return place, time
    arrival = time + minutes
    stated = minutes if step.minutes is None else step.minutes
    wrong = max(abs(stated - minutes), 0 if step.start is None else abs(step.start - arrival))
    reason = f"{minutes} minutes from {place} to {step.name}, arrival {show(arrival)}"
    findings.add("travel", wrong, reason)
    return step.name, arrival


def _meet_as_stated(problem: Problem, step: Step, place: str, time: int, findings: Findings) -> int:
    """Check one meeting; returns its end."""
    friend = problem.friends.get(step.name)
    start = time if step.start is None else step.start
    end = step.end
    if end is None:
        end = start + (friend.length if friend and step.minutes is None else step.minutes or 0)
    stated = end - start if step.minutes is None else step.minutes
    findings.add("times", max(0, time - start), f"meets {step.name} at {show(start)}, free at {show(time)}")
    findings.add("lengths", abs(end - start - stated), f"{step.name}: stated {stated}, is {end - start}")
    if friend is None:
        findings.add("places", 1, f"nobody is called {step.name}")
        return end
    findings.add("places", place != friend.place, f"meets {step.name} at {place}, not {friend.place}")
    short = max(0, friend.length - (end - start))
    findings.add("lengths", short, f"{end - start} minutes with {step.name}, wanted {friend.length}")
    outside = max(0, friend.opens - start) + max(0, end - friend.closes)
    hours = f"{show(friend.opens)} to {show(friend.closes)}"
    findings.add("windows", outside, f"{step.name} from {show(start)} to {show(end)}, there from {hours}")
    return end


def most_friends(problem: Problem, reached: int = 0) -> int:
    """The most friends that can be met, going straight from one to the next. Found by the earliest minute
    at which each set of friends can have been met, for each last one; kept for the next call.

    reached  a number known to be possible: if it is everyone, nothing is searched
    """
    if reached >= len(problem.friends):
        return len(problem.friends)
    if problem.most is None:
        layer = {(frozenset(), problem.place): problem.time}
        problem.most = 0
        while layer := _one_more(problem, layer):
            problem.most += 1
    return problem.most


def _one_more(problem: Problem, layer: dict) -> dict:
    """(friends met, place) -> earliest minute, for every set with one friend more."""
    found: dict = {}
    for (met, place), time in layer.items():
        for name, friend in problem.friends.items():
            if name not in met and (end := _end(problem, friend, place, time)) is not None:
                key = (met | {name}, friend.place)
                found[key] = min(end, found.get(key, DAY * 2))
    return found


def _end(problem: Problem, friend: Friend, place: str, time: int) -> int | None:
    """Earliest end of a meeting with `friend` for someone at `place`; None if it is too late for it."""
    way = 0 if place == friend.place else problem.travel[place][friend.place]
    end = max(time + way, friend.opens) + friend.length
    return end if end <= friend.closes else None


def solutions(problem: Problem) -> Iterator[list[Meeting]]:
    """Every order of friends that meets the most of them, each at the earliest time and for the minimum,
    in the order of the constraints."""
    wanted = most_friends(problem)

    def extend(day: list[Meeting], place: str, time: int) -> Iterator[list[Meeting]]:
        if len(day) == wanted:
            yield day
            return
        met = {meeting.friend for meeting in day}
        ends = {
            name: end
            for name, friend in problem.friends.items()
            if name not in met and (end := _end(problem, friend, place, time)) is not None
        }
        if len(day) + len(ends) < wanted:
            return
        for name, end in ends.items():
            friend = problem.friends[name]
            yield from extend([*day, Meeting(name, end - friend.length, end)], friend.place, end)

    return extend([], problem.place, problem.time)


def render(problem: Problem, day: list[Meeting]) -> str:
    """The text of a day, in the gold's words."""
    place, time = problem.place, problem.time
    steps = [f"SOLUTION:You start at {place} at {show(time)}."]
    for name, start, end in day:
        target = problem.friends[name].place
        if target != place:
            minutes = problem.travel[place][target]
            place, time = target, time + minutes
            steps.append(f"You travel to {place} in {minutes} minutes and arrive at {show(time)}.")
        if start > time:
            steps.append(f"You wait until {show(start)}.")
        steps.append(f"You meet {name} for {end - start} minutes from {show(start)} to {show(end)}.")
        time = end
    return " ".join(steps)


def gold(problem: Problem) -> str:
    """The gold day's text."""
    return "SOLUTION:" + " ".join(problem.gold)


def view(problem: Problem, answer: object) -> PlanView:
    """What a judge sees: the steps in plain words. friends: share of all friends met validly."""
    try:
        steps = read_steps(problem, answer)
    except ValueError:
        return PlanView("No plan.", {"friends": 0.0})
    met = _follow(problem, steps, Findings(CHECKS))
    lines = []
    for step in steps:
        times = [show(minute) for minute in (step.start, step.end) if minute is not None]
        lines.append(" ".join(filter(None, [step.verb, step.name, " to ".join(times)])))
    return PlanView("\n".join(lines), {"friends": met / max(1, len(problem.friends))})
