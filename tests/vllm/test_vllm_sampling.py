"""vLLM in process: what it samples is what `SamplingParams` says, and the logprobs are of just that."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from agreement import plain_logprobs

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError
from gspo_gym.policy.load import Policy
from gspo_gym.types import Completion, FinishReason

TOLERANCE = 1e-4  # nats, in float32


def sampled(completion: Completion) -> list[int]:
    return [int(token) for token in completion.token_ids]


def test_a_seed_decides_the_sample_alone_and_among_others(full_engine: VllmEngine, loop_thread: Any) -> None:
    async def sample(seeds: list[int]) -> list[tuple[int, ...]]:
        calls = [
            full_engine.generate([72, 105], SamplingParams(max_tokens=12, stop_token_ids=(), seed=seed))
            for seed in seeds
        ]
        return [tuple(sampled(completion)) for completion in await asyncio.gather(*calls)]

    # torch's generator on the CPU takes the low 32 bits of a seed, so these differ there.
    seeds = [3, 2**63 - 1, 2**62 + 7, 0, *range(100, 120)]
    together = loop_thread.run(sample(seeds))
    assert [loop_thread.run(sample([seed]))[0] for seed in seeds[:4]] == together[:4]
    assert len(set(together)) == len(seeds)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_ids_that_the_tokenizer_does_not_have_are_never_sampled(
    full_engine: VllmEngine, policy: Policy, loop_thread: Any, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    num_ids = 100  # as if the others were rows that fill the vocabulary up
    sampling = SamplingParams(max_tokens=60, stop_token_ids=(), seed=3, temperature=temperature)
    if temperature:
        assert max(sampled(loop_thread.run(full_engine.generate([72, 105], sampling)))) >= num_ids
    monkeypatch.setattr(full_engine, "_padding_ids", range(num_ids, full_engine._vocab_size))
    completion = loop_thread.run(full_engine.generate([72, 105], sampling))
    assert max(sampled(completion)) < num_ids
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[72, 105, *sampled(completion)]])).logits[0, 1:-1, :num_ids]
    expected = logits.double().log_softmax(-1).gather(-1, torch.tensor(sampled(completion))[:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=TOLERANCE)


def processed(logits: torch.Tensor, seen: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Logprobs of the distribution that `SamplingParams` describe, from the [V] logits of one position."""
    logits = logits.double().clone()
    for token in set(seen):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits = logits / (sampling.temperature or 1.0)
    probs = torch.softmax(logits, dim=-1)
    kept = probs >= sampling.min_p * probs.max()
    if sampling.top_k:
        order = torch.argsort(probs.where(kept, 0.0), descending=True)
        kept[order[sampling.top_k :]] = False
    probs = probs.where(kept, 0.0) / probs.where(kept, 0.0).sum()
    order = torch.argsort(probs, descending=True)
    before = torch.cumsum(probs[order], 0) - probs[order]
    kept[order[before >= sampling.top_p]] = False
    return torch.log(probs.where(kept, 0.0) / probs.where(kept, 0.0).sum())


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"top_p": 0.6},
        {"top_k": 5},
        {"min_p": 0.6},
        {"repetition_penalty": 1.3},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.2, "repetition_penalty": 0.9},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_logprobs_are_those_of_the_sampling_distribution_renormalised(
    full_engine: VllmEngine, model: Any, loop_thread: Any, changes: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_tokens=24, stop_token_ids=(), seed=11, **changes)
    prompt = [72, 105, 32, 72]
    completion = loop_thread.run(full_engine.generate(prompt, sampling))
    tokens = [*prompt, *sampled(completion)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    expected = [
        float(processed(logits[end - 1], tokens[:end], sampling)[tokens[end]])
        for end in range(len(prompt), len(tokens))
    ]
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    untruncated = plain_logprobs(model, prompt, sampled(completion))
    assert np.abs(completion.logprobs - untruncated).max() > 0.01  # it did change the distribution


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_one(
    full_engine: VllmEngine, model: Any, loop_thread: Any
) -> None:
    greedy = SamplingParams(max_tokens=8, stop_token_ids=(), seed=0, temperature=0, top_p=0.5, top_k=1)
    random = SamplingParams(max_tokens=8, stop_token_ids=(), seed=1)

    async def side_by_side() -> list[Completion]:  # vLLM treats a batch of greedy requests alone in another way
        return list(await asyncio.gather(full_engine.generate([72, 105], greedy), full_engine.generate([9], random)))

    for completion in (loop_thread.run(full_engine.generate([72, 105], greedy)), loop_thread.run(side_by_side())[0]):
        tokens = [72, 105, *sampled(completion)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
        assert tokens[2:] == logits[1:-1].argmax(-1).tolist()
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, [72, 105], tokens[2:]), atol=TOLERANCE)


def test_a_stop_token_ends_the_completion_as_its_last_token_but_not_before_min_tokens(
    full_engine: VllmEngine, loop_thread: Any
) -> None:
    stops = tuple(range(100))  # about a third of all tokens

    async def sample(min_tokens: int) -> list[Completion]:
        calls = [
            full_engine.generate(
                [72], SamplingParams(max_tokens=40, stop_token_ids=stops, seed=seed, min_tokens=min_tokens)
            )
            for seed in range(16)
        ]
        return list(await asyncio.gather(*calls))

    for min_tokens in (0, 5):
        for completion in loop_thread.run(sample(min_tokens)):
            tokens = sampled(completion)
            ends = [position for position, token in enumerate(tokens) if token in stops]
            assert completion.finish_reason is FinishReason.STOP
            assert ends == [len(tokens) - 1]
            assert len(tokens) > min_tokens


def test_the_models_own_end_tokens_end_nothing_and_are_not_withheld(
    full_engine: VllmEngine, policy: Policy, loop_thread: Any
) -> None:
    """Of 64 x 64 nearly uniform draws out of some 300 tokens about 13 are the end token, were it not withheld."""
    end = policy.tokenizer.eos_token_id

    async def sample() -> list[Completion]:
        calls = [
            full_engine.generate([72], SamplingParams(max_tokens=64, stop_token_ids=(), seed=seed, min_tokens=64))
            for seed in range(64)
        ]
        return list(await asyncio.gather(*calls))

    completions = loop_thread.run(sample())
    assert all(len(completion.token_ids) == 64 for completion in completions)
    assert any(end in completion.token_ids for completion in completions)


def test_the_context_ends_a_completion_and_refuses_a_prompt_that_fills_it(
    full_engine: VllmEngine, loop_thread: Any
) -> None:
    limit = full_engine.capabilities.max_model_len
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(), seed=0, min_tokens=8)
    completion = loop_thread.run(full_engine.generate([7] * (limit - 2), sampling))
    assert (len(completion.token_ids), completion.finish_reason) == (2, FinishReason.LENGTH)
    with pytest.raises(ContextOverflowError, match=f"context of {limit}"):
        loop_thread.run(full_engine.generate([7] * limit, sampling))


def test_what_vllm_cannot_sample_is_refused(full_engine: VllmEngine, loop_thread: Any) -> None:
    for temperature in (0.001, 2.5):  # vLLM would sample the first at 0.01
        with pytest.raises(ConfigError, match=r"SamplingParams\.temperature"):
            loop_thread.run(
                full_engine.generate(
                    [7], SamplingParams(max_tokens=1, stop_token_ids=(), seed=0, temperature=temperature)
                )
            )
    with pytest.raises(EngineError, match="prompt tokens must be in"):
        loop_thread.run(full_engine.generate([7, 10**6], SamplingParams(max_tokens=1, stop_token_ids=(), seed=0)))
