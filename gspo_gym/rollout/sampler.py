"""The tasks of training groups: one after another, or those that still teach something more often.

The task of a group follows from the run's seed, the group's number and what was counted up to the last step boundary,
all of which a checkpoint holds: a resumed run draws what an uninterrupted one would. All tasks are training tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo_gym.rollout.summary import Mixture
from gspo_gym.seeding import generator, training_seed
from gspo_gym.types import Task

_DECAY = 0.5 ** (1 / 8)  # of a choice's counts with each group of it: half of what is known is of the last eight
_UNIFORM_EVERY = 8  # groups, of which one is what a run without the sampler would play


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """What the sampler knows.

    Attributes:
        counts: (choice, I, N): decayed counts of the informative groups, and of all, of each choice that has any.
        in_play: (number, choice) of the groups that are asked for and not counted.
    """

    counts: tuple[tuple[int, float, float], ...] = ()
    in_play: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TaskCounts:
        """Return the counts from their fields after JSON; raises TypeError or ValueError for anything else."""
        counts = tuple((int(choice), float(some), float(num)) for choice, some, num in values.get("counts", ()))
        in_play = tuple((int(number), int(choice)) for number, choice in values.get("in_play", ()))
        return cls(counts, in_play)


def is_uniform(number: int) -> bool:
    """Return whether a group is of the slice that is drawn without regard to what was counted."""
    return number % _UNIFORM_EVERY == 0


class TaskSampler:
    """Choice of the next task by decayed counts of informative groups: those whose episodes did not all earn the same.

    With each finished group of a choice, I <- d I + [it was informative] and N <- d N + 1, where d = 0.5^(1/8). For a
    group, theta ~ Beta(1 + I, 1 + N - I) is drawn for each choice, and the largest is taken (Thompson 1933; the counts
    decay because a policy that learns changes what teaches it). The mean of theta is (I + 1) / (N + 2). Drawing in
    proportion to that mean is not enough: of 1,000 rows of which 100 always teach and 900 never, N tends to
    1 / (1 - d) = 12, and the 100 get 100 x 0.93 / (100 x 0.93 + 900 x 0.07) = 0.59 of the groups in the end.

    A choice is one of `num_tasks` tasks of the environment whose turn it is, or, with 0, an environment of the mixture,
    such as a game at one of several sizes, for a fresh task. A task that is in play is not chosen again before all are.
    Every eighth group ignores the counts: it takes the next of the tasks in turn and follows the mixture's shares. So
    what once taught nothing is looked at again, and the reward of this slice has the same meaning throughout a run.

    Args:
        run_seed: all draws derive from it.
        mixture: allots groups to environments.
        num_tasks: of each environment that are told apart; 0: none; None: every task comes in turn, and nothing counts.
        counts: of an earlier part of the run.
    """

    def __init__(self, run_seed: int, mixture: Mixture, num_tasks: int | None, counts: TaskCounts) -> None:
        self._run_seed = run_seed
        self._mixture = mixture
        self._num_tasks = num_tasks
        self._env_ids = mixture.env_ids
        num_choices = len(self._env_ids) * (num_tasks or 1)
        self._informative: NDArray[np.float64] = np.zeros(num_choices)
        self._all: NDArray[np.float64] = np.zeros(num_choices)
        for choice, informative, num in counts.counts:
            self._informative[choice], self._all[choice] = informative, num
        self._in_play = dict(counts.in_play)

    @property
    def is_adaptive(self) -> bool:
        """Return whether anything is counted."""
        return self._num_tasks is not None

    @property
    def counts(self) -> TaskCounts:
        """Return what is known now, for a checkpoint."""
        counts = tuple(
            (int(choice), float(self._informative[choice]), float(self._all[choice]))
            for choice in np.flatnonzero(self._all)
        )
        return TaskCounts(counts, tuple(sorted(self._in_play.items())))

    def task(self, number: int) -> Task:
        """Return the task of the group of that number; of one that is in play, the same again."""
        if self._num_tasks is None:
            return Task(self._mixture.env_of(number), training_seed(self._run_seed, number))
        if number not in self._in_play:
            self._in_play[number] = self._choose(number)
        choice = self._in_play[number]
        if self._num_tasks == 0:
            return Task(self._env_ids[choice], training_seed(self._run_seed, number))
        env, row = divmod(choice, self._num_tasks)
        return Task(self._env_ids[env], training_seed(self._run_seed, row))

    def after_step(self, outcomes: Mapping[int, bool], pending: Collection[int]) -> None:
        """Count the groups of a step, in the order of their numbers whenever they came.

        Args:
            outcomes: whether each group was informative, by its number; those that were lost are not in it.
            pending: numbers of the groups that are asked for and not handed out.
        """
        for number in sorted(outcomes):
            choice = self._in_play[number]
            self._informative[choice] = _DECAY * self._informative[choice] + outcomes[number]
            self._all[choice] = _DECAY * self._all[choice] + 1
        self._in_play = {number: choice for number, choice in self._in_play.items() if number in pending}

    def _choose(self, number: int) -> int:
        num_uniform = number // _UNIFORM_EVERY
        # The number among those of its kind, so that each kind follows the mixture's shares by itself.
        rank = num_uniform if is_uniform(number) else number - num_uniform - 1
        env = self._env_ids.index(self._mixture.env_of(rank))
        if not self._num_tasks:
            return env if is_uniform(number) else self._best(number, range(len(self._env_ids)))
        tasks = range(env * self._num_tasks, (env + 1) * self._num_tasks)
        return tasks[rank % self._num_tasks] if is_uniform(number) else self._best(number, tasks)

    def _best(self, number: int, choices: range) -> int:
        informative, num = (values[choices.start : choices.stop] for values in (self._informative, self._all))
        theta = generator(self._run_seed, "task sampler", number).beta(1 + informative, 1 + num - informative)
        if self._num_tasks:
            taken = [choice - choices.start for choice in self._in_play.values() if choice in choices]
            theta[taken] -= 1  # below all others, and in the same order
        return choices[int(theta.argmax())]
