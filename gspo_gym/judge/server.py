"""Serve one of our judges over the HTTP contract to other trainers, or a fake judging model for tests and rehearsals.

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

The fake (`gspo-gym judge fake`) is an OpenAI-compatible server. It reads the prompt of `model/prompt.py` as an honest
judge would, by the fences with the nonce, and scores every criterion by a rule: `score_by_words`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastapi
import numpy as np
from fastapi.responses import JSONResponse
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
from gspo_gym.judge.http import LATER_ROUTE, ROUTE, Json, ScoreRequest, explained, judgement_to_wire
from gspo_gym.judge.model.prompt import (
    ALL_EPISODES,
    COMPARED_HEAD,
    COMPARISON,
    EVENT_HEAD,
    OUTCOME_HEAD,
    OUTCOME_PART,
    verdict_key,
)
from gspo_gym.judge.rubric_files import RubricsPatch, merge_rubrics, parse_task_rubrics
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
            episode, event_indices = read_episode(body)
        except ValidationError as error:
            raise _error(422, "invalid_request", explained(error)) from None
        except (ConfigError, RecordError, UnknownNameError) as error:
            raise _error(422, "invalid_request", str(error)) from error
        request = JudgeRequest(episode, rubrics, task_app=body.task_app.id)
        try:
            judgement = await judge.judge(request)
        except JudgeBudgetError as error:
            raise _error(402, "judge_budget", str(error)) from error
        except (JudgeDownError, JudgeDeniedError) as error:
            raise _error(503, "judge_down", str(error)) from error
        except JudgeError as error:
            return {"status": "failed", "event_reviews": [], "event_totals": [], "details": {"error": str(error)}}
        return judgement_to_wire(judgement, request, event_indices=event_indices)

    app = fastapi.FastAPI(title=f"The judge {judge.name}", lifespan=lifespan)
    app.add_api_route("/health", _health, methods=["GET"])
    for route in (ROUTE, f"/api{ROUTE}", f"/api{LATER_ROUTE}"):
        app.add_api_route(route, score, methods=["POST"])
    return app


async def _health() -> Json:
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
    patch = merge_rubrics(*sources)
    rubrics = Rubrics(patch.event if options.event else None, patch.outcome if options.outcome else None)
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


def read_episode(request: ScoreRequest) -> tuple[Trajectory, list[int]]:
    """Read the episode, one turn for each event in which the policy acts; return it with the events of its turns.

    Raises:
        RecordError: there is no such event; or one holds invalid messages, or does not say what the policy said.
    """
    events = request.trace.event_history
    if not events:
        raise RecordError("trace.event_history: expected at least one event, got none")
    is_trace = any(key in event for event in events for key in _TRACE_KEYS)
    messages, indices = (_read_trace if is_trace else _read_steps)(events)
    num_tokens = 2 * len(indices)  # the wire holds no tokens: one of context and one of action for each turn
    is_action = np.arange(num_tokens) % 2 == 1
    segment = Segment(
        np.zeros(num_tokens, np.int32),
        is_action,
        np.zeros(num_tokens, np.float32),
        turn_index=np.where(is_action, np.arange(num_tokens) // 2, -1),
        weight_version=np.where(is_action, 0, -1),
    )
    spans = [((start, start + 1), (start + 1, start + 2)) for start in range(0, num_tokens, 2)]
    trajectory = Trajectory(
        trajectory_id="over-the-wire",
        attempt=0,
        task=Task(str(request.trace.metadata.get("env_id") or request.task_app.id or "unknown"), 0),
        sampling_seed=0,
        segments=(segment,),
        turns=tuple(Turn(turn, 0, *span, FinishReason.STOP) for turn, span in enumerate(spans)),
        messages=tuple(messages),
        outcome=Outcome.TRUNCATED if any(event.get("truncated") for event in events) else Outcome.TERMINATED,
    )
    return trajectory, indices


def _read_steps(events: Sequence[Json]) -> tuple[list[Message], list[int]]:
    messages: list[Message] = []
    indices: list[int] = []
    calls_tools = any(event.get("tool_calls") for event in events)
    for index, event in enumerate(events):
        where = f"trace.event_history[{index}]"
        info = event["info"] if isinstance(event.get("info"), dict) else {}
        messages.extend(_observation(event, where))
        message = _policys_message(event, info, where, calls_tools=calls_tools)
        if message is not None:
            messages.append(message)
            indices.append(index)
        # The last event may be an observation alone: clients of the contract append the final state.
        elif "tool_calls" in event or index < len(events) - 1:
            raise RecordError(
                f"{where}: it does not say what the policy said; expected its message as info.message {{role, "
                "content, tool_calls}, or tool_calls or text of the event"
            )
        if isinstance(info.get("answer"), list):
            messages.extend(map(as_context, messages_from_wire(info["answer"], where=f"{where}.info.answer")))
    if not indices:
        raise RecordError("trace.event_history: in no event does the policy act; there is nothing to judge")
    return messages, indices


def _observation(event: Json, where: str) -> Iterable[Message]:
    content = event.get("observation", event.get("obs"))
    if isinstance(content, Mapping) and isinstance(content.get("messages"), list):
        yield from map(as_context, messages_from_wire(content["messages"], where=f"{where}.observation.messages"))
    elif content not in (None, "", {}):
        yield Message("user", content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))


def _policys_message(event: Json, info: Json, where: str, *, calls_tools: bool) -> Message | None:
    """Return what the policy said; None if the event does not say it."""
    if isinstance(info.get("message"), Mapping):
        message = message_from_wire(info["message"], where=f"{where}.info.message")
        if message.role != "assistant":
            raise RecordError(f"{where}.info.message: expected the policy's message, got one of role {message.role!r}")
        return message
    calls = event.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RecordError(f"{where}.tool_calls: expected a list, got {type(calls).__name__}")
    text = next((text for key in _TEXT_KEYS if isinstance(text := event.get(key), str)), None)
    # Where a trace calls tools, an empty list of calls is a turn in which the policy was silent.
    if text is None and not calls and not (calls == [] and calls_tools):
        return None
    return Message("assistant", text or "", tuple(read_calls(calls or [])))


_TRACE_KEYS = ("call_records", "system_instance_id", "system_state_after", "system_state_before")  # of a session trace
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_FAILED = ("error", "timeout", "cancelled")  # outcomes of a call without an answer


def _read_trace(events: Sequence[Json]) -> tuple[list[Message], list[int]]:
    messages: list[Message] = []
    indices: list[int] = []
    history: list[Message] = []  # the conversation as the last call has it, its answer included
    for index, event in enumerate(events):
        where = f"trace.event_history[{index}]"
        records = event.get("call_records")
        if not isinstance(records, list | None):
            raise RecordError(f"{where}.call_records: expected a list, got {type(records).__name__}")
        for number, record in enumerate(records or ()):
            inside = f"{where}.call_records[{number}]"
            output = _output(record, inside)
            if output is None:
                continue
            inputs = _inputs(record, inside)
            # The history grows from call to call: only what is new is shown.
            pairs = zip(map(_key, inputs), map(_key, history), strict=False)
            num_shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            messages.extend(map(as_context, inputs[num_shared:]))
            messages.append(output)
            indices.append(index)
            messages.extend(_tool_results(record))
            history = [*inputs, output]
        if not records:
            states = [{key: event[key]} for key in ("actions", "system_state_after") if event.get(key)]
            messages.extend(Message("user", json.dumps(state, ensure_ascii=False, default=str)) for state in states)
    if not indices:
        raise RecordError(
            "trace.event_history: no event has a call record with an output of the model, so it is not known what the "
            "policy said; record the calls (call_records with output_messages, output_text or output_tool_calls)"
        )
    return messages, indices


def _key(message: Message) -> tuple[str, str]:
    return message.role, message.content


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
    items = [] if value.get(key) is None else value[key]
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise RecordError(f"{where}.{key}: expected a list of objects")
    return items


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


MODEL = "fake-judge"

_NONCE = re.compile(r"begins with (`+) ([0-9a-f]{20})")
_QUOTED = re.compile(r'"([^"]+)"')
_RANGE = re.compile(r"a number from (\S+) to (\S+)")


@dataclass(frozen=True, slots=True)
class AskedCriterion:
    """A criterion as the prompt names it; `score` is the kind of its score."""

    id: str
    score: str
    description: str


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The content of a prompt as an honest reader takes it.

    Attributes:
        parts: the criteria of every part, "turn_1", ... and "outcome"; of "episode_1", ... the one about what is asked.
        pieces: the label and the text of every piece of the episode.
    """

    nonce: str
    parts: Mapping[str, Sequence[AskedCriterion]]
    pieces: Sequence[tuple[str, str]]

    def said_in(self, part: str) -> str:
        """Return what the policy wrote in a part."""
        kind, _, number = part.partition("_")
        whose = rf"(?:{ALL_EPISODES}|episode {number}), " if kind == "episode" else ""
        turn = number if kind == "turn" else r"\d+"
        return "\n".join(text for label, text in self.pieces if re.match(rf"{whose}turn {turn}: policy", label))


