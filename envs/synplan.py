"""SynPlan-R's worlds as benchmarks: instances generated from seeds, one question, one answer.

    instance = generate("travel", 17, size="tiny")     # profile, database, query
    report = verify(instance, text)                    # raw and normalised severities by constraint
    envs = load("tiny/test", None, n=200)              # travel; load_retail for the other world

Sizes: `paper` gives the graph statistics of the paper's Table 7 (about 41 and 28 entries). `tiny` is for the
default run on a laptop: prompts of about 280 tokens of assets/tiny, plans of about 150; three items of four
options each in the order of their prices, so that a model of a million weights can learn which to take, and a
budget that most careless plans break. `small` is small enough to try every edit. PR is the share of plans
that keep every check, DR of those that decode; `metrics` has both, the preference score S and the failures by
kind. Prompts and plans: envs/synplan_travel.py, envs/synplan_retail.py.
"""

import random
from dataclasses import replace
from pathlib import Path

from envs import synplan_retail, synplan_travel
from envs.base import Env, Message, PlanView, Task, Verdict
from envs.synplan_verify import Instance, Report, read_plan, undecodable

WORLDS = {"travel": synplan_travel, "retail": synplan_retail}
COUNTS = {"train": 15_000, "val": 1_000, "test": 1_000}  # instances of a split when no number is given

OPENINGS = {
    "travel": (
        "Looking for a getaway{where} with a {prefs} feel; nothing extravagant, but not rushed either.",
        "We need a break{where}. Something {prefs} would be lovely, and please mind the money.",
        "Can you put together an affordable trip{where}? I tend to like {prefs} places.",
        "Planning a little escape{where}, ideally {prefs}, without spending more than we have to.",
    ),
    "retail": (
        "I am setting up at home and need things that work together; I like {prefs} products.",
        "Help me pick a {needs} set that won't break the bank, {prefs} if you can.",
        "Shopping for {needs}. Everything has to fit together, and I have a soft spot for {prefs}.",
        "What would you buy if you needed {needs} and had to watch the price? I trust {prefs}.",
    ),
}
SHORT = {  # for small models
    "travel": ("A {prefs} trip, not too dear.", "Somewhere {prefs}, on a budget.", "A cheap {prefs} break."),
    "retail": ("{prefs} things, not too dear.", "I like {prefs}; mind the price.", "A cheap {prefs} set."),
}


def generate(domain: str, seed: int, *, size: str = "paper", split: str = "train") -> Instance:
    """Instance number `seed` of a split; equal arguments give equal instances on every machine.

    raises  ValueError for an unknown domain or size
    """
    world = WORLDS.get(domain)
    if world is None:
        raise ValueError(f"domain={domain!r} is unknown; choose from {', '.join(WORLDS)}")
    if size not in world.SIZES:
        raise ValueError(f"size={size!r} is unknown; choose from {', '.join(world.SIZES)}")
    id = f"{domain}/{size}/{split}/{seed}"
    rng = random.Random(id)
    instance = world.generate(id, rng, size)
    return replace(instance, query=template_query(instance, rng))


def template_query(instance: Instance, rng: random.Random) -> str:
    """What a user might write who has the profile in mind: a template without a number in it."""
    profile = instance.profile
    if instance.compact:
        return rng.choice(SHORT[instance.domain]).format(prefs=" and ".join(profile.prefs))
    cities = list(dict.fromkeys(e.city for e in instance.entities.values() if e.city))
    where = f" to {' and '.join(cities)}" if cities else ""
    needs, prefs = " and ".join(profile.features), " and ".join(profile.prefs)
    return rng.choice(OPENINGS[instance.domain]).format(where=where, needs=needs, prefs=prefs)


def messages(instance: Instance) -> list[Message]:
    """The prompt: the profile's projection as system text, and the user's query."""
    return [Message("system", WORLDS[instance.domain].prompt(instance)), Message("user", instance.query)]


def verify(instance: Instance, text: str) -> Report:
    """Judge a completion. Never raises on what a model wrote: what is no plan is a decode failure."""
    try:
        plan = read_plan(instance.domain, text)
    except ValueError as error:
        return undecodable(str(error))
    return WORLDS[instance.domain].verify(instance, plan)


