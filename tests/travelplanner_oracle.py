"""A second opinion on TravelPlanner plans, and ways to spoil them: the check reads nothing of envs."""

import csv
import math
import re
from copy import deepcopy
from itertools import pairwise


def oracle(query, plan, tables):
    """Whether strict may accept a plan: an independent check over the raw CSV rows, by trying all ways to
    write a cell. Reads nothing of envs."""
    restaurants, sights, rooms, roads, flights, states = tables
    while plan and plan[-1] == {}:
        plan = plan[:-1]
    keys = ["transportation", "breakfast", "attraction", "lunch", "dinner", "accommodation"]
    if len(plan) != query["days"]:
        return False
    for i, cells in enumerate(plan):
        if not isinstance(cells, dict) or any(
            not isinstance(cells.get(k), str) for k in [*keys, "current_city"]
        ):
            return False
        numbers = [cells[k] for k in ("day", "days") if k in cells]
        if not numbers or any(type(n) is not int or n != i + 1 for n in numbers):
            return False

    def spell(city):
        return [city, f"{city}({states[city]})"]

    def ways(cell, cities):
        """(name, city) readings of a cell in one of the cities."""
        for city in cities:
            for text in spell(city):
                rest = cell.strip()
                if rest.endswith(text) and rest[: -len(text)].rstrip().endswith(","):
                    yield rest[: -len(text)].rstrip()[:-1].strip(), city

    def filled(cell):
        return cell not in ("", "-")

    route, moves = [], []
    for cells in plan:
        hits = [[c] for c in states if cells["current_city"] in spell(c)]
        near = [city for city in states if city in cells["current_city"]]
        hits += [
            [a, b]
            for a in near
            for b in near
            if any(cells["current_city"] == f"from {x} to {y}" for x in spell(a) for y in spell(b))
        ]
        if len(hits) != 1:
            return False
        route.append(hits[0])
        moves.append(len(hits[0]) == 2)
    if not moves[0] or not moves[-1] or route[0][0] != query["org"] or route[-1][1] != query["org"]:
        return False
    if any(a[-1] != b[0] for a, b in pairwise(route)):
        return False
    nights = [cities[-1] for cities in route[:-1]]
    stops = [c for i, c in enumerate(nights) if i == 0 or nights[i - 1] != c]
    if len(set(stops)) != len(stops) or query["org"] in stops or len(stops) != query["visiting_city_number"]:
        return False
    if any(cities[0] == cities[-1] for cities, m in zip(route, moves, strict=True) if m):
        return False
    if any((c if query["days"] == 3 else states[c]) != query["dest"] for c in stops):
        return False
    people, total, seen_meals, seen_sights, eaten, modes, stays = (
        query["people_number"],
        0,
        [],
        [],
        [],
        set(),
        [],
    )
    count = 0
    for i, cells in enumerate(plan):
        cities = route[i]
        count += sum(filled(cells[k]) for k in keys)
        ride = cells["transportation"].strip()
        if filled(cells["transportation"]) != moves[i]:
            return False
        if moves[i]:
            fares = []
            for a in spell(cities[0]):
                for b in spell(cities[1]):
                    way = f", from {a} to {b}"
                    for f in flights.get((cities[0], cities[1], query["date"][i]), []):
                        text = f"Flight Number: {f['Flight Number']}{way}"
                        dep, arr = f", Departure Time: {f['DepTime']}", f", Arrival Time: {f['ArrTime']}"
                        if ride in (text, text + dep, text + arr, text + dep + arr):
                            fares.append(("flight", float(f["Price"]) * people))
                    head, mid, tail = ride.partition(way)
                    low = ride.lower()
                    if mid and "," not in head and head and tail[:1] in ("", ",") and "flight" not in low:
                        road = roads.get((cities[0], cities[1]))
                        length = road and float(road.replace(" km", "").replace(",", ""))
                        if length and not ("taxi" in low and "self-driving" in low):
                            if "taxi" in low:
                                fares.append(("taxi", int(length) * math.ceil(people / 4)))
                            else:
                                fares.append(("self-driving", int(length * 0.05) * math.ceil(people / 5)))
            if not fares or "\n" in ride:
                return False
            modes.add(fares[0][0])
            total += fares[0][1]
        for key in ("breakfast", "lunch", "dinner"):
            if not filled(cells[key]):
                if not moves[i]:
                    return False
                continue
            found = [w for w in ways(cells[key], cities) if w in restaurants]
            if not found or found[0] in seen_meals:
                return False
            seen_meals.append(found[0])
            total += people * float(restaurants[found[0]]["Average Cost"])
            if found[0][1] != query["org"]:
                eaten += restaurants[found[0]]["Cuisines"].split(", ")
        sights_text = re.sub(r";\s*\Z", "", cells["attraction"])
        pieces = sights_text.split(";") if filled(cells["attraction"]) else []
        if not pieces and not moves[i]:
            return False
        for piece in pieces:
            found = [w for w in ways(piece, cities) if w in sights]
            if not found or found[0] in seen_sights:
                return False
            seen_sights.append(found[0])
        if filled(cells["accommodation"]):
            found = [w for w in ways(cells["accommodation"], cities[-1:]) if w in rooms]
            if not found:
                return False
            stays.append(found[0])
            row = rooms[found[0]]
            total += float(row["price"]) * math.ceil(people / int(row["maximum occupancy"]))
        elif i < len(plan) - 1:
            return False
        else:
            stays.append(None)
    i = 0
    while i < len(stays):
        j = i
        while j < len(stays) and stays[j] == stays[i]:
            j += 1
        if stays[i] and j - i < float(rooms[stays[i]]["minimum nights"]):
            return False
        i = j
    wishes = query["local_constraint"]
    types = {"entire room": "Entire home/apt", "private room": "Private room", "shared room": "Shared room"}
    for stay in filter(None, stays):
        row = rooms[stay]
        if wishes["house rule"] and f"No {wishes['house rule']}" in row["house_rules"]:
            return False
        if wishes["room type"] == "not shared room" and row["room type"] == "Shared room":
            return False
        if wishes["room type"] in types and row["room type"] != types[wishes["room type"]]:
            return False
    if "self-driving" in modes and len(modes) > 1:
        return False
    if wishes["transportation"] and wishes["transportation"][3:] in modes:
        return False
    if any(cuisine not in eaten for cuisine in wishes["cuisine"] or []):
        return False
    return count * 2 >= 6 * query["days"] and total <= query["budget"]


