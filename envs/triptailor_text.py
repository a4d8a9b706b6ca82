"""TripTailor's human plans: day texts in Markdown to the plan JSON, by rules and without a language model.

A day is a list of sections "### HH:MM–HH:MM | Title" with prose and "- **Label**: ¥n" bullets. Titles tell
what a section is: a ride, the check-in, lunch or dinner, else a sight. What cannot be read is said beside the
plan, never guessed. Breakfast, check-out and ways within the city are no part of a plan.
Format: TripTailor (arXiv:2508.01432); officially a language model makes this conversion.
"""

import re
from dataclasses import dataclass, field

from envs.triptailor_data import clock, minutes, normal

DASHES = "–—‒~-"  # between the two times of a heading; the hyphen last, for the pattern
LONE_MINUTES = 60  # length of a section with one time, where the next does not begin earlier; ours
SECTION = re.compile(
    rf"^#{{2,5}}\s*\**\s*(\d{{1,2}}:\d{{2}})(?:\s*[{DASHES}]\s*(\d{{1,2}}:\d{{2}}))?\s*\**\s*[|:]\s*(.+?)\s*$",
    re.MULTILINE,
)
HEADING = re.compile(r"^#{2,5}\s*(.+?)\s*$", re.MULTILINE)
BULLET = re.compile(r"^\s*[-*•]\s*\**([^:*\n]+?)\**\s*:\s*\**\s*(.*?)\s*$", re.MULTILINE)
YUAN = re.compile(r"[¥￥]\s?(\d[\d,]*(?:\.\d+)?)|(\d[\d,]*(?:\.\d+)?)\s?(?:RMB|CNY|yuan)\b", re.IGNORECASE)
NUMBER = re.compile(
    r"\b((?:[GDCKTZSY]\d{1,4}|(?!\d\d)[A-Z\d]{2}\d{2,4})(?:/(?:[A-Z\d]{1,2})?\d{1,4})*)\b(?!\s*(?:km|m)\b)"
)
TIME = r"(\d{1,2}:\d{2})"
SCHEDULE = re.compile(rf"\b[Dd]epart\w*\D{{0,40}}?{TIME}.{{0,60}}?\b[Aa]rriv\w*\D{{0,40}}?{TIME}", re.DOTALL)
RIDE = re.compile(r"^(?:(?:high-speed )?train|flight|travel|return|journey|depart\w*|fly)\b", re.IGNORECASE)
CHECK_IN = re.compile(r"check[- ]?in\b(?:\s*(?:at|to|into)\s+(?P<name>.+))?", re.IGNORECASE)
MEAL = re.compile(
    r"\b(?P<meal>breakfast|brunch|lunch|dinner|supper)\b(?:(?:.*?\b(?:at|in)\s+|\s*[:–-]\s*)(?P<name>.+))?",
    re.IGNORECASE,
)
NO_PLACE = re.compile(
    r"check[- ]?out|^(?:rest|relax|free time|leisure|pack|transfer|back to|head|arriv\w+|return to)\b",
    re.IGNORECASE,
)
VERBS = re.compile(
    r"^(?:visit(?: to)?|explore|exploring|discover|tour(?: of)?|experience|enjoy|see|wander(?: through)?"
    r"|(?:evening |morning )?(?:stroll|walk)(?: (?:along|around|at|in|on|through))?)\s+(?-i:the\s+)?",
    re.IGNORECASE,
)
NIGHT = ("average price per night", "price per night", "average price", "nightly rate", "price")
FEE = ("entrance fee", "admission fee", "admission", "ticket price", "ticket", "price", "fee", "cost")
MEAL_PRICE = ("average cost", "average price", "price per person", "cost per person", "price", "cost")
FARES = ("ticket price", "second-class price", "second-class ticket price", "second class price", "price")


@dataclass(slots=True)
class Section:
    start: int  # minutes of the day
    end: int | None  # None: the heading has one time
    title: str
    body: str  # prose and bullets below it
    bullets: dict[str, str]  # label in lower case -> text, the first of each label


@dataclass(slots=True)
class Reading:
    plan: dict | None  # official plan JSON; None where hotel or a ride could not be read
    unread: list[str] = field(default_factory=list)  # "reason: where", one per thing left out or filled in


