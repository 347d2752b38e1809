"""The nouns check themselves: each rule has a record that breaks it, made from one that keeps it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gspo_gym.errors import RecordError, UnscoredError
from gspo_gym.types import (
    Completion,
    DroppedEpisode,
    FinishReason,
    Message,
    Outcome,
    Segment,
    StepResult,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

TASK = Task("test/Env-v0", 7)
CALL = ToolCall("c", "f", {"x": 1})


def completion(**changes: Any) -> Completion:
    fields = {
        "token_ids": [5, 6],
        "logprobs": [-0.5, -0.25],
        "finish_reason": FinishReason.STOP,
        "weight_version": [1, 1],
    }
    return Completion(**{**fields, **changes})


def segment(**changes: Any) -> Segment:
    """Two tokens of context, one sampled in turn 0, one of context."""
    fields = {
        "token_ids": [5, 6, 7, 8],
        "action_mask": [False, False, True, False],
        "rollout_logprobs": [0.0, 0.0, -0.5, 0.0],
        "turn_index": [-1, -1, 0, -1],
        "weight_version": [-1, -1, 3, -1],
    }
    return Segment(**{**fields, **changes})


def turn(**changes: Any) -> Turn:
    fields = {
        "index": 0,
        "segment": 0,
        "observation_span": (0, 2),
        "action_span": (2, 3),
        "finish_reason": FinishReason.STOP,
        "reward": 1.0,
    }
    return Turn(**{**fields, **changes})


def trajectory(**changes: Any) -> Trajectory:
    fields = {
        "trajectory_id": "t",
        "attempt": 0,
        "task": TASK,
        "sampling_seed": 0,
        "segments": (segment(),),
        "turns": (turn(),),
        "messages": (),
        "outcome": Outcome.TERMINATED,
    }
    return Trajectory(**{**fields, **changes})


def group(**changes: Any) -> TrajectoryGroup:
    fields = {"task": TASK, "trajectories": (trajectory(),), "requested_size": 1}
    return TrajectoryGroup(**{**fields, **changes})


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            Message,
            {"role": "robot", "content": ""},
            "Message.role: expected system, user, assistant or tool, got 'robot'",
        ),
        (Message, {"role": "user", "content": b"x"}, "Message.content: expected str, got bytes"),
        (
            Message,
            {"role": "user", "content": "", "tool_calls": (CALL,)},
            "only an assistant calls tools, got role 'user'",
        ),
        (
            Message,
            {"role": "tool", "content": "", "reasoning_content": ""},
            "only an assistant reasons, got role 'tool'",
        ),
        (completion, {"token_ids": [], "logprobs": [], "weight_version": []}, "expected at least one sampled token"),
        (completion, {"logprobs": [-0.5]}, "Completion: expected equal lengths"),
        (completion, {"weight_version": [1, 1, 1]}, "Completion: expected equal lengths"),
        (completion, {"token_ids": [[5, 6]]}, r"Completion.token_ids: expected one dimension, got shape \(1, 2\)"),
        (completion, {"token_ids": [5, 2**31]}, "Completion.token_ids: values do not fit int32"),
        (completion, {"token_ids": [5, 6.5]}, "Completion.token_ids: values do not fit int32"),
        (completion, {"logprobs": [-0.5, math.nan]}, "expected finite values <= 0, got nan at token 1"),
        (completion, {"logprobs": [-math.inf, -0.5]}, "expected finite values <= 0, got -inf at token 0"),
        (completion, {"logprobs": [-0.5, 0.25]}, "expected finite values <= 0, got 0.25 at token 1"),
        (StepResult, {"messages": (), "reward": 0.0}, "the model must be shown at least one message"),
        (
            StepResult,
            {"messages": (), "terminated": True, "reward": math.nan},
            "expected a finite number or None, got float nan",
        ),
        (
            StepResult,
            {"messages": (), "truncated": True, "reward": math.inf},
            "expected a finite number or None, got float inf",
        ),
        (
            StepResult,
            {"messages": (), "truncated": True, "reward_terms": {"found": math.nan}},
            "StepResult.found: expected a finite number or None, got float nan",
        ),
        (turn, {"reward": 10**400}, "Turn 0.reward: expected a finite number or None, got int 1000"),
        (turn, {"reward": math.nan}, "Turn 0.reward: expected a finite number or None, got float nan"),
        (turn, {"reward": -math.inf}, "Turn 0.reward: expected a finite number or None, got float -inf"),
        (turn, {"reward": 1.0, "reward_terms": {"a": math.inf}}, "Turn 0.a: expected a finite number"),
        (turn, {"action_span": (2, 2)}, r"Turn 0: expected observation before a non-empty action"),
        (turn, {"observation_span": (-1, 2)}, "Turn 0: expected observation before a non-empty action"),
        (turn, {"observation_span": (2, 1)}, "Turn 0: expected observation before a non-empty action"),
        (turn, {"observation_span": (0, 3)}, "Turn 0: expected observation before a non-empty action"),
        (segment, {"token_ids": [5, 6, 7]}, "Segment: expected equal lengths"),
        (segment, {"action_mask": [0, 0, 2, 0]}, "Segment.action_mask: values do not fit bool"),
        (segment, {"turn_index": [-1, 0, 0, -1]}, "turn_index: expected -1 exactly where action_mask is False"),
        (segment, {"turn_index": [-1, -1, -1, -1]}, "turn_index: expected -1 exactly where action_mask is False"),
        (segment, {"rollout_logprobs": [0, -0.1, -0.5, 0]}, "rollout_logprobs: expected 0 where action_mask is False"),
        (
            segment,
            {"rollout_logprobs": [math.nan, 0, -0.5, 0]},
            "rollout_logprobs: expected 0 where action_mask is False",
        ),
        (
            segment,
            {"action_mask": [True, False, True, False], "turn_index": [0, -1, 0, -1]},
            "the first token has no context to be sampled from",
        ),
        (trajectory, {"outcome": Outcome.ENV_ERROR}, "outcome env_error needs an error text"),
        (trajectory, {"turns": (turn(segment=1),)}, "turn 0 names segment 1"),
        (trajectory, {"turns": (turn(segment=-1),)}, "turn 0 names segment -1"),
        (trajectory, {"turns": (turn(action_span=(2, 5)),)}, "turn 0 reaches past its segment"),
        (
            trajectory,
            {"turns": (turn(reward=1e308), turn(index=1, reward=1e308))},
            "the sum of its turns' rewards overflows",
        ),
        (group, {"requested_size": 2}, "requested 2, but kept 1 and dropped 0"),
        (
            group,
            {"dropped": (DroppedEpisode("u", Outcome.ENV_ERROR, "broke"),)},
            "requested 1, but kept 1 and dropped 1",
        ),
        (group, {"task": Task("test/Env-v0", 8)}, r"also holds trajectories of \['test/Env-v0#7'\]"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(
    make: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        make(**changes)


def test_a_logprob_may_exceed_zero_by_rounding_only() -> None:
    assert completion(logprobs=[0.0, 1e-3]).logprobs[1] == np.float32(1e-3)
    with pytest.raises(RecordError):
        completion(logprobs=[0.0, 1.1e-3])


def test_arrays_have_their_dtypes_are_copies_and_cannot_be_written() -> None:
    source = np.array([5, 6, 7, 8], dtype=np.int64)
    record = segment(token_ids=source)
    source[0] = 99
    assert record.token_ids.tolist() == [5, 6, 7, 8]
    dtypes = {f.name: getattr(record, f.name).dtype.name for f in dataclasses.fields(record)}
    assert dtypes == {
        "token_ids": "int32",
        "action_mask": "bool",
        "rollout_logprobs": "float32",
        "turn_index": "int32",
        "weight_version": "int32",
    }
    for field in dataclasses.fields(record):
        with pytest.raises(ValueError, match="read-only"):
            getattr(record, field.name)[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.token_ids = source  # type: ignore[misc]


def test_the_reward_is_the_sum_of_the_turns_that_have_one() -> None:
    turns = (turn(reward=0.25), turn(index=1, reward=None), turn(index=2, reward=-1.0))
    assert trajectory(turns=turns).reward == 0.25 - 1.0
    assert trajectory(turns=turns).is_scored


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"turns": (turn(reward=None),)}, "its environment gave None at every turn and no judge scored it"),
        ({"turns": ()}, "has no reward"),
        ({"outcome": Outcome.ENV_TIMEOUT, "error": "step took 31 s"}, "step took 31 s"),
    ],
)
def test_an_unscored_episode_has_no_reward_instead_of_zero(changes: dict[str, Any], reason: str) -> None:
    record = trajectory(**changes)
    assert not record.is_scored
    with pytest.raises(UnscoredError, match=reason):
        _ = record.reward


def test_these_outcomes_are_infrastructure_failures_and_the_others_are_the_policys_doing() -> None:
    failures = {outcome.value for outcome in Outcome if outcome.is_infrastructure_failure}
    assert failures == {"env_error", "env_timeout", "engine_error", "episode_timeout", "cancelled"}


def test_actions_are_counted_over_all_segments() -> None:
    assert trajectory(segments=(segment(), segment())).num_actions == 2


def test_terminated_and_truncated_both_end_an_episode_and_stay_apart() -> None:
    ends = [
        StepResult((), reward=0.0, terminated=a, truncated=b) for a, b in ((True, False), (False, True), (True, True))
    ]
    assert all(result.done for result in ends)
    assert [(r.terminated, r.truncated) for r in ends] == [(True, False), (False, True), (True, True)]
    assert not StepResult((Message("user", "go on"),)).done


def test_a_message_on_the_wire_has_the_openai_shape_and_no_absent_fields() -> None:
    assert Message("user", "hi").to_dict() == {"role": "user", "content": "hi"}
    assert Message("assistant", "", tool_calls=(CALL,), reasoning_content="").to_dict() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert Message("tool", "3", tool_call_id="c", name="f").to_dict() == {
        "role": "tool",
        "content": "3",
        "tool_call_id": "c",
        "name": "f",
    }


def test_a_tasks_name_is_its_environment_and_seed() -> None:
    assert Task("a/B-v0", 3, {"x": 1}).task_id == "a/B-v0#3"
