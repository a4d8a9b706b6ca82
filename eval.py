"""Measure planners on a benchmark: this project's models, models behind an endpoint, anybody's outputs.

    python eval.py --bench triptailor --n 64 --model assets/tiny --out runs/e       # a model, with tools
    python eval.py --bench triptailor --model NAME --adapter runs/train_grpo/adapter --data DIR --out runs/e
    torchrun --nproc_per_node 4 -- eval.py --bench triptailor --model NAME ...      # requests over four ranks
    python eval.py --bench planbench --data DIR --split blocksworld --shots 0 --trials 4 \\
        --agent http://127.0.0.1:8000/v1#MODEL --method refine --cache runs/replies  # an endpoint
    python eval.py --bench triptailor --outputs plans.jsonl --out runs/other        # {"id", "output"} a line
    python eval.py --bench triptailor --outputs runs/e/items.jsonl --best_of 8 --out runs/best   # --trials 8
    python eval.py --bench musique --split dev --options top_k=2 --model assets/agent --turns 8 \
        --critic runs/train_critic/model --protocol self:3 --trials 8       # a critic beside the model
    python eval.py --sweep runs/step1 runs/step2 runs/step3   # of runs with --protocol step:K: success by K
    python eval.py --recompute runs/e               # the table again, from the stored files alone
    python eval.py --compare runs/e runs/other      # paired differences over the requests that both have
    python eval.py --bench planbench --help         # the options of a benchmark, such as --shots

(Without the `--`, torchrun takes --n for one of its own flags.)
Writes config.json, items.jsonl (one line a trial of a request), trajectories.jsonl (ids and mask of a
model's run, messages of an agent's) and results.json, which follows from config.json and items.jsonl. A judge
is asked both orders of every plan past the gate. `official` is null for a benchmark whose own scorer is not
built. TravelPlanner's test split has no score here: its plans go to submission.jsonl, for the leaderboard.
"""

import dataclasses
import functools
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from envs import BENCHMARKS, musique_make, synplan, travelplanner, trips, triptailor_metrics
from envs.base import Env, Message
from nanoplan import advice, agents, config, dist, evaluate, log, lora, options, report, summary, weights
from nanoplan.advice_judge import label
from nanoplan.best_of import Selector, best_of, by_constraints, by_oracle, by_score
from nanoplan.chat import Chat
from nanoplan.critic import SelfCall, Writer, advised, parse_protocol, write_locally
from nanoplan.judge import Judge
from nanoplan.judge_stats import statistics
from nanoplan.judges import open_judge
from nanoplan.llm import ChatModel, EndpointError
from nanoplan.local import open_model
from nanoplan.remote import RemoteRollout, write_remotely
from nanoplan.rollout import Budget, Episode, Rollout
from nanoplan.sampler import Sampler

OPTIONS = {"triptailor": {"max_rows": 5, "hours": False}}  # other defaults than load's: train_grpo.py's
BUILT_IN = {  # benchmarks that need no data: what gives the folder of their world, made on first use
    "musique": musique_make.builtin,
    "triptailor": trips.builtin,
    "synplan_travel": lambda: None,
    "synplan_retail": lambda: None,
}
METRICS = {  # a benchmark's own rates, from stored items
    "synplan_retail": synplan.metrics,
    "synplan_travel": synplan.metrics,
    "travelplanner": travelplanner.metrics,
    "triptailor": triptailor_metrics.METRICS,
}
COMPARE = {"triptailor": triptailor_metrics.compare_runs}  # more than paired differences
LIMITS = {  # of an episode, where a flag is left at none: of a --model, as in train_grpo.py; of an --agent
    "turns": (6, 30),
    "turn_tokens": (400, 4096),
    "observation_tokens": (400, 4096),
    "total_tokens": (1200, 65536),
}
JUDGES = {"triptailor": ("rubric",)}  # where --judge is left empty
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # what a flag left at none means


