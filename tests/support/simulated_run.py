"""One simulated run: callers, a publisher and chaos around an engine, and the books that say whether all was well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simulated_engine import SimulatedEngine
from simulation import SimulatedLoop

from gspo_gym.engine.base import Engine, PauseMode, SamplingParams, WeightUpdate
from gspo_gym.engine.gate import probing
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.replica_set import RouterSettings
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.errors import EngineError, EnginePoisonedError
from gspo_gym.policy.weight_sync import Target, WeightSync
from gspo_gym.types import Completion

Shape = Literal["plain", "rebuildable", "routed", "routed rebuildables"]
SHAPES: tuple[Shape, ...] = ("plain", "rebuildable", "routed", "routed rebuildables")
VERSIONS = (1, 2, 3)
NUM_CALLERS, NUM_CALLS = 3, 4
MakeRebuildable = Callable[..., RebuildableEngine]


class Folders:
    """Staged weights of which nothing but the version is needed."""

    def stage(self, version: int, kind: Any) -> WeightUpdate:
        return WeightUpdate(version, kind, Path(f"policy-v{version}"))

    def retire(self, version: int) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Nothing was written."""


@dataclass
class Attestation:
    """Asks an engine for a sample before its commit, which must be of the version that is published."""

    version: int = 0

    async def check(self, engine: Engine) -> None:
        with probing():
            completion = await engine.generate([1], SamplingParams(max_tokens=1, stop_token_ids=(), seed=0))
        if set(completion.weight_version.tolist()) != {self.version}:
            raise EngineError(f"it holds {completion.weight_version.tolist()}, expected {self.version}")


