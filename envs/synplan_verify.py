"""What both SynPlan-R worlds share: entities and instances, reading a plan, and what a verifier reports.

A plan is JSON in one <plan> block that validates against the paper's schema. What does not is a decode
failure: it fails, and nothing parses it a second time. Source: CM-DPO, sections 3 and 4, appendix 12.
"""

import json
import random
import re
from dataclasses import asdict, dataclass, field

import jsonschema

from envs.base import Verdict, clip, json_path

MAX_PLAN_CHARS = 20_000  # of a completion that is read; ours
MAX_ITEMS = 60  # of a plan; ours
TASTE = 2  # of careless planners in compact worlds: weight of the i-th cheapest is i to this power; ours
TAU = {  # constraint -> (median raw severity of violating generations, unit); Table 8 where the paper has it
    "travel": {
        "cost": (84.0, "USD"),
        "time": (38.0, "minutes"),
        "pace": (1.0, "cities"),
        "hours": (38.0, "minutes"),  # ours, like the next two: measured in the unit above
        "stay": (1.0, "nights"),
        "lookup": (1.0, "items"),
    },
    "retail": {
        "cost": (138.0, "USD"),
        "features": (1.0, "features"),
        "compat": (1.0, "edges"),
        "cap": (138.0, "USD"),  # ours, like the next one
        "lookup": (1.0, "items"),
    },
}


@dataclass(frozen=True, slots=True)
class Entity:
    """One entry of an instance's database. Travel uses all of it but `brand`, retail the first six fields."""

    key: str  # what a plan's db_lookup_key names
    name: str
    kind: str  # flight | hotel | restaurant | activity; retail: the category
    price: int  # USD; a night for hotels
    tags: tuple[str, ...] = ()  # attributes; retail: features
    brand: str = ""
    city: str = ""  # where it lies; of a flight where it lands
    origin: str = ""  # of a flight: where it takes off
    depart: int = 0  # of a flight: minutes after midnight; it flies every day
    minutes: int = 0  # how long a flight, a meal or a visit takes; 0 for hotels


@dataclass(frozen=True, slots=True)
class Profile:
    """What is asked for: the paper's constraint profile. `hard` is ordered; its weights are equal."""

    budget: int  # USD
    prefs: tuple[str, ...]  # soft: attributes, or brands
    origin: str = ""  # travel: where the traveller is at `start`
    start: int = 0  # travel: first minute of the window, counted from day 1, 0:00
    end: int = 0  # travel: last minute
    pace: int = 0  # travel: distinct cities, restaurants and activities, at least
    hours: tuple[int, int] | None = None  # travel: no flight or visit begins before or ends after, per day
    features: tuple[str, ...] = ()  # retail: what the products together must have
    cap: tuple[str, int] | None = None  # retail: category and the most USD to spend in it


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """A profile, its database and the prompt that states both."""

    id: str  # "travel/tiny/train/17"
    domain: str  # travel | retail
    profile: Profile
    entities: dict[str, Entity]  # key -> entry, in the order of the prompt
    minutes: dict[tuple[str, str], int] = field(default_factory=dict)  # travel: between and within cities
    conflicts: frozenset[frozenset[str]] = frozenset()  # retail: pairs of keys that don't go together
    query: str = ""  # what the user writes
    compact: bool = False  # short forms of database and plan, for small models
    tau: dict[str, float] = field(default_factory=dict)  # constraint -> constant that replaces TAU's

    @property
    def hard(self) -> tuple[str, ...]:
        """Names of the profile's hard constraints."""
        if self.domain == "retail":
            return ("cost", "features", "compat") + ("cap",) * (self.profile.cap is not None)
        return ("cost", "time", "pace") + ("hours",) * (self.profile.hours is not None)

    def record(self) -> dict:
        """{"profile", "knowledge"} for a pair's record; `from_record` is the inverse."""
        rows = []
        for entity in self.entities.values():
            row = {name: getattr(entity, name) for name in Entity.__slots__}
            rows.append({k: v for k, v in row.items() if v not in ("", (), 0) or k == "price"})
        weights = dict.fromkeys(self.hard, 1 / len(self.hard))
        knowledge = {
            "entities": rows,
            "minutes": [[a, b, n] for (a, b), n in self.minutes.items()],
            "conflicts": sorted(sorted(pair) for pair in self.conflicts),
            "compact": self.compact,
            "tau": self.tau,
        }
        return {"profile": asdict(self.profile) | {"weights": weights}, "knowledge": knowledge}


