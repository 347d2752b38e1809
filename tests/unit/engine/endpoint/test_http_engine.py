"""The engine behind HTTP, against a real server on loopback whose samples anyone can compute (`hash_model`)."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import hash_model
import numpy as np
import pytest
from faulty_server import MAX_MODEL_LEN, MODEL, FaultPlan, FaultyServer

from gspo_gym.base.retries import RetrySettings
from gspo_gym.engine.base import Capabilities, SamplingParams, WeightUpdate
from gspo_gym.engine.endpoint.http import HttpEngine, HttpSettings
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError, EnginePoisonedError, EngineTimeoutError
from gspo_gym.types import Completion, FinishReason

Json = dict[str, Any]

PROMPT = [1, 2, 3]
STOP = 5
SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(STOP,), seed=3)
TOKENIZER = hash_model.LetterTokenizer()


async def no_sleep(seconds: float) -> None:
    """Retries at once."""


def use(
    server: FaultyServer, body: Callable[[HttpEngine], Awaitable[Any]], tokenizer: Any = None, **settings: Any
) -> Any:
    """What `body` makes of an engine that has started."""

    async def run() -> Any:
        asked = HttpSettings(server.base_url, MODEL, **({"vocab_size": 64} | settings))
        engine = await HttpEngine.start(asked, tokenizer, sleep=no_sleep)
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def ask(server: FaultyServer, sampling: SamplingParams = SAMPLING, **settings: Any) -> Completion:
    completion: Completion = use(server, lambda engine: engine.generate(PROMPT, sampling), **settings)
    return completion


async def capabilities_of(engine: HttpEngine) -> Capabilities:
    return engine.capabilities


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 1.7}]
)
def test_samples_and_their_logprobs_are_the_models(asked: dict[str, Any]) -> None:
    rule = hash_model.sample(PROMPT, seed=3, max_tokens=12, stop_token_ids=(STOP,), **asked)
    with FaultyServer() as server:
        completion = ask(server, SamplingParams(max_tokens=12, stop_token_ids=(STOP,), seed=3, **asked))
    assert completion.token_ids.tolist() == rule.token_ids
    np.testing.assert_allclose(completion.logprobs, rule.processed, atol=1e-6)
    assert completion.weight_version.tolist() == [-1] * len(rule.token_ids)


def test_a_stop_token_is_kept_and_the_contexts_end_cuts_off() -> None:
    first = hash_model.sample(PROMPT, seed=3, max_tokens=3).token_ids
    assert len(set(first)) == 3
    with FaultyServer() as server:
        stopped = ask(server, SamplingParams(max_tokens=12, stop_token_ids=(first[2],), seed=3))
        cut = ask(server, max_model_len=5)
    assert stopped.token_ids.tolist() == first
    assert stopped.finish_reason is FinishReason.STOP
    assert (len(cut.token_ids), cut.finish_reason) == (2, FinishReason.LENGTH)


def test_a_prompt_without_room_is_refused_before_anything_is_sent() -> None:
    async def overflow(engine: HttpEngine) -> None:
        num_seen = len(server.seen)
        with pytest.raises(ContextOverflowError, match="a prompt of 512 tokens leaves no room in a context of 512"):
            await engine.generate([1] * MAX_MODEL_LEN, SAMPLING)
        assert len(server.seen) == num_seen

    with FaultyServer() as server:
        use(server, overflow)


def test_a_request_names_its_call_its_attempt_and_its_cache() -> None:
    with FaultyServer() as server:
        ask(server, cache_salt="mine")
        seen = server.seen[-1]
    assert seen.path == "/v1/completions"
    assert (seen.body["model"], seen.body["prompt"], seen.body["cache_salt"]) == (MODEL, PROMPT, "mine")
    assert seen.body["request_id"] == seen.headers["x-request-id"] == f"{seen.headers['idempotency-key']}-0"


def test_an_endpoint_is_tried_with_eight_tokens_that_are_no_text() -> None:
    with FaultyServer() as server:
        ask(server)
        first = next(seen.body for seen in server.seen if seen.path == "/v1/completions")
    assert (first["prompt"], first["seed"], first["max_tokens"]) == (list(range(11, 19)), 1, 8)


# --- what an endpoint can do ------------------------------------------------------------------------------------------


def test_a_vllm_endpoint_with_processed_logprobs_is_trainable_but_frozen() -> None:
    with FaultyServer() as server:
        found = use(server, capabilities_of, tier="trainable")
    assert found == Capabilities(
        is_trainable=True,
        seeds_per_request=True,
        reuses_prefixes=False,
        max_model_len=MAX_MODEL_LEN,
        logprob_mode="processed",
        reports_versions=False,
        update_kinds=(),
        pause_modes=("wait",),
    )


def test_raw_logprobs_are_found_out_and_not_trained_on() -> None:
    with FaultyServer(logprobs="raw") as server:
        found = use(server, capabilities_of)
        assert (found.is_trainable, found.logprob_mode) == (False, "raw")
        with pytest.raises(EngineError, match=r"before temperature .*--logprobs-mode processed_logprobs"):
            use(server, capabilities_of, tier="trainable")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_logprobs_that_know_of_no_truncation_allow_none(dialect: Any) -> None:
    with FaultyServer(dialect=dialect, logprobs="scaled") as server:
        assert use(server, capabilities_of).is_trainable
        rule = hash_model.sample(PROMPT, seed=3, max_tokens=12, stop_token_ids=(STOP,), temperature=0.7)
        completion = ask(server, SamplingParams(max_tokens=12, stop_token_ids=(STOP,), seed=3, temperature=0.7))
        np.testing.assert_allclose(completion.logprobs, rule.scaled, atol=1e-6)
        for truncation in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
            with pytest.raises(ConfigError, match="not renormalised over what truncation leaves"):
                ask(server, SamplingParams(max_tokens=12, stop_token_ids=(STOP,), seed=3, **truncation))


def renormalised_but_of_temperature_1(answer: Json) -> Json:
    """As of a server that applies top_k to the logprobs that it reports, but not the temperature."""
    choice = answer["choices"][0]
    # The body is not at hand here; with two tokens left, a logprob at temperature 2 is what halves the difference.
    logprobs = choice["logprobs"]["token_logprobs"]
    if len(logprobs) == 1:
        logprobs[0] = -0.3
    return answer


def test_logprobs_that_follow_truncation_but_not_temperature_are_no_logprobs() -> None:
    with (
        FaultyServer(spoil=renormalised_but_of_temperature_1) as server,
        pytest.raises(EngineError, match="follow top_k but not the temperature"),
    ):
        use(server, capabilities_of)


def test_logprobs_that_grow_with_the_temperature_are_no_logprobs() -> None:
    number = iter(range(10**6))

    def spoil(answer: Json) -> Json:
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        answer["choices"][0]["logprobs"]["token_logprobs"] = [-5.0 + 0.1 * next(number)] * len(logprobs)
        return answer

    with (
        FaultyServer(spoil=spoil) as server,
        pytest.raises(EngineError, match="of no known distribution: the likeliest tokens have"),
    ):
        use(server, capabilities_of)


def test_an_endpoint_that_ignores_seeds_is_found_out() -> None:
    with FaultyServer(has_seeds=False) as server:
        found = use(server, capabilities_of)
    assert (found.seeds_per_request, found.is_trainable) == (False, True)


def test_an_endpoint_that_does_not_echo_the_prompt_is_not_trusted_with_tokens() -> None:
    def forget(answer: Json) -> Json:
        del answer["choices"][0]["prompt_token_ids"]
        return answer

    with FaultyServer(spoil=forget) as server, pytest.raises(EngineError, match="the prompt as the server read it"):
        use(server, capabilities_of)


def test_sglangs_own_route_is_found_beside_v1() -> None:
    async def route(engine: HttpEngine) -> str:
        return engine.route.name

    with FaultyServer(dialect="sglang", logprobs="scaled") as server:
        assert use(server, route, tier="trainable") == "SGLang's /generate"
        assert server.seen[-1].path == "/generate"


def test_a_context_of_unknown_length_must_be_given() -> None:
    with FaultyServer(dialect="text") as server, pytest.raises(ConfigError, match="does not say how long a context"):
        use(server, capabilities_of, TOKENIZER)


# --- text only --------------------------------------------------------------------------------------------------------


def test_an_endpoint_with_text_only_evaluates_but_does_not_train() -> None:
    first = hash_model.sample(PROMPT, seed=3, max_tokens=3).token_ids
    assert len(set(first)) == 3

    async def generate(engine: HttpEngine) -> tuple[Capabilities, Completion]:
        sampling = SamplingParams(max_tokens=40, stop_token_ids=(first[2],), seed=3)
        return engine.capabilities, await engine.generate(PROMPT, sampling)

    with FaultyServer(dialect="text") as server:
        found, completion = use(server, generate, TOKENIZER, max_model_len=100)
    assert (found.is_trainable, found.logprob_mode, found.seeds_per_request) == (False, "none", True)
    assert completion.token_ids.tolist() == first  # the stop token, which is not in the text, included
    assert completion.finish_reason is FinishReason.STOP
    assert not completion.logprobs.any()
    assert set(completion.weight_version.tolist()) == {-1}


def test_text_that_was_cut_off_stays_cut_off() -> None:
    with FaultyServer(dialect="text") as server:
        sampling = SamplingParams(max_tokens=4, stop_token_ids=(), seed=3)
        completion = use(
            server, lambda engine: engine.generate(PROMPT, sampling), TOKENIZER, max_model_len=100, tier="text"
        )
    assert completion.token_ids.tolist() == hash_model.sample(PROMPT, seed=3, max_tokens=4).token_ids
    assert completion.finish_reason is FinishReason.LENGTH


class MarkingTokenizer(hash_model.LetterTokenizer):
    """Its token 0, which is an A in text, is a special one: it can be left out."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        kept = [token for token in token_ids if token or not skip_special_tokens]
        return super().decode(kept, skip_special_tokens=skip_special_tokens)


