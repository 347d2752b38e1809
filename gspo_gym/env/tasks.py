"""`TaskSource`: the tasks of an environment by seed, split into training and held-out ones.

A source is a function that draws a task, a file (or data set) of tasks, or any Python iterable. It is for environments
with turns, tools or state; for questions with answers use `DatasetEnv`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from gspo_gym.env.data.rows import (
    Entry,
    Sides,
    checked_fraction,
    content_hash,
    in_order,
    is_held_out_content,
    is_held_out_seed,
    next_seed,
    read_rows,
    split_by_content,
    without,
)
from gspo_gym.errors import ConfigError, ContractError, UsageError
from gspo_gym.seeding import generator

T = TypeVar("T")
Draw = Callable[[np.random.Generator], T]

_DEFAULT_FRACTION = 0.1
_MAX_DRAWS = 10_000  # a side with 1 of 1,000 tasks is missed with probability e^-10


class TaskSource(Generic[T]):
    """Tasks by seed: seeds below 2**31 name held-out tasks, those above, which training draws, training tasks.

    A task is any JSON value, or a dataclass of such values; its content alone decides its side. A drawn task of the
    wrong side is drawn again. Tasks of a list come in a shuffled order, each once before one comes again
    (`Sides.of_seed`). A source may be a constant of a module: files are read once, for the first task.

    Args:
        source: a function that draws a task from a numpy generator and nothing else; a .jsonl, .json, .csv, .parquet or
            .arrow file (`Path(__file__).with_name("tasks.jsonl")`), a folder or "hub:OWNER/NAME?split=train" of the
            datasets package, or MODULE:NAME; or the tasks themselves.
        held_out: tasks for evaluation, as a file or an iterable; equal tasks of `source` are left out. None holds out a
            part of `source`. Not with a function.
        held_out_fraction: size of that part, in (0, 1); default 0.1.
        split_seed: changes the split and the tasks of the seeds.

    Raises:
        ConfigError: an argument is wrong.

    >>> tasks = TaskSource(lambda rng: {"number": int(rng.integers(100))})
    >>> tasks.task(0) == tasks.task(0), tasks.task(0) == tasks.task(1)
    (True, False)
    >>> sorted(TaskSource(["a", "b", "c"], held_out=["c"]).task(2**31 + i) for i in range(2))
    ['a', 'b']
    """

    @overload
    def __init__(
        self: TaskSource[Mapping[str, Any]],
        source: str | Path,
        *,
        held_out: str | Path | Iterable[Mapping[str, Any]] | None = None,
        held_out_fraction: float | None = None,
        split_seed: int = 0,
    ) -> None: ...

    @overload
    def __init__(
        self,
        source: Draw[T] | Iterable[T],
        *,
        held_out: Iterable[T] | None = None,
        held_out_fraction: float | None = None,
        split_seed: int = 0,
    ) -> None: ...

    # Any: the overloads give the types.
    def __init__(
        self,
        source: Any,
        *,
        held_out: Any = None,
        held_out_fraction: float | None = None,
        split_seed: int = 0,
    ) -> None:
        self._fraction = checked_fraction(
            held_out_fraction, _DEFAULT_FRACTION, has_own_held_out=held_out is not None, where="TaskSource"
        )
        self._split_seed = split_seed
        self._draw: Draw[T] | None = source if callable(source) else None
        self._listed: Any = None if callable(source) else _rereadable(source, "source")
        if self._draw is not None and held_out is not None:
            raise ConfigError("TaskSource: held_out goes with a list of tasks; drawn tasks have held_out_fraction")
        self._listed_held_out: Any = None if held_out is None else _rereadable(held_out, "held_out")
        self._sides: Sides[T] | None = None  # None until the first task is asked for
        self._reading = threading.Lock()

    def task(self, seed: int | None, rng: np.random.Generator | None = None) -> T:
        """Return the task of a seed, always the same one, as a copy that its episode may change.

        Write `TASKS.task(seed, self.np_random)` in `reset`, and `TASKS.task(self.reset_seed, self.np_random)` in the
        `start` of a `ToolEnv`: a reset without a seed gets a task drawn from `rng` by `splits.next_seed`.

        Raises:
            ConfigError: the tasks cannot be read, or there is none on the side of the seed.
            ContractError: a task is no JSON value.
            UsageError: neither a seed nor a generator was given, or the seed is negative.
        """
        if seed is None:
            if rng is None:
                raise UsageError("TaskSource.task: expected a seed, or a generator that draws one, got neither")
            seed = next_seed(rng)
        if seed < 0:
            raise UsageError(f"TaskSource.task: expected a seed >= 0, got {seed}")
        return copy.deepcopy(self._read().of_seed(seed) if self._draw is None else self._draw_task(self._draw, seed))

    def __deepcopy__(self, memo: Any) -> TaskSource[T]:
        return self  # immutable, so copies of an environment share it

    def _draw_task(self, draw: Draw[T], seed: int) -> T:
        rng = generator(seed, "task", self._split_seed)
        wants_held_out = is_held_out_seed(seed)
        for _ in range(_MAX_DRAWS):
            task = draw(rng)
            content = content_hash(canonical_json(task, where="a drawn task"), self._split_seed)
            if is_held_out_content(content, self._fraction) == wants_held_out:
                return task
        side = "held-out" if wants_held_out else "training"
        raise ConfigError(
            f"TaskSource: {_MAX_DRAWS} drawn tasks were all on the other side, so there is hardly any {side} task; "
            f"draw from more tasks, or change held_out_fraction ({self._fraction:g}) or split_seed"
        )

    def _read(self) -> Sides[T]:
        with self._reading:  # without it, all episodes that start together would read the file
            if self._sides is None:
                self._sides = self._split()
            return self._sides

    def _split(self) -> Sides[T]:
        tasks = self._entries(self._listed, "tasks")
        if self._listed_held_out is None:
            train, held_out = split_by_content(tasks, self._fraction)
            advice = (
                f"held_out_fraction is {self._fraction:g}: give more tasks, change it or split_seed, or give held_out"
            )
        else:
            held_out = self._entries(self._listed_held_out, "held_out")
            train = without(tasks, held_out)
            advice = f"{len(tasks) - len(train)} tasks are in held_out, too"
        for name, side in (("training", train), ("held-out", held_out)):
            if not side:
                raise ConfigError(f"TaskSource: expected a {name} task, got none among {len(tasks)}; {advice}")
        return Sides(in_order(train), in_order(held_out))

    def _entries(self, source: Any, name: str) -> list[Entry[Any]]:
        if isinstance(source, str | Path):
            located_tasks = [(row.values, row.where) for row in read_rows(source)]
        else:
            located_tasks = [(task, f"{name}[{index}]") for index, task in enumerate(source)]
        return [
            (content_hash(canonical_json(task, where=where), self._split_seed), index, task)
            for index, (task, where) in enumerate(located_tasks)
        ]


def canonical_json(task: Any, *, where: str) -> str:
    """Return one text for equal tasks: keys sorted, dataclasses as objects, numpy numbers as numbers.
    >>> canonical_json({"b": (1, 2), "a": np.int64(3)}, where="here")
    '{"a":3,"b":[1,2]}'
    """
    try:
        return json.dumps(
            task, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_as_json
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(
            f"{where}: expected a value that JSON can hold, or a dataclass of such values, got {task!r:.80}: {error}"
        ) from error


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not")


def _rereadable(source: Any, name: str) -> Any:  # as a tuple, because an iterator can be read only once
    if isinstance(source, str | Path):
        return source
    if isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        raise ConfigError(
            f"TaskSource: expected {name} to be a function that draws a task, a file or an iterable of tasks, "
            f"got {type(source).__name__} {source!r:.60}"
        )
    return tuple(source)
