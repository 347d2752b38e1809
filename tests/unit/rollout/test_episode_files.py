"""Files of episodes: every bit comes back, what is damaged is named, and no half file is left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_gym.errors import ConfigError, MissingExtraError, RecordError
from gspo_gym.rollout.episode_files import (
    episode_paths,
    load_episodes,
    read_episode,
    read_episodes,
    require_writable,
    save_episodes,
    trajectory_from_json,
    trajectory_to_json,
    write_episodes,
)
from gspo_gym.types import FinishReason, ForkPoint, Outcome, Segment, Task, Timing, Trajectory, Turn


def assert_equal(left: Any, right: Any) -> None:
    """Equal field by field, down to types and bits: trajectories have no == because of their arrays."""
    assert type(left) is type(right)
    if dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_equal(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()
    else:
        assert left == right


def test_an_episode_comes_back_from_its_file_bit_for_bit(tmp_path: Path, rich_trajectory: Trajectory) -> None:
    failed = dataclasses.replace(
        rich_trajectory,
        trajectory_id="u",
        segments=(),
        turns=(),
        outcome=Outcome.ENV_ERROR,
        error="broke",
        success=None,
    )
    point = ForkPoint(rich_trajectory.trajectory_id, 2)
    fork = dataclasses.replace(rich_trajectory, trajectory_id="f", forked_from=point)
    write_episodes(tmp_path / "step_000001.jsonl", [rich_trajectory, failed, fork])
    lines = (tmp_path / "step_000001.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 4
    assert lines[3] == ""
    back = read_episodes(tmp_path / "step_000001.jsonl")
    assert len(back) == 3
    for episode, expected in zip(back, (rich_trajectory, failed, fork), strict=True):
        assert_equal(episode, expected)


@given(st.lists(st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_every_float32_logprob_survives_its_decimal_text(values: list[float]) -> None:
    mask = [False] + [True] * len(values)
    segment = Segment(
        token_ids=np.arange(len(mask)),
        action_mask=np.array(mask),
        rollout_logprobs=np.array([0.0, *values], dtype=np.float32),
        turn_index=np.where(mask, 0, -1),
        weight_version=np.where(mask, 0, -1),
    )
    turn = Turn(0, 0, (0, 1), (1, len(mask)), FinishReason.STOP)
    written = Trajectory("t", 0, Task("e", 0), 0, (segment,), (turn,), (), Outcome.TERMINATED)
    read = trajectory_from_json(json.loads(json.dumps(trajectory_to_json(written), allow_nan=False)))
    bits = [struct.pack("<f", value) for value in values]  # an independent route from a number to its 32 bits
    assert [read.segments[0].rollout_logprobs[k + 1].tobytes() for k in range(len(values))] == bits


def test_the_json_of_an_episode_can_be_read_without_this_library(rich_trajectory: Trajectory) -> None:
    values = json.loads(json.dumps(trajectory_to_json(rich_trajectory)))
    assert values["schema"] == 1
    assert values["task"] == {"env_id": "gspo_gym/SqlAnalyst-v0", "seed": 2147483653, "options": {"level": 2}}
    assert values["reward"] == 0.1 + 1 / 3
    assert values["outcome"] == "truncated"
    assert values["segments"][0]["token_ids"] == [5, 6, 7, 2147483647, 9, 10]
    assert values["segments"][0]["action_mask"] == [0, 0, 1, 1, 0, 1]
    assert values["segments"][0]["rollout_logprobs"] == [0, 0, -0.1, -0.33333334, 0, -1e-7]
    assert values["messages"][3] == {"role": "tool", "content": "3", "tool_call_id": "call_0", "name": "query"}
    assert values["turns"][1]["parse"] == "bad_tool_call"
    assert values["turns"][1]["reward"] is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], 2, "expected schema 1, got 2"),
        (["outcome"], "lost", "'lost' is not a valid Outcome"),
        (["turns", 0, "parse"], "odd", "'odd' is not a valid ParseStatus"),
        (["turns", 0, "extra"], 1, "unexpected keyword argument 'extra'"),
        (["turns", 0, "segment"], 7, "turn 0 names segment 7"),
        (["segments", 0, "token_ids"], [1], "expected equal lengths"),
        (["messages", 0, "role"], "robot", "Message.role"),
    ],
)
def test_a_damaged_episode_is_an_error_that_names_file_and_line(
    tmp_path: Path, rich_trajectory: Trajectory, path: list[str | int], value: Any, message: str
) -> None:
    good = trajectory_to_json(rich_trajectory)
    bad = json.loads(json.dumps(good))
    table = bad
    for part in path[:-1]:
        table = table[part]
    table[path[-1]] = value
    file = tmp_path / "eval_000000.jsonl"
    file.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n", encoding="utf-8")
    with pytest.raises(RecordError, match=rf"eval_000000\.jsonl:2: .*{message}"):
        read_episodes(file)


def test_an_episode_without_a_field_names_the_field(rich_trajectory: Trajectory) -> None:
    values = trajectory_to_json(rich_trajectory)
    del values["sampling_seed"]
    with pytest.raises(RecordError, match=r"episode step_000001/group_0000/0: KeyError: 'sampling_seed'"):
        trajectory_from_json(values)


def test_an_episode_of_an_earlier_version_reports_events(rich_trajectory: Trajectory) -> None:
    values = trajectory_to_json(rich_trajectory)
    del values["reports_events"]
    assert trajectory_from_json(values).reports_events


def test_an_episode_is_not_mistaken_for_one_whose_name_begins_alike(
    tmp_path: Path, rich_trajectory: Trajectory
) -> None:
    episodes = [dataclasses.replace(rich_trajectory, trajectory_id=name) for name in ("g/10", "g/1")]
    write_episodes(tmp_path / "e.jsonl", episodes)
    assert read_episode(tmp_path / "e.jsonl", "g/1").trajectory_id == "g/1"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_and_the_old_file_stays(
    tmp_path: Path, rich_trajectory: Trajectory, value: float, suffix: str
) -> None:
    """Of a timing here; a reward of this kind is refused before it is in a turn."""
    file = tmp_path / f"step_000001{suffix}"
    save_episodes(file, [rich_trajectory], policy_name="policy")
    before = file.read_bytes()
    broken = dataclasses.replace(rich_trajectory, timing=Timing(total_seconds=value))
    with pytest.raises(RecordError, match=r"episode step_000001/group_0000/0 cannot be written as JSON"):
        save_episodes(file, [rich_trajectory, broken], policy_name="policy")
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def many(episode: Trajectory) -> list[Trajectory]:
    """Enough episodes for several members of a compressed file: each has at least 1,000 bytes of its own."""
    return [dataclasses.replace(episode, trajectory_id=f"step_1/{k}", error=str(k) * 1000) for k in range(400)]


def test_a_compressed_file_is_for_any_tool_and_one_episode_of_it_is_read_from_a_part(
    tmp_path: Path, rich_trajectory: Trajectory
) -> None:
    episodes = many(rich_trajectory)
    plain, packed = tmp_path / "e.jsonl", tmp_path / "e.jsonl.gz"
    for path in (plain, packed):
        write_episodes(path, episodes)
    shown = subprocess.run(["gzip", "-dc", str(packed)], check=True, capture_output=True)
    assert shown.stdout == plain.read_bytes()
    for path in (plain, packed):
        assert_equal(read_episode(path, "step_1/399"), episodes[399])
        with pytest.raises(RecordError, match=r"has no episode 'step_1/400'"):
            read_episode(path, "step_1/400")
    # The first member spoiled, the last episode is still read: what lies before it is skipped.
    spoiled = bytearray(packed.read_bytes())
    start = 12 + int.from_bytes(spoiled[10:12], "little")  # RFC 1952: 10 bytes, 2 of the length of extra, extra
    spoiled[start : start + 50] = bytes(50)
    packed.write_bytes(spoiled)
    assert_equal(read_episode(packed, "step_1/399"), episodes[399])
    for use in (lambda: read_episode(packed, "step_1/0"), lambda: read_episodes(packed)):
        with pytest.raises(RecordError, match=r"e\.jsonl\.gz: is damaged"):
            use()


def test_a_compressed_file_with_one_bit_flipped_gives_no_wrong_episode(
    tmp_path: Path, rich_trajectory: Trajectory
) -> None:
    path = tmp_path / "e.jsonl.gz"
    write_episodes(path, many(rich_trajectory))
    whole = path.read_bytes()
    expected = read_episode(path, "step_1/7")
    for offset in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with contextlib.suppress(RecordError):
            assert_equal(read_episode(path, "step_1/7"), expected)
    path.write_bytes(whole[:-20])
    with pytest.raises(RecordError, match="is damaged"):
        read_episodes(path)


def test_episodes_of_a_run_are_found_in_either_form(tmp_path: Path, rich_trajectory: Trajectory) -> None:
    (tmp_path / "episodes").mkdir()
    for name in ("step_000002.jsonl.gz", "step_000001.jsonl", "eval_000001.jsonl.gz", ".step_000003.jsonl.gz.tmp"):
        write_episodes(tmp_path / "episodes" / name, [rich_trajectory])
    assert [path.name for path in episode_paths(tmp_path, "step_")] == ["step_000001.jsonl", "step_000002.jsonl.gz"]
    assert [path.name for path in episode_paths(tmp_path, "eval_000001")] == ["eval_000001.jsonl.gz"]
    assert sum(len(read_episodes(path)) for path in episode_paths(tmp_path)) == 3


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_every_kind_of_file_gives_back_every_bit(tmp_path: Path, rich_trajectory: Trajectory, suffix: str) -> None:
    path = tmp_path / f"episodes{suffix}"
    save_episodes(path, [rich_trajectory], policy_name="rich")
    [back] = load_episodes(path)
    assert_equal(back, rich_trajectory)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_columns_of_a_parquet_file_say_what_the_episode_says(tmp_path: Path, rich_trajectory: Trajectory) -> None:
    import pyarrow.parquet as parquet

    unscored = dataclasses.replace(
        rich_trajectory, turns=tuple(dataclasses.replace(turn, reward=None) for turn in rich_trajectory.turns)
    )
    tools = [{"type": "function", "function": {"name": "query"}}]
    save_episodes(tmp_path / "e.parquet", [rich_trajectory, unscored], policy_name="rich", tools=tools)
    first, second = parquet.read_table(tmp_path / "e.parquet").to_pylist()
    assert {key: first[key] for key in ("env_id", "seed", "policy_name", "outcome", "success", "num_turns")} == {
        "env_id": "gspo_gym/SqlAnalyst-v0",
        "seed": 2**31 + 5,
        "policy_name": "rich",
        "outcome": "truncated",
        "success": False,
        "num_turns": 3,
    }
    assert (first["return"], first["rewards"]) == (0.1 + 1 / 3, [0.1, None, 1 / 3])
    assert (second["return"], second["rewards"]) == (None, [None] * 3)
    assert first["events"] == [["a", "b"], [], []]
    assert json.loads(first["tools"]) == tools
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "tool"]
    assert first["messages"][1]["content"] == "Wie viele? 数 ?"  # half a surrogate pair is no text in Arrow
    [call] = json.loads(first["messages"][2]["tool_calls"])
    assert call["function"]["name"] == "query"
    assert first["messages"][3]["tool_call_id"] == "call_0"
    assert json.loads(first["episode"]) == trajectory_to_json(rich_trajectory, policy_name="rich")


@pytest.mark.parametrize(
    ("version", "knows"), [(0, True), (-1, False)], ids=["the first weights", "an endpoint or a script"]
)
def test_an_episode_says_whether_its_tokens_are_of_known_weights(version: int, knows: bool) -> None:
    segment = Segment([5, 6], [False, True], [0.0, -1.0], [-1, 0], [-1, version])  # type: ignore[arg-type]
    turn = Turn(0, 0, (0, 1), (1, 2), FinishReason.STOP)
    episode = Trajectory("t", 0, Task("e", 0), 0, (segment,), (turn,), (), Outcome.TERMINATED)
    assert trajectory_to_json(episode)["knows_weights"] is knows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("e.csv", "expected a file that ends in .jsonl, .jsonl.gz or .parquet, got '.csv'"),
        ("e", "expected a file that ends in .jsonl, .jsonl.gz or .parquet, got 'no end'"),
        ("no/e.jsonl", "there is no folder"),
        ("there.jsonl", "there is such a file already"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_an_episode_is_played(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "there.jsonl").touch()
    require_writable(tmp_path / "e.jsonl")
    require_writable(tmp_path / "e.parquet")
    with pytest.raises(ConfigError, match=message):
        require_writable(tmp_path / name)


def test_without_pyarrow_only_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    require_writable(tmp_path / "e.jsonl")
    with pytest.raises(MissingExtraError, match=r"a \.parquet file needs: pip install"):
        require_writable(tmp_path / "e.parquet")


@pytest.mark.parametrize("use", [load_episodes, lambda path: save_episodes(path, [], policy_name="")])
def test_files_of_another_kind_are_neither_written_nor_read(tmp_path: Path, use: Callable[[Path], Any]) -> None:
    (tmp_path / "e.csv").touch()
    with pytest.raises(ConfigError, match=r"expected a file that ends in \.jsonl, \.jsonl\.gz or \.parquet"):
        use(tmp_path / "e.csv")


def test_a_file_that_is_not_there_or_holds_no_episodes_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    with pytest.raises(ConfigError, match=r"none\.parquet: there is no such file"):
        load_episodes(tmp_path / "none.parquet")
    parquet.write_table(pyarrow.table({"a": [1], "b": [2]}), tmp_path / "other.parquet")
    with pytest.raises(RecordError, match=r"other\.parquet: expected a column 'episode', got a, b"):
        load_episodes(tmp_path / "other.parquet")
    parquet.write_table(pyarrow.table({"episode": ['{"schema": 9}']}), tmp_path / "wrong.parquet")
    with pytest.raises(RecordError, match=r"wrong\.parquet: row 0: episode: expected schema 1, got 9"):
        load_episodes(tmp_path / "wrong.parquet")


def test_files_of_episodes_are_read_without_torch() -> None:
    program = "import sys, gspo_gym.rollout.episode_files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
