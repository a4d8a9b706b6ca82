"""ALFWorld's text world in Python: observation texts, admissible commands and goal as TextWorld gives them.

A State is never changed, so taking it back or branching costs nothing. Quirks are kept: one cannot go to a
receptacle where one already stands, "use" works on a lamp in a closed receptacle and never turns it off,
heating and cooling need no opening, only a held object can be examined.
Source: behaviour of TextWorld 1.7.0 on ALFWorld's games; tests/test_alfworld.py compares the two.
"""

from collections.abc import Iterator

from envs.alfworld_game import Game, Query, State
from envs.alfworld_text import HELP

NOTHING = "Nothing happens."
WELCOME = "-= Welcome to TextWorld, ALFRED! =-\n\n{look}\n\nYour task is to: {task}"
MIDDLE = "You are in the middle of a room. Looking quickly around you, you see {list}."
Action = tuple[str, int, int]  # (verb, thing, other thing); -1 where there is none


def opening(game: Game) -> str:
    """The first observation, with the goal sentence."""
    if game.start.at in game.here:
        look = _look(game, game.start)
    else:
        look = MIDDLE.format(list=_list(game, sorted(game.location)))
    return WELCOME.format(look=look, task=game.task)


def commands(game: Game, state: State) -> dict[str, Action]:
    """Every admissible command, with what it does."""
    names, found = game.names, {}
    for verb in ("look", "inventory", "help"):
        found[verb] = (verb, -1, -1)
    for thing, spot in game.location.items():
        if spot != state.at:
            found[f"go to {names[thing]}"] = ("go", thing, -1)
    held, here = state.held, game.here.get(state.at, ())
    if held >= 0:
        found[f"examine {names[held]}"] = ("examine held", held, -1)
    for thing in here:
        found[f"examine {names[thing]}"] = ("examine", thing, -1)
        closed = False
        if game.has("openable", thing):
            closed = thing not in state.opened
            verb = "open" if closed else "close"
            found[f"{verb} {names[thing]}"] = (verb, thing, -1)
        if held >= 0:
            kind = game.kind[thing]
            if not closed and (kind, game.kind.get(held)) in game.facts["cancontain"]:
                found[f"move {names[held]} to {names[thing]}"] = ("move", held, thing)
            for verb, able, action in _APPLIANCES:
                if kind in game.uses[action] and game.has(able, held):
                    found[f"{verb} {names[held]} with {names[thing]}"] = (verb, held, thing)
        elif not closed:
            for other, spot in state.inside:
                if spot == thing and game.has("pickupable", other):
                    found[f"take {names[other]} from {names[thing]}"] = ("take", other, thing)
    for (thing,) in game.facts["toggleable"]:
        if any((thing, spot) in state.inside for spot in here):
            found[f"use {names[thing]}"] = ("use", thing, -1)
    if held >= 0 and game.kind.get(held) in game.uses["SliceObject"]:
        for (thing,) in game.facts["sliceable"]:
            if (thing, state.at) in state.near:
                found[f"slice {names[thing]} with {names[held]}"] = ("slice", thing, held)
    return found


_APPLIANCES = (
    ("clean", "cleanable", "CleanObject"),
    ("heat", "heatable", "HeatObject"),
    ("cool", "coolable", "CoolObject"),
)


def step(game: Game, state: State, command: str) -> tuple[State, str]:
    """The state after a command, and the observation; "Nothing happens." for a command that is not
    admissible. Commands are exact but for blanks at either end."""
    action = commands(game, state).get(command.strip())
    if action is None:
        return state, NOTHING
    after = _apply(game, state, action)
    return after, _say(game, after, action)


def _apply(game: Game, state: State, action: Action) -> State:
    verb, thing, other = action
    if verb == "go":
        return state._replace(at=game.location[thing])
    if verb == "open":
        return state._replace(opened=state.opened | {thing})
    if verb == "close":
        return state._replace(opened=state.opened - {thing})
    pair, spot = {(thing, other)}, {(thing, state.at)}
    if verb == "take":
        inside, taken = state.inside - pair, state.taken | pair
        return state._replace(held=thing, inside=inside, taken=taken, near=state.near - spot)
    if verb == "move":
        inside, taken = state.inside | pair, state.taken - pair
        return state._replace(held=-1, inside=inside, taken=taken, near=state.near | spot)
    if verb == "heat":
        return state._replace(hot=state.hot | {thing}, cool=state.cool - {thing})
    if verb == "cool":
        return state._replace(cool=state.cool | {thing}, hot=state.hot - {thing})
    if verb == "clean":
        return state._replace(clean=state.clean | {thing})
    if verb == "use":
        return state._replace(toggled=state.toggled | {thing})
    if verb == "slice":
        return state._replace(sliced=state.sliced | {thing})
    return state


