"""Measure planners on a benchmark: this project's models, or the written outputs of any other system.

    python eval.py --bench triptailor --n 64 --model assets/tiny --out runs/e       # a model, with tools
    python eval.py --bench triptailor --model NAME --adapter runs/train_grpo/adapter --data DIR --out runs/e
    torchrun --nproc_per_node 4 -- eval.py --bench triptailor --model NAME ...      # requests over four ranks
    python eval.py --bench triptailor --outputs plans.jsonl --out runs/other        # {"id", "output"} a line
    python eval.py --recompute runs/e               # the table again, from the stored files alone
    python eval.py --compare runs/e runs/other      # paired differences over the requests that both have

(Without the `--`, torchrun takes --n for one of its own flags.)
Writes config.json, items.jsonl (one line a request), trajectories.jsonl (ids and mask, of a model's run) and
results.json, which follows from config.json and items.jsonl. A judge is asked both orders of every plan past
the gate. `official` is null for a benchmark whose own scorer is not built. Left out: remote models, critics.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from envs import BENCHMARKS, trips
from envs.base import Env
from nanoplan import config, dist, evaluate, log, lora, weights
from nanoplan.chat import Chat
from nanoplan.judge import Judge, RubricJudge
from nanoplan.rollout import Budget, Rollout
from nanoplan.sampler import Sampler

JUDGES = {"triptailor": RubricJudge}  # of the benchmarks whose requests have a plan to compare with
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # what a flag left at none means


@dataclass(frozen=True)
class Config:
    # what is measured: one of model, outputs, recompute, compare
    bench: str = ""  # name of the benchmark, as in envs.BENCHMARKS
    data: str = ""  # the benchmark's folder; triptailor: empty = the built-in world, made on first use
    split: str = "test"  # part of the benchmark
    n: int = 0  # requests, drawn by seed 0 as train_grpo.py draws its held-out ones; 0 = the whole split
    model: str = ""  # HF folder or hub name
    adapter: str = ""  # LoRA adapter in PEFT's format, folder or hub name
    outputs: str = ""  # JSONL file of another system's final answers, {"id", "output"} a line
    recompute: str = ""  # a folder of an earlier run: make results.json and the table from its files
    compare: tuple[str, ...] = ()  # two such folders A B: paired differences B - A
    out: str = "runs/eval"  # folder of the results; an earlier run there is moved aside
    # sampling
    seed: int = 0  # of sampling and of bootstrap intervals
    temperature: float | None = None  # 0 = greedy; none = 1, or the model's own
    top_p: float | None = None  # ids in the smallest set of this probability; none = 1, off
    top_k: int | None = None  # ids among the k likeliest; none = 0, off
    min_p: float | None = None  # ids at least this share of the likeliest; none = 0, off
    generation_config: bool = False  # take those left at none from the model's generation_config.json
    # episode limits, tokens and turns: those of train_grpo.py
    turns: int = 6  # model turns per episode, the plan included
    turn_tokens: int = 400  # sampled tokens per turn
    observation_tokens: int = 400  # tokens of one tool result
    total_tokens: int = 1200  # all tokens of an episode
    max_rows: int = 5  # rows per tool result; triptailor
    hours: bool = False  # whether sights come with their opening hours; triptailor
    # machine
    rows: int = 64  # episodes decoded at once per rank
    workers: int = 0  # threads for tools; 0 = between steps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = float32 on a CPU, bfloat16 on a GPU


def check(cfg: Config) -> None:
    """Refuse flags that do not go together. Raises ValueError with what to change."""
    sources = ("model", "outputs", "recompute", "compare")
    given = [f"--{name}" for name in sources if getattr(cfg, name)]
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        raise ValueError(f"{found} to measure; give one of --{', --'.join(sources)}")
    if cfg.compare and len(cfg.compare) != 2:
        raise ValueError(f"compare={' '.join(cfg.compare)}: wanted two folders")
    if (cfg.model or cfg.outputs) and cfg.bench not in BENCHMARKS:
        raise ValueError(f"bench={cfg.bench!r} is unknown; known: {', '.join(sorted(BENCHMARKS))}")
    if (cfg.model or cfg.outputs) and not cfg.data and cfg.bench != "triptailor":
        raise ValueError(f"data='': only triptailor has a built-in world; give the folder of {cfg.bench}")
    if not cfg.model:
        for name in ("adapter", "generation_config", *SAMPLING):
            if getattr(cfg, name) != getattr(Config, name):
                raise ValueError(f"{name}={getattr(cfg, name)} is for a --model; here is {given[0]}")
    if cfg.rows < 1 or cfg.workers < 0 or cfg.n < 0:
        raise ValueError(f"rows={cfg.rows}, workers={cfg.workers}, n={cfg.n}: wanted 1, 0, 0 or more")


def load_requests(cfg: Config, *, n: int | None) -> list[Env]:
    """Environments of the split: n drawn ones, or all in the order of the file."""
    data = Path(cfg.data) if cfg.data else trips.builtin()
    own = {"triptailor": {"max_rows": cfg.max_rows, "hours": cfg.hours}}
    envs = BENCHMARKS[cfg.bench].load(cfg.split, data, n=n, seed=0, **own.get(cfg.bench, {}))
    if not envs:
        raise ValueError(f"split={cfg.split}: {data} has no request in it; choose another split")
    return envs


def judge_of(cfg: Config, envs: list[Env]) -> Judge | None:
    """The benchmark's judge; None where no request has a plan to compare with. Raises ValueError where some
    have one and some don't."""
    if cfg.bench not in JUDGES:
        return None
    missing = [reason for env in envs if (reason := no_reference(env))]
    if missing and len(missing) < len(envs):
        raise ValueError(f"{len(missing)} of {len(envs)} requests have no reference plan: {missing[0]}")
    if missing and dist.is_main():
        print(f"no win rate: {missing[0]}")
    return None if missing else JUDGES[cfg.bench]()


