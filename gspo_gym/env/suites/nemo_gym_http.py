"""One session of a NeMo-Gym server: an HTTP client with the session's cookies.

A NeMo-Gym server takes a request without its cookie for a new session, and answers 200 with a plausible losing reward.
So each request is checked to carry the cookie, and each answer to be of the same session. Proxies of the environment
are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_gym.base.http import HttpAnswer, HttpClient
from gspo_gym.env.suites.nemo_gym_wire import session_of
from gspo_gym.errors import ContractError, EnvError, EnvTimeoutError, GymError

_SHOWN = 300  # characters of a body in an error
_RETRIED_STATUS = (502, 503, 504)
_MAX_TRIES = 3  # for a request that may be repeated


class ServerSession:
    """Cookies and connection of one episode.

    Args:
        url: of the server.
        timeout_seconds: limit of one answer; the session is given up after it.

    Raises:
        MissingExtraError: the httpx package is not installed.
    """

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url
        self._timeout = timeout_seconds
        self._client: HttpClient | None = _NemoHttp(url, timeout_seconds=timeout_seconds, headers={})
        self._cookie = ""  # name of the cookie; "" before the session begins
        self._session = ""

    async def begin(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send the first request, which must start a session, and return its answer.

        Raises:
            ContractError: it sets no cookie, or more than one; and as `post`.
        """
        answer = await _read_json(await self._send(path, body), self._where(path))
        jar = self._jar()
        if len(jar) != 1:
            raise ContractError(f"{self._where(path)}: expected one session cookie, got {sorted(jar) or 'none'}")
        ((self._cookie, value),) = jar.items()
        self._session = session_of(value)
        return answer

    async def post(self, path: str, body: Mapping[str, Any], *, may_repeat: bool = False) -> dict[str, Any]:
        """Return the JSON answer to a request in this session.

        Args:
            path, body: of the request.
            may_repeat: the server recognises a repeated request, so one without an answer is sent again.

        Raises:
            EnvError: the session is lost, or the server fails.
            EnvTimeoutError: no answer in time.
            ContractError: the request is refused (4xx), or the answer is no JSON object.
        """
        for attempt in range(_MAX_TRIES):
            is_last = not may_repeat or attempt == _MAX_TRIES - 1
            try:
                response = await self._send_in_session(path, body)
            except EnvTimeoutError:
                raise
            except EnvError:
                if is_last or self._client is None:
                    raise
                continue
            if is_last or response.status not in _RETRIED_STATUS:
                return await _read_json(response, self._where(path))
        raise AssertionError("the last try returns or raises")

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's answer as text; a refusal of the arguments (400, 422) is text for the model.

        Raises:
            as `post`.
        """
        path = f"/{name}"
        response = await self._send_in_session(path, arguments)
        if response.status in (400, 422):
            return f"error: {response.text}"
        _require_ok(response, self._where(path))
        return response.text

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _send_in_session(self, path: str, body: Mapping[str, Any]) -> HttpAnswer:
        """Send with the session's cookie, and check that the answer is of the same session."""
        if self._client is None:
            raise EnvError(f"{self._where(path)}: the session is closed")
        self._require_session(path, "before the request")
        response = await self._send(path, body)
        if response.status < 500:  # the 502 of a proxy sets no cookie, and loses none
            self._require_session(path, "after the answer")
        return response

    def _require_session(self, path: str, when: str) -> None:
        value = self._jar().get(self._cookie)
        if value is None:
            raise EnvError(
                f"{self._where(path)}: no session cookie {when}; without it the server would play another episode and "
                "answer as if nothing had happened"
            )
        if session_of(value) != self._session:
            raise EnvError(f"{self._where(path)}: another session {when}: the server has lost this one")

    def _jar(self) -> dict[str, str]:
        return {} if self._client is None else dict(self._client.cookies)

    async def _send(self, path: str, body: Mapping[str, Any]) -> HttpAnswer:
        assert self._client is not None
        try:
            return await self._client.request("POST", path, body)
        except EnvTimeoutError as error:
            await self.close()  # the server may still be working, so its state is unknown
            raise EnvTimeoutError(f"{self._where(path)}: no answer within {self._timeout:g} seconds") from error

    def _where(self, path: str) -> str:
        return f"{self.url}{path}"


class _NemoHttp(HttpClient):
    needs = "NeMoGym needs: pip install 'gspo-gym[envs-nemo-gym]'"

    def failure(self, message: str, *, kind: str) -> GymError:
        """Return an EnvError."""
        return EnvTimeoutError(message) if kind == "timeout" else EnvError(message)


async def _read_json(response: HttpAnswer, where: str) -> dict[str, Any]:
    _require_ok(response, where)
    try:
        answer = await response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ContractError(f"{where}: expected a JSON object, got {response.text[:_SHOWN]!r}")
    return answer


def _require_ok(response: HttpAnswer, where: str) -> None:
    if response.status == 200:
        return
    text = f"{where}: status {response.status}: {response.text[:_SHOWN]}"
    raise ContractError(text) if 400 <= response.status < 500 else EnvError(text)
