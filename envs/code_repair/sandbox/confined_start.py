"""Script that confines itself and then becomes the program of a sandbox: `python confined_start.py SPEC STATUS`.

SPEC is a descriptor with a Python literal (`confinement.spec_of`); STATUS is a pipe that gets one line if the
confinement fails, and closes silently when the program starts. Linux and the standard library only: no module imports
this file, and each import costs every run some ms.

With namespaces, the program's root is an empty tmpfs of bounded size with read-only binds of what it needs, and its
first process ends everything with it. Without them, Landlock lets it write and start nothing. seccomp allows a list of
system calls, in both cases.
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
    Arguments = tuple[tuple[int, int, tuple[int, ...]], ...]

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
    _limit(resource.RLIMIT_SIGPENDING, 0)  # queued signals and timers are counted by user
    own_tasks = 2 + limits["processes"] + (_MAX_THREADS if limits["processes"] == 1 else 0)
    _limit(resource.RLIMIT_NPROC, spec["other_tasks"] + own_tasks)
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

# Numbers by name for (x86_64, aarch64), from the kernel's unistd tables; -1: there is none. First the calls of this
# script, then what interpreters and ordinary programs need for their files, memory, threads, time and pipes. All others
# are refused: what needs a capability, makes namespaces or attaches to processes, and what draws on an allowance of the
# user or on the host's memory or disks (POSIX timers, queued signals, inotify, shared memory, memfd, sync).
_OWN = {
    "pivot_root": (155, 41), "mount_setattr": (442, 442), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "lseek": (8, 62),
    "open": (2, -1), "openat": (257, 56), "creat": (85, -1), "close": (3, 57), "close_range": (436, 436),
    "stat": (4, -1), "fstat": (5, 80), "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291),
    "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, -1), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "umask": (95, 166), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1),
    "pipe2": (293, 59), "fcntl": (72, 25), "ioctl": (16, 29), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "fallocate": (285, 47), "fadvise64": (221, 223), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10),
    "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13), "mkdir": (83, -1), "mkdirat": (258, 34),
    "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, -1), "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36),
    "mknod": (133, -1), "mknodat": (259, 33),
    "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "epoll_create": (213, -1),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22),
    "eventfd": (284, -1), "eventfd2": (290, 19), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "socket": (41, 198), "socketpair": (53, 199), "sendto": (44, 206),
    "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209),
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "msync": (26, 227), "futex": (202, 98), "sched_yield": (24, 124), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, -1), "times": (100, 153), "alarm": (37, -1), "setitimer": (38, 103), "getitimer": (36, 102),
    "pause": (34, -1), "getcpu": (309, 168), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "kill": (62, 129), "tgkill": (234, 131),
    "clone": (56, 220), "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260),
    "waitid": (247, 95), "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293),
    "arch_prctl": (158, -1), "prctl": (157, 167), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getpgrp": (111, -1), "getpgid": (121, 155), "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "sched_getaffinity": (204, 123), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "getpriority": (140, 141), "setpriority": (141, 140),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278),
}  # fmt: skip
# Besides, where all processes and files in sight are the program's own: what Landlock does not check.
_ALLOWED_IN_NAMESPACES = {
    "tkill": (200, 130), "setsid": (112, 157), "setpgid": (109, 154), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "connect": (42, 203), "chmod": (90, -1), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1),
    "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
    "truncate": (76, 45),
}  # fmt: skip
_ALLOWED_WITH_CHILDREN = {"fork": (57, -1), "vfork": (58, -1)}
_ABSENT = {"timer_create": (222, 107)}  # refused as if the kernel had none: `timeout` then sets an alarm
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_COLUMN, _AUDIT_ARCH = _ARCHITECTURES.get(os.uname().machine, (0, 0))
_NUMBERS = {name: numbers[_COLUMN] for name, numbers in _OWN.items()}

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _EPERM, _ENOTTY, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050019, 0x00050026, 0x80000000
_NEWER_CALLS = 424  # numbers from here on are those of Linux 5.1 and later, for which libc has another way
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020080  # the latter: every namespace
_AF_UNIX, _SOCK_STREAM = 1, 1
_WHOLE = 0xFFFFFFFF

# A call is allowed if each of its arguments here (position, mask, values), masked, is one of the values. Only the low
# half of an argument is looked at, which is all that these calls take.
_ARGUMENTS: Mapping[str, Arguments] = {
    # Descriptors, flags and locks, also sqlite's; nothing that signals an owner (F_SETOWN) or grows a pipe's buffer.
    "fcntl": ((1, _WHOLE, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)),),
    # FIOCLEX, FIONCLEX, FIONBIO, FIONREAD: what there is of files and pipes. No owner (FIOSETOWN), no terminal.
    "ioctl": ((1, _WHOLE, (0x5451, 0x5450, 0x5421, 0x541B)),),
    # A signal at the parent's end, dumpable?, names of threads and of memory, a capability?, no new privileges.
    "prctl": ((0, _WHOLE, (1, 2, 3, 15, 16, 23, 38, 39, 0x53564D41)),),
    # Of the caller alone: 0.
    "prlimit64": ((0, _WHOLE, (0,)),),
    "getpriority": ((0, _WHOLE, (0,)), (1, _WHOLE, (0,))),
    "setpriority": ((0, _WHOLE, (0,)), (1, _WHOLE, (0,))),
    "clone": ((0, _CLONE_NEW, (0,)),),
    "socket": ((0, _WHOLE, (_AF_UNIX,)),),
    "socketpair": ((0, _WHOLE, (_AF_UNIX,)),),
    # Of sockets: an address used again, keep-alive, linger, credentials, timeouts (old and new). No filter, and no size
    # of buffers, which lie in the kernel, beside the bound on a program's memory.
    "setsockopt": ((1, _WHOLE, (1,)), (2, _WHOLE, (2, 9, 13, 16, 20, 21, 66, 67))),
}

# Without a thread's processors libc still says where its stack is, which Python 3.14 asks for.
_REFUSALS = {"ioctl": _ENOTTY, "sched_getaffinity": _ENOSYS}


def _refuse_calls(*, may_fork: bool, is_alone: bool) -> None:
    """Install the seccomp filter; with `is_alone`, other processes are visible, so only its own id may be named."""
    if not _AUDIT_ARCH:
        raise OSError(f"seccomp: expected x86_64 or aarch64, this machine is {os.uname().machine}")
    allowed, arguments = dict(_ALLOWED), dict(_ARGUMENTS)
    if may_fork:
        allowed |= _ALLOWED_WITH_CHILDREN
    else:
        arguments["clone"] += ((0, _CLONE_THREAD, (_CLONE_THREAD,)),)
    if is_alone:
        del allowed["socket"]
        # Datagrams have an address each, and so reach sockets of other programs.
        arguments["socketpair"] += ((1, 0xF, (_SOCK_STREAM,)),)
        arguments |= {name: ((0, _WHOLE, (os.getpid(),)),) for name in ("kill", "tgkill")}
        arguments |= {name: ((0, _WHOLE, (0, os.getpid())),) for name in ("getpgid", "getsid", "sched_getaffinity")}
        # Clocks of processes, the negative ones.
        arguments |= {f"clock_{name}": ((0, 1 << 31, (0,)),) for name in ("gettime", "getres", "nanosleep")}
    else:
        allowed |= _ALLOWED_IN_NAMESPACES
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for name, numbers in allowed.items():
        if numbers[_COLUMN] >= 0:
            code += _allowing(numbers[_COLUMN], arguments.get(name, ()), _REFUSALS.get(name, _EPERM))
    for numbers in _ABSENT.values():
        code += [(_EQUAL, 0, 1, numbers[_COLUMN]), (_RETURN, 0, 0, _ENOSYS)]
    code += [(_AT_LEAST, 0, 1, _NEWER_CALLS), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(code), ctypes.addressof(buffer))
    _checked("seccomp", _LIBC.prctl(_SECCOMP, 2, header, 0, 0))


def _allowing(number: int, arguments: Arguments, refusal: int) -> list[tuple[int, int, int, int]]:
    """Return the filter of one call, which is reached with its number loaded and passes on to the next line if it is
    another one.
    """
    code = []
    for position, mask, values in arguments:
        code += [(_LOAD, 0, 0, 16 + 8 * position), (_AND, 0, 0, mask)]
        code += [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
        code.append((_RETURN, 0, 0, refusal))
    code.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(code), number), *code]


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
