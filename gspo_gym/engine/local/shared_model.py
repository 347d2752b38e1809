"""The learner's model for the engine: the same weights in separate modules.

The engine needs the model in eval mode and perhaps with another attention; the learner needs it unchanged, perhaps at
the same time. So the module tree is copied and every parameter and buffer in it stays the learner's tensor object: no
weight is copied, updates in place are seen at once, and neither side's modes reach the other. Because updates are seen
at once, this also watches the weights: keys computed under old ones must not be mixed with new ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gspo_gym.errors import ConfigError

_SAMPLES_PER_PARAMETER = 8
# Largest difference of a logprob between two ways of computing it. Half precision carries 8 to 11 bits, so logits near
# 10 are off by up to a few hundredths after many layers.
_TOLERANCE = 1e-3
_TOLERANCE_HALF = 0.3
# In float32, what rounding explains: so many roundings of the largest logprob. Measured 1 to 20 where both ways were
# right; where one was wrong, 45 and more, in untrained models that hardly look at their context.
_ROUNDINGS = 64


class SharedModel:
    """A transformers causal language model, or a PEFT model around one, seen through modules of the engine's own.

    Args:
        model: the learner's. Any, because transformers and peft are untyped. It is not changed.
        max_model_len: longest sequence, in tokens.
        attention: the attention implementation that the engine's modules use; None for the model's own.

    Attributes:
        module: the engine's modules, in eval mode; another object after every `accept_weights`.

    Raises:
        ConfigError: the model cannot hold `max_model_len` positions, or gives a token another meaning in a longer
            sequence; its weights have no device; or its adapter is a learnt prompt.
    """

    def __init__(self, model: Any, *, max_model_len: int, attention: str | None = None) -> None:
        self._source = model
        self._attention = attention
        check_length(inner_model(model), max_model_len)
        self.accept_weights()

    @property
    def name(self) -> str:
        """Return the name of the model's class."""
        return type(self.module).__name__

    @property
    def config(self) -> Any:
        """Return the configuration of the model's text part."""
        return self.module.config.get_text_config(decoder=True)

    @property
    def own_attention(self) -> Any:
        """Return the attention implementation that the learner's model uses."""
        return inner_model(self._source).config._attn_implementation

    @property
    def device(self) -> torch.device:
        """Return the device of the embedding and of the engine's tensors."""
        return self._device

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids that the embedding knows."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    def without_padding(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [B, V] with -inf for the ids that the tokenizer does not have, if the model has such."""
        num_token_ids = getattr(self.module, "num_token_ids", None)
        if num_token_ids is None:
            return logits
        return logits.index_fill(-1, torch.arange(num_token_ids, logits.shape[-1], device=logits.device), -torch.inf)

    @property
    def tolerance(self) -> float:
        """Return the largest difference between two ways of computing a logprob, in nats."""
        return _TOLERANCE if self._is_precise else _TOLERANCE_HALF

    def rounding(self, logprobs: torch.Tensor) -> float:
        """Return the largest difference of these by rounding alone, in nats; sharper than `tolerance`."""
        if not self._is_precise:
            return self.tolerance
        return min(self.tolerance, _ROUNDINGS * torch.finfo(torch.float32).eps * logprobs.abs().max().item())

    @property
    def _is_precise(self) -> bool:
        # TF32 and the like round to 10 bits, whatever the dtype says.
        return self.module.dtype in (torch.float32, torch.float64) and torch.get_float32_matmul_precision() == "highest"

    def weights_changed(self) -> bool:
        """Return whether a trained parameter was written in place, or any was moved, since `accept_weights`.

        Reads the version counter that autograd keeps for every tensor, so it costs microseconds. Writes through
        `tensor.data` leave that counter alone, and those of frozen parameters are not read, because PEFT adapts fused
        experts by `Tensor.set_` in every forward, to and fro, which counts: `contents_changed` finds both.
        """
        return [p._version for p in self._trained_parameters] != self._versions or self._pointers() != self._addresses

    def contents_changed(self) -> bool:
        """Return whether any of a few elements of each parameter has changed; finds writes that hide."""
        return not all(map(torch.equal, self._read_samples(), self._fingerprint))

    def accept_weights(self) -> None:
        """Take the learner's present model: its weights, and its modules too.

        The modules are copied anew because an adapter may have been put on, merged or switched, which leaves no sure
        trace in the weights. It takes milliseconds.
        """
        inner = inner_model(self._source)
        shared_tensors = (*inner.parameters(), *inner.buffers(), *_offloaded_maps(inner), *_int8_state(inner))
        # Deepcopy takes what its memo holds instead of copying it.
        self.module = copy.deepcopy(inner, {id(t): t for t in shared_tensors})
        self.module.eval()
        if self._attention is not None:
            self.module.config._attn_implementation = self._attention
        if not getattr(inner.base_model, "layers_are_rescaled", True):
            self.module.config.rescale_every = 0  # RWKV would halve weights in place, which are the learner's
        self._device = _input_device(inner)
        # Weights that are offloaded have no memory here between two forward passes, and are never trained.
        self._parameters = [p for p in inner.parameters() if p.device.type != "meta"]
        self._trained_parameters = [p for p in self._parameters if p.requires_grad]
        self._versions = [p._version for p in self._trained_parameters]
        self._addresses = self._pointers()
        self._samples = _samples_of(self._parameters)
        self._fingerprint = self._read_samples()

    def _pointers(self) -> list[int]:
        return [p.data_ptr() for p in self._parameters]

    def _read_samples(self) -> list[torch.Tensor]:
        # Their bytes, because NaN is not equal to itself.
        return [torch.cat(views).view(torch.uint8) for views in self._samples]


