"""vLLM in process with LoRA updates: immutable versions, each in use until its last call has ended."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import Turn, nudge, plain_logprobs, play_many, publish, worst_gap

from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy
from gspo_gym.types import Completion

TOLERANCE = 1e-4  # nats, in float32

Save = Callable[[Policy], WeightUpdate]


@pytest.fixture
def adapted() -> Policy:
    """The tiny policy with an adapter of rank 4 that changes nothing yet."""
    return adapt_policy(load_policy("tiny:qwen3-64", seed=1), LoraSettings(r=4, alpha=8), seed=0)


@pytest.fixture
def save(adapter_engine: VllmEngine, tmp_path: Path) -> Save:
    """`save(policy)` stages its adapter as the engine's next version."""

    def stage(policy: Policy) -> WeightUpdate:
        version = adapter_engine.weight_version + 1
        save_policy(policy, tmp_path / f"policy-v{version}")
        return WeightUpdate(version, "adapter", tmp_path / f"policy-v{version}")

    return stage


def test_logprobs_agree_with_a_plain_forward_after_each_adapter(
    adapter_engine: VllmEngine, adapted: Policy, save: Save, loop_thread: Any
) -> None:
    gaps = []
    for number in range(4):
        before = loop_thread.run(play_many(adapter_engine, range(3)))
        nudge(adapted.model, number, scale=0.05)
        update = save(adapted)
        loop_thread.run(publish(adapter_engine, update))
        turns = loop_thread.run(play_many(adapter_engine, range(3)))
        assert all((turn.completion.weight_version == update.version).all() for turn in turns)
        gaps.append(worst_gap(adapted.model, turns))
        assert worst_gap(adapted.model, before) > 10 * TOLERANCE  # another adapter would be seen
    print(f"largest difference: {max(gaps):.2e} nats")
    assert max(gaps) <= TOLERANCE


def test_calls_in_flight_end_with_the_adapter_that_they_began_with_which_is_then_removed(
    adapter_engine: VllmEngine, adapted: Policy, save: Save, loop_thread: Any
) -> None:
    nudge(adapted.model, 1, scale=0.05)
    loop_thread.run(publish(adapter_engine, save(adapted)))
    old = copy.deepcopy(adapted.model)
    nudge(adapted.model, 2, scale=0.05)
    update = save(adapted)

    async def update_in_flight() -> tuple[Completion, Completion]:
        long = SamplingParams(max_tokens=400, stop_token_ids=(), seed=0)
        call = asyncio.create_task(adapter_engine.generate([72], long))
        await adapter_engine.generate([72], SamplingParams(max_tokens=10, stop_token_ids=(), seed=1))
        await publish(adapter_engine, update, "keep")
        fresh = await adapter_engine.generate([72], SamplingParams(max_tokens=10, stop_token_ids=(), seed=1))
        assert not call.done()
        assert len(await adapter_engine._llm.list_loras()) == 2
        kept = await call
        assert len(await adapter_engine._llm.list_loras()) == 1
        return kept, fresh

    kept, fresh = loop_thread.run(update_in_flight())
    assert (kept.weight_version == update.version - 1).all()
    expected = plain_logprobs(old, [72], kept.token_ids.tolist())
    np.testing.assert_allclose(kept.logprobs, expected, atol=TOLERANCE)
    assert (fresh.weight_version == update.version).all()
    assert worst_gap(adapted.model, [Turn([72], fresh)]) <= TOLERANCE


def test_what_is_no_adapter_is_refused_and_nothing_is_downloaded(
    adapter_engine: VllmEngine, adapted: Policy, save: Save, loop_thread: Any, tmp_path: Path
) -> None:
    right = save(adapted)
    too_large = adapt_policy(load_policy("tiny:qwen3-64", seed=1), LoraSettings(r=16), seed=0)
    save_policy(too_large, tmp_path / "too_large")

    loop_thread.run(adapter_engine.pause("wait"))
    for folder, reason in ((tmp_path / "none", "expected an adapter"), (tmp_path / "too_large", "rank")):
        with pytest.raises(EngineError, match=reason):
            loop_thread.run(adapter_engine.apply_weights(WeightUpdate(right.version, "adapter", folder)))
    with pytest.raises(ConfigError, match="'adapter', got 'full'"):
        loop_thread.run(adapter_engine.apply_weights(WeightUpdate(right.version, "full", tmp_path)))
    loop_thread.run(adapter_engine.apply_weights(right))
    loop_thread.run(adapter_engine.resume(right.version))
    assert not adapter_engine.capabilities.has_checksums
    assert loop_thread.run(adapter_engine.checksums()) == {}
