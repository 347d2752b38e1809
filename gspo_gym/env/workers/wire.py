"""The JSON form of what passes between the program and a worker process.

JSON and not pickle: an environment must not be able to run code in the program. Decoding is strict. Records pass
unchanged, floats to the last bit; only `info`, which is for people, is made fit for JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.errors import ContractError, GymError, RecordError, described
from gspo_gym.types import Message, StepResult, ToolCall

MAX_REQUEST_BYTES = 64 * 2**20  # a player that runs in the worker is sent the whole conversation
MAX_ANSWER_BYTES = 4 * 2**20  # an observation; a million tokens of context are about as long

Json = Any  # dict with text keys, list, str, int, float, bool or None


def encode(value: Json, *, max_bytes: int, where: str) -> bytes:
    """Return a JSON value as it is sent; a ContractError that starts with `where` if it is longer than allowed."""
    payload = json.dumps(value).encode("ascii")  # escaped, because lone surrogates cannot be encoded as UTF-8
    if len(payload) > max_bytes:
        raise ContractError(f"{where} of {len(payload):,} bytes, at most {max_bytes:,} are passed on")
    return payload


def decode(payload: bytes) -> Json:
    """Return the JSON value that `encode` wrote; a ContractError for anything else."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"a worker process sent no JSON: {error}") from error


REFUSALS: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError)
_MAX_CAUSE_CHARS = 2_000
_MAX_DEPTH = 20  # of nested values in info; deeper ones become text
_TEXT = (str,)
_TEXT_OR_NOTHING = (str, type(None))
_NUMBER_OR_NOTHING = (int, float, type(None))


def message_to_json(message: Message) -> dict[str, Json]:
    """Return the OpenAI shape without absent fields, tool arguments as a mapping of JSON values."""
    wire = message.to_dict()
    for call in message.tool_calls:
        require_json(dict(call.arguments), where=f"arguments of tool call {call.name!r}")
    return wire


def message_from_json(value: Json, *, where: str) -> Message:
    """Return the message that `message_to_json` wrote; a ContractError that starts with `where` for another form.
    >>> message_from_json({"role": "user", "content": "Hi."}, where="here").content
    'Hi.'
    """
    optional = ("tool_calls", "tool_call_id", "name", "reasoning_content")
    fields = _object(value, ("role", "content"), optional, where)
    calls = _list(fields.get("tool_calls", []), f"{where}: tool_calls")
    try:
        return Message(
            _typed(fields, "role", _TEXT, where),
            _typed(fields, "content", _TEXT, where),
            tuple(_call_from_json(call, f"{where}: tool call {index}") for index, call in enumerate(calls)),
            tool_call_id=_typed(fields, "tool_call_id", _TEXT_OR_NOTHING, where),
            name=_typed(fields, "name", _TEXT_OR_NOTHING, where),
            reasoning_content=_typed(fields, "reasoning_content", _TEXT_OR_NOTHING, where),
        )
    except RecordError as error:
        raise ContractError(f"{where}: {error}") from error


def messages_to_json(messages: Sequence[Message]) -> list[Json]:
    """Return `message_to_json` of each message."""
    return [message_to_json(message) for message in messages]


def messages_from_json(value: Json, *, where: str) -> tuple[Message, ...]:
    """Return the messages that `messages_to_json` wrote; a ContractError for another form."""
    items = _list(value, where)
    return tuple(message_from_json(item, where=f"{where}: message {index}") for index, item in enumerate(items))


def step_result_to_json(result: StepResult) -> dict[str, Json]:
    """Return all fields of a result; `info` passes through `json_safe`."""
    return {
        "messages": messages_to_json(result.messages),
        "reward": result.reward,
        "reward_terms": dict(result.reward_terms),
        "terminated": result.terminated,
        "truncated": result.truncated,
        "success": result.success,
        "events": list(result.events),
        "info": json_safe(dict(result.info)),
    }


def step_result_from_json(value: Json, *, where: str) -> StepResult:
    """Return the result that `step_result_to_json` wrote; a ContractError for another form."""
    names = ("messages", "reward", "reward_terms", "terminated", "truncated", "success", "events", "info")
    fields = _object(value, names, (), where)
    terms = _mapping(fields["reward_terms"], f"{where}: reward_terms")
    events = _list(fields["events"], f"{where}: events")
    reward = _typed(fields, "reward", _NUMBER_OR_NOTHING, where)
    try:
        return StepResult(
            messages_from_json(fields["messages"], where=where),
            reward=None if reward is None else float(reward),
            reward_terms={name: float(_typed(terms, name, (int, float), where)) for name in terms},
            terminated=_typed(fields, "terminated", (bool,), where),
            truncated=_typed(fields, "truncated", (bool,), where),
            success=_typed(fields, "success", (bool, type(None)), where),
            events=tuple(_typed({"event": event}, "event", _TEXT, where) for event in events),
            info=_mapping(fields["info"], f"{where}: info"),
        )
    except RecordError as error:
        raise ContractError(f"{where}: {error}") from error


