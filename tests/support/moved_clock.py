"""The clock of an event loop, which a test moves on: what waits for a limit has missed it at once.

The limits of good calls can be long, so that they hold on a busy machine, and nothing is waited for. Timers of the loop
count (`asyncio.timeout`, `call_later`, what httpx and uvicorn build on them), `time.monotonic` goes on as it does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def move_clock(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Let so many seconds pass at once on the loop's clock; in any thread."""
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
    loop.call_soon_threadsafe(int)  # wakes it up


class Hang:
    """A call in a thread that misses each limit up to `seconds` at once, and returns when it is `over`."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.over = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def watched(self, play: Awaitable[_Result]) -> _Result:
        """Await `play`, whose loop has the limits."""
        self._loop = asyncio.get_running_loop()
        return await play

    def __call__(self) -> None:
        assert self._loop is not None, "no loop waits for it"
        move_clock(self._loop, self.seconds)
        self.over.wait()


class ServersClock:
    """An application, and the clock of the server that has begun to serve it."""

    def __init__(self, app: Any = None) -> None:
        self.app = app
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._loop = asyncio.get_running_loop()
        await self.app(scope, receive, send)

    def move(self, seconds: float) -> None:
        """Let so many seconds pass at once; in any thread."""
        assert self._loop is not None, "the application is not served yet"
        move_clock(self._loop, seconds)
