"""What the learner saw of every sampled token: the sink that an update can be given, and a table that keeps it all.

Nothing here feeds back into training. Loads without torch, so that readers of the records need none.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from gspo_gym.learning.batching import LabelledBatch, TrainBatch
    from gspo_gym.learning.optimizer import StepReport


class Clip(enum.IntEnum):
    """Bound of the loss that takes a token's gradient."""

    NONE = 0
    LOW = 1  # ratio below 1 - clip_low, advantage negative
    HIGH = 2  # ratio above 1 + clip_high, advantage positive
    DUAL = 3  # ratio above dual_clip, advantage negative


class Fate(enum.IntEnum):
    """What became of a sampled token in a training step; over several passes, the smallest number counts."""

    TRAINED = 0
    LEFT_OUT = 1  # correction weight 0: by correction.mode "mask", or off_policy_threshold
    SKIPPED = 2  # the optimizer step was skipped: its loss or gradient was not finite
    NO_GRADIENT = 3  # not computed: its episode has no advantage other than 0, and no other term of the loss
    OVERLONG = 4  # a limit cut its episode off, and rewards.overlong is "mask"
    FILTERED = 5  # the advantages of its episode are within advantages.filter_eps
    CONSTANT_GROUP = 6  # all of its group earned the same, and training.constant_groups leaves those out
    UNCOMMITTED = 7  # a token of its episode is of weights that were never committed


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """Parts of a micro-batch's sampled tokens in its loss; [A] each, detached, row after row.

    Attributes:
        ratio: the importance ratio s of the token's unit.
        clip: uint8, a `Clip`.
        share: the token's addend of the optimizer step's loss: policy, KL and entropy term and the teacher's,
            coefficients included.
        divergence: from the teacher, nats; None: there is none, or the sampled token is compared.
    """

    ratio: Tensor
    clip: Tensor
    share: Tensor
    divergence: Tensor | None = None


