"""The batch of models that the engine cannot run packed: one forward pass for each sequence, or all of all sequences.

Slower than that of `batcher.py`, and good for any causal language model; `plain_model.py` finds out how much a model's
cache can keep. Sequences never share a cache, so a request's logprobs do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gspo_gym.engine.local.batch import Batch, Caching, NextLogits, Request
from gspo_gym.engine.local.plain_model import KeptState, PlainModel
from gspo_gym.engine.local.rows import Int64Array
from gspo_gym.types import Int32Array

_MAX_READ_TOKENS = 4096  # of prompts that join in one step, but for the first: those in work wait meanwhile


@dataclass(slots=True)
class _Held:
    """The contents of a slot: the model's cache, and the tokens [T] that it was computed from."""

    state: KeptState | None = None
    tokens: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))


class GeneralBatch(Batch):
    """Requests in work, each with a separate cache, or all without."""

    def __init__(self, model: PlainModel, *, max_batch_size: int) -> None:
        super().__init__(model.shared, max_batch_size=max_batch_size)
        self._model = model
        self._held: dict[int, _Held] = {}

    @property
    def caching(self) -> Caching:
        return self._model.caching

    def update_weights(self, version: int) -> None:
        super().update_weights(version)
        self._model.verify_again()

    def end_session(self, session_id: str) -> None:
        slot = self._slots.kept_slot(session_id)
        super().end_session(session_id)
        if slot is not None:
            self._forget(slot)

    def _admit(self) -> None:
        budget = _MAX_READ_TOKENS
        while self._waiting and budget > 0:
            slot = self._slots.acquire(self._waiting[0].session_id)
            if slot is None:
                return
            request = self._waiting.popleft()
            self._requests[slot] = request
            self._rows.start(slot, request.sampling, request.max_new, request.prompt)
            budget -= len(request.prompt) - self._num_kept(slot, request)

    def _num_kept(self, slot: int, request: Request) -> int:
        """Return how many leading tokens of the prompt need not be read again; a useless cache is dropped."""
        held = self._held.get(slot, _Held())
        num_new = len(request.prompt) - len(held.tokens)
        is_extendable = num_new == 1 or (num_new > 1 and self._model.caching is Caching.TURNS)
        if is_extendable and np.array_equal(held.tokens, request.prompt[: len(held.tokens)]):
            self.counters.num_kept_tokens += len(held.tokens)
            return len(held.tokens)
        self._forget(slot)
        return 0

    def _advance(self) -> NextLogits | None:
        if not self._requests:
            return None
        slots = sorted(self._requests)
        sequences = [np.concatenate([self._requests[slot].prompt, self._rows.sampled(slot)]) for slot in slots]
        self.counters.num_steps += 1
        if self._model.caching is Caching.NONE:  # sequences can be read together only without caches
            self.counters.num_read_tokens += sum(map(len, sequences))
            logits = self._model.read(sequences)
        else:
            logits = torch.stack([self._extend(slot, tokens) for slot, tokens in zip(slots, sequences, strict=True)])
        return NextLogits(np.array(slots, np.int64), logits)

    def _extend(self, slot: int, sequence: Int32Array) -> torch.Tensor:
        held = self._held.setdefault(slot, _Held())
        unread = sequence[len(held.tokens) :]
        if len(self._rows.sampled(slot)) == 0:
            self.counters.num_read_tokens += len(unread)
        logits, held.state = self._model.extend(held.state, unread)
        held.tokens = sequence
        return logits

    def _leave(self, slots: Int64Array) -> None:
        super()._leave(slots)
        for slot in slots.tolist():
            if not self._slots.is_used(slot):
                self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._held.pop(slot, None)

    def _forget_all(self) -> None:
        self._held.clear()
