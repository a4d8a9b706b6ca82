"""train_grpo through the interpreted kernels against the torch path, each in a process of its own."""

import json
import os
import subprocess
import sys

import grpo_runs
import pytest
from train_runs import lines

from kernels import INTERPRET

FLAGS = {"prompts": 2, "group": 2, "turns": 2, "turn_tokens": 3, "updates": 2, "dual_clip": 3.0}
PATHS = {"torch": {}, "triton": {"TRITON_INTERPRET": "1"}}


@pytest.mark.skipif(not INTERPRET, reason="runs with the interpreted kernels' tests, make test-kernels")
def test_three_steps_are_those_of_the_torch_path(tmp_path):
    """Catches: a kernel that is right alone and wrong as the scripts call it: shapes, dtypes, shared prompts,
    the second update's ratios."""
    world = grpo_runs.make(tmp_path / "world")
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NANOPLAN_KERNELS")}
    processes = []
    for name, env in PATHS.items():
        flags = json.dumps([world | FLAGS | {"out": str(tmp_path / name)}])
        processes.append(subprocess.Popen(
            [sys.executable, grpo_runs.__file__, flags], env=clean | {"OMP_NUM_THREADS": "1"} | env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ))  # fmt: skip
    for process in processes:
        text, _ = process.communicate()
        assert process.returncode == 0, text
    want, ours = (lines(tmp_path / name) for name in PATHS)
    assert len(ours) == len(want) == 3
    for a, b in zip(ours, want, strict=True):
        for name in ("loss", "entropy", "reward_mean", "ratio_max", "kl_old"):
            assert a[name] == pytest.approx(b[name], abs=1e-4), (name, a, b)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3) and b["grad_norm"] > 0
        assert a["logp_gap_max"] < 1e-4
    want, ours = (lines(tmp_path / name, "trajectories.jsonl") for name in PATHS)
    assert [row["ids"] for row in ours] == [row["ids"] for row in want] and len(want) == 12
    assert max(row["ratio_max"] for row in lines(tmp_path / "torch")) > 1.01  # of the second update
