"""The tokens of a conversation as they grow, turn after turn, into a `Segment`.

Where a token came from is written down when it is appended, so the mask never has to be guessed afterwards (from
padding, special tokens or a second rendering). Written by rollouts, which step environments, and by the gateway, which
is asked from elsewhere: so what both write down is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gspo_gym.errors import RecordError
from gspo_gym.types import Segment

_LOGPROB_ROUNDING = 1e-3  # a logprob of a certain token may round above 0; as in `types.Completion`


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one action, as plain numbers: one logprob (nats) and one weight version a token."""

    token_ids: list[int]
    logprobs: list[float]
    weight_version: list[int]

    # Any: these come from whoever sampled, and the point is to find out what they are.
    @classmethod
    def checked(cls, token_ids: Any, logprobs: Any = None, weight_version: Any = None) -> SampledTokens:
        """Read the three columns; None stands for logprobs of 0 and a version of -1, i.e. no model sampled this.

        Raises:
            RecordError: wrong types or lengths, or a logprob that is no logprob.
        """
        ids = _column("token_ids", token_ids, len(np.atleast_1d(token_ids)), int)
        logprob_list = _column("logprobs", 0.0 if logprobs is None else logprobs, len(ids), float)
        versions = _column("weight_version", -1 if weight_version is None else weight_version, len(ids), int)
        for logprob in logprob_list:
            if not -math.inf < logprob <= _LOGPROB_ROUNDING:
                raise RecordError(f"logprobs: expected finite values <= 0, got {logprob}")
        return cls(ids, [float(logprob) for logprob in logprob_list], versions)

    def require_possible(self, *, max_tokens: int, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """Check that a sampler with these limits can have come to these ids.

        Raises:
            RecordError: it cannot.
        """
        ids = self.token_ids
        if not 1 <= len(ids) <= max_tokens:
            raise RecordError(f"token_ids: expected 1 to {max_tokens} sampled ids in this turn, got {len(ids)}")
        stray = next((i for i in ids if not 0 <= i < vocab_size), None)
        if stray is not None:
            raise RecordError(f"token_ids: expected ids in [0, {vocab_size}), got {stray}")
        early = next((k for k, i in enumerate(ids[:-1]) if i in stop_token_ids), None)
        if early is not None:
            raise RecordError(
                f"token_ids: token {early} is the stop token {ids[early]}, but {len(ids) - early - 1} more follow; "
                "sampling ends at a stop token"
            )


@dataclass(slots=True)
class OpenSegment:
    """A segment that still grows, by appending only. Mutable; `close` gives the frozen one."""

    token_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    weight_version: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: environment, template, appended end of turn."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.action_mask.extend([False] * count)
        self.rollout_logprobs.extend([0.0] * count)
        self.turn_index.extend([-1] * count)
        self.weight_version.extend([-1] * count)

    def append_action(self, sampled: SampledTokens, *, turn: int) -> None:
        """Append what the policy sampled in `turn`."""
        count = len(sampled.token_ids)
        self.token_ids.extend(sampled.token_ids)
        self.action_mask.extend([True] * count)
        self.rollout_logprobs.extend(sampled.logprobs)
        self.turn_index.extend([turn] * count)
        self.weight_version.extend(sampled.weight_version)

    def close(self) -> Segment:
        """The segment so far, frozen."""
        return Segment(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            action_mask=np.array(self.action_mask, dtype=np.bool_),
            rollout_logprobs=np.array(self.rollout_logprobs, dtype=np.float32),
            turn_index=np.array(self.turn_index, dtype=np.int32),
            weight_version=np.array(self.weight_version, dtype=np.int32),
        )


def _column(name: str, value: Any, length: int, kind: type[int] | type[float]) -> list[Any]:
    """`value` as a list of `length` plain numbers; a single number is repeated. Any: it is what a caller passed."""
    column = np.asarray(value)
    if column.ndim == 0 and name != "token_ids":
        column = np.full(length, column)
    is_kind = np.issubdtype(column.dtype, np.integer) or (kind is float and np.issubdtype(column.dtype, np.floating))
    if column.size and not is_kind:
        raise RecordError(f"{name}: expected {kind.__name__}s, got an array of {column.dtype}")
    if column.shape != (length,):
        raise RecordError(f"{name}: expected one a sampled token, shape ({length},), got {column.shape}")
    listed: list[Any] = column.tolist()
    return listed
