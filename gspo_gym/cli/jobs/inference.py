"""Dev inference: `gspo-gym models serve` in a child process, started when a client first asks for its model.

One model at a time. A request for another one waits until the present model has answered what it was asked, and then
takes its place. The model ends with the service, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from gspo_gym.cli.jobs.records import last_error, running
from gspo_gym.errors import ServiceError
from gspo_gym.remote.guard import Receive, RefusalError, Scope, Send, until_gone

if TYPE_CHECKING:
    import httpx

_KEY = "GSPO_GYM_INFERENCE_KEY"
_MAX_REQUESTS = 64  # at once, those that wait for another model's turn included
_START_SECONDS = 600.0  # for a model to be loaded, which may be downloaded first
_STOP_SECONDS = 10.0
_SERVING = re.compile(rb"serving .* at (http://\S+)/v1\n")


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """A model to be served: its name for `gspo-gym models serve`, and the one that its answers have."""

    source: str
    name: str


@dataclass
class _Child:
    """The process that serves a model.

    Attributes:
        stack: ends the process and the client.
        num_requests: that it is answering. is_idle: set while there are none.
        is_lost: a connection to it failed.
    """

    model: ModelToServe
    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    draining: asyncio.Task[None]
    stack: contextlib.AsyncExitStack
    num_requests: int = 0
    is_lost: bool = False
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lives(self) -> bool:
        return not self.is_lost and self.process.returncode is None


class Inference:
    """The model that answers; use it within one event loop, and `close` it there.

    Args:
        command: that serves, before MODEL --name ... --port 0 --api-key-env ...; environ: of the child.
        log: file for the child's output.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._command, self._environ, self._log = command, environ, log
        self._turn = asyncio.Lock()  # of starting and replacing the model, in the order of the requests
        self._child: _Child | None = None
        self._num_requests = 0

    async def answer(
        self, model: ModelToServe, path: str, body: Mapping[str, Any], request: Request
    ) -> StreamingResponse:
        """Have the model answer the body (JSON values) at `path`, below /v1; the model is started if it is not there.

        Raises:
            RefusalError: 503, too many requests wait, or the client has gone; 424, the model cannot be served.
        """
        import httpx

        self._check_room()
        try:
            with contextlib.suppress(httpx.ConnectError):  # it had died before, and is started again
                return await self._ask(model, path, body, request)
            return await self._ask(model, path, body, request)
        except httpx.TransportError as error:
            raise RefusalError(424, "model_failed", f"{model.name}: {self._reason(error)}") from error

    async def _ask(self, model: ModelToServe, path: str, body: Mapping[str, Any], request: Request) -> _Passed:
        import httpx

        async with contextlib.AsyncExitStack() as stack:
            self._num_requests += 1
            stack.callback(self._leave)
            child = await stack.enter_async_context(self._serving(model))
            call = child.client.build_request("POST", f"/{path}", json={**body, "model": model.name})
            try:
                answer = await _unless_gone(child.client.send(call, stream=True), request)
            except httpx.TransportError:
                child.is_lost = True
                raise
            stack.push_async_callback(answer.aclose)
            # From here on the response closes all of that, after its last byte.
            return _Passed(answer, stack.pop_all())

    async def close(self) -> None:
        """End the model."""
        async with self._turn:
            await self._end()

    def _check_room(self) -> None:
        if self._num_requests >= _MAX_REQUESTS:
            text = f"{_MAX_REQUESTS} requests are with the model, which is as many as may be; try again"
            raise RefusalError(503, "overloaded", text)

    def _leave(self) -> None:
        self._num_requests -= 1

    @contextlib.asynccontextmanager
    async def _serving(self, model: ModelToServe) -> AsyncIterator[_Child]:
        """Yield the running model, which is not replaced within the block."""
        async with self._turn:
            child = self._child
            if child is None or child.model != model or not child.lives:
                if child is not None and child.lives:
                    await child.is_idle.wait()
                await self._end()
                child = self._child = await self._start(model)
            child.num_requests += 1
            child.is_idle.clear()
        try:
            yield child
        finally:
            child.num_requests -= 1
            if not child.num_requests:
                child.is_idle.set()

    async def _start(self, model: ModelToServe) -> _Child:
        import httpx

        key = secrets.token_urlsafe(32)
        options = ["--name", model.name, "--port", "0", "--api-key-env", _KEY]
        command, environ = [*self._command, model.source, *options], {**self._environ, _KEY: key}
        async with contextlib.AsyncExitStack() as stack:
            try:
                starting = running(command, self._log, environ, stop_seconds=_STOP_SECONDS)
                process = await stack.enter_async_context(starting)
            except OSError as error:
                raise RefusalError(424, "model_failed", f"{model.name}: cannot be started: {error}") from error
            try:
                async with asyncio.timeout(_START_SECONDS):
                    url = await _url_of(process)
            except (ServiceError, TimeoutError) as error:
                await stack.aclose()  # then its log is whole
                raise RefusalError(424, "model_failed", f"{model.name}: {self._reason(error)}") from error
            draining = asyncio.create_task(_drain(process))
            client = httpx.AsyncClient(
                base_url=f"{url}/v1",
                headers={"authorization": f"Bearer {key}"},
                timeout=None,  # a client that has enough hangs up
                # Kept ones would be of a process that may have died.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=False,
            )
            await stack.enter_async_context(client)
            child = _Child(model, process, client, draining, stack.pop_all())
        child.is_idle.set()
        return child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.stack.aclose()
            await child.draining

    def _reason(self, error: BaseException) -> str:
        return last_error(self._log) or str(error) or type(error).__name__


async def _url_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        if (match := _SERVING.fullmatch(line)) is not None:
            return match[1].decode()
    raise ServiceError("the model's process ended before it served")


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read on, or the process would stop at a full pipe."""
    assert process.stdout is not None
    while await process.stdout.read(65_536):
        pass


async def _unless_gone(work: Awaitable[httpx.Response], request: Request) -> httpx.Response:
    """Return the result; cancel the work if the client hangs up, since nothing is sampled for it.

    Raises:
        RefusalError: 503, it hung up.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RefusalError(503, "client_gone", "the client hung up")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class _Passed(StreamingResponse):
    """The child's answer, part by part as it comes; closes the connection to it at the end, however that comes."""

    def __init__(self, answer: httpx.Response, stack: contextlib.AsyncExitStack) -> None:
        super().__init__(answer.aiter_bytes(), answer.status_code, media_type=answer.headers.get("content-type"))
        self._stack: Callable[[], Awaitable[None]] = stack.aclose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stack()
