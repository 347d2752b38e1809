"""The ways to get a completion out of an inference server, each one attempt at one sample.

All but one take token ids and give token ids and logprobs. `TextRoute` is for endpoints that give text only: what it
returns is good for evaluation, not for gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gspo_gym.base.http import call_headers
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.wire import (
    AnswerError,
    EchoedIds,
    EngineClient,
    WireAnswer,
    completions_request,
    generate_request,
    read_completions_answer,
    read_generate_answer,
    read_sglang_answer,
    require_sampled,
    sglang_request,
    shorten,
    to_completion,
)
from gspo_gym.types import Completion, FinishReason

UNKNOWN_VERSION = -1
_MAX_STOPS = 4  # OpenAI's own endpoint takes so many stop texts
# A token of the endpoint's model may be several of the policy's, as a word is several letters, but not any number.
_MAX_TOKENS_A_TOKEN = 16
_SESSION_HEADER = "x-session-id"  # by which vLLM may keep a session's requests on one of several data-parallel copies


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the routes need (Any: its signatures are wide)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class Served:
    """The weights that a server samples a request with.

    Attributes:
        version: the trainer's number; -1 if it is not known.
        model: the name at the server: of an adapter, or of the model that it serves.
        salt: of the prefix cache (vLLM); None: shared with others.
    """

    version: int
    model: str
    salt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One call for one sample.

    Attributes:
        served: the weights that are to sample.
        call_id: the same for all attempts of one call, and of no other call.
        session_id: of the episode, for servers with several copies of the model.
        padding_ids: those of the model that its tokenizer does not have; vLLM's routes keep them from being sampled.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    served: Served
    call_id: str
    session_id: str | None = None
    padding_ids: range = range(0)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sample, with the names of the weights as in `WireAnswer.versions`."""

    completion: Completion
    versions: tuple[tuple[str, int, int], ...] = ()


class Route(Protocol):
    """A route of a server, by which one attempt at one sample is made.

    Attributes:
        path: below the client's base URL, or a complete URL.
        name: for people.
        has_logprobs: the completions' logprobs are the server's; otherwise they are zeros, and mean nothing.
        says_versions: answers tell which weights sampled each token.
    """

    path: str
    name: str
    has_logprobs: bool
    says_versions: bool

    async def sample(self, request: SampleRequest, attempt: int) -> Sampled:
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
        is_ours: the server is a vLLM that takes our updates: an answer names the model and the very attempt, and its
            logprobs were seen to be those of the sampler.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, is_rescored: bool = False, is_ours: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_rescored = is_rescored
        self._is_ours = is_ours
        self._ids = EchoedIds()

    def require(self, raw: Any, found_id: Any, answer: WireAnswer, request: SampleRequest, attempt: int) -> None:
        """Refuse an answer to another call, or tokens that were not sampled (Any: an answer as it came).

        Raises:
            AnswerError: the answer is refused.
        """
        # Another adapter of the same server would give a plausible sample.
        if self._is_ours and raw.get("model") != request.served.model:
            found = raw.get("model")
            raise AnswerError(f"answer: expected a sample of {request.served.model!r}, got one of {found!r}")
        # A gateway that knows the call answers a later attempt with the sample of an earlier one.
        self._ids.require(found_id, f"{request.call_id}-{attempt}" if self._is_ours else request.call_id)
        # Logprobs of ours were tried, and those that will be replaced may be anything.
        if not (self._is_ours or self._is_rescored):
            written = None
            if self._tokenizer is not None and answer.text is not None:
                written = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)
            require_sampled(answer, request.sampling, written)


