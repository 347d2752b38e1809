"""The weights of an update, as the driver hands them to its replicas; `tests/cluster` has real ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gspo_gym.cluster.replica import Shipment
from gspo_gym.engine.base import TensorMeta, WeightUpdate


class Store:
    """Ray's store of objects, as far as a shipment needs it."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def put(self, tensors: Any) -> int:
        self.objects.append(tensors)
        return len(self.objects)


class MeetingTensors:
    """Tensors whose readers wait for each other, for a moment: two that read at once are seen."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_readers = 0
        self._both = threading.Barrier(2)

    def metadata(self) -> Sequence[TensorMeta]:
        return [TensorMeta("weight", torch.float32, (2,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_readers += 1
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.3)
        yield "weight", torch.tensor([1.0, 2.0])


def test_replicas_that_take_an_update_at_once_share_one_object_and_the_next_update_has_another() -> None:
    store = Store()
    shipment, source = Shipment(store), MeetingTensors()
    update, taken = WeightUpdate(1, "transfer", tensors=source), list[Any]()
    threads = [threading.Thread(target=lambda: taken.append(shipment.of(update))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [1, 1]
    assert source.num_readers == 1
    assert [sent["weight"].tolist() for sent in store.objects] == [[1.0, 2.0]]
    assert shipment.of(WeightUpdate(2, "transfer", tensors=MeetingTensors())) == 2
