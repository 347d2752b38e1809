"""The process that worker processes are forked from: `python -m gspo_gym.env.workers.server DESCRIPTOR FOLDER`.

It has one thread, has imported what every environment needs, and only forks: a new worker costs milliseconds, shares
that memory, and inherits no thread, lock or open file of the program. When the program's connection ends, it kills all
workers and exits.

A worker first gives up what it inherited: the terminal, open descriptors, and memory above its limit. It then makes the
environment that it is told to, plays one episode after another through `EnvSession` like a rollout, so a process and a
thread accept, refuse and report the same, and answers the requests of `ProcessEnv` until the connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from random import seed as seed_random
from typing import Any

import numpy as np

from gspo_gym.env.checks.play import GENERATOR, global_state
from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.env.playing import spoken_by
from gspo_gym.env.registry import list_environments
from gspo_gym.env.session import EnvSession, open_session, place_of
from gspo_gym.env.workers.channel import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Channel,
    ChannelClosedError,
    cause_to_json,
    frame_of,
    message_from_json,
    message_to_json,
    messages_from_json,
    step_result_to_json,
    tool_schemas_to_json,
)
from gspo_gym.env.workers.limits import this_is_a_worker
from gspo_gym.env.workers.loading import ProcessTarget
from gspo_gym.errors import ContractError, GymError, UnknownNameError, UsageError, nearest_name
from gspo_gym.seeding import child_seed
from gspo_gym.types import Message

_MAX_REQUEST_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36


def serve(control: socket.socket) -> None:
    """Answer requests until the other end closes; None says that it cannot.

    {"fork": memory_limit_mb}, sent with the worker's end of a connection, is answered by its process id; {"reap":
    process id} by its status as of `os.waitpid`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of workers become our children, and can be killed
    workers: set[int] = set()
    control.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1)
        if not data:
            break
        request = json.loads(data)
        if "fork" in request:
            answer = _fork(control, descriptors[0], request["fork"])
            if answer is not None:
                workers.add(answer)
        else:
            workers.discard(request["reap"])
            answer = _reap(request["reap"])
            _kill_orphans(workers)
        control.send(json.dumps(answer).encode("ascii"))
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.killpg(pid, signal.SIGKILL)
    for pid in workers:
        _reap(pid)
    _kill_orphans(set())


def _fork(control: socket.socket, descriptor: int, memory_limit_mb: int) -> int | None:  # None: the system refuses
    server_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(descriptor)
        return None
    if pid == 0:
        control.close()
        run_worker(socket.socket(fileno=descriptor), server_pid=server_pid, memory_limit_mb=memory_limit_mb)
    os.close(descriptor)
    return pid


def _reap(pid: int) -> int | None:  # None if it is not our child
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return None


def _kill_orphans(workers: set[int]) -> None:
    # Processes that workers, now gone, started in sessions of their own, and their children in turn.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while orphans := {int(pid) for pid in children.read_text(encoding="ascii").split()} - workers:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)


def main(argv: list[str]) -> Any:
    """Serve on the descriptor `argv[0]`; remove the folder `argv[1]`, the home of workers, at the end."""
    # The program's end also comes as SIGTERM, of which more is to be ended than this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(argv[0]))
    list_environments()  # finds installed environments once, for all workers
    gc.collect()
    gc.freeze()  # a collection in a worker would write to the shared pages, and so copy them
    serve(control)
    shutil.rmtree(argv[1], ignore_errors=True)  # by us, because the program may have been killed


Request = Mapping[str, Any]
_MAX_OPEN_FILES = 1024
_MAX_FILE_BYTES = 2**30
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_CAPABILITIES_VERSION = 0x20080522
_SEEING = (19, 21, 38)  # SYS_PTRACE, SYS_ADMIN, PERFMON: each lets root read what Landlock closes
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446  # the same on every architecture
_LANDLOCK_VERSION = 1  # a flag
_MAKE_BLOCK_DEVICE, _SCOPE_SIGNAL = 1 << 11, 1 << 1


