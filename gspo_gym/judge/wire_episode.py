"""An episode as it came over the HTTP judge's wire -> the Trajectory that judges here read.

Tokens, seeds and rewards are not on that wire: every action has one token that stands for it, and no reward. Events of
other trainers' clients hold what they hold: an observation that is no messages is shown as JSON, calls without a known
shape as what was sent. Called by `judge_server.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gspo_gym.chat_api import message_from_wire, messages_from_wire
from gspo_gym.errors import RecordError
from gspo_gym.judge.http_contract import ScoreRequest
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, ToolCall, Trajectory, Turn

_TEXT_KEYS = ("text", "output", "content", "response")  # where other clients put what the model said


def trajectory_from_request(request: ScoreRequest) -> Trajectory:
    """The episode: one turn for each event.

    Raises:
        RecordError: there is no event, or one holds messages that are none.
    """
    events = request.trace.event_history
    if not events:
        raise RecordError("trace.event_history: expected at least one event, got none")
    messages: list[Message] = []
    for turn, event in enumerate(events):
        messages.extend(_messages_of(event, turn))
    env_id = str(request.trace.metadata.get("env_id") or request.task_app.id or "unknown")
    return Trajectory(
        trajectory_id="over-the-wire",
        attempt=0,
        task=Task(env_id, 0),
        sampling_seed=0,
        segments=(_placeholder(len(events)),),
        turns=tuple(_turn(turn) for turn in range(len(events))),
        messages=tuple(messages),
        outcome=Outcome.TRUNCATED if events[-1].get("truncated") else Outcome.TERMINATED,
    )


def _messages_of(event: Mapping[str, Any], turn: int) -> Iterable[Message]:
    """What was seen, what was said, and what came after it, of one event (Any: JSON)."""
    where = f"trace.event_history[{turn}]"
    raw = event.get("info")
    info: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
    seen = event.get("observation", event.get("obs"))
    if isinstance(seen, Mapping) and isinstance(seen.get("messages"), list):
        yield from (_as_context(m) for m in messages_from_wire(seen["messages"], where=f"{where}.observation.messages"))
    elif seen not in (None, "", {}):
        yield Message("user", seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False))
    if "message" in info:
        said = message_from_wire(info["message"], where=f"{where}.info.message")
        if said.role != "assistant":
            raise RecordError(f"{where}.info.message: expected the policy's message, got one of role {said.role!r}")
        yield said
    else:
        texts = (holder.get(key) for holder in (event, info) for key in _TEXT_KEYS)
        text = next((text for text in texts if isinstance(text, str)), "")
        calls = event.get("tool_calls")
        yield Message("assistant", text, tuple(_calls(calls if isinstance(calls, list) else [])))
    if "answer" in info:
        yield from (_as_context(m) for m in messages_from_wire(info["answer"], where=f"{where}.info.answer"))


def _as_context(message: Message) -> Message:
    """What was seen is nothing that the policy did in this turn, whoever is said to have written it."""
    return Message("user", f"(earlier) {message.content}") if message.role == "assistant" else message


def _calls(values: Iterable[Any]) -> Iterable[ToolCall]:
    for number, value in enumerate(values):
        call = value if isinstance(value, Mapping) else {"arguments": value}
        function = call.get("function")
        inner = function if isinstance(function, Mapping) else call
        name = inner.get("name") or call.get("tool_name") or call.get("tool") or "unnamed"
        arguments = inner.get("arguments", call.get("args", call.get("arguments_json", {})))
        yield ToolCall(str(call.get("id") or f"call_{number}"), str(name), _arguments(arguments))


def _arguments(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {"text": value}
    return value if isinstance(value, Mapping) else {"value": value}


def _turn(turn: int) -> Turn:
    """One token of context and one of action each, in this order."""
    start = 2 * turn
    return Turn(turn, 0, (start, start + 1), (start + 1, start + 2), FinishReason.STOP)


def _placeholder(num_turns: int) -> Segment:
    is_action = np.tile(np.array([False, True]), num_turns)
    turn_index = np.where(is_action, np.arange(2 * num_turns) // 2, -1)
    ids, logprobs = np.zeros(2 * num_turns, np.int32), np.zeros(2 * num_turns, np.float32)
    return Segment(ids, is_action, logprobs, turn_index, np.where(is_action, 0, -1))
