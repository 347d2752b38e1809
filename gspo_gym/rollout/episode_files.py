"""Episodes as files, JSON lines (compressed or not) or Parquet, all read back exactly.

A JSON line holds an episode whole (messages, tokens, logprobs, rewards), from which every batch can be rebuilt.
A Parquet file has flat columns to filter by and to imitate (`messages` as in the OpenAI API, arguments as JSON text),
and the same JSON text in the column `episode`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo_gym.base.files import compress_lines, find_line, is_gzip, read_lines, replace_file, whole_lines
from gspo_gym.base.messages import messages_from_wire
from gspo_gym.errors import ConfigError, MissingExtraError, RecordError
from gspo_gym.types import (
    FinishReason,
    ForkPoint,
    Message,
    Outcome,
    ParseStatus,
    Segment,
    Task,
    Timing,
    Trajectory,
    Turn,
)

_LINES = (".jsonl", ".jsonl.gz")
_EXPECTED = "expected a file that ends in .jsonl, .jsonl.gz or .parquet"


def require_writable(path: Path) -> None:
    """Refuse, before an episode is played, a path that could not be written afterwards.

    Raises:
        ConfigError: another suffix than .jsonl, .jsonl.gz or .parquet, no such folder, or the file is there already.
        MissingExtraError: Parquet without pyarrow.
    """
    if not path.name.endswith((*_LINES, ".parquet")):
        raise ConfigError(f"{path}: {_EXPECTED}, got {path.suffix or 'no end'!r}")
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
    if path.name.endswith(_LINES):
        write_episodes(path, trajectories, policy_name=policy_name)
        return
    if path.suffix != ".parquet":
        raise ConfigError(f"{path}: {_EXPECTED}")
    pyarrow, parquet = _pyarrow()
    shape = _schema(pyarrow)
    rows = [_row(trajectory, policy_name, tools) for trajectory in trajectories]
    draft = path.with_name(f".{path.name}.tmp")
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=shape), draft)
    draft.replace(path)


def load_episodes(path: Path) -> list[Trajectory]:
    """Return the episodes of a file that `save_episodes` wrote, equal to what was given.

    Raises:
        ConfigError: there is no such file, or it ends otherwise.
        RecordError: a line or row is no episode; says which.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    if path.name.endswith(_LINES):
        return read_episodes(path)
    if path.suffix != ".parquet":
        raise ConfigError(f"{path}: {_EXPECTED}")
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
        "episode": _json_text(trajectory, policy_name),
    }


def _message(message: Message) -> dict[str, Any]:
    wire = message.to_dict()
    if calls := wire.pop("tool_calls", None):
        wire["tool_calls"] = json.dumps(calls)  # arguments differ from call to call; a column has one type
    # Arrow refuses half a surrogate pair, which a text may hold; the column `episode` has it exactly, as JSON escapes.
    return {key: text.encode(errors="replace").decode() for key, text in wire.items()}


def _schema(pyarrow: Any) -> Any:
    """Return the columns, also of a file without a single tool call or reward (Any: untyped)."""
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


# Of every line and file of a run folder. Raise it when a reader of the old shape would misread the new one.
SCHEMA_VERSION = 1

_SEGMENT_ARRAYS = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "turn_index": np.int32,
    "weight_version": np.int32,
}


def trajectory_to_json(trajectory: Trajectory, *, policy_name: str = "policy") -> dict[str, Any]:
    """Return JSON values (hence Any) that `trajectory_from_json` turns into an equal trajectory.

    Messages have the shape of the OpenAI chat API. `reward`, `policy_name` and `knows_weights` are for people and are
    not read back. `knows_weights` is False where an endpoint or a script chose the tokens: the logprobs are then not
    the policy's, or zeros.
    """
    task, point = trajectory.task, trajectory.forked_from
    return {
        "schema": SCHEMA_VERSION,
        "trajectory_id": trajectory.trajectory_id,
        "attempt": trajectory.attempt,
        "policy_name": policy_name,
        "knows_weights": all(
            (one_segment.weight_version[one_segment.action_mask] >= 0).all() for one_segment in trajectory.segments
        ),
        "task": {"env_id": task.env_id, "seed": task.seed, "options": dict(task.options)},
        "sampling_seed": trajectory.sampling_seed,
        "outcome": trajectory.outcome.value,
        "success": trajectory.success,
        "error": trajectory.error,
        "reports_events": trajectory.reports_events,
        **({} if point is None else {"forked_from": {"trajectory_id": point.trajectory_id, "turn": point.turn}}),
        "reward": trajectory.reward if trajectory.is_scored else None,
        "messages": [message.to_dict() for message in trajectory.messages],
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
        "segments": [_segment_to_json(segment) for segment in trajectory.segments],
        "timing": {
            "total_seconds": trajectory.timing.total_seconds,
            "env_seconds": trajectory.timing.env_seconds,
            "engine_seconds": trajectory.timing.engine_seconds,
        },
    }