def test_a_text_that_fills_the_limit_has_no_room_for_a_stop_and_keeps_its_special_tokens() -> None:
    def fill(answer: Json) -> Json:
        answer["choices"][0] |= {"text": "A" * 12, "finish_reason": "stop"}
        return answer

    with FaultyServer(dialect="text", spoil=fill) as server:
        completion = use(
            server, lambda engine: engine.generate(PROMPT, SAMPLING), MarkingTokenizer(), max_model_len=100, tier="text"
        )
    assert completion.token_ids.tolist() == [0] * 12
    assert completion.finish_reason is FinishReason.LENGTH


class ShoutingTokenizer(hash_model.LetterTokenizer):
    """Knows no lower case, as a tokenizer that normalises what it reads."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode(text.upper(), add_special_tokens=add_special_tokens)


def test_a_text_that_the_tokenizer_cannot_write_is_an_error_and_never_another_text() -> None:
    async def generate(engine: HttpEngine) -> None:
        server.spoil = lambda answer: said(answer, "ABC")
        assert (await engine.generate(PROMPT, SAMPLING)).token_ids.tolist()[:3] == [0, 1, 2]
        server.spoil = lambda answer: said(answer, "AbC")
        with pytest.raises(
            EngineError, match=r"a text that the policy's tokenizer can write, got 'AbC', .* 'ABC' \(2 "
        ):
            await engine.generate(PROMPT, SAMPLING)

    def said(answer: Json, text: str) -> Json:
        answer["choices"][0]["text"] = text
        return answer

    with FaultyServer(dialect="text", spoil=lambda answer: said(answer, "X")) as server:
        settings = {"max_model_len": 100, "tier": "text", "retries": RetrySettings(max_attempts=2)}
        use(server, generate, ShoutingTokenizer(), **settings)


def test_rescoring_must_be_asked_for_by_name() -> None:
    async def why_not(engine: HttpEngine) -> str | None:
        return engine.why_not_trainable

    with FaultyServer(dialect="text") as server:
        reason = use(server, why_not, TOKENIZER, max_model_len=100)
        assert "set rollout.rescore = true" in reason
        found = use(server, capabilities_of, TOKENIZER, max_model_len=100, rescore=True)
    assert (found.is_trainable, found.logprob_mode) == (True, "none")


def test_what_a_text_endpoint_has_no_field_for_is_refused_and_not_dropped() -> None:
    async def generate(engine: HttpEngine) -> None:
        for asked in ({"top_k": 4}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"min_tokens": 2}):
            sampling = SamplingParams(max_tokens=4, stop_token_ids=(STOP,), seed=0, **asked)
            with pytest.raises(ConfigError, match=f"leave {next(iter(asked))} at the default"):
                await engine.generate(PROMPT, sampling)

    with FaultyServer(dialect="text") as server:
        use(server, generate, TOKENIZER, max_model_len=100)


def test_an_endpoint_that_only_chats_is_refused_with_every_reason() -> None:
    with FaultyServer(dialect="chat") as server, pytest.raises(EngineError) as caught:
        use(server, capabilities_of, TOKENIZER)
    for route in ("/v1/completions with token ids", "SGLang's /generate", "/v1/completions with text"):
        assert f"{route}: " in str(caught.value)
    with FaultyServer(dialect="chat") as server, pytest.raises(ConfigError, match='tier "text" needs the tokenizer'):
        use(server, capabilities_of, tier="text")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def spoil_logprobs(value: Any) -> Callable[[Json], Json]:
    def spoil(answer: Json) -> Json:
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = value
        return answer

    return spoil


LONG = SamplingParams(max_tokens=12, stop_token_ids=(), seed=3)


def with_id(dialect: str, answer: Json, name: str) -> Json:
    """The answer under another request's name."""
    if dialect == "sglang":
        return answer | {"meta_info": answer["meta_info"] | {"id": name}}
    return answer | {"id": name}


