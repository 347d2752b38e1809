"""Processes that do the same at once, as actors of Ray: all are there, or none is.

Ray's placement group places them, its object store carries what they are given and return, and its errors tell of
deaths. A process that is lost, hangs or is not heard of ends the others: none can go on without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.cluster.placement import Part
from gspo_gym.cluster.ray import reason_of
from gspo_gym.errors import PlacementError, ServiceError

_PLACE_SECONDS = 30.0  # for Ray to find places, which it does at once where there is room
START_SECONDS = 300.0  # until all have imported torch
_LAST_WORDS_SECONDS = 0.5  # a process that dies breaks the connections of others a moment before Ray knows
_LOOK_SECONDS = 1.0
_FETCH_SECONDS = 600.0  # for what is ready, from another node
LIFE, ASIDE = "life", "aside"  # threads of an actor beside the one that works


class RanksLostError(ServiceError):
    """The ranks of a group have ended, because one of them was lost."""


class Cluster:
    """The places of a run's processes on the nodes of Ray, all of which are reserved at once; `close` gives them back.

    Args:
        ray: Ray's module (Any: untyped here), which this process has joined.
        parts: what runs; the pieces of a part are alike.
        num_nodes: at least so many nodes must be there, over which the pieces are spread.
        builds: what makes the contents of an actor, by role (Any: it differs).

    Raises:
        PlacementError: there is no room.
    """

    def __init__(
        self, ray: Any, parts: Sequence[Part], *, num_nodes: int = 1, builds: Mapping[str, Any] | None = None
    ) -> None:
        self.ray, self.builds = ray, dict(builds or {})
        alive = [row for row in ray.nodes() if row["Alive"]]
        if len(alive) < num_nodes:
            names = ", ".join(row["NodeManagerAddress"] for row in alive)
            raise PlacementError(f"compute.nodes = {num_nodes}: {len(alive)} there: {names or 'none'}")
        pieces = [(part.role, number, part.each) for part in parts for number in range(part.count)]
        self._indices = {(role, number): index for index, (role, number, _) in enumerate(pieces)}
        self._each = {part.role: part.each for part in parts}
        bundles = [{"CPU": each.cores, **({"GPU": each.gpus} if each.gpus else {})} for _, _, each in pieces]
        self._places = ray.util.placement_group(bundles, strategy="PACK" if num_nodes == 1 else "SPREAD")
        if not self._places.wait(_PLACE_SECONDS):
            self.close()
            wanted = ", ".join(f"{part.role}: {part.count} x ({part.each})" for part in parts)
            free = ray.available_resources()
            shown = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
            raise PlacementError(f"no room for the run: {wanted}. Ray has {shown} free on {len(alive)} nodes")

    def start(self, role: str, number: int, kind: type, *arguments: Any, groups: Sequence[str] = ()) -> Any:
        """Return an actor (Any: Ray's) in a place, whose process has ended if it had one."""
        each = self._each[role]
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._places, placement_group_bundle_index=self._indices[role, number]
        )
        options = {"num_cpus": each.cores, "num_gpus": each.gpus, "max_restarts": 0}
        remote = self.ray.remote(**options, concurrency_groups=dict.fromkeys(groups, 1))(kind)
        return remote.options(scheduling_strategy=strategy).remote(*arguments)

    def close(self) -> None:
        """Give the places back, and end what is there."""
        self.ray.util.remove_placement_group(self._places)


