"""Keys and values of many sequences, one slot each, and the tokens they were computed from.

Who owns a slot is `slots.py`'s business, and how a layer lies in memory `kv_store.py`'s. The tokens kept beside the
keys are what makes reuse safe: a prefix is reused where its tokens are equal, never because somebody says so.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gspo_gym.engine.local.kv_store import KeyValueStore, make_store
from gspo_gym.types import Int32Array

_FIRST_SLOTS = 8
_FIRST_TOKENS = 256


class SlotCache:
    """Per layer a store of keys and values, all growing on demand by doubling their slots and tokens.

    A layer's store is made when it writes first, so heads, sizes and dtype are whatever the model produces. Positions
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
        self._num_slots = _doubled(self._num_slots, num_slots, self.max_slots)
        self._num_tokens = _doubled(self._num_tokens, num_tokens, self.max_len)
        grown = np.zeros((self.max_slots, self._num_tokens), np.int32)
        grown[:, : self.tokens.shape[1]] = self.tokens
        self.tokens = grown
        for store in self._layers.values():
            store.resize(self._num_slots, self._num_tokens)

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> KeyValueStore:
        """Store keys and values [N, H, D] of N tokens at (slot, position); returns the layer's store."""
        store = self._layers.get(layer)
        if store is None:
            store = self._layers[layer] = make_store(keys, values, self._num_slots, self._num_tokens)
        store.write(keys, values, slots, positions)
        return store

    def record(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Note which tokens [N] are being written where; each slot's positions go on from its length."""
        self.tokens[slots, positions] = tokens
        np.maximum.at(self.lengths, slots, positions + 1)

    def common_prefix(self, slot: int, prompt: Int32Array) -> int:
        """How many leading tokens of `prompt` the slot holds."""
        length = min(int(self.lengths[slot]), len(prompt))
        return first_difference(self.tokens[slot, :length], prompt[:length])

    def longest_prefix(self, prompt: Int32Array) -> tuple[int, int]:
        """The slot that holds most leading tokens of `prompt`, and how many; (0, 0) if none holds any."""
        width = min(len(prompt), self.tokens.shape[1], int(self.lengths.max(initial=0)))
        if width == 0:
            return 0, 0
        differs = self.tokens[: self._num_slots, :width] != prompt[:width]
        equal = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        equal = np.minimum(equal, self.lengths[: self._num_slots])
        best = int(equal.argmax())
        return best, int(equal[best])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of `target` those of `source`, with their keys and values."""
        self.tokens[target, :length] = self.tokens[source, :length]
        for store in self._layers.values():
            store.copy_prefix(source, target, length)
        self.lengths[target] = length

    def wipe(self, slot: int) -> None:
        """Forget a slot and overwrite it, so that no NaN in it can reach a later owner's masked positions."""
        self.lengths[slot] = 0
        for store in self._layers.values():
            store.wipe(slot)

    def clear(self) -> None:
        """Forget the contents of all slots: nothing stored before can be matched again."""
        self.lengths[:] = 0

    def num_bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(store.num_bytes() for store in self._layers.values())


def _doubled(size: int, needed: int, limit: int) -> int:
    while size < needed:
        size *= 2
    return min(size, limit)


def first_difference(a: Int32Array, b: Int32Array) -> int:
    """The first index at which two arrays of one length differ; their length if they do not.

    >>> first_difference(np.array([1, 2, 3], np.int32), np.array([1, 5, 3], np.int32))
    1
    """
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)
