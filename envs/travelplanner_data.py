"""TravelPlanner's files as records: the queries of a split, and one read-only database.

Reads the official layout: `database/` with CSV tables of flights, road distances, restaurants, attractions
and accommodations, and lists of cities. A row with an empty cell is dropped, as the official loader's
dropna does (which loses every accommodation without house rules); a cell that is there and wrong is an
error that names file, row and column.
Benchmark: TravelPlanner (arXiv:2402.01622), github.com/OSU-NLP-Group/TravelPlanner da7c1d4.
"""

import ast
import csv
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

import numpy as np

LEVELS = ("easy", "medium", "hard")
HOUSE_RULES = ("parties", "smoking", "children under 10", "visitors", "pets")  # wanted to be allowed
ROOM_TYPES = {  # wish -> the room types of the database that meet it
    "shared room": ("Shared room",),
    "not shared room": ("Private room", "Entire home/apt"),
    "private room": ("Private room",),
    "entire room": ("Entire home/apt",),
}
TRANSPORT = ("no flight", "no self-driving")
_NA = "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null"
EMPTY = frozenset(["", *_NA.split("|")])  # what pandas reads as a missing value


@dataclass(frozen=True, slots=True)
class Query:
    id: str  # "train/1": split and the official index, from 1
    query: str
    level: str  # easy | medium | hard
    days: int  # 3, 5 or 7
    org: str  # city where the trip starts and ends
    dest: str  # a city for 3 days, a state for 5 and 7
    num_cities: int  # different cities to visit: 1, 2 or 3
    dates: tuple[str, ...]  # YYYY-MM-DD, one per day
    people: int
    budget: float  # $
    house_rule: str  # one of HOUSE_RULES, or "" for no wish
    cuisines: tuple[str, ...]  # all wanted
    room_type: str  # a key of ROOM_TYPES, or ""
    transportation: str  # one of TRANSPORT, or ""


@dataclass(frozen=True, slots=True)
class Place:
    kind: str  # restaurant | attraction | accommodation
    name: str  # as the database writes it
    city: str
    price: float  # $: a meal or a night, per person or per room; 0 for attractions
    cuisines: tuple[str, ...] = ()
    room_type: str = ""
    house_rules: str = ""  # "No pets & No smoking"
    min_nights: float = 0.0
    occupancy: int = 0  # people in one room
    extra: tuple = ()  # what only the search tools show, see SEARCH_COLUMNS


@dataclass(frozen=True, slots=True)
class Flight:
    number: str  # "F" and seven digits
    price: float  # $ per person
    depart: str  # "15:40"
    arrive: str
    elapsed: str  # "2 hours 24 minutes"
    date: str
    origin: str
    destination: str


@dataclass(frozen=True, slots=True)
class Road:
    duration: str  # "14 hours 2 mins"
    distance: str  # "1,433 km"

    def cost(self, mode: str) -> int:
        """$ of one car: 5 cents a km driving oneself, $1 a km by taxi, rounded down."""
        km = float(self.distance.replace("km", "").replace(",", ""))
        return int(km) if mode == "taxi" else int(km * 0.05)


CSV_FILES = {
    "restaurant": "restaurants/clean_restaurant_2022.csv",
    "attraction": "attractions/attractions.csv",
    "accommodation": "accommodations/clean_accommodations_2022.csv",
    "road": "googleDistanceMatrix/distance.csv",
}
FLIGHTS = "flights/clean_Flights_2022.csv"  # or clean_Flights_2022.<part>.csv, a part of it
SEARCH_COLUMNS = {
    "restaurant": ("name", "cuisines", "price", "rating"),
    "attraction": ("name", "latitude", "longitude"),
    "accommodation": (
        "name",
        "price per night",
        "room type",
        "house rules",
        "minimum nights",
        "maximum occupancy",
        "review",
    ),
}


