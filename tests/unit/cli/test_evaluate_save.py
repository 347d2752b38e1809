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
    there = [
        "config.toml",
        "episodes",
        "evaluation.json",
        "events.jsonl",
        "process.json",
        "summary.json",
        "tokenizer.json",
    ]
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
        assert evaluate("--model", "scripted:random", "--save", folder) == 2
        assert f"{folder}: {why}" in capsys.readouterr().err
    assert evaluate("--model", "scripted:random", "--save", "notes", "--resume") == 2
    assert "notes: is not empty" in capsys.readouterr().err
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


def interrupt_after(monkeypatch: pytest.MonkeyPatch, number: int) -> list[tuple[int, int]]:
    """Interrupt when the episode of that number is kept; return the list of seeds and samples that are."""
    from gspo_gym.base import files

    append, seen = files.PartFile.append, list[tuple[int, int]]()

    def interrupted(self: Any, item: Any) -> None:
        append(self, item)
        seen.append((item["seed"], item["sample"]))
        if len(seen) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(files.PartFile, "append", interrupted)
    return seen


def test_a_finished_evaluation_is_shown_again_and_not_played_again(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--model", "scripted:random", "--against", "scripted:reference", "--save", "once"]
    assert evaluate(*command, "--json", "first.json") == 0
    tables = capsys.readouterr().out.partition("p-value")[0]
    seen = interrupt_after(monkeypatch, 1)
    assert evaluate(*command, "--json", "second.json", "--resume") == 0
    done = capsys.readouterr()
    assert done.err.startswith("once/evaluation.json: all episodes are there already\n")
    assert done.out.partition("p-value")[0] == tables
    assert seen == []
    assert json.loads(Path("first.json").read_text()) == json.loads(Path("second.json").read_text())
    assert evaluate(*command, "--seeds", "0:3", "--resume") == 2
    assert "once/evaluation.json is of another evaluation: config.evaluation.seeds: expected" in (
        capsys.readouterr().err
    )
    Path("once/evaluation.json").write_text("{}")
    assert evaluate(*command, "--resume") == 2
    assert "once/evaluation.json: KeyError" in capsys.readouterr().err


SUITE = """
[evaluations.three]
config = "c.toml"
[evaluations.eight]
config = "c.toml"
rollout = { env_config = { high = 8 }, max_turns = 2, max_concurrent_rollouts = 1 }
evaluation = { seeds = "0:2", samples_per_task = 4 }
"""


def test_a_suite_goes_on_where_it_was_interrupted_and_is_one_table(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six episodes of each of two players in the first evaluation, eight in the second; the fifteenth is of that."""
    Path("suite.toml").write_text(SUITE)
    suite = ["evaluate", "suite.toml", "--model", "scripted:random", "--against", "scripted:reference"]
    assert main(suite) == 2
    assert "suite.toml names several evaluations: expected --save FOLDER" in capsys.readouterr().err
    seen = interrupt_after(monkeypatch, 15)
    command = [*suite, "--save", "board", "--json", "board.json"]
    assert main(command) == 130
    assert "3 of 16 episodes are in board/eight/evaluation.part; go on with --resume" in capsys.readouterr().err
    assert main(command) == 2
    assert "board: is not empty; go on with what it holds by --resume" in capsys.readouterr().err

    assert main([*command, "--resume"]) == 0
    assert len(seen) == 12 + 16
    assert sorted(seen[12:]) == sorted(2 * [(seed, sample) for seed in range(2) for sample in range(4)])
    done = capsys.readouterr()
    assert "board/three/evaluation.json: all episodes are there already" in done.err
    for name in ("three: scripted:random", "eight: scripted:reference", "against scripted:reference", "pass^k"):
        assert name in done.out
    board = json.loads(Path("board.json").read_text())
    reference = {name: board[name]["evaluations"]["scripted:reference"] for name in board}
    assert [len(reference[name]["rows"]) for name in ("three", "eight")] == [6, 8]
    assert [rate["k"] for rate in reference["eight"]["pass_rates"]] == [2, 4]
    assert board["three"]["comparison"]["num_pairs"] == 6
    assert board["eight"]["comparison"]["num_pairs"] == 2
    assert [each.task.seed for each in open_run("board/eight/model").episodes()] == [0] * 4 + [1] * 4

    assert main([*command, "--resume"]) == 0
    assert len(seen) == 12 + 16
    assert capsys.readouterr().out == done.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evaluations = 3", "expected tables [evaluations.NAME] and nothing else, got ['evaluations']"),
        (f'{SUITE}\n[model]\nlabel = "x"', "and nothing else, got ['evaluations', 'model']"),
        ('[evaluations."a b"]\nconfig = "c.toml"', "evaluations.a b: expected a name of at most 64 letters"),
        (
            "[evaluations.a]\nseeds = 3",
            'evaluations.a: expected config = "FILE", the configuration',
        ),
        (SUITE.replace("high = 8", "hihg = 8"), "hihg"),
        (SUITE.replace("max_turns", "max_turn"), "rollout.max_turn"),
    ],
)
def test_a_suite_that_makes_no_sense_is_refused_before_anything_is_played(text: str, message: str, capsys: Any) -> None:
    Path("suite.toml").write_text(text)
    assert main(["evaluate", "suite.toml", "--model", "scripted:random", "--save", "board"]) == 2
    assert message in capsys.readouterr().err


def test_a_suite_finds_configurations_beside_it_and_in_the_package(tmp_path: Path) -> None:
    from gspo_gym.cli.suites import read_suite

    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "own.toml").write_text(CONFIG)
    text = '[evaluations.a]\nconfig = "own.toml"\n[evaluations.b]\nconfig = "quickstart"\nrollout.max_turns = 2\n'
    (tmp_path / "deep" / "suite.toml").write_text(text)
    suite = read_suite(str(tmp_path / "deep" / "suite.toml"))
    assert suite is not None
    configs = {name: entry.load(["evaluation.seeds=0:3"]) for name, entry in suite.items()}
    assert {name: config.model.label for name, config in configs.items()} == {"a": "words", "b": "quickstart"}
    assert configs["b"].rollout.max_turns == 2
    assert {config.evaluation.seeds for config in configs.values()} == {"0:3"}
    assert read_suite("c.toml") is None
