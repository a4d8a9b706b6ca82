"""The script itself, on the built-in model and world: it learns."""

import json
from pathlib import Path

import pytest

import train_grpo

TINY = Path(__file__).parents[1] / "assets" / "tiny"


def test_sixteen_steps_raise_the_valid_rate(tmp_path):
    """A sign error, a shifted mask or an adapter that the sampler does not see: nothing would rise."""
    config = train_grpo.Config(model=str(TINY), out=str(tmp_path / "run"), steps=16, eval_n=0)
    train_grpo.main(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    valid = [row["valid_rate"] for row in rows]
    assert max(row["logp_gap_max"] for row in rows) < 1e-4
    # 512 plans each; their standard error is about 3 points, the rise about 20
    assert sum(valid[-4:]) / 4 > sum(valid[:4]) / 4 + 0.08, valid


@pytest.mark.slow
def test_the_default_run_learns_to_plan(tmp_path):
    """What `make train` promises, on a seed that it does not use. The bound leaves room for the noise of
    256 requests and another CPU's last bits, which 72 steps amplify; README.md has three seeds' rates."""
    summary = train_grpo.main(train_grpo.Config(model=str(TINY), out=str(tmp_path / "run"), seed=1))
    before, after = summary["before"], summary["after"]
    assert after["valid_rate"] >= max(0.72, before["valid_rate"] + 0.25), summary
    assert after["win_rate"] > before["win_rate"] + 0.1, summary
