"""Processes on the nodes of Ray: one actor is one process, in the place that `placement.py` has found.

Ray says what its nodes have free, and starts an actor where it is told to. It schedules nothing and starts nothing
again (`max_restarts=0`): a lost process is ours to see. An actor runs its program and nothing else.
Ray is joined where it runs already, or started here, for this run: it then listens on loopback, asks for a token of its
own, ends with this program, and starts again when it is lost. Written against Ray 2.60; names of GPUs were not tried.

Ray ends a process that has joined it when its raylet or its head is gone. So another process joins it for this one:
`python -m gspo_gym.cluster.ray`, a rank of one (`base/ranks.py`), which ends when Ray does not answer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gspo_gym.base.leftovers import MarkedProcesses, remove_folder, temporary_folder
from gspo_gym.base.ranks import (
    LOOPBACK,
    Handle,
    LocalProcess,
    Patience,
    Rank,
    Ranks,
    RanksLostError,
    Start,
    address_towards,
)
from gspo_gym.cluster.launcher import Program, become
from gspo_gym.cluster.placement import Offer, Part, Place
from gspo_gym.errors import ConfigError, MissingExtraError, ServiceError, shortened

_ACTOR_SECONDS = 120.0  # to start one: an interpreter that imports Ray, on a machine that is busy
_RAY_SECONDS = 120.0  # for a try to start Ray, and to join it, for which Ray itself waits without end
_LEAVE_SECONDS = 10.0
_NUM_TRIES = 5  # Ray gives its own agents 15 seconds to start, and gives up if a busy machine takes longer
_STORE_BYTES = 80 * 2**20  # Ray's least; what does not fit into its store of objects, it writes to the disk
_PROBE_BYTES = 200_000  # an object that Ray keeps in its raylet, not in the process
_LOOK_SECONDS = 0.1
_SHOWN = 300  # characters of Ray's reasons
_ADDRESS = re.compile(r"auto|[^/]+:\d+")


class RayLauncher:
    """Starts processes as actors.

    Args:
        address: of Ray's head, "auto" for the one on this machine; None: Ray is started here, and ended by `close`.
        num_cores: that a Ray which is started here offers: processes share the cores there are.
        silence_seconds: without an answer; then Ray is lost.
        on_end: told why a Ray that was joined is lost, and what to do, in any thread: nothing can be started any more.

    Attributes:
        address: of the head.
        variables: of the environment, with which others may join a Ray that was started here.

    Raises:
        ConfigError: that is no address of a head. MissingExtraError: Ray is not installed. ServiceError: it does not
            start, or nothing answers there.
    """

    counts_cores = True
    settle_seconds = 30.0

    def __init__(
        self,
        address: str | None,
        *,
        num_cores: int = 1,
        silence_seconds: float = 30.0,
        on_end: Callable[[str], object] = lambda _: None,
    ) -> None:
        require_ray(address)
        self._given, self._num_cores = address, num_cores
        self._silence_seconds, self._on_end = silence_seconds, on_end
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._is_closed = False
        self._client = self._begin()

    def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:
        """Return the nodes that are alive, by address, and what Ray has not given away on them, or has `in_all`.

        Raises:
            ServiceError: a Ray that was joined is lost, or one of our own does not start again.
        """
        try:
            rows = self._present().ask("offers", in_all=in_all)
        except RanksLostError:  # meanwhile
            rows = self._present().ask("offers", in_all=in_all)
        return tuple(Offer(node, tuple(range(gpus)), *amounts) for node, gpus, *amounts in rows)

    def start(self, program: Program, part: Part, place: Place) -> Start:
        """Return what starts the program as an actor with the part's GPUs, cores and memory, on the place's node."""
        client = self._present()

        def start(environment: Mapping[str, str]) -> Handle:
            return _Actor(client, program, part, place.node, environment)

        return start

    def close(self) -> None:
        """Leave Ray, and end it if it was started here. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            self._stack.close()

    def _present(self) -> _Client:
        """Return the process that has joined Ray; one that was started here is started again if it was lost."""
        with self._lock:
            if self._is_closed:
                raise ServiceError("Ray was left: nothing can be started any more")
            if (reason := self._client.lost) is not None:
                if self._given is not None:
                    raise ServiceError(self._advice(reason))
                self._stack.close()
                self._client = self._begin()
            return self._client

    def _begin(self) -> _Client:
        with contextlib.ExitStack() as stack:
            folder = temporary_folder("gspo_ray_")
            stack.callback(remove_folder, folder)
            variables = {"RAY_USAGE_STATS_ENABLED": "0"}
            ray: _OwnRay | None = None
            address = str(self._given)
            if self._given is None:
                ray = stack.enter_context(contextlib.closing(_OwnRay(folder, self._num_cores)))
                address, variables = ray.address, ray.variables
            client = _Client(address, variables, Path(folder) / "client.log", self._silence_seconds, self._tell_loss)
            stack.callback(client.close)
            if ray is not None:
                ray.on_end(client.give_up)
            self.address: str = client.address
            self.variables: Mapping[str, str] = variables
            self.host = LOOPBACK if self._given is None else address_towards(self.address.rpartition(":")[0])
            self._stack = stack.pop_all()  # what was entered stays, until `close`
        return client

    def _tell_loss(self, reason: str) -> None:
        if self._given is not None:
            self._on_end(self._advice(reason))

    def _advice(self, reason: str) -> str:
        return f"Ray at {self._given} is lost: {reason}. Start Ray again, and go on with --resume"