def run_worker(connection: socket.socket, *, server_pid: int, memory_limit_mb: int) -> None:
    """Become a worker, serve until the connection ends, and exit; for a freshly forked process.

    `memory_limit_mb` is MiB of address space; 0 for no limit.
    """
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what an environment starts would inherit it
        _give_up_what_was_inherited(connection, server_pid)
        _set_limits(memory_limit_mb)
        _lose_sight_of_others()
        this_is_a_worker()
        asyncio.run(_serve(Channel(connection, max_bytes=MAX_REQUEST_BYTES)))
        status = 0
    finally:
        os._exit(status)  # a normal exit would run the server's atexit functions and flush its buffers again


def _give_up_what_was_inherited(connection: socket.socket, server_pid: int) -> None:
    os.setsid()  # a process group of its own can be killed with all that the environment starts
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:  # the server died before prctl
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != connection.fileno():
            _close_quietly(int(name))


def _lose_sight_of_others() -> None:
    """Enter a Landlock domain, from which the program's /proc/<pid>/environ and mem cannot be read, even by root."""
    # Without Landlock, root keeps its sight.
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in _SEEING:
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, words = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, words) == 0:  # effective, permitted, inheritable; then the same of those above 31
        for capability in _SEEING:
            for kind in range(3):
                words[3 * (capability // 32) + kind] &= ~(1 << capability % 32)
        libc.capset(header, words)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return
    # A domain must handle some right. Signals to processes outside, or before kernel 6.12 making block devices, are
    # what environments need least.
    attributes = (ctypes.c_uint64 * 3)(*((0, 0, _SCOPE_SIGNAL) if version >= 6 else (_MAKE_BLOCK_DEVICE, 0, 0)))
    size = ctypes.c_size_t(24 if version >= 6 else 8)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    if ruleset < 0:
        return
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _close_quietly(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:  # the descriptor of the listing is closed already
        return


def _set_limits(memory_limit_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    _lower(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file over the limit is an OSError
    if memory_limit_mb:
        _lower(resource.RLIMIT_AS, memory_limit_mb * 2**20)


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


async def _serve(channel: Channel) -> None:
    worker = _Worker()
    while True:
        try:
            request = await channel.receive()
        except ChannelClosedError:
            return
        await channel.send(await _answer_to(worker, request))


async def _answer_to(worker: _Worker, request: Request) -> bytes:
    # The frame of {"result": ...} or {"error": class, "text": ..., "cause": ...}.
    method = str(request["method"])
    where = f"{worker.name}: {method}(): an observation"
    try:
        return frame_of({"result": await worker.answer(method, request)}, max_bytes=MAX_ANSWER_BYTES, where=where)
    except GymError as error:
        return _error_frame(type(error).__name__, str(error), error)  # from the session, whose text says where
    except Exception as error:
        return _error_frame("EnvError", f"{worker.name}: {method}() raised {_told(error)}{place_of(error)}", error)


def _error_frame(kind: str, text: str, error: BaseException) -> bytes:
    frame = {"error": kind, "text": text[:10_000], "cause": cause_to_json(error)}
    return frame_of(frame, max_bytes=MAX_ANSWER_BYTES, where="an error")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class _Worker:  # at most one environment, its players, and what the process held before it
    def __init__(self) -> None:
        self.name = "a worker process"
        self._session: EnvSession | None = None
        self._players: dict[int, ScriptedPolicy] = {}
        self._before: Mapping[str, int] = {}
        self._generators: Mapping[str, Any] = {}
        self._changed: set[str] = set()

    async def answer(self, method: str, request: Request) -> Any:
        if method == "open":
            return await self._open(request)
        if method == "close":
            return await self._close()
        if self._session is None:
            raise UsageError(f"{self.name}: {method}() without an environment")
        if method == "reset":
            self._seed_generators(request["seed"])
            result = await self._session.reset(request["seed"], request["options"])
        elif method == "step":
            result = await self._session.step(message_from_json(request["action"], where=f"{self.name}: step()"))
        elif method == "invalid_action":
            result = await self._session.invalid_action(request["error"])
        elif method == "say":
            return await self._say(self._session, request)
        else:
            raise UsageError(f"{self.name}: a worker does not know the method {method!r}")
        return step_result_to_json(result)

    async def _open(self, request: Request) -> Any:
        if self._session is not None:
            raise UsageError(f"{self.name}: is still open")
        target = ProcessTarget.from_json(request["target"])
        self.name = target.name
        sys.path[:] = request["sys_path"]
        os.chdir(request["folder"])
        os.environ.update(request["variables"])
        self._seed_generators(0)
        self._session = await open_session(
            target.make, env_id=self.name, step_timeout_seconds=None, checks_returns=False
        )
        self._note_changed_generators()
        self._before = self._before or _possessions()
        env = self._session.env
        return {
            "tool_schemas": tool_schemas_to_json(self._session.tool_schemas, where=f"{self.name}: tool_schemas"),
            "takes_messages": bool(getattr(env, "takes_messages", False)),
            "reward_range": [float(bound) for bound in getattr(env, "reward_range", (-np.inf, np.inf))],
            "policies": list(getattr(env, "policies", {})),
            "isolation": getattr(env, "isolation", None),
            "confinement": getattr(env, "confinement", None),
            "max_action_seconds": getattr(env, "max_action_seconds", None),
        }

    async def _close(self) -> Any:
        # With the growth since the first `open` and the generators that changed.
        session, self._session = self._session, None
        self._players.clear()
        if session is not None:
            await session.close()
        self._note_changed_generators()
        changed, self._changed = sorted(self._changed), set()
        del session
        gc.collect()
        grown = {name: count - self._before.get(name, 0) for name, count in _possessions().items()}
        return {"grown": grown, "changed_generators": changed}

    async def _say(self, session: EnvSession, request: Request) -> Any:
        # The environment's own players run here, beside the hidden state.
        player = self._players.get(request["player"])
        if player is None:
            policies, name = session.env.policies, request["policy"]
            if name not in policies:
                raise UnknownNameError(f"{self.name} has no policy {name!r}; {nearest_name(name, policies)}")
            player = self._players[request["player"]] = policies[name](session.env, _generator(request["generator"]))
        said = await spoken_by(player, messages_from_json(request["messages"], where=f"{self.name}: the player"))
        if not isinstance(said, str | Message):
            raise ContractError(f"{self.name}: expected a player to say text or a Message, got {type(said).__name__}")
        return said if isinstance(said, str) else message_to_json(said)

    def _seed_generators(self, seed: int) -> None:
        # An environment that draws from the process-wide generators then depends on its seed alone.
        self._note_changed_generators()
        # Not `seed` itself: an environment that seeds them with it would look like one that leaves them alone.
        seed = child_seed(seed, "process")
        seed_random(seed)
        np.random.set_state(np.random.RandomState(seed % 2**32).get_state())
        torch: Any = sys.modules.get("torch")  # not imported for this
        if hasattr(torch, "default_generator"):
            torch.default_generator.manual_seed(seed)
        self._generators = _generators()

    def _note_changed_generators(self) -> None:
        now = _generators()
        self._changed |= {name for name, state in self._generators.items() if now.get(name) != state}
        self._generators = now


def _generators() -> dict[str, Any]:
    return {name[len(GENERATOR) :]: state for name, state in global_state().items() if name.startswith(GENERATOR)}


def _generator(state: Mapping[str, Any]) -> np.random.Generator:
    bits = getattr(np.random, str(state["bit_generator"]))()
    bits.state = state
    return np.random.Generator(bits)


def _possessions() -> dict[str, int]:  # what an environment may leave behind in its process
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    tasks = list(Path("/proc/self/task").iterdir())
    children = [pid for task in tasks for pid in (task / "children").read_text(encoding="ascii").split()]
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(tasks),
        "child processes": len(children),
        "MiB of memory": pages * resource.getpagesize() // 2**20,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
