"""Scores of estimators whose quality was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gspo_gym.credit.scores import Truth, as_truth, score
from gspo_gym.errors import ConfigError

RNG = np.random.default_rng(5)
NUM_GROUPS, PER_GROUP = 60, 20
GROUPS = np.repeat(np.arange(NUM_GROUPS), PER_GROUP)
ADVANTAGES = RNG.normal(0, 1, NUM_GROUPS * PER_GROUP)
# measured with errors of variance 1/4, so that the truth and what was measured have correlation 1 / sqrt(1.25)
TRUTH = Truth(ADVANTAGES + RNG.normal(0, 0.5, len(ADVANTAGES)), np.full(len(ADVANTAGES), 0.25), GROUPS)
NOISE = RNG.normal(0, 1, len(ADVANTAGES))


def test_the_ceiling_is_what_the_errors_of_the_truth_leave_of_a_perfect_estimator():
    assert TRUTH.ceiling == pytest.approx(1 / math.sqrt(1.25), abs=0.03)
    assert score("perfect", ADVANTAGES, TRUTH).correlation == pytest.approx(TRUTH.ceiling, abs=0.03)


def test_the_statistics_are_those_of_textbooks_also_where_the_means_are_not_0():
    estimates, truth = np.array([1.0, 4.0, 2.0, 7.0, 3.0, 8.0]), np.array([2.0, 3.0, 2.5, 5.0, 4.0, 6.5])
    scored = score("any", estimates, Truth(truth, np.full(6, 0.2), np.array([0, 0, 1, 1, 2, 2])))
    assert scored.correlation == pytest.approx(np.corrcoef(estimates, truth)[0, 1])
    # errors of the truth add their variance to that of what was measured
    assert scored.slope == pytest.approx(np.cov(estimates, truth, ddof=0)[0, 1] / (np.var(truth) - 0.2))
    assert scored.offset == pytest.approx(25 / 6 - 23 / 6)
    small = score("small", estimates / 100, Truth(truth, np.full(6, 0.2), np.array([0, 0, 1, 1, 2, 2])))
    assert small.correlation == pytest.approx(scored.correlation)


def test_noise_lowers_the_correlation_and_not_the_slope():
    # 1 / sqrt((1 + 1) * 1.25)
    noisy = score("noisy", ADVANTAGES + NOISE, TRUTH)
    assert noisy.correlation == pytest.approx(1 / math.sqrt(2.5), abs=0.05)
    assert noisy.low < 1 / math.sqrt(2.5) < noisy.high
    assert noisy.high - noisy.low < 0.15
    assert noisy.slope == pytest.approx(1, abs=4 * noisy.slope_error)
    assert (noisy.is_biased, noisy.is_shifted) == (False, False)


@pytest.mark.parametrize("share", [0.8, 1.25, 0.0])
def test_a_planted_share_of_the_truth_is_found_biased(share):
    planted = score("planted", share * ADVANTAGES + 0.3 * NOISE, TRUTH)
    assert planted.is_biased
    assert planted.slope == pytest.approx(share, abs=4 * planted.slope_error)
    assert not planted.is_shifted


def test_a_planted_offset_is_found_and_is_no_bias_of_the_slope():
    planted = score("planted", ADVANTAGES + NOISE + 0.3, TRUTH)
    assert planted.is_shifted
    assert planted.offset == pytest.approx(0.3, abs=4 * planted.offset_error)
    assert not planted.is_biased


def test_the_error_of_an_offset_is_that_of_whole_groups():
    # one draw a group, shared by its turns: the mean of 60 groups has the error 1 / sqrt(60), not 1 / sqrt(1200)
    shared = np.repeat(RNG.normal(0, 1, NUM_GROUPS), PER_GROUP)
    assert score("shared", ADVANTAGES + shared, TRUTH).offset_error == pytest.approx(1 / math.sqrt(60), rel=0.3)


def test_signs_count_where_the_truth_is_sure_and_half_where_the_estimate_is_0():
    variances = np.array([0.01, 0.01, 0.01, 0.01, 0.01, 0.0])
    truth = Truth(np.array([1.0, 1.0, -1.0, -1.0, 0.1, 0.0]), variances, np.array([0, 0, 0, 1, 1, 1]))
    # right, wrong, none, right; the next is within two errors of 0, and 0 itself has no sign
    assert score("signs", np.array([2.0, -1.0, 0.0, -3.0, -5.0, 1.0]), truth).right_signs == pytest.approx(2.5 / 4)


def test_an_estimator_that_says_the_same_of_all_turns_goes_with_nothing():
    constant = score("constant", np.full(len(ADVANTAGES), 2.0), TRUTH)
    assert (constant.correlation, constant.slope) == (0.0, pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize(
    "truth",
    [
        Truth(np.array([0.0, 1.0]), np.array([0.0, 0.0]), np.array([0, 0])),  # one group
        Truth(np.array([0.5, 0.5]), np.array([0.0, 0.0]), np.array([0, 1])),  # nothing to be right about
    ],
)
def test_too_little_to_compare_is_refused_with_the_way_out(truth):
    with pytest.raises(ConfigError, match="play more seeds or continuations"):
        score("any", np.array([0.0, 1.0]), truth)


def test_groups_of_episodes_become_one_truth():
    episodes = [(np.array([1.0, 2.0]), np.array([0.1, 0.2])), (np.array([3.0]), np.array([0.3]))]
    truth = as_truth([episodes, episodes[:1]])
    assert truth.advantages.tolist() == [1, 2, 3, 1, 2]
    assert truth.variances.tolist() == [0.1, 0.2, 0.3, 0.1, 0.2]
    assert truth.groups.tolist() == [0, 0, 0, 1, 1]
