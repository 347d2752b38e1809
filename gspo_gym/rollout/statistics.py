"""Intervals and tests of success rates and returns: closed forms and seeded resampling, without scipy.

Several samples of one task are not independent, so that with them a task, and not an episode, is the unit of every
interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_gym.errors import ConfigError
from gspo_gym.seeding import generator

_Z_95 = 1.959963984540054  # the 97.5% point of the standard normal distribution
_NUM_RESAMPLES = 10_000
_MAX_RESAMPLED_NUMBERS = 2_000_000  # held at once, so that 100,000 episodes do not need gigabytes


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% interval."""

    low: float
    high: float


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the probability that at least one of k samples of a task succeeds: 1 - C(n - c, k) / C(n, k).

    Unbiased for n = num_samples >= k of which c = num_successes succeeded (Chen et al. 2021, arXiv 2107.03374, eq. 1),
    which 1 - (1 - c/n)^k is not.

    >>> pass_at_k(4, 1, 2)  # 1 - 3/6
    0.5
    """
    _require_counts("pass_at_k", num_samples, num_successes, k)
    num_subsets = math.comb(num_samples, k)
    return (num_subsets - math.comb(num_samples - num_successes, k)) / num_subsets  # integers divide exactly


def pass_hat_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the probability that all of k samples of a task succeed, pass^k: C(c, k) / C(n, k).

    Unbiased as `pass_at_k` (tau-bench, Yao et al. 2024, arXiv 2406.12045).

    >>> pass_hat_k(4, 3, 2)  # 3/6
    0.5
    """
    _require_counts("pass_hat_k", num_samples, num_successes, k)
    return math.comb(num_successes, k) / math.comb(num_samples, k)


def _require_counts(name: str, num_samples: int, num_successes: int, k: int) -> None:
    if not (1 <= k <= num_samples and 0 <= num_successes <= num_samples):
        raise ConfigError(
            f"{name}: expected 1 <= k <= samples and 0 <= successes <= samples, got k = {k} and "
            f"{num_successes}/{num_samples}"
        )


def share_interval(shares: Sequence[float], num_samples: Sequence[int], *, is_weighted: bool = True) -> Interval:
    """Return the 95% interval of a mean of shares in [0, 1], one a task, each measured on so many samples.

    It is Wilson's with the effective number of independent trials (Franco et al. 2019, Journal of Survey Statistics and
    Methodology 7(3)): p (1 - p) / v, where v = sum_i w_i^2 (x_i - p)^2 / (sum_i w_i)^2 is the variance of the mean p
    between tasks. That is exactly Wilson's where every task has one sample; it is never more than the number of
    samples; and where all tasks have the same share, and so no variance, it is the number of tasks. A bootstrap over
    tasks would call a share of 0 or 1 certain.

    Args:
        is_weighted: a task weighs by its samples, as in a rate over episodes; else all weigh the same.

    >>> share_interval([0.5, 1.0, 0.5, 0.0], [2, 2, 2, 2]) == wilson_interval(4, 8)  # p = 1/2, v = 1/32
    True
    """
    if len(shares) != len(num_samples) or not shares:
        raise ConfigError(f"share_interval: expected a share for each of {len(num_samples)} tasks, got {len(shares)}")
    if max(num_samples) == 1:
        return wilson_interval(math.fsum(shares), len(shares))
    x, num = np.asarray(shares, dtype=np.float64), np.asarray(num_samples, dtype=np.float64)
    weights = num if is_weighted else np.ones_like(num)
    p = float((weights * x).sum() / weights.sum())
    variance = float((weights**2 * (x - p) ** 2).sum() / weights.sum() ** 2)
    trials = float(len(x))
    if variance > _SAME_SHARE:  # no more than p (1 - p), that of one trial
        trials = min(p * (1 - p) / variance, float(num.sum()))
    return wilson_interval(p * trials, trials)


_SAME_SHARE = 1e-24  # variance below which shares differ by rounding alone


def wilson_interval(num_successes: float, num_trials: float) -> Interval:
    """Return the 95% score interval of a success probability (Wilson 1927, without continuity correction).

    With p = num_successes / num_trials, n = num_trials and z = 1.96: centre (p + z^2/2n) / (1 + z^2/n), half width
    z sqrt(p (1 - p)/n + z^2/4n^2) / (1 + z^2/n). Unlike p +- z sqrt(p (1 - p)/n) it keeps its coverage near 0 and 1.

    >>> interval = wilson_interval(0, 10)
    >>> interval.low, round(interval.high, 4)
    (0.0, 0.2775)
    """
    if num_trials < 1 or not 0 <= num_successes <= num_trials:
        raise ConfigError(f"wilson_interval: expected 0 <= successes <= trials >= 1, got {num_successes}/{num_trials}")
    n, p, z2 = num_trials, num_successes / num_trials, _Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends the exact bounds are 0 and 1; the subtraction only rounds to them.
    low = 0.0 if num_successes == 0 else centre - half
    high = 1.0 if num_successes == n else centre + half
    return Interval(low, high)


def bootstrap_mean_interval(
    values: Sequence[float], *, weights: Sequence[float] | None = None, seed: int = 0
) -> Interval | None:
    """Return the 95% percentile bootstrap interval of the mean (Efron 1979), 10,000 resamples, seeded.

    None for fewer than 2 values, from which no spread can be seen. If all values are equal the interval is that value,
    which says nothing about values that were not drawn. With `weights`, such as the samples of tasks whose means the
    values are, it is that of the weighted mean; a value is drawn with its weight.
    """
    # And not Student's t: returns are often two-valued or skewed.
    if len(values) < 2:
        return None
    weight = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=np.float64)
    weighted = weight * np.asarray(values, dtype=np.float64)
    rng = generator(seed, "bootstrap")
    block = max(1, _MAX_RESAMPLED_NUMBERS // len(weighted))
    means = []
    for done in range(0, _NUM_RESAMPLES, block):
        choices = rng.integers(len(weighted), size=(min(block, _NUM_RESAMPLES - done), len(weighted)))
        means.append(weighted[choices].sum(axis=1) / weight[choices].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(low), float(high))


def mcnemar_exact_p(num_only_first: int, num_only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: are successes of one side more frequent on the same tasks?

    Only pairs that differ count. Under the null hypothesis each of the n = num_only_first + num_only_second goes either
    way with probability 1/2 (the sign test), so p = min(1, 2 P[Binomial(n, 1/2) <= min of the two]); 1 if no pair
    differs.

    >>> mcnemar_exact_p(0, 5)  # 2 / 2**5
    0.0625
    """
    n = num_only_first + num_only_second
    tail: int = sum(math.comb(n, k) for k in range(min(num_only_first, num_only_second) + 1))
    p: float = 2 * tail / 2**n  # integers divide exactly, however large
    return min(1.0, p)


def as_list(interval: Interval | None) -> list[float] | None:
    """Return an interval as JSON values."""
    return None if interval is None else [interval.low, interval.high]


def as_text(interval: Interval | None) -> str:
    """Return an interval for a table for people."""
    return "-" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"
