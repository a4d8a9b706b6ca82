"""What Caddie's worlds cost on one core: forks and steps of ALFWorld, searches of MuSiQue's passages.

    python bench/worlds.py                                    # on made worlds, half a minute
    python bench/worlds.py --alfworld DIR --musique DIR --json runs/worlds.json

Times are CPU seconds, so that other users of the machine count little. A step chooses among the admissible
commands, so it counts their list too. The target is 1,000 forks a second. "all passages" is the index behind
the retrieval service, without HTTP.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from envs import alfworld, alfworld_make, musique, musique_make
from envs.alfworld_game import read_game
from envs.base import Call
from envs.musique_serve import Store
from nanoplan.config import parse
from nanoplan.log import table, write_json

TARGET = 1000.0  # forks a second


@dataclass(frozen=True)
class Config:
    alfworld: str = ""  # folder with json_2.1.1/valid_unseen; empty = made games
    musique: str = ""  # folder with MuSiQue's dev split, or a file of records; empty = made questions
    passages: int = 20_000  # made passages of the retrieval service's index
    repeats: int = 2000  # of each operation
    json: str = ""  # file for the table's rows


def per_second(what: Callable[[int], object], repeats: int) -> float:
    """Calls of what(0), what(1), ... per CPU second."""
    what(0)
    start = time.process_time()
    for i in range(repeats):
        what(i)
    return repeats / (time.process_time() - start)


def games(cfg: Config, folder: Path) -> list[dict]:
    """Load, fork and step, on every game in turn, each some actions into its walkthrough."""
    data = cfg.alfworld or alfworld_make.build(folder, train=0, valid_unseen=30)
    envs = alfworld.load("valid_unseen", data, max_actions=10**9)
    for env in envs:
        env.reset()
        for call in env.gold()[:2]:
            env.step("", [call])
    rng, walkers = random.Random(0), [env.fork() for env in envs]

    def step(i: int) -> None:
        walker = walkers[i % len(walkers)]
        walker.step("", [Call("act", {"command": rng.choice(walker.admissible())})])
        if walker.done:
            walker.reset()

    work = {
        "game read": (lambda i: read_game(envs[i % len(envs)].game.path), min(cfg.repeats, len(envs))),
        "fork": (lambda i: envs[i % len(envs)].fork(), cfg.repeats),
        "commands and step": (step, cfg.repeats),
    }
    return [{"world": "alfworld", "what": name, "per_s": per_second(*job)} for name, job in work.items()]


def searches(cfg: Config, folder: Path) -> list[dict]:
    """A question's first search, which builds its index; further ones; and those over many passages."""
    data = cfg.musique or musique_make.build(folder, train=0, dev=100)
    envs = musique.load("dev", data)
    queries = [[call.arguments["query"] for call in env.gold()[:-1]] for env in envs]
    fresh = iter(musique.load("dev", data))
    first = per_second(lambda i: next(fresh).corpus.search(queries[i][0], 3), len(envs) - 1)
    again = per_second(
        lambda i: envs[i % len(envs)].corpus.search(queries[i % len(envs)][-1], 3), cfg.repeats
    )
    fork = per_second(lambda i: envs[i % len(envs)].fork(), cfg.repeats)
    made = musique_make.build(folder / "many", train=0, dev=100, worlds=1, entities=cfg.passages)
    start = time.process_time()
    store = Store(made / "passages_dev.jsonl")
    build = time.process_time() - start
    reopened = per_second(lambda i: Store(made / "passages_dev.jsonl"), 3)
    asked = [call.arguments["query"] for env in musique.load("dev", made) for call in env.gold()[:-1]]
    large = per_second(lambda i: store.search(asked[i % len(asked)], 3), min(cfg.repeats, 500))
    found = {
        "fork": fork, "first search, index made": first, "further searches": again,
        f"all {len(store)} passages: index made": 1 / build, "index opened": reopened, "search": large,
    }  # fmt: skip
    return [{"world": "musique", "what": name, "per_s": value} for name, value in found.items()]


def main(cfg: Config) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        rows = games(cfg, Path(folder)) + searches(cfg, Path(folder))
    forks = [row["per_s"] for row in rows if row["what"] == "fork"]
    cells = [[r["world"], r["what"], f"{1e3 / r['per_s']:.3f}", f"{r['per_s']:,.0f}"] for r in rows]
    print(table(["", "", "CPU ms", "per s"], cells))
    print(f"1,000 forks a second: {'yes' if min(forks) > TARGET else 'no'}")
    if cfg.json:
        write_json(Path(cfg.json), rows)
    return rows


if __name__ == "__main__":
    main(parse(Config))
