from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from safetensors.torch import load, save

from gspo_gym.errors import CheckpointError, ConfigError, NonFiniteError
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.health import METRICS
from gspo_gym.learning.settings import (
    AdvantageSettings,
    CorrectionSettings,
    DistillationSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.update import Learner
from gspo_gym.types import Sampling

LR = 1e-3


def make_learner(model, *, loss=None, update=None, **options):
    return Learner(
        model,
        optimizer=OptimizerSettings(**options.pop("optimizer", {})),
        loss=LossSettings(**(loss or {})),
        update=UpdateSettings(**({"learning_rate": LR} | (update or {}))),
        **options,
    )


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(actual, expected, *, atol):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def by_hand(model, batch, *, temperature=1.0, max_grad_norm=1.0):
    """One step of GSPO at its first pass, where s = 1, from full logits: minus the mean over all trajectories of the
    mean over their tokens of A log pi has the same gradient; then torch's plain AdamW."""
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits / temperature
    distribution = torch.log_softmax(logits, -1)
    terms = []
    for i in range(batch.num_trajectories):
        tokens = []
        for b in (batch.trajectory_index == i).nonzero().squeeze(1).tolist():
            for t in batch.action_mask[b].nonzero().squeeze(1).tolist():
                tokens.append(batch.advantages[b, t] * distribution[b, t - 1, batch.token_ids[b, t]])
        terms.append(torch.stack(tokens).mean())
    loss = -torch.stack(terms).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    adamw.step()
    return float(norm)


@pytest.mark.parametrize(("temperature", "max_grad_norm"), [(1.0, 1e9), (0.6, 1e-3)])
def test_one_step_equals_the_step_written_out_by_hand(make_model, make_batch, temperature, max_grad_norm):
    batch = make_batch()
    model, expected = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    norm = by_hand(expected, batch, temperature=temperature, max_grad_norm=max_grad_norm)
    learner = make_learner(
        model, sampling=Sampling(temperature=temperature), optimizer={"max_grad_norm": max_grad_norm}
    )
    report = learner.update(batch)
    # AdamW's first step is lr * g / (|g| + 1e-8): an error of 1e-12 in g, from float32 rotary tables and summation,
    # can move a weight by lr * 1e-4
    assert_same(parameters_of(model), parameters_of(expected), atol=1e-4 * LR)
    assert report.metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert report.num_steps == 1


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely(make_model, make_batch):
    batch, model = make_batch(), make_model()
    learner = make_learner(model)
    computer = learner._computer

    def score():
        with torch.no_grad():
            return computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs

    before = score()
    learner.update(batch)
    assert float(((score() - before) * batch.advantages).sum()) > 0


def test_scoring_first_or_at_the_only_pass_is_the_same(make_model, make_batch):
    """With one minibatch and one epoch the old logprobs are taken from the training pass itself. Scoring them in a pass
    of their own gives the same ratios, 1, and so the same weights, up to the rounding of s (6e-8 of each term)."""
    batch = make_batch()
    single, separate = make_model(), make_model()
    first = make_learner(single)
    second = make_learner(separate)
    plan = [second._label(minibatch) for minibatch in second._plan(batch)]
    second._plan = lambda batch: plan  # the labelled micro-batches are then used as they are
    report, other = first.update(batch), second.update(batch)
    assert other.metrics["ratio/noise_floor"] <= 1e-5  # logprobs of order 10 in float32
    assert report.metrics["ratio/noise_floor"] == 0.0
    assert report.metrics["loss/total"] == pytest.approx(other.metrics["loss/total"], abs=1e-5)
    # AdamW turns a relative error of a gradient into one of lr times it; tiny gradients have the larger ones
    assert_same(parameters_of(single), parameters_of(separate), atol=1e-2 * LR)


def test_the_minibatch_of_the_first_step_is_scored_by_its_own_pass(make_model, make_batch):
    """Four minibatches of three: three scoring passes and four of training, and the weights of scoring all four first,
    up to the rounding of s. With a second epoch all four are scored first, 4 + 2 * 4."""
    batch = make_batch()
    rows = []
    model, separate = make_model(), make_model()
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    first, second = make_learner(model, minibatch_size=3), make_learner(separate, minibatch_size=3)
    plan = [second._label(minibatch) for minibatch in second._plan(batch)]
    second._plan = lambda batch: plan  # labelled micro-batches, of which the first one's are used as they are
    rows.clear()  # of the probe
    report, other = first.update(batch), second.update(batch)
    assert len(rows) == 3 + 4
    assert report.num_steps == other.num_steps == 4
    assert report.metrics["loss/total"] == pytest.approx(other.metrics["loss/total"], abs=1e-5)
    # AdamW turns a relative error of a gradient into one of lr times it; tiny gradients have the larger ones
    assert_same(parameters_of(model), parameters_of(separate), atol=1e-2 * LR)
    again = make_learner(model, minibatch_size=3, update={"update_epochs": 2})
    rows.clear()
    again.update(make_batch())
    assert len(rows) == 4 + 2 * 4


def test_the_ratio_is_one_at_the_first_step_and_then_moves(make_model, make_batch):
    one = make_learner(make_model()).update(make_batch())
    assert (one.metrics["ratio/min"], one.metrics["ratio/max"], one.metrics["kl/old_k3"]) == (1.0, 1.0, 0.0)
    four = make_learner(make_model(), minibatch_size=3).update(make_batch())
    assert four.num_steps == 4
    assert four.metrics["ratio/max"] - four.metrics["ratio/min"] > 1e-4
    assert four.metrics["kl/old_k3"] > 0


def test_clips_bind_once_the_policy_has_moved(make_model, make_batch):
    report = make_learner(make_model(), update={"update_epochs": 4}).update(make_batch())
    clipped = report.metrics["clip/low_fraction"] + report.metrics["clip/high_fraction"]
    assert clipped > 0.1, "ranges of 3e-4 are left at the first step of this size"
    assert report.num_steps == 4
    assert report.metrics["batch/trained_tokens"] == 4 * int((make_batch().advantages != 0).sum())


def test_old_logprobs_stay_those_before_the_update(make_model, make_batch):
    """After steps that undo nothing, the ratio of the last epoch is measured from the start: a policy that walks on
    keeps leaving, while one compared with its last step would stay near 1."""
    wide = {"clip_low": 0.99, "clip_high": 1e3}
    k3 = [
        make_learner(make_model(), loss=wide, update={"update_epochs": epochs})
        .update(make_batch())
        .metrics["kl/old_k3"]
        for epochs in (2, 4, 8)
    ]
    assert k3[0] < k3[1] < k3[2]


@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
def test_trajectories_without_advantage_are_skipped_but_counted(make_model, make_batch, unit):
    """The constant group is a third of the batch: leaving it out changes no gradient, N stays 12."""
    batch = make_batch()
    model, expected = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    by_hand(expected, batch)
    rows = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    learner = make_learner(model, loss={"unit": unit}, update={"share_prefixes": False})  # which counts rows
    rows.clear()  # of the probe
    report = learner.update(batch)
    assert sum(rows) == int((batch.advantages != 0).any(1).sum()) < len(batch.token_ids)
    assert_same(parameters_of(model), parameters_of(expected), atol=1e-4 * LR)
    assert report.metrics["batch/zero_advantage_fraction"] == pytest.approx(1 / 3)
    assert report.metrics["batch/num_trajectories"] == 12


def test_a_batch_without_any_advantage_moves_nothing_not_even_by_momentum(
    make_model, make_batch, make_trajectory, make_group
):
    model = make_model()
    learner = make_learner(model, optimizer={"weight_decay": 0.1})
    learner.update(make_batch())
    before = parameters_of(model) | {name: t.clone() for name, t in learner.tensors().items()}
    constant = build_batch([make_group(make_trajectory([1.0]), make_trajectory([1.0], seed=1))], AdvantageSettings())
    report = learner.update(constant.batch)
    assert all(torch.equal(value, before[name]) for name, value in (parameters_of(model) | learner.tensors()).items())
    assert (report.num_steps, report.metrics["optim/num_empty_steps"]) == (0, 1)
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_a_non_finite_gradient_is_skipped_counted_and_then_fatal(make_model, make_batch, monkeypatch):
    monkeypatch.setattr("gspo_gym.learning.optimizer.MAX_NONFINITE_STEPS", 1)
    model = make_model()
    learner = make_learner(model)
    learner.update(make_batch())
    handle = model.model.norm.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    before = parameters_of(model) | {name: t.clone() for name, t in learner.tensors().items()}
    report = learner.update(make_batch(1))
    assert (report.num_steps, report.num_nonfinite_steps) == (0, 1)
    assert all(math.isfinite(value) for value in report.metrics.values()), "what was not done is not reported"
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        learner.update(make_batch(2))
    handle.remove()
    after = parameters_of(model) | learner.tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert learner.update(make_batch(3)).num_steps == 1


def test_the_error_of_a_non_finite_gradient_says_the_whole_loss(make_model, make_batch, monkeypatch):
    monkeypatch.setattr("gspo_gym.learning.optimizer.MAX_NONFINITE_STEPS", 0)
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is as likely: the entropy is ln 61
    model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))

    class OneNatAbove:
        """A reference that gives each sampled token a logprob of 1 - ln 61."""

        def logprobs(self, batch):
            return batch.action_mask * (1 - math.log(61))

    learner = make_learner(
        model,
        loss={"entropy_coef": 0.5, "kl_coef": 0.25, "kl_estimator": "k3"},
        reference_policy=OneNatAbove(),
    )
    with pytest.raises(NonFiniteError) as error:
        learner.update(make_batch())
    loss = float(re.search(r"loss (\S+),", str(error.value))[1])
    # Advantages of a group add up to 0; k3 of one nat is e - 1 - 1.
    assert loss == pytest.approx(0.25 * (math.e - 2) - 0.5 * math.log(61), abs=1e-5)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_restarted_learner_is_bitwise_the_uninterrupted_one(make_model, make_batch, kl_coef):
    options = {
        "loss": {"kl_coef": kl_coef},
        "minibatch_size": 4,
        "update": {"update_epochs": 2},
        "optimizer": {"schedule": "cosine", "warmup_steps": 3},
        "total_steps": 24,
        "seed": 5,
    }
    whole, first, second = make_model(), make_model(), make_model()
    uninterrupted, interrupted = make_learner(whole, **options), make_learner(first, **options)
    for k in range(2):
        uninterrupted.update(make_batch(k))
        interrupted.update(make_batch(k))
    written, counters = save(interrupted.tensors()), dict(interrupted.counters())
    second.load_state_dict(first.state_dict())
    restarted = make_learner(second, **options)
    restarted.restore(load(written), counters)
    reports = [learner.update(make_batch(2)) for learner in (uninterrupted, restarted)]
    assert_same(parameters_of(second), parameters_of(whole), atol=0)
    metrics = [{k: v for k, v in report.metrics.items() if not k.startswith("time/")} for report in reports]
    assert metrics[0] == metrics[1]


