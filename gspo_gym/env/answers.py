"""Checks of what an environment answered, which make it a `StepResult`, and the place in its code where it raised."""

from __future__ import annotations

import math
import os
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo_gym.base.messages import message_from_wire, require_encodable, text_of_part
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ContractError, RecordError, described, nearest_name
from gspo_gym.types import Message, StepResult

_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")), "<frozen")


def as_reset_result(answer: object, *, where: str) -> StepResult:
    """Return the result of an answer of `reset`, (observation, info); a ContractError that starts with `where` else."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ContractError(f"{where}: expected (observation, info), got {described(answer)}")
    observation, info = answer
    messages = as_messages(observation, where=where)
    if not messages:
        raise ContractError(f"{where}: expected at least one message for the model, got none")
    return StepResult(messages, info=_as_info(info, where))


def as_step_result(answer: object, *, where: str) -> StepResult:
    """Return the result of an answer of `step`, which must be (observation, reward, terminated, truncated, info).

    The terms, events and success of a `Reward` are kept. A ContractError starts with `where`.
    """
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise ContractError(
            f"{where}: expected (observation, reward, terminated, truncated, info), got {described(answer)}"
        )
    observation, reward, terminated, truncated, info = answer
    is_terminated = _as_flag(terminated, "terminated", where)
    is_truncated = _as_flag(truncated, "truncated", where)
    # An empty text that ends an episode is no message.
    is_last_word = isinstance(observation, str) and not observation and (is_terminated or is_truncated)
    rich = reward if isinstance(reward, Reward) else Reward({})
    try:
        return StepResult(
            () if is_last_word else as_messages(observation, where=where),
            reward=_as_reward(reward, where),
            reward_terms=rich.terms,
            terminated=is_terminated,
            truncated=is_truncated,
            success=rich.success,
            events=rich.events,
            info=_as_info(info, where),
        )
    except RecordError as error:
        raise ContractError(f"{where}: {error}") from error


def as_messages(observation: object, *, where: str) -> tuple[Message, ...]:
    """Return an observation as messages: a string as one user message, or a sequence of messages or OpenAI mappings.

    Content may be a list of text parts, which become lines of one text (as vLLM shows them to a text model). Anything
    else, an image, or a text that cannot be encoded is a ContractError that starts with `where`.
    >>> as_messages([{"role": "user", "content": "Hi."}], where="here")[0].content
    'Hi.'
    """
    if isinstance(observation, str):
        return (_checked(Message("user", str(observation)), where),)
    if isinstance(observation, Message | Mapping):
        raise ContractError(f"{where}: expected text or a sequence of messages, got one message; put it into a list")
    if not isinstance(observation, Sequence) or isinstance(observation, bytes | bytearray):
        raise ContractError(f"{where}: expected text or a sequence of messages, got {described(observation)}")
    return tuple(_as_message(item, f"{where}: message {index}") for index, item in enumerate(observation))


def _as_message(item: object, where: str) -> Message:
    if isinstance(item, Message):
        return _checked(item, where)
    if not isinstance(item, Mapping):
        raise ContractError(f"{where}: expected a Message or a mapping with role and content, got {described(item)}")
    try:
        if "role" not in item and isinstance(item.get("type"), str):
            text_of_part(item, where=where)  # raises for an image, and says so
            raise RecordError(
                f'{where}: expected a message, got a part of one; put it into {{"role", "content": [...]}}'
            )
        for key in item:
            if key not in _KEYS:
                raise RecordError(f"{where}: unknown key {key!r}; {nearest_name(str(key), _KEYS)}")
        # the OpenAI API allows null only beside calls
        if item.get("content") is None and not item.get("tool_calls"):
            raise RecordError(f"{where}: expected content as text or a list of text parts, got NoneType None")
        return _checked(message_from_wire(item, where=where), where)
    except RecordError as error:
        raise ContractError(str(error)) from error


def _checked(message: Message, where: str) -> Message:
    if message.role == "tool" and not message.tool_call_id:
        raise ContractError(f"{where}: expected a tool message to name its call in tool_call_id, got none")
    try:
        require_encodable(message.content, where=where)
    except RecordError as error:
        raise ContractError(str(error)) from error
    return message


def _as_reward(reward: object, where: str) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, int | float | np.integer | np.floating | np.bool_):
        raise ContractError(f"{where}: expected a number or None as the reward, got {described(reward)}")
    if not math.isfinite(reward):
        raise ContractError(f"{where}: expected a finite reward, got {float(reward)}; None means not scored")
    return float(reward)


def _as_flag(flag: object, name: str, where: str) -> bool:
    if not isinstance(flag, bool | np.bool_):
        raise ContractError(f"{where}: expected {name} as a bool, got {described(flag)}")
    return bool(flag)


def _as_info(info: object, where: str) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise ContractError(f"{where}: expected info as a mapping, got {described(info)}")
    return dict(info)


def place_of(error: BaseException) -> str:
    """Return where the author's code raised, as " (folder/file.py:41, in step: the line)"; "" if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    # The innermost line outside this library, Python's own and installed packages; if the environment itself is an
    # installed package, the outermost line outside this library.
    foreign = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    authored = [frame for frame in foreign if not frame.filename.startswith(_INSTALLED)]
    frame = (authored or foreign[:1] or frames)[-1]
    return f" ({'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}, in {frame.name}: {frame.line})"
