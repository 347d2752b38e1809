"""The loss against numbers derived by hand.

Clip ranges are 0.2 below and 0.3 above, chosen so that both bite and differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo_gym.errors import RecordError
from gspo_gym.learning import losses
from gspo_gym.learning.losses import Denominators, TeacherScores
from gspo_gym.learning.settings import DistillationSettings, LossSettings

LN2, LN4, LN11 = math.log(2.0), math.log(4.0), math.log(1.1)
NAN = float("nan")
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
Loss = Callable[..., Any]

# Each row: what follows the context token at position 0, as (log-ratio, advantage, turn), or None for a token that was
# not sampled, whose logprobs are NaN.
Row = list[tuple[float, float, int] | None]

# Sequences A, B, C, D. s = (sqrt 2, 1/2, 1.1, 1/2). Terms: A is clipped to 1.3 * 1; B to 0.8 * -3 = -2.4; C is free,
# 1.1 * 2 = 2.2; D is outside the range but free, because the minimum takes 0.5 * 1 and not 0.8 * 1.
FOUR_SEQUENCES: list[Row] = [
    [(LN2, 1.0, 0), (0.0, 1.0, 0), None],
    [None, (-LN4, -3.0, 0), (0.0, -3.0, 0)],
    [(LN11, 2.0, 0), None, (LN11, 2.0, 1), (LN11, 2.0, 1)],
    [(-LN4, 1.0, 0), None, (0.0, 1.0, 1)],
]


def counted(rows: list[Row], trajectory_index: list[int]) -> Denominators:
    """The denominators of a step on these rows, unless nothing was sampled."""
    places = [(i, token[2]) for i, row in zip(trajectory_index, rows, strict=True) for token in row if token]
    if not places:
        return Denominators(1, 1, 1, 1)
    return Denominators(len({i for i, _ in places}), len(set(places)), len(places), len(places))


def spread(rows: list[Row], values: list[float]) -> torch.Tensor:
    """[B, T] with these values at the sampled tokens, in order, and NaN elsewhere."""
    width = 1 + max(len(row) for row in rows)
    remaining = iter(values)
    spread_out = torch.full((len(rows), width), NAN, dtype=torch.float64)
    for i, row in enumerate(rows):
        for t, token in enumerate(row, start=1):
            if token is not None:
                spread_out[i, t] = next(remaining)
    return spread_out


def run(
    loss: Loss,
    rows: list[Row],
    *,
    dtype: torch.dtype = torch.float64,
    trajectory_index: list[int] | None = None,
    denominators: Denominators | None = None,
    ref_log_ratio: torch.Tensor | float | None = None,
    entropy: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    teacher: TeacherScores | None = None,
    **settings: Any,
) -> tuple[Any, torch.Tensor]:
    """The output and its gradient [B, T] for rows given as log-ratios; old logprobs are -1 - 0.1 t."""
    tokens = [(i, t, token) for i, row in enumerate(rows) for t, token in enumerate(row, start=1) if token is not None]
    old = torch.full((len(rows), 1 + max(len(row) for row in rows)), NAN, dtype=dtype)
    now, advantages, turns = old.clone(), old.clone(), torch.full(old.shape, -1)
    for i, t, (log_ratio, advantage, turn) in tokens:
        old[i, t] = -1 - 0.1 * t
        now[i, t] = old[i, t] + log_ratio
        advantages[i, t], turns[i, t] = advantage, turn
    constants = {"old": old, "advantages": advantages}
    if ref_log_ratio is not None:
        constants["ref"] = now + ref_log_ratio
    if correction is not None:
        constants["correction"] = correction.clone()
    for tensor in (now, *constants.values()):
        tensor.requires_grad_(True)
    numbers = list(range(len(rows))) if trajectory_index is None else trajectory_index
    output = loss(
        now,
        old,
        action_mask=turns >= 0,
        turn_index=turns,
        trajectory_index=torch.tensor(numbers),
        advantages=advantages,
        settings=LossSettings(**(CLIPS if "surrogate" not in settings else {}) | settings),
        denominators=counted(rows, numbers) if denominators is None else denominators,
        ref_logprobs=constants.get("ref"),
        entropy=entropy,
        correction=constants.get("correction"),
        teacher=teacher,
    )
    output.loss.backward()
    assert [name for name, tensor in constants.items() if tensor.grad is not None] == [], "these are constants"
    assert now.grad is not None
    return output, now.grad


def close(gradient: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def check_four_sequences(loss: Loss) -> None:
    """Loss -(1.3 - 2.4 + 2.2 + 0.5) / 4 = -0.4; no gradient where a clip binds or nothing was sampled."""
    output, gradient = run(loss, FOUR_SEQUENCES)
    assert output.loss.item() == pytest.approx(-0.4, abs=1e-12)
    c, d = -(2 * 1.1 / 3) / 4, -(0.5 / 2) / 4  # -0.18333 and -0.0625
    close(gradient, [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, c, 0, c, c], [0, d, 0, d, 0]])


def check_episode_over_several_rows(loss: Loss) -> None:
    """C as two rows, with D between them, and A as two rows: nothing may change, see `FOUR_SEQUENCES`."""
    a, b, c, d = FOUR_SEQUENCES
    output, gradient = run(loss, [a[:1], b, c[:1], d, c[1:], a[1:]], trajectory_index=[0, 1, 2, 3, 2, 0])
    assert output.loss.item() == pytest.approx(-0.4, abs=1e-12)
    per_row = gradient.sum(1).tolist()
    assert per_row == pytest.approx([0, 0, -2.2 / 12, -2 * 0.5 / 8, 2 * -2.2 / 12, 0], abs=1e-12)


# The sums of the terms of the four sequences' 2, 2, 3 and 2 tokens are 2.6, -4.8, 6.6 and 1, together 5.4; their turns
# have the means 1.3, -2.4, 2.2, 2.2, 0.5, 0.5, together 4.3. Each aggregation: the loss, and what one token of turn 0
# of C, of its turn 1, and of D weighs (a token of D is one turn); then the loss if the step is twice the call, the
# batch four times.
AGGREGATIONS: dict[str, tuple[float, float, float, float, float]] = {
    "seq-mean-token-mean": (-0.4, 1 / 12, 1 / 12, 1 / 8, -0.2),
    "grpo": (-0.4, 1 / 12, 1 / 12, 1 / 8, -0.2),
    "turn-mean-token-mean": (-4.3 / 6, 1 / 6, 1 / 12, 1 / 6, -4.3 / 12),
    "token-mean": (-5.4 / 9, 1 / 9, 1 / 9, 1 / 9, -5.4 / 18),
    "bnpo": (-5.4 / 9, 1 / 9, 1 / 9, 1 / 9, -5.4 / 18),
    "dapo": (-5.4 / 9, 1 / 9, 1 / 9, 1 / 9, -5.4 / 36),
    "seq-mean-token-sum": (-5.4 / 4, 1 / 4, 1 / 4, 1 / 4, -5.4 / 8),
    "seq-mean-token-sum-norm": (-5.4 / 40, 1 / 40, 1 / 40, 1 / 40, -5.4 / 80),
    "dr_grpo": (-5.4 / 40, 1 / 40, 1 / 40, 1 / 40, -5.4 / 80),
}


def check_aggregations(loss: Loss) -> None:
    """Every aggregation with its own denominator, which is the step's (dapo: the batch's) and not the call's."""
    for name, (expected, c0, c1, d, of_a_larger_step) in AGGREGATIONS.items():
        options: dict[str, Any] = {"aggregation": name} | (
            {"norm_length": 10} if "norm" in name or "dr_" in name else {}
        )
        output, gradient = run(loss, FOUR_SEQUENCES, **options)
        assert output.loss.item() == pytest.approx(expected, abs=1e-12), name
        close(gradient[2:], [[0, -2.2 * c0, 0, -2.2 * c1, -2.2 * c1], [0, -0.5 * d, 0, -0.5 * d, 0]])
        output, _ = run(loss, FOUR_SEQUENCES, denominators=Denominators(8, 12, 18, 36), **options)
        assert output.loss.item() == pytest.approx(of_a_larger_step, abs=1e-12), name


