"""WeightSync: the learner's weights become the engine's, as a transaction that either happened or poisoned the engine.

Stage -> pause -> apply -> attest -> resume. Until `resume` nothing is sampled, so no token carries a version that was
not committed. Called by the trainer after every update, and by `run.py` when a run begins or goes on.
"""

from __future__ import annotations

from gspo_gym.engine.base import Engine, PauseMode, WeightUpdate
from gspo_gym.errors import EnginePoisonedError


class WeightSync:
    """Publishes weights to an engine that shares them with the learner.

    Args:
        engine: whose weights change.
        mode: what becomes of requests in flight.
    """

    def __init__(self, engine: Engine, *, mode: PauseMode = "wait") -> None:
        self._engine = engine
        self._mode = mode

    async def publish(self, version: int) -> None:
        """Make the learner's present weights the ones that sample, as `version`.

        Raises:
            EnginePoisonedError: a step failed; what the engine holds is unknown, and it never answers again.
        """
        update = WeightUpdate(version, "shared")
        await self._engine.pause(self._mode)
        try:
            await self._engine.apply_weights(update)
            await self._engine.resume(version)
        except BaseException as error:
            reason = f"the update to version {version} failed: {type(error).__name__}: {error}"
            self._engine.poison(reason)
            if isinstance(error, Exception):
                raise EnginePoisonedError(reason) from error
            raise
