"""TripTailor: plan a trip of 2 to 7 days to one city with five search tools, then answer with one JSON plan.

The environment over any folder in TripTailor's layout, official or from envs/trips.py. The official
repository has no tool-calling agent; the tools are ours after its search classes: JSON in, a JSON list
out, capped, in a fixed order. Scored by envs/triptailor_verify.py (strict) and envs/triptailor_official.py.
Benchmark: TripTailor (arXiv:2508.01432).
"""

import heapq
import json
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envs import triptailor_official
from envs.base import Env, Message, PlanView, Task, Tool, Verdict
from envs.triptailor_data import (
    CATEGORIES,
    WEEKDAYS,
    Place,
    Request,
    clock,
    km,
    normal,
    parse_request,
    read_json,
)
from envs.triptailor_database import Database, database, information_file
from envs.triptailor_metrics import difficulty, metrics
from envs.triptailor_plan import NO_PLAN, Trip, parse_plan, resolve, view
from envs.triptailor_text import read_record
from envs.triptailor_verify import unreadable, verify_strict

__all__ = ["TOOLS", "Output", "TripTailor", "load", "metrics", "search", "to_json"]

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


Pool = dict[str, set[str]] | None  # kind -> normal names a plan may use; None: the whole database


def search(data: Database, name: str, arguments: dict, output: Output, pool: Pool = None) -> list[dict]:
    """Rows of a tool. Raises ValueError with what to ask instead, for cities, weekdays, categories and
    places that do not exist."""
    limit = min(arguments.get("limit", output.max_rows), output.max_rows)
    if limit < 1:
        raise ValueError("limit: at least 1")
    if name in ("search_flights", "search_trains"):
        return _rides(data, name, arguments)[:limit]
    places = _places(data, name, arguments, pool)
    if arguments.get("near"):
        centre = _centre(data, arguments["city"], arguments["near"])
        places = heapq.nsmallest(limit, places, key=lambda place: (_far(centre, place), place.name))
        rows = [{**_row(place, output), "km": round(_far(centre, place), 1)} for place in places]
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


def _places(data: Database, name: str, arguments: dict, pool: Pool) -> list[Place]:
    kind = {"search_hotels": "hotel", "search_attractions": "sight", "search_restaurants": "restaurant"}[name]
    city = normal(arguments["city"])
    if city not in data.places[kind]:
        raise ValueError(f"no {kind}s in {arguments['city'][:40]!r}")
    low, high = arguments.get("min_price", 0), arguments.get("max_price", math.inf)
    places = data.places[kind][city]  # by price
    prices = (bisect_left(places, low, key=_price), bisect_right(places, high, key=_price))
    places = places[slice(*prices)]
    if pool is not None:
        places = [place for place in places if normal(place.name) in pool[kind]]
    if arguments.get("category"):
        category = arguments["category"].strip().capitalize()
        if category not in CATEGORIES:
            raise ValueError(f"category: one of {', '.join(CATEGORIES)}")
        places = [place for place in places if place.tags == category]
    word = normal(arguments.get("keyword", ""))
    return [place for place in places if word in normal(f"{place.name} {place.tags}")] if word else places


