"""The policy as its own teacher: what it reads, which tokens are compared, and what is a mean over which of them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.diagnosis.teaching import MIN_STEPS, TeachingAlarm
from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.batching import TeacherPrompt, TrainBatch
from gspo_gym.learning.settings import (
    CorrectionSettings,
    DistillationSettings,
    LossSettings,
    OptimizerSettings,
    UpdateSettings,
)
from gspo_gym.learning.tokens import TokenTable
from gspo_gym.learning.update import Learner
from gspo_gym.types import Sampling

Make = Callable[..., Any]
PROMPTS = {(1, 0): [5, 6, 7, 8], (2, 1): [9, 10], (5, 1): [11, 12, 13], (9, 0): [3] * 9}


def make_learner(model: Any, *, update: dict[str, Any] | None = None, **options: Any) -> Learner:
    distillation = {"teacher": "self", "feedback": "judge", "reward": False} | options.pop("distillation", {})
    return Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(**options.pop("loss", {})),
        update=UpdateSettings(**({"learning_rate": 1e-3} | (update or {}))),
        distillation=DistillationSettings(**distillation),
        **options,
    )


def with_prompts(batch: TrainBatch, prompts: dict[tuple[int, int], list[int]]) -> TrainBatch:
    given = tuple(TeacherPrompt(i, k, np.array(ids, np.int32)) for (i, k), ids in prompts.items())
    return dataclasses.replace(batch, prompts=given)


def logprobs_after(model: Any, before: list[int], action: list[int]) -> torch.Tensor:
    """[n] of the action's tokens, from transformers' own forward of one row, at temperature 1."""
    logits = model(input_ids=torch.tensor([before + action])).logits[0, len(before) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), -1)
    return logprobs.gather(-1, torch.tensor(action)[:, None])[:, 0]


def by_hand(model: Any, batch: TrainBatch, prompts: dict[tuple[int, int], list[int]]) -> torch.Tensor:
    """[A] log(teacher / policy); NaN where no prompt was given."""
    gaps = torch.full(batch.token_ids.shape, math.nan, dtype=torch.float64)
    for row, trajectory in enumerate(batch.trajectory_index.tolist()):
        for turn in sorted({int(k) for k in batch.turn_index[row] if k >= 0}):
            if (trajectory, turn) not in prompts:
                continue
            at = torch.nonzero(batch.turn_index[row] == turn)[:, 0]
            action, before = batch.token_ids[row, at].tolist(), batch.token_ids[row, : int(at[0])].tolist()
            taught = logprobs_after(model, prompts[trajectory, turn], action)
            gaps[row, at] = taught - logprobs_after(model, before, action)
    return gaps[batch.action_mask]


SAMPLED: dict[str, dict[str, Any]] = {
    "as the learner scores it": {},
    "at another temperature": {"sampling": Sampling(temperature=0.7)},
    "from the ten likeliest": {"sampling": Sampling(top_k=10)},
    "under the engine's old logprobs": {"correction": CorrectionSettings(old_logprobs="rollout")},
    "in passes of one row": {"update": {"max_tokens_per_microbatch": 10}},
    "with shared prefixes": {"update": {"share_prefixes": True}},
}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
@torch.no_grad()
def test_the_turns_tokens_are_scored_behind_the_prompts_and_others_are_in_no_sum(
    options: dict[str, Any], make_model: Make, make_batch: Make
) -> None:
    batch, model, table = make_batch(), make_model(), TokenTable()
    gap = by_hand(model, batch, PROMPTS).numpy()
    is_taught = ~np.isnan(gap)
    assert 0 < is_taught.sum() < len(gap)
    with torch.enable_grad():
        report = make_learner(model, **options).update(with_prompts(batch, PROMPTS), table)
    columns, metrics = table.columns(), report.metrics
    np.testing.assert_allclose(columns["teacher_log_ratio"], gap, atol=1e-4)  # float32 against float64
    assert (columns["share"][0][~is_taught] == 0).all()
    assert metrics["distillation/advantage"] == pytest.approx(gap[is_taught].mean(), abs=1e-4)
    assert metrics["distillation/taught_fraction"] == is_taught.mean()
    if "correction" in options:  # the batch's logprobs of the engine are 0: every token fell from probability 1
        assert metrics["distillation/dropped_fraction"] == 1.0
        return
    # At ratio 1: - coefficient (1) * the mean over taught tokens, and nothing of the reward's.
    assert metrics["loss/total"] == pytest.approx(-gap[is_taught].mean(), abs=1e-4)


def test_the_first_step_is_the_gradient_of_the_mean_over_taught_tokens(make_model: Make, make_batch: Make) -> None:
    batch = make_batch()
    model, ours = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    with torch.no_grad():
        gap = by_hand(model, batch, PROMPTS)
    logits = ours(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    every = torch.log_softmax(logits[:, :-1][batch.action_mask[:, 1:]], -1)
    taken = every.gather(-1, batch.token_ids[batch.action_mask][:, None])[:, 0]
    is_taught = ~gap.isnan()
    (-0.25 * (gap[is_taught] * taken[is_taught]).mean()).backward()
    norm = float(sum(float((p.grad**2).sum()) for p in ours.parameters() if p.grad is not None) ** 0.5)
    learner = make_learner(model, distillation={"coefficient": 0.25}, update={"max_tokens_per_microbatch": 40})
    metrics = learner.update(with_prompts(batch, PROMPTS)).metrics
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)


@torch.no_grad()
def test_a_prompt_that_is_the_policys_own_teaches_nothing(make_model: Make, make_batch: Make) -> None:
    """Other rows and other padding: equal but for float32's rounding of logits of some units."""
    batch, table = make_batch(), TokenTable()
    own = {}
    for row, trajectory in enumerate(batch.trajectory_index.tolist()):
        for turn in {int(k) for k in batch.turn_index[row] if k >= 0}:
            first = int(torch.nonzero(batch.turn_index[row] == turn)[0])
            own[trajectory, turn] = batch.token_ids[row, :first].tolist()
    with torch.enable_grad():
        make_learner(make_model()).update(with_prompts(batch, own), table)
    np.testing.assert_allclose(table.columns()["teacher_log_ratio"], 0.0, atol=2e-5)


