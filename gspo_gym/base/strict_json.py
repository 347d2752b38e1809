"""JSON from clients, read by one rule in every server: anything but JSON that can be written again is refused.

Python's reader accepts more than JSON allows: NaN and infinities (also as 1e999), lone surrogates, which no encoder
writes and no tokenizer reads, and whole numbers of any length. Each would fail later, where it is not expected.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from gspo_gym.errors import RecordError

_MAX_DIGITS = 300  # of a whole number; longer ones are no float either
# Bytes without which a body cannot hold one of the values above; few bodies have them.
_SUSPECT = re.compile(
    rb"NaN|Infinity|\d[eE]\+?\d{3}|\d{300}|\xed[\xa0-\xbf]|\x00"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


def read_json(body: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RecordError: it is not JSON, or holds NaN, an infinity, a lone surrogate or a number that is too long.

    >>> read_json(b'{"a": [1, "b"]}')
    {'a': [1, 'b']}
    """
    raw = body.encode(errors="surrogatepass") if isinstance(body, str) else body
    try:
        value = json.loads(
            raw.decode(), parse_constant=refuse_constant, parse_float=_finite_float, parse_int=_bounded_int
        )
    except UnicodeDecodeError as error:
        raise RecordError(f"expected JSON in UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"expected JSON: {error}") from None
    if _SUSPECT.search(raw) is not None:
        _require_encodable(value)
    return value


def refuse_strange_json(body: bytes | bytearray) -> None:
    """Raise for a value that JSON does not allow; a text that is no JSON at all passes, and fails in its reader.

    Raises:
        RecordError: see `read_json`.

    >>> refuse_strange_json(b'{"a": NaN}')
    Traceback (most recent call last):
    gspo_gym.errors.RecordError: expected JSON: NaN is no JSON number
    """
    # One quick pass over the bytes; only a suspect body is read twice.
    if _SUSPECT.search(body) is not None:
        read_json(bytes(body))


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and the infinities, which Python's json takes for numbers."""
    raise ValueError(f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits is too large")
    return int(text)


def _require_encodable(value: Any) -> None:
    """Raise for a lone surrogate, which only a suspect text can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RecordError("expected JSON: a text holds a lone surrogate, which no encoding has") from None
