"""Commands to vLLM whose process dies before it answers; in its place, a task that reads answers until it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_gym.engine.vllm.commands import as_engine_error, commanding
from gspo_gym.errors import EngineError, EnginePoisonedError


async def dying(command: Any, *, after_steps: int) -> Any:
    """What the command returns or raises, if all answers have been read after so many steps of the loop."""

    async def read() -> None:
        for _ in range(after_steps):
            await asyncio.sleep(0)

    llm = SimpleNamespace(output_handler=asyncio.create_task(read()))
    async with commanding(llm, "sleep"):
        return await command


def test_a_command_that_nobody_answers_fails_when_the_process_has_died() -> None:
    for after_steps in (0, 5):
        with pytest.raises(EngineError, match="sleep: EngineDeadError"):
            asyncio.run(dying(asyncio.Event().wait(), after_steps=after_steps))


def test_a_command_that_is_answered_is_left_alone_however_soon_the_process_dies() -> None:
    async def main() -> str:
        answer = await dying(asyncio.sleep(0, "done"), after_steps=3)
        for _ in range(10):
            await asyncio.sleep(0)  # it has died by now
        assert isinstance(answer, str)
        return answer

    assert asyncio.run(main()) == "done"


def test_a_caller_that_gives_up_is_cancelled_and_a_time_limit_of_its_own_is_its_own() -> None:
    async def main() -> None:
        call = asyncio.create_task(dying(asyncio.Event().wait(), after_steps=1000))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await dying(asyncio.Event().wait(), after_steps=10**9)

    asyncio.run(main())


def test_errors_of_ours_pass_and_all_others_say_what_was_being_done() -> None:
    with pytest.raises(EnginePoisonedError, match=r"^by hand$"), as_engine_error("pause"):
        raise EnginePoisonedError("by hand")
    with pytest.raises(EngineError, match=r"^pause: KeyError: 'x'$"), as_engine_error("pause"):
        raise KeyError("x")
