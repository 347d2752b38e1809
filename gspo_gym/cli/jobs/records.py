"""Translate between the hosted trainer's clients and ours: a request's body into a checked configuration, and a job's
run folder into events, points, and models as tar files or on the hub.

A resumed run repeats what it recorded after its checkpoint. The job's events keep both versions, since clients have
seen the first; its points are those of the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_gym.base.leftovers import end_with_us, has_ended, in_temporary_folder
from gspo_gym.cli.jobs.store import Event, Job, Status, Store
from gspo_gym.config.machines import with_all_gpus
from gspo_gym.config.nested import Flat, apply_override, flatten
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import missing_machinery
from gspo_gym.diagnosis.alarms import ALARMS
from gspo_gym.errors import CheckpointError, ConfigError, GymError, RecordError, ServiceError
from gspo_gym.policy.manifest import is_complete, read_manifest, step_of
from gspo_gym.run.records import EventReader, LineReader, read_events, read_metrics, read_summary
from gspo_gym.run.sinks import evaluation_numbers

# Kind of a run's event -> type of the job's event, and the job's status from there on. Others are "rl.run.KIND".
_TYPES: Mapping[str, tuple[str, Status | None]] = {
    "started": ("rl.train.started", "training"),
    "resumed": ("rl.train.resumed", "training"),
    "evaluation": ("rl.eval.summary", None),
    "checkpoint": ("rl.checkpoint.saved", None),
}
_ENDS = {"completed": "rl.train.completed", "failed": "rl.train.failed"}
_INTERRUPTED = "rl.train.interrupted"
_WARNINGS = frozenset(
    (
        *ALARMS,
        *("frozen", "judge_paused", "nonfinite_metrics", "refill_failed", "staging_failed", "tokens_failed"),
        *("uncommitted", "update_failed"),
    )
)
# Our metric -> the name under which clients of the hosted trainer know it.
_ALIASES = {
    "loss/total": "train.loss",
    "loss/policy": "train.policy_loss",
    "evaluation/mean_return": "eval.reward_mean",
}
_SHOWN = ("loss/total", "batch/mean_return", "time/step_seconds")  # in the event of a step; /metrics has all
_MAX_LOG_BYTES = 8_192  # from the end of the log, in which the last error is looked for
_CHUNK_BYTES = 1 << 20

Json = dict[str, Any]
_EXPORT_SECONDS = 3_600.0


class Follower:
    """Copies new records of a job's run folder into the store, each exactly once, also if processes are killed."""

    def __init__(self, store: Store, job: Job, folder: Path) -> None:
        self._store, self._job_id, self._first_attempt = store, job.job_id, job.first_attempt
        self._folder = folder
        self._events = EventReader(folder, after=job.run_seq)
        self._metrics = LineReader(folder / "metrics.jsonl")
        self._waiting: list[Event] = []

    def take_in(self, job: Job, *, is_last_attempt: bool) -> None:
        """Record the new events; the run's end sets the job's `outcome`. After an error, make another follower.

        Raises:
            RecordError: a line is damaged.
        """
        with _as_records(self._folder):
            events = self._new_events(job, is_last_attempt=is_last_attempt)
        if not events:
            return
        with self._store.transaction():
            new_events = self._store.record(self._job_id, events)
            self._store.update(self._job_id, run_seq=self._events.after)
            for event in new_events:
                if event.type in (_INTERRUPTED, *_ENDS.values()):
                    self._store.update(self._job_id, outcome=event.data["status"], error=event.data.get("error"))

    def _new_events(self, job: Job, *, is_last_attempt: bool) -> list[Event]:
        # Two files, one order: of the later look at the metrics, only what is older than something else that was read
        # is taken, since the events beside the rest may not be written yet.
        steps = [*self._waiting, *map(_step_of, self._metrics.read())]
        events = [
            _event_of(line, f"event {self._first_attempt}.{line['seq']}", job, is_last_attempt=is_last_attempt)
            for line in self._events.read()
        ]
        newest = max(map(_time_of, (*steps, *events)), default=0.0)
        later = list(map(_step_of, self._metrics.read()))
        steps += [event for event in later if _time_of(event) <= newest]
        self._waiting = [event for event in later if _time_of(event) > newest]
        # A merge and no sort: where a clock was set back, each file still keeps its order.
        return list(heapq.merge(steps, events, key=_time_of))


