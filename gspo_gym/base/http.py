"""The JSON-over-HTTP client, and the rule by which every server reads JSON from clients.

One request to one server, with its failures as exceptions. Nothing is tried twice here; `retries.py` does that for an
`AttemptError`. Proxies and `.netrc` of the environment are not used and redirects not followed, so prompts and keys go
only to the URL.

Anything but JSON that can be written again is refused. Python's reader accepts more: NaN and infinities (also as
1e999), lone surrogates, which no encoder writes and no tokenizer reads, and whole numbers of any length. Each would
fail later, where it is not expected.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NoReturn

from gspo_gym.base.retries import AttemptError
from gspo_gym.errors import GymError, MissingExtraError, RecordError, ServiceError, shortened

if TYPE_CHECKING:
    import httpx

_SHOWN = 300  # characters of a body in an error
_INLINE_BYTES = 200_000  # parsing a longer answer in the event loop would block every other episode
# Below the 5 seconds after which uvicorn closes an idle connection, or a request may be sent into a closing one.
_KEEP_ALIVE_SECONDS = 2.0


class RefusedError(ServiceError):
    """The server refuses the request (4xx); asking again changes nothing.

    Attributes:
        status: HTTP's; 0 if unknown.
        answer: the whole body, of which the message repeats only a part. No error shows it.
    """

    def __init__(self, message: str, *, status: int = 0, answer: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A complete answer.

    Attributes:
        where: the URL that was asked, without its query.
        headers: by lower-case name.
    """

    where: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    async def json(self, *, has_unique_keys: bool = False) -> Any:
        """Return the parsed body; with `has_unique_keys`, which takes longer, a key may not stand there twice.

        Raises:
            ValueError: it is not complete JSON, or nested too deeply.
        """
        read = functools.partial(json.loads, object_pairs_hook=unique_keys if has_unique_keys else None)
        try:
            if len(self.content) < _INLINE_BYTES:
                return read(self.content)
            return await asyncio.to_thread(read, self.content)
        except RecursionError as error:
            raise ValueError(str(error)) from error


