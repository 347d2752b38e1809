"""Several engines that serve one policy, as one engine.

A session stays where its tokens were computed; a call whose replica fails goes to another one if that gives the very
sample; new weights reach all replicas as one transaction. What it is not: a load balancer for models that differ, or
the maker of replicas (`rebuildable.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from gspo_gym.engine.gate import Gate
from gspo_gym.engine.replica import Replica, common_capabilities
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError, EngineTimeoutError
from gspo_gym.types import Completion

_log = logging.getLogger(__name__)

# What is done with one replica's engine.
EngineAction = Callable[[Engine], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How replicas are watched. None of it changes what is sampled.

    Attributes:
        max_in_flight: calls at once for one replica, at most; see `breaker.InFlightLimit`.
        failures_to_open: failures in a row after which a replica is not asked. Three: one is what a lost connection
            costs, and each costs a call that is made again.
        cool_down_seconds: until one call may find out whether it is back.
        health_interval_seconds: between questions after every replica's health, while there are calls; also how long
            an answer may take.
        max_wait_seconds: that a call waits for a replica which may be asked at all, before it raises.
    """

    max_in_flight: int = 256
    failures_to_open: int = 3
    cool_down_seconds: float = 5.0
    health_interval_seconds: float = 5.0
    max_wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.health_interval_seconds <= 0 or self.max_wait_seconds < 0:
            raise ConfigError(
                "RouterSettings: expected health_interval_seconds > 0 and max_wait_seconds >= 0, got "
                f"{self.health_interval_seconds:g} and {self.max_wait_seconds:g}"
            )


