"""Conversations for templates that know neither tools nor system messages: tools in words, results from the user.

The words are those of Qwen 2.5 and Hermes, which most chat models have read. Calls are read back in that format, too
(`parsing.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gspo_gym.chat.template import ChatTemplate, WireStyle, mark, plain_json, to_wire
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

ToolsIn = Literal["auto", "template", "system_message"]
"""Where the model is shown its tools; auto: in the template, if it shows them and their calls."""

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_SYSTEM, _USER = mark(9_000_020), mark(9_000_021)


def tools_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return what a system message says of these tools (OpenAI function schemas).

    >>> tools_text([{"type": "function", "function": {"name": "look", "parameters": {}}}]).splitlines()[6]
    '{"type": "function", "function": {"name": "look", "parameters": {}}}'
    """
    lines = "\n".join(_json(schema) for schema in schemas)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{lines}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{_CALL_OPEN}{_CALL_CLOSE} XML tags:\n{_CALL_OPEN}\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n' + _CALL_CLOSE
    )


def has_system_role(template: ChatTemplate, style: WireStyle) -> bool:
    """Return whether a template shows a system message, with tools also after a result (Mistral drops it there)."""
    call = ToolCall("call_0", "probe_tool", {"key": "value"})
    opening = (Message("system", _SYSTEM), Message("user", _USER))
    call_and_result = (
        Message("assistant", "", (call,)),
        Message("tool", "7", tool_call_id="call_0", name="probe_tool"),
    )
    conversations = [opening, (*opening, *call_and_result)] if template.tools else [opening]
    try:
        texts = [
            template.text([to_wire(m, i, style) for i, m in enumerate(messages)], add_generation_prompt=True)
            for messages in conversations
        ]
    except TemplateError:
        return False
    return all(text.count(_SYSTEM) == text.count(_USER) == 1 for text in texts)


@dataclasses.dataclass(frozen=True, slots=True)
class PlainWords:
    """The form of messages for one template.

    Attributes:
        tools: the text about tools, before an episode's first messages; None: the template shows them, or there are
            none.
        has_system_role: whether the template has one; if not, system texts stand before the user's.
    """

    tools: str | None = None
    has_system_role: bool = True

    def beginning(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation, or its first messages, in this form."""
        if self.tools is not None:
            is_told = bool(messages) and messages[0].role == "system"
            system_text = f"{messages[0].content}\n\n{self.tools}" if is_told else self.tools
            messages = [Message("system", system_text), *messages[is_told:]]
        return self.further(messages)

    def further(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages that follow others in this form."""
        if self.tools is None and self.has_system_role:
            return messages
        plain: list[Message] = []
        was_changed = False
        for message in messages:
            plain_message = self._plain_form(message)
            # Most templates take one message of a user at a time.
            if (
                plain
                and plain[-1].role == plain_message.role == "user"
                and (was_changed or plain_message is not message)
            ):
                gap = "\n" if message.role == "tool" else "\n\n"
                plain[-1] = Message("user", f"{plain[-1].content}{gap}{plain_message.content}")
                was_changed = True
                continue
            plain.append(plain_message)
            was_changed = plain_message is not message
        return plain

    def _plain_form(self, message: Message) -> Message:
        if message.role == "system" and not self.has_system_role:
            return Message("user", message.content)
        if self.tools is None:
            return message
        if message.role == "tool":
            return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        if message.tool_calls:
            parts = [message.content] if message.content else []
            content = "\n".join([*parts, *map(_call_text, message.tool_calls)])
            return Message("assistant", content, reasoning_content=message.reasoning_content)
        return message


def _call_text(call: ToolCall) -> str:
    return f"{_CALL_OPEN}\n{_json({'name': call.name, 'arguments': plain_json(call.arguments)})}\n{_CALL_CLOSE}"


def _json(value: Any) -> str:
    return json.dumps(plain_json(value), ensure_ascii=False)
