"""Several protocols on one port: what each brings, put into one application. Called by the servers' factories."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import fastapi


class Service(Protocol):
    """One protocol of a server."""

    def add_to(self, app: fastapi.FastAPI) -> None:
        """Put its routes into an application. Where two services have the same route, the first one's is taken."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Open for as long as the server runs."""
        ...


def joined_app(services: Sequence[Service], *, title: str) -> fastapi.FastAPI:
    """One application with the routes of all; without pages that would describe them to anybody."""

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for service in services:
                await stack.enter_async_context(service.running())
            yield

    app = fastapi.FastAPI(title=title, lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    for service in services:
        service.add_to(app)
    return app
