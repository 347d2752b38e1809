"""Requests to a running training from outside its loop: stop, pause, save a checkpoint, change a setting.

Signals, the control socket and other threads make requests; the trainer handles them between steps. A stop also ends
the collection of episodes or an evaluation and drops the results. If the program has not ended when the grace of a stop
is over, it exits all the same, and the last checkpoint stands.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from gspo_gym.base.deadline import GRACE_SECONDS, Deadline
from gspo_gym.base.loops import retrieve_exception, wait_until_ended
from gspo_gym.errors import UsageError
from gspo_gym.run.process import Phases

Result = TypeVar("Result")
Done = concurrent.futures.Future[None]


class StopRequested(Exception):  # noqa: N818  # not an error
    """Raised in the trainer's loop where a stop takes effect; `by` names its origin, such as a signal."""

    def __init__(self, by: str) -> None:
        super().__init__(f"stopped by {by}")
        self.by = by


@dataclass(frozen=True, slots=True)
class Change:
    """A new value for a setting; `by` names the user or program that asked for it."""

    key: str
    value: Any  # Any: as the section's record validates it
    by: str


class Steering:
    """Requests to one training.

    `stop`, `pause`, `resume`, `request_checkpoint` and `set` may be called from any thread, from the event loop, and
    from a signal handler: they take no lock and only note the request. The futures that some return are done when the
    trainer has handled the request; in an event loop, await `asyncio.wrap_future(future)`. `cancel_requests` cancels
    those that are still open when the training ends.

    Args:
        grace_seconds: of a stop.
        phases: told of a wait; None: nothing is told.

    Attributes:
        deadline: of a stop: from the first request until the program exits, in any state.
        apply: applies a change, in the event loop, between two steps; the default refuses. Its exception becomes that
            of the request.
        failure: the reason of `fail`; None before it.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS, phases: Phases | None = None) -> None:
        self.phases = phases or Phases()
        self.deadline = Deadline(grace_seconds, kept="the last checkpoint stands")
        self.apply: Callable[[Change], None] = _refuse
        self.failure: str | None = None
        self._stopped_by: str | None = None
        self._is_paused = False
        self._pauses: deque[Done] = deque()
        self._checkpoints: deque[Done] = deque()
        self._changes: deque[tuple[Change, Done]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_trained = False
        self._woken, self._stopping = asyncio.Event(), asyncio.Event()
        self._dropped: set[asyncio.Future[Any]] = set()
        self._hears_sigterm = False

    @property
    def stopped_by(self) -> str | None:
        """Return the origin of the stop; None before a stop."""
        return self._stopped_by

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def exit_code(self) -> int:
        """Return the program's exit code after a stop: 128 and the number of its signal, without one that of Ctrl-C."""
        is_signal = self._stopped_by in signal.Signals.__members__
        return 128 + (signal.Signals[self._stopped_by] if self._stopped_by and is_signal else signal.SIGINT)

    # Requests

    def stop(self, by: str) -> None:
        """Ask the training to save a checkpoint and end; further calls do nothing."""
        if self._stopped_by is None:
            self._stopped_by = by
            self.deadline.begin(by, self.exit_code)
            self._wake()

    def fail(self, reason: str) -> None:
        """Have the training save what it can and end with an error; what it needs is gone.

        Before `attach` nothing is asked for: the start fails where it uses what is gone.
        """
        if self._has_trained and self._stopped_by is None:
            self.failure = reason
            self.stop(reason)

    def interrupt_start(self) -> None:
        """After a stop before `attach`, end the start at once as SIGTERM does, if signals are handled here."""
        if self._stopped_by is not None and not self._has_trained and self._hears_sigterm:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def pause(self) -> Done:
        """Ask the training to wait before its next step; done when it waits."""
        done = Done()
        self._is_paused = True
        self._pauses.append(done)
        self._wake()
        return done

    def resume(self) -> None:
        """Let a paused training go on."""
        self._is_paused = False
        self._wake()

    def request_checkpoint(self) -> Done:
        """Ask for a checkpoint before the next step; done when it is complete."""
        done = Done()
        self._checkpoints.append(done)
        self._wake()
        return done

    def set(self, key: str, value: Any, by: str) -> Done:
        """Ask for a new value of a setting from the next step on; done when it holds (Any: the setting's type)."""
        done = Done()
        self._changes.append((Change(key, value, by), done))
        self._wake()
        return done

    # The trainer's side

    def attach(self) -> None:
        """Wake up the running event loop for requests from now on."""
        self._loop, self._has_trained = asyncio.get_running_loop(), True
        self._wake()

    async def between_steps(self, save: Callable[[], Awaitable[None]]) -> None:
        """Apply requested changes and save requested checkpoints; wait while the training is paused.

        Raises:
            StopRequested: a stop was asked for.
        """
        while True:
            self._woken.clear()  # before the look, for a request that comes after it
            self._apply_changes()
            await self._save_for_requests(save)
            self._raise_if_stopped()
            while self._pauses:
                _tell(self._pauses.popleft())
            if not self._is_paused:
                return
            with self.phases.during("waiting"):
                await self._woken.wait()

    async def unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`; drop the work when a stop is asked for.

        Dropped work is cancelled; `dropped_work_ended` waits for it.

        Raises:
            StopRequested: a stop was asked for before the work ended.
        """
        if self._stopped_by is not None:
            work.close()
        self._raise_if_stopped()
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            working.cancel()
            await wait_until_ended({working})
            raise
        finally:
            stopping.cancel()
        if working.done():
            return working.result()
        working.cancel()
        working.add_done_callback(retrieve_exception)
        # Not waited for: an environment or a judge that hangs must not delay the checkpoint.
        self._dropped.add(working)
        self._raise_if_stopped()
        raise AssertionError("woken without a stop")

    def saved(self) -> None:
        """Note that the checkpoint of a stop is complete, which shortens the remaining grace."""
        if self._stopped_by is not None:
            # Nothing more can be lost, so what hangs is not waited for until the grace is over.
            self.deadline.saved()

    async def dropped_work_ended(self) -> None:
        """Wait until all work dropped by `unless_stopped` has ended."""
        await wait_until_ended(self._dropped)
        self._dropped.clear()  # their errors hold frames, and these the models

    def cancel_requests(self) -> None:
        """Cancel the open requests, because the training has ended."""
        self.phases.enter("ending")
        self._loop, self.apply = None, _refuse  # it would keep the trainer, which has this object, and two models
        for done in (*self._pauses, *self._checkpoints, *(done for _, done in self._changes)):
            done.cancel()

    # Signals and the deadline

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Stop at SIGTERM, SIGHUP and Ctrl-C within the block, and leave the program when the grace of a stop is over.

        Before `attach`, a signal raises SystemExit (Ctrl-C: KeyboardInterrupt) where the program is: there is nothing
        to save. A second signal ends the program at once.
        """
        before = signal.getsignal(signal.SIGTERM)
        with self.deadline.handling_signals(self._handle):
            self._hears_sigterm = signal.getsignal(signal.SIGTERM) != before
            try:
                yield
            finally:
                self._hears_sigterm = False

    def _handle(self, number: int) -> None:
        self.stop(signal.Signals(number).name)
        if self._has_trained:  # the trainer saves; after its end, what it did is being recorded
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.exit_code)

    def _wake(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._woken.set()
        if self._stopped_by is not None:
            self._stopping.set()

    def _raise_if_stopped(self) -> None:
        if self._stopped_by is not None:
            raise StopRequested(self._stopped_by)

    def _apply_changes(self) -> None:
        while self._changes:
            change, done = self._changes.popleft()
            try:
                self.apply(change)
            except Exception as error:
                _tell(done, error)
            else:
                _tell(done)

    async def _save_for_requests(self, save: Callable[[], Awaitable[None]]) -> None:
        if self._checkpoints:
            asked, self._checkpoints = self._checkpoints, deque()
            await save()
            for done in asked:
                _tell(done)


def _refuse(change: Change) -> None:
    raise UsageError(f"{change.key}: nothing applies changes to this training")


def _tell(done: Done, error: Exception | None = None) -> None:
    """Answer a request, unless the caller has given it up."""
    if done.set_running_or_notify_cancel():
        done.set_result(None) if error is None else done.set_exception(error)
