"""The exact teacher: the smallest edit that makes a plan keep every hard constraint, found by search.

Smallest means: fewest changed items; among those the best preference score; among those the smallest change
of the cost. An edit changes an item (another entry of the same type on the same day, or the same entry at
another time) or inserts a meal or a visit in the city where the traveller is; in retail it changes an item
into any product or adds one. Nothing is ever left out: a plan must not become valid by holding less. For
k = 0, 1, 2, ... all edits of k items are gone through, cut off where cost, times or conflicts rule out the
rest, so that what is found is proved minimal; past the time limit it says that it is not.

The paper's teacher is a prompted model that is asked for the same and proves nothing (its section 4).
"""

import time
from dataclasses import dataclass

from envs import synplan_retail, synplan_travel
from envs.synplan_verify import Entity, Instance, Report, look_up

WORLDS = {"travel": synplan_travel, "retail": synplan_retail}
TIMES = ("start_time", "end_time")
Part = tuple[Entity, dict, int | None]  # of a partial plan: entry, item, index in the draft (None: inserted)


@dataclass(slots=True)
class Edit:
    """What the search found."""

    plan: dict | None  # the corrected plan; None: no edit of at most max_changes items helps
    changed: list[tuple[str, str]]  # (key before, key after), one per changed item; "" before: inserted
    proved: bool  # every smaller edit, and every better one of this size, was ruled out
    nodes: int  # partial plans that were looked at
    seconds: float
    report: Report | None  # the verifier's on `plan`


class _Late(Exception):
    """The time limit has passed."""


def minimal_edit(instance: Instance, plan: dict, *, max_changes: int = 6, limit_s: float = 10.0) -> Edit:
    """The smallest edit of a plan that fits the schema, as this file defines it. A plan without fault comes
    back with no change.

    max_changes  larger edits are not looked for; then `plan` is None and `proved` says that none is smaller
    limit_s      of the whole search; what it has by then comes back with `proved` False
    """
    search = (_Travel if instance.domain == "travel" else _Retail)(instance, plan["items"], limit_s)
    proved = True
    try:
        for changes in range(max_changes + 1):
            search.begin(changes)
            if search.best is not None:
                break
    except _Late:
        proved = False
    parts, seconds = search.best_parts, time.monotonic() - search.started
    if search.best is None:
        return Edit(None, [], proved, search.nodes, seconds, None)
    items = search.final_items()
    keys = [None if i is None else plan["items"][i] for _, _, i in parts]
    changed = [
        (before["db_lookup_key"] if before else "", after["db_lookup_key"])
        for before, after in zip(keys, items, strict=True)
        if before is not after
    ]
    found = {**plan, **WORLDS[instance.domain].total(instance, items)} if changed else plan
    report = WORLDS[instance.domain].verify(instance, found)
    return Edit(found, changed, proved, search.nodes, seconds, report)


class _Search:
    """Depth first over the items of a plan, with bounds on what the rest can cost and be liked."""

    def __init__(self, instance: Instance, items: list[dict], limit_s: float):
        self.instance, self.items = instance, items
        self.entries = [look_up(instance, item) for item in items]
        self.started = time.monotonic()
        self.deadline = self.started + limit_s
        self.nodes = 0
        self.best: Report | None = None
        self.best_parts: list[Part] = []
        self.parts: list[Part] = []  # the partial plan
        prefs = set(instance.profile.prefs)
        self.liked = {e.key: bool(prefs.intersection((*e.tags, e.brand))) for e in instance.entities.values()}
        spent = WORLDS[instance.domain].total(instance, items)["total_stated_cost"]
        self.wanted = min(instance.profile.budget, spent)  # USD; of two edits the one that ends nearer wins
        n = len(items)
        self.rest_cost, self.rest_liked = [0] * (n + 1), [0] * (n + 1)  # of the items from i on, unchanged
        self.must = [0] * (n + 1)  # how many of those no valid plan can keep
        self.saved = [[0] * (n + 1)] * (n + 1)  # the most USD that so many changes of those can save
        self.units = [self.units_of(i) for i in range(n)]
        self.pools = [self.candidates(i) for i in range(n)]
        single: list[int] = []
        for i in reversed(range(n)):
            entry = self.entries[i]
            price = entry.price * self.units[i] if entry else 0
            lowest = min((e.price for e in self.pools[i]), default=0) * self.units[i]
            self.rest_cost[i] = self.rest_cost[i + 1] + price
            self.rest_liked[i] = self.rest_liked[i + 1] + (self.liked[entry.key] if entry else 0)
            self.must[i] = self.must[i + 1] + (entry is None or self.hopeless_alone(i))
            single = sorted([*single, max(0, price - lowest)], reverse=True)
            self.saved[i] = [sum(single[:changes]) for changes in range(n + 1)]

    def units_of(self, i: int) -> int:
        """How often item i's price is paid."""
        return 1

    def hopeless_alone(self, i: int) -> bool:
        """Whether no valid plan can keep item i, whatever stands around it."""
        return False

    def hopeless(self, i: int, left: int, paid: int) -> bool:
        """Whether no plan that goes on with item i, `left` changes and `paid` USD keeps the budget and is
        better than the best so far. Counts the visit; raises _Late past the time limit."""
        self.nodes += 1
        if self.nodes % 256 == 0 and time.monotonic() > self.deadline:
            raise _Late
        if self.must[i] > left or self.too_dear(i, left, paid):
            return True
        if self.best is None:
            return False
        keys = {entry.key for entry, _, _ in self.parts}
        hope = self.rest_liked[i] + left
        share = (sum(self.liked[key] for key in keys) + hope) / max(1, len(keys) + hope)
        return share < self.best.soft or (share == self.best.soft and self.best.cost == self.wanted)

    def too_dear(self, i: int, left: int, paid: int) -> bool:
        """Whether items from i on cannot end within the budget, `left` of them changed."""
        saved = self.saved[i][min(left, len(self.items))]
        return paid + self.rest_cost[i] - saved > self.instance.profile.budget

    def finish(self) -> None:
        """Keep the plan of all parts if the verifier passes it and it is better than the best so far."""
        items = [item for _, item, _ in self.parts]
        report = WORLDS[self.instance.domain].verify(self.instance, {"items": items})
        if report.passed and (self.best is None or self.rank(report) > self.rank(self.best)):
            self.best, self.best_parts = report, list(self.parts)

    def rank(self, report: Report) -> tuple[float, float]:
        return report.soft, -abs(report.cost - self.wanted)

    def final_items(self) -> list[dict]:
        return [item for _, item, _ in self.best_parts]


