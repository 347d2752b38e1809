"""Processes on the nodes of Ray: one actor is one process, in the place that `placement.py` has found.

Ray says what its nodes have free, and starts an actor where it is told to. It schedules nothing and starts nothing
again (`max_restarts=0`): a lost process is ours to see. An actor runs its program and nothing else.

Ray is joined where it runs already, or started on this machine, for this run. One that is started here listens on
loopback, asks for a token of its own, and ends with this program, with its folder, however that ends. Written against
Ray 2.60; names of GPUs are Ray's choice within a node, and were never tried.
"""

from __future__ import annotations

import contextlib
import importlib
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
from gspo_gym.base.ranks import LOOPBACK, Handle, Start, address_towards
from gspo_gym.cluster.launcher import Program, become
from gspo_gym.cluster.placement import Offer, Part, Place
from gspo_gym.errors import ConfigError, MissingExtraError, ServiceError, shortened

_ACTOR_SECONDS = 120.0  # to start one: an interpreter that imports Ray, on a machine that is busy
_RAY_SECONDS = 120.0  # for a try to start Ray
_NUM_TRIES = 5  # Ray gives its own agents 15 seconds to start, and gives up if a busy machine takes longer
_STORE_BYTES = 80 * 2**20  # Ray's least: nothing of ours travels through its store of objects
_LOOK_SECONDS = 0.1
_SHOWN = 300  # characters of Ray's reasons
_ADDRESS = re.compile(r"auto|[^/]+:\d+")


class RayLauncher:
    """Starts processes as actors.

    Args:
        address: of Ray's head, "auto" for the one on this machine; None: Ray is started here, and ended by `close`.
        num_cores: that a Ray which is started here offers: processes share the cores there are.

    Raises:
        ConfigError: that is no address of a head. MissingExtraError: Ray is not installed. ServiceError: it does not
            start, or nothing answers there.
    """

    counts_cores = True
    settle_seconds = 30.0
    can_restart = True

    def __init__(self, address: str | None, *, num_cores: int = 1) -> None:
        # Ray takes others, too: of its dashboard, where a job is submitted, or "local", where it starts another Ray.
        if address is not None and not _ADDRESS.fullmatch(address):
            raise ConfigError(
                f"topology.ray_address (or RAY_ADDRESS): expected HOST:PORT of Ray's head, got {address!r}"
            )
        try:
            importlib.import_module("ray._private.state")
            self._ray: Any = importlib.import_module("ray")  # Any: untyped here
        except ImportError as error:
            raise MissingExtraError("topology.launcher = \"ray\" needs: pip install 'gspo-gym[ray]'") from error
        self._stack = contextlib.ExitStack()
        with self._stack:
            if not self._ray.is_initialized():
                given = address
                if address is None:
                    given = self._stack.enter_context(_running_ray(num_cores))
                self._join(str(given))
                self._stack.callback(self._ray.shutdown)
            self.address: str = self._ray.get_runtime_context().gcs_address
            self.host = LOOPBACK if address is None else address_towards(self.address.rpartition(":")[0])
            self._stack = self._stack.pop_all()  # what was entered stays, until `close`

    def offers(self) -> tuple[Offer, ...]:
        """Return the nodes that are alive, by address, and what Ray has not given away on them."""
        free = self._ray._private.state.available_resources_per_node()
        offers = []
        for node, row in self._nodes().items():
            has = free.get(row["NodeID"], {})
            gpus, cores, memory = (int(has.get(name, 0)) for name in ("GPU", "CPU", "memory"))
            offers.append(Offer(node, tuple(range(gpus)), cores, memory, row["NodeManagerAddress"]))
        return tuple(offers)

    def start(self, program: Program, part: Part, place: Place) -> Start:
        """Return what starts the program as an actor with the part's GPUs, cores and memory, on the place's node."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        node = self._nodes()[place.node]["NodeID"]
        options = {
            "num_cpus": part.each.cores,
            "num_gpus": part.each.gpus,
            "memory": part.each.memory_bytes or None,
            "max_restarts": 0,
            "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        }
        maker = self._ray.remote(Process).options(**options)

        def start(environment: Mapping[str, str]) -> Handle:
            return _Actor(self._ray, maker, program, environment, place.node)

        return start

    def close(self) -> None:
        """Leave Ray, and end it if it was started here. Closing twice is fine."""
        self._stack.close()

    def _join(self, address: str) -> None:
        hears_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="WARNING")
        except (OSError, RuntimeError, self._ray.exceptions.RayError) as error:
            raise ServiceError(
                f"topology.ray_address: no Ray answers at {address}: {shortened(str(error), _SHOWN)}"
            ) from error
        finally:
            # Ray has put its own in place, which exits at once: a run saves a checkpoint first.
            if hears_sigterm is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, hears_sigterm)

    def _nodes(self) -> dict[str, dict[str, Any]]:
        """Return Ray's rows (Any: of several types) of the nodes that are alive, by a name that is unique."""
        alive = [row for row in self._ray.nodes() if row["Alive"]]
        addresses = [row["NodeManagerAddress"] for row in alive]
        return {
            address if addresses.count(address) == 1 else f"{address} ({row['NodeID'][:8]})": row
            for address, row in zip(addresses, alive, strict=True)
        }


