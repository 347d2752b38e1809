"""`DatasetEnv`: questions with answers as an environment with one turn, and the reward functions for its rows.

In a config: `rollout.env_name = "Dataset"` with `rollout.env_config = { rows = "train.jsonl", reward = "number" }`. It
follows AgileRL 2.7's ReasoningGym, except that the seed names the row, which makes evaluations repeatable, and that the
two sides cannot overlap.

A reward function takes any of `completion`, `answer`, `question` and the row's other columns by keyword, and may be
async. It returns a number, a bool (right or wrong, also the success), a mapping of named terms, a `Reward`, or None for
"not scored here".
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from gspo_gym.base.modules import named_object
from gspo_gym.env.core import PolicyFactory, ScriptedPolicy, TextEnv
from gspo_gym.env.data.rows import (
    ConversationTemplate,
    Questions,
    Reading,
    Row,
    RowSource,
    as_text,
    checked_fraction,
    load_questions,
    next_seed,
)
from gspo_gym.env.rewards import AnyFunction, KeywordFunction, Reward
from gspo_gym.errors import ConfigError, ContractError, UnknownNameError, nearest_name

_DEFAULT_FRACTION = 0.1


class DatasetEnv(TextEnv):
    """One row an episode: the model reads the conversation and answers once; the reward function grades the answer.

    Seeds below 2**31 name held-out rows, those above, which training draws, training rows: see `Questions.of_seed`. An
    unreadable answer earns the least of `reward_range`, or 0.

    Args:
        rows: a .jsonl, .json, .csv, .parquet or .arrow file; a folder or "hub:OWNER/NAME?split=train" of the datasets
            package; MODULE:NAME of rows or of a function that returns them; or rows in memory.
        held_out: the same, for evaluation; training rows with a question of these are left out. None holds out a part
            of `rows`.
        held_out_fraction: size of that part, in (0, 1); default 0.1. Only without `held_out`.
        split_seed: changes the split and the order of the rows.
        reward: "exact", "contains", "number", "boxed", "choice" (the functions below), MODULE:NAME or a function.
        reward_range: the least and the most that `reward` gives; a number that reaches the most is a success. None is 0
            to 1 for the named graders, unknown for others.
        conversation: messages {role, content} with {column} placeholders.
        columns: names for the data set's columns, such as {"question": "problem", "answer": "solution"}.
        max_prompt_characters: rows with a longer conversation are left out; None keeps all. Not tokens, because no
            model is known here: the rollout truncates at rollout.max_model_len.

    Raises:
        ConfigError, UnknownNameError, MissingExtraError: the rows cannot be read, a row is bad, or an argument is.

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
            # Set on the instance: rows without answers have no policies.
            self.policies: Mapping[str, PolicyFactory] = {"reference": right_answer, "random": others_answer}  # type: ignore[misc]
        self._row: Row | None = None  # None between episodes

    def another(self) -> DatasetEnv:
        """Return a fresh environment that shares the questions; register this to read them once."""
        fresh = copy.copy(self)
        fresh._row, fresh._np_random, fresh._np_random_seed = None, None, None
        return fresh

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begin the row of the seed, or of one drawn by `splits.next_seed`; `info` gives the row's place."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"DatasetEnv.reset: expected no options, got {sorted(options)}")
        self._row = self.questions.of_seed(next_seed(self.np_random) if seed is None else seed)
        return self._answer((self._conversation.messages(self._row.values), {"row": self._row.where}))

    def step(self, action: str) -> Any:
        """Return Gymnasium's 5-tuple at the end of the episode, or an awaitable of it for an async reward function."""
        row = self._finish("step")
        score = self._reward(action, row.values)
        if self._reward.is_async:
            return self._await_score(score)
        return self._over(self._reward.as_reward(score, self.reward_range[1]))

    def invalid_action(self, error: str) -> Any:
        """End the episode with a wrong answer."""
        del error  # no turn follows in which the model could read it
        self._finish("invalid_action")
        low, high = self.reward_range
        # Without a range, the value of a success is unknown, so neither success nor failure is declared.
        success = False if np.isfinite(high) else None
        return self._answer(self._over(Reward({"unreadable": low if np.isfinite(low) else 0.0}, success=success)))

    @property
    def right_answer(self) -> str:
        """Return the text with the current row's answer, which the reference policy says."""
        if self._row is None:
            raise ResetNeeded("DatasetEnv.right_answer: no episode is being played; call reset first")
        return reference_text(self._named_reward, self._row.values["answer"])

    def random_answer(self, rng: np.random.Generator) -> str:
        """Return the answer of a training row drawn from `rng`."""
        row = self.questions.train[int(rng.integers(len(self.questions.train)))]
        return reference_text(self._named_reward, row.values["answer"])

    def _finish(self, method: str) -> Row:
        if self._row is None:
            raise ResetNeeded(f"DatasetEnv.{method}: no episode is being played; call reset first")
        row, self._row = self._row, None
        return row

    async def _await_score(self, score: Awaitable[Any]) -> Any:
        return self._over(self._reward.as_reward(await score, self.reward_range[1]))

    def _over(self, reward: Reward | None) -> tuple[str, Reward | None, bool, bool, dict[str, Any]]:
        return "", reward, True, False, {}

    def _answer(self, answer: Any) -> Any:
        # Async like `step`, so the environment is of one kind to its caller.
        return _soon(answer) if self._reward.is_async else answer


