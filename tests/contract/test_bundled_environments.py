"""Every bundled environment, whichever there are, keeps the whole contract and brings what ours must bring."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from gspo_gym_envs import OWN
from tiers import slow_but

from gspo_gym.env.checks.checker import CHECKS, CheckReport, check_env
from gspo_gym.env.checks.subject import Problem
from gspo_gym.env.registry import make

# What there must be at least; whatever else is bundled is checked alike.
LEAST = (
    "CodeRepair", "Countdown", "FrozenLake", "GuessNumber", "Homestead", "SqlAnalyst", "SupportDesk", "TicTacToe",
    "Wordle",
)  # fmt: skip
FEWER: dict[str, Any] = {"gspo_gym/CodeRepair-v0": {"seeds": range(4), "num_leak_episodes": 8}}  # programs are run


def test_the_bundled_environments_are_found() -> None:
    assert {f"gspo_gym/{name}-v0" for name in LEAST} <= set(OWN)
    folders = Path(inspect.getfile(make("GuessNumber").unwrapped.__class__)).parents[1].glob("*/env.py")
    assert len(OWN) >= len(list(folders))  # none is there and not registered


@pytest.mark.parametrize("env_id", slow_but(OWN, set(OWN) - {"gspo_gym/Homestead-v0", "gspo_gym/CodeRepair-v0"}))
def test_it_keeps_the_contract_without_a_weakness_to_note_on_one_screen(env_id: str) -> None:
    report = check_env(env_id, **FEWER.get(env_id, {}))
    assert report.passed, str(report)
    assert report.checks == tuple(CHECKS)
    assert report.notes == ()
    assert len(str(report).splitlines()) <= 26


@pytest.mark.parametrize("env_id", OWN)
def test_it_brings_a_reference_a_random_player_a_range_and_a_readme(env_id: str) -> None:
    env = make(env_id)
    assert {"reference", "random"} <= set(env.unwrapped.policies)
    low, high = env.unwrapped.reward_range
    assert -float("inf") < low < high < float("inf")
    assert (Path(inspect.getfile(type(env.unwrapped))).parent / "README.md").is_file()
    env.close()


def test_a_problem_of_one_of_ours_would_be_shown_with_its_check() -> None:
    report = check_env("gspo_gym/GuessNumber-v0", seeds=range(2), num_leak_episodes=4)
    broken = CheckReport(report.name, report.checks, (Problem("leaks", "got 1 files"),), (), ())
    assert not broken.passed
    assert "FAIL leaks" in str(broken)
