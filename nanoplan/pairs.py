"""Pairs and demonstrations from JSONL files: checked, tokenised, and what is wrong with the others.

A pair is one of
    {"messages", "chosen", "rejected"}        the prompt as chat messages (and "tools", JSON schemas, where it
                                              has some), two completions as text; nanoplan.synth's records,
                                              which add severities and scores, are of this kind
    {"chosen": {"ids", "sampled"}, "rejected": {"ids", "sampled"}}
                                              two trajectories as ids with the mask of what the model wrote;
                                              all before the first sampled id is the prompt
A demonstration is a pair (its "sft" text, else its chosen completion), or
    {"messages", "tools"}                     a conversation; loss on every assistant message
    {"ids", "sampled"}                        a trajectory, as train_grpo.py logs them
Any record may have an "id". What cannot be trained on is refused by name, counted, and never trained on.
Text becomes ids once, here; given ids stay as they are.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from envs.base import Call, Message, Tool
from nanoplan.chat import Chat
from nanoplan.evaluate import read_lines, seed_for
from nanoplan.preference import severity_margin
from nanoplan.trajectory import Trajectory

ASK_RATIONALE = "\nBefore the plan, write a <rationale> block: what has to be watched, and why."
MARGINS = ("normalised", "raw", "unit", "random", "length", "reward_model")


@dataclass(slots=True)
class Pair:
    id: str
    chosen: Trajectory  # prompt observed, completion sampled
    rejected: Trajectory  # the same prompt ids, another completion
    num_prompt: int  # tokens of the prompt
    severity: dict[str, float] | None  # of the rejected plan: "normalised" in [0, 1], "raw"; None: unknown
    soft_gap: float  # soft-preference score of chosen minus rejected; 0.0 where unknown

    @property
    def sides(self) -> tuple[Trajectory, Trajectory]:
        return self.chosen, self.rejected


def read_pairs(
    path: str | Path,
    chat: Chat,
    *,
    max_tokens: int,
    truncate: bool = False,
    check: Callable[[dict], str] = lambda record: "",
):
    """Pairs of a file, in its order, and the refused records: reason -> what was wrong, one text each.

    max_tokens  of prompt and completion of either side; a longer pair is refused, or cut with truncate
    check       why a record is refused, "" if it is not: a verifier that has its database, as synth.check
    returns     (list of Pair, dict of reason -> list of texts)
    raises      ValueError for a file that is no JSONL, holds no pair, or, with truncate, a pair of which
                nothing would be left
    """

    def checked(record: dict, where: str) -> Pair:
        pair = pair_of(record, chat, where)
        if reason := check(record):
            raise ValueError(f"verified again: {reason}")
        return pair

    pairs, refused = _read(path, checked)
    kept = []
    for pair in pairs:
        if max(len(side.ids) for side in pair.sides) <= max_tokens:
            kept.append(pair)
        elif truncate:
            kept.append(cut(pair, max_tokens))
        else:
            longest = max(len(side.ids) for side in pair.sides)
            refused.setdefault("too long", []).append(f"{pair.id}: {longest} tokens of {max_tokens}")
    return _some(kept, refused, path), refused


def read_demonstrations(path: str | Path, chat: Chat, *, max_tokens: int, rationale: str = "asked"):
    """Trajectories of a file, in its order, and the refused records, as in read_pairs.

    rationale  what a record's "sft" text is used for. "always": every one is trained on as it is, rationale
               then plan (CM-DPO). "never": its plan alone. "asked": every second one as it is, after a prompt
               that asks for a rationale (ASK_RATIONALE); the others' plans alone, so that the plain prompt
               brings a plan at once, which is how plans are compared and evaluated
    """
    if rationale not in ("always", "asked", "never"):
        raise ValueError(f"rationale={rationale!r}; wanted always, asked or never")
    number = iter(range(10**18))
    found, refused = _read(
        path, lambda record, where: demonstration_of(record, chat, rationale, next(number))
    )
    kept = [one for one in found if len(one.ids) <= max_tokens]
    if len(kept) < len(found):
        longest = max(len(one.ids) for one in found)
        text = f"{longest} tokens of {max_tokens}, the longest"
        refused.setdefault("too long", []).extend([text] * (len(found) - len(kept)))
    return _some(kept, refused, path), refused


def _read(path, make: Callable) -> tuple[list, dict[str, list[str]]]:
    """make(record, where) of each line; where that raises ValueError("reason: text"), the texts by reason."""
    made, refused, seen = [], {}, set()
    for number, record in read_lines(path):
        where = str(record.get("id", f"line {number}"))
        try:
            if where in seen:
                raise ValueError("an id twice: the first record is kept")
            made.append(make(record, where))
            seen.add(where)
        except ValueError as error:
            reason, _, text = str(error).partition(": ")
            refused.setdefault(reason, []).append(f"{where}: {text}")
    return made, refused


def _some(kept: list, refused: dict[str, list[str]], path) -> list:
    if not kept:
        raise ValueError(f"{path} holds nothing to train on; {refusals(refused)}")
    return kept


def refusals(refused: dict[str, list[str]]) -> str:
    """One line for people: how many records each reason refused, with the first one's text."""
    total = sum(map(len, refused.values()))
    parts = [f"{reason} {len(texts)} (first {texts[0]})" for reason, texts in sorted(refused.items())]
    return f"{total} records refused" + (": " + "; ".join(parts) if parts else "")


