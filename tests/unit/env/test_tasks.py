"""Task sources: a seed names a task for ever, and no task is on both sides."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_gym.env.core import ToolEnv
from gspo_gym.env.tasks import TaskSource, canonical_json
from gspo_gym.env.tools import tool
from gspo_gym.errors import ConfigError, ContractError, UsageError
from gspo_gym.types import Message

FIRST = 2**31  # the first training seed


@dataclass(frozen=True)
class Sum:
    left: int
    right: int


def small_sum(rng: np.random.Generator) -> Sum:
    return Sum(int(rng.integers(4)), int(rng.integers(4)))


ALL_SUMS = {Sum(left, right) for left in range(4) for right in range(4)}


def sides_of(source: TaskSource[Any], count: int) -> tuple[set[Any], set[Any]]:
    """(training, held-out) tasks of `count` seeds each."""
    return {source.task(FIRST + i) for i in range(count)}, {source.task(i) for i in range(count)}


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(0, 2**31 - 1), st.integers(FIRST, 2**32 - 1), st.integers(0, 50), st.sampled_from([0.2, 0.5, 0.8]))
def test_a_held_out_task_is_never_a_training_task(held_out: int, training: int, split: int, fraction: float) -> None:
    source = TaskSource(small_sum, held_out_fraction=fraction, split_seed=split)
    assert source.task(held_out) != source.task(training)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1), st.integers(0, 2**31 - 1), st.integers(FIRST, 2**32 - 1))
def test_equal_tasks_of_a_list_are_on_one_side(tasks: list[int], held_out: int, training: int) -> None:
    source = TaskSource(tasks, held_out_fraction=0.5)
    try:
        assert source.task(held_out) != source.task(training)
    except ConfigError as error:  # all on one side
        assert "expected a" in str(error)  # noqa: PT017 - either is fine, and both are checked


def test_every_task_of_a_small_space_is_on_one_side_and_reached() -> None:
    # each seed draws one of 16: that 600 seeds of a side of at least 3 miss one has a probability below 16 e^-37
    training, held_out = sides_of(TaskSource(small_sum, held_out_fraction=0.5), 600)
    assert training & held_out == set()
    assert training | held_out == ALL_SUMS


def test_about_the_fraction_of_drawn_tasks_is_held_out() -> None:
    def draw(rng: np.random.Generator) -> int:
        return int(rng.integers(1000))

    training, held_out = sides_of(TaskSource(draw, held_out_fraction=0.2), 8000)
    assert training & held_out == set()
    # Binomial(1000, 0.2): mean 200, standard deviation 12.6; five deviations of slack
    assert abs(len(held_out) - 200) < 5 * 12.7


def blake2b(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@pytest.mark.parametrize("seed", [0, 1, 2, FIRST, FIRST + 1])
def test_a_seed_names_the_same_task_for_ever(seed: int) -> None:
    # written out, because another answer means another task for every published seed of every such environment
    rng = np.random.default_rng(blake2b(f"{seed}\x1fstr:task\x1fint:7") >> 1)
    while True:
        expected = {"number": int(rng.integers(1000))}
        is_held_out = blake2b(f'7\x1f{{"number":{expected["number"]}}}') < 2**62  # a quarter of 2**64
        if is_held_out == (seed < 2**31):
            break
    source = TaskSource(lambda rng: {"number": int(rng.integers(1000))}, held_out_fraction=0.25, split_seed=7)
    assert source.task(seed) == expected


def test_lists_are_gone_through_once_before_a_task_comes_again() -> None:
    source = TaskSource(range(30), held_out=range(25, 40))
    assert sorted(source.task(FIRST + 7 + i) for i in range(25)) == list(range(25))
    assert sorted(source.task(i) for i in range(15)) == list(range(25, 40))
    assert source.task(15) == source.task(0)


def test_rows_of_files_are_tasks_and_are_read_once_when_first_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    source = TaskSource(path, held_out=[{"n": 3}])
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(4)))
    assert sorted(source.task(FIRST + i)["n"] for i in range(3)) == [0, 1, 2]
    assert source.task(0) == {"n": 3}
    path.write_text("not JSON")
    assert source.task(5) == {"n": 3}


def test_parquet_files_are_read_as_data_sets_are(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    datasets.Dataset.from_dict({"n": list(range(40))}).to_parquet(path)
    source = TaskSource(path, held_out_fraction=0.5)
    seen = {source.task(seed)["n"] for seed in (*range(40), *range(FIRST, FIRST + 40))}
    assert seen == set(range(40))


def test_an_iterator_is_taken_as_it_is_when_the_source_is_made() -> None:
    tasks = [{"n": n} for n in range(20)]
    source = TaskSource((task for task in tasks), held_out_fraction=0.5)
    tasks.clear()
    assert len({source.task(seed)["n"] for seed in (*range(40), *range(FIRST, FIRST + 40))}) == 20


def test_what_an_episode_does_to_its_task_stays_there() -> None:
    listed = TaskSource([{"board": [0, 0]}], held_out=[{"board": [1, 1]}])
    shared = {"board": [0, 0]}
    for source in (listed, TaskSource(lambda rng: shared, held_out_fraction=0.5)):
        seed = next(seed for seed in (0, FIRST) if is_task(source, seed))
        source.task(seed)["board"].append(9)
        assert 9 not in source.task(seed)["board"]


def is_task(source: TaskSource[Any], seed: int) -> bool:
    try:
        source.task(seed)
    except ConfigError:
        return False
    return True


def test_without_a_seed_a_task_of_the_generators_side_is_drawn() -> None:
    source = TaskSource(small_sum, held_out_fraction=0.5)
    training, _ = sides_of(source, 600)
    rng = np.random.default_rng(FIRST)
    drawn = [source.task(None, rng) for _ in range(200)]
    assert set(drawn) <= training
    assert len(set(drawn)) > 1
    rng = np.random.default_rng(FIRST)
    assert drawn == [source.task(None, rng) for _ in range(200)]
    assert not training & {source.task(None, np.random.default_rng(number)) for number in range(20)}
    with pytest.raises(UsageError, match="expected a seed, or a generator that draws one, got neither"):
        source.task(None)


def test_a_side_without_tasks_is_an_error_that_says_what_to_change() -> None:
    one = TaskSource(lambda rng: "the only one", held_out_fraction=0.5)
    empty = 0 if is_task(one, FIRST) else FIRST
    with pytest.raises(ConfigError, match=r"draw from more tasks, or change held_out_fraction \(0.5\) or split_seed"):
        one.task(empty)
    with pytest.raises(ConfigError, match="expected a training task, got none among 2; 2 tasks are in held_out, too"):
        TaskSource([1, 2], held_out=[1, 2, 3]).task(0)
    with pytest.raises(ConfigError, match="expected a training task, got none among 0"):
        TaskSource([], held_out=["a"]).task(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"source": 3},
            "expected source to be a function that draws a task, a file or an iterable of tasks, got int 3",
        ),
        ({"source": {"a": 1}}, "got dict"),
        ({"source": [1], "held_out": 4}, "expected held_out to be"),
        ({"source": small_sum, "held_out": [1]}, "held_out goes with a list of tasks"),
        ({"source": [1], "held_out_fraction": 1.0}, r"expected held_out_fraction in \(0, 1\), got 1.0"),
        ({"source": [1], "held_out": [2], "held_out_fraction": 0.5}, "held_out_fraction has no effect"),
    ],
)
def test_wrong_arguments_are_refused_when_the_source_is_made(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskSource(**arguments)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a seed >= 0, got -1"):
        TaskSource([1, 2, 3]).task(-1)


@pytest.mark.parametrize(
    "bad", [{1, 2}, object(), float("nan"), {"a": b"bytes"}], ids=["set", "object", "nan", "bytes"]
)
def test_a_task_that_json_cannot_hold_is_named_with_its_place(bad: Any) -> None:
    with pytest.raises(ContractError, match=r"tasks\[1\]: expected a value that JSON can hold"):
        TaskSource([0, bad]).task(0)
    with pytest.raises(ContractError, match="a drawn task: expected a value that JSON can hold"):
        TaskSource(lambda rng: bad).task(0)


def test_equal_tasks_have_one_text() -> None:
    texts = {canonical_json(task, where="") for task in (Sum(1, 2), {"right": 2, "left": np.int64(1)})}
    assert texts == {'{"left":1,"right":2}'}


def test_a_copy_of_an_environment_s_arguments_shares_the_source() -> None:
    source = TaskSource([1, 2])
    assert copy.deepcopy({"tasks": source})["tasks"] is source


class Adder(ToolEnv):
    tasks = TaskSource(small_sum, held_out_fraction=0.5)

    def start(self, options: Any) -> str:
        self.sum = self.tasks.task(self.reset_seed, self.np_random)
        return f"{self.sum.left}+{self.sum.right}"

    @tool
    def answer(self, number: int) -> str:
        """Answer."""
        self.finish(float(number == self.sum.left + self.sum.right))
        return "done"


def test_a_tool_environment_finds_the_seed_of_its_reset() -> None:
    env = Adder()
    env.reset(seed=5)
    assert env.sum == Adder.tasks.task(5)
    env.step(Message("assistant", "none"))
    env.reset()
    assert env.reset_seed is None
    assert env.sum in sides_of(Adder.tasks, 600)[1]  # held out, as the episode before
