"""An engine in an actor of Ray keeps the contract of engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from agreement import nudge
from engine_contract import Clause, Subject, lacking

from gspo_gym.cluster.actors import Cluster
from gspo_gym.cluster.placement import Part, Resources
from gspo_gym.cluster.ray import joined
from gspo_gym.cluster.replica import ReplicaEngine, ReplicaSettings, Shipment
from gspo_gym.engine.base import WeightUpdate
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.staging import TrainedTensors
from tests.contract.test_engine_contract import CLAUSES, MAX_LEN, plain_logits
from tests.support.sampling_replica import build


class InAnActor:
    """An engine in an actor, for one clause after the other: it takes seconds to start."""

    LACKS = frozenset({"an update from a folder"})

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.runner = asyncio.Runner()
        self._subject: Subject | None = None

    def keep(self, clause: Clause) -> None:
        self.runner.run(clause.keep(self.subject))
        if clause.ends_the_engine:
            self.end()

    @property
    def subject(self) -> Subject:
        if self._subject is None:
            learner = load_policy("tiny:qwen3-64", seed=1).model

            def change(version: int) -> WeightUpdate:
                nudge(learner, seed=version)
                return WeightUpdate(version, "transfer", tensors=TrainedTensors(learner))

            engine = self.runner.run(self._start(learner))
            vocab_size = learner.config.vocab_size
            self._subject = Subject(engine, MAX_LEN, vocab_size, logits=plain_logits(learner), change=change)
        return self._subject

    async def _start(self, learner: Any) -> ReplicaEngine:
        settings = ReplicaSettings("replica", 0, build, {"max_model_len": MAX_LEN}, 20.0, 100.0)
        tensors = dict(learner.named_parameters())
        return await ReplicaEngine.start(self._cluster, settings, Shipment(self._cluster.ray), tensors)

    def end(self) -> None:
        if self._subject is not None:
            self.runner.run(self._subject.engine.close())
        self._subject = None


@pytest.fixture(scope="module")
def actor(own_ray: None) -> Iterator[InAnActor]:
    with (
        joined(os.environ["RAY_ADDRESS"]) as ray,
        contextlib.closing(Cluster(ray, [Part("replica", 1, Resources(cores=1))])) as cluster,
    ):
        actor = InAnActor(cluster)
        yield actor
        actor.end()
        actor.runner.close()


@pytest.mark.parametrize("clause", [c for c in CLAUSES if not {*c.needs} & InAnActor.LACKS], ids=lambda c: c.name)
def test_an_engine_in_an_actor_keeps(clause: Clause, actor: InAnActor) -> None:
    actor.keep(clause)


def test_an_engine_in_an_actor_lacks_what_it_declares_to_lack(actor: InAnActor) -> None:
    assert lacking(actor.subject) == InAnActor.LACKS