def tool_schemas_to_json(schemas: Sequence[Mapping[str, Any]], *, where: str) -> list[Json]:
    """Return OpenAI function schemas unchanged; a ContractError if one is no JSON object."""
    return [
        require_json(dict(schema), where=f"{where}: schema of tool {index}") for index, schema in enumerate(schemas)
    ]


def tool_schemas_from_json(value: Json, *, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas that `tool_schemas_to_json` wrote; a ContractError for another form."""
    return tuple(_mapping(schema, f"{where}: schema of tool {i}") for i, schema in enumerate(_list(value, where)))


def require_json(value: Any, *, where: str) -> Json:
    """Return the value if JSON can hold it as it is (else a ContractError); a tuple becomes a list.
    >>> require_json({"rows": (1, 2.5, None)}, where="here")
    {'rows': [1, 2.5, None]}
    """
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise ContractError(f"{where}: expected text as the keys, got {described(wrong[0])}")
        return {key: require_json(item, where=f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [require_json(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
    if value is None or type(value) in (str, int, float, bool):  # a subclass (an enum) would come back as its base
        return value
    raise ContractError(f"{where}: expected text, a number, a bool, None, a list or a mapping, got {described(value)}")


def json_safe(value: Any, depth: int = 0) -> Json:
    """Return the nearest JSON value: numpy values as numbers and lists, anything unknown as text.

    >>> json_safe({"x": np.float64(0.5), 1: {"a"}, "nan": float("nan")})
    {'x': 0.5, '1': "{'a'}", 'nan': 'nan'}
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)  # JSON has no NaN and no infinity
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {str(key): json_safe(item, depth + 1) for key, item in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [json_safe(item, depth + 1) for item in value]
    return described(value) if depth >= _MAX_DEPTH else repr(value)


def _call_from_json(value: Json, where: str) -> ToolCall:
    fields = _object(value, ("id", "type", "function"), (), where)
    function = _object(fields["function"], ("name", "arguments"), (), where)
    arguments = _mapping(function["arguments"], f"{where}: arguments")
    return ToolCall(_typed(fields, "id", _TEXT, where), _typed(function, "name", _TEXT, where), arguments)


def _object(value: Json, required: Sequence[str], optional: Sequence[str], where: str) -> Mapping[str, Json]:
    fields = _mapping(value, where)
    missing = [name for name in required if name not in fields]
    unknown = [name for name in fields if name not in (*required, *optional)]
    if missing or unknown:
        raise ContractError(f"{where}: expected the keys {list(required)}, missing {missing}, unknown {unknown}")
    return fields


def _mapping(value: Json, where: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ContractError(f"{where}: expected an object, got {described(value)}")
    return value


def _list(value: Json, where: str) -> list[Json]:
    if not isinstance(value, list):
        raise ContractError(f"{where}: expected a list, got {described(value)}")
    return value


def _typed(fields: Mapping[str, Json], name: str, types: tuple[type, ...], where: str) -> Any:
    value = fields.get(name)
    # bool is a subclass of int, but True is not accepted as a number.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        raise ContractError(f"{where}: expected {name} as {expected}, got {described(value)}")
    return value


def refusal_in(error: BaseException | None) -> BaseException | None:
    """Return the ValueError, TypeError or LookupError in a chain of causes, by which an environment refused a value.

    None if there is none. A ContractError does not count, although it is a ValueError: it blames the environment.
    """
    seen: set[int] = set()  # a chain of causes may be a circle
    while error is not None and id(error) not in seen:
        if isinstance(error, REFUSALS) and not isinstance(error, ContractError):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def cause_to_json(error: BaseException) -> dict[str, Json] | None:
    """Return the refusal in an error as the name of its standard class and a text; None if there is none."""
    refusal = refusal_in(error.__cause__ if isinstance(error, GymError) else error)
    if refusal is None:
        return None
    kind = next(kind for kind in REFUSALS if isinstance(refusal, kind))
    return {"kind": kind.__name__, "text": str(refusal)[:_MAX_CAUSE_CHARS]}


def cause_from_json(value: Json) -> Exception | None:
    """Return the exception that `cause_to_json` wrote.

    >>> cause_from_json({"kind": "TypeError", "text": "no such level"})
    TypeError('no such level')
    """
    if value is None:
        return None
    kinds = {kind.__name__: kind for kind in REFUSALS}
    return kinds[value["kind"]](value["text"])
