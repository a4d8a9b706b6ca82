"""Episodes in, rates out: how the scripts and eval.py measure a planner. One request gives one item, a
plain dict that can be stored, and every rate is computed from the items alone."""

import hashlib
from collections.abc import Callable

from envs.base import Env, PlanView, Verdict
from nanoplan import dist, stats
from nanoplan.judge import Judge, judge_all, win_rates
from nanoplan.rollout import Episode, Rollout


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed that depends on nothing but `parts`: not on the rank, the machine or the run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def item_of(episode: Episode, verdict: Verdict, outcome: str, win: float | None) -> dict:
    """What is kept of one episode: enough to compute every rate again without the model.

    outcome  win | loss | tie | error, or "" for a plan that the gate stopped before the judge
    win      share of the comparisons that the plan won, None if one failed
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


def score_for_report(episodes: list[Episode], judge: Judge) -> list[dict]:
    """Verify every episode and ask the judge both orders of every plan past the gate; one item each."""
    verdicts, passed, pairs = _gate(episodes)
    wins: list[float | None] = [None if episode.trajectory.broken else 0.0 for episode in episodes]
    outcomes = ["error" if episode.trajectory.broken else "" for episode in episodes]
    for i, win in zip(passed, win_rates(judge, pairs), strict=True):
        wins[i] = win
        outcomes[i] = "error" if win is None else "win" if win == 1 else "tie" if win else "loss"
    return [item_of(*row) for row in zip(episodes, verdicts, outcomes, wins, strict=True)]


def rates(items: list[dict]) -> dict[str, float]:
    """Headline rates of a list of items, in [0, 1], and means per request.

    valid_rate  share whose plan passes every constraint
    win_rate    share whose plan passes and is preferred to the reference; a judge's error is left out
    """
    judged = [item["win"] for item in items if item["win"] is not None]
    out = {
        "valid_rate": _mean([item["strict"]["pass"] for item in items]),
        "win_rate": _mean(judged),
    }
    checks = [name for name in items[0]["strict"] if name not in ("pass", "reasons")] if items else []
    for name in checks:
        out[name] = _mean([item["strict"][name] for item in items])
    for name in ("turns", "calls", "malformed", "tokens_sampled", "tokens_observed"):
        out[f"{name}_per_plan"] = _mean([item[name] for item in items])
    out["judge_errors"] = float(len(items) - len(judged))
    return out


def _mean(values: list) -> float:
    return sum(values) / max(1, len(values))


def intervals(items: list[dict]) -> dict[str, tuple[float, float]]:
    """95 % Wilson intervals of the rates that are shares of requests."""
    out = {}
    for name, value in rates(items).items():
        if name.endswith("_per_plan") or name == "judge_errors":
            continue
        num = sum(item["win"] is not None for item in items) if name == "win_rate" else len(items)
        out[name] = stats.wilson(round(value * num), num)
    return out


def evaluate(rollout: Rollout, envs: list[Env], judge, *, seed: int, progress: Callable | None = None):
    """One sampled episode per request, shared over the ranks; every rank returns all items, in order.

    seed  the sampling seed of request i is seed_for(seed, "eval", its id): the same before and after
    """
    mine = envs[dist.rank() :: dist.world()]
    seeds = [[seed_for(seed, "eval", env.task.id)] for env in mine]
    groups = rollout.run(mine, group=1, seeds=seeds, on_done=progress)
    items = score_for_report([group[0] for group in groups], judge)
    parts = dist.gather_objects([items])
    merged: list[dict | None] = [None] * len(envs)
    for rank, part in enumerate(parts):
        merged[rank :: dist.world()] = part
    return merged
