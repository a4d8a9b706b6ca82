"""A second, slow reading of TripTailor's seven constraints in strict mode, straight from the CSV files.

Shares no code with envs/: its own reader, its own clock, its own names. Says whether a plan may pass.
"""

import csv
import json
import re
import unicodedata
from functools import cache


@cache
def fold(text):
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).replace("\u2019", "'").casefold()).strip()


def at(text):
    """Minutes of a clock time; None for anything else."""
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip(), re.ASCII)
    if not found or int(found[1]) > 23 or int(found[2]) > 59:
        return None
    return int(found[1]) * 60 + int(found[2])


def span(text):
    parts = re.split("[–-]", text)
    times = [at(part) for part in parts] if len(parts) == 2 else [None]
    return None if None in times else tuple(times)


def is_price(value):
    return type(value) in (int, float) and 0 <= value <= 1e6  # false for NaN


def is_text(value):
    return isinstance(value, str) and 1 <= len(value) <= 120


def is_day(value):
    """An integer as JSON schema has it: 2.0 is one, true is not."""
    return (
        type(value) in (int, float) and value == value and abs(value) != float("inf") and value == int(value)
    )


class Oracle:
    def __init__(self, folder):
        self.table = {}
        for name in ("accommodations", "attractions", "restaurants", "Flight_Schedule", "Train_Schedule"):
            with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
                self.table[name] = list(csv.DictReader(file))

    def places(self, kind, city, name):
        file, label, where, cost = {
            "hotel": ("accommodations", "name", "real_city", "avg_price"),
            "sightseeing": ("attractions", "poiName", "city", "price"),
            "dining": ("restaurants", "name", "real_city", "avg_price"),
        }[kind]
        rows = self.table[file]
        same = [r for r in rows if fold(r[where]) == fold(city) and fold(r[label]) == fold(name)]
        return [(float(r[cost]), r.get("reference_time", "")) for r in same]

    def ride(self, entry, origin, destination, weekday):
        """(departure, arrival, fares) of what an entry names, arrival counted from the day of departure."""
        words, number, times = fold(entry["mode"]).split(), fold(entry["number"]), span(entry["time"])
        found = []
        if words == ["flight"]:
            for row in self.table["Flight_Schedule"]:
                ends = (
                    fold(row["Departure City"]) == fold(origin),
                    fold(row["Arrival City"]) == fold(destination),
                )
                if all(ends) and fold(row["Flight Number"]) == number and row[weekday] == "1":
                    found.append((at(row["Departure Time"]), at(row["Arrival Time"]), [float(row["Price"])]))
        elif "train" in words:
            for whole in {row["Train_Number"] for row in self.table["Train_Schedule"]}:
                if number in [fold(whole), *fold(whole).split("/")]:
                    found += self.train(whole, origin, destination)
        for leave, arrive, fares in found:
            if (leave, arrive) == times:
                return leave, arrive + 1440 * (arrive <= leave), fares
        return None

    def train(self, number, origin, destination):
        stops = [row for row in self.table["Train_Schedule"] if row["Train_Number"] == number]
        stops.sort(key=lambda row: int(row["Station_Number"]))
        names = [f"{fold(row['Station_Name'])} " for row in stops]
        first = [i for i, name in enumerate(names) if name.startswith(f"{fold(origin)} ")][:1]
        last = [i for i, name in enumerate(names) if name.startswith(f"{fold(destination)} ")][:1]
        if not first or not last or first[0] >= last[0]:
            return []
        a, b = stops[first[0]], stops[last[0]]
        fares = [float(b[c]) - float(a[c]) for c in ("Second_Class_Price", "First_Class_Price")]
        return [(at(a["Departure_Time"]), at(b["Arrival_Time"]), [fare for fare in fares if fare > 0])]

    def accepts(self, text, record, weekdays, meals):
        """Whether a plan may pass; `weekdays` of the two rides and the range of meals are the request's."""
        try:
            plan = json.loads(text)
        except ValueError:
            return False
        if not well_formed(plan):
            return False
        a, b, n = record["departure_city"], record["destination_city"], record["day"]
        out, back = plan["transportation"]
        rides = [self.ride(out, a, b, weekdays[0]), self.ride(back, b, a, weekdays[1])]
        if None in rides or (out["day"], back["day"], plan["hotel"][0]["day"]) != (1, n, 1):
            return False
        if [fold(out["route"]), fold(back["route"])] != [fold(f"{a} to {b}"), fold(f"{b} to {a}")]:
            return False
        days = [plan["itinerary"].get(f"day_{i}") for i in range(1, n + 1)]
        if None in days or len(plan["itinerary"]) != n:
            return False
        return (
            enough(days, rides)
            and self.paid(plan, rides, days, b, n, record["budget"])
            and all(low_high(self.price("dining", b, e), meals) for day in days for e in day if dines(e))
            and no_twice(days)
            and self.timed(days, rides, b)
        )

    def price(self, kind, city, entry):
        """The database's price nearest to the stated one; None if it is over ¥1 away or there is none."""
        stated = entry["price_per_night"] if kind == "hotel" else entry["price"]
        known = [
            price for price, _ in self.places(kind, city, entry["name" if kind == "hotel" else "location"])
        ]
        near = min(known, key=lambda price: abs(price - stated), default=None)
        return near if near is not None and abs(near - stated) <= 1 else None

    def paid(self, plan, rides, days, city, n, budget):
        costs = [self.price("hotel", city, plan["hotel"][0])] * (n - 1)
        for (_, _, fares), entry in zip(rides, plan["transportation"], strict=True):
            near = min(fares, key=lambda fare: abs(fare - entry["price"]))
            costs.append(near if abs(near - entry["price"]) <= 1 else None)
        costs += [self.price(e["action"], city, e) for day in days for e in day]
        return None not in costs and sum(costs) <= budget

    def timed(self, days, rides, city):
        for i, day in enumerate(days):
            free = rides[0][1] - 1440 * i
            end = rides[1][0] if i == len(days) - 1 else 1440
            for entry in day:
                slot = span(entry["time"])
                if slot is None or slot[0] >= slot[1] or slot[0] < free or slot[1] > end:
                    return False
                free = slot[1]
                if not dines(entry) and not self.fits(slot[1] - slot[0], city, entry):
                    return False
        return True

    def fits(self, stay, city, entry):
        near = min(
            self.places("sightseeing", city, entry["location"]), key=lambda p: abs(p[0] - entry["price"])
        )
        numbers = [float(x) for x in re.findall(r"[\d.]+", near[1])]
        if not numbers:
            return True
        low, high = numbers[0], numbers[-1]
        if "minute" in near[1]:
            return low <= stay <= high + 60
        if "hour" in near[1]:
            return 60 * low - 60 <= stay <= 60 * high + 60
        return 360 * low - 60 <= stay <= 1440 * high