def check_turn_weights(loss: Loss) -> None:
    """Episodes of 5, 2 and 1 turns, turn k of 1 + k % 2 tokens, ratio 1 and advantage 1: a mean over turns weighs them
    5 : 2 : 1, a mean over episodes 1 : 1 : 1."""
    rows: list[Row] = [[(0.0, 1.0, k) for k in range(n) for _ in range(1 + k % 2)] for n in (5, 2, 1)]
    _, gradient = run(loss, rows, aggregation="turn-mean-token-mean")
    assert gradient.sum(1).tolist() == pytest.approx([-5 / 8, -2 / 8, -1 / 8], abs=1e-12)
    _, gradient = run(loss, rows)
    assert gradient.sum(1).tolist() == pytest.approx([-1 / 3] * 3, abs=1e-12)


def check_turn_unit(loss: Loss) -> None:
    """Two episodes, N = 2. First: turn 0 has s = 1.1, A = 2, free, 2.2 twice; turn 1 s = 1/2, A = -1, clipped to -0.8
    twice; mean 2.8/4 = 0.7. Second: turn 0 has s = 1/2, A = 1, free, 0.5 twice; turn 1 has s = 1, A = 4; mean 5/3.
    Loss -(0.7 + 5/3) / 2."""
    first: Row = [(LN11, 2.0, 0), (LN11, 2.0, 0), None, (-LN4, -1.0, 1), (0.0, -1.0, 1)]
    second: Row = [(-LN4, 1.0, 0), (0.0, 1.0, 0), None, (0.0, 4.0, 1)]
    output, gradient = run(loss, [first, second], unit="turn")
    assert output.loss.item() == pytest.approx(-(0.7 + 5 / 3) / 2, abs=1e-12)
    close(gradient, [[0, -2.2 / 8, -2.2 / 8, 0, 0, 0], [0, -0.5 / 6, -0.5 / 6, 0, -4 / 6, 0]])


