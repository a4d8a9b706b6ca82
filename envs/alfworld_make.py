"""Small ALFWorld games of all six families, in the official file format and folder layout.

    python -m envs.alfworld_make --out DIR --train 300 --valid_unseen 60 [--places 5 --things 4]

A game is one room with `places` receptacles and `things` objects: those that the task needs, and others that
do not meet its goal. Where the task's object lies is drawn, so it must be looked for. The walkthrough knows.
The games run in TextWorld too.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from envs.alfworld import FAMILIES
from envs.alfworld_game import Game, read_game
from envs.alfworld_text import DOMAIN, grammar

SPLITS = ("train", "valid_seen", "valid_unseen")
FOOD = ("Apple", "Bread", "Egg", "Lettuce", "Potato", "Tomato")
DISHES = ("Bowl", "Cup", "Mug", "Plate", "Pan", "Pot")
TOOLS = ("ButterKnife", "Fork", "Knife", "Ladle", "Spatula", "Spoon")
BATH = ("Cloth", "SoapBar", "SoapBottle", "SprayBottle", "ToiletPaper", "Candle")
DESK = ("Book", "CD", "CellPhone", "CreditCard", "KeyChain", "Pen", "Pencil", "AlarmClock", "Vase", "Pillow")
CLEANABLE = (*FOOD, *DISHES, *TOOLS, "Cloth", "SoapBar")
HEATABLE = ("Apple", "Bread", "Egg", "Potato", "Tomato", "Cup", "Mug", "Plate")
COOLABLE = (*FOOD, *DISHES)
SLICEABLE = ("Apple", "Bread", "Lettuce", "Potato", "Tomato")
HOLLOW = ("Bowl", "Cup", "Mug", "Plate", "Pan", "Pot")
OPEN_PLACES = ("Shelf", "CounterTop", "DiningTable", "SideTable", "Desk", "Dresser", "CoffeeTable")
SHUT_PLACES = ("Cabinet", "Drawer", "Safe")
APPLIANCES = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
ABLE = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
HOLDS = {  # place -> kinds of things that may be put there; other places hold everything
    "SinkBasin": (*FOOD, *DISHES, *TOOLS, "Cloth", "SoapBar"),
    "Microwave": HEATABLE,
    "Fridge": (*FOOD, *DISHES),
    "Drawer": (*TOOLS, *BATH, *DESK[:-2]),
    "Safe": (*DESK[:-2],),
}
ALL_THINGS = (*FOOD, *DISHES, *TOOLS, *BATH, *DESK)
LAMPS = ("DeskLamp", "FloorLamp")
TASKS = {  # family -> wordings of the goal: {0} the object, {1} the place or lamp
    "place": ("put a {0} in {1}.", "put some {0} on {1}."),
    "light": ("look at {0} under the {1}.", "examine the {0} with the {1}."),
    "clean": ("put a clean {0} in {1}.", "clean some {0} and put it in {1}."),
    "heat": ("put a hot {0} in {1}.", "heat some {0} and put it in {1}."),
    "cool": ("put a cool {0} in {1}.", "cool some {0} and put it in {1}."),
    "two": ("put two {0} in {1}.", "find two {0} and put them in {1}."),
}
DONE = {"clean": "isClean", "heat": "isHot", "cool": "isCool"}


@dataclass(frozen=True, slots=True)
class Room:
    """What a game's file says of its world; ids as in the file."""

    family: str
    target: str  # kind of the object
    goal: str  # kind of the place, or of the lamp
    task: str
    places: dict[str, str]  # id -> kind
    things: dict[str, str]  # id -> kind
    inside: dict[str, str]  # thing -> place


def make_id(kind: str, rng: random.Random) -> str:
    """An id as in ALFRED: the kind, then three coordinates."""
    parts = [
        f"_bar__{rng.choice(('plus', 'minus'))}_{rng.randrange(3):02d}_dot_{rng.randrange(100):02d}"
        for _ in "xyz"
    ]
    name = "Sink" if kind == "SinkBasin" else kind
    return name + "".join(parts) + ("_bar_SinkBasin" if kind == "SinkBasin" else "")


def may_hold(place: str, thing: str) -> bool:
    """Whether a kind of place may hold a kind of thing."""
    return thing in HOLDS.get(place, ALL_THINGS)


