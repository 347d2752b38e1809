"""What the learner records of every token: nothing is changed by it, and what was skipped or not learned says so.

`tests/unit/run/test_tokens.py` compares every recorded number with the oracle's.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.settings import CorrectionSettings, LossSettings, OptimizerSettings, UpdateSettings
from gspo_gym.learning.tokens import Clip, Fate, TokenTable
from gspo_gym.learning.update import Learner

CLIPPED = {
    "loss": {"kl_coef": 0.1, "entropy_coef": 0.01, "clip_low": 0.02, "clip_high": 0.03, "dual_clip": 1.04},
    "minibatch_size": 5, "epochs": 3, "lr": 3e-2, "max_tokens": 40,
}  # fmt: skip


def learn(
    make_model, batch, sink, *, loss=None, lr=1e-3, epochs=1, minibatch_size=None, max_tokens=16384, correction=None
):
    model = make_model()
    learner = Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(**(loss or {})),
        update=UpdateSettings(learning_rate=lr, update_epochs=epochs, max_tokens_per_microbatch=max_tokens),
        minibatch_size=minibatch_size,
        correction=CorrectionSettings(**(correction or {})),
        reference_model=make_model(initializer_range=0.2) if loss and loss.get("kl_coef") else None,
    )
    return learner.update(batch, sink).metrics, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_weights_and_metrics_are_the_same_bits_with_a_sink(make_model, make_batch):
    metrics, weights = learn(make_model, make_batch(), None, **CLIPPED)
    with_sink, same = learn(make_model, make_batch(), TokenTable(), **CLIPPED)
    assert all(torch.equal(same[name], value) for name, value in weights.items())
    assert {k: v for k, v in metrics.items() if "time/" not in k} == {
        k: v for k, v in with_sink.items() if "time/" not in k
    }


def test_a_step_that_is_skipped_has_no_share_and_its_tokens_say_so(make_model, make_batch):
    """The engine's logprobs stand for the old ones; NaN in one minibatch makes that step's loss NaN."""
    batch = make_batch()
    broken = batch.trajectory_index == 0
    rollout = torch.where(broken[:, None] & batch.action_mask, math.nan, batch.rollout_logprobs)
    table = TokenTable()
    case = {"correction": {"old_logprobs": "rollout"}, "minibatch_size": 4}
    metrics, _ = learn(make_model, dataclasses.replace(batch, rollout_logprobs=rollout), table, **case)
    columns = table.columns()
    trajectory = batch.trajectory_index[:, None].expand_as(batch.action_mask)[batch.action_mask].numpy()
    (skipped,) = set(columns["optimizer_step"][0][trajectory == 0].tolist())
    in_skipped = (columns["optimizer_step"][0] == skipped) & ~np.isnan(columns["logprob"][0])
    assert (metrics["optim/num_nonfinite_steps"], metrics["optim/num_steps"]) == (1, 2)
    assert (columns["fate"] == Fate.SKIPPED).tolist() == in_skipped.tolist()
    assert not columns["share"][0][in_skipped].any()
    assert columns["share"].sum(dtype=np.float64) == pytest.approx(metrics["loss/total"], abs=1e-6)
    steps = table.steps()
    assert np.isnan(steps["grad_norm"]).tolist() == [number == skipped for number in range(3)]
    assert np.nanmean(steps["grad_norm"]) == pytest.approx(metrics["optim/grad_norm"])
    assert steps["learning_rate"].tolist() == [1e-3] * 3
    elsewhere = TokenTable()
    elsewhere.unpack(table.pack(), StepReport)
    for arrived, sent in ((elsewhere.columns(), columns), (elsewhere.steps(), steps)):
        assert arrived.keys() == sent.keys()
        assert all(arrived[name].tobytes() == column.tobytes() for name, column in sent.items())


def test_an_update_without_a_pass_has_shares_of_0_and_says_why(make_batch):
    batch = make_batch()
    batch.is_masked[batch.trajectory_index == 1] = True
    table = TokenTable()
    assert {values.size for values in table.columns().values()} == {0}, "no batch, no tokens"
    table.begin(batch)
    columns = table.columns()
    overlong = [int(batch.trajectory_index[row]) == 1 for row, _ in torch.nonzero(batch.action_mask).tolist()]
    assert columns["share"].tolist() == [[0.0] * len(overlong)]
    assert columns["fate"].tolist() == [Fate.OVERLONG if cut else Fate.NO_GRADIENT for cut in overlong]
    elsewhere = TokenTable()
    elsewhere.unpack(table.pack(), StepReport)
    assert elsewhere.columns()["share"].tolist() == columns["share"].tolist()


def test_the_numbers_that_records_hold_stay():
    """Recorded runs hold numbers alone: another one, or one number for two names, misreads every old record."""
    fates = "TRAINED LEFT_OUT SKIPPED NO_GRADIENT OVERLONG FILTERED CONSTANT_GROUP UNCOMMITTED"
    assert [(fate.name, fate.value) for fate in Fate] == [(name, k) for k, name in enumerate(fates.split())]
    assert [(clip.name, clip.value) for clip in Clip] == [("NONE", 0), ("LOW", 1), ("HIGH", 2), ("DUAL", 3)]
