"""The rollouts of a task app: how many play at once, which are under way, and how one is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo_gym.remote.guard import RefusalError

Status = Literal["waiting", "running", "succeeded", "failed", "aborted"]
_MAX_REMEMBERED = 10_000  # ended runs


@dataclass(slots=True, eq=False)
class Run:
    """One rollout. `abort_requested` is set when it should stop; times are the wall clock's, for people."""

    run_id: str
    status: Status = "waiting"
    started_at: str = field(default_factory=lambda: _now())
    finished_at: str | None = None
    abort_requested: asyncio.Event = field(default_factory=asyncio.Event)

    def to_wire(self) -> dict[str, Any]:
        """Return the answer to GET /run/status/{run_id}."""
        times = {"started_at": self.started_at, "finished_at": self.finished_at}
        return {"run_id": self.run_id, "status": self.status, **times}


class Runs:
    """The rollouts under way, and those that ended not long ago.

    Args:
        max_running: at once. max_waiting: for a place; one more is turned away.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._max_waiting, self._num_waiting = max_waiting, 0
        self._runs: OrderedDict[str, Run] = OrderedDict()

    @contextlib.asynccontextmanager
    async def begin(self, run_id: str) -> AsyncIterator[Run]:
        """Register a run that ends with the block; `place` then waits for its turn.

        Raises:
            RefusalError: that run is under way already, or too many are waiting.
        """
        known = self._runs.get(run_id)
        if known is not None and known.finished_at is None:
            raise RefusalError(409, "run_exists", f"run {run_id!r} is under way; a run id names one attempt")
        if self._num_waiting >= self._max_waiting:
            raise RefusalError(503, "overloaded", f"{self._num_waiting} rollouts are waiting for a place; try again")
        run = self._runs[run_id] = Run(run_id)
        self._runs.move_to_end(run_id)
        try:
            yield run
        finally:
            run.finished_at = _now()
            if run.status in ("waiting", "running"):  # it left the block by an exception
                run.status = "failed"
            self._forget_old()

    @contextlib.asynccontextmanager
    async def place(self, run: Run) -> AsyncIterator[None]:
        """Wait until the run may be played."""
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            run.status = "running"
            yield
        finally:
            self._places.release()

    def get(self, run_id: str) -> Run:
        """Return a run that is under way or ended not long ago.

        Raises:
            RefusalError: there is none.
        """
        if run_id not in self._runs:
            raise RefusalError(404, "unknown_run", f"there is no run {run_id!r}")
        return self._runs[run_id]

    async def stop_all(self) -> None:
        """Tell all to stop."""
        for run in self._runs.values():
            run.abort_requested.set()

    def _forget_old(self) -> None:
        for run_id in list(self._runs)[: max(0, len(self._runs) - _MAX_REMEMBERED)]:
            if self._runs[run_id].finished_at is not None:
                del self._runs[run_id]


async def until_stopped(
    playing: Coroutine[Any, Any, None], *stops: Coroutine[Any, Any, Any], timeout_seconds: float
) -> bool:
    """Return whether `playing` finished; it is cancelled if one of `stops` ends first, or the time is up.

    Raises:
        Exception: what `playing` raised, or one of `stops`.
    """
    task = asyncio.ensure_future(playing)
    watching = [asyncio.ensure_future(stop) for stop in stops]
    try:
        await asyncio.wait({task, *watching}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done, ended = task.done(), [stop for stop in watching if stop.done()]
        for each in (task, *watching):
            each.cancel()
        await asyncio.gather(task, *watching, return_exceptions=True)  # until the environment is closed
    for each in (task,) if is_done else ended:
        each.result()
    return is_done


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
