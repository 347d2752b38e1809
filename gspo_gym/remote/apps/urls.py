"""The URLs that may be called: the operator's own, and of any others only allowed ones.

A URL in a request or an answer could make this process call what only it can reach (a cloud's metadata, a neighbour's
admin port). It must name an allowed host, or resolve to public addresses only; and the checked address
is called, even if the name resolves to another later. No I/O but the lookup.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gspo_gym.errors import ConfigError, ServiceError, shortened

# A host and a port -> its addresses, as text.
Resolve = Callable[[str, int], Awaitable[list[str]]]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?")
# What inet_aton takes for an address and ipaddress does not: 2130706433, 0x7f.1, 0177.0.0.1, 127.1.
_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+)){0,3}")
# Addresses that ipaddress counts as global but that lead to others: the IPv4 address is inside.
_TRANSLATED = tuple(ipaddress.IPv6Network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96"))


class UrlError(ServiceError, ValueError):
    """A URL is invalid, or not allowed, and is not called."""


def operator_url(url: str) -> str:
    """Return a base URL from the configuration, checked and without a slash at its end; any host is allowed.

    Raises:
        ConfigError: no http or https URL with a host, or one with a user, a query or a fragment.

    >>> operator_url("http://localhost:8001/")
    'http://localhost:8001'
    """
    try:
        parts = _split(url)
    except UrlError as error:
        raise ConfigError(str(error)) from None
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise ConfigError(f"expected a base URL without a query or a fragment, got {_show_url(url)}")
    return url.rstrip("/")


@dataclass(frozen=True, slots=True)
class PinnedUrl:
    """A URL that may be called, at the address that was checked.

    Attributes:
        url: as it was given.
        scheme, host, port: of it, with defaults.
        address: the one to call.
    """

    url: str
    scheme: str
    host: str
    port: int
    address: str

    async def pin(self, request: Any) -> None:
        """Send the request to the checked address; a `request` event hook of httpx or httpx2.

        The `Host` header and the name that the certificate must have stay the URL's.

        Raises:
            UrlError: the request is to another scheme, host or port than this URL's.
        """
        target = (request.url.scheme, request.url.host, request.url.port or _PORTS.get(request.url.scheme))
        if target != (self.scheme, self.host, self.port):
            raise UrlError(f"expected a request to {self.scheme}://{self.host}:{self.port}, got one to {target}")
        # The TLS name stays the host's: the certificate is checked against it, and the address is in no certificate.
        request.extensions = {**request.extensions, "sni_hostname": self.host}
        request.url = request.url.copy_with(host=self.address)


class UrlPolicy:
    """Decides about URLs that do not come from the operator.

    Args:
        allowed_hosts: names and addresses ("127.0.0.1", "gateway.lan", "10.0.0.5:8003", "10.0.0.0/8") that may be
            called although their addresses are not public; with a port, at that port only.
        is_public_allowed: whether hosts that are not named may be called at public addresses.
        resolve: replaces the lookup of names.

    Raises:
        ConfigError: an allowed host is invalid.
    """

    def __init__(
        self, allowed_hosts: Iterable[str] = (), *, is_public_allowed: bool = True, resolve: Resolve | None = None
    ) -> None:
        self._is_public_allowed = is_public_allowed
        self._hosts: set[tuple[str, int | None]] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for pattern in allowed_hosts:
            self._allow(pattern)
        self._resolve = resolve or _resolve

    def _allow(self, pattern: str) -> None:
        if "/" in pattern:
            try:
                self._networks.append(ipaddress.ip_network(pattern))
            except ValueError:
                raise ConfigError(f"allowed hosts: expected a network such as 10.0.0.0/8, got {pattern!r}") from None
            return
        # A bare IPv6 address has colons, which otherwise begin a port.
        is_bare_ipv6 = pattern.count(":") > 1 and "[" not in pattern
        try:
            parts = _split(f"http://[{pattern}]" if is_bare_ipv6 else f"http://{pattern}")
        except UrlError as error:
            raise ConfigError(f"allowed hosts: expected a name or an address, got {pattern!r}: {error}") from None
        self._hosts.add((_host(parts), parts.port))

    async def check(self, url: str) -> PinnedUrl:
        """Return the URL with an address at which it may be called.

        Raises:
            UrlError: it may not, it is no URL, or its name is not known.
        """
        parts = _split(url)
        host, port = _host(parts), parts.port or _PORTS[parts.scheme]
        is_allowed = (host, None) in self._hosts or (host, port) in self._hosts
        if not (is_allowed or self._is_public_allowed or self._networks):  # a name that is not looked up tells nobody
            raise UrlError(f"{_show_url(url)} is not called: {host} is not among the allowed hosts")
        addresses = await self._addresses(host, port)
        # All of them, because a name may have a public and a private address, and the caller's library would choose.
        for address in addresses:
            is_public = self._is_public_allowed and _is_public(address)
            if not (is_allowed or is_public or self._is_in_network(address)):
                raise UrlError(
                    f"{_show_url(url)} is not called: {host} is {address}, which is not a public address; "
                    "if it is meant, name it among the allowed hosts"
                )
        return PinnedUrl(url, parts.scheme, host, port, str(addresses[0]))

    def _is_in_network(self, address: IPAddress) -> bool:
        return any(address in network for network in self._networks)

    async def _addresses(self, host: str, port: int) -> list[IPAddress]:
        literal = _literal(host)
        if literal is not None:
            return [literal]
        try:
            address_texts = await self._resolve(host, port)
            addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in address_texts]
        except (OSError, ValueError) as error:
            raise UrlError(f"{host}: no address found: {error}") from None
        if not addresses:
            raise UrlError(f"{host}: no address found")
        return addresses


async def _resolve(host: str, port: int) -> list[str]:
    address_infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in address_infos]


def _split(url: str) -> SplitResult:
    # What urlsplit would drop or read otherwise than the library that connects.
    if not isinstance(url, str) or any(c <= " " or c == "\\" or c >= "\x7f" for c in url):
        raise UrlError(f"expected a URL of printable ASCII without spaces or backslashes, got {_show_url(url)}")
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises on what is no port
    except ValueError as error:
        raise UrlError(f"expected a URL, got {_show_url(url)}: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise UrlError(f"expected a URL that begins with http:// or https:// and a host, got {_show_url(url)}")
    if "@" in parts.netloc:
        raise UrlError(f"expected a URL without a user or a password, got one for host {parts.hostname}")
    host = _host(parts)
    # A host of digits could be an address in a spelling that the checks above do not know.
    if _literal(host) is None and (_NUMERIC.fullmatch(host) or not _NAME.fullmatch(host)):
        raise UrlError(f"expected a host name or an address such as 127.0.0.1 or [::1], got {host!r}")
    return parts


def _host(parts: SplitResult) -> str:
    return (parts.hostname or "").rstrip(".")  # the dot of a fully qualified name


def _literal(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and any(address in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return address.is_global and not address.is_multicast


def _show_url(url: object) -> str:
    # The query may hold a secret.
    text = repr(url.split("?", 1)[0] if isinstance(url, str) else url)
    return shortened(text, 120)
