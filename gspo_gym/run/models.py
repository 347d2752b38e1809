"""The models of runs: find the checkpoint that a name means, and read its facts from the run's records."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo_gym.errors import CheckpointError, ConfigError, RecordError, UnknownNameError
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.export import adapter_base, layout_of
from gspo_gym.policy.load import check_base
from gspo_gym.policy.manifest import read_manifest, step_of
from gspo_gym.policy.retention import RetentionSettings
from gspo_gym.policy.tiny import TINY_PREFIX
from gspo_gym.run.records import read_events, read_run_id
from gspo_gym.run.registry import find_run, list_runs

LATEST, BEST = "latest", "best"


@dataclass(frozen=True, slots=True)
class Model:
    """A model found by name.

    Attributes:
        base: for `load_policy`: a checkpoint's folder, or the name as it was given.
        run: the folder of the run that trained it; None: no run did.
        step: of the checkpoint; None without a run.
        evaluation: the run's evaluation at this step, as in its event (JSON); None: there was none.
    """

    base: str
    run: Path | None = None
    step: int | None = None
    evaluation: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Return a name for cards and lists."""
        return self.base if self.run is None else f"{self.run.absolute().name}@{self.step}"

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the run's settings (JSON values, hence Any); {} without a run.

        Raises:
            RecordError: the run's config.toml cannot be read.
        """
        if self.run is None:
            return {}
        path = self.run / "config.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RecordError(f"{path}: cannot be read: {error}") from error

    @property
    def dtype(self) -> str:
        """Return the dtype in which the run loads weights; float32 without a run."""
        return str(self.config.get("model", {}).get("dtype", "float32"))

    def to_json(self) -> dict[str, Any]:
        """Return the facts about the model, with the evaluation's totals only."""
        folder = Path(self.base).expanduser()
        about: dict[str, Any] = {"name": self.name, "path": self.base, "run": None, "step": self.step}
        if folder.is_dir():
            about |= {"layout": layout_of(folder), "adapter_base": adapter_base(folder)}
        if self.run is not None:
            manifest = read_manifest(folder)
            about |= {"run": str(self.run), "run_id": manifest.run, "base": self.config["model"].get("base")}
            about["bytes"] = sum(entry["bytes"] for entry in manifest.files.values())
        evaluation = None if self.evaluation is None else without_rows(self.evaluation)
        return about | {"evaluation": evaluation}


def find_model(name: str, *, runs: Path = Path("runs")) -> Model:
    """Return the model that `name` means.

    A run (as in `registry.find_run`) and `RUN@latest` mean its newest checkpoint, `RUN@best` the one with the best
    evaluation (by training.keep_best_metric; the first of equal ones), `RUN@20` that of step 20. A checkpoint's folder
    and any name for `load_policy` mean themselves.

    Raises:
        UnknownNameError: there is no such run, step or model.
        CheckpointError: the run has no complete checkpoint, or for "best" none that was evaluated.
    """
    if name.startswith(TINY_PREFIX):
        check_base(name)
        return Model(name)
    label, at, which = name.rpartition("@")
    try:
        return _of_run(find_run(name, runs), LATEST)
    except ConfigError as error:
        if Path(name).expanduser().is_dir():
            return _of_folder(Path(name).expanduser())
        if at:
            return _of_run(_run_called(label, runs), which)
        # A misspelt run is not looked for on the hub, which may have a model of that name.
        if get_close_matches(name, [path.name for path in runs.glob("*")]):
            raise UnknownNameError(str(error)) from None
    check_base(name)
    return Model(name)


def list_models(runs: Path) -> list[tuple[Model, frozenset[str]]]:
    """Return the complete checkpoints of all runs in a folder, each marked "latest" and "best" where that applies.

    Raises:
        ConfigError: there is no such folder.
        RecordError, CheckpointError: the records of a run are damaged.
    """
    listed = []
    for folder in sorted(run.folder for run in list_runs(runs)):
        steps = _store(folder).steps()
        best = _best_of(folder)
        for step in steps:
            marks = {LATEST} if step == steps[-1] else set()
            marks |= {BEST} if step == best else set()
            listed.append((_at_step(folder, step), frozenset(marks)))
    return listed


def without_rows(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation, and its parts, without single episodes (JSON values, hence Any)."""
    kept = {key: value for key, value in evaluation.items() if key not in ("rows", "parts")}
    parts = {name: without_rows(part) for name, part in evaluation.get("parts", {}).items()}
    return {**kept, "parts": parts} if parts else kept


def _run_called(label: str, runs: Path) -> Path:
    try:
        return find_run(label, runs)
    except ConfigError as error:
        raise UnknownNameError(str(error)) from None


def _of_folder(folder: Path) -> Model:
    """Return the model in a folder: a run's checkpoint, if the folder lies where checkpoints do, or other weights."""
    run, step = folder.absolute().parent.parent, step_of(folder)
    if step is not None and folder.absolute().parent.name == "checkpoints" and (run / "config.toml").is_file():
        return _at_step(run, step)
    check_base(str(folder))
    return Model(str(folder))


def _of_run(folder: Path, which: str) -> Model:
    steps = _store(folder).steps()
    if not steps:
        raise CheckpointError(f"{folder}: there is no complete checkpoint yet")
    if which == LATEST:
        return _at_step(folder, steps[-1])
    if which == BEST:
        step = _best_of(folder)
        if step is None:
            raise CheckpointError(
                f"{folder}: none of its checkpoints (steps {list(steps)}) was evaluated; take @{steps[-1]}"
            )
        return _at_step(folder, step)
    if not which.isdecimal() or int(which) not in steps:
        raise UnknownNameError(
            f"{folder}@{which}: expected {LATEST}, {BEST} or a step with a checkpoint, which are {list(steps)}"
        )
    return _at_step(folder, int(which))


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}"


def _at_step(folder: Path, step: int) -> Model:
    made = (event["data"] for event in read_events(folder) if (event["kind"], event["step"]) == ("evaluation", step))
    *_, last = (None, *made)  # of an evaluation that was made again after a resume, the last
    return Model(str(_checkpoint(folder, step)), folder, step, last)


def _best_of(folder: Path) -> int | None:
    """Return the step with the best evaluation, by the run's keep_best settings; None if none was evaluated."""
    best = _store(folder).best()
    return None if best is None else step_of(best)


def _store(folder: Path) -> CheckpointStore:
    training = Model(str(folder), folder).config.get("training", {})
    retention = RetentionSettings(**{key: training[key] for key in RetentionSettings.model_fields if key in training})
    return CheckpointStore(folder / "checkpoints", run_id=read_run_id(folder), retention=retention)