def no_reference(env: Env) -> str:
    """Why a request has no plan to compare with; "" if it has one."""
    try:
        env.reference_view()
    except ValueError as error:
        return str(error)
    return ""


def sampling_of(cfg: Config, chat: Chat) -> Config:
    """cfg with the sampling parameters that are in force, which rank 0 prints."""
    own = dict(chat.generation_config) if cfg.generation_config else {}
    if own.pop("do_sample", None) is False:
        own = {"temperature": 0.0}
    values = {name: getattr(cfg, name) for name in SAMPLING}
    values = {name: own.get(name) if value is None else value for name, value in values.items()}
    values = {name: SAMPLING[name] if value is None else value for name, value in values.items()}
    if dist.is_main():
        print("sampling: " + ", ".join(f"{name} {value:g}" for name, value in values.items()))
        ids = [name for name in own if name.endswith("_token_id") or name.startswith("_")]
        for name in own.keys() - values.keys() - {*ids, "transformers_version"}:
            print(f"  not applied, of the model's generation_config: {name} = {own[name]}")
        if chat.generation_config.keys() & values.keys() and not cfg.generation_config:
            print("  the model's generation_config is not applied; --generation_config applies it")
    return dataclasses.replace(cfg, **values)


def run_model(cfg: Config) -> tuple[Config, list[dict], list[dict]]:
    """The effective config, and items and trajectories of all requests, on every rank."""
    device = dist.device()
    chat, model = weights.load_policy(cfg.model, dtype=weights.dtype_named(cfg.dtype, device), device=device)
    if cfg.adapter:
        lora.load_adapter(model, weights.fetch(cfg.adapter))
    cfg, envs = sampling_of(cfg, chat), load_requests(cfg, n=cfg.n or None)
    judge = judge_of(cfg, envs)
    evaluate.check_room(chat, model, envs[0], total_tokens=cfg.total_tokens)
    share = len(range(dist.rank(), len(envs), dist.world()))
    filters = {name: getattr(cfg, name) for name in SAMPLING}
    sampler = Sampler(
        model, rows=max(1, min(cfg.rows, share)), max_len=cfg.total_tokens, training=False, **filters
    )
    budget = Budget(cfg.turns, cfg.turn_tokens, cfg.observation_tokens, cfg.total_tokens)
    rollout = Rollout(sampler, chat, budget, workers=cfg.workers)
    open_out(cfg)
    started = time.perf_counter()
    with tqdm(total=share, unit="plan", disable=None if dist.is_main() else True) as bar:
        episodes = evaluate.play(rollout, envs, seed=cfg.seed, progress=lambda episode: bar.update())
    seconds = time.perf_counter() - started
    items = evaluate.in_order(evaluate.score_for_report(episodes, judge), total=len(envs))
    tokens = sum(item["tokens_sampled"] for item in items)
    if dist.is_main():
        speed = tokens / max(1e-9, seconds)
        print(f"{len(envs)} plans in {seconds:.1f} s, {speed:.0f} sampled tokens a second")
    records = []
    for episode in episodes:
        trajectory = episode.trajectory
        row = {"id": episode.env.task.id, "stop": trajectory.stop, "text": chat.decode(trajectory.ids)}
        row |= {"ids": trajectory.ids, "sampled": [int(sampled) for sampled in trajectory.sampled]}
        records.append(row)
    return cfg, items, evaluate.in_order(records, total=len(envs))


def run_outputs(cfg: Config) -> list[dict]:
    """Items of the requests by the answers in a file."""
    every = load_requests(cfg, n=None)
    outputs = evaluate.read_outputs(cfg.outputs, known=[env.task.id for env in every])
    envs = load_requests(cfg, n=cfg.n) if cfg.n else every
    missing = [env.task.id for env in envs if env.task.id not in outputs]
    if missing:
        print(f"no output for {len(missing)} of {len(envs)} requests ({missing[0]} ...); they fail")
    unused = len(outputs) - (len(envs) - len(missing))
    if unused:
        print(f"{unused} outputs are not among the {len(envs)} requests and are not scored")
    judge = judge_of(cfg, envs)
    open_out(cfg)
    return evaluate.score_outputs(envs, outputs, judge)


def open_out(cfg: Config) -> None:
    """Make the results' folder before anything long begins; an earlier one there is moved aside."""
    if dist.is_main():
        log.move_aside(Path(cfg.out))
        config.save(cfg, cfg.out)


