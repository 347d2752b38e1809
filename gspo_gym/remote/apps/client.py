"""Client of one task app. It retries no rollout; `remote/apps/episodes.py` does.

Requests go to the operator's base URL only: no redirects, no proxies of the environment. An answer is limited in size
as it comes in and in time until its last byte, and is read as `contracts.py` says. A key is in no error, log or repr.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError

from gspo_gym.base.http import HttpAnswer, HttpClient, retry_after_seconds
from gspo_gym.base.retries import Retries, RetrySettings, Sleep
from gspo_gym.base.settings import Settings
from gspo_gym.errors import ConfigError, GymError
from gspo_gym.remote.apps.contracts import (
    AppAnswerError,
    AppAttemptError,
    AppError,
    AppInfo,
    AppRefusedError,
    AppTimeoutError,
    AppUnauthorisedError,
    OutcomeResponse,
    RolloutRequest,
    TaskInfo,
    read_info,
    read_response,
)
from gspo_gym.remote.apps.rewards import AppRollout, read_rollout
from gspo_gym.remote.apps.urls import operator_url

Record = TypeVar("Record")

_SEEDS_PER_CALL = 50  # a URL has an end, too
_CONNECT_SECONDS = 10.0


class TaskAppSettings(Settings):
    """Timeouts, sizes and retries of an app's requests."""

    request_timeout_seconds: float = Field(default=30.0, gt=0, description="for any answer but a rollout's")
    rollout_timeout_seconds: float = Field(default=600.0, gt=0, description="for a rollout, its last byte included")
    max_answer_bytes: int = Field(default=32_000_000, gt=0, description="of one answer; a longer one is refused")
    max_attempts: int = Field(default=3, gt=0, description="of a request that may be repeated; a rollout is not")
    max_connections: int = Field(default=256, gt=0, description="to the app at once")