def right_answer(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that says the row's answer."""
    return lambda _messages: str(env.right_answer)


def others_answer(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that says the answer of a random training row: the right form without the content."""
    return lambda _messages: str(env.random_answer(rng))


async def _soon(answer: Any) -> Any:
    return answer


def _range(reward_range: Sequence[float] | None, *, is_graded: bool) -> tuple[float, float]:
    if reward_range is None:
        return (0.0, 1.0) if is_graded else (-float("inf"), float("inf"))
    if len(reward_range) != 2 or not reward_range[0] < reward_range[1]:
        raise ConfigError(f"DatasetEnv: expected reward_range to be (least, most), got {reward_range!r}")
    return float(reward_range[0]), float(reward_range[1])


RewardFunction = AnyFunction

# "1,234.5", "-3", ".5", "1e3", "3/4", "50%"; a minus between two numbers is an operator, and dates are no fractions.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?"
    r"(?P<top>(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?)"
    r"(?:/(?P<bottom>-?\d{1,30})(?!\d|/|\.\d))?(?P<percent>\s?\\?%)?"
)
# What stands between thousands beside a comma: "1{,}000", "1\,000", "1,\!000", "1 000".
_BETWEEN_THOUSANDS = re.compile(r"\{,\}|,?\\[,!;: ]|[ \u00a0\u2009\u202f]")
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:(?:{_BETWEEN_THOUSANDS.pattern})\d{{3}})+(?!\d)")
_MIXED = re.compile(r"(?<![\d/.,])(\d{1,15}) ([1-9]\d{0,14})/(\d{1,15})(?![\d/.])")  # "3 1/2"
_MAX_EXACT = 100  # characters of a number that is compared as a fraction
_FRACTION = re.compile(
    r"(?:(\d{1,15})\s*)?\\frac(?:\s*(\d)\s*(\d)|\s*\{\s*(-?[\d,]{1,20}(?:\.\d{1,15})?)\s*\}\s*\{\s*(-?\d{1,15})\s*\})"
)
_WORDS = re.compile(r"\\(?:text|textrm|mathrm)\s*\{([^{}]*)\}")
# Around a number: "\text{about }5", "5\,\text{cm}^2".
_UNIT_WORDS = _WORDS.pattern.replace("[^{}]", r"[^{}\d]")
_BEFORE = re.compile(rf"^\s*{_UNIT_WORDS}\s*")
_UNIT = re.compile(rf"(?:\\[,;: ]|~|\s)*{_UNIT_WORDS}(?:\^(?:\d|\{{-?\d+\}}))?\s*$")
_LETTER = re.compile(r"(?<![\w'])([A-H])(?![\w'])")


def exact(completion: str, answer: Any) -> bool:
    """Return whether the completion is the answer, except for white space around it."""
    return completion.strip() == as_text(answer).strip()


def contains(completion: str, answer: Any) -> bool:
    """Return whether the answer occurs in the completion as whole words, in any case.

    >>> contains("It is PARIS.", "Paris"), contains("14", 4)
    (True, False)
    """
    answer_text, completion_text = (
        text.replace("\u2212", "-").casefold() for text in (as_text(answer).strip(), completion)
    )
    return re.search(r"(?<!\w)" + re.escape(answer_text) + r"(?!\w)", completion_text) is not None


def number(completion: str, answer: Any) -> bool:
    """Return whether the last numbers of completion and answer are equal; the answer may be a whole solution.

    A fraction is one number, and so are a mixed one ("3 1/2") and groups of three digits with spaces ("10 000"). Where
    only one of the two is a percentage, the other may mean its value or its number.

    >>> number("so 1,200.0 apples", "40 * 30 = 1200 #### 1200"), number("0.75", "3/4"), number("1/4", "3/4")
    (True, True, False)
    >>> number("0.5", "50%"), number("50", "50%"), number("0.5%", "50%")
    (True, True, False)
    """
    completion_number, answer_number = _last_number(completion), _last_number(as_text(answer))
    if completion_number is None or answer_number is None:
        return False
    (a, is_percent), (b, is_other_percent) = completion_number, answer_number
    if a == b or is_percent == is_other_percent or isinstance(a, Decimal) or isinstance(b, Decimal):
        return a == b
    return a == 100 * b if is_percent else 100 * a == b


def boxed(completion: str, answer: Any) -> bool:
    r"""Return whether the last \boxed{...} of completion and answer (or the bare answer) agree as text or number.

    >>> boxed(r"Thus \boxed{\dfrac{1}{2}}.", r"\frac{1}{2}"), boxed("1/2", "1/2")
    (True, False)
    >>> boxed(r"\boxed{5\text{ cm}}", "5"), boxed(r"\boxed{\text{east}}", "east")
    (True, True)
    """
    completion_answer = _last_boxed(completion)
    if completion_answer is None:
        return False
    text = as_text(answer)
    right = _last_boxed(text)
    right = text if right is None else right
    if _bare(completion_answer) == _bare(right):
        return True
    completion_answer, right = (_BEFORE.sub("", _UNIT.sub("", part)) for part in (completion_answer, right))
    return _is_number(completion_answer) and _is_number(right) and number(completion_answer, right)


def choice(completion: str, answer: Any) -> bool:
    """Return whether the last single capital letters A to H of completion and answer are equal.

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
    """A reward function of the completion and a row's columns; `name` appears in errors."""

    name: str
    function: KeywordFunction

    @classmethod
    def of(cls, reward: str | RewardFunction) -> RowReward:
        """Return the reward of a grader's name, MODULE:NAME, or a function.

        Raises:
            UnknownNameError: there is none of that name. ConfigError: it cannot be called by keyword.
        """
        function = _named_function(reward) if isinstance(reward, str) else reward
        name = reward if isinstance(reward, str) else getattr(reward, "__name__", repr(reward))
        return cls(name, KeywordFunction.of(function, f"reward {name!r}"))

    @property
    def required(self) -> frozenset[str]:
        """Return the columns that it must be given."""
        return self.function.required - {"completion"}

    @property
    def is_async(self) -> bool:
        return self.function.is_async

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Any:
        """Return the function's answer, or an awaitable of it."""
        # Last wins: a column named "completion" is hidden by the model's text.
        return self.function({**row, "completion": completion})

    def as_reward(self, answered: Any, top: float) -> Reward | None:
        """Return the function's answer as a reward; a plain number from `top` up is a success, if `top` is finite."""
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
    """Return the answer in the form that the grader reads."""
    text = as_text(answer)
    return f"\\boxed{{{text}}}" if reward in ("boxed", boxed) and _last_boxed(text) is None else text


def _named_function(name: str) -> Any:
    if name in GRADERS:
        return GRADERS[name]
    if ":" not in name:
        raise UnknownNameError(f"reward {name!r}: expected MODULE:NAME or a grader; {nearest_name(name, GRADERS)}")
    return named_object(name, "reward")


def _last_number(text: str) -> tuple[Fraction | Decimal, bool] | None:  # and whether it is a percentage
    text = _simpler(text)
    matches = deque(_NUMBER.finditer(text), maxlen=1)
    if not matches:
        return None
    match, is_percent = matches[0], matches[0]["percent"] is not None
    sign, top, bottom = match["sign"] or "", match["top"].replace(",", ""), match["bottom"] or "1"
    if match["bottom"] and text[: match.start()].endswith("/"):  # the end of a date
        sign, top, bottom = "", bottom, "1"
    if len(top) > _MAX_EXACT:
        return Decimal(sign + top), is_percent
    return (Fraction(sign + top) / int(bottom), is_percent) if int(bottom) else None


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(_simpler(text).strip().strip("$")) is not None


def _simpler(text: str) -> str:
    """Return a text with the minus of the keyboard, commas between thousands, one name for each kind of LaTeX fraction,
    and fractions and mixed numbers as a/b.
    """
    text = re.sub(r"\\[cdt]frac", r"\\frac", text.replace("\u2212", "-"))
    text = _MIXED.sub(lambda match: _in_a_line(*match.groups()) if int(match[2]) < int(match[3]) else match[0], text)
    text = _THOUSANDS.sub(lambda match: _BETWEEN_THOUSANDS.sub(",", match[0]), text)
    return _FRACTION.sub(lambda match: _in_a_line(match[1], match[2] or match[4], match[3] or match[5]), text)


def _in_a_line(whole: str | None, top: str, bottom: str) -> str:
    is_mixed = whole is not None and top.isdigit()
    return f"{int(whole or 0) * int(bottom) + int(top)}/{bottom}" if is_mixed else f"{top}/{bottom}"


def _last_boxed(text: str) -> str | None:  # with balanced braces; None also if it is not closed
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
    return "".join(_WORDS.sub(r"\1", _simpler(text)).split()).strip("$.")
