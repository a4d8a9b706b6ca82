"""Log-probability and entropy of given tokens straight from hidden states, without (N, V) logits in memory.

With z = h w^T, x = z / temperature, lse = log sum exp x, p = exp(x - lse):
  logp_n = x_{n, y_n} - lse_n                 entropy_n = lse_n - sum_v p_nv x_nv
  d logp_n / d h_n = u_n = (w_{y_n} - sum_v p_nv w_v) / temperature
  d loss / d w = sum_n g_n (onehot(y_n) - p_n) h_n^T / temperature,  g = d loss / d logp

Frozen head (LoRA): u needs nothing from the loss, so forward forms it and backward is g[:, None] * u: two
GEMMs for any loss. Trainable head: keep lse, recompute the logits chunk by chunk in backward: four GEMMs, d w
accumulated in fp32. Every loss of this repository is plain torch on the (N,) log-probs. Logits are fp32:
rounding them to bf16 moves 64 % of the importance ratios by more than 1 %.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits held at once, at least: below this the cost is that of launching operations.
MIN_LOGITS = 1 << 20


def linear_logp_ref(
    h: Tensor, w: Tensor, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The meaning: log_softmax of all logits at once, in the inputs' dtype; autograd differentiates both."""
    x = torch.log_softmax(h @ w.T / temperature, dim=-1)  # (N, V)
    return x.gather(1, targets[:, None])[:, 0], -(x.exp() * x).sum(dim=-1)


