"""Every command whose output cannot be written ends with our error and status 2, and without a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_gym.cli.main import main

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.toml"
GUESS = "GuessNumber"
SEARCH = """
[search]
base = {base}
label = "s"
folder = {folder}
num_trials = 2
[parameters.training]
learning_rate = {{ choices = [0.001, 0.002] }}
"""


def commands(folder: Path, below_a_file: Path) -> dict[str, list[str]]:
    """Of every command that writes, one that is told to write where nothing can be."""
    search = folder / "search.toml"
    search.write_text(SEARCH.format(base=json.dumps(str(CONFIG)), folder=json.dumps(str(below_a_file))))
    output = str(below_a_file / "out.json")
    return {
        "train": ["train", str(CONFIG), f"run.folder={json.dumps(str(below_a_file))}"],
        "evaluate": ["evaluate", str(CONFIG), "--model", "scripted:reference", "--seeds", "0:1", "--json", output],
        "search": ["search", str(search)],
        "collect": ["env", "collect", GUESS, "--policy", "scripted:reference", "--out", str(below_a_file / "e.jsonl")],
        "card": ["env", "card", GUESS, "--markdown", output],
        "check": ["env", "check", GUESS, "--json", output],
        "credit": ["credit", GUESS, "--json", output],
        "new": ["env", "new", "WordSort", "--folder", str(below_a_file)],
        "judge audit": ["judge", "audit", str(folder), "--gold", str(CONFIG), "--json", output],
    }


NAMES = ["train", "evaluate", "search", "collect", "card", "check", "credit", "new", "judge audit"]


@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").write_text("")
    assert main(commands(tmp_path, tmp_path / "file" / "below")[name]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert str(tmp_path / "file") in error


def test_a_full_disk_at_the_end_of_an_evaluation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["evaluate", str(CONFIG), "--model", "scripted:reference", "--seeds", "0:1", "--json", "/dev/full"]) == 2
    )
    assert "StorageError: /dev/full: cannot be written: No space left on device" in capsys.readouterr().err
