"""TripTailor without tool calls: direct prompting, and the workflow, by any model that answers messages.

Direct: the request's candidates and the request in one prompt. Workflow: the official order of stages, in
which a program searches and the model chooses. Both are here as messages alone; who asks, and with what
model, is the caller's. The words are ours, the order, the batches and the limits the official ones.

    talk = workflow(env)
    messages = next(talk)
    while True:                         # until StopIteration, whose value is the final answer
        messages = talk.send(reply_to(messages))

Source: TripTailor (arXiv:2508.01432), TravelAgent.py for the order; Anchored GRPO's baselines.
"""

import json
import math
import random
import re
from collections.abc import Generator

from envs.base import Message
from envs.triptailor import SYSTEM, TripTailor, to_json
from envs.triptailor_data import Place, Ride, clock, km, minutes, normal

STAGES = ("demands", "outbound", "return", "sights", "schedule", "restaurants", "hotel", "plan")
BATCH = 10  # sights ranked in one question
SIGHTS_PER_DAY = 3  # kept for the schedule
RESTAURANTS = 10  # nearest ones offered for a meal
HOTELS = 8  # offered, of the wanted class near the sights, best rated first
HOTEL_KM = 5.0  # first radius around the sights' centre, widened by itself until there is a hotel
WINDOWS = {  # minutes of the day in which a ride should depart, by the official workflow
    "early morning": (240, 540),
    "late morning": (540, 720),
    "morning": (240, 720),
    "afternoon": (720, 1080),
    "evening": (1080, 1439),
}
MEALS = {"lunch": ("12:00", "13:00"), "dinner": ("18:00", "19:00")}
Asked = Generator[list[Message], str, list]
ANSWER = SYSTEM.replace("First call every search you need. Then answer", "Answer").replace(
    "from the search results", "from the information given"
)


def direct_messages(env: TripTailor) -> list[Message]:
    """One prompt: all that the request was handed (given_info_data.json, else infomation.json), and it.

    raises  ValueError where the folder has no information for the request
    """
    info = env.information()
    if info is None:
        raise ValueError(f"{env.task.id}: no given_info_data.json to plan from; use tools or the workflow")
    lines = "\n".join(line for title, rows in info.items() for line in _described(title, rows))
    return [Message("system", ANSWER), Message("user", f"{lines}\n\nRequest: {env.request.query}")]


SHOWN = (  # of a row of information, in this order; what a planner needs and no more
    *("Flight Number", "Train_Number", "Hotel Name", "name_en", "poiName", "name", "Departure Time"),
    *("Departure_Time", "Arrival Time", "Arrival_Time", "Price", "Second_Class_Price", "Average Price"),
    *("price", "avg_price", "Category", "small_cate", "tag", "tagNameList", "recommended_duration"),
    *("reference_time", "opening_hours", "Rating", "stars"),
)


def _described(title: str, rows: list | dict) -> list[str]:
    if isinstance(rows, dict):
        return [line for name, part in rows.items() for line in _described(f"{title} {name}", part)]
    shown = ({key: row[key] for key in SHOWN if row.get(key) not in (None, "")} for row in rows)
    return [f"## {title}", *(to_json(row) for row in shown)]


def workflow(env: TripTailor, *, seed: int = 0) -> Generator[list[Message], str, str]:
    """Ask stage by stage (STAGES), choose by default where a reply cannot be read, return the plan's text.

    yields  the messages of the next question; send() its reply
    seed    of the order in which sights are put into batches
    """
    request, data = env.request, env.data
    wishes = yield _ask(env, "State in one line what the traveller wants to see and to eat.")
    rides = []
    ways = (request.origin, request.destination), (request.destination, request.origin)
    for stage, way, weekday, part in zip(STAGES[1:3], ways, request.weekdays, request.parts, strict=True):
        options = ride_options(data.rides(*way), weekday, part)
        if not options:
            return to_json({"error": f"no {stage} ride from {way[0]} to {way[1]}"})
        rides.append((yield from _pick(env, f"the {stage} ride", [_ride_line(r) for r in options], options)))
    sights = data.places["sight"].get(normal(request.destination), [])
    if env.pool is not None:
        sights = [place for place in sights if normal(place.name) in env.pool["sight"]]
    ranked = yield from _rank(env, random.Random(f"{seed}/{env.task.id}").sample(sights, len(sights)), wishes)
    days = yield from _schedule(env, ranked, rides)
    itinerary = yield from _dine(env, days)
    seen = [place for day in days for place in day]
    hotels = hotel_options(env, seen)
    if not hotels:
        return to_json({"error": f"no hotel in {request.destination}"})
    hotel = yield from _pick(env, "the hotel", [_place_line(place) for place in hotels], hotels)
    draft = draft_plan(env, hotel, rides, itinerary)
    question = f"{ANSWER}\nThis draft holds what was chosen. Correct times that clash, and answer with it.\n"
    return (yield [Message("system", question + to_json(draft)), Message("user", request.query)])


