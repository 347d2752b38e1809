"""GSPO and GSPO-token (arXiv 2507.18071) as a pure function of tensors: no model, no settings object, nothing kept.

Axes: B rows, T tokens, A sampled tokens of all rows, U units, N trajectories. For a unit of sampled tokens, log s is
the mean over the unit of logprobs - old_logprobs, without gradient. Its token t has the ratio

    s_t = sg[s] * exp(logprobs_t - sg[logprobs_t])          (eq. 14: the value is s, the gradient the token's own)

    loss = - 1/N sum_i 1/|y_i| sum_t min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)             (eq. 13)

with |y_i| the sampled tokens of trajectory i over all its rows: an episode weighs one, however many tokens, turns or
rows it has. With one advantage per trajectory and unit "trajectory", value and gradient are those of plain GSPO (eq. 5
to 7); with one per turn, each steers its own turn, where a ratio differentiated through its mean would average them.

Departures from the paper: the unit may also be a turn, or a token (then s_t is GRPO's ratio, arXiv 2402.03300, under a
mean over trajectories of means over tokens); a trajectory may spread over rows; only sampled tokens count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gspo_gym.errors import RecordError

Unit = Literal["trajectory", "turn", "token"]

MAX_LOG_RATIO = 20.0  # in k3: exp() of more says nothing more
MAX_K3 = 10.0  # nats per token; a larger estimate is cut, and then has no gradient


@dataclass(frozen=True, slots=True, eq=False)
class LossStats:
    """Detached facts about one call; sums and counts, so that those of several calls can be added.

    Attributes:
        num_tokens: A. num_trajectories: of this call. unit_ratios: [U], the importance ratio s of each unit.
        policy_loss, kl_loss: [], the shares of the loss; kl_loss has kl_coef in it.
        tokens_clipped_low, tokens_clipped_high: tokens whose clip binds, that is, decides the minimum and takes the
            gradient: s below the floor and a negative advantage; s above the ceiling and a positive one.
        old_k1, old_k3: sums over tokens of the estimates of KL(old || now), nats.
        ref_k1, ref_k3: sums over tokens of the estimates of KL(now || reference), nats; None: no reference.
    """

    num_tokens: int
    num_trajectories: int
    unit_ratios: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    tokens_clipped_low: Tensor
    tokens_clipped_high: Tensor
    old_k1: Tensor
    old_k3: Tensor
    ref_k1: Tensor | None
    ref_k3: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """The loss [], to be minimised, and what is known about it."""

    loss: Tensor
    stats: LossStats


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    action_mask: Tensor,
    turn_index: Tensor,
    trajectory_index: Tensor,
    advantages: Tensor,
    unit: Unit,
    clip_low: float,
    clip_high: float,
    num_trajectories: int,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossOutput:
    """The loss of the module's docstring, plus kl_coef times k3 to the reference per token under the same weights.

    Args:
        logprobs: [B, T] float32 or float64, nats, differentiable. The result has its dtype.
        old_logprobs, ref_logprobs: [B, T], taken as constants. ref_logprobs None: no KL term.
        action_mask: [B, T] bool; what lies outside, even NaN, reaches no sum and no gradient.
        turn_index: [B, T] integers >= 0 where the mask is True.
        trajectory_index: [B] integers: rows with the same number are one trajectory, all of whose rows are here.
        advantages: [B, T], taken as constants.
        num_trajectories: N of the optimizer step, not of this call: the losses of micro-batches add up to the step's.

    Raises:
        RecordError: no sampled token; more trajectories here than num_trajectories; kl_coef without ref_logprobs.
    """
    mask = action_mask
    trajectory = trajectory_index[:, None].expand_as(mask)[mask]
    now, old, advantage = logprobs[mask], old_logprobs[mask].detach(), advantages[mask].detach()
    weight = _token_weights(trajectory, num_trajectories).to(now.dtype)

    unit_ratio, unit_of_token = _unit_ratios(now.detach() - old, trajectory, turn_index[mask], unit)
    ratio = unit_ratio[unit_of_token] * torch.exp(now - now.detach())
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    policy_term = -(weight * surrogate).sum()
    reference = None if ref_logprobs is None else ref_logprobs[mask].detach()
    kl_term, ref_k1, ref_k3 = _reference_kl(now, reference, weight, kl_coef)

    value, old_log_ratio = ratio.detach(), now.detach() - old
    stats = LossStats(
        num_tokens=len(now),
        num_trajectories=len(torch.unique(trajectory)),
        unit_ratios=unit_ratio,
        policy_loss=policy_term.detach(),
        kl_loss=kl_term.detach(),
        tokens_clipped_low=((value < 1 - clip_low) & (advantage < 0)).sum(),
        tokens_clipped_high=((value > 1 + clip_high) & (advantage > 0)).sum(),
        old_k1=-old_log_ratio.sum(),
        old_k3=k3(old_log_ratio).sum(),
        ref_k1=ref_k1,
        ref_k3=ref_k3,
    )
    return LossOutput(policy_term + kl_term, stats)


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's non-negative estimate of KL(p || q) per token for samples of p: exp(x) - 1 - x, x = log q - log p.

    x is clamped to +-MAX_LOG_RATIO and the estimate to at most MAX_K3 nats, so that a single token cannot decide a
    step; a clamped token has no gradient.
    """
    x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(x) - x).clamp(max=MAX_K3)  # expm1: exp(x) - 1 - x at x = 1e-4 is rounding alone in float32


def _reference_kl(
    now: Tensor, reference: Tensor | None, weight: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """kl_coef times the weighted sum over tokens of k3 of KL(now || reference); detached plain sums of k1 and k3."""
    if reference is None:
        if kl_coef != 0:
            raise RecordError(f"policy_loss: kl_coef {kl_coef} needs ref_logprobs")
        return now.new_zeros(()), None, None
    per_token = k3(reference - now)
    return kl_coef * (weight * per_token).sum(), (now.detach() - reference).sum(), per_token.detach().sum()


def _unit_ratios(log_ratio: Tensor, trajectory: Tensor, turn: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
    """[U] importance ratios, geometric means over each unit's tokens, and [A] the unit of each token."""
    if unit == "token":
        return log_ratio.exp(), torch.arange(len(log_ratio), device=log_ratio.device)
    key = trajectory if unit == "trajectory" else trajectory * (turn.max() + 1) + turn
    _, unit_of_token, num_tokens = torch.unique(key, return_inverse=True, return_counts=True)
    summed = log_ratio.new_zeros(len(num_tokens)).index_add(0, unit_of_token, log_ratio)
    return (summed / num_tokens).exp(), unit_of_token


def _token_weights(trajectory: Tensor, num_trajectories: int) -> Tensor:
    """[A] float64: 1 / (N * sampled tokens of the token's trajectory)."""
    _, inverse, num_tokens = torch.unique(trajectory, return_inverse=True, return_counts=True)
    if not 1 <= len(num_tokens) <= num_trajectories:
        raise RecordError(
            f"policy_loss: expected sampled tokens of 1 to num_trajectories = {num_trajectories} trajectories, got "
            f"{len(num_tokens)}"
        )
    return torch.reciprocal(num_tokens.double() * num_trajectories)[inverse]