@dataclass(frozen=True)
class Config:
    # what is measured: one of model, agent, outputs, recompute, compare, sweep
    bench: str = ""  # name of the benchmark, as in envs.BENCHMARKS
    data: str = ""  # the benchmark's folder; empty = the built-in world, where it has one
    split: str = "test"  # part of the benchmark
    n: int = 0  # requests, drawn by seed 0 as train_grpo.py draws its held-out ones; 0 = the whole split
    options: tuple[str, ...] = ()  # NAME=VALUE of the benchmark's load; see --bench NAME --help
    trials: int = 1  # sampled episodes per request
    model: str = ""  # HF folder or hub name
    adapter: str = ""  # LoRA adapter in PEFT's format, folder or hub name
    agent: str = ""  # http://HOST/v1#MODEL or local:FOLDER, with ?concurrency=16&price_in=2.5&price_out=10
    outputs: str = ""  # JSONL file of another system's final answers, {"id", "output"} a line
    best_of: int = 0  # of --outputs with several answers a request, such as items.jsonl: the first N compete
    select: str = "constraints"  # what chooses: constraints, oracle, or a judge, which scores each plan alone
    recompute: str = ""  # a folder of an earlier run: make results.json and the table from its files
    judge: tuple[str, ...] = ()  # rubric, http://HOST/v1#MODEL, local:FOLDER, rm:FOLDER; triptailor: rubric
    compare: tuple[str, ...] = ()  # two such folders A B: paired differences B - A
    sweep: tuple[str, ...] = ()  # such folders, each with a critic after another turn: success by turn
    out: str = "runs/eval"  # folder of the results; an earlier run there is moved aside
    # sampling
    seed: int = 0  # of sampling and of bootstrap intervals
    temperature: float | None = None  # 0 = greedy; none = 1, or the model's own
    top_p: float | None = None  # ids in the smallest set of this probability; none = 1, off
    top_k: int | None = None  # ids among the k likeliest; none = 0, off
    min_p: float | None = None  # ids at least this share of the likeliest; none = 0, off
    generation_config: bool = False  # take those left at none from the model's generation_config.json
    # a critic beside the --model or --agent: nanoplan/critic.py
    critic: str = ""  # HF folder or hub name, or http://HOST/v1#MODEL; empty = none
    critic_adapter: str = ""  # LoRA adapter of the critic
    protocol: str = "self:3"  # when it speaks: self:3, window:1-10, prob:0.3:3, step:4
    style: Literal["advise", "review", "checklist"] = "advise"  # how it is asked; the last two are baselines
    critic_tokens: int = 1024  # of one critique
    critic_total: int = 16384  # of its prompt and critique; never more than the critic has positions
    advice_judge: str = ""  # http://HOST/v1#MODEL or local:FOLDER labels the advice, beside the rules; H.2
    # an agent behind an endpoint: nanoplan/agents.py
    method: Literal["tools", "direct", "react", "reflexion", "refine", "workflow"] = "tools"  # how to ask it
    reviewer: str = ""  # second model, for reflexion and refine; empty = the agent
    rounds: int = 3  # reflexion: attempts; refine: revisions; at most
    oracle_feedback: bool = False  # reflexion is told whether an attempt failed: not a fair row of a table
    calling: Literal["native", "text"] = "native"  # tools as the API's, or described in the prompt
    cache: str = ""  # folder of paid replies, of agents and judges; empty = none
    # episode limits, tokens and turns: where left at none, those of train_grpo.py, or an agent's
    turns: int | None = None  # model turns per episode (of an agent: per attempt); none = 6, agent 30
    turn_tokens: int | None = None  # sampled tokens per turn; none = 400, agent 4096
    observation_tokens: int | None = None  # tokens of one tool result; none = 400, agent 4096
    total_tokens: int | None = None  # all tokens of an episode; none = 1200, agent 65536
    # machine
    rows: int = 64  # episodes decoded at once per rank
    workers: int = 0  # threads for tools; 0 = between steps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = float32 on a CPU, bfloat16 on a GPU


