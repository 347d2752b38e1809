"""Advantages of forked episodes: by hand, without forks, and against a chain whose gradient is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gspo_gym.learning.advantages import batch_advantages
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.credit import Returns, returns_of
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.learning.trees import tree_advantages
from gspo_gym.rollout.forks import Replay, draw_replays
from gspo_gym.types import FinishReason, ForkPoint, Outcome, Segment, Task, Trajectory, TrajectoryGroup, Turn

SETTINGS = AdvantageSettings(level="trajectory", baseline="leave_one_out", scale="none")
TASK = Task("test/Chain-v0", 1)


def episode(name: str, episode_return: float, num_turns: int, fork: tuple[str, int] | None = None) -> Trajectory:
    """An episode of so many turns, of one token each, that earns at its end."""
    num_tokens = 2 * num_turns
    is_sampled = np.arange(num_tokens) % 2 == 1
    segment = Segment(
        token_ids=np.arange(num_tokens),
        action_mask=is_sampled,
        rollout_logprobs=np.where(is_sampled, -1.0, 0.0),
        turn_index=np.where(is_sampled, np.arange(num_tokens) // 2, -1),
        weight_version=np.where(is_sampled, 0, -1),
    )
    turns = tuple(
        Turn(
            k, 0, (2 * k, 2 * k + 1), (2 * k + 1, 2 * k + 2), FinishReason.STOP,
            reward=episode_return if k == num_turns - 1 else 0.0,
        )
        for k in range(num_turns)
    )  # fmt: skip
    point = None if fork is None else ForkPoint(*fork)
    return Trajectory(name, 0, TASK, 0, (segment,), turns, (), Outcome.TERMINATED, forked_from=point)


def advantages_of(*groups: Sequence[Trajectory]) -> list[list[float]]:
    returns = [[returns_of(e) for e in group] for group in groups]
    constant = [len({r.episode_return for r in own}) == 1 for own in returns]
    return [values.tolist() for values in tree_advantages(groups, returns, constant)]


def test_a_tree_of_three_leaves_has_the_advantages_of_its_siblings() -> None:
    """root -> {x: leaves 1, 0; y: leaf 1}: V(x) = 1/2, V(y) = 1."""
    tree = [episode("a", 1.0, 2), episode("b", 0.0, 2, ("a", 1)), episode("c", 1.0, 2, ("a", 0))]
    assert advantages_of(tree) == [[-0.5, 1.0], [-0.5, -1.0], [0.5, 0.0]]
    # a fork of a fork, before the turn at which that one left: it shares the first origin's turn
    assert advantages_of([*tree[:2], episode("c", 1.0, 2, ("b", 0))]) == [[-0.5, 1.0], [-0.5, -1.0], [0.5, 0.0]]


def test_turns_without_siblings_are_compared_with_the_other_trees_and_a_tree_weighs_as_one_episode() -> None:
    """Trees of 2 leaves, worth 1/2, and of 1, worth 3; 3 leaves of 2 trees, so that weights are 3/4, 3/4 and 3/2."""
    group = [episode("a", 1.0, 3), episode("d", 3.0, 1), episode("b", 0.0, 2, ("a", 1))]
    shared, alone = 0.75 * (0.5 - 3), 1.5 * (3 - 0.5)
    assert advantages_of(group) == [[shared, 0.75 * (1 - 0), 0.75 * (1 - 3)], [alone], [shared, 0.75 * (0 - 1)]]
    # With another group of two whole episodes: 5 leaves of 4 trees.
    both = advantages_of(group, [episode("e", 2.0, 1), episode("f", 0.0, 1)])
    assert both[3:] == [[1.25 * 2], [1.25 * -2]]
    assert both[1] == [1.25 * 2.5]
    assert both[2] == [1.25 / 2 * -2.5, 1.25 / 2 * -1]


def test_forks_share_their_first_turns_also_where_their_origin_was_left_out() -> None:
    group = [episode("b", 0.0, 2, ("a", 1)), episode("c", 1.0, 3, ("a", 1)), episode("d", 0.25, 1)]
    (first, *rest), second, _ = advantages_of(group)
    assert first == second[0] == 0.75 * (0.5 - 0.25)
    assert (rest, second[1]) == ([-0.75], 0.75)


def test_a_constant_group_has_no_advantage_and_still_counts_in_the_weights() -> None:
    same = [episode("a", 1.0, 2), episode("b", 1.0, 2, ("a", 1)), episode("c", 1.0, 1)]
    assert advantages_of(same, [episode("d", 1.0, 1), episode("e", 0.0, 1)]) == [[0, 0], [0, 0], [0], [1.25], [-1.25]]


def test_without_forks_it_is_the_leave_one_out_advantage() -> None:
    draws = np.random.default_rng(3)
    groups = [[episode(f"{g}/{i}", float(draws.normal()), 1 + i) for i in range(4)] for g in range(3)]
    returns = [[returns_of(e) for e in group] for group in groups]
    plain = batch_advantages(returns, SETTINGS).values
    for ours, theirs in zip(tree_advantages(groups, returns, [False] * 3), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_batch_has_the_advantages_of_its_trees() -> None:
    tree = (episode("a", 1.0, 2), episode("b", 0.0, 2, ("a", 1)), episode("c", 1.0, 2, ("a", 0)))
    built = build_batch([TrajectoryGroup(TASK, tree, 3)], SETTINGS)
    assert built.batch is not None
    assert built.batch.advantages[built.batch.action_mask].tolist() == [-0.5, 1.0, -0.5, -1.0, 0.5, 0.0]
    assert built.mean_return == 1.0, "of a alone: how often an episode is forked follows from its length"


# A chain of three states: "go" (1) leads to the next one and out of the last earns 1, "stop" (0) earns 0.2 and ends.
# Under even odds V is 0.3, 0.4 and 0.6. The gradient by the logit of going in state s is
# P(reach s) p (1 - p) (Q(go) - Q(stop)): 1/4 (0.4 - 0.2) = 1/2 1/4 (0.6 - 0.2) = 1/4 1/4 (1 - 0.2) = 0.05.
def chain(draws: np.random.Generator, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
    actions = prefix
    while len(actions) < 3 and all(actions):
        actions += (int(draws.random() < 0.5),)
    return actions


def from_its_own_turns(episodes: Sequence[Trajectory], *, seed: int) -> list[Replay | None]:
    """The draw that seems natural, and prefers continuations that end soon."""
    draws = np.random.default_rng(seed)
    return [Replay(e, int(draws.integers(1, len(e.turns)))) if len(e.turns) > 1 else None for e in episodes]


def gradients(draw: Callable[..., list[Replay | None]], num_groups: int, num_forks: int) -> np.ndarray:
    """[num_groups, 3] estimates of the gradient, each from a group of four episodes and their forks."""
    draws, estimates = np.random.default_rng(11), np.zeros((num_groups, 3))
    blank = {n: episode("", 0.0, n) for n in (1, 2, 3)}
    for g in range(num_groups):
        actions = {str(i): chain(draws) for i in range(4)}
        for i, replay in enumerate(draw([blank[len(actions[str(i)])] for i in range(4)], seed=g)):
            for copy in range(num_forks if replay is not None else 0):
                assert replay is not None
                actions[f"{i}/{replay.num_turns}/{copy}"] = chain(draws, actions[str(i)][: replay.num_turns])
        group = [_named(blank, name, own) for name, own in actions.items()]
        returns = [
            Returns(r, np.full(len(own), r), r) for own in actions.values() for r in (1.0 if sum(own) == 3 else 0.2,)
        ]
        (values,) = [tree_advantages([group], [returns], [len({r.episode_return for r in returns}) == 1])]
        for own, advantages in zip(actions.values(), values, strict=True):
            estimates[g, : len(own)] += advantages * (np.array(own) - 0.5) / len(group)
    return estimates


def _named(blank: dict[int, Trajectory], name: str, actions: tuple[int, ...]) -> Trajectory:
    origin, _, place = name.partition("/")
    point = ForkPoint(origin, int(place.partition("/")[0])) if place else None
    return dataclasses.replace(blank[len(actions)], trajectory_id=name, forked_from=point)


def errors_of(estimates: np.ndarray, exact: Sequence[float] = (0.05, 0.05, 0.05)) -> np.ndarray:
    """How many standard errors each mean is from what is expected."""
    return (estimates.mean(0) - exact) / (estimates.std(0, ddof=1) / len(estimates) ** 0.5)


def test_forks_estimate_the_gradient_of_a_chain_without_bias() -> None:
    estimates = gradients(draw_replays, num_groups=1500, num_forks=2)
    assert np.abs(errors_of(estimates)).max() < 4
    assert estimates.std(0).max() / 1500**0.5 < 0.005  # a tenth of what is estimated


@pytest.mark.slow
def test_turns_drawn_from_the_episode_itself_would_bias_it() -> None:
    """By 10 to 17 percent. An episode of two turns is always forked before its second, one of three half of the time.

    With two forks, V(tree) after "go" is 1/2 (0.2 + 2 0.4) / 3 + 1/4 (0.6 + 2 0.4) / 3 + 1/4 0.6 = 13/30, and not 0.4;
    over all trees it is 19/60. State 0: 1/4 (13/30 - 0.2). State 1: 1/2 (3/4 0.1 + 1/4 1/2 (0.6 - 19/60)). State 2 has
    7/24 of all weights, and not 1/4: 7/24 0.2.
    """
    estimates = gradients(from_its_own_turns, num_groups=20_000, num_forks=2)
    assert np.abs(errors_of(estimates)).max() > 4
    assert np.abs(errors_of(estimates, (7 / 120, 53 / 960, 7 / 120))).max() < 4
