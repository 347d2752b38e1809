"""Sinks for a run's numbers, evaluated episodes and report besides its folder: TensorBoard and Weights & Biases.

The folder stays the record. The packages are extras and load only when a sink is opened. Names are the record's,
"group/name", and both sinks and the page show them by group.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import netrc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

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

EpisodeRow = tuple[str | float | bool | None, ...]  # of EPISODE_COLUMNS


class Sink(Protocol):
    """Receiver of numbers, a few dozen per step, and of tables. It may raise anything; its caller then drops it."""

    name: str

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the finite numbers of a step, by name. A step may come again, with other names."""

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Take the table of episodes of the evaluation after this step."""

    def report(self, step: int, path: Path) -> None:
        """Take the page of the run, which has ended after this step."""

    def close(self) -> None:
        """Make everything written so far safe. Not called twice."""


class TensorBoardSink:
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


class WandbSink:
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
        folder.mkdir(parents=True, exist_ok=True)  # without it W&B writes into a temporary folder
        id_file = folder / "wandb_id.txt"
        known_id = id_file.read_text(encoding="utf-8").strip() if resume_step is not None and id_file.exists() else None
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
        report_to: "wandb" and "tensorboard", or neither.
        folder: of the run; a sink that writes files makes a folder in it.
        project: of W&B; None: gspo-gym.
        tags: of W&B.
        run_name: the run's name in W&B; TensorBoard uses the folder.
        config: the resolved configuration, as nested tables (Any: of all types).
        resume_step: the step after which the run goes on; None: it begins.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigError: W&B refuses (no key, no network), or a name is unknown.
    """
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(folder, config=config, resume_step=resume_step),
        "wandb": lambda: WandbSink(
            folder,
            project=project or DEFAULT_PROJECT,
            tags=tags,
            run_name=run_name,
            config=config,
            resume_step=resume_step,
        ),
    }
    check_sinks(report_to)  # all packages first, so that a missing one leaves nothing behind
    # W&B first: it may refuse, and leaves nothing behind then.
    with contextlib.ExitStack() as stack:
        sinks = []
        for name in sorted(report_to, reverse=True):
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
    sink_names = ("tensorboard", "wandb")
    if unknown := [name for name in report_to if name not in sink_names]:
        raise ConfigError(f"tracking.report_to: {unknown[0]!r} is no sink; {nearest_name(unknown[0], sink_names)}")
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
