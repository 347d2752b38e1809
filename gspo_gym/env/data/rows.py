"""Rows of a data set, the questions made of them, and their split into training and held-out sides.

`read_rows` reads files, saved and hosted data sets, a name in a Python module, or rows in memory, each with its place
for errors. `load_questions` checks them, puts them into a conversation and splits them into sides without a common
question. Only the hash of its content puts a thing on a side: equal things stay together, and things added later move
no other.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib
import json
import math
import re
import string
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from urllib.parse import parse_qsl

import numpy as np

from gspo_gym.base.files import packaged_file
from gspo_gym.base.modules import named_object
from gspo_gym.errors import ConfigError, MissingExtraError, nearest_name
from gspo_gym.seeding import FIRST_TRAINING_SEED
from gspo_gym.types import Message, Role

T = TypeVar("T")
Entry = tuple[int, int, T]  # (hash of the content, position in the source, member)


@dataclass(frozen=True)
class Sides(Generic[T]):
    """The training and held-out members, which do not overlap, in the order in which seeds name them."""

    train: tuple[T, ...]
    held_out: tuple[T, ...]

    def of_seed(self, seed: int) -> T:
        """Return the member of a task: held out below seed 2**31, training from there up.

        Consecutive seeds go round the side in its shuffled order, each once before one comes again.
        """
        # So a training run, which counts its seeds up (`seeding.training_seed`), meets every member before one again.
        if is_held_out_seed(seed):
            return self.held_out[seed % len(self.held_out)]
        return self.train[(seed - FIRST_TRAINING_SEED) % len(self.train)]

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # immutable, so copies of an environment share it


def is_held_out_seed(seed: int) -> bool:
    """Return whether the task of a seed is for evaluation."""
    return seed < FIRST_TRAINING_SEED


def content_hash(text: str, split_seed: int) -> int:
    """Return a hash in [0, 2**64) of a text with any white space counted as one space."""
    content = f"{split_seed}\x1f{' '.join(text.split())}"
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def next_seed(rng: np.random.Generator, *, is_held_out: bool | None = None) -> int:
    """Draw the seed of an episode that was reset without one, below 2**32.

    This is the rule of every interface: the episode stays on the side of the last given seed, and is a training task if
    none was given.

    `rng` is the generator of the last given seed (Gymnasium's `np_random`), and is drawn from once. `is_held_out` is
    the side; None for that of `rng`.
    >>> next_seed(np.random.default_rng(7)) < FIRST_TRAINING_SEED <= next_seed(np.random.default_rng())
    True
    """
    offset = int(rng.integers(FIRST_TRAINING_SEED))
    side = is_held_out_generator(rng) if is_held_out is None else is_held_out
    return offset if side else FIRST_TRAINING_SEED + offset


def is_held_out_generator(rng: np.random.Generator) -> bool:
    """Return whether `rng` was made from the seed of a held-out task; False if it does not say.

    >>> is_held_out_generator(np.random.default_rng(0)), is_held_out_generator(np.random.default_rng())
    (True, False)
    """
    # A generator that the operating system seeded has 128 bits of entropy here, which is no seed below 2**31.
    made_from = getattr(rng.bit_generator.seed_seq, "entropy", None)
    return isinstance(made_from, int | np.integer) and int(made_from) < FIRST_TRAINING_SEED


def is_held_out_content(content: int, held_out_fraction: float) -> bool:
    """Return whether a content hash falls into the held-out fraction."""
    return content < held_out_fraction * 2**64


def checked_fraction(fraction: float | None, default: float, *, has_own_held_out: bool, where: str) -> float:
    """Return the held-out fraction in (0, 1) that was given, or the default; a ConfigError beside a held-out set."""
    if has_own_held_out and fraction is not None:
        raise ConfigError(f"{where}: held_out is a set of its own, so held_out_fraction has no effect; remove it")
    effective_fraction = default if fraction is None else fraction
    if not 0 < effective_fraction < 1:
        raise ConfigError(f"{where}: expected held_out_fraction in (0, 1), got {effective_fraction}")
    return effective_fraction


def split_by_content(entries: Iterable[Entry[T]], held_out_fraction: float) -> tuple[list[Entry[T]], list[Entry[T]]]:
    """Return the (training, held-out) entries."""
    train: list[Entry[T]] = []
    held_out: list[Entry[T]] = []
    for entry in entries:
        (held_out if is_held_out_content(entry[0], held_out_fraction) else train).append(entry)
    return train, held_out


def without(entries: Iterable[Entry[T]], others: Iterable[Entry[T]]) -> list[Entry[T]]:
    """Return the entries with content that none of the others has."""
    hashes = {content for content, _, _ in others}
    return [entry for entry in entries if entry[0] not in hashes]


def in_order(entries: Iterable[Entry[T]]) -> tuple[T, ...]:
    """Return the members ordered by hash: a shuffle without a generator."""
    return tuple(member for _, _, member in sorted(entries, key=lambda entry: entry[:2]))


RowSource = str | Path | Iterable[Mapping[str, Any]]

_ENCODING = "utf-8-sig"  # drops the byte order mark that spreadsheets and editors write at the beginning
_MAX_CELL = 2**31 - 1  # characters of a CSV cell: the most that every system takes
_HUB_PREFIX = "hub:"
_HUB_SETTINGS = ("name", "split", "revision")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
_NAME_IN_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FORMS = (
    f"a file ({', '.join(_SUFFIXES)}), a folder of the datasets package, hub:OWNER/NAME?split=train, MODULE:NAME, or "
    "rows in memory"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its columns and its place ("train.jsonl:17")."""

    values: Mapping[str, Any]
    where: str


def read_rows(source: RowSource) -> list[Row]:
    """Return all rows of a source in order.

    Raises:
        ConfigError: there is no such source, or a part of it is no row (with its place).
        UnknownNameError: MODULE:NAME does not exist. MissingExtraError: the source needs the `datasets` package.
    >>> read_rows([{"question": "2+2?", "answer": "4"}])[0].where
    'rows[0]'
    """
    if not isinstance(source, str | Path):
        return _from_iterable(source, "rows")
    text = str(source)
    if text.startswith(_HUB_PREFIX):
        return _from_iterable(_hub_dataset(text), text)
    path = Path(source)
    if path.is_dir():
        return _from_iterable(_saved_dataset(path), text)
    if path.suffix in _SUFFIXES:
        return _from_file(packaged_file(path))
    if _NAME_IN_MODULE.fullmatch(text):
        rows_object = named_object(text, "rows")
        return _from_iterable(rows_object() if callable(rows_object) else rows_object, text)
    raise ConfigError(f"rows: expected {_FORMS}; got {text!r}, which is no file or folder here")


def _from_iterable(rows: Any, name: str) -> list[Row]:
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        hint = f"; choose one of its splits {list(rows)}" if isinstance(rows, Mapping) else ""
        raise ConfigError(f"{name}: expected rows, each a mapping of columns, got {type(rows).__name__}{hint}")
    return [_row(values, f"{name}[{index}]") for index, values in enumerate(rows)]


def _from_file(path: Path) -> list[Row]:
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_list, ".csv": _csv_lines}
    try:
        if path.suffix in readers:
            return list(readers[path.suffix](path))
        if not path.is_file():
            raise FileNotFoundError
    except FileNotFoundError:
        near = [str(sibling) for sibling in path.parent.glob("*") if sibling.suffix in _SUFFIXES]
        raise ConfigError(f"rows: there is no file {path}; {nearest_name(str(path), near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rows: {path} cannot be read: {error}") from error
    return _from_iterable(_arrow_rows(path), str(path))


