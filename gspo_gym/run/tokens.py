"""Files of what the learner saw of every sampled token: one safetensors file a step. numpy only: readers need no torch.

The header's metadata hold `schema`, `step`, as JSON `trajectories`: the ids in the order of the step's episodes, as
pairs of what comes before an id's last slash, with it, and the list of what comes after it. `by_trajectory` names the
columns that hold one number a trajectory, because all its tokens have the same. A trajectory's tokens are those of its
segments, one after the other, where `action_mask` is True. A tokens, N trajectories, P passes over the batch
(training.update_epochs), K optimizer steps; a column in `by_trajectory` has N for A, and integers are as narrow as
their numbers allow:

    num_tokens       [N]     int      of each trajectory; they sum to A
    advantage        [A]     float32  as the loss used it, after KL, whitening and clip; NaN: never computed
    rollout_logprob  [A]     float32  the engine's
    old_logprob      [A]     float32  the policy's before the update
    ref_logprob      [A]     float32  the reference's; absent without one
    teacher_log_ratio [A]    float32  log(teacher / policy before the update); absent without a teacher
    teacher_kl       [A]     float32  KL(policy || teacher) at the token; absent without distillation.baseline
    weight_version   [A]     int      of the weights that sampled it; -1: unknown
    fate             [A]     uint8    `Fate`: trained, or why not
    logprob          [P, A]  float32  the present policy's, as each pass computed it
    ratio            [P, A]  float32  of the token's unit: exp(mean over the unit of logprob - old_logprob)
    clip             [P, A]  uint8    `Clip`
    correction       [P, A]  float32  weight against the engine's logprobs; absent where there is no correction: 1
    entropy          [P, A]  float32  nats
    teacher_divergence [P, A] float32 distillation.divergence of the pass, nats; absent with "sampled"
    share            [P, A]  float32  addend of loss/total of metrics.jsonl: all shares of a step sum to it
    optimizer_step   [P, N]  int      the step of the update, 0, 1, ..., that counts the trajectory; -1: none
    learning_rate    [K]     float64  of each optimizer step of the update
    grad_norm        [K]     float64  before clipping; NaN: the step was skipped

Where a token was not computed (see `Fate`), logprobs, ratio, correction and entropy are NaN, clip and share 0. Files of
schema 1, which are read, too, have {id: [first token, number of tokens]} as `trajectories`, and all columns by token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gspo_gym.errors import RecordError
from gspo_gym.learning.tokens import PASS_COLUMNS, STEP_COLUMNS, UNSEEN, Column, Fate, TokenTable
from gspo_gym.types import Trajectory

if TYPE_CHECKING:
    from gspo_gym.learning.batching import BuiltBatch
    from gspo_gym.run.collect import Collected

TOKENS_FOLDER = "tokens"
_SCHEMA = "2"
_BY_TRAJECTORY = "optimizer_step"  # which readers get by trajectory, too
_OPTIONAL = dict.fromkeys(("ref_logprob", "teacher_log_ratio", "teacher_kl", "teacher_divergence"), np.nan) | {
    "correction": 1.0
}  # absent if all tokens have this


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
            if (schema := metadata.get("schema")) not in ("1", _SCHEMA):
                raise RecordError(
                    f"{path}: expected a file of tokens of schema 1 or {_SCHEMA}, got {schema!r}; read it with the "
                    "version of gspo_gym that wrote it"
                )
            self.step = int(metadata["step"])
            lengths = _lengths(
                json.loads(metadata["trajectories"]), None if schema == "1" else self._read("num_tokens")
            )
            stops = np.cumsum([0, *lengths.values()]).tolist()
            self.spans = dict(zip(lengths, itertools.pairwise(stops), strict=True))
            self._number = {name: number for number, name in enumerate(lengths)}
            self._lengths = np.array([*lengths.values()], np.int64)
            self._by_trajectory = {_BY_TRAJECTORY, *metadata.get("by_trajectory", "").split()}
            self._names = frozenset(self._file.keys()) - frozenset((*STEP_COLUMNS, "num_tokens"))
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
        columns: dict[str, Column] = {}
        for name in sorted(self._names):
            column = self._read(name, trajectory_id)
            if name == _BY_TRAJECTORY:
                columns[name] = column if trajectory_id is None else column[:, 0]
            elif name not in self._by_trajectory:
                columns[name] = column
            else:
                number = slice(None) if trajectory_id is None else self._number[trajectory_id]
                columns[name] = np.repeat(column, self._lengths[number], -1)
        for name, value in _OPTIONAL.items():
            if name not in columns:
                columns[name] = np.full(
                    columns["logprob" if name in PASS_COLUMNS else "advantage"].shape, value, np.float32
                )
        columns["correction"][np.isnan(columns["logprob"])] = np.nan
        return columns

    def _read(self, name: str, trajectory_id: str | None = None) -> Column:
        """Return a column as it is in the file, or the part of a trajectory: its tokens', or one number."""
        part, place = self._file.get_slice(name), slice(None)
        if trajectory_id is not None:
            number = self._number[trajectory_id]
            place = slice(number, number + 1) if name in self._by_trajectory else slice(*self.spans[trajectory_id])
        column: Column = part[:, place] if name in PASS_COLUMNS else part[place]
        return column.astype(np.int32) if column.dtype.kind == "i" else column

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
    table_columns = table.columns()
    columns = {
        name: np.full((*array.shape[:-1], len(source)), UNSEEN[name], array.dtype)
        for name, array in table_columns.items()
    }
    columns["fate"] = np.repeat(np.array(fate, np.uint8), lengths)
    for name, values in table_columns.items():
        columns[name][..., is_in_batch] = values[..., source[is_in_batch]]
    steps = np.full((len(columns["optimizer_step"]), len(trajectories)), UNSEEN["optimizer_step"], np.int32)
    steps[:, lengths > 0] = columns["optimizer_step"][:, starts[lengths > 0]]  # those of a trajectory agree
    columns["optimizer_step"] = steps
    columns["rollout_logprob"] = _token_values(trajectories, "rollout_logprobs", np.float32)
    columns["weight_version"] = _token_values(trajectories, "weight_version", np.int32)
    for name, value in _OPTIONAL.items():
        column = columns[name]
        if bool((np.isnan(column) | (column == value)).all()):
            del columns[name]
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    return pack_columns(step, dict(zip(ids, lengths.tolist(), strict=True)), columns, table.steps())


