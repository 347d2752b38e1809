"""One JSON request to a vLLM server and what its failure means; used by `vllm_http` (data) and `vllm_control`.

Proxies and `.netrc` of the environment are not used and redirects not followed: prompts, weights and keys go where the
URL says and nowhere else. Nothing is tried twice here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gspo_gym.base.endpoint import retry_after_seconds
from gspo_gym.base.keys import is_loopback
from gspo_gym.engine.endpoint.wire import EngineAttemptError, RefusedError, shorten
from gspo_gym.errors import ConfigError, MissingExtraError

_UNIX = "unix:"
# Below the 5 seconds after which vLLM closes an idle connection, so that no request is sent into one that closes.
_KEEP_ALIVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is reached.

    Attributes:
        url: as it was given, without a slash at the end.
        base_url: what requests are sent to, over `uds` if that is not None.
        uds: path of a Unix socket.
        is_local: only programs of this machine can be behind it: loopback, or a Unix socket.
    """

    url: str
    base_url: str
    uds: str | None
    is_local: bool


def address_of(url: str) -> Address:
    """Read "http://host:port" or "unix:/absolute/path".

    Raises:
        ConfigError: it is neither.

    >>> address_of("http://127.0.0.1:8000/").is_local, address_of("http://node7:8000").is_local
    (True, False)
    >>> address_of("unix:/run/vllm.sock").uds
    '/run/vllm.sock'
    """
    if url.startswith(_UNIX):
        path = url.removeprefix(_UNIX)
        if not path.startswith("/"):
            raise ConfigError(f"vLLM server: expected unix:/absolute/path, got {url!r}")
        return Address(url=url, base_url="http://localhost", uds=path, is_local=True)
    parts = urlsplit(url)
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or parts.path not in ("", "/"):
        raise ConfigError(f"vLLM server: expected http://host:port or unix:/absolute/path, got {url!r}")
    base = url.rstrip("/")
    return Address(url=base, base_url=base, uds=None, is_local=is_loopback(parts.hostname))


class VllmClient:
    """Connections to one server. Use it within one event loop, and close it.

    Args:
        address: of the server.
        api_key: sent as the bearer's; it is in no error.
        timeout_seconds: for one request, the answer's last byte included.
        reuses_connections: keep them open between requests. One that the server closes meanwhile fails a request that
            was never read, which matters where nothing is tried twice.
        max_connections: at once; None is without limit.

    Raises:
        MissingExtraError: httpx is not installed.
    """

    def __init__(
        self,
        address: Address,
        *,
        api_key: str | None,
        timeout_seconds: float,
        reuses_connections: bool,
        max_connections: int | None = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError("an engine behind a vLLM server needs: pip install httpx") from error
        self.address = address
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=None if reuses_connections else 0,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
        )
        self._http = httpx.AsyncClient(
            base_url=address.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            transport=httpx.AsyncHTTPTransport(uds=address.uds, limits=limits, retries=0, trust_env=False),
            timeout=timeout_seconds,
            trust_env=False,
            follow_redirects=False,
        )

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        """The JSON at a path; see `post`."""
        return await self._send("GET", path, None, params, {})

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON that answers (Any: unknown shape); a text for an answer that is not JSON, None for an empty one.

        Cancelling it closes the connection, upon which vLLM gives the request up.

        Raises:
            EngineAttemptError: no connection, no complete answer in time, 429 or 5xx: another attempt may succeed.
            RefusedError: any other status that is not 2xx: another attempt would not.
        """
        return await self._send("POST", path, body, params, headers or {})

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
    ) -> Any:
        import httpx

        where = f"{self.address.url}{path}"
        try:
            # httpx's own timeout is for each read: a body that drips would never end.
            async with asyncio.timeout(self._timeout_seconds):
                answer = await self._http.request(method, path, json=body, params=params, headers=headers)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EngineAttemptError(
                f"{where}: no complete answer within {self._timeout_seconds:g} seconds", kind="timeout"
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise EngineAttemptError(
                f"{where}: connection failed ({type(error).__name__})", kind="connection"
            ) from error
        status = answer.status_code
        if status == 429 or status >= 500:
            raise EngineAttemptError(
                f"{where}: HTTP {status}: {self._readable(answer.text)}",
                kind=str(status),
                retry_after_seconds=retry_after_seconds(answer.headers),
            )
        if not answer.is_success:
            raise RefusedError(f"{where}: HTTP {status}: {self._readable(answer.text)}")
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError as error:
            if "json" in answer.headers.get("content-type", ""):
                raise EngineAttemptError(f"{where}: the answer is not complete JSON: {error}", kind="json") from error
            return answer.text

    def _readable(self, text: str) -> str:
        return shorten(text.replace(self._api_key, "***") if self._api_key else text, limit=300)
