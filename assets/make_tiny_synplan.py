"""Makes assets/tiny_synplan, the model from which train_cmdpo.py starts where it is given none.

    python assets/make_tiny_synplan.py --out assets/tiny_synplan

It reads the prompts of envs.synplan's tiny travel world and writes plans that decode, and it adds up no
prices: it has learned from plans of the scripted careless planner, most of which break the budget. It has
seen no corrected plan, no rationale, and no instance of the train, val or test splits. Copying is drilled
first, as in make_tiny.py. Seeded: the same machine makes the same files.
"""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from make_tiny import grow, prepare

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs import synplan, synplan_travel
from envs.base import Message
from envs.synplan_verify import write_plan
from nanoplan import config


@dataclass(frozen=True)
class Config:
    out: str = "assets/tiny_synplan"  # where the HF folder goes; it must hold a chat_template.jinja
    seed: int = 0  # of everything
    plans: int = 6000  # careless plans, each of an instance of its own
    vocab_size: int = 1536  # of the tokenizer, added tokens included
    hidden: int = 64  # D
    layers: int = 3
    heads: int = 4  # H
    kv_heads: int = 1  # J
    drill_steps: int = 1000  # updates on copy drills
    drill_batch: int = 48  # drills per update
    steps: int = 1000  # updates on plans
    batch: int = 32  # plans per update
    muon_lr: float = 0.02  # matrices
    adam_lr: float = 4e-3  # embedding and norms


MAX_POSITIONS = 2048  # of the model
FIELDS = "items|name|type|flight|hotel|activity|day|stated_price|db_lookup_key"
FIELDS += "|total_stated_cost|destinations_visited"
# What may become one token, first match wins: JSON's skeleton in runs, so that a plan is little but choices.
PIECES = "|".join(
    (
        rf'(?:[\[\]{{}}",:]+(?:(?:{FIELDS})(?="))?)+',  # a plan's skeleton
        r"</?(?:plan|rationale)>",
        r"\d\d:\d\d",  # a time
        r"[FHA]\d",  # a key
        r"\d+",  # a price, a number
        r" ?[A-Z]?[a-z]+",  # a word
        r"\s+",
        r"[^\w\s]",
        r"\w",
    )
)


def main(cfg: Config) -> None:
    clock = time.perf_counter()
    torch.manual_seed(cfg.seed)
    out = Path(cfg.out)
    talks = []
    for number in range(cfg.plans):
        instance = synplan.generate("travel", number, size="tiny", split="warm")
        rng = random.Random(f"{cfg.seed}/{number}")
        plan = write_plan(synplan_travel.careless(instance, rng), compact=True)
        talks.append(([*synplan.messages(instance), Message("assistant", plan)], ()))
    print(f"{len(talks)} plans, {time.perf_counter() - clock:.0f} s", flush=True)

    chat = prepare(out, talks[:3000], cfg, pieces=PIECES, max_positions=MAX_POSITIONS)
    grow(cfg, chat, talks, max_positions=MAX_POSITIONS, clock=clock)


if __name__ == "__main__":
    main(config.parse(Config))
