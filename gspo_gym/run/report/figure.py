"""The curves of a run as a matplotlib figure, for a notebook or a paper. The page of a run draws its own."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gspo_gym.errors import MissingExtraError, UnknownNameError, nearest_name
from gspo_gym.rollout.evaluation import Evaluation

# Of a figure without names; docs/tutorials/reading_a_run.md explains them.
_USUAL = ("rollout/reward_mean", "rollout/success_rate", "policy/entropy", "ratio/mean")
_NUM_COLUMNS = 2
_WIDTH, _HEIGHT = 5.0, 2.8  # inches of one curve


def run_figure(
    metrics: Sequence[Mapping[str, Any]], evaluations: Mapping[int, Evaluation], names: Sequence[str], *, title: str
) -> Any:  # Any: matplotlib need not be installed
    """Return the figure: a curve a metric, with the score on held-out tasks first where no names are given.

    Args:
        metrics: lines of metrics.jsonl.
        evaluations: by step.
        names: of metrics; () for the usual ones that the run has.
        title: of the figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UnknownNameError: the run has no such metric.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")  # without pyplot, which keeps every figure
    except ImportError as error:
        raise MissingExtraError("run.plot() needs matplotlib: pip install 'gspo-gym[plot]'") from error
    there = dict.fromkeys(name for line in metrics for name in line if "/" in name)
    if unknown := [name for name in names if name not in there]:
        raise UnknownNameError(f"plot: the run has no metric {unknown[0]!r}; {nearest_name(unknown[0], there)}")
    shown = list(names) or [name for name in _USUAL if name in there]
    has_score = bool(evaluations) and not names
    num_rows = max(1, math.ceil((len(shown) + has_score) / _NUM_COLUMNS))
    figure = figures.Figure(figsize=(_NUM_COLUMNS * _WIDTH, num_rows * _HEIGHT), layout="constrained")
    figure.suptitle(title)
    axes = iter(figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flat)
    if has_score:
        _draw_score(next(axes), evaluations)
    for name in shown:
        axis = next(axes)
        points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
        axis.plot([step for step, _ in points], [value for _, value in points])
        axis.set(title=name, xlabel="step")
    for axis in axes:
        axis.set_visible(False)
    figure._repr_svg_ = partial(_as_svg, figure)  # a notebook draws it also if pyplot was never imported
    return figure


def _draw_score(axis: Any, evaluations: Mapping[int, Evaluation]) -> None:
    steps = sorted(evaluations)
    name = evaluations[steps[-1]].score_name
    scores = [evaluations[step].score for step in steps]
    axis.plot(steps, scores, marker="o")
    intervals = [
        evaluations[step].success_interval if name == "success_rate" else evaluations[step].mean_return_interval
        for step in steps
    ]
    if None not in intervals:
        axis.fill_between(steps, [i.low for i in intervals if i], [i.high for i in intervals if i], alpha=0.2)
    axis.set(title=f"{name.replace('_', ' ')}, held-out tasks", xlabel="step")


def _as_svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()
