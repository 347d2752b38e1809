"""Processes that work as one: start them, talk to them, watch them, and end all when one is lost.

The driver starts the ranks through `Start` functions and gives each the address of a socket in its environment. A rank
connects, proves that it is one by a secret, and from then on both sides send frames: eight bytes that count, then that
many bytes. An empty frame is a sign of life. There is no pickle: frames are JSON or tensors as safetensors. A frame of
which the count has its highest bit set is an aside: JSON for another thread, beside the messages.

A rank that ends, is not heard in time or is too late with its answer ends the others. A rank whose driver is gone, or
cannot be heard, ends itself. A process joins before its program's imports, which take seconds in which it may be
stopped: `python -m gspo_gym.base.ranks MODULE ARGUMENTS`.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import importlib
import json
import math
import os
import queue
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gspo_gym.base.leftovers import die_with_parent
from gspo_gym.errors import ServiceError, shortened

LOOPBACK = "127.0.0.1"
RANK_VARIABLE = "GSPO_GYM_RANK"
JOIN_SECONDS = 300.0  # until all ranks have met, which takes what importing torch takes
_STARTING_SECONDS = 30.0  # of silence until then, at least: loading a library may keep the interpreter's lock
_LAST_WORDS_SECONDS = 0.5  # a rank that dies breaks its connections a moment before it is gone
_END_SECONDS = 10.0  # for the kernel to remove a killed process; one that waits for a disk may take longer
_LOOK_SECONDS = 0.1  # between looks at whether the group has ended
_NUM_WAITING = 8  # frames that were received and not yet read: a model's tensors come one by one


class RanksLostError(ServiceError):
    """The ranks of a group have ended, because one of them was lost."""


class Handle(Protocol):
    """A process that was started.

    Attributes:
        name: says which one it is, such as "process 4711".
    """

    name: str

    def wait(self) -> str:
        """Return how it ended, such as "has ended with status -9", when it has."""
        ...

    def kill(self) -> None:
        """End it at once; it may have ended before."""
        ...


# Starts a rank with these variables in its environment. The thread that calls it waits for the rank's end.
Start = Callable[[Mapping[str, str]], Handle]


class LocalProcess:
    """A rank on this machine: `python -m MODULE ARGUMENTS`.

    The kernel kills it when the thread that started it ends; see `Rank`.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], *, log: Path | None = None
    ) -> None:
        environment = {**os.environ, **environment, _PARENT_VARIABLE: str(os.getpid())}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gspo_gym.base.ranks", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=environment,
            )
        self.pid = self._process.pid
        self.name = f"process {self.pid}"

    def wait(self) -> str:
        return f"has ended with status {self._process.wait()}"

    def kill(self) -> None:
        self._process.kill()


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a group waits.

    Attributes:
        join: until all ranks' programs have begun.
        silence: without a sign of life of a rank, or of the driver; 30 at least until a rank's program has begun. None:
            for ever.
    """

    join: float = JOIN_SECONDS
    silence: float | None = None


def address_towards(host: str) -> str:
    """Return this machine's own IPv4 address in the network that leads to a host. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, 9))  # a datagram socket only looks up the way
        return str(asking.getsockname()[0])


