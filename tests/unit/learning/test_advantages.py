from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_gym.errors import RecordError, UnscoredError
from gspo_gym.learning.advantages import BatchAdvantages, batch_advantages
from gspo_gym.learning.credit import returns_of
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.types import FinishReason, Outcome, Task, Trajectory, Turn

TRAJECTORY = AdvantageSettings()
TURN = AdvantageSettings(level="turn")
TURN_UNSCALED = AdvantageSettings(level="turn", scale="none")
ROUNDING = 1e-6  # float32 results of order 1


def episode(rewards, outcome=Outcome.TERMINATED):
    """Turns only: advantages do not look at tokens (segments would only be in the way of hypothesis)."""
    turns = tuple(Turn(k, 0, (0, 0), (0, 1), FinishReason.STOP, reward=reward) for k, reward in enumerate(rewards))
    error = "it broke" if outcome.is_infrastructure_failure else None
    trajectory = Trajectory("t", 0, Task("test/Env-v0", 0), 0, (), (), (), outcome, error=error)
    object.__setattr__(trajectory, "turns", turns)
    return trajectory


def compare(*groups, settings) -> BatchAdvantages:
    """Each group is a list of episodes, each of these a list of rewards."""
    returns = [[returns_of(episode(r), discount=settings.discount) for r in group] for group in groups]
    return batch_advantages(returns, settings)


def advantages(rewards, settings):
    """Of one group."""
    return [value.tolist() for value in compare(rewards, settings=settings).values]


def test_three_returns_by_hand_with_bessels_correction():
    # mean 2, variance (1 + 0 + 1) / 2 = 1
    assert advantages([[1.0], [2.0], [3.0]], TRAJECTORY) == [[-1.0], [0.0], [1.0]]


def test_one_success_among_four_by_hand():
    # mean 1/4, variance (3 / 16 + 9 / 16) / 3 = 1/4, std 1/2
    assert advantages([[0.0], [0.0], [0.0], [1.0]], TRAJECTORY) == [[-0.5], [-0.5], [-0.5], [1.5]]


def test_every_turn_of_an_episode_gets_the_episodes_advantage():
    assert advantages([[0.0, 1.0], [0.0], [1.0, 1.0, 1.0]], TRAJECTORY) == [
        pytest.approx([-1 / math.sqrt(7 / 3) / 3] * 2, abs=ROUNDING),  # returns 1, 0, 3: mean 4/3, variance 7/3
        pytest.approx([-4 / math.sqrt(7 / 3) / 3], abs=ROUNDING),
        pytest.approx([5 / math.sqrt(7 / 3) / 3] * 3, abs=ROUNDING),
    ]


def test_without_the_standard_deviation_only_the_mean_is_removed():
    settings = AdvantageSettings(scale="none")
    assert advantages([[1.0], [2.0], [6.0]], settings) == [[-2.0], [-1.0], [3.0]]


@pytest.mark.parametrize("settings", [TRAJECTORY, TURN, AdvantageSettings(scale="none")])
@pytest.mark.parametrize(
    "returns",
    [
        [1.0, 1.0, 1.0],
        [1.0, 1.0 + 1.2e-7],  # one float32 rounding; with an epsilon of 1e-8 this would give +-0.7
        [1e12, 1e12 + 1e-3],  # rounding of float64: the last digit of 1e12 is 1.2e-4
        [0.0, 3e-8],
    ],
)
def test_a_group_that_differs_by_rounding_only_has_exactly_no_advantage(returns, settings):
    result = compare([[r] for r in returns], settings=settings)
    assert result.constant_groups == (True,)
    assert all(value.tolist() == [0.0] for value in result.values)


def test_what_an_epsilon_does_to_a_constant_group_does_not_happen_here():
    # rewards 1 and 1 + 2^-23: std 2^-23.5 = 8.4e-8. With an epsilon added to it, as elsewhere, the advantage would be
    # 2^-24 / (2^-23.5 + eps) = 0.632 at 1e-8, 0.055 at 1e-6 and 0.0006 at 1e-4: a function of eps and of nothing else.
    gap = 2.0**-23
    for eps, expected in ((1e-8, 0.632), (1e-6, 0.0550), (1e-4, 0.000596)):
        assert gap / 2 / (gap / math.sqrt(2) + eps) == pytest.approx(expected, rel=1e-2)
    assert advantages([[1.0], [1.0 + gap]], TRAJECTORY) == [[0.0], [0.0]]


