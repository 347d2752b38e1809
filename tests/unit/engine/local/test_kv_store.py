"""Stores: both layouts against attention written out, token by token, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gspo_gym.engine.local.kv_store import (
    BLOCK,
    AttentionOptions,
    BlockStore,
    KeyValueStore,
    PlainStore,
    SingleRows,
    store_type,
)
from gspo_gym.engine.local.spans import SegmentSpan, attend_group, group_spans

NUM_SLOTS, NUM_HEADS, NUM_TOKENS, SIZE = 9, 2, 3 * BLOCK, 8
# float32 sums of up to 192 products of numbers near 1, in another order than float64's: measured 1e-6.
TOLERANCE = 1e-5

STORES = pytest.mark.parametrize("store_class", [PlainStore, BlockStore])
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(scale=0.3, window=None, softcap=None),
        AttentionOptions(scale=0.3, window=20, softcap=None),
        AttentionOptions(scale=0.3, window=None, softcap=1.5),
        AttentionOptions(scale=0.3, window=90, softcap=1.5),
    ],
    ids=["full", "window", "softcap", "window and softcap"],
)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def _filled(store_class: type[PlainStore] | type[BlockStore]) -> tuple[KeyValueStore, torch.Tensor, torch.Tensor]:
    """A store that holds random keys and values, and the same as plain tensors [S, H, T, D]."""
    keys, values = (_random(NUM_SLOTS, NUM_HEADS, NUM_TOKENS, SIZE, seed=s) for s in (0, 1))
    store = store_class(keys[:, :, 0], values[:, :, 0], NUM_SLOTS, NUM_TOKENS)
    slots, positions = torch.meshgrid(torch.arange(NUM_SLOTS), torch.arange(NUM_TOKENS), indexing="ij")
    flat = [t.transpose(1, 2).reshape(-1, NUM_HEADS, SIZE) for t in (keys, values)]
    store.write(flat[0], flat[1], slots.reshape(-1), positions.reshape(-1))
    return store, keys, values


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int, options: AttentionOptions
) -> torch.Tensor:
    """[Hq, D]: one token's attention to the first `length` of [H, T, D], head by head."""
    groups = len(query) // len(keys)
    start = 0 if options.window is None else max(0, length - options.window)
    outputs = []
    for head, vector in enumerate(query.double()):
        seen = slice(start, length)
        scores = keys[head // groups, seen].double() @ vector * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        outputs.append(scores.softmax(0) @ values[head // groups, seen].double())
    return torch.stack(outputs).float()


@STORES
@OPTIONS
@pytest.mark.parametrize(
    "slots",
    [[0, 1, 2, 3], [0, 2, 3, 5], [1, 8]],
    ids=["side by side", "with idle slots between", "far apart"],
)
def test_single_tokens_attend_to_their_own_slot_and_no_further(
    store_class: type[PlainStore] | type[BlockStore], options: AttentionOptions, slots: list[int]
) -> None:
    store, keys, values = _filled(store_class)
    lengths = [1, BLOCK, BLOCK + 1, 150][: len(slots)]
    queries = _random(len(slots), 2 * NUM_HEADS, SIZE, seed=2)
    rows = SingleRows(np.array(slots), np.array(lengths), torch.device("cpu"))
    for _ in range(2):  # the second time with the plan that the first one left
        output = store.attend_singles(rows, queries, options)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            expected = _attend(queries[row], keys[slot], values[slot], length, options)
            torch.testing.assert_close(output[row], expected, rtol=0, atol=TOLERANCE)


@STORES
@OPTIONS
@pytest.mark.parametrize("contexts", [[0] * 5, [0, 1, 70], [50, 52, 51]])  # of five, four attend together
def test_the_tokens_of_a_prompt_attend_causally_after_their_context(
    store_class: type[PlainStore] | type[BlockStore], options: AttentionOptions, contexts: list[int]
) -> None:
    store, keys, values = _filled(store_class)
    spans, start = [], 2  # two packed tokens before them belong to somebody else
    for slot, (context, num_new) in enumerate(zip(contexts, [5, 9, 33, 10, 16], strict=False)):
        spans.append(SegmentSpan(slot=slot, start=start, stop=start + num_new, context=context))
        start += num_new
    queries = _random(start, 2 * NUM_HEADS, SIZE, seed=3)
    fresh = torch.zeros(2, start, NUM_HEADS, SIZE)
    for span in spans:
        new = slice(span.context, span.total)
        fresh[0, span.start : span.stop] = keys[span.slot, :, new].transpose(0, 1)
        fresh[1, span.start : span.stop] = values[span.slot, :, new].transpose(0, 1)
    packed = torch.full_like(queries, float("nan"))
    for group in group_spans(spans, torch.device("cpu")):
        packed[group.target] = attend_group(group, queries, (fresh[0], fresh[1]), store, options)
    for span in spans:
        for index in range(span.num_new):
            expected = _attend(
                queries[span.start + index], keys[span.slot], values[span.slot], span.context + index + 1, options
            )
            torch.testing.assert_close(packed[span.start + index], expected, rtol=0, atol=TOLERANCE)
    assert packed[:2].isnan().all()


def test_prompts_of_like_size_attend_together_and_others_apart() -> None:
    spans = [
        SegmentSpan(0, 0, 10, 0),
        SegmentSpan(1, 10, 22, 0),
        SegmentSpan(2, 22, 122, 0),
        SegmentSpan(3, 122, 132, 9),
    ]
    groups = group_spans(spans, torch.device("cpu"))
    assert [group.slots.tolist() for group in groups] == [[0, 1], [2], [3]]
    assert [(group.num_new, group.total) for group in groups] == [(12, 12), (100, 100), (10, 19)]


@pytest.mark.parametrize(
    ("sizes", "num_groups"),  # (context, new tokens) of two spans
    [
        (((0, 15), (0, 16)), 1),
        (((0, 16), (0, 17)), 2),
        (((117, 10), (118, 10)), 1),  # 127 and 128 tokens
        (((118, 10), (119, 10)), 2),
        (((0, 10), (1, 9)), 2),  # the first looks at the fresh keys only
    ],
)
def test_padding_is_at_most_sixteen_queries_and_a_hundred_and_twenty_eight_keys(
    sizes: tuple[tuple[int, int], ...], num_groups: int
) -> None:
    spans = [SegmentSpan(slot, 50 * slot, 50 * slot + new, context) for slot, (context, new) in enumerate(sizes)]
    assert len(group_spans(spans, torch.device("cpu"))) == num_groups


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [("Intel Xeon", PlainStore, BlockStore), ("AMD EPYC", BlockStore, BlockStore), (None, BlockStore, BlockStore)],
)
def test_the_layout_for_a_cpu_is_for_its_own_precision_and_where_blocks_are_faster(
    name: str | None, short: type[KeyValueStore], long: type[KeyValueStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name} if name else {}, raising=False)
    assert [store_type(torch.zeros(1, 2, 8), length) for length in (1024, 1025)] == [short, long]
    assert store_type(torch.zeros(1, 2, 8, dtype=torch.bfloat16), 1025) is PlainStore
    assert store_type(torch.zeros(1, 2, 8, device="meta"), 1025) is PlainStore


