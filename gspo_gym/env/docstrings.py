"""What a docstring says about a function and its parameters, in Google's or reST style. Called by `tools.py`."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

_ARGS = re.compile(r"(Args|Arguments|Parameters):\s*$")
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?|Attributes|Warnings?|References|See Also):\s*$"
)
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?:\([^)]*\))?:\s*(.*)$")
_REST_FIELD = re.compile(r":(\w+)\s*([^:]*):\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """`description` is what stands before the first section; `parameters` maps names to their descriptions."""

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    '''The parts of a docstring; lines of a paragraph are joined.

    >>> parse_docstring("""Add two numbers.
    ...
    ...     Args:
    ...         a (int): the first,
    ...             which may be negative
    ...         b: the second
    ... """)
    Docstring(description='Add two numbers.', parameters={'a': 'the first, which may be negative', 'b': 'the second'})
    >>> parse_docstring("Add.\\n\\n:param int a: the first\\n:returns: the sum")
    Docstring(description='Add.', parameters={'a': 'the first'})
    '''
    lines = inspect.cleandoc(text or "").splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.match(line) or _REST_FIELD.match(line)]
    stops = [*starts, len(lines)]
    parameters: dict[str, str] = {}
    for start, stop in zip(starts, stops[1:], strict=True):
        if _ARGS.match(lines[start]):
            parameters |= _google_entries(lines[start + 1 : stop])
        elif (field := _REST_FIELD.match(lines[start])) and field[1] == "param" and field[2].strip():
            parameters[field[2].split()[-1]] = _joined([field[3], *lines[start + 1 : stop]])
    return Docstring(_paragraphs(lines[: stops[0]]), parameters)


def _google_entries(lines: list[str]) -> dict[str, str]:
    """The entries of an "Args:" section: they share one indentation, and their further lines are deeper."""
    margin = next((_indentation(line) for line in lines if line.strip()), 0)
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        if margin == 0 or _indentation(line) < margin:
            break
        entry = _GOOGLE_ENTRY.match(line.strip()) if _indentation(line) == margin else None
        if entry is None:
            current.append(line)
            continue
        current = [entry[2]]
        texts |= dict.fromkeys(re.split(r"\s*,\s*", entry[1]), current)
    return {name: _joined(text) for name, text in texts.items()}


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def _paragraphs(lines: list[str]) -> str:
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return "\n".join(_joined(block.splitlines()) for block in blocks)