def check(cfg: Config) -> None:
    """Refuse flags that do not go together. Raises ValueError with what to change."""
    sources = ("model", "agent", "outputs", "recompute", "compare", "sweep")
    given = [f"--{name}" for name in sources if getattr(cfg, name)]
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        raise ValueError(f"{found} to measure; give one of --{', --'.join(sources)}")
    if cfg.compare and len(cfg.compare) != 2:
        raise ValueError(f"compare={' '.join(cfg.compare)}: wanted two folders")
    if given[0] in ("--model", "--agent", "--outputs"):
        if cfg.bench not in BENCHMARKS:
            raise ValueError(f"bench={cfg.bench!r} is unknown; known: {', '.join(sorted(BENCHMARKS))}")
        if not cfg.data and cfg.bench not in BUILT_IN:
            built_in = ", ".join(BUILT_IN)
            raise ValueError(f"data='': only {built_in} have built-in worlds; give the folder of {cfg.bench}")
    own = {"--model": ("adapter", "generation_config", *SAMPLING)}
    own["--agent"] = ("method", "reviewer", "oracle_feedback", "calling", "temperature")
    for source, names in own.items():
        for name in names:
            if getattr(cfg, name) != getattr(Config, name) and name not in own.get(given[0], ()):
                raise ValueError(f"{name}={getattr(cfg, name)} is for a {source}; here is {given[0]}")
    if cfg.oracle_feedback and cfg.method != "reflexion":
        raise ValueError(f"oracle_feedback is for method reflexion; here is {cfg.method}")
    if cfg.rows < 1 or cfg.workers < 0 or cfg.n < 0 or cfg.trials < 1 or cfg.rounds < 1:
        raise ValueError(
            f"rows={cfg.rows}, workers={cfg.workers}, n={cfg.n}, trials={cfg.trials}, rounds={cfg.rounds}: "
            "wanted 1, 0, 0, 1, 1 or more"
        )
    if cfg.critic and (given[0] not in ("--model", "--agent") or cfg.method != "tools"):
        raise ValueError(
            f"critic={cfg.critic} is for a --model, or for an --agent by method tools; here is {given[0]}, "
            f"method {cfg.method}"
        )
    if cfg.critic and cfg.agent.startswith("local:"):
        raise ValueError(f"agent={cfg.agent}: beside a --critic, give a model of this process as --model")
    for name in ("critic_adapter", "advice_judge"):
        if getattr(cfg, name) and not cfg.critic:
            raise ValueError(f"{name}={getattr(cfg, name)} without a --critic")
    parse_protocol(cfg.protocol)
    if cfg.best_of < 0 or (given[0] != "--outputs" and (cfg.best_of or cfg.select != Config.select)):
        raise ValueError(f"best_of={cfg.best_of}, select={cfg.select}: wanted 1 or more, for --outputs alone")
    if cfg.trials > 1 and (cfg.temperature == 0 or given[0] not in ("--model", "--agent")):
        raise ValueError(f"trials={cfg.trials}: only a sampled --model or --agent gives several answers")


def load_requests(cfg: Config, *, n: int | None) -> list[Env]:
    """Environments of the split: n drawn ones, or all in the order of the file."""
    load, data = BENCHMARKS[cfg.bench].load, Path(cfg.data) if cfg.data else BUILT_IN[cfg.bench]()
    own = OPTIONS.get(cfg.bench, {}) | options.read(load, cfg.options, bench=cfg.bench)
    envs = load(cfg.split, data, n=n, seed=0, **own)
    if not envs:
        raise ValueError(f"split={cfg.split}: {data} has no request in it; choose another split")
    return envs


def judges_of(cfg: Config, envs: list[Env]) -> tuple[Config, list[Judge]]:
    """cfg with the judges that are in force, and these; none where no request has a plan to compare with.

    raises  ValueError for two judges of one name, and where requests that all lack such a plan were to be
            judged; EndpointError for a judge that can't be reached
    """
    names = cfg.judge or JUDGES.get(cfg.bench, ())
    missing = [reason for env in envs if (reason := evaluate.no_reference(env))] if names else []
    if missing:
        note = f"{len(missing)} of {len(envs)} requests have no reference plan: {missing[0]}"
        if len(missing) == len(envs):
            if cfg.judge:
                raise ValueError(note)
            names = ()
        if dist.is_main():
            print(f"no win rate for {note}")
    judges = [open_judge(name, cache=cfg.cache or None, device=dist.device()) for name in names]
    if len({judge.name for judge in judges}) < len(judges):
        raise ValueError(f"judge={' '.join(names)}: two of one name; add ?name=... to one of them")
    for judge in judges:
        if hasattr(judge, "probe"):
            judge.probe()
    return dataclasses.replace(cfg, judge=tuple(names)), judges


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


def limits_of(cfg: Config) -> Config:
    """cfg with the episode limits that are in force."""
    which = 1 if cfg.agent else 0
    values = {name: getattr(cfg, name) for name in LIMITS}
    values = {name: LIMITS[name][which] if value is None else value for name, value in values.items()}
    return dataclasses.replace(cfg, **values)


