"""Blocksworld as towers: the optimal plan of an instance, uniform random states, and the Mystery twin.

A state is a dict block -> what lies below it, "" for the table. One move (a block from where it is to
the table or onto a clear block) is two steps of a plan.
Sources: Slaney and Thiébaux, "Blocks World revisited" (2001), for what makes a move safe and for uniform
states; PlanBench (arXiv:2206.10498) for the two domains and their names.
"""

import heapq
import random
from functools import cache

from envs.strips import Atom, Domain, Problem, Step

TABLE = ""
MYSTERY = {  # Blocksworld's word -> Mystery's
    "pick-up": "attack",
    "put-down": "succumb",
    "stack": "overcome",
    "unstack": "feast",
    "ontable": "planet",
    "clear": "province",
    "handempty": "harmony",
    "holding": "pain",
    "on": "craves",
}
WORDS = {"blocksworld-4ops": {word: word for word in MYSTERY}, "mystery-4ops": MYSTERY}  # by domain name
State = dict[str, str]


def words_of(domain: Domain) -> dict[str, str]:
    """Blocksworld's word -> this domain's. Raises ValueError for other domains."""
    if domain.name not in WORDS:
        raise ValueError(f"domain={domain.name!r} is no Blocksworld; wanted {' or '.join(WORDS)}")
    return WORDS[domain.name]


def towers(problem: Problem) -> State:
    """The initial state. Raises ValueError if it is not one of towers with an empty hand."""
    words = words_of(problem.domain)
    below: State = {}
    for atom in sorted(problem.init):
        if atom[0] == words["ontable"]:
            below[atom[1]] = TABLE
        elif atom[0] == words["on"]:
            below[atom[1]] = atom[2]
    if not set(problem.objects) <= below.keys() or atoms(below, words) != problem.init:
        raise ValueError(f"{problem.name}: the initial state is not made of towers with an empty hand")
    order(below)
    return below


def atoms(below: State, words: dict[str, str]) -> frozenset[Atom]:
    """All facts of a state with an empty hand."""
    found: set[Atom] = {(words["handempty"],)}
    for block, under in below.items():
        found.add((words["ontable"], block) if under == TABLE else (words["on"], block, under))
        if block not in below.values():
            found.add((words["clear"], block))
    return frozenset(found)


def order(below: State) -> list[str]:
    """Blocks, each after the one below it. Raises ValueError if blocks lie on each other in a circle."""
    placed: dict[str, None] = {}
    while len(placed) < len(below):
        ready = [b for b, under in below.items() if b not in placed and (under == TABLE or under in placed)]
        if not ready:
            raise ValueError(f"blocks lie on each other in a circle: {sorted(below.keys() - placed.keys())}")
        placed |= dict.fromkeys(ready)
    return list(placed)


def wanted(problem: Problem) -> State:
    """The goal as block -> what must lie below it. Raises ValueError for goals other than `on` and
    `ontable`, and for goals that no state meets."""
    words = words_of(problem.domain)
    target: State = {}
    for atom in sorted(problem.goal):
        if atom == (words["handempty"],):
            continue
        if atom[0] not in (words["on"], words["ontable"]):
            raise ValueError(f"{problem.name}: goal atom {atom}, wanted {words['on']} or {words['ontable']}")
        under = atom[2] if atom[0] == words["on"] else TABLE
        if target.setdefault(atom[1], under) != under:
            raise ValueError(f"{problem.name}: the goal puts {atom[1]!r} in two places; no plan reaches it")
    blocks = [under for under in target.values() if under != TABLE]
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"{problem.name}: the goal puts two blocks on one; no plan reaches it")
    order({block: TABLE for block in problem.objects} | target)
    return target


def must_move(below: State, target: State) -> tuple[set[str], int]:
    """Blocks that every plan moves at least once, and a lower bound on its moves.

    A block moves if it lies wrong, lies on one that moves, or keeps the right block off its place. It
    moves twice if its place is a block further down in its own tower.
    """
    on_top = {under: block for block, under in target.items() if under != TABLE}
    moving: set[str] = set()
    twice = 0
    for block in order(below):
        under = below[block]
        wrong = target.get(block, under) != under
        if wrong or under in moving or on_top.get(under, block) != block:
            moving.add(block)
            deeper = under
            while deeper != TABLE and deeper != target.get(block):
                deeper = below[deeper]
            twice += deeper != TABLE
    return moving, len(moving) + twice


