"""Actions: the numbered actions of a Gymnasium space, by name. For `discrete.py` and its scripted players."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete

from gspo_gym.errors import ConfigError


@dataclass(frozen=True)
class Actions:
    """What may be chosen in each dimension of an action; a Discrete space has one dimension.

    Attributes:
        names: for each dimension the names, in the order of their numbers.
        starts: for each dimension the number of its first name.
        is_single: whether an action is one number (Discrete) or an array of them (MultiDiscrete).

    >>> actions = Actions.of(Discrete(3), ["left", "stay", "right"])
    >>> actions.parse(" Right "), actions.parse("1"), actions.parse("jump")
    (2, 1, None)
    >>> Actions.of(MultiDiscrete([2, 2]), [["up", "down"], ["open", "close"]]).parse("down, open")
    array([1, 0])
    """

    names: tuple[tuple[str, ...], ...]
    starts: tuple[int, ...]
    is_single: bool

    @classmethod
    def of(cls, space: Any, names: Sequence[Any] | None) -> Actions:
        """The actions of a space (Any: whatever an environment has); None: they are called by their numbers.

        Raises:
            ConfigError: the space is not discrete, or the names do not fit it.
        """
        counts: tuple[int, ...]
        starts: tuple[int, ...]
        if isinstance(space, Discrete):
            counts, starts, is_single = (int(space.n),), (int(space.start),), True
            names = None if names is None else [names]
        elif isinstance(space, MultiDiscrete) and space.nvec.ndim == 1:
            counts, starts, is_single = tuple(map(int, space.nvec)), tuple(map(int, space.start)), False
        else:
            raise ConfigError(f"DiscreteEnv: expected a Discrete action space, or a flat MultiDiscrete, got {space}")
        if names is None:
            names = [
                [str(start + index) for index in range(count)] for count, start in zip(counts, starts, strict=True)
            ]
        given = tuple(tuple(str(name) for name in dimension) for dimension in names)
        if tuple(map(len, given)) != counts or any(len(set(map(_folded, d))) != len(d) for d in given):
            raise ConfigError(f"DiscreteEnv: expected different action_names, {counts} of them, got {names}")
        return cls(given, starts, is_single)

    def parse(self, text: str) -> Any:
        """The action that a text names, by names or numbers; None if it is none."""
        parts = [text] if self.is_single else text.split(",")
        if len(parts) != len(self.names):
            return None
        chosen = [self._number(dimension, part) for dimension, part in enumerate(parts)]
        if None in chosen:
            return None
        return chosen[0] if self.is_single else np.array(chosen)

    def sample(self, rng: np.random.Generator) -> str:
        """A random action, by its names."""
        return ", ".join(dimension[int(rng.integers(len(dimension)))] for dimension in self.names)

    def name(self, number: int) -> str:
        """What a number of the first dimension is called."""
        return self.names[0][number - self.starts[0]]

    def __str__(self) -> str:
        if self.is_single:
            return ", ".join(self.names[0])
        return "one of each, separated by commas: " + " - ".join("/".join(dimension) for dimension in self.names)

    def _number(self, dimension: int, text: str) -> int | None:
        names, start = self.names[dimension], self.starts[dimension]
        folded = _folded(text)
        for index, name in enumerate(names):
            if folded == _folded(name):
                return start + index
        # names come first: they may be numbers themselves
        if re.fullmatch(r"-?\d{1,9}", folded) and start <= int(folded) < start + len(names):
            return int(folded)
        return None


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()
