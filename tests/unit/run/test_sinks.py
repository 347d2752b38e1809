"""What sinks show of a run, and that none of them can end it.

TensorBoard is read back from its own event files, and W&B from the file that its offline mode writes. For what W&B
refuses, it is stood in for by a module with the calls that are made of it. Trackio and MLflow: tests/foreign.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from gspo_gym.config.services import SinkName
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.run.registry import read_run
from gspo_gym.run.report.page_data import run_values
from gspo_gym.run.sinks import (
    EPISODE_COLUMNS,
    SINK_NAMES,
    EpisodeRow,
    Sink,
    check_sinks,
    evaluation_numbers,
    open_sinks,
)
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn

CONFIG = {"run": {"seed": 3}, "training": {"learning_rate": 1e-3}}


def open_them(report_to: list[str], folder: Path, **changes: Any) -> list[Sink]:
    arguments = {"project": None, "tags": ("a", "b"), "run_name": "quickstart", "config": CONFIG} | changes
    return open_sinks(report_to, folder=folder, **arguments)


class ListSink:
    """Remembers what it is given; from the `fails_at`-th call on it raises, as a service that went away does."""

    name = "list"

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, list[EpisodeRow]]] = []
        self.reports: list[tuple[int, str]] = []
        self.num_closed = 0
        self._fails_at = fails_at

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._fails_at is not None and len(self.calls) + 1 >= self._fails_at:
            raise ConnectionError("the service is down")
        self.calls.append((step, dict(values)))

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        self.tables.append((step, list(rows)))

    def report(self, step: int, path: Path) -> None:
        self.reports.append((step, path.read_text()))

    def close(self) -> None:
        self.num_closed += 1


class FakeRun:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.id = arguments["id"] or "id-of-the-service"
        self.rows: list[dict[str, Any]] = []
        self.step_metrics: dict[str, str] = {}
        self.is_finished = False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.step_metrics[name] = step_metric

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.errors = ModuleType("wandb.errors")
        self.errors.Error = type("Error", (Exception,), {})
        self.runs: list[FakeRun] = []
        self.refusal: str | None = None

    def init(self, **arguments: Any) -> FakeRun:
        if self.refusal is not None:
            raise self.errors.Error(self.refusal)
        self.runs.append(FakeRun(arguments))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    return fake


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: name -> (step, value), in the order of the file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """What TensorBoard has of a run's texts, but for its config: name -> (step, Markdown)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        name.removesuffix("/text_summary"): [
            (event.step, make_ndarray(event.tensor_proto)[0].decode()) for event in accumulator.Tensors(name)
        ]
        for name in accumulator.Tags()["tensors"]
        if not name.startswith("config")
    }


EPISODE = Trajectory(
    trajectory_id="eval_000002/0",
    attempt=0,
    task=Task("Guess", 7),
    sampling_seed=0,
    segments=(Segment([0, 5, 6], [False, True, True], [0.0, -1.0, -1.0], [-1, 0, 0], [-1, 0, 0]),),  # type: ignore[arg-type]
    turns=(Turn(0, 0, (0, 1), (1, 3), FinishReason.STOP, reward=0.5),),
    messages=(Message("user", "a | b"), Message("assistant", "<img src=x> *5*\x1b[2J")),
    outcome=Outcome.TERMINATED,
    success=True,
)


def record_two_steps(recorder: RunRecorder) -> None:
    """Metrics of steps 1 and 2, of which one is not finite, and the evaluation after step 2."""
    recorder.metrics(1, {"rollout/reward_mean": 0.25, "reward/found": 0.5})
    recorder.metrics(2, {"rollout/reward_mean": 0.75, "loss/total": float("nan")})
    recorder.event(
        "evaluation",
        2,
        {"env_id": "Guess", "success_rate": 0.5, "mean_return": None, "mean_turns": 3.0, "num_episodes": 4, "rows": []},
    )


EXPECTED_ROWS = [
    (1, {"rollout/reward_mean": 0.25, "reward/found": 0.5}),
    (2, {"rollout/reward_mean": 0.75}),  # a NaN is in the folder's events, and is no point of a curve
    (2, {"evaluation/success_rate": 0.5, "evaluation/mean_turns": 3.0, "evaluation/num_episodes": 4.0}),
]


def test_metrics_and_evaluations_reach_every_sink_in_order(tmp_path: Path) -> None:
    first, second = ListSink(), ListSink()
    recorder = RunRecorder.create(tmp_path, "", sinks=[first, second])
    record_two_steps(recorder)
    recorder.close()
    recorder.close()
    assert first.calls == EXPECTED_ROWS == second.calls
    assert (first.num_closed, second.num_closed) == (1, 1)