@contextlib.contextmanager
def _as_records(folder: Path) -> Iterator[None]:
    """Raise errors of reading records that are not as runs write them as RecordError."""
    try:
        yield
    except GymError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise RecordError(f"{folder}: a record has no known form: {error!r}") from error


def _time_of(event: Event) -> float:
    return event.created_at or 0.0


def _step_of(line: Mapping[str, Any]) -> Event:
    source = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
    # A resumed run has other lines for the steps that it repeats: their times differ.
    data = {"step": line["step"]} | {name: line[name] for name in _SHOWN if name in line}
    return Event("rl.train.step", f"step {line['step']}", data, created_at=line["time"], source=f"metrics {source}")


def _event_of(line: Mapping[str, Any], source: str, job: Job, *, is_last_attempt: bool) -> Event:
    kind, step, when = line["kind"], line["step"], line["time"]
    data = {"step": step, **line["data"]}
    if kind == "finished":
        status = data["status"] = str(data.get("status"))
        # A client of the hosted trainer leaves at "failed", and another attempt may follow.
        is_end = is_last_attempt or status == "completed"
        kind_of_end = _ENDS.get(status, _INTERRUPTED) if is_end else _INTERRUPTED
        level = "info" if status == "completed" else "error"
        return Event(kind_of_end, f"the run ended: {status}", data, level, created_at=when, source=source)
    type_name, phase = _TYPES.get(kind, (f"rl.run.{kind}", None))
    if kind == "started":
        data |= _plan_of(job)
    level = "warning" if kind in _WARNINGS else "info"
    return Event(type_name, f"{kind} (step {step})", data, level, phase, when, source)


def _plan_of(job: Job) -> Json:
    """Return the size of the run under the hosted trainer's names."""
    training = tomllib.loads(job.config).get("training", {})
    return {
        "model": job.base,
        "epochs": training.get("num_epochs"),
        "iters_per_epoch": training.get("iterations_per_epoch"),
        "batch_size": training.get("batch_size"),
        "group_size": training.get("group_size"),
    }


def points_of(folder: Path, *, after_step: int, limit: int) -> list[Json]:
    """Return the numbers of the steps above `after_step`, each under our name and, if it has one, the hosted name.

    Returns at least one whole step, and further ones while there are at most `limit` points.

    Raises:
        RecordError: a line of the records is damaged.
    """
    steps: dict[int, list[Json]] = {}
    with _as_records(folder):
        for line in read_metrics(folder):
            values = {key: value for key, value in line.items() if key not in ("schema", "step", "time")}
            steps.setdefault(line["step"], []).extend(_points(values, line, "train"))
        for event in read_events(folder):
            if event["kind"] == "evaluation":
                steps.setdefault(event["step"], []).extend(_points(evaluation_numbers(event["data"]), event, "eval"))
    points: list[Json] = []
    # Steps are never divided, because a client goes on after the last step that it has seen.
    for step in sorted(step for step in steps if step > after_step):
        if points and len(points) + len(steps[step]) > limit:
            break
        points += steps[step]
    return points


def _points(values: Mapping[str, float | None], line: Mapping[str, Any], phase: str) -> Iterator[Json]:
    for name, value in values.items():
        for alias in (name, _ALIASES.get(name)):
            if alias is not None and value is not None:
                when = timestamp(line["time"])
                point: Json = {"name": alias, "value": value, "step": line["step"], "phase": phase, "created_at": when}
                yield {**point, "epoch": None, "data": {}}


def last_error(log: Path) -> str | None:
    """Return the last line of a job's log that names an error, else its last line, or None for an empty log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MAX_LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception", "Interrupt"))]
    return (errors or lines)[-1] if lines else None


def model_id_of(job: Job) -> str:
    """Return the clients' id of the model that a job trains."""
    return f"rl:{job.base}:{job.job_id}"


