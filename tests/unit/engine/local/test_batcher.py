"""The packed batch, driven step by step and without a thread: what is read, kept, copied and given back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from agreement import nudge, plain_logprobs
from transformers import Qwen3Config

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.batch import Batch, Counters, Finished, Request
from gspo_gym.engine.local.batcher import Batcher, PackedModel, SlotStep, _min_shared_tokens, slot_attention
from gspo_gym.engine.local.kv_store import SlotCache
from gspo_gym.engine.local.plain_model import GeneralBatch, PlainModel
from gspo_gym.engine.local.spans import SegmentSpan, group_spans
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.types import Completion

MAX_LEN = 512
HISTORY = list(range(100, 120))  # 20 tokens; 16 are worth copying


def batcher(model: Any, max_batch_size: int = 4) -> Batcher:
    return Batcher(PackedModel(model, max_model_len=MAX_LEN), max_model_len=MAX_LEN, max_batch_size=max_batch_size)


def request(prompt: Sequence[int], max_new: int = 1, session_id: str | None = None, seed: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_new, stop_token_ids=(), seed=seed)
    return Request(np.array(prompt, np.int32), sampling, max_new, session_id)


def run(batch: Batch, *requests: Request) -> list[Finished]:
    """Submit them together and step until all have left, which takes a step a token and one more at most."""
    for each in requests:
        batch.submit(each)
    left = []
    for _ in range(max(each.max_new for each in requests) + 1):
        left += batch.step()
    assert batch.num_in_flight == 0
    return left


def completion(finished: Finished) -> Completion:
    assert isinstance(finished.result, Completion)
    return finished.result


def change(batch: Batcher, **expected: int) -> None:
    """Compare the counters of tokens that are not zero."""
    found = batch.counters
    names = ("num_read_tokens", "num_kept_tokens", "num_copied_tokens")
    assert {name: value for name in names if (value := getattr(found, name))} == expected
    batch.counters = Counters()


def test_a_prompt_is_read_in_the_first_step_which_samples_and_every_further_step_samples_one_more(model: Any) -> None:
    batch, asked = batcher(model), request([5, 6, 7, 8, 9], max_new=3)
    batch.submit(asked)
    assert (batch.num_in_flight, batch.step(), batch.step()) == (1, [], [])
    [finished] = batch.step()
    assert finished.request is asked
    assert len(completion(finished).token_ids) == 3
    assert batch.counters == Counters(num_steps=3, num_sampled_tokens=3, num_read_tokens=5)
    assert (batch.num_in_flight, batch.step()) == (0, [])


def test_a_turn_reads_only_what_its_session_has_not_computed(model: Any, plain_logprobs: Any) -> None:
    batch = batcher(model)
    prompt = [5, 6, 7]
    said = completion(run(batch, request(prompt, max_new=4, session_id="a"))[0]).token_ids.tolist()
    change(batch, num_read_tokens=3)
    history = [*prompt, *said, 8, 9]
    answer = completion(run(batch, request(history, max_new=2, session_id="a", seed=1))[0])
    change(batch, num_kept_tokens=6, num_read_tokens=3)  # the fourth token was sampled, and never run
    expected = plain_logprobs(model, history, answer.token_ids.tolist())
    np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)  # float32 rounding
    run(batch, request(history, session_id="a", seed=2))
    change(batch, num_kept_tokens=8)  # all but the last, which is run for its logits like a sampled token


def test_sixteen_tokens_that_another_sequence_begins_with_are_copied_and_fewer_are_read(model: Any) -> None:
    batch = batcher(model)
    run(batch, request(HISTORY, session_id="a"))
    change(batch, num_read_tokens=20)
    run(batch, request([*HISTORY[:15], 1, 2]))
    change(batch, num_read_tokens=17)
    run(batch, request([*HISTORY[:16], 1, 2], session_id="b"))
    change(batch, num_copied_tokens=16, num_read_tokens=2)
    run(batch, request([3, 4], session_id="c"))
    batch.counters = Counters()
    run(batch, request([*HISTORY, 1], session_id="c"))  # what c holds itself is of no use to it
    change(batch, num_copied_tokens=20)  # the last is run like a sampled token


def test_a_session_keeps_its_own_beginning_even_if_a_slot_before_it_holds_the_same(model: Any) -> None:
    batch = batcher(model)
    run(batch, request(HISTORY, session_id="a"))
    run(batch, request(HISTORY, session_id="b"))
    batch.counters = Counters()
    run(batch, request([*HISTORY, 7, 8], session_id="b"))
    change(batch, num_read_tokens=2, num_kept_tokens=20)


def test_of_two_that_begin_alike_the_second_waits_a_step_and_copies(model: Any, plain_logprobs: Any) -> None:
    batch = batcher(model)
    left = run(batch, request(HISTORY, max_new=2, seed=1), request(HISTORY, max_new=2, seed=2), request([7]))
    assert [finished.request.sampling.seed for finished in left] == [0, 1, 2]
    change(batch, num_read_tokens=20, num_copied_tokens=19)
    for finished in left[1:]:
        answer = completion(finished)
        expected = plain_logprobs(model, HISTORY, answer.token_ids.tolist())
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)  # float32 rounding


def test_a_session_copies_what_another_has_beyond_its_own_turns(model: Any, plain_logprobs: Any) -> None:
    """Two episodes of a group that took the same turn and see the same answer: one of them reads it."""
    batch = batcher(model)
    run(batch, request(HISTORY, session_id="a"), request(HISTORY, session_id="b"))
    batch.counters = Counters()
    longer = [*HISTORY, *range(30, 50)]
    left = run(batch, request(longer, 2, "a", seed=1), request([*longer, 9], 2, "b", seed=2))
    change(batch, num_kept_tokens=20 + 20, num_read_tokens=20, num_copied_tokens=20)  # 9 is run as a sampled one is
    for finished in left:
        answer, prompt = completion(finished), finished.request.prompt.tolist()
        expected = plain_logprobs(model, prompt, answer.token_ids.tolist())
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)  # float32 rounding


@pytest.mark.parametrize(
    ("num_layers", "num_weights", "expected"),
    [
        (2, 300_000, 16),  # 4e6 * 2 / 3e5 = 27, and 16 is enough
        (4, 2_000_000, 8),  # 4e6 * 4 / 2e6
        (30, 134_000_000, 4),  # 4e6 * 30 / 1.34e8 = 0.9
    ],
)
def test_the_larger_a_model_the_fewer_tokens_are_worth_a_copy(num_layers: int, num_weights: int, expected: int) -> None:
    module = torch.nn.Linear(num_weights // 100, 100, bias=False, device="meta")
    module.config = Qwen3Config(num_hidden_layers=num_layers)
    assert _min_shared_tokens(module) == expected


def test_a_session_that_ended_gives_its_slot_away_before_one_that_waits_longer_loses_its_own(model: Any) -> None:
    batch = batcher(model, max_batch_size=2)
    for name, token in (("a", 5), ("b", 6)):
        run(batch, request([token] * 8, session_id=name))
    batch.end_session("b")
    run(batch, request([7] * 8, session_id="c"))
    batch.counters = Counters()
    run(batch, request([5] * 9, session_id="a"))
    change(batch, num_kept_tokens=8)


def test_weights_that_were_changed_fail_what_is_in_work_and_what_waits_and_the_batch_goes_on(model: Any) -> None:
    batch = batcher(model, max_batch_size=1)
    asked = [request([5, 6], max_new=9), request([7, 8], max_new=9)]
    for each in asked:
        batch.submit(each)
    batch.step()
    with pytest.raises(EngineError, match="expected no request in flight, got 2"):
        batch.update_weights(1)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    failed = batch.step()
    assert [finished.request for finished in failed] == asked
    assert all("weights changed since version 0" in str(finished.result) for finished in failed)
    assert batch.num_in_flight == 0
    batch.update_weights(4)
    [answer] = run(batch, request([5, 6], max_new=2))
    assert completion(answer).weight_version.tolist() == [4, 4]


@pytest.mark.parametrize("kind", ["packed", "general"])
def test_a_frozen_batch_goes_on_under_new_weights_from_the_token_where_it_stood(kind: str, model: Any) -> None:
    """Each token's logprob is that of the weights of its version, given all tokens before it."""
    batch: Batch = batcher(model, max_batch_size=1)
    if kind == "general":
        plain = PlainModel(model, max_model_len=MAX_LEN)
        plain.verify()
        batch = GeneralBatch(plain, max_batch_size=1)
    works, waits = request([5, 6, 7], max_new=6, session_id="a"), request([8, 9], max_new=2)
    for each in (works, waits):
        batch.submit(each)
    for _ in range(3):
        assert batch.step() == []
    batch.is_frozen = True
    assert (batch.step(), batch.has_work, batch.num_in_flight) == ([], False, 2)
    before = copy.deepcopy(model)
    nudge(model, seed=1)
    batch.update_weights(1)
    ended = {finished.request: completion(finished) for _ in range(9) for finished in batch.step()}
    done = ended[works]
    assert done.weight_version.tolist() == [0, 0, 0, 1, 1, 1]
    assert ended[waits].weight_version.tolist() == [1, 1]
    old, new = (plain_logprobs(each, [5, 6, 7], done.token_ids.tolist()) for each in (before, model))
    assert np.abs(old - new).min() > 1e-3
    np.testing.assert_allclose(done.logprobs, [*old[:3], *new[3:]], rtol=0, atol=1e-4)
    batch.is_frozen = True
    nudge(model, seed=2)
    batch.update_weights(5)
    [answer] = run(batch, request([5, 6], max_new=2))  # in the slot of the first: its versions are forgotten
    assert completion(answer).weight_version.tolist() == [5, 5]


