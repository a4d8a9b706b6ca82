"""train_critic on a world and models small enough for tests, in this process or as a script.

    python tests/critic_runs.py '[{"out": "a", "steps": 3, ...}, {"out": "b", "trick": "slow", ...}]'

trains one run after the other; a trick is one of TRICKS. Random models write no well-formed critique, solve
no task: here a hash of the critic's ids decides whether a critique is well formed, and a hash of the
agent's ids whether a continuation succeeds: rewards differ, and they are the same in every process.
"""

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from toy import Counter, tiny_model, write_tokenizer

import train_critic
from envs.base import Message
from nanoplan import critic, dist, weights
from nanoplan.chat import Chat
from nanoplan.critique import PROMPTS, Critique, Review

TINY = {
    "steps": 3,
    "prompts": 2,
    "group": 3,
    "draws": 3,
    "eval_n": 0,
    "lr": 2e-3,
    "warmup": 0,
    "save_every": 1,
}
TINY |= {"turns": 4, "turn_tokens": 8, "observation_tokens": 40, "critic_tokens": 8, "low": 1, "high": 2}
TINY |= {"lora_alpha": 16.0, "eval_trials": 1, "eval_protocol": "window:1-2"}


class Talk(Counter):
    """Answers any text; over after the task's number of turns. `quick` ones are over after the first."""

    def step(self, text, calls):
        self.total += 1
        over = self.total >= self.task.data["target"]
        self.answer_text, self.done = text, over
        return ([] if over else [Message("user", f"{self.total}: {len(text)} characters")]), over


def tasks(cfg) -> tuple[list, list]:
    """In place of load_tasks: some episodes end before the critic speaks, so that slots are drawn again."""
    worlds = [Talk(1 + i % 4, name=f"train/{i}") for i in range(24)]
    held_out = [Talk(3, name=f"test/{i}") for i in range(cfg.eval_n)]
    for world in worlds + held_out:
        world.tools = []
    return worlds, held_out


def coin(ids: list[int], sides: int) -> int:
    return zlib.crc32(repr(ids).encode()) % sides


def read_by_hash(self: Review) -> Critique:
    """In place of Review.read: one critique in four is malformed."""
    faults = [] if zlib.crc32(self.answer_text.encode()) % 4 else ["toy: by hash"]
    return Critique(self.answer_text, "a", "b", faults)


def outcome_by_hash(episode, *, overflow, real=critic.outcome) -> float | None:
    known = real(episode, overflow=overflow)
    return None if known is None else float(coin(episode.trajectory.ids, 2))


def make(folder: Path) -> dict:
    """Two random models that stop at every sixth id; returns the flags that name them."""
    model = write_tokenizer(folder / "critic", corpus=[*PROMPTS.values(), "Task User Agent characters"])
    stops = list(range(0, Chat(model).num_ids, 6))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    chat = Chat(model)
    weights.save_model(tiny_model(chat), model)
    weights.save_model(tiny_model(chat, seed=1), folder / "agent", extra_files_from=model)
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (folder / "agent" / name).is_file(), name
    return {"model": str(model), "agent": str(folder / "agent"), "total_tokens": 400, "critic_total": 600}


def config(**flags) -> train_critic.Config:
    return train_critic.Config(**{**TINY, **flags})


def measure_slowly(*args, real=train_critic.metrics):
    time.sleep(0.5)
    return real(*args)


def die_in_save(*args, save=dcp.save, **options):
    """A kill in the middle of the third save: its tensors lie there, state.json doesn't yet."""
    save(*args, **options)
    if "step_3" in str(options["checkpoint_id"]):
        os.kill(os.getpid(), signal.SIGKILL)


def leave_in_rollout(agent, plan, states, *, key, until, branch_out=critic.branch_out):
    """SIGTERM to the last rank before the continuations of the second step. A second one would kill."""
    if key[1] == 2 and dist.rank() == dist.world() - 1 and not dist.got_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    return branch_out(agent, plan, states, key=key, until=until)


TRICKS = {  # what is replaced by what, for one run
    "none": (train_critic, "metrics", train_critic.metrics),
    "slow": (train_critic, "metrics", measure_slowly),
    "die": (dcp, "save", die_in_save),
    "leave": (critic, "branch_out", leave_in_rollout),
}
REPLACED = [
    (train_critic, "load_tasks", tasks), (Review, "read", read_by_hash), (critic, "outcome", outcome_by_hash),
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    for place, name, new in REPLACED:
        setattr(place, name, new)
    for flags in json.loads(sys.argv[1]):
        place, name, trick = TRICKS[flags.pop("trick", "none")]
        with mock.patch.object(place, name, trick):
            train_critic.main(config(**flags))
    dist.close()
