"""Both generations of the task app's wire, field by field, against stored requests and answers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gspo_gym.remote.apps.contracts import (
    OutcomeResponse,
    RolloutRequest,
    RolloutResponse,
    TaskInfo,
    read_info,
    read_response,
)

DATA = Path(__file__).parent / "data"


def stored(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


ANSWERS = stored("app_answers")


def differences(written: Any, given: Any, place: str = "") -> list[str]:
    """Where two JSON values differ; in `written`, null may stand for what `given` lacks."""
    if isinstance(written, dict) and isinstance(given, dict):
        keys = written.keys() | given.keys()
        return [d for key in sorted(keys) for d in differences(written.get(key), given.get(key), f"{place}.{key}")]
    if isinstance(written, list) and isinstance(given, list) and len(written) == len(given):
        pairs = enumerate(zip(written, given, strict=True))
        return [d for i, (w, g) in pairs for d in differences(w, g, f"{place}[{i}]")]
    return [] if written == given else [f"{place}: {written!r} is not {given!r}"]


def without(value: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy in which the field at that path is missing."""
    changed = copy.deepcopy(value)
    *outer, last = path.split(".")
    at: Any = changed
    for key in outer:
        at = at[int(key) if key.isdigit() else key]
    del at[last]
    return changed


def with_value(value: dict[str, Any], path: str, new: Any) -> dict[str, Any]:
    changed = copy.deepcopy(value)
    *outer, last = path.split(".")
    at: Any = changed
    for key in outer:
        at = at[int(key) if key.isdigit() else key]
    at[int(last) if last.isdigit() else last] = new
    return changed


def test_every_field_of_a_request_survives_reading_and_writing() -> None:
    request = stored("rollout_request_a")
    read = RolloutRequest.model_validate(request)
    assert differences(read.model_dump(mode="json"), request) == []
    assert read.env.seed == 7
    assert read.policy.config["trace_correlation_id"] == "trace_5f"
    assert read.record.trace_format == "structured"


def test_every_field_of_an_answer_of_generation_a_survives_reading_and_writing() -> None:
    answer = stored("rollout_response_a")
    read = read_response(answer)
    assert isinstance(read, RolloutResponse)
    assert differences(read.model_dump(mode="json"), answer) == []


@pytest.mark.parametrize("name", ["rollout_response_b_metrics", "rollout_response_b_reward_info"])
def test_every_field_of_an_answer_of_generation_b_survives_reading_and_writing(name: str) -> None:
    answer = stored(name)
    read = read_response(answer)
    assert isinstance(read, OutcomeResponse)
    written = read.model_dump(mode="json")
    if "metrics" in answer:  # the older name of the same part
        written["metrics"] = written.pop("reward_info")
    assert differences(written, answer) == []


def test_defaults_of_a_request_are_the_contracts() -> None:
    request = RolloutRequest.model_validate(
        {"run_id": "r", "env": {}, "policy": {}, "ops": ["agent", "env"], "mode": "eval"}
    )
    # As the notes of the wire have them: compact traces of trajectories only, reset on done, an hour and 100,000 ops.
    assert request.model_dump() == {
        "run_id": "r",
        "env": {"env_id": None, "env_name": None, "config": {}, "seed": None},
        "policy": {"policy_id": None, "policy_name": None, "config": {}},
        "ops": ["agent", "env"],
        "record": {
            "trajectories": True,
            "logprobs": False,
            "value": False,
            "return_trace": False,
            "trace_format": "compact",
        },
        "on_done": "reset",
        "safety": {"max_ops": 100000, "max_time_s": 3600.0},
        "mode": "eval",
        "training_session_id": None,
        "synth_base_url": None,
        "trace_correlation_id": None,
    }


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("mode", "train"),
        ("ops", "agent"),
        ("ops", [1]),
        ("record.trace_format", "jsonl"),
        ("env.seed", "seven"),
        ("env.config", "dict"),
        ("run_id", ""),
    ],
)
def test_a_request_with_a_wrong_field_is_refused(path: str, wrong: Any) -> None:
    with pytest.raises(ValidationError):
        RolloutRequest.model_validate(with_value(stored("rollout_request_a"), path, wrong))


