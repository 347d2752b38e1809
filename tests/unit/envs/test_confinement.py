"""System calls under each confinement that works here: those that programs need, and those that touch others."""

from __future__ import annotations

import os
import re
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from gspo_gym_envs.code_repair.sandbox import confinement as confinement_module
from gspo_gym_envs.code_repair.sandbox import run as sandbox
from gspo_gym_envs.code_repair.sandbox.confinement import Confinement
from gspo_gym_envs.code_repair.sandbox.run import SandboxLimits, run_python

from tests.support.confinements import mechanism

__all__ = ["mechanism"]  # a fixture

# Calls that take the id of another process: name, numbers on x86_64 and aarch64, arguments (man 2 NAME).
NAMING = """
import ctypes, os, struct
V = @VICTIM@
libc = ctypes.CDLL(None, use_errno=True)
def text(*layout):
    return ctypes.create_string_buffer(struct.pack(*layout), 4096)
room, one = text("i", 1), os.pipe()[0]
CALLS = [
    ("kill", 62, 129, V, 0), ("tkill", 200, 130, V, 0), ("tgkill", 234, 131, V, V, 0),
    ("rt_sigqueueinfo", 129, 138, V, 18, text("iii", 18, 0, -1)),
    ("rt_tgsigqueueinfo", 297, 240, V, V, 18, text("iii", 18, 0, -1)),
    ("pidfd_open", 434, 434, V, 0), ("prlimit64, read", 302, 261, V, 7, None, room),
    ("prlimit64, write", 302, 261, V, 7, text("QQ", 3, 3), None),
    ("getpriority", 140, 141, 0, V), ("setpriority", 141, 140, 0, V, 19),
    ("sched_getaffinity", 204, 123, V, 4096, room), ("sched_setaffinity", 203, 122, V, 8, text("Q", 1)),
    ("sched_getscheduler", 145, 120, V), ("sched_setscheduler", 144, 119, V, 5, text("i", 0)),
    ("sched_getparam", 143, 121, V, room), ("sched_setparam", 142, 118, V, text("i", 0)),
    ("sched_rr_get_interval", 148, 127, V, room),
    ("sched_getattr", 315, 275, V, room, 56, 0),
    ("sched_setattr", 314, 274, V, text("IIQiIQQQ", 48, 3, 0, 5, 0, 0, 0, 0), 0),
    ("ioprio_get", 252, 31, 1, V), ("ioprio_set", 251, 30, 1, V, 3 << 13),
    ("getpgid", 121, 155, V), ("getsid", 124, 156, V), ("setpgid", 109, 154, V, V),
    ("get_robust_list", 274, 100, V, room, text("Q", 8)), ("move_pages", 279, 239, V, 0, None, None, None, 0),
    ("migrate_pages", 256, 238, V, 8, text("Q", 1), text("Q", 1)),
    ("process_vm_readv", 310, 270, V, None, 0, None, 0, 0), ("ptrace", 101, 117, 0x4206, V, 0, 0),
    ("kcmp", 312, 272, os.getpid(), V, 1, 0, 0), ("capget", 125, 90, text("Ii", 0x20080522, V), room),
    ("fcntl F_SETOWN", 72, 25, one, 8, V), ("fcntl F_SETOWN_EX", 72, 25, one, 15, text("ii", 1, V)),
    ("ioctl FIOSETOWN", 16, 29, one, 0x8901, text("i", V)), ("clock_gettime", 228, 113, (~V << 3) | 2, room),
    ("prctl PR_SCHED_CORE", 157, 167, 62, 2, V, 0, 0),
]
column = 1 if os.uname().machine == "x86_64" else 2
for name, *rest in CALLS:
    number, *arguments = rest[column - 1], *rest[2:]
    result = libc.syscall(*(ctypes.c_long(x) if isinstance(x, int) else x for x in (number, *arguments)))
    print(name, "HELD" if result < 0 else "GOT", sep=": ")
"""


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, process_group=0
    ) as process:
        yield process
        process.kill()


