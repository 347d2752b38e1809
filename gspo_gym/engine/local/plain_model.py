"""The slower way to run a model, unchanged, with its batch.

For models with layers that the engine does not know: state-space models and other recurrent ones, attention outside
transformers' interface, with sinks or in chunks, models spread over several devices. Each sequence keeps the cache that
the model makes, if a probe finds that it works, and never shares it, so a request's logprobs do not depend on the
batch. Without a cache the whole sequence is read again for every token, which is always right.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.generation.utils import ALL_CACHE_NAMES

from gspo_gym.engine.local.batch import Batch, Caching, NextLogits, Request
from gspo_gym.engine.local.rows import Int64Array
from gspo_gym.engine.local.shared_model import SharedModel, keeps_logits
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.types import Int32Array

_MAX_TOKENS_AT_ONCE = 16384  # of padded rows in one forward pass
_MAX_LOGITS_AT_ONCE = 1 << 27  # half a GiB in float32, for models that cannot compute only some logits
_PROBES = (0, 1)  # sequences of random tokens, by their seeds
_PROBE_LENGTH = 80  # beyond the 64 tokens that linear attention reads at a time
_MAX_PROBE_LENGTH = 1024
_TIMES_READING = 4  # a cache may be off by so many times as much as reading sequences together is
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "chunk_size", "mamba_chunk_size")


@dataclass(slots=True)
class KeptState:
    """The cache that the model made of a sequence (Any: a class per family), under the model's name for it."""

    name: str
    cache: Any


