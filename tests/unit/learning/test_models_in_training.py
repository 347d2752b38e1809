"""GSPO steps on every kind of policy that `models` gives: full, LoRA, 16-bit base, 4-bit base, mixture of experts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import LoraSettings, LossSettings, OptimizerSettings, UpdateSettings
from gspo_gym.learning.update import Learner
from gspo_gym.policy.load import adapt_policy, load_policy
from gspo_gym.policy.options import prepare_for_training
from gspo_gym.policy.weight_sync import WeightSync

DENSE, MOE = "tiny:qwen3-64", "tiny:qwen3-moe-64"
LORA = LoraSettings(r=4, alpha=8)


def learner_of(model: Any, *, kind: str = "adamw_fused") -> Learner:
    return Learner(
        model,
        optimizer=OptimizerSettings(kind=kind),
        loss=LossSettings(clip_low=0.2, clip_high=0.2),
        update=UpdateSettings(learning_rate=3e-3, update_epochs=2),
        minibatch_size=6,
    )


def objective(model: Any, batch: Any) -> float:
    """What the steps are to raise: advantage times mean logprob, summed over trajectories."""
    with torch.no_grad():
        logprobs = LogprobComputer(model).compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
    counts = torch.zeros(batch.num_trajectories).index_add(0, batch.trajectory_index, batch.action_mask.sum(1).float())
    per_row = (batch.advantages * logprobs).sum(1)
    return float((per_row / counts[batch.trajectory_index]).sum())


def train(model: Any, batch: Any, *, kind: str = "adamw_fused") -> None:
    before = objective(model, batch)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    learner = learner_of(model, kind=kind)
    for _ in range(3):
        report = learner.update(batch)
        assert report.num_steps == 4  # 12 trajectories in steps of 6, twice
    assert objective(model, batch) > before + 0.5
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


@pytest.mark.parametrize("base", [DENSE, MOE])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_policy_learns(make_batch: Any, base: str, lora: LoraSettings | None, is_checkpointed: bool) -> None:
    policy = load_policy(base)
    if lora is not None:
        policy = adapt_policy(policy, lora, seed=0)
    prepare_for_training(policy.model, gradient_checkpointing=is_checkpointed)
    train(policy.model, make_batch())


def test_full_training_of_a_mixture_moves_experts_and_router(make_batch: Any) -> None:
    model = load_policy(MOE).model
    layer = model.model.layers[0].mlp
    before = [layer.experts.gate_up_proj.detach().clone(), layer.gate.weight.detach().clone()]
    train(model, make_batch())
    assert not torch.equal(layer.experts.gate_up_proj, before[0])
    assert not torch.equal(layer.gate.weight, before[1])


@pytest.mark.parametrize("base", [DENSE, MOE])
def test_a_lora_learns_on_a_bfloat16_base(make_batch: Any, base: str) -> None:
    train(adapt_policy(load_policy(base, dtype="bfloat16"), LORA, seed=0).model, make_batch())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's compiler, on import
def test_a_lora_learns_on_a_4_bit_base_with_8_bit_moments(make_batch: Any, dtype: str) -> None:
    pytest.importorskip("bitsandbytes")
    policy = load_policy(DENSE, dtype=dtype, quantization="nf4")
    train(adapt_policy(policy, LORA, seed=0).model, make_batch(), kind="adamw_8bit")


@pytest.mark.parametrize("base", [DENSE, MOE])
def test_the_engine_samples_from_a_trained_adapter_with_the_logprobs_the_learner_scores(
    make_batch: Any, base: str
) -> None:
    policy = adapt_policy(load_policy(base), LORA, seed=0)
    prepare_for_training(policy.model, gradient_checkpointing=True)

    async def sample() -> tuple[list[int], list[float]]:
        engine = LocalEngine(policy.model, max_model_len=64)
        train(policy.model, make_batch())
        await WeightSync(engine).publish(1)
        completion = await engine.generate([2, 5, 8], SamplingParams(max_tokens=6, stop_token_ids=(), seed=0))
        await engine.close()
        return list(completion.token_ids), list(completion.logprobs)

    sampled, logprobs = asyncio.run(sample())
    action_mask = torch.tensor([[False] * 3 + [True] * 6])
    token_ids = torch.tensor([[2, 5, 8, *sampled]])
    scored = LogprobComputer(policy.model).compute(token_ids, torch.ones_like(action_mask), action_mask).logprobs[0, 3:]
    torch.testing.assert_close(scored.detach(), torch.tensor(logprobs), rtol=0, atol=1e-4)
