"""The gap between judge and gold is watched: a change that is large and certain sounds the alarm, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_gym.judge.base import JudgeError
from gspo_gym.judge.gold import DriftCheck, compare_with_gold, drift


def check(judge: float, gold: float, error: float = 0.01) -> DriftCheck:
    return DriftCheck(32, judge, gold, judge - gold, error, 0.5)


def test_the_gap_is_of_pairs_by_hand() -> None:
    # differences 0.1, 0.3, 0.2: mean 0.2, standard deviation 0.1 (n - 1), over sqrt(3) = 0.0577
    found = compare_with_gold([(0.5, 0.4), (0.8, 0.5), (0.6, 0.4)])
    assert (found.num_episodes, found.gap) == (3, pytest.approx(0.2))
    assert found.gap_standard_error == pytest.approx(0.1 / 3**0.5)
    assert (found.judge_mean, found.gold_mean) == (pytest.approx(1.9 / 3), pytest.approx(1.3 / 3))


def test_the_correlation_is_pearsons_and_absent_where_one_never_varies() -> None:
    rng = np.random.default_rng(0)
    judge, gold = rng.normal(size=50), rng.normal(size=50)
    centred = (judge - judge.mean()) @ (gold - gold.mean())
    by_hand = centred / np.sqrt(((judge - judge.mean()) ** 2).sum() * ((gold - gold.mean()) ** 2).sum())
    assert compare_with_gold(list(zip(judge, gold, strict=True))).correlation == pytest.approx(by_hand)
    assert compare_with_gold([(1.0, 0.0), (1.0, 1.0)]).correlation is None


@pytest.mark.parametrize("pairs", [[(1.0, 1.0)], []])
def test_what_cannot_be_compared_is_an_error(pairs: list[tuple[float, float]]) -> None:
    with pytest.raises(JudgeError, match=f"expected two episodes at least .* got {len(pairs)}"):
        compare_with_gold(pairs)


def test_a_difference_from_the_start_is_taste_and_not_drift() -> None:
    assert drift(check(0.9, 0.3), check(0.9, 0.3), 0.1) is None
    assert drift(check(0.9, 0.3), check(0.95, 0.32), 0.1) is None  # gap 0.6, then 0.63


def test_a_judge_that_rises_while_gold_falls_sounds_the_alarm() -> None:
    reason = drift(check(0.5, 0.5), check(0.8, 0.4), 0.1)
    assert reason is not None
    assert "went from 0.500 to 0.800, gold's from 0.500 to 0.400" in reason
    assert "their gap changed by +0.400" in reason
    assert "the policy may be exploiting the judge" in reason


def test_a_judge_that_becomes_harsher_is_drift_of_another_kind() -> None:
    assert "has become harsher than gold" in (drift(check(0.5, 0.5), check(0.2, 0.5), 0.1) or "")


def test_few_noisy_episodes_do_not_cry_wolf() -> None:
    first = check(0.5, 0.5, error=0.06)
    # a change of 0.2, and 2 * sqrt(0.06^2 + 0.09^2) = 0.216
    assert drift(first, check(0.7, 0.5, error=0.09), 0.1) is None
    # 2 * sqrt(0.06^2 + 0.07^2) = 0.184
    assert drift(first, check(0.7, 0.5, error=0.07), 0.1) is not None


def test_a_certain_but_small_change_is_nobodys_business() -> None:
    first = check(0.5, 0.5, error=1e-6)
    assert drift(first, check(0.59, 0.5, error=1e-6), 0.1) is None
    assert drift(first, check(0.61, 0.5, error=1e-6), 0.1) is not None


def test_judges_that_do_not_drift_raise_few_alarms() -> None:
    """Simulated: 64 episodes a check, differences with standard deviation 0.5, 200 runs of 5 checks."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(200):
        golds = rng.normal(size=(6, 64))
        judges = golds + rng.normal(0.3, 0.5, (6, 64))
        first, *later = (compare_with_gold(list(zip(*pair, strict=True))) for pair in zip(judges, golds, strict=True))
        alarms += sum(drift(first, now, 0.05) is not None for now in later)
    # 5 checks a run, each with probability 0.05 at most (two standard errors)
    assert alarms / 1000 <= 0.06
