"""Killed and resumed runs end as undisturbed ones; `python -m benchmarks crash` does it fifty times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.crash import Report, cut_after, fingerprint, settings
from gspo_gym.cli.train import run_training


@pytest.mark.slow
def test_a_run_that_goes_on_after_an_evaluated_step_is_the_undisturbed_one_to_the_last_digit(tmp_path: Path) -> None:
    whole = settings(tmp_path / "whole", num_steps=5)  # of which 0, 4 and 5 are evaluated
    run_training(whole)
    resumed = cut_after(4, whole, tmp_path / "resumed")
    run_training(resumed, resume=True)
    assert fingerprint(resumed.run_folder) == fingerprint(whole.run_folder)


@pytest.mark.slow
def test_a_run_that_is_killed_or_stopped_anywhere_ends_as_an_undisturbed_one() -> None:
    command = [sys.executable, "-m", "benchmarks", "crash", "--count", "2", "--steps", "4", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6, of which 0 failed" in done.stdout  # 2 kills, and a stop after each of the steps 0 to 3


def test_a_report_is_good_only_if_nothing_differs_and_every_missing_piece_is_noticed() -> None:
    assert Report(controls={"moments": True}).is_good
    assert not Report(controls={"moments": True, "seeds": False}).is_good
    assert not Report(differing=["kill 0: weights"]).is_good
    assert not Report(failed=["kill 0: no checkpoint"]).is_good
