"""train_cmdpo on pairs and a model small enough for tests, in this process or as a script.

    python tests/cmdpo_runs.py '[{"out": "a", "stage": "sft", ...}, {"out": "b", "trick": "slow", ...}]'

trains one run after the other; a trick is one of TRICKS.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed.checkpoint as dcp
from toy import tiny_model, write_tokenizer

import train_cmdpo
from nanoplan import dist, weights
from nanoplan.chat import Chat
from nanoplan.evaluate import write_lines

TINY = {"eval_n": 0, "sft_epochs": 1, "sft_batch": 4, "batch": 4, "lr": 2e-3, "beta": 0.1, "warmup": 0.0}
TINY |= {"max_tokens": 400, "micro_tokens": 800, "lora_alpha": 16.0, "rows": 4, "save_every": 1}
WORDS = "plan hotel flight day budget price dear cheap city train museum river".split()


def record(i: int) -> dict:
    """A pair of synth's form, number i; made of words, of different lengths."""
    words = [WORDS[(i * 7 + k * k) % len(WORDS)] for k in range(3 + i % 4)]
    severity = 0.1 + 0.8 * (i * 5 % 11) / 11
    fault = {
        "passed": False,
        "raw": 84 * severity,
        "unit": "USD",
        "tau": 84.0,
        "normalised": severity,
        "weight": 1.0,
    }
    fine = fault | {"passed": True, "raw": 0.0, "normalised": 0.0}
    chosen = f"<plan>{' '.join(words)}</plan>"
    return {
        "id": f"toy/{i}",
        "messages": [{"role": "system", "content": f"Plan {i}."}, {"role": "user", "content": words[0]}],
        "chosen": chosen, "rejected": f"<plan>{' '.join(words[::-1])} {i}</plan>",
        "sft": f"<rationale>{words[1]}</rationale>\n{chosen}",
        "verdict_chosen": {"cost": fine}, "verdict_rejected": {"cost": fault},
        "soft_chosen": i % 3 / 2, "soft_rejected": 0.5,
        "severity": {"normalised": severity, "raw": 84 * severity, "unit": 1.0},
    }  # fmt: skip


def make(folder: Path, num_pairs: int = 12) -> dict:
    """Pairs and a random model that knows their words; returns the flags that name them.

    Every sixth id stops the model, so that a random one ends its plans soon.
    """
    rows = [record(i) for i in range(num_pairs)]
    model = write_tokenizer(folder / "model", corpus=[json.dumps(row) for row in rows], vocab_size=600)
    stops = list(range(0, Chat(model).num_ids, 6))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    weights.save_model(tiny_model(Chat(model)), model)
    write_lines(folder / "pairs.jsonl", rows)
    return {"model": str(model), "data": str(folder / "pairs.jsonl")}


def config(**flags) -> train_cmdpo.Config:
    return train_cmdpo.Config(**{**TINY, **flags})


def die_in_save(*args, save=dcp.save, **options):
    """A kill in the middle of the save that DIE_AT names: its tensors lie there, state.json doesn't yet."""
    save(*args, **options)
    if Path(options["checkpoint_id"]).name == os.environ["DIE_AT"] + ".tmp":
        os.kill(os.getpid(), signal.SIGKILL)


def update_slowly(*args, update=train_cmdpo.update, **options):
    time.sleep(0.5)
    return update(*args, **options)


def leave_in_update(*args, update=train_cmdpo.update, **options):
    """SIGTERM to the last rank in its first update of the preference stage. A second one would kill."""
    share = args[3]
    if share.func is train_cmdpo.pref_share and dist.rank() == dist.world() - 1 and not dist.got_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    return update(*args, **options)


TRICKS = {  # what is replaced by what, for one run
    "none": (train_cmdpo, "update", train_cmdpo.update),
    "slow": (train_cmdpo, "update", update_slowly),
    "die": (dcp, "save", die_in_save),
    "leave": (train_cmdpo, "update", leave_in_update),
}

if __name__ == "__main__":
    for flags in json.loads(sys.argv[1]):
        place, name, trick = TRICKS[flags.pop("trick", "none")]
        os.environ["DIE_AT"] = flags.pop("die_at", "")
        with mock.patch.object(place, name, trick):
            train_cmdpo.main(config(**flags))
    dist.close()
