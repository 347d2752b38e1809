"""Recognise retries: a client that lost an answer gets that answer, not another sample.

A request is the same as an earlier one of its session if

- it carries the same `Idempotency-Key` (with another body, that is refused), or
- it has the same body, and the clients of the earlier one have hung up without an answer, or
- it has the same body and says that it is a retry (`x-stainless-retry-count` of OpenAI's clients above 0), unless the
  earlier request failed: that has no answer, and is worked on anew.

Otherwise the same body is a new call, also while the earlier one is being answered: an agent may ask the same thing
twice, one time after another or at once. While the answer is being sampled, the same request waits for it (coalescing);
afterwards it gets the same bytes.

Answers are JSON and OpenAI's errors, sent over ASGI.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EnginePoisonedError,
    EngineTimeoutError,
    GymError,
    RecordError,
    TemplateError,
    UnknownNameError,
)
from gspo_gym.remote.gateway.capture import ForcedCallError, SessionClosedError, SessionLimitError
from gspo_gym.remote.gateway.openai_wire import RequestError
from gspo_gym.remote.gateway.openai_wire_answers import JSON_TYPE, error_object, json_bytes
from gspo_gym.remote.guard import Receive, Send

# A finished answer is kept for its retries until so many younger ones of its session are.
MAX_REMEMBERED = 64
_MAX_KEY_LENGTH = 256

# Whether a client has hung up.
HasGone = Callable[[], Awaitable[bool]]


class KeyReuseError(GymError, ValueError):
    """An Idempotency-Key came with another body than before."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it is sent. `call_index` is the session's call; None if nothing was sampled.

    `is_final`: the same request gets it again. Otherwise (an engine that failed) it is worked on again.
    """

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    call_index: int | None = None
    is_final: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One HTTP request, as far as retries are concerned.

    Attributes:
        digest: of its route and body.
        key: its Idempotency-Key; None without one.
        retry_count: as the client counts, 0 for a first attempt; None if it does not say.
        has_gone: returns whether its client has hung up.
    """

    digest: bytes
    key: str | None
    retry_count: int | None
    has_gone: HasGone


@dataclass(slots=True, eq=False)
class Exchange:
    """One logical request: its waiting HTTP requests, and the one answer for them."""

    digest: bytes
    key: str | None
    reply: asyncio.Future[Reply]
    waiting: list[Asked] = field(default_factory=list)
    is_delivered: bool = False

    def finish(self, asked: Asked, *, is_delivered: bool) -> None:
        """Record that one of the requests has its answer, or that its client has gone without it."""
        self.waiting.remove(asked)
        self.is_delivered |= is_delivered

    async def is_abandoned(self) -> bool:
        """Return whether no client has its answer and none waits for it."""
        if self.is_delivered:
            return False
        for request in list(self.waiting):
            if not await request.has_gone():
                return False
        # Asked again: a client that had its answer meanwhile looks like one that has gone.
        return not self.is_delivered


def digest_of(route: str, body: bytes) -> bytes:
    """Return the digest that requests with the same route and body share."""
    return hashlib.sha256(route.encode() + b"\0" + body).digest()


class Replays:
    """The exchanges of one session."""

    def __init__(self, *, max_remembered: int = MAX_REMEMBERED) -> None:
        self._exchanges: list[Exchange] = []  # oldest first
        self._num_failed: Counter[bytes] = Counter()  # by digest: failures that were not tried again yet
        self._max_remembered = max_remembered
        self.num_coalesced = 0
        self.num_replayed = 0

    async def answer(self, asked: Asked, work: Callable[[], Awaitable[Reply]]) -> tuple[Exchange, Reply]:
        """Return the answer of an earlier request that this one repeats, or else the result of `work`.

        Call `finish` of the exchange afterwards. If `work` raises, so do all that wait for it.

        Raises:
            KeyReuseError: its key came with another body before.
        """
        exchange = await self._same_as(asked)
        if exchange is not None:
            exchange.waiting.append(asked)
            if exchange.reply.done():
                self.num_replayed += 1
            else:
                self.num_coalesced += 1
            return exchange, await asyncio.shield(exchange.reply)
        # The retry of a failure is used up: the next retry of this body belongs to the call that follows.
        if asked.retry_count and self._num_failed[asked.digest]:
            self._num_failed[asked.digest] -= 1
        exchange = Exchange(asked.digest, asked.key, asyncio.get_running_loop().create_future(), [asked])
        self._exchanges.append(exchange)
        try:
            reply = await work()
        except BaseException as error:
            self._forget(exchange)
            failure = error if isinstance(error, Exception) else asyncio.CancelledError()
            exchange.reply.set_exception(failure)
            exchange.reply.exception()  # marked as seen, because no other request may be waiting
            raise
        exchange.reply.set_result(reply)
        self._remember(exchange, reply)
        return exchange, reply

    def _remember(self, exchange: Exchange, reply: Reply) -> None:
        if not reply.is_final:
            self._forget(exchange)
            return
        finished_exchanges = [earlier for earlier in self._exchanges if earlier.reply.done()]
        # Only finished ones: those that are being answered have clients that wait.
        for old in finished_exchanges[: -self._max_remembered]:
            self._exchanges.remove(old)

    def _forget(self, exchange: Exchange) -> None:
        # A retry of it must not get another call's answer.
        self._exchanges.remove(exchange)
        self._num_failed[exchange.digest] += 1

    async def _same_as(self, request: Asked) -> Exchange | None:
        if request.key is not None:
            return self._of_key(request.key, request.digest)
        # The latest first, and none with a key: its client would send the key again.
        same = [e for e in reversed(self._exchanges) if e.digest == request.digest and e.key is None]
        for exchange in same:
            if await exchange.is_abandoned():
                return exchange
        is_retry = bool(request.retry_count) and not self._num_failed[request.digest]
        return same[0] if is_retry and same else None

    def _of_key(self, key: str, digest: bytes) -> Exchange | None:
        if len(key) > _MAX_KEY_LENGTH:
            raise KeyReuseError(f"Idempotency-Key: expected at most {_MAX_KEY_LENGTH} characters, got {len(key)}")
        for exchange in self._exchanges:
            if exchange.key == key:
                if exchange.digest != digest:
                    raise KeyReuseError("Idempotency-Key: expected the same body as before under this key")
                return exchange
        return None


