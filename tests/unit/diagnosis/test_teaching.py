"""The alarm of a teacher that is worse than its student: when it sounds, how often by chance, and what it keeps."""

from __future__ import annotations

import numpy as np

from gspo_gym.diagnosis.alarms import ALARMS
from gspo_gym.diagnosis.teaching import MIN_STEPS, NUM_STEPS, TeachingAlarm, TeachingEvidence


def sounds(alarm: TeachingAlarm, values: list[float]) -> list[bool]:
    return [alarm.check({"distillation/agreement": value}) is not None for value in values]


def test_steps_that_agree_or_say_nothing_are_silent() -> None:
    alarm = TeachingAlarm()
    assert not any(sounds(alarm, [0.3, 0.2, 0.4, 0.1] * 8))
    assert alarm.check({}) is None
    assert alarm.check({"distillation/agreement": float("nan")}) is None
    assert len(alarm.evidence.recent) == NUM_STEPS


def test_it_sounds_where_the_mean_is_four_standard_errors_below_0() -> None:
    """Eight values -0.1 and -0.3 by turns: mean -0.2, standard deviation sqrt(8 * 0.01 / 7) = 0.1069, its error 0.0378;
    -0.2 / 0.0378 = -5.3. With 0.0 and -0.2: mean -0.1, -2.6 errors."""
    assert sounds(TeachingAlarm(), [-0.1, -0.3] * 4) == [False] * (MIN_STEPS - 1) + [True]
    assert not any(sounds(TeachingAlarm(), [0.0, -0.2] * 4))


def test_an_alarm_uses_its_evidence_up_and_a_resumed_one_goes_on() -> None:
    alarm = TeachingAlarm()
    assert sounds(alarm, [-0.1, -0.3] * 8) == ([False] * 7 + [True]) * 2
    first = TeachingAlarm()
    sounds(first, [-0.1, -0.3] * 3)
    resumed = TeachingAlarm(TeachingEvidence(first.evidence.recent))
    assert sounds(resumed, [-0.1, -0.3]) == [False, True]


def test_chance_alone_seldom_sounds_it() -> None:
    """400 runs of 100 steps with correlations of mean 0 and a spread of 0.2. Of a single look with 7 to 15 degrees of
    freedom, t < -4 has a probability of 0.26% to 0.06%; a run has 93 looks, which overlap in 15 of 16 steps."""
    generator = np.random.default_rng(0)
    runs = [any(sounds(TeachingAlarm(), generator.normal(0, 0.2, 100).tolist())) for _ in range(400)]
    assert sum(runs) <= 0.05 * len(runs)


def test_the_finding_names_the_key() -> None:
    assert ALARMS["teacher_disagrees"].key == ALARMS["feedback_leaks"].key == "distillation.feedback"
