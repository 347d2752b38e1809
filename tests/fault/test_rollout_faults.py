"""800 episodes under faults: nothing lost, nothing twice, nothing made up.

One attempt in ten each raises, hangs, answers in the wrong shape, or gets no answer from the engine, as its sampling
seed decides, so that what should have happened to every attempt can be worked out from the ledger alone.

Pinned here: 1. every dispatched attempt ends exactly once, with the outcome its fault calls for; 2. healthy attempts
are undisturbed; 3. kept episodes carry exactly the reward that they earned, or the floor where their action made the
environment hang, and no failure carries any; 4. a sample is lost only after its last attempt, and each retry is a fresh
environment.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.errors import EngineError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ActRequest
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.ledger import Dispatched, Disposition, Ledger, Terminal
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.seeding import child_seed
from gspo_gym.types import Completion, FinishReason, Outcome, Task

END = 258  # <|im_end|>
FAULTS = ("raise", "hang", "shape", "engine", *["fine"] * 6)
EXPECTED = {
    "raise": Outcome.ENV_ERROR,
    "hang": Outcome.ACTION_LIMIT,  # it is the action that does it, as a second try shows
    "shape": Outcome.ENV_ERROR,
    "engine": Outcome.ENGINE_ERROR,
    "fine": Outcome.TERMINATED,
}
NUM_GROUPS, GROUP_SIZE, MAX_ATTEMPTS, RUN_SEED = 200, 4, 3, 3


def fault_of(sampling_seed: int) -> str:
    return FAULTS[sampling_seed % len(FAULTS)]


class Obedient:
    """Does what it is told, and pays 0.5 for a "fine"; blocks its thread until the test is over for a "hang"."""

    def __init__(self, over: threading.Event, counts: Counter[str]) -> None:
        self.over = over
        self.counts = counts
        self.was_used = False
        counts["made"] += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert not self.was_used
        self.was_used = True
        return "go", {}

    def step(self, action: str) -> Any:
        if action == "raise":
            raise ValueError("as told")
        if action == "hang":
            self.over.wait()
        if action == "shape":
            return "only", "three", "things"
        return "", 0.5, True, False, {}

    def close(self) -> None:
        self.counts["closed"] += 1


class Teller:
    """Tells the environment the fault of this attempt."""

    async def __call__(self, request: ActRequest) -> Completion:
        fault = fault_of(request.sampling_seed)
        if fault == "engine":
            raise EngineError("as told")
        ids = [*fault.encode(), END]
        return Completion(ids, [-1.0] * len(ids), FinishReason.STOP, [0] * len(ids))  # type: ignore[arg-type]

    async def end_session(self, session_id: str) -> None:
        pass


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the test is over, so that hanging threads end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.slow
def test_eight_hundred_episodes_with_forty_percent_faults(over: threading.Event) -> None:
    counts: Counter[str] = Counter()
    pool = RolloutPool(
        ledger=Ledger(keeps_entries=True),
        play=episode_player(
            make_env=lambda task: Obedient(over, counts),
            act=Teller(),
            renderers=RendererCache(tiny_tokenizer()),
            # Long enough that a healthy step of a busy machine never misses it, short enough for 130 hangs: each takes
            # one of 256 slots for that time, about one round of it in all.
            limits=EpisodeLimits(
                max_turns=2,
                max_output_tokens=16,
                max_model_len=128,
                step_timeout_seconds=6.0,
                episode_timeout_seconds=60,
            ),
        ),
        pool_limits=PoolLimits(max_concurrent_rollouts=256, max_attempts=MAX_ATTEMPTS, min_group_fraction=0.5),
        run_seed=RUN_SEED,
    )
    requests = [GroupRequest(f"g{k}", Task("Obedient-v0", k), GROUP_SIZE) for k in range(NUM_GROUPS)]
    groups = asyncio.run(pool.collect(requests))

    # What should have happened, from the seeds alone: attempts up to the first that is fine, at most three.
    expected: dict[tuple[str, int], Outcome] = {}
    lost: set[str] = set()
    num_hangs = 0
    for k in range(NUM_GROUPS):
        for member in range(GROUP_SIZE):
            name = f"g{k}/{member}"
            for attempt in range(MAX_ATTEMPTS):
                fault = fault_of(child_seed(RUN_SEED, "group", f"g{k}", member, attempt))
                expected[name, attempt] = EXPECTED[fault]
                num_hangs += fault == "hang"
                if not EXPECTED[fault].is_infrastructure_failure:
                    break
            else:
                lost.add(name)

    pool.ledger.assert_balanced()
    dispatched = [e for e in pool.ledger.entries if isinstance(e, Dispatched)]
    terminal = [e for e in pool.ledger.entries if isinstance(e, Terminal)]
    assert sorted((e.trajectory_id, e.attempt) for e in dispatched) == sorted(expected)
    assert {(e.trajectory_id, e.attempt): e.outcome for e in terminal} == expected
    # Each of those is tried once more, and once with an empty action, because it was the first.
    assert counts["made"] == len(expected) + 2 * num_hangs

    kept = [t for g in groups for t in g.trajectories]
    # The environment declares no reward_range: 1 below the nothing that was earned.
    assert {(t.outcome, t.reward) for t in kept} == {(Outcome.TERMINATED, 0.5), (Outcome.ACTION_LIMIT, -1.0)}
    assert not any(
        entry.disposition is Disposition.KEPT and entry.outcome.is_infrastructure_failure for entry in terminal
    )
    # A group needs 2 of 4; members are lost one by one otherwise.
    for k, group in enumerate(groups):
        good = {f"g{k}/{member}" for member in range(GROUP_SIZE)} - lost
        assert {t.trajectory_id for t in group.trajectories} == (good if len(good) >= 2 else set())
        assert len(group.dropped) == GROUP_SIZE - len(group.trajectories)
    # 800 * 0.3^3 = 22 samples lose all three attempts; sigma is 4.6.
    assert 4 <= len(lost) <= 40
    assert 1040 <= len(expected) <= 1185  # 800 * (1 + 0.3 + 0.09) = 1,112; sigma is 18
