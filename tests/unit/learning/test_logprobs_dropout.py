"""The dropout of a LoRA adapter: common masks where policies are compared, none elsewhere."""

from __future__ import annotations

import pytest
import torch

from gspo_gym.learning.logprobs import LogprobComputer, seeded_random

peft = pytest.importorskip("peft")
ROUNDING = 2e-5  # of float32 logprobs of order 10, where kernels with and without gradient may differ


@pytest.fixture
def tokens():
    token_ids = torch.randint(3, 61, (3, 12), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones(3, 12, dtype=torch.bool)
    action_mask = torch.zeros(3, 12, dtype=torch.bool)
    action_mask[0, 1:3] = action_mask[0, 5:8] = action_mask[1, 2:9] = action_mask[2, 11] = True
    return token_ids, attention_mask, action_mask


@pytest.fixture
def make_lora(make_model):
    def make(*targets, **options):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, lora_dropout=0.3)
        return peft.get_peft_model(make_model(**options), config)

    return make


def score(computer, tokens, seed):
    with torch.no_grad(), computer.adapter_dropout(seed):
        return computer.compute(*tokens).logprobs


def test_the_seed_decides_the_masks_with_and_without_gradients(make_lora, tokens):
    computer = LogprobComputer(make_lora("q_proj", "down_proj"))
    plain = computer.compute(*tokens).logprobs.detach()
    without = score(computer, tokens, seed=5)
    with computer.adapter_dropout(5):
        with_gradients = computer.compute(*tokens).logprobs.detach()
    torch.testing.assert_close(with_gradients, without, rtol=0, atol=ROUNDING)
    assert float((without - plain).abs().max()) > 0.05, "a third of the adapter's input is dropped"
    assert float((score(computer, tokens, seed=6) - without).abs().max()) > 0.05
    assert torch.equal(computer.compute(*tokens).logprobs.detach(), plain), "outside, nothing is dropped"


def test_the_models_own_dropout_stays_off(make_lora, tokens):
    computer = LogprobComputer(make_lora("q_proj", attention_dropout=0.5))
    with computer.adapter_dropout(5):
        computer.compute(*tokens)
        on = [name for name, module in computer._model.named_modules() if module.training]
    assert on
    assert all("lora_dropout" in name for name in on)
    assert not any(module.training for module in computer._model.modules())


@pytest.mark.parametrize("seed", [5, 6])
def test_gradients_with_and_without_checkpointing_are_the_same(make_lora, tokens, seed):
    gradients = []
    for is_checkpointed in (False, True):
        model = make_lora("q_proj", "down_proj")
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        computer, calls = LogprobComputer(model), []
        model.base_model.model.model.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with computer.adapter_dropout(seed):
            computer.compute(*tokens).logprobs.sum().backward()
        assert len(calls) == (2 if is_checkpointed else 1)
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))


def test_an_adapter_on_the_head_has_the_same_masks_when_its_chunks_are_computed_again(make_lora, tokens):
    """Gradients of chunks against finite differences of the loss under the same masks."""
    model = make_lora("lm_head", dtype=torch.float64)
    computer = LogprobComputer(model, logits_bytes=4 * 2 * 8 * 61)
    with computer.adapter_dropout(5):
        computer.compute(*tokens).logprobs.sum().backward()
    weight = next(p for name, p in model.named_parameters() if "lora_A" in name)
    step = 1e-5
    for place in ((0, 0), (2, 7), (3, 31)):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[place] += sign * step
            values.append(float(score(computer, tokens, seed=5).sum()))
            with torch.no_grad():
                weight[place] -= sign * step
        # central differences: error of order step^2, and rounding of order 1e-13 / step
        assert float(weight.grad[place]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_the_global_generator_is_left_as_it_was_also_after_an_error(make_lora, tokens):
    computer = LogprobComputer(make_lora("q_proj"))
    before = torch.get_rng_state()

    def fail():
        with computer.adapter_dropout(5):
            computer.compute(*tokens)
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in computer._model.modules())


def test_within_a_seed_the_generator_is_one_of_that_seed():
    before = torch.get_rng_state()
    with seeded_random(5, torch.device("cpu")):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_an_adapter_has_nothing_to_drop(make_model, tokens):
    computer = LogprobComputer(make_model())
    assert torch.equal(score(computer, tokens, seed=5), score(computer, tokens, seed=6))
