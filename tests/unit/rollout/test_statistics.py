"""Intervals and tests, against published numbers, closed forms and hand arithmetic.

Pinned here: 1. Wilson against Newcombe's table; 2. the bootstrap against the binomial quantiles that it must converge
to, its seed, and its edges; 3. McNemar's exact test by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.rollout import evaluation as statistics
from gspo_gym.rollout.evaluation import Interval, bootstrap_mean_interval, mcnemar_exact_p, wilson_interval
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