def state_of(pid: int) -> list[object]:
    limits = [resource.prlimit(pid, kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)]
    return [*limits, os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), os.sched_getaffinity(pid)]


def outcomes(victim: subprocess.Popen[bytes]) -> list[str]:
    result = run_python(NAMING.replace("@VICTIM@", str(victim.pid)))
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_no_call_that_takes_another_process_id_gets_anything(
    mechanism: Confinement, victim: subprocess.Popen[bytes]
) -> None:
    before = state_of(victim.pid)
    lines = outcomes(victim)
    assert len(lines) > 30
    assert [line for line in lines if not line.endswith("HELD")] == []
    assert (state_of(victim.pid), victim.poll()) == (before, None)


def test_without_a_confinement_these_calls_reach_the_other_process(
    victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above is one of calls that are made rightly."""
    monkeypatch.setattr(sandbox, "require_confinement", lambda *_, **__: Confinement("none"))
    assert sum(line.endswith("GOT") for line in outcomes(victim)) >= 20


TAKING = """
import ctypes, os, signal, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
print("timers", sum(libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())) == 0 for _ in range(100)))
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
for _ in range(100):
    os.kill(os.getpid(), 40)
print("queued signals", sum(signal.sigtimedwait([40], 0) is not None for _ in range(100)))
print("inotify", libc.inotify_init() >= 0)
def got(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True
print("input", [got(os.write, 0, b"x"), got(os.ftruncate, 0, 1), got(open, "/proc/self/fd/0", "wb")])
def datagram():
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", "@SOCKET@")
print("datagram", got(datagram))
"""


def test_a_program_takes_nothing_that_its_user_has_once_and_its_input_is_read_only(mechanism: Confinement) -> None:
    """One real-time signal waits beside the queue: the kernel notes that it came."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local:
        os.chmod(folder, 0o755)
        local.bind(f"{folder}/socket")
        os.chmod(f"{folder}/socket", 0o777)
        result = run_python(TAKING.replace("@SOCKET@", f"{folder}/socket"), stdin="input")
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "timers 0",
        "queued signals 1",
        "inotify False",
        "input [False, False, False]",
        "datagram False",
    ]


def test_threads_are_bounded_also_where_the_kernel_counts_those_of_other_programs(mechanism: Confinement) -> None:
    """For a user but root of the first namespace, which the kernel does not count."""
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NPROC)[1])"
    own = 2 + 1 + 32  # the starter's processes, the program, its threads
    others = confinement_module._num_tasks_here() if mechanism == Confinement("landlock") else 0
    bound = int(run_python(code, limits=SandboxLimits(max_processes=1)).stdout)
    # Other programs start and end some threads between the two counts.
    assert (bound == own) if not others else abs(bound - own - others) < 1000