def with_logprobs(dialect: str, answer: Json, change: Callable[[int, int, float], tuple[int, float]]) -> Json:
    """The answer with other (token, logprob) pairs: `change` is given their place, too."""
    if dialect == "sglang":
        rows = answer["meta_info"]["output_token_logprobs"]
        for place, (value, token, _) in enumerate(rows):
            rows[place] = [*reversed(change(place, token, value)), None]
        return answer
    choice = answer["choices"][0]
    pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    changed = [change(place, token, value) for place, (token, value) in enumerate(pairs)]
    choice["token_ids"] = [token for token, _ in changed]
    choice["logprobs"]["token_logprobs"] = [value for _, value in changed]
    return answer


def with_text(dialect: str, answer: Json) -> Json:
    """The answer with a text that goes on after its tokens."""
    if dialect == "sglang":
        return answer | {"text": answer["text"] + "  \n\n"}
    answer["choices"][0]["text"] += "  \n\n"
    return answer


def with_count(dialect: str, answer: Json) -> Json:
    """The answer of an endpoint that says it sampled 9 tokens."""
    if dialect == "sglang":
        return answer | {"meta_info": answer["meta_info"] | {"completion_tokens": 9}}
    return answer | {"usage": {"completion_tokens": 9}}


LIES: dict[str, tuple[Callable[[str, Json], Json], str]] = {
    "another request's id": (lambda d, a: with_id(d, a, "cmpl-0123456789abcdef-7-0"), "to another request"),
    "no id any more": (lambda d, a: with_id(d, a, "cmpl-1"), "to another request"),
    "no logprobs": (lambda d, a: with_logprobs(d, a, lambda _, token, __: (token, 0.0)), "12 sampled tokens are 0"),
    "pad tokens": (
        lambda d, a: with_logprobs(d, a, lambda place, *pair: (0, 0.0) if place >= 7 else pair),
        "padded: it ends in 5 tokens 0 whose logprobs are 0",
    ),
    "a text that goes on": (with_text, "padded: its text is"),
    "more tokens than were sampled": (with_count, "padded: 12 tokens, of which the endpoint says it sampled 9"),
}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_was_not_sampled_for_this_call_is_refused_and_asked_for_again(lie: str, dialect: Any) -> None:
    spoil, reason = LIES[lie]

    async def spoil_one_then_all(engine: HttpEngine) -> None:
        first = iter([True])
        server.spoil = lambda answer: spoil(dialect, answer) if next(first, False) else answer
        completion = await engine.generate(PROMPT, LONG)
        assert completion.token_ids.tolist() == hash_model.sample(PROMPT, seed=3, max_tokens=12).token_ids
        assert engine.counters.failures == {"answer": 1}
        server.spoil = lambda answer: spoil(dialect, answer)
        with pytest.raises(EngineError, match=reason):
            await engine.generate(PROMPT, LONG)

    with FaultyServer(dialect=dialect) as server:
        use(server, spoil_one_then_all, TOKENIZER, tier="trainable", retries=RetrySettings(max_attempts=2))