def budget_of(cfg: Config) -> Budget:
    return Budget(cfg.turns, cfg.turn_tokens, cfg.observation_tokens, cfg.total_tokens)


def run_model(cfg: Config) -> tuple[Config, list[dict], list[dict]]:
    """The effective config, and items and trajectories of all requests, on every rank."""
    device = dist.device()
    chat, model = weights.load_policy(cfg.model, dtype=weights.dtype_named(cfg.dtype, device), device=device)
    if cfg.adapter:
        lora.load_adapter(model, weights.fetch(cfg.adapter))
    cfg = sampling_of(limits_of(cfg), chat)
    if cfg.trials > 1 and cfg.temperature == 0:
        raise ValueError(f"trials={cfg.trials} at temperature 0 are the same answer; raise it or take 1")
    envs = load_requests(cfg, n=cfg.n or None)
    cfg, judges = judges_of(cfg, envs)
    evaluate.check_room(chat, model, envs[0], total_tokens=cfg.total_tokens)
    share = len(range(dist.rank(), len(envs), dist.world())) * cfg.trials
    filters = {name: getattr(cfg, name) for name in SAMPLING}
    sampler = Sampler(
        model, rows=max(1, min(cfg.rows, share)), max_len=cfg.total_tokens, training=False, **filters
    )
    rollout = evaluate.TimedRollout(sampler, chat, budget_of(cfg), workers=cfg.workers)
    open_out(cfg)
    started, seconds = time.perf_counter(), {}
    with tqdm(total=share, unit="plan", disable=None if dist.is_main() else True) as bar:

        def done(episode) -> None:
            seconds[episode] = rollout.seconds(episode)
            bar.update()

        if cfg.critic:
            episodes, said = play_advised(cfg, rollout, envs)
        else:
            groups = evaluate.play(rollout, envs, seed=cfg.seed, trials=cfg.trials, progress=done)
            episodes, said = [episode for group in groups for episode in group], []
    spent = time.perf_counter() - started
    items = score(episodes, judges, cfg)
    add_notes(items, said)
    records = []
    for item, episode in zip(items, episodes, strict=True):
        item |= {"trial": episode.member, "seconds": seconds.get(episode)}
        trajectory = episode.trajectory
        row = {"id": episode.env.task.id, "trial": episode.member, "stop": trajectory.stop}
        row |= {"text": chat.decode(trajectory.ids), "ids": trajectory.ids}
        records.append(row | {"sampled": [int(sampled) for sampled in trajectory.sampled]})
    items, records = (merged(rows, cfg.trials, total=len(envs)) for rows in (items, records))
    if dist.is_main():
        tokens = sum(item["tokens_sampled"] for item in items)
        speed = tokens / max(1e-9, spent)
        print(f"{len(items)} plans in {spent:.1f} s, {speed:.0f} sampled tokens a second")
    return cfg, items, records


def add_notes(items: list[dict], said: list[dict]) -> None:
    """What a critic said, into the items of the same episodes; nothing was said without one."""
    for item, spoken in zip(items, said, strict=bool(said)):
        item["notes"] = spoken["notes"]


def play_advised(
    cfg: Config, rollout: Rollout | RemoteRollout, envs: list[Env]
) -> tuple[list[Episode], list[dict]]:
    """As evaluate.play, flat, with the critic beside the agent; and what it said: advice.items_of."""
    mine = [(env.fork(), trial) for env in envs[dist.rank() :: dist.world()] for trial in range(cfg.trials)]
    trials = [trial for _, trial in mine]
    seeds = [evaluate.trial_seed(cfg.seed, env.task.id, trial) for env, trial in mine]
    episodes, notes = advised(
        rollout, writer_of(cfg), [env for env, _ in mine], parse_protocol(cfg.protocol), seeds=seeds,
        style=cfg.style,
    )  # fmt: skip
    said = advice.items_of(episodes, notes, trials=trials)
    for episode, trial in zip(episodes, trials, strict=True):
        episode.member = trial
        if isinstance(episode.env, SelfCall):
            episode.env = episode.env.env
    return episodes, said


