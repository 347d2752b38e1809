"""`evaluate --save FOLDER` keeps an evaluation as a run, which the commands that look at runs open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gspo_gym.config.build.preflight
import gspo_gym.config.build.run
import gspo_gym.diagnosis.tokens  # noqa: F401  # these three load torch, before a test is timed
from gspo_gym.cli.main import main
from gspo_gym.cli.notebook import open_run
from gspo_gym.run.report.page_data import RecordedStep

CONFIG = """
[model]
base = "tiny:qwen3-64"
label = "words"
[rollout]
env_name = "GuessNumber"
env_config = { low = 1, high = 4, style = "terse" }
max_turns = 4
max_output_tokens = 4
max_model_len = 256
episodes_per_batch = 8
[training]
iterations_per_epoch = 1
group_size = 4
batch_size = 4
learning_rate = 1e-3
[evaluation]
seeds = "0:6"
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("c.toml").write_text(CONFIG)
    return tmp_path


def evaluate(*words: str) -> int:
    return main(["evaluate", "c.toml", *words])


def test_a_saved_evaluation_is_a_run_that_episodes_report_and_runs_open(capsys: Any) -> None:
    """The untrained model answers no number, so that all six episodes fail: each is an answer a turn."""
    assert evaluate("--save", "kept/here", "--json", "r.json") == 0
    told = capsys.readouterr().out
    assert "failed: gspo_gym/GuessNumber-v0#" in told
    assert told.splitlines()[-1] == "the episodes are in kept/here: gspo-gym episodes kept/here --failed"
    there = ["config.toml", "episodes", "events.jsonl", "process.json", "summary.json", "tokenizer.json"]
    assert sorted(path.name for path in Path("kept/here").iterdir() if path.name != ".lock") == there
    rows = json.loads(Path("r.json").read_text())["evaluations"]["tiny:qwen3-64"]["rows"]
    run = open_run("kept/here")
    assert [(each.task.seed, each.reward) for each in run.episodes()] == [
        (row["seed"], row["episode_return"]) for row in rows
    ]
    assert (run.info.status, run.info.step, run.info.value) == ("completed", 0, 0.0)

    assert main(["episodes", "kept/here", "--failed", "--limit", "1"]) == 0
    assert "<|im_start|>" in capsys.readouterr().out  # the template's tokens, for which it has the tokenizer
    assert main(["report", "kept/here"]) == 0
    assert "6 episodes checked: their numbers agree" in capsys.readouterr().out
    assert main(["runs", "list", "kept"]) == 0
    assert {"here", "completed", "success_rate"} <= set(capsys.readouterr().out.split())


def test_two_players_are_two_runs(capsys: Any) -> None:
    assert evaluate("--model", "scripted:reference", "--against", "scripted:random", "--save", "both") == 0
    assert "gspo-gym episodes both/against --failed" in capsys.readouterr().out
    first, second = (open_run(f"both/{name}") for name in ("model", "against"))
    assert {episode.success for episode in first.episodes()} == {True}
    assert first.info.value == 1.0 > (second.info.value or 0.0)
    assert RecordedStep(second.folder, "eval_000000").group(0)["vocabulary"]


def test_a_folder_that_holds_something_is_refused_before_anything_is_played(capsys: Any) -> None:
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("keep")
    assert evaluate("--model", "scripted:random", "--save", "once") == 0
    capsys.readouterr()
    for folder, why in (("once", "holds a run or an evaluation already"), ("notes", "is not empty")):
        for more in ([], ["--resume"]):
            assert evaluate("--model", "scripted:random", "--save", folder, *more) == 2
            assert f"{folder}: {why}" in capsys.readouterr().err
    assert [path.name for path in Path("notes").iterdir()] == ["mine.txt"]


def test_an_evaluation_that_cannot_begin_leaves_no_folder(capsys: Any) -> None:
    assert evaluate("--model", "scripted:nobody", "--save", "none") == 2
    assert "nobody" in capsys.readouterr().err
    assert not Path("none").exists()


def test_an_interrupted_one_goes_on_with_the_episodes_that_it_has(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes with the third episode: `PartFile.append` is where each is kept."""
    from gspo_gym.base import files

    append, seen = files.PartFile.append, list[int]()

    def interrupted(self: Any, item: Any) -> None:
        append(self, item)
        seen.append(item["seed"])
        if len(seen) == 3:
            raise KeyboardInterrupt

    command = ["--model", "scripted:random", "--save", "part", "rollout.max_concurrent_rollouts=1"]
    monkeypatch.setattr(files.PartFile, "append", interrupted)
    assert evaluate(*command) == 130
    assert "3 of 6 episodes are in part/evaluation.part; go on with --resume" in capsys.readouterr().err
    assert evaluate(*command) == 2
    assert "add --resume, or remove it" in capsys.readouterr().err
    assert evaluate(*command, "--resume") == 0
    assert sorted(seen) == list(range(6))  # none was played twice
    assert [each.task.seed for each in open_run("part").episodes()] == list(range(6))
    assert not Path("part/evaluation.part").exists()
