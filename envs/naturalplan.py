"""NaturalPlan: trips, meetings and calendars from one message, answered by one text, without tools.

Loads the three files of the official repository's data folder; zero- and five-shot prompts are the records'
own. Each answer is scored twice: by the official rule, which for trips and calendars is equality with the
gold, and strictly, by a verifier that accepts every answer that keeps the constraints. One file per task:
naturalplan_trip, naturalplan_meeting, naturalplan_calendar.
Benchmark: NaturalPlan (arXiv:2406.04520); all records are the test split.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from envs import naturalplan_calendar, naturalplan_meeting, naturalplan_trip
from envs.base import Env, Message, PlanView, Task, Verdict
from envs.naturalplan_answer import field
from envs.strata import stratified
from envs.triptailor_data import read_json

FILES = {  # split -> name of its file without .json, and the task it holds
    "trip": ("trip_planning", naturalplan_trip),
    "meeting": ("meeting_planning", naturalplan_meeting),
    "calendar": ("calendar_scheduling", naturalplan_calendar),
}
PROMPTS = {0: "prompt_0shot", 5: "prompt_5shot"}  # examples in the prompt -> field of a record


class NaturalPlan(Env):
    """One task: the first turn is the answer.

    name     trip | meeting | calendar
    stratum  difficulty, e.g. "trip 10 cities"
    """

    def __init__(self, task: Task, name: str, problem, prompt: str, stratum: str):
        super().__init__(task, [])
        self.name, self.problem, self.prompt, self.stratum = name, problem, prompt, stratum

    @property
    def rules(self) -> ModuleType:
        """The task's own official, verify, solutions, render, gold and view."""
        return FILES[self.name][1]

    def reset(self) -> list[Message]:
        self.answer_text, self.done = "", False
        return [Message("user", self.prompt)]

    def answer(self, text: str) -> None:
        """Thinking is no part of the answer: the official rules would read plans in it."""
        self.answer_text = text.rpartition("</think>")[2]

    def verify(self) -> Verdict:
        return self.rules.verify(self.problem, self.answer_text)

    def official(self) -> dict[str, bool]:
        """The official score of the final answer: its checks, and "pass"."""
        return self.rules.official(self.problem, self.answer_text)

    def answers(self) -> Iterator[str]:
        """Every valid answer in the gold's words: trips and calendars all of them, meetings one per order
        of friends."""
        return (self.rules.render(self.problem, found) for found in self.rules.solutions(self.problem))

    def gold(self) -> str:
        """The record's own answer."""
        return self.rules.gold(self.problem)

    def view(self) -> PlanView:
        return self.rules.view(self.problem, self.answer_text)

    def reference_view(self) -> PlanView:
        return self.rules.view(self.problem, self.gold())


def score(env: NaturalPlan, output: object) -> dict[str, dict]:
    """Both scores of any system's output: {"official": {check: bool, ..., "pass": bool}, "strict": {check:
    bool, ..., "pass": bool, "reasons": [...]}}.

    output  text, read by the official rule as it is; for meetings also rows {location, person_name,
            start_time}, the official second form, as a list, as {"plan": list} or as the text of either.
            Whatever else is a wrong answer, never an error.
    """
    verdict = env.rules.verify(env.problem, output)
    strict = {**verdict.checks, "pass": verdict.passed, "reasons": verdict.reasons}
    return {"official": env.rules.official(env.problem, output), "strict": strict}


def load(
    split: str,
    data: str | Path,
    *,
    n: int | None = None,
    seed: int = 0,
    shots: int = 5,
    hint: bool = False,
) -> list[NaturalPlan]:
    """One environment per record of a task.

    split   trip | meeting | calendar, the name of a file in `data` that starts like one of the official
            names ("trip_planning", "trip_planning.zeroshot"), or "test" (or "all"), the three tasks after
            each other, which is all there is
    n       records drawn by `seed`, each difficulty with its share (the files are sorted by it); None: all,
            in file order
    shots   worked examples in the prompt, 0 or 5
    hint    add the answer's form to the prompt: the zero-shot prompts of trips and calendars don't tell it
    raises  ValueError naming file, record, field and what was wanted
    """
    if shots not in PROMPTS:
        raise ValueError(f"shots={shots}, the records have prompts with 0 and with 5")
    rows = []
    for name in FILES if split in ("test", "all") else [split]:
        path, task = _find(name, Path(data))
        for key, record in read_json(path, dict).items():
            where = f"{path} record {key}"
            if not isinstance(record, dict):
                raise ValueError(f"{where} is a {type(record).__name__}, wanted an object")
            rows.append((task, key, record, where, f"{task} {FILES[task][1].stratum(record, where).strip()}"))
    order = range(len(rows)) if n is None else stratified([row[-1] for row in rows], n, seed=seed)
    return [_env(*rows[i], shots=shots, hint=hint) for i in order]


def _find(split: str, folder: Path) -> tuple[Path, str]:
    """The file of a split and the task it holds."""
    stem = FILES[split][0] if split in FILES else split
    task = next((task for task, (name, _) in FILES.items() if stem.split(".")[0] == name), None)
    if task is None:
        raise ValueError(f"split={split!r}; choose {', '.join(FILES)}, test, or a file's name")
    path = folder / f"{stem}.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; data is the folder with NaturalPlan's {stem}.json")
    return path, task


def _env(task: str, key: str, record: dict, where: str, stratum: str, *, shots: int, hint: bool):
    if PROMPTS[shots] not in record and shots:
        raise ValueError(f"{where}: no {PROMPTS[shots]!r}; load with shots=0")
    prompt = field(record, PROMPTS[shots], str, where)
    rules = FILES[task][1]
    if hint:
        prompt = f"{prompt.rstrip()}\n\n{rules.HINT}"
    return NaturalPlan(Task(key, record), task, rules.parse_problem(record, where), prompt, stratum)