def _say(game: Game, state: State, action: Action) -> str:
    """The observation of an action that led to `state`."""
    verb, thing, other = action
    name, second = game.names[thing], game.names[other]
    if verb in ("examine", "go", "open"):
        start = {"go": f"You arrive at {name}. ", "open": f"You open the {name}. "}.get(verb, "")
        return start + _contents(game, state, thing)
    if verb == "examine held":
        return _examined(game, state, thing)
    if verb == "look":
        return _look(game, state)
    if verb == "inventory":
        if state.held < 0:
            return "You are not carrying anything."
        return f"You are carrying: a {game.names[state.held]}."
    texts = {
        "help": HELP,
        "close": f"You close the {name}.",
        "take": f"You pick up the {name} from the {second}.",
        "move": f"You move the {name} to the {second}.",
        "use": f"You turn on the {name}.",
        "slice": f"You sliced the {name} with the {second}.",
    }
    return texts.get(verb, f"You {verb} the {name} using the {second}.")


def _contents(game: Game, state: State, receptacle: int) -> str:
    """What a look at a receptacle shows."""
    name = game.names[receptacle]
    openable = game.has("openable", receptacle)
    if openable and receptacle not in state.opened:
        return f"The {name} is closed."
    things = _list(game, sorted(thing for thing, spot in state.inside if spot == receptacle))
    return (
        f"The {name} is open. In it, you see {things}." if openable else f"On the {name}, you see {things}."
    )


def _examined(game: Game, state: State, thing: int) -> str:
    """What a look at a held object shows."""
    name = game.names[thing]
    if game.has("isreceptacleobject", thing):
        inner = sorted(inner for inner, outer in game.facts["inreceptacleobject"] if outer == thing)
        return f"This is a normal {name}. In it, you see {_list(game, inner)}."
    clean, sliced = thing in state.clean, thing in state.sliced
    words = []
    if thing in state.hot:
        words.append("hot")
    elif thing in state.cool:
        words.append("cool" if clean or sliced else "cold")
    if clean:
        words.append("clean")
    looks = " and ".join(words) + " sliced" * sliced
    if words:
        return f"This is a {looks} {name}."
    if game.has("toggleable", thing) and thing in state.toggled:
        return f"This {name} is on."
    return f"This is a sliced {name}." if sliced else f"There's nothing special about {name}."


def _look(game: Game, state: State) -> str:
    here = game.here.get(state.at, ())
    if not here:
        return MIDDLE.format(list="nothing")
    floor = [
        thing for thing, spot in state.near if spot == state.at for r in here if (thing, r) in state.taken
    ]
    facing = _join([game.names[thing] for thing in here])
    return f"You are facing the {facing}. Next to it, you see {_list(game, sorted(floor))}."


def _list(game: Game, things: list[int]) -> str:
    return _join([f"a {game.names[thing]}" for thing in things])


def _join(texts: list[str]) -> str:
    if len(texts) < 2:
        return texts[0] if texts else "nothing"
    return ", ".join(texts[:-1]) + ", and " + texts[-1]


def won(game: Game, state: State) -> bool:
    """Whether the goal holds."""
    return next(_answers(game, state, game.goal, 0, {}), None) is not None


def _answers(game: Game, state: State, goal: Query, index: int, bound: dict) -> Iterator[dict]:
    """Values of the variables for which the atoms from `index` on hold too."""
    if index == len(goal.atoms):
        if all(bound.get(a, a) != bound.get(b, b) for a, b in goal.differ):
            yield bound
        return
    predicate, *arguments = goal.atoms[index]
    values = [bound.get(argument, argument) for argument in arguments]
    rows = _rows(game, state, predicate)
    if not any(isinstance(value, str) and value.startswith("?") for value in values):
        if tuple(values) in rows:
            yield from _answers(game, state, goal, index + 1, bound)
        return
    for row in rows:
        more = {}
        for value, found in zip(values, row, strict=True):
            if isinstance(value, str) and value.startswith("?") and more.setdefault(value, found) == found:
                continue
            if value != found:
                break
        else:
            yield from _answers(game, state, goal, index + 1, bound | more)


def _rows(game: Game, state: State, predicate: str) -> frozenset[tuple]:
    """All facts of a predicate, as tuples."""
    if predicate in game.facts:
        return game.facts[predicate]
    if predicate == "inreceptacle":
        return state.inside
    if predicate == "objectatlocation":
        return state.near
    if predicate == "atlocation":
        return frozenset({(AGENT, state.at)})
    if predicate == "holds":
        return frozenset({(AGENT, state.held)}) if state.held >= 0 else frozenset()
    flags = {"opened": state.opened, "isclean": state.clean, "ishot": state.hot, "iscool": state.cool}
    flags |= {"issliced": state.sliced, "istoggled": state.toggled}
    return frozenset((thing,) for thing in flags[predicate])


AGENT = "agent1"
