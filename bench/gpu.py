"""All kernels on one GPU in about eight minutes: correctness first, then time and memory against peers.

    python bench/gpu.py                        # writes bench/results/<card>-<date>.json and .md
    python bench/gpu.py --smoke true           # toy sizes, to see that the script itself runs; also on a CPU,
                                               # where TRITON_INTERPRET=1 takes the kernels through the
                                               # interpreter

Head at Qwen3-4B's shape, bf16, targets likely (peaked) and arbitrary (random); ceilings are measured in the
same run: a copy and cuBLAS products. Peers run where they are installed: pip install --no-deps liger-kernel
cut-cross-entropy. ms: median; every method of ours is timed twice, and the second row ("again") is the noise
band. extra_gb: peak memory above the inputs. share: of the measured ceiling, for the products or the bytes
that the method cannot avoid. A row that fails or does not fit says so. Nothing here is a claim: the files
under bench/results are.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernels
from bench import gpu_sampler
from kernels import attention, clip_loss, linear_logp
from kernels.decode import Prefix, decode, decode_ref
from nanoplan.config import parse

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TESTS = [
    "tests/test_linear_logp.py",
    "tests/test_clip_loss.py",
    "tests/test_decode.py",
    "tests/test_sampler_shared.py",
    "tests/test_attention.py",
]


@dataclass(frozen=True)
class Config:
    minutes: float = 8.0  # no new row is started after this
    d: int = 2560  # width of the head's input; Qwen3-4B
    v: int = 151936  # vocabulary; Qwen3-4B
    tests: bool = True  # run the kernels' test files first
    smoke: bool = False  # toy sizes
    out: str = "bench/results"  # folder for the results


@dataclass(slots=True)
class Report:
    """Rows as they come, and the time they may take."""

    deadline: float  # seconds, time.perf_counter
    reps: int  # timed calls of a row, at most
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[dict] = field(default_factory=list)

    def add(
        self, section: str, what: str, method: str, call: Callable, *, floor_ms: float = 0.0, inner: int = 1
    ):
        """Time one method. call() does the work `inner` times; floor_ms: least time by the ceilings."""
        row = {"section": section, "what": what, "method": method}
        if time.perf_counter() > self.deadline:
            row["failed"] = "not run: out of time"
        else:
            try:
                row |= time_and_memory(call, reps=self.reps, inner=inner)
                if floor_ms:
                    row["share"] = round(floor_ms / row["ms"], 3)
            except torch.OutOfMemoryError:
                row["failed"] = "out of memory"
            except Exception as error:  # a peer that breaks is a result, and must not end the run
                row["failed"] = repr(error).splitlines()[0][:120]
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def floor(self, *, products: float = 0.0, bytes: float = 0.0) -> float:
        """Least milliseconds for so many multiply-adds times two, or so many bytes."""
        return max(
            products / self.ceilings["fp32_out_tflops"] / 1e9, bytes / self.ceilings["copy_gb_s"] / 1e6
        )


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_and_memory(call: Callable, *, reps: int, inner: int = 1) -> dict[str, float]:
    """Median ms of a call after two warm-up calls, in about two seconds; peak GB above what was there."""
    synchronize()
    extra = 0.0
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    call()
    synchronize()
    if DEVICE == "cuda":
        extra = (torch.cuda.max_memory_allocated() - before) / 1e9
    start = time.perf_counter()
    call()
    synchronize()
    reps = max(3, min(reps, int(2.0 / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(reps):
        if DEVICE == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return {"ms": round(sorted(times)[len(times) // 2] / inner, 4), "extra_gb": round(extra, 3)}


def head_inputs(n: int, cfg: Config, *, peaked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h (N, D), w (V, D) bf16, y (N,), g (N,) fp32. Peaked: the target is likely, as when sampled."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    options = {"generator": generator, "device": DEVICE}
    w = torch.randn(cfg.v, cfg.d, **options) * cfg.d**-0.5
    y = torch.randint(0, cfg.v, (n,), **options)
    h = torch.randn(n, cfg.d, **options)
    if peaked:
        h += 16 * w[y]
    g = torch.randn(n, **options) / n
    return h.bfloat16(), w.bfloat16(), y, g


def ceilings(report: Report, cfg: Config, n: int) -> None:
    """Copy bandwidth and cuBLAS speed at the head's shape: what everything below is measured against."""
    x = torch.empty(1 << (16 if cfg.smoke else 28), dtype=torch.float32, device=DEVICE)
    other = torch.empty_like(x)
    h, w, _, _ = head_inputs(n, cfg, peaked=False)

    def product(dtype):
        if DEVICE == "cuda":
            return torch.mm(h, w.T, out_dtype=dtype)
        return (h.float() @ w.float().T).to(dtype)

    copy = time_and_memory(lambda: other.copy_(x), reps=report.reps)["ms"]
    half = time_and_memory(lambda: product(torch.bfloat16), reps=report.reps)["ms"]
    full = time_and_memory(lambda: product(torch.float32), reps=report.reps)["ms"]
    operations = 2 * n * cfg.d * cfg.v
    report.ceilings = {
        "copy_gb_s": 2 * x.nbytes / copy / 1e6,
        "bf16_out_tflops": operations / half / 1e9,
        "fp32_out_tflops": operations / full / 1e9,
    }
    print(json.dumps(report.ceilings), flush=True)