def _price(place: Place) -> float:
    return place.price


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

    reference  the human's (or heuristic planner's) plan, resolved: the record's final_plan_json, else what
               envs/triptailor_text.py reads in its final_plan
    pool       kind -> normal names that the plan may use and the tools show; None: the whole database
    """

    def __init__(self, task: Task, request: Request, data: Database, output: Output, pool: Pool = None):
        super().__init__(task, TOOLS)
        self.request, self.data, self.output, self.pool = request, data, output, pool
        self.calls: dict[str, int] = {}  # tool -> valid calls so far
        self._scored: tuple[str, triptailor_official.Score | None] | None = None  # of which answer

    def reset(self) -> list[Message]:
        self.answer_text, self.done, self.calls = "", False, {}
        return [Message("system", SYSTEM), Message("user", self.request.query)]

    def call(self, name: str, arguments: dict) -> str:
        self.calls = {**self.calls, name: self.calls.get(name, 0) + 1}  # a new one: twins share the old
        return to_json(search(self.data, name, arguments, self.output, self.pool))

    def trip(self) -> Trip:
        """The final answer, resolved. Raises ValueError if it holds no plan."""
        return resolve(parse_plan(self.answer_text), self.request, self.data)

    def verify(self) -> Verdict:
        try:
            trip = self.trip()
        except ValueError as error:
            return unreadable(str(error))
        return verify_strict(trip, self.pool)

    def information(self, *sources: str) -> dict | None:
        """What the request's files hand out: "given_info_data", else "infomation"; None without either."""
        split, _, pid = self.task.id.rpartition("/")
        return self.data.information(split, int(pid), **({"sources": sources} if sources else {}))

    def direct_messages(self) -> list[Message]:
        """The request with its candidates in one prompt. Raises ValueError where no file hands them out."""
        from envs.triptailor_workflow import direct_messages  # it reads this file

        return direct_messages(self)

    def workflow(self, seed: int) -> Generator[list[Message], str, str]:
        """The official pipeline: yields questions, is sent replies, returns the answer's text."""
        from envs.triptailor_workflow import workflow

        return workflow(self, seed=seed)

    def official_score(self) -> triptailor_official.Score | None:
        """The final answer by the benchmark's evaluator; None where the folder has no information for the
        request, and so nothing that the evaluator could look names up in."""
        if self._scored is None or self._scored[0] != self.answer_text:
            info, request = self.information(), self.request
            limits = {"days": request.days, "budget": request.budget, "meals": request.meals}
            score = info and triptailor_official.score(self.answer_text, info, **limits)
            self._scored = self.answer_text, score or None
        return self._scored[1]

    def official(self) -> dict[str, bool | None] | None:
        score = self.official_score()
        return None if score is None else {**score.checks, "pass": score.passed}

    def facts(self) -> dict:
        """What envs/triptailor_metrics.py needs of the episode besides its verdicts: JSON values.

        days, calls_by_tool (valid calls), cost (¥ as stated, None if unknown), route_km and
        reference_route_km (mean legs by triptailor_official.ROUTE_MODES; None where the evaluator gives none)
        """
        score = self.official_score()
        facts = {"days": self.request.days, "calls_by_tool": dict(sorted(self.calls.items()))}
        facts["cost"] = None if score is None else score.cost
        facts["route_km"] = None if score is None else score.route_km
        used = self.information("infomation")
        try:
            plan = self.reference_plan()
        except ValueError:
            used = None
        return facts | {"reference_route_km": triptailor_official.route_km(plan, used) if used else None}

    @property
    def stratum(self) -> str:
        """easy or hard, for tables by difficulty."""
        return difficulty({"facts": {"days": self.request.days}})

    def view(self) -> PlanView:
        try:
            return view(self.trip())
        except ValueError:
            return NO_PLAN

    def reference_plan(self) -> dict:
        """The record's own plan as JSON; from its day texts where it has no final_plan_json that is a plan.
        Raises ValueError that names the request if it has neither."""
        text, missing = self.task.data.get("final_plan_json"), "no final_plan_json"
        if isinstance(text, str):
            try:
                return parse_plan(text)
            except ValueError as error:
                missing = f"final_plan_json: {error}"
        try:
            reading = read_record(self.task.data)
            if reading.plan is None:
                raise ValueError(f"final_plan cannot be read: {reading.unread[-1]}")
            return parse_plan(to_json(reading.plan))
        except ValueError as error:
            reason = f"{missing}; nothing to compare a plan with: {error}"
            raise ValueError(f"{self.task.id}: {reason}") from None

    def reference(self) -> Trip:
        """reference_plan, resolved: of a ride by its number, where its times are not the schedule's."""
        return resolve(self.reference_plan(), self.request, self.data, by_number=True)

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
    pool: Literal["database", "request"] = "database",
) -> list[TripTailor]:
    """One environment per request of a split ("train", "test": the file of that name in `data`).

    n            requests drawn without replacement by `seed`, in drawn order; None: all, in file order
    max_rows     rows per tool result at most (official: the 10 nearest restaurants)
    hours, coordinates   whether sights show opening hours, places their coordinates
    pool         what tools show and strict scoring accepts: "database", or "request": the request's
                 candidates in given_info_data.json (another split's: given_info_data_SPLIT.json)
    raises       ValueError naming file, row, field and value of what cannot be read
    """
    if pool not in ("database", "request"):
        raise ValueError(f"pool={pool!r}, wanted database or request")
    folder = Path(data)
    path = folder / f"{split}.json"
    records = read_json(path, list)
    if n is not None and not 0 < n <= len(records):
        raise ValueError(f"n={n}, {path} has {len(records)} requests; choose 1 to {len(records)}")
    order = range(len(records)) if n is None else random.Random(seed).sample(range(len(records)), n)
    shared, output = database(folder), Output(max_rows, hours, coordinates)
    envs, rows = [], {}
    for i in order:
        where = f"{path} row {i + 1}"
        if not isinstance(records[i], dict):
            raise ValueError(f"{where} is a {type(records[i]).__name__}, wanted an object")
        request = parse_request(records[i], split=split, where=where)
        if request.id in rows:
            raise ValueError(f"{where}: pid {records[i]['pid']} is that of row {rows[request.id]} too")
        rows[request.id] = i + 1
        names = request_pool(shared, request, where=where) if pool == "request" else None
        envs.append(TripTailor(Task(request.id, records[i]), request, shared, output, names))
    return envs


def request_pool(data: Database, request: Request, *, where: str) -> dict[str, set[str]]:
    """Kind -> normal names of a request's candidates. Raises ValueError naming the file that lacks them."""
    split, _, pid = request.id.rpartition("/")
    given = data.information(split, int(pid), sources=("given_info_data",))
    if not isinstance(given, dict):
        file = data.folder / information_file("given_info_data", split)
        raise ValueError(f"{where}: {file} has no object for pid {pid}; load with pool='database'")
    names = {}
    for kind, keys in triptailor_official.LISTS.items():
        found = next((given[key] for key in keys if key in given), None)
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            file = information_file("given_info_data", split)
            raise ValueError(f"{where}: {file} {pid} has no list {' or '.join(keys)}; fix the file")
        texts = (row.get(key) for row in found for key in triptailor_official.NAME_KEYS[kind])
        names[kind] = {normal(text) for text in texts if isinstance(text, str)}
    return names
