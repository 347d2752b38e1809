"""Requests that no client means: seeded mutations of good ones, sent over real HTTP.

A mutation spoils one or several of: values in the JSON body, the body's bytes, the query and the path, a header, the
method. What is sent is always HTTP, so that every request must be answered.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_PLACEHOLDER = "\x00raw:"  # a value that stands for JSON text which `json.dumps` cannot write

# JSON text of values that stand where others belong.
_STRANGE = (
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "1e308",
        "1" + "0" * 400,
        "9" * 5000,
        "-1",
        "0",
        "1.5",
        "true",
    ),
    *(
        "null",
        "[]",
        "{}",
        "[[]]",
        "[null]",
        "[{}]",
        '{"a": []}',
        '""',
        '"\\ud800"',
        '"a\\udfffb"',
        '"\\u0000"',
        "[1, 2]",
    ),
    *('"\\ud83d\\ude00"', '["\\udc00"]', '{"\\ud800": 1}', '{"a": NaN}', '"' + "x" * 20_000 + '"', "[" * 60 + "]" * 60),
    *('"http://127.0.0.1:1/"', '"http://[::1"', '"http://127.0.0.1:99999/x"', '"../../etc/passwd"', '"\\r\\nx: y"'),
    *("9223372036854775808", "-9223372036854775809", "18446744073709551616", '"1"', '"nan"', '"%s%n"', "1e5", "0.0"),
)
_BYTES = (b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\xed\xa0\x80", b'"\xed\xa0\x80"', b"[]", b"null", b'"x"', b"3", b"NaN")
_QUERIES = (
    "seed=NaN",
    "seed=1e9",
    "seed=%ff",
    "seed=" + "9" * 400,
    "seeds=1,,2",
    "seed=-1",
    "a=%00",
    "=&=&",
    "%ed%a0%80",
    "seed",
)
_TAILS = ("%ff", "%00", "/..", "//", "%ed%a0%80", "%2e%2e/", "é".encode().decode("latin-1"), "?", "/x" * 200, ";a=b")
_HEADERS = (
    ("content-type", "text/plain"),
    ("content-type", "application/x-www-form-urlencoded"),
    ("content-type", "application/json; charset=utf-16"),
    ("content-type", "multipart/form-data; boundary="),
    ("content-encoding", "gzip"),
    ("accept", "text/event-stream\xff"),
    ("x-stainless-retry-count", "\xb2"),
    ("x-stainless-retry-count", "9" * 40),
    ("idempotency-key", "\xff" * 100),
    ("x-gspo-gym-trained", "perhaps"),
    ("authorization", "Bearer \xff"),
    ("content-length", "-1"),
    ("content-length", "1_0"),
    ("content-length", "9" * 30),
    ("content-length", "\xb2"),
    ("x-reference-token", "\xff"),
    ("range", "bytes=9-1"),
    ("expect", "never"),
)


@dataclass(frozen=True)
class Good:
    """A request that is answered well. `body`: JSON (Any), bytes as they are, or None for none."""

    path: str
    body: Any = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Spoilt:
    """What is sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def spoilt_requests(goods: list[Good], *, count: int, seed: int) -> Iterator[Spoilt]:
    """`count` of them, the same for the same seed."""
    rng = random.Random(seed)
    for number in range(count):
        yield _spoilt(goods[number % len(goods)], rng)


def spoilt_text(good: Any, rng: random.Random) -> str:
    """JSON text with strange values in it, for other carriers than HTTP."""
    return _spoilt_json(good, rng).decode(errors="replace")


def status_of(url: str, request: Spoilt, *, timeout: float = 30.0) -> tuple[int, bytes]:
    """The answer's status and body.

    Raises:
        OSError, http.client.HTTPException: there was none.
    """
    connection = _Connection(urlsplit(url).netloc, timeout=timeout)
    try:
        connection.putrequest(request.method, request.target, skip_accept_encoding=True)
        for name, value in request.headers:
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders(request.body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class _Connection(http.client.HTTPConnection):
    """Puts every byte on the wire."""

    def _encode_request(self, request: str) -> bytes:
        return request.encode("latin-1")

    def _send_output(self, message_body: bytes | None = None, encode_chunked: bool = False) -> None:
        # at once: a server that refuses the head would close, and reset, before the body is sent
        self._buffer: list[bytes]
        head = b"\r\n".join([*self._buffer, b"", b""])
        self._buffer.clear()
        self.send(head + (message_body or b""))


def _spoilt(good: Good, rng: random.Random) -> Spoilt:
    headers = {"content-type": "application/json", **good.headers}
    body = b"" if good.body is None else good.body if isinstance(good.body, bytes) else _spoilt_json(good.body, rng)
    method, target = good.method, good.path
    kind = rng.randrange(10)
    if kind == 0 or (isinstance(good.body, bytes) and kind < 7):
        body = _spoilt_bytes(body, rng)
    elif kind == 1:
        target += ("&" if "?" in target else "?") + rng.choice(_QUERIES)
    elif kind == 2:
        target = _spoilt_path(target, rng)
    elif kind == 3:
        method = rng.choice(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "POST", "TRACE"))
    length: dict[str, str] = {"content-length": str(len(body))}
    if kind in (4, 5):
        name, value = rng.choice(_HEADERS)
        (length if name == "content-length" else headers)[name] = value
    return Spoilt(method, target, (*headers.items(), *length.items()), body)


def _spoilt_json(value: Any, rng: random.Random) -> bytes:
    copied = json.loads(json.dumps(value))
    raw: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        copied = _spoil(copied, rng, raw)
    text = json.dumps(copied)
    for index, wanted in enumerate(raw):
        text = text.replace(json.dumps(f"{_PLACEHOLDER}{index}"), wanted)
    return text.encode()


def _spoil(value: Any, rng: random.Random, raw: list[str]) -> Any:
    """The value with something strange at a random place in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        what = rng.randrange(12)
        if what == 0:
            return {name: part for name, part in value.items() if name != key}
        if what == 1:
            return {**value, rng.choice(("", "unknown", "\ud800", "__class__", key.upper())): _strange(rng, raw)}
        return {**value, key: _spoil(value[key], rng, raw)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], _spoil(value[index], rng, raw), *value[index + 1 :]]
    return _strange(rng, raw)


def _strange(rng: random.Random, raw: list[str]) -> str:
    raw.append(rng.choice(_STRANGE))
    return f"{_PLACEHOLDER}{len(raw) - 1}"


def _spoilt_bytes(body: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0 or not body:
        return rng.choice(_BYTES)
    if kind == 1:
        return body[: rng.randrange(len(body))]
    changed = bytearray(body)
    for _ in range(rng.randrange(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _spoilt_path(target: str, rng: random.Random) -> str:
    path, mark, query = target.partition("?")
    parts = path.split("/")
    parts[rng.randrange(len(parts) - 1) + 1] += rng.choice(_TAILS)
    return "/" + "/".join(parts).lstrip("/") + mark + query
