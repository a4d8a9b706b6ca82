"""PlanBench: Blocksworld and Mystery Blocksworld, one question, one answer, a plan as a list of actions.

The environment over a checkout of the benchmark's repository (or a folder from envs/planbench_make.py).
`verify` is strict: the plan as `read_strict` reads it, every step executed, every goal fact reached.
`official` is the benchmark's own verdict: its extraction, then what VAL would say of that plan.
Benchmark: PlanBench (arXiv:2206.10498); github.com/karthikv792/LLMs-Planning b008bc4.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from envs.base import Env, Message, PlanView, Task, Verdict, clip
from envs.blocks import optimal_plan
from envs.planbench_text import (
    SYSTEM,
    Config,
    Reading,
    prompt_one_shot,
    prompt_zero_shot,
    read_config,
    read_official,
    read_strict,
)
from envs.strata import stratified
from envs.strips import Domain, Problem, Run, Step, read_domain, read_problem, simulate

CHECKS = ("readable", "executable", "goal")
HARD = "blocksworld_hard"  # its config upstream names nothing but the folder; it borrows blocksworld's words
ROOTS = ("plan-bench", "llm_planning_analysis")  # where instances/ and prompts/ may lie
TASK = "task_1_plan_generation"


@dataclass(frozen=True, slots=True)
class Slice:
    """One config of the benchmark: its words, its domain, its instances and their known plans."""

    config: Config
    domain: Domain
    folder: Path  # of the instance files
    plans: dict[int, tuple[str, str]]  # instance -> (plan as PDDL text, where it stands)

    def problem(self, number: int) -> Problem:
        """Raises ValueError naming file and line."""
        path = self.folder / self.config.template.format(number)
        problem = read_problem(path, self.domain)
        strangers = [name for name in problem.objects if name not in self.config.objects]
        if strangers:
            raise ValueError(f"{path}: object {strangers[0]!r} has no name; add it to encoded_objects")
        return problem

    def gold(self, number: int, problem: Problem) -> list[Step]:
        """The stored plan, or a shortest one where none is stored. Raises ValueError naming file and
        instance if the stored plan is broken."""
        if number not in self.plans:
            return optimal_plan(problem)
        text, where = self.plans[number]
        steps = read_strict(text, self.config).steps
        run = simulate(problem, steps)
        if not run.valid:
            why = run.why or f"goal not reached: {run.unmet}"
            raise ValueError(f"{where}: the stored plan fails at step {run.executed + 1}: {why[:80]}")
        return steps


def open_slice(name: str, root: Path) -> Slice:
    """A config of the benchmark's repository at `root`. Raises ValueError naming what is missing."""
    path = root / ROOTS[0] / "configs" / f"{name}.yaml"
    if name == HARD and not path.is_file():
        config = read_config(path.with_name("blocksworld.yaml")).with_names(20)
        config = replace(config, name=HARD, instance_dir=f"{HARD}/generated")
        config = replace(config, domain_file=f"{HARD}/generated_domain.pddl", end=110, num_instances=110)
    else:
        config = read_config(path)
    homes = [root / part / "instances" for part in ROOTS]
    home = next((home for home in homes if (home / config.instance_dir).is_dir()), None)
    if home is None:
        raise ValueError(f"{homes[0] / config.instance_dir} is missing; wanted the instances of {name}")
    folder, domain = home / config.instance_dir, read_domain(home / config.domain_file)
    arity = domain.arity | {action.name: len(action.parameters) for action in domain.actions.values()}
    for word, num in arity.items():
        text = (config.actions | config.predicates).get(word)
        if text is None or text.count("{}") != num:
            raise ValueError(f"{config.path}: {word}={text!r}, wanted a text with {num} {{}}; fix the map")
    return Slice(config, domain, folder, _stored_plans(name, root, folder))


def _stored_plans(name: str, root: Path, folder: Path) -> dict[int, tuple[str, str]]:
    """Plans of the prompt file and of the hard set's info.json, as far as there are such files."""
    plans = {}
    path = root / ROOTS[0] / "prompts" / name / f"{TASK}.json"
    if path.is_file():
        records = _object(_json(path), "instances", list, str(path))
        for row, record in enumerate(records, start=1):
            where = f"{path} instances[{row - 1}]"
            number = _object(record, "instance_id", int, where)
            plans[number] = (_object(record, "ground_truth_plan", str, where), where)
    path = folder.parent / "info.json"
    if name == HARD and path.is_file():
        for file, record in _json(path).items():
            digits = "".join(c for c in file if c.isdigit())
            if digits:
                where = f"{path} {file}"
                plans.setdefault(int(digits), (_object(record, "plan", str, where), where))
    return plans


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, wanted an object")
    return value


def _object(record, key: str, kind: type, where: str):
    """record[key] of a type, or a ValueError that says where it was wanted."""
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: {key}={str(value)[:40]!r}, wanted {kind.__name__}; fix the record")
    return value


