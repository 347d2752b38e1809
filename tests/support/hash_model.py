"""A language model that anyone can compute by hand: its logits are a hash of what was read so far.

64 tokens, written A-Z a-z 0-9 + /. Logits of a prefix: 64 normal draws of standard deviation 2 from the generator that
the BLAKE2b of the prefix's ids seeds. Token k of a completion is drawn from them after min_tokens, repetition_penalty,
temperature, min_p, top_k and top_p, by the uniform number that (seed, k) gives. So the same prompt and seed are the
same sample, wherever it is computed.
"""

from __future__ import annotations

import hashlib
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VOCAB_SIZE = 64
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, and their logprobs before (raw) and after the temperature (scaled) and the truncation (processed)."""

    token_ids: list[int]
    processed: list[float]
    scaled: list[float]
    raw: list[float]
    finish_reason: str


def logits(prefix: Sequence[int]) -> np.ndarray:
    """[64] float64."""
    digest = hashlib.blake2b(",".join(map(str, prefix)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big")).normal(0.0, 2.0, VOCAB_SIZE)


def sample(
    prompt: Sequence[int],
    *,
    seed: int,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    min_tokens: int = 0,
) -> Sample:
    """The completion of that prompt and seed."""
    found = Sample([], [], [], [], "length")
    uniforms = np.random.default_rng(seed).random(max_tokens)
    for uniform in uniforms:
        now = logits([*prompt, *found.token_ids])
        if len(found.token_ids) < min_tokens:
            now[list(stop_token_ids)] = -math.inf
        for token in {*prompt, *found.token_ids}:
            now[token] *= repetition_penalty if now[token] < 0 else 1 / repetition_penalty
        raw = log_softmax(now)
        scaled = raw if temperature == 0 else log_softmax(now / temperature)
        likely = np.where(scaled >= scaled.max() + math.log(min_p), scaled, -math.inf) if min_p else scaled
        kept = keep(log_softmax(likely), top_k=1 if temperature == 0 else top_k, top_p=top_p) & (likely > -math.inf)
        left = np.where(kept, scaled, -math.inf)
        processed = raw if temperature == 0 else log_softmax(left)
        token = int(np.argmax(left)) if temperature == 0 else draw(processed, uniform)
        found.token_ids.append(token)
        for values, logprobs in ((found.processed, processed), (found.scaled, scaled), (found.raw, raw)):
            values.append(float(logprobs[token]))
        if token in stop_token_ids:
            return Sample(found.token_ids, found.processed, found.scaled, found.raw, "stop")
    return found


def keep(logprobs: np.ndarray, *, top_k: int, top_p: float) -> np.ndarray:
    """[64] bool: what truncation leaves."""
    order = np.argsort(-logprobs)
    before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
    kept = np.zeros(VOCAB_SIZE, bool)
    kept[order[(before < top_p) & (np.arange(VOCAB_SIZE) < (top_k or VOCAB_SIZE))]] = True
    return kept


def draw(logprobs: np.ndarray, uniform: float) -> int:
    """The token in whose part of the unit interval the number lies."""
    cumulative = np.cumsum(np.exp(logprobs))
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), VOCAB_SIZE - 1)


def log_softmax(values: np.ndarray) -> np.ndarray:
    """Normalised in float64."""
    top = values.max()
    return np.asarray(values - top - np.log(np.exp(values - top).sum()))


def write(token_ids: Sequence[int]) -> str:
    """The tokens as text."""
    return "".join(LETTERS[token] for token in token_ids)


def read(text: str) -> list[int]:
    """The text as tokens."""
    return [LETTERS.index(letter) for letter in text]


class LetterTokenizer:
    """The model's tokenizer, with the two methods of a transformers one that engines call."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return read(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return write(token_ids)
