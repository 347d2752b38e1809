"""What a learner asks of the processes that train one model together, and the case of a single process.

Every rank is given the same batches and plans the same micro-batches; each computes some of them, and logprobs of
sampled tokens are exchanged. Implementations for several ranks are in `cluster/sharding.py`; nothing here loads
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

Part = TypeVar("Part")

Work = Callable[[], tuple[Tensor, ...]]


class SequenceGroup(Protocol):
    """Interface of a rank to those that compute the same rows of tokens with it, each a part of the tokens."""

    @property
    def rank(self) -> int:
        """Number of this process among them, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """Number of them."""
        ...

    @property
    def device(self) -> torch.device | None:
        """As `Collective.device`."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over them, the same bits on each; `values` may be overwritten."""
        ...

    def exchange(self, parts: Tensor) -> Tensor:
        """Return what each has sent to this rank, [size, ...]; `parts[k]` goes to rank k. Differentiable."""
        ...


class Collective(Protocol):
    """Interface of a learner to the ranks of its model, which call the same methods in the same order.

    With a sequence group, `rank`, `world_size` and `sum` are of the ranks that compute other rows than this one.
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0 on."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks, each of which computes other rows."""
        ...

    @property
    def sequence(self) -> SequenceGroup | None:
        """The ranks that compute the same rows; None: this one alone does."""
        ...

    @property
    def is_shared_out(self) -> bool:
        """Whether this process holds parts of the parameters."""
        ...

    @property
    def device(self) -> torch.device | None:
        """The device that computes, if it is not that of the parameters."""
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
    sequence = None
    is_shared_out = False
    device = None

    def sum(self, values: Tensor) -> Tensor:
        return values

    def forward(self, work: Work) -> tuple[Tensor, ...]:
        return work()


def device_of(model: nn.Module, collective: Collective) -> torch.device:
    """Return the device that computes the model."""
    return collective.device or next(model.parameters()).device


def place_of(collective: Collective) -> dict[str, int]:
    """Return the `rank` of this process among all that hold parts of the model, and how many they are, `num_ranks`."""
    rank, size = (0, 1) if (sequence := collective.sequence) is None else (sequence.rank, sequence.size)
    return {"rank": collective.rank * size + rank, "num_ranks": collective.world_size * size}


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
