"""The rows of the built-in world's five CSV files, drawn from a seed, under the official column names."""

import csv
import math
import random
from pathlib import Path

from envs.triptailor_data import CATEGORIES, WEEKDAYS, Place, km

CITIES = ("Lanmu", "Sorin", "Tavek", "Belor", "Nirou", "Quela", "Dasho", "Fenri", "Huvan", "Okeda")
WORDS = {  # first words of names by kind; until a kind has used all of its own, one names one place of a city
    "hotel": (
        *("Amber", "Jade", "Willow", "Silver", "Golden", "Quiet", "Crimson", "Azure"),
        *("Lotus", "Maple", "Cloud", "Ivory", "Coral", "Pearl", "Velvet", "Copper"),
    ),
    "restaurant": (
        *("Ginger", "Pepper", "Clove", "Basil", "Sesame", "Lemon", "Plum", "Peach", "Olive", "Saffron"),
        *("Chestnut", "Walnut", "Barley", "Honey", "Mint", "Cinnamon", "Almond", "Cherry", "Melon", "Fig"),
    ),
    "sight": (
        *("Dragon", "Phoenix", "Tiger", "Crane", "Heron", "Turtle", "Falcon", "Swallow", "Stork", "Carp"),
        *("Marble", "Granite", "Bronze", "Bamboo", "Cedar", "Pine", "Thunder", "Moonlit", "Hidden", "Sunken"),
    ),
}
HOTEL_NOUNS = ("Inn", "Hotel", "Lodge", "House")
MEAL_NOUNS = ("Kitchen", "Table", "Grill", "Wok", "Bistro")
SIGHTS = {  # tag -> noun of the name
    "temples": "Temple",
    "gardens": "Garden",
    "museums": "Museum",
    "towers": "Tower",
    "lakes": "Lake",
    "markets": "Market",
    "caves": "Cave",
    "bridges": "Bridge",
}
CUISINES = ("Sichuan", "Cantonese", "hot pot", "noodles", "barbecue", "seafood")
DURATIONS = ("20 minutes", "0.5-1 hour", "1 hour", "1-2 hours", "1-2 hours", "2-3 hours", "3-4 hours")
NIGHT = {"Economy": (80, 180), "Midscale": (180, 330), "Upscale": (330, 530), "Luxury": (530, 900)}  # ¥
TIERS = ((50, 100), (100, 200))  # ¥ per meal; the ranges that real requests name


