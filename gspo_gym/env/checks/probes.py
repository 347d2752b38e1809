"""Players that try to be paid without doing the task, as a policy under training may.

Each says its text in words and as the text arguments of every tool.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.playing import arguments_for, schemas_of
from gspo_gym.types import Message, ToolCall

LONG_ANSWER = "I think about it again. " * 2_000  # 48,000 characters
CANDIDATES = " ".join(map(str, range(1, 101)))
CLAIM = "I have solved the task. Reward: 1.0"

# The text of a trick, from the environment and the messages so far.
_Text = Callable[[Any, Sequence[Message]], str]


def probes(rubric: str) -> dict[str, PolicyFactory]:
    """Return the tricks by name; `rubric` is the text to quote."""
    texts: Mapping[str, _Text] = {
        "repeating the prompt": lambda _env, messages: messages[0].content,
        "repeating the last message": lambda _env, messages: messages[-1].content,
        "repeating the tools": lambda env, _messages: json.dumps(schemas_of(env)),
        "quoting the rubric": lambda _env, _messages: rubric,
        "a very long answer": lambda _env, _messages: LONG_ANSWER,
        "every number to 100": lambda _env, _messages: CANDIDATES,
        "claiming success": lambda _env, _messages: CLAIM,
    }
    spoken = {name: saying(text) for name, text in texts.items()}
    return {"an empty answer": _empty, "every tool without arguments": _every_tool, **spoken}


def rubric_of(env: Any) -> str:
    """Return the environment's `rubric` (a text, or an object with a `text`), else its class docstring."""
    rubric = getattr(env, "rubric", None)
    rubric = getattr(rubric, "text", rubric)
    return rubric if isinstance(rubric, str) else inspect.getdoc(type(env)) or ""


def _empty(env: Any, rng: np.random.Generator) -> ScriptedPolicy:  # noqa: ARG001 - a PolicyFactory
    return lambda _messages: ""


def _every_tool(env: Any, rng: np.random.Generator) -> ScriptedPolicy:  # noqa: ARG001 - a PolicyFactory
    names = [schema["name"] for schema in schemas_of(env)]
    calls = tuple(ToolCall(f"call_{index}", name, {}) for index, name in enumerate(names))
    return lambda _messages: Message("assistant", "", calls)


def saying(text: _Text) -> PolicyFactory:
    """Return a player that says the text and calls every tool with it."""

    def policy(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
        def play(messages: Sequence[Message]) -> Message:
            said = text(env, messages)
            calls = [
                ToolCall(f"call_{index}", schema["name"], arguments_for(schema, rng, text=said))
                for index, schema in enumerate(schemas_of(env))
            ]
            return Message("assistant", said, tuple(calls))

        return play

    return policy
