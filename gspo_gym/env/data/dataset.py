"""DatasetEnv: questions with answers as an environment like any other; one answer, one reward, the end.

In a config: `rollout.env_name = "Dataset"` with `rollout.env_config = { rows = "train.jsonl", reward = "number" }`. The
meaning is that of AgileRL 2.7's ReasoningGym, but for the seed, which names the row, so that an evaluation can be
repeated, and for the two sides, which cannot overlap.

What an answer to a row is worth: graders to choose from by name, and a user's own function.

A function takes any of `completion` (what the model said), `answer`, `question` and the row's other columns, by
keyword; it may be async. It returns a number, a bool (right or wrong, which is also the success), a mapping of named
terms, a `Reward`, or None for "not scored here".
"""

from __future__ import annotations

import copy
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy, TextEnv
from gspo_gym.env.data.rows import (
    ConversationTemplate,
    Questions,
    Reading,
    Row,
    RowSource,
    as_text,
    load_questions,
    named_object,
)
from gspo_gym.env.data.splits import checked_fraction, next_seed
from gspo_gym.env.keyword_calls import AnyFunction, KeywordFunction
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, ContractError, UnknownNameError, nearest_name

_DEFAULT_FRACTION = 0.1


class DatasetEnv(TextEnv):
    """One row an episode: the model is shown the conversation, answers once, and the reward function grades it.

    Seeds below 2**31 name held-out rows, those from there up (which training draws) training rows: see
    `Questions.of_seed`. An answer that could not even be read earns the least of `reward_range`, or 0.

    Args:
        rows: a .jsonl, .json, .csv, .parquet or .arrow file, a folder or "hub:OWNER/NAME?split=train" of the datasets
            package, MODULE:NAME (rows, or a function that gives them), or rows in memory.
        held_out: the same, for evaluation; training rows that ask what one of these asks are left out. None: a part of
            `rows` is held out.
        held_out_fraction: how large a part, in (0, 1); 0.1 by default, and only without `held_out`.
        split_seed: another split and another order of the rows.
        reward: "exact", "contains", "number", "boxed", "choice" (see `env/data/dataset.py`), MODULE:NAME or a function.
        reward_range: the least and the most that `reward` gives; a number that reaches the most is a success. None: 0
            to 1 for the named graders, unknown for others.
        conversation: messages {role, content} with {column} placeholders.
        columns: names for the data set's columns, such as {"question": "problem", "answer": "solution"}.
        max_prompt_characters: rows whose conversation is longer are left out; None: none is. Tokens are not counted
            here, where no model is known: the rollout truncates what exceeds rollout.max_model_len.

    Raises:
        ConfigError, UnknownNameError, MissingExtraError: the rows cannot be read, some are bad, or an argument is.

    >>> env = DatasetEnv([{"question": "2+2?", "answer": "4"}], held_out=[{"question": "3+3?", "answer": "6"}])
    >>> env.reset(seed=0)[0][-1].content
    '3+3?'
    >>> env.step("6")[1].success
    True
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        held_out: RowSource | None = None,
        held_out_fraction: float | None = None,
        split_seed: int = 0,
        reward: str | RewardFunction = "exact",
        reward_range: Sequence[float] | None = None,
        conversation: Sequence[Mapping[str, str]] = ({"role": "user", "content": "{question}"},),
        columns: Mapping[str, str] | None = None,
        max_prompt_characters: int | None = None,
    ) -> None:
        fraction = checked_fraction(
            held_out_fraction, _DEFAULT_FRACTION, has_own_held_out=held_out is not None, where="DatasetEnv"
        )
        if max_prompt_characters is not None and max_prompt_characters < 1:
            raise ConfigError(f"DatasetEnv: expected max_prompt_characters >= 1, got {max_prompt_characters}")
        self._named_reward = reward
        self._reward = RowReward.of(reward)
        self.reward_range = _range(reward_range, is_graded=reward in (*GRADERS, *GRADERS.values()))
        reading = Reading(
            ConversationTemplate.of(conversation),
            self._reward.required,
            tuple(sorted((columns or {}).items())),
            max_prompt_characters,
        )
        self._conversation = reading.conversation
        self.questions: Questions = load_questions(
            rows, held_out, reading, held_out_fraction=fraction, split_seed=split_seed
        )
        if "answer" in self._reward.required | self._conversation.columns:
            # on the instance: without answers there is nobody who knows them
            self.policies: Mapping[str, PolicyFactory] = {"reference": right_answer, "random": others_answer}  # type: ignore[misc]
        self._row: Row | None = None  # None: no episode is being played

    def another(self) -> DatasetEnv:
        """A fresh environment of the same questions, which are not read again: the entry point to register."""
        fresh = copy.copy(self)
        fresh._row, fresh._np_random, fresh._np_random_seed = None, None, None
        return fresh

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begins the row of the seed, or one drawn as `splits.next_seed` says; `info` says where the row stands."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"DatasetEnv.reset: expected no options, got {sorted(options)}")
        self._row = self.questions.of_seed(next_seed(self.np_random) if seed is None else seed)
        return self._answer((self._conversation.messages(self._row.values), {"row": self._row.where}))

    def step(self, action: str) -> Any:
        """Gymnasium's 5-tuple, or an awaitable of it where the reward function is async; the episode is over."""
        row = self._finish("step")
        answered = self._reward(action, row.values)
        if self._reward.is_async:
            return self._awaited(answered)
        return self._over(self._reward.as_reward(answered, self.reward_range[1]))

    def invalid_action(self, error: str) -> Any:
        """An answer that could not be read is a wrong one."""
        del error  # nobody is left to read it: the episode is over
        self._finish("invalid_action")
        low, high = self.reward_range
        # without a range nobody knows what success is worth, so none is declared
        success = False if np.isfinite(high) else None
        return self._answer(self._over(Reward({"unreadable": low if np.isfinite(low) else 0.0}, success=success)))

    @property
    def right_answer(self) -> str:
        """The text that the reference policy says: the answer of the row that is being played."""
        if self._row is None:
            raise ResetNeeded("DatasetEnv.right_answer: no episode is being played; call reset first")
        return reference_text(self._named_reward, self._row.values["answer"])

    def random_answer(self, rng: np.random.Generator) -> str:
        """The answer of a training row drawn from `rng`."""
        row = self.questions.train[int(rng.integers(len(self.questions.train)))]
        return reference_text(self._named_reward, row.values["answer"])

    def _finish(self, method: str) -> Row:
        if self._row is None:
            raise ResetNeeded(f"DatasetEnv.{method}: no episode is being played; call reset first")
        row, self._row = self._row, None
        return row

    async def _awaited(self, answered: Awaitable[Any]) -> Any:
        return self._over(self._reward.as_reward(await answered, self.reward_range[1]))

    def _over(self, reward: Reward | None) -> tuple[str, Reward | None, bool, bool, dict[str, Any]]:
        return "", reward, True, False, {}

    def _answer(self, answer: Any) -> Any:
        """An awaitable where `step` gives one, so that a caller sees one kind of environment."""
        return _soon(answer) if self._reward.is_async else answer


def right_answer(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Says the answer of the row (Any: `PolicyFactory` fixes the type)."""
    return lambda _messages: str(env.right_answer)


def others_answer(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Says the answer of a training row drawn at random: the form of an answer without its content."""
    return lambda _messages: str(env.random_answer(rng))


async def _soon(answer: Any) -> Any:
    return answer


def _range(declared: Sequence[float] | None, *, is_graded: bool) -> tuple[float, float]:
    if declared is None:
        return (0.0, 1.0) if is_graded else (-float("inf"), float("inf"))
    if len(declared) != 2 or not declared[0] < declared[1]:
        raise ConfigError(f"DatasetEnv: expected reward_range to be (least, most), got {declared!r}")
    return float(declared[0]), float(declared[1])


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
