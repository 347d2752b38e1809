"""Files that survive a crash, and strict readers of TOML, YAML and JSON files that people write.

A file is whole or absent, and only the last line of a log can be torn. "Durable" means that the bytes are on the disk
(fsync), so a power cut too leaves the old file or the new one.

Readers refuse a key that is given twice. YAML is read as version 1.2: `off`, `no` and `on` are texts (a mode is called
"off"), and 1e-5 is a number.

Compressed lines are a row of gzip members, which every gzip tool reads as one text. The header of each says how long
the member is and names its lines: a reader of a few lines skips from header to header.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import re
import struct
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import tomli_w
import yaml

from gspo_gym.errors import ConfigError, GymError, RecordError, StorageError, nearest_name, shortened

Item = TypeVar("Item")

_IS_WINDOWS = os.name == "nt"
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise the system's refusals of writing below `path` as StorageError, from any library.

    Raises:
        StorageError: no permission, no room, no such folder, and the like.
    """
    try:
        yield
    except GymError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
    except Exception as error:
        if (number := _system_error_in(error)) is None:
            raise
        raise StorageError(f"{path}: cannot be written: {os.strerror(number)}") from error


def _system_error_in(error: Exception) -> int | None:
    """Return the system's error number in an exception of a library written in Rust, or None."""
    # safetensors and tokenizers raise their own exceptions, with the number in the text.
    match = _RUST_ERROR.search(str(error))
    return None if match is None else int(match[1])


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if missing.

    Raises:
        StorageError: see `writing`.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_output(path: Path, text: str) -> None:
    """Write a file that a person named, which may be a device or a link.

    Raises:
        StorageError: see `writing`.
    """
    with writing(path):
        path.write_text(text, encoding="utf-8")  # in place: replacing it would remove the device or the link


def require_writable(path: Path) -> None:
    """Raise if an output file could not be written, before hours of work. Changes nothing.

    Raises:
        StorageError: it is a folder, or its folder is missing or takes no file.
    """
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(f"it is a folder: {path}")
        if path.exists():
            with path.open("ab"):
                return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            return


def replace_file(path: Path, content: str | bytes) -> None:
    """Write the file durably and atomically: a reader sees the old text or the new one, never a part.

    Raises:
        StorageError: see `writing`.
    """
    draft = path.with_name(f".{path.name}.tmp")  # in the same folder: a rename within a file system is atomic
    with writing(path):
        try:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
            sync(draft)
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()  # a part of it would keep what room a full disk has left
            raise
        sync(path.parent)  # else a power cut may undo the rename


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    # Windows cannot flush a folder (its file systems journal names), and flushes only files that are open for
    # writing.
    if _IS_WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _IS_WINDOWS else os.O_RDONLY)
    try:
        if not _flush_drive(descriptor):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_drive(descriptor: int) -> bool:
    """Return whether the system has F_FULLFSYNC and the file's volume took it; some network volumes do not."""
    # On macOS, fsync leaves the bytes in the drive's cache; F_FULLFSYNC does not.
    try:
        fcntl = importlib.import_module("fcntl")
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    except (ImportError, AttributeError, OSError):
        return False
    return True


def take_lock(path: Path) -> int | None:
    """Make a file and lock it until the returned descriptor is closed; None if another process holds it.

    The system releases the lock of a process that ends in any way. Without such locks (Windows), the process that made
    the file holds it until the file is removed.
    """
    flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if _IS_WINDOWS else 0)
    try:
        descriptor = os.open(path, flags)
    except FileExistsError:
        return None
    if _IS_WINDOWS:
        return descriptor
    fcntl = importlib.import_module("fcntl")
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):  # else the locked file was removed meanwhile
            return descriptor
    os.close(descriptor)
    return None


