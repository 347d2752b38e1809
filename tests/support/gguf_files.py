"""A small GGUF file, written with the gguf package alone: a Llama with byte-level tokens, in float32 or 8 bits."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gspo_gym.policy.tiny import tiny_tokenizer

HEADS, KV_HEADS, LAYERS, HIDDEN, CONTEXT = 4, 2, 2, 64, 512
# Its tokenizer is that of the tiny models, with one merge besides: a file without any is none that llama.cpp writes.
MERGED = ("h", "i")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def llama(seed: int = 0) -> LlamaForCausalLM:
    """Return a model of the file's shape, its weights drawn from the seed."""
    config = LlamaConfig(
        vocab_size=len(_tokens()),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM, *, is_quantized: bool = False, has_template: bool = True) -> None:
    """Write the model; `is_quantized`: its matrices in Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Small Llama")
    writer.add_license("apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(_tokens()))
    _add_tokenizer(writer, has_template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        array = _as_llama_cpp(name, tensor.numpy())
        if is_quantized and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_tensor_name(name), gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_tensor_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(array: np.ndarray) -> np.ndarray:
    """Return a matrix [..., 32 * n] as Q8_0 holds it: in blocks of 32, whole multiples of a scale of 16 bits.

    llama.cpp's ggml-quants.c, quantize_row_q8_0_ref: the scale is the block's largest size / 127.
    """
    blocks = array.reshape(-1, 32)
    exact = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        steps = blocks * np.where(exact == 0, 0, 1 / exact)
    whole = np.sign(steps) * np.floor(np.abs(steps) + np.float32(0.5))  # halves go away from zero
    return (whole * exact.astype(np.float16).astype(np.float32)).reshape(array.shape)


def _tokens() -> list[tuple[str, int]]:
    """Return the texts of all tokens by id, and their kinds: 1 is normal, 3 a control token, 4 user-defined."""
    tokenizer = tiny_tokenizer()
    kinds = {number: 3 if token.special else 4 for number, token in tokenizer.added_tokens_decoder.items()}
    texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [*((text, kinds.get(number, 1)) for number, text in enumerate(texts)), ("".join(MERGED), 1)]


def _add_tokenizer(writer: gguf.GGUFWriter, has_template: bool) -> None:
    tokenizer, tokens = tiny_tokenizer(), _tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges([" ".join(MERGED)])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    if has_template:
        writer.add_chat_template(TEMPLATE)


def _tensor_name(name: str) -> str:
    found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS).get_name(name.removesuffix(".weight"))
    assert found is not None, name
    return f"{found}.weight"


def _as_llama_cpp(name: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor in the file's order: llama.cpp rotates neighbouring channels of a head, not its two halves."""
    # As convert_hf_to_gguf.py, LlamaModel.permute.
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
    if not heads:
        return array
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