def draw_room(rng: random.Random, family: str, *, places: int, things: int) -> Room:
    """A room in which the task can be done and is not done yet."""
    needed = [APPLIANCES[family]] if family in APPLIANCES else []
    target = rng.choice(ABLE.get(family, ALL_THINGS))
    ends = [kind for kind in (*OPEN_PLACES, *SHUT_PLACES) if may_hold(kind, target)]
    goal = rng.choice(LAMPS if family == "light" else ends)
    kinds = [*needed, *([] if family == "light" else [goal])]
    others = [kind for kind in (*OPEN_PLACES, *SHUT_PLACES) if kind != goal]
    while len(kinds) < places or not any(kind in OPEN_PLACES and kind != goal for kind in kinds):
        kinds.append(rng.choice(others if len(kinds) < places else OPEN_PLACES))
    spots = {make_id(kind, rng): kind for kind in kinds}
    count = 2 if family == "two" else 1
    fillers = [kind for kind in ALL_THINGS if kind != target]
    names = [target] * count + [rng.choice(fillers) for _ in range(max(0, things - count))]
    objects = {make_id(kind, rng): kind for kind in names}
    inside = {}
    for thing, kind in objects.items():
        fits = [spot for spot, of in spots.items() if may_hold(of, kind) and (kind != target or of != goal)]
        inside[thing] = rng.choice(fits)
    if family == "light":
        lamp = make_id(goal, rng)
        objects[lamp] = goal
        inside[lamp] = rng.choice([spot for spot, kind in spots.items() if kind in OPEN_PLACES])
    task = rng.choice(TASKS[family]).format(target.lower(), goal.lower())
    return Room(family, target, goal, task, spots, objects, inside)


def goal_text(room: Room) -> str:
    """The goal in PDDL, as ALFWorld writes it for the family."""
    target, goal = f"{room.target}Type", f"{room.goal}Type"
    if room.family == "light":
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and "
            f"(objectType ?ot {goal}) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) "
            "(atLocation ?a ?l) (inReceptacle ?ot ?r))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {target}) (holds ?a ?o))))"
        )
    there = "(inReceptacle {0} ?r) (objectType {0} " + target + f") (receptacleType ?r {goal})"
    if room.family == "two":
        second = f"(exists (?o2 - object) (and (not (= ?o1 ?o2)) {there.format('?o2')}))"
        inner = f"(exists (?o1 - object) (and {there.format('?o1')} {second}))"
    else:
        done = f" ({DONE[room.family]} ?o)" if room.family in DONE else ""
        able = f" ({room.family}able ?o)" if room.family in DONE else ""
        inner = f"(exists (?o - object) (and {there.format('?o')}{able}{done}))"
    return f"(and (exists (?r - receptacle) {inner}))"


def problem_text(room: Room, name: str, rng: random.Random) -> str:
    """The problem in PDDL; every place has a location of its own, the agent starts at another."""
    spots = {
        place: f"loc_bar_{i}_bar_{rng.randrange(9)}_bar_{rng.randrange(4)}_bar_30"
        for i, place in enumerate(room.places)
    }
    facts = ["(atLocation agent1 loc_bar_99_bar_0_bar_0_bar_30)"]
    for place, kind in room.places.items():
        facts += [f"(receptacleType {place} {kind}Type)", f"(receptacleAtLocation {place} {spots[place]})"]
        if kind in (*SHUT_PLACES, "Microwave", "Fridge"):
            facts.append(f"(openable {place})")
    for thing, kind in room.things.items():
        facts += [f"(objectType {thing} {kind}Type)", f"(inReceptacle {thing} {room.inside[thing]})"]
        facts.append(f"(objectAtLocation {thing} {spots[room.inside[thing]]})")
        facts.append(f"(toggleable {thing})" if kind in LAMPS else f"(pickupable {thing})")
        for word, kinds in (
            ("cleanable", CLEANABLE), ("heatable", HEATABLE), ("coolable", COOLABLE),
            ("sliceable", SLICEABLE), ("isReceptacleObject", HOLLOW),
        ):  # fmt: skip
            if kind in kinds:
                facts.append(f"({word} {thing})")
    held = sorted({kind for kind in room.things.values() if kind not in LAMPS})
    kinds = sorted(set(room.places.values()) | set(APPLIANCES.values()))
    facts += [
        f"(canContain {place}Type {kind}Type)" for place in kinds for kind in held if may_hold(place, kind)
    ]
    objects = ["agent1 - agent", "loc_bar_99_bar_0_bar_0_bar_30 - location"]
    objects += [f"{spot} - location" for spot in spots.values()]
    objects += [f"{place} - receptacle" for place in room.places] + [
        f"{thing} - object" for thing in room.things
    ]
    objects += [f"{kind}Type - rtype" for kind in kinds]
    otypes = sorted(
        {*room.things.values(), room.goal if room.goal in LAMPS else room.target, "Knife", "ButterKnife"}
    )
    objects += [f"{kind}Type - otype" for kind in otypes]
    return (
        f"(define (problem {name})\n(:domain alfred)\n(:objects\n  "
        + "\n  ".join(objects)
        + "\n)\n(:init\n  "
        "" + "\n  ".join(facts) + f"\n)\n(:goal {goal_text(room)})\n)\n"
    )