class PlanBench(Env):
    """One instance. No tools: the first turn is the answer.

    reference  a valid plan, the stored one or a shortest; extra steps count from its length
    stratum    "4 blocks, 6 steps": what sampling and tables are stratified by
    extractor  what `verify` reads the plan with: "strict", or "official", the benchmark's own extraction
    """

    def __init__(self, task: Task, source: Slice, problem: Problem, reference: list[Step], prompt: str):
        super().__init__(task, [])
        self.source, self.problem, self.reference, self.prompt = source, problem, reference, prompt
        self.extractor = "strict"
        self.stratum = f"{len(problem.objects)} blocks, {len(reference)} steps"

    def reset(self) -> list[Message]:
        self.answer_text, self.done = "", False
        return [Message("system", SYSTEM), Message("user", self.prompt)]

    def reading(self) -> Reading:
        """The answer as `verify` reads it; what was dropped is told by the strict extractor only."""
        text = plan_text(self.answer_text)
        if self.extractor == "official":
            return Reading(read_official(text, self.source.config, self.source.domain))
        return read_strict(text, self.source.config)

    def verify(self) -> Verdict:
        reading = self.reading()
        return verdict(self.problem, reading, simulate(self.problem, reading.steps), self.source.config)

    def official(self, text: str | None = None) -> dict[str, bool | None]:
        """The benchmark's own verdict on `text` (None: the final answer so far): {"answered",
        "executable", "goal", "valid", "pass"}.

        An empty answer is skipped upstream, not counted as wrong: the mean of "valid", which is None there,
        is the benchmark's number; "pass" counts it as wrong.
        """
        text = plan_text(self.answer_text if text is None else text)
        if not text:
            return {"answered": False, "executable": None, "goal": None, "valid": None, "pass": False}
        run = simulate(self.problem, read_official(text, self.source.config, self.source.domain))
        found = {"executable": not run.why, "goal": not run.unmet, "valid": run.valid, "pass": run.valid}
        return {"answered": True, **found}

    def measures(self) -> dict[str, float]:
        """How far the answer is from valid and from shortest, as counts: preconditions that lack at the
        first failing step, steps from there on, goal facts not reached, steps beyond the reference's."""
        run = simulate(self.problem, self.reading().steps)
        return measures(run, shortest=len(self.reference))

    def view(self) -> PlanView:
        return plan_view(self.problem, self.reading().steps, len(self.reference), self.source.config)

    def reference_view(self) -> PlanView:
        return plan_view(self.problem, self.reference, len(self.reference), self.source.config)

    def gold(self) -> str:
        """The reference plan as an answer: one action a line in the prompt's words."""
        return "\n".join(map(self.source.config.action_text, self.reference))


def measures(run: Run, *, shortest: int) -> dict[str, float]:
    """Counts by which a plan is wrong or long (spec/benchmarks.md 2.5); all 0.0 for an optimal plan.

    A step that fails for another reason than a precondition (unknown object) lacks one. A plan without
    steps lacks all `shortest` steps.
    """
    return {
        "preconditions": float(max(len(run.missing), bool(run.why))),
        "remaining_steps": float(run.steps - run.executed if run.steps else shortest),
        "goal_facts": float(len(run.unmet)),
        "extra_steps": float(max(0, run.steps - shortest)),
    }


def verdict(problem: Problem, reading: Reading, run: Run, config: Config) -> Verdict:
    """readable: a step was read; executable: every step can be taken; goal: it holds in the state reached.

    severity  readable 1.0; executable: missing preconditions + steps not taken, or 1.0 without a step;
              goal: number of goal facts not reached
    """
    amounts = measures(run, shortest=0)
    severity = {
        "readable": float(not reading.steps),
        "executable": amounts["preconditions"] + amounts["remaining_steps"] + (not reading.steps),
        "goal": amounts["goal_facts"],
    }
    reasons = []
    if not reading.steps:
        reasons.append("readable: no action found in the answer")
        reasons.append("executable: there is no plan to execute")
    if run.why:
        step = reading.steps[run.executed]
        line = f", line {reading.lines[run.executed]}" if reading.lines else ""  # else of the official reader
        why = clip(run.why, 100)
        reasons.append(f"executable: step {run.executed + 1} ({' '.join(step)}){line}: {why}")
    if run.unmet:
        unmet = ", ".join(config.predicates[atom[0]].format(*_names(atom, config)) for atom in run.unmet)
        reasons.append(clip(f"goal: not reached: {unmet}", 200))
    if reasons and reading.stopped:
        reasons.append(clip(f"the plan stops at {reading.stopped}", 200))
    checks = {check: severity[check] == 0 for check in CHECKS}
    return Verdict(all(checks.values()), checks, severity, reasons)


