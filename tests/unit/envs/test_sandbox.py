"""The sandbox against real offenders: each limit, what is not inherited, and what is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gspo_gym_envs.code_repair.sandbox.run import SandboxLimits, run_python, run_sandboxed

from gspo_gym.errors import ConfigError, EnvError

SMALL = SandboxLimits(
    max_seconds=10.0,
    max_cpu_seconds=1,
    max_file_bytes=2**20,
    max_processes=8,
    max_output_bytes=1_000,
    max_open_files=32,
)
ENDLESS_IN_C = "sum(iter(int, 1))"  # one call that never returns to the interpreter's loop


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sandboxes are made here, and none is left at the end of any test; others may enter it, unlike pytest's own."""
    del tmp_path  # asked for, so that pytest's own is made before the patch
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    folder.rmdir()  # fails if anything is left


def test_a_program_reads_its_input_and_files_and_its_answer_comes_back() -> None:
    code = "import sys, sibling; print(sibling.x + open('data/a.txt').read() + sys.stdin.read()); sys.exit(3)"
    result = run_python(code, files={"sibling.py": "x = 'é'", "data/a.txt": "b\r\n"}, stdin="c\ud800"[:1], limits=SMALL)
    assert (result.exit_code, result.signal, result.stdout, result.stderr) == (3, None, "éb\nc\n", "")
    assert (result.ok, result.timed_out, result.stdout_truncated, result.stderr_truncated) == (False,) * 4


def test_large_input_that_nobody_reads_blocks_nothing() -> None:
    # More than a pipe holds (64 KiB), to a program that ends at once.
    assert run_python("print('done')", stdin="x" * 1_000_000, limits=SMALL).stdout == "done\n"
    assert run_python("import sys; print(len(sys.stdin.read()))", stdin="x" * 1_000_000).stdout == "1000000\n"


def test_an_endless_loop_in_c_is_stopped_by_the_count_of_cpu_seconds() -> None:
    result = run_python(ENDLESS_IN_C, limits=SMALL)
    assert (result.exit_code, result.signal, result.timed_out) == (None, 9, False)


def test_a_sleeper_is_stopped_by_the_clock_with_what_it_said_kept() -> None:
    result = run_python(
        "import time; print('going', flush=True); time.sleep(60)", limits=SandboxLimits(max_seconds=2.0)
    )
    assert (result.stdout, result.exit_code, result.signal, result.timed_out) == ("going\n", None, 9, True)
    assert result.seconds >= 2.0


def test_closing_the_output_does_not_outlive_the_clock() -> None:
    result = run_python(
        "import os, time; os.close(1); os.close(2); time.sleep(60)", limits=SandboxLimits(max_seconds=0.3)
    )
    assert result.timed_out


def test_memory_beyond_the_limit_is_refused_inside_the_program() -> None:
    code = "try:\n    bytearray(200 * 2**20)\nexcept MemoryError:\n    print('refused')"
    assert run_python(code, limits=SandboxLimits(max_memory_bytes=128 * 2**20)).stdout == "refused\n"
    assert run_python(code, limits=SandboxLimits(max_memory_bytes=1024 * 2**20)).stdout == ""


def test_a_file_beyond_the_limit_is_refused() -> None:
    code = "try:\n    open('a', 'w').write('x' * 2**22)\nexcept OSError as e:\n    print(e)"
    assert "File too large" in run_python(code, limits=SMALL).stdout


def test_many_files_share_one_bound() -> None:
    code = (
        "import os\ntotal = 0\ntry:\n    for i in range(400):\n"
        "        for folder in ('.', '/tmp', '/dev/shm'):\n"
        "            with open(f'{folder}/{i}', 'wb', 0) as file:\n"
        "                total += file.write(bytes(2**16))\nexcept OSError as e:\n    print(e.strerror, total)"
    )
    *words, total = run_python(code, limits=SMALL).stdout.split()
    assert " ".join(words) == "No space left on device"
    assert int(total) <= 2**20 + 2**19  # the limit and what the system keeps for its own; asked for: 75 MiB


def test_descriptors_beyond_the_limit_are_refused() -> None:
    code = (
        "kept = []\ntry:\n    while True:\n        kept.append(open('main.py'))\nexcept OSError:\n    print(len(kept))"
    )
    assert int(run_python(code, limits=SMALL).stdout) <= 32 - 3  # three are the standard streams