def test_rewards_that_cancel_leave_rounding_of_their_own_size():
    # the returns are 0.25 and 0, but they were summed from millions
    result = compare([[1e6, -1e6 + 0.25], [1e6, -1e6]], settings=TRAJECTORY)
    assert result.constant_groups == (True,)


@pytest.mark.parametrize("settings", [TRAJECTORY, AdvantageSettings(level="turn", baseline="group")])
@pytest.mark.parametrize("offset", [-1e6, 1e6, 1e9])
@pytest.mark.parametrize("shared", [[], [0.25]])
def test_what_all_returns_share_does_not_hide_their_differences(settings, offset, shared):
    # offset + {0, 0.5, 1}: mean offset + 0.5, variance (0.25 + 0 + 0.25) / 2, so the advantages are -1, 0 and 1
    values = advantages([[*shared, offset + x] for x in (0.0, 0.5, 1.0)], settings)
    assert values == [pytest.approx([expected] * (len(shared) + 1), abs=ROUNDING) for expected in (-1, 0, 1)]
    running = AdvantageSettings(level=settings.level, baseline="running", scale="running")
    values = compare([[offset + x] for x in (0.0, 0.5, 1.0)], settings=running).values
    assert [value.tolist() for value in values] == [[-1.0], [0.0], [1.0]]


@pytest.mark.parametrize("settings", [TRAJECTORY, AdvantageSettings(scale="none")])
def test_the_largest_returns_have_finite_advantages_and_larger_ones_are_refused(settings):
    # two returns +-1e37: mean 0, so +-1e37 unscaled, and +-1/sqrt 2 with Bessel's correction
    low, high = advantages([[-1e37], [1e37]], settings)
    expected = 1e37 if settings.scale == "none" else math.sqrt(0.5)
    assert (low, high) == ([pytest.approx(-expected)], [pytest.approx(expected)])
    with pytest.raises(RecordError, match=r"sizes sum to at most 1e\+37, got 2e\+37; scale them"):
        advantages([[0.0], [1e37, -1e37]], settings)


@pytest.mark.parametrize(
    ("low", "gap", "is_rounding"),
    [
        (0.0, 1e-6, True),
        (0.0, 1.5e-6, False),
        # 256 roundings of 2^40, whose last digit in float64 is 2^(40 - 52): 2^(40 - 44) = 0.0625
        (2.0**40, 0.06, True),
        (2.0**40, 0.07, False),
    ],
)
@pytest.mark.parametrize("settings", [AdvantageSettings(scale="none"), TURN_UNSCALED])
def test_a_difference_counts_from_a_millionth_and_from_256_roundings_on(settings, low, gap, is_rounding):
    assert compare([[low], [low + gap]], settings=settings).constant_groups == (is_rounding,)


def test_turn_by_turn_rounding_is_that_of_what_is_still_to_come():
    # to go: (0, -1) and (gap, gap - 1). Of the first turn 2 is summed and nothing left: rounding is up to 2e-6. Of the
    # second the sum is what is left: up to 1e-6.
    for gap, expected in ((1.5e-6, 0.0), (2.5e-6, 2.5e-6)):
        values = advantages([[1.0, -1.0], [1.0, -1.0 + gap]], TURN_UNSCALED)
        assert values == [pytest.approx([-expected, -gap], abs=1e-12), pytest.approx([expected, gap], abs=1e-12)]


def test_a_difference_far_above_rounding_is_a_difference():
    # two returns: mean in the middle, std |a - b| / sqrt 2, so +-1/sqrt 2 however near they are
    low, high = advantages([[1.0], [1.001]], TRAJECTORY)
    assert low == pytest.approx([-math.sqrt(0.5)], abs=ROUNDING)
    assert high == pytest.approx([math.sqrt(0.5)], abs=ROUNDING)


@pytest.mark.parametrize("settings", [TRAJECTORY, TURN])
def test_a_group_of_one_has_nothing_to_be_compared_with(settings):
    result = compare([[5.0, 1.0]], settings=settings)
    assert result.constant_groups == (True,)
    assert result.values[0].tolist() == [0.0, 0.0]


THREE = [[1.0], [0.0, 1.0], [0.0, 0.0, 2.0]]  # returns-to-go: (1), (1, 1), (2, 2, 2)


