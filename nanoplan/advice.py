"""What advice was given, whether the agent took it, and what success there was: items in, tables out.

An item is one episode as a plain dict; every number below is computed from items alone. The rules that say
whether advice was followed are text rules of ours (Caddie H.2 used a judge: nanoplan/advice_judge.py).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable

from envs.base import Message, clip
from nanoplan.critic import Note
from nanoplan.critique import KIND_OF, advice_kind, text_of
from nanoplan.evaluate import env_failed
from nanoplan.log import table
from nanoplan.rollout import Episode

KINDS = ("search", "answer", "verify", "ask", "act", "other")
FOLLOWED = ("exactly", "partly", "not")
MAX_TURN_CHARS = 2000  # of the agent's next turn in an item; ours
COMMON = frozenset(
    "a an the of for to in on at by with from and or is are was were be it its this that your you next then "
    "name query about information more".split()
)


def items_of(
    episodes: list[Episode], notes: list[list[Note]], *, trials: list[int] | None = None
) -> list[dict]:
    """One item for each episode: task, trial, success (None where the world or an endpoint failed), and each
    critique with its kind, the agent's next turn and whether it followed ("" for both if there was none)."""
    items = []
    for i, (episode, said) in enumerate(zip(episodes, notes, strict=True)):
        broken, advice = episode.trajectory.broken, []
        for note in said:
            row = {"turn": note.turn, "faults": note.critique.faults, "advice": note.critique.advice}
            if not note.critique.faults:
                turn = next((m for m in episode.history[note.at :] if m.role == "assistant"), None)
                row["kind"] = advice_kind(note.critique.advice)
                row["followed"] = "" if turn is None else followed(note.critique.advice, turn)
                row["next"] = "" if turn is None else clip(text_of(turn), MAX_TURN_CHARS)
            advice.append(row)
        success = None if broken else bool(episode.env.verify().passed)
        items.append({
            "id": episode.env.task.id, "trial": trials[i] if trials else 0, "success": success,
            "stop": episode.trajectory.stop, "turns": episode.turns, "calls": episode.calls,
            "malformed": episode.malformed, "notes": advice,
        })  # fmt: skip
    return items


def of_eval(items: list[dict]) -> list[dict]:
    """Items of eval.py as the functions below read them."""
    return [
        {"id": item["id"], "turns": item["turns"] or 0, "notes": item.get("notes", []),
         "success": None if env_failed(item) else item["strict"]["pass"]}
        for item in items
    ]  # fmt: skip


def turn_kind(turn: Message) -> str:
    """The kind of advice that a turn of the agent would be the taking of."""
    if not turn.calls:
        return "ask" if turn.content.rstrip().endswith("?") else "answer"
    words = re.findall(r"[a-z]+", turn.calls[0].name.lower())
    return next((KIND_OF[word] for word in words if word in KIND_OF), "act")


def followed(advice: str, turn: Message) -> str:
    """exactly | partly | not: did the agent's next turn take the advice?

    exactly  the turn is of the advised kind, and every word of its arguments is in the advice (an answer need
             not repeat any: advice names no answers)
    partly   of the advised kind, or at least half of its words are in the advice
    """
    kind = advice_kind(advice)
    texts = [str(value) for call in turn.calls for value in call.arguments.values()] or [turn.content]
    wanted, own = _words([advice]), _words(texts)
    same = turn_kind(turn) == kind or (kind == "verify" and turn_kind(turn) in ("search", "act"))
    if same and (kind in ("answer", "ask") or (own and own <= wanted)):
        return "exactly"
    return "partly" if same or (own and len(own & wanted) * 2 >= len(own)) else "not"


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text.lower())} - COMMON


# rates


def _by_task(items: list[dict]) -> dict[str, list[bool]]:
    tasks: dict[str, list[bool]] = defaultdict(list)
    for item in items:
        if item["success"] is not None:
            tasks[item["id"]].append(item["success"])
    return tasks


def mean_success(items: list[dict]) -> float:
    """Mean over tasks of the share of trials that succeeded; nan without any."""
    return success_sem(items)[0]


def success_sem(items: list[dict]) -> tuple[float, float]:
    """Mean success over tasks and its standard error over tasks, trials averaged first; nan where unknown."""
    means = [sum(trials) / len(trials) for trials in _by_task(items).values()]
    if not means:
        return math.nan, math.nan
    mean = math.fsum(means) / len(means)
    if len(means) < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in means) / (len(means) - 1)
    return mean, math.sqrt(variance / len(means))


def pass_hat(items: list[dict], k: int) -> float:
    """Chance that k trials of a task, drawn without replacement, all succeed; mean over tasks with k trials.

    raises  ValueError if no task has k trials
    source  pass^k, tau-bench (arXiv:2406.12045): C(successes, k) / C(trials, k)
    """
    tasks = [trials for trials in _by_task(items).values() if len(trials) >= k]
    if k < 1 or not tasks:
        raise ValueError(f"k={k}: no task has as many trials; wanted 1 or more, at most the trials of a task")
    return math.fsum(math.comb(sum(t), k) / math.comb(len(t), k) for t in tasks) / len(tasks)


