"""ASGI middleware in front of every server here: hosts, origins, keys, and the size and form of bodies.

A request passes if its Host and Origin are allowed, it has a key where one is required, there is room for it, and its
body is short, shallow, valid JSON and arrives in time. Only then is the application called, with the whole body. All
keys are compared, as digests and in constant time; none appears in an answer or a log.

Also the refusal of a request by a route, `RefusalError`, in FastAPI's form with a code inside, {"detail": {"error":
{"code", "message"}}}, as task apps have it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from gspo_gym.base.http import refuse_strange_json, require_utf8
from gspo_gym.env.workers.wire import refusal_in
from gspo_gym.errors import ConfigError, GymError, RecordError

# What ASGI passes: Any, as the protocol has it.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

MAX_BODY_BYTES = 1_000_000  # of a request, and of one WebSocket message: an action is text that a model wrote
MAX_JSON_DEPTH = 64  # as deep as schemas of tools get, and far from where parsers recurse too deeply
OPEN_PATHS = ("/", "/health")  # asked by container runtimes and health checks
_MAX_HEADERS = 100
_MAX_KEYS = 16  # that one request may try
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
_RETRY_AFTER_SECONDS = 1
# A text in JSON, or what opens and closes a level. A text that nobody closes ends with the body: the search is linear.
_JSON_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)


class _RefusedError(Exception):
    """The guard answers the request itself."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


class Keys:
    """The accepted keys, held as digests only.

    Args:
        keys: a request needs one of them.

    Raises:
        ConfigError: a key is empty, or holds a comma or a space, which no header could carry.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        api_keys = list(keys)
        if any(not key or not key.isprintable() or "," in key or " " in key for key in api_keys):
            raise ConfigError("an API key: expected printable text without spaces and commas, got one that is not")
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in api_keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __repr__(self) -> str:
        return f"Keys(<{len(self._digests)} keys>)"

    def open_for(self, headers: Headers) -> bool:
        """Return whether a key is in X-API-Key, X-API-Keys (several, with commas) or Authorization: Bearer.

        Every key is compared with every key sent, so the time tells nothing about either.
        """
        opens = False
        for sent_key in _keys_in(headers):
            digest = hashlib.sha256(sent_key).digest()
            for key_digest in self._digests:
                opens |= hmac.compare_digest(digest, key_digest)
        return opens


class Guard:
    """ASGI middleware that refuses requests without a key, pages of foreign origins, and bodies beyond the limits.

    Args:
        app: the guarded application.
        api_key: required except at `open_paths`, in any of three headers; several: any of them. None: anyone that can
            connect may ask.
        allowed_origins: of pages in browsers that may call, as "https://host:port". Programs send no Origin header.
        allowed_hosts: names allowed in the Host header, without ports; None: any if there is a key, else those of
            loopback, against pages with a name that suddenly means 127.0.0.1 (DNS rebinding).
        open_paths: answered without a key, but not with a wrong one.
        max_body_bytes: of a request, counted as they arrive; `server_for` limits WebSocket messages.
        body_timeout_seconds: for the whole body to arrive.
        max_concurrent_requests: of HTTP, beside those to open paths; one more is answered 503 with Retry-After.

    Raises:
        ConfigError: a key that no header could carry.
    """

    def __init__(
        self,
        app: App,
        *,
        api_key: str | Iterable[str] | None = None,
        allowed_origins: Iterable[str] = (),
        allowed_hosts: Iterable[str] | None = None,
        open_paths: Iterable[str] = OPEN_PATHS,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_timeout_seconds: float = 30.0,
        max_concurrent_requests: int = 1_024,
    ) -> None:
        self.app = app
        self._keys = Keys(() if api_key is None else [api_key] if isinstance(api_key, str) else api_key)
        self._origins = frozenset(origin.encode() for origin in allowed_origins)
        if allowed_hosts is None:
            allowed_hosts = () if self._keys else _LOOPBACK_NAMES
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._open_paths = frozenset(open_paths)
        self._max_body_bytes, self._body_timeout = max_body_bytes, body_timeout_seconds
        self._max_requests, self._num_requests = max_concurrent_requests, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        try:
            self._require_welcome(scope)
            if scope["type"] == "http":
                await self._answer(scope, receive, send)
                return
        except _RefusedError as refused:
            await _refuse(scope, send, refused)
            return
        await self.app(scope, receive, send)

    def _require_welcome(self, scope: Scope) -> None:
        headers: Headers = scope["headers"]
        if len(headers) > _MAX_HEADERS:
            raise _RefusedError(431, "too_many_headers", f"a request has at most {_MAX_HEADERS} headers")
        if self._hosts and _host_name(headers) not in self._hosts:
            raise _RefusedError(403, "unknown_host", "the Host header names no host that is served here")
        if any(origin not in self._origins for origin in _values(headers, b"origin")):
            raise _RefusedError(403, "unknown_origin", "pages of this origin may not call")
        # A caller that sends a key wants to know whether it is the right one, also where none is needed.
        is_open = scope["path"] in self._open_paths and not _keys_in(headers)
        if self._keys and not is_open and not self._keys.open_for(headers):
            text = "expected the server's key in the header X-API-Key, or as Authorization: Bearer KEY"
            raise _RefusedError(401, "unauthorised", text, {"www-authenticate": "Bearer"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._open_paths:
            await self._pass_on(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            text = f"{self._num_requests} requests are being answered, which is all that there is room for; try again"
            raise _RefusedError(503, "overloaded", text, {"retry-after": str(_RETRY_AFTER_SECONDS)})
        self._num_requests += 1
        try:
            await self._pass_on(scope, receive, send)
        finally:
            self._num_requests -= 1

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The body comes before the application: a handler would otherwise be started for half a request.
        body = await self._body(scope, receive)
        if body is None:
            return
        remaining = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            return remaining.pop() if remaining else await receive()

        await self.app(scope, replay, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        lengths = _values(scope["headers"], b"content-length")
        # isdigit first: int() also takes signs and underscores, and refuses very long numbers.
        if any(
            not length_text.isdigit() or len(length_text) > 20 or int(length_text) > self._max_body_bytes
            for length_text in lengths
        ):
            raise self._too_long()
        try:
            async with asyncio.timeout(self._body_timeout):
                body = await self._read(receive)
        except TimeoutError:
            text = f"the body did not arrive within {self._body_timeout:g} seconds"
            raise _RefusedError(408, "slow_body", text, {"connection": "close"}) from None
        if body is None:
            return None
        if json_depth_exceeds(body, MAX_JSON_DEPTH):
            raise _RefusedError(400, "body_too_deep", f"a body is nested at most {MAX_JSON_DEPTH} levels deep")
        # All content types: a framework that takes a body for bytes repeats it in its refusal, and fails to write that.
        try:
            require_utf8(body)
            refuse_strange_json(body)
        except RecordError as error:
            raise _RefusedError(400, "invalid_json", str(error)) from None
        return bytes(body)

    async def _read(self, receive: Receive) -> bytearray | None:
        body = bytearray()  # a list of what arrives would cost a hundred bytes for each that comes alone
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise self._too_long()
            if not message.get("more_body", False):
                return body

    def _too_long(self) -> _RefusedError:
        text = f"a body has at most {self._max_body_bytes} bytes"
        return _RefusedError(413, "body_too_long", text, {"connection": "close"})


async def until_gone(receive: Receive) -> None:
    """Wait until the client of a request, whose body has been read, hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_depth_exceeds(body: bytes | bytearray, limit: int) -> bool:
    """Return whether brackets outside of strings nest deeper than `limit`, in one pass without parsing.

    >>> json_depth_exceeds(b'[["[[["]]', 2), json_depth_exceeds(b'[[["a"]]]', 2)
    (False, True)
    """
    # Most bodies have few brackets, and need no pass of their own.
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    depth = 0
    for token in _JSON_TOKEN.finditer(body):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
            if depth > limit:
                return True
        elif first in b"]}":
            depth -= 1
    return False


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _keys_in(headers: Headers) -> list[bytes]:
    return [key for _, key in zip(range(_MAX_KEYS), _all_keys_in(headers), strict=False)]


