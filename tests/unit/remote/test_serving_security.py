"""Who is turned away from a served environment, and what it survives.

Pinned here, on real HTTP over loopback where it matters:

1.  Every route but / and /health wants a key; nothing that is said or logged tells anything about it.
2.  Loopback by default; no other address without a key; strange hosts and origins are not answered.
3.  Bodies and headers of any size, depth and speed: refused, with the memory of the server as it was.
4.  Inference URLs in forty spellings: not one connection; a name that changes its address: the checked one is called.
5.  More requests than there is room for: 503 with Retry-After, and as before once they are gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import programs
import pytest
from fastapi import FastAPI
from moved_clock import ServersClock, move_clock
from scripted_model import ScriptedModel, in_turn, text

from gspo_gym.cli.main import command_parser
from gspo_gym.errors import ConfigError
from gspo_gym.remote.apps.urls import UrlPolicy
from gspo_gym.remote.guard import Guard, Keys, json_depth_exceeds
from gspo_gym.remote.serve.agent_loop import InferenceClient
from gspo_gym.remote.serve.task_app_server import ServedEnv, create_task_app, served_app
from gspo_gym.remote.serving import BackgroundServer, bind
from gspo_gym.types import Message

KEY, OTHER_KEY = "k3y-0f-the-0perator", "an0ther-k3y"
OPEN_ROUTES = {"/", "/health"}

Headers = list[tuple[bytes, bytes]]


def call(app: Guard, path: str, headers: Headers, *, method: str = "GET", query: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one request, without a server."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [(b"host", b"127.0.0.1"), *headers],
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


# -- 1. keys --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Headers, bytes]] = {
    "none": ([], b""),
    "wrong": ([(b"authorization", b"Bearer wrong")], b""),
    "prefix": ([(b"authorization", b"Bearer " + KEY[:-1].encode()), (b"x-api-key", KEY[:6].encode())], b""),
    "longer": ([(b"x-api-key", KEY.encode() + b"x"), (b"x-api-keys", KEY.encode() + b"x,y")], b""),
    "scheme": ([(b"authorization", b"Basic " + KEY.encode()), (b"authorization", KEY.encode())], b""),
    "query": ([], b"api_key=" + KEY.encode() + b"&token=" + KEY.encode()),
    "unicode": ([(b"authorization", "Bearer ключ".encode()), (b"x-api-key", b"\xff\xfe\x00")], b""),
    "empty": ([(b"authorization", b"Bearer "), (b"x-api-key", b""), (b"x-api-keys", b",,")], b""),
}


def routes() -> list[tuple[str, str]]:
    """Methods and paths of all HTTP routes of both protocols, their parameters filled in."""
    found = []
    for served in (ServedEnv("GuessNumber", protocol="task_app"), ServedEnv("GuessNumber", protocol="openenv")):
        guard = served_app(served)
        assert isinstance(guard.app, FastAPI)
        for path, methods in guard.app.openapi()["paths"].items():
            found += [(method.upper(), re.sub(r"\{[^}]*\}", "x", path)) for method in methods]
    return found


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Guard, str]]:
    """Both protocols behind two keys, and its URL."""
    app = served_app(ServedEnv("GuessNumber", protocol="all", isolation="thread", api_keys=[KEY, OTHER_KEY]))
    with BackgroundServer(app) as server:
        yield app, server.url


@pytest.mark.parametrize("case", REFUSED)
def test_every_route_wants_a_key(guarded: tuple[Guard, str], case: str) -> None:
    app, _ = guarded
    headers, query = REFUSED[case]
    asked = routes()
    assert {path for _, path in asked} >= {"/info", "/rollout", "/mcp", "/reset", "/run/abort"}
    answers = {
        route: call(app, route[1], headers, method=route[0], query=query)
        for route in asked
        if route[1] not in OPEN_ROUTES
    }
    assert {status for status, _ in answers.values()} == {401}
    assert len({body for _, body in answers.values()}) == 1  # the same words for all
    assert all(KEY[:3].encode() not in body for _, body in answers.values())


def test_a_hundred_thousand_bad_keys_open_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was let in")

    keys = Keys([KEY, OTHER_KEY])
    assert not any(keys.open_for([(b"x-api-key", b"%d" % number)]) for number in range(100_000))
    guard = Guard(app, api_key=[KEY, OTHER_KEY])
    assert {call(guard, "/info", [(b"x-api-key", b"%d" % number)])[0] for number in range(100)} == {401}


@pytest.mark.parametrize(
    "headers",
    [
        {"X-API-Key": KEY},
        {"X-API-Keys": f"no, {OTHER_KEY} ,neither"},
        {"Authorization": f"Bearer {OTHER_KEY}"},
        {"authorization": f"bearer {KEY}", "X-API-Key": "wrong"},
    ],
)
def test_any_of_three_headers_opens(guarded: tuple[Guard, str], headers: dict[str, str]) -> None:
    _, url = guarded
    answer = httpx.get(f"{url}/info", headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200
    assert KEY[:4] not in answer.text
    assert OTHER_KEY[:4] not in answer.text


def test_more_keys_than_anybody_has_are_not_tried() -> None:
    many = b",".join([b"no"] * 1_000 + [KEY.encode()])
    assert not Keys([KEY]).open_for([(b"x-api-keys", many)])


def test_every_key_is_compared_however_early_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As digests of one length, so that neither the number nor the length of what is compared depends on the key."""
    compared: list[tuple[int, int]] = []
    honest = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return honest(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    keys = Keys([KEY, OTHER_KEY, "third"])
    for sent in (KEY, "third", "x", "y" * 1_000):
        compared.clear()
        keys.open_for([(b"x-api-key", sent.encode())])
        assert compared == [(32, 32)] * 3


def test_keys_are_in_no_log_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    served = ServedEnv("GuessNumber", isolation="thread", api_keys=[KEY], inference_hosts=["x"], inference_api_key=KEY)
    with BackgroundServer(served_app(served)) as server:
        for path in ("/info", "/health", "/nowhere", "/rollout"):
            for key in (KEY, KEY + "x"):
                httpx.get(server.url + path, headers={"X-API-Key": key}, trust_env=False, timeout=60)
    assert KEY[:6] not in caplog.text + repr(served) + repr(Keys([KEY]))


def test_health_says_only_whether_there_is_a_key(guarded: tuple[Guard, str]) -> None:
    _, url = guarded
    answer = httpx.get(f"{url}/health", trust_env=False, timeout=60)
    assert answer.json() == {"healthy": True, "status": "healthy", "auth": {"required": True}}
    for key, status in ((KEY, 200), (KEY[:-1], 401)):  # who sends one is told whether it fits
        assert httpx.get(f"{url}/health", headers={"X-API-Key": key}, trust_env=False, timeout=60).status_code == status


def test_a_key_that_no_header_could_carry_is_refused_without_repeating_it() -> None:
    for wrong in ("", "a,b", "two words", "line\nbreak"):
        with pytest.raises(ConfigError, match="an API key: expected printable text") as error:
            Keys([wrong])
        assert not wrong or wrong not in str(error.value)


# -- 2. who may connect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_no_address_but_loopback_without_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        bind(host, 0, has_key=False)


def hosts_of(parser: argparse.ArgumentParser, command: str = "") -> dict[str, str]:
    """The default of --host, by command."""
    hosts: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, part in action.choices.items():
                hosts |= hosts_of(part, f"{command} {name}".strip())
        elif "--host" in action.option_strings:
            hosts[command] = action.default
    return hosts


def test_every_command_that_serves_does_so_on_loopback_by_default() -> None:
    """But `view`, which has no such option and is on 127.0.0.1 alone."""
    serving = ("env serve", "app serve", "models serve", "judge serve", "judge fake", "jobs serve")
    assert hosts_of(command_parser()) == dict.fromkeys(serving, "127.0.0.1")


def test_only_this_machine_can_connect_by_default() -> None:
    with bind(ServedEnv("GuessNumber").host, 0, has_key=False) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


def with_host(url: str, host: str, **headers: str) -> int:
    return httpx.get(f"{url}/info", headers={"Host": host, **headers}, trust_env=False, timeout=60).status_code


def test_a_name_that_suddenly_means_this_machine_is_not_answered() -> None:
    with BackgroundServer(create_task_app("GuessNumber", isolation="thread")) as server:
        port = server.url.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "[::2]:80", ""):
            assert with_host(server.url, host) == 403
        for host in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", "[::1]:1"):
            assert with_host(server.url, host) == 200
        for origin in ("https://evil.example", "null", f"http://127.0.0.1:{port}"):
            assert with_host(server.url, "127.0.0.1", Origin=origin) == 403


