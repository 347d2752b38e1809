"""Launchers: one interface for what starts a run's processes, on this machine or on others.

A launcher says what its nodes have free, and starts a program in a place that `placement.py` has found there. What a
`Start` gives is a process; `base/ranks.py` makes ranks of them, watches them and ends them together.

    fleet = Fleet(LocalLauncher(), [Part("learner", 2, Resources(cores=1))])
    ranks = Ranks(fleet.starts("learner", Program("package.module")), host=fleet.launcher.host)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from gspo_gym.base.ranks import JOIN_SECONDS, LOOPBACK, Handle, LocalProcess, Start, address_towards, be
from gspo_gym.cluster.placement import Offer, Part, Place, Resources, assign
from gspo_gym.errors import ConfigError, PlacementError, ServiceError, shortened


@dataclass(frozen=True, slots=True)
class Program:
    """`python -m MODULE ARGUMENTS`.

    Attributes:
        log: the file that it prints into, on the node where it runs; None: what the launcher's processes print into.
    """

    module: str
    arguments: tuple[str, ...] = ()
    log: Path | None = None


class Launcher(Protocol):
    """What starts processes on nodes.

    Attributes:
        host: address of this machine, at which what is started can reach this process.
        counts_cores: whether a piece takes cores and memory of its node; if not, processes share what there is.
        settle_seconds: after a process has ended, until its place is offered again at the latest.
        can_restart: whether a start can be called again after its process has ended. If not, the run ends with a lost
            process, and what has started this process begins anew.
    """

    host: str
    counts_cores: bool
    settle_seconds: float
    can_restart: bool

    def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:
        """Return what the nodes have free now, or have `in_all`, given away or not; a node that is gone has nothing."""

    def start(self, program: Program, part: Part, place: Place) -> Start:
        """Return what starts the program there, as a piece of the part: with its GPUs, cores and memory."""

    def close(self) -> None:
        """End all that was started, and what starts it if this launcher has brought that up. Closing twice is fine."""


class Fleet:
    """The parts of a run in their places.

    Args:
        parts: all of them, which are placed together.
        num_nodes: at least so many nodes must be offered. Their pieces without GPUs are spread over so many, as evenly
            as there is room.

    Raises:
        PlacementError: there is no room; nothing was started.
    """

    def __init__(self, launcher: Launcher, parts: Sequence[Part], *, num_nodes: int = 1) -> None:
        self.launcher = launcher
        if not launcher.counts_cores:
            parts = [replace(part, each=Resources(gpus=part.each.gpus)) for part in parts]
        self._parts = {part.role: part for part in parts}
        offers = launcher.offers()
        if len(offers) < num_nodes:
            names = ", ".join(offer.node for offer in offers)
            raise PlacementError(f"compute.nodes = {num_nodes}: {len(offers)} there: {names or 'none'}")
        # Else a search that fills one node after the other puts processes on the same few cores.
        most = math.ceil(sum(part.count * part.each.cores for part in parts) / num_nodes)
        try:
            places = assign(parts, [replace(offer, cores=min(most, offer.cores)) for offer in offers])
        except PlacementError:
            places = assign(parts, offers)
        self._lock = threading.Lock()
        self._places = {part.role: tuple(place for place in places if place.role == part.role) for part in parts}

    def starts(self, role: str, program: Program) -> list[Start]:
        """Return what starts the program in each place of a role, of which all processes have ended.

        Each can be called again if the launcher can. Pieces on nodes that are gone are moved to others, and no more.

        Raises:
            PlacementError: the others have no room; says what is missing where.
        """
        return self._starts(role, range(self._parts[role].count), program)

    def start(self, role: str, number: int, program: Program) -> Start:
        """Return what starts the program in one place of a role, while the other processes of the role go on.

        Raises:
            PlacementError: its node is gone, and the others have no room.
        """
        (start,) = self._starts(role, [number], program)
        return start

    def _starts(self, role: str, numbers: Sequence[int], program: Program) -> list[Start]:
        part = self._parts[role]
        with self._lock:  # two that move must not take the same room
            self._move(part, numbers)
            places = [self._places[role][number] for number in numbers]
        return [self.launcher.start(program, part, place) for place in places]

    def _move(self, part: Part, numbers: Sequence[int]) -> None:
        """Give those of the pieces whose nodes are gone other places."""
        deadline = time.monotonic() + self.launcher.settle_seconds
        while True:
            offers, places = self.launcher.offers(), self._places[part.role]
            alive = {offer.node for offer in offers}
            gone = [number for number in numbers if places[number].node not in alive]
            if not gone:
                return
            needed = replace(part, count=len(gone))
            mine = {places[number] for number in gone}
            all_placed = [place for row in self._places.values() for place in row if place not in mine]
            # What others of our processes had and have just given back is still theirs.
            most = self._without(self.launcher.offers(in_all=True), all_placed)
            staying = [places[number] for number in numbers if number not in gone]
            try:
                found = assign([needed], _less_of(self._without(offers, staying), most))
            except PlacementError:
                assign([needed], most)  # where there is no room although all that ended is free, nothing is waited for
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
                continue
            moved = {number: replace(place, number=number) for number, place in zip(gone, found, strict=True)}
            self._places[part.role] = tuple(moved.get(place.number, place) for place in places)
            return

    def _without(self, offers: Sequence[Offer], places: Sequence[Place]) -> list[Offer]:
        """Return what is left of the offers when these places are taken."""
        left = []
        for offer in offers:
            taken = [self._parts[place.role].each for place in places if place.node == offer.node]
            gpus, cores, memory = (sum(amounts) for amounts in zip(*taken, strict=True)) if taken else (0, 0, 0)
            cores, memory = max(0, offer.cores - cores), max(0, offer.memory_bytes - memory)
            left.append(replace(offer, gpus=offer.gpus[gpus:], cores=cores, memory_bytes=memory))
        return left


def _less_of(offers: Sequence[Offer], others: Sequence[Offer]) -> list[Offer]:
    """Return the smaller amounts of each node that is in both."""
    by_name = {offer.node: offer for offer in others}
    return [
        replace(
            offer,
            gpus=offer.gpus[: len(other.gpus)],
            cores=min(offer.cores, other.cores),
            memory_bytes=min(offer.memory_bytes, other.memory_bytes),
        )
        for offer in offers
        if (other := by_name.get(offer.node)) is not None
    ]


def become(program: Program, environment: Mapping[str, str]) -> None:
    """Run the program in this process, as a rank with these variables; return when it ends."""
    os.environ.update(environment)
    # Its folder is the driver's, which another machine need not have.
    if program.log is not None and program.log.parent.is_dir():
        with program.log.open("ab") as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
    be(program.module, program.arguments)


class LocalLauncher:
    """Starts processes on this machine, which die with the thread that called their `Start`.

    Args:
        gpu_names: what CUDA_VISIBLE_DEVICES calls the GPUs that may be given away.
    """

    host = LOOPBACK
    counts_cores = False
    settle_seconds = 0.0
    can_restart = True

    def __init__(self, gpu_names: Sequence[str] = ()) -> None:
        self._gpu_names = gpu_names

    def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:  # noqa: ARG002  # nothing is given away
        """Return this machine with its GPUs."""
        return (Offer("this machine", tuple(range(len(self._gpu_names))), address=LOOPBACK),)

    def start(self, program: Program, part: Part, place: Place) -> Start:
        """Return what starts it here; with the GPUs of the place, or with those of this process if it has none."""
        assert len(place.gpus) == part.each.gpus
        given = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpu_names[gpu] for gpu in place.gpus)} if place.gpus else {}

        def start(environment: Mapping[str, str]) -> Handle:
            return LocalProcess(program.module, program.arguments, {**environment, **given}, log=program.log)

        return start

    def close(self) -> None:
        """Do nothing: the groups of processes end their own."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of this process among those that torchrun or srun has started.

    Attributes:
        size: the number of processes.
        host, port: MASTER_ADDR and MASTER_PORT, where a store of torch is, or where rank 0 opens one.
        has_store: torchrun itself has opened it.
        attempt: how often they were started before.
        source: the variable of the size, for messages.
    """

    rank: int
    size: int
    host: str
    port: int
    has_store: bool
    attempt: int
    source: str

    def open_store(self) -> Any:
        """Return the store by which the processes meet (Any: torch's, which loads when it is needed).

        Raises:
            ServiceError: it cannot be reached.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # see policy/parallel.py

        is_ours = self.rank == 0 and not self.has_store
        try:
            # On the address that is given, and no other.
            listening = socket.create_server((self.host, self.port)).detach() if is_ours else None
            store = TCPStore(
                self.host,
                self.port,
                is_master=is_ours,
                wait_for_workers=False,
                timeout=timedelta(seconds=JOIN_SECONDS),
                master_listen_fd=listening,
            )
        except (OSError, RuntimeError) as error:
            raise ServiceError(f"MASTER_ADDR:MASTER_PORT = {self.host}:{self.port}: {error}") from error
        return PrefixStore(f"gspo_gym/{self.attempt}", store)


def take_seat(environment: MutableMapping[str, str]) -> Seat | None:
    """Return the place that these variables give this process, and remove them: libraries would read them, too.

    Returns:
        None without torchrun, and in a step of srun with one task.

    Raises:
        ConfigError: a variable is missing, or no number.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        rank, size = "RANK", "WORLD_SIZE"
    elif "SLURM_STEP_ID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        rank, size = "SLURM_PROCID", "SLURM_NTASKS"
    else:
        return None
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        raise ConfigError(
            f"{size} = {environment[size]}, but {' and '.join(missing)} are not set: export the host of the first task "
            f"and a free port of it; or unset {size}, and this process trains alone"
        )
    numbers = (rank, size, "MASTER_PORT", *(name for name in _RESTARTS if name in environment))
    if wrong := [
        f"{name} = {environment.get(name)!r}" for name in numbers if not environment.get(name, "").isdecimal()
    ]:
        raise ConfigError(f"{', '.join(wrong)}: expected a number of what has started this process; or unset {size}")
    seat = Seat(
        int(environment[rank]),
        int(environment[size]),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        max(int(environment.get(name, 0)) for name in _RESTARTS),
        size,
    )
    for name in [*environment]:
        if name in _GROUP_VARIABLES or name.startswith("TORCHELASTIC_"):
            del environment[name]
    return seat


_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_GROUP_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


class EnvLauncher:
    """Gives programs to the processes that torchrun or srun has started beside this one, which is rank 0.

    The program of a role's place k runs in process k, which waits for it in `sit_down`; that of place 0, and programs
    of other roles, in children of this one.
    Each process takes one. The host and the store are open to all that reach them, as torch's own are.

    Args:
        num_nodes: on which they must be, at least.

    Raises:
        PlacementError: they are on fewer. ServiceError: not all processes have come.
    """

    counts_cores = False
    settle_seconds = 0.0
    can_restart = False

    def __init__(self, seat: Seat, role: str, *, num_nodes: int = 1) -> None:
        self._seat, self._role, self._store = seat, role, seat.open_store()
        try:
            others = [_await_key(self._store, f"address/{rank}").decode() for rank in range(1, seat.size)]
        except RuntimeError as error:
            reason = shortened(str(error), _SHOWN)
            raise ServiceError(f"{seat.source} = {seat.size}: not all have come: {reason}") from error
        own = [address_towards(other) for other in others]
        self.host = next((address for address in own if not address.startswith("127.")), LOOPBACK)
        self._waiting = set(range(1, seat.size))
        nodes = sorted({address_towards(seat.host), *others})
        if len(nodes) < num_nodes:
            self.close()
            raise PlacementError(
                f"compute.nodes = {num_nodes}: the {seat.size} processes ({seat.source}) are on {len(nodes)}: "
                f"{', '.join(nodes)}; start them on as many (srun --nodes, torchrun --nnodes), or set compute.nodes = "
                f"{len(nodes)}"
            )

    def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:  # noqa: ARG002  # nothing is given away
        """Return one node, for all processes."""
        return (Offer(f"{self._seat.source} = {self._seat.size}", address=self.host),)

    def start(self, program: Program, part: Part, place: Place) -> Start:
        """Return what gives the program to the process of the place's number."""
        if part.role != self._role or place.number == 0:
            return LocalLauncher().start(program, part, place)
        self._waiting.remove(place.number)

        def start(environment: Mapping[str, str]) -> Handle:
            log = None if program.log is None else str(program.log.resolve())
            order = {"program": [program.module, program.arguments, log], "environment": dict(environment)}
            self._store.set(f"order/{place.number}", json.dumps(order))
            return _Seated(f"process {place.number} of {self._seat.size}")

        return start

    def close(self) -> None:
        """Let those go that got no program. Closing twice is fine."""
        for rank in self._waiting:
            with contextlib.suppress(RuntimeError):  # the store has gone, and they notice
                self._store.set(f"order/{rank}", "null")
        self._waiting = set()


class _Seated:
    """A process that is not ours: its end is seen by its connection, and it ends itself when that is closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_over = threading.Event()

    def wait(self) -> str:
        self._is_over.wait()
        return "was let go"

    def kill(self) -> None:
        self._is_over.set()


def sit_down(seat: Seat) -> None:
    """Wait for rank 0's program, and become it; return if there is none for this process.

    Raises:
        ServiceError: rank 0 is gone.
    """
    store = seat.open_store()
    key = f"order/{seat.rank}"
    try:
        store.set(f"address/{seat.rank}", address_towards(seat.host))
        order = json.loads(_await_key(store, key, seconds=math.inf))
    except RuntimeError as error:
        raise ServiceError(f"rank 0 of {seat.size} is gone: {shortened(str(error), _SHOWN)}") from error
    if order is not None:
        module, arguments, log = order["program"]
        become(Program(module, tuple(arguments), None if log is None else Path(log)), order["environment"])


def _await_key(store: Any, key: str, *, seconds: float = JOIN_SECONDS) -> bytes:
    """Return a value of the store (Any: torch's) when it is there; not by one long wait, in which no signal is handled.

    Raises:
        RuntimeError: it was not there in time, or the store is gone.
    """
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{key} was not there within {seconds:g} seconds")
        time.sleep(_LOOK_SECONDS)
    value: bytes = store.get(key)
    return value


_LOOK_SECONDS = 0.2
_SHOWN = 200  # characters of torch's reasons