Rule = Callable[[AskedCriterion, str], float]  # a criterion and what the policy wrote in the part -> the score
Answer = Callable[[Sequence[Mapping[str, str]]], str]  # the messages of a request -> the text of the answer


def read_prompt(messages: Sequence[Mapping[str, str]]) -> ReadPrompt:
    """Read a prompt by its fences; a ValueError if it is not one of `prompt.py`."""
    rules, data = messages[0]["content"], messages[-1]["content"]
    match = _NONCE.search(rules)
    if match is None:
        raise ValueError("expected a prompt of this project's judge, found no nonce in it")
    fence = f"{match[1]} {match[2]}"
    pieces: list[tuple[str, str]] = []
    label, lines = None, list[str]()
    for line in data.split("\n"):
        if line == f"{fence} end" and label is not None:
            pieces.append((label, "\n".join(lines)))
            label, lines = None, []
        elif label is None and line.startswith(f"{fence} "):
            label = line.removeprefix(f"{fence} ")
        elif label is not None:
            lines.append(line)
    return ReadPrompt(match[2], _read_parts(rules), pieces)


def score_by_words(criterion: AskedCriterion, text: str) -> float:
    """Look for the words in double quotes in a criterion's description in what the policy wrote, in any case.

    The score is the share of them that are there: on a binary scale 1 for all of them, else 0; between the ends of a
    custom scale; on a count scale, how often they are there. Without quoted words it is the lowest.
    """
    words = [word.casefold() for word in _QUOTED.findall(criterion.description)]
    text = text.casefold()
    if criterion.score.startswith("a whole number"):
        return float(sum(text.count(word) for word in words))
    share = sum(word in text for word in words) / len(words) if words else 0.0
    if criterion.score == "0 or 1":
        return float(share >= 1)
    ends = _RANGE.match(criterion.score)
    low, high = (float(ends[1]), float(ends[2])) if ends else (0.0, 1.0)
    return low + (high - low) * share


