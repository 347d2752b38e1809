"""The HTTP side of the jobs service: routes and shapes as the hosted trainer's clients know them.

Jobs are made, listed, watched and cancelled; what they have trained is listed, archived, pushed to the hub and talked
with. Refusals are {"detail": {"error": {"code", "message"}}}. The numbers of events go up by one; a client that lost
its connection asks for those after the last one it has, by `since_seq` or, of a stream, by the header Last-Event-ID.

Each route also stands under /api/learning and /api/orchestration:

    POST /api/rl/jobs                     makes a job; again with the same Idempotency-Key: the same job
    GET  /api/rl/jobs, .../ID, ID/config, ID/timeline    status (queued, initializing, training; succeeded, failed,
                                          cancelled), results, phases
    GET  ID/events?since_seq=7, ID/stream               events, numbered without a gap; as a stream
    GET  ID/metrics?after_step=7          the numbers of whole steps, at least one
    POST ID/cancel                        SIGTERM, and after --stop-seconds the end
    GET  /api/learning/models, .../MODEL/archive, /api/artifacts    what was trained; as a tar file
    POST /api/learning/exports/hf         pushes a model to the hub (HF_TOKEN of the service), one at a time; one that
                                          takes more than 20 s is answered 202 with `export_id`
    GET  /api/learning/exports/ID         the end of such an export, while the service lives
    POST /api/inference/v1/chat/completions, completions, responses (also under /api/v1)    OpenAI's protocol; a model
                                          is rl:BASE:JOB (the newest checkpoint), JOB@best, JOB@20, or a job's base
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fastapi
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gspo_gym.cli.jobs.inference import ModelToServe
from gspo_gym.cli.jobs.records import (
    Export,
    model_files_of,
    model_id_of,
    parse_request,
    points_of,
    results_of,
    tar_of,
    timestamp,
    toml_of,
)
from gspo_gym.cli.jobs.store import Event, Job
from gspo_gym.cli.jobs.supervisor import JobsService, Json, number_in, object_in
from gspo_gym.errors import ConfigError, GymError, ServiceError, StorageError
from gspo_gym.remote.apps.client import TaskAppClient, TaskAppSettings
from gspo_gym.remote.guard import RefusalError, answer_refusal

_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_HEARTBEAT_SECONDS, _MAX_HEARTBEAT_SECONDS = 20, 300
_POLL_SECONDS = 0.1
_BATCH = 200  # events of a stream that are read at once


def create_jobs_app(service: JobsService) -> fastapi.FastAPI:
    """Return the ASGI application, which runs jobs from its start to its end; serve it behind `Guard`."""

    models = ModelRoutes(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        service.supervisor.start()
        yield
        await models.exports.close()
        await service.inference.close()
        await asyncio.to_thread(service.supervisor.stop)
        service.store.close()

    app = fastapi.FastAPI(title="gspo-gym jobs", lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(RefusalError, answer_refusal)
    app.add_exception_handler(GymError, _answer_error)
    for method, paths, handler in (*_Routes(service).table(), *models.table()):
        for path in paths:
            app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    """Answer 507 where nothing can be stored, and 500 for a damaged record of a run."""
    status, code = (507, "storage") if isinstance(error, StorageError) else (500, "damaged_record")
    return JSONResponse({"detail": {"error": {"code": code, "message": str(error)}}}, status)


class _Routes:
    """The handlers; those that are not `async` run in threads."""

    def __init__(self, service: JobsService) -> None:
        self.service = service

    def table(self) -> Iterator[tuple[str, list[str], Callable[..., Any]]]:
        """Yield the method, paths and handler of every route; the first that fits a path answers."""
        lists = [f"/api/{kind}/jobs" for kind in ("rl", "learning", "orchestration")]
        job_paths = [f"{path}/{{job_id}}" for path in lists]
        yield "GET", ["/", "/health"], self.health
        yield "POST", ["/api/rl/verify_task_app"], self.verify_task_app
        yield "POST", ["/api/rl/jobs"], self.create
        yield "GET", [*lists, "/api/jobs"], self.list_jobs
        yield "GET", [*job_paths, *(f"{path}/status" for path in job_paths)], self.status
        yield "POST", [f"{path}/start" for path in job_paths], self.status  # of an older flow: a job starts by itself
        yield "POST", [f"{path}/cancel" for path in job_paths], self.cancel
        streams = [f"{path}{tail}" for path in job_paths for tail in ("/stream", "/events/stream")]
        yield "GET", [*streams, "/rl/jobs/{job_id}/stream"], self.stream
        for handler in (self.events, self.metrics, self.timeline, self.config):
            yield "GET", [f"{path}/{handler.__name__}" for path in job_paths], handler
        yield "GET", ["/api/jobs/{job_id}/runs"], self.runs

    def health(self) -> Json:
        """Answer that the service runs."""
        return {"status": "ok", "service": "gspo-gym jobs"}

    async def verify_task_app(self, request: Request) -> Json:
        """Ask a task app for its health."""
        body = await object_in(request)
        url = body.get("endpoint_base_url")
        if not isinstance(url, str):
            raise RefusalError(422, "invalid_request", "endpoint_base_url: expected the task app's URL")
        settings = TaskAppSettings(request_timeout_seconds=10.0, max_attempts=1)
        try:
            async with TaskAppClient(url, settings=settings, keys=self.service.app_keys) as app:
                await app.health()
        except ConfigError as error:
            raise RefusalError(422, "invalid_request", f"endpoint_base_url: {error}") from None
        except GymError as error:
            attempt = {"url": url, "status": None, "error": str(error)}
            return {"any_ok": False, "candidates_first15": [], "attempts": [attempt]}
        return {"any_ok": True, "candidates_first15": [], "attempts": [{"url": url, "status": 200}]}

    async def create(self, request: Request) -> JSONResponse:
        """Queue a job; answer a repeated Idempotency-Key with the job that the first one made."""
        key = request.headers.get("idempotency-key")
        if key is not None and not _KEY.fullmatch(key):
            raise RefusalError(400, "invalid_key", "Idempotency-Key: expected 1 to 200 printable ASCII characters")
        body = await object_in(request)
        return await asyncio.to_thread(self._create, body, key)

    def _create(self, body: Json, key: str | None) -> JSONResponse:
        service = self.service
        try:
            config = parse_request(body, runs=service.folder / "runs", machine=service.machine)
        except ConfigError as error:
            raise RefusalError(422, "invalid_config", str(error)) from None
        base = config.model.base or str(config.model.source)
        job, is_new = service.store.create(
            body, base=base, config_of=partial(toml_of, config), max_queued=service.max_queued, key=key
        )
        service.supervisor.wake()
        return JSONResponse(self._job_to_wire(job), 201 if is_new else 200)

    def list_jobs(self, request: Request) -> Json:
        """Return the newest jobs."""
        query = request.query_params
        limit = number_in(query, "limit", 50, least=1, most=1_000)
        status, kind = query.get("status"), query.get("type", "rl")
        after = _moment(query, "created_after")
        jobs = [
            job
            for job in reversed(self.service.store.jobs() if kind == "rl" else [])
            # Rounded as a client was told it: a product by 10**6 rounds other times.
            if status in (None, job.status) and datetime.fromisoformat(timestamp(job.created_at)).timestamp() > after
        ]
        return {"jobs": [self._job_to_wire(job) for job in jobs[:limit]]}

    def status(self, job_id: str) -> Json:
        """Return a job's status."""
        return self._job_to_wire(self.service.job(job_id))

    def config(self, job_id: str) -> Json:
        """Return the configuration as it was sent, and the resolved one as TOML."""
        job = self.service.job(job_id)
        config = job.request.get("data", job.request)["config"]
        return {"job_id": job.job_id, "config": config, "resolved_toml": job.config}

    def runs(self, job_id: str) -> Json:
        """Return a job's last process."""
        job = self.service.job(job_id)
        run = {"run_id": f"{job.job_id}.{job.attempt}", "run_number": job.attempt, "engine": "gspo-gym"}
        started_at, ended_at = _when(job.started_at), _when(job.finished_at)
        run |= {"status": job.status, "created_at": started_at, "started_at": started_at, "ended_at": ended_at}
        return {"runs": [run] if job.attempt else []}

    def cancel(self, job_id: str) -> Json:
        """Cancel a job: at once if it is queued; stop its process if it runs; leave it if it has ended."""
        store = self.service.store
        with store.transaction():
            job = self.service.job(job_id)
            now = time.time()
            if job.status == "queued":
                event = Event("rl.job.cancelled", "the job was cancelled before it began", phase="cancelled")
                job = store.update(job.job_id, event, cancelled_at=now, finished_at=now)
            elif job.cancelled_at is None and not job.has_ended:
                event = Event("rl.job.cancelling", "a cancel was asked for: the run stops", level="warning")
                job = store.update(job.job_id, event, cancelled_at=now)
        self.service.supervisor.wake()
        return self._job_to_wire(job)

    def timeline(self, job_id: str) -> Json:
        """Return the job's phases."""
        events = self.service.store.events(self.service.job(job_id).job_id, only_phases=True)
        phases = [
            {
                "phase": event.phase,
                "message": event.message,
                "metadata": event.data,
                "created_at": _when(event.created_at),
            }
            for event in events
        ]
        return {"events": phases, "timeline": phases}  # two of the clients' names

    def metrics(self, job_id: str, request: Request) -> Json:
        """Return the numbers of the steps after `after_step`."""
        after = number_in(request.query_params, "after_step", -1, least=-1)
        limit = number_in(request.query_params, "limit", 200, least=1, most=10_000)
        folder = self.service.supervisor.run_folder(self.service.job(job_id).job_id)
        return {"points": points_of(folder, after_step=after, limit=limit)}

    async def events(self, job_id: str, request: Request) -> Any:
        """Return the events after a number; as a stream to a client that accepts one."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return await self.stream(job_id, request)
        query = request.query_params
        after = max(number_in(query, "since_seq", 0), number_in(query, "after", 0))  # `after`: an event_id
        limit = number_in(query, "limit", 200, least=1, most=1_000)
        return await asyncio.to_thread(self._events, job_id, after, limit)

    def _events(self, job_id: str, after: int, limit: int) -> Json:
        events = self.service.store.events(self.service.job(job_id).job_id, after=after, limit=limit)
        return {"events": [_event_to_wire(event, job_id) for event in events]}

    async def stream(self, job_id: str, request: Request) -> Response:
        """Send the events after a number as they happen, until the job's last one."""
        query = request.query_params
        after = max(number_in(query, "since_seq", 0), number_in(query, "since_id", 0))
        heartbeat = number_in(query, "heartbeat", _HEARTBEAT_SECONDS, least=1, most=_MAX_HEARTBEAT_SECONDS)
        after = number_in(request.headers, "last-event-id", after)
        job = await asyncio.to_thread(self.service.job, job_id)
        if job.has_ended and not await asyncio.to_thread(self.service.store.events, job_id, after=after, limit=1):
            return Response(status_code=204)  # at which browsers stop asking
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(job_id, after, heartbeat), 200, headers, "text/event-stream")

    async def _stream(self, job_id: str, after: int, heartbeat: int) -> AsyncIterator[str]:
        store = self.service.store
        quiet_since = time.monotonic()
        while not self.service.is_stopping():
            # In this order: an event that is recorded with the job's end is not missed.
            has_ended = (await asyncio.to_thread(store.require, job_id)).has_ended
            events = await asyncio.to_thread(store.events, job_id, after=after, limit=_BATCH)
            if events:
                after = events[-1].seq
                wire = [(event.seq, json.dumps(_event_to_wire(event, job_id))) for event in events]
                # At once: a client that has gone is noticed between two parts.
                yield "".join(f"id: {seq}\ndata: {text}\n\n" for seq, text in wire)
                quiet_since = time.monotonic()
                continue
            if has_ended:
                return
            if time.monotonic() - quiet_since > heartbeat:
                quiet_since = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(_POLL_SECONDS)

    def _job_to_wire(self, job: Job) -> Json:
        """Return a job in the clients' format."""
        folder = self.service.supervisor.run_folder(job.job_id)
        results = results_of(job, folder)
        model = None if results is None or job.status != "succeeded" else results["model_id"]
        return {
            "job_id": job.job_id,
            "id": job.job_id,
            "job_type": "rl",
            "training_type": "rl",
            "algorithm": "gspo",
            "status": job.status,
            "state": job.status,
            "phase": "cancelling" if job.cancelled_at is not None and not job.has_ended else job.status,
            "attempt": job.attempt,
            "created_at": timestamp(job.created_at),
            "updated_at": timestamp(job.updated_at),
            "started_at": _when(job.started_at),
            "finished_at": _when(job.finished_at),
            "base_model": job.base,
            "linked_job_id": None,
            "fine_tuned_model": model,
            "model_id": model,
            "results": results,
            "error": job.error,
            "error_message": job.error,
            "tags": job.request.get("tags"),
            "metadata": job.request.get("metadata"),
            "run_folder": str(folder),
        }