# one record


def pair_of(record: dict, chat: Chat, where: str) -> Pair:
    """raises  ValueError("reason: what is wrong") for a record that no preference can be learned from"""
    if isinstance(record.get("chosen"), dict):
        chosen, rejected = (trajectory_of(record.get(side)) for side in ("chosen", "rejected"))
    else:
        prompt = chat.open(*prompt_of(record))
        sides = [completion_of(record, side, chat) for side in ("chosen", "rejected")]
        chosen, rejected = (joined(prompt, ids) for ids in sides)
    starts = [side.sampled.index(True) for side in (chosen, rejected)]
    if chosen.ids[: starts[0]] != rejected.ids[: starts[1]]:
        raise ValueError(f"unequal prompts: {starts[0]} and {starts[1]} tokens, not the same")
    if chosen.ids == rejected.ids and chosen.sampled == rejected.sampled:
        raise ValueError("equal completions: there is nothing to prefer")
    for ids in (chosen.ids, rejected.ids):
        if not 0 <= min(ids) <= max(ids) < chat.num_ids:
            raise ValueError(f"unknown ids: {min(ids)} to {max(ids)}, the tokenizer has {chat.num_ids}")
    return Pair(where, chosen, rejected, starts[0], severity_of(record), soft_gap_of(record))


def severity_of(record: dict) -> dict[str, float] | None:
    """Severities of the rejected plan, after the check that it has one and that the chosen one has none."""
    for side, wanted in (("chosen", True), ("rejected", False)):
        verdict = record.get(f"verdict_{side}")
        if verdict is None:
            continue
        if not isinstance(verdict, dict) or not all(isinstance(one, dict) for one in verdict.values()):
            raise ValueError(f"broken verdict: verdict_{side} is no object of objects")
        passed = all(one.get("passed") is True for one in verdict.values())
        if passed != wanted:
            raise ValueError("chosen is infeasible: " + str(broken_of(verdict)) if wanted
                             else "rejected is feasible: it breaks no hard constraint")  # fmt: skip
    severity = record.get("severity")
    if severity is None:
        return None
    if not isinstance(severity, dict):
        raise ValueError(f"broken severity: {severity!r} is no object")
    values = {name: number_of(severity.get(name), f"severity.{name}") for name in ("normalised", "raw")}
    if not 0 < values["normalised"] <= 1:
        reason = "rejected is feasible" if values["normalised"] == 0 else "broken severity"
        raise ValueError(f"{reason}: severity.normalised={values['normalised']}, wanted in (0, 1]")
    return values


def broken_of(verdict: dict) -> str:
    return ", ".join(name for name, one in verdict.items() if one.get("passed") is not True)


def soft_gap_of(record: dict) -> float:
    if "soft_chosen" not in record and "soft_rejected" not in record:
        return 0.0
    chosen, rejected = (number_of(record.get(name), name) for name in ("soft_chosen", "soft_rejected"))
    return chosen - rejected


def number_of(value, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"broken number: {name}={value!r}, wanted a finite one")
    return float(value)


def prompt_of(record: dict) -> tuple[list[Message], list[Tool]]:
    """Messages and tools of a record in OpenAI's form."""
    messages, tools = record.get("messages"), record.get("tools") or []
    if not isinstance(messages, list) or not messages or not isinstance(tools, list):
        raise ValueError('no prompt: wanted "messages", a list of {"role", "content"}, and "tools", a list')
    try:
        return [message_of(one) for one in messages], [tool_of(one) for one in tools]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no prompt: a message or tool is not in OpenAI's form ({error!r})") from None


