"""All of a TripTailor folder that requests share: places, rides, and the information handed out per request.

Read-only and lazy: a city's places and a pair's rides are made when they are first asked for. A folder with
more than LARGE bytes of CSV is read once into an index beside the data (envs/triptailor_index.py), in the
project's .cache where that folder cannot be written to. Measured on triptailor_large's full size on one core:
index made in 10 s (43 MB), later starts 0.2 s and 73 MB, 345 MB once all cities have been asked for.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path

from envs.triptailor_data import (
    COLUMNS,
    CSV_FILES,
    Place,
    Ride,
    TrainStop,
    normal,
    read_flights,
    read_places,
    read_trains,
)
from envs.triptailor_index import INDEX_NAME, Index, members, open_index, write_index

LARGE = 4_000_000  # bytes of CSV from which on a folder is indexed; ours
FORMAT = "1"  # of the index; another one makes old indexes void
INFORMATION = ("given_info_data", "infomation")  # what a planner was handed; what the human plan used


class Cities(Mapping):
    """City (as normal() writes it) -> its places of one kind, by ascending price, then name."""

    def __init__(self, tables, kind: str):
        self._tables, self._kind = tables, kind
        self._cities = dict.fromkeys(tables.get(f"cities/{kind}"))

    def __getitem__(self, city: str) -> list[Place]:
        places = self._cities[city]
        if places is None:
            rows = self._tables.get(f"{self._kind}/{city}")
            places = self._cities[city] = [Place(self._kind, *row) for row in rows]
        return places

    def __iter__(self):
        return iter(self._cities)

    def __len__(self):
        return len(self._cities)


class Database:
    """All places and rides of a folder, never changed: environments share it.

    places[kind][city]       list of Place by ascending price, then name; city as normal() writes it
    named(kind, city, name)  the places of that exact (normal) name; names may repeat in a city
    rides(origin, dest)      trains and flights by ascending fare, then number
    information(split, pid)  the record of INFORMATION for a request, parsed; None if the folder has none
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._tables = tables_of(self.folder)
        self.places = {kind: Cities(self._tables, kind) for kind in COLUMNS}
        trains = self._tables.get("trains").items()
        self._trains = {number: [TrainStop(*stop) for stop in rows] for number, rows in trains}
        self._by_word: dict[str, set[str]] = defaultdict(set)  # first word of a station -> train numbers
        for number, stops in self._trains.items():
            for stop in stops:
                self._by_word[stop.station.partition(" ")[0]].add(number)
        self._names: dict[tuple[str, str], dict[str, list[Place]]] = {}
        self._rides: dict[tuple[str, str], list[Ride]] = {}

    def named(self, kind: str, city: str, name: str) -> list[Place]:
        key = kind, normal(city)
        if key not in self._names:
            names = defaultdict(list)
            for place in self.places[kind].get(key[1], []):
                names[normal(place.name)].append(place)
            self._names[key] = dict(names)
        return self._names[key].get(normal(name), [])

    def rides(self, origin: str, destination: str) -> list[Ride]:
        pair = normal(origin), normal(destination)
        if pair not in self._rides:
            trains = [self._train(number, origin, destination) for number in self._calling_at(*pair)]
            flights = [_ride(row) for row in self._tables.get("flights/" + "/".join(pair), [])]
            rides = flights + [train for train in trains if train is not None]
            self._rides[pair] = sorted(rides, key=lambda r: (r.fares[0], r.number, r.depart))
        return self._rides[pair]

    def _calling_at(self, *cities: str) -> list[str]:
        """Numbers of the trains with a stop whose name begins like that of each city."""
        first, *others = (self._by_word.get(city.partition(" ")[0], set()) for city in cities)
        return sorted(first.intersection(*others))

    def _train(self, number: str, origin: str, destination: str) -> Ride | None:
        """The ride between the first stop of each city, or None. Cumulative prices are not always
        monotone officially; a ride whose fare is not positive is left out."""
        stops = self._trains[number]
        start = next((i for i, stop in enumerate(stops) if serves(stop.station, origin)), None)
        end = next((i for i, stop in enumerate(stops) if serves(stop.station, destination)), None)
        if start is None or end is None or start >= end:
            return None
        first, last = stops[start], stops[end]
        fares = tuple(b - a for a, b in zip(first.fares, last.fares, strict=True) if min(a, b) >= 0 and b > a)
        if first.depart is None or last.arrive is None or not fares:
            return None
        arrive = last.arrive + 1440 * (last.arrive <= first.depart)
        return Ride("train", number, origin, destination, first.depart, arrive, fares, (True,) * 7)

    def information(self, split: str, pid: int, *, sources: tuple[str, ...] = INFORMATION) -> dict | None:
        for source in sources:
            text = self._tables.text(f"{information_file(source, split).stem}/{pid}")
            if text is not None:
                return json.loads(text)
        return None


