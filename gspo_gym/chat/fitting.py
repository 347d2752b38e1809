"""Whether texts can fit a model's context at all, said without encoding them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo_gym.types import Message


def cannot_fit(messages: Sequence[Message], tokenizer: Any, max_model_len: int) -> bool:
    """Whether the text is too long to fit whatever its tokens are, so that encoding it would only cost time.

    A text of n characters has at least n / (characters of the longest token) tokens; the factor 4 allows for
    normalisers that merge characters. Encoding ten megabytes would hold up every other episode for seconds. Any:
    transformers is untyped.
    """
    num_characters = sum(len(message.content) for message in messages)
    if num_characters <= 64 * max_model_len:  # nothing to gain, and asking for the vocabulary is not free
        return False
    longest = max(map(len, tokenizer.get_vocab()))
    return num_characters > 4 * longest * max_model_len
