"""Runs that begin with parts of another run's checkpoint: `run.restore` of `run.restore_from`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_run import small_run

from gspo_gym.cli.train import run_training
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.continuation import find_restored
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.policy.checkpoints import Checkpoint
from gspo_gym.policy.manifest import read_manifest
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events, read_metrics, read_run_id
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.session import Start

ALL = ("weights", "optimizer", "tasks", "step")


def make_config(folder: Path, *, iterations: int, label: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = small_run(
        run={"folder": str(folder), "seed": 3},
        algorithm={"variety": "gspo_token"},
        model={"label": label},
        training={"iterations_per_epoch": iterations, "checkpoint_every_n_iters": 2},
        loss={"entropy_coef": 0.01},  # every episode has a gradient, also where all earn the same
        evaluation={"every_n_iters": 4},
    )
    for key, value in changes.items():
        section, name = key.split("__")
        values[section][name] = value
    return RunConfig.from_dict(values)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 iterations, of which that of 2 is kept, too."""
    folder = tmp_path_factory.mktemp("runs")
    run_training(make_config(folder, iterations=4, label="whole", training__keep_last=5))
    return folder


def checkpoint(folder: Path, label: str, step: int) -> Path:
    return folder / label / "checkpoints" / f"step_{step:06d}"


def seeds(folder: Path, step: int) -> list[int]:
    file = next((folder / "episodes").glob(f"step_{step:06d}.*"))
    return sorted({episode.task.seed for episode in read_episodes(file)})


@pytest.mark.slow
def test_a_run_that_begins_with_all_of_another_ends_with_its_weights(runs: Path, tmp_path: Path) -> None:
    source = checkpoint(runs, "whole", 2)
    config = make_config(
        tmp_path,
        iterations=4,
        label="fork",
        run__restore=ALL,
        run__restore_from=str(source),
        evaluation__every_n_iters=3,
    )
    summary = run_training(config)
    whole = load_file(checkpoint(runs, "whole", 4) / "model.safetensors")
    fork = load_file(checkpoint(tmp_path, "fork", 4) / "model.safetensors")
    assert all(whole[name].equal(tensor) for name, tensor in fork.items())
    assert [line["step"] for line in read_metrics(tmp_path / "fork")] == [3, 4]
    assert [point[0] for point in summary["curve"]] == [2, 3, 4]  # before its first step, regularly, and at the end
    parent = {"run": read_run_id(runs / "whole"), "step": 2}
    for step in (2, 4):  # a kill before its first step leaves something to go on from, too
        manifest = read_manifest(checkpoint(tmp_path, "fork", step))
        assert (manifest.run, manifest.origin.parent) == (read_run_id(tmp_path / "fork"), parent)
    (event,) = [event for event in read_events(tmp_path / "fork") if event["kind"] == "restored"]
    assert event["data"] == {"parts": list(ALL), "folder": str(source), **parent}
    # and its parent stays when it goes on
    longer = config.training.model_copy(update={"num_epochs": 2})
    run_training(config.model_copy(update={"training": longer}), resume=True)
    assert read_manifest(checkpoint(tmp_path, "fork", 8)).origin.parent == parent


def test_weights_alone_begin_at_step_0_with_the_first_tasks_and_a_fresh_optimizer(runs: Path, tmp_path: Path) -> None:
    config = make_config(
        tmp_path, iterations=1, label="fork", run__restore=("weights",), run__restore_from=str(runs / "whole")
    )
    run_training(config)
    assert seeds(tmp_path / "fork", 1) == seeds(runs / "whole", 1)
    first = load_file(checkpoint(tmp_path, "fork", 0) / "model.safetensors")
    newest = load_file(checkpoint(runs, "whole", 4) / "model.safetensors")
    assert all(newest[name].equal(tensor) for name, tensor in first.items())
    assert load_file(checkpoint(tmp_path, "fork", 0) / "resume" / "learner.safetensors") == {}


