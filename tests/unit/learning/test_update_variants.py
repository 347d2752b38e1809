"""What an update does with the settings around the loss: shaping, correction, references, masks, truncation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load, save

from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import (
    AdvantageSettings,
    CorrectionSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.update import Learner
from gspo_gym.types import Sampling

LR = 1e-3


def make_learner(model, *, loss=None, update=None, learning_rate=LR, **options):
    return Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(**(loss or {})),
        update=UpdateSettings(learning_rate=learning_rate, **(update or {})),
        **options,
    )


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(actual, expected, *, atol):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=name)


def step_by_hand(model, batch, weights):
    """One AdamW step on minus the sum of weight times logprob over sampled tokens: the policy gradient at s = 1."""
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    logprobs = torch.log_softmax(logits, -1)[:, :-1].gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    (-(logprobs * weights[:, 1:]).sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()


def share_of_episode(batch):
    """[B, T] 1 / (N * tokens of the trajectory) at sampled tokens, counted by hand."""
    shares = torch.zeros(batch.action_mask.shape, dtype=torch.float64)
    for i in range(batch.num_trajectories):
        rows = batch.trajectory_index == i
        shares[rows] = 1 / (batch.num_trajectories * int(batch.action_mask[rows].sum()))
    return shares * batch.action_mask


def equals_step_by_hand(make_model, batch, weights, **options):
    model, expected = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    step_by_hand(expected, batch, weights)
    report = make_learner(model, **options).update(batch)
    # AdamW's first step is lr * g / (|g| + 1e-8): float32 rotary tables and summation move a weight by lr * 1e-4
    assert_same(parameters_of(model), parameters_of(expected), atol=1e-4 * LR)
    return report.metrics


def test_masked_episodes_have_no_gradient_and_count_in_the_mean(make_model, make_batch):
    batch = make_batch()
    batch.is_masked[torch.isin(batch.trajectory_index, torch.tensor([0, 2, 9]))] = True
    weights = share_of_episode(batch) * batch.advantages * ~batch.is_masked[:, None]
    metrics = equals_step_by_hand(make_model, batch, weights)
    assert metrics["batch/masked_fraction"] == 3 / 12


def test_masked_episodes_have_neither_kl_nor_entropy(make_model, make_batch):
    batch = make_batch()
    model = make_model()
    reference = make_model(initializer_range=0.2)
    loss = {"kl_coef": 1.0, "entropy_coef": 1.0}
    everything = dataclasses.replace(batch, is_masked=torch.ones_like(batch.is_masked))
    before = parameters_of(model)
    metrics = make_learner(model, loss=loss, reference_model=reference).update(everything).metrics
    assert metrics["optim/num_empty_steps"] == 1
    assert_same(parameters_of(model), before, atol=0)


@pytest.mark.parametrize("minibatch_size", [None, 5])
def test_whitening_reaches_episodes_without_an_advantage_and_the_whole_batch(make_model, make_batch, minibatch_size):
    """Over tokens, baseline none: the advantages are the returns, and the constant group gets an advantage, too."""
    batch = make_batch()
    every = batch.advantages[batch.action_mask].double()
    whitened = (batch.advantages.double() - every.mean()) / (every.var() + 1e-8).sqrt()
    weights = share_of_episode(batch) * whitened
    options = {"advantages": AdvantageSettings(whiten="tokens"), "minibatch_size": minibatch_size}
    if minibatch_size is None:
        metrics = equals_step_by_hand(make_model, batch, weights, **options)
    else:
        metrics = make_learner(make_model(), **options).update(batch).metrics
    assert metrics["batch/trained_tokens"] == batch.num_actions
    assert metrics["batch/zero_advantage_fraction"] == pytest.approx(1 / 3), "as the batch came"


def test_a_clip_alone_gives_nobody_an_advantage(make_model, make_batch):
    batch = make_batch()
    weights = share_of_episode(batch) * batch.advantages.clamp(-0.5, 0.5)
    metrics = equals_step_by_hand(make_model, batch, weights, advantages=AdvantageSettings(clip=0.5))
    assert metrics["batch/trained_tokens"] == int((batch.advantages != 0).sum())


def test_constant_advantages_are_whitened_to_nothing_and_take_no_step(make_model, make_batch):
    batch = make_batch()
    constant = dataclasses.replace(batch, advantages=torch.where(batch.action_mask, 0.3, 0.0))
    model = make_model()
    before = parameters_of(model)
    learner = make_learner(model, advantages=AdvantageSettings(whiten="trajectories"))
    assert learner.update(constant).metrics["optim/num_empty_steps"] == 1
    assert_same(parameters_of(model), before, atol=0)


def test_kl_in_the_reward_leads_to_the_reference(make_model, make_batch):
    batch = make_batch()
    silent = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    learner = make_learner(
        make_model(),
        rewards=RewardSettings(kl_coef=1.0),
        loss={"clip_low": 0.99, "clip_high": 1e3},
        reference_model=make_model(initializer_range=0.2),
    )
    first = parameters_of(learner._model)
    reports = [learner.update(silent) for _ in range(20)]
    assert any(not torch.equal(p, first[name]) for name, p in learner._model.named_parameters())
    # tokens less likely than under the reference (these are, on the whole) become likelier, and the other way round
    assert reports[0].metrics["shaping/kl"] < -1
    assert abs(reports[-1].metrics["shaping/kl"]) < 0.5
    assert reports[0].metrics["loss/kl"] == 0.0


def test_an_entropy_bonus_raises_the_entropy(make_model, make_batch):
    batch = make_batch()
    silent = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    learner = make_learner(make_model(), loss={"entropy_coef": 1.0})
    reports = [learner.update(silent).metrics for _ in range(10)]
    assert reports[-1]["policy/entropy"] > reports[0]["policy/entropy"] + 0.1
    assert reports[0]["loss/total"] == reports[0]["loss/entropy"]
    # the mean over trajectories of means over tokens is not the mean over tokens, but of the same size
    assert -reports[0]["loss/entropy"] == pytest.approx(reports[0]["policy/entropy"], rel=0.2)


@pytest.mark.parametrize("minibatch_size", [None, 5])
def test_the_engines_logprobs_may_stand_for_the_old_ones(make_model, make_batch, minibatch_size):
    batch, model = make_batch(), make_model()
    learner = make_learner(
        model,
        learning_rate=1e-30,
        correction=CorrectionSettings(old_logprobs="rollout"),
        loss={"clip_low": 0.99, "clip_high": 1e9},
        minibatch_size=minibatch_size,
        advantages=AdvantageSettings(whiten="tokens"),
    )
    with torch.no_grad():
        own = learner._computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
    metrics = learner.update(batch).metrics
    gap = (own - batch.rollout_logprobs).double()
    ratios = []
    for i in range(12):
        rows = batch.trajectory_index == i
        ratios.append(math.exp(gap[rows][batch.action_mask[rows]].mean().item()))
    assert metrics["ratio/min"] == pytest.approx(min(ratios), rel=1e-4)
    assert metrics["ratio/max"] == pytest.approx(max(ratios), rel=1e-4)
    assert metrics["ratio/noise_sigma"] > 0.1, "the gap is known from the first step, before any was taken"
    if minibatch_size is None:
        assert metrics["kl/rollout_k1"] == pytest.approx(-gap[batch.action_mask].mean().item(), rel=1e-4)


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_the_gap_to_the_engine_is_that_before_the_weights_moved(make_model, make_batch, old_logprobs):
    """An engine with the learner's own logprobs: whatever six steps make of the policy, there is no gap."""
    batch = make_batch()
    learner = make_learner(
        make_model(),
        learning_rate=0.01,
        minibatch_size=5,
        update={"update_epochs": 2},
        correction=CorrectionSettings(old_logprobs=old_logprobs),
    )
    with torch.no_grad():
        own = learner._computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
    batch = dataclasses.replace(batch, rollout_logprobs=own)
    metrics = learner.update(batch).metrics
    assert metrics["kl/rollout_max_gap"] <= 1e-4 < 1e-2 < metrics["kl/old_k3"], "logprobs of order 10 in float32"