class _Client:
    """The process that has joined Ray, as this one sees it.

    Attributes:
        lost: why it has ended, or Ray has; None while it has not.
        address: of Ray's head.

    Raises:
        ServiceError: no Ray answers.
    """

    def __init__(
        self,
        address: str,
        variables: Mapping[str, str],
        log: Path,
        silence_seconds: float,
        on_loss: Callable[[str], object],
    ) -> None:
        self.lost: str | None = None
        self._on_loss = on_loss
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}  # Any: JSON, None when it is lost
        self._has_joined = False
        # Ray ends the process without a word.
        self._said = "it has ended what had joined it, as it does when its head or the raylet of this machine is gone"

        def start(environment: Mapping[str, str]) -> Handle:
            return LocalProcess(__name__, (), {**environment, **variables}, log=log)

        # Ray's import may hold the interpreter for long.
        patience = Patience(silence=max(silence_seconds, 5.0))
        self._ranks = Ranks([start], patience=patience, on_loss=self._note_loss, log=log)
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()
        try:
            join = {"address": address, "silence_seconds": silence_seconds}
            self.address: str = self.ask("join", max_seconds=_RAY_SECONDS, **join)
        except (OSError, RanksLostError) as error:
            self.close()
            reason = shortened(str(error), _SHOWN)
            raise ServiceError(f"topology.ray_address: no Ray answers at {address}: {reason}") from error
        self._has_joined = True

    def ask(self, do: str, *, max_seconds: float | None = None, **words: Any) -> Any:
        """Return the answer (Any: JSON) to an order.

        Raises:
            OSError: Ray refused, or took longer. RanksLostError: Ray is lost.
        """
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        if self.lost is not None:
            answer.put(None)
        try:
            self._ranks.send({"do": do, "number": number, **words})
            said = answer.get(timeout=max_seconds)
        except queue.Empty as error:
            raise OSError(f"nothing came within {max_seconds:g} seconds") from error
        finally:
            del self._answers[number]
        if said is None:
            raise RanksLostError(str(self.lost))
        if said["refusal"] is not None:
            raise OSError(said["refusal"])
        return said["result"]

    def tell(self, do: str, **words: Any) -> None:
        """Give an order without waiting; none if Ray is lost."""
        with contextlib.suppress(RanksLostError):
            self._ranks.send({"do": do, "number": -1, **words})

    def give_up(self, reason: str) -> None:
        """Take Ray for lost."""
        self._said = reason
        self._ranks.give_up(reason)

    def close(self) -> None:
        """Leave Ray. Closing twice is fine."""
        self._has_joined = False  # what ends from here on is no loss
        leaving = threading.Thread(target=self.tell, args=("leave",), daemon=True)  # it may hang
        leaving.start()
        leaving.join(1.0)
        if self._ranks.handles and self.lost is None:
            ended = threading.Thread(target=self._ranks.handles[0].wait, daemon=True)
            ended.start()
            ended.join(_LEAVE_SECONDS)
        self._note_loss("Ray was left")
        self._ranks.close()
        self._hearing.join()

    def _hear(self) -> None:
        with contextlib.suppress(RanksLostError):
            while True:
                answer, _ = self._ranks.receive(0)
                if "lost" in answer:
                    self._said = answer["lost"]
                if (waiting := self._answers.get(answer["number"])) is not None:
                    waiting.put(answer)

    def _note_loss(self, reason: str) -> None:
        is_first, self.lost = self.lost is None, self.lost or (self._said if self._has_joined else reason)
        for waiting in [*self._answers.values()]:
            waiting.put(None)
        if is_first and self._has_joined:
            self._on_loss(self.lost)


class _Actor:
    """The handle of an actor."""

    def __init__(
        self, client: _Client, program: Program, part: Part, node: str, environment: Mapping[str, str]
    ) -> None:
        self._client = client
        log = None if program.log is None else str(program.log.resolve())
        words = [program.module, program.arguments, log, dict(environment), os.getcwd()]
        began = client.ask("start", node=node, each=part.each, words=words)
        self._actor, self.pid = began["actor"], began["pid"]
        self.name = f"process {self.pid} on {node}"

    def wait(self) -> str:
        try:
            end: str = self._client.ask("wait", actor=self._actor)
        except (OSError, RanksLostError) as error:
            return f"is lost with Ray: {error}"
        return end

    def kill(self) -> None:
        self._client.tell("kill", actor=self._actor)


