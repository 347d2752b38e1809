"""The batch, one step at a time: requests that wait, run and leave, and the slots of the cache that they own.

No threads: `engine/local/engine.py` drives it. The two kinds of batch, in `batcher.py` for most models and
`plain_model.py` for all others, decide how a model is run and how much of a sequence is kept.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np
import torch

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.rows import Int64Array, RowTable
from gspo_gym.engine.local.sampling import sample
from gspo_gym.engine.local.shared_model import SharedModel
from gspo_gym.errors import EngineError
from gspo_gym.types import Completion, Int32Array


@dataclass(slots=True, eq=False)
class Request:
    """One completion to sample: `prompt` [T] int32, at most `max_new` tokens."""

    prompt: Int32Array
    sampling: SamplingParams
    max_new: int
    session_id: str | None = None
    prompt_bytes: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_bytes = self.prompt.tobytes()  # compared with many others: bytes are compared at once


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that left, with its completion or an error."""

    request: Request
    result: Completion | EngineError


@dataclass(slots=True)
class Counters:
    """Steps of a batch since it was made, and tokens by their origin.

    `num_read_tokens` were computed from prompts (each time, if nothing is kept of a sequence), `num_kept_tokens` were
    found in the session's slot, `num_copied_tokens` in that of another session.
    """

    num_steps: int = 0
    num_sampled_tokens: int = 0
    num_read_tokens: int = 0
    num_kept_tokens: int = 0
    num_copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NextLogits:
    """Logits [R, V] of the next token of the requests in `slots` [R]."""

    slots: Int64Array
    logits: torch.Tensor


