"""Named, weighted reward terms -> one reward that Gymnasium accepts as a number.

Environment authors return a `Reward` (or a plain float) from `step`; None means "not scored here".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.errors import ContractError


class Reward(np.float64):
    """A float that remembers what it is made of.

    A numpy float (which is a Python float too), because Gymnasium's checker recognises no other subclass of float.
    Arithmetic gives plain numbers; copies and pickles stay whole.

    Attributes:
        terms: weighted contributions by name; their sum is the float.
        events: names of achievements reached in this turn.
        success: whether the task was achieved; None while undecided.

    Raises:
        ContractError: a term is not a finite number, `events` not strings or `success` not a bool.

    >>> r = Reward.weighted({"found": 1.0, "inconsistent": 1.0}, {"found": 1.0, "inconsistent": -0.1})
    >>> float(r), dict(r.terms)
    (0.9, {'found': 1.0, 'inconsistent': -0.1})
    """

    terms: Mapping[str, float]
    events: tuple[str, ...]
    success: bool | None

    def __new__(cls, terms: Mapping[str, float], *, events: Sequence[str] = (), success: bool | None = None) -> Reward:
        for name, value in terms.items():
            if not isinstance(value, int | float | np.number | np.bool_) or not math.isfinite(value):
                raise ContractError(f"reward term {name!r}: expected a finite number, got {value!r}")
        if isinstance(events, str) or not all(isinstance(event, str) for event in events):
            raise ContractError(f"reward events: expected a sequence of names, got {events!r}")
        if not (success is None or isinstance(success, bool | np.bool_)):
            raise ContractError(f"reward success: expected True, False or None, got {success!r}")
        floats = {name: float(value) for name, value in terms.items()}
        self = super().__new__(cls, math.fsum(floats.values()))
        self.terms = floats
        self.events = tuple(events)
        self.success = None if success is None else bool(success)
        return self

    @classmethod
    def weighted(
        cls,
        scores: Mapping[str, float],
        weights: Mapping[str, float],
        *,
        events: Sequence[str] = (),
        success: bool | None = None,
    ) -> Reward:
        """The reward whose terms are score x weight; every score needs a weight (a forgotten one is an error)."""
        missing = sorted(set(scores) - set(weights))
        if missing:
            raise ContractError(f"reward terms {missing} have no weight; weights exist for {sorted(weights)}")
        return cls({name: scores[name] * weights[name] for name in scores}, events=events, success=success)

    # numpy's own versions would give back a bare float64.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (dict(self.terms), self.events, self.success)

    def __copy__(self) -> Reward:
        return self

    def __deepcopy__(self, memo: Any) -> Reward:
        return self


def _rebuilt(terms: Mapping[str, float], events: tuple[str, ...], success: bool | None) -> Reward:
    return Reward(terms, events=events, success=success)