@pytest.mark.parametrize("is_masked", [False, True])
def test_without_any_feedback_nothing_moves_not_even_by_momentum(
    is_masked: bool, make_model: Make, make_batch: Make
) -> None:
    model, batch, table = make_model(), make_batch(), TokenTable()
    learner = make_learner(model)
    learner.update(with_prompts(batch, PROMPTS))  # after which AdamW has moments
    before = {
        name: value.detach().clone() for name, value in {**dict(model.named_parameters()), **learner.tensors()}.items()
    }
    if is_masked:  # all that is taught is left out
        taught = torch.isin(batch.trajectory_index, torch.tensor([i for i, _ in PROMPTS]))
        batch = with_prompts(dataclasses.replace(batch, is_masked=taught), PROMPTS)
    report = learner.update(batch, table)
    assert (report.num_steps, report.metrics["optim/num_empty_steps"]) == (0, 1)
    assert (report.metrics["distillation/taught_fraction"] > 0) == is_masked
    assert "distillation/advantage" not in report.metrics, "a mean of nothing is no number"
    after = {**dict(model.named_parameters()), **learner.tensors()}
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert (table.columns()["optimizer_step"] == -1).all()


def test_rewards_that_are_not_learned_from_make_no_step(make_model: Make, make_batch: Make) -> None:
    """In minibatches of one trajectory, those of `PROMPTS` are taught; beside the rewards, others have advantages."""
    num_taught, options = len({trajectory for trajectory, _ in PROMPTS}), {"minibatch_size": 1}
    alone = make_learner(make_model(), **options).update(with_prompts(make_batch(), PROMPTS))
    beside = make_learner(make_model(), distillation={"reward": True}, **options).update(
        with_prompts(make_batch(), PROMPTS)
    )
    assert alone.num_steps == num_taught < beside.num_steps


def test_masked_episodes_are_neither_taught_nor_counted(make_model: Make, make_batch: Make) -> None:
    batch, table = make_batch(), TokenTable()
    masked = dataclasses.replace(batch, is_masked=batch.trajectory_index == 1)
    rest = {key: ids for key, ids in PROMPTS.items() if key[0] != 1}
    with torch.no_grad():
        gap = by_hand(make_model(), batch, rest).numpy()
    metrics = make_learner(make_model()).update(with_prompts(masked, PROMPTS), table).metrics
    assert metrics["loss/total"] == pytest.approx(-np.nanmean(gap), abs=1e-4)


