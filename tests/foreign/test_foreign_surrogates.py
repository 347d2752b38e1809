"""Our surrogates against TRL's own loss: the code of its trainer, called on random logprobs in place of a model's."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_gym.learning.losses import count_denominators, policy_loss
from gspo_gym.learning.settings import LossSettings

NUM_CASES = 100
CAP = 2.0  # of CISPO's weights, which many of the ratios below exceed
# TRL's settings, and ours that say the same: its loss types are pairs of a surrogate and an aggregation.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {"aggregation": "grpo", "unit": "token", "clip_low": 0.2, "clip_high": 0.3}),
    "luspo": (
        {"importance_sampling_level": "sequence"},
        {"aggregation": "seq-mean-token-sum", "clip_low": 0.2, "clip_high": 0.3},
    ),
    "cispo": (
        {"epsilon_high": CAP},
        {"surrogate": "cispo", "aggregation": "dapo", "unit": "token", "clip_high": CAP - 1},
    ),
    "sapo": (
        {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5},
        {"surrogate": "sapo", "unit": "token", "sapo_temperatures": (1.5, 2.5)},
    ),
    "vespo": ({}, {"surrogate": "vespo", "aggregation": "dapo"}),
    "gmpo": ({"epsilon_low": 0.4, "epsilon_high": 0.4}, {"surrogate": "gmpo"}),
}
# Losses whose value holds the logprob where ours holds 1 with its gradient: theirs is the sum of gradient * logprob.
BY_LOGPROB = ("cispo", "vespo")


class FakeAccelerator:
    num_processes = 1

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values

    gather = gather_for_metrics = lambda self, values: values


class Case:
    """Four completions of up to six tokens, one advantage each, of which one is 0."""

    def __init__(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 7, (4,), generator=draws)
        self.mask = torch.arange(6) < lengths[:, None]
        self.old = -2 * torch.rand(4, 6, generator=draws, dtype=torch.float64)
        drift = torch.randn(4, 6, generator=draws, dtype=torch.float64)
        self.now = (self.old + 0.7 * drift).requires_grad_(True)
        self.advantages = torch.randn(4, generator=draws, dtype=torch.float64)
        self.advantages[seed % 4] = 0.0

    def theirs(self, loss_type: str, options: dict[str, Any]) -> tuple[float, torch.Tensor]:
        """TRL's loss and its gradient [4, 6]."""
        if loss_type == "gmpo":
            from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer as Trainer
        else:
            from trl.trainer.grpo_trainer import GRPOTrainer as Trainer

        entropy = torch.zeros_like(self.old)
        options = {"epsilon_low": 0.2, "epsilon_high": 0.3, "importance_sampling_level": "token"} | options
        taus = {name: options.pop(name, 1.0) for name in ("sapo_temperature_pos", "sapo_temperature_neg")}
        pairs = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
        trainer = SimpleNamespace(
            **options,
            loss_type=loss_type,
            args=SimpleNamespace(delta=None, steps_per_generation=1, **taus, **pairs),
            model=SimpleNamespace(training=True),
            accelerator=FakeAccelerator(),
            beta=0.0,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            aux_loss_enabled=False,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
            get_gamma_weights=getattr(Trainer, "get_gamma_weights", None),
            _get_per_token_logps_and_entropies=lambda *_, **__: (self.now, entropy, None),
        )
        ids = torch.zeros(4, 6, dtype=torch.long)
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids}
        inputs |= {"completion_mask": self.mask.long(), "advantages": self.advantages}
        inputs |= {"old_per_token_logps": self.old, "num_items_in_batch": self.mask.sum()}
        self.now.grad = None
        loss = Trainer._compute_loss(trainer, None, inputs)
        loss.backward()
        assert self.now.grad is not None
        return loss.item(), self.now.grad.clone()

    def ours(self, options: dict[str, Any]) -> tuple[float, torch.Tensor]:
        turns, rows = torch.where(self.mask, 0, -1), torch.arange(4)
        self.now.grad = None
        output = policy_loss(
            self.now,
            self.old,
            action_mask=self.mask,
            turn_index=turns,
            trajectory_index=rows,
            advantages=self.advantages[:, None].expand(4, 6),
            settings=LossSettings(**options),
            denominators=count_denominators(self.mask, turns, rows),
        )
        output.loss.backward()
        assert self.now.grad is not None
        return output.loss.item(), self.now.grad.clone()


@pytest.mark.parametrize("loss_type", SAME)
def test_value_and_gradient_are_those_of_trls_own_loss(loss_type: str) -> None:
    theirs_say, ours_say = SAME[loss_type]
    gradients = []
    for seed in range(NUM_CASES):
        case = Case(seed)
        (their_loss, their_gradient), (loss, gradient) = case.theirs(loss_type, theirs_say), case.ours(ours_say)
        torch.testing.assert_close(gradient, their_gradient, rtol=1e-6, atol=1e-6)
        if loss_type in BY_LOGPROB:
            loss = float((gradient * case.now.detach() * case.mask).sum())
        assert math.isclose(loss, their_loss, rel_tol=1e-6, abs_tol=1e-6), seed
        gradients.append(gradient)
    assert torch.stack(gradients).abs().max() > 0.01
