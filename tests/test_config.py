import json
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from nanoplan import config


@dataclass(frozen=True)
class Config:
    out: str = "runs/x"  # run folder
    clip_high: float = 0.25  # upper clip of the ratio, unitless; Anchored GRPO
    steps: int = 40  # optimizer steps
    resume: bool = False  # continue from the newest checkpoint
    kl: float | None = None  # weight of the KL term, none = off
    reduction: Literal["token", "sequence"] = "token"  # "#" in quotes is no comment; DAPO
    targets: tuple[str, ...] = (
        "q_proj",
        "v_proj",
    )  # linears with an adapter
    compare: tuple[str, str] | None = None  # two run folders


def test_flags_set_every_type():
    # Catches: a bool flag read by truth value ("false" -> True), an optional that cannot be set to none.
    argv = "--clip_high 0.28 --steps -3 --resume false --kl 1e-3 --reduction sequence --targets a b".split()
    cfg = config.from_flags(Config, [*argv, "--compare", "x", "y"])
    assert cfg == Config(
        clip_high=0.28,
        steps=-3,
        resume=False,
        kl=1e-3,
        reduction="sequence",
        targets=("a", "b"),
        compare=("x", "y"),
    )
    argv = ["--kl=none", "--resume=true", "--targets=", "--out=a=b"]
    assert config.from_flags(Config, argv) == Config(resume=True, targets=(), out="a=b")
    assert config.from_flags(Config, []) == Config()
    assert config.from_flags(Config, ["--resume", "--steps", "7"]) == Config(resume=True, steps=7)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--clip_hgh", "0.3"], ["--clip_hgh", "nearest is --clip_high"]),
        (["--clip", "0.3"], ["--clip;", "--clip_high"]),
        (["--steps", "1e3"], ["--steps", "'1e3'", "int"]),
        (["--clip_high", "nan"], ["--clip_high", "'nan'", "float"]),
        (["--resume", "yes"], ["--resume", "'yes'", "true or false"]),
        (["--resume", "true", "false"], ["--resume", "2 values", "true or false"]),
        (["--steps", "1", "2"], ["--steps", "2 values", "int"]),
        (["--steps", "1", "--steps", "2"], ["--steps", "twice"]),
        (["--reduction", "mean"], ["--reduction", "'mean'", "token or sequence"]),
        (["--compare", "x"], ["--compare", "['x']", "str str"]),
        (["--steps="], ["--steps", "''", "int"]),
        (["0.3"], ["'0.3'", "--name"]),
    ],
)
def test_a_bad_flag_names_itself(argv, words, capsys):
    # Catches: a mistyped flag silently ignored, or an error that does not say what was wanted.
    with pytest.raises(ValueError) as error:
        config.from_flags(Config, argv)
    assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(SystemExit) as left:
        config.parse(Config, argv)
    assert left.value.code == 2 and words[0] in capsys.readouterr().err


def test_required_field_is_asked_for():
    # Catches: a TypeError from __init__ instead of the name of the missing flag.
    @dataclass(frozen=True)
    class Needs:
        bench: str  # name of a benchmark

    with pytest.raises(ValueError, match="--bench is required: str"):
        config.from_flags(Needs, [])


def test_help_is_the_trailing_comments(capsys):
    # Catches: help that forgets a field, or takes a "#" inside a string for a comment.
    with pytest.raises(SystemExit) as left:
        config.parse(Config, ["--steps", "3", "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert "--clip_high (float; default 0.25)\n      upper clip of the ratio, unitless; Anchored GRPO" in text
    assert '"#" in quotes is no comment; DAPO' in text and "linears with an adapter" in text
    assert "--kl (float or none; default none)" in text and "--resume (true or false; default false)" in text


def test_resume_with_a_changed_config_is_refused(tmp_path):
    # Catches: a resumed run that trains on with another learning rate or data, unnoticed.
    config.save(Config(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["targets"] == ["q_proj", "v_proj"]
    assert config.check_resume(Config(), tmp_path) == []
    changed = replace(Config(), steps=80, clip_high=0.3, resume=True)
    with pytest.raises(ValueError) as error:
        config.check_resume(changed, tmp_path, allow={"resume", "steps"})
    assert "clip_high: 0.25 -> 0.3" in str(error.value) and "steps" not in str(error.value)
    allowed = config.check_resume(replace(Config(), steps=80), tmp_path, allow={"steps"})
    assert allowed == ["steps: 40 -> 80"]
    with pytest.raises(ValueError, match="does not exist"):
        config.check_resume(Config(), tmp_path / "nowhere")


def test_resume_names_fields_that_came_or_went(tmp_path):
    # Catches: a field renamed between two versions of the code that passes as unchanged.
    (tmp_path / "config.json").write_text(json.dumps({"steps": 40, "old_name": 1}))
    with pytest.raises(ValueError) as error:
        config.check_resume(Config(), tmp_path)
    assert "old_name: 1 -> absent" in str(error.value) and "clip_high: absent -> 0.25" in str(error.value)