def writer_of(cfg: Config) -> Writer:
    """The critic as critic.advised calls it."""
    if cfg.critic.startswith(("http://", "https://")):
        endpoint = open_model(cfg.critic, cache=cfg.cache or None)
        endpoint.probe()
        return functools.partial(write_remotely, endpoint, max_tokens=cfg.critic_tokens)
    device = dist.device()
    dtype = weights.dtype_named(cfg.dtype, device)
    chat, model = weights.load_policy(cfg.critic, dtype=dtype, device=device)
    if cfg.critic_adapter:
        lora.load_adapter(model, weights.fetch(cfg.critic_adapter))
    most = min(cfg.critic_total, model.config.max_positions)
    sampler = Sampler(model, rows=cfg.rows, max_len=most)
    return functools.partial(write_locally, Rollout(sampler, chat, Budget(1, cfg.critic_tokens, 1, most)))


def merged(rows: list, trials: int, *, total: int) -> list:
    """Rows of all ranks, by request and trial; a rank's rows are those of its requests."""
    groups = [rows[i : i + trials] for i in range(0, len(rows), trials)]
    return [row for group in evaluate.in_order(groups, total=total) for row in group]


def run_agent(cfg: Config) -> tuple[Config, list[dict], list[dict]]:
    """The effective config, and items and talks of all requests, by a model that can only be asked."""
    if dist.world() > 1:
        raise ValueError(f"{dist.world()} processes: one asks an --agent; run it without torchrun")
    cfg = limits_of(cfg)
    cfg = dataclasses.replace(cfg, temperature=1.0 if cfg.temperature is None else cfg.temperature)
    cache, device = cfg.cache or None, dist.device()
    endpoint = open_model(cfg.agent, cache=cache, device=device)
    reviewer = open_model(cfg.reviewer, cache=cache, device=device) if cfg.reviewer else None
    for model in filter(None, (endpoint, reviewer)):
        model.probe()
    setup = agents.Setup(
        endpoint, budget_of(cfg), reviewer, cfg.temperature, cfg.calling, cfg.rounds, cfg.oracle_feedback
    )
    envs = load_requests(cfg, n=cfg.n or None)
    cfg, judges = judges_of(cfg, envs)
    open_out(cfg)
    if cfg.critic:
        return cfg, *run_agent_advised(cfg, endpoint, envs, judges)

    def seed_of(id: str, trial: int) -> int:
        return evaluate.trial_seed(cfg.seed, id, trial)

    with tqdm(total=len(envs) * cfg.trials, unit="plan", disable=None) as bar:
        runs = agents.play(
            setup, cfg.method, envs, trials=cfg.trials, seed_of=seed_of, progress=lambda run: bar.update(),
            workers=getattr(endpoint, "concurrency", 1),
        )  # fmt: skip
    items = [item | run.counts() for item, run in zip(score(runs, judges, cfg), runs, strict=True)]
    return cfg, items, [record_of(run, run.trial, run.talks) for run in runs]


def run_agent_advised(
    cfg: Config, endpoint: ChatModel, envs: list[Env], judges: list[Judge]
) -> tuple[list[dict], list[dict]]:
    """Items and talks of an agent behind an endpoint with a critic beside it. The server's tokens are known
    of all episodes together, so items have none."""
    rollout = RemoteRollout(endpoint, budget_of(cfg), temperature=cfg.temperature)
    episodes, said = play_advised(cfg, rollout, envs)
    items = score(episodes, judges, cfg)
    add_notes(items, said)
    for item, episode in zip(items, episodes, strict=True):
        item |= {"trial": episode.member, "tokens_sampled": None, "tokens_observed": None}
    usage = endpoint.usage
    print(
        f"the agent: {usage['calls']:.0f} queries, {usage['prompt_tokens']:.0f} tokens read, "
        f"{usage['completion_tokens']:.0f} written, {usage['usd']:.2f} US dollars"
    )
    return items, [record_of(episode, episode.member, [episode.history]) for episode in episodes]


def record_of(run: agents.Run | Episode, trial: int, talks: list[list[Message]]) -> dict:
    """A line of trajectories.jsonl for an agent that has only messages."""
    record = {"id": run.env.task.id, "trial": trial, "stop": run.trajectory.stop}
    return record | {"talks": [[dataclasses.asdict(message) for message in talk] for talk in talks]}


def score(episodes: list, judges: list[Judge], cfg: Config) -> list[dict]:
    """Items; of a split that only a leaderboard scores, only what the system answered."""
    if not leaderboard_only(cfg):
        return evaluate.score_for_report(episodes, judges)
    return [
        {"id": e.env.task.id, "output": e.env.answer_text, "stop": e.trajectory.stop, "tokens_sampled": 0}
        for e in episodes
    ]


