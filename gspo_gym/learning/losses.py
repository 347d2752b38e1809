"""GSPO and GSPO-token (arXiv 2507.18071) and their variants, as a pure function of tensors: no model, nothing kept.

Axes: B rows (segments), T tokens, A sampled tokens of all rows, U units, N trajectories, M turns. A unit (token, turn,
segment or trajectory) shares one importance ratio: log s is the mean over its sampled tokens of logprobs -
old_logprobs, without gradient. Its token t has the ratio

    r_t = sg[s] * exp(logprobs_t - sg[logprobs_t])          (eq. 14: the value is s, the gradient the token's own)

    loss = sum_t a_t * ( - w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)            (eq. 13)
                         + kl_coef * KL_t  -  entropy_coef * H_t )

The minimum is PPO's surrogate, `loss.surrogate = "clip"`; another of `SURROGATES` takes its place. w_t corrects for an
engine that computes otherwise than the trainer (1: it does not) and touches the first term only, and a teacher's. a_t
is the token's share of the loss, the aggregation. With |y_i| the sampled tokens of the token's trajectory over all its
rows and |u| those of its turn, all counts those of the optimizer step (see `Denominators`):

    seq-mean-token-mean      grpo       1 / (N |y_i|)                      the paper's: an episode weighs one
    turn-mean-token-mean                1 / (M |u|)                        an episode weighs its number of turns
    token-mean               bnpo       1 / tokens of the step             an episode weighs its length
    dapo                                1 / tokens of the rollout batch    the same; shorter steps weigh less
    seq-mean-token-sum                  1 / N                              an episode weighs its length (luspo)
    seq-mean-token-sum-norm  dr_grpo    1 / (N norm_length)                the same, divided by a constant

With one advantage per trajectory, unit "trajectory" and the first of these, value and gradient are those of plain GSPO
(eq. 5 to 7); with one per turn, each steers its own turn, where a ratio differentiated through its mean would average
them. Unit "token" is GRPO's ratio (arXiv 2402.03300).

A teacher adds the term of `_with_teacher`, with a denominator of its own.

Departures from the paper: other units; a trajectory may spread over rows; only sampled tokens count; |log s| is cut at
MAX_LOG_RATIO. From TRL, which has the names grpo, bnpo, dr_grpo and dapo: a trajectory without a sampled token does not
count in N, and bnpo is the mean over the optimizer step, where TRL's is over a micro-batch and changes with the split.
From verl and ROLL, which share the other names: seq-mean-token-sum-norm divides by N and by a length that is stated,
never by the width of the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gspo_gym.errors import RecordError
from gspo_gym.learning.settings import DistillationSettings, LossSettings
from gspo_gym.learning.tokens import Clip, TokenTerms

MAX_DPPO_RATIO = 20.0  # as in verl (clip_ratio_c) and prime-rl
_VESPO_LOG_BOUNDS = math.log(1e-8), 20.0
MAX_FALL = 0.2  # of a token's probability, beyond which its teacher's term is dropped; as dppo's clip_low
MAX_LOG_RATIO = 20.0  # |log s| and |log-ratio to the reference|; exp() of more says nothing more, or overflows


@dataclass(frozen=True, slots=True)
class Denominators:
    """Divisors of one optimizer step's losses; with them, the losses of its micro-batches add up to the step's.

    Attributes:
        num_trajectories: N, of the optimizer step. num_turns: M, turns with a sampled token. num_tokens: sampled.
        num_batch_tokens: sampled tokens of the rollout batch that the step is a part of ("dapo").
        num_taught: sampled tokens of which the teacher says something; None: all, as of a teacher without feedback.
    """

    num_trajectories: int
    num_turns: int
    num_tokens: int
    num_batch_tokens: int
    num_taught: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_trajectories <= self.num_turns <= self.num_tokens <= self.num_batch_tokens:
            raise RecordError(
                "Denominators: expected 1 <= num_trajectories <= num_turns <= num_tokens <= num_batch_tokens, got "
                f"{self.num_trajectories}, {self.num_turns}, {self.num_tokens}, {self.num_batch_tokens}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScores:
    """A teacher's scores of the sampled tokens of a call, nats.

    Attributes:
        log_ratios: [B, T] log p_T - log p_S, of the teacher and of the policy before the update, both at temperature 1,
            taken as constants; None: `divergence` takes their place.
        kl: [B, T] KL(S || T) of their whole distributions at the token, taken as constants; None: there is no baseline.
        divergence: [B, T], of the policy as it is now, differentiable; None: the sampled token is compared.
        is_taught: [B, T] bool, where the teacher says something; elsewhere `log_ratios` are not read. None: everywhere.
    """

    settings: DistillationSettings
    log_ratios: Tensor | None
    kl: Tensor | None
    divergence: Tensor | None = None
    is_taught: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TeacherStats:
    """Detached facts about the teacher's term of one call.

    Attributes:
        loss: [], its share of the loss, with the coefficient.
        advantage_sum: [], of A_t over tokens, nats. kl_sum: [], of KL(policy || teacher), nats: the exact one of
            each token where the baseline computes it, else its estimate k3.
        num_taught: [], tokens of which the teacher says something: all but those of turns without feedback, which are
            in none of these.
        num_dropped: [], tokens with a probability that fell by more than MAX_FALL.
        divergence_sum: [], of the exact divergence over tokens, nats; None: the sampled tokens are compared, and only
            then are the other sums known.
    """

    loss: Tensor
    num_taught: Tensor
    advantage_sum: Tensor | None = None
    kl_sum: Tensor | None = None
    num_dropped: Tensor | None = None
    divergence_sum: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LossStats:
    """Detached facts about one call, as sums and counts: those of several calls can be added.

    Attributes:
        num_tokens: A. num_trajectories: of this call.
        unit_ratios: [U], the importance ratio s of each unit. trajectory_log_ratios: [trajectories of this call], the
            mean of logprobs - old_logprobs over each trajectory's sampled tokens, for every unit.
        policy_loss, kl_loss, entropy_loss: [], the shares of the loss; coefficients and signs are in them.
        tokens_clipped_low, tokens_clipped_high: tokens at which the clip decides the minimum and takes the gradient: s
            below the floor and a negative advantage; s above the ceiling and a positive one. Of s in "gmpo" stands the
            token's own ratio, in "dppo" 1 + p - mu; in other surrogates no bound takes a gradient.
        tokens_dual_clipped: tokens with s above dual_clip and a negative advantage, which have no gradient either.
        tokens_corrected: tokens with w other than 1. tokens_left_out: of these, those with w = 0; they count as
            clipped nowhere.
        old_k1, old_k3: sums over tokens of the estimates of KL(old || now), nats.
        ref_k1, ref_k3: sums over tokens of the estimates of KL(now || reference), nats; None: no reference.
        entropy_sum: sum over tokens, nats; None: no entropy was given.
        teacher: None: no teacher.
    """

    num_tokens: int
    num_trajectories: int
    unit_ratios: Tensor
    trajectory_log_ratios: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    entropy_loss: Tensor
    tokens_clipped_low: Tensor
    tokens_clipped_high: Tensor
    tokens_dual_clipped: Tensor
    tokens_corrected: Tensor
    tokens_left_out: Tensor
    old_k1: Tensor
    old_k3: Tensor
    ref_k1: Tensor | None
    ref_k3: Tensor | None
    entropy_sum: Tensor | None
    teacher: TeacherStats | None = None

    @property
    def loss(self) -> Tensor:
        """The loss [], of all terms."""
        loss = self.policy_loss + self.kl_loss + self.entropy_loss
        return loss if self.teacher is None else loss + self.teacher.loss


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """The loss [], to be minimised, and facts about it and about each token; the shares of these sum to the loss."""

    loss: Tensor
    stats: LossStats
    tokens: TokenTerms


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """What a surrogate is a function of; [A] each.

    Attributes:
        s: the unit's importance ratio, with the token's own gradient (eq. 14): per-token advantages reach their tokens.
        log_ratio: the token's own logprobs - old_logprobs, differentiable. units: the tokens that share a ratio.
        is_clipped: a bound takes the token's gradient, see `_clips`.
    """

    s: Tensor
    log_ratio: Tensor
    advantage: Tensor
    units: Pools
    is_clipped: Tensor

    @property
    def one(self) -> Tensor:
        """Return 1 everywhere, with the token's own gradient, that of its logprob."""
        return self.s / self.s.detach()


