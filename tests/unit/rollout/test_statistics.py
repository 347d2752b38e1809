"""Intervals and tests, against published numbers, closed forms and hand arithmetic.

Pinned here: 1. Wilson against Newcombe's table; 2. the bootstrap against the binomial quantiles that it must converge
to, its seed, and its edges; 3. McNemar's exact test by hand.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.rollout import statistics
from gspo_gym.rollout.statistics import (
    Interval,
    bootstrap_mean_interval,
    mcnemar_exact_p,
    pass_at_k,
    pass_hat_k,
    share_interval,
    wilson_interval,
)
from gspo_gym.seeding import generator


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_newcombe_1998_table_1_method_3(
    successes: int, trials: int, low: float, high: float
) -> None:
    interval = wilson_interval(successes, trials)
    # Printed with four digits, so they differ from ours by at most half a unit of the last.
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_solves_its_defining_equation() -> None:
    # The bounds are where |p_hat - p| = z sqrt(p (1 - p) / n).
    interval = wilson_interval(7, 9)
    for p in (interval.low, interval.high):
        assert abs(7 / 9 - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / 9), rel=1e-12)


def test_wilson_is_exact_at_the_ends_and_symmetric() -> None:
    assert wilson_interval(0, 5).low == 0.0
    assert wilson_interval(5, 5).high == 1.0
    assert wilson_interval(5, 5).low == pytest.approx(1 - wilson_interval(0, 5).high, rel=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes: int, trials: int) -> None:
    with pytest.raises(ConfigError, match="wilson_interval"):
        wilson_interval(successes, trials)


def test_bootstrap_converges_to_the_binomial_quantiles() -> None:
    # A resample of five 0s and five 1s sums to Binomial(10, 1/2): P[<= 1] = 11/1024 = 0.011, P[<= 2] = 56/1024 = 0.055,
    # so the 2.5% point is 2/10 and by symmetry the 97.5% point is 8/10; 10,000 resamples cannot miss either.
    interval = bootstrap_mean_interval([0.0] * 5 + [1.0] * 5)
    assert interval == Interval(0.2, 0.8)


def test_bootstrap_has_about_the_width_of_the_normal_approximation() -> None:
    values = [float(v) for v in range(400)]  # variance (400^2 - 1) / 12 = 13333.25
    half = 1.96 * math.sqrt(13333.25 / 400)  # 11.32
    interval = bootstrap_mean_interval(values, seed=1)
    assert interval is not None
    # Each bound is a sample quantile of 10,000 normals: its standard error is sqrt(.025*.975/1e4)/0.0584 = 0.027 sigma,
    # 0.15 in these units; four of them.
    assert interval.low == pytest.approx(199.5 - half, abs=0.6)
    assert interval.high == pytest.approx(199.5 + half, abs=0.6)


def test_bootstrap_depends_on_its_seed_only() -> None:
    values = [0.1 * k * k for k in range(30)]
    assert bootstrap_mean_interval(values, seed=1) == bootstrap_mean_interval(values, seed=1)
    assert bootstrap_mean_interval(values, seed=1) != bootstrap_mean_interval(values, seed=2)


def test_bootstrap_in_blocks_is_that_of_one_draw_of_ten_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_MAX_RESAMPLED_NUMBERS", 700)  # 77 resamples of 9, and 67 in the last block
    values = np.random.default_rng(4).normal(size=9)
    means = values[generator(3, "bootstrap").integers(9, size=(10_000, 9))].mean(axis=1)
    assert bootstrap_mean_interval(values.tolist(), seed=3) == Interval(*np.quantile(means, [0.025, 0.975]).tolist())


def test_bootstrap_of_too_little_or_too_equal() -> None:
    assert bootstrap_mean_interval([]) is None
    assert bootstrap_mean_interval([1.0]) is None
    assert bootstrap_mean_interval([0.5] * 7) == Interval(0.5, 0.5)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        (0, 0, 1.0),
        (1, 5, 0.21875),  # 2 (C(6,0) + C(6,1)) / 64 = 14/64
        (5, 1, 0.21875),
        (3, 3, 1.0),  # 2 (1 + 6 + 15 + 20) / 64 > 1
        (2, 10, 0.03857421875),  # 2 (1 + 12 + 66) / 4096 = 158/4096
        (0, 1, 1.0),
    ],
)
def test_mcnemar_by_hand(first: int, second: int, p: float) -> None:
    assert mcnemar_exact_p(first, second) == p


def test_mcnemar_takes_many_pairs() -> None:
    # log2 of 2 / 2^2000 is -1999, far below the smallest float: 0 is the nearest one.
    assert mcnemar_exact_p(0, 2000) == 0.0
    assert 0.99 < mcnemar_exact_p(1000, 1000) <= 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (5, 2, 4), (5, 5, 5), (4, 3, 4)])
def test_pass_estimates_are_means_over_all_choices_of_k_samples(n: int, c: int, k: int) -> None:
    chosen = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == sum(map(any, chosen)) / len(chosen)
    assert pass_hat_k(n, c, k) == sum(map(all, chosen)) / len(chosen)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_pass_estimates_are_unbiased(k: int) -> None:
    # c is Binomial(6, 0.3): the expected estimates are 1 - 0.7^k and 0.3^k.
    chances = [math.comb(6, c) * 0.3**c * 0.7 ** (6 - c) for c in range(7)]
    assert sum(p * pass_at_k(6, c, k) for c, p in enumerate(chances)) == pytest.approx(1 - 0.7**k)
    assert sum(p * pass_hat_k(6, c, k) for c, p in enumerate(chances)) == pytest.approx(0.3**k)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_estimates_refuse_impossible_counts(n: int, c: int, k: int) -> None:
    for estimate in (pass_at_k, pass_hat_k):
        with pytest.raises(ConfigError, match="expected 1 <= k <= samples"):
            estimate(n, c, k)


def test_the_trials_of_an_interval_lie_between_tasks_and_samples() -> None:
    # Samples that always agree say no more than one: v = 4 (1/4) / 16, and p (1 - p) / v = (1/4) / (1/16) = 4 trials.
    assert share_interval([1.0, 1.0, 0.0, 0.0], [8] * 4) == wilson_interval(2, 4)
    # Tasks that differ no more than chance count as their samples: v = 2 (1/16) / 16 is 32 trials, and 4 x 2 were made.
    assert share_interval([0.5, 0.75, 0.5, 0.25], [2] * 4) == wilson_interval(4, 8)
    # No variance is seen between three tasks that always succeed, which does not make it certain.
    assert share_interval([1.0] * 3, [4] * 3) == wilson_interval(3, 3)
    assert share_interval([0.0, 1.0, 1.0], [1] * 3) == wilson_interval(2, 3)
    # p = 3/4, v = (9/16 + 9/16) / 16, (3/16) / v = 8/3 trials; without weights p = 1/2, v = 1/8, (1/4) / v = 2.
    assert share_interval([1.0, 0.0], [3, 1]).low == pytest.approx(wilson_interval(2.0, 8 / 3).low)
    assert share_interval([1.0, 0.0], [3, 1], is_weighted=False) == wilson_interval(1, 2)


@pytest.mark.parametrize(("shares", "num_samples"), [([0.5], [1, 2]), ([], []), ([], [1])])
def test_an_interval_of_shares_needs_one_for_each_task(shares: list[float], num_samples: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"each of {len(num_samples)} tasks, got {len(shares)}"):
        share_interval(shares, num_samples)


def test_the_interval_over_tasks_covers_the_truth_where_that_over_episodes_does_not() -> None:
    # Tasks differ in difficulty as Beta(1/2, 1/2), whose mean is 1/2: in 1,000 evaluations of 40 tasks with 8 samples
    # each, a 95% interval misses it in 50; four standard errors of that number are 28.
    rng = generator(0, "tasks that differ")
    successes = rng.binomial(8, rng.beta(0.5, 0.5, size=(1000, 40)))
    over_tasks = [share_interval((row / 8).tolist(), [8] * 40) for row in successes]
    over_episodes = [wilson_interval(int(row.sum()), 320) for row in successes]
    missed = [sum(not one.low <= 0.5 <= one.high for one in kind) for kind in (over_tasks, over_episodes)]
    assert 22 <= missed[0] <= 78
    assert missed[1] > 200


def test_the_bootstrap_draws_a_value_with_its_weight() -> None:
    values = [0.0, 1.0, 5.0]
    assert bootstrap_mean_interval(values, weights=[2, 2, 2]) == bootstrap_mean_interval(values)
    # Of two values, resamples are both of one or one of each, whose mean is (3 x 0 + 1 x 1) / 4 in place of 1/2.
    assert bootstrap_mean_interval([0.0, 1.0], weights=[3, 1], seed=5) == Interval(0.0, 1.0)
    weighted = bootstrap_mean_interval([0.0, 0.0, 1.0, 1.0] * 50, weights=[3.0, 3.0, 1.0, 1.0] * 50)
    assert weighted is not None
    assert weighted.low < 0.25 < weighted.high < 0.5