def sync_tree(folder: Path) -> None:
    """Call `sync` for everything in a folder, then for the folder."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(folder)


def append_line(path: Path, line: str) -> None:
    """Append a line and pass it to the operating system: a killed process loses nothing, a power cut may.

    Raises:
        StorageError: see `writing`.
    """
    rest = memoryview(f"{line}\n".encode())
    with writing(path), path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            # A disk that is full took a part, to which the next line would be glued. A device cannot be cut.
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file without a torn last line; none if there is no file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def cut_torn_line(path: Path) -> bool:
    """Remove what a killed process wrote after the last line break; return whether there was any."""
    whole = path.read_bytes() if path.exists() else b""
    if not whole or whole.endswith(b"\n"):
        return False
    with path.open("rb+") as file:
        file.truncate(whole.rfind(b"\n") + 1)
    return True


class PartFile:
    """The results so far of a long command, in FILE.part beside the wanted file: one JSON value a line.

    Args:
        out: the wanted file.
        work: the kind of command in one word, such as "evaluation".
        asked: the arguments that decide its results.
        resumes: continue an existing part.

    Attributes:
        out: the wanted file.
        path: of the part.
        num_items: items in it now.

    Raises:
        ConfigError: a part exists and `resumes` is False, none exists and it is True, or it is of other work.
        StorageError: it cannot be written.
    """

    def __init__(self, out: Path, *, work: str, asked: Mapping[str, Any], resumes: bool) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}.part")
        # The first line holds the arguments, so only the same command can continue it.
        first_line = json.dumps({work: asked}, sort_keys=True)
        if resumes:
            with writing(self.path):
                cut_torn_line(self.path)
        lines = whole_lines(self.path)
        if resumes:
            self._require_same(lines, work, json.loads(first_line)[work])
        elif len(lines) > 1:
            raise ConfigError(
                f"{self.path} holds {len(lines) - 1} episodes of an interrupted command: add --resume, or remove it"
            )
        else:
            write_output(self.path, first_line + "\n")
        self.num_items = max(len(lines) - 1, 0)

    def read(self, parse: Callable[[Any], Item]) -> list[Item]:
        """Return `parse` of every item.

        Raises:
            RecordError: a line is no JSON, or `parse` raises ValueError, TypeError or KeyError; names file and line.
        """
        items = []
        for number, line in enumerate(whole_lines(self.path)[1:], start=2):
            try:
                items.append(parse(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:  # RecordError included
                raise RecordError(f"{self.path}:{number}: {type(error).__name__}: {error}") from error
        return items

    def append(self, item: Any) -> None:
        """Write an item; a killed process loses none.

        Raises:
            StorageError: it cannot be written.
        """
        append_line(self.path, json.dumps(item, allow_nan=False))
        self.num_items += 1

    def remove(self) -> None:
        """Remove the file, once its items are in the wanted file."""
        self.path.unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        """Remove the file if it has no item."""
        if self.num_items == 0:
            self.remove()

    def _require_same(self, lines: list[str], work: str, arguments: Any) -> None:
        if not lines:
            raise ConfigError(f"{self.path}: there is nothing to go on with; leave --resume out")
        try:
            there = json.loads(lines[0])[work]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{self.path} is not of a command of this kind ({work}): it begins with {lines[0][:80]!r}; remove it"
            ) from None
        if differing := list(_differences(arguments, there)):
            raise ConfigError(
                f"{self.path} is of another {work}: {'; '.join(differing)}; repeat that command, or remove the file"
            )


def _differences(expected: Any, got: Any, key: str = "") -> Iterator[str]:
    """Yield a text for each value that differs, under its dotted key."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in sorted(expected.keys() | got.keys()):
            yield from _differences(expected.get(name), got.get(name), f"{key}.{name}" if key else name)
    elif expected != got:
        yield f"{key}: expected {json.dumps(expected)}, got {json.dumps(got)}"


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Safe YAML with the scalars of version 1.2 and unique keys."""


# Scalars other than texts, with their possible first characters.
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ("~", "n", "N", "")),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


def _construct_int(_loader: _StrictLoader, node: Any) -> int:
    return int(node.value)  # 017 is seventeen; version 1.1 reads it as octal


def _construct_table(loader: _StrictLoader, node: Any) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ValueError(f"line {key_node.start_mark.line + 1}: expected a text as key, got {key!r}")
        if key in table:
            raise ValueError(f"line {key_node.start_mark.line + 1}: {key!r} is given twice")
        table[key] = loader.construct_object(value_node, deep=True)
    return table


_StrictLoader.yaml_implicit_resolvers = {}  # drops those of version 1.1
for _name, (_pattern, _first) in _SCALARS.items():
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:map", _construct_table)


def _parse_yaml(text: str) -> Any:
    """Return the document; an empty one is an empty table."""
    try:
        document = _StrictLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return {} if document is None else document


def _parse_json(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in names if names.count(key) > 1)!r} is given twice")
        return table

    return json.loads(text, object_pairs_hook=once)


_PARSERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".yaml": ("YAML", _parse_yaml),
    ".yml": ("YAML", _parse_yaml),
    ".json": ("JSON", _parse_json),
}


def packaged_file(path: Path) -> Path:
    """Return `path`; for one in configs/ or examples/ that is not here, the file that the package holds, if any.

    The commands of README.md therefore work without a checkout, and so do the configurations that name such files.
    """
    if path.exists() or path.parts[:1] not in (("configs",), ("examples",)) or ".." in path.parts:
        return path
    configs = Path(str(files("gspo_gym_configs")))
    # The folder is called configs in a checkout and gspo_gym_configs in an installation; examples is its neighbour.
    held = configs.with_name(configs.name.replace("configs", path.parts[0])).joinpath(*path.parts[1:])
    return held if held.is_file() else path


def read_file(path: Path) -> dict[str, Any]:
    """Return the table in a TOML, YAML or JSON file (see `packaged_file`); other file names are read as TOML.

    Raises:
        ConfigError: there is no such file, it is not of that format, or it holds no table.
    """
    kind, parse = _PARSERS.get(path.suffix.lower(), _PARSERS[".toml"])
    try:
        document = parse(packaged_file(path).read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except FileNotFoundError:
        folder = path.parent
        siblings = [str(folder / p.name) for p in folder.iterdir() if p.suffix in _PARSERS] if folder.is_dir() else []
        raise ConfigError(f"{path}: there is no such file; {nearest_name(str(path), siblings)}") from None
    except (OSError, ValueError, RecursionError) as error:  # unreadable, not of that format, or nested too deeply
        raise ConfigError(f"{path}: cannot be read as {kind}: {error}") from error
    if not isinstance(document, dict):
        document_text = shortened(json.dumps(document, default=str, ensure_ascii=False), 60)
        raise ConfigError(f"{path}: expected a table of sections, got {document_text}")
    return document


def as_toml_holds_it(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table as it reads back from a TOML file.

    Raises:
        ValueError: TOML cannot hold it.
    """
    try:
        return tomllib.loads(tomli_w.dumps(table))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"expected values that TOML can hold (config.toml will hold them): {error}") from error


