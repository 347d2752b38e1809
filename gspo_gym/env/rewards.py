"""Rewards of named, weighted terms, and the achievements of an episode.

An environment's `step` returns a `Reward`, a plain number, or None for "not scored here". `RewardTerms` makes a reward
from small functions with weights, called with what their parameters name: `def brevity(action): ...` gets the action.

`Achievements` are named events. An environment calls `unlock` and gives `turn_events()` to the turn's `Reward`; the
names reach `Turn.events`, which step rewards count and judges see. It reports a name every time: the setting
`training.event_rewards_kind` decides whether a name counts once an episode ("unique") or in every turn ("absolute").
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gspo_gym.errors import ConfigError, ContractError, EnvError, GymError, UsageError, described, nearest_name
from gspo_gym.types import is_finite


# A numpy float, which is a Python float too: Gymnasium's checker accepts no other subclass of float.
class Reward(np.float64):
    """A float with its named terms.

    Arithmetic gives plain numbers; copies and pickles keep the terms.

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
            if not isinstance(value, int | float | np.number | np.bool_) or not is_finite(value):
                raise ContractError(f"reward term {name!r}: expected a finite number, got {described(value)}")
        if isinstance(events, str) or not all(isinstance(event, str) for event in events):
            raise ContractError(f"reward events: expected a sequence of names, got {events!r}")
        if not (success is None or isinstance(success, bool | np.bool_)):
            raise ContractError(f"reward success: expected True, False or None, got {success!r}")
        floats = {name: float(value) for name, value in terms.items()}
        try:
            self = super().__new__(cls, math.fsum(floats.values()))
        except OverflowError:
            raise ContractError(
                f"reward terms {sorted(floats)}: their sum is too large for a number; scale them"
            ) from None
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
        """Return the reward of terms score x weight."""
        # A forgotten weight is an error, not a weight of 0 or 1.
        missing = sorted(set(scores) - set(weights))
        if missing:
            raise ContractError(f"reward terms {missing} have no weight; weights exist for {sorted(weights)}")
        try:
            terms = {name: score * weights[name] for name, score in scores.items()}
        except OverflowError:  # of a whole number that no float holds
            raise ContractError(f"reward terms: expected finite numbers, got {described(dict(scores))}") from None
        return cls(terms, events=events, success=success)

    # numpy's own methods would return a bare float64.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (dict(self.terms), self.events, self.success)

    def __copy__(self) -> Reward:
        return self

    def __deepcopy__(self, memo: Any) -> Reward:
        return self


def _rebuilt(terms: Mapping[str, float], events: tuple[str, ...], success: bool | None) -> Reward:
    return Reward(terms, events=events, success=success)


class RewardTerms:
    """Small functions with weights, each a term of the reward under the function's name.

    A function is called with what its parameters name, and returns a number, a bool, or None for "not scored", which
    makes the whole reward None, never 0. It may be async.

    Args:
        functions: finite weight of each; a negative one makes a penalty.

    Attributes:
        weights: by name.

    Raises:
        ConfigError: two functions have the same name, one has none or cannot be called by keyword, or a weight is not
            finite.

    >>> def correct(action, answer):
    ...     return action == answer
    >>> def length(action):
    ...     return len(action)
    >>> terms = RewardTerms({correct: 1.0, length: -0.01})
    >>> reward = terms.score(action="4", answer="4", success=True)
    >>> float(reward), dict(reward.terms)
    (0.99, {'correct': 1.0, 'length': -0.01})
    """

    def __init__(self, functions: Mapping[AnyFunction, float]) -> None:
        function_by_name: dict[str, KeywordFunction] = {}
        for function, weight in functions.items():
            name = getattr(function, "__name__", "")
            if not name.isidentifier():
                raise ConfigError(f"RewardTerms: expected functions with a name (def), got {function!r:.80}")
            if name in function_by_name:
                raise ConfigError(f"RewardTerms: expected one function of each name, got {name!r} twice")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not is_finite(weight):
                raise ConfigError(f"RewardTerms: expected a finite weight for {name!r}, got {described(weight)}")
            function_by_name[name] = KeywordFunction.of(function, f"reward term {name!r}")
        self._functions = function_by_name
        self.weights: Mapping[str, float] = MappingProxyType(
            dict(zip(function_by_name, map(float, functions.values()), strict=True))
        )

    def score(self, *, events: Sequence[str] = (), success: bool | None = None, **inputs: Any) -> Reward | None:
        """Return the reward of a turn, or None if a term is not scored. `events` and `success` are as in `Reward`.

        `inputs` is what the functions look at (action, task, state, messages, ...), beside `events` and `success`;
        parameters with a default may be left out.

        Raises:
            ContractError: a term asks for something that is not given, or is not a finite number.
            EnvError: a function raised; names it.
            UsageError: a function is async: await `score_async`.
        """
        asynchronous = [name for name, function in self._functions.items() if function.is_async]
        if asynchronous:
            raise UsageError(f"RewardTerms.score: {asynchronous} are async; await score_async instead")
        return self._weigh({**inputs, "events": events, "success": success}, {})

    async def score_async(
        self, *, events: Sequence[str] = (), success: bool | None = None, **inputs: Any
    ) -> Reward | None:
        """Return the reward like `score`, awaiting async terms one after another."""
        inputs = {**inputs, "events": events, "success": success}
        async_scores: dict[str, Any] = {}
        for name, function in self._functions.items():
            if function.is_async:
                with _naming(name):
                    async_scores[name] = await function(inputs)
        return self._weigh(inputs, async_scores)

    def _weigh(self, inputs: Mapping[str, Any], async_scores: Mapping[str, Any]) -> Reward | None:
        scores: dict[str, float] = {}
        for name, function in self._functions.items():
            with _naming(name):
                score = async_scores[name] if function.is_async else function(inputs)
            if score is None:
                return None
            if not isinstance(score, int | float | np.number | np.bool_) or not is_finite(score):
                raise ContractError(
                    f"reward term {name!r}: expected a finite number, a bool or None (not scored), "
                    f"got {described(score)}"
                )
            scores[name] = float(score)
        return Reward.weighted(scores, self.weights, events=inputs["events"], success=inputs["success"])


