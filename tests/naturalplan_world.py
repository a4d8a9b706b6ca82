"""Made-up NaturalPlan records in the exact formats, and plain brute force over their constraints: written
without the code under test, day by day and minute by minute."""

import itertools
import json
import random
import re

CITIES = ["Brno", "Cadiz", "Dresden", "Elblag", "Faro", "Ghent", "Hasselt", "Ivrea"]
FRIENDS = ["Ada", "Bruno", "Chloe", "Dario", "Elif", "Farid"]
PLACES = ["Harbour", "Old Mill", "Queen's Gate", "The Meadow", "Station-North", "Upper Town", "Lido"]
WEEK = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
STAY = [
    "You would like to visit {c} for {k} days.",
    "You want to spend {k} days in {c}.",
    "You plan to stay in {c} for {k} days.",
]
WINDOW = [
    "During day {a} and day {b}, you have to attend a conference in {c}.",
    "You would like to meet your friends at {c} between day {a} and day {b} to tour together.",
    "You plan to visit relatives in {c} between day {a} and day {b}.",
    "You want to meet a friend in {c} between day {a} and day {b}.",
    "You have to attend a workshop in {c} between day {a} and day {b}.",
    "From day {a} to day {b}, there is a annual show you want to attend in {c}.",
    "You are going to attend a wedding in {c} between day {a} and day {b}.",
]
MISS = ["would rather not meet", "do not want to meet", "can not meet", "would like to avoid more meetings"]


def trip_text(trip, days):
    """A trip [(city, first, last)] in the gold's words."""
    lines = [f"Here is the trip plan for visiting the {len(trip)} European cities for {days} days:\n"]
    for i, (city, a, b) in enumerate(trip):
        if i:
            lines.append(f"**Day {a}:** Fly from {trip[i - 1][0]} to {city}.")
        lines.append(f"**Day {a}-{b}:** {'Visit' if i else f'Arriving in {city} and visit'} {city} for "
                     f"{b - a + 1} days.")  # fmt: skip
    return "\n".join(lines)


def make_trip(rng, num=None):
    """(record, facts): facts are days, stays, windows, flights as the generator chose them."""
    cities = rng.sample(CITIES, num or rng.randint(3, 6))
    lengths = [rng.randint(2, 5) for _ in cities]
    trip, day = [], 1
    for city, length in zip(cities, lengths, strict=True):
        trip.append((city, day, day + length - 1))
        day += length - 1
    windows = [stay for stay in trip if rng.random() < 0.3]
    pairs = {p for p in itertools.permutations(cities, 2) if rng.random() < 0.25}
    pairs |= set(itertools.pairwise(cities))
    both = {(a, b) for a, b in pairs if (b, a) in pairs and a < b}
    ways = [f"{a} and {b}" for a, b in sorted(both)]
    ways += [f"from {a} to {b}" for a, b in sorted(pairs) if (b, a) not in pairs]
    said = [(city, rng.choice(STAY).format(c=city, k=k)) for city, k in zip(cities, lengths, strict=True)]
    sentences = []
    for city, sentence in rng.sample(said, len(said)):
        sentences.append(sentence)
        sentences += [rng.choice(WINDOW).format(c=c, a=a, b=b) for c, a, b in windows if c == city]
    rng.shuffle(ways)
    text = (
        f"You plan to visit {len(cities)} European cities for {day} days in total. You only take direct "
        f"flights to commute between cities. {' '.join(sentences)}\n\nHere are the cities that have direct "
        f"flights:\n{', '.join(ways)}.\n\nFind a trip plan of visiting the cities for {day} days by taking "
        "direct flights to commute between them."
    )
    record = {
        "num_cities": str(len(cities)),
        "cities": "**".join(cities),
        "durations": "**".join(map(str, lengths)),
        "prompt_0shot": text,
        "prompt_5shot": f"You are an expert.\n\nTASK: {text}\nSOLUTION:",
        "golden_plan": trip_text(trip, day),
        "pred_5shot_pro": trip_text(trip, day) + " \n",
    }
    facts = {"days": day, "stays": dict(zip(cities, lengths, strict=True)), "windows": windows}
    return record, {**facts, "flights": pairs}


