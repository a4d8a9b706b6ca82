"""PlanBench between text and PDDL: config files, prompts, and plans read out of answers, in two ways.

`read_official` is the benchmark's own extraction, silent skips included. `read_strict` reads one action a
line, stops at [PLAN END] and at the first action it cannot read, and reports all that it dropped.
Source: github.com/karthikv792/LLMs-Planning b008bc4 (MIT), its formats and rules, not its code.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from envs.base import clip
from envs.strips import Atom, Domain, Problem, Step

SYSTEM = "You are the planner assistant who comes up with correct plans."  # of the official chat calls
MAX_ANSWER_CHARS = 100_000  # what lies beyond is dropped; ours
MAX_DROPPED = 20  # lines of an answer that are reported as dropped; ours
MORE_BLOCKS = {  # names past the official twelve, for instances of up to 20 blocks; ours
    "m": "brown block",
    "n": "pink block",
    "o": "gray block",
    "p": "purple block",
    "q": "beige block",
    "r": "teal block",
    "s": "maroon block",
    "t": "olive block",
}
MORE_OBJECTS = {letter: f"object {letter}" for letter in MORE_BLOCKS}


@dataclass(frozen=True)
class Config:
    path: Path
    name: str  # "blocksworld_3"
    instance_dir: str  # below an instances/ folder
    domain_file: str
    template: str  # "instance-{}.pddl"
    start: int  # first instance
    end: int  # last instance of zero-shot prompts
    num_instances: int  # last instance there is
    intro: str  # ends with one newline
    actions: dict[str, str]  # PDDL name -> "stack the {} on top of the {}"
    predicates: dict[str, str]
    objects: dict[str, str]  # "a" -> "red block"

    @cached_property
    def lexicon(self) -> "Lexicon":
        return Lexicon(self)

    def action_text(self, step: Step) -> str:
        """A step in the prompt's words. Raises KeyError for words that the config does not have."""
        return self.actions[step[0]].format(*(self.objects[name] for name in step[1:]))

    def with_names(self, count: int) -> "Config":
        """The same with names for at least `count` objects. Raises ValueError past 20."""
        if count <= len(self.objects):
            return self
        more = MORE_BLOCKS if self.objects.get("a", "").endswith(" block") else MORE_OBJECTS
        objects = self.objects | {letter: text for letter, text in more.items() if letter not in self.objects}
        if count > len(objects):
            raise ValueError(f"{self.path}: {count} objects, names for {len(objects)}; add encoded_objects")
        return replace(self, objects=objects)


def read_config(path: Path) -> Config:
    """A config file: the part of YAML that PlanBench's use (words, literal blocks, maps of strings).
    Raises ValueError naming file, key and what was wanted."""
    if not path.is_file():
        there = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml"))) or "none"
        raise ValueError(f"{path} is missing; configs there: {there}; wanted PlanBench's plan-bench/configs")
    values = _top_level(path.read_text(encoding="utf-8"))

    def get(key: str, kind: type):
        value = values.get(key)
        if kind is dict:
            value = _flow_map(value or "")
        elif kind is int:
            value = int(value) if value and value.strip().isdigit() else None
        if not value:
            shown = str(values.get(key))[:40]
            raise ValueError(f"{path}: {key}={shown!r}, wanted {WANTED[kind]}; add the key")
        return value

    words = [get(key, str) for key in ("domain_name", "instance_dir", "domain_file", "instances_template")]
    numbers = [get(key, int) for key in ("start", "end", "n_instances")]
    maps = [get(key, dict) for key in ("actions", "predicates", "encoded_objects")]
    return Config(path, *words, *numbers, get("domain_intro", str), *maps)


WANTED = {str: "text", int: "a whole number", dict: 'a map {name: "text", ...}'}


def _top_level(text: str) -> dict[str, str]:
    """Keys at the start of a line -> their text; a literal block ("|") is dedented and ends with one
    newline, a line of comment is left out."""
    values: dict[str, str] = {}
    key, body = "", []
    for line in [*text.split("\n"), "end_of_file:"]:
        match = re.match(r"([A-Za-z_]\w*):(.*)", line)
        if match is None:
            body.append(line)
            continue
        if key:
            values[key] = _block(body[0].strip(), body[1:])
        key, body = match[1], [match[2]]
    return values


def _block(first: str, lines: list[str]) -> str:
    lines = [line for line in lines if not line.startswith("#")]
    if first != "|":
        return "\n".join([first, *lines]).strip()
    indent = next((len(line) - len(line.lstrip()) for line in lines if line.strip()), 0)
    return "\n".join(line[indent:] for line in lines).rstrip("\n ") + "\n"


def _flow_map(text: str) -> dict[str, str]:
    """{name: "text", "name": "text"} as a dict."""
    return {key: value for _, key, value in re.findall(r'("?)([\w-]+)\1\s*:\s*"([^"]*)"', text)}


