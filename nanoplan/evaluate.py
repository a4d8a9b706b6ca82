"""Episodes in, rates out: how the scripts and eval.py measure a planner. One request gives one item, a
plain dict that can be stored, and every rate is computed from the items alone."""

import difflib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from envs.base import Env, PlanView, Verdict
from nanoplan import dist, stats
from nanoplan.chat import Chat
from nanoplan.judge import Judge, judge_all, win_rates
from nanoplan.log import to_json
from nanoplan.model import Model
from nanoplan.rollout import Episode, Rollout
from nanoplan.trajectory import Trajectory

PER_PLAN = ("turns", "calls", "malformed", "tokens_sampled", "tokens_observed")  # counts in an item
UNDELIVERED = "undelivered"  # `stop` of a request that the scored system gave no output for


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed that depends on nothing but `parts`: not on the rank, the machine or the run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def item_of(episode: Episode, verdict: Verdict, outcome: str, win: float | None) -> dict:
    """What is kept of one episode: enough to compute every rate again without the model.

    outcome  win | loss | tie | error, or "" for a plan that the gate stopped before the judge
    win      share of the comparisons that the plan won; None if one failed, or the request has no reference
    """
    trajectory = episode.trajectory
    num_sampled = trajectory.num_sampled
    return {
        "id": episode.env.task.id,
        "output": episode.env.answer_text,
        "strict": {**verdict.checks, "pass": verdict.passed, "reasons": verdict.reasons},
        "severity": verdict.severity,
        "outcome": outcome,
        "win": win,
        "stop": trajectory.stop,
        "turns": episode.turns,
        "calls": episode.calls,
        "malformed": episode.malformed,
        "tokens_sampled": num_sampled,
        "tokens_observed": len(trajectory.ids) - num_sampled,
    }


def _gate(episodes: list[Episode]) -> tuple[list[Verdict], list[int], list[tuple[PlanView, PlanView]]]:
    """Verdict of each episode; which of them pass; and what the judge sees of those: plan and reference."""
    verdicts = [episode.env.verify() for episode in episodes]
    passed = [i for i, v in enumerate(verdicts) if v.passed and not episodes[i].trajectory.broken]
    return verdicts, passed, [(episodes[i].env.view(), episodes[i].env.reference_view()) for i in passed]


def score_for_training(
    episodes: list[Episode],
    judge: Judge,
    *,
    seed: int,
    keys: list[str],
    workers: int,
    on_error: Callable[[str], None] | None = None,
) -> tuple[list[Verdict], list[str]]:
    """Verify every episode and let the judge compare those past the gate with their reference, once each.

    seed, keys  draw the order in which the judge sees a pair; keys has one name per episode
    on_error    called with one text per comparison that failed
    returns     (verdicts, outcomes), one per episode; "error" where the environment or the judge failed
    """
    verdicts, passed, pairs = _gate(episodes)
    outcomes = ["error" if episode.trajectory.broken else "" for episode in episodes]
    names = [keys[i] for i in passed]
    drawn = judge_all(judge, pairs, seed=seed, keys=names, workers=workers, on_error=on_error)
    for i, outcome in zip(passed, drawn, strict=True):
        outcomes[i] = outcome
    return verdicts, outcomes


def score_for_report(episodes: list[Episode], judge: Judge | None) -> list[dict]:
    """Verify every episode and ask the judge both orders of every plan past the gate; one item each, with the
    official score where the benchmark has one.

    judge  None where the requests have no reference plans: every `win` is None
    """
    outcomes = ["error" if episode.trajectory.broken else "" for episode in episodes]
    wins: list[float | None] = [None if judge is None or outcome else 0.0 for outcome in outcomes]
    if judge is None:
        verdicts = [episode.env.verify() for episode in episodes]
    else:
        verdicts, passed, pairs = _gate(episodes)
        for i, win in zip(passed, win_rates(judge, pairs), strict=True):
            wins[i] = win
            outcomes[i] = "error" if win is None else "win" if win == 1 else "tie" if win else "loss"
    rows = zip(episodes, verdicts, outcomes, wins, strict=True)
    return [item_of(*row) | {"official": row[0].env.official()} for row in rows]


def rates(items: list[dict]) -> dict[str, float]:
    """Headline rates of a list of items, in [0, 1], and means per request; nan where nothing is known.

    valid_rate  share whose plan passes every constraint
    win_rate    share whose plan passes and is preferred to the reference; a judge's error is left out
    """
    columns = _columns(items)
    out = {name: _mean(column) for name, column in columns.items()}
    for name in PER_PLAN:
        out[f"{name}_per_plan"] = out.pop(name)
    out["judge_errors"] = float(sum(_judge_failed(item) for item in items))
    return out


