"""Rubrics from files, ids, configurations and task apps: the same from each, and strict where people write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric import Criterion, Rubric, strict_problems
from gspo_gym.judge.rubric_files import (
    bundled_rubric_ids,
    find_rubrics,
    load_rubrics,
    merge_rubrics,
    parse_rubrics,
    parse_task_rubrics,
    read_rubrics,
    read_task_app_rubric,
)

ROOT = Path(__file__).parents[3]

RUBRICS = Rubrics(
    event=Rubric((Criterion("progress.step", "Something new.", 0.9, "binary"),), version="v1", goal_text="One turn."),
    outcome=Rubric(
        (
            Criterion("outcome.done", "It is done.", 2.0, "binary", required=True, threshold=1.0),
            Criterion("outcome.depth", "How much, in points.", scale="custom", minimum=-2.0, maximum=5.0),
            Criterion("process.calls", "How many calls were right.", scale="count", maximum=7.0),
        ),
        goal_text="Get it done: 100 %, günstig.",
        aggregation="sum",
        track_weights={"outcome": 0.75, "process": 0.25},
    ),
)
AS_WRITTEN = {name: rubric.to_dict() for name, rubric in RUBRICS.parts.items()}
DUMPS = {".toml": tomli_w.dumps, ".json": json.dumps, ".yaml": yaml.safe_dump, ".yml": yaml.safe_dump}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", DUMPS)
def test_every_format_reads_back_to_the_same_rubrics(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"r{suffix}", DUMPS[suffix](AS_WRITTEN))
    assert load_rubrics(str(path)) == RUBRICS


def test_a_part_may_be_the_bare_list_of_criteria_of_the_wire() -> None:
    wire = {"event": [{"id": "a", "description": "about a", "weight": 0.9, "scale": "binary"}]}
    expected = Rubrics(event=Rubric((Criterion("a", "about a", 0.9, "binary"),)))
    assert merge_rubrics(parse_rubrics(wire, where="wire")) == expected


def test_a_judges_file_is_no_task_apps_rubric_and_the_other_way_round(tmp_path: Path) -> None:
    judges = write(tmp_path / "judge.json", json.dumps(AS_WRITTEN))
    assert RUBRICS.outcome is not None
    apps = write(tmp_path / "app.json", json.dumps(RUBRICS.outcome.to_dict()))
    assert read_task_app_rubric(apps) == RUBRICS.outcome
    with pytest.raises(ConfigError, match=r"judge\.json: this is a judge's file, with the parts event and outcome"):
        read_task_app_rubric(judges)
    with pytest.raises(ConfigError, match=r"app\.json: this is a task app's rubric, .* Put all of it under outcome"):
        read_rubrics(apps)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("outcome:\n  criteria:\n  - {id: a, description: d, wieght: 2}", r"criteria\[0\]\.wieght: .*mean 'weight'"),
        ("outcome:\n  critera: []", r"outcome: critera: there is no such key; did you mean 'criteria'"),
        ("outcomes:\n  criteria: []", r"got 'outcomes'; did you mean 'outcome'"),
        ("{}", "expected the parts event and outcome, or one of them, got nothing"),
        ("outcome: 7", "outcome: expected a table, got 7"),
        ("outcome:\n  criteria: []", "outcome: rubric: expected at least one criterion"),
        ("outcome:\n  criteria:\n  - {description: d}", r"criteria\[0\]\.id: required, but not given"),
        ("outcome:\n  criteria:\n  - {id: a}", "criterion 'a': expected a description"),
        ("outcome:\n  criteria:\n  - {id: 3, description: d}", r"criteria\[0\]\.id: expected a valid string, got 3"),
        ("outcome:\n  criteria:\n  - {id: a, description: d, weight: '2'}", 'expected a valid number, got "2"'),
        ("outcome:\n  criteria:\n  - {id: a, description: d, weight: true}", "expected a valid number, got true"),
        ("outcome:\n  criteria:\n  - {id: a, description: d, weight: .nan}", "expected a finite number, got NaN"),
        ("outcome:\n  criteria:\n  - {id: a, description: d, weight: 0}", "expected a weight > 0"),
        ("outcome:\n  criteria:\n  - {id: a, description: d, scale: likert}", "'binary', 'bounded', 'count' or 'cus"),
        ("outcome:\n  aggregation: mean\n  criteria: []", "aggregation: expected 'sum', 'weighted_sum' or 'inherit'"),
        ("outcome:\n- {id: a, description: d}\n- {id: a, description: e}", "'a' is the id of several criteria"),
        ("outcome:\n- {id: a, description: d, threshold: 0.5}", "set required = true, too"),
        ("outcome:\n- {id: a, id: b, description: d}", "'id' is given twice"),
        ("outcome:\n- !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "r.yaml", text)
    with pytest.raises(ConfigError, match=message):
        load_rubrics(str(path))


def test_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", json.dumps({"event": [{"id": "a", "weight": "x"}, {"wight": 1}]}))
    with pytest.raises(ConfigError) as caught:
        read_rubrics(path)
    assert str(caught.value).splitlines() == [
        f"{path}: event: 3 problems:",
        '  criteria[0].weight: expected a valid number, got "x"',
        "  criteria[1].id: required, but not given",
        "  criteria[1].wight: there is no such key; did you mean 'weight'?",
    ]


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", "[" * 1_000_001)
    with pytest.raises(ConfigError, match="at most 1,000,000 bytes, got 1,000,001"):
        read_rubrics(path)


# --- ids --------------------------------------------------------------------------------------------------------------


def test_an_id_is_found_in_the_first_folder_that_has_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "tone" / "strict@v2.json", json.dumps({"outcome": [{"id": name, "description": "d"}]}))
    rubrics = load_rubrics("tone/strict@v2", folders=[tmp_path / "none", tmp_path / "two", tmp_path / "one"])
    assert rubrics.parts["outcome"].ids == ("two",)
    with pytest.raises(UnknownNameError, match="did you mean 'tone/strict@v2'"):
        load_rubrics("tone/strict@v1", folders=[tmp_path / "two"])


@pytest.mark.parametrize(
    "name", ["../up", "a/../../up", "/etc/passwd", "a//b", ".hidden", "a/.hidden", "", "a b", "a\\b"]
)
def test_an_id_does_not_climb_out_of_its_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path / "up.yaml", "outcome: [{id: a, description: d}]")
    (tmp_path / "folder" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="expected a file that ends in"):
        find_rubrics(name, [tmp_path / "folder"])


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.yaml", "outcome: [{id: a, description: d}]")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.yaml").symlink_to(secret)
    with pytest.raises(ConfigError, match="is a link out of"):
        find_rubrics("x", [tmp_path / "folder"])


def test_a_bundled_rubric_is_found_by_its_version_only() -> None:
    assert find_rubrics("support_desk/bundle@v1").parts[-2:] == ("support_desk", "rubric.yaml")
    with pytest.raises(UnknownNameError, match="did you mean 'support_desk/bundle@v1'"):
        find_rubrics("support_desk/bundle@v2")


# --- bundled ----------------------------------------------------------------------------------------------------------


def test_every_bundled_environment_with_a_folder_has_a_rubric() -> None:
    folders = sorted(path.parent.name for path in (ROOT / "envs").glob("*/env.py"))
    assert bundled_rubric_ids() == [f"{folder}/bundle@v1" for folder in folders]
    assert len(folders) >= 9


@pytest.mark.parametrize("rubric_id", bundled_rubric_ids())
def test_bundled_rubrics_are_strict_binary_and_have_both_parts(rubric_id: str) -> None:
    rubrics = load_rubrics(rubric_id)
    assert list(rubrics.parts) == ["event", "outcome"]
    for rubric in rubrics.parts.values():
        assert strict_problems(rubric) == []
        assert {criterion.scale for criterion in rubric.criteria} == {"binary"}
        assert set(rubric.tracks) <= {"process", "reasoning", "progress", "outcome"}
        assert rubric.total(dict.fromkeys(rubric.ids, 1)) == pytest.approx(1.0)
        assert rubric.total(dict.fromkeys(rubric.ids, 0)) == 0.0


@pytest.mark.parametrize("rubric_id", bundled_rubric_ids())
def test_a_turn_without_progress_earns_nothing_under_a_bundled_rubric(rubric_id: str) -> None:
    rubric = load_rubrics(rubric_id).parts["event"]
    for criterion in rubric.criteria:
        if criterion.track == "progress":
            assert rubric.total(dict.fromkeys(rubric.ids, 1) | {criterion.id: 0}) == 0.0
    assert "progress" in rubric.tracks


# --- other sources ----------------------------------------------------------------------------------------------------


def test_the_task_is_above_the_configuration_and_that_above_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", json.dumps({"outcome": [{"id": "a", "description": "file", "weight": 2}]}))
    overrides = {"outcome": {"goal_text": "overrides", "criteria": [{"id": "a", "weight": 3, "description": "o"}]}}
    task = {"outcome": {"name": "task", "criteria": [{"id": "a", "description": "task"}]}, "events": None}
    rubric = Rubric((Criterion("a", "task", 6.0),), goal_text="overrides")
    assert load_rubrics(str(path), overrides=overrides, task=task) == Rubrics(outcome=rubric)
    assert load_rubrics(None, overrides=overrides).parts["outcome"].criteria == (Criterion("a", "o", 3.0),)


def test_a_task_apps_rubric_may_hold_more_than_is_known_here() -> None:
    sent: dict[str, Any] = {
        "events": {"name": "e", "criteria": [{"id": "a", "description": "d", "examples": [], "scale": None}]},
        "outcome": [{"id": "b", "description": "d"}],
        "comment": "hello",
    }
    rubrics = merge_rubrics(parse_task_rubrics(sent, where="task_info.rubric"))
    assert {name: rubric.ids for name, rubric in rubrics.parts.items()} == {"event": ("a",), "outcome": ("b",)}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"outcome": {"criteria": [{"id": "a", "description": 3}]}}, r"outcome: criteria\[0\]\.description: expected"),
        ({"outcome": {"criteria": ["a"]}}, r"outcome: criteria\[0\]: expected a table, got \"a\""),
        ({"outcome": "a"}, 'task: outcome: expected a table, got "a"'),
        ({"outcome": {"criteria": [{"id": "a"}, {"id": "a"}]}}, "'a' is the id of several"),
    ],
)
def test_what_is_known_here_must_be_right_in_a_task_apps_rubric_too(sent: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_task_rubrics(sent, where="task")


def test_no_file_names_code(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.json",
        json.dumps({"outcome": {"aggregate": "os:getcwd", "criteria": [{"id": "a", "description": "d"}]}}),
    )
    with pytest.raises(ConfigError, match="aggregate: there is no such key"):
        read_rubrics(path)
