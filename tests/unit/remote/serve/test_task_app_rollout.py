"""Playing until it ends, or until something says stop."""

from __future__ import annotations

import asyncio

import pytest

from gspo_gym.remote.serve.task_app_rollout import until_stopped


def test_an_error_of_what_says_stop_is_raised_and_is_no_stop() -> None:
    async def broken() -> None:
        raise OSError("the connection cannot be asked")

    async def main() -> None:
        forever = asyncio.Event()
        with pytest.raises(OSError, match="cannot be asked"):
            await until_stopped(_wait(forever), broken(), timeout_seconds=60.0)
        assert await until_stopped(_nothing(), forever.wait(), timeout_seconds=60.0)
        assert not await until_stopped(_wait(forever), _nothing(), timeout_seconds=60.0)

    asyncio.run(main())


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _nothing() -> None:
    pass
