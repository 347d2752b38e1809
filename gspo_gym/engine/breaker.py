"""Two guards of one backend among several: whether it may be asked now, and how many calls at once it is given.

Plain counting, without tasks or timers: time is handed in. Called by `router.py`, one pair for each replica.
"""

from __future__ import annotations

from typing import Literal

from gspo_gym.errors import ConfigError

BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Stops asking a backend that fails again and again, and finds out now and then whether it is back.

    Closed: calls pass. After `failures_to_open` failures in a row it is open: no call passes until `cool_down_seconds`
    later, when it is half open: one call at a time passes, and its end decides. (Nygard, Release It!, 2007, chapter 5.)

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
        self._opened: float | None = None

    def state(self, now: float) -> BreakerState:
        """At that time, in the seconds of any one monotonic clock."""
        if self._opened is None:
            return "closed"
        return "half_open" if now - self._opened >= self._cool_down_seconds else "open"

    def allows(self, now: float, num_in_flight: int) -> bool:
        """Whether another call may be made while so many are under way."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and num_in_flight == 0)

    def succeed(self) -> None:
        """A call was answered: whatever was, is over."""
        self._num_failures = 0
        self._opened = None

    def fail(self, now: float) -> None:
        """A call failed. Failures while it is open, of calls made before, change nothing."""
        self._num_failures += 1
        if self.state(now) == "half_open" or (self._opened is None and self._num_failures >= self._failures_to_open):
            self._opened = now


class InFlightLimit:
    """How many calls at once a backend is given: fewer when it is too slow, then one more for every round of answers.

    Additive increase, multiplicative decrease (Chiu and Jain, 1989): a call that ran out of time halves the limit, and
    `limit` answers in time while it was used to the full raise it by 1. It begins at the most, for calls that are few
    need no learning. Calls that were made before a decrease do not decrease it again: they were sent under the limit
    that was too high.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ConfigError(f"InFlightLimit: expected at least 1, got {most}")
        self.limit = most
        self._most = most
        self._num_in_time = 0
        self._decreased = float("-inf")

    def succeed(self, num_in_flight: int) -> None:
        """A call was answered in time while so many were under way, itself included."""
        if num_in_flight < self.limit or self.limit == self._most:
            return
        self._num_in_time += 1
        if self._num_in_time >= self.limit:
            self.limit, self._num_in_time = self.limit + 1, 0

    def time_out(self, *, begun: float, now: float) -> None:
        """A call made at `begun` ran out of time at `now`."""
        if begun < self._decreased:
            return
        self.limit, self._num_in_time = max(1, self.limit // 2), 0
        self._decreased = now
