"""GuessNumber: find a hidden integer from higher/lower hints within a few guesses.

The smallest task in which looking at earlier turns pays: blind guessing succeeds with 1 - (1 - 1/n)^k, halving the
range always does when 2^k > n. `README.md` beside this file has the rules, the rewards and a transcript.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, SmallTask, TextEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError

from .policies import binary_search, random_guess

Style = Literal["terse", "verbose"]
StepTuple = tuple[str, Reward, bool, bool, Info]

_SENTENCES = {"higher": "My number is higher.", "lower": "My number is lower."}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # ASCII only; 18 digits, because int() of a huge text is slow


class GuessNumber(TextEnv):
    """A hidden integer, uniform in [low, high]; each turn is one guess, answered by "higher", "lower" or the end.

    An action is a guess if the text, stripped of white space, is an ASCII integer ("4", " 4\\n", "+4"; not "4.", not
    "I say 4"). Anything else, and a number outside the range, is illegal and costs a try. The episode *terminates* when
    the number is found and when the tries are used up: both are rules of the game.

    Args:
        low, high: the range, both ends included; 0 <= low <= high.
        max_guesses: tries, at least 1.
        found_reward: for finding the number, > 0; also the top return.
        inconsistent_penalty: subtracted for a guess that earlier hints have ruled out, >= 0.
        illegal_penalty: subtracted for an illegal answer, >= 0.
        style: "verbose" (sentences) or "terse" (a few bytes, for byte-level models).

    Reset options: `number`, to choose the hidden number instead of drawing it.

    >>> env = GuessNumber(style="terse")
    >>> env.reset(options={"number": 6})[0]
    'Guess 1-8. 4 tries.'
    >>> env.step("4")[0]
    'higher'
    """

    policies: ClassVar[Mapping[str, PolicyFactory]] = {"reference": binary_search, "random": random_guess}
    small_task: ClassVar[SmallTask | None] = SmallTask(
        {"low": 1, "high": 8, "max_guesses": 4, "inconsistent_penalty": 0.2, "illegal_penalty": 0.4},
        style={"style": "terse"},
    )
    isolation = "thread"
    any_thread = True

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 8,
        max_guesses: int = 4,
        found_reward: float = 1.0,
        inconsistent_penalty: float = 0.1,
        illegal_penalty: float = 0.1,
        style: Style = "verbose",
    ) -> None:
        if not 0 <= low <= high:
            raise ConfigError(f"GuessNumber: expected 0 <= low <= high, got low={low}, high={high}")
        if max_guesses < 1:
            raise ConfigError(f"GuessNumber: expected max_guesses >= 1, got {max_guesses}")
        if not (found_reward > 0 and inconsistent_penalty >= 0 and illegal_penalty >= 0):
            raise ConfigError(
                "GuessNumber: expected found_reward > 0 and penalties >= 0, got "
                f"found_reward={found_reward}, inconsistent_penalty={inconsistent_penalty}, "
                f"illegal_penalty={illegal_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"GuessNumber: expected style 'terse' or 'verbose', got {style!r}")
        self.low, self.high, self.max_guesses, self.style = low, high, max_guesses, style
        self._weights = {
            "found": found_reward,
            "inconsistent": -inconsistent_penalty,
            "illegal": -illegal_penalty,
        }
        self.reward_range = (self._worst_return(), found_reward)
        self._number: int | None = None  # None: no episode is being played
        self._guesses_left = 0
        self._smallest, self._largest = low, high

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        # Drawn even when the options name the number, so that they leave the generator's later draws as they were.
        drawn = int(self.np_random.integers(self.low, self.high + 1))
        self._number = self._number_from(options) if options else drawn
        self._guesses_left = self.max_guesses
        self._smallest, self._largest = self.low, self.high
        if self.style == "terse":
            return f"Guess {self.low}-{self.high}. {self._tries()}.", {}
        rules = (
            f"I am thinking of a whole number from {self.low} to {self.high}. You have {self._tries()}. "
            "After each guess I say whether my number is higher or lower. Answer with the number alone."
        )
        return rules, {}

    def step(self, action: str) -> StepTuple:
        if self._number is None:
            raise ResetNeeded("GuessNumber.step: no episode is being played; call reset first")
        guess = self._parse(action)
        if guess is None:
            return self._illegal(f"not a number {self.low}-{self.high}")
        if guess == self._number:
            return self._end({"found": 1.0}, success=True)
        scores = {} if self._smallest <= guess <= self._largest else {"inconsistent": 1.0}
        if guess < self._number:
            self._smallest = max(self._smallest, guess + 1)
            return self._go_on("higher", scores)
        self._largest = min(self._largest, guess - 1)
        return self._go_on("lower", scores)

    def invalid_action(self, error: str) -> StepTuple:
        """An answer that could not even be read costs a try, like any other illegal answer."""
        if self._number is None:
            raise ResetNeeded("GuessNumber.invalid_action: no episode is being played; call reset first")
        return self._illegal(error)

    def _parse(self, action: str) -> int | None:
        """The guess, or None if the answer is illegal."""
        text = action.strip()
        if _INTEGER.fullmatch(text) is None:
            return None
        guess = int(text)
        return guess if self.low <= guess <= self.high else None

    def _illegal(self, error: str) -> StepTuple:
        return self._go_on(error, {"illegal": 1.0})

    def _go_on(self, answer: str, scores: Mapping[str, float]) -> StepTuple:
        """One try is used up; without a further one this is the end."""
        self._guesses_left -= 1
        if self._guesses_left == 0:
            return self._end(scores, success=False)
        if self.style == "verbose":
            answer = f"{_SENTENCES.get(answer, answer + '.')} You have {self._tries()}."
        return answer, Reward.weighted(scores, self._weights), False, False, {}

    def _end(self, scores: Mapping[str, float], *, success: bool) -> StepTuple:
        if self.style == "verbose":
            answer = "Correct." if success else f"You have no tries left. The number was {self._number}."
        else:
            answer = "correct" if success else f"lost: {self._number}"
        self._number = None
        events = ("found",) if success else ()
        return answer, Reward.weighted(scores, self._weights, events=events, success=success), True, False, {}

    def _tries(self) -> str:
        return "1 try" if self._guesses_left == 1 else f"{self._guesses_left} tries"

    def _number_from(self, options: Mapping[str, Any]) -> int:
        unknown = sorted(set(options) - {"number"})
        if unknown:
            raise ConfigError(f"GuessNumber.reset: unknown options {unknown}; known: number")
        number = options["number"]
        if not isinstance(number, int) or not self.low <= number <= self.high:
            raise ConfigError(f"GuessNumber.reset: expected number from {self.low} to {self.high}, got {number!r}")
        return number

    def _worst_return(self) -> float:
        """The smallest return of an episode.

        Either every answer is illegal, or the first is a guess (before any hint it rules nothing out) and all others
        contradict its hint; a mixture lies in between. One guess in a range of one number finds it.
        """
        all_illegal = self.max_guesses * self._weights["illegal"]
        if self.low == self.high:
            return all_illegal
        return min(all_illegal, (self.max_guesses - 1) * self._weights["inconsistent"])
