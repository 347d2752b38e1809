"""Memory of a learner rank and of a vLLM replica, on paper: arithmetic on a model's sizes, without the model.

Counted are tensors. Not counted: CUDA's context (0.5 to 1 GiB a process), NCCL's buffers and holes in the allocator;
so a GPU counts as full at `USABLE` of its memory. Never compared with a GPU; what a processor holds is tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from gspo_gym.errors import ConfigError

USABLE = 0.9  # of a GPU; the fraction that vLLM takes by default, too
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER = 4  # bytes of trained weights, their gradients and each of AdamW's moments: all float32 here
# Types of transformers with the layers that are counted below.
_KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class Weight(NamedTuple):
    """A parameter; a vector has one column. `is_linear`: of a decoder layer's linear map, which LoRA adapts."""

    rows: int
    columns: int = 1
    is_linear: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense decoder, by the names of transformers' configurations."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool
    has_qk_norm: bool = True
    has_qkv_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Return the sizes in a config.json (Any: as read).

        Raises:
            ConfigError: a kind of model whose parameters are not counted here, such as a mixture of experts.
        """
        kind = config.get("model_type")
        if kind not in _KNOWN_TYPES or config.get("attention_bias") or config.get("mlp_bias"):
            bias = " with biases" if kind in _KNOWN_TYPES else ""
            raise ConfigError(
                f"model type {kind!r}{bias}: its memory is not counted here, only that of {', '.join(_KNOWN_TYPES)}"
            )
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return cls(
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            has_qk_norm=kind == "qwen3",
            has_qkv_bias=kind == "qwen2",
        )

    def layer(self) -> tuple[Weight, ...]:
        """Return the parameters of a decoder layer: attention, feed-forward, norms."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.q_size, self.kv_size
        linear = [(q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f)]
        vectors = [h, h, *([self.head_dim] * 2 if self.has_qk_norm else []), *([q, kv, kv] * self.has_qkv_bias)]
        return (*(Weight(*sizes, is_linear=True) for sizes in linear), *map(Weight, vectors))

    def root(self) -> tuple[Weight, ...]:
        """Return the parameters outside of the layers: embedding, last norm, and the head unless it is tied."""
        embedding = Weight(self.vocab_size, self.hidden_size)
        return (embedding, Weight(self.hidden_size), *([] if self.is_tied else [embedding]))

    @property
    def q_size(self) -> int:
        """Return the numbers of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the numbers of a token's keys, which are as many as its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Return the number of the model's parameters, a tied one once."""
        return _numel(self.root()) + self.num_layers * _numel(self.layer())


# From the config.json of each model: Qwen/Qwen3-*, and meta-llama/Llama-3.3-70B-Instruct.
SHAPES: Mapping[str, ModelShape] = {
    "Qwen3-0.6B": ModelShape(1024, 28, 16, 8, 128, 3072, 151936, is_tied=True),
    "Qwen3-1.7B": ModelShape(2048, 28, 16, 8, 128, 6144, 151936, is_tied=True),
    "Qwen3-4B": ModelShape(2560, 36, 32, 8, 128, 9728, 151936, is_tied=True),
    "Qwen3-8B": ModelShape(4096, 36, 32, 8, 128, 12288, 151936, is_tied=False),
    "Qwen3-14B": ModelShape(5120, 40, 40, 8, 128, 17408, 151936, is_tied=False),
    "Qwen3-32B": ModelShape(5120, 64, 64, 8, 128, 25600, 151936, is_tied=False),
    "Llama-3.3-70B-Instruct": ModelShape(8192, 80, 64, 8, 128, 28672, 128256, is_tied=False, has_qk_norm=False),
}


@dataclass(frozen=True, slots=True)
class Learning:
    """How a model learns, as far as memory depends on it.

    Attributes:
        trained: all weights, an adapter, or an adapter on quantized weights.
        dtype: of frozen weights and of activations; trained weights are float32.
        num_tokens: padded tokens of a micro-batch.
        logits_bytes: of the logits that exist at once.
        keeps_reference: a frozen copy of all weights is in the process, too.
        compute_dtype: of gathered weights and of activations; None: `dtype`.
        sequence_parallel: ranks that compute a micro-batch together, each a part of its tokens.
    """

    trained: Literal["full", "lora", "qlora"] = "full"
    dtype: str = "float32"
    lora_rank: int = 16
    quantization: Literal["nf4", "int8"] = "nf4"
    has_8bit_moments: bool = False
    gradient_checkpointing: bool = False
    num_tokens: int = 16384
    logits_bytes: int = 512 << 20
    keeps_reference: bool = False
    compute_dtype: str | None = None
    sequence_parallel: int = 1

    @property
    def compute_size(self) -> int:
        """Return the bytes of a number that is computed with."""
        return BYTES[self.compute_dtype or self.dtype]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a learner rank, at most, by what they are for.

    Attributes:
        gathered: of other ranks' weights while a layer computes, and of gradients before they are summed.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return int(sum(asdict(self).values()))


