"""The routes of the jobs service for what jobs have trained: list, archive, push to the hub, and talk with it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from gspo_gym.cli.jobs.inference import Wanted
from gspo_gym.cli.jobs.records import model_files_of, model_id_of, push, tar_of, timestamp
from gspo_gym.cli.jobs.service import JobsService, Json, number_in, object_in
from gspo_gym.cli.jobs.store import Job
from gspo_gym.errors import ServiceError
from gspo_gym.remote.guard import RefusalError

Result = TypeVar("Result")

_NAMED = re.compile(r"(?:.*:)?(job_[0-9a-f]{24})(?::step_(\d{1,12})|@(best|latest|\d{1,12}))?", re.DOTALL)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_POLL_SECONDS = 0.1


class ModelRoutes:
    """The handlers; those that are not `async` run in threads."""

    def __init__(self, service: JobsService) -> None:
        self.service = service
        self._exporting = asyncio.Lock()  # one at a time, for each loads a model

    def table(self) -> Iterator[tuple[str, list[str], Callable[..., Any]]]:
        """Yield the method, paths and handler of every route; the first that fits a path answers."""
        models = ("/api/learning/models", "/api/artifacts/models", "/api/models")
        yield "GET", ["/api/learning/models", "/api/learning/models/rl", "/api/models"], self.list_models
        yield "GET", ["/api/learning/models/{model_id:path}/archive"], self.archive
        yield "GET", [f"{path}/{{model_id:path}}" for path in models], self.model
        yield "GET", ["/api/artifacts"], self.artifacts
        yield "POST", ["/api/learning/exports/hf"], self.export
        for path in ("chat/completions", "completions", "responses"):
            yield "POST", [f"/api/inference/v1/{path}", f"/api/v1/{path}"], partial(self.infer, path)
        yield "GET", ["/api/inference/v1/models", "/api/v1/models"], self.list_models
        warmups = [f"{prefix}/warmup" for prefix in ("/api", "/api/inference", "")]
        yield "GET", [f"{path}/status/{{model_id:path}}" for path in warmups], self.warmth
        yield "POST", [f"{path}/{{model_id:path}}" for path in warmups], self.warm

    def list_models(self) -> Json:
        """Return the models that jobs have trained."""
        models = [_model(job, checkpoints) for job, checkpoints in self.service.models()]
        return {"models": models, "data": models}

    def model(self, model_id: str) -> Json:
        """Return a model, with its checkpoints."""
        job, checkpoints = self.service.model(model_id)
        return {**_model(job, checkpoints), "checkpoints": checkpoints}

    def artifacts(self, request: Request) -> Json:
        """Return the models in the clients' table of all artifacts."""
        limit = number_in(request.query_params, "limit", 50, least=1, most=1_000)
        kind, status = request.query_params.get("type"), request.query_params.get("status")
        found = [_model(job, checkpoints) for job, checkpoints in self.service.models()]
        models = [model for model in found if kind in (None, "rl", "models") and status in (None, model["status"])]
        models = models[:limit]
        counts = {"total_count": len(models), "rl_models_count": len(models)}
        return {"fine_tuned_models": [], "rl_models": models, "prompts": [], "summary": counts}

    def archive(self, model_id: str) -> StreamingResponse:
        """Send a model's newest checkpoint as a tar file, without the files that only a resumed run needs."""
        job, checkpoints = self.service.model(model_id)
        folder = Path(checkpoints[-1]["path"])
        names = model_files_of(folder)
        disposition = f'attachment; filename="{job.job_id}.tar"'
        headers = {"content-disposition": disposition}
        return StreamingResponse(tar_of(folder, names, job.job_id), 200, headers, "application/x-tar")

    async def export(self, request: Request) -> Json:
        """Push a model to the hub, as an adapter or merged; return the repository's URL."""
        body = await object_in(request)
        repo, key = body.get("repo_id"), body.get("key")
        if not (isinstance(repo, str) and _REPO.fullmatch(repo) and isinstance(key, str)):
            raise RefusalError(422, "invalid_request", "expected repo_id as OWNER/NAME, and key: a model's id or path")
        is_merged = body.get("artifact_kind") not in (None, "lora")
        is_private = body.get("visibility") != "public"
        job = await asyncio.to_thread(self.service.trained_by, key)
        folder = self.service.supervisor.run_folder(job.job_id)
        try:
            url = await self._unless_stopping(self._push(folder, repo, is_private=is_private, is_merged=is_merged))
        except ServiceError as error:
            raise RefusalError(424, "export_failed", str(error)) from None
        return {"repo_id": repo, "repo_url": url}

    async def _push(self, folder: Path, repo: str, *, is_private: bool, is_merged: bool) -> str:
        async with self._exporting:
            return await push(folder, repo, is_private=is_private, is_merged=is_merged)

    async def _unless_stopping(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of long work, which the service's end does not wait for.

        Raises:
            RefusalError: 503, the service ends.
        """
        task = asyncio.create_task(work)
        try:
            while not task.done():
                if self.service.is_stopping():
                    raise RefusalError(503, "stopping", "the service is told to stop; ask again when it is back")
                await asyncio.wait({task}, timeout=_POLL_SECONDS)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def infer(self, path: str, request: Request) -> Response:
        """Have the model that the body names answer, over OpenAI's protocol."""
        body = await object_in(request)
        wanted = await asyncio.to_thread(self._wanted, body.get("model"))
        return await self._unless_stopping(self.service.inference.answer(wanted, path, body, request))

    async def warm(self, model_id: str) -> Json:
        """Begin to start a model, for requests to come."""
        return {"status": self.service.inference.warm(await asyncio.to_thread(self._wanted, model_id))}

    async def warmth(self, model_id: str) -> Json:
        """Answer whether a model is there."""
        status, error = self.service.inference.warmth(await asyncio.to_thread(self._wanted, model_id))
        return {"status": status, "error": error}

    def _wanted(self, name: Any) -> Wanted:
        """Return the model that clients call so: PREFIX:BASE:JOB[:step_N], JOB[@best|@N], or the base of a job.

        Without a step it is the newest checkpoint, as in its archive.

        Raises:
            RefusalError: 404, there is no such model or step; 409, its job has not ended.
        """
        found = _NAMED.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            if any(name == job.base for job in self.service.store.jobs()):
                return Wanted(name, name)
            raise RefusalError(404, "unknown_model", "there is no model of that id: see /api/learning/models")
        job, checkpoints = self.service.model(found[1])
        if not job.has_ended:  # what it keeps may go while it is loaded
            raise RefusalError(
                409, "job_runs", f"{job.job_id} is still {job.status}: its model can be asked at its end"
            )
        folder = self.service.supervisor.run_folder(job.job_id)
        which = found[2] or found[3] or "latest"
        if which == "best":
            return Wanted(f"{folder}@best", f"{model_id_of(job)}@best")
        steps = [checkpoint["step"] for checkpoint in checkpoints]
        step = steps[-1] if which == "latest" else int(which)
        if step not in steps:
            raise RefusalError(404, "unknown_model", f"{job.job_id} has no checkpoint of step {step}, only of {steps}")
        return Wanted(f"{folder}@{step}", f"{model_id_of(job)}:step_{step:06d}")


def _model(job: Job, checkpoints: Sequence[Json]) -> Json:
    model_id = model_id_of(job)
    return {
        "id": model_id,
        "model_id": model_id,
        "object": "model",
        "type": "rl",
        "base_model": job.base,
        "job_id": job.job_id,
        "status": job.status,
        "created_at": timestamp(job.created_at),
        "dtype": None,
        "step": checkpoints[-1]["step"],
        "weights_path": checkpoints[-1]["path"],
    }
