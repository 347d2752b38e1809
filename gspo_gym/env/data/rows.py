"""Rows of a data set, from wherever they are, each with the place it came from so that an error can name it.

Files of JSON lines, JSON, CSV, Parquet and Arrow, folders and hub ids of the `datasets` package, a name in a Python
module, and rows in memory. What a row must hold is decided in `dataset_questions.py`, the only caller.
"""

from __future__ import annotations

import csv
import difflib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from gspo_gym.errors import ConfigError, MissingExtraError, UnknownNameError, nearest_name

RowSource = str | Path | Iterable[Mapping[str, Any]]  # Any: a column holds whatever its data set holds

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
    """One row: its columns, and where it stands ("train.jsonl:17"). Any: whatever the data set holds."""

    values: Mapping[str, Any]
    where: str


def read_rows(source: RowSource) -> list[Row]:
    """All rows of a source, in its order.

    Raises:
        ConfigError: there is no such source, or something in it is no row; says where.
        UnknownNameError: MODULE:NAME does not exist.
        MissingExtraError: it takes the `datasets` package, which is not installed.

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
        return _from_file(path)
    if _NAME_IN_MODULE.fullmatch(text):
        found = named_object(text, "rows")
        return _from_iterable(found() if callable(found) else found, text)
    raise ConfigError(f"rows: expected {_FORMS}; got {text!r}, which is no file or folder here")


def named_object(name: str, what: str) -> Any:
    """What MODULE:NAME names (Any: anything); `what` says in errors what it is for.

    Raises:
        UnknownNameError: the module cannot be imported, or has no such name.

    >>> named_object("math:pi", "a number") > 3
    True
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownNameError(f"{what} {name!r}: cannot import {module_name!r}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)  # a module may hold too many names to list them
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownNameError(f"{what} {name!r}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _from_iterable(rows: Any, name: str) -> list[Row]:
    """Any: what a user gave."""
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
        near = [str(other) for other in path.parent.glob("*") if other.suffix in _SUFFIXES]
        raise ConfigError(f"rows: there is no file {path}; {nearest_name(str(path), near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rows: {path} cannot be read: {error}") from error
    return _from_iterable(_arrow_rows(path), str(path))


def _json_lines(path: Path) -> Iterator[Row]:
    # read line by line: str.splitlines would also cut at U+2028, which JSON may hold unescaped
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _json_list(path: Path) -> Iterator[Row]:
    rows = _parsed(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}; one a line is .jsonl")
    yield from (_row(values, f"{path}[{index}]") for index, values in enumerate(rows))


def _csv_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            yield from (_csv_row(values, reader, path) for values in reader)
        except csv.Error as error:
            raise ConfigError(f"{path}: not CSV after line {reader.line_num}: {error}") from error


def _csv_row(values: Mapping[Any, Any], reader: csv.DictReader[str], path: Path) -> Row:
    """Any: DictReader puts cells without a column under None."""
    where = f"{path}:{reader.line_num}"
    if None in values:
        raise ConfigError(f"{where}: expected {len(reader.fieldnames or ())} columns, got more")
    return _row(values, where)


def _parsed(text: str, where: str) -> Any:
    """Any: JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error


def _row(values: Any, where: str) -> Row:
    """Any: what stands where a row should."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{where}: expected columns by name, got {values!r:.80}")
    return Row(dict(values), where)


# --- what takes the `datasets` package; Any: it is untyped ------------------------------------------------------------


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
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise ConfigError(f"rows: {path} cannot be read: {error}") from error


def _saved_dataset(folder: Path) -> Any:
    try:
        return _datasets_package().load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ConfigError(f"rows: {folder} is no folder of Dataset.save_to_disk: {error}") from error


def _hub_dataset(text: str) -> Any:
    """`hub:OWNER/NAME?name=CONFIG&split=train&revision=...`; the split is "train" where none is given."""
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
    except (OSError, ValueError) as error:  # not there, not reachable, no such split
        raise ConfigError(f"rows: {text!r} cannot be loaded: {error}") from error
