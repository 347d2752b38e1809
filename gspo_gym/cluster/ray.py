"""Ray: joined where it runs already, or started on this machine, for this run.

One that is started here listens on loopback, asks for a token of its own, and ends with this program, with its folder,
however that ends. Ray ends a process that has joined it when its raylet or its head is gone: the run goes on with
`--resume`. Written against Ray 2.60.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_gym.base.leftovers import MarkedProcesses, remove_folder, temporary_folder
from gspo_gym.errors import ConfigError, MissingExtraError, ServiceError, shortened
from gspo_gym.policy.parallel import LOOPBACK

_RAY_SECONDS = 120.0  # for a try to start Ray
_NUM_TRIES = 5  # Ray gives its own agents 15 seconds to start, and gives up if a busy machine takes longer
_ADDRESS = re.compile(r"auto|[^/]+:\d+")
_STORE_BYTES = 512 * 2**20  # what does not fit, batches and weights, Ray writes to the disk
_LOOK_SECONDS = 0.1
_NODE_SECONDS, _NUM_SILENT = 5.0, 6  # between looks at the node, and how many of them Ray's head may leave unanswered
_GONE_SECONDS = 10.0  # after SIGKILL
_STUCK_SECONDS = 300.0  # to join Ray or to leave it, in Ray's own code
_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": it listens on loopback, as it does by itself on those
_SHOWN = 300  # characters of Ray's reasons


def reason_of(error: Exception) -> str:
    """Return what an error of Ray's says, on one line."""
    if isinstance(cause := getattr(error, "cause", None), Exception):  # what an actor's method has raised
        error = cause
    words = " ".join(str(error).split())
    # Before it says why the actor is gone, Ray says whose it was, and after that what some common causes are.
    said = words.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return f"{type(error).__name__}: {shortened(said, _SHOWN)}"


@contextlib.contextmanager
def joined(address: str | None, *, num_cores: int = 1, num_gpus: int = 0) -> Iterator[Any]:
    """Yield Ray's module (Any: untyped here), while this process has joined the Ray at an address.

    None: it is started here, on loopback, and ended. One that was joined before is taken. Ray ends this process when
    its head or the raylet here is gone.

    Raises:
        ConfigError, MissingExtraError: see `require_ray`. ServiceError: it does not start, or nothing answers there.
    """
    require_ray(address)
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():  # for another part of the run, which lasts longer
        yield ray
        return
    with contextlib.ExitStack() as stack:
        # One try, of some 35 seconds: of 20 it would make.
        variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_server_port_wait_time_s": "1"}
        if address is None:
            folder = temporary_folder("gspo_ray_")
            stack.callback(remove_folder, folder)
            own = stack.enter_context(contextlib.closing(_OwnRay(folder, num_cores, num_gpus)))
            address, variables = own.address, {**variables, **own.variables}
        stack.callback(os.environ.update, {name: os.environ[name] for name in variables if name in os.environ})
        for name, value in variables.items():
            stack.callback(os.environ.pop, name, None)
            os.environ[name] = value
        _read_variables_again()
        try:
            with _keeping_handler(), _ended_if_stuck():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (RuntimeError, ConnectionError, ray.exceptions.RayError) as error:
            raise ServiceError(f"no Ray answers at {address}: {reason_of(error)}") from error
        stack.callback(_leave, ray)
        stack.enter_context(contextlib.closing(_NodeWatch(ray)))
        yield ray


