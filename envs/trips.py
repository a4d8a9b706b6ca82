"""The built-in world: TripTailor-format data of any size from a seed.

    python -m envs.trips --out DIR --seed 0 --cities 6 --train 2000 --test 256

Writes the official files with the official columns and keys: train.json, test.json, infomation.json and
given_info_data.json (both of the test split), five CSV files. One superset: train records carry
final_plan_json too. Everything is drawn from `seed` with one stream per record, so a record does not
depend on how many there are, and the bytes do not depend on the machine.

Made for models of a few hundred thousand parameters: names of two common words, prices in steps of ¥5,
times on the half hour, six duration texts. Each request has a reference plan by envs/trip_planner.py,
which holds all seven constraints and can be beaten: it ignores prices and some of the wishes.
"""

import argparse
import json
import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from envs.builtin import made_once
from envs.trip_planner import Options, plan_cost, plan_request
from envs.trip_tables import (
    CITIES,
    CUISINES,
    MEAL_NOUNS,
    SIGHTS,
    TIERS,
    WORDS,
    hmm,
    world_rows,
    write_csv,
)
from envs.triptailor import Output, search
from envs.triptailor_data import (
    CATEGORIES,
    CSV_FILES,
    WEEKDAYS,
    Request,
    clock,
    in_part,
    normal,
    parse_request,
)
from envs.triptailor_database import Database
from envs.triptailor_plan import Priced, Trip, resolve

INTENSITY_TEXT = {
    "relaxed": "with plenty of downtime",
    "moderate": "balancing guided exploration with some downtime",
    "high": "making the most of each day",
}
DRAWS = 5  # careless plans drawn per request; the budget is the FITTING-th cheapest of them, at the least
FITTING = 2
REFERENCE_HEED = 0.3  # probability that the reference heeds a wish


class World:
    """A written folder's database, with the rows that a traveller could find for a request."""

    def __init__(self, folder: Path, rows: dict[str, list[dict]]):
        self.database = Database(folder)
        self.rows = {kind: {} for kind in ("hotel", "sight", "restaurant")}  # kind -> city -> CSV rows
        for kind, by_city in self.rows.items():
            for row in rows[kind]:
                by_city.setdefault(row["city" if kind == "sight" else "real_city"], []).append(row)
        self.cities = sorted(self.rows["hotel"])
        self._search = lru_cache(maxsize=None)(self._find)

    def _find(self, name: str, *arguments: tuple) -> list[dict]:
        return search(self.database, name, dict(arguments), Output(10**6, hours=False, coordinates=False))

    def options(self, request: Request) -> Options:
        """All rides on the weekdays, all hotels and sights, the restaurants in the price range."""
        ways = (request.origin, request.destination), (request.destination, request.origin)
        rides = []
        for (origin, destination), day in zip(ways, request.weekdays, strict=True):
            ends = ("origin", origin), ("destination", destination)
            trains = [{**row, "mode": "Train"} for row in self._search("search_trains", *ends)]
            flights = self._search("search_flights", *ends, ("weekday", day))
            rides.append(trains + [{**row, "mode": "Flight"} for row in flights])
        city, (low, high) = ("city", request.destination), request.meals
        return Options(
            *rides,
            self._search("search_hotels", city),
            self._search("search_attractions", city),
            self._search("search_restaurants", city, ("min_price", low), ("max_price", high)),
        )


