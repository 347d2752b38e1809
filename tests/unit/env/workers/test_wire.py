"""Wire codecs: what goes through comes out equal, and what was not written by them is refused with a place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_gym.env.workers.wire import (
    json_safe,
    message_from_json,
    message_to_json,
    messages_from_json,
    messages_to_json,
    require_json,
    step_result_from_json,
    step_result_to_json,
    tool_schemas_from_json,
    tool_schemas_to_json,
)
from gspo_gym.errors import ContractError
from gspo_gym.types import Message, StepResult, ToolCall

CALL = ToolCall("call_0", "look", {"where": "left", "depth": 2.5, "deep": {"a": [1, None, True]}})
MESSAGES = (
    Message("system", "Be brief."),
    Message("user", "naïve \u2028 😀 \ud83d \x00 text"),
    Message("assistant", "", (CALL, ToolCall("", "stop", {})), reasoning_content="hm"),
    Message("tool", "", tool_call_id="call_0", name="look"),
    Message("assistant", "", reasoning_content=""),  # thought nothing, which is not the same as not thinking
)
NO_ARGUMENTS = {"id": "a", "type": "function", "function": {"name": "f"}}


def through(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_messages_come_out_as_they_went_in() -> None:
    assert messages_from_json(through(messages_to_json(MESSAGES)), where="here") == MESSAGES


floats = st.floats(allow_nan=False, allow_infinity=False)
results = st.builds(
    StepResult,
    messages=st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=3).map(tuple),
    reward=st.none() | floats,
    reward_terms=st.dictionaries(st.text(), floats),
    terminated=st.booleans(),
    truncated=st.booleans(),
    success=st.none() | st.booleans(),
    events=st.lists(st.text()).map(tuple),
    info=st.dictionaries(st.text(), st.none() | st.integers() | floats | st.text()),
)


@settings(max_examples=50)
@given(results)
def test_answers_come_out_as_they_went_in_floats_to_the_last_bit(result: StepResult) -> None:
    back = step_result_from_json(through(step_result_to_json(result)), where="here")
    assert back == result
    assert repr(back) == repr(result)  # 0.0 and -0.0 are equal, and so are 1 and True


def test_schemas_come_out_as_they_went_in_with_the_order_of_their_keys() -> None:
    schemas = ({"type": "function", "function": {"name": "b", "description": "", "a": {"z": 1, "y": (2,)}}},)
    back = tool_schemas_from_json(through(tool_schemas_to_json(schemas, where="here")), where="here")
    function = '{"name": "b", "description": "", "a": {"z": 1, "y": [2]}}'
    assert json.dumps(back) == '[{"type": "function", "function": ' + function + "}]"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("text", "here: expected an object, got str 'text'"),
        ({"role": "user"}, "missing ['content'], unknown []"),
        ({"role": "user", "content": "x", "extra": 1}, "missing [], unknown ['extra']"),
        ({"role": "user", "content": 1}, "here: expected content as str, got int 1"),
        ({"role": "nobody", "content": "x"}, "here: Message.role: expected system, user, assistant or tool"),
        ({"role": "user", "content": "x", "name": 1}, "here: expected name as str or null, got int 1"),
        ({"role": "assistant", "content": "", "tool_calls": {}}, "here: tool_calls: expected a list, got dict {}"),
        (
            {"role": "assistant", "content": "", "tool_calls": [NO_ARGUMENTS]},
            "here: tool call 0: expected the keys ['name', 'arguments'], missing ['arguments']",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(wrong: Any, problem: str) -> None:
    with pytest.raises(ContractError) as caught:
        message_from_json(wrong, where="here")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"reward": "1"}, "expected reward as int or float or null, got str '1'"),
        ({"reward": True}, "expected reward as int or float or null, got bool True"),
        ({"reward": float("nan")}, "StepResult.reward: expected a finite number or None, got float nan"),
        ({"terminated": 0}, "expected terminated as bool, got int 0"),
        ({"success": 1}, "expected success as bool or null, got int 1"),
        ({"events": "won"}, "here: events: expected a list, got str 'won'"),
        ({"events": [1]}, "expected event as str, got int 1"),
        ({"reward_terms": {"a": None}}, "expected a as int or float, got NoneType None"),
        ({"messages": []}, "the episode goes on, so the model must be shown at least one message"),
        ({"messages": [1]}, "here: message 0: expected an object, got int 1"),
        ({"more": 1}, "unknown ['more']"),
    ],
)
def test_a_wrong_answer_is_refused_with_its_place(change: dict[str, Any], problem: str) -> None:
    right = step_result_to_json(StepResult((Message("user", "x"),), reward=0.5))
    with pytest.raises(ContractError) as caught:
        step_result_from_json({**right, **change}, where="here")
    assert str(caught.value).startswith("here")
    assert problem in str(caught.value)


def test_a_tool_argument_that_json_cannot_hold_is_refused() -> None:
    message = Message("assistant", "", (ToolCall("c", "f", {"rows": [1, {2, 3}]}),))
    with pytest.raises(ContractError, match=r"arguments of tool call 'f'\['rows'\]\[1\]: expected text.*got set"):
        message_to_json(message)
    with pytest.raises(ContractError, match=r"here: expected text as the keys, got int 1"):
        require_json({1: 2}, where="here")


def test_info_becomes_what_json_can_hold_and_never_fails() -> None:
    ring: list[Any] = []
    ring.append(ring)
    odd = {
        "array": np.arange(3),
        "number": np.float32(0.5),
        "flag": np.True_,
        "pair": (1, "a"),
        "inf": float("inf"),
        3: b"bytes",
        "ring": ring,
    }
    safe = through(json_safe(odd))
    ring_text = safe.pop("ring")
    assert safe == {
        "array": [0, 1, 2],
        "number": 0.5,
        "flag": True,
        "pair": [1, "a"],
        "inf": "inf",
        "3": "b'bytes'",
    }
    assert "list of length 1" in json.dumps(ring_text)
