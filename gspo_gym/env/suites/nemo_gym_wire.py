"""Conversations in the form of NeMo-Gym, OpenAI's Responses API. No I/O."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.errors import ContractError
from gspo_gym.types import Message

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_SHOWN = 200  # characters of a wrong value in an error

JsonObject = Mapping[str, Any]


def messages_of(params: JsonObject, *, where: str) -> tuple[Message, ...]:
    """Return the messages of `responses_create_params`, which must be text: its instructions and its input."""
    messages = [Message("system", params["instructions"])] if params.get("instructions") else []
    given = params.get("input", ())
    if isinstance(given, str):
        return (*messages, Message("user", given))
    if not isinstance(given, Sequence):
        raise ContractError(f"{where}: expected input as text or a list of messages, got {given!r:.{_SHOWN}}")
    for item in given:
        role = _ROLES.get(item.get("role", "")) if isinstance(item, Mapping) else None
        if role is None:
            raise ContractError(
                f"{where}: expected a message with one of the roles {list(_ROLES)}, got {item!r:.{_SHOWN}}"
            )
        messages.append(Message(role, _content_of(item.get("content"), where)))  # type: ignore[arg-type]  # one of them
    return tuple(messages)


def tool_schemas_of(params: JsonObject, *, where: str) -> tuple[JsonObject, ...]:
    """Return the row's tools as OpenAI chat function schemas, which nest name and parameters one level deeper."""
    schemas = []
    for tool in params.get("tools") or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise ContractError(f"{where}: expected tools of type function with a name, got {tool!r:.{_SHOWN}}")
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return tuple(schemas)


def response_of(messages: Sequence[Message], params: JsonObject, *, response_id: str) -> dict[str, Any]:
    """Return a Responses API object whose output is the conversation after the row's input."""
    # Time and model are constants, which makes the request of an episode reproducible.
    items = [item for index, message in enumerate(messages) for item in _items(message, f"{response_id}_{index}")]
    return {
        "id": response_id,
        "created_at": 0.0,
        "model": params.get("model") or "policy",
        "object": "response",
        "output": items,
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice", "auto"),
        "tools": list(params.get("tools") or ()),
    }


def session_of(cookie: str) -> str:
    """Return the session of a signed Starlette cookie (`session_id`, else all its data); others as they are."""
    # base64(JSON).time.signature: time and signature change with every reply.
    payload = cookie.strip('"').partition(".")[0]
    try:
        held = json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True))
    except ValueError:
        return cookie
    if isinstance(held, dict) and "session_id" in held:
        return str(held["session_id"])
    return json.dumps(held, sort_keys=True)


def _content_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ContractError(f"{where}: expected content as text or parts, got {content!r:.{_SHOWN}}")
    strange = [part.get("type") for part in content if part.get("type") not in _TEXT_PARTS]
    if strange:
        raise ContractError(f"{where}: expected parts of text, got {strange}; images are not read")
    return "\n".join(part.get("text", "") for part in content)


def _items(message: Message, item_id: str) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    if message.role != "assistant":
        return [{"type": "message", "role": message.role, "content": message.content}]
    items: list[dict[str, Any]] = []
    if message.reasoning_content is not None:
        summary = [{"type": "summary_text", "text": message.reasoning_content}]
        items.append({"id": f"rs_{item_id}", "type": "reasoning", "summary": summary})
    if message.content or not message.tool_calls:
        text = {"type": "output_text", "text": message.content, "annotations": []}
        said = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
        items.append({"id": f"msg_{item_id}", **said})
    for index, call in enumerate(message.tool_calls):
        arguments = json.dumps(dict(call.arguments))
        call_item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}
        items.append({"id": f"fc_{item_id}_{index}", "status": "completed", **call_item})
    return items
