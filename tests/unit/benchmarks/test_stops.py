"""The measurement of stops on a few of them; also that it notices a run that is not saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import stops


@pytest.mark.slow
def test_runs_that_sigterm_stops_end_saved_and_alone_and_go_on_as_undisturbed(tmp_path: Path) -> None:
    report = stops.measure(tmp_path, count=3, seed=1, num_steps=5)
    assert report.is_good, report
    assert report.stops.total() == 3


@pytest.mark.slow
def test_a_step_that_is_not_saved_is_noticed(tmp_path: Path) -> None:
    config = stops._config(tmp_path, 3, "thread")
    stops.play(config)
    assert stops._is_saved(config.run_folder)
    shutil.rmtree(config.run_folder / "checkpoints" / "step_000003")
    assert not stops._is_saved(config.run_folder)
