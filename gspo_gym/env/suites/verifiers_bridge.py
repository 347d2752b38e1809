"""The meeting point of a verifiers rollout, which asks for answers, and an episode of ours, which gives them.

Also what both sides say, translated. Called by `verifiers.py`; one event loop, no threads.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.env.suites.verifiers_loading import schema_of
from gspo_gym.errors import ContractError
from gspo_gym.types import Message, ToolCall

# (prompt, sampling_args, tools or None, state) -> a `verifiers.types.Response`
Respond = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any] | None, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """What a rollout asks the model: the whole conversation, and the tools that it offers."""

    messages: tuple[Message, ...]
    tool_schemas: tuple[Mapping[str, Any], ...]


class Bridge:
    """Passes each request of one rollout to the episode, and the episode's answer back.

    Attributes:
        client: a `verifiers.clients.Client` for the rollout (Any: the package is untyped).
    """

    def __init__(self, package: Any, *, name: str) -> None:
        self.client = client_asking(self._ask)
        self._package = package
        self._name = name
        self._requests: asyncio.Queue[Request | ContractError] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None  # None: nobody waits for one

    async def next_request(self) -> Request:
        """Waits for the rollout to ask.

        Raises:
            ContractError: what it asked cannot be shown to a model of ours.
        """
        asked = await self._requests.get()
        if isinstance(asked, ContractError):
            raise asked
        return asked

    def answer(self, message: Message) -> None:
        """Gives the model's answer to the request that was taken last."""
        assert self._answer is not None, "there is an answer to every request and no other"
        self._answer.set_result(message)

    async def _ask(self, prompt: Sequence[Any], _sampling: object, tools: Sequence[Any] | None, _state: object) -> Any:
        """The rollout's side: a `verifiers.types.Response` to a prompt, when the episode has given it."""
        try:
            if self._answer is not None:
                raise ContractError(
                    f"{self._name}: asked for another answer before it had the first; an environment that talks to the "
                    "model in several conversations at once cannot be trained turn by turn"
                )
            messages = tuple(as_message(message, where=self._name) for message in prompt)
            request = Request(messages, tuple(schema_of(tool) for tool in tools or ()))
        except ContractError as error:
            self._requests.put_nowait(error)  # the episode raises it; what the rollout does about it is of no account
            raise
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        try:
            return response(self._package, await self._answer)
        finally:
            self._answer = None


def as_message(message: Any, *, where: str) -> Message:
    """A message of verifiers, or a mapping in the OpenAI shape, as one of ours.

    Raises:
        ContractError: it has parts that are not text, or is no chat message.
    """
    get = message.get
    role = get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise ContractError(
            f"{where}: expected a chat message, got one of role {role!r}; completions are not supported"
        )
    calls = tuple(_as_call(call) for call in get("tool_calls") or ())
    content = _content(get("content"), where)
    if role == "assistant":
        return Message("assistant", content, calls, reasoning_content=get("reasoning_content"))
    return Message(role, content, tool_call_id=get("tool_call_id"))


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.get("type") != "text":
            raise ContractError(f"{where}: expected text, got a part of type {part.get('type')!r}; no engine reads it")
        texts.append(str(part.get("text")))
    return "\n".join(texts)


def _as_call(call: Any) -> ToolCall:
    """Arguments are JSON text there; a text that is none was not written by a model of ours, and is kept whole."""
    try:
        arguments = json.loads(call.arguments)
    except json.JSONDecodeError:
        arguments = {"arguments": call.arguments}
    return ToolCall(call.id, call.name, arguments if isinstance(arguments, dict) else {"arguments": arguments})


def response(package: Any, message: Message, *, is_cut_off: bool = False, tokens: Any = None, usage: Any = None) -> Any:
    """A `verifiers.types.Response` that says `message`.

    Args:
        package: the module `verifiers` (Any, as what it makes: untyped).
        message: of the assistant.
        is_cut_off: the limit on tokens ended it.
        tokens, usage: a `ResponseTokens` and a `Usage`, if they are known.
    """
    types = package.types
    calls = [
        types.ToolCall(id=call.id, name=call.name, arguments=json.dumps(dict(call.arguments), ensure_ascii=False))
        for call in message.tool_calls
    ]
    said = types.ResponseMessage(
        content=message.content,
        reasoning_content=message.reasoning_content,
        tool_calls=calls or None,
        finish_reason="length" if is_cut_off else "tool_calls" if calls else "stop",
        is_truncated=is_cut_off,
        tokens=tokens,
    )
    return types.Response(id="turn", created=0, model="policy", message=said, usage=usage)


def client_asking(respond: Respond) -> Any:
    """A `verifiers.clients.Client` that asks `respond` instead of a server. Needs verifiers (hence Any)."""
    base: Any = importlib.import_module("verifiers.clients.client").Client

    class AskingClient(base):  # type: ignore[misc]  # a class of an untyped package, there only when that is
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, *, state: Any = None, **_: Any
        ) -> Any:
            """A `verifiers.types.Response`."""
            del model
            return await self.client(prompt, sampling_args, tools, state)

        def _never(self, *_args: Any, **_kwargs: Any) -> Any:
            raise AssertionError("only get_response is called from outside, and here it calls nothing of these")

        setup_client = to_native_tool = to_native_prompt = get_native_response = _never
        raise_from_native_response = from_native_response = _never

        async def close(self) -> None:
            """Nothing to close."""

    return AskingClient(respond)