def rewrite(instance: Instance, plan: dict, rng: random.Random, *, draws: int = 200) -> dict | None:
    """A valid plan of another hand, for the ablation of minimal edits: the careless plan that shares the
    fewest entries with `plan`, or else the cheapest one, with the fields of its items in another order. None
    if no such plan keeps the constraints."""
    world, old = WORLDS[instance.domain], {item["db_lookup_key"] for item in plan["items"]}
    found = [world.careless(instance, rng) for _ in range(draws)]
    found.append(world.cheap_plan(instance))
    shared = [
        (sum(item["db_lookup_key"] in old for item in other["items"]), i)
        for i, other in enumerate(found)
        if other is not None and world.verify(instance, other).passed
    ]
    if not shared:
        return None
    best = found[min(shared)[1]]
    return best | {"items": [dict(sorted(item.items())) for item in best["items"]]}


class SynPlan(Env):
    """One instance. No tools: the first turn is the answer."""

    def __init__(self, task: Task, instance: Instance):
        super().__init__(task, [])
        self.instance = instance

    def reset(self) -> list[Message]:
        self.answer_text, self.done = "", False
        return messages(self.instance)

    def report(self) -> Report:
        return verify(self.instance, self.answer_text)

    def verify(self) -> Verdict:
        """Checks of the profile and the world's own; after a decode failure only "decode", so that the rates
        of the others are over plans that decode."""
        return self.report().verdict()

    def measures(self) -> dict[str, float]:
        """{"soft": S in [0, 1], "severity": weighted normalised severity in [0, 1], "cost": USD}; S counts in
        a table only where the plan passes."""
        report = self.report()
        return {"soft": report.soft, "severity": report.severity()["normalised"], "cost": report.cost}

    def facts(self) -> dict[str, float]:
        """What `metrics` needs of an item."""
        return self.measures()

    def view(self) -> PlanView:
        report = self.report()
        lines = [f"{item['name']} ({item['type']}, {item['db_lookup_key']})" for item in report.items]
        features = {"passed": float(report.passed), "soft": report.soft}
        return PlanView("\n".join(lines) or "(no plan)", features)

    def reference_view(self) -> PlanView:
        raise ValueError(f"{self.task.id} has no reference plan: a plan is right if it keeps the profile")


def load(
    split: str,
    data: str | Path | None = None,
    *,
    n: int | None = None,
    seed: int = 0,
    domain: str = "travel",
) -> list[SynPlan]:
    """One environment per instance of a split: "test", "val" or "train" of size `paper`, or "tiny/test" and
    so on. Nothing is read: instances come from their numbers.

    data    None or ""
    n       that many, drawn by `seed`; None: all (COUNTS), in order
    raises  ValueError for an unknown split or size, more than there are, or a data folder
    """
    if str(data or "") not in ("", "."):
        raise ValueError(f"data={str(data)!r}: the {domain} world is generated from seeds; leave data empty")
    size, _, name = split.rpartition("/")
    if name not in COUNTS:
        raise ValueError(f"split={split!r} is unknown; choose {', '.join(COUNTS)}, or tiny/test and so on")
    numbers = list(range(COUNTS[name]))
    if n is not None:
        if not 0 < n <= len(numbers):
            raise ValueError(f"n={n}: {split} has {len(numbers)} instances; choose 1 to {len(numbers)}")
        numbers = random.Random(f"{domain}/{split}/{seed}").sample(numbers, n)
    envs = []
    for number in numbers:
        instance = generate(domain, number, size=size or "paper", split=name)
        record = {"query": instance.query, **instance.record()}
        envs.append(SynPlan(Task(f"{split}/{number}", record), instance))
    return envs


def load_retail(
    split: str, data: str | Path | None = None, *, n: int | None = None, seed: int = 0
) -> list[SynPlan]:
    """`load` of the retail world."""
    return load(split, data, n=n, seed=seed, domain="retail")


def metrics(items: list[dict]) -> dict[str, dict]:
    """CM-DPO's numbers of stored items (eval.py's items.jsonl): PR, DR, S over the plans that pass, and what
    the others fail by: parse failures apart, each broken constraint as a share of all plans.

    returns  {"cm-dpo": {"PR", "DR", "S" (None if no plan passes), "failures": {"parse", constraint: share}}}
    """
    passed = [item for item in items if item["strict"]["pass"]]
    broken: dict[str, int] = {"decode": 0}
    for item in items:
        checks = {name: good for name, good in item["strict"].items() if name not in ("pass", "reasons")}
        if not checks.get("decode", False):
            checks = {"decode": False}
        for name, good in checks.items():
            broken[name] = broken.get(name, 0) + (good is False)
    shares = {name: count / len(items) for name, count in broken.items()}
    parse = shares.pop("decode")
    soft = sum(item["facts"]["soft"] for item in passed) / len(passed) if passed else None
    rates = {"PR": len(passed) / len(items), "DR": 1 - parse, "S": soft}
    return {"cm-dpo": rates | {"failures": {"parse": parse, **shares}}}
