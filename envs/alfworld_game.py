"""ALFWorld's game files (game.tw-pddl) as data: what is where, what can be done with it, and the goal.

One JSON object: "pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough". The simulator's rules
are written in Python (envs/alfworld_sim.py), so a game that brings other rules or another wording is
refused, by name of the action or rule that differs. Names of things follow ALFWorld's demangler.
Source: ALFWorld (arXiv:2010.03768), games of release 2.1.2.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from envs.alfworld_text import DOMAIN, RULES, TEMPLATES

KEYS = {"pddl_domain": str, "grammar": str, "pddl_problem": str, "walkthrough": list}
STATIC = (  # facts that no action changes: predicate -> number of arguments is in ARITY
    *("receptacletype", "objecttype", "cancontain", "receptacleatlocation", "openable", "pickupable"),
    *(
        "cleanable",
        "heatable",
        "coolable",
        "sliceable",
        "toggleable",
        "isreceptacleobject",
        "inreceptacleobject",
    ),
)
ARITY = {
    **dict.fromkeys(("receptacletype", "objecttype", "cancontain", "receptacleatlocation"), 2),
    **dict.fromkeys(("inreceptacleobject", "inreceptacle", "objectatlocation", "atlocation", "holds"), 2),
    **dict.fromkeys(
        ("openable", "opened", "pickupable", "cleanable", "heatable", "coolable", "sliceable"), 1
    ),
    **dict.fromkeys(("toggleable", "isreceptacleobject", "isclean", "ishot", "iscool", "issliced"), 1),
    **dict.fromkeys(("istoggled", "ison", "holdsany", "checked"), 1),
}
IGNORED = ("distance", "=", "total-cost")  # costs, which the text world does not show


class State(NamedTuple):
    """A moment of a game. It is never changed in place, so a copy is the same object.

    Things are numbers into Game.names; a location is its id.
    """

    at: str  # the agent's location
    held: int  # object in the agent's hand; -1: none
    inside: frozenset[tuple[int, int]]  # (object, receptacle)
    taken: frozenset[tuple[int, int]]  # (object, receptacle) that it was taken from and not put back to
    near: frozenset[tuple[int, str]]  # (object, location) of an object that lies there
    opened: frozenset[int]
    clean: frozenset[int]
    hot: frozenset[int]
    cool: frozenset[int]
    sliced: frozenset[int]
    toggled: frozenset[int]


@dataclass(frozen=True, slots=True)
class Query:
    """A goal: values for all variables so that every atom holds and no pair is equal."""

    atoms: tuple[
        tuple, ...
    ]  # (predicate, argument, ...); an argument is a variable "?o1", a number or a word
    differ: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Game:
    """A game file. Shared by all environments that play it, read-only."""

    path: str
    task: str  # "put a hot mug in sidetable."
    names: tuple[str, ...]  # "cabinet 6", by number; numbers follow the sorted ids, as texts list things
    facts: dict[str, frozenset[tuple]]  # static predicate -> tuples of numbers and words
    location: dict[int, str]  # receptacle -> its location
    here: dict[str, tuple[int, ...]]  # location -> its receptacles
    kind: dict[int, str]  # receptacle or object -> its type, "fridgetype"
    uses: dict[str, frozenset[str]]  # "CleanObject" -> types that it can be done with
    start: State
    goal: Query
    walkthrough: tuple[str, ...]

    def has(self, predicate: str, thing: int) -> bool:
        """Whether a static fact about one thing holds."""
        return (thing,) in self.facts[predicate]


def read_game(path: str | Path) -> Game:
    """A game file. Raises ValueError naming the file and what was wanted."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing; wanted a game.tw-pddl")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no JSON: {error}; wanted a game.tw-pddl, the file is cut or broken"
        ) from None
    for key, kind in KEYS.items():
        if not isinstance(data, dict) or not isinstance(data.get(key), kind):
            raise ValueError(f'{path}: no {kind.__name__} under "{key}"; wanted a game.tw-pddl')
    walkthrough = tuple(data["walkthrough"])
    if not all(isinstance(command, str) for command in walkthrough):
        raise ValueError(f"{path}: walkthrough={str(walkthrough)[:60]}, wanted a list of commands")
    try:
        uses = check_domain(data["pddl_domain"])
        task = check_grammar(data["grammar"])
        return _game(str(path), task, data["pddl_problem"], uses, walkthrough)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(text: str, what: str) -> list:
    """PDDL text, "(define ...)", as nested lists of lower-case words; `what` names it in errors."""
    stack: list[list] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text).lower()):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise ValueError(f"{what}: a ')' closes nothing; the file is broken")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    if len(stack) > 1 or len(stack[0]) != 1 or stack[0][0][:1] != ["define"]:
        raise ValueError(
            f"{what}: wanted one (define ...) with as many '(' as ')'; the file is cut or broken"
        )
    return stack[0][0]


