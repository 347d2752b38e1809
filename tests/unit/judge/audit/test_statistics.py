"""An audit's arithmetic against closed forms, hand arithmetic, and biases that were put in on purpose."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_gym.errors import ConfigError
from gspo_gym.judge.audit import (
    agreement,
    balanced_orders,
    calibration,
    flip_rate,
    kappa,
    length_bias,
    position_bias,
)

BITS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


# --- agreement --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(BITS)
def test_kappa_of_bits_is_cohens(pairs: list[tuple[int, int]]) -> None:
    judge, gold = zip(*pairs, strict=True)
    n = len(pairs)
    observed = sum(a == b for a, b in pairs) / n
    by_chance = sum((judge.count(value) / n) * (gold.count(value) / n) for value in (0, 1))
    if by_chance == 1:
        assert kappa(judge, gold) is None
    else:
        assert kappa(judge, gold) == pytest.approx((observed - by_chance) / (1 - by_chance), abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_kappa_of_grades_is_cohens_with_quadratic_weights(pairs: list[tuple[int, int]]) -> None:
    judge, gold = zip(*pairs, strict=True)
    n = len(pairs)
    observed = sum((a - b) ** 2 for a, b in pairs) / n
    expected = sum((a - b) ** 2 for a, b in itertools.product(judge, gold)) / n**2
    if expected == 0:
        assert kappa(judge, gold) is None
    else:
        assert kappa(judge, gold) == pytest.approx(1 - observed / expected, abs=1e-9)


def test_agreement_by_hand() -> None:
    found = agreement([1.0, 0.5, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0])
    assert (found.num, found.judge_mean, found.gold_mean) == (4, 0.625, 0.5)
    assert (found.equal_fraction, found.mean_absolute_error) == (0.5, 0.375)  # (0 + 0.5 + 0 + 1) / 4
    # deviations of the judge .375 -.125 -.625 .375, of gold .5 .5 -.5 -.5: cov (.1875 - .0625 + .3125 - .1875) / 4
    cov, var_judge, var_gold = 0.0625, (0.140625 + 0.015625 + 0.390625 + 0.140625) / 4, 0.25
    assert found.correlation == pytest.approx(cov / math.sqrt(var_judge * var_gold))
    assert found.kappa == pytest.approx(2 * cov / (var_judge + var_gold + 0.125**2))


def test_a_judge_of_one_opinion_has_no_correlation_and_agrees_no_better_than_chance() -> None:
    found = agreement([1, 1, 1, 1], [1, 1, 1, 0])
    assert found.equal_fraction == 0.75
    assert (found.kappa, found.correlation) == (0.0, None)
    assert agreement([1, 1], [1, 1]).kappa is None


def test_pairs_are_asked_for() -> None:
    for judge, gold in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ConfigError, match="expected pairs of scores"):
            agreement(judge, gold)


# --- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_by_hand() -> None:
    found = calibration([0.1, 0.3, 0.9, 1.0], [0.0, 1.0, 1.0, 1.0], num_bins=2)
    assert found is not None
    first, second = found.bins
    assert (first.low, first.high, first.num) == (0.0, 0.5, 2)
    assert (first.judge_mean, first.gold_mean) == (0.2, 0.5)
    assert (second.num, second.judge_mean, second.gold_mean) == (2, 0.95, 1.0)  # 1.0 is in the last bin
    assert found.expected_error == pytest.approx((2 * 0.3 + 2 * 0.05) / 4)
    assert found.brier == pytest.approx((0.01 + 0.49 + 0.01 + 0.0) / 4)


def test_a_judge_that_says_how_often_it_is_right_is_calibrated_and_one_that_exaggerates_is_not() -> None:
    rng = np.random.default_rng(0)
    chance = rng.uniform(size=20_000)
    happened = (rng.uniform(size=20_000) < chance).astype(float)
    honest = calibration(list(chance), list(happened))
    boastful = calibration(list(np.sqrt(chance)), list(happened))
    assert honest is not None
    assert boastful is not None
    assert honest.expected_error < 0.015
    # E |sqrt(p) - p| over uniform p is 2/3 - 1/2
    assert boastful.expected_error == pytest.approx(1 / 6, abs=0.01)


@pytest.mark.parametrize(("judge", "gold"), [([1.5], [1.0]), ([0.5], [-0.1])])
def test_scores_outside_0_to_1_have_no_calibration(judge: list[float], gold: list[float]) -> None:
    assert calibration(judge, gold) is None


# --- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [0.02, 0.3, -0.1])
def test_a_known_length_bias_is_estimated_within_a_tenth(bias: float) -> None:
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 2, size=2000).astype(float)
    chars = rng.integers(200, 4000, size=2000) + (1500 * gold).astype(int)  # good episodes are longer: no bias yet
    judge = 0.1 + 0.7 * gold + bias * chars / 1000 + rng.normal(0, 0.02, size=2000)
    found = length_bias(list(judge), list(gold), list(chars))
    assert found is not None
    assert found.value == pytest.approx(bias, rel=0.1)
    assert abs(found.value - bias) < 4 * found.standard_error
    # 0.02 of noise over n values whose standard deviation given gold is 3.8 / sqrt(12) thousand
    assert found.standard_error == pytest.approx(0.02 / (3.8 / math.sqrt(12) * math.sqrt(2000)), rel=0.1)


def test_a_fair_judge_has_no_length_bias_although_good_episodes_are_longer() -> None:
    rng = np.random.default_rng(2)
    gold = rng.uniform(size=500)
    chars = (3000 * gold + rng.uniform(0, 1000, size=500)).astype(int)
    found = length_bias(list(gold), list(gold), list(chars))
    assert found is not None
    assert found.value == pytest.approx(0, abs=1e-9)


def test_what_length_does_cannot_be_told_where_it_does_not_vary() -> None:
    assert length_bias([0, 1, 0, 1, 1], [0, 1, 0, 1, 1], [7] * 5) is None
    assert length_bias([0, 1, 0, 1, 1], [0, 1, 0, 1, 1], [7, 9, 7, 9, 9]) is None  # length is gold
    assert length_bias([0, 1, 0, 1], [0, 1, 0, 1], [1, 2, 3, 4]) is None
    with pytest.raises(ConfigError, match="a length for each of 2"):
        length_bias([0, 1], [0, 1], [1])


# --- position ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(0, 100))
def test_in_balanced_orders_everything_stands_once_everywhere(number: int, seed: int) -> None:
    ids = [f"c{index}" for index in range(number)]
    orders = balanced_orders(ids, seed)
    assert len(orders) == number
    for place in range(number):
        assert {order[place] for order in orders} == set(ids)


def judged_with_bias(effects: list[float], *, num_episodes: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a stub: the truth of episode and criterion, plus what the place does, plus noise."""
    rng = np.random.default_rng(3)
    k = len(effects)
    ids = [str(index) for index in range(k)]
    places = np.array([[order.index(id_) for id_ in ids] for order in balanced_orders(ids, 5)])
    truth = rng.uniform(0.2, 0.6, size=(num_episodes, 1, k))
    scores = truth + np.array(effects)[places] + rng.normal(0, noise, size=(num_episodes, k, k))
    return scores, places


