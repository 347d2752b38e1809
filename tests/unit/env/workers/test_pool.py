"""ProcessPool: idle workers are bounded, dead ones are noticed, and a host that died is started again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.env.workers.pool import ProcessPool, WorkerEndedError, WorkerProcess

CLOSE = b'{"method": "close"}'


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


def lease(pool: ProcessPool, kind: str = "a") -> WorkerProcess:
    return pool.lease((kind,), memory_limit_mb=0)


def answers(worker: WorkerProcess) -> bool:
    """Whether it can be talked to: a close without an environment is answered."""
    return "result" in worker.exchange(CLOSE, max_seconds=30)


def status_of(worker: WorkerProcess) -> int | None:
    """How a worker ended that ends about now."""
    while True:
        try:
            worker.exchange(CLOSE, max_seconds=30)
        except WorkerEndedError as error:
            return error.status


def host_of(pool: ProcessPool) -> int:
    assert pool.host.pid is not None
    return pool.host.pid


def test_a_worker_is_given_again_to_its_own_kind_only(pool: ProcessPool) -> None:
    first = lease(pool)
    assert answers(first)
    pool.give_back(first)
    other = lease(pool, "b")
    assert other is not first
    assert lease(pool) is first
    assert pool.counts == {"started": 2, "reused": 1}


def test_as_many_wait_as_were_in_use_at_once_and_beyond_that_the_longest_waiting_ends(pool: ProcessPool) -> None:
    workers = [lease(pool) for _ in range(3)]
    for worker in workers:
        pool.give_back(worker)
    assert pool.num_idle == 3
    assert lease(pool) is workers[2]
    pool.give_back(workers[2])
    other = lease(pool, "b")  # a fourth, but one at a time
    pool.give_back(other)
    assert pool.num_idle == 3
    assert status_of(workers[0]) == signal.SIGKILL
    assert pool.counts == {"started": 4, "reused": 1, "retired": 1}
    assert answers(lease(pool))


def test_a_worker_that_is_killed_in_an_exchange_says_how_it_ended(pool: ProcessPool) -> None:
    worker = lease(pool)
    assert answers(worker)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        worker.exchange(CLOSE, max_seconds=0.01)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(status_of, worker)
        worker.kill()
        assert waiting.result(timeout=30) == signal.SIGKILL


def test_a_fork_of_the_program_neither_ends_nor_holds_its_workers(pool: ProcessPool) -> None:
    worker = lease(pool)
    assert answers(worker)
    read_end, write_end = os.pipe()
    fork = os.fork()
    if fork == 0:
        pool.forget()
        worker.kill()
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    assert answers(worker)
    worker.kill()
    assert status_of(worker) == signal.SIGKILL
    os.close(write_end)
    os.close(read_end)
    assert os.waitpid(fork, 0) == (fork, 0)


def test_a_worker_that_died_while_idle_is_not_given_out(pool: ProcessPool) -> None:
    worker = lease(pool)
    assert answers(worker)  # right after the fork it ignores SIGTERM, as its host does
    pool.give_back(worker)
    handle = os.pidfd_open(worker.pid)
    os.kill(worker.pid, signal.SIGTERM)
    assert select.select([handle], [], [], 30)[0]
    os.close(handle)
    successor = lease(pool)
    assert successor is not worker
    assert answers(successor)
    assert pool.counts == {"started": 2, "died": 1}
    assert status_of(worker) == signal.SIGTERM


def test_a_host_that_died_takes_its_workers_along_and_is_started_again(pool: ProcessPool) -> None:
    worker = lease(pool)
    assert answers(worker)
    handle = os.pidfd_open(worker.pid)
    os.kill(host_of(pool), signal.SIGKILL)
    assert select.select([handle], [], [], 30)[0]
    os.close(handle)
    assert answers(lease(pool))
    assert status_of(worker) is None  # none is left that could know


@pytest.mark.slow
def test_a_host_that_is_stopped_is_killed_with_its_workers_when_the_next_is_needed(pool: ProcessPool) -> None:
    worker = lease(pool)
    handle = os.pidfd_open(worker.pid)
    os.kill(host_of(pool), signal.SIGSTOP)
    assert answers(lease(pool))
    assert select.select([handle], [], [], 30)[0]
    os.close(handle)


def test_a_host_that_dies_while_it_starts_is_started_again(pool: ProcessPool) -> None:
    with ThreadPoolExecutor(1) as thread:
        leasing = thread.submit(lease, pool)
        while (pid := pool.host.pid) is None:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        assert answers(leasing.result(timeout=120))


_IS_KILLED = """
import os, signal, sys
from gspo_gym.env.workers.pool import POOL
worker = POOL.lease(("a",), memory_limit_mb=0)
host = POOL.host.pid
os.kill(host, signal.SIGSTOP)
print(host, worker.pid, POOL.host._home, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # the host has 10 seconds after SIGTERM
def test_a_host_that_is_stopped_goes_with_a_program_that_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", _IS_KILLED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    *pids, home = done.stdout.split()
    places = [Path(home), *(Path("/proc", pid) for pid in pids)]
    deadline = time.monotonic() + 60
    while (left := [place for place in places if place.exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_closing_leaves_no_process_and_the_pool_can_be_used_again(pool: ProcessPool) -> None:
    idle, used = lease(pool), lease(pool)
    pool.give_back(idle)
    pool.close()
    for worker in (idle, used):
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)
    assert answers(lease(pool))


@pytest.mark.parametrize(
    ("grown", "reason"),
    [
        ({}, None),
        ({"open files": 8, "threads": 8, "MiB of memory": 256, "child processes": 0}, None),
        ({"open files": 9}, "leaked 9 open files"),
        ({"MiB of memory": 257, "threads": 9}, "leaked 257 MiB of memory, 9 threads"),
        ({"child processes": 1}, "leaked 1 child processes"),
        ({"MiB of memory": -300}, None),
    ],
)
def test_a_worker_is_replaced_when_it_has_grown_beyond_its_limits(grown: dict[str, int], reason: str | None) -> None:
    assert WorkerLimits().reason_to_replace(grown) == reason