def test_beside_the_reward_both_terms_are_in_the_loss(make_model: Make, make_batch: Make) -> None:
    batch = with_prompts(make_batch(), PROMPTS)
    alone = make_learner(make_model()).update(batch).metrics
    beside = make_learner(make_model(), distillation={"reward": True}).update(batch).metrics
    assert alone["loss/policy"] == 0.0 != beside["loss/policy"]
    assert beside["loss/distillation"] == pytest.approx(alone["loss/distillation"], abs=1e-6)


@pytest.mark.parametrize("sharpness", [1.0, 0.1])
def test_agreement_is_the_correlation_of_mean_gaps_and_advantages(
    sharpness: float, make_model: Make, make_batch: Make
) -> None:
    """Also where no two gaps are a nat apart, of a model whose logits are nearly alike."""
    batch, model = make_batch(), make_model()
    with torch.no_grad():
        model.model.norm.weight *= sharpness
        gap = by_hand(model, batch, PROMPTS).numpy()
    owner = batch.trajectory_index[:, None].expand_as(batch.action_mask)[batch.action_mask].numpy()
    gains = batch.advantages[batch.action_mask].numpy()
    is_taught = ~np.isnan(gap)
    pairs = [
        (gap[is_taught & (owner == i)].mean(), gains[is_taught & (owner == i)].mean()) for i, _ in PROMPTS
    ]  # one turn each
    x, y = (np.array(values) - np.mean(values) for values in zip(*pairs, strict=True))
    assert (np.ptp(x) > 1) == (sharpness == 1.0)
    expected = (x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum())
    metrics = make_learner(copy.deepcopy(model)).update(with_prompts(batch, PROMPTS)).metrics
    assert metrics["distillation/agreement"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_teacher_that_prefers_what_earns_less_sounds_the_alarm(sign: int, make_model: Make, make_batch: Make) -> None:
    """Of six random prompts, each turn has the one behind which its tokens are least likely if it earned more than
    its siblings, and likeliest if it earned less; the other way about, the alarm is silent."""
    model, alarm = make_model(), TeachingAlarm()
    prompts = np.random.default_rng(0).integers(3, 60, (6, 6)).tolist()
    learner, reasons = make_learner(model, update={"learning_rate": 1e-5}), []
    for step in range(MIN_STEPS):
        batch, chosen = make_batch(step), {}
        for row, trajectory in enumerate(batch.trajectory_index.tolist()):
            for turn in {int(k) for k in batch.turn_index[row] if k >= 0}:
                at = torch.nonzero(batch.turn_index[row] == turn)[:, 0]
                gain, action = float(batch.advantages[row, at[0]]), batch.token_ids[row, at].tolist()
                with torch.no_grad():
                    scores = [float(logprobs_after(model, prompt, action).mean()) for prompt in prompts]
                chosen[trajectory, turn] = prompts[int(np.argmax(sign * np.sign(gain) * np.array(scores)))]
        metrics = learner.update(with_prompts(batch, chosen)).metrics
        assert metrics["distillation/agreement"] * sign > 0
        reasons.append(alarm.check(metrics))
    assert reasons[:-1] == [None] * (MIN_STEPS - 1)
    if sign > 0:
        assert reasons[-1] is None
    else:
        assert reasons[-1] is not None
        assert "it teaches what earns less" in reasons[-1]


def test_a_prompt_of_no_turn_is_refused(make_model: Make, make_batch: Make) -> None:
    with pytest.raises(RecordError, match=r"a turn 7 of trajectory 1 .* got 1 ids and 0 such rows"):
        make_learner(make_model()).update(with_prompts(make_batch(), {(1, 7): [4]}))
    with pytest.raises(RecordError, match="got 0 ids"):
        make_learner(make_model()).update(with_prompts(make_batch(), {(1, 0): []}))


def test_the_policy_takes_no_other_model_as_its_teacher(make_model: Make) -> None:
    with pytest.raises(ConfigError, match="'self' is the policy, and another model"):
        make_learner(make_model(), teacher=make_model())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"teacher": "self"}, "teaches nothing that it does not read"),
        ({"teacher": "t", "feedback": "judge"}, "only the teacher 'self' reads feedback"),
        ({"teacher": "self", "feedback": "judge", "baseline": True}, "baseline: is not computed"),
        ({"teacher": "self", "feedback": "critic"}, "'none', 'environment', 'judge' or 'sibling'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DistillationSettings(**values)