def _judge_failed(item: dict) -> bool:
    return item["outcome"] == "error" and not _env_failed(item)


def _env_failed(item: dict) -> bool:
    return item["stop"].startswith("error")


def _columns(items: list[dict]) -> dict[str, list]:
    """Rate or count -> its value per item, None where an item has none."""
    checks = dict.fromkeys(
        name for item in items for name in item["strict"] if name not in ("pass", "reasons")
    )
    columns = {
        "valid_rate": [item["strict"]["pass"] for item in items],
        "win_rate": [item["win"] for item in items],
    }
    columns |= {name: [item["strict"].get(name) for item in items] for name in checks}
    return columns | {name: [item[name] for item in items] for name in PER_PLAN}


def _mean(values: list) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def summarize(items: list[dict], *, seed: int = 0) -> dict:
    """What results.json says of the items, each number with its 95 % interval and the items it is over.

    returns  {"official": {check: {"value", "low", "high", "n"}}, or None where no item has an official score,
             "strict": {rate: the same}, "per_plan": {count: the same}, "counts": {...}}. Rates have Wilson
             intervals (of half wins: of the nearest whole number), counts per plan percentile bootstrap ones.
             What no item knows is None with n = 0.
    """
    columns = _columns(items)
    official = [item["official"] or {} for item in items]
    checks = dict.fromkeys(name for row in official for name in row)
    counts = {
        "requests": len(items),
        "undelivered": sum(item["stop"] == UNDELIVERED for item in items),
        "env_errors": sum(_env_failed(item) for item in items),
        "judge_errors": sum(_judge_failed(item) for item in items),
        "stops": dict(Counter(item["stop"].partition(":")[0] for item in items).most_common()),
    }
    return {
        "official": {name: _rate([row.get(name) for row in official]) for name in checks} or None,
        "strict": {name: _rate(column) for name, column in columns.items() if name not in PER_PLAN},
        "per_plan": {name: _count(columns[name], seed) for name in PER_PLAN},
        "counts": counts,
    }


def _rate(column: list) -> dict:
    known = [float(value) for value in column if value is not None]
    if not known:
        return {"value": None, "low": None, "high": None, "n": 0}
    low, high = stats.wilson(round(sum(known)), len(known))
    return {"value": _mean(known), "low": low, "high": high, "n": len(known)}


def _count(column: list, seed: int) -> dict:
    known = [float(value) for value in column if value is not None]
    if not known:
        return {"value": None, "low": None, "high": None, "n": 0}
    mean, low, high = stats.bootstrap_mean(known, seed=seed, samples=2000)
    return {"value": mean, "low": low, "high": high, "n": len(known)}


def compare(a: list[dict], b: list[dict], *, seed: int) -> dict[str, dict]:
    """Paired differences of two systems over the requests that both have, by id.

    returns  rate or count -> {"a", "b", "diff", "low", "high", "n"}: means of both, mean of b - a with a 95 %
             bootstrap interval over requests, and the requests where both are known; None where n = 0
    raises   ValueError if the two have no id in common
    """
    by_id = {item["id"]: item for item in b}
    pairs = [(item, by_id[item["id"]]) for item in a if item["id"] in by_id]
    if not pairs:
        raise ValueError(f"no id in common: {a[0]['id']!r} ... against {b[0]['id']!r} ...; compare one split")
    ours, theirs = (_columns([pair[side] for pair in pairs]) for side in (0, 1))
    out = {}
    for name in (name for name in ours if name in theirs):
        both = [(x, y) for x, y in zip(ours[name], theirs[name], strict=True) if None not in (x, y)]
        row = {"a": None, "b": None, "diff": None, "low": None, "high": None, "n": len(both)}
        if both:
            x, y = ([float(pair[side]) for pair in both] for side in (0, 1))
            row |= {"a": _mean(x), "b": _mean(y)}
            row |= zip(("diff", "low", "high"), stats.paired_bootstrap(x, y, seed=seed), strict=True)
        out[name] = row
    return out


def check_room(chat: Chat, model: Model, env: Env, *, total_tokens: int) -> None:
    """Refuse a limit at which no episode of the benchmark could work; env is any one of its requests.

    raises  ValueError when the model has too few positions, or the prompt alone fills the limit
    """
    most = model.config.max_positions
    if total_tokens > most:
        raise ValueError(f"total_tokens={total_tokens}: the model has {most} positions; lower it")
    length = len(chat.open(env.fork().reset(), env.tools))
    if length >= total_tokens:
        raise ValueError(f"total_tokens={total_tokens}: the first prompt alone has {length}; raise it")


