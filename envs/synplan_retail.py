"""SynPlan-R's retail world: bundles of products that fit a budget, a list of features and each other.

The same surface as envs/synplan_travel.py: `generate`, `verify`, `draft`, `cheap_plan`, `total`, `prompt`.
Source: CM-DPO, section 3.1, appendices 10 to 12; readings in docs/deviations.md.
"""

import itertools
import json
import math
import random
from dataclasses import dataclass, replace

from envs.synplan_draw import draw_feasible
from envs.synplan_verify import Entity, Instance, Profile, Report, draw_entry, look_up, report, soft_score

CATEGORIES = {  # category -> (median USD, features of which a product has some beside its category)
    "printer": (160, ("duplex", "wireless", "photo")),
    "cartridge": (35, ("high-yield", "color", "photo")),
    "monitor": (230, ("ultra-hd", "usb-c", "curved")),
    "keyboard": (60, ("wireless", "backlit", "compact")),
    "headset": (90, ("wireless", "noise-cancelling", "usb-c")),
    "console": (380, ("ultra-hd", "portable", "wireless")),
    "camera": (280, ("ultra-hd", "compact", "wireless")),
    "speaker": (110, ("wireless", "portable", "bass")),
}
SIGMA = 0.5  # of the logarithm of a price, every category; ours
WITHIN, ACROSS = 0.7, 0.95  # probability that two products of one category, of two, are compatible
BRANDS = ("Amber", "Cedar", "Falcon", "Granite", "Heron", "Ivory", "Lotus", "Maple")
MODELS = ("One", "Two", "Plus", "Max", "Air", "Pro", "Mini", "Go", "Neo", "Core")
TRIES = 3  # careless plans that a draft is the nearest miss of


@dataclass(frozen=True, slots=True)
class Size:
    """How large an instance is. The numbers of `paper` give the averages of Table 7."""

    categories: int  # in the database
    needed: tuple[int, int]  # fewest and most of them that are asked for
    products: tuple[int, ...]  # number per category, drawn uniformly from these
    extra: float  # probability of one more required feature
    cap: float  # probability of the constraint `cap`
    brands: tuple[int, ...]  # number of brands in the database, drawn uniformly from these
    prefs: tuple[int, ...]  # number of preferred brands, the same
    compact: bool = False


SIZES = {
    "paper": Size(5, (3, 4), (5, 6, 6), 0.5, 0.2, (5, 5, 5, 5, 4), (1, 2, 3)),
    "tiny": Size(3, (3, 3), (4,), 0.0, 0.0, (4,), (1,), True),
    "small": Size(3, (2, 3), (2, 3), 0.5, 0.3, (3,), (1, 2), True),
}


def generate(id: str, rng: random.Random, size: str) -> Instance:
    """A retail instance that at least one plan satisfies. `query` is left empty."""
    return draw_feasible(id, lambda: _draw(id, rng, SIZES[size]), cheap_plan, careless, rng)


