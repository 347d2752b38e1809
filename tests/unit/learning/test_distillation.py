"""A learner with a teacher: whose logprobs are compared, at which temperature, and what is learned from them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.errors import ConfigError
from gspo_gym.learning.batching import TokenBatch, TrainBatch
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import (
    CorrectionSettings,
    DistillationSettings,
    LossSettings,
    OptimizerSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.tokens import TokenTable
from gspo_gym.learning.update import Learner
from gspo_gym.types import Sampling

SMALL = {"vocab_size": 61, "initializer_range": 0.3}
Make = Callable[..., Any]


def make_learner(model: Any, teacher: Any, *, update: dict[str, Any] | None = None, **options: Any) -> Learner:
    distillation = {"teacher": "t", "reward": False} | options.pop("distillation", {})
    return Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(**options.pop("loss", {})),
        update=UpdateSettings(**({"learning_rate": 1e-3} | (update or {}))),
        distillation=DistillationSettings(**distillation),
        teacher=teacher,
        **options,
    )


def other(model: Any, *, moved: float = 0.3) -> Any:
    """Another model of the same shape."""
    teacher = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(moved * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return teacher


@torch.no_grad()
def distributions(model: Any, batch: TrainBatch) -> torch.Tensor:
    """[A, V] logprobs of all tokens where one was sampled, at temperature 1, from the model's own forward."""
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    return torch.log_softmax(logits[:, :-1][batch.action_mask[:, 1:]].double(), -1)


