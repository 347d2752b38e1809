"""The edges of what sampling keeps: ties, whole shares, and stop tokens that the model has no logit for."""

from __future__ import annotations

import math

import pytest
import torch

from gspo_gym.engine.local.sampling import ForbiddenTokens, RepetitionPenalty, RowSampling, sample, sampling_logprobs

HALF = math.log(0.5)
OUT = -math.inf


def rows(**fields: torch.Tensor) -> RowSampling:
    return RowSampling(torch.tensor([0.5], dtype=torch.float64), **fields)  # type: ignore[arg-type]


def kept(logits: list[float], asked: RowSampling) -> list[float]:
    values: list[float] = sampling_logprobs(torch.tensor([logits]), asked)[0].tolist()
    return values


@pytest.mark.parametrize(
    ("logits", "asked", "expected"),
    [
        ([0.0, 0.0], {"top_p": torch.tensor([0.5])}, [0.0, OUT]),  # the first alone reaches half
        ([0.0, 0.0], {"top_p": torch.tensor([0.500001])}, [HALF, HALF]),
        ([1.0, 1.0, 0.0], {"min_p": torch.tensor([1.0])}, [HALF, HALF, OUT]),  # what equals the likeliest stays
        ([1.0, 1.0, 0.0], {"top_k": torch.tensor([2])}, [HALF, HALF, OUT]),
        ([1.0, 1.0, 1.0], {"top_k": torch.tensor([1])}, [0.0, OUT, OUT]),
        ([5.0, 5.0], {"top_k": torch.tensor([0])}, [HALF, HALF]),  # 0 keeps all
        ([5.0, 5.0], {"min_p": torch.tensor([0.0])}, [HALF, HALF]),
        ([5.0, 5.0], {"top_p": torch.tensor([1.0])}, [HALF, HALF]),
    ],
)
def test_what_is_kept_at_an_edge(logits: list[float], asked: dict[str, torch.Tensor], expected: list[float]) -> None:
    assert kept(logits, rows(**asked)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num", [1, 1023, 1024, 1025, 2999])  # 1,024 ranks are looked at before a row is sorted
def test_top_p_keeps_the_same_ranks_however_flat_the_row_is_and_whatever_is_beside_it(num: int) -> None:
    """Of 3,000 tokens with mass e**-r/1000 at rank r, n have (1 - e**-n/1000) / (1 - e**-3); of equal ones n/3000."""
    falling = torch.arange(3000.0).flip(0) * -1e-3  # the likeliest token is the last
    logits = torch.stack([falling, torch.zeros(3000), falling * 1000])
    share = torch.tensor([-math.expm1(-(num - 0.5) / 1000) / -math.expm1(-3), (num - 0.5) / 3000, 0.5])
    together = sampling_logprobs(logits, rows(top_p=share))
    expected = torch.zeros(3, 3000, dtype=torch.bool)
    expected[0, 3000 - num :] = expected[1, :num] = expected[2, -1] = True
    assert torch.equal(together.isfinite(), expected)
    alone = [sampling_logprobs(logits[i : i + 1], rows(top_p=share[i : i + 1])) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_a_row_that_keeps_all_mass_keeps_its_rarest_token_beside_a_truncated_row() -> None:
    logits = torch.tensor([[0.0, -40.0], [0.0, 0.0]])  # e**-40 added to 1 is 1
    values = sampling_logprobs(logits, rows(top_p=torch.tensor([1.0, 0.5])))
    assert values.tolist() == [[0.0, -40.0], [0.0, OUT]]


@pytest.mark.parametrize("stop", [3, 4, 1000])
def test_a_stop_token_beyond_the_logits_forbids_nothing(stop: int) -> None:
    """Of logits [3], a token of which the vocabulary has more ids than the model has logits."""
    forbidden = ForbiddenTokens(torch.tensor([0, 0]), torch.tensor([stop, 2]))
    assert kept([0.0, 0.0, 7.0], rows(forbidden=forbidden)) == pytest.approx([HALF, HALF, OUT], abs=1e-6)  # type: ignore[arg-type]


def test_a_penalty_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    """Logits (2, 1/2, -1, 0) with penalty 2 over all four: (1, 1/4, -2, 0)."""
    penalty = RepetitionPenalty(torch.tensor([[0, 1, 2, 3]]), torch.tensor([2.0]))
    total = math.log(math.exp(1) + math.exp(0.25) + math.exp(-2) + 1)
    assert kept([2.0, 0.5, -1.0, 0.0], rows(repetition=penalty)) == pytest.approx(  # type: ignore[arg-type]
        [1 - total, 0.25 - total, -2 - total, -total], abs=1e-6
    )


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.4999, 0), (0.5, 1), (0.9999, 1)])
def test_the_boundary_between_two_tokens_belongs_to_the_second(uniform: float, token: int) -> None:
    drawn = sample(torch.zeros(1, 2), RowSampling(torch.tensor([uniform], dtype=torch.float64)))
    assert drawn.token_ids.tolist() == [token]
    assert drawn.logprobs.tolist() == pytest.approx([HALF], abs=1e-6)
