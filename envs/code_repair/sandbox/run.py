"""Run model-written programs confined, in a fresh folder, with limits and an empty environment.

`confinement()` says what confines them here; where nothing does, a program is refused unless the caller allows it.
Besides, it gets a session and only the standard streams, and the limits hold for all its processes and files together.
The kernel is shared: against code that attacks it, pass a `wrapper`, which then replaces the confinement:

- docker: ("docker", "run", "--rm", "-i", "--network", "none", "--memory", "512m", "--pids-limit", "32", "--user",
  str(os.getuid()), "-v", "{folder}:{folder}", "-w", "{folder}", "python:3.11-slim", "timeout", "20"). A container
  outlives its killed client, hence the `timeout`; add "--runtime=runsc" (gVisor) where the code may be hostile.
- bwrap, for programs in /usr: ("bwrap", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink",
  "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--bind", "{folder}", "{folder}",
  "--chdir", "{folder}", "--unshare-all", "--die-with-parent")

Safe to call from threads: no Python runs between fork and exec.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO

from gspo_gym_envs.code_repair.sandbox.confinement import (
    Confinement,
    confinement,
    interpreter,
    open_spec,
    spec_of,
    starting,
)

from gspo_gym.base.leftovers import end_with_us, has_ended, stays, temporary_folder
from gspo_gym.errors import ConfigError, EnvError, MissingExtraError

try:
    import resource
except ImportError as _error:
    raise MissingExtraError(
        "running what a model wrote (CodeRepair, and what else uses its sandbox) needs limits on processes, which this "
        "system does not have: use Linux or macOS, on Windows the Windows Subsystem for Linux. Other environments "
        "run here"
    ) from _error

__all__ = ["SandboxLimits", "SandboxResult", "confinement", "require_confinement", "run_python", "run_sandboxed"]

_CHUNK_BYTES = 65_536
_POLL_SECONDS = 0.05  # delay until the end of a program is seen if its children hold its output open
_DRAIN_SECONDS = 0.5  # for the rest in the pipes after everything was killed

_INSIDE = "/sandbox"  # the folder's path in a private root

# A wrapper has a file system of its own, so a shell sets the limits, $1..$6. bash has `ulimit -u`, dash `-p`.
_LAUNCH = (
    'ulimit -c 0; ulimit -t "$1"; ulimit -v "$2"; ulimit -f "$3"; ulimit -n "$4"; '
    '{ ulimit -u "$5" 2>/dev/null || ulimit -p "$5"; } || exit 126; shift 5; "$@"'
)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of a program and all that it starts.

    Attributes:
        max_seconds: wall time; then everything it started is killed.
        max_cpu_seconds: whole seconds of CPU time, for each process.
        max_memory_bytes: memory of all its processes: each gets an equal share of address space, beyond which
            allocations fail. Python alone needs some 20 MB.
        max_file_bytes: size of all its files together, which lie in memory. Under Landlock it can write none;
            unconfined or in a wrapper, this holds for each file.
        max_processes: at one time, threads included. With 1 it can start no process, but some threads; under Landlock
            it is 1.
        max_open_files: descriptors of a process, including the standard three. A pipe or local socket holds up to a
            fifth of a MiB in the kernel, besides `max_memory_bytes`; no program can raise that.
        max_output_bytes: kept of stdout and of stderr each; the rest is dropped.
    """

    max_seconds: float = 10.0
    max_cpu_seconds: int = 5
    max_memory_bytes: int = 512 * 2**20
    max_file_bytes: int = 16 * 2**20
    max_processes: int = 4
    max_open_files: int = 64
    max_output_bytes: int = 65_536

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if not value > 0 or (name != "max_seconds" and not isinstance(value, int)):
                kind = "a number" if name == "max_seconds" else "a whole number"
                raise ConfigError(f"SandboxLimits.{name}: expected {kind} > 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of a program.

    Attributes:
        exit_code: None if it was killed.
        signal: number of the signal that killed it, else None. Exit codes 129 to 192 count as signals, as in shells.
        stdout, stderr: the first `max_output_bytes`, as UTF-8 with replacements.
        timed_out: it was killed at `max_seconds`.
        stdout_truncated, stderr_truncated: there was more output than was kept.
        seconds: wall time from start to end.
    """

    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    timed_out: bool
    stdout_truncated: bool
    stderr_truncated: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether it exited with code 0."""
        return self.exit_code == 0


def run_sandboxed(
    argv: Sequence[str],
    *,
    files: Mapping[str, str],
    stdin: str = "",
    limits: SandboxLimits | None = None,
    wrapper: Sequence[str] = (),
    allow_unconfined: bool = False,
) -> SandboxResult:
    """Run a program in a fresh folder with `files`, wait for its end and remove the folder.

    A `wrapper` is a command put in front, with {folder} replaced by the folder's path, and replaces the confinement.
    With `allow_unconfined` the program runs even if nothing confines it; it can then do all that this user can.

    Raises:
        ConfigError: an empty `argv`, a file name outside the folder, or nothing here confines it.
        EnvError: the program or the wrapper cannot be started.
    """
    limits = limits or SandboxLimits()
    if not argv:
        raise ConfigError("run_sandboxed: expected a program, got an empty argv")
    for name in files:
        if not name or os.path.isabs(name) or os.path.normpath(name).split("/")[0] in ("..", "."):
            raise ConfigError(f"run_sandboxed: expected a file's name inside the folder, got {name!r}")
    how = None if wrapper else require_confinement("run_sandboxed", allow_unconfined=allow_unconfined)
    with _readable(stdin) as stdin_file:
        if how is not None and how.mechanism in ("namespaces", "user namespace"):
            return _run_confined(how, argv, _INSIDE, files, stdin_file, limits)
        folder = Path(temporary_folder("gspo_gym_sandbox_")).resolve()
        try:
            _write(folder, files)
            if how is not None:
                folder.chmod(0o755 if how.is_other_user else 0o700)
                return _run_confined(how, argv, str(folder), {}, stdin_file, limits)
            front = [part.replace("{folder}", str(folder)) for part in wrapper]
            return _run([*front, *_limited(argv, limits)], stdin_file, limits, folder=str(folder))
        finally:
            _remove(folder)
            stays(folder)


def run_python(
    code: str,
    *,
    files: Mapping[str, str] | None = None,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    wrapper: Sequence[str] = (),
    python: str | None = None,
    allow_unconfined: bool = False,
) -> SandboxResult:
    r"""Run a Python program with the standard library and the modules among `files`, without site-packages.

    `code` is the text of main.py; `python` the interpreter, None for this one. The rest is as in `run_sandboxed`.

    >>> run_python("print(6 * 7)").stdout
    '42\n'
    """
    return run_sandboxed(
        (python or interpreter(), "-E", "-s", "-S", "-B", "-X", "utf8", "main.py"),
        files={**(files or {}), "main.py": code},
        stdin=stdin,
        limits=limits,
        wrapper=wrapper,
        allow_unconfined=allow_unconfined,
    )


def require_confinement(who: str, *, allow_unconfined: bool) -> Confinement:
    """Return the confinement of programs here, or raise a ConfigError without one, which names the caller."""
    how = confinement()
    if not (how.is_confined or allow_unconfined):
        raise ConfigError(
            f"{who}: code that a model wrote would run {how}. Allow user namespaces or Landlock on this machine (in a "
            "container: a seccomp profile that lets `unshare` or `landlock_restrict_self` pass), give a `wrapper` such "
            "as a container, or set allow_unconfined = true if nothing on this machine is worth protecting"
        )
    return how


def _readable(text: str) -> IO[bytes]:
    """Return an open nameless file with `text` that cannot be written through its descriptor."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(text.encode("utf-8", "surrogateescape"))
        file.flush()
        return open(file.name, "rb")


def _limited(argv: Sequence[str], limits: SandboxLimits) -> list[str]:
    numbers = (
        _allowed(limits.max_cpu_seconds, resource.RLIMIT_CPU),
        max(1, _allowed(limits.max_memory_bytes, resource.RLIMIT_AS) // 1024),
        max(1, _allowed(limits.max_file_bytes, resource.RLIMIT_FSIZE) // 512),
        _allowed(limits.max_open_files, resource.RLIMIT_NOFILE),
        _allowed(limits.max_processes + 1, resource.RLIMIT_NPROC),  # the shell is one
    )
    return ["/bin/sh", "-c", _LAUNCH, "sh", *map(str, numbers), *argv]


def _allowed(wanted: int, kind: int) -> int:
    # A hard limit cannot be raised, and a shell that fails to would look like the program's failure.
    hardest = resource.getrlimit(kind)[1]
    return wanted if hardest == resource.RLIM_INFINITY else min(wanted, hardest)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")


def _run_confined(
    how: Confinement,
    argv: Sequence[str],
    folder: str,
    files: Mapping[str, str],
    stdin: IO[bytes],
    limits: SandboxLimits,
) -> SandboxResult:
    num_processes = 1 if how.mechanism == "landlock" else limits.max_processes
    numbers = {
        "cpu_seconds": limits.max_cpu_seconds,
        "address_bytes": limits.max_memory_bytes // num_processes,
        "file_bytes": limits.max_file_bytes,
        "open_files": limits.max_open_files,
        "processes": num_processes,
    }
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    spec = spec_of(how, argv, folder=folder, files=files, environment=environment, limits=numbers)
    status_read, status_write = os.pipe()
    with os.fdopen(status_read, "rb") as status:
        try:
            with open_spec(spec) as file:
                result = _run(
                    starting(file.fileno(), status_write), stdin, limits, passed=(file.fileno(), status_write)
                )
        finally:
            os.close(status_write)
        os.set_blocking(status_read, False)  # an escaped process may hold the other end
        problem = status.read() or b""
    if problem:
        text = problem.decode("utf-8", "replace")
        raise EnvError(f"run_sandboxed: the confinement by {how.mechanism} failed: {text}")
    return result


def _run(
    argv: Sequence[str],
    stdin: IO[bytes],
    limits: SandboxLimits,
    *,
    folder: str = "/",
    passed: tuple[int, ...] = (),
) -> SandboxResult:
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            pass_fds=passed,
            start_new_session=True,
            umask=0o077,
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        raise EnvError(f"run_sandboxed: cannot start {argv[0]!r}: {error}") from error
    if not passed:  # what we confine ends with this process by itself
        end_with_us(process.pid, is_group=True)
    deadline = started + limits.max_seconds
    with process:
        try:
            stdout, stderr, timed_out = _read(process, deadline, limits.max_output_bytes)
        finally:
            _kill(process)
            has_ended(process.pid, is_group=True)
    seconds = time.monotonic() - started
    code = process.returncode
    ended_by = -code if code < 0 else code - 128 if 128 < code <= 192 else None
    return SandboxResult(
        exit_code=None if ended_by or timed_out else code,
        signal=signal.SIGKILL if timed_out else ended_by,
        stdout=stdout.kept.decode("utf-8", "replace"),
        stderr=stderr.kept.decode("utf-8", "replace"),
        timed_out=timed_out,
        stdout_truncated=stdout.is_truncated,
        stderr_truncated=stderr.is_truncated,
        seconds=seconds,
    )


@dataclass(slots=True)
class _Output:
    max_bytes: int
    kept: bytearray = field(default_factory=bytearray)
    is_truncated: bool = False

    def take(self, chunk: bytes) -> None:
        room = self.max_bytes - len(self.kept)
        self.kept += chunk[:room]
        self.is_truncated |= len(chunk) > room


def _read(process: subprocess.Popen[bytes], deadline: float, max_bytes: int) -> tuple[_Output, _Output, bool]:
    # The last: whether the deadline passed. When the program ends, all that it started is killed.
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = _Output(max_bytes), _Output(max_bytes)
    timed_out = has_ended = False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout.fileno(), selectors.EVENT_READ, stdout)
        selector.register(process.stderr.fileno(), selectors.EVENT_READ, stderr)
        while selector.get_map() and (not has_ended or time.monotonic() < deadline):
            _read_some(selector, min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            if not has_ended and (_is_dead(process) or time.monotonic() >= deadline):
                timed_out = not _is_dead(process)
                has_ended = True
                deadline = time.monotonic() + _DRAIN_SECONDS
                _kill_group(process)
    if not has_ended:  # it closed its output before its end
        timed_out = not _ends_before(process, deadline)
    return stdout, stderr, timed_out


def _read_some(selector: selectors.BaseSelector, seconds: float) -> None:
    for key, _ in selector.select(seconds):
        chunk = os.read(key.fd, _CHUNK_BYTES)
        if chunk:
            key.data.take(chunk)
        else:
            selector.unregister(key.fd)


def _is_dead(process: subprocess.Popen[bytes]) -> bool:
    # It is left a zombie: its group id stays taken until the group is killed.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ends_before(process: subprocess.Popen[bytes], deadline: float) -> bool:
    pause = 0.0005  # it has closed its output, so it usually ends at once
    while not _is_dead(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:  # and with a process namespace all that it started
    if process.returncode is None:
        _kill_group(process)
        process.wait()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _remove(folder: Path) -> None:  # also read-only parts, and those nested too deep for Python
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX", str(folder)], ["rm", "-rf", str(folder)]):
            subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False)
