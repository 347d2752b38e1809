"""The connection to an OpenEnv server (a WebSocket per session), its facts over HTTP, and readers of its answers.

A lost socket is not reconnected. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from gspo_gym_envs.suites.packages import missing_package

from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, ContractError, EnvError, EnvTimeoutError, nearest_name
from gspo_gym.types import is_finite

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_SHOWN = 200  # characters of a wrong answer in an error
_CLOSE_SECONDS = 2.0  # for the closing handshake


class Socket:
    """A connection that answers one message with one message; longer ones than `max_message_bytes` are refused."""

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
        """Return the local port, which no other open connection to this server has."""
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
            raise missing_package("OpenEnv", "websockets", extra="envs-openenv", error=error) from error
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
        """Send a message and return the answer.

        Raises:
            EnvError: the session is lost. EnvTimeoutError: no answer in time.
            ContractError: the answer is no object with a type.
        """
        from websockets.exceptions import ConnectionClosed

        connection = self._connection
        if connection is None:
            raise EnvError(f"{self._url}: the session is lost; a new reset makes a new one")
        # Any failure below drops the connection: a late answer must not be taken for the next one.
        try:
            async with asyncio.timeout(self._message_timeout):
                with contextlib.suppress(ConnectionClosed):  # a full server says so and closes without reading
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
        """Close the session, which frees the server's place at once; a server that does not answer is left."""
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
        """Cut the connection without a closing handshake."""
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
    """Return the server's HTTP address without a slash at its end; a WebSocket URL is accepted too.
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
    """The facts of servers, asked once for all environments of an address that are in use at the same time.

    An address may get another server later: the facts are forgotten with the last environment that has them.
    """

    def __init__(self) -> None:
        self._facts: WeakValueDictionary[str, ServerFacts] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def of(self, http_url: str, *, headers: Mapping[str, str], timeout_seconds: float) -> ServerFacts:
        """Return the facts of a server; blocks while it is asked.

        Raises:
            EnvError, EnvTimeoutError: the server cannot be reached or refuses.
            ContractError: its answer is no schema.
            MissingExtraError: the httpx package is not installed.
        """
        with self._lock:
            lock = self._locks.setdefault(http_url, threading.Lock())
        with lock:  # a group's episodes begin together; only the first asks
            facts = self._facts.get(http_url)
            if facts is None:
                facts = self._facts[http_url] = _ask(http_url, headers, timeout_seconds)
            return facts

    def forget(self, http_url: str) -> None:
        """Ask the server again next time."""
        self._facts.pop(http_url, None)


def _ask(http_url: str, headers: Mapping[str, str], timeout_seconds: float) -> ServerFacts:
    try:
        import httpx
    except ImportError as error:
        raise missing_package("OpenEnv", "httpx", extra="envs-openenv", error=error) from error
    where = f"{http_url}/schema"
    try:
        with httpx.Client(trust_env=False, headers=dict(headers), timeout=timeout_seconds) as client:
            schema = _json(client.get(where), where)
            action, observation = schema.get("action"), schema.get("observation")
            if not isinstance(action, dict) or not isinstance(observation, dict):
                raise ContractError(
                    f"{where}: expected the schemas of action and observation, got {schema!r:.{_SHOWN}}"
                )
            facts = ServerFacts(action)
            if not facts.may_take_tool_calls:
                return facts
            where = f"{http_url}/mcp"  # over HTTP, which takes no place of a session
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            tools = tool_schemas_of(_json(client.post(where, json=request), where), where=where)
            return ServerFacts(action, tools)
    except httpx.TimeoutException as error:
        raise EnvTimeoutError(f"{where}: no answer within {timeout_seconds:g} seconds") from error
    except httpx.HTTPError as error:
        raise EnvError(f"{where}: {type(error).__name__}: {error}") from error


def _json(response: Any, where: str) -> dict[str, Any]:
    if response.status_code != 200:
        raise EnvError(f"{where}: status {response.status_code}: {response.text[:_SHOWN]}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ContractError(f"{where}: expected a JSON object, got {response.text[:_SHOWN]!r}")
    return answer


# Key of an observation's metadata where our own server says what OpenEnv has no field for.
EXTENSION = "gspo_gym"
_BESIDE = ("metadata", "reward", "done")  # every OpenEnv observation may have them

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ServerFacts:
    """A server's description of its environment.

    Attributes:
        action_schema: JSON schema.
        tool_schemas: OpenAI function schemas; () if actions are not tool calls.
    """

    action_schema: JsonObject
    tool_schemas: tuple[JsonObject, ...] = ()

    @property
    def takes_whole_turns(self) -> bool:
        """Return whether one step takes a message with all its tool calls, as our own server does."""
        return {"message", "tool_calls"} <= _properties(self.action_schema).keys()

    @property
    def may_take_tool_calls(self) -> bool:
        """Return whether the action is OpenEnv's tool call, or its bare base class, which may accept calls too."""
        names = _properties(self.action_schema).keys()
        return {"tool_name", "arguments"} <= names or names <= {"metadata", "type"}


