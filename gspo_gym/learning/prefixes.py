"""Rows of tokens that begin alike -> one row in which each shared token stands once, and an attention over it.

The episodes of a group share their prompt, and often their first turns. A causal model computes the same for a token
wherever the tokens before it are the same, so that a trie of the rows is all that its layers need to see. Attention
puts the rows together again: the new tokens of a row attend to the row's keys and values, gathered from the trie.
P = tokens of the trie.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gspo_gym.errors import ConfigError
from gspo_gym.learning.collective import OneProcess, Work

_log = logging.getLogger(__name__)
_WORTH_IT = 1.2  # gathering keys costs up to 15% where nothing is shared
SHARED_ATTENTION = "gspo_gym_shared_prefixes"
SEQUENCE_ATTENTION = "gspo_gym_sequence_parallel"  # of `sequence.py`, which attends over tries, too
OWN_ATTENTIONS = ("sdpa", SHARED_ATTENTION, SEQUENCE_ATTENTION)
_ARGUMENT = "shared_prefixes"  # through which a model hands the trie to its attention


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Rows with about as many new tokens, which attend in one call.

    Attributes:
        queries: [R * N] places in the trie of the new tokens, and of any token in the padding.
        keys: [R * T] of all tokens before and of them.
        num_rows: R.
        mask: [R, 1, N, T] bool, the keys that a query sees; None: a causal mask does, for rows that share nothing.
        is_token: [R * N] bool, False in the padding.
    """

    queries: Tensor
    keys: Tensor
    num_rows: int
    mask: Tensor | None
    is_token: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Tokens of some rows, each shared one once.

    Attributes:
        token_ids: [1, P]. positions: [1, P], of each token in its rows.
        places: [B, T], where a row's token stands in the trie; 0 in the padding.
        buckets: attend apart. order: [P], where a place of the trie stands in their outputs, one after the other.
    """

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    buckets: tuple[_Bucket, ...]
    order: Tensor

    @property
    def num_tokens(self) -> int:
        """P."""
        return self.token_ids.shape[1]

    def hidden_states(self, decoder: Any) -> Tensor:  # Any: transformers is untyped
        """Return the decoder's last hidden states, [P, D]."""
        # A mask of four axes is handed on as it is: the model builds none of [P, P].
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.token_ids.device)
        output = decoder(
            input_ids=self.token_ids,
            position_ids=self.positions,
            attention_mask=no_mask,
            use_cache=False,
            **{_ARGUMENT: self},
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


@dataclass(frozen=True, slots=True, eq=False)
class _Overlaps:
    """How far rows begin alike; all that a decision about sharing needs.

    Attributes:
        rows: [B, T] token ids. lengths: [B]. order: of the rows, in which each shares most with the one before it.
        shared: [B], tokens that a row shares with those before it.
    """

    rows: np.ndarray
    lengths: np.ndarray
    order: Sequence[int]
    shared: np.ndarray

    @property
    def num_tokens(self) -> int:
        """P, of their trie."""
        return int((self.lengths - self.shared).sum())


def _overlaps(token_ids: Tensor, attention_mask: Tensor) -> _Overlaps:
    rows, lengths = token_ids.cpu().numpy(), attention_mask.sum(1).cpu().numpy()
    # Sorted, a row shares most with the one before it.
    order = sorted(range(len(rows)), key=lambda b: rows[b, : lengths[b]].astype(">u4").tobytes())
    num_shared = np.zeros(len(rows), np.int64)
    for before, row in pairwise(order):
        width = min(lengths[before], lengths[row])
        differs = rows[before, :width] != rows[row, :width]
        num_shared[row] = differs.argmax() if differs.any() else width
    return _Overlaps(rows, lengths, order, num_shared)


def build_trie(token_ids: Tensor, attention_mask: Tensor) -> Trie:
    """Return the trie of some rows, [B, T], padded on the right, on their device."""
    return _build(_overlaps(token_ids, attention_mask), token_ids.device)


def _build(overlaps: _Overlaps, device: torch.device) -> Trie:
    rows, lengths, order, num_shared = overlaps.rows, overlaps.lengths, overlaps.order, overlaps.shared
    places = np.zeros(rows.shape, np.int64)
    num_tokens = 0
    for before, row in zip([order[0], *order], order, strict=False):
        start, end = num_shared[row], lengths[row]
        places[row, :start] = places[before, :start]
        places[row, start:end] = np.arange(num_tokens, num_tokens + end - start)
        num_tokens += end - start
    unique_ids, positions = np.zeros((2, num_tokens), np.int64)
    valid = np.arange(rows.shape[1]) < lengths[:, None]
    unique_ids[places[valid]] = rows[valid]
    positions[places[valid]] = np.nonzero(valid)[1]
    buckets = [_bucket(places, num_shared, lengths, part, device) for part in _split(lengths - num_shared, num_shared)]
    outputs = torch.cat([bucket.queries[bucket.is_token] for bucket in buckets])
    return Trie(
        torch.from_numpy(unique_ids)[None].to(device),
        torch.from_numpy(positions)[None].to(device),
        torch.from_numpy(places).to(device),
        tuple(buckets),
        outputs.argsort(),
    )


def _split(num_new: np.ndarray, num_shared: np.ndarray) -> list[list[int]]:
    """Return the rows with new tokens in buckets: those that share nothing apart, and at least half full."""
    parts: list[list[int]] = []
    for row in sorted(np.flatnonzero(num_new).tolist(), key=lambda b: (num_shared[b] > 0, -num_new[b])):
        first = parts[-1][0] if parts else None
        if first is None or (num_shared[first] > 0) != (num_shared[row] > 0) or 2 * num_new[row] < num_new[first]:
            parts.append([])
        parts[-1].append(row)
    return parts


def _bucket(
    places: np.ndarray, num_shared: np.ndarray, lengths: np.ndarray, rows: Sequence[int], device: torch.device
) -> _Bucket:
    starts, ends = num_shared[rows][:, None], lengths[rows][:, None]
    new = np.arange((ends - starts).max())
    keys = np.arange(ends.max())
    is_token = new < ends - starts
    of_rows = places[rows]
    queries = np.take_along_axis(of_rows, np.where(is_token, starts + new, 0), 1)
    mask = keys <= (starts + new)[:, :, None]
    return _Bucket(
        torch.from_numpy(queries.ravel()).to(device),
        torch.from_numpy(of_rows[:, : len(keys)].ravel()).to(device),
        len(rows),
        torch.from_numpy(mask[:, None]).to(device) if starts.any() else None,
        torch.from_numpy(is_token.ravel()).to(device),
    )


def shared_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend over a trie, if the model hands one over, else as transformers' attention through torch does.

    Args:
        query, key, value: [1, H, P, D] with a trie.

    Raises:
        ConfigError: an attention with a window, whose keys are not those of all tokens before.
    """
    trie: Trie | None = options.pop(_ARGUMENT, None)
    if trie is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if options.get("sliding_window") is not None:
        raise ConfigError("a sliding window")
    outputs = []
    for bucket in trie.buckets:
        # [1, H, P, D] -> [R, H, N, D]
        q, k, v = (
            states[0].transpose(0, 1).index_select(0, where).unflatten(0, (bucket.num_rows, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for states, where in ((query, bucket.queries), (key, bucket.keys), (value, bucket.keys))
        )
        output, _ = sdpa_attention_forward(module, q, k, v, bucket.mask, **options)  # [R, N, H, D]
        outputs.append(output.flatten(0, 1)[bucket.is_token])
    return torch.cat(outputs).index_select(0, trie.order)[None], None


class PrefixSharing:
    """The choice of what shares prefixes: which model can, and which batches gain by it.

    Args:
        wanted: True: every batch; "auto": a batch on a processor where it saves a sixth of the tokens, if the model
            can; False: none.
        unless: a reason of the caller's why the model cannot.
        forward: calls the decoder, see `Collective`; None: it is whole in this process.
        device: that computes; None: that of the parameters.

    Raises:
        ConfigError: wanted is True, and the model cannot.
    """

    def __init__(
        self,
        decoder: Any,
        wanted: bool | Literal["auto"],
        *,
        unless: str | None = None,
        forward: Callable[[Work], tuple[Tensor, ...]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._share_prefixes, self._has_said = wanted, False
        if not wanted:
            return
        device = device or next(decoder.parameters()).device
        if wanted == "auto" and device.type != "cpu":
            unless = f"on {device.type} it was never measured"
        reason = unless or _prepare(decoder, forward or OneProcess().forward, device)
        if reason is None:
            return
        message = f"{type(decoder).__name__} cannot share prefixes: {reason}"
        if wanted != "auto":
            raise ConfigError(f'training.share_prefixes: {message}; write false or "auto"')
        _log.info("training.share_prefixes: off, since %s", message)
        self._share_prefixes = False

    def pays(self, token_ids: Tensor, attention_mask: Tensor) -> bool:
        """Return whether a batch [B, T] is to be shared, without building its trie."""
        return self._to_share(token_ids, attention_mask) is not None

    def shared(self, token_ids: Tensor, attention_mask: Tensor) -> Trie | None:
        """Return the trie of a batch [B, T] if it is to be shared, None if its rows are."""
        overlaps = self._to_share(token_ids, attention_mask)
        return None if overlaps is None else _build(overlaps, token_ids.device)

    def _to_share(self, token_ids: Tensor, attention_mask: Tensor) -> _Overlaps | None:
        if not self._share_prefixes or not bool(attention_mask.any()):
            return None
        overlaps = _overlaps(token_ids, attention_mask)
        factor = token_ids.numel() / overlaps.num_tokens
        if not self._has_said:
            _log.info("training.share_prefixes: the first rows hold %.2f times the tokens of their trie", factor)
            self._has_said = True
        # By counts and not by time: a run that is resumed must decide the same.
        saves = token_ids.numel() >= _WORTH_IT * overlaps.num_tokens
        return overlaps if saves or self._share_prefixes is True else None


def _prepare(decoder: Any, forward: Callable[[Work], tuple[Tensor, ...]], device: torch.device) -> str | None:
    """Let a model attend over tries; return the reason why it cannot, with the model as it was."""
    token_ids = torch.arange(3, 19, device=device).reshape(2, 8)
    token_ids[1, :5] = token_ids[0, :5]
    token_ids %= decoder.get_input_embeddings().weight.shape[0]
    trie = build_trie(token_ids, torch.ones_like(token_ids, dtype=torch.bool))

    def is_same() -> bool:
        (rows,) = forward(lambda: (decoder(input_ids=token_ids, use_cache=False).last_hidden_state,))
        decoder.config._attn_implementation = SHARED_ATTENTION
        (trie_states,) = forward(lambda: (trie.hidden_states(decoder)[trie.places],))
        return are_close(trie_states, rows)

    return try_attention(decoder, is_same, failures=(ConfigError, TypeError, RuntimeError))


def try_attention(decoder: Any, is_same: Callable[[], bool], failures: tuple[type[Exception], ...]) -> str | None:
    """Return why a model keeps its own attention, or None: it has another now.

    Args:
        is_same: sets the other attention, and returns whether hidden states come out the same; run without gradients
            and dropout.
        failures: of `is_same`, that say that the model does not take it.
    """
    config = decoder.config
    own = config._attn_implementation
    if own not in OWN_ATTENTIONS:
        return f'its attention is "{own}", and not "sdpa"'
    # Kinds that are told apart by their masks alone would pass the comparison, which is shorter than their windows.
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"it has layers of {', '.join(sorted(kinds))}"
    training = decoder.training
    decoder.eval()
    try:
        with torch.no_grad():
            reason = None if is_same() else "its hidden states come out otherwise"
    except failures as error:
        reason = f"it failed with {error}"
    finally:
        decoder.train(training)
    if reason is not None:
        config._attn_implementation = own
    return reason


def are_close(found: Tensor, rows: Tensor) -> bool:
    """Return whether [..., D] hidden states are those of `rows` but for rounding: a wrong key is off by order 1."""
    gap = (found - rows).norm(dim=-1) / rows.norm(dim=-1)
    return bool((gap <= min(1e3 * torch.finfo(rows.dtype).eps, 0.25)).all())  # as `logprobs` compares its two ways


AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)
