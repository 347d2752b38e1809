"""Warm-up: make demonstrations likely; a policy then knows the format before reinforcement starts.

Rewards are not looked at: the choice of demonstrations decides about them.

`RouterLoad` measures how a mixture of experts spreads its tokens. A router that sends every token to the same experts
has stopped learning to choose, and reinforcement can drive it there unseen; nothing acts on the numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo_gym import seeding
from gspo_gym.learning.batching import TokenBatch, batch_tokens, split_microbatches, split_minibatches, to_device
from gspo_gym.learning.collective import Collective, OneProcess
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.optimizer import PolicyOptimizer, StepReport
from gspo_gym.learning.settings import OptimizerSettings, SupervisedSettings, UpdateSettings
from gspo_gym.types import Trajectory


@dataclass(frozen=True, slots=True)
class SupervisedStep:
    """One optimizer step, to be watched; `loss` is the mean NLL of its minibatch's tokens before it, in nats."""

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
    """Return [] the negative sum of the sampled tokens' logprobs over `num_actions`, those of the optimizer step."""
    # A mean over tokens, not over episodes: it is the maximum likelihood of the demonstrations, each token of which is
    # one observation, and its value compares between sets.
    return -logprobs[action_mask].sum() / num_actions


def supervised_epochs(
    model: nn.Module,
    demonstrations: Sequence[Trajectory],
    *,
    optimizer: OptimizerSettings,
    settings: SupervisedSettings,
    update: UpdateSettings,
    seed: int = 0,
    on_step: Callable[[SupervisedStep], None] | None = None,
) -> SupervisedReport:
    """Train the model in place on the sampled tokens of these trajectories, with an optimizer that is then forgotten.

    Logprobs are those of temperature 1. `update` bounds what a step may take of memory, and how many in a row may fail,
    and says whether tokens that begin several demonstrations are computed once; nothing else of it is used.

    Raises:
        RecordError: no demonstration, or one without a sampled token.
        NonFiniteError: too many steps in a row had a NaN or infinite loss or gradient.
    """
    batch = batch_tokens(demonstrations)
    steps_per_epoch = -(-batch.num_trajectories // settings.batch_size)
    total_steps = steps_per_epoch * settings.num_epochs  # a cosine schedule ends with the last epoch
    stepper = PolicyOptimizer(
        model,
        optimizer,
        learning_rate=settings.learning_rate,
        total_steps=total_steps,
        max_nonfinite_steps=update.max_nonfinite_steps,
    )
    computer = LogprobComputer(model, logits_bytes=update.logits_bytes, share_prefixes=update.share_prefixes)
    epoch_losses: list[float] = []
    steps: list[SupervisedStep] = []
    for epoch in range(settings.num_epochs):
        generator = seeding.generator(seed, "supervised", epoch)
        loss_sum = 0.0
        for minibatch in split_minibatches(batch, settings.batch_size, generator):
            stepper.zero_grad()
            loss = _backward(model, computer, minibatch, update.max_tokens_per_microbatch)
            report = stepper.step(loss)
            steps.append(SupervisedStep(len(steps), total_steps, epoch, loss, report))
            loss_sum += loss * minibatch.num_actions
            if on_step is not None:
                on_step(steps[-1])
        epoch_losses.append(loss_sum / batch.num_actions)
    num_skipped = sum(step.report.is_skipped for step in steps)
    return SupervisedReport(
        tuple(epoch_losses), len(steps) - num_skipped, num_skipped, batch.num_actions * settings.num_epochs
    )


def _backward(model: nn.Module, computer: LogprobComputer, minibatch: TokenBatch, max_tokens: int) -> float:
    device = next(model.parameters()).device
    total = 0.0
    alike = computer.prefixes.pays(minibatch.token_ids, minibatch.attention_mask)
    for part in split_microbatches(minibatch, max_tokens, keep_alike_together=alike):
        microbatch = to_device(part, device)
        outputs = computer.compute(microbatch.token_ids, microbatch.attention_mask, microbatch.action_mask)
        loss = nll_loss(outputs.logprobs, microbatch.action_mask, num_actions=minibatch.num_actions)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Routers:
    """The routers of a model, one a layer; `top_k` experts compute each token."""

    modules: tuple[nn.Module, ...]
    num_experts: int
    top_k: int


def find_routers(model: nn.Module) -> Routers:
    """Return a transformers model's routers, none if the config names no number of experts."""
    config: Any = getattr(model, "config", None)  # Any: transformers is untyped
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(text, name, None))), None)
    top_k = getattr(text, "num_experts_per_tok", None)
    if num_experts is None or top_k is None:
        return Routers((), 0, 0)
    # Modules named gate or router that map hidden states to a logit an expert.
    routers = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("gate", "router") and _experts_of(module) == num_experts
    ]
    return Routers(tuple(routers), int(num_experts), int(top_k))


class RouterLoad:
    """Counts of where routers sent the tokens of one update."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._loads: dict[nn.Module, Tensor] = {}
        self._entropies: dict[nn.Module, Tensor] = {}
        self._num_tokens = 0

    @contextlib.contextmanager
    def watching(self, attention_mask: Tensor) -> Iterator[None]:
        """Count the tokens of the forward pass within, given the [B, T] mask of the tokens that it computes."""
        # The backward pass stays outside: with gradient checkpointing it computes the forward again.
        if not self._routers.modules:
            yield
            return
        is_token = attention_mask.reshape(-1)

        def count(module: nn.Module, inputs: Sequence[Any], output: Any) -> None:  # Any: models differ
            with torch.no_grad():
                logits = _logits(module, inputs[0], output).reshape(-1, self._routers.num_experts)
                if len(logits) != len(is_token):  # a model that packs its tokens first: which is which is not known
                    return
                self._count(module, logits[is_token].float())

        handles = [module.register_forward_hook(count) for module in self._routers.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._num_tokens += int(is_token.sum())

    def metrics(self, collective: Collective | None = None) -> dict[str, float]:
        """Return the `router` metrics, of all ranks; none if nothing was counted."""
        collective = collective or OneProcess()
        if not self._loads:
            return {}
        load_LE = collective.sum(torch.stack(list(self._loads.values())))
        num_tokens = collective.sum(load_LE.new_tensor(self._num_tokens))
        entropy = collective.sum(torch.stack(list(self._entropies.values()))).mean() / num_tokens
        return {
            "router/load_max_over_mean": float((load_LE.amax(1) / load_LE.double().mean(1)).mean()),
            "router/idle_fraction": float((load_LE == 0).double().mean()),
            "router/entropy": float(entropy),
        }

    def _count(self, module: nn.Module, logits: Tensor) -> None:
        expert_ids = logits.topk(self._routers.top_k, dim=-1).indices.reshape(-1)
        load = torch.bincount(expert_ids, minlength=self._routers.num_experts)
        entropy = torch.special.entr(logits.softmax(-1)).sum(dtype=torch.float64)
        self._loads[module] = self._loads.get(module, torch.zeros_like(load)) + load
        self._entropies[module] = self._entropies.get(module, torch.zeros_like(entropy)) + entropy


def _experts_of(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _logits(module: nn.Module, hidden: Tensor, output: Any) -> Tensor:
    # Computed again where a router gives choices or probabilities in place of logits.
    if isinstance(output, Tensor):
        return output
    weight = module.weight
    assert isinstance(weight, Tensor), "find_routers asks for it"
    return nn.functional.linear(hidden.to(weight.dtype), weight)