def test_of_two_calls_that_got_each_others_answers_neither_is_believed() -> None:
    """Same prompt, other seeds: nothing but the ids tells the answers apart."""

    async def swap(engine: HttpEngine) -> None:
        held: list[Json] = []

        def exchange(answer: Json) -> Json:
            held.append(dict(answer))
            return held[0] if len(held) == 2 else answer  # the second call gets the first one's

        first = await engine.generate(PROMPT, LONG)
        server.spoil = exchange
        await engine.generate(PROMPT, SamplingParams(max_tokens=12, stop_token_ids=(), seed=4))
        second = await engine.generate(PROMPT, SamplingParams(max_tokens=12, stop_token_ids=(), seed=5))
        assert engine.counters.failures == {"answer": 1}
        expected = [hash_model.sample(PROMPT, seed=seed, max_tokens=12).token_ids for seed in (3, 5)]
        assert [first.token_ids.tolist(), second.token_ids.tolist()] == expected

    with FaultyServer(dialect="sglang") as server:  # which does not echo the prompt either
        use(server, swap, tier="trainable")


def test_an_endpoint_with_ids_of_its_own_is_believed() -> None:
    number = iter(range(1000))
    with FaultyServer(spoil=lambda answer: with_id("vllm", answer, f"cmpl-{next(number)}")) as server:
        assert ask(server, LONG).token_ids.tolist() == hash_model.sample(PROMPT, seed=3, max_tokens=12).token_ids


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_logprobs_of_the_only_token_that_is_left_may_all_be_zero(asked: dict[str, Any]) -> None:
    with FaultyServer() as server:

        async def generate(engine: HttpEngine) -> Completion:
            server.spoil = lambda answer: with_logprobs("vllm", answer, lambda _, token, __: (token, 0.0))
            return await engine.generate(PROMPT, SamplingParams(max_tokens=12, stop_token_ids=(), seed=3, **asked))

        assert not use(server, generate).logprobs.any()


