"""SynPlan-R: verified preference pairs for CM-DPO, made of a flawed plan and its smallest correction.

    python -m nanoplan.synth --domain travel --size tiny --n 3000 --out runs/synth       # no model at all
    python -m nanoplan.synth --draft URL#MODEL --teacher URL#MODEL --query local:FOLDER ...
    python -m nanoplan.synth --do graph | tau | stats | contamination | audit | grade    # tables 7 8 2 10 9 9

Per instance: a query, a draft, its correction, both verified; kept if the correction passes and the draft
does not. Everything else is counted by reason and kept in rejects.jsonl. A killed run goes on where it was
when it is started again; replies of models are stored before they are used, so that none is paid for twice.

A pair is one line of pairs.jsonl, an object with everything that is needed to check it again:

    id                "travel/tiny/train/17": domain, size, split, number of the instance
    profile           the constraint profile: hard constraints, preferences, weights
    knowledge         the instance's database: entities and, for travel, minutes between cities
    messages          the prompt of both members, [{"role", "content"}, ...]: system text, user's query
    chosen, rejected  completions, each one "<plan>{...}</plan>"; no reasoning (stage 2 trains on plans only)
    sft               "<rationale>...</rationale>\\n<plan>...</plan>": completion of the warm start; its plan
                      is `chosen`
    verdict_chosen, verdict_rejected
                      {constraint: {"passed", "raw", "unit", "tau", "normalised", "weight"}}
    soft_chosen, soft_rejected      preference scores in [0, 1]
    severity          of `rejected`: {"normalised": sum of weight x normalised, at most 1, "raw": sum of
                      weight x raw in mixed units, "unit": 1.0}
    edit              {"teacher", "changed": items that differ, "proved": whether no smaller edit exists,
                      "tokens": token distance of the two plans, "seconds"}
    query, draft      who wrote the user's query and the rejected plan
    spent             {"prompt_tokens", "completion_tokens", "usd"} of all replies that went into it
"""

import functools
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Literal

from envs import synplan
from envs.synplan_teacher import minimal_edit
from envs.synplan_verify import Instance, Report, from_record, read_plan, write_plan
from nanoplan import config, dist, log, synth_audit
from nanoplan.llm import ChatModel, EndpointError, Reply, to_openai
from nanoplan.local import open_model

INVERSE = (  # appendix 13.2
    "You are generating a realistic user query. The user has constraints {summary}, but you MUST NOT state "
    "numbers explicitly. Generate a 1-3 sentence query that implies them naturally. Output only the query."
)
RTMED = (  # appendix 13.3
    "You are a constraint correction expert. Output: <rationale>...your written explanation of which "
    "constraint is violated and which SPECIFIC items in the draft cause the violation...</rationale> "
    "followed by a CORRECTED <plan>...</plan> JSON block. CRITICAL: change ONLY entities responsible for the "
    "violation. Keep all other text identical. Do NOT rewrite the plan from scratch."
)
REWRITE = (  # the ablation; its prompt is not in our copy of the paper
    "You are an expert planner. The draft below violates a constraint. Output: <rationale>...which "
    "constraint is violated...</rationale> followed by a complete new <plan>...</plan> JSON block of your "
    "own that satisfies every hard constraint and honours the preferences."
)
QUERY_TRIES = 4  # replies that are asked for until one names no number
MAX_QUERY_CHARS = 600  # of a user's query; ours
GIVE_UP = 20  # instances in a row without a reply, after which a run stops
NUMBER = re.compile(r"\d|\b(?:hundred|thousand|grand)\b", re.I)


@dataclass(slots=True)
class Makers:
    """Who makes what. None: the template, the scripted planner, the exact search."""

    query: ChatModel | None = None
    draft: ChatModel | None = None
    teacher: ChatModel | None = None
    rewrite: bool = False  # whole new plans in place of minimal edits: the paper's ablation
    limit_s: float = 10.0  # of one exact search
    temperature: float = 1.0  # of models
    max_tokens: int = 4096  # of a model's plan
    encode: Callable[[str], list] = synth_audit.words  # text -> tokens, for the token distance


class _Rejected(Exception):
    """Why an instance gives no pair: its name, and details."""

    def __init__(self, reason: str, text: str = ""):
        super().__init__(reason)
        self.reason, self.text = reason, text