def read_rows(path: Path, columns: list[str], *, dropna: bool) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(row, cells in the order of `columns`) of a CSV file; the header is row 1.

    dropna  leave out rows with an empty cell in any column of the file
    raises  ValueError for a missing file or column, or a row of another length than the header
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; wanted a CSV file with the columns {', '.join(columns)}")
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        lacking = [column for column in columns if column not in header]
        if lacking:
            found = ", ".join(header)[:120]
            raise ValueError(f"{path} row 1: no column {', '.join(lacking)}; found {found}")
        pick = itemgetter(*(header.index(column) for column in columns))
        for row, cells in enumerate(reader, start=2):
            if len(cells) != len(header):
                raise ValueError(f"{path} row {row}: {len(cells)} cells, wanted {len(header)} as in row 1")
            if not dropna or EMPTY.isdisjoint(cells):
                yield row, pick(cells)


def number(text: str, where: str, *, low: float = 0.0, high: float = 1e6) -> float:
    """A finite number in [low, high]. Raises ValueError that starts with `where`."""
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not low <= value <= high:
        raise ValueError(f"{where}={text[:40]!r}, wanted a number from {low:g} to {high:g}; fix the row")
    return value


class Flights:
    """The flights table in columns: some 30 bytes a row, for the official 3.8 million rows. Texts (times,
    dates, cities) are numbers into one list; rows are found by binary search."""

    COLUMNS = (
        "Flight Number",
        "Price",
        "DepTime",
        "ArrTime",
        "ActualElapsedTime",
        "FlightDate",
        "OriginCityName",
        "DestCityName",
    )

    def __init__(self, path: Path):
        ids: dict[str, int] = {}
        seen: dict[str, float] = {}  # price as written -> $
        numbers, prices, texts = array("i"), array("d"), array("i")
        valid = re.compile(r"F[0-9]{7}").fullmatch
        for row, (name, price, *rest) in read_rows(path, list(self.COLUMNS), dropna=True):
            if not valid(name):
                raise ValueError(f"{path} row {row}: Flight Number={name[:20]!r}, wanted F and 7 digits")
            if price not in seen:
                seen[price] = number(price, f"{path} row {row}: Price")
            numbers.append(int(name[1:]))
            prices.append(seen[price])
            texts.extend([ids.setdefault(text, len(ids)) for text in rest])
        self.ids, self.texts = ids, list(ids)
        self.numbers, self.prices = np.array(numbers), np.array(prices)
        self.columns = np.array(texts, dtype=np.int32).reshape(-1, 6)  # as COLUMNS[2:]
        routes = self._route(*self.columns[:, 3:].T.astype(np.int64))
        self.by_number = np.argsort(self.numbers, kind="stable")
        self.by_route = np.argsort(routes, kind="stable")
        self.sorted_numbers, self.sorted_routes = self.numbers[self.by_number], routes[self.by_route]

    def _route(self, date, origin, destination):
        return (date * len(self.texts) + origin) * len(self.texts) + destination

    def named(self, name: str) -> list[Flight]:
        """All flights of that number (one per date at most in the official table), in file order."""
        if not re.fullmatch(r"F[0-9]{7}", name):
            return []
        return self._rows(self.by_number, self.sorted_numbers, int(name[1:]))

    def between(self, origin: str, destination: str, date: str) -> list[Flight]:
        """All flights of a day, in file order."""
        key = [self.ids.get(text, -1) for text in (date, origin, destination)]
        return [] if -1 in key else self._rows(self.by_route, self.sorted_routes, self._route(*key))

    def _rows(self, order, keys, key: int) -> list[Flight]:
        key = keys.dtype.type(key)  # another dtype would copy all keys
        low, high = np.searchsorted(keys, key, "left"), np.searchsorted(keys, key, "right")
        return [self._flight(i) for i in order[low:high]]

    def _flight(self, i: int) -> Flight:
        texts = (self.texts[j] for j in self.columns[i])
        return Flight(f"F{self.numbers[i]:07d}", float(self.prices[i]), *texts)


