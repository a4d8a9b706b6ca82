"""One LoRA step of train_grpo on the built-in world with a real model, as a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file
from smollm2 import smollm2_folder

ROOT = Path(__file__).parents[1]
MAX_GB = 6.0  # resident, on a CPU, fp32

# A model that never heard of this world makes no valid plan. Equal rewards would leave nothing to update, so
# here every second episode gets a reward, and everything else is the script's own.
STEP = """
import itertools, json, resource, sys
import train_grpo
from nanoplan import feedback
rewards = itertools.cycle([1.0, 0.0])
feedback.anchored_reward = lambda verdict, outcome: next(rewards)
train_grpo.main(train_grpo.Config(**json.loads(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
"""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_lora_step_of_a_real_model_fits_a_laptop(tmp_path):
    # Catches: a sampler that disagrees with the trainer beyond toy sizes, a template without a tool format
    # that can't be trained on, activations or logits that don't fit, a step that moves no adapter.
    flags = {
        "model": str(smollm2_folder()), "out": str(tmp_path / "run"), "steps": 1, "prompts": 1, "group": 2,
        "eval_n": 0, "lora_r": 8, "lora_alpha": 16.0, "lr": 1e-4, "turns": 1, "turn_tokens": 24,
        "total_tokens": 900, "micro_tokens": 900,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", STEP, json.dumps(flags)],
        cwd=ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) < MAX_GB

    (row,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert 0 < row["tokens_trained"] == row["tokens_sampled"] <= 2 * 24
    assert 0 < row["logp_gap_mean"] <= row["logp_gap_max"] < 1e-4
    assert row["grad_norm"] > 0 and row["skipped"] == 0 and row["constant_groups"] == 0

    first, _ = (
        json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    )
    assert "<tools>" in first["text"] and '"search_hotels"' in first["text"]  # the convention of chat.py
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    moved = [name for name, tensor in adapter.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert len(moved) == 7 * 30  # seven linears in each of 30 blocks
