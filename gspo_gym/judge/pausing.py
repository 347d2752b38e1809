"""A judge that waits while the one behind it is down, and goes on by itself when it is back.

An outage is the same for all episodes, so one of them asks again, with growing waits, and the others wait for it. While
it lasts nothing gets a score, so nothing is trained: that is the pause, and it has a reason that `on_event` is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_gym.judge.base import Judge, JudgeDownError, JudgeError, Judgement, JudgeRequest

# Called with "judge_paused" or "judge_resumed" and JSON values (hence Any).
OnEvent = Callable[[str, Mapping[str, Any]], None]
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class _Pause:
    """An outage that lasts."""

    over: asyncio.Event
    started: float


class PausingJudge:
    """See the module. Used within one event loop at a time.

    Args:
        judge: who is asked; it says with JudgeDownError that it answers nobody.
        on_event: is told when a pause begins, with its reason, and when it ends.
        clock: seconds, monotonic.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        on_event: OnEvent = lambda _kind, _data: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._judge = judge
        self._on_event = on_event
        self._clock = clock
        self._sleep = sleep
        self._pause: _Pause | None = None
        self._past_seconds = 0.0

    @property
    def name(self) -> str:
        """The judge's own."""
        return self._judge.name

    @property
    def pause_seconds(self) -> float:
        """How long the judge has been down so far, a pause that lasts included."""
        return self._past_seconds + (0.0 if self._pause is None else self._clock() - self._pause.started)

    async def judge(self, request: JudgeRequest) -> Judgement:
        """As the judge behind it, but for JudgeDownError, which it waits out.

        Raises:
            JudgeError: this episode has no score, or nothing will have one any more (JudgeStoppedError).
        """
        while True:
            if self._pause is not None:
                await self._pause.over.wait()
                continue
            try:
                return await self._judge.judge(request)
            except JudgeDownError as error:
                reason = error
            if self._pause is None:  # else another one asks already
                with self._paused(reason):
                    return await self._ask_until_it_answers(request)

    async def close(self) -> None:
        """Close the judge behind it."""
        await self._judge.close()

    async def _ask_until_it_answers(self, request: JudgeRequest) -> Judgement:
        wait = _FIRST_WAIT_SECONDS
        while True:
            await self._sleep(wait)
            try:
                return await self._judge.judge(request)
            except JudgeDownError:
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    @contextlib.contextmanager
    def _paused(self, reason: JudgeDownError) -> Iterator[None]:
        """Holds everybody else until the block ends; if it is cancelled, the next one asks in its place."""
        pause = self._pause = _Pause(asyncio.Event(), self._clock())
        self._on_event("judge_paused", {"judge": self.name, "reason": str(reason)})
        answered = True
        try:
            yield
        except JudgeError:  # an answer, too, although not a score
            raise
        except BaseException:
            answered = False
            raise
        finally:
            seconds = self._clock() - pause.started
            self._past_seconds += seconds
            self._pause = None
            pause.over.set()
            if answered:
                self._on_event("judge_resumed", {"judge": self.name, "seconds": round(seconds, 3)})
