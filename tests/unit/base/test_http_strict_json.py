"""What servers read as JSON: RFC 8259's values and nothing else, each of which can be written again."""

from __future__ import annotations

import json
import random

import pytest

from gspo_gym.base.http import read_json, refuse_strange_json
from gspo_gym.errors import RecordError

REFUSED = [
    b'{"a": NaN}', b"[Infinity]", b"-Infinity", b"1e999", b"[-1E+4000]", b"1" + b"0" * 400, b'"\\ud800"',
    b'"a\\uDFFFb"', b'{"\\udc00": 1}', b'"\\ud800\\ud800"', b'"\xed\xa0\x80"', b'"\\u0041\\udc00"',
]  # fmt: skip
READ = [
    b'"\\ud83d\\ude00"', b'"NaN and Infinity, \\\\ud800"', b'{"1e999": 1}', "\"é\U0001f600\"".encode(), b"1e300",
    b"123456789012345678901234567890", b'"\\u0000"', b"[]", b" null ", b'"' + b"1" * 500 + b'"',
]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED)
def test_what_json_has_not_is_refused_by_the_reader_and_by_the_quick_look(body: bytes) -> None:
    for look in (read_json, refuse_strange_json):
        with pytest.raises(RecordError, match="expected JSON"):
            look(body)


@pytest.mark.parametrize("body", READ)
def test_what_only_looks_like_it_is_read_as_pythons_reader_reads_it(body: bytes) -> None:
    refuse_strange_json(body)
    assert read_json(body) == read_json(body.decode()) == json.loads(body)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a": 1} x', b"nan", "[1]".encode("utf-16"), b"[" * 100_000])
def test_what_is_no_json_is_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(RecordError, match="expected JSON"):
        read_json(body)


def test_a_text_is_refused_if_and_only_if_no_encoding_has_it() -> None:
    pieces = [
        r"\u", "d8", "D8", "db", "00", "dc", "DF", "ff", "0041", r"\\", "a", r"\ud83d\ude00", r"\udc00", "\U0001f600",
    ]  # fmt: skip
    draw = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(50_000):
        body = f'"{"".join(draw.choices(pieces, k=draw.randint(1, 6)))}"'
        try:
            value = json.loads(body)
        except ValueError:
            continue  # half an escape
        try:
            value.encode()
        except UnicodeEncodeError:
            seen[True] += 1
            with pytest.raises(RecordError, match="lone surrogate"):
                refuse_strange_json(body.encode())
        else:
            seen[False] += 1
            refuse_strange_json(body.encode())
    assert min(seen.values()) > 1000