def test_a_state_without_the_reference_it_needs_is_refused(make_model, make_batch):
    plain, with_reference = make_learner(make_model()), make_learner(make_model(), loss={"kl_coef": 0.1})
    with pytest.raises(CheckpointError, match="was a kl_coef"):
        with_reference.restore(plain.tensors(), plain.counters())
    with pytest.raises(CheckpointError, match="was a kl_coef"):
        plain.restore(with_reference.tensors(), with_reference.counters())
    with pytest.raises(CheckpointError, match="num_updates"):
        plain.restore({}, {})


def test_the_steps_of_another_learner_are_taken_only_if_asked_for(make_model, make_batch):
    other = make_learner(make_model(), minibatch_size=4)  # of 12 trajectories: three steps an update
    other.update(make_batch())
    other.update(make_batch(1))
    told = other.tensors(), other.counters()
    for with_step, state, expected in [(True, told, (2, 6)), (False, told, (0, 0)), (True, ({}, {}), (0, 0))]:
        learner = make_learner(make_model())
        learner.restore_parts(*state, with_optimizer=False, with_step=with_step)
        counters = learner.counters()
        assert (counters["learner.num_updates"], counters["optimizer.num_attempts"]) == expected
        assert learner.tensors() == {}, "its moments were not asked for"


