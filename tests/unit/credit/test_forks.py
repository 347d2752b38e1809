"""Forked episodes: a chain of three states with values in closed form, and environments that cannot be forked.

In the chain, "go" leads to the next state and out of the last one earns 1; "stop" earns 0.2 and ends. Under a policy
that goes with probability 1/2, V(2) = (1 + 0.2) / 2 = 0.6, V(1) = (0.6 + 0.2) / 2 = 0.4, V(0) = (0.4 + 0.2) / 2 = 0.3.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest

from gspo_gym.credit.bench import report_of
from gspo_gym.credit.forks import ForkedGroup, ScriptedPlayer, fork_group, truth_of
from gspo_gym.env.core import TextEnv
from gspo_gym.env.session import EnvSession
from gspo_gym.env.workers.threads import CallersThread
from gspo_gym.errors import ConfigError, ContractError, RolloutError
from gspo_gym.types import Outcome

VALUES = {"0": 0.3, "1": 0.4, "2": 0.6}
NEXT_VALUES = {"0": 0.4, "1": 0.6, "2": 1.0}  # with the reward of going


class Chain(TextEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 0
        return "0", {}

    def step(self, action):
        if action == "stop":
            return "", 0.2, True, False, {}
        self.state += 1
        return (str(self.state), 0.0, False, False, {}) if self.state < 3 else ("", 1.0, True, False, {})


def even(env, rng):
    return lambda messages: str(rng.choice(["go", "stop"]))


def played(env, policy, seeds, *, group_size=8, num_continuations=32, discount=1.0) -> list[ForkedGroup]:
    async def play():
        session = EnvSession(env, env_id="test/Env-v0", thread=CallersThread())
        player = ScriptedPlayer(session, policy, max_turns=5)
        try:
            return [
                await fork_group(
                    player, s, group_size=group_size, num_continuations=num_continuations, discount=discount
                )
                for s in seeds
            ]
        finally:
            await session.close()

    return asyncio.run(play())


@pytest.fixture(scope="module")
def groups() -> list[ForkedGroup]:
    return played(Chain(), even, range(20))


def first_truths(group: ForkedGroup):
    """(state, action, advantage, variance) of each, once a group: equal prefixes share their continuations."""
    known = {}
    for episode, (advantages, variances) in zip(group.episodes, truth_of(group, 1.0), strict=True):
        for state, action, a, v in zip(episode.states, episode.actions, advantages, variances, strict=True):
            known[state, action.content] = (a, v)
    return known


def test_the_advantages_of_a_chain_are_those_of_its_closed_form(groups):
    by_turn: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for group in groups:
        for key, truth in first_truths(group).items():
            by_turn.setdefault(key, []).append(truth)
    assert set(by_turn) == set(itertools.product("012", ("go", "stop")))
    for (state, action), truths in by_turn.items():
        exact = (NEXT_VALUES[state] if action == "go" else 0.2) - VALUES[state]
        mean, error = np.mean([a for a, _ in truths]), np.sqrt(sum(v for _, v in truths)) / len(truths)
        assert abs(mean - exact) < 4 * error, (state, action)
        assert error < 0.04


def test_the_standard_errors_are_those_of_the_closed_form(groups):
    # of stopping in state 2 the value after is 0, so that only V(2) is estimated: from 1 and 0.2, each with
    # probability 1/2, whose variance is 0.16
    variances = [first_truths(group)["2", "stop"][1] for group in groups if ("2", "stop") in first_truths(group)]
    assert len(variances) >= 5
    assert np.mean(variances) == pytest.approx(0.16 / 32, rel=0.15)


def test_every_turn_is_continued_as_often_as_asked_and_the_end_is_worth_nothing(groups):
    for group in groups:
        for episode, values in zip(group.episodes, group.values, strict=True):
            assert values.shape == (len(episode.actions) + 1, 4 + 32)
            assert not values[-1].any()
            assert np.array_equal(values[0], group.values[0][0])  # the empty prefix, which all share


def test_a_discount_is_that_of_the_turns_between():
    # always going: 1 after two more turns from state 0, that is 0.5^2
    [group] = played(Chain(), lambda env, rng: lambda messages: "go", [0], num_continuations=2, discount=0.5)
    assert group.values[0][:, 0].tolist() == [0.25, 0.5, 1.0, 0.0]
    advantages, variances = truth_of(group, 0.5)[0]
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    assert variances.tolist() == [0.0, 0.0, 0.0]


def test_the_errors_of_later_values_are_discounted_twice():
    """Values 1 and 3 before a turn that earns 0.2, 0 and 4 after it: 0.2 + 0.5 x 2 - 2; 0.25 x 8 / 2 + 2 / 2."""
    [group] = played(Chain(), lambda env, rng: lambda messages: "stop", [0], group_size=2, num_continuations=2)
    tree = [9.0] * 4  # is no part of the truth
    made = dataclasses.replace(group, values=(np.array([[*tree, 1.0, 3.0], [*tree, 0.0, 4.0]]),) * 2)
    for advantages, variances in truth_of(made, 0.5):
        assert advantages.tolist() == pytest.approx([-0.8])
        assert variances.tolist() == [2.0]


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [((True, False), Outcome.TERMINATED), ((False, True), Outcome.TRUNCATED), ((False, False), Outcome.MAX_TURNS)],
)
def test_an_episode_ends_as_its_environment_or_the_limit_ended_it(ends, outcome):
    class Endless(Chain):
        def step(self, action):
            return "0", 0.0, *ends, {}

    for group in played(Endless(), even, [0], group_size=2, num_continuations=2):
        assert {episode.trajectory.outcome for episode in group.episodes} == {outcome}


def test_unbiased_estimators_of_the_chain_are_found_unbiased_and_more_continuations_are_nearer(groups):
    report = report_of(groups, 1.0)
    scores = {score.name: score for score in report.scores}
    assert "events, turn" not in scores  # the chain reports none
    for name in ("return", "return to go", "trajectory, leave one out", "turn, leave one out", "tree, 4 continuations"):
        assert not scores[name].is_biased, name
        assert scores[name].slope == pytest.approx(1, abs=0.35), name
    assert scores["tree, 4 continuations"].correlation > scores["tree, 1 continuation"].correlation
    assert all(score.correlation <= report.ceiling + 0.02 for score in report.scores)
    assert scores["return"].is_shifted  # nothing is subtracted from rewards of 0.2 and 1
    assert not scores["tree, 4 continuations"].is_shifted


class Forgetful(Chain):
    """Answers by how often it was asked in its life, and not by the seed."""

    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        answer, *rest = super().step(action)
        return (f"{answer} {self.num_steps}", *rest)


def test_a_replay_that_is_answered_otherwise_ends_with_the_place():
    with pytest.raises(ContractError, match=r"test/Env-v0, seed 3: a replay was answered otherwise before turn 1"):
        played(Forgetful(), lambda env, rng: lambda messages: "go", [3])


def test_a_policy_that_raises_is_named_with_its_turn():
    def broken(env, rng):
        raise ValueError("no idea")

    with pytest.raises(RolloutError, match="seed 0: turn 0: the player raised ValueError: no idea"):
        played(Chain(), broken, [0])


@pytest.mark.parametrize("size", [{"group_size": 1}, {"num_continuations": 1}])
def test_groups_and_truths_of_one_are_refused(size):
    with pytest.raises(ConfigError, match="at least 2 episodes a group and 2 continuations"):
        played(Chain(), even, [0], **size)
