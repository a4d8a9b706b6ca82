"""TravelPlanner's seven tools with JSON calls: what each takes, and its result as text."""

import difflib
import json
import re

from envs.base import Tool
from envs.travelplanner_data import SEARCH_COLUMNS, Database, Place


def _tool(name: str, description: str, /, **arguments: str) -> Tool:
    """A Tool whose arguments are required strings, each with its description."""
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    return Tool(name, description, {"type": "object", "properties": properties, "required": list(arguments)})


TOOLS = [
    _tool("FlightSearch", "Flights of one day", origin="city", destination="city", date="YYYY-MM-DD"),
    _tool("GoogleDistanceMatrix", "Road time, distance, cost", origin="city", destination="city", mode=""),
    _tool("AccommodationSearch", "Rooms in a city", city=""),
    _tool("RestaurantSearch", "Restaurants in a city", city=""),
    _tool("AttractionSearch", "Sights in a city", city=""),
    _tool("CitySearch", "Cities of a state", state=""),
    _tool("NotebookWrite", "Keep the last result in the notebook", description="label of the entry"),
]
TOOLS[1].parameters["properties"]["mode"] = {"type": "string", "enum": ["self-driving", "taxi"]}
_KINDS = {
    "AccommodationSearch": "accommodation",
    "RestaurantSearch": "restaurant",
    "AttractionSearch": "attraction",
}


def search(data: Database, name: str, arguments: dict) -> str:
    """Result of a search tool: JSON rows under a line of column names, or the official sentence that there
    is nothing. Raises ValueError for cities, states and dates that do not exist, with the nearest name."""
    if name == "CitySearch":
        cities = [city for city, state in data.states.items() if state == arguments["state"]]
        return to_json(cities) if cities else _unknown("state", arguments["state"], set(data.states.values()))
    for key in ("city", "origin", "destination"):
        if key in arguments and arguments[key] not in data.cities | data.states.keys():
            _unknown(key, arguments[key], data.cities)
    if name in _KINDS:
        return places(data, _KINDS[name], arguments["city"])
    origin, destination = arguments["origin"], arguments["destination"]
    if name == "GoogleDistanceMatrix":
        return road(data, origin, destination, arguments["mode"])
    date = arguments["date"]
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise ValueError(f"date: {date[:20]!r} is not in the format YYYY-MM-DD")
    flights = data.flights.between(origin, destination, date)
    if not flights:
        return f"There is no flight from {origin} to {destination} on {date}."
    rows = [[f.number, _number(f.price), f.depart, f.arrive, f.elapsed] for f in flights]
    return table(["number", "price", "departure", "arrival", "duration"], rows)


def _unknown(key: str, value: str, known: set[str]):
    near = difflib.get_close_matches(value[:40], sorted(known), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{key}: no {value[:40]!r} in the database{hint}")


def places(data: Database, kind: str, city: str) -> str:
    """All places of a kind in a city, in file order."""
    found = data.places[kind].get(city)
    if not found:
        return f"There is no {'restaurant' if kind == 'restaurant' else 'attraction'} in this city."
    return table(SEARCH_COLUMNS[kind], [_row(place) for place in found])


def _row(place: Place) -> list:
    if place.kind == "attraction":
        return [place.name, *place.extra]
    if place.kind == "restaurant":
        return [place.name, ", ".join(place.cuisines), _number(place.price), *place.extra]
    nights = _number(place.min_nights)
    rest = [place.room_type, place.house_rules, nights, place.occupancy, *place.extra]
    return [place.name, _number(place.price), *rest]


def road(data: Database, origin: str, destination: str, mode: str) -> str:
    """One line in the official words."""
    if (origin, destination) not in data.roads:
        return f"{mode}, from {origin} to {destination}, no valid information."
    if (found := data.road(origin, destination)) is None:
        return "No valid information."
    way = f"duration: {found.duration}, distance: {found.distance}, cost: {found.cost(mode)}"
    return f"{mode}, from {origin} to {destination}, {way}"


def table(columns, rows: list[list]) -> str:
    """JSON list of rows, the first the column names."""
    return to_json([list(columns), *rows])


def to_json(value) -> str:
    """Compact JSON, no blanks, no \\u escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
