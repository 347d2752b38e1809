"""When the alarm sounds: which number it judges, which batches it judges, and when it becomes an error."""

from __future__ import annotations

import math

import pytest

from gspo_gym.diagnosis.alarms import MismatchAlarm
from gspo_gym.errors import EngineMismatchError


def metrics(gap: float, kl: float = 0.0) -> dict[str, float]:
    return {"kl/rollout_max_gap": gap, "kl/rollout_k3": kl}


def test_in_float32_the_largest_gap_is_judged_and_1e_4_is_rounding() -> None:
    alarm = MismatchAlarm()
    assert alarm.check(metrics(1e-4, kl=1.0), sampled_under={0}, version=0) is None
    reason = alarm.check(metrics(1.1e-4), sampled_under={0}, version=0)
    assert reason == "a logprob of the engine is 0.00011 nats from the learner's; expected at most 0.0001"


def test_in_16_bits_the_mean_divergence_is_judged_unless_a_gap_is_given() -> None:
    assert MismatchAlarm(has_16_bits=True).check(metrics(3.0, kl=0.01), sampled_under={0}, version=0) is None
    reason = MismatchAlarm(has_16_bits=True).check(metrics(0.0, kl=0.011), sampled_under={0}, version=0)
    assert reason == "the engine's KL divergence from the learner is 0.011 nats; expected at most 0.01"
    given = MismatchAlarm(max_gap=0.5, has_16_bits=True)
    assert given.check(metrics(0.4, kl=1.0), sampled_under={0}, version=0) is None
    assert given.check(metrics(0.6), sampled_under={0}, version=0) is not None


@pytest.mark.parametrize("bad", [metrics(math.nan), metrics(math.inf)])
def test_what_is_no_number_is_an_alarm(bad: dict[str, float]) -> None:
    assert MismatchAlarm().check(bad, sampled_under={0}, version=0) is not None


def test_a_batch_with_older_tokens_or_without_trained_ones_is_not_judged() -> None:
    alarm = MismatchAlarm(patience=0)
    assert alarm.check(metrics(1.0), sampled_under={3, 4}, version=4) is None
    assert alarm.check(metrics(1.0), sampled_under={3}, version=4) is None
    assert alarm.check({}, sampled_under={4}, version=4) is None
    assert alarm.check(metrics(1.0), sampled_under=set(), version=4) is None


def test_the_third_alarm_in_a_row_is_an_error_and_a_sound_batch_ends_the_row() -> None:
    alarm = MismatchAlarm()
    for gap in (1.0, 1.0, 0.0, 1.0, 1.0):
        alarm.check(metrics(gap), sampled_under={0}, version=0)
    with pytest.raises(EngineMismatchError, match=r"in 3 batches in a row a logprob .* correction\.max_engine_gap"):
        alarm.check(metrics(1.0), sampled_under={0}, version=0)
