"""The OpenAI chat API's messages to `types.Message` and back.

Reading is lenient where clients and servers differ (content null or in parts, arguments as text or as an object,
unknown fields) and strict where a guess would change what was said. No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.errors import RecordError, described
from gspo_gym.types import Message, ToolCall

Json = Any  # dict with text keys, list, str, int, float, bool or None

_ROLES = {"developer": "system", "function": "tool"}  # other names of the same roles
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image", "image")


def message_from_wire(value: Json, *, where: str) -> Message:
    """Return one message of a request or of an answer.

    Content may be text, null (beside tool calls) or a list of text parts, which become lines of one text; the arguments
    of a call JSON text or an object. Role "developer" is system. Unknown fields are ignored.

    Raises:
        RecordError: it is no message, or holds an image. Starts with `where`.

    >>> message_from_wire({"role": "assistant", "content": None, "refusal": None}, where="here").content
    ''
    """
    if not isinstance(value, Mapping):
        raise RecordError(f"{where}: expected a message with role and content, got {described(value)}")
    role, content, calls = value.get("role"), value.get("content"), value.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RecordError(f"{where}: expected tool_calls as a list, got {described(calls)}")
    text = "" if content is None else text_from_wire(content, where=where)  # null stands beside tool calls
    parsed = tuple(tool_call_from_wire(call, where=f"{where}: tool call {index}") for index, call in enumerate(calls))
    rest = {key: _text_or_none(value, key, where) for key in ("tool_call_id", "name", "reasoning_content")}
    try:
        return Message(_ROLES.get(role, role) if isinstance(role, str) else "(none)", text, parsed, **rest)  # type: ignore[arg-type]  # it checks
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from error


def messages_from_wire(value: Json, *, where: str) -> tuple[Message, ...]:
    """Return `message_from_wire` of each message.

    Raises:
        RecordError: it is no list, or something in it is no message. Starts with `where`.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RecordError(f"{where}: expected a list of messages, got {described(value)}")
    return tuple(message_from_wire(item, where=f"{where}[{index}]") for index, item in enumerate(value))


def text_from_wire(content: Json, *, where: str) -> str:
    r"""Return content as one text: itself, or its text parts as lines (as vLLM shows them to a text model).

    Raises:
        RecordError: it is neither, or a part is an image. Starts with `where`.

    >>> text_from_wire([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], where="here")
    'a\nb'
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise RecordError(f"{where}: expected content as text or a list of text parts, got {described(content)}")
    return "\n".join(text_of_part(part, where=f"{where}: part {index}") for index, part in enumerate(content))


def text_of_part(part: Json, *, where: str) -> str:
    """Return the text of one content part.

    Raises:
        RecordError: it is no text part. Starts with `where`.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _IMAGE_PARTS:
        raise RecordError(
            f"{where}: expected text, got an image ({kind!r}); no renderer here shows images to a model: leave it out, "
            "or say in text what it shows"
        )
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise RecordError(f'{where}: expected {{"type": "text", "text": ...}}, got {described(part)}')
    return text


def tool_call_from_wire(value: Json, *, where: str) -> ToolCall:
    """Return a tool call; its arguments may be JSON text (empty for none) or an object.

    Raises:
        RecordError: it is no call, or its arguments are no JSON object. Starts with `where`.
    """
    function = value.get("function") if isinstance(value, Mapping) else None
    if isinstance(function, Mapping):
        name, arguments = function.get("name"), function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (json.JSONDecodeError, RecursionError) as error:
                raise RecordError(f"{where}: the arguments of {name!r} are not JSON: {error}") from error
        if isinstance(name, str) and isinstance(arguments, Mapping):
            return ToolCall(str(value.get("id") or ""), name, dict(arguments))
    raise RecordError(
        f'{where}: expected a tool call {{"id": ..., "function": {{"name": ..., "arguments": {{...}}}}}}, '
        f"got {described(value)}"
    )


def message_to_wire(message: Message) -> dict[str, Json]:
    """Return a message in the API's form, with arguments as JSON text.

    >>> message_to_wire(Message("user", "Hi."))
    {'role': 'user', 'content': 'Hi.'}
    """
    wire = message.to_dict()
    wire.pop("reasoning_content", None)  # other servers refuse it, or show it to their model
    for call in wire.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return wire


def require_encodable(text: str, *, where: str) -> None:
    """Raise for a lone surrogate, which JSON can spell and no tokenizer can read.

    Raises:
        RecordError: there is one. Starts with `where`.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordError(f"{where}: expected text that can be encoded, got a lone surrogate: {error}") from error


def _text_or_none(value: Mapping[str, Json], key: str, where: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise RecordError(f"{where}: expected {key} as text, got {described(text)}")
    return text
