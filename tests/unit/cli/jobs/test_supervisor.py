"""Jobs as child processes: order, failures, cancels, and what a killed service left behind. The trainer is scripted."""

from __future__ import annotations

import functools
import itertools
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served_jobs import FAKE_TRAINER, body_of

from gspo_gym.cli.jobs.records import Follower, Machine, parse_request, toml_of
from gspo_gym.cli.jobs.store import Job, Store
from gspo_gym.cli.jobs.supervisor import Supervisor
from gspo_gym.diagnosis.alarms import ALARMS
from gspo_gym.run.recording import RunRecorder


class Place:
    """A service's folder: what is queued there, and supervisors one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts_file = folder, folder / "starts"
        self.store = Store(folder / "jobs.sqlite3")
        self.supervisors: list[Supervisor] = []

    def queue(self, **script: Any) -> str:
        body = body_of({"starts": str(self.starts_file), **script})
        config = parse_request(body, runs=self.folder / "runs", machine=Machine())
        config_of = functools.partial(toml_of, config)
        return self.store.create({"data": {}}, base=str(config.model.base), config_of=config_of, max_queued=9)[0].job_id

    def supervisor(self, **settings: Any) -> Supervisor:
        """Another one, as after a restart of the service."""
        made = Supervisor(self.store, self.folder, FAKE_TRAINER, os.environ, **settings)
        self.supervisors.append(made)
        return made

    def ended(self, supervisor: Supervisor, job_id: str) -> Job:
        return self.until(supervisor, job_id, lambda job: job.has_ended)

    def until(self, supervisor: Supervisor, job_id: str, holds: Callable[[Job], bool]) -> Job:
        """The job when something holds; the supervisor looks again and again meanwhile."""
        while True:
            supervisor.look()
            job = self.store.require(job_id)
            if holds(job):
                return job

    def starts(self) -> list[str]:
        return self.starts_file.read_text(encoding="utf-8").splitlines() if self.starts_file.exists() else []

    def types(self, job_id: str) -> list[str]:
        events = self.store.events(job_id, after=0, limit=999)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        return [event.type for event in events]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for supervisor in made.supervisors:
        supervisor.reap()
    made.store.close()


def test_a_jobs_records_become_its_events_in_their_order(place: Place) -> None:
    job_id = place.queue(events=2)
    job = place.ended(place.supervisor(), job_id)
    assert (job.status, job.attempt, job.error) == ("succeeded", 1, None)
    assert place.types(job_id) == [
        "rl.job.created",
        "rl.job.initializing",
        "rl.train.started",
        "rl.train.step",
        "rl.checkpoint.saved",
        "rl.run.judge_paused",
        "rl.run.judge_paused",
        "rl.train.step",
        "rl.train.completed",
        "rl.job.completed",
    ]
    assert [event.phase for event in place.store.events(job_id, only_phases=True)] == [
        "queued", "initializing", "training", "succeeded"]  # fmt: skip


def test_every_alarm_of_a_run_is_a_warning_to_the_jobs_client(place: Place) -> None:
    folder = place.folder / "alarmed"
    folder.mkdir()
    job, recorder = place.store.require(place.queue()), RunRecorder(folder, last_step=0)
    for kind in ALARMS:
        recorder.event(kind, 1, {"reason": "it was seen"})
    Follower(place.store, job, folder).take_in(job, is_last_attempt=False)
    levels = {event.type: event.level for event in place.store.events(job.job_id, after=0, limit=999)}
    assert {levels[f"rl.run.{kind}"] for kind in ALARMS} == {"warning"}


@pytest.mark.slow
def test_one_job_runs_at_a_time_and_the_queue_keeps_its_order(place: Place) -> None:
    pipe = place.folder / "pipe"
    os.mkfifo(pipe)
    first, second = place.queue(pause=str(pipe)), place.queue()
    supervisor = place.supervisor()
    place.until(supervisor, first, lambda job: job.status == "training")
    supervisor.look()
    assert place.store.require(second).status == "queued"
    pipe.write_bytes(b"")
    assert place.ended(supervisor, second).status == "succeeded"
    assert place.starts() == [first, second]


def test_two_jobs_run_at_once_where_two_may(place: Place) -> None:
    pipes = [place.folder / "one", place.folder / "two"]
    for pipe in pipes:
        os.mkfifo(pipe)
    jobs = [place.queue(pause=str(pipe)) for pipe in pipes]
    supervisor = place.supervisor(max_running=2)
    for job_id in jobs:
        place.until(supervisor, job_id, lambda job: job.status == "training")
    for pipe in pipes:
        pipe.write_bytes(b"")
    assert [place.ended(supervisor, job_id).status for job_id in jobs] == ["succeeded", "succeeded"]


def test_a_crashed_job_fails_with_the_last_error_of_its_log(place: Place) -> None:
    job_id = place.queue(ending="crash")
    job = place.ended(place.supervisor(), job_id)
    assert job.status == "failed"
    assert job.error == "the job's process ended with status 3: MemoryError: no room for the model"
    assert place.types(job_id)[-1] == "rl.job.failed"


def test_a_run_that_says_why_it_failed_is_believed(place: Place) -> None:
    job = place.ended(place.supervisor(), place.queue(ending="failed"))
    assert (job.status, job.error) == ("failed", "RolloutError: all episodes fail")


def test_a_trainer_that_is_not_there_fails_the_job(place: Place) -> None:
    supervisor = Supervisor(place.store, place.folder, ["/no/such/trainer"], os.environ)
    job = place.ended(supervisor, place.queue())
    assert job.status == "failed"
    assert "/no/such/trainer" in (job.error or "")


def test_a_crashed_job_goes_on_from_its_checkpoint_where_it_may_be_tried_again(place: Place) -> None:
    job_id = place.queue(ending="crash once", events=1)
    job = place.ended(place.supervisor(retries=1), job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert place.starts() == [job_id, f"{job_id} --resume"]
    types = place.types(job_id)
    assert types.count("rl.train.started") == types.count("rl.train.resumed") == types.count("rl.job.retried") == 1
    assert types.count("rl.run.judge_paused") == 2  # one of each attempt, none twice


def test_an_attempt_without_a_checkpoint_begins_anew_and_the_first_is_kept_aside(place: Place) -> None:
    job_id = place.queue(ending="crash early", events=1)
    job = place.ended(place.supervisor(retries=1), job_id)
    assert (job.status, place.starts()) == ("succeeded", [job_id, job_id])
    assert place.types(job_id).count("rl.train.started") == 2
    assert {path.name for path in (place.folder / "runs").iterdir()} == {job_id, f"{job_id}.1"}


def test_a_failed_attempt_that_is_followed_by_another_does_not_end_the_clients_wait(place: Place) -> None:
    job_id = place.queue(ending="failed")
    assert place.ended(place.supervisor(retries=1), job_id).status == "failed"
    ends = [kind for kind in place.types(job_id) if kind in ("rl.train.interrupted", "rl.train.failed")]
    assert ends == ["rl.train.interrupted", "rl.train.failed"]


def test_a_cancelled_job_is_stopped_by_sigterm(place: Place) -> None:
    pipe = place.folder / "pipe"
    os.mkfifo(pipe)
    job_id = place.queue(pause=str(pipe))
    supervisor = place.supervisor(retries=3)
    place.until(supervisor, job_id, lambda job: job.status == "training")
    place.store.update(job_id, cancelled_at=1.0)
    assert place.ended(supervisor, job_id).status == "cancelled"
    assert place.types(job_id)[-2:] == ["rl.train.interrupted", "rl.job.cancelled"]
    assert place.starts() == [job_id], "a cancelled job is not tried again"


def test_a_cancelled_job_that_takes_no_sigterm_is_killed_when_its_time_is_over(place: Place) -> None:
    job_id = place.queue(ending="deaf")
    supervisor = place.supervisor(stop_seconds=0.0)
    place.until(supervisor, job_id, lambda job: job.status == "training")
    place.store.update(job_id, cancelled_at=1.0)
    assert place.ended(supervisor, job_id).status == "cancelled"
    assert place.types(job_id)[-2:] == ["rl.run.judge_paused", "rl.job.cancelled"]


def test_a_clock_that_is_set_shortens_no_cancelled_jobs_time(place: Place) -> None:
    job_id = place.queue(ending="deaf")
    hours = itertools.count(step=3600)  # each look is an hour later than the one before
    supervisor = place.supervisor(stop_seconds=60.0, clock=lambda: float(next(hours)))
    place.until(supervisor, job_id, lambda job: job.status == "training")
    place.store.update(job_id, cancelled_at=1.0)
    supervisor.look()
    job = place.store.require(job_id)
    assert job.signalled_at is not None
    assert job.pid is not None
    process = os.pidfd_open(job.pid)
    supervisor.look()
    assert select.select([process], [], [], 0.5)[0] == [], "it has been killed"
    os.close(process)
    os.killpg(job.pid, signal.SIGKILL)
    assert place.ended(supervisor, job_id).status == "cancelled"


@pytest.mark.slow
def test_what_a_dead_trainer_left_running_ends_with_the_job(place: Place) -> None:
    job_id = place.queue(ending="crash", child=1_000)
    job = place.ended(place.supervisor(), job_id)
    assert job.status == "failed"
    assert job.pid is not None
    while is_group(job.pid):  # until init has reaped it
        pass


def test_a_process_that_an_attempt_left_in_a_session_of_its_own_does_not_hold_up_the_next_one(place: Place) -> None:
    job_id = place.queue(ending="crash once", stray=1_000)
    job = place.ended(place.supervisor(retries=1), job_id)
    os.kill(int((place.folder / "stray.pid").read_text(encoding="utf-8")), signal.SIGKILL)
    assert (job.status, job.attempt) == ("succeeded", 2)


def test_a_clock_that_is_set_back_changes_no_order_of_a_jobs_events(place: Place) -> None:
    job_id = place.queue(clock=3_600.0, events=2)
    before = place.supervisor()
    before.look()
    before.reap()  # all of it is read at once
    assert place.ended(place.supervisor(), job_id).status == "succeeded"
    assert [kind for kind in place.types(job_id) if kind != "rl.train.step"] == [
        "rl.job.created",
        "rl.job.initializing",
        "rl.train.started",
        "rl.checkpoint.saved",
        "rl.run.judge_paused",
        "rl.run.judge_paused",
        "rl.train.completed",
        "rl.job.completed",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ['{"schema": 1}', '{"schema": 1, "seq": 2, "step": 0, "kind": [], "time": 0, "data": {}}']
)
def test_a_job_with_records_of_an_unknown_form_ends_and_holds_up_no_other(place: Place, line: str) -> None:
    strange, other = place.queue(line=line), place.queue()
    supervisor = place.supervisor()
    assert place.ended(supervisor, other).status == "succeeded"
    job = place.store.require(strange)
    assert job.status == "failed"
    (event,) = (e for e in place.store.events(strange, after=0, limit=99) if e.type == "rl.job.records_damaged")
    assert "a record has no known form" in event.message


def is_group(pid: int) -> bool:
    """Whether a process of that group is there."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_job_that_was_claimed_and_not_started_is_started_once(place: Place) -> None:
    job_id = place.queue()
    place.store.update(job_id, status="initializing", attempt=1)  # as far as the service came before it was killed
    assert place.ended(place.supervisor(), job_id).status == "succeeded"
    assert place.starts() == [job_id]


