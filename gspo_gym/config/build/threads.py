"""Which threads of this process compute with several of torch's threads: the engine's, and the learner's if it has one.

OpenMP keeps workers for every thread that has computed with several. If these are more than the cores, none of them
spins any more where it waits: measured on two idle cores, an engine that samples 5,000 tokens/s sampled 2,300 after one
copy of a tensor in a thread that waits for work. So these have them, and the event loop and all threads that start
later have one. Without engine and learner the main thread has one, too, or (`verify`) the learner's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo_gym.engine.base import Engine
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.local.shared_model import keeps_logits
from gspo_gym.run.records import read_events

_MAX_ROUNDS, _MAX_SECONDS = 200, 0.4  # of a comparison
_MIN_GAIN = 0.9  # more threads must take less than that of one's time: they take more of the processor's


@dataclass(frozen=True, slots=True)
class NumThreads:
    """Torch's threads while the engine samples and while the learner works."""

    sampling: int
    learning: int


def recorded_threads(folder: Path) -> NumThreads | None:
    """Return the numbers that a run has chosen; None if it has not, or if OMP_NUM_THREADS is set, which decides."""
    records = [event["data"] for event in read_events(folder) if event["kind"] == "threads"]
    return NumThreads(**records[-1]) if records and "OMP_NUM_THREADS" not in os.environ else None


@contextlib.contextmanager
def computing_elsewhere(device: str) -> Iterator[int]:
    """Let torch compute with one thread in this thread while the body runs; yield the number that others may use.

    Only if the policy is on the processor: otherwise this thread keeps its number.
    """
    num_threads = torch.get_num_threads()
    if device.partition(":")[0] == "cpu":
        torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def set_threads(number: int) -> None:
    """Let torch compute with so many threads in this thread, and in threads that start later."""
    torch.get_num_threads()  # a thread's first look replaces its number by the last one that was set in any thread
    torch.set_num_threads(number)


def use_threads(number: int) -> None:
    """Let torch compute with so many threads in this thread, and with one in threads that start later."""
    set_threads(number)
    last = threading.Thread(target=torch.set_num_threads, args=(1,))
    last.start()
    last.join()


def use_learners_threads(folder: Path, module: Any, shape: tuple[int, int], most: int) -> None:
    """Let torch compute in this thread with as many threads as a run's learner, but at most `most`.

    If the run has recorded no number, with one or `most`, as `faster` says of passes of that shape.
    """
    if (num_threads := recorded_threads(folder)) is not None:
        set_threads(min(num_threads.learning, most))
    else:
        set_threads(most if most == 1 or "OMP_NUM_THREADS" in os.environ else faster(module, shape, most))


@torch.inference_mode()
def faster(module: Any, shape: tuple[int, int], most: int, *, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return `most` if with so many threads passes over that many rows and tokens are faster than with one, else 1."""
    token_ids = torch.zeros(shape, dtype=torch.int64)
    extra = {"logits_to_keep": 1} if keeps_logits(module) else {}
    seconds = {most: 0.0, 1: 0.0}
    began = clock()
    for number in (most, 1) * _MAX_ROUNDS:
        set_threads(number)
        start = clock()
        module(input_ids=token_ids, **extra)
        seconds[number] += clock() - start
        if seconds[most] > _MAX_SECONDS and seconds[1] == 0:
            return most  # a large model: the threads have enough to do
        # Sums and not medians: on cores that others use, threads wait for each other now and then, and for long.
        if number == 1 and clock() - began > _MAX_SECONDS:
            break
    return most if seconds[most] < _MIN_GAIN * seconds[1] else 1


async def compute_in(engine: Engine, model: Any, num_threads: int) -> None:
    """Let an engine that computes here do so with the threads that `computing_elsewhere` yielded.

    `model`: the engine's (Any: transformers is untyped). On a GPU, and of other engines, nothing changes.
    """
    if isinstance(engine, LocalEngine) and model.device.type == "cpu":
        await engine.compute(lambda: use_threads(num_threads))
