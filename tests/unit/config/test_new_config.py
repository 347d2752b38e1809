"""`gspo-gym config new`: a file that loads, and whose comments tell the truth."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from gspo_gym.cli.main import main
from gspo_gym.config.reference import new_config
from gspo_gym.config.run_config import RunConfig, load_config

TEXT = new_config("GuessNumber", model="tiny:qwen3-64", label="test")


def test_the_file_loads_and_trains_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my_task.toml"
    assert main(["config", "new", str(path), "--env", "Wordle", "--model", "Qwen/Qwen3-0.6B"]) == 0
    assert "gspo-gym train" in capsys.readouterr().out
    config = load_config(path)
    assert (config.rollout.env_name, config.model.base, config.model.label) == ("Wordle", "Qwen/Qwen3-0.6B", "my_task")
    assert main(["config", "new", str(path)]) == 2  # nothing is written over
    assert main(["config", "check", str(path), "--elsewhere"]) == 0


def test_commands_that_it_prints_can_be_pasted_whatever_the_file_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "it's b.toml"
    assert main(["config", "new", str(path)]) == 0
    commands = re.findall(r"`(gspo-gym .*?)` ", capsys.readouterr().out)
    named = [["gspo-gym", "config", "check", str(path)], ["gspo-gym", "train", str(path)]]
    assert [shlex.split(command) for command in commands] == named
    assert main(["env", "new", "BananaSort", "--folder", str(tmp_path / "of mine")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cd ")]
    folder, rest = shlex.split(line)[1], shlex.split(line)[2:]
    assert (Path(folder).parent.name, rest) == ("of mine", ["&&", "pip", "install", "-e", "."])


@pytest.mark.parametrize("name", ["tests:Nope", "GuesNumber", "no_such_module:Env"])
def test_an_environment_that_is_not_there_is_an_error_and_no_file_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "new", str(tmp_path / "run.toml"), "--env", name]) == 2
    assert name.rpartition(":")[2] in capsys.readouterr().err or "no_such_module" in name
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["rollout"]["env_name"] == "GuessNumber"


def test_every_default_that_a_comment_states_is_the_default() -> None:
    config = RunConfig.from_dict(tomllib.loads(TEXT))
    section, stated = "", 0
    for line in TEXT.splitlines():
        section = match[1] if (match := re.fullmatch(r"(?:# )?\[(\w+)\]", line)) else section
        if (match := re.fullmatch(r"# (\w+) = (.+)", line)) and (held := getattr(config, section)) is not None:
            value = tomllib.loads(f"x = {match[2]}")["x"]
            actual = held.model_dump(mode="json")[match[1]]
            derived = {"unit", "level", "baseline"}  # what algorithm.variety sets
            assert actual == value or match[1] in derived, line
            stated += 1
    assert stated > 40


def test_every_key_of_a_section_is_there_with_its_meaning() -> None:
    for key in ("learning_rate", "stop_at_success_rate", "clip_low", "temperature", "seeds"):
        assert re.search(rf"^(# )?{key} (=|is absent)", TEXT, re.MULTILINE), key
    assert max(map(len, TEXT.splitlines())) <= 250
