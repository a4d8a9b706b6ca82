import json
import math

import pytest
import torch

from nanoplan import log


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_line_is_on_disk_when_the_call_returns(tmp_path):
    # Catches: a buffered file, which a killed run leaves empty.
    run = log.RunLog(tmp_path / "run")
    run.metrics({"step": 1, "loss": torch.tensor(0.5), "valid_rate": 1})
    run.trajectories([{"step": 1, "ids": [1, 2]}, {"step": 1, "ids": [3]}])
    assert lines(tmp_path / "run") == [{"step": 1, "loss": 0.5, "valid_rate": 1}]
    assert [row["ids"] for row in lines(tmp_path / "run", "trajectories.jsonl")] == [[1, 2], [3]]
    run.close()


def test_resume_drops_later_and_torn_lines(tmp_path):
    # Catches: steps that appear twice after a resume, or a torn line that breaks every reader of the file.
    text = "".join(json.dumps({"step": i, "loss": i / 2}) + "\n" for i in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 6, "lo')
    (tmp_path / "trajectories.jsonl").write_text('{"step": 3}\n{"step": 3}\n{"step": 4}\n{"st')
    run = log.RunLog(tmp_path, resume_step=3)
    run.metrics({"step": 4, "loss": 9.0})
    run.close()
    assert lines(tmp_path) == [{"step": i, "loss": i / 2} for i in (1, 2, 3)] + [{"step": 4, "loss": 9.0}]
    assert lines(tmp_path, "trajectories.jsonl") == [{"step": 3}, {"step": 3}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "trajectories.jsonl"]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    # Catches: lines lost without a word because one of them does not parse.
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2"):
        log.RunLog(tmp_path, resume_step=5)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_a_fresh_run_does_not_mix_with_an_old_one(tmp_path):
    # Catches: two runs in one metrics.jsonl, or an old run deleted without being asked.
    log.RunLog(tmp_path).metrics({"step": 1})
    with pytest.raises(ValueError, match="holds an earlier run"):
        log.RunLog(tmp_path)
    assert lines(tmp_path) == [{"step": 1}]
    log.RunLog(tmp_path, overwrite=True).metrics({"step": 2})
    assert lines(tmp_path) == [{"step": 2}]


def test_lines_are_strict_json(tmp_path):
    # Catches: NaN and Infinity, which json.dumps writes and other readers refuse.
    row = {"step": 1, "loss": math.nan, "deep": [{"x": -math.inf}], "t": torch.tensor(math.inf), "s": "NaN"}
    run = log.RunLog(tmp_path)
    run.metrics(row)
    run.summary({"before": {"valid_rate": math.nan}, "after": {}, "seconds": 1.5})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "deep": [{"x": None}], "t": None, "s": "NaN"}]
    assert json.loads((tmp_path / "summary.json").read_text())["before"] == {"valid_rate": None}


def test_the_table_shows_before_after_and_change(tmp_path):
    # Catches: a change computed in the wrong direction, shares printed as 0.4, columns that are not Markdown,
    # "nan %" for a rate that nobody knows.
    before = {"valid_rate": (0.4, 0.3, 0.5), "calls": 3, "loss": 0.25, "win_rate": math.nan}
    after = {"valid_rate": (0.875, 0.8, 0.9), "calls": 5, "loss": 0.125, "new": 1.0, "win_rate": math.nan}
    text = log.before_after(before, after)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["", "before", "after", "change"]
    assert rows[2] == ["valid_rate", "40.0 % [30.0 %, 50.0 %]", "87.5 % [80.0 %, 90.0 %]", "+47.5 points"]
    assert rows[3] == ["calls", "3", "5", "+2"] and rows[4] == ["loss", "0.25", "0.125", "-0.125"]
    assert rows[5] == ["new", "–", "1", "–"] and rows[6] == ["win_rate", "–", "–", "–"]
    assert len({len(line) for line in text.splitlines()}) == 1