def text_field_of(schema: JsonObject, *, named: str | None, fixed: JsonObject, where: str) -> str:
    """Return the field of an action that takes the model's text.

    A ConfigError says that the choice is ambiguous, or leaves a required field without a value.

    Args:
        named: the user's choice; None takes the only required field if it is a string, or the only string if none is
            required.
        fixed: fields to which the user gave values.
    """
    fields = {name: field for name, field in _properties(schema).items() if name != "metadata"}
    for name in (*fixed, *([named] if named is not None else [])):
        if name not in fields:
            raise ConfigError(f"{where}: its action has no field {name!r}; {nearest_name(name, fields)}")
    required: list[str] = [name for name in schema.get("required", ()) if name not in fixed]
    if named is not None:
        missing = [name for name in required if name != named]
        if missing:
            raise ConfigError(f"{where}: its action also needs {missing}; give them in action_fields")
        return named
    candidates = required or [name for name, field in fields.items() if name not in fixed and _is_text(field)]
    if len(candidates) != 1 or not _is_text(fields[candidates[0]]):
        raise ConfigError(
            f"{where}: expected an action with one required text field, got {dict(fields)!r:.{_SHOWN}} of which "
            f"{required} are required; choose with text_field, and give the others in action_fields"
        )
    return candidates[0]


def takes_text(schema: JsonObject, field: str) -> bool:
    """Return whether a field of the action takes text; any other is read as JSON ("3" is 3)."""
    return _is_text(_properties(schema)[field])


def tool_schemas_of(answer: Any, *, where: str) -> tuple[JsonObject, ...]:
    """Return OpenAI function schemas from the answer to JSON-RPC's tools/list; () if the server has no tools."""
    if isinstance(answer, Mapping) and isinstance(answer.get("error"), Mapping):
        return ()  # "Environment does not support MCP"
    result = answer.get("result") if isinstance(answer, Mapping) else None
    tools = result.get("tools") if isinstance(result, Mapping) else None
    if not isinstance(tools, Sequence) or not all(
        isinstance(t, Mapping) and isinstance(t.get("name"), str) for t in tools
    ):
        raise ContractError(f"{where}: expected a list of tools with names, got {answer!r:.{_SHOWN}}")
    schemas = []
    for tool in tools:
        parameters = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return tuple(schemas)


def observation_of(data: JsonObject, *, fields: Sequence[str], where: str) -> Any:
    """Return the text for the model, or messages if the server is ours.

    The text has the named fields, each on its own lines; without names the observation's only field if that is text,
    else all of them as JSON.
    """
    observation = data.get("observation")
    if not isinstance(observation, Mapping):
        raise ContractError(f"{where}: expected an observation, got {data!r:.{_SHOWN}}")
    if extension_of(data) is not None and not fields:
        return observation.get("messages") or ""
    shown = {name: value for name, value in observation.items() if name not in _BESIDE}
    if fields:
        for name in fields:
            if name not in observation:
                raise ContractError(f"{where}: no field {name!r} in the observation; {nearest_name(name, shown)}")
        return "\n".join(_as_text(observation[name]) for name in fields)
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return _as_text(shown)


def tool_result_of(data: JsonObject, *, where: str) -> str:
    """Return a tool's answer as text (other parts are a ContractError); an error starts with "error: "."""
    observation = data.get("observation")
    if not isinstance(observation, Mapping):
        raise ContractError(f"{where}: expected an observation, got {data!r:.{_SHOWN}}")
    error = observation.get("error")
    if error:
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return _as_text(result) if "result" in observation else _as_text(observation)
    parts = [part for part in result["content"] if isinstance(part, Mapping)]
    strange = [part.get("type") for part in parts if part.get("type") != "text"]
    if strange:
        raise ContractError(
            f"{where}: expected a tool's result as text, got parts of type {strange}; images are not read"
        )
    text = "\n".join(str(part.get("text", "")) for part in parts)
    return f"error: {text}" if result.get("is_error") and not text.startswith("error: ") else text


def reward_of(data: JsonObject, *, where: str) -> float | None:
    """Return the reward, a finite number; None, which means "not scored here", for null."""
    reward = data.get("reward")
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not is_finite(reward):
        raise ContractError(f"{where}: expected a finite number or null as the reward, got {reward!r:.{_SHOWN}}")
    details = extension_of(data) or {}
    terms = details.get("reward_terms") or {}
    rich = Reward(terms, events=details.get("events") or (), success=details.get("success"))
    # Only OpenEnv's own number counts: terms with another sum would change the reward.
    return rich if float(rich) == float(reward) else float(reward)


def extension_of(data: JsonObject) -> JsonObject | None:
    """Return our own server's additions to OpenEnv's fields; None from any other server."""
    metadata = data.get("metadata")
    details = metadata.get(EXTENSION) if isinstance(metadata, Mapping) else None
    return details if isinstance(details, Mapping) else None


def is_done(data: JsonObject, *, where: str) -> bool:
    """Return whether the episode is over; a ContractError if `done` is no bool."""
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise ContractError(f"{where}: expected done as true or false, got {done!r:.{_SHOWN}}")
    return done


def _properties(schema: JsonObject) -> JsonObject:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _is_text(field: Any) -> bool:
    if not isinstance(field, Mapping):
        return False
    options = [field, *field.get("anyOf", ())]
    return any(isinstance(option, Mapping) and option.get("type") == "string" for option in options)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
