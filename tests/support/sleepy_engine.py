"""An engine without a model that can sleep, and that fails to when it is told to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from gspo_gym.engine.base import Capabilities, PauseMode, WeightUpdate
from gspo_gym.engine.scripted import Replies, ScriptedEngine
from gspo_gym.errors import EngineError

Step = Literal["sleep", "wake_up"]


class SleepyEngine(ScriptedEngine):
    """Replays replies; asleep it admits nobody, and takes neither weights nor another sleep, as vLLM.

    Args:
        failing: the steps that raise EngineError. log: gets the names of all steps of sleep and updates.
    """

    def __init__(self, replies: Replies, *, failing: Collection[Step] = (), log: list[str] | None = None) -> None:
        super().__init__(replies)
        self.log = [] if log is None else log
        self.is_asleep = False
        self._failing = failing

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, can_sleep=True)

    async def sleep(self) -> None:
        self._gate.pause()
        await self._gate.drained()
        self._note("sleep")
        self.is_asleep = True

    async def wake_up(self) -> None:
        if not self.is_asleep:
            raise EngineError("wake_up: the engine is not asleep")
        self._note("wake_up")
        self.is_asleep = False
        self._gate.resume(self._gate.weight_version)

    async def pause(self, mode: PauseMode) -> None:
        self.log.append("pause")
        await super().pause(mode)

    async def apply_weights(self, update: WeightUpdate) -> None:
        if self.is_asleep:
            raise EngineError("apply_weights: the engine is asleep")
        self.log.append(f"apply {update.version}")
        await super().apply_weights(update)

    def _note(self, step: Step) -> None:
        self.log.append(step)
        if step in self._failing:
            raise EngineError(f"{step}: out of memory")
