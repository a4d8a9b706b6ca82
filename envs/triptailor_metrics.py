"""TripTailor's tables from stored items alone: what the benchmark and Anchored GRPO report of a planner.

An item is what eval.py stores of one request. Read here: "strict" and "official" (the seven checks and
"pass"; official may be null), "win", "calls", "turns", "tokens_sampled", "tokens_observed", "facts" (of
TripTailor.facts) and "judges": {name: {"kind": "llm" | "rm" | "rubric", "own": [scores], "reference":
[scores]}}, one score per presentation order, empty where the judge failed. What is not stored is None here,
never a guess. Shares are in [0, 1].
"""

import math
from collections import Counter

import numpy as np

FEASIBILITY = ("within_sandbox", "complete_information")
RATIONALITY = ("budget", "diverse_restaurants", "diverse_attractions", "meal_prices", "visit_duration")
EASY_DAYS = 3  # trips of at most so many days are "easy"
EFFORT = ("calls", "turns", "tokens_sampled", "tokens_observed")
SCORINGS = ("official", "strict")
KINDS = ("llm", "rm", "rubric")


def metrics(items: list[dict]) -> dict[str, dict]:
    """Every number of the tables, for "all" items and for "easy" and "hard" ones (2-3 and 4-7 days).

    returns  part -> {"plans": n, "official", "strict", "judges": {rate: mean} or None where nothing is known,
             "per_judge": {name: {"win_rate", "plans"}}, "route": see route(), "effort": {count: mean per
             plan}, "calls_by_tool": {tool: {"per_plan", "total"}}, "valid_by_calls": [{"calls", "plans",
             "valid"}]}
    rates    of official and strict: feasibility_micro, feasibility_macro, rationality_micro,
             rationality_macro, valid and the seven checks
    judges   llm_win, rm_win, rubric_win: mean score above the reference's over all judges of a kind and both
             orders; and for "official_" and "strict_" validity: final_pass: valid; final_surpass: valid and
             (llm_win or rm_win); strict_both: valid and llm_win and rm_win; surpass: valid and preferred by
             the run's own judge ("win" above one half)
    source   TripTailor eval.py for the definitions; denominators are all items, undelivered plans failing
    """
    parts = {"all": items}
    for name in ("easy", "hard"):
        parts[name] = [item for item in items if difficulty(item) == name]
    return {name: _part(part) for name, part in parts.items() if part or name == "all"}


METRICS = metrics


def difficulty(item: dict) -> str:
    """easy, hard, or "" where the item does not say how long the trip is."""
    days = item.get("facts", {}).get("days")
    return "" if days is None else "easy" if days <= EASY_DAYS else "hard"


def columns(item: dict) -> dict[str, float | None]:
    """Every rate's value for one item, "official.valid" and so on; None where it is not known."""
    row = {}
    for scoring in SCORINGS:
        checks = item.get(scoring)
        values = scores(checks) if checks else {}
        row |= {f"{scoring}.{name}": values.get(name) for name in RATES}
    wins = {f"{kind}_win": kind_win(item, kind) for kind in KINDS}
    row |= {f"judges.{name}": None if won is None else float(won) for name, won in wins.items()}
    win = item.get("win")
    own = None if win is None else win > 0.5
    for scoring in SCORINGS:
        valid = row[f"{scoring}.valid"]
        both = (wins["llm_win"], wins["rm_win"])
        row[f"judges.{scoring}_final_pass"] = valid
        row[f"judges.{scoring}_final_surpass"] = _gated(valid, llm_or_rm(item))
        row[f"judges.{scoring}_strict_both"] = _gated(valid, None if None in both else all(both))
        row[f"judges.{scoring}_surpass"] = _gated(valid, own)
    return row | {f"effort.{name}": item.get(name) for name in EFFORT}


