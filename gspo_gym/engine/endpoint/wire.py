"""Requests to inference servers, with nothing left to the server's defaults, and their answers, read with suspicion.

Two routes: `/v1/completions` with token ids (vLLM's extension of OpenAI's), and SGLang's `/generate`. Answers are JSON
of unknown shape, hence `Any`, and every doubt is an `AnswerError`: a wrong token or logprob must never reach a trainer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.base import http
from gspo_gym.base.retries import AttemptError
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.vllm.requests import sampling_fields
from gspo_gym.errors import ConfigError, EngineError, shortened
from gspo_gym.types import Completion, FinishReason

# OpenAI's protocol has no infinity; vLLM writes this for it. No sampled token can have it.
_MINUS_INFINITY = -9999.0
# The weights behind a URL are not known.
UNKNOWN_VERSION = -1
# Rounding may leave a logprob a little above 0; as `Completion` allows.
_MAX_LOGPROB = 1e-3
# So many tokens in a row with logprobs of exactly 0 were not sampled: float32 rounds a probability to 1 when all other
# tokens together have less than 6e-8. Fewer may be chance at a peaked distribution, and below that temperature, too.
_MIN_CERTAIN_TOKENS = 4
_MIN_CERTAIN_TEMPERATURE = 0.5


class EngineAttemptError(AttemptError, EngineError):
    """One attempt at an engine failed in a way that another one may not."""


class AnswerError(EngineAttemptError):
    """An answer that cannot be believed: incomplete, contradictory, or to another question."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="answer")