def trip_is_valid(facts, trip):
    """Day by day: where one is on each day of [(city, first, last)]."""
    where = [{city for city, a, b in trip if a <= day <= b} for day in range(1, facts["days"] + 1)]
    visited = [city for city, _, _ in trip]
    legs = list(itertools.pairwise(trip))
    return (
        sorted(visited) == sorted(facts["stays"])
        and all(where)
        and all(1 <= a <= b <= facts["days"] for _, a, b in trip)
        and all(sum(c in day for day in where) == k for c, k in facts["stays"].items())
        and all(a[2] == b[1] and (a[0], b[0]) in facts["flights"] for a, b in legs)
        and all(c in where[day - 1] for c, a, b in facts["windows"] for day in range(a, b + 1))
    )


def all_trips(facts):
    """Every order of the cities that is a valid trip."""
    for order in itertools.permutations(facts["stays"]):
        trip, day = [], 1
        for city in order:
            trip.append((city, day, day + facts["stays"][city] - 1))
            day = trip[-1][2]
        if trip_is_valid(facts, trip):
            yield trip


def read_trip(text, facts):
    """([(city, first, last)], [(day, from, to)], extra numbers) of an answer's "Day" lines, read loosely."""
    trip, flights, lengths = [], [], []
    for line in text.splitlines():
        if re.match(r"[\W_]*days?\s*[0-9]", line, re.IGNORECASE):
            numbers = [int(x) for x in re.findall(r"[0-9]+", line)]
            names = [w for w in re.findall(r"[^\W_]+", line) if w in facts["stays"]]
            if "from" in line.lower():
                flights.append((numbers[0], *names))
            else:
                trip.append((names[-1], numbers[0], numbers[1]))
                lengths.append((numbers[1] - numbers[0] + 1, *numbers[2:]))
    return trip, flights, lengths


def at(minute):
    """Minutes after midnight as "9:05AM"."""
    return f"{(minute // 60 + 11) % 12 + 1}:{minute % 60:02d}{'PM' if minute >= 720 else 'AM'}"


def minutes(text):
    hour, minute = text[:-2].split(":")
    return int(hour) % 12 * 60 + int(minute) + (720 if text[-2] in "Pp" else 0)


def follow(record, order):
    """[(friend, start, end)] of meeting friends in this order at the earliest, or None if it is too late."""
    rows = {row[0]: row for row in record["constraints"][1:]}
    place, time, day = record["constraints"][0][0], 540, []
    for name in order:
        _, spot, hours, length = rows[name]
        opens, closes = map(minutes, hours.split(" to "))
        start = max(time + (record["dist_matrix"][place][spot] if place != spot else 0), opens)
        if start + length > closes:
            return None
        day.append((name, start, start + length))
        place, time = spot, start + length
    return day


def best_orders(record):
    """Every order that meets as many friends as possible."""
    names = [row[0] for row in record["constraints"][1:]]
    for size in range(len(names), 0, -1):
        found = [order for order in itertools.permutations(names, size) if follow(record, order)]
        if found:
            return found
    return [()]


def meeting_steps(record, day):
    """The sentences of [(friend, start, end)]."""
    rows = {row[0]: row for row in record["constraints"][1:]}
    place, time = record["constraints"][0][0], 540
    steps = [f"You start at {place} at 9:00AM."]
    for name, start, end in day:
        spot = rows[name][1]
        if spot != place:
            way = record["dist_matrix"][place][spot]
            place, time = spot, time + way
            steps.append(f"You travel to {place} in {way} minutes and arrive at {at(time)}.")
        if start > time:
            steps.append(f"You wait until {at(start)}.")
        steps.append(f"You meet {name} for {end - start} minutes from {at(start)} to {at(end)}.")
        time = end
    return steps


