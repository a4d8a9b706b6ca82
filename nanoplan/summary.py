"""Stored items in, the numbers of results.json out: rates with intervals, success over trials, strata,
latency, cost, paired differences. Pure functions of the items: every table can be made again without a model.
"""

import re
from collections import Counter

import numpy as np

from nanoplan import stats
from nanoplan.evaluate import PER_PLAN, UNDELIVERED, columns_of, env_failed, judge_failed, mean_known

READING = ("readable", "decode")  # checks by which a benchmark says whether an answer holds a plan
NO_PLAN = ("no plan", UNDELIVERED)  # how the first reason begins where it has no such check
COSTS = ("queries", "prompt_tokens", "completion_tokens")  # of an item of an agent behind an endpoint
UNKNOWN = {"value": None, "low": None, "high": None, "n": 0}


def summarize(items: list[dict], *, seed: int = 0) -> dict:
    """What results.json says of the items, each number with its 95 % interval and the items it is over.

    returns  {"official": {check: {"value", "low", "high", "n"}}, or None where no item has an official score,
             "strict": {rate: the same}, "per_plan": {count: the same}, "counts", "success", "strata",
             "latency", "costs"}. Rates have Wilson intervals (of half wins: of the nearest whole number),
             counts per plan and rates over several trials percentile bootstrap ones over requests. What no
             item knows is None with n = 0.
    """
    columns, tasks = columns_of(items), [item["id"] for item in items]
    columns["decode_rate"] = [parsed(item) for item in items]
    official = [item["official"] or {} for item in items]
    checks = dict.fromkeys(name for row in official for name in row)
    counts = {
        "requests": len(set(tasks)),
        "trials": num_trials(items),
        "undelivered": sum(item["stop"] == UNDELIVERED for item in items),
        "parse_failures": sum(not parsed(item) for item in items),
        "env_errors": sum(env_failed(item) for item in items),
        "judge_errors": sum(judge_failed(item) for item in items),
        "stops": dict(Counter(item["stop"].partition(":")[0] for item in items).most_common()),
    }
    rows = {name: rate(column, tasks, seed) for name, column in columns.items() if name not in PER_PLAN}
    return {
        "official": {name: rate([row.get(name) for row in official], tasks, seed) for name in checks} or None,
        "strict": rows,
        "per_plan": {name: count(columns[name], tasks, seed) for name in PER_PLAN},
        "success": success(items, seed=seed),
        "strata": strata(items, seed=seed),
        "latency": latency(items),
        "costs": costs(items, seed=seed),
        "counts": counts,
    }


def num_trials(items: list[dict]) -> int:
    return max((item.get("trial", 0) for item in items), default=0) + 1


def parsed(item: dict) -> bool:
    """Whether a plan could be read out of the answer, right or wrong."""
    strict = item["strict"]
    for name in READING:
        if name in strict:
            return strict[name]
    return not (strict["reasons"] and strict["reasons"][0].startswith(NO_PLAN))


def by_task(column: list, tasks: list[str]) -> dict[str, list[float]]:
    """Task -> its known values, in order of first appearance; tasks of which none is known are left out."""
    groups: dict[str, list[float]] = {}
    for value, task in zip(column, tasks, strict=True):
        if value is not None:
            groups.setdefault(task, []).append(float(value))
    return groups


def rate(column: list, tasks: list[str], seed: int) -> dict:
    """Mean and interval of a column of shares; one value per item, None where it is unknown."""
    groups = list(by_task(column, tasks).values())
    if max(map(len, groups), default=0) > 1:
        return count(column, tasks, seed)
    known = [group[0] for group in groups]
    if not known:
        return dict(UNKNOWN)
    low, high = stats.wilson(round(sum(known)), len(known))
    return {"value": mean_known(known), "low": low, "high": high, "n": len(known)}


def count(column: list, tasks: list[str], seed: int) -> dict:
    """Mean over tasks of their mean, with a bootstrap interval over tasks; n counts values."""
    groups = list(by_task(column, tasks).values())
    if not groups:
        return dict(UNKNOWN)
    mean, low, high = stats.bootstrap_mean([mean_known(group) for group in groups], seed=seed, samples=2000)
    return {"value": mean, "low": low, "high": high, "n": sum(map(len, groups))}


def success(items: list[dict], *, seed: int) -> dict[str, dict | None]:
    """Strict and official success over trials: {"strict": row, "official": row or None}.

    A row: tasks, trials, mean, sem (over the tasks' means), low and high by "wilson" (one trial only, else
    None) and by "bootstrap" over tasks, and "pass^": [pass^1, ..., pass^trials], pass^1 being pass@1. Lists
    are shorter where a task has fewer trials.
    """
    tasks = [item["id"] for item in items]
    columns = {"strict": [item["strict"]["pass"] for item in items]}
    columns["official"] = [(item["official"] or {}).get("pass") for item in items]
    return {name: _success(list(by_task(column, tasks).values()), seed) for name, column in columns.items()}


