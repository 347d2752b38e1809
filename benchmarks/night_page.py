"""The page of a night: how methods compare, from the cells that `night.py` keeps. The page says this, too:

**Cells.** A cell is one run: a game, a method and a run seed. A game is a committed configuration; a method is the same
with some keys changed; "default" changes none. A run seed gives all methods of a game the same weights after the
warm-up and, but for the methods that choose or fork tasks, the same tasks.

**Score.** A cell's score is its mean held-out success over sampled tokens, from 0 to the tokens B that the default
sampled with the same run seed: the area under the lines between its evaluations, divided by B. A run that ended with
fewer tokens keeps its last success. So a method scores that learns early, that ends high, or that needs few tokens.

**Rank.** A method's difference is its score less the default's in the same game and with the same run seed; its mean is
over all such pairs, with a 95% interval by bootstrap over the pairs. A run that failed scores 0; one that is not
finished makes no pair. *better*: the interval lies above 0. *worse*: it lies below. *no difference found*: it holds 0,
whatever the mean. *too few pairs*: fewer than six, of which all lie on one side by chance more often than once in 20
times. Better ones come first, then the default and those in which no difference was found, then worse ones, each by the
mean. Nothing else decides: neither final success, nor what it took to reach a goal, nor time.

**Limits.** This rule was written before the first cell was run. It is not corrected for the number of methods: of
twenty that change nothing, one is found better or worse by chance. An interval over the five seeds of one game holds
the truth in about 85% of cases, not in 95%: for five normal values, resampling is as narrow as 1.75 standard errors.
Keys are compared as they are, not each at its best learning rate. Seconds are those of training steps, without warm-up
and evaluations, with one thread; beside other programs they say little.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from gspo_gym.rollout.statistics import Interval, bootstrap_mean_interval

DEFAULT = "default"
_RULE = __doc__.partition("\n\n")[2]
_SIDES = ("better", "no difference found", "worse", "too few pairs")
_MIN_PAIRS = 6  # 2 / 2^6 is less than 0.05, and 2 / 2^5 is not
_WITHOUT = {"forks": "siblings", "role": "gspo", "maxrl": "gspo"}  # what each is but for the one thing that it adds


class Point(NamedTuple):
    """Success on held-out tasks after a step, and what the steps up to it took: sampled tokens, and seconds."""

    step: int
    success: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        overrides: what the method and the command change in the game's configuration.
        goal: the success at which tokens and seconds are compared.
        status: "failed": the training itself did; "unfinished": it goes on at the next call.
        error: why it is not finished; None if it is.
        points: its evaluations, in order.
    """

    game: str
    method: str
    seed: int
    overrides: tuple[str, ...]
    goal: float
    status: Literal["finished", "failed", "unfinished"]
    error: str | None = None
    points: tuple[Point, ...] = ()

    @property
    def name(self) -> tuple[str, str, int]:
        """Return what no two cells share."""
        return self.game, self.method, self.seed

    @property
    def key(self) -> tuple[str, int]:
        """Return what a pair shares."""
        return self.game, self.seed

    @property
    def at_goal(self) -> Point | None:
        """Return the first evaluation that reaches the goal, or None."""
        return next((point for point in self.points if point.success >= self.goal), None)

    def score(self, budget: float) -> float:
        """Return the mean success over tokens from 0 to `budget`; 0 of a failed run."""
        if self.status == "failed":
            return 0.0
        tokens = [point.tokens for point in self.points]
        places = np.array(sorted({0.0, budget, *(t for t in tokens if t < budget)}))
        heights = np.interp(places, tokens, [point.success for point in self.points])
        return float(((heights[1:] + heights[:-1]) / 2 * np.diff(places)).sum() / budget)


