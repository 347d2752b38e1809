"""Launchers: one interface for what starts a run's processes, on this machine or on others.

A launcher says what its nodes have free, and starts a program in a place that `placement.py` has found there. What a
`Start` gives is a process; `base/ranks.py` makes ranks of them, watches them and ends them together.

    fleet = Fleet(LocalLauncher(), [Part("learner", 2, Resources(cores=1))])
    ranks = Ranks(fleet.starts("learner", Program("package.module")), host=fleet.launcher.host)
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gspo_gym.base.ranks import LOOPBACK, Handle, LocalProcess, Start, be
from gspo_gym.cluster.placement import Offer, Part, Place, Resources, assign
from gspo_gym.errors import PlacementError


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
    """

    host: str
    counts_cores: bool
    settle_seconds: float

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

        Each can be called again. Pieces on nodes that are gone are moved to others, and no more.

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


_LOOK_SECONDS = 0.2
