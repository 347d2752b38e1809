"""What the README of the judge shows is so: rubric, labels and commands work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_gym.cli.main import main
from gspo_gym.judge.attacks import attacks
from gspo_gym.judge.gold import read_labels
from gspo_gym.judge.rubric_files import load_rubrics

ROOT = Path(__file__).parents[3]
README = (ROOT / "gspo_gym" / "judge" / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_first_rubric_loads(tmp_path: Path) -> None:
    path = tmp_path / "rubric.yaml"
    path.write_text(blocks("yaml")[0])
    rubrics = load_rubrics(str(path))
    assert rubrics.parts["outcome"].total({"outcome.resolved": 1, "process.tone": 0}) == pytest.approx(0.7)


def test_the_labels_are_read(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(blocks("json")[0])
    assert [label.outcome for label in read_labels(path)] == [0.75, {"outcome.resolved": 1, "process.tone": 0}]


@pytest.mark.parametrize("command", sorted(set(re.findall(r"gspo-gym judge (\w+)", README))))
def test_every_command_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["judge", command, "--help"])
    assert stop.value.code == 0
    assert "usage: gspo-gym judge" in capsys.readouterr().out


def test_the_battery_has_as_many_attacks_as_it_says() -> None:
    assert f"| attacks | {len(attacks())} ways" in README
