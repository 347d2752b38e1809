"""Sampled text to an assistant `Message`, or to a `ParseFailure` with an error for the model.

Nothing is repaired: a call that is nearly JSON is a failure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gspo_gym.types import Message, ParseStatus, ToolCall

REASONING_OPEN = "<think>"
REASONING_CLOSE = "</think>"
_CALL_OPEN = "<tool_call>"
_CALL_CLOSE = "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_CALL_LIST = "[TOOL_CALLS]"
# An answer that is one JSON object with a name and arguments is a call in Llama's format; other JSON is an answer.
_BARE_CALL = re.compile(r'\s*\{(?=.*"name")(?=.*"(?:parameters|arguments)")', re.DOTALL)
# The beginning of such a call, which `max_tokens` cut off before its arguments.
_BARE_CALL_CUT_OFF = re.compile(r'\s*\{\s*"name"\s*:')
_MAX_NESTING = 32  # levels of JSON; deeper values could exhaust the stack of recursive readers


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """Sampled text that is not a message.

    `status` is never `ParseStatus.OK`; `error` says what was expected and what came, in words that the model can act
    on; `text` is the whole sampled text, unchanged.
    """

    status: ParseStatus
    error: str
    text: str


class _BadTextError(Exception):
    def __init__(self, status: ParseStatus, error: str) -> None:
        super().__init__(error)
        self.status = status
        self.error = error


def parse_action(
    text: str, *, has_tools: bool, is_truncated: bool, starts_in_reasoning: bool = False
) -> Message | ParseFailure:
    r"""Return the assistant message of `text`.

    Reasoning stands between `<think>` and `</think>` at the start: `reasoning_content` is None without such a block and
    "" for an empty one. With tools, three formats of calls are read: Hermes and Qwen (`<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`, any number, text around them is content), Llama 3.1 (the whole answer is `{"name":
    ..., "parameters": {...}}`, with or without `<|python_tag|>`) and Mistral (`[TOOL_CALLS] [{...}, ...]`). Calls are
    named call_0, call_1, ... unless the model gave an id.

    Args:
        text: sampled text without the closing stop token (`Renderer.decode`).
        has_tools: whether the environment offers tools; if not, a call is ordinary text.
        is_truncated: `max_tokens` ran out, so an unclosed block was cut off, not malformed.
        starts_in_reasoning: the prompt ended inside a reasoning block (`Renderer.opens_reasoning`).

    >>> parse_action('<think>\nhm\n</think>\n\nseven', has_tools=False, is_truncated=False)
    Message(role='assistant', content='seven', tool_calls=(), tool_call_id=None, name=None, reasoning_content='hm')
    """
    try:
        reasoning, answer = _split_reasoning(text, is_truncated=is_truncated, starts_inside=starts_in_reasoning)
        content, calls = _split_calls(answer, is_truncated=is_truncated) if has_tools else (answer, ())
    except _BadTextError as bad:
        return ParseFailure(bad.status, bad.error, text)
    return Message("assistant", content, tool_calls=calls, reasoning_content=reasoning)


def _split_reasoning(text: str, *, is_truncated: bool, starts_inside: bool) -> tuple[str | None, str]:
    stripped = text.lstrip()
    if stripped.startswith(REASONING_OPEN):
        inside = stripped[len(REASONING_OPEN) :]
    elif starts_inside:
        inside = text
    else:
        for tag in (REASONING_OPEN, REASONING_CLOSE):
            if tag in text:
                raise _BadTextError(
                    ParseStatus.BAD_REASONING,
                    f"expected a reasoning block only at the start of the answer, found {tag}",
                )
        return None, text
    reasoning, closing, answer = inside.partition(REASONING_CLOSE)
    if not closing:
        status = ParseStatus.TRUNCATED if is_truncated else ParseStatus.BAD_REASONING
        raise _BadTextError(
            status, f"expected the reasoning block to be closed by {REASONING_CLOSE}, but the answer ended"
        )
    for tag in (REASONING_OPEN, REASONING_CLOSE):
        if tag in reasoning or tag in answer:
            raise _BadTextError(ParseStatus.BAD_REASONING, f"expected one reasoning block, found another {tag}")
    return reasoning.strip("\n"), answer.lstrip("\n")


def _split_calls(answer: str, *, is_truncated: bool) -> tuple[str, tuple[ToolCall, ...]]:
    if _CALL_OPEN in answer or _CALL_CLOSE in answer:
        return _split_tagged_calls(answer, is_truncated=is_truncated)
    if _CALL_LIST in answer:
        return _split_call_list(answer, is_truncated=is_truncated)
    body = answer.strip()
    tagged = body.startswith(_PYTHON_TAG)
    cut_off = is_truncated and _BARE_CALL_CUT_OFF.match(body) is not None
    if tagged or cut_off or _BARE_CALL.match(body) is not None:
        document = body.removeprefix(_PYTHON_TAG).strip()
        value, end = _read_json(document, 0, where="tool call", is_truncated=is_truncated)
        if document[end:].strip():
            _reject(f"tool call: expected nothing after the JSON object, got {_quote(document[end:].strip())}")
        return "", (_to_call(value, 0, "tool call"),)
    return answer, ()


def _split_tagged_calls(answer: str, *, is_truncated: bool) -> tuple[str, tuple[ToolCall, ...]]:
    calls: list[ToolCall] = []
    texts: list[str] = []
    position = 0
    while (start := answer.find(_CALL_OPEN, position)) >= 0:
        texts.append(answer[position:start])
        where = f"tool call {len(calls) + 1}"
        # JSON is read before the closing tag is looked for, because a string may contain the tag.
        value, end = _read_json(answer, start + len(_CALL_OPEN), where=where, is_truncated=is_truncated)
        closing = _skip_space(answer, end)
        if not answer.startswith(_CALL_CLOSE, closing):
            if is_truncated and _CALL_CLOSE.startswith(answer[closing:]):
                raise _BadTextError(ParseStatus.TRUNCATED, f"{where}: cut off before {_CALL_CLOSE}")
            _reject(f"{where}: expected {_CALL_CLOSE} after the JSON object, got {_quote(answer[closing:])}")
        calls.append(_to_call(value, len(calls), where))
        position = closing + len(_CALL_CLOSE)
    texts.append(answer[position:])
    if any(_CALL_CLOSE in text for text in texts):
        _reject(f"found {_CALL_CLOSE} that no {_CALL_OPEN} opened")
    return "\n".join(kept for text in texts if (kept := text.strip("\n")).strip()), tuple(calls)


def _split_call_list(answer: str, *, is_truncated: bool) -> tuple[str, tuple[ToolCall, ...]]:
    content, _, document = answer.partition(_CALL_LIST)
    value, end = _read_json(document, 0, where="tool calls", is_truncated=is_truncated)
    if not isinstance(value, list) or not value:
        _reject(f"tool calls: expected a list of objects after {_CALL_LIST}, got {_quote(document.strip())}")
    if document[end:].strip():
        _reject(f"tool calls: expected nothing after the list, got {_quote(document[end:].strip())}")
    return content.strip(), tuple(_to_call(item, i, f"tool call {i + 1}") for i, item in enumerate(value))


def _read_json(text: str, position: int, *, where: str, is_truncated: bool) -> tuple[Any, int]:
    start = _skip_space(text, position)
    try:
        value, end = _DECODER.raw_decode(text, start)
        _require_shallow(value, _MAX_NESTING)
        # a lone surrogate could not be tokenised or written to a file
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        # A cut-off document is wrong within its last, incomplete item: at most a `\\u12` or a `fals`. Only an
        # unclosed string is reported further back, at its opening quote.
        if is_truncated and (error.pos >= len(text.rstrip()) - 6 or error.msg.startswith("Unterminated string")):
            raise _BadTextError(ParseStatus.TRUNCATED, f"{where}: cut off inside the JSON") from error
        _reject(f"{where}: not valid JSON: {error.msg} at character {error.pos - start} of {_quote(text[start:])}")
    except RecursionError:
        _reject(f"{where}: not usable JSON: nested too deeply")
    except ValueError as error:  # non-finite or absurdly long numbers, lone surrogates, deep nesting
        _reject(f"{where}: not usable JSON: {error}")
    return value, end


def _to_call(value: Any, index: int, where: str) -> ToolCall:
    if not isinstance(value, Mapping):
        _reject(f"{where}: expected a JSON object with name and arguments, got {_quote(json.dumps(value))}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        _reject(f'{where}: expected the tool\'s name as a string under "name", got {_quote(json.dumps(name))}')
    key = "arguments" if "arguments" in value else "parameters"
    if not isinstance(arguments := value.get(key), Mapping):
        _reject(f'{where} ({name}): expected a JSON object under "arguments", got {_quote(json.dumps(arguments))}')
    given_id = value.get("id")
    return ToolCall(given_id if isinstance(given_id, str) and given_id else f"call_{index}", name, arguments)


def _require_shallow(value: Any, levels: int) -> None:  # else a recursive reader could exhaust its stack
    if isinstance(value, Mapping | list):
        if levels == 0:
            raise ValueError(f"nested more than {_MAX_NESTING} levels deep")
        for item in value.values() if isinstance(value, Mapping) else value:
            _require_shallow(item, levels - 1)


def _reject(error: str) -> NoReturn:
    raise _BadTextError(ParseStatus.BAD_TOOL_CALL, error)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"the number {_quote(literal)} is not finite")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
