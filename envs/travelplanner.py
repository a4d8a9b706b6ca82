"""TravelPlanner: plan a trip of 3 to 7 days from one request, with seven search tools or from given
information, and answer with a JSON list of days.

Modes: "tools" (the official tools with JSON calls; the final answer takes the place of the Planner tool) and
"sole" (everything needed stands in the prompt). Each answer is scored three times: by the official rules
(envs/travelplanner_official.py), strictly (envs/travelplanner_strict.py), and, where it has that schema, by
CM-DPO's (envs/travelplanner_cmdpo.py). By the benchmark's rules no query of the test split is read in
structured form, prompts hold no hints of common sense, and only training queries may give rewards.
Benchmark: TravelPlanner (arXiv:2402.01622).
"""

import json
import math
from pathlib import Path
from typing import Literal

from envs.base import Env, Message, PlanView, Task, Verdict
from envs.strata import stratified
from envs.travelplanner_cmdpo import CMDPO_SCHEMA, cmdpo
from envs.travelplanner_data import (
    Database,
    Query,
    database,
    gold_plan,
    parse_query,
    read_jsonl,
    read_records,
)
from envs.travelplanner_official import COMMONSENSE, HARD, applicable, failed, official
from envs.travelplanner_plan import NO_PLAN, Trip, parse_answer, resolve, view
from envs.travelplanner_strict import strict
from envs.travelplanner_tools import TOOLS, search, table

SIZES = {  # split -> queries, and applicable hard constraints of them all: the official denominators
    "train": (45, 105),
    "validation": (180, 420),
    "test": (1000, 2290),
}
FORMAT = (
    'Answer with one JSON list and nothing else, one object per day: [{"day":1,"current_city":"from A to B" '
    'or "B","transportation":"Flight Number: F0123456, from A to B, Departure Time: HH:MM, Arrival Time: '
    'HH:MM" or "Self-driving, from A to B" or "Taxi, from A to B","breakfast":"Name, City","attraction":'
    '"Name, City;Name, City;","lunch":"Name, City","dinner":"Name, City","accommodation":"Name, City"}]. '
    '"-" means that nothing is needed.'
)
SYSTEMS = {
    "tools": f"You plan trips. First call every search you need. {FORMAT}",
    "sole": f"You plan trips from the information given. {FORMAT}",
    "cmdpo": "You plan trips from the information given. Answer with one <plan> block that holds JSON by "
    "this schema, and nothing else. db_lookup_key is a flight number, a 'Name, City', or 'taxi, from A to B' "
    f"or 'self-driving, from A to B'. Schema: {json.dumps(CMDPO_SCHEMA)}",
}


