"""New Blocksworld and Mystery instances in PlanBench's own layout: PDDL, configs and prompts with plans.

    python -m envs.planbench_make --out DIR --seed 0 --num 200 --blocks 4 5 --like LLMs-Planning

Both states of an instance are uniform over all states of its blocks, goals are `on` facts, plans are
shortest. With --like the prompts' wording is that repository's and none of its instances is repeated;
without, it is ours. The folder is read by envs/planbench.py as "blocksworld" and "mystery_blocksworld".
"""

import argparse
import json
import random
from pathlib import Path

from envs.blocks import MYSTERY, WORDS, optimal_plan, random_problem, twin
from envs.planbench import TASK, open_slice
from envs.planbench_text import MORE_BLOCKS, MORE_OBJECTS, Config, prompt_one_shot, read_config
from envs.strips import Problem, read_domain, show

COLOURS = ("red", "blue", "orange", "yellow", "white", "magenta", "black", "cyan", "green", "violet")
LETTERS = "abcdefghijklmnopqrst"  # at most 20 blocks have names
CONFIGS = {"blocksworld": "blocksworld-4ops", "mystery_blocksworld": "mystery-4ops"}
FOLDERS = {"blocksworld": "blocksworld", "mystery_blocksworld": "blocksworld/mystery"}
INTROS = {  # ours; PlanBench's own stand in its configs
    "blocksworld": """Blocks lie on a table, alone or in towers. I move them with one hand, by four actions

Pick up a block
Put down a block
Stack a block on top of another block
Unstack a block from on top of another block

These are the rules
I can pick up a block that is clear and on the table, if my hand is empty.
I can unstack a block that is clear from the block it is on top of, if my hand is empty.
I can put down the block in my hand on the table.
I can stack the block in my hand on top of a block that is clear.
A block is clear if it is not in my hand and no block is on top of it.
""",
    "mystery_blocksworld": """There are objects, and four actions on them

Attack object
Succumb object
Overcome object from another object
Feast object from another object

These are the rules
Attack needs province object, planet object and harmony; it ends all three and makes pain object true.
Succumb needs pain object; it ends it and makes province object, planet object and harmony true.
Overcome needs province other object and pain object; it ends both and makes harmony, province object
and object craves other object true.
Feast needs object craves other object, province object and harmony; it ends all three and makes pain
object and province other object true.
""",
}
ACTIONS = {
    "blocksworld": (
        "pick up the {}",
        "put down the {}",
        "stack the {} on top of the {}",
        "unstack the {} from on top of the {}",
    ),
    "mystery_blocksworld": ("attack {}", "succumb {}", "overcome {} from {}", "feast {} from {}"),
}
FACTS = {
    "blocksworld": (
        "the {} is on the table",
        "the {} is clear",
        "the hand is empty",
        "the hand is currently holding {}",
        "the {} is on top of the {}",
    ),
    "mystery_blocksworld": ("planet {}", "province {}", "harmony", "pain {}", "{} craves {}"),
}
DOMAIN = """(define (domain {name})
  (:requirements :strips)
  (:predicates ({clear} ?x) ({ontable} ?x) ({handempty}) ({holding} ?x) ({on} ?x ?y))

  (:action {pick-up}
    :parameters (?x)
    :precondition (and ({clear} ?x) ({ontable} ?x) ({handempty}))
    :effect (and ({holding} ?x) (not ({clear} ?x)) (not ({ontable} ?x)) (not ({handempty}))))

  (:action {put-down}
    :parameters (?x)
    :precondition ({holding} ?x)
    :effect (and ({clear} ?x) ({handempty}) ({ontable} ?x) (not ({holding} ?x))))

  (:action {stack}
    :parameters (?x ?y)
    :precondition (and ({clear} ?y) ({holding} ?x))
    :effect (and ({handempty}) ({clear} ?x) ({on} ?x ?y) (not ({clear} ?y)) (not ({holding} ?x))))

  (:action {unstack}
    :parameters (?x ?y)
    :precondition (and ({on} ?x ?y) ({clear} ?x) ({handempty}))
    :effect (and ({holding} ?x) ({clear} ?y) (not ({on} ?x ?y)) (not ({clear} ?x)) (not ({handempty})))))
"""


def domain_text(name: str) -> str:
    """PDDL of the domain "blocksworld-4ops" or "mystery-4ops"."""
    return DOMAIN.format(name=name, **WORDS[name])


def problem_text(problem: Problem) -> str:
    """PDDL of an instance, one fact a line."""
    init = "\n".join(map(show, sorted(problem.init)))
    goal = "\n".join(map(show, sorted(problem.goal)))
    return (
        f"\n\n(define (problem {problem.name})\n(:domain {problem.domain.name})\n(:objects "
        f"{' '.join(problem.objects)} )\n(:init\n{init}\n)\n(:goal\n(and\n{goal})\n)\n)\n"
    )