BUFFERS = """
import asyncio, fcntl, os, socket
from multiprocessing.connection import Listener

def fill(descriptor):
    os.set_blocking(descriptor, False)
    written = 0
    try:
        while True:
            written += os.write(descriptor, bytes(2**16))
    except BlockingIOError:
        return written

def grown(grow, *arguments):
    try:
        grow(*arguments)
    except PermissionError:
        return

total, kept = {"sockets": 0, "pipes": 0}, []
try:
    while True:
        pair = socket.socketpair()
        kept.append(pair)
        for end in pair:
            grown(end.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24)
            grown(end.setsockopt, socket.SOL_SOCKET, 32, 2**24)
            total["sockets"] += fill(end.fileno())
except OSError:
    for pair in kept:
        for end in pair:
            end.close()
try:
    while True:
        reading, writing = os.pipe()
        grown(fcntl.fcntl, writing, 1031, 2**20)
        total["pipes"] += fill(writing)
except OSError:
    os.closerange(3, 64)
print(total["sockets"], total["pipes"])
Listener("here", family="AF_UNIX").close()  # sets another option of its socket
print(asyncio.run(asyncio.sleep(0, "ran")))  # which makes a pair of sockets
"""


def test_buffers_in_the_kernel_are_bounded_and_ordinary_sockets_and_pipes_work() -> None:
    """At most 61 descriptors; a socket takes what the system sets, and half of that at once more; a pipe 64 KiB."""
    result = run_python(BUFFERS)
    sockets, pipes, ran = result.stdout.split()
    assert int(sockets) <= 61 * 1.5 * int(Path("/proc/sys/net/core/wmem_default").read_text())
    assert int(pipes) <= 61 / 2 * 2**16
    assert ran == "ran"


def test_a_fork_bomb_is_bounded_and_nothing_of_it_is_left() -> None:
    bomb = "i=0; while [ $i -lt 200 ]; do sleep 60.0625 & i=$((i+1)); done; echo all $i"
    result = run_sandboxed(["sh", "-c", bomb], files={}, limits=SandboxLimits(max_seconds=5.0, max_processes=8))
    assert "all" not in result.stdout
    assert "fork" in result.stderr  # "Cannot fork", "fork: retry: ..."
    assert processes_called("60.0625") == []


