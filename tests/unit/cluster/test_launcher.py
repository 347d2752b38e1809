"""The places of a run's processes, and the launcher of this machine: real processes, which ranks are made of."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.base.ranks import Ranks, RanksLostError, Start, address_towards
from gspo_gym.cluster.launcher import Fleet, LocalLauncher, Program
from gspo_gym.cluster.placement import Offer, Part, Place, Resources
from gspo_gym.config.build import processes
from gspo_gym.config.run_config import load_config
from gspo_gym.errors import PlacementError
from tests.support.small_quickstart import QUICKSTART

ECHO = Program("tests.support.echo_rank")


def test_ranks_of_this_machine_answer_and_print_into_their_log(tmp_path: Path) -> None:
    fleet = Fleet(LocalLauncher(), [Part("learner", 2, Resources(cores=1))])
    program = Program(ECHO.module, log=tmp_path / "logs/ranks.log")
    ranks = Ranks(fleet.starts("learner", program), host=fleet.launcher.host, log=program.log)
    ranks.send({"do": "echo"})
    assert [ranks.receive(rank)[0] for rank in (0, 1)] == [{"rank": rank, "do": "echo"} for rank in (0, 1)]
    with contextlib.suppress(RanksLostError):
        ranks.send({"end": True})
    assert all(handle.wait() for handle in ranks.handles)
    ranks.close()
    assert "was told to" in (tmp_path / "logs/ranks.log").read_text()


def test_a_process_sees_the_gpus_of_its_place_and_no_others(tmp_path: Path) -> None:
    """The names are those of this process's own CUDA_VISIBLE_DEVICES; a part without GPUs changes nothing."""
    parts = [Part("replica", 2, Resources(gpus=2, cores=2)), Part("app", 1, Resources(cores=1))]
    fleet = Fleet(LocalLauncher(["4", "5", "GPU-6", "7"]), parts)
    seen = []
    for role in ("replica", "app"):
        for number, start in enumerate(fleet.starts(role, Program("tests.support.tell_environment"))):
            told = tmp_path / f"{role}{number}"
            assert start({"TELL": str(told), "CUDA_VISIBLE_DEVICES": "0"}).wait() == "has ended with status 0"
            seen.append(json.loads(told.read_text())["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4,5", "GPU-6,7", "0"]
    with pytest.raises(PlacementError, match="3 GPUs are needed in all and 2 GPUs free: 1 GPU missing"):
        Fleet(LocalLauncher(["0", "1"]), [Part("learner", 3, Resources(gpus=1))])


def test_a_role_is_placed_again_when_its_node_is_gone() -> None:
    """Ranks of a lost node go where there is room; without room it is an error that says what is missing."""

    class Nodes(LocalLauncher):
        """Nodes that come and go, on paper."""

        counts_cores = True

        def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:
            return tuple(there)

        def start(self, program: Program, part: Part, place: Place) -> Start:
            started.append(place.node)
            return super().start(program, part, place)

    started = list[str]()
    there = [Offer("a", cores=3), Offer("b", cores=2)]
    fleet = Fleet(Nodes(), [Part("learner", 2, Resources(cores=1)), Part("replica", 1, Resources(cores=1))])
    fleet.starts("learner", ECHO)
    there[0] = Offer("a", cores=1)  # as many as are left
    fleet.starts("learner", ECHO)
    del there[0]
    fleet.starts("learner", ECHO)
    assert started == ["a", "a", "a", "a", "b", "b"]
    there[0] = Offer("c", cores=1)
    with pytest.raises(PlacementError, match="2 cores are needed in all and 1 core free: 1 core missing"):
        fleet.starts("learner", ECHO)


def test_a_place_that_is_not_offered_again_yet_is_waited_for() -> None:
    """Ray learns a little later that a process has ended: without room for that long, a lost node ended the run."""

    class Nodes(LocalLauncher):
        counts_cores, settle_seconds = True, 600.0

        def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:
            return (free,) if in_all else looks.pop(0)

    free, taken = Offer("b", cores=2), Offer("b", cores=1)
    looks = [(Offer("a", cores=1), taken), (taken,), (taken,), (free,)]
    fleet = Fleet(Nodes(), [Part("learner", 2, Resources(cores=1))])
    assert len(fleet.starts("learner", ECHO)) == 2
    assert looks == []


def test_processes_are_spread_over_as_many_nodes_as_are_asked_for() -> None:
    """Of equal nodes and unequal ones; fewer nodes than asked for are an error that names them."""

    class Nodes(LocalLauncher):
        counts_cores = True

        def __init__(self, *there: Offer) -> None:
            super().__init__()
            self.there, self.started = there, list[str]()

        def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:
            return self.there

        def start(self, program: Program, part: Part, place: Place) -> Start:
            self.started.append(place.node)
            return super().start(program, part, place)

    parts = [Part("learner", 3, Resources(cores=1))]
    nodes = [Nodes(Offer("a", cores=9), Offer("b", cores=9)), Nodes(Offer("a", cores=9), Offer("b"))]
    for launcher in nodes:
        Fleet(launcher, parts, num_nodes=2).starts("learner", ECHO)
    assert [launcher.started for launcher in nodes] == [["a", "a", "b"], ["a", "a", "a"]]
    with pytest.raises(PlacementError, match=r"^compute\.nodes = 2: 1 there: a$"):
        Fleet(Nodes(Offer("a", cores=9)), parts, num_nodes=2)


def test_the_way_to_this_machine_is_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


ON_RANKS = [
    "compute.gpu_count=0",
    "topology.type=cluster",
    "topology.gpus_for_vllm=1",
    "topology.gpus_for_training=2",
    "rollout.engine=local",
]


@pytest.mark.parametrize(
    ("overrides", "address", "expected"),
    [
        ([], None, "local"),
        (["topology.gpus_for_training=1"], "127.0.0.1:1", "local"),  # nothing to start
        (["topology.launcher=local"], "127.0.0.1:1", "local"),
        (["topology.launcher=ray"], None, "ray"),
        (["topology.ray_address=127.0.0.1:1"], None, "ray"),
        ([], "127.0.0.1:1", "ray"),
        (["compute.nodes=2"], "127.0.0.1:1", "ray"),
        (["topology.launcher=ray", "compute.nodes=2"], None, "compute.nodes = 2: 1 there, this machine"),
        (["compute.nodes=2"], None, "compute.nodes = 2: 1 there, this machine"),
    ],
)
def test_the_launcher_is_the_one_that_the_section_and_the_environment_name(
    overrides: list[str], address: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen:
        """Stands for Ray, which is not installed here; `tests/cluster` has it."""

        counts_cores, host = True, "127.0.0.1"

        def __init__(self, given: str | None, *, num_cores: int, silence_seconds: float, on_end: object) -> None:
            wanted = "127.0.0.1:1" if address or "ray_address" in str(overrides) else None
            assert (given, num_cores, silence_seconds, callable(on_end)) == (wanted, 2, 30.0, True)

        def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:
            return (Offer("a", cores=2), Offer("b", cores=2))

        def close(self) -> None: ...

    monkeypatch.setattr(processes, "RayLauncher", Chosen)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = load_config(QUICKSTART, [*ON_RANKS, *overrides])
    if expected not in ("local", "ray"):
        with pytest.raises(PlacementError, match=expected):
            processes.launching(config).__enter__()
        return
    with processes.launching(config) as fleet:
        assert isinstance(fleet.launcher, {"local": LocalLauncher, "ray": Chosen}[expected])


class Nodes:
    """A launcher whose nodes come and go; it gives cores away only when it is told to."""

    host, counts_cores, settle_seconds = "127.0.0.1", True, 0.5

    def __init__(self, **cores: int) -> None:
        self.cores, self.taken = cores, dict.fromkeys(cores, 0)

    def offers(self, *, in_all: bool = False) -> tuple[Offer, ...]:
        return tuple(Offer(node, cores=n - (0 if in_all else self.taken[node])) for node, n in self.cores.items())

    def start(self, program: Program, part: Part, place: Place) -> Any:
        return part.role, place.number, place.node

    def close(self) -> None: ...


def test_only_the_pieces_of_a_node_that_is_gone_move_and_where_there_is_no_room_is_said_at_once() -> None:
    nodes = Nodes(a=3, b=2)
    parts = [Part("learner", 2, Resources(cores=1)), Part("replica", 2, Resources(cores=1))]
    fleet, program = Fleet(nodes, parts, num_nodes=2), Program("none")
    assert fleet.starts("learner", program) == [("learner", 0, "a"), ("learner", 1, "a")]
    assert fleet.starts("replica", program) == [("replica", 0, "b"), ("replica", 1, "b")]
    nodes.cores, nodes.taken = {"a": 3, "c": 1}, {"a": 2, "c": 0}
    # One of two: the other's place is looked for when that is started.
    assert fleet.start("replica", 1, program) == ("replica", 1, "a")
    nodes.taken["a"] = 3
    assert fleet.start("replica", 0, program) == ("replica", 0, "c")
    assert fleet.starts("learner", program) == [("learner", 0, "a"), ("learner", 1, "a")]
    # The replica of the node that is gone finds no room: what the learners have just given back is theirs.
    del nodes.cores["c"]
    nodes.taken["a"] = 1
    nodes.settle_seconds, began = 100.0, time.monotonic()
    with pytest.raises(PlacementError, match=r"1 core are needed in all and 0 cores free: 1 core missing.* on a$"):
        fleet.start("replica", 0, program)
    assert time.monotonic() - began < 50
    # There is room, but what was killed has not given it back yet: that is waited for.
    nodes.cores, nodes.taken = {"d": 2}, {"d": 2}
    nodes.settle_seconds, began = 0.5, time.monotonic()
    with pytest.raises(PlacementError, match="2 cores are needed in all and 0 cores free"):
        fleet.starts("learner", program)
    assert time.monotonic() - began >= 0.5
    nodes.taken["d"] = 0
    assert fleet.starts("learner", program) == [("learner", 0, "d"), ("learner", 1, "d")]
