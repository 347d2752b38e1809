"""The state of each request in work, as arrays over slots: a step costs no Python work per request."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.sampling import ForbiddenTokens, RepetitionPenalty, RowSampling
from gspo_gym.types import BoolArray, Completion, FinishReason, Int32Array

Int64Array = NDArray[np.int64]

# The settings that `RowTable.start` reads: another one would be dropped silently.
OBEYED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens")
_NO_TOKEN = -1
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class RowTable:
    """Per slot: the token to feed next, how to sample, the random numbers to sample with, and what was sampled.

    The u-th token of a request is decided by the u-th number of the stream that its seed names, in any batch and with
    any `max_tokens`.
    """

    def __init__(self, num_slots: int) -> None:
        self.next_token = np.zeros(num_slots, np.int64)
        self._num_sampled = np.zeros(num_slots, np.int64)
        self._max_new = np.zeros(num_slots, np.int64)
        self._temperature = np.ones(num_slots, np.float32)
        self._is_greedy = np.zeros(num_slots, np.bool_)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._min_tokens = np.zeros(num_slots, np.int64)
        self._penalty = np.ones(num_slots, np.float32)
        self._prompts: dict[int, Int32Array] = {}  # of the slots that penalise repetition
        self._stop_tokens = np.full((num_slots, 1), _NO_TOKEN, np.int64)
        self._streams = np.zeros(num_slots, np.uint64)
        self._token_ids = np.zeros((num_slots, 1), np.int32)
        self._logprobs = np.zeros((num_slots, 1), np.float32)
        self._earlier: dict[int, list[tuple[int, int]]] = {}  # of a request: (tokens so far, their version)

    def start(self, slot: int, sampling: SamplingParams, max_new: int, prompt: Int32Array) -> None:
        """Begin a request in a slot, to sample at most `max_new` tokens after `prompt` [T]."""
        self._widen(max_new, len(sampling.stop_token_ids))
        greedy = sampling.temperature == 0
        self._earlier.pop(slot, None)
        self._num_sampled[slot] = 0
        self._max_new[slot] = max_new
        self._is_greedy[slot] = greedy
        # Greedy rows are sampled without temperature and truncation, which would change their logprobs.
        self._temperature[slot] = 1.0 if greedy else sampling.temperature
        self._top_k[slot] = 0 if greedy else sampling.top_k
        self._top_p[slot] = 1.0 if greedy else sampling.top_p
        self._min_p[slot] = 0.0 if greedy else sampling.min_p
        self._min_tokens[slot] = sampling.min_tokens
        self._penalty[slot] = sampling.repetition_penalty
        if sampling.repetition_penalty != 1.0:
            self._prompts[slot] = prompt
        self._stop_tokens[slot] = _NO_TOKEN
        self._stop_tokens[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self._streams[slot] = _mix(np.array([sampling.seed % 2**64], np.uint64))[0]

    def sampling(self, slots: Int64Array, device: torch.device) -> RowSampling:
        """Return the sampling of the next token of each of these slots."""
        temperature, is_greedy = self._temperature[slots], self._is_greedy[slots]
        top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        uniforms = uniform_numbers(self._streams[slots], self._num_sampled[slots])
        return RowSampling(
            uniforms=torch.from_numpy(uniforms).to(device),
            temperature=torch.from_numpy(temperature).to(device) if (temperature != 1.0).any() else None,
            is_greedy=torch.from_numpy(is_greedy).to(device) if is_greedy.any() else None,
            top_k=torch.from_numpy(top_k).to(device) if (top_k > 0).any() else None,
            top_p=torch.from_numpy(top_p).to(device) if (top_p < 1.0).any() else None,
            min_p=torch.from_numpy(min_p).to(device) if (min_p > 0.0).any() else None,
            repetition=self._repetition(slots, device),
            forbidden=self._forbidden(slots, device),
        )

    def sampled(self, slot: int) -> Int32Array:
        """Return the tokens that the slot's request has sampled so far."""
        return self._token_ids[slot, : self._num_sampled[slot]]

    def append(self, slots: Int64Array, token_ids: Int64Array, logprobs: NDArray[np.float32]) -> BoolArray:
        """Add one sampled token to each slot; return which of them are done."""
        index = self._num_sampled[slots]
        self._token_ids[slots, index] = token_ids
        self._logprobs[slots, index] = logprobs
        self._num_sampled[slots] = index + 1
        self.next_token[slots] = token_ids
        done: BoolArray = (index + 1 >= self._max_new[slots]) | self._is_stop(slots, token_ids)
        return done

    def end_version(self, slot: int, weight_version: int) -> None:
        """Note that what the slot's request has sampled so far, it sampled under that version or earlier ones."""
        self._earlier.setdefault(slot, []).append((int(self._num_sampled[slot]), weight_version))

    def completion(self, slot: int, weight_version: int) -> Completion:
        """Return the completion of the slot's request, of which the last tokens are of that version."""
        num = int(self._num_sampled[slot])
        last = self._token_ids[slot, num - 1]
        versions = np.full(num, weight_version, np.int32)
        for end, earlier in reversed(self._earlier.get(slot, ())):
            versions[:end] = earlier
        return Completion(
            token_ids=self._token_ids[slot, :num],
            logprobs=self._logprobs[slot, :num],
            finish_reason=FinishReason.STOP if last in self._stop_tokens[slot] else FinishReason.LENGTH,
            weight_version=versions,
        )

    def _repetition(self, slots: Int64Array, device: torch.device) -> RepetitionPenalty | None:
        penalty = self._penalty[slots]
        if (penalty == 1.0).all():
            return None
        token_histories = [
            np.concatenate([self._prompts[slot], self.sampled(slot)]) if of_row != 1.0 else np.zeros(1, np.int32)
            for slot, of_row in zip(slots.tolist(), penalty.tolist(), strict=True)
        ]
        longest = max(map(len, token_histories))
        history = np.stack([np.pad(tokens, (0, longest - len(tokens)), mode="edge") for tokens in token_histories])
        return RepetitionPenalty(
            history=torch.from_numpy(history).to(device, torch.int64), penalty=torch.from_numpy(penalty).to(device)
        )

    def _forbidden(self, slots: Int64Array, device: torch.device) -> ForbiddenTokens | None:
        # Stop tokens of rows that must go on.
        must_go_on = self._num_sampled[slots] < self._min_tokens[slots]
        if not must_go_on.any():
            return None
        stops = self._stop_tokens[slots]
        rows, places = np.nonzero(must_go_on[:, None] & (stops != _NO_TOKEN))
        return ForbiddenTokens(
            rows=torch.from_numpy(rows).to(device), token_ids=torch.from_numpy(stops[rows, places]).to(device)
        )

    def _is_stop(self, slots: Int64Array, token_ids: Int64Array) -> BoolArray:
        is_stop: BoolArray = (self._stop_tokens[slots] == token_ids[:, None]).any(axis=1)
        return is_stop

    def _widen(self, num_tokens: int, num_stops: int) -> None:
        if num_stops > self._stop_tokens.shape[1]:
            extra = num_stops - self._stop_tokens.shape[1]
            self._stop_tokens = np.pad(self._stop_tokens, ((0, 0), (0, extra)), constant_values=_NO_TOKEN)
        width = self._token_ids.shape[1]
        if num_tokens > width:
            # Doubled, so that growing costs nothing per token.
            extra = max(num_tokens, 2 * width) - width
            self._token_ids = np.pad(self._token_ids, ((0, 0), (0, extra)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, extra)))


def uniform_numbers(streams: NDArray[np.uint64], index: Int64Array) -> NDArray[np.float64]:
    """Return number `index` [B] of each of the streams [B], uniform on the multiples of 2**-53 in [0, 1).

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 13), read at any place at once.
    """
    # A generator object for every request would cost more than sampling a short turn.
    bits = _mix(streams + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Arrays of unsigned integers wrap around without a warning.
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
