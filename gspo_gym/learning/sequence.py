"""Rows of tokens whose layers several ranks compute together, each with a part of the tokens: Ulysses.

All but attention computes a token by itself, so a rank needs its own tokens only. For attention the ranks exchange
(arXiv 2309.14509, section 3.1): each gets all tokens of some of the heads, and hands back the tokens of the others.
Not for sharing out parameters, which is `fully_shard`'s work. d = ranks, P = tokens of a row or of a trie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gspo_gym.errors import ConfigError
from gspo_gym.learning.collective import SequenceGroup, Work
from gspo_gym.learning.prefixes import SEQUENCE_ATTENTION, Trie, are_close, shared_attention, try_attention

_ARGUMENT = "sequence_part"  # through which a model hands its attention what the ranks compute together


@dataclass(frozen=True, slots=True, eq=False)
class _Together:
    """What the ranks of a group compute together.

    Attributes:
        trie: in which attention finds the keys of a token; None: the tokens before it in its row.
    """

    group: SequenceGroup
    trie: Trie | None


class OwnStates(NamedTuple):
    """Hidden states of the wanted tokens that are this rank's.

    Attributes:
        hidden: [N, D]. is_own: [A] bool, which of all wanted tokens they are.
    """

    hidden: Tensor
    is_own: Tensor


class SequenceSharing:
    """The choice of tokens that this rank computes, and their way through a decoder.

    Args:
        group: the ranks that compute the same rows.
        forward: calls the decoder, see `Collective`.
        unless: a reason of the caller's why the model cannot.

    Raises:
        ConfigError: the model cannot.
    """

    def __init__(
        self,
        decoder: Any,  # Any: transformers is untyped
        group: SequenceGroup,
        forward: Callable[[Work], tuple[Tensor, ...]],
        *,
        unless: str | None = None,
    ) -> None:
        self._group = group
        if (reason := unless or _prepare(decoder, self, forward)) is not None:
            raise ConfigError(
                f"learner.sequence_parallel: {type(decoder).__name__} cannot be computed by {group.size} ranks "
                f"together: {reason}; set 1"
            )

    def hidden_states(self, decoder: Any, token_ids: Tensor, trie: Trie | None, wanted: Tensor) -> OwnStates:
        """Return this rank's part of the hidden states of the tokens that are wanted, [B, T] bool.

        Args:
            token_ids: [B, T], padded on the right. trie: of the rows; None: each is computed by itself.
        """
        if trie is None:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
            places = wanted.nonzero()[:, 1]
        else:
            token_ids, positions, places = trie.token_ids, trie.positions, trie.places[wanted]
        size = -(-token_ids.shape[1] // self._group.size)
        start = size * self._group.rank
        hidden = decoder(
            input_ids=self._own(token_ids, size),
            # Padding has the last position: a table of positions may have no more.
            position_ids=self._own(positions, size, filled_with=int(positions[0, -1])),
            # A mask of four axes is handed on as it is: the model builds none.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
            use_cache=False,
            **{_ARGUMENT: _Together(self._group, trie)},
        ).last_hidden_state
        is_own = (places >= start) & (places < start + size)
        if trie is None:
            own = nn.functional.pad(wanted, (0, size * self._group.size - wanted.shape[1]))
            return OwnStates(hidden[own[:, start : start + size]], is_own)
        return OwnStates(hidden[0].index_select(0, places[is_own] - start), is_own)

    def of_all(self, values: Tensor, is_own: Tensor) -> Tensor:
        """Return values [K, A] of all wanted tokens; differentiable are those of this rank, which are given, [K, N].

        Every rank must compute the same loss of them: its gradient then flows to each token on one rank.
        """
        rows = is_own.expand(len(values), -1)
        own = values.new_zeros(rows.shape).masked_scatter(rows, values)
        return torch.where(rows, own, self._group.sum(own.detach().clone()))  # others add 0, which changes nothing

    def _own(self, tokens: Tensor, size: int, *, filled_with: int = 0) -> Tensor:
        padded_tokens = nn.functional.pad(tokens, (0, size * self._group.size - tokens.shape[1]), value=filled_with)
        return padded_tokens[:, size * self._group.rank : size * (self._group.rank + 1)]


def sequence_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend with other ranks if the model hands over what they compute together, else as `shared_attention` does.

    Args:
        query, key, value: [B, H, P/d, D], of this rank's tokens.

    Raises:
        ConfigError: an attention with a window.
    """
    together: _Together | None = options.pop(_ARGUMENT, None)
    if together is None:
        return shared_attention(module, query, key, value, attention_mask, **options)
    if options.get("sliding_window") is not None:
        raise ConfigError("a sliding window")
    group, trie = together.group, together.trie
    num_queries, num_keys = query.shape[1], key.shape[1]
    # Fewer heads of keys than ranks: each stands on several.
    copies = math.lcm(num_keys, group.size) // num_keys
    key, value = repeat_kv(key, copies), repeat_kv(value, copies)
    query, key, value = (_all_tokens(group, states) for states in (query, key, value))
    heads = SimpleNamespace(num_key_value_groups=num_queries // (num_keys * copies), is_causal=True)
    own: Any = heads  # all that transformers' function asks a module for
    if trie is None:
        output, _ = sdpa_attention_forward(own, query, key, value, None, **options)
    else:
        output, _ = shared_attention(own, query, key, value, None, shared_prefixes=trie, **options)
        output = nn.functional.pad(output, (0, 0, 0, 0, 0, query.shape[2] - trie.num_tokens))
    return _all_heads(group, output), None


def _all_tokens(group: SequenceGroup, states: Tensor) -> Tensor:
    """[B, H, P/d, D] of this rank's tokens -> [B, H/d, P, D] of this rank's heads."""
    parts = states.unflatten(1, (group.size, -1)).movedim(1, 0)  # type: ignore[no-untyped-call]
    return group.exchange(parts).movedim(0, 2).flatten(2, 3)


def _all_heads(group: SequenceGroup, states: Tensor) -> Tensor:
    """[B, P, H/d, D] of this rank's heads -> [B, P/d, H, D] of this rank's tokens."""
    parts = states.unflatten(1, (group.size, -1)).movedim(1, 0)  # type: ignore[no-untyped-call]
    return group.exchange(parts).movedim(0, 2).flatten(2, 3)


def _prepare(decoder: Any, sharing: SequenceSharing, forward: Callable[[Work], tuple[Tensor, ...]]) -> str | None:
    """Let a model attend with other ranks; return the reason why it cannot, with the model as it was."""
    group = sharing._group
    if (num_heads := decoder.config.num_attention_heads) % group.size:
        return f"its {num_heads} heads cannot be shared out evenly"
    device = next(decoder.parameters()).device if group.device is None else group.device
    token_ids = torch.arange(3, 21, device=device).reshape(2, 9) % decoder.get_input_embeddings().weight.shape[0]
    every_token = torch.ones_like(token_ids, dtype=torch.bool)

    def is_same() -> bool:
        (rows,) = forward(lambda: (decoder(input_ids=token_ids, use_cache=False).last_hidden_state.flatten(0, 1),))
        decoder.config._attn_implementation = SEQUENCE_ATTENTION
        own_states, is_own = forward(lambda: tuple(sharing.hidden_states(decoder, token_ids, None, every_token)))
        # The same on every rank.
        return not bool(group.sum(rows.new_tensor(float(not are_close(own_states, rows[is_own])))))

    return try_attention(decoder, is_same, failures=(ConfigError, TypeError))


AttentionInterface.register(SEQUENCE_ATTENTION, sequence_attention)
AttentionMaskInterface.register(SEQUENCE_ATTENTION, sdpa_mask)