Json = Any  # a JSON value

_LOG = logging.getLogger(__name__)
_BAD_REQUEST, _SERVER = "invalid_request_error", "server_error"
_FINAL = (("x-should-retry", "false"),)


@dataclass(frozen=True, slots=True)
class _Kind:
    error: type[Exception]
    status: int
    code: str
    kind: str = _BAD_REQUEST
    param: str | None = None
    may_retry: bool = False


# The first that fits counts, so a class stands before its bases.
_KINDS = (
    _Kind(KeyReuseError, 400, "idempotency_key_reused"),
    _Kind(ContextOverflowError, 400, "context_length_exceeded", param="messages"),
    _Kind(TemplateError, 400, "conversation_not_renderable", param="messages"),
    _Kind(ConfigError, 400, "unsupported_value"),
    _Kind(RecordError, 400, "invalid_value"),
    _Kind(UnknownNameError, 404, "not_found"),
    _Kind(SessionClosedError, 409, "session_closed"),
    _Kind(SessionLimitError, 429, "session_limit_exceeded", "rate_limit_error"),
    _Kind(ForcedCallError, 422, "invalid_tool_call", _SERVER),
    _Kind(EnginePoisonedError, 503, "engine_poisoned", _SERVER),
    _Kind(EngineTimeoutError, 503, "engine_timeout", _SERVER, may_retry=True),
    _Kind(EngineError, 503, "engine_error", _SERVER, may_retry=True),
)


def json_reply(value: Json, call_index: int | None = None) -> Reply:
    """Return an answer with status 200; `call_index` as in `Reply`."""
    return Reply(200, JSON_TYPE, json_bytes(value), call_index=call_index)


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole answer."""
    headers = {"content-type": reply.content_type, "content-length": str(len(reply.body)), **dict(reply.headers)}
    wire = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": wire})
    await send({"type": "http.response.body", "body": reply.body})


async def live(receive: Receive, send: Send) -> None:
    """Answer the server's start and end, on which nothing here depends."""
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


def failure_reply(error: Exception, *, status: int = 400) -> Reply:
    """Return the answer to a request that failed; `status` is a RequestError's.

    An unexpected error is logged with its traceback, and its text is not sent. A sampled answer that cannot be used (a
    forced call) stays the same for a retry; everything else is worked on anew.
    """
    if isinstance(error, RequestError):
        wire = error_object(str(error), kind=_BAD_REQUEST, code=error.code, param=error.param)
        return _reply(status, wire, may_retry=False)
    failure_kind = next((kind for kind in _KINDS if isinstance(error, kind.error)), None)
    if failure_kind is None:
        # The text may hold what a client must not read.
        _LOG.error("the gateway failed to answer a request", exc_info=error)
        return _reply(500, error_object("the gateway failed", kind=_SERVER, code="internal_error"), may_retry=True)
    wire = error_object(str(error), kind=failure_kind.kind, code=failure_kind.code, param=failure_kind.param)
    index = error.call.index if isinstance(error, ForcedCallError) else None
    return _reply(failure_kind.status, wire, may_retry=failure_kind.may_retry, call_index=index)


def _reply(status: int, wire: object, *, may_retry: bool, call_index: int | None = None) -> Reply:
    # OpenAI's clients retry 409, 429 and 5xx by themselves, which a refusal does not need.
    headers = () if may_retry else _FINAL
    return Reply(status, JSON_TYPE, json_bytes(wire), headers, call_index, is_final=call_index is not None)
