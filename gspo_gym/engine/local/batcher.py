"""The batch of most models: continuous batching over slots of keys and values, all tokens of a step packed.

A step is one forward pass over all tokens that are due: one for each request that is sampling, and the unread part of
the prompts of those that have just joined. A request that samples its last token leaves at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gspo_gym.engine.local.batch import Batch, Caching, Finished, NextLogits, Request
from gspo_gym.engine.local.kv_store import SingleRows, SlotCache
from gspo_gym.engine.local.packed_model import PackedModel
from gspo_gym.engine.local.plain_model import SlotStep
from gspo_gym.engine.local.rows import Int64Array
from gspo_gym.engine.local.spans import SegmentSpan, group_spans
from gspo_gym.types import Int32Array

_MAX_READ_TOKENS = 4096  # prompt tokens in one step; longer prompts are read in several
_MIN_SHARED_TOKENS = 16  # below this, copying another sequence's keys costs as much as computing them


@dataclass(slots=True)
class _Plan:
    """The tokens of one step, packed: single tokens of `decoding` slots first, then the `spans` of prompts."""

    decoding: Int64Array
    spans: list[SegmentSpan] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)  # slots with prompts that end in this step
    logits_at: list[int] = field(default_factory=list)  # packed index of the last token of each of them


class Batcher(Batch):
    """Requests in work and their keys and values."""

    def __init__(self, model: PackedModel, *, max_model_len: int, max_batch_size: int) -> None:
        super().__init__(model.shared, max_batch_size=max_batch_size)
        self._model = model
        self._cache = SlotCache(max_slots=max_batch_size, max_len=max_model_len)
        self._reading: dict[int, int] = {}  # slots with unread prompts -> tokens read so far
        self._decoding: Int64Array = np.zeros(0, np.int64)  # slots that sample, ascending

    @property
    def caching(self) -> Caching:
        return Caching.TURNS

    def _admit(self) -> None:
        """Give waiting requests slots, first come first served, and the parts of their prompts that the cache holds.

        A request with a beginning that is being read in this very step for another waits a step, and copies it then.
        """
        if self._waiting:  # all at once: growing step by step would copy what is there each time
            self._cache.reserve(min(self._slots.num_used + len(self._waiting), self._cache.max_slots), 1)
        postponed = []
        while self._waiting:
            request = self._waiting.popleft()
            own = self._slots.kept_slot(request.session_id)
            shared = 0 if own is None else self._cache.common_prefix(own, request.prompt)
            source = own
            if own is None or shared < _MIN_SHARED_TOKENS:  # the session has nothing to give: perhaps others have
                source, shared = self._cache.longest_prefix(request.prompt)
                if self._is_soon_shared(request.prompt, shared + _MIN_SHARED_TOKENS):
                    postponed.append(request)
                    continue
            slot = self._slots.acquire(request.session_id)
            if slot is None:
                self._waiting.appendleft(request)
                break
            self._join(request, slot, source, shared)
        self._waiting.extendleft(reversed(postponed))

    def _is_soon_shared(self, prompt: Int32Array, length: int) -> bool:
        """Return whether a prompt that is being read now begins with the same `length` tokens."""
        if length > len(prompt):
            return False
        beginning = prompt[:length].tobytes()
        return any(self._requests[slot].prompt_bytes.startswith(beginning) for slot in self._reading)

    def _join(self, request: Request, slot: int, source: int | None, shared: int) -> None:
        shared = min(shared, len(request.prompt) - 1)  # the last prompt token is always run: its logits are needed
        self._cache.reserve(slot + 1, len(request.prompt) + request.max_new)
        if source == slot:
            self.counters.num_kept_tokens += shared
            self._cache.lengths[slot] = shared
        elif source is not None and shared >= _MIN_SHARED_TOKENS:
            self.counters.num_copied_tokens += shared
            self._cache.copy_prefix(source, slot, shared)
        else:
            shared = self._cache.lengths[slot] = 0
        self._requests[slot] = request
        self._rows.start(slot, request.sampling, request.max_new, request.prompt)
        if shared == len(request.prompt) - 1:
            self._rows.next_token[slot] = request.prompt[-1]
            self._decoding = np.sort(np.append(self._decoding, slot))
        else:
            self._reading[slot] = shared

    def _advance(self) -> NextLogits | None:
        plan = self._plan()
        if len(plan.decoding) == 0 and not plan.spans:
            return None
        logits = self._forward(plan)
        slots = np.concatenate([plan.decoding, np.array(plan.completed, np.int64)])
        return NextLogits(slots, logits) if len(slots) else None

    def _plan(self) -> _Plan:
        plan = _Plan(decoding=self._decoding)
        packed = len(self._decoding)
        budget = _MAX_READ_TOKENS
        for slot, num_read in self._reading.items():
            unread = len(self._requests[slot].prompt) - num_read
            num_new = min(unread, budget)
            if num_new == 0:
                break
            plan.spans.append(SegmentSpan(slot=slot, start=packed, stop=packed + num_new, context=num_read))
            packed += num_new
            budget -= num_new
            if num_new == unread:
                plan.completed.append(slot)
                plan.logits_at.append(packed - 1)
        return plan

    def _forward(self, plan: _Plan) -> torch.Tensor:
        """Return logits [R, V]: of the decoding slots, then of those that have completed their prompt."""
        decoding, cache, device = plan.decoding, self._cache, self.shared.device
        num_single = len(decoding)
        num_packed = plan.spans[-1].stop if plan.spans else num_single
        packed = np.empty((3, num_packed), np.int64)  # token ids, slots, positions
        packed[:, :num_single] = self._rows.next_token[decoding], decoding, cache.lengths[decoding]
        for span in plan.spans:
            packed[0, span.start : span.stop] = self._requests[span.slot].prompt[span.context : span.total]
            packed[1, span.start : span.stop] = span.slot
            packed[2, span.start : span.stop] = np.arange(span.context, span.total)
            self._reading[span.slot] = span.total
        cache.record(packed[1], packed[2], packed[0])
        token_ids, slots, positions = torch.from_numpy(packed).to(device)
        step = SlotStep(
            cache=cache,
            slots=slots,
            positions=positions,
            singles=SingleRows(decoding, cache.lengths[decoding], device) if num_single else None,
            groups=group_spans(plan.spans, device),
        )
        logits_at = None
        if plan.spans:
            logits_at = torch.tensor([*range(num_single), *plan.logits_at] or [0], device=device)
        self.counters.num_steps += 1
        self.counters.num_read_tokens += num_packed - num_single
        return self._model.forward(token_ids, positions, step, logits_at)

    def _sample(self, due: NextLogits) -> list[Finished]:
        for slot in due.slots[len(self._decoding) :]:
            del self._reading[int(slot)]
        self._decoding = np.sort(due.slots)
        return super()._sample(due)

    def _forget(self, slot: int) -> None:
        self._cache.wipe(slot)

    def _forget_all(self) -> None:
        self._cache.clear()

    def _leave(self, slots: Int64Array) -> None:
        super()._leave(slots)
        for slot in slots.tolist():
            self._reading.pop(slot, None)
        self._decoding = self._decoding[~np.isin(self._decoding, slots)]
