"""Bundled environments keep the whole contract in other forms, too; their own is in `tests/contract`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from gspo_gym_envs.score import main

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.registry import make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("GuessNumber", {"high": 100, "max_guesses": 7, "style": "verbose"}),
        ("FrozenLake", {"map": "random", "size": 3, "style": "verbose"}),
        ("SqlAnalyst", {"level": "tiny", "tools": ["query", "answer"], "style": "verbose"}),
        ("CodeRepair", {"level": "tiny", "style": "verbose"}),
        ("SupportDesk", {"level": "tiny", "max_steps": 3}),
        ("Countdown", {"num_numbers": 5, "max_number": 100, "max_target": 999, "max_turns": 8, "style": "verbose"}),
        ("Wordle", {"words": ["cat", "cot", "dog", "dot"], "style": "verbose"}),
        ("TicTacToe", {"opponent": "minimax", "style": "verbose"}),
        ("TicTacToe", {"opponent": "self"}),
        ("Homestead", {"size": 12, "max_actions": 4, "style": "verbose"}),
    ],
)
def test_the_contract_is_kept(name: str, kwargs: dict[str, Any]) -> None:
    report = check_env(partial(make, name, **kwargs), seeds=range(2))
    assert report.passed, str(report)


def test_the_score_command_prints_what_the_players_earn(capsys: pytest.CaptureFixture[str]) -> None:
    main(["GuessNumber", "--episodes", "3", "high=1", "max_guesses=2", "style=terse"])
    # One number: both players say "1" (1 byte) to "Guess 1-1. 2 tries." (19) and hear "correct" (7).
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["reference", "1.000", "1.000", "1.00", "19.0", "7.0", "1.0"],
        ["random", "1.000", "1.000", "1.00", "19.0", "7.0", "1.0"],
    ]
