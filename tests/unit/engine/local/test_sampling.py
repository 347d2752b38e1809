"""Sampling: the distribution against closed forms, the draw against its frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local import sampling
from gspo_gym.engine.local.sampling import ForbiddenTokens, RepetitionPenalty, RowSampling, sample, sampling_logprobs
from gspo_gym.errors import ConfigError

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))


class Sums(TorchDispatchMode):
    """The shapes of what is summed up within."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cumsum_.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def _rows(num: int = 1, uniform: float = 0.5, **fields: Any) -> RowSampling:
    return RowSampling(uniforms=torch.full((num,), uniform, dtype=torch.float64), **fields)


def _probs(**fields: Any) -> list[float]:
    return [round(p, 6) for p in sampling_logprobs(LOGITS, _rows(**fields)).exp()[0].tolist()]


def test_temperature_two_takes_the_square_root_of_every_probability() -> None:
    root = np.sqrt([0.1, 0.4, 0.2, 0.3])
    expected = (root / root.sum()).round(6).tolist()
    assert _probs(temperature=torch.tensor([2.0])) == pytest.approx(expected, abs=2e-6)  # both rounded to 6 digits


def test_top_k_keeps_the_k_likeliest_renormalised() -> None:
    # 0.4 and 0.3 stay, and share 0.7 between them.
    assert _probs(top_k=torch.tensor([2])) == [0.0, round(4 / 7, 6), 0.0, round(3 / 7, 6)]


def test_top_p_keeps_the_smallest_set_that_reaches_it_renormalised() -> None:
    # 0.4 alone is below 0.65, and 0.4 + 0.3 = 0.7 reaches it.
    assert _probs(top_p=torch.tensor([0.65])) == [0.0, round(4 / 7, 6), 0.0, round(3 / 7, 6)]
    # 0.9 is reached by 0.4 + 0.3 + 0.2 only.
    assert _probs(top_p=torch.tensor([0.85])) == [0.0, round(4 / 9, 6), round(2 / 9, 6), round(3 / 9, 6)]


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the three likeliest (sum 0.9), 4/9 + 3/9 = 0.78 reaches 0.75; of all four, 0.7 would not.
    both = _probs(top_k=torch.tensor([3]), top_p=torch.tensor([0.75]))
    assert both == [0.0, round(4 / 7, 6), 0.0, round(3 / 7, 6)]


@pytest.mark.parametrize("top_p", [1e-9, 1e-50])  # the smaller one is 0 in float32
def test_a_tiny_top_p_still_keeps_the_likeliest_token(top_p: float) -> None:
    assert _probs(top_p=torch.tensor([top_p])) == [0.0, 1.0, 0.0, 0.0]


def test_min_p_keeps_what_has_that_share_of_the_likeliest_renormalised() -> None:
    # Of 0.4, a share of 0.6 is 0.24, which 0.3 has; a share of 0.49 is 0.196, which 0.2 has too.
    assert _probs(min_p=torch.tensor([0.6])) == [0.0, round(4 / 7, 6), 0.0, round(3 / 7, 6)]
    assert _probs(min_p=torch.tensor([0.49])) == [0.0, round(4 / 9, 6), round(2 / 9, 6), round(3 / 9, 6)]
    assert _probs(min_p=torch.tensor([1.0])) == [0.0, 1.0, 0.0, 0.0]


def test_min_p_applies_to_what_the_temperature_made() -> None:
    # Temperature 1/2 squares: 0.01, 0.16, 0.04, 0.09. A share of 0.49 of 0.16 is 0.078, which only 0.09 has.
    both = _probs(min_p=torch.tensor([0.49]), temperature=torch.tensor([0.5]))
    assert both == pytest.approx([0.0, 16 / 25, 0.0, 9 / 25], abs=2e-6)  # rounded to 6 digits


def test_top_p_applies_to_what_min_p_left() -> None:
    # Of the three that min-p leaves (sum 0.9), 4/9 + 3/9 = 0.78 reaches 0.75; of all four, 0.7 would not.
    both = _probs(min_p=torch.tensor([0.49]), top_p=torch.tensor([0.75]))
    assert both == [0.0, round(4 / 7, 6), 0.0, round(3 / 7, 6)]


