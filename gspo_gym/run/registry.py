"""The runs below a folder: status, progress and results of each, and room for a new run.

All is read from the runs' folders: there is no database or index that could be out of date. An earlier run in the
folder of a new one is moved aside, and back if the start fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.base.files import flat_items, make_folder, writing
from gspo_gym.errors import ConfigError, GymError, RecordError, StorageError
from gspo_gym.policy.checkpoint_folder import CheckpointFolder
from gspo_gym.rollout.evaluation import Evaluation, compare
from gspo_gym.run.folders import run_folders
from gspo_gym.run.process import (
    LOCK_FILE,
    PROCESS_FILE,
    ProcessInfo,
    holder_of,
    holding,
    is_locked,
    locked,
    read_phase,
    read_process,
    refusal,
)
from gspo_gym.run.records import EVENTS_FILE, RUN_LINE, read_config, read_events, read_summary
from gspo_gym.run.report.progress import Progress

RUNNING, ELSEWHERE, CRASHED, DAMAGED = "running", "elsewhere", "crashed", "damaged"
_TAIL_BYTES = 64 * 1024
# Of where a run is, and no setting of it.
PLACE = ("run.folder", "model.label")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as its folder shows it.

    Attributes:
        status: while a process holds the folder, "running" or "elsewhere" (a process of another machine, which this
            one cannot see, has not recorded its end); else how the last process ended: "completed", "interrupted",
            "failed", or "crashed" if it recorded no end. "damaged": its records cannot be read.
        run: the id; None in a folder of an early version.
        attempt: number of the process that holds the folder, or held it last.
        pid, host: of that process; None: unknown.
        updated: time of the last event, in seconds since 1970.
        step: the last recorded one.
        score, value: the name and the value of the last evaluation's score; None before the first.
        wall_seconds, sampled_tokens, trained_tokens: None until the run has ended.
        error: why it failed, or cannot be read; None if neither.
        phase: what the process that holds the folder is doing, one of `process.PHASES`; None: none holds it.
        doing: the phase for people, with how much of it is done.
    """

    folder: Path
    status: str
    run: str | None = None
    attempt: int = 1
    pid: int | None = None
    host: str | None = None
    updated: float = 0.0
    step: int = 0
    score: str | None = None
    value: float | None = None
    wall_seconds: float | None = None
    sampled_tokens: int | None = None
    trained_tokens: int | None = None
    error: str | None = None
    phase: str | None = None
    doing: str | None = None

    @property
    def is_held(self) -> bool:
        """Return whether a process may be at work on the run."""
        return self.status in (RUNNING, ELSEWHERE)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON values."""
        return dataclasses.asdict(self) | {"folder": str(self.folder)}


def list_runs(folder: Path) -> list[RunInfo]:
    """Return the runs in a folder and up to three levels below it, the last updated first.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    return sorted(map(read_run, run_folders(folder)), key=lambda run: -run.updated)


def read_run(folder: Path) -> RunInfo:
    """Return a run's present state from its folder."""
    try:
        return _read_run(folder)
    # One damaged record must not hide all other runs of a list.
    except (ArithmeticError, AttributeError, LookupError, StorageError, TypeError, ValueError) as error:
        return RunInfo(folder, DAMAGED, updated=_change_time(folder), error=f"its records cannot be read: {error!r}")


def _read_run(folder: Path) -> RunInfo:
    # First the lock, then the records: a run that ends in between has said how, and is not taken for crashed.
    holder = holder_of(folder)
    path = f"{folder}/{EVENTS_FILE}"
    last = _last_line(_read(path, _TAIL_BYTES), but="sink_failed")  # which a sink that cannot close is after the end
    end_data = last["data"] if last.get("kind") == "finished" else {}
    process = holder if holder is not None else read_process(folder)
    summary = _summary_of(folder, last) if end_data and holder is None else {}
    phase = None if holder is None else read_phase(folder)
    events = b"" if summary else _read(path)  # all of them only for what a summary does not say
    evaluation = summary.get("final_eval") or _last_evaluation(events)
    score = evaluation.get("score")
    return RunInfo(
        folder=folder,
        status=str(end_data.get("status", CRASHED)) if holder is None else _live_status(folder, holder),
        run=_run_id(folder),
        attempt=1 if process is None else process.attempt,
        pid=None if process is None else process.pid,
        host=None if process is None else process.host or None,
        updated=_change_time(folder),
        step=int(summary["steps"] if summary else _last_step(folder)),
        score=score,
        value=None if score is None else _number(evaluation.get(score)),
        wall_seconds=_number(summary.get("wall_seconds")),
        sampled_tokens=_number(summary.get("sampled_tokens")),
        trained_tokens=_number(summary.get("trained_tokens")),
        error=end_data.get("error") if holder is None else None,
        phase=None if phase is None else phase.name,
        doing=None if phase is None else str(phase),
    )