def test_the_reference_of_a_full_model_is_the_model_as_it_was(make_model, make_batch):
    start = parameters_of(make_model())
    model = make_model()
    learner = make_learner(model, loss={"kl_coef": 0.1}, minibatch_size=3)
    first, later = (learner.update(make_batch(k)).metrics for k in range(2))
    held = {name.removeprefix("reference."): t for name, t in learner.tensors().items() if "reference." in name}
    assert_same(held, start, atol=0)
    assert any(not torch.equal(p, start[name]) for name, p in model.named_parameters())
    assert 0 < first["kl/ref_k3"] < later["kl/ref_k3"]


def test_the_kl_term_alone_leads_to_the_reference(make_model, make_batch):
    """Without advantages the loss is the KL term, whose least value is where the policy is the reference."""
    batch = make_batch()
    silent = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    loss = {"kl_coef": 1.0, "kl_clamp": 1e6}  # a token beyond the clamp has no gradient
    learner = make_learner(make_model(), loss=loss, reference_model=make_model(initializer_range=0.2))
    reports = [learner.update(silent) for _ in range(30)]
    assert reports[-1].metrics["kl/ref_k3"] < 0.25 * reports[0].metrics["kl/ref_k3"]
    assert reports[0].metrics["loss/policy"] == 0.0
    assert reports[0].metrics["loss/total"] == reports[0].metrics["loss/kl"] > 0