def make_pairs(
    domain: str, num_pairs: int, *, size: str = "paper", split: str = "train", seed: int = 0, **how
) -> tuple[list[dict], Counter]:
    """That many pairs in this process, without files; with no other argument by scripts and search alone.

    seed     of drafts and queries; instances come from their numbers
    how      fields of Makers
    returns  (records, reason -> instances that gave no pair)
    """
    makers, records, reasons = Makers(**how), [], Counter()
    for number in count():
        if len(records) >= num_pairs:
            break
        line = make(domain, number, size=size, split=split, seed=seed, makers=makers)
        if "reason" in line:
            reasons[line["reason"]] += 1
        else:
            records.append(line)
    return records, reasons


def make(
    domain: str, number: int, *, size: str, split: str, seed: int, makers: Makers, tau: dict | None = None
) -> dict:
    """The pair of an instance, or {"id", "reason", "text", ...} where there is none.

    raises  EndpointError where a model gives no reply
    """
    instance = synplan.generate(domain, number, size=size, split=split)
    instance = replace(instance, tau=(tau or {}).get(domain, {}))
    spent = {"prompt_tokens": 0, "completion_tokens": 0, "usd": 0.0}
    line = {"id": instance.id, "query": "template", "draft": "script"}
    try:
        if makers.query is not None:
            instance = replace(instance, query=_ask_query(instance, makers, seed, spent))
            line["query"] = makers.query.model
        rng = random.Random(f"{instance.id}/{seed}")
        rejected = _draft(instance, makers, seed, rng, spent)
        if makers.draft is not None:
            line["draft"] = makers.draft.model
        line["rejected"] = rejected
        return _pair(instance, rejected, makers, seed, rng, spent) | {**line, "spent": spent}
    except _Rejected as why:
        return {**line, "reason": why.reason, "text": why.text, "spent": spent}


def _pair(instance: Instance, rejected: str, makers: Makers, seed: int, rng, spent: dict) -> dict:
    """The record but for who made it. Raises _Rejected."""
    report = synplan.verify(instance, rejected)
    if not report.decoded:
        raise _Rejected("draft: decode failure", report.findings["decode"].reason)
    if report.passed:
        raise _Rejected("draft: feasible")
    started = time.monotonic()
    if makers.teacher is None:
        chosen, rationale, edit = _scripted(instance, rejected, report, makers, rng)
    else:
        chosen, rationale, edit = _taught(instance, rejected, makers, seed, spent)
    good = synplan.verify(instance, chosen)
    if not good.decoded:
        raise _Rejected("edit: decode failure", good.findings["decode"].reason)
    if not good.passed:
        raise _Rejected("edit: infeasible", "; ".join(good.verdict().reasons))
    distance = synth_audit.token_distance(makers.encode(chosen), makers.encode(rejected))
    messages = [{"role": m.role, "content": m.content} for m in synplan.messages(instance)]
    return instance.record() | {
        "messages": messages,
        "chosen": chosen,
        "sft": f"<rationale>{rationale}</rationale>\n{chosen}",
        "verdict_chosen": good.record(),
        "verdict_rejected": report.record(),
        "soft_chosen": good.soft,
        "soft_rejected": report.soft,
        "severity": report.severity(),
        "edit": edit | {"tokens": distance, "seconds": time.monotonic() - started},
    }


def _ask(model: ChatModel, messages: list[dict], makers: Makers, spent: dict, **how) -> Reply:
    reply = model.chat(messages, temperature=makers.temperature, **how)
    price_in, price_out = getattr(model, "prices", (0.0, 0.0))  # USD per token; of an endpoint
    spent["prompt_tokens"] += reply.prompt_tokens
    spent["completion_tokens"] += reply.completion_tokens
    spent["usd"] += price_in * reply.prompt_tokens + price_out * reply.completion_tokens
    return reply


def _ask_query(instance: Instance, makers: Makers, seed: int, spent: dict) -> str:
    """A query under the paper's prompt that gives no number away."""
    hard = {
        name: value for name, value in instance.record()["profile"].items() if value and name != "weights"
    }
    messages = [{"role": "user", "content": INVERSE.format(summary=json.dumps(hard))}]
    for attempt in range(QUERY_TRIES):
        how = {"max_tokens": 256, "seed": QUERY_TRIES * seed + attempt}
        text = _ask(makers.query, messages, makers, spent, **how).text.rpartition("</think>")[2].strip()
        if text and len(text) <= MAX_QUERY_CHARS and not NUMBER.search(text):
            return text
    raise _Rejected("query: states a number, or is empty or long", text[:200])