def facts_text(atoms: Iterable[Atom], config: Config) -> str:
    """Facts in the prompt's words, sorted by their PDDL text: "A, B and C"."""
    texts = [
        config.predicates[atom[0]].format(*(config.objects[name] for name in atom[1:]))
        for atom in sorted(atoms, key=" ".join)
    ]
    return ", ".join(texts[:-1]) + (" and " if len(texts) > 1 else "") + texts[-1]


def _statement(problem: Problem, config: Config, ending: str) -> str:
    init, goal = facts_text(problem.init, config), facts_text(problem.goal, config)
    text = f"\n[STATEMENT]\nAs initial conditions I have that, {init}.\nMy goal is to have that {goal}."
    text += ending
    return text.replace("-", " ").replace("ontable", "on the table")


def prompt_zero_shot(problem: Problem, config: Config) -> str:
    """The official zero-shot prompt (t1_zero), byte for byte."""
    ask = "\n\nWhat is the plan to achieve my goal? Just give the actions in the plan."
    return config.intro + _statement(problem, config, ask)


def prompt_one_shot(problem: Problem, example: Problem, plan: list[Step], config: Config) -> str:
    """The official one-shot prompt (t1), byte for byte, with a solved example."""
    ask = "\n\nMy plan is as follows:\n\n[PLAN]"
    solved = "\n" + "".join(config.action_text(step) + "\n" for step in plan) + "[PLAN END]\n"
    return config.intro + _statement(example, config, ask + solved) + _statement(problem, config, ask)


def read_official(text: str, config: Config, domain: Domain) -> list[Step]:
    """The plan as PlanBench's evaluator reads it (spec/benchmarks.md 2.4, quirks and all).

    A line counts if an action's name is one of its words; the objects are those whose full name occurs
    anywhere in it, by first occurrence, each once; a line with another number of objects is skipped.
    Nothing ends the plan.
    """
    text = text.lower().strip()
    for name in domain.actions:
        text = text.replace(name.replace("-", " "), name)
    plan = []
    for line in text.split("\n"):
        words = line.split()
        action = next((action for name, action in domain.actions.items() if name in words), None)
        if action is None:
            continue
        found = sorted((line.index(name), name, key) for key, name in config.objects.items() if name in line)
        if len(found) == len(action.parameters):
            plan.append((action.name, *(key for _, _, key in found)))
    return plan


@dataclass(slots=True)
class Reading:
    steps: list[Step] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # line of the answer that each step stands on, from 1
    dropped: list[str] = field(default_factory=list)  # "line 3: 'text' (why)", at most MAX_DROPPED
    stopped: str = ""  # why reading ended before the end of the plan's text; "" if it did not


class Lexicon:
    """The patterns by which `read_strict` knows a config's actions and objects."""

    def __init__(self, config: Config):
        self.letters = {letter: letter for letter in config.objects}
        self.words = dict(self.letters)  # every spelling of an object in (action x y)
        texts = {letter: text.lower().split() for letter, text in config.objects.items()}
        if len({words[0] for words in texts.values()}) == len(texts):  # "red block": "red" is enough
            self.words |= {words[0]: letter for letter, words in texts.items()}
            heads = {words[0]: letter for letter, words in texts.items()}
            tails = {" ".join(words[1:]) for words in texts.values()} - {""}
            tail = "".join(rf"(?:[\s_-]+{re.escape(end)})?" for end in sorted(tails))
            self.name = re.compile(rf"(?<!\w)({'|'.join(heads)}){tail}(?!\w)")
        else:  # "object a": the whole name, however it is spaced
            heads = {words[-1]: letter for letter, words in texts.items()}
            first = "|".join(sorted({re.escape(" ".join(words[:-1])) for words in texts.values()}))
            self.name = re.compile(rf"(?<!\w)(?:{first})[\s_-]+({'|'.join(heads)})(?!\w)")
        self.heads = heads
        self.arity = {name: text.count("{}") for name, text in config.actions.items()}
        spelled = {name: _spelling(name, config.actions) for name in config.actions}
        self.spelled = {re.compile(pattern): name for name, pattern in spelled.items()}
        either = "|".join(sorted(spelled.values(), key=len, reverse=True))
        self.verb = re.compile(rf"(?<![\w-])(?:{either})(?!\w)")

    def action(self, word: str) -> str:
        """The PDDL name of a verb that `verb` matched."""
        return next(name for pattern, name in self.spelled.items() if pattern.fullmatch(word))


def _spelling(name: str, actions: Iterable[str]) -> str:
    """Pattern of a verb: "pick-up" is also "pick up", "pickup" and "pick the red block up", where none of
    the at most six words between is a verb of `actions`."""
    first, _, last = map(re.escape, name.partition("-"))
    if not last:
        return first
    verbs = "|".join(re.escape(other.partition("-")[0]) for other in actions)
    return rf"{first}[\s_-]?{last}|{first}\s(?:(?!(?:{verbs})\b)\w+\s){{1,6}}{last}"


