"""A reader with a cursor gets each event once and in order: torn lines, old files, and runs resumed under its hands."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from gspo_gym.errors import RecordError
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import EventReader, read_events


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    return RunRecorder.create(tmp_path / "run", "")


def seqs(events: list[dict[str, object]]) -> list[object]:
    return [event["seq"] for event in events]


def test_events_are_numbered_from_one_also_when_threads_record_them(recorder: RunRecorder) -> None:
    threads = [threading.Thread(target=lambda: [recorder.event("no_update", 1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seqs(read_events(recorder.folder)) == list(range(1, 202))
    assert seqs(read_events(recorder.folder, after=199)) == [200, 201]


def test_an_event_that_could_not_be_written_takes_no_number(recorder: RunRecorder) -> None:
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        recorder.event("no_update", 1, {"bad": object()})
    recorder.event("no_update", 1)
    assert seqs(read_events(recorder.folder)) == [1, 2]


def test_a_reader_waits_for_the_rest_of_a_line_and_reads_no_line_twice(recorder: RunRecorder) -> None:
    path = recorder.folder / "events.jsonl"
    reader = EventReader(recorder.folder)
    assert seqs(reader.read()) == [1]
    line = json.dumps({"schema": 1, "seq": 2, "time": 0.0, "step": 1, "kind": "no_update", "data": {"text": "zwölf"}})
    for part in (line[:20], line[20:]):
        assert reader.read() == []
        with path.open("a") as file:
            file.write(part)
    with path.open("a") as file:
        file.write("\n")
    assert seqs(reader.read()) == [2]
    first, last, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"x" * len(first) + b"\n" + last + b"\n")  # what was read is not read again
    assert reader.read() == []


def test_a_damaged_line_is_named_by_its_number_however_often_it_is_read(recorder: RunRecorder) -> None:
    reader = EventReader(recorder.folder)
    reader.read()
    with (recorder.folder / "events.jsonl").open("a") as file:
        file.write("{]\n")
    for _ in range(2):
        with pytest.raises(RecordError, match=r"events\.jsonl:2: not JSON"):
            reader.read()


def test_a_run_that_does_not_exist_yet_is_followed_from_its_first_event(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "run")
    assert reader.read() == []
    RunRecorder.create(tmp_path / "run", "")
    assert [event["kind"] for event in reader.read()] == ["started"]


def test_every_reader_gets_each_event_once_and_in_order_however_often_the_run_is_resumed(recorder: RunRecorder) -> None:
    """Readers look at random moments of a run that is resumed 20 times, each time after losing some steps."""
    random = np.random.default_rng(5)
    readers = [EventReader(recorder.folder) for _ in range(8)]
    told: list[list[tuple[int, float]]] = [[] for _ in readers]
    recorded = [(event["seq"], event["time"]) for event in read_events(recorder.folder)]
    clock = iter(range(10_000))
    step = 0
    for _ in range(20):
        lost = int(random.integers(0, step + 1))
        for _ in range(int(random.integers(1, 12))):
            step += 1
            kind = ("no_update", "checkpoint", "finished")[int(random.integers(3))]
            recorder.event(kind, step)
            for k in np.flatnonzero(random.random(len(readers)) < 0.1):
                told[k] += [(event["seq"], event["time"]) for event in readers[k].read()]
        recorded += [(e["seq"], e["time"]) for e in read_events(recorder.folder) if e["seq"] > recorded[-1][0]]
        step -= lost
        recorder = RunRecorder.resume(recorder.folder, step, clock=lambda: float(next(clock)))
    recorded += [(e["seq"], e["time"]) for e in read_events(recorder.folder) if e["seq"] > recorded[-1][0]]
    assert [seq for seq, _ in recorded] == list(range(1, len(recorded) + 1))
    for reader, seen in zip(readers, told, strict=True):
        seen += [(event["seq"], event["time"]) for event in reader.read()]
        assert seen == recorded
    for after in (0, 7, len(recorded) - 1, len(recorded)):
        assert [(e["seq"], e["time"]) for e in read_events(recorder.folder, after=after)] == recorded[after:]
    kept = read_events(recorder.folder)
    assert len(kept) < len(recorded)  # the run's own record is without what was done again
    assert seqs(kept) == sorted({event["seq"] for event in kept})


def test_events_of_an_earlier_version_are_numbered_by_their_lines_and_a_resumed_run_counts_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    old = [{"schema": 1, "time": 0.0, "step": step, "kind": "no_update", "data": {}} for step in (1, 2, 3, 4)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    reader = EventReader(folder)
    assert [(event["seq"], event["step"]) for event in reader.read()] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    RunRecorder.resume(folder, 2).event("no_update", 3)
    assert seqs(read_events(folder)) == [1, 2, 5, 6]
    assert seqs(reader.read()) == [5, 6]
    assert seqs(read_events(folder, after=2)) == [3, 4, 5, 6]
