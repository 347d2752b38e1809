"""Functions of an author's that are given, by keyword, what their parameters name, and nothing else.

So a reward function says in its signature what it looks at: `def brevity(action): ...`. Plain or async. Called by
`rewards.RewardTerms` and `dataset_rewards.RowReward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_gym.errors import ConfigError, ContractError, nearest_name

AnyFunction = Callable[..., Any]  # Any: what it takes, and whether it has to be awaited, is its own affair


@dataclass(frozen=True)
class KeywordFunction:
    """A function, and what it takes.

    Attributes:
        function: as the author gave it.
        where: what it is, in errors ("reward 'exact'").
        required: what it must be given.
        optional: what it is given where there is such a thing; None: everything.
        is_async: its answer must be awaited.
    """

    function: AnyFunction
    where: str
    required: frozenset[str]
    optional: frozenset[str] | None
    is_async: bool

    @classmethod
    def of(cls, function: Any, where: str) -> KeywordFunction:
        """From a function or an object that can be called (Any: what a user gave).

        Raises:
            ConfigError: it cannot be called by keyword.
        """
        if not callable(function):
            raise ConfigError(f"{where}: expected a function, got {function!r:.80}")
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(f"{where}: expected parameters to be given by keyword, got {parameter}")
        named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        optional = frozenset(parameter.name for parameter in named if parameter.default is not parameter.empty)
        return cls(
            function=function,
            where=where,
            required=frozenset(parameter.name for parameter in named) - optional,
            optional=optional if len(named) == len(parameters) else None,
            # the second: an object with an async __call__
            is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        )

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """What the function answers, or an awaitable of it (Any, here and in `given`: the author's own affair).

        Raises:
            ContractError: something that it takes is not among what is given; says the nearest.
        """
        for name in sorted(self.required - given.keys()):
            raise ContractError(f"{self.where} takes {name!r}, which is not given; {nearest_name(name, given)}")
        wanted = given.keys() if self.optional is None else self.required | self.optional
        return self.function(**{name: value for name, value in given.items() if name in wanted})