@dataclass(frozen=True, slots=True)
class Standing:
    """A method's differences in score to the default, a pair each, and what follows from them."""

    method: str
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences) if self.differences else 0.0

    @property
    def interval(self) -> Interval | None:
        return bootstrap_mean_interval(self.differences)

    @property
    def side(self) -> str:
        """Return one of `_SIDES`."""
        interval = self.interval
        if interval is None or len(self.differences) < _MIN_PAIRS:
            return _SIDES[3]
        return _SIDES[0] if interval.low > 0 else _SIDES[2] if interval.high < 0 else _SIDES[1]


def read_cells(file: Path) -> list[Cell]:
    """Return the cells that `write_cells` wrote."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        Cell(
            **{
                **line,
                "overrides": tuple(line["overrides"]),
                "points": tuple(Point(*point) for point in line["points"]),
            }
        )
        for line in lines
    ]


def cell_lines(cells: Sequence[Cell]) -> str:
    """Return a line of JSON for each cell."""
    return "".join(json.dumps(asdict(cell)) + "\n" for cell in cells)


def rank(cells: Sequence[Cell]) -> list[Standing]:
    """Return the standing of every method but the default, the first first."""
    defaults = {cell.key: cell for cell in cells if cell.method == DEFAULT and cell.status == "finished"}
    budgets = {key: cell.points[-1].tokens for key, cell in defaults.items()}
    pairs: dict[str, list[float]] = {cell.method: [] for cell in cells if cell.method != DEFAULT}
    for cell in cells:
        if cell.method != DEFAULT and cell.status != "unfinished" and cell.key in defaults:
            budget = budgets[cell.key]
            pairs[cell.method].append(cell.score(budget) - defaults[cell.key].score(budget))
    standings = [Standing(method, tuple(differences)) for method, differences in pairs.items()]
    return sorted(standings, key=lambda standing: (_SIDES.index(standing.side), -standing.mean))


def page(cells: Sequence[Cell]) -> str:
    """Return the page in Markdown."""
    counts = Counter(cell.status for cell in cells)
    games = list(dict.fromkeys(cell.game for cell in cells))
    states = ", ".join(f"{counts[status]} {status}" for status in ("finished", "failed", "unfinished"))
    parts = [
        "# One night\n\nWhich method should one try first? `python -m benchmarks night` trains methods x games x run "
        "seeds, two runs at a time, goes on where it was stopped, and writes this page.\n",
        _RULE,
        f"## The ranking\n\n{len(cells)} cells: {states}.\n",
        _markdown(
            ("place", "method", "difference in score", "95% interval", "pairs", "what it changes"), _places(cells)
        ),
    ]
    for game in games:
        own = [cell for cell in cells if cell.game == game]
        parts += [f"## {game}\n\nThe goal is a success of {own[0].goal:g}.\n", _markdown(_GAME_HEAD, _game_rows(own))]
    if beside := _beside(cells):
        parts += [
            "## Beside the method that lacks one thing\n\nWith the same run seed; a score is over the other's tokens. "
            "Ratios are of sampled tokens and seconds to the goal, where both reach it.\n",
            _markdown(("method less another", "game", "score", "final success", "tokens to goal", "seconds"), beside),
        ]
    problems = [(c.game, c.method, str(c.seed), c.status, _one_line(c.error)) for c in cells if c.error is not None]
    if problems:
        parts += ["## What did not finish\n", _markdown(("game", "method", "seed", "status", "why"), problems)]
    return "\n".join(parts)


def _places(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    rows, standings = [], rank(cells)
    num_better = sum(standing.side == _SIDES[0] for standing in standings)
    changes = {cell.method: " ".join(f"`{text}`" for text in cell.overrides) for cell in cells}
    for standing in standings:
        interval = "-" if standing.interval is None else _signed(standing.interval)
        cell = (f"{standing.mean:+.3f}, {standing.side}", interval, str(len(standing.differences)))
        rows.append((standing.method, *cell, changes[standing.method]))
    if any(cell.method == DEFAULT for cell in cells):
        rows.insert(num_better, (DEFAULT, "", "", "", changes[DEFAULT]))
    return [(str(place), *row) for place, row in enumerate(rows, start=1)]


_GAME_HEAD = (
    "method",
    "final success, mean of",
    "less the default's, 95%",
    "reach the goal",
    "sampled tokens to it, median",
    "in parts of the default's, 95%",
    "seconds to it, median",
)


def _game_rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    rows = []
    defaults = {cell.seed: cell for cell in cells if cell.method == DEFAULT and cell.status == "finished"}
    for method in dict.fromkeys(cell.method for cell in cells):
        own = [cell for cell in cells if cell.method == method and cell.status == "finished"]
        pairs = [(cell, defaults[cell.seed]) for cell in own if cell.seed in defaults and method != DEFAULT]
        finals = [cell.points[-1].success for cell in own]
        ends = [cell.at_goal for cell in own]
        reached = [end for end in ends if end is not None]
        tokens, seconds = (
            statistics.median([math.inf if end is None else getattr(end, name) for end in ends]) if ends else math.nan
            for name in ("tokens", "seconds")
        )
        ratios = [(a.at_goal, b.at_goal) for a, b in pairs]
        logs = [math.log(a.tokens / b.tokens) for a, b in ratios if a and b and a.tokens > 0 < b.tokens]
        rows.append(
            (
                method,
                f"{statistics.fmean(finals):.3f} of {len(own)}" if own else "-",
                _mean_and_interval([a.points[-1].success - b.points[-1].success for a, b in pairs]),
                f"{len(reached)} of {len(own)}",
                _count(tokens),
                _ratio_and_interval(logs),
                _count(seconds),
            )
        )
    return rows


def _beside(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    finished = {cell.name: cell for cell in cells if cell.status == "finished"}
    rows = []
    for method, other in _WITHOUT.items():
        for game in dict.fromkeys(cell.game for cell in cells):
            seeds = [cell.seed for cell in finished.values() if (cell.game, cell.method) == (game, method)]
            pairs = [(finished[game, method, seed], finished.get((game, other, seed))) for seed in seeds]
            both = [(a, b) for a, b in pairs if b is not None]
            if not both:
                continue
            budgets = [b.points[-1].tokens for _, b in both]
            ends = [(a.at_goal, b.at_goal) for a, b in both]
            reached = [(a, b) for a, b in ends if a and b and a.tokens > 0 < b.tokens]
            rows.append(
                (
                    f"{method} less {other}",
                    game,
                    _mean_and_interval([a.score(n) - b.score(n) for (a, b), n in zip(both, budgets, strict=True)]),
                    _mean_and_interval([a.points[-1].success - b.points[-1].success for a, b in both]),
                    _ratio_and_interval([math.log(a.tokens / b.tokens) for a, b in reached]),
                    _ratio_and_interval([math.log(a.seconds / b.seconds) for a, b in reached]),
                )
            )
    return rows


def _mean_and_interval(values: Sequence[float]) -> str:
    if not values:
        return ""
    interval = bootstrap_mean_interval(values)
    return f"{statistics.fmean(values):+.3f}" + ("" if interval is None else f" ({_signed(interval)})")


def _ratio_and_interval(logs: Sequence[float]) -> str:
    """Return the geometric mean of ratios, of which these are the logarithms, and the number of pairs."""
    if not logs:
        return ""
    interval = bootstrap_mean_interval(logs)
    ends = "" if interval is None else f" ({math.exp(interval.low):.2f} to {math.exp(interval.high):.2f})"
    return f"{math.exp(statistics.fmean(logs)):.2f}{ends} of {len(logs)}"


def _signed(interval: Interval) -> str:
    return f"{interval.low:+.3f} to {interval.high:+.3f}"


def _count(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "not reached" if math.isinf(value) else f"{value:,.0f}"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("|", "/").split())


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |\n" for row in (head, *rows)]
    return "".join([lines[0], f"|{'|'.join(['---'] * len(head))}|\n", *lines[1:]])