def test_zeros_are_believed_where_the_learners_logprobs_take_their_place() -> None:
    with FaultyServer() as server:

        async def generate(engine: HttpEngine) -> Completion:
            server.spoil = lambda answer: with_logprobs("vllm", answer, lambda _, token, __: (token, 0.0))
            return await engine.generate(PROMPT, LONG)

        assert not use(server, generate, rescore=True).logprobs.any()


def test_a_text_of_many_more_tokens_than_the_endpoint_sampled_is_padded() -> None:
    """Of 2 sampled tokens, 33 letters of the policy's tokenizer: more than 16 for each."""

    async def generate(engine: HttpEngine) -> None:
        server.spoil = lambda answer: answer | {"usage": {"completion_tokens": 2}, "choices": [choice_of(answer, 32)]}
        assert len((await engine.generate(PROMPT, sampling)).token_ids) == 32
        server.spoil = lambda answer: answer | {"usage": {"completion_tokens": 2}, "choices": [choice_of(answer, 33)]}
        with pytest.raises(EngineError, match="padded: a text of 33 tokens, of which the endpoint sampled 2"):
            await engine.generate(PROMPT, sampling)

    def choice_of(answer: Json, length: int) -> Json:
        choice: Json = answer["choices"][0] | {"text": "A" * length}
        return choice

    sampling = SamplingParams(max_tokens=64, stop_token_ids=(), seed=3)
    with FaultyServer(dialect="text") as server:
        use(server, generate, TOKENIZER, max_model_len=100, tier="text", retries=RetrySettings(max_attempts=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": []}, "expected one choice with a text"),
        ({"choices": [{"text": "A", "finish_reason": "length"}] * 2}, "expected one choice with a text"),
        ({"choices": {"text": "A", "finish_reason": "length"}}, "expected one choice with a text"),
        ({"choices": [{"finish_reason": "length"}]}, "expected one choice with a text"),
        ({"choices": [{"text": "A", "finish_reason": "abort"}]}, "expected finish reason .* got 'abort'"),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, "expected a text, got an empty one"),
    ],
)
def test_a_text_answer_that_is_no_sample_is_refused(change: Json, message: str) -> None:
    async def generate(engine: HttpEngine) -> None:
        await engine.generate(PROMPT, SAMPLING)
        body = server.seen[-1].body
        stop = TOKENIZER.decode([STOP], skip_special_tokens=False)
        assert (body["n"], body["max_tokens"], body["stop"]) == (1, 12, [stop])
        server.spoil = lambda answer: answer | change
        with pytest.raises(EngineError, match=message):
            await engine.generate(PROMPT, SAMPLING)

    with FaultyServer(dialect="text") as server:
        settings = {"max_model_len": 100, "tier": "text", "retries": RetrySettings(max_attempts=1)}
        use(server, generate, TOKENIZER, **settings)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.5, None, "x"])