def config_text(name: str, num: int, *, words: Config | None = None) -> str:
    """A config file for `num` instances, with the wording of `words` or ours."""
    verbs, predicates = list(MYSTERY)[:4], list(MYSTERY)[4:]
    spoken = WORDS[CONFIGS[name]]
    if words is None:
        intro = INTROS[name]
        actions = {spoken[verb]: text for verb, text in zip(verbs, ACTIONS[name], strict=True)}
        facts = {spoken[word]: text for word, text in zip(predicates, FACTS[name], strict=True)}
        colours = [f"{colour} block" for colour in COLOURS] + ["silver block", "gold block"]
        blocks = dict(zip(LETTERS, [*colours, *MORE_BLOCKS.values()], strict=True))
        objects = {letter: f"object {letter}" for letter in LETTERS} if "mystery" in name else blocks
    else:
        intro, actions, facts, objects = words.intro, words.actions, words.predicates, words.objects
        objects = words.with_names(len(words.objects) + len(MORE_OBJECTS)).objects
    lines = [
        f"instance_dir: {FOLDERS[name]}/generated_basic",
        f"domain_file: {FOLDERS[name]}/generated_domain.pddl",
        f"domain_name: {name}",
        f"n_instances: {num}",
        "start: 1",
        f"end: {num}",
        "instances_template: instance-{}.pddl",
        "domain_intro: |",
        *(f"   {line}" for line in intro.rstrip("\n").split("\n")),
        "",
    ]
    for key, texts in (("actions", actions), ("predicates", facts), ("encoded_objects", objects)):
        pairs = ",\n   ".join(f'"{word}": "{text}"' for word, text in texts.items())
        lines += [f"{key}:", f"  {{{pairs}}}", ""]
    return "\n".join(lines)


def build(
    folder: str | Path,
    *,
    seed: int = 0,
    num: int = 100,
    blocks: tuple[int, ...] = (4, 5),
    like: str | Path | None = None,
) -> Path:
    """Write `num` distinct instances of each domain (twins of each other); returns the folder.

    blocks  numbers of blocks, drawn in turn
    like    a checkout of LLMs-Planning: its wording, and no instance that it has
    raises  ValueError for numbers of blocks outside of 2 to 20 and where too few instances exist
    """
    folder = Path(folder)
    if not blocks or not all(2 <= count <= len(LETTERS) for count in blocks):
        raise ValueError(f"blocks={blocks}, wanted numbers from 2 to {len(LETTERS)}")
    homes = {name: folder / "plan-bench/instances" / FOLDERS[name] for name in CONFIGS}
    for name, domain in CONFIGS.items():
        words = read_config(Path(like) / f"plan-bench/configs/{name}.yaml") if like else None
        _write(homes[name] / "generated_domain.pddl", domain_text(domain))
        _write(folder / f"plan-bench/configs/{name}.yaml", config_text(name, num, words=words))
    domains = {name: read_domain(homes[name] / "generated_domain.pddl") for name in CONFIGS}
    problems = _draw(domains["blocksworld"], seed=seed, num=num, blocks=blocks, taken=_taken(like))
    for name in CONFIGS:
        config = read_config(folder / f"plan-bench/configs/{name}.yaml")
        twins = [twin(problem, domains[name]) for problem in problems]
        for i, problem in enumerate(twins, start=1):
            _write(homes[name] / f"generated_basic/instance-{i}.pddl", problem_text(problem))
        _write(folder / f"plan-bench/prompts/{name}/{TASK}.json", _prompts(name, twins, config))
    return folder


def _taken(like: str | Path | None) -> set[tuple[frozenset, frozenset]]:
    """Instances of the benchmark, as (init, goal) in Blocksworld's words."""
    taken = set()
    for name in ("blocksworld", "blocksworld_3", "blocksworld_hard") if like else ():
        part = open_slice(name, Path(like))
        for number in range(part.config.start, part.config.num_instances + 1):
            problem = part.problem(number)
            taken.add((problem.init, problem.goal))
    return taken


def _draw(domain, *, seed: int, num: int, blocks: tuple[int, ...], taken: set) -> list[Problem]:
    rng, problems, misses = random.Random(seed), [], 0
    while len(problems) < num:
        count = blocks[len(problems) % len(blocks)]
        problem = random_problem(f"BW-rand-{count}", domain, list(LETTERS[:count]), rng)
        key = (problem.init, problem.goal)
        misses = misses + 1 if key in taken else 0
        if misses > 1000:
            raise ValueError(
                f"num={num}: no more than {len(problems)} new instances of {blocks} blocks found"
            )
        if not misses:
            taken.add(key)
            problems.append(problem)
    return problems


def _prompts(name: str, problems: list[Problem], config: Config) -> str:
    """The one-shot prompt file: each instance with the one before it as the example."""
    plans = [optimal_plan(problem) for problem in problems]
    first_words = {letter: text.split()[0] for letter, text in config.objects.items()}
    spoken = first_words if len(set(first_words.values())) > 1 else {letter: letter for letter in LETTERS}
    records = []
    for i in range(1, len(problems)):
        steps = [show((step[0], *(spoken[block] for block in step[1:]))) + "\n" for step in plans[i]]
        record = {
            "instance_id": i + 1,
            "example_instance_ids": [i],
            "query": prompt_one_shot(problems[i], problems[i - 1], plans[i - 1], config),
            "ground_truth_plan": "".join(steps),
        }
        records.append(record)
    top = {"task": TASK, "prompt_type": "oneshot", "domain": name, "instances": records}
    return json.dumps(top, indent=4)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=100, help="instances of each domain")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 5], help="numbers of blocks, in turn")
    parser.add_argument("--like", default=None, help="checkout of LLMs-Planning to take the wording from")
    args = parser.parse_args()
    build(args.out, seed=args.seed, num=args.num, blocks=tuple(args.blocks), like=args.like)
    print(f"{args.out}: {args.num} instances of each domain")


if __name__ == "__main__":
    main()
