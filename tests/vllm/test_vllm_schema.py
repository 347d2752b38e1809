"""vLLM in process obeys a JSON schema, and its logprobs are of the distribution that the schema left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from gspo_gym.engine.base import SamplingParams
from gspo_gym.errors import ConfigError
from gspo_gym.policy.load import Policy
from gspo_gym.types import Completion, FinishReason

COLOURS = ["red", "green", "blue"]
SCHEMA = json.dumps({"enum": COLOURS})


def schema_params(policy: Policy, seed: int) -> SamplingParams:
    stops = (int(policy.tokenizer.eos_token_id),)
    return SamplingParams(max_tokens=24, stop_token_ids=stops, seed=seed, json_schema=SCHEMA)


def test_a_schema_is_obeyed_and_leaves_the_other_calls_alone(
    start_engine: Any, policy: Policy, loop_thread: Any
) -> None:
    engine = start_engine(structured_output=True)
    assert engine.capabilities.structured_output
    plain = SamplingParams(max_tokens=8, stop_token_ids=(), seed=1)

    async def sample() -> list[Completion]:
        obeying = [engine.generate([72, 105], schema_params(policy, seed)) for seed in range(16)]
        return await asyncio.gather(*obeying, engine.generate([72, 105], plain))

    *obeying, free = loop_thread.run(sample())
    texts = [policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in obeying]
    assert {json.loads(text) for text in texts} <= set(COLOURS)
    assert len(set(texts)) > 1
    for completion in obeying:
        assert completion.finish_reason is FinishReason.STOP
        # Of a byte tokenizer's 263 ids at most a few are allowed: behind the first letter there is one way on.
        assert np.allclose(completion.logprobs[2:-1], 0.0, atol=1e-4)
    alone = loop_thread.run(engine.generate([72, 105], plain))
    assert free.token_ids.tolist() == alone.token_ids.tolist()
    with pytest.raises(ConfigError, match="min_tokens"):
        loop_thread.run(engine.generate([1], SamplingParams(max_tokens=4, stop_token_ids=(), seed=0, min_tokens=1)))


def test_a_schema_is_refused_by_an_engine_without_a_tokenizer(
    full_engine: Any, policy: Policy, loop_thread: Any
) -> None:
    assert not full_engine.capabilities.structured_output
    with pytest.raises(ConfigError, match="structured_output"):
        loop_thread.run(full_engine.generate([72], schema_params(policy, 0)))