def make_meeting(rng, num=None):
    """(record, facts): facts are the number of friends that can be met and the orders that do."""
    names = rng.sample(FRIENDS, num or rng.randint(1, 5))
    spots = rng.sample(PLACES, len(names) + 1)
    rows = [[spots[0], "9:00AM"]]
    for name, spot in zip(names, spots[1:], strict=True):
        opens = rng.randrange(480, 1000, 15)
        closes = opens + rng.randrange(135, 360, 15)
        rows.append([name, spot, f"{at(opens)} to {at(closes)}", rng.choice([15, 30, 45, 90, 120])])
    travel = {a: {b: rng.randint(5, 30) for b in spots if b != a} for a in spots}
    ways = "\n".join(f"{a} to {b}: {x}." for a, row in travel.items() for b, x in row.items())
    said = " ".join(
        f"{name} will be at {spot} from {hours}. You'd like to meet {name} for a minimum of {length} minutes."
        for name, spot, hours, length in rows[1:]
    )
    text = (
        "You are visiting San Francisco for the day and want to meet as many friends as possible. Solve the "
        "problem by considering various different schedules and picking the best one to optimize your "
        f"goals.\n\nTravel distances (in minutes):\n{ways}\n\nCONSTRAINTS: You arrive at {spots[0]} at "
        f"9:00AM. {said}\n\nYour response should start with 'SOLUTION:'"
    )
    record = {"num_people": len(names), "constraints": rows, "dist_matrix": travel}
    orders = best_orders(record)
    record["golden_plan"] = meeting_steps(record, follow(record, orders[0]))
    record["prompt_0shot"] = text + "."
    record["prompt_5shot"] = text + ", and follow the same solution format as shown above."
    record["pred_5shot_pro"] = f"SOLUTION:{' '.join(record['golden_plan'])} \n"
    return record, {"most": len(orders[0]), "orders": orders}


def read_meetings(text, record):
    """[(friend, place, start, end)] of an answer, following its stated times; None if the way to one of
    them, or to a time that is waited for, takes longer than there is."""
    rows = {row[0]: row for row in record["constraints"][1:]}
    place, time, day = record["constraints"][0][0], 540, []
    text = re.sub(r"(?i)\b([ap])\.m\.", r"\1M", text)
    for verb, rest in re.findall(r"\bYou (travel|wait|meet)\b((?:(?!\bYou )[^.\n])*)", text):
        times = [minutes(t.replace(" ", "")) for t in re.findall(r"(?i)[0-9]+:[0-9]+ ?[ap]m", rest)]
        if verb == "travel":
            target = max((p for p in places_of(record) if p in rest), key=len)
            way = record["dist_matrix"][place][target] if target != place else 0
            place, time = target, time + way
            if times and times[0] != time:
                return None
        elif verb == "wait":
            if times[0] < time:
                return None
            time = times[0]
        else:
            name = next(n for n in rows if re.search(rf"\b{n}\b", rest))
            length = re.search(r"for ([0-9]+) minute", rest)
            start = times[0] if times else time
            end = times[1] if times else start + (int(length[1]) if length else rows[name][3])
            if start < time or (length and int(length[1]) != end - start):
                return None
            day.append((name, place, start, end))
            time = end
    return day


def places_of(record):
    return {record["constraints"][0][0]} | {row[1] for row in record["constraints"][1:]}


def meetings_are_valid(record, facts, day):
    rows = {row[0]: row for row in record["constraints"][1:]}
    if day is None or len(day) < facts["most"] or len({name for name, *_ in day}) < len(day):
        return False
    for name, place, start, end in day:
        opens, closes = map(minutes, rows[name][2].split(" to "))
        if place != rows[name][1] or start < opens or end > closes or end - start < rows[name][3]:
            return False
    return True


def hhmm(minute):
    return f"{minute // 60}:{minute % 60:02d}"


def free_starts(facts):
    """[(day, minute)] of every feasible start, minute by minute."""
    found = []
    for day in facts["days"]:
        taken = {m for d, a, b in facts["taken"] if d == day for m in range(a, b)}
        found += [
            (day, start)
            for start in range(540, 1020 - facts["length"] + 1)
            if taken.isdisjoint(range(start, start + facts["length"]))
        ]
    return found[:1] if facts["earliest"] else found


