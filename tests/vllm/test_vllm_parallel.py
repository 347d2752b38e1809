"""vLLM over several processes: each layer shared by two (tensor parallel), and two copies of the model (data parallel).

On a processor; what distributes the work is the same on GPUs. An engine is shared by the tests of one kind and closed
after them, for it is several processes.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agreement import nudge, play_many, publish, worst_gap

from gspo_gym.config.build.engines import learner_score
from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import BINDING
from gspo_gym.engine.vllm.worker import RELOAD_METHOD
from gspo_gym.errors import EngineError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.attestation import Canary, canary_prompts
from gspo_gym.policy.load import Policy, adapt_policy, save_policy
from gspo_gym.policy.staging import Handover

pytestmark = pytest.mark.nightly  # each engine is several processes

TOLERANCE = 1e-4  # nats, in float32
SIZES = {"two share a layer": {"tensor_parallel_size": 2}, "two copies": {"data_parallel_size": 2}}


@pytest.fixture(scope="module", params=SIZES)
def engine(request: pytest.FixtureRequest, start_engine: Any, loop_thread: Any) -> Iterator[VllmEngine]:
    """Takes whole models, by files or handed over."""
    engine = start_engine(**SIZES[request.param], transfer="shared_memory")
    yield engine
    loop_thread.run(engine.close())


@pytest.fixture(scope="module")
def adapter_engine(start_engine: Any, loop_thread: Any) -> Iterator[VllmEngine]:
    """Two copies that take LoRA adapters."""
    engine = start_engine(**SIZES["two copies"], max_lora_rank=8)
    yield engine
    loop_thread.run(engine.close())


Save = Callable[[Policy, VllmEngine], WeightUpdate]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """`save(policy, engine)` stages the policy as the engine's next version."""

    def stage(policy: Policy, engine: VllmEngine) -> WeightUpdate:
        version = engine.weight_version + 1
        save_policy(policy, tmp_path / f"policy-v{version}")
        return WeightUpdate(version, engine.capabilities.update_kinds[0], tmp_path / f"policy-v{version}")

    return stage


@pytest.fixture
def learned(policy: Policy) -> Policy:
    """The policy, whose weights the test changes."""
    return Policy(model=copy.deepcopy(policy.model), tokenizer=policy.tokenizer, base=policy.base)


def require_agreement(policy: Policy, engine: VllmEngine, save: Save, loop_thread: Any, *, num_updates: int) -> None:
    """Multi-turn episodes, as many as there are turns to go round, before the updates and after each."""
    gaps = []
    for number in range(num_updates):
        nudge(policy.model, number, scale=0.05)
        update = save(policy, engine)
        loop_thread.run(publish(engine, update))
        turns = loop_thread.run(play_many(engine, range(4)))
        assert all((turn.completion.weight_version == update.version).all() for turn in turns)
        gaps.append(worst_gap(policy.model, turns))
    print(f"largest difference: {max(gaps):.2e} nats")
    assert max(gaps) <= TOLERANCE


def test_logprobs_agree_with_a_plain_forward_before_and_after_updates(
    engine: VllmEngine, policy: Policy, learned: Policy, save: Save, loop_thread: Any
) -> None:
    assert worst_gap(policy.model, loop_thread.run(play_many(engine, range(4)))) <= TOLERANCE
    require_agreement(learned, engine, save, loop_thread, num_updates=3)


def test_weights_that_are_handed_over_reach_every_process(
    engine: VllmEngine, learned: Policy, loop_thread: Any
) -> None:
    def hand_over(policy: Policy, engine: VllmEngine) -> WeightUpdate:
        return Handover(policy, dtype="float32").stage(engine.weight_version + 1, "transfer")

    require_agreement(learned, engine, hand_over, loop_thread, num_updates=3)


def test_each_adapter_reaches_every_process(
    adapter_engine: VllmEngine, learned: Policy, save: Save, loop_thread: Any
) -> None:
    adapted = adapt_policy(learned, LoraSettings(r=4, alpha=8), seed=0)
    require_agreement(adapted, adapter_engine, save, loop_thread, num_updates=2)


