"""Tiny models built from nothing: Qwen3 shapes with random weights over single bytes.

A training run from nothing then needs no download and fits a laptop. Reached through `models.load_policy("tiny:NAME")`.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_gym.policy.bases import TINY_PREFIX, TINY_SHAPES, TinyShape
from gspo_gym.seeding import child_seed

_MAX_POSITION = 4096
_ROLES = ("system", "user", "assistant", "tool")

# Qwen2.5's ChatML, with three departures, each to spare a byte-level model hundreds of tokens: no default system
# prompt; a tool is one line (name, parameters with types, description) and not its JSON schema; a tool's answer has a
# role of its own instead of a <tool_response> element inside a user message. Reasoning is kept in every turn.
_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- 'Tools, used as <tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>' }}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{{- '\\n' + function.name + '(' }}
{%- for name, schema in ((function.parameters | default({})).properties | default({})).items() %}
{{- ('' if loop.first else ', ') + name + (': ' + (schema.type | string) if schema.type is defined else '') }}
{%- endfor %}
{{- ')' + (' ' + function.description if function.description else '') }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def build_tiny(name: str, seed: int) -> Any:
    """Build the model of that shape (Any: transformers is untyped), its weights drawn from `seed` alone."""
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights, which are replaced below
        model = tiny_skeleton(name)
    _initialize(model, seed, embedding_std=TINY_SHAPES[name].embedding_std)
    model.name_or_path = f"{TINY_PREFIX}{name}@{seed}"  # PEFT copies it into adapter_config.json as the base to rebuild
    return model


def tiny_skeleton(name: str) -> Any:
    """Return the model of that shape, as transformers makes it from the configuration (Any: untyped)."""
    config_class, model_class, sizes = _tiny_config(TINY_SHAPES[name], tiny_tokenizer(name))
    return model_class(config_class(**sizes))


def tiny_tokenizer(name: str = "qwen3-64") -> Any:
    """Build the tokenizer of the model of that shape: ids 0..255 are the bytes of UTF-8, then come special tokens.

    A transformers `PreTrainedTokenizerFast` (Any: untyped). Padding is <|endoftext|>, end of turn <|im_end|>; the tags
    of tool calls and reasoning, and in a second version the roles (as in Qwen3's own vocabulary), are single tokens
    that decoding keeps.

    >>> tiny_tokenizer()("a<|im_end|>")["input_ids"]
    [97, 258]
    """
    symbols = _byte_symbols()
    backend = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    if TINY_SHAPES[name].has_role_tokens:
        backend.add_tokens([AddedToken(role, normalized=False, special=False, single_word=True) for role in _ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_POSITION,
    )


def _byte_symbols() -> list[str]:
    # Byte-level BPE of GPT-2: unprintable bytes have printable stand-ins.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: chr(256 + rank) for rank, byte in enumerate(unprintable)}
    return [stand_ins.get(byte, chr(byte)) for byte in range(256)]


def _tiny_config(shape: TinyShape, tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "intermediate_size": 3 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "max_position_embeddings": _MAX_POSITION,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not shape.num_experts:
        return Qwen3Config, Qwen3ForCausalLM, sizes
    sizes |= {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.hidden_size,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig, Qwen3MoeForCausalLM, sizes


def _initialize(model: Any, seed: int, *, embedding_std: float) -> None:
    """Draw every weight anew, each from a generator that its name seeds: no global state or order matters.

    Matrices get variance 1 / fan_in, those that write into the residual stream 1 / (fan_in * 2 * layers) (GPT-2's depth
    scaling). The tied embedding is small, which makes the first predictions nearly uniform: a logit has a standard
    deviation of about sqrt(hidden) * embedding_std.
    """
    depth_scale = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            if "embed_tokens" in name:
                std = embedding_std
            else:
                std = parameter.shape[-1] ** -0.5  # fan_in is the last axis, of fused expert weights too
                std *= depth_scale if "o_proj" in name or "down_proj" in name else 1.0
            draw = torch.Generator().manual_seed(child_seed(seed, "tiny", name))
            parameter.normal_(0.0, std, generator=draw)
