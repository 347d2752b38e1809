"""Engine proxy whose backend can be replaced after a crash or a failed weight update.

A weight update that failed half-way, or a process that died, leaves an engine that must never answer again. Callers
keep this object and see failed calls at most. `gspo_gym.policy.weight_sync` decides when to rebuild, and under which
weights. The gate is that of the engine in place: a gate here would have to open again after poison.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from gspo_gym.base.loops import retrieve_exception, wait_or_cancel, wait_until_ended
from gspo_gym.engine.base import (
    Capabilities,
    Engine,
    EngineHealth,
    PauseMode,
    SamplingParams,
    WeightUpdate,
    require_sleeping,
)
from gspo_gym.engine.gate import Deadline
from gspo_gym.errors import EngineError, EngineLostError, EnginePoisonedError
from gspo_gym.types import Completion, TokenIds

# Makes an engine; the weights that it starts with never sample.
MakeEngine = Callable[[], Awaitable[Engine]]
# Gives a fresh engine, which is not in place yet, the weights that it is to have.
BringUp = Callable[[Engine], Awaitable[None]]


class RebuildableEngine:
    """Proxy of the engine in place; while it is rebuilt, calls wait, and those that were in flight fail.

    One rebuild is under way at a time. A later one cancels those before it and begins when they have closed the engines
    that they made: the engine of the last rebuild stays.

    Args:
        engine: the first one.
        make: makes the others; when cancelled, it closes what it began.
        max_rebuilds: between two updates of the weights; one more is refused: a restart does not remove the cause of
            so many deaths.
        on_close: called when the engine is closed, to remove what `make` needed.

    Attributes:
        num_rebuilds: so far.
        bring_up: for an engine that dies between updates; the first call that finds it dead begins a rebuild. None
            leaves it dead.
        on_fresh: told of every engine that was made, before it is brought up.
    """

    def __init__(
        self, engine: Engine, make: MakeEngine, *, max_rebuilds: int = 100, on_close: Callable[[], object] | None = None
    ) -> None:
        self.num_rebuilds = 0
        self.bring_up: BringUp | None = None
        self.on_fresh: Callable[[Engine], object] = lambda _: None
        self._engine = engine
        self._make = make
        self._max_rebuilds = max_rebuilds
        self._num_in_a_row = 0  # rebuilds since an update
        self._on_close = on_close
        self._rebuilding: asyncio.Task[None] | None = None  # the last one asked for, under way or ended
        self._superseded: set[asyncio.Task[None]] = set()  # cancelled for a later one, and not yet ended
        self._asleep: Engine | None = None
        self._is_closed = False
        self._is_lost = False

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @property
    def engine(self) -> Engine:
        """The engine in place."""
        return self._engine

    async def rebuild(self, bring_up: BringUp) -> None:
        """Close the engine, make another, and let calls through when `bring_up` has ended.

        Rebuilds under way are cancelled first: their engines would be brought up with other weights.

        Raises:
            EnginePoisonedError: it cannot be made or brought up; all calls raise this from now on.
            EngineError: this engine was closed or poisoned meanwhile, or a later rebuild replaced this one.
        """
        # It may be superseded by a later rebuild while it is awaited.
        mine = self._begin_rebuild(bring_up)
        await wait_or_cancel(mine)
        if mine.cancelled():
            self._require_open()
            raise EngineError("rebuild: given up for a later rebuild, or because the engine was poisoned meanwhile")
        mine.result()

    def allow_rebuilds(self) -> None:
        """Count rebuilds from 0 again: an update has succeeded, of this engine or of those beside it."""
        self._num_in_a_row = 0

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion; see `Engine.generate`. The deadline includes the wait for a rebuild.

        Raises:
            EngineError: also where the engine failed and is being rebuilt: another call will be answered.
            EnginePoisonedError: it is not being rebuilt, or cannot be.
        """
        deadline = Deadline.after(deadline_seconds)
        await self._wait_for_rebuild(deadline)
        left = deadline.seconds_left()
        # The engine in place may be another one when the call ends.
        engine = self._engine
        try:
            return await engine.generate(prompt_token_ids, sampling, session_id=session_id, deadline_seconds=left)
        except EngineError as error:
            await self._rebuild_if_dead(engine)
            if isinstance(error, EnginePoisonedError) and (self._is_rebuilding or engine is not self._engine):
                # Another call will be answered: poison is an end for the caller.
                raise EngineLostError(f"the engine was replaced while it answered: {error}") from error
            raise

    async def abort(self, session_id: str) -> None:
        """Give up the session's calls; see `Engine.abort`."""
        await self._engine.abort(session_id)

    async def end_session(self, session_id: str) -> None:
        """Forget a session, unless the engine that knew it is gone."""
        engine = self._engine
        try:
            await engine.end_session(session_id)
        except EngineError:
            if (await engine.health()).is_alive:  # a dead engine has forgotten every session
                raise

    async def forget_ended(self) -> None:
        """Use nothing of ended sessions again; see `Engine.forget_ended`."""
        await self._engine.forget_ended()

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update; see `Engine.pause`."""
        await self._wait_for_rebuild(Deadline.after(None))
        await self._engine.pause(mode)

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Load staged weights; see `Engine.apply_weights`."""
        await self._engine.apply_weights(update)

    async def checksums(self) -> Mapping[str, str]:
        """Return the digests of the tensors; see `Engine.checksums`."""
        return await self._engine.checksums()

    async def resume(self, version: int) -> None:
        """Commit; see `Engine.resume`."""
        await self._engine.resume(version)
        self.allow_rebuilds()

    async def sleep(self) -> None:
        """Lend the memory to the learner; see `SleepingEngine.sleep`.

        An engine that fails is poisoned, but the learner goes on: the update that follows finds the engine poisoned and
        replaces it.
        """
        await self._wait_for_rebuild(Deadline.after(None))
        self._asleep = self._engine
        await self._poison_if_it_fails("fall asleep", require_sleeping(self._engine).sleep())

    async def wake_up(self) -> None:
        """Take the memory back; see `SleepingEngine.wake_up`. An engine that fails is poisoned, as by `sleep`."""
        asleep, self._asleep = self._asleep, None
        if asleep is self._engine:  # else it was rebuilt meanwhile, and never slept
            await self._poison_if_it_fails("wake up", require_sleeping(asleep).wake_up())

    def poison(self, reason: str) -> None:
        """Never answer again before the next `rebuild`; a rebuild that is under way is given up."""
        self._is_lost = True  # also for the health checks: it is not rebuilt by itself
        if self._rebuilding is not None:
            self._rebuilding.cancel()
        self._engine.poison(reason)

    async def health(self) -> EngineHealth:
        """Return the state of the engine in place."""
        return await self._engine.health()

    async def close(self) -> None:
        """Close the engine, and that of a rebuild under way; it is not rebuilt again."""
        self._is_closed = True
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            # They close the engines that they made.
            await wait_until_ended({self._rebuilding, *self._superseded})
        await self._engine.close()
        on_close, self._on_close = self._on_close, None  # once, although closing twice is fine
        if on_close is not None:
            on_close()

    @property
    def _is_rebuilding(self) -> bool:
        return self._rebuilding is not None and not self._rebuilding.done()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed: it cannot be rebuilt")

    async def _poison_if_it_fails(self, what: str, doing: Awaitable[None]) -> None:
        engine = self._engine
        try:
            await doing
        except EngineError as error:
            engine.poison(f"it did not {what}: {error}")

    async def _wait_for_rebuild(self, deadline: Deadline) -> None:
        """Wait until no rebuild is under way, or the deadline has passed."""
        while self._rebuilding is not None and not self._rebuilding.done():
            left = deadline.seconds_left()
            if left is not None and left <= 0:
                return
            await asyncio.wait({self._rebuilding}, timeout=left)

    async def _rebuild_if_dead(self, engine: Engine) -> None:
        """Begin a rebuild, without waiting for it, if that engine is the present one and dead."""
        is_dead = not (await engine.health()).is_alive
        is_ours = engine is self._engine and not (self._is_rebuilding or self._is_closed or self._is_lost)
        if is_dead and is_ours and self.bring_up is not None:
            self._begin_rebuild(self.bring_up)

    def _begin_rebuild(self, bring_up: BringUp) -> asyncio.Task[None]:
        # Nothing is awaited in between, so no two rebuilds can both be the last.
        self._require_open()
        self._superseded = {task for task in self._superseded if not task.done()}
        if self._rebuilding is not None and not self._rebuilding.done():
            self._rebuilding.cancel()
            self._superseded.add(self._rebuilding)
        self._rebuilding = asyncio.create_task(self._replace(bring_up, frozenset(self._superseded)))
        self._rebuilding.add_done_callback(retrieve_exception)
        return self._rebuilding

    async def _replace(self, bring_up: BringUp, former: Collection[asyncio.Task[None]]) -> None:
        await wait_until_ended(former)  # their engines must be closed before another takes their memory
        try:
            if self._num_in_a_row >= self._max_rebuilds:
                raise EnginePoisonedError(
                    f"the engine was rebuilt {self._num_in_a_row} times without an update in between; see why it fails"
                )
            self._num_in_a_row += 1
            self.num_rebuilds += 1
            # Before another is made: two models may not fit into the memory.
            await _close(self._engine)
            fresh = await self._make()
            try:
                self.on_fresh(fresh)
                await bring_up(fresh)
            except BaseException:
                await _close(fresh)
                raise
            self._engine, self._is_lost = fresh, False
        except Exception as error:
            reason = f"the engine cannot be rebuilt: {type(error).__name__}: {error}"
            self._is_lost = True
            self._engine.poison(reason)
            raise EnginePoisonedError(reason) from error


async def _close(engine: Engine) -> None:
    # To the end, also when this is cancelled meanwhile: a process that is left would hold its memory.
    closing = asyncio.ensure_future(engine.close())
    await wait_until_ended({closing})
    closing.result()