def clip(ratios: Ratios, settings: LossSettings) -> Tensor:
    """Return min(s A, clip(s) A) (PPO, arXiv 1707.06347, eq. 7); in the first product s is at most dual_clip."""
    ratio, advantage = ratios.s, ratios.advantage
    # For a negative advantage that is max(min(s A, clip(s) A), c A) (arXiv 1912.09729; TRL: delta), a bound on what a
    # token can cost; for a positive one it changes nothing, because c lies above the clip range.
    free = ratio if settings.dual_clip is None else ratio.clamp(max=settings.dual_clip)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.minimum(free * advantage, clipped * advantage)


def cispo(ratios: Ratios, settings: LossSettings) -> Tensor:
    """Return sg[min(s, 1 + clip_high)] A: a capped weight, with which no token loses its gradient (arXiv 2506.13585).

    One-sided, as in ScaleRL (arXiv 2510.13786). Both multiply by the logprob, we by 1 with the gradient of the logprob:
    the gradient is theirs, and the value compares with that of other surrogates.
    """
    return ratios.s.detach().clamp(max=1 + settings.clip_high) * ratios.advantage * ratios.one


def sapo(ratios: Ratios, settings: LossSettings) -> Tensor:
    """Return 4/tau sigmoid(tau (s - 1)) A, a soft gate in place of the clip (arXiv 2511.20347).

    Its slope in s is A at s = 1, whatever tau, and falls off on both sides; tau depends on the sign of A.
    """
    of_gains, of_losses = settings.sapo_temperatures
    tau = torch.full_like(ratios.s, of_losses).masked_fill(ratios.advantage > 0, of_gains)
    return 4 / tau * torch.sigmoid(tau * (ratios.s - 1)) * ratios.advantage


