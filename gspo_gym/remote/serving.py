"""Start and stop an ASGI application on a port. `guard.py` decides which requests it answers.

Loopback is open to every program of this machine; any other address needs a key. `BackgroundServer` has a separate
thread; `LoopServer` serves from the running event loop, which the gateway must share with the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from types import TracebackType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gspo_gym.base.settings import is_loopback
from gspo_gym.errors import ConfigError, UsageError
from gspo_gym.remote.guard import MAX_BODY_BYTES, App

_MAX_HEADER_BYTES = 65_536  # of one request, all headers together
_HEAD_SECONDS = 30.0  # for the first line and all headers of a request to arrive
_START_SECONDS = 30.0
_STOP_SECONDS = 10  # uvicorn takes an int


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """Return a bound socket; port 0 takes any free one.

    Raises:
        ConfigError: the address can be reached from elsewhere and there is no key; or it cannot be bound.
    """
    if not is_loopback(host) and not has_key:
        raise ConfigError(
            f"host {host!r} can be reached from other machines: give a key (--api-key-env NAME), or serve on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, or asyncio leaves Nagle on for what it accepts: 40 ms now and then for an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve on {host}, port {port}: {error}") from error
    return listener


def url_of(bound: socket.socket) -> str:
    """Return the socket's URL, "http://host:port"."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_for(app: App) -> uvicorn.Server:
    """Return a server that logs nothing but warnings, and gives open sessions 10 seconds to end."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        http=_PatientProtocol,
        ws="websockets-sansio",  # its other one is deprecated by websockets 14
        ws_max_size=MAX_BODY_BYTES,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    return uvicorn.Server(config)


def serve_until_stopped(server: uvicorn.Server, bound: socket.socket, *, subject: str, path: str = "") -> int:
    """Print "serving SUBJECT at URL" once clients may connect, and serve; return the exit status of a command."""
    bound.listen()  # a client that reads the line below may connect at once, and waits until the server answers
    print(f"serving {subject} at {url_of(bound)}{path}", flush=True)
    server.run(sockets=[bound])
    return 0


class _PatientProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits that it lacks: on the bytes of a request's head, and on the wait for it."""

    _head_timer: asyncio.TimerHandle | None = None
    _is_in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start to wait for a head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Read a part of a head, or of a body, for which the application has a time limit."""
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)  # the parser keeps a header until its end has come
            if self._head_bytes > _MAX_HEADER_BYTES:
                self.send_400_response("The head of the request is too large.")

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read; a whole request before it is answered first, and nothing after it."""
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins; the first one's time began with the connection."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """A head has come; one that is too large is not told to the application."""
        self._stop_waiting()
        self._is_in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEADER_BYTES:
            raise ValueError("the head of the request is too large")  # the parser's caller answers 400
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _ReadyServer(uvicorn.Server):
    """Server that reports when it is ready, or that it did not start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then set the event."""
        await super().startup(sockets)
        self.ready.set()


class BackgroundServer:
    """Serves an application from a thread of this process while a `with` block lasts.

    For notebooks and tests; loopback only.

    Raises:
        UsageError: the application does not start.
    """

    def __init__(self, app: App, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = _ReadyServer(server_for(app).config)
        self._socket = bind(host, port, has_key=False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="gspo-gym-server")
        self.url = url_of(self._socket)

    def __enter__(self) -> BackgroundServer:
        self._thread.start()
        if not self._server.ready.wait(_START_SECONDS) or not self._server.started:
            self.stop()
            raise UsageError(f"the application at {self.url} did not start; its log says why")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the sessions and the server, and wait for it."""
        self._server.should_exit = True  # it looks ten times a second
        self._thread.join(_STOP_SECONDS + _START_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._server.ready.set()  # nobody waits for a server that has failed


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