def _samples_of(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return views of a few elements of each parameter, those of one dtype and device together."""
    views_by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        views_by_kind.setdefault((parameter.dtype, parameter.device), []).extend(_spread(parameter.detach()))
    return list(views_by_kind.values())


def _spread(tensor: torch.Tensor) -> list[torch.Tensor]:
    # Evenly: a write to one row, such as one token's embedding, may still hide.
    step = max(1, tensor.numel() // _SAMPLES_PER_PARAMETER)
    if tensor.is_contiguous():
        return [tensor.view(-1)[::step][:_SAMPLES_PER_PARAMETER]]
    places = range(0, tensor.numel(), step)[:_SAMPLES_PER_PARAMETER]
    return [tensor[np.unravel_index(place, tensor.shape)].view(1) for place in places]


def inner_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, adapters included, or the model itself.

    Raises:
        ConfigError: the adapter is a learnt prompt, which is no layer of the model.
    """
    peft_config = getattr(model, "peft_config", None)
    if peft_config is None or not hasattr(model, "get_base_model"):
        return model
    if any(config.is_prompt_learning for config in peft_config.values()):
        raise ConfigError("LocalEngine: prompt-learning adapters are not supported; use LoRA or train the full model")
    return model.get_base_model()


def keeps_logits(model: Any) -> bool:
    """Return whether the model can compute the logits of some positions only (Any: transformers is untyped)."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def check_length(model: Any, max_model_len: int) -> None:
    """Refuse sequences that the model cannot read, or with tokens that would mean something else in longer ones.

    Raises:
        ConfigError: one of the two.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise ConfigError(f"LocalEngine: max_model_len {max_model_len} exceeds the {limit} positions of {name}")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(section for section in rope.values() if isinstance(section, dict))):  # nested: by layer type
        original = kind.get("original_max_position_embeddings", limit)
        if kind.get("rope_type") in ("dynamic", "longrope") and original is not None and max_model_len > original:
            raise ConfigError(
                f"LocalEngine: the {kind['rope_type']} rotary embedding of {name} changes with the longest sequence of "
                f"a batch beyond {original} tokens, so that a token's logprob would depend on what comes after it; set "
                "max_model_len to at most that"
            )


def _offloaded_maps(model: Any) -> list[Any]:
    # Accelerate's store of weights that are on no device is shared like the weights.
    maps = (getattr(getattr(module, "_hf_hook", None), "weights_map", None) for module in model.modules())
    return [weights_map for weights_map in maps if weights_map is not None]


def _int8_state(model: Any) -> list[torch.Tensor]:
    # bitsandbytes' codes and scales are no parameters or buffers. Before its first forward pass a layer keeps them at
    # its weight, and takes them from there. The weight is shared: of two modules only the first would get the scales,
    # and the other multiply by codes up to 127. So each layer takes its own here, before it is copied. That pass also
    # makes its codes the weight's storage, which would look like weights that moved where the two were copied apart.
    tensors = []
    for module in model.modules():
        if not hasattr(module, "init_8bit_state"):
            continue
        if module.weight.CB is not None:
            module.init_8bit_state()
        if module.state.CB is not None:
            module.weight.data = module.state.CB
        tensors += [tensor for tensor in (module.state.CB, module.state.SCB) if tensor is not None]
    return tensors


def _input_device(model: Any) -> torch.device:
    # As accelerate says of a model spread over devices, else that of the embedding's weight.
    embedding = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    device = embedding.weight.device if device is None else torch.device(device)
    if device.type == "meta":
        raise ConfigError(f"LocalEngine: the weights of {type(model).__name__} are on the meta device: load them first")
    return device
