"""What a checkpoint costs the training step: `python -m benchmarks checkpoints`.

A step may wait for the copy of the tensors, and for nothing else. So the same tensors (the policy's and AdamW's two
moments) are copied alone, and saved by the trainer's `Saver`, in turn; each after a copy that is not counted, because
memory that was in use a moment ago is faster than memory that the system must clear. Medians. Also the longest time for
which another thread of Python, such as the learner's, gets no turn while a checkpoint is written.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from gspo_gym.learning.saved import copy_state, copy_tensors
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy, load_policy
from gspo_gym.run.settings import LoopSettings
from gspo_gym.run.state import Saver, TrainState

_LIMIT = 1.1


class Moments:
    """The part of a learner that is in a checkpoint: as much as AdamW keeps of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {
            f"optimizer.{name}.{key}": torch.full_like(parameter, 0.5)
            for key, parameter in model.named_parameters()
            for name in ("exp_avg", "exp_avg_sq")
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the moments."""
        return self._tensors

    def copy_state(self) -> Callable[[Path], None]:
        """Copy the moments; return what writes them."""
        return copy_state(self._tensors)

    def counters(self) -> dict[str, int]:
        """Return no more than a name."""
        return {"learner.num_updates": 1}


@dataclass(slots=True)
class Costs:
    """Seconds, an entry a repeat: of the copy alone, until a step goes on, of a whole save, and without a turn."""

    copy: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    longest_wait: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median time that a step waits, in times of the median copy."""
        return statistics.median(self.blocked) / statistics.median(self.copy)


def run_checkpoints(base: str, *, repeats: int) -> int:
    """Measure and print; the exit status: 1 if a step waits for more than 1.1 times the copy."""
    policy = load_policy(base)
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder:
        costs = asyncio.run(measure(policy, Path(folder), repeats=repeats))
    num_bytes = 3 * sum(parameter.numel() * parameter.element_size() for parameter in policy.model.parameters())
    copy, blocked, whole = (statistics.median(each) for each in (costs.copy, costs.blocked, costs.whole))
    Console(width=200).print(
        f"{base}, {num_bytes / 1e6:.0f} MB of weights and moments; medians "
        f"of {repeats}\ncopy of the tensors: {copy:.4f} s; a step waits {blocked:.4f} s: {costs.ratio:.3f} times the "
        f"copy (at most {_LIMIT})\ncomplete on the disk after {whole:.3f} s; meanwhile another thread waited at most "
        f"{max(costs.longest_wait):.3f} s for its turn"
    )
    return 0 if costs.ratio <= _LIMIT else 1


async def measure(policy: Policy, folder: Path, *, repeats: int) -> Costs:
    """Return the costs; one save before them is not counted, in which memory and folders are made."""
    store, learner, costs = CheckpointStore(folder), Moments(policy.model), Costs()

    def copy(state: TrainState) -> Callable[[], Path]:
        draft = store.copy(state.step, policy=policy, learner=learner, trainer_state=state.to_dict())
        return partial(store.write, draft)

    saver = Saver(copy, LoopSettings(checkpoint_every_n_iters=1), on_event=lambda *_: None)
    for step in range(1, repeats + 2):
        counted = costs if step > 1 else Costs()
        _seconds_of_copy(policy, learner)
        counted.copy.append(_seconds_of_copy(policy, learner))
        _seconds_of_copy(policy, learner)
        started = time.perf_counter()
        await saver.after_step(TrainState(step=step))
        counted.blocked.append(time.perf_counter() - started)
        with _Clockwork() as clockwork:
            await saver.wait()
        counted.whole.append(time.perf_counter() - started)
        counted.longest_wait.append(clockwork.longest)
    return costs


def _seconds_of_copy(policy: Policy, learner: Moments) -> float:
    started = time.perf_counter()
    copies = copy_tensors({**policy.model.state_dict(), **learner.tensors()})
    seconds = time.perf_counter() - started
    del copies
    return seconds


class _Clockwork:
    """A thread that looks at the clock all the time: its longest gap is how long it got no turn."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Clockwork:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._is_over.is_set():
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now
