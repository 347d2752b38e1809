"""Killed and resumed runs end as undisturbed ones; `python -m benchmarks crash` does it fifty times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.crash import CrashReport, cut_after, fingerprint, settings
from benchmarks.soak import Holding, SoakReport
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


def test_a_report_of_kills_is_good_only_if_nothing_differs_and_every_missing_piece_is_noticed() -> None:
    good = CrashReport(controls={"moments": True}, concurrency=True)
    assert good.is_good
    assert not CrashReport(controls={"moments": True}).is_good
    assert not CrashReport(controls={"moments": False}, concurrency=True).is_good
    assert not CrashReport(differing=["kill 0: weights"], concurrency=True).is_good
    assert not CrashReport(failed=["kill 0: no checkpoint"], concurrency=True).is_good


def test_a_run_is_flat_if_its_last_quarter_holds_what_its_second_one_did() -> None:
    def report(late: Holding, imbalances: tuple[str, ...] = ()) -> SoakReport:
        return SoakReport(4000, 1.0, Holding(100.0, 9, 3, 2), late, 4000, imbalances)

    assert report(Holding(101.9, 9, 3, 2)).mb_per_1000_episodes == pytest.approx(0.95)  # 1.9 MB in 2,000 episodes
    assert report(Holding(101.9, 9, 3, 2)).is_good
    for leak in (Holding(102.1, 9, 3, 2), Holding(100.0, 10, 3, 2), Holding(100.0, 9, 4, 2), Holding(100.0, 9, 3, 3)):
        assert not report(leak).is_good
    assert not report(Holding(100.0, 9, 3, 2), ("lost",)).is_good
