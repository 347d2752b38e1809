"""What a worker process does: `run_worker`, in a fresh fork of the host.

It first gives up what it inherited: the terminal, open descriptors, and memory above its limit. It then makes the
environment that it is told to, plays one episode after another through `EnvSession` like a rollout, so a process and a
thread accept, refuse and report the same, and answers the requests of `ProcessEnv` until the connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from random import seed as seed_random
from typing import Any

import numpy as np

from gspo_gym.base.messages import message_from_wire, messages_from_wire
from gspo_gym.env.checks.play import GENERATOR, global_state
from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.env.playing import spoken_by
from gspo_gym.env.session import EnvSession, open_session, place_of
from gspo_gym.env.workers.limits import this_is_a_worker
from gspo_gym.env.workers.target import ProcessTarget
from gspo_gym.env.workers.wire import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    cause_to_json,
    decode,
    encode,
    message_to_json,
    require_json,
    result_to_json,
)
from gspo_gym.errors import ContractError, GymError, UnknownNameError, UsageError, nearest_name
from gspo_gym.seeding import child_seed
from gspo_gym.types import Message

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


def run_worker(connection: Connection, *, host: int, memory_limit_mb: int) -> None:
    """Become a worker, serve until the connection ends, and exit; for a freshly forked child of the process `host`.

    `memory_limit_mb` is MiB of address space; 0 for no limit.
    """
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what an environment starts would inherit it
        _give_up_what_was_inherited(connection, host)
        _set_limits(memory_limit_mb)
        _lose_sight_of_others()
        this_is_a_worker()
        asyncio.run(_serve(connection))
        status = 0
    finally:
        os._exit(status)  # a normal exit would run the host's atexit functions and flush its buffers again


def _give_up_what_was_inherited(connection: Connection, host: int) -> None:
    os.setsid()  # a process group of its own can be killed with all that the environment starts
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:  # it died before prctl
        os._exit(1)
    null_file = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null_file, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != connection.fileno():
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.close(int(name))


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


async def _serve(connection: Connection) -> None:
    worker, loop, is_readable = _Worker(), asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), is_readable.set)
    while True:
        await is_readable.wait()  # and not `recv_bytes` at once: what an environment does in the background goes on
        try:
            request = decode(connection.recv_bytes(MAX_REQUEST_BYTES))
        except (OSError, EOFError):
            return
        connection.send_bytes(await _answer_to(worker, request))
        is_readable.clear()


async def _answer_to(worker: _Worker, request: Request) -> bytes:
    # {"result": ...} or {"error": class, "text": ..., "cause": ...}, encoded.
    method = str(request["method"])
    where = f"{worker.name}: {method}(): an observation"
    try:
        return encode({"result": await worker.answer(method, request)}, max_bytes=MAX_ANSWER_BYTES, where=where)
    except GymError as error:
        return _error(type(error).__name__, str(error), error)  # from the session, whose text says where
    except Exception as error:
        text = f"{worker.name}: {method}() raised {type(error).__name__}: {error}{place_of(error)}"
        return _error("EnvError", text, error)


def _error(kind: str, text: str, error: BaseException) -> bytes:
    answer = {"error": kind, "text": text[:10_000], "cause": cause_to_json(error)}
    return encode(answer, max_bytes=MAX_ANSWER_BYTES, where="an error")


class _Worker:  # at most one environment, its players, and what the process held before it
    def __init__(self) -> None:
        self.name = "a worker process"
        self._session: EnvSession | None = None
        self._players: dict[int, ScriptedPolicy] = {}
        self._before: Mapping[str, int] = {}
        self._generators: Mapping[str, Any] = {}
        self._changed_names: set[str] = set()

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
            result = await self._session.step(message_from_wire(request["action"], where=f"{self.name}: step()"))
        elif method == "invalid_action":
            result = await self._session.invalid_action(request["error"])
        elif method == "say":
            return await self._say(self._session, request)
        else:
            raise UsageError(f"{self.name}: a worker does not know the method {method!r}")
        return result_to_json(result)

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
            "tool_schemas": require_json(
                list(map(dict, self._session.tool_schemas)), where=f"{self.name}: tool_schemas"
            ),
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
        changed_names, self._changed_names = sorted(self._changed_names), set()
        del session
        gc.collect()
        growth = {name: count - self._before.get(name, 0) for name, count in _possessions().items()}
        return {"grown": growth, "changed_generators": changed_names}

    async def _say(self, session: EnvSession, request: Request) -> Any:
        # The environment's own players run here, beside the hidden state.
        player = self._players.get(request["player"])
        if player is None:
            policies, name = session.env.policies, request["policy"]
            if name not in policies:
                raise UnknownNameError(f"{self.name} has no policy {name!r}; {nearest_name(name, policies)}")
            player = self._players[request["player"]] = policies[name](session.env, _generator(request["generator"]))
        reply = await spoken_by(player, messages_from_wire(request["messages"], where=f"{self.name}: the player"))
        if not isinstance(reply, str | Message):
            raise ContractError(f"{self.name}: expected a player to say text or a Message, got {type(reply).__name__}")
        return reply if isinstance(reply, str) else message_to_json(reply)

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
        self._changed_names |= {name for name, state in self._generators.items() if now.get(name) != state}
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
