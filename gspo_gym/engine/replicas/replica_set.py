"""The replicas behind a router: their sessions, health and calls in flight.

`router.py` decides what is generated and how weights change; this file keeps the books.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.base.loops import retrieve_exception, wait_or_cancel
from gspo_gym.base.retries import CircuitBreaker
from gspo_gym.engine.base import Capabilities, Engine, EngineHealth
from gspo_gym.errors import ConfigError, EngineError, EngineLostError
from gspo_gym.types import Completion

_log = logging.getLogger(__name__)

# Something to do with one replica's engine.
EngineAction = Callable[[Engine], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of how replicas are watched. None of them changes what is sampled.

    Attributes:
        max_in_flight: calls at once for one replica, at most; see `InFlightLimit`.
        failures_to_open: failures in a row after which a replica is not asked. Three: a lost connection costs one, and
            each costs a call that is made again.
        cool_down_seconds: until one call may find out whether it is back.
        health_interval_seconds: between health checks, while there are calls; also the time limit of an answer.
        max_wait_seconds: that a call waits for a replica that may be asked, before it raises.
    """

    max_in_flight: int = 256
    failures_to_open: int = 3
    cool_down_seconds: float = 5.0
    health_interval_seconds: float = 5.0
    max_wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.health_interval_seconds <= 0 or self.max_wait_seconds < 0:
            raise ConfigError(
                "RouterSettings: expected health_interval_seconds > 0 and max_wait_seconds >= 0, got "
                f"{self.health_interval_seconds:g} and {self.max_wait_seconds:g}"
            )


