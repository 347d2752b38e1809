"""The contract's clauses about calls that do not end by themselves, weights that change, and engines that end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from engine_contract import (
    Clause,
    Subject,
    assert_logprobs,
    entering,
    next_version,
    prompt,
    sampling,
    until_in_flight,
    update,
)

from gspo_gym.engine.base import PauseMode, UpdateKind, WeightUpdate
from gspo_gym.engine.gate import probing
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError, EngineTimeoutError

CLAUSES: list[Clause] = []
clause = entering(CLAUSES)


async def _answers(subject: Subject) -> None:
    """The engine is well: nothing is in flight, and a call is answered."""
    await until_in_flight(subject.engine, 0)
    assert len((await subject.engine.generate(prompt(0, 5), sampling())).token_ids) == 12
    assert (await subject.engine.health()).is_alive


def _long_call(subject: Subject, session_id: str | None = None) -> asyncio.Task[object]:
    """A call that fills the context; it takes as long as an engine ever takes."""
    params = sampling(max_tokens=subject.max_model_len)
    return asyncio.create_task(subject.engine.generate(prompt(0, 4), params, session_id=session_id))


@clause()
async def a_cancelled_call_frees_what_it_held(subject: Subject) -> None:
    call = _long_call(subject)
    await until_in_flight(subject.engine, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await _answers(subject)


@clause()
async def an_aborted_session_raises_and_the_others_go_on(subject: Subject) -> None:
    given_up, other = _long_call(subject, "given up"), _long_call(subject, "other")
    await until_in_flight(subject.engine, 2)
    await subject.engine.abort("given up")
    with pytest.raises(EngineError, match="abort"):
        await given_up
    assert not other.done()
    other.cancel()
    await asyncio.wait([other])
    await _answers(subject)


@clause()
async def a_call_out_of_time_raises_and_frees_what_it_held(subject: Subject) -> None:
    with pytest.raises(EngineTimeoutError):
        await subject.engine.generate(prompt(0, 4), sampling(max_tokens=subject.max_model_len), deadline_seconds=1e-3)
    await _answers(subject)


@clause()
async def a_call_in_time_is_answered(subject: Subject) -> None:
    completion = await subject.engine.generate(prompt(0, 4), sampling(), deadline_seconds=60)
    assert len(completion.token_ids) == 12


@clause("pause_modes")
async def waiting_for_an_update_counts_against_the_deadline(subject: Subject) -> None:
    await subject.engine.pause("wait")
    with pytest.raises(EngineTimeoutError):
        await subject.engine.generate(prompt(0, 4), sampling(), deadline_seconds=1e-3)
    await subject.engine.resume(subject.engine.weight_version)
    await _answers(subject)


@clause()
async def health_counts_calls_in_flight_and_says_the_version(subject: Subject) -> None:
    health = await subject.engine.health()
    assert (health.is_alive, health.is_poisoned, health.num_in_flight, health.reason) == (True, False, 0, None)
    assert health.weight_version == subject.engine.weight_version
    calls = [_long_call(subject) for _ in range(3)]
    await until_in_flight(subject.engine, 3)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert (await subject.engine.health()).num_in_flight == 0


@clause()
async def capabilities_are_those_that_the_engine_was_made_with(subject: Subject) -> None:
    capabilities = subject.engine.capabilities
    assert capabilities.max_model_len == subject.max_model_len
    assert set(capabilities.update_kinds) <= set(get_args(UpdateKind))
    assert set(capabilities.pause_modes) <= set(get_args(PauseMode))
    assert capabilities.is_trainable <= (capabilities.logprob_mode == "processed")
    await _answers(subject)
    assert subject.engine.capabilities == capabilities


@clause()
async def every_token_carries_the_version_or_says_that_it_is_not_known(subject: Subject) -> None:
    completion = await subject.engine.generate(prompt(0, 4), sampling())
    known = subject.engine.weight_version if subject.engine.capabilities.reports_versions else -1
    assert completion.weight_version.tolist() == [known] * 12


@clause()
async def checksums_are_there_if_they_are_declared(subject: Subject) -> None:
    checksums = await subject.engine.checksums()
    assert bool(checksums) == subject.engine.capabilities.has_checksums
    assert all(isinstance(digest, str) and digest for digest in checksums.values())


class NoTensors:
    """A model without any."""

    @property
    def device(self) -> Any:
        raise AssertionError("nobody asks where nothing is")

    def metadata(self) -> list[Any]:
        return []

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@clause()
async def an_update_of_a_kind_that_is_not_declared_is_refused(subject: Subject) -> None:
    """Unpaused: a caller's mistake does not depend on the time."""
    updates = {
        "shared": WeightUpdate(7, "shared"),
        "full": WeightUpdate(7, "full", Path("nowhere")),
        "adapter": WeightUpdate(7, "adapter", Path("nowhere")),
        "transfer": WeightUpdate(7, "transfer", tensors=NoTensors()),
    }
    assert updates.keys() == set(get_args(UpdateKind))
    for kind in sorted(updates.keys() - set(subject.engine.capabilities.update_kinds)):
        with pytest.raises(ConfigError):
            await subject.engine.apply_weights(updates[kind])
    await _answers(subject)