def test_blocks_are_of_sixty_four_tokens_and_only_those_that_hold_the_length_are_read() -> None:
    sample = torch.zeros(1, NUM_HEADS, SIZE)
    store = BlockStore(sample, sample, 1, 129)
    block_bytes = 64 * NUM_HEADS * SIZE * 4
    assert store.num_bytes() == 3 * 2 * block_bytes  # of keys and of values
    for length, num_blocks in ((64, 1), (65, 2)):
        read = store.read(torch.tensor([0]), length)
        assert [tensor.untyped_storage().nbytes() for tensor in read] == [num_blocks * block_bytes] * 2


@STORES
def test_a_store_that_grows_keeps_what_it_holds(store_class: type[PlainStore] | type[BlockStore]) -> None:
    store, keys, values = _filled(store_class)
    num_bytes = store.num_bytes()
    store.resize(2 * NUM_SLOTS, 2 * NUM_TOKENS)
    assert store.num_bytes() == 4 * num_bytes
    held = store.read(torch.arange(NUM_SLOTS), NUM_TOKENS)
    assert torch.equal(held[0], keys)
    assert torch.equal(held[1], values)
    assert not any(tensor.any() for tensor in store.read(torch.tensor([NUM_SLOTS]), 2 * NUM_TOKENS))


@STORES
def test_copying_from_a_token_on_gives_what_follows_it_and_leaves_whole_blocks_before(
    store_class: type[PlainStore] | type[BlockStore],
) -> None:
    store, keys, values = _filled(store_class)
    start, length = BLOCK + 5, 2 * BLOCK + 6
    store.copy_prefix(source=1, target=2, length=length, start=start)
    for grown, whole in zip(store.read(torch.tensor([2]), NUM_TOKENS), (keys, values), strict=True):
        assert torch.equal(grown[0, :, start:length], whole[1, :, start:length])
        assert torch.equal(grown[0, :, :BLOCK], whole[2, :, :BLOCK])
    source = store.read(torch.tensor([1]), NUM_TOKENS)
    assert torch.equal(source[0], keys[[1]])
    assert torch.equal(source[1], values[[1]])


@STORES
def test_copying_a_prefix_leaves_the_source_and_wiping_leaves_the_neighbours(
    store_class: type[PlainStore] | type[BlockStore],
) -> None:
    store, keys, values = _filled(store_class)
    store.copy_prefix(source=1, target=4, length=70)
    copied = store.read(torch.tensor([4]), 70)
    assert torch.equal(copied[0][0], keys[1, :, :70])
    assert torch.equal(copied[1][0], values[1, :, :70])
    store.wipe(1)
    assert not any(tensor.any() for tensor in store.read(torch.tensor([1]), NUM_TOKENS))
    assert torch.equal(store.read(torch.tensor([0, 2]), NUM_TOKENS)[0], keys[[0, 2]])
