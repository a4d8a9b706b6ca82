"""STRIPS: untyped PDDL files as records, and a simulator that says which step of a plan fails and why.

Reads what PlanBench's domain and instance files use: positive preconditions and goals, add and delete
effects; everything else is an error that names file and line. Names are lower-cased, as PDDL wants it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

Atom = tuple[str, ...]  # ("on", "a", "b")
Step = tuple[str, ...]  # ("stack", "a", "b")


@dataclass(frozen=True, slots=True)
class Action:
    name: str
    parameters: tuple[str, ...]  # "?ob"
    needs: tuple[Atom, ...]  # over the parameters, in the file's order
    adds: tuple[Atom, ...]
    deletes: tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Domain:
    name: str
    arity: dict[str, int]  # predicate -> number of arguments
    actions: dict[str, Action]  # in the file's order


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    domain: Domain
    objects: tuple[str, ...]  # in the file's order
    init: frozenset[Atom]
    goal: frozenset[Atom]


@dataclass(frozen=True, slots=True)
class Run:
    steps: int  # steps of the plan
    executed: int  # steps executed before the first that fails; = steps if none does
    missing: tuple[Atom, ...]  # preconditions that do not hold at the failing step; () where it has none
    why: str  # why the failing step fails; "" if all were executed
    unmet: tuple[Atom, ...]  # goal atoms that do not hold in the state reached, sorted

    @property
    def valid(self) -> bool:
        """Every step was executed and every goal atom holds in the end."""
        return not self.why and not self.unmet


def show(atom: Atom) -> str:
    """ "(on a b)" of an atom or step."""
    return f"({' '.join(atom)})"


def simulate(problem: Problem, plan: list[Step]) -> Run:
    """Execute a plan up to the first step that fails. Never raises on what the plan holds."""
    state, why, missing = set(problem.init), "", ()
    executed = 0
    for step in plan:
        why, missing = _apply(problem, state, step)
        if why:
            break
        executed += 1
    unmet = tuple(sorted(problem.goal - state))
    return Run(len(plan), executed, missing, why, unmet)


def _apply(problem: Problem, state: set[Atom], step: Step) -> tuple[str, tuple[Atom, ...]]:
    """Change `state` by a step, or leave it and say why the step fails and which preconditions lack."""
    action = problem.domain.actions.get(step[0]) if step else None
    if action is None:
        known = ", ".join(problem.domain.actions)
        return f"no action {' '.join(step)[:40]!r}; actions: {known}", ()
    if len(step) != len(action.parameters) + 1:
        return f"{action.name} takes {len(action.parameters)} objects, not {len(step) - 1}", ()
    strangers = [name for name in step[1:] if name not in problem.objects]
    if strangers:
        return f"no object {strangers[0][:40]!r} in this instance", ()
    bound = dict(zip(action.parameters, step[1:], strict=True))
    missing = tuple(atom for atom in ground(action.needs, bound) if atom not in state)
    if missing:
        return "not true: " + ", ".join(map(show, missing)), missing
    state.difference_update(ground(action.deletes, bound))
    state.update(ground(action.adds, bound))
    return "", ()


def ground(atoms: tuple[Atom, ...], bound: dict[str, str]) -> list[Atom]:
    """Atoms with their parameters replaced by objects."""
    return [(atom[0], *(bound.get(name, name) for name in atom[1:])) for atom in atoms]


class Reader:
    """A PDDL file as nested lists whose leaves are words; errors name file and line."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path} is missing; wanted a PDDL file")
        self.lines: dict[int, int] = {}  # id of a list -> line of its "("
        self.tree = self._parse(path.read_text(encoding="utf-8", errors="replace"))

    def error(self, node, wanted: str) -> ValueError:
        """An error at a list that was read; `node` may be any part of the tree."""
        shown = show_tree(node)
        return ValueError(f"{self.path} line {self.lines.get(id(node), 1)}: {shown[:60]!r}, wanted {wanted}")

    def _parse(self, text: str) -> list:
        stack: list[list] = [[]]
        for number, line in enumerate(text.lower().split("\n"), start=1):
            for token in re.findall(r"[()]|[^\s()]+", line.partition(";")[0]):
                if token == "(":
                    stack.append([])
                    self.lines[id(stack[-1])] = number
                elif token == ")":
                    if len(stack) == 1:
                        raise ValueError(f"{self.path} line {number}: ')' closes nothing; remove it")
                    closed = stack.pop()
                    stack[-1].append(closed)
                elif len(stack) == 1:
                    raise ValueError(f"{self.path} line {number}: {token[:40]!r} outside of (define ...)")
                else:
                    stack[-1].append(token)
        if len(stack) > 1:
            opened = self.lines[id(stack[-1])]
            raise ValueError(f"{self.path} line {opened}: '(' is never closed; the file is cut or broken")
        if len(stack[0]) != 1 or stack[0][0][:1] != ["define"]:
            raise ValueError(f"{self.path}: wanted one (define ...), found {len(stack[0])} lists")
        return stack[0][0]

    def sections(self, keys: tuple[str, ...]) -> dict[str, list]:
        """The first section of each key; raises if one of `keys` is not there."""
        found: dict[str, list] = {}
        for part in self.tree[1:]:
            if isinstance(part, list) and part and isinstance(part[0], str):
                found.setdefault(part[0], part)
        for key in keys:
            if key not in found:
                raise ValueError(f"{self.path}: ({key} ...) is missing; found {', '.join(found)[:80]}")
        return found

    def atoms(self, node, arity: dict[str, int], names, *, parent=None) -> tuple[list[Atom], list[Atom]]:
        """Atoms of "(p x)" or of "(and ...)", those under "not" apart.

        names  the arguments that may occur
        raises ValueError for other connectives, unknown predicates and arguments, wrong counts
        """
        if not isinstance(node, list) or not node:
            raise self.error(parent if parent is not None else node, "a list of atoms")
        if node[0] == "and":
            pairs = [self.atoms(part, arity, names, parent=node) for part in node[1:]]
            return [atom for yes, _ in pairs for atom in yes], [atom for _, no in pairs for atom in no]
        if node[0] == "not" and len(node) == 2:
            return [], self.atoms(node[1], arity, names, parent=node)[0]
        if any(isinstance(part, list) for part in node) or node[0] not in arity:
            raise self.error(node, f"an atom of {', '.join(arity)}")
        if len(node) - 1 != arity[node[0]]:
            raise self.error(node, f"{arity[node[0]]} arguments of {node[0]}")
        for name in node[1:]:
            if name not in names:
                raise self.error(node, f"arguments among {' '.join(names)[:60]}")
        return [tuple(node)], []


