"""What went wrong -> the status, code and envelope by which OpenAI's clients know it.

`x-should-retry: false` goes with what asking again does not change, because those clients try again at some of these
statuses. Called by `gateway_app.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

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


def failure_reply(error: Exception, *, status: int = 400) -> Reply:
    """The answer to a request that failed; `status` is a RequestError's.

    What nobody foresaw is logged with its traceback, and its text goes to nobody. An answer that was sampled and cannot
    be used (a forced call) is the same to a retry; everything else is worked on anew.
    """
    if isinstance(error, RequestError):
        wire = error_object(str(error), kind=_BAD_REQUEST, code=error.code, param=error.param)
        return _reply(status, wire, may_retry=False)
    known = next((kind for kind in _KINDS if isinstance(error, kind.error)), None)
    if known is None:
        _LOG.error("the gateway failed to answer a request", exc_info=error)
        return _reply(500, error_object("the gateway failed", kind=_SERVER, code="internal_error"), may_retry=True)
    wire = error_object(str(error), kind=known.kind, code=known.code, param=known.param)
    index = error.call.index if isinstance(error, ForcedCallError) else None
    return _reply(known.status, wire, may_retry=known.may_retry, call_index=index)


def _reply(status: int, wire: object, *, may_retry: bool, call_index: int | None = None) -> Reply:
    headers = () if may_retry else _FINAL
    return Reply(status, JSON_TYPE, json_bytes(wire), headers, call_index, is_final=call_index is not None)
