"""Save a run's checkpoints: when one is due, in the background, and again when the disk refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gspo_gym.base.loops import wait_until_ended
from gspo_gym.errors import CheckpointError
from gspo_gym.run.process import Phases
from gspo_gym.run.settings import LoopSettings
from gspo_gym.run.state import TrainState

_MAX_FAILURES = 3  # in a row: the disk will not recover by itself

# Copies what a checkpoint of this state holds, and returns what writes the copy; that runs in another thread.
CopyCheckpoint = Callable[[TrainState], Callable[[], Path]]
# Records an event: its kind, step and data (JSON, hence Any).
OnEvent = Callable[[str, int, Mapping[str, Any]], None]


def seconds_of_process() -> float:
    """Return the seconds since this process began, or since this module was imported if the system does not tell."""
    try:
        began = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.monotonic() - _IMPORTED


_IMPORTED = time.monotonic()


class Saver:
    """Saver of a run's checkpoints: a step waits for the copy of the tensors and not for the disk.

    Only one checkpoint is written at a time. If the disk refuses one, an event records it, and the next step saves
    again.

    Args:
        copy: see `CopyCheckpoint`.
        settings: how often, and by when one must be saved.
        on_event: see `OnEvent`.
        saved: the state in the run's newest checkpoint; None: it has none.
        phases: told while the run waits; None: nothing is told.
        clock: seconds since the process began.
    """

    def __init__(
        self,
        copy: CopyCheckpoint,
        settings: LoopSettings,
        *,
        on_event: OnEvent,
        saved: TrainState | None = None,
        phases: Phases | None = None,
        clock: Callable[[], float] = seconds_of_process,
    ) -> None:
        self._copy = copy
        self._on_event = on_event
        self._phases = phases or Phases()
        self._clock = clock
        self._settings = settings
        self._set_deadline()
        self._writing: asyncio.Task[Path | CheckpointError] | None = None
        self._copied: TrainState | None = None  # what is being written, or was last
        self._saved = saved  # what the newest complete checkpoint holds
        self._num_failures = 0  # in a row
        self._step_began = clock()
        self._longest_step = self._longest_write = 0.0

    def change(self, settings: LoopSettings) -> None:
        """Save as these settings say from now on; a deadline that was heeded is heeded again if they move it."""
        moves = settings.must_save_by != self._settings.must_save_by
        self._settings = settings
        if moves:
            self._set_deadline()

    def _set_deadline(self) -> None:
        minutes = self._settings.must_save_by
        self._deadline = None if minutes is None else 60 * minutes  # None, too, once it was heeded

    async def after_step(self, state: TrainState) -> None:
        """Begin to save the state if that is due; return when its tensors are copied.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        if self._writing is not None and self._writing.done():
            await self.wait()
        now = self._clock()
        self._longest_step, self._step_began = max(self._longest_step, now - self._step_began), now
        # The next step's checkpoint must be written by then, too.
        is_late = self._deadline is not None and now + self._longest_step + self._longest_write > self._deadline
        if is_late:
            self._deadline = None
        if is_late or self._num_failures or state.step % self._settings.checkpoint_every_n_iters == 0:
            await self.begin(state)

    async def finish(self, state: TrainState) -> None:
        """Save the state unless the newest checkpoint holds it; return when it is complete on the disk.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        await self.wait()
        while self._saved is not state:
            await self.begin(state)
            await self.wait()

    async def wait(self) -> None:
        """Wait until the checkpoint in progress is complete on the disk, even if cancelled meanwhile.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        if self._writing is None:
            return
        try:
            if not self._writing.done():
                with self._phases.during("saving"):
                    await wait_until_ended({self._writing})
        except asyncio.CancelledError:
            with contextlib.suppress(CheckpointError):  # there is no next step to try again at
                self._record(self._writing.result())
            raise
        self._record(self._writing.result())

    async def close(self) -> None:
        """Wait until nothing is being written; a refusal of the disk is recorded and not raised, since the run ends."""
        with contextlib.suppress(CheckpointError):
            await self.wait()

    async def begin(self, state: TrainState) -> None:
        """Begin to save the state unless the newest checkpoint holds it; return when its tensors are copied.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        await self.wait()
        if self._saved is state:
            return
        with self._phases.during("saving"):
            if self._settings.max_staleness == 0:
                write = self._copy(state)
            else:  # episodes are being played, and must not wait for the copy
                copying = asyncio.ensure_future(asyncio.to_thread(self._copy, state))
                await wait_until_ended({copying})
                write = copying.result()
        self._copied = state
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, write))

    def _write(self, write: Callable[[], Path]) -> Path | CheckpointError:
        began = self._clock()
        try:
            return write()
        except CheckpointError as error:
            return error
        finally:
            self._longest_write = max(self._longest_write, self._clock() - began)

    def _record(self, outcome: Path | CheckpointError) -> None:
        assert self._copied is not None
        self._writing = None
        if isinstance(outcome, Path):
            self._saved, self._num_failures = self._copied, 0
            self._on_event("checkpoint", self._copied.step, {"folder": outcome.name})
            return
        self._num_failures += 1
        self._on_event("checkpoint_failed", self._copied.step, {"reason": str(outcome)})
        if self._num_failures >= _MAX_FAILURES:
            raise CheckpointError(
                f"{outcome}; {self._num_failures} checkpoints in a row could not be saved. The last good one is in "
                "place: make room, or make the folder writable, and go on with --resume"
            ) from outcome
