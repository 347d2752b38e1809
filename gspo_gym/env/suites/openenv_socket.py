"""One WebSocket to an OpenEnv server, which is one session of it; and what a server says over HTTP before that.

A socket that is lost is lost: nothing here connects again. Proxies of the environment are not used. Called by
`openenv.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gspo_gym.env.suites.openenv_reading import ServerFacts, tool_schemas_of
from gspo_gym.errors import ConfigError, ContractError, EnvError, EnvTimeoutError, MissingExtraError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_SHOWN = 200  # characters of a wrong answer that an error repeats
_CLOSE_SECONDS = 2.0  # for the goodbye


class Socket:
    """A connection that answers one message with one message.

    Whatever keeps an answer from being read (the deadline, a cancellation, the other side) drops the connection, so
    that a late answer is never taken for the next one.

    Args:
        url: of the server's WebSocket.
        headers: sent when it is opened.
        connect_timeout_seconds, message_timeout_seconds: to open it; for one answer.
        max_message_bytes: longer ones are refused.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        connect_timeout_seconds: float,
        message_timeout_seconds: float,
        max_message_bytes: int,
    ) -> None:
        self._url, self._headers = url, headers
        self._connect_timeout, self._message_timeout = connect_timeout_seconds, message_timeout_seconds
        self._max_message_bytes = max_message_bytes
        self._connection: ClientConnection | None = None

    @property
    def local_port(self) -> int:
        """Ours, which no other open connection to this server has."""
        return int(self._connection.local_address[1]) if self._connection is not None else 0

    async def open(self) -> None:
        """Connect.

        Raises:
            MissingExtraError: the websockets package is not installed.
            EnvError, EnvTimeoutError: the server cannot be reached, refuses, or does not answer in time.
        """
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import WebSocketException
        except ImportError as error:
            raise MissingExtraError("OpenEnv needs: pip install 'gspo-gym[envs-openenv]'") from error
        try:
            self._connection = await connect(
                self._url,
                additional_headers=dict(self._headers),
                open_timeout=self._connect_timeout,
                close_timeout=_CLOSE_SECONDS,
                max_size=self._max_message_bytes,
                proxy=None,
            )
        except TimeoutError as error:
            text = f"{self._url}: no connection within {self._connect_timeout:g} seconds"
            raise EnvTimeoutError(text) from error
        except (OSError, WebSocketException) as error:
            raise EnvError(f"{self._url}: cannot connect: {type(error).__name__}: {error}") from error

    async def exchange(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and read the answer (Any: JSON).

        Raises:
            EnvError: the session is lost. EnvTimeoutError: no answer in time.
            ContractError: the answer is no object with a type.
        """
        from websockets.exceptions import ConnectionClosed

        connection = self._connection
        if connection is None:
            raise EnvError(f"{self._url}: the session is lost; a new reset makes a new one")
        try:
            async with asyncio.timeout(self._message_timeout):
                with contextlib.suppress(ConnectionClosed):  # a full server says so and closes, and reads nothing
                    await connection.send(json.dumps(message))
                text = await connection.recv()
        except TimeoutError:
            self.drop()
            raise EnvTimeoutError(
                f"{self._url}: no answer to {message['type']} within {self._message_timeout:g} seconds"
            ) from None
        except ConnectionClosed as error:
            self.drop()
            raise EnvError(
                f"{self._url}: the session was lost at {message['type']} ({error}); an episode cannot go on in another"
            ) from error
        except BaseException:
            self.drop()
            raise
        return self._read(text)

    async def close(self) -> None:
        """Say goodbye, so that the server's place is free at once; a server that does not answer is left."""
        from websockets.exceptions import ConnectionClosed

        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            with contextlib.suppress(ConnectionClosed):
                await connection.send('{"type": "close"}')
            await connection.close()
        except BaseException:
            connection.transport.abort()
            raise

    def drop(self) -> None:
        """Cut the connection without a word."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.abort()

    def _read(self, text: str | bytes) -> Mapping[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("type"), str):
            self.drop()
            raise ContractError(f"{self._url}: expected a JSON object with a type, got {text!r:.{_SHOWN}}")
        return answer


def http_url_of(url: str) -> str:
    """The server's address for HTTP, without a slash at its end; that of its WebSocket will do, too.

    Raises:
        ConfigError: it is no URL of http, https, ws or wss.

    >>> http_url_of("ws://127.0.0.1:8000/ws"), http_url_of("https://host/env/")
    ('http://127.0.0.1:8000', 'https://host/env')
    """
    scheme, separator, rest = url.partition("://")
    schemes = {"ws": "http", "wss": "https", "http": "http", "https": "https"}
    rest = rest.rstrip("/").removesuffix("/ws")
    if not separator or scheme not in schemes or not rest:
        raise ConfigError(f"OpenEnv: expected url such as ws://127.0.0.1:8000 or https://host, got {url!r}")
    return f"{schemes[scheme]}://{rest}"


class FactsCache:
    """What servers say of their environments, asked once for each address."""

    def __init__(self) -> None:
        self._facts: dict[str, ServerFacts] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def of(self, http_url: str, *, headers: Mapping[str, str], timeout_seconds: float) -> ServerFacts:
        """The facts of a server; blocks while they are asked for.

        Raises:
            EnvError, EnvTimeoutError: the server cannot be reached or refuses.
            ContractError: its answer is no schema.
            MissingExtraError: the httpx package is not installed.
        """
        with self._lock:
            lock = self._locks.setdefault(http_url, threading.Lock())
        with lock:  # a group's episodes begin together: one asks
            if http_url not in self._facts:
                self._facts[http_url] = _ask(http_url, headers, timeout_seconds)
            return self._facts[http_url]

    def forget(self, http_url: str) -> None:
        """Ask again next time: the server may be another one now."""
        self._facts.pop(http_url, None)


def _ask(http_url: str, headers: Mapping[str, str], timeout_seconds: float) -> ServerFacts:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtraError("OpenEnv needs: pip install 'gspo-gym[envs-openenv]'") from error
    where = f"{http_url}/schema"
    try:
        with httpx.Client(trust_env=False, headers=dict(headers), timeout=timeout_seconds) as client:
            schema = _json(client.get(where), where)
            action, observation = schema.get("action"), schema.get("observation")
            if not isinstance(action, dict) or not isinstance(observation, dict):
                raise ContractError(
                    f"{where}: expected the schemas of action and observation, got {schema!r:.{_SHOWN}}"
                )
            facts = ServerFacts(action, observation)
            if not facts.may_take_tool_calls:
                return facts
            where = f"{http_url}/mcp"  # over HTTP, which takes no session's place
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            return ServerFacts(
                action, observation, tool_schemas_of(_json(client.post(where, json=request), where), where=where)
            )
    except httpx.TimeoutException as error:
        raise EnvTimeoutError(f"{where}: no answer within {timeout_seconds:g} seconds") from error
    except httpx.HTTPError as error:
        raise EnvError(f"{where}: {type(error).__name__}: {error}") from error


def _json(response: Any, where: str) -> dict[str, Any]:  # Any: httpx is imported where it is used
    if response.status_code != 200:
        raise EnvError(f"{where}: status {response.status_code}: {response.text[:_SHOWN]}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ContractError(f"{where}: expected a JSON object, got {response.text[:_SHOWN]!r}")
    return answer
