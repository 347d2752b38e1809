"""Estimators of the advantages of turns, by name: those of this package as it computes them, and those of others.

Notation as in `gspo_gym/learning/advantages.py`: R_i the return of episode i, G_ik its return-to-go from turn k. No
estimator is scaled: a scale is a learning rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gspo_gym.credit.forks import NUM_TREE, Episode, Floats, ForkedGroup
from gspo_gym.learning.advantages import batch_advantages
from gspo_gym.learning.credit import Returns, returns_of
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.learning.step_rewards import StepRewardSettings

Estimator = Callable[[Sequence[ForkedGroup], float], list[Floats]]
"""(groups, discount) -> the estimates of each episode's turns, group after group."""

_EVENTS = StepRewardSettings(mode="decision_stepwise")


def returns_in(group: ForkedGroup, discount: float, step_rewards: StepRewardSettings | None = None) -> list[Returns]:
    """Return the returns of a group's episodes."""
    return [returns_of(e.trajectory, discount=discount, step_rewards=step_rewards) for e in group.episodes]


def _by_the_trainer(level: str, baseline: str, step_rewards: StepRewardSettings | None = None) -> Estimator:
    def estimate(groups: Sequence[ForkedGroup], discount: float) -> list[Floats]:
        own_discount = discount if level == "turn" else 1.0  # others are of undiscounted returns
        settings = AdvantageSettings.model_validate(
            {"level": level, "baseline": baseline, "scale": "none", "discount": own_discount}
        )
        returns = [returns_in(group, own_discount, step_rewards) for group in groups]
        return [values.astype(np.float64) for values in batch_advantages(returns, settings).values]

    return estimate


def _by_group(estimate_group: Callable[[ForkedGroup, float], list[Floats]]) -> Estimator:
    return lambda groups, discount: [values for group in groups for values in estimate_group(group, discount)]


def alive(group: ForkedGroup, discount: float) -> list[Floats]:
    """Return G_ik less the mean over the siblings that have a turn k; less 0 where none has."""
    to_go = [r.to_go for r in returns_in(group, discount)]

    def baseline(i: int, k: int) -> float:
        others = [g[k] for j, g in enumerate(to_go) if j != i and len(g) > k]
        return float(np.mean(others)) if others else 0.0

    return [np.array([g[k] - baseline(i, k) for k in range(len(g))]) for i, g in enumerate(to_go)]


def gigpo(group: ForkedGroup, discount: float) -> list[Floats]:
    """Return GiGPO's sum of two advantages, its factor F and its weight 1 (arXiv 2505.10978).

    That of the episode, R_i less the mean of the group, and that of the step, G_ik less the mean over all turns of the
    group that started from the same state, its own included.
    """
    returns = returns_in(group, discount)
    mean = np.mean([r.episode_return for r in returns])
    classes = _turns_by_state(group)
    values = [np.full(len(r.to_go), r.episode_return - mean) for r in returns]
    for members in classes.values():
        class_mean = np.mean([returns[i].to_go[k] for i, k in members])
        for i, k in members:
            values[i][k] += returns[i].to_go[k] - class_mean
    return values


def state(group: ForkedGroup, discount: float) -> list[Floats]:
    """Return G_ik less the mean over the turns of *other* episodes that started from the same state; 0 without any.

    Ours, because a mean that includes turns of episode i depends on its action: GiGPO's published one shrinks most
    where an episode comes back to a state, that is in loops.
    """
    return [np.nan_to_num(values, nan=0.0) for values in _against_state(group, discount)]


def state_or_turn(group: ForkedGroup, discount: float) -> list[Floats]:
    """Return `state`, and where no other episode was in that state, the turn's leave-one-out advantage."""
    by_turn = _by_the_trainer("turn", "leave_one_out")([group], discount)
    by_state = _against_state(group, discount)
    return [np.where(np.isnan(own), turns, own) for own, turns in zip(by_state, by_turn, strict=True)]


def _against_state(group: ForkedGroup, discount: float) -> list[Floats]:  # NaN where there is no other episode
    to_go = [r.to_go for r in returns_in(group, discount)]
    values = [np.full(len(g), np.nan) for g in to_go]
    for members in _turns_by_state(group).values():
        for i, k in members:
            others = [to_go[j][t] for j, t in members if j != i]
            if others:
                values[i][k] = to_go[i][k] - np.mean(others)
    return values


def _turns_by_state(group: ForkedGroup) -> Mapping[str, list[tuple[int, int]]]:
    classes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, episode in enumerate(group.episodes):
        for k, text in enumerate(episode.states):
            classes[text].append((i, k))
    return classes


def of_scores(groups: Sequence[ForkedGroup], scores: Sequence[Sequence[float]], discount: float) -> list[Floats]:
    """Return the turns' leave-one-out advantages with scores in the place of rewards.

    `scores` are of the turns of each episode, group after group: a judge's totals of events.
    """
    rest = iter(scores)
    scored = [
        replace(group, episodes=tuple(_with_rewards(episode, next(rest)) for episode in group.episodes))
        for group in groups
    ]
    return _by_the_trainer("turn", "leave_one_out")(scored, discount)


def _with_rewards(episode: Episode, rewards: Sequence[float]) -> Episode:
    pairs = zip(episode.trajectory.turns, rewards, strict=True)
    turns = tuple(replace(turn, reward=reward, reward_terms={}) for turn, reward in pairs)
    return replace(episode, trajectory=replace(episode.trajectory, turns=turns))


def _tree(num_continuations: int) -> Estimator:
    """Return an estimator by continuations of its own before and after each turn (Tree-GRPO, arXiv 2509.21240)."""

    def estimate(group: ForkedGroup, discount: float) -> list[Floats]:
        means = [values[:, :num_continuations].mean(axis=1) for values in group.values]
        return [np.array(e.rewards) + discount * m[1:] - m[:-1] for e, m in zip(group.episodes, means, strict=True)]

    return _by_group(estimate)


ESTIMATORS: Mapping[str, Estimator] = {
    "return": _by_the_trainer("trajectory", "none"),
    "return to go": _by_the_trainer("turn", "none"),
    "trajectory, leave one out": _by_the_trainer("trajectory", "leave_one_out"),
    "turn, leave one out": _by_the_trainer("turn", "leave_one_out"),
    "auto, leave one out": _by_the_trainer("auto", "leave_one_out"),
    "turn, those alive": _by_group(alive),
    "GiGPO as published": _by_group(gigpo),
    "state, leave one episode out": _by_group(state),
    "the same, else the turn's": _by_group(state_or_turn),
    "events, turn": _by_the_trainer("turn", "leave_one_out", _EVENTS),
    "tree, 1 continuation": _tree(1),
    f"tree, {NUM_TREE} continuations": _tree(NUM_TREE),
}


def estimators_for(groups: Sequence[ForkedGroup]) -> Mapping[str, Estimator]:
    """Return the estimators that can be used: those of events only where an episode has any."""
    has_events = any(turn.events for group in groups for e in group.episodes for turn in e.trajectory.turns)
    return {name: estimate for name, estimate in ESTIMATORS.items() if has_events or name != "events, turn"}
