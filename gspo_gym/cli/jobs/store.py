"""The jobs and their events, in one SQLite file.

Only one service writes. A transaction holds everything that belongs together, so a service killed at any moment leaves
each job before or after a change. A job's events are numbered 1, 2, 3, ... without a gap, also across restarts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gspo_gym.base.files import writing
from gspo_gym.errors import StorageError
from gspo_gym.remote.guard import RefusalError

Status = Literal["queued", "initializing", "training", "succeeded", "failed", "cancelled"]
ENDED: tuple[Status, ...] = ("succeeded", "failed", "cancelled")
ACTIVE: tuple[Status, ...] = ("initializing", "training")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE, key TEXT UNIQUE, digest TEXT NOT NULL,
    request TEXT NOT NULL, config TEXT NOT NULL, base TEXT NOT NULL, status TEXT NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, started_at REAL, finished_at REAL,
    attempt INTEGER NOT NULL DEFAULT 0, first_attempt INTEGER NOT NULL DEFAULT 0, run_seq INTEGER NOT NULL DEFAULT 0,
    pid INTEGER, pid_started INTEGER, outcome TEXT, error TEXT, cancelled_at REAL, signalled_at REAL
);
CREATE TABLE IF NOT EXISTS events (
    job_id TEXT NOT NULL, seq INTEGER NOT NULL, source TEXT, type TEXT NOT NULL, level TEXT NOT NULL,
    message TEXT NOT NULL, phase TEXT, data TEXT NOT NULL, created_at REAL NOT NULL,
    PRIMARY KEY (job_id, seq), UNIQUE (job_id, source)
);
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A job, as one row of the table `jobs`.

    Attributes:
        number: place in the queue. attempt: number of its present process, counted from 1; 0: none was started.
        first_attempt: that began the run which is in the run folder. run_seq: of the run's last event taken in.
        pid, pid_started: its process, see `run/process.py`. outcome: status in the run's last event "finished".
        cancelled_at: when a cancel was asked for. signalled_at: when its process was told. Times: seconds since 1970.
    """

    number: int
    job_id: str
    key: str | None
    digest: str
    request: Mapping[str, Any]
    config: str
    base: str
    status: Status
    created_at: float
    updated_at: float
    started_at: float | None
    finished_at: float | None
    attempt: int
    first_attempt: int
    run_seq: int
    pid: int | None
    pid_started: int | None
    outcome: str | None
    error: str | None
    cancelled_at: float | None
    signalled_at: float | None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a job.

    Attributes:
        data: JSON values. phase: the job's status from here on; None: as before.
        created_at: seconds since 1970; None: now. source: identity; an event with the same one is not recorded again.
        seq: its number; 0: it has none yet.
    """

    type: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    level: str = "info"
    phase: Status | None = None
    created_at: float | None = None
    source: str | None = None
    seq: int = 0


class Store:
    """The jobs in `path`; its methods may be called from any thread.

    `path` is created if missing; `clock` returns seconds since 1970.

    Raises:
        StorageError: the file cannot be created.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._path = clock, path
        self._lock = threading.RLock()
        with writing(path):
            try:
                # isolation_level: sqlite3 begins no transactions by itself, `transaction` does.
                # Requests of clients are for their server alone; SQLite gives its other files the mode of this one.
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
                path.chmod(0o600)
                self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
                self._connection.row_factory = sqlite3.Row
                self._connection.execute("PRAGMA journal_mode = WAL")
                # A power cut must not take back a number that a client has seen.
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.executescript(_SCHEMA)
            except sqlite3.Error as error:
                raise OSError(str(error)) from error  # `writing` raises it as StorageError

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes of the block at once, or none if it raises; blocks nest.

        Raises:
            StorageError: the disk refuses (full, read-only).
        """
        with self._reading():
            if self._has_begun():  # a nested block belongs to the outer one
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._has_begun():  # SQLite ends it by itself where the disk is full
                    self._connection.execute("ROLLBACK")
                raise

    def _has_begun(self) -> bool:
        return self._connection.in_transaction

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Hold the lock; raise errors of the file as StorageError."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StorageError(f"{self._path}: {error}") from error

    def create(
        self,
        request: Mapping[str, Any],
        *,
        base: str,
        config_of: Callable[[str], str],
        max_queued: int,
        key: str | None = None,
    ) -> tuple[Job, bool]:
        """Queue a job; return it and True, or the job with the same key and request and False.

        Args:
            request: its body (Any: JSON), which a repeated request with the same key must have, too.
            base: the base model's name.
            config_of: returns the configuration as TOML, given the job's id.

        Raises:
            RefusalError: 409, another request has the key; 429, `max_queued` jobs wait.
        """
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        with self.transaction():
            if key is not None and (job := self._find("key", key)) is not None:
                if job.digest != digest:
                    text = f"the Idempotency-Key is that of {job.job_id}, which is another request"
                    raise RefusalError(409, "key_conflict", text)
                return job, False
            if len(self.jobs(("queued",))) >= max_queued:
                text = f"{max_queued} jobs are queued, which is as many as may be; cancel one, or wait"
                raise RefusalError(429, "queue_full", text)
            job_id, now = f"job_{secrets.token_hex(12)}", self._clock()
            self._connection.execute(
                "INSERT INTO jobs (job_id, key, digest, request, config, base, status, created_at, updated_at) "
                "VALUES (?, ?, ?, ?, ?, ?, 'queued', ?, ?)",
                (job_id, key, digest, json.dumps(request), config_of(job_id), base, now, now),
            )
            self.record(job_id, [Event("rl.job.created", "the job is queued", phase="queued")])
            return self.require(job_id), True

    def job(self, job_id: str) -> Job | None:
        """Return a job, or None."""
        with self._reading():
            return self._find("job_id", job_id)

    def require(self, job_id: str) -> Job:
        """Return a job that exists."""
        job = self.job(job_id)
        assert job is not None, job_id
        return job

    def jobs(self, statuses: Sequence[Status] = (*ACTIVE, *ENDED, "queued")) -> list[Job]:
        """Return the jobs of these statuses, in the order of the queue."""
        marks = ", ".join("?" * len(statuses))
        with self._reading():
            rows = self._connection.execute(f"SELECT * FROM jobs WHERE status IN ({marks}) ORDER BY number", statuses)
            return [_job_of(row) for row in rows]

    def update(self, job_id: str, event: Event | None = None, **values: Any) -> Job:
        """Change columns of a job (Any: the types of `Job`), and record an event."""
        assert values.keys() <= Job.__dataclass_fields__.keys(), values
        with self.transaction():
            if values:
                assignments = ", ".join(f"{name} = ?" for name in values)
                self._connection.execute(
                    f"UPDATE jobs SET {assignments}, updated_at = ? WHERE job_id = ?",
                    (*values.values(), self._clock(), job_id),
                )
            if event is not None:
                self.record(job_id, [event])
            return self.require(job_id)

    def record(self, job_id: str, events: Iterable[Event]) -> list[Event]:
        """Append events under the next numbers, except those with a known source; return the new ones.

        The last phase among them becomes the job's status.
        """
        new_events: list[Event] = []
        with self.transaction():
            (last,) = self._connection.execute("SELECT MAX(seq) FROM events WHERE job_id = ?", (job_id,)).fetchone()
            seq = last or 0
            for event in events:
                row = (event.source, event.type, event.level, event.message, event.phase, json.dumps(event.data))
                when = self._clock() if event.created_at is None else event.created_at
                # By UNIQUE (job_id, source), an event that was taken in before is ignored.
                cursor = self._connection.execute(
                    "INSERT OR IGNORE INTO events "
                    "(job_id, seq, source, type, level, message, phase, data, created_at) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (job_id, seq + 1, *row, when),
                )
                if cursor.rowcount:
                    seq += 1
                    new_events.append(event)
            phases = [event.phase for event in new_events if event.phase is not None]
            if phases:
                self.update(job_id, status=phases[-1])
        return new_events

    def events(self, job_id: str, *, after: int = 0, limit: int = -1, only_phases: bool = False) -> list[Event]:
        """Return at most `limit` events (-1: all) with numbers above `after`, or only those that changed the status."""
        phase_filter = "AND phase IS NOT NULL" if only_phases else ""
        with self._reading():
            rows = self._connection.execute(
                f"SELECT * FROM events WHERE job_id = ? AND seq > ? {phase_filter} ORDER BY seq LIMIT ?",
                (job_id, after, limit),
            )
            values = [{**dict(row), "data": json.loads(row["data"])} for row in rows]
        return [Event(**{name: value for name, value in event.items() if name != "job_id"}) for event in values]

    def _find(self, column: str, value: str) -> Job | None:
        row = self._connection.execute(f"SELECT * FROM jobs WHERE {column} = ?", (value,)).fetchone()
        return None if row is None else _job_of(row)


def _job_of(row: sqlite3.Row) -> Job:
    return Job(**{**dict(row), "request": json.loads(row["request"])})
