"""Read the records in a run's folder, also while they are being written.

Every event has a `seq`, 1 for a run's first. No number is given twice: a resumed run counts on from the highest one,
and the events that it discards keep theirs in discarded/. So the events of events.jsonl and of discarded/ together have
no gap, and a reader with a cursor gets each exactly once and in order, also across a resume.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_gym.diagnosis.view import RunView
from gspo_gym.errors import RecordError
from gspo_gym.rollout.episode_files import SCHEMA_VERSION
from gspo_gym.rollout.ledger import Disposition, Terminal, read_ledger
from gspo_gym.types import Outcome

RUN_LINE = "# run "  # and the id, as the first line of config.toml
EVENTS_FILE = "events.jsonl"

Event = dict[str, Any]  # a line of events.jsonl: JSON


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, oldest first, without a torn last one.

    Raises:
        RecordError: another line is damaged; names file and line.
    """
    return LineReader(folder / "metrics.jsonl").read()


def read_events(folder: Path, *, after: int | None = None) -> list[Event]:
    """Return the lines of a run's events.jsonl; see `read_metrics`.

    With `after`, return all events after that `seq` instead, those of discarded/ included; see `EventReader`.
    """
    if after is not None:
        return EventReader(folder, after=after).read()
    return _number_events(LineReader(folder / EVENTS_FILE).read())


class EventReader:
    """Reader of a run's events with a cursor: each `read` returns those that came since.

    Args:
        folder: of the run, which may be running.
        after: the `seq` of the last event that the caller has; 0: none.
    """

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        self._folder = folder
        self._lines = LineReader(folder / EVENTS_FILE)
        self._last_in_file = 0
        self.after = after

    def read(self) -> list[Event]:
        """Return the new events in the order of their `seq`, without a gap. An unfinished line waits.

        Raises:
            RecordError: a line is damaged; names file and line.
        """
        lines = self._lines.read()
        if self._lines.is_from_the_start:
            self._last_in_file = 0
        events_by_seq = {event["seq"]: event for event in _number_events(lines, after=self._last_in_file)}
        self._last_in_file = max(events_by_seq, default=self._last_in_file)
        new = {seq: event for seq, event in events_by_seq.items() if seq > self.after}
        # Only a resumed run leaves a gap, and it has copied the missing lines before it takes them away here.
        if new and len(new) < max(new) - self.after:
            discarded_events = {event["seq"]: event for event in _discarded_events(self._folder)}
            new |= {seq: event for seq, event in discarded_events.items() if self.after < seq < max(new)}
        self.after = max(new, default=self.after)
        return [new[seq] for seq in sorted(new)]


def last_seq(folder: Path) -> int:
    """Return the highest `seq` that an event of the run ever had, or 0."""
    return max((event["seq"] for event in (*_discarded_events(folder), *read_events(folder))), default=0)


TEACHER_EVENT = "teacher"


def read_teacher(folder: Path) -> dict[str, Any] | None:
    """Return what a run has recorded last of the model that teaches it (Any: JSON); None: nothing.

    `teacher` is the configuration's name of it; `vocabulary_sha256`, and `weights_sha256` where it is known; of a model
    there `base`, for `load_policy`, and of a run's checkpoint `run`, `run_id` and `step`; of an endpoint `model` and
    `root`, as it calls them.
    """
    events = read_events(folder) if (folder / EVENTS_FILE).is_file() else []
    found: list[dict[str, Any]] = [event["data"] for event in events if event["kind"] == TEACHER_EVENT]
    return found[-1] if found else None


def teacher_text(facts: Mapping[str, Any]) -> str:
    """Return in words what `read_teacher` gave.

    >>> teacher_text({"teacher": "big@best", "run": "big", "step": 20, "weights_sha256": "ab12" * 16})
    'big@best, checkpoint of step 20 of run big, weights of SHA-256 ab12ab12ab12'
    """
    parts = [str(facts["teacher"])]
    if facts.get("model") is not None:
        parts[0] = f"{facts['model']} at {parts[0]}"
    if facts.get("step") is not None:
        parts.append(f"checkpoint of step {facts['step']} of run {facts['run']}")
    if facts.get("weights_sha256") is not None:
        parts.append(f"weights of SHA-256 {facts['weights_sha256'][:12]}")
    return ", ".join(parts)


