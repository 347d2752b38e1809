"""Sinks for a run's numbers, evaluated episodes and report besides its folder: TensorBoard, Weights & Biases, Trackio
and MLflow, and what derives from `Sink`.

The folder stays the record. The packages are extras and load only when a sink is opened. Names are the record's,
"group/name", and the sinks and the page show them by group.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import netrc
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gspo_gym.base.files import make_folder
from gspo_gym.errors import ConfigError, MissingExtraError, nearest_name
from gspo_gym.run.report.progress import spoken, visible
from gspo_gym.types import Trajectory

DEFAULT_PROJECT = "gspo-gym"

# Of an evaluation's event, the numbers that make a curve; in a sink they are "evaluation/<name>".
EVALUATION_NUMBERS = ("success_rate", "mean_return", "mean_turns", "num_episodes", "num_failed")
# The table of an evaluation's episodes: its name, its columns, and how much of an evaluation is in it.
EPISODES_TABLE = "evaluation/episodes"
EPISODE_COLUMNS = ("episode", "task", "outcome", "success", "return", "turns", "tokens", "conversation")
MAX_EPISODES = 32
MAX_CHARS = 2000
# Characters that Markdown, its tables or HTML would take for their own.
_AS_TEXT = str.maketrans({mark: f"&#{ord(mark)};" for mark in "&<>|*_`[]\\~#!"} | {"\n": "<br>"})

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")  # which its names of metrics must not have

EpisodeRow = tuple[str | float | bool | None, ...]  # of EPISODE_COLUMNS


class Sink:
    """Receiver of a run's numbers, a few dozen per step, and of tables. A subclass needs no more than `write`.

    It may raise anything: the run goes on without it, and records the error.

    Attributes:
        name: in that record.
    """

    name: str = "logger"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the finite numbers of a step, by name. A step may come again, with other names."""
        raise NotImplementedError(f"{type(self).__name__}.write")

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Take the table of episodes of the evaluation after this step."""

    def report(self, step: int, path: Path) -> None:
        """Take the page of the run, which has ended after this step."""

    def close(self) -> None:
        """Make everything written so far safe. Not called twice."""


SINK_NAMES = ("tensorboard", "wandb", "trackio", "mlflow")


class TensorBoardSink(Sink):
    """Event files in `folder`/tensorboard; see them with `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, config: Mapping[str, Any], resume_step: int | None) -> None:
        _require("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what an interrupted run wrote of later steps: the resumed run does them again.
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)  # Any: untyped
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```", global_step=resume_step or 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point per number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Write the table as Markdown, in which no text of an episode is markup."""
        lines = [[str(cell).translate(_AS_TEXT) for cell in row] for row in (EPISODE_COLUMNS, *rows)]
        lines.insert(1, ["---"] * len(EPISODE_COLUMNS))
        self._writer.add_text(EPISODES_TABLE, "\n".join(f"| {' | '.join(line)} |" for line in lines), global_step=step)

    def report(self, step: int, path: Path) -> None:
        """Write where the page is: TensorBoard shows no pages."""
        self._writer.add_text("report", str(path.resolve()).translate(_AS_TEXT), global_step=step)

    def close(self) -> None:
        """Flush, and end the writing thread."""
        self._writer.close()


class WandbSink(Sink):
    """A run on wandb.ai, or in `folder`/wandb; the environment variable WANDB_MODE decides (online, offline, disabled).

    The key comes from WANDB_API_KEY or `wandb login`, never from a config. A resumed training goes on in the same W&B
    run; `folder`/wandb_id.txt keeps the id. Step numbers are ours: W&B's counter refuses steps that are done again,
    here they replace the lost ones.
    """

    name = "wandb"

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        tags: Sequence[str],
        run_name: str,
        config: Mapping[str, Any],
        resume_step: int | None,
    ) -> None:
        wandb = _require("wandb", extra="wandb")
        make_folder(folder)  # without it W&B writes into a temporary folder
        id_file = folder / "wandb_id.txt"
        known_id = _kept_text(id_file, resume_step)
        try:
            self._run: Any = wandb.init(
                project=project,
                tags=list(tags),
                name=run_name,
                config=dict(config),
                dir=str(folder),
                id=known_id,
                resume=None if known_id is None else "allow",
            )
        except (wandb.errors.Error, OSError) as error:
            raise ConfigError(
                f"tracking.report_to: W&B could not start: {error}; set WANDB_API_KEY or run `wandb login`, set "
                'WANDB_MODE=offline to keep the run here, or remove "wandb"'
            ) from error
        self._wandb = wandb
        # Not W&B's own counter, which only goes up.
        self._run.define_metric("*", step_metric="step")
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Write a W&B table."""
        table = self._wandb.Table(columns=list(EPISODE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"step": step, EPISODES_TABLE: table})

    def report(self, step: int, path: Path) -> None:
        """Upload the page as an artifact; a resumed run's is its next version."""
        artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report", metadata={"step": step})
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """Upload the rest, and mark the run as finished."""
        self._run.finish()


