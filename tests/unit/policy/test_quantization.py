"""4-bit weights: what is quantized, that adapters above them learn, and that a saved policy is the trained one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.errors import ConfigError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy
from gspo_gym.policy.options import prepare_for_training
from gspo_gym.policy.quantization import is_quantized, quantization_of

TINY = "tiny:qwen3-64"
# transformers' loader imports torch's compiler, which uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


@pytest.fixture
def quantized() -> Policy:
    return load_policy(TINY, seed=3, quantization="nf4")


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = policy.model(torch.arange(12)[None]).logits
    return output


def learn(policy: Policy) -> None:
    """Something other than nothing in the adapter."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))


def test_linear_layers_become_nf4_with_double_quantization_and_the_rest_keeps_the_dtype(quantized: Policy) -> None:
    weights = dict(quantized.model.named_parameters())
    coded = {name.split(".")[-2] for name, weight in weights.items() if weight.dtype == torch.uint8}
    assert coded == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {weight.dtype for weight in weights.values()} == {torch.uint8, torch.float32}
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    assert query.numel() == 64 * 64 // 2  # two numbers in a byte
    assert (query.quant_state.quant_type, query.quant_state.nested) == ("nf4", True)
    assert is_quantized(quantized.model)
    assert not is_quantized(load_policy(TINY).model)
    assert quantized.base == f"{TINY}@3"


def test_the_4_bit_weights_are_the_nearest_of_16_levels(quantized: Policy) -> None:
    import bitsandbytes

    exact = load_policy(TINY, seed=3).model.model.layers[0].self_attn.q_proj.weight.detach()
    weight = quantized.model.model.layers[0].self_attn.q_proj.weight
    restored = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    # Blocks of 64 are scaled by their largest magnitude; the widest gap between two levels of NF4 is 0.304 of that, so
    # a number is off by half of it, and a little more because the scales are quantized too (8 bits).
    largest = exact.reshape(-1, 64).abs().amax(1, keepdim=True)
    assert float(((restored.reshape(-1, 64) - exact.reshape(-1, 64)).abs() / largest).max()) < 0.304 / 2 + 0.02


def test_linear_layers_become_int8_each_row_with_its_own_scale() -> None:
    policy = load_policy(TINY, seed=3, quantization="int8")
    assert quantization_of(policy.model) == "int8"
    exact = load_policy(TINY, seed=3).model.model.layers[0].self_attn.q_proj.weight.detach()
    layer = policy.model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.int8
    # Each row is scaled so that its largest magnitude is 127: no number is off by more than half a step, and the scale
    # is rounded, as the weights are, to float16 (11 bits).
    largest = exact.abs().amax(1, keepdim=True)
    restored = layer.weight.data.float() * layer.weight.SCB.float()[:, None] / 127
    assert float(((restored - exact).abs() / largest).max()) < 0.5 / 127 + 2**-10
    prompt = torch.arange(12)[None]
    with torch.no_grad():
        alone = policy.model(prompt).logits
        beside = policy.model(torch.cat([prompt, prompt.flip(1)])).logits[:1]
    assert torch.equal(alone, beside), "no token's logits depend on its neighbours in the batch"


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_reach_every_adapter_also_after_sampling_in_eval_mode(
    kind: Literal["nf4", "int8"], is_checkpointed: bool
) -> None:
    policy = adapt_policy(load_policy(TINY, seed=3, quantization=kind), LoraSettings(r=2), seed=0)
    prepare_for_training(policy.model, gradient_checkpointing=is_checkpointed)
    learn(policy)
    logits(policy)  # on some processors this would repack the weights for a kernel without a backward pass
    computer = LogprobComputer(policy.model)
    valid = torch.ones(2, 12, dtype=torch.bool)
    action_mask = valid.clone()
    action_mask[:, :3] = False
    computer.compute(torch.arange(24).reshape(2, 12), valid, action_mask).logprobs.sum().backward()
    trainable = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 2 * 7  # two factors on seven matrices in two layers
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert [name for name, p in trainable.items() if p.grad is None or not bool(p.grad.any())] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "other"), [("nf4", "int8"), ("int8", "nf4")])
def test_a_saved_adapter_comes_back_on_the_quantized_weights_it_was_trained_on(
    kind: Literal["nf4", "int8"], other: Literal["nf4", "int8"], dtype: str, tmp_path: Path
) -> None:
    policy = adapt_policy(load_policy(TINY, seed=3, dtype=dtype, quantization=kind), LoraSettings(r=2), seed=0)
    learn(policy)
    save_policy(policy, tmp_path)
    assert not (tmp_path / "base").exists()
    loaded = load_policy(str(tmp_path), dtype=dtype)
    assert quantization_of(loaded.model) == kind
    assert torch.equal(logits(loaded), logits(policy))
    going_on = adapt_policy(loaded, LoraSettings(r=2), seed=9)
    assert torch.equal(logits(going_on), logits(policy))
    with pytest.raises(ConfigError, match=f"the adapter was trained on {kind} weights, expected {other}"):
        load_policy(str(tmp_path), dtype=dtype, quantization=other)


def test_an_adapter_of_16_or_32_bit_weights_can_go_on_on_4_bit_ones(tmp_path: Path) -> None:
    policy = adapt_policy(load_policy(TINY), LoraSettings(r=2), seed=0)
    save_policy(policy, tmp_path)
    assert is_quantized(load_policy(str(tmp_path), quantization="nf4").model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_samples_from_a_4_bit_policy_with_the_logprobs_it_scores(dtype: str) -> None:
    policy = adapt_policy(load_policy(TINY, dtype=dtype, quantization="nf4"), LoraSettings(r=2), seed=0)
    learn(policy)

    async def sample() -> tuple[list[int], list[float]]:
        engine = LocalEngine(policy.model, max_model_len=64)
        completion = await engine.generate([72, 105], SamplingParams(max_tokens=6, stop_token_ids=(), seed=0))
        await engine.close()
        return list(completion.token_ids), list(completion.logprobs)

    sampled, logprobs = asyncio.run(sample())
    token_ids = torch.tensor([[72, 105, *sampled]])
    action_mask = torch.tensor([[False, False, *[True] * 6]])
    scored = LogprobComputer(policy.model).compute(token_ids, torch.ones_like(action_mask), action_mask).logprobs[0, 2:]
    tolerance = 1e-4 if dtype == "float32" else 0.05  # bfloat16 carries 8 bits
    torch.testing.assert_close(scored.detach(), torch.tensor(logprobs), rtol=0, atol=tolerance)


def test_without_bitsandbytes_4_bits_are_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"\(qlora\) need bitsandbytes.*pip install 'gspo-gym\[quant\]'"):
        load_policy("no/such-model", quantization="nf4")


def test_a_device_that_bitsandbytes_does_not_know_is_refused_before_anything_loads() -> None:
    with pytest.raises(ConfigError, match="expected a device among cpu, cuda, xpu, got 'meta'"):
        load_policy("no/such-model", device="meta", quantization="nf4")
