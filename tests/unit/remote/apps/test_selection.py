"""The alarm for kept episodes that return something else than played ones: exact, quick to sound, and seldom wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gspo_gym.remote.apps.episodes import AppCounters
from gspo_gym.remote.apps.metrics import return_metrics, take_returns
from gspo_gym.remote.apps.probe import ERROR_RATE, NUM_STEPS, PlayedReturns, SelectionAlarm, _p_of, _tested
from gspo_gym.types import DroppedEpisode, Outcome, Task, Trajectory, TrajectoryGroup


def test_p_is_the_share_of_subsets_that_are_as_far_from_the_mean() -> None:
    """8 attempts, 3 of them lost: all 56 subsets are counted here; 1,999 draws have a standard error of 0.011."""
    lost, kept = (0.0, 0.5, 0.0), (1.0, 2.0, 0.25, 1.5, 0.0)
    values = np.array(lost + kept) - np.mean(lost + kept)
    subsets = [abs(values[list(three)].sum()) for three in itertools.combinations(range(8), 3)]
    exact = np.mean([value >= abs(values[:3].sum()) - 1e-12 for value in subsets])
    tested = _tested(PlayedReturns(kept, lost), np.random.default_rng(0))
    assert _p_of([tested]) == pytest.approx(exact, abs=0.05)


def test_96_played_of_which_the_12_best_are_kept_sound_the_alarm_at_once() -> None:
    played = [1.25] * 12 + [0.5] * 48 + [0.0] * 36
    selection = SelectionAlarm(seed=0).check(PlayedReturns(tuple(played[:12]), tuple(played[12:])))
    assert selection is not None
    assert (selection.num_played, selection.num_kept, selection.mean_kept) == (96, 12, 1.25)
    assert selection.mean_played == pytest.approx((12 * 1.25 + 48 * 0.5) / 96)
    assert "mean return of 0.4062" in selection.sentence()


def test_a_selection_that_one_step_does_not_show_is_shown_by_several() -> None:
    """39 played, 13 with 1; 3 kept, all of them with 1: C(13, 3) / C(39, 3) = 0.031 by chance, and 3e-5 three times."""
    step = PlayedReturns((1.0,) * 3, (1.0,) * 10 + (0.0,) * 26)
    alarm = SelectionAlarm(seed=0)
    found = [alarm.check(step) for _ in range(3)]
    assert found[0] is None
    (selection,) = [each for each in found if each is not None]
    assert selection.num_steps in (2, 3)
    assert selection.p <= ERROR_RATE


def test_what_is_lost_whatever_it_returned_sounds_no_alarm() -> None:
    """400 steps of 24 attempts, of which a random 2 are lost: 0.4 alarms are expected at most."""
    random, alarm, num_alarms = np.random.default_rng(3), SelectionAlarm(seed=1), 0
    for _ in range(400):
        returns = random.choice([0.0, 0.25, 1.0], size=24).tolist()
        num_alarms += alarm.check(PlayedReturns(tuple(returns[2:]), tuple(returns[:2]))) is not None
    assert num_alarms <= 1
    assert len(alarm._steps) <= NUM_STEPS


@pytest.mark.parametrize("returns", [PlayedReturns((0.0, 1.0), ()), PlayedReturns((), (0.0, 1.0)), PlayedReturns()])
def test_steps_that_lose_none_or_keep_none_are_no_evidence(returns: PlayedReturns) -> None:
    alarm = SelectionAlarm(seed=0)
    assert [alarm.check(returns) for _ in range(50)] == [None] * 50


def test_returns_that_are_all_the_same_are_no_evidence() -> None:
    alarm = SelectionAlarm(seed=0)
    assert [alarm.check(PlayedReturns((0.1,) * 7, (0.1,) * 7)) for _ in range(40)] == [None] * 40


def test_every_attempt_at_a_steps_episodes_counts_once_and_only_the_one_in_the_group_as_kept() -> None:
    counters = AppCounters()
    for trajectory_id, attempt, value in (("a", 0, 0.0), ("a", 1, 1.0), ("b", 0, 0.5), ("later", 0, 9.0)):
        counters.note_return(trajectory_id, attempt, value)
    task = Task("quiz", 1)
    kept = Trajectory("a", 1, task, 0, (), (), (), Outcome.TERMINATED)
    group = TrajectoryGroup(task, (kept,), 2, (DroppedEpisode("b", Outcome.TERMINATED, "its group was too small"),))
    returns = take_returns([counters], [group])
    assert (returns.kept, sorted(returns.lost)) == ((1.0,), [0.0, 0.5])
    assert return_metrics(returns) == {"gateway/played_return_mean": 0.5, "gateway/kept_return_mean": 1.0}
    assert counters.returns == {("later", 0): 9.0}
    assert take_returns([counters], [group]) == PlayedReturns()