def checkpoints_of(folder: Path) -> list[Json]:
    """Return the step and folder of each complete checkpoint of a run, in the order of steps."""
    complete = [path for path in (folder / "checkpoints").glob("step_*") if is_complete(path)]
    paths = sorted(complete, key=lambda path: step_of(path) or 0)
    return [{"step": step_of(path), "path": str(path)} for path in paths]


def model_files_of(checkpoint: Path) -> list[str]:
    """Return the files of a checkpoint that belong to the model, without those that only a resumed run needs.

    Raises:
        CheckpointError: the manifest is missing or damaged, or a file is outside of the checkpoint.
    """
    names = sorted(name for name in read_manifest(checkpoint).files if not name.startswith("resume/"))
    for name in names:
        if (path := (checkpoint / name).resolve()) != checkpoint.resolve() / name:
            raise CheckpointError(f"{checkpoint / name}: is not in the checkpoint, but {path}")
    return names


def results_of(job: Job, folder: Path) -> Json | None:
    """Return an ended job's results; None before its end."""
    if not job.has_ended:
        return None
    checkpoints = checkpoints_of(folder)
    try:
        with _as_records(folder):
            summary = dict(read_summary(folder))
            final = dict(summary.get("final_eval") or {})
    except RecordError:
        summary, final = {}, {}
    return {
        "status": job.status,
        "final_reward": final.get("mean_return"),
        "model_id": model_id_of(job) if checkpoints else None,
        "checkpoints": checkpoints,
        "summary": {key: summary.get(key) for key in ("steps", "episodes", "wall_seconds", "score", "curve")},
    }


def timestamp(seconds: float) -> str:
    """Return a time in the format of the hosted trainer.

    >>> timestamp(0.5)
    '1970-01-01T00:00:00.500000+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def tar_of(folder: Path, names: Sequence[str], prefix: str) -> Iterator[bytes]:
    """Yield a tar of these files of a folder in chunks, because weights may be larger than the memory."""
    for name in names:
        with (folder / name).open("rb") as file:
            info = tarfile.TarInfo(f"{prefix}/{name}")
            info.size = (folder / name).stat().st_size
            yield info.tobuf(tarfile.PAX_FORMAT)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Export:
    """A push of the newest model in a run's folder to the hub."""

    folder: Path
    repo: str
    is_private: bool
    is_merged: bool


async def push(export: Export) -> str:
    """Export the model and push it to the hub; return the repository's URL.

    HF_TOKEN and HF_ENDPOINT are those of the service's environment.

    Raises:
        ServiceError: the export or the hub refuses; says why.
    """
    # In other processes, because the service must not load a model.
    with in_temporary_folder("gspo-gym-export-") as folder:
        scratch = Path(folder)
        verb, private = "merge" if export.is_merged else "export", ["--private"] if export.is_private else []
        await _models([verb, str(export.folder), "--out", str(scratch / "model")], scratch)
        return await _models(["push", str(scratch / "model"), export.repo, *private], scratch)


async def _models(words: Sequence[str], scratch: Path) -> str:
    """Run `gspo-gym models`; return the last line of its output. Cancelling this kills it."""
    log = scratch / "log.txt"
    async with running([sys.executable, "-m", "gspo_gym.cli", "models", *words], log) as process:
        try:
            async with asyncio.timeout(_EXPORT_SECONDS):
                output, _ = await process.communicate()
        except TimeoutError:
            raise ServiceError(f"gspo-gym models {words[0]} did not end in {_EXPORT_SECONDS:g} s") from None
    if process.returncode:
        raise ServiceError(last_error(log) or f"gspo-gym models {words[0]} ended with status {process.returncode}")
    return (output.decode().strip().splitlines() or [""])[-1]


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, *, stop_seconds: float = 0.0
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program with its errors in `log`, in a group that ends with the block, or with this process.

    It is told by SIGTERM, and killed after `stop_seconds`, with what it has left behind.
    """
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            start_new_session=True,  # else Ctrl-C would reach it before the service has ended its requests
        )
    end_with_us(process.pid, is_group=True)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), stop_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        has_ended(process.pid, is_group=True)


_TRAINED = re.compile(r"(?:[^:]+:.*:)?(job_[0-9a-f]{24})(:step_\d+)?")  # the id of a model that a job trained


def toml_of(config: RunConfig, job_id: str) -> str:
    """Return a run's configuration as TOML, with a folder named after the job, below its notices as comments."""
    model = config.model.model_copy(update={"label": job_id})
    notices = [f"# {notice.key}: {notice.text}\n" for notice in config.notices]
    return "".join(notices) + config.model_copy(update={"model": model}).to_toml()


