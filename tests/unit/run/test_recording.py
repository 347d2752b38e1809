"""The run folder: exact episodes, lines that survive a crash, and a resumed run in which no step appears twice."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.rollout.episode_files import read_episodes, trajectory_to_json
from gspo_gym.rollout.ledger import Dispatched, Disposition, Ledger, Terminal, imbalances, read_ledger
from gspo_gym.rollout.schedule import is_played_again
from gspo_gym.run.recording import EVENTS, METRICS, SUMMARY, RunRecorder, missing_records
from gspo_gym.run.records import read_events, read_metrics, read_run_id, read_summary
from gspo_gym.types import Outcome, Trajectory


def ticking() -> Iterator[float]:
    return iter(float(second) for second in range(100, 10_000))


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    clock = ticking()
    return RunRecorder.create(tmp_path / "runs" / "label", "[run]\nseed = 0\n", clock=lambda: next(clock))


# --- metrics, events, summary -----------------------------------------------------------------------------------------


def test_a_fresh_run_has_its_configuration_and_its_first_event(recorder: RunRecorder) -> None:
    (event,) = read_events(recorder.folder)
    run_id = read_run_id(recorder.folder)
    assert (recorder.folder / "config.toml").read_text(encoding="utf-8") == f"# run {run_id}\n[run]\nseed = 0\n"
    assert event == {"schema": 1, "seq": 1, "time": 100.0, "step": 0, "kind": "started", "data": {"run": run_id}}
    assert run_id is not None
    other = RunRecorder.create(recorder.folder.with_name("other"), "")
    assert read_run_id(other.folder) != run_id
    assert read_metrics(recorder.folder) == []


def test_metrics_are_one_flat_object_a_step(recorder: RunRecorder) -> None:
    recorder.metrics(1, {"loss/total": 0.1, "reward/found": 1, "ratio/mean": 1.0})
    recorder.metrics(3, {"loss/total": -2e-300})
    assert read_metrics(recorder.folder) == [
        {"schema": 1, "step": 1, "time": 101.0, "loss/total": 0.1, "reward/found": 1, "ratio/mean": 1.0},
        {"schema": 1, "step": 3, "time": 102.0, "loss/total": -2e-300},
    ]


def test_a_metric_that_is_not_finite_is_null_and_an_event_says_what_it_was(recorder: RunRecorder) -> None:
    recorder.metrics(1, {"loss/total": math.nan, "ratio/max": math.inf, "ratio/min": -math.inf, "ratio/mean": 1.0})
    (line,) = read_metrics(recorder.folder)
    assert [line[name] for name in ("loss/total", "ratio/max", "ratio/min", "ratio/mean")] == [None, None, None, 1.0]
    event = read_events(recorder.folder)[-1]
    assert (event["kind"], event["step"]) == ("nonfinite_metrics", 1)
    assert event["data"] == {"loss/total": "nan", "ratio/max": "inf", "ratio/min": "-inf"}
    assert "NaN" not in (recorder.folder / "metrics.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (6, {"loss/totl": 1.0}, "'loss/totl' is not explained in METRICS; did you mean 'loss/total'?"),
        (6, {"loss/total": "1"}, "loss/total: expected a number, got '1'"),
        (6, {"loss/total": True}, "loss/total: expected a number, got True"),
        (6, {"loss/total": None}, "loss/total: expected a number, got None"),
        (5, {"loss/total": 1.0}, "expected a step after 5, got 5"),
        (4, {"loss/total": 1.0}, "expected a step after 5, got 4"),
    ],
)
def test_metrics_that_nobody_explained_or_that_come_twice_are_refused_and_leave_no_line(
    recorder: RunRecorder, step: int, values: dict[str, Any], message: str
) -> None:
    recorder.metrics(5, {"loss/total": 0.0})
    with pytest.raises(RecordError, match=message.replace("?", r"\?")):
        recorder.metrics(step, values)
    assert [line["step"] for line in read_metrics(recorder.folder)] == [5]


def test_every_name_that_may_be_recorded_is_explained_in_a_sentence() -> None:
    for table in (METRICS, EVENTS, SUMMARY):
        assert all(sentence and not sentence.endswith(".") for sentence in table.values())
    assert all(name.count("/") == 1 for name in METRICS)


def test_events_have_a_known_kind_and_json_data(recorder: RunRecorder) -> None:
    recorder.event("evaluation", 3, {"rows": [1, 2]})
    assert read_events(recorder.folder)[-1]["data"] == {"rows": [1, 2]}
    with pytest.raises(RecordError, match="'evaluate' is not explained in EVENTS; did you mean 'evaluation'"):
        recorder.event("evaluate", 3)
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        recorder.event("evaluation", 3, {"x": object()})
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        recorder.event("evaluation", 3, {"x": math.nan})
    assert len(read_events(recorder.folder)) == 2


def test_the_summary_has_exactly_its_keys_and_is_replaced_whole(recorder: RunRecorder) -> None:
    values: dict[str, Any] = dict.fromkeys(SUMMARY, 1)
    recorder.summary(values)
    recorder.summary({**values, "status": "completed"})
    assert read_summary(recorder.folder) == {"schema": 1, **values, "status": "completed"}
    with pytest.raises(RecordError, match=r"missing or too many: \['step'\]"):
        recorder.summary({**values, "step": 3})
    del values["best_eval"]
    with pytest.raises(RecordError, match=r"missing or too many: \['best_eval'\]"):
        recorder.summary(values)
    assert read_summary(recorder.folder)["status"] == "completed"


def test_a_missing_summary_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"summary\.json: cannot be read"):
        read_summary(tmp_path)


def test_episodes_go_into_their_folder_under_a_plain_name(recorder: RunRecorder, rich_trajectory: Trajectory) -> None:
    recorder.episodes("step_000012", [rich_trajectory])
    [episode] = read_episodes(recorder.folder / "episodes" / "step_000012.jsonl.gz")
    assert trajectory_to_json(episode) == trajectory_to_json(rich_trajectory)
    for name in ("../x", "step_", "step_1.jsonl", "", "Step_1"):
        with pytest.raises(RecordError, match="expected a name like"):
            recorder.episodes(name, [])


def test_a_folder_that_holds_a_run_is_not_written_over(recorder: RunRecorder) -> None:
    before = (recorder.folder / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"holds a run already; go on with it \(--resume\)"):
        RunRecorder.create(recorder.folder, "")
    assert (recorder.folder / "config.toml").read_bytes() == before


def test_closing_twice_is_fine_and_keeps_what_was_written(recorder: RunRecorder) -> None:
    recorder.metrics(1, {"loss/total": 0.0})
    recorder.close()
    recorder.close()
    assert len(read_metrics(recorder.folder)) == 1


# --- crash and resume -------------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out_by_readers_and_removed_by_resume(recorder: RunRecorder) -> None:
    for step in (1, 2):
        recorder.metrics(step, {"loss/total": float(step)})
    for name in ("metrics.jsonl", "events.jsonl"):
        with (recorder.folder / name).open("a", encoding="utf-8") as file:
            file.write('{"schema": 1, "step": 3, "ti')
    assert [line["step"] for line in read_metrics(recorder.folder)] == [1, 2]
    assert [line["kind"] for line in read_events(recorder.folder)] == ["started"]
    resumed = RunRecorder.resume(recorder.folder, 2)
    resumed.metrics(3, {"loss/total": 3.0})
    assert [line["step"] for line in read_metrics(recorder.folder)] == [1, 2, 3]
    assert [line["kind"] for line in read_events(recorder.folder)] == ["started", "resumed"]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_file_and_line(recorder: RunRecorder) -> None:
    recorder.metrics(1, {"loss/total": 0.0})
    with (recorder.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"schema": 1, "st\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(recorder.folder)
    (recorder.folder / "metrics.jsonl").write_text('{"schema": 9, "step": 1}\n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"metrics\.jsonl:1: expected an object of schema 1"):
        RunRecorder.resume(recorder.folder, 0)


def test_a_resumed_run_has_every_step_once_and_keeps_what_it_did_again(
    recorder: RunRecorder, rich_trajectory: Trajectory
) -> None:
    folder = recorder.folder
    recorder.episodes("warmup", [rich_trajectory])
    for step in range(1, 6):
        recorder.metrics(step, {"loss/total": float(step)})
        recorder.episodes(f"step_{step:06d}", [rich_trajectory])
        recorder.tokens(step, b"tokens")
    recorder.episodes("eval_000003", [])
    recorder.episodes("eval_000005", [])

    resumed = RunRecorder.resume(folder, 3)
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3]
    kept = ["eval_000003", "step_000001", "step_000002", "step_000003", "warmup"]
    assert sorted(path.name.removesuffix(".jsonl.gz") for path in (folder / "episodes").iterdir()) == kept
    assert sorted(path.stem for path in (folder / "tokens").iterdir()) == ["step_000001", "step_000002", "step_000003"]
    event = read_events(folder)[-1]
    assert (event["kind"], event["step"]) == ("resumed", 3)
    assert event["data"] == {
        "folder": "discarded/resume_001",
        "metrics_lines": 2,
        "event_lines": 0,
        "ledger_lines": 0,
        "judgement_lines": 0,
        "episode_files": 3,
        "token_files": 2,
    }
    moved = folder / "discarded" / "resume_001"
    assert [line["step"] for line in read_metrics(moved)] == [4, 5]
    assert sorted(path.name for path in moved.iterdir()) == [
        "eval_000005.jsonl.gz",
        "events.jsonl",
        "ledger.jsonl",
        "metrics.jsonl",
        "step_000004.jsonl.gz",
        "step_000004.safetensors",
        "step_000005.jsonl.gz",
        "step_000005.safetensors",
    ]

    with pytest.raises(RecordError, match="expected a step after 3, got 3"):
        resumed.metrics(3, {"loss/total": 0.0})
    resumed.metrics(4, {"loss/total": 40.0})
    RunRecorder.resume(folder, 2)
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
    assert [line["loss/total"] for line in read_metrics(folder / "discarded" / "resume_002")] == [3.0, 40.0]


def test_events_after_the_checkpoint_that_a_run_goes_on_from_are_discarded(recorder: RunRecorder) -> None:
    for kind, step in [
        ("evaluation", 0),
        ("no_update", 1),
        ("checkpoint", 2),  # saved when the judge stopped in the evaluation of this step, and again after it
        ("finished", 2),
        ("resumed", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("judge_paused", 2),  # while step 3 was played
        ("no_update", 3),
        ("evaluation", 4),
        ("finished", 4),
    ]:
        recorder.event(kind, step)
    RunRecorder.resume(recorder.folder, 2)
    kinds = ["started", "evaluation", "no_update", "checkpoint", "finished", "resumed", "evaluation", "checkpoint"]
    assert [event["kind"] for event in read_events(recorder.folder)] == [*kinds, "resumed"]
    discarded = read_events(recorder.folder / "discarded" / "resume_001")
    assert [event["kind"] for event in discarded] == ["judge_paused", "no_update", "evaluation", "finished"]


def test_without_an_event_of_the_checkpoint_the_steps_decide_which_events_stay(recorder: RunRecorder) -> None:
    for kind, step in [("evaluation", 0), ("evaluation", 2), ("no_update", 3)]:  # killed between saving and saying so
        recorder.event(kind, step)
    RunRecorder.resume(recorder.folder, 2)
    assert [e["kind"] for e in read_events(recorder.folder)] == ["started", "evaluation", "evaluation", "resumed"]


def test_events_are_cut_where_the_checkpoint_was_taken_also_if_a_kill_came_before_its_event(
    recorder: RunRecorder,
) -> None:
    before = ["started", "checkpoint", "evaluation"]
    (recorder.folder / "checkpoints" / "step_000000").mkdir(parents=True)
    recorder.event("checkpoint", 0)
    recorder.event("evaluation", 0)
    taken = recorder.last_seq
    for kind in ("no_update", "judge_paused"):  # played ahead; no "checkpoint" of the second one of step 0
        recorder.event(kind, 0)
    RunRecorder.resume(recorder.folder, 0, saved_seq=taken)
    assert [event["kind"] for event in read_events(recorder.folder)] == [*before, "checkpoint", "resumed"]
    RunRecorder.resume(recorder.folder, 0, saved_seq=taken)
    assert [event["kind"] for event in read_events(recorder.folder)] == [*before, "checkpoint", "resumed", "resumed"]


def test_a_resumed_ledger_has_each_attempt_once_and_with_an_end(recorder: RunRecorder) -> None:
    path = recorder.folder / "ledger.jsonl"
    earlier = Ledger(path)
    for name in ("kept", "killed", "again"):
        earlier.dispatch(Dispatched(name, 0, "test/Env-v0#1", 1, 2))
    earlier.settle(Terminal("kept", 0, Outcome.TERMINATED, Disposition.KEPT))
    with path.open("a") as file:
        file.write('{"event": "termi')  # torn by a kill
    RunRecorder.resume(recorder.folder, 2, is_played_again=lambda name: name == "again")
    later = Ledger(path)
    later.dispatch(Dispatched("again", 0, "test/Env-v0#1", 1, 2))
    later.settle(Terminal("again", 0, Outcome.TERMINATED, Disposition.KEPT))
    entries = read_ledger(path)
    assert imbalances(entries) == []
    ends = {entry.trajectory_id: entry.outcome for entry in entries if isinstance(entry, Terminal)}
    assert ends == {"kept": Outcome.TERMINATED, "killed": Outcome.CANCELLED, "again": Outcome.TERMINATED}
    (moved,) = read_ledger(recorder.folder / "discarded" / "resume_001" / "ledger.jsonl")
    assert moved.trajectory_id == "again"


def test_judgements_of_episodes_that_are_played_again_move_with_them(recorder: RunRecorder) -> None:
    path = recorder.folder / "judgements.jsonl"
    ids = ["warmup/000001/0", "step_000002/000000/0", "eval_000002/000000/0", "step_000003/000000/0", "eval_000003/0/0"]
    path.write_text("".join(json.dumps({"trajectory_id": each}) + "\n" for each in ids) + '{"trajec')  # torn by a kill
    again = partial(is_played_again, step=2, num_tasks=4, pending_tasks=())
    RunRecorder.resume(recorder.folder, 2, is_played_again=again)
    kept = [json.loads(line)["trajectory_id"] for line in path.read_text().splitlines()]
    moved = (recorder.folder / "discarded" / "resume_001" / "judgements.jsonl").read_text().splitlines()
    assert (kept, [json.loads(line)["trajectory_id"] for line in moved]) == (ids[:3], ids[3:])
    assert read_events(recorder.folder)[-1]["data"]["judgement_lines"] == 2


def test_resuming_where_nothing_came_later_discards_nothing(recorder: RunRecorder) -> None:
    recorder.metrics(1, {"loss/total": 0.0})
    RunRecorder.resume(recorder.folder, 1)
    assert not (recorder.folder / "discarded").exists()
    assert read_events(recorder.folder)[-1]["data"] == {}


@pytest.mark.parametrize(
    ("recorded", "gone"),
    [((10, 20), []), ((1, 2, 3, 4), []), ((), [1, 2, 3, 4]), ((2, 4), [1, 3])],
    ids=["every ten", "whole", "none", "half"],
)
def test_steps_that_have_no_metrics_by_the_interval_are_not_gone(recorder, recorded, gone) -> None:
    for step in recorded:
        recorder.metrics(step, {"loss/total": 0.0})
    every_ten = recorded == (10, 20)
    found = missing_records(recorder.folder, 20 if every_ten else 4, 1, has_all_metrics=not every_ten)
    assert found == ({"metrics_steps": gone, "num_events": 0} if gone else {})
    recorder.event("changed", 2, {"training.log_interval": [1, 2]})
    assert missing_records(recorder.folder, 4, 1, has_all_metrics=True) == {}


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run to resume"):
        RunRecorder.resume(tmp_path, 0)


def test_what_was_recorded_before_a_kill_is_there_afterwards(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from gspo_gym.run.recording import RunRecorder
recorder = RunRecorder.create(Path({str(tmp_path / "run")!r}), "")
for step in range(1, 8):
    recorder.metrics(step, {{"loss/total": step / 7}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished = programs.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert finished.returncode == -9, finished.stderr
    lines = read_metrics(tmp_path / "run")
    assert [(line["step"], line["loss/total"]) for line in lines] == [(step, step / 7) for step in range(1, 8)]
