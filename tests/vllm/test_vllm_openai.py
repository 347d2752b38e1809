"""Somebody else's vLLM server, through the engine for any OpenAI-compatible endpoint: it is asked what it can do.

One server with logprobs of the sampling distribution, and one with vLLM's own default, before the temperature.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agreement import play_many, worst_gap

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.http import HttpEngine, HttpSettings
from gspo_gym.errors import EngineError, EngineTimeoutError
from gspo_gym.policy.load import Policy

TOLERANCE = 1e-4  # nats, in float32


def test_a_vllm_server_is_found_trainable_and_its_logprobs_are_those_of_a_plain_forward(
    text_url: str, policy: Policy
) -> None:
    async def play() -> float:
        vocab_size = policy.model.config.vocab_size
        asked = HttpSettings(text_url, "policy", tier="trainable", vocab_size=vocab_size)
        engine = await HttpEngine.start(asked)
        found = engine.capabilities
        assert (found.is_trainable, found.seeds_per_request, found.logprob_mode) == (True, True, "processed")
        assert (found.max_model_len, found.update_kinds) == (4096, ())
        turns = await play_many(engine, range(8))
        await engine.close()
        return worst_gap(policy.model, turns)

    gap = asyncio.run(play())
    print(f"\nworst gap {gap:.1e}")
    assert gap <= TOLERANCE


def test_a_call_that_is_out_of_time_is_given_up_and_the_server_goes_on(text_url: str) -> None:
    async def play() -> None:
        engine = await HttpEngine.start(HttpSettings(text_url, "policy"))
        long = SamplingParams(max_tokens=500, stop_token_ids=(), seed=1)
        with pytest.raises(EngineTimeoutError):
            await engine.generate([1, 2, 3], long, deadline_seconds=0.05)
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, stop_token_ids=(), seed=1))
        assert len(completion.token_ids) == 4
        await engine.close()

    asyncio.run(play())


@pytest.mark.nightly
def test_a_server_with_raw_logprobs_is_found_out_before_the_first_sample(raw_url: str) -> None:
    async def start(tier: Any) -> HttpEngine:
        return await HttpEngine.start(HttpSettings(raw_url, "policy", tier=tier))

    async def evaluate() -> tuple[bool, str]:
        engine = await start("auto")
        await engine.close()
        return engine.capabilities.is_trainable, engine.capabilities.logprob_mode

    with pytest.raises(EngineError, match="start vLLM with --logprobs-mode processed_logprobs"):
        asyncio.run(start("trainable"))
    assert asyncio.run(evaluate()) == (False, "raw")
