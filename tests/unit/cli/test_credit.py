"""`gspo-gym credit`, as it is typed."""

from __future__ import annotations

import json

import pytest

from gspo_gym.cli.main import main
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register

SMALL = ("--seeds", "0:4", "--group-size", "4", "--max-turns", "4")


class Dice(TextEnv):
    """Rolls dice that no seed decides."""

    num_rolls = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "roll", {}

    def step(self, action):
        Dice.num_rolls += 1
        return "", float(Dice.num_rolls % 7), True, False, {}


def test_a_game_is_measured_and_kept_as_json(capsys, tmp_path):
    file = tmp_path / "credit.json"
    options = [f"--option={text}" for text in ("style=terse", "high=4", "max_guesses=2")]
    assert main(["credit", "GuessNumber", *options, *SMALL, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert (report["environment"], report["policy"]) == ("gspo_gym/GuessNumber-v0", "scripted:reference+random")
    assert report["env_config"] == {"style": "terse", "high": 4, "max_guesses": 2}
    assert (report["seeds"], report["group_size"], report["continuations"]) == ("0:4", 4, 32)
    names = [row["name"] for row in report["rows"]]
    assert {"return", "trajectory, leave one out", "turn, leave one out", "GiGPO as published"} < set(names)
    assert all(name in text for name in names)
    assert 0 < report["ceiling"] <= 1
    assert 16 <= report["num_turns"] <= 32  # 16 episodes of one or two turns


def test_an_environment_that_no_seed_decides_is_refused_by_name(capsys):
    register("test_credit/Dice-v0", entry_point=Dice)
    assert main(["credit", "test_credit/Dice-v0", *SMALL]) == 2
    error = capsys.readouterr().err
    assert "test_credit/Dice-v0: a replay must be answered as the episode was" in error
    assert '"determinism"' in error
    assert "gspo-gym env check" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--continuations", "31"], "--continuations: expected at least 32, got 31"),
        (["--seeds", "3"], "--seeds: expected at least 2 tasks, got 3"),
        (["--discount", "0"], "--discount: expected 0 < discount <= 1, got 0"),
        ([*SMALL, "--group-size", "1"], "expected at least 2 episodes a group"),
        ([*SMALL, "--policy", "scripted:refrence"], "has no scripted policy 'refrence'; did you mean 'reference'?"),
        ([*SMALL, "--policy", "scripted:random+x"], "has no scripted policy 'x'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(words, message, capsys):
    assert main(["credit", "GuessNumber", *words]) == 2
    assert message in capsys.readouterr().err