def results_of(cfg: dict, items: list[dict]) -> dict:
    """results.json: a function of config.json and items.jsonl."""
    judged = any(item["win"] is not None or item["outcome"] == "error" for item in items)
    about = {name: cfg[name] for name in ("bench", "split", "data", "model", "adapter", "outputs", *SAMPLING)}
    about["judge"] = JUDGES[cfg["bench"]].name if judged else None
    return about | evaluate.summarize(items, seed=cfg["seed"])


def table(results: dict) -> str:
    """What results.json says, for people."""
    system = results["outputs"] or " + ".join(filter(None, (results["model"], results["adapter"])))
    data = results["data"] or "the built-in world"
    lines = [
        f"{results['bench']}, {results['split']} split of {data}: {system}",
        f"judge: {results['judge'] or 'none'}"
        + "; official scoring is not built" * (not results["official"]),
    ]
    rows = []
    for part in ("strict", "official", "per_plan"):
        for name, row in (results[part] or {}).items():
            value, low, high = (
                number(row[key], share=part != "per_plan") for key in ("value", "low", "high")
            )
            interval = f"{low} to {high}" if row["n"] else "–"
            rows.append(
                [label(f"official {name}" if part == "official" else name), value, interval, row["n"]]
            )
    lines.append(log.table(["", "mean", "95 % interval", "plans"], rows))
    counts = results["counts"]
    stops = ", ".join(f"{name} {count}" for name, count in counts["stops"].items())
    lines.append(f"{counts['requests']} requests; ended by: {stops}")
    lines.append(
        f"failures that are not the model's: env {counts['env_errors']}, judge {counts['judge_errors']}"
    )
    return "\n".join(lines)


def label(name: str) -> str:
    """A row's name: counts are per plan."""
    return f"{name} per plan" if name in evaluate.PER_PLAN else name


def number(value: float | None, *, share: bool, sign: str = "") -> str:
    """A share in percent, a count with two decimals, a dash for what is not known."""
    return "–" if value is None else f"{100 * value:{sign}.1f} %" if share else f"{value:{sign}.2f}"


def compare(cfg: Config) -> dict:
    """Print and return the paired differences of two result folders."""
    configs, items = zip(*(read_run(folder) for folder in cfg.compare), strict=True)
    for name in ("bench", "split"):
        if configs[0][name] != configs[1][name]:
            both = f"{configs[0][name]} and {configs[1][name]}"
            raise ValueError(f"{name} differs, {both}; compare two systems on one benchmark's split")
    if configs[0]["data"] != configs[1]["data"]:
        print(f"the data folders differ: {configs[0]['data']!r} and {configs[1]['data']!r}")
    rows, differences = [], evaluate.compare(*items, seed=cfg.seed)
    for name, row in differences.items():
        share = name not in evaluate.PER_PLAN
        means = [number(row[key], share=share) for key in ("a", "b")]
        diff, low, high = (number(row[key], share=share, sign="+") for key in ("diff", "low", "high"))
        rows.append([label(name), *means, diff, f"{low} to {high}" if row["n"] else "–", row["n"]])
    print(f"A = {cfg.compare[0]}, B = {cfg.compare[1]}; paired by id, bootstrap over requests")
    for folder, of, other in ((cfg.compare[0], *items), (cfg.compare[1], *items[::-1])):
        alone = len({item["id"] for item in of} - {item["id"] for item in other})
        if alone:
            print(f"{alone} of {len(of)} requests are in {folder} alone and are left out")
    print(log.table(["", "A", "B", "B - A", "95 % interval", "pairs"], rows))
    return differences


def read_run(folder: str) -> tuple[dict, list[dict]]:
    """config.json and items of a folder that this script wrote."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; wanted a folder that eval.py wrote")
    stored = json.loads(path.read_text(encoding="utf-8"))
    if "bench" not in stored:
        raise ValueError(f"{path} is not of eval.py, it has no bench; wanted a folder that eval.py wrote")
    return stored, evaluate.read_items(folder)


def main(cfg: Config) -> dict:
    """Measure, print the table, and return what results.json holds (with --compare: the differences)."""
    check(cfg)
    if cfg.compare:
        return compare(cfg)
    if cfg.recompute:
        out, (stored, items) = Path(cfg.recompute), read_run(cfg.recompute)
    else:
        dist.init(cfg.seed)
        records = None
        if cfg.model:
            cfg, items, records = run_model(cfg)
        else:
            items = run_outputs(cfg)
        out, stored = Path(cfg.out), dataclasses.asdict(cfg)
        if dist.is_main():
            evaluate.write_lines(out / "items.jsonl", items)
            if records is not None:
                evaluate.write_lines(out / "trajectories.jsonl", records)
    results = results_of(stored, items)
    if dist.is_main():
        log.write_json(out / "results.json", results)
        print(table(results))
    return results


if __name__ == "__main__":
    try:
        main(config.parse(Config))
    except (ValueError, OSError) as error:
        raise SystemExit(f"eval.py: {error}") from None
    finally:
        dist.close()
