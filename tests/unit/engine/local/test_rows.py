"""What is known of each request in work: the random numbers behind its tokens, what it asks for, where it ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

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


def test_every_bit_of_a_seed_counts() -> None:
    table = RowTable(2)
    for slot, seed in enumerate((5, 2**63 + 5)):
        table.start(slot, SamplingParams(max_tokens=1, stop_token_ids=(), seed=seed), 1, np.zeros(1, np.int32))
    uniforms = table.sampling(np.arange(2), torch.device("cpu")).uniforms
    assert uniforms[0] != uniforms[1]


def test_a_slot_is_asked_for_what_its_request_says_and_a_greedy_one_for_nothing_but_the_likeliest() -> None:
    table, prompt = RowTable(3), np.zeros(1, np.int32)
    asked = {"max_tokens": 4, "stop_token_ids": (), "seed": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.25}
    table.start(0, SamplingParams(temperature=0.5, **asked), 4, prompt)
    table.start(1, SamplingParams(temperature=0.0, **asked), 4, prompt)
    table.start(2, SamplingParams(max_tokens=4, stop_token_ids=(), seed=0), 4, prompt)
    rows = table.sampling(np.arange(3), torch.device("cpu"))
    found = {name: getattr(rows, name).tolist() for name in ("temperature", "top_k", "top_p", "min_p", "is_greedy")}
    assert found == {
        "temperature": [0.5, 1.0, 1.0],
        "top_k": [5, 0, 0],
        "top_p": [0.5, 1.0, 1.0],
        "min_p": [0.25, 0.0, 0.0],
        "is_greedy": [False, True, False],
    }
    plain = table.sampling(np.array([2]), torch.device("cpu"))
    rest = (plain.temperature, plain.is_greedy, plain.top_k, plain.top_p, plain.min_p, plain.repetition)
    assert rest == (None,) * 6  # what no row asks for costs nothing


@pytest.mark.parametrize("penalty", [0.5, 2.0])
def test_the_penalty_is_for_the_prompt_and_what_was_sampled_of_the_rows_that_ask_for_it(penalty: float) -> None:
    table = RowTable(2)
    plain = SamplingParams(max_tokens=3, stop_token_ids=(), seed=0)
    table.start(0, plain, 3, np.array([1, 2], np.int32))
    table.start(1, replace(plain, repetition_penalty=penalty), 3, np.array([3, 4], np.int32))
    table.append(np.array([0, 1]), np.array([5, 6]), np.zeros(2, np.float32))
    repetition = table.sampling(np.arange(2), torch.device("cpu")).repetition
    assert repetition is not None
    assert repetition.penalty.tolist() == [1.0, penalty]
    assert set(repetition.history[1].tolist()) == {3, 4, 6}


def test_rows_end_each_with_a_stop_token_of_its_own_or_at_its_own_limit() -> None:
    table, prompt = RowTable(3), np.zeros(1, np.int32)
    stops = ((7, 8), (9,), ())
    for slot, (stop, max_new) in enumerate(zip(stops, (4, 4, 2), strict=True)):
        table.start(slot, SamplingParams(max_tokens=4, stop_token_ids=stop, seed=0), max_new, prompt)
    slots, logprobs = np.arange(3), np.float32([-1, -2, -3])
    # 9 stops the second alone, and no row's second place: a row's own stop tokens are looked at, and all of them.
    assert table.append(slots, np.array([9, 7, 9]), logprobs).tolist() == [False, False, False]
    assert table.append(slots, np.array([8, 9, 9]), logprobs).tolist() == [True, True, True]
    completions = [table.completion(slot, 3) for slot in range(3)]
    assert [c.token_ids.tolist() for c in completions] == [[9, 8], [7, 9], [9, 9]]
    assert [c.finish_reason.value for c in completions] == ["stop", "stop", "length"]
    assert [c.logprobs.tolist() for c in completions] == [[-1, -1], [-2, -2], [-3, -3]]


def test_what_was_sampled_stays_when_a_longer_request_joins() -> None:
    table, prompt = RowTable(2), np.zeros(1, np.int32)
    sampling = SamplingParams(max_tokens=40, stop_token_ids=(), seed=0)
    table.start(0, sampling, 2, prompt)
    table.append(np.array([0]), np.array([11]), np.float32([-0.5]))
    table.start(1, sampling, 40, prompt)
    table.append(np.array([0]), np.array([12]), np.float32([-0.25]))
    completion = table.completion(0, 1)
    assert (completion.token_ids.tolist(), completion.logprobs.tolist()) == ([11, 12], [-0.5, -0.25])
