"""Memory on paper against tensors that exist: of tiny models whole and sharded, and of what autograd keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from gspo_gym.cluster.memory import (
    BYTES,
    SHAPES,
    Learning,
    ModelShape,
    activation_bytes,
    parallel_sizes,
    rank_memory,
    replica_memory,
)
from gspo_gym.errors import ConfigError
from gspo_gym.learning.optimizer import build_adamw
from gspo_gym.learning.sequence import SequenceSharing
from gspo_gym.learning.settings import LoraSettings, OptimizerSettings
from gspo_gym.policy.load import adapt_policy, load_policy
from gspo_gym.policy.options import prepare_for_training
from gspo_gym.policy.tiny import build_tiny

# Parameters as the hub's pages count them (of safetensors; the head of tied models, which is there too, taken off).
PUBLISHED = {
    "Qwen3-0.6B": 751_632_384 - 151_936 * 1024,
    "Qwen3-1.7B": 2_031_739_904 - 151_936 * 2048,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
}
SMALL = Learning(num_tokens=64)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def measured(model: nn.Module) -> tuple[int, int, int]:
    """Bytes of parameters, of the gradients of a backward pass, and of AdamW's state after a step."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    adamw = build_adamw(trained, [], OptimizerSettings(), learning_rate=1e-3)
    model(input_ids=torch.arange(8)[None]).logits.float().square().sum().backward()
    gradients = bytes_of(p.grad for p in trained if p.grad is not None)
    adamw.step()
    return bytes_of(parameters), gradients, bytes_of(t for p in trained for t in adamw.state[p].values())


def shape_of(model: nn.Module) -> ModelShape:
    return ModelShape.from_config(model.config.to_dict())


def test_the_parameters_of_named_shapes_are_as_many_as_are_published() -> None:
    assert {name: shape.num_parameters for name, shape in SHAPES.items()} == PUBLISHED


@pytest.mark.parametrize("name", ["qwen3-64", "qwen3-128"])
def test_one_rank_holds_what_is_measured(name: str) -> None:
    model = build_tiny(name, 0)
    memory = rank_memory(shape_of(model), SMALL)
    assert shape_of(model).num_parameters == sum(p.numel() for p in model.parameters())
    assert (memory.weights, memory.gradients, memory.optimizer) == measured(model)
    assert memory.gathered == memory.reference == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_alone_has_gradients_and_moments(dtype: str) -> None:
    policy = adapt_policy(load_policy("tiny:qwen3-64", dtype=dtype, seed=0), LoraSettings(r=4), 0)
    memory = rank_memory(shape_of(policy.model), Learning("lora", dtype, lora_rank=4, num_tokens=64))
    assert (memory.weights, memory.gradients, memory.optimizer) == measured(policy.model)


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (3, 2)])
@pytest.mark.usefixtures("fake_ranks")
def test_a_rank_of_several_holds_its_part_of_each_parameter_and_the_vocabulary_need_not_divide(
    num_ranks: int, rank: int
) -> None:
    # Collectives do nothing in this group, so one process sees the tensors of any rank.
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    model = build_tiny("qwen3-64", 0)
    shape = shape_of(model)
    assert shape.vocab_size % num_ranks
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    memory = rank_memory(shape, SMALL, num_ranks, rank)
    assert (memory.weights, memory.gradients, memory.optimizer) == measured(model)
    if num_ranks == 2:
        one = rank_memory(shape, SMALL)
        held = memory.weights + memory.gradients + memory.optimizer
        assert held <= 0.51 * (one.weights + one.gradients + one.optimizer)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3-64", "qwen3-128"])
def test_activations_are_what_autograd_keeps(name: str, dtype: str, checkpointing: bool) -> None:
    model = build_tiny(name, 0).to(getattr(torch, dtype))
    prepare_for_training(model, gradient_checkpointing=checkpointing)
    model.train(checkpointing)  # transformers checkpoints in training mode only
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in own:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(64)[None], use_cache=False)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    shape, alone = shape_of(model), Learning(dtype=dtype, num_tokens=64)
    expected = activation_bytes(shape, replace(alone, gradient_checkpointing=checkpointing))
    if checkpointing:  # a layer is computed again in the backward pass, with its rotations: the hooks do not see that
        outside = activation_bytes(replace(shape, num_layers=0), alone)
        expected -= (activation_bytes(shape, alone) - outside) // shape.num_layers
        expected -= 64 * 2 * shape.head_dim * BYTES[dtype]
    assert saved == pytest.approx(expected, rel=0.02)


class Neighbour:
    """A `SequenceGroup` in which all send what this rank sends: of the right sizes."""

    rank, device = 0, None

    def __init__(self, size: int) -> None:
        self.size = size

    def sum(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values)

    def exchange(self, parts: Tensor) -> Tensor:
        return parts.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "degree"), [("qwen3-64", 2), ("qwen3-128", 2), ("qwen3-128", 4)])
