"""Values inside sampled text: JSON, literals of other formats, and raw texts typed by a tool's schema.

A cursor walks over the text once. What does not fit is a `BadTextError`; nothing is repaired, or skipped but white
space.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from gspo_gym.types import ParseStatus

_MAX_NESTING = 32  # levels; deeper values could exhaust the stack of recursive readers
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# Python's spelling too, because templates write values out by Jinja's `string`.
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"""[^\s,:=(){}\[\]'"<>|]+""")
_BARE_KEY = re.compile(r"[^\s,:{}\[\]<>|]+")
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


class BadTextError(Exception):
    """Sampled text that is not a message; `error` is for the model."""

    def __init__(self, status: ParseStatus, error: str) -> None:
        super().__init__(error)
        self.status = status
        self.error = error


class Cursor:
    """A position in sampled text, which only moves forward.

    Args:
        is_truncated: `max_tokens` ran out, so text that ends too early was cut off and is not malformed.
    """

    def __init__(self, text: str, *, is_truncated: bool) -> None:
        self.text = text
        self.position = 0
        self.is_truncated = is_truncated

    @property
    def rest(self) -> str:
        """The text from here on, without leading white space."""
        return self.text[self._after_space() :]

    @property
    def is_done(self) -> bool:
        """Whether nothing but white space is left."""
        return self._after_space() == len(self.text)

    def skip_space(self) -> None:
        self.position = self._after_space()

    def is_at(self, piece: str) -> bool:
        """Return whether `piece` comes next, behind any white space."""
        return bool(piece) and self.text.startswith(piece, self._after_space())

    def take(self, piece: str) -> bool:
        """Move behind `piece` if it comes next; return whether it did."""
        if not self.is_at(piece):
            return False
        self.position = self._after_space() + len(piece)
        return True

    def expect(self, piece: str, where: str, *, after: str = "", instead: str = "") -> None:
        """Move behind `piece`, which must come next; `instead` might also have come, if the text was cut off."""
        if self.take(piece):
            return
        if any(possible.startswith(self.rest) for possible in (piece, instead) if possible):
            self.end_early(f"{where}: cut off before {piece}", f"{where}: {_expectation(piece, after, '')}")
        self.fail(f"{where}: {_expectation(piece, after, self.rest)}")

    def find(self, piece: str, where: str, what: str) -> str:
        """Return the text up to `piece`, which must come, and move to it."""
        end = self.text.find(piece, self.position)
        if end < 0:
            self.end_early(
                f"{where}: cut off inside {what}", f"{where}: {_expectation(piece, what, self.text[self.position :])}"
            )
        start, self.position = self.position, end
        return self.text[start:end]

    def end_early(self, cut_off: str, malformed: str) -> NoReturn:
        """Raise the error of text that ends too early."""
        if self.is_truncated:
            raise BadTextError(ParseStatus.TRUNCATED, cut_off)
        self.fail(malformed)

    def fail(self, error: str) -> NoReturn:
        """Raise the error of malformed text."""
        raise self.fault(error)

    def fault(self, error: str) -> BadTextError:
        """Return the error of malformed text."""
        return BadTextError(ParseStatus.BAD_TOOL_CALL, error)

    def _after_space(self) -> int:
        at = self.position
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at


def read_json(cursor: Cursor, where: str) -> Any:
    """Return the JSON value that comes next."""
    cursor.skip_space()
    text, start = cursor.text, cursor.position
    try:
        value, cursor.position = _DECODER.raw_decode(text, start)
        _require_shallow(value, _MAX_NESTING)
        # a lone surrogate could not be tokenised or written to a file
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        # A cut-off document is wrong within its last, incomplete item: at most a `\\u12` or a `fals`. Only an
        # unclosed string is reported further back, at its opening quote.
        if cursor.is_truncated and (error.pos >= len(text.rstrip()) - 6 or error.msg.startswith("Unterminated string")):
            raise BadTextError(ParseStatus.TRUNCATED, f"{where}: cut off inside the JSON") from error
        what = error.msg.removesuffix(" at")  # "Invalid control character at"
        cursor.fail(f"{where}: not valid JSON: {what} at character {error.pos - start} of {quote(text[start:])}")
    except RecursionError:
        cursor.fail(f"{where}: not usable JSON: nested too deeply")
    except ValueError as error:  # non-finite or absurdly long numbers, lone surrogates, deep nesting
        cursor.fail(f"{where}: not usable JSON: {error}")
    return value


def read_literal(cursor: Cursor, where: str, *, quote_token: str = "", levels: int = _MAX_NESTING) -> Any:
    """Return the value that comes next: a text, a number, a constant, a list, or an object of such values.

    Texts stand between two `quote_token`, or if that is "", between quotes of Python or JSON, with their escapes; keys
    of objects are bare or texts. Constants are spelled as in JSON or in Python.
    """
    if levels == 0:
        cursor.fail(f"{where}: nested more than {_MAX_NESTING} levels deep")
    if cursor.is_done:
        cursor.end_early(f"{where}: cut off before a value", f"{where}: expected a value, but the answer ended")
    if cursor.take("["):
        return _read_items(
            cursor, where, "]", lambda: read_literal(cursor, where, quote_token=quote_token, levels=levels - 1)
        )
    if cursor.take("{"):
        return read_pairs(cursor, where, end="}", equals=":", quote_token=quote_token, levels=levels - 1)
    if (text := _read_text(cursor, where, quote_token)) is not None:
        return text
    cursor.skip_space()
    word = _WORD.match(cursor.text, cursor.position)
    if word is None:
        _fail_at(cursor, where, "a value", quote_token)
    cursor.position = word.end()
    if cursor.is_truncated and cursor.is_done:  # the rest of the word may be missing
        cursor.end_early(f"{where}: cut off inside a value", "")
    if word.group() in _CONSTANTS:
        return _CONSTANTS[word.group()]
    if _NUMBER.fullmatch(word.group()) is None:
        cursor.fail(f"{where}: expected a text in quotes, a number, true, false or null, got {quote(word.group())}")
    return _to_number(cursor, where, word.group())


def read_pairs(
    cursor: Cursor, where: str, *, end: str, equals: str, quote_token: str = "", levels: int = _MAX_NESTING
) -> dict[str, Any]:
    """Return the pairs of key and value up to `end`, which is taken unless it is ""."""

    pairs: dict[str, Any] = {}

    def read_pair() -> None:
        key = _read_text(cursor, where, quote_token)
        if key is None:
            cursor.skip_space()
            bare = (
                _BARE_KEY.match(cursor.text, cursor.position)
                if equals == ":"
                else _WORD.match(cursor.text, cursor.position)
            )
            if bare is None:
                _fail_at(cursor, where, "a name", quote_token)
            key, cursor.position = bare.group(), bare.end()
        if key in pairs:
            cursor.fail(f"{where}: {key} is given twice")
        cursor.expect(equals, where, after=key)
        pairs[key] = read_literal(cursor, where, quote_token=quote_token, levels=levels)

    _read_items(cursor, where, end, read_pair)
    return pairs


def typed(cursor: Cursor, text: str, schema: Any, where: str) -> Any:
    """Return the value that a raw text stands for under the JSON schema of its parameter.

    A parameter that may only be a text is that text, and so is a text that is one of the values listed (`enum`). For
    one of another type, the text is JSON, in which constants may also be spelled as in Python. A parameter that may be
    both, or whose type is unknown, is the JSON if the text is JSON of an allowed type, else the text: such a parameter
    cannot be the text "5" where 5 is allowed.
    """
    type_names = allowed_types(schema)
    if type_names == {"string"}:
        return text
    value = _json_or_nothing(text)
    choices = [json.dumps(choice) for choice in _choices_of(schema)]
    if choices and (value is _NOTHING or json.dumps(value) not in choices) and json.dumps(text) in choices:
        return text
    if value is not _NOTHING and (
        type_names is None or any(_TYPES[name](value) for name in type_names if name in _TYPES)
    ):
        return value
    if type_names is None or "string" in type_names:
        return text
    raise cursor.fault(f"{where}: expected {' or '.join(sorted(type_names))}, got {quote(text)}")


def quote(text: str) -> str:
    """Return the beginning of a text in quotes, for an error."""
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _read_items(cursor: Cursor, where: str, end: str, read: Callable[[], Any]) -> list[Any]:
    items: list[Any] = []
    while not cursor.take(end):
        if items:
            cursor.expect(",", where, after="a value", instead=end)
            if cursor.is_at(end):
                cursor.fail(f"{where}: expected a value after ',', got {quote(end)}")
        items.append(read())
    return items


def _read_text(cursor: Cursor, where: str, quote_token: str) -> str | None:
    """Return the quoted text that comes next; None if there is none."""
    if quote_token:
        if not cursor.take(quote_token):
            return None
        text = cursor.find(quote_token, where, "a text")
        cursor.position += len(quote_token)
        return text
    mark = next((mark for mark in "'\"" if cursor.is_at(mark)), None)
    if mark is None:
        return None
    cursor.skip_space()
    body = re.compile(rf"{mark}((?:[^{mark}\\]|\\.)*){mark}", re.DOTALL).match(cursor.text, cursor.position)
    if body is None:
        cursor.end_early(f"{where}: cut off inside a text", f"{where}: expected {mark} at the end of a text")
    cursor.position = body.end()
    # As JSON, which has all escapes of Python's that templates and models write, but that of the single quote.
    json_body = re.sub(r"\\(.)|\"", lambda match: _as_json(match), body.group(1), flags=re.DOTALL)
    try:
        text = json.loads(f'"{json_body}"', strict=False)
        text.encode()
    except ValueError as error:  # a lone surrogate, too
        cursor.fail(f"{where}: not a usable text: {error}")
    return str(text)


def _as_json(match: re.Match[str]) -> str:
    if match.group() == '"':
        return '\\"'
    return "'" if match.group(1) == "'" else match.group()


def _fail_at(cursor: Cursor, where: str, description: str, quote_token: str) -> NoReturn:
    rest = cursor.rest
    if quote_token.startswith(rest):  # an empty rest, too
        cursor.end_early(
            f"{where}: cut off before {description}", f"{where}: expected {description}, but the answer ended"
        )
    cursor.fail(f"{where}: expected {description}, got {quote(rest)}")


def _to_number(cursor: Cursor, where: str, literal: str) -> Any:
    try:
        return _DECODER.decode(literal)
    except ValueError as error:
        cursor.fail(f"{where}: {error}")


def _expectation(piece: str, after: str, rest: str) -> str:
    return f"expected {piece}{f' after {after}' if after else ''}, got {quote(rest)}"


def allowed_types(schema: Any) -> set[str] | None:
    """Return the names of the JSON types that a schema allows; None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    if (type_value := schema.get("type")) is not None:
        return {str(name) for name in ([type_value] if isinstance(type_value, str) else type_value)}
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            branch_types = [allowed_types(branch) for branch in branches]
            type_sets = [types for types in branch_types if types is not None]
            return set().union(*type_sets) if type_sets and len(type_sets) == len(branch_types) else None
    if values := _choices_of(schema):
        names = [name for value in values for name in ["string", *_TYPES] if _is_of(value, name)]
        return set(names) or None
    return None


def _choices_of(schema: Any) -> list[Any]:
    """Return the values that a schema lists; none if it lists none."""
    if not isinstance(schema, Mapping):
        return []
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list) else []


def _is_of(value: Any, name: str) -> bool:
    return isinstance(value, str) if name == "string" else _TYPES[name](value)


_NOTHING = object()


def _json_or_nothing(text: str) -> Any:
    if text.strip() in _CONSTANTS:
        return _CONSTANTS[text.strip()]
    try:
        return read_whole_json(text)
    except BadTextError:
        return _NOTHING


def read_whole_json(text: str) -> Any:
    """Return the JSON value that a text is; raises a BadTextError if it is not just that."""
    cursor = Cursor(text, is_truncated=False)
    value = read_json(cursor, "value")
    if not cursor.is_done:
        cursor.fail(f"expected nothing after the value, got {quote(cursor.rest)}")
    return value


def _require_shallow(value: Any, levels: int) -> None:  # else a recursive reader could exhaust its stack
    if isinstance(value, Mapping | list):
        if levels == 0:
            raise ValueError(f"nested more than {_MAX_NESTING} levels deep")
        for item in value.values() if isinstance(value, Mapping) else value:
            _require_shallow(item, levels - 1)


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"the number {quote(literal)} is not finite")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
