"""Calls of tools that the caller insists on: the prompt begins them, the model samples the rest.

The opening is written as the chat template would write it, and counts as context: nobody sampled it. What the model
then says is its own, so such an answer can be trained on; it may fail to be a call, which is an error, never a repair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.remote.gateway.capture import REQUIRED
from gspo_gym.types import Message


def forced_tool(tool_choice: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The name of the tool that must be called; None if it may be any of several.

    Raises:
        ConfigError: no tool of that name is offered, or none at all.
    """
    names = tool_names(tools)
    if not names:
        raise ConfigError(f"tool_choice {tool_choice!r}: expected tools to choose from, got none; send them in `tools`")
    if tool_choice == REQUIRED:
        return names[0] if len(names) == 1 else None
    if tool_choice not in names:
        raise ConfigError(f"tool_choice: no tool {tool_choice!r} is offered; {nearest_name(tool_choice, names)}")
    return tool_choice


def call_problem(answer: Message, name: str | None, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with an answer that had to call the tool `name` (None: any that is offered); None if nothing."""
    wanted = f"a call of {name}" if name is not None else "a call of one of " + ", ".join(tool_names(tools))
    called = [call.name for call in answer.tool_calls]
    if not called:
        return f"expected {wanted}, got a text"
    allowed = tool_names(tools) if name is None else [name]
    if called[0] not in allowed:
        return f"expected {wanted}, got a call of {called[0]}"
    return None


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of OpenAI function schemas (Any: JSON), in order."""
    return [str(tool.get("function", tool).get("name")) for tool in tools]