def _draft(instance: Instance, makers: Makers, seed: int, rng, spent: dict) -> str:
    if makers.draft is None:
        return write_plan(synplan.WORLDS[instance.domain].draft(instance, rng), compact=instance.compact)
    prompt = to_openai(synplan.messages(instance))
    text = _ask(makers.draft, prompt, makers, spent, max_tokens=makers.max_tokens, seed=seed).text
    return plan_block(text)


def plan_block(text: str) -> str:
    """The <plan> block of a reply as it was written, or the whole reply where there is no single one."""
    found = re.findall(r"<plan>.*?</plan>", text.rpartition("</think>")[2], re.S)
    return found[0] if len(found) == 1 else text


def _scripted(
    instance: Instance, rejected: str, report: Report, makers: Makers, rng
) -> tuple[str, str, dict]:
    """The exact teacher's correction, or, for the ablation, a plan of another hand."""
    draft = read_plan(instance.domain, rejected)
    told = "; ".join(finding.reason for finding in report.findings.values() if not finding.passed)
    if makers.rewrite:
        plan = synplan.rewrite(instance, draft, rng)
        if plan is None:
            raise _Rejected("edit: none found", "no careless plan passed")
        chosen = write_plan(plan, compact=not instance.compact)
        changed = len(plan["items"])
        return (
            chosen,
            f"The plan {told}. Plan anew.",
            {"teacher": "script", "changed": changed, "proved": False},
        )
    found = minimal_edit(instance, draft, limit_s=makers.limit_s)
    if found.plan is None:
        raise _Rejected("edit: none exists" if found.proved else "edit: search out of time")
    swaps = [f"change {a} to {b}" if a else f"add {b}" for a, b in found.changed]
    chosen = write_plan(found.plan, compact=instance.compact)
    edit = {"teacher": "exact", "changed": len(found.changed), "proved": found.proved}
    return chosen, f"The plan {told}. So {' and '.join(swaps)}.", edit


def _taught(
    instance: Instance, rejected: str, makers: Makers, seed: int, spent: dict
) -> tuple[str, str, dict]:
    """A model's correction, asked for once: what does not decode or pass is left out, never repaired."""
    system, user = synplan.messages(instance)
    task = f"{system.content}\n\n=== USER QUERY ===\n{user.content}\n\n=== DRAFT ===\n{rejected}"
    rules = REWRITE if makers.rewrite else RTMED
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": task}]
    how = {"max_tokens": makers.max_tokens, "seed": seed}
    text = _ask(makers.teacher, messages, makers, spent, **how).text.rpartition("</think>")[2]
    rationale = re.findall(r"<rationale>(.*?)</rationale>", text, re.S)
    if len(rationale) != 1 or not rationale[0].strip():
        raise _Rejected("edit: no rationale", text[:200])
    chosen = plan_block(text)
    edit = {"teacher": makers.teacher.model, "changed": changed_items(instance.domain, rejected, chosen)}
    return chosen, rationale[0].strip(), edit | {"proved": False}


def changed_items(domain: str, before: str, after: str) -> int:
    """Items of `after` that `before` does not hold, or the other way round, whichever are more; 0 where one
    of them is no plan."""
    try:
        sides = [
            Counter(json.dumps(i, sort_keys=True) for i in read_plan(domain, t)["items"])
            for t in (before, after)
        ]
    except ValueError:
        return 0
    return max((sides[0] - sides[1]).total(), (sides[1] - sides[0]).total())


def check(record: dict) -> str:
    """Why a pair must not be trained on, judged anew from its own profile and database; "" if it may."""
    for key in ("id", "messages", "chosen", "rejected", "profile", "knowledge"):
        if not record.get(key):
            return f"no {key}"
    if record.get("messages_rejected", record["messages"]) != record["messages"]:
        return "unequal prompts"
    try:
        instance = from_record(record)
    except ValueError:
        return "no instance in the record"
    chosen, rejected = (synplan.verify(instance, str(record[side])) for side in ("chosen", "rejected"))
    if not chosen.decoded or not rejected.decoded:
        return "chosen: decode failure" if not chosen.decoded else "rejected: decode failure"
    if not chosen.passed:
        return "chosen: infeasible"
    if rejected.passed:
        return "rejected: feasible"
    stored = {key: record.get(key) for key in ("verdict_chosen", "verdict_rejected", "severity")}
    found = {"verdict_chosen": chosen.record(), "verdict_rejected": rejected.record()}
    return "" if stored == found | {"severity": rejected.severity()} else "verdict differs"


# the command


