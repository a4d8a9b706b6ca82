"""TripTailor: plan a trip of 2 to 7 days to one city with five search tools, then answer with one JSON plan.

The environment over any folder in TripTailor's layout, official or from envs/trips.py. The official
repository has no tool-calling agent; the tools are ours after its search classes: JSON in, a JSON list
out, capped, in a fixed order. Scored by envs/triptailor_verify.py in strict mode.
Benchmark: TripTailor (arXiv:2508.01432).
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from envs.base import Env, Message, PlanView, Task, Tool, Verdict
from envs.triptailor_data import (
    CATEGORIES,
    WEEKDAYS,
    Database,
    Place,
    Request,
    clock,
    database,
    km,
    normal,
    parse_request,
    read_json,
)
from envs.triptailor_plan import NO_PLAN, Trip, parse_plan, resolve, view
from envs.triptailor_verify import unreadable, verify_strict

SYSTEM = (
    "You plan trips. First call every search you need. Then answer with one JSON plan and nothing else: "
    '{"hotel":[{"day":1,"name":,"price_per_night":}],"transportation":[{"day":1,"mode":"Train"|"Flight",'
    '"route":"A to B","number":,"time":"HH:MM–HH:MM","price":},{"day":N, the return}],"itinerary":{"day_1":'
    '[{"time":"HH:MM–HH:MM","location":,"price":,"action":"sightseeing"|"dining"}],"day_2":[]}}. '
    "Copy names, times and prices from the search results; repeat no place; keep to the budget."
)


def _tool(name: str, description: str, required: str, optional: str = "") -> Tool:
    """A Tool whose arguments are "city" (a string) or "limit:integer"."""
    properties = {}
    for argument in f"{required} {optional}".split():
        key, _, kind = argument.partition(":")
        properties[key] = {"type": kind or "string"}
    names = [argument.partition(":")[0] for argument in required.split()]
    return Tool(name, description, {"type": "object", "properties": properties, "required": names})


TOOLS = [
    _tool("search_flights", "Flights on a weekday", "origin destination weekday"),
    _tool("search_trains", "Trains, daily", "origin destination"),
    _tool("search_hotels", "Hotels, cheapest first", "city", "category max_price:number limit:integer"),
    _tool("search_attractions", "Sights, cheapest first", "city", "keyword limit:integer"),
    _tool(
        "search_restaurants",
        "Meals in a price range",
        "city min_price:number max_price:number",
        "near limit:integer",
    ),
]


@dataclass(frozen=True, slots=True)
class Output:
    """What a tool result shows."""

    max_rows: int  # rows at most; a call's limit may only lower it
    hours: bool  # opening hours of sights
    coordinates: bool  # "lat" and "lon" of places


def search(data: Database, name: str, arguments: dict, output: Output) -> list[dict]:
    """Rows of a tool. Raises ValueError with what to ask instead, for cities, weekdays, categories and
    places that do not exist."""
    limit = min(arguments.get("limit", output.max_rows), output.max_rows)
    if limit < 1:
        raise ValueError("limit: at least 1")
    if name in ("search_flights", "search_trains"):
        return _rides(data, name, arguments)[:limit]
    places = _places(data, name, arguments)
    if arguments.get("near"):
        centre = _centre(data, arguments["city"], arguments["near"])
        places = sorted(places, key=lambda place: (_far(centre, place), place.name))
        rows = [{**_row(place, output), "km": round(_far(centre, place), 1)} for place in places[:limit]]
        return [{key: x for key, x in row.items() if x != math.inf} for row in rows]
    return [_row(place, output) for place in places[:limit]]


def _rides(data: Database, name: str, arguments: dict) -> list[dict]:
    mode = name.removeprefix("search_").removesuffix("s")
    weekday = arguments.get("weekday", "").strip().capitalize()
    if weekday not in ("", *WEEKDAYS):
        raise ValueError(f"weekday: one of {', '.join(WEEKDAYS)}")
    rides = data.rides(arguments["origin"], arguments["destination"])
    rows = []
    for ride in rides:
        if ride.mode == mode and ride.runs(weekday):
            row = {"number": ride.number, "depart": clock(ride.depart), "arrive": clock(ride.arrive)}
            rows.append({**row, "price": _number(ride.fares[0])})
    return rows


def _places(data: Database, name: str, arguments: dict) -> list[Place]:
    kind = {"search_hotels": "hotel", "search_attractions": "sight", "search_restaurants": "restaurant"}[name]
    city = normal(arguments["city"])
    if city not in data.places[kind]:
        raise ValueError(f"no {kind}s in {arguments['city'][:40]!r}")
    low, high = arguments.get("min_price", 0), arguments.get("max_price", math.inf)
    places = [place for place in data.places[kind][city] if low <= place.price <= high]
    if arguments.get("category"):
        category = arguments["category"].strip().capitalize()
        if category not in CATEGORIES:
            raise ValueError(f"category: one of {', '.join(CATEGORIES)}")
        places = [place for place in places if place.tags == category]
    word = normal(arguments.get("keyword", ""))
    return [place for place in places if word in normal(f"{place.name} {place.tags}")]


def _centre(data: Database, city: str, near: str) -> Place:
    for kind in ("hotel", "sight", "restaurant"):
        if found := data.named(kind, city, near):
            return found[0]
    raise ValueError(f"near: no place {near[:40]!r} in {city[:40]}; give an exact name")


def _far(a: Place, b: Place) -> float:
    """km between two places, infinite where a coordinate is missing, so that such rows come last."""
    distance = km(a, b)
    return math.inf if math.isnan(distance) else distance


def _row(place: Place, output: Output) -> dict:
    row = {"name": place.name, "price": _number(place.price)}
    if place.kind == "sight":
        row["duration"] = place.duration
        if output.hours:
            row["hours"] = place.hours
    row[{"hotel": "category", "sight": "tags", "restaurant": "cuisine"}[place.kind]] = place.tags
    if output.coordinates and not math.isnan(place.lat + place.lon):
        row |= {"lat": place.lat, "lon": place.lon}
    return row


def _number(price: float) -> int | float:
    return int(price) if price == int(price) else price


class TripTailor(Env):
    """One request. The database is shared with all other environments of the folder, read-only.

    reference  the human's (or heuristic planner's) plan, resolved; None where the record has no
               readable final_plan_json (the official train.json has none)
    pool       kind -> normal names that the plan may use; None: the whole database
    """

    def __init__(self, task: Task, request: Request, data: Database, output: Output, pool=None):
        super().__init__(task, TOOLS)
        self.request, self.data, self.output, self.pool = request, data, output, pool

    def reset(self) -> list[Message]:
        self.answer_text, self.done = "", False
        return [Message("system", SYSTEM), Message("user", self.request.query)]

    def call(self, name: str, arguments: dict) -> str:
        return to_json(search(self.data, name, arguments, self.output))

    def trip(self) -> Trip:
        """The final answer, resolved. Raises ValueError if it holds no plan."""
        return resolve(parse_plan(self.answer_text), self.request, self.data)

    def verify(self) -> Verdict:
        try:
            trip = self.trip()
        except ValueError as error:
            return unreadable(str(error))
        return verify_strict(trip, self.pool)

    def view(self) -> PlanView:
        try:
            return view(self.trip())
        except ValueError:
            return NO_PLAN

    def reference(self) -> Trip:
        """The record's own plan, resolved. Raises ValueError that names the request if it has none."""
        text = self.task.data.get("final_plan_json")
        if not isinstance(text, str):
            raise ValueError(f"{self.task.id}: no final_plan_json; nothing to compare a plan with")
        try:
            return resolve(parse_plan(text), self.request, self.data)
        except ValueError as error:
            raise ValueError(f"{self.task.id}: final_plan_json: {error}") from None

    def reference_view(self) -> PlanView:
        return view(self.reference())