class Actors:
    """One actor for each place of a role: its ranks.

    Args:
        kind: the actors' class; its `life` returns the number of the process.
        arguments: of its constructor, for each rank.
        silence_seconds: without an answer to `life`, after which a rank is lost.

    Raises:
        RanksLostError: they did not come up.
    """

    def __init__(
        self, cluster: Cluster, role: str, kind: type, arguments: Sequence[tuple[Any, ...]], *, silence_seconds: float
    ) -> None:
        self._ray, self._silence_seconds = cluster.ray, silence_seconds
        self._actors = [
            cluster.start(role, rank, kind, *given, groups=(LIFE, ASIDE)) for rank, given in enumerate(arguments)
        ]
        self.pids: list[Any] = ["not started"] * len(arguments)
        # Importing torch may keep a process from answering for longer than it may be silent afterwards.
        self.pids = self.ask("life", max_seconds=START_SECONDS, group=LIFE, is_watched=False)

    def __len__(self) -> int:
        return len(self._actors)

    def ask(
        self, method: str, *arguments: Any, max_seconds: float, group: str | None = None, is_watched: bool = True
    ) -> list[Any]:
        """Return what each rank's method returned (Any: it differs). Arguments travel once, whatever the ranks.

        Raises:
            RanksLostError: a rank was lost, raised an error, or took longer; all are ended.
        """
        objects = [self._ray.put(argument) for argument in arguments]
        calls = [self._call(actor, method, *objects, group=group) for actor in self._actors]
        watch = _Watch(self, self._silence_seconds if is_watched else math.inf)
        results: dict[int, Any] = {}
        pending, num_looks = calls, 0
        while pending:
            ready, pending = self._ray.wait(pending, num_returns=len(pending), timeout=_LOOK_SECONDS)
            num_looks += 1  # and not by the clock: the ranks are not to blame for a pause of this process
            for rank, call in ((calls.index(call), call) for call in ready):
                try:
                    results[rank] = self._ray.get(call, timeout=_FETCH_SECONDS)
                except self._ray.exceptions.RayError as error:
                    self._end_for(rank, reason_of(error), calls)
            if pending and (silent := watch.silent()):
                self._lose(f"{self._name(silent[0])} was not heard of for {self._silence_seconds:g} seconds")
            if pending and num_looks * _LOOK_SECONDS > max_seconds:
                self._lose(f"{self._name(calls.index(pending[0]))} was not done after {max_seconds:g} seconds")
        return [results[rank] for rank in range(len(calls))]

    def call_life(self, rank: int) -> Any:
        """Ask one rank for a sign of life."""
        return self._call(self._actors[rank], "life", group=LIFE)

    def answered(self, call: Any) -> bool:
        """Return whether a call was answered, or has failed."""
        return bool(self._ray.wait([call], timeout=0)[0])

    def close(self) -> None:
        """End all ranks. Closing twice is fine."""
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)

    def _call(self, actor: Any, method: str, *arguments: Any, group: str | None) -> Any:
        bound = getattr(actor, method)
        return (bound if group is None else bound.options(concurrency_group=group)).remote(*arguments)

    def _end_for(self, rank: int, reason: str, calls: Sequence[Any]) -> None:
        """End all ranks, for the first of those that have died, else for the one that was seen to fail."""
        self._ray.wait(list(calls), num_returns=len(calls), timeout=_LAST_WORDS_SECONDS)
        reasons = {rank: reason}
        for other in (number for number, call in enumerate(calls) if number != rank and self.answered(call)):
            try:
                self._ray.get(calls[other], timeout=_LOOK_SECONDS)
            except self._ray.exceptions.RayError as error:
                reasons[other] = reason_of(error)
        died = [number for number, text in sorted(reasons.items()) if "Actor" in text.partition(":")[0]]
        first = died[0] if died else rank
        self._lose(f"{self._name(first)}: {reasons[first]}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self.pids[rank]})"

    def _lose(self, reason: str) -> None:
        self.close()
        raise RanksLostError(reason)


class _Watch:
    """Looks for signs of life of ranks that work. Counted, because a paused driver does not hear either."""

    def __init__(self, actors: Actors, silence_seconds: float) -> None:
        self._actors, self._silence_seconds = actors, silence_seconds
        self._calls = {rank: actors.call_life(rank) for rank in range(len(actors))}
        self._num_unanswered = dict.fromkeys(self._calls, 0)

    def silent(self) -> list[int]:
        """Look once, `_LOOK_SECONDS` after the last time; return the ranks that have not answered for too long."""
        for rank, call in self._calls.items():
            if self._actors.answered(call):
                self._calls[rank], self._num_unanswered[rank] = self._actors.call_life(rank), 0
            else:
                self._num_unanswered[rank] += 1
        return [rank for rank, num in self._num_unanswered.items() if num * _LOOK_SECONDS > self._silence_seconds]
