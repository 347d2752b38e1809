"""Wire codecs: what goes through comes out equal, and what was not written by them is refused with a place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_gym.base.messages import messages_from_wire
from gspo_gym.env.rewards import Reward
from gspo_gym.env.session import as_step_result
from gspo_gym.env.workers.wire import json_safe, message_to_json, require_json, result_to_json, step_from_json
from gspo_gym.errors import ContractError
from gspo_gym.types import Message, StepResult, ToolCall

CALL = ToolCall("call_0", "look", {"where": "left", "depth": 2.5, "deep": {"a": [1, None, True]}})
MESSAGES = (
    Message("system", "Be brief."),
    Message("user", "naïve \u2028 😀 \x00 text"),
    Message("assistant", "", (CALL, ToolCall("", "stop", {})), reasoning_content="hm"),
    Message("tool", "", tool_call_id="call_0", name="look"),
    Message("assistant", "", reasoning_content=""),  # thought nothing, which is not the same as not thinking
)
LONE = Message("assistant", "a lone surrogate, which a model may have sampled: \ud83d")


def through(value: Any) -> Any:
    return json.loads(json.dumps(value))


def read(value: Any) -> StepResult:
    """What a session makes of the answer of a worker."""
    return as_step_result(step_from_json(value, where="here"), where="here")


def test_messages_come_out_as_they_went_in() -> None:
    conversation = (*MESSAGES, LONE)
    wire = through([message_to_json(message) for message in conversation])
    assert messages_from_wire(wire, where="here") == conversation


floats = st.floats(-1e300, 1e300)
rewards = st.builds(
    Reward,
    st.dictionaries(st.text(), floats, max_size=5),
    events=st.lists(st.text()),
    success=st.none() | st.booleans(),
)


answers = st.tuples(
    st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=3),
    st.none() | floats | rewards,
    st.booleans(),
    st.booleans(),
    st.dictionaries(st.text(), st.none() | st.integers() | floats | st.text()),
)


@settings(max_examples=50)
@given(answers)
def test_answers_come_out_as_they_went_in_floats_to_the_last_bit(answer: Any) -> None:
    result = as_step_result(answer, where="here")
    back = read(through(result_to_json(result)))
    assert back == result
    assert repr(back) == repr(result)  # 0.0 and -0.0 are equal, and so are 1 and True


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"reward": "1"}, "here: expected a number or None as the reward, got str '1'"),
        ({"reward": float("nan")}, "here: expected a finite reward, got float nan"),
        ({"terminated": 0}, "here: expected terminated as a bool, got int 0"),
        ({"success": 1}, "reward success: expected True, False or None, got 1"),
        ({"events": "won"}, "reward events: expected a sequence of names, got 'won'"),
        ({"events": [1]}, "reward events: expected a sequence of names, got [1]"),
        ({"reward_terms": {"a": None}}, "reward term 'a': expected a finite number, got NoneType None"),
        ({"reward_terms": [1]}, "here: expected a result, got dict"),
        ({"messages": []}, "here: StepResult.messages: the episode goes on, so the model must be shown"),
        ({"messages": [1]}, "here: message 0: expected a Message or a mapping with role and content, got int 1"),
        ({"messages": None}, "here: expected text or a sequence of messages, got NoneType None"),
        ({"info": 1}, "here: expected info as a mapping, got int 1"),
    ],
)
def test_a_wrong_answer_is_refused_and_says_what_is_wrong(change: dict[str, Any], problem: str) -> None:
    right = result_to_json(StepResult((Message("user", "x"),), reward=0.5))
    assert read(right).reward == 0.5
    with pytest.raises(ContractError) as caught:
        read({**right, **change})
    assert problem in str(caught.value)
    with pytest.raises(ContractError, match="here: expected a result, got"):
        read("text")


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
