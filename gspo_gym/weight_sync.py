"""WeightSync: the learner's weights become the engines', as a transaction that either happened or poisoned the engine.

Stage -> pause -> apply -> attest -> resume. Until `resume` nothing is sampled for anybody, so no token carries a version
that was not committed. An engine that fails a step never answers again; where another can be put in its place, that one
gets the new weights, once. Called by the trainer after every update, and by `run.py` when a run begins or goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gspo_gym.attestation import Canary, ChecksumLog
from gspo_gym.engine.base import Engine, PauseMode, UpdateKind, WeightUpdate
from gspo_gym.engine.rebuildable import BringUp
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError
from gspo_gym.staging import Staging, tensor_digests, verify_staged
from gspo_gym.types import DroppedEpisode, Trajectory, TrajectoryGroup

# Closes an engine, makes another, lets the function bring it up, and only then lets calls through; see
# `RebuildableEngine.rebuild`.
Rebuild = Callable[[BringUp], Awaitable[None]]
# Told what happened: a name and JSON values (Any).
OnEvent = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that gets the weights; `rebuild` None: a failed update is the end of it."""

    engine: Engine
    rebuild: Rebuild | None = None


class WeightSync:
    """Publishes the learner's weights to one engine or several, which commit a version together or not at all.

    Args:
        targets: whose weights change.
        mode: what becomes of requests in flight.
        kind: how weights reach the engines; see `choose_kind`.
        staging: writes them; needed unless they are shared.
        canary: asked of every engine before a version is committed; None: never, for engines that share the learner's
            memory.
        verify_every_k: updates between comparisons of checksums, of staged files and, where engines have them, of what
            they hold; 0 compares none.
        interval: steps between updates by `after_step`.
        on_event: told of every failed update and every rebuild.

    Attributes:
        committed: every version that an engine was ever allowed to sample under; 0 is what engines begin with.
        num_rebuilds: engines that were replaced after a failed update.
    """

    def __init__(
        self,
        targets: Engine | Sequence[Target],
        *,
        mode: PauseMode = "wait",
        kind: UpdateKind = "shared",
        staging: Staging | None = None,
        canary: Canary | None = None,
        verify_every_k: int = 0,
        interval: int = 1,
        on_event: OnEvent | None = None,
    ) -> None:
        self.committed: set[int] = {0}
        self.num_rebuilds = 0
        self._targets = tuple(targets) if isinstance(targets, Sequence) else (Target(targets),)
        self._mode = mode
        self._kind: UpdateKind = kind
        self._staging = staging
        self._canary = canary
        self._verify_every_k = verify_every_k
        self._interval = interval
        self._on_event = on_event
        self._checksums = ChecksumLog()
        self._num_published = 0
        self._last: WeightUpdate | None = None
        _require_able(self._targets, mode=mode, kind=kind, has_staging=staging is not None, canary=canary)

    async def after_step(self, step: int) -> None:
        """Publish what the learner has after a step, as that version, if it is the interval's turn."""
        if step % self._interval == 0:
            await self.publish(step)

    async def publish(self, version: int) -> None:
        """Make the learner's present weights the ones that sample, as `version`.

        If they cannot be staged, the engines go on under the version that they have, and the failure is raised.

        Raises:
            EnginePoisonedError: a step failed and the engine could not be replaced; what it holds is unknown, and it
                never answers again.
            EngineError: the weights could not be staged, twice.
        """
        update = await self._stage(version)
        self._num_published += 1
        is_verified = self._verify_every_k > 0 and self._num_published % self._verify_every_k == 0
        try:
            results = await asyncio.gather(
                *(self._bring(target.engine, update) for target in self._targets), return_exceptions=True
            )
            for target, result in zip(self._targets, results, strict=True):
                await self._mend(target, update, result)
            if is_verified:
                await self._verify(update)
            self.committed.add(version)  # before the first of them samples
            for target in self._targets:
                await self._mend(target, update, await _outcome(target.engine.resume(version)))
        except BaseException as error:
            self._poison_all(update, error)
            if isinstance(error, Exception) and not isinstance(error, EnginePoisonedError):
                raise EnginePoisonedError(_reason(update, error)) from error
            raise
        self._last = update
        if self._staging is not None:
            self._staging.retire(version)

    async def restore(self, engine: Engine) -> None:
        """Give a fresh engine the last committed version; for one that died between updates.

        Its canary is not compared with the learner, which may be ahead by now; the files are compared with what was
        staged.

        Raises:
            EngineError: nothing was staged: what was shared is no longer known to be what was committed.
        """
        update = self._last
        if update is None and self.committed == {0}:
            return  # it begins with version 0
        if update is None or update.kind == "shared":
            raise EngineError("the last committed weights were shared, not staged: the engine cannot be restored")
        await asyncio.to_thread(verify_staged, update)
        await engine.pause("wait")
        await engine.apply_weights(update)
        await engine.resume(update.version)
        self._tell("engine_restored", {"version": update.version})

    def is_committed(self, version: int) -> bool:
        """Whether tokens of this version may exist."""
        return version in self.committed

    def close(self) -> None:
        """Remove what was staged; the engines are closed by who made them."""
        if self._staging is not None:
            self._staging.close()

    async def _stage(self, version: int) -> WeightUpdate:
        if self._kind == "shared":
            return WeightUpdate(version, "shared")
        assert self._staging is not None
        try:
            return await asyncio.to_thread(self._staging.stage, version, self._kind)
        except EngineError as error:
            self._tell("staging_failed", {"version": version, "reason": str(error)})
            return await asyncio.to_thread(self._staging.stage, version, self._kind)

    async def _bring(self, engine: Engine, update: WeightUpdate) -> None:
        """All but the commit."""
        await engine.pause(self._mode)
        await self._apply(engine, update)

    async def _apply(self, engine: Engine, update: WeightUpdate) -> None:
        await engine.apply_weights(update)
        if self._canary is not None:
            await self._canary.check(engine)

    async def _verify(self, update: WeightUpdate) -> None:
        if update.kind == "shared":
            return
        await asyncio.to_thread(verify_staged, update)
        staged = await asyncio.to_thread(tensor_digests, update)
        await self._checksums.check([target.engine for target in self._targets], update, staged)

    async def _mend(self, target: Target, update: WeightUpdate, failure: BaseException | None) -> None:
        """Replace an engine that failed by one that holds the update and samples under it; None: it did not fail."""
        if failure is None:
            return
        reason = _reason(update, failure)
        target.engine.poison(reason)
        if target.rebuild is None or not isinstance(failure, Exception):
            raise failure
        self._tell("update_failed", {"version": update.version, "reason": reason})
        self.num_rebuilds += 1
        await target.rebuild(lambda fresh: self._bring_up(fresh, update))
        self._tell("engine_rebuilt", {"version": update.version})
