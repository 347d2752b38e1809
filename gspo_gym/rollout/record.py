"""An episode as it grows, token by token, and the finished record of it.

Where a token came from is written down when it is appended, so the mask never has to be guessed afterwards (from
padding, special tokens or a second rendering). Episodes that we drive and those captured by the gateway are written by
the same code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo_gym.env.blame import LIMIT_TERM
from gspo_gym.errors import RecordError
from gspo_gym.types import (
    BoolArray,
    Completion,
    FinishReason,
    Float32Array,
    Int32Array,
    Message,
    Outcome,
    ParseStatus,
    Segment,
    StepResult,
    TokenIds,
    Turn,
)

_FIRST_CAPACITY = 1024  # tokens


# Any: these come from outside, and the point is to find out what they are.
def completion_of(
    token_ids: Any,
    logprobs: Any = None,
    weight_version: Any = None,
    *,
    require_possible: Callable[[Int32Array], None],
) -> Completion:
    """Return the tokens of one action as a completion with an unknown finish reason (LENGTH).

    `logprobs` and `weight_version` are one a token, or one for all of them; None stands for logprobs of 0 and a version
    of -1: no model sampled this.

    Raises:
        RecordError: wrong types or lengths, ids that `require_possible` refuses, or a logprob that is no logprob.
    """
    ids = _column("token_ids", token_ids, len(np.atleast_1d(token_ids)), int)
    require_possible(ids)
    logprob_column = _column("logprobs", 0.0 if logprobs is None else logprobs, len(ids), float)
    versions = _column("weight_version", -1 if weight_version is None else weight_version, len(ids), int)
    return Completion(ids, logprob_column, FinishReason.LENGTH, versions)


def require_possible(token_ids: Int32Array, *, max_tokens: int, stop_token_ids: Sequence[int]) -> None:
    """Raise a RecordError if no sampler with these limits can have come to these ids.

    Ids that the tokenizer does not have are possible: a model may have more logits. They decode to nothing.
    """
    if not 1 <= len(token_ids) <= max_tokens:
        raise RecordError(f"token_ids: expected 1 to {max_tokens} sampled ids in this turn, got {len(token_ids)}")
    ids = token_ids.tolist()  # turns are short: for two tokens, numpy takes a hundred times as long
    if min(ids) < 0:
        raise RecordError(f"token_ids: expected ids of at least 0, got {min(ids)}")
    early = [index for index, token_id in enumerate(ids[:-1]) if token_id in stop_token_ids]
    if early:
        raise RecordError(
            f"token_ids: token {early[0]} is the stop token {ids[early[0]]}, but "
            f"{len(ids) - early[0] - 1} more follow; sampling ends at a stop token"
        )


class OpenSegment:
    """A segment that still grows, by appending only. Mutable; `close` gives the frozen one."""

    def __init__(self) -> None:
        self._buffer: Int32Array = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._length = 0
        self._actions: list[tuple[int, int, Completion]] = []  # where each begins, its turn, what was sampled

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> Int32Array:
        """[L] int32: the tokens so far, read-only. Not copied; later tokens do not change it."""
        ids = self._buffer[: self._length]
        ids.setflags(write=False)
        return ids

    def append_context(self, token_ids: TokenIds) -> None:
        """Append tokens that the policy did not sample: environment, template, appended end of turn."""
        ids = np.asarray(token_ids, dtype=np.int32)
        stop = self._length + len(ids)
        if stop > len(self._buffer):
            # Doubled, so that a prompt which grows turn by turn is copied a few times in all and not every time.
            buffer: Int32Array = np.empty(max(stop, 2 * len(self._buffer)), dtype=np.int32)
            buffer[: self._length] = self.token_ids
            self._buffer = buffer
        self._buffer[self._length : stop] = ids
        self._length = stop

    def append_action(self, sampled: Completion, *, turn: int) -> None:
        self._actions.append((self._length, turn, sampled))
        self.append_context(sampled.token_ids)

    def close(self) -> Segment:
        # Everything but the sampled spans has these values, so only the spans had to be remembered.
        mask: BoolArray = np.zeros(self._length, dtype=np.bool_)
        logprobs: Float32Array = np.zeros(self._length, dtype=np.float32)
        turn_index: Int32Array = np.full(self._length, -1, dtype=np.int32)
        versions: Int32Array = np.full(self._length, -1, dtype=np.int32)
        for start, turn, completion in self._actions:
            span = slice(start, start + len(completion.token_ids))
            mask[span], turn_index[span] = True, turn
            logprobs[span], versions[span] = completion.logprobs, completion.weight_version
        return Segment(self.token_ids, mask, logprobs, turn_index, versions)


def _column(name: str, value: Any, length: int, kind: type[int] | type[float]) -> Any:  # Any: what a caller passed
    column = np.asarray(value)
    if column.ndim == 0 and name != "token_ids":
        column = np.full(length, column)
    is_kind = np.issubdtype(column.dtype, np.integer) or (kind is float and np.issubdtype(column.dtype, np.floating))
    if column.size and not is_kind:
        raise RecordError(f"{name}: expected {kind.__name__}s, got an array of {column.dtype}")
    if column.shape != (length,):
        raise RecordError(f"{name}: expected one a sampled token, shape ({length},), got {column.shape}")
    return column


@dataclass(frozen=True, slots=True, eq=False)
class PaddedEpisode:
    """An episode as rectangular arrays. S = segments, L = the length asked for, N = turns.

    Attributes:
        ids: [S, L] int32, padded on the right with `pad_id`.
        action_mask: [S, L] bool, True where the policy sampled the token; False on padding, also where the padding
            token is one that the policy can sample.
        turn_index: [S, L] int32, the turn that sampled the token, -1 elsewhere.
        rewards: [N] float32, of each turn; NaN means "not scored", which is not 0.
    """

    ids: Int32Array
    action_mask: BoolArray
    turn_index: Int32Array
    rewards: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeRecord:
    """An episode up to now: everything that `types.Trajectory` needs besides the request.

    `outcome` is None while the episode goes on; `success` is what the environment declared last, None if it never did.
    """

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    outcome: Outcome | None
    success: bool | None
    pad_id: int

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(turn.reward for turn in self.turns)

    def padded(self, length: int) -> PaddedEpisode:
        """Return the episode as arrays of `length` columns, one row a segment.

        Raises:
            RecordError: a segment is longer than `length`; nothing is ever cut off.
        """
        longest = max((len(segment) for segment in self.segments), default=0)
        if longest > length:
            raise RecordError(f"padded(length={length}): a segment has {longest} tokens; give at least that length")
        shape = (len(self.segments), length)
        ids: NDArray[np.int32] = np.full(shape, self.pad_id, dtype=np.int32)
        mask: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        turn_index: NDArray[np.int32] = np.full(shape, -1, dtype=np.int32)
        for row, segment in enumerate(self.segments):
            ids[row, : len(segment)] = segment.token_ids
            mask[row, : len(segment)] = segment.action_mask
            turn_index[row, : len(segment)] = segment.turn_index
        rewards = np.array([np.nan if reward is None else reward for reward in self.rewards], dtype=np.float32)
        return PaddedEpisode(ids=ids, action_mask=mask, turn_index=turn_index, rewards=rewards)


@dataclass(slots=True)
class OpenEpisode:
    """An episode that is being played. Mutable; `freeze` gives the record of it up to now."""

    segments: list[OpenSegment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    outcome: Outcome | None = None
    success: bool | None = None
    observation_start: int = field(init=False)  # of the open turn, in the last segment

    @property
    def length(self) -> int:
        """Tokens of the last segment, which is the present prompt."""
        return len(self.segments[-1]) if self.segments else 0

    def open_turn(self, new_ids: TokenIds, *, is_new_segment: bool) -> None:
        """Append what the model reads next."""
        if is_new_segment:
            self.segments.append(OpenSegment())
        self.observation_start = self.length
        self.segments[-1].append_context(new_ids)

    def append_action(self, sampled: Completion, finish_reason: FinishReason) -> None:
        """Append an action and its turn, unscored so far."""
        start = self.length
        self.segments[-1].append_action(sampled, turn=len(self.turns))
        self.turns.append(
            Turn(
                index=len(self.turns),
                segment=len(self.segments) - 1,
                observation_span=(self.observation_start, start),
                action_span=(start, self.length),
                finish_reason=finish_reason,
            )
        )

    def append_meaning(self, message: Message, parse: ParseStatus) -> None:
        """Record what the last action says, or that it cannot be parsed."""
        self.messages.append(message)
        if parse is not self.turns[-1].parse:
            self.turns[-1] = dataclasses.replace(self.turns[-1], parse=parse)

    def append_answer(self, result: StepResult) -> None:
        """Record what the environment gave for the last action."""
        self.messages.extend(result.messages)
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], reward=result.reward, reward_terms=result.reward_terms, events=result.events
        )
        if result.success is not None:
            self.success = result.success

    def end_at_limit(self, episode_return: float) -> None:
        """End the episode at the action that exceeded a limit, with this return in all."""
        # That turn may have an answer already: where all actions together took too long.
        penalty = episode_return - (self.earned - (self.turns[-1].reward or 0.0))
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], reward=penalty, reward_terms={LIMIT_TERM: penalty}, events=()
        )
        self.success = None if self.success is None else False  # None: the environment knows no success
        self.outcome = Outcome.ACTION_LIMIT

    @property
    def earned(self) -> float:
        """The return up to now."""
        return math.fsum(turn.reward for turn in self.turns if turn.reward is not None)

    def freeze(self, *, pad_id: int) -> EpisodeRecord:
        """Return the record up to now, which later turns do not change."""
        return EpisodeRecord(
            segments=tuple(segment.close() for segment in self.segments),
            turns=tuple(self.turns),
            messages=tuple(self.messages),
            outcome=self.outcome,
            success=self.success,
            pad_id=pad_id,
        )