def trajectory_from_json(values: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory that was written.

    Raises:
        RecordError: another schema, a missing field, or fields that contradict each other.
    """
    if values.get("schema") != SCHEMA_VERSION:
        raise RecordError(f"episode: expected schema {SCHEMA_VERSION}, got {values.get('schema')!r}")
    try:
        return Trajectory(
            trajectory_id=values["trajectory_id"],
            attempt=values["attempt"],
            task=Task(**values["task"]),
            sampling_seed=values["sampling_seed"],
            segments=tuple(_segment_from_json(segment) for segment in values["segments"]),
            turns=tuple(_turn_from_json(turn) for turn in values["turns"]),
            messages=messages_from_wire(values["messages"], where="messages"),
            outcome=Outcome(values["outcome"]),
            success=values["success"],
            error=values["error"],
            reports_events=values.get("reports_events", True),  # absent in files of earlier versions
            timing=Timing(**values["timing"]),
            forked_from=ForkPoint(**values["forked_from"]) if values.get("forked_from") else None,
        )
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"episode {values.get('trajectory_id')}: {type(error).__name__}: {error}") from error


def write_episodes(path: Path, trajectories: Iterable[Trajectory], *, policy_name: str = "policy") -> None:
    """Write a file of one trajectory a line, durably and at once; compressed if its name ends in .gz.

    Raises:
        RecordError: a trajectory holds what JSON has no name for (NaN, infinity, an object).
    """
    lines = ((trajectory.trajectory_id, _json_text(trajectory, policy_name)) for trajectory in trajectories)
    replace_file(path, compress_lines(lines) if path.suffix == ".gz" else "".join(f"{line}\n" for _, line in lines))


def _json_text(trajectory: Trajectory, policy_name: str) -> str:
    try:
        return json.dumps(trajectory_to_json(trajectory, policy_name=policy_name), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"episode {trajectory.trajectory_id} cannot be written as JSON: {error}") from error


def read_episodes(path: Path) -> list[Trajectory]:
    """Return the trajectories of a file in a run's `episodes` folder, compressed or not.

    Raises:
        RecordError: the file is damaged, or a line is not an episode; names file and line.
    """
    return [_parse_line(path, number, line) for number, line in enumerate(_lines(path), start=1)]


def read_episode(path: Path, trajectory_id: str) -> Trajectory:
    """Return one trajectory of a file; of a compressed one of a run, only a part is unpacked.

    Raises:
        RecordError: as `read_episodes`, or the file has no such trajectory.
    """
    if is_gzip(path):
        numbered_line = find_line(path, trajectory_id)
    else:
        key = json.dumps({"trajectory_id": trajectory_id})[1:-1]
        numbered_line = next(((number, line) for number, line in enumerate(_lines(path), start=1) if key in line), None)
    if numbered_line is None:
        raise RecordError(f"{path}: has no episode {trajectory_id!r}")
    return _parse_line(path, *numbered_line)


def episode_paths(folder: Path, prefix: str = "") -> list[Path]:
    """Return a run's files of episodes in either form, sorted by name, whose name begins with `prefix`.

    `prefix` is "step_", or a whole name such as "eval_000010".
    """
    # Not as a pattern: a prefix may come from a URL, and hold what means something to `glob`.
    paths = (folder / "episodes").glob("*")
    return sorted(path for path in paths if path.name.startswith(prefix) and path.name.endswith(_LINES))


def _lines(path: Path) -> list[str]:
    try:
        return read_lines(path) if is_gzip(path) else whole_lines(path)
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: is damaged: {error}") from error


def _parse_line(path: Path, number: int, line: str) -> Trajectory:
    try:
        return trajectory_from_json(json.loads(line))
    except ValueError as error:  # RecordError included
        raise RecordError(f"{path}:{number}: {error}") from error


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "segment": turn.segment,
        "observation_span": list(turn.observation_span),
        "action_span": list(turn.action_span),
        "finish_reason": turn.finish_reason.value,
        "parse": turn.parse.value,
        "reward": turn.reward,
        "reward_terms": dict(turn.reward_terms),
        "events": list(turn.events),
    }


def _turn_from_json(values: Mapping[str, Any]) -> Turn:
    read = dict(values)
    (start, stop), (action_start, action_stop) = read.pop("observation_span"), read.pop("action_span")
    return Turn(
        observation_span=(start, stop),
        action_span=(action_start, action_stop),
        finish_reason=FinishReason(read.pop("finish_reason")),
        parse=ParseStatus(read.pop("parse")),
        events=tuple(read.pop("events")),
        **read,
    )


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    # numpy's shortest decimal text of a float32 reads back as the same float32, and is half as long as float64's
    logprobs = [float(text) for text in segment.rollout_logprobs.astype(str)]
    return {name: getattr(segment, name).tolist() for name in _SEGMENT_ARRAYS} | {
        "action_mask": segment.action_mask.astype(int).tolist(),
        "rollout_logprobs": logprobs,
    }


def _segment_from_json(values: Mapping[str, Any]) -> Segment:
    return Segment(**{name: np.array(values[name], dtype=dtype) for name, dtype in _SEGMENT_ARRAYS.items()})
