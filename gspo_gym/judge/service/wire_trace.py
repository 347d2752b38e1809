"""The dialogue in a v3 session trace, as task apps of the hosted trainer record it (synth-ai 0.2.24, `tracing_v3`).

Such a trace has events of three kinds: calls of the model, whose `call_records` hold what it read and what it said;
actions of the runtime; and the environment's states. Every call record that has an output is a turn. What the model
read is shown once: of a history that grows, only what is new in each call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspo_gym.errors import RecordError
from gspo_gym.types import Message, Role, ToolCall

Json = Mapping[str, Any]  # Any: JSON

_TRACE_KEYS = ("call_records", "system_instance_id", "system_state_after", "system_state_before")
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_FAILED = ("error", "timeout", "cancelled")  # outcomes of a call without an answer


def is_trace_event(event: Json) -> bool:
    """Whether an event is of a session trace, and not a step of a trajectory."""
    return any(key in event for key in _TRACE_KEYS)


def read_trace_events(events: Sequence[Json]) -> tuple[list[Message], list[int]]:
    """The messages in their order, and for each message of the policy the event that it is of.

    Raises:
        RecordError: no event holds what the model said, or a call record is none.
    """
    messages: list[Message] = []
    indices: list[int] = []
    heard: list[Message] = []  # the conversation as the last call has it, its answer included
    for index, event in enumerate(events):
        where = f"trace.event_history[{index}]"
        records = event.get("call_records")
        if not isinstance(records, list | None):
            raise RecordError(f"{where}.call_records: expected a list, got {type(records).__name__}")
        for number, record in enumerate(records or ()):
            inside = f"{where}.call_records[{number}]"
            said = _output(record, inside)
            if said is None:
                continue
            read = _inputs(record, inside)
            messages.extend(map(as_context, read[_num_shared(read, heard) :]))
            messages.append(said)
            indices.append(index)
            messages.extend(_tool_results(record))
            heard = [*read, said]
        messages.extend(_shown(event))
    if not indices:
        raise RecordError(
            "trace.event_history: no event has a call record with an output of the model, so it is not known what the "
            "policy said; record the calls (call_records with output_messages, output_text or output_tool_calls)"
        )
    return messages, indices


def as_context(message: Message) -> Message:
    """What the model read is nothing that it did in this turn, whoever is said to have written it."""
    return Message("user", f"(earlier) {message.content}") if message.role == "assistant" else message


def read_calls(values: Iterable[Any]) -> Iterable[ToolCall]:
    """Tool calls in any shape that clients write; what has none of them is the argument of a call without a name."""
    for number, value in enumerate(values):
        call = value if isinstance(value, Mapping) else {"arguments": value}
        function = call.get("function")
        inner = function if isinstance(function, Mapping) else call
        name = inner.get("name") or call.get("tool_name") or call.get("tool") or "unnamed"
        arguments = inner.get("arguments") or call.get("args") or call.get("arguments_json") or {}
        yield ToolCall(str(call.get("id") or call.get("call_id") or f"call_{number}"), str(name), _arguments(arguments))


def _arguments(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {"text": value}
    return value if isinstance(value, Mapping) else {"value": value}


def _output(record: Any, where: str) -> Message | None:
    """What the model said in a call; None if the call failed."""
    if not isinstance(record, Mapping):
        raise RecordError(f"{where}: expected a call record, got {type(record).__name__}")
    answers = _list_of(record, "output_messages", where) or _list_of(record, "outputs", where)
    calls = _list_of(record, "output_tool_calls", where)
    text = record.get("output_text")
    if not isinstance(text, str):
        text = "\n".join(_text(answer, where) for answer in answers) if answers else None
    if not calls:
        calls = [call for answer in answers for call in _list_of(answer, "tool_calls", where)]
    if text is None and not calls:
        if record.get("outcome") in _FAILED or record.get("error"):
            return None
        raise RecordError(
            f"{where}: it does not say what the policy said; expected output_text, output_messages or output_tool_calls"
        )
    return Message("assistant", text or "", tuple(read_calls(calls)))


def _inputs(record: Json, where: str) -> list[Message]:
    """What the model read in a call."""
    text = record.get("input_text")
    if isinstance(text, str) and text:
        return [Message("user", text)]
    return [
        Message(_ROLES.get(str(value.get("role")), "user"), _text(value, where))
        for value in _list_of(record, "input_messages", where)
    ]


def _list_of(value: Any, key: str, where: str) -> list[Any]:
    """A list of objects; none where there is null or nothing."""
    found = value.get(key) if isinstance(value, Mapping) else None
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise RecordError(f"{where}.{key}: expected a list of objects")
    return found


def _text(value: Any, where: str) -> str:
    """The text of a message, whose parts are called `parts` here and `content` elsewhere; other parts by their type."""
    content = value.get("parts") or value.get("content") or ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RecordError(f"{where}: expected the parts of a message as a list, got {type(content).__name__}")
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else f"[{part.get('type')}]" if isinstance(part, Mapping) else f"{part}"


def _tool_results(record: Json) -> Iterable[Message]:
    results = record.get("tool_results")
    for result in results if isinstance(results, list) else ():
        if isinstance(result, Mapping):
            text = result.get("output_text") or result.get("error_message")
            yield Message("tool", text if isinstance(text, str) else "")


def _shown(event: Json) -> Iterable[Message]:
    """What the runtime did and how the environment stood after it, as JSON."""
    if event.get("call_records"):
        return
    for key in ("actions", "system_state_after"):
        if value := event.get(key):
            yield Message("user", json.dumps({key: value}, ensure_ascii=False, default=str))


def _num_shared(read: Sequence[Message], heard: Sequence[Message]) -> int:
    """How many messages at the beginning of `read` have been shown."""
    pairs = enumerate(zip(read, heard, strict=False))
    return next(
        (index for index, (a, b) in pairs if (a.role, a.content) != (b.role, b.content)), min(len(read), len(heard))
    )