@dataclass(frozen=True, slots=True)
class Machine:
    """The service's settings for where jobs are trained, which a job's configuration cannot know.

    Attributes:
        is_local: train with the local engine on one device, and ignore [compute], [topology] and [vllm].
        overrides: "section.key=value", over everything else.
    """

    is_local: bool = False
    overrides: Sequence[str] = ()


def parse_request(body: Mapping[str, Any], *, runs: Path, machine: Machine) -> RunConfig:
    """Return the run's configuration in a body {"data": {"config", "endpoint_base_url", "model"}, ...} (Any: JSON).

    The URL and the model beside the configuration replace those in it, as in the hosted trainer; the machine's
    overrides replace both. The run goes into `runs`, under the job's id.

    Raises:
        ConfigError: the body is not of that form; the configuration is wrong; or this version cannot train it.
    """
    if body.get("job_type", "rl") != "rl":
        raise ConfigError('job_type: expected "rl", which is the only kind of job here')
    for part in ("tags", "metadata", "compute"):
        if not isinstance(body.get(part), Mapping | None):
            raise ConfigError(f"{part}: expected an object")
    data = body.get("data", body)  # the client's library sends its keys without "data" around them
    if not isinstance(data, Mapping):
        raise ConfigError("data: expected an object with the key config")
    flat = _sections_in(data.get("config"))
    values = flat.values
    if url := _text_in(data, "endpoint_base_url"):
        _section(values, "services")["task_url"] = url
    model = _section(values, "model")
    if name := _text_in(data, "model") or _text_in(data, "base_model"):
        model.pop("base", None)
        model.pop("source", None)
        model["source" if _TRAINED.fullmatch(name) else "base"] = name
    source = model.get("source")
    if isinstance(source, str) and (match := _TRAINED.fullmatch(source)):
        model["source"] = f"rl:{match[1]}{match[2] or ''}"
    if machine.is_local:
        _make_local(values)
    for override in machine.overrides:
        _, problem = apply_override(values, override)
        if problem is not None:
            raise ConfigError(f"{problem.key}: {problem.text}")
    model["label"] = "job_of_the_service"  # only to pass the check: the job's id is not known yet
    _section(values, "run")["folder"] = str(runs.absolute())
    config = RunConfig.from_dict(flat, source="data.config")
    if missing := missing_machinery(with_all_gpus(config, 0)[0].sections):
        raise ConfigError("; ".join(missing))
    return config


def _make_local(values: Json) -> None:
    """Remove settings of the hosted trainer's GPUs and servers; keep the longest context."""
    vllm, rollout = _section(values, "vllm"), _section(values, "rollout")
    rollout["engine"] = "local"
    if "max_model_len" in vllm:
        rollout.setdefault("max_model_len", vllm["max_model_len"])
    for name in ("compute", "topology", "vllm"):
        values.pop(name, None)


def _sections_in(value: Any) -> Flat:
    """Return the flat form of a configuration, given as an object or TOML text."""
    if isinstance(value, str):
        try:
            value = tomllib.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data.config: expected TOML: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError("data.config: expected the configuration, as an object or as TOML text")
    flat = flatten(value)
    if flat.problems:
        raise ConfigError("; ".join(f"data.config: {problem.key}: {problem.text}" for problem in flat.problems))
    return flat


def _section(values: Json, name: str) -> Json:
    section = values.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"data.config: {name}: expected a table")
    return section


def _text_in(data: Mapping[str, Any], name: str) -> str:
    text = data.get(name)
    if not isinstance(text, str | None):
        raise ConfigError(f"data.{name}: expected a text")
    return text or ""
