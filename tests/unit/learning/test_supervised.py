from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gspo_gym.errors import NonFiniteError, RecordError
from gspo_gym.learning.batching import batch_tokens
from gspo_gym.learning.settings import OptimizerSettings, SupervisedSettings, UpdateSettings
from gspo_gym.learning.supervised import nll_loss, supervised_epochs


def imitate(model, demonstrations, *, settings=None, update=None, **options):
    return supervised_epochs(
        model,
        demonstrations,
        optimizer=OptimizerSettings(),
        settings=SupervisedSettings(**{"learning_rate": 3e-3} | (settings or {})),
        update=UpdateSettings(**{"learning_rate": 1.0} | (update or {})),  # the rate is reinforcement's
        **options,
    )


@pytest.fixture
def demonstrations(make_trajectory):
    """Ten unscored episodes of different lengths, some in two segments."""
    return [
        make_trajectory([None] * (1 + i % 3), action=1 + i % 4, num_segments=1 + (i % 3 == 2), seed=i)
        for i in range(10)
    ]


def from_all_logits(model, demonstrations):
    """The mean over all sampled tokens of -log p, from the model's own logits, one segment at a time."""
    nlls = []
    for trajectory in demonstrations:
        for segment in trajectory.segments:
            ids = torch.from_numpy(segment.token_ids.astype("int64"))[None]
            distribution = torch.log_softmax(model.eval()(input_ids=ids).logits[0], -1)
            nlls += [-distribution[t - 1, ids[0, t]] for t in range(ids.shape[1]) if segment.action_mask[t]]
    return torch.stack(nlls).mean()


