"""Python programs for tests, forked from a process that has imported torch, transformers and the package.

`run` and `Popen` take what subprocess's take, for commands that begin with `sys.executable`; a program starts in some
20 ms instead of the four seconds that these imports take. Not for tests of the start itself: what a command imports, in
which order, under which options of the interpreter. Outside Linux, where a fork of torch is not safe, they are
subprocess's own.

The forking process (`main`) answers one request after another. Each becomes two processes: the program, and one which
waits for it and tells its exit status and its processor time to the test.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "transformers.generation", "peft", "gspo_gym.cli.train", "gspo_gym.cli.evaluate", "gspo_gym_envs")
_LENGTH = struct.Struct("!I")


class _ForkedPopen(subprocess.Popen[Any]):
    """A Popen whose process is a fork; `forked_seconds` is the processor time of all such processes that ended."""

    forked_seconds = 0.0
    _server: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]  # as Popen calls it in 3.11 to 3.13
        args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell = given[:10]
        descriptors, new_session = given[10:16], given[21]
        words = [os.fspath(word) for word in args]
        assert words[0] == sys.executable, f"{words}: only Python programs are forked"
        assert not any((shell, pass_fds, preexec_fn, executable)), "not for forked programs: use subprocess"
        p2cread, _, _, c2pwrite, _, errwrite = descriptors
        self._answers, theirs = socket.socketpair()
        request = {
            "words": words[1:],
            "cwd": os.fspath(cwd) if cwd else os.getcwd(),
            "environ": dict(env if env is not None else os.environ),
            "new_session": new_session,
        }
        standard = [own if own != -1 else i for i, own in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs:
            _send(self._start_server(), request, [*standard, theirs.fileno()])
        self._child_created = True
        self._close_pipe_fds(*descriptors)  # type: ignore[attr-defined]
        self.pid = int(self._answer()["pid"])

    @classmethod
    def _start_server(cls) -> socket.socket:
        if cls._server is None:
            cls._server, theirs = socket.socketpair()
            with theirs:
                server = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C is for pytest, which then closes the socket
                    stdin=subprocess.DEVNULL,
                )
            atexit.register(server.wait)
            atexit.register(cls._server.close)  # called first
        return cls._server

    def _answer(self) -> dict[str, Any]:
        answer = _receive(self._answers)[0]
        assert answer is not None, "the process that forks programs has ended"
        return answer

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
                    self._take_status()
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                if not select.select([self._answers], [], [], timeout)[0]:
                    assert timeout is not None
                    raise subprocess.TimeoutExpired(self.args, timeout)
                self._take_status()
        return self.returncode

    def _take_status(self) -> None:
        answer = self._answer()
        self._answers.close()
        self.returncode = int(answer["status"])
        _ForkedPopen.forked_seconds += float(answer["seconds"])


Popen = _ForkedPopen if sys.platform == "linux" else subprocess.Popen


def forked_seconds() -> float:
    """Return the processor seconds of all forked programs that have ended."""
    return _ForkedPopen.forked_seconds


def run(
    command: Sequence[Any],
    *,
    capture_output: bool = False,
    check: bool = False,
    input: Any = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _send(channel: socket.socket, value: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    text = json.dumps(value).encode()
    head = _LENGTH.pack(len(text))
    if descriptors:
        socket.send_fds(channel, [head], list(descriptors))
    else:
        channel.sendall(head)
    channel.sendall(text)


def _receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, descriptors, *_ = socket.recv_fds(channel, _LENGTH.size, 4)
    if not head:
        return None, []
    text = b""
    while len(text) < _LENGTH.unpack(head)[0]:
        text += channel.recv(_LENGTH.unpack(head)[0] - len(text))
    return json.loads(text), descriptors


def main() -> None:
    """Fork a program for every request on the socket whose descriptor is the first argument, until it is closed."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # no fork copies their pages by collecting garbage
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits here for those that wait
    while True:
        request, descriptors = _receive(requests)
        if request is None:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            answers = socket.socket(fileno=descriptors.pop())
            program = os.fork()
            if program == 0:
                answers.close()
                _become(request, descriptors)
                return  # the interpreter ends as that of any program
            _wait_for(program, answers, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for(program: int, answers: socket.socket, descriptors: Sequence[int]) -> None:
    """Report the program's pid, and at its end its status and its processor seconds; then end."""
    os.setsid()  # no signal to the program's group ends this process
    for descriptor in (0, 1, 2, *descriptors):
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the test has ended meanwhile
        _send(answers, {"pid": program})
        _, status, usage = os.wait4(program, 0)
        seconds = usage.ru_utime + usage.ru_stime
        _send(answers, {"status": os.waitstatus_to_exitcode(status), "seconds": seconds})
    os._exit(0)


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run a program in this process, as `python WORDS...` does."""
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    words: list[str] = request["words"]
    while words[0] in ("-B", "-W"):
        if words.pop(0) == "-B":
            sys.dont_write_bytecode = True
        else:
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
    added = [entry for entry in request["environ"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*added, *(entry for entry in sys.path if entry not in added)]
    importlib.invalidate_caches()
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, request["cwd"])
        sys.modules.pop(words[1], None)  # or runpy warns that it is there
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec")
    else:
        assert not words[0].startswith("-"), f"{words}: use subprocess for other options of the interpreter"
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        module.__file__ = words[0]
        code = compile(Path(words[0]).read_text(encoding="utf-8"), words[0], "exec")
    exec(code, vars(module))


if __name__ == "__main__":
    main()
