"""`gspo-gym env new` writes environments that keep every promise as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from gspo_gym.cli.authoring import KINDS, NewEnvironment, card_as_markdown, make_card, new_environment
from gspo_gym.cli.main import main
from gspo_gym.config.run_config import load_config
from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.registry import make
from gspo_gym.errors import ConfigError, UnknownNameError


def names(kind: str) -> tuple[str, str]:
    return f"WrittenBy{kind.capitalize()}Kind", f"written_by_{kind}_kind"


@pytest.fixture(params=KINDS)
def project(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, NewEnvironment]]:
    """The kind, and a package of that kind that can be imported."""
    class_name, package = names(request.param)
    new = new_environment(class_name, kind=request.param, folder=tmp_path)
    monkeypatch.syspath_prepend(new.folder)
    yield request.param, new
    gymnasium.registry.pop(new.env_id, None)
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[module]


def test_it_passes_the_whole_check_as_it_stands(project: tuple[str, NewEnvironment]) -> None:
    _, new = project
    name = f"{new.env_id.partition('/')[0]}:{new.env_id}"
    make(name).close()  # imports the package, which registers the environment
    report = check_env(partial(make, name))
    assert report.passed, str(report)


def test_its_readme_shows_what_is_said(project: tuple[str, NewEnvironment]) -> None:
    _, new = project
    name = f"{new.env_id.partition('/')[0]}:{new.env_id}"
    shown = re.findall(r"```text\n.*?\n```", (new.folder / "README.md").read_text(), re.DOTALL)[-1]
    card = make_card(name, num_seeds=1)
    assert shown in card_as_markdown(card).partition("## Transcript")[2]
    for name in {*card.records[0].mean_terms, *card.records[0].event_rates}:
        assert f"`{name}`" in (new.folder / "README.md").read_text()


def test_its_config_plays_it_for_as_many_turns_as_it_lasts(project: tuple[str, NewEnvironment]) -> None:
    _, new = project
    config = load_config(str(new.folder / "train.toml"), [])
    assert config.rollout.env_name == new.env_id
    assert config.run.log_tokens_every_n_iters == 10
    name = f"{new.env_id.partition('/')[0]}:{new.env_id}"
    longest = max(max(record.turns) for record in make_card(name, config.rollout.env_config, num_seeds=20).records)
    assert longest <= config.rollout.max_turns


def test_its_code_pleases_a_linter(project: tuple[str, NewEnvironment]) -> None:
    _, new = project
    rules = ["--select", "E,F,W,I,B,UP,SIM,RUF,RET"]
    for command in (["format", "--check"], ["check", *rules]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", "--line-length", "120", "."],
            cwd=new.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_its_package_announces_it_under_its_name(project: tuple[str, NewEnvironment]) -> None:
    kind, new = project
    class_name, package = names(kind)
    settings = tomllib.loads((new.folder / "pyproject.toml").read_text())
    assert new.env_id == f"{package}/{class_name}-v0"
    assert settings["project"]["entry-points"]["gymnasium.envs"] == {package: f"{package}:register_envs"}
    assert settings["tool"]["setuptools"]["packages"] == [package]
    assert new.files == tuple(dict.fromkeys(new.files))
    assert all((new.folder / path).is_file() for path in new.files)


@pytest.mark.parametrize(
    ("name", "project", "package", "class_name"),
    [
        ("WordSort", "word-sort-env", "word_sort", "WordSort"),
        ("word_sort", "word-sort-env", "word_sort", "WordSort"),
        ("chess960", "chess960-env", "chess960", "Chess960"),
    ],
)
def test_a_name_may_be_written_either_way(
    name: str, project: str, package: str, class_name: str, tmp_path: Path
) -> None:
    assert new_environment(name, folder=tmp_path / "deeper").env_id == f"{package}/{class_name}-v0"
    assert (tmp_path / "deeper" / project / package / "env.py").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2048", "expected a name of letters, digits and _ that begins with a letter, got '2048'"),
        ("word-sort", "expected a name of letters"),
        ("wörter", "expected a name of letters"),
        ("../up", "expected a name of letters"),
        ("", "expected a name of letters"),
        ("class", "means something else"),
        ("none", "means something else"),
        ("tool_env", "means something else"),
        ("guess_number", "there is an environment 'gspo_gym/GuessNumber-v0' already"),
        ("FrozenLake", "there is an environment 'FrozenLake"),
        ("json", "there is a module 'json' already"),
        ("numpy", "there is a module 'numpy' already"),
    ],
)
def test_a_name_that_would_not_work_is_refused_and_nothing_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        new_environment(name, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "word-sort-env").mkdir()
    (tmp_path / "word-sort-env" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="word-sort-env exists already; choose another name or another --folder"):
        new_environment("WordSort", folder=tmp_path)
    assert [path.name for path in (tmp_path / "word-sort-env").iterdir()] == ["mine.txt"]


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="there is no kind 'tools' of environment; did you mean 'tool'"):
        new_environment("WordSort", kind="tools", folder=tmp_path)


def test_the_command_says_what_it_wrote_and_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "new", "WordSort", "--kind", "tool", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"word_sort/WordSort-v0 is in {tmp_path / 'word-sort-env'}" in out
    assert "gspo-gym env check word_sort/WordSort-v0" in out
    assert main(["env", "new", "WordSort", "--folder", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
