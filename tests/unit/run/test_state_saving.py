"""When checkpoints are saved, that a step waits for the copy alone, and a disk that refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.errors import CheckpointError
from gspo_gym.run.process import Phases
from gspo_gym.run.settings import LoopSettings
from gspo_gym.run.state import Saver, TrainState


@dataclass
class Disk:
    """Writes when it may; `refusals` says which of the writes it refuses, counted from 0."""

    refusals: tuple[int, ...] = ()
    may_write: threading.Event = field(default_factory=threading.Event)
    copied: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    data: list[Mapping[str, Any]] = field(default_factory=list)
    num_writes: int = 0
    phases: Phases = field(default_factory=Phases)

    def copy(self, state: TrainState) -> Callable[[], Path]:
        assert self.phases.now == "saving"
        self.copied.append(state.step)
        return lambda: self._write(state.step)

    def saver(self, **settings: Any) -> Saver:
        self.phases.enter("learning")
        loop = LoopSettings(**settings)
        return Saver(self.copy, loop, on_event=self._record, phases=self.phases)

    def _record(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        self.events.append((kind, step))
        self.data.append(data)

    def _write(self, step: int) -> Path:
        self.may_write.wait()
        self.num_writes += 1
        if self.num_writes - 1 in self.refusals:
            raise CheckpointError(f"step_{step:06d}: could not be saved: No space left on device")
        self.written.append(step)
        return Path(f"step_{step:06d}")


def free_disk(**of_disk: Any) -> Disk:
    disk = Disk(**of_disk)
    disk.may_write.set()
    return disk


async def take_steps(saver: Saver, steps: range) -> None:
    """Take steps, at the end of each of which nothing is being written."""
    for step in steps:
        await saver.after_step(TrainState(step=step))
        await saver.wait()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_step_waits_for_the_copy_and_not_for_the_disk_and_the_end_waits_for_both(max_staleness: int) -> None:
    disk = Disk()

    async def main() -> None:
        saver = disk.saver(checkpoint_every_n_iters=2, max_staleness=max_staleness)
        for step in (1, 2, 3):
            await saver.after_step(TrainState(step=step))
        assert (disk.copied, disk.written, disk.events) == ([2], [], [])  # and nothing is said of it before it is done
        assert disk.phases.now == "learning"
        finishing = asyncio.ensure_future(saver.finish(TrainState(step=3)))
        await asyncio.sleep(0)
        phase = disk.phases.now
        disk.may_write.set()
        await finishing
        assert (phase, disk.phases.now) == ("saving", "learning")  # it waited for the disk
        assert disk.written == [2, 3]

    asyncio.run(main())
    assert disk.events == [("checkpoint", 2), ("checkpoint", 3)]
    assert disk.data[0] == {"folder": "step_000002"}


def test_one_checkpoint_is_written_at_a_time_and_a_stop_waits_for_it() -> None:
    disk = Disk()

    async def main() -> None:
        saver = disk.saver(checkpoint_every_n_iters=1)
        await saver.after_step(TrainState(step=1))
        second = asyncio.ensure_future(saver.after_step(TrainState(step=2)))
        await asyncio.sleep(0)
        second.cancel()  # as Ctrl-C does
        await asyncio.sleep(0)
        assert not second.done()
        assert disk.copied == [1]
        disk.may_write.set()
        await asyncio.wait({second})
        assert second.cancelled()
        assert disk.written == [1]
        await saver.close()

    asyncio.run(main())
    assert disk.events == [("checkpoint", 1)]


def test_the_same_state_is_saved_once() -> None:
    disk, state = free_disk(), TrainState(step=4)

    async def main() -> None:
        saver = disk.saver(checkpoint_every_n_iters=2)
        await saver.after_step(state)
        await saver.finish(state)
        await saver.finish(TrainState(step=4, curve=((4, 0.5),)))  # an evaluation was made since

    asyncio.run(main())
    assert disk.written == [4, 4]


def test_what_the_disk_refuses_is_tried_again_at_the_next_step_with_its_state() -> None:
    disk = free_disk(refusals=(0, 1, 3, 4))

    async def main() -> None:
        await take_steps(disk.saver(checkpoint_every_n_iters=5), range(1, 16))

    asyncio.run(main())
    failed = "checkpoint_failed"
    assert disk.events == [
        *((failed, 5), (failed, 6), ("checkpoint", 7)),
        *((failed, 10), (failed, 11), ("checkpoint", 12)),
        ("checkpoint", 15),
    ]
    assert disk.data[0] == {"reason": "step_000005: could not be saved: No space left on device"}


def test_three_refusals_in_a_row_end_the_run_and_at_its_end_they_follow_at_once() -> None:
    disk = free_disk(refusals=(1, 2, 3, 4, 5, 6))

    async def main() -> None:
        saver = disk.saver(checkpoint_every_n_iters=1)
        with pytest.raises(CheckpointError, match="3 checkpoints in a row could not be saved"):
            await take_steps(saver, range(1, 9))
        with pytest.raises(CheckpointError, match="No space left on device"):
            await disk.saver().finish(TrainState(step=4))

    asyncio.run(main())
    assert disk.copied == [1, 2, 3, 4, 4, 4, 4]
    assert disk.written == [1]