def test_a_correction_weighs_the_policy_term(make_model, make_batch):
    """w = 2 everywhere: the engine found every token half as likely."""
    batch = make_batch()
    with torch.no_grad():
        computer = make_learner(make_model())._computer
        own = computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
    batch = dataclasses.replace(
        batch,
        rollout_logprobs=torch.where(batch.action_mask, own - math.log(2), 0.0),
        advantages=batch.advantages.clamp(min=0),  # so that the loss is not 0, as a group's is at a ratio of 1
    )

    def policy_loss(**correction):
        learner = make_learner(make_model(), correction=CorrectionSettings(**correction))
        return learner.update(batch).metrics

    plain = policy_loss()
    doubled = policy_loss(level="trajectory", high=5.0)
    assert doubled["loss/policy"] == pytest.approx(2 * plain["loss/policy"], rel=1e-4)
    cut = policy_loss(level="token", high=1.5)
    assert cut["loss/policy"] == pytest.approx(1.5 * plain["loss/policy"], rel=1e-4)
    assert cut["correction/truncated_fraction"] == 1.0
    left_out = policy_loss(level="turn", mode="mask", high=1.5)
    assert (left_out["loss/policy"], left_out["correction/masked_fraction"]) == (0.0, 1.0)
    assert plain["correction/effective_sample_fraction"] == pytest.approx(1.0)


