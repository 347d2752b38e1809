"""What OpenEnv's wire says of an environment of ours: actions, observations, tools, and errors. No I/O.

OpenEnv knows one observation object, a reward and `done`. What else a step of ours says (truncated, success, reward
terms, events) travels in `metadata`, under the key that `env/adapters/openenv.py` reads. Called by `openenv_server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gspo_gym.env.suites.openenv_reading import EXTENSION
from gspo_gym.types import Message, StepResult, ToolCall

RESERVED_TOOL_NAMES = frozenset({"reset", "step", "state", "close"})  # of OpenEnv


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextAction(_Strict):
    """What the model says."""

    message: str = Field(description="What the model says.")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Call(_Strict):
    """One tool call of a message."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    id: str | None = Field(default=None, description="Repeated in the answer; by default numbered.")


class ToolAction(_Strict):
    """One turn: a message with any number of tool calls; or, as MCP clients say it, one call by `tool_name`."""

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
    """What the model is shown next, as OpenAI messages and as one text."""

    text: str = Field(description="The messages' contents, parted by blank lines.")
    messages: list[dict[str, Any]] = Field(description="OpenAI chat messages that are new in this turn.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="gspo_gym: truncated, success, terms, events.")


class ToolObservation(Observation):
    """The same; after call_tool also the result as MCP clients read it, and after list_tools the tools."""

    tool_name: str | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class ResetRequest(BaseModel):
    """`seed` picks the task; whatever else is given becomes the options of the environment's `reset`."""

    model_config = ConfigDict(extra="allow", strict=True)

    seed: int | None = Field(default=None, ge=0, lt=2**63)
    episode_id: str | None = Field(default=None, max_length=255)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def read_action(data: Any, *, has_tools: bool) -> TextAction | ToolAction:
    """The action that a client sent (Any: JSON).

    Raises:
        pydantic.ValidationError: it is none.
    """
    kind = ToolAction if has_tools else TextAction
    return kind.model_validate(data)


def message_of(action: TextAction | ToolAction, *, turn: int) -> Message:
    """The assistant message that an action is; calls without an id are numbered within the episode."""
    if isinstance(action, TextAction):
        return Message("assistant", action.message)
    calls = list(action.tool_calls)
    if action.tool_name is not None:
        calls = [Call(name=action.tool_name, arguments=action.arguments)]
    numbered = (
        ToolCall(call.id or f"call_{turn}_{index}", call.name, call.arguments) for index, call in enumerate(calls)
    )
    return Message("assistant", action.message, tuple(numbered))


def observation_data(result: StepResult) -> dict[str, Any]:
    """The data of an observation frame."""
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
    """What the model is shown, as one text."""
    return "\n\n".join(message.content for message in result.messages)


def with_call_result(data: dict[str, Any], tool_name: str, result: StepResult) -> dict[str, Any]:
    """The frame's data with the answer to one call where MCP clients look for it."""
    return {**data, "observation": {**data["observation"], "tool_name": tool_name, "result": call_result(result)}}


def call_result(result: StepResult) -> dict[str, Any]:
    """The answer to one call in MCP's shape; `data` is where OpenEnv's client looks first."""
    text = text_of(result)
    return {"content": [{"type": "text", "text": text}], "data": text, "is_error": text.startswith("error: ")}


def tools_data(tool_schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The data of the frame that answers list_tools: nothing was done in the environment."""
    tools = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["inputSchema"]}
        for tool in mcp_tools(tool_schemas)
    ]
    observation = {"text": "", "messages": [], "tools": tools, "metadata": {}}
    return {"observation": observation, "reward": None, "done": False}


def mcp_tools(tool_schemas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI function schemas as MCP lists tools."""
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
    """An error as OpenEnv's WebSocket says it."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def validation_errors(error: ValidationError) -> list[dict[str, Any]]:
    """What is wrong, without pydantic's links and objects."""
    return [{"type": one["type"], "loc": list(one["loc"]), "msg": one["msg"]} for one in error.errors()]
