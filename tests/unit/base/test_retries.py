"""Retries: how many, how long between, and when to stop; the clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from gspo_gym.base.http import retry_after_seconds
from gspo_gym.base.retries import AttemptError, Retries, RetrySettings
from gspo_gym.errors import ConfigError, ServiceError


class Clock:
    """Waits without waiting, and remembers for how long."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def run(retries: Retries, attempt: Callable[[int], int]) -> int:
    async def attempt_later(number: int) -> int:
        return attempt(number)

    return asyncio.run(retries.run(attempt_later))


def failing(times: int, *, kind: str = "500", retry_after: float | None = None) -> Callable[[int], int]:
    """Fails so many times and then gives the attempt's number."""

    def attempt(number: int) -> int:
        if number < times:
            raise AttemptError(f"failure {number}", kind=kind, retry_after_seconds=retry_after)
        return number

    return attempt


def test_the_first_success_ends_a_call_and_everything_is_counted() -> None:
    clock = Clock()
    retries = Retries(RetrySettings(), sleep=clock.sleep)
    assert [run(retries, failing(0)), run(retries, failing(3)), run(retries, failing(1, kind="timeout"))] == [0, 3, 1]
    counters = retries.counters
    assert (counters.num_calls, counters.num_attempts, counters.num_retries) == (3, 1 + 4 + 2, 3 + 1)
    assert (counters.failures, counters.num_failed_calls) == ({"500": 3, "timeout": 1}, 0)
    assert len(clock.waits) == 4


def test_waits_double_with_half_of_them_jitter_and_end_at_the_longest() -> None:
    clock = Clock()
    settings = RetrySettings(max_attempts=6, first_delay_seconds=1.0, max_delay_seconds=4.0)
    run(Retries(settings, sleep=clock.sleep), failing(5))
    for wait, longest in zip(clock.waits, [1.0, 2.0, 4.0, 4.0, 4.0], strict=True):
        assert longest / 2 <= wait <= longest
    assert len(set(clock.waits[2:])) == 3  # three draws from [2, 4]


def test_jitter_comes_from_the_seed_and_differs_between_calls() -> None:
    def waits(seed: int) -> list[float]:
        clock = Clock()
        retries = Retries(RetrySettings(), seed=seed, sleep=clock.sleep)
        run(retries, failing(2))
        run(retries, failing(2))
        return clock.waits

    assert waits(1) == waits(1)
    assert waits(1) != waits(2)
    assert waits(1)[:2] != waits(1)[2:]


def test_the_servers_wait_is_kept_unless_it_is_longer_than_allowed() -> None:
    clock = Clock()
    settings = RetrySettings(first_delay_seconds=0.1, max_retry_after_seconds=10.0)
    retries = Retries(settings, sleep=clock.sleep)
    run(retries, failing(1, kind="429", retry_after=7.5))
    (wait,) = clock.waits
    assert 7.5 <= wait <= 11.25
    with pytest.raises(
        ServiceError, match=r"failure 0 \(it asks to wait 11 seconds, more than max_retry_after_seconds"
    ):
        run(retries, failing(1, kind="429", retry_after=11.0))
    assert clock.waits == [wait]
    run(retries, failing(1, kind="429", retry_after=0.0))  # "now" is not sooner than everybody else's wait
    assert clock.waits[1] >= 0.05


def test_calls_that_a_server_sends_away_together_do_not_come_back_together() -> None:
    clock = Clock()
    retries = Retries(RetrySettings(), sleep=clock.sleep)
    for _ in range(64):
        run(retries, failing(1, kind="503", retry_after=10.0))
    waits = sorted(clock.waits)
    assert 10 <= waits[0] < waits[-1] <= 15
    # 64 uniform draws from 5 seconds: a gap of 1.5 s anywhere has a probability below 64 * 0.7**63 = 1e-8.
    assert max(np.diff([10.0, *waits, 15.0])) < 1.5


def test_the_last_failure_is_the_calls_and_is_no_longer_retryable() -> None:
    retries = Retries(RetrySettings(max_attempts=3), sleep=Clock().sleep)
    with pytest.raises(ServiceError, match=r"failure 2 \(3 attempts\)") as caught:
        run(retries, failing(9))
    assert not isinstance(caught.value, AttemptError)
    assert retries.counters.num_failed_calls == 1


def test_only_attempt_errors_are_tried_again() -> None:
    calls = []

    def attempt(number: int) -> int:
        calls.append(number)
        raise ServiceError("refused")

    with pytest.raises(ServiceError, match="refused"):
        run(Retries(RetrySettings(), sleep=Clock().sleep), attempt)
    assert calls == [0]


def test_the_budget_bounds_the_retries_of_all_calls_together() -> None:
    """100 calls of 8 attempts to a dead endpoint: 100 first attempts and 5 + 0.1 * calls retries, not 700."""
    retries = Retries(RetrySettings(budget_fraction=0.1, budget_reserve=5), sleep=Clock().sleep)
    for _ in range(100):
        with pytest.raises(ServiceError, match=r"\((8 attempts|the retry budget is spent: \d+ retries in \d+ calls)\)"):
            run(retries, failing(99))
    assert retries.counters.num_calls == 100
    assert retries.counters.num_attempts <= 100 + 5 + 0.1 * 100 + 1
    assert retries.counters.num_failed_calls == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"first_delay_seconds": 6.0},  # longer than the longest
        {"first_delay_seconds": -1.0},
        {"max_retry_after_seconds": -1.0},
        {"budget_fraction": -0.1},
        {"budget_reserve": -1},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="RetrySettings: expected"):
        RetrySettings(**wrong)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        # RFC 9110's own example date, 90 seconds after the answer's.
        ({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT", "date": "Fri, 31 Dec 1999 23:58:29 GMT"}, 90.0),
        ({"retry-after": "Fri, 31 Dec 1999 23:58:29 GMT", "date": "Fri, 31 Dec 1999 23:59:59 GMT"}, 0.0),
        ({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers) == seconds
