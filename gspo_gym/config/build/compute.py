"""The threads in which a run computes, and how many threads torch uses in each.

Engine and learner take turns in one thread, or split the cores if episodes are played ahead: see `threads`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gspo_gym.base.loops import Compute, Result
from gspo_gym.config.build.rollouts import Player
from gspo_gym.config.build.threads import NumThreads, faster, recorded_threads, use_threads
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.local.shared_model import SharedModel
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.report.progress import Progress

_SAMPLED, _LEARNED = (64, 1), (8, 64)  # rows and tokens of the passes that are timed


async def start_compute(
    config: RunConfig,
    player: Player,
    *,
    num_threads: int,
    recorder: RunRecorder,
    progress: Progress,
    stack: contextlib.AsyncExitStack,
) -> Compute:
    """Return the thread of the learner's work, closed with the stack: the local engine's, or one beside the engine.

    Torch's numbers of threads are those that the run's earlier processes chose, because they decide about the last bits
    of its sums; in a new run the faster ones, unless OMP_NUM_THREADS is set or there is one.
    """
    model, engine = player.policy.model, player.engine
    local = engine if isinstance(engine, LocalEngine) else None
    is_split = config.training.max_staleness > 0
    compute = local.compute if local is not None and not is_split else _own_thread(model.device, stack)
    if model.device.type != "cpu":
        return compute
    threads = None if local is None else recorded_threads(recorder.folder)  # also those of a machine with more cores
    if local is None or (num_threads == 1 and threads is None):
        await compute(lambda: use_threads(num_threads))
        if local is not None and is_split:
            await local.compute(lambda: use_threads(1))
        return compute
    if threads is None:
        threads = await _choose(model, compute, num_threads, longest=config.rollout.max_model_len, is_split=is_split)
        recorder.event("threads", 0, asdict(threads))
        progress.note(f"torch threads: {threads.sampling} while sampling, {threads.learning} while learning")
    await local.compute(lambda: use_threads(threads.sampling))
    if is_split:
        await compute(lambda: use_threads(threads.learning))
    elif threads.learning != threads.sampling:
        return _Switching(compute, threads)
    return compute


def _own_thread(device: torch.device, stack: contextlib.AsyncExitStack) -> Compute:
    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels that name no GPU use their thread's

    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gspo-gym-learner", initializer=begin)
    stack.callback(executor.shutdown)

    async def compute(work: Callable[[], Result], /) -> Result:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    return compute


@dataclass(frozen=True, slots=True)
class _Switching:
    """The engine's thread with other numbers of torch's threads while the learner works in it."""

    compute: Compute
    num_threads: NumThreads

    async def __call__(self, work: Callable[[], Result], /) -> Result:
        def switched() -> Result:
            use_threads(self.num_threads.learning)
            try:
                return work()
            finally:
                use_threads(self.num_threads.sampling)

        return await self.compute(switched)


async def _choose(model: Any, compute: Compute, most: int, *, longest: int, is_split: bool) -> NumThreads:
    if is_split:
        return NumThreads(max(1, most // 2), max(1, most - most // 2))
    if "OMP_NUM_THREADS" in os.environ:
        return NumThreads(most, most)
    # Modules of its own, in eval mode, with the policy's weights: dropout would draw from the run's random numbers.
    module = SharedModel(model, max_model_len=longest).module
    shape = (_LEARNED[0], min(_LEARNED[1], longest))
    return NumThreads(
        sampling=await compute(lambda: faster(module, _SAMPLED, most)),
        learning=await compute(lambda: faster(module, shape, most)),
    )