def _calendar_facts(rng):
    days = WEEK[: rng.randint(1, 4)]
    names = rng.sample(FRIENDS, rng.randint(2, 4))
    taken = {name: [] for name in names}
    for name in names[:-1]:
        for day in days:
            cuts = sorted(rng.sample(range(540, 1021, 30), 2 * rng.randint(1, 5)))
            taken[name] += [(day, a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    wished = rng.sample(days, rng.randint(0, min(2, len(days))))
    sides = ["", " before ", " after "]
    wishes = [(rng.choice(names), day, rng.choice(sides), 30 * rng.randint(19, 33)) for day in wished]
    spans = {"": (0, 1440), " before ": (0, None), " after ": (None, 1440)}
    limits = [(d, *(t if x is None else x for x in spans[side])) for _, d, side, t in wishes]
    facts = {"days": days, "length": rng.choice([30, 60]), "earliest": rng.random() < 0.2}
    facts["taken"] = [slot for slots in taken.values() for slot in slots] + limits
    return names, taken, wishes, facts


def make_calendar(rng):
    """(record, facts): facts are days, length in minutes, what is taken as (day, from, to), earliest."""
    names, taken, wishes, facts = _calendar_facts(rng)
    while not free_starts(facts):
        names, taken, wishes, facts = _calendar_facts(rng)
    days, span = facts["days"], "week" if len(facts["days"]) > 1 else "day"
    free = rng.choice([" is free the entire {}.", "'s calendar is wide open the entire {}.",
                       "has no meetings the whole {}."])  # fmt: skip
    lines = []
    for name in names:
        per_day = [
            f"{day} during " + ", ".join(f"{hhmm(a)} to {hhmm(b)}" for d, a, b in taken[name] if d == day)
            for day in days
        ]
        how = rng.choice(["is busy on", "has meetings on", "has blocked their calendar on"])
        lines.append(f"{name} {how} {', '.join(per_day)}; " if taken[name] else name + free.format(span))
    said, last = [], None
    for name, day, side, time in wishes:
        limit = f"{day}{side}{hhmm(time) if side else ''}. "
        said.append(limit if name == last else f"{name} {rng.choice(MISS)} on {limit}")
        last = name
    if facts["earliest"]:
        said.append("The group would like to meet at their earlist availability.\n")
    offered = "either " + ", ".join(days[:-1]) + " or " + days[-1] if len(days) > 1 else days[0]
    long = {30: "half an hour", 60: "one hour"}[facts["length"]]
    text = (
        f"TASK: You need to schedule a meeting for {', '.join(names[:-1])} and {names[-1]} for {long} "
        f"between the work hours of 9:00 to 17:00 on {offered}. \n\nHere are the existing schedules for "
        f"everyone during the day{'s' if len(days) > 1 else ''}: \n"
        + "\n".join(lines)
        + f"\n\n{''.join(said)}Find a "
        "time that works for everyone's schedule and constraints. \nSOLUTION: "
    )
    day, start = free_starts(facts)[0]
    gold = f"Here is the proposed time: {day}, {hhmm(start)} - {hhmm(start + facts['length'])} "
    record = {"num_people": str(len(names)), "num_days": str(len(days)), "golden_plan": gold}
    record |= {"duration": str(facts["length"] / 60).removesuffix(".0"), "pred_5shot_pro": gold + "\n"}
    record["prompt_0shot"] = f"You are an expert.\n\n{text}"
    record["prompt_5shot"] = f"You are an expert.\n\nTASK: A made-up example.\nSOLUTION: none\n\n{text}"
    return record, facts


MAKERS = {"trip_planning": make_trip, "meeting_planning": make_meeting, "calendar_scheduling": make_calendar}


def write_world(folder, *, seed=0, num=60):
    """The three files, and {id: facts}."""
    rng, all_facts = random.Random(seed), {}
    for name, make in MAKERS.items():
        records = {}
        for i in range(num):
            key = f"{name}_example_{i}"
            records[key], all_facts[key] = make(rng)
        (folder / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
    return all_facts