def _json_lines(path: Path) -> Iterator[Row]:
    # Read line by line: str.splitlines would also cut at U+2028, which JSON may hold unescaped.
    with path.open(encoding=_ENCODING) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(_parse_json(line, f"{path}:{number}"), f"{path}:{number}")


def _json_list(path: Path) -> Iterator[Row]:
    rows = _parse_json(path.read_text(encoding=_ENCODING), str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}; one a line is .jsonl")
    yield from (_row(values, f"{path}[{index}]") for index, values in enumerate(rows))


def _csv_lines(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_MAX_CELL)  # of the process: Python's own limit, 128 KiB, is less than a long document
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            yield from (_csv_row(values, reader, path) for values in reader)
        except csv.Error as error:
            raise ConfigError(f"{path}: not CSV after line {reader.line_num}: {error}") from error


def _csv_row(values: Mapping[Any, Any], reader: csv.DictReader[str], path: Path) -> Row:
    where = f"{path}:{reader.line_num}"
    if None in values:  # DictReader's key for cells beyond the header
        raise ConfigError(f"{where}: expected {len(reader.fieldnames or ())} columns, got more")
    return _row(values, where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error


def _row(values: Any, where: str) -> Row:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{where}: expected columns by name, got {values!r:.80}")
    for text in _texts_in(values):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # no tokenizer could read it, and JSON can spell it
            raise ConfigError(f"{where}: expected text that can be encoded, got a lone surrogate: {error}") from error
    return Row(dict(values), where)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts_in(key)
            yield from _texts_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts_in(part)


def _datasets_package() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            "Parquet and Arrow files, folders and hub ids need the datasets package: pip install 'gspo-gym[datasets]'"
        ) from error


