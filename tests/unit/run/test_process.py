"""The lock of a run's folder: one live process, found out by others, taken over after its death."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from contextlib import contextmanager

import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.run.process import PROCESS_FILE, ProcessInfo, holder_of, holding, read_process, start_of

HOLD = """
import sys
from pathlib import Path
from gspo_gym.run.process import holding

with holding(Path(sys.argv[1]), print, has_begun=True):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder):
    """A process that holds the folder until it is killed, or its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_held_folder_names_its_process_to_others_and_refuses_them(tmp_path):
    assert holder_of(tmp_path) is None
    with holder(tmp_path) as process:
        info = holder_of(tmp_path)
        assert (info.pid, info.pid_started) == (process.pid, start_of(process.pid))
        with (
            pytest.raises(ConfigError, match=rf"already holds a run: process {process.pid} on .* \(attempt 1, started"),
            holding(tmp_path, print, has_begun=True),
        ):
            pass
        process.communicate()  # its input ends
    assert holder_of(tmp_path) is None
    assert read_process(tmp_path).ended is not None


def test_the_folder_of_a_killed_process_is_taken_over_with_a_sentence(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
    assert holder_of(tmp_path) is None
    told = []
    with holding(tmp_path, told.append, has_begun=True):
        assert holder_of(tmp_path).pid == os.getpid()
        assert holder_of(tmp_path).attempt == 2
    with holding(tmp_path, told.append, has_begun=True):
        pass  # the one before has ended, which is nothing to tell
    assert len(told) == 1
    assert f"process {process.pid} on {platform.node()} (attempt 1" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [PROCESS_FILE]


def test_a_pid_that_another_process_has_by_now_holds_nothing(tmp_path):
    with holding(tmp_path, print, has_begun=True):
        written = read_process(tmp_path)
    left = dataclasses.replace(written, ended=None, pid=os.getppid())  # as a kill leaves it
    (tmp_path / PROCESS_FILE).write_text(json.dumps(dataclasses.asdict(left)))
    assert holder_of(tmp_path) is None


def test_a_process_of_another_machine_is_named_and_not_guessed_dead(tmp_path):
    far = ProcessInfo(7, 7, "far", boot_id="other", has_begun=True)
    (tmp_path / PROCESS_FILE).write_text(json.dumps(dataclasses.asdict(far)))
    assert holder_of(tmp_path) == far
    assert far.is_elsewhere
    refused = f"process 7 on far .* cannot see whether .* remove {tmp_path}/process.json"
    with pytest.raises(ConfigError, match=refused), holding(tmp_path, print, has_begun=True):
        pass
    # this machine after a restart, and another container of this machine: the lock says that both are dead
    for near in (dataclasses.replace(far, host=platform.node()), dataclasses.replace(read_own(tmp_path), host="pod")):
        (tmp_path / PROCESS_FILE).write_text(json.dumps(dataclasses.asdict(near)))
        assert holder_of(tmp_path) is None


def read_own(folder):
    (folder / PROCESS_FILE).unlink()
    with holding(folder, print, has_begun=True):
        return read_process(folder)


def test_a_forked_child_does_not_hold_the_lock_after_its_parents_death(tmp_path):
    code = HOLD.replace('print("held"', 'os.fork() or print("held"').replace("sys.stdin.read()", "time.sleep(60)")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", "import os, time" + code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        process.stdout.readline()
        try:
            process.kill()
            process.wait()
            assert holder_of(tmp_path) is None
        finally:
            os.killpg(process.pid, 9)