def raw_tables(folder):
    """CSV rows for the oracle, first row of a name first."""

    def rows(path):
        return [
            row
            for row in csv.DictReader(open(path, newline="", encoding="utf-8"))
            if all(value for key, value in row.items() if key != "cost")
        ]

    def first(path, name, city):
        out = {}
        for row in rows(path):
            out.setdefault((row[name].strip(), row[city]), row)
        return out

    roads = {}
    for row in csv.DictReader(open(folder / "googleDistanceMatrix/distance.csv", newline="")):
        distance = row["distance"] if row["duration"] and "day" not in row["duration"] else None
        roads.setdefault((row["origin"], row["destination"]), distance or None)
    flights = {}
    for row in rows(next((folder / "flights").glob("*.csv"))):
        flights.setdefault((row["OriginCityName"], row["DestCityName"], row["FlightDate"]), []).append(row)
    lines = (folder / "background/citySet_with_states.txt").read_text().strip("\n").split("\n")
    return (
        first(folder / "restaurants/clean_restaurant_2022.csv", "Name", "City"),
        first(folder / "attractions/attractions.csv", "Name", "City"),
        first(folder / "accommodations/clean_accommodations_2022.csv", "NAME", "city"),
        roads,
        flights,
        dict(line.split("\t") for line in lines),
    )


ODD = [
    "",
    "-",
    None,
    3,
    True,
    [],
    {},
    ["x"],
    "from",
    "from  to ",
    "from " + " " * 1500,
    ",",
    "(",
    ";;",
    "\n",
    "a, ",
    "é" * 40,
]
ODD += [
    "from A to ",
    "Flight Number: ",
    "taxi",
    "x" * 1999,
    "," * 900,
    "from a to b" * 150,
    "No pets",
    "\ud800",
]


def mutate(plan, rng, names, cities):
    """One random change of a plan, often harmless."""
    cells = rng.choice(plan)
    if not isinstance(cells, dict) or not cells:
        return
    slots = ["breakfast", "attraction", "lunch", "dinner", "accommodation", "transportation", "current_city"]
    key = rng.choice(slots)
    old = cells.get(key)
    kind = rng.randrange(16)
    if kind < 5:  # another real place, mostly in a city of the plan
        key = rng.choice(slots[:5])
        table = "restaurant" if key in ("breakfast", "lunch", "dinner") else key
        city = rng.choice(cities if rng.random() < 0.9 else list(names[table]))
        pick = rng.choice(names[table].get(city) or ["Nothing"])
        cells[key] = f"{pick}, {city}" + (";" if key == "attraction" and rng.random() < 0.7 else "")
    elif kind == 5:
        cells[key] = rng.choice(ODD)
    elif kind == 6:
        cells.pop(rng.choice([*slots, "day", "days"]), None)
    elif kind == 7:
        other = rng.choice(plan)
        if isinstance(other, dict):
            cells[key] = other.get(key, "-")
    elif kind == 8 and isinstance(old, str) and old:
        at = rng.randrange(len(old))
        cells[key] = old[:at] + rng.choice(["", " ", ",", "(", ";", old[at].swapcase(), "x"]) + old[at + 1 :]
    elif kind == 9:
        rng.choice(
            [plan.reverse, lambda: plan.append({}), lambda: plan.pop(), lambda: plan.append(deepcopy(cells))]
        )()
    elif kind == 10 and isinstance(old, str):
        cells[key] = rng.choice(
            [old + " ", " " + old, old + ";", old.rstrip(";"), old.lower(), old.replace(", ", ",")]
        )
    elif kind == 11:
        cells[rng.choice(["day", "days", "note"])] = rng.choice([1, 2, 3, "1", None, 2.0, True])
    elif kind == 12 and isinstance(cells.get("transportation"), str):
        ride, way = cells["transportation"], cells.get("current_city")
        new = rng.choice(["Taxi", "Self-driving", "Drive", "self-driving", "Flight", "Taxi and self-driving"])
        cells["transportation"] = rng.choice(
            [f"{new}, {way}", ride.split(", Departure")[0], ride.lower(), f"{ride}, cost: 3"]
        )
    elif kind == 13 and isinstance(old, str):
        a, b = rng.sample(cities, 2) if len(cities) > 1 else (cities[0], "Dunmere")
        cells[key] = old.replace(a, b)
    elif kind == 14 and isinstance(old, str):
        cells[key] = re.sub(r"\([^)]*\)", "", old) if "(" in old else old
    else:
        plan[rng.randrange(len(plan))] = rng.choice([{}, [], None, "x", 5, deepcopy(rng.choice(plan))])
