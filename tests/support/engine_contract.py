"""What every engine must do, whatever is behind it: one list of clauses, each run over each engine.

A clause is an async function of a `Subject`. What it asks of an engine is in its `needs`; for an engine that lacks one
of them there is no such case. Each test file lists what its engines lack, and holds it against what they declare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.engine.base import Engine, SamplingParams, WeightUpdate
from gspo_gym.types import Completion


@dataclass
class Subject:
    """An engine under the contract, and what a test knows of it from elsewhere.

    Attributes:
        engine: the one to be tried.
        max_model_len: as the engine was told.
        vocab_size: token ids are below it.
        logits: token ids [T] -> logits [T, V] float64 of the model that samples now, by a plain forward outside the
            engine; None if no model is behind it.
        change: (version) -> update: changes the model, and stages what it has become; None if its weights never change.
        has_repetition_penalty: over the prompt's tokens, too; otherwise it is refused.
    """

    engine: Engine
    max_model_len: int
    vocab_size: int
    logits: Callable[[Sequence[int]], Any] | None = None
    change: Callable[[int], WeightUpdate] | None = None
    has_repetition_penalty: bool = True


Check = Callable[[Subject], Awaitable[None]]


@dataclass(frozen=True)
class Clause:
    """One sentence of the contract.

    Attributes:
        needs: names in `NEEDS`.
        ends_the_engine: so that nothing else can be tried on it.
    """

    name: str
    check: Check
    needs: tuple[str, ...] = ()
    ends_the_engine: bool = False

    async def keep(self, subject: Subject) -> None:
        """Run the clause, in the event loop of the engine."""
        async with asyncio.timeout(120):
            await self.check(subject)


# What a clause may ask for, and whether an engine declares that it has it.
NEEDS: dict[str, Callable[[Subject], bool]] = {
    "a model": lambda subject: subject.logits is not None,
    "is_trainable": lambda subject: subject.engine.capabilities.is_trainable,
    "repetition_penalty": lambda subject: subject.has_repetition_penalty,
    "seeds_per_request": lambda subject: subject.engine.capabilities.seeds_per_request,
    "reports_versions": lambda subject: subject.engine.capabilities.reports_versions,
    "update_kinds": lambda subject: bool(subject.engine.capabilities.update_kinds),
    "an update from a folder": lambda subject: (
        {"full", "adapter"} & {*subject.engine.capabilities.update_kinds} != set()
    ),
    "pause_modes": lambda subject: bool(subject.engine.capabilities.pause_modes),
    "pause_mode keep": lambda subject: "keep" in subject.engine.capabilities.pause_modes,
}


def lacking(subject: Subject) -> set[str]:
    """What an engine declares not to have."""
    return {need for need, has in NEEDS.items() if not has(subject)}


def cases_of(clauses: Sequence[Clause], lacks: dict[str, Collection[str]]) -> list[tuple[str, Clause]]:
    """Each engine's name with each clause that it must keep, given what it lacks."""
    return [(name, clause) for name in lacks for clause in clauses if not {*clause.needs} & {*lacks[name]}]


def entering(clauses: list[Clause]) -> Callable[..., Callable[[Check], Check]]:
    """A decorator that enters a check, under its name and with what it needs, into a list of clauses."""

    def clause(*needs: str, ends_the_engine: bool = False) -> Callable[[Check], Check]:
        def enter(check: Check) -> Check:
            clauses.append(Clause(check.__name__, check, needs, ends_the_engine))
            return check

        return enter

    return clause


def sampling(seed: int = 0, max_tokens: int = 12, **fields: Any) -> SamplingParams:
    """Sampling without stop tokens, unless told otherwise."""
    return SamplingParams(**{"max_tokens": max_tokens, "stop_token_ids": (), "seed": seed, **fields})


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that are bytes, which every tiny model knows."""
    return list(np.random.default_rng(seed).integers(0, 64, length).tolist())


async def until_in_flight(engine: Engine, count: int) -> None:
    """Wait until that many calls are in flight."""
    while (await engine.health()).num_in_flight != count:  # noqa: ASYNC110  # an engine has nothing to wait on
        await asyncio.sleep(0)


async def update(subject: Subject, version: int) -> None:
    """A whole transaction: other weights, committed as `version`."""
    assert subject.change is not None
    await subject.engine.pause("wait")
    await subject.engine.apply_weights(subject.change(version))
    await subject.engine.resume(version)


def next_version(subject: Subject) -> int:
    """A version that was never committed: an engine may have been tried before."""
    return subject.engine.weight_version + 1


def assert_logprobs(subject: Subject, history: Sequence[int], completion: Completion, params: SamplingParams) -> None:
    """The logprobs are those of the model's distribution after `params`, to 1e-4 nats."""
    expected = expected_logprobs(subject, history, completion.token_ids.tolist(), params)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


def expected_logprobs(
    subject: Subject, history: Sequence[int], sampled: Sequence[int], params: SamplingParams
) -> list[float]:
    """One plain forward over prompt and completion, then each step of `SamplingParams` in float64, one row a time."""
    assert subject.logits is not None
    logits = subject.logits([*history, *sampled])[len(history) - 1 : -1]
    rows = []
    for index, (row, token) in enumerate(zip(logits, sampled, strict=True)):
        seen = {*history, *sampled[:index]}
        rows.append(float(distribution(row, seen, index, params)[token]))
    return rows


def distribution(row: Any, seen: set[int], index: int, params: SamplingParams) -> Any:
    """Log-probabilities [V] that the `index`-th token is drawn from, given logits [V] and the tokens seen before."""
    row = np.array(row, np.float64)
    if index < params.min_tokens:
        row[list(params.stop_token_ids)] = -np.inf
    for token in seen:
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    if params.temperature == 0:
        return normalised(row)
    row = normalised(row / params.temperature)
    row[row < row.max() + np.log(params.min_p or 1e-300)] = -np.inf
    order = np.argsort(-row, kind="stable")
    if params.top_k:
        row[order[params.top_k :]] = -np.inf
    before = np.cumsum(np.exp(normalised(row)[order])) - np.exp(normalised(row)[order])
    row[order[before >= params.top_p]] = -np.inf
    return normalised(row)


def normalised(row: Any) -> Any:
    """Logits [V] as log-probabilities."""
    best = row.max()
    return row - best - np.log(np.exp(row - best).sum())
