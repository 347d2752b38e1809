"""Returns of the episodes of a batch -> one advantage per turn of each.

An advantage says how much better an episode (or what follows a turn) was than what it is compared with. Notation: G
episodes of a group, R_i the return of episode i, G_ik its return-to-go from turn k, 0 after its last turn.

`RunningReturns` holds mean and standard deviation of every return of a run so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gspo_gym.errors import RecordError
from gspo_gym.learning.credit import Returns
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.types import Float32Array


@dataclass(frozen=True, slots=True)
class RunningReturns:
    """Statistics of the values seen so far; plain numbers, which a checkpoint holds exactly.

    It is a value: `updated` returns the next one, and a step that fails has changed nothing.

    Attributes:
        squared_deviations: sum of (value - mean)^2.
        magnitude: the largest `Returns.reward_magnitude` of an episode, the scale at which rounding happens.
        role_means: by role, the moving mean of its episodes; only with the baseline "role".
    """

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    magnitude: float = 0.0
    role_means: Mapping[str, float] = field(default_factory=dict)

    @property
    def std(self) -> float:
        """With Bessel's correction; 0 before the second value."""
        return math.sqrt(self.squared_deviations / (self.count - 1)) if self.count > 1 else 0.0

    def updated(self, values: NDArray[np.float64], *, magnitude: float) -> RunningReturns:
        """Return the statistics with these values, too (Chan, Golub, LeVeque 1983, eq. 1.5)."""
        if not len(values):
            return self
        count = self.count + len(values)
        mean = float(values.mean())
        # Sums of squares are never subtracted from each other: returns around a million keep a deviation of one.
        shift = mean - self.mean
        return replace(
            self,
            count=count,
            mean=self.mean + shift * len(values) / count,
            squared_deviations=self.squared_deviations
            + float(((values - mean) ** 2).sum())
            + shift**2 * self.count * len(values) / count,
            magnitude=max(self.magnitude, magnitude),
        )


_ROLE_DECAY = 0.95  # SPIRAL's
_CONSTANT_TOLERANCE = 1e-6  # eight roundings of float32
_SUM_TOLERANCE = 2.0**-44  # of the sizes summed: 256 roundings of float64


@dataclass(frozen=True, slots=True, eq=False)
class BatchAdvantages:
    """Advantages of a batch's episodes.

    Attributes:
        values: one float32 array [num_turns] per episode, group after group.
        constant_groups: per group, whether all its episodes did equally well.
    """

    values: tuple[Float32Array, ...]
    constant_groups: tuple[bool, ...]
    running: RunningReturns


def batch_advantages(
    groups: Sequence[Sequence[Returns]], settings: AdvantageSettings, running: RunningReturns | None = None
) -> BatchAdvantages:
    """Return advantages (x - baseline) / scale of the episodes of groups, each of one task and at least one episode.

    Level "trajectory" (arXiv 2507.18071, the equation of the group-based advantage, is baseline and scale "group"):
    x = R_i, and every turn of episode i gets the result. Level "turn" (ours): x = G_ik, turn by turn. Baseline and
    scale are chosen independently; at level "turn" they are taken at the same turn k, where an episode that had ended
    counts with the 0 that its future was worth.

    Level "auto" (ours): each group has the level whose advantages, unscaled, have the smaller mean square over the
    turns of the batch's other groups. With these baselines both levels have the same expected gradient, so that the
    smaller squares are the smaller noise; a group's own returns do not choose, which would bias it. Where they are
    alike, and in a batch of one group, it is "trajectory".

    Baseline: "group", the mean over the group; "leave_one_out", the mean over the siblings j != i, which depends on
    nothing that episode i did: the expected gradient is that of the returns alone ("group" is (G-1)/G of it);
    "batch", the mean over all episodes of the batch; "running", the mean of every x of the run so far, this batch's
    included, at level "turn" over all turns that were played; "none", 0 (REINFORCE); "role" (RAE of SPIRAL, arXiv
    2506.24119), a moving mean b of the role's episodes, from 0 on: b <- 0.95 b + 0.05 x, episode after episode, at
    level "turn" with the mean x of its turns. It is updated after the batch, so that no episode is in its own baseline.
    A role here is an environment, because environments have no seats.

    Scale: the standard deviation, with Bessel's correction, of the same sets; "mean", the mean return of the group, for
    returns of 0 and 1 (MaxRL, arXiv 2602.02710: a task weighs by 1 / its success rate); or 1 for "none". At level
    "turn" the scale of "group" and "batch" is the largest over turns: with one turn, or one reward at the end of
    episodes of equal length, the std of the returns. So |advantage| <= sqrt(G) where both are the group's.

    Where the set behind baseline or scale differs by no more than rounding (see `_Spread.of`) the advantage is exactly
    0; at level "turn" a baseline's set is that of one turn. `running` None: nothing was seen before.

    Raises:
        RecordError: scale "mean", and a return other than 0 and 1.
    """
    if settings.level == "auto":
        return _by_the_quieter_level(groups, settings, running)
    returns = [r for group in groups for r in group]
    if settings.scale == "mean":
        _require_binary(returns)
    values, magnitudes = _table(returns, settings.level), _magnitudes(returns, settings.level)
    before = running or RunningReturns()
    role_means = np.array([[before.role_means.get(r.role, 0.0)] for r in returns])
    # Updated first and used then, as ROLL does; but for the means of roles.
    so_far = _update_running(before, returns, settings)
    spreads = {"batch": _Spread.of(values, magnitudes), "running": _Spread.of_running(so_far, values.shape[1])}
    advantages: list[Float32Array] = []
    constant_groups: list[bool] = []
    start = 0
    for group in groups:
        rows = slice(start, start := start + len(group))
        own = _Spread.of(values[rows], magnitudes[rows])
        table = _compare(values[rows], settings, {"group": own, **spreads}, role_means[rows])
        advantages += [_per_turn(row, len(r.to_go)) for row, r in zip(table, group, strict=True)]
        constant_groups.append(not own.varies.any())  # a group of one, too: it has nothing to be compared with
    return BatchAdvantages(tuple(advantages), tuple(constant_groups), so_far)