def flat_items(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables under their dotted keys (Any: TOML's values).

    >>> dict(flat_items({"a": {"b": 1, "c": {"d": 2}}, "e": 3}))
    {'a.b': 1, 'a.c.d': 2, 'e': 3}
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{rest}", leaf) for rest, leaf in flat_items(value))
        else:
            yield name, value


MAGIC = b"\x1f\x8b"
# One member would be 5% smaller, and would have to be unpacked whole for any line.
_MEMBER_BYTES = 256 * 1024
_MAX_LINES = 1024  # their names must fit into a header's 64 KiB
_HEADER = struct.Struct("<2sBBIBBH")  # RFC 1952: magic, method, flags, time, extra flags, system, length of extra
_TRAILER = struct.Struct("<II")  # the text's checksum and length
_EXTRA = struct.Struct("<2sHI")  # a subfield: its id, its length, and the length of the compressed lines
_ID = b"gg"
_DEFLATE, _HAS_EXTRA, _UNKNOWN_SYSTEM = 8, 4, 255


def compress_lines(lines: Iterable[tuple[str, str]]) -> bytes:
    """Return a gzip file of (name, line) pairs; the same lines give the same bytes."""
    members, names, text, size = [], list[str](), list[bytes](), 0
    for name, line in lines:
        names.append(name)
        text.append(f"{line}\n".encode())
        size += len(text[-1])
        if size >= _MEMBER_BYTES or len(names) == _MAX_LINES:
            members.append(_member(names, b"".join(text)))
            names, text, size = [], [], 0
    if names or not members:
        members.append(_member(names, b"".join(text)))
    return b"".join(members)


def is_gzip(path: Path) -> bool:
    """Return whether the file begins as a gzip file does; False if there is none."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_lines(path: Path) -> list[str]:
    """Return all lines of a gzip file, of any make.

    Raises:
        RecordError: it is damaged.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            return file.read().split("\n")[:-1]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise RecordError(f"{path}: is damaged: {error}") from error


def find_line(path: Path, name: str) -> tuple[int, str] | None:
    """Return the number (from 1) and the text of the line of this name; None if there is none of it.

    Raises:
        RecordError: the file is damaged, or is not from `compress_lines`.
    """
    with path.open("rb") as file:
        before = 0
        for names, length in _headers(file, path):
            if name not in names:
                before += len(names)
                continue
            try:
                text = zlib.decompress(file.read(length), wbits=-zlib.MAX_WBITS)
                checksum, _ = _TRAILER.unpack(file.read(_TRAILER.size))
            except (zlib.error, struct.error) as error:
                raise RecordError(f"{path}: is damaged: {error}") from error
            if zlib.crc32(text) != checksum:
                raise RecordError(f"{path}: is damaged: {name} and its neighbours have another checksum")
            return before + names.index(name) + 1, text.decode().split("\n")[names.index(name)]
    return None


def _member(names: list[str], text: bytes) -> bytes:
    packer = zlib.compressobj(level=6, wbits=-zlib.MAX_WBITS)
    body = packer.compress(text) + packer.flush()
    packed_names = zlib.compress(json.dumps(names).encode())
    extra = _EXTRA.pack(_ID, 4 + len(packed_names), len(body)) + packed_names
    header = _HEADER.pack(MAGIC, _DEFLATE, _HAS_EXTRA, 0, 0, _UNKNOWN_SYSTEM, len(extra))
    return header + extra + body + _TRAILER.pack(zlib.crc32(text), len(text) & 0xFFFFFFFF)


def _headers(file: BinaryIO, path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the names and the compressed length of each member, with the file at its compressed lines."""
    while header := file.read(_HEADER.size):
        try:
            *_, length = _HEADER.unpack(header)
            extra = file.read(length)
            subfield, _, size = _EXTRA.unpack_from(extra)
            names = json.loads(zlib.decompress(extra[_EXTRA.size :]))
        except (struct.error, zlib.error, ValueError) as error:
            raise RecordError(f"{path}: no line of it can be found by name: {error}") from error
        if header[:2] != MAGIC or subfield != _ID:
            raise RecordError(f"{path}: no line of it can be found by name: not written by this library")
        start = file.tell()
        yield names, size
        file.seek(start + size + _TRAILER.size)
