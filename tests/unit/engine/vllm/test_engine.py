"""`VllmEngine` on vLLM's fake, whose forward pass is transformers'; tests/vllm asks the same of vLLM itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from agreement import Turn, nudge, publish, worst_gap

from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.gate import probing
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import EngineError, EnginePoisonedError
from gspo_gym.policy.load import Policy, load_policy, save_policy

TOLERANCE = 1e-4  # nats, in float32
PROMPT = [72, 105]
SHORT = SamplingParams(max_tokens=6, stop_token_ids=(), seed=3)
Use = Callable[[VllmEngine, Policy], Awaitable[None]]


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that starts an engine on a policy's files, uses it and closes it."""
    for name in fake_vllm.MODULES:
        monkeypatch.setitem(sys.modules, name, fake_vllm)

    def start(use: Use, **settings: Any) -> None:
        async def main() -> None:
            policy = load_policy("tiny:qwen3-64", seed=1)
            save_policy(policy, tmp_path / "policy")
            engine = await VllmEngine.start(VllmSettings(str(tmp_path / "policy"), max_model_len=64, **settings))
            try:
                await use(engine, policy)
            finally:
                await engine.close()
            with pytest.raises(EngineError, match=r"closed|poisoned"):
                await engine.generate(PROMPT, SHORT)

        asyncio.run(main())

    return start


def test_tokens_are_of_the_weights_whose_version_they_carry(engine_of: Any, tmp_path: Path) -> None:
    async def use(engine: VllmEngine, policy: Policy) -> None:
        for version in (0, 1, 2):
            if version:
                nudge(policy.model, version)
                save_policy(policy, tmp_path / f"v{version}")
                await publish(engine, WeightUpdate(version, "full", tmp_path / f"v{version}"))
            completion = await engine.generate(PROMPT, SHORT)
            assert completion.weight_version.tolist() == [version] * 6
            assert worst_gap(policy.model, [Turn(PROMPT, completion)]) < TOLERANCE

    engine_of(use)


def test_probes_sample_the_new_weights_before_the_commit_and_others_wait(engine_of: Any, tmp_path: Path) -> None:
    async def use(engine: VllmEngine, policy: Policy) -> None:
        nudge(policy.model, 5)
        save_policy(policy, tmp_path / "new")
        await engine.pause("wait")
        await engine.apply_weights(WeightUpdate(1, "full", tmp_path / "new"))
        other = asyncio.create_task(engine.generate(PROMPT, SHORT))
        with probing():
            probe = await engine.generate(PROMPT, SHORT)
        assert worst_gap(policy.model, [Turn(PROMPT, probe)]) < TOLERANCE
        assert (other.done(), engine.weight_version) == (False, 0)
        await engine.resume(1)
        assert (await other).weight_version.tolist() == [1] * 6

    engine_of(use)


def test_an_update_that_failed_leaves_the_engine_paused_for_its_caller_to_poison(
    engine_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    async def use(engine: VllmEngine, policy: Policy) -> None:
        monkeypatch.setattr(fake_vllm.AsyncLLM, "collective_rpc", fail)
        await engine.pause("wait")
        waiting = asyncio.create_task(engine.generate(PROMPT, SHORT))
        reason = "weights of version 1 could not be loaded: RuntimeError: out of memory"
        with pytest.raises(EngineError, match=reason):
            await engine.apply_weights(WeightUpdate(1, "full", tmp_path / "policy"))
        assert (waiting.done(), engine.weight_version) == (False, 0)
        engine.poison("half an update")
        with pytest.raises(EnginePoisonedError, match="half an update"):
            await waiting

    engine_of(use)


def test_weights_that_do_not_fit_never_reach_a_worker(engine_of: Any, tmp_path: Path) -> None:
    async def use(engine: VllmEngine, policy: Policy) -> None:
        save_policy(load_policy("tiny:qwen3-128", seed=1), tmp_path / "other")
        await engine.pause("wait")
        for folder, reason in ((tmp_path / "other", "of another shape"), (tmp_path / "none", "got none")):
            with pytest.raises(EngineError, match=reason):
                await engine.apply_weights(WeightUpdate(1, "full", folder))
        await engine.resume(0)
        assert worst_gap(policy.model, [Turn(PROMPT, await engine.generate(PROMPT, SHORT))]) < TOLERANCE

    engine_of(use)


def test_ids_that_the_tokenizer_does_not_have_are_never_sampled(engine_of: Any) -> None:
    async def use(engine: VllmEngine, _: Policy) -> None:
        sampling = SamplingParams(max_tokens=20, stop_token_ids=(), seed=1)
        completion = await engine.generate(PROMPT, sampling)
        assert set(completion.token_ids.tolist()) <= set(range(8))

    engine_of(use, num_token_ids=8)
