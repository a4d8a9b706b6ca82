"""Build every kernel for sm_80 and sm_90 at the shapes of Qwen3-4B and Llama-3-8B without a GPU.

    python bench/cubins.py                     # about a minute; a second time from triton's cache
    python bench/cubins.py --only _decode --json runs/cubins.json

Columns: registers per thread, bytes of stack, local loads and stores in the machine code (spills), shared
memory. Needs triton (its wheel brings ptxas and cuobjdump) and a process in which TRITON_INTERPRET is not
set. Tests call this file in a process of its own; docs/kernels.md keeps the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    sys.exit("TRITON_INTERPRET=1: interpreted kernels cannot be compiled; unset it")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import clip_loss, decode, linear_logp
from nanoplan.config import parse

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes one program may use
WIDTH = {"Qwen3-4B": 2560, "Llama-3-8B": 4096}  # D; both have 32 query and 8 key/value heads of width 128
FLOATS = ("scale", "low", "high", "dual", "kl_beta")
HALF = "*bf16"


@dataclass(frozen=True)
class Config:
    only: str = ""  # build only the kernels whose name contains this
    json: str = ""  # file for the table's rows


@dataclass(frozen=True)
class Build:
    """One kernel at one shape, as the public functions launch it."""

    name: str  # row in the table
    kernel: object  # the jitted function
    types: dict[str, str]  # argument -> type, where it is not *fp32 (pointers), fp32 (FLOATS) or i32
    constants: dict[str, object]
    options: dict[str, int]  # num_warps, num_stages
    only: int = 0  # capability, or 0 for both


def fused(model: str, pointer: str, capability: int) -> Build:
    how = dict(linear_logp.TILES[capability, 2 if pointer == HALF else 4])
    options = {k: how.pop(k) for k in ("num_warps", "num_stages")}
    constants = how | {"D": WIDTH[model], "COLUMNS": linear_logp.SPLIT, "LOW": linear_logp.LOW, "UP": False}
    types = {"h_ptr": pointer, "w_ptr": pointer}
    return Build(
        f"_logp_fwd {pointer[1:]}, {model}", linear_logp._logp_fwd, types, constants, options, capability
    )


def reduce(model: str) -> Build:
    types = {"h_ptr": HALF, "w_ptr": HALF, "y_ptr": "*i64"}
    constants = {"LOW": linear_logp.LOW, "LN2": linear_logp.LN2, "D": WIDTH[model], "BM": 16, "BD": 128}
    return Build(f"_logp_reduce bf16, {model}", linear_logp._logp_reduce, types, constants, {})


def partial(pointer: str, rows: int, what: str) -> Build:
    how = dict(decode.TILES[2 if pointer == HALF else 4])
    options = {k: how.pop(k) for k in ("num_warps", "num_stages")}
    types = {name: "*i32" for name in ("lengths_ptr", "slots_ptr", "starts_ptr", "members_ptr")}
    types |= {name: pointer for name in ("q_ptr", "k_ptr", "v_ptr")}
    constants = how | {"PER_KV": 4, "E": 128, "BE": 128, "LOW": decode.LOW, "SPLIT": decode.SPLIT}
    constants |= {"ROWS": rows, "UP": False}
    return Build(f"_decode_partial {pointer[1:]}, {what}", decode._decode_partial, types, constants, options)


def builds() -> list[Build]:
    """Every kernel at the configurations that the public functions choose. H, J, E as in both models."""
    head = {"LOW": linear_logp.LOW, "LN2": linear_logp.LN2, "B": 4096}
    grad = {"LOG2E": linear_logp.LOG2E, "B": 4096}
    clip = {"MAX": clip_loss.MAX_LOG_RATIO, "B": clip_loss.BLOCK}
    merge = {"E": 128, "BE": 128, "LOW": decode.LOW}
    eight = {"num_warps": 8}
    return [
        *(fused(model, HALF, capability) for model in WIDTH for capability in SHARED_LIMIT),
        *(fused("Qwen3-4B", "*fp32", capability) for capability in SHARED_LIMIT),
        *(reduce(model) for model in WIDTH),
        Build("_row_head", linear_logp._row_head, {"y_ptr": "*i64"}, head, eight),
        Build("_row_grad to bf16", linear_logp._row_grad, {"y_ptr": "*i64", "dz_ptr": HALF}, grad, eight),
        Build("_clip_loss", clip_loss._clip_loss, {}, clip, {}),
        partial(HALF, 16, "suffixes"),
        partial(HALF, 32, "a prefix of 8 rows"),
        partial(HALF, 64, "a prefix of 16 rows"),
        partial("*fp32", 32, "a prefix of 8 rows"),
        Build("_decode_merge bf16", decode._decode_merge, {"out_ptr": HALF}, merge, {"num_warps": 1}),
    ]


def signature(build: Build) -> dict[str, str]:
    types = {}
    for name in build.kernel.arg_names:
        if name in build.constants:
            types[name] = "constexpr"
        else:
            default = "*fp32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
            types[name] = build.types.get(name, default)
    return types


def facts(build: Build, capability: int) -> dict:
    """Compile and read registers, stack, spills and shared memory from the machine code."""
    types = signature(build)
    # Allocations are aligned, and so are rows: what a launch would find out from the arguments.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name.startswith("stride")
    }
    source = ASTSource(build.kernel, types, build.constants, aligned)
    built = triton.compile(source, GPUTarget("cuda", capability, 32), build.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    line = next(x for x in usage.splitlines() if "REG:" in x)
    used = {key: int(value) for key, value in (pair.split(":") for pair in line.split() if ":" in pair)}
    spills = sum(" LDL" in x or " STL" in x for x in code.splitlines())
    return {
        "kernel": build.name,
        "arch": f"sm_{capability}",
        "registers": used["REG"],
        "stack": used["STACK"],
        "spills": spills,
        "shared": built.metadata.shared,
        "shared_limit": SHARED_LIMIT[capability],
    }


def main(cfg: Config) -> None:
    rows = [
        facts(build, capability)
        for build in builds()
        for capability in SHARED_LIMIT
        if cfg.only in build.name and build.only in (0, capability)
    ]
    print(f"triton {triton.__version__}\n\n| kernel | arch | registers | stack B | spills | shared KB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['kernel']} | {row['arch']} | {row['registers']} | {row['stack']} | {row['spills']} | "
            f"{row['shared'] / 1024:.0f} |"
        )
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(parse(Config))
