"""What a request continues, which tool must be called, and what is wrong with an answer that had to call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gspo_gym.remote.gateway.capture_prompts import Conversations, call_problem, forced_tool
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


def test_a_request_has_the_digest_of_its_own_words_whatever_was_asked_before() -> None:
    calls = [(ToolCall("a", "look", {"far": far}),) for far in (1, True, 2.0, 2)]
    words = [
        *(Message(role, text) for role in ("user", "assistant") for text in ("x", "y")),
        *(Message("assistant", "x", tool_calls=call) for call in calls),
        Message("tool", "x", tool_call_id="a"),
    ]
    draw = np.random.default_rng(0)
    asked = [Message("user", "Go.")]
    session, digests = Conversations(), dict[str, bytes]()
    for _ in range(2000):
        # Mostly the last request and more, else a part of it with another end, or another conversation.
        kept = int(draw.choice([len(asked), draw.integers(len(asked) + 1), 0], p=[0.7, 0.2, 0.1]))
        asked = [*asked[:kept], *(words[k] for k in draw.integers(len(words), size=draw.integers(1, 4)))]
        tools = str(draw.choice(["", "[1]"], p=[0.9, 0.1]))
        found = session.find(asked, tools).request_digest
        assert found == Conversations().find(asked, tools).request_digest
        # Clients may change 2.0 to 2, and nothing else.
        assert digests.setdefault(tools + repr(asked).replace("2.0", "2"), found) == found
    assert len(set(digests.values())) == len(digests) > 1000
