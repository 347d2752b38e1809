"""Every environment registered under gspo_gym/ keeps the whole contract, and brings what ours must bring."""

from __future__ import annotations

import inspect
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from gspo_gym.env.checker import check_env
from gspo_gym.env.checks import CHECKS
from gspo_gym.env.registry import list_environments, make

OURS = [env_id for env_id in list_environments() if gymnasium.registry[env_id].namespace == "gspo_gym"]
# Made of rows that a user brings, so there is no default form of it; tests/unit/env/test_dataset.py checks some.
NEEDS_ROWS = "gspo_gym/Dataset-v0"
BUNDLED = [env_id for env_id in OURS if env_id != NEEDS_ROWS]


def test_the_bundled_environments_are_found() -> None:
    assert NEEDS_ROWS in OURS
    assert BUNDLED == ["gspo_gym/FrozenLake-v0", "gspo_gym/GuessNumber-v0", "gspo_gym/SqlAnalyst-v0"]


@pytest.mark.parametrize("env_id", BUNDLED)
def test_it_keeps_the_contract(env_id: str) -> None:
    report = check_env(env_id, seeds=range(20))
    assert report.passed, str(report)
    assert report.checks == tuple(CHECKS)


@pytest.mark.parametrize("env_id", BUNDLED)
def test_it_refuses_a_step_after_the_end_and_ends_by_itself(env_id: str) -> None:
    notes = check_env(env_id, seeds=range(3)).notes
    assert len(notes) == 1, notes  # the number of tasks; anything else is a weakness that ours must not have


@pytest.mark.parametrize("env_id", BUNDLED)
def test_gymnasium_accepts_it(env_id: str) -> None:
    gymnasium_check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", BUNDLED)
def test_it_brings_a_reference_a_random_player_a_range_and_a_readme(env_id: str) -> None:
    env = make(env_id)
    assert {"reference", "random"} <= set(env.policies)
    low, high = env.reward_range
    assert -float("inf") < low < high < float("inf")
    assert (Path(inspect.getfile(type(env))).parent / "README.md").is_file()
    env.close()
