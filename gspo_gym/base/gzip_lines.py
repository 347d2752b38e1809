"""Lines of text in a gzip file from which a few can be read without the rest.

The file is a row of gzip members, which every gzip tool reads as one text. The header of each says how long the member
is and names its lines, so that a reader skips from header to header.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gspo_gym.errors import RecordError

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
    listed = zlib.compress(json.dumps(names).encode())
    extra = _EXTRA.pack(_ID, 4 + len(listed), len(body)) + listed
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
