"""How an id is drawn: an exponential race whose noise is a hash of (row seed, index in the row, id).

No generator has a state, so a row's ids depend on its seed and its logits alone. Leaves out penalties.
Shape letters: kernels/__init__.py.
"""

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of splitmix64


def mix64(x: np.ndarray) -> np.ndarray:
    """Scramble (n,) uint64 with splitmix64's finaliser (Steele et al. 2014); a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Two 32-bit keys for each token: seeds (n,) uint64 of its row, indices (n,) in it -> (n, 2) int32."""
    keys = mix64(mix64(seeds) + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    keys = keys.view(np.uint32).reshape(-1, 2)
    keys[:, 1] |= 1  # the second key multiplies: odd, so that no bit is lost
    return keys.view(np.int32)


def id_hashes(num_ids: int) -> Tensor:
    """A fixed random-looking word for every vocabulary id -> (V,) int32."""
    words = mix64(np.arange(num_ids, dtype=np.uint64) + np.uint64(GOLDEN)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def exponential_noise(keys: Tensor, hashes: Tensor) -> Tensor:
    """Minus one Exp(1) variable for each (key, id): log(1 - u) with u uniform in (0, 1).

    keys     (R, 2) int32 from `noise_keys`; hashes (V,) int32 from `id_hashes`
    returns  (R, V) fp32, strictly negative; u comes from the same integers on every device. It has 31 bits
             and is finest near 0, where a race's winners are: ids of probability 1e-9 keep their share
    """
    x = hashes[None, :] ^ keys[:, :1]  # (R, V) int32; products wrap
    x *= keys[:, 1:]
    x ^= x >> 15  # arithmetic shifts: the sign bit clears, 31 bits stay
    x *= -2073254261  # 0x846CA68B, from Wellons' lowbias32
    x ^= x >> 16
    return x.float().add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-24)).log1p_()


def keep_mask(p: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which ids stay when p (R, V) is filtered by top-k, top-p, min-p in turn: (R, V) bool; the best stays.

    Order and meaning as in transformers: top-p adds up what top-k left, renormalised, and keeps the id that
    crosses it.
    """
    order = p.argsort(dim=-1, descending=True, stable=True)
    ranked = p.gather(-1, order)  # (R, V), best first
    keep = ranked >= min_p * ranked[:, :1]
    if top_k > 0:
        keep[:, top_k:] = False
        ranked[:, top_k:] = 0
    ranked /= ranked.sum(-1, keepdim=True)
    keep &= ranked.cumsum(-1) - ranked < top_p
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def draw(logits: Tensor, keys: Tensor, hashes: Tensor, *, temperature: float, top_k=0, top_p=1.0, min_p=0.0):
    """One id for each row by an exponential race (the Gumbel-max trick without its outer logarithm).

    logits   (R, V) fp32, overwritten; keys, hashes: see `exponential_noise`
    returns  ids (R,) int64, logp (R,) fp32 nats: of the unfiltered softmax(logits / temperature).
             Temperature 0 takes the best id and reports its log-prob at temperature 1
    """
    if temperature not in (0, 1):
        logits.mul_(1 / temperature)
    x = logits.sub_(logits.amax(-1, keepdim=True))  # (R, V) <= 0
    p = x.exp()
    lse = p.sum(-1).log()  # (R,)
    if temperature == 0:
        ids = x.argmax(-1)
    else:
        if top_k > 0 or top_p < 1 or min_p > 0:
            p *= keep_mask(p / p.sum(-1, keepdim=True), top_k=top_k, top_p=top_p, min_p=min_p)
        ids = p.div_(exponential_noise(keys, hashes)).argmin(-1)  # argmax of p / Exp(1) has distribution p
    return ids, x.gather(-1, ids[:, None])[:, 0] - lse
