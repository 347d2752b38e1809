"""Run coroutines to their end from synchronous functions, and wait for tasks to end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Compute(Protocol):
    """Return the result of blocking work, which runs in another thread; the event loop is free meanwhile."""

    def __call__(self, work: Callable[[], Result], /) -> Coroutine[Any, Any, Result]: ...


async def in_another_thread(work: Callable[[], Result], /) -> Result:
    """Return the result of blocking work, which runs in a thread of asyncio's."""
    return await asyncio.to_thread(work)


async def all_of(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Return all results; if one fails, the others are cancelled, and it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_POLL_SECONDS = 0.2  # between two looks: a cancellation of the waiting task does not wake the wait


def run_to_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine and return its result, even if an event loop is running, as in a notebook.

    In that case it runs in an event loop in another thread, and the running loop is blocked until it has ended. An
    interruption of the caller (Ctrl-C, a notebook's stop button) cancels the coroutine, and is raised once that has
    ended.

    >>> run_to_end(asyncio.sleep(0, "done"))
    'done'
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _run_in_thread(coroutine)


def _run_in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    began: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()
    end: concurrent.futures.Future[Result] = concurrent.futures.Future()

    async def play() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        began.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await coroutine

    def work() -> None:
        try:
            end.set_result(asyncio.run(play()))
        except BaseException as error:  # raised in the caller
            end.set_exception(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="gspo-gym-loop")
    task = asyncio.current_task()
    num_before = 0 if task is None else task.cancelling()  # read first, so a Ctrl-C right after the start counts
    try:
        thread.start()  # inside the try, because it waits, and may be interrupted after the work has begun
        _wait_for(end, task, num_before)
    except BaseException:
        futures: list[concurrent.futures.Future[Any]] = [began, end]
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
        if began.done():
            began.result()()
        thread.join()
        raise
    thread.join()
    return end.result()


def _wait_for(end: concurrent.futures.Future[Any], task: asyncio.Task[Any] | None, num_before: int) -> None:
    """Return when it has ended; `num_before` cancellations of the caller's task were requested before it began.

    Raises:
        asyncio.CancelledError: the caller's task was cancelled, which is how `asyncio.run` passes on the first Ctrl-C.
        KeyboardInterrupt: the caller was interrupted.
    """
    while not concurrent.futures.wait([end], timeout=_POLL_SECONDS).done:
        if task is not None and task.cancelling() > num_before:
            raise asyncio.CancelledError


async def wait_or_cancel(task: asyncio.Future[Any]) -> None:
    """Wait until the task has ended, whatever it raises; cancel the task if this is cancelled.

    Raises:
        CancelledError: this was cancelled, and the task has ended.
    """
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await wait_until_ended({task})  # what the task holds is freed before anything goes on
        raise


async def wait_until_ended(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all tasks have ended, whatever they raise, even if this is cancelled meanwhile.

    Raises:
        CancelledError: this was cancelled, and all tasks have ended.
    """
    is_cancelled = False
    while waiting := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved, so asyncio does not warn about a task that is no longer waited for."""
    if not task.cancelled():
        task.exception()
