"""The random numbers behind the tokens."""

from __future__ import annotations

import numpy as np

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.rows import RowTable, uniform_numbers


def test_the_numbers_are_splitmix64s() -> None:
    # The first five outputs for the state 1234567, as published with the reference implementation's tests.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    numbers = uniform_numbers(np.full(5, 1234567, np.uint64), np.arange(5))
    assert numbers.tolist() == [(bits >> 11) / 2**53 for bits in published]


def test_neighbouring_seeds_give_unrelated_uniform_numbers() -> None:
    num_seeds, num_tokens = 2000, 10
    table, prompt = RowTable(num_seeds), np.zeros(1, np.int32)
    for seed in range(num_seeds):
        table.start(seed, SamplingParams(max_tokens=num_tokens, stop_token_ids=(), seed=seed), num_tokens, prompt)
    numbers = np.stack([uniform_numbers(table._streams, np.full(num_seeds, t)) for t in range(num_tokens)], axis=1)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    expected = num_seeds * num_tokens / 50
    # Chi-square with 49 degrees of freedom: the 0.999 quantile is 85.4. All is fixed, so this cannot flicker.
    assert ((counts - expected) ** 2 / expected).sum() < 85.4
    # Correlations of independent numbers have a standard deviation of 1 / sqrt(2000) = 0.022; 4.5 of them for the
    # largest of 10 + 45 pairs.
    between_seeds = np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]
    between_tokens = np.corrcoef(numbers.T)[~np.eye(num_tokens, dtype=bool)]
    assert abs(between_seeds) < 4.5 * 0.022
    assert np.abs(between_tokens).max() < 4.5 * 0.022


def test_seeds_beyond_sixty_four_bits_and_below_zero_are_taken_modulo() -> None:
    table = RowTable(2)
    for slot, seed in enumerate((-1, 2**64 - 1)):
        table.start(slot, SamplingParams(max_tokens=1, stop_token_ids=(), seed=seed), 1, np.zeros(1, np.int32))
    assert table._streams[0] == table._streams[1]