def test_repetition_divides_positive_logits_and_multiplies_negative_ones_once_however_often_a_token_came() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0], [2.0, -1.0, 0.5, 0.0]])
    repetition = RepetitionPenalty(history=torch.tensor([[0, 1, 0], [0, 1, 0]]), penalty=torch.tensor([2.0, 1.0]))
    logprobs = sampling_logprobs(logits, _rows(2, repetition=repetition))
    # 2 / 2 = 1 and -1 * 2 = -2; the second row's penalty of 1 changes nothing.
    torch.testing.assert_close(logprobs[0], torch.tensor([1.0, -2.0, 0.5, 0.0]).log_softmax(-1))
    torch.testing.assert_close(logprobs[1], logits[1].log_softmax(-1))


def test_penalty_and_min_p_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=generator) * 3
    history = torch.randint(0, 40, (5, 12), generator=generator)
    expected = MinPLogitsWarper(0.1)(history, RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone()))
    repetition = RepetitionPenalty(history=history, penalty=torch.full((5,), 1.3))
    logprobs = sampling_logprobs(logits, _rows(5, repetition=repetition, min_p=torch.full((5,), 0.1)))
    torch.testing.assert_close(logprobs, expected.log_softmax(-1))


def test_forbidden_tokens_have_no_probability_and_the_others_share_it() -> None:
    # Without tokens 1 and 3, 0.1 and 0.2 share 0.3. The model has no logit for token 9.
    forbidden = ForbiddenTokens(rows=torch.tensor([0, 0, 0]), token_ids=torch.tensor([3, 1, 9]))
    assert _probs(forbidden=forbidden) == [round(1 / 3, 6), 0.0, round(2 / 3, 6), 0.0]


def test_greedy_rows_obey_penalties_and_forbidden_tokens() -> None:
    greedy = torch.tensor([True])
    forbidden = ForbiddenTokens(rows=torch.tensor([0]), token_ids=torch.tensor([1]))
    sampled = sample(LOGITS, _rows(is_greedy=greedy, forbidden=forbidden))
    assert sampled.token_ids.tolist() == [3]
    assert sampled.logprobs.exp().tolist() == pytest.approx([0.3 / 0.6], abs=1e-6)  # float32 rounding
    # ln 0.4 is negative: twice it is ln 0.16, so that token 3 is the likeliest, with 0.3 of 0.1 + 0.16 + 0.2 + 0.3.
    repetition = RepetitionPenalty(history=torch.tensor([[1]]), penalty=torch.tensor([2.0]))
    sampled = sample(LOGITS, _rows(is_greedy=greedy, repetition=repetition))
    assert sampled.token_ids.tolist() == [3]
    assert sampled.logprobs.exp().tolist() == pytest.approx([0.3 / 0.76], abs=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"min_tokens": -1},
        {"min_tokens": 9},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"SamplingParams.{next(iter(wrong))}: expected"):
        SamplingParams(max_tokens=8, stop_token_ids=(), seed=0, **wrong)


def test_top_k_keeps_the_ranks_below_k_of_each_row_among_many_ties() -> None:
    """Small integers as logits, so that most are equal; the ranks are numpy's, by logit and then by token id."""
    logits = torch.from_numpy(np.random.default_rng(0).integers(-3, 3, (60, 17))).float()
    logits[:5, 4:] = float("-inf")  # fewer can be sampled than some rows may keep
    top_k = torch.arange(60) % 20  # 0, 17 and more keep all
    kept = sampling_logprobs(logits, _rows(60, top_k=top_k)).isfinite().numpy()
    for row, limit in enumerate(top_k.tolist()):
        order = np.argsort(-logits[row].numpy(), kind="stable")
        wanted = order[: limit or 17]
        assert set(np.flatnonzero(kept[row])) == set(wanted[np.isfinite(logits[row].numpy()[wanted])])


def test_top_k_hides_no_logit_that_is_not_a_number() -> None:
    logits = torch.tensor([[0.0, 1.0, float("nan"), 2.0], [0.0, 1.0, 3.0, 2.0]])
    logprobs = sample(logits, _rows(2, top_k=torch.tensor([2, 2]))).logprobs
    assert logprobs.isfinite().tolist() == [False, True]


def test_equal_logits_are_ranked_by_token_id() -> None:
    logprobs = sampling_logprobs(torch.zeros(1, 4), _rows(top_k=torch.tensor([2])))
    assert logprobs.exp()[0].tolist() == [0.5, 0.5, 0.0, 0.0]


