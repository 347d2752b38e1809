"""Nothing outlives a program that is killed: no process, socket or temporary folder of any kind that it started."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gspo_gym_envs
import pytest

import gspo_gym
from gspo_gym.base.leftovers import MarkedProcesses
from tests.support.parent_of_all import KINDS, descendants

SUPPORT = Path(__file__).parents[2] / "support"
SECONDS = 60.0  # at most; SIGTERM has 10 of them before SIGKILL


def identity(pid: int) -> tuple[int, str] | None:
    """Return the process's number and start, which tell it from a later one; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else (pid, fields[18])


def comes(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def killed_parent(folder: Path, kinds: list[str]) -> tuple[set[tuple[int, str]], list[Path]]:
    """Start a program with these kinds and kill it; return the processes that it had, and folders it named."""
    temporary = folder / "tmp"
    temporary.mkdir()
    program = [sys.executable, str(SUPPORT / "parent_of_all.py"), str(folder), *kinds]
    variables = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=variables) as parent:
        assert parent.stdout is not None
        try:
            said = [line.split() for line in itertools.takewhile(lambda line: line != "all\n", parent.stdout)]
            running = descendants(parent.pid)
            processes = {found for pid in running if (found := identity(pid))}
        finally:
            parent.kill()
    assert [line[0] for line in said if line[0] != "folder"] == kinds, "not all of them started"
    named = {int(pid) for line in said if line[0] != "folder" for pid in line[1:]}
    assert named <= running, said
    return processes, [Path(line[1]) for line in said if line[0] == "folder"]


def require_nothing_left(folder: Path, kinds: list[str]) -> None:
    processes, folders = killed_parent(folder, kinds)
    temporary = folder / "tmp"
    assert processes
    assert comes(lambda: not any(identity(pid) for pid, _ in processes)), [
        Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid, _ in processes if identity(pid)
    ]
    # torch's cache of compiled kernels is for the next program, too
    assert comes(lambda: {path.name.partition("_")[0] for path in temporary.iterdir()} <= {"torchinductor"}), [
        *temporary.iterdir()
    ]
    assert comes(lambda: not any(path.exists() for path in folders))


def test_what_a_killed_program_registered_is_ended_and_removed(tmp_path: Path) -> None:
    require_nothing_left(tmp_path, ["trial", "temporary", "starting"])


@pytest.mark.slow
def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    require_nothing_left(tmp_path, list(KINDS))


def test_marked_processes_are_gone_when_they_were_ended() -> None:
    # A process with much memory is not gone when SIGKILL was sent: the system has it to take back.
    program = "import sys; held = bytearray(b'x') * (3 * 10**8); print('up', flush=True); sys.stdin.read()"
    processes = MarkedProcesses()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **processes.environment},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        processes.end(grace_seconds=0.0)
        assert identity(process.pid) is None
        processes.end()


# A process without the variable, whose parent has ended, as one of Ray's agents is when its raylet was killed.
ORPHAN = "env -i sleep 1000 & echo $!"


def test_an_orphan_that_hides_its_variables_is_gone_with_its_session() -> None:
    processes = MarkedProcesses()
    with subprocess.Popen(["sh", "-c", ORPHAN], stdout=subprocess.PIPE, start_new_session=True) as leader:
        processes.add_session(leader.pid)
        assert leader.stdout is not None
        orphan = int(leader.stdout.readline())
        assert identity(orphan) is not None
        processes.end(grace_seconds=0.0)
        assert identity(orphan) is None


def test_a_session_ends_with_the_program_that_is_killed() -> None:
    program = (
        "import subprocess, sys\n"
        "from gspo_gym.base.leftovers import MarkedProcesses\n"
        "leader = subprocess.Popen(['sh', '-c', sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)\n"
        "MarkedProcesses().add_session(leader.pid)\n"
        "print(int(leader.stdout.readline()), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        parent.kill()
    assert comes(lambda: identity(orphan) is None)


def test_every_temporary_folder_of_the_package_goes_with_the_program() -> None:
    # Of the two that make their own: a worker removes its own when its pipe ends, and a probe lasts a second.
    allowed = {"base/leftovers.py", "env/workers/pool.py", "code_repair/sandbox/confinement.py"}
    made = {
        path.relative_to(package).as_posix()
        for package in (Path(gspo_gym.__file__).parent, Path(gspo_gym_envs.__file__).parent)
        for path in package.rglob("*.py")
        if re.search(r"tempfile\.(mkdtemp|TemporaryDirectory)\(", path.read_text())
    }
    assert made - allowed == set(), "use temporary_folder or in_temporary_folder of base/leftovers.py"