def draw_record(
    world: World, rng: random.Random, *, split: str, pid: int, days: tuple[int, int]
) -> tuple[dict, Trip]:
    """A record of train.json or test.json and its reference plan, resolved.

    The budget lets the cheap plan pass with a tenth to spare, and about FITTING of DRAWS careless ones;
    the reference is the first of those.
    """
    record = draw_request(world, rng, pid=pid, days=days)
    request = parse_request({**record, "budget": 0}, split=split, where=f"{split} {pid}")
    options = world.options(request)
    cheap = plan_cost(plan_request(request, options, rng, cheap=True), request.days)
    careless = [plan_request(request, options, rng, heed=REFERENCE_HEED) for _ in range(DRAWS)]
    costs = [plan_cost(plan, request.days) for plan in careless]
    budget = 50 * -int(-max(1.1 * cheap, sorted(costs)[FITTING - 1]) // 50)
    record["query"] = record["query"].replace("{budget}", str(budget))
    if split == "test":
        record |= {"meal_price_range": list(request.meals), "budget": budget}
    plan = careless[next(i for i, cost in enumerate(costs) if cost <= budget)]
    trip = resolve(plan, replace(request, budget=budget), world.database)
    record |= {"final_plan": plan_text(trip), "final_plan_json": json.dumps(plan, ensure_ascii=False)}
    return record, trip


def draw_request(world: World, rng: random.Random, *, pid: int, days: tuple[int, int]) -> dict:
    """The official keys of a train request; the query's budget is the placeholder {budget}."""
    origin, destination = rng.sample(world.cities, 2)
    length, weekday = rng.randint(*days), rng.randrange(7)
    leave, back = WEEKDAYS[weekday], WEEKDAYS[(weekday + length - 1) % 7]
    low, high = rng.choice(TIERS)
    sights, cuisines = rng.sample(list(SIGHTS), 2), rng.sample(CUISINES, 2)
    opening, part = rng.choice(("looking for", "planning")), rng.choice(("afternoon", "evening"))
    category = rng.choice(CATEGORIES).lower()
    intensity = rng.choice(("relaxed", "moderate", "moderate", "high"))
    query = (
        f"I am {opening} a {length}-day trip from {origin} to {destination}, departing on {leave} morning "
        f"and returning on {back} {part}, with a budget of ¥{{budget}}. I prefer staying in {category} "
        f"hotels and dining at restaurants with meal costs ranging from ¥{low} to ¥{high}. I’m interested in "
        f"exploring {sights[0]} and {sights[1]}, along with enjoying diverse cuisines such as {cuisines[0]} "
        f"and {cuisines[1]} dishes. The itinerary should be {intensity} in intensity, "
        f"{INTENSITY_TEXT[intensity]}."
    )
    return {
        "destination_city": destination,
        "departure_city": origin,
        "day": length,
        "pid": pid,
        "query": query,
    }


def plan_text(trip: Trip) -> list[str]:
    """`final_plan`: one text per day under the official headings."""
    request, hotel = trip.request, trip.hotel.found
    titles = [f"**Day {day} Itinerary**" for day in range(1, request.days + 1)]
    titles[0] = f"**Day 1 Itinerary: {request.origin} to {request.destination} **"
    titles[-1] = "**Itinerary for the Last Day of the Trip**"
    days = [[activity_text(line) for line in trip.days[f"day_{day}"]] for day in range(1, request.days + 1)]
    outbound, back = trip.rides
    arrival = outbound.found.arrive
    check_in = f"### {clock(arrival)}–{clock(arrival + 30)} | Check-in at {hotel.name}"
    night = f"{check_in}\n- **Average Price Per Night**: ¥{hotel.price:g}"
    days[0] = [ride_text(outbound, request.destination), night, *days[0]]
    days[-1] += [ride_text(back, request.origin)]
    return ["\n\n---\n\n".join([title, *sections]) for title, sections in zip(titles, days, strict=True)]


def ride_text(line: Priced, destination: str) -> str:
    ride = line.found
    price = "Ticket Price" if ride.mode == "flight" else "Second-Class Price"
    return (
        f"### {clock(ride.depart)}–{clock(ride.arrive)} | {ride.mode.capitalize()} to {destination}\n"
        f"Take the **{ride.mode}** **{ride.number}**.\n- **{price}**: ¥{ride.fares[0]:g}"
    )


def activity_text(line: Priced) -> str:
    head = f"### {clock(line.start)}–{clock(line.end)} |"
    place = line.found
    if place.kind == "restaurant":
        meal = "Lunch" if line.start < 16 * 60 else "Dinner"
        bullets = f"- **Cuisine Type**: {place.tags}\n- **Average Cost**: ¥{place.price:g}"
        return f"{head} {meal} at {place.name}\n{bullets}"
    fee = f"¥{place.price:g}" if place.price else "Free"
    bullets = f"- **Entrance Fee**: {fee}\n- **Recommended Duration**: {place.duration}"
    return f"{head} Visit {place.name}\n{bullets}\n- **Opening Hours**: {place.hours}"


def information(trip: Trip, world: World) -> dict:
    """infomation.json[pid]: what the reference plan used, and the rides in the requested parts of day."""
    rated = {f"{kind} Rating": "8.0/10" for kind in ("Product", "Environment", "Service")}
    hotel = trip.hotel.found
    at = {"latitude": hotel.lat, "longitude": hotel.lon}
    info = {"hotel": [{"Hotel Name": hotel.name, "Average Price": hotel.price, "Category": hotel.tags}]}
    info["hotel"][0] |= {"Rating": "4.0/5", **rated, **at}
    info |= rides_information(trip, world, parts=trip.request.parts)
    info["attractions"] = [
        {
            "poiid": i,
            "name": place.name,
            "name_en": place.name,
            "tag": place.tags,
            "price": place.price,
            "latitude": place.lat,
            "longitude": place.lon,
            "summary": "",
            "shortFeatures": "",
            "recommended_duration": place.duration,
            "opening_hours": place.hours,
        }
        for i, place in enumerate((line.found for line in trip.activities("sight")), start=1)
    ]
    info["restaurants"] = [
        {
            "name_en": place.name,
            "tag": place.tags,
            "price": place.price,
            "latitude": place.lat,
            "longitude": place.lon,
            "Rating": "4.0/5",
            **rated,
        }
        for place in (line.found for line in trip.activities("restaurant"))
    ]
    return info


def rides_information(trip: Trip, world: World, *, parts: tuple[str, str]) -> dict:
    """Keys transport_otd and transport_dto; `parts` keeps only rides of that part of day ("" keeps all)."""
    request, info = trip.request, {}
    ways = (request.origin, request.destination), (request.destination, request.origin)
    for key, way, weekday, part in zip(
        ("transport_otd", "transport_dto"), ways, request.weekdays, parts, strict=True
    ):
        options = info[key] = {"train_options": [], "flight_options": []}
        for ride in world.database.rides(*way):
            if not ride.runs(weekday) or not in_part(ride.depart, part):
                continue
            depart, arrive = hmm(ride.depart), hmm(ride.arrive)
            if ride.mode == "train":
                option = {"Train_Number": ride.number, "Departure_Time": depart, "Arrival_Time": arrive}
                option |= {"Second_Class_Price": ride.fares[0], "First_Class_Price": ride.fares[1]}
                options["train_options"].append(option)
            else:
                option = {"Flight Number": ride.number, "Departure Time": depart, "Arrival Time": arrive}
                option |= {"Price": ride.fares[0], "On-Time Performance": 0.8, "Average Delay": "10 minutes"}
                options["flight_options"].append(option)
    return info


def candidates(trip: Trip, world: World, rng: random.Random) -> dict:
    """given_info_data.json[pid]: CSV rows handed to a planner. All that the reference uses; up to ten
    hotels, half of the wanted category; up to 4 x days restaurants in the price range and as many
    outside it; up to 10 x days sights."""
    request = trip.request

    def rows(kind, lines, limit, wanted=lambda row: True):
        used = {line.found.name for line in lines}
        found = world.rows[kind][request.destination]
        others = [row for row in found if name_of(row) not in used and wanted(row)]
        kept = [row for row in found if name_of(row) in used and wanted(row)]
        return kept + rng.sample(others, min(len(others), max(0, limit - len(kept))))

    def in_class(row):
        return normal(row["small_cate"]) == normal(request.category)

    def in_range(row):
        return request.meals[0] <= float(row["avg_price"]) <= request.meals[1]

    stay, meals, many = [trip.hotel], trip.activities("restaurant"), 4 * request.days
    hotels = rows("hotel", stay, 5, in_class) + rows("hotel", stay, 5, lambda row: not in_class(row))
    restaurants = rows("restaurant", meals, many, in_range)
    restaurants += rows("restaurant", meals, many, lambda row: not in_range(row))
    return {
        "hotels": hotels,
        **rides_information(trip, world, parts=("", "")),
        "attractions": rows("sight", trip.activities("sight"), 10 * request.days),
        "restaurants": restaurants,
    }


def name_of(row: dict) -> str:
    return row.get("poiName") or row["name"]


def build(
    folder: str | Path,
    *,
    seed: int,
    cities: int = 6,
    train: int = 2000,
    test: int = 256,
    hotels: int = 3,
    restaurants: int = 16,
    attractions: int = 16,
    days: tuple[int, int] = (2, 3),
) -> Path:
    """Write a world and its requests into `folder` (made if absent) and return it.

    cities       2 to 10
    train, test  requests per split
    hotels       per city and category, 1 to 16
    restaurants, attractions   per city; at least 4 and 2 per day of the longest trip, at most 100 and 160
    days         shortest and longest trip, 2 to 7
    raises       ValueError for a size outside these ranges
    """
    sizes = {
        "cities": (cities, 2, len(CITIES)),
        "hotels": (hotels, 1, len(WORDS["hotel"])),
        "restaurants": (restaurants, 4 * days[1], len(WORDS["restaurant"]) * len(MEAL_NOUNS)),
        "attractions": (attractions, 2 * days[1], len(WORDS["sight"]) * len(SIGHTS)),
        "days[0]": (days[0], 2, days[1]),
        "days[1]": (days[1], days[0], 7),
        "train": (train, 0, 10**6),
        "test": (test, 0, 10**6),
    }
    for name, (value, low, high) in sizes.items():
        if not low <= value <= high:
            raise ValueError(f"{name}={value}, wanted {low} to {high}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = world_rows(seed, cities=cities, hotels=hotels, restaurants=restaurants, attractions=attractions)
    for kind, table in rows.items():
        write_csv(folder / CSV_FILES[kind], table)
    world = World(folder, rows)
    for split, count in (("train", train), ("test", test)):
        records, used, pools = [], {}, {}
        for pid in range(1, count + 1):
            rng = random.Random(f"{seed}/{split}/{pid}")
            record, trip = draw_record(world, rng, split=split, pid=pid, days=days)
            records.append(record)
            if split == "test":
                used[str(pid)], pools[str(pid)] = information(trip, world), candidates(trip, world, rng)
        write_json(folder / f"{split}.json", records)
        if split == "test":
            write_json(folder / "infomation.json", used)
            write_json(folder / "given_info_data.json", pools)
    return folder


def builtin() -> Path:
    """The folder of the world that the scripts use without --data: seed 0, 6 cities, 3,000 train and 512 test
    requests."""
    sources = [Path(__file__).with_name(f"{name}.py") for name in ("trips", "trip_tables", "trip_planner")]
    return made_once("trips", sources, lambda folder: build(folder, seed=0, train=3000, test=512))


def write_json(path: Path, content: list | dict) -> None:
    """One record a line, so that the files of two seeds can be compared."""
    keyed = isinstance(content, dict)
    left, right = "{}" if keyed else "[]"
    pairs = content.items() if keyed else enumerate(content)
    lines = [
        (f"{json.dumps(key)}: " if keyed else "") + json.dumps(x, ensure_ascii=False) for key, x in pairs
    ]
    path.write_text(f"{left}\n" + ",\n".join(lines) + f"\n{right}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.trips", description="Write a world.")
    parser.add_argument("--out", required=True, help="folder to write into")
    sizes = {"seed": 0, "cities": 6, "train": 2000, "test": 256}
    sizes |= {"hotels": 3, "restaurants": 16, "attractions": 16, "min_days": 2, "max_days": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"see build(); default {default}")
    flags = vars(parser.parse_args())
    days = flags.pop("min_days"), flags.pop("max_days")
    try:
        print(build(flags.pop("out"), days=days, **flags))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
