"""Seeds derived by name: pinned to literal values and to an independent derivation with hashlib."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

from gspo_gym.seeding import FIRST_TRAINING_SEED, child_seed, generator, training_seed


def derived_again(text: str) -> int:
    """The first 63 bits of the BLAKE2b-64 digest, read as a binary number."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).hexdigest()
    return int(bin(int(digest, 16))[2:].zfill(64)[:63], 2)


@pytest.mark.parametrize(
    ("seed", "path", "text", "value"),
    [
        (0, ("warmup",), "0\x1fstr:warmup", 2009695906064378756),
        (7, ("episode", 3), "7\x1fstr:episode\x1fint:3", 2362486393018139751),
        (12, ("a", "", 0, -2), "12\x1fstr:a\x1fstr:\x1fint:0\x1fint:-2", 3786841079651519469),
    ],
)
def test_a_childs_seed_is_the_hash_of_its_typed_path(
    seed: int, path: tuple[str | int, ...], text: str, value: int
) -> None:
    assert child_seed(seed, *path) == derived_again(text) == value


def test_a_name_and_a_number_that_look_alike_are_different_children() -> None:
    assert child_seed(0, "1") != child_seed(0, 1)
    assert child_seed(0, "a", "b") != child_seed(0, "ab")
    assert child_seed(1, 2) != child_seed(12)


def test_seeds_fit_a_signed_64_bit_integer_and_do_not_collide_in_practice() -> None:
    seeds = [child_seed(seed, "episode", k) for seed, k in itertools.product(range(20), range(500))]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == len(seeds)  # 10,000 of 2**63: the chance of a collision is 5e-12
    assert max(seeds) > 2**62  # the upper half is used: all 63 bits are


def test_a_generator_depends_on_its_path_only_and_not_on_draws_before_it() -> None:
    first = generator(3, "a").integers(0, 2**32, 4).tolist()
    np.random.default_rng(0).random(10)
    generator(3, "b").random(10)
    assert generator(3, "a").integers(0, 2**32, 4).tolist() == first
    assert first == np.random.default_rng(child_seed(3, "a")).integers(0, 2**32, 4).tolist()
    assert generator(3, "b").integers(0, 2**32, 4).tolist() != first


def test_training_tasks_are_never_evaluation_tasks_and_fit_32_bits() -> None:
    assert FIRST_TRAINING_SEED == 2**31
    seeds = [training_seed(run, number) for run, number in itertools.product(range(5), range(320))]
    assert all(2**31 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) == len(seeds)  # runs overlap with a chance of about 10 * 640 / 2**31, and these do not
    assert training_seed(0, 2) == 2**31 + (derived_again("0\x1fstr:task") + 2) % 2**31


def test_as_many_training_tasks_as_a_data_set_has_rows_are_all_its_rows() -> None:
    assert {training_seed(3, 100 + number) % 97 for number in range(97)} == set(range(97))
    assert training_seed(0, 2**31) == training_seed(0, 0), "after 2**31 tasks they come again"
