"""An event loop that wakes tasks in an order drawn from a seed, on a clock that jumps: each seed is another schedule.

Whatever is ready may run next, timers fire at virtual times, and work for a thread happens at a moment of its own. What
a scenario gives as `interrupt` is called between steps, to cancel or kill something. Nothing waits for real, so that
thousands of schedules take seconds, and the same seed gives the same one.
"""

from __future__ import annotations

import asyncio
import collections
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

_MAX_STEPS = 100_000


class StuckError(AssertionError):
    """A schedule does not end: nothing is ready and no timer is set, or there is no end of steps."""


class _Jumping(selectors.SelectSelector):
    """Instead of waiting for the next timer, it is that time already."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError("nothing will ever happen: no task is ready and no timer is set")
        self.now += max(timeout, 0.0)
        return super().select(0)


class _Shuffled(collections.deque[Any]):
    """The loop's queue of what is ready, which gives any of it next."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def popleft(self) -> Any:
        self._loop.begin_step()
        if len(self) > 1:
            self.rotate(-self._loop.choices.randrange(len(self)))
        return super().popleft()


class SimulatedLoop(asyncio.SelectorEventLoop):
    """The loop of one schedule.

    Attributes:
        choices: where the schedule's choices come from, and those of the scenario.
        interrupt: called at a share `interrupt_prob` of the steps; None: nothing is interrupted.
        problems: what was reported to the loop and to nobody else, such as exceptions that were never retrieved.
    """

    def __init__(self, seed: int) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self.choices = random.Random(seed)
        self.interrupt: Callable[[], None] | None = None
        self.interrupt_prob = 0.0
        self.problems: list[str] = []
        self._ready = _Shuffled(self)
        self._num_steps = 0
        self._futures: list[asyncio.Future[Any]] = []
        self.set_exception_handler(lambda _, context: self.problems.append(f"{context['message']}: {context}"))

    def time(self) -> float:
        return self._jumping.now

    def begin_step(self) -> None:
        """Count the step, and interrupt something before it."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise StuckError(f"no end after {_MAX_STEPS} steps")
        if self.interrupt is not None and self.choices.random() < self.interrupt_prob:
            self.interrupt()

    def create_future(self) -> asyncio.Future[Any]:
        future = super().create_future()
        self._futures.append(future)
        return future

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call it at a moment of its own, also if nobody waits for it any more, as a thread would."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self.choices.random() * 0.01, run)
        return future

    def num_pending_futures(self) -> int:
        """Futures that somebody may wait for, which have neither a result nor been cancelled."""
        return sum(not future.done() for future in self._futures)


def simulate(seed: int, scenario: Callable[[SimulatedLoop], Coroutine[Any, Any, None]]) -> None:
    """Run one schedule of the scenario, and check that nothing is left of it.

    Raises:
        AssertionError: what the scenario raised; or a task or future is left, or an exception was lost.
    """
    loop = SimulatedLoop(seed)

    async def whole() -> None:
        try:
            await scenario(loop)
        finally:
            loop.interrupt = None
        await asyncio.sleep(1.0)  # what was cancelled ends
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"{len(left)} tasks are left, such as {next(iter(left))}"
        assert loop.num_pending_futures() == 0, f"{loop.num_pending_futures()} futures are left"

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(whole())
    assert not loop.problems, loop.problems[0]
