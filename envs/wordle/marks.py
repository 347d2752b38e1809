"""How a guess is marked, letter by letter, and which words a mark leaves possible.

Letters that occur twice are where implementations go wrong: a letter of the guess is marked present at most as often
as the hidden word has it, those in the right place first, then the others from left to right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ABSENT, ELSEWHERE, IN_PLACE = ".", "y", "g"

Letters = NDArray[np.uint8]  # [N, L]: the words of a list, a letter a column
Codes = NDArray[np.int64]  # [N]: marks as numbers in base 3


def marks(guess: str, hidden: str) -> str:
    """The mark of a guess, a character a letter: g in place, y elsewhere in the word, . not there (again).

    >>> marks("eerie", "these"), marks("geese", "these")
    ('y...g', '..ggg')
    """
    unmatched = Counter(letter for letter, own in zip(hidden, guess, strict=True) if letter != own)
    result = []
    for own, letter in zip(guess, hidden, strict=True):
        if own == letter:
            result.append(IN_PLACE)
        elif unmatched[own]:
            unmatched[own] -= 1
            result.append(ELSEWHERE)
        else:
            result.append(ABSENT)
    return "".join(result)


def letters_of(words: Sequence[str]) -> Letters:
    """Words of one length as an array, for `possible` and `codes`."""
    return np.frombuffer("".join(words).encode("ascii"), dtype=np.uint8).reshape(len(words), -1)


def codes(guess: str, hidden: Letters) -> Codes:
    """What `marks` says of a guess against each of the words, as numbers: digits in base 3, the first letter last.

    A letter in a wrong place is elsewhere if the word has it, outside the places that were met, more often than the
    guess has used it up so far.
    """
    own = np.frombuffer(guess.encode("ascii"), dtype=np.uint8)
    is_met = hidden == own
    result = np.zeros(len(hidden), dtype=np.int64)
    for place, letter in enumerate(own):
        available = ((hidden == letter) & ~is_met).sum(axis=1)
        used = (~is_met[:, :place] & (own[:place] == letter)).sum(axis=1)
        result += np.where(is_met[:, place], 2, available > used) * 3**place
    return result


def code(mark: str) -> int:
    """A mark as the number that `codes` has for it."""
    return int(sum(f"{ABSENT}{ELSEWHERE}{IN_PLACE}".index(sign) * 3**place for place, sign in enumerate(mark)))


def possible(words: Letters, guess: str, mark: str) -> NDArray[np.bool_]:
    """Which of the words would have given the guess this mark, [N]."""
    return np.equal(codes(guess, words), code(mark))