class TrackioSink(Sink):
    """A run in Trackio's local database, which `trackio show` displays; the variable TRACKIO_DIR says where that is.

    A resumed training goes on in the same Trackio run, whose name `folder`/trackio_run.txt keeps: without it, a second
    training of the same label would be mixed with the first.
    """

    name = "trackio"

    def __init__(
        self, folder: Path, *, project: str, run_name: str, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        self._trackio = _require("trackio", extra="trackio")
        name_file = folder / "trackio_run.txt"
        own_name = _kept_text(name_file, resume_step)
        is_new = own_name is None
        self._run: Any = self._trackio.init(
            project=project,
            # A name of this training alone: Trackio knows runs by their names.
            name=own_name or f"{run_name}-{secrets.token_hex(3)}",
            config=dict(config),
            resume="never" if is_new else "allow",
            embed=False,
        )
        make_folder(folder)
        name_file.write_text(f"{self._run.name}\n", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Write a table of texts, in which Trackio reads Markdown."""
        cells = [[cell.translate(_AS_TEXT) if isinstance(cell, str) else cell for cell in row] for row in rows]
        table = self._trackio.Table(columns=list(EPISODE_COLUMNS), data=cells)
        self._run.log({EPISODES_TABLE: table}, step=step)

    def report(self, step: int, path: Path) -> None:
        """Write nothing: Trackio shows no pages."""

    def close(self) -> None:
        """Write the rest."""
        self._run.finish()


class MlflowSink(Sink):
    """A run in MLflow: at MLFLOW_TRACKING_URI, or in MLflow's own default store.

    A resumed training goes on in the same MLflow run; `folder`/mlflow_run.txt keeps its id.
    """

    name = "mlflow"

    def __init__(
        self, folder: Path, *, project: str, run_name: str, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        mlflow = _require("mlflow", extra="mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        id_file = folder / "mlflow_run.txt"
        try:
            self._client: Any = mlflow.MlflowClient()
            run_id = _kept_text(id_file, resume_step)
            if run_id is None:
                experiment = self._client.get_experiment_by_name(project)
                number = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
                run_id = self._client.create_run(number, run_name=run_name).info.run_id
            self._client.update_run(run_id, status="RUNNING")
            self._client.log_dict(run_id, json.loads(json.dumps(config, default=str)), "config.json")
        except (mlflow.exceptions.MlflowException, OSError) as error:
            raise ConfigError(
                f"tracking.report_to: MLflow could not start: {error}; set MLFLOW_TRACKING_URI to a server or a store "
                '(sqlite:///mlflow.db), or remove "mlflow"'
            ) from error
        self._run_id = str(run_id)
        make_folder(folder)
        id_file.write_text(f"{self._run_id}\n", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        milliseconds = time.time_ns() // 1_000_000
        metrics = [
            self._entities.Metric(_NOT_IN_MLFLOW.sub("_", name), float(value), milliseconds, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Write the table as a JSON file of the run."""
        table = {"columns": list(EPISODE_COLUMNS), "data": [list(row) for row in rows]}
        self._client.log_dict(self._run_id, table, f"{EPISODES_TABLE}_{step:06d}.json")

    def report(self, step: int, path: Path) -> None:  # noqa: ARG002
        """Upload the page as a file of the run, which MLflow shows."""
        self._client.log_artifact(self._run_id, str(path))

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _kept_text(path: Path, resume_step: int | None) -> str | None:
    """Return the name of the run in a service that a resumed training goes on in; None: a new one begins."""
    if resume_step is None or not path.exists():
        return None
    return path.read_text(encoding="utf-8").strip() or None


def open_sinks(
    report_to: Sequence[str],
    *,
    folder: Path,
    project: str | None,
    tags: Sequence[str],
    run_name: str,
    config: Mapping[str, Any],
    resume_step: int | None = None,
) -> list[Sink]:
    """Open the sinks that [tracking] names.

    Args:
        report_to: any of SINK_NAMES.
        folder: of the run; a sink that writes files makes a folder in it.
        project: of W&B and Trackio, and the experiment of MLflow; None: gspo-gym.
        tags: of W&B.
        run_name: the run's name; TensorBoard uses the folder.
        config: the resolved configuration, as nested tables (Any: of all types).
        resume_step: the step after which the run goes on; None: it begins.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigError: W&B or MLflow refuses (no key, no network), or a name is unknown.
    """
    project = project or DEFAULT_PROJECT
    common: dict[str, Any] = {"config": config, "resume_step": resume_step}
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(folder, **common),
        "wandb": lambda: WandbSink(folder, project=project, tags=tags, run_name=run_name, **common),
        "trackio": lambda: TrackioSink(folder, project=project, run_name=run_name, **common),
        "mlflow": lambda: MlflowSink(folder, project=project, run_name=run_name, **common),
    }
    check_sinks(report_to)  # all packages first, so that a missing one leaves nothing behind
    # Services first: they may refuse, and leave nothing behind then.
    with contextlib.ExitStack() as stack:
        sinks = []
        for name in sorted(report_to, key=("wandb", "mlflow", "trackio", "tensorboard").index):
            sinks.append(makers[name]())
            stack.callback(sinks[-1].close)
        stack.pop_all()  # nothing failed: they stay open
    return sinks


def check_sinks(report_to: Sequence[str]) -> None:
    """Check that the sinks' packages are installed, and that W&B has a login.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigError: a name is unknown, or W&B has no key.
    """
    if unknown := [name for name in report_to if name not in SINK_NAMES]:
        raise ConfigError(f"tracking.report_to: {unknown[0]!r} is no sink; {nearest_name(unknown[0], SINK_NAMES)}")
    for name in report_to:
        _require(name, extra=name)
    if "wandb" in report_to and not _has_wandb_key(os.environ):
        raise ConfigError(
            "tracking.report_to: W&B has no key: set WANDB_API_KEY or run `wandb login`, set WANDB_MODE=offline to "
            'keep the run here, or remove "wandb"'
        )


def _has_wandb_key(environment: Mapping[str, str]) -> bool:
    """Return whether W&B needs no login, or finds a key in a variable or in the file that `wandb login` writes."""
    if environment.get("WANDB_MODE", "online").lower() not in ("online", "shared"):
        return True
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(environment.get("NETRC")).authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def evaluation_numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an "evaluation" event for a sink, also by environment if there are several."""
    tables = {"evaluation": data} | {f"evaluation/{env_id}": part for env_id, part in data.get("parts", {}).items()}
    return {
        f"{place}/{name}": float(table[name])
        for place, table in tables.items()
        for name in EVALUATION_NUMBERS
        if table.get(name) is not None
    }


def episode_rows(trajectories: Iterable[Trajectory]) -> list[EpisodeRow]:
    """Return the first episodes as rows of EPISODE_COLUMNS, with at most MAX_CHARS of each conversation."""
    rows: list[EpisodeRow] = []
    for trajectory in itertools.islice(trajectories, MAX_EPISODES):
        conversation = "\n".join(f"{message.role}: {spoken(message)}" for message in trajectory.messages)
        rows.append(
            (
                trajectory.trajectory_id,
                trajectory.task.task_id,
                trajectory.outcome.value,
                trajectory.success,
                trajectory.reward if trajectory.is_scored else None,
                len(trajectory.turns),
                trajectory.num_actions,
                visible(conversation if len(conversation) <= MAX_CHARS else f"{conversation[:MAX_CHARS]}…"),
            )
        )
    return rows


def _require(module: str, *, extra: str) -> Any:  # Any: a module
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"tracking.report_to: {extra!r} needs the package {module}, which is not installed here; "
            f"pip install 'gspo-gym[{extra}]', or remove it from tracking.report_to"
        ) from error