def processes_called(mark: str) -> list[str]:
    """Command lines of this machine's processes that contain the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
        except OSError:
            continue  # ended
        if mark in command and "pytest" not in command:
            found.append(command)
    return found


@pytest.mark.parametrize("keeps_output_open", [True, False])
def test_children_left_behind_are_killed(keeps_output_open: bool) -> None:
    close = "" if keeps_output_open else "os.close(1); os.close(2); "
    code = f"import os\nif os.fork() == 0:\n    {close}os.execv('/bin/sleep', ['sleep', '60.125'])\n"
    result = run_python(code, limits=SMALL)
    assert (result.exit_code, result.timed_out) == (0, False)  # not waited for until the clock's limit
    assert processes_called("60.125") == []


def test_a_child_with_a_session_of_its_own_is_killed_where_there_are_process_namespaces() -> None:
    code = "import os\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['sleep', '60.25'])\n"
    result = run_python(code, limits=SMALL)
    assert (result.exit_code, result.timed_out) == (0, False)
    wait_until(lambda: processes_called("60.25") == [])


@pytest.mark.slow
def test_endless_output_is_kept_up_to_its_limit_only() -> None:
    code = "import sys\nwhile True:\n    sys.stdout.write('o' * 9999)\n    sys.stderr.write('e' * 9999)"
    result = run_python(code, limits=SMALL)
    assert (result.stdout, result.stderr) == ("o" * 1_000, "e" * 1_000)
    assert (result.stdout_truncated, result.stderr_truncated) == (True, True)


def test_output_of_exactly_the_limit_is_not_truncated_and_broken_utf8_is_replaced() -> None:
    result = run_python("import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * 999)", limits=SMALL)
    assert (result.stdout, result.stdout_truncated) == ("\ufffd" + "x" * 999, False)


def test_secrets_in_variables_are_not_inherited_nor_found_in_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2-in-a-variable")
    code = "import os; print(sorted(os.environ)); print(os.environ.get('SECRET_KEY'))"
    assert run_python(code).stdout == "['HOME', 'LANG', 'PATH', 'TMPDIR']\nNone\n"
    seen = run_python("import os\ntry:\n    print(os.listdir('/proc'))\nexcept OSError:\n    print('nothing')").stdout
    assert seen == "nothing\n"  # what we were started with is in /proc/<pid>/environ


def test_open_descriptors_are_not_inherited(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    descriptor = os.open(secret, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        code = f"import os\ntry:\n    print(os.read({descriptor}, 9))\nexcept OSError as error:\n    print(error.errno)"
        assert run_python(code).stdout == "9\n"  # EBADF
    finally:
        os.close(descriptor)


def test_the_network_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}), 2)"
        code = f"import socket\ntry:\n    {connect}\n    print('reached')\nexcept OSError:\n    print('gone')"
        assert run_python(code).stdout == "gone\n"


def test_read_only_deep_and_linked_leftovers_are_removed_and_links_not_followed(
    own_temporary_folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    code = (
        "import os\n"
        "os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0o500); os.chmod('a', 0)\n"
        f"os.symlink({str(outside)!r}, 'link')\n"
        "for _ in range(1100):\n    os.mkdir('d'); os.chdir('d')\n"
        "print('made')"
    )
    assert run_python(code).stdout == "made\n"
    assert list(own_temporary_folder.iterdir()) == []
    assert (outside / "kept").read_text() == "kept"


def test_a_crash_is_told_by_its_signal() -> None:
    assert run_python("import os; os.abort()").signal == 6
    assert run_python("import os; os.kill(os.getpid(), 15)").signal == 15


def test_a_wrapper_goes_in_front_and_learns_the_folder() -> None:
    result = run_sandboxed(
        ["/bin/cat", "a.txt"],
        files={"a.txt": "inside"},
        wrapper=["/bin/sh", "-c", 'echo "wrapped in $1"; shift; "$@"', "sh", "{folder}"],
    )
    folder, said = result.stdout.removeprefix("wrapped in ").split("\n")
    assert Path(folder).name.startswith("gspo_gym_sandbox_")
    assert said == "inside"


def test_many_threads_may_run_programs_at_the_same_time() -> None:
    said: dict[int, str] = {}

    def run(number: int) -> None:
        said[number] = run_python(f"print({number})").stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {number: f"{number}\n" for number in range(12)}


def test_programs_die_with_us() -> None:
    run = "from gspo_gym_envs.code_repair.sandbox import run\nrun.run_sandboxed(['sleep', '6' + '0.5'], files={})"
    with subprocess.Popen([sys.executable, "-c", run]) as parent:
        wait_until(lambda: processes_called("60.5") != [])
        parent.kill()
    wait_until(lambda: processes_called("60.5") == [])


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns when it holds; fails after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_limits_above_our_own_are_lowered_and_the_program_still_runs() -> None:
    lowered = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    run = "from gspo_gym_envs.code_repair.sandbox.run import run_python\nprint(run_python('print(42)'))"
    finished = subprocess.run([sys.executable, "-c", lowered + run], capture_output=True, text=True, check=True)
    assert "exit_code=0, signal=None, stdout='42\\n'" in finished.stdout


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", ""])
def test_files_outside_the_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="inside the folder"):
        run_sandboxed(["true"], files={name: "x"})


def test_what_cannot_be_started_is_an_error_and_not_a_result() -> None:
    with pytest.raises(ConfigError, match="empty argv"):
        run_sandboxed([], files={})
    with pytest.raises(EnvError, match="cannot start"):
        run_sandboxed(["true"], files={}, wrapper=["/no/such/container"])
    assert run_sandboxed(["no-such-program"], files={}).exit_code == 127  # the shell's word for it


@pytest.mark.parametrize("setting", [{"max_seconds": 0}, {"max_cpu_seconds": 1.5}, {"max_processes": -1}])
def test_impossible_limits_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}: expected a .*number > 0"):
        SandboxLimits(**setting)  # type: ignore[arg-type]