def is_constant(group: Sequence[Returns], settings: AdvantageSettings) -> bool:
    """Return whether a group's episodes did equally well: one or none, or returns that differ by rounding.

    At levels "turn" and "auto" every turn's returns-to-go must be alike.
    """
    if not group:
        return True
    level = "turn" if settings.level == "auto" else settings.level
    return not _Spread.of(_table(group, level), _magnitudes(group, level)).varies.any()


def _by_the_quieter_level(
    groups: Sequence[Sequence[Returns]], settings: AdvantageSettings, running: RunningReturns | None
) -> BatchAdvantages:
    levels = [settings.model_copy(update={"level": level}) for level in ("trajectory", "turn")]
    bounds = np.cumsum([0, *map(len, groups)])
    squares = np.zeros((len(levels), len(groups)))
    for row, level in zip(squares, levels, strict=True):
        values = batch_advantages(groups, level.model_copy(update={"scale": "none"}), running).values
        sums = np.array([np.square(v, dtype=np.float64).sum() for v in values])
        row += [sums[first:last].sum() for first, last in pairwise(bounds)]
    per_episode, per_turn = squares.sum(axis=1, keepdims=True) - squares  # of the other groups, over the same turns
    is_turn = per_turn < (1 - _CONSTANT_TOLERANCE) * per_episode
    whole, turns = (batch_advantages(groups, level, running) for level in levels)
    chosen = [turns if choice else whole for choice in is_turn]
    return BatchAdvantages(
        tuple(v for c, ends in zip(chosen, pairwise(bounds), strict=True) for v in c.values[slice(*ends)]),
        tuple(c.constant_groups[number] for number, c in enumerate(chosen)),
        whole.running,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    """Spread of the values of a set of episodes; K columns, one a turn, or one in all at level "trajectory".

    Attributes:
        mean: [K]. varies: [K] bool, by more than rounding. std: the largest of a varying column; 0 if there is none.
    """

    mean: NDArray[np.float64]
    varies: NDArray[np.bool_]
    std: float

    @classmethod
    def of(cls, values: NDArray[np.float64], magnitudes: NDArray[np.float64]) -> _Spread:
        """Return the spread of values [n, K], n >= 1, summed from rewards of these `magnitudes` [n, K]."""
        mean = values.mean(axis=0)
        varies = np.ptp(values, axis=0) > _rounding(magnitudes.max(axis=0), mean)
        # The largest, and not that of the returns: where all earn nearly the same return by different ways, that is
        # nearly 0 while late turns differ, and dividing by it would explode.
        std = float(values[:, varies].std(axis=0, ddof=1).max()) if varies.any() else 0.0
        return cls(mean, varies, std)

    @classmethod
    def of_running(cls, running: RunningReturns, num_columns: int) -> _Spread:
        mean = np.full(num_columns, running.mean)
        varies = running.std > _rounding(np.full(num_columns, running.magnitude), mean)
        return cls(mean, varies, running.std if varies.any() else 0.0)


def _rounding(magnitudes: NDArray[np.float64], means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [K] the largest differences that rounding may have made."""
    # Two episodes that both earned "1", one of them as 1 + 1.2e-7 from float32 arithmetic upstream, must not get
    # advantages of +-0.7, which dividing by their std would give. So differences up to 1e-6 are none: rewards are of
    # order 1, or the remainder of terms of order 1. Where rewards of 1e6 cancel, their rounding is left: so also up to
    # 1e-6 of what is summed and not left in the mean. What all episodes share counts only with the rounding of float64:
    # 1e6 + 0.5 is more than 1e6.
    cancelled_part = magnitudes - np.abs(means)
    return np.maximum(_CONSTANT_TOLERANCE * np.maximum(1.0, cancelled_part), _SUM_TOLERANCE * magnitudes)


def _compare(
    values: NDArray[np.float64],
    settings: AdvantageSettings,
    spreads: Mapping[str, _Spread],
    role_means: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return [n, K] advantages of a group's values, whose `role_means` are [n, 1]; those past an end are not used."""
    advantages = values
    if settings.baseline == "leave_one_out":
        # Alone, nothing varies and nothing is used.
        other_means = (values.sum(axis=0) - values) / max(len(values) - 1, 1)
        advantages = np.where(spreads["group"].varies, values - other_means, 0.0)
    elif settings.baseline == "role":
        advantages = values - role_means
    elif settings.baseline != "none":
        spread = spreads[settings.baseline]
        advantages = np.where(spread.varies, values - spread.mean, 0.0)
    if settings.scale == "none":
        return advantages
    if settings.scale == "mean":  # above 0 where anything varies
        return advantages / np.where(spreads["group"].varies, spreads["group"].mean, 1.0)
    std = spreads[settings.scale].std  # no epsilon is added: what does not vary is set to zero instead
    return advantages / std if std > 0 else np.zeros_like(advantages)


def _require_binary(returns: Sequence[Returns]) -> None:
    for r in returns:
        # A mean near 0 of other returns, or a negative one, would explode the advantages or turn them round.
        if min(abs(r.episode_return), abs(r.episode_return - 1)) > _CONSTANT_TOLERANCE:
            raise RecordError(
                f'advantages.scale: "mean" (MaxRL) divides by a success rate: expected returns of 0 or 1, got '
                f'{r.episode_return:g}; set it to "group"'
            )


def _table(returns: Sequence[Returns], level: str) -> NDArray[np.float64]:
    """Return [N, K] values to compare: returns (K = 1), or returns-to-go with 0 after an episode's last turn."""
    if level == "trajectory":
        return np.array([[r.episode_return] for r in returns])
    # An episode that has ended stays in the table: comparing only those that still play would punish playing on.
    table = np.zeros((len(returns), max(len(r.to_go) for r in returns)))
    for row, r in zip(table, returns, strict=True):
        row[: len(r.to_go)] = r.to_go
    return table


def _magnitudes(returns: Sequence[Returns], level: str) -> NDArray[np.float64]:
    """Return [N, K] sums of the sizes of the rewards behind each entry of `_table`."""
    if level == "trajectory":
        return np.array([[r.reward_magnitude] for r in returns])
    # The rewards are taken to be the differences of the returns-to-go, which they are without a discount.
    steps = np.abs(np.diff(_table(returns, level), axis=1, append=0.0))
    return np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]


def _update_running(running: RunningReturns, returns: Sequence[Returns], settings: AdvantageSettings) -> RunningReturns:
    values = [np.array([r.episode_return]) if settings.level == "trajectory" else r.to_go for r in returns]
    running = running.updated(np.concatenate(values), magnitude=max(r.reward_magnitude for r in returns))
    if settings.baseline != "role":
        return running
    means = dict(running.role_means)
    for r, own in zip(returns, values, strict=True):
        means[r.role] = _ROLE_DECAY * means.get(r.role, 0.0) + (1 - _ROLE_DECAY) * float(own.mean())
    return replace(running, role_means=means)


def _per_turn(row: NDArray[np.float64], num_turns: int) -> Float32Array:
    return (np.repeat(row, num_turns) if len(row) == 1 else row[:num_turns]).astype(np.float32)
