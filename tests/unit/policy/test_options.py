"""Checkpointing, compiling and foreign kernels change how a policy is computed, and not what."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from gspo_gym.engine.local.shared_model import SharedModel
from gspo_gym.errors import ConfigError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import adapt_policy, load_policy
from gspo_gym.policy.lora import add_lora
from gspo_gym.policy.options import apply_liger, check_options, prepare_for_training

TINY, MOE = "tiny:qwen3-64", "tiny:qwen3-moe-64"


def model_of(base: str, *, is_lora: bool) -> Any:
    policy = load_policy(base)
    return adapt_policy(policy, LoraSettings(r=2), seed=0).model if is_lora else policy.model


def scores_and_gradients(model: Any, shape: tuple[int, int] = (2, 12)) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    token_ids = torch.arange(shape[0] * shape[1]).reshape(shape) * 37 % 250
    valid = torch.ones(shape, dtype=torch.bool)
    action_mask = valid.clone()
    action_mask[:, :3] = False
    model.zero_grad()
    logprobs = LogprobComputer(model).compute(token_ids, valid, action_mask).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def layer_calls(model: Any) -> list[str]:
    """Records each start of a decoder layer's feed-forward, forward or again in the backward pass."""
    calls: list[str] = []
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for number, layer in enumerate(inner.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(f"layer {number}"))
    return calls


def test_transformers_next_names_of_checkpointing_are_used_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 5.24 on, the names without `activation` warn, which is an error here; PEFT 0.21 asks for one of them."""
    enabled: list[Any] = []
    model = model_of(TINY, is_lora=False)

    def warn(self: Any, *_: Any) -> None:
        warnings.warn(
            "`is_gradient_checkpointing` is deprecated and will be removed in v6", FutureWarning, stacklevel=2
        )

    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", warn)
    monkeypatch.setattr(PreTrainedModel, "is_gradient_checkpointing", property(warn))
    monkeypatch.setattr(
        PreTrainedModel, "activation_checkpointing_enable", lambda self, kwargs: enabled.append(kwargs), raising=False
    )
    adapted = add_lora(model, LoraSettings(r=2), seed=0)
    prepare_for_training(adapted, gradient_checkpointing=True)
    assert enabled == [{"use_reentrant": False}]


@pytest.mark.parametrize("base", [TINY, MOE])
@pytest.mark.parametrize("is_lora", [False, True])
def test_checkpointing_recomputes_each_layer_and_gives_the_same_gradients(base: str, is_lora: bool) -> None:
    plain, checkpointed = model_of(base, is_lora=is_lora), model_of(base, is_lora=is_lora)
    prepare_for_training(checkpointed, gradient_checkpointing=True)
    expected, gradients = scores_and_gradients(plain)
    calls = layer_calls(checkpointed)
    actual, others = scores_and_gradients(checkpointed)
    # after the computer's own probe: forward, and once more each in the backward pass, the last layer first
    assert calls[-4:] == ["layer 0", "layer 1", "layer 1", "layer 0"]
    assert torch.equal(actual, expected)
    assert others.keys() == gradients.keys()
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


def test_a_model_without_decoder_layers_of_the_known_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no decoder layers"):
        prepare_for_training(torch.nn.Linear(2, 2), gradient_checkpointing=True)


def test_nothing_switched_on_leaves_the_model_as_it_is() -> None:
    model = model_of(TINY, is_lora=False)
    prepare_for_training(model)
    assert not model.is_gradient_checkpointing
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's compiler, on import
def test_compiling_marks_the_learners_layers_and_neither_names_nor_the_engines_modules() -> None:
    model = model_of(TINY, is_lora=True)
    names = list(model.state_dict())
    prepare_for_training(model, torch_compile=True)
    compiled = [type(module).__name__ for module in model.modules() if module._compiled_call_impl is not None]
    assert compiled == ["Qwen3DecoderLayer"] * 2
    assert list(model.state_dict()) == names
    shared = SharedModel(model, max_model_len=32)  # compiles nothing: it would take a minute here
    assert all(module._compiled_call_impl is None for module in shared.module.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler uses deprecated parts of torch
def test_a_compiled_model_gives_the_same_scores_and_gradients_for_any_shape() -> None:
    plain, compiled = model_of(TINY, is_lora=True), model_of(TINY, is_lora=True)
    prepare_for_training(compiled, torch_compile=True, gradient_checkpointing=True)
    for shape in ((2, 12), (3, 40)):
        expected, gradients = scores_and_gradients(plain, shape)
        actual, others = scores_and_gradients(compiled, shape)
        # float32 in another order: logprobs of order 5, gradients of order 10
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=0, atol=2e-4)


def test_compiling_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"torch_compile: torch writes C\+\+ for cpu and finds no compiler \(g\+\+"):
        check_options(device="cpu", torch_compile=True)
    check_options(device="cpu")


def test_ligers_kernels_need_cuda_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="run on CUDA only, but the model is to be on 'cpu'"):
        prepare_for_training(model_of(TINY, is_lora=False), liger_kernels=True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"liger-kernel is not installed: pip install 'gspo-gym\[liger\]'"):
        check_options(device="cuda", liger_kernels=True)


class FakeLiger(ModuleType):
    """Does to transformers what Liger's `_apply_liger_kernel_to_instance` does: one norm, and the class for all."""

    MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}

    def _apply_liger_kernel_to_instance(self, model: Any, **options: bool) -> None:
        assert options == {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
        modeling_qwen3.Qwen3RMSNorm = torch.nn.Identity
        model.model.norm.forward = lambda hidden: hidden


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", FakeLiger("monkey_patch"))


@pytest.mark.usefixtures("fake_liger")
def test_ligers_kernels_are_put_into_this_model_and_no_other() -> None:
    model = model_of(TINY, is_lora=False)
    apply_liger(model)
    assert "forward" in vars(model.model.norm)
    assert modeling_qwen3.Qwen3RMSNorm.__name__ == "Qwen3RMSNorm"
    assert "forward" not in vars(model_of(TINY, is_lora=False).model.norm)


@pytest.mark.usefixtures("fake_liger")
def test_a_model_for_which_liger_has_no_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are none for models of type 'qwen3_moe', only for qwen3"):
        apply_liger(model_of(MOE, is_lora=False))


def test_flash_attention_is_refused_on_a_processor() -> None:
    with pytest.raises(ConfigError, match=r"'flash_attention_2' runs on CUDA only, the model is to be on 'cpu'"):
        check_options(device="cpu", attn_implementation="flash_attention_2")
