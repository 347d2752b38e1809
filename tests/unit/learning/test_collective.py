"""Ranks of one learner, as threads: they plan alike, share the micro-batches, and find what one process does."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gspo_gym.errors import ConfigError, NonFiniteError
from gspo_gym.learning.collective import gather, own_of
from gspo_gym.learning.settings import (
    AdvantageSettings,
    CorrectionSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.tokens import TokenTable
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


def test_every_rank_shows_its_sink_what_one_process_does(make_model, make_batch):
    """Labelled parts and, with one epoch, unlabelled ones; three ranks, of which one repeats a part at times."""
    case = {
        "loss": {"kl_coef": 0.1},
        "reference": ReferenceSettings(),
        "update": {"max_tokens_per_microbatch": 40},
        "minibatch_size": 7,
    }

    def columns(model, collective=None):
        table = TokenTable()
        learner = make_learner(model, case, collective)
        if collective is not None:
            collective.sums_gradients_of(model)
        learner.update(make_batch(0), table)
        return table.columns()

    pristine = make_model(dtype=torch.float64)
    expected = columns(copy.deepcopy(pristine))
    for own in on_threads(3, lambda collective: columns(copy.deepcopy(pristine), collective)):
        assert own.keys() == expected.keys()
        for name, column in expected.items():
            np.testing.assert_allclose(own[name], column, rtol=1e-5, atol=1e-6, err_msg=name)


@dataclass(frozen=True, slots=True)
class Inner:
    weights: torch.Tensor
    num: int


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner | None
    ratios: torch.Tensor
    nothing: None
    loss: torch.Tensor


def test_records_of_other_sizes_are_gathered_in_the_order_of_the_parts():
    """Five parts on two ranks: rank 0 has 0, 2 and 4, rank 1 has 1 and 3, and repeats 4."""

    def record(k):
        inner = Inner(torch.full((k, 2), 1 / 3 + k, dtype=torch.float32), k)
        return Outer(inner, torch.arange(k, dtype=torch.uint8), None, torch.tensor(math.nan if k == 3 else k / 7))

    def rank(collective):
        own = own_of(range(5), collective)
        records = [record(k if counts else 100) for k, counts in own]
        return own, gather(records, 5, collective, torch.device("cpu"))

    (first, records), (second, others) = on_threads(2, rank)
    assert first == [(0, True), (2, True), (4, True)]
    assert second == [(1, True), (3, True), (4, False)]
    for each in (records, others):
        assert [one.inner.num for one in each] == [0, 1, 2, 3, 4]
        for k, one in enumerate(each):
            expected = record(k)
            assert one.nothing is None
            assert one.ratios.dtype == torch.uint8
            assert one.ratios.equal(expected.ratios)
            assert one.inner.weights.dtype == torch.float32
            assert one.inner.weights.equal(expected.inner.weights)
            assert torch.equal(one.loss, expected.loss) or (k == 3 and one.loss.isnan())


@dataclass(frozen=True, slots=True)
class Empty:
    nothing: None = None


def test_records_without_a_number_are_gathered():
    assert on_threads(2, lambda c: gather([Empty()], 2, c, torch.device("cpu"))) == [[Empty(), Empty()]] * 2


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(make_model, make_batch, monkeypatch):
    monkeypatch.setattr("gspo_gym.learning.optimizer.MAX_NONFINITE_STEPS", 1)
    case = {"update": {"max_tokens_per_microbatch": 40}}

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
