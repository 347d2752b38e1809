"""The one client for JSON over HTTP against a server of raw bytes: what it sends, and what it makes of each answer.

Retries, faults of engines and judges, and what they do with the errors are tested where they happen (`tests/fault`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gspo_gym.base.http import HttpClient, RefusedError
from gspo_gym.base.retries import AttemptError

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@contextlib.asynccontextmanager
async def serving(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server on loopback; at the end every connection has ended."""
    ended: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.append(task)
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(accept, "127.0.0.1")
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*ended)


def exchange(work: Callable[[HttpClient], Awaitable[Any]], *answers: bytes, **options: Any) -> tuple[Any, list[bytes]]:
    """What the work returns or raises, and the bytes of each request; the server sends one of `answers` to each."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        requests.append(head + await reader.readexactly(length))
        writer.write(answers[len(requests) - 1])
        await reader.read()  # until the client hangs up

    async def run() -> Any:
        async with serving(serve) as url:
            client = HttpClient(url, **{"timeout_seconds": 10.0, **options})
            try:
                return await work(client)
            except (AttemptError, RefusedError) as error:
                return error
            finally:
                await client.close()

    return asyncio.run(run()), requests


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"text": "half \ud800"}, "surrogates not allowed"), ({"x": float("nan")}, "not JSON compliant")],
)
def test_what_no_server_can_read_is_refused_before_it_is_sent(body: dict[str, Any], reason: str) -> None:
    error, requests = exchange(lambda client: client.post("/a?key=1", body), OK)
    assert isinstance(error, RefusedError)
    assert str(error).startswith("http://127.0.0.1:")
    assert "/a: the request cannot be sent as JSON: " in str(error)  # without the query
    assert reason in str(error)
    assert requests == []


def test_a_body_is_sent_as_compact_utf_8_and_no_body_as_nothing() -> None:
    async def both(client: HttpClient) -> None:
        await client.post("/a", {"text": "ü", "n": [1, 2.5]})
        await client.post("/b")

    _, (first, second) = exchange(both, OK, OK, reuses_connections=False)
    assert first.startswith(b"POST /a HTTP/1.1\r\n")
    assert b"content-type: application/json\r\n" in first.lower()
    assert first.endswith(b'\r\n\r\n{"text":"\xc3\xbc","n":[1,2.5]}')
    assert second.endswith(b"\r\n\r\n")
    assert b"content-type" not in second.lower()


def test_proxies_of_the_environment_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    answer, requests = exchange(lambda client: client.get("/a"), OK)
    assert (answer, len(requests)) == ({}, 1)


def test_an_answer_that_drips_ends_at_the_deadline_of_the_whole_request() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"x")  # each byte comes long before any timeout of a single read
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.01)

    async def run() -> None:
        async with serving(drip) as url:
            client = HttpClient(url, timeout_seconds=0.2)
            with pytest.raises(AttemptError, match=r"/a: no complete answer within 0\.2 seconds") as caught:
                await client.get("/a")
            assert caught.value.kind == "timeout"
            await client.close()

    asyncio.run(run())


def answer_of(content: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = (b"HTTP/1.1 " + status, b"content-length: %d" % len(content), *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        (answer_of(b"x" * 101), {"max_answer_bytes": 100}, "more than max_answer_bytes = 100 bytes"),
        # 10 MB in 10 KB: counted as they are unpacked
        (answer_of(gzip.compress(b"x" * 10**7), b"content-encoding: gzip"), {"max_answer_bytes": 10**6}, "more than"),
        (answer_of(b"{}", b"content-encoding: gzip"), {"accepts_compression": False}, "is compressed although"),
        (answer_of(b"not gzip", b"content-encoding: gzip"), {}, "connection failed (DecodingError)"),
        (answer_of(b'{"a": ', b"content-type: application/json"), {}, "the answer is not complete JSON"),
        (answer_of(b"[" * 10**5, b"content-type: application/json"), {}, "the answer is not complete JSON"),
    ],
)
def test_an_answer_that_must_not_or_cannot_be_read_is_a_failed_attempt(
    answer: bytes, options: dict[str, Any], expected: str
) -> None:
    error, _ = exchange(lambda client: client.get("/a"), answer, **options)
    assert isinstance(error, AttemptError)
    assert expected in str(error)


def test_a_redirect_is_not_followed_and_the_key_is_in_no_error() -> None:
    away = answer_of(b"see SECRET", b"location: http://127.0.0.1:1/", status=b"307 Temporary Redirect")
    error, requests = exchange(lambda client: client.post("/a", {}), away, api_key="SECRET")
    assert isinstance(error, RefusedError)
    assert (error.status, len(requests)) == (307, 1)
    assert str(error).endswith("/a: HTTP 307: see ***")
    assert b"authorization: bearer secret\r\n" in requests[0].lower()
