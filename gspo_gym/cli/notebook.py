"""Look at a run: in a notebook with `run = gspo_gym.open_run("runs/quickstart")`, then `run.metrics`, `run.plot()` or
`run.show()`;
in the terminal with `gspo-gym episodes RUN`, which prints episodes with the sampled tokens in colour.
"""

from __future__ import annotations

import argparse
import html
import importlib
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gspo_gym.base.files import replace_file
from gspo_gym.base.tables import html_table
from gspo_gym.cli.command_line import add_run
from gspo_gym.cli.report import page_of
from gspo_gym.env.registry import resolve
from gspo_gym.errors import RecordError, UnknownNameError
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.rollout.evaluation import Evaluation, evaluation_table, evaluations_html, in_one_unit
from gspo_gym.run.folders import find_run
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.run.registry import RunInfo, read_run
from gspo_gym.run.report.progress import mask_text, print_episode
from gspo_gym.run.report.token_text import TokenTexts
from gspo_gym.run.tokens import TokenFile, open_tokens
from gspo_gym.types import Trajectory, Turn


class Evaluations(dict[int, Evaluation]):
    """A run's evaluations by step, printed as a table."""

    def __repr__(self) -> str:
        return evaluation_table(self._named())

    def _repr_html_(self) -> str:
        return evaluations_html(self._named())

    def _named(self) -> dict[str, Evaluation]:
        return {f"step {step}": evaluation for step, evaluation in self.items()}


def open_run(run: str | Path, *, folder: str | Path = "runs") -> Run:
    """Return a run to look at, also one that is going on.

    Args:
        run: its folder, its name in `folder`, or the start of its id.
        folder: where runs are looked for.

    Raises:
        ConfigError: there is no such run.

    >>> open_run("nowhere")
    Traceback (most recent call last):
    gspo_gym.errors.ConfigError: nowhere: there is no such run, neither here nor in runs; ...
    """
    return Run(find_run(str(run), Path(folder)))


class Run:
    """A run's records, read again at every access.

    Attributes:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        info = self.info
        score = "" if info.value is None else f", {info.score} {info.value:.3f}"
        return f"Run({str(self.folder)!r}, {info.status}, step {info.step}{score})"

    def _repr_html_(self) -> str:
        """Return how far it came, and its evaluations, for a notebook."""
        info = self.info
        facts = [("status", info.status), ("step", str(info.step)), ("doing", info.doing), ("error", info.error)]
        rows = [(name, value) for name, value in facts if value]
        table = html_table(("", ""), rows, caption=str(self.folder))
        return table + self.evaluations._repr_html_()

    @property
    def info(self) -> RunInfo:
        """Return its status, how far it came, and its last score."""
        return read_run(self.folder)

    @property
    def metrics(self) -> Any:
        """Return the metrics: a pandas DataFrame, whose index is the step, too; without pandas a list of dictionaries.

        Any: pandas need not be installed. A metric that a step does not have is NaN in the frame.
        """
        lines = [{key: value for key, value in line.items() if key != "schema"} for line in read_metrics(self.folder)]
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            return lines
        # The index has no name: pandas refuses one that is a column's, too, as ambiguous.
        frame = pandas.DataFrame(lines) if lines else pandas.DataFrame(columns=["step"])
        return frame.set_index("step", drop=False).rename_axis(None)

    @property
    def evaluations(self) -> Evaluations:
        """Return the evaluations by step: episode by episode, with intervals, and to `compare` in pairs."""
        by_step = {
            str(event["step"]): Evaluation.from_dict(event["data"])
            for event in self.events
            if event["kind"] == "evaluation"
        }
        return Evaluations({int(step): evaluation for step, evaluation in in_one_unit(by_step).items()})

    def plot(self, *names: str) -> Any:
        """Return a matplotlib figure of curves over the steps (Any: matplotlib need not be installed).

        Args:
            names: of metrics; none: the score on held-out tasks with its 95% interval, and what says how training goes.

        Raises:
            MissingExtraError: matplotlib is not installed.
            UnknownNameError: the run has no such metric.
        """
        from gspo_gym.run.report.figure import run_figure

        return run_figure(read_metrics(self.folder), self.evaluations, names, title=self.folder.name)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the events, oldest first (Any: JSON values)."""
        return read_events(self.folder)

    def episodes(
        self, *, step: int | None = None, evaluation: int | None = None, failed: bool | None = None
    ) -> list[Trajectory]:
        """Return recorded episodes.

        Args:
            step: of this training step; None: of the last one that has any, or in a run without one of its last
                evaluation.
            evaluation: of the evaluation after this step, in place of training episodes.
            failed: True: only those without success or with an error; False: only the others; None: all.

        Raises:
            RecordError: nothing is recorded of that step, or the file is damaged.
        """
        name = f"eval_{evaluation:06d}" if evaluation is not None else "step_" if step is None else f"step_{step:06d}"
        paths = episode_paths(self.folder, name) or (episode_paths(self.folder, "eval_") if name == "step_" else [])
        if not paths:
            names = ", ".join(path.name.partition(".")[0] for path in episode_paths(self.folder))
            raise RecordError(f"{self.folder}: has no episodes {name!r}; it has {names or 'none'}")
        episodes = read_episodes(paths[-1])
        return [e for e in episodes if failed is None or (e.success is False or e.error is not None) == failed]

    def tokens(self, step: int) -> TokenFile:
        """Return what the learner saw of every sampled token of a step.

        Raises:
            RecordError: it is not recorded, or the file is damaged.
        """
        return open_tokens(self.folder, step)

    def show(self, *, height: int = 800) -> Any:
        """Return the page of the run, shown in a notebook in `height` pixels (Any: IPython need not be installed).

        Outside a notebook, write the page into the run's folder and open it in the browser; return its path.
        """
        page = page_of(self.folder).html
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            display = importlib.import_module("IPython.display")
            # A document of its own: neither its styles nor its script touch the notebook.
            # Inside a <div>, because IPython warns of HTML that begins with a frame.
            frame = '<div><iframe width="100%" height="{}" sandbox="allow-scripts" srcdoc="{}"></iframe></div>'
            return display.HTML(frame.format(height, html.escape(page)))
        path = self.folder / "report.html"
        replace_file(path, page)
        webbrowser.open(path.absolute().as_uri())
        return path


