"""Groups of processes: messages arrive whole, and whatever ends one rank ends all, with a reason that names it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gspo_gym.base.ranks import RANK_VARIABLE, Handle, LocalProcess, Patience, Ranks, RanksLostError

PROGRAM = "tests.support.echo_rank"
IMPATIENT = Patience(silence=1.0)


def start_echo(environment: Mapping[str, str]) -> Handle:
    return LocalProcess(PROGRAM, (), environment)


def pid_of(ranks: Ranks, rank: int) -> int:
    handle = ranks.handles[rank]
    assert isinstance(handle, LocalProcess)
    return handle.pid


def is_gone(pid: int) -> bool:
    """Whether nothing of a child of ours is left, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture
def group() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(patience: Patience | None = None, **options: Callable[[str], None]) -> Ranks:
        made.append(Ranks([start_echo, start_echo], patience=patience, **options))
        return made[-1]

    yield make
    for ranks in made:
        pids = [pid_of(ranks, rank) for rank in range(2)]
        ranks.close()
        assert all(is_gone(pid) for pid in pids)


def test_a_rank_that_joins_before_its_starter_returns_is_counted() -> None:
    """Ray may tell of an actor after the actor has connected."""

    ranks = Ranks.__new__(Ranks)

    def start_and_tell_late(environment: Mapping[str, str]) -> Handle:
        handle = start_echo(environment)
        assert ranks._members[0].joined.wait(60)
        return handle

    ranks.__init__([start_and_tell_late])
    with contextlib.closing(ranks):
        assert len(ranks.handles) == 1


def test_messages_and_any_number_of_large_bodies_arrive_whole(group: Callable[..., Ranks]) -> None:
    ranks = group()
    bodies = [bytes([k]) * (k << 17) for k in range(1, 12)]  # more than wait anywhere, the last of 1.4 MB
    ranks.send({"do": "echo"}, iter(bodies), num_bodies=11)
    for rank in (1, 0):
        head, answered = ranks.receive(rank)
        assert head == {"rank": rank, "do": "echo"}
        assert list(answered) == [2 * body for body in bodies]


def test_a_rank_looks_for_garbage_from_its_programs_beginning_and_not_while_that_is_imported(
    group: Callable[..., Ranks],
) -> None:
    ranks = group()
    ranks.send({"tell": True})
    assert [ranks.receive(rank)[0]["collects"] for rank in range(2)] == [[False, True]] * 2


def test_a_killed_rank_ends_the_others_and_is_named(group: Callable[..., Ranks]) -> None:
    told: list[str] = []
    ranks = group(on_loss=told.append)
    killed = pid_of(ranks, 1)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(RanksLostError) as lost:
        ranks.receive(0)
    assert f"rank 1 (process {killed}) has ended with status -9" in str(lost.value)
    assert told == [str(lost.value)]
    assert ranks.handles[0].wait() == "has ended with status -9"


def test_a_stopped_rank_is_not_heard_of_and_its_end_is_the_groups(group: Callable[..., Ranks]) -> None:
    ranks = group(IMPATIENT)
    stopped = pid_of(ranks, 1)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RanksLostError, match=rf"rank 1 \(process {stopped}\) was not heard of for 1 seconds"):
        ranks.receive(0)


def test_a_stopped_rank_is_not_heard_of_while_its_connection_takes_nothing_more(group: Callable[..., Ranks]) -> None:
    ranks = group(IMPATIENT)
    os.kill(pid_of(ranks, 1), signal.SIGSTOP)
    line = ranks._members[1].line
    assert line is not None
    with contextlib.suppress(BlockingIOError):
        while True:
            line.connection.send(bytes(8 << 10), socket.MSG_DONTWAIT)  # signs of life
    with pytest.raises(RanksLostError, match=r"rank 1 \(.*\) was not heard of for 1 seconds"):
        ranks.receive(0, max_seconds=60)


def test_an_answer_that_does_not_come_in_time_ends_the_group(group: Callable[..., Ranks]) -> None:
    ranks = group()
    with pytest.raises(RanksLostError, match=r"rank 0 was not done after 0\.2 seconds"):
        ranks.receive(0, max_seconds=0.2)
    with pytest.raises(RanksLostError, match=r"rank 0 was not done after 0\.2 seconds"):
        ranks.send({})


def test_a_rank_says_why_it_ends_in_one_line(tmp_path: Path) -> None:
    log, is_over = tmp_path / "log", threading.Event()
    log.write_text("of another run\n")
    told: list[str] = []

    def tell(reason: str) -> None:
        told.append(reason)
        is_over.set()

    ranks = Ranks([lambda environment: LocalProcess(PROGRAM, (), environment, log=log)], on_loss=tell, log=log)
    ranks.send({"end": True})
    assert is_over.wait(30)
    ranks.close()
    assert log.read_text() == "of another run\nrank 0: was told to\n"
    assert told[0].endswith(f" has ended with status 1; {log} ends with: rank 0: was told to")


