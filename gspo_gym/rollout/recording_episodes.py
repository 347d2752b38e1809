"""An episode as a JSON object and back, exactly: what was said, every token and logprob, every reward.

Whatever was trained on can be rebuilt from it, bit for bit. Called by `recording.py` and by whoever reads a run; needs
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gspo_gym.base.files import replace_file, whole_lines
from gspo_gym.base.messages import messages_from_wire
from gspo_gym.errors import RecordError
from gspo_gym.types import (
    FinishReason,
    Outcome,
    ParseStatus,
    Segment,
    Task,
    Timing,
    Trajectory,
    Turn,
)

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
    """JSON values (hence Any) that `trajectory_from_json` turns into an equal trajectory.

    Messages have the shape of the OpenAI chat API. `reward` is there for people; it follows from the turns. So is
    `policy_name`, the user's name for who played, and `knows_weights`: False where tokens were sampled by weights that
    nobody here knows (an endpoint's, or a script's), whose logprobs are then not the policy's, or zeros.
    """
    task = trajectory.task
    return {
        "schema": SCHEMA_VERSION,
        "trajectory_id": trajectory.trajectory_id,
        "attempt": trajectory.attempt,
        "policy_name": policy_name,
        "knows_weights": all((each.weight_version[each.action_mask] >= 0).all() for each in trajectory.segments),
        "task": {"env_id": task.env_id, "seed": task.seed, "options": dict(task.options)},
        "sampling_seed": trajectory.sampling_seed,
        "outcome": trajectory.outcome.value,
        "success": trajectory.success,
        "error": trajectory.error,
        "reports_events": trajectory.reports_events,
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
    """The trajectory that was written.

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
        )
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"episode {values.get('trajectory_id')}: {type(error).__name__}: {error}") from error


def write_episodes(path: Path, trajectories: Iterable[Trajectory], *, policy_name: str = "policy") -> None:
    """Write a file of one trajectory a line, durably and at once.

    Raises:
        RecordError: a trajectory holds what JSON has no name for (NaN, infinity, an object).
    """
    lines = []
    for trajectory in trajectories:
        try:
            lines.append(json.dumps(trajectory_to_json(trajectory, policy_name=policy_name), allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise RecordError(f"episode {trajectory.trajectory_id} cannot be written as JSON: {error}") from error
    replace_file(path, "".join(lines))


def read_episodes(path: Path) -> list[Trajectory]:
    """The trajectories of a file in a run's `episodes` folder.

    Raises:
        RecordError: a line is not an episode; names file and line.
    """
    episodes = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            episodes.append(trajectory_from_json(json.loads(line)))
        except ValueError as error:  # RecordError included
            raise RecordError(f"{path}:{number}: {error}") from error
    return episodes


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