class Joined:
    """What the process that has joined Ray does for the other."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._ray: Any = importlib.import_module("ray")  # Any: untyped here
        self._state: Any = importlib.import_module("ray._private.state")
        self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self._actors: dict[int, tuple[Any, Any]] = {}  # by process: the actor, and its run
        self._names: dict[str, str] = {}  # of the nodes, by Ray's
        self._lock = threading.Lock()
        self._answered = time.monotonic()

    def serve(self) -> NoReturn:
        """Do what the other process says, each order in a thread, until it is gone or Ray is."""
        while True:
            order, _ = self._rank.receive()
            if order["do"] == "join":
                self._answer(order)  # Ray wants the main thread for its signals
            else:
                threading.Thread(target=self._answer, args=(order,), daemon=True).start()

    def _answer(self, order: Mapping[str, Any]) -> None:
        refusal, result = None, None
        try:
            result = self._result_of(order)
        except Exception as error:  # of Ray, which has many kinds
            refusal = reason_of(error)
        self._rank.send({"number": order["number"], "result": result, "refusal": refusal})

    def _result_of(self, order: Mapping[str, Any]) -> Any:
        """Return the JSON that answers an order."""
        match order["do"]:
            case "join":
                return self._join(order["address"], order["silence_seconds"])
            case "offers":
                return self._offers(is_in_all=order["in_all"])
            case "start":
                return self._start(order["node"], order["each"], order["words"])
            case "wait":
                try:
                    self._ray.get(self._actors[order["actor"]][1])
                except Exception as error:
                    return f"has ended: {reason_of(error)}"
                return "has ended"
            case "kill":
                self._ray.kill(self._actors[order["actor"]][0], no_restart=True)
            case "leave":
                self._ray.shutdown()
                os._exit(0)
        return None

    def _join(self, address: str, silence_seconds: float) -> str:
        self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        self._answered = time.monotonic()
        for work in (self._probe, self._watch):
            threading.Thread(target=work, args=(silence_seconds,), daemon=True).start()
        return str(self._ray.get_runtime_context().gcs_address)

    def _probe(self, silence_seconds: float) -> None:
        own = self._ray.get_runtime_context().get_node_id()
        while True:
            try:
                if own not in {row["NodeID"] for row in self._ray.nodes() if row["Alive"]}:
                    self._end("Ray has given up the node of this process")
                self._ray.put(bytes(_PROBE_BYTES))
            except Exception as error:
                self._end(f"Ray does not answer: {reason_of(error)}")
            self._answered = time.monotonic()
            time.sleep(silence_seconds / 5)

    def _watch(self, silence_seconds: float) -> None:
        looked = time.monotonic()
        while True:
            time.sleep(silence_seconds / 5)
            before, looked = looked, time.monotonic()
            if looked - before > silence_seconds:  # this process was stopped, too
                self._answered = looked
            if looked - self._answered > silence_seconds:
                self._end(
                    f"Ray (its head, or the raylet of this machine) did not answer for {silence_seconds:g} seconds"
                )

    def _end(self, reason: str) -> NoReturn:
        with contextlib.suppress(OSError):
            self._rank.send({"number": -1, "lost": reason})
        self._rank.end(reason)

    def _offers(self, *, is_in_all: bool) -> list[list[Any]]:
        free = self._state.available_resources_per_node()
        offers = []
        for node, row in self._nodes().items():
            has = row["Resources"] if is_in_all else free.get(row["NodeID"], {})
            amounts = [int(has.get(name, 0)) for name in ("GPU", "CPU", "memory")]
            offers.append([node, *amounts, row["NodeManagerAddress"]])
        return offers

    def _nodes(self) -> dict[str, dict[str, Any]]:
        """Return Ray's rows (Any: of several types) of the nodes that are alive, by a name that is unique and stays."""
        alive = [row for row in self._ray.nodes() if row["Alive"]]
        addresses = [row["NodeManagerAddress"] for row in alive]
        with self._lock:
            for row, address in zip(alive, addresses, strict=True):
                is_taken = addresses.count(address) > 1 or address in self._names.values()
                self._names.setdefault(row["NodeID"], f"{address} ({row['NodeID'][:8]})" if is_taken else address)
            return {self._names[row["NodeID"]]: row for row in alive}

    def _start(self, node: str, each: list[int], words: list[Any]) -> dict[str, int]:
        gpus, cores, memory = each
        if (row := self._nodes().get(node)) is None:
            raise OSError(f"Ray has no node {node} any more")
        strategy = self._strategies.NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
        options = {"num_cpus": cores, "num_gpus": gpus, "memory": memory or None, "scheduling_strategy": strategy}
        actor = self._ray.remote(Process).options(**options, max_restarts=0).remote()
        try:
            pid = int(self._ray.get(actor.say_where.remote(), timeout=_ACTOR_SECONDS))
        except self._ray.exceptions.GetTimeoutError as error:
            self._ray.kill(actor, no_restart=True)
            raise OSError(f"Ray has started nothing on {node} within {_ACTOR_SECONDS:g} seconds") from error
        self._actors[pid] = actor, actor.run.remote(*words)
        return {"actor": pid, "pid": pid}


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


