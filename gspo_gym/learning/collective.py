"""What a learner asks of the processes that train one model together, and the case of a single process.

Every rank is given the same batches and plans the same micro-batches; each computes some of them, and what they find is
gathered. Implementations for several ranks are in `cluster/sharding.py`; nothing here loads
torch.distributed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

Part = TypeVar("Part")
Record = TypeVar("Record")

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


def own_of(parts: Sequence[Part], collective: Collective) -> list[tuple[Part, bool]]:
    """Return the parts that this rank computes, as many as every rank does, and whether each counts.

    Where there are fewer, a rank repeats another's, because the collectives need all; what it finds does not count.
    """
    rank, size = collective.rank, collective.world_size
    rounds = [parts[start : start + size] for start in range(0, len(parts), size)]
    return [(together[rank % len(together)], rank < len(together)) for together in rounds]


def gather(own: Sequence[Record], num_parts: int, collective: Collective, device: torch.device) -> list[Record]:
    """Return what all ranks have found in their parts (`own_of`), one record for each part, in the parts' order.

    A record is a dataclass of tensors [], [n] or [m, n], numbers, None and such dataclasses, of one form for all parts.
    Every rank gets the same bits.
    """
    if collective.world_size == 1 or not own:
        return list(own)
    leaves = [leaf for record in own for leaf in _leaves(record)]
    none = torch.zeros(0, dtype=torch.float64, device=device)  # which holds all other numbers, too
    shapes_RK2 = _of_all(none.new_tensor([[*leaf.shape, 1, 1][:2] for leaf in leaves]).view(-1, 2), collective).long()
    sizes_RK = shapes_RK2.prod(-1)
    values = torch.cat([none, *(leaf.reshape(-1).to(none) for leaf in leaves)])
    padding = values.new_zeros(int(sizes_RK.sum(1).max()) - len(values))
    rows = _of_all(torch.cat([values, padding]), collective)
    of_ranks = []
    for row, sizes, shapes in zip(rows, sizes_RK.tolist(), shapes_RK2.tolist(), strict=True):
        numbers = zip(row[: sum(sizes)].split(sizes), shapes, strict=True)
        of_ranks.append([_filled(record, numbers) for record in own])
    return [record for together in zip(*of_ranks, strict=True) for record in together][:num_parts]


def _of_all(values: Tensor, collective: Collective) -> Tensor:
    """Return [R, ...] of all ranks. Others add 0 to a rank's numbers, which changes none of them."""
    rows = values.new_zeros(collective.world_size, *values.shape)
    rows[collective.rank] = values
    return collective.sum(rows)


def _leaves(record: object) -> Iterator[Tensor]:
    if dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            yield from _leaves(getattr(record, field.name))
    elif record is not None:
        yield torch.as_tensor(record)


def _filled(form: Any, numbers: Iterator[tuple[Tensor, list[int]]]) -> Any:  # Any: a record, or a part of one
    """Return a record of this form with other numbers."""
    if dataclasses.is_dataclass(form):
        names = [field.name for field in dataclasses.fields(form)]
        return dataclasses.replace(form, **{name: _filled(getattr(form, name), numbers) for name in names})  # type: ignore[type-var]
    if form is None:
        return None
    values, shape = next(numbers)
    if not isinstance(form, Tensor):
        return type(form)(values)
    return values.reshape(shape[: form.ndim]).to(form)
