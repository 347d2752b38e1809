"""`gspo-gym config check | show | reference` from the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gspo_gym.cli.main import main
from gspo_gym.config.reference import reference
from gspo_gym.config.run_config import load_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path: Path, changed: Callable[..., Any]) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(changed({})), encoding="utf-8")
    return path


def test_check_says_valid_and_what_the_run_will_be(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"VALID: {file}",
        "10 iterations of 64 episodes (groups of 8), 4 optimizer steps each, 40 in all; written to runs/quickstart",
    ]


def test_check_says_what_no_clip_can_change(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(file), "training.batch_size=64"]) == 0
    assert "note: with one optimizer step per iteration the ratio is 1 everywhere, and no clip acts" in (
        capsys.readouterr().out
    )


def test_check_lists_what_this_version_cannot_run_and_fails(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["compute.gpu_count=2", "compute.nodes=3", "--elsewhere"]
    assert main(["config", "check", str(file), *overrides]) == 1
    first, _plan, *lines = capsys.readouterr().out.splitlines()
    assert first == f"VALID, BUT IT CANNOT RUN: {file}"
    assert lines == [
        "cannot run: compute.gpu_count = 2: training takes 0 GPUs or 1; split them by [topology], or let vLLM in this "
        "process take them all: add [vllm]",
        'cannot run: compute.nodes = 3: training takes one machine; with topology.type = "cluster" and several '
        "gpus_for_training it takes more",
    ]


def test_check_lists_everything_that_is_wrong_and_fails(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(file), "run.seed=-1", "training.num_generations=4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "ConfigError: 2 problems in the configuration:",
        "  command line: run.seed: expected an integer >= 0, got -1",
        "  command line: training.num_generations: num_generations is what TRL calls it: write training.group_size = 4",
    ]


def test_show_prints_a_file_that_reads_back(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "show", str(file), "run.seed=7"]) == 0
    text = capsys.readouterr().out
    assert "seed = 7\n" in text
    assert "episode_timeout_seconds = 600.0  # default\n" in text
    shown = tmp_path / "shown.toml"
    shown.write_text(text, encoding="utf-8")
    assert load_config(shown) == load_config(file, ["run.seed=7"])


def test_reference_prints_the_table_of_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    assert capsys.readouterr().out == reference()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_committed_config_is_checked_and_shown(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config", "check", "--elsewhere", str(path)]) == 0
    assert capsys.readouterr().out.startswith("VALID")
    assert main(["config", "show", str(path)]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config(shown) == load_config(path)


def test_a_check_for_elsewhere_loads_no_torch(file: Path) -> None:
    code = (
        "import sys; from gspo_gym.cli.main import main; "
        f"status = main(['config', 'check', '--elsewhere', {str(file)!r}]); "
        "assert not {'torch', 'transformers', 'gymnasium'} & set(sys.modules); sys.exit(status)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr
