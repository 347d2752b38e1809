"""Functions of authors, called with what their parameters name: `def brevity(action): ...` gets the action."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_gym.errors import ConfigError, ContractError, nearest_name

AnyFunction = Callable[..., Any]  # plain or async, with any parameters


@dataclass(frozen=True)
class KeywordFunction:
    """A function and the names that it must and may be given (`optional` None: all, for `**kwargs`).

    `where` is its name in errors ("reward 'exact'"); `is_async`: its answer must be awaited.
    """

    function: AnyFunction
    where: str
    required: frozenset[str]
    optional: frozenset[str] | None
    is_async: bool

    @classmethod
    def of(cls, function: Any, where: str) -> KeywordFunction:
        """Return the record of a function or a callable object; a ConfigError if it cannot be called by keyword."""
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
            # The second test finds an object with an async __call__.
            is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        )

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """Return the function's answer, or an awaitable of it; a ContractError if a required name is not given."""
        for name in sorted(self.required - given.keys()):
            raise ContractError(f"{self.where} takes {name!r}, which is not given; {nearest_name(name, given)}")
        wanted = given.keys() if self.optional is None else self.required | self.optional
        return self.function(**{name: value for name, value in given.items() if name in wanted})
