"""`NeMoGymEnv`: environments that a NeMo-Gym server plays over HTTP (checked against 0.4.0, which needs Python 3.12).

A *resources* server has tools and grades the conversation at its end: POST /seed_session, /{tool}, /verify. A
*gymnasium* server plays turns: POST /reset, /step, and /close if it has that. In both, a row of a data set is the task
and one cookie jar is one episode: a server takes a request without its cookie for a new session, and answers 200 with a
plausible losing reward. Each request is therefore checked to carry the cookie, and each answer to be of the same
session. Conversations have the form of OpenAI's Responses API. Proxies of the environment are not used.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gymnasium.error import ResetNeeded

from gspo_gym.base.http import HttpAnswer, HttpClient
from gspo_gym.env.core import TextEnv
from gspo_gym.env.data.rows import RowSource, is_held_out_seed, next_seed, read_rows
from gspo_gym.errors import ConfigError, ContractError, EnvError, EnvTimeoutError, GymError, nearest_name
from gspo_gym.types import Message, ToolCall, is_finite

Kind = Literal["resources", "gymnasium"]
Step = tuple[Any, float | None, bool, bool, dict[str, Any]]

_KINDS = ("resources", "gymnasium")
_PARAMS = "responses_create_params"
_SHOWN = 200  # characters of a wrong value in an error


class NeMoGymEnv(TextEnv):
    """An environment behind a NeMo-Gym server; the model answers with text or with the row's tools.

    kind "resources": tool calls are made on the server; a message without one is the answer, which ends the episode
    with the server's verdict as the reward. kind "gymnasium": each message is a step of the server, and rewards add up.

    The seed picks only the row: a server that draws at random (0.4.0's blackjack) plays another game each time, which
    `gspo-gym env check` reports. Without `held_out`, evaluation uses the training rows, and `info["is_held_out"]` is
    False.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        rows: tasks, as a file or in memory, each with `responses_create_params`. All must offer the same tools.
        held_out: the same, for seeds below 2**31; these rows are not trained on.
        kind: of the server.
        max_steps: for a resources server, turns without an answer until the conversation is graded as it is and the
            episode truncated. None leaves it to the rollout, and such an episode then has no reward.
        timeout_seconds: limit of one answer of the server.
        reward_range: smallest and largest return, if known, which the server does not tell. Text that cannot be read
            costs the smallest; with None nothing.

    Raises:
        ConfigError: an argument does not fit.
        ContractError: a row is malformed.
        MissingExtraError: httpx is not installed.
    """

    takes_messages = True
    isolation = "thread"  # async throughout, so it runs in the event loop

    def __init__(
        self,
        *,
        url: str,
        rows: RowSource,
        held_out: RowSource | None = None,
        kind: Kind = "resources",
        max_steps: int | None = None,
        timeout_seconds: float = 60.0,
        reward_range: Sequence[float] | None = None,
    ) -> None:
        if reward_range is not None:
            self.reward_range = (float(reward_range[0]), float(reward_range[1]))
        if kind not in _KINDS:
            raise ConfigError(f"NeMoGym: unknown kind {kind!r}; {nearest_name(kind, _KINDS)}")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"NeMoGym: expected url such as http://127.0.0.1:8000, got {url!r}")
        if max_steps is not None and (max_steps < 1 or kind != "resources"):
            raise ConfigError(f"NeMoGym: expected max_steps >= 1 and kind 'resources', got {max_steps} and {kind!r}")
        self._url, self._kind, self._max_steps, self._timeout = url.rstrip("/"), kind, max_steps, timeout_seconds
        self._held_out = None if held_out is None else _read(held_out)
        kept_out = [values for values, _ in self._held_out or ()]
        self._rows = [(values, where) for values, where in _read(rows) if values not in kept_out]
        self._tool_schemas = _common_tools(self._rows)
        if self._held_out is not None and _common_tools(self._held_out) != self._tool_schemas:
            raise ConfigError("NeMoGym: the tools of held_out are not those of rows; use one environment for each set")
        self._session: ServerSession | None = None  # None between episodes
        self._row: dict[str, Any] = {}
        self._said: list[Message] = []  # since the row's input
        self._num_turns = 0
        self._is_idempotent = self._has_close = False

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that all rows offer."""
        return self._tool_schemas

    async def reset(  # type: ignore[override]  # async, as TextEnv allows
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the row of the seed, or of one drawn by `splits.next_seed`, in a new session."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"NeMoGym.reset: expected no options, got {sorted(options)}")
        await self.close()
        seed = next_seed(self.np_random) if seed is None else seed
        rows = self._rows if self._held_out is None or not is_held_out_seed(seed) else self._held_out
        self._row, where = rows[seed % len(rows)]
        messages = list(messages_of(self._row[_PARAMS], where=where))
        self._said, self._num_turns = [], 0
        session = ServerSession(self._url, timeout_seconds=self._timeout)
        try:
            answer = await session.begin("/reset" if self._kind == "gymnasium" else "/seed_session", self._row)
        except BaseException:
            await session.close()
            raise
        self._session = session
        info = _info_of(answer)
        self._is_idempotent = bool(info.get("supports_step_idempotency", False))
        self._has_close = bool(info.get("supports_explicit_close", False))
        if self._kind == "gymnasium":
            messages += _observed(answer, f"{self._url}/reset")
        return messages, {"row": where, "is_held_out": rows is self._held_out, **info}

    async def step(self, action: Message | str) -> Step:  # type: ignore[override]
        """Play one turn."""
        if self._session is None:
            raise ResetNeeded("NeMoGymEnv.step: no episode is being played; call reset first")
        message = Message("assistant", action) if isinstance(action, str) else action
        self._said.append(message)
        self._num_turns += 1
        try:
            step = await (self._play(message) if self._kind == "gymnasium" else self._answer(message))
        except BaseException:
            await self._drop()  # the server has played an unknown part of the turn
            raise
        self._said += step[0]
        if step[2] or step[3]:
            await self.close()
        return step

    async def close(self) -> None:  # type: ignore[override]
        """End the session, and tell a server that supports it."""
        if self._session is None:
            return
        try:
            if self._has_close:
                await self._session.post("/close", {})
        finally:
            await self._drop()

    async def _answer(self, message: Message) -> Step:
        """Play a turn with a resources server."""
        answers = [await self._call(call) for call in message.tool_calls]
        is_cut_off = bool(answers) and self._num_turns == self._max_steps
        if answers and not is_cut_off:
            return answers, None, False, False, {}
        assert self._session is not None
        body = {**self._row, "response": self._response([*self._said, *answers])}
        verdict = await self._session.post("/verify", body)
        reward = _reward_of(verdict, f"{self._url}/verify")
        info = {key: value for key, value in verdict.items() if key not in (_PARAMS, "response")}
        return answers, reward, not is_cut_off, is_cut_off, info

    async def _call(self, call: ToolCall) -> Message:
        # The path is the tool's name, so a name that the row does not offer could be /verify.
        names = [schema["function"]["name"] for schema in self._tool_schemas]
        if call.name in names:
            assert self._session is not None
            text = await self._session.call_tool(call.name, call.arguments)
        else:
            text = f"error: unknown tool {call.name!r}; {nearest_name(call.name, names)}"
        return Message("tool", text, tool_call_id=call.id, name=call.name)

    async def _play(self, message: Message) -> Step:
        """Play a turn with a gymnasium server."""
        assert self._session is not None
        body = {**self._row, "response": self._response([message])}
        if self._is_idempotent:
            body["_ng_step_request_id"] = f"step_{self._num_turns}"
        where = f"{self._url}/step"
        answer = await self._session.post("/step", body, may_repeat=self._is_idempotent)
        flags = [answer.get("terminated", False), answer.get("truncated", False)]
        if not all(isinstance(flag, bool) for flag in flags):
            raise ContractError(f"{where}: expected terminated and truncated as true or false, got {flags}")
        is_over = any(flags)
        outputs = {output.get("call_id"): output.get("output") for output in _info_of(answer).get("tool_outputs") or ()}
        messages = []
        for call in message.tool_calls:
            if call.id not in outputs and not is_over:
                raise ContractError(f"{where}: expected an output for the call {call.id!r}, got {sorted(outputs)}")
            text = str(outputs.get(call.id, "error: the episode is over, this call was not made"))
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
        messages += _observed(answer, where)
        return messages, _reward_of(answer, where), flags[0], flags[1], _info_of(answer)

    def _response(self, messages: Sequence[Message]) -> dict[str, Any]:
        return response_of(messages, self._row[_PARAMS], response_id=f"resp_{self._num_turns}")

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _read(rows: RowSource) -> list[tuple[dict[str, Any], str]]:
    return [(dict(row.values), row.where) for row in read_rows(rows)]


def _common_tools(rows: Sequence[tuple[Mapping[str, Any], str]]) -> tuple[Mapping[str, Any], ...]:
    # The model is told its tools once per environment, before a row is drawn.
    if not rows:
        raise ConfigError("NeMoGym: expected at least one row on each side, got none")
    common: tuple[Mapping[str, Any], ...] | None = None
    for row, where in rows:
        params = row.get(_PARAMS)
        if not isinstance(params, Mapping):
            raise ContractError(f"{where}: expected {_PARAMS} as an object, got {params!r:.{_SHOWN}}")
        tools = tool_schemas_of(params, where=where)
        if common is not None and tools != common:
            raise ConfigError(f"{where}: its tools are not those of {rows[0][1]}; use one environment for each set")
        common = tools
    return common or ()


def _info_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    info = answer.get("info")
    return dict(info) if isinstance(info, Mapping) else {}


def _observed(answer: Mapping[str, Any], where: str) -> list[Message]:
    observation = answer.get("observation")
    if observation is None:
        return []
    if not isinstance(observation, str):
        raise ContractError(f"{where}: expected the observation as text or null, got {observation!r:.{_SHOWN}}")
    return [Message("user", observation)]


def _reward_of(answer: Mapping[str, Any], where: str) -> float:
    reward = answer.get("reward")
    if not isinstance(reward, int | float) or not is_finite(reward):
        raise ContractError(f"{where}: expected a finite number as the reward, got {reward!r:.{_SHOWN}}")
    return float(reward)


_SHOWN_OF_BODY = 300  # characters of a body in an error
_RETRIED_STATUS = (502, 503, 504)
_MAX_TRIES = 3  # for a request that may be repeated


class ServerSession:
    """Cookies and connection of one episode; a server without an answer in `timeout_seconds` ends it."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url
        self._timeout = timeout_seconds
        self._client: HttpClient | None = _NemoHttp(url, timeout_seconds=timeout_seconds, headers={})
        self._cookie = ""  # name of the cookie; "" before the session begins
        self._session = ""

    async def begin(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send the first request, which must start a session (else a ContractError), and return its answer."""
        answer = await _read_json(await self._send(path, body), self._where(path))
        jar = self._jar()
        if len(jar) != 1:
            raise ContractError(f"{self._where(path)}: expected one session cookie, got {sorted(jar) or 'none'}")
        ((self._cookie, value),) = jar.items()
        self._session = session_of(value)
        return answer

    async def post(self, path: str, body: Mapping[str, Any], *, may_repeat: bool = False) -> dict[str, Any]:
        """Return the JSON answer to a request in this session.

        A server that recognises a repeated request (`may_repeat`) is sent one without an answer again.

        Raises:
            EnvError: the session is lost, or the server fails. EnvTimeoutError: no answer in time.
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
        """Return a tool's answer as text; a refusal of the arguments (400, 422) is text for the model."""
        path = f"/{name}"
        response = await self._send_in_session(path, arguments)
        if response.status in (400, 422):
            return f"error: {response.text}"
        _require_ok(response, self._where(path))
        return response.text

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _send_in_session(self, path: str, body: Mapping[str, Any]) -> HttpAnswer:
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
        return EnvTimeoutError(message) if kind == "timeout" else EnvError(message)


async def _read_json(response: HttpAnswer, where: str) -> dict[str, Any]:
    _require_ok(response, where)
    try:
        answer = await response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ContractError(f"{where}: expected a JSON object, got {response.text[:_SHOWN_OF_BODY]!r}")
    return answer


def _require_ok(response: HttpAnswer, where: str) -> None:
    if response.status == 200:
        return
    text = f"{where}: status {response.status}: {response.text[:_SHOWN_OF_BODY]}"
    raise ContractError(text) if 400 <= response.status < 500 else EnvError(text)


_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text")

JsonObject = Mapping[str, Any]


def messages_of(params: JsonObject, *, where: str) -> tuple[Message, ...]:
    """Return the messages of `responses_create_params`, which must be text: its instructions and its input."""
    messages = [Message("system", params["instructions"])] if params.get("instructions") else []
    given = params.get("input", ())
    if isinstance(given, str):
        return (*messages, Message("user", given))
    if not isinstance(given, Sequence):
        raise ContractError(f"{where}: expected input as text or a list of messages, got {given!r:.{_SHOWN}}")
    for item in given:
        role = _ROLES.get(item.get("role", "")) if isinstance(item, Mapping) else None
        if role is None:
            raise ContractError(
                f"{where}: expected a message with one of the roles {list(_ROLES)}, got {item!r:.{_SHOWN}}"
            )
        messages.append(Message(role, _content_of(item.get("content"), where)))  # type: ignore[arg-type]  # one of them
    return tuple(messages)


def tool_schemas_of(params: JsonObject, *, where: str) -> tuple[JsonObject, ...]:
    """Return the row's tools as OpenAI chat function schemas, which nest name and parameters one level deeper."""
    schemas = []
    for tool in params.get("tools") or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise ContractError(f"{where}: expected tools of type function with a name, got {tool!r:.{_SHOWN}}")
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return tuple(schemas)


def response_of(messages: Sequence[Message], params: JsonObject, *, response_id: str) -> dict[str, Any]:
    """Return a Responses API object whose output is the conversation after the row's input."""
    # Time and model are constants, which makes the request of an episode reproducible.
    items = [item for index, message in enumerate(messages) for item in _items(message, f"{response_id}_{index}")]
    return {
        "id": response_id,
        "created_at": 0.0,
        "model": params.get("model") or "policy",
        "object": "response",
        "output": items,
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice", "auto"),
        "tools": list(params.get("tools") or ()),
    }


def session_of(cookie: str) -> str:
    """Return the session of a signed Starlette cookie (`session_id`, else all its data); others as they are."""
    # base64(JSON).time.signature: time and signature change with every reply.
    payload = cookie.strip('"').partition(".")[0]
    try:
        held = json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True))
    except ValueError:
        return cookie
    if isinstance(held, dict) and "session_id" in held:
        return str(held["session_id"])
    return json.dumps(held, sort_keys=True)


def _content_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ContractError(f"{where}: expected content as text or parts, got {content!r:.{_SHOWN}}")
    strange = [part.get("type") for part in content if part.get("type") not in _TEXT_PARTS]
    if strange:
        raise ContractError(f"{where}: expected parts of text, got {strange}; images are not read")
    return "\n".join(part.get("text", "") for part in content)


def _items(message: Message, item_id: str) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    if message.role != "assistant":
        return [{"type": "message", "role": message.role, "content": message.content}]
    items: list[dict[str, Any]] = []
    if message.reasoning_content is not None:
        summary = [{"type": "summary_text", "text": message.reasoning_content}]
        items.append({"id": f"rs_{item_id}", "type": "reasoning", "summary": summary})
    if message.content or not message.tool_calls:
        text = {"type": "output_text", "text": message.content, "annotations": []}
        said = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
        items.append({"id": f"msg_{item_id}", **said})
    for index, call in enumerate(message.tool_calls):
        arguments = json.dumps(dict(call.arguments))
        call_item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}
        items.append({"id": f"fc_{item_id}_{index}", "status": "completed", **call_item})
    return items
