"""The hand-written players of Wordle. Neither reads the hidden word: they know the list and the marks heard so far."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message

from .marks import IN_PLACE, Letters, codes, letters_of, possible

_MAX_TRIED = 1_000  # guesses weighed against each other; more words than that only make the first guess slow


def entropy_player(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Of the answers that the marks leave, the one whose own mark says most about which it is, in bits.

    On the bundled list it finds every word within six guesses (a test plays them all); on lists of other words that is
    likely but not sure. `env` is a `Wordle` after `reset` (Any: `PolicyFactory` fixes the type).
    """

    def play(_messages: Sequence[Message]) -> str:
        return best_guess(env.words.answers, tuple(env.heard))

    return play


def random_words(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Any of the answers, whatever was heard."""
    return lambda _messages: str(rng.choice(env.words.answers))


def kept_letters(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Any of the answers that keep the letters which were in place in the last guess, whatever else was heard."""

    def play(_messages: Sequence[Message]) -> str:
        guess, mark = env.heard[-1] if env.heard else ("", "")
        kept = [place for place, sign in enumerate(mark) if sign == IN_PLACE]
        return str(rng.choice([word for word in env.words.answers if all(word[at] == guess[at] for at in kept)]))

    return play


@functools.lru_cache(maxsize=4096)  # episodes share their first guesses, and the first of all is the slowest by far
def best_guess(answers: tuple[str, ...], heard: tuple[tuple[str, str], ...]) -> str:
    """The guess of `entropy_player` after the (guess, mark) pairs heard; of equally good ones the first."""
    left = letters_of(answers)
    is_left = np.ones(len(answers), dtype=np.bool_)
    for guess, mark in heard:
        is_left &= possible(left, guess, mark)
    candidates = [answers[index] for index in np.flatnonzero(is_left)]
    return max(candidates[:_MAX_TRIED], key=lambda guess: information(guess, left[is_left]))


def information(guess: str, candidates: Letters) -> float:
    """Bits that the mark of a guess is expected to give when every candidate [N, L] is equally likely."""
    _, counts = np.unique(codes(guess, candidates), return_counts=True)
    shares = counts / len(candidates)
    return float(-(shares * np.log2(shares)).sum())