def compared(model: Any, teacher: Any, batch: TrainBatch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """[A] log(teacher / policy) of the sampled tokens and KL(policy || teacher), by hand."""
    ids = batch.token_ids[batch.action_mask][:, None]
    own, theirs = distributions(model, batch), distributions(teacher, batch)
    gap = (theirs - own).gather(-1, ids)[:, 0]
    return gap.numpy(), (own.exp() * (own - theirs)).sum(-1).numpy()


SAMPLED: dict[str, dict[str, Any]] = {
    "as the learner scores it": {},
    "with the baseline": {"distillation": {"baseline": True}},
    "at another temperature": {"sampling": Sampling(temperature=0.7)},
    "from the ten likeliest": {"sampling": Sampling(top_k=10)},
    "under the engine's old logprobs": {"correction": CorrectionSettings(old_logprobs="rollout")},
}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_policy_and_teacher_are_compared_at_temperature_1_and_of_the_whole_vocabulary(
    options: dict[str, Any], make_model: Make, make_batch: Make
) -> None:
    batch, model = make_batch(), make_model()
    teacher, table = other(model), TokenTable()
    gap, kl = compared(model, teacher, batch)
    report = make_learner(model, teacher, minibatch_size=4, update={"update_epochs": 2}, **options).update(batch, table)
    columns = table.columns()
    np.testing.assert_allclose(columns["teacher_log_ratio"], gap, atol=1e-4)
    has_baseline = "distillation" in options
    if has_baseline:
        np.testing.assert_allclose(columns["teacher_kl"], kl, atol=1e-4)
    else:
        assert np.isnan(columns["teacher_kl"]).all()
    advantage = gap + kl if has_baseline else gap
    assert report.metrics["distillation/advantage"] == pytest.approx(advantage.mean(), abs=1e-4)
    divergence = kl if has_baseline else np.exp(gap) - 1 - gap
    assert report.metrics["distillation/kl"] == pytest.approx(divergence.mean(), rel=1e-4)
    parts = ("policy", "kl", "entropy", "distillation")
    total = sum(report.metrics[f"loss/{name}"] for name in parts)
    assert report.metrics["loss/total"] == pytest.approx(total, abs=1e-6)
    assert columns["share"].sum() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_a_teacher_that_is_the_policy_gives_0_to_the_bit_and_moves_nothing(
    options: dict[str, Any], make_model: Make, make_batch: Make
) -> None:
    batch, model, table = make_batch(), make_model(), TokenTable()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = make_learner(model, copy.deepcopy(model), **options).update(batch, table)
    assert not table.columns()["teacher_log_ratio"].any()
    assert report.metrics["distillation/advantage"] == report.metrics["distillation/kl"] == 0.0
    assert report.metrics["optim/grad_norm"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_first_step_is_that_of_the_reverse_kl_written_out(make_model: Make, make_batch: Make) -> None:
    """At ratio 1 the gradient is that of - coefficient * mean over the batch's tokens of A log p, whatever the
    aggregation of the reward's loss; a batch in micro-batches is the same."""
    batch = make_batch()
    model, by_hand = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    teacher = other(model)
    gap, _ = compared(model, teacher, batch)
    logits = by_hand(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    every = torch.log_softmax(logits[:, :-1][batch.action_mask[:, 1:]], -1)
    taken = every.gather(-1, batch.token_ids[batch.action_mask][:, None])[:, 0]
    (-0.25 * (torch.from_numpy(gap) * taken).mean()).backward()
    norm = float(sum(float((p.grad**2).sum()) for p in by_hand.parameters() if p.grad is not None) ** 0.5)
    learner = make_learner(
        model,
        teacher,
        loss={"aggregation": "turn-mean-token-mean"},
        distillation={"coefficient": 0.25},
        update={"max_tokens_per_microbatch": 40},
    )
    assert learner.update(batch).metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_beside_the_reward_both_terms_are_in_the_loss(make_model: Make, make_batch: Make) -> None:
    batch, model = make_batch(), make_model()
    teacher = other(model)
    alone = make_learner(copy.deepcopy(model), teacher).update(batch).metrics
    beside = make_learner(model, teacher, distillation={"reward": True}).update(batch).metrics
    assert alone["loss/policy"] == 0.0
    assert alone["clip/low_fraction"] == alone["clip/high_fraction"] == 0.0
    assert beside["loss/policy"] != 0.0
    assert beside["loss/distillation"] == pytest.approx(alone["loss/distillation"], abs=1e-6)
    assert beside["advantage/std"] == alone["advantage/std"] > 0, "these are the batch's"


def test_episodes_that_all_earned_the_same_teach_and_masked_ones_do_not(make_model: Make, make_batch: Make) -> None:
    """The middle group of three has no advantage; its tokens are learned from all the same."""
    batch, model, table = make_batch(), make_model(), TokenTable()
    masked = batch.trajectory_index == 0
    batch = dataclasses.replace(batch, is_masked=masked)
    make_learner(model, other(model)).update(batch, table)
    is_masked = masked[:, None].expand_as(batch.action_mask)[batch.action_mask].numpy()
    assert (np.isnan(table.columns()["teacher_log_ratio"]) == is_masked).all()
    assert ((table.columns()["share"][0] == 0) == is_masked).all()


class Elsewhere:
    """A teacher that scores by a model here, of what was announced only."""

    def __init__(self, model: Any) -> None:
        self._computer, self.prepared = LogprobComputer(model), list[TokenBatch]()

    def prepare(self, batches: Sequence[TokenBatch]) -> None:
        self.prepared += batches

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        assert any(batch is prepared for prepared in self.prepared)
        return self._computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs


@pytest.mark.parametrize("options", [o for o in SAMPLED.values() if "distillation" not in o])
def test_a_teacher_elsewhere_teaches_as_the_same_model_here(
    options: dict[str, Any], make_model: Make, make_batch: Make
) -> None:
    batch, model = make_batch(), make_model()
    teacher, by_endpoint, tables = other(model), copy.deepcopy(model), (TokenTable(), TokenTable())
    update = {"update_epochs": 2, "max_tokens_per_microbatch": 40}
    elsewhere = Elsewhere(teacher)
    for student, teaches, table in zip((model, by_endpoint), (teacher, elsewhere), tables, strict=True):
        learner = make_learner(student, teaches, minibatch_size=4, update=update, **options)
        learner.update(batch, table)
    # All of an update is announced at once, and each row once.
    assert sum(len(prepared.token_ids) for prepared in elsewhere.prepared) == len(batch.token_ids)
    here, there = (table.columns()["teacher_log_ratio"] for table in tables)
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-5)  # float32, where `compare` shares a pass or not
    for name, parameter in model.named_parameters():
        # AdamW's steps are of about the learning rate, 1e-3, and where a gradient is near 0, of either sign.
        gap = (parameter - dict(by_endpoint.named_parameters())[name]).detach().abs()
        assert gap.median() < 1e-6


def test_a_teacher_elsewhere_has_no_baseline(make_model: Make) -> None:
    with pytest.raises(ConfigError, match=r"distillation: a sum over the vocabulary needs a teacher in this"):
        make_learner(make_model(), Elsewhere(make_model()), distillation={"baseline": True})


def test_a_teacher_and_its_settings_come_together(make_model: Make) -> None:
    with pytest.raises(ConfigError, match="expected a teacher to learn from"):
        make_learner(make_model(), None)


def test_a_teacher_of_an_adapter_with_dropout_is_compared_without_it(make_model: Make, make_batch: Make) -> None:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.3)
    model, batch, table = peft.get_peft_model(make_model(), config), make_batch(), TokenTable()
    make_learner(model, copy.deepcopy(model), rewards=RewardSettings()).update(batch, table)
    assert not table.columns()["teacher_log_ratio"].any()


EXACT = ("reverse_kl", "forward_kl")


@pytest.mark.parametrize("divergence", EXACT)
@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_a_teacher_that_is_the_policy_has_no_divergence_to_the_bit(
    options: dict[str, Any], divergence: str, make_model: Make, make_batch: Make
) -> None:
    batch, model, table = make_batch(), make_model(), TokenTable()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = options | {"distillation": {"divergence": divergence}}
    report = make_learner(model, copy.deepcopy(model), update={"update_epochs": 2}, **options).update(batch, table)
    assert not table.columns()["teacher_divergence"].any()
    assert report.metrics["distillation/divergence"] == report.metrics["loss/distillation"] == 0.0
    assert report.metrics["optim/grad_norm"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def diverged(model: Any, teacher: Any, batch: TrainBatch, divergence: str) -> torch.Tensor:
    """[A] the divergence over the vocabulary, from the models' own forwards; differentiable."""
    with torch.no_grad():
        theirs = every_logprob(teacher, batch)
    own = every_logprob(model, batch)
    p, q = (own, theirs) if divergence == "reverse_kl" else (theirs, own)
    return (p.exp() * (p - q)).sum(-1)


def every_logprob(model: Any, batch: TrainBatch) -> torch.Tensor:
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    return torch.log_softmax(logits[:, :-1][batch.action_mask[:, 1:]].double(), -1)


@pytest.mark.parametrize("divergence", EXACT)
@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_every_pass_learns_from_the_divergence_of_the_policy_in_that_pass(
    options: dict[str, Any], divergence: str, make_model: Make, make_batch: Make
) -> None:
    """One pass of another learner moves another copy to where the second pass begins."""
    batch, model, table = make_batch(), make_model(), TokenTable()
    once, teacher = copy.deepcopy(model), other(model)
    options = options | {"distillation": {"divergence": divergence, "coefficient": 0.5}}
    expected = [diverged(once, teacher, batch, divergence).detach()]
    make_learner(once, teacher, **options).update(batch)
    expected.append(diverged(once, teacher, batch, divergence).detach())
    report = make_learner(model, teacher, update={"update_epochs": 2}, **options).update(batch, table)
    columns = table.columns()
    for number, values in enumerate(expected):
        np.testing.assert_allclose(columns["teacher_divergence"][number], values.numpy(), atol=1e-4)
    mean = float(torch.stack(expected).mean())
    assert float(expected[1].mean()) < float(expected[0].mean()), "it learns"
    assert report.metrics["distillation/divergence"] == pytest.approx(mean, abs=1e-5)
    assert report.metrics["loss/distillation"] == report.metrics["loss/total"] == pytest.approx(mean / 2, abs=1e-5)
    assert columns["share"].sum() == pytest.approx(mean / 2, abs=1e-5)
    assert np.isnan(columns["teacher_log_ratio"]).all()
    assert not {"distillation/advantage", "distillation/kl", "distillation/dropped_fraction"} & set(report.metrics)


@pytest.mark.parametrize("divergence", EXACT)
@pytest.mark.parametrize("tokens_of_logits", [1, 5, 10_000])
def test_the_gradient_is_that_of_the_mean_divergence_however_it_is_divided(
    tokens_of_logits: int, divergence: str, make_model: Make, make_batch: Make
) -> None:
    """By autograd over all logits at once; here in micro-batches, and so many tokens' logits at a time."""
    batch = make_batch()
    model, by_hand = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    teacher = other(model)
    (0.25 * diverged(by_hand, teacher, batch, divergence).mean()).backward()
    norm = float(sum(float((p.grad**2).sum()) for p in by_hand.parameters() if p.grad is not None) ** 0.5)
    learner = make_learner(
        model,
        teacher,
        loss={"aggregation": "turn-mean-token-mean"},
        distillation={"coefficient": 0.25, "divergence": divergence},
        update={"max_tokens_per_microbatch": 40},
        logits_bytes=tokens_of_logits * 8 * 8 * 61,
    )
    assert learner.update(batch).metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert all(p.grad is None for p in teacher.parameters())


def test_beside_the_reward_the_divergence_is_added_to_its_loss(make_model: Make, make_batch: Make) -> None:
    batch, model = make_batch(), make_model()
    teacher, choice = other(model), {"divergence": "forward_kl"}
    alone = make_learner(copy.deepcopy(model), teacher, distillation=choice).update(batch).metrics
    beside = make_learner(model, teacher, distillation=choice | {"reward": True}).update(batch).metrics
    assert alone["loss/policy"] == 0.0 != beside["loss/policy"]
    assert beside["loss/distillation"] == pytest.approx(alone["loss/distillation"], abs=1e-6)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_tokens_that_the_correction_leaves_out_are_left_out_of_the_divergence(
    mode: Any, make_model: Make, make_batch: Make
) -> None:
    """The engine's logprobs of the batch are invented, so that weights differ: each token's share is its weight's."""
    batch, model, table = make_batch(), make_model(), TokenTable()
    correction = CorrectionSettings(level="token", mode=mode, high=1.5, **({"low": 0.1} if mode == "mask" else {}))
    make_learner(model, other(model), distillation={"divergence": "reverse_kl"}, correction=correction).update(
        batch, table
    )
    columns = table.columns()
    weights = columns["correction"][0]
    assert len(np.unique(weights)) > 2
    assert ((weights == 0).any()) == (mode == "mask")
    expected = weights * columns["teacher_divergence"][0] / len(weights)
    np.testing.assert_allclose(columns["share"][0], expected, rtol=1e-5, atol=1e-9)


def test_a_baseline_of_an_exact_divergence_is_refused() -> None:
    with pytest.raises(ValueError, match=r'divergence = "forward_kl" has no such noise: remove this, or set that'):
        DistillationSettings(teacher="t", divergence="forward_kl", baseline=True)
