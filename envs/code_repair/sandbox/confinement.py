"""The mechanism that confines model-written programs on this machine.

`confinement()` runs Python under each mechanism in turn, by the script `confined_start.py`, and takes the first that
works:

- namespaces (as root) or a user namespace: a private root on a bounded tmpfs, no network, other processes invisible;
- Landlock with seccomp, for containers that allow no namespaces: only listed files can be read, no file can be written
  and no process started.

Each drops all capabilities and allows a list of system calls, none of which acts on another program's process or takes
from what the user may have; root becomes another user. Both share this machine's kernel: against code that attacks the
kernel, use gVisor or a virtual machine (`run_sandboxed(wrapper=...)`).
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Mechanism = Literal["namespaces", "user namespace", "landlock", "none"]

_STARTER = str(Path(__file__).with_name("confined_start.py"))
_NOBODY = 65534
_OTHER_USERS = (61184, 65520)  # ids that no distribution assigns (systemd.exec, DynamicUser)
_PROBE_SECONDS = 20.0
_LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_READ = (
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share"),
    *("/usr/local/bin", "/usr/local/lib", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
_HOLDS_ALWAYS = (
    "it reads only its own files, system programs and Python's standard library",
    "no network",
    "no other process can be signalled, traced, limited or read",
    "no capabilities",
)
_HOLDS: Mapping[str, tuple[str, ...]] = {
    "namespaces": (*_HOLDS_ALWAYS, "one bound for all its files", "every process ends with it"),
    "user namespace": (*_HOLDS_ALWAYS, "one bound for all its files", "every process ends with it"),
    "landlock": (*_HOLDS_ALWAYS, "it writes no file and starts no process"),
    "none": (),
}
_LACKS: Mapping[str, tuple[str, ...]] = {
    "namespaces": ("a kernel of its own",),
    "user namespace": ("a kernel of its own",),
    "landlock": ("a kernel of its own", "a private file system: names of files can be asked for"),
    "none": ("it reads and writes every file of this user", "it reaches the network and other processes"),
}


@dataclass(frozen=True, slots=True)
class Confinement:
    """How model-written programs are confined here.

    `is_other_user`: it runs as another user than this process; `reasons` say why better mechanisms do not work.
    """

    mechanism: Mechanism
    is_other_user: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def is_confined(self) -> bool:
        return self.mechanism != "none"

    @property
    def holds(self) -> tuple[str, ...]:
        return (*_HOLDS[self.mechanism], *(("another user",) if self.is_other_user else ()))

    @property
    def lacks(self) -> tuple[str, ...]:
        return _LACKS[self.mechanism]

    def __str__(self) -> str:
        if self.is_confined:
            return f"confined by {self.mechanism}: {'; '.join(self.holds)}. Not held: {'; '.join(self.lacks)}"
        return f"NOT CONFINED: {'; '.join(self.lacks)} ({'; '.join(self.reasons)})"


@functools.cache
def confinement() -> Confinement:
    """Return the best mechanism that works here; takes some tens of ms, once.

    >>> str(confinement()).startswith(("confined by ", "NOT CONFINED: "))
    True
    """
    if sys.platform != "linux":
        return Confinement("none", reasons=(f"Linux is needed, this is {sys.platform}",))
    reasons: list[str] = []
    is_root = os.geteuid() == 0
    for candidate in (
        *((Confinement("namespaces", is_other_user=True),) if is_root else ()),
        Confinement("user namespace"),
        *((Confinement("landlock", is_other_user=True),) if is_root else ()),
        Confinement("landlock"),
    ):
        problem = _problem_of(candidate)
        if problem is None:
            return Confinement(candidate.mechanism, candidate.is_other_user, tuple(reasons))
        reasons.append(f"{candidate.mechanism}: {problem}")
    return Confinement("none", reasons=tuple(reasons))


def interpreter() -> str:
    """Return this interpreter outside of its virtual environment, which a confined program cannot see."""
    return os.path.realpath(sys.executable)


def starting(spec_fd: int, status_fd: int) -> list[str]:
    """Return the command that confines itself by a spec and becomes its program."""
    return [interpreter(), "-I", "-S", "-B", _STARTER, str(spec_fd), str(status_fd)]


def spec_of(
    how: Confinement,
    argv: Sequence[str],
    *,
    folder: str,
    files: Mapping[str, str],
    environment: Mapping[str, str],
    limits: Mapping[str, int],
) -> dict[str, Any]:
    """Return the specification for `confined_start.py`, in plain values.

    `limits` has cpu_seconds, address_bytes, file_bytes, open_files and processes.
    """
    places = _places()
    is_listing = how.mechanism == "landlock"
    return {
        "mechanism": how.mechanism,
        "parent": os.getpid(),
        "argv": list(argv),
        "folder": folder,
        "files": dict(files),
        "environment": dict(environment),
        "limits": dict(limits),
        "user": (user := user_for(how)),
        "other_tasks": _num_tasks_here() if how.mechanism == "landlock" and user is None else 0,
        "read": list(places.listed_read if is_listing else places.read),
        "listed": list(places.listed),
        "hidden": list(places.hidden),
        "links": dict(places.links),
    }


def user_for(how: Confinement) -> int | None:
    """Return the user id that a program takes on, or None; in a user namespace it is valid inside only."""
    if how.mechanism == "user namespace":
        return _NOBODY
    # A random one of many, because the kernel counts some limits by user.
    return _OTHER_USERS[0] + secrets.randbelow(_OTHER_USERS[1] - _OTHER_USERS[0]) if how.is_other_user else None


def _num_tasks_here() -> int:
    """Return the number of all threads of this machine: the kernel counts a program's beside the others of its user."""
    # "0.20 0.18 0.12 1/80 11206": the running threads of 80.
    return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])


