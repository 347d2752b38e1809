"""Which number each turn of an episode earns: the environment's own, one at the end, or one for what was achieved.

These are the step rewards of the hosted trainer. There, a decision is one call of the model with what it sets off, and
an achievement is unlocked where it became true in that decision; here, a decision is a turn, and `Turn.events` names
what the turn reached. A name counts once per turn, however often the turn lists it, and nothing counts as seen before
the first turn. Left out: the hosted application's per_achievement also rewards changes of an inventory, by fixed tables
of one game; our turns carry no such counts, so an environment that wants them rewards them itself (mode "env_sparse").

Knows nothing of returns (that is `credit`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from gspo_gym.learning.settings import StepRewardSettings
from gspo_gym.types import Outcome, Trajectory, Turn


def step_rewards(trajectory: Trajectory, settings: StepRewardSettings) -> tuple[float, ...]:
    """One reward per turn of a scored episode.

    Mode "off": all of the episode's reward on its last turn. Mode "env_sparse": what the environment gave; a turn that
    it did not score adds 0. Mode "decision_stepwise", in place of the environment's rewards, for turn t of T:

        reward = base + beta * (T - t) * [a name of this turn is new in the episode]

    so that the same achievement is worth more the earlier it comes. `base` is, by strategy:

    - None (the hosted trainer's own composition): how many names of the turn are new (kind "unique") or how many it has
      (kind "absolute"), plus indicator_lambda if one is new;
    - "consistent": indicator_lambda, once, if a name is new (kind "unique") or if there is one at all (kind "absolute",
      which is the hosted application's reading; where nothing is unlocked twice the two agree);
    - "per_achievement": indicator_lambda times the sum of the names' weights (1 if none is given), each name credited
      at most k_limits times an episode (1 if none is given, without limit if <= 0).

    In the two strategies, which are the hosted application's, an indicator_lambda of 0 counts as 1. A lambda thus adds
    in the first case and multiplies in the others, as it does there. The hosted application only records beta, its
    trainer applies it; here it is applied with every strategy.

    An episode of a task app that does not say what its decisions achieved (`Trajectory.reports_events`) is worth its
    return in mode "decision_stepwise", too, on its last turn: it is not known to have achieved nothing.

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
    episode_return = trajectory.reward  # raises UnscoredError
    if settings.mode == "off" or is_decisions:
        return (*[0.0] * (len(trajectory.turns) - 1), episode_return)
    return tuple(0.0 if turn.reward is None else turn.reward for turn in trajectory.turns)


def _decision_rewards(turns: Collection[Turn], settings: StepRewardSettings) -> tuple[float, ...]:
    seen: set[str] = set()
    num_credited: Counter[str] = Counter()
    rewards = []
    for t, turn in enumerate(turns):
        names = list(dict.fromkeys(turn.events))
        new = [name for name in names if name not in seen]
        seen.update(new)
        if settings.strategy == "per_achievement":
            base = _multiplier(settings) * _credit(names, num_credited, settings)
        elif settings.strategy == "consistent":
            base = _multiplier(settings) if _counted(names, new, settings) else 0.0
        else:
            base = len(_counted(names, new, settings)) + (settings.indicator_lambda if new else 0.0)
        rewards.append(base + (settings.beta * (len(turns) - t) if new else 0.0))
    return tuple(rewards)


def _counted(names: list[str], new: list[str], settings: StepRewardSettings) -> list[str]:
    return new if settings.kind == "unique" else names


def _multiplier(settings: StepRewardSettings) -> float:
    return settings.indicator_lambda if settings.indicator_lambda > 0 else 1.0


def _credit(names: list[str], num_credited: Counter[str], settings: StepRewardSettings) -> float:
    """The weights of the names that are still below their limit; counts them in `num_credited`."""
    total = 0.0
    for name in names:
        limit = settings.k_limits.get(name, 1)
        if limit <= 0 or num_credited[name] < limit:
            num_credited[name] += 1
            total += settings.weights.get(name, 1.0)
    return total