class _NodeWatch:
    """Ends this program when Ray's node here is lost without a death that Ray sees: stopped, or cut off from its head.

    Until `close`. What waits for the node's store of objects, in Ray's own code, would wait for ever. Ray's head needs
    a minute to say that a node is lost.
    """

    def __init__(self, ray: Any) -> None:
        self._ray, self._node = ray, ray.get_runtime_context().get_node_id()
        self._end, self._num_silent = threading.Event(), 0
        self._looking = threading.Thread(target=self._look, name="gspo-gym-ray", daemon=True)
        self._looking.start()
        threading.Thread(target=self._wait, name="gspo-gym-ray-end", daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self._looking.join(_GONE_SECONDS)

    def _look(self) -> None:
        while not self._end.wait(_NODE_SECONDS):
            with contextlib.suppress(Exception):  # such as the head's silence: then the node is silent, too
                is_alive = any(row["NodeID"] == self._node and row["Alive"] for row in self._ray.nodes())
                self._num_silent = 0 if is_alive else _NUM_SILENT

    def _wait(self) -> None:
        # Counted, for a program that was stopped itself has not listened.
        while not self._end.wait(_NODE_SECONDS):
            self._num_silent += 1
            if self._num_silent > _NUM_SILENT and not self._end.is_set():
                _end()


def _end() -> None:
    print("Ray's node or head does not answer any more; go on with --resume", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def _ended_if_stuck() -> Iterator[None]:
    """End this program if the block does not: Ray waits for ever for a node that is stopped."""
    timer = threading.Timer(_STUCK_SECONDS, _end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave(ray: Any) -> None:
    with _ended_if_stuck():
        ray.shutdown()


def _read_variables_again() -> None:
    """Have Ray obey the variables of this moment: it was imported, or has joined another Ray, under others."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")  # whether it asks for a token
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    # Else it takes the machine's own address for the loopback's, and does not reach a Ray that listens there alone.
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(_ON_LOOPBACK, sys.platform not in ("darwin", "win32"))


@contextlib.contextmanager
def _keeping_handler() -> Iterator[None]:
    """Put the handler of SIGTERM back that Ray replaces, by one which ends the run without a checkpoint."""
    handler, is_terminated = signal.getsignal(signal.SIGTERM), False
    try:
        yield
    except SystemExit:  # by Ray's handler: SIGTERM came meanwhile
        is_terminated = True
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
            if is_terminated:
                signal.raise_signal(signal.SIGTERM)


def require_ray(address: str | None = None) -> None:
    """Refuse what is no address of a head, and a machine on which Ray is not installed.

    Raises:
        ConfigError: Ray takes other addresses, too: of its dashboard, or "local", where it starts another Ray.
        MissingExtraError: it is not installed.
    """
    if address is not None and not _ADDRESS.fullmatch(address):
        raise ConfigError(f"RAY_ADDRESS: expected HOST:PORT of Ray's head, got {address!r}")
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("several processes need Ray: pip install 'gspo-gym[ray]'")


class _OwnRay:
    """Ray on loopback, in processes of its own.

    Attributes:
        variables: of the environment, for all that join it.
        processes: its own.

    Raises:
        ServiceError: it does not come up; with what it printed last.
    """

    def __init__(self, folder: str, num_cores: int, num_gpus: int = 0) -> None:
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            _ON_LOOPBACK: "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": folder,  # else it leaves a folder `ray` in the system's
            "RAY_worker_niceness": "0",  # else 15: whatever runs beside them would starve the processes of the run
            "RAY_memory_monitor_refresh_ms": "0",  # it kills processes on a machine that others fill
        }
        for number in range(_NUM_TRIES):
            self.processes = MarkedProcesses()
            self._printed = Path(folder) / f"printed_{number}"
            sizes = {"num-cpus": num_cores, **({"num-gpus": num_gpus} if num_gpus else {})}
            self._process, port = _start_ray(self.processes, self.variables, folder, self._printed, sizes)
            self.processes.add_session(self._process.pid)
            self.address = f"{LOOPBACK}:{port}"
            try:
                if _has_started(self._process, self._printed):
                    return
            except BaseException:
                self.close()
                raise
            self.close()
        lines = self._lines() or ["it printed nothing"]
        raise ServiceError(f"Ray did not start, in {_NUM_TRIES} tries: {shortened(lines[-1], _SHOWN)}")

    def close(self) -> None:
        """End it, at once: it may be stopped, and there is nothing that it could save."""
        self.processes.end(grace_seconds=0.0)
        self._process.kill()  # it may have begun after the others were looked for
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel keeps it, as for a disk that hangs
            self._process.wait(_GONE_SECONDS)

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):  # removed
            return self._printed.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return []


def _start_ray(
    processes: MarkedProcesses, variables: Mapping[str, str], folder: str, printed: Path, sizes: Mapping[str, int]
) -> tuple[subprocess.Popen[bytes], int]:
    """Return the process of `ray start`, which lives as long as Ray, and the port that was chosen."""
    port, *others = _free_ports(6)
    agents = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port")
    names = (*agents, "ray-client-server-port", "metrics-export-port")
    options = {
        "port": port,
        **dict(zip(names, others, strict=True)),
        "temp-dir": folder,
        **sizes,
        "object-store-memory": _STORE_BYTES,
        "include-dashboard": "false",
        "include-log-monitor": "false",
    }
    words = ["start", "--head", "--block", "--no-monitor", *(f"--{name}={value}" for name, value in options.items())]
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, **processes.environment},
            start_new_session=True,  # Ctrl-C is for this program, which ends Ray
        )
    return process, port


def _has_started(process: subprocess.Popen[bytes], printed: Path) -> bool:
    deadline = time.monotonic() + _RAY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if b"Ray runtime started" in printed.read_bytes():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in held]
