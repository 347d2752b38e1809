"""A model whose parameters, gradients and optimizer state are shared out over ranks, by torch's `fully_shard`.

Each rank keeps a part of every parameter. torch gathers a decoder layer while it computes, and sums gradients over the
ranks. The learner is the one of a single process: it is handed a `Collective`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo_gym.errors import ConfigError
from gspo_gym.learning.collective import Work
from gspo_gym.policy.quantization import is_quantized


class Ranks:
    """The ranks of torch's default process group, as the `Collective` of the model that they share.

    Each `sequence_parallel` neighbours compute the same rows, and the others in their places other rows.
    """

    is_shared_out = True

    def __init__(
        self, model: Any, *, device: torch.device, sequence_parallel: int = 1
    ) -> None:  # Any: torch's class has the method that `shard_model` adds
        self._model, self.device = model, device
        shape = (dist.get_world_size() // sequence_parallel, sequence_parallel)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("rows", "tokens"))
        self._others = mesh.get_group("rows")
        self.rank, self.world_size = mesh.get_local_rank("rows"), shape[0]
        self.sequence = None if sequence_parallel == 1 else Neighbours(mesh.get_group("tokens"), device)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._others)
        return values

    def forward(self, work: Work) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = self._model.run_in_forward(work)
        return result


class Neighbours:
    """A process group of torch's, as the `SequenceGroup` of ranks that compute the same rows."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group)
        return values

    def exchange(self, parts: Tensor) -> Tensor:
        received: Tensor = _Exchange.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return received


class _Exchange(torch.autograd.Function):
    """All-to-all along the first axis; the gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients, ctx.group), None  # type: ignore[no-untyped-call]


def shard_model(
    model: nn.Module,
    *,
    compute_dtype: torch.dtype | None = None,
    sequence_parallel: int = 1,
    device: str | None = None,
) -> Ranks:
    """Share the model's parameters out over the ranks of torch's default process group, in place.

    To be called by every rank after `init_process_group`, with the same weights on each and with the options of
    `prepare_for_training` (gradient checkpointing among them) switched on before. A model of `load_skeleton` gets
    room for this rank's part on `device`, with arbitrary numbers in it. The learner of a rank is then

        learner = Learner(model, ..., collective=shard_model(model))

    with the same arguments on each rank. Every rank calls `update(batch)` with the whole batch, and the other methods
    too, at the same time; each computes some of the trajectories, and all return the same report, but for the seconds.
    `tensors()` are parts of this rank (DTensors), and `full_tensors` streams the weights. An adapter is
    shared out with its base.

    Args:
        compute_dtype: of gathered weights and of activations; parameters and gradients' sums stay as they are. None:
            the parameters' own.
        sequence_parallel: so many ranks, neighbours by their numbers, compute the same rows; see `learning/sequence`.
        device: of a model without weights; None: it has some.

    Raises:
        ConfigError: the weights are quantized, there is no process group, or its ranks are no multiple of
            `sequence_parallel`.
    """
    _require_parts(model, sequence_parallel)
    computing = next(model.parameters()).device if device is None else torch.device(device)
    _share_out(
        model,
        mesh=init_device_mesh(computing.type, (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None
        ),
    )
    if device is not None:
        _make_room(model, device)
    shared: Any = model
    shared.run_in_forward = types.MethodType(lambda _model, work: work(), model)
    register_fsdp_forward_method(model, "run_in_forward")
    return Ranks(model, device=computing, sequence_parallel=sequence_parallel)


def _require_parts(model: nn.Module, sequence_parallel: int) -> None:
    if not dist.is_initialized():
        raise ConfigError("shard_model: expected torch's process group; call torch.distributed.init_process_group")
    if is_quantized(model):
        raise ConfigError(
            "quantized weights (qlora) cannot be shared out over ranks: the scales of their blocks are no parameters, "
            'and fully_shard would cut blocks apart; train with weights_from = "lora" on weights of 16 or 32 bits, or '
            "on one rank"
        )
    if (world_size := dist.get_world_size()) % sequence_parallel:
        raise ConfigError(
            f"learner.sequence_parallel: expected a divisor of {world_size} ranks, got {sequence_parallel}"
        )


def _share_out(model: nn.Module, **options: Any) -> None:  # Any: those of `fully_shard`
    # By torch and not by transformers' own plan, under which tied embeddings are stale after a step if ranks do not
    # divide the vocabulary. The root holds these embeddings, and is resharded as its layers are: a forward pass without
    # gradients, as for old logprobs, would leave it gathered, and the next one would not see the step in between.
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, model):
        fully_shard(module, reshard_after_forward=True, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A sum, because the loss of a part is divided by the counts of the whole step. Gloo divides nothing by
            # itself and knows no PREMUL_SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _make_room(model: nn.Module, device: str) -> None:
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    model.to_empty(device=device)  # the buffers, too, which have their numbers
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(device)


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters by name, each whole and one at a time; every rank must take all of them.

    A tied one comes once, under its first name.
    """
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach())


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that is shared out, a copy, on every rank; another one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
