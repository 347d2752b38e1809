"""A vLLM server as a child of this process, and vLLM's exceptions and dead processes as EngineErrors.

It is vLLM's OpenAI server with the options for training: exact logprobs of the sampling distribution, the route that
takes and gives token ids, and the control routes by which weights change. Those run code for any client that reaches
them, with or without a key, so the server listens on loopback or a Unix socket and nowhere else. Does not import vLLM.
Read with vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from gspo_gym.base.leftovers import end_with_us, goes_with_us, has_ended, remove_folder, stays, temporary_folder
from gspo_gym.base.settings import is_loopback, read_key
from gspo_gym.engine.vllm.control import Address, address_of
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import ConfigError, EngineError, GymError, MissingExtraError

_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 5.0
_STOP_SECONDS = 30.0
_LOG_LINES = 40
_LOG_BYTES = 20_000


class VllmServer:
    """A server that runs for as long as a `with` block lasts, or between `start` and `stop`.

    Args:
        settings: of the model. Adapters can be loaded while it runs if `max_lora_rank` > 0.
        host, port: to listen on; port 0 takes any that is free.
        uds: absolute path of a Unix socket to listen on instead.
        name: of the model in requests.
        api_key_env: environment variable with the key that requests for samples must send; None asks for none.
        python: the interpreter that has vLLM; None: this one.
        log: the file that its output goes to; None: a file that is removed when it stops.
        start_seconds: until it must answer.

    Raises:
        ConfigError: other machines could reach it.

    >>> VllmServer(VllmSettings(model="policy", max_model_len=512), host="0.0.0.0")
    Traceback (most recent call last):
    gspo_gym.errors.ConfigError: --host 0.0.0.0: other machines could reach it, and no key protects the routes ...
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        uds: str | None = None,
        name: str = "policy",
        api_key_env: str | None = None,
        python: Path | None = None,
        log: Path | None = None,
        start_seconds: float = 900.0,
    ) -> None:
        _require_reachable_from_here_only(host, uds)
        self._settings = settings
        self._host = host
        self._port = port
        self._uds = uds
        self._name = name
        self._key = read_key(api_key_env, "--api-key-env")
        self._python = python or Path(sys.executable)
        self._log = log
        self._start_seconds = start_seconds
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the address, for `VllmHttpSettings.url`."""
        if self._uds is not None:
            return f"unix:{self._uds}"
        return f"http://[{self._host}]:{self._port}" if ":" in self._host else f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The id of the first process, which leads a process group; None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers; takes half a minute at least.

        Raises:
            EngineError: it ended, or did not answer in time; repeats the end of the log.
            MissingExtraError: that interpreter has no vLLM.
        """
        if self._process is not None:
            raise EngineError(f"vLLM server {self.url}: runs already")
        self._folder = Path(temporary_folder("gspo-gym-vllm-"))
        try:
            if self._uds is None:
                self._port = _free_port(self._host, self._port)
            else:
                goes_with_us(Path(self._uds))
            log = self._log_path
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    self.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    start_new_session=True,  # a group, which is ended as a whole
                )
            end_with_us(self._process.pid, is_group=True)
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def wait(self) -> int:
        """Return its exit status when it has ended by itself."""
        assert self._process is not None
        return self._process.wait()

    def log_tail(self) -> str:
        """Return the last lines of the output."""
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - _LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_LOG_LINES:])

    def stop(self) -> None:
        """End it and all its processes, first politely. Stopping twice is fine."""
        process, self._process = self._process, None
        if process is not None:
            _end_group(process)
            has_ended(process.pid, is_group=True)
        if self._folder is not None:
            remove_folder(self._folder)
            self._folder = None
        if self._uds is not None:
            Path(self._uds).unlink(missing_ok=True)  # or the next server could not listen there
            stays(Path(self._uds))

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def command(self) -> list[str]:
        """Return the command line that `start` runs."""
        assert self._folder is not None, "command: between start and stop"
        # Without a tokenizer and with an empty generation config the server knows no end tokens but a request's own,
        # which `min_tokens` would withhold. (0.32 reads the model's even with `--generation-config vllm`.)
        (self._folder / "generation_config.json").write_text("{}\n", encoding="utf-8")
        fields = {**self._settings.engine_args(), "generation_config": self._folder, "served_model_name": self._name}
        del fields["disable_log_stats"]  # a server has /metrics to show them
        where = ["--uds", self._uds] if self._uds is not None else ["--host", self._host, "--port", str(self._port)]
        options = ["--enable-scale-out", "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
        server = [str(self._python), "-m", "vllm.entrypoints.openai.api_server"]
        return [*server, *where, *options, *flags_of(fields)]

    @property
    def _log_path(self) -> Path:
        assert self._log is not None or self._folder is not None
        return self._log or self._folder / "server.log"  # type: ignore[operator]

    def _environment(self) -> dict[str, str]:
        env = {**self._settings.environment(), **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        if self._settings.max_lora_rank:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self._settings.model_folder is not None:  # nothing of it is elsewhere
            env["HF_HUB_OFFLINE"] = "1"
        # Its workers load `engine/vllm/worker.py`, with an interpreter that may not have this package.
        ours = str(Path(__file__).parents[3])
        env["PYTHONPATH"] = os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])
        if self._key is not None:
            env["VLLM_API_KEY"] = self._key  # not an argument, which every program of this machine can read
        return env

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        address = address_of(self.url)
        deadline = time.monotonic() + self._start_seconds
        while not _answers(address):
            # A server that has ended would be waited for until the deadline.
            status = self._process.poll()
            if status is not None:
                tail = self.log_tail()
                if "No module named 'vllm'" in tail or "No module named vllm" in tail:
                    raise MissingExtraError(f"{self._python} has no vLLM: pip install 'gspo-gym[vllm]'")
                raise EngineError(f"vLLM server: ended with status {status} before it answered. Its log:\n{tail}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"vLLM server: no answer within {self._start_seconds:g} seconds. Its log:\n{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)


# Any: fields of vLLM's arguments are of many types.
def flags_of(fields: dict[str, Any]) -> list[str]:
    """Return fields of vLLM's `AsyncEngineArgs` as arguments of the command.

    >>> flags_of({"max_model_len": 512, "enforce_eager": True, "enable_sleep_mode": False, "device_ids": [2, 3]})
    ['--max-model-len', '512', '--enforce-eager', '--no-enable-sleep-mode', '--device-ids', '2,3']
    """
    flags: list[str] = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", ",".join(map(str, value))]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _require_reachable_from_here_only(host: str, uds: str | None) -> None:
    if uds is not None:
        if not uds.startswith("/"):
            raise ConfigError(f"--uds: expected an absolute path, got {uds!r}")
    elif not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could reach it, and no key protects the routes that change weights and run "
            "code; serve on 127.0.0.1 or --uds, and let another machine in with: ssh -L 8000:127.0.0.1:8000 HOST"
        )


