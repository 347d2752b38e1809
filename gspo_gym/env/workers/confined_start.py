"""Script that confines itself and then becomes the program of a sandbox: `python confined_start.py SPEC STATUS`.

SPEC is a descriptor with a Python literal (`confinement.spec_of`); STATUS is a pipe that gets one line if the
confinement fails, and closes silently when the program starts. Linux and the standard library only: no module imports
this file, and each import costs every run some ms.

With namespaces, the program's root is an empty tmpfs of bounded size with read-only binds of what it needs, and its
first process ends everything with it. Without them, Landlock lets it write and start nothing. seccomp refuses what such
programs do not need, in both cases.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

TYPE_CHECKING = False  # importing typing for it costs 5 ms
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

    Spec = Mapping[str, Any]

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_RECURSIVE, _AT_FDCWD = 2, 0x8000, -100
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS, _CAP_AMBIENT = 1, 4, 22, 24, 38, 47
_NUM_CAPABILITIES = 64  # more than exist
_OLD = "/.old"
_MAX_THREADS = 32  # of an only process; with several, the kernel counts threads and processes alike


def main() -> None:
    """Read the specification, confine this process and run the program."""
    spec_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status_fd, False)
    os.umask(0o022)
    try:
        with os.fdopen(spec_fd, encoding="utf-8", errors="surrogatepass") as file:
            spec = eval(file.read(), {"__builtins__": {}})  # a literal that our own process wrote
        _die_with(os.getppid() if spec["parent"] is None else spec["parent"])
        if spec["mechanism"] in ("namespaces", "user namespace"):
            _run_in_namespaces(spec, status_fd)
        if spec["mechanism"] == "landlock":
            _drop_rights(spec)
            _restrict_files(spec)
        _become_program(spec, is_bounded=spec["mechanism"] == "landlock")
    except BaseException as error:
        os.write(status_fd, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000])
        os._exit(125)


def _die_with(parent: int) -> None:
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the signal was set
        os._exit(125)


# -- namespaces --------------------------------------------------------------------------------------------------------


def _run_in_namespaces(spec: Spec, status_fd: int) -> NoReturn:
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    user, group = os.geteuid(), os.getegid()
    _checked("unshare", _LIBC.unshare(flags | (_NEWUSER if spec["mechanism"] == "user namespace" else 0)))
    if spec["mechanism"] == "user namespace":
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{spec['user']} {user} 1")
        _write("/proc/self/gid_map", f"{spec['user']} {group} 1")
    life, held = os.pipe()
    first = os.fork()
    if first:
        os.close(status_fd)
        _end_as(os.waitpid(first, 0)[1])
    os.close(held)
    _build_root(spec)
    _drop_rights(spec)
    _prctl(_PDEATHSIG, signal.SIGKILL)  # again: it does not outlive a change of user
    os.set_blocking(life, False)
    try:
        os.read(life, 1)
        os._exit(125)  # the end of the pipe: the process outside is gone
    except BlockingIOError:
        pass
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace is immune to what has no handler
    program = os.fork()
    if program == 0:
        _become_program(spec, is_bounded=True)
    for descriptor in (0, 1, 2, status_fd):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            _end_as(status)  # the kernel ends whatever else there is in the namespace


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _build_root(spec: Spec) -> None:  # empty and bounded, with the needed paths bound into it
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    size = spec["limits"]["file_bytes"] + sum(len(text) + 8192 for text in spec["files"].values()) + 2**18
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes=8192,mode=755")
    os.mkdir("/tmp" + _OLD)
    _checked("pivot_root", _LIBC.syscall(_NUMBERS["pivot_root"], b"/tmp", ("/tmp" + _OLD).encode()))
    os.chdir("/")
    for name, target in spec["links"].items():
        os.makedirs(os.path.dirname(name), exist_ok=True)
        os.symlink(target, name)
    for path in spec["read"]:
        _bind(path, flags=_MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        _bind(path, flags=_MS_NOSUID)
    for path in spec["hidden"]:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k,mode=755")
    for path in ("/tmp", "/dev/shm"):  # part of the root: one bound holds for all
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o1777)
    _write_files(spec)
    _checked("umount2", _LIBC.umount2(_OLD.encode(), _MNT_DETACH))
    os.rmdir(_OLD)


def _bind(path: str, *, flags: int) -> None:
    source = _OLD + path
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, path, None, _MS_BIND | _MS_REC)
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    number = _NUMBERS["mount_setattr"]
    code = _LIBC.syscall(number, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes))
    _checked(f"mount_setattr {path}", code)


def _write_files(spec: Spec) -> None:
    user = spec["user"] if spec["mechanism"] == "namespaces" else -1
    folder = spec["folder"]
    os.mkdir(folder, 0o700)
    for name, text in spec["files"].items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
    for root, folders, files in os.walk(folder):
        for path in (root, *(os.path.join(root, name) for name in (*folders, *files))):
            os.chown(path, user, user)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    code = _LIBC.mount(*texts, ctypes.c_ulong(flags), None if data is None else data.encode())
    _checked(f"mount {target}", code)


# -- rights ------------------------------------------------------------------------------------------------------------


def _drop_rights(spec: Spec) -> None:
    for capability in range(_NUM_CAPABILITIES):
        _LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # fails for what does not exist, and without the right to
    if os.geteuid() == 0 and spec["user"] is not None:
        os.setgroups([])
        os.setresgid(spec["user"], spec["user"], spec["user"])
        os.setresuid(spec["user"], spec["user"], spec["user"])
    _LIBC.prctl(_CAP_AMBIENT, 4, 0, 0, 0)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked("capset", _LIBC.capset(header, nothing))
    _prctl(_NO_NEW_PRIVS, 1)
    _prctl(_DUMPABLE, 0)


def _restrict_files(spec: Spec) -> None:
    # Connections and signals to others are forbidden, too, if the kernel can.
    version = _LIBC.syscall(_NUMBERS["landlock_create_ruleset"], None, ctypes.c_size_t(0), 1)
    _checked("landlock", version)
    rights = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    attributes = struct.pack("QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    number = _NUMBERS["landlock_create_ruleset"]
    ruleset = _checked("landlock_create_ruleset", _LIBC.syscall(number, attributes, ctypes.c_size_t(size), 0))
    read, list_folder = 1 | 4, 8  # execute, read a file
    for path in (*spec["read"], spec["folder"]):
        _allow(ruleset, path, read | list_folder)
    for path in spec["listed"]:
        _allow(ruleset, path, list_folder)
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        _allow(ruleset, path, 2 | 4)
    _prctl(_NO_NEW_PRIVS, 1)
    _checked("landlock_restrict_self", _LIBC.syscall(_NUMBERS["landlock_restrict_self"], ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there, or not to be seen: then it cannot be read either
    if not os.path.isdir(path):
        rights &= 1 | 2 | 4
    rule = struct.pack("=Qi", rights, descriptor)
    _checked(f"landlock {path}", _LIBC.syscall(_NUMBERS["landlock_add_rule"], ruleset, 1, rule, 0))
    os.close(descriptor)


def _become_program(spec: Spec, *, is_bounded: bool) -> NoReturn:
    limits = spec["limits"]
    os.umask(0o077)
    os.chdir(spec["folder"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, limits["cpu_seconds"])
    _limit(resource.RLIMIT_AS, limits["address_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    if spec["mechanism"] != "landlock" or spec["user"] is not None:  # else it is seccomp that counts, not the user
        _limit(resource.RLIMIT_NPROC, 2 + limits["processes"] + (_MAX_THREADS if limits["processes"] == 1 else 0))
    if is_bounded:
        _refuse_calls(may_fork=limits["processes"] > 1, is_alone=spec["mechanism"] == "landlock")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and a program would go on to
    program = spec["argv"][0]
    folders = [""] if "/" in program else spec["environment"]["PATH"].split(":")
    for folder in folders:
        try:
            os.execve(os.path.join(folder, program), spec["argv"], spec["environment"])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            os.write(2, f"{program}: {error.strerror}\n".encode("utf-8", "replace"))
            os._exit(126)
    os.write(2, f"{program}: not found\n".encode("utf-8", "replace"))
    os._exit(127)


def _limit(kind: int, value: int) -> None:
    hardest = resource.getrlimit(kind)[1]
    value = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
    resource.setrlimit(kind, (value, value))


# -- seccomp -----------------------------------------------------------------------------------------------------------

# Numbers by name for (x86_64, aarch64); -1: there is none. From the kernel's unistd tables.
_CALLS = {
    "fork": (57, -1), "vfork": (58, -1), "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198),
    "socketpair": (53, 199), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pivot_root": (155, 41),
    "mount_setattr": (442, 442), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446), "setsockopt": (54, 208), "fcntl": (72, 25),
}  # fmt: skip
_REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "personality": (135, 92), "vmsplice": (278, 75), "seccomp": (317, 277), "sethostname": (170, 161),
    "settimeofday": (164, 170), "clock_settime": (227, 112),
}  # fmt: skip
# Refused where files of others are visible: calls that Landlock does not check, and signals.
_ALONE = {
    "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_COLUMN, _AUDIT_ARCH = _ARCHITECTURES.get(os.uname().machine, (0, 0))
_NUMBERS = {name: numbers[_COLUMN] for name, numbers in _CALLS.items()}

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_CLONE_THREAD = 0x10000
_CLONE_NEW = 0x7E020080  # every namespace
_AF_UNIX = 1
# They grow buffers in the kernel, which the bound on a program's memory does not count.
_SO_SNDBUF, _SO_SNDBUFFORCE, _F_SETPIPE_SZ = 7, 32, 1031


def _refuse_calls(*, may_fork: bool, is_alone: bool) -> None:
    """Install the seccomp filter; with `is_alone`, other processes are visible, so signals may go to itself only."""
    if not _AUDIT_ARCH:
        raise OSError(f"seccomp: expected x86_64 or aarch64, this machine is {os.uname().machine}")
    refused = [numbers[_COLUMN] for numbers in (_REFUSED | (_ALONE if is_alone else {})).values()]
    if not may_fork:
        refused += [_NUMBERS["fork"], _NUMBERS["vfork"]]
    if is_alone:
        refused += [_NUMBERS["tkill"]]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if _COLUMN == 0:
        code += [(0x35, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]  # the x32 table of calls
    for number in refused:
        if number >= 0:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    code += [(_EQUAL, 0, 1, _NUMBERS["clone3"]), (_RETURN, 0, 0, _ENOSYS)]  # its flags lie in memory: not to be seen
    threads_only = _ALLOW if may_fork else _EPERM
    code += _on_argument("clone", (_ANY_BIT, _CLONE_NEW, _EPERM), (_ANY_BIT, _CLONE_THREAD, _ALLOW), threads_only)
    code += _on_argument("socket", (_EQUAL, _AF_UNIX, _EPERM if is_alone else _ALLOW), _EPERM)
    code += _on_argument("socketpair", (_EQUAL, _AF_UNIX, _ALLOW), _EPERM)
    grown = ((_EQUAL, _SO_SNDBUF, _EPERM), (_EQUAL, _SO_SNDBUFFORCE, _EPERM))
    code += _on_argument("setsockopt", *grown, _ALLOW, number=2)
    code += _on_argument("fcntl", (_EQUAL, _F_SETPIPE_SZ, _EPERM), _ALLOW, number=1)
    if is_alone:
        for name in ("kill", "tgkill"):
            code += _on_argument(name, (_EQUAL, os.getpid(), _ALLOW), _EPERM)
    code.append((_RETURN, 0, 0, _ALLOW))
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(code), ctypes.addressof(buffer))
    _checked("seccomp", _LIBC.prctl(_SECCOMP, 2, header, 0, 0))


def _on_argument(name: str, *answers: Any, number: int = 0) -> list[tuple[int, int, int, int]]:
    """Return the filter of the call `name`: the answer of the first test (kind, value, answer) that holds for an
    argument.

    `number` is the argument's; the last of `answers` is the answer if no test holds.
    """
    *tests, otherwise = answers
    # Only the low half of the argument is loaded, which is all that these calls take.
    code = [(_LOAD, 0, 0, 16 + 8 * number)]
    for kind, value, answer in tests:
        code += [(kind, 0, 1, value), (_RETURN, 0, 0, answer)]
    code.append((_RETURN, 0, 0, otherwise))
    return [(_EQUAL, 0, len(code), _NUMBERS[name]), *code]


# -- the kernel --------------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    _checked(f"prctl {option}", _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _checked(what: str, code: int) -> int:
    if code < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return code


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    main()