def check_segment_unit(loss: Loss) -> None:
    """One episode, one turn, two rows: the first has s = 2, clipped to 1.3 twice, the second s = 1/2, free. Loss
    -(2 * 1.3 + 2 * 0.5) / 4 = -0.9. Pooled over both rows the ratio would be 1, and the loss -1."""
    rows: list[Row] = [[(LN4, 1.0, 0), (0.0, 1.0, 0)], [(-LN4, 1.0, 0), None, (0.0, 1.0, 0)]]
    output, gradient = run(loss, rows, unit="segment", trajectory_index=[0, 0])
    assert output.loss.item() == pytest.approx(-0.9, abs=1e-12)
    close(gradient, [[0, 0, 0, 0], [0, -0.125, 0, -0.125]])
    assert output.stats.unit_ratios.tolist() == pytest.approx([2.0, 0.5], abs=1e-12)
    assert output.stats.trajectory_log_ratios.tolist() == pytest.approx([0.0], abs=1e-12)


def check_token_unit(loss: Loss) -> None:
    """Ratios 2 (A = 1, clipped to 1.3), 1/4 (A = 1, free) and 1 (A = -3): loss -(1.3 + 0.25 - 3) / 3."""
    output, gradient = run(loss, [[(LN2, 1.0, 0), (-LN4, 1.0, 0), (0.0, -3.0, 0)]], unit="token")
    assert output.loss.item() == pytest.approx(1.45 / 3, abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0, 0, -0.25 / 3, 1.0], abs=1e-12)


def check_overflowing_ratio(loss: Loss) -> None:
    """Log-ratios of 100, 100 and -100 in float32, where exp(100) is infinite: terms 1.3, 0 and e^-20 = 2e-9."""
    output, gradient = run(loss, [[(100.0, 1.0, 0)], [(100.0, 0.0, 0)], [(-100.0, 1.0, 0)]], dtype=torch.float32)
    assert output.loss.item() == pytest.approx(-1.3 / 3, abs=1e-6)
    assert gradient[:, 1].tolist() == pytest.approx([0, 0, -math.exp(-20) / 3], abs=1e-12)


def check_dual_clip(loss: Loss) -> None:
    """c = 1.4, token ratios 2, 2, 1.35, 1/4 with A = -1, 1, -2, -3: terms -1.4 (bounded), 1.3 (clipped as ever), -2.7
    (above the ceiling, but free), -2.4 (floor). Loss 5.2 / 4; only the third has a gradient."""
    row: Row = [(LN2, -1.0, 0), (LN2, 1.0, 0), (math.log(1.35), -2.0, 0), (-LN4, -3.0, 0)]
    output, gradient = run(loss, [row], unit="token", dual_clip=1.4)
    assert output.loss.item() == pytest.approx(1.3, abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0, 0, 0, 2.7 / 4, 0], abs=1e-12)
    stats = output.stats
    counts = [int(n) for n in (stats.tokens_clipped_low, stats.tokens_clipped_high, stats.tokens_dual_clipped)]
    assert counts == [1, 1, 1]
    unbounded, _ = run(loss, [row], unit="token")
    assert unbounded.loss.item() == pytest.approx((2 - 1.3 + 2.7 + 2.4) / 4, abs=1e-12)
    assert int(unbounded.stats.tokens_dual_clipped) == 0


TWO_TOKENS: Row = [(0.1, 0.0, 0), (-0.2, 0.0, 0)]  # without advantages: what is left is the KL term


def check_reference_kl(loss: Loss) -> None:
    """x = log(ref/now) = ln 2 and 0, kl_coef 0.5 over two tokens. k1 = -x has the gradient 1 everywhere; k2 = x^2 / 2
    has -x; k3 = exp(x) - 1 - x is 1 - ln 2 and 0 and has 1 - exp(x), -1 and 0. All times 0.5 / 2."""
    x = torch.tensor([[NAN, LN2, 0.0]], dtype=torch.float64)
    expected = {"k1": (-LN2, 1.0, 1.0), "k2": (LN2**2 / 2, -LN2, 0.0), "k3": (1 - LN2, -1.0, 0.0)}
    for estimator, (value, first, second) in expected.items():
        output, gradient = run(loss, [TWO_TOKENS], ref_log_ratio=x, kl_coef=0.5, kl_estimator=estimator)
        assert output.loss.item() == pytest.approx(0.25 * value, abs=1e-12), estimator
        assert output.stats.kl_loss.item() == pytest.approx(0.25 * value, abs=1e-12), estimator
        assert gradient[0].tolist() == pytest.approx([0, 0.25 * first, 0.25 * second], abs=1e-12), estimator
        assert output.stats.ref_k1.item() == pytest.approx(-LN2, abs=1e-12)
        assert output.stats.ref_k3.item() == pytest.approx(1 - LN2, abs=1e-12)