class Batch(ABC):
    """Requests that wait and requests in work, each of these in a slot. Not thread-safe: one thread calls it."""

    def __init__(self, shared: SharedModel, *, max_batch_size: int) -> None:
        self.counters = Counters()
        self.weight_version = 0
        self.shared = shared
        self._slots = SlotTable(max_batch_size)
        self._rows = RowTable(max_batch_size)
        self._waiting: deque[Request] = deque()
        self._requests: dict[int, Request] = {}  # in work, by slot
        self._is_unchecked = True  # since the weights were last compared, the batch has been empty
        self.is_frozen = False  # no step is taken, and requests stay as they are

    @property
    def num_in_flight(self) -> int:
        return len(self._waiting) + len(self._requests)

    @property
    def has_work(self) -> bool:
        """Return whether `step` would do anything."""
        return self.num_in_flight > 0 and not self.is_frozen

    def submit(self, request: Request) -> None:
        """Queue a request; it joins at the next step that has a slot for it."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request that waits or runs; its keys and values stay with its session. Finished ones are fine."""
        if request in self._waiting:
            self._waiting.remove(request)
        # The slot stays with its session: the next turn may extend what was read.
        for slot in [slot for slot, slot_request in self._requests.items() if slot_request is request]:
            self._leave(np.array([slot]))

    def end_session(self, session_id: str) -> None:
        """Free the slot that is kept for a session."""
        self._slots.end_session(session_id)

    def forget_ended(self) -> None:  # noqa: B027  not abstract: by default slots are emptied when they become free
        """Forget what slots hold that are neither in work nor kept for a session."""

    def update_weights(self, version: int) -> None:
        """Sample under the model's present weights from now on; nothing is kept of any sequence.

        A frozen batch goes on: its requests keep the tokens that they have, and read them again.

        Raises:
            EngineError: a request is in flight, and the batch is not frozen.
        """
        if self.num_in_flight and not self.is_frozen:
            raise EngineError(f"update_weights: expected no request in flight, got {self.num_in_flight}")
        self.shared.accept_weights()
        self._forget_all()
        self._slots.forget_sessions()
        for slot in self._requests:
            self._rows.end_version(slot, self.weight_version)
        self.weight_version = version
        self.is_frozen = False

    def fail_all(self, reason: str) -> list[Finished]:
        """Drop every request with an error."""
        requests = [*self._requests.values(), *self._waiting]
        self._waiting.clear()
        self._leave(np.array(list(self._requests), np.int64))
        return [Finished(request, EngineError(reason)) for request in requests]

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Run one step; return the requests that left."""
        if self.is_frozen:
            return []
        # Tensors are compared by version every step; their contents, which takes longer, only when a batch begins.
        if self.shared.weights_changed() or (self._is_unchecked and self.shared.contents_changed()):
            return self.fail_all(
                f"the model's weights changed since version {self.weight_version} was published, so keys and values in "
                "the cache belong to other weights: publish them after every change"
            )
        self._is_unchecked = self.num_in_flight == 0
        self._admit()
        due = self._advance()
        return [] if due is None else self._sample(due)

    @property
    @abstractmethod
    def caching(self) -> Caching:
        """The part of a sequence that is kept, under the present weights."""

    @abstractmethod
    def _admit(self) -> None:
        """Give waiting requests slots, as far as there are any."""

    @abstractmethod
    def _advance(self) -> NextLogits | None:
        """Run the model; None if no request got as far as its next token."""

    @abstractmethod
    def _forget(self, slot: int) -> None:
        """Drop the contents of a slot, which are poisoned."""

    @abstractmethod
    def _forget_all(self) -> None:
        """Drop the contents of all slots, which were computed under other weights."""

    def _sample(self, due: NextLogits) -> list[Finished]:
        slots = due.slots
        logits = self.shared.without_padding(due.logits)
        samples = sample(logits, self._rows.sampling(slots, self.shared.device))
        token_ids, logprobs = samples.token_ids.cpu().numpy(), samples.logprobs.cpu().numpy()
        done = self._rows.append(slots, token_ids, logprobs)
        # Logits that are NaN or infinite give such a logprob.
        is_broken = ~np.isfinite(logprobs)
        self.counters.num_sampled_tokens += len(slots)
        if not (done | is_broken).any():  # the usual step: nothing is done, so no Python work per request
            return []
        results = []
        for slot in slots[is_broken].tolist():
            error = EngineError(f"the model's logits are not finite (weights of version {self.weight_version})")
            results.append(Finished(self._requests[slot], error))
            self._forget(slot)
        for slot in slots[done & ~is_broken].tolist():
            results.append(Finished(self._requests[slot], self._rows.completion(slot, self.weight_version)))
        self._leave(slots[done | is_broken])
        return results

    def _leave(self, slots: Int64Array) -> None:
        """Take requests out of the batch; their slots stay with their sessions."""
        for slot in slots.tolist():
            del self._requests[slot]
            self._slots.release(slot)
        self._is_unchecked |= not self._requests


class SlotTable:
    """Slots 0 .. max_slots - 1, each free, in work, or kept for a session between two of its requests.

    Slots of waiting sessions are given away, least recently used first, when no other is left; their session then
    reads its prompt again.
    """

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        self._free = set(range(max_slots))
        self._kept_slots: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._session_of: dict[int, str] = {}  # of slots in work

    @property
    def num_used(self) -> int:
        """Slots in work or kept."""
        return self._max_slots - len(self._free)

    @property
    def num_in_work(self) -> int:
        return self.num_used - len(self._kept_slots)

    @property
    def free(self) -> Set[int]:
        """Slots that are neither in work nor kept."""
        return self._free

    def acquire(self, session_id: str | None) -> int | None:
        """Take a slot for a request: its session's, else a free one, else the longest-waiting session's; None if none.

        If another request of the same session is in work, this one is served as if it had no session.
        """
        slot = self._kept_slots.pop(session_id, None) if session_id is not None else None
        if slot is None and self._free:
            slot = min(self._free)  # slots in work then lie close together and can be read in place
            self._free.remove(slot)
        if slot is None and self._kept_slots:
            _, slot = self._kept_slots.popitem(last=False)
        if slot is not None and session_id is not None and session_id not in self._session_of.values():
            self._session_of[slot] = session_id
        return slot

    def kept_slot(self, session_id: str | None) -> int | None:
        """Return the slot that waits for the session's next request, if there is one."""
        return self._kept_slots.get(session_id) if session_id is not None else None

    def release(self, slot: int) -> None:
        """End the request in this slot: keep the slot for its session, or free it."""
        session_id = self._session_of.pop(slot, None)
        if session_id is None:
            self._free.add(slot)
        else:
            self._kept_slots[session_id] = slot

    def end_session(self, session_id: str) -> None:
        """Free the session's slot, at once or when its request is done. Unknown sessions are fine."""
        slot = self._kept_slots.pop(session_id, None)
        if slot is not None:
            self._free.add(slot)
        self._session_of = {
            slot: slot_session for slot, slot_session in self._session_of.items() if slot_session != session_id
        }

    def forget_sessions(self) -> None:
        """Free the slots of all waiting sessions."""
        self._free.update(self._kept_slots.values())
        self._kept_slots.clear()


class Caching(enum.StrEnum):
    """The part of a sequence that is kept for its later tokens.

    TURNS: all of it; a turn reads its new tokens only. TOKENS: all of it until its turn ends; the next turn reads the
    history again. NONE: nothing; every token reads the sequence again.
    """

    TURNS = "turns"
    TOKENS = "tokens"
    NONE = "none"
