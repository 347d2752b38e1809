"""Named, weighted reward terms -> one reward that Gymnasium accepts as a number.

Environment authors return a `Reward` (or a plain float) from `step`; None means "not scored here".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gspo_gym.errors import ContractError


class Reward(float):
    """A float that remembers what it is made of.

    Attributes:
        terms: weighted contributions by name; their sum is the float.
        events: names of achievements reached in this turn.
        success: whether the task was achieved; None while undecided.

    >>> r = Reward.weighted({"found": 1.0, "inconsistent": 1.0}, {"found": 1.0, "inconsistent": -0.1})
    >>> float(r), dict(r.terms)
    (0.9, {'found': 1.0, 'inconsistent': -0.1})
    """

    terms: Mapping[str, float]
    events: tuple[str, ...]
    success: bool | None

    def __new__(
        cls, terms: Mapping[str, float], *, events: tuple[str, ...] = (), success: bool | None = None
    ) -> Reward:
        for name, value in terms.items():
            if not math.isfinite(value):
                raise ContractError(f"reward term {name!r}: expected a finite number, got {value}")
        self = super().__new__(cls, math.fsum(terms.values()))
        self.terms = dict(terms)
        self.events = tuple(events)
        self.success = success
        return self

    @classmethod
    def weighted(
        cls,
        scores: Mapping[str, float],
        weights: Mapping[str, float],
        *,
        events: tuple[str, ...] = (),
        success: bool | None = None,
    ) -> Reward:
        """The reward whose terms are score x weight; every score needs a weight (a forgotten one is an error)."""
        missing = sorted(set(scores) - set(weights))
        if missing:
            raise ContractError(f"reward terms {missing} have no weight; weights exist for {sorted(weights)}")
        return cls({name: scores[name] * weights[name] for name in scores}, events=events, success=success)
