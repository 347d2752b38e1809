"""Run queued jobs, each in a child process that trains in its run folder; and what the service's routes share.

A child outlives the service: hours of training must not end because the service is restarted or killed. It holds a lock
that the service took before starting it, and writes its process id before it becomes the trainer. A new service can
therefore find every job's process, at whichever moment the last service was killed.

    jobs.sqlite3            jobs and events, see `store.py`
    inference.log           output of the model that clients talk with
    api-key                 made at the first start, if the environment gives none
    runs/JOB/               the run's folder
    jobs/JOB/config.toml    the child's configuration
    jobs/JOB/log.txt        its output
    jobs/JOB/pid.ATTEMPT    its process id
    jobs/JOB/lock.ATTEMPT   held by the living child
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from gspo_gym.base.files import make_folder, replace_file, take_lock, writing
from gspo_gym.base.http import read_json
from gspo_gym.cli.jobs.inference import Inference
from gspo_gym.cli.jobs.records import Export, Follower, Machine, checkpoints_of, last_error, model_id_of, push
from gspo_gym.cli.jobs.store import ACTIVE, Event, Job, Store
from gspo_gym.errors import GymError, RecordError, StorageError
from gspo_gym.remote.apps.client import AppKeys
from gspo_gym.remote.guard import RefusalError
from gspo_gym.run.process import start_of

# The shell writes its process id, then becomes the trainer, which keeps that id.
_START = 'echo $$ >"$1.tmp" && mv "$1.tmp" "$1" && shift && exec "$@"'
_POLL_SECONDS = 0.2  # between two looks at the children
_LOG = logging.getLogger(__name__)


class Supervisor:
    """The children of a jobs service; `start` runs them from a thread.

    Args:
        store: of the jobs. folder: of the service.
        command: that trains, before CONFIG.toml and --resume. environ: of the children.
        max_running: at once. retries: of a job after its process died or failed, each from its last checkpoint.
        stop_seconds: from a cancel until the process is killed.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        max_running: int = 1,
        retries: int = 0,
        stop_seconds: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._folder, self._clock = store, folder, clock
        self._command, self._environ = command, dict(environ)
        self._max_running, self._retries, self._stop_seconds = max_running, retries, stop_seconds
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._followers: dict[str, Follower] = {}
        self._failures: dict[str, str] = {}  # of the last look at a job
        # When a cancelled job's process was told, by the monotonic clock; after a restart, when it was seen.
        self._signal_times: dict[str, float] = {}
        self._wake_event, self._is_stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True, name="gspo-gym-jobs")

    def run_folder(self, job_id: str) -> Path:
        return self._folder / "runs" / job_id

    def start(self) -> None:
        """Begin to run jobs."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for the thread; the children go on."""
        self._is_stopping = True
        self.wake()
        self._thread.join()

    def reap(self) -> None:
        """Wait until the children of this supervisor have ended, without telling them to."""
        for child in self._children.values():
            child.wait()

    def wake(self) -> None:
        """Look at the queue now."""
        self._wake_event.set()

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self.look()
            except Exception:  # the service goes on, and looks again
                _LOG.exception("jobs: a look at the children failed")
            self._wake_event.wait(_POLL_SECONDS)
            self._wake_event.clear()

    def look(self) -> None:
        """Take in what running jobs recorded, conclude those that have ended, and start as many as may run."""
        for job in self._store.jobs(ACTIVE):
            self._try(self._watch, job)
        num_free = self._max_running - len(self._store.jobs(ACTIVE))
        for job in self._store.jobs(("queued",))[: max(0, num_free)]:
            self._try(self._begin, job)

    def _try(self, act: Callable[[Job], object], job: Job) -> None:
        try:
            act(job)
        except Exception as error:  # the other jobs go on, and this one is looked at again
            if self._failures.get(job.job_id) != str(error):  # said once, and not at every look
                _LOG.warning(
                    "jobs: a look at %s failed: %s", job.job_id, error, exc_info=not isinstance(error, GymError)
                )
            self._failures[job.job_id] = str(error)
        else:
            self._failures.pop(job.job_id, None)

    # One job

    def _watch(self, job: Job) -> None:
        if job.pid is None:
            job = self._adopt(job)
        is_alive = self._is_alive(job)
        self._take_in(job)
        if not is_alive:  # as it was before its records were read: none is missed
            self._conclude(self._store.require(job.job_id))
        elif job.cancelled_at is not None:
            self._end(job)

    def _take_in(self, job: Job) -> None:
        follower = self._followers.pop(job.job_id, None) or Follower(self._store, job, self.run_folder(job.job_id))
        try:
            follower.take_in(job, is_last_attempt=self._is_last_attempt(job))
        except RecordError as error:
            event = Event("rl.job.records_damaged", str(error), level="error", source=f"damaged {job.attempt}")
            self._store.record(job.job_id, [event])
        else:
            self._followers[job.job_id] = follower

    def _adopt(self, job: Job) -> Job:
        """Find the process that a killed service started but did not record; start one if there is none."""
        if self._is_locked(job):
            pid = self._pid_of(job)
            # None: the shell is just starting, and is found at the next look.
            return job if pid is None else self._store.update(job.job_id, pid=pid, pid_started=start_of(pid))
        if (pid := self._pid_of(job)) is not None:  # it has ended
            return self._store.update(job.job_id, pid=pid)
        if job.cancelled_at is not None:
            return job
        return self._spawn(job)

    def _is_alive(self, job: Job) -> bool:
        child = self._children.get(job.job_id)
        if child is not None:
            return child.poll() is None
        if not self._is_locked(job):  # a zombie and a reused process id hold no lock
            return False
        return job.pid is None or start_of(job.pid) == job.pid_started

    def _begin(self, job: Job) -> None:
        """Start a queued job, unless it was cancelled meanwhile."""
        with self._store.transaction():
            if self._store.require(job.job_id).status != "queued":
                return
            event = Event("rl.job.initializing", "the job's process starts", phase="initializing")
            job = self._store.update(job.job_id, event, attempt=1, started_at=self._clock())
        self._spawn(job)

    def _spawn(self, job: Job) -> Job:
        """Start the process of the job's attempt, which the store has already."""
        folder = self._folder / "jobs" / job.job_id
        try:
            make_folder(folder)
            replace_file(folder / "config.toml", job.config)
            lock = take_lock(folder / f"lock.{job.attempt}")
            if lock is None:  # as `_adopt`: the process is there
                return job
            try:
                has_checkpoint = bool(checkpoints_of(self.run_folder(job.job_id)))
                if not has_checkpoint:
                    job = self._begin_anew(job)
                resume = ["--resume"] if has_checkpoint else []
                command = [*self._command, str(folder / "config.toml"), *resume]
                with (folder / "log.txt").open("ab") as log:
                    child = subprocess.Popen(
                        ["/bin/sh", "-c", _START, "sh", str(folder / f"pid.{job.attempt}"), *command],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self._environ,
                        pass_fds=(lock,),
                        start_new_session=True,  # else Ctrl-C would reach it, too
                    )
            finally:
                os.close(lock)  # the child's copy goes on to hold it
        except (OSError, StorageError) as error:
            return self._fail(job, f"the job's process could not be started: {error}")
        self._children[job.job_id] = child
        return self._store.update(job.job_id, pid=child.pid, pid_started=start_of(child.pid))

    def _begin_anew(self, job: Job) -> Job:
        """Move aside the run of an earlier attempt that cannot be resumed, and count the run's events from 0 again."""
        self._followers.pop(job.job_id, None)
        folder = self.run_folder(job.job_id)
        if folder.exists():
            with writing(folder):
                folder.rename(folder.with_name(f"{folder.name}.{job.attempt - 1}"))
        return self._store.update(job.job_id, first_attempt=job.attempt, run_seq=0)

    def _end(self, job: Job) -> None:
        """Ask a cancelled job's process to stop, and kill it after `stop_seconds`."""
        if job.pid is None:
            return
        if job.signalled_at is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGTERM)
            self._store.update(job.job_id, signalled_at=self._clock())
            self._signal_times[job.job_id] = time.monotonic()
        elif time.monotonic() - self._signal_times.setdefault(job.job_id, time.monotonic()) > self._stop_seconds:
            _kill_group(job.pid)

    def _conclude(self, job: Job) -> None:
        """Finish a job after its process has ended, or start the next attempt."""
        child = self._children.get(job.job_id)
        code = None if child is None else child.returncode
        if self._is_locked(job) and job.pid is not None:  # what the process started lives on
            _kill_group(job.pid)
        is_retried = False
        if job.outcome == "completed" and code in (0, None):
            model = {"fine_tuned_model": model_id_of(job), "model_id": model_id_of(job)}
            event = Event("rl.job.completed", "the job is done", model, phase="succeeded")
            self._store.update(job.job_id, event, finished_at=self._clock())
        elif job.cancelled_at is not None:
            event = Event("rl.job.cancelled", "the job was cancelled", phase="cancelled")
            self._store.update(job.job_id, event, finished_at=self._clock())
        elif is_retried := not self._is_last_attempt(job):
            reason = self._reason(job, code)
            event = Event("rl.job.retried", f"another attempt begins: {reason}", level="warning", phase="initializing")
            fresh = dict.fromkeys(("pid", "pid_started", "outcome", "error"))
            job = self._store.update(job.job_id, event, attempt=job.attempt + 1, **fresh)
        else:
            self._fail(job, self._reason(job, code))
        # After the store has the attempt's end: on a full disk it is concluded again.
        for by_job in (self._children, self._followers, self._signal_times):
            by_job.pop(job.job_id, None)
        if is_retried:
            self._spawn(job)

    def _fail(self, job: Job, reason: str) -> Job:
        event = Event("rl.job.failed", reason, {"error": reason}, level="error", phase="failed")
        return self._store.update(job.job_id, event, error=reason, finished_at=self._clock())

    def _reason(self, job: Job, code: int | None) -> str:
        if job.error:
            return job.error
        line = last_error(self._folder / "jobs" / job.job_id / "log.txt")
        how = "ended" if code is None else f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
        return f"the job's process {how}" + (f": {line}" if line else ", and left no word in its log")

    def _is_last_attempt(self, job: Job) -> bool:
        return job.attempt > self._retries or job.cancelled_at is not None

    def _is_locked(self, job: Job) -> bool:
        # One an attempt: a process that an earlier attempt left behind may hold that one's.
        path = self._folder / "jobs" / job.job_id / f"lock.{job.attempt}"
        if not path.exists():
            return False
        lock = take_lock(path)
        if lock is not None:
            os.close(lock)
        return lock is None

    def _pid_of(self, job: Job) -> int | None:
        try:
            return int((self._folder / "jobs" / job.job_id / f"pid.{job.attempt}").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def _kill_group(pid: int) -> None:
    """Kill a child and every process in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # `_spawn` made it the leader of a session


Json = dict[str, Any]  # Any: JSON

_JOB_ID = re.compile(r"job_[0-9a-f]{24}")
_MAX_NUMBER = 2**53


@dataclass(frozen=True, slots=True)
class JobsService:
    """The objects and settings that the routes use.

    Attributes:
        folder: of the service. inference: the model that clients talk with. max_queued: jobs that may wait.
        app_keys: for the task apps that are verified. machine: where jobs are trained.
        is_stopping: streams end when it returns True.
        push: exports a run's model to the hub; see `records.push`.
        export_answer_seconds: an export that takes longer is answered as a job; the hosted client waits for 30 seconds.
    """

    store: Store
    supervisor: Supervisor
    folder: Path
    inference: Inference
    max_queued: int = 1_000
    app_keys: AppKeys | None = None
    machine: Machine = field(default_factory=Machine)
    is_stopping: Callable[[], bool] = lambda: False
    push: Callable[[Export], Awaitable[str]] = push
    export_answer_seconds: float = 20.0

    def job(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            RefusalError: 404, there is no such job.
        """
        job = self.store.job(job_id) if _JOB_ID.fullmatch(job_id) else None
        if job is None:
            raise RefusalError(404, "unknown_job", "there is no job of that id")
        return job

    def models(self) -> list[tuple[Job, list[Json]]]:
        """Return the jobs that have a checkpoint, newest first, with their checkpoints."""
        jobs = reversed(self.store.jobs())
        models = [(job, checkpoints_of(self.supervisor.run_folder(job.job_id))) for job in jobs]
        return [(job, checkpoints) for job, checkpoints in models if checkpoints]

    def model(self, key: str) -> tuple[Job, list[Json]]:
        """Return the job that trained a model, and the job's checkpoints, by the model's id or the path of its weights.

        Raises:
            RefusalError: 404, there is no such model.
        """
        # As clients write an id: PREFIX:BASE:JOB, where the base may hold colons, or the job alone.
        job = self.store.job(key.rpartition(":")[2])
        checkpoints = [] if job is None else checkpoints_of(self.supervisor.run_folder(job.job_id))
        if job is not None and checkpoints:
            return job, checkpoints
        for job, checkpoints in self.models() if Path(key).is_absolute() else ():
            if key in [checkpoint["path"] for checkpoint in checkpoints]:
                return job, checkpoints
        raise RefusalError(404, "unknown_model", "there is no model of that id: see /api/learning/models")


def number_in(values: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = _MAX_NUMBER) -> int:
    """Return an integer from a query or a header.

    Raises:
        RefusalError: 400, it is not an integer, or out of range.
    """
    text = values.get(name)
    if text is None:
        return default
    if re.fullmatch(r"-?[0-9]{1,16}", text) and least <= int(text) <= most:
        return int(text)
    raise RefusalError(400, "invalid_number", f"{name}: expected a whole number from {least} to {most}")


async def object_in(request: Request) -> Json:
    """Return the body.

    Raises:
        RefusalError: 400, it is not a JSON object.
    """
    try:
        value = read_json(await request.body())
    except RecordError as error:
        raise RefusalError(400, "invalid_json", str(error)) from None
    if not isinstance(value, dict):
        raise RefusalError(400, "invalid_json", f"expected a JSON object, got {type(value).__name__}")
    return value