def test_a_stranger_is_not_admitted_in_a_ranks_place() -> None:
    def start_after_stranger(environment: Mapping[str, str]) -> Handle:
        address = tuple(json.loads(environment[RANK_VARIABLE])["address"])
        with socket.create_connection(address, timeout=5.0) as stranger:
            hello = json.dumps({"rank": 0, "secret": "guessed"}).encode()
            stranger.sendall(len(hello).to_bytes(8) + hello)
            refused.append(stranger.recv(1))  # an admitted one would wait here for the time-out, an OSError
        return start_echo(environment)

    refused: list[bytes] = []
    ranks = Ranks([start_after_stranger])
    ranks.send({})
    assert ranks.receive(0)[0] == {"rank": 0}
    assert refused == [b""]
    ranks.close()


def test_a_closed_group_listens_no_more_and_leaves_no_socket_open() -> None:
    ranks = Ranks([start_echo])
    address = ranks.address
    with socket.create_connection(address):  # a stranger that says nothing
        ranks.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del ranks
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_a_rank_that_does_not_start_is_an_error_at_once() -> None:
    with pytest.raises(RanksLostError, match=r"rank 1 \(process \d+\) has ended with status 1"):
        Ranks([start_echo, lambda environment: LocalProcess("tests.support.not_there", (), environment)])


def test_whatever_goes_wrong_at_a_start_is_an_error_at_once() -> None:
    """Such as a RuntimeError of torch's store: without it the others would be waited for until `Patience.join`."""

    def start(_environment: Mapping[str, str]) -> Handle:
        raise RuntimeError("the store is gone")

    with pytest.raises(RanksLostError, match=r"^rank 1 \(not started\) could not be started: the store is gone"):
        Ranks([start_echo, start])


def test_a_rank_that_cannot_reach_its_driver_ends_itself_and_the_driver_ends_the_rest() -> None:
    """A relay stands between; when it is told to, it forwards nothing more, and closes nothing."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        is_cut = threading.Event()

        def forward(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):  # closed by a process that was killed
                while data := source.recv(65536):
                    if is_cut.is_set():
                        return
                    sink.sendall(data)

        def start_behind(environment: Mapping[str, str]) -> Handle:
            place = json.loads(environment[RANK_VARIABLE])
            driver = socket.create_connection(tuple(place["address"]))
            place["address"] = relay.getsockname()
            handle = LocalProcess(PROGRAM, (), {RANK_VARIABLE: json.dumps(place)})
            rank, _ = relay.accept()
            kept.extend((driver, rank))
            for pair in ((driver, rank), (rank, driver)):
                threading.Thread(target=forward, args=pair, daemon=True).start()
            return _Unreachable(handle)

        kept: list[socket.socket] = []
        ranks = Ranks([start_echo, start_behind], patience=IMPATIENT)
        is_cut.set()
        with pytest.raises(RanksLostError, match="rank 1"):
            ranks.receive(0)
        assert ranks.handles[1].wait() == "has ended with status 0"  # by itself: kill() does not reach it
        ranks.close()
        for connection in kept:
            connection.close()


class _Unreachable:
    """A process on a machine that cannot be reached."""

    def __init__(self, handle: Handle) -> None:
        self.name, self.wait = handle.name, handle.wait

    def kill(self) -> None: ...


def test_a_rank_that_is_stopped_while_its_program_is_loaded_is_not_waited_for_until_all_have_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gspo_gym.base.ranks._STARTING_SECONDS", 3.0)

    def start_stopped(environment: Mapping[str, str]) -> Handle:
        return LocalProcess("tests.support.stopped_start", (), environment)

    with pytest.raises(RanksLostError, match=r"rank 1 \(process \d+\) was not heard of for 3 seconds"):
        Ranks([start_echo, start_stopped], patience=IMPATIENT)


def test_ranks_end_with_their_driver_even_while_they_are_stopped() -> None:
    code = (
        "import os, signal\n"
        "from tests.unit.base.test_ranks import Ranks, pid_of, start_echo\n"
        "ranks = Ranks([start_echo, start_echo])\n"
        "pids = [pid_of(ranks, 0), pid_of(ranks, 1)]\n"
        "os.kill(pids[0], signal.SIGSTOP)\n"
        "print(*pids, flush=True)\n"
        "signal.pause()\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    watched = [os.pidfd_open(pid) for pid in pids]
    driver.kill()
    for fd in watched:  # readable when the process has ended
        assert _is_readable(fd)
        os.close(fd)
    driver.wait()
    driver.stdout.close()


def _is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 30)[0])
