"""Files of what the learner saw of every sampled token: one safetensors file a step. numpy only: readers need no torch.

The header's metadata hold `schema`, `step`, and as JSON `trajectories`: {id: [first token, number of tokens]}, in the
order of the step's episodes. A trajectory's tokens are those of its segments, one after the other, where `action_mask`
is True. A tokens, N trajectories, P passes over the batch (training.update_epochs), K optimizer steps:

    advantage        [A]     float32  as the loss used it, after KL, whitening and clip; NaN: never computed
    rollout_logprob  [A]     float32  the engine's
    old_logprob      [A]     float32  the policy's before the update
    ref_logprob      [A]     float32  the reference's; absent without one
    weight_version   [A]     int32    of the weights that sampled it; -1: unknown
    fate             [A]     uint8    `Fate`: trained, or why not
    logprob          [P, A]  float32  the present policy's, as each pass computed it
    ratio            [P, A]  float32  of the token's unit: exp(mean over the unit of logprob - old_logprob)
    clip             [P, A]  uint8    `Clip`
    correction       [P, A]  float32  weight against the engine's logprobs; absent where there is no correction: 1
    entropy          [P, A]  float32  nats
    share            [P, A]  float32  addend of loss/total of metrics.jsonl: all shares of a step sum to it
    optimizer_step   [P, N]  int32    the step of the update, 0, 1, ..., that counts the trajectory; -1: none
    learning_rate    [K]     float64  of each optimizer step of the update
    grad_norm        [K]     float64  before clipping; NaN: the step was skipped

Where a token was not computed (see `Fate`), logprobs, ratio, correction and entropy are NaN, clip and share 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gspo_gym.errors import RecordError
from gspo_gym.learning.tokens import PASS_COLUMNS, STEP_COLUMNS, UNSEEN, Column, Fate, TokenTable
from gspo_gym.rollout.episode_files import SCHEMA_VERSION
from gspo_gym.types import Trajectory

if TYPE_CHECKING:
    from gspo_gym.learning.batching import BuiltBatch
    from gspo_gym.run.collect import Collected

TOKENS_FOLDER = "tokens"
_OPTIONAL = {"ref_logprob": np.nan, "correction": 1.0}  # absent if all tokens have this


def _open(path: Path) -> Any:  # Any: untyped
    return safe_open(path, framework="np")


def token_path(folder: Path, step: int) -> Path:
    """Return the path of a step's tokens in a run's folder."""
    return folder / TOKENS_FOLDER / f"step_{step:06d}.safetensors"


def token_steps(folder: Path) -> list[int]:
    """Return the steps of a run of which tokens are recorded, ascending."""
    return sorted(int(path.stem[5:]) for path in (folder / TOKENS_FOLDER).glob("step_*.safetensors"))


class TokenFile:
    """The tokens of one step, read from the disk as they are asked for.

    Attributes:
        step: of the run.
        spans: by trajectory id, [first, stop) of its tokens.
        num_passes: P.

    Raises:
        RecordError: there is no such file, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = _open(path)
            metadata = self._file.metadata() or {}
            if metadata.get("schema") != str(SCHEMA_VERSION):
                raise RecordError(f"{path}: expected schema {SCHEMA_VERSION}, got {metadata.get('schema')!r}")
            self.step = int(metadata["step"])
            found = json.loads(metadata["trajectories"])
            self.spans = {name: (start, start + length) for name, (start, length) in found.items()}
            self._names = frozenset(self._file.keys()) - frozenset(STEP_COLUMNS)
            self.num_passes: int = self._file.get_slice("logprob").get_shape()[0]
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise RecordError(f"{path}: no file of tokens: {error}") from error

    def columns(self, trajectory_id: str | None = None) -> dict[str, Column]:
        """Return every column of one trajectory, with n its tokens in place of A; None: of all.

        `optimizer_step` is [P] for one trajectory. Columns that the file leaves out are there, too; those of [K] not.

        Raises:
            RecordError: no such trajectory in this step.
        """
        if trajectory_id is not None and trajectory_id not in self.spans:
            raise RecordError(f"step {self.step}: no tokens of a trajectory {trajectory_id!r}")
        start, stop = (0, self.num_tokens) if trajectory_id is None else self.spans[trajectory_id]
        columns: dict[str, Column] = {}
        for name in sorted(self._names):
            part = self._file.get_slice(name)
            if name == "optimizer_step":
                every = part[:]
                columns[name] = every if trajectory_id is None else every[:, list(self.spans).index(trajectory_id)]
            else:
                columns[name] = part[:, start:stop] if name in PASS_COLUMNS else part[start:stop]
        for name, value in _OPTIONAL.items():
            if name not in columns:
                columns[name] = np.full(
                    columns["logprob" if name in PASS_COLUMNS else "advantage"].shape, value, np.float32
                )
        columns["correction"][np.isnan(columns["logprob"])] = np.nan
        return columns

    @property
    def num_tokens(self) -> int:
        """A."""
        return max((stop for _, stop in self.spans.values()), default=0)


