"""Ranks that are threads of one process, each with a whole model: what learners exchange, without torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gspo_gym.learning.collective import Work

Result = TypeVar("Result")


class _Meeting:
    """The place at which all ranks add what they bring."""

    def __init__(self, world_size: int) -> None:
        self.brought: list[Tensor | None] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=60)

    def sum(self, rank: int, values: Tensor) -> Tensor:
        self.brought[rank] = values
        self.barrier.wait()
        total: Tensor = sum(value.clone() for value in self.brought if value is not None)  # type: ignore[assignment]
        self.barrier.wait()
        return total


class ThreadRank:
    """A `Collective`. The gradients of a model that it is given are summed as `fully_shard` would sum them."""

    sequence = None
    is_shared_out = True
    device = None

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank, self.world_size = rank, world_size
        self._meeting = meeting

    def sum(self, values: Tensor) -> Tensor:
        return self._meeting.sum(self.rank, values)

    def forward(self, work: Work) -> tuple[Tensor, ...]:
        return work()

    def sums_gradients_of(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._meeting.sum, self.rank))


def on_threads(world_size: int, work: Callable[[ThreadRank], Result]) -> Sequence[Result]:
    """Return what each rank's `work` returned."""
    meeting = _Meeting(world_size)

    def one(rank: int) -> Any:
        try:
            return work(ThreadRank(rank, world_size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float(torch.max((one[name] - other[name]).abs())) for name in one)