def show_tree(node) -> str:
    """Nested lists as PDDL text."""
    if not isinstance(node, list):
        return str(node)
    return "(" + " ".join(show_tree(part) for part in node[:12]) + ")"


def read_domain(path: Path) -> Domain:
    """A domain file. Raises ValueError naming file and line."""
    reader = Reader(path)
    found = reader.sections(("domain", ":predicates"))
    arity = {}
    for node in found[":predicates"][1:]:
        if not isinstance(node, list) or not node or not all(isinstance(part, str) for part in node):
            raise reader.error(found[":predicates"], "predicates like (on ?x ?y)")
        arity[node[0]] = len(node) - 1
    actions = {}
    for node in reader.tree[1:]:
        if isinstance(node, list) and node[:1] == [":action"]:
            action = _action(reader, node, arity)
            actions[action.name] = action
    if not actions:
        raise ValueError(f"{path}: no (:action ...); wanted at least one")
    return Domain(_name(reader, found["domain"]), arity, actions)


def _action(reader: Reader, node: list, arity: dict[str, int]) -> Action:
    fields = dict(zip(node[2::2], node[3::2], strict=False)) if all(map(_word, node[2::2])) else {}
    for key in (":parameters", ":precondition", ":effect"):
        if not isinstance(fields.get(key), list):
            raise reader.error(node, f"an action's {key} (...)")
    parameters = tuple(fields[":parameters"])
    needs, forbidden = reader.atoms(fields[":precondition"], arity, parameters, parent=node)
    if forbidden:
        raise reader.error(fields[":precondition"], "no (not ...): plain STRIPS")
    adds, deletes = reader.atoms(fields[":effect"], arity, parameters, parent=node)
    return Action(str(node[1]), parameters, tuple(needs), tuple(adds), tuple(deletes))


def _word(part) -> bool:
    return isinstance(part, str)


def _name(reader: Reader, node: list) -> str:
    if len(node) != 2 or not _word(node[1]):
        raise reader.error(node, f"({node[0]} NAME)")
    return node[1]


def read_problem(path: Path, domain: Domain) -> Problem:
    """An instance file of `domain`. Raises ValueError naming file and line."""
    reader = Reader(path)
    found = reader.sections(("problem", ":domain", ":objects", ":init", ":goal"))
    if _name(reader, found[":domain"]) != domain.name:
        raise reader.error(found[":domain"], f"the domain {domain.name}")
    objects = tuple(found[":objects"][1:])
    if not all(map(_word, objects)) or len(set(objects)) != len(objects) or not objects:
        raise reader.error(found[":objects"], "names of objects, each once")
    init, absent = reader.atoms(["and", *found[":init"][1:]], domain.arity, objects, parent=found[":init"])
    if len(found[":goal"]) != 2:
        raise reader.error(found[":goal"], "(:goal (and ...))")
    goal, forbidden = reader.atoms(found[":goal"][1], domain.arity, objects, parent=found[":goal"])
    if absent or forbidden:
        raise reader.error(found[":init"] if absent else found[":goal"], "no (not ...): plain STRIPS")
    if not goal:
        raise reader.error(found[":goal"], "at least one goal atom")
    return Problem(_name(reader, found["problem"]), domain, objects, frozenset(init), frozenset(goal))