def test_a_sink_that_fails_is_reported_once_and_nothing_else_stops(tmp_path: Path) -> None:
    broken, sound = ListSink(fails_at=2), ListSink()
    recorder = RunRecorder.create(tmp_path, "", sinks=[broken, sound])
    record_two_steps(recorder)
    recorder.close()
    assert broken.calls == EXPECTED_ROWS[:1]
    assert broken.num_closed == 0
    assert sound.calls == EXPECTED_ROWS
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    reports = [line for line in read_events(tmp_path) if line["kind"] == "sink_failed"]
    assert [(line["step"], line["data"]) for line in reports] == [
        (2, {"sink": "list", "error": "ConnectionError('the service is down')"})
    ]


def test_a_sink_that_cannot_close_is_reported_too(tmp_path: Path) -> None:
    sink = ListSink()
    sink.close = lambda: (_ for _ in ()).throw(OSError("disk full"))  # type: ignore[method-assign]
    recorder = RunRecorder.create(tmp_path, "", sinks=[sink])
    recorder.event("finished", 0, {"status": "completed"})
    recorder.close()
    assert read_events(tmp_path)[-1]["data"] == {"sink": "list", "error": "OSError('disk full')"}
    assert read_run(tmp_path).status == "completed"  # although its end is not the last event


def test_a_page_that_cannot_be_made_is_reported_and_the_sinks_go_on(tmp_path: Path) -> None:
    sink = ListSink()
    recorder = RunRecorder.create(tmp_path, "", sinks=[sink])
    recorder.report(lambda: tmp_path.joinpath("nowhere").rename(tmp_path / "report.html"))
    record_two_steps(recorder)
    recorder.report(lambda: tmp_path / "config.toml")
    assert [event["data"]["sink"] for event in read_events(tmp_path) if event["kind"] == "sink_failed"] == ["report"]
    assert sink.calls == EXPECTED_ROWS
    assert sink.reports == [(2, (tmp_path / "config.toml").read_text())]


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    config = "[model]\nlabel = 'quickstart'\n"
    recorder = RunRecorder.create(tmp_path, config, sinks=open_them(["tensorboard"], tmp_path))
    record_two_steps(recorder)
    recorder.episodes("eval_000002", [EPISODE])
    recorder.episodes("step_000002", [EPISODE])  # training episodes make no table
    recorder.report(lambda: tmp_path / "report_.html")
    recorder.close()
    assert texts(tmp_path) == {
        "report": [(2, str(tmp_path / "report_.html").replace("_", "&#95;"))],
        "evaluation/episodes": [
            (
                2,
                "| episode | task | outcome | success | return | turns | tokens | conversation |\n"
                "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
                "| eval&#95;000002/0 | Guess&#35;7 | terminated | True | 0.5 | 1 | 2 | user: a &#124; b<br>"
                "assistant: &#60;img src=x&#62; &#42;5&#42;⟨001b⟩&#91;2J |",
            )
        ],
    }
    # The names are the record's, and the page's.
    shown = {name.partition("/")[0] for name in scalars(tmp_path)}
    assert set(run_values(tmp_path)["metrics"]["values"]) - {"loss/total"} == {"rollout/reward_mean", "reward/found"}
    assert shown == {"rollout", "reward", "evaluation"}
    # all of these numbers are exact in TensorBoard's float32
    assert scalars(tmp_path) == {
        "rollout/reward_mean": [(1, 0.25), (2, 0.75)],
        "reward/found": [(1, 0.5)],
        "evaluation/success_rate": [(2, 0.5)],
        "evaluation/mean_turns": [(2, 3.0)],
        "evaluation/num_episodes": [(2, 4.0)],
    }


def test_tensorboard_hides_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    for first_step, resume_step in ((1, None), (2, 1)):
        (sink,) = open_them(["tensorboard"], tmp_path, resume_step=resume_step)
        for step in range(first_step, 4):
            sink.write(step, {"loss/total": 10.0 * first_step + step})
        sink.close()
    # the first run's steps 2 and 3 (12 and 13) are gone
    assert scalars(tmp_path) == {"loss/total": [(1, 11.0), (2, 22.0), (3, 23.0)]}


def test_wandb_gets_project_tags_name_config_and_rows_by_our_step(tmp_path: Path, wandb: FakeWandb) -> None:
    folder = tmp_path / "runs" / "label"
    recorder = RunRecorder.create(folder, "", sinks=open_them(["wandb"], folder, project="mine"))
    record_two_steps(recorder)
    recorder.close()
    (run,) = wandb.runs
    assert run.arguments == {
        "project": "mine",
        "tags": ["a", "b"],
        "name": "quickstart",
        "config": CONFIG,
        "dir": str(folder),
        "id": None,
        "resume": None,
    }
    assert run.rows == [{"step": step, **values} for step, values in EXPECTED_ROWS]
    assert run.step_metrics == {"*": "step"}
    assert run.is_finished


def test_a_resumed_training_goes_on_in_the_same_wandb_run(tmp_path: Path, wandb: FakeWandb) -> None:
    open_them(["wandb"], tmp_path)
    open_them(["wandb"], tmp_path, resume_step=7)
    first, second = wandb.runs
    assert (first.arguments["id"], first.arguments["resume"]) == (None, None)
    assert (second.arguments["id"], second.arguments["resume"]) == ("id-of-the-service", "allow")