def test_the_operator_names_hosts_and_origins() -> None:
    app = create_task_app(
        "GuessNumber", isolation="thread", allowed_hosts=["app.example"], allowed_origins=["https://ours.example"]
    )
    with BackgroundServer(app) as server:
        assert with_host(server.url, "app.example:8000", Origin="https://ours.example") == 200
        assert with_host(server.url, "127.0.0.1") == 403
    with BackgroundServer(create_task_app("GuessNumber", isolation="thread", api_key=KEY)) as server:
        assert with_host(server.url, "any.example", **{"X-API-Key": KEY}) == 200  # a page has no key


# -- 3. too much ----------------------------------------------------------------------------------------------------

ROUTE = b"POST /rollout HTTP/1.1\r\nhost: 127.0.0.1\r\n"
MEGABYTE = b" " * 1_000_000


def endlessly(piece: bytes, times: int) -> Iterator[bytes]:
    for _ in range(times):
        yield piece


def chunks(piece: bytes, times: int) -> Iterator[bytes]:
    return endlessly(b"%x\r\n%s\r\n" % (len(piece), piece), times)


def byte_by_byte() -> Iterator[bytes]:
    yield from chunks(b" ", 20_000)
    yield from chunks(MEGABYTE, 3)


ATTACKS: dict[str, tuple[bytes, Callable[[], Iterator[bytes]], Sequence[int]]] = {
    # Head, body, and the statuses of which one is answered.
    "a gigabyte": (ROUTE + b"content-length: 1000000000\r\n\r\n", lambda: endlessly(MEGABYTE, 1_000), [413]),
    "a gigabyte in chunks": (ROUTE + b"transfer-encoding: chunked\r\n\r\n", lambda: chunks(MEGABYTE, 1_000), [413]),
    "a byte a chunk": (ROUTE + b"transfer-encoding: chunked\r\n\r\n", byte_by_byte, [413]),
    "a length that is too short": (ROUTE + b"content-length: 2\r\n\r\n{}", lambda: endlessly(MEGABYTE, 200), [422]),
    "a length of 10^30": (ROUTE + b"content-length: 1" + b"0" * 30 + b"\r\n\r\n", lambda: iter([]), [413, 400]),
    "a length of minus one": (ROUTE + b"content-length: -1\r\n\r\n", lambda: iter([]), [400]),
    "two lengths": (ROUTE + b"content-length: 2\r\ncontent-length: 9\r\n\r\n{}", lambda: iter([]), [400]),
    "10^5 levels": (ROUTE + b"content-length: 200000\r\n\r\n", lambda: iter([b"[" * 100_000 + b"]" * 100_000]), [400]),
    "10^5 levels of objects": (ROUTE + b"content-length: 500000\r\n\r\n", lambda: iter([b'{"a":' * 100_000]), [400]),
    "10^5 headers": (ROUTE, lambda: iter([b"x: y\r\n" * 100_000, b"\r\n"]), [400, 431]),
    "101 headers": (ROUTE + b"x: y\r\n" * 100 + b"\r\n", lambda: iter([]), [431]),
    "a header of a gigabyte": (ROUTE + b"x: ", lambda: endlessly(MEGABYTE, 1_000), [400, 431]),
    "a header of 70,000 bytes": (ROUTE + b"x: " + b"y" * 70_000 + b"\r\n\r\n", lambda: iter([]), [400, 431]),
    "a path of a gigabyte": (b"GET /", lambda: endlessly(b"x" * 1_000_000, 1_000), [400, 431]),
}


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[str, int]]:
    """A server of its own: URL and process id."""
    command = [
        sys.executable,
        "-m",
        "gspo_gym.cli",
        "env",
        "serve",
        "GuessNumber",
        "--port",
        "0",
        "--isolation",
        "thread",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with programs.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as served:
        assert served.stdout is not None
        url = served.stdout.readline().split()[-1]
        yield url, served.pid
        served.terminate()


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def attacked(url: str, head: bytes, body: Iterator[bytes]) -> int | None:
    """The status of the first answer, whether or not all was sent; None: the connection ended without one."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
            for piece in body:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(1_000)
            return int(answer.split(b" ", 2)[1]) if answer else None
    return None


@pytest.mark.parametrize("name", ATTACKS)
def test_too_much_is_refused_and_costs_no_memory(process: tuple[str, int], name: str) -> None:
    url, pid = process
    assert httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200
    before = resident_bytes(pid)
    head, body, statuses = ATTACKS[name]
    # None: the connection was reset while we were still sending, which takes the answer with it.
    assert attacked(url, head, body()) in (*statuses, None)
    grown = resident_bytes(pid) - before
    assert grown < 50_000_000, f"{grown / 1e6:.0f} MB"
    assert httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200


def test_a_head_of_sixty_thousand_bytes_is_heard(process: tuple[str, int]) -> None:
    headers = {"x": "y" * 60_000}
    assert httpx.get(f"{process[0]}/health", headers=headers, trust_env=False, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("size", "status"), [(1_000_000, 422), (1_000_001, 413)], ids=["as long as may be", "one byte longer"]
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_bytes_are_counted_as_they_arrive(process: tuple[str, int], size: int, status: int, is_chunked: bool) -> None:
    body = b"{" + b" " * (size - 2) + b"}"
    content: Any = iter([body[:7], body[7:]]) if is_chunked else body
    answer = httpx.post(f"{process[0]}/rollout", content=content, trust_env=False, timeout=60)
    assert answer.status_code == status


def test_a_body_that_trickles_in_is_given_up_and_holds_up_nobody() -> None:
    arrived: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        arrived.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    clock = ServersClock(Guard(app, body_timeout_seconds=60.0))
    with BackgroundServer(clock) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(b"POST /slow HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{")
            assert httpx.post(f"{server.url}/quick", json={}, trust_env=False, timeout=60).status_code == 200
            clock.move(60.0)
            assert slow.recv(1_000).startswith(b"HTTP/1.1 408 ")
    assert arrived == ["/quick"]


def test_an_application_is_not_called_for_a_client_that_has_gone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was called")

    received = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        raise AssertionError("something was sent")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
    asyncio.run(Guard(app)(scope, receive, send))


@pytest.mark.parametrize("head", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_a_head_that_trickles_in_is_given_up(head: bytes, is_first: bool) -> None:
    """Also that of a second request on one connection."""
    if not head and not is_first:
        head = b"G"  # where nothing is begun, uvicorn closes after five seconds
    clock = ServersClock(create_task_app("GuessNumber", isolation="thread"))
    with BackgroundServer(clock) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            if not is_first:
                slow.sendall(b"HEAD / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")  # whose answer is one piece
                assert slow.recv(1_000).startswith(b"HTTP/1.1 200 ")
            slow.sendall(head)
            assert httpx.get(f"{server.url}/health", trust_env=False, timeout=60).status_code == 200  # it has come, too
            clock.move(30.0)
            assert slow.recv(1_000) == b""  # closed


def test_an_answer_may_take_longer_than_a_head() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        while (await receive()).get("more_body"):
            pass
        gone = asyncio.ensure_future(receive())
        move_clock(asyncio.get_running_loop(), 60.0)  # twice as long
        for _ in range(10):
            await asyncio.sleep(0)
        assert not gone.done()
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with BackgroundServer(app) as server:
        assert httpx.post(server.url, json={}, trust_env=False, timeout=60).status_code == 200


def test_what_cannot_be_read_does_not_overtake_the_answer_to_the_request_before_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        for _ in range(10):  # what follows came with it, and has been read by then
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with BackgroundServer(app) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n<no request>\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(1_000), b""))  # until it is closed
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_depth_is_that_of_brackets_outside_of_texts() -> None:
    cases = {b"[" * 64 + b"]" * 64: False, b"[" * 65 + b"]" * 65: True, b'{"a":' * 65: True}
    cases |= {b'["' + b"[" * 1_000 + b'"]': False, b'["\\"' + b"[" * 1_000 + b'"]': False}
    cases |= {b'["\\\\"' + b"[" * 1_000: True, b"[]" * 1_000: False, b"]" * 1_000 + b"[" * 65: False}
    assert {body: json_depth_exceeds(body, 64) for body in cases} == cases


def test_depth_is_found_in_linear_time() -> None:
    """A text that never ends, of escaped quotes: a search that begins anew at each of them takes minutes."""
    assert not json_depth_exceeds(b"[" * 64 + b"{" + b'\\"' * 500_000, 65)
    assert not json_depth_exceeds(b"[" * 64 + b"{" + b'"\\' * 500_000, 65)


# -- 4. inference URLs ----------------------------------------------------------------------------------------------

# A canary listens on {port}; none of these may reach it, nor anything else.
SPELLINGS = r"""
http://127.0.0.1:{port}/ http://localhost:{port}/ http://LOCALHOST:{port}/ http://localhost.:{port}/
http://127.1:{port}/ http://127.0.1:{port}/ http://2130706433:{port}/ http://0x7f000001:{port}/ http://0x7f.0.0.1:{port}/
http://0177.0.0.1:{port}/ http://017700000001:{port}/ http://127.0.0.1.:{port}/ http://0:{port}/ http://0.0.0.0:{port}/
http://[::1]:{port}/ http://[::]:{port}/ http://[::ffff:127.0.0.1]:{port}/ http://[::ffff:7f00:1]:{port}/
http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/ http://[64:ff9b::7f00:1]:{port}/ http://[2002:7f00:1::]:{port}/
http://[::127.0.0.1]:{port}/ http://[fe80::1%25lo]:{port}/ http://[::1%lo]:{port}/
http://user@127.0.0.1:{port}/ http://gateway.example@127.0.0.1:{port}/ http://127.0.0.1:{port}@gateway.example/
http://gateway.example#@127.0.0.1:{port}/ http://127.0.0.1:{port}\@gateway.example/ http://gateway.example\@127.0.0.1/
http://①②⑦.0.0.1:{port}/ http://127。0。0。1:{port}/ http://ⓛocalhost:{port}/
http:127.0.0.1:{port}/ http:/127.0.0.1:{port}/ //127.0.0.1:{port}/ 127.0.0.1:{port}
file:///etc/passwd gopher://127.0.0.1:{port}/ ftp://127.0.0.1:{port}/ HTTP://127.0.0.1:{port}/ unix:///tmp/socket
http://169.254.169.254/latest/meta-data http://100.100.100.200/ http://10.0.0.1/ http://192.168.0.1/ http://8.8.8.8/
http://gateway.example.evil.example/ http://evil.example/?gateway.example http://127.0.0.1%00.gateway.example:{port}/
""".split()  # noqa: SIM905  # a list of them would be a page long


@pytest.mark.slow
def test_forty_spellings_of_a_forbidden_address_make_no_connection() -> None:
    assert len(SPELLINGS) >= 40
    with (
        socket.create_server(("127.0.0.1", 0)) as canary,
        BackgroundServer(
            create_task_app("GuessNumber", isolation="thread", inference_hosts=["gateway.example"])
        ) as server,
    ):
        canary.settimeout(0)
        port = canary.getsockname()[1]
        for number, spelling in enumerate(SPELLINGS):
            policy = {"inference_url": spelling.format(port=port), "trace_correlation_id": "x"}
            request = {"run_id": f"r{number}", "env": {}, "policy": {"config": policy}, "ops": ["agent", "env"]}
            answer = httpx.post(f"{server.url}/rollout", json={**request, "mode": "rl"}, trust_env=False, timeout=60)
            assert (answer.status_code, answer.json()["detail"]["error"]["code"]) == (
                422,
                "inference_url_not_allowed",
            ), spelling
        with pytest.raises(BlockingIOError):  # nobody knocked
            canary.accept()


def test_a_name_that_changes_its_address_is_called_at_the_one_that_was_checked() -> None:
    lookups: list[str] = []

    async def flipping(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) == 1 else ["127.0.0.66"]

    model = ScriptedModel(in_turn(text("hi")))
    with BackgroundServer(model) as server:
        port = server.url.rpartition(":")[2]

        async def ask() -> str:
            policy = UrlPolicy(["gateway.example"], is_public_allowed=False, resolve=flipping)
            url = await policy.check(f"http://gateway.example:{port}/t/x/v1?cid=x")
            client = InferenceClient(url, {"model": "m"})
            try:
                return (await client.ask((Message("user", "Hi."),), ())).message.content
            finally:
                await client.close()

        assert asyncio.run(ask()) == "hi"
    assert lookups == ["gateway.example"]
    assert model.asked[0].headers["host"] == f"gateway.example:{port}"


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    model = ScriptedModel(in_turn(text("7")))
    with BackgroundServer(model) as server, BackgroundServer(create_task_app("GuessNumber", isolation="thread")) as app:
        policy = {"inference_url": f"{server.url}/v1?cid=x"}
        request = {
            "run_id": "r",
            "env": {"seed": 0},
            "policy": {"config": policy},
            "ops": ["agent", "env"],
            "mode": "rl",
        }
        answer = httpx.post(f"{app.url}/rollout", json=request, trust_env=False, timeout=60)
    assert answer.json()["metrics"]["mean_return"] == 1.0


# -- 5. too many ----------------------------------------------------------------------------------------------------


def test_more_requests_than_there_is_room_for_are_told_when_to_come_again() -> None:
    room, asking = 8, 80
    loops: list[asyncio.AbstractEventLoop] = []
    released = asyncio.Event()
    all_inside, inside = threading.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal inside
        if scope["type"] == "lifespan":
            loops.append(asyncio.get_running_loop())
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        if scope["path"] != "/health":
            inside += 1
            if inside == room:
                all_inside.set()
            await released.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def crowd(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as client:
            first = [asyncio.create_task(client.post(f"{url}/x", json={})) for _ in range(room)]
            await asyncio.to_thread(all_inside.wait, 60)
            rest = await asyncio.gather(*(client.post(f"{url}/x", json={}) for _ in range(asking - room)))
            assert (await client.get(f"{url}/health")).status_code == 200  # however full it is
            loops[0].call_soon_threadsafe(released.set)
            return [*await asyncio.gather(*first), *rest, await client.post(f"{url}/x", json={})]

    with BackgroundServer(Guard(app, max_concurrent_requests=room)) as server:
        *answers, afterwards = asyncio.run(crowd(server.url))
    statuses = [answer.status_code for answer in answers]
    assert statuses == [200] * room + [503] * (asking - room)
    assert {answer.headers.get("retry-after") for answer in answers[room:]} == {"1"}
    assert afterwards.status_code == 200