def test_a_spoilt_answer_is_asked_for_again_and_never_returned(value: Any) -> None:
    async def spoil_two_then_all(engine: HttpEngine) -> None:
        spoil, num_left = spoil_logprobs(value), iter([True, True])
        server.spoil = lambda answer: spoil(answer) if next(num_left, False) else answer
        completion = await engine.generate(PROMPT, SAMPLING)
        assert np.isfinite(completion.logprobs).all()
        assert engine.counters.failures == {"answer": 2}
        server.spoil = spoil
        with pytest.raises(EngineError, match=r"\(3 attempts\)"):
            await engine.generate(PROMPT, SAMPLING)
        assert engine.counters.failures == {"answer": 5}

    with FaultyServer() as server:
        use(server, spoil_two_then_all, retries=RetrySettings(max_attempts=3))


def test_an_answer_to_another_prompt_is_never_returned() -> None:
    def swap(answer: Json) -> Json:
        answer["choices"][0]["prompt_token_ids"] = [9, 9, 9]
        return answer

    async def generate(engine: HttpEngine) -> None:
        server.spoil = swap
        with pytest.raises(EngineError, match="to another prompt"):
            await engine.generate(PROMPT, SAMPLING)

    with FaultyServer() as server:
        use(server, generate, retries=RetrySettings(max_attempts=2))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("500", "500"),
        ("502", "502"),
        ("429", "429"),
        ("reset_early", "connection"),
        ("reset_late", "connection"),
        ("cut_body", "connection"),
        ("truncated_json", "json"),
        ("content_type", "content"),
    ],
)
def test_each_fault_is_counted_by_its_kind_and_survived(fault: str, kind: str) -> None:
    async def generate(engine: HttpEngine) -> None:
        server.plan = FaultPlan({fault: 1.0})
        with pytest.raises(EngineError, match=r"\(4 attempts\)"):
            await engine.generate(PROMPT, SAMPLING)
        assert engine.counters.failures == {kind: 4}
        server.plan = FaultPlan()
        rule = hash_model.sample(PROMPT, seed=3, max_tokens=12, stop_token_ids=(STOP,))
        assert (await engine.generate(PROMPT, SAMPLING)).token_ids.tolist() == rule.token_ids

    with FaultyServer() as server:
        use(server, generate, retries=RetrySettings(max_attempts=4))


