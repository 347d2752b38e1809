"""Tokenizers built here and now, one a template family, with that family's special tokens and chat template."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"

_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
_LLAMA_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
]  # fmt: skip
_MISTRAL = {"bos_token": "<s>", "eos_token": "</s>"}
_MISTRAL_SPECIAL = [
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]  # fmt: skip
# family: (named tokens, special tokens, added tokens that are not special), as the models' own tokenizers have them
FAMILIES: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "chatml": (_QWEN, _QWEN_SPECIAL, []),
    "smollm2": (_QWEN, _QWEN_SPECIAL, []),
    "qwen25": (_QWEN, _QWEN_SPECIAL, _QWEN_ADDED[:2]),
    "qwen3": (_QWEN, _QWEN_SPECIAL, _QWEN_ADDED),
    "llama3": (_LLAMA, _LLAMA_SPECIAL, []),
    "llama31": (_LLAMA, _LLAMA_SPECIAL, []),
    "gemma2": (
        {"bos_token": "<bos>", "eos_token": "<eos>"},
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        [],
    ),
    "mistral_v1": (_MISTRAL, ["<s>", "</s>"], []),
    "mistral_v3": (_MISTRAL, _MISTRAL_SPECIAL, []),
    "deepseek_r1": (
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
        ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"],
    ),
}
_TRAINING_TEXT = (
    "The hidden number is higher than 42.\n\nGuess again:\n\n  lower, higher, lower.\n The user said the number.\n\n\n"
    'system user assistant model\n{"name": "guess", "arguments": {"number": 42}}\n seven eleven <|im_end|> <tool_call>'
)


def _bytes_backend() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merging_backend() -> Tokenizer:
    """Byte-level BPE with real merges, not split into words first, so that merges reach across line breaks."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(_TRAINING_TEXT.splitlines(keepends=True) * 4 + [_TRAINING_TEXT] * 4, trainer)
    return backend


def _sentencepiece_backend() -> Tokenizer:
    """BPE over words marked by a leading low line, bytes as a fallback, a space put before the text: as Mistral's."""
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    letters = [chr(i) for i in range(32, 127)] + ["▁", "\n"]
    pieces = dict.fromkeys(["<unk>", *byte_tokens, *letters, "▁S", "▁t"])
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "S"), ("▁", "t")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return backend


def _nfkc_backend() -> Tokenizer:
    """One token a byte of the text after NFKC normalisation, which turns full-width letters into plain ones."""
    backend = _bytes_backend()
    backend.normalizer = normalizers.NFKC()
    return backend


_BACKENDS = {
    "bytes": _bytes_backend,
    "merging": _merging_backend,
    "sentencepiece": _sentencepiece_backend,
    "nfkc": _nfkc_backend,
}


@cache
def _build(family: str, kind: str) -> Any:  # Any: transformers ships no types
    named, special, added = FAMILIES[family]
    backend = _BACKENDS[kind]()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=kind == "nfkc") for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


@pytest.fixture(scope="session")
def build_tokenizer() -> Callable[..., Any]:
    """`build_tokenizer(family, kind="bytes")`: shared between tests, so do not change what it returns."""
    return lambda family, kind="bytes": _build(family, kind)


@pytest.fixture(scope="session")
def tool_schemas() -> list[dict[str, Any]]:
    """One tool with one parameter."""
    parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    function = {"name": "guess", "description": "Guess the hidden number.", "parameters": parameters}
    return [{"type": "function", "function": function}]
