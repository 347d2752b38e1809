"""The control socket of a run: programs of the same user ask what it does, and steer it.

The socket is `control.sock` in the run's folder. A request is one line of JSON, and so is its answer:

    {"command": "set", "key": "training.learning_rate", "value": "1e-4"}
    {"ok": true, "changed": true, "key": ..., "old": 0.001, "new": 0.0001}

A request that changes nothing is no error: `changed` is false. Answers hold numbers and names. Text of episodes, which
a model or an environment wrote and which could be meant to steer an agent that reads it, is sent only for `content`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gspo_gym.errors import ConfigError, GymError, UsageError, nearest_name
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.run.process import ProcessInfo, holder_of
from gspo_gym.run.registry import read_run
from gspo_gym.run.steering import Done, Steering

if TYPE_CHECKING:  # they load torch, and a command that asks needs none
    from gspo_gym.run.recording import RunRecorder
    from gspo_gym.run.trainer import Trainer

SOCKET_FILE = "control.sock"
COMMANDS = ("status", "pause", "resume", "checkpoint", "stop", "set")
_MAX_REQUEST_BYTES = 64 * 1024
_MAX_PATH_BYTES = 100  # an address has 108, on some systems 104, and ends with a zero
_READ_SECONDS = 10.0  # for a request to arrive
_LOOK_SECONDS = 0.2  # between looks whether the run has ended, while an answer is waited for
_UCRED = struct.Struct("3i")  # pid, uid, gid

Reply = dict[str, Any]  # JSON values


class Changeable(Protocol):
    """The settings that may change during a run."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Return the present values by key (Any: of the config)."""

    def parse(self, key: str, text: str) -> Any:
        """Return the text as a value of the key.

        Raises:
            ConfigError: the key may not change now, or the text is not a value of it.
        """