def evaluate(rollout: Rollout, envs: list[Env], judge, *, seed: int, progress: Callable | None = None):
    """One sampled episode per request, shared over the ranks; every rank returns all items, in order."""
    episodes = play(rollout, envs, seed=seed, progress=progress)
    return in_order(score_for_report(episodes, judge), total=len(envs))


def play(rollout: Rollout, envs: list[Env], *, seed: int, progress: Callable | None = None) -> list[Episode]:
    """One sampled episode for each request of this rank's share, which is envs[rank::world].

    seed      the sampling seed of a request is seed_for(seed, "eval", its id): the same before and after, and
              on any number of ranks
    progress  called with each episode when it is over
    """
    mine = envs[dist.rank() :: dist.world()]
    seeds = [[seed_for(seed, "eval", env.task.id)] for env in mine]
    return [group[0] for group in rollout.run(mine, group=1, seeds=seeds, on_done=progress)]


def in_order(mine: list, *, total: int) -> list:
    """What the ranks made of their shares, in the order of the requests, on every rank. A collective."""
    merged: list = [None] * total
    for rank, part in enumerate(dist.gather_objects([mine])):
        merged[rank :: dist.world()] = part
    return merged


def score_outputs(envs: list[Env], outputs: dict[str, str], judge: Judge | None) -> list[dict]:
    """Items of a system that is not here, by its final answers; requests without one fail every check.

    outputs  id -> final answer (see read_outputs); what is not known of a system (PER_PLAN) is None
    """
    episodes = []
    for env in envs:
        env.reset()
        text = outputs.get(env.task.id)
        if text is not None:
            env.step(text, [])
        episodes.append(Episode(env, Trajectory(stop=UNDELIVERED if text is None else "answer"), None, 0))
    items = score_for_report(episodes, judge)
    for item in items:
        item |= dict.fromkeys(PER_PLAN)
        if item["stop"] == UNDELIVERED:
            reasons = ["undelivered: no line of the outputs has this id"]
            item["strict"] = dict.fromkeys(item["strict"], False) | {"reasons": reasons}
    return items


def read_outputs(path: str | Path, *, known: Collection[str]) -> dict[str, str]:
    """id -> final answer, from a file of lines {"id", "output"}.

    An output is a string, or an object, which becomes JSON text. Other fields of a line are not read.
    known   the ids that may occur
    raises  ValueError that names file and line: no JSON object, a key twice, a missing or wrong field, an id
            that is unknown or was there before, and a file without a line
    """
    outputs: dict[str, str] = {}
    lines: dict[str, int] = {}  # id -> line number
    for number, row in read_lines(path):
        where = f"{path} line {number}"
        for field, kinds in (("id", str), ("output", (str, dict))):
            if field not in row:
                raise ValueError(f'{where} has no "{field}"; wanted {{"id": ..., "output": ...}}')
            if not isinstance(row[field], kinds):
                wanted = "a string" if kinds is str else "a string or an object"
                raise ValueError(f"{where}: {field}={json.dumps(row[field])[:60]}, wanted {wanted}")
        id, output = row["id"], row["output"]
        if id not in known:
            near = difflib.get_close_matches(id, known, n=1, cutoff=0.0)
            raise ValueError(f"{where}: unknown id {id[:60]!r}; of {len(known)} ids {near[0]!r} is nearest")
        if id in outputs:
            raise ValueError(f"{where}: id {id!r} is on line {lines[id]} too; give one output per id")
        outputs[id] = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        lines[id] = number
    return outputs


def read_items(folder: str | Path) -> list[dict]:
    """The items of a folder that eval.py wrote. Raises ValueError that names file, line and missing field."""
    path = Path(folder) / "items.jsonl"
    items = []
    for number, item in read_lines(path):
        for field in ("id", "official", "strict", "win", "outcome", "stop", *PER_PLAN):
            if field not in item:
                raise ValueError(f'{path} line {number} has no "{field}"; wanted a file of eval.py')
        items.append(item)
    return items


def read_lines(path: str | Path) -> Iterator[tuple[int, dict]]:
    """(line number, object) of every line of a JSONL file that is not blank.

    raises  ValueError that names the file, or the line and what is wrong with it
    """
    path, empty = Path(path), True
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_no_twins)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number} is a {type(row).__name__}, wanted an object")
        empty = False
        yield number, row
    if empty:
        raise ValueError(f"{path} holds no line")


def _no_twins(pairs: list[tuple]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return row


def write_lines(path: Path, rows: list[dict]) -> None:
    """A JSONL file through a temp file and a rename, so that no reader sees half of it."""
    temp = path.with_name(path.name + ".tmp")
    temp.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temp, path)
