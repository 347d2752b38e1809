"""Attention of prompts: sequences that add several tokens in one step, some at a time.

Sequences of like size are padded and attend together, because a hundred short ones, each by itself, would cost a
hundred launches a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

from gspo_gym.engine.local.kv_store import AttentionOptions, KeyValueStore, masked_scores

_NEW_STEP, _TOTAL_STEP = 16, 128  # sequences with sizes equal up to these attend together, padded to the largest


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """Several new tokens of one slot: packed positions [start, stop), at sequence positions from `context` on."""

    slot: int
    start: int
    stop: int
    context: int

    @property
    def num_new(self) -> int:
        return self.stop - self.start

    @property
    def total(self) -> int:
        """Return the length of the sequence with the new tokens."""
        return self.context + self.num_new


@dataclass(slots=True)
class SegmentGroup:
    """Spans that attend together. n spans, padded to `num_new` queries and `total` keys.

    Attributes:
        slots: [n] int64. contexts: [n] int64.
        packed: [n, num_new] int64, where each query is among the packed tokens; padding repeats a span's last.
        target: the outputs' places among the packed tokens, and `source` their places among the n * num_new; both as
            long as the spans together, which drops padding.
        is_fresh: none of the spans has a context.
    """

    slots: torch.Tensor
    contexts: torch.Tensor
    packed: torch.Tensor
    target: torch.Tensor
    source: torch.Tensor
    num_new: int
    total: int
    is_fresh: bool
    _masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask of the scores, [n, 1, groups * num_new, total]; once a step for the layers of a window."""
        key = (window, groups, dtype)
        if key not in self._masks:
            position = torch.arange(self.total, device=self.slots.device)
            own = (self.contexts[:, None] + torch.arange(self.num_new, device=self.slots.device))[..., None]
            hidden = position > own
            if window is not None:
                hidden |= position <= own - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf")).repeat(1, groups, 1)[:, None]
        return self._masks[key]


def group_spans(spans: Sequence[SegmentSpan], device: torch.device) -> tuple[SegmentGroup, ...]:
    """Put spans of like size together."""
    alike: dict[tuple[bool, int, int], list[SegmentSpan]] = {}
    for span in spans:
        # Apart, because spans without a context need no mask and no stored keys.
        key = (bool(span.context), (span.num_new - 1) // _NEW_STEP, (span.total - 1) // _TOTAL_STEP)
        alike.setdefault(key, []).append(span)
    return tuple(_make_group(members, device) for members in alike.values())


def attend_group(
    group: SegmentGroup,
    queries: torch.Tensor,
    fresh: tuple[torch.Tensor, torch.Tensor],
    store: KeyValueStore,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return the outputs of the group's spans, [tokens, Hq, D], in the order of `group.target`.

    Args:
        queries: [N, Hq, D], all packed tokens'.
        fresh: their keys and values, [N, H, D]; all that spans without a context look at.
        store: holds the fresh ones already, and the contexts'.
    """
    num_heads, size = queries.shape[1:]
    query = queries[group.packed].transpose(1, 2)  # [n, Hq, num_new, D]
    if group.is_fresh and options.window is None and options.softcap is None:
        # Padding comes after every true token, so causality hides it.
        keys, values = (new[group.packed].transpose(1, 2) for new in fresh)
        output = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=options.scale, enable_gqa=keys.shape[1] != num_heads
        )
    else:
        keys, values = store.read(group.slots, group.total)
        num_kv_heads = keys.shape[1]
        groups = num_heads // num_kv_heads
        # The query heads that share a key head attend as if they were positions: no key is repeated.
        grouped_queries = query.reshape(len(query), num_kv_heads, groups * group.num_new, size)
        mask = group.mask(options.window, groups, queries.dtype)
        if options.softcap is None:
            output = F.scaled_dot_product_attention(grouped_queries, keys, values, attn_mask=mask, scale=options.scale)
        else:
            scores = masked_scores((grouped_queries * options.scale) @ keys.transpose(-1, -2), mask, options)
            output = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values
        output = output.view(len(query), num_heads, group.num_new, -1)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, group.source)


def _make_group(spans: Sequence[SegmentSpan], device: torch.device) -> SegmentGroup:
    starts = np.array([span.start for span in spans])[:, None]
    num_new = np.array([span.num_new for span in spans])[:, None]
    longest = int(num_new.max())
    index = np.arange(longest)
    is_token = index < num_new
    # Padding repeats the last token: an index that is valid, with an output that is dropped.
    token_index = starts + np.minimum(index, num_new - 1)
    return SegmentGroup(
        slots=torch.tensor([span.slot for span in spans], device=device),
        contexts=torch.tensor([span.context for span in spans], device=device),
        packed=torch.from_numpy(token_index).to(device),
        target=torch.from_numpy(token_index[is_token]).to(device),
        source=torch.from_numpy(np.flatnonzero(is_token)).to(device),
        num_new=longest,
        total=max(span.total for span in spans),
        is_fresh=all(span.context == 0 for span in spans),
    )
