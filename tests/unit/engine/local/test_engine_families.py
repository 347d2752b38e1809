"""The local engine on model families of every kind: packed, with the model's own cache, or without any; always exact.

The models are real classes of transformers with few and small layers. Windows and chunks are shorter than the
sequences, so that every cache has to drop something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.errors import ConfigError
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.types import Completion

MAX_LEN = 64
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **TOKENS}
HEADS = {**SMALL, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 128}
GROUPED = {**HEADS, "num_key_value_heads": 2}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **TOKENS}
EXPERTS = {"num_experts_per_tok": 1, "num_local_experts": 2}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
WINDOW = {"sliding_window": 8}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOW}

Make = Callable[[], Any]

PACKED: dict[str, Make] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "mistral, sliding window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, **WINDOW)),
    "gemma 2, soft cap": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, **GEMMA)),
    "gemma 3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED, **GEMMA)),
    "gpt-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**HEADS)),
    "olmo": lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**GROUPED)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**SMALL, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128)
    ),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**GROUPED)),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **HEADS, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
            num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        )
    ),
}  # fmt: skip
# The model's own cache goes on from any number of tokens.
TURNS: dict[str, Make] = {
    "biogpt": lambda: hf.BioGptForCausalLM(hf.BioGptConfig(**HEADS)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **TOKENS)),
    "codegen": lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(**GPT, n_ctx=128, rotary_dim=4)),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**SMALL, num_attention_heads=4)),
    "falcon, alibi": lambda: hf.FalconForCausalLM(hf.FalconConfig(**SMALL, num_attention_heads=4, alibi=True)),
    "falcon-h1": lambda: hf.FalconH1ForCausalLM(hf.FalconH1Config(**GROUPED, mamba_d_ssm=64, **MAMBA2)),
    "gpt-j": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=4)),
    "gpt-neo, local attention": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, window_size=8,
            max_position_embeddings=128, attention_types=[[["global", "local"], 1]], **TOKENS,
        )
    ),
    "gpt-oss, sinks": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**GROUPED, head_dim=8, sliding_window=8, **EXPERTS, **ROPE)
    ),
    "granite hybrid": lambda: hf.GraniteMoeHybridForCausalLM(
        hf.GraniteMoeHybridConfig(
            **GROUPED, layer_types=["mamba", "attention"], shared_intermediate_size=16, **EXPERTS, **MAMBA2
        )
    ),
    "lfm2, convolutions": lambda: hf.Lfm2ForCausalLM(
        hf.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    ),
    "llama 4, chunks": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **GROUPED, head_dim=8, intermediate_size_mlp=48, attention_chunk_size=8, no_rope_layers=[1, 0],
            **EXPERTS, **ROPE,
        )
    ),
    "mamba 2": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(**SMALL, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=8)
    ),
    "mpt": lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=128)),
    "nemotron-h": lambda: hf.NemotronHForCausalLM(
        hf.NemotronHConfig(
            **{**GROUPED, "num_hidden_layers": None}, layer_types=["mamba", "attention"], mamba_num_heads=4,
            mamba_head_dim=16, ssm_state_size=8, chunk_size=8, n_groups=1, head_dim=8,
        )
    ),
    "olmo hybrid": lambda: hf.OlmoHybridForCausalLM(hf.OlmoHybridConfig(**GROUPED, **MIXED)),
    "qwen3-next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **GROUPED, **MIXED, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
    "rwkv": lambda: hf.RwkvForCausalLM(
        hf.RwkvConfig(**SMALL, context_length=128, attention_hidden_size=32, intermediate_size=48, rescale_every=0)
    ),
    "stablelm": lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**GROUPED)),
    "xglm": lambda: hf.XGLMForCausalLM(
        hf.XGLMConfig(
            vocab_size=64, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=128,
        )
    ),
    "zamba 2": lambda: hf.Zamba2ForCausalLM(
        hf.Zamba2Config(
            **HEADS, num_key_value_heads=4, layers_block_type=["mamba", "hybrid"], mamba_d_state=8, mamba_headdim=16,
            mamba_ngroups=1, n_mamba_heads=4, chunk_size=8, num_mem_blocks=1, use_mamba_kernels=False,
        )
    ),
}  # fmt: skip
# It goes on from a single token only: a second turn that is read into it loses the state of the first.
SINGLE_TOKENS: dict[str, Make] = {
    "jamba": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(
            **GROUPED, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            num_experts=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
        )
    ),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**SMALL, state_size=4)),
    "falcon-mamba": lambda: hf.FalconMambaForCausalLM(hf.FalconMambaConfig(**SMALL, state_size=4)),
}  # fmt: skip
# There is none, it belongs to the model and not to a sequence, or what it gives differs from a plain forward.
UNCACHED: dict[str, Make] = {
    "openai-gpt": lambda: hf.OpenAIGPTLMHeadModel(
        hf.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    ),
    "recurrent gemma": lambda: hf.RecurrentGemmaForCausalLM(
        hf.RecurrentGemmaConfig(
            **SMALL, num_attention_heads=4, num_key_value_heads=1, intermediate_size=48, lru_width=32,
            attention_window_size=8, block_types=["recurrent", "attention"],
        )
    ),
    "bamba": lambda: hf.BambaForCausalLM(hf.BambaConfig(**GROUPED, attn_layer_indices=[1], **MAMBA2)),
    "minimax": lambda: hf.MiniMaxForCausalLM(
        hf.MiniMaxConfig(**GROUPED, **MIXED, head_dim=8, block_size=8, **EXPERTS)
    ),
    "xlstm": lambda: hf.xLSTMForCausalLM(
        hf.xLSTMConfig(**SMALL, embedding_dim=32, num_blocks=2, num_heads=2, use_cache=False)  # its cache raises
    ),
}  # fmt: skip
FAMILIES = {
    **{name: (make, "packed", "turns") for name, make in PACKED.items()},
    **{name: (make, "general", "turns") for name, make in TURNS.items()},
    **{name: (make, "general", "tokens") for name, make in SINGLE_TOKENS.items()},
    **{name: (make, "general", "none") for name, make in UNCACHED.items()},
}

Turns = list[tuple[list[int], Completion]]


def _build(make: Make) -> Any:
    """The model with weights twice as large as usual, so that what came before matters."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model