class _Travel(_Search):
    def __init__(self, instance: Instance, items: list[dict], limit_s: float):
        super().__init__(instance, items, limit_s)
        self.timed = any("start_time" in item for item in items)
        found = [entry for entry in self.entries if entry is not None]
        self.deficit = instance.profile.pace - synplan_travel.distinct_places(found)
        kinds = synplan_travel.VISIT_MIN
        self.visits = [entity for entity in instance.entities.values() if entity.kind in kinds]

    def candidates(self, i: int) -> list[Entity]:
        return [e for e in self.instance.entities.values() if e.kind == self.items[i]["type"]]

    def hopeless_alone(self, i: int) -> bool:
        entry = self.entries[i]  # nobody is ready for it sooner than from its own city at the window's start
        city = entry.origin or entry.city
        return self.step(entry, self.items[i], self.instance.profile.start, city) is None

    def units_of(self, i: int) -> int:
        """Nights of a hotel, which an edit does not change: hotels are neither inserted nor moved."""
        if self.items[i]["type"] != "hotel":
            return 1
        days = [item["day"] for item in self.items[i + 1 :] if item["type"] == "hotel"]
        until = days[0] if days else synplan_travel.num_days(self.instance.profile)
        return max(1, int(until) - int(self.items[i]["day"]))

    def begin(self, changes: int) -> None:
        profile = self.instance.profile
        # an inserted place that the pace would hold without is part of no smallest edit; a change costs the
        # pace two places at the most
        most = max((j for j in range(changes + 1) if j <= self.deficit + 2 * (changes - j)), default=0)
        self.descend(0, changes, most, profile.start, profile.origin, 0)

    def step(self, entry: Entity, item: dict, free: int, city: str) -> int | None:
        """When an item ends; None if it is too early, too late, or outside the daily hours."""
        profile, midnight = self.instance.profile, synplan_travel.DAY * (int(item["day"]) - 1)
        start, end, late = synplan_travel.event(self.instance, entry, item, free=free, city=city)
        if late or start < profile.start or end > profile.end:
            return None
        if profile.hours is not None and entry.kind != "hotel":
            if start < midnight + profile.hours[0] or end > midnight + profile.hours[1]:
                return None
        return end

    def descend(self, i: int, left: int, inserts: int, free: int, city: str, paid: int) -> None:
        """Go on with item i: keep it, change it, or insert something before it."""
        if self.hopeless(i, left, paid):
            return
        if i == len(self.items) and left == 0:
            return self.finish()
        if left and inserts:
            self.insert(i, left, inserts, free, city, paid)
        if i == len(self.items):
            return None
        kept, item, units = self.entries[i], self.items[i], self.units[i]
        if kept is not None and left <= len(self.items) - i - 1 + inserts:
            self.take(kept, item, i, left, inserts, free, city, paid + kept.price * units)
        if left:
            for entry in self.pools[i]:
                cost = paid + entry.price * units
                if self.too_dear(i + 1, left - 1, cost):
                    continue
                new = self.rewritten(entry, item, free, city)
                if entry is not kept or new != item:
                    self.take(entry, new, i, left - 1, inserts, free, city, cost)
        return None

    def take(self, entry, item, i, left, inserts, free, city, paid) -> None:
        end = self.step(entry, item, free, city)
        if end is not None:
            self.parts.append((entry, item, i))
            self.descend(i + 1, left, inserts, end, entry.city, paid)
            self.parts.pop()

    def insert(self, i: int, left: int, inserts: int, free: int, city: str, paid: int) -> None:
        """Each place of this city that the plan lacks so far, on the first day on which it fits."""
        here = {entry.key for entry, _, _ in self.parts}
        first = int(self.parts[-1][1]["day"]) if self.parts else 1
        last = synplan_travel.num_days(self.instance.profile)
        after = self.items[i]["day"] if i < len(self.items) else last
        for entry in self.visits:
            if entry.city != city or entry.key in here or self.too_dear(i, left - 1, paid + entry.price):
                continue
            for day in range(first, int(after) + 1):
                item = self.rewritten(entry, {"day": day}, free, city)
                end = self.step(entry, item, free, city)
                if end is not None:
                    self.parts.append((entry, item, None))
                    self.descend(i, left - 1, inserts - 1, end, city, paid + entry.price)
                    self.parts.pop()
                    break

    def rewritten(self, entry: Entity, item: dict, free: int, city: str, start: int | None = None) -> dict:
        """The item with this entry in it, as early as can be, or at minute `start`. Other fields stay; an
        item that is only a day becomes one with times if the draft's have some."""
        day = {"day": item["day"]}
        if start is None:
            start, _, _ = synplan_travel.event(self.instance, entry, day, free=free, city=city)
        new = {"name": entry.name, "type": entry.kind, **day}
        if self.timed and ("start_time" in item or len(item) == 1):
            new["start_time"] = synplan_travel.time_text(start)
            if entry.kind != "hotel":
                new["end_time"] = synplan_travel.time_text(start + entry.minutes)
        new |= {"stated_price": entry.price, "db_lookup_key": entry.key}
        if len(item) == 1:
            return new
        kept = {key: value for key, value in item.items() if key not in TIMES or key in new}
        return kept | new

    def final_items(self) -> list[dict]:
        """The best plan's items; a changed one keeps the start it had where the plan stays valid."""
        items = super().final_items()
        for at, (entry, item, i) in enumerate(self.best_parts):
            old = self.items[i] if i is not None else item
            same = entry.kind == "flight" or old is item or old["db_lookup_key"] == entry.key
            if same or "start_time" not in old:
                continue
            midnight = synplan_travel.DAY * (int(old["day"]) - 1)
            start = midnight + synplan_travel.clock(old["start_time"])
            tried = [*items[:at], self.rewritten(entry, old, 0, entry.city, start), *items[at + 1 :]]
            if synplan_travel.verify(self.instance, {"items": tried}).passed:
                items = tried
        return items