def from_record(record: dict) -> Instance:
    """The instance of a pair's record. Raises ValueError where the record is not of this form."""
    try:
        profile = {k: _tuple(v) for k, v in record["profile"].items() if k != "weights"}
        known = record["knowledge"]
        rows = [Entity(**{k: _tuple(v) for k, v in row.items()}) for row in known["entities"]]
        return Instance(
            record["id"],
            record["id"].split("/")[0],
            Profile(**profile),
            {row.key: row for row in rows},
            {(a, b): n for a, b, n in known["minutes"]},
            frozenset(frozenset(pair) for pair in known["conflicts"]),
            record["messages"][-1]["content"],
            known["compact"],
            dict(known["tau"]),
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"no instance in the record: {type(error).__name__} {clip(str(error), 80)}"
        ) from None


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value


@dataclass(slots=True)
class Finding:
    """What the verifier says of one constraint."""

    passed: bool
    raw: float  # severity in `unit`, 0.0 where it holds
    unit: str
    tau: float  # raw severity that counts as 1
    normalised: float  # min(1, raw / tau)
    weight: float  # in the sum over constraints
    reason: str = ""  # for people; "" where it holds


@dataclass(slots=True)
class Report:
    """The verifier's answer on one completion."""

    findings: dict[str, Finding]  # constraint -> finding; after a decode failure only "decode"
    soft: float  # preference score in [0, 1]; 0.0 after a decode failure
    cost: float  # USD by the database
    items: list[dict]  # the plan's items as written; empty after a decode failure

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings.values())

    @property
    def decoded(self) -> bool:
        return self.findings["decode"].passed

    @property
    def broken(self) -> list[str]:
        return [name for name, finding in self.findings.items() if not finding.passed]

    def severity(self) -> dict[str, float]:
        """Weighted sums over broken constraints: {"normalised": at most 1, "raw": mixed units, "unit"}."""
        broken = [finding for finding in self.findings.values() if not finding.passed]
        return {
            "normalised": min(1.0, sum(finding.weight * finding.normalised for finding in broken)),
            "raw": sum(finding.weight * finding.raw for finding in broken),
            "unit": float(bool(broken)),
        }

    def record(self) -> dict:
        """{constraint: {"passed", "raw", "unit", "tau", "normalised", "weight"}} for a pair's record."""
        fields = [field for field in Finding.__slots__ if field != "reason"]
        return {name: {f: getattr(one, f) for f in fields} for name, one in self.findings.items()}

    def verdict(self) -> Verdict:
        checks = {name: finding.passed for name, finding in self.findings.items()}
        severity = {name: finding.raw for name, finding in self.findings.items()}
        reasons = [f"{name}: {self.findings[name].reason}" for name in self.broken]
        return Verdict(self.passed, checks, severity, reasons)


def report(
    instance: Instance, raw: dict[str, tuple[float, str]], *, soft: float, cost: float, items
) -> Report:
    """Findings of a decoded plan from raw severities.

    raw  constraint -> (severity in its unit, reason). The world's own checks (lookup, stay), which are not
         in the paper's profile, weigh as much as one of the profile's constraints.
    """
    weight = 1 / len(instance.hard)
    findings = {"decode": Finding(True, 0.0, "plans", 1.0, 0.0, weight)}
    for name, (amount, reason) in raw.items():
        tau, unit = TAU[instance.domain][name]
        tau = instance.tau.get(name, tau)
        good = amount <= 0
        finding = Finding(good, float(amount), unit, tau, min(1.0, amount / tau), weight)
        finding.reason = "" if good else clip(reason, 200)
        findings[name] = finding
    return Report(findings, soft, float(cost), items)


def undecodable(reason: str) -> Report:
    """The report on a completion without a valid plan: severity 1, and no other constraint is judged."""
    return Report({"decode": Finding(False, 1.0, "plans", 1.0, 1.0, 1.0, clip(reason, 200))}, 0.0, 0.0, [])


# reading and writing plans

