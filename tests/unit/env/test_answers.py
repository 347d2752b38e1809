"""What an environment may answer, and what is said of everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gspo_gym.env.rewards import Reward
from gspo_gym.env.session import as_messages, as_reset_result, as_step_result
from gspo_gym.errors import ContractError
from gspo_gym.types import Message, ToolCall


def step(*answer: Any) -> Any:
    return as_step_result(answer, where="E: step()")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.bool_(False), 0.0),
    ],
    ids=repr,
)
def test_every_kind_of_number_is_a_reward(reward: Any, expected: float | None) -> None:
    result = step("ok", reward, False, False, {})
    assert result.reward == expected
    assert type(result.reward) in (float, type(None))
    assert (result.reward_terms, result.events, result.success) == ({}, (), None)


def test_a_reward_keeps_its_parts() -> None:
    result = step("ok", Reward({"a": 1.0, "b": -0.5}, events=("x",), success=True), np.True_, False, {"why": 1})
    assert (result.reward, result.reward_terms) == (0.5, {"a": 1.0, "b": -0.5})
    assert (result.events, result.success, result.terminated, result.info) == (("x",), True, True, {"why": 1})


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (("ok", 0.0, False, {}), "expected (observation, reward, terminated, truncated, info), got tuple of length 4"),
        (
            ["ok", 0.0, False, False, {}],
            "expected (observation, reward, terminated, truncated, info), got list of length 5",
        ),
        (None, "expected (observation, reward, terminated, truncated, info), got NoneType"),
        (("ok", float("nan"), False, False, {}), "expected a finite reward, got float nan"),
        (("ok", float("-inf"), False, False, {}), "expected a finite reward, got float -inf"),
        (("ok", "1", False, False, {}), "expected a number or None as the reward, got str '1'"),
        (("ok", 1j, False, False, {}), "expected a number or None as the reward, got complex"),
        (("ok", np.zeros(1), False, False, {}), "expected a number or None as the reward, got ndarray"),
        (("ok", 0.0, 0, False, {}), "expected terminated as a bool, got int 0"),
        (("ok", 0.0, False, None, {}), "expected truncated as a bool, got NoneType None"),
        (("ok", 0.0, False, False, None), "expected info as a mapping, got NoneType None"),
        (([], 0.0, False, False, {}), "the episode goes on, so the model must be shown at least one message"),
        ((3, 0.0, False, False, {}), "expected text or a sequence of messages, got int 3"),
        ((b"ok", 0.0, False, False, {}), "expected text or a sequence of messages, got bytes"),
        ((Message("user", "x"), 0.0, False, False, {}), "got one message; put it into a list"),
        (({"role": "user", "content": "x"}, 0.0, False, False, {}), "got one message; put it into a list"),
        ((["x"], 0.0, False, False, {}), "message 0: expected a Message or a mapping with role and content, got str"),
        (([{"role": "wizard", "content": "x"}], 0.0, False, False, {}), "expected system, user, assistant or tool"),
        (
            ([{"role": "user"}], 0.0, False, False, {}),
            "message 0: expected content as text or a list of text parts, got NoneType",
        ),
        (
            ([{"role": "user", "content": [{"type": "text"}]}], 0.0, False, False, {}),
            """message 0: part 0: expected {"type": "text", "text": ...}, got dict""",
        ),
        (
            ([{"role": "user", "contents": "x"}], 0.0, False, False, {}),
            "unknown key 'contents'; did you mean 'content'?",
        ),
        (([{"role": "tool", "content": "x"}], 0.0, False, False, {}), "to name its call in tool_call_id, got none"),
        (("\ud800", 0.0, False, False, {}), "expected text that can be encoded"),
    ],
    ids=repr,
)
def test_a_wrong_answer_to_step_is_described(answer: Any, complaint: str) -> None:
    with pytest.raises(ContractError) as caught:
        as_step_result(answer, where="E: step()")
    assert str(caught.value).startswith("E: step(): ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize("answer", ["hi", ("hi",), ("hi", {}, 1), ["hi", {}], None])
def test_reset_answers_two_things(answer: Any) -> None:
    with pytest.raises(ContractError, match=r"^E: reset\(\): expected \(observation, info\), got "):
        as_reset_result(answer, where="E: reset()")


def test_reset_must_show_something() -> None:
    with pytest.raises(ContractError, match="expected at least one message for the model, got none"):
        as_reset_result(([], {}), where="E")


def test_an_empty_text_is_a_message_unless_the_episode_is_over() -> None:
    assert step("", 0.0, False, False, {}).messages == (Message("user", ""),)
    assert step("", 0.0, True, False, {}).messages == ()
    assert step([], 0.0, False, True, {}).messages == ()


def test_messages_in_the_openai_shape_are_understood() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    messages = as_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "seen", "tool_call_id": "c1", "name": "look"},
            Message("user", "é"),
        ],
        where="E",
    )
    assert messages == (
        Message("system", "Be brief."),
        Message("assistant", "", tool_calls=(ToolCall("c1", "look", {"at": "it"}),)),
        Message("tool", "seen", tool_call_id="c1", name="look"),
        Message("user", "é"),
    )


@pytest.mark.parametrize(
    "call", [{"name": "look"}, "look", {"function": {"name": "look", "arguments": "[1]"}}], ids=repr
)
def test_a_malformed_tool_call_is_described(call: Any) -> None:
    with pytest.raises(ContractError, match="expected a tool call"):
        as_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], where="E")


def test_arguments_that_are_not_json_are_described() -> None:
    call = {"function": {"name": "look", "arguments": "{"}}
    with pytest.raises(ContractError, match="the arguments of 'look' are not JSON"):
        as_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], where="E")


def test_text_parts_become_lines_of_one_text() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "input_text", "text": "Be brief."}]
    (message,) = as_messages([{"role": "user", "content": parts}], where="E")
    assert message == Message("user", "What is this?\nBe brief.")


@pytest.mark.parametrize(
    "image",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_image", "image_url": "https://example.com/a.png"},
        {"type": "image", "image": object()},
    ],
    ids=lambda part: part["type"],
)
def test_an_image_is_refused_with_its_place_and_with_what_to_do(image: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "Look."}, image]
    with pytest.raises(ContractError) as caught:
        as_messages([Message("system", "x"), {"role": "user", "content": parts}], where="E: step()")
    assert str(caught.value) == (
        f"E: step(): message 1: part 1: expected text, got an image ('{image['type']}'); no renderer here shows images "
        "to a model: leave it out, or say in text what it shows"
    )
    with pytest.raises(ContractError, match=r"^E: message 0: expected text, got an image"):
        as_messages([image], where="E")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "expected content as text or a list of text parts, got list of length 0"),
        ([{"type": "input_audio", "input_audio": {}}], "part 0: expected {"),
        (["text"], "part 0: expected {"),
        ([{"type": "text", "text": 3}], "part 0: expected {"),
    ],
)
def test_other_parts_are_described(content: Any, complaint: str) -> None:
    with pytest.raises(ContractError) as caught:
        as_messages([{"role": "user", "content": content}], where="E")
    assert complaint in str(caught.value)


def test_a_part_without_its_message_is_told_where_it_belongs() -> None:
    with pytest.raises(ContractError, match="expected a message, got a part of one; put it into"):
        as_messages([{"type": "text", "text": "x"}], where="E")
