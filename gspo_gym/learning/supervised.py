"""Warm-up: make demonstrations likely, so that a policy knows the format before reinforcement starts.

Not imitation of rewards: who chooses the demonstrations decides what is worth imitating.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gspo_gym import seeding
from gspo_gym.learning.batching import TokenBatch, batch_tokens, split_microbatches, split_minibatches, to_device
from gspo_gym.learning.optimizer import PolicyOptimizer, StepReport
from gspo_gym.learning.scoring import Scorer
from gspo_gym.learning.settings import OptimizerSettings, SupervisedSettings
from gspo_gym.types import Trajectory


@dataclass(frozen=True, slots=True)
class SupervisedStep:
    """One optimizer step, for who watches; `loss` is the mean NLL of its minibatch's tokens before it, in nats."""

    step: int
    num_total_steps: int
    epoch: int
    loss: float
    report: StepReport


@dataclass(frozen=True, slots=True)
class SupervisedReport:
    """A finished warm-up.

    Attributes:
        epoch_losses: per epoch, the mean NLL of its sampled tokens in nats, each measured just before the step on it.
        num_steps: optimizer steps taken. num_nonfinite_steps: skipped. num_tokens: sampled tokens, all epochs.
    """

    epoch_losses: tuple[float, ...]
    num_steps: int
    num_nonfinite_steps: int
    num_tokens: int


def nll_loss(logprobs: Tensor, action_mask: Tensor, *, num_actions: int) -> Tensor:
    """[] the negative sum of the sampled tokens' logprobs over `num_actions`, those of the optimizer step.

    A mean over tokens, not over episodes: it is the maximum likelihood of the demonstrations, whose every token is one
    observation, and its value compares between sets. Micro-batch losses add up to the step's.
    """
    return -logprobs[action_mask].sum() / num_actions


def supervised_epochs(
    model: nn.Module,
    demonstrations: Sequence[Trajectory],
    *,
    optimizer: OptimizerSettings,
    settings: SupervisedSettings,
    seed: int = 0,
    on_step: Callable[[SupervisedStep], None] | None = None,
) -> SupervisedReport:
    """Train the model in place on the sampled tokens of these trajectories; rewards are not looked at.

    Only tokens under the action mask count: what the environment said is context. Logprobs are those of temperature 1.
    A fresh optimizer is used and forgotten; a cosine schedule ends with the last epoch.

    Raises:
        RecordError: no demonstration, or one without a sampled token.
        NonFiniteError: too many steps in a row had a NaN or infinite loss or gradient.
    """
    batch = batch_tokens(demonstrations)
    steps_per_epoch = -(-batch.num_trajectories // settings.batch_size)
    total_steps = steps_per_epoch * settings.num_epochs
    stepper = PolicyOptimizer(
        model, optimizer, total_steps=total_steps, max_nonfinite_steps=settings.max_nonfinite_steps
    )
    scorer = Scorer(model, chunk_tokens=settings.scoring_chunk_tokens)
    epoch_losses: list[float] = []
    steps: list[SupervisedStep] = []
    for epoch in range(settings.num_epochs):
        generator = seeding.generator(seed, "supervised", epoch)
        summed = 0.0
        for minibatch in split_minibatches(batch, settings.batch_size, generator):
            stepper.zero_grad()
            loss = _backward(model, scorer, minibatch, settings.max_tokens_per_microbatch)
            report = stepper.step(loss)
            steps.append(SupervisedStep(len(steps), total_steps, epoch, loss, report))
            summed += loss * minibatch.num_actions
            if on_step is not None:
                on_step(steps[-1])
        epoch_losses.append(summed / batch.num_actions)
    num_skipped = sum(step.report.is_skipped for step in steps)
    return SupervisedReport(
        tuple(epoch_losses), len(steps) - num_skipped, num_skipped, batch.num_actions * settings.num_epochs
    )


def _backward(model: nn.Module, scorer: Scorer, minibatch: TokenBatch, max_tokens: int) -> float:
    """Accumulate the gradients of a minibatch, and return its loss."""
    device = next(model.parameters()).device
    total = 0.0
    for part in split_microbatches(minibatch, max_tokens):
        placed = to_device(part, device)
        scores = scorer.score(placed.token_ids, placed.attention_mask, placed.action_mask)
        loss = nll_loss(scores.logprobs, placed.action_mask, num_actions=minibatch.num_actions)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total