class RoutedEngine:
    """Several replicas behind the interface of one.

    An update that fails on some replicas is committed by the others; those that failed are poisoned and left out, like
    any that is found poisoned or under other weights, until a health check finds them alive under the committed version
    again. If it fails on all, this engine is poisoned.

    Args:
        replicas: engines of the same policy, under the same weights. Closed with this one.
        clock: seconds, monotonic. sleep: waits by it.

    Attributes:
        attest: asked about each replica between its new weights and their commit; one about which it raises EngineError
            is left out. None asks nothing.
        rebuild: puts a fresh engine with the committed weights behind a replica that is left out; called in the
            background, again and again until it is in order. None: nobody does.
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
        self.attest: EngineAction | None = None
        self.rebuild: EngineAction | None = None
        self.num_retries = 0
        self._settings = settings or RouterSettings()
        self._clock, self._sleep = clock, sleep
        self._replicas = [
            Replica(
                number,
                engine,
                max_in_flight=self._settings.max_in_flight,
                failures_to_open=self._settings.failures_to_open,
                cool_down_seconds=self._settings.cool_down_seconds,
            )
            for number, engine in enumerate(replicas)
        ]
        self._homes: dict[str, list[Replica]] = {}  # of a session: where it was, and last where it is
        self._gate = Gate()
        self._waiting: list[asyncio.Future[None]] = []  # for anything to change
        self._monitor: asyncio.Task[None] | None = None
        self._num_calls = 0

    @property
    def capabilities(self) -> Capabilities:
        """What all replicas promise."""
        return common_capabilities([replica.engine.capabilities for replica in self._replicas])

    @property
    def weight_version(self) -> int:
        return self._gate.weight_version

    @property
    def replicas(self) -> Sequence[Replica]:
        """How each one is, for those who watch."""
        return tuple(self._replicas)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion on one replica; see `Engine.generate`.

        When the replica fails, another one is asked if that gives the same sample: the same seed decides it, under the
        same version. Otherwise a sample that made its replica fail would be replaced by one that does not.

        Raises:
            EngineError: no replica answered; names what each one said.
        """
        num_tokens_to_sample(len(prompt_token_ids), sampling, self.capabilities.max_model_len)
        loop = asyncio.get_running_loop()
        deadline = None if deadline_seconds is None else loop.time() + deadline_seconds
        call = _Call(prompt_token_ids, sampling, session_id, deadline)
        async with self._gate.admit(session_id, deadline_seconds), self._watching():
            return await self._answer(call)

    async def abort(self, session_id: str) -> None:
        """Give up the session's calls, wherever they are."""
        self._gate.abort(session_id)

    async def end_session(self, session_id: str) -> None:
        """Forget a session, on every replica that has seen it; one that is dead has forgotten it already."""
        for replica in self._homes.pop(session_id, ()):
            replica.sessions.discard(session_id)
            with contextlib.suppress(EngineError):
                await replica.engine.end_session(session_id)
        self._wake()

    async def drain(self, number: int) -> None:
        """Give a replica no new sessions, and wait until those it has are over. Updates still reach it."""
        replica = self._replicas[number]
        replica.is_draining = True
        while replica.sessions or replica.num_in_flight:
            await self._change()

    def undrain(self, number: int) -> None:
        """Give a replica new sessions again."""
        self._replicas[number].is_draining = False
        self._wake()

    async def check_health(self) -> None:
        """Ask every replica how it is; done regularly while there are calls.

        A replica that says it is dead has failed once more; if it is not asked any more by then, its calls are made
        elsewhere.
        """
        await asyncio.gather(*(self._check(replica) for replica in self._replicas))
        self._wake()

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update on all replicas; see `Engine.pause`. Calls that wait for a replica wait for the commit."""
        if mode not in self.capabilities.pause_modes:
            raise ConfigError(f"pause: expected one of {', '.join(self.capabilities.pause_modes)}, got {mode!r}")
        self._gate.pause()
        await self._on_each("pause", lambda engine: engine.pause(mode))

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Load staged weights into all replicas, and let them be attested; see `Engine.apply_weights`."""
        self._gate.require_paused()
        await self._on_each("apply_weights", lambda engine: self._apply(engine, update))

    async def checksums(self) -> Mapping[str, str]:
        """What all replicas hold.

        Raises:
            EngineError: they do not hold the same.
        """
        held = [(r.number, await r.engine.checksums()) for r in self._replicas if r.left_out is None]
        for number, digests in held:
            if digests != held[0][1]:
                raise EngineError(f"replicas {held[0][0]} and {number} hold different weights")
        return held[0][1] if held else {}

    async def resume(self, version: int) -> None:
        """Commit on all replicas; see `Engine.resume`."""
        self._gate.require_paused()
        await self._on_each("resume", lambda engine: engine.resume(version))
        self._gate.resume(version)
        self._wake()

    def poison(self, reason: str) -> None:
        """Never answer again, and no replica either."""
        self._gate.poison(reason)
        for replica in self._replicas:
            replica.engine.poison(reason)
        self._wake()

    async def health(self) -> EngineHealth:
        """Alive if any replica takes part."""
        reasons = [f"replica {r.number}: {r.left_out}" for r in self._replicas if r.left_out is not None]
        return self._gate.health("; ".join(reasons) if len(reasons) == len(self._replicas) else None)

    async def close(self) -> None:
        """Close every replica."""
        self._gate.close()
        self._wake()
        if self._monitor is not None:
            self._monitor.cancel()
        for replica in self._replicas:
            if replica.rebuilding is not None:
                replica.rebuilding.cancel()
            await replica.engine.close()

    async def _answer(self, call: _Call) -> Completion:
        failures: list[str] = []
        tried: list[Replica] = []
        version: int | None = None  # that the first attempt began under
        while True:
            replica = await self._pick(call.session_id, tried, failures)
            if version not in (None, self._gate.weight_version):
                raise EngineError(f"weights changed before the call could be made elsewhere: {'; '.join(failures)}")
            version = self._gate.weight_version
            self.num_retries += bool(tried)
            tried.append(replica)
            try:
                return await self._ask(replica, call, version)
            except EngineTimeoutError:
                raise
            except EngineError as error:
                failures.append(f"replica {replica.number}: {error}")
                if len(tried) == len(self._replicas) or not self._gives_same_sample():
                    raise EngineError("; ".join(failures)) from error

    def _gives_same_sample(self) -> bool:
        """Whether another replica would; what is never trained on may as well be sampled again."""
        common = self.capabilities
        return common.seeds_per_request or not common.is_trainable

    async def _pick(self, session_id: str | None, tried: Sequence[Replica], failures: Sequence[str]) -> Replica:
        """Wait for a replica that may be asked: the session's, or the one with the fewest sessions, calls, number."""
        waits_until = self._clock() + self._settings.max_wait_seconds
        while True:
            candidates = [r for r in self._replicas if r not in tried and r.left_out is None]
            home = self._homes.get(session_id or "", [None])[-1]
            if home in candidates and home is not None and home.is_up(self._clock()):
                candidates = [home]  # its turn will come: waiting is cheaper than computing the prefix again
            else:
                candidates = [r for r in candidates if not r.is_draining]
            free = [r for r in candidates if r.is_free(self._clock())]
            if free and not self._gate.holds_back():
                return self._settle(session_id, min(free, key=lambda r: (len(r.sessions), r.num_in_flight, r.number)))
            if not candidates or (self._clock() >= waits_until and not any(r.is_up(self._clock()) for r in candidates)):
                raise EngineError(f"no replica can be asked: {'; '.join(failures) or self._states()}")
            await self._change()

    def _settle(self, session_id: str | None, replica: Replica) -> Replica:
        if session_id is not None:
            homes = self._homes.setdefault(session_id, [])
            if homes:
                homes[-1].sessions.discard(session_id)
            if replica in homes:
                homes.remove(replica)
            homes.append(replica)
            replica.sessions.add(session_id)
        return replica

    async def _ask(self, replica: Replica, call: _Call, version: int) -> Completion:
        begun = self._clock()
        try:
            completion = await replica.run(
                replica.engine.generate(
                    call.prompt_token_ids,
                    call.sampling,
                    session_id=call.session_id,
                    deadline_seconds=call.seconds_left(),
                )
            )
            self._require_committed(completion, version)
        except EngineTimeoutError:
            replica.note_timeout(begun, self._clock())
            raise
        except asyncio.CancelledError:
            if call.seconds_left() == 0.0:  # cancelled by the gate's deadline
                replica.note_timeout(begun, self._clock())
            raise
        except EnginePoisonedError as error:
            self._leave_out(replica, str(error))
            raise EngineError(str(error)) from error
        except EngineError:
            replica.breaker.fail(self._clock())
            raise
        finally:
            self._wake()
        replica.note_answer()
        return completion
