"""Time for loading what environments need, which counts against no single environment.

Importing a package or reading a data set may take a minute, and sixteen worker processes that do it together share the
cores; all would miss a limit for making one environment. The first load of each kind therefore has a separate limit
while the others wait with stopped clocks. A later load in another process gets time by how long the first one took and
how many load beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gspo_gym.errors import EnvError

FIRST_LOAD_SECONDS = 300.0  # packages may be large
_LOOK_SECONDS = 0.2  # between two looks of a waiting thread whether it was given up
_SLACK = 2.0  # later loads share the machine, the first did not


class Making:
    """The clock of one environment that is made in another thread; create it in the running event loop.

    `seconds` limit making it without the loads. Enter `timeout` around waiting for it; `is_given_up` says that nothing
    waits for it any more.
    """

    def __init__(self, seconds: float | None) -> None:
        self.timeout = asyncio.timeout(seconds)
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self.is_given_up = False
        self._depth = 0  # of nested `stopped` blocks

    def run(self, factory: Callable[[], Any]) -> Any:
        """Call `factory` with this clock as the clock of the current thread."""
        _OF_THREAD.making = self
        try:
            return factory()
        finally:
            _OF_THREAD.making = None

    def give_up(self) -> None:
        """Give the environment up: stop waiting for loads and let the clock run. Call it in the event loop."""
        self.restart(self._seconds)
        self.is_given_up = True

    def restart(self, seconds: float | None) -> None:
        """Allow `seconds` from now on. Call it in the event loop."""
        if not self.is_given_up:
            with contextlib.suppress(RuntimeError):  # the timeout has expired already
                self.timeout.reschedule(None if seconds is None else self._loop.time() + seconds)

    @contextlib.contextmanager
    def stopped(self, seconds: float | None = None) -> Iterator[None]:
        """Stop the clock during the block, or allow it `seconds`, then start anew. Call it in the thread."""
        self._depth += 1
        self._restart_from_thread(seconds)
        try:
            yield
        finally:
            self._depth -= 1
            self._restart_from_thread(None if self._depth else self._seconds)

    def _restart_from_thread(self, seconds: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
            self._loop.call_soon_threadsafe(self.restart, seconds)


class Loading:
    """The loads of this program by key, with the time of the slowest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[str, threading.Lock] = {}
        self._slowest_seconds: dict[str, float] = {}
        self._num_started = 0
        self._num_ended = 0

    @contextlib.contextmanager
    def once(self, key: str) -> Iterator[bool]:
        """Let one thread load `key` while others wait; yield whether it is this one.

        Waiting is not charged to an environment, and the load has `FIRST_LOAD_SECONDS`. The others stop waiting when
        the first load ends, even by a failure, or after that time.
        """
        if key in self._slowest_seconds:
            yield False
            return
        with self._lock:
            first = self._first.setdefault(key, threading.Lock())
        with contextlib.ExitStack() as stack:
            is_held = stack.enter_context(waiting_for(first, seconds=FIRST_LOAD_SECONDS))
            is_first = is_held and key not in self._slowest_seconds
            if is_first:
                stack.enter_context(self._first_of(key))
            else:
                stack.close()
            yield is_first

    @contextlib.contextmanager
    def _first_of(self, key: str) -> Iterator[None]:
        started, took = time.monotonic(), 0.0
        try:
            with clock_stopped(FIRST_LOAD_SECONDS):
                yield
            took = time.monotonic() - started
        finally:
            self._slowest_seconds[key] = took

    @contextlib.contextmanager
    def again(self, key: str, seconds: float) -> Iterator[Callable[[], float]]:
        """Load again in another process; yield a function for the seconds this may take in all, as known now.

        They are `seconds`, plus twice the slowest load of `key` for each load that runs at the same time.
        """
        with self._lock:
            slowest, ended = self._slowest_seconds.get(key, 0.0), self._num_ended
            self._num_started += 1
        started = time.monotonic()
        try:
            with clock_stopped():
                yield lambda: seconds + _SLACK * slowest * (self._num_started - ended)
            with self._lock:
                self._slowest_seconds[key] = max(self._slowest_seconds.get(key, 0.0), time.monotonic() - started)
        finally:
            with self._lock:
                self._num_ended += 1


@contextlib.contextmanager
def clock_stopped(seconds: float | None = None) -> Iterator[None]:
    """Stop the clock of the environment that this thread makes, if any, or allow it `seconds`."""
    making = _OF_THREAD.making
    with contextlib.nullcontext() if making is None else making.stopped(seconds):
        yield


@contextlib.contextmanager
def waiting_for(lock: threading.Lock, *, seconds: float = math.inf) -> Iterator[bool]:
    """Hold the lock during the block, without charging the wait; yield False if it was not free within `seconds`.

    Raises:
        EnvError: the environment that this thread makes was given up.
    """
    making, deadline = _OF_THREAD.making, time.monotonic() + seconds
    with clock_stopped():
        while not (is_held := lock.acquire(timeout=_LOOK_SECONDS)) and time.monotonic() < deadline:
            if making is not None and making.is_given_up:
                raise EnvError("making the environment was given up while others were loading")
        try:
            yield is_held
        finally:
            if is_held:
                lock.release()


class _OfThread(threading.local):
    making: Making | None = None


_OF_THREAD = _OfThread()
# Module state: what is loaded stays loaded for the life of the program.
LOADING = Loading()
