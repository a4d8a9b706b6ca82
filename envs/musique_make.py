"""Multi-hop worlds in MuSiQue's format: questions over passages about made-up people, towns and firms.

    python -m envs.musique make --out DIR --train 2000 --dev 200 [--passages 6 --sentences 1 --short]

A world is a graph of facts, each with one answer; a passage is about one entity and holds up to `sentences`
of its facts. A question is a chain or a join of facts in one of MuSiQue's six shapes; its wording nests, so
that only the first hop's entity stands in it. By default every record has a world of its own: names recur,
facts don't, and nothing can be known without searching. With --worlds 1 a split shares one world, whose
passages go to passages_SPLIT.jsonl for `python -m envs.musique serve`.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from envs.builtin import made_once

FIRST = tuple(
    (
        "Ada Ben Cora Dan Elsa Finn Gina Hugo Ida Jon Kira Leo Mona Nils Olga Paul Rosa Sam Tess Uma Vera "
        "Walt Xena Yuri Zoe Amos Bela Carl Dora Egon Fay Gus Hana Ivan June Karl Lena Max Nora Otto"
    ).split()
)
LAST = tuple(
    (
        "Abbot Barlow Cross Dunn Ellis Frost Grant Hale Irwin Joyce Kemp Lowe Marsh Nash Owens Price Quinn "
        "Reed Stone Tate Upton Vance Webb Yates Ashby Brook Clay Drake Eaton Field Gale Hyde Kirk Lane Moss "
        "Noble Parr Rhodes Sharp Thorn Vaughn Wells York Bishop Carver Dyer Fuller"
    ).split()
)
STEMS = tuple(
    (
        "Nor Sul Est Wen Hol Bar Cal Dun Fer Gan Kel Lor Mar Pel Ros Tal Ven Wil Yar Zel Ald Bre Cor Dra Elm "
        "Fen Gil Har Ist Jun"
    ).split()
)
ENDS = {
    "town": ("wick", "ham", "ford", "port", "stead"),
    "country": ("land", "ia", "mark", "ova", "istan"),
    "coin": ("mark", "in", "ar", "ot", "een"),
}
FIRMS = ("Works", "Mills", "Lines", "Bank", "Press", "Mines")
CREATIONS = ("Song", "Tower", "Garden", "Letter", "Winter", "River", "Window", "Harvest", "Lantern", "Voyage")
KINDS = {"person": 6, "town": 3, "country": 1, "firm": 3, "book": 3, "line": 3}  # with passages: their shares
MOST = {
    "town": 120,
    "country": 120,
    "line": 120,
    "firm": 250,
    "book": 400,
}  # the rest of a large world is people
INNER = ("person", "town", "country", "firm")  # kinds that are both asked about and answers


@dataclass(frozen=True, slots=True)
class Relation:
    name: str  # "birthplace"
    of: str  # kind of its subject
    to: str  # kind of its answer
    phrase: str  # "the birthplace of {}", nests in questions
    asks: str  # "Where was {} born?", of one hop
    says: tuple[str, ...]  # sentences of a passage: subject {0}, answer {1}, a line's ends {2} and {3}


RELATIONS = (
    Relation("birthplace", "person", "town", "the birthplace of {}", "Where was {} born?",
             ("{0} was born in {1}.", "The birthplace of {0} is {1}.")),
    Relation("employer", "person", "firm", "the employer of {}", "Who employs {}?",
             ("{0} works for {1}.", "The employer of {0} is {1}.")),
    Relation("spouse", "person", "person", "the spouse of {}", "Who is the spouse of {}?",
             ("{0} married {1}.", "The spouse of {0} is {1}.")),
    Relation("country", "town", "country", "the country of {}", "Which country is {} in?",
             ("{0} is a town in {1}.", "{0} lies in the country of {1}.")),
    Relation("mayor", "town", "person", "the mayor of {}", "Who is the mayor of {}?",
             ("The mayor of {0} is {1}.", "{0} is led by its mayor {1}.")),
    Relation("coin", "country", "coin", "the currency of {}", "What is the currency of {}?",
             ("The currency of {0} is the {1}.", "People in {0} pay with the {1}, their currency.")),
    Relation("capital", "country", "town", "the capital of {}", "What is the capital of {}?",
             ("The capital of {0} is {1}.", "{0} has its capital in {1}.")),
    Relation("founder", "firm", "person", "the founder of {}", "Who founded {}?",
             ("{0} was founded by {1}.", "The founder of {0} is {1}.")),
    Relation("seat", "firm", "town", "the home town of {}", "In which town is {}?",
             ("{0} has its home in the town of {1}.", "The home town of {0} is {1}.")),
    Relation("author", "book", "person", "the author of {}", "Who wrote {}?",
             ("{0} was written by {1}.", "The author of {0} is {1}.")),
    Relation("setting", "book", "town", "the setting of {}", "In which town is {} set?",
             ("{0} is set in {1}.", "The setting of {0} is the town of {1}.")),
    Relation("year", "firm", "year", "the founding year of {}", "In what year was {} founded?",
             ("{0} was founded in the year {1}.", "The founding year of {0} is {1}.")),
)  # fmt: skip
JOIN = Relation("operator", "line", "firm", "the firm that runs the line from {} to {}",
                "Which firm runs the line from {} to {}?",  # two answers before it
                ("The line from {2} to {3} is run by {1}.", "{1} runs the line from {2} to {3}."),
)  # fmt: skip
# A shape is MuSiQue's name of a dependency graph: for each hop, the hops that it rests on, counted from 1
SHAPES = {
    "2hop": ((), (1,)),
    "3hop1": ((), (1,), (2,)),
    "3hop2": ((), (), (1, 2)),
    "4hop1": ((), (1,), (2,), (3,)),
    "4hop2": ((), (), (1, 2), (3,)),
    "4hop3": ((), (1,), (), (2, 3)),
}
SHARES = {"2hop": 52, "3hop1": 24, "3hop2": 8, "4hop1": 8, "4hop2": 4, "4hop3": 4}  # near the dev split's

# the world without --data: questions of two hops over six passages of one fact each
BUILTIN = {"train": 2000, "dev": 256, "passages": 6, "sentences": 1, "shapes": ("2hop",), "short": True}


@dataclass(slots=True)
class World:
    """Entities by kind, and facts: relation and subject give the answer."""

    names: dict[str, list[str]]
    facts: dict[str, dict[str, str]]  # entity -> relation -> answer
    ends: dict[str, tuple[str, str]]  # line -> its two towns
    alias: dict[str, str]  # town -> another name that its passage gives
    sources: dict[
        str, list[tuple[Relation, str]]
    ]  # answer -> the facts that have it, as relation and subject


def make_names(kind: str, rng: random.Random, count: int, *, short: bool) -> list[str]:
    """`count` different names of a kind. Raises ValueError where there are not so many."""
    if kind in ENDS:
        pool = [stem + end for stem in STEMS for end in ENDS[kind]]
    elif kind == "person":
        middle = [""] if count <= len(FIRST) * len(LAST) else [f"{letter}. " for letter in ascii_uppercase]
        pool = [f"{first} {letter}{last}" for first in FIRST for letter in middle for last in LAST]
        pool = list(FIRST) if short else pool
    else:
        nouns = FIRMS if kind == "firm" else CREATIONS
        pool = [f"{'The ' * (kind == 'book')}{last} {noun}" for last in LAST for noun in nouns]
    if count > len(pool):
        raise ValueError(f"{count} names of a {kind} wanted, there are {len(pool)}; make the world smaller")
    return rng.sample(pool, count)


def make_world(rng: random.Random, *, entities: int, short: bool) -> World:
    """A world with about `entities` entities that have passages, three of each kind at least."""
    total = sum(KINDS.values())
    counts = {kind: max(3, min(MOST.get(kind, entities), entities * KINDS[kind] // total)) for kind in KINDS}
    counts["person"] = max(3, entities - sum(counts[kind] for kind in KINDS if kind != "person"))
    kinds = [*(kind for kind in KINDS if kind != "line"), "coin"]
    counts["coin"] = counts["country"]
    names = {kind: make_names(kind, rng, counts[kind], short=short) for kind in kinds}
    names["year"] = [str(year) for year in range(1801, 2000)]
    ends: dict[str, tuple[str, str]] = {}
    while len(ends) < counts["line"]:  # no more lines than towns, so never more than there are pairs of towns
        a, b = rng.sample(names["town"], 2)
        if f"{b} to {a}" not in ends:
            ends[f"{a} to {b}"] = (a, b)
    names["line"] = list(ends)
    alias = {town: f"Old {town}" for town in names["town"] if rng.random() < 0.3}
    world = World(names, {name: {} for kind in KINDS for name in names[kind]}, ends, alias, {})
    for relation in (*RELATIONS, JOIN):
        for name in names[relation.of]:
            answer = rng.choice(names[relation.to])
            while answer == name:
                answer = rng.choice(names[relation.to])
            world.facts[name][relation.name] = answer
            world.sources.setdefault(answer, []).append((relation, name))
    return world


@dataclass(frozen=True, slots=True)
class Step:
    """One hop: a fact."""

    subject: str  # the entity whose passage says it
    relation: Relation  # JOIN: of the line between the answers of two hops
    answer: str
    rests: tuple[int, ...]  # hops whose answers it needs, counted from 1


def draw_steps(world: World, shape: str, rng: random.Random) -> list[Step] | None:
    """A question of a shape, drawn from its end to its start so that joins meet; None where the draw runs
    into a dead end or comes by an entity twice."""
    graph, steps, wanted = SHAPES[shape], [], {}  # wanted: hop -> the answer that a later hop rests on
    for number in range(len(graph), 0, -1):
        rests = graph[number - 1]
        kinds = ("line",) if len(rests) == 2 else INNER if rests else ("book", *INNER)
        if number in wanted:
            facts = [fact for fact in world.sources.get(wanted[number], []) if fact[0].of in kinds]
        else:
            relation = rng.choice([relation for relation in (*RELATIONS, JOIN) if relation.of in kinds])
            facts = [(relation, rng.choice(world.names[relation.of]))]
        if not facts:
            return None
        relation, subject = rng.choice(facts)
        steps.insert(0, Step(subject, relation, world.facts[subject][relation.name], rests))
        wanted |= zip(rests, world.ends.get(subject, (subject,)), strict=False)
    told = [step.subject for step in steps] + [steps[-1].answer]
    told += [end for step in steps for end in world.ends.get(step.subject, ())]
    return steps if len(set(told)) == len(told) else None


def wording(steps: list[Step]) -> str:
    """The question: phrases nested from the last hop inwards."""

    def phrase(number: int) -> str:
        step = steps[number - 1]
        return step.relation.phrase.format(*(map(phrase, step.rests) if step.rests else [step.subject]))

    who = "Who" if steps[-1].relation.to == "person" else "What"
    return f"{who} is {phrase(len(steps))}?"


def passage_text(world: World, name: str, needed: list[Relation], rng: random.Random, sentences: int) -> str:
    """What the passage of an entity says: the needed facts, others up to `sentences`, in any order."""
    own = [fact for fact in (*RELATIONS, JOIN) if fact.name in world.facts[name] and fact not in needed]
    chosen = [*needed, *rng.sample(own, len(own))][:sentences]
    rng.shuffle(chosen)
    values = [(fact, world.facts[name][fact.name]) for fact in chosen]
    lines = [rng.choice(fact.says).format(name, value, *world.ends.get(name, ())) for fact, value in values]
    if name in world.alias and sentences > 1:
        lines.append(f"{name} is also called {world.alias[name]}.")
    return " ".join(lines)


def make_record(
    world: World,
    steps: list[Step],
    shape: str,
    number: int,
    rng: random.Random,
    *,
    passages: int,
    sentences: int,
) -> dict:
    """A question as an official record: its hops' passages among others, shuffled."""
    needed = {step.subject: [step.relation] for step in steps}
    others = [
        name
        for name in rng.sample(list(world.facts), min(len(world.facts), 4 * passages))
        if name not in needed
    ]
    order = [*needed, *others[: passages - len(needed)]]
    rng.shuffle(order)
    paragraphs, place = [], {name: i for i, name in enumerate(order)}
    for name in order:
        text = passage_text(world, name, needed.get(name, []), rng, sentences)
        row = {"idx": place[name], "title": name, "paragraph_text": text, "is_supporting": name in needed}
        paragraphs.append(row)
    hops = []
    for i, step in enumerate(steps):
        given = [f"#{rest}" for rest in step.rests] or [step.subject]
        asks = step.relation.asks.format(*given)
        hop = {"id": 10 * number + i, "question": asks, "answer": step.answer}
        hops.append({**hop, "paragraph_support_idx": place[step.subject]})
    answer = steps[-1].answer
    called = [world.alias[answer]] if answer in world.alias and answer in place and sentences > 1 else []
    return {
        "id": f"{shape}__{'_'.join(str(hop['id']) for hop in hops)}",
        "paragraphs": paragraphs,
        "question": wording(steps),
        "question_decomposition": hops,
        "answer": answer,
        "answer_aliases": called,
        "answerable": True,
    }


