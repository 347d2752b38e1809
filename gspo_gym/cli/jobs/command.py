"""`gspo-gym jobs serve`: take the hosted trainer's configurations as jobs, over its routes."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from pathlib import Path

from gspo_gym.base.files import make_folder, take_lock, writing
from gspo_gym.base.settings import read_key
from gspo_gym.errors import ConfigError, MissingExtraError, StorageError
from gspo_gym.remote.apps.client import AppKeys

_KEY_FILE = "api-key"
_CLI = f"{shlex.quote(sys.executable)} -m gspo_gym.cli"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `jobs`."""
    commands = parser.add_subparsers(dest="jobs_command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve jobs until SIGTERM or Ctrl-C; those that run go on, and are found again at the next start",
        description="Serve the hosted trainer's routes for jobs: create, status, events, metrics, timeline, cancel, "
        "models, artifacts, export, and inference with what was trained. Every route needs the key, whose holder can "
        "run any environment as this user.",
    )
    serve.add_argument("--folder", type=Path, default=Path("jobs"), help="of the jobs and their runs (default jobs)")
    serve.add_argument("--host", default="127.0.0.1", help="the address to serve at (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8090, help="0 takes any that is free (default 8090)")
    serve.add_argument(
        "--api-key-env",
        metavar="NAME",
        help=f"environment variable with the key (default: one is made, printed once, and kept in FOLDER/{_KEY_FILE})",
    )
    serve.add_argument("--max-running", type=_count, default=1, metavar="N", help="jobs that run at once (default 1)")
    serve.add_argument("--max-queued", type=_count, default=1_000, metavar="N", help="jobs that wait (default 1000)")
    serve.add_argument(
        "--retries", type=int, default=0, metavar="N", help="of a job that fails, from its last checkpoint (default 0)"
    )
    serve.add_argument(
        "--stop-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="from a cancel until the process is killed; more than run.stop_grace_seconds (default 60)",
    )
    serve.add_argument(
        "--trainer",
        default=f"{_CLI} train",
        metavar="COMMAND",
        help="that is given CONFIG.toml [--resume] (gspo-gym train)",
    )
    serve.add_argument(
        "--inference",
        default=f"{_CLI} models serve",
        metavar="COMMAND",
        help="that serves the model which a client talks with, one at a time, from the first request for it until one "
        "for another model, or the service's end (gspo-gym models serve; add --device cuda, or --engine vllm)",
    )
    serve.add_argument(
        "--local",
        action="store_true",
        help="train with the local engine on one device, whatever a job's [compute], [topology] and [vllm] say",
    )
    serve.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="over what every job's configuration says, for this machine: rollout.max_output_tokens=256",
    )
    serve.set_defaults(run=run_service)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def run_service(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; print the URL once clients may connect.

    Raises:
        ConfigError: the address or the key; another service has the folder; or this system has no sessions.
        MissingExtraError: FastAPI or uvicorn is not installed. StorageError: the folder cannot be written.
    """
    try:
        from gspo_gym.cli.jobs.app import create_jobs_app
        from gspo_gym.cli.jobs.inference import Inference
        from gspo_gym.cli.jobs.records import Machine
        from gspo_gym.cli.jobs.store import Store
        from gspo_gym.cli.jobs.supervisor import JobsService, Supervisor
        from gspo_gym.remote.guard import Guard
        from gspo_gym.remote.serving import bind, serve_until_stopped, server_for
    except ImportError as error:
        raise MissingExtraError("serving jobs needs: pip install 'gspo-gym[serve,apps]'") from error
    if os.name != "posix":
        raise ConfigError("jobs serve: needs a POSIX system, whose processes outlive the service")
    folder: Path = arguments.folder.absolute()
    make_folder(folder)
    lock = take_lock(folder / ".lock")
    if lock is None:
        raise ConfigError(f"{folder}: another service has these jobs; stop it, or give --folder")
    server_socket = bind(arguments.host, arguments.port, has_key=True)
    key = _key_of(folder, arguments.api_key_env)
    environ = {name: value for name, value in os.environ.items() if name != arguments.api_key_env}
    store = Store(folder / "jobs.sqlite3")
    supervisor = Supervisor(
        store,
        folder,
        shlex.split(arguments.trainer),
        environ,  # environments run there, which are other people's code
        max_running=arguments.max_running,
        retries=arguments.retries,
        stop_seconds=arguments.stop_seconds,
    )
    service = JobsService(
        store,
        supervisor,
        folder,
        Inference(shlex.split(arguments.inference), environ, folder / "inference.log"),
        max_queued=arguments.max_queued,
        machine=Machine(is_local=arguments.local, overrides=tuple(arguments.overrides)),
        app_keys=AppKeys.from_environment(os.environ),
        is_stopping=lambda: server.should_exit,
    )
    # No open path: whoever asks whether the service is well has the key, too.
    server = server_for(Guard(create_jobs_app(service), api_key=key, open_paths=()))
    return serve_until_stopped(server, server_socket, subject=f"jobs in {folder}")


def _key_of(folder: Path, variable: str | None) -> str:
    """Return the key in an environment variable, or the folder's key, which is made at the first start."""
    if variable is not None:
        return read_key(variable, "--api-key-env")
    path = folder / _KEY_FILE
    try:
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    key = secrets.token_urlsafe(32)
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(key + "\n")
    print(f"the key, which clients send as X-API-Key, and which is in {path}: {key}", flush=True)
    return key
