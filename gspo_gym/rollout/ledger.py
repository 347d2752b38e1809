"""The ledger: every attempt that was dispatched, and the one way in which it ended.

Append-only: the file shows afterwards that nothing was lost and nothing counted twice. Memory does not grow with the
length of a run. It decides nothing; the pool writes it.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.base.files import append_line, cut_torn_line
from gspo_gym.errors import RecordError
from gspo_gym.types import Outcome


class Disposition(enum.Enum):
    """Whether a finished attempt is used."""

    KEPT = "kept"  # it is in the group that was handed out
    RETRIED = "retried"  # it failed and another attempt follows
    DROPPED = "dropped"  # nothing of it is used


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Entry of an attempt that starts."""

    trajectory_id: str
    attempt: int
    task_id: str
    env_seed: int
    sampling_seed: int


@dataclass(frozen=True, slots=True)
class Terminal:
    """Entry of an attempt that ended; `reason` says why it was not kept, or which limit an action exceeded."""

    trajectory_id: str
    attempt: int
    outcome: Outcome
    disposition: Disposition
    reason: str | None = None


Entry = Dispatched | Terminal
_Attempt = tuple[str, int]  # trajectory id, attempt
# Ended attempts whose names cannot be taken again. What is settled or begun twice by mistake is so within a step or an
# evaluation, which are much shorter; about 100 bytes each.
MAX_REMEMBERED = 2**16


class Ledger:
    """Record of attempts, which refuses entries that contradict earlier ones.

    Args:
        path: also append each entry to this file, one JSON object a line, before it counts. The folder must exist. What
            earlier processes wrote stays, except a torn last line.
        keeps_entries: hold all entries in memory, for `entries` without a file.
    """

    def __init__(self, path: Path | None = None, *, keeps_entries: bool = False) -> None:
        if path is not None:
            cut_torn_line(path)
        self._path = path
        self._begin = path.stat().st_size if path is not None and path.exists() else 0
        self._entries: list[Entry] | None = [] if keeps_entries else None
        self._in_flight: dict[_Attempt, None] = {}  # in the order in which they were dispatched
        self._settled_hashes: dict[int, None] = {}  # hashes of the last attempts that ended, the oldest first
        self._num_dispatched = 0
        self._num_by_disposition: Counter[Disposition] = Counter()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries of this process, in the order in which they happened.

        Raises:
            RecordError: there is no file, and they are not kept.
        """
        if self._entries is not None:
            return tuple(self._entries)
        if self._path is None:
            raise RecordError("ledger: expected a path or keeps_entries = True, got neither: entries are counted only")
        return read_ledger(self._path, begin=self._begin) if self._path.exists() else ()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def dispatch(self, entry: Dispatched) -> None:
        """Write down that an attempt starts; a RecordError if it is in flight, or ended lately."""
        attempt = (entry.trajectory_id, entry.attempt)
        if attempt in self._in_flight or hash(attempt) in self._settled_hashes:
            raise RecordError(f"ledger: attempt {entry.attempt} of {entry.trajectory_id} was dispatched twice")
        self._append(entry)
        self._in_flight[attempt] = None
        self._num_dispatched += 1

    def settle(self, entry: Terminal) -> None:
        """Write down how an attempt ended; a RecordError if it was never dispatched, or has ended before."""
        attempt = (entry.trajectory_id, entry.attempt)
        if attempt not in self._in_flight:
            state = "ended twice" if hash(attempt) in self._settled_hashes else "ended without having been dispatched"
            raise RecordError(f"ledger: attempt {entry.attempt} of {entry.trajectory_id} {state}")
        self._append(entry)  # before it counts: what cannot be written did not happen
        del self._in_flight[attempt]
        self._num_by_disposition[entry.disposition] += 1
        self._settled_hashes[hash(attempt)] = None
        if len(self._settled_hashes) > MAX_REMEMBERED:  # memory does not grow with the length of a run
            del self._settled_hashes[next(iter(self._settled_hashes))]

    def counts(self) -> dict[str, int]:
        """Return the numbers of attempts dispatched and ended in each disposition, by name."""
        return {"dispatched": self._num_dispatched} | {
            kind.value: self._num_by_disposition[kind] for kind in Disposition
        }

    def assert_balanced(self) -> None:
        """Raise a RecordError that names the first few attempts without a terminal entry."""
        if self._in_flight:
            first = list(self._in_flight)[:5]
            examples = "; ".join(
                f"attempt {attempt} of {name}: dispatched 1, settled 0 times" for name, attempt in first
            )
            raise RecordError(f"ledger: {self.num_in_flight} attempts do not balance: {examples}")

    def _append(self, entry: Entry) -> None:
        if self._path is not None:
            append_line(self._path, json.dumps(entry_to_json(entry)))
        if self._entries is not None:
            self._entries.append(entry)


def imbalances(entries: Iterable[Entry]) -> list[str]:
    """Describe every attempt that was not dispatched once and settled once; empty if the ledger balances."""
    num_dispatched: Counter[tuple[str, int]] = Counter()
    num_settled: Counter[tuple[str, int]] = Counter()
    for entry in entries:
        counter = num_dispatched if isinstance(entry, Dispatched) else num_settled
        counter[entry.trajectory_id, entry.attempt] += 1
    return [
        f"attempt {attempt} of {name}: dispatched {num_dispatched[name, attempt]}, "
        f"settled {num_settled[name, attempt]} times"
        for name, attempt in dict.fromkeys([*num_dispatched, *num_settled])
        if (num_dispatched[name, attempt], num_settled[name, attempt]) != (1, 1)
    ]


def read_ledger(path: Path, *, begin: int = 0) -> tuple[Entry, ...]:
    """Read the entries of a ledger file from the byte `begin` on; a RecordError for a line that is not an entry."""
    entries: list[Entry] = []
    lines = path.read_bytes()[begin:].decode("utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break is empty or torn
        try:
            entries.append(_from_json(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}:{number}: not a ledger entry: {error}") from error
    return tuple(entries)


def close_lost(entries: Iterable[Entry]) -> list[Terminal]:
    """Return an end for every attempt that has none, because the process that played it was killed."""
    open_attempts: dict[tuple[str, int], None] = {}  # in the order in which they were dispatched
    for entry in entries:
        if isinstance(entry, Dispatched):
            open_attempts[entry.trajectory_id, entry.attempt] = None
        else:
            open_attempts.pop((entry.trajectory_id, entry.attempt), None)
    reason = "the process that played it ended"
    return [Terminal(*key, Outcome.CANCELLED, Disposition.DROPPED, reason) for key in open_attempts]


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """Return the JSON values (hence Any) of an entry's line."""
    fields = {name: getattr(entry, name) for name in entry.__dataclass_fields__}
    if isinstance(entry, Terminal):
        fields |= {"outcome": entry.outcome.value, "disposition": entry.disposition.value}
        return {"event": "terminal", **fields}
    return {"event": "dispatched", **fields}


def _from_json(fields: dict[str, Any]) -> Entry:
    event = fields.pop("event")
    if event == "dispatched":
        return Dispatched(**fields)
    if event != "terminal":
        raise ValueError(f"unknown event {event!r}")
    outcome, disposition = Outcome(fields.pop("outcome")), Disposition(fields.pop("disposition"))
    return Terminal(outcome=outcome, disposition=disposition, **fields)
