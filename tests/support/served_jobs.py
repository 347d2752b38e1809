"""The jobs service over a folder in which nothing runs, or as a process with the scripted trainer; and a client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import programs
from fake_trainer import Run

from gspo_gym.cli.jobs.app import create_jobs_app
from gspo_gym.cli.jobs.inference import Inference
from gspo_gym.cli.jobs.store import Event, Store
from gspo_gym.cli.jobs.supervisor import JobsService, Supervisor
from gspo_gym.remote.guard import Guard

ROOT = Path(__file__).parents[2]
HOSTED = ROOT / "tests/unit/config/hosted_configs/math_lora_quickstart.toml"
FAKE_MODEL = (sys.executable, str(ROOT / "tests/support/fake_model.py"))
FAKE_TRAINER = (sys.executable, str(ROOT / "tests/support/fake_trainer.py"))
KEY = "the-key-of-the-tests"


def body_of(script: dict[str, Any], *, config: Path = HOSTED) -> dict[str, Any]:
    """A request as the hosted trainer's client sends it; the scripted trainer does what `script` says."""
    values = tomllib.loads(config.read_text(encoding="utf-8"))
    values["rollout"]["env_config"] = script
    data = {"endpoint_base_url": "http://127.0.0.1:8001", "config": values, "model": "tiny:qwen3-64"}
    return {"job_type": "rl", "compute": {}, "data": data, "tags": {"source": "train-cli"}, "metadata": {}}


class Client:
    """Client of the service at `url`."""

    def __init__(self, url: str, key: str | None = KEY) -> None:
        self.url, self._headers = url, {} if key is None else {"X-API-Key": key}

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of an answer (bytes where it is none)."""
        with self._asked(method, path, body, headers) as answer:
            raw = answer.read()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(raw)
        return answer.status, raw

    def create(self, script: dict[str, Any], **headers: str) -> str:
        status, job = self.call("POST", "/api/rl/jobs", body_of(script), **headers)
        assert status == 201, job
        job_id: str = job["job_id"]
        return job_id

    def stream(self, job_id: str, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """The events of the stream after a number, until the service or the caller ends it."""
        path = f"/api/rl/jobs/{job_id}/stream"
        with self._asked("GET", path, None, {"Last-Event-ID": str(after)} if after else {}) as answer:
            seq = None
            for line in answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    seq = int(value)
                elif name == "data":
                    event = json.loads(value)
                    assert event["seq"] == seq
                    yield event

    def ended(self, job_id: str) -> dict[str, Any]:
        """The job, when it has ended."""
        for _ in self.stream(job_id):
            pass
        return dict(self.call("GET", f"/api/rl/jobs/{job_id}")[1])

    def until(self, job_id: str, kind: str) -> dict[str, Any]:
        """The first event of a type, when it is there."""
        stream = self.stream(job_id)
        with contextlib.closing(stream):  # type: ignore[type-var]
            return next(event for event in stream if event["type"] == kind)

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {**self._headers, **sent})
            yield connection.getresponse()
        finally:
            connection.close()


class IdleJobs:
    """The application over a folder in which nothing runs, for `BackgroundServer(idle.guarded)`.

    Attributes:
        now: the time of its clock, in seconds since 1970; None: the present.
    """

    now: float | None = None

    def __init__(
        self, folder: Path, *, max_queued: int = 1_000, inference: Sequence[str] = FAKE_MODEL, **settings: Any
    ) -> None:
        self.folder, self.store = folder, Store(folder / "jobs.sqlite3", clock=lambda: self.now or time.time())
        self.supervisor = Supervisor(self.store, folder, ["false"], {}, max_running=0)
        model = Inference(inference, os.environ, folder / "inference.log")
        service = JobsService(self.store, self.supervisor, folder, model, max_queued=max_queued, **settings)
        self.app = create_jobs_app(service)
        self.guarded = Guard(self.app, api_key=KEY, open_paths=())

    def trained(self, client: Client, *, steps: int = 1) -> str:
        """A job that has succeeded, with records of so many steps."""
        job_id = client.create({})
        run = Run(self.folder / "runs" / job_id)
        for step in range(1, steps + 1):
            run.append("metrics.jsonl", {"step": step, "loss/total": float(step), "batch/mean_return": 0.5})
        run.event("evaluation", steps, {"mean_return": 0.75, "success_rate": 0.5})
        run.checkpoint(steps)
        run.finish("completed", steps)
        self.store.update(job_id, Event("rl.job.completed", "done", phase="succeeded"), finished_at=1.0)
        return job_id


class ServiceProcess:
    """The service, at work on a folder from `start` to `kill`.

    Attributes:
        said: what it printed when it started.
    """

    def __init__(
        self, folder: Path, *options: str, trainer: str | None = " ".join(FAKE_TRAINER), has_key: bool = True
    ) -> None:
        self._folder, self._options = folder, [*options, *(["--trainer", trainer] if trainer else [])]
        self._options += ["--api-key-env", "JOBS_KEY"] if has_key else []
        self._process: subprocess.Popen[str] | None = None
        self.said = ""

    def start(self) -> Client:
        """Start it; return a client."""
        command = [sys.executable, "-m", "gspo_gym.cli", "jobs", "serve", "--folder", str(self._folder), "--port", "0"]
        environ = {**os.environ, "JOBS_KEY": KEY}
        self._process = programs.Popen([*command, *self._options], stdout=subprocess.PIPE, text=True, env=environ)
        assert self._process.stdout is not None
        self.said = ""
        while "serving jobs" not in self.said:
            line = self._process.stdout.readline()
            assert line, self.said
            self.said += line
        return Client(self.said.split()[-1])

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send it a signal; return its exit status."""
        assert self._process is not None
        with self._process as process:
            self._process = None
            process.send_signal(number)
            return process.wait(60)

    def end(self) -> None:
        """Kill it, if it is there."""
        if self._process is not None:
            self.kill()
