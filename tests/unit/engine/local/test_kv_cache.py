"""The cache's bookkeeping of tokens: what counts as a shared prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.engine.local.kv_store import BlockStore, PlainStore, SlotCache


def _cache(*sequences: list[int]) -> SlotCache:
    cache = SlotCache(max_slots=4, max_len=600)
    for slot, tokens in enumerate(sequences):
        positions = np.arange(len(tokens))
        cache.record(np.full(len(tokens), slot), positions, np.array(tokens, np.int64))
    return cache


def _prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_common_prefix_ends_at_the_first_difference_or_with_either_side() -> None:
    cache = _cache([1, 2, 3])
    assert cache.common_prefix(0, _prompt(1, 2, 9, 3)) == 2
    assert cache.common_prefix(0, _prompt(1, 2)) == 2
    assert cache.common_prefix(0, _prompt(1, 2, 3, 4)) == 3
    assert cache.common_prefix(1, _prompt(1)) == 0


def test_the_longest_prefix_is_found_among_all_slots() -> None:
    cache = _cache([1, 2, 3, 4], [1, 2, 7, 8, 9], [1])
    assert cache.longest_prefix(_prompt(1, 2, 7, 8, 0)) == (1, 4)
    assert cache.longest_prefix(_prompt(1, 2, 3, 4, 5, 6)) == (0, 4)
    assert cache.longest_prefix(_prompt(5))[1] == 0
    assert cache.longest_prefix(_prompt(1, 2, 7, 8, 0), known=3) == (1, 4)
    assert cache.longest_prefix(_prompt(1, 2, 7, 8, 0), known=4) == (0, 0), "no slot holds more than these"


def test_tokens_beyond_a_slots_length_match_nothing() -> None:
    cache = _cache([1, 2, 3, 4])
    cache.lengths[0] = 2
    assert cache.common_prefix(0, _prompt(1, 2, 3, 4)) == 2
    assert cache.longest_prefix(_prompt(1, 2, 3, 4)) == (0, 2)
    # Zero is a token too: slots that hold nothing do not match it with their blank memory.
    assert cache.longest_prefix(_prompt(0, 0))[1] == 0


def test_a_prompt_longer_than_any_slot_yet_is_compared_as_far_as_they_go() -> None:
    cache = _cache([1, 2, 3], list(range(1, 257)))
    assert cache.tokens.shape == (4, 256)  # of 600, as long as none is longer
    assert cache.longest_prefix(np.arange(1, 400, dtype=np.int32)) == (1, 256)
    cache.reserve(1, 257)
    assert cache.tokens.shape == (4, 512)


def test_after_wiping_a_slot_or_clearing_all_nothing_matches() -> None:
    cache = _cache([1, 2, 3], [1, 2])
    cache.wipe(0)
    assert cache.longest_prefix(_prompt(1, 2, 3)) == (1, 2)
    cache.clear()
    assert cache.longest_prefix(_prompt(1, 2, 3)) == (0, 0)


@pytest.mark.parametrize(("layout", "num_tokens"), [(PlainStore, 600), (BlockStore, 640)])  # 640: whole blocks
def test_growing_keeps_tokens_keys_and_values(layout: Any, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_gym.engine.local.kv_store.store_type", lambda *_: layout)
    cache = _cache([1, 2, 3])
    keys = torch.arange(12, dtype=torch.float32).view(3, 2, 2)
    cache.write(0, keys, -keys, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    cache.reserve(4, 600)
    assert cache.num_bytes() == 4 * num_tokens * 2 * 2 * 4 * 2  # slots, tokens, heads, size, bytes; both
    assert cache.common_prefix(0, _prompt(1, 2, 3)) == 3
    held_keys, held_values = cache.write(0, keys[:1], -keys[:1], torch.tensor([3]), torch.tensor([599])).read(
        torch.tensor([0]), 3
    )
    assert torch.equal(held_keys[0].transpose(0, 1), keys)
    assert torch.equal(held_values[0].transpose(0, 1), -keys)


def test_a_copied_prefix_takes_its_tokens_along() -> None:
    cache = _cache([1, 2, 3, 4], [9])
    cache.copy_prefix(source=0, target=1, length=3)
    assert cache.common_prefix(1, _prompt(1, 2, 3, 4)) == 3
    assert cache.common_prefix(0, _prompt(1, 2, 3, 4)) == 4
