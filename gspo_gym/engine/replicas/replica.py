"""One engine of several, as `router.py` sees it: who is there, what is under way, whether it may be asked.

Holds no policy of its own: the router decides, this remembers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from gspo_gym.base.circuit import CircuitBreaker
from gspo_gym.engine.base import Capabilities, Engine
from gspo_gym.engine.replicas.breaker import InFlightLimit
from gspo_gym.errors import EngineError
from gspo_gym.types import Completion


class Replica:
    """An engine with what is known about it.

    Attributes:
        number: its place among the replicas.
        left_out: why it takes no part, until it is found in order; None if it does.
        is_draining: it gets no new sessions.
        sessions: that it holds.
        rebuilding: the task that puts a fresh engine in its place, if one does.
    """

    def __init__(
        self, number: int, engine: Engine, *, max_in_flight: int, failures_to_open: int, cool_down_seconds: float
    ) -> None:
        self.number = number
        self.engine = engine
        self.breaker = CircuitBreaker(failures_to_open=failures_to_open, cool_down_seconds=cool_down_seconds)
        self.limit = InFlightLimit(max_in_flight)
        self.left_out: str | None = None
        self.is_draining = False
        self.sessions: set[str] = set()
        self.rebuilding: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Completion]] = set()

    @property
    def num_in_flight(self) -> int:
        """Calls that it has not answered."""
        return len(self._calls)

    def is_up(self, now: float) -> bool:
        """Whether it takes part and its breaker lets calls through, be it one at a time."""
        return self.left_out is None and self.breaker.state(now) != "open"

    def is_free(self, now: float) -> bool:
        """Whether it may be given another call now."""
        allowed = self.breaker.allows(now, self.num_in_flight) and self.num_in_flight < self.limit.limit
        return self.left_out is None and allowed

    async def run(self, call: Coroutine[Any, Any, Completion]) -> Completion:
        """Run a call so that `stop_calls` can end it (Any: nobody sends to it). Cancelling this cancels the call.

        Raises:
            EngineError: what the call raised, or that it was stopped.
        """
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(_note)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})  # what the call holds is freed before anybody goes on
            raise
        finally:
            self._calls.discard(task)
        if task.cancelled():
            raise EngineError("the replica stopped answering while the call was in flight")
        return task.result()

    def stop_calls(self) -> None:
        """End all calls in flight with EngineError."""
        for task in self._calls:
            task.cancel()

    def note_answer(self, num_in_flight: int) -> None:
        """A call was answered while so many were under way, itself included."""
        self.breaker.succeed()
        self.limit.succeed(num_in_flight)

    def note_timeout(self, begun: float, now: float) -> None:
        """A call made at `begun` ran out of time."""
        self.breaker.fail(now)
        self.limit.time_out(begun=begun, now=now)


def common_capabilities(all_of: Sequence[Capabilities]) -> Capabilities:
    """What every one of these promises; logprobs of different distributions are none that could be trained on.

    >>> both = common_capabilities([Capabilities(True, True, True, 512), Capabilities(True, False, True, 256)])
    >>> both.seeds_per_request, both.max_model_len
    (False, 256)
    """
    first = all_of[0]
    modes = {one.logprob_mode for one in all_of}
    return Capabilities(
        is_trainable=all(one.is_trainable for one in all_of) and len(modes) == 1,
        seeds_per_request=all(one.seeds_per_request for one in all_of),
        reuses_prefixes=all(one.reuses_prefixes for one in all_of),
        max_model_len=min(one.max_model_len for one in all_of),
        logprob_mode=first.logprob_mode if len(modes) == 1 else "none",
        reports_versions=all(one.reports_versions for one in all_of),
        update_kinds=tuple(kind for kind in first.update_kinds if all(kind in one.update_kinds for one in all_of)),
        pause_modes=tuple(mode for mode in first.pause_modes if all(mode in one.pause_modes for one in all_of)),
        has_checksums=all(one.has_checksums for one in all_of),
        structured_output=all(one.structured_output for one in all_of),
    )


def _note(task: asyncio.Task[Completion]) -> None:
    """Take the exception off a task whose end nobody may be waiting for any more."""
    if not task.cancelled():
        task.exception()