@dataclass(frozen=True)
class Config:
    do: Literal["pairs", "graph", "tau", "stats", "contamination", "audit", "grade"] = "pairs"  # what to do
    out: str = "runs/synth"  # folder of pairs.jsonl and rejects.jsonl; a run that is there is gone on with
    domain: Literal["travel", "retail"] = "travel"  # world
    size: Literal["paper", "tiny", "small"] = "paper"  # of instances, see envs/synplan.py
    split: str = "train"  # names the stream of instances
    n: int = 14_200  # raw generations; CM-DPO, travel (retail 11,800)
    pairs: int = 0  # stop after so many pairs; 0 = all of n; CM-DPO 8,400 and 6,600
    seed: int = 0  # of drafts and queries
    query: str = "template"  # who writes the query: template, http://HOST/v1#MODEL?price_in=1, local:FOLDER
    draft: str = "script"  # who writes the draft: script, or a model as above; CM-DPO gpt-4o-mini
    teacher: str = "exact"  # who corrects it: exact, or a model as above; CM-DPO o3-mini
    rewrite: bool = False  # whole new plans in place of minimal edits; CM-DPO's ablation Full Rewrite
    limit_s: float = 10.0  # seconds of one exact search
    temperature: float = 1.0  # of models
    max_tokens: int = 4096  # of a model's plan
    workers: int = 2  # instances at once: processes, or threads where a model is asked
    tau: str = ""  # JSON file of --do tau with severity constants; empty = Table 8
    tokenizer: str = ""  # HF folder whose tokens the distance counts; empty = words and marks
    against: tuple[str, ...] = ()  # contamination: files or folders of benchmark texts
    audit_n: int = 300  # audit: pairs to label; CM-DPO 300


def models_of(cfg: Config) -> Makers:
    """The makers of a run. Raises ValueError for a name that is none, EndpointError within seconds for an
    endpoint that can't be reached."""
    made: dict[str, ChatModel | None] = {}
    for maker, script in (("query", "template"), ("draft", "script"), ("teacher", "exact")):
        name = getattr(cfg, maker)
        made[maker] = None
        if name != script:
            made[maker] = open_model(name, cache=Path(cfg.out) / "replies", device=dist.device())
            made[maker].probe()
    encode = synth_audit.tokenizer(cfg.tokenizer) if cfg.tokenizer else synth_audit.words
    how = {name: getattr(cfg, name) for name in ("rewrite", "limit_s", "temperature", "max_tokens")}
    return Makers(**made, encode=encode, **how)


def make_all(cfg: Config) -> dict:
    """Write pairs.jsonl, rejects.jsonl and summary.json into the folder, and return the summary.

    raises  ValueError where an earlier run there had other settings; EndpointError after GIVE_UP instances in
            a row without a reply (what was made is stored; start again to go on)
    """
    out = Path(cfg.out)
    if (out / "config.json").is_file():
        config.check_resume(cfg, out, allow={"do", "workers", "n", "pairs", "against", "audit_n", "limit_s"})
    config.save(cfg, out)
    done = {name: _stored_lines(out / f"{name}.jsonl") for name in ("pairs", "rejects")}
    known = {line["id"] for lines in done.values() for line in lines}
    target = cfg.pairs or cfg.n
    have, silent, unanswered = len(done["pairs"]), 0, 0
    todo = (i for i in range(cfg.n) if f"{cfg.domain}/{cfg.size}/{cfg.split}/{i}" not in known)
    with open(out / "pairs.jsonl", "a") as pairs, open(out / "rejects.jsonl", "a") as rejects:
        for line in _lines(cfg, todo if have < target else iter(())):
            if isinstance(line, str):
                unanswered, silent = unanswered + 1, silent + 1
                if silent >= GIVE_UP:
                    raise EndpointError(f"{silent} instances in a row without a reply; the last: {line}")
                continue
            silent = 0
            file = rejects if "reason" in line else pairs
            file.write(log.to_json(line) + "\n")
            file.flush()
            have += "reason" not in line
            if have >= target:
                break
    lines = [line for name in done for line in _stored_lines(out / f"{name}.jsonl")]
    summary = synth_audit.summary(lines) | {"unanswered": unanswered}
    log.write_json(out / "summary.json", summary)
    return summary


