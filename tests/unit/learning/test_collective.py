"""Ranks of one learner, as threads: they plan alike, share the micro-batches, and find what one process does."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from gspo_gym.errors import ConfigError, NonFiniteError
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
from tests.support.thread_ranks import largest_difference, on_threads, weights_of

CASES = {
    "one step": {},
    "epochs, minibatches and a reference": {
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
        "reference": ReferenceSettings(update_every_n_iters=2),
        "update": {"update_epochs": 2, "max_tokens_per_microbatch": 40},
        "minibatch_size": 7,
    },
    "the engine's logprobs in place of old ones": {
        "correction": CorrectionSettings(old_logprobs="rollout"),
        "minibatch_size": 7,
    },
    "shaped by a reference": {
        "rewards": RewardSettings(kl_coef=0.05),
        "advantages": AdvantageSettings(whiten="tokens"),
        "reference": ReferenceSettings(),
        "update": {"max_tokens_per_microbatch": 60},
    },
}


def make_learner(model, case, collective=None):
    options = dict(case)
    return Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(**options.pop("loss", {})),
        update=UpdateSettings(**{"learning_rate": 1e-3} | options.pop("update", {})),
        collective=collective,
        **options,
    )


def without_seconds(report):
    return {name: value for name, value in report.metrics.items() if not name.startswith("time/")}


def updates(learner, make_batch, n=2):
    return [without_seconds(learner.update(make_batch(seed))) for seed in range(n)]


@pytest.mark.parametrize(
    ("name", "world_size"), [*zip(CASES, (5, 2, 2, 3), strict=True), ("epochs, minibatches and a reference", 3)]
)
def test_ranks_learn_and_report_what_one_process_does(make_model, make_batch, name, world_size):
    case = CASES[name]
    alone = make_model(dtype=torch.float64)
    expected = updates(make_learner(alone, case), make_batch)

    def rank(collective):
        model = copy.deepcopy(pristine)
        learner = make_learner(model, case, collective)
        collective.sums_gradients_of(model)
        return updates(learner, make_batch), weights_of(model)

    pristine = make_model(dtype=torch.float64)
    (reports, weights), *others = on_threads(world_size, rank)
    assert all(each == reports and largest_difference(own, weights) == 0.0 for each, own in others)
    # as in test_update: rotary tables and summation
    assert largest_difference(weights, weights_of(alone)) < 1e-7
    for found, wanted in zip(reports, expected, strict=True):
        del found["batch/padding_fraction"], wanted["batch/padding_fraction"]  # of other micro-batches
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(make_model, make_batch):
    case = {"update": {"max_nonfinite_steps": 1, "max_tokens_per_microbatch": 40}}

    def rank(collective):
        model = copy.deepcopy(pristine)
        learner = make_learner(model, case, collective)
        if collective.rank == 1:
            model.model.norm.register_forward_hook(lambda module, inputs, output: output * math.nan)
        before = weights_of(model)
        report = learner.update(make_batch())
        with pytest.raises(NonFiniteError) as error:
            learner.update(make_batch(1))
        return report.num_nonfinite_steps, largest_difference(weights_of(model), before), str(error.value)

    pristine = make_model()
    first, second = on_threads(2, rank)
    assert first[:2] == second[:2] == (1, 0.0)
    assert "loss nan" in first[2], "each knows the losses of all"
    assert "loss nan" in second[2]


def test_ranks_count_each_token_at_a_router_once(make_model, make_batch):
    case = {"update": {"max_tokens_per_microbatch": 40, "update_epochs": 2}}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    expected = updates(make_learner(make_model("qwen3_moe", **mixture), case), make_batch, 1)[0]

    def rank(collective):
        model = copy.deepcopy(pristine)
        learner = make_learner(model, case, collective)
        collective.sums_gradients_of(model)
        return updates(learner, make_batch, 1)[0]

    pristine = make_model("qwen3_moe", **mixture)
    names = [name for name in expected if name.startswith("router/")]
    assert len(names) == 3
    for found in on_threads(3, rank):
        assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-5)


def test_a_batch_that_fills_one_micro_batch_is_shared_out(make_model, make_batch):
    def rank(collective):
        learner = make_learner(models[collective.rank], {}, collective)
        (minibatch,) = learner._plan(make_batch())
        return [part.batch.num_trajectories for part in minibatch.parts]

    models = [make_model(), make_model()]
    first, second = on_threads(2, rank)
    assert first == second
    assert len(first) == 2
    assert sum(first) == 8, "those of the constant group have no gradient"
    assert max(first) <= 5


def test_an_optimizer_that_does_not_know_parts_is_refused(make_model):
    rank = SimpleNamespace(rank=0, world_size=2, is_shared_out=True)
    with pytest.raises(ConfigError, match=r"optimizer.kind: 'adamw_8bit' cannot hold parts"):
        Learner(
            make_model(),
            optimizer=OptimizerSettings(kind="adamw_8bit"),
            loss=LossSettings(),
            update=UpdateSettings(learning_rate=1e-3),
            collective=rank,
        )