def to_json(value: list | dict) -> str:
    """Compact JSON as the tools write it and as plans are best written: no blanks, no \\u escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def load(
    split: str,
    data: str | Path,
    *,
    n: int | None = None,
    seed: int = 0,
    max_rows: int = 10,
    hours: bool = True,
    coordinates: bool = False,
    pool: bool = False,
) -> list[TripTailor]:
    """One environment per request of a split ("train", "test": the file of that name in `data`).

    n            requests drawn without replacement by `seed`, in drawn order; None: all, in file order
    max_rows     rows per tool result at most (official: the 10 nearest restaurants)
    hours, coordinates   whether sights show opening hours, places their coordinates
    pool         plans may use only the request's candidates in given_info_data.json
    raises       ValueError naming file, row, field and value of what cannot be read
    """
    folder = Path(data)
    path = folder / f"{split}.json"
    records = read_json(path, list)
    if n is not None and not 0 < n <= len(records):
        raise ValueError(f"n={n}, {path} has {len(records)} requests; choose 1 to {len(records)}")
    order = range(len(records)) if n is None else random.Random(seed).sample(range(len(records)), n)
    shared, output = database(folder), Output(max_rows, hours, coordinates)
    pools = read_json(folder / "given_info_data.json", dict) if pool else {}
    envs = []
    for i in order:
        where = f"{path} row {i + 1}"
        if not isinstance(records[i], dict):
            raise ValueError(f"{where} is a {type(records[i]).__name__}, wanted an object")
        request = parse_request(records[i], split=split, where=where)
        names = pool_names(pools, str(records[i]["pid"]), where=where) if pool else None
        envs.append(TripTailor(Task(request.id, records[i]), request, shared, output, names))
    return envs


def pool_names(pools: dict, pid: str, *, where: str) -> dict[str, set[str]]:
    """Kind -> normal names in given_info_data.json[pid]; the hotels lie under "hotels" or "hotel"."""
    given = pools.get(pid)
    if not isinstance(given, dict):
        raise ValueError(f"{where}: pid {pid} is not in given_info_data.json; load with pool=False")
    rows = {
        "hotel": given.get("hotels", given.get("hotel", [])),
        "sight": given.get("attractions", []),
        "restaurant": given.get("restaurants", []),
    }
    keys = ("Hotel Name", "name_en", "poiName", "name")
    return {
        kind: {normal(row[key]) for row in found for key in keys if isinstance(row.get(key), str)}
        for kind, found in rows.items()
    }
