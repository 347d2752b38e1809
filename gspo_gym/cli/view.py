"""`gspo-gym view RUN | FOLDER`: the page of `report`, live: new steps appear as they land.

The server reads the folders and changes nothing. It is on loopback, and its URL has a token: other users of the machine
and pages of other sites get nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hmac
import json
import secrets
import signal
import threading
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.cli.command_line import run_or_path
from gspo_gym.cli.report import described_run
from gspo_gym.errors import GymError, MissingExtraError
from gspo_gym.run.folders import run_folders
from gspo_gym.run.registry import list_runs, read_run

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from gspo_gym.remote.guard import App

Json = Any  # the values of json.loads
_POLL_SECONDS = 1.0
_MAX_DIGITS = 9  # of a group's number
# Of a run: a change of one of these is something new to show.
_WATCHED = ("metrics.jsonl", "events.jsonl", "episodes", "tokens", "summary.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `view`."""
    parser.add_argument(
        "name", nargs="?", default="runs", metavar="RUN|FOLDER", help="a run, or a folder with runs (runs)"
    )
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 takes any that is free (default)")
    parser.add_argument("--no-open", action="store_true", help="print the URL, and open no browser")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; print the URL once browsers may connect.

    Raises:
        ConfigError: there is no such run or folder, or the port is taken.
        MissingExtraError: uvicorn is not installed.
    """
    try:
        from gspo_gym.remote.serving import LoopServer
    except ImportError as error:
        raise MissingExtraError("the live page needs: pip install 'gspo-gym[serve]'") from error
    token, is_stopping = secrets.token_urlsafe(24), threading.Event()
    app = create_app(run_or_path(Path(arguments.name)), token, is_stopping)
    server = LoopServer(app, host="127.0.0.1", port=arguments.port)

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await server.start()
        url = f"{server.url}/?token={token}"
        print(url, flush=True)
        if not arguments.no_open:
            webbrowser.open(url)
        await stop.wait()
        is_stopping.set()  # ends what is streamed to browsers, for which the server would wait
        await server.stop()

    asyncio.run(serve())
    return 0


def create_app(folder: Path, token: str, is_stopping: threading.Event) -> App:
    """Return the server's application.

    Args:
        folder: a run's, or one with runs in it, which may come later.
        token: a browser that opens "/?token=..." gets it as a cookie, which all other routes need.
        is_stopping: streams of changes end when it is set.
    """
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, RedirectResponse, StreamingResponse
    from starlette.routing import Route

    from gspo_gym.remote.guard import Guard
    from gspo_gym.run.report.page_data import RecordedStep, live_page, run_values

    def runs(_: Request) -> list[Json]:
        return [{"name": _name_of(run.folder, folder), **run.to_dict()} for run in list_runs(folder)]

    def run(request: Request) -> dict[str, Json]:
        path = _paths_in(folder)[request.query_params.get("run", "")]
        # A run beside the first one shows its curves only.
        return run_values(path) if "beside" in request.query_params else described_run(path)

    @functools.lru_cache(maxsize=2)  # its groups are asked for one by one
    def read(path: Path, name: str, _: tuple[Json, ...]) -> RecordedStep:
        return RecordedStep(path, name)

    def requested_step(request: Request) -> RecordedStep:
        path = _paths_in(folder)[request.query_params.get("run", "")]
        return read(path, request.query_params.get("name", ""), tuple(_stamps(path)))

    def step(request: Request) -> dict[str, Json]:
        return requested_step(request).outline()

    def group(request: Request) -> dict[str, Json]:
        number = request.query_params.get("number", "")
        is_readable = number.isdecimal() and len(number) <= _MAX_DIGITS  # Python reads 4,300 digits, and no more
        return requested_step(request).group(int(number) if is_readable else -1)

    def doing(request: Request) -> dict[str, Json]:  # asked for every few seconds: nothing else is read again
        return {"doing": read_run(_paths_in(folder)[request.query_params.get("run", "")]).doing}

    def changes(_: Request) -> StreamingResponse:
        return StreamingResponse(_changes(folder, is_stopping), media_type="text/event-stream")

    def page(_: Request) -> HTMLResponse:
        return HTMLResponse(live_page(folder.name), headers={"Cache-Control": "no-store"})

    async def front(request: Request) -> Response:
        request_token = request.query_params.get("token")
        if request_token is None:
            return await _guard(page, token)(request)
        answer = RedirectResponse("/")  # the token does not stay in the address, nor in the browser's history
        answer.set_cookie(_cookie_name(request), request_token, httponly=True, samesite="strict")
        return answer

    answers = (runs, run, step, group, doing, changes)
    routes = [Route("/", front), *(Route(f"/{handler.__name__}", _guard(handler, token)) for handler in answers)]
    return Guard(Starlette(routes=routes), open_paths=())


def _guard(answer: Callable[[Request], Any], token: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a function of a request, which runs in a thread: it reads files."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, PlainTextResponse

    async def route(request: Request) -> Response:
        cookie = request.cookies.get(_cookie_name(request), "")
        if not hmac.compare_digest(cookie.encode(), token.encode()):
            return PlainTextResponse("open the URL that `gspo-gym view` printed, with its token", status_code=403)
        try:
            values = await run_in_threadpool(answer, request)
        except KeyError as error:
            return PlainTextResponse(f"there is no run {error}", status_code=404)
        except GymError as error:
            return PlainTextResponse(str(error), status_code=404)
        return JSONResponse(values) if isinstance(values, dict | list) else values

    return route


def _paths_in(folder: Path) -> dict[str, Path]:
    """Return the runs' folders by their path in the folder; the folder of a run by its own name."""
    return {_name_of(path, folder): path for path in run_folders(folder)}


def _name_of(path: Path, folder: Path) -> str:
    return folder.name if path == folder else str(path.relative_to(folder))


def _cookie_name(request: Request) -> str:
    return f"gspo_gym_{request.url.port}"  # cookies are a host's, whatever its port


async def _changes(folder: Path, is_stopping: threading.Event) -> AsyncIterator[str]:
    """Yield a server-sent event with the names of the runs that have changed, once for each change."""
    last_stamps: dict[str, list[Json]] = {}
    while not is_stopping.is_set():
        now = await asyncio.to_thread(lambda: {name: _stamps(path) for name, path in _paths_in(folder).items()})
        changed_names = [name for name, stamps in now.items() if last_stamps.get(name) != stamps]
        if last_stamps and changed_names:
            yield f"data: {json.dumps(changed_names)}\n\n"
        elif not last_stamps:
            yield ": watching\n\n"
        last_stamps = now
        await asyncio.sleep(_POLL_SECONDS)


def _stamps(folder: Path) -> list[Json]:
    stamps: list[Json] = []
    for name in _WATCHED:
        with contextlib.suppress(OSError):
            status = (folder / name).stat()
            stamps.append((name, status.st_mtime_ns, status.st_size))
    return stamps
