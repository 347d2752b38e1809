"""The two ways to get token ids and logprobs out of a vLLM server, each one attempt at one sample.

`GenerateRoute` also tells which weights sampled each token, but a server has it only with `--enable-scale-out` or
`--tokens-only`; `CompletionsRoute` every server has. Chosen by `vllm_handshake`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.wire import (
    AnswerError,
    EchoedIds,
    WireAnswer,
    completions_request,
    generate_request,
    read_completions_answer,
    read_generate_answer,
    to_completion,
)
from gspo_gym.engine.vllm.client import VllmClient
from gspo_gym.engine.vllm.requests import sampling_fields
from gspo_gym.engine.vllm.versions import Served
from gspo_gym.types import Completion

# By which vLLM may keep a session's requests on one of several data-parallel copies.
_SESSION_HEADER = "X-Session-ID"


class Route(Protocol):
    """One attempt at one sample.

    Attributes:
        path: of the server.
        says_versions: answers tell which weights sampled each token.
    """

    @property
    def path(self) -> str: ...

    @property
    def says_versions(self) -> bool: ...

    async def sample(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        served: Served,
        *,
        max_tokens: int,
        request_id: str,
        session_id: str | None,
    ) -> tuple[Completion, WireAnswer]:
        """The sample, and the answer that it was read from. `request_id` is this attempt's own.

        Raises:
            EngineAttemptError: another attempt may succeed. EngineError: it would not.
        """
        ...


class GenerateRoute:
    """`/inference/v1/generate`, vLLM's route without a tokenizer."""

    path = "/inference/v1/generate"
    says_versions = True

    def __init__(self, client: VllmClient, *, vocab_size: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._ids = EchoedIds()

    async def sample(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        served: Served,
        *,
        max_tokens: int,
        request_id: str,
        session_id: str | None,
    ) -> tuple[Completion, WireAnswer]:
        """See `Route.sample`."""
        body = generate_request(prompt, sampling, model=served.model, max_tokens=max_tokens, request_id=request_id)
        body["sampling_params"] |= sampling_fields(sampling, max_tokens)
        body["cache_salt"] = served.salt
        raw = await self._client.post(self.path, body, headers=_headers(session_id))
        _require_model(raw, served)
        self._ids.require(raw.get("request_id"), request_id)
        answer = read_generate_answer(raw)
        if not answer.versions:
            raise AnswerError("answer: expected choices[0].weight_versions, the weights that sampled each token")
        return _read(answer, prompt, sampling, served, max_tokens, self._vocab_size), answer


class CompletionsRoute:
    """`/v1/completions` with token ids, as vLLM extends it."""

    path = "/v1/completions"
    says_versions = False

    def __init__(self, client: VllmClient, *, vocab_size: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._ids = EchoedIds()

    async def sample(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        served: Served,
        *,
        max_tokens: int,
        request_id: str,
        session_id: str | None,
    ) -> tuple[Completion, WireAnswer]:
        """See `Route.sample`."""
        body = completions_request(prompt, sampling, model=served.model, max_tokens=max_tokens, request_id=request_id)
        body |= sampling_fields(sampling, max_tokens)
        body["cache_salt"] = served.salt
        raw = await self._client.post(self.path, body, headers=_headers(session_id))
        _require_model(raw, served)
        self._ids.require(raw.get("id"), request_id)
        answer = read_completions_answer(raw)
        return _read(answer, prompt, sampling, served, max_tokens, self._vocab_size), answer


def _headers(session_id: str | None) -> Mapping[str, str]:
    # Headers are ASCII without line breaks; a name that is not would be one that no server needs to keep.
    is_sendable = session_id is not None and session_id.isascii() and session_id.isprintable()
    return {_SESSION_HEADER: session_id} if is_sendable and session_id else {}


def _require_model(raw: Any, served: Served) -> None:
    found = raw.get("model") if isinstance(raw, dict) else None
    if found != served.model:
        raise AnswerError(f"answer: expected a sample of {served.model!r}, got one of {found!r}")


def _read(
    answer: WireAnswer,
    prompt: Sequence[int],
    sampling: SamplingParams,
    served: Served,
    max_tokens: int,
    vocab_size: int,
) -> Completion:
    if answer.prompt_token_ids is None:
        raise AnswerError("answer: expected prompt_token_ids, the prompt as the server read it")
    return to_completion(answer, prompt, sampling, max_tokens=max_tokens, vocab_size=vocab_size, version=served.version)
