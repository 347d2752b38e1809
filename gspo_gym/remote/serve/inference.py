"""Client of the model that a rollout names, through the `openai` package.

The URL comes from a request and was checked before (`urls.py`); the checked address is called.
It sends the sampling settings of the rollout's policy and no others: an agent with other settings would not sample
what the trainer expects.
"""

from __future__ import annotations

import importlib.util
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from gspo_gym.base.messages import message_from_wire, message_to_wire
from gspo_gym.errors import ContextOverflowError, MissingExtraError, RecordError, ServiceError
from gspo_gym.remote.apps.contracts import EXTENSION
from gspo_gym.remote.apps.urls import PinnedUrl
from gspo_gym.types import Message

_CHAT = "/chat/completions"
_SAMPLING = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop")
_OVERFLOW_CODE = "context_length_exceeded"  # OpenAI's, which our gateway and vLLM's router use, too
_MAX_SHOWN = 300  # characters of a foreign error that ours repeats


class InferenceError(ServiceError):
    """The model gave no answer, or an unreadable one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model.

    Attributes:
        message: its message, with the raw text if that could not be read as an action.
        error: the reason for that, in words for the model; None if it could be read.
        parse: the gateway's name for it ("ok", "bad_tool_call", ...).
        finish_reason: of the API. usage: the server's token counts. seconds: until it was there.
        logprobs: of the sampled tokens, if they were asked for and given.
    """

    message: Message
    error: str | None = None
    parse: str = "ok"
    finish_reason: str = "stop"
    usage: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    logprobs: tuple[float, ...] | None = None


def require_openai() -> None:
    """Raise if the openai package is missing, at the server's start and not in its first rollout.

    Raises:
        MissingExtraError: the openai package is not installed.
    """
    if importlib.util.find_spec("openai") is None:
        raise MissingExtraError("playing rollouts needs: pip install 'gspo-gym[serve]'")


def split_inference_url(url: str) -> tuple[str, dict[str, str]]:
    """Return the base URL for the `openai` package, and the query that each request keeps.

    >>> split_inference_url("http://gw/t/ID/v1/chat/completions?cid=ID")
    ('http://gw/t/ID/v1', {'cid': 'ID'})
    >>> split_inference_url("http://gw/t/ID?cid=ID"), split_inference_url("http://gw/v1/")
    (('http://gw/t/ID/v1', {'cid': 'ID'}), ('http://gw/v1', {}))
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix(_CHAT)
    if not path.endswith("/v1"):
        path += "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), dict(parse_qsl(parts.query))


class InferenceClient:
    """Client of one endpoint for one rollout. Use it within one event loop, and close it.

    Args:
        url: checked.
        policy: JSON of the rollout's `policy.config`: `model` and how to sample.
        api_key: sent as a bearer; None sends a placeholder.
        with_logprobs: asks for those of the sampled tokens.
        timeout_seconds: for one answer. max_retries: of transport errors, 429 and 5xx, by the `openai` package.

    Raises:
        MissingExtraError: the openai package is not installed.
    """

    def __init__(
        self,
        url: PinnedUrl,
        policy: Mapping[str, Any],
        *,
        api_key: str | None = None,
        with_logprobs: bool = False,
        timeout_seconds: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        require_openai()
        import openai

        base_url, query = split_inference_url(url.url)
        self._where = f"{url.scheme}://{url.host}:{url.port}"  # without path and query, which open it
        self._fixed: dict[str, Any] = {name: policy[name] for name in _SAMPLING if policy.get(name) is not None}
        self._fixed["model"] = str(policy.get("model") or "policy")
        if with_logprobs:
            self._fixed["logprobs"] = True
        self._is_ours = False  # whether the gateway answers, which knows what else a message holds
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key or "none",
            default_query=query,
            timeout=timeout_seconds,
            max_retries=max_retries,
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=False,
                follow_redirects=False,
                timeout=timeout_seconds,
                # False: nothing is verified because nothing is TLS; reading the authorities takes long.
                verify=ssl.create_default_context() if url.scheme == "https" else False,
                event_hooks={"request": [url.pin]},
            ),
        )

    async def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Reply:
        """Return the model's next message; `tools` are OpenAI function schemas.

        Raises:
            InferenceError: no answer, or an unreadable one.
            ContextOverflowError: the conversation no longer fits the model.
        """
        import openai

        request = {**self._fixed, "messages": [self._to_wire(message) for message in messages]}
        if tools:
            request["tools"] = list(tools)
        started = time.monotonic()
        try:
            answer = await self._client.chat.completions.create(**request)
        except openai.APIStatusError as error:
            raise self._failure(error.status_code, error.body, str(error)) from None
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            raise InferenceError(f"{self._where}: {type(error).__name__}: {str(error)[:_MAX_SHOWN]}") from None
        return self._read(answer, seconds=time.monotonic() - started)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    def _to_wire(self, message: Message) -> dict[str, Any]:
        wire = message_to_wire(message)
        # Other servers refuse the field, or show it to their model.
        if self._is_ours and message.reasoning_content is not None:
            wire["reasoning_content"] = message.reasoning_content
        return wire

    def _failure(self, status: int, body: object, text: str) -> Exception:
        code = body.get("code") if isinstance(body, Mapping) else None
        # vLLM has no code for it.
        if status == 400 and (code == _OVERFLOW_CODE or "maximum context length" in text):
            return ContextOverflowError(f"{self._where}: the conversation no longer fits the model")
        return InferenceError(f"{self._where}: status {status}: {text[:_MAX_SHOWN]}")

    def _read(self, answer: Any, *, seconds: float) -> Reply:  # Any: an endpoint may answer with anything
        try:
            wire = answer.model_dump(mode="json")
            choice = wire["choices"][0]
            said = choice["message"]
            usage = {name: n for name, n in (wire.get("usage") or {}).items() if isinstance(n, int)}
            extra = wire.get(EXTENSION)
            # Only our gateway answers with the extra field.
            self._is_ours = isinstance(extra, dict)
            return Reply(
                **_understood(said, extra if isinstance(extra, dict) else {}, self._where),
                finish_reason=str(choice.get("finish_reason")),
                usage=usage,
                seconds=seconds,
                logprobs=_logprobs(choice),
            )
        except (AttributeError, LookupError, TypeError) as error:
            raise InferenceError(f"{self._where}: expected a chat completion, got {answer!r:.{_MAX_SHOWN}}") from error


def _understood(said: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> dict[str, Any]:
    if extra.get("error"):
        text = Message("assistant", str(said.get("content") or ""))
        return {"message": text, "error": str(extra["error"]), "parse": str(extra.get("parse", "bad_tool_call"))}
    try:
        return {"message": message_from_wire({**said, "role": "assistant"}, where=where)}
    # The environment answers a text that is not an action, as it would in the trainer's process.
    except RecordError as error:  # an endpoint that passes on arguments that are no JSON
        if not all(_is_call(call) for call in said.get("tool_calls") or ()):
            raise InferenceError(str(error)) from error
        text = Message("assistant", str(said.get("content") or ""))
        reason = str(error).removeprefix(f"{where}: ")
        return {"message": text, "error": reason, "parse": "bad_tool_call"}


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    content = (choice.get("logprobs") or {}).get("content")
    return None if content is None else tuple(float(token["logprob"]) for token in content)