def test_turn_level_compares_with_the_siblings_and_a_finished_one_counts_as_zero():
    # turn 0: others' means 3/2, 3/2, 1; turn 1: (0 + 2)/2 = 1 and (0 + 1)/2; turn 2: (0 + 0)/2
    assert advantages(THREE, TURN_UNSCALED) == [[-0.5], [-0.5, 0.0], [1.0, 1.5, 2.0]]


def test_turn_level_divides_by_the_largest_standard_deviation_of_a_turn():
    # variances of (1, 1, 2), (0, 1, 2), (0, 0, 2): 1/3, 1, 4/3
    scale = math.sqrt(4 / 3)
    assert advantages(THREE, TURN) == [
        pytest.approx([-0.5 / scale], abs=ROUNDING),
        pytest.approx([-0.5 / scale, 0.0], abs=ROUNDING),
        pytest.approx([1.0 / scale, 1.5 / scale, 2.0 / scale], abs=ROUNDING),
    ]


def test_turn_level_discounts_what_is_to_come():
    # discount 1/2: returns-to-go (1/2, 1) and (0, 0)
    settings = AdvantageSettings(level="turn", scale="none", discount=0.5)
    assert advantages([[0.0, 1.0], [0.0, 0.0]], settings) == [[0.5, 1.0], [-0.5, -1.0]]


def test_who_succeeds_later_is_not_punished_for_the_turns_before():
    # both earn 1; comparing immediate rewards instead would give the first turn of the later one -1/2
    early, late = advantages([[1.0], [0.0, 1.0]], TURN_UNSCALED)
    assert (early, late[0]) == ([0.0], 0.0)


def test_one_reward_at_the_end_of_equal_episodes_gives_every_turn_the_leave_one_out_advantage():
    # G/(G - 1) times the trajectory-level advantage, which is all that leaving oneself out of the mean changes
    rewards = [[0.0, 0.0, r] for r in (0.0, 1.0, 1.0, 4.0)]
    for by_turn, by_trajectory in zip(advantages(rewards, TURN), advantages(rewards, TRAJECTORY), strict=True):
        assert by_turn == pytest.approx([4 / 3 * a for a in by_trajectory], abs=ROUNDING)


def test_a_turn_in_which_all_are_equal_has_no_advantage_while_others_have():
    values = advantages([[1.0, 0.0], [0.0, 1.0]], TURN_UNSCALED)
    assert values == [[0.0, -1.0], [0.0, 1.0]]


rewards_of_a_group = st.lists(
    st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=1, max_size=4), min_size=2, max_size=6
)


@given(rewards_of_a_group)
def test_no_normalised_turn_advantage_exceeds_the_root_of_the_group_size(rewards):
    # leaving one out gives G/(G-1) (x - mean), and |x - mean| <= (G-1)/sqrt(G) times the Bessel std
    bound = math.sqrt(len(rewards)) + ROUNDING
    assert all(abs(a) <= bound for value in advantages(rewards, TURN) for a in value)


@given(rewards_of_a_group)
def test_turn_level_equals_a_loop_over_siblings(rewards):
    num_turns = max(len(r) for r in rewards)
    to_go = [[sum(r[k:]) for k in range(num_turns)] for r in rewards]
    values = advantages(rewards, TURN_UNSCALED)
    for i, r in enumerate(rewards):
        for k in range(len(r)):
            siblings = [to_go[j][k] for j in range(len(rewards)) if j != i]
            # 1e-5: differences below the tolerance for constant turns (1e-6 of at most 4) are set to zero
            assert values[i][k] == pytest.approx(to_go[i][k] - sum(siblings) / len(siblings), abs=1e-5)


@given(rewards_of_a_group)
def test_trajectory_advantages_have_mean_zero_and_bessel_variance_one_or_are_zero(rewards):
    result = compare(rewards, settings=TRAJECTORY)
    A = np.array([value[0] for value in result.values], dtype=np.float64)
    assert A.sum() == pytest.approx(0, abs=1e-5)  # float32 rounding of up to six values of up to 2.3
    assert A.var(ddof=1) == pytest.approx(0.0 if result.constant_groups[0] else 1.0, abs=1e-5)


@pytest.mark.parametrize("settings", [TRAJECTORY, TURN])
def test_an_unscored_episode_is_refused_and_not_taken_for_zero(settings):
    with pytest.raises(UnscoredError):
        advantages([[1.0], [None]], settings)
    with pytest.raises(UnscoredError):
        returns_of(episode([1.0], Outcome.ENGINE_ERROR), discount=settings.discount)
