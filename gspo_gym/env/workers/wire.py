"""The JSON form of what passes between the program and a worker process.

JSON and not pickle: an environment must not be able to run code in the program. Results pass unchanged, floats to the
last bit, and are checked as those of any environment; only `info`, which is for people, is made fit for JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.rewards import Reward
from gspo_gym.env.session import as_messages
from gspo_gym.errors import ContractError, GymError, described
from gspo_gym.types import Message, StepResult

MAX_REQUEST_BYTES = 64 * 2**20  # a player that runs in the worker is sent the whole conversation
MAX_ANSWER_BYTES = 4 * 2**20  # an observation; a million tokens of context are about as long

Json = Any  # dict with text keys, list, str, int, float, bool or None
Step = tuple[Sequence[Message], float | None, bool, bool, Mapping[str, Any]]


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


def message_to_json(message: Message) -> dict[str, Json]:
    """Return the OpenAI shape without absent fields, tool arguments as a mapping of JSON values."""
    wire = message.to_dict()
    for call in message.tool_calls:
        require_json(dict(call.arguments), where=f"arguments of tool call {call.name!r}")
    return wire


def result_to_json(result: StepResult) -> dict[str, Json]:
    """Return all fields of a result; `info` passes through `json_safe`."""
    return {
        "messages": [message_to_json(message) for message in result.messages],
        "reward": result.reward,
        "reward_terms": dict(result.reward_terms),
        "terminated": result.terminated,
        "truncated": result.truncated,
        "success": result.success,
        "events": list(result.events),
        "info": json_safe(dict(result.info)),
    }


def step_from_json(value: Json, *, where: str) -> Step:
    """Return what `result_to_json` wrote as a `step` returns it, for a session to check.

    Raises:
        ContractError: it has another form. Starts with `where`.
    """
    try:
        reward, terms, events, success = (value[name] for name in ("reward", "reward_terms", "events", "success"))
        if reward is not None and (terms or events or success is not None):
            reward = Reward(terms, events=events, success=success)
        messages = as_messages(value["messages"], where=where)
        return messages, reward, value["terminated"], value["truncated"], value["info"]
    except (TypeError, LookupError, AttributeError) as error:
        raise ContractError(f"{where}: expected a result, got {described(value)}") from error


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


def refusal_in(error: BaseException | None) -> BaseException | None:
    """Return the ValueError, TypeError or LookupError in a chain of causes, by which an environment refused a value.

    None if there is none. A ContractError does not count, although it is a ValueError: it blames the environment.
    """
    seen_ids: set[int] = set()  # a chain of causes may be a circle
    while error is not None and id(error) not in seen_ids:
        if isinstance(error, REFUSALS) and not isinstance(error, ContractError):
            return error
        seen_ids.add(id(error))
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