class ControlServer:
    """Server of a run's control socket; its threads only make requests to `steering`.

    Args:
        folder: of the run, which this process holds: a socket file in it is of a dead process.
        steering: takes the requests.
        recorder: records each change with its author, as the system names the peer.
    """

    def __init__(self, folder: Path, steering: Steering, recorder: RunRecorder) -> None:
        self.folder = folder
        self.steering = steering
        self._recorder = recorder
        self._trainer: Trainer | None = None
        self._settings: Changeable | None = None
        self._one_change = threading.Lock()  # two requests must not both find the old state
        self._is_closed = False
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="gspo-gym-control", daemon=True)

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the system or the folder's file system has no such sockets, or its path is too long for them.
        """
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no Unix sockets")
        path = self.folder / SOCKET_FILE
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self.folder) as address:
                listening.bind(address)
            path.chmod(0o600)  # before anything can connect, which is from `listen` on
            listening.listen(16)
        except BaseException:
            listening.close()
            raise
        self._socket = listening
        self._thread.start()

    def attach(self, trainer: Trainer, settings: Changeable) -> None:
        """Report on the trainer from now on, and change its settings."""
        self._trainer, self._settings = trainer, settings

    def close(self) -> None:
        """Stop listening and remove the socket; waiting requests are cut off. Closing twice is fine."""
        if self._is_closed or self._socket is None:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        (self.folder / SOCKET_FILE).unlink(missing_ok=True)
        self._socket.close()

    def _serve(self) -> None:
        assert self._socket is not None
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed; or no descriptor is left, and then the caller tries again
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the caller has gone
            connection.settimeout(_READ_SECONDS)
            author = _author(connection)
            stops = False
            try:
                request = _read_request(connection)  # another user's, too, which else cannot read the refusal
                if author is None:
                    raise UsageError("control: only the user that runs the training may")
                reply = {"ok": True, **self._do(request, author)}
                stops = request.get("command") == "stop" and reply["changed"]
            except (GymError, OSError) as error:
                reply = {"ok": False, "error": str(error)}
            try:
                connection.sendall(json.dumps(reply).encode() + b"\n")
            finally:
                # After the answer, which ends with the program. Only once: its second signal ends it as it stands.
                if stops:
                    self.steering.interrupt_start()

    def _do(self, request: Mapping[str, Any], author: str) -> Reply:
        command = request.get("command")
        if command == "status":
            return self._status(with_content=request.get("content") is True)
        if command == "set":
            return self._set(str(request.get("key")), str(request.get("value")), author)
        if command == "checkpoint":
            return self._checkpoint()
        simple = {"pause": self._pause, "resume": self._resume, "stop": self._stop}
        if command not in simple:
            raise UsageError(f"control: there is no command {command!r}; {nearest_name(str(command), COMMANDS)}")
        with self._one_change:
            return {"changed": simple[command](author)}

    def _pause(self, author: str) -> bool:
        if self.steering.is_paused:
            return False
        self.steering.pause()
        self._recorder.event("paused", self._step, {"by": author})
        return True

    def _resume(self, author: str) -> bool:
        if not self.steering.is_paused:
            return False
        self._recorder.event("continued", self._step, {"by": author})
        self.steering.resume()
        return True

    def _stop(self, author: str) -> bool:
        if self.steering.stopped_by is not None:
            return False
        self.steering.stop(author)
        return True

    def _checkpoint(self) -> Reply:
        if self._trainer is None:
            raise UsageError(
                "control: the run is still starting; it saves a checkpoint by itself before its first step"
            )
        before = self._checkpoints()
        self._wait(self.steering.request_checkpoint())
        newest = max(self._checkpoints(), default=None)
        return {"changed": newest is not None and newest not in before, "checkpoint": newest}

    def _set(self, key: str, text: str, author: str) -> Reply:
        with self._one_change:
            if self._settings is None:
                raise UsageError("control: the run is still starting; settings can change when it trains")
            new, old = self._settings.parse(key, text), self._settings.values[key]
            if new != old:
                self._wait(self.steering.set(key, new, author))
            return {"changed": new != old, "key": key, "old": old, "new": new}

    def _wait(self, done: Done) -> None:
        """Wait until a request is done, which may take the rest of a step."""
        while not self._is_closed:
            with contextlib.suppress(TimeoutError, CancelledError):
                done.result(timeout=_LOOK_SECONDS)
                return
            if done.cancelled():
                break
        raise UsageError("control: the run ended before it was done")

    def _status(self, *, with_content: bool) -> Reply:
        steering = self.steering
        status = "stopping" if steering.stopped_by is not None else "paused" if steering.is_paused else "running"
        reply: Reply = {"status": status, "phase": steering.phases.now, "doing": str(steering.phases)}
        reply |= {"pid": os.getpid(), "folder": str(self.folder.resolve())}
        if self._trainer is not None and self._settings is not None:
            state = self._trainer.state
            score = None if state.final_eval is None else state.final_eval["score"]
            reply |= {
                "step": state.step,
                "num_iterations": self._trainer.plan.size.num_iterations,
                "episodes": state.num_episodes,
                "sampled_tokens": state.sampled_tokens,
                "trained_tokens": state.trained_tokens,
                "wall_seconds": state.wall_seconds,
                "score": score,
                "value": None if score is None or state.final_eval is None else state.final_eval[score],
                "settings": dict(self._settings.values),
            }
        elif status == "running":
            reply["status"] = "starting"
        return reply | (_content(self.folder) if with_content else {})

    @property
    def _step(self) -> int:
        return 0 if self._trainer is None else self._trainer.state.step

    def _checkpoints(self) -> set[str]:
        return {path.name for path in (self.folder / "checkpoints").glob("step_*")}


def ask(folder: Path, request: Mapping[str, Any]) -> Reply:
    """Return the answer of the process that trains a run, which may take the rest of a step.

    Raises:
        ConfigError: no process is at work on the run, or it does not listen.
        UsageError: it refuses the request; says why.
    """
    holder = holder_of(folder)
    if holder is None or holder.is_elsewhere:
        raise ConfigError(f"{folder}: {_where(holder)}, so that nothing can be asked of it")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            with _address(folder) as address:
                connection.connect(address)
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline()
    except OSError as error:
        raise ConfigError(
            f"{folder / SOCKET_FILE}: does not answer ({error.strerror or error}): the run is starting or ending, or "
            "its folder cannot hold a socket"
        ) from error
    if not line:
        raise ConfigError(f"{folder}: the run ended before it answered")
    reply: Reply = json.loads(line)
    if not reply.pop("ok"):
        raise UsageError(reply["error"])
    return reply


def status_of(folder: Path, *, with_content: bool = False) -> Reply:
    """Return the status from a run's process, or from its folder if there is no process.

    Raises:
        RecordError: with content: an episode of the run cannot be read.
    """
    try:
        return ask(folder, {"command": "status", "content": with_content})
    except ConfigError:
        run = read_run(folder)
        told = run.to_dict()
        del told["error"]  # it may quote an environment
        return told | (_content(folder) | {"error": run.error} if with_content else {})


def _where(holder: ProcessInfo | None) -> str:
    return "no process is at work on it" if holder is None else f"{holder} cannot be reached from this machine"


def _content(folder: Path) -> Reply:
    """Return the messages of the newest recorded episode."""
    paths = sorted(episode_paths(folder), key=lambda path: path.stat().st_mtime)
    episodes = read_episodes(paths[-1]) if paths else []
    if not episodes:
        return {"episode": None}
    messages = [message.to_dict() for message in episodes[-1].messages]
    return {"episode": {"trajectory_id": episodes[-1].trajectory_id, "messages": messages}}


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough for an address."""
    path = str(folder / SOCKET_FILE)
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_FILE}"
    finally:
        os.close(descriptor)


def _author(connection: socket.socket) -> str | None:
    """Return the peer's user and process; None for another user, "unknown" if the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return "unknown"  # the socket's mode has let in no other user
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid not in (os.geteuid(), 0):
        return None
    try:
        name = str(importlib.import_module("pwd").getpwuid(uid).pw_name)
    except (ImportError, KeyError):
        name = f"user {uid}"
    return f"{name} (process {pid})"


def _read_request(connection: socket.socket) -> Mapping[str, Any]:
    line, deadline = b"", time.monotonic() + _READ_SECONDS
    while not line.endswith(b"\n") and len(line) < _MAX_REQUEST_BYTES:
        # Of the whole request: one that comes byte by byte would hold its thread for days.
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := connection.recv(_MAX_REQUEST_BYTES - len(line))):
            break
        line += part
    connection.settimeout(_READ_SECONDS)  # for the answer
    try:
        request = json.loads(line)
    except ValueError as error:
        raise UsageError(f"control: expected one line of JSON: {error}") from error
    if not isinstance(request, dict):
        raise UsageError(f"control: expected an object, got {line[:60]!r}")
    return request