def pack_columns(
    step: int, num_tokens: Mapping[str, int], columns: Mapping[str, Column], steps: Mapping[str, Column]
) -> bytes:
    """Return the bytes of a step's file.

    Args:
        num_tokens: by trajectory id, in the order of the columns.
        columns: those of [A], [P, A] and [P, N]. steps: those of [K].
    """
    lengths = np.array([*num_tokens.values()], np.int32)
    by_trajectory = [name for name in columns if name != _BY_TRAJECTORY and _is_alike(columns[name], lengths)]
    firsts = (np.cumsum(lengths) - lengths).clip(max=max(int(lengths.sum()) - 1, 0))  # of no token: any number
    packed_columns = {
        name: column[..., firsts] if name in by_trajectory else column for name, column in columns.items()
    }
    metadata = {
        "schema": _SCHEMA,
        "step": str(step),
        "trajectories": json.dumps(_names(num_tokens), separators=(",", ":")),
        "by_trajectory": " ".join(by_trajectory),
    }
    packed_columns |= {"num_tokens": lengths, **steps}
    return _in_order(
        save({name: np.ascontiguousarray(_narrow(column)) for name, column in packed_columns.items()}, metadata)
    )


def _in_order(file: bytes) -> bytes:
    """Return a safetensors file with the keys of its header sorted: their order is random, and equal runs are equal."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(header).to_bytes(8, "little") + header + file[end:]


def _is_alike(column: Column, lengths: Column) -> bool:
    """Return whether all tokens of each trajectory have the same number, to the last bit, in each pass."""
    bits = column.view(f"u{column.itemsize}")  # NaN equals NaN, and -0.0 is not 0.0
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return len(owner) > 0 and not bool(((bits[..., 1:] != bits[..., :-1]) & (owner[1:] == owner[:-1])).any())


def _narrow(column: Column) -> Column:
    """Return signed integers in the narrowest type that holds them."""
    if column.dtype.kind != "i" or not column.size:
        return column
    low, high = int(column.min()), int(column.max())
    types = (dtype for dtype in (np.int8, np.int16) if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return column.astype(next(types, np.int32))


def _names(ids: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the ids in order, with what ids one after the other have up to their last slash once."""
    parts = ((before + slash, after) for before, slash, after in (each.rpartition("/") for each in ids))
    return [(before, [after for _, after in each]) for before, each in itertools.groupby(parts, lambda pair: pair[0])]


def _lengths(names: Any, counts: Column | None) -> dict[str, int]:  # Any: JSON
    """Return the number of tokens by trajectory id; None: the names are those of schema 1, which come with it."""
    if counts is None:
        return {name: length for name, (_, length) in names.items()}
    ids = [before + after for before, endings in names for after in endings]
    return dict(zip(ids, counts.tolist(), strict=True))


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
    fates = {t.trajectory_id: Fate.FILTERED for group in collected.kept for t in group.trajectories}
    return fates | {attempt.trajectory_id: Fate.UNCOMMITTED for group in collected.kept for attempt in group.dropped}


def _token_values(trajectories: Sequence[Trajectory], name: str, dtype: type[np.generic]) -> Column:
    """Return [A] an array of the segments, of sampled tokens."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    return np.concatenate([np.zeros(0, dtype), *(getattr(each, name)[each.action_mask] for each in segments)])
