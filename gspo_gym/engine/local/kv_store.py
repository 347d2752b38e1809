"""Keys and values of many sequences, one slot each, with their tokens, and the attention of single new tokens to them.

Two layouts of a layer: `PlainStore` is the usual [S, H, T, D] with torch's fused attention. `BlockStore` is for float32
on a CPU, where a step is bound by memory: it reads each sequence's keys and values once, and no padding; it depends on
the processor which is faster there. S, H, T, D = slots, key/value heads, tokens, head size; G = query heads to a key
head, R = rows that add a token. The tokens kept beside the keys make reuse safe: a prefix is reused only where they are
equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from numpy.typing import NDArray

from gspo_gym.types import Int32Array

Int64Array = NDArray[np.int64]

BLOCK = 64
"""Tokens in a block: long enough to stream, short enough that the unused end of the last one does not matter."""

_COST_OF_GATHERING = 3  # reading, writing and reading again, against once in place
_SHORT = 1024  # tokens; fused attention reads up to the longest of all sequences, which costs the more the longer it is


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options of a layer's attention.

    Attributes:
        scale: multiplies the scores.
        window: a token sees this many tokens, itself included; None sees all before it.
        softcap: squashes the scores into (-softcap, softcap) (Gemma 2, arXiv 2408.00118); None leaves them.
    """

    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class SingleRows:
    """The sequences that add one token: their slots, ascending, and their lengths with the new token.

    `plans` keeps what the layers derive from them, which is then computed once a step and not once a layer.
    """

    slots: Int64Array
    lengths: Int64Array
    device: torch.device
    plans: dict[tuple[object, ...], object] = field(default_factory=dict)

    @property
    def num(self) -> int:
        return len(self.slots)


