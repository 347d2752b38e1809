"""Daemon threads for synchronous environment code, so a slow or hanging call blocks no other environment.

A thread has one owner at a time (an `EnvSession`, or a `ToolEnv` with time limits), because libraries such as sqlite3
tie objects to the thread that made them. Later owners reuse it, unless a call in it missed its deadline: then it is
abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAX_IDLE = 256  # threads kept for later owners


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a call: its value, or the error that it raised."""

    value: Any
    error: BaseException | None

    def unwrap(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class Worker:
    """A daemon thread that makes calls one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Returned], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="gspo-gym-env").start()

    def submit(self, function: Callable[[], Any], on_returned: Callable[[Returned], Any]) -> None:
        """Call `function` after all earlier calls, then `on_returned`, which must not raise."""
        self._jobs.put((function, on_returned))

    def stop(self) -> None:
        """End the thread after the submitted calls."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, on_returned = job
            try:
                returned = Returned(function(), None)
            except BaseException as error:  # SystemExit too: the environment failed, the thread goes on
                returned = Returned(None, error)
            on_returned(returned)
            del job, function, on_returned, returned  # an idle thread keeps no environment alive


class WorkerPool:
    """Idle workers, waiting for their next owner."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []  # append and pop are atomic

    def lease(self) -> Worker:
        """Return an idle worker, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            return Worker()

    def give_back(self, worker: Worker) -> None:
        """Take back an idle worker."""
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(worker)
        else:
            worker.stop()

    def forget(self) -> None:
        """Drop the idle workers; after a fork their threads do not exist."""
        self._idle = []


# Module state: threads are a resource of the process, shared by all sessions.
_POOL = WorkerPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.forget)


class OwnThread:
    """The thread of one owner, from the first call until `release` or garbage collection."""

    def __init__(self, pool: WorkerPool = _POOL) -> None:
        self._pool = pool
        self._worker: Worker | None = None
        self._finalizer: weakref.finalize[[Worker], OwnThread] | None = None

    def call(self, function: Callable[[], Any], *, timeout_seconds: float | None) -> Returned:
        """Make the call in the thread and wait; None waits without limit.

        An error of `function` is in the result; a TimeoutError says that the deadline passed. Call `abandon` then.
        """
        box: queue.SimpleQueue[Returned] = queue.SimpleQueue()
        self._lease().submit(function, box.put)
        try:
            return box.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError from None

    async def call_async(self, function: Callable[[], Any], *, timeout_seconds: float | None) -> Returned:
        """Like `call`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Returned] = loop.create_future()

        def tell(returned: Returned) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
                loop.call_soon_threadsafe(_settle, future, returned)

        self._lease().submit(function, tell)
        async with asyncio.timeout(timeout_seconds):
            return await future

    def abandon(self, last_call: Callable[[], Any] | None = None) -> None:
        """Leave the thread alone; if its call ever returns, it makes `last_call` and ends."""
        worker = self._detach()
        if worker is not None:
            if last_call is not None:
                worker.submit(last_call, _ignore)
            worker.stop()

    def release(self) -> None:
        """Return the idle thread to the pool."""
        worker = self._detach()
        if worker is not None:
            self._pool.give_back(worker)

    def _lease(self) -> Worker:
        if self._worker is None:
            self._worker = self._pool.lease()
            self._finalizer = weakref.finalize(self, self._pool.give_back, self._worker)
            self._finalizer.atexit = False
        return self._worker

    def _detach(self) -> Worker | None:
        worker, self._worker = self._worker, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        return worker


def _settle(future: asyncio.Future[Returned], returned: Returned) -> None:
    if not future.done():  # cancelled: the deadline passed, or the episode was stopped
        future.set_result(returned)


def _ignore(_: Returned) -> None: ...
