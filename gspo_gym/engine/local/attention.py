"""Attention over slots: what a transformers model calls instead of its own attention while the engine runs it.

All tokens of a step travel as one packed row, [1, N]: first the sequences that add a single token, then those that add
several. So every linear layer sees each token once and nothing is padded; only this function knows which token belongs
to which slot. It enters through transformers' public attention interface, under a name of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from gspo_gym.engine.local.kv_cache import SlotCache
from gspo_gym.engine.local.kv_store import AttentionOptions, SingleRows
from gspo_gym.engine.local.spans import SegmentGroup, attend_group
from gspo_gym.errors import EngineError

SLOT_ATTENTION = "gspo_gym_slots"
"""The name under which models select `slot_attention` (`config._attn_implementation`)."""


@dataclass(frozen=True, slots=True)
class SlotStep:
    """Where the packed tokens of one forward pass belong: `slots` and `positions` [N] int64, on the model's device."""

    cache: SlotCache
    slots: torch.Tensor
    positions: torch.Tensor
    singles: SingleRows | None
    groups: tuple[SegmentGroup, ...]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # the interface's; here the step says who sees what
    *,
    slot_step: SlotStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, then attend from the new tokens to all of their own sequence.

    Args:
        query: [1, Hq, N, D]; key and value: [1, H, N, D], H a divisor of Hq.
        attention_mask: ignored.
        slot_step: says which token sees which; it comes through the keyword arguments of the model's forward.
        _: what else models hand over (dropout of an eval-mode model, flags of other implementations). Any: untyped.

    Returns:
        [1, N, Hq, D], as the interface demands.

    Raises:
        EngineError: the model does not hand the step over, or its attention does something this function does not.
    """
    if slot_step is None or s_aux is not None or position_bias is not None:
        reason = "does not hand the engine's step over" if slot_step is None else "adds sinks or a bias to its scores"
        raise EngineError(f"the attention of {type(module).__name__} {reason}")
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap
    )
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an attribute of every attention module of transformers
    store = slot_step.cache.write(layer, keys, values, slot_step.slots, slot_step.positions)
    singles = slot_step.singles
    if singles is not None and not slot_step.groups:
        return store.attend_singles(singles, queries, options)[None], None
    packed = torch.empty(*queries.shape[:2], values.shape[-1], dtype=queries.dtype, device=queries.device)
    if singles is not None:
        packed[: singles.num] = store.attend_singles(singles, queries[: singles.num], options)
    for group in slot_step.groups:
        packed.index_copy_(0, group.target, attend_group(group, queries, (keys, values), store, options))
    return packed[None], None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
