"""A real Ray on loopback: what is lost ends with a reason, refusals, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.base.leftovers import descendants
from gspo_gym.cluster.actors import Actors, Cluster, RanksLostError
from gspo_gym.cluster.placement import Part, Resources
from gspo_gym.cluster.ray import joined
from gspo_gym.errors import PlacementError

ROOT = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, which the container's first process removes when it likes."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False


def require_gone(pids: set[int], folders: set[Path], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)] + [f for f in folders if f.exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert left == []


def folder_of_ray() -> Path:
    """The folder of the Ray that was started here and is joined."""
    folder = Path(os.environ["RAY_TMPDIR"])
    assert folder.is_dir()
    return folder


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """A Ray with four cores, joined, which ends with everything that it started."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    with joined(None, num_cores=4) as ray:
        pids, folders = descendants(os.getpid()), {folder_of_ray()}
        yield ray
        pids |= descendants(os.getpid())
        shared = shared_memory_of(pids)
    assert os.environ.get("RAY_AUTH_TOKEN") == token
    require_gone(pids - _keeper(), folders, 0)
    assert [path for path in shared if path.exists()] == []


def shared_memory_of(pids: set[int]) -> set[Path]:
    """The files in shared memory that these processes have mapped; others' come and go beside them."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line and not line.endswith(" (deleted)"):
                    found.add(Path(line[line.index("/dev/shm/") :]))
    return found


def _keeper() -> set[int]:
    """The process that ends and removes what is left of this one, which lives as long."""
    return {pid for pid in descendants(os.getpid()) if b"leftovers.py" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def listening_addresses(pids: set[int]) -> set[str]:
    """The addresses, as the kernel writes them, at which these processes take connections."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(words[1].partition(":")[0])
    return found


