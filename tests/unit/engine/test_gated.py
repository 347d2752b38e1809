"""What engines have from their gate: a pause that waits for calls or keeps them, and modes that are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gspo_gym.engine.base import Capabilities, PauseMode, SamplingParams
from gspo_gym.engine.scripted import Failures, ScriptedEngine
from gspo_gym.errors import ConfigError, EngineError

SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)


@pytest.mark.parametrize(("mode", "is_paused_at_once"), [("wait", False), ("keep", True)])
def test_a_pause_waits_for_the_calls_in_flight_or_keeps_them(mode: PauseMode, is_paused_at_once: bool) -> None:
    async def main() -> None:
        engine = ScriptedEngine([[1]], failures=Failures(every=1, kind="hang"))
        call = asyncio.create_task(engine.generate([1], SAMPLING, session_id="a"))
        await asyncio.sleep(0)
        pausing = asyncio.create_task(engine.pause(mode))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (call.done(), pausing.done()) == (False, is_paused_at_once)
        await engine.abort("a")
        await pausing
        with pytest.raises(EngineError, match="aborted"):
            await call

    asyncio.run(main())


def test_a_mode_that_the_engine_does_not_have_is_refused_and_calls_go_on() -> None:
    class Waiting(ScriptedEngine):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, pause_modes=("wait",))

    async def main() -> None:
        engine = Waiting([[7]])
        with pytest.raises(ConfigError, match=r"Waiting\.pause: expected mode 'wait', got 'keep'"):
            await engine.pause("keep")
        assert (await engine.generate([1], SAMPLING)).token_ids.tolist() == [7]

    asyncio.run(main())


def test_weights_without_digests_give_none_and_sessions_may_be_ended_all_the_same() -> None:
    async def main() -> None:
        engine = ScriptedEngine([[7]])
        assert await engine.checksums() == {}  # attestation reads their items
        await engine.end_session("a session that never was")
        assert (await engine.generate([1], SAMPLING)).token_ids.tolist() == [7]

    asyncio.run(main())