def fives(rng: random.Random, low: float, high: float) -> int:
    """A multiple of 5 in [low, high]."""
    return 5 * rng.randint(-(-int(low) // 5), int(high) // 5)


def names(rng: random.Random, kind: str, nouns: tuple[str, ...], count: int) -> list[str]:
    """`count` different names "Word Noun"; the i-th has the noun i modulo len(nouns)."""
    words = rng.sample(WORDS[kind], len(WORDS[kind]))
    cycle = math.lcm(len(words), len(nouns))  # after it the same pairs would come again
    return [f"{words[(i + i // cycle) % len(words)]} {nouns[i % len(nouns)]}" for i in range(count)]


def spot(rng: random.Random, centre: Place) -> dict:
    """Coordinates within about 6 km of a city's centre."""
    return {
        "longitude": round(centre.lon + rng.uniform(-0.06, 0.06), 4),
        "latitude": round(centre.lat + rng.uniform(-0.06, 0.06), 4),
    }


def lodging(rng: random.Random, centre: Place, name: str, price: int, category: str) -> dict:
    """A row of accommodations.csv or restaurants.csv."""
    reviews = rng.randint(5, 300)
    ratings = ("product_rating", "environment_rating", "service_rating")
    return {
        "name": name,
        "real_city": centre.name,
        "avg_price": price,
        "small_cate": category,
        "stars": rng.choice((3.0, 3.5, 4.0, 4.5, 5.0)),
        "review_count": reviews,
        "good_remarks": float(reviews * 3 // 4),
        "bad_remarks": float(reviews // 20),
        **spot(rng, centre),
        **{rating: round(rng.uniform(6.0, 9.5), 1) for rating in ratings},
    }


def hotel_rows(rng: random.Random, centre: Place, per_category: int) -> list[dict]:
    called = names(rng, "hotel", HOTEL_NOUNS, per_category * len(CATEGORIES))
    return [
        lodging(rng, centre, name, fives(rng, *NIGHT[CATEGORIES[i % 4]]), CATEGORIES[i % 4])
        for i, name in enumerate(rng.sample(called, len(called)))
    ]


def restaurant_rows(rng: random.Random, centre: Place, count: int) -> list[dict]:
    """Of eight, four lie in the cheap tier, three in the dear one, one outside both."""
    rows = []
    for i, name in enumerate(names(rng, "restaurant", MEAL_NOUNS, count)):
        low, high = ((20, 45), (205, 300))[i // 8 % 2] if i % 8 == 7 else TIERS[i % 2]
        rows.append(lodging(rng, centre, name, fives(rng, low, high), CUISINES[i % len(CUISINES)]))
    return rows


def sight_rows(rng: random.Random, centre: Place, count: int, first_id: int) -> list[dict]:
    rows = []
    for i, name in enumerate(names(rng, "sight", tuple(SIGHTS.values()), count)):
        tag = tuple(SIGHTS)[i % len(SIGHTS)]
        place = spot(rng, centre)
        opening = rng.choice(("08:00-17:00", "08:30-17:30", "09:00-18:00"))
        row = {
            "poiId": first_id + i,
            "city": centre.name,
            "poiName": name,
            "commentCount": rng.randint(20, 6000),
            "commentScore": round(rng.uniform(4.0, 5.0), 1),
            "heatScore": round(rng.uniform(2.0, 9.5), 1),
            "sightLevelStr": rng.choice(("", "", "4A", "5A")),
            "price": rng.choice((0, fives(rng, 10, 60), fives(rng, 10, 60), fives(rng, 65, 120))),
            "latitude": place["latitude"],
            "longitude": place["longitude"],
            "tagNameList": tag,
            "shortFeatures": f"Known for its {tag}",
            "reference_time": rng.choice(DURATIONS),
            "summary": f"{name} is one of the {tag} of {centre.name}.",
            "opening_hours": opening,
        }
        rows.append(row)
    return rows


def hmm(minute: int) -> str:
    """ "H:MM" without a leading zero, as the official schedules write times."""
    return f"{minute // 60}:{minute % 60:02d}"


def train_rows(rng: random.Random, origin: Place, destination: Place, number: str, depart: int) -> list[dict]:
    distance = km(origin, destination)
    ride = 30 * max(1, min(6, round(distance / 110)))  # minutes, half an hour to three
    fare = 5 * round((30 + 0.3 * distance) * rng.uniform(0.8, 1.3) / 5)
    rows = []
    for i, city in enumerate((origin, destination)):
        row = {
            "Train_Number": number,
            "Station_Number": i + 1,
            "Station_Name": f"{city.name} Railway Station",
            "Arrival_Time": hmm(depart + ride) if i else "departure station",
            "Departure_Time": "terminal station" if i else hmm(depart),
            "Stop_Time": 0,
            "Running_Time": ride * i,
            "Second_Class_Price": fare * i,
            "First_Class_Price": 5 * round(fare * 1.6 / 5) * i,
            "Longitude": city.lon,
            "Latitude": city.lat,
        }
        rows.append(row)
    return rows


def flight_row(rng: random.Random, origin: Place, destination: Place, number: str, depart: int) -> dict:
    distance = km(origin, destination)
    resting = rng.sample(WEEKDAYS, rng.choice((0, 1, 3)))
    row = {
        "Departure City": origin.name,
        "Arrival City": destination.name,
        "Distance (km)": round(distance),
        "Flight Number": number,
        "Airline": {"CA": "Cloud Air", "MU": "Maple Wings", "CZ": "Crane Lines"}[number[:2]],
        "Aircraft Type": "Boeing 737 (Medium)",
        "Departure Time": hmm(depart),
        "Arrival Time": hmm(depart + rng.choice((60, 90))),
    }
    for end, city in (("Departure", origin), ("Arrival", destination)):
        row[f"{end} Airport"] = f"{city.name} Airport"
        row[f"{end} Airport Latitude"] = city.lat
        row[f"{end} Airport Longitude"] = city.lon
    row["On-Time Performance"] = round(rng.uniform(0.6, 0.98), 2)
    row["Average Delay (minutes)"] = rng.randint(0, 45)
    row |= {day: int(day not in resting) for day in WEEKDAYS}
    row["Price"] = 5 * round((150 + 0.6 * distance) * rng.uniform(0.8, 1.5) / 5)
    return row


def ride_rows(rng: random.Random, centres: list[Place]) -> tuple[list[dict], list[dict]]:
    """(flight rows, train rows): for each ordered pair of cities a morning and an afternoon train every
    day, a morning and an evening flight on most days. Morning rides arrive by noon."""
    trains = rng.sample([f"{line}{i}" for line in "GDC" for i in range(10, 100)], 270)
    flights = rng.sample([f"{line}{i}" for line in ("CA", "MU", "CZ") for i in range(10, 100)], 270)
    flight_table, train_table = [], []
    for origin in centres:
        for destination in centres:
            if origin is destination:
                continue
            for first, last in ((14, 17), (30, 35)):  # half hours after midnight
                depart = 30 * rng.randint(first, last)
                train_table += train_rows(rng, origin, destination, trains.pop(), depart)
                depart = 30 * (rng.randint(first, last) + 2)
                flight_table.append(flight_row(rng, origin, destination, flights.pop(), depart))
    return flight_table, train_table


def world_rows(seed: int, *, cities: int, hotels: int, restaurants: int, attractions: int) -> dict[str, list]:
    """Kind -> rows of its CSV file."""
    rng = random.Random(f"{seed}/world")
    centres = []
    while len(centres) < cities:
        lat, lon = round(rng.uniform(28, 32), 4), round(rng.uniform(112, 117), 4)
        centre = Place("city", CITIES[len(centres)], "", 0.0, lat, lon, "", "", "")
        if all(km(centre, other) > 60 for other in centres):
            centres.append(centre)
    flights, trains = ride_rows(rng, centres)
    rows = {"hotel": [], "sight": [], "restaurant": [], "flight": flights, "train": trains}
    for centre in centres:
        rows["hotel"] += hotel_rows(rng, centre, hotels)
        rows["sight"] += sight_rows(rng, centre, attractions, 1000 + len(rows["sight"]))
        rows["restaurant"] += restaurant_rows(rng, centre, restaurants)
    return rows


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