def check_reference_kl_is_the_divergence(loss: Loss) -> None:
    """Ten tokens, of which 7, 2 and 1 have the probabilities 0.7, 0.2 and 0.1 now and 0.2, 0.3 and 0.5 in the
    reference: the mean is the expectation of k3 under the policy, which is KL(now || reference) = 0.635 nats.
    Reversed, exp(-x) - 1 + x, it would be 0.968."""
    x = [math.log(0.2 / 0.7)] * 7 + [math.log(0.3 / 0.2)] * 2 + [math.log(0.5 / 0.1)]
    divergence = 0.7 * math.log(0.7 / 0.2) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.5)
    assert round(divergence, 3) == 0.635
    rows: list[Row] = [[(0.0, 0.0, 0)] * 10]
    output, _ = run(loss, rows, ref_log_ratio=spread(rows, x), kl_coef=1.0)
    assert output.loss.item() == pytest.approx(divergence, abs=1e-12)


def check_reference_kl_bounds(loss: Loss) -> None:
    """x = 100 and -100 in float32, where exp(100) is infinite: 10 nats each, and no gradient at all. With more than
    10 nats allowed, x counts as 20 and -20: k3 is cut to 50 and is 19, k2 is 200 twice. x = 2 is e^2 - 3 = 4.39 nats,
    cut only if the bound is 3."""
    x = torch.tensor([[NAN, 100.0, -100.0]])
    for estimator, max_nats, expected in [
        ("k3", 10.0, 10.0), ("k3", 50.0, 34.5), ("k1", 10.0, 0.0), ("k2", 10.0, 10.0), ("k2", 300.0, 200.0),
    ]:  # fmt: skip
        options: dict[str, Any] = {"kl_coef": 1.0, "kl_estimator": estimator, "kl_clamp": max_nats}
        output, gradient = run(loss, [TWO_TOKENS], dtype=torch.float32, ref_log_ratio=x, **options)
        assert output.loss.item() == expected, (estimator, max_nats)
        assert gradient[0].tolist() == [0, 0, 0]
    one: list[Row] = [[(0.0, 0.0, 0)]]
    output, gradient = run(loss, one, ref_log_ratio=2.0, kl_coef=1.0)
    assert output.loss.item() == pytest.approx(math.exp(2) - 3, abs=1e-12)
    assert gradient[0, 1].item() == pytest.approx(1 - math.exp(2), abs=1e-12)
    output, gradient = run(loss, one, ref_log_ratio=2.0, kl_coef=1.0, kl_clamp=3.0)
    assert (output.loss.item(), gradient[0, 1].item()) == (3.0, 0.0)
    # k1 may be negative, and is bounded there, too
    output, _ = run(loss, one, ref_log_ratio=5.0, kl_coef=1.0, kl_estimator="k1", kl_clamp=3.0)
    assert output.loss.item() == -3.0


def check_importance_weighted_kl(loss: Loss) -> None:
    """Ratios 2 and 1/4, x = ln 2 for both: k3 = 1 - ln 2 with the gradient -1. Weighted by the ratio, which no clip
    touches, (2 + 1/4) (1 - ln 2) / 2; its gradient is ratio * (k3 - 1) = -ratio ln 2, the ratio's own included."""
    output, gradient = run(
        loss,
        [[(LN2, 0.0, 0), (-LN4, 0.0, 0)]],
        unit="token",
        ref_log_ratio=LN2,
        kl_coef=0.5,
        kl_importance_weighted=True,
    )
    assert output.loss.item() == pytest.approx(0.5 * 2.25 * (1 - LN2) / 2, abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0, 0.25 * -2 * LN2, 0.25 * -0.25 * LN2], abs=1e-12)


def check_entropy_bonus(loss: Loss) -> None:
    """Entropies 2 and 1/2 in one episode and 1 in another: -0.1 * (1.25 + 1) / 2, and -0.1 * 3.5 / 3 as a mean over
    tokens. It is the entropies that get a gradient, minus 0.1 times what the token weighs."""
    rows: list[Row] = [[(0.0, 0.0, 0), None, (0.0, 0.0, 0)], [(0.0, 0.0, 0)]]
    for aggregation, expected, of_each in [
        ("seq-mean-token-mean", -0.1125, [-0.025, -0.025, -0.05]),
        ("token-mean", -0.35 / 3, [-0.1 / 3] * 3),
    ]:
        entropy = spread(rows, [2.0, 0.5, 1.0]).requires_grad_(True)
        output, gradient = run(loss, rows, aggregation=aggregation, entropy=entropy, entropy_coef=0.1)
        assert output.loss.item() == pytest.approx(expected, abs=1e-12)
        assert output.stats.entropy_loss.item() == pytest.approx(expected, abs=1e-12)
        assert output.stats.entropy_sum.item() == pytest.approx(3.5, abs=1e-12)
        assert not gradient.any()
        assert entropy.grad is not None
        close(entropy.grad, torch.nan_to_num(spread(rows, of_each)).tolist())