def read_days(days: list[str], *, origin: str, destination: str) -> Reading:
    """The plan in `final_plan`'s day texts, activities in the order of the text.

    A ride is in the first day's and the last day's text; its times are those of the prose ("depart at ..
    arrive at ..") where it has both, else the heading's; of two classes the second is taken. A section with
    one time lasts until the next section, LONE_MINUTES at most. A fee or price that is not there is 0.
    """
    reading, hotels, rides, itinerary = Reading(None), [], {}, {}
    for day, text in enumerate(days, start=1):
        entries = itinerary[f"day_{day}"] = []
        sections = split_sections(text, f"day {day}", reading.unread)
        for i, section in enumerate(sections):
            ends = sections[i + 1].start if i + 1 < len(sections) else None
            slot = time_slot(section, ends)
            where = f"day {day}, {section.title!r}"
            way = ride_way(section, day, len(days), origin, destination, rides)
            if way:
                ride = read_ride(section, day, way, origin, destination, reading.unread, where)
                rides[way] = ride or rides.get(way)
            elif (found := CHECK_IN.search(section.title)) is not None:
                hotels += [] if hotels else read_hotel(section, found["name"], reading.unread, where)
            elif NO_PLACE.search(section.title):
                continue
            elif (found := MEAL.search(section.title)) is not None:
                entries += read_meal(section, found, slot, reading.unread, where)
            else:
                entries.append(read_sight(section, slot))
            if section.end is None:
                reading.unread.append(f"one time: {where}")
    rides = [rides.get("out"), rides.get("back")]
    for name, found in (("hotel", hotels), ("outbound ride", rides[0]), ("return ride", rides[1])):
        if not found:
            reading.unread.append(f"no {name}: the text names none")
    if hotels and all(rides):
        reading.plan = {"hotel": hotels, "transportation": rides, "itinerary": itinerary}
    return reading


def split_sections(text: str, where: str, unread: list[str]) -> list[Section]:
    """The timed sections of a day; headings without a time are told to `unread`."""
    heads = list(SECTION.finditer(text))
    timed = {head.start() for head in heads}
    others = [head[1] for head in HEADING.finditer(text) if head.start() not in timed]
    unread += [f"no time: {where}, {title[:60]!r}" for title in others if "itinerary" not in title.lower()]
    sections = []
    ends = [head.start() for head in heads[1:]] + [len(text)]
    for head, end_of_body in zip(heads, ends, strict=False):  # without a head there is no body
        body = text[head.end() : end_of_body]
        bullets: dict[str, str] = {}
        for bullet in BULLET.finditer(body):
            bullets.setdefault(bullet[1].strip().lower(), bullet[2])
        try:
            start, end = minutes(head[1]), minutes(head[2]) if head[2] else None
        except ValueError:
            unread.append(f"no time of day: {where}, {head[0][:60]!r}")
            continue
        sections.append(Section(start, end, head[3].replace("*", "").strip(), body, bullets))
    return sections


def time_slot(section: Section, following: int | None) -> str:
    """ "HH:MM–HH:MM" of an activity."""
    end = section.end
    if end is None:
        end = min(section.start + LONE_MINUTES, 1439)
        end = following if following and section.start < following < end else end
    return f"{clock(section.start)}–{clock(end)}"


def ride_way(section: Section, day: int, days: int, origin: str, destination: str, rides: dict) -> str:
    """ "out", "back", or "" for a section that is no ride between the cities. A ride is on the first or last
    day, its title says so, and it names the city it goes to or, as long as none does, a number."""
    if not RIDE.match(section.title):
        return ""
    for way, on, city in (("out", 1, destination), ("back", days, origin)):
        goes = re.search(rf"\b(?:to|for) {re.escape(normal(city))}\b", normal(section.title))
        numbered = not rides.get(way) and NUMBER.search(section.body) and mode_of(section)
        if day == on and (goes or numbered):
            return way
    return ""


def mode_of(section: Section) -> str:
    """Flight or Train, by the title, else by the first of the two words below it; "" if neither is there."""
    for text in (section.title, section.body):
        found = re.search(r"\b(flight|fly|train)\b", text, re.IGNORECASE)
        if found:
            return "Train" if found[1].lower() == "train" else "Flight"
    return ""