class TravelPlanner(Env):
    """One request. The database is shared with all other environments of the folder, read-only.

    query        None in the test split, whose plans only the benchmark's leaderboard can score
    information  what the sole-planning prompt holds; "" in tool mode
    gold         the human's plan of a training query, else None
    stratum      level and days, e.g. "easy 3 days"
    """

    def __init__(self, task: Task, query: Query | None, data: Database, mode: str, information="", gold=None):
        super().__init__(task, TOOLS if mode == "tools" else [])
        self.query, self.data, self.mode = query, data, mode
        self.information, self.gold = information, gold
        self.stratum = stratum(task.data)
        self.notebook: list[tuple[str, str]] = []  # (label, result)
        self.last_result = ""

    def reset(self) -> list[Message]:
        self.answer_text, self.done = "", False
        self.notebook, self.last_result = [], ""
        text = self.task.data["query"]
        if self.mode != "tools":
            text = f"Given information: {self.information}\nQuery: {text}"
        return [Message("system", SYSTEMS[self.mode]), Message("user", text)]

    def fork(self) -> "TravelPlanner":
        twin = super().fork()
        twin.notebook = list(self.notebook)
        return twin

    def call(self, name: str, arguments: dict) -> str:
        if name == "NotebookWrite":
            if not self.last_result:
                raise ValueError("nothing to write; call it right after a search")
            self.notebook.append((arguments["description"], self.last_result))
            index = len(self.notebook) - 1
            return f"The information has been recorded in Notebook, and its index is {index}."
        self.last_result = search(self.data, name, arguments)
        return self.last_result

    def structured(self) -> Query:
        """The query as data. Raises ValueError in the test split."""
        if self.query is None:
            raise ValueError(
                f"{self.task.id}: only the benchmark's leaderboard scores the test split, and its rules "
                "forbid to read its queries in structured form; use submission() or another split"
            )
        return self.query

    def trip(self) -> Trip:
        """The final answer, resolved. Raises ValueError if it holds no plan."""
        return resolve(self.structured(), parse_answer(self.answer_text), self.data)

    def verify(self) -> Verdict:
        """The strict verdict, for cmdpo mode CM-DPO's. A wish that the query does not have holds."""
        query = self.structured()
        if self.mode == "cmdpo":
            checks, severity, reasons = cmdpo(query, self.answer_text, self.data)
        else:
            _, checks, severity, reasons = _strict(query, self.answer_text, self.data)
        checks = {check: holds is not False for check, holds in checks.items()}
        return Verdict(all(checks.values()), checks, severity, reasons)

    def official(self) -> dict[str, bool | None] | None:
        """The official checks of the final answer, "delivered" and "pass"; None in cmdpo mode, whose answers
        are no plans of the benchmark's form."""
        if self.mode == "cmdpo":
            return None
        scored = score(self, self.answer_text)["official"]
        return {name: value for name, value in scored.items() if name != "reasons"}

    def facts(self) -> dict:
        """What `metrics` needs of this request beside the checks: the hard constraints that it has, and
        whether the strict reading finds a plan."""
        wanted = [check for check, has in applicable(self.structured()).items() if has]
        if self.mode == "cmdpo":
            return {"applicable": wanted}
        return {"applicable": wanted, "delivered": score(self, self.answer_text)["strict"]["delivered"]}

    def staged(self, weights: dict[str, float] | None = None) -> float:
        """The staged reward of the final answer; see staged_reward. Not for CM-DPO's schema."""
        if self.mode == "cmdpo":
            raise ValueError(
                "staged rewards need the benchmark's own plans; load with mode='tools' or 'sole'"
            )
        return staged_reward(score(self, self.answer_text)["strict"], weights=weights)

    def view(self) -> PlanView:
        query = self.structured()
        try:
            return view(resolve(query, parse_answer(self.answer_text), self.data))
        except ValueError:
            return NO_PLAN

    def reference_view(self) -> PlanView:
        query = self.structured()
        if self.gold is None:
            raise ValueError(f"{self.task.id}: no human plan, only the train split has them")
        return view(resolve(query, self.gold, self.data))


def _strict(query: Query, answer, data: Database) -> tuple[bool, dict, dict, list[str]]:
    """(delivered, checks, severity, reasons); what is no plan fails every check with severity 1."""
    try:
        trip = resolve(query, parse_answer(answer), data)
    except ValueError as error:
        checks = failed(query)
        return False, checks, {c: float(holds is False) for c, holds in checks.items()}, [f"no plan: {error}"]
    return True, *strict(trip, data)


def score(env: TravelPlanner, output) -> dict[str, dict]:
    """Every score of one answer, any system's.

    output   the answer's text; a list of days; {"plan": list}; None or whatever else is no plan. For the
             third score, text with a <plan> block or an object with "items"
    returns  {"official": ..., "strict": ..., "cmdpo": ...}, each {check: True, False, or None where the
             query has no such wish, ..., "pass": bool, "reasons": [...]}; the first two also say
             "delivered": there is a plan (strict: of days with every cell). Beside them "severity", of
             strict, and "cmdpo_severity"
    raises   ValueError for queries of the test split
    """
    query, data = env.structured(), env.data
    try:
        plan, why = parse_answer(output), ""
    except ValueError as error:
        plan, why = None, f"no plan: {error}"
    checks, reasons = official(query, plan, data)
    official_score = {"delivered": bool(plan), **_result(checks, [why] if why else reasons)}
    delivered, checks, severity, reasons = _strict(query, output, data)
    strict_score = {"delivered": delivered, **_result(checks, reasons)}
    checks, cmdpo_severity, reasons = cmdpo(query, output, data)
    return {
        "official": official_score,
        "strict": strict_score,
        "cmdpo": _result(checks, reasons),
        "severity": severity,
        "cmdpo_severity": cmdpo_severity,
    }


