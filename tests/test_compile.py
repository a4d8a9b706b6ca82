"""Which path runs, and that every kernel builds for the GPUs it is meant for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import choose_path

ROOT = Path(__file__).parents[1]


def run(code_or_file, *args, **env):
    """Run python in a process of its own with TRITON_INTERPRET and NANOPLAN_KERNELS as given only."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NANOPLAN_KERNELS")}
    where = [str(code_or_file)] if isinstance(code_or_file, Path) else ["-c", code_or_file]
    done = subprocess.run(
        [sys.executable, *where, *args], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_every_kernel_builds_without_spills(tmp_path):
    """Catches a block size that spills or does not fit an A100's or H100's shared memory."""
    pytest.importorskip("triton", reason="triton is not installed: nothing to build")
    code, text = run(
        ROOT / "bench" / "cubins.py", "--json", str(tmp_path / "rows.json"), TRITON_DEFAULT_FP_FUSION="1"
    )
    assert code == 0, text
    print(text)
    rows = json.loads((tmp_path / "rows.json").read_text())
    for row in rows:
        assert row["spills"] == row["stack"] == 0, row
        assert row["shared"] <= row["shared_limit"], row
    built = {row["kernel"].split()[0].rstrip(",") for row in rows}
    assert built == jitted(), "a kernel without a compile check, or a check without a kernel"
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90"}


def jitted() -> set[str]:
    """Names of all functions under @jit in kernels/."""
    names = set()
    for file in (ROOT / "kernels").glob("*.py"):
        lines = file.read_text().splitlines()
        names |= {lines[i + 1].split("(")[0].removeprefix("def ") for i, x in enumerate(lines) if x == "@jit"}
    return names


def test_every_kernel_has_a_line_in_the_docs():
    """Catches a kernel that nobody explains."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    assert [name for name in jitted() if name not in text] == []


@pytest.mark.parametrize(
    "wanted, installed, interpret, gpu, path",
    [
        ("", True, False, False, "torch"),
        ("", True, True, False, "triton"),
        ("", True, False, True, "triton"),
        ("", False, False, True, "torch"),
        ("torch", True, True, True, "torch"),
        ("triton", True, False, True, "triton"),
        ("triton", True, False, False, "is no GPU"),
        ("triton", False, False, True, "not installed"),
        ("", False, True, False, "not installed"),
        ("cuda", True, False, True, "wanted torch, triton"),
    ],
)
def test_which_path_runs(wanted, installed, interpret, gpu, path):
    """Catches a path that is taken silently although another one was asked for."""
    if path in ("torch", "triton"):
        assert choose_path(wanted, installed=installed, interpret=interpret, gpu=gpu) == path
    else:
        with pytest.raises(ValueError, match=path):
            choose_path(wanted, installed=installed, interpret=interpret, gpu=gpu)


def test_the_environment_chooses_the_path():
    """Catches NANOPLAN_KERNELS or TRITON_INTERPRET read too late, or under another name."""
    pytest.importorskip("triton", reason="triton is not installed")
    show = "import kernels; print(kernels.PATH, kernels.INTERPRET)"
    assert run(show, TRITON_INTERPRET="1") == (0, "triton True\n")
    assert run(show, TRITON_INTERPRET="1", NANOPLAN_KERNELS="torch") == (0, "torch True\n")
    code, text = run(show, NANOPLAN_KERNELS="cuda")
    assert code != 0 and "wanted torch, triton or nothing" in text


def test_kernels_import_without_triton():
    """Catches an import of triton that is not optional: CPU builds of torch come without it."""
    code, text = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kernels, kernels.linear_logp, kernels.clip_loss, kernels.decode, kernels.attention\n"
        "assert kernels.triton is None and kernels.PATH == 'torch'\n"
        "print(kernels.linear_logp.linear_logp("
        "torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64)))"
    )
    assert code == 0, text
