"""Rows become questions: checked, put into a conversation, and split into training and held-out ones.

The two sides never share a question, whatever the files hold, and a seed names the same row for ever. Called by
`dataset.py`; reading is `dataset_rows.py`.
"""

from __future__ import annotations

import functools
import json
import math
import string
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.env.data.rows import Row, RowSource, read_rows
from gspo_gym.env.data.splits import Entry, Sides, content_hash, in_order, split_by_content, without
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.types import Message, Role

_ROLES: tuple[Role, ...] = ("system", "user", "assistant")
_SHOWN = 5  # bad rows that an error tells of


@dataclass(frozen=True)
class ConversationTemplate:
    """The messages that open an episode, with {column} where a row's text goes; {{ and }} are plain braces.

    What a row holds is put in as it is: braces in it mean nothing. A value that is not text is written as JSON.

    Raises:
        ConfigError: it is no sequence of messages of text, or does not end with something to be answered.

    >>> template = ConversationTemplate.of([{"role": "user", "content": "Q: {question}"}])
    >>> template.messages({"question": "{x}?"})[0].content
    'Q: {x}?'
    """

    templates: tuple[tuple[Role, str], ...]  # (role, content)

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> ConversationTemplate:
        """From messages in the OpenAI shape (Any: a user wrote them)."""
        if isinstance(messages, str | Mapping) or not messages:
            raise ConfigError(f"conversation: expected a list of {{role, content}}, got {messages!r:.80}")
        for number, message in enumerate(messages):
            where = f"conversation[{number}]"
            if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
                raise ConfigError(f"{where}: expected role and content, got {message!r:.80}")
            if message["role"] not in _ROLES or not isinstance(message["content"], str):
                raise ConfigError(f"{where}: expected a text with one of the roles {_ROLES}, got {message!r:.80}")
            _pieces(message["content"], where)
        if messages[-1]["role"] != "user":
            raise ConfigError(f"conversation: expected to end with a user's message, got {messages[-1]['role']!r}")
        return cls(tuple((message["role"], message["content"]) for message in messages))

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it shows."""
        pieces = (piece for _, content in self.templates for piece in _pieces(content, "conversation"))
        return frozenset(column for _, column in pieces if column is not None)

    def messages(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        """The messages for a row that has the columns."""
        return tuple(Message(role, _filled(content, row)) for role, content in self.templates)


@dataclass(frozen=True)
class Reading:
    """How rows become questions.

    Attributes:
        conversation: what the model is shown.
        columns: the columns that every row must have, besides those that the conversation shows.
        renamed: (new name, name in the data) of columns; a column that has the new name already is dropped.
        max_prompt_characters: rows whose conversation is longer are left out; None: none is.
    """

    conversation: ConversationTemplate
    columns: frozenset[str]
    renamed: tuple[tuple[str, str], ...] = ()
    max_prompt_characters: int | None = None


@dataclass(frozen=True)
class Questions(Sides[Row]):
    """The questions of both sides; no conversation of one is on the other.

    Attributes:
        num_too_long: rows left out for their length.
        num_in_both: rows left out of a given training set because the given held-out set asks the same.
    """

    num_too_long: int = 0
    num_in_both: int = 0


def load_questions(
    rows: RowSource, held_out: RowSource | None, reading: Reading, *, held_out_fraction: float, split_seed: int
) -> Questions:
    """The questions of one source split by `held_out_fraction`, or of two. Sources that are named are read once.

    A question is its whole conversation, with any white space counted as one space. Split: a question is held out if
    the hash of (split_seed, question) falls into the fraction, so that equal ones stay together and rows added to the
    file later move no other. Order: by that hash, which is a shuffle that needs no generator.

    Raises:
        ConfigError: a source cannot be read, rows are bad (names the first few), or one side is empty.
    """
    if isinstance(rows, str | Path) and (held_out is None or isinstance(held_out, str | Path)):
        stamps = (_stamp(rows), _stamp(held_out))
        with _loading:  # else all episodes that start at once would read the file
            return _load_named(rows, held_out, reading, held_out_fraction, split_seed, stamps)
    return _load(rows, held_out, reading, held_out_fraction, split_seed)


def _load(
    rows: RowSource, held_out: RowSource | None, reading: Reading, held_out_fraction: float, split_seed: int
) -> Questions:
    asked, too_long = _checked(rows, reading, split_seed)
    if held_out is None:
        train, kept = split_by_content(asked, held_out_fraction)
        advice = f"; {len(asked)} rows were split by held_out_fraction {held_out_fraction:g}: change it or split_seed"
        in_both = 0
    else:
        kept, also_too_long = _checked(held_out, reading, split_seed)
        too_long += also_too_long
        train = without(asked, kept)
        in_both, advice = len(asked) - len(train), ""
    for name, side in (("training", train), ("held-out", kept)):
        if not side:
            raise ConfigError(
                f"rows: expected a {name} row, got none ({too_long} too long, {in_both} in both sets){advice}"
            )
    return Questions(in_order(train), in_order(kept), too_long, in_both)


_loading = threading.Lock()


@functools.lru_cache(maxsize=8)
def _load_named(
    rows: str | Path,
    held_out: str | Path | None,
    reading: Reading,
    held_out_fraction: float,
    split_seed: int,
    stamps: tuple[object, object],
) -> Questions:
    del stamps  # only makes another entry of the cache when a file was edited
    return _load(rows, held_out, reading, held_out_fraction, split_seed)


def _stamp(source: str | Path | None) -> tuple[int, int] | None:
    """Changes when the file does, so that an edited file is read again; None: it is no file."""
    if source is None or not Path(source).is_file():
        return None
    status = Path(source).stat()
    return status.st_mtime_ns, status.st_size


def _checked(source: RowSource, reading: Reading, split_seed: int) -> tuple[list[Entry[Row]], int]:
    """Every row that is short enough, with its question's hash; and how many were not.

    Raises:
        ConfigError: names the first bad rows.
    """
    entries: list[Entry[Row]] = []
    problems: list[str] = []
    num_too_long = 0
    rows = read_rows(source)
    for index, raw in enumerate(rows):
        row = _renamed(raw, reading.renamed)
        problem = _problem(row, reading.columns | reading.conversation.columns)
        if problem is not None:
            problems.append(f"{row.where}: {problem}")
            continue
        text = "\x1e".join(message.content for message in reading.conversation.messages(row.values))
        if reading.max_prompt_characters is not None and len(text) > reading.max_prompt_characters:
            num_too_long += 1
            continue
        entries.append((content_hash(text, split_seed), index, row))
    if problems:
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(f"{len(problems)} bad rows:\n  " + "\n  ".join(problems[:_SHOWN]) + more)
    return entries, num_too_long


def _renamed(row: Row, renamed: Iterable[tuple[str, str]]) -> Row:
    names = {old: new for new, old in renamed if old in row.values}
    kept = {name: value for name, value in row.values.items() if name not in names and name not in names.values()}
    return Row(kept | {new: row.values[old] for old, new in names.items()}, row.where)


def _problem(row: Row, columns: Iterable[str]) -> str | None:
    """What is wrong with a row; None: nothing."""
    for column in sorted(columns):
        if column not in row.values:
            return f"there is no column {column!r}; {nearest_name(column, row.values)}"
        value = row.values[column]
        if value is None or (isinstance(value, float) and not math.isfinite(value)) or value == "":
            return f"column {column!r}: expected a value, got {value!r}"
    return None


def _pieces(content: str, where: str) -> list[tuple[str, str | None]]:
    """(text, the column that follows it or None) of a template."""
    try:
        pieces = [(text, name, spec, how) for text, name, spec, how in string.Formatter().parse(content)]
    except ValueError as error:
        raise ConfigError(f"{where}: {error} in {content!r:.80}; a plain brace is written twice") from error
    for _, name, spec, how in pieces:
        if name is not None and (spec or how or not name.isidentifier()):
            raise ConfigError(f"{where}: expected {{column}}, got a placeholder {name!r} in {content!r:.80}")
    return [(text, name) for text, name, _, _ in pieces]


def _filled(content: str, row: Mapping[str, Any]) -> str:
    pieces = _pieces(content, "conversation")
    return "".join(text + ("" if column is None else as_text(row[column])) for text, column in pieces)


def as_text(value: Any) -> str:
    """A column's value as the model reads it: text as it is, all else as JSON (Any: whatever the data set holds).

    >>> as_text("a"), as_text(4), as_text(["x", True])
    ('a', '4', '["x", true]')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