def rank_memory(shape: ModelShape, learning: Learning, num_ranks: int = 1, rank: int = 0) -> RankMemory:
    """Return what a rank of `num_ranks` holds; rank 0 holds most.

    Sharding is torch's `fully_shard`: a layer at a time, each parameter cut along its first axis as `torch.chunk` cuts
    it, and gathered while its layer computes. Trained weights, gradients and AdamW's two moments take 4 bytes each: 16
    a parameter, as in ZeRO (arXiv 1910.02054, section 3.1, whose 16-bit copies are the gathered ones here).

    Raises:
        ConfigError: quantized weights on several ranks.
    """
    if learning.trained == "qlora" and num_ranks > 1:
        raise ConfigError(f"quantized weights are not sharded: qlora learns on 1 rank, not on {num_ranks}")
    layer, root = shape.layer(), shape.root()
    adapter = [] if learning.trained == "full" else _adapter(layer, learning.lora_rank)
    trained = [*layer * shape.num_layers, *root] if learning.trained == "full" else adapter * shape.num_layers
    held = sum(_part(weight, num_ranks, rank) for weight in trained)
    base = sum(_part(weight, num_ranks, rank) for weight in [*layer * shape.num_layers, *root])
    frozen = base * BYTES[learning.dtype]
    if learning.trained == "qlora":
        frozen = _quantized_bytes(shape, learning)
    moments = [_moment_bytes(weight, num_ranks, rank, learning.has_8bit_moments) for weight in trained]
    return RankMemory(
        weights=held * _MASTER + (0 if learning.trained == "full" else frozen),
        gradients=held * _MASTER,
        optimizer=2 * sum(moments) + 4 * len(trained),  # AdamW's step is a float32 number a parameter
        reference=frozen if learning.keeps_reference else 0,
        gathered=_gathered(shape, learning, adapter) if num_ranks > 1 else 0,
        activations=activation_bytes(shape, learning),
        logits=max(learning.logits_bytes, 4 * shape.vocab_size),  # at least one token's are computed at a time
    )


def _part(weight: Weight, num_ranks: int, rank: int) -> int:
    """Return the numbers of a parameter on a rank, by `torch.chunk`: equal chunks, and the last ones short or empty."""
    size = math.ceil(weight.rows / num_ranks)
    return max(0, min(size, weight.rows - size * rank)) * weight.columns


def _adapter(layer: Sequence[Weight], rank: int) -> list[Weight]:
    """Return LoRA's two factors of each linear map (arXiv 2106.09685): A is [r, in], B is [out, r]."""
    linear = [weight for weight in layer if weight.is_linear]
    return [factor for w in linear for factor in (Weight(rank, w.columns), Weight(w.rows, rank))]


def _moment_bytes(weight: Weight, num_ranks: int, rank: int, has_8bit: bool) -> int:
    numel = _part(weight, num_ranks, rank)
    # bitsandbytes: a byte a number and a float32 scale for 256 of them, for parameters of 4096 numbers and more
    # (arXiv 2110.02861, section 2; optim/optimizer.py of 0.4x: min_8bit_size, blocksize).
    return numel + 4 * math.ceil(numel / 256) if has_8bit and numel >= 4096 else _MASTER * numel


def _quantized_bytes(shape: ModelShape, learning: Learning) -> int:
    """Return the bytes of frozen weights, of which the linear maps of layers are quantized.

    nf4 takes 4 bits, and 0.127 bits for twice quantized scales (arXiv 2305.14314, section 3); int8 takes 8 bits, and a
    float32 scale a row (arXiv 2208.07339, section 2).
    """
    linear = [weight for weight in shape.layer() if weight.is_linear]
    others = _numel(shape.root()) + shape.num_layers * (_numel(shape.layer()) - _numel(linear))
    if learning.quantization == "nf4":
        quantized = math.ceil(_numel(linear) * (4 + 0.127) / 8)
    else:
        quantized = sum(weight.rows * weight.columns + 4 * weight.rows for weight in linear)
    return shape.num_layers * quantized + others * BYTES[learning.dtype]