def scores(checks: dict) -> dict[str, float]:
    """Micro and macro of one item's checks, and the checks themselves."""
    groups = {"feasibility": FEASIBILITY, "rationality": RATIONALITY}
    values = {}
    for name, members in groups.items():
        held = [bool(checks[check]) for check in members]
        values |= {f"{name}_micro": sum(held) / len(held), f"{name}_macro": float(all(held))}
    values["valid"] = float(bool(checks["pass"]))
    return values | {check: float(bool(checks[check])) for members in groups.values() for check in members}


RATES = tuple(scores(dict.fromkeys((*FEASIBILITY, *RATIONALITY, "pass"), True)))


def kind_win(item: dict, kind: str) -> bool | None:
    """Whether the mean score over all judges of a kind and their orders is above the reference's; None where
    no such judge has scored the plan, or one of them failed."""
    records = [record for record in item.get("judges", {}).values() if record["kind"] == kind]
    if not records or not all(record["own"] and record["reference"] for record in records):
        return None
    own, reference = (
        math.fsum(mean(record[side]) for record in records) / len(records) for side in ("own", "reference")
    )
    return own > reference


def llm_or_rm(item: dict) -> bool | None:
    """Whether an LLM or a reward model prefers the plan. A kind that was not asked counts as no, as it does
    officially; None where neither was, or the one that failed would decide."""
    asked = {record["kind"] for record in item.get("judges", {}).values()} & {"llm", "rm"}
    won = [kind_win(item, kind) for kind in sorted(asked)]
    return True if True in won else None if None in won or not won else False


def _gated(valid: float | None, won: bool | None) -> float | None:
    """0 for a plan that is not valid, whatever a judge says of it."""
    if valid is None or (valid and won is None):
        return None
    return float(bool(valid and won))


def mean(values: list) -> float | None:
    """Mean of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _part(items: list[dict]) -> dict:
    rows = [columns(item) for item in items]
    means = {name: mean([row[name] for row in rows]) for name in (rows[0] if rows else ())}

    def group(name):
        found = {key.partition(".")[2]: value for key, value in means.items() if key.startswith(f"{name}.")}
        return found if any(value is not None for value in found.values()) else None

    return {
        "plans": len(items),
        **{name: group(name) for name in (*SCORINGS, "judges")},
        "per_judge": per_judge(items),
        "route": route(items),
        "effort": group("effort"),
        "calls_by_tool": calls_by_tool(items),
        "valid_by_calls": valid_by_calls(items),
    }


def per_judge(items: list[dict]) -> dict[str, dict]:
    """Judge -> share of the plans it scored whose mean score over both orders is above the reference's."""
    names = dict.fromkeys(name for item in items for name in item.get("judges", {}))
    found = {}
    for name in names:
        records = [item["judges"][name] for item in items if name in item.get("judges", {})]
        known = [record for record in records if record["own"] and record["reference"]]
        wins = [float(mean(record["own"]) > mean(record["reference"])) for record in known]
        found[name] = {"win_rate": mean(wins), "plans": len(known)}
    return found


def route(items: list[dict]) -> dict[str, list[float | None]]:
    """ "km", "reference_km" and "ratio": mean legs and their ratio to the reference's, each by
    triptailor_official.ROUTE_MODES (the first is the reported one). The ratio is over plans whose names all
    match and whose reference has a way to go."""
    facts = [item.get("facts", {}) for item in items]
    own = [fact.get("route_km") or [None] * 3 for fact in facts]
    reference = [fact.get("reference_route_km") or [None] * 3 for fact in facts]
    ratios = [
        [a / b if a is not None and b else None for a, b in zip(*pair, strict=True)]
        for pair in zip(own, reference, strict=True)
    ]
    rows = {"km": own, "reference_km": reference, "ratio": ratios}
    return {name: [mean([row[mode] for row in table]) for mode in range(3)] for name, table in rows.items()}


