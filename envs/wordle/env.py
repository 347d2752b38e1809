"""Wordle: find a hidden word from marks on the letters of each guess.

After the word game of that name. `README.md` beside this file has the rules, the rewards and a transcript; `marks.py`
marks guesses, `words.py` holds the list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, SmallTask, TextEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError

from .marks import ABSENT, ELSEWHERE, IN_PLACE, marks, possible
from .policies import entropy_player, kept_letters, random_words
from .words import WordList, bundled_words, word_list

Style = Literal["terse", "verbose"]
StepTuple = tuple[str, Reward, bool, bool, Info]

_NAMES = {IN_PLACE: "in place", ELSEWHERE: "elsewhere", ABSENT: "not there"}


class Wordle(TextEnv):
    """A hidden word; each turn is one guess, answered by a mark for each of its letters, or the end.

    An action is a guess if the text, stripped of white space and in any case, is a word that may be guessed. Anything
    else is illegal and costs a try. The episode *terminates* when the word is found and when the tries are used up:
    both are rules of the game.

    Args:
        max_guesses: tries, at least 1.
        words: the words that can be hidden and guessed, of one length; None: the bundled list (five letters).
        allowed: what may be guessed: "listed" (words of the list) or "any" (any letters, as many as the word has).
        found_reward: for finding the word, > 0.
        information_reward: for what the marks say, >= 0 (see `README.md`: it adds up to this at most).
        inconsistent_penalty: subtracted for a guess that earlier marks have ruled out, >= 0.
        illegal_penalty: subtracted for an illegal answer, >= 0.
        style: "verbose" (sentences) or "terse" (a few bytes, for byte-level models).

    Attributes (read by the scripted policies):
        words: the list. heard: the guesses of this episode and their marks.

    Reset options: `word`, to choose the hidden word instead of drawing it.

    >>> env = Wordle(style="terse")
    >>> env.reset(options={"word": "these"})[0]
    '5 letters. 6 tries.'
    >>> env.step("geese")[0]
    'geese ..ggg'
    """

    isolation = "thread"
    any_thread = True
    policies: ClassVar[Mapping[str, PolicyFactory]] = {
        "reference": entropy_player,
        "random": random_words,
        "kept_letters": kept_letters,
    }
    small_task: ClassVar[SmallTask | None] = SmallTask(
        {
            "max_guesses": 6,
            "allowed": "any",
            "found_reward": 0.6,
            "information_reward": 0.4,
            "inconsistent_penalty": 0.2,
            "illegal_penalty": 0.4,
            "words": ["".join(letters) for letters in itertools.product("abcde", repeat=3)],
        },
        policy="kept_letters",
        style={"style": "terse"},
    )

    def __init__(
        self,
        *,
        max_guesses: int = 6,
        words: Sequence[str] | None = None,
        allowed: Literal["listed", "any"] = "listed",
        found_reward: float = 0.8,
        information_reward: float = 0.2,
        inconsistent_penalty: float = 0.05,
        illegal_penalty: float = 0.05,
        style: Style = "verbose",
    ) -> None:
        if max_guesses < 1:
            raise ConfigError(f"Wordle: expected max_guesses >= 1, got {max_guesses}")
        if allowed not in ("listed", "any"):
            raise ConfigError(f"Wordle: expected allowed 'listed' or 'any', got {allowed!r}")
        if not (found_reward > 0 and min(information_reward, inconsistent_penalty, illegal_penalty) >= 0):
            raise ConfigError(
                "Wordle: expected found_reward > 0, information_reward >= 0 and penalties >= 0, got "
                f"found_reward={found_reward}, information_reward={information_reward}, "
                f"inconsistent_penalty={inconsistent_penalty}, illegal_penalty={illegal_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"Wordle: expected style 'terse' or 'verbose', got {style!r}")
        self.max_guesses, self.allowed, self.style = max_guesses, allowed, style
        self.words: WordList = bundled_words() if words is None else word_list(words)
        self._weights = {
            "found": found_reward,
            "information": information_reward,
            "inconsistent": -inconsistent_penalty,
            "illegal": -illegal_penalty,
        }
        # A bound: the first guess contradicts nothing, so penalties for that alone stay one short of it.
        worst = -max(illegal_penalty, inconsistent_penalty) * max_guesses
        self.reward_range = (worst, found_reward + information_reward)
        self.heard: list[tuple[str, str]] = []
        self._hidden: str | None = None  # None: no episode is being played
        self._guesses_left = 0
        self._is_possible = np.ones(len(self.words.answers), dtype=np.bool_)  # which answers the marks leave

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        # Drawn even when the options name the word, so that they leave the generator's later draws as they were.
        drawn = self.words.tasks.task(seed, self.np_random)
        self._hidden = self._word_from(options) if options else drawn
        self.heard = []
        self._guesses_left = self.max_guesses
        self._is_possible = np.ones(len(self.words.answers), dtype=np.bool_)
        length = self.words.word_length
        if self.style == "terse":
            return f"{length} letters. {self._tries()}.", {}
        return (
            f"I am thinking of an English word of {length} letters. You have {self._tries()}. Answer with a word "
            "alone. I say of each of its letters whether it is in place, elsewhere in my word, or not there (again)."
        ), {}

    def step(self, action: str) -> StepTuple:
        hidden = self._playing("step")
        guess = action.strip().lower()
        length = self.words.word_length
        if len(guess) != length or not (guess.isascii() and guess.isalpha()):
            return self._go_on(f"not {length} letters", {"illegal": 1.0})
        if self.allowed == "listed" and guess not in self.words.allowed:
            return self._go_on("not in the list", {"illegal": 1.0})
        mark = marks(guess, hidden)
        is_consistent = all(marks(earlier, guess) == heard for earlier, heard in self.heard)
        scores = {"information": self._learn(guess, mark)}
        if not is_consistent:
            scores["inconsistent"] = 1.0
        if guess == hidden:
            return self._end({"found": 1.0, **scores}, success=True)
        return self._go_on(self._told(guess, mark), scores)

    def invalid_action(self, error: str) -> StepTuple:
        """An answer that could not even be read costs a try, like any other illegal answer."""
        self._playing("invalid_action")
        return self._go_on(error, {"illegal": 1.0})

    def _playing(self, method: str) -> str:
        if self._hidden is None:
            raise ResetNeeded(f"Wordle.{method}: no episode is being played; call reset first")
        return self._hidden

    def _learn(self, guess: str, mark: str) -> float:
        """Notes a mark; what it says, as a share of all that there is to know: 0 if no answer is ruled out by it."""
        num_before = int(self._is_possible.sum())
        self._is_possible &= possible(self.words.letters, guess, mark)
        self.heard.append((guess, mark))
        return math.log(num_before / int(self._is_possible.sum())) / math.log(len(self._is_possible))

    def _told(self, guess: str, mark: str) -> str:
        if self.style == "terse":
            return f"{guess} {mark}"
        return ", ".join(f"{letter} {_NAMES[sign]}" for letter, sign in zip(guess, mark, strict=True))

    def _go_on(self, answer: str, scores: Mapping[str, float]) -> StepTuple:
        """One try is used up; without a further one this is the end."""
        self._guesses_left -= 1
        if self._guesses_left == 0:
            return self._end(scores, success=False)
        if self.style == "verbose":
            answer = f"{answer}. You have {self._tries()}."
        return answer, Reward.weighted(scores, self._weights), False, False, {}

    def _end(self, scores: Mapping[str, float], *, success: bool) -> StepTuple:
        if self.style == "verbose":
            answer = "Correct." if success else f"You have no tries left. The word was {self._hidden}."
        else:
            answer = "found" if success else f"lost: {self._hidden}"
        self._hidden = None
        events = ("found",) if success else ()
        return answer, Reward.weighted(scores, self._weights, events=events, success=success), True, False, {}

    def _tries(self) -> str:
        return "1 try" if self._guesses_left == 1 else f"{self._guesses_left} tries"

    def _word_from(self, options: Mapping[str, Any]) -> str:
        unknown = sorted(set(options) - {"word"})
        if unknown:
            raise ConfigError(f"Wordle.reset: unknown options {unknown}; known: word")
        word = options["word"]
        if word not in self.words.answers:
            raise ConfigError(f"Wordle.reset: expected a word that can be hidden, got {word!r}")
        return str(word)