def read_run_id(folder: Path) -> str | None:
    """Return the id that a run was given when it began, or None if its folder has none.

    Raises:
        RecordError: config.toml cannot be read, or a line of events.jsonl is damaged.
    """
    # In config.toml, without which nothing can be resumed; runs of an earlier version have it in their first event.
    path = folder / "config.toml"
    try:
        first_line = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from error
    if first_line.startswith(RUN_LINE):
        return first_line.removeprefix(RUN_LINE).strip()
    first = next((event for event in read_events(folder) if event["kind"] == "started"), None)
    return None if first is None else first["data"].get("run")


def read_config(folder: Path, *sections: str) -> dict[str, Any]:
    """Return a run's config.toml (Any: TOML values), in which these sections are.

    Raises:
        RecordError: there is none, or it is damaged: not TOML, no tables, or without one of the sections.
    """
    path = folder / "config.toml"
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from error
    if wrong := [name for name in (*sections, *config) if not isinstance(config.get(name), dict)]:
        raise RecordError(f"{path}: is damaged: expected a table [{wrong[0]}], got {config.get(wrong[0])!r}")
    return config


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary.json.

    Raises:
        RecordError: there is none, or it is not JSON.
    """
    path = folder / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from error
    return summary


def read_view(folder: Path) -> RunView:
    """Return what findings are functions of; a line that a run in progress has half written is left out.

    Raises:
        RecordError: the folder holds no run, or a file is damaged.
    """
    config, ledger = read_config(folder), folder / "ledger.jsonl"
    ends = [entry for entry in (read_ledger(ledger) if ledger.exists() else ()) if isinstance(entry, Terminal)]
    reasons: dict[str, Counter[str]] = {}
    for end in ends:
        is_failure = end.outcome.is_infrastructure_failure and end.disposition is not Disposition.KEPT
        # `actions_exceed_limits` quotes the reason of action limits, which are no failures.
        if end.reason and (is_failure or end.outcome is Outcome.ACTION_LIMIT):
            reasons.setdefault(end.outcome.value, Counter())[end.reason] += 1
    return RunView(
        config=config,
        metrics=read_metrics(folder),
        events=read_events(folder),
        status=read_summary(folder)["status"] if (folder / "summary.json").exists() else None,
        outcomes=Counter(end.outcome.value for end in ends),
        reasons={outcome: counts.most_common(1)[0][0] for outcome, counts in reasons.items()},
    )


def _number_events(lines: list[Event], after: int = 0) -> list[Event]:
    """Return the events with a `seq` each; those of earlier versions have none and are counted."""
    events = []
    for line in lines:
        after = line.get("seq", after + 1)
        events.append({**line, "seq": after})
    return events


def _discarded_events(folder: Path) -> list[Event]:
    """Return the events that resumed runs moved away, except those of earlier versions, without a `seq`."""
    paths = sorted((folder / "discarded").glob(f"resume_*/{EVENTS_FILE}"))
    return [event for path in paths for event in LineReader(path).read() if "seq" in event]


class LineReader:
    """Reader of a record that grows: each `read` returns the whole lines that came since, as JSON objects.

    Attributes:
        is_from_the_start: whether the last `read` began at the start of the file, because it is new or was replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_from_the_start = True
        self._offset = self._number = 0
        self._last = b""

    def read(self) -> list[dict[str, Any]]:
        """Return the new lines; all lines, if the file was replaced.

        Raises:
            RecordError: a line is damaged; names file and line.
        """
        data = self._new_bytes()
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(data.splitlines(keepends=True), start=self._number + 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise RecordError(f"{self.path}:{number}: not JSON: {error}") from error
            if not isinstance(line, dict) or line.get("schema") != SCHEMA_VERSION:
                start = text[:60].decode(errors="replace")
                raise RecordError(f"{self.path}:{number}: expected an object of schema {SCHEMA_VERSION}, got {start!r}")
            lines.append(line)
            self._last = text
        self._offset += len(data)
        self._number += len(lines)
        return lines

    def _new_bytes(self) -> bytes:
        """Return the whole lines after those read before, or all lines of a file that was replaced."""
        self.is_from_the_start = self._offset == 0
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            # A file that was replaced has something else before the place, since no two events are equal.
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self.is_from_the_start = True
                self._offset = self._number = 0
                self._last = b""
                file.seek(0)
            data = file.read()
        return data[: data.rfind(b"\n") + 1]