@pytest.mark.parametrize("fault", ["timeout", "slow_body"])
def test_a_request_that_was_accepted_and_not_answered_gives_one_sample_in_the_end(fault: str) -> None:
    async def run() -> None:
        async def mend(seconds: float) -> None:
            server.plan = FaultPlan()  # after the first failed attempt

        engine = await HttpEngine.start(HttpSettings(server.base_url, MODEL, timeout_seconds=2.0), sleep=mend)
        num_before = engine.counters.failures["timeout"]
        server.plan = FaultPlan({fault: 1.0})
        rule = hash_model.sample(PROMPT, seed=3, max_tokens=12, stop_token_ids=(STOP,))
        assert (await engine.generate(PROMPT, SAMPLING)).token_ids.tolist() == rule.token_ids
        await engine.close()
        key = server.seen[-1].headers["idempotency-key"]
        num_given_up = engine.counters.failures["timeout"] - num_before
        assert num_given_up >= 1  # and hardly ever more, on a busy machine
        assert server.num_samples[key] == num_given_up + 1  # made each time, under one key, and delivered once

    with FaultyServer() as server:
        asyncio.run(run())


def test_a_deadline_ends_a_call_that_hangs_and_hangs_up() -> None:
    async def generate(engine: HttpEngine) -> None:
        server.plan = FaultPlan({"timeout": 1.0})
        with pytest.raises(EngineTimeoutError, match=r"no completion within 0\.1 seconds"):
            await engine.generate(PROMPT, SAMPLING, deadline_seconds=0.1)
        assert (await engine.health()).num_in_flight == 0
        server.plan = FaultPlan()
        await engine.generate(PROMPT, SAMPLING)

    with FaultyServer() as server:
        use(server, generate)


def test_the_settings_deadline_holds_for_waits_between_attempts_too() -> None:
    async def run() -> None:
        settings = HttpSettings(server.base_url, MODEL, deadline_seconds=0.2)
        engine = await HttpEngine.start(settings)  # with the real clock
        server.plan = FaultPlan({"429": 1.0})
        with pytest.raises(EngineTimeoutError, match=r"no completion within 0\.2 seconds"):
            await engine.generate(PROMPT, SAMPLING)
        assert engine.counters.num_attempts == engine.counters.num_calls  # it was waiting, for 30 seconds
        await engine.close()

    with FaultyServer(retry_after="30") as server:
        asyncio.run(run())


@pytest.mark.parametrize("how", ["abort", "poison", "cancel"])
def test_a_call_in_flight_can_be_given_up(how: str) -> None:
    async def generate(engine: HttpEngine) -> None:
        server.plan = FaultPlan({"timeout": 1.0})
        task = asyncio.create_task(engine.generate(PROMPT, SAMPLING, session_id="a"))
        await asyncio.to_thread(server.is_hanging.wait)
        if how == "abort":
            await engine.abort("a")
        elif how == "poison":
            engine.poison("a test")
        else:
            task.cancel()
        errors = {"abort": EngineError, "poison": EnginePoisonedError, "cancel": asyncio.CancelledError}
        with pytest.raises(errors[how]):
            await task
        assert (await engine.health()).num_in_flight == 0

    with FaultyServer() as server:
        use(server, generate)