def _moves(below: State, target: State, moving: set[str]) -> list[tuple[str, str]]:
    """The moves worth trying: one that is final if there is any (it is never worse to do it at once),
    else each block that must move, to the table."""
    covered = set(below.values())
    free = sorted(block for block in moving if block not in covered)
    for block in free:
        under = target.get(block, TABLE)
        if under == TABLE or (under not in covered and under not in moving):
            return [(block, under)]
    return [(block, TABLE) for block in free if below[block] != TABLE]


def optimal_plan(problem: Problem) -> list[Step]:
    """A shortest plan, the same one every time. A* over moves; 15 blocks take milliseconds.

    raises  ValueError for a domain, state or goal that is not Blocksworld's (see towers, wanted)
    """
    start, target = towers(problem), wanted(problem)
    blocks = sorted(start)
    moving, bound = must_move(start, target)
    best = {tuple(start[b] for b in blocks): 0}
    queue = [(bound, 0, 0, start, ())]  # least moves in all, -moves so far, a tie-breaker, state, moves
    count = 0
    while queue:
        _, _, _, below, path = heapq.heappop(queue)
        moving, bound = must_move(below, target)
        if not bound:
            return [step for move in path for step in _steps(move, words_of(problem.domain))]
        for block, under in _moves(below, target, moving):
            after = below | {block: under}
            key = tuple(after[b] for b in blocks)
            if best.get(key, len(path) + 2) > len(path) + 1:
                best[key] = len(path) + 1
                bound = must_move(after, target)[1]
                count += 1
                move = (block, below[block], under)
                moves = (*path, move)
                heapq.heappush(queue, (len(moves) + bound, -len(moves), count, after, moves))
    raise AssertionError(f"{problem.name}: every goal that passes wanted() can be reached")


def _steps(move: tuple[str, str, str], words: dict[str, str]) -> list[Step]:
    block, source, to = move
    first = (words["pick-up"], block) if source == TABLE else (words["unstack"], block, source)
    second = (words["put-down"], block) if to == TABLE else (words["stack"], block, to)
    return [first, second]


def twin(problem: Problem, domain: Domain) -> Problem:
    """The same instance in the other domain's words, e.g. a Blocksworld instance in Mystery's."""
    ours, theirs = words_of(problem.domain), words_of(domain)
    back = {word: theirs[plain] for plain, word in ours.items()}
    init = frozenset((back[atom[0]], *atom[1:]) for atom in problem.init)
    goal = frozenset((back[atom[0]], *atom[1:]) for atom in problem.goal)
    return Problem(problem.name, domain, problem.objects, init, goal)


@cache
def num_states(loose: int, grounded: int = 0) -> int:
    """Number of ways to finish a state from `loose` towers without a place and `grounded` on the table;
    num_states(n) is the number of states of n blocks: 1, 3, 13, 73, 501, ..."""
    if loose == 0:
        return 1
    stacked = (loose - 1 + grounded) * num_states(loose - 1, grounded)
    return stacked + num_states(loose - 1, grounded + 1)


def random_state(blocks: list[str], rng: random.Random) -> State:
    """A state of these blocks, each possible state equally likely."""
    below: State = {}
    loose = [(block, block) for block in blocks]  # (top, bottom) of towers without a place
    grounded: list[tuple[str, str]] = []
    while loose:
        top, bottom = loose.pop()
        on_table = num_states(len(loose), len(grounded) + 1)
        if rng.randrange(num_states(len(loose) + 1, len(grounded))) < on_table:
            below[bottom] = TABLE
            grounded.append((top, bottom))
            continue
        i = rng.randrange(len(loose) + len(grounded))
        pile, i = (loose, i) if i < len(loose) else (grounded, i - len(loose))
        below[bottom] = pile[i][0]
        pile[i] = (top, pile[i][1])
    return {block: below[block] for block in blocks}


def random_problem(name: str, domain: Domain, blocks: list[str], rng: random.Random) -> Problem:
    """Two random states, of the second only its `on` facts as goal, as in PlanBench's instances: never a
    goal that is empty or holds from the start. Needs two blocks."""
    if len(blocks) < 2:
        raise ValueError(f"blocks={len(blocks)}: one block has no goal to reach; wanted at least 2")
    words = words_of(domain)
    while True:
        init = atoms(random_state(blocks, rng), words)
        end = random_state(blocks, rng)
        goal = frozenset((words["on"], block, under) for block, under in end.items() if under != TABLE)
        if not goal <= init:
            return Problem(name, domain, tuple(blocks), init, goal)