def _ask(env: TripTailor, instruction: str) -> list[Message]:
    return [Message("system", f"You plan trips. {instruction}"), Message("user", env.request.query)]


def _pick(env: TripTailor, what: str, lines: list[str], options: list):
    """The option whose number the reply names last; the first where it names none."""
    listed = "\n".join(f"{i}. {line}" for i, line in enumerate(lines, start=1))
    task = f"Choose {what} for this traveller. End with its number in brackets, as [1]."
    reply = yield _ask(env, f"{task}\n{listed}")
    chosen = numbers(reply, len(options))
    return options[chosen[-1] - 1 if chosen else 0]


def numbers(reply: str, most: int) -> list[int]:
    """Numbers in brackets in a reply, each once, from 1 to `most`."""
    groups = re.findall(r"\[([^\[\]]{0,400})\]", reply)
    found = [int(x) for group in groups for x in re.findall(r"\d{1,4}", group)]
    return list(dict.fromkeys(x for x in found if 1 <= x <= most))


def ride_options(rides: list[Ride], weekday: str, part: str) -> list[Ride]:
    """A weekday's rides that depart in the official window of a part of day; all of them if that is empty."""
    running = [ride for ride in rides if ride.runs(weekday)]
    low, high = WINDOWS.get(part, (0, 1440))
    return [ride for ride in running if low <= ride.depart <= high] or running


def _ride_line(ride: Ride) -> str:
    return f"{ride.mode} {ride.number}, {clock(ride.depart)} to {clock(ride.arrive)}, ¥{ride.fares[0]:g}"


def _place_line(place: Place) -> str:
    about = ", ".join(filter(None, (place.tags, place.duration, place.hours)))
    return f"{place.name}, ¥{place.price:g}" + (f" ({about})" if about else "")


def _rank(env: TripTailor, sights: list[Place], wishes: str) -> Asked:
    """The best sights of each batch of BATCH, SIGHTS_PER_DAY a day over all batches."""
    batches = [sights[i : i + BATCH] for i in range(0, len(sights), BATCH)]
    each = env.request.days * SIGHTS_PER_DAY // max(1, len(batches)) + 1
    kept = []
    for batch in batches:
        listed = "\n".join(f"{i}. {_place_line(place)}" for i, place in enumerate(batch, start=1))
        task = (
            "Sort these sights, the most fitting first. End with all their numbers in brackets, as [3, 1, 2]."
        )
        reply = yield _ask(env, f"{task}\nWanted: {wishes[:400]}\n{listed}")
        order = numbers(reply, len(batch)) or list(range(1, len(batch) + 1))
        kept += [batch[i - 1] for i in order[:each]]
    return kept


def _schedule(env: TripTailor, sights: list[Place], rides: list[Ride]) -> Asked:
    """Sights by day; each once, and one a day at least as long as there are any."""
    days = env.request.days
    listed = "\n".join(f"{i}. {_place_line(place)}" for i, place in enumerate(sights, start=1))
    times = f"Arrival {clock(rides[0].arrive)} on day 1, departure {clock(rides[1].depart)} on day {days}."
    task = f"Spread sights over {days} days, one line a day, as: Day 1: [4, 2]. Use each once. {times}"
    reply = yield _ask(env, f"{task}\n{listed}")
    chosen: dict[int, list[int]] = {}
    used: set[int] = set()
    for day, text in re.findall(r"[Dd]ay (\d{1,2})\D{0,5}?(\[[^\[\]]{0,200}\])", reply):
        fresh = [x for x in numbers(text, len(sights)) if x not in used]
        chosen.setdefault(int(day), []).extend(fresh)
        used.update(fresh)
    spare = [i for i in range(1, len(sights) + 1) if i not in used]
    for day in range(1, days + 1):
        if not chosen.get(day) and spare:
            chosen[day] = [spare.pop(0)]
    return [[sights[i - 1] for i in chosen.get(day, [])] for day in range(1, days + 1)]