def open_tokens(folder: Path, step: int) -> TokenFile:
    """Return the tokens of a step of a run.

    Raises:
        RecordError: they are not recorded, or the file is damaged.
    """
    return TokenFile(token_path(folder, step))


def pack_tokens(step: int, collected: Collected, built: BuiltBatch, table: TokenTable) -> bytes:
    """Return the bytes of a step's file; `table` was the sink of the update on `built`, if it has a batch."""
    trajectories = [trajectory for group in collected.groups for trajectory in group.trajectories]
    lengths = np.array([trajectory.num_actions for trajectory in trajectories])
    starts = np.cumsum(lengths) - lengths
    source = _numbers_in_batch(trajectories, built.trajectory_ids)
    is_in_batch = source >= 0
    fates = _fates_outside(collected)
    fate = [fates.get(trajectory.trajectory_id, Fate.CONSTANT_GROUP) for trajectory in trajectories]
    seen = table.columns()
    columns = {name: np.full((*each.shape[:-1], len(source)), UNSEEN[name], each.dtype) for name, each in seen.items()}
    columns["fate"] = np.repeat(np.array(fate, np.uint8), lengths)
    for name, values in seen.items():
        columns[name][..., is_in_batch] = values[..., source[is_in_batch]]
    steps = np.full((len(columns["optimizer_step"]), len(trajectories)), UNSEEN["optimizer_step"], np.int32)
    steps[:, lengths > 0] = columns["optimizer_step"][:, starts[lengths > 0]]  # those of a trajectory agree
    columns["optimizer_step"] = steps
    columns["rollout_logprob"] = _sampled(trajectories, "rollout_logprobs", np.float32)
    columns["weight_version"] = _sampled(trajectories, "weight_version", np.int32)
    for name, value in _OPTIONAL.items():
        column = columns[name]
        if bool((np.isnan(column) | (column == value)).all()):
            del columns[name]
    columns |= table.steps()
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    spans = dict(zip(ids, zip(starts.tolist(), lengths.tolist(), strict=True), strict=True))
    metadata = {"schema": str(SCHEMA_VERSION), "step": str(step), "trajectories": json.dumps(spans)}
    return bytes(save({name: np.ascontiguousarray(column) for name, column in columns.items()}, metadata))


def _numbers_in_batch(trajectories: Sequence[Trajectory], ids: Sequence[str]) -> NDArray[np.int64]:
    """Return [A] the number of each token in the batch of the trajectories `ids`; -1: it is not in it."""
    length_of = {trajectory.trajectory_id: trajectory.num_actions for trajectory in trajectories}
    firsts = dict(zip(ids, np.cumsum([0, *(length_of[name] for name in ids)]).tolist(), strict=False))
    parts = [
        np.arange(length) + firsts[name] if name in firsts else np.full(length, -1)
        for name, length in length_of.items()
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _fates_outside(collected: Collected) -> dict[str, Fate]:
    """Return the fate of trajectories that are not in the batch, by id; others are of constant groups."""
    kept = {t.trajectory_id: Fate.FILTERED for group in collected.kept for t in group.trajectories}
    return kept | {each.trajectory_id: Fate.UNCOMMITTED for group in collected.kept for each in group.dropped}


def _sampled(trajectories: Sequence[Trajectory], name: str, dtype: type[np.generic]) -> Column:
    """Return [A] an array of the segments, of sampled tokens."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    return np.concatenate([np.zeros(0, dtype), *(getattr(each, name)[each.action_mask] for each in segments)])