_TEXT = {"type": "string", "minLength": 1, "maxLength": 200}
_TIME = {"type": "string", "pattern": r"^([01]?[0-9]|2[0-3]):[0-5][0-9]$"}
_PRICE = {"type": "number", "minimum": 0, "maximum": 1e6}
_ITEM = {"name": _TEXT, "stated_price": _PRICE, "db_lookup_key": _TEXT}
_TRAVEL_ITEM = _ITEM | {
    "type": {"enum": ["flight", "hotel", "restaurant", "activity"]},
    "day": {"type": "integer", "minimum": 1, "maximum": 14},
    "start_time": _TIME,
    "end_time": _TIME,
}


def _plan_schema(item: dict, required: list[str], rest: dict) -> dict:
    one = {"type": "object", "properties": item, "required": required}
    items = {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": one}
    fields = {"items": items, "total_stated_cost": _PRICE, **rest}
    return {"type": "object", "properties": fields, "required": list(fields)}


SCHEMAS = {
    "travel": _plan_schema(
        _TRAVEL_ITEM,
        ["name", "type", "day", "stated_price", "db_lookup_key"],
        {"destinations_visited": {"type": "array", "maxItems": 20, "items": _TEXT}},
    ),
    "retail": _plan_schema(_ITEM | {"type": _TEXT}, ["name", "type", "stated_price", "db_lookup_key"], {}),
}
_VALIDATORS = {domain: jsonschema.Draft202012Validator(schema) for domain, schema in SCHEMAS.items()}


def _no_twins(pairs: list[tuple]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return row


def _finite(text: str) -> float:
    number = float(text)
    if not abs(number) < 1e300:
        raise ValueError(f"{text[:20]} is no finite number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_no_twins, parse_float=_finite, parse_constant=_finite)


def read_plan(domain: str, text: str) -> dict:
    """The plan of a completion: the content of its one <plan> block.

    Text around the block (a rationale, a model's thoughts) is not read.
    raises  ValueError with the reason: no block or several, no JSON, not the schema, too long
    """
    if len(text) > MAX_PLAN_CHARS:
        raise ValueError(f"{len(text)} characters, at most {MAX_PLAN_CHARS} are read")
    said = text.rpartition("</think>")[2]
    blocks = re.findall(r"<plan>(.*?)</plan>", said, re.S)
    if len(blocks) != 1 or said.count("<plan>") > 1:
        raise ValueError(f"{len(blocks)} <plan> blocks, {said.count('<plan>')} opened; wanted one")
    try:
        plan = _DECODER.decode(blocks[0])
        error = next(_VALIDATORS[domain].iter_errors(plan), None)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as problem:
        raise ValueError(f"no JSON: {clip(str(problem), 120)}") from None
    if error is not None:
        raise ValueError(clip(f"{json_path(error)}{error.message}", 160))
    return plan


def write_plan(plan: dict, *, compact: bool) -> str:
    """The <plan> block of a plan. `compact` leaves out the blanks of JSON."""
    separators = (",", ":") if compact else (", ", ": ")
    return f"<plan>{json.dumps(plan, separators=separators, ensure_ascii=False)}</plan>"


def soft_score(instance: Instance, entries: list[Entity | None]) -> float:
    """Share of a plan's distinct entries that carry a preferred attribute or brand (the paper's S_attr).

    entries  in the order of the plan; None for a key that the database lacks, which counts and never carries
    """
    seen = {entry.key: entry for entry in entries if entry is not None}
    total = len(seen) + sum(entry is None for entry in entries)
    wanted = set(instance.profile.prefs)
    liked = sum(bool(wanted.intersection((*entry.tags, entry.brand))) for entry in seen.values())
    return liked / total if total else 0.0


def look_up(instance: Instance, item: dict) -> Entity | None:
    """The entry that an item names; None if there is none of that key and type."""
    entry = instance.entities.get(item["db_lookup_key"])
    return entry if entry is not None and entry.kind == item["type"] else None


def draw_entry(instance: Instance, entries: list[Entity], rng: random.Random) -> Entity:
    """What a careless planner takes; in compact worlds, whose entries come in the order of their prices, the
    dearer the likelier."""
    if not instance.compact:
        return rng.choice(entries)
    return rng.choices(entries, [(i + 1) ** TASTE for i in range(len(entries))])[0]