def test_a_write_that_no_counter_saw_is_found_when_the_batch_was_empty(model: Any) -> None:
    batch = batcher(model)
    run(batch, request([5, 6]))
    assert batch.step() == []  # of nobody, as after an end of a session: the write comes later
    model.lm_head.weight.data.add_(0.5)
    batch.submit(request([5, 6]))
    [finished] = batch.step()
    assert "weights changed since version 0" in str(finished.result)


def test_a_cancelled_request_leaves_at_once_whether_it_waits_or_works(model: Any) -> None:
    batch = batcher(model, max_batch_size=1)
    works, waits, last = (request([token], max_new=9) for token in (5, 6, 7))
    for each in (works, waits, last):
        batch.submit(each)
    batch.step()
    batch.cancel(waits)
    assert batch.num_in_flight == 2
    batch.cancel(works)
    batch.cancel(works)  # it has left
    left = [finished.request for _ in range(9) for finished in batch.step()]
    assert left == [last]


def test_the_cache_grows_for_what_may_be_sampled_too(model: Any) -> None:
    """It begins with room for 256 tokens; these are 250, and 20 more."""
    batch = batcher(model)
    [finished] = run(batch, request(list(range(5, 255)), max_new=20))
    assert len(completion(finished).token_ids) == 20


def test_a_packed_model_is_compared_over_a_prompt_its_continuation_and_two_single_tokens(model: Any) -> None:
    packed = PackedModel(model, max_model_len=MAX_LEN)
    read: list[tuple[int, bool]] = []
    packed.shared.module.register_forward_pre_hook(
        lambda module, _, options: read.append((options["input_ids"].shape[1], options["use_cache"])), with_kwargs=True
    )
    packed.verify()
    # The first by the model's own attention; none with a cache of its own, which would be filled and thrown away.
    assert read == [(12, False), (5, False), (5, False), (1, False), (1, False)]