@clause()
async def a_pause_mode_that_is_not_declared_is_refused(subject: Subject) -> None:
    for mode in ({*get_args(PauseMode), "abort"}) - set(subject.engine.capabilities.pause_modes):
        with pytest.raises(ConfigError, match=mode):
            await subject.engine.pause(mode)
    await _answers(subject)


@clause("pause_modes")
async def calls_wait_while_the_engine_is_paused(subject: Subject) -> None:
    await subject.engine.pause("wait")
    calls = [asyncio.create_task(subject.engine.generate(prompt(k, 4), sampling())) for k in range(3)]
    done, _ = await asyncio.wait(calls, timeout=0.05)
    assert not done
    assert (await subject.engine.health()).num_in_flight == 0
    await subject.engine.resume(subject.engine.weight_version)
    assert [len(completion.token_ids) for completion in await asyncio.gather(*calls)] == [12, 12, 12]


@clause("update_kinds", "reports_versions")
async def a_pause_waits_for_calls_in_flight_and_they_carry_the_old_version(subject: Subject) -> None:
    old, new = subject.engine.weight_version, next_version(subject)
    call = asyncio.create_task(subject.engine.generate(prompt(0, 4), sampling(max_tokens=60)))
    await until_in_flight(subject.engine, 1)
    await update(subject, new)
    assert call.done()
    assert (await call).weight_version.tolist() == [old] * 60


@clause("update_kinds", "pause_mode keep", "reports_versions")
async def a_call_that_is_kept_over_an_update_goes_on_and_its_versions_never_fall(subject: Subject) -> None:
    old, new = subject.engine.weight_version, next_version(subject)
    assert subject.change is not None
    for _ in range(10):
        call = asyncio.create_task(subject.engine.generate(prompt(0, 4), sampling(max_tokens=200)))
        await until_in_flight(subject.engine, 1)
        await subject.engine.pause("keep")
        if not call.done():  # a server may have sampled all of it before it heard of the pause
            break
        await subject.engine.resume(old)
    await subject.engine.apply_weights(subject.change(new))
    await asyncio.wait([call], timeout=0.05)
    assert not call.done()  # nothing leaves before the commit
    await subject.engine.resume(new)
    completion = await call
    versions = completion.weight_version.tolist()
    assert len(versions) == 200
    assert versions == sorted(versions)
    assert set(versions) <= {old, new}


@clause("pause_modes")
async def two_updates_at_once_are_refused(subject: Subject) -> None:
    await subject.engine.pause("wait")
    with pytest.raises(EngineError, match="paused already"):
        await subject.engine.pause("wait")
    await subject.engine.resume(subject.engine.weight_version)
    await _answers(subject)


@clause("update_kinds")
async def weights_are_not_applied_nor_committed_without_a_pause(subject: Subject) -> None:
    assert subject.change is not None
    staged = subject.change(next_version(subject))
    with pytest.raises(EngineError, match="paused"):
        await subject.engine.apply_weights(staged)
    with pytest.raises(EngineError, match="paused"):
        await subject.engine.resume(staged.version)
    assert subject.engine.weight_version == staged.version - 1
    await subject.engine.pause("wait")
    await subject.engine.apply_weights(staged)  # refusing it did no harm
    await subject.engine.resume(staged.version)
    await _answers(subject)


