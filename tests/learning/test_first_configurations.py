"""What `gspo-gym config new` writes for a bundled environment trains as it stands, until its score rises.

With half of its steps, which is enough to see it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_gym.cli.main import main
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
from gspo_gym.run.records import read_events

LESS = ("training.iterations_per_epoch=30", "evaluation.seeds=0:100")
BUNDLED = ("GuessNumber", "FrozenLake", "TicTacToe", "Countdown", "Wordle", "SqlAnalyst", "CodeRepair", "SupportDesk",
           "Homestead")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "env_name", [BUNDLED[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in BUNDLED[1:])]
)
def test_what_config_new_writes_is_learned(env_name: str, tmp_path: Path) -> None:
    path = tmp_path / "first.toml"
    assert main(["config", "new", str(path), "--env", env_name]) == 0
    config = load_config(path, [*LESS, f"run.folder={tmp_path}"])
    run_training(config)
    evaluations = [event["data"] for event in read_events(config.run_folder) if event["kind"] == "evaluation"]
    before, after = evaluations[0], evaluations[-1]
    # Success is every achievement there, which none of these small models reaches; the return is the share of them.
    score = "mean_return" if env_name == "Homestead" else before["score"]
    interval = "success_interval" if score == "success_rate" else f"{score}_interval"
    print(f"{env_name}: {score} {before[score]:.3f} to {after[score]:.3f}, {after[interval]}")
    # The least that the second can be, with 95%, is more than the first was.
    assert after[interval][0] > before[score]