def leaderboard_only(cfg: Config) -> bool:
    return cfg.bench == "travelplanner" and cfg.split == "test"


def run_outputs(cfg: Config) -> tuple[Config, list[dict]]:
    """The effective config, and items of the requests by the answers in a file."""
    if leaderboard_only(cfg):
        raise ValueError("split=test: only TravelPlanner's leaderboard scores it; choose another split")
    every = load_requests(cfg, n=None)
    known = [env.task.id for env in every]
    read = evaluate.read_candidates if cfg.best_of else evaluate.read_outputs
    outputs = read(cfg.outputs, known=known)
    envs = load_requests(cfg, n=cfg.n) if cfg.n else every
    missing = [env.task.id for env in envs if env.task.id not in outputs]
    if missing:
        print(f"no output for {len(missing)} of {len(envs)} requests ({missing[0]} ...); they fail")
    unused = len(outputs) - (len(envs) - len(missing))
    if unused:
        print(f"{unused} outputs are not among the {len(envs)} requests and are not scored")
    cfg, judges = judges_of(cfg, envs)
    if cfg.best_of:
        outputs = best_of(envs, outputs, num=cfg.best_of, select=selector_of(cfg, judges))
    open_out(cfg)
    return cfg, evaluate.score_outputs(envs, outputs, judges)


def selector_of(cfg: Config, judges: list[Judge]) -> Selector:
    """What --select names."""
    if cfg.select == "constraints":
        return by_constraints
    if cfg.select == "oracle":
        return by_oracle(judges)
    judge = open_judge(cfg.select, cache=cfg.cache or None, device=dist.device())
    if hasattr(judge, "probe"):
        judge.probe()
    return by_score(judge, on_error=lambda text: print(f"not ranked: {text}"))


def open_out(cfg: Config) -> None:
    """Make the results' folder before anything long begins; an earlier one there is moved aside."""
    if dist.is_main():
        log.move_aside(Path(cfg.out))
        config.save(cfg, cfg.out)


def results_of(cfg: dict, items: list[dict]) -> dict:
    """results.json: a function of config.json and items.jsonl."""
    judged = any(item["win"] is not None or item["outcome"] == "error" for item in items)
    names = "bench split data options model adapter agent method outputs best_of select".split()
    names += SAMPLING
    about = {name: cfg.get(name, "") for name in names}
    about["options"] = list(about["options"])
    about["judge"] = ", ".join(cfg.get("judge", ["rubric"])) if judged else None
    found = METRICS[cfg["bench"]](items) if cfg["bench"] in METRICS else {}
    said = advice.tables(advice.of_eval(items)) if any("notes" in item for item in items) else None
    more = {"metrics": found, "judges": statistics(items), "advice": said}
    return about | summary.summarize(items, seed=cfg["seed"]) | more


def compare(cfg: Config) -> dict:
    """Print and return the paired differences of two result folders."""
    configs, items = zip(*(read_run(folder) for folder in cfg.compare), strict=True)
    for name in ("bench", "split"):
        if configs[0][name] != configs[1][name]:
            both = f"{configs[0][name]} and {configs[1][name]}"
            raise ValueError(f"{name} differs, {both}; compare two systems on one benchmark's split")
    if configs[0]["data"] != configs[1]["data"]:
        print(f"the data folders differ: {configs[0]['data']!r} and {configs[1]['data']!r}")
    differences = summary.compare(*items, seed=cfg.seed)
    text = report.comparison(differences, names=cfg.compare)
    head, _, body = text.partition("\n")
    print(head)
    for folder, of, other in ((cfg.compare[0], *items), (cfg.compare[1], *items[::-1])):
        alone = len({item["id"] for item in of} - {item["id"] for item in other})
        if alone:
            print(f"{alone} of {len(of)} requests are in {folder} alone and are left out")
    print(body)
    if configs[0]["bench"] in COMPARE:
        print(report.transitions(COMPARE[configs[0]["bench"]](*items, seed=cfg.seed)))
    for name, of, other in ((cfg.compare[0], *items), (cfg.compare[1], *items[::-1])):
        if any(item.get("notes") for item in of):
            found = advice.feedback_rates(advice.of_eval(of), advice.of_eval(other))
            print(f"tasks advised in {name}: solved {found['with']:.3f}, in the other {found['without']:.3f}")
    return differences