def calls_by_tool(items: list[dict]) -> dict[str, dict]:
    """Tool -> valid calls per plan and in all, most first; of the items that know their calls."""
    known = [
        item["facts"]["calls_by_tool"]
        for item in items
        if item.get("facts") and item.get("calls") is not None
    ]
    totals = Counter()
    for calls in known:
        totals.update(calls)
    order = sorted(totals, key=lambda tool: (-totals[tool], tool))
    return {tool: {"per_plan": totals[tool] / len(known), "total": totals[tool]} for tool in order}


def valid_by_calls(items: list[dict]) -> list[dict]:
    """Share of valid plans (strict) by number of calls, ascending."""
    groups: dict[int, list[bool]] = {}
    for item in items:
        if item.get("calls") is not None:
            groups.setdefault(item["calls"], []).append(bool(item["strict"]["pass"]))
    return [
        {"calls": calls, "plans": len(held), "valid": sum(held) / len(held)}
        for calls, held in sorted(groups.items())
    ]


def compare_runs(a: list[dict], b: list[dict], *, seed: int = 0, samples: int = 10_000) -> dict:
    """Two runs on the same requests, paired by id (and trial): from a to b.

    returns  {"pairs": n, "retained", "converted", "net": {scoring: share of a's valid plans whose request is
             valid in b too; share of a's invalid ones that are valid in b; requests gained}, "rates": {rate:
             {"a", "b", "diff", "low", "high", "p", "pairs"}}}: means, b - a with a 95 % percentile bootstrap
             interval over requests, and its two-sided p-value. Rates that no pair knows are left out
    raises   ValueError if the runs have no request in common
    source   Anchored GRPO: paired bootstrap; resamples and p-value are our choice
    """
    theirs = {(item["id"], item.get("trial", 0)): item for item in b}
    pairs = [(i, theirs[key]) for i in a if (key := (i["id"], i.get("trial", 0))) in theirs]
    if not pairs:
        raise ValueError(f"no request in common: {len(a)} and {len(b)} items; compare runs on one split")
    rows = [(columns(x), columns(y)) for x, y in pairs]
    result = {"pairs": len(pairs), "retained": {}, "converted": {}, "net": {}, "rates": {}}
    for scoring in SCORINGS:
        known = [(x[f"{scoring}.valid"], y[f"{scoring}.valid"]) for x, y in rows]
        known = [(bool(x), bool(y)) for x, y in known if None not in (x, y)]
        result["retained"][scoring] = mean([float(y) for x, y in known if x])
        result["converted"][scoring] = mean([float(y) for x, y in known if not x])
        result["net"][scoring] = sum(y - x for x, y in known) if known else None
    for name in rows[0][0]:
        both = [(x[name], y[name]) for x, y in rows if None not in (x[name], y[name])]
        if both:
            result["rates"][name] = paired(both, seed=seed, samples=samples)
    return result


def paired(both: list[tuple[float, float]], *, seed: int, samples: int) -> dict:
    """Means of two columns and the bootstrap of their difference: p = 2 min(P(d <= 0), P(d >= 0)) over
    resamples, with one added to the count and to the resamples so that it is never 0; at most 1. `samples`
    is taken in whole hundreds."""
    x = np.array(both, dtype=np.float64)  # (n, 2)
    diff = x[:, 1] - x[:, 0]
    rng, num_chunks = np.random.default_rng(seed), samples // 100 if diff.any() else 1
    chunks = [diff[rng.integers(0, len(diff), (100, len(diff)))].mean(axis=1) for _ in range(num_chunks)]
    draws = np.concatenate(chunks)  # (samples,)
    low, high = np.quantile(draws, [0.025, 0.975])
    tail = min((draws <= 0).sum(), (draws >= 0).sum())
    p = min(1.0, 2 * (int(tail) + 1) / (len(draws) + 1))
    row = {"a": x[:, 0].mean(), "b": x[:, 1].mean(), "diff": diff.mean(), "low": low, "high": high, "p": p}
    return {name: float(value) for name, value in row.items()} | {"pairs": len(both)}
