"""Trackio and MLflow themselves: what a run leaves in their own databases, also after it was resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.sinks import EPISODE_COLUMNS, open_sinks
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn

CONFIG = {"run": {"seed": 3}, "training": {"learning_rate": 1e-3}}
EPISODE = Trajectory(
    trajectory_id="eval_000003/0",
    attempt=0,
    task=Task("Guess", 7),
    sampling_seed=0,
    segments=(
        Segment(
            token_ids=np.array([0, 5, 6]),
            action_mask=np.array([False, True, True]),
            rollout_logprobs=np.array([0.0, -1.0, -1.0]),
            turn_index=np.array([-1, 0, 0]),
            weight_version=np.array([-1, 0, 0]),
        ),
    ),
    turns=(Turn(0, 0, (0, 1), (1, 3), FinishReason.STOP, reward=0.5),),
    messages=(Message("user", "a | b"), Message("assistant", "<img src=x> *5*\x1b[2J")),
    outcome=Outcome.TERMINATED,
    success=True,
)
ROW = ["eval_000003/0", "Guess#7", "terminated", True, 0.5, 1, 2]
SAID = "user: a | b\nassistant: <img src=x> *5*⟨001b⟩[2J"

Record = Callable[[str], Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Records step 3 with an episode and a page into a sink, and after a restart step 4; returns the folder."""

    def record_and_resume(name: str) -> Path:
        folder = tmp_path / "run"
        (folder / "episodes").mkdir(parents=True)
        (folder / "page.html").write_text("<p>page</p>")
        for resume_step, step in ((None, 3), (3, 4)):
            arguments: dict[str, Any] = {"project": None, "tags": (), "run_name": "quickstart", "config": CONFIG}
            sinks = open_sinks([name], folder=folder, resume_step=resume_step, **arguments)
            recorder = RunRecorder(folder, last_step=resume_step, sinks=sinks)
            recorder.metrics(step, {"rollout/reward_mean": step / 4, "reward/found it, at last": 1.0})
            recorder.episodes(f"eval_{step:06d}", [EPISODE])
            recorder.report(lambda: folder / "page.html")
            recorder.close()
        assert not (folder / "events.jsonl").exists()  # no sink_failed
        return folder

    return record_and_resume


def test_trackio_keeps_a_resumed_run_in_one_run_of_its_database(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which it reads when it is imported
    trackio = pytest.importorskip("trackio")
    folder = record("trackio")
    (run,) = trackio.Api().runs("gspo-gym")
    assert run.name == (folder / "trackio_run.txt").read_text().strip()
    assert run.name.startswith("quickstart-")
    assert {name: run.config[name] for name in CONFIG} == CONFIG
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    lines = storage.get_logs("gspo-gym", run.name)
    points = [(line["step"], line["rollout/reward_mean"]) for line in lines if "rollout/reward_mean" in line]
    assert points == [(3, 0.75), (4, 1.0)]
    (table, _) = [line["evaluation/episodes"] for line in lines if "evaluation/episodes" in line]
    # No text is markup in Trackio's tables, either: < > * [ | and # are character references.
    said = "user: a &#124; b<br>assistant: &#60;img src=x&#62; &#42;5&#42;⟨001b⟩&#91;2J"
    cells = ["eval&#95;000003/0", "Guess&#35;7", *ROW[2:], said]
    assert table["_value"] == [dict(zip(EPISODE_COLUMNS, cells, strict=True))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, which MLflow's store causes
def test_mlflow_keeps_a_resumed_run_in_one_run_of_its_store(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)  # where its files go then
    folder = record("mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("gspo-gym").experiment_id])
    assert run.info.run_id == (folder / "mlflow_run.txt").read_text().strip()
    assert (run.info.run_name, run.info.status) == ("quickstart", "FINISHED")
    points = client.get_metric_history(run.info.run_id, "rollout/reward_mean")
    assert [(point.step, point.value) for point in points] == [(3, 0.75), (4, 1.0)]
    assert run.data.metrics["reward/found it_ at last"] == 1.0  # a comma is not allowed there
    files = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, dst_path=str(tmp_path)))
    assert json.loads((files / "config.json").read_text()) == CONFIG
    assert (files / "page.html").read_text() == "<p>page</p>"
    table = json.loads((files / "evaluation/episodes_000003.json").read_text())
    assert table == {"columns": list(EPISODE_COLUMNS), "data": [[*ROW, SAID]]}
