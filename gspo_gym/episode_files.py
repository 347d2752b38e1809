"""A data set of episodes as one file: JSON lines or Parquet, both read back exactly.

JSON lines have the shape of a run's own episodes. A Parquet file has flat columns for whoever filters and imitates
(`messages` as in the OpenAI API, arguments as JSON text), and the whole episode as JSON text in the column `episode`.
Called by `episode_collection.py` and by readers of such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_gym.errors import ConfigError, MissingExtraError, RecordError
from gspo_gym.files import append_line, cut_torn_line, whole_lines, write_output, writing
from gspo_gym.recording_episodes import read_episodes, trajectory_from_json, trajectory_to_json, write_episodes
from gspo_gym.types import Message, Trajectory

_SUFFIXES = (".jsonl", ".parquet")


def require_writable(path: Path) -> None:
    """Refuse before an episode is played what could not be written afterwards.

    Raises:
        ConfigError: another suffix than .jsonl or .parquet, no such folder, or the file is there already.
        MissingExtraError: Parquet without pyarrow.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"{path}: expected a file that ends in {' or '.join(_SUFFIXES)}, got {path.suffix or 'no end'!r}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")
    if path.exists():
        raise ConfigError(f"{path}: there is such a file already; remove it, or choose another name")
    if path.suffix == ".parquet":
        _pyarrow()


class EpisodesDraft:
    """The episodes of a collection as they end, in FILE.part beside the file that is wanted: a line each.

    The first line says what was asked for, so that nothing else is gone on with.

    Args:
        out: the file that is wanted.
        asked: what decides how an episode is played (Any: JSON).
        resumes: go on with a draft that is there.

    Attributes:
        path: of the draft. found: the episodes that were there.
        num_episodes: in the draft now.

    Raises:
        ConfigError: there is a draft and `resumes` is False, none and it is True, or one of another collection.
        StorageError: it cannot be written. RecordError: it cannot be read.
    """

    def __init__(self, out: Path, asked: Mapping[str, Any], *, resumes: bool) -> None:
        self.path = out.with_name(f"{out.name}.part")
        self.found: tuple[Trajectory, ...] = ()
        first_line = json.dumps({"collect": asked}, sort_keys=True)
        if resumes:
            self.found = self._read(first_line)
        elif len(whole_lines(self.path)) > 1:
            raise ConfigError(f"{self.path} holds episodes of an interrupted command: add --resume, or remove it")
        else:
            write_output(self.path, first_line + "\n")
        self.num_episodes = len(self.found)

    def append(self, trajectory: Trajectory) -> None:
        """Write an episode; a killed process loses none.

        Raises:
            StorageError: it cannot be written.
        """
        append_line(self.path, json.dumps(trajectory_to_json(trajectory), allow_nan=False))
        self.num_episodes += 1

    def remove(self) -> None:
        """Remove the draft: all of it is elsewhere, or there is nothing in it."""
        self.path.unlink(missing_ok=True)

    def _read(self, first_line: str) -> tuple[Trajectory, ...]:
        with writing(self.path):
            cut_torn_line(self.path)
        lines = whole_lines(self.path)
        if not lines:
            raise ConfigError(f"{self.path}: there is nothing to go on with; leave --resume out")
        if lines[0] != first_line:
            raise ConfigError(
                f"{self.path} is of another collection: expected {first_line}, got {lines[0]}; repeat that command, or "
                "remove the file"
            )
        try:
            return tuple(trajectory_from_json(json.loads(line)) for line in lines[1:])
        except ValueError as error:  # RecordError included
            raise RecordError(f"{self.path}: {error}") from error


def save_episodes(
    path: Path,
    trajectories: Sequence[Trajectory],
    *,
    policy_name: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the file at once: it is whole or not there. `tools` are the function schemas that the player was offered.

    Raises:
        ConfigError, MissingExtraError: as `require_writable`, except that an existing file is replaced.
        RecordError: an episode holds what JSON has no name for.
    """
    if path.suffix == ".jsonl":
        write_episodes(path, trajectories, policy_name=policy_name)
        return
    if path.suffix != ".parquet":
        raise ConfigError(f"{path}: expected a file that ends in {' or '.join(_SUFFIXES)}")
    pyarrow, parquet = _pyarrow()
    shape = _schema(pyarrow)
    rows = [_row(trajectory, policy_name, tools) for trajectory in trajectories]
    draft = path.with_name(f".{path.name}.tmp")
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=shape), draft)
    draft.replace(path)


def load_episodes(path: Path) -> list[Trajectory]:
    """The episodes of a file that `save_episodes` wrote, equal to what was given.

    Raises:
        ConfigError: there is no such file, or it ends otherwise.
        RecordError: a line or row is no episode; says which.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    if path.suffix == ".jsonl":
        return read_episodes(path)
    if path.suffix != ".parquet":
        raise ConfigError(f"{path}: expected a file that ends in {' or '.join(_SUFFIXES)}")
    _, parquet = _pyarrow()
    table = parquet.read_table(path)
    if "episode" not in table.column_names:
        raise RecordError(f"{path}: expected a column 'episode', got {', '.join(table.column_names)}")
    episodes = []
    for number, text in enumerate(table.column("episode").to_pylist()):
        try:
            episodes.append(trajectory_from_json(json.loads(text)))
        except ValueError as error:  # RecordError included
            raise RecordError(f"{path}: row {number}: {error}") from error
    return episodes


def _row(trajectory: Trajectory, policy_name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "env_id": trajectory.task.env_id,
        "seed": trajectory.task.seed,
        "policy_name": policy_name,
        "outcome": trajectory.outcome.value,
        "success": trajectory.success,
        "return": trajectory.reward if trajectory.is_scored else None,
        "num_turns": len(trajectory.turns),
        "rewards": [turn.reward for turn in trajectory.turns],
        "events": [list(turn.events) for turn in trajectory.turns],
        "messages": [_message(message) for message in trajectory.messages],
        "tools": json.dumps(list(tools)),
        "episode": json.dumps(trajectory_to_json(trajectory, policy_name=policy_name), allow_nan=False),
    }


def _message(message: Message) -> dict[str, Any]:
    wire = message.to_dict()
    if calls := wire.pop("tool_calls", None):
        wire["tool_calls"] = json.dumps(calls)  # arguments differ from call to call; a column has one type
    return wire


def _schema(pyarrow: Any) -> Any:
    """Stated and not guessed: a file without a single tool call or reward has the same columns (Any: untyped)."""
    text, number = pyarrow.string(), pyarrow.float64()
    keys = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
    columns = {
        "env_id": text,
        "seed": pyarrow.int64(),
        "policy_name": text,
        "outcome": text,
        "success": pyarrow.bool_(),
        "return": number,
        "num_turns": pyarrow.int32(),
        "rewards": pyarrow.list_(number),
        "events": pyarrow.list_(pyarrow.list_(text)),
        "messages": pyarrow.list_(pyarrow.struct([(key, text) for key in keys])),
        "tools": text,
        "episode": text,
    }
    return pyarrow.schema(list(columns.items()))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("a .parquet file needs: pip install 'gspo-gym[datasets]'") from error
    return pyarrow, parquet
