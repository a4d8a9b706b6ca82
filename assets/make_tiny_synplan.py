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
from make_tiny import encode, grow, train_tokenizer, write_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs import synplan, synplan_travel
from envs.base import Message
from envs.synplan_verify import write_plan
from nanoplan import config
from nanoplan.chat import Chat
from nanoplan.model import ModelConfig


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
        talks.append([*synplan.messages(instance), Message("assistant", plan)])
    print(f"{len(talks)} plans, {time.perf_counter() - clock:.0f} s", flush=True)

    def model_config(vocab_size: int) -> ModelConfig:
        return ModelConfig(
            architecture="Qwen3ForCausalLM", vocab_size=vocab_size, hidden_size=cfg.hidden,
            intermediate_size=3 * cfg.hidden, num_layers=cfg.layers, num_heads=cfg.heads,
            num_kv_heads=cfg.kv_heads, head_dim=cfg.hidden // cfg.heads, max_positions=2048, rope_theta=1e4,
            norm_eps=1e-6, tied=True, qk_norm=True,
        )  # fmt: skip

    # the template needs a tokenizer to render with: a throw-away one first
    write_folder(out, train_tokenizer(["a"], 300), model_config(300))
    chat = Chat(out)
    texts = [chat.render(messages, prompt=False) for messages in talks[:3000]]
    tokenizer = train_tokenizer(texts, cfg.vocab_size, pieces=PIECES)
    write_folder(out, tokenizer, model_config(tokenizer.get_vocab_size()))
    chat = Chat(out)
    chat.check()
    encoded = [encode(chat, messages, ()) for messages in talks]
    grow(
        cfg,
        chat,
        encoded,
        model_config(chat.num_ids),
        start=tokenizer.token_to_id("<|im_start|>"),
        clock=clock,
    )


if __name__ == "__main__":
    main(config.parse(Config))