class Markdown(str):
    """A text that a notebook renders."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)


def card(subject: str | Run, *, num_seeds: int = 100, folder: str | Path = "runs") -> Markdown:
    """Return the card of a model that a run trained, or of an environment, as Markdown.

    Args:
        subject: a `Run`, or what names a run's checkpoint (RUN, RUN@best, RUN@20) or a registered environment, which
            comes first.
        num_seeds: of an environment: its players play the seeds from 0 to this one.
        folder: where runs are looked for.

    Raises:
        UnknownNameError, CheckpointError: there is neither such an environment nor such a run.
    """
    from gspo_gym.cli.authoring import card_as_markdown, make_card
    from gspo_gym.cli.models import card_of
    from gspo_gym.run.models import find_model

    no_environment = ""
    if isinstance(subject, str):
        try:
            env_id = resolve(subject)
        except UnknownNameError as error:
            no_environment = f"{error}; "
        else:
            return Markdown(card_as_markdown(make_card(env_id, num_seeds=num_seeds)))
    try:
        model = find_model(str(subject.folder if isinstance(subject, Run) else subject), runs=Path(folder))
    except UnknownNameError as error:
        raise UnknownNameError(f"{no_environment}{error}") from None
    if model.run is None:
        raise UnknownNameError(f"card: expected an environment or a run's model, got {subject!r:.80}")
    return Markdown(card_of(model).split("---\n", 2)[2].strip() + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `episodes`."""
    add_run(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, metavar="N", help="of this training step (default: the last that has any)")
    group.add_argument("--evaluation", type=int, metavar="N", help="of the evaluation after this step")
    parser.add_argument("--task", metavar="TEXT", help="only tasks whose id holds this: a seed, or an environment")
    parser.add_argument("--failed", action="store_true", help="only those without success, or with an error")
    parser.add_argument("--best", action="store_true", help="the highest returns first")
    parser.add_argument("--limit", type=int, default=4, help="at most this many; 0: all (default 4)")
    parser.add_argument("--messages", action="store_true", help="as a conversation, without the template's tokens")
    parser.set_defaults(run=episodes_command)


def episodes_command(arguments: argparse.Namespace) -> int:
    """Print the episodes that are asked for; return 1 if there are none."""
    from gspo_gym.run.report.page_data import run_tokenizer  # loads torch, which `open_run` does without

    folder = find_run(arguments.run_name, arguments.folder)
    only_failed = True if arguments.failed else None
    episodes = Run(folder).episodes(step=arguments.step, evaluation=arguments.evaluation, failed=only_failed)
    matches = [episode for episode in episodes if (arguments.task or "") in episode.task.task_id]
    if arguments.best:
        matches.sort(key=lambda episode: episode.reward if episode.is_scored else float("-inf"), reverse=True)
    console = Console()
    tokenizer = None if arguments.messages else run_tokenizer(folder)
    decode = None if tokenizer is None else TokenTexts(tokenizer).decode
    for trajectory in matches[: arguments.limit or None]:
        if decode is None:
            print_episode(console, trajectory.trajectory_id, trajectory)
        else:
            _print_tokens(console, trajectory, decode)
    console.print(f"{min(len(matches), arguments.limit or len(matches))} of {len(matches)} episodes", style="dim")
    return 0 if matches else 1


def _print_tokens(console: Console, trajectory: Trajectory, decode: Callable[..., str]) -> None:
    console.print(Text(f"{trajectory.trajectory_id}  {trajectory.task.task_id}", style="bold"))
    for number, segment in enumerate(trajectory.segments):
        if number:
            console.print(Text(f"segment {number}", style="dim"))
        console.print(mask_text(segment, decode), soft_wrap=True)
    console.print(Text("  ".join(filter(None, map(_reward_text, trajectory.turns))), style="dim"))
    if trajectory.error is not None:
        console.print(Text(trajectory.error, style="red"))
    verdict = {True: "success", False: "no success", None: trajectory.outcome.value}[trajectory.success]
    score = f"return {trajectory.reward:+.2f}" if trajectory.is_scored else "not scored"
    console.print(Text(f"{verdict}, {score}\n", style="bold"))


def _reward_text(turn: Turn) -> str:
    if turn.reward is None:
        return ""
    terms = " ".join(f"{name} {value:+.2f}" for name, value in turn.reward_terms.items())
    return f"turn {turn.index}: {turn.reward:+.2f}{terms and f' ({terms})'}"