class _Line:
    """The end of a connection that frames are sent into, each as a whole, by one thread and the signs of life."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._can_take = select.poll()
        self._can_take.register(connection, select.POLLOUT)
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        self._send(len(frame), frame)

    def send_aside(self, message: Mapping[str, object]) -> None:
        frame = json.dumps(message).encode()
        self._send(len(frame) | _ASIDE, frame)

    def _send(self, count: int, frame: bytes) -> None:
        with self._lock:
            self.connection.sendall(count.to_bytes(8))
            self.connection.sendall(frame)

    def sign(self) -> None:
        """Give a sign of life, without waiting; a frame that is on its way is one, too."""
        if self._lock.acquire(blocking=False):
            try:
                # Where the other end is stopped, what it has not read fills the socket, and this would wait for ever.
                if self._can_take.poll(0):
                    self.connection.sendall(bytes(8))
            finally:
                self._lock.release()


class _Member:
    """A rank, as the driver sees it."""

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.started = threading.Event()  # there is a handle, which may be later than the process has joined
        self.end: str | None = None  # how its process ended
        self.ended = threading.Event()
        self.line: _Line | None = None
        self.joined = threading.Event()
        self.frames: queue.Queue[bytes] = queue.Queue(_NUM_WAITING)
        self.asides: queue.Queue[bytes] = queue.Queue()
        self.heard = time.monotonic()
        self.is_unread = False  # its frames wait for us: it has nothing to answer for


class Ranks:
    """A group of ranks, as the driver sees it.

    Args:
        starts: one for each rank that is started; they are numbered from `first` on.
        host: of this machine, where the ranks can reach it.
        on_loss: told the reason, in any thread, once the others have been killed; not after `close`.
        log: where the ranks print; a reason ends with its last line since the start.

    Raises:
        RanksLostError: a rank did not come up.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        *,
        first: int = 0,
        host: str = LOOPBACK,
        patience: Patience | None = None,
        on_loss: Callable[[str], None] = lambda _: None,
        log: Path | None = None,
    ) -> None:
        self._log = log
        self._log_begin = log.stat().st_size if log is not None and log.exists() else 0
        self._patience, self._on_loss = patience or Patience(), on_loss
        self._members = {first + k: _Member() for k in range(len(starts))}
        self._reason: str | None = None
        self._is_over = threading.Event()  # `_reason` says all
        self._lock = threading.Lock()
        self._secret = secrets.token_hex(16)
        self._listener = socket.create_server((host, 0))
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank, start), daemon=True)
            for rank, start in zip(self._members, starts, strict=True)
        ]
        self._connections: dict[socket.socket, threading.Thread] = {}  # and their readers
        self._others = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._keep_in_touch)]
        for thread in (*self._watchers, *self._others):
            thread.start()
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Where the ranks connect."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def handles(self) -> list[Handle]:
        """The processes, by rank."""
        return [member.handle for member in self._members.values() if member.handle is not None]

    def send(self, head: Mapping[str, object], bodies: Iterable[bytes] = (), *, num_bodies: int = 0) -> None:
        """Send every rank a message: JSON, and then bodies, which are made one at a time.

        Raises:
            RanksLostError: a rank was lost.
        """
        for frame in _frames_of(head, bodies, num_bodies):
            self._to_all(partial(_Line.send, frame=frame))

    def receive(self, rank: int, *, max_seconds: float | None = None) -> tuple[Any, Iterator[bytes]]:
        """Return a rank's next message (Any: JSON) and its bodies, of which each must be read; then the next may come.

        Raises:
            RanksLostError: a rank was lost; also while the bodies are read.
        """
        frames = self._members[rank].frames
        head = json.loads(self._next(rank, frames, max_seconds))
        return head, (self._next(rank, frames, max_seconds) for _ in range(head.pop(_COUNT)))

    def send_aside(self, message: Mapping[str, object]) -> None:
        """Send every rank an aside (JSON), in any thread, also while another one sends or receives messages.

        Raises:
            RanksLostError: a rank was lost.
        """
        self._to_all(partial(_Line.send_aside, message=message))

    def receive_aside(self, rank: int) -> Any:
        """Return a rank's next aside (Any: JSON), in one thread at a time; it may take as long as it takes.

        Raises:
            RanksLostError: a rank was lost.
        """
        return json.loads(self._next(rank, self._members[rank].asides, None))

    def give_up(self, reason: str) -> None:
        """End all ranks for this reason; of several reasons the first counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        # What killed the first takes a moment to be known; what the others say is a consequence.
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for member in self._members.values():
            member.ended.wait(max(0.0, deadline - time.monotonic()))
        ended = [
            f"rank {rank} ({_name(member)}) {member.end}"
            for rank, member in self._members.items()
            if member.ended.is_set()
        ]
        self._reason = "; ".join([reason, *(line for line in ended if line != reason)]) + self._last_line()
        self._end_all()
        self._on_loss(self._reason)

    def close(self) -> None:
        """End all ranks, and wait until they are gone. Closing twice is fine."""
        with self._lock:
            is_first, self._reason = self._reason is None, self._reason or "the group was closed"
        if is_first:
            self._end_all()
        with contextlib.suppress(OSError):  # of another close
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes `accept`; closing does not
        for thread in (*self._watchers, *self._others):
            thread.join(_END_SECONDS)
        self._listener.close()
        for connection, reader in [*self._connections.items()]:
            with contextlib.suppress(OSError):  # the other end is gone
                connection.shutdown(socket.SHUT_RDWR)
            reader.join(_END_SECONDS)
            connection.close()

    def _to_all(self, send: Callable[[_Line], None]) -> None:
        for rank, member in self._members.items():
            assert member.line is not None
            try:
                send(member.line)
            except OSError as error:
                self.give_up(f"rank {rank} cannot be reached: {error}")
                raise self._loss() from error

    def _last_line(self) -> str:
        if self._log is None:
            return ""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._log_begin)
            lines = file.read().decode(errors="replace").strip().splitlines()
            return f"; {self._log}" + (f" ends with: {shortened(lines[-1], 300)}" if lines else " has nothing of them")
        return ""

    def _loss(self) -> RanksLostError:
        self._is_over.wait()
        return RanksLostError(str(self._reason))

    def _next(self, rank: int, frames: queue.Queue[bytes], max_seconds: float | None) -> bytes:
        deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
        while self._reason is None:
            left = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(queue.Empty):
                return frames.get(timeout=min(left, _LOOK_SECONDS))
            if left == 0.0:
                self.give_up(f"rank {rank} was not done after {max_seconds:g} seconds")
        raise self._loss()

    def _watch(self, rank: int, start: Start) -> None:
        # One thread starts a process and waits for it: its end would be the process's.
        member = self._members[rank]
        place = {"rank": rank, "address": self.address, "secret": self._secret, "silence": self._patience.silence}
        try:
            handle = start({RANK_VARIABLE: json.dumps(place)})
        except Exception as error:  # of whatever starts it; else all would wait for a rank that never comes
            member.end = f"could not be started: {error}"
            member.ended.set()
            self.give_up(f"rank {rank} ({_name(member)}) {member.end}")
            return
        member.handle = handle
        member.started.set()
        if self._reason is not None:  # the group ended meanwhile
            handle.kill()
        member.end = handle.wait()
        member.ended.set()
        self.give_up(f"rank {rank} ({handle.name}) {member.end}")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                reader = threading.Thread(target=self._admit, args=(connection,), daemon=True)
                self._connections[connection] = reader
                reader.start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_END_SECONDS)  # a stranger may send nothing
            hello = json.loads(receive_frame(connection, most=1000))
            member = self._members[hello["rank"]]
            is_ours = hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode())
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            is_ours = False
        if not is_ours or member.line is not None:
            self._connections.pop(connection, None)
            connection.close()
            return
        try:
            connection.settimeout(None)
            member.line, member.heard = _Line(connection), time.monotonic()
        except OSError as error:  # it has gone again, or the group was closed
            self.give_up(f"rank {hello['rank']} cannot be reached: {error}")
            return
        self._read(hello["rank"], member, connection)

    def _read(self, rank: int, member: _Member, connection: socket.socket) -> None:
        try:
            while True:
                frame, is_aside = _receive_any(connection)
                if is_aside:
                    member.asides.put(frame)
                elif frame and member.joined.is_set():
                    self._keep(member, frame)
                elif frame:  # its first says that its program has begun
                    member.joined.set()
                member.heard = time.monotonic()
        except (OSError, EOFError):
            self.give_up(f"rank {rank} has closed its connection")

    def _keep(self, member: _Member, frame: bytes) -> None:
        member.is_unread = True
        while member.is_unread and self._reason is None:
            with contextlib.suppress(queue.Full):
                member.frames.put(frame, timeout=_LOOK_SECONDS)
                member.is_unread = False

    def _meet(self) -> None:
        deadline = time.monotonic() + self._patience.join
        for rank, member in self._members.items():
            while not (member.joined.wait(0.05) and member.started.wait(0.05)):
                if self._reason is None and time.monotonic() > deadline:
                    self.give_up(f"rank {rank} did not come up within {self._patience.join:g} seconds")
                if self._reason is not None:
                    raise self._loss()

    def _keep_in_touch(self) -> None:
        silence = self._patience.silence or math.inf
        looked = time.monotonic()
        while silence < math.inf and not self._is_over.wait(silence / 5):
            before, looked = looked, time.monotonic()
            for rank, member in self._members.items():
                if member.line is None:
                    continue
                with contextlib.suppress(OSError):  # its reader notices
                    member.line.sign()
                if looked - before > silence:  # this process was stopped, and heard nothing
                    member.heard = looked
                limit = silence if member.joined.is_set() else max(silence, _STARTING_SECONDS)
                if not member.is_unread and looked - member.heard > limit:
                    self.give_up(f"rank {rank} ({_name(member)}) was not heard of for {limit:g} seconds")

    def _end_all(self) -> None:
        for member in self._members.values():
            if member.handle is not None:
                member.handle.kill()
            if member.line is not None:
                with contextlib.suppress(OSError):
                    member.line.connection.shutdown(socket.SHUT_RDWR)
        self._is_over.set()


def _name(member: _Member) -> str:
    return "not started" if member.handle is None else member.handle.name


_PARENT_VARIABLE = "GSPO_GYM_RANK_PARENT"
_COUNT = "num_bodies"
_ASIDE = 1 << 63  # of a frame's count


class Rank:
    """A rank's own end of its group, of which a process has one: `here`.

    It ends this process at once when the driver is gone or silent, also while a collective waits for a lost rank.

    Attributes:
        rank: its number.
        host: address of this process's machine in the network that leads to the driver.
    """

    def __init__(self) -> None:
        # A thread of ours would need the interpreter's lock, which torch may keep while it waits for a lost rank.
        if (parent := os.environ.pop(_PARENT_VARIABLE, None)) is not None:
            die_with_parent(int(parent))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # they are for the driver, which ends its ranks
        place = json.loads(os.environ.pop(RANK_VARIABLE))
        self.rank: int = place["rank"]
        self._line = _Line(socket.create_connection(tuple(place["address"])))
        self.host: str = self._line.connection.getsockname()[0]
        self._frames: queue.Queue[bytes] = queue.Queue(_NUM_WAITING)
        self._asides: queue.Queue[bytes] = queue.Queue()
        self._line.send(json.dumps({"rank": self.rank, "secret": place["secret"]}).encode())
        silence = place["silence"]
        if silence is not None:
            threading.Thread(target=self._keep_in_touch, args=(silence / 5,), daemon=True).start()
        threading.Thread(target=self._read, args=(silence,), daemon=True).start()

    @classmethod
    def here(cls) -> Rank:
        """Return the rank that this process is, and tell the driver that its program has begun."""
        rank = _JOINED.pop() if _JOINED else cls()
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        rank._line.send(b"begun")
        return rank

    def receive(self) -> tuple[Any, Iterator[bytes]]:
        """Return the next message (Any: JSON) and its bodies, of which each must be read before the next message."""
        head = json.loads(self._frames.get())
        return head, (self._frames.get() for _ in range(head.pop(_COUNT)))

    def send(self, head: Mapping[str, object], bodies: Iterable[bytes] = (), *, num_bodies: int = 0) -> None:
        """Send the driver a message; see `Ranks.send`."""
        for frame in _frames_of(head, bodies, num_bodies):
            self._line.send(frame)

    def receive_aside(self) -> Any:
        """Return the driver's next aside (Any: JSON), in a thread that does nothing else."""
        return json.loads(self._asides.get())

    def send_aside(self, message: Mapping[str, object]) -> None:
        """Send the driver an aside, in any thread."""
        self._line.send_aside(message)

    def end(self, reason: str) -> NoReturn:
        """End this process for a reason, one line: the driver's log is read by its end."""
        print(f"rank {self.rank}: {reason}".partition("\n")[0], file=sys.stderr, flush=True)
        os._exit(1)  # and not by way of destructors, which wait for the other ranks

    def _read(self, silence: float | None) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                frame, is_aside = _receive_any(self._line.connection, silence=silence)
                if is_aside:
                    self._asides.put(frame)
                elif frame:
                    self._frames.put(frame)
        os._exit(0)

    def _keep_in_touch(self, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(seconds)
                self._line.sign()


_JOINED: list[Rank] = []  # this process, until its program asks for it


def be(module: str, arguments: Sequence[str]) -> None:
    """Join, where the environment names a rank, and be `python -m MODULE ARGUMENTS`; return when it ends."""
    if RANK_VARIABLE in os.environ:
        _JOINED.append(Rank())
        gc.disable()  # while the program imports: looking for garbage takes a fifth of the time for torch
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def _frames_of(head: Mapping[str, object], bodies: Iterable[bytes], num_bodies: int) -> Iterator[bytes]:
    yield json.dumps({**head, _COUNT: num_bodies}).encode()
    yield from bodies


def receive_frame(connection: socket.socket, *, most: float = math.inf, silence: float | None = None) -> bytes:
    """Return the next frame, of `most` bytes; the next byte must come within `silence` seconds.

    Raises:
        EOFError: the other end is closed. ValueError: it is longer. TimeoutError: nothing came.
    """
    count = int.from_bytes(_receive(connection, 8, silence))
    if count > most:
        raise ValueError(f"expected a frame of {most:g} bytes at most, got one of {count}")
    return _receive(connection, count, silence)


def _receive_any(connection: socket.socket, *, silence: float | None = None) -> tuple[bytes, bool]:
    """Return the next frame, and whether it is an aside; errors as in `receive_frame`."""
    count = int.from_bytes(_receive(connection, 8, silence))
    return _receive(connection, count & ~_ASIDE, silence), bool(count & _ASIDE)


def _receive(connection: socket.socket, count: int, silence: float | None) -> bytes:
    received = bytearray(count)
    view = memoryview(received)
    while view:
        # Not the socket's own time-out, which would bound what is sent, too.
        if silence is not None and not select.select([connection], [], [], silence)[0]:
            raise TimeoutError(f"nothing came for {silence:g} seconds")
        if not (size := connection.recv_into(view)):
            raise EOFError("the other end is closed")
        view = view[size:]
    return bytes(received)


if __name__ == "__main__":
    # Under its name, by which the program finds the rank.
    importlib.import_module("gspo_gym.base.ranks").be(sys.argv[1], sys.argv[2:])