def honest_verdict(prompt: ReadPrompt, rule: Rule = score_by_words) -> str:
    """Return the verdict by the rule, as JSON."""
    parts: Json = {
        part: {c.id: {"reason": "by rule", "score": _number(rule(c, prompt.said_in(part)))} for c in criteria}
        for part, criteria in prompt.parts.items()
    }
    return json.dumps({verdict_key(prompt.nonce): {**parts, "summary": "scored by a rule, not by a model"}})


def create_fake_judge_app(rule: Rule = score_by_words, *, answer: Answer | None = None) -> fastapi.FastAPI:
    """Return the server as an ASGI application, with /v1/models and /v1/chat/completions.

    `answer` replaces the whole answer, for judges that misbehave; `rule` is then not used.
    """
    app = fastapi.FastAPI(title="A fake judge that follows a rule")

    async def models() -> Json:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "gspo-gym"}]}

    async def complete(request: fastapi.Request) -> Any:
        try:
            messages = read_json(await request.body())["messages"]
            text = honest_verdict(read_prompt(messages), rule) if answer is None else answer(messages)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            message = f"this fake answers only prompts of this project's judge: {error}"
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, 400)
        return completion(text, messages)

    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/chat/completions", complete, methods=["POST"])
    return app


def completion(text: str, messages: Sequence[Mapping[str, str]]) -> Json:
    """Return a chat completion with that text, in the form of the API."""
    # A token is four bytes here.
    num_read, num_written = sum(_num_tokens(message["content"]) for message in messages), _num_tokens(text)
    message = {"role": "assistant", "content": text, "refusal": None}
    usage = {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }


def _read_parts(rules: str) -> dict[str, list[AskedCriterion]]:
    if f"\n{COMPARED_HEAD}" in rules:
        return _read_compared(rules)
    parts: dict[str, list[AskedCriterion]] = {}
    current: list[AskedCriterion] | None = None
    for line in rules.split("\n"):
        if line.startswith(EVENT_HEAD):
            current = []
            names = line.removeprefix(EVENT_HEAD).split(",")
            parts.update({name.strip(): current for name in names})
        elif line.startswith(OUTCOME_HEAD):
            current = parts[OUTCOME_PART] = []
        elif not line.startswith("{"):
            current = None
        elif current is not None:
            current.append(AskedCriterion(**json.loads(line)))
    return parts


def _read_compared(rules: str) -> dict[str, list[AskedCriterion]]:
    """Return for each compared episode one criterion, with the descriptions of all that it is compared by."""
    head, *lines = rules[rules.index(f"\n{COMPARED_HEAD}") + 1 :].split("\n")
    criteria = itertools.takewhile(lambda line: line.startswith("{"), lines)
    description = " ".join(json.loads(line)["description"] for line in criteria)
    asked = AskedCriterion(COMPARISON.id, "a number from 0 to 1", description)
    return {name.strip(): [asked] for name in head.removeprefix(COMPARED_HEAD).split(",")}


def _number(score: float) -> int | float:  # as a model writes a count
    return int(score) if score.is_integer() else score


def _num_tokens(text: str) -> int:
    return -(-len(text.encode()) // 4)
