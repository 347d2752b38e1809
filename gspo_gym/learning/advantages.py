"""Returns of the episodes of a group -> one advantage per turn of each.

An advantage says how much better an episode (or what follows a turn) was than its siblings of the same task. Notation:
G episodes, R_i the return of episode i, G_ik its return-to-go from turn k, 0 after its last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_gym.learning.credit import Returns, returns_of
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.types import Float32Array, Trajectory

_CONSTANT_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class GroupAdvantages:
    """Advantages of a group's episodes.

    Attributes:
        values: one float32 array [num_turns] per trajectory, in the order given.
        is_constant: nobody did better than anybody else, so that every advantage is exactly 0 and the group teaches
            nothing.
    """

    values: tuple[Float32Array, ...]
    is_constant: bool


def group_advantages(trajectories: Sequence[Trajectory], settings: AdvantageSettings) -> GroupAdvantages:
    """Advantages of the episodes of one task, compared with each other.

    Level "trajectory" (arXiv 2507.18071, the equation of the group-based advantage): every turn of episode i gets
    (R_i - mean R) / std R, std with Bessel's correction; no epsilon is added, because constant groups are set to zero
    instead.

    Level "turn" (ours): turn k of episode i gets (G_ik - b_ik) / scale with the leave-one-out baseline
    b_ik = mean over the siblings j of G_jk, in which a sibling that had ended counts with the 0 that its future was
    worth. b_ik depends on nothing that episode i did, so the expected gradient is that of the returns-to-go alone;
    normalising a turn's immediate reward among those still playing would punish whoever plays on. The scale is the
    largest over turns of the Bessel std of G_.k: with one turn, or one reward at the end of episodes of equal length,
    the std of the returns; but where all earn nearly the same return by different ways, the returns' std is nearly 0
    while late turns differ, and dividing by it would explode. So |advantage| <= sqrt(G) always.

    A group of one has nothing to be compared with: its advantages are 0 at both levels. The same holds for a group (at
    level "turn", a turn) whose values differ by no more than rounding, see `_is_constant`.

    Raises:
        UnscoredError: an episode has no reward.
    """
    if not trajectories:
        return GroupAdvantages((), is_constant=True)
    returns = [returns_of(trajectory, discount=settings.discount) for trajectory in trajectories]
    if settings.level == "turn":
        per_turn = _turn_level(returns, settings.normalize_std)
    else:
        per_turn = _trajectory_level(returns, settings.normalize_std)
    values = tuple(row[: len(r.to_go)].astype(np.float32) for row, r in zip(per_turn, returns, strict=True))
    return GroupAdvantages(values, is_constant=not any(value.any() for value in values))


def _trajectory_level(returns: Sequence[Returns], normalize_std: bool) -> NDArray[np.float64]:
    """[G, max turns]: the episode's advantage, repeated for each turn."""
    R = np.array([r.episode_return for r in returns])
    num_turns = max(len(r.to_go) for r in returns)
    if _is_constant(R, returns):
        return np.zeros((len(R), num_turns))
    advantages = R - R.mean()
    if normalize_std:
        advantages = advantages / R.std(ddof=1)
    return np.repeat(advantages[:, None], num_turns, axis=1)


def _turn_level(returns: Sequence[Returns], normalize_std: bool) -> NDArray[np.float64]:
    """[G, max turns]: leave-one-out advantages of the returns-to-go; entries past an episode's end are not used."""
    G, num_turns = len(returns), max(len(r.to_go) for r in returns)
    to_go = np.zeros((G, num_turns))
    for row, r in zip(to_go, returns, strict=True):
        row[: len(r.to_go)] = r.to_go
    varies = np.array([not _is_constant(column, returns) for column in to_go.T])
    if not varies.any():
        return np.zeros_like(to_go)
    others = (to_go.sum(axis=0) - to_go) / (G - 1)
    advantages = np.where(varies, to_go - others, 0.0)
    if normalize_std:
        advantages = advantages / to_go[:, varies].std(axis=0, ddof=1).max()
    return advantages


def _is_constant(values: NDArray[np.float64], returns: Sequence[Returns]) -> bool:
    """Whether the values differ by no more than rounding, in which case dividing by their std would amplify noise.

    Two episodes that both earned "1", one of them as 1 + 1.2e-7 from float32 arithmetic upstream, must not get
    advantages of +-0.7. The tolerance is 1e-6 (eight float32 roundings) of the largest sum of |rewards| in the group,
    because that, not the return, is the scale at which sums of cancelling rewards round; and never below 1e-6, because
    a turn's own reward may already be the remainder of terms of order 1. Rewards that differ only below that are taken
    for equal.
    """
    if len(values) < 2:
        return True
    scale = max(1.0, max(r.reward_magnitude for r in returns))
    return bool(values.max() - values.min() <= _CONSTANT_TOLERANCE * scale)
