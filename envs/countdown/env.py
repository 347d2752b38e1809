"""Countdown: make a number out of given ones with + - * /, in one expression or step by step.

After the numbers round of the television game. `README.md` beside this file has the rules, the rewards and a
transcript; `arithmetic.py` reads expressions and solves tasks, `tasks.py` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, SmallTask, TextEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tasks import TaskSource
from gspo_gym.errors import ConfigError

from .arithmetic import ExpressionError, read_expression, solve, without
from .policies import random_steps, search
from .tasks import Task, TaskRanges

Style = Literal["terse", "verbose"]
StepTuple = tuple[str, Reward, bool, bool, Info]

_HELD_OUT_FRACTION = 0.2
_MAX_NUMBERS = 6  # more, and the reference's search takes minutes
_MAX_OPTION_TARGET = 10**6


class Countdown(TextEnv):
    """Make the target out of the numbers, each used at most once, with + - * / in whole numbers from 1 up.

    An action is an expression over the numbers that are left, with at least one operation ("7*8", "(7*8)+3"): its
    numbers are used up and its value joins those left; or "undo", which takes the last expression back. An expression
    whose value is the target wins. Everything else is illegal and changes nothing. Each answer uses up a turn; the
    episode *terminates* when the target is made and after `max_turns`: both are rules of the game.

    Args:
        num_numbers: how many numbers are given, 3 to 6.
        max_number: they lie in 1 .. max_number, at least 5.
        min_target, max_target: where the target lies, 1 <= min_target <= max_target.
        max_turns: answers, at least num_numbers - 1 (one operation a turn then suffices).
        reached_reward: for making the target, > 0.
        closer_reward: for how near the nearest number at hand is to the target, >= 0 (see `README.md`: it is a
            potential, and what it pays adds up to this at most).
        illegal_penalty: subtracted for an illegal answer, >= 0.
        style: "verbose" (sentences) or "terse" (a few bytes, for byte-level models).

    Attributes (read by the scripted policies):
        pool: the numbers that are left, in rising order. target: what is to be made.

    Reset options: `numbers` and `target`, together, to choose the task instead of drawing it; it must be solvable.

    >>> env = Countdown(style="terse")
    >>> env.reset(options={"numbers": [2, 7, 8], "target": 42})[0]
    'Make 42: 2 7 8. 6 turns.'
    >>> env.step("8-2")[0]
    '6. Left 6 7.'
    """

    isolation = "thread"
    any_thread = True
    policies: ClassVar[Mapping[str, PolicyFactory]] = {"reference": search, "random": random_steps}
    small_task: ClassVar[SmallTask | None] = SmallTask(
        {"num_numbers": 3, "max_number": 8, "min_target": 10, "max_target": 30, "max_turns": 3},
        style={"style": "terse"},
    )

    def __init__(
        self,
        *,
        num_numbers: int = 4,
        max_number: int = 10,
        min_target: int = 10,
        max_target: int = 99,
        max_turns: int = 6,
        reached_reward: float = 0.8,
        closer_reward: float = 0.2,
        illegal_penalty: float = 0.05,
        style: Style = "verbose",
    ) -> None:
        if not (3 <= num_numbers <= _MAX_NUMBERS and max_number >= 5):
            raise ConfigError(
                f"Countdown: expected num_numbers from 3 to {_MAX_NUMBERS} and max_number >= 5, got "
                f"num_numbers={num_numbers}, max_number={max_number}"
            )
        if not 1 <= min_target <= max_target:
            raise ConfigError(
                f"Countdown: expected 1 <= min_target <= max_target, got min_target={min_target}, "
                f"max_target={max_target}"
            )
        if max_turns < num_numbers - 1:
            raise ConfigError(f"Countdown: expected max_turns >= num_numbers - 1, got {max_turns} for {num_numbers}")
        if not (reached_reward > 0 and closer_reward >= 0 and illegal_penalty >= 0):
            raise ConfigError(
                "Countdown: expected reached_reward > 0, closer_reward >= 0 and illegal_penalty >= 0, got "
                f"reached_reward={reached_reward}, closer_reward={closer_reward}, illegal_penalty={illegal_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"Countdown: expected style 'terse' or 'verbose', got {style!r}")
        self.max_turns, self.style = max_turns, style
        ranges = TaskRanges(num_numbers, max_number, min_target, max_target)
        self._tasks = TaskSource(ranges.draw, held_out_fraction=_HELD_OUT_FRACTION)
        self._weights = {"reached": reached_reward, "closer": closer_reward, "illegal": -illegal_penalty}
        self.reward_range = (-illegal_penalty * max_turns, reached_reward + closer_reward)
        self.pool: tuple[int, ...] = ()
        self.target = 0
        self._numbers: tuple[int, ...] = ()  # as given, for the solution
        self._turns_left = 0  # 0: no episode is being played
        self._earlier: list[tuple[int, ...]] = []  # the pools that "undo" goes back to
        self._distance_at_start = 1

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        # Drawn even when the options name the task, so that they leave the generator's later draws as they were.
        task = self._tasks.task(seed, self.np_random)
        if options:
            task = self._task_from(options)
        self.pool, self.target, self._numbers = task.numbers, task.target, task.numbers
        self._turns_left = self.max_turns
        self._earlier = []
        self._distance_at_start = self._distance()
        numbers = " ".join(map(str, self.pool))
        if self.style == "terse":
            return f"Make {self.target}: {numbers}. {self._turns()}.", {}
        return (
            f"Make {self.target} from the numbers {numbers}, each used at most once. Answer with an expression over "
            "the numbers left, such as 2*3 or (2+3)*4; its value then takes their place. Operations are + - * /, "
            "and every result must be a whole number of at least 1. Answer undo to take the last expression back. "
            f"You have {self._turns()}."
        ), {}

    def step(self, action: str) -> StepTuple:
        self._require_episode("step")
        nearness = self._nearness()
        if action.strip().lower() == "undo":
            if not self._earlier:
                return self._illegal("nothing to undo")
            self.pool = self._earlier.pop()
            return self._go_on("undone", {"closer": self._nearness() - nearness})
        try:
            expression = read_expression(action)
            left = without(self.pool, expression.operands)
        except ExpressionError as error:
            return self._illegal(str(error))
        self._earlier.append(self.pool)
        self.pool = tuple(sorted((*left, expression.value)))
        scores = {"closer": self._nearness() - nearness}
        if expression.value == self.target:
            return self._end({"reached": 1.0, **scores}, success=True)
        return self._go_on(str(expression.value), scores)

    def invalid_action(self, error: str) -> StepTuple:
        """An answer that could not even be read uses up a turn, like any other illegal answer."""
        self._require_episode("invalid_action")
        return self._illegal(error)

    def _require_episode(self, method: str) -> None:
        if self._turns_left == 0:
            raise ResetNeeded(f"Countdown.{method}: no episode is being played; call reset first")

    def _distance(self) -> int:
        return min(abs(number - self.target) for number in self.pool)

    def _nearness(self) -> float:
        """From 0 (no nearer than at the start) to 1 (the target is there)."""
        return max(0.0, 1.0 - self._distance() / self._distance_at_start)

    def _illegal(self, error: str) -> StepTuple:
        return self._go_on(error, {"illegal": 1.0})

    def _go_on(self, answer: str, scores: Mapping[str, float]) -> StepTuple:
        """One turn is used up; without a further one this is the end."""
        self._turns_left -= 1
        if self._turns_left == 0:
            return self._end(scores, success=False)
        numbers = " ".join(map(str, self.pool))
        text = f"{answer}. Left {numbers}."
        if self.style == "verbose":
            text = f"{answer}. The numbers left are {numbers}; the target is {self.target}. You have {self._turns()}."
        return text, Reward.weighted(scores, self._weights), False, False, {}

    def _end(self, scores: Mapping[str, float], *, success: bool) -> StepTuple:
        self._turns_left = 0
        text = "reached" if success else f"lost: {self._solution()}"
        if self.style == "verbose":
            text = f"{self.target} is reached." if success else f"You have no turns left. One way: {self._solution()}."
        events = ("reached",) if success else ()
        return text, Reward.weighted(scores, self._weights, events=events, success=success), True, False, {}

    def _solution(self) -> str:
        return ", ".join("".join(map(str, step)) for step in solve(self._numbers, self.target) or ())

    def _turns(self) -> str:
        return "1 turn" if self._turns_left == 1 else f"{self._turns_left} turns"

    def _task_from(self, options: Mapping[str, Any]) -> Task:
        if set(options) != {"numbers", "target"}:
            raise ConfigError(f"Countdown.reset: expected the options numbers and target, got {sorted(options)}")
        numbers, target = options["numbers"], options["target"]
        is_legal = (
            isinstance(numbers, Sequence)
            and 2 <= len(numbers) <= _MAX_NUMBERS
            and all(isinstance(number, int) and 1 <= number <= _MAX_OPTION_TARGET for number in (*numbers, target))
        )
        if not is_legal or target in numbers:
            raise ConfigError(
                f"Countdown.reset: expected 2 to {_MAX_NUMBERS} whole numbers from 1 up and a target that is none of "
                f"them, got numbers={numbers!r}, target={target!r}"
            )
        if solve(numbers, target) is None:
            raise ConfigError(f"Countdown.reset: expected a target that can be made, got {target} from {numbers}")
        return Task(tuple(sorted(numbers)), target)
