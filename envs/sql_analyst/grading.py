"""Is an answer in words the result of the gold SQL? Values are compared, never texts of queries."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .database import Value

_TOLERANCE = 0.005 + 1e-9  # half a cent: a fraction may be rounded to two decimals, either way
_QUOTES = "'\"`"


def is_correct(answer: str, gold: Sequence[Value], *, is_ordered: bool) -> bool:
    """Whether the answer names exactly the gold values.

    One gold value: the whole answer is it. Several: the answer is split at commas, semicolons and new lines, and must
    name as many; in any order unless `is_ordered`. White space around, brackets around the list, quotes around a value
    and the case of letters do not count. Whole numbers must be exact, others within 0.005.

    >>> is_correct("12.35", [12.345], is_ordered=False), is_correct("13", [12], is_ordered=False)
    (True, False)
    >>> is_correct("['Turin', 'cork']", ["Cork", "Turin"], is_ordered=False)
    True
    """
    if len(gold) == 1:
        return _is_same(_bare(answer), gold[0])
    named = [_bare(part) for part in re.split(r"[,;\n]", answer.strip().strip("[]()"))]
    if len(named) != len(gold):
        return False
    if not is_ordered:
        return _match_in_any_order(named, list(gold))
    return all(_is_same(name, value) for name, value in zip(named, gold, strict=True))


def _match_in_any_order(named: Sequence[str], gold: list[Value]) -> bool:
    """Greedy, which is enough: the gold values are further apart than twice the tolerance or equal."""
    for name in named:
        match = next((index for index, value in enumerate(gold) if _is_same(name, value)), None)
        if match is None:
            return False
        del gold[match]
    return True


def _is_same(name: str, value: Value) -> bool:
    if isinstance(value, str):
        return name.casefold() == _bare(value).casefold()
    if not isinstance(value, int | float) or re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?", name) is None:
        return False
    tolerance = _TOLERANCE if isinstance(value, float) else 0.0
    return abs(float(name) - value) <= tolerance


def _bare(text: str) -> str:
    """Without quotes and brackets around it, with single spaces and the keyboard's minus."""
    return " ".join(text.replace("\u2212", "-").strip().strip("[]()").strip().strip(_QUOTES).split())
