from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save

from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.reference import Reference
from gspo_gym.learning.settings import ReferenceSettings

EXACTLY = {"rtol": 0, "atol": 0}


@pytest.fixture
def batch():
    token_ids = torch.randint(3, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    action_mask = torch.zeros(2, 8, dtype=torch.bool)
    action_mask[:, 4:] = True
    return TokenBatch(
        token_ids=token_ids,
        attention_mask=torch.ones(2, 8, dtype=torch.bool),
        action_mask=action_mask,
        turn_index=action_mask.long() - 1,
        trajectory_index=torch.arange(2),
        rollout_logprobs=torch.zeros(2, 8),
    )


@pytest.fixture
def make_lora(make_model):
    """An adapter that does something: as if it had been trained before."""
    import peft

    def make():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.3)
        return peft.get_peft_model(make_model(), config)

    return make


def hold(model, *, given=None, **settings):
    return Reference(
        model,
        ReferenceSettings(**settings),
        computer=LogprobComputer(model),
        make_computer=LogprobComputer,
        given=given,
    )


def logprobs_of(model, batch):
    with torch.no_grad():
        return LogprobComputer(model).compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)


def test_a_copy_stays_what_the_model_was(make_model, batch):
    model = make_model()
    before, reference = logprobs_of(model, batch), hold(model)
    move(model)
    torch.testing.assert_close(reference.logprobs(batch), before, **EXACTLY)
    assert not torch.equal(logprobs_of(model, batch), before)


def test_the_base_is_the_model_without_its_adapter(make_lora, make_model, batch):
    model = make_lora()
    reference = hold(model, source="base")
    torch.testing.assert_close(reference.logprobs(batch), logprobs_of(make_model(), batch), rtol=0, atol=2e-5)
    assert reference.tensors() == {}


@pytest.mark.parametrize("source", ["auto", "adapter"])
def test_an_adapter_is_held_as_it_was_and_swapped_in_and_out(make_lora, batch, source):
    model = make_lora()
    start = logprobs_of(model, batch)
    reference = hold(model, source=source)
    move(model)
    present, pointers = logprobs_of(model, batch), [p.data_ptr() for p in model.parameters()]
    torch.testing.assert_close(reference.logprobs(batch), start, **EXACTLY)
    torch.testing.assert_close(logprobs_of(model, batch), present, **EXACTLY)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert set(reference.tensors()) == {f"reference.{n}" for n, p in model.named_parameters() if p.requires_grad}


def test_an_adapter_is_swapped_out_after_an_error_too(make_lora, batch):
    model = make_lora()
    reference = hold(model, source="adapter")
    move(model)
    present = logprobs_of(model, batch)
    with pytest.raises(AttributeError):
        reference.logprobs(None)
    torch.testing.assert_close(logprobs_of(model, batch), present, **EXACTLY)


def test_the_reference_is_scored_without_dropout(make_lora, batch):
    model = make_lora()
    computer = LogprobComputer(model)
    reference = Reference(model, ReferenceSettings(source="adapter"), computer=computer, make_computer=LogprobComputer)
    torch.testing.assert_close(reference.logprobs(batch), reference.logprobs(batch), **EXACTLY)


@pytest.mark.parametrize("source", ["adapter", "copy"])
def test_a_refresh_makes_it_the_present_policy(make_lora, batch, source):
    model = make_lora()
    reference = hold(model, source=source, update_every_n_iters=1)
    move(model)
    present = logprobs_of(model, batch)
    assert not torch.equal(reference.logprobs(batch), present)
    reference.refresh()
    move(model)
    torch.testing.assert_close(reference.logprobs(batch), present, **EXACTLY)


@pytest.mark.parametrize("source", ["adapter", "copy"])
def test_it_is_restored_into_a_learner_that_starts_from_trained_weights(make_lora, batch, source):
    first, second = make_lora(), make_lora()
    reference = hold(first, source=source)
    written, expected = save(reference.tensors()), reference.logprobs(batch)
    move(second)
    restarted = hold(second, source=source)
    restarted.restore(load(written))
    torch.testing.assert_close(restarted.logprobs(batch), expected, **EXACTLY)


def test_another_references_state_is_refused(make_lora, batch):
    copied, base = hold(make_lora(), source="copy"), hold(make_lora(), source="base")
    with pytest.raises(CheckpointError, match="0 are held"):
        base.restore(copied.tensors())
    with pytest.raises(CheckpointError, match="0 parameters were saved"):
        copied.restore(base.tensors())


def test_a_model_of_ones_own_is_used_as_it_is(make_model, batch):
    own = make_model(initializer_range=0.2)
    reference = hold(make_model(), given=own)
    torch.testing.assert_close(reference.logprobs(batch), logprobs_of(own, batch), **EXACTLY)
    assert reference.tensors() == {}
    with pytest.raises(ConfigError, match="as it is"):
        hold(make_model(), given=own, update_every_n_iters=2)


@pytest.mark.parametrize("source", ["base", "adapter"])
def test_a_full_model_has_no_adapter_to_compare_with(make_model, source):
    with pytest.raises(ConfigError, match="needs an adapter"):
        hold(make_model(), source=source)


def test_the_base_cannot_be_refreshed(make_lora):
    with pytest.raises(ConfigError, match="cannot move the frozen weights"):
        hold(make_lora(), source="base", update_every_n_iters=3)


@pytest.mark.parametrize(
    ("num_ranks", "source", "moves"), [(1, "adapter", True), (2, "adapter", False), (2, "copy", False)]
)
def test_a_reference_of_ranks_leaves_parameters_in_the_memory_that_torch_gathers(
    make_lora, batch, num_ranks, source, moves
):
    model = make_lora()
    ranks = SimpleNamespace(
        rank=0,
        world_size=num_ranks,
        is_shared_out=num_ranks > 1,
        sequence=None,
        device=None,
        forward=lambda work: work(),
    )
    computer = LogprobComputer(model, collective=ranks)
    reference = Reference(model, ReferenceSettings(source=source), computer=computer, make_computer=LogprobComputer)
    before = logprobs_of(model, batch)
    move(model)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = [p for p in model.parameters() if p.requires_grad]
    places, seen = [p.data_ptr() for p in weights], []
    model.get_base_model().model.norm.register_forward_hook(lambda *_: seen.append([p.data_ptr() for p in weights]))
    torch.testing.assert_close(reference.logprobs(batch), before, **EXACTLY)
    assert [each != places for each in seen] == [moves]
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())


def test_a_copy_in_one_process_is_a_model_of_its_own(make_model, batch):
    model, passes = make_model(), []
    reference = hold(model, source="copy")
    model.model.norm.register_forward_hook(lambda *_: passes.append(1))
    reference.logprobs(batch)
    assert passes == []
