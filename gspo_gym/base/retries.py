"""Retries of a call under a common budget, and a circuit breaker for a backend that keeps failing.

Waits are exponential, or as long as the server asks (`Retry-After`), with seeded jitter. Only an `AttemptError` is
tried again. The budget keeps many failing calls from becoming a storm of requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from gspo_gym.errors import ConfigError, GymError, ServiceError
from gspo_gym.seeding import generator

Result = TypeVar("Result")

Sleep = Callable[[float], Awaitable[object]]


class AttemptError(GymError, RuntimeError):
    """A failed attempt that may succeed if repeated.

    Attributes:
        kind: name in the counters: "connection", "timeout", "429", "502", "answer", ...
        retry_after_seconds: how long the server asks to wait, or None.
    """

    def __init__(self, message: str, *, kind: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Number of attempts and the waits between them.

    Attributes:
        max_attempts: of one call, including the first.
        first_delay_seconds, max_delay_seconds: the wait after the k-th failure is drawn from [d / 2, d] with d = first
            * 2**(k - 1), at most the maximum. Half of it is jitter, which spreads calls that failed together. Where the
            server asks for a wait w, which it tells all calls alike, it is drawn from [w, 1.5 w].
        max_retry_after_seconds: a server that asks for a longer wait is not asked again.
        budget_fraction, budget_reserve: retries of all calls together are at most reserve + fraction * calls, so an
            endpoint that is down gets (1 + fraction) times its load, not max_attempts times.
    """

    max_attempts: int = 8
    first_delay_seconds: float = 0.1
    max_delay_seconds: float = 5.0
    max_retry_after_seconds: float = 60.0
    budget_fraction: float = 0.5
    budget_reserve: int = 64

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.budget_reserve < 0 or self.budget_fraction < 0:
            raise ConfigError(
                "RetrySettings: expected max_attempts >= 1, budget_fraction >= 0 and budget_reserve >= 0, got "
                f"{self.max_attempts}, {self.budget_fraction} and {self.budget_reserve}"
            )
        if not 0 <= self.first_delay_seconds <= self.max_delay_seconds or self.max_retry_after_seconds < 0:
            raise ConfigError(
                "RetrySettings: expected 0 <= first_delay_seconds <= max_delay_seconds and max_retry_after_seconds "
                f">= 0, got {self.first_delay_seconds}, {self.max_delay_seconds} and {self.max_retry_after_seconds}"
            )


@dataclass(slots=True)
class RetryCounters:
    """Counts so far; num_attempts = num_calls + num_retries when no call is under way.

    `failures` counts failed attempts by kind, `num_failed_calls` the calls that gave up.
    """

    num_calls: int = 0
    num_attempts: int = 0
    num_retries: int = 0
    num_failed_calls: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Retries:
    """Runs calls with retries, within one event loop at a time.

    Args:
        settings: number of attempts and waits.
        gives_up_with: error of a call that makes no further attempt.
        seed: of the jitter.
        sleep: replaces the clock.
    """

    def __init__(
        self,
        settings: RetrySettings,
        *,
        gives_up_with: type[GymError] = ServiceError,
        seed: int = 0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self._gives_up_with = gives_up_with
        self.counters = RetryCounters()
        self._seed = seed
        self._sleep = sleep

    async def run(self, attempt: Callable[[int], Awaitable[Result]]) -> Result:
        """Return the result of the first successful attempt; `attempt` gets its number, from 0.

        Raises:
            GymError: `gives_up_with`, with the last failure and the reason to stop; or an error of an attempt that is
                no AttemptError.
        """
        counters = self.counters
        call = counters.num_calls
        counters.num_calls += 1
        for number in range(self.settings.max_attempts):
            counters.num_attempts += 1
            try:
                return await attempt(number)
            except AttemptError as error:
                counters.failures[error.kind] += 1
                reason = self._reason_to_stop(number + 1, error)
                if reason is not None:
                    counters.num_failed_calls += 1
                    raise self._gives_up_with(f"{error} ({reason})") from error
                counters.num_retries += 1
                await self._sleep(self._delay(call, number, error))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _reason_to_stop(self, num_attempts: int, error: AttemptError) -> str | None:
        settings, counters = self.settings, self.counters
        if num_attempts >= settings.max_attempts:
            return f"{num_attempts} attempts"
        wait_seconds = error.retry_after_seconds
        if wait_seconds is not None and wait_seconds > settings.max_retry_after_seconds:
            return f"it asks to wait {wait_seconds:g} seconds, more than max_retry_after_seconds"
        if counters.num_retries >= settings.budget_reserve + settings.budget_fraction * counters.num_calls:
            return f"the retry budget is spent: {counters.num_retries} retries in {counters.num_calls} calls"
        return None

    def _delay(self, call: int, number: int, error: AttemptError) -> float:
        settings = self.settings
        longest = min(settings.first_delay_seconds * 2.0**number, settings.max_delay_seconds)
        jitter = float(generator(self._seed, "retry", call, number).uniform(0.5, 1.0))
        # Never earlier than the server asks: 0.5 + drawn is at least 1.
        return max(jitter * longest, (0.5 + jitter) * (error.retry_after_seconds or 0.0))


BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Stops calls to a backend that fails again and again, and probes now and then whether it works.

    Closed: calls pass. After `failures_to_open` failures in a row it is open: no call passes for `cool_down_seconds`.
    Then it is half open: one call at a time passes, and its result decides. (Nygard, Release It!, 2007, chapter 5.)
    Time is passed in.

    >>> breaker = CircuitBreaker(failures_to_open=1, cool_down_seconds=5.0)
    >>> breaker.fail(now=0.0)
    >>> breaker.state(now=4.0), breaker.state(now=5.0)
    ('open', 'half_open')
    """

    def __init__(self, *, failures_to_open: int, cool_down_seconds: float) -> None:
        if failures_to_open < 1 or cool_down_seconds < 0:
            raise ConfigError(
                "CircuitBreaker: expected failures_to_open >= 1 and cool_down_seconds >= 0, got "
                f"{failures_to_open} and {cool_down_seconds:g}"
            )
        self._failures_to_open = failures_to_open
        self._cool_down_seconds = cool_down_seconds
        self._num_failures = 0  # in a row
        self._opened_at: float | None = None

    def state(self, now: float) -> BreakerState:
        """Return the state at a time, in seconds of any one monotonic clock."""
        if self._opened_at is None:
            return "closed"
        return "half_open" if now - self._opened_at >= self._cool_down_seconds else "open"

    def allows(self, now: float, num_in_flight: int) -> bool:
        """Return whether another call may be made beside those under way."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and num_in_flight == 0)

    def succeed(self) -> None:
        """Note an answered call, and close."""
        self._num_failures = 0
        self._opened_at = None

    def fail(self, now: float) -> None:
        """Note a failed call."""
        # While open, failures are of earlier calls and change nothing.
        self._num_failures += 1
        if self.state(now) == "half_open" or (self._opened_at is None and self._num_failures >= self._failures_to_open):
            self._opened_at = now
