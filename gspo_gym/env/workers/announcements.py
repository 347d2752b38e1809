"""A board in shared memory that says which environment each thread is running.

Another process can read it even if C code in this one (a regular expression that never ends) holds the interpreter's
lock and stops every thread. Nothing is written while no board is open.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

NUM_SLOTS, SLOT_BYTES = 1024, 256
_HEADER = struct.Struct("=QH")  # the thread's id in the kernel (0 for an empty slot), the length of the text


class Board:
    """The board: one slot of fixed size for each thread, as long as slots last."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._num_taken = 0
        self._slots = threading.local()

    def write(self, text: str) -> None:
        """Announce what this thread is running; "" clears its slot."""
        slot = self._slot()
        if slot is None:
            return
        data = text.encode("utf-8", "replace")[: SLOT_BYTES - _HEADER.size]
        # The id is written last: a reader in between finds an empty slot, not half a text.
        self._memory[slot : slot + _HEADER.size] = _HEADER.pack(0, len(data))
        self._memory[slot + _HEADER.size : slot + _HEADER.size + len(data)] = data
        if data:
            self._memory[slot : slot + _HEADER.size] = _HEADER.pack(threading.get_native_id(), len(data))

    def _slot(self) -> int | None:
        if not hasattr(self._slots, "offset"):
            with self._lock:
                number, self._num_taken = self._num_taken, self._num_taken + 1
            self._slots.offset = number * SLOT_BYTES if number < NUM_SLOTS else None
        offset: int | None = self._slots.offset
        return offset


class _Open:
    """The open board; module state because threads of any owner write to it."""

    board: Board | None = None


def open_board(memory: mmap.mmap) -> None:
    """Open a board in `memory`, which has NUM_SLOTS * SLOT_BYTES bytes."""
    _Open.board = Board(memory)


def is_board_open() -> bool:
    """Return whether this process is watched."""
    return _Open.board is not None


def close_board() -> None:
    """Stop announcing."""
    _Open.board = None


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Announce the block as this thread's work."""
    board = _Open.board
    if board is None:
        yield
        return
    board.write(text)
    try:
        yield
    finally:
        board.write("")


def announcing(awaitable: Awaitable[Any], text: str) -> Awaitable[Any]:
    """Return the awaitable with each of its steps announced; nothing is announced while it waits."""
    return awaitable if _Open.board is None else _AnnouncedSteps(awaitable, text)


class _AnnouncedSteps:
    def __init__(self, awaitable: Awaitable[Any], text: str) -> None:
        self._awaitable, self._text = awaitable, text

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        move: Callable[..., Any] = steps.__next__
        given: tuple[Any, ...] = ()
        while True:
            try:
                with announced(self._text):
                    waits_for = move(*given)
            except StopIteration as done:
                return done.value
            try:
                answer = yield waits_for
            except BaseException as error:  # such as a cancellation: deliver it to the inner awaitable
                throw = getattr(steps, "throw", None)
                if throw is None:
                    raise
                move, given = throw, (error,)
            else:
                send = getattr(steps, "send", None)
                move, given = (send, (answer,)) if send is not None else (steps.__next__, ())
