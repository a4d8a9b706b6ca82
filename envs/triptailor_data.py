"""TripTailor's files as records: the requests of a split, and the rows of places and rides.

Reads the official layout (database_EN: train.json, test.json, five CSV files, two JSON pools), which
envs/trips.py writes too. Hotels and restaurants whose name or price is empty are left out, as by the
official loaders, which show a sight without a price as free; a cell that is there and wrong is an error that
names file, row and field.
Format: TripTailor (arXiv:2508.01432), github.com/swxkfm/TripTailor 9db474b.
"""

import csv
import json
import math
import re
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CATEGORIES = ("Economy", "Midscale", "Upscale", "Luxury")
PARTS_OF_DAY = {  # minutes of the day, both ends included; ours, the official bounds are not published
    "early morning": (0, 540),
    "morning": (360, 720),
    "late morning": (540, 780),
    "afternoon": (720, 1080),
    "evening": (1020, 1440),
}
INTENSITY = {"relaxed": 1, "low": 1, "moderate": 2, "high": 3, "intense": 3}  # "should be X in intensity"
DEFAULT_MEALS = (100, 200)  # ¥ per meal when the request names no range; official default


@dataclass(frozen=True, slots=True)
class Place:
    kind: str  # hotel | sight | restaurant
    name: str  # as the database writes it
    city: str
    price: float  # ¥: a night, a ticket or a meal
    lat: float  # degrees; NaN where the database has none
    lon: float  # degrees; NaN where the database has none
    tags: str  # hotel category, sight tags joined by "; ", cuisine
    duration: str  # recommended visit of a sight, e.g. "1-2 hours"; "" elsewhere
    hours: str  # opening hours of a sight; "" elsewhere


@dataclass(frozen=True, slots=True)
class Ride:
    mode: str  # flight | train
    number: str  # "CA12", "G1768/G1769"
    origin: str  # city as asked for
    destination: str
    depart: int  # minutes after midnight
    arrive: int  # minutes after midnight of the departure day; > 1440 for a night ride
    fares: tuple[float, ...]  # ¥, one or (second class, first class)
    weekdays: tuple[bool, ...]  # Monday to Sunday

    def runs(self, weekday: str) -> bool:
        """Whether it goes on a weekday by English name; on any day if the name is ""."""
        return not weekday or self.weekdays[WEEKDAYS.index(weekday)]


@dataclass(frozen=True, slots=True)
class Request:
    id: str  # "test/1"
    query: str
    origin: str
    destination: str
    days: int
    budget: float  # ¥
    meals: tuple[float, float]  # ¥ per meal, both ends included
    weekdays: tuple[str, str]  # of departure and return; "" where the query names none
    parts: tuple[str, str]  # keys of PARTS_OF_DAY, or ""
    category: str  # one of CATEGORIES, or ""
    interests: tuple[str, ...]
    cuisines: tuple[str, ...]
    sights_per_day: int  # wanted on a full day, by INTENSITY; 2 where the query does not say


@lru_cache(maxsize=1 << 16)
def normal(name: str) -> str:
    """A name for comparison: NFKC, straight apostrophes, case folded, runs of blanks as one."""
    return " ".join(unicodedata.normalize("NFKC", name).replace("’", "'").casefold().split())


@lru_cache(maxsize=1 << 12)
def minutes(text: str) -> int:
    """Minutes after midnight of "H:MM" or "HH:MM" (00:00 to 23:59). Raises ValueError."""
    match = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text.strip())
    if match is None:
        raise ValueError(f"{text[:20]!r} is not a time HH:MM")
    return 60 * int(match[1]) + int(match[2])


def in_part(minute: int, part: str) -> bool:
    """Whether a minute of the day lies in a part of day; always if the part is ""."""
    low, high = PARTS_OF_DAY[part] if part else (0, 1440)
    return low <= minute % 1440 <= high


def clock(minute: int) -> str:
    """ "HH:MM" of a minute count, modulo one day."""
    return f"{minute // 60 % 24:02d}:{minute % 60:02d}"


