"""The contract's clauses about what is sampled: lengths, ends, logprobs, seeds, every sampling setting, sessions."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine_contract import (
    Clause,
    Subject,
    assert_logprobs,
    distribution,
    entering,
    expected_logprobs,
    prompt,
    sampling,
)

from gspo_gym.engine.base import SamplingParams
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError
from gspo_gym.types import Completion, FinishReason

HALF = tuple(range(0, 64, 2))


CLAUSES: list[Clause] = []
clause = entering(CLAUSES)


@clause()
async def a_completion_has_max_tokens_if_nothing_ends_it_before(subject: Subject) -> None:
    completion = await subject.engine.generate(prompt(0, 9), sampling(max_tokens=7))
    assert len(completion.token_ids) == 7
    assert completion.finish_reason is FinishReason.LENGTH


@clause()
async def max_tokens_of_one_gives_one_token(subject: Subject) -> None:
    completion = await subject.engine.generate(prompt(0, 9), sampling(max_tokens=1))
    assert (len(completion.token_ids), completion.finish_reason) == (1, FinishReason.LENGTH)


@clause("is_trainable")
async def a_stop_token_ends_the_completion_and_is_its_last_token(subject: Subject) -> None:
    params = sampling(max_tokens=100, stop_token_ids=tuple(range(0, subject.vocab_size, 2)))  # the hundredth of 2**-100
    completion = await subject.engine.generate(prompt(1, 5), params)
    *before, last = completion.token_ids.tolist()
    assert last % 2 == 0
    assert all(token % 2 == 1 for token in before)
    assert completion.finish_reason is FinishReason.STOP


@clause("seeds_per_request")
async def a_stop_token_cuts_what_would_have_been_sampled_without_it(subject: Subject) -> None:
    free = await subject.engine.generate(prompt(1, 5), sampling(3, 20))
    tokens = free.token_ids.tolist()
    cut = await subject.engine.generate(prompt(1, 5), sampling(3, 20, stop_token_ids=(tokens[6],)))
    assert cut.token_ids.tolist() == tokens[: tokens.index(tokens[6]) + 1]
    assert cut.finish_reason is FinishReason.STOP


@clause("is_trainable")
async def a_stop_token_in_the_last_place_counts_as_stop_and_not_as_length(subject: Subject) -> None:
    params = sampling(max_tokens=1, stop_token_ids=tuple(range(subject.vocab_size)))
    completion = await subject.engine.generate(prompt(1, 5), params)
    assert completion.finish_reason is FinishReason.STOP


@clause()
async def a_completion_ends_where_the_context_does(subject: Subject) -> None:
    completion = await subject.engine.generate(prompt(0, subject.max_model_len - 3), sampling(max_tokens=50))
    assert (len(completion.token_ids), completion.finish_reason) == (3, FinishReason.LENGTH)


@clause()
async def a_schema_is_obeyed_or_refused_and_never_ignored(subject: Subject) -> None:
    params = sampling(max_tokens=4, json_schema='{"type": "integer"}')
    if not subject.engine.capabilities.structured_output:
        with pytest.raises(ConfigError, match="json_schema"):
            await subject.engine.generate(prompt(0, 9), params)


@clause()
async def a_prompt_without_room_is_an_overflow(subject: Subject) -> None:
    for length in (subject.max_model_len, subject.max_model_len + 1):
        with pytest.raises(ContextOverflowError, match=f"{length} tokens leaves no room"):
            await subject.engine.generate(prompt(0, length), sampling())
    assert (await subject.engine.health()).num_in_flight == 0


@clause()
async def an_empty_prompt_is_an_error(subject: Subject) -> None:
    with pytest.raises(EngineError, match="at least one token"):
        await subject.engine.generate([], sampling())


@clause("a model", "is_trainable")
async def a_prompt_token_outside_the_vocabulary_is_an_error(subject: Subject) -> None:
    for token in (-1, 1 << 20):
        with pytest.raises(EngineError):
            await subject.engine.generate([1, token], sampling())
    assert len((await subject.engine.generate([1, 2], sampling())).token_ids) == 12


@clause()
async def ids_are_in_the_vocabulary_and_each_has_one_finite_logprob(subject: Subject) -> None:
    completions = await asyncio.gather(*(subject.engine.generate(prompt(2, 4), sampling(k, 20)) for k in range(4)))
    for completion in completions:
        assert completion.token_ids.dtype == np.int32
        assert ((completion.token_ids >= 0) & (completion.token_ids < subject.vocab_size)).all()
        assert completion.logprobs.shape == completion.token_ids.shape == completion.weight_version.shape
        assert np.isfinite(completion.logprobs).all()
        assert (completion.logprobs <= 1e-6).all()


@clause("a model", "is_trainable")
async def logprobs_are_those_of_a_plain_forward(subject: Subject) -> None:
    for seed, length in ((1, 3), (2, 17), (3, 100)):
        completion = await subject.engine.generate(prompt(seed, length), sampling(seed, 25))
        assert_logprobs(subject, prompt(seed, length), completion, sampling(seed, 25))


@clause("a model")
async def greedy_takes_the_likeliest_token_and_reports_its_logprob_at_temperature_one(subject: Subject) -> None:
    params = sampling(max_tokens=10, temperature=0.0)
    completion = await subject.engine.generate(prompt(4, 9), params)
    tokens = completion.token_ids.tolist()
    assert subject.logits is not None
    assert subject.logits([*prompt(4, 9), *tokens])[8:-1].argmax(-1).tolist() == tokens
    if subject.engine.capabilities.is_trainable:
        assert_logprobs(subject, prompt(4, 9), completion, params)


@clause()
async def greedy_does_not_depend_on_the_seed(subject: Subject) -> None:
    completions = [await subject.engine.generate(prompt(4, 9), sampling(seed, temperature=0.0)) for seed in (1, 2)]
    assert completions[0].token_ids.tolist() == completions[1].token_ids.tolist()


@clause("seeds_per_request")
async def the_same_seed_gives_the_same_tokens(subject: Subject) -> None:
    for seed in (0, 1, 2**63 - 1):
        first, second = [await subject.engine.generate(prompt(5, 8), sampling(seed, 30)) for _ in range(2)]
        assert first.token_ids.tolist() == second.token_ids.tolist()


@clause("seeds_per_request")
async def other_seeds_give_other_tokens(subject: Subject) -> None:
    completions = [await subject.engine.generate(prompt(5, 8), sampling(seed, 20)) for seed in range(8)]
    assert len({tuple(completion.token_ids.tolist()) for completion in completions}) == 8


@clause("seeds_per_request")
async def a_seed_decides_the_tokens_whatever_else_is_sampled(subject: Subject) -> None:
    alone = await subject.engine.generate(prompt(6, 21), sampling(77, 40))
    crowd = [asyncio.create_task(subject.engine.generate(prompt(k, 5 + k), sampling(k, 10 + 3 * k))) for k in range(12)]
    crowded = await subject.engine.generate(prompt(6, 21), sampling(77, 40))
    await asyncio.gather(*crowd)
    assert crowded.token_ids.tolist() == alone.token_ids.tolist()


@clause("seeds_per_request")
async def a_longer_limit_extends_the_same_tokens(subject: Subject) -> None:
    short, long = [await subject.engine.generate(prompt(7, 6), sampling(4, length)) for length in (5, 20)]
    assert long.token_ids[:5].tolist() == short.token_ids.tolist()


async def _obeys(subject: Subject, **fields: float | int | tuple[int, ...]) -> list[Completion]:
    """Eight completions whose logprobs are exactly those of the distribution that these settings leave."""
    params = [SamplingParams(**{**_PLAIN, **fields, "seed": seed}) for seed in range(8)]  # type: ignore[arg-type]
    completions = await asyncio.gather(*(subject.engine.generate(prompt(8, 12), each) for each in params))
    for completion, each in zip(completions, params, strict=True):
        assert_logprobs(subject, prompt(8, 12), completion, each)
    return completions


_PLAIN: dict[str, object] = {"max_tokens": 10, "stop_token_ids": ()}


@clause("a model", "is_trainable")
async def temperature_is_obeyed(subject: Subject) -> None:
    for temperature in (0.3, 0.7, 1.7):
        await _obeys(subject, temperature=temperature)


@clause("a model", "is_trainable")
async def top_k_is_obeyed(subject: Subject) -> None:
    for top_k in (1, 5, 50):
        await _obeys(subject, top_k=top_k)


@clause("a model", "is_trainable")
async def top_p_is_obeyed(subject: Subject) -> None:
    for top_p in (0.05, 0.5, 0.9):
        await _obeys(subject, top_p=top_p)


@clause("a model", "is_trainable")
async def min_p_is_obeyed(subject: Subject) -> None:
    for min_p in (0.1, 0.6):
        await _obeys(subject, min_p=min_p)


@clause("a model", "is_trainable", "repetition_penalty")
async def repetition_penalty_is_obeyed_over_the_prompt_and_what_was_sampled(subject: Subject) -> None:
    for penalty in (0.6, 1.5):
        await _obeys(subject, repetition_penalty=penalty)
    for completion in await _obeys(subject, repetition_penalty=1e6, temperature=0.0):  # as good as forbidden
        assert len({*prompt(8, 12), *completion.token_ids.tolist()}) == len({*prompt(8, 12)}) + 10


@clause("a model", "is_trainable")
async def no_stop_token_is_among_the_first_min_tokens(subject: Subject) -> None:
    stops = tuple(range(0, subject.vocab_size, 2))
    for completion in await _obeys(subject, max_tokens=30, min_tokens=5, stop_token_ids=stops):
        tokens = completion.token_ids.tolist()
        assert len(tokens) > 5
        assert all(token % 2 == 1 for token in tokens[:-1])


@clause("a model", "is_trainable", "repetition_penalty")
async def all_settings_together_act_in_the_order_that_is_documented(subject: Subject) -> None:
    await _obeys(
        subject,
        min_tokens=3,
        stop_token_ids=HALF,
        repetition_penalty=1.3,
        temperature=0.8,
        min_p=0.02,
        top_k=40,
        top_p=0.8,
    )


@clause("a model", "is_trainable", "seeds_per_request")
async def draws_follow_the_distribution(subject: Subject) -> None:
    """Pearson's chi-squared over 512 draws of one token from four; 30.7 is the 1 - 1e-6 quantile for 3 degrees."""
    params = [sampling(seed, 1, top_k=4) for seed in range(512)]
    completions = await asyncio.gather(*(subject.engine.generate(prompt(9, 10), each) for each in params))
    assert subject.logits is not None
    row = distribution(subject.logits(prompt(9, 10))[-1], set(), 0, params[0])
    expected = {int(token): 512 * float(np.exp(row[token])) for token in np.flatnonzero(np.isfinite(row))}
    drawn = [int(completion.token_ids[0]) for completion in completions]
    assert set(drawn) <= set(expected)
    assert sum((drawn.count(token) - mean) ** 2 / mean for token, mean in expected.items()) < 30.7


