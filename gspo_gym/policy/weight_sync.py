"""WeightSync: the learner's weights become the engines', as a transaction that either happened or poisoned the engine.

Stage -> pause -> apply -> attest -> resume. Until `resume` nothing that was sampled under the new weights gets out, so
no token carries a version that was not committed. An engine that fails a step never answers again; where another can be
put in its place, that one gets the new weights, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gspo_gym.engine.base import Engine, PauseMode, UpdateKind, WeightUpdate
from gspo_gym.engine.replicas.rebuildable import BringUp
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError
from gspo_gym.policy.attestation import Canary, ChecksumLog
from gspo_gym.policy.staging import Handover, Staging, tensor_digests, verify_staged
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
        targets: the engines.
        mode: the fate of requests in flight.
        kind: the way by which weights reach the engines; see `choose_kind`.
        staging: writes them, or hands them over; needed unless they are shared.
        canary: asked of every engine before a version is committed; None: never, for engines that share the learner's
            memory.
        verify_every_k: updates between comparisons of checksums, of the staged files and, where engines have them, of
            their tensors; 0 compares none.
        interval: steps between updates by `after_step`.
        on_event: told of every failed update and every rebuild.

    Attributes:
        committed: every version that an engine was ever allowed to sample under; engines begin with 0.
        num_rebuilds: engines that were replaced after a failed update.
    """

    def __init__(
        self,
        targets: Engine | Sequence[Target],
        *,
        mode: PauseMode = "wait",
        kind: UpdateKind = "shared",
        staging: Staging | Handover | None = None,
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
        self._staged_tensors: Mapping[str, str] | None = None
        self._last: WeightUpdate | None = None
        _require_able(self._targets, mode=mode, kind=kind, has_staging=staging is not None, canary=canary)

    async def after_step(self, step: int) -> None:
        """Publish the learner's weights after a step, as that version, if it is the interval's turn."""
        if step % self._interval == 0:
            await self.publish(step)

    async def publish(self, version: int) -> None:
        """Make the learner's present weights the ones that sample, as `version`.

        If they cannot be staged, the engines go on under the version that they have, and the failure is raised.

        Raises:
            EnginePoisonedError: a step failed and the engine could not be replaced; its weights are unknown, and it
                never answers again.
            EngineError: the weights could not be staged, twice.
        """
        update = await self._stage(version)
        self._num_published += 1
        try:  # from here on the engines may hold anything
            self._staged_tensors = await asyncio.to_thread(self._verified_tensors, update)
            results = await asyncio.gather(
                *(self._prepare(target.engine, update) for target in self._targets), return_exceptions=True
            )
            for target, result in zip(self._targets, results, strict=True):
                await self._mend(target, update, result, lambda fresh: self._prepare(fresh, update))
            self.committed.add(version)  # all have attested; before the first of them samples
            self._last = update  # an engine that is restored from here on gets this version
            for target in self._targets:
                outcome = await _outcome(target.engine.resume(version))
                await self._mend(target, update, outcome, lambda fresh: self._bring_up(fresh, update))
        except BaseException as error:
            reason = _reason(update, error)
            # Other kinds of end, too: a half-made update must never sample.
            for target in self._targets:
                target.engine.poison(reason)
            if isinstance(error, Exception) and not isinstance(error, EnginePoisonedError):
                raise EnginePoisonedError(reason) from error
            raise
        if self._staging is not None:
            self._staging.retire(version)

    async def attest(self) -> None:
        """Ask every engine for its canary without an update: when a run begins with the weights an engine started with.

        Raises:
            EngineError: one does not sample what the learner would.
        """
        for target in self._targets:
            if self._canary is not None:
                await self._canary.check(target.engine)

    async def restore(self, engine: Engine) -> None:
        """Give a fresh engine the last committed version, in the place of an engine that died between updates.

        If another version is committed meanwhile, the engine gets that one as well. Weights that were handed over can
        be handed over again as long as they are the learner's present ones.

        Raises:
            EngineError: nothing was staged: shared weights may have changed since the commit. Or the weights that were
                handed over are no longer there.
        """
        update: WeightUpdate | None = None
        while update is not self._last or (update is None and self.committed != {0}):
            update = self._last
            if update is None or update.kind == "shared":
                raise EngineError("the last committed weights were shared, not staged: the engine cannot be restored")
            # Files are compared, and no canary: the learner may be ahead by now.
            await asyncio.to_thread(verify_staged, update)
            await engine.pause("wait")
            await engine.apply_weights(update)
            await engine.resume(update.version)
            self._tell("engine_restored", {"version": update.version})

    def begin(self) -> None:
        """Note that the engines were started with the learner's present weights, for one that dies before an update.

        For weights that are handed over: those of a folder that an engine is started with stay there.
        """
        if self._kind == "transfer" and self._staging is not None:
            self._last = self._staging.stage(0, self._kind)

    def can_restore(self) -> bool:
        """Return whether `restore` can give an engine the last committed version now; it reads all weights.

        It cannot while the learner has others than it published: weights that are handed over are the learner's.
        """
        if self._last is None or self._last.tensors is None:
            return True
        try:
            next(iter(self._last.tensors), None)
        except EngineError:
            return False
        return True

    def is_committed(self, version: int) -> bool:
        """Return whether tokens of this version may exist."""
        return version in self.committed

    def close(self) -> None:
        """Remove staged weights; the engines are not closed."""
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
            # Once more, while it costs nothing: no engine has been paused yet.
            return await asyncio.to_thread(self._staging.stage, version, self._kind)

    def _verified_tensors(self, update: WeightUpdate) -> Mapping[str, str] | None:
        if update.kind == "shared" or not self._verify_every_k or self._num_published % self._verify_every_k:
            return None
        verify_staged(update)
        return tensor_digests(update)

    async def _prepare(self, engine: Engine, update: WeightUpdate) -> None:
        await engine.pause(self._mode)
        await engine.apply_weights(update)
        if self._staged_tensors is not None:
            await self._checksums.check(engine, update, self._staged_tensors)
        if self._canary is not None:
            await self._canary.check(engine)

    async def _bring_up(self, engine: Engine, update: WeightUpdate) -> None:
        await self._prepare(engine, update)
        await engine.resume(update.version)

    async def _mend(
        self, target: Target, update: WeightUpdate, failure: BaseException | None, bring_up: BringUp
    ) -> None:
        if failure is None:
            return
        if target.rebuild is None or not isinstance(failure, Exception):
            raise failure
        reason = _reason(update, failure)
        self._tell("update_failed", {"version": update.version, "reason": reason})
        target.engine.poison(reason)
        self.num_rebuilds += 1
        await target.rebuild(bring_up)

    def _tell(self, name: str, values: Mapping[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(name, values)


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """Groups with tokens of committed versions only; num_dropped: trajectories with others."""

    groups: tuple[TrajectoryGroup, ...]
    num_dropped: int


def require_committed(groups: Sequence[TrajectoryGroup], is_committed: Callable[[int], bool]) -> Committed:
    """Drop the trajectories with a token of an uncommitted version; count them, and name them in their group.

    The last gate before the learner: it catches engines that break their contract.
    """
    committed_groups = tuple(_without_uncommitted(group, is_committed) for group in groups)
    before, after = (sum(len(group.trajectories) for group in some) for some in (groups, committed_groups))
    assert all(
        is_committed(version) for group in committed_groups for t in group.trajectories for version in versions_of(t)
    )
    return Committed(committed_groups, before - after)


def versions_of(trajectory: Trajectory) -> frozenset[int]:
    """Return the versions of the weights that sampled its tokens; -1 stands for an unknown one."""
    versions_by_segment = [np.unique(segment.weight_version[segment.action_mask]) for segment in trajectory.segments]
    return frozenset(int(version) for versions in versions_by_segment for version in versions)


def choose_kind(
    engine: Engine,
    *,
    is_adapter: bool,
    mode: Literal["auto", "direct", "full"],
    direct: bool,
    is_handed_over: bool = False,
) -> UpdateKind:
    """Choose the way by which weights reach this engine with the least copying that the settings allow.

    `direct` allows to share memory. Of staged weights, mode "full" sends all, an adapter merged into them, and the
    others send the adapter alone if the policy is one and the engine takes adapters. `is_handed_over` is for engines
    that were started for that.

    Raises:
        ConfigError: the engine has none of these ways.
    """
    kinds: list[UpdateKind] = ["shared"] if direct else []
    kinds += ["adapter"] if is_adapter and mode != "full" else []
    kinds = ["transfer"] if is_handed_over else [*kinds, "full"]
    for kind in kinds:
        if kind in engine.capabilities.update_kinds:
            return kind
    raise ConfigError(
        f"training.weight_sync: expected an engine that takes new weights as one of {', '.join(kinds)}, got one that "
        f"takes {list(engine.capabilities.update_kinds)}; see mode, direct and transfer there, and whether the engine "
        "was started for adapters"
    )


def _without_uncommitted(group: TrajectoryGroup, is_committed: Callable[[int], bool]) -> TrajectoryGroup:
    trajectories, dropped_episodes = [], list(group.dropped)
    for trajectory in group.trajectories:
        unknown = sorted(version for version in versions_of(trajectory) if not is_committed(version))
        if unknown:
            reason = f"sampled under weights that were never committed: version {unknown[0]}"
            dropped_episodes.append(DroppedEpisode(trajectory.trajectory_id, trajectory.outcome, reason))
        else:
            trajectories.append(trajectory)
    return replace(group, trajectories=tuple(trajectories), dropped=tuple(dropped_episodes))


def _require_able(
    targets: Sequence[Target], *, mode: PauseMode, kind: UpdateKind, has_staging: bool, canary: Canary | None
) -> None:
    if not targets:
        raise ConfigError("WeightSync: expected one engine at least, got none")
    if kind != "shared" and not has_staging:
        raise ConfigError(f"WeightSync: an update of kind {kind!r} needs a staging")
    for target in targets:
        able = target.engine.capabilities
        if mode not in able.pause_modes or kind not in able.update_kinds:
            raise ConfigError(
                f"WeightSync: expected an engine that pauses by {mode!r} and takes updates of kind {kind!r}, got one "
                f"with {able.pause_modes} and {able.update_kinds}"
            )
        if canary is not None and able.logprob_mode != "processed":
            raise ConfigError(
                "WeightSync: a canary compares logprobs of the distribution sampled from ('processed'), but the "
                f"engine's are {able.logprob_mode!r}"
            )


def _reason(update: WeightUpdate, error: BaseException) -> str:
    return f"the update to version {update.version} failed: {type(error).__name__}: {error}"


async def _outcome(step: Awaitable[None]) -> Exception | None:
    try:
        await step
    except Exception as error:
        return error
    return None
