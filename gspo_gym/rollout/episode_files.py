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
from gspo_gym.rollout.recording_episodes import read_episodes, trajectory_from_json, trajectory_to_json, write_episodes
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