def _dine(env: TripTailor, days: list[list[Place]]) -> Asked:
    """Days as lists of (place, meal or ""): lunch after the first sight, dinner last but on the last day."""
    low, high = env.request.meals
    rows = env.data.places["restaurant"].get(normal(env.request.destination), [])
    free = [place for place in rows if low <= place.price <= high]
    if env.pool is not None:
        free = [place for place in free if normal(place.name) in env.pool["restaurant"]]
    used: set[str] = set()
    filled = []
    for number, day in enumerate(days, start=1):
        stops = [(place, "") for place in day]
        for meal in ("lunch", "dinner") if number < len(days) else ("lunch",):
            near = day[0 if meal == "lunch" else -1] if day else None
            options = nearest([place for place in free if normal(place.name) not in used], near)
            if not options:
                continue
            lines = [_place_line(place) for place in options]
            place = yield from _pick(env, f"the {meal} of day {number}", lines, options)
            used.add(normal(place.name))
            stops.insert(1 if meal == "lunch" else len(stops), (place, meal))
        filled.append(stops)
    return filled


def nearest(places: list[Place], centre: Place | None) -> list[Place]:
    """RESTAURANTS of the places, the nearest to a centre; the cheapest where there is none."""

    def far(place: Place) -> float:
        distance = km(centre, place) if centre else 0.0
        return math.inf if math.isnan(distance) else distance

    return sorted(places, key=lambda place: (far(place), place.price, place.name))[:RESTAURANTS]


def hotel_options(env: TripTailor, sights: list[Place]) -> list[Place]:
    """At most HOTELS of the wanted class (any, where it has none) in the smallest radius around the sights,
    in steps of HOTEL_KM; cheapest first."""
    rows = env.data.places["hotel"].get(normal(env.request.destination), [])
    if env.pool is not None:
        rows = [place for place in rows if normal(place.name) in env.pool["hotel"]]
    rows = [place for place in rows if place.tags == env.request.category] or rows
    known = [place for place in sights if not math.isnan(place.lat + place.lon)]
    if not known:
        return rows[:HOTELS]
    centre = Place(
        *("centre", "", "", 0.0),
        sum(place.lat for place in known) / len(known),
        sum(place.lon for place in known) / len(known),
        *("", "", ""),
    )
    steps = [(math.ceil(d / HOTEL_KM) if (d := km(centre, place)) == d else math.inf) for place in rows]
    return [place for place, step in zip(rows, steps, strict=True) if step == min(steps)][:HOTELS]


def draft_plan(env: TripTailor, hotel: Place, rides: list[Ride], days: list[list]) -> dict:
    """Plan JSON of what was chosen: meals at MEALS, sights one after the other, two hours each."""
    request = env.request
    ways = (1, request.origin, request.destination), (request.days, request.destination, request.origin)
    transportation = [
        {"day": day, "mode": ride.mode.capitalize(), "route": f"{a} to {b}", "number": ride.number}
        | {"time": f"{clock(ride.depart)}–{clock(ride.arrive)}", "price": ride.fares[0]}
        for ride, (day, a, b) in zip(rides, ways, strict=True)
    ]
    itinerary = {}
    for number, stops in enumerate(days, start=1):
        entries, free = itinerary.setdefault(f"day_{number}", []), minutes("09:00")
        for place, meal in stops:
            start, end = map(minutes, MEALS[meal]) if meal else (free, min(free + 120, 1439))
            free = max(free, end)
            action = "dining" if meal else "sightseeing"
            entry = {"time": f"{clock(start)}–{clock(end)}", "location": place.name, "price": place.price}
            entries.append(entry | {"action": action})
    stay = [{"day": 1, "name": hotel.name, "price_per_night": hotel.price}]
    return json.loads(to_json({"hotel": stay, "transportation": transportation, "itinerary": itinerary}))
