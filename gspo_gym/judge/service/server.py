"""Serve one of our judges over the HTTP contract to other trainers: `POST /judge/v1/score` and its other routes.

An episode that cannot be scored is answered with status "failed" and a reason, never with a number. The status is 503
if the judge is down or its model refuses its key, 402 if its budget is spent, 422 for an invalid rubric or episode.

The wire holds no tokens, seeds and rewards: the Trajectory built here has one stand-in token per action, and no reward.
An observation that is not messages is shown as JSON, calls of unknown form as they were sent. The policy's words are
taken only from where the policy speaks:

    info.message          its whole message, which clients of this project send
    tool_calls            of the event; beside them, or alone, text, output, content or response of the event itself
    call_records          of a v3 session trace

Any other text in `info` is the environment's. An event in which the policy neither speaks nor shows that it is silent
(an empty message) is refused, because its score would be a guess; only the last one may be an observation alone, since
clients of the contract append the final state.

A v3 session trace (synth-ai 0.2.24, `tracing_v3`) has events of three kinds: calls of the model, whose `call_records`
hold what it read and said; actions of the runtime; and states of the environment. Every call record with an output is a
turn. Of a history that grows from call to call, only the new part is shown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastapi
import numpy as np
from pydantic import ValidationError

from gspo_gym.base.http import read_json
from gspo_gym.base.messages import message_from_wire, messages_from_wire
from gspo_gym.errors import ConfigError, RecordError, UnknownNameError
from gspo_gym.judge.base import (
    Judge,
    JudgeBudgetError,
    JudgeDeniedError,
    JudgeDownError,
    JudgeError,
    JudgeRequest,
    Rubrics,
)
from gspo_gym.judge.rubric_files import RubricsPatch, merge_rubrics, parse_task_rubrics
from gspo_gym.judge.service.contract import LATER_ROUTE, ROUTE, ScoreRequest, judgement_to_wire
from gspo_gym.types import FinishReason, Message, Outcome, Role, Segment, Task, ToolCall, Trajectory, Turn

_RETRY_AFTER_SECONDS = "15"

FindRubrics = Callable[[str], RubricsPatch]  # an id that a request names -> its rubrics; raises UnknownNameError


def create_judge_app(
    judge: Judge, *, default: RubricsPatch | None = None, find_rubrics: FindRubrics | None = None
) -> fastapi.FastAPI:
    """Return the ASGI application; it closes the judge when it ends.

    `default` is for requests that bring no rubric and name none; without `find_rubrics` no id is known.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await judge.close()

    async def score(http: fastapi.Request) -> Any:
        try:
            body = ScoreRequest.model_validate(read_json(await http.body()))
            rubrics = _rubrics_of(body, default, find_rubrics)
            episode = read_episode(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise _error(422, "invalid_request", f"{where}: {first['msg']}") from None
        except (ConfigError, RecordError, UnknownNameError) as error:
            raise _error(422, "invalid_request", str(error)) from error
        request = JudgeRequest(episode.trajectory, rubrics, task_app=body.task_app.id)
        try:
            judgement = await judge.judge(request)
        except JudgeBudgetError as error:
            raise _error(402, "judge_budget", str(error)) from error
        except (JudgeDownError, JudgeDeniedError) as error:
            raise _error(503, "judge_down", str(error)) from error
        except JudgeError as error:
            return {"status": "failed", "event_reviews": [], "event_totals": [], "details": {"error": str(error)}}
        return judgement_to_wire(judgement, request, event_indices=episode.event_indices)

    app = fastapi.FastAPI(title=f"The judge {judge.name}", lifespan=lifespan)
    app.add_api_route("/health", _health, methods=["GET"])
    for route in (ROUTE, f"/api{ROUTE}", f"/api{LATER_ROUTE}"):
        app.add_api_route(route, score, methods=["POST"])
    return app


async def _health() -> dict[str, str]:
    return {"status": "healthy"}


def _rubrics_of(body: ScoreRequest, default: RubricsPatch | None, find_rubrics: FindRubrics | None) -> Rubrics:
    options = body.options
    sources: list[RubricsPatch] = []
    if body.rubric:
        sources.append(parse_task_rubrics(body.rubric, where="rubric"))
    elif options.rubric_id and find_rubrics is not None:
        sources.append(find_rubrics(options.rubric_id))
    elif options.rubric_id:
        raise UnknownNameError(
            f"options.rubric_id: no rubric is known here, so not {options.rubric_id!r}; send `rubric`"
        )
    elif default is not None:
        sources.append(default)
    if options.rubric_overrides:
        sources.append(parse_task_rubrics(options.rubric_overrides, where="options.rubric_overrides"))
    merged = merge_rubrics(*sources)
    rubrics = Rubrics(merged.event if options.event else None, merged.outcome if options.outcome else None)
    if rubrics.event is None and rubrics.outcome is None:
        raise ConfigError(
            "rubric: expected criteria for events or for the outcome, whichever options ask for, got none; send "
            "`rubric` or options.rubric_id"
        )
    return rubrics.only_tracks(options.tracks or ()).with_track_weights(options.weights or {})


def _error(status: int, code: str, message: str) -> fastapi.HTTPException:
    headers = {"Retry-After": _RETRY_AFTER_SECONDS} if status == 503 else None
    return fastapi.HTTPException(status, {"error": {"code": code, "message": message}}, headers)


_TEXT_KEYS = ("text", "output", "content", "response")  # of an event: where other clients put what the policy said


@dataclass(frozen=True, slots=True)
class WireEpisode:
    """An episode, and the event of each of its turns."""

    trajectory: Trajectory
    event_indices: tuple[int, ...]


def read_episode(request: ScoreRequest) -> WireEpisode:
    """Read the episode: one turn for each event in which the policy acts.

    Raises:
        RecordError: there is no such event; or one holds invalid messages, or does not say what the policy said.
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
        # The last event may be an observation alone: clients of the contract append the final state.
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
    seen = event.get("observation", event.get("obs"))
    if isinstance(seen, Mapping) and isinstance(seen.get("messages"), list):
        shown = messages_from_wire(seen["messages"], where=f"{where}.observation.messages")
        yield from (as_context(message) for message in shown)
    elif seen not in (None, "", {}):
        yield Message("user", seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False))


def _said(event: Mapping[str, Any], info: Mapping[str, Any], where: str, *, calls_tools: bool) -> Message | None:
    if isinstance(info.get("message"), Mapping):
        said = message_from_wire(info["message"], where=f"{where}.info.message")
        if said.role != "assistant":
            raise RecordError(f"{where}.info.message: expected the policy's message, got one of role {said.role!r}")
        return said
    calls = event.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RecordError(f"{where}.tool_calls: expected a list, got {type(calls).__name__}")
    text = next((text for key in _TEXT_KEYS if isinstance(text := event.get(key), str)), None)
    # Where a trace calls tools, an empty list of calls is a turn in which the policy was silent.
    if text is None and not calls and not (calls == [] and calls_tools):
        return None
    return Message("assistant", text or "", tuple(read_calls(calls or [])))


def _turn(turn: int) -> Turn:
    """Return a turn of one token of context and one of action."""
    start = 2 * turn
    return Turn(turn, 0, (start, start + 1), (start + 1, start + 2), FinishReason.STOP)


def _placeholder(num_turns: int) -> Segment:  # the wire holds no tokens: one of context and one of action for each turn
    is_action = np.tile(np.array([False, True]), num_turns)
    turn_index = np.where(is_action, np.arange(2 * num_turns) // 2, -1)
    ids, logprobs = np.zeros(2 * num_turns, np.int32), np.zeros(2 * num_turns, np.float32)
    return Segment(ids, is_action, logprobs, turn_index, np.where(is_action, 0, -1))


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
    """Return whether an event is of a session trace, and not a step of a trajectory."""
    return any(key in event for key in _TRACE_KEYS)


def read_trace_events(events: Sequence[Json]) -> tuple[list[Message], list[int]]:
    """Return the messages in order, and for each message of the policy its event.

    Raises:
        RecordError: no event holds what the model said, or a call record is invalid.
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
            # The history grows from call to call: only what is new is shown.
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
    """Return a message that the model read as context: it is no act of this turn, although its role may say so."""
    return Message("user", f"(earlier) {message.content}") if message.role == "assistant" else message


def read_calls(values: Iterable[Any]) -> Iterable[ToolCall]:
    """Read tool calls in any form that clients write; an unknown form becomes the argument of a call without a name."""
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
        if record.get("outcome") in _FAILED or record.get("error"):  # a failed call said nothing
            return None
        raise RecordError(
            f"{where}: it does not say what the policy said; expected output_text, output_messages or output_tool_calls"
        )
    return Message("assistant", text or "", tuple(read_calls(calls)))


def _inputs(record: Json, where: str) -> list[Message]:
    text = record.get("input_text")
    if isinstance(text, str) and text:
        return [Message("user", text)]
    return [
        Message(_ROLES.get(str(value.get("role")), "user"), _text(value, where))
        for value in _list_of(record, "input_messages", where)
    ]


def _list_of(value: Any, key: str, where: str) -> list[Any]:
    """Return a list of objects; an empty one for null or a missing key."""
    found = value.get(key) if isinstance(value, Mapping) else None
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise RecordError(f"{where}.{key}: expected a list of objects")
    return found


def _text(value: Any, where: str) -> str:
    content = value.get("parts") or value.get("content") or ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RecordError(f"{where}: expected the parts of a message as a list, got {type(content).__name__}")
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    # Of an image or a file only its kind can be shown.
    return text if isinstance(text, str) else f"[{part.get('type')}]" if isinstance(part, Mapping) else f"{part}"


def _tool_results(record: Json) -> Iterable[Message]:
    results = record.get("tool_results")
    for result in results if isinstance(results, list) else ():
        if isinstance(result, Mapping):
            text = result.get("output_text") or result.get("error_message")
            yield Message("tool", text if isinstance(text, str) else "")


def _shown(event: Json) -> Iterable[Message]:
    if event.get("call_records"):
        return
    for key in ("actions", "system_state_after"):
        if value := event.get(key):
            yield Message("user", json.dumps({key: value}, ensure_ascii=False, default=str))


def _num_shared(read: Sequence[Message], heard: Sequence[Message]) -> int:
    pairs = enumerate(zip(read, heard, strict=False))
    return next(
        (index for index, (a, b) in pairs if (a.role, a.content) != (b.role, b.content)), min(len(read), len(heard))
    )