def reference_head(h: Tensor, w: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, dh, dw of sum(g logp) in float64, chunk by chunk."""
    h, w, g = h.double(), w.double(), g.double()
    logp, entropy = torch.empty(2, len(h), dtype=torch.float64, device=h.device)
    dh, dw = torch.empty_like(h), torch.zeros_like(w)
    for part in torch.arange(len(h), device=h.device).split(256):
        x = torch.log_softmax(h[part] @ w.T, dim=-1)
        logp[part] = x.gather(1, y[part, None])[:, 0]
        p = x.exp()
        entropy[part] = -(p * x).sum(dim=-1)
        dz = p.mul_(-g[part, None])
        dz.scatter_add_(1, y[part, None], g[part, None])
        dh[part] = dz @ w
        dw += dz.T @ h[part]
    return logp, entropy, dh, dw


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def correctness(report: Report, cfg: Config, n: int) -> None:
    """Errors against float64 at the real shape, and that results repeat and do not depend on the batch."""
    for peaked in (False, True):
        what = "peaked" if peaked else "random"
        h, w, y, g = head_inputs(n, cfg, peaked=peaked)
        want = reference_head(h, w, y, g)
        fused = linear_logp.linear_logp(h, w, y)
        again, part = linear_logp.linear_logp(h, w, y)[0], linear_logp.linear_logp(h[5:70], w, y[5:70])[0]
        half = torch.log_softmax((h[:256] @ w.T).float(), dim=-1).gather(1, y[:256, None])[:, 0]
        row = {
            "logp": float((fused[0].double() - want[0]).abs().max()),
            "entropy": float((fused[1].double() - want[1]).abs().max()),
            "bf16 logits": float((half.double() - want[0][:256]).abs().max()),
            "repeats bit for bit": bool(torch.equal(fused[0], again)),
            "same bits in another batch": bool(torch.equal(fused[0][5:70], part)),
        }
        for trainable in (False, True):
            leaves = h.clone().requires_grad_(), w.clone().requires_grad_(trainable)
            logp, _ = linear_logp.linear_logp(*leaves, y)
            (g * logp).sum().backward()
            name = "trainable" if trainable else "frozen"
            row[f"logp {name}"] = float((logp.detach().double() - want[0]).abs().max())
            row[f"dh {name}"] = relative(leaves[0].grad, want[2])
            if trainable:
                row["dw"] = relative(leaves[1].grad, want[3])
        report.rows.append({"section": "correct", "what": what, "method": "linear_logp", **row})
        print(json.dumps(report.rows[-1]), flush=True)
    q, caches, lengths, prefix, slots = decode_inputs(cfg, rows=16, members=4, P=300, S=200)
    got = decode(q, *caches, lengths, prefix=prefix)
    wide = Prefix(prefix.k.double(), prefix.v.double(), prefix.lengths, prefix.members)
    want = decode_ref(q.double(), *(x.double() for x in caches), lengths, slots=slots, prefix=wide)
    row = {"max error": float((got.double() - want).abs().max())}
    report.rows.append({"section": "correct", "what": "bf16", "method": "decode", **row})
    print(json.dumps(report.rows[-1]), flush=True)


@contextlib.contextmanager
def configured(blocks: dict[str, int], split: int):
    """Run _logp_fwd with other blocks and another split of V."""
    saved = dict(linear_logp.TILES), linear_logp.SPLIT
    linear_logp.TILES.update({key: blocks for key in linear_logp.TILES})
    linear_logp.SPLIT = split
    try:
        yield
    finally:
        linear_logp.TILES.update(saved[0])
        linear_logp.SPLIT = saved[1]


def naive(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.log_softmax((h @ w.T).float(), dim=-1).gather(1, y[:, None])[:, 0]


def cce(h: Tensor, w: Tensor, y: Tensor, *, exact: bool) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(h, w, y, reduction="none", filter_eps=None if exact else "high")


def in_chunks(h: Tensor, w: Tensor, y: Tensor, *, chunk: int) -> Tensor:
    return linear_logp._logp_lse_triton(h, w, y, 1.0, chunk)[0]


def without_gradient(report: Report, cfg: Config, sizes: list[int]) -> None:
    """Log-probs of an old or reference policy."""
    ours = linear_logp.linear_logp
    methods = {
        "ours, fused": ours,
        "ours, fused (again)": ours,
        **{f"chunks of {c}": partial(in_chunks, chunk=c) for c in (512, 1024, 2048, 4096)},
        "naive": naive,
        "torch.compile(naive)": torch.compile(naive),
        "F.cross_entropy": lambda h, w, y: F.cross_entropy(h @ w.T, y, reduction="none"),
        "cut-cross-entropy": partial(cce, exact=True),
    }
    narrow = {"BM": 128, "BV": 128, "BD": 64, "num_warps": 8, "num_stages": 3}
    for n in sizes:
        h, w, y, _ = head_inputs(n, cfg, peaked=True)
        floor = report.floor(products=2 * n * cfg.d * cfg.v)
        add = partial(report.add, "no gradient", f"N={n}", floor_ms=floor)
        with torch.no_grad():
            for name, method in methods.items():
                add(name, partial(method, h, w, y))
            for blocks in (narrow, narrow | {"BV": 256}):
                for split in (2304, 4608, 9216, 18432):
                    with configured(blocks, split):
                        add(f"fused {blocks['BM']}x{blocks['BV']}, split {split}", partial(ours, h, w, y))


def liger_flce(h: Tensor, w: Tensor, y: Tensor, g: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    out = LigerFusedLinearCrossEntropyFunction.apply(h, w, y, None, None, -100, 0.0, 0.0, "mean")
    return out[0] if isinstance(out, tuple) else out


def liger_grpo(h: Tensor, w: Tensor, y: Tensor, g: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
    shape = (8, -1)
    mask = torch.ones_like(y.view(shape), dtype=torch.float32)
    return loss(h.view(*mask.shape, -1), w, y.view(shape), mask, torch.ones(8, device=h.device))[0]


def with_gradient(report: Report, cfg: Config, sizes: list[int]) -> None:
    """Forward and backward. Liger's losses are fixed (mean cross entropy, GRPO), the others take any."""
    compiled = torch.compile(naive)
    methods = {
        "ours": lambda h, w, y, g: -(g * linear_logp.linear_logp(h, w, y)[0]).sum(),
        "ours (again)": lambda h, w, y, g: -(g * linear_logp.linear_logp(h, w, y)[0]).sum(),
        "naive": lambda h, w, y, g: -(g * naive(h, w, y)).sum(),
        "torch.compile(naive)": lambda h, w, y, g: -(g * compiled(h, w, y)).sum(),
        "Liger cross entropy": liger_flce,
        "Liger GRPO": liger_grpo,
        "cut-cross-entropy": lambda h, w, y, g: -(g * cce(h, w, y, exact=False)).sum(),
        "cut-cross-entropy, exact": lambda h, w, y, g: -(g * cce(h, w, y, exact=True)).sum(),
    }
    for n in sizes:
        for peaked in (True, False) if n == sizes[0] else (True,):
            inputs = head_inputs(n, cfg, peaked=peaked)
            for trainable in (False, True):
                h = inputs[0].clone().requires_grad_()
                w = inputs[1].clone().requires_grad_(trainable)
                leaves = (h, w) if trainable else (h,)
                products = (3 if trainable else 2) * 2 * n * cfg.d * cfg.v
                kind = "trainable" if trainable else "frozen"
                what = f"N={n} {'peaked' if peaked else 'random'}"
                for name, method in methods.items():

                    def call(method=method, h=h, w=w, leaves=leaves, inputs=inputs):
                        torch.autograd.grad(method(h, w, *inputs[2:]), leaves)

                    report.add(
                        f"gradient, {kind}", what, name, call, floor_ms=report.floor(products=products)
                    )


def eager_clip(logp, old, advantages, weights):
    """The loss by autograd with the same metrics: what a training script writes without a kernel."""
    logp = logp.detach().requires_grad_()
    log_ratio = (logp - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    u, c = ratio * advantages, ratio.clamp(0.8, 1.28) * advantages
    loss = (weights * -torch.minimum(u, c)).sum()
    (grad,) = torch.autograd.grad(loss, logp)
    used, clipped = weights > 0, c < u
    r, l = ratio.detach(), log_ratio.detach()
    low, high = ((used & clipped & side).sum() for side in (advantages < 0, advantages > 0))
    sums = [used.sum(), low, high, (r * used).sum(), (r * used).amax(), ((r - l - 1) * used).sum()]
    return loss.detach(), grad, sums


def clip(report: Report, n: int) -> None:
    """Loss, gradient and metrics of n tokens; 50 calls, then 50 calls in one CUDA graph."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    logp, old, advantages = torch.randn(3, n, generator=generator, device=DEVICE).mul_(0.1).unbind()
    weights = torch.full_like(logp, 1 / n)
    options = (logp, old, advantages, weights, None, 0.2, 0.28, None, 0.0)
    compiled = torch.compile(clip_loss._clip_loss_torch)
    methods = {
        "eager autograd": lambda: eager_clip(logp, old, advantages, weights),
        "torch path": lambda: clip_loss._clip_loss_torch(*options),
        "torch.compile(torch path)": lambda: compiled(*options),
        "ours": lambda: clip_loss._clip_loss_triton(*options),
        "ours (again)": lambda: clip_loss._clip_loss_triton(*options),
    }
    add = partial(report.add, "clip_loss", floor_ms=report.floor(bytes=5 * 4 * n), inner=50)
    for name, method in methods.items():
        add(f"N={n}, 50 calls", name, partial(fifty, method))
    if DEVICE == "cuda":
        for name, method in methods.items():
            add(f"N={n}, CUDA graph of 50", name, graphed(method))


def fifty(method: Callable) -> None:
    for _ in range(50):
        method()


def graphed(method: Callable) -> Callable:
    """Return a call that replays one CUDA graph of 50 calls of `method`, captured the first time."""
    graph = None

    def replay():
        nonlocal graph
        if graph is None:
            method()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                fifty(method)
        graph.replay()

    return replay


def decode_inputs(cfg: Config, *, rows: int, members: int, P: int, S: int):
    """Qwen3-4B's heads: q (rows, 32, 128), caches (rows, 8, S, 128) and prefixes of P tokens, bf16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads, width = (32, 128) if not cfg.smoke else (4, 16)
    J = heads // 4
    options = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    q = torch.randn(rows, heads, width, **options)
    caches = [torch.randn(rows, J, S, width, **options) for _ in range(2)]
    shared = [torch.randn(rows // members, J, P, width, **options) for _ in range(2)]
    ints = {"device": DEVICE, "dtype": torch.int32}
    groups = torch.arange(rows, **ints).view(-1, members)
    prefix = Prefix(*shared, torch.full((rows // members,), P, **ints), groups)
    return q, caches, torch.full((rows,), S, **ints), prefix, torch.arange(rows, **ints)


def decoding(report: Report, cfg: Config, cases: list[tuple[int, int, int, int]]) -> None:
    """One layer's attention in a decode step, (rows, members of a group, prefix, suffix)."""
    for rows, members, P, S in cases:
        q, caches, lengths, prefix, _ = decode_inputs(cfg, rows=rows, members=members, P=P, S=S)
        joined = [
            torch.cat([common.repeat_interleave(members, 0), own], dim=2)
            for common, own in zip((prefix.k, prefix.v), caches, strict=True)
        ]  # (rows, J, P + S, E): every row with a copy of its own
        flat = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in joined]  # (rows (P + S), J, E)
        token = 2 * 2 * q.shape[2] * joined[0].shape[1]  # bytes of a token's key and value
        own_floor = report.floor(bytes=token * rows * (P + S))
        shared_floor = report.floor(bytes=token * (rows // members * P + rows * S))
        what = f"R={rows} K={members} P={P} S={S}"

        def shared(q=q, caches=caches, lengths=lengths, prefix=prefix):
            decode(q, *caches, lengths, prefix=prefix)

        def unshared(q=q, joined=joined, lengths=lengths, P=P):
            decode(q, *joined, lengths + P)

        def sdpa(q=q, joined=joined):
            F.scaled_dot_product_attention(q[:, :, None], *joined, enable_gqa=True)

        ends = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)

        def varlen(q=q, flat=flat, ends=ends, P=P, S=S):
            if attention.varlen_attn is None:
                raise NotImplementedError("torch has no varlen_attn")
            attention.varlen_attn(q, *flat, ends, ends * (P + S), 1, P + S, enable_gqa=True)

        for suffix in ("", " (again)"):
            report.add("decode", what, "ours, prefix shared" + suffix, shared, floor_ms=shared_floor)
        report.add("decode", what, "ours, own copies", unshared, floor_ms=own_floor)
        report.add("decode", what, "SDPA, own copies of equal length", sdpa, floor_ms=own_floor)
        report.add("decode", what, "varlen_attn, own copies", varlen, floor_ms=own_floor)


def sampling(report: Report, cfg: Config, loads: list[gpu_sampler.Load], *, layers: int) -> None:
    """Whole decode steps of the sampler: model, attention, head, drawing, and one copy to the host."""
    model = gpu_sampler.make_model(layers=layers, smoke=cfg.smoke, device=DEVICE)
    for load in loads:
        what = f"{layers} layers, R={load.rows} K={load.members} P={load.prompt} S={load.own}"
        for method in gpu_sampler.METHODS:
            step = gpu_sampler.stepper(model, load, method.removesuffix(" (again)"))
            floor = report.floor(bytes=gpu_sampler.step_bytes(model, load, method))
            report.add("sampler", what, method, step, floor_ms=floor)
            if "ms" in (row := report.rows[-1]):
                row["tokens_per_s"] = round(1e3 * load.rows / row["ms"])
            del step  # and its cache, before the next one


def markdown(report: Report, facts: dict) -> str:
    lines = [
        f"# {facts['device']}, {facts['date']}",
        "",
        f"torch {facts['torch']}, triton {facts['triton']}.",
        "",
    ]
    lines += [f"- {name}: {value:.1f}" for name, value in report.ceilings.items()]
    for row in (x for x in report.rows if x["section"] == "correct"):
        values = {k: v for k, v in row.items() if k not in ("section", "what", "method")}
        shown = ", ".join(f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        lines.append(f"- {row['method']}, {row['what']}: {shown}")
    lines += [
        "",
        "| section | what | method | ms | share of ceiling | extra GB | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (x for x in report.rows if x["section"] != "correct"):
        result = row.get("failed") or row["ms"]
        extra = "" if "failed" in row else row["extra_gb"]
        rate = row.get("tokens_per_s", "")
        cells = row["section"], row["what"], row["method"], result, row.get("share", ""), extra, rate
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(cfg: Config) -> None:
    start = time.perf_counter()
    if DEVICE != "cuda" and not cfg.smoke:
        raise SystemExit(
            "no CUDA GPU here; --smoke true runs toy sizes on the CPU to check the script itself"
        )
    if kernels.PATH != "triton":
        raise SystemExit(
            "the Triton kernels do not run here: install triton, or set TRITON_INTERPRET=1 on a CPU"
        )
    facts = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, interpreted",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": kernels.triton.__version__,
        "varlen_attn": sorted(attention.VARLEN_ARGUMENTS),
    }
    print(json.dumps(facts), flush=True)
    if cfg.smoke:
        cfg = Config(minutes=cfg.minutes, d=32, v=500, tests=False, smoke=True, out=cfg.out)
    if cfg.tests:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *TESTS], cwd=ROOT)
        if done.returncode:
            raise SystemExit("the kernels' tests fail on this GPU: nothing is timed before they pass")
    report = Report(deadline=start + 60 * cfg.minutes, reps=3 if cfg.smoke else 50)
    few, many = ([64], [64]) if cfg.smoke else ([8192, 32768], [8192, 32768, 65536])
    ceilings(report, cfg, 64 if cfg.smoke else 8192)
    correctness(report, cfg, 97 if cfg.smoke else 4097)
    clip(report, 2000 if cfg.smoke else 65536)
    cases = [(4, 2, 40, 20)] if cfg.smoke else [(64, 8, p, s) for p in (1024, 4096) for s in (512, 1024)]
    decoding(report, cfg, cases)
    loads = [gpu_sampler.Load(4, 2, 40, 20)] if cfg.smoke else [gpu_sampler.Load(64, 8, 4096, 440)]
    sampling(report, cfg, loads, layers=1 if cfg.smoke else 12)
    without_gradient(report, cfg, few)
    with_gradient(report, cfg, many)
    name = "".join(c if c.isalnum() else "-" for c in facts["device"])
    folder = Path(cfg.out)
    folder.mkdir(parents=True, exist_ok=True)
    results = {**facts, "ceilings": report.ceilings, "rows": report.rows}
    (folder / f"{name}-{facts['date']}.json").write_text(json.dumps(results, indent=1))
    (folder / f"{name}-{facts['date']}.md").write_text(markdown(report, facts))
    print(markdown(report, facts))


if __name__ == "__main__":
    main(parse(Config))