def test_activations_of_ranks_that_compute_rows_together_are_what_autograd_keeps(
    name: str, dtype: str, degree: int
) -> None:
    model = build_tiny(name, 0).to(getattr(torch, dtype))
    sharing = SequenceSharing(model.model, Neighbour(degree), lambda work: work())
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in own:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = torch.arange(128)[None] % 200
        sharing.hidden_states(model.model, tokens, None, torch.ones_like(tokens, dtype=torch.bool))
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    expected = activation_bytes(shape_of(model), Learning(dtype=dtype, num_tokens=128, sequence_parallel=degree))
    assert saved == pytest.approx(expected, rel=0.02)


def test_what_computes_in_16_bits_is_counted_there() -> None:
    shape = SHAPES["Qwen3-8B"]
    plain, narrow = (rank_memory(shape, Learning(compute_dtype=dtype), 4) for dtype in (None, "bfloat16"))
    assert (narrow.weights, narrow.gradients, narrow.optimizer) == (plain.weights, plain.gradients, plain.optimizer)
    layer, root = 192_946_432, 2 * 151_936 * 4096 + 4096  # of the config.json: a layer, and embedding, norm and head
    assert layer * 36 + root == PUBLISHED["Qwen3-8B"]
    # The root and two layers, and the root's gradient as computed and in float32.
    assert plain.gathered == 4 * (root + 2 * layer) + 8 * root
    assert narrow.gathered == 2 * (root + 2 * layer) + 6 * root
    assert narrow.activations == activation_bytes(shape, Learning(dtype="bfloat16"))


def test_a_replica_holds_its_share_of_weights_and_a_key_and_a_value_a_head_and_layer() -> None:
    shape = SHAPES["Llama-3.3-70B-Instruct"]
    one = replica_memory(shape, dtype="bfloat16", tensor_parallel=1, budget=200e9)
    assert one.weights == 2 * PUBLISHED["Llama-3.3-70B-Instruct"]
    assert one.token == 2 * 80 * 8 * 128 * 2  # 327,680 bytes
    assert one.num_tokens == int((200e9 - one.weights) // 327_680)
    eight = replica_memory(shape, dtype="bfloat16", tensor_parallel=8, budget=70e9)
    norms = 2 * (80 * 2 + 1) * 8192
    assert eight.weights == (one.weights - norms) // 8 + norms
    assert eight.token == one.token // 8
    # Sixteen GPUs and eight heads of keys and values: each has one whole head.
    sixteen = replica_memory(shape, dtype="bfloat16", tensor_parallel=16, budget=70e9)
    assert sixteen.token == eight.token
    assert sixteen.weights == (one.weights - norms) // 16 + norms + 80 * 2 * 128 * 8192 // 2 * 2
    assert replica_memory(shape, dtype="float16", tensor_parallel=1, budget=70e9).num_tokens == 0
    assert list(parallel_sizes(shape)) == [1, 2, 4, 8, 16, 32, 64]


def test_what_is_frozen_or_8_bit_takes_less() -> None:
    shape = SHAPES["Qwen3-8B"]
    linear = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    others = PUBLISHED["Qwen3-8B"] - linear
    adapter = 36 * 16 * (2 * (4096 + 4096) + 2 * (1024 + 4096) + 3 * (4096 + 12288))
    nf4 = rank_memory(shape, Learning("qlora", "bfloat16"))
    assert nf4.weights == pytest.approx(linear * 4.127 / 8 + 2 * others + 4 * adapter, rel=1e-6)
    int8 = rank_memory(shape, Learning("qlora", "bfloat16", quantization="int8"))
    rows = 36 * (4096 + 1024 + 1024 + 4096 + 12288 + 12288 + 4096)
    assert int8.weights == linear + 4 * rows + 2 * others + 4 * adapter
    assert rank_memory(shape, Learning(keeps_reference=True)).reference == 4 * PUBLISHED["Qwen3-8B"]
    small = rank_memory(shape, Learning(has_8bit_moments=True))
    assert small.optimizer == pytest.approx(2 * (1 + 4 / 256) * PUBLISHED["Qwen3-8B"], rel=1e-3)
    with pytest.raises(ConfigError, match="qlora learns on 1 rank, not on 2"):
        rank_memory(shape, Learning("qlora"), 2)


def test_a_model_that_is_not_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="model type 'qwen3_moe': its memory is not counted"):
        ModelShape.from_config(build_tiny("qwen3-moe-64", 0).config.to_dict())
    with pytest.raises(ConfigError, match="'llama' with biases"):
        ModelShape.from_config({"model_type": "llama", "attention_bias": True})
