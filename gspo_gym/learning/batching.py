"""Trajectories -> padded tensors, and their division into minibatches and micro-batches.

Axes: B rows, one a segment; T tokens, padded on the right; N trajectories. Several rows may belong to one trajectory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.advantages import BatchAdvantages, RunningReturns, batch_advantages
from gspo_gym.learning.credit import Returns, is_overlong, played, returns_of
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.learning.trees import tree_advantages
from gspo_gym.types import Float32Array, Int32Array, Segment, Trajectory, TrajectoryGroup

AnyBatch = TypeVar("AnyBatch", bound="TokenBatch")


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Trajectories as tensors.

    Attributes:
        token_ids: [B, T] int64; the padding is 0, which no result depends on.
        attention_mask: [B, T] bool, True for tokens, False for the padding on their right.
        action_mask: [B, T] bool, True where the policy sampled the token; never at position 0.
        turn_index: [B, T] int64, the turn that sampled the token; -1 where action_mask is False.
        trajectory_index: [B] int64, the row's trajectory, 0..N-1; every trajectory has a sampled token.
        rollout_logprobs: [B, T] float32, the engine's, nats; 0 where action_mask is False.
    """

    token_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    turn_index: Tensor
    trajectory_index: Tensor
    rollout_logprobs: Tensor

    def __post_init__(self) -> None:
        _check_shapes(self)
        mask = self.action_mask
        lengths = self.attention_mask.sum(1)
        positions = torch.arange(self.token_ids.shape[1], device=lengths.device)
        if not torch.equal(self.attention_mask, positions < lengths[:, None]):
            raise RecordError("TokenBatch.attention_mask: expected padding on the right only")
        if bool((mask & ~self.attention_mask).any()) or bool(mask[:, 0].any()):
            raise RecordError("TokenBatch.action_mask: expected sampled tokens after position 0 and not in the padding")
        if not torch.equal(self.turn_index >= 0, mask):
            raise RecordError("TokenBatch.turn_index: expected a turn exactly where action_mask is True")
        present = torch.unique(self.trajectory_index[mask.any(1)])
        if not torch.equal(present, torch.arange(self.num_trajectories, device=present.device)):
            raise RecordError("TokenBatch.trajectory_index: expected 0..N-1, each with at least one sampled token")

    @property
    def num_trajectories(self) -> int:
        """N. Rows of one trajectory count once."""
        return int(self.trajectory_index.max()) + 1

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())


@dataclass(frozen=True, slots=True, eq=False)
class TeacherPrompt:
    """What a teacher reads before the tokens that were sampled in a turn, in place of what the policy read.

    Attributes:
        trajectory: its number in the batch. turn: its index.
        token_ids: [L] int32, at least one.
    """

    trajectory: int
    turn: int
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch(TokenBatch):
    """A TokenBatch with advantages.

    Attributes:
        advantages: [B, T] float32, of the turn that sampled the token; 0 where action_mask is False.
        is_masked: [B] bool, whether the row's trajectory is left out of the loss: it has no gradient, and still counts
            in every denominator. All rows of a trajectory agree.
        token_index: [B, T] int64, the number of each sampled token in the whole batch, row after row; None: it is not
            needed.
        prompts: what a teacher with feedback reads; the learner takes them out before it divides the batch.
        teacher_logprobs: [B, T] float32, that teacher's, nats. is_taught: [B, T] bool, where it has any. None: there is
            no such teacher.
    """

    advantages: Tensor
    is_masked: Tensor
    token_index: Tensor | None = field(default=None, kw_only=True)
    prompts: tuple[TeacherPrompt, ...] = field(default=(), kw_only=True)
    teacher_logprobs: Tensor | None = field(default=None, kw_only=True)
    is_taught: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        TokenBatch.__post_init__(self)
        if not bool(torch.isfinite(self.advantages).all()):
            raise RecordError("TrainBatch.advantages: expected finite values")
        if bool(self.advantages[~self.action_mask].any()):
            raise RecordError("TrainBatch.advantages: expected 0 where action_mask is False")
        masked_trajectories, other_trajectories = (
            self.trajectory_index[self.is_masked],
            self.trajectory_index[~self.is_masked],
        )
        if bool(torch.isin(masked_trajectories, other_trajectories).any()):
            raise RecordError("TrainBatch.is_masked: expected all rows of a trajectory to agree")


