"""Which task a group gets: decayed counts by hand, what they lead to without a model, and that a draw can be repeated.

Outcomes are a rule here: a group of a task is informative if the rule says so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np
import pytest

from gspo_gym.rollout.sampler import TaskCounts, TaskSampler, is_uniform
from gspo_gym.rollout.summary import Mixture
from gspo_gym.seeding import FIRST_TRAINING_SEED, training_seed
from gspo_gym.types import Task

Rule = Callable[[Task], bool]
ONE = Mixture("test/A-v0", {})
SIZES = {"test/B-v0": 0.25, "test/C-v0": 0.25}


def sampler(
    num_tasks: int | None, counts: TaskCounts | None = None, others: Mapping[str, float] = SIZES
) -> TaskSampler:
    return TaskSampler(7, Mixture("test/A-v0", others), num_tasks, counts or TaskCounts())


def play(tasks: TaskSampler, numbers: range, rule: Rule, *, groups_per_step: int = 8) -> list[Task]:
    """Play the groups of these numbers, step by step; return their tasks."""
    played: list[Task] = []
    for start in range(numbers.start, numbers.stop, groups_per_step):
        step = {number: tasks.task(number) for number in range(start, start + groups_per_step)}
        tasks.after_step({number: rule(task) for number, task in step.items()}, ())
        played += step.values()
    return played


def row_of(task: Task) -> int:
    return task.seed - training_seed(7, 0)


@pytest.mark.parametrize(
    ("outcomes", "mean"),
    [
        ([], 0.5),
        ([1], 2 / 3),
        ([0], 1 / 3),
        # d = 2^(-1/8): I = d^3 = 0.77111 and N = 1 + d + d^2 + d^3 = 3.52901.
        ([1, 0, 0, 0], 1.77111 / 5.52901),
        # N = (1 - d^8) / (1 - d) = 0.5 / 0.0829960 = 6.02438.
        ([0] * 8, 1 / 8.02438),
        ([1] * 8, 7.02438 / 8.02438),
    ],
)
def test_the_mean_of_what_is_believed_of_a_task_by_hand(outcomes: list[int], mean: float) -> None:
    tasks = TaskSampler(0, ONE, 1, TaskCounts())
    for number, outcome in enumerate(outcomes):
        tasks.task(number)
        tasks.after_step({number: bool(outcome)}, ())
    (_, informative, num) = (tasks.counts.counts or ((0, 0.0, 0.0),))[0]
    assert (informative + 1) / (num + 2) == pytest.approx(mean, abs=1e-6)


def test_a_task_that_was_never_played_wins_as_often_as_its_belief_is_above_the_other_s() -> None:
    """Its theta is uniform, so above that of eight informative groups with 1 less the mean of theirs, 0.12462."""
    counts = TaskCounts(((1, 6.02438, 6.02438),))
    draws = [row_of(sampler(2, counts, others={}).task(number)) for number in range(2000) if not is_uniform(number)]
    expected = 1 / 8.02438
    assert abs(np.mean(np.array(draws) == 0) - expected) < 4 * (expected * (1 - expected) / len(draws)) ** 0.5


def test_of_a_thousand_rows_the_hundred_that_teach_get_most_groups() -> None:
    """After one group a row they get 0.6 of the groups, where 30 a row are allowed; uniform draws would get 0.1."""
    tasks = sampler(1000, others={})
    played = [row_of(task) % 10 == 3 for task in play(tasks, range(8000), lambda task: row_of(task) % 10 == 3)]
    shares = [np.mean(played[start : start + 1000]) for start in range(0, 8000, 1000)]
    assert np.mean(played[:200]) < 0.2 < shares[0]  # nothing is known at first
    assert min(shares[1:]) >= 0.6
    # Every eighth group is drawn without regard to it, and 0.1 of those are of rows that teach.
    assert np.mean(played[0::8]) == 0.1
    assert max(shares) <= 7 / 8 + 0.1 / 8 + 1e-3


def test_a_task_that_is_mastered_gives_way_to_the_others() -> None:
    tasks = sampler(20, others={})
    play(tasks, range(400), lambda task: row_of(task) == 3)
    before = Counter(row_of(task) for task in play(tasks, range(400, 480), lambda task: row_of(task) == 3))
    play(tasks, range(480, 880), lambda task: row_of(task) == 5)
    after = Counter(row_of(task) for task in play(tasks, range(880, 960), lambda task: row_of(task) == 5))
    assert before[3] > before[5]
    assert after[5] > after[3]


def test_a_task_in_play_is_not_chosen_again_before_all_are() -> None:
    tasks = sampler(4, others={})
    first = [row_of(tasks.task(number)) for number in range(1, 5)]
    assert sorted(first) == [0, 1, 2, 3]
    assert row_of(tasks.task(5)) in range(4)
    assert row_of(tasks.task(3)) == first[2]  # asked for again
    assert [number for number, _ in tasks.counts.in_play] == [1, 2, 3, 4, 5]
    tasks.task(0)
    assert [number for number, _ in tasks.counts.in_play] == [0, 1, 2, 3, 4, 5]  # the same in whatever order they came


def test_every_eighth_group_is_the_next_task_in_turn() -> None:
    tasks = sampler(5, others={})
    played = play(tasks, range(80), lambda task: row_of(task) == 0)
    assert [row_of(task) for task in played[::8]] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert [number for number in range(20) if is_uniform(number)] == [0, 8, 16]


def test_environments_are_chosen_by_what_they_teach_and_every_eighth_by_their_shares() -> None:
    tasks = sampler(0)
    played = play(tasks, range(800), lambda task: task.env_id == "test/B-v0")
    chosen = Counter(task.env_id for number, task in enumerate(played[400:], 400) if not is_uniform(number))
    assert chosen["test/B-v0"] > 0.8 * chosen.total()
    assert Counter(task.env_id for task in played[::8]) == {"test/A-v0": 50, "test/B-v0": 25, "test/C-v0": 25}
    assert [task.seed for task in played] == [training_seed(7, number) for number in range(800)]  # all fresh


def test_the_shares_of_a_mixture_hold_where_its_tasks_are_chosen() -> None:
    played = play(sampler(10), range(1600), lambda task: row_of(task) % 2 == 1)
    for kind in (played[::8], [task for number, task in enumerate(played) if number % 8]):
        shares = Counter(task.env_id for task in kind)
        assert [shares[f"test/{name}-v0"] / len(kind) for name in "ABC"] == [0.5, 0.25, 0.25]
    late = Counter((task.env_id, row_of(task) % 2 == 1) for task in played[800:])
    assert all(late[f"test/{name}-v0", True] > late[f"test/{name}-v0", False] for name in "ABC")


def test_without_it_tasks_come_in_turn_and_nothing_is_counted() -> None:
    tasks, mixture = sampler(None), Mixture("test/A-v0", SIZES)
    played = [tasks.task(number) for number in range(40)]
    assert played == [Task(mixture.env_of(number), training_seed(7, number)) for number in range(40)]
    tasks.after_step({}, ())
    assert (tasks.is_adaptive, tasks.counts) == (False, TaskCounts())


@pytest.mark.parametrize("num_tasks", [30, 0])
def test_a_sampler_goes_on_from_its_counts_bit_for_bit_with_groups_in_play(num_tasks: int) -> None:
    def teaches(task: Task) -> bool:
        return (task.seed + len(task.env_id)) % 3 == 0

    whole = sampler(num_tasks)
    play(whole, range(160), teaches)
    ahead = {number: whole.task(number) for number in range(160, 176)}
    whole.after_step({160: True, 161: False}, range(162, 176))
    saved = json.loads(json.dumps(asdict(whole.counts)))
    resumed = sampler(num_tasks, TaskCounts.from_json(saved))
    assert resumed.counts == whole.counts
    assert {number: resumed.task(number) for number in range(162, 176)} == dict(list(ahead.items())[2:])
    for tasks in (whole, resumed):
        tasks.after_step({number: teaches(ahead[number]) for number in range(162, 176)}, ())
    assert play(resumed, range(176, 336), teaches) == play(whole, range(176, 336), teaches)
    assert resumed.counts == whole.counts


def test_outcomes_count_in_the_order_of_their_numbers_and_lost_groups_not_at_all() -> None:
    together, one_by_one = sampler(1, others={}), sampler(1, others={})
    for tasks in (together, one_by_one):
        for number in range(4):
            tasks.task(number)
    together.after_step({3: False, 0: True, 1: False}, ())  # 2 was lost
    for number, outcome in ((0, True), (1, False), (3, False)):
        one_by_one.after_step({number: outcome}, range(number + 1, 4))
    d = 0.5 ** (1 / 8)
    assert together.counts.counts == one_by_one.counts.counts
    ((choice, informative, num),) = together.counts.counts
    assert (choice, informative, num) == (0, pytest.approx(d * d), pytest.approx(1 + d + d * d))


@pytest.mark.parametrize("num_tasks", [None, 0, 3, 500])
def test_no_held_out_task_is_ever_drawn(num_tasks: int | None) -> None:
    tasks = sampler(num_tasks)
    assert min(tasks.task(number).seed for number in range(500)) >= FIRST_TRAINING_SEED