def test_the_project_has_a_default(tmp_path: Path, wandb: FakeWandb) -> None:
    open_them(["wandb"], tmp_path)
    assert wandb.runs[0].arguments["project"] == "gspo-gym"


def test_a_refusal_by_wandb_says_what_to_set_and_leaves_no_event_files(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.refusal = "no API key configured"
    with pytest.raises(ConfigError, match=r"tracking\.report_to: .*no API key configured.*WANDB_API_KEY"):
        open_them(["tensorboard", "wandb"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wandb_without_a_key_is_refused_before_it_asks(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=r"tracking\.report_to: W&B has no key: set WANDB_API_KEY"):
        check_sinks(["wandb"])
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_sinks(["wandb"])  # what `wandb login` has written
    (tmp_path / "netrc").write_text("machine elsewhere.example login user password secret\n")
    with pytest.raises(ConfigError):
        check_sinks(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_sinks(["wandb"])
    assert wandb.runs == []


def test_a_sink_that_is_open_is_closed_when_the_next_cannot_open(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", fail)
    with pytest.raises(OSError, match="disk full"):
        open_them(["wandb", "tensorboard"], tmp_path)
    assert wandb.runs[0].is_finished


@pytest.mark.parametrize("name", SINK_NAMES)
def test_a_missing_package_is_answered_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what makes an import fail
    with pytest.raises(MissingExtraError, match=rf"pip install 'gspo-gym\[{name}\]'"):
        open_them([name], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_sink_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tensorbord' is no sink; did you mean 'tensorboard'"):
        open_them(["tensorbord"], tmp_path)


def test_no_sinks_open_no_package_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert open_them([], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def wandb_records(path: Path) -> Iterator[Any]:
    """The protobuf records of W&B's file: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:  # the end of a block is too short for a part's header
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.slow
def test_wandb_itself_keeps_an_offline_run_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    (folder / "episodes").mkdir(parents=True)
    for resume_step in (None, 2):
        sinks = open_them(["wandb"], folder, resume_step=resume_step)
        recorder = RunRecorder(folder, last_step=resume_step, sinks=sinks)
        recorder.metrics(3, {"rollout/reward_mean": 0.25})
        recorder.episodes("eval_000003", [EPISODE])
        recorder.report(lambda: folder / "wandb_id.txt")
        recorder.close()
        assert not (folder / "events.jsonl").exists()  # no sink_failed
    import wandb

    wandb.teardown()  # until then its service has not written all
    run_id = (folder / "wandb_id.txt").read_text().strip()
    files = list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{run_id}"}
    assert len(files) == 2
    for file in files:
        records = list(wandb_records(file))
        rows = [
            {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        assert [row["step"] for row in rows] == [3, 3]
        assert rows[0]["rollout/reward_mean"] == 0.25
        said = "user: a | b\nassistant: <img src=x> *5*⟨001b⟩[2J"
        (table,) = file.parent.glob("files/media/table/evaluation/episodes_*.table.json")
        assert json.loads(table.read_text()) == {
            "columns": list(EPISODE_COLUMNS),
            "data": [["eval_000002/0", "Guess#7", "terminated", True, 0.5, 1, 2, said]],
        }
        artifacts = [each.artifact for each in records if each.WhichOneof("record_type") == "artifact"]
        (report,) = [each for each in artifacts if each.type == "report"]
        assert report.name == f"report-{run_id}"
        assert [entry.path for entry in report.manifest.contents] == ["wandb_id.txt"]


def test_a_configuration_can_name_every_sink() -> None:
    assert set(get_args(SinkName)) == set(SINK_NAMES)


class Counter(Sink):
    """All that a stranger's logger needs."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)


def test_a_sink_of_ones_own_needs_no_more_than_write(tmp_path: Path) -> None:
    sink = Counter()
    recorder = RunRecorder.create(tmp_path, "", sinks=[sink])
    record_two_steps(recorder)
    recorder.episodes("eval_000002", [EPISODE])
    recorder.report(lambda: tmp_path / "config.toml")
    recorder.close()
    assert sink.steps == [1, 2, 2]
    assert [event["kind"] for event in read_events(tmp_path) if event["kind"] == "sink_failed"] == []


def test_the_evaluations_of_several_environments_have_curves_of_their_own() -> None:
    parts = {"a": {"success_rate": 1.0, "mean_return": 3.0}, "b": {"success_rate": None, "mean_return": 1.0}}
    numbers = evaluation_numbers({"success_rate": 1.0, "mean_return": 2.0, "parts": parts})
    assert numbers == {
        "evaluation/success_rate": 1.0,
        "evaluation/mean_return": 2.0,
        "evaluation/a/success_rate": 1.0,
        "evaluation/a/mean_return": 3.0,
        "evaluation/b/mean_return": 1.0,
    }
