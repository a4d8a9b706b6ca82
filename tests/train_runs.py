"""What the tests of all training scripts share: runs as processes, and what they leave in their folders."""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file


def lines(out, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (Path(out) / name).read_text().splitlines()]


def trained(out) -> dict[str, torch.Tensor]:
    """The tensors of a run's export."""
    path = out / "model" / "model.safetensors"
    return load_file(path if path.exists() else out / "adapter" / "adapter_model.safetensors")


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def spawn(script: Path, runs: list[dict], *, ranks: int = 1) -> subprocess.Popen:
    """The script on the given runs, one after the other, in one process or in `ranks`."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, str(script), json.dumps(runs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, *, code: int, timeout_s: float = 600) -> str:
    try:
        text, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == code, text
    return text


def wait_for_lines(path: Path, count: int, process) -> None:
    deadline = time.monotonic() + 500
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < deadline and process.poll() is None, f"{path} did not reach {count} lines"
        time.sleep(0.01)