def information_file(source: str, split: str) -> Path:
    """Name of an information file. pids are not unique across splits: the official names are the test
    split's, another split's files have its name behind ("given_info_data_train.json")."""
    return Path(f"{source}.json" if split == "test" else f"{source}_{split}.json")


def serves(station: str, city: str) -> bool:
    """Whether a station (normal name) is the city's: it begins with the city's name as whole words. The
    official rule, "contains", also gives "Chuxuzhou" to Xuzhou; both give "Suzhou East" to Suzhou."""
    return f"{station} ".startswith(f"{normal(city)} ")


def _ride(row: list) -> Ride:
    *fields, fares, weekdays = row
    return Ride(*fields, tuple(fares), tuple(weekdays))


class Tables(dict):
    """What an Index holds, in memory; the information is read when it is first asked for."""

    def __init__(self, folder: Path):
        super().__init__(shared_tables(folder))
        self._folder = folder
        self._texts: dict[str, str] | None = None

    def text(self, key: str) -> str | None:
        if self._texts is None:
            self._texts = dict(information_texts(self._folder))
        return self._texts.get(key)


def tables_of(folder: Path) -> Index | Tables:
    """Everything of a folder by key: from its index, made where it is missing or old, or in memory."""
    files = [folder / name for name in CSV_FILES.values()]
    if sum(file.stat().st_size for file in files if file.is_file()) < LARGE:
        return Tables(folder)
    files += sorted(folder.glob("*info*.json"))
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    stamp = hashlib.blake2b(repr((FORMAT, facts)).encode(), digest_size=16).hexdigest()
    own = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    beside = folder / INDEX_NAME
    elsewhere = Path(__file__).resolve().parents[1] / ".cache" / f"{own}-{INDEX_NAME}"
    for path in (beside, elsewhere):
        if (index := open_index(path, stamp)) is not None:
            return index
    writable = os.access(folder, os.W_OK)
    return write_index(beside if writable else elsewhere, stamp, index_entries(folder))


def index_entries(folder: Path) -> Iterator[tuple[str, str]]:
    for key, value in shared_tables(folder):
        yield key, json.dumps(value, ensure_ascii=False)
    yield from information_texts(folder)


def shared_tables(folder: Path) -> Iterator[tuple[str, list | dict]]:
    """(key, value): "cities/KIND", "KIND/CITY" (rows of Place without the kind), "flights/A/B", "trains"."""
    for kind in COLUMNS:
        cities = defaultdict(list)
        for place in read_places(folder / CSV_FILES[kind], kind):
            cities[normal(place.city)].append(place)
        yield f"cities/{kind}", list(cities)
        for city, places in cities.items():
            places.sort(key=lambda place: (place.price, place.name))
            yield f"{kind}/{city}", [astuple_of(place) for place in places]
    flights = defaultdict(list)
    for flight in read_flights(folder / CSV_FILES["flight"]):
        flights[normal(flight.origin), normal(flight.destination)].append(astuple(flight))
    for pair, rows in flights.items():
        yield "flights/" + "/".join(pair), rows
    trains = read_trains(folder / CSV_FILES["train"])
    yield "trains", {number: [astuple(stop) for stop in stops] for number, stops in trains.items()}


def astuple_of(place: Place) -> tuple:
    """A place's fields but the kind; dataclasses.astuple copies deeply, which takes ten times as long."""
    return (
        *(place.name, place.city, place.price, place.lat, place.lon),
        *(place.tags, place.duration, place.hours),
    )


def information_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """("given_info_data/PID", JSON text) and so on of every information file that is there."""
    for source in INFORMATION:
        for file in sorted(folder.glob(f"{source}*.json")):
            for pid, text in members(file):
                yield f"{file.stem}/{pid}", text


def database(folder: Path) -> Database:
    """The Database of a folder, read again only when one of its files has changed."""
    folder = Path(folder).resolve()
    files = [*(folder / name for name in CSV_FILES.values()), *sorted(folder.glob("*info*.json"))]
    changed = tuple((file.name, file.stat().st_mtime_ns if file.is_file() else 0) for file in files)
    return _database(folder, changed)


@lru_cache(maxsize=4)
def _database(folder: Path, _changed: tuple[tuple[str, int], ...]) -> Database:
    return Database(folder)