def build(
    folder: str | Path,
    *,
    seed: int = 0,
    train: int = 2000,
    dev: int = 200,
    passages: int = 20,
    sentences: int = 3,
    shapes: tuple[str, ...] = tuple(SHAPES),
    short: bool = False,
    worlds: int = 0,
    entities: int = 0,
) -> Path:
    """Write musique_ans_v1.0_train.jsonl and _dev.jsonl; returns the folder. A record depends on the seed,
    its split and its number alone.

    passages   of each record; at least as many as the longest shape has hops
    sentences  facts that a passage holds at most
    shapes     of the questions, drawn with the shares of MuSiQue's dev split
    short      people have one name
    worlds     a split's records take turns over so many worlds; 0: one for each record. With 1, the world's
               passages go to passages_SPLIT.jsonl
    entities   of a world; 0: twice as many as a record has passages
    raises     ValueError for numbers that cannot be
    """
    unknown = set(shapes) - set(SHAPES)
    if unknown or not shapes:
        raise ValueError(f"shapes={shapes}, wanted some of {', '.join(SHAPES)}")
    most = max(len(SHAPES[shape]) for shape in shapes)
    if not most <= passages <= 100 or sentences < 1:
        raise ValueError(
            f"passages={passages}, wanted {most} to 100; sentences={sentences}, wanted 1 or more"
        )
    entities = entities or max(24, 2 * passages)
    if entities < passages:
        raise ValueError(f"entities={entities}, fewer than the {passages} passages of a record; wanted more")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, first in (("train", train, 0), ("dev", dev, 1_000_000)):
        shared = [
            make_world(random.Random(f"{seed}/{split}/world/{i}"), entities=entities, short=short)
            for i in range(worlds)
        ]
        lines = []
        for i in range(count):
            rng = random.Random(f"{seed}/{split}/{i}")
            shape = rng.choices(shapes, [SHARES[shape] for shape in shapes])[0]
            steps = None
            while steps is None:
                world = shared[i % worlds] if worlds else make_world(rng, entities=entities, short=short)
                steps = draw_steps(world, shape, rng)
            record = make_record(world, steps, shape, first + i, rng, passages=passages, sentences=sentences)
            lines.append(json.dumps(record, ensure_ascii=False))
        _write(folder / f"musique_ans_v1.0_{split}.jsonl", lines)
        if worlds == 1:
            _write(folder / f"passages_{split}.jsonl", list(_all_passages(shared[0], seed, split, sentences)))
    return folder