def _section(tree: list, key: str, what: str) -> list:
    """What follows the key in the first list "(key ...)"."""
    for part in tree[1:]:
        if isinstance(part, list) and part[:1] == [key]:
            return part[1:]
    raise ValueError(f"{what}: ({key} ...) is missing")


def _game(path: str, task: str, problem: str, uses: dict, walkthrough: tuple[str, ...]) -> Game:
    tree = parse(problem, "pddl_problem")
    facts: dict[str, set[tuple]] = {predicate: set() for predicate in ARITY}
    for fact in _section(tree, ":init", "pddl_problem"):
        if not isinstance(fact, list) or not fact:
            raise ValueError(f"pddl_problem (:init): {str(fact)[:40]!r}, wanted facts")
        if fact[0] in IGNORED:
            continue
        if ARITY.get(fact[0]) != len(fact) - 1 or not all(isinstance(word, str) for word in fact):
            raise ValueError(f"pddl_problem (:init): {str(fact)[:80]}, wanted a fact of ALFWorld's domain")
        facts[fact[0]].add(tuple(fact[1:]))
    ids, names = demangle(word for rows in facts.values() for row in rows for word in row)
    number = {id: i for i, id in enumerate(ids)}
    things = {id for id, _ in facts["objecttype"] | facts["receptacletype"]}

    def known(row: tuple[str, ...]) -> tuple:
        return tuple(number[word] if word in things else word for word in row)

    rows = {predicate: frozenset(map(known, facts[predicate])) for predicate in ARITY}
    for predicate in ("inreceptacle", "receptacleatlocation", "receptacletype", "objectatlocation"):
        for row in rows[predicate]:
            if not isinstance(row[0], int):
                raise ValueError(
                    f"pddl_problem (:init): {row[0][:60]!r} in {predicate} has no type; give it one"
                )
    if len(rows["atlocation"]) != 1:
        raise ValueError(f"pddl_problem: {len(rows['atlocation'])} (atLocation agent ...), wanted one")
    location = dict(rows["receptacleatlocation"])
    if len(location) != len(rows["receptacleatlocation"]) or not location:
        raise ValueError("pddl_problem: wanted one (receptacleAtLocation ...) for each receptacle")
    ((_, at),) = rows["atlocation"]
    held = [row[1] for row in rows["holds"]]
    flags = [frozenset(thing for (thing,) in rows[name]) for name in _FLAGS]
    state = State(
        at, held[0] if held else -1, rows["inreceptacle"], frozenset(), rows["objectatlocation"], *flags
    )
    here: dict[str, list[int]] = {}
    for receptacle in sorted(location):
        here.setdefault(location[receptacle], []).append(receptacle)
    goal = read_goal(_section(tree, ":goal", "pddl_problem"), number, things)
    return Game(
        path,
        task,
        names,
        {predicate: rows[predicate] for predicate in STATIC},
        location,
        {spot: tuple(receptacles) for spot, receptacles in here.items()},
        dict(rows["receptacletype"]) | dict(rows["objecttype"]),
        uses,
        state,
        goal,
        walkthrough,
    )


_FLAGS = ("opened", "isclean", "ishot", "iscool", "issliced", "istoggled")


