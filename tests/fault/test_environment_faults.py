"""Environments that fail in every way: what the fault run reports is what the seeds alone say it must.

One attempt in ten each raises, hangs cooperatively, hangs in a C loop, leaks, dies by SIGKILL, returns wrong types and
returns 10 MB of text; the rest is healthy.

Pinned here: 1. every attempt ends once, with the outcome that its fault calls for; 2. nothing is lost, nothing comes
twice, no failure carries a reward; 3. healthy attempts say and earn what they do without faults around them; 4. the
worker processes that had to be killed or replaced were, and no others.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.faults import play_with_faults
from gspo_gym.seeding import child_seed
from gspo_gym.types import Outcome

RUN_SEED, GROUP_SIZE, MAX_ATTEMPTS = 5, 4, 3
FAULTS = ("raise", "wait", "loop", "leak", "die", "types", "text", "fine", "fine", "fine")
ENDS = {
    "raise": Outcome.ENV_ERROR,
    "wait": Outcome.ACTION_LIMIT,
    "loop": Outcome.ACTION_LIMIT,
    "leak": Outcome.TERMINATED,
    "die": Outcome.ACTION_LIMIT,
    "types": Outcome.ENV_ERROR,
    "text": Outcome.ENV_ERROR,
    "fine": Outcome.TERMINATED,
}


def told(group: int, member: int, attempt: int) -> str:
    """What the player of this attempt tells the environment: the first draw of its own generator."""
    sampling_seed = child_seed(RUN_SEED, "group", f"g{group}", member, attempt)
    return FAULTS[int(np.random.default_rng(child_seed(sampling_seed, "policy")).integers(10))]


def expected_attempts(num_episodes: int) -> Counter[tuple[str, Outcome]]:
    """Attempts up to the first that is good, at most three."""
    attempts: Counter[tuple[str, Outcome]] = Counter()
    for episode in range(num_episodes):
        for attempt in range(MAX_ATTEMPTS):
            fault = told(episode // GROUP_SIZE, episode % GROUP_SIZE, attempt)
            attempts[fault, ENDS[fault]] += 1
            if not ENDS[fault].is_infrastructure_failure:
                break
    return attempts


def check(num_episodes: int, **settings: float) -> None:
    expected = expected_attempts(num_episodes)
    report = play_with_faults(num_episodes, run_seed=RUN_SEED, max_attempts=MAX_ATTEMPTS, **settings)  # type: ignore[arg-type]
    assert report.unwanted == []
    assert report.attempts == dict(expected)
    assert (report.num_lost, report.num_duplicated, report.num_placeholders) == (0, 0, 0)
    assert report.disturbed == []
    num = Counter({fault: count for (fault, _), count in expected.items()})
    # Those that the action ends are tried once more, which ends another worker.
    assert report.workers.get("killed", 0) == 2 * (num["wait"] + num["loop"])
    assert report.workers.get("replaced", 0) == num["leak"]
    assert report.workers.get("died", 0) == 2 * num["die"]
    # Every attempt had a worker, fresh or used before.
    num_retrials = num["wait"] + num["loop"] + num["die"]
    assert report.workers["started"] + report.workers["reused"] == sum(expected.values()) + num_retrials
    assert report.passed


@pytest.mark.slow
def test_forty_episodes_under_every_fault() -> None:
    assert set(expected_attempts(40)) == set(ENDS.items())  # so that none goes untried
    check(40)


@pytest.mark.slow
def test_many_episodes_with_seventy_percent_faults() -> None:
    """`python -m benchmarks faults` plays two thousand, for minutes."""
    # Three in ten are played again: 240 * (1 + 0.3 + 0.09) = 334 attempts; sigma is
    # sqrt(240 * (0.7 * 1 + 0.21 * 4 + 0.09 * 9 - 1.39^2)) = 10.0.
    assert 294 <= sum(expected_attempts(240).values()) <= 374
    check(240)
