"""Requests to a running training from outside its loop: to stop, or to save a checkpoint.

A signal, or a file in the run's folder, is a request:

    stop*.request        stop as at SIGTERM: save a checkpoint and end
    checkpoint*.request  save a checkpoint before the next step

`touch RUN/stop.request` is enough, also on another machine that shares the folder. The run removes the file of a stop
when it begins to stop, and that of a checkpoint when a checkpoint is complete; `request` writes a file and waits for
that. A process that begins removes files for the one before (`run/process.py`).

A stop also ends the collection of episodes or an evaluation and drops the results. If the program has not ended when
the grace of a stop is over, it exits all the same, and the last checkpoint stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from gspo_gym.base.deadline import GRACE_SECONDS, Deadline
from gspo_gym.base.files import writing
from gspo_gym.base.loops import retrieve_exception, wait_until_ended
from gspo_gym.errors import ConfigError, StorageError
from gspo_gym.run.process import (
    BEFORE_TRAINING,
    Phases,
    Pulse,
    holder_of,
    is_same_process,
    read_phase,
    read_process,
    request_files,
)

Result = TypeVar("Result")

_LOOK_SECONDS = 0.2  # between two looks for a file: by the run for a stop, by a command for the end of its request
_JOIN_SECONDS = 1.0  # the thread may hang on a disk that does


class StopRequested(Exception):  # noqa: N818  # not an error
    """Raised in the trainer's loop where a stop takes effect; `by` names its origin, such as a signal."""

    def __init__(self, by: str) -> None:
        super().__init__(f"stopped by {by}")
        self.by = by