def test_a_job_whose_process_was_started_and_not_noted_is_found(place: Place) -> None:
    pipe = place.folder / "pipe"
    os.mkfifo(pipe)
    job_id = place.queue(pause=str(pipe))
    started = place.until(place.supervisor(), job_id, lambda job: job.status == "training")
    place.store.update(job_id, pid=None, pid_started=None)
    after_restart = place.supervisor()
    after_restart.look()
    found = place.store.require(job_id)
    assert (found.status, found.pid, found.pid_started) == ("training", started.pid, started.pid_started)
    pipe.write_bytes(b"")
    assert place.ended(after_restart, job_id).status == "succeeded"
    assert place.starts() == [job_id]


@pytest.mark.parametrize(("ending", "status"), [("completed", "succeeded"), ("crash", "failed")])
def test_a_job_that_ended_while_no_service_ran_is_judged_by_its_folder(place: Place, ending: str, status: str) -> None:
    job_id = place.queue(ending=ending)
    before = place.supervisor()
    before.look()
    before.reap()
    job = place.ended(place.supervisor(), job_id)
    assert (job.status, place.starts()) == (status, [job_id])
    assert place.types(job_id).count("rl.run.judge_paused") == 3


def test_a_process_that_has_a_dead_trainers_id_is_not_taken_for_it(place: Place) -> None:
    job_id = place.queue(ending="crash")
    before = place.supervisor()
    before.look()
    before.reap()
    place.store.update(job_id, pid=os.getpid(), pid_started=1)
    assert place.ended(place.supervisor(), job_id).status == "failed"


def test_a_damaged_record_is_said_once_and_the_job_ends_all_the_same(place: Place) -> None:
    job_id = place.queue()
    supervisor = place.supervisor()
    events = place.folder / "runs" / job_id / "events.jsonl"
    events.parent.mkdir(parents=True)
    place.store.update(job_id, status="initializing", attempt=1)
    (place.folder / "jobs" / job_id).mkdir(parents=True)
    (place.folder / "jobs" / job_id / "pid.1").write_text("1", encoding="utf-8")
    events.write_text("what is this\n", encoding="utf-8")
    job = place.ended(supervisor, job_id)
    assert job.status == "failed"
    assert place.types(job_id).count("rl.job.records_damaged") == 1


def test_the_trainer_is_given_the_configuration_under_the_jobs_name(place: Place) -> None:
    job_id = place.queue()
    place.ended(place.supervisor(), job_id)
    summary = json.loads((place.folder / "runs" / job_id / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "completed"
