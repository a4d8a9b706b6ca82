"""Who may import whom, read from the source: an import that is not allowed here is a change of the design."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN = {"kernels", "envs", "nanoplan", "tests", "bench"}  # and every script in the root
BESIDE = ("tests", "bench", "assets")  # folders whose files may import everything

# nanoplan's files; a lower row never imports a higher one
ROWS = [
    {"config", "dist", "log", "stats", "trajectory", "reward", "options"},
    {"model", "lora", "chat", "tokens", "toolcalls", "losses", "preference", "batch", "llm", "cache", "draw"},
    {
        "weights",
        "checkpoint",
        "sampler",
        "judge",
        "judge_stats",
        "judges",
        "llm_judge",
        "local",
        "reward_model",
        "synth",
        "synth_audit",
    },
    {
        "rollout",
        "critic",
        "critique",
        "advice",
        "advice_judge",
        "remote",
        "evaluate",
        "summary",
        "report",
        "agents",
        "anchors",
        "training",
        "best_of",
        "feedback",
        "pairs",
        "reference",
    },
]
OTHERS = {  # floor -> what it may import besides the standard library and nanoplan's own floors
    "kernels": {"torch", "triton"},
    "envs": {"numpy", "jsonschema", "httpx"},
}
MODULE_OF = {"huggingface-hub": "huggingface_hub"}  # where a package and its module differ in name


def requirements():
    """Modules that requirements.txt installs: what the library and the scripts may import."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    names = re.findall(r"^([A-Za-z0-9_-]+)", text, flags=re.MULTILINE)
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in names} - {"pytest"}


def imports(source, package):
    """[(line, module's full name, whether it must be there for the file to load)] of Python source text.

    package  the dotted package that relative imports start from
    """
    found = []

    def visit(node, optional):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((child.lineno, alias.name, not optional) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parts = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*parts, *([child.module] if child.module else [])])
                own = base.split(".")[0] in OWN  # `from nanoplan import dist` names a module
                names = [f"{base}.{alias.name}" for alias in child.names] if own else [base]
                found.extend((child.lineno, name, not optional) for name in names)
            else:
                guard = (ast.Try, ast.If, ast.FunctionDef, ast.AsyncFunctionDef)
                visit(child, optional or isinstance(child, guard))

    visit(ast.parse(source), False)
    return found


def row_of(name):
    rows = [row for row, names in enumerate(ROWS) if name in names]
    if not rows:
        raise ValueError(f"nanoplan/{name}.py has no row; give it one in ROWS")
    return rows[0]


def refusal(path, module, needed):
    """Why the file at path (relative to the root) may not import module; "" if it may."""
    floor = path.parts[0] if len(path.parts) > 1 else "script"
    top = module.split(".")[0]
    scripts = {p.stem for p in ROOT.glob("*.py")}
    if floor in BESIDE or top in sys.stdlib_module_names:
        return ""
    if top in ("tests", "bench") or top in scripts:
        return f"nothing imports {top}"
    if top not in OWN:
        if top not in OTHERS.get(floor, requirements()):
            return f"{floor} does without {top}"
        return "triton is optional: import it inside try or if" if top == "triton" and needed else ""
    if floor == "script":
        return "" if top in ("nanoplan", "envs") else "scripts import nanoplan and envs"
    if floor == top == "nanoplan":
        target = module.split(".")[1] if "." in module else ""
        if target and (ROOT / "nanoplan" / f"{target}.py").exists() and row_of(target) > row_of(path.stem):
            return f"row {row_of(path.stem)} does not import row {row_of(target)}"
        return ""
    if floor == top:
        return ""
    if floor == "nanoplan" and top == "envs":
        may = module.startswith("envs.base") or path.stem == "synth"
        return "" if may else "nanoplan knows envs.base only"
    return "" if (floor, top) == ("nanoplan", "kernels") else f"{floor} does not import {top}"


def refusals(path, source):
    package = ".".join(path.parts[:-1])
    reasons = [
        (line, module, refusal(path, module, needed)) for line, module, needed in imports(source, package)
    ]
    return [f"{path}:{line} imports {module}: {why}" for line, module, why in reasons if why]


def test_every_import_keeps_to_the_floors():
    # Catches: a kernel that knows language, an environment that needs torch, a library that needs a script.
    files = [p for p in ROOT.glob("*.py")]
    files += [p for top in ("kernels", "envs", "nanoplan") for p in (ROOT / top).rglob("*.py")]
    assert len(files) > 10, files
    wrong = [w for f in files for w in refusals(f.relative_to(ROOT), f.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_every_file_of_nanoplan_has_a_row():
    # Catches: a new file that may import everything because no row forbids it.
    for path in (ROOT / "nanoplan").glob("*.py"):
        assert path.stem == "__init__" or row_of(path.stem) >= 0
    with pytest.raises(ValueError, match="no row"):
        row_of("utils")


@pytest.mark.parametrize(("file", "source", "why"), [
    ("nanoplan/dist.py", "from nanoplan import model", "row 0 does not import row 1"),
    ("nanoplan/losses.py", "def f():\n    from nanoplan.rollout import Episode", "row 1 does not"),
    ("nanoplan/model.py", "from . import sampler", "row 1 does not import row 2"),
    ("nanoplan/rollout.py", "from envs import triptailor", "envs.base only"),
    ("nanoplan/model.py", "import transformers", "does without transformers"),
    ("nanoplan/model.py", "from bench.step import f", "nothing imports bench"),
    ("nanoplan/model.py", "import eval as e\nimport train_grpo", ""),
    ("kernels/decode.py", "import triton.language as tl", "optional"),
    ("kernels/decode.py", "import numpy", "does without numpy"),
    ("kernels/decode.py", "from nanoplan import dist", "kernels does not import nanoplan"),
    ("envs/trips.py", "import torch", "does without torch"),
    ("envs/trips.py", "import nanoplan.reward", "envs does not import nanoplan"),
    ("train_x.py", "from kernels.clip_loss import clip_loss", "scripts import nanoplan and envs"),
])  # fmt: skip
def test_a_forbidden_import_is_found(file, source, why):
    # Catches: a check that reads top-level `import x` only, and so allows what it should refuse.
    found = refusals(Path(file), source)
    if "train_grpo" in source and not (ROOT / "train_grpo.py").exists():
        why = "does without"
    assert len(found) >= 1 and why in found[0], found


@pytest.mark.parametrize(("file", "source"), [
    ("nanoplan/rollout.py", "from envs.base import Env\nfrom nanoplan import dist, sampler, trajectory"),
    ("nanoplan/synth.py", "from envs import trips"),
    ("nanoplan/model.py", "import math\nfrom torch import nn\nfrom kernels.attention import packed_causal"),
    ("kernels/decode.py", "try:\n    import triton\nexcept ImportError:\n    triton = None"),
    ("kernels/decode.py", "from kernels import runs_triton"),
    ("train_x.py", "import torch\nfrom nanoplan.config import parse\nfrom envs import BENCHMARKS"),
    ("bench/step.py", "import trl, transformers, train_grpo, tests"),
])  # fmt: skip
def test_an_allowed_import_passes(file, source):
    # Catches: a check so strict that it is switched off.
    assert refusals(Path(file), source) == []