def _gathered(shape: ModelShape, learning: Learning, adapter: Sequence[Weight]) -> int:
    """Return the bytes of what `fully_shard` gathers: the root, a layer, and the next one, which is fetched meanwhile.

    Then gradients that are on their way: of the largest unit, as computed and as a float32 copy that is summed.
    """
    size = learning.compute_size
    of_adapter = _MASTER if learning.compute_dtype is None else size
    layer, root = _numel(shape.layer()), _numel(shape.root())
    weights = size * (root + 2 * layer) + 2 * of_adapter * _numel(adapter)
    moving = max(layer, root) if learning.trained == "full" else _numel(adapter)
    return weights + moving * (size + _MASTER)


def activation_bytes(shape: ModelShape, learning: Learning) -> int:
    """Return the bytes of what the backward pass needs of a micro-batch, besides the logits.

    Counted from what transformers' layers save with PyTorch's attention, which keeps no [T, T] (arXiv 2205.05198,
    section 4.1, counts an older layer the same way). A token of a layer has

    - 6 h: input, normalized input and output of two norms; of these the 2 inputs are float32 in any dtype;
    - 4 q, 4 k: queries and keys before, in and after their norm (only after it, without one), attention's output, and
      the values; of these the inputs of the norms are float32;
    - 4 f: gate before and after its activation, up, and their product;
    - float32 numbers: a scale a norm, and attention's log-sum a head;
    - 7 r float32 numbers with LoRA, a rank r between the factors.

    With checkpointing a layer keeps its input only (arXiv 1604.06174), and one layer at a time is computed again.

    Ranks that compute rows together have a part of the tokens each, and of these another q: attention's output by heads
    and by tokens. With more ranks than heads of keys, those and the values in attention are there several times.
    """
    size, wide = learning.compute_size, 4
    h, q, kv, f = shape.hidden_size, shape.q_size, shape.kv_size, shape.intermediate_size
    narrow_numbers = 4 * h + 2 * q + 2 * kv + 4 * f
    wide_numbers = 2 * h + 2 + shape.num_heads
    if shape.has_qk_norm:
        narrow_numbers += q + kv
        wide_numbers += q + kv + shape.num_heads + shape.num_kv_heads
    if learning.trained != "full":
        wide_numbers += 7 * learning.lora_rank
    if (degree := learning.sequence_parallel) > 1:
        narrow_numbers += q + 2 * kv * (math.lcm(shape.num_kv_heads, degree) // shape.num_kv_heads - 1)
    layer = narrow_numbers * size + wide_numbers * wide
    # Outside of the layers: the last norm, rotations (sine and cosine), and the token's number.
    outside = h * size + (h + 1) * wide + 2 * shape.head_dim * size + 8
    kept = shape.num_layers * h * size + layer if learning.gradient_checkpointing else shape.num_layers * layer
    return math.ceil(learning.num_tokens / degree) * (kept + outside)


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes of a vLLM replica on each of its tensor-parallel GPUs.

    Attributes:
        weights: of the GPU's part of the model.
        token: of keys and values of a token.
        cache: left for keys and values; negative: the weights alone do not fit.
    """

    weights: int
    token: int
    cache: int

    @property
    def num_tokens(self) -> int:
        """Return how many tokens of episodes fit at once."""
        return max(0, self.cache // self.token)


def replica_memory(shape: ModelShape, *, dtype: str, tensor_parallel: int, budget: float) -> ReplicaMemory:
    """Return the memory on each GPU, of which `budget` bytes are vLLM's.

    Linear maps, embedding and head are cut into equal parts, norms are whole everywhere, and a head of keys and values
    is on several GPUs if there are fewer than GPUs (Megatron, arXiv 1909.08053, section 3). A token's cache is a key
    and a value a head and layer (arXiv 2309.06180, section 3).
    """
    kv_heads = max(1, math.ceil(shape.num_kv_heads / tensor_parallel))
    rows = [*shape.layer() * shape.num_layers, *shape.root()]
    numbers = sum(math.ceil(_numel([w]) / tensor_parallel) if w.columns > 1 else w.rows for w in rows)
    # What sharing out k and v to fewer parts than GPUs adds.
    doubled = 2 * (kv_heads - shape.num_kv_heads / tensor_parallel) * shape.head_dim * shape.hidden_size
    weights = int(numbers + shape.num_layers * doubled) * BYTES[dtype]
    token = 2 * shape.num_layers * kv_heads * shape.head_dim * BYTES[dtype]
    return ReplicaMemory(weights, token, int(budget) - weights)


def _numel(weights: Sequence[Weight]) -> int:
    return sum(weight.rows * weight.columns for weight in weights)


def parallel_sizes(shape: ModelShape) -> Iterator[int]:
    """Yield the numbers of GPUs that can share a layer in vLLM: powers of two that divide the heads."""
    size = 1
    while shape.num_heads % size == 0:
        yield size
        size *= 2
