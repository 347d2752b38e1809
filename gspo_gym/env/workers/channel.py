"""JSON values over a socket, one at a time: four bytes of length, then the text.

What both ends of a worker process's connection use: the parent in its event loop (or, to make an environment, in a
thread), the worker in its own. No pickle: whatever comes out of a worker is data.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from gspo_gym.errors import ContractError

MAX_REQUEST_BYTES = 64 * 2**20  # a conversation, for a player that runs in the worker
MAX_ANSWER_BYTES = 4 * 2**20  # an observation; a context of a million tokens is about as long

_HEADER = struct.Struct("!I")
_CHUNK_BYTES = 256 * 1024
_LOOK_SECONDS = 1.0


class ChannelClosedError(Exception):
    """The other end is gone."""


class Channel:
    """One end of a connection, for one exchange at a time.

    Args:
        connection: a stream socket, which is owned from here on.
        max_bytes: of a value that is received; a longer one is not read.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._max_bytes = max_bytes

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come that was not asked for, neither data nor the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def send(self, frame: bytes) -> None:
        """Send what `frame_of` made.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)
        except ConnectionError as error:
            raise ChannelClosedError from error

    async def receive(self) -> Any:
        """The next value (Any: JSON).

        Raises:
            ChannelClosedError: the other end is gone.
            ContractError: it is longer than allowed, or no JSON; the connection is of no use any more.
        """
        loop = asyncio.get_running_loop()
        incoming = _Incoming(self._max_bytes)
        while not incoming.is_complete:
            try:
                incoming.add(await loop.sock_recv(self._socket, _CHUNK_BYTES))
            except ConnectionError as error:
                raise ChannelClosedError from error
        return incoming.value()

    def exchange(self, frame: bytes, *, max_seconds: Callable[[], float]) -> Any:
        """Send and receive, blocking, without an event loop.

        Args:
            frame: what `frame_of` made.
            max_seconds: that it may take in all; asked again while it waits.

        Raises:
            TimeoutError: no answer in time. Others as `send` and `receive`.
        """
        started = time.monotonic()
        incoming = _Incoming(self._max_bytes)
        try:
            self._socket.settimeout(max_seconds())
            self._socket.sendall(frame)
            while not incoming.is_complete:
                left = started + max_seconds() - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(min(left, _LOOK_SECONDS))
                with contextlib.suppress(TimeoutError):
                    incoming.add(self._socket.recv(_CHUNK_BYTES))
        except ConnectionError as error:
            raise ChannelClosedError from error
        finally:
            self._socket.setblocking(False)
        return incoming.value()

    def close(self) -> None:
        """Hang up; doing it again changes nothing."""
        self._socket.close()


def frame_of(value: Any, *, max_bytes: int, where: str) -> bytes:
    """A JSON value as it is sent.

    Raises:
        ContractError: it is longer than allowed. Starts with `where`.
    """
    payload = json.dumps(value).encode("ascii")  # escapes keep lone surrogates whole
    if len(payload) > max_bytes:
        raise ContractError(f"{where} of {len(payload):,} bytes, at most {max_bytes:,} are passed on")
    return _HEADER.pack(len(payload)) + payload


class _Incoming:
    """The value that is being received."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._length: int | None = None

    @property
    def is_complete(self) -> bool:
        return self._length is not None and len(self._data) >= self._length

    def add(self, chunk: bytes) -> None:
        if not chunk:
            raise ChannelClosedError
        self._data += chunk
        if self._length is None and len(self._data) >= _HEADER.size:
            (self._length,) = _HEADER.unpack_from(self._data)
            del self._data[: _HEADER.size]
        if self._length is not None and max(self._length, len(self._data)) > self._max_bytes:
            raise ContractError(f"a worker process sent {self._length:,} bytes, at most {self._max_bytes:,} are read")

    def value(self) -> Any:
        try:
            return json.loads(self._data)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"a worker process sent no JSON: {error}") from error