def _all_keys_in(headers: Headers) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"x-api-keys":
            yield from (key.strip() for key in value.split(b",", _MAX_KEYS))
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()


def _host_name(headers: Headers) -> str:
    # Two Host headers could be read differently by a proxy and by this.
    hosts = _values(headers, b"host")
    if len(hosts) != 1:
        return ""  # none is allowed then
    host = hosts[0].decode("latin-1").lower()
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


async def _refuse(scope: Scope, send: Send, refusal: _RefusedError) -> None:
    if scope["type"] == "websocket":
        # Before accept: the client sees a 403.
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.message})
        return
    error = {"code": refusal.code, "message": refusal.message}
    content = json.dumps({"detail": {"error": error}, "error": error}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **refusal.headers}
    wire = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": wire})
    await send({"type": "http.response.body", "body": content})


class RefusalError(GymError, RuntimeError):
    """A request is refused, with the reason; a 503 also says when to come again."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def failure_status(error: BaseException, given: Collection[str]) -> int:
    """Return 422 if an environment failed because it refuses values that the client has `given`, else 500.

    It refuses them by a ValueError, TypeError or LookupError, as constructors and `reset` do.
    """
    return 422 if given and refusal_in(error) is not None else 500


async def answer_refusal(_: Request, refusal: Exception) -> JSONResponse:
    """Answer a refused request: FastAPI's handler for `RefusalError`."""
    assert isinstance(refusal, RefusalError)
    error = {"code": refusal.code, "message": str(refusal)}
    headers = {"retry-after": str(_RETRY_AFTER_SECONDS)} if refusal.status == 503 else None
    return JSONResponse({"detail": {"error": error}}, refusal.status, headers)
