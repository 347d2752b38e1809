"""How many calls at once one backend among several is given; whether it may be asked at all is `circuit.py`'s.

Plain counting, without tasks or timers: time is handed in. Called by `router.py`, one for each replica.
"""

from __future__ import annotations

from gspo_gym.errors import ConfigError


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
        self._most = most
        self._set(most)
        self._decreased = float("-inf")

    def succeed(self, num_in_flight: int) -> None:
        """A call was answered in time while so many were under way, itself included."""
        if num_in_flight < self.limit or self.limit == self._most:
            return
        self._num_in_time += 1
        if self._num_in_time >= self.limit:
            self._set(self.limit + 1)

    def time_out(self, *, begun: float, now: float) -> None:
        """A call made at `begun` ran out of time at `now`."""
        if begun < self._decreased:
            return
        self._set(max(1, self.limit // 2))
        self._decreased = now

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._num_in_time = 0  # answers count towards the limit under which they were made
