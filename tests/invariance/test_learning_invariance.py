"""What must not matter: padding, the order of rows, the division into micro-batches and into segments.

With a real (tiny) model, in float64 where gradients are compared, so that only the order of summation can differ.
transformers computes rotary angles and norms in float32 whatever the model's dtype; these are the same numbers in both
runs, so the differences stay those of float64.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from gspo_gym.learning.batching import TrainBatch, select_trajectories, split_microbatches
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.losses import Denominators, policy_loss
from gspo_gym.learning.settings import (
    AdvantageSettings,
    CorrectionSettings,
    LossSettings,
    OptimizerSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.update import Learner

UNITS = ["trajectory", "segment", "turn", "token"]
SUMMATION = 1e-9  # relative to the largest entry: some thousand float64 roundings, times what attention magnifies


@pytest.fixture
def model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(3)
    return Qwen3ForCausalLM(config).double().eval()


@pytest.fixture
def batch():
    """Seven trajectories in ten rows of up to 20 tokens; advantages differ by turn."""
    generator = torch.Generator().manual_seed(4)
    trajectory_index = torch.tensor([0, 1, 1, 2, 3, 4, 4, 4, 5, 6])
    B, T = len(trajectory_index), 20
    lengths = torch.tensor([20, 7, 12, 9, 15, 4, 18, 6, 11, 20])
    attention_mask = torch.arange(T) < lengths[:, None]
    action_mask = (torch.rand(B, T, generator=generator) < 0.5) & attention_mask
    action_mask[:, 0] = False
    action_mask[:, 3] = True
    turn_index = torch.where(action_mask, torch.arange(T) // 5, -1)
    advantage_of_turn = torch.randn(7, 4, generator=generator)
    advantages = torch.where(action_mask, advantage_of_turn[trajectory_index[:, None], turn_index.clamp(min=0)], 0.0)
    return TrainBatch(
        token_ids=torch.randint(0, 50, (B, T), generator=generator) * attention_mask,
        attention_mask=attention_mask,
        action_mask=action_mask,
        turn_index=turn_index,
        trajectory_index=trajectory_index,
        rollout_logprobs=torch.where(action_mask, -torch.rand(B, T, generator=generator), 0.0),
        advantages=advantages,
        is_masked=torch.zeros(B, dtype=torch.bool),
    )


def drifted(logprobs, batch):
    """Old logprobs that differ from these by up to 0.3 in a way that only the token's id and place decide, so that the
    same token gets the same old logprob wherever its row stands."""
    places = torch.arange(batch.token_ids.shape[1]).expand_as(batch.token_ids)
    return logprobs.detach() - 0.3 * torch.sin(7.0 * batch.token_ids + 3.0 * places)


def denominators_of(batch):
    """Counted one token at a time."""
    tokens = [
        (int(batch.trajectory_index[b]), int(batch.turn_index[b, t])) for b, t in batch.action_mask.nonzero().tolist()
    ]
    return Denominators(len({i for i, _ in tokens}), len(set(tokens)), len(tokens), len(tokens))


def gradients(model, parts, *, unit, denominators):
    """The loss and the gradients accumulated over these micro-batches."""
    settings = LossSettings(unit=unit, clip_low=0.1, clip_high=0.1, kl_coef=0.1)
    model.zero_grad()
    computer = LogprobComputer(model)
    total = 0.0
    for part in parts:
        logprobs = computer.compute(part.token_ids, part.attention_mask, part.action_mask).logprobs
        output = policy_loss(
            logprobs,
            drifted(logprobs, part),
            action_mask=part.action_mask,
            turn_index=part.turn_index,
            trajectory_index=part.trajectory_index,
            advantages=part.advantages,
            settings=settings,
            denominators=denominators,
            ref_logprobs=drifted(logprobs, part),
        )
        output.loss.backward()
        total += output.loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=SUMMATION)
    for name, gradient in expected[1].items():
        tolerance = SUMMATION * float(gradient.abs().max())
        torch.testing.assert_close(actual[1][name], gradient, rtol=0, atol=tolerance, msg=name)


def rearranged(batch, **changes):
    return dataclasses.replace(batch, **changes)


@pytest.mark.parametrize("unit", UNITS)
def test_the_division_into_microbatches_changes_no_gradient(model, batch, unit):
    whole = gradients(model, [batch], unit=unit, denominators=denominators_of(batch))
    for max_tokens in (1, 45, 90):
        parts = split_microbatches(batch, max_tokens)
        assert len(parts) > 1
        assert_same(gradients(model, parts, unit=unit, denominators=denominators_of(batch)), whole)


@pytest.mark.parametrize("unit", UNITS)
def test_padding_of_any_width_and_content_changes_no_gradient(model, batch, unit):
    rows, width = batch.token_ids.shape
    wide = {}
    for name in ("token_ids", "attention_mask", "action_mask", "turn_index", "rollout_logprobs", "advantages"):
        value = getattr(batch, name)
        fill = {"token_ids": 49, "turn_index": -1}.get(name, 0)
        wide[name] = torch.cat([value, torch.full((rows, 13), fill, dtype=value.dtype)], 1)
    wide["token_ids"] = torch.where(wide["attention_mask"], wide["token_ids"], 49)
    padded = rearranged(batch, **wide)
    assert padded.token_ids.shape == (rows, width + 13)
    whole = gradients(model, [batch], unit=unit, denominators=denominators_of(batch))
    assert_same(gradients(model, [padded], unit=unit, denominators=denominators_of(batch)), whole)


@pytest.mark.parametrize("unit", UNITS)
def test_the_order_of_rows_and_trajectories_changes_no_gradient(model, batch, unit):
    order = torch.tensor([6, 2, 9, 0, 8, 3, 5, 1, 7, 4])
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    shuffled = rearranged(batch, **{n: t[order] for n, t in tensors.items() if isinstance(t, torch.Tensor)})
    renumbered = select_trajectories(batch, [4, 2, 6, 0, 5, 1, 3])
    whole = gradients(model, [batch], unit=unit, denominators=denominators_of(batch))
    assert_same(gradients(model, [shuffled], unit=unit, denominators=denominators_of(batch)), whole)
    assert_same(gradients(model, [renumbered], unit=unit, denominators=denominators_of(batch)), whole)


def cut_into_segments(batch, logprobs, old, pieces):
    """The same sampled tokens with the same logprobs, each row cut into pieces: piece k of a row holds its tokens
    number k, k + pieces, k + 2 * pieces, ..., as if a template had started a new segment there."""
    rows = torch.arange(len(batch.token_ids)).repeat_interleave(pieces)
    places = torch.arange(batch.token_ids.shape[1])
    mine = (places[None, :] % pieces) == (torch.arange(len(rows)) % pieces)[:, None]
    return {
        "logprobs": logprobs[rows],
        "old_logprobs": old[rows],
        "action_mask": batch.action_mask[rows] & mine,
        "turn_index": torch.where(mine, batch.turn_index[rows], -1),
        "trajectory_index": batch.trajectory_index[rows],
        "advantages": batch.advantages[rows],
    }


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit != "segment"])
@pytest.mark.parametrize("pieces", [2, 3, 20])
def test_cutting_an_episode_into_segments_changes_neither_loss_nor_gradient(batch, unit, pieces):
    generator = torch.Generator().manual_seed(5)
    shape = batch.token_ids.shape
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    old = start + 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    results = []
    for k in (1, pieces):
        logprobs = start.clone().requires_grad_(True)
        tensors = cut_into_segments(batch, logprobs, old, k)
        now = tensors.pop("logprobs")
        output = policy_loss(
            now,
            tensors.pop("old_logprobs"),
            **tensors,
            settings=LossSettings(unit=unit, clip_low=0.1, clip_high=0.1),
            denominators=denominators_of(batch),
        )
        output.loss.backward()
        results.append((output.loss.item(), {"logprobs": logprobs.grad}))
    assert_same(results[1], results[0])


def learn(
    model, batch, *, max_tokens, chunk, minibatch_size=3, update_epochs=2, loss=None, share_prefixes="auto", **options
):
    """The weights and metrics after an update that starts from the model's weights, which are put back."""
    start = {name: p.clone() for name, p in model.state_dict().items()}
    learner = Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=loss or LossSettings(clip_low=0.2, clip_high=0.2),
        update=UpdateSettings(
            learning_rate=1e-3,
            update_epochs=update_epochs,
            max_tokens_per_microbatch=max_tokens,
            share_prefixes=share_prefixes,
        ),
        logits_bytes=chunk * 2 * 4 * 61,
        minibatch_size=minibatch_size,
        **options,
    )
    report = learner.update(batch)
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    model.load_state_dict(start)
    return weights, report.metrics