class Database:
    """Everything that plans are checked against."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.states = self._states(folder / "background/citySet_with_states.txt")  # city -> state
        self.cities = set(_lines(folder / "background/citySet.txt"))  # that the search tools accept
        self.places: dict[str, dict[str, list[Place]]] = {}  # kind -> city -> rows in file order
        self.exact: dict[tuple[str, str, str], Place] = {}  # (kind, name, city) -> its first row
        for kind in SEARCH_COLUMNS:
            by_city = self.places[kind] = {}
            for place in _PLACES[kind](folder / CSV_FILES[kind]):
                by_city.setdefault(place.city, []).append(place)
                self.exact.setdefault((kind, place.name.strip(), place.city), place)
        self.roads: dict[tuple[str, str], Road | None] = {}  # the first row of a pair counts
        columns = ["origin", "destination", "duration", "distance"]
        for row, (origin, destination, *road) in read_rows(folder / CSV_FILES["road"], columns, dropna=False):
            known = EMPTY.isdisjoint(road) and "day" not in road[0]
            if known and not re.fullmatch(r"[0-9,]+(\.[0-9]+)? km", road[1]):
                path = folder / CSV_FILES["road"]
                raise ValueError(f"{path} row {row}: distance={road[1][:20]!r}, wanted like '1,144 km'")
            self.roads.setdefault((origin, destination), Road(*road) if known else None)
        self.flights = Flights(_flights_file(folder))

    @staticmethod
    def _states(path: Path) -> dict[str, str]:
        states = {}
        for row, line in enumerate(_lines(path), start=1):
            city, tab, state = line.partition("\t")
            if not tab:
                raise ValueError(f"{path} row {row}: {line[:40]!r}, wanted a city, a tab and its state")
            states[city] = state
        return states

    def find(self, kind: str, name: str, city: str) -> list[Place]:
        """The official look-up: every row of the city whose name contains `name`, in file order."""
        return [place for place in self.places[kind].get(city, []) if name in place.name]

    def road(self, origin: str, destination: str) -> Road | None:
        """None: unknown, or longer than a day."""
        return self.roads.get((origin, destination))


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; a TravelPlanner database has background/, flights/ and others")
    return path.read_text(encoding="utf-8").strip("\n").split("\n")


def _flights_file(folder: Path) -> Path:
    """The official table, else the one file in flights/ that is a part of it."""
    if (folder / FLIGHTS).is_file():
        return folder / FLIGHTS
    parts = sorted((folder / "flights").glob("clean_Flights_2022.*.csv"))
    if len(parts) > 1:
        raise ValueError(f"{folder / FLIGHTS} is missing and there are {len(parts)} parts; keep one")
    return parts[0] if parts else folder / FLIGHTS


def _restaurants(path: Path) -> Iterator[Place]:
    columns = ["Name", "City", "Cuisines", "Average Cost", "Aggregate Rating"]
    for row, (name, city, cuisines, price, rating) in read_rows(path, columns, dropna=True):
        price = number(price, f"{path} row {row}: Average Cost")
        yield Place("restaurant", name, city, price, tuple(cuisines.split(", ")), extra=(rating,))


def _attractions(path: Path) -> Iterator[Place]:
    columns = ["Name", "City", "Latitude", "Longitude"]
    for _, (name, city, *extra) in read_rows(path, columns, dropna=True):
        yield Place("attraction", name, city, 0.0, extra=tuple(extra))


def _accommodations(path: Path) -> Iterator[Place]:
    columns = ["NAME", "city", "price", "room type", "house_rules", "minimum nights", "maximum occupancy"]
    columns.append("review rate number")
    for row, cells in read_rows(path, columns, dropna=True):
        name, city, price, room_type, rules, nights, people, review = cells
        where = f"{path} row {row}"
        yield Place(
            "accommodation",
            name,
            city,
            number(price, f"{where}: price"),
            room_type=room_type,
            house_rules=rules,
            min_nights=number(nights, f"{where}: minimum nights"),
            occupancy=int(number(people, f"{where}: maximum occupancy", low=1)),
            extra=(review,),
        )


_PLACES = {"restaurant": _restaurants, "attraction": _attractions, "accommodation": _accommodations}


@lru_cache(maxsize=4)
def database(folder: Path) -> Database:
    """The database of a folder, read once per process."""
    return Database(folder)


def read_records(data: Path, split: str) -> tuple[Path, list[dict]]:
    """The file of a split and its records: <split>.csv as on the Hugging Face hub (lists and dicts as
    Python literals in cells), <split>.jsonl, or <split>_gold_structured.jsonl."""
    names = [f"{split}.csv", f"{split}.jsonl", f"{split}_gold_structured.jsonl"]
    path = next((data / name for name in names if (data / name).is_file()), None)
    if path is None:
        raise ValueError(f"no split {split!r} in {data}; wanted one of {', '.join(names)}")
    if path.suffix == ".jsonl":
        return path, read_jsonl(path)
    csv.field_size_limit(1 << 24)  # reference information is long
    with open(path, encoding="utf-8-sig", newline="") as file:
        return path, list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict]:
    records = []
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} row {row}: no JSON ({error}); wanted one object a line") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path} row {row}: a {type(record).__name__}, wanted an object")
        records.append(record)
    return records


def literal(value, where: str):
    """A list, dict or number: as it is, or from its Python literal in a CSV cell."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{where}={value[:40]!r}, wanted a Python or JSON literal") from None


