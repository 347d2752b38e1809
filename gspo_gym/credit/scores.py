"""Scores of an estimator of advantages: how near it comes to the true ones, and whether it is off on average.

Turns of a group depend on each other, so every interval resamples whole groups (the bootstrap of clusters). The truth
is a mean of continuations: what its own errors add to a variance is taken out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_gym.credit.forks import Floats
from gspo_gym.errors import ConfigError
from gspo_gym.seeding import generator

_NUM_RESAMPLES = 2000
_NUM_ERRORS = 4.0  # standard errors from which a bias counts: by chance once in 16,000
_SURE = 2.0  # standard errors from 0 from which the sign of a true advantage counts


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """True advantages of all turns, group after group.

    Attributes:
        advantages, variances: [N], the second of the first's errors.
        groups: [N] the group of each turn, from 0.
    """

    advantages: Floats
    variances: Floats
    groups: NDArray[np.intp]

    @property
    def ceiling(self) -> float:
        """Return the correlation of the true advantages with these, which have errors: none can have a higher one."""
        variance = float(self.advantages.var())
        return math.sqrt(max(0.0, 1 - float(self.variances.mean()) / variance)) if variance > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Score:
    """Scores of one estimator.

    Attributes:
        correlation: with the truth as measured, so at most its ceiling; low, high: its 95% interval.
        slope: of the estimates on the true advantages, 1 if unbiased: the share of the true gradient that it gives,
            whatever it subtracts that does not depend on the action.
        offset: mean of estimate less truth; not a bias of the gradient, but it decides signs.
        right_signs: of the turns whose true sign is sure, the fraction with that sign; an estimate of 0 counts half.
    """

    name: str
    correlation: float
    low: float
    high: float
    slope: float
    slope_error: float
    offset: float
    offset_error: float
    right_signs: float

    @property
    def is_biased(self) -> bool:
        """Whether the slope is more than four standard errors from 1."""
        return abs(self.slope - 1) > _NUM_ERRORS * self.slope_error

    @property
    def is_shifted(self) -> bool:
        """Whether the offset is more than four standard errors from 0."""
        return abs(self.offset) > _NUM_ERRORS * self.offset_error


def score(name: str, estimates: Floats, truth: Truth) -> Score:
    """Return the scores of `estimates` [N], with intervals of 2,000 resamples of the groups.

    Raises:
        ConfigError: fewer than 2 groups, or the true advantages do not differ.
    """
    sums = _sums_by_group(estimates, truth)
    if len(sums) < 2 or truth.ceiling == 0:
        raise ConfigError(
            f"credit: expected at least 2 groups whose true advantages differ by more than their errors, got "
            f"{len(sums)} with a ceiling of {truth.ceiling:.2f}; play more seeds or continuations, or another policy"
        )
    rng = generator(0, "credit", "bootstrap")  # one for all estimators: their intervals can be compared
    weights = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=_NUM_RESAMPLES)
    # A resample in which nothing varies says nothing of a slope.
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations, slopes, offsets = _statistics(weights @ sums)
    low, high = np.nanquantile(correlations, (0.025, 0.975))
    correlation, slope, offset = _statistics(sums.sum(axis=0))
    sure = np.abs(truth.advantages) > _SURE * np.sqrt(truth.variances)
    agreement = np.sign(estimates[sure]) * np.sign(truth.advantages[sure])
    return Score(
        name,
        correlation=float(correlation),
        low=float(low),
        high=float(high),
        slope=float(slope),
        slope_error=float(np.nanstd(slopes)),
        offset=float(offset),
        offset_error=float(np.nanstd(offsets)),
        right_signs=float((1 + agreement).mean() / 2) if sure.any() else math.nan,
    )


def _sums_by_group(estimates: Floats, truth: Truth) -> Floats:
    """Return [G, 7] sums over each group's turns, of which the statistics of any sample of groups follow."""
    e, t = estimates, truth.advantages
    columns = (np.ones_like(e), e, t, e * e, t * t, e * t, truth.variances)
    return np.stack([np.bincount(truth.groups, column) for column in columns], axis=1)


def _statistics(sums: Floats) -> tuple[Floats, Floats, Floats]:
    """Return correlation, slope and offset of [..., 7] sums."""
    n, e, t, ee, tt, et, noise = np.moveaxis(sums, -1, 0)
    covariance = et / n - (e / n) * (t / n)
    variance_e, variance_t = ee / n - (e / n) ** 2, tt / n - (t / n) ** 2
    spread = np.sqrt(np.maximum(variance_e * variance_t, 0.0))
    # Estimates that are all alike go with nothing.
    correlation = np.where(spread > 0, covariance / np.where(spread > 0, spread, 1.0), 0.0)
    return correlation, covariance / (variance_t - noise / n), (e - t) / n


def as_truth(groups: Sequence[Sequence[tuple[Floats, Floats]]]) -> Truth:
    """Return the truth of groups, each of (advantages, variances) of its episodes."""
    episodes = [episode for group in groups for episode in group]
    numbers = [number for number, group in enumerate(groups) for episode in group for _ in episode[0]]
    advantages, variances = (np.concatenate(parts) for parts in zip(*episodes, strict=True))
    return Truth(advantages, variances, np.array(numbers, dtype=np.intp))