def gmpo(ratios: Ratios, settings: LossSettings) -> Tensor:
    """Return g A, g the geometric mean over the unit of its tokens' clipped ratios (arXiv 2507.20673).

    A token's ratio is cut at 1 + clip_high where A > 0 and at 1 - clip_low where A < 0, and has no gradient there. The
    gradient of g goes to each token as its own, as in GSPO-token: the same for one advantage per unit.
    """
    floor, ceiling = math.log1p(-settings.clip_low), math.log1p(settings.clip_high)
    gains = ratios.advantage > 0
    clipped = torch.where(gains, ratios.log_ratio.clamp(max=ceiling), ratios.log_ratio.clamp(min=floor))
    log_g = ratios.units.mean(clipped.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(log_g[ratios.units.of_token] + clipped - clipped.detach()) * ratios.advantage


def dppo(ratios: Ratios, _: LossSettings) -> Tensor:
    """Return M sg[min(s, 20)] A: a trust region of probabilities (arXiv 2602.04879, binary total variation).

    M is 0 where A > 0 and p - mu > clip_high, or A < 0 and mu - p > clip_low, and 1 elsewhere; p is the probability of
    the sampled token now and mu when it was sampled, so that a rare token may move by a large ratio.
    """
    weight = ratios.s.detach().clamp(max=MAX_DPPO_RATIO)
    return torch.where(ratios.is_clipped, 0.0, weight * ratios.advantage * ratios.one)


def vespo(ratios: Ratios, _: LossSettings) -> Tensor:
    """Return sg[phi(w)] A, phi(w) = w^k exp(lambda (1 - w)), w the product of the unit's ratios (arXiv 2602.10693).

    (k, lambda) is (2, 3) for A >= 0 and (3, 2) for A < 0, as in TRL, which cuts w where we do.
    """
    log_w = (ratios.units.mean(ratios.log_ratio.detach()) * ratios.units.num_tokens).clamp(*_VESPO_LOG_BOUNDS)
    log_w = log_w[ratios.units.of_token]
    loses = ratios.advantage < 0
    k, rate = torch.where(loses, 3.0, 2.0), torch.where(loses, 2.0, 3.0)
    return torch.exp(rate + k * log_w - rate * log_w.exp()) * ratios.advantage * ratios.one


# By `LossSettings.surrogate`: -> [A] to be maximised.
SURROGATES: dict[str, Callable[[Ratios, LossSettings], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "vespo": vespo,
}


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    action_mask: Tensor,
    turn_index: Tensor,
    trajectory_index: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    denominators: Denominators,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    correction: Tensor | None = None,
    teacher: TeacherScores | None = None,
) -> LossOutput:
    """Return the loss of the module's docstring.

    Args:
        logprobs: [B, T] float32 or float64, nats, differentiable. The result has its dtype.
        old_logprobs, ref_logprobs, advantages: [B, T], taken as constants. ref_logprobs None: there is no reference.
        action_mask: [B, T] bool; what lies outside, even NaN, reaches no sum and no gradient.
        turn_index: [B, T] integers >= 0 where the mask is True.
        trajectory_index: [B] integers: rows with the same number are one trajectory; all its rows are here.
        denominators: of the optimizer step, not of this call: the losses of micro-batches add up to the step's.
        entropy: [B, T] nats, of the distribution at each token, differentiable; None: not known.
        correction: [B, T] w, finite and >= 0, taken as constants; None: 1 everywhere. teacher: None: no teacher.

    Raises:
        RecordError: no sampled token; more here than the denominators say; a coefficient without its tensor.
    """

    def constants(values: Tensor) -> Tensor:
        return values[action_mask].detach().to(logprobs.dtype)

    tokens = _Tokens(
        row=torch.arange(len(action_mask), device=action_mask.device)[:, None].expand_as(action_mask)[action_mask],
        trajectory=trajectory_index[:, None].expand_as(action_mask)[action_mask],
        turn=turn_index[action_mask],
        now=logprobs[action_mask],
        old=constants(old_logprobs),
        advantage=constants(advantages) * (teacher is None or teacher.settings.reward),
        correction=constants(torch.ones_like(logprobs) if correction is None else correction),
        reference=None if ref_logprobs is None else constants(ref_logprobs),
        entropy=None if entropy is None else entropy[action_mask].to(logprobs.dtype),
    )
    weight, units = _token_weights(tokens, settings, denominators), _units(tokens, settings)
    unit_ratios = units.mean(tokens.log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = unit_ratios[units.of_token] * torch.exp(tokens.now - tokens.now.detach())
    clips = _clips(tokens, ratio.detach(), settings)
    ratios = Ratios(ratio, tokens.now - tokens.old, tokens.advantage, units, clips != Clip.NONE)
    policy_A = -(weight * tokens.correction * SURROGATES[settings.surrogate](ratios, settings))
    kl_A = _weighted_kl(tokens, weight, ratio, settings)
    entropy_A = _weighted_entropy(tokens, weight, settings)
    policy_term, kl_term = policy_A.sum(), settings.kl_coef * kl_A.sum()
    entropy_term = -settings.entropy_coef * entropy_A.sum()  # a bonus, for the loss is minimised
    share = (policy_A + settings.kl_coef * kl_A - settings.entropy_coef * entropy_A).detach()
    stats = _stats(tokens, unit_ratios, clips, (policy_term, kl_term, entropy_term))
    output = LossOutput(policy_term + kl_term + entropy_term, stats, TokenTerms(ratio.detach(), clips, share))
    return output if teacher is None else _with_teacher(output, tokens, ratio, teacher, action_mask, denominators)


def count_denominators(
    action_mask: Tensor, turn_index: Tensor, trajectory_index: Tensor, *, num_batch_tokens: int | None = None
) -> Denominators:
    """Return the denominators of an optimizer step on exactly these rows, given as in `policy_loss`.

    `num_batch_tokens`, sampled tokens of the rollout batch, None: the step takes all of it.

    Raises:
        RecordError: no sampled token, or more than num_batch_tokens.
    """
    trajectory = trajectory_index[:, None].expand_as(action_mask)[action_mask]
    num_tokens = len(trajectory)
    return Denominators(
        num_trajectories=len(torch.unique(trajectory)),
        num_turns=len(torch.unique(turn_keys(trajectory, turn_index[action_mask]))),
        num_tokens=num_tokens,
        num_batch_tokens=num_tokens if num_batch_tokens is None else num_batch_tokens,
    )


def estimate_kl(log_ratio: Tensor, estimator: Literal["k1", "k2", "k3"], *, max_nats: float) -> Tensor:
    """Schulman's estimates of KL(p || q) per token for samples of p, nats (joschu.net/blog/kl-approx.html).

    With x = log q - log p, the log_ratio: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x. The expectation of k1 and of k3
    over p is the divergence itself; k2 and k3 are never negative. x is clamped to +-MAX_LOG_RATIO and the estimate to
    +-max_nats; a clamped token has no gradient.
    """
    # Clamped, because a single token must not decide a step.
    x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        estimate = -x
    elif estimator == "k2":
        estimate = x * x / 2
    else:
        estimate = torch.expm1(x) - x  # exp(x) - 1 - x at x = 1e-4 is rounding alone in float32
    return estimate.clamp(-max_nats, max_nats)


def k3(log_ratio: Tensor) -> Tensor:
    """Return `estimate_kl` by k3, not cut, of log ratios within +-MAX_LOG_RATIO: for statistics, in float64."""
    return estimate_kl(log_ratio.double(), "k3", max_nats=math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The sampled tokens of a call, [A] each. Differentiable: `now` and `entropy`."""

    row: Tensor
    trajectory: Tensor
    turn: Tensor
    now: Tensor
    old: Tensor
    advantage: Tensor
    correction: Tensor
    reference: Tensor | None
    entropy: Tensor | None

    @property
    def log_ratio(self) -> Tensor:
        """To the old policy; without gradient."""
        return self.now.detach() - self.old


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """Tokens that share a key: [A] the pool of each token, [P] the number of tokens in each pool."""

    of_token: Tensor
    num_tokens: Tensor

    @classmethod
    def by(cls, keys: Tensor) -> Pools:
        """Pool the tokens with equal keys [A]."""
        _, of_token, num_tokens = torch.unique(keys, return_inverse=True, return_counts=True)
        return cls(of_token, num_tokens)

    def mean(self, values: Tensor) -> Tensor:
        """Return [P] means of [A] values over the tokens of each pool."""
        return values.new_zeros(len(self.num_tokens)).index_add(0, self.of_token, values) / self.num_tokens


def turn_keys(trajectory: Tensor, turn: Tensor) -> Tensor:
    """Return [A] a number for each turn of each trajectory, rising with the trajectory and, in it, with the turn."""
    return trajectory * (turn.max() + 1) + turn if len(turn) else turn


def _token_weights(tokens: _Tokens, settings: LossSettings, denominators: Denominators) -> Tensor:
    """Return [A] shares a_t of the tokens in the loss, in the logprobs' dtype."""
    trajectories, turns = Pools.by(tokens.trajectory), Pools.by(turn_keys(tokens.trajectory, tokens.turn))
    here = len(trajectories.num_tokens), len(turns.num_tokens), len(tokens.now)
    N, M, num_tokens = denominators.num_trajectories, denominators.num_turns, denominators.num_tokens
    if 0 in here or here[0] > N or here[1] > M or here[2] > num_tokens:
        raise RecordError(
            f"policy_loss: expected sampled tokens, and no more than the step's num_trajectories = {N}, num_turns = "
            f"{M}, num_tokens = {num_tokens}; got {here[0]}, {here[1]} and {here[2]} of them"
        )
    divisor = torch.ones(len(tokens.now), dtype=torch.float64, device=tokens.now.device)
    match settings.aggregation:
        case "seq-mean-token-mean" | "grpo":
            divisor = divisor * N * trajectories.num_tokens[trajectories.of_token]
        case "turn-mean-token-mean":
            divisor = divisor * M * turns.num_tokens[turns.of_token]
        case "token-mean" | "bnpo":
            divisor = divisor * num_tokens
        case "dapo":
            divisor = divisor * denominators.num_batch_tokens
        case "seq-mean-token-sum":
            divisor = divisor * N
        case "seq-mean-token-sum-norm" | "dr_grpo":
            assert settings.norm_length is not None, "LossSettings demands it"
            divisor = divisor * N * settings.norm_length
    # Divided in float64: a product of counts may be larger than float32 holds exactly.
    return torch.reciprocal(divisor).to(tokens.now.dtype)


def _units(tokens: _Tokens, settings: LossSettings) -> Pools:
    """Return the tokens that share an importance ratio."""
    match settings.unit:
        case "token":
            keys = torch.arange(len(tokens.now), device=tokens.now.device)
        case "turn":
            keys = turn_keys(tokens.trajectory, tokens.turn)
        case "segment":
            keys = tokens.row
        case "trajectory":
            keys = tokens.trajectory
    return Pools.by(keys)


def _weighted_kl(tokens: _Tokens, weight: Tensor, ratio: Tensor, settings: LossSettings) -> Tensor:
    """Return [A] the weighted estimates of KL(now || reference), 0 if the loss has no such term."""
    if settings.kl_coef == 0:
        return torch.zeros_like(weight)
    if tokens.reference is None:
        raise RecordError(f"policy_loss: kl_coef {settings.kl_coef} needs ref_logprobs, got None")
    estimate = estimate_kl(tokens.reference - tokens.now, settings.kl_estimator, max_nats=settings.kl_clamp)
    if settings.kl_importance_weighted:
        # By the differentiable, unclipped ratio (TRL: use_bias_correction_kl): with unit "token" and k1 or k3, the
        # expected gradient over samples of the old policy is then that of the divergence itself.
        estimate = ratio * estimate
    return weight * estimate


def _weighted_entropy(tokens: _Tokens, weight: Tensor, settings: LossSettings) -> Tensor:
    if settings.entropy_coef == 0:
        return torch.zeros_like(weight)
    if tokens.entropy is None:
        raise RecordError(f"policy_loss: entropy_coef {settings.entropy_coef} needs entropy, got None")
    return weight * tokens.entropy


def _with_teacher(
    output: LossOutput,
    tokens: _Tokens,
    ratio: Tensor,
    teacher: TeacherScores,
    mask: Tensor,
    denominators: Denominators,
) -> LossOutput:
    """Return the loss with on-policy distillation's addends, n the step's sampled tokens, whatever the aggregation.

    Of a token, - coefficient / n * w M r A (Thinking Machines, 2025): A = log p_T - log p_S, with the baseline
    + KL(S || T) (arXiv 2605.07865), r the unit's ratio, w the correction's weight, and M 0 where the token's
    probability fell by more than MAX_FALL since it was sampled, else 1. No clip acts. Or, with an exact divergence, as
    `_with_divergence` says. Tokens that are not taught are in no sum, and not in n.
    """
    settings = teacher.settings
    num_taught = denominators.num_tokens if denominators.num_taught is None else denominators.num_taught
    # At least 1: in a step in which nothing is taught, every advantage is 0.
    weight = tokens.correction * (settings.coefficient / max(num_taught, 1))
    if settings.divergence != "sampled":
        return _with_divergence(output, weight, teacher, mask)
    if teacher.log_ratios is None or (settings.baseline and teacher.kl is None):
        missing = "divergence 'sampled' needs teacher.log_ratios" if teacher.log_ratios is None else _NO_KL
        raise RecordError(f"policy_loss: distillation.{missing}, got None")
    advantage = teacher.log_ratios[mask].detach().to(tokens.now.dtype)
    is_taught = torch.ones_like(advantage, dtype=torch.bool) if teacher.is_taught is None else teacher.is_taught[mask]
    advantage = torch.where(is_taught, advantage, 0.0)
    kl = k3(advantage) if teacher.kl is None else teacher.kl[mask].detach().to(tokens.now.dtype)
    if settings.baseline:
        advantage = advantage + kl
    has_fallen = is_taught & (tokens.old.exp() - tokens.now.detach().exp() > MAX_FALL)
    term = -(weight.masked_fill(has_fallen, 0.0) * ratio * advantage)
    stats = TeacherStats(term.detach().sum(), is_taught.sum(), advantage.sum(), kl.sum(), has_fallen.sum())
    shares = replace(output.tokens, share=output.tokens.share + term.detach())
    return LossOutput(output.loss + term.sum(), replace(output.stats, teacher=stats), shares)


_NO_KL = "baseline needs teacher.kl"


def _with_divergence(output: LossOutput, weight: Tensor, teacher: TeacherScores, mask: Tensor) -> LossOutput:
    """Return the loss with weight * D at each token, [A], D the divergence from the teacher (GKD, arXiv 2306.13649).

    D is of the policy as it is in this pass, and of whole distributions: no sampled token stands in it. So neither the
    ratio nor M is before it. As there, the policy's influence on which tokens are met is left out; there a sequence
    weighs one, here a token.
    """
    if teacher.divergence is None:
        raise RecordError(
            f"policy_loss: distillation.divergence {teacher.settings.divergence!r} needs teacher.divergence, got None"
        )
    divergence = teacher.divergence[mask].to(weight.dtype)
    term = weight * divergence
    stats = TeacherStats(term.detach().sum(), mask.sum(), divergence_sum=divergence.detach().sum())
    terms = replace(output.tokens, share=output.tokens.share + term.detach(), divergence=divergence.detach())
    return LossOutput(output.loss + term.sum(), replace(output.stats, teacher=stats), terms)


def _clips(tokens: _Tokens, ratio: Tensor, settings: LossSettings) -> Tensor:
    """Return [A] uint8 the `Clip` of each token: the bound that takes its gradient in this surrogate."""
    match settings.surrogate:
        case "clip":
            place = ratio
        case "gmpo":  # the token's own ratio, also where a unit shares one
            place = tokens.log_ratio.exp()
        case "dppo":
            place = 1 + tokens.now.detach().exp() - tokens.old.exp()
        case _:
            return torch.full_like(ratio, Clip.NONE, dtype=torch.uint8)
    is_in_loss = tokens.correction > 0  # what was left out is clipped nowhere
    loses, gains = is_in_loss & (tokens.advantage < 0), is_in_loss & (tokens.advantage > 0)
    clip = torch.full_like(ratio, Clip.NONE, dtype=torch.uint8)
    clip[(place < 1 - settings.clip_low) & loses] = Clip.LOW
    clip[(place > 1 + settings.clip_high) & gains] = Clip.HIGH
    if settings.dual_clip is not None:
        clip[(place > settings.dual_clip) & loses] = Clip.DUAL
    return clip


def _stats(tokens: _Tokens, unit_ratios: Tensor, clip: Tensor, terms: tuple[Tensor, Tensor, Tensor]) -> LossStats:
    log_ratio = tokens.log_ratio
    log_s = Pools.by(tokens.trajectory).mean(log_ratio)
    to_reference = None if tokens.reference is None else tokens.reference - tokens.now.detach()
    return LossStats(
        num_tokens=len(clip),
        num_trajectories=len(log_s),
        unit_ratios=unit_ratios,
        trajectory_log_ratios=log_s,
        policy_loss=terms[0].detach(),
        kl_loss=terms[1].detach(),
        entropy_loss=terms[2].detach(),
        tokens_clipped_low=clip.eq(Clip.LOW).sum(),
        tokens_clipped_high=clip.eq(Clip.HIGH).sum(),
        tokens_dual_clipped=clip.eq(Clip.DUAL).sum(),
        tokens_corrected=tokens.correction.ne(1).sum(),
        tokens_left_out=tokens.correction.eq(0).sum(),
        old_k1=-log_ratio.sum(),
        old_k3=k3(log_ratio).sum(),
        ref_k1=None if to_reference is None else -to_reference.sum(),
        ref_k3=None if to_reference is None else k3(to_reference).sum(),
        entropy_sum=None if tokens.entropy is None else tokens.entropy.detach().sum(),
    )
