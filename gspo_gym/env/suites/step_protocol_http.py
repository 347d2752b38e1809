"""The HTTP side of `step_protocol.py`: requests that may be sent again, and what a server's refusals mean.

Everything but "at capacity" that a server refuses is an error of the episode: the server knows better than we whether
it can go on. Proxies of the environment are not used, and no redirects followed: a key would go with them.
"""

from __future__ import annotations

import functools
import json
import ssl
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gspo_gym.base.keys import read_key
from gspo_gym.base.retries import AttemptError, Retries, RetrySettings
from gspo_gym.env.blame import failure_of
from gspo_gym.errors import ConfigError, ContractError, EnvError, EnvTimeoutError, MissingExtraError

if TYPE_CHECKING:
    import httpx

_SHOWN = 300  # characters of a body that an error repeats
_AGAIN_STATUS = (502, 503, 504)  # a proxy's; our server says "at_capacity" with its 503


class AtCapacityError(EnvError):
    """The server has no place for another session now."""


class StepServer:
    """One environment of one server.

    Args:
        url: of the server. name: of the environment there.
        api_key_env: the environment variable with its key; None sends none.
        timeout_seconds: for one answer. max_attempts: of one request.

    Raises:
        ConfigError: the URL, or the key is not set.
        MissingExtraError: the httpx package is not installed.
    """

    def __init__(
        self, url: str, name: str, *, api_key_env: str | None, timeout_seconds: float, max_attempts: int
    ) -> None:
        if not url.startswith(("http://", "https://")) or "?" in url or "#" in url:
            raise ConfigError(f"StepProtocol: expected url such as http://127.0.0.1:8000, got {url!r:.{_SHOWN}}")
        if not name or not set(name) <= _NAME_CHARACTERS:
            raise ConfigError(f"StepProtocol: expected name such as GuessNumber, got {name!r:.{_SHOWN}}")
        try:
            import httpx  # noqa: F401  # it is missed here, and not in the first episode
        except ImportError as error:
            raise MissingExtraError("StepProtocol needs: pip install 'gspo-gym[envs-step-protocol]'") from error
        self.base_url = f"{url.rstrip('/')}/env/{name}"
        self.timeout_seconds = timeout_seconds
        self._headers = _authorization(api_key_env)
        self._retries = Retries(RetrySettings(max_attempts=max_attempts), gives_up_with=EnvError)
        self._client: httpx.AsyncClient | None = None  # made in the event loop that uses it

    def where(self, path: str) -> str:
        """For errors."""
        return f"{self.base_url}/{path}"

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that a request is answered with (Any: JSON); it is sent again if its answer is lost.

        Raises:
            AtCapacityError: the server is full.
            EnvError: the server fails, refuses, or has lost the session. EnvTimeoutError: no answer in time.
            ContractError: the answer is no JSON object.
        """
        try:
            response = await self._retries.run(lambda _: self._send(path, body))
        except EnvError as error:
            if isinstance(error.__cause__, AttemptError) and error.__cause__.kind == "timeout":
                raise EnvTimeoutError(str(error)) from error
            raise
        return read_answer(response, self.where(path))

    async def close(self) -> None:
        """Give the connection back; the next request opens another."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def tools(self, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """The tools of the environment with that config, as OpenAI function schemas; blocks.

        Raises:
            EnvError, EnvTimeoutError, ContractError: the server cannot be reached, refuses, or says something else.
        """
        import httpx

        where = self.where("describe")
        try:
            with httpx.Client(**self._client_settings()) as client:
                answer = read_answer(client.post(where, json={"config": dict(config)}), where)
        except httpx.TimeoutException as error:
            raise EnvTimeoutError(f"{where}: no answer within {self.timeout_seconds:g} seconds") from error
        except httpx.HTTPError as error:
            raise EnvError(f"{where}: {type(error).__name__}: {error}") from error
        schemas = answer.get("tool_schemas")
        if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
            raise ContractError(f"{where}: expected tool_schemas as a list of objects, got {schemas!r:.{_SHOWN}}")
        return tuple(schemas)

    async def _send(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        import httpx

        where = self.where(path)
        if self._client is None:
            self._client = httpx.AsyncClient(**self._client_settings())
        try:
            response = await self._client.post(where, json=body)
        except httpx.TimeoutException as error:
            text = f"{where}: no answer within {self.timeout_seconds:g} seconds"
            raise AttemptError(text, kind="timeout") from error
        except httpx.HTTPError as error:
            raise AttemptError(f"{where}: {type(error).__name__}: {error}", kind="connection") from error
        if response.status_code in _AGAIN_STATUS and error_code(response) != "at_capacity":
            raise AttemptError(f"{where}: status {response.status_code}", kind=str(response.status_code))
        return response

    def _client_settings(self) -> dict[str, Any]:  # Any: arguments of httpx
        is_tls = self.base_url.startswith("https:")
        return {
            "headers": self._headers,
            "timeout": self.timeout_seconds,
            "trust_env": False,
            "follow_redirects": False,
            "verify": _tls() if is_tls else False,  # False: nothing is verified because nothing is TLS
        }


class ToolsCache:
    """What servers say of their environments, asked once for each."""

    def __init__(self) -> None:
        self._tools: dict[str, tuple[Mapping[str, Any], ...]] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def of(self, server: StepServer, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """The tools; blocks while they are asked for.

        Raises:
            as `StepServer.tools`.
        """
        key = json.dumps([server.base_url, dict(config)], sort_keys=True)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # a group's episodes begin together: one asks
            if key not in self._tools:
                self._tools[key] = server.tools(config)
            return self._tools[key]


def read_answer(response: Any, where: str) -> dict[str, Any]:  # Any: httpx is imported where it is used; JSON
    """A JSON object that was answered with 200.

    Raises:
        AtCapacityError: the server is full. ActionLimitError, EnvDiedError: so the environment there ended.
        EnvError: it refuses or fails. ContractError: no JSON object.
    """
    if response.status_code != 200:
        text = f"{where}: status {response.status_code}: {response.text[:_SHOWN]}"
        code = error_code(response) or ""
        raise AtCapacityError(f"{where}: at capacity") if code == "at_capacity" else failure_of(code)(text)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ContractError(f"{where}: expected a JSON object, got {response.text[:_SHOWN]!r}")
    return answer


def error_code(response: Any) -> str | None:
    """The code in {"detail": {"error": {"code": ...}}}; None without one (Any: a response of httpx)."""
    try:
        code = response.json()["detail"]["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, str) else None


_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:")


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all episodes: reading the certificates takes longer than a short episode does."""
    return ssl.create_default_context()


def _authorization(api_key_env: str | None) -> dict[str, str]:
    key = read_key(api_key_env, "StepProtocol: api_key_env")
    return {} if key is None else {"X-API-Key": key}