async def _play(engine: LocalEngine, index: int) -> Turns:
    """Two turns of one session."""
    history, turns = [(7 * i + index) % 60 + 3 for i in range(11 + 3 * index)], []
    for turn in range(2):
        sampling = SamplingParams(max_tokens=4 + index, stop_token_ids=(), seed=10 * index + turn)
        completion = await engine.generate(history, sampling, session_id=str(index))
        turns.append((history, completion))
        history = [*history, *completion.token_ids.tolist(), 5, 6, 7]
    await engine.end_session(str(index))
    return turns


def _tokens(turns: Turns) -> list[list[int]]:
    return [completion.token_ids.tolist() for _, completion in turns]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_exact_before_and_after_an_update_whatever_else_runs(name: str, plain_logprobs: Any) -> None:
    make, path, caching = FAMILIES[name]
    model = _build(make)

    def assert_exact(turns: Turns) -> None:
        for prompt, completion in turns:
            expected = plain_logprobs(model, prompt, completion.token_ids.tolist())
            # The promise. Measured: 1e-6, and 2e-5 with state-space models.
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)

    async def main() -> None:
        engine = LocalEngine(model, max_model_len=MAX_LEN)
        assert (engine.path.name, engine.path.caching) == (path, caching)
        assert (engine.path.reason is None) == (path == "packed")
        assert engine.capabilities.reuses_prefixes == (caching == "turns")
        alone = await _play(engine, 0)
        together = await asyncio.gather(*(_play(engine, index) for index in range(3)))
        assert _tokens(together[0]) == _tokens(alone)
        for turns in together:
            assert_exact(turns)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        await WeightSync(engine).publish(1)
        updated = await _play(engine, 0)
        assert_exact(updated)
        prompt, before = alone[0]
        assert np.abs(plain_logprobs(model, prompt, before.token_ids.tolist()) - before.logprobs).max() > 0.01
        await engine.close()

    asyncio.run(main())


def test_a_model_that_looks_ahead_is_refused_because_it_has_no_policy_to_sample_from() -> None:
    model = _build(lambda: hf.BertLMHeadModel(hf.BertConfig(**HEADS)))
    with pytest.raises(ConfigError, match="BertLMHeadModel depend on later tokens"):
        LocalEngine(model, max_model_len=MAX_LEN)


def test_a_model_that_cannot_be_run_packed_says_why_and_is_run_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    config = hf.FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    engine = LocalEngine(_build(lambda: hf.FalconForCausalLM(config)), max_model_len=16)
    reason = "FalconForCausalLM does not run through transformers' attention interface"
    assert (engine.path.name, engine.path.reason, engine.path.caching) == ("general", reason, "turns")
    assert f"{reason}; it is run in the slower, general way (caching: turns)" in caplog.text
    asyncio.run(engine.close())


def test_a_model_that_runs_in_no_way_is_refused_with_the_reasons_of_both() -> None:
    config = hf.Qwen3Config(**GROUPED, layer_types=["full_attention", "full_attention"])
    model = _build(lambda: hf.Qwen3ForCausalLM(config))
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match=r"KeyError\('chunked_attention'\).*layers of type \['chunked_attention'\]"):
        LocalEngine(model, max_model_len=16)


def test_rotary_embeddings_that_depend_on_the_batch_are_refused_where_they_would() -> None:
    config = hf.LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    model = _build(lambda: hf.LlamaForCausalLM(config))
    model.config.rope_parameters["original_max_position_embeddings"] = 64
    asyncio.run(LocalEngine(model, max_model_len=64).close())
    with pytest.raises(ConfigError, match=r"dynamic rotary embedding .* beyond 64 tokens"):
        LocalEngine(model, max_model_len=65)


def test_a_model_that_disagrees_with_itself_through_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build(PACKED["llama"])
    mlp = hf.models.llama.modeling_llama.LlamaMLP
    original = mlp.forward

    def forward_that_depends_on_its_history(self: Any, hidden: torch.Tensor) -> Any:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return original(self, hidden / self.num_calls)

    monkeypatch.setattr(mlp, "forward", forward_that_depends_on_its_history)
    both = r"depend .* on what it was run on before.*does not give the same logprobs through the engine's cache"
    with pytest.raises(ConfigError, match=both):
        LocalEngine(model, max_model_len=16)
