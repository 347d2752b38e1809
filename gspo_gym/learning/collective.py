"""What a learner asks of the processes that train one model together, and the case of a single process.

Every rank is given the same batches and plans the same micro-batches; each computes some of them, and logprobs of
sampled tokens are exchanged. Implementations for several ranks are in `cluster/sharding.py`; nothing here loads
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Part = TypeVar("Part")

Work = Callable[[], tuple[Tensor, ...]]


class Collective(Protocol):
    """Interface of a learner to the ranks of its model, which call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0 on."""
        ...

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, the same bits on each; `values` may be overwritten."""
        ...

    def forward(self, work: Work) -> tuple[Tensor, ...]:
        """Return what `work` returns, called while the model's parameters can be computed with."""
        ...


class OneProcess:
    """The collective of a model that is whole in this process."""

    rank = 0
    world_size = 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    def forward(self, work: Work) -> tuple[Tensor, ...]:
        return work()


def rounds_of(parts: Sequence[Part], collective: Collective) -> list[Sequence[Part]]:
    """Return the parts in rounds: each rank computes one of a round's."""
    return [parts[start : start + collective.world_size] for start in range(0, len(parts), collective.world_size)]


def own_of(together: Sequence[Part], collective: Collective) -> Part:
    """Return the part that this rank computes of a round."""
    # In a short round, ranks without a part repeat another's, because the collectives in it need all; what they find is
    # multiplied by 0.
    return together[collective.rank % len(together)]


def exchange(collective: Collective, masks: Sequence[Tensor], values: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Return values [B, T] for every part of a round, given its parts' action masks and the values of this rank's."""
    if collective.world_size == 1 or not values:
        return [values for _ in masks]
    own = torch.stack([value[own_of(masks, collective)] for value in values])
    sizes = [int(mask.sum()) for mask in masks]
    # Others add 0 to this rank's numbers, which changes none of them.
    sent = [own if k == collective.rank else own.new_zeros(len(own), size) for k, size in enumerate(sizes)]
    received = torch.split(collective.sum(torch.cat(sent, dim=1)), sizes, dim=1)
    return [
        [row.new_zeros(mask.shape).masked_scatter(mask, row) for row in rows]
        for mask, rows in zip(masks, received, strict=True)
    ]
