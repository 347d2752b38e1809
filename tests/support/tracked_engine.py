"""Engines which a test can count: how many were made, and which of them were closed."""

from __future__ import annotations

import asyncio

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.scripted import ScriptedEngine


class TrackedEngine(ScriptedEngine):
    """Answers [5, 6] to every call. Closing and loading take turns of the event loop, as those of a process do."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(lambda prompt, turn: [5, 6])
        self.number = number
        self.num_closing_turns = 3
        self.is_closed = False

    async def apply_weights(self, update: WeightUpdate) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        await super().apply_weights(update)

    async def close(self) -> None:
        for _ in range(self.num_closing_turns):
            await asyncio.sleep(0)
        await super().close()
        self.is_closed = True


class Workshop:
    """Makes engines, numbered from 0.

    Attributes:
        made: all of them, in order.
        may_make: cleared, `make` waits for it.
        max_open: most engines that were there at once.
    """

    def __init__(self) -> None:
        self.made: list[TrackedEngine] = []
        self.max_open = 0
        self.may_make = asyncio.Event()
        self.may_make.set()

    async def make(self) -> TrackedEngine:
        await self.may_make.wait()
        self.made.append(TrackedEngine(len(self.made)))
        self.max_open = max(self.max_open, self.num_open)
        return self.made[-1]

    @property
    def num_open(self) -> int:
        """Engines made and not closed."""
        return sum(not engine.is_closed for engine in self.made)
