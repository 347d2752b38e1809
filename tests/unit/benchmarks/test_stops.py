"""The measurement of stops on a few of them; also that it notices a run that is not saved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import stops

# In a program of its own: `play` forks, and the workers of OpenMP that earlier tests made would not be in the fork.
PLAYING = """
import pathlib, sys
from benchmarks import stops
stops.play(stops.configure(pathlib.Path(sys.argv[1]), 3, "thread"))
"""


@pytest.mark.nightly
def test_runs_that_sigterm_stops_end_saved_and_alone_and_go_on_as_undisturbed() -> None:
    # In a program of its own, as above.
    command = [sys.executable, "-m", "benchmarks", "stops", "--count", "2", "--steps", "5", "--seed", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as it should be" in done.stdout


@pytest.mark.slow
def test_a_step_that_is_not_saved_is_noticed(tmp_path: Path) -> None:
    config = stops.configure(tmp_path, 3, "thread")
    subprocess.run([sys.executable, "-c", PLAYING, str(tmp_path)], check=True, timeout=300)
    assert stops.is_saved(config.run_folder)
    shutil.rmtree(config.run_folder / "checkpoints" / "step_000003")
    assert not stops.is_saved(config.run_folder)
