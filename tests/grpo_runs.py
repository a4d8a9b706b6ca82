"""train_grpo on a world and a model small enough for tests, in this process or as a script.

    python tests/grpo_runs.py '[{"out": "a", "steps": 3, ...}, {"out": "b", "trick": "slow", ...}]'

trains one run after the other; a trick is one of TRICKS. A random model never makes a valid plan, so here the
world accepts every episode, and a hash of the sampled ids decides which plan the judge prefers: rewards
differ within a group, and they are the same in every process.
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

import torch.distributed.checkpoint as dcp
from toy import tiny_model, write_tokenizer

import train_grpo
from envs import trips, triptailor
from envs.base import Verdict
from nanoplan import dist, feedback, weights
from nanoplan.chat import Chat
from nanoplan.sampler import Sampler

TINY = {"steps": 3, "prompts": 2, "group": 4, "eval_n": 0, "lr": 2e-3, "warmup": 0, "save_every": 1}
TINY |= {"turns": 2, "turn_tokens": 8, "observation_tokens": 40, "max_rows": 2, "lora_alpha": 16.0}


def make(folder: Path) -> dict:
    """A world of two cities and a random model that knows its words; returns the flags that name them.

    Every sixth id stops the model, so that a random one ends its turns at different lengths.
    """
    data = trips.build(folder / "world", seed=0, cities=2, train=5, test=3, hotels=1)
    first = triptailor.load("train", data)[0]
    corpus = [message.content for message in first.reset()]
    corpus += [json.dumps(tool.schema()) for tool in first.tools]
    model = write_tokenizer(folder / "model", corpus=corpus, vocab_size=1600)
    stops = list(range(0, Chat(model).num_ids, 6))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    chat = Chat(model)
    weights.save_model(tiny_model(chat), model)
    length = len(chat.open(first.reset(), first.tools))
    return {"model": str(model), "data": str(data), "total_tokens": length + 60}


def config(**flags) -> train_grpo.Config:
    return train_grpo.Config(**{**TINY, **flags})


def preferred(ids: list[int]) -> bool:
    return bool(zlib.crc32(repr(ids).encode()) & 1)


def score_by_ids(episodes, judge, *, score=feedback.score_for_training, **options):
    """In place of feedback.score_for_training, which it still runs: every plan passes, some are preferred."""
    score(episodes, judge, **options)
    outcomes = ["win" if preferred(episode.trajectory.ids) else "loss" for episode in episodes]
    return [Verdict(True, {"toy": True}, {"toy": 0.0}, []) for _ in episodes], outcomes


def score_equally(episodes, judge, **options):
    verdicts, outcomes = score_by_ids(episodes, judge, **options)
    return verdicts, ["win"] * len(outcomes)


def score_slowly(*args, **options):
    time.sleep(0.5)
    return score_by_ids(*args, **options)


def die_in_save(*args, save=dcp.save, **options):
    """A kill in the middle of the third save: its tensors lie there, state.json doesn't yet."""
    save(*args, **options)
    if "step_3" in str(options["checkpoint_id"]):
        os.kill(os.getpid(), signal.SIGKILL)


def leave_in_rollout(self, rows, *, step=Sampler.step):
    """SIGTERM to the last rank, at the first token of a run's second rollout. A second one would kill."""
    if self.version == 2 and dist.rank() == dist.world() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, rows)


TRICKS = {  # what is replaced by what, for one run
    "none": (feedback, "score_for_training", score_by_ids),
    "slow": (feedback, "score_for_training", score_slowly),
    "die": (dcp, "save", die_in_save),
    "leave": (Sampler, "step", leave_in_rollout),
}

if __name__ == "__main__":
    feedback.score_for_training = score_by_ids
    for flags in json.loads(sys.argv[1]):
        place, name, trick = TRICKS[flags.pop("trick", "none")]
        with mock.patch.object(place, name, trick):
            train_grpo.main(config(**flags))
    dist.close()
