"""An engine whose every await is a place to die, and whose samples say which weights drew them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from gspo_gym.engine.base import Capabilities, EngineHealth, SamplingParams, WeightUpdate
from gspo_gym.engine.gate import GatedEngine
from gspo_gym.errors import EngineError
from gspo_gym.types import Completion, FinishReason

HALF_LOADED = 10_000  # plus the version: between two tensors of an update


class SimulatedEngine(GatedEngine):
    """Takes virtual time for everything it does.

    Attributes:
        loaded: the version whose weights it holds, which its tokens carry.
        is_dead: its process has died: it fails whatever it is asked for, and says so.
        fails_once: what it does next fails, after which it is as well as before.
        is_closed: `close` has come to its end.
    """

    def __init__(self, choices: random.Random) -> None:
        super().__init__()
        self.loaded = 0
        self.is_dead = False
        self.fails_once = False
        self.is_closed = False
        self._choices = choices
        self._is_whole = asyncio.Event()  # not between two tensors of an update: calls that are kept are frozen
        self._is_whole.set()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            is_trainable=True,
            seeds_per_request=True,
            reuses_prefixes=False,
            max_model_len=512,
            update_kinds=("full",),
            pause_modes=("wait", "keep"),
        )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        versions = []
        async with self._gate.admit(session_id, deadline_seconds):
            for _ in range(sampling.max_tokens):
                await self._work()
                await self._is_whole.wait()
                versions.append(self.loaded)
        count = len(versions)
        return Completion(
            np.zeros(count, np.int32),
            np.full(count, -0.5, np.float32),
            FinishReason.LENGTH,
            np.array(versions, np.int32),
        )

    async def apply_weights(self, update: WeightUpdate) -> None:
        self._gate.require_paused()
        await self._work()
        self._is_whole.clear()
        try:
            self.loaded = HALF_LOADED + update.version
            await self._work()
            self.loaded = update.version
        finally:
            self._is_whole.set()

    async def resume(self, version: int) -> None:
        if self._choices.random() < 0.5:  # a local engine's commit asks nothing that could be dead
            await self._work()
        await super().resume(version)

    async def health(self) -> EngineHealth:
        await asyncio.sleep(0)
        return self._gate.health("its process died" if self.is_dead else None)

    async def close(self) -> None:
        self._gate.close()
        await asyncio.sleep(self._choices.random() * 0.01)
        self.is_closed = True

    async def _work(self) -> None:
        await asyncio.sleep(self._choices.choice((0.0, 0.001, 0.01)) * self._choices.random())
        if self.is_dead:
            raise EngineError("its process died")
        if self.fails_once:
            self.fails_once = False
            raise EngineError("the connection was lost")
