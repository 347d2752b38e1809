"""The folder of a run: its configuration, measurements, events, and episodes token by token.

    runs/<label>/
        config.toml         the resolved configuration; its first line is the run's id, which its checkpoints name
        metrics.jsonl       one object a step: {"schema", "step", "time", "group/name": number, ...}
        events.jsonl        {"schema", "seq", "time", "step", "kind", "data"}; `seq` is explained in `run/records.py`
        episodes/*.jsonl.gz one trajectory a line, compressed, see `rollout/episode_files.py`
        tokens/*.safetensors what the learner saw of every sampled token of a step, see `run/tokens.py`
        tokens/*.feedback.jsonl what a teacher with feedback read before each turn of it, see `run/feedback.py`
        summary.json        the results
        checkpoints/        see `checkpoints.py`
        tokenizer.json      of a saved evaluation, which has no checkpoint
        ledger.jsonl        every training attempt that was started, and how it ended, see `rollout/ledger.py`
        judgements.jsonl    if a judge scores: its answers, and the parts of each reward
        process.json        the process that runs it, or did last, see `process.py`
        discarded/          lines and episodes recorded after the checkpoint that a resumed run went on from

Lines are appended, so a killed run leaves whole lines and at most one torn one, which readers leave out and `resume`
removes. `time` is in seconds since 1970.

A resumed run moves the records of steps that it repeats into discarded/: no step is recorded twice.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gspo_gym.base.files import append_line, cut_torn_line, make_folder, replace_file, sync, whole_lines
from gspo_gym.diagnosis.selection import METRICS as SELECTION_METRICS
from gspo_gym.errors import ConfigError, RecordError, nearest_name
from gspo_gym.judge.records import JUDGEMENTS_FILE
from gspo_gym.judge.records import METRICS as JUDGE_METRICS
from gspo_gym.learning.health import METRICS as LEARNING_METRICS
from gspo_gym.remote.apps.metrics import METRICS as APP_METRICS
from gspo_gym.rollout.episode_files import SCHEMA_VERSION, episode_paths, write_episodes
from gspo_gym.rollout.ledger import close_lost, entry_to_json, read_ledger
from gspo_gym.rollout.summary import METRICS as ROLLOUT_METRICS
from gspo_gym.rollout.summary import SOURCE_PREFIX, TERM_PREFIX, TOOL_PREFIX
from gspo_gym.run.feedback import FEEDBACK_METRICS
from gspo_gym.run.feedback_files import feedback_path
from gspo_gym.run.records import EVENTS_FILE, RUN_LINE, last_seq, read_events, read_metrics
from gspo_gym.run.sinks import Sink, episode_rows, evaluation_numbers
from gspo_gym.run.tokens import token_path, token_steps
from gspo_gym.types import Trajectory

# Every number of a metrics line by name; "reward/<term>" is open, because environments name their terms.
METRICS: Mapping[str, str] = MappingProxyType(
    {
        **ROLLOUT_METRICS,
        **SELECTION_METRICS,
        **LEARNING_METRICS,
        **JUDGE_METRICS,
        **APP_METRICS,
        **FEEDBACK_METRICS,
        "batch/constant_group_fraction": "share of groups whose episodes all earned the same, of all that were played",
        "batch/dropped_constant_groups": "groups left out of the batch, because their episodes all earned the same",
        "batch/refilled_groups": "groups played in place of those that teach nothing",
        "batch/num_filtered": "episodes left out of the batch, because their advantages are within filter_eps",
        "batch/num_untrained": "episodes that are compared and not in the batch: no token of theirs is trained on",
        "batch/mean_return": "mean over compared episodes without forks, after step rewards, overlong penalty and clip",
        "batch/overlong_fraction": "share of compared episodes that a limit cut off (turns, context, output tokens)",
        "rollout/staleness_mean": "mean over kept episodes of how many versions the oldest token is behind",
        "rollout/staleness_max": "most versions that a token of a kept episode is behind the weights that are trained",
        "rollout/stale_dropped": "episodes given up in this step, because no update could have used them in time",
        "time/rollout_seconds": "collecting the step's episodes; of those that are played ahead, waiting for them",
        "time/update_seconds": "from the collected episodes to published weights",
        "time/step_seconds": "the whole step, without evaluation and checkpoint",
    }
)

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "frozen": "an environment held the interpreter in an earlier start and now runs in worker processes; data: "
        "which, and for how many seconds",
        "started": "a run began; data: its id, which its checkpoints name",
        "resumed": "a run went on from a checkpoint; data: what of later steps went into discarded/",
        "records_damaged": "records of steps before a resumed run's checkpoint are gone; data: which steps have no "
        "metrics, and how many events are missing",
        "threads": "a run chose torch's numbers of threads while sampling and while learning; data: both",
        "rescored": "an endpoint plays what is learned from, scored by the learner; data: where it is, and of which "
        "distribution the logprobs in its episodes are (none: they are zeros)",
        "teacher": "a run is taught, from its beginning or from where it goes on; data: by which model, digests of its "
        "vocabulary and weights, and of a run's checkpoint the run and step",
        "warmup": "the warm-up ended; data: its losses",
        "evaluation": "data: the evaluation, seed by seed",
        "checkpoint": "a checkpoint is complete; data: its folder",
        "restored": "a new run begins with parts of another one's checkpoint; data: which, its folder, run and step",
        "checkpoint_damaged": "a resumed run passed over a newer checkpoint that is not sound; data: its folder, "
        "what it is called now, and the reason",
        "ranks_lost": "the learner's ranks have ended, and others go on from the newest checkpoint; the step counts "
        "updates; data: the reason",
        "checkpoint_failed": "a checkpoint could not be saved, and the next step's is tried; data: the reason",
        "tokens_failed": "a step's tokens could not be written, and the run goes on without; data: the reason",
        "no_update": "a step took no update, because no group of it taught anything; data: how many were played",
        "refill_failed": "no episode of a round of replacement groups could be used; data: the most frequent reasons",
        "feedback_leaks": "feedback for the teacher says the hidden answer, and was not used; data: the reason",
        "teacher_disagrees": "the teacher prefers, step after step, what earns less; data: the reason",
        "mismatch": "a batch's logprobs of the engine are not the learner's; data: the reason",
        "return_selection": "kept episodes of task apps return something else than all that were played, beyond "
        "chance; data: the reason, how many, both means, p",
        "attempts_lost": "task apps lose more attempts after an answer of the policy than they may; data: the reason",
        "staging_failed": "new weights could not be written and are written again; data: version, reason",
        "update_failed": "an engine failed an update and is replaced; data: version, reason",
        "engine_restored": "an engine died and another has the committed weights; data: version",
        "judge_paused": "the judge is down and nothing is scored until it is back; data: judge, reason",
        "judge_resumed": "the judge is back; data: judge, seconds that it was down",
        "judge_gold": "the judge was compared with gold; data: of which step, and how far apart they are",
        "judge_gold_failed": "a comparison of the judge with gold came to nothing; data: of which step, reason",
        "judge_drift": "the judge and gold have drifted apart; data: of which step, reason",
        "selection": "environment failures depend on the policy's actions, so that retries select; data: the reason",
        "uncommitted": "episodes with weights that were never committed were left out; data: how many",
        "changed": "a resumed run goes on with other settings than it began with; data: key -> [then, now]",
        "stopped": "a stop was asked for; data: by what (a signal, or a request and its author)",
        "finished": "the run ended; data: its status, and why it failed",
        "sink_failed": "a sink of [tracking] raised and gets nothing more; data: which, and its error",
        "nonfinite_metrics": "metrics that were NaN or infinite, and so are null in their line; data: name -> value",
    }
)

SUMMARY: Mapping[str, str] = MappingProxyType(
    {
        "status": "how the run ended",
        "error": "why it failed; null if it did not",
        "policy_name": "the user's name for who played",
        "rescored": "whether an endpoint played what was learned from, and the policy evaluations only",
        "steps": "training steps taken",
        "episodes": "episodes trained on",
        "wall_seconds": "seconds of training and evaluation",
        "score": "what scores are measured in, success_rate or mean_return; null before the first evaluation",
        "initial_eval": "the evaluation before the first step",
        "final_eval": "the last evaluation",
        "best_eval": "the evaluation with the highest score",
        "sampled_tokens": "tokens that were sampled in training episodes",
        "trained_tokens": "tokens that went through a backward pass",
        "gradient_steps": "training steps whose optimizer steps had a gradient; 0: nothing was learned",
        "curve": "[step, score] of every evaluation",
    }
)

_EPISODES_NAME = re.compile(r"[a-z]+(_(?P<step>\d+))?")


class RunRecorder:
    """Writer of a run's folder; `create` or `resume` returns one.

    Attributes:
        folder: of the run.
        policy_name: the user's name for the policy; goes into every episode.
        last_seq: of the last event; 0: there is none.

    `sinks` show metrics, evaluations and the report elsewhere, too (`run/sinks.py`).
    """

    def __init__(
        self,
        folder: Path,
        *,
        last_step: int | None,
        last_seq: int = 0,
        policy_name: str = "policy",
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.policy_name = policy_name
        self._last_step = last_step
        self.last_seq = last_seq
        self.status = "interrupted"  # until a summary says more
        self._lock = threading.Lock()  # a checkpoint is written in another thread
        self._sinks = list(sinks)
        self._clock = clock

    @classmethod
    def create(
        cls,
        folder: Path,
        config_toml: str,
        *,
        policy_name: str = "policy",
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
    ) -> RunRecorder:
        """Start a run's folder with its resolved configuration.

        Raises:
            ConfigError: the folder holds a run already.
            StorageError: it cannot be made or written.
        """
        if (folder / "config.toml").exists():
            raise ConfigError(
                f"{folder}: holds a run already; go on with it (--resume), give this one another model.label, or "
                "remove the folder"
            )
        make_folder(folder / "episodes")
        run_id = uuid.uuid4().hex
        replace_file(folder / "config.toml", f"{RUN_LINE}{run_id}\n{config_toml}")
        recorder = cls(folder, last_step=None, policy_name=policy_name, sinks=sinks, clock=clock)
        recorder.event("started", 0, {"run": run_id})
        return recorder

    @classmethod
    def resume(
        cls,
        folder: Path,
        step: int,
        *,
        saved_seq: int | None = None,
        is_played_again: Callable[[str], bool] = lambda _: False,
        policy_name: str = "policy",
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
    ) -> RunRecorder:
        """Go on with a run after the checkpoint of `step`: later records move to discarded/.

        If a kill came between the checkpoint and its event, the event is written now.

        Args:
            saved_seq: the `last_seq` when the checkpoint was taken; None: the steps of events decide.
            is_played_again: returns whether a trajectory id of the ledger is played again.

        Raises:
            ConfigError: the folder holds no run.
            RecordError: a line of the records is damaged.
        """
        if not (folder / "config.toml").exists():
            raise ConfigError(f"{folder}: there is no run to resume (no config.toml)")
        for name in ("metrics.jsonl", "events.jsonl", LEDGER_FILE, JUDGEMENTS_FILE):
            cut_torn_line(folder / name)
        # Before lines move away; where lines were lost, a reader may have seen later numbers than are there.
        seq = max(last_seq(folder), saved_seq or 0)
        data = discard_later(
            folder,
            step,
            metrics=read_metrics(folder),
            events=read_events(folder),
            judgements=[json.loads(line) for line in whole_lines(folder / JUDGEMENTS_FILE)],
            saved_seq=saved_seq,
            episode_files=[path for path in episode_paths(folder) if _step_of(path) > step],
            token_files=[
                path
                for later_step in token_steps(folder)
                for path in (token_path(folder, later_step), feedback_path(folder, later_step))
                if later_step > step and path.exists()
            ],
            is_played_again=is_played_again,
        )
        recorder = cls(folder, last_step=step, last_seq=seq, policy_name=policy_name, sinks=sinks, clock=clock)
        name = f"step_{step:06d}"
        has_save_event = any(_is_save(event, step) and event["seq"] > (saved_seq or 0) for event in read_events(folder))
        if not has_save_event and (folder / "checkpoints" / name).is_dir():  # killed before it could say so
            recorder.event("checkpoint", step, {"folder": name})
        recorder.event("resumed", step, data)
        return recorder

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append a step's metrics. A NaN or infinity is written as null, with an event that names it.

        Raises:
            RecordError: a name that METRICS does not explain, a value that is no number, or a step that is not later
                than the last one.
        """
        if self._last_step is not None and step <= self._last_step:
            raise RecordError(f"metrics: expected a step after {self._last_step}, got {step}")
        for name, value in values.items():
            if name not in METRICS and not name.startswith((TERM_PREFIX, SOURCE_PREFIX, TOOL_PREFIX)):
                raise RecordError(f"metrics: {name!r} is not explained in METRICS; {nearest_name(name, METRICS)}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RecordError(f"metrics: {name}: expected a number, got {value!r}")
        nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        if nonfinite:
            self.event("nonfinite_metrics", step, nonfinite)
        line = {"step": step, "time": self._clock(), **values} | dict.fromkeys(nonfinite)
        self._append("metrics.jsonl", line)
        self._last_step = step
        self._send(step, {name: value for name, value in values.items() if name not in nonfinite})

    def event(self, kind: str, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Append an event. Any: the data are JSON values, and differ by kind.

        Raises:
            RecordError: a kind that EVENTS does not explain, or data that are not JSON.
        """
        if kind not in EVENTS:
            raise RecordError(f"event: {kind!r} is not explained in EVENTS; {nearest_name(kind, EVENTS)}")
        line = {"time": self._clock(), "step": step, "kind": kind, "data": dict(data or {})}
        with self._lock:
            self._append(EVENTS_FILE, {"seq": self.last_seq + 1, **line})
            self.last_seq += 1  # after it is written: a number that is not in the file would be a gap
        if kind == "evaluation":
            self._send(step, evaluation_numbers(data or {}))

    def episodes(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Write or replace episodes/<name>.jsonl.gz; `name` is like "step_000012" or "eval_000010".

        Raises:
            RecordError: another kind of name, or an episode that cannot be written.
        """
        if not _EPISODES_NAME.fullmatch(name):
            raise RecordError(f'episodes: expected a name like "step_000012", got {name!r}')
        path, episodes = self.folder / "episodes" / f"{name}.jsonl.gz", tuple(trajectories)
        write_episodes(path, episodes, policy_name=self.policy_name)
        if self._sinks and name.startswith("eval_"):
            rows = episode_rows(episodes)
            for sink in tuple(self._sinks):
                self._call(sink, partial(sink.episodes, _step_of(path), rows))

    def tokens(self, step: int, content: bytes) -> None:
        """Write a step's file of tokens, which `pack_tokens` gave, replacing it if it exists.

        Raises:
            StorageError: it cannot be written, and nothing is left of it.
        """
        path = token_path(self.folder, step)
        make_folder(path.parent)
        replace_file(path, content)

    def feedback(self, step: int, content: str) -> None:
        """Write a step's file of feedback, which `pack_feedback` gave, replacing it if it exists.

        Raises:
            StorageError: it cannot be written, and nothing is left of it.
        """
        path = feedback_path(self.folder, step)
        make_folder(path.parent)
        replace_file(path, content)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write or replace summary.json. Any: JSON values of the keys of SUMMARY.

        Raises:
            RecordError: a key is missing or not explained in SUMMARY, or a value is not JSON.
        """
        if wrong := set(values) ^ set(SUMMARY):
            raise RecordError(f"summary: expected the keys {list(SUMMARY)}; missing or too many: {sorted(wrong)}")
        self.status = str(values["status"])
        replace_file(self.folder / "summary.json", _dump({"schema": SCHEMA_VERSION, **values}, indent=2) + "\n")

    def report(self, make: Callable[[], Path]) -> None:
        """Give the run's page, which `make` writes, to the sinks, if there are any; a failure is recorded."""
        step = self._last_step or 0
        if not self._sinks:
            return
        try:
            path = make()
        except Exception as error:
            # Nor may a page that cannot be made: the training has ended.
            self.event("sink_failed", step, {"sink": "report", "error": f"{error!r}"[:500]})
            return
        for sink in tuple(self._sinks):
            self._call(sink, partial(sink.report, step, path))

    def close(self) -> None:
        """Close the sinks, and sync the appended lines to the disk, to survive a power cut. Closing twice is fine."""
        for sink in tuple(self._sinks):
            self._call(sink, sink.close)
        self._sinks.clear()
        for name in ("metrics.jsonl", "events.jsonl"):
            if (self.folder / name).exists():
                sync(self.folder / name)

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        for sink in tuple(self._sinks):
            self._call(sink, partial(sink.write, step, values))

    def _call(self, sink: Sink, action: Callable[[], None]) -> None:
        """Call a sink; if it raises, drop it and record an event."""
        try:
            action()
        except Exception as error:
            # The run's folder has all that the sink would show, and a service that is down must not end a training.
            self._sinks.remove(sink)
            self.event("sink_failed", self._last_step or 0, {"sink": sink.name, "error": f"{error!r}"[:500]})

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        append_line(self.folder / name, _dump({"schema": SCHEMA_VERSION, **line}))


def _step_of(path: Path) -> int:
    match = _EPISODES_NAME.fullmatch(path.name.partition(".")[0])
    return int(match["step"]) if match and match["step"] else -1


def _dump(values: Mapping[str, Any], *, indent: int | None = None) -> str:
    try:
        return json.dumps(values, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise RecordError(f"cannot be written as JSON: {error}: {str(values)[:200]}") from error


LEDGER_FILE = "ledger.jsonl"


INTERVAL = "training.log_interval"  # between lines of metrics.jsonl


def missing_records(folder: Path, step: int, saved_seq: int | None, *, has_all_metrics: bool) -> dict[str, Any]:
    """Return what is gone of a run's records up to a checkpoint, as data of "records_damaged"; {} if nothing is.

    `has_all_metrics`: whether training.log_interval is 1, and was when the run began.
    """
    events = read_events(folder, after=0)
    steps: list[int] = []
    if has_all_metrics and not any(e["kind"] == "changed" and INTERVAL in e["data"] for e in events):
        recorded_steps = {line["step"] for line in read_metrics(folder)}
        first = 1 + max((event["step"] for event in events if event["kind"] == "restored"), default=0)
        steps = [number for number in range(first, step + 1) if number not in recorded_steps]
    num_events = len(set(range(1, (saved_seq or 0) + 1)) - {event["seq"] for event in events})
    return {"metrics_steps": steps, "num_events": num_events} if steps or num_events else {}


# Of the run as a whole, and true whatever is done again.
_LIFE = ("started", "resumed", "checkpoint_damaged", "finished", "changed")

Line = Mapping[str, Any]  # a line of a record: JSON


def discard_later(
    folder: Path,
    step: int,
    *,
    metrics: Sequence[Line],
    events: Sequence[Line],
    judgements: Sequence[Line],
    saved_seq: int | None,
    episode_files: Sequence[Path],
    token_files: Sequence[Path],
    is_played_again: Callable[[str], bool],
) -> dict[str, Any]:
    """Move records after the checkpoint of `step` into a new folder in discarded/.

    Attempts in the ledger that stay and have no end, because their process was killed, get one.

    Args:
        folder: of the run.
        step: of the checkpoint.
        metrics, events, judgements: the lines of the run.
        saved_seq: the `seq` of the last event before the checkpoint was taken; None: not known.
        episode_files, token_files: those of later steps.
        is_played_again: returns whether a trajectory id is played again, so that its ledger entries and judgements
            move, too.

    Returns:
        The number of each kind of record that moved, as JSON values; {} if nothing did.
    """
    records = {
        "metrics.jsonl": _halves(metrics, lambda line: line["step"] > step),
        EVENTS_FILE: _split_events(events, step, saved_seq),
        JUDGEMENTS_FILE: _halves(judgements, lambda line: _is_judged_again(line, step, is_played_again)),
    }
    num_later = {name: len(later) for name, (_, later) in records.items()}
    path = folder / LEDGER_FILE
    entries = read_ledger(path) if path.exists() else ()
    kept_entries, later_entries = _halves(entries, lambda entry: is_played_again(entry.trajectory_id))
    ends = close_lost(kept_entries)
    data = {}
    if any(num_later.values()) or later_entries or episode_files or token_files:
        target = folder / "discarded" / f"resume_{1 + sum(1 for _ in (folder / 'discarded').glob('resume_*')):03d}"
        target.mkdir(parents=True)
        # The copies are complete before an original is cut, so a crash in between duplicates and loses nothing.
        _write(target / LEDGER_FILE, [entry_to_json(entry) for entry in later_entries])
        _move_lines({name: halves for name, halves in records.items() if any(halves)}, folder, target)
        for file in (*episode_files, *token_files):
            file.replace(target / file.name)
        data = {
            "folder": str(target.relative_to(folder)),
            "metrics_lines": num_later["metrics.jsonl"],
            "event_lines": num_later[EVENTS_FILE],
            "ledger_lines": len(later_entries),
            "judgement_lines": num_later[JUDGEMENTS_FILE],
            "episode_files": len(episode_files),
            "token_files": len(token_files),
        }
    if later_entries or ends:
        _write(path, [entry_to_json(entry) for entry in (*kept_entries, *ends)])
    return data


def _is_judged_again(line: Line, step: int, is_played_again: Callable[[str], bool]) -> bool:
    occasion = line["trajectory_id"].partition("/")[0]
    if occasion.startswith(("eval_", "warmup")):  # no groups of the training, which is what `is_played_again` knows
        return _step_of(Path(occasion)) > step
    return is_played_again(line["trajectory_id"])


def _move_lines(records: Mapping[str, tuple[list[Line], list[Line]]], folder: Path, target: Path) -> None:
    """Write the later lines of each record, the second ones, into `target`, and then cut the record."""
    for name, (_, later) in records.items():
        _write(target / name, later)
    for name, (kept_lines, _) in records.items():
        _write(folder / name, kept_lines)


def _halves(lines: Sequence[Any], is_later: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """Return the lines that stay, and the later ones (Any: lines, or entries of a ledger)."""
    return [line for line in lines if not is_later(line)], [line for line in lines if is_later(line)]


def _split_events(events: Sequence[Line], step: int, saved_seq: int | None) -> tuple[list[Line], list[Line]]:
    """Return the events that stay, and those after the checkpoint of `step`, which are repeated."""
    saves = [event["seq"] for event in events if _is_save(event, step)]
    if saved_seq is None:  # a checkpoint of an earlier version
        stay = range(1, 1 + max(saves, default=max((event["seq"] for event in events), default=0)))
    else:
        stay = range(1, 1 + saved_seq)
    own = min((seq for seq in saves if seq not in stay), default=None)  # it says that the checkpoint is complete
    earlier: list[Line] = []
    later: list[Line] = []
    for event in events:
        is_before = event["seq"] in stay or event["seq"] == own or event["kind"] in _LIFE
        (earlier if event["step"] <= step and is_before else later).append(event)
    return earlier, later


def _is_save(event: Line, step: int) -> bool:
    return bool(event["kind"] == "checkpoint" and event["step"] == step)


def _write(path: Path, lines: Sequence[Line]) -> None:
    replace_file(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
