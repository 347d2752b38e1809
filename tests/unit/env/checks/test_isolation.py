"""What a whole process shares: who touches it is found, and played in worker processes as if nothing were shared."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gspo_gym.env.checks.checker import CheckReport, check_env
from gspo_gym.env.checks.play import watching
from gspo_gym.env.registry import make

# A module of its own, because a worker process has to import it.
DICE = '''
"""Dice drawn from what the whole process shares, and some that only say that they might."""

import os
import random

import numpy as np

from gspo_gym.env.core import TextEnv
from gspo_gym.env.rewards import Reward


class Unseeded(TextEnv):
    """A die, thrown at reset and named at once. What is drawn depends on who has drawn before."""

    policies = {"reference": lambda env, rng: lambda messages: str(env.number)}
    reward_range = (0.0, 1.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = self.draw(seed)
        return "Which number from 1 to 1000?", {}

    def draw(self, seed):
        return random.randint(1, 1000)

    def step(self, action):
        is_right = action == str(self.number)
        return f"It was {self.number}.", Reward({"right": float(is_right)}, success=is_right), True, False, {}


class SeedsAll(Unseeded):
    """Seeds numpy's generator for everybody at reset, and draws when it is asked."""

    policies = {"reference": lambda env, rng: lambda messages: messages[-1].content[-1]}

    def draw(self, seed):
        np.random.seed(seed)
        return 0

    def step(self, action):
        self.number = np.random.randint(1, 1000)
        return f"It was {self.number}.", Reward({"right": 1.0}, success=None), True, False, {}


class ChangesFolder(Unseeded):
    def draw(self, seed):
        os.chdir("/tmp" if os.getcwd() == "/" else "/")
        return int(self.np_random.integers(1, 1000))


class Declared(Unseeded):
    isolation = "process"


class Forbidden(Unseeded):
    isolation = "thread"


class DependsOnTime(Unseeded):
    """No process helps: what it says is another thing each time it is asked."""

    isolation = "process"

    def draw(self, seed):
        return int.from_bytes(os.urandom(4))


class NeedsArgument(Declared):
    def __init__(self, sides):
        self.sides = sides
'''


@pytest.fixture
def dice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module above, importable; what it changes in this process is put back."""
    name = "dice_of_the_isolation_tests"
    (tmp_path / f"{name}.py").write_text(DICE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(Path.cwd())
    python, numpy = random.getstate(), np.random.get_state()
    yield importlib.import_module(name)
    del sys.modules[name]
    random.setstate(python)
    np.random.set_state(numpy)


def check(env: Any, **settings: Any) -> CheckReport:
    return check_env(env, **{"seeds": range(3), "num_leak_episodes": 0, **settings})


def problems_of(report: CheckReport) -> list[tuple[str, str]]:
    return [(problem.check, problem.text) for problem in report.problems]


def test_who_draws_from_a_shared_generator_is_played_in_worker_processes_and_told_what_to_declare(
    dice: ModuleType,
) -> None:
    report = check(dice.Unseeded)
    assert problems_of(report) == []
    [note] = [note for note in report.notes if "isolation" in note]
    assert note.startswith(
        "reference, seed 0: reset() changed the generator of random, which all episodes of a process"
    )
    assert "declare isolation = 'process'" in note


def test_a_seed_set_for_everybody_is_no_harm_in_a_worker_process(dice: ModuleType) -> None:
    report = check(dice.SeedsAll)
    assert [check for check, _ in problems_of(report) if check == "determinism"] == []
    assert any("changed the generator of numpy.random" in note for note in report.notes)


def test_a_changed_working_directory_is_noticed_too(dice: ModuleType) -> None:
    folder = os.getcwd()
    report = check(dice.ChangesFolder)
    assert problems_of(report) == []
    assert any("reset() changed the working directory, which all episodes" in note for note in report.notes)
    os.chdir(folder)


def test_who_declares_a_process_is_played_in_one_without_a_note(dice: ModuleType) -> None:
    report = check(dice.Declared)
    assert problems_of(report) == []
    assert [fact.text for fact in report.facts if fact.check == "isolation"] == [
        "played in worker processes, as it declares"
    ]
    assert not any("isolation" in note for note in report.notes)


def test_who_declares_a_thread_and_touches_what_is_shared_breaks_a_promise(dice: ModuleType) -> None:
    found = dict(problems_of(check(dice.Forbidden)))
    assert "reset() changed the generator of random" in found["isolation"] or "more like these" in found["isolation"]


def test_worker_processes_do_not_hide_what_is_no_function_of_the_seed(dice: ModuleType) -> None:
    checks = {check for check, _ in problems_of(check(dice.DependsOnTime))}
    assert {"determinism", "reset"} <= checks


def test_a_class_that_no_worker_can_import_is_a_problem_that_says_so(dice: ModuleType) -> None:
    class Local(dice.Unseeded):  # type: ignore[name-defined,misc]  # a module made at run time
        pass

    found = [text for name, text in problems_of(check(Local)) if name == "isolation"]
    assert len(found) == 1
    assert "which all episodes of a process share, but no worker process can play it" in found[0]
    assert "expected a class or function at the top of a module" in found[0]


def test_arguments_reach_the_worker_process(dice: ModuleType) -> None:
    assert problems_of(check(dice.NeedsArgument, env_config={"sides": 6})) == []
    assert problems_of(check(partial(dice.NeedsArgument, sides=6))) == []
    report = check(dice.NeedsArgument, env_config={"sides": object()})
    [note] = [note for note in report.notes if "isolation" in note]
    assert note.startswith("it declares isolation = 'process', but was played in this one: ")
    assert "a worker process is given JSON only" in note


def test_a_registered_name_bound_to_arguments_is_played_as_that_name() -> None:
    report = check(partial(make, "SqlAnalyst", level="tiny"))
    assert report.passed, str(report)
    assert report.name == "gspo_gym/SqlAnalyst-v0"
    assert "played in worker processes, as it declares" in str(report)


def test_the_watch_sees_generators_the_folder_and_variables_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = random.Random(1)
    changed: list[str] = []
    with watching(changed):
        own.random()
        np.random.default_rng(2).random()
    assert changed == []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with watching(changed):
            random.random()
            np.random.random()
            monkeypatch.setenv("GSPO_GYM_TEST", "1")
            monkeypatch.chdir(tmp_path)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    assert set(changed) == {
        "the generator of random",
        "the generator of numpy.random",
        "the environment variables",
        "the working directory",
    }