@dataclass
class SimulatedRun:
    """A policy's engine of some shape, and everything that is known of it.

    Attributes:
        published: the version whose publication returned last. has_failed: a publication failed, which ends a run.
        num_samples: completions that callers got.
    """

    loop: SimulatedLoop
    shape: Shape
    mode: PauseMode
    make_rebuildable: MakeRebuildable = RebuildableEngine
    published: int = 0
    has_failed: bool = False
    num_samples: int = 0
    made: list[SimulatedEngine] = field(default_factory=list)
    calls: dict[str, asyncio.Task[Completion]] = field(default_factory=dict)
    rebuilds: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attestation = Attestation()
        self.rebuildables: list[RebuildableEngine] = []
        self.engine = self._build()
        rebuild = self.engine.rebuild if isinstance(self.engine, RebuildableEngine) else None
        self.sync = WeightSync(
            [Target(self.engine, rebuild)],
            mode=self.mode,
            kind="full",
            staging=Folders(),  # type: ignore[arg-type]
            canary=self.attestation,  # type: ignore[arg-type]
        )
        for one in self.rebuildables:
            one.bring_up = self.sync.restore
        if isinstance(self.engine, RoutedEngine):
            self.engine.attest = self.attestation.check
            if self.rebuildables:
                self.engine.set_rebuild(self._rebuild_replica)

    async def publish_all(self) -> None:
        """Publish one version after the other, until one fails."""
        for version in VERSIONS:
            await asyncio.sleep(self.loop.choices.random() * 0.05)
            self.attestation.version = version
            try:
                await self.sync.publish(version)
            except EngineError:
                self.has_failed = True
                return
            except asyncio.CancelledError:
                self.has_failed = self.sync._num_published == version  # else no engine has heard of it
                raise
            self.published = version

    async def call_often(self, caller: int) -> None:
        """Sample again and again, and hold what comes against what was published when it was asked for."""
        for number in range(NUM_CALLS):
            await asyncio.sleep(self.loop.choices.random() * 0.04)
            name = f"{caller}-{number}"
            call = self.calls[name] = asyncio.create_task(self._call(f"session-{caller}"))
            await asyncio.wait({call})
            del self.calls[name]
            if not call.cancelled() and call.exception() is not None:
                error = call.exception()
                assert isinstance(error, EngineError), repr(error)
                if isinstance(error, EnginePoisonedError) and self.shape == "rebuildable" and not self.has_failed:
                    assert self.engine.num_rebuilds or "update" in str(error) or "rebuilt" in str(error), error

    async def close(self) -> None:
        """Close the engine; every engine that was ever made must then be closed."""
        await self.engine.close()
        left = [number for number, engine in enumerate(self.made) if not engine.is_closed]
        assert not left, f"of {len(self.made)} engines made, these were not closed: {left}"

    def interrupt(self) -> None:
        """Kill an engine or let it fail once, cancel a call, abort a session, ask for a rebuild, or cancel one."""
        choices = self.loop.choices
        what = choices.random()
        if what < 0.3:
            open_ones = [engine for engine in self.made if not engine.is_closed]
            if open_ones:
                setattr(choices.choice(open_ones), "is_dead" if what < 0.15 else "fails_once", True)
        elif what < 0.5 and self.calls:
            choices.choice([*self.calls.values()]).cancel()
        elif what < 0.6:
            self.rebuilds.append(asyncio.ensure_future(self.engine.abort(f"session-{choices.randrange(NUM_CALLERS)}")))
        elif what < 0.85 and self.rebuildables:
            self.rebuilds.append(asyncio.ensure_future(self._rebuild(choices.choice(self.rebuildables))))
        elif self.rebuilds:
            choices.choice(self.rebuilds).cancel()

    async def _call(self, session_id: str) -> Completion:
        oldest, is_over = self.published, self.has_failed
        completion = await self.engine.generate(
            [1, 2, 3],
            SamplingParams(max_tokens=self.loop.choices.randrange(1, 6), stop_token_ids=(), seed=0),
            session_id=session_id,
            deadline_seconds=self.loop.choices.choice((None, None, 0.02)),
        )
        versions = completion.weight_version.tolist()
        assert not is_over, f"a sample of version {versions} after a publication had failed"
        assert min(versions) >= oldest, f"a sample of version {versions} after {oldest} was published"
        assert set(versions) <= self.sync.committed, (
            f"a sample of version {versions}: {self.sync.committed} are committed"
        )
        self.num_samples += 1
        return completion

    async def _rebuild(self, engine: RebuildableEngine) -> None:
        if self.has_failed:
            return  # nobody would
        try:
            await engine.rebuild(self.sync.restore)
        except EngineError:
            return

    async def _rebuild_replica(self, replica: Engine) -> None:
        assert isinstance(replica, RebuildableEngine)
        await replica.rebuild(self.sync.restore)

    def _build(self) -> Engine:
        if self.shape == "plain":
            return self._make_one()
        if self.shape == "rebuildable":
            return self._make_rebuildable()
        replicas: list[Engine] = [
            self._make_one() if self.shape == "routed" else self._make_rebuildable() for _ in range(2)
        ]
        settings = RouterSettings(
            failures_to_open=2, cool_down_seconds=0.01, health_interval_seconds=0.02, max_wait_seconds=0.1
        )
        return RoutedEngine(replicas, settings=settings, clock=self.loop.time)

    def _make_rebuildable(self) -> RebuildableEngine:
        async def make() -> Engine:
            await asyncio.sleep(self.loop.choices.random() * 0.02)
            return self._make_one()

        self.rebuildables.append(self.make_rebuildable(self._make_one(), make))
        return self.rebuildables[-1]

    def _make_one(self) -> SimulatedEngine:
        self.made.append(SimulatedEngine(self.loop.choices))
        return self.made[-1]


async def play(run: SimulatedRun, *, interrupt_prob: float) -> None:
    """Callers, publisher and chaos until all calls have ended, or until the engine is closed under them."""
    loop = run.loop
    loop.interrupt, loop.interrupt_prob = run.interrupt, interrupt_prob
    callers = [asyncio.create_task(run.call_often(caller)) for caller in range(NUM_CALLERS)]
    publishing = asyncio.create_task(run.publish_all())
    if loop.choices.random() < 0.1:
        loop.call_later(loop.choices.random() * 0.1, publishing.cancel)
    await asyncio.wait({publishing})
    is_early = loop.choices.random() < 0.3
    if not is_early:
        await asyncio.wait(callers)
        loop.interrupt = None
    await run.close()
    loop.interrupt = None
    for caller in (*callers, publishing, *run.rebuilds):
        await asyncio.wait({caller})
        if not caller.cancelled() and caller.exception() is not None:
            raise AssertionError(f"{caller.exception()}") from caller.exception()
    await run.close()  # an abort or a rebuild that came while it closed made nothing
