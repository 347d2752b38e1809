"""An episode as it came over the HTTP judge's wire -> the Trajectory that judges here read.

Tokens, seeds and rewards are not on that wire: every action has one token that stands for it, and no reward. Events of
other trainers' clients hold what they hold: an observation that is no messages is shown as JSON, calls without a known
shape as what was sent. What the policy said is taken only from where the policy speaks:

    info.message          its whole message, which clients of this project send
    tool_calls            of the event; beside them, or alone, text, output, content or response of the event itself
    call_records          of a v3 session trace (`wire_trace.py`)

`info` is the environment's: a text in it is nothing that the policy said. An event in which the policy neither speaks
nor is silent by what it says (an empty message) is refused, because its score would be a guess; only the last one may
be an observation alone, as clients of the contract append the final state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.base.messages import message_from_wire, messages_from_wire
from gspo_gym.errors import RecordError
from gspo_gym.judge.service.contract import ScoreRequest
from gspo_gym.judge.service.wire_trace import as_context, is_trace_event, read_calls, read_trace_events
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn

_TEXT_KEYS = ("text", "output", "content", "response")  # of an event: where other clients put what the policy said


@dataclass(frozen=True, slots=True)
class WireEpisode:
    """An episode, and of which event each of its turns is."""

    trajectory: Trajectory
    event_indices: tuple[int, ...]


def read_episode(request: ScoreRequest) -> WireEpisode:
    """The episode: one turn for each event in which the policy acts.

    Raises:
        RecordError: there is no such event; or one holds messages that are none, or does not say what the policy said.
    """
    events = request.trace.event_history
    if not events:
        raise RecordError("trace.event_history: expected at least one event, got none")
    if any(map(is_trace_event, events)):
        messages, indices = read_trace_events(events)
    else:
        messages, indices = _read_steps(events)
    env_id = str(request.trace.metadata.get("env_id") or request.task_app.id or "unknown")
    trajectory = Trajectory(
        trajectory_id="over-the-wire",
        attempt=0,
        task=Task(env_id, 0),
        sampling_seed=0,
        segments=(_placeholder(len(indices)),),
        turns=tuple(_turn(turn) for turn in range(len(indices))),
        messages=tuple(messages),
        outcome=Outcome.TRUNCATED if any(event.get("truncated") for event in events) else Outcome.TERMINATED,
    )
    return WireEpisode(trajectory, tuple(indices))


def _read_steps(events: list[dict[str, Any]]) -> tuple[list[Message], list[int]]:
    """Messages, and which events are turns, of a trace with one event for each step."""
    messages: list[Message] = []
    indices: list[int] = []
    for index, event in enumerate(events):
        where = f"trace.event_history[{index}]"
        raw = event.get("info")
        info: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        messages.extend(_seen(event, where))
        said = _said(event, info, where, calls_tools=any(other.get("tool_calls") for other in events))
        if said is not None:
            messages.append(said)
            indices.append(index)
        elif "tool_calls" in event or index < len(events) - 1:
            raise RecordError(
                f"{where}: it does not say what the policy said; expected its message as info.message {{role, "
                "content, tool_calls}, or tool_calls or text of the event"
            )
        if isinstance(info.get("answer"), list):
            after = messages_from_wire(info["answer"], where=f"{where}.info.answer")
            messages.extend(as_context(message) for message in after)
    if not indices:
        raise RecordError("trace.event_history: in no event does the policy act; there is nothing to judge")
    return messages, indices


def _seen(event: Mapping[str, Any], where: str) -> Iterable[Message]:
    """What the environment showed before the policy spoke."""
    seen = event.get("observation", event.get("obs"))
    if isinstance(seen, Mapping) and isinstance(seen.get("messages"), list):
        shown = messages_from_wire(seen["messages"], where=f"{where}.observation.messages")
        yield from (as_context(message) for message in shown)
    elif seen not in (None, "", {}):
        yield Message("user", seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False))


def _said(event: Mapping[str, Any], info: Mapping[str, Any], where: str, *, calls_tools: bool) -> Message | None:
    """What the policy said; None if the event does not say. Where it `calls_tools`, an empty list of them says it."""
    if isinstance(info.get("message"), Mapping):
        said = message_from_wire(info["message"], where=f"{where}.info.message")
        if said.role != "assistant":
            raise RecordError(f"{where}.info.message: expected the policy's message, got one of role {said.role!r}")
        return said
    calls = event.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RecordError(f"{where}.tool_calls: expected a list, got {type(calls).__name__}")
    text = next((text for key in _TEXT_KEYS if isinstance(text := event.get(key), str)), None)
    if text is None and not calls and not (calls == [] and calls_tools):
        return None
    return Message("assistant", text or "", tuple(read_calls(calls or [])))


def _turn(turn: int) -> Turn:
    """One token of context and one of action each, in this order."""
    start = 2 * turn
    return Turn(turn, 0, (start, start + 1), (start + 1, start + 2), FinishReason.STOP)


def _placeholder(num_turns: int) -> Segment:
    is_action = np.tile(np.array([False, True]), num_turns)
    turn_index = np.where(is_action, np.arange(2 * num_turns) // 2, -1)
    ids, logprobs = np.zeros(2 * num_turns, np.int32), np.zeros(2 * num_turns, np.float32)
    return Segment(ids, is_action, logprobs, turn_index, np.where(is_action, 0, -1))
