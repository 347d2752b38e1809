"""configs/README.md is what the models say, and a resolved file says where each value comes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.config.reference import entries_of, leaf_keys, reference, resolved
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.words import inline

README = Path(__file__).parents[3] / "configs" / "README.md"


def test_the_table_of_all_keys_is_current() -> None:
    assert README.read_text(encoding="utf-8") == reference(), "run: gspo-gym config reference > configs/README.md"


def test_the_table_has_every_key_with_type_default_and_meaning() -> None:
    section, found = "", []
    for line in reference().split("## The nested form")[0].splitlines():
        if match := re.fullmatch(r"## \[+(.*?)\]+", line):
            section = match[1]
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            key, kind, default, meaning = cells
            assert all((kind, default, meaning)), line
            found.append(f"{section}.{key.strip('`')}")
    entries = {f"{name}.{key}" for name, entry in entries_of() for key in entry.model_fields}
    assert [key for key in found if key not in entries] == leaf_keys()
    assert entries <= set(found)


def test_every_key_stands_in_a_configuration_an_example_a_translation_or_a_test_of_its_own() -> None:
    """A key that only the list of all effects names has no user: it is a constant with its reason."""
    root = README.parents[1]
    files = [
        *(root / "configs").rglob("*.toml"),
        *(root / "examples").rglob("*.py"),
        *(root / "gspo_gym" / "config" / "foreign").glob("*.toml"),
        *(path for path in (root / "tests").rglob("*.py") if path.name != "test_effects.py"),
    ]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert [key for key in leaf_keys() if key.rpartition(".")[2] not in words] == []


@pytest.mark.parametrize(
    "row",
    [
        "| `clip_low` | a number, > 0 and < 1 | `0.0003` | ratio floor is 1 - clip_low (paper: 3e-4); dppo: of "
        "probabilities |",
        "| `step_timeout_seconds` | a number, > 0 | `30.0` | to make the environment, and for each reset, step or "
        "close of it |",
        "| `iterations_per_epoch` | an integer, > 0 | required | batches of episodes per epoch |",
    ],
)  # fmt: skip
def test_a_row_says_all_of_a_key(row: str) -> None:
    assert row in reference().splitlines()


def test_a_resolved_file_marks_what_it_was_not_told(make: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = make({"loss.kl_coef": 0.1, "judge": {"options": {"weights": {"a b": 0.5}}}})
    given = {"loss": {"kl_coef": 0.1}, "model": {"label": "quickstart", "base": "tiny:qwen3-64"}}
    text = resolved(config, given)
    lines = text.splitlines()
    for line in (
        "kl_coef = 0.1",
        'placement = "shared"  # follows from other keys',
        "clip_low = 0.0003  # default",
        "# dual_clip is absent",
        "# [topology] is not given",
        'label = "quickstart"',
        'weights = { "a b" = 0.5 }  # follows from other keys',
    ):
        assert line in lines
    path = tmp_path / "resolved.toml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1e-5, "1e-05"),
        ('a"b\n', '"a\\"b\\n"'),
        ((), "[]"),
        ([1, "x"], '[1, "x"]'),
        ({}, "{}"),
        ({"a.b": {"c": [{"d": 1}]}}, '{ "a.b" = { c = [{ d = 1 }] } }'),
    ],
)
def test_a_value_fits_on_one_line(value: Any, text: str) -> None:
    assert inline(value) == text
