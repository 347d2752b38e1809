"""No URL that somebody else wrote reaches an address that is not public, however it is spelt, unless it is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.remote.apps.urls import PinnedUrl, UrlError, UrlPolicy, operator_url
from gspo_gym.remote.serving import BackgroundServer

PUBLIC, PRIVATE = "93.184.216.34", "10.0.0.5"
LOCAL_SPELLINGS = [
    "http://127.0.0.1:{port}/",
    "http://127.0.0.1.:{port}/",
    "http://127.1:{port}/",
    "http://127.0.1:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0x7f.0.0.1:{port}/",
    "http://0X7F.1:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://017700000001:{port}/",
    "http://127.0.0.0x1:{port}/",
    "http://0:{port}/",
    "http://0.0.0.0:{port}/",
    "http://00000127.0.0.1:{port}/",
    "http://[::1]:{port}/",
    "http://[::]:{port}/",
    "http://[0:0:0:0:0:0:0:1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[::127.0.0.1]:{port}/",
    "http://[64:ff9b::127.0.0.1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://[fe80::1%25lo]:{port}/",
    "http://%31%32%37.0.0.1:{port}/",
    "http://１２７.0.0.1:{port}/",
    "http://127。0。0。1:{port}/",
    "http://localhost:{port}/",
    "http://LOCALHOST:{port}/",
    "http://local.test:{port}/",
    "http://user@127.0.0.1:{port}/",
    "http://public.test@127.0.0.1:{port}/",
    "http://public.test:80@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@public.test/",
    "http:\\\\127.0.0.1:{port}/",
    "http:///127.0.0.1:{port}/",
    "http:127.0.0.1:{port}",
    "//127.0.0.1:{port}/",
    "127.0.0.1:{port}",
    " http://127.0.0.1:{port}/",
    "http://127.0.0.1\t:{port}/",
    "http://127.0.0.1\n:{port}/",
    "ftp://127.0.0.1:{port}/",
    "file://127.0.0.1/etc/passwd",
    "gopher://127.0.0.1:{port}/_GET",
    "unix:///var/run/docker.sock",
    "http://127.0.0.1:{port}00000/",
    "",
]
OTHER_ADDRESSES = [
    "http://169.254.169.254/latest/meta-data/",  # a cloud's metadata
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://100.64.0.1/",  # carrier-grade NAT
    "http://10.0.0.5/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://192.0.2.1/",
    "http://198.18.0.1/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://[fe80::1]/",
    "http://[fc00::1]/",
    "http://[ff02::1]/",
    "http://[::ffff:169.254.169.254]/",
    "http://[::ffff:10.0.0.5]/",
    "http://[2002:0a00:0005::]/",
    "http://private.test/",
    "http://mixed.test/",
    "http://nowhere.test/",
]


async def resolve(host: str, port: int) -> list[str]:
    known = {
        "localhost": ["::1", "127.0.0.1"],
        "local.test": ["127.0.0.1"],
        "public.test": [PUBLIC],
        "private.test": [PRIVATE],
        "mixed.test": [PUBLIC, PRIVATE],
    }
    if host not in known:
        raise OSError("Name or service not known")
    return known[host]


def check(url: str, *allowed: str) -> PinnedUrl:
    return asyncio.run(UrlPolicy(allowed, resolve=resolve).check(url))


@pytest.mark.parametrize("spelling", LOCAL_SPELLINGS)
def test_no_spelling_of_this_machine_is_called(spelling: str) -> None:
    with pytest.raises(UrlError):
        check(spelling.replace("{port}", "8001"))


@pytest.mark.parametrize("url", OTHER_ADDRESSES)
def test_no_address_that_is_not_public_is_called(url: str) -> None:
    with pytest.raises(UrlError):
        check(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://public.test/v1", ("http", "public.test", 80, PUBLIC)),
        ("https://Public.Test:8443/v1?cid=1", ("https", "public.test", 8443, PUBLIC)),
        ("https://93.184.216.34", ("https", PUBLIC, 443, PUBLIC)),
        ("http://[2606:2800:220:1::1]/", ("http", "2606:2800:220:1::1", 80, "2606:2800:220:1::1")),
    ],
)
def test_a_public_url_is_called_at_its_address(url: str, expected: tuple[str, str, int, str]) -> None:
    pinned = check(url)
    assert (pinned.scheme, pinned.host, pinned.port, pinned.address) == expected
    assert pinned.url == url


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://127.0.0.1:8001/", "127.0.0.1"),
        ("http://127.0.0.1:8001/", "127.0.0.1:8001"),
        ("http://[::1]:8001/", "::1"),
        ("http://[::1]:8001/", "[::1]:8001"),
        ("http://LocalHost/", "localhost"),
        ("http://private.test/", "private.test"),
        ("http://private.test/", "10.0.0.0/8"),
        ("http://mixed.test/", "10.0.0.0/8"),
        ("http://10.0.0.5/", "10.0.0.5/32"),
    ],
)
def test_what_is_allowed_is_called(url: str, allowed: str) -> None:
    assert check(url, allowed).address


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://127.0.0.1:8002/", "127.0.0.1:8001"),
        ("http://127.0.0.2:8001/", "127.0.0.1"),
        ("http://local.test/", "127.0.0.1"),  # the name is a stranger's; a network would allow the address
        ("http://private.test/", "10.1.0.0/16"),
        ("http://evil.localhost/", "localhost"),
        ("http://2130706433/", "127.0.0.0/8"),
    ],
)
def test_only_what_is_allowed_is_called(url: str, allowed: str) -> None:
    with pytest.raises(UrlError):
        check(url, allowed)


def test_where_only_named_hosts_may_be_called_others_are_not_even_looked_up() -> None:
    looked_up: list[str] = []

    async def noting(host: str, port: int) -> list[str]:
        looked_up.append(host)
        return await resolve(host, port)

    policy = UrlPolicy(["private.test"], is_public_allowed=False, resolve=noting)
    assert asyncio.run(policy.check("http://private.test/")).address == PRIVATE
    with pytest.raises(UrlError, match="is not among the allowed hosts"):
        asyncio.run(policy.check("http://public.test/"))
    assert looked_up == ["private.test"]


@pytest.mark.parametrize("allowed", ["", "http://gw", "gw/", "10.0.0.0/99", "2130706433", "a b", "gw:port"])
def test_an_allowed_host_that_is_none_is_an_error(allowed: str) -> None:
    with pytest.raises(ConfigError, match="allowed hosts"):
        UrlPolicy([allowed])


def test_an_error_repeats_no_query() -> None:
    with pytest.raises(UrlError) as raised:
        check("http://10.0.0.5/v1?cid=secret")
    assert "secret" not in str(raised.value)


class Counting:
    """An application that says which Host it was asked for."""

    def __init__(self) -> None:
        self.hosts: list[bytes] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.hosts.append(dict(scope["headers"])[b"host"])
        await send({"type": "http.response.start", "status": 302, "headers": [(b"location", b"http://10.0.0.5/")]})
        await send({"type": "http.response.body", "body": b""})


def test_the_address_that_was_checked_is_the_one_that_is_called() -> None:
    """A name that resolves to another address at every lookup is looked up once, and called where that was."""
    app = Counting()
    with BackgroundServer(app) as server:
        port = httpx.URL(server.url).port
        lookups = iter(["127.0.0.1", "10.0.0.5", "10.0.0.6"])

        async def flipping(host: str, port: int) -> list[str]:
            return [next(lookups)]

        async def call() -> tuple[int, dict[str, Any]]:
            pinned = await UrlPolicy(["rebinding.test"], resolve=flipping).check(f"http://rebinding.test:{port}/v1")
            hooks = {"request": [pinned.pin]}
            async with httpx.AsyncClient(
                trust_env=False, timeout=60, follow_redirects=False, event_hooks=hooks
            ) as client:
                response = await client.get(pinned.url)
                await client.get(pinned.url)
                return response.status_code, dict(response.request.extensions)

        status, extensions = asyncio.run(call())
    assert app.hosts == [f"rebinding.test:{port}".encode()] * 2
    assert next(lookups) == "10.0.0.5"  # nobody looked again
    assert status == 302  # which was not followed
    assert extensions["sni_hostname"] == "rebinding.test"  # the certificate has to be of the name


@pytest.mark.parametrize("url", ["http://other.test/", "https://public.test/", "http://public.test:81/"])
def test_a_pinned_client_calls_nothing_else(url: str) -> None:
    pinned = check("http://public.test/v1")
    with pytest.raises(UrlError, match=r"expected a request to http://public\.test:80"):
        asyncio.run(pinned.pin(httpx.Request("GET", url)))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8001/", "http://localhost:8001"),
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://10.0.0.5/apps/crafter//", "http://10.0.0.5/apps/crafter"),
        ("https://app.example.org", "https://app.example.org"),
        ("http://[::1]:8001", "http://[::1]:8001"),
    ],
)
def test_the_operator_may_name_any_host(url: str, expected: str) -> None:
    assert operator_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8001",
        "ftp://localhost",
        "http://",
        "http://user:secret@localhost",
        "http://localhost?key=secret",
        "http://localhost/#top",
        "http://local host",
        "http://localhost:port",
        "http://2130706433",
    ],
)
def test_a_base_url_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        operator_url(url)
    assert "secret" not in str(raised.value)