_MARK = re.compile(r"^(?:[\s>•*#+-]|step\b|action\b|\d+\s*[.):\]-]|\d+\s|:)+")
_PLAIN = str.maketrans({"*": "", "`": "", "\u2013": " - ", "\u2014": " - "})  # dashes part words,
_PLAIN |= str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2212", "-"))  # hyphens join them
_MARKERS = {"[plan]", "[plan end]", "[statement]", "<think>", "</think>"}
_LINKS = {"from", "on", "onto", "top", "of"}


def read_strict(text: str, config: Config) -> Reading:
    """The plan of an answer: one action a line, the first verb of the line and the first names after it.

    Reads what lies after "</think>", before "[STATEMENT]", after the last "[PLAN]" there, before "[PLAN
    END]". Numbers and markdown are ignored, "red block" and "red" are the same, "put red down" is "put
    down red", `(stack a b)` and `(stack red blue)` are read. Lines without a verb are dropped; so are
    headings and introductions, which name no object. The plan stops at the first other line whose action
    lacks an object.
    """
    reading, lexicon = Reading(), config.lexicon
    plain = text[:MAX_ANSWER_CHARS].translate(_PLAIN).lower()
    start, end = _plan_span(plain)
    _drop_all(reading, 1, plain[:start])
    first = plain.count("\n", 0, start) + 1
    for number, line in enumerate(plain[start:end].split("\n"), start=first):
        line = line.strip()
        step, rest, why = _read_line(line, lexicon)
        if step:
            reading.steps.append(step)
            reading.lines.append(number)
            if lexicon.verb.search(rest):
                _drop(reading, number, rest, "one action a line")
        elif why and not _is_heading(line, lexicon, bool(reading.steps)):
            reading.stopped = f"line {number}: {clip(line, 60)!r} ({why})"
            _drop(reading, number, line, f"{why}; the plan stops here")
            break
        else:
            _drop(reading, number, line, "no action")
    _drop_all(reading, plain.count("\n", 0, end) + 1, plain[end:])
    if len(text) > MAX_ANSWER_CHARS:
        reading.dropped[MAX_DROPPED - 1 :] = [f"{len(text) - MAX_ANSWER_CHARS} characters (too long)"]
    return reading


def _plan_span(plain: str) -> tuple[int, int]:
    """Start and end of the plan among the characters of an answer; nothing where thinking never ends."""
    start = plain.rfind("</think>") + len("</think>") if "</think>" in plain else 0
    if "<think>" in plain[start:]:
        return len(plain), len(plain)
    end = _find(plain, "[statement]", start, len(plain))
    if "[plan]" in plain[start:end]:
        start = plain.rfind("[plan]", start, end) + len("[plan]")
    return start, _find(plain, "[plan end]", start, end)


def _find(plain: str, mark: str, start: int, end: int) -> int:
    """Where `mark` first stands between start and end; end if it does not."""
    found = plain.find(mark, start, end)
    return end if found < 0 else found


def _read_line(line: str, lexicon: Lexicon) -> tuple[Step | None, str, str]:
    """The step of a line, what follows it, and why its verb gives no step ("" if there is no verb)."""
    line = line.lstrip(" \t>•#+-")
    match = lexicon.verb.search(line)
    if match is None:
        return None, "", ""
    action = lexicon.action(match[0])
    need, rest = lexicon.arity[action], line[match.end() :]
    if line[: match.start()].rstrip().endswith("(") and ")" in rest:
        inside, _, after = rest.partition(")")
        names = [lexicon.words.get(word) for word in inside.split()]
        if len(names) == need and all(names):
            return (action, *names), after, ""
    following = lexicon.verb.search(rest)
    span = rest[: following.start()] if following else rest
    found = list(lexicon.name.finditer(match[0] + span))  # "pick the red block up" holds its object
    if len(found) >= need:
        names = [lexicon.heads[name[1]] for name in found[:need]]
        return (action, *names), rest[max(0, found[need - 1].end() - len(match[0])) :], ""
    names = [word for word in re.findall(r"\w+", span) if word not in _LINKS]
    if len(names) == need and all(name in lexicon.letters for name in names):
        return (action, *names), rest[len(span) :], ""
    return None, rest, f"{action} wants {need} object{'s' * (need > 1)}, found {len(found)}"


def _is_heading(line: str, lexicon: Lexicon, started: bool) -> bool:
    """A line that speaks of an action without meaning one: names no object, and is a heading ("...:") or,
    before the first step, a sentence without a number or bullet."""
    if lexicon.name.search(line):
        return False
    return line.endswith(":") or (not started and _MARK.match(line) is None and not line.startswith("("))


def _drop_all(reading: Reading, first: int, text: str) -> None:
    """Report the lines of a text outside of the plan, without marks that are alone on a line."""
    for number, line in enumerate(text.split("\n", MAX_DROPPED + 1), start=first):
        if line.strip() not in _MARKERS:
            _drop(reading, number, line.strip(), "outside of the plan")


def _drop(reading: Reading, number: int, line: str, why: str) -> None:
    if line and len(reading.dropped) < MAX_DROPPED:
        reading.dropped.append(f"line {number}: {clip(line, 60)!r} ({why})")