# Four tokens: probabilities when they were sampled and now, and advantages. Their ratios are 1.2, 0.4, 6 and 1.1.
SAMPLED, NOW, GAINS = [0.5, 0.5, 0.1, 0.9], [0.6, 0.2, 0.6, 0.99], [1.0, -1.0, -1.0, 1.0]
E04 = {"clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}  # GMPO's range, e^-0.4 to e^0.4


def objective_of(loss: Loss, gains: list[float] = GAINS, **settings: Any) -> tuple[list[float], list[float], list[int]]:
    """Value and slope of what is maximised at each of the four tokens of one episode of one turn, and its clip."""
    old, now, advantages = (torch.tensor([[0.0, *values]], dtype=torch.float64) for values in (SAMPLED, NOW, gains))
    old[:, 1:], now[:, 1:] = old[:, 1:].log(), now[:, 1:].log()
    now.requires_grad_(True)
    output = loss(
        now,
        old,
        action_mask=torch.tensor([[False, True, True, True, True]]),
        turn_index=torch.tensor([[-1, 0, 0, 0, 0]]),
        trajectory_index=torch.tensor([0]),
        advantages=advantages,
        settings=LossSettings(aggregation="token-mean", **settings),
        denominators=Denominators(1, 1, 4, 4),
    )
    output.loss.backward()
    assert now.grad is not None
    return (-4 * output.tokens.share).tolist(), (-4 * now.grad[0, 1:]).tolist(), output.tokens.clip.tolist()


def check_cispo(loss: Loss) -> None:
    """Weights min(s, 5) without a floor: 1.2, 0.4, 5 and 1.1, each times its advantage, as value and as slope."""
    values, slopes, clips = objective_of(loss, surrogate="cispo", unit="token")  # the cap of 5 is its default
    assert values == pytest.approx([1.2, -0.4, -5, 1.1], abs=1e-12)
    assert slopes == pytest.approx([1.2, -0.4, -5, 1.1], abs=1e-12)
    assert clips == [0, 0, 0, 0]
    _, slopes, _ = objective_of(loss, surrogate="cispo", unit="token", clip_high=0.15)
    assert slopes == pytest.approx([1.15, -0.4, -1.15, 1.1], abs=1e-12)


def check_sapo(loss: Loss) -> None:
    """(4/tau) sigmoid(tau (s - 1)) A and its slope 4 sigmoid (1 - sigmoid) s A, tau 1 for A > 0 and 1.05 for A < 0."""
    values, slopes, clips = objective_of(loss, surrogate="sapo", unit="token")
    assert values == pytest.approx([2.199336, -1.323850, -3.789638, 2.099917], abs=1e-6)
    assert slopes == pytest.approx([1.188080, -0.362795, -0.124629, 1.097255], abs=1e-6)
    assert clips == [0, 0, 0, 0]
    # One ratio for all, exp of the mean log-ratio: (1.2 * 0.4 * 6 * 1.1)^(1/4) = 1.334124; tau 2 and 3.
    taus = {"sapo_temperatures": (2.0, 3.0)}
    values, slopes, _ = objective_of(loss, surrogate="sapo", **taus)
    s = (1.2 * 0.4 * 6 * 1.1) ** 0.25
    gates = [1 / (1 + math.exp(-tau * (s - 1))) for tau in (2, 3, 3, 2)]
    assert values == pytest.approx(
        [4 / t * g * a for t, g, a in zip((2, 3, 3, 2), gates, GAINS, strict=True)], abs=1e-12
    )
    assert slopes == pytest.approx([4 * g * (1 - g) * s * a for g, a in zip(gates, GAINS, strict=True)], abs=1e-12)


def check_gmpo(loss: Loss) -> None:
    """The four as one episode: A = +1 cuts 6 to e^0.4, (1.2 * 0.4 * e^0.4 * 1.1)^(1/4) = 0.942080; A = -1 cuts 0.4 to
    e^-0.4, (1.2 * e^-0.4 * 6 * 1.1)^(1/4) = 1.517930. The token that is cut has no slope."""
    g = (1.2 * 0.4 * math.exp(0.4) * 1.1) ** 0.25
    assert g == pytest.approx(0.942080, abs=1e-6)
    for settings in ({}, E04):  # the range of the paper is its default
        values, slopes, clips = objective_of(loss, [1.0] * 4, surrogate="gmpo", **settings)
        assert values == pytest.approx([g] * 4, abs=1e-12)
        assert slopes == pytest.approx([g, g, 0, g], abs=1e-12)
        assert clips == [0, 0, 2, 0]
    g = (1.2 * math.exp(-0.4) * 6 * 1.1) ** 0.25
    assert g == pytest.approx(1.517930, abs=1e-6)
    values, slopes, clips = objective_of(loss, [-1.0] * 4, surrogate="gmpo")
    assert values == pytest.approx([-g] * 4, abs=1e-12)
    assert slopes == pytest.approx([-g, 0, -g, -g], abs=1e-12)
    assert clips == [0, 1, 0, 0]


def check_dppo(loss: Loss) -> None:
    """Probabilities moved by 0.1, -0.3, 0.5 and 0.09: only the second went further than 0.2 the way its advantage says.
    With 0.05 upwards the first and the last are out; with 0.4 downwards the second is in."""
    values, slopes, clips = objective_of(loss, surrogate="dppo", unit="token")
    assert values == pytest.approx([1.2, 0, -6, 1.1], abs=1e-12)
    assert slopes == pytest.approx([1.2, 0, -6, 1.1], abs=1e-12)
    assert clips == [0, 1, 0, 0]
    _, slopes, clips = objective_of(loss, surrogate="dppo", unit="token", clip_low=0.4, clip_high=0.05)
    assert slopes == pytest.approx([0, -0.4, -6, 0], abs=1e-12)
    assert clips == [2, 0, 0, 2]
    # From 0.01 to 0.3 with A < 0 the ratio is 30, and counts as 20.
    output, gradient = run(loss, [[(math.log(30), -1.0, 0)]], unit="token", surrogate="dppo")
    assert (output.loss.item(), gradient[0, 1].item()) == (pytest.approx(20), pytest.approx(20))


def check_vespo(loss: Loss) -> None:
    """w = 1.2 * 0.4 * 6 * 1.1 = 3.168, the product: w^2 e^(3 - 3w) for A >= 0, w^3 e^(2 - 2w) for A < 0."""
    w = 1.2 * 0.4 * 6 * 1.1
    gaining, losing = w**2 * math.exp(3 - 3 * w), w**3 * math.exp(2 - 2 * w)
    values, slopes, clips = objective_of(loss, surrogate="vespo")
    assert values == pytest.approx([gaining, -losing, -losing, gaining], abs=1e-12)
    assert slopes == pytest.approx(values, abs=1e-15)
    assert clips == [0, 0, 0, 0]
    # A product below 1e-8 counts as that: (1e-8)^2 e^3.
    output, _ = run(loss, [[(-30.0, 1.0, 0)]], surrogate="vespo")
    assert output.loss.item() == pytest.approx(-1e-16 * math.exp(3), rel=1e-6)


def check_size_of_the_advantage(loss: Loss) -> None:
    """Every surrogate is the advantage's size times a function of its sign: three times the advantages are three times
    the values and slopes, and the same clips. Above, all advantages are 1 or -1, which a division would not change."""
    methods: list[tuple[str, str]] = [("clip", "token"), ("cispo", "token"), ("sapo", "token"), ("gmpo", "trajectory"),
                                      ("dppo", "token"), ("vespo", "trajectory")]  # fmt: skip
    for surrogate, unit in methods:
        values, slopes, clips = objective_of(loss, surrogate=surrogate, unit=unit)
        threefold = objective_of(loss, [3 * gain for gain in GAINS], surrogate=surrogate, unit=unit)
        assert threefold[0] == pytest.approx([3 * value for value in values], rel=1e-12), surrogate
        assert threefold[1] == pytest.approx([3 * slope for slope in slopes], rel=1e-12), surrogate
        assert threefold[2] == clips, surrogate
    none, flat, _ = objective_of(loss, [0.0] * 4, surrogate="vespo")
    assert (none, flat) == ([0.0] * 4, [0.0] * 4)


# w of A: 0 and 1, of B: 1/2 and 1/2, of C: 2, 1 and 1, of D: 1 and 0.
CORRECTION = spread(FOUR_SEQUENCES, [0, 1, 0.5, 0.5, 2, 1, 1, 1, 0])


def check_correction(loss: Loss) -> None:
    """Terms 1.3 / 2, -2.4 / 2, 2.2 * 4 / 3 and 0.5 / 2, over N = 4 as ever. The ratios pool the tokens that are left
    out as well. The terms of KL (x = ln 2: 1 - ln 2 a token) and of entropy (1 nat a token) are not corrected."""
    policy = -(0.65 - 1.2 + 8.8 / 3 + 0.25) / 4
    output, gradient = run(loss, FOUR_SEQUENCES, correction=CORRECTION)
    assert output.loss.item() == pytest.approx(policy, abs=1e-12)
    c, d = -2.2 / 12, -0.5 / 8
    close(gradient, [[0] * 5, [0] * 5, [0, 2 * c, 0, c, c], [0, d, 0, 0, 0]])
    stats = output.stats
    assert (int(stats.tokens_corrected), int(stats.tokens_left_out)) == (5, 2)
    assert (int(stats.tokens_clipped_low), int(stats.tokens_clipped_high)) == (2, 1)
    assert stats.unit_ratios.tolist() == pytest.approx([math.sqrt(2), 0.5, 1.1, 0.5], abs=1e-12)
    options: dict[str, Any] = {"kl_coef": 1.0, "ref_log_ratio": LN2, "entropy_coef": 0.1}
    entropy = spread(FOUR_SEQUENCES, [1.0] * 9)
    output, _ = run(loss, FOUR_SEQUENCES, correction=CORRECTION, entropy=entropy, **options)
    assert output.loss.item() == pytest.approx(policy + (1 - LN2) - 0.1, abs=1e-12)
    assert output.stats.policy_loss.item() == pytest.approx(policy, abs=1e-12)


def check_stats(loss: Loss) -> None:
    """The four sequences and E = (ln 4, 0) with A = -1, so s = 2: outside the range, but free, as D is. Of eleven
    tokens the lower clip binds on B's two and the upper on A's two. Loss -(1.6 - 2) / 5. Estimates of KL(old || now):
    k1 the sum of minus the log-ratio, k3 of ratio - 1 - log-ratio."""
    stats = run(loss, [*FOUR_SEQUENCES, [(LN4, -1.0, 0), (0.0, -1.0, 0)]])[0].stats
    assert (stats.num_tokens, stats.num_trajectories) == (11, 5)
    assert (int(stats.tokens_clipped_low), int(stats.tokens_clipped_high)) == (2, 2)
    assert (int(stats.tokens_dual_clipped), int(stats.tokens_corrected), int(stats.tokens_left_out)) == (0, 0, 0)
    assert stats.unit_ratios.tolist() == pytest.approx([math.sqrt(2), 0.5, 1.1, 0.5, 2.0], abs=1e-12)
    assert stats.trajectory_log_ratios.tolist() == pytest.approx([LN2 / 2, -LN2, LN11, -LN2, LN2], abs=1e-12)
    log_ratio_sum = LN2 - LN4 + 3 * LN11 - LN4 + LN4
    assert stats.old_k1.item() == pytest.approx(-log_ratio_sum, abs=1e-12)
    assert stats.old_k3.item() == pytest.approx((1.0 - 0.75 + 0.3 - 0.75 + 3.0) - log_ratio_sum, abs=1e-12)
    assert stats.policy_loss.item() == pytest.approx(0.08, abs=1e-12)
    assert (stats.ref_k1, stats.ref_k3, stats.entropy_sum) == (None, None, None)
    assert not any(isinstance(v, torch.Tensor) and v.requires_grad for v in (stats.policy_loss, stats.unit_ratios))


# Probabilities of three tokens in the policy and in its teacher: log T - log S, and KL(S || T) = .6 ln 3 - .3 ln (7/3).
POLICY, TEACHER = (0.6, 0.3, 0.1), (0.2, 0.7, 0.1)
TAUGHT = [math.log(t / s) for s, t in zip(POLICY, TEACHER, strict=True)]
DIVERGENCE = 0.6 * math.log(3) - 0.3 * math.log(7 / 3)
THREE_TOKENS: Row = [(0.0, 1.0, 0)] * 3


def taught(log_ratios: list[float], *, kl: float | None = None, **settings: Any) -> TeacherScores:
    """Scores of one row's tokens, NaN at its context token."""
    row = torch.tensor([[NAN, *log_ratios]], dtype=torch.float64)
    given = DistillationSettings(teacher="t", baseline=kl is not None, **settings)
    return TeacherScores(given, row, None if kl is None else torch.full_like(row, kl))


def check_teacher(loss: Loss) -> None:
    """A = -1.098612, .847298, 0, with the baseline -.693634, 1.252276, .404978: the mean over the three tokens, times
    0.5. As the half of a step it weighs half, whatever the aggregation; beside the reward, whose tokens have A = 1 and
    a third each, both add up."""
    assert [round(a, 6) for a in TAUGHT] == [-1.098612, 0.847298, 0.0]
    for kl, expected in ((None, TAUGHT), (DIVERGENCE, [-0.693634, 1.252276, 0.404978])):
        teacher = taught(TAUGHT, kl=kl, coefficient=0.5, reward=False)
        output, gradient = run(loss, [THREE_TOKENS], teacher=teacher)
        assert output.loss.item() == pytest.approx(-0.5 * sum(expected) / 3, abs=1e-6)
        assert gradient[0].tolist() == pytest.approx([0, *(-0.5 * a / 3 for a in expected)], abs=1e-6)
        stats = output.stats.teacher
        assert stats.loss.item() == output.stats.loss.item() == output.loss.item()
        assert stats.advantage_sum.item() == pytest.approx(sum(expected), abs=1e-6)
        estimate = sum(math.exp(a) - 1 - a for a in TAUGHT)
        assert stats.kl_sum.item() == pytest.approx(estimate if kl is None else 3 * DIVERGENCE, abs=1e-12)
        assert output.tokens.share.sum().item() == pytest.approx(output.loss.item(), abs=1e-12)
        half = {"denominators": Denominators(2, 2, 6, 24), "aggregation": "dapo"}
        _, halved = run(loss, [THREE_TOKENS], teacher=teacher, **half)
        torch.testing.assert_close(halved[0, 1:], gradient[0, 1:] / 2, rtol=0, atol=1e-12)
        beside = taught(TAUGHT, kl=kl, coefficient=0.5)
        _, both = run(loss, [THREE_TOKENS], teacher=beside)
        torch.testing.assert_close(both[0, 1:], gradient[0, 1:] - 1 / 3, rtol=0, atol=1e-12)


def check_teachers_baseline(loss: Loss) -> None:
    """Ten tokens, 6, 3 and 1 of them as the policy samples: with the baseline, the mean of A is exactly 0; without, it
    is -KL(S || T) = -.404978."""
    rows: list[Row] = [[(0.0, 0.0, 0)] * 10]
    every = [a for a, count in zip(TAUGHT, (6, 3, 1), strict=True) for _ in range(count)]
    output, _ = run(loss, rows, teacher=taught(every, kl=DIVERGENCE))
    assert output.loss.item() == pytest.approx(0.0, abs=1e-12)
    output, _ = run(loss, rows, teacher=taught(every))
    assert output.loss.item() == pytest.approx(0.404978, abs=1e-6)


def check_teachers_trust(loss: Loss) -> None:
    """Old probabilities e^-1.1 = .333, e^-1.2 = .301, e^-1.3 = .273. Now e^-2.1 = .122, fallen by .210: dropped,
    whatever A is; e^-2.2 = .111, fallen by .190: kept, with the ratio e^-1; and e^0 = 1, risen by .727: kept, with
    e^1.3, though far outside the clip. A weight of the correction multiplies: 2 for the second token."""
    row: Row = [(-1.0, 0.0, 0), (-1.0, 0.0, 0), (1.3, 0.0, 0)]
    weights = torch.tensor([[NAN, 1.0, 2.0, 1.0]], dtype=torch.float64)
    teacher = taught([5.0, -1.0, 1.0])
    output, gradient = run(loss, [row], unit="token", correction=weights, teacher=teacher)
    assert gradient[0].tolist() == pytest.approx([0, 0, 2 * math.exp(-1) / 3, -math.exp(1.3) / 3], abs=1e-12)
    assert output.stats.teacher.num_dropped.item() == 1
    assert output.loss.item() == pytest.approx((2 * math.exp(-1) - math.exp(1.3)) / 3, abs=1e-12)


CHECKS = [
    check_four_sequences,
    check_episode_over_several_rows,
    check_aggregations,
    check_turn_weights,
    check_turn_unit,
    check_segment_unit,
    check_token_unit,
    check_overflowing_ratio,
    check_dual_clip,
    check_reference_kl,
    check_reference_kl_is_the_divergence,
    check_reference_kl_bounds,
    check_importance_weighted_kl,
    check_entropy_bonus,
    check_cispo,
    check_sapo,
    check_gmpo,
    check_dppo,
    check_vespo,
    check_size_of_the_advantage,
    check_correction,
    check_teacher,
    check_teachers_baseline,
    check_teachers_trust,
    check_stats,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_loss_and_gradient_are_those_derived_by_hand(check: Callable[[Loss], None]) -> None:
    check(losses.policy_loss)


def test_golden_holds_in_float32_to_its_rounding() -> None:
    output, gradient = run(losses.policy_loss, FOUR_SEQUENCES, dtype=torch.float32)
    # 1e-6: a few float32 roundings (6e-8 each) of numbers up to 3
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(-0.4, abs=1e-6)
    assert gradient[2, 1].item() == pytest.approx(-0.55 / 3, abs=1e-6)
    assert gradient[:2].abs().max().item() == 0.0


@pytest.mark.parametrize("denominators", [(3, 6, 9, 9), (4, 5, 9, 9), (4, 6, 8, 9)])
def test_more_trajectories_turns_or_tokens_than_the_step_has_are_refused(denominators: tuple[int, ...]) -> None:
    with pytest.raises(RecordError, match=r"got 4, 6 and 9 of them"):
        run(losses.policy_loss, FOUR_SEQUENCES, denominators=Denominators(*denominators))


def test_a_call_without_sampled_tokens_is_refused() -> None:
    with pytest.raises(RecordError, match="sampled tokens"):
        run(losses.policy_loss, [[None, None]])


@pytest.mark.parametrize(("coef", "tensor"), [("kl_coef", "ref_logprobs"), ("entropy_coef", "entropy")])
def test_a_weight_without_its_tensor_is_refused(coef: str, tensor: str) -> None:
    with pytest.raises(RecordError, match=f"{coef} 0.1 needs {tensor}"):
        run(losses.policy_loss, FOUR_SEQUENCES, **{coef: 0.1})


def test_a_baseline_without_its_divergence_is_refused() -> None:
    scores = taught(TAUGHT)
    wrong = TeacherScores(DistillationSettings(teacher="t", baseline=True), scores.log_ratios, None)
    with pytest.raises(RecordError, match=r"baseline needs teacher\.kl"):
        run(losses.policy_loss, [THREE_TOKENS], teacher=wrong)