def require_removable(folder: Path, *, also: Collection[Path] = ()) -> None:
    """Raise if a run is in use: by a process, or as the model that another run beside it began from.

    Args:
        also: runs that are removed, too.

    Raises:
        ConfigError: it is in use; or it is a link, whose target is the run.
    """
    if folder.is_symlink():
        raise ConfigError(f"{folder}: is a link; name the run itself, which is {folder.resolve()}")
    holder = holder_of(folder)
    if holder is not None:
        raise ConfigError(refusal(folder, holder))
    removed_folders = {path.resolve() for path in (folder, *also)}
    for run_folder in run_folders(folder.resolve().parent):
        base = None if run_folder.resolve() in removed_folders else _base_of(run_folder)
        if base is not None and folder.resolve() in (base, *base.parents):
            raise ConfigError(
                f"{folder}: {run_folder} began from its checkpoint, which it still needs; remove that first"
            )


def remove_run(folder: Path, *, also: Collection[Path] = ()) -> None:
    """Remove a run with all its records and checkpoints; `also`: as for `require_removable`.

    Raises:
        ConfigError: it is in use, see `require_removable`.
        StorageError: a file in it cannot be removed.
    """
    require_removable(folder, also=also)
    folder = folder.resolve()  # "." has no name
    with locked(folder), writing(folder):
        # Gone at once for everything that looks for runs, also if removing the files is interrupted.
        hidden_folder = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
        folder.rename(hidden_folder)
        shutil.rmtree(hidden_folder)


def _base_of(folder: Path) -> Path | None:
    """Return the folder on this disk from which a run took its model; None without one."""
    try:
        model_section = read_config(folder).get("model", {})
        base, source = model_section.get("base"), model_section.get("source")
        # As `model.source` names runs: LABEL, or PREFIX:LABEL[:step_N], in the folder of this one.
        label = None if source is None else re.sub(r"^[a-z]+:|:step_\d+$", "", source)
        path = folder.parent / label if label else None if base is None else Path(base).expanduser()
        return path.resolve() if path is not None and path.is_dir() else None
    except (GymError, AttributeError, OSError, TypeError, ValueError):  # then nothing is known of it
        return None


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        runs: in the order asked for.
        settings: by key, the value of each run (None: it has no such key), where they differ.
        evaluations: for each run after the first, its last evaluation against the first run's, seed by seed, as JSON
            values; or a sentence on why they cannot be compared.
    """

    runs: tuple[RunInfo, ...]
    settings: Mapping[str, tuple[Any, ...]]  # Any: TOML values
    evaluations: tuple[dict[str, Any] | str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "runs": [run.to_dict() for run in self.runs],
            "settings": {key: list(values) for key, values in self.settings.items()},
            "evaluations": [
                {"error": evaluation} if isinstance(evaluation, str) else evaluation for evaluation in self.evaluations
            ],
        }


def compare_runs(folders: Sequence[Path]) -> RunComparison:
    """Compare each run with the first.

    Raises:
        RecordError: a config or an event cannot be read.
    """
    tables = [dict(flat_items(read_config(folder))) for folder in folders]
    keys = sorted({key for table in tables for key in table if key not in PLACE})
    values = {key: tuple(table.get(key) for table in tables) for key in keys}
    evaluations = [last_evaluation(folder) for folder in folders]
    return RunComparison(
        runs=tuple(read_run(folder) for folder in folders),
        settings={key: row for key, row in values.items() if any(value != row[0] for value in row)},
        evaluations=tuple(_compare(evaluations[0], evaluation) for evaluation in evaluations[1:]),
    )


def last_evaluation(folder: Path) -> Evaluation | None:
    """Return a run's last evaluation with its rows; None before the first.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        events = [event["data"] for event in read_events(folder) if event["kind"] == "evaluation"]
        return Evaluation.from_dict(events[-1]) if events else None
    except (AttributeError, LookupError, OSError, TypeError) as error:
        raise RecordError(f"{folder}: its last evaluation has no known form: {error!r}") from error


def _compare(first: Evaluation | None, second: Evaluation | None) -> dict[str, Any] | str:
    if first is None or second is None:
        return "a run without an evaluation"
    try:
        return compare(first, second).to_dict()
    except ConfigError as error:
        return str(error)


def _read(path: str, tail: int | None = None) -> bytes:
    """Return a file's bytes, or its last `tail` ones; b"" if there is no such file."""
    try:
        with open(path, "rb", buffering=0) as file:  # unbuffered: thousands of files are read once each
            if tail is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
            return file.read()
    except OSError:
        return b""


def _last_line(data: bytes, *, but: str = "") -> dict[str, Any]:
    """Return the last whole line that is not of the kind `but`; {} if it is not JSON, or there is none."""
    complete_lines = data[: data.rfind(b"\n") + 1]
    start = complete_lines.rfind(b"\n", 0, -1) + 1
    line = _json(complete_lines[start:])
    return _last_line(complete_lines[:start], but=but) if but and line.get("kind") == but else line


def _number(value: Any) -> Any:
    """Return a value of a record that is a number, or None (Any: JSON)."""
    return value if isinstance(value, (int, float)) else None


