"""Episodes in, rates out: how the scripts and eval.py measure a planner. One request gives one item, a
plain dict that can be stored, and every rate is computed from the items alone."""

import difflib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from envs.base import Env, Verdict
from nanoplan import dist
from nanoplan.chat import Chat
from nanoplan.judge import Judge, judge_all, judge_both, win_share
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


def no_reference(env: Env) -> str:
    """Why a request has no plan to compare with; "" if it has one."""
    try:
        env.reference_view()
    except ValueError as error:
        return str(error)
    return ""


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
    outcomes = ["error" if episode.trajectory.broken else "" for episode in episodes]
    verdicts = [episode.env.verify() for episode in episodes]
    passed = [i for i, verdict in enumerate(verdicts) if verdict.passed and not outcomes[i]]
    pairs = [(episodes[i].env.view(), episodes[i].env.reference_view()) for i in passed]
    names = [keys[i] for i in passed]
    drawn = judge_all(judge, pairs, seed=seed, keys=names, workers=workers, on_error=on_error)
    for i, outcome in zip(passed, drawn, strict=True):
        outcomes[i] = outcome
    return verdicts, outcomes


def score_for_report(episodes: list[Episode], judges: list[Judge]) -> list[dict]:
    """Verify every episode and ask the judges both orders of every plan past the gate; one item each, with
    the official score where the benchmark has one.

    judges  `win` is the mean of their win shares, None if one failed, and `judges` keeps what each said. A
            request without a reference plan has no `win`, and no judge is asked
    """
    outcomes = ["error" if episode.trajectory.broken else "" for episode in episodes]
    comparable = [bool(judges) and not no_reference(episode.env) for episode in episodes]
    wins = [0.0 if able and not outcome else None for able, outcome in zip(comparable, outcomes, strict=True)]
    said: list[dict] = [{} for _ in episodes]
    verdicts = [episode.env.verify() for episode in episodes]
    passed = [i for i, v in enumerate(verdicts) if v.passed and not outcomes[i] and comparable[i]]
    pairs = [(episodes[i].env.view(), episodes[i].env.reference_view()) for i in passed]
    for judge in judges:
        for i, record in zip(passed, judge_both(judge, pairs), strict=True):
            said[i][judge.name] = record
    for i in passed:
        shares = [win_share(record) for record in said[i].values()]
        wins[i] = win = None if None in shares else sum(shares) / len(shares)
        outcomes[i] = "error" if win is None else "win" if win == 1 else "tie" if win else "loss"
    items = []
    for episode, verdict, outcome, win, records in zip(episodes, verdicts, outcomes, wins, said, strict=True):
        item = item_of(episode, verdict, outcome, win) | _about(episode.env)
        items.append(item | ({"judges": records} if judges else {}))
    return items


def _about(env: Env) -> dict:
    """What a report keeps beside the strict verdict: the official score; the stratum, for tables by
    difficulty; `facts`, which a benchmark's own metrics need."""
    about = {"official": env.official(), "stratum": getattr(env, "stratum", "")}
    return about | ({"facts": env.facts()} if hasattr(env, "facts") else {})


def rates(items: list[dict]) -> dict[str, float]:
    """Headline rates of a list of items, in [0, 1], and means per request; nan where nothing is known.

    valid_rate  share whose plan passes every constraint
    win_rate    share whose plan passes and is preferred to the reference; a judge's error is left out
    """
    columns = columns_of(items)
    out = {name: mean_known(column) for name, column in columns.items()}
    for name in PER_PLAN:
        out[f"{name}_per_plan"] = out.pop(name)
    out["judge_errors"] = float(sum(judge_failed(item) for item in items))
    return out


def judge_failed(item: dict) -> bool:
    return item["outcome"] == "error" and not env_failed(item)


def env_failed(item: dict) -> bool:
    return item["stop"].startswith("error")


def columns_of(items: list[dict]) -> dict[str, list]:
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


