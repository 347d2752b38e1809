"""Named, independent child seeds and generators of one run seed.

A child is found by its path of names and numbers, not by the number of draws before it, so another consumer or another
order of episodes changes no other child. The library has no global generator; code that needs randomness derives it
here.
"""

from __future__ import annotations

import hashlib

import numpy as np

# Evaluation has the seeds below it and training those from it up, so every evaluation is held out.
FIRST_TRAINING_SEED = 2**31

_SEED_BITS = 63  # a signed 64-bit integer is what torch, numpy, vLLM and JSON readers all accept


def child_seed(seed: int, *path: str | int) -> int:
    """Return the seed in [0, 2**63) of the child that `path` names under `seed`.

    BLAKE2b of the typed path: "1" and 1 are different names. Ours, because numpy's `spawn_key` takes only integers, and
    `spawn()` depends on the number of spawns before it.

    >>> child_seed(0, "warmup") != child_seed(0, "rollout")
    True
    >>> child_seed(0, "episode", 3) == child_seed(0, "episode", 3)
    True
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in path)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """Return an independent numpy generator for the child that `path` names under `seed`."""
    return np.random.default_rng(child_seed(seed, *path))


def training_seed(run_seed: int, number: int) -> int:
    """Return the seed of the run's `number`-th training task, in [2**31, 2**32).

    Seeds are consecutive from a start that the run seed draws: n tasks in a row are all the tasks of a source of n (the
    rows of a data set), and two runs rarely share any.

    >>> training_seed(0, 0) >= FIRST_TRAINING_SEED, training_seed(0, 7) - training_seed(0, 0)
    (True, 7)
    """
    # Below 2**32, because many environments seed generators that take 32 bits.
    return FIRST_TRAINING_SEED + (child_seed(run_seed, "task") + number) % FIRST_TRAINING_SEED
