"""Seconds of one core for 1,000 stored plans of each of the three planning benchmarks, official and strict.

    python bench/scoring.py                                   # on made worlds, a minute
    python bench/scoring.py --travelplanner DIR --naturalplan DIR --planbench DIR --json runs/scoring.json

The plans are the requests' own gold plans, each second one that of another request, so that most of those
fail somewhere; all are read from text, as a stored answer is. The target is 10 seconds for each benchmark.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from envs import BENCHMARKS, planbench_make
from nanoplan.config import parse
from nanoplan.log import table, write_json
from tests.naturalplan_world import write_world
from tests.travelplanner_world import build

TARGET_S = 10.0


@dataclass(frozen=True)
class Config:
    travelplanner: str = ""  # folder with train.csv or .jsonl and database/; empty = a made world
    naturalplan: str = ""  # folder with the three files; empty = a made world
    planbench: str = ""  # checkout of LLMs-Planning; empty = made instances
    plans: int = 1000  # scored of each benchmark
    json: str = ""  # file for the table's rows


def environments(cfg: Config, name: str, folder: Path) -> list:
    """Requests that have a gold plan."""
    load = BENCHMARKS[name].load
    if name == "travelplanner":
        return load("train", cfg.travelplanner or build(folder))
    if name == "naturalplan":
        if not cfg.naturalplan:
            write_world(folder)
        return load("test", cfg.naturalplan or folder, shots=0)
    data = cfg.planbench or planbench_make.build(folder, seed=0, num=50, blocks=(3, 4, 5))
    return load("blocksworld", data) + load("mystery_blocksworld", data)


def gold(env) -> str:
    return env.gold() if callable(env.gold) else json.dumps(env.gold, ensure_ascii=False)


def measure(cfg: Config, name: str, folder: Path) -> dict:
    envs = environments(cfg, name, folder)
    answers = [gold(env) for env in envs]
    work = []
    for i in range(cfg.plans):
        env = envs[i // 2 % len(envs)]
        work.append((env, answers[(i // 2 + i % 2 * (1 + i // (2 * len(envs)))) % len(envs)]))
    score = BENCHMARKS[name].score
    score(*work[0])  # what is read once per process
    wall, cpu = time.perf_counter(), time.process_time()
    scores = [score(env, answer) for env, answer in work]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    passed = {part: sum(row[part]["pass"] for row in scores) for part in ("official", "strict")}
    row = {"benchmark": name, "requests": len(envs), "plans": cfg.plans, "cpu_s": cpu, "wall_s": wall}
    row |= {"passed_official": passed["official"], "passed_strict": passed["strict"]}
    return row | {"plans_per_s": cfg.plans / cpu, "within_target": cpu * 1000 / cfg.plans < TARGET_S}


def main(cfg: Config) -> list[dict]:
    rows = []
    for name in ("travelplanner", "naturalplan", "planbench"):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(cfg, name, Path(folder)))
    head = ["", "requests", "plans", "pass official", "pass strict", "CPU s", "plans / s", "1,000 in 10 s"]
    cells = [
        [r["benchmark"], r["requests"], r["plans"], r["passed_official"], r["passed_strict"],
         f"{r['cpu_s']:.2f}", f"{r['plans_per_s']:.0f}", "yes" if r["within_target"] else "no"]
        for r in rows
    ]  # fmt: skip
    print(table(head, cells))
    if cfg.json:
        write_json(Path(cfg.json), rows)
    return rows


if __name__ == "__main__":
    main(parse(Config))