def km(a: Place, b: Place) -> float:
    """Great-circle distance in km on a sphere of 6371 km; NaN where a coordinate is missing."""
    lat_a, lat_b, half_lon = math.radians(a.lat), math.radians(b.lat), math.radians(b.lon - a.lon) / 2
    chord = math.sin((lat_b - lat_a) / 2) ** 2 + math.cos(lat_a) * math.cos(lat_b) * math.sin(half_lon) ** 2
    return 2 * 6371.0 * math.asin(min(1.0, math.sqrt(chord))) if chord == chord else math.nan


class Rows:
    """The rows of one CSV file, with errors that name file, row and field (the header is row 1)."""

    def __init__(self, path: Path, columns: tuple[str, ...]):
        self.path, self.row, self.columns = path, 1, columns
        if not path.is_file():
            raise ValueError(f"{path} is missing; a TripTailor folder holds {', '.join(CSV_FILES.values())}")

    def __iter__(self):
        with open(self.path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in self.columns if column not in (reader.fieldnames or ())]
            if missing:
                found = ", ".join(reader.fieldnames or ["nothing"])[:200]
                wanted = ", ".join(missing)
                raise ValueError(f"{self.path} row 1: no column {wanted}; found {found}; fix the header")
            for self.row, cells in enumerate(reader, start=2):
                self.cells = cells
                yield self

    def error(self, field: str, value, wanted: str) -> ValueError:
        place = f"{self.path} row {self.row}"
        return ValueError(f"{place}: {field}={str(value)[:60]!r}, wanted {wanted}; fix the row")

    def text(self, field: str) -> str:
        value = self.cells.get(field)
        if value is None:
            raise self.error(field, value, "a cell (column missing or row too short)")
        return value.strip()

    def number(self, field: str, *, low=0.0, high=1e7, empty: float | None = None) -> float:
        value = self.text(field)
        if value == "" and empty is not None:
            return empty
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise self.error(field, value, f"a number from {low:g} to {high:g}")
        return number

    def time(self, field: str) -> int:
        try:
            return minutes(self.text(field))
        except ValueError:
            raise self.error(field, self.text(field), "a time H:MM") from None


CSV_FILES = {
    "hotel": "accommodations.csv",
    "sight": "attractions.csv",
    "restaurant": "restaurants.csv",
    "flight": "Flight_Schedule.csv",
    "train": "Train_Schedule.csv",
}
COLUMNS = {  # kind -> columns of name, city, price, tags, duration, hours
    "hotel": ("name", "real_city", "avg_price", "small_cate", "", ""),
    "sight": ("poiName", "city", "price", "tagNameList", "reference_time", "opening_hours"),
    "restaurant": ("name", "real_city", "avg_price", "small_cate", "", ""),
}

FLIGHT_COLUMNS = (
    *("Departure City", "Arrival City", "Flight Number", "Departure Time", "Arrival Time", "Price"),
    *WEEKDAYS,
)
TRAIN_COLUMNS = (
    *("Train_Number", "Station_Number", "Station_Name", "Arrival_Time", "Departure_Time"),
    *("Second_Class_Price", "First_Class_Price"),
)


def read_places(path: Path, kind: str) -> list[Place]:
    """All usable rows of accommodations.csv, attractions.csv or restaurants.csv, in file order."""
    name, city, price, tags, duration, hours = COLUMNS[kind]
    places = []
    for row in Rows(path, tuple(filter(None, (*COLUMNS[kind], "latitude", "longitude")))):
        if row.text(name) == "" or (row.text(price) == "" and kind != "sight"):
            continue
        place = Place(
            kind,
            row.text(name),
            row.text(city),
            row.number(price, empty=0.0),
            row.number("latitude", low=-90, high=90, empty=math.nan),
            row.number("longitude", low=-180, high=180, empty=math.nan),
            row.text(tags),
            row.text(duration) if duration else "",
            row.text(hours) if hours else "",
        )
        places.append(place)
    return places


def read_flights(path: Path) -> list[Ride]:
    flights = []
    for row in Rows(path, FLIGHT_COLUMNS):
        depart, arrive = row.time("Departure Time"), row.time("Arrival Time")
        flight = Ride(
            "flight",
            row.text("Flight Number"),
            row.text("Departure City"),
            row.text("Arrival City"),
            depart,
            arrive + 1440 * (arrive <= depart),
            (row.number("Price"),),
            tuple(row.number(day, high=1) == 1 for day in WEEKDAYS),
        )
        flights.append(flight)
    return flights


