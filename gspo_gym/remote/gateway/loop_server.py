"""Serve an ASGI application from the running event loop, which the gateway must share with the engine.

For a server with a separate thread see `BackgroundServer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from gspo_gym.errors import UsageError
from gspo_gym.remote.guard import App
from gspo_gym.remote.serving import bind, server_for, url_of

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.01  # until it listens, which takes a few milliseconds


class _QuietServer(uvicorn.Server):
    # SIGINT, SIGTERM and the exit are left to the program around it.
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn would end the whole process, and the trainer with it.
        with contextlib.suppress(SystemExit):
            await super().startup(sockets)
            return
        self.should_exit = True


class LoopServer:
    """Serves from `start` to `stop`, while its event loop is not blocked.

    Args:
        app: the application.
        host, port: the address; port 0 takes any free one.
        has_key: whether the application requires a key; without one, only a loopback address is allowed.

    Attributes:
        url: its URL on this machine.

    Raises:
        ConfigError: the address cannot be bound, or may not be without a key.
    """

    def __init__(self, app: App, *, host: str, port: int, has_key: bool = False) -> None:
        self._server = _QuietServer(server_for(app).config)
        self._socket = bind(host, port, has_key=has_key)
        self.url = url_of(self._socket)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the server answers.

        Raises:
            UsageError: the application does not start.
        """
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            await asyncio.wait([self._serving], timeout=_POLL_SECONDS)
            if self._serving.done():
                self._socket.close()
                raise UsageError(
                    f"the application at {self.url} did not start; its log says why"
                ) from self._serving.exception()
        self._serving.add_done_callback(self._tell_early_end)

    async def stop(self) -> None:
        """Give open requests up to ten seconds, then end; stopping twice is allowed."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()

    def _tell_early_end(self, serving: asyncio.Task[None]) -> None:
        # Its callers only see refused connections.
        if not self._server.should_exit:
            error = None if serving.cancelled() else serving.exception()
            _log.error("the server at %s ended by itself: %r", self.url, error)
