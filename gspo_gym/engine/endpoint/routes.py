"""The ways to get a completion out of an inference server, each one attempt at one sample.

All but one take token ids and give token ids and logprobs. `TextRoute` is for endpoints that give text only: what it
returns is good for evaluation, not for gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gspo_gym.base.http import call_headers
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.wire import (
    UNKNOWN_VERSION,
    AnswerError,
    EchoedIds,
    EngineClient,
    WireAnswer,
    completions_request,
    read_completions_answer,
    read_sglang_answer,
    require_sampled,
    sglang_request,
    shorten,
    to_completion,
)
from gspo_gym.types import Completion, FinishReason

_MAX_STOPS = 4  # OpenAI's own endpoint takes so many stop texts
# A token of the endpoint's model may be several of the policy's, as a word is several letters, but not any number.
_MAX_TOKENS_A_TOKEN = 16


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the routes need (Any: its signatures are wide)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One call for one sample.

    Attributes:
        model: its name at the endpoint.
        call_id: the same for all attempts of one call, and of no other call.
        cache_salt: of the server's prefix cache (vLLM); None: shared with others.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    model: str
    call_id: str
    cache_salt: str | None = None


class Route(Protocol):
    """A route of a server, by which one attempt at one sample is made.

    Attributes:
        path: below the client's base URL, or a complete URL.
        name: for people.
        has_logprobs: the completions' logprobs are the server's; otherwise they are zeros, and mean nothing.
    """

    path: str
    name: str
    has_logprobs: bool

    async def sample(self, request: SampleRequest, attempt: int) -> Completion:
        """Return the sample.

        Raises:
            EngineAttemptError: another attempt may succeed. EngineError: it would not.
            ConfigError: the endpoint cannot sample so.
        """


class SampleChecks:
    """Checks that tell a sample for this call from something else that a server may send.

    Args:
        tokenizer: of the policy's tokens; None compares no text.
        is_rescored: the learner's logprobs take the place of the endpoint's, which may then be zeros.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, is_rescored: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_rescored = is_rescored
        self._ids = EchoedIds()

    def require(self, answered_id: Any, answer: WireAnswer, request: SampleRequest) -> None:
        """Refuse an answer to another call, or tokens that were not sampled (Any: an answer as it came).

        Raises:
            AnswerError: the answer is refused.
        """
        # A gateway that knows the call answers a later attempt with the sample of an earlier one.
        self._ids.require(answered_id, request.call_id)
        if not self._is_rescored:  # logprobs that will be replaced may be anything
            decoded_text = None
            if self._tokenizer is not None and answer.text is not None:
                decoded_text = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)
            require_sampled(answer, request.sampling, decoded_text)


class _TokenRoute(ABC):
    """A route that takes token ids and gives token ids and logprobs.

    Args:
        vocab_size: token ids are below it; None: not known.
    """

    has_logprobs = True

    def __init__(self, client: EngineClient, path: str, *, vocab_size: int | None, checks: SampleChecks) -> None:
        self.path = path
        self._client = client
        self._vocab_size = vocab_size
        self._checks = checks

    async def sample(self, request: SampleRequest, attempt: int) -> Completion:
        """See `Route.sample`."""
        body = self._body(request, f"{request.call_id}-{attempt}")
        raw = await self._client.post_object(self.path, body, headers=call_headers(request.call_id, attempt))
        answer, answered_id = self._read(raw, request)
        completion = to_completion(
            answer,
            request.prompt,
            request.sampling,
            max_tokens=request.max_tokens,
            vocab_size=self._vocab_size,
        )
        # After the reading: an answer that cannot be read is not compared.
        self._checks.require(answered_id, answer, request)
        return completion

    @abstractmethod
    def _body(self, request: SampleRequest, request_id: str) -> dict[str, Any]: ...

    @abstractmethod
    def _read(self, raw: Any, request: SampleRequest) -> tuple[WireAnswer, Any]:
        """Return the answer, and the request's id as the server repeats it (Any: not checked)."""