def builtin() -> Path:
    """The folder of the world that the scripts use without --data: BUILTIN."""
    return made_once("musique", [Path(__file__)], lambda folder: build(folder, **BUILTIN))


def _all_passages(world: World, seed: int, split: str, sentences: int):
    """One line for each entity, with all of its facts."""
    rng = random.Random(f"{seed}/{split}/passages")
    for name in world.facts:
        text = passage_text(world, name, [], rng, max(sentences, 3))  # no entity has more than three facts
        yield json.dumps({"title": name, "text": text}, ensure_ascii=False)


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m envs.musique make", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=2000, help="records")
    parser.add_argument("--dev", type=int, default=200, help="records")
    parser.add_argument("--passages", type=int, default=20, help="of each record")
    parser.add_argument("--sentences", type=int, default=3, help="facts that a passage holds at most")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help=f"some of {' '.join(SHAPES)}")
    parser.add_argument("--short", action="store_true", help="people have one name")
    parser.add_argument("--worlds", type=int, default=0, help="shared worlds; 0: one for each record")
    parser.add_argument("--entities", type=int, default=0, help="of a world; 0: twice --passages")
    args = vars(parser.parse_args(argv))
    try:
        folder = build(args.pop("out"), **{**args, "shapes": tuple(args["shapes"])})
    except ValueError as error:
        raise SystemExit(f"make: {error}") from None
    print(f"{folder}: {args['train']} records to train on, {args['dev']} to develop with")
