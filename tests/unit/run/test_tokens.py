"""Files of tokens: what a run writes is what its episodes and its metrics say, and is read back piece by piece."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import small_disk

from gspo_gym.cli.train import run_training
from gspo_gym.config.build.trainer import build_plan
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import RecordError
from gspo_gym.learning.advantages import RunningReturns
from gspo_gym.learning.batching import BatchCounts, BuiltBatch
from gspo_gym.learning.tokens import Fate, TokenTable
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.collect import Collected
from gspo_gym.run.journal import Journal
from gspo_gym.run.recording import RunRecorder, read_events, read_metrics
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.tokens import TokenFile, open_tokens, pack_tokens, token_steps
from gspo_gym.types import (
    DroppedEpisode,
    FinishReason,
    Outcome,
    Segment,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "played ahead, an adapter, KL": {
        "training": {"max_staleness": 1, "update_epochs": 2},
        "warmup": {"num_episodes": 16, "num_epochs": 1},
        "model": {"trainer_mode": "lora"},
        "loss": {"kl_coef": 0.1},
        "correction": {"old_logprobs": "rollout"},
    },
}


def config_of(folder: Path, changes: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder), "log_tokens_every_n_iters": 1},
        "algorithm": {"variety": "gspo_token"},
        "model": {"base": "tiny:qwen3-64", "label": "test"},
        "rollout": {
            "env_name": "GuessNumber",
            "env_config": {"low": 1, "high": 4, "max_guesses": 3},
            "max_turns": 3,
            "max_output_tokens": 3,
            "max_model_len": 256,
            "episodes_per_batch": 16,
        },
        "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 4, "learning_rate": 1e-2},
        "evaluation": {"seeds": "0:2", "every_n_iters": 2},
        "warmup": {"num_episodes": 128, "num_epochs": 3, "learning_rate": 3e-3, "batch_size": 16},
    }
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return RunConfig.from_dict(values)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_the_tokens_of_a_run_are_those_of_its_episodes_and_sum_to_its_loss(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run_training(config_of(tmp_path, changes))
    folder = tmp_path / "test"
    assert token_steps(folder) == [1, 2]
    num_passes = changes.get("training", {}).get("update_epochs", 1)
    lines = read_metrics(folder)
    assert all("loss/total" in line for line in lines), "every step teaches something"
    for line in lines:
        tokens = open_tokens(folder, line["step"])
        every = tokens.columns()
        episodes = read_episodes(folder / "episodes" / f"step_{line['step']:06d}.jsonl.gz")
        assert list(tokens.spans) == [episode.trajectory_id for episode in episodes]
        assert tokens.num_passes == num_passes == len(every["share"])
        assert math.fsum(every["share"].ravel().tolist()) == pytest.approx(line["loss/total"], abs=1e-6)
        passed = ~np.isnan(every["logprob"])
        assert passed.sum() == line["batch/trained_tokens"]
        assert (passed.all(0) == (every["fate"] == Fate.TRAINED)).all()
        assert np.isnan(every["ref_logprob"][every["fate"] == Fate.TRAINED]).all() == (not changes)
        for number, episode in enumerate(episodes):
            own = tokens.columns(episode.trajectory_id)
            masks = [segment.action_mask for segment in episode.segments]
            for name, column in (("rollout_logprobs", "rollout_logprob"), ("weight_version", "weight_version")):
                arrays = [getattr(segment, name) for segment in episode.segments]
                assert own[column].tolist() == [x for a, m in zip(arrays, masks, strict=True) for x in a[m].tolist()]
            start, stop = tokens.spans[episode.trajectory_id]
            for name, values in every.items():
                part = values[:, number] if name == "optimizer_step" else values[..., start:stop]
                np.testing.assert_array_equal(own[name], part, err_msg=name)
            for p in range(num_passes):
                if own["optimizer_step"][p] >= 0 and not np.isnan(own["logprob"][p]).any():
                    gap = own["logprob"][p].astype(float) - own["old_logprob"].astype(float)
                    assert own["ratio"][p] == pytest.approx(math.exp(gap.mean()), rel=2e-6)


def trajectory(name: str, num_tokens: int) -> Trajectory:
    mask = np.array([False] + [True] * num_tokens)
    index, versions = np.where(mask, 0, -1), np.where(mask, 3, -1)
    segment = Segment(np.arange(len(mask)), mask, np.where(mask, -0.5, 0.0), index, versions)
    turns = (Turn(0, 0, (0, 1), (1, 1 + num_tokens), FinishReason.STOP, reward=1.0),)
    return Trajectory(name, 0, Task("test", 1), 0, (segment,), turns, (), Outcome.TERMINATED)


def test_tokens_that_the_learner_never_saw_say_why(tmp_path: Path) -> None:
    """No trajectory is in the batch: one is of a constant group, one within filter_eps, one of unknown weights."""
    constant, filtered, uncommitted = trajectory("a", 2), trajectory("b", 1), trajectory("c", 3)
    task = constant.task
    groups = (TrajectoryGroup(task, (constant,), 1), TrajectoryGroup(task, (filtered, uncommitted), 2))
    dropped = DroppedEpisode("c", Outcome.TERMINATED, "its weights")
    kept = (TrajectoryGroup(task, (filtered,), 2, (dropped,)),)
    collected = Collected(groups, kept, num_dropped=1, num_refilled=0, failures=())
    path = tmp_path / "step_000007.safetensors"
    path.write_bytes(pack_tokens(7, collected, BuiltBatch(None, BatchCounts(), RunningReturns(), 1.0), TokenTable()))
    tokens = TokenFile(path)
    assert (tokens.step, tokens.num_tokens, tokens.num_passes) == (7, 6, 1)
    assert tokens.spans == {"a": (0, 2), "b": (2, 3), "c": (3, 6)}
    columns = tokens.columns()
    assert columns["fate"].tolist() == [Fate.CONSTANT_GROUP] * 2 + [Fate.FILTERED] + [Fate.UNCOMMITTED] * 3
    assert (columns["rollout_logprob"].tolist(), columns["weight_version"].tolist()) == ([-0.5] * 6, [3] * 6)
    assert (columns["share"].tolist(), columns["clip"].tolist()) == ([[0.0] * 6], [[0] * 6])
    assert columns["optimizer_step"].tolist() == [[-1] * 3]
    assert all(np.isnan(columns[name]).all() for name in ("advantage", "old_logprob", "ref_logprob"))
    assert all(np.isnan(columns[name]).all() for name in ("logprob", "ratio", "correction", "entropy"))
    with pytest.raises(RecordError, match="step 7: no tokens of a trajectory 'd'"):
        tokens.columns("d")


@pytest.mark.parametrize("may_mount", [True, False])
def test_a_disk_that_takes_no_tokens_is_told_and_the_next_step_is_recorded_when_there_is_room(
    tmp_path: Path, may_mount: bool
) -> None:
    """10,000 tokens of 28 bytes, none in the batch, on a disk that has room for 64 kB."""
    plan = build_plan(config_of(tmp_path, {"run": {"log_episodes_every_n_iters": 0}}))
    groups = (TrajectoryGroup(Task("test", 1), (trajectory("a", 10_000),), 1),)
    collected = Collected(groups, groups, num_dropped=0, num_refilled=0, failures=())
    built = BuiltBatch(None, BatchCounts(), RunningReturns(), 1.0)
    told: list[str] = []
    with small_disk(tmp_path / "disk", 2**16, may_mount=may_mount) as disk:
        folder = disk.folder / "run"
        recorder = RunRecorder.create(folder, "")
        journal = Journal(plan, recorder, QuietProgress(told.append))
        journal.stepped(1, collected, built, {"loss/total": 1.0}, TokenTable())
        assert list((folder / "tokens").iterdir()) == []
        disk.grow(2**20)
        journal.stepped(2, collected, built, {"loss/total": 2.0}, TokenTable())
        assert token_steps(folder) == [2]
        assert [line["step"] for line in read_metrics(folder)] == [1, 2]
        failed = [event for event in read_events(folder) if event["kind"] == "tokens_failed"]
        recorder.close()
    (event,) = failed
    assert event["step"] == 1
    assert "step_000001.safetensors: cannot be written" in event["data"]["reason"]
    assert told == [f"step 1: what the learner saw is not recorded: {event['data']['reason']}"]


def test_a_file_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"step_000001\.safetensors: no file of tokens"):
        open_tokens(tmp_path, 1)
    (tmp_path / "x").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(RecordError, match="x: no file of tokens"):
        TokenFile(tmp_path / "x")


def test_reading_tokens_loads_no_torch() -> None:
    code = "import sys, gspo_gym.run.tokens; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
