"""Per-token log-prob and its gradient on a CPU: naive, compiled, torch's and Liger's chunked versions, ours.

    python bench/head.py                       # about ten CPU minutes, most of them linear_cross_entropy
    python bench/head.py --methods naive ours --json runs/head.json

The loss is a policy gradient, -sum(g logp), g = advantage / tokens with one advantage per sequence of 256
tokens, which is what Liger's GRPO loss computes on its first step. Three settings: head frozen, head
trainable, no gradient. Each method runs in a process of its own. cpu_s: user + system CPU seconds of all
threads, best of `repeat`. extra_mb: peak memory above what was there before the first call, the gradients
that the method returns not counted. err: the largest of max |logp - float64| and the relative errors of the
gradients against float64 (Liger gives no logp). torch_compile is timed after compilation. A method that is
not installed or fails is a row that says so.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels.linear_logp import linear_logp
from nanoplan.config import parse
from nanoplan.log import write_json

SEQUENCE = 256  # tokens of a sequence, which share an advantage
SETTINGS = ("frozen", "trainable", "no_grad")


@dataclass(frozen=True)
class Config:
    n: int = 2048  # tokens, a multiple of 256
    d: int = 576  # width; these are SmolLM2-135M's
    v: int = 49152  # vocabulary
    threads: int = 2  # torch threads
    repeat: int = 3  # timed calls, of which the fastest counts
    methods: tuple[str, ...] = (
        "naive",
        "cross_entropy",
        "torch_compile",
        "linear_cross_entropy",
        "liger",
        "ours",
    )
    json: str = ""  # file for the table's rows
    what: str = ""  # with --method: measure only this setting, in this process
    method: str = ""  # set by the process that measures all
    reference: str = ""  # its file of float64 results


def naive(h, w, y, g):
    logp = torch.log_softmax(h @ w.T, dim=-1).gather(1, y[:, None])[:, 0]
    return -(g * logp).sum(), logp


compiled = torch.compile(naive)


def cross_entropy(h, w, y, g):
    logp = -F.cross_entropy(h @ w.T, y, reduction="none")
    return -(g * logp).sum(), logp


def torch_linear_cross_entropy(h, w, y, g):
    options = torch.nn.LinearCrossEntropyOptions()
    logp = -F.linear_cross_entropy(h, w, y, reduction="none", options=options)
    return -(g * logp).sum(), logp


def liger(h, w, y, g):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
    shape = (-1, SEQUENCE)
    mask = torch.ones_like(y.view(shape), dtype=torch.float32)
    advantages = g.view(shape)[:, 0] * len(y)
    return loss(h.view(*mask.shape, -1), w, y.view(shape), mask, advantages)[0], None


def ours(h, w, y, g):
    logp, _ = linear_logp(h, w, y)
    return -(g * logp).sum(), logp


METHODS = {
    "naive": naive,
    "cross_entropy": cross_entropy,
    "torch_compile": compiled,
    "linear_cross_entropy": torch_linear_cross_entropy,
    "liger": liger,
    "ours": ours,
}


def inputs(cfg: Config):
    """h, w, y, g: logits of about N(0, 1), arbitrary targets, one advantage per sequence."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(cfg.v, cfg.d, generator=generator) / cfg.d**0.5
    y = torch.randint(0, cfg.v, (cfg.n,), generator=generator)
    h = torch.randn(cfg.n, cfg.d, generator=generator)
    advantages = torch.randn(cfg.n // SEQUENCE, generator=generator)
    return h, w, y, advantages.repeat_interleave(SEQUENCE) / cfg.n


def reference(cfg: Config) -> dict[str, torch.Tensor]:
    """logp, dh, dw in float64, chunk by chunk."""
    h, w, y, g = (x.double() if x.is_floating_point() else x for x in inputs(cfg))
    logp, dh, dw = torch.empty(cfg.n, dtype=torch.float64), torch.empty_like(h), torch.zeros_like(w)
    for part in torch.arange(cfg.n).split(256):
        x = torch.log_softmax(h[part] @ w.T, dim=-1)
        logp[part] = x.gather(1, y[part, None])[:, 0]
        dz = x.exp_().mul_(g[part, None])
        dz.scatter_add_(1, y[part, None], -g[part, None])
        dh[part] = dz @ w
        dw += dz.T @ h[part]
    return {"logp": logp, "dh": dh, "dw": dw}


def memory_mb(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def one(cfg: Config) -> dict:
    """Measure one method in one setting, in this process."""
    torch.set_num_threads(cfg.threads)
    method, setting = METHODS[cfg.method], cfg.what
    h, w, y, g = inputs(cfg)
    h.requires_grad_(setting != "no_grad")
    w.requires_grad_(setting == "trainable")
    leaves = [x for x in (h, w) if x.requires_grad]
    naive(h[:64], w, y[:64], g[:64])  # starts thread pools and BLAS, whose buffers are nobody's

    def call():
        with torch.set_grad_enabled(setting != "no_grad"):
            loss, logp = method(h, w, y, g)
        return logp, torch.autograd.grad(loss, leaves) if leaves else ()

    if cfg.method == "torch_compile":
        call()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak (VmHWM) to the present
    before = memory_mb("VmRSS")
    logp, grads = call()
    extra = memory_mb("VmHWM") - before - sum(x.numel() * 4 for x in grads) / 2**20
    errors = []
    want = torch.load(cfg.reference)
    if logp is not None:
        errors.append(float((logp.detach().double() - want["logp"]).abs().max()))
    for got, name in zip(grads, ("dh", "dw"), strict=False):
        errors.append(float((got.double() - want[name]).norm() / want[name].norm()))
    del logp, grads, want
    seconds = []
    for _ in range(cfg.repeat):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return {"cpu_s": round(min(seconds), 3), "extra_mb": round(extra, 1), "err": max(errors)}


def table(rows: list[dict]) -> str:
    lines = [
        "| what | method | CPU s | of naive | extra MB | of naive | err |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(x for x in rows if x["what"] == row["what"] and x["method"] == "naive")
        if "failed" in row or "failed" in base:
            lines.append(f"| {row['what']} | {row['method']} | {row.get('failed', 'naive failed')} | | | | |")
            continue
        time_ratio, memory_ratio = (row[k] / base[k] for k in ("cpu_s", "extra_mb"))
        seconds, memory = (
            f"{row['cpu_s']:.2f} | {time_ratio:.2f}",
            f"{row['extra_mb']:.0f} | {memory_ratio:.3f}",
        )
        lines.append(f"| {row['what']} | {row['method']} | {seconds} | {memory} | {row['err']:.1e} |")
    return "\n".join(lines)


def measure(cfg: Config, what: str, method: str, reference_file: Path) -> dict:
    """Measure one method in a process of its own."""
    sizes = [x for k in ("n", "d", "v", "threads", "repeat") for x in (f"--{k}", str(getattr(cfg, k)))]
    own = ["--what", what, "--method", method, "--reference", str(reference_file)]
    done = subprocess.run([sys.executable, __file__, *sizes, *own], capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:120]}
    return json.loads(done.stdout.splitlines()[-1])


def main(cfg: Config) -> None:
    if cfg.n % SEQUENCE:
        raise ValueError(f"n={cfg.n}: wanted a multiple of {SEQUENCE}, the length of a sequence")
    if "naive" not in cfg.methods or not set(cfg.methods) <= set(METHODS):
        raise ValueError(
            f"methods={cfg.methods}: wanted naive, the base of the table, and any of {[*METHODS]}"
        )
    if cfg.method:
        print(json.dumps(one(cfg)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.pt"
        torch.set_num_threads(cfg.threads)
        torch.save(reference(cfg), file)
        for what in SETTINGS:
            for method in cfg.methods:
                if method == "liger" and what == "no_grad":
                    continue  # its forward always forms the gradients
                rows.append({"what": what, "method": method, **measure(cfg, what, method, file)})
                print(rows[-1], file=sys.stderr, flush=True)
    print(f"N={cfg.n} D={cfg.d} V={cfg.v} fp32, {cfg.threads} threads, torch {torch.__version__}\n")
    print(table(rows))
    if cfg.json:
        write_json(Path(cfg.json), rows)


if __name__ == "__main__":
    main(parse(Config))
