"""Every quantization through every engine that takes it: it is sampled with the logprobs that are scored, and learns.

The engines that sample from quantized weights are the local one, on the learner's own tensors or on a copy of them, and
the one behind HTTP, whose samples the learner scores. vLLM would sample from other weights, and is refused.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import gymnasium
import pytest
import torch
from faulty_server import FaultyServer
from guessing_endpoint import guessing
from safetensors.torch import load_file
from small_run import small_run
from tiers import slow_but

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.sections import ModelSection, RolloutSection
from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.errors import ConfigError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.saved import copy_state
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy

TINY = "tiny:qwen3-64"
KINDS = ("nf4", "int8")
# transformers' loader imports torch's compiler, which uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
# Largest difference in nats of two ways of computing a logprob: bfloat16 carries 8 bits, and int8 rounds activations to
# 8 bits as well, where a rounding apart is 1/127 of the largest.
TOLERANCES = {
    ("nf4", "float32"): 1e-4,
    ("int8", "float32"): 0.02,
    ("nf4", "bfloat16"): 0.05,
    ("int8", "bfloat16"): 0.05,
}


def change(policy: Policy, seed: int) -> None:
    """Another adapter."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(seed))


def scored(policy: Policy, sampled: list[int]) -> torch.Tensor:
    """[T] logprobs of what was sampled after tokens 72 and 105, as the learner computes them."""
    token_ids = torch.tensor([[72, 105, *sampled]])
    action_mask = torch.tensor([[False, False, *[True] * len(sampled)]])
    return (
        LogprobComputer(policy.model)
        .compute(token_ids, torch.ones_like(action_mask), action_mask)
        .logprobs[0, 2:]
        .detach()
    )


