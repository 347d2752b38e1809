"""What the gateway's applications answer with: JSON, OpenAI's errors, and the sending of both over ASGI."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from gspo_gym.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EnginePoisonedError,
    EngineTimeoutError,
    RecordError,
    TemplateError,
    UnknownNameError,
)
from gspo_gym.remote.gateway.capture import ForcedCallError, SessionClosedError, SessionLimitError
from gspo_gym.remote.gateway.openai_wire import RequestError
from gspo_gym.remote.gateway.openai_wire_answers import JSON_TYPE, error_object, json_bytes
from gspo_gym.remote.gateway.replay import KeyReuseError, Reply
from gspo_gym.remote.guard import Receive, Send

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
    known = next((kind for kind in _KINDS if isinstance(error, kind.error)), None)
    if known is None:
        # The text may hold what a client must not read.
        _LOG.error("the gateway failed to answer a request", exc_info=error)
        return _reply(500, error_object("the gateway failed", kind=_SERVER, code="internal_error"), may_retry=True)
    wire = error_object(str(error), kind=known.kind, code=known.code, param=known.param)
    index = error.call.index if isinstance(error, ForcedCallError) else None
    return _reply(known.status, wire, may_retry=known.may_retry, call_index=index)


def _reply(status: int, wire: object, *, may_retry: bool, call_index: int | None = None) -> Reply:
    # OpenAI's clients retry 409, 429 and 5xx by themselves, which a refusal does not need.
    headers = () if may_retry else _FINAL
    return Reply(status, JSON_TYPE, json_bytes(wire), headers, call_index, is_final=call_index is not None)