def _event_to_wire(event: Event, job_id: str) -> Json:
    return {
        "seq": event.seq,
        "event_id": str(event.seq),
        "type": event.type,
        "level": event.level,
        "message": event.message,
        "data": event.data,
        "job_id": job_id,
        "created_at": _when(event.created_at),
    }


def _when(seconds: float | None) -> str | None:
    return None if seconds is None else timestamp(seconds)


def _moment(values: Mapping[str, str], name: str) -> float:
    """Return a time from a query, in seconds since 1970 or ISO 8601; 0 if it is missing.

    Raises:
        RefusalError: 400, it is not a time.
    """
    text = values.get(name, "0")
    if re.fullmatch(r"[0-9]{1,12}", text):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise RefusalError(400, "invalid_time", f"{name}: expected seconds since 1970, or ISO 8601") from None


Result = TypeVar("Result")

_NAMED = re.compile(r"(?:.*:)?(job_[0-9a-f]{24})(?::step_(\d{1,12})|@(best|latest|\d{1,12}))?", re.DOTALL)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


_MAX_EXPORTS = 64  # at once, of which all but one wait
_MAX_REMEMBERED_EXPORTS = 256


class Exports:
    """The exports of this service's life, oldest first; they outlive the requests for them.

    One works at a time, for each loads a model.
    """

    def __init__(self, push: Callable[[Export], Awaitable[str]]) -> None:
        self._push = push
        self._tasks: dict[str, tuple[Export, asyncio.Task[str]]] = {}
        self._lock = asyncio.Lock()

    def begin(self, export: Export) -> tuple[str, asyncio.Task[str]]:
        """Begin an export; return its id and its work, or those of the same one if it is under way already.

        Raises:
            RefusalError: 429, too many are waiting.
        """
        finished_ids = [export_id for export_id, (_, task) in self._tasks.items() if task.done()]
        for export_id in finished_ids[:-_MAX_REMEMBERED_EXPORTS]:
            del self._tasks[export_id]
        for export_id, (other_export, task) in self._tasks.items():
            if other_export == export and not task.done():
                return export_id, task
        if (num_open := sum(not task.done() for _, task in self._tasks.values())) >= _MAX_EXPORTS:
            raise RefusalError(429, "queue_full", f"{num_open} exports are waiting, as many as may")
        export_id = f"export_{secrets.token_hex(12)}"
        task = asyncio.create_task(self._work(export))
        self._tasks[export_id] = (export, task)
        return export_id, task

    def to_wire(self, export_id: str) -> Json:
        """Return an export's state.

        Raises:
            RefusalError: 404, this service has not begun it.
        """
        if export_id not in self._tasks:
            raise RefusalError(404, "unknown_export", "there is no export of that id since this service began")
        export, task = self._tasks[export_id]
        state: Json = {"export_id": export_id, "status": "running", "repo_id": export.repo, "repo_url": None}
        if not task.done():
            return state
        error = asyncio.CancelledError("the service ended") if task.cancelled() else task.exception()
        if error is not None:
            return state | {"status": "failed", "error": str(error) or type(error).__name__}
        return state | {"status": "succeeded", "repo_url": task.result()}

    async def close(self) -> None:
        """Stop all exports."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, export: Export) -> str:
        async with self._lock:
            return await self._push(export)


class ModelRoutes:
    """The handlers; those that are not `async` run in threads."""

    def __init__(self, service: JobsService) -> None:
        self.service = service
        self.exports = Exports(service.push)

    def table(self) -> Iterator[tuple[str, list[str], Callable[..., Any]]]:
        """Yield the method, paths and handler of every route; the first that fits a path answers."""
        models = ("/api/learning/models", "/api/artifacts/models", "/api/models")
        yield "GET", ["/api/learning/models", "/api/learning/models/rl", "/api/models"], self.list_models
        yield "GET", ["/api/learning/models/{model_id:path}/archive"], self.archive
        yield "GET", [f"{path}/{{model_id:path}}" for path in models], self.model
        yield "GET", ["/api/artifacts"], self.artifacts
        yield "POST", ["/api/learning/exports/hf"], self.export
        yield "GET", ["/api/learning/exports/{export_id}"], self.export_status
        for path in ("chat/completions", "completions", "responses"):
            yield "POST", [f"/api/inference/v1/{path}", f"/api/v1/{path}"], partial(self.infer, path)
        yield "GET", ["/api/inference/v1/models", "/api/v1/models"], self.list_models

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
        rows = [_model(job, checkpoints) for job, checkpoints in self.service.models()]
        models = [row for row in rows if kind in (None, "rl", "models") and status in (None, row["status"])]
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

    async def export(self, request: Request) -> JSONResponse:
        """Push a model to the hub, as an adapter or merged; answer 202 with an id where that takes long."""
        body = await object_in(request)
        repo, key = body.get("repo_id"), body.get("key")
        if not (isinstance(repo, str) and _REPO.fullmatch(repo) and isinstance(key, str)):
            raise RefusalError(422, "invalid_request", "expected repo_id as OWNER/NAME, and key: a model's id or path")
        is_merged = body.get("artifact_kind") not in (None, "lora")
        job, _ = await asyncio.to_thread(self.service.model, key)
        folder = self.service.supervisor.run_folder(job.job_id)
        is_private = body.get("visibility") != "public"
        export_id, task = self.exports.begin(Export(folder, repo, is_private, is_merged))
        # `wait` and no `wait_for`: the export goes on where its request is answered.
        await self._unless_stopping(asyncio.wait({task}, timeout=self.service.export_answer_seconds))
        if task.done():
            try:
                task.result()
            except ServiceError as error:
                raise RefusalError(424, "export_failed", str(error)) from None
        return JSONResponse(self.exports.to_wire(export_id), 200 if task.done() else 202)

    async def export_status(self, export_id: str) -> Json:
        """Answer whether an export has ended, and how."""
        return self.exports.to_wire(export_id)

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
        model = await asyncio.to_thread(self._model_called, body.get("model"))
        return await self._unless_stopping(self.service.inference.answer(model, path, body, request))

    def _model_called(self, name: Any) -> ModelToServe:
        """Return the model that clients call so: PREFIX:BASE:JOB[:step_N], JOB[@best|@N], or the base of a job.

        Without a step it is the newest checkpoint, as in its archive.

        Raises:
            RefusalError: 404, there is no such model or step; 409, its job has not ended.
        """
        match = _NAMED.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            if any(name == job.base for job in self.service.store.jobs()):
                return ModelToServe(name, name)
            raise RefusalError(404, "unknown_model", "there is no model of that id: see /api/learning/models")
        job, checkpoints = self.service.model(match[1])
        if not job.has_ended:  # what it keeps may go while it is loaded
            raise RefusalError(
                409, "job_runs", f"{job.job_id} is still {job.status}: its model can be asked at its end"
            )
        folder = self.service.supervisor.run_folder(job.job_id)
        step_text = match[2] or match[3] or "latest"
        if step_text == "best":
            return ModelToServe(f"{folder}@best", f"{model_id_of(job)}@best")
        steps = [checkpoint["step"] for checkpoint in checkpoints]
        step = steps[-1] if step_text == "latest" else int(step_text)
        if step not in steps:
            raise RefusalError(404, "unknown_model", f"{job.job_id} has no checkpoint of step {step}, only of {steps}")
        return ModelToServe(f"{folder}@{step}", f"{model_id_of(job)}:step_{step:06d}")


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