async def _turns(subject: Subject, session_id: str | None, index: int = 0) -> list[tuple[list[int], Completion]]:
    """Three turns that extend each other: prompts and completions."""
    history, played = prompt(100 + index // 4, 20), []
    for turn in range(3):
        params = sampling(10 * index + turn, 4 + (index + turn) % 5)
        completion = await subject.engine.generate(history, params, session_id=session_id)
        played.append((history, completion))
        history = [*history, *completion.token_ids.tolist(), *prompt(200 + turn, 3 + turn)]
    return played


@clause("seeds_per_request")
async def a_session_never_changes_the_result(subject: Subject) -> None:
    named, nameless = [await _turns(subject, session_id) for session_id in ("kept", None)]
    assert [c.token_ids.tolist() for _, c in named] == [c.token_ids.tolist() for _, c in nameless]
    for (_, first), (_, second) in zip(named, nameless, strict=True):
        np.testing.assert_allclose(first.logprobs, second.logprobs, rtol=0, atol=1e-4)
    await subject.engine.end_session("kept")


@clause("a model", "is_trainable")
async def a_session_whose_history_was_rewritten_is_sampled_from_what_it_says_now(subject: Subject) -> None:
    history = prompt(10, 40)
    await subject.engine.generate(history, sampling(), session_id="rewritten")
    for changed in ([*history[:25], 7, *history[26:]], history[:10], history):
        completion = await subject.engine.generate(changed, sampling(), session_id="rewritten")
        assert_logprobs(subject, changed, completion, sampling())


@clause()
async def ending_or_aborting_an_unknown_session_is_fine(subject: Subject) -> None:
    await subject.engine.end_session("nobody")
    await subject.engine.abort("nobody")
    await subject.engine.generate(prompt(0, 4), sampling(), session_id="known")
    for _ in range(2):
        await subject.engine.end_session("known")
    assert len((await subject.engine.generate(prompt(0, 4), sampling(), session_id="known")).token_ids) == 12


@clause()
async def more_prompt_tokens_than_fit_into_one_step_are_read_all_the_same(subject: Subject) -> None:
    length = subject.max_model_len - 12
    completions = await asyncio.gather(
        *(subject.engine.generate(prompt(300 + k, length - k), sampling(k)) for k in range(24))
    )
    assert [len(completion.token_ids) for completion in completions] == [12] * 24
    if subject.logits is not None and subject.engine.capabilities.is_trainable:
        for k in (0, 23):
            assert_logprobs(subject, prompt(300 + k, length - k), completions[k], sampling(k))


@clause()
async def sixty_four_episodes_at_once_are_all_answered_and_none_is_mixed_up(subject: Subject) -> None:
    episodes = await asyncio.gather(*(_turns(subject, f"episode-{k}", k) for k in range(64)))
    for index, turns in enumerate(episodes):
        assert [len(c.token_ids) for _, c in turns] == [4 + (index + turn) % 5 for turn in range(3)]
        if subject.logits is not None and subject.engine.capabilities.is_trainable:
            history, last = turns[-1]
            params = sampling()
            np.testing.assert_allclose(
                last.logprobs, expected_logprobs(subject, history, last.token_ids.tolist(), params), rtol=0, atol=1e-4
            )
    assert (await subject.engine.health()).num_in_flight == 0
