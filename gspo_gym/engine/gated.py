"""What every engine does alike, because its gate decides it: versions, aborts, pausing and poison.

Engines derive from `GatedEngine` and add what is behind their gate. Nobody asks whether an engine is one: what it can
do is in its capabilities, and what it must do in `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from gspo_gym.engine.base import Capabilities, PauseMode
from gspo_gym.engine.gate import Gate
from gspo_gym.errors import ConfigError


class GatedEngine(ABC):
    """The part of an engine that is the same for all."""

    def __init__(self) -> None:
        self._gate = Gate()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it promises."""

    @property
    def weight_version(self) -> int:
        """Of the weights that were committed last."""
        return self._gate.weight_version

    async def abort(self, session_id: str) -> None:
        """Give up the session's calls; see `Engine.abort`."""
        self._gate.abort(session_id)

    async def pause(self, mode: PauseMode) -> None:
        """Admit nobody; with "wait", until no call is in flight; see `Engine.pause`.

        Raises:
            ConfigError: a mode that is not in the capabilities.
            EngineError: it is paused already.
        """
        if mode not in (modes := self.capabilities.pause_modes):
            wanted = " or ".join(map(repr, modes))
            raise ConfigError(f"{type(self).__name__}.pause: expected mode {wanted}, got {mode!r}")
        self._gate.pause()
        if mode == "wait":
            await self._gate.drained()

    async def resume(self, version: int) -> None:
        """Commit and admit again; see `Engine.resume`."""
        self._gate.resume(version)

    def poison(self, reason: str) -> None:
        """Never answer again; see `Engine.poison`."""
        self._gate.poison(reason)