def _result(checks: dict, reasons: list[str]) -> dict:
    return {**checks, "pass": False not in checks.values(), "reasons": reasons}


def rates(scores: list[dict], *, split: str | None = None) -> dict[str, float]:
    """The benchmark's six rates of many answers, in [0, 1].

    scores   the "official" or the "strict" part of score(), one per answer
    split    divide by the official fixed numbers of that split, so that a missing answer counts as failed;
             None: by the numbers of these answers
    raises   ValueError if there are more answers than the split has queries, or none
    """
    num_hard = sum(item[check] is not None for item in scores for check in HARD)
    size, hard = SIZES[split] if split else (len(scores), num_hard)
    if not scores or len(scores) > size:
        raise ValueError(f"{len(scores)} answers, wanted 1 to {size} ({split or 'no split'})")
    macro = {name: [all(item[c] is not False for c in checks) for item in scores] for name, checks in _SETS}
    return {
        "delivery": sum(item["delivered"] for item in scores) / size,
        "commonsense_micro": sum(item[c] is True for item in scores for c in COMMONSENSE) / (8 * size),
        "commonsense_macro": sum(macro["commonsense"]) / size,
        "hard_micro": sum(item[c] is True for item in scores for c in HARD) / hard,
        "hard_macro": sum(macro["hard"]) / size,
        "final": sum(item["pass"] for item in scores) / size,
    }


def cmdpo_rates(scores: list[dict]) -> dict[str, float]:
    """CM-DPO's pass rate and decode rate, in [0, 1], of the "cmdpo" parts of score(); never to be set beside
    the final pass rate: commonsense is not asked for."""
    return {
        "pass_rate": sum(item["pass"] for item in scores) / max(1, len(scores)),
        "decode_rate": sum(item["decode"] for item in scores) / max(1, len(scores)),
    }


def metrics(items: list[dict]) -> dict[str, dict[str, float]]:
    """The benchmark's rates of stored items (eval.py's items.jsonl), official and strict; in cmdpo mode
    CM-DPO's two instead.

    Divides by the official fixed numbers where the items are the whole split, once or several times over,
    else by those of the items.
    """
    if all("delivered" not in item.get("facts", {}) for item in items):
        return {"cmdpo": cmdpo_rates([item["strict"] for item in items])}
    trials: dict[int, list[dict]] = {}
    for item in items:
        trials.setdefault(item.get("trial", 0), []).append(item)
    split = items[0]["id"].partition("/")[0]
    whole = split if split in SIZES and len(items) == len(trials) * SIZES[split][0] else None
    found = {}
    for name, scores_of in (("official", _stored_official), ("strict", _stored_strict)):
        each = [rates([scores_of(item) for item in part], split=whole) for part in trials.values()]
        found[name] = {rate: sum(row[rate] for row in each) / len(each) for rate in each[0]}
    return found


def _stored_official(item: dict) -> dict:
    return item["official"]


def _stored_strict(item: dict) -> dict:
    """The "strict" part of score() again: a wish that the query does not have is None."""
    lacking = set(HARD) - set(item["facts"]["applicable"])
    return {"delivered": item["facts"]["delivered"], **item["strict"], **dict.fromkeys(lacking)}


_SETS = (("commonsense", COMMONSENSE), ("hard", HARD))
STAGES = {"schema": 0.25, "micro": 0.25, "macro": 0.25, "final": 0.25}  # ours; a curriculum changes them


