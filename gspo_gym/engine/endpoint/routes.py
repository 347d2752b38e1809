"""The ways to get a completion out of an endpoint, each one attempt at one sample.

All but one take token ids and give token ids and logprobs. `TextRoute` is for endpoints that give text only: what it
returns is good for evaluation, not for gradients. Chosen by `engine/endpoint/http.py`, used by `http.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.wire import (
    AnswerError,
    EchoedIds,
    OpenAIClient,
    WireAnswer,
    completions_request,
    read_completions_answer,
    read_sglang_answer,
    require_sampled,
    sglang_request,
    shorten,
    to_completion,
)
from gspo_gym.errors import ConfigError
from gspo_gym.types import Completion, FinishReason

# OpenAI's own endpoint takes so many stop texts.
_MAX_STOPS = 4
_UNKNOWN_VERSION = -1
# A token of the endpoint's model may be several of the policy's, as a word is several letters, but not any number.
_MAX_TOKENS_A_TOKEN = 16


class Tokenizer(Protocol):
    """What the routes need of a transformers tokenizer (Any: its signatures are wide)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class Route(Protocol):
    """One attempt at one sample.

    Attributes:
        name: for people.
        has_logprobs: the completions' logprobs are the endpoint's own; otherwise they are zeros, and mean nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def has_logprobs(self) -> bool: ...

    async def sample(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, call_id: str, attempt: int
    ) -> Completion:
        """The sample. `call_id` is the same for all attempts of one call, and no other call has it.

        Raises:
            EngineAttemptError: another attempt may succeed. EngineError: it would not.
            ConfigError: the endpoint cannot sample so.
        """
        ...


class SampleChecks:
    """What tells a sample for this call from something else that an endpoint may send.

    Args:
        tokenizer: of the policy's tokens; None compares no text.
        is_rescored: the learner's logprobs take the place of the endpoint's, which may then be zeros.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, is_rescored: bool) -> None:
        self._tokenizer = tokenizer
        self._is_rescored = is_rescored
        self._ids = EchoedIds()

    def require(self, answer: WireAnswer, found_id: Any, call_id: str, sampling: SamplingParams) -> None:
        """Refuse an answer to another call, or one that was not sampled; see `wire.require_sampled`.

        Raises:
            AnswerError: it is one.
        """
        self._ids.require(found_id, call_id)
        if not self._is_rescored:
            written = None
            if self._tokenizer is not None and answer.text is not None:
                written = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)
            require_sampled(answer, sampling, written)


class CompletionsRoute:
    """`/v1/completions` with token ids, as vLLM extends it."""

    name = "/v1/completions with token ids"
    has_logprobs = True

    def __init__(
        self,
        client: OpenAIClient,
        *,
        model: str,
        vocab_size: int | None,
        cache_salt: str | None,
        checks: SampleChecks,
    ) -> None:
        self._client = client
        self._model = model
        self._vocab_size = vocab_size
        self._cache_salt = cache_salt
        self._checks = checks

    async def sample(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, call_id: str, attempt: int
    ) -> Completion:
        """See `Route.sample`."""
        request_id = f"{call_id}-{attempt}"
        body = completions_request(prompt, sampling, model=self._model, max_tokens=max_tokens, request_id=request_id)
        if self._cache_salt is not None:
            body["cache_salt"] = self._cache_salt
        raw = await self._client.post("/completions", body, call_id=call_id, attempt=attempt)
        answer = read_completions_answer(raw)
        if answer.prompt_token_ids is None:
            raise AnswerError("answer: expected choices[0].prompt_token_ids, the prompt as the server read it")
        completion = to_completion(
            answer,
            prompt,
            sampling,
            max_tokens=max_tokens,
            vocab_size=self._vocab_size,
            version=_UNKNOWN_VERSION,
        )
        self._checks.require(answer, raw.get("id"), call_id, sampling)
        return completion