def _arrow_rows(path: Path) -> Any:
    package = _datasets_package()
    try:
        if path.suffix == ".parquet":  # directly, because Dataset.from_parquet would write a copy into a cache
            return importlib.import_module("pyarrow.parquet").read_table(path).to_pylist()
        return package.Dataset.from_file(str(path))
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise ConfigError(f"rows: {path} cannot be read: {error}") from error


def _saved_dataset(folder: Path) -> Any:
    try:
        return _datasets_package().load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ConfigError(f"rows: {folder} is no folder of Dataset.save_to_disk: {error}") from error


def _hub_dataset(text: str) -> Any:  # hub:OWNER/NAME?name=CONFIG&split=train&revision=...
    dataset, _, query = text.removeprefix(_HUB_PREFIX).partition("?")
    try:
        settings = dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError as error:
        raise ConfigError(f"rows: {text!r}: expected KEY=VALUE&KEY=VALUE after '?': {error}") from error
    for key in settings:
        if key not in _HUB_SETTINGS:
            raise ConfigError(f"rows: {text!r} has an unknown key {key!r}; {nearest_name(key, _HUB_SETTINGS)}")
    package = _datasets_package()
    try:
        return package.load_dataset(dataset, **{"split": "train", **settings})
    except (OSError, ValueError) as error:  # missing, unreachable, or no such split
        raise ConfigError(f"rows: {text!r} cannot be loaded: {error}") from error


_ROLES: tuple[Role, ...] = ("system", "user", "assistant")
_SHOWN = 5  # bad rows that an error lists