class Learner:
    """Nothing to resume."""

    def copy_state(self) -> Callable[[Path], None]:
        return copy_state({})

    def counters(self) -> dict[str, int]:
        return {}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same model by its name, in a folder, and in a checkpoint, which is copied out of its files when it loads."""
    folder, policy = tmp_path_factory.mktemp("bases"), load_policy(TINY, seed=3)
    save_policy(policy, folder / "plain")
    checkpoint = CheckpointStore(folder / "run").save(3, policy=policy, learner=Learner(), trainer_state={})
    return {"tiny": f"{TINY}@3", "folder": str(folder / "plain"), "checkpoint": str(checkpoint)}


@pytest.mark.parametrize("origin", slow_but(["tiny", "folder", "checkpoint"], {"checkpoint"}))
@pytest.mark.parametrize(
    ("kind", "dtype", "is_scored_first", "is_copy"),
    # All pairs of the two ways for each kind: two of them in float32, the others in bfloat16.
    [
        (kind, dtype, is_scored_first, is_scored_first ^ (dtype == "bfloat16"))
        for kind, dtype in TOLERANCES
        for is_scored_first in (False, True)
    ],
)
def test_the_local_engine_samples_with_the_logprobs_that_are_scored_before_and_after_updates(
    bases: dict[str, str], kind: Any, dtype: str, origin: str, is_scored_first: bool, is_copy: bool
) -> None:
    policy = adapt_policy(load_policy(bases[origin], dtype=dtype, quantization=kind), LoraSettings(r=2), seed=0)
    change(policy, 1)
    if is_scored_first:  # bitsandbytes moves the scales of int8 weights at the first forward pass
        scored(policy, [1, 2, 3])

    async def sample() -> list[float]:
        model = copy.deepcopy(policy.model) if is_copy else policy.model
        engine = LocalEngine(model, max_model_len=64, source=policy.model if is_copy else None)
        gaps = []
        for version in range(3):
            completion = await engine.generate(
                [72, 105], SamplingParams(max_tokens=20, stop_token_ids=(), seed=version)
            )
            assert set(completion.weight_version.tolist()) == {version}
            expected = scored(policy, completion.token_ids.tolist())
            gaps.append(float((expected - torch.tensor(completion.logprobs)).abs().max()))
            change(policy, 2 + version)
            await engine.pause("wait")
            await engine.apply_weights(WeightUpdate(version + 1, "shared"))
            await engine.resume(version + 1)
        await engine.close()
        return gaps

    assert max(asyncio.run(sample())) < TOLERANCES[kind, dtype]


def test_sharing_int8_weights_copies_none_of_them() -> None:
    policy = load_policy(TINY, seed=3, quantization="int8")
    engine = LocalEngine(policy.model, max_model_len=64)
    shared = dict(engine._worker.batch.shared.module.named_modules())
    layers = [(name, layer) for name, layer in policy.model.named_modules() if hasattr(layer, "init_8bit_state")]
    assert len(layers) == 2 * 7
    for name, layer in layers:
        assert shared[name] is not layer
        assert shared[name].state.CB.data_ptr() == layer.state.CB.data_ptr() == layer.weight.data_ptr()
        assert shared[name].state.SCB.data_ptr() == layer.state.SCB.data_ptr()
    asyncio.run(engine.close())


def config(folder: Path, kind: str, **changes: Any) -> RunConfig:
    """Keys with __ for the dot."""
    values: dict[str, dict[str, Any]] = small_run(
        run={"folder": str(folder)},
        model={"base": TINY, "label": "q", "trainer_mode": "qlora", "quantization": kind},
        rollout={"max_turns": 3, "max_model_len": 192},
        training={"batch_size": 8, "learning_rate": 1e-2, "lora": {"r": 2}},
        evaluation={"seeds": "0:2"},
    )
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return RunConfig.from_dict(values)


def adapter(folder: Path, step: int) -> dict[str, torch.Tensor]:
    (path,) = (folder / "q" / "checkpoints" / f"step_{step:06d}").rglob("adapter_model.safetensors")
    return load_file(path)


class Sum(TextEnv):
    """Rewards an answer by its characters, so that the episodes of a group differ."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action: str) -> Any:
        return "", sum(map(ord, action)) % 7 / 7, True, False, {}


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_plays_and_trains_on_quantized_weights_with_the_local_engine(
    kind: str, max_staleness: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "rollout__env_name": "test_quantized/Sum-v0",
        "rollout__env_config": {},
        "rollout__isolation": "thread",
    }
    if max_staleness:
        changes |= {"training__max_staleness": max_staleness, "correction__old_logprobs": "rollout"}
    register("test_quantized/Sum-v0", entry_point=Sum)
    try:
        assert run_training(config(tmp_path, kind, correction__max_engine_gap=0.05, **changes))["steps"] == 2
    finally:
        gymnasium.registry.pop("test_quantized/Sum-v0")
    learnt = {name: tensor for name, tensor in adapter(tmp_path, 2).items() if "lora_B" in name}
    assert all(bool(tensor.any()) for tensor in learnt.values())  # which begin as zeros


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_quantized_weights_on_what_an_endpoint_samples(kind: str, tmp_path: Path) -> None:
    with FaultyServer(dialect="text", write=guessing(0.5)) as server:
        changes = {"rollout__engine": "http", "rollout__rescore": True, "services__engine_urls": [server.base_url]}
        assert run_training(config(tmp_path, kind, rollout__max_model_len=256, **changes))["steps"] == 2
    assert any(bool(tensor.any()) for name, tensor in adapter(tmp_path, 2).items() if "lora_B" in name)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_would_sample_from_other_weights_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM would sample from other weights than the quantized"):
        run_training(config(tmp_path, kind, rollout__engine="vllm"))


def test_no_quantization_and_no_engine_is_left_out_here() -> None:
    assert get_args(ModelSection.model_fields["quantization"].annotation) == KINDS
    assert get_args(RolloutSection.model_fields["engine"].annotation) == ("local", "vllm", "http")