class KeyValueStore(ABC):
    """One layer's keys and values."""

    _keys: torch.Tensor
    _values: torch.Tensor

    @abstractmethod
    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Store keys and values [N, H, D] of N tokens, each at its slot and position [N]."""

    @abstractmethod
    def read(self, slots: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [n, H, length, D] of n slots."""

    @abstractmethod
    def attend_singles(self, rows: SingleRows, queries: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Return [R, H * G, D]: each row's one query [R, H * G, D] against all keys in its slot."""

    @abstractmethod
    def resize(self, num_slots: int, num_tokens: int) -> None:
        """Grow to that many slots and tokens; positions that were never written are zero."""

    @abstractmethod
    def copy_prefix(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Overwrite the tokens from `start` to `length` (or some more around them) of one slot with another's."""

    def wipe(self, slot: int) -> None:
        """Zero a slot."""
        self._keys[slot] = 0
        self._values[slot] = 0

    def num_bytes(self) -> int:
        """Return the bytes of memory held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._keys, self._values))


def store_type(sample: torch.Tensor, max_len: int) -> type[PlainStore] | type[BlockStore]:
    """Return the faster store for keys and values like `sample`, of sequences of at most `max_len` tokens.

    By what stays the same on a machine, and not by a measurement: they round differently, and a run that goes on must
    sample what it would have.
    """
    if sample.device.type != "cpu" or sample.dtype != torch.float32:
        return PlainStore
    return PlainStore if max_len <= _SHORT and _multiplies_thin_matrices_quickly() else BlockStore


def _multiplies_thin_matrices_quickly() -> bool:
    # MKL's thin products are made for Intel's processors. Measured on one core of a Xeon at 64 sequences of 2 key heads
    # of 64: fused attention takes 0.6 of the blocks' time at 130 tokens, 0.8 at 600, 0.9 at 1,100, and up to 1.7 times
    # as long where lengths differ by a factor of 3; on the machine that the blocks were made on, 2.4 to 3.4 times.
    capabilities: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    return str(capabilities().get("cpu_name")).startswith("Intel")


def masked_scores(scores: torch.Tensor, mask: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Scores, already scaled, capped and masked."""
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    return scores + mask


@dataclass(frozen=True, slots=True)
class _PlainPlan:
    """A plan for reading the rows' keys: gathered from `slots`, or in place from the contiguous slots [first, last).

    `place` [R] is each row's place among the slots read, None if that is its number; `mask` [read, 1, 1, length].
    """

    slots: torch.Tensor | None
    first: int
    last: int
    place: torch.Tensor | None
    length: int
    mask: torch.Tensor


class PlainStore(KeyValueStore):
    """Keys and values as [S, H, T, D]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_slots: int, num_tokens: int) -> None:
        self._keys, self._values = (
            new.new_zeros(num_slots, new.shape[1], num_tokens, new.shape[2]) for new in (keys, values)
        )

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self._keys[slots, :, positions] = keys
        self._values[slots, :, positions] = values

    def read(self, slots: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys[:, :, :length], self._values[:, :, :length]
        return keys.index_select(0, slots), values.index_select(0, slots)

    def attend_singles(self, rows: SingleRows, queries: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        # Grouped query heads attend as if they were positions: no key is repeated.
        key = ("plain", options.window, queries.dtype)
        plan = rows.plans.get(key)
        if plan is None:
            plan = rows.plans[key] = _plan_plain(rows, options.window, queries.dtype)
        assert isinstance(plan, _PlainPlan)
        num_rows, num_heads, size = queries.shape
        grouped_queries = queries.reshape(num_rows, self._keys.shape[1], -1, size)
        keys, values = self._keys[:, :, : plan.length], self._values[:, :, : plan.length]
        if plan.slots is not None:
            keys, values = self.read(plan.slots, plan.length)
        else:
            keys, values = keys[plan.first : plan.last], values[plan.first : plan.last]
        if plan.place is not None:
            spread = grouped_queries.new_zeros(len(keys), *grouped_queries.shape[1:])
            grouped_queries = spread.index_copy_(0, plan.place, grouped_queries)
        if options.softcap is None:
            output = F.scaled_dot_product_attention(
                grouped_queries, keys, values, attn_mask=plan.mask, scale=options.scale
            )
        else:
            scores = masked_scores((grouped_queries * options.scale) @ keys.transpose(-1, -2), plan.mask, options)
            output = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values
        if plan.place is not None:
            output = output.index_select(0, plan.place)
        return output.reshape(num_rows, num_heads, -1)

    def resize(self, num_slots: int, num_tokens: int) -> None:
        self._keys, self._values = (
            self._copy_resized(old, num_slots, num_tokens) for old in (self._keys, self._values)
        )

    def copy_prefix(self, source: int, target: int, length: int, start: int = 0) -> None:
        for tensor in (self._keys, self._values):
            tensor[target, :, start:length] = tensor[source, :, start:length]

    @staticmethod
    def _copy_resized(old: torch.Tensor, num_slots: int, num_tokens: int) -> torch.Tensor:
        new = old.new_zeros(num_slots, old.shape[1], num_tokens, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


def _plan_plain(rows: SingleRows, window: int | None, dtype: torch.dtype) -> _PlainPlan:
    first, last = int(rows.slots[0]), int(rows.slots[-1]) + 1
    length, gather = int(rows.lengths.max()), rows.num * _COST_OF_GATHERING < last - first
    place = None if gather or rows.num == last - first else rows.slots - first
    num_seen = rows.lengths
    if place is not None:
        num_seen = np.ones(last - first, np.int64)  # an idle slot sees one key, lest its softmax gives NaN
        num_seen[place] = rows.lengths
    is_hidden = np.arange(length) >= num_seen[:, None]
    if window is not None:
        is_hidden |= np.arange(length) < num_seen[:, None] - window
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=rows.device)
    mask.masked_fill_(torch.from_numpy(is_hidden).to(rows.device), float("-inf"))
    return _PlainPlan(
        slots=torch.from_numpy(rows.slots).to(rows.device) if gather else None,
        first=first,
        last=last,
        place=None if place is None else torch.from_numpy(place).to(rows.device),
        length=length,
        mask=mask[:, None, None],
    )


@dataclass(frozen=True, slots=True)
class _BlockPlan:
    """The blocks that the rows read. E = (row, query head, block) triples; width = blocks of the longest row.

    Attributes:
        query_rows: [E] the query of each triple, among [R * H * G, D].
        key_rows, key_bags: the rows of the keys as [S * H * T / BLOCK * D, BLOCK] that each triple sums, and where its
            sum starts.
        value_rows, value_bags: the rows of the values as [S * H * T, D] that each (row, query head) sums.
        padded_rows: [E] where each triple's scores go in [R * H * G * width, BLOCK].
        mask: [R, H * G, width * BLOCK].
    """

    query_rows: torch.Tensor
    key_rows: torch.Tensor
    key_bags: torch.Tensor
    value_rows: torch.Tensor
    value_bags: torch.Tensor
    padded_rows: torch.Tensor
    mask: torch.Tensor


class BlockStore(KeyValueStore):
    """Keys as [S, H, T / BLOCK, D, BLOCK], values as [S, H, T / BLOCK, BLOCK, D]; float32 on a CPU.

    Scores of a block are a sum of D rows of keys weighted by the query, the output a sum of rows of values weighted by
    the probabilities; and `embedding_bag` computes weighted sums of rows at given indices, one bag a sum. Its kernel
    streams rows at memory speed, where `scaled_dot_product_attention` multiplies thin matrices and reads padding too.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_slots: int, num_tokens: int) -> None:
        num_blocks = -(-num_tokens // BLOCK)
        self._keys = _untouched_zeros(num_slots, keys.shape[1], num_blocks, keys.shape[2], BLOCK)
        self._values = _untouched_zeros(num_slots, values.shape[1], num_blocks, BLOCK, values.shape[2])

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        block, within = positions // BLOCK, positions % BLOCK
        self._keys[slots, :, block, :, within] = keys
        self._values[slots, :, block, within] = values

    def read(self, slots: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks = -(-length // BLOCK)
        keys = self._keys[:, :, :num_blocks]
        if num_blocks == 1:
            keys = keys.index_select(0, slots).transpose(-1, -2)
        else:  # blocks side by side need a copy of the transposed keys: this one takes them from the store at once
            keys = keys.transpose(-1, -2).index_select(0, slots)
        values = self._values[:, :, :num_blocks].index_select(0, slots)
        return keys.flatten(2, 3)[:, :, :length], values.flatten(2, 3)[:, :, :length]

    def attend_singles(self, rows: SingleRows, queries: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        num_rows, num_heads, size = queries.shape
        key = ("blocks", options.window, num_heads, self._keys.shape)
        plan = rows.plans.get(key)
        if plan is None:
            plan = rows.plans[key] = _plan_blocks(rows, options.window, num_heads, self._keys.shape)
        assert isinstance(plan, _BlockPlan)
        scores = F.embedding_bag(
            plan.key_rows,
            self._keys.view(-1, BLOCK),
            plan.key_bags,
            mode="sum",
            per_sample_weights=(queries * options.scale).reshape(-1, size).index_select(0, plan.query_rows).view(-1),
        )
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        padded_scores = plan.mask.clone()
        padded_scores.view(-1, BLOCK).index_add_(0, plan.padded_rows, scores)
        probs = torch.softmax(padded_scores, dim=-1)
        output = F.embedding_bag(
            plan.value_rows,
            self._values.view(-1, self._values.shape[-1]),
            plan.value_bags,
            mode="sum",
            per_sample_weights=probs.view(-1, BLOCK).index_select(0, plan.padded_rows).view(-1),
        )
        return output.view(num_rows, num_heads, -1)

    def resize(self, num_slots: int, num_tokens: int) -> None:
        num_blocks = -(-num_tokens // BLOCK)
        for name, old in (("_keys", self._keys), ("_values", self._values)):
            new = _untouched_zeros(num_slots, old.shape[1], num_blocks, *old.shape[3:])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def copy_prefix(self, source: int, target: int, length: int, start: int = 0) -> None:
        blocks = slice(start // BLOCK, -(-length // BLOCK))
        for tensor in (self._keys, self._values):
            tensor[target, :, blocks] = tensor[source, :, blocks]


def _untouched_zeros(*shape: int) -> torch.Tensor:
    # numpy's zeros take memory when they are first used; torch would fill them at once.
    return torch.from_numpy(np.zeros(shape, np.float32))


def _plan_blocks(rows: SingleRows, window: int | None, num_heads: int, shape: torch.Size) -> _BlockPlan:
    _, num_kv_heads, blocks_per_slot, size, _ = shape
    first = np.zeros_like(rows.lengths) if window is None else np.maximum(rows.lengths - window, 0) // BLOCK
    counts = -(-rows.lengths // BLOCK) - first
    width = int(counts.max())
    # One bag a (row, query head), in that order; one triple a bag and block.
    bag_counts = np.repeat(counts, num_heads)
    bag_starts = np.cumsum(bag_counts) - bag_counts
    bag_of = np.repeat(np.arange(len(bag_counts)), bag_counts)
    within = np.arange(len(bag_of)) - bag_starts[bag_of]
    row_of, head_of = bag_of // num_heads, bag_of % num_heads // (num_heads // num_kv_heads)
    block = (rows.slots[row_of] * num_kv_heads + head_of) * blocks_per_slot + first[row_of] + within
    position = first[:, None] * BLOCK + np.arange(width * BLOCK)
    hidden = position >= rows.lengths[:, None]
    if window is not None:
        hidden |= position < rows.lengths[:, None] - window
    mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    blocks = torch.from_numpy(block)[:, None]
    return _BlockPlan(
        query_rows=torch.from_numpy(bag_of),
        key_rows=(blocks * size + torch.arange(size)).view(-1),
        key_bags=torch.arange(0, len(block) * size, size),
        value_rows=(blocks * BLOCK + torch.arange(BLOCK)).view(-1),
        value_bags=torch.from_numpy(bag_starts * BLOCK),
        padded_rows=torch.from_numpy(bag_of * width + within),
        mask=mask[:, None].expand(-1, num_heads, -1).contiguous(),
    )


_FIRST_SLOTS = 8
_FIRST_TOKENS = 256


class SlotCache:
    """Per layer a store of keys and values, all growing on demand by doubling their slots and tokens.

    A layer's store is made when it writes first, with the heads, sizes and dtype that the model produces. Positions
    that were never written hold zeros: masked positions are multiplied by a probability of 0, and 0 * NaN would be NaN.

    Attributes:
        lengths: [max_slots] int64, how many leading positions of each slot are valid.
        tokens: [max_slots, T] int32, the tokens at those positions.
    """

    def __init__(self, *, max_slots: int, max_len: int) -> None:
        self.max_slots = max_slots
        self.max_len = max_len
        self.lengths = np.zeros(max_slots, np.int64)
        self._num_slots = min(_FIRST_SLOTS, max_slots)
        self._num_tokens = min(_FIRST_TOKENS, max_len)
        self.tokens: Int32Array = np.zeros((max_slots, self._num_tokens), np.int32)
        self._layers: dict[int, KeyValueStore] = {}

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Make room for slots [0, num_slots) of `num_tokens` tokens, at most `max_slots` and `max_len`."""
        assert num_slots <= self.max_slots
        assert num_tokens <= self.max_len
        if num_slots <= self._num_slots and num_tokens <= self._num_tokens:
            return
        self._num_slots = _double_until(self._num_slots, num_slots, self.max_slots)
        self._num_tokens = _double_until(self._num_tokens, num_tokens, self.max_len)
        tokens = np.zeros((self.max_slots, self._num_tokens), np.int32)
        tokens[:, : self.tokens.shape[1]] = self.tokens
        self.tokens = tokens
        for store in self._layers.values():
            store.resize(self._num_slots, self._num_tokens)

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> KeyValueStore:
        """Store keys and values [N, H, D] of N tokens at (slot, position); returns the layer's store."""
        store = self._layers.get(layer)
        if store is None:  # only now are the heads, sizes and dtype known
            make_store = store_type(keys, self.max_len)
            store = self._layers[layer] = make_store(keys, values, self._num_slots, self._num_tokens)
        store.write(keys, values, slots, positions)
        return store

    def record(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Note which tokens [N] are being written where; each slot's positions go on from its length."""
        self.tokens[slots, positions] = tokens
        np.maximum.at(self.lengths, slots, positions + 1)

    def common_prefix(self, slot: int, prompt: Int32Array) -> int:
        """Return how many leading tokens of `prompt` the slot holds."""
        length = min(int(self.lengths[slot]), len(prompt))
        return first_difference(self.tokens[slot, :length], prompt[:length])

    def longest_prefix(self, prompt: Int32Array, known: int = 0) -> tuple[int, int]:
        """Return the slot that holds most leading tokens of `prompt`, and how many; (0, 0) if none holds any.

        `known` tokens of it are held elsewhere: slots that differ in the next one are passed over.
        """
        width = min(len(prompt), int(self.lengths.max(initial=0)))
        if width <= known:
            return 0, 0
        rows = np.flatnonzero((self.lengths > known) & (self.tokens[:, known] == prompt[known]))
        if len(rows) == 0:
            return 0, 0
        differs = self.tokens[rows, :width] != prompt[:width]
        equal = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        equal = np.minimum(equal, self.lengths[rows])
        best = int(equal.argmax())
        return int(rows[best]), int(equal[best])

    def copy_prefix(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Make the first `length` tokens of `target`, which has `start` of them, those of `source`."""
        self.tokens[target, start:length] = self.tokens[source, start:length]
        for store in self._layers.values():
            store.copy_prefix(source, target, length, start)
        self.lengths[target] = length

    def wipe(self, slot: int) -> None:
        """Forget a slot and overwrite it."""
        self.lengths[slot] = 0  # a NaN left in it would reach a later owner's masked positions
        for store in self._layers.values():
            store.wipe(slot)

    def clear(self) -> None:
        """Forget the contents of all slots."""
        self.lengths[:] = 0

    def num_bytes(self) -> int:
        """Return the bytes held by keys and values."""
        return sum(store.num_bytes() for store in self._layers.values())


def _double_until(size: int, min_size: int, limit: int) -> int:
    while size < min_size:
        size *= 2
    return min(size, limit)


def first_difference(a: Int32Array, b: Int32Array) -> int:
    """Return the first index at which two arrays of one length differ; their length if they do not.

    >>> first_difference(np.array([1, 2, 3], np.int32), np.array([1, 5, 3], np.int32))
    1
    """
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)
