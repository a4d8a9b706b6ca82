"""A made-up TripTailor folder of the real one's size: to see that loading, searching and scoring stay quick.

    python -m envs.triptailor_large --out DIR              40 cities, 95,000 hotels, 400,000 restaurants, ...
    python -m envs.triptailor_large --out DIR --scale 0.1

Sizes are those of the official files as far as they are known. Rows are envs/trip_tables.py's with numbered
names, of which one in NAMESAKES comes twice in its city, as real ones do. Requests have reference plans that
hold all seven constraints; train.json has texts alone, as the official one.
"""

import argparse
import csv
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from envs import trips
from envs.trip_tables import (
    CUISINES,
    DURATIONS,
    HOTEL_NOUNS,
    MEAL_NOUNS,
    NIGHT,
    SIGHTS,
    TIERS,
    WORDS,
    fives,
    flight_row,
    lodging,
    spot,
    train_rows,
)
from envs.triptailor_data import CATEGORIES, CSV_FILES, Place, km

SIZES = {"hotel": 95_000, "restaurant": 400_000, "sight": 5_500, "flight": 13_000, "train": 16_000}
CITIES = 40
NAMESAKES = 50  # one place in so many has the name of another


def numbered(rng: random.Random, kind: str, nouns: tuple[str, ...], i: int) -> str:
    """The i-th name of a kind in a city; now and then an earlier one again."""
    i = rng.randrange(i) if i and rng.randrange(NAMESAKES) == 0 else i
    words = WORDS[kind]
    return f"{words[i % len(words)]} {nouns[i % len(nouns)]} {i}"


def hotels(rng: random.Random, centre: Place, count: int) -> Iterator[dict]:
    for i in range(count):
        category = CATEGORIES[i % 4]
        name = numbered(rng, "hotel", HOTEL_NOUNS, i)
        yield lodging(rng, centre, name, fives(rng, *NIGHT[category]), category)


def restaurants(rng: random.Random, centre: Place, count: int) -> Iterator[dict]:
    for i in range(count):
        low, high = (20, 300) if i % 8 == 7 else TIERS[i % 2]
        name, cuisine = numbered(rng, "restaurant", MEAL_NOUNS, i), CUISINES[i % len(CUISINES)]
        yield lodging(rng, centre, name, fives(rng, low, high), cuisine)


def sights(rng: random.Random, centre: Place, count: int) -> Iterator[dict]:
    tags = tuple(SIGHTS)
    for i in range(count):
        place, tag = spot(rng, centre), tags[i % len(tags)]
        yield {
            "poiId": 100_000 + i,
            "city": centre.name,
            "poiName": numbered(rng, "sight", (SIGHTS[tag],), i),
            "price": rng.choice((0, fives(rng, 10, 120))),
            "latitude": place["latitude"],
            "longitude": place["longitude"],
            "tagNameList": tag,
            "reference_time": rng.choice((*DURATIONS, "")),
            "summary": 'A place to see, with a long history.\nSecond line, "quoted". ' * 8,
            "opening_hours": "09:00-18:00",
        }


def rides(rng: random.Random, centres: list[Place], count: int, make) -> Iterator[dict]:
    """`count` rides, dealt out over all ordered pairs of cities in turn."""
    pairs = [(a, b) for a in centres for b in centres if a is not b]
    for i in range(count):
        depart = 30 * rng.choice((rng.randint(14, 17), rng.randint(30, 35)))
        yield from make(rng, *pairs[i % len(pairs)], i, depart)


def train(rng: random.Random, origin: Place, destination: Place, i: int, depart: int) -> list[dict]:
    return train_rows(rng, origin, destination, f"{'GDCK'[i % 4]}{i // 4 + 1}", depart)


def flight(rng: random.Random, origin: Place, destination: Place, i: int, depart: int) -> list[dict]:
    return [flight_row(rng, origin, destination, f"{('CA', 'MU', 'CZ')[i % 3]}{1000 + i // 3}", depart)]


def centres_of(rng: random.Random, count: int) -> list[Place]:
    """Cities at least 60 km from each other."""
    centres: list[Place] = []
    while len(centres) < count:
        lat, lon = round(rng.uniform(26, 36), 4), round(rng.uniform(108, 120), 4)
        name = (
            f"{('Lan', 'Sor', 'Tav', 'Bel')[len(centres) % 4]}{'aeiou'[len(centres) // 4 % 5]}{len(centres)}"
        )
        centre = Place("city", name, "", 0.0, lat, lon, "", "", "")
        if all(km(centre, other) > 60 for other in centres):
            centres.append(centre)
    return centres


def stream_csv(path: Path, rows: Iterator[dict]) -> None:
    """A CSV file written row by row: the whole table is never in memory."""
    first = next(rows)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, first.keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(chain([first], rows))


def build(
    folder: str | Path, *, seed: int = 0, scale: float = 1.0, train_n: int = 60, test_n: int = 30
) -> Path:
    """Write the five CSV files and train_n and test_n requests into `folder` and return it.

    scale   of SIZES; 0.01 to 2
    raises  ValueError for another scale
    """
    if not 0.01 <= scale <= 2:
        raise ValueError(f"scale={scale}, wanted 0.01 to 2")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{seed}/large")
    centres = centres_of(rng, CITIES)
    each = {kind: max(40, round(scale * size / CITIES)) for kind, size in SIZES.items()}
    for kind, make in (("hotel", hotels), ("restaurant", restaurants), ("sight", sights)):
        rows = chain.from_iterable(make(rng, centre, each[kind]) for centre in centres)
        stream_csv(folder / CSV_FILES[kind], rows)
    pairs = CITIES * (CITIES - 1)
    for kind, make in (("flight", flight), ("train", train)):
        count = max(2 * pairs, round(scale * SIZES[kind]))
        stream_csv(folder / CSV_FILES[kind], rides(rng, centres, count, make))
    write_requests(folder, seed, centres, {"train": train_n, "test": test_n})
    return folder


def write_requests(folder: Path, seed: int, centres: list[Place], counts: dict[str, int]) -> None:
    """train.json and test.json over a folder's CSV files, and infomation.json of the test split."""
    cities = [{"real_city": centre.name} for centre in centres]
    world = trips.World(folder, {"hotel": cities, "sight": [], "restaurant": []})
    used = {}
    for split, count in counts.items():
        records = []
        for pid in range(1, count + 1):
            rng = random.Random(f"{seed}/large/{split}/{pid}")
            record, trip = trips.draw_record(world, rng, split=split, pid=pid, days=(2, 5))
            if split == "train":
                del record["final_plan_json"]
            else:
                used[str(pid)] = trips.information(trip, world)
            records.append(record)
        trips.write_json(folder / f"{split}.json", records)
    trips.write_json(folder / "infomation.json", used)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m envs.triptailor_large", description="Write a large world."
    )
    parser.add_argument("--out", required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the official sizes; default 1")
    flags = parser.parse_args()
    try:
        print(build(flags.out, seed=flags.seed, scale=flags.scale))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
