"""DatasetEnv: questions with answers as an environment like any other; one answer, one reward, the end.

In a config: `rollout.env_name = "Dataset"` with `rollout.env_config = { rows = "train.jsonl", reward = "number" }`. The
meaning is that of AgileRL 2.7's ReasoningGym, but for the seed, which names the row, so that an evaluation can be
repeated, and for the two sides, which cannot overlap.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy, TextEnv
from gspo_gym.env.data.questions import ConversationTemplate, Questions, Reading, load_questions
from gspo_gym.env.data.rewards import GRADERS, RewardFunction, RowReward, reference_text
from gspo_gym.env.data.rows import Row, RowSource
from gspo_gym.env.data.splits import checked_fraction, next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError

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
        reward: "exact", "contains", "number", "boxed", "choice" (see `dataset_rewards.py`), MODULE:NAME or a function.
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
