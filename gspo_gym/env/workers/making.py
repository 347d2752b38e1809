"""The limit for making an environment, which what makes it may extend from its thread, whatever it is wrapped in."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


class Making:
    """The limit of one environment that is made in another thread; create it in the running event loop.

    Enter `timeout` around waiting for it. `seconds` is the present limit; None: there is none.
    """

    def __init__(self, seconds: float | None) -> None:
        self.timeout = asyncio.timeout(seconds)
        self.seconds = seconds
        self._least = seconds
        self._loop = asyncio.get_running_loop()
        self._is_given_up = False

    def run(self, factory: Callable[[], Any]) -> Any:
        """Call `factory` in the current thread, where `allow_to_make` then is about this one."""
        _OF_THREAD.making = self
        try:
            return factory()
        finally:
            _OF_THREAD.making = None

    def give_up(self) -> None:
        """Allow no time to load any more. Call it in the event loop."""
        self._extend(0.0)
        self._is_given_up = True

    def allow(self, seconds: float) -> None:
        """Allow that much from now on, or what it was created with. Call it in the thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
            self._loop.call_soon_threadsafe(self._extend, seconds)

    def _extend(self, seconds: float) -> None:
        if self._least is not None and not self._is_given_up:
            self.seconds = max(self._least, seconds)
            with contextlib.suppress(RuntimeError):  # the timeout has expired already
                self.timeout.reschedule(self._loop.time() + self.seconds)


class _OfThread(threading.local):
    making: Making | None = None


_OF_THREAD = _OfThread()


def allow_to_make(seconds: float) -> None:
    """Allow the environment that this thread makes, if any, `seconds` from now on, if its limit is shorter."""
    if _OF_THREAD.making is not None:
        _OF_THREAD.making.allow(seconds)