def dines(entry):
    return entry["action"] == "dining"


def low_high(price, meals):
    return price is not None and meals[0] <= price <= meals[1]


def no_twice(days):
    for action in ("dining", "sightseeing"):
        names = [fold(e["location"]) for day in days for e in day if e["action"] == action]
        if len(names) != len(set(names)):
            return False
    return True


def enough(days, rides):
    for action in ("dining", "sightseeing"):
        full = [any(e["action"] == action for e in day) for day in days[1:-1]]
        if not all(full) or sum(e["action"] == action for day in days for e in day) < len(days) - 1:
            return False
    return bool(days[0] or rides[0][1] > 18 * 60) and bool(days[-1] or rides[1][0] < 12 * 60)


def well_formed(plan):
    """The shape of the official plan JSON, with this project's bounds on sizes."""
    if not isinstance(plan, dict) or len(plan) > 12:
        return False
    hotel, rides, days = (plan.get(key) for key in ("hotel", "transportation", "itinerary"))
    if not (isinstance(hotel, list) and len(hotel) == 1 and isinstance(rides, list) and len(rides) == 2):
        return False
    wanted = {"day": is_day, "name": is_text, "price_per_night": is_price}
    ride = {"day": is_day, "price": is_price} | dict.fromkeys(("mode", "route", "number", "time"), is_text)
    entry = {"time": is_text, "location": is_text, "price": is_price}
    entry["action"] = lambda value: value in ("sightseeing", "dining") and isinstance(value, str)
    if not (
        isinstance(days, dict) and len(days) <= 30 and all(isinstance(day, list) for day in days.values())
    ):
        return False
    if any(len(day) > 12 for day in days.values()):
        return False
    checks = [
        (hotel[0], wanted),
        *((r, ride) for r in rides),
        *((e, entry) for d in days.values() for e in d),
    ]
    return all(has(thing, fields) for thing, fields in checks)


def has(thing, fields):
    return (
        isinstance(thing, dict)
        and len(thing) <= 12
        and all(key in thing and check(thing[key]) for key, check in fields.items())
    )
