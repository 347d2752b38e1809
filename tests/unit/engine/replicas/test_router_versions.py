"""What a router says of several replicas' weights: one version to begin with, and the same tensors after."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from tracked_engine import TrackedEngine

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.errors import ConfigError, EngineError


class Digested(TrackedEngine):
    """Holds one tensor, of that digest."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self.digest = digest

    async def checksums(self) -> Mapping[str, str]:
        return {"w": self.digest}


def under(version: int) -> TrackedEngine:
    engine = TrackedEngine()

    async def update() -> None:
        await engine.pause("wait")
        await engine.apply_weights(WeightUpdate(version, "shared"))
        await engine.resume(version)

    asyncio.run(update())
    return engine


def test_replicas_of_several_versions_are_refused_and_those_of_one_are_its() -> None:
    with pytest.raises(ConfigError, match=r"under one version of the weights, got \[1, 3\]"):
        RoutedEngine([under(3), under(1), under(3)])
    assert RoutedEngine([under(3), under(3)]).weight_version == 3
    with pytest.raises(ConfigError, match="at least one replica, got none"):
        RoutedEngine([])


@pytest.mark.parametrize(
    ("digests", "message"),
    [("ab", "replicas 0 and 1"), ("aab", "replicas 0 and 2"), ("abb", "replicas 0 and 1"), ("aba", "replicas 0 and 1")],
)
def test_the_first_replica_that_holds_other_weights_is_named(digests: str, message: str) -> None:
    engine = RoutedEngine([Digested(digest) for digest in digests])
    with pytest.raises(EngineError, match=f"{message} hold different weights"):
        asyncio.run(engine.checksums())


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_replicas_that_hold_the_same_say_what(num_replicas: int) -> None:
    assert asyncio.run(RoutedEngine([Digested("a") for _ in range(num_replicas)]).checksums()) == {"w": "a"}


def test_a_router_closes_every_replica() -> None:
    replicas = [TrackedEngine() for _ in range(3)]
    asyncio.run(RoutedEngine(replicas).close())
    assert all(replica.is_closed for replica in replicas)