def mean_known(values: list) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


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
    episodes = [group[0] for group in play(rollout, envs, seed=seed, progress=progress)]
    return in_order(score_for_report(episodes, [] if judge is None else [judge]), total=len(envs))


def play(
    rollout: Rollout, envs: list[Env], *, seed: int, trials: int = 1, progress: Callable | None = None
) -> list[list[Episode]]:
    """`trials` sampled episodes for each request of this rank's share, which is envs[rank::world].

    seed      the sampling seed of an episode is trial_seed(seed, id of the request, trial): the same before
              and after, and on any number of ranks
    progress  called with each episode when it is over
    """
    mine = envs[dist.rank() :: dist.world()]
    seeds = [[trial_seed(seed, env.task.id, trial) for trial in range(trials)] for env in mine]
    return rollout.run(mine, group=trials, seeds=seeds, on_done=progress)


def trial_seed(seed: int, id: str, trial: int) -> int:
    """Of one trial of a request."""
    return seed_for(seed, "eval", id) if trial == 0 else seed_for(seed, "eval", id, trial)


class TimedRollout(Rollout):
    """A rollout that knows how long each episode has run: `seconds(episode)`, from its prompt on."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._opened: dict[Episode, float] = {}

    def start(self, env: Env, **options) -> Episode:
        now = time.perf_counter()
        episode = super().start(env, **options)
        self._opened[episode] = now
        return episode

    def fork(self, episode: Episode, **options) -> Episode:
        now = time.perf_counter()
        twin = super().fork(episode, **options)
        self._opened[twin] = now
        return twin

    def seconds(self, episode: Episode) -> float:
        return time.perf_counter() - self._opened[episode]


def in_order(mine: list, *, total: int) -> list:
    """What the ranks made of their shares, in the order of the requests, on every rank. A collective."""
    merged: list = [None] * total
    for rank, part in enumerate(dist.gather_objects([mine])):
        merged[rank :: dist.world()] = part
    return merged


def score_outputs(envs: list[Env], outputs: dict[str, str], judges: list[Judge]) -> list[dict]:
    """Items of a system that is not here, by its final answers; requests without one fail every check.

    outputs  id -> final answer (see read_outputs); what is not known of a system (PER_PLAN) is None
    """
    items = score_for_report([answered(env, outputs.get(env.task.id)) for env in envs], judges)
    for item in items:
        item |= dict.fromkeys(PER_PLAN)
        if item["stop"] == UNDELIVERED:
            reasons = ["undelivered: no line of the outputs has this id"]
            item["strict"] = dict.fromkeys(item["strict"], False) | {"reasons": reasons}
    return items


def answered(env: Env, text: str | None) -> Episode:
    """An episode that is nothing but a final answer; None: there is none."""
    env.reset()
    if text is not None:
        env.step(text, [])
    return Episode(env, Trajectory(stop=UNDELIVERED if text is None else "answer"), None, 0)


def read_outputs(path: str | Path, *, known: Collection[str]) -> dict[str, str]:
    """id -> final answer: read_candidates, where an id that was there before is an error, too."""
    lines: dict[str, int] = {}
    outputs: dict[str, str] = {}
    for number, id, output in _answers(path, known):
        if id in outputs:
            where = f"{path} line {number}"
            raise ValueError(f"{where}: id {id!r} is on line {lines[id]} too; give one output per id")
        outputs[id], lines[id] = output, number
    return outputs


def read_candidates(path: str | Path, *, known: Collection[str]) -> dict[str, list[str]]:
    """id -> final answers, in their order, from a file of lines {"id", "output"}.

    An output is a string, or an object, which becomes JSON text. Other fields of a line are not read.
    known   the ids that may occur
    raises  ValueError that names file and line: no JSON object, a key twice, a missing or wrong field, an
            unknown id, and a file without a line
    """
    candidates: dict[str, list[str]] = {}
    for _, id, output in _answers(path, known):
        candidates.setdefault(id, []).append(output)
    return candidates


def _answers(path: str | Path, known: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """(line number, id, answer) of every line."""
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
        yield number, id, output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


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
