"""Tiny models built from nothing: Qwen3 shapes with random weights over single bytes.

A training run from nothing then needs no download and fits a laptop. Reached through `models.load_policy("tiny:NAME")`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_gym.errors import UnknownNameError, nearest_name
from gspo_gym.seeding import child_seed

TINY_PREFIX = "tiny:"
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


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What a tiny model is.

    Attributes:
        num_experts: 0 for a dense one, otherwise two of them answer each token.
        has_role_tokens: whether its tokenizer has a token for each role of ChatML, and not one a letter.
        embedding_std: of the embedding's first weights.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0
    has_role_tokens: bool = False
    embedding_std: float = 0.02


_TINY_SHAPES = {
    "qwen3-64": TinyShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1),
    "qwen3-128": TinyShape(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2),
    "qwen3-256": TinyShape(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2),
    "qwen3-moe-64": TinyShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4),
    # The second versions learn in a third of the time: a turn is half as long, and the embedding is not small beside
    # what the layers add to it. The first ones stay as they are: what was trained from them can be trained again.
    "qwen3-64-v2": TinyShape(64, num_layers=2, num_heads=2, num_kv_heads=1, has_role_tokens=True, embedding_std=0.1),
    "qwen3-128-v2": TinyShape(128, num_layers=4, num_heads=4, num_kv_heads=2, has_role_tokens=True, embedding_std=0.07),
}


def list_tiny() -> tuple[str, ...]:
    """Return the names of models that `load_policy` builds from nothing.

    >>> list_tiny()[0]
    'tiny:qwen3-128'
    """
    return tuple(sorted(TINY_PREFIX + name for name in _TINY_SHAPES))


def parse_tiny(base: str) -> tuple[str, int | None]:
    """Return the shape's name, and the seed or None, in `tiny:NAME@SEED`.

    Raises:
        UnknownNameError: there is no such tiny model.

    >>> parse_tiny("tiny:qwen3-64@7")
    ('qwen3-64', 7)
    """
    match = re.fullmatch(r"tiny:(?P<name>[^@]*)(?:@(?P<seed>\d+))?", base)
    if match is None or match["name"] not in _TINY_SHAPES:
        raise UnknownNameError(
            f"model {base!r}: there is no tiny model of that name; "
            + nearest_name(base.partition("@")[0], list_tiny())
            + " (tiny:NAME@SEED fixes the seed of its weights)"
        )
    return match["name"], int(match["seed"]) if match["seed"] else None


def build_tiny(name: str, seed: int) -> Any:
    """Build the model of that shape (Any: transformers is untyped), its weights drawn from `seed` alone."""
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights, which are replaced below
        model = tiny_skeleton(name)
    _initialize(model, seed, embedding_std=_TINY_SHAPES[name].embedding_std)
    model.name_or_path = f"{TINY_PREFIX}{name}@{seed}"  # PEFT copies it into adapter_config.json as the base to rebuild
    return model


def tiny_skeleton(name: str) -> Any:
    """Return the model of that shape, as transformers makes it from the configuration (Any: untyped)."""
    config_class, model_class, sizes = _tiny_config(_TINY_SHAPES[name], tiny_tokenizer(name))
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
    if _TINY_SHAPES[name].has_role_tokens:
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
