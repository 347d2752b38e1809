"""The scripted engine: replies, time, failures and bookkeeping."""

from __future__ import annotations

import asyncio

import pytest

from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.engine.scripted import Failures, Latency, ScriptedEngine
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.types import Completion, FinishReason

STOP = 2
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(STOP,), seed=0)


def _generate(engine: Engine, prompt: list[int], session_id: str | None = None) -> Completion:
    return asyncio.run(engine.generate(prompt, SAMPLING, session_id=session_id))


def test_a_reply_is_cut_after_its_first_stop_token_and_at_max_tokens() -> None:
    engine = ScriptedEngine([[5, STOP, 6], [5, 6, 7, 8, 9], [5]])
    completions = [_generate(engine, [1]) for _ in range(3)]
    assert [c.token_ids.tolist() for c in completions] == [[5, STOP], [5, 6, 7, 8], [5]]
    assert [c.finish_reason for c in completions] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]


def test_a_function_is_told_the_prompt_and_the_sessions_turn() -> None:
    engine = ScriptedEngine(lambda prompt, turn: [10 * len(prompt) + turn, STOP])
    answers = [_generate(engine, [1], "a"), _generate(engine, [1, 1], "a"), _generate(engine, [1], "b")]
    assert [int(a.token_ids[0]) for a in answers] == [10, 21, 10]
    asyncio.run(engine.end_session("a"))
    assert int(_generate(engine, [1], "a").token_ids[0]) == 10


def test_replies_by_prompt_need_an_entry() -> None:
    engine = ScriptedEngine({(1, 2): [7, STOP]})
    assert _generate(engine, [1, 2]).token_ids.tolist() == [7, STOP]
    with pytest.raises(EngineError, match=r"no reply to the prompt \(3,\)"):
        _generate(engine, [3])


def test_a_script_that_ran_out_or_is_empty_is_an_error() -> None:
    with pytest.raises(EngineError, match="has 0 replies, and this is call 1"):
        _generate(ScriptedEngine([]), [1])
    with pytest.raises(EngineError, match="call 1 is empty"):
        _generate(ScriptedEngine([[]]), [1])


def test_latency_is_per_call_plus_per_token_and_its_jitter_comes_from_the_seed() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    latency = Latency(per_call_seconds=1.0, per_token_seconds=0.5)
    _generate(ScriptedEngine([[7, STOP]], latency=latency, sleep=sleep), [1])
    assert slept == [2.0]  # 1 + 2 tokens * 0.5
    jittered = Latency(per_call_seconds=1.0, jitter_fraction=0.25, seed=3)
    draws = [jittered.seconds(index, 10) for index in range(200)]
    assert draws == [jittered.seconds(index, 10) for index in range(200)]
    assert min(draws) >= 0.75
    assert max(draws) <= 1.25
    # 200 uniform draws on [0.75, 1.25] have a mean of 1 with standard error 0.5 / sqrt(12 * 200) = 0.0102; fixed seed.
    assert abs(sum(draws) / 200 - 1.0) < 4 * 0.0102


def test_every_third_call_fails_and_the_others_answer() -> None:
    engine = ScriptedEngine(lambda prompt, turn: [STOP], failures=Failures(every=3))
    outcomes = []
    for _ in range(7):
        try:
            _generate(engine, [1])
            outcomes.append("ok")
        except EngineError:
            outcomes.append("failed")
    assert outcomes == ["ok", "ok", "failed", "ok", "ok", "failed", "ok"]
    assert (len(engine.calls), engine.num_failures) == (7, 2)


def test_random_failures_are_decided_by_the_seed_and_come_at_their_rate() -> None:
    assert Failures(prob=0.2) == Failures(prob=0.2, seed=0)  # which scripts rely on that name none
    hits = [Failures(prob=0.2, seed=1).hits(index) for index in range(2000)]
    assert hits == [Failures(prob=0.2, seed=1).hits(index) for index in range(2000)]
    assert hits != [Failures(prob=0.2, seed=2).hits(index) for index in range(2000)]
    # Binomial(2000, 0.2): mean 400, standard deviation sqrt(2000 * 0.2 * 0.8) = 17.9; fixed seed.
    assert abs(sum(hits) - 400) < 4 * 17.9


def test_an_update_waits_for_a_hanging_call_until_it_is_cancelled() -> None:
    engine = ScriptedEngine([[STOP], [STOP]], failures=Failures(every=1, kind="hang"))

    async def run() -> None:
        task = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0)
        update = asyncio.create_task(WeightSync(engine).publish(1))
        await asyncio.sleep(0)
        assert (engine.weight_version, update.done()) == (0, False)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await update

    asyncio.run(run())
    assert engine.weight_version == 1


def test_tokens_carry_the_version_that_was_current() -> None:
    engine = ScriptedEngine([[7, STOP], [STOP]])
    first = _generate(engine, [1])
    asyncio.run(WeightSync(engine).publish(5))
    assert [update.version for update in engine.updates] == [5]
    assert first.weight_version.tolist() == [0, 0]
    assert _generate(engine, [1]).weight_version.tolist() == [5]


def test_a_prompt_without_room_is_a_context_overflow_and_the_last_free_position_is_used() -> None:
    engine = ScriptedEngine(lambda prompt, turn: [7, 7, 7], max_model_len=3)
    assert _generate(engine, [1, 1]).token_ids.tolist() == [7]
    with pytest.raises(ContextOverflowError, match="3 tokens leaves no room in a context of 3"):
        _generate(engine, [1, 1, 1])
    with pytest.raises(EngineError, match="at least one token"):
        _generate(engine, [])


def test_a_closed_engine_answers_nothing() -> None:
    engine = ScriptedEngine([[STOP]])
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        _generate(engine, [1])


def test_impossible_failure_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 <= prob <= 1"):
        Failures(prob=1.5)