def walkthrough(room: Room, game: Game, ids: dict[str, str]) -> list[str]:
    """Commands that do the task. `ids` gives the name of an id."""
    opened: set[str] = set()
    at, commands = "", []

    def go(place: str, *, inside: bool) -> None:
        nonlocal at
        if at != place:
            commands.append(f"go to {ids[place]}")
            at = place
        if inside and room.places[place] in (*SHUT_PLACES, "Microwave", "Fridge") and place not in opened:
            commands.append(f"open {ids[place]}")
            opened.add(place)

    end = next((place for place, kind in room.places.items() if kind == room.goal), "")
    for thing in [thing for thing, kind in room.things.items() if kind == room.target]:
        go(room.inside[thing], inside=True)
        commands.append(f"take {ids[thing]} from {ids[room.inside[thing]]}")
        if room.family == "light":
            lamp = next(lamp for lamp, kind in room.things.items() if kind == room.goal)
            go(room.inside[lamp], inside=False)
            commands.append(f"use {ids[lamp]}")
            continue
        if room.family in APPLIANCES:
            tool = next(place for place, kind in room.places.items() if kind == APPLIANCES[room.family])
            go(tool, inside=False)
            commands.append(f"{room.family} {ids[thing]} with {ids[tool]}")
        go(end, inside=True)
        commands.append(f"move {ids[thing]} to {ids[end]}")
    return commands


def write_game(folder: Path, room: Room, name: str, rng: random.Random) -> Path:
    """The room as FOLDER/game.tw-pddl; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "game.tw-pddl"
    data = {
        "pddl_domain": DOMAIN,
        "grammar": grammar(room.task),
        "pddl_problem": problem_text(room, name, rng),
        "solvable": True,
        "walkthrough": [],
    }
    path.write_text(json.dumps(data), encoding="utf-8")
    game = read_game(path)
    sorted_ids = sorted((id for id in (*room.places, *room.things)), key=str.lower)
    names = [name for name in game.names if not name.startswith("loc ")]
    ids = dict(zip(sorted_ids, names, strict=True))
    data["walkthrough"] = walkthrough(room, game, ids)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def build(
    folder: str | Path,
    *,
    seed: int = 0,
    train: int = 300,
    valid_seen: int = 0,
    valid_unseen: int = 60,
    families: tuple[str, ...] = tuple(FAMILIES),
    places: int = 5,
    things: int = 4,
) -> Path:
    """Write games under FOLDER/json_2.1.1/SPLIT, the families in turn; returns the folder. A game depends on
    the seed, its split and its number alone.

    places  receptacles of a game; one more where the task needs it
    things  objects of a game, those of the task among them; a lamp comes on top
    raises  ValueError for unknown families and for too few places
    """
    unknown = set(families) - FAMILIES.keys()
    if unknown or not families:
        raise ValueError(f"families={families}, wanted some of {', '.join(FAMILIES)}")
    if not 2 <= places <= 40 or not 1 <= things <= 60:
        raise ValueError(f"places={places}, things={things}; wanted 2 to 40 places and 1 to 60 things")
    for split, count in zip(SPLITS, (train, valid_seen, valid_unseen), strict=True):
        for i in range(count):
            rng = random.Random(f"{seed}/{split}/{i}")
            room = draw_room(rng, families[i % len(families)], places=places, things=things)
            kind = f"{FAMILIES[room.family]}-{room.target}-None-{room.goal}-{i % 400 + 1}"
            name = f"trial_T{seed:04d}_{i:06d}"
            write_game(Path(folder) / "json_2.1.1" / split / kind / name, room, f"plan_{name}", rng)
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    for split, count in zip(SPLITS, (300, 0, 60), strict=True):
        parser.add_argument(f"--{split}", type=int, default=count, help="games")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help=" ".join(FAMILIES))
    parser.add_argument("--places", type=int, default=5, help="receptacles of a game")
    parser.add_argument("--things", type=int, default=4, help="objects of a game")
    args = vars(parser.parse_args())
    try:
        folder = build(args.pop("out"), **{**args, "families": tuple(args["families"])})
    except ValueError as error:
        raise SystemExit(f"alfworld_make: {error}") from None
    print(f"{folder}: " + ", ".join(f"{args[split]} games of {split}" for split in SPLITS))


if __name__ == "__main__":
    main()
