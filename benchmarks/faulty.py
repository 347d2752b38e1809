"""An environment that fails as it is told, for the fault run: worker processes import it, so it loads nothing heavy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_TURNS = 2
BIG_TEXT = 10 * 2**20  # characters

_leaked: list[object] = []  # what an environment leaks is held by its module, as with a forgotten cache


class Faulty:
    """Two turns; an action that names a fault brings it about, any other is repeated and paid.

    Paid is an eighth for the first turn, and for the second (seed % 7) / 8: floats that add up exactly.
    """

    reward_range = (0.0, 1.0)

    def __init__(self) -> None:
        self._seed = 0
        self._turn = 0

    def reset(self, *, seed: int = 0, options: Any = None) -> Any:
        """Shows the seed."""
        del options
        self._seed, self._turn = seed, 0
        return opening_of(seed), {}

    def step(self, action: str) -> Any:
        """Fails, or answers; plain, or awaitable where the fault is to await for ever."""
        answer = _FAULTS[action](self._seed) if action in _FAULTS else None
        if answer is not None:
            return answer
        self._turn += 1
        is_last = self._turn == MAX_TURNS
        reward = (self._seed % 7) / 8 if is_last else 0.125
        return answer_of(self._turn, action), reward, is_last, False, {}


def opening_of(seed: int) -> str:
    """What the environment says first."""
    return f"task {seed}"


def answer_of(turn: int, action: str) -> str:
    """What it answers to the action of a turn, counted from 1."""
    return f"{turn}: {action}"


def _raise(seed: int) -> None:
    raise ValueError(f"task {seed} is told to raise")


def _wait(seed: int) -> Any:
    """Hangs in a way that can be interrupted: it awaits, or sleeps."""
    if seed % 2:
        return asyncio.sleep(3600)
    time.sleep(3600)
    return None


def _loop(seed: int) -> None:
    """Hangs in C, with the interpreter's lock held; politely, since a dozen of these at once on a machine of two cores
    would make the healthy ones late."""
    os.nice(19)
    with contextlib.suppress(OSError):  # Linux may weigh whole sessions instead
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    sum(range(10**12 + seed))


def _leak(seed: int) -> None:
    """Leaves behind open files, threads or memory; the episode itself goes on."""
    if seed % 3 == 0:
        _leaked.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(32))
    elif seed % 3 == 1:
        for _ in range(32):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
    else:
        _leaked.append(b"x" * 2**26)


def _die(seed: int) -> None:
    del seed
    os.kill(os.getpid(), signal.SIGKILL)


def _wrong_types(seed: int) -> Any:
    return ("only", "three", seed)


def _big_text(seed: int) -> Any:
    del seed
    return "x" * BIG_TEXT, 0.0, False, False, {}


_FAULTS: dict[str, Callable[[int], Any]] = {
    "raise": _raise,
    "wait": _wait,
    "loop": _loop,
    "leak": _leak,
    "die": _die,
    "types": _wrong_types,
    "text": _big_text,
}
