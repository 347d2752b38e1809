"""The sampling settings that look at what was said: exact on both ways of running a model, alone and in a crowd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.policy.load import load_policy
from gspo_gym.types import Completion, FinishReason

STOPS = tuple(range(0, 64, 2))  # half of the vocabulary, so that a completion would soon end
PROMPT = [5, 9, 5, 33, 41, 7]
PLAIN = SamplingParams(max_tokens=12, stop_token_ids=(), seed=3)


def _falcon() -> Any:
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return transformers.FalconForCausalLM(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"packed": lambda: load_policy("tiny:qwen3-64").model, "general": _falcon}


def _sample(path: str, sampling: SamplingParams) -> tuple[Any, Completion]:
    """The model and a completion that was sampled among others which ask for something else."""
    model = MODELS[path]()

    async def main() -> Completion:
        engine = LocalEngine(model, max_model_len=64)
        assert engine.path.name == path
        others = [PLAIN, replace(PLAIN, repetition_penalty=1.7), replace(PLAIN, stop_token_ids=STOPS, min_tokens=2)]
        mine, *_ = await asyncio.gather(*(engine.generate(PROMPT, params) for params in (sampling, *others)))
        alone = await engine.generate(PROMPT, sampling)
        assert alone.token_ids.tolist() == mine.token_ids.tolist()
        await engine.close()
        return mine

    return model, asyncio.run(main())


def _logits(model: Any, history: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([history])).logits[0, -1].double()
    return logits


@pytest.mark.parametrize("path", MODELS)
def test_repetition_is_penalised_over_the_prompt_and_what_was_sampled(path: str) -> None:
    model, completion = _sample(path, replace(PLAIN, repetition_penalty=1.5, temperature=0.5))
    history = list(PROMPT)
    for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
        logits = _logits(model, history)
        for said in set(history):
            logits[said] = logits[said] / 1.5 if logits[said] > 0 else logits[said] * 1.5
        expected = (logits / 0.5).log_softmax(-1)[token].item()
        assert logprob == pytest.approx(expected, abs=1e-5)  # float32 rounding; measured 1e-6
        history.append(token)


@pytest.mark.parametrize("path", MODELS)
def test_stop_tokens_cannot_be_sampled_before_the_least_number_of_tokens(path: str) -> None:
    model, completion = _sample(path, replace(PLAIN, stop_token_ids=STOPS, min_tokens=5))
    tokens = completion.token_ids.tolist()
    assert len(tokens) > 5
    assert not set(tokens[:5]) & set(STOPS)
    history = list(PROMPT)
    for index, (token, logprob) in enumerate(zip(tokens, completion.logprobs.tolist(), strict=True)):
        logits = _logits(model, history)
        if index < 5:
            logits[list(STOPS)] = float("-inf")
        assert logprob == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-5)
        history.append(token)


@pytest.mark.parametrize("path", MODELS)
def test_without_a_least_number_the_first_stop_token_ends_it(path: str) -> None:
    _, completion = _sample(path, replace(PLAIN, stop_token_ids=tuple(range(64)), max_tokens=64))
    within = [token < 64 for token in completion.token_ids.tolist()]
    assert within == [False] * (len(within) - 1) + [True]
    assert completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("path", MODELS)
def test_min_p_is_exact(path: str) -> None:
    model, completion = _sample(path, replace(PLAIN, min_p=0.9))
    history = list(PROMPT)
    for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
        probs = _logits(model, history).softmax(-1)
        kept = probs[probs >= 0.9 * probs.max()]
        assert probs[token] >= 0.9 * probs.max()
        assert logprob == pytest.approx(np.log(probs[token].item() / kept.sum().item()), abs=1e-5)
        history.append(token)