def message_of(one: dict) -> Message:
    calls = [call_of(call) for call in one.get("tool_calls") or []]
    content = one["content"] if one.get("content") is not None else ""
    if one["role"] not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
        raise ValueError(f"no prompt: role {one['role']!r} with a {type(content).__name__} as content")
    return Message(one["role"], content, calls)


def call_of(call: dict) -> Call:
    function = call["function"]
    if not isinstance(function["arguments"], dict):
        raise ValueError("no prompt: a call's arguments are no object")
    return Call(function["name"], function["arguments"])


def tool_of(one: dict) -> Tool:
    function = one["function"]
    return Tool(function["name"], function.get("description", ""), function["parameters"])


def completion_of(record: dict, side: str, chat: Chat) -> list[int]:
    text = record.get(side)
    if not isinstance(text, str):
        raise ValueError(f"no completion: {side} is a {type(text).__name__}, wanted text")
    if not text.strip():
        raise ValueError(f"empty completion: {side} has no text")
    return chat.write(Message("assistant", text))


def trajectory_of(value) -> Trajectory:
    """{"ids", "sampled"} as a record; log-probs are 0."""
    ids, sampled = (value.get("ids"), value.get("sampled")) if isinstance(value, dict) else (None, None)
    if not isinstance(ids, list) or not isinstance(sampled, list) or len(ids) != len(sampled):
        raise ValueError('broken trajectory: wanted {"ids", "sampled"}, two lists of one length')
    if not all(type(id) is int for id in ids) or not all(mark in (0, 1) for mark in sampled):
        raise ValueError("broken trajectory: ids are integers, sampled is 0 or 1")
    if not any(sampled):
        raise ValueError("empty completion: nothing is sampled")
    if sampled[0]:
        raise ValueError("broken trajectory: the first id is sampled, there is no prompt")
    return Trajectory(list(ids), [bool(mark) for mark in sampled], [0.0] * len(ids))


def joined(prompt: list[int], completion: list[int]) -> Trajectory:
    num = len(prompt), len(completion)
    return Trajectory(prompt + completion, [False] * num[0] + [True] * num[1], [0.0] * sum(num))


def demonstration_of(record: dict, chat: Chat, rationale: str, number: int) -> Trajectory:
    """raises  ValueError("reason: what is wrong"); number: which demonstration of the file it is"""
    if "ids" in record:
        return trajectory_of(record)
    if isinstance(record.get("chosen"), dict):
        return trajectory_of(record["chosen"])
    messages, tools = prompt_of(record)
    if "chosen" not in record:
        return conversation_of(messages, tools, chat)
    traced = "sft" in record and (rationale == "always" or (rationale == "asked" and number % 2 == 1))
    if traced and rationale == "asked":
        last = messages[-1]
        messages = [*messages[:-1], Message(last.role, last.content + ASK_RATIONALE)]
    return joined(chat.open(messages, tools), completion_of(record, "sft" if traced else "chosen", chat))


def conversation_of(messages: list[Message], tools: list[Tool], chat: Chat) -> Trajectory:
    """Ids of a conversation as an episode would have them; what the assistant says counts as sampled."""
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), 0)
    if not first:
        raise ValueError("empty completion: no assistant message after a prompt")
    out, waiting = Trajectory(), []
    out.observe(chat.open(messages[:first], tools))
    for message in messages[first:]:
        if message.role != "assistant":
            waiting.append(message)
            continue
        if waiting:
            out.observe(chat.observe(waiting, stopped=True, tools=tools))
        for id in chat.write(message):
            out.sample(id, 0.0)
        waiting = []
    return out


def cut(pair: Pair, max_tokens: int) -> Pair:
    """The pair with both completions cut off at max_tokens; the prompt is never cut.

    raises  ValueError that names the pair if a completion would be empty or both would be the same
    """
    if pair.num_prompt >= max_tokens:
        raise ValueError(
            f"pair {pair.id}: max_tokens={max_tokens} leaves nothing of a completion after a prompt of "
            f"{pair.num_prompt} tokens; raise it"
        )
    short = [Trajectory(s.ids[:max_tokens], s.sampled[:max_tokens], s.logp[:max_tokens]) for s in pair.sides]
    if short[0].ids == short[1].ids:
        raise ValueError(
            f"pair {pair.id}: max_tokens={max_tokens} cuts off all that tells its completions apart; raise it"
        )
    return Pair(pair.id, *short, pair.num_prompt, pair.severity, pair.soft_gap)