@pytest.mark.parametrize("bias", [0.05, 0.2, -0.2])
def test_a_known_position_bias_is_estimated_within_a_tenth_and_permutation_shrinks_it_fivefold(bias: float) -> None:
    scores, places = judged_with_bias([bias, 0.0, 0.0, 0.0], num_episodes=200, noise=0.02)
    found = position_bias(scores, places)
    # The first place has bias - bias / 4 more than the mean over places, the others bias / 4 less.
    assert found.effects[0] == pytest.approx(0.75 * bias, rel=0.1)
    assert found.spread == pytest.approx(abs(bias), rel=0.1)
    assert found.fixed_order_bias == pytest.approx(0.75 * abs(bias), rel=0.1)
    assert found.permuted_bias <= found.fixed_order_bias / 5


def test_a_fair_judge_shows_no_position_bias() -> None:
    scores, places = judged_with_bias([0.0, 0.0, 0.0], num_episodes=50, noise=0.0)
    found = position_bias(scores, places)
    assert (found.spread, found.fixed_order_bias, found.permuted_bias) == pytest.approx((0, 0, 0), abs=1e-12)


def test_without_noise_alternating_orders_leave_nothing() -> None:
    scores, places = judged_with_bias([0.3, 0.1, 0.0], num_episodes=6, noise=0.0)
    found = position_bias(scores, places)
    mean = 0.4 / 3
    assert found.effects == pytest.approx((0.3 - mean, 0.1 - mean, -mean), abs=1e-12)
    assert found.permuted_bias == pytest.approx(0.0, abs=1e-12)


def test_orders_that_are_not_balanced_are_refused() -> None:
    with pytest.raises(ConfigError, match="as many orders as criteria"):
        position_bias(np.zeros((2, 2, 3)), np.zeros((2, 3), dtype=np.int64))


# --- repeats ----------------------------------------------------------------------------------------------------------


def test_the_flip_rate_is_the_chance_that_two_judgements_differ() -> None:
    assert flip_rate([[1, 0], [1, 1]]) == 0.5
    assert flip_rate([[1, 0, 0, 0]]) == 0.5  # 3 of 6 pairs
    assert flip_rate([[1], []]) is None
    assert flip_rate([[0.1 + 0.2, 0.3]]) == 0.0  # rounding is no flip


def test_the_flip_rate_of_coins_is_2_p_q() -> None:
    rng = np.random.default_rng(4)
    thrown = (rng.uniform(size=(5000, 3)) < 0.9).astype(float)
    assert flip_rate(thrown.tolist()) == pytest.approx(2 * 0.9 * 0.1, abs=0.01)
