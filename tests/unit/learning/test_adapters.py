"""LoRA's linear layers with their own passes: the numbers of the formula, of differences, and of peft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from gspo_gym.learning.adapters import LoraLinear, quicken_adapters
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import adapt_policy, load_policy


class Block(nn.Module):
    """Two layers, the second with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.second = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(x).tanh())
        return hidden


def adapted(**settings: Any) -> tuple[Any, Any]:
    """A model with random adapters, quickened, and as it was."""
    torch.manual_seed(0)
    targets = ["first", "second"]
    theirs = peft.get_peft_model(Block(), peft.LoraConfig(**{"r": 2, "target_modules": targets, **settings})).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    ours = copy.deepcopy(theirs)
    assert quicken_adapters(ours) == 2
    assert quicken_adapters(ours) == 0
    return ours, theirs


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(model: Any, shape: tuple[int, ...]) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters that are trained."""
    x = inputs(*shape)
    out = model(x)
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_values_and_gradients_by_hand() -> None:
    x, weight = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[3.0, 4.0]])
    down, up = torch.tensor([[5.0, 6.0]], requires_grad=True), torch.tensor([[7.0]], requires_grad=True)
    out = LoraLinear.apply(x, weight, torch.tensor([0.5]), down, up, 0.5)  # type: ignore[no-untyped-call]
    # 1 * 3 + 2 * 4 + 0.5 = 11.5, and 0.5 * 7 * (1 * 5 + 2 * 6) = 59.5
    assert out.tolist() == [[71.0]]
    out.sum().backward()
    assert isinstance(x.grad, Tensor)
    assert isinstance(down.grad, Tensor)
    assert isinstance(up.grad, Tensor)
    assert x.grad.tolist() == [[20.5, 25.0]]  # 3 + 3.5 * 5 and 4 + 3.5 * 6
    assert down.grad.tolist() == [[3.5, 7.0]]  # 0.5 * 7 * x
    assert up.grad.tolist() == [[8.5]]  # 0.5 * 17


def test_gradients_are_those_of_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (5, 3), (5,), (2, 3), (5, 2))
    x, weight, bias, down, up = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    trained = [tensor.requires_grad_() for tensor in (x, down, up)]
    assert torch.autograd.gradcheck(lambda x, down, up: LoraLinear.apply(x, weight, bias, down, up, 0.7), trained)


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (1, 1, 6, 5)])
def test_values_and_gradients_are_pefts(shape: tuple[int, ...]) -> None:
    ours, theirs = (results(model, shape) for model in adapted(lora_alpha=3))
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))  # float32's rounding


def test_without_gradients_values_are_those_with_them() -> None:
    ours, _ = adapted()
    x = inputs(3, 5)
    with torch.inference_mode():
        without = ours(x)
    assert torch.equal(without, ours(x))


def test_the_first_layer_asks_for_no_gradient_of_its_input() -> None:
    ours, theirs = adapted()
    x = inputs(3, 5).detach()
    for model in (ours, theirs):
        model(x).sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)


def _merge(model: Any) -> None:
    model.merge_adapter()


def _disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _add_another(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=1, target_modules=["first"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


def _switch(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=1, target_modules=["first"], init_lora_weights=False))
    model.set_adapter("other")


def _train_the_base(model: Any) -> None:
    model.base_model.model.first.base_layer.weight.requires_grad_(True)


def _double_what_the_base_gives(model: Any) -> None:
    model.base_model.model.first.base_layer.register_forward_hook(lambda _module, _inputs, output: 2 * output)


def _replace_the_base(model: Any) -> None:
    base = model.base_model.model.first.base_layer
    base.forward = lambda x: nn.functional.linear(x, base.weight) + 1


LATER: dict[str, Callable[[Any], None]] = {
    "merged": _merge,
    "disabled": _disable,
    "two adapters": _add_another,
    "another adapter": _switch,
    "a base that is trained": _train_the_base,
    "a base with a hook": _double_what_the_base_gives,
    "a base with another forward": _replace_the_base,
}


@pytest.mark.parametrize("name", LATER)
def test_a_layer_that_becomes_another_computes_as_pefts(name: str) -> None:
    found = []
    for model in adapted():
        torch.manual_seed(7)  # of an adapter that is added
        LATER[name](model)
        found.append(results(model, (4, 5)))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["second"]}])
def test_other_kinds_of_lora_are_pefts(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["first", "second"], "init_lora_weights": False, **settings})
    theirs = peft.get_peft_model(Block(), config).eval()
    ours = copy.deepcopy(theirs)
    quicken_adapters(ours)
    assert torch.equal(ours(inputs(4, 5)), theirs(inputs(4, 5)))


def test_a_dropout_that_acts_is_pefts() -> None:
    ours, theirs = adapted(lora_dropout=0.5)
    outputs = []
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(3)
        outputs.append(model(inputs(6, 5)))
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], ours.eval()(inputs(6, 5)))


def test_half_precision_is_pefts() -> None:
    ours, theirs = (model.to(torch.bfloat16) for model in adapted())
    x = inputs(4, 5).to(torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))


def test_the_adapter_of_a_policy_is_quick_and_its_copy_computes_with_its_own_weights() -> None:
    policy = adapt_policy(load_policy("tiny:qwen3-64"), LoraSettings(r=2, alpha=4), seed=0)
    assert quicken_adapters(policy.model) == 0  # they are
    copied = copy.deepcopy(policy.model)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = policy.model(input_ids=ids).logits
        for name, parameter in copied.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        assert torch.equal(policy.model(input_ids=ids).logits, before)
        assert not torch.allclose(copied(input_ids=ids).logits, before)