# margins


def margins(
    pairs: list[Pair], *, source: str, scale: float, seed: int, rewards: list[float] | None = None
) -> Tensor:
    """m of each pair in [0, 1], (P,) fp32; see preference.cmdpo.

    source   what tanh(scale * x) is taken of, or m itself:
             "normalised"  x = 100 * sum w_j min(1, sev_j / tau_j), percent of the typical violation: the
                           reading in which the paper's scale of 0.01 does something
             "unit"        x = the same sum, in [0, 1], as the appendix prints it: m is at most 0.01
             "raw"         x = the weighted sum of raw severities, dollars and minutes added up
             "length"      x = | |w| - |l| |, tokens
             "random"      m uniform in [0, 1), drawn for the pair's id
             "reward_model"  m = max(0, tanh(gap / 2)): a reward model's probability that w is better,
                           stretched from [1/2, 1] to [0, 1]
    rewards  r(w) - r(l) of each pair, nats, for "reward_model"
    raises   ValueError where a source needs what the pairs or the call lack
    """
    if source not in MARGINS:
        raise ValueError(f"margin={source!r}; wanted one of {', '.join(MARGINS)}")
    if source == "random":
        return torch.tensor([seed_for(seed, "margin", pair.id) / 2**63 for pair in pairs])
    if source == "reward_model":
        if rewards is None:
            raise ValueError("margin=reward_model needs a reward model; give --reward_model")
        return torch.tanh(torch.tensor(rewards) / 2).clamp(min=0)
    if source == "length":
        sizes = [abs(pair.chosen.num_sampled - pair.rejected.num_sampled) for pair in pairs]
        return severity_margin(torch.tensor(sizes, dtype=torch.float32), scale=scale)
    unknown = [pair.id for pair in pairs if pair.severity is None]
    if unknown:
        raise ValueError(
            f"margin={source}: {len(unknown)} pairs have no severity, first {unknown[0]}; use --loss dpo, "
            "--margin length, or pairs of nanoplan.synth"
        )
    name, unit = {"normalised": ("normalised", 100.0), "unit": ("normalised", 1.0), "raw": ("raw", 1.0)}[
        source
    ]
    severity = torch.tensor([unit * pair.severity[name] for pair in pairs], dtype=torch.float32)
    return severity_margin(severity, scale=scale)


def distribution(values: Iterable[float]) -> dict[str, float]:
    """Mean and quantiles, for people."""
    x = torch.as_tensor(list(values), dtype=torch.float64)
    shares = {"min": 0.0, "10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "max": 1.0}
    return {"mean": float(x.mean())} | {name: float(x.quantile(q)) for name, q in shares.items()}


def mismatches(pairs: list[Pair]) -> list[Trajectory]:
    """For each pair its prompt with a completion of the next pair that has another prompt: what KTO's z0 is
    estimated from. Chosen and rejected completions take turns.

    raises  ValueError if all prompts are the same
    """
    prompts = [tuple(pair.chosen.ids[: pair.num_prompt]) for pair in pairs]
    if len(set(prompts)) < 2:
        raise ValueError("loss=kto needs pairs of at least two prompts; its z0 compares across prompts")
    found = []
    for i, pair in enumerate(pairs):
        step = next(k for k in range(1, len(pairs)) if prompts[(i + k) % len(pairs)] != prompts[i])
        other = pairs[(i + step) % len(pairs)]
        side = other.sides[i % 2]
        new = slice(other.num_prompt, None)
        mixed = joined(pair.chosen.ids[: pair.num_prompt], side.ids[new])
        mixed.sampled[pair.num_prompt :] = side.sampled[new]
        found.append(mixed)
    return found


def fingerprint(pairs: list[Pair]) -> str:
    """A hash of all ids and masks, in order: which data a stored reference belongs to."""
    digest = hashlib.blake2b(digest_size=16)
    for pair in pairs:
        for side in pair.sides:
            digest.update(repr((side.ids, side.sampled)).encode())
    return digest.hexdigest()
