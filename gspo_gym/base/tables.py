"""Tables for the terminal, which fit its width and cut no name off, and for notebooks."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Sequence

from rich.cells import cell_len

_GAP, _INDENT = "  ", "  "
_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(\.[0-9]+)?(e[-+]?[0-9]+)?%?|-|")
Row = Sequence[str]


class ShownAsText:
    """Mixin of reports whose text, and not their attributes, a notebook shows."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def table(head: Row, rows: Sequence[Row], *, width: int | None = None, optional: Row = ()) -> str:
    """Return a table as text; `width` None is the terminal's, or 80 columns without one.

    Where columns do not fit beside each other, those with the `optional` heads are left out, from the last on. Then a
    first cell that is too wide stands on a line above the others; where the others do not fit either, each cell stands
    on a line, behind its head.

    >>> print(table(("model", "score"), [("tiny", "0.5"), ("quickstart", "0.97")], width=80))
    model       score
    tiny          0.5
    quickstart   0.97
    >>> print(table(("model", "score"), [("tiny", "0.5"), ("quickstart", "0.97")], width=12))
    model  score
    tiny     0.5
    quickstart
            0.97
    >>> print(table(("model", "score"), [("quickstart", "0.97 in the end")], width=12))
    quickstart
      score
        0.97 in
        the end
    """
    limit = shutil.get_terminal_size().columns if width is None else width
    while optional and _widest(_align(head, rows)) > limit:
        *optional, last = optional
        column_numbers = [number for number, name in enumerate(head) if name != last]
        head, *rows = ([row[number] for number in column_numbers] for row in (head, *rows))
    rest = _align(head[1:], [row[1:] for row in rows])
    room = limit - _widest(rest) - len(_GAP)  # for the first cells
    if room >= 0:
        lines = _beside([row[0] for row in (head, *rows)], rest, room)
    else:
        lines = [line for row in rows for line in _stack_cells(head, row, limit)]
    return "\n".join(part for line in lines for part in folded(line, limit))


def html_table(head: Row, rows: Sequence[Row], *, caption: str = "") -> str:
    """Return a table for a notebook, in which no text is markup, and line ends stay.

    >>> html_table(("who", "text"), [("user", "a < b")], caption="one")
    '<table><caption>one</caption><tr><th>who</th><th>text</th></tr><tr><td>user</td><td>a &lt; b</td></tr></table>'
    """

    def line(cells: Row, tag: str) -> str:
        texts = (html.escape(cell).replace("\n", "<br>") for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def pairs(values: Sequence[tuple[str, str]], *, width: int | None = None) -> str:
    """Return names and values as text, a pair a line; a value that is too wide stands below its name.

    >>> print(pairs([("run", "3fa8"), ("folder", "/a/long/path")], width=14))
    run     3fa8
    folder
      /a/long/path
    """
    limit = shutil.get_terminal_size().columns if width is None else width
    column = max((cell_len(name) for name, _ in values), default=0)
    lines: list[str] = []
    for name, value in values:
        line = f"{name}{' ' * (column - cell_len(name))}{_GAP}{value}".rstrip()
        below = (f"{_INDENT}{part}" for part in folded(value, limit - len(_INDENT)))
        lines += [line] if cell_len(line) <= limit else [name, *below]
    return "\n".join(lines)


def folded(text: str, width: int | None = None) -> list[str]:
    """Return the text in lines of at most `width` columns (None: the terminal's), broken at spaces where there are any.

    >>> folded("one two three", 8)
    ['one two', 'three']
    """
    limit, lines = shutil.get_terminal_size().columns if width is None else width, []
    while cell_len(text) > limit:
        size = len(text)
        while cell_len(text[:size]) > limit:
            size -= 1
        space = text.rfind(" ", len(text) - len(text.lstrip()), size + 1)
        end = size if space <= 0 else space
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def _align(head: Row, rows: Sequence[Row]) -> list[str]:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
    widths = [max(map(cell_len, (name, *column)), default=0) for name, column in zip(head, columns, strict=True)]
    ends = [all(map(_NUMBER.fullmatch, column)) for column in columns]  # numbers end below each other

    def line(row: Row) -> str:
        cells = (
            " " * (width - cell_len(cell)) + cell if is_end else cell + " " * (width - cell_len(cell))
            for cell, width, is_end in zip(row, widths, ends, strict=True)
        )
        return _GAP.join(cells).rstrip()

    return [line(row) for row in (head, *rows)]


def _beside(firsts: Row, rest: Row, room: int) -> list[str]:
    """Return the lines of a table; a first cell that is wider than `room` is on a line of its own."""
    column = max((size for first in firsts if (size := cell_len(first)) <= room), default=0)
    lines = []
    for first, cells in zip(firsts, rest, strict=True):
        is_long = cell_len(first) > room
        lines += [first] if is_long else []
        margin = column if is_long else column - cell_len(first)
        lines.append(f"{'' if is_long else first}{' ' * margin}{_GAP}{cells}".rstrip())
    return [line for line in lines if line]


def _stack_cells(head: Row, row: Row, limit: int) -> list[str]:
    """Return a row of which each cell is on a line, behind its head or below it."""
    lines = [row[0]]
    for name, cell in zip(head[1:], row[1:], strict=True):
        line = f"{_INDENT}{name}{_GAP}{cell}".rstrip()
        below = (f"{2 * _INDENT}{part}" for part in folded(cell, limit - 2 * len(_INDENT)))
        lines += [line] if cell_len(line) <= limit else [f"{_INDENT}{name}", *below]
    return lines


def _widest(lines: Sequence[str]) -> int:
    return max(map(cell_len, lines), default=0)
