"""Several engines that serve one policy, as one engine.

A session stays where its tokens were computed; a call that fails goes to another replica if that gives the very same
sample; new weights reach all replicas as one transaction. It is no load balancer for models that differ, and does not
make replicas (`rebuildable.py` does).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from gspo_gym.engine.base import (
    Capabilities,
    Engine,
    EngineHealth,
    PauseMode,
    SamplingParams,
    WeightUpdate,
    num_tokens_to_sample,
)
from gspo_gym.engine.gate import Deadline, GatedEngine
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.replica_set import EngineAction, Replica, ReplicaSet, RouterSettings, common_capabilities
from gspo_gym.errors import ConfigError, EngineError, EngineLostError, EnginePoisonedError, EngineTimeoutError
from gspo_gym.types import Completion, TokenIds


class RoutedEngine(GatedEngine):
    """Several replicas behind the interface of one.

    An update that fails on some replicas is committed by the others. The failed ones are poisoned and left out, like
    those found poisoned or under other weights, until a health check finds them alive under the committed version. If
    it fails on all, this engine is poisoned.

    Args:
        replicas: engines of the same policy, under the same weights. Closed with this one.
        clock: seconds, monotonic. sleep: waits by it.

    Attributes:
        attest: awaited for each replica between its new weights and their commit; a replica for which it raises
            EngineError is left out. None attests nothing.
        num_retries: attempts made elsewhere after a replica had failed.
    """

    def __init__(
        self,
        replicas: Sequence[Engine],
        *,
        settings: RouterSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if not replicas:
            raise ConfigError("RoutedEngine: expected at least one replica, got none")
        super().__init__()
        self.attest: EngineAction | None = None
        self.num_retries = 0
        self._clock = clock
        self._gate.weight_version = self._newest_version = _same_version(replicas)
        self._set = ReplicaSet(
            replicas,
            settings or RouterSettings(),
            clock=clock,
            sleep=sleep,
            committed_version=lambda: None if self._gate.is_paused else self._gate.weight_version,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Return the promises that all replicas make."""
        return common_capabilities([replica.engine.capabilities for replica in self._set.all])

    @property
    def replicas(self) -> Sequence[Replica]:
        """Return the replicas, to be watched; one that is updated by any other way than this engine is left out."""
        return self._set.all

    def set_rebuild(self, rebuild: EngineAction) -> None:
        """Set the function that puts a fresh engine with the committed weights behind a replica that is left out.

        It is called in the background, again and again until the replica is in order.
        """
        self._set.rebuild = rebuild

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion on one replica; see `Engine.generate`.

        When the replica fails, another one is asked if it gives the same sample: the seed decides it, under the same
        version. Otherwise a sample that made its replica fail would be replaced by another sample.

        Raises:
            EngineError: no replica answered; names what each one said.
        """
        num_tokens_to_sample(len(prompt_token_ids), sampling, self.capabilities.max_model_len)
        async with self._gate.admit(session_id, deadline_seconds) as deadline, self._set.watched():
            is_probe = self._gate.is_paused  # or it would not have been admitted
            return await self._answer(_Call(prompt_token_ids, sampling, session_id, deadline, is_probe))

    async def end_session(self, session_id: str) -> None:
        """Forget a session, on every replica that has seen it."""
        await self._set.end_session(session_id)

    async def forget_ended(self) -> None:
        """Use nothing of ended sessions again on any replica; see `Engine.forget_ended`."""
        for replica in self._set.all:
            await replica.engine.forget_ended()

    async def check_health(self) -> None:
        """Check the health of every replica; done regularly while there are calls."""
        await self._set.check_health()

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update on all replicas; see `Engine.pause`. Calls that wait for a replica wait for the commit."""
        self._close_to_calls(mode)
        await self._on_each("pause", lambda engine: engine.pause(mode))

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Load staged weights into all replicas, and let them be attested; see `Engine.apply_weights`."""
        self._require_kind(update)
        self._gate.require_paused()
        await self._on_each("apply_weights", lambda engine: self._apply(engine, update))

    async def checksums(self) -> Mapping[str, str]:
        """Return the digests that all replicas have.

        Raises:
            EngineError: they do not hold the same.
        """
        held = [(r.number, await r.engine.checksums()) for r in self._set.members]
        for number, digests in held:
            if digests != held[0][1]:
                raise EngineError(f"replicas {held[0][0]} and {number} hold different weights")
        return held[0][1] if held else {}

    async def resume(self, version: int) -> None:
        """Commit on all replicas; see `Engine.resume`."""
        self._gate.require_paused()
        self._newest_version = version  # calls that were kept in flight may end on replicas that have resumed
        await self._on_each("resume", lambda engine: engine.resume(version))
        for replica in self._set.all:  # also those that are left out
            if isinstance(replica.engine, RebuildableEngine):
                replica.engine.allow_rebuilds()
        self._gate.resume(version)
        self._set.wake()

    def poison(self, reason: str) -> None:
        """Never answer again, and no replica either."""
        self._gate.poison(reason)
        for replica in self._set.all:
            replica.engine.poison(reason)

    async def health(self) -> EngineHealth:
        """Return the state: alive if any replica takes part."""
        reasons = [f"replica {r.number}: {r.left_out}" for r in self._set.all if r.left_out is not None]
        return self._gate.health("; ".join(reasons) if len(reasons) == len(self._set.all) else None)

    async def close(self) -> None:
        """Close every replica."""
        self._gate.close()
        await self._set.close()

    async def _answer(self, call: _Call) -> Completion:
        failures: list[str] = []
        are_lost: list[bool] = []
        tried: list[Replica] = []
        version: int | None = None  # that the first attempt began under
        while True:
            replica = await self._pick(call, tried, failures)
            # The sample would be another policy's than the session's other calls expect.
            if version not in (None, self._gate.weight_version):
                reason = f"weights changed before the call could be made elsewhere: {'; '.join(failures)}"
                raise (EngineLostError if all(are_lost) else EngineError)(reason)
            version = self._gate.weight_version
            self.num_retries += bool(tried)
            tried.append(replica)
            try:
                return await self._ask(replica, call, version)
            # The time is up for another replica, too.
            except EngineTimeoutError:
                raise
            except EngineError as error:
                failures.append(f"replica {replica.number}: {error}")
                are_lost.append(await _is_lost(replica, error))
                if len(tried) == len(self._set.all) or not self._gives_same_sample():
                    raise (EngineLostError if all(are_lost) else EngineError)("; ".join(failures)) from error

    def _gives_same_sample(self) -> bool:
        # A sample that is never trained on may differ.
        common = self.capabilities
        return common.seeds_per_request or not common.is_trainable

    async def _pick(self, call: _Call, tried: Sequence[Replica], failures: Sequence[str]) -> Replica:
        """Wait for a replica that may be asked.

        Raises:
            EngineError: there is none, or none came up in time.
        """
        begun = self._clock()
        untried = [replica for replica in self._set.all if replica not in tried]
        while True:
            replica = self._set.choose(call.session_id, untried)
            # Between updates only: a call would begin under weights that are about to go.
            if replica is not None and (call.is_probe or not self._gate.is_paused):
                self._set.settle(call.session_id, replica)
                return replica
            self._set.require_hope(untried, since=begun, failures=failures)
            await self._set.change()

    async def _ask(self, replica: Replica, call: _Call, version: int) -> Completion:
        begun, left = self._clock(), call.deadline.seconds_left()
        in_flight = replica.num_in_flight + 1  # read before the call, which counts itself in
        try:
            completion = await replica.run(
                replica.engine.generate(
                    call.prompt_token_ids, call.sampling, session_id=call.session_id, deadline_seconds=left
                )
            )
            if not call.is_probe:
                self._require_committed(completion, version)
        except EngineTimeoutError:
            replica.note_timeout(begun, self._clock())
            raise
        except asyncio.CancelledError:
            if call.deadline.has_passed():  # cancelled by the gate's watchdog
                replica.note_timeout(begun, self._clock())
            raise
        except EnginePoisonedError as error:
            self._set.leave_out(replica, str(error))
            raise
        except EngineError:
            replica.breaker.fail(self._clock())
            raise
        finally:
            self._set.wake()
        replica.note_answer(in_flight)
        return completion

    def _require_committed(self, completion: Completion, version: int) -> None:
        """Refuse tokens of versions that were not committed while the call was under way.

        Raises:
            EnginePoisonedError: the replica missed an update, or lost it by a restart.
        """
        versions = {int(one) for one in completion.weight_version}
        if wrong := sorted(one for one in versions - {-1} if not version <= one <= self._newest_version):
            raise EnginePoisonedError(f"it sampled under version {wrong[0]}, expected {version}")

    async def _on_each(self, step: str, action: EngineAction) -> None:
        """Take one step of an update on all replicas that take part; those that fail it are left out.

        Raises:
            EnginePoisonedError: all failed.
        """
        members = self._set.members
        # All of them, even if one fails: the others commit without it.
        results = await asyncio.gather(*(action(r.engine) for r in members), return_exceptions=True)
        for replica, result in zip(members, results, strict=True):
            if isinstance(result, BaseException):
                self._set.leave_out(replica, f"{step}: {result}")
        if all(replica.left_out is not None for replica in members):
            reason = f"{step} failed on every replica: {'; '.join(str(replica.left_out) for replica in members)}"
            self.poison(reason)
            raise EnginePoisonedError(reason)

    async def _apply(self, engine: Engine, update: WeightUpdate) -> None:
        await engine.apply_weights(update)
        if self.attest is not None:
            await self.attest(engine)


@dataclass(frozen=True, slots=True)
class _Call:
    """One logical call."""

    prompt_token_ids: TokenIds
    sampling: SamplingParams
    session_id: str | None
    deadline: Deadline
    is_probe: bool


def _same_version(replicas: Sequence[Engine]) -> int:
    versions = {replica.weight_version for replica in replicas}
    if len(versions) > 1:
        raise ConfigError(f"RoutedEngine: expected replicas under one version of the weights, got {sorted(versions)}")
    return versions.pop()


async def _is_lost(replica: Replica, error: EngineError) -> bool:
    # By the error first: when it comes, another engine may be in the place of the one that was lost.
    if isinstance(error, EngineLostError | EnginePoisonedError):
        return True
    try:
        return not (await replica.engine.health()).is_alive
    except Exception:  # what cannot say so is as good as dead
        return True
