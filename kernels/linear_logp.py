"""Log-probability and entropy of given tokens straight from hidden states, without (N, V) logits in memory.

With z = h w^T, x = z / temperature, lse = log sum exp x, p = exp(x - lse):
  logp_n = x_{n, y_n} - lse_n                 entropy_n = lse_n - sum_v p_nv x_nv
  d logp_n / d h_n = u_n = (w_{y_n} - sum_v p_nv w_v) / temperature
  d loss / d w = sum_n g_n (onehot(y_n) - p_n) h_n^T / temperature,  g = d loss / d logp

Frozen head (LoRA): u needs nothing from the loss, so forward forms it and backward is g[:, None] * u: two
GEMMs for any loss. Trainable head: keep lse, recompute the logits chunk by chunk in backward: four GEMMs, d w
accumulated in fp32. Every loss of this repository is plain torch on the (N,) log-probs. Logits are fp32:
rounding them to bf16 moves 64 % of the importance ratios by more than 1 %.

Kernels, each with fp32 accumulators in log2 units (one exp2 per logit):
  _logp_fwd, _logp_reduce   passes without gradient: a GEMM tile is reduced to (max, sum, sum of x e^x) before
                            the next one; logits never leave the chip. The split over V does not depend on N,
                            so a row's bits depend on the row alone, and a first on-policy ratio is 1.
  _row_head, _row_grad      passes with gradient: cuBLAS writes a (chunk, V) fp32 buffer; one program per row
                            reads it once for logp, entropy and lse, and writes (onehot - p) g / temperature
                            for the next GEMM.
Floors and compile facts: docs/kernels.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import INTERPRET, jit, runs_triton, tl, triton

# Logits held at once, at least: below this the cost is that of launching operations.
MIN_LOGITS = 1 << 19
# Rows whose logits are held at once, by default. CPU: 512 rows reach 90 % of the speed of the products alone.
# CUDA: 512 would be compute-bound; each chunk of a trainable head also reads and writes d w once, which 4096
# rows hide.
CHUNK = {"cpu": (512, 512), "cuda": (2048, 4096)}  # frozen, trainable
# Tiles of _logp_fwd by (compute capability, bytes per input): the largest without spills (docs/kernels.md).
TILES = {
    (80, 2): {"BM": 128, "BV": 128, "BD": 64, "num_warps": 8, "num_stages": 3},
    (90, 2): {"BM": 128, "BV": 256, "BD": 64, "num_warps": 8, "num_stages": 3},
    (80, 4): {"BM": 64, "BV": 64, "BD": 32, "num_warps": 4, "num_stages": 3},
    (90, 4): {"BM": 64, "BV": 64, "BD": 32, "num_warps": 4, "num_stages": 3},
}
# Columns of V per program of _logp_fwd: 33 splits of Qwen3's 151,936, 16 waves of 132 SMs at N = 8192.
SPLIT = 4608
ROWS_PER_LAUNCH = 8192  # h of one launch, 42 MB at D = 2560, stays in L2 while w streams past it
LOG2E = math.log2(math.e)
LN2 = math.log(2)
LOW = -1e30  # stands for -inf: inf - inf and 0 * inf never arise


def linear_logp_ref(
    h: Tensor, w: Tensor, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The meaning: log_softmax of all logits at once, in the inputs' dtype; autograd differentiates both."""
    x = torch.log_softmax(h @ w.T / temperature, dim=-1)  # (N, V)
    return x.gather(1, targets[:, None])[:, 0], -(x.exp() * x).sum(dim=-1)


