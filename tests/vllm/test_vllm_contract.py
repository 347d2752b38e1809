"""The engine contract over vLLM, with whole models and with adapters.

An engine is shared by its clauses, which leave it as they found it but for the weights; those that end an engine get
one of their own. What an engine lacks is held against `LACKS`, as in tests/contract: nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_contract_life
import engine_contract_sampling
import pytest
import torch
from agreement import nudge
from engine_contract import Clause, Subject, cases_of, lacking

from gspo_gym.engine.base import Engine, UpdateKind, WeightUpdate
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import Policy, adapt_policy, load_policy
from gspo_gym.policy.staging import Staging

CLAUSES = [*engine_contract_sampling.CLAUSES, *engine_contract_life.CLAUSES]
MAX_LEN = 512  # the longest context of each engine

# By engine: what it declares not to have.
LACKS: dict[str, Collection[str]] = {"full": (), "adapter": ()}


def takes_an_engine(clause: Clause) -> bool:
    """Whether a vLLM is started for the clause alone."""
    return "closed" in clause.name


CASES = [
    pytest.param(name, clause, marks=pytest.mark.nightly if takes_an_engine(clause) else ())
    for name, clause in cases_of(CLAUSES, LACKS)
]


def make_subject(policy: Policy, kind: UpdateKind, folder: Path) -> Callable[[Engine], Subject]:
    """Engines of one policy, whose weights change as the learner's do."""
    numbers = itertools.count()

    def logits(token_ids: Any) -> Any:
        with torch.no_grad():
            return policy.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].double().numpy()

    def change(version: int) -> WeightUpdate:
        number = next(numbers)
        nudge(policy.model, seed=number)
        return Staging(policy, folder / str(number)).stage(version, kind)

    vocab_size = int(policy.model.get_input_embeddings().weight.shape[0])
    return lambda engine: Subject(engine, MAX_LEN, vocab_size, logits=logits, change=change)


async def give_weights(subject: Subject) -> None:
    """What the learner has now: other tests may have left others."""
    assert subject.change is not None
    version = subject.engine.weight_version + 1
    await subject.engine.pause("wait")
    await subject.engine.apply_weights(subject.change(version))
    await subject.engine.resume(version)


class Subjects:
    """The engines under the contract: one of each kind for most clauses, and more for those that end them."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._shared: dict[str, Subject] = {}
        self._make: dict[str, Callable[[Engine], Subject]] = {}
        self._run = request.getfixturevalue("loop_thread").run

    def get(self, name: str) -> Subject:
        if name not in self._shared:
            kind: UpdateKind = "adapter" if name == "adapter" else "full"
            self._make[name] = make_subject(self._policy(name), kind, self._folder / name)
            subject = self._make[name](self._engine(name))
            self._run(give_weights(subject))
            self._shared[name] = subject
        return self._shared[name]

    def get_mortal(self, name: str, clause: Clause) -> Subject:
        """One that may end: a gate of its own before the same vLLM, or for a real end a vLLM of its own."""
        shared = self.get(name)
        if takes_an_engine(clause):
            settings = {"max_lora_rank": 8, "max_loras": 3} if name == "adapter" else {}
            return self._make[name](self._request.getfixturevalue("start_engine")(**settings))
        assert isinstance(shared.engine, VllmEngine)
        # A gate that is poisoned while it is paused leaves vLLM paused, for the tests after these, too.
        self._request.addfinalizer(lambda: self._run(give_weights(shared)))
        return self._make[name](VllmEngine(shared.engine._llm, replace(shared.engine._settings, transfer="files")))

    def _engine(self, name: str) -> Engine:
        engine: Engine = self._request.getfixturevalue(f"{name}_engine")
        return engine

    def _policy(self, name: str) -> Policy:
        policy = load_policy("tiny:qwen3-64", seed=1)
        return adapt_policy(policy, LoraSettings(r=8), seed=2) if name == "adapter" else policy


@pytest.fixture(scope="module")
def subjects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return Subjects(request, tmp_path_factory.mktemp("versions"))


@pytest.mark.parametrize(("name", "clause"), CASES, ids=lambda value: getattr(value, "name", value))
def test_vllm_keeps(name: str, clause: Clause, subjects: Subjects, loop_thread: Any) -> None:
    subject = subjects.get_mortal(name, clause) if clause.ends_the_engine else subjects.get(name)
    loop_thread.run(clause.keep(subject))


@pytest.mark.parametrize("name", LACKS)
def test_vllm_lacks_nothing(name: str, subjects: Subjects) -> None:
    assert lacking(subjects.get(name)) == {*LACKS[name]}
