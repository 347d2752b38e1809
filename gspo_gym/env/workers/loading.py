"""The time that is spent once on loading what environments need, which no single environment is charged with.

Importing a package or reading a data set may take a minute, and sixteen worker processes that do so at the same time
share the cores; against a limit for making one environment, all of them would fail. So what is made for the first time
has a limit of its own, the others wait for it, and the clock of an environment that waits stands still. What has to be
loaded again, in each worker process, gets time according to how long the first took and how many load beside it.
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
_LOOK_SECONDS = 0.2  # how often a thread that waits looks whether it still has to
_SLACK = 2.0  # the first load had the machine to itself, as the later ones do not


class Making:
    """The clock of one environment that is being made in another thread; to be made in a running event loop.

    Args:
        seconds: that making it may take, what is loaded once not counted; None: for ever.

    Attributes:
        timeout: to be entered around waiting for the environment.
    """

    def __init__(self, seconds: float | None) -> None:
        self.timeout = asyncio.timeout(seconds)
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._is_given_up = False
        self._depth = 0  # of what stopped the clock

    def run(self, factory: Callable[[], Any]) -> Any:
        """Call `factory`, which is then what the clock of this thread is about."""
        _OF_THREAD.making = self
        try:
            return factory()
        finally:
            _OF_THREAD.making = None

    def give_up(self) -> None:
        """Nobody wants it any more: what it waits for is left, and its clock runs; in the event loop."""
        self.restart(self._seconds)
        self._is_given_up = True

    def restart(self, seconds: float | None) -> None:
        """Allow so many seconds from now on; in the event loop."""
        if not self._is_given_up:
            with contextlib.suppress(RuntimeError):  # it is over already
                self.timeout.reschedule(None if seconds is None else self._loop.time() + seconds)

    @contextlib.contextmanager
    def stopped(self, seconds: float | None = None) -> Iterator[None]:
        """Let the clock stand still during the body, or allow it so many seconds, and start anew; in the thread."""
        self._depth += 1
        self._restart_from_thread(seconds)
        try:
            yield
        finally:
            self._depth -= 1
            self._restart_from_thread(None if self._depth else self._seconds)

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants the environment any more."""
        return self._is_given_up

    def _restart_from_thread(self, seconds: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            self._loop.call_soon_threadsafe(self.restart, seconds)


class Loading:
    """What was loaded in this program so far, by a key that names it, and how long the slowest of each took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[str, threading.Lock] = {}
        self._slowest_seconds: dict[str, float] = {}
        self._num_started = 0
        self._num_ended = 0

    @contextlib.contextmanager
    def once(self, key: str) -> Iterator[bool]:
        """Let one thread load `key`, while others wait for it; whether that is this one.

        An environment whose thread waits is not charged for that, and one that loads has `FIRST_LOAD_SECONDS`. What
        becomes of the first load, a failure too, is all that there is to wait for, and no longer than that.
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
        """Load what was loaded before, in another process; how many seconds it may take in all, as it looks by now.

        That is `seconds`, and for each that loads at the same time twice what the slowest load of `key` took.
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
    """Let the clock of the environment that this thread makes, if any, stand still, or allow it so many seconds."""
    making = _OF_THREAD.making
    with contextlib.nullcontext() if making is None else making.stopped(seconds):
        yield


@contextlib.contextmanager
def waiting_for(lock: threading.Lock, *, seconds: float = math.inf) -> Iterator[bool]:
    """Hold the lock during the body; False where it was not to be had for so long. The time is not charged.

    Raises:
        EnvError: nobody wants the environment any more that this thread makes.
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
# Module state on purpose: what is loaded stays loaded as long as the program runs.
LOADING = Loading()