def _draw(id: str, rng: random.Random, size: Size) -> Instance:
    """Everything but the budget, which is set so high that it never binds."""
    categories = sorted(rng.sample(sorted(CATEGORIES), size.categories))
    brands = sorted(rng.sample(BRANDS, rng.choice(size.brands)))
    entities: dict[str, Entity] = {}
    for category in categories:
        products = [_product(rng, category, brands, size) for _ in range(rng.choice(size.products))]
        if size.compact:
            products.sort(key=lambda product: product.price)
        for product in products:
            key = f"P{len(entities) + 1}"
            name = f"{product.brand} {category} {rng.choice(MODELS)}"
            entities[key] = replace(product, key=key, name=name)
    needed = sorted(rng.sample(categories, rng.randint(*size.needed)))
    extras = sorted({tag for e in entities.values() if e.kind in needed for tag in e.tags} - set(categories))
    wanted = [rng.choice(extras)] if extras and rng.random() < size.extra else []
    capped = rng.choice(needed)
    prices = sorted(e.price for e in entities.values() if e.kind == capped)
    cap = (capped, prices[len(prices) // 2]) if rng.random() < size.cap else None
    conflicts = set()
    for a, b in itertools.combinations(entities.values(), 2):
        if rng.random() >= (WITHIN if a.kind == b.kind else ACROSS):
            conflicts.add(frozenset((a.key, b.key)))
    profile = Profile(
        budget=10**6,
        prefs=tuple(sorted(rng.sample(brands, rng.choice(size.prefs)))),
        features=tuple(needed + wanted),
        cap=cap,
    )
    return Instance(id, "retail", profile, entities, {}, frozenset(conflicts), compact=size.compact)


def _product(rng: random.Random, category: str, brands: list[str], size: Size) -> Entity:
    median, extras = CATEGORIES[category]
    price = max(1, round(median * math.exp(rng.gauss(0.0, SIGMA))))
    some = () if size.compact and not size.extra else tuple(t for t in extras if rng.random() < 0.4)
    return Entity("", "", category, price, (category, *some), brand=rng.choice(brands))


def verify(instance: Instance, plan: dict) -> Report:
    """Judge a plan that fits the schema. Never raises on its content."""
    profile, items = instance.profile, plan["items"]
    entries = [look_up(instance, item) for item in items]
    found = [entry for entry in entries if entry is not None]
    unknown = [item["db_lookup_key"] for item, entry in zip(items, entries, strict=True) if entry is None]
    paid = sum(entry.price for entry in found)
    have = {tag for entry in found for tag in entry.tags}
    missing = [feature for feature in profile.features if feature not in have]
    pairs = clashes(instance, [entry.key for entry in found])
    raw = {
        "lookup": (len(unknown), f"{len(unknown)} keys are not in the database: {', '.join(unknown[:3])}"),
        "cost": (max(0, paid - profile.budget), f"costs ${paid}, budget ${profile.budget}"),
        "features": (len(missing), f"lacks {', '.join(missing)}"),
        "compat": (len(pairs), f"incompatible: {'; '.join(' and '.join(pair) for pair in pairs[:3])}"),
    }
    if profile.cap is not None:
        category, most = profile.cap
        spent = sum(entry.price for entry in found if entry.kind == category)
        raw["cap"] = (max(0, spent - most), f"${spent} for {category}, at most ${most}")
    return report(instance, raw, soft=soft_score(instance, entries), cost=paid, items=items)


def clashes(instance: Instance, keys: list[str]) -> list[tuple[str, str]]:
    """Pairs of different keys among `keys` that are not compatible, each once."""
    found = itertools.combinations(sorted(set(keys)), 2)
    return [pair for pair in found if frozenset(pair) in instance.conflicts]


# the scripted planner


def cheap_plan(instance: Instance) -> dict | None:
    """A cheap plan that keeps everything but the budget; None if a short search finds none."""
    rows = [
        sorted(_having(instance, f), key=lambda e: (e.price, e.key))[:5] for f in instance.profile.features
    ]
    for way in sorted(itertools.product(*rows), key=lambda way: sum(e.price for e in set(way))):
        plan = total(instance, [_item(entry) for entry in dict.fromkeys(way)])
        if verify(instance, plan).passed:
            return plan
    return None


def _having(instance: Instance, feature: str) -> list[Entity]:
    return [entity for entity in instance.entities.values() if feature in entity.tags]


def careless(instance: Instance, rng: random.Random, heed: float = 0.5) -> dict:
    """A plan that adds up no prices and reads no conflicts: for each feature that is still missing a product
    that has it, one of a preferred brand with probability `heed`."""
    chosen: list[Entity] = []
    for feature in instance.profile.features:
        if any(feature in entity.tags for entity in chosen):
            continue
        rest = _having(instance, feature)
        liked = [entity for entity in rest if entity.brand in instance.profile.prefs]
        chosen.append(draw_entry(instance, liked if liked and rng.random() < heed else rest, rng))
    return total(instance, [_item(entity) for entity in chosen])


def _item(entity: Entity) -> dict:
    item = {"name": entity.name, "type": entity.kind}
    return item | {"stated_price": entity.price, "db_lookup_key": entity.key}


def total(instance: Instance, items: list[dict]) -> dict:
    """A plan of items, with its cost by the database."""
    paid = sum(entry.price for item in items if (entry := look_up(instance, item)) is not None)
    return {"items": items, "total_stated_cost": paid}


def draft(instance: Instance, rng: random.Random) -> dict:
    """A plan that nearly fits: the least too dear of a few careless ones, now and then the cheapest of them,
    which may hold products that don't go together, or that one without its last product."""
    plans = [careless(instance, rng) for _ in range(TRIES)]
    over = [(plan["total_stated_cost"] - instance.profile.budget, i) for i, plan in enumerate(plans)]
    dear = [(amount, i) for amount, i in over if amount > 0]
    fault = rng.choices(("cost", "compat", "features"), (0.7, 0.2, 0.1))[0]
    if fault == "cost" and dear:
        return plans[min(dear)[1]]
    plan = plans[min(over)[1]]
    if fault == "features" and len(plan["items"]) > 1:
        return total(instance, plan["items"][:-1])
    clashing = [p for p in plans if "compat" in verify(instance, p).broken]
    return clashing[0] if fault == "compat" and clashing else plan


# the prompt


def prompt(instance: Instance) -> str:
    """The system text that states profile and database; a short form in compact worlds."""
    profile = instance.profile
    features, prefs = ", ".join(profile.features), ", ".join(profile.prefs)
    cap = f"{profile.cap[0]} at most ${profile.cap[1]}" if profile.cap else ""
    rows = [_row(instance, entity) for entity in instance.entities.values()]
    clashing = "; ".join(" - ".join(sorted(pair)) for pair in sorted(map(sorted, instance.conflicts)))
    if instance.compact:
        extra = f" {cap}." if cap else ""
        head = f"Plan a purchase. Budget {profile.budget}. Needs {features}.{extra} Prefer {prefs}."
        return "\n".join([head, *rows, f"Not together: {clashing or 'none'}"])
    extra = f"- Spend on {cap}\n" if cap else ""
    words = {"budget": profile.budget, "features": features, "prefs": prefs, "cap": extra}
    return PROMPT.format(rows="\n".join(rows), clashing=clashing or "none", **words)


PROMPT = """You are a retail product search assistant.
=== HARD CONSTRAINTS (must be satisfied) ===
- Total budget MUST NOT exceed ${budget}
- The products together MUST have these features: {features}
- No two products may be incompatible
{cap}=== SOFT PREFERENCES (best-effort) ===
- Preferred brands: {prefs}
- Honour these when possible, NEVER violate hard constraints
=== GROUND TRUTH DATABASE ===
{rows}
incompatible pairs: {clashing}
=== OUTPUT ===
item := {{"name": string, "type": string (the category), "stated_price": number, "db_lookup_key": string}}
Output a single <plan>{{"items": [item, ...], "total_stated_cost": number}}</plan> block."""


def _row(instance: Instance, entity: Entity) -> str:
    if instance.compact:
        return f"{entity.key} {entity.name} {entity.price} {' '.join(entity.tags)}"
    row = {"key": entity.key, "name": entity.name, "type": entity.kind, "price": entity.price}
    return json.dumps(row | {"brand": entity.brand, "features": list(entity.tags)})
