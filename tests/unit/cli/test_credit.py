"""`gspo-gym credit`, as it is typed."""

from __future__ import annotations

import json

import pytest

from gspo_gym.cli.main import main
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.judge.server import create_fake_judge_app
from gspo_gym.remote.serving import BackgroundServer

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


def test_an_option_that_an_environment_does_not_take_is_the_whole_error(capsys):
    assert main(["credit", "GuessNumber", "--option", "foo=1", *SMALL]) == 2
    error = capsys.readouterr().err
    assert "takes no argument 'foo'" in error
    assert "replay" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--continuations", "31"], "--continuations: expected at least 32, got 31"),
        (["--seeds", "3"], "--seeds: expected at least 2 tasks, got 3"),
        (["--discount", "0"], "--discount: expected 0 < discount <= 1, got 0"),
        (["--max-turns", "0"], "--max-turns: expected at least 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens: expected at least 1, got 0"),
        (["--concurrent", "0"], "--concurrent: expected at least 1, got 0"),
        ([*SMALL, "--group-size", "1"], "expected at least 2 episodes a group"),
        ([*SMALL, "--policy", "scripted:refrence"], "has no scripted policy 'refrence'; did you mean 'reference'?"),
        ([*SMALL, "--policy", "scripted:random+x"], "has no scripted policy 'x'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(words, message, capsys):
    assert main(["credit", "GuessNumber", *words]) == 2
    assert message in capsys.readouterr().err


JUDGED = """
[model]
base = "tiny:qwen3-64"
label = "judged"
[rollout]
env_name = "GuessNumber"
max_turns = 2
max_output_tokens = 2
max_model_len = 256
episodes_per_batch = 8
[training]
iterations_per_epoch = 1
group_size = 4
batch_size = 8
learning_rate = 1e-3
[evaluation]
seeds = "0:4"
[judge]
enabled = true
reward_blend = {{ env = 0.5, {part} = 0.5 }}
[judge.options]
{part} = true
provider = "local"
model = "fake-judge"
base_url = "{url}/v1"
rubric_overrides = {{ {part} = {{ criteria = [{{ id = "said", description = 'It says "2".' }}] }} }}
"""


def test_a_judges_events_are_scored_as_an_estimator(capsys, tmp_path):
    options = [f"--option={text}" for text in ("style=terse", "high=4", "max_guesses=2")]
    path, file = tmp_path / "judged.toml", tmp_path / "credit.json"
    with BackgroundServer(create_fake_judge_app()) as server:
        path.write_text(JUDGED.format(part="event", url=server.url))
        command = ["credit", "GuessNumber", *options, *SMALL, "--judge", str(path), "--json", str(file)]
        assert main(command) == 0
        path.write_text(JUDGED.format(part="outcome", url=server.url))
        capsys.readouterr()
        assert main(command) == 2
    assert "it scores no turns; set judge.options.event = true" in capsys.readouterr().err
    report = json.loads(file.read_text())
    assert report["judge"] == str(path)
    # Of two guesses among four numbers the first is best at 2 or 3: what the judge pays for is not far from the truth.
    (row,) = [row for row in report["rows"] if row["name"] == "a judge's events, turn"]
    assert -1 <= row["low"] <= row["correlation"] <= row["high"] <= 1
