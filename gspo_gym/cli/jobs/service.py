"""The records and settings that the routes of the jobs service use, and how they read requests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from gspo_gym.base.strict_json import read_json
from gspo_gym.cli.jobs.inference import Inference
from gspo_gym.cli.jobs.records import Machine, checkpoints_of, model_id_of
from gspo_gym.cli.jobs.store import Job, Store
from gspo_gym.cli.jobs.supervisor import Supervisor
from gspo_gym.errors import RecordError
from gspo_gym.remote.apps.client import AppKeys
from gspo_gym.remote.guard import RefusalError

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
    """

    store: Store
    supervisor: Supervisor
    folder: Path
    inference: Inference
    max_queued: int = 1_000
    app_keys: AppKeys | None = None
    machine: Machine = field(default_factory=Machine)
    is_stopping: Callable[[], bool] = lambda: False

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
        found = ((job, checkpoints_of(self.supervisor.run_folder(job.job_id))) for job in self.store.jobs())
        return [(job, checkpoints) for job, checkpoints in reversed(list(found)) if checkpoints]

    def trained_by(self, key: str) -> Job:
        """Return the job that trained a model, by the job's id, the model's id, or the path of its weights.

        Raises:
            RefusalError: 404, there is no such model.
        """
        for job, checkpoints in self.models():
            if key in (job.job_id, model_id_of(job), *(checkpoint["path"] for checkpoint in checkpoints)):
                return job
        raise RefusalError(404, "unknown_model", "there is no model of that id or path: see /api/learning/models")

    def model(self, model_id: str) -> tuple[Job, list[Json]]:
        """Return the job that trained a model, and the job's checkpoints.

        Raises:
            RefusalError: 404, there is no such model.
        """
        # As clients write it: PREFIX:BASE:JOB, where the base may hold colons, or the job alone.
        with contextlib.suppress(RefusalError):
            job = self.job(model_id.rpartition(":")[2])
            if checkpoints := checkpoints_of(self.supervisor.run_folder(job.job_id)):
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