class _TokenRoute(ABC):
    """A route that takes token ids and gives token ids and logprobs.

    Args:
        vocab_size: token ids are below it; None: not known.
    """

    request_of: Callable[..., dict[str, Any]]  # makes the body of a SampleRequest's fields and the request's id
    has_logprobs = True
    says_versions = False

    def __init__(self, client: EngineClient, path: str, *, vocab_size: int | None, checks: SampleChecks) -> None:
        self.path = path
        self._client = client
        self._vocab_size = vocab_size
        self._checks = checks

    async def sample(self, request: SampleRequest, attempt: int) -> Sampled:
        """See `Route.sample`."""
        body = self._body(request, f"{request.call_id}-{attempt}")
        raw = await self._client.post_object(self.path, body, headers=_headers(request, attempt))
        answer, found_id = self._read(raw, request)
        completion = to_completion(
            answer,
            request.prompt,
            request.sampling,
            max_tokens=request.max_tokens,
            vocab_size=self._vocab_size,
            version=request.served.version,
        )
        # After the reading: an answer that cannot be read is not compared.
        self._checks.require(raw, found_id, answer, request, attempt)
        return Sampled(completion, answer.versions)

    def _body(self, request: SampleRequest, request_id: str) -> dict[str, Any]:
        served = request.served
        body = type(self).request_of(
            request.prompt,
            request.sampling,
            model=served.model,
            max_tokens=request.max_tokens,
            request_id=request_id,
            padding_ids=request.padding_ids,
        )
        return body if served.salt is None else {**body, "cache_salt": served.salt}

    @abstractmethod
    def _read(self, raw: Any, request: SampleRequest) -> tuple[WireAnswer, Any]:
        """Return the answer, and the request's id as the server repeats it (Any: not checked)."""


class CompletionsRoute(_TokenRoute):
    """`/v1/completions` with token ids, as vLLM extends it."""

    name = "/v1/completions with token ids"
    request_of = staticmethod(completions_request)

    def _read(self, raw: Any, request: SampleRequest) -> tuple[WireAnswer, Any]:  # noqa: ARG002
        answer = read_completions_answer(raw)
        # Without it the server might have read another prompt, such as one with a token put before it.
        if answer.prompt_token_ids is None:
            raise AnswerError("answer: expected choices[0].prompt_token_ids, the prompt as the server read it")
        return answer, raw.get("id")


class GenerateRoute(_TokenRoute):
    """`/inference/v1/generate`, vLLM's route without a tokenizer, which also tells the weights' versions.

    A server has it only with `--enable-scale-out` or `--tokens-only`.
    """

    name = "/inference/v1/generate"
    says_versions = True
    request_of = staticmethod(generate_request)

    def _read(self, raw: Any, request: SampleRequest) -> tuple[WireAnswer, Any]:  # noqa: ARG002
        answer = read_generate_answer(raw)
        if not answer.versions:
            raise AnswerError("answer: expected choices[0].weight_versions, the weights that sampled each token")
        if answer.prompt_token_ids is None:
            raise AnswerError("answer: expected prompt_token_ids, the prompt as the server read it")
        return answer, raw.get("request_id")


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
    says_versions = False

    def __init__(self, client: EngineClient, path: str, *, tokenizer: Tokenizer) -> None:
        self.path = path
        self._client = client
        self._tokenizer = tokenizer

    async def sample(self, request: SampleRequest, attempt: int) -> Sampled:
        """See `Route.sample`."""
        sampling, max_tokens = request.sampling, request.max_tokens
        # OpenAI's protocol has no field for the others.
        sampling.require_only(("temperature", "top_p"), where="HttpEngine: an endpoint that gives text only")
        stops = [self._tokenizer.decode([token], skip_special_tokens=False) for token in sampling.stop_token_ids]
        body = {
            "model": request.served.model,
            "prompt": self._tokenizer.decode(list(request.prompt), skip_special_tokens=False),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,  # what servers of C's int accept
            "n": 1,
            **({"stop": [stop for stop in stops if stop][:_MAX_STOPS]} if stops else {}),
        }
        answer = await self._client.post_object(self.path, body, headers=_headers(request, attempt))
        return Sampled(self._read(answer, sampling, max_tokens))

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


def _headers(request: SampleRequest, attempt: int) -> dict[str, str]:
    headers, session = call_headers(request.call_id, attempt), request.session_id
    # Headers are ASCII without line breaks; a server does not need to keep together what is named otherwise.
    if session and session.isascii() and session.isprintable():
        headers[_SESSION_HEADER] = session
    return headers
