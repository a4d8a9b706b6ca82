"""Every recipe is run with programs that only write down how they were called, and each call's flags are read
by the script that would get them."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nanoplan import config

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.sh"))
ARGUMENTS = {  # of those that want some
    "anchored_grpo": [["anchored"], ["score", "--reward", "score"], ["syn", "--references", "x"]],
    "anchored_eval": [["untrained"], ["anchored", "--trials", "8"]],
    "anchored_judges": [["anchored", "untrained"]],
    "cmdpo_pref": [["dpo", "--loss", "dpo"]],
    "critic_eval": [["table1"], ["table2"], ["table6"], ["table7"]],
    "cmdpo_eval": [["sft", "x"]],
    "cmdpo_external": [["zero_shot"], ["mas"]],
    "cmdpo_table2": [["models"], ["models", "rewrite"], ["scripts"]],
    "cmdpo_table9": [["draw"], ["grade"]],
}
VARIABLE = re.compile(r"\$\{?([A-Z][A-Z_0-9]+)\b")
OPTIONAL = {
    "BENCH",
    "SPLIT",
    "SEEDS",
    "ROWS",
    "BASELINES",
    "MARGINS",
    "STEPS",
    "REQUESTS",
}  # what a recipe chooses itself
RECORD = """#!{python}
import json, sys
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def calls_of(recipe: Path, arguments: list[str], tmp_path: Path) -> list[list[str]]:
    """Arguments of every python and torchrun that the recipe starts."""
    log = tmp_path / "calls.jsonl"
    for name in ("python", "torchrun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(RECORD.format(python=sys.executable, log=str(log)))
        program.chmod(0o755)
    file = tmp_path / "input.jsonl"
    file.write_text("{}\n")
    values = {name: str(file) for path in RECIPES for name in VARIABLE.findall(path.read_text())}
    for name in values.keys() & {"AGENT", "JUDGE", "JUDGES", "RERANKER"}:
        values[name] = "http://127.0.0.1:9/v1#m"
    for name in OPTIONAL & values.keys():
        del values[name]
    values |= {
        "PYTHON": "python",
        "RUNS": str(tmp_path / "runs"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(recipe), *arguments], cwd=ROOT, env=os.environ | values, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


def names_in(script: Path) -> dict:
    """What a script defines, with its folder on the path as python has it."""
    sys.path.insert(0, str(script.parent))
    try:
        return runpy.run_path(str(script))
    finally:
        sys.path.remove(str(script.parent))


def read(call: list[str]) -> str:
    """Parse a call's flags as the script it starts does; returns the script."""
    if call[0] == "-m":
        module = importlib.import_module(call[1])
        if hasattr(module, "Config"):
            config.from_flags(module.Config, call[2:])
        return call[1]
    at = next(i for i, word in enumerate(call) if word.endswith(".py"))
    script = ROOT / call[at]
    assert script.is_file(), call
    names = names_in(script)
    if "Config" in names:
        cfg = config.from_flags(names["Config"], call[at + 1 :])
        if call[at] == "eval.py":
            names["check"](cfg)
    return call[at]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_calls_what_exists_with_flags_that_exist(recipe, tmp_path):
    # Catches: a flag that was renamed after the recipe was written, a script that has moved, a bash mistake.
    for number, arguments in enumerate(ARGUMENTS.get(recipe.stem, [[]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        calls = calls_of(recipe, arguments, folder)
        assert calls and all(read(call) for call in calls)


def test_recipes_say_what_they_make_and_cost():
    # Catches: a row of a table without a word on what it takes, or on whether it was ever run.
    assert len(RECIPES) > 5
    for recipe in RECIPES:
        text = recipe.read_text()
        assert text.startswith("#!/usr/bin/env bash\n# ") and os.access(recipe, os.X_OK), recipe
        assert max(map(len, text.splitlines())) <= 120, recipe


def rates(**values) -> dict:
    return {name: {"value": value} for name, value in values.items()}


TABLES = {  # of the laptop recipes: the files of two seeds of a row, and the row
    "anchored": (
        "sft/eval/results.json",
        [
            {"strict": rates(valid_rate=valid, win_rate=0.25), "judges": {"rubric": {"win_rate": 0.5}}}
            for valid in (0.5, 0.4)
        ],
        "| sft | 2 | 45.0 ± 5.0 | 50.0 ± 0.0 | 25.0 ± 0.0 | – | 39.5 |",
    ),
    "cmdpo": (
        "edit_dpo/summary.json",
        [
            {
                "before": {"pass_rate": 0.5},
                "after": {"pass_rate": after, "decode_rate": 1.0, "soft_score": 0.1},
                "seconds": 60,
            }
            for after in (0.7, 0.8)
        ],
        "| edit_dpo | 2 | 75.0 ± 5.0 | 100.0 ± 0.0 | 0.100 ± 0.000 | +25.0 | 1.0 | 78.3 |",
    ),
    "critic": (
        "selfcall/summary.json",
        [
            {"before": {"success_no_critic": 0.05, "success_untrained": 0.1}, "after": {"success": after}}
            for after in (0.4, 0.5)
        ],
        "| selfcall | 2 | 5.0 ± 0.0 | 10.0 ± 0.0 | 45.0 ± 5.0 | +40.0 | 25.31 |",
    ),
}


@pytest.mark.parametrize("paper", TABLES)
def test_a_laptop_table_shows_the_mean_and_half_the_spread(paper, tmp_path, capsys):
    # Catches: a table that stops at a row which is only half there, or subtracts the wrong way round.
    path, files, row = TABLES[paper]
    for seed, content in enumerate(files):
        place = tmp_path / str(seed) / path
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(content))
    names_in(ROOT / "recipes" / f"laptop_{paper}_table.py")["main"](tmp_path)
    assert capsys.readouterr().out.splitlines()[2:] == [row]