WORKING = """
import asyncio, concurrent.futures, ctypes, faulthandler, fcntl, mmap, multiprocessing, os, platform, resource, secrets
import select, shutil, signal, socket, sqlite3, subprocess, sys, tempfile, threading, time, uuid

sys.stdin.read(), sys.stdin.seek(0), sys.stdout.isatty(), shutil.get_terminal_size()
list(concurrent.futures.ThreadPoolExecutor(3).map(abs, [1, -2]))
def stack():  # as Python 3.14 asks for it in every thread
    return ctypes.CDLL(None).pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), ctypes.create_string_buffer(256))
assert concurrent.futures.ThreadPoolExecutor(1).submit(stack).result() == 0
assert asyncio.run(asyncio.to_thread(abs, -1)) == 1
signal.signal(signal.SIGALRM, lambda *_: None), signal.setitimer(signal.ITIMER_REAL, 0.001), signal.pause()
signal.signal(signal.SIGUSR1, lambda *_: None), os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1), signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
with sqlite3.connect(":memory:") as base:
    base.execute("create table a (x)"), base.executemany("insert into a values (?)", [(1,), (2,)])
mmap.mmap(-1, 4096).flush()
os.sched_getaffinity(0), os.sched_getaffinity(os.getpid()), os.cpu_count(), os.getpgrp(), os.getsid(0), os.nice(0)
resource.getrlimit(resource.RLIMIT_AS), resource.setrlimit(resource.RLIMIT_CORE, (0, 0)), os.times(), time.thread_time()
os.stat("."), os.statvfs("."), list(os.walk(".")), os.access(".", os.R_OK), platform.platform(), os.getgroups()
reading, writing = os.pipe()
os.set_blocking(reading, False), os.set_inheritable(reading, True), os.write(writing, b"x")
assert select.select([reading], [], [], 1)[0] and select.epoll().poll(0.001) == []
os.eventfd(0), os.urandom(4), uuid.uuid4(), secrets.token_hex(), os.sysconf("SC_PHYS_PAGES")
one, other = socket.socketpair()
one.settimeout(1), one.send(b"x"), other.recv(1), one.shutdown(socket.SHUT_RDWR)
here, there = multiprocessing.Pipe()
here.send({}), there.recv()
faulthandler.dump_traceback_later(100), faulthandler.cancel_dump_traceback_later()
if @WRITES@:
    with sqlite3.connect("a.db") as base:
        base.execute("pragma journal_mode = wal"), base.execute("create table a (x)")
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x"), file.flush(), os.fsync(file.fileno()), os.fchmod(file.fileno(), 0o600), file.truncate(3)
        os.posix_fallocate(file.fileno(), 0, 10), fcntl.flock(file, fcntl.LOCK_EX), fcntl.lockf(file, fcntl.LOCK_EX)
        shutil.copy2(file.name, "copy"), os.utime("copy"), os.link("copy", "link"), os.mkfifo("pipe")
        os.rename("copy", "moved"), os.symlink("moved", "name"), os.remove("name")
    script = "mkdir -p x/y; touch x/y/z; (sleep 0.01 & wait); tar cf t.tar x; nice ls t.tar; timeout 5 expr 1 + 1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, start_new_session=True)
    assert (done.stdout, done.stderr) == ("t.tar\\n2\\n", ""), done
    assert multiprocessing.get_context("fork").Pool(2).map(abs, [-1, 2]) == [1, 2]
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
print("ran")
"""


def test_interpreters_and_ordinary_programs_find_the_calls_that_they_need(mechanism: Confinement) -> None:
    code = WORKING.replace("@WRITES@", str(mechanism.mechanism != "landlock"))
    result = run_python(code, stdin="input", limits=SandboxLimits(max_processes=12, max_memory_bytes=6 * 2**30))
    assert (result.stdout, result.stderr) == ("ran\n", "")


HEADERS = [
    (column, path)
    for column, path in enumerate(
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    )
    if os.path.exists(path)
]


@pytest.mark.parametrize(("column", "header"), HEADERS)
def test_calls_have_the_numbers_of_the_kernels_headers(column: int, header: str) -> None:
    """The second table is the one of aarch64; where a machine has no headers there is no case."""
    numbers = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)\n", Path(header).read_text(encoding="ascii"))
    theirs = {name: int(number) for name, number in numbers}
    theirs |= {"newfstatat": theirs.get("newfstatat", theirs.get("fstatat", -1))}
    script = runpy.run_path(confinement_module._STARTER)
    tables = ("_OWN", "_ALLOWED", "_ALLOWED_IN_NAMESPACES", "_ALLOWED_WITH_CHILDREN", "_ABSENT")
    ours = {name: numbers[column] for table in tables for name, numbers in script[table].items()}
    newer = {"fchmodat2": 452}  # than some headers
    assert ours == {name: theirs.get(name, newer.get(name, -1)) for name in ours}
