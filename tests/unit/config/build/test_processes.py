"""Which Ray a run joins for its processes, and that one process joins none; `tests/cluster` has a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from gspo_gym.config.build import processes
from gspo_gym.config.run_config import load_config
from gspo_gym.errors import ServiceError
from tests.support.small_quickstart import QUICKSTART

ON_RANKS = [
    "compute.gpu_count=0",
    "topology.type=cluster",
    "topology.gpus_for_vllm=1",
    "topology.gpus_for_training=2",
    "rollout.engine=local",
]


@pytest.mark.parametrize(
    ("overrides", "address", "expected"),
    [
        ([], None, (None, 3, 0)),  # a core for each rank, and one more for a reference
        ([], "127.0.0.1:1", ("127.0.0.1:1", 3, 0)),
        (["topology.gpus_for_vllm=3"], "127.0.0.1:1", ("127.0.0.1:1", 6, 0)),
        (["compute.gpu_count=3"], None, (None, 4, 3)),  # the one that samples is an actor, too
        (["compute.gpu_count=2", "topology.gpus_for_training=1"], None, (None, 3, 2)),  # and so is one that learns
        (["topology.gpus_for_training=1"], "127.0.0.1:1", None),
    ],
)
def test_the_ray_that_is_joined_is_the_environments(
    overrides: list[str],
    address: str | None,
    expected: tuple[str | None, int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str | None, int, int]] = []

    @contextlib.contextmanager
    def joined(address: str | None, *, num_cores: int, num_gpus: int) -> Iterator[Any]:
        asked.append((address, num_cores, num_gpus))
        raise ServiceError("no Ray here")
        yield

    monkeypatch.setattr(processes, "joined", joined)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = load_config(QUICKSTART, [*ON_RANKS, *overrides])
    if expected is None:
        with processes.launching(config) as cluster:
            assert cluster is None
        return
    with pytest.raises(ServiceError, match="no Ray here"):
        processes.launching(config).__enter__()
    assert asked == [expected]
