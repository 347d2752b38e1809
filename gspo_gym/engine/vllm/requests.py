"""The fields of vLLM's requests and answers: plain values, checked, without importing vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from gspo_gym.engine.base import SamplingParams
from gspo_gym.errors import ConfigError, EngineError, RecordError
from gspo_gym.types import Completion, FinishReason

# vLLM raises a temperature below 0.01 to 0.01 and only warns, and refuses one above 2 (SamplingParams in 0.32).
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
_NEVER = -100.0  # the least bias that vLLM takes: e^-100 of the distribution, which no float32 logprob shows


class Span(Protocol):
    """Tokens [start, end) of a completion were sampled under the weights labelled `version`."""

    @property
    def version(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def padding_ids(num_token_ids: int | None, vocab_size: int) -> range:
    """Return the ids of a model of `vocab_size` rows that its tokenizer does not have; none for None."""
    return range(vocab_size if num_token_ids is None else num_token_ids, vocab_size)


def sampling_fields(sampling: SamplingParams, max_new: int, *, padding_ids: Iterable[int] = ()) -> dict[str, Any]:
    """Return all fields of vLLM's `SamplingParams` that change a distribution or an end: no default of vLLM applies.

    `max_new` comes from `num_tokens_to_sample`. Greedy needs no more than temperature 0: vLLM then drops the
    truncations and reports logprobs of temperature 1. `padding_ids` are those of the model that its tokenizer does not
    have: they are kept out of the distribution, as the learner keeps them out of its own.

    Raises:
        ConfigError: a temperature that vLLM would change silently, or refuse.
    """
    if sampling.temperature > 0 and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        raise ConfigError(
            f"SamplingParams.temperature: vLLM samples at 0 (greedy) or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], "
            f"got {sampling.temperature}"
        )
    schema = {} if sampling.json_schema is None else {"structured_outputs": {"json": sampling.json_schema}}
    bias = dict.fromkeys(padding_ids, _NEVER)
    return {
        # Before the record's values: a parameter that the record gains is then sent as it stands there.
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **sampling.values(),
        "n": 1,
        "max_tokens": max_new,
        "min_tokens": min(sampling.min_tokens, max_new),
        "seed": sampling.seed % 2**63,  # vLLM takes -1 for "no seed"
        "stop": [],
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # the only ends are `stop_token_ids`
        "logprobs": 0,  # one for each token, that of the token itself
        **({"logit_bias": bias} if bias else {}),
        **schema,
    }


def versions_of(spans: Sequence[Span] | None, num_tokens: int) -> list[int]:
    """Return the version of each token, from vLLM's spans.

    Raises:
        EngineError: the spans do not cover the tokens one after another, or a label is no version number.
    """
    versions: list[int] = []
    is_right = True
    for span in spans or ():
        is_right = is_right and span.start == len(versions) and span.end > span.start and span.version.isdecimal()
        versions += [int(span.version)] * (span.end - span.start) if is_right else []
    if not is_right or len(versions) != num_tokens:
        raise EngineError(f"vLLM: expected weight versions of {num_tokens} tokens in a row, got {spans}")
    return versions


def finish_reason_of(
    reason: str | None, token_ids: Sequence[int], *, stop_token_ids: tuple[int, ...], max_new: int
) -> FinishReason:
    """Return why a completion ended, checked against the tokens.

    Raises:
        EngineError: vLLM gave the request up, or the tokens contradict its reason.
    """
    if reason == "stop" and token_ids and token_ids[-1] in stop_token_ids:
        return FinishReason.STOP
    if reason == "length" and len(token_ids) == max_new:
        return FinishReason.LENGTH
    if reason in ("abort", "error"):
        raise EngineError(f"vLLM gave the request up after {len(token_ids)} tokens: finish reason {reason!r}")
    raise EngineError(
        f"vLLM: a finish reason of {reason!r} contradicts the tokens: {len(token_ids)} of at most {max_new}, the last "
        f"{list(token_ids[-1:])}, stop tokens {list(stop_token_ids)}"
    )


def completion_of(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    finish_reason: FinishReason,
    versions: Sequence[int],
    vocab_size: int,
) -> Completion:
    """Return a completion, its fields checked against each other and the vocabulary.

    Raises:
        EngineError: lengths differ, a logprob is not finite or positive, or an id is not in the vocabulary.
    """
    outside = [token for token in token_ids if not 0 <= token < vocab_size]
    if outside:
        raise EngineError(f"vLLM: expected sampled ids in [0, {vocab_size}), got {outside[0]}")
    try:
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reason=finish_reason,
            weight_version=np.array(versions, np.int32),
        )
    except RecordError as error:
        raise EngineError(f"vLLM: {error}") from error