@dataclass(frozen=True)
class ConversationTemplate:
    """The opening messages of an episode, with {column} placeholders; {{ and }} are plain braces.

    Values are inserted as they are (their braces mean nothing); a value that is not text becomes JSON.
    >>> template = ConversationTemplate.of([{"role": "user", "content": "Q: {question}"}])
    >>> template.messages({"question": "{x}?"})[0].content
    'Q: {x}?'
    """

    templates: tuple[tuple[Role, str], ...]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> ConversationTemplate:
        """Return the template of messages in the OpenAI shape."""
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
        """Return the columns that placeholders name."""
        pieces = (piece for _, content in self.templates for piece in _pieces(content, "conversation"))
        return frozenset(column for _, column in pieces if column is not None)

    def messages(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        return tuple(Message(role, _fill_template(content, row)) for role, content in self.templates)


@dataclass(frozen=True)
class Reading:
    """Rules that turn rows into questions.

    Attributes:
        columns: required of every row, besides those of the conversation.
        renamed: (new name, name in the data) of columns; an existing column of the new name is dropped.
        max_prompt_characters: rows with a longer conversation are left out; None keeps all.
    """

    conversation: ConversationTemplate
    columns: frozenset[str]
    renamed: tuple[tuple[str, str], ...] = ()
    max_prompt_characters: int | None = None


@dataclass(frozen=True)
class Questions(Sides[Row]):
    """The questions of both sides, which share no conversation.

    Attributes:
        num_too_long: rows left out for their length.
        num_in_both: rows left out of a given training set because the given held-out set asks the same.
    """

    num_too_long: int = 0
    num_in_both: int = 0


def load_questions(
    rows: RowSource, held_out: RowSource | None, reading: Reading, *, held_out_fraction: float, split_seed: int
) -> Questions:
    """Return the questions of one source split by `held_out_fraction`, or of two sources.

    A question is its conversation with any white space counted as one space. It is held out if the hash of (split_seed,
    question) falls into the fraction; each side is ordered by that hash. A ConfigError lists the first few bad rows.
    """
    if isinstance(rows, str | Path) and (held_out is None or isinstance(held_out, str | Path)):
        stamps = (_stamp(rows), _stamp(held_out))
        # A named source is read once per process; without the lock, every episode of the first batch would read it.
        with _loading:
            return _load_named(rows, held_out, reading, held_out_fraction, split_seed, stamps)
    return _load(rows, held_out, reading, held_out_fraction, split_seed)


def _load(
    rows: RowSource, held_out: RowSource | None, reading: Reading, held_out_fraction: float, split_seed: int
) -> Questions:
    questions, too_long = _read_entries(rows, reading, split_seed)
    if held_out is None:
        train, held_out_questions = split_by_content(questions, held_out_fraction)
        advice = (
            f"; {len(questions)} rows were split by held_out_fraction {held_out_fraction:g}: change it or split_seed"
        )
        in_both = 0
    else:
        held_out_questions, also_too_long = _read_entries(held_out, reading, split_seed)
        too_long += also_too_long
        train = without(questions, held_out_questions)
        in_both, advice = len(questions) - len(train), ""
    for name, side in (("training", train), ("held-out", held_out_questions)):
        if not side:
            raise ConfigError(
                f"rows: expected a {name} row, got none ({too_long} too long, {in_both} in both sets){advice}"
            )
    return Questions(in_order(train), in_order(held_out_questions), too_long, in_both)


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
    del stamps  # part of the cache key: an edited file is read again
    return _load(rows, held_out, reading, held_out_fraction, split_seed)


def _stamp(source: str | Path | None) -> tuple[int, int] | None:
    if source is None or not Path(source).is_file():
        return None
    status = Path(source).stat()
    return status.st_mtime_ns, status.st_size


def _read_entries(source: RowSource, reading: Reading, split_seed: int) -> tuple[list[Entry[Row]], int]:
    """Return the entries of rows that are short enough, and the number of longer ones."""
    entries: list[Entry[Row]] = []
    problems: list[str] = []
    num_too_long = 0
    rows = read_rows(source)
    for index, raw in enumerate(rows):
        row = _rename_columns(raw, reading.renamed)
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


def _rename_columns(row: Row, name_pairs: Iterable[tuple[str, str]]) -> Row:
    names = {old: new for new, old in name_pairs if old in row.values}
    other_values = {
        name: value for name, value in row.values.items() if name not in names and name not in names.values()
    }
    return Row(other_values | {new: row.values[old] for old, new in names.items()}, row.where)


def _problem(row: Row, columns: Iterable[str]) -> str | None:
    for column in sorted(columns):
        if column not in row.values:
            return f"there is no column {column!r}; {nearest_name(column, row.values)}"
        value = row.values[column]
        # Empty cells come as None, NaN (Parquet and Arrow) or "" (CSV).
        if value is None or (isinstance(value, float) and not math.isfinite(value)) or value == "":
            return f"column {column!r}: expected a value, got {value!r}"
    return None


def _pieces(content: str, where: str) -> list[tuple[str, str | None]]:  # literal texts, each with the column after it
    try:
        pieces = [(text, name, spec, how) for text, name, spec, how in string.Formatter().parse(content)]
    except ValueError as error:
        raise ConfigError(f"{where}: {error} in {content!r:.80}; a plain brace is written twice") from error
    for _, name, spec, how in pieces:
        if name is not None and (spec or how or not name.isidentifier()):
            raise ConfigError(f"{where}: expected {{column}}, got a placeholder {name!r} in {content!r:.80}")
    return [(text, name) for text, name, _, _ in pieces]


def _fill_template(content: str, row: Mapping[str, Any]) -> str:
    pieces = _pieces(content, "conversation")
    return "".join(text + ("" if column is None else as_text(row[column])) for text, column in pieces)


def as_text(value: Any) -> str:
    """Return a column's value as the model reads it: text unchanged, all else as JSON.

    >>> as_text("a"), as_text(4), as_text(["x", True])
    ('a', '4', '["x", true]')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
