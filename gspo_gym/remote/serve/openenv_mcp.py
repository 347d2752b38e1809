"""The JSON-RPC side of OpenEnv: tools listed and called as MCP does, and sessions without a WebSocket.

A call of a tool is a turn of the episode, as over the WebSocket; its reward is seen only there. Called by
`openenv_server.py` and `openenv_channel.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gspo_gym.errors import GymError, UsageError
from gspo_gym.remote.serve.openenv_sessions import CapacityError, Session, Sessions
from gspo_gym.remote.serve.openenv_wire import ToolAction, call_result, mcp_tools, message_of, validation_errors

_INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS, _INTERNAL_ERROR, _SERVER_ERROR = (
    -32600,
    -32601,
    -32602,
    -32603,
    -32000,
)


class RpcRequest(BaseModel):
    """A JSON-RPC 2.0 request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


class _RpcError(Exception):
    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code, self.data = code, data


async def answer_rpc(
    asked: Any,
    *,
    sessions: Sessions,
    tool_schemas: Sequence[Mapping[str, Any]],
    session: Session | None = None,
) -> dict[str, Any]:
    """The answer to one request; never raises for what a client can cause.

    Args:
        asked: JSON from a client (Any).
        sessions, tool_schemas: of the server.
        session: whose WebSocket it came through; None: the request names one, where it needs one.
    """
    try:
        request = RpcRequest.model_validate(asked)
    except ValidationError as error:
        return rpc_error(None, _INVALID_REQUEST, f"Invalid request: {validation_errors(error)}")
    try:
        result = await _result(request, sessions, tool_schemas, session)
    except _RpcError as error:
        return rpc_error(request.id, error.code, str(error), error.data)
    except GymError as error:
        return rpc_error(request.id, _INTERNAL_ERROR, str(error))
    return {"jsonrpc": "2.0", "id": request.id, "result": result}


def rpc_error(request_id: str | int | None, code: int, message: str, data: Any = None) -> dict[str, Any]:
    """An error as JSON-RPC says it."""
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": data}}


async def _result(
    request: RpcRequest, sessions: Sessions, tool_schemas: Sequence[Mapping[str, Any]], session: Session | None
) -> dict[str, Any]:
    match request.method:
        case "tools/list":
            return {"tools": mcp_tools(tool_schemas)}
        case "tools/call":
            return await _call(request.params, _named(request.params, sessions, session), bool(tool_schemas))
        case "openenv/session/create":
            return {"session_id": (session or await _created(sessions)).id}
        case "openenv/session/close":
            return await _closed(_named(request.params, sessions, None), sessions)
    raise _RpcError(_METHOD_NOT_FOUND, f"Method not found: {request.method}")


async def _call(params: Mapping[str, Any], session: Session, has_tools: bool) -> dict[str, Any]:
    if not has_tools:
        raise _RpcError(_INTERNAL_ERROR, "this environment has no tools")
    try:
        given = {"type": "call_tool", "tool_name": params.get("name"), "arguments": params.get("arguments") or {}}
        action = ToolAction.model_validate(given)
    except ValidationError as error:
        raise _RpcError(_INVALID_PARAMS, f"Invalid params: {validation_errors(error)}") from error
    return call_result(await session.act(lambda turn: message_of(action, turn=turn)))


def _named(params: Mapping[str, Any], sessions: Sessions, session: Session | None) -> Session:
    if session is not None:
        return session
    session_id = params.get("session_id")
    if not isinstance(session_id, str):
        raise _RpcError(_INVALID_PARAMS, "session_id is required: openenv/session/create gives one")
    try:
        return sessions.get(session_id)
    except UsageError as error:
        raise _RpcError(_INVALID_PARAMS, f"Unknown session_id: {session_id}") from error


async def _created(sessions: Sessions) -> Session:
    try:
        return await sessions.create()
    except CapacityError as error:
        counts = {"active_sessions": sessions.num_active, "max_sessions": sessions.max_sessions}
        raise _RpcError(_SERVER_ERROR, str(error), counts) from error


async def _closed(session: Session, sessions: Sessions) -> dict[str, Any]:
    if session.is_attached:  # its WebSocket closes it
        session.is_closing = True
        return {"session_id": session.id, "closed": False, "closing": True}
    await sessions.destroy(session)
    return {"session_id": session.id, "closed": True}