class Steering:
    """Requests to one training.

    `stop` may be called from any thread, from the event loop, and from a signal handler: it takes no lock and only
    notes the request.

    Args:
        grace_seconds: of a stop.
        phases: told that the training ends; None: nothing is told.

    Attributes:
        deadline: of a stop: from the first request until the program exits, in any state.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS, phases: Phases | None = None) -> None:
        self.phases = phases or Phases()
        self.deadline = Deadline(grace_seconds, outcome="the last checkpoint stands")
        self._folder: Path | None = None  # whose request files are heeded
        self._stopped_by: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_trained = False
        self._stopping = asyncio.Event()
        self._dropped_futures: set[asyncio.Future[Any]] = set()
        self._hears_sigterm = False

    @property
    def stopped_by(self) -> str | None:
        """Return the origin of the stop; None before a stop."""
        return self._stopped_by

    @property
    def exit_code(self) -> int:
        """Return the program's exit code after a stop: 128 and the number of its signal, without one that of Ctrl-C."""
        is_signal = self._stopped_by in signal.Signals.__members__
        return 128 + (signal.Signals[self._stopped_by] if self._stopped_by and is_signal else signal.SIGINT)

    # Requests

    def stop(self, by: str) -> bool:
        """Ask the training to save a checkpoint and end; return whether this is the first request to do so."""
        is_first = self._stopped_by is None
        if is_first:
            self._stopped_by = by
            self.deadline.begin(by, self.exit_code)
            self._wake()
        return is_first

    @contextlib.contextmanager
    def heeding_files(self, folder: Path) -> Iterator[None]:
        """Heed the request files of a run's folder, which this process holds, within the block."""
        self._folder, end_event = folder, threading.Event()
        watching = threading.Thread(target=self._watch, args=(folder, end_event), name="gspo-gym-requests", daemon=True)
        watching.start()
        try:
            yield
        finally:
            end_event.set()
            watching.join(_JOIN_SECONDS)
            self._folder = None

    def _watch(self, folder: Path, end_event: threading.Event) -> None:
        while not end_event.wait(_LOOK_SECONDS):
            for path in request_files(folder, "stop"):
                author = _owner_of(path)
                with contextlib.suppress(OSError):  # a disk that can only be read: the stop holds all the same
                    path.unlink(missing_ok=True)
                # Only of the first: a second signal would end the program as it stands.
                if self.stop(f"a request of {author}"):
                    self._interrupt_start()

    def _interrupt_start(self) -> None:
        """Before `attach`, end the start at once as SIGTERM does, if signals are handled here."""
        if not self._has_trained and self._hears_sigterm:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    # The trainer's side

    def attach(self) -> None:
        """Wake up the running event loop for a stop from now on."""
        self._loop, self._has_trained = asyncio.get_running_loop(), True
        self._wake()

    async def between_steps(self, save: Callable[[], Awaitable[None]]) -> None:
        """Save a checkpoint if one was asked for; `save` calls `saved`.

        Raises:
            StopRequested: a stop was asked for.
        """
        if self._folder is not None and request_files(self._folder, "checkpoint"):
            await save()
        self._raise_if_stopped()

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
        self._dropped_futures.add(working)
        self._raise_if_stopped()
        raise AssertionError("woken without a stop")

    def saved(self) -> None:
        """Note that a checkpoint of the present state is complete, which is the end of all requests for one.

        After a stop it shortens the remaining grace: nothing more can be lost, so what hangs is not waited for.
        """
        for path in () if self._folder is None else request_files(self._folder, "checkpoint"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if self._stopped_by is not None:
            self.deadline.saved()

    async def dropped_work_ended(self) -> None:
        """Wait until all work dropped by `unless_stopped` has ended."""
        await wait_until_ended(self._dropped_futures)
        self._dropped_futures.clear()  # their errors hold frames, and these the models

    def ended(self) -> None:
        """Note that the training has ended: a request changes nothing any more."""
        self.phases.enter("ending")
        self._loop = None

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
        if self._stopped_by is not None:
            self._stopping.set()

    def _raise_if_stopped(self) -> None:
        if self._stopped_by is not None:
            raise StopRequested(self._stopped_by)


def request(folder: Path, kind: Literal["stop", "checkpoint"]) -> None:
    """Ask the process at work on a run, and wait until it has begun to stop, or until a checkpoint is complete.

    Nothing is left in the folder if this raises, also at Ctrl-C.

    Raises:
        ConfigError: no process is at work on the run, it ended or shows no life before it did what was asked for, or it
            is still starting and has nothing to save.
        StorageError: nothing can be written into the folder.
    """
    holder = holder_of(folder)
    if holder is None:
        raise ConfigError(f"{folder}: no process is at work on it, so that nothing can be asked of it")
    if holder.pid is None:
        raise ConfigError(f"{folder}: another process is beginning a run there; ask again in a moment")
    phase = read_phase(folder)
    if kind == "checkpoint" and phase is not None and phase.name in BEFORE_TRAINING:
        raise ConfigError(f"{folder}: the run is still starting; it saves a checkpoint by itself before its first step")
    path, pulse = folder / f"{kind}.{uuid.uuid4().hex}.request", Pulse(folder, holder)
    try:
        try:
            with writing(path):
                path.touch()  # empty: complete at once, also for a full disk
        except StorageError as error:
            raise StorageError(f"{error}. SIGTERM stops a run, too: {holder}") from error
        while path.exists():
            present = holder_of(folder)
            has_ended = present is None or not is_same_process(holder, present)
            if has_ended and path.exists():  # looked at again: it may have been taken just before the end
                raise ConfigError(f"{folder}: the run ended before it was done")
            if not pulse.is_felt():
                raise ConfigError(f"{folder}: {holder} shows no life; the request is withdrawn. SIGTERM may end it")
            time.sleep(_LOOK_SECONDS)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    last = read_process(folder)
    if last is not None and not is_same_process(holder, last):
        raise ConfigError(f"{folder}: {last} took the run over meanwhile; `gspo-gym run status` says what it does")


def _owner_of(path: Path) -> str:
    """Return the name of the user that wrote a file; "someone" if the system does not tell."""
    try:
        return str(importlib.import_module("pwd").getpwuid(path.stat().st_uid).pw_name)
    except (ImportError, KeyError, OSError):
        return "someone"
