"""The local engine on other architectures than the tiny models', run packed; and when it is not, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.errors import ConfigError
from gspo_gym.types import Completion

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOW}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "mistral, sliding window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **WINDOW)),
    "gemma 2, soft cap": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **GEMMA)),
    "gemma 3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, **GEMMA)),
    "gpt-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
        )
    ),
}


def _build(make: Callable[[], Any]) -> Any:
    """The model with weights four times as large as usual, so that attention is far from uniform."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_agree_with_a_plain_forward_over_turns_longer_than_any_window(name: str, plain_logprobs: Any) -> None:
    model = _build(MODELS[name])

    async def episode(engine: LocalEngine, index: int) -> list[tuple[list[int], Completion]]:
        history, turns = [(7 * i + index) % 60 + 3 for i in range(10 + index)], []
        for turn in range(3):
            sampling = SamplingParams(max_tokens=9, stop_token_ids=(), seed=10 * index + turn)
            completion = await engine.generate(history, sampling, session_id=str(index))
            turns.append((history, completion))
            history = [*history, *completion.token_ids.tolist(), 5, 6, 7]
        return turns

    async def main() -> list[Any]:
        engine = LocalEngine(model, max_model_len=100)
        episodes = await asyncio.gather(*(episode(engine, index) for index in range(4)))
        await engine.close()
        return [turn for turns in episodes for turn in turns]

    for prompt, completion in asyncio.run(main()):
        expected = plain_logprobs(model, prompt, completion.token_ids.tolist())
        # Rounding of float32 at logits four times the usual size; measured 1e-6, and 2.4e-5 with Gemma 2's tanh.
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


def test_a_model_that_cannot_be_run_packed_says_why_and_is_run_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    engine = LocalEngine(_build(lambda: transformers.FalconForCausalLM(config)), max_model_len=16)
    reason = "FalconForCausalLM does not run through transformers' attention interface"
    assert (engine.path.name, engine.path.reason, engine.path.caching) == ("general", reason, "turns")
    assert f"{reason}; it is run in the slower, general way (caching: turns)" in caplog.text
    asyncio.run(engine.close())


def test_a_model_that_runs_in_no_way_is_refused_with_the_reasons_of_both() -> None:
    config = transformers.Qwen3Config(**SIZES, layer_types=["full_attention", "full_attention"])
    model = _build(lambda: transformers.Qwen3ForCausalLM(config))
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match=r"KeyError\('chunked_attention'\).*layers of type \['chunked_attention'\]"):
        LocalEngine(model, max_model_len=16)


def test_rotary_embeddings_that_depend_on_the_batch_are_refused_where_they_would() -> None:
    config = transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    model = _build(lambda: transformers.LlamaForCausalLM(config))
    model.config.rope_parameters["original_max_position_embeddings"] = 64
    asyncio.run(LocalEngine(model, max_model_len=64).close())
    with pytest.raises(ConfigError, match=r"dynamic rotary embedding .* beyond 64 tokens"):
        LocalEngine(model, max_model_len=65)


def test_a_model_that_disagrees_with_itself_through_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build(MODELS["llama"])
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    original = mlp.forward

    def forward_that_depends_on_its_history(self: Any, hidden: torch.Tensor) -> Any:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return original(self, hidden / self.num_calls)

    monkeypatch.setattr(mlp, "forward", forward_that_depends_on_its_history)
    both = r"depend .* on what it was run on before.*does not give the same logprobs through the engine's cache"
    with pytest.raises(ConfigError, match=both):
        LocalEngine(model, max_model_len=16)
