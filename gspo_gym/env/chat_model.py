"""`ChatModel`: a model behind any OpenAI-compatible endpoint, as a player, an opponent or a simulated user.

Its messages have no token ids and are not trained on. A failure is always an exception, never an empty answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_gym.base.messages import RefusedFields, message_from_wire, message_to_wire, refused_fields, without
from gspo_gym.errors import ConfigError, EnvError, EnvTimeoutError, MissingExtraError, RecordError
from gspo_gym.types import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class ChatModelSettings:
    """Endpoint and sampling of a chat model.

    Attributes:
        model: its name at the endpoint.
        base_url: such as "http://127.0.0.1:8000/v1"; None for OpenAI's own.
        api_key_env: environment variable with the key; a local server may need none.
        temperature: of sampling. top_p: sent unless it is 1, which some models refuse to be told.
        max_tokens: limit of one answer, including any reasoning.
        timeout_seconds: limit of one answer, including retries.
        max_retries: of transport errors, 429 and 5xx.
    """

    model: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    timeout_seconds: float = 60.0
    max_retries: int = 2

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("ChatModelSettings.model: expected a model's name, got an empty text")
        if not (self.temperature >= 0 and self.max_tokens >= 1 and self.timeout_seconds > 0 and self.max_retries >= 0):
            raise ConfigError(
                "ChatModelSettings: expected temperature >= 0, max_tokens >= 1, timeout_seconds > 0 and "
                f"max_retries >= 0, got {self.temperature}, {self.max_tokens}, {self.timeout_seconds} and "
                f"{self.max_retries}"
            )


class ChatModel:
    """Asks the endpoint for the next message of a conversation.

    Use an instance within one event loop, and close it. Keys come from the environment and appear in no error.

    Raises:
        MissingExtraError: the openai package is not installed.
        ConfigError: OpenAI's own endpoint without a key.
    """

    def __init__(self, settings: ChatModelSettings) -> None:
        self.settings = settings
        try:
            import openai
        except ImportError as error:
            raise MissingExtraError("a model behind an endpoint needs: pip install 'gspo-gym[openai]'") from error
        key = os.environ.get(settings.api_key_env)
        if key is None and settings.base_url is None:
            raise ConfigError(f"ChatModel: expected an API key in the variable {settings.api_key_env}, it is not set")
        self._fields = RefusedFields(settings.model)
        self._client: AsyncOpenAI = openai.AsyncOpenAI(
            base_url=settings.base_url, api_key=key or "none", max_retries=settings.max_retries
        )

    async def reply(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), seed: int | None = None
    ) -> Message:
        """Return the model's next message; `tools` are OpenAI function schemas.

        Raises:
            EnvTimeoutError: no answer within timeout_seconds.
            EnvError: the endpoint refused, or its answer is not a chat completion.
        """
        import openai

        settings = self.settings
        limit = "max_completion_tokens" if settings.base_url is None else "max_tokens"
        request: dict[str, Any] = {
            "model": settings.model,
            "messages": [message_to_wire(message) for message in messages],
            "temperature": settings.temperature,
            limit: settings.max_tokens,
        }
        if settings.top_p != 1:
            request["top_p"] = settings.top_p
        if tools:
            request["tools"] = list(tools)
        if seed is not None:
            request["seed"] = seed % 2**31  # some servers take a C int
        where = f"{settings.model} at {settings.base_url or 'OpenAI'}"
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                answer = await self._ask(request)
        except TimeoutError:
            raise EnvTimeoutError(f"{where}: no answer within {settings.timeout_seconds:g} seconds") from None
        except openai.OpenAIError as error:
            raise EnvError(f"{where}: {type(error).__name__}: {str(error)[:300]}") from error
        return _message(answer, where, settings.max_tokens)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        """Return the endpoint's answer; fields that it refuses by name are left out from then on."""
        import openai

        def send(refused: frozenset[str]) -> Any:
            return self._client.chat.completions.create(**without(request, refused))

        def is_about(error: openai.APIStatusError, refused: frozenset[str]) -> frozenset[str]:
            return refused_fields(error.response.text, without(request, refused), optional=("seed",))

        return await self._fields.ask(send, is_about, (openai.BadRequestError, openai.UnprocessableEntityError))


def _message(answer: Any, where: str, max_tokens: int) -> Message:
    choices = getattr(answer, "choices", None)
    if not choices or not hasattr(getattr(choices[0], "message", None), "to_dict"):
        raise EnvError(f"{where}: expected a chat completion with a message, got {answer!r:.200}")
    try:
        message = message_from_wire(choices[0].message.to_dict() | {"role": "assistant"}, where=where)
    except RecordError as error:
        raise EnvError(str(error)) from error
    if not message.content and not message.tool_calls:
        is_cut_off = getattr(choices[0], "finish_reason", None) == "length"
        advice = f", cut off at {max_tokens} tokens: it needs more of them" if is_cut_off else ""
        raise EnvError(f"{where}: expected a text or a tool call, got an empty message{advice}")
    return message