def test_a_reference_of_ones_own_is_used_and_left_alone(make_model, make_batch):
    model, reference = make_model(), make_model(initializer_range=0.2)
    before = parameters_of(reference)
    learner = make_learner(model, loss={"kl_coef": 0.1}, reference_model=reference)
    batch = make_batch()
    report = learner.update(batch)
    assert not any(name.startswith("reference.") for name in learner.tensors())
    assert_same(parameters_of(reference), before, atol=0)
    # the first pass measures the distance between the two fresh models, over all tokens, constant groups included
    fresh = make_model()
    gap = []
    for policy in (fresh, reference):
        logits = policy(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
        logprobs = torch.log_softmax(logits, -1)[:, :-1].gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
        gap.append(logprobs[batch.action_mask[:, 1:]])
    assert report.metrics["kl/ref_k1"] == pytest.approx((gap[0] - gap[1]).mean().item(), abs=1e-4)


@pytest.fixture
def make_lora(make_model):
    import peft

    def make():
        base = make_model()
        torch.manual_seed(1)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.3))

    return make


@pytest.mark.parametrize("minibatch_size", [None, 3])
def test_the_reference_named_base_is_the_model_without_its_adapter(make_lora, make_batch, minibatch_size):
    model = make_lora()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    settings = {"loss": {"kl_coef": 0.01}, "minibatch_size": minibatch_size}
    settings["reference"] = ReferenceSettings(source="base")
    learner = make_learner(model, update={"learning_rate": 0.02}, **settings)
    first, later = (learner.update(make_batch(k)).metrics for k in range(2))
    if minibatch_size is None:
        # a fresh adapter is zero, so both policies are the same (up to rounding) at the only pass of the first update
        assert first["kl/ref_k3"] == pytest.approx(0.0, abs=1e-9)
    assert later["kl/ref_k3"] > 1e-6
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in frozen.items())
    assert {name.split(".", 2)[2] for name in learner.tensors()} == trained


def test_an_adapter_drops_out_by_the_learners_seed_alone(make_lora, make_batch):
    """Masks come from the learner's seed, not from the global generator, which is left as it was."""

    def train(seed, global_seed):
        model = make_lora()
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        make_learner(model, seed=seed, update={"learning_rate": 0.02, "update_epochs": 2}).update(make_batch())
        assert torch.equal(torch.get_rng_state(), before)
        return parameters_of(model)

    first, again, other = train(1, 10), train(1, 20), train(2, 10)
    assert_same(again, first, atol=0)
    assert any(not torch.equal(other[name], value) for name, value in first.items())


# What an update reports only if a setting, or the model, has something to say.
ON_REQUEST = {
    "advantage/clipped_fraction", "shaping/kl", "shaping/kl_coef", "correction/truncated_fraction",
    "correction/masked_fraction", "correction/off_policy_fraction", "kl/ref_k1", "kl/ref_k3",
    "router/load_max_over_mean", "router/idle_fraction", "router/entropy",
    "loss/distillation", "distillation/advantage", "distillation/kl", "distillation/dropped_fraction",
    "distillation/taught_fraction", "distillation/agreement", "distillation/divergence",
}  # fmt: skip


def test_metrics_are_named_explained_and_finite(make_model, make_batch):
    plain = make_learner(make_model(), minibatch_size=4).update(make_batch()).metrics
    of_ranks = {"memory/rank_mib"}
    assert set(plain) == set(METRICS) - ON_REQUEST - of_ranks
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    full = make_learner(
        make_model("qwen3_moe", **experts),
        loss={"kl_coef": 0.1, "entropy_coef": 0.01},
        minibatch_size=4,
        advantages=AdvantageSettings(clip=1.0),
        rewards=RewardSettings(kl_coef=0.1),
        correction=CorrectionSettings(level="token"),
        distillation=DistillationSettings(teacher="t"),
        teacher=make_model("qwen3_moe", **experts),
    )
    metrics = full.update(make_batch()).metrics
    of_feedback = {"distillation/taught_fraction", "distillation/agreement"}
    exact = {"distillation/divergence"}  # in place of those of the sampled token
    assert set(metrics) == set(METRICS) - of_ranks - of_feedback - exact
    assert all(math.isfinite(value) for value in (plain | metrics).values())