def demangle(words: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Sorted ids among the words of all facts, and their names.

    An id is "cabinet_bar__plus_00_...": of n ids with one base the first sorted is called "cabinet n", the
    last "cabinet 1"; "basin" is added to the base of an id that contains it.
    """
    ids = sorted({word for word in words if "_bar_" in word})
    bases = [id.split("_bar_", 1)[0] + ("basin" if "basin" in id else "") for id in ids]
    left = Counter(bases)
    names = []
    for base in bases:
        names.append(f"{base} {left[base]}")
        left[base] -= 1
    return ids, tuple(names)


def read_goal(goal: list, number: dict[str, int], things: set[str]) -> Query:
    """A goal of "and", "exists", atoms and "(not (= ?a ?b))" as one query. Raises ValueError for others."""
    atoms: list[tuple] = []
    differ: list[tuple[str, str]] = []
    scopes = 0

    def walk(node, bound: dict[str, str]) -> None:
        nonlocal scopes
        if not isinstance(node, list) or not node:
            raise ValueError(
                f"pddl_problem (:goal): {str(node)[:60]!r}, wanted (and ...), (exists ...) or an atom"
            )
        if node[0] == "and":
            for part in node[1:]:
                walk(part, bound)
        elif node[0] == "exists" and len(node) == 3:
            scopes += 1
            own = {
                word: f"{word}/{scopes}" for word in node[1] if isinstance(word, str) and word.startswith("?")
            }
            walk(node[2], bound | own)
        elif node[0] == "not" and len(node) == 2 and node[1][:1] == ["="] and len(node[1]) == 3:
            differ.append((value(node[1][1], bound), value(node[1][2], bound)))
        elif ARITY.get(node[0]) == len(node) - 1:
            atoms.append((node[0], *(value(word, bound) for word in node[1:])))
        else:
            raise ValueError(f"pddl_problem (:goal): {str(node)[:60]!r}, wanted an atom of ALFWorld's domain")

    def value(word, bound: dict[str, str]):
        if not isinstance(word, str) or (word.startswith("?") and word not in bound):
            raise ValueError(
                f"pddl_problem (:goal): {str(word)[:40]!r}, wanted a variable that exists (...) names"
            )
        return bound.get(word, number[word] if word in things else word)

    for part in goal:
        walk(part, {})
    if not atoms or any(word not in {w for atom in atoms for w in atom} for pair in differ for word in pair):
        raise ValueError("pddl_problem (:goal): wanted at least one atom, and atoms for all variables")
    return Query(tuple(atoms), tuple(differ))


@lru_cache(maxsize=8)
def check_domain(text: str) -> dict[str, frozenset[str]]:
    """The types that cleaning, heating, cooling and slicing are done with, of a domain whose actions are
    otherwise the simulator's. Raises ValueError naming an action that differs."""
    actions, uses = _actions(text)
    wanted, _ = _actions(DOMAIN)
    for name, action in wanted.items():
        if actions.get(name) != action:
            found = "is missing" if name not in actions else "has other conditions or effects"
            raise ValueError(f"pddl_domain: action {name} {found}; wanted the rules of release 2.1.2")
    return uses


def _actions(text: str) -> tuple[dict[str, tuple], dict[str, frozenset[str]]]:
    """Actions of a domain in a form that is equal for equal rules, and the types in their "or"s."""
    tree = parse(text, "pddl_domain")
    types = set(map(str, _section(tree, ":types", "pddl_domain")))
    proper = {name.lower(): name for name in TEMPLATES}
    actions, uses = {}, {}
    for node in tree[1:]:
        if isinstance(node, list) and node[:1] == [":action"] and str(node[1]) in proper:
            name = proper[node[1]]
            fields = dict(zip(node[2::2], node[3::2], strict=False))
            kinds: set[str] = set()
            rules = [_canonical(fields.get(key, []), types, kinds) for key in (":precondition", ":effect")]
            actions[name] = (tuple(fields.get(":parameters", [])), *rules)
            uses[name] = frozenset(kinds)
    return actions, uses


def _canonical(node, types: set[str], kinds: set[str]):
    """A condition or effect without order, costs and notes. Types that an "or" allows are put into `kinds`;
    an "exists" over a type that is not declared can never hold and is dropped."""
    if not isinstance(node, list) or not node:
        return ("and",)
    if node[0] == "exists":
        declared = [str(word) for word in node[1] if not str(word).startswith("?") and word != "-"]
        if not set(declared) <= types:
            return ("or",)
        return ("exists", tuple(map(str, node[1])), _canonical(node[2], types, kinds))
    if node[0] not in ("and", "or", "not", "when"):
        return tuple(map(str, node))
    if node[0] == "or" and all(part[0] in ("receptacletype", "objecttype") for part in node[1:]):
        kinds.update(part[2] for part in node[1:])
        return ("one of", node[1][0], node[1][1])
    parts = [_canonical(part, types, kinds) for part in node[1:] if part[0] not in ("increase", "checked")]
    parts = [part for part in parts if part != ("or",)]
    if node[0] in ("and", "or"):
        return parts[0] if len(parts) == 1 else (node[0], *sorted(parts, key=repr))
    return (node[0], *parts)


def check_grammar(text: str) -> str:
    """The goal sentence of a grammar whose commands and texts are the simulator's. Raises ValueError naming
    a command or rule that differs."""
    templates = dict(re.findall(r'action (\w+) \{\s*template :: "(.*?)";', text))
    for name, template in TEMPLATES.items():
        if templates.get(name) != template:
            raise ValueError(
                f"grammar: the command of {name} is {str(templates.get(name))[:60]!r}, wanted {template!r}; "
                "only games of release 2.1.2 and later fit"
            )
    try:
        rules = _rules(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise ValueError(f"grammar: a block of rules is no JSON object: {error}") from None
    for name, wanted in RULES.items():
        if _alternatives(rules.get(name)) != wanted:
            raise ValueError(f"grammar: the rule {name!r} has another text; wanted that of release 2.1.2")
    task = _alternatives(rules.get("task"))
    if not task or not task[0][1].startswith("Your task is to: "):
        raise ValueError('grammar: no rule "task" with "Your task is to: ..."')
    return task[0][1].removeprefix("Your task is to: ")


def _rules(text: str) -> dict[str, list]:
    """The rules of all blocks of a grammar."""
    rules: dict[str, list] = {}
    for block in re.findall(r'grammar :: """(.*?)"""', text, flags=re.DOTALL):
        rules |= json.loads(block)
    return rules


def _alternatives(rule) -> list[tuple[str, str]]:
    if not isinstance(rule, list) or not all(isinstance(row, dict) for row in rule):
        return []
    return [(str(row.get("condition", "")), str(row.get("rhs", ""))) for row in rule]
