"""One run seed becomes named, independent child seeds and generators.

A child is found by its path of names and numbers, not by how many draws came before it, so adding a consumer or
running episodes in another order never changes anybody else's randomness. There is no global generator in this
library; whoever needs randomness derives its own.
"""

from __future__ import annotations

import hashlib

import numpy as np

# Tasks below it are for evaluation, tasks from it up are trained on, so that every evaluation is held out.
FIRST_TRAINING_SEED = 2**31

_SEED_BITS = 63  # fits a signed 64-bit integer, which is what torch, numpy, vLLM and JSON readers all accept


def child_seed(seed: int, *path: str | int) -> int:
    """The seed in [0, 2**63) of the child that `path` names under `seed`.

    Ours, because numpy's `spawn_key` takes integers only and depends on the number of spawns before it when used
    through `spawn()`. BLAKE2b of the typed path: "1" and 1 are different names.

    >>> child_seed(0, "warmup") != child_seed(0, "rollout")
    True
    >>> child_seed(0, "episode", 3) == child_seed(0, "episode", 3)
    True
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in path)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """An independent numpy generator for the child that `path` names under `seed`."""
    return np.random.default_rng(child_seed(seed, *path))


def training_seed(run_seed: int, number: int) -> int:
    """The seed of the task that is the run's `number`-th, in [2**31, 2**32).

    Consecutive from a start that the run seed draws, so that n tasks in a row are all the tasks of a source of n (the
    rows of a data set), and two runs share none unless they are unlucky. Below 2**32, because many environments seed
    generators that take 32 bits.

    >>> training_seed(0, 0) >= FIRST_TRAINING_SEED, training_seed(0, 7) - training_seed(0, 0)
    (True, 7)
    """
    return FIRST_TRAINING_SEED + (child_seed(run_seed, "task") + number) % FIRST_TRAINING_SEED
