"""The split into training and held-out sides, and the member of a side that a seed names.

Only the hash of its content puts a thing on a side: equal things stay together, and things added later move no other.
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
Entry = tuple[int, int, T]  # (hash of the content, position in the source, member)


@dataclass(frozen=True)
class Sides(Generic[T]):
    """The training and held-out members, which do not overlap, in the order in which seeds name them."""

    train: tuple[T, ...]
    held_out: tuple[T, ...]

    def of_seed(self, seed: int) -> T:
        """Return the member of a task: held out below seed 2**31, training from there up.

        Consecutive seeds go round the side in its shuffled order, each once before one comes again.
        """
        # So a training run, which counts its seeds up (`seeding.training_seed`), meets every member before one again.
        if is_held_out_seed(seed):
            return self.held_out[seed % len(self.held_out)]
        return self.train[(seed - FIRST_TRAINING_SEED) % len(self.train)]

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # immutable, so copies of an environment share it


def is_held_out_seed(seed: int) -> bool:
    """Return whether the task of a seed is for evaluation."""
    return seed < FIRST_TRAINING_SEED


def content_hash(text: str, split_seed: int) -> int:
    """Return a hash in [0, 2**64) of a text with any white space counted as one space."""
    content = f"{split_seed}\x1f{' '.join(text.split())}"
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def next_seed(rng: np.random.Generator, *, is_held_out: bool | None = None) -> int:
    """Draw the seed of an episode that was reset without one, below 2**32.

    This is the rule of every interface: the episode stays on the side of the last given seed, and is a training task if
    none was given.

    `rng` is the generator of the last given seed (Gymnasium's `np_random`), and is drawn from once. `is_held_out` is
    the side; None for that of `rng`.
    >>> next_seed(np.random.default_rng(7)) < FIRST_TRAINING_SEED <= next_seed(np.random.default_rng())
    True
    """
    drawn = int(rng.integers(FIRST_TRAINING_SEED))
    side = is_held_out_generator(rng) if is_held_out is None else is_held_out
    return drawn if side else FIRST_TRAINING_SEED + drawn


def is_held_out_generator(rng: np.random.Generator) -> bool:
    """Return whether `rng` was made from the seed of a held-out task; False if it does not say.

    >>> is_held_out_generator(np.random.default_rng(0)), is_held_out_generator(np.random.default_rng())
    (True, False)
    """
    # A generator that the operating system seeded has 128 bits of entropy here, which is no seed below 2**31.
    made_from = getattr(rng.bit_generator.seed_seq, "entropy", None)
    return isinstance(made_from, int | np.integer) and int(made_from) < FIRST_TRAINING_SEED


def is_held_out_content(content: int, held_out_fraction: float) -> bool:
    """Return whether a content hash falls into the held-out fraction."""
    return content < held_out_fraction * 2**64


def checked_fraction(fraction: float | None, default: float, *, has_own_held_out: bool, where: str) -> float:
    """Return the held-out fraction in (0, 1) that was given, or the default; a ConfigError beside a held-out set."""
    if has_own_held_out and fraction is not None:
        raise ConfigError(f"{where}: held_out is a set of its own, so held_out_fraction has no effect; remove it")
    chosen = default if fraction is None else fraction
    if not 0 < chosen < 1:
        raise ConfigError(f"{where}: expected held_out_fraction in (0, 1), got {chosen}")
    return chosen


def split_by_content(entries: Iterable[Entry[T]], held_out_fraction: float) -> tuple[list[Entry[T]], list[Entry[T]]]:
    """Return the (training, held-out) entries."""
    train: list[Entry[T]] = []
    held_out: list[Entry[T]] = []
    for entry in entries:
        (held_out if is_held_out_content(entry[0], held_out_fraction) else train).append(entry)
    return train, held_out


def without(entries: Iterable[Entry[T]], others: Iterable[Entry[T]]) -> list[Entry[T]]:
    """Return the entries with content that none of the others has."""
    hashes = {content for content, _, _ in others}
    return [entry for entry in entries if entry[0] not in hashes]


def in_order(entries: Iterable[Entry[T]]) -> tuple[T, ...]:
    """Return the members ordered by hash: a shuffle without a generator."""
    return tuple(member for _, _, member in sorted(entries, key=lambda entry: entry[:2]))