@dataclass(frozen=True, slots=True)
class TrainStop:
    station: str  # as normal() writes it
    arrive: int | None  # minutes after midnight; None at the first stop
    depart: int | None  # None at the last stop
    fares: tuple[float, float]  # ¥ from the first stop, second and first class


def read_trains(path: Path) -> dict[str, list[TrainStop]]:
    """Train number -> stops in station order."""
    trains = defaultdict(list)
    for row in Rows(path, TRAIN_COLUMNS):
        ends = {"departure station", "terminal station", ""}
        times = [None if row.text(f) in ends else row.time(f) for f in ("Arrival_Time", "Departure_Time")]
        fares = (row.number("Second_Class_Price", empty=-1.0), row.number("First_Class_Price", empty=-1.0))
        stop = TrainStop(normal(row.text("Station_Name")), *times, fares)
        trains[row.text("Train_Number")].append((row.number("Station_Number", low=1), stop))
    in_order = {number: sorted(stops, key=lambda pair: pair[0]) for number, stops in trains.items()}
    return {number: [stop for _, stop in stops] for number, stops in in_order.items()}


def read_json(path: Path, kind: type) -> list | dict:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds a {type(content).__name__}, wanted a {kind.__name__}")
    return content


def parse_request(record: dict, *, split: str, where: str) -> Request:
    """A Request from a record of train.json or test.json; budget and meal range come from the query
    where the record has none.

    raises  ValueError that names `where` (file and row), field, value
    """

    def field(name, kind, found=None):
        value = record.get(name, found)
        if not isinstance(value, kind) or isinstance(value, bool) or value == "":
            raise ValueError(f"{where}: {name}={str(value)[:60]!r}, wanted {kind.__name__}; fix the record")
        return value

    query = field("query", str)
    budget = field("budget", int, first_int(r"budget of ¥\s?(\d[\d,]*)", query))
    meals = record.get("meal_price_range") or meal_range(query)
    if not (isinstance(meals, list) and len(meals) == 2 and all(type(m) in (int, float) for m in meals)):
        raise ValueError(f"{where}: meal_price_range={str(meals)[:60]}, wanted [low, high]; fix the record")
    days = field("day", int)
    if not 2 <= days <= 30:
        raise ValueError(f"{where}: day={days}, wanted 2 to 30; fix the record")
    leave, back = (travel_time(query, verb) for verb in ("departing", "returning"))
    interests, cuisines = wishes(query)
    return Request(
        f"{split}/{field('pid', int)}",
        query,
        field("departure_city", str),
        field("destination_city", str),
        days,
        budget,
        tuple(meals),
        (leave[0], back[0]),
        (leave[1], back[1]),
        next((c for c in CATEGORIES if re.search(rf"\b{c} hotels?\b", query, re.I)), ""),
        interests,
        cuisines,
        next((n for word, n in INTENSITY.items() if f"{word} in intensity" in query), 2),
    )


def first_int(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1].replace(",", "")) if match else None


def meal_range(query: str) -> list[int]:
    match = re.search(r"from ¥\s?(\d+) to ¥\s?(\d+)", query)
    return [int(match[1]), int(match[2])] if match else list(DEFAULT_MEALS)


def travel_time(query: str, verb: str) -> tuple[str, str]:
    """(weekday, part of day) after "departing" or "returning"; ("", "") where the query has none."""
    parts = "|".join(sorted(PARTS_OF_DAY, key=len, reverse=True))
    match = re.search(rf"{verb} on (\w+) ({parts})\b", query)
    return (match[1], match[2]) if match and match[1] in WEEKDAYS else ("", "")


def wishes(query: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(interests, cuisines) named in a templated query, in its own words."""
    match = re.search(r"interested in (.*?)(?:,? along with (?:enjoying )?|\. I also enjoy )(.*?)\.", query)
    if match is None:
        match = re.search(r"interested in (.*?)()\.", query)
    if match is None:
        return (), ()
    filler = r"\b(exploring|visiting|enjoying|diverse|cuisines?|dishes|meals|such as|like)\b"
    lists = [re.split(r",|\band\b|\blike\b", re.sub(r"\blike\b", ",", part)) for part in match.groups()]
    cleaned = [[" ".join(re.sub(filler, " ", item).split()) for item in items] for items in lists]
    return tuple(filter(None, cleaned[0])), tuple(filter(None, cleaned[1]))