def test_a_model_that_raises_with_the_engines_cache_is_refused_with_what_it_raised(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, original = PackedModel(model, max_model_len=MAX_LEN), type(model).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if "slot_step" in options:
            raise KeyError("rotary")
        return original(self, *args, **options)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ConfigError, match=r"does not run with the engine's cache: KeyError\('rotary'\)"):
        packed.verify()


def test_attention_without_a_scale_divides_by_the_root_of_the_head_size() -> None:
    query, key, value = (torch.sin(torch.arange(1.0, 25.0) * factor).view(1, 2, 3, 4) for factor in (1, 2, 3))
    groups = group_spans([SegmentSpan(slot=0, start=0, stop=3, context=0)], torch.device("cpu"))
    step = SlotStep(SlotCache(max_slots=1, max_len=8), torch.zeros(3).long(), torch.arange(3), None, groups)
    module = torch.nn.Linear(1, 1)
    module.layer_idx = 0  # type: ignore[assignment]
    output, _ = slot_attention(module, query, key, value, None, slot_step=step)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=0, atol=1e-6)


def test_attention_that_the_engine_cannot_do_is_refused_by_name() -> None:
    row = torch.zeros(1, 2, 3, 4)
    step = SlotStep(SlotCache(max_slots=1, max_len=8), torch.zeros(3), torch.arange(3), None, ())
    refused = r"the attention of Linear does not hand the engine's step over"
    with pytest.raises(EngineError, match=refused):
        slot_attention(torch.nn.Linear(1, 1), row, row, row, None)
    for extra in ({"s_aux": torch.zeros(2)}, {"position_bias": torch.zeros(1)}):
        with pytest.raises(EngineError, match=r"the attention of Linear adds sinks or a bias to its scores"):
            slot_attention(torch.nn.Linear(1, 1), row, row, row, None, slot_step=step, **extra)
