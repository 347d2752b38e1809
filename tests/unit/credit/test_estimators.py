"""Estimators of advantages, by arithmetic; those of the trainer are its own functions and tested there."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_gym.credit.estimators import ESTIMATORS, alive, estimators_for, gigpo, of_scores, state, state_or_turn
from gspo_gym.credit.forks import _NO_TOKENS, Episode, ForkedGroup
from gspo_gym.types import FinishReason, Outcome, Task, Trajectory, Turn

TASK = Task("test/Env-v0", 0)
THIRD = 1 / 3


def group(*episodes, values=()) -> ForkedGroup:
    """Each episode is (states, one letter a turn; rewards), with an event in each turn that earns above 1."""
    made = []
    for states, rewards in episodes:
        turns = tuple(
            Turn(k, 0, (0, 0), (0, 1), FinishReason.STOP, reward=r, events=("much",) if r > 1 else ())
            for k, r in enumerate(rewards)
        )
        trajectory = Trajectory("t", 0, TASK, 0, (_NO_TOKENS,), turns, (), Outcome.TERMINATED)
        made.append(Episode(trajectory, tuple(states), ()))
    return ForkedGroup(tuple(made), values)


def lists(arrays):
    return [pytest.approx(array.tolist()) for array in arrays]


# Returns-to-go at discount 0.5: (0.5, 1), (0.5, 1, 2), (1); returns 1, 2, 1, whose mean is 4/3. Three episodes pass the
# state s, whose mean over turns is (0.5 + 0.5 + 2 + 1) / 4 = 1.
LOOP = group(("sa", (0, 1)), ("sbs", (0, 0, 2)), ("s", (1,)))


def test_gigpo_adds_the_advantage_of_the_episode_to_that_of_the_state():
    # -1/3, 2/3, -1/3 of the episodes, and -0.5, 0 | -0.5, 0, 1 | 0 of the states
    assert gigpo(LOOP, 0.5) == lists(
        map(np.array, ([-THIRD - 0.5, -THIRD], [2 * THIRD - 0.5, 2 * THIRD, 2 * THIRD + 1], [-THIRD]))
    )


def test_a_state_is_compared_with_other_episodes_only():
    # 0.5 - (0.5 + 2 + 1) / 3; 0.5 and 2 less (0.5 + 1) / 2; 1 - (0.5 + 0.5 + 2) / 3; a and b are in one episode each
    assert state(LOOP, 0.5) == lists(map(np.array, ([-2 * THIRD, 0], [-0.25, 0, 1.25], [0])))


def test_where_no_other_episode_was_the_turn_is_compared():
    # turn 1: 1 and 1, and the episode that has ended counts 0: 1 - (1 + 0) / 2, for a and for b
    assert state_or_turn(LOOP, 0.5) == lists(map(np.array, ([-2 * THIRD, 0.5], [-0.25, 0.5, 1.25], [0])))


def test_those_alive_are_compared_with_each_other():
    # turn 0: 0.5, 0.5, 1; turn 1: 1 and 1; turn 2 has one episode, from which nothing is subtracted
    assert alive(LOOP, 0.5) == lists(map(np.array, ([-0.25, 0], [-0.25, 0, 2], [0.5])))


def test_a_judges_scores_of_turns_stand_in_the_place_of_rewards():
    # To go: (1, 0), (1, 1, 1), (1). Turn 0 is alike; turn 1: 0 - (1 + 0) / 2 and 1 - (0 + 0) / 2; turn 2: 1 - 0.
    assert of_scores([LOOP], [[1, 0], [0, 0, 1], [1]], 1.0) == lists(map(np.array, ([0, -0.5], [0, 1, 1], [0])))
    assert [episode.rewards for episode in LOOP.episodes] == [(0, 1), (0, 0, 2), (1,)]


def test_the_trainers_own_are_what_it_computes():
    # of two episodes: returns 1 and 3; to go (1, 1) and (3)
    two = [group(("sa", (0, 1)), ("s", (3,)))]
    expected = {
        "return": [[1, 1], [3]],
        "return to go": [[1, 1], [3]],
        "trajectory, leave one out": [[-2, -2], [2]],
        "turn, leave one out": [[-2, 1], [2]],
        "events, turn": [[-1, 0], [1]],  # a new event counts 1
    }
    for name, values in expected.items():
        assert ESTIMATORS[name](two, 1.0) == lists(map(np.array, values)), name
    # At discount 0.5 the first turn is worth 0 + 0.5 to go; whole episodes are not discounted.
    expected |= {"return to go": [[0.5, 1], [3]], "turn, leave one out": [[-2.5, 1], [2.5]]}
    for name, values in expected.items():
        assert ESTIMATORS[name](two, 0.5) == lists(map(np.array, values)), name


def test_a_tree_takes_the_mean_of_its_own_continuations():
    # value before 0.5 or (0.5 + 0.5 + 0 + 1) / 4 = 0.5, between 1 or 0.25; rewards 0 and 1
    values = (np.array([[0.5, 0.5, 0, 1, 9], [1.0, 0, 0, 0, 9], [0, 0, 0, 0, 0]]),)
    one = [group(("sa", (0, 1)), values=values)]
    assert ESTIMATORS["tree, 1 continuation"](one, 1.0) == lists(map(np.array, ([0.5, 0.0],)))
    assert ESTIMATORS["tree, 4 continuations"](one, 1.0) == lists(map(np.array, ([-0.25, 0.75],)))
    assert ESTIMATORS["tree, 4 continuations"](one, 0.5) == lists(map(np.array, ([-0.375, 0.75],)))


def test_events_are_scored_where_there_are_any():
    assert set(estimators_for([LOOP])) == set(ESTIMATORS)
    assert set(ESTIMATORS) - set(estimators_for([group(("s", (1,)))])) == {"events, turn"}
