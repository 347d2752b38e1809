"""A learning curve in plain text, for the end of a run in a terminal.

Not for: pictures or pages. Called by `report/terminal.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def text_curve(
    values: Sequence[float], *, low: float = 0.0, high: float = 1.0, width: int = 60, height: int = 8
) -> list[str]:
    """Lines of a filled chart of `values`, oldest first, with an axis from `low` to `high` on the left.

    More values than columns are averaged in equal shares; values outside the axis are drawn at its edge.

    >>> print("\\n".join(text_curve([0.0, 0.5, 1.0, 0.75], width=4, height=2)))
     1.00 |  █▄
     0.00 | ███
    """
    columns = _resample(values, width)
    span = high - low
    filled = [min(max((value - low) / span, 0.0), 1.0) * height for value in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_BLOCKS[int(min(max(fill - row, 0.0), 1.0) * (len(_BLOCKS) - 1))] for fill in filled)
        label = high if row == height - 1 else low if row == 0 else None
        lines.append((f"{label:5.2f}" if label is not None else " " * 5) + " |" + cells)
    return lines


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