class _Retail(_Search):
    def __init__(self, instance: Instance, items: list[dict], limit_s: float):
        super().__init__(instance, items, limit_s)
        have = {tag for entry in self.entries if entry for tag in entry.tags}
        self.missing = sum(feature not in have for feature in instance.profile.features)
        self.most_tags = max(len(entity.tags) for entity in instance.entities.values())
        self.order = {key: at for at, key in enumerate(instance.entities)}

    def candidates(self, i: int) -> list[Entity]:
        return list(self.instance.entities.values())

    def begin(self, changes: int) -> None:
        # each product of a smallest edit that was added brings a feature that would be missing
        fits = (j for j in range(changes + 1) if j <= self.missing + self.most_tags * (changes - j))
        self.descend(0, changes, max(fits, default=0), 0)

    def descend(self, i: int, left: int, inserts: int, paid: int) -> None:
        """Go on with item i: keep or change it; after the last one add products in the database's order."""
        if self.hopeless(i, left, paid):
            return
        if i < len(self.items):
            kept, item = self.entries[i], self.items[i]
            if kept is not None and left <= len(self.items) - i - 1 + inserts:
                self.take(kept, item, i, left, inserts, paid)
            for entry in self.pools[i] if left else ():
                if entry is not kept and not self.too_dear(i + 1, left - 1, paid + entry.price):
                    self.take(entry, item | self.written(entry), i, left - 1, inserts, paid)
        elif left == 0:
            self.finish()
        elif inserts >= left:
            last = self.parts[-1] if self.parts and self.parts[-1][2] is None else None
            first = self.order[last[0].key] + 1 if last else 0
            for entry in list(self.instance.entities.values())[first:]:
                self.take(entry, self.written(entry), None, left - 1, inserts - 1, paid)

    def written(self, entry: Entity) -> dict:
        item = {"name": entry.name, "type": entry.kind}
        return item | {"stated_price": entry.price, "db_lookup_key": entry.key}

    def take(self, entry: Entity, item: dict, i: int | None, left: int, inserts: int, paid: int) -> None:
        conflicts = self.instance.conflicts
        if any(frozenset((entry.key, part[0].key)) in conflicts for part in self.parts):
            return
        self.parts.append((entry, item, i))
        self.descend(len(self.items) if i is None else i + 1, left, inserts, paid + entry.price)
        self.parts.pop()