@dataclass(frozen=True, slots=True)
class WireAnswer:
    """An answer with fields of the right types; `to_completion` checks whether they make sense.

    Attributes:
        token_ids: the sampled tokens.
        logprobs: one number each.
        finish_reason: as the server calls it: "stop", "length", "abort", ...
        prompt_token_ids: the prompt that the server read; None if it does not say.
        num_tokens: that the server says it sampled; None if it does not say.
        text: of the tokens; None if the server does not say.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...] | None = None
    num_tokens: int | None = None
    text: str | None = None


class EchoedIds:
    """Refuses answers that name another call, at an endpoint that names the call in its answers.

    vLLM and SGLang do; other names say nothing. The first answer that names its call shows that this endpoint does;
    engines ask for one answer alone when they start.
    """

    def __init__(self) -> None:
        self._is_echoing = False

    def require(self, found: Any, call_id: str) -> None:
        """Compare the id in an answer (Any: not checked) with the call's, which all its attempts have in common.

        Raises:
            AnswerError: it names another call, or none although others did.
        """
        # Servers put prefixes and suffixes around the id that they were given.
        if isinstance(found, str) and re.search(rf"(?<![0-9A-Za-z]){re.escape(call_id)}(?![0-9A-Za-z])", found):
            self._is_echoing = True
        elif self._is_echoing:
            raise AnswerError(f"answer: to another request: expected one that names {call_id}, got {shorten(found)}")


def completions_request(
    prompt: Sequence[int], sampling: SamplingParams, *, model: str, max_tokens: int, request_id: str
) -> dict[str, Any]:
    """Return the body for `POST /v1/completions`: token ids in, token ids and logprobs out (vLLM and its imitators)."""
    return {
        "model": model,
        "prompt": list(prompt),
        **sampling_fields(sampling, max_tokens),
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # and not as texts, for which a server without a tokenizer would refuse
        "stream": False,
        "request_id": request_id,
    }


def read_completions_answer(answer: Any) -> WireAnswer:
    """Read the answer of `/v1/completions`.

    Raises:
        AnswerError: a field is missing or of another type.
    """
    choice = _only_choice(answer)
    logprobs = _member(choice, "logprobs", dict)
    prompt = choice.get("prompt_token_ids")
    return WireAnswer(
        token_ids=_ids(choice.get("token_ids"), "choices[0].token_ids"),
        logprobs=_numbers(logprobs.get("token_logprobs"), "choices[0].logprobs.token_logprobs"),
        finish_reason=_member(choice, "finish_reason", str),
        prompt_token_ids=None if prompt is None else _ids(prompt, "choices[0].prompt_token_ids"),
        num_tokens=_count(answer.get("usage"), "completion_tokens"),
        text=_text(choice.get("text")),
    )


def sglang_request(
    prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, request_id: str, num_alternatives: int = 0
) -> dict[str, Any]:
    """Return the body for SGLang's `POST /generate`.

    `num_alternatives` asks for the logprobs of so many likeliest tokens at each place, too.

    Raises:
        ConfigError: a repetition penalty, which SGLang applies to sampled tokens only and we to the prompt's, too.
    """
    if sampling.repetition_penalty != 1:
        raise ConfigError(
            "SGLang's repetition_penalty passes over the prompt's tokens, so its samples are of another distribution; "
            f"leave it at 1, got {sampling.repetition_penalty}"
        )
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **{name: value for name, value in sampling.values().items() if name != "min_tokens"},
            "n": 1,
            "max_new_tokens": max_tokens,
            "min_new_tokens": min(sampling.min_tokens, max_tokens),
            "top_k": sampling.top_k or -1,  # its name for all
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": sampling.seed,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": num_alternatives,
        "rid": request_id,
        "stream": False,
    }


def read_sglang_answer(answer: Any, num_prompt_tokens: int) -> WireAnswer:
    """Read the answer of SGLang's `/generate`, which echoes only the length of the prompt.

    Raises:
        AnswerError: a field is missing or of another type, or the prompt had another length.
    """
    meta = _member(answer, "meta_info", dict)
    rows = _member(meta, "output_token_logprobs", list)
    if any(not isinstance(row, list) or len(row) < 2 for row in rows):
        raise AnswerError("answer: expected meta_info.output_token_logprobs as [logprob, token id, text] rows")
    if (length := meta.get("prompt_tokens")) != num_prompt_tokens:
        raise AnswerError(f"answer: to a prompt of {length} tokens, but {num_prompt_tokens} were sent")
    return WireAnswer(
        token_ids=_ids([row[1] for row in rows], "meta_info.output_token_logprobs[][1]"),
        logprobs=_numbers([row[0] for row in rows], "meta_info.output_token_logprobs[][0]"),
        finish_reason=_member(_member(meta, "finish_reason", dict), "type", str),
        num_tokens=_count(meta, "completion_tokens"),
        text=_text(answer.get("text")),
    )


def to_completion(
    answer: WireAnswer,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    vocab_size: int | None,
) -> Completion:
    """Return the completion in an answer, after every check that can be made from outside.

    Args:
        prompt, sampling, max_tokens: of the request.
        vocab_size: token ids are below it; None: not known here.

    Raises:
        AnswerError: another prompt, ids out of the vocabulary, not one finite logprob <= 0 each, or an end that the
            request does not explain.
    """
    if answer.prompt_token_ids is not None and answer.prompt_token_ids != tuple(prompt):
        echoed_ids = answer.prompt_token_ids
        # Where they part helps to find the cause: at 0 it is another conversation, later a token that was put in.
        at = next(
            (i for i, (x, y) in enumerate(zip(echoed_ids, prompt, strict=False)) if x != y),
            min(len(echoed_ids), len(prompt)),
        )
        raise AnswerError(
            f"answer: to another prompt: {len(echoed_ids)} tokens instead of {len(prompt)}, "
            f"different from token {at} on"
        )
    ids, logprobs = answer.token_ids, answer.logprobs
    if len(ids) != len(logprobs):
        raise AnswerError(f"answer: expected one logprob for each of {len(ids)} tokens, got {len(logprobs)}")
    if not 1 <= len(ids) <= max_tokens:
        raise AnswerError(f"answer: expected 1 to {max_tokens} tokens, got {len(ids)}")
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    if wrong := [token for token in ids if not 0 <= token <= top]:
        raise AnswerError(f"answer: expected token ids in [0, {top}], got {wrong[0]}")
    for place, value in enumerate(logprobs):
        if not _MINUS_INFINITY < value <= _MAX_LOGPROB:  # NaN is not, either
            raise AnswerError(f"answer: expected finite logprobs <= 0, got {value} at token {place}")
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish_reason=_finish_reason(answer, sampling, max_tokens),
        weight_version=np.full(len(ids), UNKNOWN_VERSION, np.int32),
    )


def require_sampled(answer: WireAnswer, sampling: SamplingParams, written: str | None) -> None:
    """Refuse an answer that was not sampled as asked: logprobs that are not there, or tokens and text that were added.

    Args:
        answer: as it was read. sampling: of the request.
        written: the tokens decoded by the policy's tokenizer; None without one.

    Raises:
        AnswerError: all logprobs of a text are 0, it is padded, or its text or count do not fit its tokens.
    """
    ids, logprobs = answer.token_ids, answer.logprobs
    if answer.num_tokens is not None and answer.num_tokens < len(ids):
        raise AnswerError(
            f"answer: padded: {len(ids)} tokens, of which the endpoint says it sampled {answer.num_tokens}"
        )
    # A tokenizer may drop one leading space; a stop token is not in the text.
    if written is not None and answer.text is not None and len(answer.text) > len(written) + 1:
        raise AnswerError(
            f"answer: padded: its text is {shorten(answer.text)}, of which its tokens are {shorten(written)} only"
        )
    if sampling.is_truncated or sampling.temperature < _MIN_CERTAIN_TEMPERATURE:
        return  # one token may be all that is left
    num_certain = next((n for n, value in enumerate(reversed(logprobs)) if value != 0), len(logprobs))
    if num_certain < _MIN_CERTAIN_TOKENS:
        return
    if num_certain == len(logprobs):
        raise AnswerError(f"answer: all logprobs of {len(ids)} sampled tokens are 0: the endpoint does not know them")
    # One token repeated with certainty is padding; others may follow from what was said.
    if len(set(ids[-num_certain:])) == 1:
        raise AnswerError(f"answer: padded: it ends in {num_certain} tokens {ids[-1]} whose logprobs are 0")


def _finish_reason(answer: WireAnswer, sampling: SamplingParams, max_tokens: int) -> FinishReason:
    # The tokens decide; the server's word must not contradict them.
    ids, stops = answer.token_ids, set(sampling.stop_token_ids)
    if answer.finish_reason not in ("stop", "length"):
        raise AnswerError(f'answer: expected finish reason "stop" or "length", got {answer.finish_reason!r}')
    if early := [place for place, token in enumerate(ids[:-1]) if token in stops]:
        raise AnswerError(f"answer: goes on for {len(ids) - 1 - early[0]} tokens after a stop token")
    if ids[-1] in stops:
        return FinishReason.STOP
    if len(ids) < max_tokens:
        raise AnswerError(
            f"answer: ended ({answer.finish_reason}) after {len(ids)} of {max_tokens} tokens without a stop token"
        )
    return FinishReason.LENGTH


def _only_choice(answer: Any) -> dict[str, Any]:
    choices = _member(answer, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise AnswerError(f"answer: expected one choice, got {len(choices)}")
    return choices[0]


def _member(value: Any, name: str, kind: type[Any]) -> Any:
    member = value.get(name) if isinstance(value, dict) else None
    if not isinstance(member, kind):
        raise AnswerError(f"answer: expected {name} ({kind.__name__}), got {shorten(member)} in {shorten(value)}")
    return member


def _ids(value: Any, name: str) -> tuple[int, ...]:
    # `type` and not isinstance: true is no token.
    if not isinstance(value, list) or any(type(token_id) is not int for token_id in value):
        raise AnswerError(f"answer: expected {name} as a list of integers, got {shorten(value)}")
    return tuple(value)


def _numbers(value: Any, name: str) -> tuple[float, ...]:
    if not isinstance(value, list) or any(type(number) not in (int, float) for number in value):
        raise AnswerError(f"answer: expected {name} as a list of numbers, got {shorten(value)}")
    try:
        return tuple(float(number) for number in value)
    except OverflowError:  # JSON integers have no end
        raise AnswerError(f"answer: expected {name} as a list of numbers, got {shorten(value)}") from None


def _count(value: Any, name: str) -> int | None:
    count = value.get(name) if isinstance(value, dict) else None
    return count if type(count) is int else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def shorten(value: Any, limit: int = 120) -> str:
    """Return the beginning of a value for an error."""
    # Servers answer with pages of HTML.
    return shortened(repr(value), limit)


class RefusedError(http.RefusedError, EngineError):
    """The endpoint understood the request and will not do it (4xx): asking again changes nothing."""


class EngineClient(http.HttpClient):
    """The client of inference servers, which raises EngineAttemptError and RefusedError."""

    attempt_error = EngineAttemptError
    refused_error = RefusedError