@pytest.mark.parametrize("field", ["run_id", "env", "policy", "ops", "mode"])
def test_a_request_without_a_required_field_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match="Field required"):
        RolloutRequest.model_validate(without(stored("rollout_request_a"), field))


def test_ops_may_be_objects() -> None:
    request = with_value(stored("rollout_request_a"), "ops", [{"type": "agent"}, {"type": "env"}])
    assert RolloutRequest.model_validate(request).ops == [{"type": "agent"}, {"type": "env"}]


@pytest.mark.parametrize("name", ["rollout_request_a", "rollout_response_a", "rollout_response_b_metrics"])
def test_unknown_fields_are_ignored_at_every_level(name: str) -> None:
    def sprinkled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sprinkled(part) for key, part in value.items()} | {"unknown_field": [1, None]}
        return [sprinkled(part) for part in value] if isinstance(value, list) else value

    read = RolloutRequest.model_validate if "request" in name else read_response
    assert type(read(sprinkled(stored(name)))) is type(read(stored(name)))


@pytest.mark.parametrize(
    "path",
    [
        "trajectories.0.steps.0.reward",
        "trajectories.0.steps.0.tool_calls",
        "trajectories.0.steps.0.info",
        "trajectories.0.steps.0.truncated",
        "trajectories.0.steps",
        "trajectories.0.final",
        "trajectories.0.length",
        "trajectories.0.inference_url",
        "trajectories.0.decision_samples",
        "metrics.mean_return",
        "metrics.episode_returns",
        "metrics.num_steps",
        "metrics.details",
        "branches",
        "aborted",
        "ops_executed",
        "trace",
        "pipeline_metadata",
    ],
)
def test_a_missing_field_and_a_null_are_the_same(path: str) -> None:
    """An empty list or map is null in the JSON of some languages."""
    answer = stored("rollout_response_a")
    assert read_response(without(answer, path)) == read_response(with_value(answer, path, None))


@pytest.mark.parametrize("path", ["run_id", "trajectories", "metrics"])
def test_an_answer_without_what_makes_it_one_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        read_response(without(stored("rollout_response_a"), path))


@pytest.mark.parametrize("wrong", ["1.0", True, float("nan"), float("inf"), [1.0], {"value": 1.0}])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("rollout_response_a", "metrics.mean_return"),
        ("rollout_response_a", "metrics.outcome_score"),
        ("rollout_response_a", "metrics.episode_returns.0"),
        ("rollout_response_a", "trajectories.0.steps.1.reward"),
        ("rollout_response_b_metrics", "metrics.outcome_reward"),
        ("rollout_response_b_metrics", "metrics.event_rewards.0"),
        ("rollout_response_b_reward_info", "reward_info.outcome_reward"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused(name: str, path: str, wrong: Any) -> None:
    with pytest.raises(ValidationError):
        read_response(with_value(stored(name), path, wrong))


@pytest.mark.parametrize("path", ["aborted", "trajectories.0.steps.0.done", "trajectories.0.steps.0.truncated"])
def test_a_flag_that_is_no_truth_value_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        read_response(with_value(stored("rollout_response_a"), path, "false"))


def test_a_whole_number_is_a_reward() -> None:
    read = read_response(with_value(stored("rollout_response_a"), "metrics.mean_return", 2))
    assert isinstance(read, RolloutResponse)
    assert read.metrics.mean_return == 2.0


def test_the_outcome_reward_of_generation_b_is_required() -> None:
    with pytest.raises(ValidationError):
        read_response(without(stored("rollout_response_b_reward_info"), "reward_info.outcome_reward"))


def test_info_is_read_as_far_as_it_can_be() -> None:
    info = read_info(ANSWERS["info"])
    assert info.task_id == "crafter-classic"
    assert info.limits == {"max_turns": 10}
    assert info.rubrics["events"] is None

    circular = read_info(ANSWERS["info_circular"])
    assert circular.task_id == "math"
    assert circular.dataset == circular.rubrics == circular.limits == {}

    assert read_info({}).task_id is None
    assert read_info({"service": {"task": "crafter"}}).task_id is None


def test_unknown_fields_of_a_task_are_kept() -> None:
    info = TaskInfo.model_validate(ANSWERS["task_info"])
    assert differences(info.model_dump(mode="json"), ANSWERS["task_info"]) == []
    assert info.model_extra == {"world_size": [64, 64]}
