"""OpenEnv's wire format for our environments: actions, observations, tools, errors, and the JSON-RPC side. No I/O.

OpenEnv has one observation object, a reward and `done`. The rest of a step (truncated, success, reward terms, events)
travels in `metadata`, under the key that `envs/suites/openenv.py` reads.

Over JSON-RPC tools are listed and called as in MCP, with sessions that need no WebSocket. A tool call is a turn of the
episode, as over the WebSocket, but its reward is seen only there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gspo_gym.errors import GymError, UsageError
from gspo_gym.remote.apps.contracts import EXTENSION
from gspo_gym.remote.serve.openenv_sessions import CapacityError, Session, Sessions
from gspo_gym.types import Message, StepResult, ToolCall

RESERVED_TOOL_NAMES = frozenset({"reset", "step", "state", "close"})  # of OpenEnv


# Unknown fields are refused: a misspelt one would be an action that says nothing.
class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextAction(_Strict):
    """The model's text."""

    message: str = Field(description="What the model says.")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Call(_Strict):
    """One tool call of a message."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    id: str | None = Field(default=None, description="Repeated in the answer; by default numbered.")


class ToolAction(_Strict):
    """One turn: a message with any number of tool calls; or one call by `tool_name`, as MCP clients send it."""

    type: Literal["message", "call_tool", "list_tools"] = "message"
    message: str = Field(default="", description="What the model says beside its calls, or without any.")
    tool_calls: list[Call] = Field(default_factory=list, description="Made in order, all in one turn.")
    tool_name: str | None = Field(default=None, description="With type call_tool: the one tool to call.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="With type call_tool: by parameter name.")
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_one_of_them(self) -> ToolAction:
        if self.type == "call_tool" and (self.tool_name is None or self.tool_calls):
            raise ValueError("call_tool takes tool_name and arguments, not tool_calls")
        if self.type != "call_tool" and (self.tool_name is not None or self.arguments):
            raise ValueError("tool_name and arguments need type call_tool")
        return self


class Observation(BaseModel):
    """The next messages for the model, as OpenAI messages and as one text."""

    text: str = Field(description="The messages' contents, parted by blank lines.")
    messages: list[dict[str, Any]] = Field(description="OpenAI chat messages that are new in this turn.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="gspo_gym: truncated, success, terms, events.")


class ToolObservation(Observation):
    """An observation with, after call_tool, the result as MCP clients read it, and after list_tools the tools."""

    tool_name: str | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class ResetRequest(BaseModel):
    """`seed` picks the task; other fields become the options of the environment's `reset`."""

    model_config = ConfigDict(extra="allow", strict=True)

    seed: int | None = Field(default=None, ge=0, lt=2**63)
    episode_id: str | None = Field(default=None, max_length=255)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def read_action(data: Any, *, has_tools: bool) -> TextAction | ToolAction:
    """Read a client's action.

    Raises:
        pydantic.ValidationError: it is invalid.
    """
    kind = ToolAction if has_tools else TextAction
    return kind.model_validate(data)


def message_of(action: TextAction | ToolAction, *, turn: int) -> Message:
    """Return an action as an assistant message; calls without an id are numbered within the episode."""
    if isinstance(action, TextAction):
        return Message("assistant", action.message)
    calls = list(action.tool_calls)
    if action.tool_name is not None:
        calls = [Call(name=action.tool_name, arguments=action.arguments)]
    tool_calls = (
        ToolCall(call.id or f"call_{turn}_{index}", call.name, call.arguments) for index, call in enumerate(calls)
    )
    return Message("assistant", action.message, tuple(tool_calls))


def observation_data(result: StepResult) -> dict[str, Any]:
    """Return the data of an observation frame."""
    details = {
        "truncated": result.truncated,
        "terminated": result.terminated,
        "success": result.success,
        "reward_terms": dict(result.reward_terms),
        "events": list(result.events),
    }
    metadata = {EXTENSION: details}
    observation = {
        "text": text_of(result),
        "messages": [message.to_dict() for message in result.messages],
        "metadata": metadata,
    }
    return {"observation": observation, "reward": result.reward, "done": result.done, "metadata": metadata}


def text_of(result: StepResult) -> str:
    """Return the messages for the model as one text."""
    return "\n\n".join(message.content for message in result.messages)


def with_call_result(data: dict[str, Any], tool_name: str, result: StepResult) -> dict[str, Any]:
    """Return the frame's data with the answer to one call where MCP clients look for it."""
    return {**data, "observation": {**data["observation"], "tool_name": tool_name, "result": call_result(result)}}