def reason_of(error: Exception) -> str:
    """Return what an error of Ray's says, on one line."""
    if isinstance(cause := getattr(error, "cause", None), Exception):  # what an actor's method has raised
        error = cause
    words = " ".join(str(error).split())
    # Before it says why the actor is gone, Ray says whose it was, and after that what some common causes are.
    said = words.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return f"{type(error).__name__}: {shortened(said, _SHOWN)}"


@contextlib.contextmanager
def joined(address: str | None, *, num_cores: int = 1) -> Iterator[Any]:
    """Yield Ray's module (Any: untyped here), while this process has joined the Ray at an address.

    None: it is started here, on loopback, and ended. Ray ends this process when its head or the raylet here is gone.

    Raises:
        ConfigError, MissingExtraError: see `require_ray`. ServiceError: it does not start, or nothing answers there.
    """
    require_ray(address)
    with contextlib.ExitStack() as stack:
        variables = {"RAY_USAGE_STATS_ENABLED": "0"}
        if address is None:
            folder = temporary_folder("gspo_ray_")
            stack.callback(remove_folder, folder)
            own = stack.enter_context(contextlib.closing(_OwnRay(folder, num_cores)))
            address, variables = own.address, own.variables
        stack.callback(os.environ.update, {name: os.environ[name] for name in variables if name in os.environ})
        for name, value in variables.items():
            stack.callback(os.environ.pop, name, None)
            os.environ[name] = value
        ray: Any = importlib.import_module("ray")
        # It keeps the token of the Ray that this process joined before.
        importlib.import_module("ray._raylet").AuthenticationTokenLoader.instance().reset_cache()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (RuntimeError, ConnectionError, ray.exceptions.RayError) as error:
            raise ServiceError(f"no Ray answers at {address}: {reason_of(error)}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's own would end the run without a checkpoint
        stack.callback(ray.shutdown)
        yield ray


def require_ray(address: str | None = None) -> None:
    """Refuse what is no address of a head, and a machine on which Ray is not installed.

    Raises:
        ConfigError: Ray takes other addresses, too: of its dashboard, or "local", where it starts another Ray.
        MissingExtraError: it is not installed.
    """
    if address is not None and not _ADDRESS.fullmatch(address):
        raise ConfigError(f"topology.ray_address (or RAY_ADDRESS): expected HOST:PORT of Ray's head, got {address!r}")
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

    def __init__(self, folder: str, num_cores: int) -> None:
        # On loopback only: the variable is Ray's, for systems on which it does so by itself (ray_constants.py, 2.60).
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": folder,  # else it leaves a folder `ray` in the system's
            "RAY_memory_monitor_refresh_ms": "0",  # it kills processes on a machine that others fill
        }
        for number in range(_NUM_TRIES):
            self.processes = MarkedProcesses()
            self._printed = Path(folder) / f"printed_{number}"
            self._process, port = _start_ray(self.processes, self.variables, folder, self._printed, num_cores)
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

    def on_end(self, tell: Callable[[str], object]) -> None:
        """Tell the reason when it ends: it does so when one of its processes has ended."""

        def wait() -> None:
            self._process.wait()
            lines = [line for line in self._lines() if "exit code" in line]
            names = [name for name in ("gcs_server", "raylet") if any(name in line for line in lines)]
            tell(f"its {' and '.join(names) or 'process'} has ended")

        self._waiting = threading.Thread(target=wait, daemon=True)
        self._waiting.start()

    def close(self) -> None:
        """End it, at once: it may be stopped, and there is nothing that it could save."""
        self.processes.end(grace_seconds=0.0)
        self._process.wait()

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):  # removed
            return self._printed.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return []


def _start_ray(
    processes: MarkedProcesses, variables: Mapping[str, str], folder: str, printed: Path, num_cores: int
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


if __name__ == "__main__":
    # Under its name, by which the actors find their class.
    ours: Any = importlib.import_module("gspo_gym.cluster.ray")
    ours.Joined(Rank.here()).serve()