def _json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _last_evaluation(events: bytes) -> dict[str, Any]:
    # Searched as bytes: parsing every event of thousands of runs takes too long.
    position = events.rfind(b'"kind": "evaluation"')
    if position < 0:
        return {}
    start, stop = events.rfind(b"\n", 0, position) + 1, events.find(b"\n", position)
    return dict(_json(events[start:stop]).get("data", {}))


def _live_status(folder: Path, holder: ProcessInfo) -> str:
    return ELSEWHERE if holder.is_elsewhere and not is_locked(folder) else RUNNING


def _summary_of(folder: Path, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return summary.json if it belongs to this end of the run, else {}."""
    summary = _json(_read(f"{folder}/summary.json"))
    # The summary of an earlier end may still be there.
    is_same = (summary.get("status"), summary.get("steps")) == (event["data"].get("status"), event["step"])
    return summary if is_same else {}


def _last_step(folder: Path) -> int:
    return int(_last_line(_read(f"{folder}/metrics.jsonl", _TAIL_BYTES)).get("step", 0))


def _run_id(folder: Path) -> str | None:
    with (folder / "config.toml").open("rb") as file:
        line = file.readline(200).decode(errors="replace").strip()
    return line.removeprefix(RUN_LINE) if line.startswith(RUN_LINE) else None


def _change_time(folder: Path) -> float:
    try:
        return (folder / EVENTS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run's folder has a checkpoint to go on from."""
    # A kill while a checkpoint was being replaced leaves the older one under another name until it is loaded.
    return bool(_checkpoint_steps(folder)) or any((folder / "checkpoints").glob(".replaced_*"))


def why_taken(folder: Path) -> str | None:
    """Return a sentence about the run that is in the folder already, or None if a new one may begin there."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if (holder := holder_of(folder)) is not None:
        return refusal(folder, holder)
    if is_left_by_a_start(folder) or _failed_without_a_step(folder):
        return None
    go_on = "go on with it (--resume)" if _checkpoint_steps(folder) else "it has no checkpoint to go on from"
    return f"{folder} already holds a run: {go_on}, move it away first (--set-aside), or choose another model.label"


def _failed_without_a_step(folder: Path) -> bool:
    """Return whether the folder's run ended with nothing to go on from; another run may then take its place."""
    steps = _checkpoint_steps(folder)
    if not (folder / "summary.json").exists() or any(steps):
        return False
    # What failed before the first step fails again, as a rule; what was stopped there can go on.
    return read_summary(folder)["status"] in (("failed",) if steps else ("failed", "interrupted"))


def _checkpoint_steps(folder: Path) -> tuple[int, ...]:
    return CheckpointFolder(folder / "checkpoints").steps()


@contextlib.contextmanager
def folder_of_a_new_run(folder: Path, progress: Progress) -> Iterator[Callable[[], None]]:
    """Make and hold the folder, and move an earlier run aside; undo both unless the block calls the yielded function.

    Raises:
        StorageError: the folder cannot be made, or not written to.
        ConfigError: another process holds it.
    """
    missing = [path for path in folder.parents if not path.exists()]
    earlier = _clear(folder, progress)
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        keep()
        has_begun = True

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: None if has_begun else _undo(folder, earlier, missing))
        make_folder(folder)
        keep = stack.enter_context(holding(folder, progress.note, has_begun=False))
        # While it is held: afterwards it may be another process's.
        stack.callback(lambda: None if has_begun else shutil.rmtree(folder, ignore_errors=True))
        if earlier is not None:
            progress.note(f"the run that was in {folder} is in {earlier} now")
        yield begin


def is_left_by_a_start(folder: Path) -> bool:
    """Return whether a folder holds only files of a process that was killed before its run began."""
    return holder_of(folder) is None and _has_not_begun(folder)


def _has_not_begun(folder: Path) -> bool:
    last = read_process(folder)
    if last is not None:
        return not last.has_begun
    return {path.name for path in folder.iterdir()} <= {LOCK_FILE, f".{PROCESS_FILE}.tmp"}


def _clear(folder: Path, progress: Progress) -> Path | None:
    """Remove what a killed start left, or rename an earlier run to the first free FOLDER.1, FOLDER.2, ...

    Returns:
        The earlier run's new folder; None if there was no run. A run is never deleted.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    with locked(folder, progress.note):
        if _has_not_begun(folder):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        number = 1
        while (target := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        with writing(target):
            folder.rename(target)
        (target / LOCK_FILE).unlink(missing_ok=True)
        return target


def _undo(folder: Path, earlier: Path | None, missing: Sequence[Path]) -> None:
    """Move an earlier run back, and remove the folders made for the run that did not start."""
    with contextlib.suppress(OSError):
        folder.rmdir()  # empty, unless it is another process's
    if earlier is not None and not folder.exists():
        earlier.rename(folder)
    for path in missing:
        with contextlib.suppress(OSError):  # it was never made, or holds another run by now
            path.rmdir()
