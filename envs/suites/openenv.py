"""`OpenEnvEnv`: environments that a server plays over OpenEnv's WebSocket (checked against openenv 0.10).

An episode is one socket, which is one session of the server, reset exactly once. OpenEnv's HTTP /reset and /step are
not used, because each answers from a fresh environment. OpenEnv has `done` and no `truncated`, so every end is
*terminated*, except where our own server says more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymnasium.error import ResetNeeded

from gspo_gym.base.settings import read_key
from gspo_gym.env.blame import failure_of
from gspo_gym.env.core import TextEnv
from gspo_gym.env.data.rows import next_seed
from gspo_gym.errors import ContractError, EnvError
from gspo_gym.seeding import generator
from gspo_gym.types import Message, ToolCall

from .openenv_socket import (
    EXTENSION,
    FactsCache,
    Socket,
    extension_of,
    http_url_of,
    is_done,
    observation_of,
    reward_of,
    takes_text,
    text_field_of,
    tool_result_of,
)

# Module state: the facts of a server are the same for every environment made of it meanwhile.
_FACTS = FactsCache()
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 2.0  # between tries to get a session
_MAX_ERRORS = 3  # failed steps in a row that mean a broken server, not a bad action
_RECOVERABLE = ("EXECUTION_ERROR", "VALIDATION_ERROR")  # at a step; the session survives both

Frame = Mapping[str, Any]  # JSON


class OpenEnvEnv(TextEnv):
    """An environment behind an OpenEnv server.

    If the server's actions are tool calls, its tools are offered to the model and each call is a step of the server;
    the rewards of a turn add up. Otherwise the model's text is one field of the action.

    An action that the server finds invalid (VALIDATION_ERROR) is answered with the reasons and earns 0, as by
    `TextEnv.invalid_action`. An action that it failed to execute (EXECUTION_ERROR, by which OpenEnv environments refuse
    illegal moves) is answered with the server's text, unscored; the third in a row is an EnvError. All other errors,
    and a lost socket, are EnvErrors: the episode is played again.

    Args:
        url: of the server: ws://127.0.0.1:8000, or with http, https, wss.
        text_field: field of the action for the model's text; None takes the only required one. A field that is not text
            is read as JSON ("3" is 3).
        action_fields: further fields of every action, with their values.
        observation_fields: fields of the observation to show; () shows its only text field, or all as JSON.
        reset_options: passed to every reset beside the seed. A server ignores what its environment does not take, even
            the seed, which `gspo-gym env check` reports.
        api_key_env: environment variable with the key, sent as "Authorization: Bearer KEY"; None sends none.
        connect_timeout_seconds, message_timeout_seconds: limits to connect and for one answer.
        capacity_timeout_seconds: how long a reset waits for a place in a full server. Keep it below the rollout's
            `step_timeout_seconds`, which ends the wait otherwise.
        max_message_bytes: limit of an answer.
        reward_range: smallest and largest return, if known, which the server does not tell. Text that cannot be read
            costs the smallest; with None nothing.

    Raises:
        ConfigError: the URL is malformed, or the fields do not fit the server's action.
        EnvError, EnvTimeoutError, ContractError: the server does not describe itself.
        MissingExtraError: websockets or httpx is not installed.
    """

    isolation = "thread"  # async throughout, so it runs in the event loop

    def __init__(
        self,
        *,
        url: str,
        text_field: str | None = None,
        action_fields: Mapping[str, Any] | None = None,
        observation_fields: Sequence[str] = (),
        reset_options: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        connect_timeout_seconds: float = 10.0,
        message_timeout_seconds: float = 60.0,
        capacity_timeout_seconds: float = 30.0,
        max_message_bytes: int = 16_000_000,
        reward_range: Sequence[float] | None = None,
    ) -> None:
        if reward_range is not None:
            self.reward_range = (float(reward_range[0]), float(reward_range[1]))
        self._http_url = http_url_of(url)
        self._headers = _authorization(api_key_env)
        self._timeouts = (connect_timeout_seconds, message_timeout_seconds)
        self._capacity_timeout = capacity_timeout_seconds
        self._max_message_bytes = max_message_bytes
        self._reset_options = dict(reset_options or {})
        self._action_fields = dict(action_fields or {})
        self._observation_fields = (observation_fields,) if isinstance(observation_fields, str) else observation_fields
        self._facts = _FACTS.of(self._http_url, headers=self._headers, timeout_seconds=connect_timeout_seconds)
        self.takes_messages = bool(self._facts.tool_schemas)
        self._text_field = ""
        if not self.takes_messages:
            schema = self._facts.action_schema
            self._text_field = text_field_of(schema, named=text_field, fixed=self._action_fields, where=self._http_url)
        self._socket: Socket | None = None
        self._is_playing = False
        self._num_errors = 0  # in a row

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return the server's tools."""
        return self._facts.tool_schemas

    async def reset(  # type: ignore[override]  # async, as TextEnv allows
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Open a session and reset it with the seed, or one drawn by `splits.next_seed`."""
        super().reset(seed=seed)
        await self.close()
        seed = next_seed(self.np_random) if seed is None else seed
        data = await self._begin({**self._reset_options, **(options or {}), "seed": seed}, seed)
        if is_done(data, where=self._http_url):
            raise ContractError(f"{self._http_url}: expected an episode to play, its reset says that it is done")
        self._is_playing, self._num_errors = True, 0
        return self._observation(data), {"metadata": data.get("metadata")}

    async def step(self, action: Message | str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """Play one turn: one step of the server, or one for each tool call."""
        if not self._is_playing:
            raise ResetNeeded("OpenEnvEnv.step: no episode is being played; call reset first")
        self._is_playing = False  # until this turn is answered in full: a failed turn ends the episode
        if isinstance(action, str):
            answer = await self._step_text(action)
        elif self._facts.takes_whole_turns:
            answer = await self._step_whole_turn(action)
        elif action.tool_calls:
            answer = await self._step_calls(action.tool_calls)
        else:
            names = ", ".join(schema["function"]["name"] for schema in self.tool_schemas)
            answer = f"Call a tool. Tools: {names}.", 0.0, False, False, {}
        self._is_playing = not (answer[2] or answer[3])
        return answer

    async def close(self) -> None:  # type: ignore[override]
        """End the session."""
        socket, self._socket, self._is_playing = self._socket, None, False
        if socket is not None:
            await socket.close()

    async def _begin(self, given: Mapping[str, Any], seed: int) -> Frame:
        """Return the answer to reset in a new session; wait while the server is full."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._capacity_timeout
        for attempt in itertools.count():
            self._socket = Socket(
                self._http_url.replace("http", "ws", 1) + "/ws",
                headers=self._headers,
                connect_timeout_seconds=self._timeouts[0],
                message_timeout_seconds=self._timeouts[1],
                max_message_bytes=self._max_message_bytes,
            )
            with self._forgetting_what_is_lost():
                await self._socket.open()
                port = self._socket.local_port
                reply = await self._socket.exchange({"type": "reset", "data": given})
            if _code(reply) != "CAPACITY_REACHED":
                return self._data(reply, "reset")
            await self.close()
            wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**attempt)
            # All episodes of a group share a seed; the port spreads their retries.
            wait *= generator(seed, "capacity", port, attempt).uniform(0.5, 1.5)
            if loop.time() + wait > deadline:
                raise EnvError(
                    f"{self._http_url}: at capacity for {self._capacity_timeout:g} seconds ({_said(reply)}); let it "
                    "serve more sessions (max_concurrent_envs), or roll fewer episodes out at once"
                )
            await asyncio.sleep(wait)
        raise AssertionError("counting does not end")

    async def _step_text(self, text: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        value: Any = text
        if not takes_text(self._facts.action_schema, self._text_field):
            try:
                value = json.loads(text)
            except ValueError:
                return f"expected {self._text_field} as JSON, such as 3", 0.0, False, False, {}
        return await self._step_once({**self._action_fields, self._text_field: value})

    async def _step_whole_turn(self, message: Message) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        calls = [{"id": call.id, "name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
        return await self._step_once({"message": message.content, "tool_calls": calls})

    async def _step_once(self, action: Mapping[str, Any]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        reply = await self._exchange(action)
        if (error := self._recoverable(reply)) is not None:
            return error, _reward_of_error(reply), False, False, {}
        data = self._data(reply, "step")
        details = extension_of(data) or {}
        done = is_done(data, where=self._http_url)
        truncated = done and bool(details.get("truncated", False))
        terminated = done and bool(details.get("terminated", True))
        reward = reward_of(data, where=self._http_url)
        return self._observation(data), reward, terminated, truncated, {"metadata": data.get("metadata")}

    async def _step_calls(self, calls: Sequence[ToolCall]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Make a step of the server for each call; calls after the end of the episode are answered but not made."""
        messages: list[Message] = []
        rewards: list[float] = []
        done = False
        for call in calls:
            if done:
                text = "error: the episode is over, this call was not made"
            else:
                text, reward, done = await self._call(call)
                rewards += [] if reward is None else [reward]
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
        return messages, sum(rewards) if rewards else None, done, False, {}

    async def _call(self, call: ToolCall) -> tuple[str, float | None, bool]:
        action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        reply = await self._exchange({**self._action_fields, **action})
        if (error := self._recoverable(reply)) is not None:
            return f"error: {error}", _reward_of_error(reply), False
        data = self._data(reply, "step")
        observation = data.get("observation")
        error = observation.get("error") if isinstance(observation, Mapping) else None
        if isinstance(error, Mapping) and error.get("error_type") == "transport_error":
            raise EnvError(f"{self._http_url}: {call.name}: the server could not reach its tool: {error}")
        reward, done = reward_of(data, where=self._http_url), is_done(data, where=self._http_url)
        return tool_result_of(data, where=self._http_url), reward, done

    async def _exchange(self, action: Mapping[str, Any]) -> Frame:
        if self._socket is None:
            raise EnvError(f"{self._http_url}: the session is closed")
        with self._forgetting_what_is_lost():
            return await self._socket.exchange({"type": "step", "data": action})

    @contextlib.contextmanager
    def _forgetting_what_is_lost(self) -> Iterator[None]:
        try:
            yield
        except EnvError:
            _FACTS.forget(self._http_url)  # the server may come back with another environment
            raise

    def _recoverable(self, reply: Frame) -> str | None:
        """Return the text for the model of an error that the session survives, else None."""
        code = _code(reply)
        if code not in _RECOVERABLE:
            self._num_errors = 0
            return None
        if code == "EXECUTION_ERROR":
            self._num_errors += 1
            if self._num_errors >= _MAX_ERRORS:
                raise EnvError(f"{self._http_url}: {self._num_errors} steps in a row were not executed: {_said(reply)}")
        return _said(reply)

    def _data(self, reply: Frame, asked: str) -> Frame:
        # An error of our own server has the class that says whether the action exceeded a limit (`env/blame.py`).
        code = _code(reply)
        if code in ("INVALID_JSON", "UNKNOWN_TYPE"):
            raise ContractError(f"{self._http_url}: {asked}: it does not speak OpenEnv's protocol: {_said(reply)}")
        if code is not None:
            _FACTS.forget(self._http_url)  # it may have been restarted with another environment
            raise _failure_in(reply)(f"{self._http_url}: {asked}: {code}: {_said(reply)}")
        data = reply.get("data")
        if reply["type"] != "observation" or not isinstance(data, Mapping):
            raise ContractError(f"{self._http_url}: {asked}: expected an observation, got {dict(reply)!r:.200}")
        return data

    def _observation(self, data: Frame) -> Any:
        return observation_of(data, fields=self._observation_fields, where=self._http_url)


def _code(reply: Frame) -> str | None:  # None for what is no error
    if reply["type"] != "error":
        return None
    data = reply.get("data")
    return str(data.get("code", "(no code)")) if isinstance(data, Mapping) else "(no code)"


def _said(reply: Frame) -> str:  # with pydantic's reasons from the server
    data = reply.get("data")
    if not isinstance(data, Mapping):
        return str(data)
    reasons = [
        f"{'.'.join(map(str, reason.get('loc', ())))}: {reason.get('msg', '')}"
        for reason in data.get("errors") or ()
        if isinstance(reason, Mapping)
    ]
    return "; ".join([str(data.get("message", "")), *reasons])


def _failure_in(reply: Frame) -> type[EnvError]:
    data = reply.get("data")
    details = data.get(EXTENSION) if isinstance(data, Mapping) else None
    return failure_of(details.get("failure") if isinstance(details, Mapping) else None)


def _reward_of_error(reply: Frame) -> float | None:
    return 0.0 if _code(reply) == "VALIDATION_ERROR" else None


def _authorization(api_key_env: str | None) -> dict[str, str]:
    key = read_key(api_key_env, "OpenEnv: api_key_env")
    return {} if key is None else {"Authorization": f"Bearer {key}"}