class PlainModel:
    """A model that runs as it is. See `SharedModel` for the arguments.

    Attributes:
        shared: the model's weights and modules.
        caching: what `extend` can do under the present weights; known after `verify`.
    """

    def __init__(self, model: Any, *, max_model_len: int) -> None:
        self.shared = SharedModel(model, max_model_len=max_model_len)
        self.caching: Caching
        self._max_model_len = max_model_len
        self._pads_rows = True  # until a probe finds otherwise
        self._keeps_logits = keeps_logits(self.shared.module)
        parameters = inspect.signature(type(self.shared.module).forward).parameters.values()
        self._takes_use_cache = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)

    def read(self, sequences: Sequence[Int32Array]) -> torch.Tensor:
        """Return logits [R, V] of the token after each sequence, all read from their beginning."""
        logits: list[torch.Tensor | None] = [None] * len(sequences)
        for members in self._groups([len(sequence) for sequence in sequences]):
            of_group = self._read_group([sequences[index] for index in members])
            for index, row in zip(members, of_group, strict=True):
                logits[index] = row
        return torch.stack([row for row in logits if row is not None])

    def extend(self, state: KeptState | None, tokens: Int32Array) -> tuple[torch.Tensor, KeptState]:
        """Return logits [V] of the token after those read before and `tokens` [T], and the new state.

        `state` is used up: it may have been changed in place. Only as far as `caching` says.

        Raises:
            EngineError: the model keeps nothing.
        """
        token_ids = torch.from_numpy(tokens).to(self.shared.device, torch.int64)[None]
        cache_argument = {} if state is None else {state.name: state.cache}
        extra = {"logits_to_keep": 1} if self._keeps_logits else {}
        output = self.shared.module(input_ids=token_ids, use_cache=True, **cache_argument, **extra)
        name = next((name for name in ALL_CACHE_NAMES if output.get(name) is not None), None)
        if name is None:
            raise EngineError(f"{self.shared.name} returns no cache")
        return output.logits[0, -1].to(self.shared.device), KeptState(name, output[name])

    @torch.inference_mode()
    def verify(self) -> None:
        """Find out what the model can do, by comparing with one plain forward of a few sequences.

        Raises:
            ConfigError: a token's logprob depends on later tokens, or on what was run before; or running it writes to
                its weights.
        """
        try:
            probe = _Probe(self)
            # If padded rows change a result, rows of one length may not.
            self._pads_rows = probe.agrees_on_prefixes()
            is_causal = self._pads_rows or probe.agrees_on_prefixes()
        except Exception as error:
            raise ConfigError(f"{self.shared.name} does not run on plain token ids: {error!r}") from error
        if not is_causal:
            raise ConfigError(
                f"the logprobs of {self.shared.name} depend on later tokens, or on what it was run on before "
                f"(difference {probe.difference:.2g}, tolerated {self.shared.tolerance:.2g}); it is no causal language "
                "model"
            )
        self._find_caching(probe)
        if self.shared.weights_changed():
            raise ConfigError(f"running {self.shared.name} changes its weights, which are the learner's")

    @torch.inference_mode()
    def verify_again(self) -> None:
        """Look at the cache anew, under other weights: an untrained model may hardly use what its cache gets wrong."""
        probe = _Probe(self)
        probe.agrees_on_prefixes()
        self._find_caching(probe)

    def _find_caching(self, probe: _Probe) -> None:
        probe.sharpen()
        kinds = (Caching.TURNS, Caching.TOKENS) if self._takes_use_cache else ()
        self.caching = next((kind for kind in kinds if probe.agrees_with_cache(kind)), Caching.NONE)

    def probe_length(self) -> int:
        """Return the tokens of a probe: beyond the windows and chunks of the model's layers, unless they are long."""
        sizes = (getattr(self.shared.config, name, None) for name in _WINDOWS)
        longest = max([_PROBE_LENGTH, *(size + 4 for size in sizes if isinstance(size, int))])
        return min(longest if longest <= _MAX_PROBE_LENGTH else _PROBE_LENGTH, self._max_model_len)

    def logits(self, token_ids: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [B, T, V] of [B, T] int64, or [B, K, V] at the positions `kept` [K]; without any cache."""
        extra: dict[str, Any] = {"use_cache": False} if self._takes_use_cache else {}
        if kept is not None and self._keeps_logits:
            extra["logits_to_keep"] = kept
        logits: torch.Tensor = self.shared.module(input_ids=token_ids, **extra).logits.to(self.shared.device)
        return logits if kept is None or self._keeps_logits else logits[:, kept]

    def _read_group(self, sequences: Sequence[Int32Array]) -> torch.Tensor:
        # Padded on the right, where a causal model never looks, with tokens that are no padding to it.
        ends = np.array([len(sequence) - 1 for sequence in sequences])
        token_rows = np.stack([np.pad(s, (0, ends.max() + 1 - len(s)), mode="edge") for s in sequences])
        positions, column = np.unique(ends, return_inverse=True)
        device = self.shared.device
        logits = self.logits(
            torch.from_numpy(token_rows).to(device, torch.int64), torch.from_numpy(positions).to(device)
        )
        return logits[torch.arange(len(ends), device=device), torch.from_numpy(column).to(device)]

    def _groups(self, lengths: list[int]) -> Iterator[list[int]]:
        # Of like length, and few enough for the memory.
        limit = _MAX_TOKENS_AT_ONCE
        if not self._keeps_logits:
            limit = min(limit, _MAX_LOGITS_AT_ONCE // self.shared.vocab_size)
        group: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):  # stable
            fits = group and lengths[group[0]] * (len(group) + 1) <= limit
            if group and not (fits and (self._pads_rows or lengths[index] == lengths[group[0]])):
                yield group
                group = []
            group.append(index)
        if group:
            yield group


class _Probe:
    """Two sequences, and the logprobs that a plain forward of the model gives each of their tokens."""

    difference: float  # in nats, of the last comparison

    def __init__(self, model: PlainModel) -> None:
        self._model = model
        length, vocabulary = model.probe_length(), model.shared.vocab_size
        self._sequences = [
            np.random.default_rng(number).integers(vocabulary, size=length, dtype=np.int32) for number in _PROBES
        ]
        self._expected = [self._plain(sequence) for sequence in self._sequences]
        self._tolerance = model.shared.tolerance

    def agrees_on_prefixes(self) -> bool:
        """Return whether the sequences and beginnings of them, read together, end in the same logprobs."""
        length = len(self._sequences[0])
        cases = [(0, length), (1, length), (0, length // 2), (1, max(1, length - 3)), (0, 1)]
        logits = self._model.read([self._sequences[index][:stop] for index, stop in cases])
        return self._agrees(logits, [self._expected[index][stop - 1] for index, stop in cases])

    def agrees_with_cache(self, caching: Caching) -> bool:
        """Return whether the sequences, read by turns in parts with separate caches, give the same logprobs.

        The tolerance should be sharp by now: an untrained model hardly looks at its context, so the loss of it shows
        little.
        """
        length = len(self._sequences[0])
        ends = {length - 3, length - 2, length - 1, length}
        shows = True
        if caching is Caching.TURNS:
            shows = 2 * length // 3 - length // 3 > 1  # else too short to see it go on from several tokens
            ends = {length // 3, 2 * length // 3, length - 1, length}
        parts = itertools.pairwise((0, *sorted(end for end in ends if end > 0)))
        states: list[KeptState | None] = [None, None]
        logits, expected = [], []
        try:
            for (start, stop), index in itertools.product(parts, _PROBES):
                of_last, states[index] = self._model.extend(states[index], self._sequences[index][start:stop])
                logits.append(of_last)
                expected.append(self._expected[index][stop - 1])
        except Exception:  # of any kind: the model's cache cannot be used
            return False
        return shows and self._agrees(torch.stack(logits), expected)

    def _plain(self, sequence: Int32Array) -> torch.Tensor:
        token_ids = torch.from_numpy(sequence).to(self._model.shared.device, torch.int64)
        return self._model.logits(token_ids[None])[0].float().log_softmax(-1)

    def sharpen(self) -> None:
        """Tolerate only differences that rounding explains, from now on."""
        rounding = self._model.shared.rounding(torch.stack(self._expected))
        self._tolerance = min(self._tolerance, max(rounding, _TIMES_READING * self.difference))

    def _agrees(self, logits: torch.Tensor, expected: list[torch.Tensor]) -> bool:
        self.difference = (logits.float().log_softmax(-1) - torch.stack(expected)).abs().max().item()
        return self.difference <= self._tolerance


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
        self._model.verify_again()  # an untrained model may hardly use what its cache gets wrong

    def end_session(self, session_id: str) -> None:
        slot = self._slots.kept_slot(session_id)
        super().end_session(session_id)
        if slot is not None:
            self._forget(slot)  # a cache may be large: it goes with its session

    def _admit(self) -> None:
        budget = _MAX_READ_TOKENS
        # At least one joins, however long its prompt: else it would wait for ever.
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
        slot_state = self._held.get(slot, _Held())
        num_new = len(request.prompt) - len(slot_state.tokens)
        is_extendable = num_new == 1 or (num_new > 1 and self._model.caching is Caching.TURNS)
        if is_extendable and np.array_equal(slot_state.tokens, request.prompt[: len(slot_state.tokens)]):
            self.counters.num_kept_tokens += len(slot_state.tokens)
            return len(slot_state.tokens)
        self._forget(slot)  # of no use to this prompt
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
        slot_state = self._held.setdefault(slot, _Held())
        unread = sequence[len(slot_state.tokens) :]
        if len(self._rows.sampled(slot)) == 0:  # sampled tokens are no prompt's
            self.counters.num_read_tokens += len(unread)
        logits, slot_state.state = self._model.extend(slot_state.state, unread)
        slot_state.tokens = sequence
        return logits

    def _leave(self, slots: Int64Array) -> None:
        super()._leave(slots)
        for slot in slots.tolist():
            if slot in self._slots.free:
                self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._held.pop(slot, None)

    def _forget_all(self) -> None:
        self._held.clear()
