"""An action that hangs or kills its environment: it ends the episode at the floor, and never makes it vanish.

Pinned here: 1. through worker processes, threads and the event loop, an action that hangs, kills, eats memory or breaks
a declared limit ends the episode scored at the lowest return, in its first attempt; 2. what the action did not cause is
retried; 3. so hanging never pays: such a policy's mean return is at most that of one which plays badly, and all its
episodes are kept.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ending_env import Ending
from moved_clock import move_clock

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.env.blame import floor_of
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.judge.blend import RewardBlend, unjudged
from gspo_gym.learning.credit import returns_of
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ActRequest, ScriptedActor
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.episode_files import trajectory_from_json, trajectory_to_json
from gspo_gym.rollout.ledger import Ledger, Terminal
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.summary import rollout_metrics
from gspo_gym.types import Completion, Outcome, Task, Trajectory, TrajectoryGroup

FLOOR = -3.0  # of `Ending.reward_range`
RENDERERS = RendererCache(tiny_tokenizer())
PLACES = ("process", "thread", "loop")
HANG_SECONDS = 60.0
LOOPS: list[asyncio.AbstractEventLoop] = []  # the last one plays


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """The server of worker processes, whose start is no part of what is limited here."""
    asyncio.run(ProcessEnv(Ending, start_timeout_seconds=60.0).close())


def made_in(place: str, **kwargs: Any) -> partial[Any]:
    if place == "process":
        limits = WorkerLimits(memory_mb=1500)
        return partial(ProcessEnv, Ending, {"place": place, **kwargs}, limits=limits, start_timeout_seconds=60.0)
    return partial(Ending, place=place, on_hang=let_time_pass, **kwargs)


def let_time_pass() -> None:
    """In this process, a hang misses its limit at once."""
    move_clock(LOOPS[-1], HANG_SECONDS)


def play(
    make: partial[Any], *said: str, count: int = 2, actor: type[ScriptedActor] = ScriptedActor, **limits: Any
) -> tuple[TrajectoryGroup, Ledger, list[Trajectory]]:
    """A group of episodes, each saying these in turn."""

    def player(_env: Any, _rng: np.random.Generator) -> Any:
        return lambda messages: said[min(sum(m.role == "assistant" for m in messages), len(said) - 1)]

    is_process = make.func is ProcessEnv
    step_seconds = 1.0 if is_process else HANG_SECONDS
    settings = {"step_timeout_seconds": step_seconds, "episode_timeout_seconds": 600.0, **limits}
    attempts: list[Trajectory] = []
    pool = RolloutPool(
        play=episode_player(
            make_env=lambda _task: make(),
            act=actor(player),
            renderers=RENDERERS,
            limits=EpisodeLimits(max_turns=5, max_output_tokens=64, max_model_len=2048, **settings),
        ),
        # One at a time where the time of a hang passes for all.
        pool_limits=PoolLimits(max_attempts=2, max_concurrent_rollouts=2 if is_process else 1),
        run_seed=1,
        ledger=Ledger(keeps_entries=True),
        on_episode=lambda trajectory, _: attempts.append(trajectory),
    )

    async def play_group() -> TrajectoryGroup:
        LOOPS.append(asyncio.get_running_loop())
        return await pool.play_group(GroupRequest("g", Task("Ending", 3), count))

    return asyncio.run(play_group()), pool.ledger, attempts


@pytest.mark.parametrize(
    ("place", "word"),
    [
        *((place, word) for place in PLACES for word in ("wait", "refuse")),
        *(("process", word) for word in ("loop", "die", "exit", "eat", "alarm")),
        *((place, "declared") for place in PLACES),
    ],
)
def test_an_action_that_ends_its_environment_is_kept_at_the_floor_in_its_first_attempt(place: str, word: str) -> None:
    if word == "declared":
        make = made_in(place, max_action_seconds=1.0 if place == "process" else HANG_SECONDS / 2)
        group, ledger, attempts = play(make, "good", "wait", step_timeout_seconds=HANG_SECONDS)
    else:
        group, ledger, attempts = play(made_in(place), "good", word)
    assert [(t.outcome, t.attempt) for t in attempts] == [(Outcome.ACTION_LIMIT, 0)] * 2
    # "good" earned 0.5, so the last turn has to take 3.5 for a return of -3.
    assert [[turn.reward for turn in t.turns] for t in group.trajectories] == [[0.5, FLOOR - 0.5]] * 2
    assert {t.reward for t in group.trajectories} == {FLOOR}
    assert all(t.error and "Ending" in t.error for t in group.trajectories)
    ends = [entry for entry in ledger.entries if isinstance(entry, Terminal)]
    assert {end.reason for end in ends} == {t.error for t in group.trajectories}  # which limit it was
    metrics = rollout_metrics([group], seconds=1.0)
    assert (metrics["rollout/action_limit_fraction"], metrics["reward/action_limit"]) == (1.0, FLOOR - 0.5)


@pytest.mark.parametrize("place", PLACES)
def test_hanging_never_pays(place: str) -> None:
    """Against a policy that plays as badly as can be, and one that plays badly and then hangs."""
    bad = play(made_in(place), "bad", "bad", "end")[0]
    hanging = play(made_in(place), "bad", "wait")[0]
    at_once = play(made_in(place), "wait")[0]
    for group in (bad, hanging, at_once):
        assert len(group.trajectories) == group.requested_size  # nothing vanished
    assert {t.reward for t in bad.trajectories} == {-2.0}
    for group in (hanging, at_once):
        assert max(t.reward for t in group.trajectories) <= min(t.reward for t in bad.trajectories)


@pytest.mark.parametrize(("place", "word"), [*((place, "wait once") for place in PLACES), ("process", "die once")])
def test_what_does_not_happen_again_is_the_machines_and_retried(place: str, word: str, tmp_path: Path) -> None:
    group, _, attempts = play(made_in(place, mark=str(tmp_path / "mark")), "good", word, "end", count=1)
    assert [(t.outcome.is_infrastructure_failure, t.attempt) for t in attempts] == [(True, 0), (False, 1)]
    assert [t.reward for t in group.trajectories] == [0.5 + 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_hang_before_any_action_and_one_at_every_action_are_the_machines(place: str) -> None:
    for kwargs in ({"hangs_at_reset": True}, {"hangs_always": True}):
        group, _, attempts = play(made_in(place, **kwargs), "good", count=1)
        assert [t.outcome for t in attempts] == [Outcome.ENV_TIMEOUT] * 2
        assert group.trajectories == ()


def test_actions_that_use_the_episodes_time_up_do_not_make_it_vanish() -> None:
    group, _, attempts = play(made_in("loop"), "slow", count=1, step_timeout_seconds=5.0, episode_timeout_seconds=1.9)
    assert [(t.outcome, t.attempt) for t in attempts] == [(Outcome.ACTION_LIMIT, 0)]
    assert [t.reward for t in group.trajectories] == [FLOOR]


def test_nor_do_they_where_the_time_ends_while_the_model_is_asked() -> None:
    """Four answers take 0.4 s each, which is more than half of 2.4 s; the rest the engine has."""

    class Slow(ScriptedActor):
        async def __call__(self, request: ActRequest) -> Completion:
            if request.turn_index == 4:
                await asyncio.Event().wait()
            return await super().__call__(request)

    limits = {"step_timeout_seconds": 5.0, "episode_timeout_seconds": 2.4}
    group, _, attempts = play(made_in("loop"), "slow", count=1, actor=Slow, **limits)
    assert [(t.outcome, t.attempt) for t in attempts] == [(Outcome.ACTION_LIMIT, 0)]
    assert [t.reward for t in group.trajectories] == [FLOOR]


def test_an_engine_that_uses_the_episodes_time_up_is_infrastructure() -> None:
    """One answer takes 0.4 s of 1.5 s."""

    class Stuck(ScriptedActor):
        async def __call__(self, request: ActRequest) -> Completion:
            if request.turn_index == 1:
                await asyncio.Event().wait()
            return await super().__call__(request)

    limits = {"step_timeout_seconds": 5.0, "episode_timeout_seconds": 1.5}
    attempts = play(made_in("loop"), "slow", count=1, actor=Stuck, **limits)[2]
    assert [t.outcome for t in attempts] == [Outcome.EPISODE_TIMEOUT] * 2


def test_a_stated_return_stands_in_for_the_floor() -> None:
    group = play(made_in("loop"), "good", "refuse", count=1, action_limit_return=-0.25)[0]
    assert [t.reward for t in group.trajectories] == [-0.25]


@pytest.mark.parametrize(
    ("low", "earned", "stated", "floor"),
    [
        (-3.0, 0.5, None, -3.0),
        (0.0, 0.5, None, 0.0),
        (0.0, -1.0, None, -1.0),  # it never gives back what was lost
        (-float("inf"), 0.5, None, -1.0),
        (-float("inf"), -4.0, None, -5.0),
        (-3.0, 0.5, -7.0, -7.0),
        (-3.0, -9.0, -7.0, -9.0),
    ],
)
def test_the_floor_is_declared_stated_or_below_what_was_earned(
    low: float, earned: float, stated: float | None, floor: float
) -> None:
    env = Ending()
    env.reward_range = (low, 9.0)
    assert floor_of(env, earned, stated) == floor


def test_what_comes_after_the_episode_keeps_it_at_the_floor() -> None:
    (episode,) = play(made_in("loop"), "found", "refuse", count=1)[0].trajectories
    assert episode.outcome is Outcome.ACTION_LIMIT
    assert not episode.outcome.is_infrastructure_failure
    assert episode.success is False  # although it was declared a success before
    # Its events are worth nothing under step rewards, and the judge is not asked.
    stepwise = StepRewardSettings(mode="decision_stepwise", indicator_lambda=2.0)
    assert returns_of(episode, step_rewards=stepwise).episode_return == FLOOR
    assert unjudged(episode, RewardBlend(env=0.5, outcome=1.0)).reward == 0.5 * FLOOR
    assert unjudged(episode, RewardBlend(env=0.5), lambda t: [None] * len(t.turns)).reward == 0.0
    # It is read back from an episode file as it was.
    line = json.loads(json.dumps(trajectory_to_json(episode)))
    again = trajectory_from_json(line)
    assert (again.outcome, again.reward, again.error) == (Outcome.ACTION_LIMIT, FLOOR, episode.error)
