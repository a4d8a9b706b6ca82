"""A made-up world in TravelPlanner's official layout: org Dunmere, four cities in the state of Alder, and a
sound plan for each of two queries."""

import csv
import json

STATES = dict.fromkeys(["Ashford", "Brookton", "Cedar Bay", "Elmsted"], "Alder") | {"Dunmere": "Delta"}
CUISINES = ["Chinese", "American", "Italian", "Mexican", "Indian", "Mediterranean", "French", "Cafe", "Tea"]
MEALS = [
    "Oak Table",
    "Red Lantern",
    "Golden Fork",
    "Salt House",
    "Corner Deli",
    "Noon Grill",
    "Maple Room",
    "Old Mill, Upper Floor",
    "Old Mill",
]
SIGHTS = ["Clock Tower", "City Museum", "River Walk (North)", "Garden, Old Part"]
ROOMS = [  # name, room type, $, minimum nights, house rules, people
    ("Quiet Loft", "Entire home/apt", 100, 1, "No pets", 2),
    ("Loft", "Entire home/apt", 40, 5, "No visitors", 4),
    ("Sunny Room", "Private room", 60, 2, "No smoking & No parties", 1),
    ("Shared Den", "Shared room", 20, 1, "No visitors", 4),
    ("Barn", "Entire home/apt", 10, 1, "", 8),  # the loader drops it: no house rules
]
FLIGHTS = [  # number, $, departure, arrival, date, from, to
    ("F1000001", 100, "08:00", "09:30", "2022-03-10", "Dunmere", "Ashford"),
    ("F1000002", 90, "10:00", "11:30", "2022-03-11", "Dunmere", "Ashford"),
    ("F1000003", 110, "18:00", "19:30", "2022-03-12", "Ashford", "Dunmere"),
    ("F1000004", 70, "07:00", "08:30", "2022-03-12", "Brookton", "Dunmere"),
]