def _names(atom: tuple[str, ...], config: Config) -> list[str]:
    return [config.objects[name] for name in atom[1:]]


def plan_view(problem: Problem, steps: list[Step], shortest: int, config: Config) -> PlanView:
    """The plan as numbered lines in the prompt's words. Features: executed (share of the steps), goal
    (share of the facts), brief (shortest / steps, 0 if the plan is not valid)."""
    run = simulate(problem, steps)
    lines = [f"{i}. {config.action_text(step)}" for i, step in enumerate(steps, start=1)]
    features = {
        "executed": run.executed / max(1, run.steps),
        "goal": 1 - len(run.unmet) / len(problem.goal),
        "brief": min(1.0, shortest / max(1, run.steps)) if run.valid else 0.0,
    }
    return PlanView("\n".join(lines) or "(no plan)", features)


def plan_text(output: object) -> str:
    """The text of a stored output: a string; a list of actions, each a string or a list of words; an object
    with one of both under "plan"; or such a list or object as JSON text."""
    if isinstance(output, str):
        if not output.startswith(("{", "[")):
            return output
        try:
            output, text = json.loads(output), output
        except (ValueError, RecursionError):  # "[PLAN] ..." is no JSON
            return output
    else:
        text = f"no plan in a {type(output).__name__}"
    found = output.get("plan") if isinstance(output, dict) else output
    if isinstance(found, list):
        return "\n".join(map(_line, found))
    return found if isinstance(found, str) else text


def _line(action: object) -> str:
    if isinstance(action, list) and all(isinstance(word, str) for word in action):
        return f"({' '.join(action)})"
    return action if isinstance(action, str) else f"no action in a {type(action).__name__}"


def score(env: PlanBench, output: object) -> dict:
    """Official and strict verdict on one stored output (see plan_text). Never raises on its content.

    returns  {"id", "official": {check: bool | None, "pass": b}, "strict": {check: b, "pass": b,
             "reasons": [...]}, "severity": {check: amount}, "measures": {name: count}, "dropped": [...]}
    """
    text = plan_text(output)
    reading = read_strict(text, env.source.config)
    run = simulate(env.problem, reading.steps)
    found = verdict(env.problem, reading, run, env.source.config)
    return {
        "id": env.task.id,
        "official": env.official(text),
        "strict": {**found.checks, "pass": found.passed, "reasons": found.reasons},
        "severity": found.severity,
        "measures": measures(run, shortest=len(env.reference)),
        "dropped": reading.dropped,
    }


def load(
    split: str,
    data: str | Path,
    *,
    n: int | None = None,
    seed: int = 0,
    shots: int = 1,
    blocks: tuple[int, ...] | None = None,
    extractor: Literal["strict", "official"] = "strict",
) -> list[PlanBench]:
    """One environment per instance of a config ("blocksworld", "mystery_blocksworld_3", "blocksworld_hard")
    or of several ("blocksworld_3+blocksworld").

    data    a checkout of LLMs-Planning, or a folder from envs/planbench_make.py
    n       that many, stratified by number of blocks and length of the shortest plan; None: all, in order
    shots   1: the instance before is the solved example (ids from 2); 0: zero-shot (ids from 1)
    blocks  only instances with one of these numbers of blocks; None: all
    extractor  what `verify` reads plans with; `official` always uses the benchmark's
    raises  ValueError naming file, line or key of what cannot be read
    """
    if extractor not in ("strict", "official"):
        raise ValueError(f"extractor={extractor!r}, choose strict or official")
    if shots not in (0, 1):
        raise ValueError(f"shots={shots}, PlanBench's prompts have 0 or 1")
    envs = [env for name in split.split("+") for env in _load_slice(open_slice(name, Path(data)), shots)]
    if blocks is not None:
        envs = [env for env in envs if len(env.problem.objects) in blocks]
        if not envs:
            raise ValueError(f"blocks={blocks}: no instance of {split} has so many")
    for env in envs:
        env.extractor = extractor
    if n is None:
        return envs
    return [envs[i] for i in stratified([env.stratum for env in envs], n, seed=seed)]


def _load_slice(source: Slice, shots: int) -> list[PlanBench]:
    config, envs = source.config, []
    last = min(config.end + shots, config.num_instances)
    example, example_plan = None, []
    for number in range(config.start, last + 1):
        problem = source.problem(number)
        gold = source.gold(number, problem)
        if shots == 0:
            prompt = prompt_zero_shot(problem, config)
        elif example is not None:
            prompt = prompt_one_shot(problem, example, example_plan, config)
        if shots == 0 or example is not None:
            plan = [" ".join(step) for step in gold]
            record = {"blocks": len(problem.objects), "steps": len(gold), "query": prompt, "plan": plan}
            task = Task(f"{config.name}/{number}", record)
            envs.append(PlanBench(task, source, problem, gold, prompt))
        example, example_plan = problem, gold
    return envs