def restored(runs: Path, *parts: str) -> Start:
    found = find_restored(
        make_config(runs, iterations=9, label="new", run__restore=parts, run__restore_from=str(runs / "whole"))
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("part", "expected"),
    [("weights", (0, 0)), ("optimizer", (0, 0)), ("tasks", (0, 8)), ("step", (4, 0))],  # 4 steps of 2 groups
)
def test_each_part_is_taken_alone(runs: Path, part: str, expected: tuple[int, int]) -> None:
    found = restored(runs, part)
    assert (found.state.step, found.state.num_tasks) == expected
    assert (found.base is not None) == (part == "weights")
    assert (found.state.running.count > 0) == (part == "optimizer")
    learner = build.build_learner(found_config(runs), build.build_policy(found_config(runs)))
    found.restore(learner)
    assert (learner.tensors() != {}) == (part == "optimizer")
    theirs = found.checkpoint.learner_counters
    for name in ("optimizer.num_attempts", "learner.num_updates"):
        assert learner.counters()[name] == (theirs[name] if part == "step" else 0)
    for name, tensor in learner.tensors().items():
        assert tensor.equal(found.checkpoint.learner_tensors[name])


def found_config(runs: Path) -> RunConfig:
    return make_config(runs, iterations=9, label="new")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"run__restore_from": "{runs}/nowhere"}, ConfigError, "expected the folder of a run or of a"),
        ({"run__restore_from": "{runs}"}, CheckpointError, "manifest.json: is missing"),
        ({"run__seed": 4}, ConfigError, 'run.restore: "tasks" are those of run.seed'),
        ({"rollout__env_name": "FrozenLake"}, ConfigError, 'run.restore: "tasks" are those of run.seed'),
        ({"training__iterations_per_epoch": 4}, ConfigError, "is of step 4 of 4, so that nothing is left to train"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    runs: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    told = {key: value.format(runs=runs) if isinstance(value, str) else value for key, value in changes.items()}
    values = {"run__restore": ALL, "run__restore_from": str(runs / "whole"), **told}
    with pytest.raises(error, match=message):
        find_restored(make_config(runs, **{"iterations": 9, "label": "new", **values}))


def test_an_optimizer_of_other_parameters_is_refused(runs: Path) -> None:
    found = restored(runs, "optimizer")
    config = make_config(runs, iterations=9, label="new", model__trainer_mode="lora")
    learner = build.build_learner(config, build.build_policy(config))
    with pytest.raises(ConfigError, match=r'"optimizer" of .* not trained here, or of another kind'):
        found.restore(learner)


def test_a_damaged_newest_checkpoint_is_passed_over_and_left_where_it_is(runs: Path, tmp_path: Path) -> None:
    newest = checkpoint(runs, "whole", 4) / "resume" / "state.json"
    kept = newest.read_text()
    newest.write_text(kept.replace("4", "5", 1))
    try:
        found = restored(runs, "step")
    finally:
        newest.write_text(kept)
    assert found.state.step == 2
    notes: list[str] = []
    found.record(RunRecorder.create(tmp_path / "new", ""), QuietProgress(notes.append))
    assert "state.json: is damaged" in notes[0]
    assert isinstance(found.checkpoint, Checkpoint)
    assert json.loads(kept)["trainer"]["step"] == 4
    assert dataclasses.asdict(found.state)["num_tasks"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run__restore": ("weights",)}, "run.restore: expected run.restore_from with it"),
        ({"run__restore_from": "runs/x"}, "run.restore: expected the parts of run.restore_from"),
        ({"run__restore": ("step", "step"), "run__restore_from": "runs/x"}, "run.restore: names a part twice"),
        ({"run__restore": ("memory",), "run__restore_from": "runs/x"}, "run.restore"),
    ],
)
def test_parts_and_their_source_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, iterations=1, label="new", **changes)