class TokenSink(Protocol):
    """Observer of an update."""

    def begin(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch of the update, with `token_index` if the sink needs it."""
        ...

    def seen(
        self, part: LabelledBatch, logprobs: Tensor, entropy: Tensor, terms: TokenTerms, weights: Tensor | None
    ) -> None:
        """Take a forward and backward pass of a micro-batch.

        `logprobs` and `entropy` [B, T] are those of the pass, `weights` [B, T] the correction's; None: it has none.
        """
        ...

    def stepped(self, minibatch: TrainBatch, report: StepReport) -> None:
        """Take the end of an optimizer step on what was seen since the one before; `minibatch` is all it divides by."""
        ...


class IgnoreTokens:
    """The sink that keeps nothing."""

    def begin(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def seen(
        self, part: LabelledBatch, logprobs: Tensor, entropy: Tensor, terms: TokenTerms, weights: Tensor | None
    ) -> None:
        pass

    def stepped(self, minibatch: TrainBatch, report: StepReport) -> None:
        pass


Column = NDArray[Any]  # of the dtypes below

# The columns of a table, with their dtypes; those of a pass exist for each. A token that was not seen has `UNSEEN`.
TOKEN_COLUMNS: Mapping[str, type[np.generic]] = {
    "advantage": np.float32,
    "old_logprob": np.float32,
    "ref_logprob": np.float32,
    "teacher_log_ratio": np.float32,
    "teacher_kl": np.float32,
    "fate": np.uint8,
}
PASS_COLUMNS: Mapping[str, type[np.generic]] = {
    "logprob": np.float32,
    "ratio": np.float32,
    "clip": np.uint8,
    "correction": np.float32,
    "entropy": np.float32,
    "teacher_divergence": np.float32,
    "share": np.float32,
    "optimizer_step": np.int32,
}
# Of each optimizer step that was attempted. A step that was skipped has the gradient norm NaN.
STEP_COLUMNS = ("learning_rate", "grad_norm")
UNSEEN = dict.fromkeys((*TOKEN_COLUMNS, *PASS_COLUMNS), np.nan) | {
    "fate": Fate.NO_GRADIENT,
    "clip": Clip.NONE,
    "share": 0.0,
    "optimizer_step": -1,
}


class TokenTable:
    """Sink that keeps one update: numpy columns over the sampled tokens of the batch, row after row.

    In each epoch, every token that is trained on has one pass.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._columns = self._unseen(TOKEN_COLUMNS)
        self._passes: list[dict[str, Column]] = []
        self._num_passes: Column  # of each token
        self._pending: list[tuple[dict[str, Column], Column]] = []  # seen since the last optimizer step
        self._reports: list[StepReport] = []

    def begin(self, batch: TrainBatch) -> TrainBatch:
        mask = batch.action_mask
        self._num_tokens = batch.num_actions
        self._num_passes = np.zeros(self._num_tokens, np.int32)
        self._columns = self._unseen(TOKEN_COLUMNS)
        self._columns["advantage"][:] = batch.advantages[mask].numpy()
        is_masked = batch.is_masked[:, None].expand_as(mask)[mask].numpy()
        self._columns["fate"][is_masked] = Fate.OVERLONG
        return dataclasses.replace(batch, token_index=mask.flatten().cumsum(0).view_as(mask) - 1)

    def seen(
        self, part: LabelledBatch, logprobs: Tensor, entropy: Tensor, terms: TokenTerms, weights: Tensor | None
    ) -> None:
        assert part.token_index is not None, "begin() gives it, and every division of a batch keeps it"
        mask = part.action_mask
        at = part.token_index[mask].cpu().numpy()
        number = int(self._num_passes[at[0]])  # minibatches pass as a whole: their tokens agree
        self._num_passes[at] += 1
        if number == len(self._passes):
            self._passes.append(self._unseen(PASS_COLUMNS))
        columns = self._passes[number]
        self._columns["advantage"][at] = part.advantages[mask].cpu().numpy()
        self._columns["old_logprob"][at] = part.old_logprobs[mask].cpu().numpy()
        labels = (part.ref_logprobs, part.teacher_log_ratios, part.teacher_kl)
        for name, label in zip(("ref_logprob", "teacher_log_ratio", "teacher_kl"), labels, strict=True):
            if label is not None:
                self._columns[name][at] = label[mask].cpu().numpy()
        columns["logprob"][at] = logprobs[mask].cpu().numpy()
        columns["entropy"][at] = entropy[mask].numpy(force=True)
        columns["correction"][at] = 1.0 if weights is None else weights[mask].cpu().numpy()
        columns["ratio"][at] = terms.ratio.cpu().numpy()
        columns["clip"][at] = terms.clip.cpu().numpy()
        columns["share"][at] = terms.share.cpu().numpy()
        if terms.divergence is not None:
            columns["teacher_divergence"][at] = terms.divergence.cpu().numpy()
        self._pending.append((columns, at))

    def stepped(self, minibatch: TrainBatch, report: StepReport) -> None:
        assert minibatch.token_index is not None, "see seen()"
        members = minibatch.token_index[minibatch.action_mask].numpy()
        for columns, at in self._pending:
            columns["optimizer_step"][members] = len(self._reports)
            if report.is_skipped:
                columns["share"][at] = UNSEEN["share"]
            weighs = np.where(columns["correction"][at] > 0, Fate.TRAINED, Fate.LEFT_OUT)
            fate = np.minimum(self._columns["fate"][at], Fate.SKIPPED if report.is_skipped else weighs)
            self._columns["fate"][at] = fate
        self._pending = []
        self._reports.append(report)

    def columns(self) -> dict[str, Column]:
        """Return the columns: [A] those of tokens, and [P, A] those of the P passes.

        The shares of all passes sum to the update's `loss/total`, which is the mean over its optimizer steps.
        """
        passes = self._passes or [self._unseen(PASS_COLUMNS)]
        pass_arrays = {name: np.stack([pass_columns[name] for pass_columns in passes]) for name in PASS_COLUMNS}
        num_steps = sum(not report.is_skipped for report in self._reports)
        pass_arrays["share"] /= max(num_steps, 1)  # 0 steps: all shares are 0
        return self._columns | pass_arrays

    def steps(self) -> dict[str, Column]:
        """Return `STEP_COLUMNS`, [K] float64 each of the K optimizer steps that were attempted."""
        norms = [math.nan if report.is_skipped else report.grad_norm for report in self._reports]
        rates = [report.learning_rate for report in self._reports]
        return dict(zip(STEP_COLUMNS, (np.array(rates, np.float64), np.array(norms, np.float64)), strict=True))

    def pack(self) -> dict[str, Column]:
        """Return all that the table holds as arrays by name, for `unpack` in another process."""
        arrays = {f"tokens.{name}": column for name, column in self._columns.items()}
        for number, columns in enumerate(self._passes):
            arrays |= {f"pass.{number}.{name}": column for name, column in columns.items()}
        reports = [(report.learning_rate, report.grad_norm, report.is_skipped) for report in self._reports]
        return arrays | {"reports": np.array(reports, np.float64).reshape(-1, 3)}

    def unpack(self, packed: Mapping[str, Column], make_report: Callable[[float, float, bool], StepReport]) -> None:
        """Become the table of `pack`."""
        self._columns = {name: packed[f"tokens.{name}"] for name in TOKEN_COLUMNS}
        self._num_tokens = len(self._columns["fate"])
        num_passes = sum(name.startswith("pass.") for name in packed) // len(PASS_COLUMNS)
        self._passes = [{name: packed[f"pass.{k}.{name}"] for name in PASS_COLUMNS} for k in range(num_passes)]
        self._reports = [
            make_report(float(r), float(norm), bool(is_skipped)) for r, norm, is_skipped in packed["reports"]
        ]

    def _unseen(self, dtypes: Mapping[str, type[np.generic]]) -> dict[str, Column]:
        return {name: np.full(self._num_tokens, UNSEEN[name], dtype) for name, dtype in dtypes.items()}
