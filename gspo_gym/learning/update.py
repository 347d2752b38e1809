"""A batch of trajectories -> optimizer steps on the policy.

Called by the trainer once per batch. Which weights sample meanwhile, and when they are published, is not known here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo_gym import seeding
from gspo_gym.errors import CheckpointError
from gspo_gym.learning.batching import (
    ScoredBatch,
    TrainBatch,
    select_trajectories,
    split_microbatches,
    split_minibatches,
    to_device,
)
from gspo_gym.learning.losses import LossOutput, LossStats, policy_loss
from gspo_gym.learning.metrics import loss_metrics, rollout_metrics
from gspo_gym.learning.optimizer import PolicyOptimizer, StepReport
from gspo_gym.learning.scoring import Scorer
from gspo_gym.learning.settings import LossSettings, OptimizerSettings, UpdateSettings


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update did; `metrics` are named and explained in `learning.metrics.METRICS`."""

    metrics: Mapping[str, float]
    num_steps: int
    num_nonfinite_steps: int


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """What one optimizer step rests on: N trajectories, those of them that carry a gradient in micro-batches."""

    num_trajectories: int
    parts: tuple[TrainBatch, ...]


class _Tally:
    """What the steps of one update amount to; filled while it runs, read once at its end."""

    def __init__(self) -> None:
        self.steps: list[list[LossStats]] = []
        self.reports: list[StepReport] = []
        self.rollout_pairs: list[tuple[Tensor, Tensor]] = []
        self.entropy_sum = 0.0
        self.num_empty_steps = 0
        self.noise_floor = 0.0

    def metrics(self) -> dict[str, float]:
        taken = [report for report in self.reports if not report.is_skipped]
        num_tokens = sum(part.num_tokens for step in self.steps for part in step)
        metrics = loss_metrics(self.steps)
        if self.rollout_pairs:
            metrics |= rollout_metrics(self.rollout_pairs)
        if num_tokens:
            metrics |= {"policy/entropy": self.entropy_sum / num_tokens, "ratio/noise_floor": self.noise_floor}
        if self.reports:
            metrics["optim/learning_rate"] = self.reports[-1].learning_rate
        if taken:
            norms = [report.grad_norm for report in taken]
            metrics |= {"optim/grad_norm": sum(norms) / len(norms), "optim/grad_norm_max": max(norms)}
        metrics["batch/trained_tokens"] = float(num_tokens)
        metrics["optim/num_steps"] = float(len(taken))
        metrics["optim/num_nonfinite_steps"] = float(len(self.reports) - len(taken))
        metrics["optim/num_empty_steps"] = float(self.num_empty_steps)
        return metrics


