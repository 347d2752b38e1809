"""An evaluation that is interrupted keeps every row, and goes on with the seeds that are missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import programs
import pytest

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.main import main
from gspo_gym.rollout.evaluation import EvaluationRow, KeptRows, PlayedRow
from gspo_gym.types import Outcome

SUPPORT = Path(__file__).parents[2] / "support"
CONFIG = """
run.stop_grace_seconds = 1
[model]
base = "tiny:qwen3-64"
label = "held"
[rollout]
env_name = "held_env:Held-v0"
max_turns = 2
max_output_tokens = 8
max_model_len = 256
episodes_per_batch = 8
max_concurrent_rollouts = 3
[training]
iterations_per_epoch = 1
group_size = 4
batch_size = 4
learning_rate = 1e-3
"""
COMMAND = ["evaluate", "c.toml", "--model", "scripted:random", "--against", "scripted:other", "--json", "r.json"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)
    return tmp_path


def interrupted(folder: Path) -> str:
    """Send SIGTERM to an evaluation of ten seeds once eight rows are there; return what it said."""
    part = folder / "r.json.part"
    running = programs.Popen(
        [sys.executable, "-m", "gspo_gym.cli", *COMMAND, "--seeds", "0:10"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    # Seeds 8 and 9 wait, the others end in the third slot: a line for each, below that of what was asked.
    while not part.exists() or len(part.read_text().splitlines()) < 9:
        if running.poll() is not None or time.monotonic() > deadline:
            running.kill()
            pytest.fail(running.communicate()[1])
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)  # which does what Ctrl-C does: see env collect's test
    told = running.communicate(timeout=60)[1]
    (folder / "go").touch()  # those that played hung until the end
    assert running.returncode == 143, told
    return told


@pytest.mark.slow  # a process that loads torch
def test_sigterm_keeps_every_row_and_resume_plays_the_missing_seeds(folder: Path, capsys: Any) -> None:
    told = interrupted(folder)
    assert "stopped by SIGTERM: not done after run.stop_grace_seconds = 1; what was finished is kept" in told
    assert not Path("r.json").exists()
    rows = [json.loads(line) for line in Path("r.json.part").read_text().splitlines()[1:]]
    assert {row["seed"] for row in rows} >= set(range(8))

    assert main([*COMMAND, "--seeds", "0:10"]) == 2
    assert "add --resume, or remove it" in capsys.readouterr().err
    for more, key in (
        (["--seeds", "0:9"], "config.evaluation.seeds"),
        (["--seeds", "0:10", "rollout.max_turns=7"], "config.rollout.max_turns"),
        (["--seeds", "0:10", "--model", "scripted:other"], "models.scripted:random"),
    ):
        assert main([*COMMAND, *more, "--resume"]) == 2
        error = capsys.readouterr().err
        assert "r.json.part is of another evaluation" in error
        assert f"{key}: expected " in error

    Path("played.txt").unlink()
    with Path("r.json.part").open("a") as file:
        file.write('{"model": "scripted:ra')  # as a killed process leaves it
    assert main([*COMMAND, "--seeds", "0:10", "--resume"]) == 0
    assert f"{len(rows)} episodes are there already, in r.json.part" in capsys.readouterr().err
    played = Counter(Path("played.txt").read_text().split())
    # The first eight are over for one player of two; the others may be, too, where they ended as the signal came.
    assert [played[str(seed)] for seed in range(1, 8)] == [1] * 7
    assert played.total() - played["0"] <= 7 + 2 * 2
    result = json.loads(Path("r.json").read_text())["evaluations"]
    for name, num_retries in (("scripted:random", 1), ("scripted:other", 0)):  # seed 3 failed once, before the signal
        assert [(row["seed"], row["episode_return"]) for row in result[name]["rows"]] == [(n, n) for n in range(10)]
        assert (result[name]["mean_return"], result[name]["num_retries"]) == (4.5, num_retries)  # 45 / 10
    assert not Path("r.json.part").exists()


def test_resume_needs_a_part_and_a_file_to_keep_it_beside(folder: Path, capsys: Any) -> None:
    assert main([*COMMAND, "--seeds", "0:2", "--resume"]) == 2
    assert "r.json.part: there is nothing to go on with; leave --resume out" in capsys.readouterr().err
    for output in ([], ["--json", "-"], ["--json", "/dev/null"]):
        assert main(["evaluate", "c.toml", "--model", "scripted:random", "--seeds=0:2", *output, "--resume"]) == 2
        assert "--resume: expected --json FILE" in capsys.readouterr().err


def row(seed: int) -> PlayedRow:
    return PlayedRow("Held-v0", EvaluationRow(seed, float(seed), None, 1, Outcome.TERMINATED), num_retries=0)


def test_an_evaluation_of_which_every_row_is_there_plays_nothing_and_loads_no_model(folder: Path) -> None:
    from gspo_gym.config.run_config import load_config

    config = load_config("c.toml", ["evaluation.seeds=0:3"])
    whole = run_evaluation(config, "no/such/model", rows=KeptRows(tuple(row(seed) for seed in (2, 0, 1))))
    assert ([each.seed for each in whole.rows], whole.mean_return) == ([0, 1, 2], 1.0)  # (0 + 1 + 2) / 3


def test_rows_that_are_there_count_also_where_all_that_was_missing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import held_env

    from gspo_gym.config.run_config import load_config

    def fail(self: Any, action: str) -> Any:
        raise RuntimeError("always")

    monkeypatch.setattr(held_env.Held, "step", fail)
    config = load_config("c.toml", ["evaluation.seeds=0:3"])
    result = run_evaluation(config, "scripted:random", rows=KeptRows((row(0), row(2))))
    assert (result.mean_return, result.num_failed) == (1.0, 1)  # (0 + 2) / 2; seed 1 failed


LIMITED = """
import resource, signal, sys
from gspo_gym.cli.main import main

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
raise SystemExit(main(sys.argv[1:]))
"""


def test_a_part_that_cannot_grow_ends_an_evaluation_before_its_first_episode(folder: Path) -> None:
    """As on a full disk: a file of the process may have 64 bytes (-B: its bytecode would be cut off, too)."""
    command = [sys.executable, "-B", "-c", LIMITED, *COMMAND, "--seeds", "0:2"]
    environ = os.environ | {"PYTHONPATH": str(SUPPORT)}
    done = programs.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "r.json.part: cannot be written: File too large" in done.stderr
    assert not Path("played.txt").exists()
