"""Which tool must be called, and what is wrong with an answer that had to call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gspo_gym.remote.gateway.capture_prompts import call_problem, forced_tool
from gspo_gym.types import Message, ToolCall

LOOK, JUMP = ({"type": "function", "function": {"name": name}} for name in ("look", "jump"))


@pytest.mark.parametrize(
    ("choice", "tools", "forced"),
    [
        ("jump", (LOOK, JUMP), "jump"),
        ("required", (LOOK, JUMP), None),
        ("required", (JUMP,), "jump"),  # it can be no other, so its name is begun for the model
    ],
)
def test_a_required_call_is_of_the_named_tool_or_of_the_only_one(
    choice: str, tools: tuple[Mapping[str, Any], ...], forced: str | None
) -> None:
    assert forced_tool(choice, tools) == forced


@pytest.mark.parametrize(
    ("called", "name", "problem"),
    [
        (("jump",), "jump", None),
        (("look",), None, None),
        (("jump", "look"), "jump", None),
        ((), "jump", "expected a call of jump, got a text"),
        ((), None, "expected a call of one of look, jump, got a text"),
        (("look", "jump"), "jump", "expected a call of jump, got a call of look"),
        (("fly",), None, "expected a call of one of look, jump, got a call of fly"),
    ],
)
def test_the_first_call_of_an_answer_must_be_the_forced_one(
    called: tuple[str, ...], name: str | None, problem: str | None
) -> None:
    answer = Message("assistant", "", tool_calls=tuple(ToolCall(f"call_{i}", c, {}) for i, c in enumerate(called)))
    assert call_problem(answer, name, (LOOK, JUMP)) == problem