def _chunks(num_rows: int, chunk: int, vocab: int) -> list[slice]:
    rows = max(chunk, MIN_LOGITS // max(vocab, 1))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def _buffer(parts: list[slice], w: Tensor) -> Tensor:
    rows = parts[0].stop if parts else 0
    return torch.empty(rows, w.shape[0], dtype=torch.float32, device=w.device)


def _matmul(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write a @ b to `out`, fp32; half-precision inputs (CUDA only) have an fp32 accumulator."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def _work_dtype(w: Tensor) -> torch.dtype:
    # A CPU rounds half-precision products to half precision, and most have no units for them.
    return w.dtype if w.is_cuda else torch.float32


def _logp_u(
    h: Tensor, w: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward of a frozen head: logp (N,), entropy (N,), both fp32, and u (N, D) in the dtype of h."""
    N = h.shape[0]
    logp, entropy = torch.empty(2, N, dtype=torch.float32, device=h.device)
    u = torch.empty_like(h)
    w_work = w.to(_work_dtype(w))
    parts = _chunks(N, chunk, w.shape[0])
    buffer = _buffer(parts, w)
    for part in parts:
        h_part, y = h[part].to(w_work.dtype), targets[part, None]
        x = _matmul(h_part, w_work.T, out=buffer[: len(h_part)])  # (chunk, V) fp32
        if temperature != 1.0:
            x.div_(temperature)
        m = x.amax(dim=1, keepdim=True)
        x.sub_(m)
        x_target = x.gather(1, y)
        s = x.exp_().sum(dim=1, keepdim=True)
        p = x.div_(s)
        mean_w = (p.to(w_work.dtype) @ w_work).float()  # (chunk, D), sum_v p_v w_v
        lse = s.log()  # relative to m
        logp[part] = (x_target - lse)[:, 0]
        # sum_v p_v x_v = h . mean_w / temperature: the entropy costs no pass over the logits
        entropy[part] = (lse + m)[:, 0] - (h_part.float() * mean_w).sum(dim=1) / temperature
        u[part] = (w_work[y[:, 0]].float() - mean_w).div_(temperature)
    return logp, entropy, u


def _logp_lse(
    h: Tensor, w: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward without gradient: logp, entropy, lse, each (N,) fp32."""
    N = h.shape[0]
    logp, entropy, lse = torch.empty(3, N, dtype=torch.float32, device=h.device)
    w_work = w.to(_work_dtype(w))
    parts = _chunks(N, max(1, chunk // 2), w.shape[0])  # two buffers
    logits, probs = _buffer(parts, w), _buffer(parts, w)
    for part in parts:
        h_part, y = h[part].to(w_work.dtype), targets[part, None]
        x = _matmul(h_part, w_work.T, out=logits[: len(h_part)])  # (chunk, V) fp32
        if temperature != 1.0:
            x.div_(temperature)
        m = x.amax(dim=1, keepdim=True)
        x.sub_(m)
        e = torch.exp(x, out=probs[: len(h_part)])
        s = e.sum(dim=1, keepdim=True)
        mean_x = torch.bmm(e[:, None, :], x[:, :, None])[:, 0] / s  # (chunk, 1), relative to m
        logp[part] = (x.gather(1, y) - s.log())[:, 0]
        entropy[part] = (s.log() - mean_x)[:, 0]
        lse[part] = (s.log() + m)[:, 0]
    return logp, entropy, lse


def _grads(
    h, w, targets, lse, g, temperature: float, chunk: int, *, need_h: bool
) -> tuple[Tensor | None, Tensor]:
    """Backward of a trainable head: dh (N, D) like h or None, dw (V, D) like w, from g (N,) fp32."""
    w_work = w.to(_work_dtype(w))
    dh = torch.empty_like(h) if need_h else None
    dw = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    parts = _chunks(h.shape[0], chunk, w.shape[0])
    buffer = _buffer(parts, w)
    for part in parts:
        h_part, y, g_part = h[part].to(w_work.dtype), targets[part, None], g[part, None] / temperature
        x = _matmul(h_part, w_work.T, out=buffer[: len(h_part)])
        if temperature != 1.0:
            x.div_(temperature)
        dz = x.sub_(lse[part, None]).exp_().mul_(-g_part)  # (chunk, V): -g p / temperature
        dz = dz.scatter_add_(1, y, g_part).to(w_work.dtype)
        if need_h:
            dh[part] = dz @ w_work
        if w_work.dtype == torch.float32:
            dw.addmm_(dz.T, h_part)
        else:
            dw += torch.mm(dz.T, h_part, out_dtype=torch.float32)
    return dh, dw.to(w.dtype)


def _refuse_entropy_gradient(grad: Tensor | None) -> None:
    if grad is not None:
        raise ValueError(
            "the entropy of linear_logp is for logging and has no gradient; detach it before the loss"
        )


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, targets, temperature, chunk):
        logp, entropy, u = _logp_u(h, w, targets, temperature, chunk)
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
        logp, entropy, lse = _logp_lse(h, w, targets, temperature, chunk)
        ctx.save_for_backward(h, w, targets, lse)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_entropy):
        _refuse_entropy_gradient(g_entropy)
        if g is None:
            return None, None, None, None, None
        h, w, targets, lse = ctx.saved_tensors
        need_h = ctx.needs_input_grad[0]
        dh, dw = _grads(h, w, targets, lse, g.float(), ctx.temperature, ctx.chunk, need_h=need_h)
        return dh, dw, None, None, None


def linear_logp(
    h: Tensor, w: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability and each row's entropy under softmax(h w^T / temperature).

    h            (N, D) any float dtype, hidden states after the final norm; N may be 0
    w            (V, D) same dtype, head rows of the ids the tokenizer knows; frozen unless it requires grad
    targets      (N,) int64 in [0, V)
    temperature  of the policy that sampled the targets, > 0
    chunk        rows whose logits are held at once; more when V is small
    returns      logp (N,) fp32, nats, differentiable in h, and in w when it requires grad; entropy (N,) fp32,
                 nats, for logging: a loss that asks for its gradient raises ValueError in backward
    raises       ValueError for shapes that do not fit, a temperature <= 0, targets out of range (CPU only)
    """
    if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1] or targets.shape != h.shape[:1]:
        raise ValueError(
            f"h {tuple(h.shape)}, w {tuple(w.shape)}, targets {tuple(targets.shape)}: "
            "wanted (N, D), (V, D), (N,)"
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: wanted > 0 (temperature 0 has no distribution to score)"
        )
    if not targets.is_cuda and targets.numel():
        low, high = (int(x) for x in targets.aminmax())
        if low < 0 or high >= w.shape[0]:
            raise ValueError(f"targets span {low}..{high}, wanted 0..{w.shape[0] - 1}")
    grad = torch.is_grad_enabled()
    if grad and w.requires_grad:
        return _TrainableHead.apply(h, w, targets, temperature, chunk)
    if grad and h.requires_grad:
        return _FrozenHead.apply(h, w, targets, temperature, chunk)
    return _logp_lse(h, w, targets, temperature, chunk)[:2]
