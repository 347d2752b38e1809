"""An ASGI application on a port: who may reach it, and how it is started and stopped.

Loopback is open to every program of this machine, any other address needs a key; pages in a browser are kept out unless
their origin is named. No protocol is known here. Called by `serve_command.py`, by notebooks and tests
(`BackgroundServer`).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any

import uvicorn

from gspo_gym.errors import ConfigError, UsageError

# What ASGI passes: Any, as the protocol has it.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 1_000_000  # of a request, and of one WebSocket message: an action is text that a model wrote
_OPEN_PATHS = ("/health",)  # asked by container runtimes, which have no key
_START_SECONDS = 30.0
_STOP_SECONDS = 10  # uvicorn takes an int


class Guard:
    """ASGI middleware that turns away who has no key, pages of strange origins, and bodies that are too long.

    Args:
        app: what is guarded.
        api_key: expected as "Authorization: Bearer KEY" everywhere but at /health; None asks for none.
        allowed_origins: of pages in browsers that may call, as "https://host:port". Programs send no Origin header.
        max_body_bytes: of a request; WebSocket messages are limited by the server (`server_for`).
    """

    def __init__(
        self,
        app: App,
        *,
        api_key: str | None = None,
        allowed_origins: Iterable[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app = app
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._origins = frozenset(origin.encode() for origin in allowed_origins)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or one WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (refused := self._refusal(scope["path"], headers)) is not None:
            await _refuse(scope, send, *refused)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            await _refuse(scope, send, 413, f"a body has at most {self._max_body_bytes} bytes")
            return
        if b"transfer-encoding" in headers:  # a body whose length is not known beforehand
            await _refuse(scope, send, 411, "a body needs a Content-Length")
            return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        origin = headers.get(b"origin")
        if origin is not None and origin not in self._origins:
            return 403, "pages of this origin may not call"
        if self._authorization is None or path in _OPEN_PATHS:
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            return 401, "expected the header Authorization: Bearer KEY with the server's key"
        return None


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": text})  # before accept: the client sees a 403
        return
    content = (f'{{"detail": "{text}"}}').encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("localhost.evil.org")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A bound socket; port 0 takes any that is free.

    Raises:
        ConfigError: the address can be reached from elsewhere and there is no key; or it cannot be bound.
    """
    if not is_loopback(host) and not has_key:
        raise ConfigError(
            f"host {host!r} can be reached from other machines: give a key (--api-key-env NAME), or serve on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot serve on {host}, port {port}: {error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where the socket is reached, as "http://host:port"."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_for(app: App, *, max_message_bytes: int = MAX_BODY_BYTES) -> uvicorn.Server:
    """A server for the application that logs nothing but warnings, and gives open sessions 10 seconds to end."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="websockets-sansio",  # its other one is deprecated by websockets 14
        ws_max_size=max_message_bytes,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    return uvicorn.Server(config)


class _ReadyServer(uvicorn.Server):
    """Says when it answers, or that it never will."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and then the event."""
        await super().startup(sockets)
        self.ready.set()


class BackgroundServer:
    """Serves an application from a thread of this process for as long as a `with` block lasts.

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