@contextmanager
def _naming(term: str) -> Iterator[None]:
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        raise EnvError(f"reward term {term!r} raised {type(error).__name__}: {error}") from error


class Achievements:
    """The achievements of an episode and of the current turn.

    `names` are all of them; `unlock` refuses others, so a typing error earns nothing.
    >>> achievements = Achievements(["collect_wood", "place_table"])
    >>> achievements.unlock("collect_wood"), achievements.unlock("collect_wood")
    (True, False)
    >>> achievements.turn_events()
    ('collect_wood',)
    >>> achievements.unlock("collect_wood"), achievements.turn_events()  # not new, but reached again
    (False, ('collect_wood',))
    >>> achievements.turn_events(), achievements.unlocked
    ((), ('collect_wood',))
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in self.names):
            raise ContractError(f"Achievements: expected a collection of names, got {names!r:.80}")
        if len(set(self.names)) < len(self.names):
            raise ContractError(f"Achievements: expected each name once, got {list(self.names)}")
        self._unlocked_names: dict[str, None] = {}  # dicts as ordered sets
        self._of_turn: dict[str, None] = {}

    @property
    def unlocked(self) -> tuple[str, ...]:
        """Return the achievements of this episode, each once, in the order of first reaching them."""
        return tuple(self._unlocked_names)

    def reset(self) -> None:
        self._unlocked_names, self._of_turn = {}, {}

    def unlock(self, name: str) -> bool:
        """Note that `name` was achieved in this turn; return whether it is new in this episode."""
        if name not in self.names:
            raise ContractError(f"there is no achievement {name!r}; {nearest_name(name, self.names)}")
        is_new = name not in self._unlocked_names
        self._unlocked_names[name] = self._of_turn[name] = None
        return is_new

    def turn_events(self) -> tuple[str, ...]:
        """Return the achievements since the last call, new or again, each once: the `events` of the turn's reward."""
        events, self._of_turn = tuple(self._of_turn), {}
        return events


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
        keyword_parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        optional = frozenset(
            parameter.name for parameter in keyword_parameters if parameter.default is not parameter.empty
        )
        return cls(
            function=function,
            where=where,
            required=frozenset(parameter.name for parameter in keyword_parameters) - optional,
            optional=optional if len(keyword_parameters) == len(parameters) else None,
            # The second test finds an object with an async __call__.
            is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        )

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Return the function's answer, or an awaitable of it; a ContractError if a required name is not given."""
        for name in sorted(self.required - inputs.keys()):
            raise ContractError(f"{self.where} takes {name!r}, which is not given; {nearest_name(name, inputs)}")
        input_names = inputs.keys() if self.optional is None else self.required | self.optional
        return self.function(**{name: value for name, value in inputs.items() if name in input_names})
