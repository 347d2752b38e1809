"""The words of Wordle: which can be hidden, on which side of training, and which may be guessed besides."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_gym.env.tasks import TaskSource
from gspo_gym.errors import ConfigError

from .marks import Letters, letters_of

_HELD_OUT_SHARE = 5  # one answer in five is held out


@dataclass(frozen=True, slots=True)
class WordList:
    """Words of one length.

    Attributes:
        answers: the words that can be hidden, of both sides, in alphabetical order.
        letters: the answers as an array.
        tasks: the answers by seed; those of held-out seeds and of training seeds have no word in common.
        allowed: the words that may be guessed: the answers and some more.
    """

    answers: tuple[str, ...]
    letters: Letters
    tasks: TaskSource[str]
    allowed: frozenset[str]

    @property
    def word_length(self) -> int:
        return len(self.answers[0])

    def __deepcopy__(self, memo: object) -> WordList:
        return self


@functools.cache
def bundled_words() -> WordList:
    """The list in this folder: common English words of five letters."""
    folder = Path(__file__).parent
    answers, others = ((folder / name).read_text("ascii").split() for name in ("answers.txt", "guesses.txt"))
    return word_list(answers, others)


def word_list(answers: Sequence[str], others: Sequence[str] = ()) -> WordList:
    """A list of given words, a fifth of them held out (at least one), by the order of their hashes.

    Raises:
        ConfigError: fewer than two words, one twice, or words that are not of one length and of the letters a-z.
    """
    if isinstance(answers, str) or len(answers) < 2 or len(set(answers)) < len(answers):
        raise ConfigError(f"Wordle: expected at least two different words, got {answers!r:.80}")
    for word in (*answers, *others):
        is_word = isinstance(word, str) and word.isascii() and word.isalpha() and word.islower()
        if not is_word or len(word) != len(answers[0]):
            raise ConfigError(f"Wordle: expected words of one length in the letters a-z, got {word!r}")
    ordered = tuple(sorted(answers))
    shuffled = sorted(ordered, key=lambda word: hashlib.blake2b(word.encode(), digest_size=8).digest())
    return WordList(
        ordered,
        letters_of(ordered),
        TaskSource(ordered, held_out=shuffled[: max(1, len(ordered) // _HELD_OUT_SHARE)]),
        frozenset((*answers, *others)),
    )
