"""What a step trains on: which groups it asks for, keeps, and counts (dynamic sampling); and the warm-up before it.

A group of the sampling tests is its number; `run` says which are constant, empty (all episodes dropped) or fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from gspo_gym.errors import EnginePoisonedError, RolloutError
from gspo_gym.learning.advantages import RunningReturns
from gspo_gym.learning.batching import BatchCounts, BuiltBatch
from gspo_gym.learning.settings import OptimizerSettings, UpdateSettings
from gspo_gym.policy.load import load_policy
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.rollout.schedule import OnDemand
from gspo_gym.run.collect import Collected, Collector, WarmupPlan, batch_metrics, collect_groups, warm_up
from gspo_gym.run.process import Phases
from gspo_gym.run.settings import ConstantGroups, LoopSettings, RunSize, TrainPlan, WarmupSettings
from gspo_gym.seeding import child_seed, training_seed
from gspo_gym.types import DroppedEpisode, FinishReason, Outcome, Segment, Task, Trajectory, TrajectoryGroup, Turn


class Groups:
    """A pool that only writes down what it was asked for."""

    def __init__(self, empty: Collection[int], failing: Collection[int], error: Exception) -> None:
        self.rounds: list[list[int]] = []
        self.empty = empty
        self.failing = failing
        self.error = error

    async def collect(self, requests: Sequence[GroupRequest]) -> tuple[TrajectoryGroup, ...]:
        numbers = [request.task.seed for request in requests]
        self.rounds.append(numbers)
        if set(numbers) & set(self.failing):
            raise self.error
        return tuple(self.group(request) for request in requests)

    def group(self, request: GroupRequest) -> TrajectoryGroup:
        name = request.group_id
        if request.task.seed in self.empty:
            dropped = DroppedEpisode(name, Outcome.ENV_ERROR, "it broke")
            return TrajectoryGroup(request.task, (), 1, (dropped,))
        trajectory = Trajectory(name, 0, request.task, 0, (), (), (), Outcome.TERMINATED)
        return TrajectoryGroup(request.task, (trajectory,), 1)


def run(
    mode: ConstantGroups,
    *,
    constant: Collection[int] = (),
    empty: Collection[int] = (),
    failing: Collection[int] = (),
    error: Exception | None = None,
    rounds: int = 3,
    num_groups: int = 4,
) -> tuple[Collected, list[list[int]]]:
    pool = Groups(empty, failing, error or RolloutError("all 1 groups were dropped"))
    schedule = OnDemand(pool.collect, lambda number, name: GroupRequest(name, Task("test/Env-v0", number), 1))
    collected = asyncio.run(
        collect_groups(
            schedule.take,
            num_groups=num_groups,
            constant_groups=mode,
            max_refill_rounds=rounds,
            is_informative=lambda group: bool(group.trajectories) and group.task.seed not in constant,
        )
    )
    return collected, pool.rounds


def numbers(groups: Sequence[TrajectoryGroup]) -> list[int]:
    return [group.task.seed for group in groups]


def test_keep_plays_one_round_and_keeps_all_of_it() -> None:
    collected, rounds = run("keep", constant=[1], empty=[2])
    assert rounds == [[0, 1, 2, 3]]
    assert numbers(collected.kept) == numbers(collected.groups) == [0, 1, 2, 3]
    assert (collected.num_dropped, collected.num_refilled) == (0, 0)
    assert (collected.num_uncommitted, collected.num_late) == (0, 0)


def test_drop_leaves_constant_groups_out_and_asks_for_no_others() -> None:
    collected, rounds = run("drop", constant=[1, 2])
    assert rounds == [[0, 1, 2, 3]]
    assert (numbers(collected.kept), numbers(collected.groups)) == ([0, 3], [0, 1, 2, 3])
    assert (collected.num_dropped, collected.num_refilled) == (2, 0)


def test_refill_asks_for_exactly_what_is_missing_and_counts_the_numbers_on() -> None:
    collected, rounds = run("refill", constant=[0, 2, 4])
    assert rounds == [[0, 1, 2, 3], [4, 5], [6]]
    assert numbers(collected.kept) == [1, 3, 5, 6]
    assert (collected.num_dropped, collected.num_refilled) == (3, 3)


def test_a_full_first_round_needs_no_refill() -> None:
    collected, rounds = run("refill")
    assert rounds == [[0, 1, 2, 3]]
    assert collected.num_refilled == 0


def test_refilling_stops_after_its_rounds_with_what_it_has() -> None:
    collected, rounds = run("refill", constant=range(1, 100), rounds=2)
    assert rounds == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert numbers(collected.kept) == [0]
    assert (collected.num_dropped, collected.num_refilled) == (9, 6)


def test_nothing_informative_at_all_is_an_answer() -> None:
    collected, _ = run("refill", constant=range(100), rounds=1)
    assert collected.kept == ()
    assert len(collected.groups) == 8


def test_a_group_that_lost_its_episodes_is_replaced_and_not_counted_as_constant() -> None:
    collected, rounds = run("refill", empty=[3])
    assert rounds == [[0, 1, 2, 3], [4]]
    assert numbers(collected.kept) == [0, 1, 2, 4]
    assert (collected.num_dropped, collected.num_refilled) == (0, 1)


def test_a_refill_that_fails_is_noted_and_the_next_one_asks_for_fresh_groups() -> None:
    collected, rounds = run("refill", constant=[3], failing=[4])
    assert rounds == [[0, 1, 2, 3], [4], [5]]
    assert numbers(collected.kept) == [0, 1, 2, 5]
    assert collected.failures == ("all 1 groups were dropped",)


def test_a_first_round_that_fails_is_the_runs_failure() -> None:
    with pytest.raises(RolloutError):
        run("refill", failing=[0])


def test_an_engine_that_must_be_rebuilt_is_nothing_to_refill_from() -> None:
    with pytest.raises(EnginePoisonedError):
        run("refill", constant=[3], failing=[4], error=EnginePoisonedError("half an update"))


def test_shares_of_a_batch_are_of_the_groups_played_and_of_the_episodes_compared() -> None:
    # 2 groups dropped as constant, 6 in the batch, of which 1 is constant: 3 of 8. 3 of 6 + 4 + 2 episodes were
    # overlong: those that filter_eps left out or that hold nothing to train on were compared, too.
    collected = Collected(groups=(), kept=(), num_dropped=2, num_refilled=5, failures=())
    counts = BatchCounts(
        num_groups=6, num_constant_groups=1, num_trajectories=6, num_filtered=4, num_untrained=2, num_overlong=3
    )
    assert batch_metrics(collected, BuiltBatch(None, counts, RunningReturns(), mean_return=0.25)) == {
        "batch/constant_group_fraction": 0.375,
        "batch/dropped_constant_groups": 2.0,
        "batch/refilled_groups": 5.0,
        "batch/num_filtered": 4.0,
        "batch/num_untrained": 2.0,
        "batch/mean_return": 0.25,
        "batch/overlong_fraction": 0.25,
    }


def test_a_batch_of_which_nothing_was_compared_has_no_mean_return() -> None:
    collected = Collected(groups=(), kept=(), num_dropped=1, num_refilled=0, failures=())
    metrics = batch_metrics(collected, BuiltBatch(None, BatchCounts(), RunningReturns(), mean_return=None))
    assert metrics["batch/constant_group_fraction"] == 1.0
    assert "batch/mean_return" not in metrics
    assert "batch/overlong_fraction" not in metrics


class Told:
    """Progress that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Demonstrations:
    """A pool that plays, for each request, one episode that samples the token 7 twice and is worth 0.5."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []

    async def collect(self, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]:
        self.requests += requests
        sampled = np.array([False, True, True])
        segment = Segment([5, 7, 7], sampled, [0.0, -1.0, -1.0], [-1, 0, 0], [-1, 0, 0])  # type: ignore[arg-type]
        turn = Turn(0, 0, (0, 1), (1, 3), FinishReason.STOP, reward=0.5)
        return [
            TrajectoryGroup(
                r.task, (Trajectory(r.group_id, 0, r.task, 0, (segment,), (turn,), (), Outcome.TERMINATED),), 1
            )
            for r in requests
        ]


def test_warm_up_imitates_one_episode_of_each_of_its_own_training_tasks() -> None:
    pool, told = Demonstrations(), Told()
    policy = load_policy("tiny:qwen3-64", seed=1)
    plan = WarmupPlan(
        "test/Env-v0",
        run_seed=3,
        warmup=WarmupSettings(learning_rate=1e-2, num_episodes=3, num_epochs=5, batch_size=3),
        optimizer=OptimizerSettings(),
        update=UpdateSettings(learning_rate=1e-2),
    )
    phases = Phases()
    report = asyncio.run(warm_up(policy.model, pool, plan, told, phases=phases))  # type: ignore[arg-type]
    assert str(phases) == "warming up 5 of 5 batches, 0:00 left"
    assert [(request.group_id, request.size) for request in pool.requests] == [
        ("warmup/000000", 1),
        ("warmup/000001", 1),
        ("warmup/000002", 1),
    ]
    own = child_seed(3, "warmup")
    assert [request.task for request in pool.requests] == [Task("test/Env-v0", training_seed(own, i)) for i in range(3)]
    # 3 episodes of 2 tokens, 5 times, one step each time.
    assert (report.num_tokens, report.num_steps) == (30, 5)
    first, last = report.epoch_losses[0], report.epoch_losses[-1]
    assert last < first
    assert told.notes == [
        f"warm-up: 3 demonstrations, loss per token {first:.3f} in the first pass, {last:.3f} in the last"
    ]


def test_a_warm_up_of_one_pass_tells_its_loss_once() -> None:
    told = Told()
    settings = WarmupSettings(learning_rate=1e-2, num_episodes=1, num_epochs=1, batch_size=1)
    update = UpdateSettings(learning_rate=1e-2)
    plan = WarmupPlan("test/Env-v0", run_seed=3, warmup=settings, optimizer=OptimizerSettings(), update=update)
    policy = load_policy("tiny:qwen3-64", seed=1)
    report = asyncio.run(warm_up(policy.model, Demonstrations(), plan, told))  # type: ignore[arg-type]
    (loss,) = report.epoch_losses
    assert told.notes == [f"warm-up: 1 demonstrations, loss per token {loss:.3f} in the one pass"]


def test_the_returns_by_which_groups_were_left_out_are_handed_on() -> None:
    plan = TrainPlan(
        "test/Env-v0", RunSize(1, 1, 2, batch_size=2, group_size=1), loop=LoopSettings(constant_groups="drop")
    )
    collector = Collector(plan, Demonstrations())  # type: ignore[arg-type]
    collected = asyncio.run(collector.collect(1))
    names = [trajectory.trajectory_id for group in collected.groups for trajectory in group.trajectories]
    assert len(names) == 2
    assert {name: known.episode_return for name, known in collected.returns.items()} == dict.fromkeys(names, 0.5)
    assert (collected.kept, collected.num_dropped) == ((), 2)  # an only episode is worth what its group is
    assert (collected.num_uncommitted, collected.num_late) == (0, 0)
    assert (collector.num_tasks, collector.pending_tasks) == (2, ())