def test_every_process_says_what_it_holds_and_that_it_changed(
    engine: VllmEngine, learned: Policy, save: Save, loop_thread: Any
) -> None:
    before = loop_thread.run(engine.checksums())
    ranks = {name.rsplit(":", 1)[0] for name in before}
    assert len(ranks) == 2
    nudge(learned.model, 7)
    loop_thread.run(publish(engine, save(learned, engine)))
    after = loop_thread.run(engine.checksums())
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)


def test_a_session_stays_with_one_copy_and_sessions_spread_over_all(engine: VllmEngine, loop_thread: Any) -> None:
    num_copies = engine._settings.data_parallel_size
    asked: list[Any] = []
    client = engine._llm.engine_core
    choose = getattr(client, "get_core_engine_for_request", None)

    def note(request: Any) -> Any:
        asked.append(request.data_parallel_rank)
        return choose(request)

    if num_copies > 1:
        client.get_core_engine_for_request = note
    try:
        loop_thread.run(play_many(engine, range(4)))
    finally:
        if num_copies > 1:
            del client.get_core_engine_for_request
    assert sorted(asked) == ([0] * 6 + [1] * 6 if num_copies > 1 else [])  # 4 episodes of 3 turns


def test_a_copy_that_kept_its_weights_is_found_by_the_canary(
    engine: VllmEngine, learned: Policy, save: Save, loop_thread: Any
) -> None:
    """Only one of two copies gets the update; where there is one model, nobody does."""
    nudge(learned.model, 11, scale=0.1)
    update = save(learned, engine)
    canary = Canary(
        canary_prompts(learned.tokenizer.vocab_size, 512), score=learner_score(learned.model, 1.0), tolerance=1e-3
    )

    async def update_one() -> None:
        client = engine._llm.engine_core
        if engine._settings.data_parallel_size > 1:
            reload = ("collective_rpc", RELOAD_METHOD, None, (), {"weights_path": str(update.folder)})
            await client._call_utility_async(*reload, engine=client.core_engines[0])
        with pytest.raises(EngineError, match="canary"):
            await canary.check(engine)

    loop_thread.run(update_one())
    loop_thread.run(publish(engine, update))
    loop_thread.run(canary.check(engine))


def test_kept_calls_of_every_process_go_on_under_the_new_weights(
    engine: VllmEngine, learned: Policy, save: Save, loop_thread: Any
) -> None:
    nudge(learned.model, 5)
    update = save(learned, engine)

    async def update_in_flight() -> list[Any]:
        long = SamplingParams(max_tokens=300, stop_token_ids=(), seed=0)
        calls = [asyncio.create_task(engine.generate([72], long, session_id=f"long-{n}")) for n in range(2)]
        short = SamplingParams(max_tokens=10, stop_token_ids=(), seed=0)
        await asyncio.gather(*(engine.generate([72], short, session_id=f"long-{n}") for n in range(2)))
        await publish(engine, update, "keep")
        return [await call for call in calls]

    for completion in loop_thread.run(update_in_flight()):
        versions = completion.weight_version.tolist()
        assert set(versions) == {update.version - 1, update.version}
        assert versions == sorted(versions)


def test_every_process_sleeps_and_wakes_and_the_environment_is_as_it_was(engine: VllmEngine, loop_thread: Any) -> None:
    assert BINDING not in os.environ  # it is for the processes of the engine alone

    async def sleep_and_wake() -> None:
        await engine.sleep()
        assert await engine._llm.is_paused()
        calls = [
            asyncio.create_task(
                engine.generate([72], SamplingParams(max_tokens=4, stop_token_ids=(), seed=0), session_id=name)
            )
            for name in "ab"
        ]
        await asyncio.wait(calls, timeout=0.2)
        assert not any(call.done() for call in calls)
        await engine.wake_up()
        await asyncio.gather(*calls)

    loop_thread.run(sleep_and_wake())
