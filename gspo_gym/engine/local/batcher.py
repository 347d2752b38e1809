"""The fast way to run a model, with its batch: all tokens of a step in one row, and the engine's attention over slots.

For models with plain or sliding attention behind transformers' attention interface, which most have; `plain_model.py`
is for the others. A step is one forward pass over all tokens that are due: one for each request that is sampling, and
the unread part of the prompts of those that have just joined.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from gspo_gym.engine.local.batch import Batch, Caching, Finished, NextLogits, Request
from gspo_gym.engine.local.kv_store import AttentionOptions, SingleRows, SlotCache
from gspo_gym.engine.local.rows import Int64Array
from gspo_gym.engine.local.shared_model import SharedModel, inner_model, keeps_logits
from gspo_gym.engine.local.spans import SegmentGroup, SegmentSpan, attend_group, group_spans
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.types import Int32Array

_MAX_READ_TOKENS = 4096  # prompt tokens in one step; longer prompts are read in several
_SHARED_TOKENS = 4, 16  # fewest for a large model and for a small one: see `_min_shared_tokens`


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
        self._min_shared = _min_shared_tokens(model.shared.module)
        self._reading: dict[int, int] = {}  # slots with unread texts -> tokens read so far
        self._texts: dict[int, Int32Array] = {}  # to read: the prompt, and after an update what was sampled before, too
        self._decoding: Int64Array = np.zeros(0, np.int64)  # slots that sample, ascending

    @property
    def caching(self) -> Caching:
        return Caching.TURNS

    def forget_ended(self) -> None:
        self._cache.lengths[list(self._slots.free)] = 0

    def _admit(self) -> None:
        # First come first served. A request with a beginning that is being read in this very step for another waits a
        # step, and copies it then.
        if self._waiting:  # all at once: growing step by step would copy what is there each time
            self._cache.reserve(min(self._slots.num_used + len(self._waiting), self._cache.max_slots), 1)
        later_requests = []
        while self._waiting:
            request = self._waiting.popleft()
            own = self._slots.kept_slot(request.session_id)
            num_own = 0 if own is None else self._cache.common_prefix(own, request.prompt)
            # A conversation that went the same way holds its answers, too: the episodes of a group often do.
            source, num_shared = self._cache.longest_prefix(request.prompt, num_own)
            if self._is_soon_shared(request.prompt, max(num_shared, num_own) + self._min_shared):
                later_requests.append(request)
                continue
            slot = self._slots.acquire(request.session_id)
            if slot is None:
                self._waiting.appendleft(request)
                break
            in_place = num_own if slot == own else num_shared if slot == source else 0
            self._join(request, slot, in_place, source, num_shared)
        self._waiting.extendleft(reversed(later_requests))

    def _is_soon_shared(self, prompt: Int32Array, length: int) -> bool:
        if length > len(prompt):
            return False
        beginning = prompt[:length].tobytes()
        return any(self._requests[slot].prompt_bytes.startswith(beginning) for slot in self._reading)

    def _join(self, request: Request, slot: int, in_place: int, source: int, num_shared: int) -> None:
        """Let a request begin in a slot that has `in_place` leading tokens of its prompt; `source` has `num_shared`."""
        last = len(request.prompt) - 1  # is always run: its logits are needed
        in_place, num_shared = min(in_place, last), min(num_shared, last)
        self._cache.reserve(slot + 1, len(request.prompt) + request.max_new)
        self.counters.num_kept_tokens += in_place
        self._cache.lengths[slot] = in_place
        if num_shared - in_place >= self._min_shared:
            self.counters.num_copied_tokens += num_shared - in_place
            self._cache.copy_prefix(source, slot, num_shared, in_place)
        num_read = int(self._cache.lengths[slot])
        self._requests[slot] = request
        self._texts[slot] = request.prompt
        self._rows.start(slot, request.sampling, request.max_new, request.prompt)
        if num_read == len(request.prompt) - 1:
            self._rows.next_token[slot] = request.prompt[-1]  # its last token is fed as a sampled one would be
            self._decoding = np.sort(np.append(self._decoding, slot))
        else:
            self._reading[slot] = num_read

    def _advance(self) -> NextLogits | None:
        plan = self._plan()
        if len(plan.decoding) == 0 and not plan.spans:
            return None
        logits = self._forward(plan)
        slots = np.concatenate([plan.decoding, np.array(plan.completed, np.int64)])
        return NextLogits(slots, logits) if len(slots) else None

    def _plan(self) -> _Plan:
        plan = _Plan(decoding=self._decoding)
        num_packed = len(self._decoding)
        budget = _MAX_READ_TOKENS
        for slot, num_read in self._reading.items():
            unread = len(self._texts[slot]) - num_read
            num_new = min(unread, budget)
            if num_new == 0:
                break
            plan.spans.append(SegmentSpan(slot=slot, start=num_packed, stop=num_packed + num_new, context=num_read))
            num_packed += num_new
            budget -= num_new
            if num_new == unread:
                plan.completed.append(slot)
                plan.logits_at.append(num_packed - 1)
        return plan

    def _forward(self, plan: _Plan) -> torch.Tensor:
        """Return logits [R, V]: of the decoding slots, then of those that have completed their prompt."""
        decoding, cache, device = plan.decoding, self._cache, self.shared.device
        num_single = len(decoding)
        num_packed = plan.spans[-1].stop if plan.spans else num_single
        step_inputs = np.empty((3, num_packed), np.int64)  # token ids, slots, positions
        step_inputs[:, :num_single] = self._rows.next_token[decoding], decoding, cache.lengths[decoding]
        for span in plan.spans:
            step_inputs[0, span.start : span.stop] = self._texts[span.slot][span.context : span.total]
            step_inputs[1, span.start : span.stop] = span.slot
            step_inputs[2, span.start : span.stop] = np.arange(span.context, span.total)
            self._reading[span.slot] = span.total
        cache.record(step_inputs[1], step_inputs[2], step_inputs[0])
        token_ids, slots, positions = torch.from_numpy(step_inputs).to(device)
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
        self._cache.wipe(slot)  # what is NaN would reach the slot's next owner

    def _forget_all(self) -> None:
        self._cache.clear()
        for slot, request in self._requests.items():
            self._texts[slot] = np.concatenate([request.prompt, self._rows.sampled(slot)])
            self._reading[slot] = 0
        self._decoding = self._decoding[:0]

    def _leave(self, slots: Int64Array) -> None:
        super()._leave(slots)
        for slot in slots.tolist():
            self._reading.pop(slot, None)
            self._texts.pop(slot, None)
        self._decoding = self._decoding[~np.isin(self._decoding, slots)]


def _min_shared_tokens(module: Any) -> int:  # Any: transformers is untyped
    """Return from how many tokens on copying another sequence's keys costs less than computing them.

    A copy costs some calls a layer, a token two operations a weight: by these counts, and not by a measurement, so that
    a run that goes on copies the same. Measured: 16 tokens of a model of two layers and 3e5 weights; at 1e8, one.
    """
    few, many = _SHARED_TOKENS
    num_layers: int = module.config.get_text_config().num_hidden_layers
    num_weights: int = sum(parameter.numel() for parameter in module.parameters())
    return min(max(round(4e6 * num_layers / max(num_weights, 1)), few), many)


_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_PROBE_PARTS = (0, 5, 10, 11, 12)  # a prompt, its continuation, and two single tokens
_PROBE_LENGTH = _PROBE_PARTS[-1]


class PackedModel:
    """A model that runs with `slot_attention`. See `SharedModel` for the arguments.

    Attributes:
        shared: the model's weights and modules.

    Raises:
        ConfigError: the model's layers are not plain or sliding attention behind transformers' attention interface, or
            it is not on one device.
    """

    def __init__(self, model: Any, *, max_model_len: int) -> None:
        _check_layers(inner_model(model))
        self.shared = SharedModel(model, max_model_len=max_model_len, attention=SLOT_ATTENTION)
        self._keeps_logits = keeps_logits(self.shared.module)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: SlotStep, logits_at: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits [R, V] of the packed tokens [N] at the packed indices `logits_at` [R], or of all if None."""
        extra = {} if logits_at is None or not self._keeps_logits else {"logits_to_keep": logits_at}
        logits: torch.Tensor = self.shared.module(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, slot_step=step, **extra
        ).logits[0]
        return logits if logits_at is None or self._keeps_logits else logits[logits_at]

    @torch.inference_mode()
    def verify(self) -> None:
        """Compare `forward` with the model's own attention on a few tokens, read in two parts and then one by one.

        Raises:
            ConfigError: they disagree, so something in this model is not what its interface says.
        """
        shared_model = self.shared
        # Multiples of a prime: spread over the vocabulary, and the same in every run.
        token_ids = torch.arange(1, _PROBE_LENGTH + 1, device=shared_model.device) * 7919 % shared_model.vocab_size
        cache = SlotCache(max_slots=1, max_len=_PROBE_LENGTH)
        try:
            shared_model.module.config._attn_implementation = shared_model.own_attention
            own_logprobs = (
                shared_model.module(input_ids=token_ids[None], use_cache=False).logits[0].float().log_softmax(-1)
            )
            shared_model.module.config._attn_implementation = SLOT_ATTENTION
            parts = [self._probe(cache, token_ids, start, stop) for start, stop in itertools.pairwise(_PROBE_PARTS)]
        except EngineError as error:
            raise ConfigError(f"{error}, which it does not support") from error
        except Exception as error:  # a model's own code may raise anything
            raise ConfigError(f"{shared_model.name} does not run with the engine's cache: {error!r}") from error
        difference = (torch.cat(parts).float().log_softmax(-1) - own_logprobs).abs().max().item()
        tolerance = shared_model.rounding(own_logprobs)
        if not difference <= tolerance:
            raise ConfigError(
                f"{shared_model.name} does not give the same logprobs through the engine's cache as by itself "
                f"(difference {difference:.2g}, tolerated {tolerance:.2g})"
            )

    def _probe(self, cache: SlotCache, token_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        device = self.shared.device
        slots, lengths = np.zeros(1, np.int64), np.array([stop], np.int64)
        is_single = stop - start == 1
        step = SlotStep(
            cache=cache,
            slots=torch.zeros(stop - start, dtype=torch.int64, device=device),
            positions=torch.arange(start, stop, device=device),
            singles=SingleRows(slots, lengths, device) if is_single else None,
            groups=() if is_single else group_spans([SegmentSpan(0, 0, stop - start, start)], device),
        )
        return self.forward(token_ids[start:stop], step.positions, step, None)


def _check_layers(model: Any) -> None:
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{name} does not run through transformers' attention interface")
    layer_types = set(getattr(config, "layer_types", None) or {"full_attention"})
    if layer_types - _SUPPORTED_LAYERS:
        raise ConfigError(
            f"{name} has layers of type {sorted(layer_types - _SUPPORTED_LAYERS)}, which are neither full nor "
            "sliding-window attention"
        )
    # Offloaded weights are "meta" until they are used.
    devices = {str(parameter.device).replace("meta", "offloaded") for parameter in model.parameters()}
    if len(devices) > 1 or "offloaded" in devices:
        raise ConfigError(f"{name} is not on one device: its weights are {sorted(devices)}")


SLOT_ATTENTION = "gspo_gym_slots"
"""The name under which models select `slot_attention` (`config._attn_implementation`)."""


@dataclass(frozen=True, slots=True)
class SlotStep:
    """The places of one pass's packed tokens in the cache: `slots` and `positions` [N] int64, on the model's device."""

    cache: SlotCache
    slots: torch.Tensor
    positions: torch.Tensor
    singles: SingleRows | None
    groups: tuple[SegmentGroup, ...]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # of the interface; here the step says what a token sees
    *,
    slot_step: SlotStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, then attend from the new tokens to all of their sequence.

    All tokens of a step travel as one packed row, [1, N]: first the sequences that add a single token, then those that
    add several. So every linear layer sees each token once and nothing is padded.

    Args:
        query: [1, Hq, N, D]; key and value: [1, H, N, D], H a divisor of Hq.
        attention_mask: ignored.
        slot_step: says which token sees which; it comes through the keyword arguments of the model's forward.
        _: what else models hand over (dropout of an eval-mode model, flags of other implementations). Any: untyped.

    Returns:
        [1, N, Hq, D], as the interface demands.

    Raises:
        EngineError: the model does not hand the step over, or its attention does something this function does not.
    """
    if slot_step is None or s_aux is not None or position_bias is not None:
        reason = "does not hand the engine's step over" if slot_step is None else "adds sinks or a bias to its scores"
        raise EngineError(f"the attention of {type(module).__name__} {reason}")
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap
    )
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an attribute of every attention module of transformers
    store = slot_step.cache.write(layer, keys, values, slot_step.slots, slot_step.positions)
    singles = slot_step.singles
    if singles is not None and not slot_step.groups:
        return store.attend_singles(singles, queries, options)[None], None
    outputs = torch.empty(*queries.shape[:2], values.shape[-1], dtype=queries.dtype, device=queries.device)
    if singles is not None:
        outputs[: singles.num] = store.attend_singles(singles, queries[: singles.num], options)
    for group in slot_step.groups:
        outputs.index_copy_(0, group.target, attend_group(group, queries, (keys, values), store, options))
    return outputs[None], None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
