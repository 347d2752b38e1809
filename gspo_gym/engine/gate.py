"""The gate of an engine, and the base class of the engines that have one, a router's replicas included.

Because every engine has the same gate, versions, pausing, poison, deadlines and aborts mean the same everywhere. All
methods are called in the event loop; an engine may be used by several loops one after another, not at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from gspo_gym.engine.base import Capabilities, EngineHealth, PauseMode, WeightUpdate
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError, EngineTimeoutError

# True for calls, made here or in tasks begun here, that attest an update.
_is_probe: ContextVar[bool] = ContextVar("is_probe", default=False)


@contextmanager
def probing() -> Iterator[None]:
    """Let the calls made within pass a paused gate, to see what the engine samples under uncommitted weights.

    An engine with a backend that pauses must let it run again when `apply_weights` ends; the gate keeps other calls
    out, and holds back the answers of calls that were in flight.
    """
    # A context variable and not an argument: it reaches the gate through any proxy before the engine.
    token = _is_probe.set(True)
    try:
        yield
    finally:
        _is_probe.reset(token)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the time that a call may take.

    Attributes:
        end: in the time of the running loop; None: never.
    """

    end: float | None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """Return the deadline that many seconds from now."""
        return cls(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def seconds_left(self) -> float | None:
        """Return the seconds from now, at least 0; None: without limit."""
        return None if self.end is None else max(self.end - asyncio.get_running_loop().time(), 0.0)

    def has_passed(self) -> bool:
        """Return whether no time is left."""
        seconds = self.seconds_left()
        return seconds is not None and seconds < 1e-3  # a loop's timers may fire that much early


class Gate:
    """Admits calls, unless it is paused (they wait), poisoned or closed (they raise).

    Attributes:
        num_in_flight: calls that were admitted and have not ended; waiting ones are not counted.
        weight_version: the last one committed.
        is_paused: between `pause` and `resume`.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.weight_version = 0
        self.is_paused = False
        self._reason: str | None = None
        self._is_closed = False
        self._is_changing = False  # between new weights and their commit
        self._waiting: list[asyncio.Future[None]] = []  # for resume; what poisons or closes cancels them
        self._draining: list[asyncio.Future[None]] = []  # for the last call in flight
        self._sessions: dict[asyncio.Task[object], str | None] = {}  # of the tasks that call, waiting or in flight
        self._aborted_tasks: set[asyncio.Task[object]] = set()
        self._stopped_tasks: set[asyncio.Task[object]] = set()  # in flight when the engine was poisoned or closed

    @asynccontextmanager
    async def admit(
        self, session_id: str | None = None, deadline_seconds: float | None = None
    ) -> AsyncIterator[Deadline]:
        """Admit one call: wait while paused, and end the call when it is aborted, poisoned or out of time.

        Raises:
            EngineTimeoutError, EnginePoisonedError, EngineError: see `Engine.generate`.
        """
        task = asyncio.current_task()
        assert task is not None
        deadline = Deadline.after(deadline_seconds)
        watchdog = asyncio.timeout_at(deadline.end)
        self._sessions[task] = session_id
        try:
            async with watchdog:
                await self._wait_for_admission()
                self.num_in_flight += 1
                try:
                    yield deadline
                    await self._wait_for_commit()
                finally:
                    self._leave()
        except TimeoutError as error:
            if not watchdog.expired():
                raise
            raise EngineTimeoutError(f"generate: no completion within {deadline_seconds:g} seconds") from error
        except asyncio.CancelledError:
            # A stopped call ends with the engine's reason, an aborted one with its own; others the caller cancelled.
            if task in self._stopped_tasks:
                task.uncancel()
                self.require_open()
            if task in self._aborted_tasks:
                task.uncancel()
                raise EngineError(f"session {session_id}: the call was aborted") from None
            raise
        finally:
            del self._sessions[task]
            self._aborted_tasks.discard(task)
            self._stopped_tasks.discard(task)

    def abort(self, session_id: str) -> None:
        """End the session's calls, waiting or in flight, with EngineError."""
        calls = {task for task, session in self._sessions.items() if session == session_id}
        for task in calls - self._aborted_tasks - self._stopped_tasks:
            self._aborted_tasks.add(task)
            task.cancel()

    def require_open(self) -> None:
        """Require that calls can be admitted, now or after a pause.

        Raises:
            EnginePoisonedError, EngineError: it is poisoned or closed.
        """
        if self._reason is not None:
            raise EnginePoisonedError(f"the engine is poisoned: {self._reason}")
        if self._is_closed:
            raise EngineError("the engine is closed")

    def pause(self) -> None:
        """Admit no calls until `resume`.

        Raises:
            EngineError: it is paused already: two updates at once.
        """
        self.require_open()
        if self.is_paused:
            raise EngineError("pause: the engine is paused already; one update at a time")
        self.is_paused = True

    async def drained(self) -> None:
        """Wait until no call is in flight."""
        while self.num_in_flight:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._draining.append(future)
            await future  # another call may have been admitted meanwhile
        self.require_open()

    def require_paused(self) -> None:
        """Require that an update has begun; from here to `resume` the weights are uncommitted.

        Raises:
            EngineError: none has. EnginePoisonedError: it has failed.
        """
        self.require_open()
        if not self.is_paused:
            raise EngineError("apply_weights: expected a paused engine; call pause first")
        self._is_changing = True

    def resume(self, version: int) -> None:
        """Admit again, under that version.

        Raises:
            EngineError, EnginePoisonedError: no update has begun, or it has failed.
        """
        self.require_paused()
        self.weight_version = version
        self.is_paused = self._is_changing = False
        _wake(self._waiting)

    def poison(self, reason: str) -> None:
        """Admit no calls ever again; those in flight end at once. The first reason counts."""
        # Later reasons are consequences of the first.
        if self._reason is not None:
            return
        self._reason = reason
        self._stop()

    def close(self) -> None:
        """Admit no calls ever again; those in flight end at once."""
        if not self._is_closed:
            self._is_closed = True
            self._stop()

    def health(self, failure: str | None = None) -> EngineHealth:
        """Return the state; `failure` says why the engine behind the gate is dead, None if it is not."""
        return EngineHealth(
            is_alive=failure is None and not self._is_closed,
            is_poisoned=self._reason is not None,
            num_in_flight=self.num_in_flight,
            weight_version=self.weight_version,
            reason=self._reason or failure or ("closed" if self._is_closed else None),
        )

    def _stop(self) -> None:
        for task in self._sessions.keys() - self._aborted_tasks - self._stopped_tasks:
            self._stopped_tasks.add(task)
            task.cancel()
        _wake(self._draining)  # they wait for calls that end now, and find out why

    def _leave(self) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            _wake(self._draining)

    async def _wait_for_admission(self) -> None:
        self.require_open()
        while self.is_paused and not _is_probe.get():
            await self._wait_for_resume()

    async def _wait_for_commit(self) -> None:
        # A call that was kept over an update may have sampled under weights that are not attested yet.
        while self._is_changing and not _is_probe.get():
            await self._wait_for_resume()

    async def _wait_for_resume(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


def _wake(futures: list[asyncio.Future[None]]) -> None:
    while futures:
        future = futures.pop(0)
        if not future.done():
            future.set_result(None)


class GatedEngine(ABC):
    """The common part of engines; a subclass adds the model behind the gate."""

    def __init__(self) -> None:
        self._gate = Gate()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @property
    def weight_version(self) -> int:
        return self._gate.weight_version

    async def abort(self, session_id: str) -> None:
        """Give up the session's calls; see `Engine.abort`."""
        self._gate.abort(session_id)

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update; with "wait", return when no call is in flight; see `Engine.pause`."""
        self._close_to_calls(mode)
        if mode == "wait":
            await self._gate.drained()

    async def checksums(self) -> Mapping[str, str]:
        """Return {}: the weights have no digests; see `Engine.checksums`."""
        return {}

    async def resume(self, version: int) -> None:
        """Commit and admit again; see `Engine.resume`."""
        self._gate.resume(version)

    def poison(self, reason: str) -> None:
        """Never answer again; see `Engine.poison`."""
        self._gate.poison(reason)

    async def health(self) -> EngineHealth:
        """Return the health of the gate; see `Engine.health`."""
        return self._gate.health()

    async def end_session(self, session_id: str) -> None:  # noqa: B027  not abstract: most engines keep nothing
        """Do nothing: nothing is kept for sessions; see `Engine.end_session`."""

    async def forget_ended(self) -> None:  # noqa: B027  as above
        """Do nothing; see `Engine.forget_ended`."""

    def _close_to_calls(self, mode: PauseMode) -> None:
        # Checked first, because a wrong mode must not leave the engine paused.
        if mode not in (modes := self.capabilities.pause_modes):
            mode_names = " or ".join(map(repr, modes))
            raise ConfigError(f"{type(self).__name__}.pause: expected mode {mode_names}, got {mode!r}")
        self._gate.pause()

    def _require_kind(self, update: WeightUpdate) -> None:
        if update.kind not in (kinds := self.capabilities.update_kinds):
            kind_names = " or ".join(map(repr, kinds)) or "none"
            raise ConfigError(f"{type(self).__name__}: expected an update of kind {kind_names}, got {update.kind!r}")

    async def _close_gate(self) -> None:
        self._gate.close()
        with suppress(EngineError):  # which `drained` raises at its end, because the gate is closed
            await self._gate.drained()
