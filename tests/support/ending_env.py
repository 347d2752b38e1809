"""An environment whose actions end it in every way that a policy may find."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo_gym.env.core import TextEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.workers.limits import killed_after
from gspo_gym.errors import ActionLimitError


class Ending(TextEnv):
    """Does what it is told; "good" earns 0.5, "bad" costs 1, "slow" earns 0.25, "found" succeeds, "end" ends.

    Args:
        place: "loop": its methods are awaited; else they are plain.
        mark: a file that is made by the first "... once", which is the only one that does anything.
        on_hang: called where a method begins to hang: in the loop or in its thread.
    """

    reward_range = (-3.0, 2.0)

    def __init__(
        self,
        place: str = "thread",
        mark: str = "",
        max_action_seconds: float | None = None,
        hangs_at_reset: bool = False,
        hangs_always: bool = False,
        on_hang: Callable[[], object] = int,
    ) -> None:
        self.max_action_seconds = max_action_seconds
        self._is_async = place == "loop"
        self._mark, self._hangs_at_reset, self._hangs_always = mark, hangs_at_reset, hangs_always
        self._on_hang = on_hang

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        answer = "go", {}
        return self._hang(answer) if self._hangs_at_reset else self._told(answer)

    def step(self, action: str) -> Any:
        word = action.split()[0] if action else ""
        if action.endswith("once"):
            if Path(self._mark).exists():
                word = "good"
            else:
                Path(self._mark).touch()
        if self._hangs_always or word == "wait":
            return self._hang(None)
        if word == "slow":
            return self._told(("", 0.25, False, False, {}), seconds=0.4)
        self._end(word)
        reward = {"good": 0.5, "bad": -1.0}.get(word, 0.0)
        is_found = word == "found"
        declared = Reward({"word": reward}, events=("found",) if is_found else (), success=is_found or None)
        return self._told(("", declared, word == "end", False, {}))

    def _end(self, word: str) -> None:
        if word == "refuse":
            raise ActionLimitError("Ending: the action asks for more than it may")
        if word == "loop":
            sum(range(10**12))  # in C, with the interpreter's lock
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "exit":
            os._exit(3)
        if word == "eat":
            self._eaten = bytearray(8 * 2**30)
        if word == "alarm":
            with killed_after(0.2):
                sum(range(10**12))

    def _hang(self, answer: Any) -> Any:
        if self._is_async:
            return self._told(answer, seconds=3600.0, begin=self._on_hang)
        self._on_hang()
        threading.Event().wait(20.0)  # in a thread of its own, which nobody can stop
        return answer

    def _told(self, answer: Any, seconds: float = 0.0, begin: Callable[[], object] = int) -> Any:
        if not self._is_async:
            time.sleep(seconds)
            return answer

        async def wait() -> Any:
            begin()
            await asyncio.sleep(seconds)
            return answer

        return wait()
