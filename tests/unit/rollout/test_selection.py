"""What is kept of what was played: counted, and told where it is not a random part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gspo_gym.chat.renderer_cache import RendererCache
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.ledger import Disposition
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.selection import AttemptWatch, Selection
from gspo_gym.seeding import generator
from gspo_gym.types import FinishReason, Outcome, Segment, Task, Trajectory, Turn


def selection(selected: list[float], others: list[float]) -> Selection:
    result = Selection()
    for value in selected:
        result.add(value, is_selected=True)
    for value in others:
        result.add(value, is_selected=False)
    return result


def test_the_standard_errors_are_those_of_a_sample_without_replacement() -> None:
    # all: 0, 0, 1, 1, 2, 2: mean 1, S^2 = (1 + 1 + 0 + 0 + 1 + 1) / 5 = 0.8; two drawn: 0.8 / 2 * (1 - 2 / 6) = 4 / 15
    result = selection([2.0, 2.0], [0.0, 0.0, 1.0, 1.0])
    assert result.standard_errors == pytest.approx((2.0 - 1.0) / math.sqrt(4 / 15))
    assert not result.parts_from_chance  # 1.9 of 4


@pytest.mark.parametrize(
    ("selected", "others"), [([], [1.0, 2.0]), ([1.0, 2.0], []), ([0.1] * 50, [0.1] * 50), ([1e9 + 0.1], [1e9 + 0.1])]
)
def test_where_nothing_can_differ_nothing_parts_from_chance(selected: list[float], others: list[float]) -> None:
    assert selection(selected, others).standard_errors == 0.0


def test_random_selections_rarely_part_from_chance_and_selections_by_value_do() -> None:
    rng = generator(0, "selection")
    returns = rng.normal(size=200)
    apart = sum(
        selection(*(values.tolist() for values in (shuffled[:80], shuffled[80:]))).parts_from_chance
        for shuffled in (rng.permutation(returns) for _ in range(2000))
    )
    assert apart <= 2  # 2000 x 6e-5 = 0.13 are expected
    ordered = sorted(returns.tolist())
    assert selection(ordered[120:], ordered[:120]).parts_from_chance


def attempt(num_actions: int, outcome: Outcome) -> Trajectory:
    """An attempt of so many actions, of one token each after one of the environment's."""
    mask = np.array([False, True] * num_actions, dtype=bool)
    index = np.array([k for turn in range(num_actions) for k in (-1, turn)], dtype=np.int32)
    size = 2 * num_actions
    segments = (Segment(np.arange(size), mask, np.zeros(size), index, np.where(mask, 0, -1)),) if num_actions else ()
    turns = tuple(
        Turn(k, 0, (2 * k, 2 * k + 1), (2 * k + 1, 2 * k + 2), FinishReason.STOP, reward=0.0)
        for k in range(num_actions)
    )
    error = None if outcome is Outcome.TERMINATED else "it failed"
    return Trajectory("t", 0, Task("test/Env-v0", 7), 1, segments, turns, (), outcome, error=error)


class Breaks:
    """Ends after one action; `breaks(action)` at a step and `breaks(None)` at a reset say whether it raises."""

    def __init__(self, breaks: Callable[[str | None], bool]) -> None:
        self._breaks = breaks

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._breaks(None):
            raise OSError("no connection")
        return "go", {}

    async def step(self, action: str) -> Any:
        if self._breaks(action):
            raise ValueError(f"cannot read {action!r}")
        return "", float(len(action)), True, False, {}

    async def close(self) -> None:
        pass


def play(breaks: Callable[[str | None], bool], *, num_episodes: int) -> tuple[AttemptWatch, int]:
    """Play episodes of 1 to 4 letters; returns the watch, and how many episodes were kept."""
    watch = AttemptWatch()

    def letters(env: Any, rng: Any) -> Any:
        return lambda _messages: "a" * int(rng.integers(1, 5))

    pool = RolloutPool(
        play=episode_player(
            make_env=lambda _task: Breaks(breaks),
            act=ScriptedActor(letters),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=2, max_output_tokens=8, max_model_len=128),
        ),
        pool_limits=PoolLimits(max_attempts=5, min_group_fraction=0.01),
        run_seed=0,
        on_episode=watch,
    )
    requests = [GroupRequest(f"g{number}", Task("Breaks-v0", number), 1) for number in range(num_episodes)]
    groups = asyncio.run(pool.collect(requests))
    kept = sum(len(group.trajectories) for group in groups)
    assert pool.num_retries + sum(group.requested_size for group in groups) == watch._step.attempts
    return watch, kept


def test_an_environment_that_breaks_at_some_actions_is_told_of() -> None:
    attempts: list[str] = []

    def breaks(action: str | None) -> bool:
        if action is not None:
            attempts.append(action)
        return action is not None and len(action) > 1  # three of four answers

    watch, kept = play(breaks, num_episodes=30)
    failed = sum(len(action) > 1 for action in attempts)
    assert kept == len(attempts) - failed
    assert watch.metrics() == {
        "rollout/attempts": len(attempts),
        "rollout/kept_fraction": kept / len(attempts),
        "rollout/env_failed_at_reset": 0.0,
        "rollout/env_failed_after_action": failed / len(attempts),
    }
    reason = watch.alarm()
    assert reason is not None
    # half of all calls answer an action, and so would half of the failed ones
    assert reason.startswith(
        f"{failed} attempts failed in the environment after an action of the policy, {failed / 2:.0f} more than"
    )
    assert watch.alarm() is None  # told once, until there is twice as much
    assert watch.metrics() == {}  # of the next step, in which nothing was played


def test_failures_that_become_more_frequent_while_episodes_become_longer_are_not_told_of() -> None:
    """Of 8,000 calls at episodes of 1 action 2 fail, of 4,000 at episodes of 9 actions 223, whatever they answer.

    Taken together, 201 of 225 failed calls answer an action, 0.89, and 0.63 of all calls do: 8 standard errors.
    """
    watch = AttemptWatch()
    for size, num_attempts, failures in ((1, 4000, 1), (9, 400, 200)):
        for number in range(num_attempts):
            at_reset, after_action = number < failures / size, number >= num_attempts - failures
            outcome = Outcome.ENV_ERROR if at_reset or after_action else Outcome.TERMINATED
            watch(attempt(0 if at_reset else size, outcome), Disposition.KEPT)
        watch.metrics()
    assert watch.alarm() is None


def test_an_environment_that_fails_whatever_is_done_is_counted_and_not_told_of() -> None:
    rng = generator(3, "flaky")
    calls: list[bool] = []

    def breaks(_: str | None) -> bool:
        calls.append(bool(rng.random() < 0.2))
        return calls[-1]

    watch, _ = play(breaks, num_episodes=200)
    metrics = watch.metrics()
    assert watch.alarm() is None
    shares = metrics["rollout/env_failed_at_reset"] + metrics["rollout/env_failed_after_action"]
    assert shares == pytest.approx(sum(calls) / metrics["rollout/attempts"])
