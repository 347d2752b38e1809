"""Continuous batching, one step at a time: who joins, what runs, who leaves. No threads: `local.py` drives it.

A step is one forward pass over all tokens that are due: one for each request that is sampling, and the unread part of
the prompts of those that have just joined. Whoever samples its last token leaves at the end of the step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from gspo_gym.engine.attention import SlotStep
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.kv_cache import SlotCache
from gspo_gym.engine.kv_store import SingleRows
from gspo_gym.engine.rows import Int64Array, RowTable
from gspo_gym.engine.sampling import sample
from gspo_gym.engine.segments import SegmentSpan, group_spans
from gspo_gym.engine.shared_model import SharedModel
from gspo_gym.engine.slots import SlotTable
from gspo_gym.errors import EngineError
from gspo_gym.types import Completion, Int32Array

_MAX_READ_TOKENS = 4096  # prompt tokens in one step; longer prompts are read in several
_MIN_SHARED_TOKENS = 16  # below this, copying another sequence's keys costs as much as computing them


@dataclass(slots=True, eq=False)
class Request:
    """One completion to sample: `prompt` [T] int32, at most `max_new` tokens."""

    prompt: Int32Array
    sampling: SamplingParams
    max_new: int
    session_id: str | None = None
    prompt_bytes: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_bytes = self.prompt.tobytes()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that left, with its completion or with what kept it from one."""

    request: Request
    result: Completion | EngineError


@dataclass(slots=True)
class Counters:
    """What the batcher has done since it was made: steps, and tokens by how they came about.

    `num_read_tokens` were computed from prompts, `num_kept_tokens` were found in the session's own slot,
    `num_copied_tokens` in another one's.
    """

    num_steps: int = 0
    num_sampled_tokens: int = 0
    num_read_tokens: int = 0
    num_kept_tokens: int = 0
    num_copied_tokens: int = 0


@dataclass(slots=True)
class _Plan:
    """The tokens of one step, packed: single tokens of `decoding` slots first, then the `spans` of prompts."""

    decoding: Int64Array
    spans: list[SegmentSpan] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)  # slots whose prompt ends in this step
    logits_at: list[int] = field(default_factory=list)  # packed index of the last token of each of them


class Batcher:
    """The batch and its cache. Not thread-safe: one thread calls it."""

    def __init__(self, model: SharedModel, *, max_model_len: int, max_batch_size: int) -> None:
        self.counters = Counters()
        self.weight_version = 0
        self._model = model
        self._cache = SlotCache(max_slots=max_batch_size, max_len=max_model_len)
        self._slots = SlotTable(max_batch_size)
        self._rows = RowTable(max_batch_size)
        self._waiting: deque[Request] = deque()
        self._requests: dict[int, Request] = {}  # in work, by slot
        self._reading: dict[int, int] = {}  # slots whose prompt is not read yet -> how much of it is
        self._decoding: Int64Array = np.zeros(0, np.int64)  # slots that sample, ascending
        self._is_unchecked = True  # the batch has been empty since the weights were last compared

    @property
    def num_in_flight(self) -> int:
        return len(self._waiting) + len(self._requests)

    def submit(self, request: Request) -> None:
        """Queue a request; it joins at the next step that has a slot for it."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request, wherever it is; what it computed stays with its session. Finished ones are fine."""
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in [slot for slot, other in self._requests.items() if other is request]:
            self._leave(np.array([slot]))

    def end_session(self, session_id: str) -> None:
        """Free what is kept for a session."""
        self._slots.end_session(session_id)

    def update_weights(self, version: int) -> None:
        """Sample under the model's present weights from now on; all kept keys and values are dropped.

        Raises:
            EngineError: a request is in flight.
        """
        if self.num_in_flight:
            raise EngineError(f"update_weights: expected no request in flight, got {self.num_in_flight}")
        self._model.accept_weights()
        self._cache.clear()
        self._slots.forget_sessions()
        self.weight_version = version

    def fail_all(self, reason: str) -> list[Finished]:
        """Drop every request with an error."""
        requests = [*self._requests.values(), *self._waiting]
        self._waiting.clear()
        self._leave(np.array(list(self._requests), np.int64))
        return [Finished(request, EngineError(reason)) for request in requests]

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Run one step; returns who left."""
        if self._model.weights_changed() or (self._is_unchecked and self._model.contents_changed()):
            return self.fail_all(
                f"the model's weights changed since version {self.weight_version} was published, so keys and values in "
                "the cache belong to other weights: call update_weights(version) after every change"
            )
        self._is_unchecked = False
        self._admit()
        plan = self._plan()
        if len(plan.decoding) == 0 and not plan.spans:
            return []
        logits = self._forward(plan)
        sampling = np.concatenate([plan.decoding, np.array(plan.completed, np.int64)])
        return self._sample(sampling, logits) if len(sampling) else []

    def _admit(self) -> None:
        """Give waiting requests slots, first come first served, and what the cache already holds of their prompts.

        A request whose beginning is being read in this very step for another waits a step, and copies it then.
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
        """Whether a prompt that is being read now begins with the same `length` tokens."""
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
        self._rows.start(slot, request.sampling, request.max_new)
        if shared == len(request.prompt) - 1:
            self._rows.next_token[slot] = request.prompt[-1]
            self._decoding = np.sort(np.append(self._decoding, slot))
        else:
            self._reading[slot] = shared

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
        """Logits [R, V]: of the decoding slots, then of those whose prompt is completed."""
        decoding, cache, device = plan.decoding, self._cache, self._model.device
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

    def _sample(self, slots: Int64Array, logits: torch.Tensor) -> list[Finished]:
        """Sample a token for each of these slots, and let those leave that are done or whose logits are not finite."""
        sampled = sample(logits, self._rows.sampling(slots, self._model.device))
        token_ids, logprobs = sampled.token_ids.cpu().numpy(), sampled.logprobs.cpu().numpy()
        done = self._rows.append(slots, token_ids, logprobs)
        broken = ~np.isfinite(logprobs)
        self.counters.num_sampled_tokens += len(slots)
        if len(slots) > len(self._decoding):
            for slot in slots[len(self._decoding) :]:
                del self._reading[int(slot)]
            self._decoding = np.sort(slots)
        if not (done | broken).any():
            return []
        finished = []
        for slot in slots[broken].tolist():
            error = EngineError(f"the model's logits are not finite (weights of version {self.weight_version})")
            finished.append(Finished(self._requests[slot], error))
            self._cache.wipe(slot)
        for slot in slots[done & ~broken].tolist():
            finished.append(Finished(self._requests[slot], self._rows.completion(slot, self.weight_version)))
        self._leave(slots[done | broken])
        return finished

    def _leave(self, slots: Int64Array) -> None:
        """Take requests out of the batch; their slots stay with their sessions."""
        for slot in slots.tolist():
            del self._requests[slot]
            self._reading.pop(slot, None)
            self._slots.release(slot)
        self._decoding = self._decoding[~np.isin(self._decoding, slots)]
        self._is_unchecked |= not self._requests
