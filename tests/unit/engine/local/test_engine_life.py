"""The local engine's life: joining and leaving, cancelling, updates in flight, closing, and dying."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import until_in_flight

from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.local.batch import Request
from gspo_gym.engine.local.batcher import Batcher
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.errors import ConfigError, EngineError, EngineTimeoutError
from gspo_gym.policy.weight_sync import WeightSync

MAX_LEN = 1024


def _run(model: Any, use: Callable[[LocalEngine], Coroutine[Any, Any, Any]], **options: int) -> Any:
    async def main() -> Any:
        engine = LocalEngine(model, max_model_len=MAX_LEN, **options)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def _sampling(max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=(), seed=seed)


async def _until_sampling(engine: LocalEngine) -> None:
    while engine.counters.num_sampled_tokens == 0:  # noqa: ASYNC110  # nothing to wait on: the task is still running
        await asyncio.sleep(0.001)


@pytest.mark.slow
def test_a_short_request_leaves_a_running_batch_before_the_long_one_ends(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        long = asyncio.create_task(engine.generate([1, 2, 3], _sampling(900)))
        await engine.generate([4, 5], _sampling(3))
        assert not long.done()
        assert engine.counters.num_steps < 900
        assert len((await long).token_ids) == 900

    _run(model, use)


def test_requests_that_are_made_in_one_pass_of_the_loop_are_sampled_in_one_step(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        for turn in range(1, 21):  # the thread would wake at the first one's, sooner or later
            await asyncio.gather(*(engine.generate([first], _sampling(1)) for first in range(16)))
            assert engine.counters.num_steps == turn

    _run(model, use)


def test_work_of_the_learner_runs_in_the_engines_thread_and_what_it_raises_ends_no_request(model: Any) -> None:
    def fail() -> None:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        raise ZeroDivisionError("the learner's")

    async def use(engine: LocalEngine) -> None:
        long = asyncio.create_task(engine.generate([1, 2, 3], _sampling(200)))
        await _until_sampling(engine)
        assert await engine.compute(threading.current_thread) is engine._thread
        with pytest.raises(ZeroDivisionError, match="the learner's"):
            await engine.compute(fail)
        assert len((await long).token_ids) == 200
        await engine.close()
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.compute(threading.current_thread)

    _run(model, use)


def test_work_that_waits_when_the_engine_closes_gets_its_error(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        has_begun, may_end = threading.Event(), threading.Event()
        first = asyncio.create_task(engine.compute(lambda: (has_begun.set(), may_end.wait(30))[1]))
        await asyncio.to_thread(has_begun.wait, 30)
        second = asyncio.create_task(engine.compute(threading.current_thread))
        await asyncio.sleep(0)  # it waits for the first
        engine._worker.close()
        may_end.set()
        assert await first  # it had begun
        with pytest.raises(EngineError, match="the engine was closed"):
            await second

    _run(model, use)


def test_cancelling_a_request_frees_its_slot_for_the_next(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        hog = asyncio.create_task(engine.generate([1, 2, 3], _sampling(1000)))
        waiting = asyncio.create_task(engine.generate([4, 5], _sampling(3)))
        await _until_sampling(engine)  # the only slot is taken, so the second request can only wait
        assert not waiting.done()
        hog.cancel()
        assert len((await waiting).token_ids) == 3
        with pytest.raises(asyncio.CancelledError):
            await hog
        assert engine.counters.num_sampled_tokens < 1000
        await WeightSync(engine).publish(1)  # nothing is in flight any more

    _run(model, use, max_batch_size=1)


def test_the_thread_hears_of_a_cancelled_request_before_the_event_loop_goes_on(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        async def ask() -> bool:
            try:
                await engine.generate([1, 2, 3], _sampling(1000))
            except asyncio.CancelledError:
                deadline = time.monotonic() + 60
                while engine._worker.batch.num_in_flight and time.monotonic() < deadline:
                    pass  # the loop is busy with what else it has to do
            return engine._worker.batch.num_in_flight == 0

        asked = asyncio.create_task(ask())
        await _until_sampling(engine)
        asked.cancel()
        assert await asked
        assert engine.counters.num_sampled_tokens < 1000

    _run(model, use)


@pytest.mark.slow
def test_requests_that_were_cancelled_or_ran_out_of_time_are_forgotten_with_their_prompts(model: Any) -> None:
    def num_requests() -> int:
        gc.collect()
        return sum(type(held) is Request for held in gc.get_objects())

    async def use(engine: LocalEngine) -> None:
        before = num_requests()
        for number in range(20):
            call = asyncio.create_task(engine.generate([1, 2, 3], _sampling(1000), session_id=f"session-{number % 5}"))
            await until_in_flight(engine, 1)
            call.cancel()
            await asyncio.wait({call})
        for _ in range(5):
            with pytest.raises(EngineTimeoutError):
                await engine.generate([1, 2, 3], _sampling(1000), deadline_seconds=1e-3)
        hanging = asyncio.create_task(engine.generate([1, 2, 3], _sampling(1000), session_id="hanging"))
        await until_in_flight(engine, 1)
        await engine.abort("hanging")
        await asyncio.wait({hanging})
        hanging.exception()
        for number in range(5):
            await engine.end_session(f"session-{number}")
        # With the second one the thread is between two steps, and rid of all the commands that it took with the first.
        for version in (1, 2):
            await WeightSync(engine).publish(version)
        del call, hanging
        assert num_requests() == before

    _run(model, use)


def test_cancelling_a_request_that_still_waits_drops_it(model: Any) -> None:
    async def use(engine: LocalEngine) -> int:
        first = asyncio.create_task(engine.generate([1, 2, 3], _sampling(400)))
        waiting = asyncio.create_task(engine.generate([4, 5], _sampling(500)))
        await asyncio.sleep(0)
        waiting.cancel()
        await first
        await WeightSync(engine).publish(1)
        return engine.counters.num_sampled_tokens

    assert _run(model, use, max_batch_size=1) == 400


def test_a_cancelled_sessions_cache_is_sound(model: Any, plain_logprobs: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        task = asyncio.create_task(engine.generate([1, 2, 3], _sampling(900, seed=5), session_id="a"))
        await _until_sampling(engine)
        task.cancel()
        again = await engine.generate([1, 2, 3], _sampling(30, seed=5), session_id="a")
        expected = plain_logprobs(model, [1, 2, 3], again.token_ids.tolist())
        np.testing.assert_allclose(again.logprobs, expected, rtol=0, atol=1e-5)  # float32 rounding, five times over

    _run(model, use)


def test_an_update_waits_until_no_request_is_in_flight(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        task = asyncio.create_task(engine.generate([1, 2, 3], _sampling(300)))
        await asyncio.sleep(0)
        update = asyncio.create_task(WeightSync(engine).publish(1))
        while not engine._gate.is_paused:  # noqa: ASYNC110  # nothing to wait on: the update has only to begin
            await asyncio.sleep(0)
        later = asyncio.create_task(engine.generate([1, 2, 3], _sampling(3)))
        assert (await task).weight_version.tolist() == [0] * 300
        await update
        assert engine.weight_version == 1
        assert (await later).weight_version.tolist() == [1] * 3

    _run(model, use)


def test_weights_in_a_folder_are_refused_and_the_engine_goes_on_under_its_own(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        await engine.pause("wait")
        with pytest.raises(ConfigError, match="expected an update of kind 'shared', got 'full'"):
            await engine.apply_weights(WeightUpdate(1, "full", Path("weights")))
        await engine.resume(0)
        assert (await engine.generate([1, 2, 3], _sampling(2))).weight_version.tolist() == [0, 0]

    _run(model, use)


def test_an_update_that_the_engine_cannot_take_raises_what_went_wrong(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        model.to("meta")
        await engine.pause("wait")
        with pytest.raises(EngineError, match=r"^ConfigError: LocalEngine: the weights of .* are on the meta device"):
            await engine.apply_weights(WeightUpdate(1, "shared"))

    _run(model, use)


def test_weights_that_change_while_requests_run_fail_those_requests(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        tasks = [asyncio.create_task(engine.generate([1, 2, 3], _sampling(1000, seed=i))) for i in range(3)]
        await engine.generate([9], _sampling(2))
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        for task in tasks:
            with pytest.raises(EngineError, match="weights changed since version 0"):
                await task

    _run(model, use)


def test_closing_fails_what_is_in_flight_and_all_later_calls(model: Any) -> None:
    async def main() -> None:
        engine = LocalEngine(model, max_model_len=MAX_LEN)
        running = asyncio.create_task(engine.generate([1, 2, 3], _sampling(1000)))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], _sampling(1))
        with pytest.raises(EngineError, match="closed"):
            await WeightSync(engine).publish(1)
        with pytest.raises(EngineError, match="closed"):
            await engine.end_session("a")
        assert not (await engine.health()).is_alive

    asyncio.run(main())


def test_closing_ends_the_thread_and_so_does_dropping_the_engine(model: Any) -> None:
    def engine_threads() -> int:
        return sum(thread.name == "gspo-gym-engine" for thread in threading.enumerate())

    before = engine_threads()
    closed, dropped = (LocalEngine(model, max_model_len=MAX_LEN) for _ in range(2))
    assert engine_threads() == before + 2
    asyncio.run(closed.close())
    assert engine_threads() == before + 1
    del dropped
    gc.collect()
    assert engine_threads() == before


def test_closing_waits_for_what_the_thread_is_doing(model: Any) -> None:
    begun, released = threading.Event(), threading.Event()

    async def use(engine: LocalEngine) -> None:
        working = asyncio.create_task(engine.compute(lambda: (begun.set(), released.wait(60))))
        await asyncio.to_thread(begun.wait)
        threading.Timer(0.2, released.set).start()
        await engine.close()
        assert released.is_set()
        await asyncio.gather(working, return_exceptions=True)

    _run(model, use)


def test_an_update_copies_the_weights_of_the_model_that_learns(model: Any) -> None:
    copied = copy.deepcopy(model)

    async def main() -> None:
        engine = LocalEngine(copied, max_model_len=MAX_LEN, source=learning)
        with torch.no_grad():
            for parameter in learning.parameters():
                parameter.add_(1.0)
        await WeightSync(engine).publish(1)
        await engine.close()

    learning = copy.deepcopy(model)
    asyncio.run(main())
    for (name, expected), actual in zip(learning.state_dict().items(), copied.state_dict().values(), strict=True):
        assert actual.equal(expected), name
    assert not next(copied.parameters()).equal(next(model.parameters()))


def test_if_the_thread_dies_everybody_hears_of_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = LocalEngine(model, max_model_len=MAX_LEN)
        survivor = asyncio.create_task(engine.generate([1, 2, 3], _sampling(1000)))
        await engine.generate([9], _sampling(2))
        assert (await engine.health()).is_alive

        def explode(self: Batcher) -> None:
            raise RuntimeError("out of memory, say")

        monkeypatch.setattr(Batcher, "step", explode)
        with pytest.raises(EngineError, match=r"thread died.*out of memory, say"):
            await survivor
        with pytest.raises(EngineError, match=r"thread died.*out of memory, say") as caught:
            await engine.generate([1], _sampling(1))
        assert isinstance(caught.value.__cause__, RuntimeError)
        health = await engine.health()
        assert (health.is_alive, health.reason) == (False, str(caught.value))
        with pytest.raises(EngineError, match="thread died"):
            await WeightSync(engine).publish(1)
        await engine.close()

    asyncio.run(main())


def test_an_engine_serves_one_event_loop_after_another(model: Any) -> None:
    engine = LocalEngine(model, max_model_len=MAX_LEN)
    results = [asyncio.run(engine.generate([1, 2, 3], _sampling(4))).token_ids.tolist() for _ in range(2)]
    assert results[0] == results[1]
    asyncio.run(engine.close())


@pytest.mark.parametrize("prompt", [[-1], [3, 263], []])
def test_a_prompt_that_is_empty_or_outside_the_vocabulary_is_an_error_of_that_request_only(
    model: Any, prompt: list[int]
) -> None:
    async def use(engine: LocalEngine) -> None:
        with pytest.raises(EngineError, match=r"in \[0, 263\)|at least one token"):
            await engine.generate(prompt, _sampling(1))
        assert len((await engine.generate([262], _sampling(2))).token_ids) == 2

    _run(model, use)


def test_sessions_beyond_the_slots_lose_their_cache_and_nothing_else(model: Any) -> None:
    async def use(engine: LocalEngine) -> list[int]:
        prompts = {name: [ord(name)] * 20 for name in "abc"}
        for name, prompt in prompts.items():
            await engine.generate(prompt, _sampling(2), session_id=name)
        kept = []
        for name in "ca":  # c kept its slot; a's was given to c
            before = engine.counters.num_kept_tokens
            await engine.generate(prompts[name], _sampling(2), session_id=name)
            kept.append(engine.counters.num_kept_tokens - before)
        return kept

    assert _run(model, use, max_batch_size=2) == [19, 0]


def test_the_cache_grows_with_use_and_not_before(model: Any) -> None:
    async def use(engine: LocalEngine) -> list[int]:
        cache = engine._worker.batch._cache
        sizes = []
        for length in (10, 10, 900):
            await engine.generate([1] * length, _sampling(2))
            sizes.append(cache.num_bytes())
        return sizes

    # 2 layers, keys and values, 8 slots, 1 key head of 32 numbers, 4 bytes each; 256 tokens at first, then 1024.
    per_token = 2 * 2 * 8 * 32 * 4
    assert _run(model, use) == [256 * per_token, 256 * per_token, 1024 * per_token]