def feedback_rates(items: list[dict], alone: list[dict]) -> dict[str, float]:
    """Solve rate of the episodes that got feedback, beside the same tasks without a critic (figure 2).

    returns  "with", "without": means over the tasks in which some episode got feedback; "tasks"; "episodes".
             Not causal: the agent, or a draw, chose when to be advised
    """
    told = [item for item in items if any(not note["faults"] for note in item["notes"])]
    ids = {item["id"] for item in told}
    return {
        "with": mean_success(told), "without": mean_success([item for item in alone if item["id"] in ids]),
        "tasks": len(ids), "episodes": len(told),
    }  # fmt: skip


# tables


def calls_table(items: list[dict]) -> list[dict]:
    """H.1: episodes by the number of critiques in them: their share, and their success."""
    groups: dict[int, list[dict]] = defaultdict(list)
    for item in items:
        groups[len(item["notes"])].append(item)
    return [
        {"critiques": n, "episodes": len(rows), "share": len(rows) / len(items), "success": _rate(rows)}
        for n, rows in sorted(groups.items())
    ]


def advice_table(items: list[dict], *, judged: bool = False) -> list[dict]:
    """H.2: well-formed advice by kind: its share, how it was followed, success of the episodes it was in.

    judged  by a model's labels (advice_judge.label) in place of the rules'; advice without one is left out
    """
    pairs = [(note, item) for item in items for note in item["notes"] if not note["faults"]]
    if judged:
        pairs = [(note["judged"], item) for note, item in pairs if note.get("judged")]
    rows = []
    for kind in KINDS:
        own = [(labels, item) for labels, item in pairs if labels["kind"] == kind]
        row = {"kind": kind, "advice": len(own), "share": len(own) / max(1, len(pairs))}
        known = [labels["followed"] for labels, _ in own if labels["followed"]]
        row |= {name: known.count(name) / len(known) if known else math.nan for name in FOLLOWED}
        rows.append(row | {"success": _rate([item for _, item in own])})
    return rows


def agreement(items: list[dict]) -> dict[str, float] | None:
    """How often the rules' labels are the model's; None where no model was asked.

    returns  "kind", "followed": shares, nan without any; "judged": advice that has both labels; "failed": the
             model gave none
    """
    notes = [note for item in items for note in item["notes"] if "judged" in note]
    if not notes:
        return None
    both = [note for note in notes if note["judged"]]
    found = {"judged": len(both), "failed": len(notes) - len(both)}
    for name in ("kind", "followed"):
        same = [note[name] == note["judged"][name] for note in both if note[name]]
        found[name] = sum(same) / len(same) if same else math.nan
    return found


def tables(items: list[dict]) -> dict:
    """H.1 and H.2 of some episodes, by the judge's labels too where there are some."""
    found = {"calls": calls_table(items), "kinds": advice_table(items)}
    if same := agreement(items):
        found |= {"kinds_judged": advice_table(items, judged=True), "agreement": same}
    return found


def sweep_table(by_step: dict[int, list[dict]]) -> list[dict]:
    """Caddie's Table 7: success when the critic speaks after a fixed turn, with its standard error."""
    rows = []
    for step, items in sorted(by_step.items()):
        mean, sem = success_sem(items)
        rows.append({"step": step, "success": mean, "sem": sem, "advised": _share_advised(items)})
    return rows


def report(items: list[dict], *, alone: list[dict] | None = None) -> str:
    """Success with its standard error, pass^k, and tables H.1 and H.2 of some episodes, as Markdown.

    alone  items of the same tasks without a critic: solve rates of the advised tasks beside each other
    """
    mean, sem = success_sem(items)
    k = min(map(len, _by_task(items).values()), default=0)
    broken = sum(item["success"] is None for item in items)
    text = f"success {mean:.3f} ± {sem:.3f} (SEM over {len(_by_task(items))} tasks), "
    text += f"pass^{k} {pass_hat(items, k):.3f}, " if k else ""
    text += f"{sum(item['turns'] for item in items) / max(1, len(items)):.2f} turns, {broken} broken episodes"
    parts = [text]
    if any(item["notes"] for item in items):
        parts += [as_table(calls_table(items)), as_table(advice_table(items), having="advice")]
    if alone and parts[1:]:
        rates = feedback_rates(items, alone)
        parts.insert(
            1, f"{rates['episodes']} episodes of {rates['tasks']} tasks with feedback: solved "
            f"{rates['with']:.3f}, these tasks without a critic {rates['without']:.3f}",
        )  # fmt: skip
    if same := agreement(items):
        parts.append(
            f"by the judge: {same['judged']} labelled, {same['failed']} failed; the rules give the same kind "
            f"in {same['kind']:.3f}, the same of whether it was followed in {same['followed']:.3f}"
        )
        parts.append(as_table(advice_table(items, judged=True), having="advice"))
    return "\n".join(part for part in parts if part)


def as_table(rows: list[dict], *, having: str = "") -> str:
    """Rows of one of the tables as Markdown; only those whose number `having` is not 0."""
    rows = [row for row in rows if not having or row[having]]
    return table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]) if rows else ""


def _cell(value) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _share_advised(items: list[dict]) -> float:
    return sum(bool(item["notes"]) for item in items) / len(items) if items else math.nan


def _rate(items: list[dict]) -> float:
    known = [item["success"] for item in items if item["success"] is not None]
    return sum(known) / len(known) if known else math.nan
