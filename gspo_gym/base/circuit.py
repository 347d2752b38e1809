"""Whether a backend that keeps failing may be asked now.

Plain counting, without tasks or timers: time is handed in. Called by the engines' router, one for each replica, and by
judges.
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
