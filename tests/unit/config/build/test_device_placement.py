"""Mistakes of device placement, found without an accelerator; and the engine on one, where there is one.

Two stand-ins play the part of the device. What a factory makes without naming a device lands on `meta` (torch's default
device, which is each thread's own), where it cannot be computed with. And what comes from numpy, or is fetched by
`.cpu()`, is marked: mixed with the model's own tensors it fails, as a CPU tensor would on CUDA, until `.to(device)`;
and only such marked tensors become numpy arrays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local import engine as local
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.local.kv_store import PlainStore
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.types import Completion

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]  # nothing to skip where there is no GPU
MODELS: dict[str, Callable[[], Any]] = {
    "packed": lambda: load_policy("tiny:qwen3-64", seed=1).model,
    "general": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ).eval(),
    "general, without a cache": lambda: transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    ).eval(),
}
PATHS = {
    "Qwen3ForCausalLM": ("packed", "turns"),
    "FalconForCausalLM": ("general", "turns"),
    "OpenAIGPTLMHeadModel": ("general", "none"),
}
SAMPLINGS = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "min_tokens": 3, "stop_token_ids": (5, 6, 7, 8)},
    {"temperature": 0.0},
]
# Tokens of eight sessions: at last three, then two of the eight slots are in work, which are read in other ways.
LENGTHS = [9, 3, 7, 3, 3, 3, 3, 9]


class HostTensor(torch.Tensor):
    """A tensor in the host's memory: computes with its like only, and is copied to a device by `.to(device)`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.to:
            return _unmarked(result)
        others = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if any(type(other) is not HostTensor and other.ndim for other in others):
            raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device")
        return result


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(torch.Tensor)


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(HostTensor)


@pytest.fixture
def emulated_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """See the module's docstring; also in the engine's thread, with the layout that a GPU gets."""
    from_numpy, cpu, to_numpy, run = torch.from_numpy, torch.Tensor.cpu, torch.Tensor.numpy, local._Worker.run

    def numpy_of_host_tensors_only(self: torch.Tensor, **options: Any) -> Any:
        if type(self) is not HostTensor:
            raise TypeError("can't convert a device's tensor to numpy: use Tensor.cpu() first")
        with torch._C.DisableTorchFunction():
            return to_numpy(self, **options)

    def cpu_as_a_host_tensor(self: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return _marked(cpu(self))

    def run_with_meta_as_the_default(self: Any) -> None:
        with torch.device("meta"):
            run(self)

    monkeypatch.setattr(torch, "from_numpy", lambda array: _marked(from_numpy(array)))
    monkeypatch.setattr(torch.Tensor, "cpu", cpu_as_a_host_tensor)
    monkeypatch.setattr(torch.Tensor, "numpy", numpy_of_host_tensors_only)
    monkeypatch.setattr(local._Worker, "run", run_with_meta_as_the_default)
    monkeypatch.setattr("gspo_gym.engine.local.kv_store.store_type", lambda *_: PlainStore)
    with torch.device("meta"):
        yield


async def _play(engine: LocalEngine, index: int) -> list[tuple[list[int], Completion]]:
    """Two turns of one session."""
    history, turns = [(7 * i + index) % 60 + 3 for i in range(20)], []
    for turn in range(2):
        sampling = SamplingParams(
            **{"max_tokens": LENGTHS[index], "stop_token_ids": (), "seed": turn, **SAMPLINGS[index % len(SAMPLINGS)]}
        )
        completion = await engine.generate(history, sampling, session_id=str(index))
        turns.append((history, completion))
        history = [*history, *completion.token_ids.tolist(), 5, 6, 7]
    return turns


async def _play_under_two_versions(model: Any) -> list[tuple[list[int], Completion]]:
    """All that an engine does; returns the turns of the plainest episode under the second version."""
    engine = LocalEngine(model, max_model_len=64, max_batch_size=len(LENGTHS))
    assert (engine.path.name, engine.path.caching) == PATHS[type(model).__name__]  # not led astray by a probe
    await asyncio.gather(*(_play(engine, index) for index in range(len(LENGTHS))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    await WeightSync(engine).publish(1)
    turns, *_ = await asyncio.gather(*(_play(engine, index) for index in range(len(LENGTHS))))
    await engine.end_session("0")
    await engine.close()
    return turns


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """Built before anything is emulated."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MODELS[request.param]()


def _assert_exact(model: Any, turns: list[tuple[list[int], Completion]], device: str) -> None:
    for prompt, completion in turns:
        token_ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=device)
        with torch.no_grad():
            logprobs = model(token_ids).logits[0].float().log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, token_ids.shape[1] - 1, device=device)
        expected = logprobs[rows, token_ids[0, len(prompt) :]].cpu().numpy()
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)  # the promise in float32


def test_the_engine_makes_every_tensor_on_the_models_device(model: Any, emulated_device: None) -> None:
    _assert_exact(model, asyncio.run(_play_under_two_versions(model)), "cpu")


def test_the_scorer_makes_every_tensor_on_the_models_device(emulated_device: None) -> None:
    with torch.device("cpu"):
        model = MODELS["packed"]()
        token_ids = torch.arange(3, 43).reshape(2, 20)
        attention_mask, action_mask = torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 20, dtype=torch.bool)
        attention_mask[1, 15:] = False
        action_mask[:, 5:9] = True
    LogprobComputer(model).compute(token_ids, attention_mask, action_mask).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "mistake",
    [
        lambda tensor: tensor + torch.zeros(3),
        lambda tensor: tensor + torch.from_numpy(np.ones(3, np.float32)),
        lambda tensor: tensor.gather(0, torch.from_numpy(np.array([1]))),
        lambda tensor: torch.where(tensor > 0, tensor, torch.full((3,), 2.0)),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.cpu() + tensor,
    ],
)
def test_the_emulation_finds_mistakes(mistake: Callable[[torch.Tensor], object], emulated_device: None) -> None:
    tensor = torch.ones(3, device="cpu")
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        mistake(tensor)
    correct = tensor + torch.from_numpy(np.ones(3, np.float32)).to(tensor.device)
    assert correct.cpu().numpy().tolist() == [2, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_the_engine_agrees_with_a_plain_forward_on_every_device_there_is(model: Any, device: str) -> None:
    model.to(device)
    _assert_exact(model, asyncio.run(_play_under_two_versions(model)), device)
