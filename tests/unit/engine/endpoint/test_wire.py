"""The wire: requests that leave nothing to a server, and answers that are believed only if nothing in them is odd."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gspo_gym.base.retries import AttemptError
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.wire import (
    AnswerError,
    completions_request,
    read_completions_answer,
    read_sglang_answer,
    sglang_request,
    to_completion,
)
from gspo_gym.types import Completion, FinishReason

PROMPT = [5, 6, 7]
STOP = 2
SAMPLING = SamplingParams(
    max_tokens=9, stop_token_ids=(STOP, 3), seed=2**62 + 1, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05,
    repetition_penalty=1.1, min_tokens=4,
)  # fmt: skip
# Everything that vLLM's sampler reads; what is not here would be the server's or the model folder's to choose.
FIELDS = {
    "n": 1, "max_tokens": 6, "min_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05,
    "repetition_penalty": 1.1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 2**62 + 1, "stop": [],
    "stop_token_ids": [2, 3], "ignore_eos": True, "logprobs": 0,
}  # fmt: skip

COMPLETIONS: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [8, 9, STOP],
            "prompt_token_ids": PROMPT,
            "logprobs": {"token_logprobs": [-0.5, -1, -0.25]},
            "finish_reason": "stop",
        }
    ]
}
SGLANG: dict[str, Any] = {
    "meta_info": {
        "prompt_tokens": 3,
        "output_token_logprobs": [[-0.5, 8, None], [-1.0, 9, None], [-0.25, STOP, None]],
        "finish_reason": {"type": "stop", "matched": STOP},
    }
}


def completion_of(answer: Any, max_tokens: int = 6) -> Completion:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,), seed=0)
    read = read_completions_answer(answer)
    return to_completion(read, PROMPT, sampling, max_tokens=max_tokens, vocab_size=10)


def test_a_completions_request_says_everything() -> None:
    body = completions_request(PROMPT, SAMPLING, model="m", max_tokens=6, request_id="r")
    assert body == {
        **FIELDS,
        "model": "m",
        "prompt": PROMPT,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
        "request_id": "r",
    }
    assert json.loads(json.dumps(body)) == body  # seeds beyond 2**53 included: JSON integers are exact here


def test_an_sglang_request_says_everything_by_its_own_names() -> None:
    body = sglang_request(PROMPT, replace(SAMPLING, repetition_penalty=1.0), max_tokens=6, request_id="r")
    assert body["sampling_params"] == {
        "n": 1, "max_new_tokens": 6, "min_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [2, 3],
        "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True, "sampling_seed": 2**62 + 1,
    }  # fmt: skip
    assert (body["input_ids"], body["return_logprob"]) == (PROMPT, True)
    plain = SamplingParams(max_tokens=9, stop_token_ids=(), seed=0)
    assert sglang_request(PROMPT, plain, max_tokens=6, request_id="r")["sampling_params"]["top_k"] == -1


def test_the_same_sample_reads_the_same_from_both_routes() -> None:
    for answer in (read_completions_answer(COMPLETIONS), read_sglang_answer(SGLANG, num_prompt_tokens=3)):
        assert answer.token_ids == (8, 9, STOP)
        assert answer.logprobs == (-0.5, -1.0, -0.25)
        assert answer.finish_reason == "stop"


def test_an_answer_becomes_a_completion() -> None:
    completion = completion_of(COMPLETIONS)
    assert completion.token_ids.tolist() == [8, 9, STOP]
    np.testing.assert_array_equal(completion.logprobs, np.array([-0.5, -1.0, -0.25], np.float32))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.weight_version.tolist() == [-1, -1, -1]


def test_an_answer_of_full_length_was_cut_off_unless_its_last_token_is_a_stop_token() -> None:
    answer = copy.deepcopy(COMPLETIONS)
    assert completion_of(answer, max_tokens=3).finish_reason is FinishReason.STOP
    answer["choices"][0] |= {"token_ids": [0, 9, 9], "finish_reason": "length"}
    assert completion_of(answer, max_tokens=3).finish_reason is FinishReason.LENGTH


# What a test does to the choice of a good answer, and what the error must say.
SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "one logprob too few": (
        {"logprobs": {"token_logprobs": [-0.5, -1.0]}},
        "one logprob for each of 3 tokens, got 2",
    ),
    "one too many": ({"logprobs": {"token_logprobs": [-1.0] * 4}}, "one logprob for each of 3 tokens, got 4"),
    "null logprob": ({"logprobs": {"token_logprobs": [-0.5, None, -1.0]}}, "as a list of numbers"),
    "no logprobs": ({"logprobs": None}, r"expected logprobs \(dict\), got None"),
    "logprob as text": ({"logprobs": {"token_logprobs": ["-0.5", "-1", "-1"]}}, "as a list of numbers"),
    "nan": ({"logprobs": {"token_logprobs": [-0.5, math.nan, -1.0]}}, "finite logprobs <= 0, got nan at token 1"),
    "-inf": ({"logprobs": {"token_logprobs": [-math.inf, -1.0, -1.0]}}, "got -inf at token 0"),
    "vLLM's -inf": ({"logprobs": {"token_logprobs": [-1.0, -1.0, -9999.0]}}, "got -9999.0 at token 2"),
    "positive": ({"logprobs": {"token_logprobs": [-0.5, -1.0, 0.01]}}, "got 0.01 at token 2"),
    "huge integer": ({"logprobs": {"token_logprobs": [-0.5, -1, 10**400]}}, "as a list of numbers"),
    "id beyond the vocabulary": ({"token_ids": [8, 10, STOP]}, r"in \[0, 9\], got 10"),
    "negative id": ({"token_ids": [8, -1, STOP]}, r"in \[0, 9\], got -1"),
    "id as a truth value": ({"token_ids": [8, True, STOP]}, "as a list of integers"),
    "id as a number with a point": ({"token_ids": [8, 9.0, STOP]}, "as a list of integers"),
    "no ids": ({"token_ids": None}, r"choices\[0\].token_ids as a list of integers, got None"),
    "no tokens": ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "1 to 6 tokens, got 0"),
    "another prompt": ({"prompt_token_ids": [5, 6, 8]}, "another prompt: 3 tokens instead of 3, different from token"),
    "a longer prompt": ({"prompt_token_ids": [1, 5, 6, 7]}, "4 tokens instead of 3, different from token 0 on"),
    "a prompt that goes on": ({"prompt_token_ids": [5, 6, 7, 8]}, "4 tokens instead of 3, different from token 3 on"),
    "goes on after a stop": ({"token_ids": [8, STOP, 9]}, "goes on for 1 tokens after a stop token"),
    "ends without a stop": ({"token_ids": [8, 9, 9]}, r"ended \(stop\) after 3 of 6 tokens without a stop token"),
    "aborted": ({"finish_reason": "abort"}, "got 'abort'"),
    "no reason": ({"finish_reason": None}, r"expected finish_reason \(str\), got None"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_answer_is_an_error_that_says_what_is_wrong(name: str) -> None:
    change, message = SPOILT[name]
    answer = copy.deepcopy(COMPLETIONS)
    answer["choices"][0] |= change
    with pytest.raises(AnswerError, match=message):
        completion_of(answer)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [1]},
        {"choices": COMPLETIONS["choices"] * 2},
        {"error": {"message": "x" * 10_000}},
        None,
        [COMPLETIONS],
        "text",
    ],
)
def test_what_is_no_completion_is_an_error_of_readable_length(answer: Any) -> None:
    with pytest.raises(AnswerError) as caught:
        read_completions_answer(answer)
    assert len(str(caught.value)) < 400


def test_an_sglang_answer_to_a_prompt_of_another_length_is_an_error() -> None:
    with pytest.raises(AnswerError, match="to a prompt of 3 tokens, but 4 were sent"):
        read_sglang_answer(SGLANG, num_prompt_tokens=4)


def test_an_unbelievable_answer_may_be_asked_for_again() -> None:
    error = AnswerError("odd")
    assert isinstance(error, AttemptError)
    assert error.kind == "answer"


def test_no_random_answer_is_ever_more_than_an_answer_error() -> None:
    """2,000 times a good answer with one value replaced by junk: a completion or an AnswerError, nothing else."""
    junk: list[Any] = [None, True, -1, 10**30, 1.5, math.nan, math.inf, "", "x", [], [None], {}, {"a": 1}]
    rng = np.random.default_rng(0)
    num_good = 0
    for _ in range(1000):
        for good, read in (
            (COMPLETIONS, read_completions_answer),
            (SGLANG, lambda answer: read_sglang_answer(answer, 3)),
        ):
            answer = copy.deepcopy(good)
            _replace_somewhere(answer, junk[int(rng.integers(len(junk)))], rng)
            sampling = SamplingParams(max_tokens=6, stop_token_ids=(STOP,), seed=0)
            try:
                completion = to_completion(read(answer), PROMPT, sampling, max_tokens=6, vocab_size=10)
            except AnswerError:
                continue
            num_good += 1
            assert len(completion.token_ids) == 3
    assert 0 < num_good < 1000  # junk where nothing is read does no harm; most of it is where something is


def _replace_somewhere(value: Any, junk: Any, rng: np.random.Generator) -> None:
    """Walk down from the top; stop at any level with one chance in three, or where it goes no deeper."""
    while True:
        key = list(value)[int(rng.integers(len(value)))] if isinstance(value, dict) else int(rng.integers(len(value)))
        deeper = value[key]
        if not isinstance(deeper, dict | list) or not deeper or rng.random() < 1 / 3:
            value[key] = junk
            return
        value = deeper