def test_nll_is_a_mean_over_the_steps_tokens_by_hand():
    logprobs = torch.tensor([[float("nan"), -1.0, -2.0], [float("nan"), -4.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    # seven tokens over three, of which the step has four in all: the other micro-batch adds its own
    loss = nll_loss(logprobs, mask, num_actions=4)
    assert loss.item() == pytest.approx(7 / 4)
    loss.backward()
    assert logprobs.grad.tolist() == [[0, -0.25, -0.25], [0, -0.25, 0]]


def test_the_first_loss_is_the_models_nll_of_the_sampled_tokens(make_model, demonstrations):
    expected = from_all_logits(make_model(), demonstrations).item()
    report = imitate(make_model(), demonstrations)
    assert report.epoch_losses[0] == pytest.approx(expected, abs=1e-5)  # float32 sums of terms of order 10
    assert report.num_tokens == sum(t.num_actions for t in demonstrations)


def test_one_step_has_the_gradient_of_the_models_own_nll(make_model, demonstrations):
    expected, model = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    from_all_logits(expected, demonstrations).backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    torch.optim.AdamW(expected.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    settings, update = {"batch_size": 10}, {"max_tokens_per_microbatch": 40}
    imitate(model, demonstrations, settings=settings, update=update)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        # see the same comparison for reinforcement: AdamW's first step magnifies the smallest gradients' rounding
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * 3e-3)


def test_demonstrations_become_likely(make_model, demonstrations):
    steps = []
    report = imitate(make_model(), demonstrations, settings={"num_epochs": 25, "batch_size": 4}, on_step=steps.append)
    assert report.epoch_losses[-1] < 0.2 * report.epoch_losses[0]
    assert (report.num_steps, len(steps), steps[-1].num_total_steps) == (75, 75, 75)
    assert report.num_tokens == 25 * sum(t.num_actions for t in demonstrations)
    assert [step.epoch for step in steps[:4]] == [0, 0, 0, 1]


def test_beginnings_that_demonstrations_share_are_computed_once(make_model, make_trajectory):
    """Eight demonstrations of three observed and two sampled tokens. Four begin with the same four tokens, and so do
    the others. A row's last token predicts none, so that 8 * 4 tokens are computed, and of two tries 2 * 4."""
    demonstrations = []
    for i in range(8):
        episode = make_trajectory([None], seed=100 + i)
        [own], [shared] = episode.segments, make_trajectory([None], seed=i // 4).segments
        token_ids = np.concatenate([shared.token_ids[:4], own.token_ids[4:]])
        demonstrations.append(dataclasses.replace(episode, segments=(dataclasses.replace(own, token_ids=token_ids),)))
    losses, parameters, counts = [], [], []
    for share in (False, "auto"):
        model, seen = make_model(dtype=torch.float64), []
        model.model.embed_tokens.register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(inputs[0].numel())
        )
        update = {"max_tokens_per_microbatch": 20, "share_prefixes": share}  # four rows of five tokens
        report = imitate(model, demonstrations, settings={"batch_size": 8}, update=update)
        losses.append(report.epoch_losses)
        parameters.append(dict(model.named_parameters()))
        counts.append(seen[-2:])  # after the probes
    assert counts == [[16, 16], [4, 4]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    for name, value in parameters[0].items():
        # AdamW turns a relative error of a gradient into one of lr times it; tiny gradients have the larger ones.
        torch.testing.assert_close(parameters[1][name], value, rtol=0, atol=1e-2 * 3e-3)


def test_the_memory_budget_changes_nothing_but_rounding(make_model, demonstrations):
    results = []
    for max_tokens in (10_000, 20):
        model = make_model(dtype=torch.float64)
        settings, update = {"num_epochs": 2, "batch_size": 5}, {"max_tokens_per_microbatch": max_tokens}
        report = imitate(model, demonstrations, settings=settings, update=update)
        results.append((report.epoch_losses, [p.detach() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * 3e-3)


def test_the_same_seed_gives_the_same_weights_and_another_another_order(make_model, demonstrations):
    def weights(**seed):
        model = make_model()
        settings = {"batch_size": 3}
        imitate(model, demonstrations, settings=settings, **seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(), weights(seed=0))
    assert not torch.equal(weights(seed=0), weights(seed=1))


def test_gradients_left_by_someone_else_take_no_part(make_model, demonstrations):
    clean, dirty = make_model(), make_model()
    for p in dirty.parameters():
        p.grad = torch.ones_like(p)
    for model in (clean, dirty):
        imitate(model, demonstrations)
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), dirty.parameters(), strict=True))


def test_only_sampled_tokens_are_learnt(make_model, make_trajectory):
    """Tokens of the environment stay as (un)likely as they can while nothing asks for them."""
    trajectory = make_trajectory([None], observation=6, action=2)
    batch = batch_tokens([trajectory])
    assert batch.num_actions == 2
    model = make_model()
    with torch.no_grad():
        before = from_context(model, batch)
    imitate(model, [trajectory], settings={"num_epochs": 30})
    with torch.no_grad():
        after = from_context(model, batch)
    assert after["action"] > -0.5 > before["action"]
    assert after["context"] < -2.0


def from_context(model, batch):
    """Mean logprob of the two sampled tokens, and of the five of the context that could be predicted."""
    distribution = torch.log_softmax(model.eval()(input_ids=batch.token_ids).logits[0], -1)
    logprobs = [float(distribution[t - 1, batch.token_ids[0, t]]) for t in range(1, 8)]
    return {"context": sum(logprobs[:5]) / 5, "action": sum(logprobs[5:]) / 2}


def test_non_finite_steps_are_skipped_and_end_the_warm_up_when_too_many(make_model, demonstrations):
    model = make_model()
    calls = []

    def break_after_the_probe(module, inputs, output):
        calls.append(1)
        return output * float("nan") if len(calls) > 2 else output

    handle = model.model.norm.register_forward_hook(break_after_the_probe)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        imitate(model, demonstrations, settings={"batch_size": 1}, update={"max_nonfinite_steps": 2})
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_skipped_step_is_counted_apart_from_those_taken(make_model, make_trajectory):
    """Two epochs of one demonstration; the probe of the scorer calls the norm twice, the steps once each."""
    model, calls = make_model(), []

    def break_the_first_step(module, inputs, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 3 else output

    model.model.norm.register_forward_hook(break_the_first_step)
    settings = {"num_epochs": 2}
    update = {"max_nonfinite_steps": 1, "share_prefixes": False}  # whose own probe would call it, too
    report = imitate(model, [make_trajectory([None])], settings=settings, update=update)
    assert (report.num_steps, report.num_nonfinite_steps, len(report.epoch_losses)) == (1, 1, 2)


def test_demonstrations_without_tokens_are_refused(make_model):
    with pytest.raises(RecordError, match="at least one trajectory"):
        imitate(make_model(), [])
