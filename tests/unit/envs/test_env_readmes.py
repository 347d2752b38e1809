"""The READMEs of the bundled environments show what the environments really say."""

from __future__ import annotations

import doctest
from pathlib import Path

import gspo_gym_envs
import pytest

ENVS = Path(gspo_gym_envs.__file__).parent
READMES = sorted(str(path.relative_to(ENVS)) for path in ENVS.rglob("README.md"))


def test_every_environment_has_a_readme_with_its_licence_and_known_cheats() -> None:
    assert READMES == [
        "README.md",
        "code_repair/README.md",
        "countdown/README.md",
        "frozen_lake/README.md",
        "guess_number/README.md",
        "homestead/README.md",
        "sql_analyst/README.md",
        "support_desk/README.md",
        "tic_tac_toe/README.md",
        "wordle/README.md",
    ]
    for name in READMES[1:]:
        text = (ENVS / name).read_text()
        assert "## Licence" in text
        assert "## Known cheats" in text


@pytest.mark.parametrize("name", READMES)
def test_the_transcript_is_what_is_said(name: str) -> None:
    result = doctest.testfile(str(ENVS / name), module_relative=False, encoding="utf-8")
    assert result.attempted > 0
    assert result.failed == 0