@jit
def _logp_fwd(
    h_ptr,  # (N, D) hidden states
    w_ptr,  # (V, D) head, same dtype
    m_ptr,  # (S, N) fp32, out: maximum of the split's logits
    s_ptr,  # (S, N) fp32, out: sum of 2^d, d = (z - m) scale
    t_ptr,  # (S, N) fp32, out: sum of d 2^d
    N,
    V,
    stride_h,  # elements between rows of h
    stride_w,  # elements between rows of w
    scale,  # log2(e) / temperature
    D: tl.constexpr,
    COLUMNS: tl.constexpr,  # of V per program on grid axis 1, a multiple of BV
    LOW: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    UP: tl.constexpr,  # convert tiles to fp32 before the product: the interpreter has no bf16
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    # Rows and columns past the end wrap around instead of being masked: their results are not stored, or
    # become LOW.
    h_rows = h_ptr + (rows % N).to(tl.int64)[:, None] * stride_h
    depth = tl.arange(0, BD)
    m = tl.full((BM,), LOW, tl.float32)
    s = tl.zeros((BM,), tl.float32)
    t = tl.zeros((BM,), tl.float32)
    first = tl.program_id(1) * COLUMNS
    for start in range(first, tl.minimum(first + COLUMNS, V), BV):
        columns = start + tl.arange(0, BV)
        w_rows = w_ptr + (columns % V).to(tl.int64)[:, None] * stride_w
        z = tl.zeros((BM, BV), tl.float32)
        for d in range(0, D, BD):
            if D % BD == 0:
                a = tl.load(h_rows + (d + depth)[None, :])
                b = tl.load(w_rows + (d + depth)[None, :])
            else:
                a = tl.load(h_rows + (d + depth)[None, :], mask=(d + depth)[None, :] < D, other=0.0)
                b = tl.load(w_rows + (d + depth)[None, :], mask=(d + depth)[None, :] < D, other=0.0)
            if UP:
                a, b = a.to(tl.float32), b.to(tl.float32)
            z = tl.dot(a, tl.trans(b), z, input_precision="ieee")
        z = tl.where(columns[None, :] < V, z, LOW)
        m_new = tl.maximum(m, tl.max(z, axis=1))
        d_old = (m - m_new) * scale
        d_new = (z - m_new[:, None]) * scale
        e = tl.exp2(d_new)
        t = (t + d_old * s) * tl.exp2(d_old) + tl.sum(d_new * e, axis=1)
        s = s * tl.exp2(d_old) + tl.sum(e, axis=1)
        m = m_new
    at = tl.program_id(1).to(tl.int64) * N + rows
    tl.store(m_ptr + at, m, mask=rows < N)
    tl.store(s_ptr + at, s, mask=rows < N)
    tl.store(t_ptr + at, t, mask=rows < N)


@jit
def _logp_reduce(
    h_ptr,  # (N, D)
    w_ptr,  # (V, D)
    y_ptr,  # (N,) int64, targets
    m_ptr,  # (S, N) fp32, as _logp_fwd wrote them
    s_ptr,
    t_ptr,
    logp_ptr,  # (N,) fp32, out, nats
    entropy_ptr,  # (N,) fp32, out, nats
    N,
    S,
    stride_h,
    stride_w,
    scale,  # log2(e) / temperature
    D: tl.constexpr,
    LOW: tl.constexpr,
    LN2: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < N
    m = tl.full((BM,), LOW, tl.float32)
    s = tl.zeros((BM,), tl.float32)
    t = tl.zeros((BM,), tl.float32)
    for split in range(S):
        at = tl.cast(split, tl.int64) * N + rows
        m_split = tl.load(m_ptr + at, mask=inside, other=0.0)
        s_split = tl.load(s_ptr + at, mask=inside, other=1.0)
        t_split = tl.load(t_ptr + at, mask=inside, other=0.0)
        m_new = tl.maximum(m, m_split)
        d, d_split = (m - m_new) * scale, (m_split - m_new) * scale
        t = (t + d * s) * tl.exp2(d) + (t_split + d_split * s_split) * tl.exp2(d_split)
        s = s * tl.exp2(d) + s_split * tl.exp2(d_split)
        m = m_new
    # The target's logit, one dot product a row, is taken here: a comparison per logit in _logp_fwd made it
    # spill.
    y = tl.load(y_ptr + rows, mask=inside, other=0)
    h_rows = h_ptr + (rows % N).to(tl.int64)[:, None] * stride_h
    w_rows = w_ptr + y.to(tl.int64)[:, None] * stride_w
    depth = tl.arange(0, BD)
    z_target = tl.zeros((BM,), tl.float32)
    for start in range(0, D, BD):
        mask = (start + depth)[None, :] < D
        a = tl.load(h_rows + (start + depth)[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(w_rows + (start + depth)[None, :], mask=mask, other=0.0).to(tl.float32)
        z_target += tl.sum(a * b, axis=1)
    # A target that is the maximum may come out above it by rounding: log-probs are at most 0.
    logp = tl.minimum((z_target - m) * scale - tl.log2(s), 0.0) * LN2
    tl.store(logp_ptr + rows, logp, mask=inside)
    tl.store(entropy_ptr + rows, (tl.log2(s) - t / s) * LN2, mask=inside)


@jit
def _row_head(
    z_ptr,  # (N, V) fp32, logits, not divided by the temperature
    y_ptr,  # (N,) int64, targets
    logp_ptr,  # (N,) fp32, out, nats
    entropy_ptr,  # (N,) fp32, out, nats
    lse_ptr,  # (N,) fp32, out, nats
    V,
    stride_z,
    scale,  # log2(e) / temperature
    LOW: tl.constexpr,
    LN2: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * stride_z
    # One running (m, s, t) per lane; lanes meet once, at the end. A lane without a column keeps m = LOW and
    # weighs 0.
    m = tl.full((B,), LOW, tl.float32)
    s = tl.zeros((B,), tl.float32)
    t = tl.zeros((B,), tl.float32)
    for start in range(0, V, B):
        columns = start + tl.arange(0, B)
        z = tl.load(z_row + columns, mask=columns < V, other=LOW)
        m_new = tl.maximum(m, z)
        d_old, d_new = (m - m_new) * scale, (z - m_new) * scale
        e = tl.exp2(d_new)
        t = (t + d_old * s) * tl.exp2(d_old) + d_new * e
        s = s * tl.exp2(d_old) + e
        m = m_new
    top = tl.max(m, axis=0)
    d = (m - top) * scale
    total = tl.sum(s * tl.exp2(d), axis=0)
    mean_d = tl.sum((t + d * s) * tl.exp2(d), axis=0) / total
    z_target = tl.load(z_row + tl.load(y_ptr + row))
    tl.store(logp_ptr + row, ((z_target - top) * scale - tl.log2(total)) * LN2)
    tl.store(entropy_ptr + row, (tl.log2(total) - mean_d) * LN2)
    tl.store(lse_ptr + row, (top * scale + tl.log2(total)) * LN2)


@jit
def _row_grad(
    z_ptr,  # (N, V) fp32, logits
    y_ptr,  # (N,) int64, targets
    lse_ptr,  # (N,) fp32, nats
    g_ptr,  # (N,) fp32, d loss / d logp over the temperature
    dz_ptr,  # (N, V), out: (onehot(y) - p) g, in the dtype of the next product; may be z itself
    V,
    stride_z,
    stride_dz,
    scale,  # log2(e) / temperature
    LOG2E: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    z = tl.load(z_ptr + row * stride_z + columns, mask=columns < V, other=0.0)
    p = tl.exp2(z * scale - tl.load(lse_ptr + row) * LOG2E)
    onehot = tl.where(columns == tl.load(y_ptr + row), 1.0, 0.0)
    dz = (onehot - p) * tl.load(g_ptr + row)
    tl.store(dz_ptr + row * stride_dz + columns, dz.to(dz_ptr.dtype.element_ty), mask=columns < V)


def tiles(device: torch.device, itemsize: int) -> dict[str, int]:
    """Blocks of _logp_fwd on this device. Only Hopper and B200 have the shared memory of the wide tile."""
    wide = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
    return TILES[90 if wide else 80, min(itemsize, 4)]


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fused(h: Tensor, w: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Pass without gradient in two launches: logp, entropy, (N,) fp32 each."""
    h, w = _rows_contiguous(h), _rows_contiguous(w)
    (N, D), V = h.shape, w.shape[0]
    logp, entropy = torch.empty(2, N, dtype=torch.float32, device=h.device)
    how = tiles(h.device, h.element_size())
    S = triton.cdiv(V, SPLIT)
    for start in range(0, N, ROWS_PER_LAUNCH):
        part = slice(start, min(start + ROWS_PER_LAUNCH, N))
        rows = part.stop - part.start
        partial = torch.empty(3, S, rows, dtype=torch.float32, device=h.device).unbind()
        scaling = h.stride(0), w.stride(0), LOG2E / temperature
        _logp_fwd[triton.cdiv(rows, how["BM"]), S](
            h[part], w, *partial, rows, V, *scaling, D=D, COLUMNS=SPLIT, LOW=LOW, UP=INTERPRET, **how
        )
        _logp_reduce[(triton.cdiv(rows, 16),)](
            h[part], w, targets[part].contiguous(), *partial, logp[part], entropy[part], rows, S, *scaling,
            D=D, LOW=LOW, LN2=LN2, BM=16, BD=128,
        )  # fmt: skip
    return logp, entropy


def row_head(z: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits z (N, V) fp32, N > 0, into logp, entropy, lse, (N,) fp32 each, in one read."""
    N, V = z.shape
    outs = torch.empty(3, N, dtype=torch.float32, device=z.device).unbind()
    _row_head[(N,)](
        z, targets.contiguous(), *outs, V, z.stride(0), LOG2E / temperature,
        LOW=LOW, LN2=LN2, B=4096, num_warps=8,
    )  # fmt: skip
    return outs


def row_grad(
    z: Tensor, targets: Tensor, lse: Tensor, g: Tensor, out: Tensor, *, temperature: float
) -> Tensor:
    """Write (onehot - softmax(z / temperature)) g / temperature to `out` (N, V), N > 0, which may be z."""
    N, V = z.shape
    _row_grad[N, triton.cdiv(V, 4096)](
        z, targets.contiguous(), lse, g / temperature, out, V, z.stride(0), out.stride(0),
        LOG2E / temperature, LOG2E=LOG2E, B=4096, num_warps=8,
    )  # fmt: skip
    return out


def _chunks(num_rows: int, chunk: int, vocab: int) -> list[slice]:
    rows = max(chunk, MIN_LOGITS // max(vocab, 1))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def _buffer(parts: list[slice], w: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(parts[0].stop if parts else 0, w.shape[0], dtype=dtype, device=w.device)


def _matmul(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write a @ b to `out`, fp32; half-precision inputs (CUDA only) have an fp32 accumulator."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def _work_dtype(w: Tensor) -> torch.dtype:
    # A CPU rounds half-precision products to half precision, and most have no units for them.
    return w.dtype if w.is_cuda else torch.float32


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0) -> None:
    """Add alpha a @ b to `total`, fp32, in place. CUDA's half-precision addmm takes no fp32 summand."""
    if a.dtype == torch.float32:
        total.addmm_(a, b, alpha=alpha)
    else:
        total.add_(torch.mm(a, b, out_dtype=torch.float32), alpha=alpha)


def _softmax_(z: Tensor, temperature: float) -> Tensor:
    if temperature != 1.0:
        z.div_(temperature)
    return torch.softmax(z, dim=1, out=z)  # on a CPU a third of log_softmax's time


def _target_logp(p: Tensor, h: Tensor, w: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Log-probs of targets y (chunk,) from their p (chunk,); rows whose p underflows are scored again."""
    logp = p.log()
    far = (p < 1e-30).nonzero()[:, 0]
    if len(far):
        x = (h[far] @ w.T).float() / temperature
        logp[far] = torch.log_softmax(x, dim=1).gather(1, y[far, None])[:, 0]
    return logp


def _logp_u(h, w, targets, temperature: float, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Forward of a frozen head: logp (N,), entropy (N,), both fp32, and u (N, D) in the dtype of h."""
    N = h.shape[0]
    logp, entropy = torch.empty(2, N, dtype=torch.float32, device=h.device)
    u = torch.empty_like(h)
    w_work = w.to(_work_dtype(w))
    parts = _chunks(N, chunk, w.shape[0])
    buffer = _buffer(parts, w)
    for part in parts:
        h_part, y = h[part].to(w_work.dtype), targets[part]
        p = _softmax_(_matmul(h_part, w_work.T, out=buffer[: len(y)]), temperature)  # (chunk, V) fp32
        logp[part] = _target_logp(p.gather(1, y[:, None])[:, 0], h_part, w_work, y, temperature)
        mean_w = p.to(w_work.dtype) @ w_work  # (chunk, D), sum_v p_v w_v
        u_part = (w_work[y].float() - mean_w.float()).div_(temperature)
        # lse = x_y - logp and sum_v p_v x_v = h . mean_w / temperature: no further pass over the logits
        entropy[part] = (h_part.float() * u_part).sum(dim=1) - logp[part]
        u[part] = u_part.to(u.dtype)
    return logp, entropy, u


def _logp_u_triton(
    h: Tensor, w: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, ...]:
    """As _logp_u. q = onehot - p is formed in fp32 and rounded once, which loses less than rounding p."""
    N = h.shape[0]
    logp, entropy = torch.empty(2, N, dtype=torch.float32, device=h.device)
    u = torch.empty_like(h)
    w_work = w.to(_work_dtype(w))
    parts = _chunks(N, chunk, w.shape[0])
    logits = _buffer(parts, w)
    q_buffer = logits if w_work.dtype == torch.float32 else _buffer(parts, w, w_work.dtype)
    for part in parts:
        h_part, y = h[part].to(w_work.dtype), targets[part]
        z = _matmul(h_part, w_work.T, out=logits[: len(y)])  # (chunk, V) fp32
        logp[part], entropy[part], lse = row_head(z, y, temperature=temperature)
        q = row_grad(z, y, lse, torch.ones_like(lse), q_buffer[: len(y)], temperature=temperature)
        u[part] = (q @ w_work).to(u.dtype)
    return logp, entropy, u


def _logp_torch(h, w, targets, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
    """Forward without gradient: logp, entropy, each (N,) fp32; logp by the operations of _logp_u, to the bit.

    A start model that is its own reference is then at a distance of exactly 0, which Adam would magnify.
    """
    N, V = h.shape[0], w.shape[0]
    logp, entropy = torch.empty(2, N, dtype=torch.float32, device=h.device)
    w_work = w.to(_work_dtype(w))
    parts = _chunks(N, chunk, V)
    buffer = _buffer(parts, w)
    few = max(1, MIN_LOGITS // max(V, 1))  # rows at a time, so that what the passes below read is in cache
    p_buffer = torch.empty(few, V, dtype=torch.float32, device=w.device)
    for part in parts:
        h_part, y = h[part].to(w_work.dtype), targets[part]
        x = _matmul(h_part, w_work.T, out=buffer[: len(y)])  # (chunk, V) fp32
        if temperature != 1.0:
            x.div_(temperature)
        x_target = x.gather(1, y[:, None])[:, 0]
        p_target, mean_x = torch.empty(2, len(y), dtype=torch.float32, device=h.device)
        for start in range(0, len(y), few):
            rows = slice(start, min(start + few, len(y)))
            p = torch.softmax(x[rows], dim=1, out=p_buffer[: rows.stop - start])
            p_target[rows] = p.gather(1, y[rows, None])[:, 0]
            mean_x[rows] = x[rows].mul_(p).sum(dim=1)
        logp[part] = _target_logp(p_target, h_part, w_work, y, temperature)
        entropy[part] = x_target - logp[part] - mean_x
    return logp, entropy


def _logp_lse_triton(
    h: Tensor, w: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, ...]:
    """logp, entropy, lse, (N,) fp32 each, for a backward that recomputes the logits by the same products."""
    outs = torch.empty(3, h.shape[0], dtype=torch.float32, device=h.device)
    w_work = w.to(_work_dtype(w))
    parts = _chunks(h.shape[0], chunk, w.shape[0])
    logits = _buffer(parts, w)
    for part in parts:
        h_part, y = h[part].to(w_work.dtype), targets[part]
        z = _matmul(h_part, w_work.T, out=logits[: len(y)])
        outs[:, part] = torch.stack(row_head(z, y, temperature=temperature))
    return outs.unbind()


def _grads(h, w, targets, g, temperature: float, chunk: int, need_h: bool) -> tuple[Tensor | None, Tensor]:
    """Backward of a trainable head in torch: dh (N, D) like h or None, dw (V, D) like w, from g (N,) fp32.

    g multiplies the (chunk, D) rows around the products instead of the (chunk, V) probabilities.
    """
    w_work = w.to(_work_dtype(w))
    dh = torch.empty_like(h) if need_h else None
    dw = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    parts = _chunks(h.shape[0], chunk, w.shape[0])
    buffer = _buffer(parts, w)
    for part in parts:
        h_part, y, g_part = h[part].to(w_work.dtype), targets[part], g[part, None] / temperature
        p = _softmax_(_matmul(h_part, w_work.T, out=buffer[: len(y)]), temperature).to(w_work.dtype)
        if need_h:
            dh[part] = ((w_work[y].float() - (p @ w_work).float()) * g_part).to(dh.dtype)
        gh = h_part.float() * g_part  # (chunk, D)
        _add_product(dw, p.T, gh.to(w_work.dtype), alpha=-1.0)
        dw.index_add_(0, y, gh)
    return dh, dw.to(w.dtype)


def _grads_triton(h, w, targets, lse, g, temperature: float, chunk: int, need_h: bool):
    """As _grads, from the lse of forward."""
    w_work = w.to(_work_dtype(w))
    dh = torch.empty_like(h) if need_h else None
    dw = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    parts = _chunks(h.shape[0], chunk, w.shape[0])
    logits = _buffer(parts, w)
    dz_buffer = logits if w_work.dtype == torch.float32 else _buffer(parts, w, w_work.dtype)
    for part in parts:
        h_part, y = h[part].to(w_work.dtype), targets[part]
        z = _matmul(h_part, w_work.T, out=logits[: len(y)])
        dz = row_grad(z, y, lse[part], g[part], dz_buffer[: len(y)], temperature=temperature)
        if need_h:
            dh[part] = (dz @ w_work).to(dh.dtype)
        _add_product(dw, dz.T, h_part)
    return dh, dw.to(w.dtype)


def _refuse_entropy_gradient(grad: Tensor | None) -> None:
    if grad is not None:
        raise ValueError(
            "the entropy of linear_logp is for logging and has no gradient; detach it before the loss"
        )


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, targets, temperature, chunk):
        run = _logp_u_triton if runs_triton(h) else _logp_u
        logp, entropy, u = run(h, w, targets, temperature, chunk)
        ctx.save_for_backward(u)
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_entropy):
        _refuse_entropy_gradient(g_entropy)
        (u,) = ctx.saved_tensors
        dh = None if g is None else (g[:, None] * u).to(u.dtype)
        return dh, None, None, None, None


class _TrainableHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, targets, temperature, chunk):
        if runs_triton(h):
            logp, entropy, lse = _logp_lse_triton(h, w, targets, temperature, chunk)
        else:
            (logp, entropy), lse = _logp_torch(h, w, targets, temperature, chunk), None
        ctx.save_for_backward(h, w, targets, lse)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logp.clone(), entropy.clone()  # rows of one tensor: FSDP warns of outputs that are views

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_entropy):
        _refuse_entropy_gradient(g_entropy)
        if g is None:
            return None, None, None, None, None
        h, w, targets, lse = ctx.saved_tensors
        options = (ctx.temperature, ctx.chunk, ctx.needs_input_grad[0])
        if runs_triton(h):
            dh, dw = _grads_triton(h, w, targets, lse, g.float(), *options)
        else:
            dh, dw = _grads(h, w, targets, g.float(), *options)
        return dh, dw, None, None, None


def _check(h: Tensor, w: Tensor, targets: Tensor, temperature: float) -> None:
    if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1] or targets.shape != h.shape[:1]:
        raise ValueError(
            f"h {tuple(h.shape)}, w {tuple(w.shape)}, targets {tuple(targets.shape)}: "
            "wanted (N, D), (V, D), (N,)"
        )
    if h.dtype != w.dtype:
        raise ValueError(f"h is {h.dtype}, w is {w.dtype}: wanted one dtype; convert the hidden states")
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: wanted > 0 (temperature 0 has no distribution to score)"
        )
    if not targets.is_cuda and targets.numel():
        low, high = (int(x) for x in targets.aminmax())
        if low < 0 or high >= w.shape[0]:
            raise ValueError(f"targets span {low}..{high}, wanted 0..{w.shape[0] - 1}")


@torch.compiler.disable
def linear_logp(
    h: Tensor, w: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability and each row's entropy under softmax(h w^T / temperature).

    h            (N, D) any float dtype, hidden states after the final norm; N may be 0
    w            (V, D) same dtype, head rows of the ids the tokenizer knows; frozen unless it requires grad
    targets      (N,) int64 in [0, V)
    temperature  of the policy that sampled the targets, > 0
    chunk        rows whose logits are held at once, more when V is small; None: CHUNK
    returns      logp (N,) fp32, nats, differentiable in h, and in w when it requires grad; entropy (N,) fp32,
                 nats, for logging: a loss that asks for its gradient raises ValueError in backward
    raises       ValueError for shapes or dtypes that do not fit, a temperature <= 0, targets out of range
                 (CPU only)
    """
    _check(h, w, targets, temperature)
    grad = torch.is_grad_enabled()
    if not (grad and (h.requires_grad or w.requires_grad)) and runs_triton(h):
        return _fused(h, w, targets, temperature)
    frozen_rows, trainable_rows = CHUNK[h.device.type]
    if grad and w.requires_grad:
        return _TrainableHead.apply(h, w, targets, temperature, chunk or trainable_rows)
    if grad and h.requires_grad:
        return _FrozenHead.apply(h, w, targets, temperature, chunk or frozen_rows)
    return _logp_torch(h, w, targets, temperature, chunk or frozen_rows)