def _free_port(host: str, port: int) -> int:
    # If something listens there, its answers would be taken for our server's.
    # vLLM does not say which port it took, if it is told to take any.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"vLLM server: cannot listen on {host}, port {port}: {error}") from error
        return int(probe.getsockname()[1])


def _answers(address: Address) -> bool:
    parts = urlsplit(address.base_url)
    connection = http.client.HTTPConnection(parts.hostname or "localhost", parts.port, timeout=_HEALTH_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        # http.client speaks to no Unix socket by itself.
        if address.uds is not None:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(_HEALTH_SECONDS)
            connection.sock.connect(address.uds)
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    # The leader ends its workers at SIGTERM; the rest of the group is killed.
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def as_engine_error(doing: str) -> Iterator[None]:
    """Raise vLLM's exceptions, of many classes over its versions, as EngineError; ours pass."""
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        raise EngineError(f"{doing}: {type(error).__name__}: {error}") from error


@contextlib.asynccontextmanager
async def commanding(llm: Any, doing: str) -> AsyncIterator[None]:
    """Guard commands to the processes of an `AsyncLLM`, which must not die before they answer.

    Requests for tokens fail when a process dies, but vLLM waits for the answer to a command for ever: seen with an
    engine that was killed while it slept. The task that reads all answers has ended then, and so does the block.

    Raises:
        EngineError: a process died, the engine was closed, or vLLM raised anything.
    """
    with as_engine_error(doing):
        try:
            async with asyncio.timeout(None) as watchdog, _told(llm.output_handler, partial(_expire, watchdog)):
                yield
        except TimeoutError as error:
            if not watchdog.expired():
                raise
            raise EngineError(f"{doing}: EngineDeadError: vLLM ended before it had answered") from error


@contextlib.asynccontextmanager
async def _told(task: asyncio.Task[None], callback: Callable[[object], None]) -> AsyncIterator[None]:
    # Called also if the task has ended before.
    task.add_done_callback(callback)
    try:
        yield
    finally:
        task.remove_done_callback(callback)


def _expire(watchdog: asyncio.Timeout, _: object) -> None:
    with contextlib.suppress(RuntimeError):  # the block has just ended
        watchdog.reschedule(asyncio.get_running_loop().time())