@dataclass(frozen=True, slots=True, eq=False)
class LabelledBatch(TrainBatch):
    """A TrainBatch with the old and reference logprobs; another type, because computing them must not be forgotten.

    Attributes:
        old_logprobs: [B, T], the learner's own, of the policy before the update; 0 where action_mask is False.
        ref_logprobs: [B, T], the reference policy's; None: the loss has no KL term.
        teacher_log_ratios, teacher_kl: [B, T], as in `losses.TeacherScores`; None: no teacher or an
            exact divergence, and no baseline.
    """

    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    teacher_log_ratios: Tensor | None = field(default=None, kw_only=True)
    teacher_kl: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Counts of groups and their trajectories by how they were used.

    Attributes:
        num_groups: groups with a trajectory that took part. num_constant_groups: of these, where all did equally well.
        num_trajectories: that entered the batch. num_skipped: that took no part, because they hold no turn.
            num_untrained: that took part in the statistics and not in the batch, because none of their tokens is
            trained on. num_filtered: the same, because of filter_eps.
        num_overlong: of those that took part, cut off by a limit.
    """

    num_groups: int = 0
    num_constant_groups: int = 0
    num_trajectories: int = 0
    num_skipped: int = 0
    num_untrained: int = 0
    num_filtered: int = 0
    num_overlong: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BuiltBatch:
    """A batch and the facts about what went into it.

    Attributes:
        batch: None: there were no groups, or nothing in them to train on (see `BatchCounts`).
        mean_return: of the trajectories that took part, without forks, whose number follows from how long episodes are;
            as the advantages compare them: after step rewards, penalty and clip; None: there were none.
        trajectory_ids: of the batch's trajectories, in order.
    """

    batch: TrainBatch | None
    counts: BatchCounts
    running: RunningReturns
    mean_return: float | None
    trajectory_ids: tuple[str, ...] = ()


def build_batch(
    groups: Sequence[TrajectoryGroup],
    advantages: AdvantageSettings,
    *,
    rewards: RewardSettings | None = None,
    step_rewards: StepRewardSettings | None = None,
    running: RunningReturns | None = None,
    known_returns: Mapping[str, Returns] | None = None,
) -> BuiltBatch:
    """Return the trajectories of all groups with their advantages, in order; None for settings: their defaults.

    A trajectory without a turn takes no part, neither in the batch nor in its group's statistics. If it has turns and
    none of their tokens is trained on, it takes part in the statistics alone. Tokens after a segment's last sampled one
    are left out. Of episodes with forks the siblings are compared (`trees.py`). A trajectory with |advantage| <=
    filter_eps at all its turns takes part in the statistics and then leaves. An overlong one, where `rewards.overlong`
    is "mask", stays and is marked. `known_returns`, by trajectory id, were computed before under the same settings.

    Raises:
        UnscoredError: a trajectory that takes part has no reward. RecordError: no trajectory has a turn.
    """
    rewards, running = rewards or RewardSettings(), running or RunningReturns()
    members = [group for group in map(played, groups) if group]
    if not groups:
        return BuiltBatch(None, BatchCounts(), running, None)
    trajectories = [trajectory for group in members for trajectory in group]
    if not trajectories:
        raise RecordError(f"expected at least one trajectory with a turn, got none in {len(groups)} groups")
    returns_by_id = known_returns or {}

    def returns_for(trajectory: Trajectory) -> Returns:
        return returns_by_id.get(trajectory.trajectory_id) or returns_of(
            trajectory, discount=advantages.discount, rewards=rewards, step_rewards=step_rewards
        )

    returns = [[returns_for(trajectory) for trajectory in group] for group in members]
    result = _compare(members, returns, advantages, running)
    with_actions = {i for i, trajectory in enumerate(trajectories) if trajectory.num_actions > 0}
    eps = advantages.filter_eps
    indices = [i for i, v in enumerate(result.values) if i in with_actions and (eps is None or np.abs(v).max() > eps)]
    overlong = [is_overlong(trajectory) for trajectory in trajectories]
    counts = BatchCounts(
        num_groups=len(members),
        num_constant_groups=sum(result.constant_groups),
        num_trajectories=len(indices),
        num_skipped=sum(len(group.trajectories) for group in groups) - len(trajectories),
        num_untrained=len(trajectories) - len(with_actions),
        num_filtered=len(with_actions) - len(indices),
        num_overlong=sum(overlong),
    )
    mean_return = _mean_return(trajectories, chain.from_iterable(returns))
    if not indices:
        return BuiltBatch(None, counts, result.running, mean_return)
    tokens = batch_tokens([trajectories[i] for i in indices])
    batch = TrainBatch(
        **tensors_of(tokens),
        advantages=_spread([result.values[i] for i in indices], tokens.turn_index, tokens.trajectory_index),
        is_masked=torch.tensor([overlong[i] and rewards.overlong == "mask" for i in indices])[tokens.trajectory_index],
    )
    return BuiltBatch(batch, counts, result.running, mean_return, tuple(trajectories[i].trajectory_id for i in indices))


def _mean_return(trajectories: Sequence[Trajectory], returns: Iterable[Returns]) -> float | None:
    pairs = zip(trajectories, returns, strict=True)
    whole = [own.episode_return for trajectory, own in pairs if trajectory.forked_from is None]
    return sum(whole) / len(whole) if whole else None


def _compare(
    members: Sequence[Sequence[Trajectory]],
    returns: Sequence[Sequence[Returns]],
    settings: AdvantageSettings,
    running: RunningReturns,
) -> BatchAdvantages:
    """Return the advantages of groups; where there are forks, those of their trees."""
    result = batch_advantages(returns, settings, running)
    if not any(trajectory.forked_from for group in members for trajectory in group):
        return result
    return dataclasses.replace(result, values=tree_advantages(members, returns, result.constant_groups))


def batch_tokens(trajectories: Sequence[Trajectory]) -> TokenBatch:
    """Return the segments of these trajectories that hold a sampled token, as rows; trajectory i keeps the number i.

    Raises:
        RecordError: there is no trajectory, or one without a sampled token.
    """
    rows = [(i, s) for i, t in enumerate(trajectories) for s in t.segments if s.action_mask.any()]
    if len({i for i, _ in rows}) != len(trajectories) or not rows:
        raise RecordError(
            f"expected at least one trajectory and a sampled token in each, got {len(trajectories)} trajectories, "
            f"{len({i for i, _ in rows})} of them with sampled tokens"
        )
    width = max(_used_length(segment) for _, segment in rows)
    shape = (len(rows), width)
    token_ids, turn_index = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    attention_mask, action_mask = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    rollout_logprobs = np.zeros(shape, np.float32)
    for row, (_, segment) in enumerate(rows):
        n = _used_length(segment)
        token_ids[row, :n] = segment.token_ids[:n]
        attention_mask[row, :n] = True
        action_mask[row, :n] = segment.action_mask[:n]
        turn_index[row, :n] = segment.turn_index[:n]
        rollout_logprobs[row, :n] = segment.rollout_logprobs[:n]
    return TokenBatch(
        token_ids=torch.from_numpy(token_ids),
        attention_mask=torch.from_numpy(attention_mask),
        action_mask=torch.from_numpy(action_mask),
        turn_index=torch.from_numpy(turn_index),
        trajectory_index=torch.tensor([i for i, _ in rows], dtype=torch.int64),
        rollout_logprobs=torch.from_numpy(rollout_logprobs),
    )


def select_trajectories(batch: AnyBatch, trajectories: Iterable[int]) -> AnyBatch:
    """Return a batch of only these trajectories, renumbered 0.. in the order given, padded no wider than they need."""
    numbers = list(trajectories)
    new_number = torch.full((batch.num_trajectories,), -1, dtype=torch.int64)
    new_number[numbers] = torch.arange(len(numbers))
    number_of_row = new_number[batch.trajectory_index]
    rows = torch.nonzero(number_of_row >= 0).squeeze(1)
    width = int(batch.attention_mask[rows].sum(1).max())
    tensors = {
        name: value[rows, :width].contiguous() if value.dim() == 2 else value[rows]
        for name, value in tensors_of(batch).items()
    }
    return dataclasses.replace(batch, **tensors | {"trajectory_index": number_of_row[rows]})


def split_minibatches(batch: AnyBatch, size: int | None, generator: np.random.Generator) -> list[AnyBatch]:
    """Return the batch in parts of at most `size` trajectories, drawn at random; None: one part, in order."""
    if size is None or size >= batch.num_trajectories:
        return [batch]
    order = generator.permutation(batch.num_trajectories)
    # As even as possible, so that no step rests on a small remainder.
    num_parts = -(-batch.num_trajectories // size)
    return [select_trajectories(batch, np.sort(part).tolist()) for part in np.array_split(order, num_parts)]


def split_microbatches(batch: AnyBatch, max_tokens: int, *, keep_alike_together: bool = False) -> list[AnyBatch]:
    """Return the batch in parts of at most `max_tokens` padded tokens each (a ConfigError for less than 1).

    keep_alike_together: put trajectories that begin alike into the same parts as far as possible, instead of those of
    similar length. A trajectory that is larger than `max_tokens` by itself makes a part alone.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens: expected at least 1, got {max_tokens}")
    # All rows of a trajectory stay together: they may share an importance ratio.
    lengths: list[list[int]] = [[] for _ in range(batch.num_trajectories)]  # of each trajectory's rows
    for trajectory, length in zip(batch.trajectory_index.tolist(), batch.attention_mask.sum(1).tolist(), strict=True):
        lengths[trajectory].append(length)
    parts: list[list[int]] = []
    rows_in_part = width = 0
    # The longest first: parts hold rows of similar length, and memory runs out in the first part or never.
    order = sorted(range(len(lengths)), key=lambda i: -max(lengths[i]))
    if keep_alike_together:
        rows = dict(zip(reversed(batch.trajectory_index.tolist()), reversed(batch.token_ids.tolist()), strict=True))
        order.sort(key=rows.__getitem__)  # by the first row of each
    for trajectory in order:
        wider = max(width, *lengths[trajectory])
        if not parts or (rows_in_part + len(lengths[trajectory])) * wider > max_tokens:
            parts.append([])
            rows_in_part, wider = 0, max(lengths[trajectory])
        width = wider
        parts[-1].append(trajectory)
        rows_in_part += len(lengths[trajectory])
    return [select_trajectories(batch, part) for part in parts]