class CompletionsRoute(_TokenRoute):
    """`/v1/completions` with token ids, as vLLM extends it."""

    name = "/v1/completions with token ids"

    def _body(self, request: SampleRequest, request_id: str) -> dict[str, Any]:
        body = completions_request(
            request.prompt,
            request.sampling,
            model=request.model,
            max_tokens=request.max_tokens,
            request_id=request_id,
        )
        return body if request.cache_salt is None else {**body, "cache_salt": request.cache_salt}

    def _read(self, raw: Any, request: SampleRequest) -> tuple[WireAnswer, Any]:  # noqa: ARG002
        answer = read_completions_answer(raw)
        # Without it the server might have read another prompt, such as one with a token put before it.
        if answer.prompt_token_ids is None:
            raise AnswerError("answer: expected choices[0].prompt_token_ids, the prompt as the server read it")
        return answer, raw.get("id")


class SglangRoute(_TokenRoute):
    """SGLang's `/generate`, which is beside `/v1` and not below it."""

    name = "SGLang's /generate"

    def _body(self, request: SampleRequest, request_id: str) -> dict[str, Any]:
        return sglang_request(request.prompt, request.sampling, max_tokens=request.max_tokens, request_id=request_id)

    def _read(self, raw: Any, request: SampleRequest) -> tuple[WireAnswer, Any]:
        return read_sglang_answer(raw, len(request.prompt)), raw["meta_info"].get("id")


class TextRoute:
    """`/v1/completions` with text, which any such endpoint understands: the prompt decoded, the answer encoded.

    Encoding again may give other tokens than were sampled, or more than were asked for (those are cut off), and the
    server may put a begin-of-text token before the prompt; but the tokens say what the text says, or it is an error.
    The logprobs are zeros. If the endpoint says that it stopped, the first stop token is appended, because endpoints
    cut off the text that stopped them.
    """

    name = "/v1/completions with text"
    has_logprobs = False

    def __init__(self, client: EngineClient, path: str, *, tokenizer: Tokenizer) -> None:
        self.path = path
        self._client = client
        self._tokenizer = tokenizer

    async def sample(self, request: SampleRequest, attempt: int) -> Completion:
        """See `Route.sample`."""
        sampling, max_tokens = request.sampling, request.max_tokens
        # OpenAI's protocol has no field for the others.
        sampling.require_only(("temperature", "top_p"), where="HttpEngine: an endpoint that gives text only")
        stops = [self._tokenizer.decode([token], skip_special_tokens=False) for token in sampling.stop_token_ids]
        body = {
            "model": request.model,
            "prompt": self._tokenizer.decode(list(request.prompt), skip_special_tokens=False),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,  # what servers of C's int accept
            "n": 1,
            **({"stop": [stop for stop in stops if stop][:_MAX_STOPS]} if stops else {}),
        }
        answer = await self._client.post_object(self.path, body, headers=call_headers(request.call_id, attempt))
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
        num_reported = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(num_reported) is int and len(ids) > _MAX_TOKENS_A_TOKEN * max(num_reported, 1):
            raise AnswerError(
                f"answer: padded: a text of {len(ids)} tokens, of which the endpoint sampled {num_reported}"
            )
        ids = ids[:max_tokens]
        # A stop token needs room: a cut text did not stop.
        has_stopped = reason == "stop" and bool(sampling.stop_token_ids) and len(ids) < max_tokens
        if has_stopped:
            ids.append(sampling.stop_token_ids[0])  # endpoints cut off the text that stopped them
        if not ids:
            raise AnswerError("answer: expected a text, got an empty one")
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
            weight_version=np.full(len(ids), UNKNOWN_VERSION, np.int32),
        )

    def _encode(self, text: str) -> list[int]:
        ids = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
        # Another model's text may hold what the policy's tokenizer changes, such as other spaces.
        if (read := self._tokenizer.decode(ids, skip_special_tokens=False)) != text:
            raise AnswerError(
                f"answer: expected a text that the policy's tokenizer can write, got {shorten(text)}, of which it "
                f"makes {shorten(read)}"
            )
        return ids