def assert_same_update(actual, expected):
    for name, value in expected[0].items():
        # AdamW divides a gradient by its own size plus 1e-8, which magnifies the rounding of the smallest ones
        torch.testing.assert_close(actual[0][name], value, rtol=0, atol=1e-3 * 1e-3, msg=name)
    of_memory = {"batch/padding_fraction", "ratio/noise_floor", "time/score_seconds", "time/train_seconds"}
    for name in expected[1].keys() - of_memory:
        assert actual[1][name] == pytest.approx(expected[1][name], rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("minibatch_size", [None, 3])
def test_the_memory_budget_of_an_update_changes_its_weights_by_rounding_only(model, batch, unit, minibatch_size):
    options = {"minibatch_size": minibatch_size, "loss": LossSettings(unit=unit, clip_low=0.2, clip_high=0.2)}
    whole = learn(model, batch, max_tokens=100_000, chunk=100_000, **options)
    assert_same_update(learn(model, batch, max_tokens=1, chunk=3, **options), whole)


@pytest.mark.parametrize("max_tokens", [100_000, 60])
@pytest.mark.parametrize("is_single_step", [True, False])
def test_computing_shared_prefixes_once_changes_an_update_by_rounding_only(model, batch, max_tokens, is_single_step):
    # all episodes begin alike, but for the group's number in the third place
    batch.token_ids[:, :3] = torch.tensor([5, 6, 7])
    batch.token_ids[:, 2] += batch.trajectory_index % 3
    steps = {"minibatch_size": None, "update_epochs": 1} if is_single_step else {}
    shared, rows = (
        learn(model, batch, max_tokens=max_tokens, chunk=100, share_prefixes=wanted, **steps)
        for wanted in (True, False)
    )
    assert_same_update(shared, rows)


VARIANTS = {
    "kl in the reward, whitening over tokens": {
        "rewards": RewardSettings(kl_coef=0.1, kl_target=0.1),
        "advantages": AdvantageSettings(whiten="tokens", clip=1.0),
    },
    "kl shaping, whitening over trajectories": {
        "advantages": AdvantageSettings(kl_shaping_coef=0.1, whiten="trajectories")
    },
    "correction": {"correction": CorrectionSettings(level="turn", mode="mask", low=0.1, high=3.0)},
    "rollout logprobs": {"correction": CorrectionSettings(old_logprobs="rollout", off_policy_threshold=0.5)},
    "kl and entropy, a mean over the batch's tokens": {
        "loss": LossSettings(entropy_coef=0.1, kl_coef=0.1, aggregation="dapo")
    },
    "a mean over turns": {"loss": LossSettings(aggregation="turn-mean-token-mean", unit="segment")},
}


@pytest.fixture
def reference_model(model):
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return other


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_single_step", [True, False])
def test_no_variant_of_an_update_depends_on_the_memory_budget(model, reference_model, batch, variant, is_single_step):
    # the trajectories' numbers 2 and 5 are left out of the loss, and counted
    batch.is_masked[[3, 8]] = True
    steps = {"minibatch_size": None, "update_epochs": 1} if is_single_step else {}
    options = {**VARIANTS[variant], **steps}
    if "kl" in variant:
        options["reference_model"] = reference_model
    whole = learn(model, batch, max_tokens=100_000, chunk=100_000, **options)
    assert_same_update(learn(model, batch, max_tokens=1, chunk=3, **options), whole)
