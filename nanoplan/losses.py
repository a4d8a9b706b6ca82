"""Policy losses on per-token log-probs. Pure functions: tensors in, a scalar and sums for the log out.

Counts are those of the whole optimizer step, summed over ranks and micro-batches before the first backward.
So each micro-batch's loss is its share of the step's loss, losses add up, and no way of splitting the batch
changes the result.
"""

import torch
from torch import Tensor

from kernels.clip_loss import MAX_LOG_RATIO, clip_loss
from nanoplan.batch import Batch


def token_weights(
    batch: Batch,
    *,
    reduction: str,
    num_tokens: int,
    num_sequences: int,
    max_tokens_per_sequence: int,
) -> Tensor:
    """Return what each trained token weighs in the step's loss, (N,) fp32.

    reduction   "token": 1 / num_tokens, the mean over all tokens of the step (DAPO, arXiv:2503.14476)
                "sequence": 1 / (tokens of its sequence * num_sequences), a mean of means (GRPO,
                arXiv:2402.03300)
                "constant": 1 / (max_tokens_per_sequence * num_sequences) (Dr. GRPO, arXiv:2503.20783)
    num_tokens, num_sequences
                of the whole step, over ranks and micro-batches. Whether trajectories of advantage 0 count is
                the caller's choice: if they do, a step is smaller the more groups are constant
    raises      ValueError for another reduction, or a count < 1 that the reduction divides by
    """
    denominators = {
        "token": num_tokens,
        "sequence": num_sequences,
        "constant": num_sequences * max_tokens_per_sequence,
    }
    if reduction not in denominators:
        raise ValueError(f"reduction={reduction!r}: wanted one of {', '.join(denominators)}")
    denominator = denominators[reduction]
    if denominator < 1 and len(batch.rows):
        raise ValueError(
            f"num_tokens={num_tokens}, num_sequences={num_sequences}, max_tokens_per_sequence="
            f"{max_tokens_per_sequence} with {len(batch.rows)} tokens to weigh; sum over the whole step first"
        )
    weights = torch.full_like(batch.old_logp, 1.0 / max(denominator, 1))
    return weights / batch.lengths[batch.sequence] if reduction == "sequence" else weights


def truncated_ratio(logp: Tensor, sampler_logp: Tensor, *, cap: float) -> Tensor:
    """Return min(exp(logp - sampler_logp), cap), detached: the trainer's old policy over the sampler's (TIS).

    logp, sampler_logp  (N,) nats
    cap                 > 0; 2 in the works that proposed it
    """
    if not cap > 0:
        raise ValueError(f"truncated_is={cap}: wanted > 0, or None for no correction")
    log_ratio = (logp - sampler_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp().clamp(max=cap)


def sequence_log_ratio(logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
    """Return each token's mean of logp - old_logp over its sequence, (N,): the log of GSPO's s_i."""
    sums = logp.new_zeros(len(batch.lengths)).index_add(0, batch.sequence, logp - old_logp)  # (S,)
    return (sums / batch.lengths.clamp(min=1))[batch.sequence]


def kl_penalty(logp: Tensor, ref_logp: Tensor, weights: Tensor) -> Tensor:
    """Return sum of weights * k3, k3 = exp(d) - d - 1 with d = ref_logp - logp clamped to +-20."""
    d = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (weights * (d.exp() - d - 1)).sum()


def policy_loss(
    logp: Tensor,
    batch: Batch,
    *,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ref_logp: Tensor | None = None,
    kl_beta: float = 0.0,
    level: str = "token",
    truncated_is: float | None = None,
    trainer_logp: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one micro-batch's share of the step's clipped-ratio loss, and its metrics: sums, see clip_loss.

    logp          (N,) fp32, nats, of batch.targets under the model in training, at the sampling temperature
    weights       (N,) fp32 from token_weights
    ref_logp      (N,) log-probs of the reference for kl_beta * k3; None without a KL term
    level         "token": a ratio per token; "sequence": GSPO (arXiv:2507.18071), one ratio per sequence, the
                  exponential of its mean log-ratio; reduction "sequence" gives the paper's loss
    truncated_is  None: the ratio is taken against the sampler's own log-probs, batch.old_logp. A number C: it
                  is taken against trainer_logp, and each token's weight times min(exp(trainer_logp -
                  batch.old_logp), C), so that the gap between sampler and trainer is corrected once, not
                  twice
    trainer_logp  (N,) the trainer's log-probs before the step's first update; None: logp itself, which is
                  right when each batch is used for one update
    raises        ValueError for another level
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r}: wanted token or sequence")
    old_logp = batch.old_logp
    if truncated_is is not None:
        old_logp = (logp if trainer_logp is None else trainer_logp).detach()
        weights = weights * truncated_ratio(old_logp, batch.old_logp, cap=truncated_is)
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    if level == "token":
        return clip_loss(
            logp, old_logp, batch.advantages, weights, ref_logp=ref_logp, kl_beta=kl_beta, **clips
        )
    log_ratio = sequence_log_ratio(logp, old_logp, batch)
    loss, metrics = clip_loss(log_ratio, torch.zeros_like(log_ratio), batch.advantages, weights, **clips)
    if ref_logp is not None:
        loss = loss + kl_beta * kl_penalty(logp, ref_logp, weights)
        metrics["kl_ref"] = kl_penalty(logp, ref_logp, (weights > 0).float()).detach()
    return loss, metrics