def call_result(result: StepResult) -> dict[str, Any]:
    """Return the answer to one call in MCP's form; OpenEnv's client looks at `data` first."""
    text = text_of(result)
    return {"content": [{"type": "text", "text": text}], "data": text, "is_error": text.startswith("error: ")}


def tools_data(tool_schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data of the frame that answers list_tools, which does nothing in the environment."""
    # OpenEnv spells the field otherwise than MCP.
    tools = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["inputSchema"]}
        for tool in mcp_tools(tool_schemas)
    ]
    observation = {"text": "", "messages": [], "tools": tools, "metadata": {}}
    return {"observation": observation, "reward": None, "done": False}


def mcp_tools(tool_schemas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI function schemas as MCP lists tools."""
    functions = [schema["function"] for schema in tool_schemas]
    return [
        {
            "name": function["name"],
            "description": function.get("description", ""),
            "inputSchema": function.get("parameters", {"type": "object", "properties": {}}),
        }
        for function in functions
    ]


def error_frame(code: str, message: str, **more: Any) -> dict[str, Any]:
    """Return an error frame of OpenEnv's WebSocket."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def validation_errors(error: ValidationError) -> list[dict[str, Any]]:
    """Return pydantic's errors without its links and objects."""
    return [{"type": detail["type"], "loc": list(detail["loc"]), "msg": detail["msg"]} for detail in error.errors()]


# JSON-RPC's codes (section 5.1), and the first of those that a server may choose.
_INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS = -32600, -32601, -32602
_INTERNAL_ERROR, _SERVER_ERROR = -32603, -32000


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
    asked: Any, *, sessions: Sessions, tool_schemas: Sequence[Mapping[str, Any]], session: Session | None = None
) -> dict[str, Any]:
    """Answer one request; never raises for anything that a client can cause.

    Args:
        asked: JSON from a client.
        sessions, tool_schemas: of the server.
        session: of the WebSocket that it came through; None: the request names one, if it needs one.
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
    """Return a JSON-RPC error."""
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": data}}


async def _result(
    request: RpcRequest, sessions: Sessions, tool_schemas: Sequence[Mapping[str, Any]], session: Session | None
) -> dict[str, Any]:
    match request.method:
        case "tools/list":
            return {"tools": mcp_tools(tool_schemas)}
        case "tools/call":
            return await _call(request.params, _session_of(request.params, sessions, session), bool(tool_schemas))
        case "openenv/session/create":
            return {"session_id": (session or await _create_session(sessions)).id}
        case "openenv/session/close":
            return await _close_session(_session_of(request.params, sessions, None), sessions)
    raise _RpcError(_METHOD_NOT_FOUND, f"Method not found: {request.method}")


async def _call(params: Mapping[str, Any], session: Session, has_tools: bool) -> dict[str, Any]:
    if not has_tools:
        raise _RpcError(_INTERNAL_ERROR, "this environment has no tools")
    try:
        action_data = {"type": "call_tool", "tool_name": params.get("name"), "arguments": params.get("arguments") or {}}
        action = ToolAction.model_validate(action_data)
    except ValidationError as error:
        raise _RpcError(_INVALID_PARAMS, f"Invalid params: {validation_errors(error)}") from error
    return call_result(await session.act(lambda turn: message_of(action, turn=turn)))


def _session_of(params: Mapping[str, Any], sessions: Sessions, session: Session | None) -> Session:
    if session is not None:
        return session
    session_id = params.get("session_id")
    if not isinstance(session_id, str):
        raise _RpcError(_INVALID_PARAMS, "session_id is required: openenv/session/create gives one")
    try:
        return sessions.get(session_id)
    except UsageError as error:
        raise _RpcError(_INVALID_PARAMS, f"Unknown session_id: {session_id}") from error


async def _create_session(sessions: Sessions) -> Session:
    try:
        return await sessions.create()
    except CapacityError as error:
        counts = {"active_sessions": sessions.num_active, "max_sessions": sessions.max_sessions}
        raise _RpcError(_SERVER_ERROR, str(error), counts) from error


async def _close_session(session: Session, sessions: Sessions) -> dict[str, Any]:
    if session.is_attached:  # its WebSocket closes it, which may be in the middle of a call
        session.is_closing = True
        return {"session_id": session.id, "closed": False, "closing": True}
    await sessions.destroy(session)
    return {"session_id": session.id, "closed": True}
