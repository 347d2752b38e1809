"""The places of a run's processes, and the launcher of this machine: real processes, which ranks are made of."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from gspo_gym.base.ranks import Ranks, RanksLostError, Start, address_towards
from gspo_gym.cluster.launcher import Fleet, LocalLauncher, Program
from gspo_gym.cluster.placement import Offer, Part, Place, Resources
from gspo_gym.errors import PlacementError

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

        def offers(self) -> tuple[Offer, ...]:
            return tuple(there)

        def start(self, program: Program, part: Part, place: Place) -> Start:
            started.append(place.node)
            return super().start(program, part, place)

    started: list[str] = []
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


def test_the_way_to_this_machine_is_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
