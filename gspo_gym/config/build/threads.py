"""Which threads of this process compute with several of torch's threads: the engine's, and the learner's if it has one.

OpenMP keeps workers for every thread that has computed with several. If these are more than the cores, none of them
spins any more where it waits: measured on two idle cores, an engine that samples 5,000 tokens/s sampled 2,300 after one
copy of a tensor in a thread that waits for work. So these have them, and the event loop and all threads that start
later have one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from gspo_gym.engine.base import Engine
from gspo_gym.engine.local.engine import LocalEngine


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


async def compute_in(engine: Engine, model: Any, num_threads: int) -> None:
    """Let an engine that computes here do so with the threads that `computing_elsewhere` yielded.

    `model`: the engine's (Any: transformers is untyped). On a GPU, and of other engines, nothing changes.
    """
    if isinstance(engine, LocalEngine) and model.device.type == "cpu":
        await engine.compute(lambda: use_threads(num_threads))