@clause("update_kinds")
async def after_an_update_every_token_carries_the_new_version(subject: Subject) -> None:
    for _ in range(3):
        version = next_version(subject)
        await update(subject, version)
        assert subject.engine.weight_version == version
        assert (await subject.engine.health()).weight_version == version
        completion = await subject.engine.generate(prompt(0, 4), sampling())
        known = version if subject.engine.capabilities.reports_versions else -1
        assert completion.weight_version.tolist() == [known] * 12


@clause("update_kinds", "a model", "is_trainable")
async def after_an_update_logprobs_are_those_of_the_new_weights_in_a_session_too(subject: Subject) -> None:
    history = prompt(11, 60)
    before = await subject.engine.generate(history, sampling(1), session_id="over updates")
    history = [*history, *before.token_ids.tolist()]
    for seed in range(2):
        await update(subject, next_version(subject))
        completion = await subject.engine.generate(history, sampling(seed), session_id="over updates")
        assert_logprobs(subject, history, completion, sampling(seed))
    # The change was large enough that old keys and values would have shown.
    with pytest.raises(AssertionError):
        assert_logprobs(subject, prompt(11, 60), before, sampling(1))


@clause("update_kinds")
async def whoever_updates_can_sample_before_the_commit_and_nobody_else(subject: Subject) -> None:
    assert subject.change is not None
    version = next_version(subject)
    await subject.engine.pause("wait")
    await subject.engine.apply_weights(subject.change(version))
    other = asyncio.create_task(subject.engine.generate(prompt(0, 4), sampling()))
    with probing():
        probe = await subject.engine.generate(prompt(12, 6), sampling())
    if subject.logits is not None and subject.engine.capabilities.is_trainable:
        assert_logprobs(subject, prompt(12, 6), probe, sampling())
    assert not other.done()
    await subject.engine.resume(version)
    assert len((await other).token_ids) == 12


@clause("a model", "an update from a folder")
async def an_update_that_cannot_be_loaded_raises(subject: Subject) -> None:
    """What it leaves is for the caller to judge; here nothing was read, so the old weights may be committed again."""
    assert subject.change is not None
    staged = subject.change(next_version(subject))
    assert staged.folder is not None
    old = subject.engine.weight_version
    await subject.engine.pause("wait")
    with pytest.raises(EngineError):
        await subject.engine.apply_weights(replace(staged, folder=staged.folder / "nowhere"))
    await subject.engine.apply_weights(staged)
    await subject.engine.resume(staged.version)
    assert subject.engine.weight_version == old + 1


@clause(ends_the_engine=True)
async def a_poisoned_engine_never_answers_again(subject: Subject) -> None:
    in_flight = [_long_call(subject) for _ in range(3)]
    await until_in_flight(subject.engine, 3)
    subject.engine.poison("half of version 8")
    subject.engine.poison("later")  # the first reason counts
    for call in in_flight:
        with pytest.raises(EnginePoisonedError, match="half of version 8"):
            await call
    with pytest.raises(EnginePoisonedError, match="half of version 8"):
        await subject.engine.generate(prompt(0, 4), sampling())
    if subject.engine.capabilities.pause_modes:
        with pytest.raises(EnginePoisonedError):
            await subject.engine.pause("wait")
        with pytest.raises(EnginePoisonedError):
            await subject.engine.resume(9)
    health = await subject.engine.health()
    assert health.is_poisoned
    assert health.reason == "half of version 8"
    assert health.num_in_flight == 0


@clause("pause_modes", ends_the_engine=True)
async def calls_that_wait_when_an_update_fails_hear_of_it(subject: Subject) -> None:
    await subject.engine.pause("wait")
    waiting = [asyncio.create_task(subject.engine.generate(prompt(k, 4), sampling())) for k in range(2)]
    await asyncio.sleep(0)
    subject.engine.poison("version 8 was not attested")
    for call in waiting:
        with pytest.raises(EnginePoisonedError, match="version 8 was not attested"):
            await call


@clause(ends_the_engine=True)
async def a_closed_engine_raises_for_every_call_and_can_be_closed_twice(subject: Subject) -> None:
    in_flight = [_long_call(subject) for _ in range(2)]
    await until_in_flight(subject.engine, 2)
    await subject.engine.close()
    for call in in_flight:
        with pytest.raises(EngineError):
            await call
    await subject.engine.close()
    with pytest.raises(EngineError, match="closed"):
        await subject.engine.generate(prompt(0, 4), sampling())
    health = await subject.engine.health()
    assert not health.is_alive
    assert health.reason