def staged_reward(scored: dict, *, weights: dict[str, float] | None = None) -> float:
    """A reward in [0, 1] that says more than pass or fail: the weighted mean of four stages.

    scored   the "strict" part of score()
    weights  of schema (there is a plan), micro (share of checks that hold, commonsense and hard alike),
             macro (half for all commonsense, half for all hard checks), final (pass); None: STAGES.
             {"final": 1.0} is the final pass alone
    raises   ValueError for an unknown stage or weights that sum to 0
    source   stages after PLANNER-R1; the equal weights and the split of macro are ours
    """
    weights = STAGES if weights is None else weights
    total = sum(weights.values())
    if not weights.keys() <= STAGES.keys() or min(weights.values(), default=0) < 0 or not total > 0:
        raise ValueError(f"weights={weights}, wanted weights >= 0 of {', '.join(STAGES)}, one above 0")
    held = [[scored[c] for c in checks if scored[c] is not None] for _, checks in _SETS]
    parts = {
        "schema": float(scored["delivered"]),
        "micro": sum(sum(part) / len(part) for part in held) / 2,
        "macro": sum(all(part) for part in held) / 2,
        "final": float(scored["pass"]),
    }
    return math.fsum(weight * parts[stage] for stage, weight in weights.items()) / total


def submission(envs: list[TravelPlanner], outputs: list) -> list[dict]:
    """One {"idx", "query", "plan"} per query for the leaderboard; plan is null where an answer has none."""
    rows = []
    for env, output in zip(envs, outputs, strict=True):
        try:
            plan = parse_answer(output)
        except ValueError:
            plan = None
        rows.append(
            {"idx": int(env.task.id.rpartition("/")[2]), "query": env.task.data["query"], "plan": plan}
        )
    return rows


def stratum(record: dict) -> str:
    """Level and days of a query, by which n of them are drawn."""
    return f"{record.get('level', 'unknown level')} {record.get('days', '?')} days"


def load(
    split: str,
    data: str | Path,
    *,
    n: int | None = None,
    seed: int = 0,
    mode: Literal["tools", "sole", "cmdpo"] = "tools",
    tables: str | None = None,
) -> list[TravelPlanner]:
    """One environment per query of a split ("train", "validation", "test").

    data    folder with <split>.csv or .jsonl and, for the modes without tools, <split>_ref_info.jsonl where
            the records have no reference_information
    n       that many, level and days each with their share; None: all, in file order
    mode    "tools"; "sole": the reference information in the prompt; "cmdpo": the same, CM-DPO's schema
    tables  the database's folder; None: data/database
    raises  ValueError naming file, row and field of what cannot be read
    """
    if mode not in SYSTEMS:
        raise ValueError(f"mode={mode!r}, choose one of {', '.join(SYSTEMS)}")
    folder = Path(data)
    path, records = read_records(folder, split)
    shared = database(Path(tables) if tables else folder / "database")
    order = range(len(records)) if n is None else stratified([stratum(r) for r in records], n, seed=seed)
    known = folder / f"{split}_ref_info.jsonl"
    infos = read_jsonl(known) if mode != "tools" and known.is_file() else []
    return [_env(split, i, records[i], path, infos, shared, mode) for i in order]


def _env(split: str, i: int, record: dict, path: Path, infos: list[dict], data: Database, mode: str):
    where = f"{path} row {i + (2 if path.suffix == '.csv' else 1)}"
    if not isinstance(record.get("query"), str):
        raise ValueError(f"{where}: no 'query', wanted the request's text")
    id = f"{split}/{record.get('idx', i + 1)}"
    query = None if split == "test" else parse_query(record, id=id, where=where)
    kept = {key: record[key] for key in ("query", "level", "days") if record.get(key) is not None}
    information = ""
    if mode != "tools":
        information = record.get("reference_information") or (
            _information(infos[i]) if i < len(infos) else ""
        )
        if not information:
            raise ValueError(
                f"{where}: no 'reference_information', and no row {i + 1} in {split}_ref_info.jsonl beside "
                "it; mode 'tools' needs neither"
            )
    gold = None if split == "test" else gold_plan(record, where=where)
    return TravelPlanner(Task(id, kept), query, data, mode, str(information), gold)


def _information(record: dict) -> str:
    """A row of *_ref_info.jsonl as text: one table or sentence under each of its headings."""
    parts = []
    for title, content in record.items():
        if isinstance(content, list) and content and isinstance(content[0], dict):
            content = table(content[0], [list(row.values()) for row in content])
        parts.append(f"{title}: {content}")
    return "\n".join(parts)