def test_rows_that_ask_for_nothing_are_untouched_by_their_neighbours_truncation() -> None:
    rows = _rows(2, top_k=torch.tensor([0, 1]), top_p=torch.tensor([1.0, 1.0]))
    logprobs = sampling_logprobs(LOGITS.repeat(2, 1), rows)
    torch.testing.assert_close(logprobs[0], LOGITS[0])  # probabilities sum to 1, so logits are their own logprobs
    assert logprobs[1].exp().tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 2), (0.7001, 3), (0.9999999, 3)]
)
def test_a_uniform_number_picks_the_token_whose_share_of_the_unit_interval_holds_it(uniform: float, token: int) -> None:
    sampled = sample(LOGITS, _rows(uniform=uniform))  # cumulative: 0.1, 0.5, 0.7, 1
    assert sampled.token_ids.tolist() == [token]
    assert sampled.logprobs.tolist() == pytest.approx([LOGITS[0, token].item()], abs=1e-6)  # float32 rounding


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn_at_either_end(uniform: float) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    token = sample(logits, _rows(uniform=uniform)).token_ids.item()
    assert token == (1 if uniform == 0.0 else 2)


def test_frequencies_match_the_softmax() -> None:
    num_draws, num_tokens = 20_000, 12
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=num_tokens)).float()
    uniforms = torch.from_numpy(np.random.default_rng(1).random(num_draws))
    drawn = sample(logits.repeat(num_draws, 1), RowSampling(uniforms=uniforms)).token_ids.numpy()
    exact = np.exp(logits.double().numpy())
    expected = num_draws * exact / exact.sum()
    statistic = ((np.bincount(drawn, minlength=num_tokens) - expected) ** 2 / expected).sum()
    # Chi-square with 11 degrees of freedom: the 0.999 quantile is 31.26. Seeds are fixed, so this cannot flicker.
    assert statistic < 31.26


def test_frequencies_under_temperature_and_truncation_match_the_renormalised_distribution() -> None:
    num_draws = 20_000
    fields = {
        "temperature": torch.full((num_draws,), 2.0),
        "top_k": torch.full((num_draws,), 3),
        "uniforms": torch.from_numpy(np.random.default_rng(2).random(num_draws)),
    }
    drawn = sample(LOGITS.repeat(num_draws, 1), RowSampling(**fields)).token_ids.numpy()
    weights = np.sqrt([0.0, 0.4, 0.2, 0.3])
    expected = num_draws * weights / weights.sum()
    observed = np.bincount(drawn, minlength=4)
    assert observed[0] == 0
    statistic = ((observed[1:] - expected[1:]) ** 2 / expected[1:]).sum()
    assert statistic < 13.82  # chi-square with 2 degrees of freedom, 0.999 quantile; fixed seeds


def test_greedy_rows_take_the_argmax_with_its_logprob_at_temperature_one() -> None:
    sampled = sample(LOGITS, _rows(uniform=0.05, is_greedy=torch.tensor([True])))
    assert sampled.token_ids.tolist() == [1]
    assert sampled.logprobs.exp().tolist() == pytest.approx([0.4], abs=1e-6)  # float32 rounding


def test_a_row_with_nan_says_so_and_leaves_its_neighbour_alone() -> None:
    logits = torch.cat([torch.full((1, 4), float("nan")), LOGITS])
    sampled = sample(logits, _rows(2, uniform=0.6))
    assert not torch.isfinite(sampled.logprobs[0])
    assert 0 <= sampled.token_ids[0] < 4
    assert sampled.token_ids[1] == 2  # whose share is [0.5, 0.7)


def test_a_large_vocabulary_is_drawn_from_in_groups_of_rows_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(10, 7)))
    rows = RowSampling(uniforms=torch.from_numpy(np.random.default_rng(4).random(10)))
    whole = sample(logits, rows).token_ids
    assert sampling._MAX_CDF_ELEMENTS * torch.float64.itemsize == 128 * 2**20
    monkeypatch.setattr(sampling, "_MAX_CDF_ELEMENTS", 21)  # three rows of seven at once
    with Sums() as sums:
        assert torch.equal(sample(logits, rows).token_ids, whole)
    assert sums.shapes == [(3, 7), (3, 7), (3, 7), (1, 7)]
    monkeypatch.setattr(sampling, "_MAX_CDF_ELEMENTS", 6)  # less than a row
    assert torch.equal(sample(logits, rows).token_ids, whole)


@pytest.mark.parametrize(
    ("uniform", "token"), [(1 / 3 - 1e-10, 0), (1 / 3 + 1e-10, 1), (2 / 3 - 1e-10, 1), (2 / 3 + 1e-10, 2)]
)
def test_shares_are_those_of_the_sum_that_rounding_left(uniform: float, token: int) -> None:
    # log(1/3) in float32 is off by 3e-8, and so is the sum; a third of it is a token's share all the same.
    assert sample(torch.zeros(1, 3), _rows(uniform=uniform)).token_ids.tolist() == [token]