def test_metrics_by_hand(make_model, make_batch):
    batch = make_batch()
    ticks = iter([0.0, 2.0, 7.0])
    report = make_learner(make_model(), clock=lambda: next(ticks)).update(batch)
    metrics, advantages = report.metrics, batch.advantages[batch.action_mask].double()
    assert metrics["batch/num_actions"] == int(batch.action_mask.sum())
    assert metrics["batch/trained_tokens"] == int((batch.advantages != 0).sum())
    assert metrics["advantage/mean"] == pytest.approx((advantages.sum() / len(advantages)).item())
    assert metrics["advantage/std"] == pytest.approx(((advantages - advantages.mean()) ** 2).mean().sqrt().item())
    assert (metrics["time/score_seconds"], metrics["time/train_seconds"]) == (2.0, 5.0)
    assert metrics["optim/learning_rate"] == LR
    # at s = 1 the loss is minus the mean over trajectories of their advantage
    of_trajectory = {int(i): float(a[m][0]) for i, a, m in zip(
        batch.trajectory_index, batch.advantages, batch.action_mask, strict=True)}  # fmt: skip
    assert metrics["loss/total"] == pytest.approx(-sum(of_trajectory.values()) / 12, abs=1e-6)


def test_the_engines_logprobs_are_compared_with_the_learners(make_model, make_batch):
    batch, model = make_batch(), make_model()
    learner = make_learner(model)
    with torch.no_grad():
        own = learner._computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
    selected = batch.advantages != 0
    gap = (batch.rollout_logprobs - own)[selected].double()
    metrics = learner.update(batch).metrics
    # float32 logprobs of order 10
    assert metrics["kl/rollout_k1"] == pytest.approx(gap.mean().item(), abs=1e-5)
    assert metrics["kl/rollout_max_gap"] == pytest.approx(gap.abs().max().item(), abs=1e-5)
    clamped = (torch.exp(-gap) - 1 + gap).clamp(max=10)
    assert metrics["kl/rollout_k3"] == pytest.approx(clamped.mean().item(), rel=1e-4)


def test_entropy_is_that_of_the_sampling_distribution(make_model, make_batch):
    """A model whose head is zero samples uniformly: ln 61 nats at every token."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert make_learner(model).update(make_batch()).metrics["policy/entropy"] == pytest.approx(math.log(61), abs=1e-5)


def test_the_division_into_minibatches_is_drawn_from_the_seed(make_model, make_batch):
    def weights(seed):
        model = make_model()
        make_learner(model, minibatch_size=3, seed=seed).update(make_batch())
        return parameters_of(model)

    first, again, other = weights(1), weights(1), weights(2)
    assert_same(again, first, atol=0)
    assert any(not torch.equal(other[name], value) for name, value in first.items())


def test_wrong_settings_are_refused_when_built(make_model):
    with pytest.raises(ConfigError, match="total_steps"):
        make_learner(make_model(), optimizer={"schedule": "cosine"})
    with pytest.raises(ConfigError, match="temperature"):
        make_learner(make_model(), sampling=Sampling(temperature=0.0))


def test_gradients_left_by_another_take_no_part(make_model, make_batch):
    clean, dirty = make_model(), make_model()
    for parameter in dirty.parameters():
        parameter.grad = torch.ones_like(parameter)
    for model in (clean, dirty):
        make_learner(model).update(make_batch())
    assert_same(parameters_of(dirty), parameters_of(clean), atol=0)


def test_every_update_divides_its_batch_anew(make_model, make_batch):
    learner, batch = make_learner(make_model(), minibatch_size=4), make_batch()

    def division():
        return [sorted(part.batch.token_ids.sum(1).tolist()) for m in learner._plan(batch) for part in m.parts]

    before = division()
    assert division() == before, "drawn from the seed and the number of the update alone"
    learner.update(batch)
    assert learner.counters()["learner.num_updates"] == 1
    assert division() != before


def test_a_learner_of_rescored_samples_compares_nothing_with_the_samplers_logprobs(make_model, make_batch):
    metrics = make_learner(make_model(), rescores=True).update(make_batch()).metrics
    assert "loss/policy" in metrics
    assert not [name for name in metrics if name.startswith(("kl/rollout", "ratio/noise_sigma"))]
