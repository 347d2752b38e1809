"""Which cases of a parametrized test are quick and which are left to `make more`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases, those marked slow that are not among `quick`; of a tuple its first value is looked up."""
    return [case if _name(case) in quick else pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def _name(case: Any) -> Any:
    return _values(case)[0]
