"""What an answer to a row is worth: graders to choose from by name, and a user's own function.

A function takes any of `completion` (what the model said), `answer`, `question` and the row's other columns, by
keyword; it may be async. It returns a number, a bool (right or wrong, which is also the success), a mapping of named
terms, a `Reward`, or None for "not scored here". Called by `dataset.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np

from gspo_gym.env.data.questions import as_text
from gspo_gym.env.data.rows import named_object
from gspo_gym.env.keyword_calls import AnyFunction, KeywordFunction
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ContractError, UnknownNameError, nearest_name

RewardFunction = AnyFunction

# "1,234.5", "-3", ".5"; a minus between two numbers is an operator
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)-?\.\d+")
_LETTER = re.compile(r"(?<![\w'])([A-H])(?![\w'])")


def exact(completion: str, answer: Any) -> bool:
    """The completion is the answer, but for white space around it (Any, here and below: a column's value)."""
    return completion.strip() == as_text(answer).strip()


def contains(completion: str, answer: Any) -> bool:
    """The answer occurs in the completion, whole words, in any case.

    >>> contains("It is PARIS.", "Paris"), contains("14", 4)
    (True, False)
    """
    pattern = r"(?<!\w)" + re.escape(as_text(answer).strip().casefold()) + r"(?!\w)"
    return re.search(pattern, completion.casefold()) is not None


def number(completion: str, answer: Any) -> bool:
    """The last number in the completion equals the last number in the answer, which may be a whole solution.

    >>> number("so 1,200.0 apples", "40 * 30 = 1200 #### 1200")
    True
    """
    said, right = _last_number(completion), _last_number(as_text(answer))
    return said is not None and said == right


def boxed(completion: str, answer: Any) -> bool:
    r"""The last \boxed{...} of the completion holds the answer, or that of the answer: as text or as a number.

    >>> boxed(r"Thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), boxed("1/2", "1/2")
    (True, False)
    """
    said = _last_boxed(completion)
    if said is None:
        return False
    text = as_text(answer)
    right = _last_boxed(text)
    right = text if right is None else right
    return _bare(said) == _bare(right) or (_is_number(said) and _is_number(right) and number(said, right))


def choice(completion: str, answer: Any) -> bool:
    """The last single capital letter, A to H, in the completion is that of the answer.

    >>> choice("Not (A), rather (C).", "C")
    True
    """
    letters, right = _LETTER.findall(completion), _LETTER.findall(as_text(answer))
    return bool(letters) and bool(right) and letters[-1] == right[-1]


GRADERS: Mapping[str, RewardFunction] = MappingProxyType(
    {grader.__name__: grader for grader in (exact, contains, number, boxed, choice)}
)


@dataclass(frozen=True)
class RowReward:
    """A reward function of what the model said and of a row's columns.

    Attributes:
        name: of it, in errors.
        function: which columns it takes.
    """

    name: str
    function: KeywordFunction

    @classmethod
    def of(cls, reward: str | RewardFunction) -> RowReward:
        """From a grader's name, MODULE:NAME, or a function.

        Raises:
            UnknownNameError: there is none of that name.
            ConfigError: it cannot be called by keyword.
        """
        function = _named_function(reward) if isinstance(reward, str) else reward
        name = reward if isinstance(reward, str) else getattr(reward, "__name__", repr(reward))
        return cls(name, KeywordFunction.of(function, f"reward {name!r}"))

    @property
    def required(self) -> frozenset[str]:
        """Columns that it must be given."""
        return self.function.required - {"completion"}

    @property
    def is_async(self) -> bool:
        """Whether its answer must be awaited."""
        return self.function.is_async

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Any:
        """What the function answers, or an awaitable of it (Any: judged by `as_reward`).

        A column named "completion" is hidden by what the model said.
        """
        return self.function({**row, "completion": completion})

    def as_reward(self, answered: Any, top: float) -> Reward | None:
        """The function's answer as a reward; a plain number is a success from `top` up, if that is finite.

        Raises:
            ContractError: it is none of what a reward function may return.
        """
        if answered is None or isinstance(answered, Reward):
            return answered
        if isinstance(answered, bool | np.bool_):
            return Reward({"correct": float(answered)}, success=bool(answered))
        terms = answered if isinstance(answered, Mapping) else {"reward": answered}
        try:
            reward = Reward(terms)
        except ContractError as error:
            raise ContractError(f"reward {self.name!r}: {error}") from error
        return Reward(terms, success=bool(reward >= top)) if np.isfinite(top) else reward


def reference_text(reward: str | RewardFunction, answer: Any) -> str:
    """What a player who knows the answer says, so that the grader understands it."""
    text = as_text(answer)
    return f"\\boxed{{{text}}}" if reward in ("boxed", boxed) and _last_boxed(text) is None else text


def _named_function(name: str) -> Any:
    if name in GRADERS:
        return GRADERS[name]
    if ":" not in name:
        raise UnknownNameError(f"reward {name!r}: expected MODULE:NAME or a grader; {nearest_name(name, GRADERS)}")
    return named_object(name, "reward")


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.strip().strip("$%")) is not None


def _last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, braces inside it balanced; None: there is none, or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def _bare(text: str) -> str:
    return "".join(text.split()).strip("$.")
