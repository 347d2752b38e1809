"""Per-turn rewards of an episode -> its return and its returns-to-go.

In this order: what each turn earns (`turn_rewards`), the penalty of an overlong episode, the sums, the clip. Not for
groups (that is `advantages`) or tokens (`batching`).

Turn rewards are the step rewards of the hosted trainer. There, a decision is one call of the model with what it sets
off, and an achievement is unlocked where it became true in that decision; here, a decision is a turn, and `Turn.events`
names what the turn reached. Left out: the hosted application's per_achievement also rewards changes of an inventory, by
fixed tables of one game; our turns carry no such counts (an environment that wants them rewards them itself).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.settings import RewardSettings
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.types import FinishReason, Outcome, Trajectory, TrajectoryGroup, Turn

_MAX_MAGNITUDE = 1e37  # float32, which advantages are, ends at 3.4e38


@dataclass(frozen=True, slots=True, eq=False)
class Returns:
    """Returns of an episode.

    Attributes:
        episode_return: undiscounted sum of the turns' rewards, clipped. With the default settings, the same number as
            `Trajectory.reward`.
        to_go: [num_turns] float64, from each turn on: to_go[k] = reward[k] + discount * to_go[k + 1], then clipped.
        reward_magnitude: sum of the rewards' absolute values, the scale at which rounding in the sum happens.
        role: what the baseline "role" keeps a mean of: the environment's id.
    """

    episode_return: float
    to_go: NDArray[np.float64]
    reward_magnitude: float
    role: str = ""


def returns_of(
    trajectory: Trajectory,
    *,
    discount: float = 1.0,
    rewards: RewardSettings | None = None,
    step_rewards: StepRewardSettings | None = None,
) -> Returns:
    """Return the returns of one scored episode; None for settings: their defaults.

    `discount` is per turn and touches the returns-to-go only. Nothing is bootstrapped where an episode was cut off: a
    truncated episode is worth what it had earned, less the penalty where `rewards.overlong` is a number.

    Raises:
        UnscoredError: no turn carries a reward, or the episode failed before it could be scored.
        RecordError: turns are not numbered 0, 1, 2, ..., or advantages, in float32, could overflow.
        ConfigError: discount outside (0, 1].
    """
    if not 0 < discount <= 1:
        raise ConfigError(f"discount: expected 0 < discount <= 1, got {discount}")
    indices = [turn.index for turn in trajectory.turns]
    if indices != list(range(len(indices))):
        raise RecordError(f"trajectory {trajectory.trajectory_id}: expected turns 0, 1, 2, ..., got {indices}")
    rewards = rewards or RewardSettings()
    rewards_by_turn = list(turn_rewards(trajectory, step_rewards or StepRewardSettings()))
    if not isinstance(rewards.overlong, str) and is_overlong(trajectory):
        rewards_by_turn[-1] -= rewards.overlong
    episode_return = sum(rewards_by_turn)
    to_go = np.zeros(len(rewards_by_turn), dtype=np.float64)
    following = 0.0
    for k in reversed(range(len(rewards_by_turn))):
        following = rewards_by_turn[k] + discount * following
        to_go[k] = following
    reward_magnitude = float(sum(abs(reward) for reward in rewards_by_turn))
    if not reward_magnitude <= _MAX_MAGNITUDE:
        raise RecordError(
            f"trajectory {trajectory.trajectory_id}: expected rewards whose sizes sum to at most {_MAX_MAGNITUDE:g}, "
            f"got {reward_magnitude:g}; scale them"
        )
    # Sums are cut and not single rewards: what the levels compare. A discounted sum is cut after it was discounted.
    if rewards.clip is not None:
        episode_return = max(-rewards.clip, min(rewards.clip, episode_return))
        to_go = to_go.clip(-rewards.clip, rewards.clip)
    return Returns(float(episode_return), to_go, reward_magnitude, trajectory.task.env_id)


def is_overlong(trajectory: Trajectory) -> bool:
    """Return whether one of our limits cut the episode off: turns, context, or the output tokens of its last turn."""
    # Where the environment truncates an episode, that is part of the task.
    if trajectory.outcome in (Outcome.MAX_TURNS, Outcome.CONTEXT_OVERFLOW):
        return True
    return bool(trajectory.turns) and trajectory.turns[-1].finish_reason is FinishReason.LENGTH


def played(group: TrajectoryGroup) -> list[Trajectory]:
    """Return the trajectories of a group in which the policy took a turn; in the others it did nothing."""
    # Also those of which no token is trained on, such as some that a task app played: leaving them out would move the
    # mean with which the others are compared.
    return [trajectory for trajectory in group.trajectories if trajectory.turns]


def turn_rewards(trajectory: Trajectory, settings: StepRewardSettings) -> tuple[float, ...]:
    """Return one reward per turn of a scored episode: the environment's, one at the end, or one for what was achieved.

    Mode "off": all of the episode's reward on its last turn. Mode "env_sparse": what the environment gave; a turn that
    it did not score adds 0. Mode "decision_stepwise", in place of the environment's rewards, for turn t of T:

        reward = base + beta * (T - t) * [a name of this turn is new in the episode]

    the same achievement is worth more the earlier it comes. `base` is, by strategy:

    - None (the hosted trainer's own composition): how many names of the turn are new (kind "unique") or how many it has
      (kind "absolute"), plus indicator_lambda if one is new;
    - "consistent": indicator_lambda, once, if a name is new (kind "unique") or if there is one at all (kind "absolute",
      which is the hosted application's reading; where nothing is unlocked twice the two agree);
    - "per_achievement": indicator_lambda times the sum of the names' weights (1 if none is given), each name credited
      at most k_limits times an episode (1 if none is given, without limit if <= 0).

    In the two strategies, which are the hosted application's, an indicator_lambda of 0 counts as 1. A lambda thus adds
    in the first case and multiplies in the others, as it does there.

    Raises:
        UnscoredError: the episode failed or has no turn, or (unless its rewards are replaced) nothing scored it.
    """
    is_played = bool(trajectory.turns) and not trajectory.outcome.is_infrastructure_failure
    is_decisions = settings.mode == "decision_stepwise"
    if is_decisions and is_played and trajectory.reports_events:
        rewards = _decision_rewards(trajectory.turns, settings)
        if trajectory.outcome is Outcome.ACTION_LIMIT:  # what was credited is taken back: it pays no more than nothing
            rewards = (*rewards[:-1], min(0.0, trajectory.reward) - math.fsum(rewards[:-1]))
        return rewards
    # An app that does not say what its decisions achieved is not known to have achieved nothing: its return counts.
    episode_return = trajectory.reward  # raises UnscoredError
    if settings.mode == "off" or is_decisions:
        return (*[0.0] * (len(trajectory.turns) - 1), episode_return)
    return tuple(0.0 if turn.reward is None else turn.reward for turn in trajectory.turns)


def _decision_rewards(turns: Collection[Turn], settings: StepRewardSettings) -> tuple[float, ...]:
    seen_names: set[str] = set()
    num_credited: Counter[str] = Counter()
    rewards = []
    for t, turn in enumerate(turns):
        names = list(dict.fromkeys(turn.events))  # a name counts once per turn, however often the turn lists it
        new = [name for name in names if name not in seen_names]
        seen_names.update(new)
        counted_names = new if settings.kind == "unique" else names
        if settings.strategy == "per_achievement":
            base = _multiplier(settings) * _credit(names, num_credited, settings)
        elif settings.strategy == "consistent":
            base = _multiplier(settings) if counted_names else 0.0
        else:
            base = len(counted_names) + (settings.indicator_lambda if new else 0.0)
        # The hosted application only records beta, its trainer applies it; here it is applied with every strategy.
        rewards.append(base + (settings.beta * (len(turns) - t) if new else 0.0))
    return tuple(rewards)


def _multiplier(settings: StepRewardSettings) -> float:
    return settings.indicator_lambda if settings.indicator_lambda > 0 else 1.0


def _credit(names: list[str], num_credited: Counter[str], settings: StepRewardSettings) -> float:
    """Return the weights of the names that are still below their limit, and count them in `num_credited`."""
    total = 0.0
    for name in names:
        limit = settings.k_limits.get(name, 1)
        if limit <= 0 or num_credited[name] < limit:
            num_credited[name] += 1
            total += settings.weights.get(name, 1.0)
    return total