def to_device(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """Return the same batch with its tensors on `device`."""
    return dataclasses.replace(batch, **{name: value.to(device) for name, value in tensors_of(batch).items()})


def _used_length(segment: Segment) -> int:  # nothing depends on the tokens after the last sampled one
    return int(np.flatnonzero(segment.action_mask)[-1]) + 1


def _spread(advantages: Sequence[Float32Array], turn_index: Tensor, trajectory_index: Tensor) -> Tensor:
    """Return [B, T] float32: the advantage of the turn that sampled each token, 0 elsewhere."""
    spread = np.zeros(turn_index.shape, np.float32)
    turns = turn_index.numpy()
    for row, trajectory in enumerate(trajectory_index.tolist()):
        is_sampled = turns[row] >= 0
        values = advantages[trajectory]
        if turns[row].max() >= len(values):
            raise RecordError(f"a token names turn {turns[row].max()}, but its trajectory has {len(values)} turns")
        spread[row, is_sampled] = values[turns[row, is_sampled]]
    return torch.from_numpy(spread)


def tensors_of(batch: TokenBatch) -> dict[str, Any]:  # Any: tensors, which go to fields that are no tensors, too
    """Return the fields of a batch that hold a tensor, by name."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _check_shapes(batch: TokenBatch) -> None:
    if batch.token_ids.dim() != 2 or 0 in batch.token_ids.shape:
        raise RecordError(f"token_ids: expected a non-empty [B, T], got {tuple(batch.token_ids.shape)}")
    expected = {"token_ids": torch.int64, "attention_mask": torch.bool, "action_mask": torch.bool}
    expected |= {"turn_index": torch.int64, "trajectory_index": torch.int64, "is_masked": torch.bool}
    expected |= {"token_index": torch.int64, "is_taught": torch.bool}
    for name, value in tensors_of(batch).items():
        is_per_row = name in ("trajectory_index", "is_masked")
        shape = batch.token_ids.shape[:1] if is_per_row else batch.token_ids.shape
        if value.shape != shape:
            raise RecordError(f"{type(batch).__name__}.{name}: expected {tuple(shape)}, got {tuple(value.shape)}")
        is_right = value.dtype == expected[name] if name in expected else value.is_floating_point()
        if not is_right:
            raise RecordError(
                f"{type(batch).__name__}.{name}: expected {expected.get(name, 'float')}, got {value.dtype}"
            )
