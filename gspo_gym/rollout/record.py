"""An episode as it grows, and the finished record of it. Only `adapter.TokenObservationWrapper` writes here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gspo_gym.env.blame import LIMIT_TERM
from gspo_gym.errors import RecordError
from gspo_gym.rollout.segments import OpenSegment, SampledTokens
from gspo_gym.types import (
    BoolArray,
    FinishReason,
    Float32Array,
    Int32Array,
    Message,
    Outcome,
    ParseStatus,
    Segment,
    StepResult,
    Turn,
)


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
    """An episode up to now: everything that `types.Trajectory` needs except who asked for it.

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
        """The reward of each turn; None where not scored."""
        return tuple(turn.reward for turn in self.turns)

    def padded(self, length: int) -> PaddedEpisode:
        """The episode as arrays of `length` columns, one row a segment.

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

    def open_turn(self, new_ids: Sequence[int], *, is_new_segment: bool) -> None:
        """Append what the model reads next."""
        if is_new_segment:
            self.segments.append(OpenSegment())
        self.observation_start = self.length
        self.segments[-1].append_context(new_ids)

    def append_action(self, sampled: SampledTokens, finish_reason: FinishReason) -> None:
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
        """Note what the last action says, or that it cannot be read."""
        self.messages.append(message)
        self.turns[-1] = dataclasses.replace(self.turns[-1], parse=parse)

    def append_answer(self, result: StepResult) -> None:
        """Note what the environment gave for the last action."""
        self.messages.extend(result.messages)
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], reward=result.reward, reward_terms=result.reward_terms, events=result.events
        )
        if result.success is not None:
            self.success = result.success

    def end_at_limit(self, episode_return: float) -> None:
        """End the episode at the action that exceeded a limit: its turn is scored so that the return is this.

        The turn may have been answered: where it was the sum of all actions that took too long.
        """
        penalty = episode_return - (self.earned - (self.turns[-1].reward or 0.0))
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], reward=penalty, reward_terms={LIMIT_TERM: penalty}, events=()
        )
        self.success = None if self.success is None else False
        self.outcome = Outcome.ACTION_LIMIT

    @property
    def earned(self) -> float:
        """The return up to now."""
        return math.fsum(turn.reward for turn in self.turns if turn.reward is not None)

    def freeze(self, *, pad_id: int) -> EpisodeRecord:
        """The record up to now, which later turns do not change."""
        return EpisodeRecord(
            segments=tuple(segment.close() for segment in self.segments),
            turns=tuple(self.turns),
            messages=tuple(self.messages),
            outcome=self.outcome,
            success=self.success,
            pad_id=pad_id,
        )