def read_ride(section, day, way, origin, destination, unread: list[str], where: str) -> dict | None:
    """An entry of "transportation"; None where its number is not there."""
    bold = [found for text in re.findall(r"\*\*(.+?)\*\*", section.body) for found in NUMBER.findall(text)]
    numbers = bold or NUMBER.findall(section.body)
    mode = mode_of(section)
    if not numbers or not mode:
        unread.append(f"ride without {'number' if mode else 'mode'}: {where}")
        return None
    times = SCHEDULE.search(section.body)
    end = section.start if section.end is None else section.end
    slot = f"{clock(section.start)}–{clock(end)}"
    if times:
        slot = "–".join(clock(minutes(t)) for t in times.groups() if valid_time(t))
    elif section.end is None:
        unread.append(f"ride without arrival: {where}")
    if slot.count(":") != 2:
        slot = f"{clock(section.start)}–{clock(end)}"
    price = price_of(section, FARES)
    if price is None:
        unread.append(f"ride without price: {where}")
    ends = (origin, destination) if way == "out" else (destination, origin)
    route = f"{ends[0]} to {ends[1]}"
    entry = {"day": day, "mode": mode, "route": route, "number": numbers[0]}
    return entry | {"time": slot, "price": price or 0}


def valid_time(text: str) -> bool:
    try:
        minutes(text)
    except ValueError:
        return False
    return True


def read_hotel(section: Section, name: str | None, unread: list[str], where: str) -> list[dict]:
    name = clean(name or "") or first_bold(section.body)
    if not name:
        unread.append(f"hotel without name: {where}")
        return []
    price = price_of(section, NIGHT)
    if price is None:
        unread.append(f"hotel without price: {where}")
    return [{"day": 1, "name": name, "price_per_night": price or 0}]


def read_meal(section: Section, found: re.Match, slot: str, unread: list[str], where: str) -> list[dict]:
    if found["meal"].lower() == "breakfast":
        return []
    name = clean(found["name"] or "") or first_bold(section.body)
    if not name:
        unread.append(f"meal without place: {where}")
        return []
    price = price_of(section, MEAL_PRICE)
    if price is None:
        unread.append(f"meal without price: {where}")
    return [{"time": slot, "location": name, "price": price or 0, "action": "dining"}]


def read_sight(section: Section, slot: str) -> dict:
    """A sight's name is its title without a leading verb; no fee, or "Free", is 0."""
    name = clean(VERBS.sub("", section.title)) or section.title
    price = price_of(section, FEE, prose=False)
    return {"time": slot, "location": name, "price": price or 0, "action": "sightseeing"}


def clean(name: str) -> str:
    """A name as a title writes it, without bold marks, closing stops and quotes around it."""
    return " ".join(name.replace("*", "").split()).strip(' .:;–-"“”')


def first_bold(body: str) -> str:
    """The first bold words in the prose before the bullets; "" if there are none."""
    found = re.search(r"\*\*(.+?)\*\*", re.split(r"^\s*[-•]\s", body, maxsplit=1, flags=re.MULTILINE)[0])
    return clean(found[1]) if found else ""


def price_of(section: Section, labels: tuple[str, ...], *, prose: bool = True) -> int | float | None:
    """¥ of the first bullet in the order of `labels` that says an amount or "free"; else, with `prose`, the
    first amount in the text; None if there is none."""
    for label in labels:
        text = section.bullets.get(label)
        if text is not None and (amount := yuan(text)) is not None:
            return amount
        if text is not None and re.search(r"\bfree\b", text, re.IGNORECASE):
            return 0
    return yuan(section.body) if prose else None


def yuan(text: str) -> int | float | None:
    found = YUAN.search(text)
    if found is None:
        return None
    amount = float((found[1] or found[2]).replace(",", ""))
    return int(amount) if amount == int(amount) else amount


def read_record(record: dict) -> Reading:
    """The reading of a record's `final_plan`. Raises ValueError where it is no list of texts."""
    days = record.get("final_plan")
    if not isinstance(days, list) or not days or not all(isinstance(day, str) for day in days):
        raise ValueError(f"final_plan={str(days)[:60]!r}, wanted a list of day texts")
    reading = read_days(days, origin=record["departure_city"], destination=record["destination_city"])
    if len(days) != record["day"]:
        reading.unread.append(f"number of days: {len(days)} texts, the record says {record['day']}")
    return reading
