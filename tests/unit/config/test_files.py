"""TOML, YAML and JSON files: the same configuration from each, every key once, and errors that say where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from gspo_gym.base.files import read_file
from gspo_gym.config.run_config import load_config
from gspo_gym.errors import ConfigError

DUMPS: dict[str, Callable[[Any], str]] = {
    "run.toml": tomli_w.dumps,
    "run.json": json.dumps,
    "run.yaml": yaml.safe_dump,
    "run.yml": yaml.safe_dump,
}


@pytest.mark.parametrize("name", DUMPS)
def test_every_format_gives_the_same_configuration(
    name: str, tmp_path: Path, changed: Callable[..., Any], make: Callable[..., Any]
) -> None:
    changes = {"rollout.env_config": {"deep": {"list": [1, 2.5, "x", True]}}, "training.learning_rate": 1e-5}
    path = tmp_path / name
    path.write_text(DUMPS[name](changed(changes)), encoding="utf-8")
    assert load_config(path) == make(changes)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),  # a mode is called so; version 1.1 of YAML takes it for false
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("1e-5", 1e-5),  # version 1.1 takes it for a text
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("017", 17),
        ("1_000", "1_000"),
        ("12:30", "12:30"),  # version 1.1 takes it for 750
        ("0:100", "0:100"),
        ("2026-01-02", "2026-01-02"),
        (".inf", float("inf")),
        ("~", None),
        ("null", None),
        ("", None),
        ("'7'", "7"),
        ("0x10", "0x10"),
        ("=", "="),
    ],
)
def test_a_yaml_scalar_is_what_version_1_2_says(text: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {text}\n", encoding="utf-8")
    read = read_file(path)["key"]
    assert read == value
    assert type(read) is type(value)


def test_an_empty_yaml_file_is_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# nothing\n", encoding="utf-8")
    assert read_file(path) == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"[run\n", r"a\.toml: cannot be read as TOML: .*line 1"),
        ("a.toml", b"[run]\nseed = 1\nseed = 2\n", r"a\.toml: cannot be read as TOML: Cannot overwrite a value"),
        ("a.toml", b"\xff\xfe", r"a\.toml: cannot be read as TOML: 'utf-8' codec"),
        ("a.toml", b"[run]\nseed = " + b"9" * 5000, r"a\.toml: cannot be read as TOML: Exceeds the limit"),
        ("a.yaml", b"run: [1\n", r"a\.yaml: cannot be read as YAML: .*line 2"),
        ("a.yaml", b"run:\n  seed: 1\n  seed: 2\n", r"a\.yaml: cannot be read as YAML: line 3: 'seed' is given twice"),
        ("a.yaml", b"run:\n  1: 2\n", r"a\.yaml: cannot be read as YAML: line 2: expected a text as key, got 1"),
        (
            "a.yaml",
            b"run: !!python/object/apply:os.getcwd []\n",
            r"a\.yaml: cannot be read as YAML: could not determine",
        ),
        ("a.yaml", b"- run\n", r'a\.yaml: expected a table of sections, got \["run"\]'),
        ("a.yaml", b"a: 1\n---\nb: 2\n", r"a\.yaml: cannot be read as YAML: expected a single document"),
        ("a.yaml", b"seed: " + b"9" * 5000, r"a\.yaml: cannot be read as YAML: Exceeds the limit"),
        ("a.yaml", b"\xff\xfe", r"a\.yaml: cannot be read as YAML: 'utf-8' codec"),
        ("a.yaml", b"a: \x00", r"a\.yaml: cannot be read as YAML: unacceptable character"),
        ("a.json", b"{", r"a\.json: cannot be read as JSON: .*line 1"),
        ("a.json", b'{"a": 1, "a": 2}', r"a\.json: cannot be read as JSON: 'a' is given twice"),
        ("a.json", b"[" * 100_000, r"a\.json: cannot be read as JSON"),
        ("a.json", b"5", r"a\.json: expected a table of sections, got 5"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_says_where(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_missing_file_offers_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rum\.yaml: there is no such file; did you mean '.*run\.yaml'"):
        load_config(tmp_path / "rum.yaml")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "no" / "folder.toml")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_config(tmp_path)


def test_anchors_and_merges_of_yaml_are_no_way_around_the_checks(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &b {seed: 1}\nrun: *b\n", encoding="utf-8")
    assert read_file(path) == {"base": {"seed": 1}, "run": {"seed": 1}}
    path.write_text("base: &b {seed: 1}\nrun:\n  <<: *b\n", encoding="utf-8")
    assert read_file(path)["run"] == {"<<": {"seed": 1}}  # an ordinary key, which is then unknown


def test_a_bare_name_is_a_file_here_or_a_configuration_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart") == load_config(Path(__file__).parents[3] / "configs" / "quickstart.toml")
    assert load_config("quickstart", ["run.seed=7"]).run.seed == 7
    with pytest.raises(ConfigError, match=r"^quickstrat: there is no such file, and the package .* 'quickstart'"):
        load_config("quickstrat")
    with pytest.raises(ConfigError, match=r"^quickstart\.toml: there is no such file"):
        load_config("quickstart.toml")  # with a suffix it is a path
    Path("quickstart").write_text("[run]\nseed = 'x'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.seed"):
        load_config("quickstart")
