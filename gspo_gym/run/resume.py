"""What a resumed run does again leaves its records: moved into discarded/, so that no step is recorded twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_gym.base.files import replace_file
from gspo_gym.rollout.ledger import close_lost, entry_to_json, read_ledger

LEDGER_FILE = "ledger.jsonl"
# Of the run as a whole, and true whatever is done again.
_LIFE = ("started", "resumed", "finished")

Line = Mapping[str, Any]  # a line of a record: JSON


def discard_later(
    folder: Path,
    step: int,
    *,
    metrics: Sequence[Line],
    events: Sequence[Line],
    episode_files: Sequence[Path],
    is_played_again: Callable[[str], bool],
) -> dict[str, Any]:
    """Move what was recorded after the checkpoint of `step` into a new folder in discarded/.

    Args:
        folder: of the run.
        step: after which the checkpoint was saved.
        metrics, events: the lines of the run.
        episode_files: those of later steps.
        is_played_again: whether the ledger's entries of a trajectory id go: it is played again.

    Attempts that stay and had no end, because their process was killed, get one in the ledger.

    Returns:
        What moved, as JSON values; {} if nothing did.
    """
    later_metrics = [line for line in metrics if line["step"] > step]
    kept_events, later_events = _split_events(events, step)
    path = folder / LEDGER_FILE
    entries = read_ledger(path) if path.exists() else ()
    later_entries = [entry for entry in entries if is_played_again(entry.trajectory_id)]
    kept_entries = [entry for entry in entries if not is_played_again(entry.trajectory_id)]
    ends = close_lost(kept_entries)
    data = {}
    if later_metrics or later_events or later_entries or episode_files:
        target = folder / "discarded" / f"resume_{1 + sum(1 for _ in (folder / 'discarded').glob('resume_*')):03d}"
        target.mkdir(parents=True)
        # The copies are complete before an original is cut, so a crash in between duplicates and loses nothing.
        _write(target / "metrics.jsonl", later_metrics)
        _write(target / "events.jsonl", later_events)
        _write(target / LEDGER_FILE, [entry_to_json(entry) for entry in later_entries])
        _write(folder / "metrics.jsonl", [line for line in metrics if line["step"] <= step])
        _write(folder / "events.jsonl", kept_events)
        for each in episode_files:
            each.replace(target / each.name)
        data = {
            "folder": str(target.relative_to(folder)),
            "metrics_lines": len(later_metrics),
            "event_lines": len(later_events),
            "ledger_lines": len(later_entries),
            "episode_files": len(episode_files),
        }
    if later_entries or ends:
        _write(path, [entry_to_json(entry) for entry in (*kept_entries, *ends)])
    return data


def _split_events(events: Sequence[Line], step: int) -> tuple[list[Line], list[Line]]:
    """Return the events that stay, and those of what is done again: after the last checkpoint of `step`.

    A process that was killed between saving it and saying so leaves no such event; then the steps decide.
    """
    saved = [i for i, event in enumerate(events) if event["kind"] == "checkpoint" and event["step"] == step]
    end = saved[-1] if saved else len(events)
    is_kept = [event["step"] <= step and (i <= end or event["kind"] in _LIFE) for i, event in enumerate(events)]
    kept = [event for event, stays in zip(events, is_kept, strict=True) if stays]
    return kept, [event for event, stays in zip(events, is_kept, strict=True) if not stays]


def _write(path: Path, lines: Sequence[Line]) -> None:
    replace_file(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
