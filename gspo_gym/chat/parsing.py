"""Sampled text to an assistant `Message`, or to a `ParseFailure` with an error for the model.

One reader for all formats of formats.py. Nothing is repaired: a call that is nearly right is a failure.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gspo_gym.chat.formats import Arguments, Field, Format, Pieces, first_text, pieces, reasoning_tags
from gspo_gym.chat.values import (
    BadTextError,
    Cursor,
    quote,
    read_json,
    read_pairs,
    read_whole_json,
    typed,
)
from gspo_gym.types import Message, ParseStatus, ToolCall

Parameters = Mapping[str, Mapping[str, Any]]
"""The schemas of parameters, by name of the tool and of the parameter."""


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """Sampled text that is not a message.

    `status` is never `ParseStatus.OK`; `error` says what was expected and what came, in words that the model can act
    on; `text` is the whole sampled text, unchanged.
    """

    status: ParseStatus
    error: str
    text: str


def parse_action(
    text: str,
    form: Format,
    *,
    has_tools: bool,
    is_truncated: bool,
    starts_in_reasoning: bool = False,
    parameters: Parameters | None = None,
) -> Message | ParseFailure:
    r"""Return the assistant message of `text`.

    Reasoning stands at the start: `reasoning_content` is None without a block of it, and "" for an empty one. Calls,
    any number, stand in or behind the content; text around them is content. They are named call_0, call_1, ... unless
    the model gave an id.

    A value that a format writes as raw text is typed by the tool's schema (`values.typed`). It ends where the closing
    tag of the format comes first, so it cannot contain that tag.

    Args:
        text: sampled text without the closing stop token (`Renderer.decode`).
        form: the format that the chat template writes.
        has_tools: whether the environment offers tools; if not, a call is ordinary text.
        is_truncated: `max_tokens` ran out, so an unclosed block was cut off, not malformed.
        starts_in_reasoning: the prompt ended inside a reasoning block (`Renderer.opens_reasoning`).
        parameters: of the tools.

    >>> from gspo_gym.chat.formats import FORMATS
    >>> parse_action('<think>\nhm\n</think>\n\nseven', FORMATS[0], has_tools=False, is_truncated=False)
    Message(role='assistant', content='seven', tool_calls=(), tool_call_id=None, name=None, reasoning_content='hm')
    """
    reader = _Reader(text, form, is_truncated=is_truncated, parameters=parameters or {})
    try:
        if form.is_framed:
            return reader.read_blocks(has_tools=has_tools)
        return reader.read_text(has_tools=has_tools, starts_in_reasoning=starts_in_reasoning)
    except BadTextError as bad:
        return ParseFailure(bad.status, bad.error, text)


def parameters_of(tool_schemas: Sequence[Mapping[str, Any]]) -> Parameters:
    """Return the schemas of the parameters of tools in OpenAI's form.

    >>> parameters_of([{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}])
    {'f': {'x': {'type': 'integer'}}}
    """
    functions = [schema.get("function", schema) for schema in tool_schemas]  # some clients send the function alone
    return {
        str(function.get("name")): (function.get("parameters") or {}).get("properties") or {} for function in functions
    }


class _Reader:
    """A cursor over one answer, and the calls that it found."""

    def __init__(self, text: str, form: Format, *, is_truncated: bool, parameters: Parameters) -> None:
        self._text = text
        self._form = form
        self._parameters = parameters
        self._cursor = Cursor(text, is_truncated=is_truncated)
        self._calls: list[ToolCall] = []

    def read_text(self, *, has_tools: bool, starts_in_reasoning: bool) -> Message:
        """Return the message of an answer in which calls stand between texts."""
        reasoning, answer = self._split_reasoning(starts_inside=starts_in_reasoning)
        if not has_tools:
            return Message("assistant", answer, reasoning_content=reasoning)
        self._cursor = Cursor(answer, is_truncated=self._cursor.is_truncated)
        content = self._split_calls(answer)
        return Message("assistant", content, tool_calls=tuple(self._calls), reasoning_content=reasoning)

    def read_blocks(self, *, has_tools: bool) -> Message:
        """Return the message of an answer that is a sequence of blocks."""
        form, cursor = self._form, self._cursor
        reasoning: list[str] = []
        contents: list[str] = []
        while True:
            kind, pattern = self._next_block(has_tools=has_tools)
            if kind == "call":
                self._read_call()
            else:
                (reasoning if kind == "reasoning" else contents).append(
                    self._read_fields(pieces(pattern), kind)["text"]
                )
            is_last = kind != "reasoning" or not form.between
            if cursor.is_done and is_last:
                break
            if form.between:
                for piece in pieces(form.between):
                    cursor.expect(str(piece), "answer", after=f"the {kind}")
        thoughts = "\n".join(reasoning).strip("\n") if reasoning else None
        return Message("assistant", "\n".join(contents), tool_calls=tuple(self._calls), reasoning_content=thoughts)

    def _next_block(self, *, has_tools: bool) -> tuple[str, str]:
        form, cursor = self._form, self._cursor
        kinds = [("reasoning", form.reasoning), ("content", form.content)]
        blocks = [(kind, pattern) for kind, patterns in kinds for pattern in patterns]
        blocks += [("call", pattern) for pattern in form.calls] if has_tools else []
        next_block = next((block for block in blocks if _comes_next(cursor, _texts_before_field(block[1]))), None)
        if next_block is not None:
            return next_block
        beginnings = list(dict.fromkeys(" ".join(_texts_before_field(pattern)) for _, pattern in blocks))
        fault_text = f"answer: expected one of {', '.join(beginnings)}, got {quote(cursor.rest)}"
        if any(beginning.replace(" ", "").startswith("".join(cursor.rest.split())) for beginning in beginnings):
            cursor.end_early(f"answer: cut off before one of {', '.join(beginnings)}", fault_text)
        raise cursor.fault(fault_text)

    def _split_reasoning(self, *, starts_inside: bool) -> tuple[str | None, str]:
        text = self._text
        tags = [reasoning_tags(pattern) for pattern in self._form.reasoning]
        bare_text = text.lstrip()
        tag_pair = next((pair for pair in tags if bare_text.startswith(pair[0])), tags[0] if starts_inside else None)
        if tag_pair is None:
            for tag in (tag for pair in tags for tag in pair):
                if tag in text:
                    self._fail_reasoning(f"expected a reasoning block only at the start of the answer, found {tag}")
            return None, text
        opening, closing = tag_pair
        inside = bare_text.removeprefix(opening) if bare_text.startswith(opening) else text
        reasoning, closing_tag, answer = inside.partition(closing)
        if not closing_tag:
            error = f"expected the reasoning block to be closed by {closing}, but the answer ended"
            if self._cursor.is_truncated:
                raise BadTextError(ParseStatus.TRUNCATED, error)
            self._fail_reasoning(error)
        for tag in tag_pair:
            if tag in reasoning or tag in answer:
                self._fail_reasoning(f"expected one reasoning block, found another {tag}")
        return reasoning.strip("\n"), answer.lstrip("\n")

    def _fail_reasoning(self, error: str) -> NoReturn:
        raise BadTextError(ParseStatus.BAD_REASONING, error)

    def _split_calls(self, answer: str) -> str:
        form, cursor = self._form, self._cursor
        if form.begins:
            return self._read_whole_call(answer)
        texts: list[str] = []
        start = 0
        while (at := answer.find(form.opening, start)) >= 0:
            texts.append(answer[start:at])
            cursor.position = at
            self._read_section()
            start = cursor.position
        texts.append(answer[start:])
        if form.closing and any(form.closing in text for text in texts):
            cursor.fail(f"found {form.closing} that no {form.opening} opened")
        if not self._calls:
            return answer
        if not form.closing and texts[-1].strip():
            cursor.fail(f"tool calls: expected nothing after the {_last_thing(form)}, got {quote(texts[-1].strip())}")
        return "\n".join(body for text in texts if (body := text.strip("\n")).strip())

    def _read_whole_call(self, answer: str) -> str:
        form, cursor = self._form, self._cursor
        body = answer.strip()
        is_cut_off = cursor.is_truncated and bool(form.begins_cut_off and re.match(form.begins_cut_off, body))
        if not is_cut_off and re.match(form.begins, body, re.DOTALL) is None:
            return answer
        self._read_section()
        if not cursor.is_done:
            cursor.fail(f"tool call: expected nothing after the {_last_thing(form)}, got {quote(cursor.rest)}")
        return ""

    def _read_section(self) -> None:
        form, cursor = self._form, self._cursor
        opening, closing = (pieces(pattern) for pattern in form.section)
        for piece in opening:
            assert isinstance(piece, str)
            cursor.expect(piece, self._where)
        while True:
            self._read_call()
            if form.separator and cursor.take(form.separator):
                continue
            # Calls without a tag follow each other (Llama 4); those with one may have text between them.
            next_start = first_text(form.calls[0]) or ("{" if form.begins else "")
            if form.separator or not (closing or form.begins):
                break
            # Also a part of what closes, which is cut off, and is no further call.
            if closing and (cursor.is_at(str(closing[0])) or str(closing[0]).startswith(cursor.rest)):
                break
            if next_start and not cursor.is_at(next_start):
                break
        for piece in closing:
            cursor.expect(
                str(piece), self._where, after="the call", instead=form.separator or first_text(form.calls[0])
            )

    @property
    def _where(self) -> str:
        return f"tool call {len(self._calls) + 1}"

    def _read_call(self) -> None:
        """Read one call, or one list of calls, by the pattern that reads the most of it."""
        start, failures = self._cursor.position, []
        for pattern in self._form.calls:
            self._cursor.position = start
            try:
                fields = self._read_fields(pieces(pattern), self._where)
            except BadTextError as bad:
                failures.append((self._cursor.position, bad))
                continue
            self._calls += self._to_calls(fields)
            return
        raise max(failures, key=lambda failure: failure[0])[1]

    def _read_fields(self, pattern: Pieces, where: str) -> dict[str, Any]:
        """Return the fields of a pattern by name, and move behind it."""
        cursor, fields, last = self._cursor, dict[str, Any](), ""
        for number, piece in enumerate(pattern):
            following = pattern[number + 1] if number + 1 < len(pattern) else ""
            if isinstance(piece, str):
                instead = first_text(self._form.parameter) if last == "the arguments" else ""
                cursor.expect(piece, where, after=last, instead=instead)
                last = piece
                continue
            value = self._read_field(piece, str(following) if isinstance(following, str) else "", fields, where)
            if fields.setdefault(piece.name, value) != value:
                cursor.fail(f"{where}: expected the name {fields[piece.name]} again, got {quote(value)}")
            last = _DESCRIPTIONS.get(piece.name, f"the {piece.name}")
            where = f"{where} ({value})" if piece.name == "name" and "(" not in where else where
        return fields

    def _read_field(self, field: Field, following: str, fields: Mapping[str, Any], where: str) -> Any:
        cursor = self._cursor
        match field.name:
            case "call" | "calls":
                return read_json(cursor, "tool calls" if field.name == "calls" else where)
            case "arguments":
                return self._read_arguments(str(fields["name"]), following, where)
            case "text":
                return self._read_text_block(following)
            case "value":
                text = cursor.find(following, where, f"the value of {fields['key']}")
                return text.removeprefix("\n").removesuffix("\n") if field.is_padded else text
        return self._read_word(field.name, following, where)

    def _read_word(self, kind: str, following: str, where: str) -> str:
        cursor = self._cursor
        if following:
            word = cursor.find(following, where, f"the {kind}").strip()
        else:
            cursor.skip_space()
            match = re.compile(r"[^\s<]*").match(cursor.text, cursor.position)
            assert match is not None
            word, cursor.position = match.group(), match.end()
            if cursor.is_done:
                cursor.end_early(f"{where}: cut off inside the {kind}", f"{where}: expected more after the {kind}")
        if not word or any(letter.isspace() for letter in word):
            cursor.fail(f"{where}: expected the {kind}, a word, got {quote(word)}")
        return word

    def _read_text_block(self, following: str) -> str:
        cursor = self._cursor
        end = following or first_text(self._form.between)
        at = cursor.text.find(end, cursor.position) if end else -1
        if at < 0:
            if following:
                cursor.end_early(f"answer: cut off before {following}", f"answer: expected {following} at the end")
            at = len(cursor.text)
        start, cursor.position = cursor.position, at
        return cursor.text[start:at]

    def _read_arguments(self, tool: str, following: str, where: str) -> Any:
        cursor, form = self._cursor, self._form
        if form.arguments is Arguments.JSON:
            return read_json(cursor, where)
        if form.arguments is Arguments.PARAMETERS:
            return self._read_parameters(tool, where)
        end, equals = following, "=" if form.arguments is Arguments.PYTHON else ":"
        arguments = read_pairs(cursor, where, end=end[0], equals=equals, quote_token=form.quote)
        cursor.position -= 1  # the end belongs to the pattern
        return arguments

    def _read_parameters(self, tool: str, where: str) -> dict[str, Any]:
        cursor, pattern = self._cursor, pieces(self._form.parameter)
        schemas = self._parameters.get(tool, {})
        arguments: dict[str, Any] = {}
        while cursor.is_at(str(pattern[0])):
            fields = self._read_fields(pattern, where)
            key, text = fields["key"], fields["value"]
            if key in arguments:
                cursor.fail(f"{where}: the parameter {key} is given twice")
            arguments[key] = self._value_of_type(key, text, fields.get("is_string"), schemas.get(key), where)
        return arguments

    def _value_of_type(self, key: str, text: str, is_string: str | None, schema: Any, where: str) -> Any:
        if is_string is None:
            return typed(self._cursor, text, schema, f"{where}: parameter {key}")
        if is_string not in ("true", "false"):
            self._cursor.fail(f"{where}: parameter {key}: expected true or false after string=, got {quote(is_string)}")
        return text if is_string == "true" else read_whole_json(text)

    def _to_calls(self, fields: Mapping[str, Any]) -> list[ToolCall]:
        count = len(self._calls)
        if "calls" in fields:
            values = fields["calls"]
            if not isinstance(values, list) or not values:
                self._cursor.fail(f"tool calls: expected a list of objects, got {quote(json.dumps(values))}")
            return [self._to_call(value, count + i) for i, value in enumerate(values)]
        if "call" in fields:
            return [self._to_call(fields["call"], count)]
        name, arguments = fields["name"], fields["arguments"]
        if not isinstance(arguments, Mapping):
            self._cursor.fail(f"{self._where} ({name}): expected a JSON object, got {quote(json.dumps(arguments))}")
        # Kimi K2 names its calls by tool and number, and reads the results by that name.
        call_id = fields.get("id") or (f"functions.{name}:{fields['index']}" if "index" in fields else f"call_{count}")
        return [ToolCall(call_id, name, arguments)]

    def _to_call(self, value: Any, index: int) -> ToolCall:
        form, cursor, where = self._form, self._cursor, f"tool call {index + 1}"
        if not isinstance(value, Mapping):
            cursor.fail(f"{where}: expected a JSON object with name and arguments, got {quote(json.dumps(value))}")
        name = value.get(form.name_key)
        if not isinstance(name, str) or not name.strip():
            cursor.fail(
                f'{where}: expected the tool\'s name as a string under "{form.name_key}", got {quote(json.dumps(name))}'
            )
        key = next((key for key in form.arguments_keys if key in value), form.arguments_keys[0])
        if not isinstance(arguments := value.get(key), Mapping):
            cursor.fail(f'{where} ({name}): expected a JSON object under "{key}", got {quote(json.dumps(arguments))}')
        given_id = value.get(form.id_key)
        return ToolCall(given_id if isinstance(given_id, str) and given_id else f"call_{index}", name, arguments)


_DESCRIPTIONS = {
    "call": "the JSON object",
    "calls": "the list",
    "arguments": "the arguments",
    "name": "the tool's name",
}


def _last_thing(form: Format) -> str:
    return "list" if "{calls}" in form.calls[0] else "JSON object" if "{call}" in form.calls[0] else "call"


def _texts_before_field(pattern: str) -> list[str]:
    return [
        piece
        for piece in itertools.takewhile(lambda piece: isinstance(piece, str), pieces(pattern))
        if isinstance(piece, str)
    ]


def _comes_next(cursor: Cursor, texts: Sequence[str]) -> bool:
    start = cursor.position
    is_next = all(cursor.take(text) for text in texts)
    cursor.position = start
    return is_next
