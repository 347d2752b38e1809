"""Launchers: one interface for what starts a run's processes, on this machine or on others.

A launcher says what its nodes have free, and starts a program in a place that `placement.py` has found there. What a
`Start` gives is a process; `base/ranks.py` makes ranks of them, watches them and ends them together.

    fleet = Fleet(LocalLauncher(), [Part("learner", 2, Resources(cores=1))])
    ranks = Ranks(fleet.starts("learner", Program("package.module")), host=fleet.launcher.host)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gspo_gym.base.ranks import LOOPBACK, Handle, LocalProcess, Start
from gspo_gym.cluster.placement import Offer, Part, Place, assign, only_counted


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
        can_restart: whether a start can be called again after its process has ended. If not, the run ends with a lost
            process, and what has started this process begins anew.
    """

    host: str
    can_restart: bool

    def offers(self) -> tuple[Offer, ...]:
        """Return what the nodes have free now; a node that is gone offers nothing."""

    def start(self, program: Program, part: Part, place: Place) -> Start:
        """Return what starts the program there, as a piece of the part: with its GPUs, cores and memory."""

    def close(self) -> None:
        """End all that was started, and what starts it if this launcher has brought that up. Closing twice is fine."""


class Fleet:
    """The parts of a run in their places.

    Args:
        parts: all of them, which are placed together.

    Raises:
        PlacementError: there is no room; nothing was started.
    """

    def __init__(self, launcher: Launcher, parts: Sequence[Part]) -> None:
        self.launcher = launcher
        self._parts = {part.role: part for part in parts}
        places = _places(parts, launcher.offers())
        self._places = {part.role: tuple(place for place in places if place.role == part.role) for part in parts}

    def starts(self, role: str, program: Program) -> list[Start]:
        """Return what starts the program in each place of a role; each can be called again if the launcher can.

        Raises:
            PlacementError: a node of theirs is gone, and the others have no room.
        """
        part = self._parts[role]
        offers = self.launcher.offers()
        if not {place.node for place in self._places[role]} <= {offer.node for offer in offers}:
            self._places[role] = _places([part], offers)
        return [self.launcher.start(program, part, place) for place in self._places[role]]


def _places(parts: Sequence[Part], offers: Sequence[Offer]) -> tuple[Place, ...]:
    return assign(only_counted(parts, offers), offers)


class LocalLauncher:
    """Starts processes on this machine, which die with the thread that called their `Start`.

    Args:
        gpu_names: what CUDA_VISIBLE_DEVICES calls the GPUs that may be given away.
    """

    host = LOOPBACK
    can_restart = True

    def __init__(self, gpu_names: Sequence[str] = ()) -> None:
        self._gpu_names = gpu_names

    def offers(self) -> tuple[Offer, ...]:
        """Return this machine with its GPUs. Its cores and memory are not counted: its processes share them."""
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