@dataclass(frozen=True, slots=True)
class _Places:
    """Paths that a confined program may read.

    `hidden` lies inside `read` and is covered by empty folders. Landlock cannot cover: `listed_read` is `read` without
    the hidden parts, and folders in `listed` can only be listed.
    """

    read: tuple[str, ...]
    hidden: tuple[str, ...]
    links: Mapping[str, str]
    listed_read: tuple[str, ...]
    listed: tuple[str, ...]


@functools.cache
def _places() -> _Places:
    """Return the places of system programs, libraries and this Python; installed packages are hidden."""
    links = {path: os.readlink(path) for path in _LINKED if os.path.islink(path)}
    read = [path for path in (*_READ, *(set(_LINKED) - set(links))) if os.path.exists(path)]
    standard = {os.path.dirname(os.path.realpath(os.__file__))}
    own = {interpreter(), os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, "lib"), *standard}
    read += [path for path in sorted(own) if os.path.exists(path) and not _is_below(path, read)]
    read = [path for path in read if not _is_below(path, [other for other in read if other != path])]
    hidden = {
        str(path)
        for root in ("/usr/lib", "/usr/local/lib", os.path.join(sys.base_prefix, "lib"))
        for kind in ("site-packages", "dist-packages")
        for path in Path(root).glob(f"python*/{kind}")
    }
    keep = standard | {os.path.join(folder, "lib-dynload") for folder in standard}
    hidden |= {path for entry in sys.path if _is_below(path := os.path.realpath(entry), read)} - keep
    hidden = {path for path in hidden if os.path.isdir(path)}
    listed_read: list[str] = []
    listed: list[str] = []
    for path in read:
        _expand(path, hidden, listed_read, listed)
    return _Places(tuple(read), tuple(sorted(hidden)), links, tuple(listed_read), tuple(listed))


def _expand(path: str, hidden: set[str], whole: list[str], listed: list[str]) -> None:
    # Splits a path into parts without hidden places, and the folders around them.
    if path in hidden:
        return
    if not any(_is_below(place, [path]) for place in hidden):
        whole.append(path)
        return
    listed.append(path)
    for name in sorted(os.listdir(path)):
        _expand(os.path.join(path, name), hidden, whole, listed)


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _problem_of(how: Confinement) -> str | None:
    limits = {"cpu_seconds": 5, "address_bytes": 2**28, "file_bytes": 2**20, "open_files": 32, "processes": 1}
    argv = [interpreter(), "-I", "-S", "-B", "-c", "print(6 * 7)"]
    with tempfile.TemporaryDirectory(prefix="gspo_gym_probe_") as folder:
        os.chmod(folder, 0o755)
        inside = folder if how.mechanism == "landlock" else "/sandbox"
        spec = spec_of(how, argv, folder=inside, files={}, environment={}, limits=limits)
        try:
            said, problem = _tried(spec)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{type(error).__name__}: {error}"
    if problem or said != "42\n":
        return ((problem or said).strip() or "Python ended without a word").splitlines()[-1][:200]
    return None


def _tried(spec: Mapping[str, Any]) -> tuple[str, str]:  # the program's output, and the error of a failed confinement
    status_read, status_write = os.pipe()
    with os.fdopen(status_read, "rb") as status, open_spec(spec) as file:
        try:
            done = subprocess.run(
                starting(file.fileno(), status_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(file.fileno(), status_write),
                env={},
                check=False,
                timeout=_PROBE_SECONDS,
            )
        finally:
            os.close(status_write)
        return done.stdout.decode("utf-8", "replace"), status.read().decode("utf-8", "replace")


def open_spec(spec: Mapping[str, Any]) -> Any:
    """Return an open nameless file with the specification, positioned at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(repr(spec).encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file
