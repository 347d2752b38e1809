"""vLLM in process with whole-model updates: agreement with the learner, sampling, caches, versions and life."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import Turn, nudge, plain_logprobs, play, play_many, publish, worst_gap

from gspo_gym.engine.base import SamplingParams, UpdateKind, WeightUpdate
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.worker import RELOAD_METHOD
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError, EngineTimeoutError
from gspo_gym.policy.load import Policy
from gspo_gym.policy.staging import Staging
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.types import Completion

TOLERANCE = 1e-4  # nats, in float32

Save = Callable[[Any], WeightUpdate]


def sampled(completion: Completion) -> list[int]:
    return [int(token) for token in completion.token_ids]


@pytest.mark.parametrize("num_updates", [3, pytest.param(10, marks=pytest.mark.nightly)])
def test_logprobs_agree_with_a_plain_forward_before_and_after_updates(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any, num_updates: int
) -> None:
    gaps = [worst_gap(model, loop_thread.run(play_many(full_engine, range(4))))]
    for number in range(num_updates):
        before = worst_gap(model, loop_thread.run(play_many(full_engine, [100 + number])))
        nudge(model, number)
        update = save(model)
        loop_thread.run(publish(full_engine, update))
        turns = loop_thread.run(play_many(full_engine, range(4)))  # the same prompts: what is cached of them is stale
        assert all((turn.completion.weight_version == update.version).all() for turn in turns)
        gaps += [before, worst_gap(model, turns)]
    print(f"largest difference: {max(gaps):.2e} nats")
    assert max(gaps) <= TOLERANCE


def test_stale_keys_and_values_would_be_seen(full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any) -> None:
    """The weights change behind the engine's back, twice: with its salt and its reset left out, then with the salt."""
    llm = full_engine._llm

    async def reload_secretly(update: WeightUpdate) -> None:
        await llm.collective_rpc(RELOAD_METHOD, kwargs={"weights_path": str(update.folder)})

    loop_thread.run(play(full_engine, 50))
    nudge(model, 50)
    update = save(model)
    loop_thread.run(reload_secretly(update))
    stale = worst_gap(model, loop_thread.run(play(full_engine, 50)))
    assert stale > TOLERANCE

    full_engine._version += 1  # another salt and nothing else
    salted = worst_gap(model, loop_thread.run(play(full_engine, 50)))
    assert salted <= TOLERANCE

    full_engine._version -= 1  # the salt under which stale blocks lie
    loop_thread.run(publish(full_engine, update))
    full_engine._version -= 1
    reset = worst_gap(model, loop_thread.run(play(full_engine, 50)))
    full_engine._version += 1
    assert reset <= TOLERANCE


async def running(engine: VllmEngine, number: int) -> list[asyncio.Task[Completion]]:
    """Long calls in flight, of which each has some tokens: they began together with a short one, which has ended."""
    calls = [
        asyncio.create_task(
            engine.generate(
                [72, index], SamplingParams(max_tokens=400, stop_token_ids=(), seed=index), session_id=f"long-{index}"
            )
        )
        for index in range(number)
    ]
    await engine.generate([72], SamplingParams(max_tokens=10, stop_token_ids=(), seed=0))
    return calls


