"""Mean and standard deviation of every return of a run so far, in four numbers.

A value: `updated` gives the next one and leaves this one as it is, so that a step which fails has changed nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RunningReturns:
    """What is known of the values seen so far; plain numbers, so that a checkpoint holds them exactly.

    Attributes:
        count: values seen. mean: of them.
        squared_deviations: sum of (value - mean)^2.
        magnitude: the largest `Returns.reward_magnitude` of an episode, the scale at which rounding happens.
    """

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    magnitude: float = 0.0

    @property
    def std(self) -> float:
        """With Bessel's correction; 0 before the second value."""
        return math.sqrt(self.squared_deviations / (self.count - 1)) if self.count > 1 else 0.0

    def updated(self, values: NDArray[np.float64], *, magnitude: float) -> RunningReturns:
        """With these values, too.

        Welford's update for many values at once (Chan, Golub, LeVeque 1983, eq. 1.5): sums of squares are never
        subtracted from each other, so that returns around a million keep a deviation of one.
        """
        if not len(values):
            return self
        count = self.count + len(values)
        mean = float(values.mean())
        shift = mean - self.mean
        return RunningReturns(
            count=count,
            mean=self.mean + shift * len(values) / count,
            squared_deviations=self.squared_deviations
            + float(((values - mean) ** 2).sum())
            + shift**2 * self.count * len(values) / count,
            magnitude=max(self.magnitude, magnitude),
        )
