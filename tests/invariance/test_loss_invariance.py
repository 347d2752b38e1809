"""What must not matter to the loss itself: padding, the order and numbers of rows, and how a step is divided.

With every term of the loss switched on, for all units and aggregations, in float64: only the order of summation may
differ. The same through a model, a scorer and an optimizer: `test_learning_invariance.py`.
"""

from __future__ import annotations

import pytest
import torch

from gspo_gym.learning.losses import Denominators, count_denominators, policy_loss
from gspo_gym.learning.settings import LossSettings

UNITS = ["trajectory", "segment", "turn", "token"]
AGGREGATIONS = [
    "seq-mean-token-mean", "grpo", "turn-mean-token-mean", "token-mean", "bnpo", "dapo", "seq-mean-token-sum",
    "seq-mean-token-sum-norm", "dr_grpo",
]  # fmt: skip
PER_TOKEN = ("now", "old", "ref", "advantages", "entropy", "correction")
ROUNDING = 1e-13  # a hundred terms of order 1 at 2e-16 each
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def step() -> Tensors:
    """Seven trajectories in eleven rows of 16 with ragged turns and interior masks; row 4 holds no sampled token."""
    generator = torch.Generator().manual_seed(11)
    trajectory = torch.tensor([0, 1, 1, 2, 2, 3, 4, 4, 4, 5, 6])
    lengths = torch.tensor([16, 7, 12, 9, 5, 15, 4, 16, 6, 11, 16])
    places = torch.arange(16)
    mask = (torch.rand(11, 16, generator=generator) < 0.6) & (places < lengths[:, None]) & (places > 0)
    mask[:, 3] = True
    mask[4] = False

    def draw(scale: float) -> torch.Tensor:
        return scale * torch.randn(11, 16, generator=generator, dtype=torch.float64)

    old = draw(1.0) - 3
    now = old + draw(0.25) + 0.2 * torch.randn(7, generator=generator, dtype=torch.float64)[trajectory][:, None]
    return {
        "mask": mask,
        "turn": torch.where(mask, places // 5 + 3 * (torch.arange(11)[:, None] % 2), -1),
        "trajectory": trajectory,
        "now": now,
        "old": old,
        "ref": now + draw(0.5),
        "advantages": draw(1.0),
        "entropy": draw(1.0).abs(),
        "correction": draw(0.5).exp(),
    }


def denominators_of(step: Tensors) -> Denominators:
    return count_denominators(step["mask"], step["turn"], step["trajectory"], num_batch_tokens=200)


def run(step: Tensors, unit: str, aggregation: str, denominators: Denominators) -> tuple[float, Tensors]:
    """The loss, and its gradients [B, T] by logprobs and entropies, 0 outside the mask."""
    norm = {"norm_length": 20} if aggregation in ("seq-mean-token-sum-norm", "dr_grpo") else {}
    settings = LossSettings.model_validate(
        {"unit": unit, "aggregation": aggregation, "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.3, "kl_coef": 0.2}
        | {"kl_importance_weighted": True, "entropy_coef": 0.1}
        | norm
    )
    now, entropy = (step[name].clone().requires_grad_(True) for name in ("now", "entropy"))
    output = policy_loss(
        now,
        step["old"],
        action_mask=step["mask"],
        turn_index=step["turn"],
        trajectory_index=step["trajectory"],
        advantages=step["advantages"],
        settings=settings,
        denominators=denominators,
        ref_logprobs=step["ref"],
        entropy=entropy,
        correction=step["correction"],
    )
    torch.autograd.backward(output.loss)
    assert now.grad is not None
    assert entropy.grad is not None
    return output.loss.item(), {"now": now.grad, "entropy": entropy.grad}


def rows_of(step: Tensors, rows: torch.Tensor) -> Tensors:
    return {name: values[rows] for name, values in step.items()}


def assert_same(actual: tuple[float, Tensors], expected: tuple[float, Tensors]) -> None:
    assert actual[0] == pytest.approx(expected[0], abs=ROUNDING)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=0, atol=ROUNDING, msg=name)


@pytest.fixture(params=AGGREGATIONS)
def aggregation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_padding_of_any_width_and_content_changes_nothing(step: Tensors, unit: str, aggregation: str) -> None:
    expected = run(step, unit, aggregation, denominators_of(step))
    nan = torch.full((11, 5), float("nan"), dtype=torch.float64)
    padded = {name: torch.cat([nan, step[name], nan], 1) for name in PER_TOKEN}
    padded["mask"] = torch.nn.functional.pad(step["mask"], (5, 5))
    padded["turn"] = torch.nn.functional.pad(step["turn"], (5, 5), value=-1)
    padded["trajectory"] = step["trajectory"]
    loss, gradients = run(padded, unit, aggregation, denominators_of(padded))
    assert_same((loss, {name: gradient[:, 5:-5] for name, gradient in gradients.items()}), expected)


def test_the_order_of_rows_changes_nothing(step: Tensors, unit: str, aggregation: str) -> None:
    expected = run(step, unit, aggregation, denominators_of(step))
    order = torch.tensor([6, 2, 10, 9, 0, 8, 3, 5, 1, 7, 4])
    shuffled = rows_of(step, order)
    loss, gradients = run(shuffled, unit, aggregation, denominators_of(shuffled))
    assert_same((loss, {name: gradient[order.argsort()] for name, gradient in gradients.items()}), expected)


def test_the_numbers_of_trajectories_and_turns_change_nothing(step: Tensors, unit: str, aggregation: str) -> None:
    expected = run(step, unit, aggregation, denominators_of(step))
    renamed = step | {
        "trajectory": torch.tensor([40, 7, 1000, 3, 12, 0, 5])[step["trajectory"]],
        "turn": torch.where(step["mask"], 100 - 7 * step["turn"], -1),
    }
    assert_same(run(renamed, unit, aggregation, denominators_of(renamed)), expected)


@pytest.mark.parametrize("parts", [[[0], [1, 2], [3], [4, 5, 6]], [[6, 1, 3], [0, 5], [2, 4]], [[i] for i in range(7)]])
def test_the_losses_of_microbatches_add_up_to_the_steps(
    step: Tensors, unit: str, aggregation: str, parts: list[list[int]]
) -> None:
    """Whole trajectories are dealt out; the denominators are the step's."""
    denominators = denominators_of(step)
    expected = run(step, unit, aggregation, denominators)
    total, summed = 0.0, {name: torch.zeros_like(gradient) for name, gradient in expected[1].items()}
    for part in parts:
        rows = torch.nonzero(torch.isin(step["trajectory"], torch.tensor(part))).squeeze(1)
        loss, gradients = run(rows_of(step, rows), unit, aggregation, denominators)
        total += loss
        for name, gradient in gradients.items():
            summed[name][rows] = gradient
    assert_same((total, summed), expected)


def test_packing_the_rows_of_a_trajectory_into_one_changes_nothing(step: Tensors, unit: str, aggregation: str) -> None:
    """Behind one another, with what they were padded with in between. A segment is then the whole trajectory."""
    expected = run(step, "trajectory" if unit == "segment" else unit, aggregation, denominators_of(step))
    packed: Tensors = {"trajectory": torch.arange(7)}
    for name, values in step.items():
        if name != "trajectory":
            fill = {"mask": 0, "turn": -1}.get(name, float("nan"))
            packed[name] = torch.full((7, 48), fill, dtype=values.dtype)
            for row, (number, place) in enumerate(places_in_pack(step)):
                packed[name][number, place : place + 16] = values[row]
    loss, gradients = run(packed, unit, aggregation, denominators_of(packed))
    unpacked = {
        name: torch.stack([gradient[number, place : place + 16] for number, place in places_in_pack(step)])
        for name, gradient in gradients.items()
    }
    assert_same((loss, unpacked), expected)


def places_in_pack(step: Tensors) -> list[tuple[int, int]]:
    """Of each row: its trajectory, and where it starts behind the rows of the same before it."""
    numbers = step["trajectory"].tolist()
    return [(number, 16 * numbers[:row].count(number)) for row, number in enumerate(numbers)]


def test_cutting_a_trajectory_into_more_rows_changes_nothing(step: Tensors, unit: str, aggregation: str) -> None:
    """Every token a row of its own, as if a template had started a segment there. A segment is then a token."""
    expected = run(step, "token" if unit == "segment" else unit, aggregation, denominators_of(step))
    rows = torch.arange(11).repeat_interleave(16)
    mine = torch.arange(16).repeat(11)[:, None] == torch.arange(16)
    cut = rows_of(step, rows)
    cut["mask"] = cut["mask"] & mine
    cut["turn"] = torch.where(cut["mask"], cut["turn"], -1)
    loss, gradients = run(cut, unit, aggregation, denominators_of(cut))
    assert_same((loss, {name: gradient.reshape(11, 16, 16).sum(1) for name, gradient in gradients.items()}), expected)