def parse_query(record: dict, *, id: str, where: str) -> Query:
    """A query in structured form. Raises ValueError that starts with `where`, file and row."""

    def get(key: str, kind: type, wanted: str, *, ok=lambda value: True):
        value = record.get(key)
        if value is None:
            raise ValueError(f"{where}: no {key!r}, wanted {wanted}")
        value = value if kind is str else literal(value, f"{where}: {key}")
        if not isinstance(value, kind) or isinstance(value, bool) or not ok(value):
            raise ValueError(f"{where}: {key}={str(value)[:40]!r}, wanted {wanted}")
        return value

    days = get("days", int, "3, 5 or 7", ok=lambda x: x in (3, 5, 7))
    dates = get("date", list, f"{days} dates YYYY-MM-DD", ok=lambda x: len(x) == days)
    wishes = get("local_constraint", dict, "a dict of house rule, cuisine, room type, transportation")

    def wish(key: str, allowed) -> str:
        value = wishes.get(key) or ""
        if value and value not in allowed:
            raise ValueError(f"{where}: {key}={str(value)[:40]!r}, wanted one of {', '.join(allowed)}")
        return value

    cuisines = wishes.get("cuisine") or ()
    if not isinstance(cuisines, (list, tuple)) or not all(isinstance(c, str) for c in cuisines):
        raise ValueError(f"{where}: cuisine={str(cuisines)[:40]!r}, wanted a list of names")
    return Query(
        id=id,
        query=get("query", str, "the request's text"),
        level=get("level", str, ", ".join(LEVELS), ok=lambda x: x in LEVELS),
        days=days,
        org=get("org", str, "a city"),
        dest=get("dest", str, "a city or state"),
        num_cities=get("visiting_city_number", int, "1, 2 or 3", ok=lambda x: x in (1, 2, 3)),
        dates=tuple(map(str, dates)),
        people=get("people_number", int, "1 or more", ok=lambda x: x > 0),
        budget=get("budget", (int, float), "dollars", ok=lambda x: 0 <= x < 1e9),
        house_rule=wish("house rule", HOUSE_RULES),
        cuisines=tuple(cuisines),
        room_type=wish("room type", ROOM_TYPES),
        transportation=wish("transportation", TRANSPORT),
    )


def gold_plan(record: dict, *, where: str) -> list | None:
    """The human's plan of a training record: `plan`, or `annotated_plan`, whose first element may repeat
    the query."""
    plan = literal(record.get("plan") or record.get("annotated_plan") or None, f"{where}: annotated_plan")
    if isinstance(plan, list) and plan and isinstance(plan[0], dict) and "org" in plan[0]:
        plan = plan[1] if len(plan) == 2 and isinstance(plan[1], list) else plan[1:]
    return plan if isinstance(plan, list) and plan else None
