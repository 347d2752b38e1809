"""Intervals and tests for evaluations: closed forms and seeded resampling of numbers, without scipy."""

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


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
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


def bootstrap_mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval | None:
    """Return the 95% percentile bootstrap interval of the mean (Efron 1979), 10,000 resamples, seeded.

    None for fewer than 2 values, from which no spread can be seen. If all values are equal the interval is that value,
    which says nothing about values that were not drawn.
    """
    # And not Student's t: returns are often two-valued or skewed.
    if len(values) < 2:
        return None
    sample = np.asarray(values, dtype=np.float64)
    rng = generator(seed, "bootstrap")
    block = max(1, _MAX_RESAMPLED_NUMBERS // len(sample))
    means = np.concatenate(
        [
            sample[rng.integers(len(sample), size=(min(block, _NUM_RESAMPLES - done), len(sample)))].mean(axis=1)
            for done in range(0, _NUM_RESAMPLES, block)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
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