def _lines(cfg: Config, numbers: Iterator[int]) -> Iterator[dict | str]:
    """What `make` gives for each number, in their order, several at once; the error's text where a model gave
    no reply."""
    scripted = (cfg.query, cfg.draft, cfg.teacher) == ("template", "script", "exact")
    if scripted:
        pool, job = ProcessPoolExecutor(cfg.workers), _scripted_job
        extra: tuple = (cfg,)
    else:
        pool, job, extra = ThreadPoolExecutor(cfg.workers), _job, (cfg, models_of(cfg), _read_tau(cfg.tau))
    waiting: list[Future] = []
    try:
        for number in numbers:
            waiting.append(pool.submit(job, number, *extra))
            if len(waiting) >= 4 * cfg.workers:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:
        pool.shutdown(cancel_futures=True)


def _scripted_job(number: int, cfg: Config) -> dict | str:
    return _job(number, cfg, *_own(cfg))


@functools.lru_cache(maxsize=1)
def _own(cfg: Config) -> tuple[Makers, dict]:
    """What a worker process makes once."""
    return models_of(cfg), _read_tau(cfg.tau)


def _job(number: int, cfg: Config, makers: Makers, tau: dict) -> dict | str:
    try:
        how = {"size": cfg.size, "split": cfg.split, "seed": cfg.seed, "makers": makers, "tau": tau}
        return make(cfg.domain, number, **how)
    except EndpointError as error:
        return str(error)


def _stored_lines(path: Path) -> list[dict]:
    """Lines of an earlier run; a last one that was cut off when the run was killed is removed."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _read_tau(path: str) -> dict[str, dict[str, float]]:
    """{domain: {constraint: constant}} of a file that --do tau wrote."""
    return json.loads(Path(path).read_text(encoding="utf-8"))["tau"] if path else {}


def graph_statistics(domain: str, numbers: Iterable[int], *, size: str) -> dict[str, float]:
    """Means over instances of what Table 7 counts: hard and soft constraints, entities, edges from a soft
    constraint to the entities that carry it; for retail the share of incompatible pairs of products."""
    sums, total = Counter(), 0
    for number in numbers:
        instance = synplan.generate(domain, number, size=size)
        entities, prefs = list(instance.entities.values()), instance.profile.prefs
        sums["hard"] += len(instance.hard)
        sums["soft"] += len(prefs)
        sums["entities"] += len(entities)
        sums["grounds"] += sum(pref in (*entity.tags, entity.brand) for pref in prefs for entity in entities)
        sums["conflicts"] += 2 * len(instance.conflicts) / (len(entities) * (len(entities) - 1))
        total += 1
    return {name: amount / total for name, amount in sums.items()}


def median_severities(domain: str, numbers: Iterable[int], *, size: str, draft: Callable) -> dict[str, float]:
    """constraint -> median raw severity over the drafts that break it: the constants tau_j."""
    raw: dict[str, list[float]] = {}
    for number in numbers:
        instance = synplan.generate(domain, number, size=size, split="tau")
        report = synplan.verify(instance, draft(instance))
        for name in report.broken:
            raw.setdefault(name, []).append(report.findings[name].raw)
    return {name: synth_audit.median(values) for name, values in raw.items() if name != "decode"}


def main(cfg: Config) -> dict:
    """Do what --do names, print it, and return it as data."""
    if cfg.n < 1 or cfg.workers < 1 or cfg.pairs < 0 or cfg.audit_n < 1:
        raise ValueError(
            f"n={cfg.n}, workers={cfg.workers}, pairs={cfg.pairs}, audit_n={cfg.audit_n}: too few"
        )
    out = Path(cfg.out)
    if cfg.do == "graph":
        found = {d: graph_statistics(d, range(cfg.n), size=cfg.size) for d in ("travel", "retail")}
        print(synth_audit.graph_table(found))
    elif cfg.do == "tau":
        makers = models_of(cfg)

        def draft(instance: Instance) -> str:
            return _draft(instance, makers, cfg.seed, random.Random(f"{instance.id}/{cfg.seed}"), Counter())

        numbers = range(min(cfg.n, 1000))
        tau = median_severities(cfg.domain, numbers, size=cfg.size, draft=draft)
        found = {"tau": {cfg.domain: tau}, "instances": len(numbers)}
        out.mkdir(parents=True, exist_ok=True)
        log.write_json(out / "tau.json", found)
        print(synth_audit.tau_table(tau, cfg.domain))
    elif cfg.do == "pairs":
        found = make_all(cfg)
        print(synth_audit.summary_table(found, cfg.domain))
    else:
        found = synth_audit.COMMANDS[cfg.do](cfg)
    return found


if __name__ == "__main__":
    try:
        main(config.parse(Config))
    except (ValueError, OSError, EndpointError) as error:
        raise SystemExit(f"nanoplan.synth: {error}") from None