def write_csv(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def km(a, b):
    cities = list(STATES)
    return 100 * (cities.index(a) + 1) + 37 * (cities.index(b) + 1)


def query_record(**changes):
    wishes = dict.fromkeys(["house rule", "cuisine", "room type", "transportation"])
    record = {
        "idx": 1,
        "org": "Dunmere",
        "dest": "Ashford",
        "days": 3,
        "visiting_city_number": 1,
        "date": ["2022-03-10", "2022-03-11", "2022-03-12"],
        "people_number": 2,
        "local_constraint": wishes,
        "budget": 1000,
        "query": "Three days in Ashford for two from Dunmere, March 10th to 12th, 2022, with $1,000.",
        "level": "easy",
    }
    return record | changes


def day(number, city, ride="-", breakfast="-", sights="-", lunch="-", dinner="-", stay="-"):
    cells = dict(breakfast=breakfast, attraction=sights, lunch=lunch, dinner=dinner, accommodation=stay)
    return {"day": number, "current_city": city, "transportation": ride, **cells}


OUT = "Flight Number: F1000001, from Dunmere to Ashford, Departure Time: 08:00, Arrival Time: 09:30"
BACK = "Flight Number: F1000003, from Ashford to Dunmere, Departure Time: 18:00, Arrival Time: 19:30"
PLAN3 = [
    day(1, "from Dunmere to Ashford", OUT, dinner="Oak Table, Ashford", stay="Quiet Loft, Ashford"),
    day(
        2,
        "Ashford",
        "-",
        "Red Lantern, Ashford",
        "Clock Tower, Ashford;Garden, Old Part, Ashford;",
        "Golden Fork, Ashford",
        "Salt House, Ashford",
        "Quiet Loft, Ashford",
    ),
    day(3, "from Ashford to Dunmere", BACK, "Corner Deli, Ashford", "City Museum, Ashford;"),
]
COST3 = 2 * (100 + 110) + 2 * (10 + 12 + 14 + 16 + 18) + 2 * 100  # flights, meals, nights of one room

WISHES5 = {
    "house rule": "parties",
    "cuisine": ["Chinese", "American", "Italian", "Mexican"],
    "room type": "entire room",
    "transportation": "no flight",
}
QUERY5 = query_record(
    idx=2,
    dest="Alder",
    days=5,
    visiting_city_number=2,
    date=[f"2022-03-{10 + i}" for i in range(5)],
    people_number=5,
    budget=3000,
    local_constraint=WISHES5,
    query="Five days in two cities of Alder for five from Dunmere.",
    level="hard",
)
PLAN5 = [
    day(
        1,
        "from Dunmere to Ashford(Alder)",
        "Self-driving, from Dunmere to Ashford(Alder), duration: 9 hours, distance: 1 km, cost: 1",
        dinner="Oak Table, Ashford(Alder)",
        stay="Quiet Loft, Ashford(Alder)",
    ),
    day(
        2,
        "Ashford(Alder)",
        "-",
        "Red Lantern, Ashford(Alder)",
        "Clock Tower, Ashford(Alder);",
        "Golden Fork, Ashford(Alder)",
        "Salt House, Ashford(Alder)",
        "Quiet Loft, Ashford(Alder)",
    ),
    day(
        3,
        "from Ashford(Alder) to Cedar Bay(Alder)",
        "Self-driving, from Ashford(Alder) to Cedar Bay(Alder)",
        dinner="Oak Table, Cedar Bay(Alder)",
        stay="Quiet Loft, Cedar Bay(Alder)",
    ),
    day(
        4,
        "Cedar Bay(Alder)",
        "-",
        "Red Lantern, Cedar Bay(Alder)",
        "Clock Tower, Cedar Bay(Alder);River Walk (North), Cedar Bay(Alder);",
        "Golden Fork, Cedar Bay(Alder)",
        "Salt House, Cedar Bay(Alder)",
        "Quiet Loft, Cedar Bay(Alder)",
    ),
    day(5, "from Cedar Bay(Alder) to Dunmere", "Self-driving, from Cedar Bay(Alder) to Dunmere"),
]


def build(folder):
    """A data folder in the official layout; returns it."""
    tables = folder / "database"
    rows = []
    for city in STATES:
        rows += [(m, city, f"{CUISINES[i]}, Pizza", 10 + 2 * i, 4.5) for i, m in enumerate(MEALS)]
    header = ["", "Name", "City", "Cuisines", "Average Cost", "Aggregate Rating"]
    rows = [(i, *row) for i, row in enumerate(rows)]
    write_csv(tables / "restaurants/clean_restaurant_2022.csv", header, rows)
    header = ["Name", "Latitude", "Longitude", "Address", "Phone", "Website", "City"]
    rows = [(s, 1.5, 2.5, "1 Main St", "(555) 010-0000", "x.org", city) for city in STATES for s in SIGHTS]
    write_csv(tables / "attractions/attractions.csv", header, rows)
    header = ["", "NAME", "room type", "price", "minimum nights", "review rate number", "house_rules"]
    rows = [(0, n, t, f"{p}.0", f"{m}.0", "4.0", r, o, city) for city in STATES for n, t, p, m, r, o in ROOMS]
    header += ["maximum occupancy", "city"]
    write_csv(tables / "accommodations/clean_accommodations_2022.csv", header, rows)
    header = ["origin", "destination", "cost", "duration", "distance"]
    rows = [(a, b, "", "2 hours 6 mins", f"{km(a, b):,} km") for a in STATES for b in STATES if a != b]
    rows = [row for row in rows if row[:2] not in (("Dunmere", "Elmsted"), ("Elmsted", "Dunmere"))]
    rows += [("Dunmere", "Ashford", "", "1 min", "1 km"), ("Elmsted", "Dunmere", "", "1 day 2 hours", "9 km")]
    write_csv(tables / "googleDistanceMatrix/distance.csv", header, rows)
    header = ["", "Flight Number", "Price", "DepTime", "ArrTime", "ActualElapsedTime", "FlightDate"]
    header += ["OriginCityName", "DestCityName", "Distance"]
    rows = [(i, *f[:4], "1 hours 30 minutes", *f[4:], 300.0) for i, f in enumerate(FLIGHTS)]
    write_csv(tables / "flights/clean_Flights_2022.csv", header, rows)
    (tables / "background").mkdir()
    (tables / "background/citySet.txt").write_text("\n".join(STATES))
    lines = [f"{city}\t{state}" for city, state in STATES.items()]
    (tables / "background/citySet_with_states.txt").write_text("\n".join(lines))
    records = [query_record(plan=PLAN3), QUERY5 | {"plan": [*PLAN5, {}, {}]}]
    lines = [json.dumps(record) for record in records]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    infos = [{"Restaurants in Ashford": [{"Name": "Oak Table", "City": "Ashford"}], "Taxi": "none"}] * 2
    (folder / "train_ref_info.jsonl").write_text("".join(json.dumps(info) + "\n" for info in infos))
    keys = [key for key in query_record() if key != "idx"] + ["annotated_plan", "reference_information"]
    rows = []
    for record in records:
        cells = record | {"annotated_plan": [record, record["plan"]], "reference_information": "[{'a': 'b'}]"}
        rows.append([cells[key] for key in keys])
    write_csv(folder / "validation.csv", keys, rows)
    header = ["org", "dest", "days", "date", "query", "level", "reference_information"]
    rows = [["Dunmere", "Ashford", 3, "['2022-03-10']", f"request {i}", "easy", "facts"] for i in range(3)]
    write_csv(folder / "test.csv", header, rows)
    return folder
