"""SynPlan-R by brute force, written from the rules and not from envs/: severities of a plan from the JSON of
a pair's record, and the smallest edit by trying them all. Slow, and only for small instances."""

import itertools
import json
import re


def plan_of(text):
    """The plan of a completion; None where there is none (schemas are jsonschema's business, not checked)."""
    found = re.findall("<plan>(.*?)</plan>", text, re.S)
    return json.loads(found[0]) if len(found) == 1 else None


def by_key(record):
    """The entries by key, kept in the record between calls."""
    if "rows" not in record:
        record["rows"] = {row["key"]: row for row in record["knowledge"]["entities"]}
        record["way"] = {(a, b): n for a, b, n in record["knowledge"]["minutes"]}
    return record["rows"]


def clock(text):
    return int(text.split(":")[0]) * 60 + int(text.split(":")[1])


def severities(record, plan):
    """constraint -> raw severity, and the preference score and the cost."""
    rows = by_key(record)
    known = [(it, rows[it["db_lookup_key"]]) for it in plan["items"]
             if it["db_lookup_key"] in rows and rows[it["db_lookup_key"]]["kind"] == it["type"]]  # fmt: skip
    lost = len(plan["items"]) - len(known)
    liked, seen = 0, set()
    for _, row in known:
        if row["key"] not in seen:
            seen.add(row["key"])
            words = [*row.get("tags", []), row.get("brand", "")]
            liked += any(word in record["profile"]["prefs"] for word in words)
    soft = liked / (len(seen) + lost) if len(seen) + lost else 0.0
    world = travel if record["id"].startswith("travel") else retail
    raw, cost = world(record, known)
    return raw | {"lookup": lost}, soft, cost


def travel(record, known):
    profile = record["profile"]
    way = record["way"]
    days = profile["end"] // 1440 + 1
    cost = 0
    hotels = [n for n, (it, _) in enumerate(known) if it["type"] == "hotel"]
    for n, (it, row) in enumerate(known):
        if n in hotels:
            later = [known[m][0]["day"] for m in hotels if m > n]
            cost += row["price"] * max(1, (later[0] if later else days) - it["day"])
        else:
            cost += row["price"]
    at, now = profile["origin"], profile["start"]
    time, hours, spans = 0, 0, []
    for it, row in known:
        base = 1440 * (it["day"] - 1)
        ready = now + way.get((at, row.get("origin") or row["city"]), 1440)
        length = row.get("minutes", 0)
        if row["kind"] == "flight":
            begin = base + row.get("depart", 0)
            finish = begin + length
        else:
            if it.get("start_time"):
                begin = base + clock(it["start_time"])
            else:
                begin = max(ready, base + (profile["hours"][0] if profile["hours"] and length else 0))
            finish = begin + length
            if length and it.get("end_time"):
                finish = max(finish, base + clock(it["end_time"]))
            midnight = base + 1440 - (row["kind"] == "hotel")
            time += max(0, finish - midnight)
        time += max(0, ready - begin)
        if profile["hours"] and row["kind"] != "hotel":
            low, high = base + profile["hours"][0], base + profile["hours"][1]
            hours += max(0, low - begin) + max(0, finish - high)
        spans += [begin, finish]
        at, now = row["city"], finish
    time += (
        profile["start"] - min([*spans, profile["start"]]) + max([*spans, profile["end"]]) - profile["end"]
    )
    grounded = [row for _, row in known if row["kind"] != "flight"]
    places = {row["city"] for row in grounded} | {row["key"] for row in grounded if row["kind"] != "hotel"}
    stay = 0
    for night in range(1, days):
        where, bed = profile["origin"], None
        for it, row in known:
            if it["day"] <= night:
                where = row["city"]
                bed = row["city"] if row["kind"] == "hotel" else bed
        stay += bed != where
    raw = {"cost": max(0, cost - profile["budget"]), "time": time, "stay": stay}
    raw["pace"] = max(0, profile["pace"] - len(places))
    return raw | ({"hours": hours} if profile["hours"] else {}), cost


def retail(record, known):
    profile = record["profile"]
    rows = [row for _, row in known]
    cost = sum(row["price"] for row in rows)
    have = [tag for row in rows for tag in row.get("tags", [])]
    bad = {tuple(pair) for pair in record["knowledge"]["conflicts"]}
    keys = {row["key"] for row in rows}
    raw = {"cost": max(0, cost - profile["budget"]), "features": len(set(profile["features"]) - set(have))}
    raw["compat"] = sum((a, b) in bad for a in keys for b in keys)
    if profile["cap"]:
        kind, most = profile["cap"]
        raw["cap"] = max(0, sum(row["price"] for row in rows if row["kind"] == kind) - most)
    return raw, cost


def smallest_edit(record, plan, *, most, starts=None):
    """(number of changed items, best preference score, distance of the cost from where it should end) over
    all edits of at most `most` items; None if none helps.

    starts  clock times to try for what is changed; None: changed items have no times
    """
    rows = record["knowledge"]["entities"]
    origin = severities(record, plan)[2]
    wanted = min(record["profile"]["budget"], origin)
    moving = record["id"].startswith("travel")
    for size in range(most + 1):
        best = None
        for items in edits(record, rows, plan["items"], size, starts, moving):
            raw, soft, cost = severities(record, {"items": items})
            if not any(raw.values()):
                rank = (soft, -abs(cost - wanted))
                best = rank if best is None else max(best, rank)
        if best is not None:
            return size, best[0], -best[1]
    return None


def edits(record, rows, items, size, starts, moving):
    for swaps in range(size + 1):
        for chosen in itertools.combinations(range(len(items)), swaps):
            ways = [list(alternatives(rows, items[i], starts, moving)) for i in chosen]
            for way in itertools.product(*ways):
                new = list(items)
                for i, item in zip(chosen, way, strict=True):
                    new[i] = item
                yield from insertions(record, rows, new, size - swaps, starts, moving)


def alternatives(rows, item, starts, moving):
    for row in rows:
        if moving and row["kind"] != item["type"]:
            continue
        for start in starts if starts and row["kind"] != "flight" else [None]:
            new = {"type": row["kind"], "db_lookup_key": row["key"]}
            new |= {"day": item["day"]} if moving else {}
            new |= {"start_time": start} if start else {}
            if row["key"] != item["db_lookup_key"] or start not in (None, item.get("start_time")):
                yield new


def insertions(record, rows, items, count, starts, moving):
    if count == 0:
        yield items
        return
    if not moving:
        for added in itertools.combinations(rows, count):
            yield items + [{"type": row["kind"], "db_lookup_key": row["key"]} for row in added]
        return
    days = record["profile"]["end"] // 1440 + 1
    for at in range(len(items) + 1):
        before = by_key(record).get(items[at - 1]["db_lookup_key"]) if at else None
        here = before["city"] if before else record["profile"]["origin"]
        for row in rows:
            if row["kind"] in ("activity", "restaurant") and row["city"] == here:
                for day, start in itertools.product(range(1, days + 1), starts or [None]):
                    new = {"type": row["kind"], "db_lookup_key": row["key"], "day": day}
                    new |= {"start_time": start} if start else {}
                    yield from insertions(
                        record, rows, [*items[:at], new, *items[at:]], count - 1, starts, moving
                    )
