"""The learner's model as the engine runs it: the same weights, but modules of its own.

The engine needs the model in eval mode and with its own attention; the learner needs it as it is, perhaps at the same
time. So the module tree is copied and every parameter and buffer in it stays the learner's own tensor object: no weight
is copied, updates in place are seen at once, and neither side's modes reach the other. Because they *are* seen at once,
this also watches the weights, so that keys computed under old ones cannot be mixed with new ones unnoticed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import numpy as np
import torch

from gspo_gym.engine.attention import SLOT_ATTENTION, SlotStep
from gspo_gym.engine.kv_cache import SlotCache
from gspo_gym.engine.kv_store import SingleRows
from gspo_gym.engine.segments import SegmentSpan, group_spans
from gspo_gym.errors import ConfigError, EngineError

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_SAMPLES_PER_PARAMETER = 8
_PROBE_PARTS = (0, 5, 10, 11, 12)  # a prompt, its continuation, and two single tokens
_PROBE_LENGTH = _PROBE_PARTS[-1]
# Largest difference of a logprob that rounding explains: float32 gave 2e-6 on tiny models; half precision carries 8 to
# 11 bits, so logits near 10 are off by up to a few hundredths after many layers.
_PROBE_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
_PROBE_TOLERANCE_HALF = 0.3


class SharedModel:
    """A transformers causal language model, or a PEFT model around one, seen through modules of the engine's own.

    Args:
        model: the learner's. Any, because transformers and peft are untyped. It is not changed.
        max_model_len: longest sequence, in tokens.

    Raises:
        ConfigError: the model's layers are not plain or sliding attention behind transformers' attention interface, it
            cannot hold `max_model_len` positions, or its rotary embedding depends on the longest sequence in the batch.
    """

    def __init__(self, model: Any, *, max_model_len: int) -> None:
        self._source = model
        _check_supported(_inner_model(model), max_model_len)
        self._share()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._parameters[0].device
        return device

    @property
    def vocab_size(self) -> int:
        """How many token ids the embedding knows."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: SlotStep, logits_at: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [R, V] of the packed tokens [N] at the packed indices `logits_at` [R], or of all if None."""
        if logits_at is None or not self._keeps_logits:
            extra = {}
        else:
            extra = {"logits_to_keep": logits_at}
        logits: torch.Tensor = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, slot_step=step, **extra
        ).logits[0]
        return logits if logits_at is None or self._keeps_logits else logits[logits_at]

    @torch.inference_mode()
    def verify(self) -> None:
        """Compare `forward` with the model's own attention on a few tokens, read in two parts and then one by one.

        Raises:
            ConfigError: they disagree, so something in this model is not what its interface says.
        """
        token_ids = torch.arange(1, _PROBE_LENGTH + 1, device=self.device) * 7919 % self.vocab_size
        implementation = self._model.config._attn_implementation
        self._model.config._attn_implementation = _inner_model(self._source).config._attn_implementation
        expected = self._model(input_ids=token_ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        self._model.config._attn_implementation = implementation
        cache = SlotCache(max_slots=1, max_len=_PROBE_LENGTH)
        try:
            parts = [self._probe(cache, token_ids, start, stop) for start, stop in itertools.pairwise(_PROBE_PARTS)]
        except EngineError as error:
            raise ConfigError(f"LocalEngine: {error}, which it does not support") from error
        except Exception as error:
            name = type(self._model).__name__
            raise ConfigError(f"LocalEngine: {name} does not run with the engine's cache: {error!r}") from error
        difference = (torch.cat(parts).float().log_softmax(-1) - expected).abs().max().item()
        tolerance = _PROBE_TOLERANCES.get(self._parameters[0].dtype, _PROBE_TOLERANCE_HALF)
        if not difference <= tolerance:
            raise ConfigError(
                f"LocalEngine: {type(self._model).__name__} does not give the same logprobs through the engine's cache "
                f"as by itself (difference {difference:.2g}, tolerated {tolerance:.2g}); it cannot be used here"
            )

    def _probe(self, cache: SlotCache, token_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        slots, lengths = np.zeros(1, np.int64), np.array([stop], np.int64)
        is_single = stop - start == 1
        step = SlotStep(
            cache=cache,
            slots=torch.zeros(stop - start, dtype=torch.int64, device=self.device),
            positions=torch.arange(start, stop, device=self.device),
            singles=SingleRows(slots, lengths, self.device) if is_single else None,
            groups=() if is_single else group_spans([SegmentSpan(0, 0, stop - start, start)], self.device),
        )
        return self.forward(token_ids[start:stop], step.positions, step, None)

    def weights_changed(self) -> bool:
        """Whether a parameter was written in place or moved since `accept_weights`.

        Reads the version counter that autograd keeps for every tensor, so it costs microseconds. Writes through
        `tensor.data` leave that counter alone: `contents_changed` finds those.
        """
        return [p._version for p in self._parameters] != self._versions or self._pointers() != self._addresses

    def contents_changed(self) -> bool:
        """Whether any of a few elements of each parameter differs from what it was; finds writes that hide."""
        return not torch.equal(self._samples().view(torch.int64), self._fingerprint.view(torch.int64))  # bits: NaN too

    def accept_weights(self) -> None:
        """Take the learner's model as it is now, whatever became of it: its weights, and its modules too.

        The modules are copied anew because an adapter may have been put on, merged or switched, which leaves no sure
        trace in the weights. It takes milliseconds.
        """
        self._share()

    def _share(self) -> None:
        inner = _inner_model(self._source)
        shared = {id(t): t for t in (*inner.parameters(), *inner.buffers())}
        self._model = copy.deepcopy(inner, dict(shared))  # deepcopy takes what its memo holds instead of copying it
        self._model.eval()
        self._model.config._attn_implementation = SLOT_ATTENTION
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
        self._parameters = list(inner.parameters())
        self._versions = [p._version for p in self._parameters]
        self._addresses = self._pointers()
        self._fingerprint = self._samples()

    def _pointers(self) -> list[int]:
        return [p.data_ptr() for p in self._parameters]

    def _samples(self) -> torch.Tensor:
        """Eight elements of each parameter, evenly spread."""
        some = []
        for parameter in self._parameters:
            flat = parameter.detach().reshape(-1)
            some.append(flat[:: max(1, flat.numel() // _SAMPLES_PER_PARAMETER)][:_SAMPLES_PER_PARAMETER].double())
        return torch.cat(some)


def _inner_model(model: Any) -> Any:
    """The transformers model inside a PEFT model (whose adapters are layers of it), or the model itself."""
    peft_config = getattr(model, "peft_config", None)
    if peft_config is None or not hasattr(model, "get_base_model"):
        return model
    if any(config.is_prompt_learning for config in peft_config.values()):
        raise ConfigError("LocalEngine: prompt-learning adapters are not supported; use LoRA or train the full model")
    return model.get_base_model()


def _check_supported(model: Any, max_model_len: int) -> None:
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"LocalEngine: {name} does not run through transformers' attention interface, so its keys and values "
            "cannot be kept; choose one of the usual decoder families (Llama, Qwen2, Qwen3, Mistral, Gemma, ...)"
        )
    layer_types = set(getattr(config, "layer_types", None) or {"full_attention"})
    if layer_types - _SUPPORTED_LAYERS:
        raise ConfigError(
            f"LocalEngine: {name} has layers of type {sorted(layer_types - _SUPPORTED_LAYERS)}; supported are full and "
            "sliding-window attention"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise ConfigError(f"LocalEngine: expected {name} on one device, got {sorted(devices)}")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise ConfigError(f"LocalEngine: max_model_len {max_model_len} exceeds the {limit} positions of {name}")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):  # nested: by layer type
        original = kind.get("original_max_position_embeddings", limit)
        if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE and original is not None and max_model_len > original:
            raise ConfigError(
                f"LocalEngine: the {kind['rope_type']} rotary embedding of {name} changes with the longest sequence of "
                f"a batch beyond {original} tokens; set max_model_len to at most that"
            )