class HttpClient:
    """Sends JSON and returns JSON. Use one within one event loop, and close it.

    Attributes:
        attempt_error, refused_error: exceptions to raise; a subclass may set others.
        needs: error text if httpx is not installed.

    Args:
        base_url: such as "http://127.0.0.1:8000/v1".
        timeout_seconds: limit of one request, to the last byte of the answer.
        api_key: sent as the bearer token; None sends "none", for servers that insist on a key. It appears in no error.
        headers: of every request, instead of the one with the key.
        max_connections: at the same time; None for no limit.
        max_connect_seconds: limit of connecting; None for the limit of the request.
        max_answer_bytes: limit of one answer; None for no limit.
        accepts_compression: if not, a compressed answer is a failure, and never unpacked.
        has_unique_keys: an answer in which a key stands twice is broken JSON.

    Raises:
        MissingExtraError: httpx is not installed.
    """

    attempt_error: type[AttemptError] = AttemptError
    refused_error: type[RefusedError] = RefusedError
    needs = "asking an endpoint needs: pip install 'gspo-gym[openai]'"

    def __init__(
        self,
        base_url: str,
        *,
        timeout_seconds: float,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_connections: int | None = None,
        max_connect_seconds: float | None = None,
        max_answer_bytes: int | None = None,
        accepts_compression: bool = True,
        has_unique_keys: bool = False,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError(self.needs) from error
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._max_answer_bytes = max_answer_bytes
        self._accepts_compression = accepts_compression
        self._has_unique_keys = has_unique_keys
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_SECONDS
        )
        # Plain HTTP verifies nothing, so the slow reading of certificates is skipped.
        verify = _tls() if self.base_url.startswith("https:") else False
        self._http = httpx.AsyncClient(
            headers={
                "accept": "application/json",
                **({} if accepts_compression else {"accept-encoding": "identity"}),
                **({"authorization": f"Bearer {api_key or 'none'}"} if headers is None else headers),
            },
            transport=httpx.AsyncHTTPTransport(limits=limits, retries=0, trust_env=False, verify=verify),
            timeout=httpx.Timeout(None, connect=max_connect_seconds),  # the rest is under one deadline
            trust_env=False,
            follow_redirects=False,
        )

    @property
    def cookies(self) -> Mapping[str, str]:
        """Return the cookies that the server has set, by name."""
        return {cookie.name: cookie.value or "" for cookie in self._http.cookies.jar}

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        """Return the JSON at a path; see `post`."""
        return await self._read(await self.request("GET", path, params=params))

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON that answers; text for another content type, None for an empty answer.

        `path` is below the base URL, or a complete URL. Cancelling this closes the connection.

        Raises:
            AttemptError: of the class `attempt_error`: no connection, no complete answer in time, 429, 5xx, broken
                JSON: another attempt may succeed.
            RefusedError: of the class `refused_error`: any other status but 2xx.
        """
        return await self._read(await self.request("POST", path, body, params=params, headers=headers))

    async def get_object(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path; see `post_object`."""
        return self._require_object(await self.get(path))

    async def post_object(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the JSON object that answers; see `post`.

        Raises:
            AttemptError: also for an answer that is no JSON object.
        """
        return self._require_object(await self.post(path, body, headers=headers))

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> HttpAnswer:
        """Return the answer, whatever its status.

        Raises:
            AttemptError: as `failure` makes it: there is no complete answer in time, or none that may be read.
        """
        import httpx

        url = path if "://" in path else self.base_url + path
        # Certificates are verified or not by the base URL, so a complete URL may not be of another scheme.
        assert url.partition(":")[0] == self.base_url.partition(":")[0], (url, self.base_url)
        where = url.partition("?")[0]
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            # httpx's timeout is for each read, so a body that drips would never end.
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, url, json=body, params=params, headers=headers) as response,
            ):
                content = b"".join([chunk async for chunk in self._chunks(response, where)])
        except (httpx.TransportError, httpx.InvalidURL, httpx.DecodingError) as error:
            raise self.failure(f"{where}: connection failed ({type(error).__name__})", kind="connection") from error
        except TimeoutError as error:
            text = f"{where}: no complete answer within {seconds:g} seconds"
            raise self.failure(text, kind="timeout") from error
        return HttpAnswer(where, response.status_code, response.headers, content)

    def failure(self, message: str, *, kind: str) -> GymError:
        """Return the error for a request without a usable answer; `kind` as in `AttemptError`."""
        return self.attempt_error(message, kind=kind)

    def shown(self, text: str) -> str:
        """Return the beginning of a body as errors repeat it, without the key."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return shortened(text, _SHOWN)

    async def close(self) -> None:
        await self._http.aclose()

    async def _chunks(self, response: httpx.Response, where: str) -> AsyncIterator[bytes]:
        if not self._accepts_compression and response.headers.get("content-encoding", "identity") != "identity":
            text = f"{where}: the answer is compressed although it was asked not to be"
            raise self.failure(text, kind="encoding")
        num_bytes = 0
        async for chunk in response.aiter_bytes():
            num_bytes += len(chunk)
            if self._max_answer_bytes is not None and num_bytes > self._max_answer_bytes:
                text = f"{where}: the answer has more than max_answer_bytes = {self._max_answer_bytes} bytes"
                raise self.failure(text, kind="size")
            yield chunk

    async def _read(self, answer: HttpAnswer) -> Any:
        if not 200 <= answer.status < 300:
            raise self._status_error(answer)
        if not answer.content:
            return None
        if "json" not in answer.headers.get("content-type", ""):
            return answer.text
        try:
            return await answer.json(has_unique_keys=self._has_unique_keys)
        except ValueError as error:
            raise self.failure(f"{answer.where}: the answer is not complete JSON: {error}", kind="json") from error

    def _status_error(self, answer: HttpAnswer) -> GymError:
        message = f"{answer.where}: HTTP {answer.status}: {self.shown(answer.text)}"
        if answer.status == 429 or answer.status >= 500:
            wait = retry_after_seconds(answer.headers)
            return self.attempt_error(message, kind=str(answer.status), retry_after_seconds=wait)
        return self.refused_error(message, status=answer.status, answer=answer.text)

    def _require_object(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise self.failure(f"{self.base_url}: expected a JSON object, got {answer!r:.120}", kind="content")
        return answer


def call_headers(call_id: str, attempt: int) -> dict[str, str]:
    """Return the headers that name a call and its attempt."""
    # The key is the same for all attempts, so a gateway that supports such keys samples once.
    return {"idempotency-key": call_id, "x-request-id": f"{call_id}-{attempt}"}


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return how long a server asks to wait: `retry-after-ms`, or `retry-after` in seconds or as a date.

    None if it does not say, or not readably.

    >>> retry_after_seconds({"retry-after": "2"}), retry_after_seconds({"retry-after-ms": "1500"})
    (2.0, 1.5)
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        # A date (RFC 9110, 10.2.3) counts from the answer's own `date`, because clocks may differ.
        then, now = parsedate_to_datetime(headers["retry-after"]), parsedate_to_datetime(headers["date"])
        return max(0.0, (then - now).total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return one context for all clients: reading the certificates takes longer than a short episode does."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())  # slim images have no list of their own
    return context


_MAX_DIGITS = 300  # of a whole number; longer ones are no float either
# Each begins with what is looked for quickly. A body without all of them cannot hold one of the values above.
_LARGE_NUMBER = re.compile(rb"\d(?:[eE]\+?\d{3}|\d{299})")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_LONE_ESCAPE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD].))"
)


def _is_suspect(body: bytes | bytearray) -> bool:
    return (
        b"NaN" in body
        or b"Infinity" in body
        or b"\0" in body
        or _LARGE_NUMBER.search(body) is not None
        or _may_hold_surrogate(body)
    )


def _may_hold_surrogate(body: bytes | bytearray) -> bool:
    return (b"\xed" in body and _SURROGATE.search(body) is not None) or (
        b"\\u" in body and _LONE_ESCAPE.search(body) is not None
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
        value = _DECODER.decode(raw.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"expected JSON: {error}") from None
    if _may_hold_surrogate(raw):
        _require_encodable(value)
    return value


def require_utf8(body: bytes | bytearray) -> None:
    """Raise for a body in another encoding.

    Raises:
        RecordError: it is not UTF-8.
    """
    if not body.isascii():  # most bodies are, which is known sooner
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(error) from None


def _not_utf8(error: UnicodeDecodeError) -> RecordError:
    return RecordError(f"expected JSON in UTF-8: {error.reason} at byte {error.start}")


def refuse_strange_json(body: bytes | bytearray) -> None:
    """Raise for a value that JSON does not allow; a text that is no JSON at all passes, and fails in its reader.

    Raises:
        RecordError: see `read_json`.

    >>> refuse_strange_json(b'{"a": NaN}')
    Traceback (most recent call last):
    gspo_gym.errors.RecordError: expected JSON: NaN is no JSON number
    """
    if _is_suspect(body):  # and only such a body is read twice
        read_json(bytes(body))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; a ValueError if a key stands there twice, of which Python's json keeps the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return values


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


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite_float, parse_int=_bounded_int)


def _require_encodable(value: Any) -> None:
    """Raise for a lone surrogate, which only a suspect text can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RecordError("expected JSON: a text holds a lone surrogate, which no encoding has") from None
