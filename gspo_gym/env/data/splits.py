"""Two sides that share nothing, training and held-out, and which of their members a seed names.

What decides the side of a thing is its content alone, so that equal things stay together, whatever file or generator
they come from, and things added later move no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from gspo_gym.errors import ConfigError
from gspo_gym.seeding import FIRST_TRAINING_SEED

T = TypeVar("T")
Entry = tuple[int, int, T]  # (hash of the content, position in the source, the thing itself)


@dataclass(frozen=True)
class Sides(Generic[T]):
    """The members of both sides, in the order in which seeds name them. Copies share it: nothing in it changes.

    Attributes:
        train: what is trained on.
        held_out: what evaluation is given. Nothing of one side is on the other.
    """

    train: tuple[T, ...]
    held_out: tuple[T, ...]

    def of_seed(self, seed: int) -> T:
        """The member of a task: a held-out one below 2**31, one of training from there up.

        As many consecutive seeds as there are members name every one once: 0, 1, 2, ... go through the held-out side,
        2**31, 2**31 + 1, ... through the training side, each in its shuffled order, again and again. A training run
        counts its tasks on (`seeding.training_seed`), so that it meets every one once before it meets one again.
        """
        if is_held_out_seed(seed):
            return self.held_out[seed % len(self.held_out)]
        return self.train[(seed - FIRST_TRAINING_SEED) % len(self.train)]

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def is_held_out_seed(seed: int) -> bool:
    """Whether the task of a seed is for evaluation."""
    return seed < FIRST_TRAINING_SEED


def content_hash(text: str, split_seed: int) -> int:
    """In [0, 2**64); any white space counts as one space."""
    content = f"{split_seed}\x1f{' '.join(text.split())}"
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def next_seed(rng: np.random.Generator, *, is_held_out: bool | None = None) -> int:
    """Draw the seed of an episode whose reset was given none, below 2**32.

    This is the one rule for every interface: such an episode stays on the side of the last seed that was given, and is
    a training task where none ever was. `rng` is the generator that the last given seed made, as Gymnasium's
    `np_random` is.

    Args:
        rng: is drawn from once.
        is_held_out: which side; None: the side of `rng`.

    >>> next_seed(np.random.default_rng(7)) < FIRST_TRAINING_SEED <= next_seed(np.random.default_rng())
    True
    """
    drawn = int(rng.integers(FIRST_TRAINING_SEED))
    side = is_held_out_generator(rng) if is_held_out is None else is_held_out
    return drawn if side else FIRST_TRAINING_SEED + drawn


def is_held_out_generator(rng: np.random.Generator) -> bool:
    """Return whether `rng` was made from the seed of a held-out task.

    A generator that the operating system seeded is on the training side, as its 128 bits are no small number; so is one
    that does not say what made it.

    >>> is_held_out_generator(np.random.default_rng(0)), is_held_out_generator(np.random.default_rng())
    (True, False)
    """
    made_from = getattr(rng.bit_generator.seed_seq, "entropy", None)
    return isinstance(made_from, int | np.integer) and int(made_from) < FIRST_TRAINING_SEED


def is_held_out_content(content: int, held_out_fraction: float) -> bool:
    """Whether a thing with this hash is held out where that fraction of all things is."""
    return content < held_out_fraction * 2**64


def checked_fraction(fraction: float | None, default: float, *, has_own_held_out: bool, where: str) -> float:
    """The fraction that is held out, from what a user gave; None: the default.

    Raises:
        ConfigError: it is not in (0, 1), or is given beside a held-out set.
    """
    if has_own_held_out and fraction is not None:
        raise ConfigError(f"{where}: held_out is a set of its own, so held_out_fraction has no effect; remove it")
    chosen = default if fraction is None else fraction
    if not 0 < chosen < 1:
        raise ConfigError(f"{where}: expected held_out_fraction in (0, 1), got {chosen}")
    return chosen


def split_by_content(entries: Iterable[Entry[T]], held_out_fraction: float) -> tuple[list[Entry[T]], list[Entry[T]]]:
    """(training, held-out) entries."""
    train: list[Entry[T]] = []
    held_out: list[Entry[T]] = []
    for entry in entries:
        (held_out if is_held_out_content(entry[0], held_out_fraction) else train).append(entry)
    return train, held_out


def without(entries: Iterable[Entry[T]], others: Iterable[Entry[T]]) -> list[Entry[T]]:
    """The entries whose content is in none of the others."""
    hashes = {content for content, _, _ in others}
    return [entry for entry in entries if entry[0] not in hashes]


def in_order(entries: Iterable[Entry[T]]) -> tuple[T, ...]:
    """Members in the order of their hashes, which is a shuffle that needs no generator."""
    return tuple(member for _, _, member in sorted(entries, key=lambda entry: entry[:2]))
