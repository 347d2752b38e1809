"""The fast way to run a model: all tokens of a step packed into one row, and the engine's own attention over slots.

For models with plain or sliding attention behind transformers' attention interface, which most have; `plain_model.py`
is for the others.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from gspo_gym.engine.local.kv_store import SingleRows, SlotCache
from gspo_gym.engine.local.plain_model import SLOT_ATTENTION, SlotStep
from gspo_gym.engine.local.shared_model import SharedModel, inner_model, keeps_logits
from gspo_gym.engine.local.spans import SegmentSpan, group_spans
from gspo_gym.errors import ConfigError, EngineError

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_PROBE_PARTS = (0, 5, 10, 11, 12)  # a prompt, its continuation, and two single tokens
_PROBE_LENGTH = _PROBE_PARTS[-1]


class PackedModel:
    """A model that runs with `slot_attention`. See `SharedModel` for the arguments.

    Attributes:
        shared: the model's weights and modules.

    Raises:
        ConfigError: the model's layers are not plain or sliding attention behind transformers' attention interface, or
            it is not on one device.
    """

    def __init__(self, model: Any, *, max_model_len: int) -> None:
        _check_layers(inner_model(model))
        self.shared = SharedModel(model, max_model_len=max_model_len, attention=SLOT_ATTENTION)
        self._keeps_logits = keeps_logits(self.shared.module)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: SlotStep, logits_at: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits [R, V] of the packed tokens [N] at the packed indices `logits_at` [R], or of all if None."""
        if logits_at is None or not self._keeps_logits:
            extra = {}
        else:
            extra = {"logits_to_keep": logits_at}
        logits: torch.Tensor = self.shared.module(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, slot_step=step, **extra
        ).logits[0]
        return logits if logits_at is None or self._keeps_logits else logits[logits_at]

    @torch.inference_mode()
    def verify(self) -> None:
        """Compare `forward` with the model's own attention on a few tokens, read in two parts and then one by one.

        Raises:
            ConfigError: they disagree, so something in this model is not what its interface says.
        """
        shared = self.shared
        token_ids = torch.arange(1, _PROBE_LENGTH + 1, device=shared.device) * 7919 % shared.vocab_size
        cache = SlotCache(max_slots=1, max_len=_PROBE_LENGTH)
        try:
            shared.module.config._attn_implementation = shared.own_attention
            expected = shared.module(input_ids=token_ids[None], use_cache=False).logits[0].float().log_softmax(-1)
            shared.module.config._attn_implementation = SLOT_ATTENTION
            parts = [self._probe(cache, token_ids, start, stop) for start, stop in itertools.pairwise(_PROBE_PARTS)]
        except EngineError as error:
            raise ConfigError(f"{error}, which it does not support") from error
        except Exception as error:
            raise ConfigError(f"{shared.name} does not run with the engine's cache: {error!r}") from error
        difference = (torch.cat(parts).float().log_softmax(-1) - expected).abs().max().item()
        tolerance = shared.rounding(expected)
        if not difference <= tolerance:
            raise ConfigError(
                f"{shared.name} does not give the same logprobs through the engine's cache as by itself (difference "
                f"{difference:.2g}, tolerated {tolerance:.2g})"
            )

    def _probe(self, cache: SlotCache, token_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        device = self.shared.device
        slots, lengths = np.zeros(1, np.int64), np.array([stop], np.int64)
        is_single = stop - start == 1
        step = SlotStep(
            cache=cache,
            slots=torch.zeros(stop - start, dtype=torch.int64, device=device),
            positions=torch.arange(start, stop, device=device),
            singles=SingleRows(slots, lengths, device) if is_single else None,
            groups=() if is_single else group_spans([SegmentSpan(0, 0, stop - start, start)], device),
        )
        return self.forward(token_ids[start:stop], step.positions, step, None)


def _check_layers(model: Any) -> None:
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{name} does not run through transformers' attention interface")
    layer_types = set(getattr(config, "layer_types", None) or {"full_attention"})
    if layer_types - _SUPPORTED_LAYERS:
        raise ConfigError(
            f"{name} has layers of type {sorted(layer_types - _SUPPORTED_LAYERS)}, which are neither full nor "
            "sliding-window attention"
        )
    devices = {str(parameter.device).replace("meta", "offloaded") for parameter in model.parameters()}
    if len(devices) > 1 or "offloaded" in devices:
        raise ConfigError(f"{name} is not on one device: its weights are {sorted(devices)}")