def sweep(cfg: Config) -> list[dict]:
    """Print and return success by the critic's turn, of result folders: Caddie's Table 7."""
    by_step, first = {}, None
    for folder in cfg.sweep:
        stored, items = read_run(folder)
        kind, _, step = (stored.get("protocol", "") if stored.get("critic") else "").partition(":")
        if kind != "step" or int(step) in by_step:
            raise ValueError(
                f"sweep={folder}: wanted runs with a --critic and each another --protocol step:K"
            )
        by_step[int(step)], first = advice.of_eval(items), first or stored
        for name in ("bench", "split", "data", "n", "trials", "model", "agent", "critic"):
            if stored[name] != first[name]:
                raise ValueError(f"sweep={folder}: {name}={stored[name]}, of the first {first[name]}")
    rows = advice.sweep_table(by_step)
    print(advice.as_table(rows))
    return rows


def read_run(folder: str) -> tuple[dict, list[dict]]:
    """config.json and items of a folder that this script wrote."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; wanted a folder that eval.py wrote")
    stored = json.loads(path.read_text(encoding="utf-8"))
    if "bench" not in stored:
        raise ValueError(f"{path} is not of eval.py, it has no bench; wanted a folder that eval.py wrote")
    return stored, evaluate.read_items(folder)


def main(cfg: Config) -> dict | list[dict]:
    """Measure, print the table, and return what results.json holds (--compare: the differences, --sweep: the
    table's rows)."""
    check(cfg)
    if cfg.compare:
        return compare(cfg)
    if cfg.sweep:
        return sweep(cfg)
    if cfg.recompute:
        out, (stored, items) = Path(cfg.recompute), read_run(cfg.recompute)
    else:
        dist.init(cfg.seed)
        records, labeller = None, None
        if cfg.advice_judge and dist.is_main():
            labeller = open_model(cfg.advice_judge, cache=cfg.cache or None, device=dist.device())
            labeller.probe()
        if cfg.outputs:
            cfg, items = run_outputs(cfg)
        else:
            cfg, items, records = run_model(cfg) if cfg.model else run_agent(cfg)
        out, stored = Path(cfg.out), dataclasses.asdict(cfg)
        if dist.is_main():
            if labeller is not None:
                for error in label(items, labeller)[:1]:
                    print(f"some advice has no label: {error}")
            config.save(cfg, out)  # with what was in force
            evaluate.write_lines(out / "items.jsonl", items)
            if records is not None:
                evaluate.write_lines(out / "trajectories.jsonl", records)
        if leaderboard_only(cfg):
            return submit(cfg, items)
    results = results_of(stored, items)
    if dist.is_main():
        log.write_json(out / "results.json", results)
        print(report.table(results))
        if results["advice"] is not None:
            print(advice.report(advice.of_eval(items)))
    return results


def submit(cfg: Config, items: list[dict]) -> dict:
    """Write the plans as the leaderboard takes them; there is nothing to score here."""
    answers = {item["id"]: item["output"] for item in items}
    envs = [env for env in load_requests(cfg, n=None) if env.task.id in answers]
    rows = travelplanner.submission(envs, [answers[env.task.id] for env in envs])
    delivered = sum(bool(row["plan"]) for row in rows)
    if dist.is_main():
        evaluate.write_lines(Path(cfg.out) / "submission.jsonl", rows)
        print(
            f"{delivered} of {len(rows)} answers hold a plan; for the leaderboard: {cfg.out}/submission.jsonl"
        )
    return {"requests": len(rows), "delivered": delivered}


def parse(argv: list[str]) -> Config:
    """Config from flags, those of the benchmark's own options included; --help tells those too."""
    bench = next((b for a, b in itertools.pairwise(argv) if a == "--bench"), "")
    if bench not in BENCHMARKS:
        return config.parse(Config, argv)
    load = BENCHMARKS[bench].load
    if "--help" in argv or "-h" in argv:
        print(options.help_text(load, bench=bench), end="\n\n")
    return config.parse(Config, options.gather(argv, Config.__dataclass_fields__, load))


if __name__ == "__main__":
    try:
        main(parse(sys.argv[1:]))
    except (ValueError, OSError, EndpointError) as error:
        raise SystemExit(f"eval.py: {error}") from None
    finally:
        dist.close()
