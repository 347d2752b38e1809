"""A gateway on loopback in the test's own event loop, in front of an engine that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai

from gspo_gym.chat.renderer import Renderer
from gspo_gym.engine.base import Engine
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.remote.gateway.app import GatewayApp, create_gateway_app, openai_base_url, rollout_url
from gspo_gym.remote.gateway.session import Gateway, GatewaySession, GatewaySessionSettings
from gspo_gym.remote.guard import App
from gspo_gym.remote.serving import LoopServer
from gspo_gym.types import Message, ToolCall

Said = str | Message | ToolCall
"""A text, a whole message, or a tool call and nothing else."""

SETTINGS = GatewaySessionSettings("attempt", sampling_seed=7, max_output_tokens=256, max_model_len=4096)
TOKENIZER = tiny_tokenizer()
RENDERER = Renderer(TOKENIZER)
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


def ids_of(said: Said) -> list[int]:
    """What a model samples to say it, stop token included; a text is sampled as it stands."""
    if isinstance(said, str):
        return [*TOKENIZER.encode(said, add_special_tokens=False), RENDERER.stop_token_ids[0]]
    message = Message("assistant", "", (said,)) if isinstance(said, ToolCall) else said
    return RENDERER.action_ids(message)


def saying(*answers: Said, **options: Any) -> ScriptedEngine:
    """An engine that gives these answers, in the order in which it is asked (Any: `ScriptedEngine`'s options)."""
    return ScriptedEngine([ids_of(said) for said in answers], **options)


def replying(reply: Callable[[str], Said], **options: Any) -> ScriptedEngine:
    """An engine that answers what it reads (Any: `ScriptedEngine`'s options)."""
    return ScriptedEngine(lambda prompt, _turn: ids_of(reply(TOKENIZER.decode(list(prompt)))), **options)


@dataclass(frozen=True)
class Served:
    """A gateway that is being served.

    Attributes:
        gateway, app: as they are served. url: the base. http: a client of one's own making.
    """

    gateway: Gateway
    app: GatewayApp
    url: str
    http: httpx.AsyncClient
    _openai: openai.AsyncOpenAI

    def open(self, **settings: Any) -> GatewaySession:
        """A session with the usual settings but for those given (Any: fields of the settings)."""
        return self.gateway.open_session(replace(SETTINGS, **settings))

    def client(self, session: GatewaySession, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's client on a session, which tries nothing twice unless it is told to (Any: its options)."""
        return self._openai.with_options(base_url=openai_base_url(self.url, session.id), **options)

    async def post(self, session: GatewaySession, body: Any, **options: Any) -> httpx.Response:
        """A chat request on a session's URL (Any: JSON; httpx's options)."""
        return await self.http.post(rollout_url(self.url, session.id), json=body, **options)


@contextlib.asynccontextmanager
async def served(engine: Engine, *, wrap: Callable[[App], App] = lambda app: app) -> AsyncIterator[Served]:
    """Serve for the length of a block; `wrap` puts something in front of it."""
    gateway = Gateway(engine, TOKENIZER)
    guard = create_gateway_app(gateway)
    assert isinstance(guard.app, GatewayApp)
    server = LoopServer(wrap(guard), host="127.0.0.1", port=0)
    await server.start()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30.0, limits=limits) as http,
        openai.AsyncOpenAI(
            base_url=server.url,
            api_key="sk-foreign-key",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client,
    ):
        try:
            yield Served(gateway, guard.app, server.url, http, client)
        finally:
            await gateway.close()
            await server.stop()


def run(test: Callable[[], Awaitable[None]], *, seconds: float = 60.0) -> None:
    """Run a test's coroutine to its end."""

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await test()

    asyncio.run(limited())


def user(*texts: str) -> list[dict[str, str]]:
    """Messages of a user."""
    return [{"role": "user", "content": text} for text in texts]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop go on until it has brought that about."""
    while not condition():  # noqa: ASYNC110  # nothing says so by an event
        await asyncio.sleep(0)
