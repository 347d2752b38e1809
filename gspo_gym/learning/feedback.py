"""Self-distillation with feedback: the policy before the update, with feedback in its prompt, scores its own tokens.

arXiv 2601.20802 (SDPO), 2601.19897 (SDFT) and 2608.05987. With S the policy before the update, and T the same weights
that read, before a turn, feedback about it: A_t = log p_T - log p_S of the tokens that S sampled in that turn, both at
temperature 1 and of the whole vocabulary; `losses.py` makes a loss of it, as of any teacher's. This file scores; what
feedback there is, how it is written and whether it says the answer, is decided where there are texts
(`run/feedback.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gspo_gym.errors import RecordError
from gspo_gym.learning.batching import TeacherPrompt, TrainBatch, split_microbatches, to_device
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.types import Sampling

_MIN_TRAJECTORIES = 3  # of a correlation: two points always lie on a line


class FeedbackTeacher:
    """The policy as it is before an update, which reads other prompts than it played from.

    Args:
        computer: of the policy at temperature 1. device: of its weights.
        scored: of its old logprobs; None: the engine's stand for them. Where these are of another law (another
            temperature, truncated sampling, an adapter's dropout), the policy is scored once more for the comparison.
    """

    def __init__(self, computer: LogprobComputer, *, scored: LogprobComputer | None, device: torch.device) -> None:
        self._computer, self._device = computer, device
        self._is_plain = scored is not None and not scored.has_dropout and scored.sampling == Sampling()

    @torch.no_grad()
    def read(self, batch: TrainBatch, *, max_tokens: int) -> TrainBatch:
        """Return the batch with `teacher_logprobs` and `is_taught`, and without the prompts.

        Each prompt makes a row of its own, followed by the tokens that were sampled in its turn: a turn's feedback is
        read in that turn alone. `max_tokens`: padded ones of a pass.

        Raises:
            RecordError: a prompt of a turn that the batch does not have.
        """
        logprobs = torch.zeros(batch.token_ids.shape, dtype=torch.float32)
        is_taught = torch.zeros(batch.token_ids.shape, dtype=torch.bool)
        if batch.prompts:
            rows, places = _rows(batch)
            alike = self._computer.prefixes.pays(rows.token_ids, rows.attention_mask)
            for part in split_microbatches(rows, max_tokens, keep_alike_together=alike):
                here = to_device(part, self._device)
                scores = self._computer.compute(here.token_ids, here.attention_mask, here.action_mask).logprobs
                assert part.token_index is not None, "_rows() numbers them"
                at = places[part.token_index[part.action_mask]]
                logprobs.view(-1)[at] = scores[here.action_mask].float().cpu()
                is_taught.view(-1)[at] = True
        return dataclasses.replace(batch, prompts=(), teacher_logprobs=logprobs, is_taught=is_taught)

    @torch.no_grad()
    def compare(self, batch: TrainBatch, old_logprobs: Tensor | None) -> tuple[Tensor, None]:
        """Return [B, T] log(teacher / policy) of the taught tokens, NaN elsewhere; there is no baseline.

        `old_logprobs` [B, T] are the learner's, before an update; None: the engine's stand for them.
        """
        assert batch.teacher_logprobs is not None, "read() is called first"
        assert batch.is_taught is not None, "read() is called first"
        own = old_logprobs
        if own is None or not self._is_plain:
            own = self._computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
        return torch.where(batch.is_taught, batch.teacher_logprobs - own, torch.nan), None


def teacher_metrics(batch: TrainBatch, parts: Sequence[TrainBatch]) -> Mapping[str, float]:
    """Return how much of the batch is taught, and whether the teacher agrees with the rewards.

    `parts` are the labelled micro-batches that are trained on. The correlation is Pearson's, over their trajectories
    with taught tokens, of two means over these tokens: of A_t, and of the advantage by reward. It is left out where one
    of them does not vary.

    Ours. To first order, moving the policy towards a fixed teacher changes the expected return by the covariance of the
    trajectory's summed A_t and its return; the mean of A_t alone says nothing, for it is -KL, and never positive. The
    advantage stands for the return, because it is centred in its group: tasks that are hard for both do not count.
    """
    assert batch.is_taught is not None, "read() is called first"
    metrics = {"distillation/taught_fraction": int(batch.is_taught.sum()) / batch.num_actions}
    pairs = [pair for part in parts for pair in _means(part)]
    if len(pairs) >= _MIN_TRAJECTORIES:
        gaps, gains = np.array(pairs, np.float64).T
        if np.ptp(gaps) > 0 and np.ptp(gains) > 0:
            metrics["distillation/agreement"] = float(np.corrcoef(gaps, gains)[0, 1])
    return metrics


def _means(part: TrainBatch) -> list[tuple[float, float]]:
    """Return the mean A_t and the mean advantage over the taught tokens of each trajectory that has some."""
    log_ratios: Tensor | None = getattr(part, "teacher_log_ratios", None)
    if log_ratios is None or part.is_taught is None:
        return []
    owner = part.trajectory_index[:, None].expand_as(part.is_taught)[part.is_taught]
    gaps, gains = log_ratios[part.is_taught].double(), part.advantages[part.is_taught].double()
    return [
        (float(gaps[owner == trajectory].mean()), float(gains[owner == trajectory].mean()))
        for trajectory in torch.unique(owner)
    ]


def _rows(batch: TrainBatch) -> tuple[TrainBatch, Tensor]:
    """Return the prompts with the turns' tokens, a row each, and [A] where each sampled token stands in the batch.

    A place is that in the flattened [B, T]; the rows' `token_index` numbers it.
    """
    width = batch.token_ids.shape[1]
    owners, turns = batch.trajectory_index.numpy(), batch.turn_index.numpy()
    ids, mask = batch.token_ids.numpy(), batch.action_mask.numpy()
    rows_of: dict[int, list[int]] = {}
    for row, owner in enumerate(owners.tolist()):
        rows_of.setdefault(owner, []).append(row)
    found: list[tuple[TeacherPrompt, int, slice]] = []
    for prompt in batch.prompts:
        at = [(row, np.flatnonzero(turns[row] == prompt.turn)) for row in rows_of.get(prompt.trajectory, [])]
        at = [(row, positions) for row, positions in at if len(positions)]
        if len(at) != 1 or len(prompt.token_ids) == 0:
            raise RecordError(
                f"a teacher's prompt: expected ids, and a turn {prompt.turn} of trajectory {prompt.trajectory} with "
                f"sampled tokens in one row of the batch, got {len(prompt.token_ids)} ids and {len(at)} such rows"
            )
        ((row, positions),) = at
        found.append((prompt, row, slice(int(positions[0]), int(positions[-1]) + 1)))
    lengths = [len(prompt.token_ids) + span.stop - span.start for prompt, _, span in found]
    shape = (len(found), max(lengths))
    token_ids, turn_index = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    attention_mask, action_mask = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    places = []
    for number, (prompt, row, span) in enumerate(found):
        first, length = len(prompt.token_ids), lengths[number]
        token_ids[number, :first], token_ids[number, first:length] = prompt.token_ids, ids[row, span]
        attention_mask[number, :length] = True
        action_mask[number, first:length] = mask[row, span]
        turn_index[number, first:length] = turns[row, span]
        places.append(row * width + span.start + np.flatnonzero(mask[row, span]))
    actions = torch.from_numpy(action_mask)
    rows = TrainBatch(
        token_ids=torch.from_numpy(token_ids),
        attention_mask=torch.from_numpy(attention_mask),
        action_mask=actions,
        turn_index=torch.from_numpy(turn_index),
        trajectory_index=torch.arange(len(found)),
        rollout_logprobs=torch.zeros(shape),
        advantages=torch.zeros(shape),
        is_masked=torch.zeros(len(found), dtype=torch.bool),
        token_index=actions.flatten().cumsum(0).view_as(actions) - 1,
    )
    return rows, torch.from_numpy(np.concatenate(places))