def test_ray_listens_on_loopback_only_and_asks_for_a_token(ray: Any) -> None:
    found = listening_addresses(descendants(os.getpid()))
    # 127.0.0.1, and the same within IPv6; all of Ray's servers are one of them.
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert found
    code = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR')"
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    stranger = subprocess.run(
        [sys.executable, "-c", code, ray.get_runtime_context().gcs_address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert stranger.returncode != 0
    assert "uthentic" in stranger.stderr


class Echo:
    """An actor whose work can hang."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def life(self) -> int:
        return os.getpid()

    def echo(self, text: str) -> tuple[int, str]:
        return self._rank, text

    def hang(self) -> None:
        signal.pause() if threading.current_thread() is threading.main_thread() else time.sleep(10_000)

    def fail(self) -> None:
        if self._rank == 1:
            raise ValueError("of rank 1")


def started(cluster: Cluster) -> Actors:
    return Actors(cluster, "learner", Echo, [(rank,) for rank in range(2)], silence_seconds=5.0)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"^rank 1 \(process \d+\): \w*Actor\w*Error: "),
        (signal.SIGSTOP, r"^rank 1 \(process \d+\) was not heard of for 5 seconds$"),
        (None, r"^rank 0 \(process \d+\) was not done after 2 seconds$"),
    ],
)
def test_a_lost_actor_ends_the_others_and_its_place_is_free_again(
    number: signal.Signals | None, message: str, ray: Any
) -> None:
    with contextlib.closing(Cluster(ray, [Part("learner", 2, Resources(cores=1))])) as cluster:
        for _ in range(2):
            ranks = started(cluster)
            assert ranks.ask("echo", "abc", max_seconds=60) == [(0, "abc"), (1, "abc")]
            if number is not None:
                os.kill(ranks.pids[1], number)
            with pytest.raises(RanksLostError, match=message):
                ranks.ask("hang", max_seconds=2 if number is None else 60)
            require_gone({*ranks.pids}, set())


def test_an_error_of_one_rank_is_the_reason_of_all(ray: Any) -> None:
    with contextlib.closing(Cluster(ray, [Part("learner", 2, Resources(cores=1))])) as cluster:
        ranks = started(cluster)
        with pytest.raises(RanksLostError, match=r"^rank 1 \(process \d+\): .*of rank 1"):
            ranks.ask("fail", max_seconds=60)


@pytest.mark.parametrize(
    ("count", "num_nodes", "message"),
    [
        (5, 1, r"^no room for the run: learner: 5 x \(1 core\)\. Ray has 4 CPU, 0 GPU free on 1 nodes$"),
        (1, 2, r"^compute\.nodes = 2: 1 there: 127\.0\.0\.1$"),
    ],
)
def test_a_demand_that_cannot_be_met_is_a_sentence(count: int, num_nodes: int, message: str, ray: Any) -> None:
    with pytest.raises(PlacementError, match=message):
        Cluster(ray, [Part("learner", count, Resources(cores=1))], num_nodes=num_nodes)


def started_driver(code: str) -> tuple[subprocess.Popen[str], Any]:
    """A program with this code, without Ray's variables, and the JSON that it prints first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert driver.stdout is not None
    return driver, json.loads(driver.stdout.readline())


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import json, os, ray, signal\n"  # Ray reads its variables again where it was imported under others
        "from tests.cluster.test_ray import *\n"
        "joining = joined(None, num_cores=2)\n"
        "ray = joining.__enter__()\n"
        "ranks = started(Cluster(ray, [Part('learner', 2, Resources(cores=1))]))\n"
        "print(json.dumps([str(folder_of_ray()), *descendants(os.getpid())]), flush=True)\n"
        "signal.pause()\n"
    )
    driver, (folder, *pids) = started_driver(code)
    assert len(pids) >= 6  # Ray's own, two actors, and what ends them
    driver.kill()
    driver.wait()
    driver.stdout.close()
    require_gone({*pids}, {Path(folder)}, 60)


def test_agents_that_outlive_their_raylet_and_are_stopped_go_with_the_driver() -> None:
    # Their titles hide the variable by which Ray's processes are known, and their parent has gone.
    code = (
        "from tests.cluster.test_ray import *\n"
        "with joined(None, num_cores=2):\n"
        "    pids, agents, deadline = set(), set(), time.monotonic() + 60\n"
        "    while len(agents) < 2 and time.monotonic() < deadline:\n"
        "        pids = descendants(os.getpid())\n"
        "        titles = {pid: Path(f'/proc/{pid}/cmdline').read_bytes() for pid in pids if is_running(pid)}\n"
        "        agents = {pid for pid, title in titles.items() if title.startswith(b'ray::') and b'Agent' in title}\n"
        "    raylets = [pid for pid in pids if b'raylet/raylet' in titles.get(pid, b'')]\n"
        "    for pid in agents:\n"
        "        os.kill(pid, signal.SIGSTOP)\n"
        "    print(json.dumps([sorted(agents), raylets]), flush=True)\n"
        "    for pid in raylets:\n"
        "        os.kill(pid, signal.SIGKILL)\n"
        "    signal.pause()\n"
    )
    driver, (agents, raylets) = started_driver(code)
    assert (len(agents), len(raylets)) == (2, 1)
    require_gone({*raylets}, set(), 60)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    require_gone({*agents}, set(), 60)


@pytest.mark.nightly  # Ray's head needs a minute to see it
def test_a_driver_that_waits_for_a_raylet_that_is_stopped_ends_and_nothing_outlives_it() -> None:
    code = (
        "import numpy as np\n"
        "from tests.cluster.test_ray import *\n"
        "with joined(None, num_cores=2) as ray:\n"
        "    pids = descendants(os.getpid())\n"
        "    print(json.dumps(sorted(pids)), flush=True)\n"
        "    for pid in pids:\n"
        "        if b'raylet/raylet' in Path(f'/proc/{pid}/cmdline').read_bytes():\n"
        "            os.kill(pid, signal.SIGSTOP)\n"
        "    ray.put(np.zeros(10_000_000))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    printed, errors = driver.communicate(timeout=300)
    assert driver.returncode == 1
    assert "Ray's node or head does not answer any more; go on with --resume" in errors
    require_gone({*json.loads(printed.splitlines()[0])}, set(), 60)
