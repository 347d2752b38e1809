"""The lock of a run's folder: one live process, found out by others, taken over after its death."""

import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import programs
import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.run.process import LOCK_FILE, PROCESS_FILE, ProcessInfo, holder_of, holding, read_process, start_of
from gspo_gym.run.registry import read_run

HOLD = """
import sys
from pathlib import Path
from gspo_gym.run.process import holding

with holding(Path(sys.argv[1]), print, has_begun=True, beat_seconds=float(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""
BEAT_SECONDS = 0.05


@contextmanager
def holder(folder, beat_seconds=BEAT_SECONDS):
    """A process that holds the folder until it is killed, or its input ends."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", HOLD, str(folder), str(beat_seconds)]
    with programs.Popen(command, text=True, **pipes) as process:
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


def mounted(folder, kind, options):
    """A list of file systems, of which one of this kind holds the folder, at a name with a space."""
    point = str(folder).replace(" ", "\\040")
    lines = ["1 0 0:1 / / rw - ext4 /dev/sda rw", f"2 1 0:2 / {point} rw - {kind} x {options}"]
    (listing := folder.parent / "mountinfo").write_text("\n".join([*lines, "3 1 0:3 / /elsewhere rw - tmpfs x rw", ""]))
    return listing


def far_from(folder, **changes):
    """As if the process that wrote it ran on another machine."""
    moved = dataclasses.replace(read_process(folder), host="far", boot_id="other", ended=None, **changes)
    (folder / PROCESS_FILE).write_text(json.dumps(dataclasses.asdict(moved)))
    return moved


@pytest.mark.parametrize(
    ("kind", "options", "is_seen"),
    [
        ("ext4", "rw", True),
        ("nfs4", "rw,vers=4.2,local_lock=none,addr=10.0.0.1", True),
        ("nfs", "rw,nolock,local_lock=all", False),
        ("nfs", "rw,local_lock=flock", False),
        ("lustre", "rw,flock,user_xattr", True),
        ("lustre", "rw,localflock", False),
        ("ceph", "rw,relatime,name=admin", True),
        ("fuse.sshfs", "rw", False),
    ],
)
def test_a_requeued_run_takes_the_place_of_another_machines_dead_process(tmp_path, kind, options, is_seen):
    """Its lock says at once that it is dead if both machines see it; else 18 beats without a sign of life do."""
    (folder := tmp_path / "a run").mkdir()
    mounts, told = mounted(folder, kind, options), []
    for number in (1, 2):
        if number == 2:
            far = far_from(folder)
            assert holder_of(folder, mounts=mounts) == (None if is_seen else far)
        began = time.monotonic()
        with holding(folder, told.append, has_begun=True, mounts=mounts, beat_seconds=BEAT_SECONDS):
            assert read_process(folder).attempt == number
            assert read_process(folder).file_system == kind
    assert is_seen or time.monotonic() - began >= 18 * BEAT_SECONDS
    assert [far.host in text for text in told] == [True] * (1 + (not is_seen))  # that it waits, and whose place it took
    # A disk that the other machine sees in another way: it, or this one, serves it to the other.
    assert holder_of(folder, mounts=mounted(folder, "xfs", "rw")) is None  # it has ended
    far_from(folder, file_system="nfs4")
    assert holder_of(folder, mounts=mounted(folder, "xfs", "rw")) is not None


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_live_process_of_another_machine_keeps_its_run(tmp_path, kind):
    mounts = mounted(tmp_path, kind, "local_lock=none")
    with holder(tmp_path, beat_seconds=1.0) as process:
        far_from(tmp_path, file_system=kind)
        (tmp_path / "config.toml").touch()
        assert read_run(tmp_path).status == "running"  # the lock is held
        with (
            pytest.raises(ConfigError, match=rf"process {process.pid} on far .* is at work on it"),
            holding(tmp_path, print, has_begun=True, mounts=mounts),
        ):
            pass
        # The lock of a machine that died goes late: here when the wait begins.
        far_from(tmp_path, file_system=kind, beat_seconds=BEAT_SECONDS)
        process.send_signal(signal.SIGSTOP)
        with holding(tmp_path, lambda _: process.kill(), has_begun=True, mounts=mounts):
            assert read_process(tmp_path).attempt == 2


def test_a_process_on_a_disk_that_keeps_no_times_is_not_taken_for_dead(tmp_path, monkeypatch):
    def refuse(*_arguments, **_options):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)  # as an object store that is mounted as files
    mounts = mounted(tmp_path, "fuse.gcsfuse", "rw")
    with holding(tmp_path, print, has_begun=True, mounts=mounts):
        assert read_process(tmp_path).beat_seconds is None
    far_from(tmp_path)
    with (
        pytest.raises(ConfigError, match="cannot see whether"),
        holding(tmp_path, print, has_begun=True, mounts=mounts),
    ):
        pass


@pytest.mark.parametrize("damage", [{"attempt": "1"}, {"started": None}, {"pid": []}, {"beat_seconds": "10"}])
def test_a_damaged_process_file_names_no_process_and_the_lock_decides(tmp_path, damage):
    with holder(tmp_path) as process:
        info = dataclasses.asdict(read_process(tmp_path))
        (tmp_path / PROCESS_FILE).write_text(json.dumps(info | damage | {"host": "far", "boot_id": "other"}))
        assert holder_of(tmp_path) == ProcessInfo()  # its lock is held
        process.kill()
        process.wait()
    assert holder_of(tmp_path) is None


def test_a_process_whose_place_was_taken_while_it_was_suspended_leaves_without_writing(tmp_path):
    with holder(tmp_path) as process:
        taken = far_from(tmp_path, pid=9, attempt=2)
        assert process.wait(timeout=60) == 1
        told = process.stderr.read()
    assert told == f"{tmp_path} was taken over by {taken}; left without saving\n"
    assert read_process(tmp_path) == taken


def test_a_process_that_ends_leaves_the_lock_of_another_machines_that_took_its_place(tmp_path):
    with holding(tmp_path, print, has_begun=True, beat_seconds=3600.0):  # a beat would find that out, and end pytest
        taken = far_from(tmp_path, pid=9, attempt=2)
        held = (tmp_path / LOCK_FILE).stat()
    assert (tmp_path / LOCK_FILE).stat().st_ino == held.st_ino
    assert read_process(tmp_path) == taken


def read_own(folder):
    (folder / PROCESS_FILE).unlink()
    with holding(folder, print, has_begun=True):
        return read_process(folder)


def test_a_forked_child_does_not_hold_the_lock_after_its_parents_death(tmp_path):
    code = HOLD.replace('print("held"', 'os.fork() or print("held"').replace("sys.stdin.read()", "time.sleep(60)")
    with programs.Popen(
        [sys.executable, "-W", "ignore", "-c", "import os, time" + code, str(tmp_path), "10"],
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