class Learner:
    """Improves a policy with GSPO (`losses`), holding its optimizer and, if the loss asks for one, its reference.

    The model object is the caller's and is trained in place: a full model, or one that peft has wrapped. With
    kl_coef > 0 the reference is: for a peft model the same model with its adapters disabled; otherwise `reference`, or
    by default a frozen copy of the model as it is now, which then is part of `tensors()`.

    Args:
        temperature: that the rollouts were sampled with; logprobs are of that distribution.
        total_steps: optimizer steps of the whole run, for the cosine schedule; None: not known.
        seed: of the division into minibatches. clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSettings,
        loss: LossSettings,
        update: UpdateSettings,
        temperature: float = 1.0,
        total_steps: int | None = None,
        seed: int = 0,
        reference: nn.Module | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model: Any = model  # Any: peft's disable_adapter is not part of nn.Module
        self._loss = loss
        self._settings = update
        self._seed = seed
        self._clock = clock
        self._num_updates = 0
        self._device = next(model.parameters()).device
        self._optimizer = PolicyOptimizer(
            model, optimizer, total_steps=total_steps, max_nonfinite_steps=update.max_nonfinite_steps
        )
        self._scorer = Scorer(model, temperature=temperature, chunk_tokens=update.scoring_chunk_tokens)
        self._reference_copy: nn.Module | None = None
        self._reference_scorer: Scorer | None = None
        if loss.kl_coef > 0:
            self._hold_reference(reference)

    def update(self, batch: TrainBatch) -> UpdateReport:
        """Train on a batch: `num_epochs` passes of one optimizer step per minibatch.

        Old and reference logprobs are scored first, on the very micro-batches that are trained on, and stay fixed. With
        one minibatch and one epoch the old logprobs are those of the only training pass, detached: the weights are the
        same. Trajectories whose advantages are all 0 are not computed while there is no KL term; they count in N. A
        minibatch of only such trajectories takes no step (momentum alone would move the weights).

        Raises:
            NonFiniteError: too many steps in a row had a NaN or infinite loss or gradient; such a step is skipped.
        """
        started = self._clock()
        tally = _Tally()
        plan = self._plan(batch)
        if len(plan) * self._settings.num_epochs > 1:
            plan = [self._score(minibatch) for minibatch in plan]
        scored = self._clock()
        for epoch in range(self._settings.num_epochs):
            for number in self._order(len(plan), epoch):
                self._step(plan[number], tally, is_first_epoch=epoch == 0)
        self._num_updates += 1
        metrics = tally.metrics() | _batch_metrics(batch, plan)
        metrics |= {"time/score_seconds": scored - started, "time/train_seconds": self._clock() - scored}
        return UpdateReport(metrics, int(metrics["optim/num_steps"]), int(metrics["optim/num_nonfinite_steps"]))

    def tensors(self) -> dict[str, Tensor]:
        """All that a restart needs besides the model's own parameters and `counters()`; live, so write them at once."""
        reference = {} if self._reference_copy is None else dict(self._reference_copy.named_parameters())
        return self._optimizer.tensors() | {f"reference.{name}": p.detach() for name, p in reference.items()}

    def counters(self) -> dict[str, int]:
        return self._optimizer.counters() | {"learner.num_updates": self._num_updates}

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int | float]) -> None:
        """Go on bit for bit from `tensors()` and `counters()`, in a learner of the same settings and model.

        The model's parameters are restored by whoever loads the model.

        Raises:
            CheckpointError: the state of other parameters or of other settings, or an incomplete one.
        """
        if "learner.num_updates" not in counters:
            raise CheckpointError("the learner's counter 'learner.num_updates' is missing")
        saved = {name for name in tensors if name.startswith("reference.")}
        held = {} if self._reference_copy is None else dict(self._reference_copy.named_parameters())
        if saved != {f"reference.{name}" for name in held}:
            raise CheckpointError(
                f"reference policy: {len(saved)} parameters were saved, {len(held)} are held; was kl_coef changed?"
            )
        self._optimizer.restore(tensors, counters)
        self._num_updates = int(counters["learner.num_updates"])
        with torch.no_grad():
            for name, parameter in held.items():
                parameter.copy_(tensors[f"reference.{name}"])

    def _hold_reference(self, reference: nn.Module | None) -> None:
        if reference is None and hasattr(self._model, "disable_adapter"):
            return
        if reference is None:
            reference = self._reference_copy = copy.deepcopy(self._model).requires_grad_(False)
        self._reference_scorer = Scorer(
            reference, temperature=self._scorer.temperature, chunk_tokens=self._settings.scoring_chunk_tokens
        )

    @contextlib.contextmanager
    def _reference_policy(self) -> Iterator[Scorer]:
        """A scorer that is the reference's while inside."""
        if self._reference_scorer is not None:
            yield self._reference_scorer
        else:
            with self._model.disable_adapter():
                yield self._scorer

    def _plan(self, batch: TrainBatch) -> list[_Minibatch]:
        """The division of the batch, drawn once per update: every epoch trains on the micro-batches that were scored,
        so that a change of padding or kernel between two scorings cannot pass for a change of the policy."""
        generator = seeding.generator(self._seed, "minibatches", self._num_updates)
        plan = []
        for minibatch in split_minibatches(batch, self._settings.minibatch_size, generator):
            kept = range(minibatch.num_trajectories) if self._loss.kl_coef > 0 else _with_advantage(minibatch)
            parts = []
            if kept:
                parts = split_microbatches(
                    select_trajectories(minibatch, kept), self._settings.max_tokens_per_microbatch
                )
            plan.append(_Minibatch(minibatch.num_trajectories, tuple(to_device(part, self._device) for part in parts)))
        return plan

    def _order(self, num_minibatches: int, epoch: int) -> list[int]:
        generator = seeding.generator(self._seed, "order", self._num_updates, epoch)
        return [int(number) for number in generator.permutation(num_minibatches)]

    def _score(self, minibatch: _Minibatch) -> _Minibatch:
        parts = []
        for part in minibatch.parts:
            with torch.no_grad():
                old = self._scorer.score(part.token_ids, part.attention_mask, part.action_mask).logprobs
            parts.append(_scored(part, old, self._reference_logprobs(part)))
        return dataclasses.replace(minibatch, parts=tuple(parts))

    @torch.no_grad()
    def _reference_logprobs(self, part: TrainBatch) -> Tensor | None:
        if self._loss.kl_coef == 0:
            return None
        with self._reference_policy() as scorer:
            return scorer.score(part.token_ids, part.attention_mask, part.action_mask).logprobs

    def _step(self, minibatch: _Minibatch, tally: _Tally, *, is_first_epoch: bool) -> None:
        if not minibatch.parts:
            tally.num_empty_steps += 1
            return
        self._optimizer.zero_grad()
        stats, pairs, entropy, loss = [], [], 0.0, 0.0
        for part in minibatch.parts:
            ref = None if isinstance(part, ScoredBatch) else self._reference_logprobs(part)
            scores = self._scorer.score(part.token_ids, part.attention_mask, part.action_mask)
            scored = part if isinstance(part, ScoredBatch) else _scored(part, scores.logprobs.detach(), ref)
            output = self._loss_of(scored, scores.logprobs, minibatch.num_trajectories)
            torch.autograd.backward(output.loss)
            stats.append(output.stats)
            pairs.append((scored.old_logprobs[part.action_mask], part.rollout_logprobs[part.action_mask]))
            entropy += float(scores.entropy.sum())
            loss += float(output.loss.detach())
        report = self._optimizer.step(loss)
        tally.reports.append(report)
        if report.is_skipped:
            return
        if not tally.steps:
            tally.noise_floor = max(float((part.unit_ratios - 1).abs().max()) for part in stats)
        if is_first_epoch:
            tally.rollout_pairs += pairs
        tally.steps.append(stats)
        tally.entropy_sum += entropy

    def _loss_of(self, scored: ScoredBatch, logprobs: Tensor, num_trajectories: int) -> LossOutput:
        return policy_loss(
            logprobs,
            scored.old_logprobs,
            action_mask=scored.action_mask,
            turn_index=scored.turn_index,
            trajectory_index=scored.trajectory_index,
            advantages=scored.advantages,
            unit=self._loss.unit,
            clip_low=self._loss.clip_low,
            clip_high=self._loss.clip_high,
            num_trajectories=num_trajectories,
            ref_logprobs=scored.ref_logprobs,
            kl_coef=self._loss.kl_coef,
        )


def _scored(part: TrainBatch, old_logprobs: Tensor, ref_logprobs: Tensor | None) -> ScoredBatch:
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(TrainBatch)}
    return ScoredBatch(**fields, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)


def _with_advantage(batch: TrainBatch) -> list[int]:
    """The trajectories with an advantage other than exactly 0 somewhere: without a KL term, those with a gradient."""
    rows = batch.advantages.ne(0).any(1)
    return [int(trajectory) for trajectory in torch.unique(batch.trajectory_index[rows])]


def _batch_metrics(batch: TrainBatch, plan: Sequence[_Minibatch]) -> dict[str, float]:
    advantages = batch.advantages[batch.action_mask].double()
    parts = [part for minibatch in plan for part in minibatch.parts]
    num_slots = sum(part.token_ids.numel() for part in parts)
    num_filled = sum(int(part.attention_mask.sum()) for part in parts)
    return {
        "batch/num_trajectories": float(batch.num_trajectories),
        "batch/num_actions": float(batch.num_actions),
        "batch/zero_advantage_fraction": 1 - len(_with_advantage(batch)) / batch.num_trajectories,
        "batch/padding_fraction": 1 - num_filled / num_slots if num_slots else 0.0,
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
    }