class Process:
    """The actor: a process that becomes the program."""

    def say_where(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    def run(
        self, module: str, arguments: tuple[str, ...], log: str | None, environment: dict[str, str], folder: str
    ) -> None:
        """Be the program, in the driver's folder if this node has it; return when it ends."""
        if os.path.isdir(folder):
            os.chdir(folder)
        become(Program(module, arguments, None if log is None else Path(log)), environment)


class _Actor:
    """The handle of an actor."""

    def __init__(self, ray: Any, maker: Any, program: Program, environment: Mapping[str, str], node: str) -> None:
        self._ray = ray
        log = None if program.log is None else str(program.log.resolve())
        try:
            self._actor = maker.remote()
            try:
                self.pid = int(ray.get(self._actor.say_where.remote(), timeout=_ACTOR_SECONDS))
            except ray.exceptions.GetTimeoutError as error:
                self.kill()
                raise OSError(f"Ray has started nothing on {node} within {_ACTOR_SECONDS:g} seconds") from error
            self.name = f"process {self.pid} on {node}"
            self._run = self._actor.run.remote(program.module, program.arguments, log, dict(environment), os.getcwd())
        except ray.exceptions.RayError as error:
            raise OSError(f"Ray on {node}: {_reason(error)}") from error

    def wait(self) -> str:
        try:
            self._ray.get(self._run)
        except Exception as error:  # of Ray, which has many kinds, also while it is shut down
            return f"has ended: {_reason(error)}"
        return "has ended"

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # Ray has gone, and the actor with it
            self._ray.kill(self._actor, no_restart=True)


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    # Before it says why the actor is gone, Ray says whose it was, and after that what some common causes are.
    said = words.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return f"{type(error).__name__}: {shortened(said, _SHOWN)}"


@contextlib.contextmanager
def _running_ray(num_cores: int) -> Iterator[str]:
    """Start Ray on loopback, in processes of its own, and yield its address; then end it and remove its folder.

    Raises:
        ServiceError: it does not come up; with what it printed last.
    """
    with contextlib.ExitStack() as stack:
        # On loopback only: the variable is Ray's, for systems on which it does so by itself (ray_constants.py, 2.60).
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # it kills processes on a machine that others fill
        }
        stack.enter_context(_with_settings(settings))
        folder = temporary_folder("gspo_ray_")
        stack.callback(remove_folder, folder)
        for number in range(_NUM_TRIES):
            processes = MarkedProcesses()
            printed = Path(folder) / f"printed_{number}"
            process, port = _start_ray(processes, folder, printed, num_cores)
            stack.callback(process.wait)
            stack.callback(processes.end)
            if _has_started(process, printed):
                yield f"{LOOPBACK}:{port}"
                return
            processes.end()
        lines = printed.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
        raise ServiceError(f"Ray did not start, in {_NUM_TRIES} tries: {shortened(lines[-1], _SHOWN)}")


def _start_ray(
    processes: MarkedProcesses, folder: str, printed: Path, num_cores: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Return the process of `ray start`, which lives as long as Ray, and the port that was chosen."""
    port, *others = _free_ports(6)
    agents = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port")
    names = (*agents, "ray-client-server-port", "metrics-export-port")
    options = {
        "port": port,
        **dict(zip(names, others, strict=True)),
        "temp-dir": folder,
        "num-cpus": num_cores,
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
            env={**os.environ, **processes.environment},
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


@contextlib.contextmanager
def _with_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Let Ray have other settings in this process and its children during the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    _read_settings()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _read_settings()


def _read_settings() -> None:
    """Let Ray read its variables again: it did so when it was imported, and keeps them (2.60)."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    core: Any = importlib.import_module("ray._raylet")
    constants.ENABLE_RAY_CLUSTER = os.environ.get(constants.ENABLE_RAY_CLUSTERS_ENV_VAR) != "0"
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()
