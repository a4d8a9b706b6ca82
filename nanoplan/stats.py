"""Intervals for rates and differences, and the learning rate as a function of the step: numbers only."""

import math

import numpy as np

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def wilson(successes: int, n: int, *, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a rate.

    successes  how often it worked, 0 to n
    n          how often it was tried; 0 gives (0.0, 1.0): nothing is known
    returns    (low, high), shares in [0, 1]
    raises     ValueError if successes is not within [0, n]
    source     Wilson 1927, J. Am. Stat. Assoc. 22, 209
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} is not within [0, n={n}]")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else middle - half  # exact at the ends, where rounding leaves 1e-17
    high = 1.0 if successes == n else middle + half
    return low, high


def bootstrap_mean(
    values: list[float], *, seed: int, samples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean with a percentile bootstrap interval; items are resampled, so each must be independent.

    returns  (mean, low, high) in the unit of values
    raises   ValueError for an empty list
    source   Efron & Tibshirani 1993, chapter 13
    """
    if len(values) == 0:
        raise ValueError("values is empty; an interval needs at least one item")
    x = np.asarray(values, dtype=np.float64)  # (n,)
    rng = np.random.default_rng(seed)
    means = np.array([x[rng.integers(0, len(x), len(x))].mean() for _ in range(samples)])  # (samples,)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(x.mean()), float(low), float(high)


def paired_bootstrap(
    a: list[float], b: list[float], *, seed: int, samples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean of b - a over the same items, with a percentile bootstrap interval over items.

    a, b     one value per item, in the same order
    returns  (diff, low, high); an interval without 0 is a difference at this level
    raises   ValueError if the lengths differ or are 0
    """
    if len(a) != len(b):
        raise ValueError(f"len(a)={len(a)} and len(b)={len(b)} differ; pair the items by id first")
    return bootstrap_mean([y - x for x, y in zip(a, b, strict=True)], seed=seed, samples=samples, level=level)


def standard_error(values: list[float]) -> float | None:
    """Standard error of the mean, sample standard deviation / sqrt(n); None for fewer than two values."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def pass_hat(successes: list[int], trials: int, k: int) -> float:
    """pass^k: the chance that k trials of a task, drawn without replacement, all succeed; mean over tasks.

    successes  of each task, 0 to trials
    raises     ValueError unless 1 <= k <= trials, and for an empty list
    source     tau-bench (arXiv:2406.12045): mean of C(c, k) / C(n, k); k = 1 is the mean success
    """
    if not successes or not 1 <= k <= trials or not all(0 <= c <= trials for c in successes):
        raise ValueError(f"k={k}, trials={trials}, {len(successes)} tasks: wanted 1 <= k <= trials, a task")
    return sum(math.comb(c, k) for c in successes) / (len(successes) * math.comb(trials, k))


SCHEDULES = {  # share of the way from base to floor that is still to go, at progress in [0, 1]
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def lr_at(
    step: int, *, base: float, total: int, warmup: int = 0, floor: float = 0.0, schedule: str = "cosine"
) -> float:
    """Learning rate of a step: linear warmup, then SCHEDULES from base down to floor.

    step     0 for the first update; past total the rate stays where it ended
    total    steps of the whole run, warmup included
    warmup   step w-1 is the first at base; step 0 is base / warmup, not 0, so that no step is wasted
    raises   ValueError for an unknown schedule or a warmup that is longer than the run
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; choose from {', '.join(SCHEDULES)}")
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup={warmup} steps is not within [0, total={total}]; lower warmup")
    if step < warmup:
        return base * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (base - floor) * SCHEDULES[schedule](progress)