class TaskAppClient:
    """Client of one app: `async with TaskAppClient(url) as app:`, or close it; use it within one event loop.

    Args:
        url: base URL of the app, from the operator's configuration.
        settings: timeouts, sizes and retries; None: the defaults.
        keys: sent in all three headers that apps read; None: none are sent.
        retry_seed: of the jitter between attempts.
        sleep: replaces the clock between attempts.

    Raises:
        ConfigError: `url` is no base URL.
        MissingExtraError: the httpx package is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        settings: TaskAppSettings | None = None,
        keys: AppKeys | None = None,
        retry_seed: int = 0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.url = operator_url(url)
        self.settings = settings or TaskAppSettings()
        self._keys = keys or AppKeys(())
        retries = RetrySettings(max_attempts=self.settings.max_attempts)
        self._retries = Retries(retries, gives_up_with=AppError, seed=retry_seed, sleep=sleep)
        self._client = _AppHttp(self.url, self.settings, self._keys)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def health(self) -> None:
        """Check that the app is well, and accepts our key.

        Raises:
            AppUnauthorisedError: it does not accept it. AppError: it is not well, or not there.
        """
        # Some apps answer 200 and say so in the body.
        answer = await self._get("/health")
        if answer.get("healthy") is False:
            raise AppError(f"{self.url}/health: the app says that it is not healthy: {self._show_value(answer)}")

    async def info(self) -> AppInfo:
        """Return the app's description of itself, as far as it can be read.

        Raises:
            AppError: as `health`.
        """
        return read_info(await self._get("/info"))

    async def taskset(self) -> Mapping[str, Any]:
        """Return the app's description of the tasks: names, splits, sizes, a range of seeds.

        Raises:
            AppError: as `health`; AppAnswerError: there is none.
        """
        answer = await self._get("/task_info")
        document = answer.get("taskset")
        if not isinstance(document, dict):
            raise AppAnswerError(f"{self.url}/task_info: expected an object taskset, got {self._show_value(answer)}")
        return document

    async def task_info(self, seeds: Sequence[int]) -> tuple[TaskInfo, ...]:
        """Return the tasks of these seeds, in order.

        Raises:
            AppError: as `health`; AppAnswerError: not one task per seed, or not of the contract.
        """
        infos: list[TaskInfo] = []
        for start in range(0, len(seeds), _SEEDS_PER_CALL):
            call_seeds = seeds[start : start + _SEEDS_PER_CALL]
            path = "/task_info?" + "&".join(f"seed={int(seed)}" for seed in call_seeds)
            answer = await self._get_json(path)
            # Asked for one seed, apps answer with the task itself.
            task_items = [answer] if len(call_seeds) == 1 and isinstance(answer, dict) else answer
            if not isinstance(task_items, list) or len(task_items) != len(call_seeds):
                got_text = f"{len(task_items)} tasks" if isinstance(task_items, list) else self._show_value(answer)
                raise AppAnswerError(
                    f"{self.url}/task_info: expected one task for each of {len(call_seeds)} seeds, got {got_text}"
                )
            infos += [self._read(TaskInfo.model_validate, info, "/task_info") for info in task_items]
        return tuple(infos)

    async def done(self) -> None:
        """Tell the app that no more requests come. For apps that wait for it; others answer 404.

        Raises:
            AppError: as `health`.
        """
        await self._retries.run(lambda _: self._send("POST", "/done", {}, self.settings.request_timeout_seconds))

    async def rollout(self, request: RolloutRequest, *, timeout_seconds: float | None = None) -> AppRollout:
        """Let the app play one episode, by a single request that is never repeated: the app may have begun already.

        Args:
            request: what to play; `run_id` names this attempt only.
            timeout_seconds: until the answer's last byte; None: `rollout_timeout_seconds`.

        Raises:
            AppAttemptError: no connection, 429 or 5xx. A new attempt needs a new run id and a new inference URL.
            AppTimeoutError: no complete answer in time.
            AppUnauthorisedError, AppRefusedError: the app refuses.
            AppAnswerError: the answer is not of the contract, or is to another attempt.
        """
        body = request.model_dump(mode="json", exclude_none=True)
        seconds = self.settings.rollout_timeout_seconds if timeout_seconds is None else timeout_seconds
        answer = await self._send("POST", "/rollout", body, seconds)
        if not isinstance(answer, dict):
            raise AppAnswerError(f"{self.url}/rollout: expected a JSON object, got {self._show_value(answer)}")
        response = self._read(read_response, answer, "/rollout")
        if isinstance(response, OutcomeResponse):
            expected_id, answered_id = request.trace_correlation_id, response.trace_correlation_id
        else:
            expected_id, answered_id = request.run_id, response.run_id
        # A proxy or a cache may give the answer to an earlier attempt; its reward would be another episode's.
        if expected_id != answered_id:
            raise AppAnswerError(
                f"{self.url}/rollout: the answer is to another attempt, {answered_id!r:.80}, and is dropped (asked for "
                f"{request.run_id!r})"
            )
        return self._read(lambda valid_response: read_rollout(valid_response, request), response, "/rollout")

    async def _get(self, path: str) -> dict[str, Any]:
        answer = await self._get_json(path)
        if not isinstance(answer, dict):
            raise AppAnswerError(f"{self.url}{path}: expected a JSON object, got {self._show_value(answer)}")
        return answer

    async def _get_json(self, path: str) -> Any:
        return await self._retries.run(lambda _: self._send("GET", path, None, self.settings.request_timeout_seconds))

    # Any, here and below: JSON of unknown shape.
    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        answer = await self._client.request(method, path, body, timeout_seconds=seconds)
        try:
            value = await answer.json()
        except ValueError as error:
            # An error page need not be JSON.
            if answer.status < 300:
                text = f"{answer.where}: the answer is no JSON ({error}): {self._show_value(answer.text)}"
                raise AppAnswerError(text) from None
            value = answer.text
        if 200 <= answer.status < 300:
            return value
        raise self._status_error(answer, value)

    def _status_error(self, answer: HttpAnswer, value: Any) -> AppError:
        status, where = answer.status, answer.where
        code, message = error_of(value)
        if is_missing_key(status, code) or is_unauthorised(status, code):  # its body may hold keys: not repeated
            advice = self._keys.what_to_set(app_has_no_key=is_missing_key(status, code))
            return AppUnauthorisedError(f"{where}: HTTP {status}: not authorised: {advice}")
        text = f"{where}: HTTP {status}: {self._show_value(': '.join(filter(None, (code, message))) or value)}"
        if status == 429 or status >= 500:
            return AppAttemptError(text, kind=str(status), retry_after_seconds=retry_after_seconds(answer.headers))
        # Following one would send keys and prompts to another address.
        if 300 <= status < 400:
            text = f"{where}: HTTP {status}: redirects are not followed; give the URL that the app really has"
        return AppRefusedError(text)

    def _read(self, read: Callable[[Any], Record], value: Any, path: str) -> Record:
        try:
            return read(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "answer"
            raise AppAnswerError(
                f"{self.url}{path}: {place}: {first['msg']}, got {self._show_value(first['input'])} "
                f"({error.error_count()} problems in all)"
            ) from None

    def _show_value(self, value: Any) -> str:
        return self._client.shown(value if isinstance(value, str) else repr(value))


class _AppHttp(HttpClient):
    needs = "a task app needs: pip install 'gspo-gym[apps]'"

    def __init__(self, url: str, settings: TaskAppSettings, keys: AppKeys) -> None:
        super().__init__(
            url,
            timeout_seconds=settings.request_timeout_seconds,
            headers=keys.headers(),
            max_connections=settings.max_connections,
            max_connect_seconds=_CONNECT_SECONDS,
            max_answer_bytes=settings.max_answer_bytes,
            accepts_compression=False,
        )
        self._keys = keys

    def failure(self, message: str, *, kind: str) -> GymError:
        if kind == "connection":
            return AppAttemptError(message, kind=kind)
        return AppTimeoutError(message) if kind == "timeout" else AppAnswerError(message)

    def shown(self, text: str) -> str:
        return super().shown(self._keys.redacted(text))


KEY_VARIABLES = ("ENVIRONMENT_API_KEY", "DEV_ENVIRONMENT_API_KEY")  # the first that is set counts
ALIASES_VARIABLE = "ENVIRONMENT_API_KEY_ALIASES"  # more keys, parted by commas
_MIN_SHOWN_PREFIX = 4  # characters: shorter beginnings of a key are in any text


class AppKeys:
    """The keys for an app, all sent with every request; an app on loopback may need none.

    Args:
        keys: the first is the key, the others are its aliases.

    Raises:
        ConfigError: a key could not stand in a header.

    >>> AppKeys(["secret"])
    AppKeys(<1 key>)
    """

    def __init__(self, keys: tuple[str, ...] | list[str]) -> None:
        self._keys = tuple(dict.fromkeys(keys))
        # The number and not the key: the text goes into logs.
        for number, key in enumerate(self._keys):
            if not key or not all("!" <= c <= "~" and c != "," for c in key):
                raise ConfigError(
                    f"key {number + 1} of the task app: expected printable ASCII without spaces and commas, got "
                    f"{len(key)} characters of which some are not; look at {KEY_VARIABLES[0]} and {ALIASES_VARIABLE}"
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AppKeys:
        """Read the keys from the environment variables.

        Raises:
            ConfigError: a key could not stand in a header.

        >>> AppKeys.from_environment({"ENVIRONMENT_API_KEY": "a", "ENVIRONMENT_API_KEY_ALIASES": "b, c"})
        AppKeys(<3 keys>)
        """
        first = next((environ[name].strip() for name in KEY_VARIABLES if environ.get(name, "").strip()), "")
        aliases = (alias.strip() for alias in environ.get(ALIASES_VARIABLE, "").split(","))
        return cls([key for key in (first, *aliases) if key])

    def __repr__(self) -> str:
        return f"AppKeys(<{len(self)} key{'' if len(self) == 1 else 's'}>)"

    def __len__(self) -> int:
        return len(self._keys)

    def headers(self) -> dict[str, str]:
        """Return the three headers in which apps look for a key."""
        if not self._keys:
            return {}
        first = self._keys[0]
        return {"x-api-key": first, "x-api-keys": ",".join(self._keys), "authorization": f"Bearer {first}"}

    def redacted(self, text: str) -> str:
        """Return the text without our keys and their beginnings, which some apps write into their answers."""
        for key in self._keys:
            # The longest first, or a beginning would hide that there is more of it.
            for length in range(len(key), _MIN_SHOWN_PREFIX - 1, -1):
                text = text.replace(key[:length], "***")
        return text

    def what_to_set(self, *, app_has_no_key: bool) -> str:
        """Say what to do about an app that refuses our calls."""
        name = KEY_VARIABLES[0]
        if app_has_no_key:
            return f"the app was started without a key; set {name} where the app runs, and to the same here"
        if not self._keys:
            return f"it wants a key and none was sent; set {name} here to the app's key"
        return f"it does not take the key that was sent; set {name} here to the app's key"


def is_missing_key(status: int, code: str) -> bool:
    """Return whether an app says that it was started without a key."""
    return status == 503 and code == "missing_environment_api_key"


def is_unauthorised(status: int, code: str) -> bool:
    """Return whether an app says, in any of the known ways, that it does not accept our key.

    >>> is_unauthorised(400, "unauthorised"), is_unauthorised(400, "bad_seed"), is_unauthorised(401, "")
    (True, False, True)
    """
    return status in (401, 403) or (status == 400 and code in ("unauthorised", "unauthorized"))


def error_of(answer: Any) -> tuple[str, str]:
    """Return the code and the message of an error answer; "" if missing.

    >>> error_of({"detail": {"error": {"code": "unknown_env", "message": "no crafter"}}})
    ('unknown_env', 'no crafter')
    >>> error_of({"detail": [{"loc": ["body", "mode"], "msg": "Field required"}]})
    ('', 'body.mode: Field required')
    """
    detail = answer.get("detail", answer) if isinstance(answer, dict) else answer
    if isinstance(detail, dict):
        error = detail.get("error", detail)
        if isinstance(error, dict):
            code, message = error.get("code"), error.get("message")
            # Validation errors of FastAPI.
            return (code if isinstance(code, str) else "", message if isinstance(message, str) else "")
        return "", error if isinstance(error, str) else ""
    if isinstance(detail, list):
        rows = [row for row in detail if isinstance(row, dict)]
        return "", "; ".join(f"{'.'.join(map(str, row.get('loc') or ()))}: {row.get('msg')}" for row in rows)
    return "", detail if isinstance(detail, str) else ""