def test_a_mean_over_the_batchs_tokens_adds_up_over_its_minibatches(make_model, make_batch):
    """dapo: with weights that do not move, the sum of four steps' losses is that of one step on everything."""
    still = {"learning_rate": 1e-30, "loss": {"aggregation": "dapo"}}
    whole = make_learner(make_model(), **still).update(make_batch()).metrics
    parts = make_learner(make_model(), **still, minibatch_size=3).update(make_batch()).metrics
    assert parts["loss/total"] * 4 == pytest.approx(whole["loss/total"], rel=1e-4)


def test_a_ratio_that_never_moved_is_reported(make_model, make_batch):
    one = make_learner(make_model()).update(make_batch()).metrics
    assert (one["ratio/is_constant"], one["ratio/log_std"]) == (1.0, 0.0)
    four = make_learner(make_model(), minibatch_size=3).update(make_batch()).metrics
    assert four["ratio/is_constant"] == 0.0
    assert four["ratio/log_std"] > 1e-4


@pytest.fixture
def make_lora(make_model):
    import peft

    def make():
        """An adapter that does something, as if trained before, so that its dropout does, too."""
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.3, init_lora_weights=False)
        return peft.get_peft_model(make_model(), config)

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"reference": ReferenceSettings(source="adapter", update_every_n_iters=2), "loss": {"kl_coef": 0.1}},
        {"reference": ReferenceSettings(source="copy"), "advantages": AdvantageSettings(kl_shaping_coef=0.1)},
        {"rewards": RewardSettings(kl_coef=0.1, kl_target=0.01)},
    ],
)
def test_a_restarted_learner_goes_on_bit_for_bit(make_lora, make_batch, options):
    options = {"minibatch_size": 4, "update": {"update_epochs": 2}, "learning_rate": 0.01, "seed": 5} | options
    whole, first, second = make_lora(), make_lora(), make_lora()
    uninterrupted, interrupted = make_learner(whole, **options), make_learner(first, **options)
    for k in range(3):
        uninterrupted.update(make_batch(k))
        interrupted.update(make_batch(k))
    written, counters = save(interrupted.tensors()), dict(interrupted.counters())
    second.load_state_dict(first.state_dict())
    restarted = make_learner(second, **options)
    restarted.restore(load(written), counters)
    reports = [learner.update(make_batch(3)) for learner in (uninterrupted, restarted)]
    assert_same(parameters_of(second), parameters_of(whole), atol=0)
    metrics = [{k: v for k, v in report.metrics.items() if not k.startswith("time/")} for report in reports]
    assert metrics[0] == metrics[1]
    assert restarted.counters() == uninterrupted.counters()


def test_the_reference_is_refreshed_every_so_many_updates(make_model, make_batch):
    learner = make_learner(make_model(), loss={"kl_coef": 1e-6}, reference=ReferenceSettings(update_every_n_iters=2))
    kl = [learner.update(make_batch()).metrics["kl/ref_k3"] for _ in range(4)]
    assert kl[0] < 1e-9 < kl[1], "one step away"
    assert kl[2] < 1e-9 < kl[3], "refreshed after the second update"


def test_the_ratio_of_an_adapter_that_drops_out_is_one_until_its_weights_move(make_lora, make_batch):
    """Exactly, where the old logprobs are those of the only pass; to the rounding of logprobs of order 10, where they
    were scored before, without gradients. The masks of one trajectory alone move s by percents."""
    metrics = make_learner(make_lora()).update(make_batch()).metrics
    assert (metrics["ratio/min"], metrics["ratio/max"], metrics["ratio/noise_floor"]) == (1.0, 1.0, 0.0)
    still = make_learner(make_lora(), learning_rate=1e-30, minibatch_size=5, update={"update_epochs": 2})
    metrics = still.update(make_batch()).metrics
    assert metrics["ratio/noise_floor"] <= 1e-5
    assert max(metrics["ratio/max"] - 1, 1 - metrics["ratio/min"]) <= 1e-5


def test_logprobs_are_of_the_truncation_that_the_learner_is_given(make_model, make_batch):
    whole = make_learner(make_model()).update(make_batch()).metrics
    truncated = make_learner(make_model(), sampling=Sampling(top_k=5))
    # of six tokens at most: the five likeliest and the sampled one
    assert truncated.update(make_batch()).metrics["policy/entropy"] <= math.log(6) < whole["policy/entropy"]


def test_a_reference_that_nothing_compares_with_is_refused(make_model):
    with pytest.raises(ConfigError, match="nothing compares with it"):
        make_learner(make_model(), reference=ReferenceSettings(source="copy"))
    with pytest.raises(ConfigError, match="nothing compares with it"):
        make_learner(make_model(), reference_model=make_model())
