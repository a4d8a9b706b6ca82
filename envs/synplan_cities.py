"""The 48 cities of SynPlan-R's travel world and the minutes between them: a fixed matrix, the same for every
instance. Coordinates are rounded to half a degree; speeds are ours (the paper gives neither)."""

import math

LOCAL_MIN = 30  # minutes between two places of one city
CITIES = {  # name -> (degrees north, degrees east)
    "Albuquerque": (35.0, -106.5), "Anchorage": (61.0, -150.0), "Atlanta": (33.5, -84.5),
    "Austin": (30.5, -97.5), "Baltimore": (39.5, -76.5), "Billings": (46.0, -108.5), "Boise": (43.5, -116.0),
    "Boston": (42.5, -71.0), "Buffalo": (43.0, -79.0), "Charleston": (33.0, -80.0),
    "Charlotte": (35.0, -81.0), "Chicago": (42.0, -87.5), "Cincinnati": (39.0, -84.5),
    "Cleveland": (41.5, -81.5), "Columbus": (40.0, -83.0), "Dallas": (33.0, -97.0), "Denver": (39.5, -105.0),
    "Detroit": (42.5, -83.0), "El Paso": (32.0, -106.5), "Fargo": (47.0, -97.0), "Honolulu": (21.5, -158.0),
    "Houston": (30.0, -95.5), "Indianapolis": (40.0, -86.0), "Jacksonville": (30.5, -81.5),
    "Kansas City": (39.0, -94.5), "Las Vegas": (36.0, -115.0), "Los Angeles": (34.0, -118.5),
    "Louisville": (38.0, -85.5), "Memphis": (35.0, -90.0), "Miami": (26.0, -80.0), "Milwaukee": (43.0, -88.0),
    "Minneapolis": (45.0, -93.5), "Nashville": (36.0, -87.0), "New Orleans": (30.0, -90.0),
    "New York": (40.5, -74.0), "Oklahoma City": (35.5, -97.5), "Omaha": (41.5, -96.0),
    "Philadelphia": (40.0, -75.0), "Phoenix": (33.5, -112.0), "Pittsburgh": (40.5, -80.0),
    "Portland": (45.5, -122.5), "Raleigh": (36.0, -78.5), "Salt Lake City": (41.0, -112.0),
    "San Diego": (32.5, -117.0), "San Francisco": (38.0, -122.5), "Seattle": (47.5, -122.5),
    "St. Louis": (38.5, -90.0), "Tampa": (28.0, -82.5),
}  # fmt: skip


def distance_km(a: str, b: str) -> float:
    """Great-circle distance of two cities."""
    (north, east), (north2, east2) = (tuple(map(math.radians, CITIES[city])) for city in (a, b))
    half = math.sin((north2 - north) / 2) ** 2
    half += math.cos(north) * math.cos(north2) * math.sin((east2 - east) / 2) ** 2
    return 2 * 6371 * math.asin(math.sqrt(half))


def ground_minutes(a: str, b: str, grid: int) -> int:
    """Minutes by road at 90 km/h, and LOCAL_MIN to set off, in multiples of `grid`; LOCAL_MIN in a city."""
    return _up(LOCAL_MIN + 60 * distance_km(a, b) / 90, grid)


def flight_minutes(a: str, b: str, grid: int) -> int:
    """Minutes by air at 750 km/h, and 40 for start and landing, in multiples of `grid`."""
    return _up(40 + 60 * distance_km(a, b) / 750, grid)


def _up(minutes: float, grid: int) -> int:
    return grid * math.ceil(minutes / grid - 1e-9)
