"""One simulated run of a trainer whose groups are played ahead, while engines die and a stop may come at any await."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from simulated_run import SimulatedRun
from simulation import SimulatedLoop

from gspo_gym.engine.base import SamplingParams
from gspo_gym.errors import EngineError, EnginePoisonedError, RolloutError
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.rollout.schedule import PlayedAhead
from gspo_gym.types import Outcome, Segment, Task, Trajectory, TrajectoryGroup

NUM_STEPS, GROUPS_PER_STEP = 4, 2


class SimulatedTraining:
    """Steps that take groups and publish weights; `taken` are the names of the groups that were trained on."""

    def __init__(self, run: SimulatedRun, max_staleness: int) -> None:
        self.run = run
        self.taken: list[str] = []
        self.max_staleness = max_staleness
        self.schedule = PlayedAhead(
            self._play,
            lambda number, name: GroupRequest(name, Task("e", number), 2),
            weight_version=lambda: run.engine.weight_version,
            groups_per_step=GROUPS_PER_STEP,
            num_steps=NUM_STEPS,
            max_staleness=max_staleness,
            num_ahead=max_staleness,
        )

    async def train(self) -> None:
        """Step after step, until one fails."""
        for step in range(1, NUM_STEPS + 1):
            self.schedule.begin(step)
            try:
                groups = await self.schedule.take(GROUPS_PER_STEP)
                self._check(groups, step)
                self.schedule.finish()
                self.run.attestation.version = step
                await self.run.sync.publish(step)
            except (EngineError, RolloutError):
                return
            self.run.published = step

    async def stop(self) -> None:
        """End what is played; no group is both trained on and to be played again, and none was trained on twice."""
        pending = {f"group_{number:06d}" for number in self.schedule.pending_tasks}
        assert len(set(self.taken)) == len(self.taken)
        assert not pending & {*self.taken}
        await self.schedule.close()

    def _check(self, groups: Sequence[TrajectoryGroup], step: int) -> None:
        assert len(groups) == GROUPS_PER_STEP
        for group in groups:
            self.taken.append(group.trajectories[0].trajectory_id)
            versions = [v for t in group.trajectories for v in t.segments[0].weight_version[1:].tolist()]
            assert step - 1 - min(versions) <= self.max_staleness, f"step {step} was given samples of {versions}"
            assert set(versions) <= self.run.sync.committed

    async def _play(self, request: GroupRequest) -> TrajectoryGroup:
        return TrajectoryGroup(
            request.task, tuple([await self._episode(request) for _ in range(request.size)]), request.size, ()
        )

    async def _episode(self, request: GroupRequest) -> Trajectory:
        for _ in range(20):
            await asyncio.sleep(self.run.loop.choices.random() * 0.03)
            try:
                sampling = SamplingParams(max_tokens=3, stop_token_ids=(), seed=0)
                completion = await self.run.engine.generate([1], sampling, session_id=request.group_id)
            except EnginePoisonedError:
                raise
            except EngineError:
                continue
            segment = Segment(
                np.zeros(4, np.int32),
                np.array([False, True, True, True]),
                np.array([0.0, *completion.logprobs], np.float32),
                np.array([-1, 0, 0, 0]),
                np.array([-1, *completion.weight_version]),
            )
            return Trajectory(request.group_id, 0, request.task, 0, (segment,), (), (), Outcome.TERMINATED)
        raise RolloutError(f"{request.group_id}: no answer in 20 attempts")


async def train_ahead(loop: SimulatedLoop, training: SimulatedTraining, *, interrupt_prob: float) -> None:
    """Train until the end, an error or a stop, and leave nothing behind."""
    loop.interrupt, loop.interrupt_prob = training.run.interrupt, interrupt_prob
    working = asyncio.create_task(training.train())
    if loop.choices.random() < 0.5:
        loop.call_later(loop.choices.random() * 0.3, working.cancel)
    await asyncio.wait({working})
    await training.stop()
    loop.interrupt = None
    await training.run.close()
    for task in (working, *training.run.rebuilds):
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            raise AssertionError(f"{task.exception()}") from task.exception()