def test_nobody_listening_is_an_error_after_the_last_attempt() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        settings = HttpSettings(url, MODEL, retries=RetrySettings(max_attempts=3))
        with pytest.raises(EngineError, match=r"connection failed \(ConnectError\) \(3 attempts\)"):
            asyncio.run(HttpEngine.start(settings, sleep=no_sleep))


def test_a_closed_engine_answers_no_more() -> None:
    async def generate(engine: HttpEngine) -> None:
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.generate(PROMPT, SAMPLING)
        assert not (await engine.health()).is_alive

    with FaultyServer() as server:
        use(server, generate)


# --- keys, proxies, redirects -----------------------------------------------------------------------------------------


def test_the_key_goes_to_the_endpoint_and_into_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "sk-very-secret")
    with FaultyServer() as server:
        ask(server, api_key_env="TEST_KEY")
        assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer sk-very-secret"}
    with FaultyServer(FaultPlan({"401": 1.0})) as server, pytest.raises(EngineError) as caught:
        ask(server, api_key_env="TEST_KEY")
    error: BaseException | None = caught.value
    assert "HTTP 401: " in str(error)
    assert "wrong key: Bearer ***" in str(error)
    assert "sk-very-secret" not in str(error)


def test_a_key_that_is_not_set_is_an_error_and_no_other_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-somebody-elses")
    with FaultyServer() as server:
        with pytest.raises(ConfigError, match="expected a key in the variable TEST_KEY, it is not set"):
            ask(server, api_key_env="TEST_KEY")
        ask(server)
        assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer none"}


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with FaultyServer() as server:
        ask(server)


def test_redirects_are_refused_and_not_followed() -> None:
    with FaultyServer(FaultPlan({"307": 1.0})) as server, pytest.raises(EngineError, match="HTTP 307"):
        ask(server)
    assert not [seen for seen in server.seen if "elsewhere" in seen.path]


# --- weights and settings ---------------------------------------------------------------------------------------------


def test_the_last_token_of_a_vocabulary_is_sent_and_none_beyond_it() -> None:
    async def generate(engine: HttpEngine) -> None:
        assert len((await engine.generate([0, 63], SAMPLING)).token_ids) > 0
        for outside in (-1, 64):
            with pytest.raises(EngineError, match=rf"expected prompt tokens in \[0, 64\), got {outside}"):
                await engine.generate([1, outside], SAMPLING)
        with pytest.raises(ConfigError, match=r"HttpEngine cannot obey SamplingParams\.json_schema"):
            await engine.generate(PROMPT, replace(SAMPLING, json_schema="{}"))

    with FaultyServer() as server:
        use(server, generate)


def test_somebody_elses_weights_cannot_be_updated() -> None:
    async def update(engine: HttpEngine) -> None:
        await engine.pause("wait")
        with pytest.raises(ConfigError, match="is a frozen policy, whose weights cannot become version 1"):
            await engine.apply_weights(WeightUpdate(1, "shared"))
        assert await engine.checksums() == {}
        await engine.resume(0)
        await engine.generate(PROMPT, SAMPLING)
        with pytest.raises(ConfigError, match="expected mode 'wait', got 'keep'"):
            await engine.pause("keep")

    with FaultyServer() as server:
        use(server, update)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, r"expected http\(s\)://HOST"),
        ({"base_url": "ftp://host/v1"}, r"expected http\(s\)://HOST"),
        ({"base_url": "http://user:secret@host/v1"}, "expected no user or password in it"),
        ({"model": ""}, "expected a model's name"),
        ({"timeout_seconds": 0.0}, "expected timeout_seconds > 0"),
        ({"deadline_seconds": math.nan}, "expected timeout_seconds > 0 and deadline_seconds > 0"),
        ({"max_model_len": 1}, "expected max_model_len >= 2"),
        ({"vocab_size": 0}, "vocab_size >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HttpSettings(**({"base_url": "http://127.0.0.1:1/v1", "model": "m"} | wrong))
    assert "secret" not in str(caught.value)
