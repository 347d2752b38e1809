"""Thousands of requests over real HTTP to a server of which one answer in five goes wrong in eleven ways: every call
gets the one sample that its prompt and seed stand for, and no call two.

Nothing waits between retries here; only the two faults that hang cost their timeout, and the short run has none of
those (`test_http_engine.py` has them one by one).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import hash_model
import numpy as np
import pytest
from faulty_server import HANGING, MODEL, FaultPlan, FaultyServer, mixed

from gspo_gym.base.retries import RetryCounters, RetrySettings
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.http import HttpEngine, HttpSettings
from gspo_gym.errors import EngineError
from gspo_gym.types import Completion

FAULT_RATE = 0.2
CONCURRENCY = 64
STOP = 7
RETRIES = RetrySettings(max_attempts=8, budget_fraction=0.5, budget_reserve=64)


def prompt_of(number: int) -> list[int]:
    return [number % 64, number // 64 % 64, 3]


def sampling_of(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=8, stop_token_ids=(STOP,), seed=number, temperature=0.9)


def expected(number: int) -> hash_model.Sample:
    return hash_model.sample(prompt_of(number), seed=number, max_tokens=8, stop_token_ids=(STOP,), temperature=0.9)


@dataclass
class Run:
    completions: list[Completion | EngineError]
    counters: RetryCounters
    waits: list[float]


async def ask_many(server: FaultyServer, num_requests: int, timeout_seconds: float) -> Run:
    waits: list[float] = []

    async def no_sleep(seconds: float) -> None:
        waits.append(seconds)

    settings = HttpSettings(
        server.base_url, MODEL, tier="trainable", vocab_size=64, timeout_seconds=timeout_seconds, retries=RETRIES
    )
    engine = await HttpEngine.start(settings, sleep=no_sleep)
    places = asyncio.Semaphore(CONCURRENCY)

    async def ask(number: int) -> Completion | EngineError:
        async with places:
            try:
                return await engine.generate(prompt_of(number), sampling_of(number), session_id=f"episode-{number}")
            except EngineError as error:
                return error

    completions = await asyncio.gather(*(ask(number) for number in range(num_requests)))
    in_flight = (await engine.health()).num_in_flight
    await engine.close()
    assert in_flight == 0
    return Run(list(completions), engine.counters, waits)


def run_and_check(plan: FaultPlan, num_requests: int, *, timeout_seconds: float) -> None:
    with FaultyServer(plan, retry_after="0.25") as server:
        run = asyncio.run(ask_many(server, num_requests, timeout_seconds))
    calls = run.counters.num_calls
    print(
        f"\n{num_requests} requests, {calls - num_requests} of the probe: {run.counters.num_attempts} attempts; "
        f"{run.counters.num_failed_calls} calls failed.\nfaults: {dict(server.faults)}\nfailed attempts: "
        f"{dict(run.counters.failures)}"
    )

    answered = [(n, c) for n, c in enumerate(run.completions) if isinstance(c, Completion)]
    assert len(run.completions) == num_requests
    assert len(answered) >= 0.999 * num_requests
    for number, completion in answered:
        rule = expected(number)
        assert completion.token_ids.tolist() == rule.token_ids
        np.testing.assert_allclose(completion.logprobs, rule.processed, atol=1e-6)
        assert completion.finish_reason.value == rule.finish_reason

    # The server's own books: a call is one key, however many attempts it took, and what went out in good order went
    # out once for each call, but for those whose good answer met a client that had given up waiting.
    keys = {seen.headers["idempotency-key"] for seen in server.seen if seen.path == "/v1/completions"}
    assert len(keys) <= calls - 1  # /v1/models has none
    assert len(keys) >= len(answered)
    assert sum(server.num_answers.values()) >= len(answered)
    ids = [seen.headers["x-request-id"] for seen in server.seen if seen.path == "/v1/completions"]
    assert len(ids) == len(set(ids))

    # All kinds happened, at the rate that was asked for (4 standard deviations of a binomial), and within the budget.
    num_faults = sum(server.faults.values())
    num_seen = num_faults + sum(server.num_answers.values()) - server.faults["stale"]  # which are good answers, too
    assert set(server.faults) == {fault for fault, rate in plan.rates.items() if rate > 0}
    assert abs(num_faults - FAULT_RATE * num_seen) < 4 * (num_seen * FAULT_RATE * (1 - FAULT_RATE)) ** 0.5
    assert run.counters.num_attempts == calls + run.counters.num_retries
    assert run.counters.num_retries <= RETRIES.budget_reserve + RETRIES.budget_fraction * calls
    # Every retry is owed to a fault; a busy machine may let good answers run into the timeout, too.
    num_late = run.counters.failures["timeout"] - sum(server.faults[fault] for fault in HANGING)
    assert run.counters.num_retries <= num_faults + num_late

    # Waits: those for 429 at least what the server asked for, the others at most the longest.
    assert len(run.waits) == run.counters.num_retries
    assert max(run.waits) <= RETRIES.max_delay_seconds
    assert sum(wait >= 0.25 for wait in run.waits) >= server.faults["429"]


def test_300_requests_of_which_a_fifth_fails_give_300_samples() -> None:
    run_and_check(mixed(FAULT_RATE, seed=1, hanging_weight=0.0), 300, timeout_seconds=60.0)


@pytest.mark.nightly
def test_1000_requests_of_which_a_fifth_fails_give_1000_samples() -> None:
    run_and_check(mixed(FAULT_RATE, seed=1), 1000, timeout_seconds=5.0)