class SglangRoute:
    """SGLang's `/generate`, which is beside `/v1` and not below it."""

    name = "SGLang's /generate"
    has_logprobs = True

    def __init__(self, client: OpenAIClient, *, vocab_size: int | None, checks: SampleChecks) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._checks = checks
        self._url = f"{_root(client)}/generate"

    async def sample(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, call_id: str, attempt: int
    ) -> Completion:
        """See `Route.sample`."""
        body = sglang_request(prompt, sampling, max_tokens=max_tokens, request_id=f"{call_id}-{attempt}")
        raw = await self._client.post(self._url, body, call_id=call_id, attempt=attempt)
        answer = read_sglang_answer(raw, len(prompt))
        completion = to_completion(
            answer,
            prompt,
            sampling,
            max_tokens=max_tokens,
            vocab_size=self._vocab_size,
            version=_UNKNOWN_VERSION,
        )
        self._checks.require(answer, raw["meta_info"].get("id"), call_id, sampling)
        return completion


class TextRoute:
    """`/v1/completions` with text, which any such endpoint understands: the prompt decoded, the answer encoded.

    Encoding again may give other tokens than were sampled, more than were asked for (those are cut off), and the server
    may put a begin-of-text token of its own before the prompt; but the tokens say what the text says, or it is an
    error. The logprobs are zeros. If the endpoint says that it stopped, the first stop token is appended, for it cuts
    off the text that stopped it.
    """

    name = "/v1/completions with text"
    has_logprobs = False

    def __init__(self, client: OpenAIClient, *, model: str, tokenizer: Tokenizer) -> None:
        self._client = client
        self._model = model
        self._tokenizer = tokenizer

    async def sample(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, call_id: str, attempt: int
    ) -> Completion:
        """See `Route.sample`."""
        _require_plain(sampling)
        stops = [self._tokenizer.decode([token], skip_special_tokens=False) for token in sampling.stop_token_ids]
        body = {
            "model": self._model,
            "prompt": self._tokenizer.decode(list(prompt), skip_special_tokens=False),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,  # what servers of C's int accept
            "n": 1,
            **({"stop": [stop for stop in stops if stop][:_MAX_STOPS]} if stops else {}),
        }
        answer = await self._client.post("/completions", body, call_id=call_id, attempt=attempt)
        return self._read(answer, sampling, max_tokens)

    def _read(self, answer: Any, sampling: SamplingParams, max_tokens: int) -> Completion:
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        text = choice.get("text") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(text, str):
            raise AnswerError(f"answer: expected one choice with a text, got {shorten(answer)}")
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise AnswerError(f'answer: expected finish reason "stop" or "length", got {reason!r}')
        ids = self._encode(text)
        usage = answer.get("usage")
        said = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(said) is int and len(ids) > _MAX_TOKENS_A_TOKEN * max(said, 1):
            raise AnswerError(f"answer: padded: a text of {len(ids)} tokens, of which the endpoint sampled {said}")
        ids = ids[:max_tokens]
        has_stopped = reason == "stop" and bool(sampling.stop_token_ids) and len(ids) < max_tokens
        if has_stopped:
            ids.append(sampling.stop_token_ids[0])
        if not ids:
            raise AnswerError("answer: expected a text, got an empty one")
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
            weight_version=np.full(len(ids), _UNKNOWN_VERSION, np.int32),
        )

    def _encode(self, text: str) -> list[int]:
        ids = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
        if (read := self._tokenizer.decode(ids, skip_special_tokens=False)) != text:
            raise AnswerError(
                f"answer: expected a text that the policy's tokenizer can write, got {shorten(text)}, of which it "
                f"makes {shorten(read)}"
            )
        return ids


def _root(client: OpenAIClient) -> str:
    """What `/v1` is below."""
    return client.base_url.removesuffix("/v1")


def _require_plain(sampling: SamplingParams) -> None:
    """Refuse what OpenAI's protocol has no field for: it would be dropped without a word."""
    asked = {
        "top_k": sampling.top_k != 0,
        "min_p": sampling.min_p > 0,
        "repetition_penalty": abs(sampling.repetition_penalty - 1) > 0,
        "min_tokens": sampling.min_tokens > 0,
    }
    if wrong := [name for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"HttpEngine: an endpoint that gives text only takes temperature, top_p, seed and max_tokens; "
            f"leave {', '.join(wrong)} at the default"
        )