def _success(groups: list[list[float]], seed: int) -> dict | None:
    if not groups:
        return None
    means = [mean_known(group) for group in groups]
    mean, low, high = stats.bootstrap_mean(means, seed=seed, samples=2000)
    trials = min(map(len, groups))
    row = {"tasks": len(groups), "trials": trials, "mean": mean, "sem": stats.standard_error(means)}
    once = max(map(len, groups)) == 1
    row["wilson"] = list(stats.wilson(round(sum(means)), len(means))) if once else None
    row["bootstrap"] = [low, high]
    won = [int(sum(group[:trials])) for group in groups]
    row["pass^"] = [stats.pass_hat(won, trials, k) for k in range(1, trials + 1)]
    return row


def strata(items: list[dict], *, seed: int) -> dict[str, dict]:
    """Stratum -> {"requests", "strict", "official": rates of pass, "seconds": mean}, in natural order; {}
    where the benchmark has none."""
    groups: dict[str, list[dict]] = {}
    for item in items:
        if item.get("stratum"):
            groups.setdefault(item["stratum"], []).append(item)
    rows = {}
    for name in sorted(groups, key=_natural):
        part = groups[name]
        tasks = [item["id"] for item in part]
        rows[name] = {
            "requests": len(set(tasks)),
            "strict": rate([item["strict"]["pass"] for item in part], tasks, seed),
            "official": rate([(item["official"] or {}).get("pass") for item in part], tasks, seed),
            "seconds": latency(part)["mean"],
        }
    return rows


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Key by which "trip 3 cities" stands before "trip 10 cities"."""
    parts = re.findall(r"(\d+)|(\D+)", name)
    return [(0, int(digits), "") if digits else (1, 0, text) for digits, text in parts]


def latency(items: list[dict]) -> dict[str, float | int | None]:
    """Seconds from a request's start to its end: mean, p50, p95, n. Items with a reply from the disk cache
    took no time worth counting and are left out (`cached`)."""
    known = [item for item in items if item.get("seconds") is not None]
    fresh = [item["seconds"] for item in known if not item.get("cached")]
    row = {"mean": None, "p50": None, "p95": None, "n": len(fresh), "cached": len(known) - len(fresh)}
    if fresh:
        p50, p95 = np.quantile(fresh, [0.5, 0.95])
        row |= {"mean": mean_known(fresh), "p50": float(p50), "p95": float(p95)}
    return row


def costs(items: list[dict], *, seed: int = 0) -> dict | None:
    """Queries and tokens per plan of an agent behind an endpoint, and US dollars of all plans; else None.

    Replies from the cache count: this is what the method costs, not what this run has paid.
    """
    if not any(item.get("queries") for item in items):
        return None
    tasks = [item["id"] for item in items]
    row = {name: count([item.get(name) for item in items], tasks, seed) for name in COSTS}
    return row | {"usd": sum(item.get("usd") or 0.0 for item in items)}


def compare(a: list[dict], b: list[dict], *, seed: int) -> dict[str, dict]:
    """Paired differences of two systems over the requests that both have, by id; trials are averaged.

    returns  rate or count -> {"a", "b", "diff", "low", "high", "n"}: means of both, mean of b - a with a 95 %
             bootstrap interval over requests, and the requests where both are known; None where n = 0
    raises   ValueError if the two have no id in common
    """
    shared = {item["id"] for item in a} & {item["id"] for item in b}
    if not shared:
        raise ValueError(f"no id in common: {a[0]['id']!r} ... against {b[0]['id']!r} ...; compare one split")
    sides = []
    for items in (a, b):
        kept = [item for item in items if item["id"] in shared]
        sides.append((columns_of(kept), [item["id"] for item in kept]))
    out = {}
    for name in (name for name in sides[0][0] if name in sides[1][0]):
        x, y = (by_task(columns[name], tasks) for columns, tasks in sides)
        both = [task for task in x if task in y]
        row = {"a": None, "b": None, "diff": None, "low": None, "high": None, "n": len(both)}
        if both:
            ours, theirs = ([mean_known(side[task]) for task in both] for side in (x, y))
            row |= {"a": mean_known(ours), "b": mean_known(theirs)}
            row |= zip(("diff", "low", "high"), stats.paired_bootstrap(ours, theirs, seed=seed), strict=True)
        out[name] = row
    return out
