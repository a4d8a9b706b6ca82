"""The clipped-ratio loss with its gradient and its metrics in one pass.

With l = logp - old_logp clamped to +-20, ratio = exp(l), A the advantage:
  u = ratio A,   c = clip(ratio, 1 - clip_low, 1 + clip_high) A,   surrogate = min(u, c)
  dual clip, for A < 0 only:  surrogate = max(surrogate, dual_clip A)
  d = ref_logp - logp clamped to +-20,   k3 = exp(d) - d - 1
  loss = sum_n weights_n (-surrogate_n + kl_beta k3_n)
  d loss_n / d logp_n = -u, or 0 where c < u strictly, where the dual clip is active, or where the clamp hit;
                        plus kl_beta (1 - exp(d)), or 0 where that clamp hit

All normalisations are the caller's weights (see nanoplan.losses). Eager torch with the same metrics
dispatches about 90 operations for a few hundred kilobytes: this file exists for the launches and for metrics
without synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import jit, runs_triton, tl, triton

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 and its square are finite in fp32
NO_DUAL_CLIP = 1e30  # a bound that no token reaches; inf times an advantage of 0 would be NaN
BLOCK = 1024  # tokens per program
METRICS = ("tokens", "clip_low", "clip_high", "ratio_sum", "ratio_max", "kl_old", "kl_ref")


def clip_loss_ref(
    logp, old_logp, advantages, weights, *, clip_low, clip_high, dual_clip=None, ref_logp=None, kl_beta=0.0
) -> Tensor:
    """The loss alone, by its definition, in the dtype of finite inputs; autograd differentiates it."""
    ratio = (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    loss = -surrogate
    if ref_logp is not None:
        d = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        loss = loss + kl_beta * (d.exp() - d - 1)
    return (weights * loss).sum()


@jit
def _clip_loss(
    logp_ptr,  # (N,) fp32, nats
    old_ptr,  # (N,) fp32, nats
    advantage_ptr,  # (N,) fp32
    weight_ptr,  # (N,) fp32
    ref_ptr,  # (N,) fp32, nats; logp itself without a reference, which makes d = 0
    grad_ptr,  # (N,) fp32, out: d loss / d logp
    sums_ptr,  # (8, blocks) fp32, out: loss, then METRICS
    N,
    low,  # 1 - clip_low
    high,  # 1 + clip_high
    dual,  # dual_clip, or NO_DUAL_CLIP
    kl_beta,
    MAX: tl.constexpr,  # MAX_LOG_RATIO
    B: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    weight = tl.load(weight_ptr + at, mask=at < N, other=0.0)
    used = weight > 0
    # Rows that are not used are never read: they may hold NaN.
    logp = tl.load(logp_ptr + at, mask=used, other=0.0)
    advantage = tl.load(advantage_ptr + at, mask=used, other=0.0)
    raw = logp - tl.load(old_ptr + at, mask=used, other=0.0)
    log_ratio = tl.minimum(tl.maximum(raw, -MAX), MAX)
    ratio = tl.exp(log_ratio)
    u = ratio * advantage
    c = tl.minimum(tl.maximum(ratio, low), high) * advantage
    clipped = c < u
    surrogate = tl.minimum(u, c)
    floor = tl.where(advantage < 0, dual * advantage, surrogate)
    capped = surrogate < floor
    raw_d = tl.load(ref_ptr + at, mask=used, other=0.0) - logp
    d = tl.minimum(tl.maximum(raw_d, -MAX), MAX)
    k3 = tl.exp(d) - d - 1
    loss = kl_beta * k3 - tl.maximum(surrogate, floor)
    grad = tl.where(clipped | capped | (tl.abs(raw) > MAX), 0.0, -u)
    grad += tl.where(tl.abs(raw_d) > MAX, 0.0, kl_beta * (1 - tl.exp(d)))
    tl.store(grad_ptr + at, weight * grad, mask=at < N)

    blocks = tl.num_programs(0)
    out = sums_ptr + tl.program_id(0)
    stopped_high = (clipped & (advantage > 0)) | capped
    tl.store(out, tl.sum(weight * loss, axis=0))
    tl.store(out + blocks, tl.sum(used.to(tl.float32), axis=0))
    tl.store(out + 2 * blocks, tl.sum((clipped & (advantage < 0)).to(tl.float32), axis=0))
    tl.store(out + 3 * blocks, tl.sum(stopped_high.to(tl.float32), axis=0))
    tl.store(out + 4 * blocks, tl.sum(tl.where(used, ratio, 0.0), axis=0))
    tl.store(out + 5 * blocks, tl.max(tl.where(used, ratio, 0.0), axis=0))
    tl.store(out + 6 * blocks, tl.sum(tl.where(used, ratio - log_ratio - 1, 0.0), axis=0))
    tl.store(out + 7 * blocks, tl.sum(k3, axis=0))


def _clip_loss_triton(logp, old_logp, advantages, weights, ref_logp, clip_low, clip_high, dual_clip, kl_beta):
    """As _clip_loss_torch, in one launch and a sum over blocks: no atomics, nothing read back."""
    N = logp.shape[0]
    ref_logp = logp if ref_logp is None else ref_logp
    inputs = [x.float().contiguous() for x in (logp, old_logp, advantages, weights, ref_logp)]
    grad = torch.empty(N, dtype=torch.float32, device=logp.device)
    sums = torch.zeros(8, max(1, triton.cdiv(N, BLOCK)), dtype=torch.float32, device=logp.device)
    if N:
        dual = NO_DUAL_CLIP if dual_clip is None else dual_clip
        _clip_loss[(sums.shape[1],)](
            *inputs, grad, sums, N, 1 - clip_low, 1 + clip_high, dual, kl_beta, MAX=MAX_LOG_RATIO, B=BLOCK
        )
    totals = sums.sum(dim=1)
    totals[1 + METRICS.index("ratio_max")] = sums[1 + METRICS.index("ratio_max")].amax()
    return totals[0], grad.to(logp.dtype), totals[1:]


def _clip_loss_torch(logp, old_logp, advantages, weights, ref_logp, clip_low, clip_high, dual_clip, kl_beta):
    """Return loss (), d loss / d logp (N,), metrics (7,) in the order of METRICS."""
    used = weights > 0
    raw = logp - old_logp
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    u = ratio * advantages
    c = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = c < u
    surrogate = torch.minimum(u, c)
    stopped = clipped | (raw.abs() > MAX_LOG_RATIO)
    high = clipped & (advantages > 0)
    if dual_clip is not None:
        capped = (advantages < 0) & (surrogate < dual_clip * advantages)
        surrogate = torch.where(capped, dual_clip * advantages, surrogate)
        stopped, high = stopped | capped, high | capped
    loss = -surrogate
    grad = torch.where(stopped, 0.0, -u)
    kl_ref = torch.zeros_like(logp)
    if ref_logp is not None:
        raw_d = ref_logp - logp
        d = raw_d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl_ref = d.exp() - d - 1
        loss = loss + kl_beta * kl_ref
        grad = grad + torch.where(raw_d.abs() > MAX_LOG_RATIO, 0.0, kl_beta * (1 - d.exp()))
    # Masked by where, never by multiplication: 0 * inf is NaN.
    loss = torch.where(used, weights * loss, 0.0).sum()
    grad = torch.where(used, weights * grad, 0.0)
    columns = (used, used & clipped & (advantages < 0), used & high, ratio, ratio - log_ratio - 1, kl_ref)
    tokens, low, high, ratio_sum, kl_old, kl_ref = torch.where(
        used, torch.stack([x.float() for x in columns]), 0.0
    ).sum(1)
    ratio_max = torch.cat([torch.where(used, ratio, 0.0), ratio.new_zeros(1)]).amax()
    return loss, grad, torch.stack([tokens, low, high, ratio_sum, ratio_max.float(), kl_old, kl_ref])


class _ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, *rest):
        run = _clip_loss_triton if runs_triton(logp) else _clip_loss_torch
        loss, grad, metrics = run(logp, *rest)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _):
        (grad,) = ctx.saved_tensors
        return (g * grad, *[None] * 8)


@torch.compiler.disable
def clip_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ref_logp: Tensor | None = None,
    kl_beta: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped-ratio loss, differentiable in logp only, and its metrics.

    logp, old_logp  (N,) fp32, nats; N may be 0
    advantages      (N,) fp32
    weights         (N,) fp32 >= 0: mask and every normalisation; rows of weight 0 may hold anything, also inf
    clip_low/high   the ratio is clipped to [1 - clip_low, 1 + clip_high]
    dual_clip       > 1: with a negative advantage a token loses at most dual_clip * |advantage|
    ref_logp        (N,) fp32 reference log-probs for kl_beta * k3, or None
    returns         loss () = sum of weights * loss of each token; metrics, 0-dim fp32 tensors without
                    gradient, sums over the tokens of weight > 0: tokens, clip_low and clip_high (tokens whose
                    gradient the lower, and the upper or dual, clip stopped), ratio_sum, kl_old (k3 estimate
                    of KL(old || new)), kl_ref (k3 estimate of KL(new || ref), 0 without ref_logp); and
                    ratio_max, their maximum (0 without tokens)
    raises          ValueError for shapes or clips that do not fit
    source          PPO clip with DAPO's two sides (arXiv:2503.14476); dual clip arXiv:1912.09729;
                    k3: J. Schulman, "Approximating KL divergence"
    """
    given = [logp, old_logp, advantages, weights] + ([] if ref_logp is None else [ref_logp])
    if any(x.shape != logp.shape or x.ndim != 1 for x in given):
        raise ValueError(f"shapes {[tuple(x.shape) for x in given]}: wanted (N,) for all of them")
    if not (0 <= clip_low <= 1 and clip_high >= 0) or (dual_clip is not None and dual_clip <= 1):
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}, dual_clip={dual_clip}: "
            "wanted 0..1, >= 0, None or > 1"
        )
    loss, metrics = _ClipLoss.apply(
        logp, old_logp, advantages, weights, ref_logp, clip_low, clip_high, dual_clip, kl_beta
    )
    return loss, dict(zip(METRICS, metrics.unbind(), strict=True))
