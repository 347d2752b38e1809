"""One table over all commands that take a run or a model: what a name means is the same in each of them.

A run is its folder, its name in runs/ or the start of its id; a bare word is never looked for on the hub, where a
stranger may have a model of that name.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_gym.cli.command_line import base_of
from gspo_gym.cli.main import command_parser, main
from gspo_gym.errors import RecordError, UnknownNameError
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import check_base, load_policy, load_tokenizer
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_run_id
from gspo_gym.run.report.progress import next_steps
from tests.unit.run.test_models import Learner

CONFIG = """
[model]
base = "tiny:qwen3-64"
label = "other"
[rollout]
env_name = "GuessNumber"
env_config = { style = "terse", low = 1, high = 4 }
max_turns = 1
max_output_tokens = 2
max_model_len = 256
episodes_per_batch = 4
[training]
iterations_per_epoch = 1
learning_rate = 0.001
group_size = 2
batch_size = 2
[evaluation]
seeds = "0:2"
"""
# Every command that takes a run, and every one that takes a model; @ is the name.
OF_RUNS = [
    "doctor @", "verify @", "report @", "report quick --beside @", "episodes @", "run status @", "run checkpoint @",
    "run stop @", "runs show @", "runs compare quick @", "runs rm --yes @", "runs path @", "judge score @",
    "judge audit @ --gold labels.jsonl", "view --no-open @",
]  # fmt: skip
OF_MODELS = [
    "evaluate config.toml --model @", "evaluate config.toml --model tiny:qwen3-64 --against @", "models show @",
    "models export @ --out out", "models merge @ --out out", "models chat @", "models serve @ --port 0",
    "env check GuessNumber --model @",
    "env collect GuessNumber --out out.jsonl --policy @", "env play GuessNumber --model @",
    "credit GuessNumber --policy @",
]  # fmt: skip
# Metavars and names of arguments that hold the name of a run or of a model here; others write a name into a file.
NAMED = ("RUN", "EPISODES", "MODEL", "BASE", "WHO", "RUN_OR_FOLDER")
ELSEWHERE = ("config new", "config from-trl", "config from-roll", "config from-agilerl", "config from-stateset",
             "judge serve")  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run "quick" in runs/, which has one checkpoint."""
    home = tmp_path_factory.mktemp("home")
    (home / "config.toml").write_text(CONFIG)
    (home / "labels.jsonl").write_text("")
    folder = home / "runs" / "quick"
    RunRecorder.create(folder, CONFIG).close()
    store = CheckpointStore(folder / "checkpoints", run_id=read_run_id(folder))
    store.write(store.copy(3, policy=load_policy("tiny:qwen3-64", seed=3), learner=Learner(), trainer_state={}))
    return home


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return Path("runs/quick")


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, argparse.Action]]:
    """Every argument of every command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, (*path, name))
        else:
            yield " ".join(path), action


def test_the_tables_hold_every_command_that_takes_a_run_or_a_model() -> None:
    takes = {
        command
        for command, action in commands(command_parser())
        if (action.metavar in NAMED or action.dest == "model") and command not in ELSEWHERE
    }
    tabled = [*OF_RUNS, *OF_MODELS]
    assert {command for command in takes if not any(line.startswith(f"{command} ") for line in tabled)} == set()


@pytest.mark.parametrize("line", [*OF_RUNS, *OF_MODELS])
def test_a_misspelt_run_is_refused_with_the_nearest_one(
    line: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.replace("@", "quikc").split()) == 2
    message = capsys.readouterr().err
    assert "quikc: there is no such run" in message
    assert "did you mean 'quick'" in message


@pytest.mark.parametrize("line", OF_MODELS)
def test_a_bare_word_is_never_sent_to_the_hub(line: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.replace("@", "gpt2").split()) == 2
    assert "or OWNER/NAME of the hub" in capsys.readouterr().err


@pytest.mark.parametrize("load", [check_base, load_policy, load_tokenizer])
def test_nothing_loads_a_bare_word_from_the_hub(load: object, run: Path) -> None:
    assert callable(load)
    with pytest.raises(UnknownNameError, match="ids, which are OWNER/NAME"):
        load("gpt2")
    check_base("openai-community/gpt2")  # may be one: the hub is asked when it is loaded


@pytest.mark.parametrize("by", ["name", "path", "id"])
def test_the_doctor_finds_a_run_by_each_of_its_names(by: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = {"name": "quick", "path": "runs/quick", "id": (read_run_id(run) or "")[:6]}[by]
    assert main(["doctor", name]) == 0
    assert capsys.readouterr().out.startswith("runs/quick: no step has been recorded yet")


def test_an_evaluation_of_a_name_is_that_of_the_run_of_that_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert base_of("quick") == "runs/quick/checkpoints/step_000003"
    assert main(["evaluate", "config.toml", "--model", "quick", "--json", "-"]) == 0
    assert list(json.loads(capsys.readouterr().out)["evaluations"]) == ["quick"]


@pytest.mark.parametrize("damage", ["", "model = 3", "[model]\n[[", "[run]\nseed = 1"])
@pytest.mark.parametrize("line", ["doctor", "report", "verify", "episodes", "models show", "runs show", "runs list"])
def test_a_damaged_configuration_of_a_run_is_a_sentence(
    line: str, damage: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(home / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    Path("runs/quick/config.toml").write_text(damage)
    assert main([*line.split(), *(["quick"] if line != "runs list" else [])]) in (0, 1, 2)  # an exception is none


@pytest.mark.parametrize("damage", ["", "training = 3", "[["])
def test_the_report_at_the_end_of_a_run_says_what_is_wrong_with_its_configuration(damage: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(damage)
    with pytest.raises(RecordError, match=r"config\.toml: (cannot be read|is damaged)"):
        next_steps(tmp_path)
