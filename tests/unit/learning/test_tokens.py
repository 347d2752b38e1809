"""What the learner says of every token, against the formulas of the objective in float64, token by token in Python."""

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

EVERYTHING = {"kl_coef": 0.1, "entropy_coef": 0.01, "clip_low": 0.02, "clip_high": 0.03, "dual_clip": 1.04}
CASES = {
    "plain": {},
    "packed and clipped": {"loss": EVERYTHING, "minibatch_size": 5, "epochs": 3, "lr": 3e-2, "max_tokens": 40},
    "turns": {
        "loss": {**EVERYTHING, "unit": "turn", "aggregation": "turn-mean-token-mean"}, "minibatch_size": 6, "lr": 3e-2
    },
    "segments": {"loss": {**EVERYTHING, "unit": "segment", "aggregation": "dapo"}, "minibatch_size": 4, "lr": 3e-2},
    "one episode at a time": {"max_tokens": 1},  # some have one sampled token
    "tokens": {"loss": {"unit": "token", "aggregation": "token-mean"}, "minibatch_size": 7, "epochs": 2, "lr": 3e-2},
    "another engine": {"correction": {"level": "token", "mode": "mask", "low": 0.3, "high": 3.0}, "minibatch_size": 6},
    "the engine's own": {"correction": {"old_logprobs": "rollout"}, "loss": {"clip_low": 0.5, "clip_high": 0.5}},
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


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_number_of_every_token_is_the_formulas(make_model, make_batch, case):
    batch = make_batch()
    batch.is_masked[batch.trajectory_index == 1] = True
    table = TokenTable()
    metrics, _ = learn(make_model, batch, table, **case)
    seen = {name: values.tolist() for name, values in table.columns().items()}
    settings = LossSettings(**case.get("loss", {}))
    at = torch.nonzero(batch.action_mask).tolist()
    tokens = [(row, int(batch.trajectory_index[row]), int(batch.turn_index[row, t])) for row, t in at]
    unit_of = {
        "trajectory": [(i,) for _, i, _ in tokens],
        "segment": [(row,) for row, _, _ in tokens],
        "turn": [(i, turn) for _, i, turn in tokens],
        "token": [(k,) for k in range(len(tokens))],
    }[settings.unit]
    assert seen["advantage"] == [float(batch.advantages[row, t]) for row, t in at]
    num_steps = 1 + max(max(steps) for steps in seen["optimizer_step"])
    num_clipped = dict.fromkeys(Clip, 0)
    for p in range(case.get("epochs", 1)):
        now, ratio, clip, share, weight = (
            seen[name][p] for name in ("logprob", "ratio", "clip", "share", "correction")
        )
        step_of = seen["optimizer_step"][p]
        for k, (_, i, turn) in enumerate(tokens):
            own = [j for j, step in enumerate(step_of) if step == step_of[k] >= 0]  # of the optimizer step
            if math.isnan(now[k]):
                # the constant group has no advantage, and without another term nothing is computed for it
                expected = Fate.OVERLONG if i == 1 else Fate.NO_GRADIENT
                assert (seen["fate"][k], share[k], clip[k]) == (expected, 0, Clip.NONE)
                continue
            old = seen["old_logprob"][k]
            unit = [j for j in own if unit_of[j] == unit_of[k]]
            s = math.exp(mean(now[j] - seen["old_logprob"][j] for j in unit))
            assert ratio[k] == pytest.approx(s, rel=2e-6)
            A = seen["advantage"][k]
            w = 1.0
            if case.get("correction", {}).get("level"):
                w = math.exp(old - float(batch.rollout_logprobs[tuple(at[k])]))
                w = w if 0.3 <= w <= 3.0 else 0.0
            assert weight[k] == pytest.approx(w, rel=1e-5)
            side = Clip.NONE
            if w > 0 and A < 0 and s < 1 - settings.clip_low:
                side = Clip.LOW
            if w > 0 and A > 0 and s > 1 + settings.clip_high:
                side = Clip.HIGH
            if w > 0 and A < 0 and s > (settings.dual_clip or math.inf):
                side = Clip.DUAL
            assert clip[k] == side
            num_clipped[side] += 1
            gain = min(
                min(s, settings.dual_clip or s) * A, min(max(s, 1 - settings.clip_low), 1 + settings.clip_high) * A
            )
            divisor = {
                "seq-mean-token-mean": len({tokens[j][1] for j in own}) * sum(tokens[j][1] == i for j in own),
                "turn-mean-token-mean": len({tokens[j][1:] for j in own})
                * sum(tokens[j][1:] == (i, turn) for j in own),
                "token-mean": len(own),
                "dapo": len(tokens),
            }[settings.aggregation]
            term = -w * gain - settings.entropy_coef * seen["entropy"][p][k]
            if settings.kl_coef:
                x = seen["ref_logprob"][k] - now[k]
                term += settings.kl_coef * min(math.exp(x) - 1 - x, 10.0)
            assert share[k] == pytest.approx(term / divisor / num_steps, rel=1e-4, abs=1e-8)
            assert seen["fate"][k] == (Fate.TRAINED if w > 0 else Fate.LEFT_OUT)
    assert math.fsum(value for values in seen["share"] for value in values) == pytest.approx(
        metrics["loss/total"], abs=1e-6
    )
    assert metrics["clip/high_fraction"] == pytest.approx(num_clipped[Clip.HIGH] / metrics["batch/trained_tokens"])
    if case.get("loss", {}).get("dual_clip") and settings.unit == "trajectory":
        assert min(num_clipped.values()) > 0, "the case shows every side"


def test_weights_and_metrics_are_the_same_bits_with_a_sink(make_model, make_batch):
    case = CASES["packed and clipped"]
    metrics, weights = learn(make_model, make_batch(), None, **case)
    with_sink, same = learn(make_model, make_batch(), TokenTable(), **case)
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