class ReplicaSet:
    """Replicas by number, and the sessions they hold.

    Args:
        engines: one for each. settings: how they are watched. clock: seconds, monotonic. sleep: waits by it.
        committed_version: returns the version that every replica must be under now; None while an update is under way.

    Attributes:
        rebuild: puts a fresh engine behind a replica that is left out; None: nothing does.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: RouterSettings,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        committed_version: Callable[[], int | None],
    ) -> None:
        self.rebuild: EngineAction | None = None
        watched = (settings.max_in_flight, settings.failures_to_open, settings.cool_down_seconds)
        self.all = tuple(Replica(number, engine, *watched) for number, engine in enumerate(engines))
        self._settings = settings
        self._clock, self._sleep = clock, sleep
        self._committed_version = committed_version
        self._homes: dict[str, list[Replica]] = {}  # of a session: where it was, and last where it is
        self._waiting: list[asyncio.Future[None]] = []  # for anything to change
        self._monitor: asyncio.Task[None] | None = None
        self._watch_error: Exception | None = None
        self._num_calls = 0
        self._checked = clock()

    @property
    def members(self) -> Sequence[Replica]:
        """Return the replicas that are not left out."""
        return [replica for replica in self.all if replica.left_out is None]

    def choose(self, session_id: str | None, among: Sequence[Replica]) -> Replica | None:
        """Return the session's replica, else the one with fewest sessions, then calls, then number; None: wait."""
        now = self._clock()
        home = self._homes[session_id][-1] if session_id in self._homes else None
        if home is not None and home in among and home.is_up(now):
            return home if home.is_free(now) else None  # waiting is cheaper than computing the prefix again
        free = [replica for replica in among if replica.is_free(now)]
        return min(free, key=lambda r: (len(r.sessions), r.num_in_flight, r.number), default=None)

    def settle(self, session_id: str | None, replica: Replica) -> None:
        """Make the replica the session's home."""
        if session_id is None:
            return
        homes = self._homes.setdefault(session_id, [])
        for former in homes:
            former.sessions.discard(session_id)
        if replica in homes:
            homes.remove(replica)
        homes.append(replica)
        replica.sessions.add(session_id)

    async def end_session(self, session_id: str) -> None:
        """Forget a session, on every replica that has seen it; dead ones have forgotten it already."""
        homes = self._homes.pop(session_id, [])
        for replica in homes:
            replica.sessions.discard(session_id)
        self.wake()
        for replica in homes:
            # Dead ones have forgotten it already.
            with contextlib.suppress(EngineError):
                await replica.engine.end_session(session_id)

    def require_hope(self, among: Sequence[Replica], *, since: float, failures: Sequence[str]) -> None:
        """Require that one of these may be free again, and that one was up within `max_wait_seconds` of `since`.

        Raises:
            EngineLostError: repeats `failures`.
        """
        now = self._clock()
        may_come = [replica for replica in among if replica.left_out is None or self.rebuild is not None]
        # A replica that can be rebuilt may come back; without that, a replica that is left out never does.
        is_late = now - since >= self._settings.max_wait_seconds
        if not may_come or (is_late and not any(replica.is_up(now) for replica in may_come)):
            raise EngineLostError("; ".join([*failures, "no replica can be asked"]))

    def leave_out(self, replica: Replica, reason: str) -> None:
        """Leave a replica out until a health check finds it in order, which takes a fresh engine."""
        if replica.left_out is None:
            _log.warning("replica %d is left out: %s", replica.number, reason)
        replica.left_out = reason
        replica.engine.poison(reason)  # whatever it still answers must not be used
        replica.stop_calls()
        self.wake()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Check health while a call runs; no task is left in the loop when there are no calls."""
        self._num_calls += 1
        if self._num_calls == 1:
            self._monitor = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0 and self._monitor is not None:
                self._monitor.cancel()

    async def check_health(self) -> None:
        """Ask every replica how it is.

        A dead one has failed once more; if its breaker opens, its calls are made elsewhere.
        """
        await asyncio.gather(*(self._check(replica) for replica in self.all))
        self._checked = self._clock()
        self.wake()

    async def change(self) -> None:
        """Wait until something was answered, left out, readmitted or checked.

        Raises:
            EngineError: the health checks have ended, and nothing may ever change.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future
        if self._watch_error is not None:
            raise EngineError(f"the health checks of the replicas ended: {self._watch_error!r}") from self._watch_error

    def wake(self) -> None:
        """Let calls that wait for a change look again, in their order."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def close(self) -> None:
        """Close every replica."""
        for replica in self.all:
            if replica.rebuilding is not None:
                replica.rebuilding.cancel()
                await asyncio.wait({replica.rebuilding})  # a rebuild holds an engine that is not in place yet
            await replica.engine.close()

    async def _watch(self) -> None:
        self._watch_error = None
        try:
            while True:
                await self._sleep(self._checked + self._settings.health_interval_seconds - self._clock())
                await self.check_health()
        except Exception as error:  # a defect of ours, which calls that wait raise, because this task is not awaited
            self._watch_error = error
            self.wake()

    async def _check(self, replica: Replica) -> None:
        version = self._committed_version()
        health = await self._health_if_alive(replica.engine)
        if version is None or version != self._committed_version():
            return  # an update is under way, which may leave the replica in any state
        if health is not None and not health.is_poisoned and health.weight_version == version:
            replica.left_out = None
        # Left out and not in order: it takes a fresh engine.
        elif replica.left_out is not None:
            self._begin_rebuild(replica)
        elif health is not None:
            self.leave_out(replica, health.reason or f"it is under version {health.weight_version}, not {version}")
        else:
            replica.breaker.fail(self._clock())
            if not replica.is_up(self._clock()):
                replica.stop_calls()

    async def _health_if_alive(self, engine: Engine) -> EngineHealth | None:
        # Whatever a broken engine raises means that it cannot be asked.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._settings.health_interval_seconds):
                health = await engine.health()
            return health if health.is_alive else None
        return None

    def _begin_rebuild(self, replica: Replica) -> None:
        if self.rebuild is not None and replica.rebuilding is None:
            replica.rebuilding = asyncio.create_task(self._rebuild(replica, self.rebuild))

    async def _rebuild(self, replica: Replica, rebuild: EngineAction) -> None:
        try:
            await rebuild(replica.engine)
        except Exception as error:  # tried again after the next health check
            reason = f"{type(error).__name__}: {error}"
            if reason != replica.not_rebuilt:  # else it would be said every second
                _log.warning("replica %d cannot be rebuilt: %s", replica.number, reason)
            replica.not_rebuilt = reason
        finally:
            replica.rebuilding = None


class Replica:
    """An engine with its sessions, its calls and its failures.

    Attributes:
        number: its place among the replicas.
        left_out: why it takes no part, until it is found in order; None if it takes part.
        sessions: that it holds.
        rebuilding: the task that replaces its engine, if there is one.
        not_rebuilt: why the last such task failed.
    """

    def __init__(
        self, number: int, engine: Engine, max_in_flight: int, failures_to_open: int, cool_down_seconds: float
    ) -> None:
        self.number = number
        self.engine = engine
        self.breaker = CircuitBreaker(failures_to_open=failures_to_open, cool_down_seconds=cool_down_seconds)
        self.limit = InFlightLimit(max_in_flight)
        self.left_out: str | None = None
        self.sessions: set[str] = set()
        self.rebuilding: asyncio.Task[None] | None = None
        self.not_rebuilt: str | None = None
        self._calls: set[asyncio.Task[Completion]] = set()

    @property
    def num_in_flight(self) -> int:
        """Return the number of calls that it has not answered."""
        return len(self._calls)

    def is_up(self, now: float) -> bool:
        """Return whether it takes part and its breaker lets calls through, perhaps one at a time."""
        return self.left_out is None and self.breaker.state(now) != "open"

    def is_free(self, now: float) -> bool:
        """Return whether it may be given another call now."""
        allowed = self.breaker.allows(now, self.num_in_flight) and self.num_in_flight < self.limit.limit
        return self.left_out is None and allowed

    async def run(self, call: Coroutine[Any, Any, Completion]) -> Completion:
        """Run a call that `stop_calls` can end (Any: nothing is sent to it). Cancelling this cancels the call.

        Raises:
            EngineError: the call raised it. EngineLostError: it was stopped.
        """
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(retrieve_exception)
        try:
            await wait_or_cancel(task)
        finally:
            self._calls.discard(task)
        if task.cancelled():
            raise EngineLostError("the replica stopped answering while the call was in flight")
        return task.result()

    def stop_calls(self) -> None:
        """End all calls in flight with EngineLostError."""
        for task in self._calls:
            task.cancel()

    def note_answer(self, num_in_flight: int) -> None:
        """Count a call that was answered while so many were under way, itself included."""
        self.breaker.succeed()
        self.limit.succeed(num_in_flight)

    def note_timeout(self, begun: float, now: float) -> None:
        """Count a call made at `begun` that ran out of time."""
        self.breaker.fail(now)
        self.limit.time_out(begun=begun, now=now)


def common_capabilities(all_of: Sequence[Capabilities]) -> Capabilities:
    """Return what all of these promise; logprobs of different distributions cannot be trained on.

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
        num_copies=sum(one.num_copies for one in all_of),
    )


class InFlightLimit:
    """Limit of calls in flight: lower when the backend is too slow, then one more for every round of answers.

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
        """Count a call that was answered in time while so many were under way, itself included."""
        # Answers below the limit say nothing about a higher one.
        if num_in_flight < self.limit or self.limit == self._most:
            return
        self._num_in_time += 1
        if self._num_in_time >= self.limit:
            self._set(self.limit + 1)

    def time_out(self, *, begun: float, now: float) -> None:
        """Count a call made at `begun` that ran out of time at `now`."""
        if begun < self._decreased:  # sent under the limit that was too high
            return
        self._set(max(1, self.limit // 2))
        self._decreased = now

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._num_in_time = 0  # answers count towards the limit under which they were made