def test_kept_calls_go_on_under_the_new_weights_and_every_token_says_under_which(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    old = copy.deepcopy(model)
    nudge(model, 7)
    update = save(model)

    async def update_in_flight() -> list[Turn]:
        calls = await running(full_engine, 4)
        await publish(full_engine, update, "keep")
        return [Turn([72, index], await call) for index, call in enumerate(calls)]

    for turn in loop_thread.run(update_in_flight()):
        versions = turn.completion.weight_version
        num_old = int((versions == update.version - 1).sum())
        assert 0 < num_old < 400
        assert versions.tolist() == [update.version - 1] * num_old + [update.version] * (400 - num_old)
        for scored_by, tokens in ((old, slice(0, num_old)), (model, slice(num_old, 400))):
            expected = plain_logprobs(scored_by, turn.prompt, sampled(turn.completion))
            np.testing.assert_allclose(turn.completion.logprobs[tokens], expected[tokens], atol=TOLERANCE)


def test_drained_calls_end_under_the_old_weights_and_later_ones_wait(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    nudge(model, 8)
    update = save(model)

    async def update_drained() -> tuple[list[Completion], Completion]:
        calls = await running(full_engine, 2)
        pausing = asyncio.create_task(full_engine.pause("wait"))
        await asyncio.sleep(0)  # it has closed the gate
        late = asyncio.create_task(full_engine.generate([72], SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)))
        await pausing
        assert all(call.done() for call in calls)
        assert not late.done()
        await full_engine.apply_weights(update)
        await full_engine.resume(update.version)
        return [await call for call in calls], await late

    early, late = loop_thread.run(update_drained())
    assert all((completion.weight_version == update.version - 1).all() for completion in early)
    assert (late.weight_version == update.version).all()
    assert worst_gap(model, [Turn([72], late)]) <= TOLERANCE


def test_aborted_cancelled_and_late_calls_free_what_they_held(full_engine: VllmEngine, loop_thread: Any) -> None:
    async def give_up() -> None:
        aborted, cancelled = await running(full_engine, 2)
        assert full_engine._llm.get_num_unfinished_requests() == 2
        await full_engine.abort("long-0")
        cancelled.cancel()
        with pytest.raises(EngineError, match="aborted"):
            await aborted
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(EngineTimeoutError):
            await full_engine.generate(
                [72], SamplingParams(max_tokens=400, stop_token_ids=(), seed=0), deadline_seconds=0.01
            )
        assert full_engine._llm.get_num_unfinished_requests() == 0
        assert (await full_engine.health()).num_in_flight == 0

    loop_thread.run(give_up())


def test_weights_that_do_not_fit_are_refused_before_any_is_read(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any, tmp_path: Path
) -> None:
    """The engine stays paused, and can still be given the right ones."""
    from safetensors.torch import load_file, save_file

    right = save(model)
    assert right.folder is not None
    partial, wrong_shape = tmp_path / "partial", tmp_path / "wrong_shape"
    weights = load_file(right.folder / "model.safetensors")
    norm = next(name for name in weights if name.endswith("input_layernorm.weight"))
    for folder, changed in (
        (partial, {name: tensor for name, tensor in weights.items() if name != norm}),
        (wrong_shape, {**weights, norm: torch.ones(3)}),
    ):
        folder.mkdir()
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

    async def fail(folder: Path) -> None:
        await full_engine.apply_weights(WeightUpdate(right.version, "full", folder))

    loop_thread.run(full_engine.pause("wait"))
    for folder, reason in ((tmp_path / "none", "got none"), (partial, norm), (wrong_shape, norm)):
        with pytest.raises(EngineError, match=reason):
            loop_thread.run(fail(folder))
    with pytest.raises(ConfigError, match="'full' or 'transfer', got 'shared'"):
        loop_thread.run(full_engine.apply_weights(WeightUpdate(right.version, "shared")))
    loop_thread.run(full_engine.apply_weights(right))
    loop_thread.run(full_engine.resume(right.version))
    assert worst_gap(model, loop_thread.run(play(full_engine, 1))) <= TOLERANCE


class TornStaging(Staging):
    """The disk loses the second half of the weights after they were staged."""

    def stage(self, version: int, kind: UpdateKind) -> WeightUpdate:
        update = super().stage(version, kind)
        assert update.folder is not None
        weights = update.folder / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        return update


def test_an_update_that_fails_poisons_the_engine(
    full_engine: VllmEngine, model: Any, save: Save, policy: Policy, loop_thread: Any, tmp_path: Path
) -> None:
    """With a second handle on the same vLLM, since a poisoned engine stays poisoned."""
    engine = VllmEngine(full_engine._llm, replace(full_engine._settings, transfer="files"))
    loop_thread.run(publish(engine, save(model)))
    version = engine.weight_version + 1
    sync = WeightSync(engine, mode="keep", kind="full", staging=TornStaging(policy, tmp_path / "staged"))

    async def fail() -> None:
        calls = await running(engine, 4)
        with pytest.raises(EnginePoisonedError, match=f"version {version}"):
            await sync.publish(version)
        for call in calls:
            with pytest.raises(EnginePoisonedError):
                await call
        with pytest.raises(EnginePoisonedError):
            await engine.generate([72], SamplingParams(max_tokens=1, stop_token_ids=(), seed=0))
        health = await engine.health()
        assert (health.is_alive, health.is_poisoned, health.weight_version) == (True, True, version - 1)
        assert not sync.is_committed(version)

    loop_thread.run(fail())
    loop_thread.run(publish(full_engine, save(model)))  # vLLM itself can be given the right weights
    assert worst_gap(model, loop_thread.run(play(full_engine, 1))) <= TOLERANCE


def test_checksums_follow_the_weights_and_attest_something(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    original = loop_thread.run(full_engine.checksums())
    assert full_engine.capabilities.has_checksums
    assert any(name.endswith("embed_tokens.weight") for name in original)
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of b""
    assert nothing not in original.values()
    changed_model = copy.deepcopy(model)
    nudge(changed_model, 3)
    loop_thread.run(publish(full_engine, save(changed_model)))
    changed = loop_thread.run(full_engine.checksums())
    assert changed.keys() == original.keys()
    assert all(changed[name] != original[name] for name in original)
    loop_thread.run(publish(full_engine, save(model)))
    assert loop_thread.run(full_engine.checksums()) == original


def test_an_engine_that_sleeps_makes_calls_wait_and_wakes_up_unchanged(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    update = save(model)

    async def sleep_and_wake() -> Completion:
        await full_engine.sleep()
        call = asyncio.create_task(full_engine.generate([72], SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)))
        with pytest.raises(EngineError, match="asleep"):
            await full_engine.apply_weights(update)
        assert not call.done()
        await full_engine.wake_up()
        with pytest.raises(EngineError, match="not asleep"):
            await full_engine.wake_up()
        return await call

    version = full_engine.weight_version
    completion = loop_thread.run(sleep_and_wake())
    assert (completion.weight_version == version).all()
    assert worst_gap(model, [Turn([72], completion)]) <= TOLERANCE
