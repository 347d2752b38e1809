"""Commands to vLLM: its exceptions, and the death of its processes, become EngineErrors. Does not import vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from gspo_gym.errors import EngineError, GymError


@contextlib.contextmanager
def as_engine_error(doing: str) -> Iterator[None]:
    """Raise vLLM's exceptions, of many classes over its versions, as EngineError; ours pass."""
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        raise EngineError(f"{doing}: {type(error).__name__}: {error}") from error


@contextlib.asynccontextmanager
async def commanding(llm: Any, doing: str) -> AsyncIterator[None]:
    """Guard commands to the processes of an `AsyncLLM`, which must not die before they answer.

    Requests for tokens fail when a process dies, but vLLM waits for the answer to a command for ever: seen with an
    engine that was killed while it slept. The task that reads all answers has ended then, and so does the block.

    Raises:
        EngineError: a process died, the engine was closed, or vLLM raised anything.
    """
    with as_engine_error(doing):
        try:
            async with (
                asyncio.timeout(None) as watchdog,
                _watching(llm.output_handler, partial(_expire, watchdog)),
            ):
                yield
        except TimeoutError as error:
            if not watchdog.expired():
                raise
            raise EngineError(f"{doing}: EngineDeadError: vLLM ended before it had answered") from error


@contextlib.asynccontextmanager
async def _watching(task: asyncio.Task[None], callback: Callable[[object], None]) -> AsyncIterator[None]:
    # Called also if the task has ended before.
    task.add_done_callback(callback)
    try:
        yield
    finally:
        task.remove_done_callback(callback)


def _expire(watchdog: asyncio.Timeout, _: object) -> None:
    with contextlib.suppress(RuntimeError):  # the block has just ended
        watchdog.reschedule(asyncio.get_running_loop().time())
