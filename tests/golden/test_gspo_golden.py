"""The loss against numbers derived by hand, and the proof that each usual mistake turns one of them red.

Every check takes the loss function as an argument, so that the last test can run it on altered copies of the source.
Clip ranges are 0.2 below and 0.3 above, chosen so that both bite and differ.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo_gym.errors import RecordError
from gspo_gym.learning import losses

LN2, LN4, LN11 = math.log(2.0), math.log(4.0), math.log(1.1)
NAN = float("nan")
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


def run(loss: Loss, rows: list[Row], *, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, torch.Tensor]:
    """The output and its gradient [B, T] for rows given as log-ratios; old logprobs are -1 - 0.1 t."""
    width = 1 + max(len(row) for row in rows)
    old = torch.full((len(rows), width), NAN, dtype=dtype)
    now, advantages = old.clone(), old.clone()
    turns = torch.full((len(rows), width), -1)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t, token in enumerate(row, start=1):
            if token is not None:
                mask[i, t] = True
                old[i, t] = -1 - 0.1 * t
                now[i, t] = old[i, t] + token[0]
                advantages[i, t], turns[i, t] = token[1], token[2]
    for tensor in (old, now, advantages):
        tensor.requires_grad_(True)
    arguments: dict[str, Any] = {
        "action_mask": mask,
        "turn_index": turns,
        "trajectory_index": torch.arange(len(rows)),
        "advantages": advantages,
        "unit": "trajectory",
        "clip_low": 0.2,
        "clip_high": 0.3,
        "num_trajectories": len(rows),
    }
    if "ref_log_ratio" in options:
        arguments["ref_logprobs"] = (now + options.pop("ref_log_ratio")).detach().requires_grad_(True)
    arguments |= options
    output = loss(now, old, **arguments)
    output.loss.backward()
    assert old.grad is None, "old logprobs are constants"
    assert advantages.grad is None, "advantages are constants"
    assert "ref_logprobs" not in arguments or arguments["ref_logprobs"].grad is None, "the reference is constant"
    assert now.grad is not None
    return output, now.grad


def check_four_sequences(loss: Loss) -> None:
    """Loss -(1.3 - 2.4 + 2.2 + 0.5) / 4 = -0.4; no gradient where a clip binds or nothing was sampled."""
    output, gradient = run(loss, FOUR_SEQUENCES)
    assert output.loss.item() == pytest.approx(-0.4, abs=1e-12)
    c, d = -(2 * 1.1 / 3) / 4, -(0.5 / 2) / 4  # -0.18333 and -0.0625
    expected = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, c, 0, c, c], [0, d, 0, d, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def check_episode_over_several_rows(loss: Loss) -> None:
    """C as two rows, with D between them, and A as two rows: nothing may change, see `FOUR_SEQUENCES`."""
    a, b, c, d = FOUR_SEQUENCES
    rows = [a[:1], b, c[:1], d, c[1:], a[1:]]
    trajectory_index = torch.tensor([0, 1, 2, 3, 2, 0])
    output, gradient = run(loss, rows, trajectory_index=trajectory_index, num_trajectories=4)
    assert output.loss.item() == pytest.approx(-0.4, abs=1e-12)
    per_row = gradient.sum(1).tolist()
    assert per_row == pytest.approx([0, 0, -2.2 / 12, -2 * 0.5 / 8, 2 * -2.2 / 12, 0], abs=1e-12)


def check_global_denominator(loss: Loss) -> None:
    """The four sequences as half of a step of eight: half the loss."""
    output, _ = run(loss, FOUR_SEQUENCES, num_trajectories=8)
    assert output.loss.item() == pytest.approx(-0.2, abs=1e-12)


def check_turn_unit(loss: Loss) -> None:
    """Two episodes, N = 2. First: turn 0 has s = 1.1, A = 2, free, 2.2 twice; turn 1 s = 1/2, A = -1, clipped to -0.8
    twice; mean 2.8/4 = 0.7. Second: turn 0 has s = 1/2, A = 1, free, 0.5 twice; turn 1 has s = 1, A = 4; mean 5/3.
    Loss -(0.7 + 5/3) / 2."""
    first: Row = [(LN11, 2.0, 0), (LN11, 2.0, 0), None, (-LN4, -1.0, 1), (0.0, -1.0, 1)]
    second: Row = [(-LN4, 1.0, 0), (0.0, 1.0, 0), None, (0.0, 4.0, 1)]
    output, gradient = run(loss, [first, second], unit="turn")
    assert output.loss.item() == pytest.approx(-(0.7 + 5 / 3) / 2, abs=1e-12)
    expected = [[0, -2.2 / 8, -2.2 / 8, 0, 0, 0], [0, -0.5 / 6, -0.5 / 6, 0, -4 / 6, 0]]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def check_token_unit(loss: Loss) -> None:
    """Ratios 2 (A = 1, clipped to 1.3), 1/4 (A = 1, free) and 1 (A = -3): loss -(1.3 + 0.25 - 3) / 3."""
    output, gradient = run(loss, [[(LN2, 1.0, 0), (-LN4, 1.0, 0), (0.0, -3.0, 0)]], unit="token")
    assert output.loss.item() == pytest.approx(1.45 / 3, abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0, 0, -0.25 / 3, 1.0], abs=1e-12)


def check_reference_kl(loss: Loss) -> None:
    """x = log(ref/now) = ln 2 and 0, A = 0: k3 = 2 - 1 - ln 2 and 0; kl_coef 0.5 over two tokens. The gradient of k3 is
    1 - exp(x): -1 and 0, times 0.5 / 2."""
    row: Row = [(0.1, 0.0, 0), (-0.2, 0.0, 0)]
    ref_log_ratio = torch.tensor([[NAN, LN2, 0.0]], dtype=torch.float64)
    output, gradient = run(loss, [row], ref_log_ratio=ref_log_ratio, kl_coef=0.5)
    assert output.loss.item() == pytest.approx(0.5 * (1 - LN2) / 2, abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0, -0.25, 0], abs=1e-12)
    assert output.stats.kl_loss.item() == pytest.approx(0.5 * (1 - LN2) / 2, abs=1e-12)
    assert output.stats.ref_k1.item() == pytest.approx(-LN2, abs=1e-12)
    assert output.stats.ref_k3.item() == pytest.approx(1 - LN2, abs=1e-12)


def check_reference_kl_bounds(loss: Loss) -> None:
    """x = 100 and -100 in float32, where exp(100) is infinite: 10 nats each, and no gradient at all."""
    row: Row = [(0.0, 0.0, 0), (0.0, 0.0, 0)]
    ref_log_ratio = torch.tensor([[NAN, 100.0, -100.0]])
    output, gradient = run(loss, [row], dtype=torch.float32, ref_log_ratio=ref_log_ratio, kl_coef=1.0)
    assert output.loss.item() == 10.0
    assert gradient[0].tolist() == [0, 0, 0]


def check_stats(loss: Loss) -> None:
    """The four sequences and E = (ln 4, 0) with A = -1, so s = 2: outside the range, but free, as D is. Of eleven
    tokens the lower clip binds on B's two and the upper on A's two. Loss -(1.6 - 2) / 5. Estimates of KL(old || now):
    k1 the sum of minus the log-ratio, k3 of ratio - 1 - log-ratio."""
    stats = run(loss, [*FOUR_SEQUENCES, [(LN4, -1.0, 0), (0.0, -1.0, 0)]])[0].stats
    assert (stats.num_tokens, stats.num_trajectories) == (11, 5)
    assert (int(stats.tokens_clipped_low), int(stats.tokens_clipped_high)) == (2, 2)
    assert stats.unit_ratios.tolist() == pytest.approx([math.sqrt(2), 0.5, 1.1, 0.5, 2.0], abs=1e-12)
    log_ratio_sum = LN2 - LN4 + 3 * LN11 - LN4 + LN4
    assert stats.old_k1.item() == pytest.approx(-log_ratio_sum, abs=1e-12)
    assert stats.old_k3.item() == pytest.approx((1.0 - 0.75 + 0.3 - 0.75 + 3.0) - log_ratio_sum, abs=1e-12)
    assert stats.policy_loss.item() == pytest.approx(0.08, abs=1e-12)
    assert not any(isinstance(v, torch.Tensor) and v.requires_grad for v in (stats.policy_loss, stats.unit_ratios))


CHECKS = [
    check_four_sequences,
    check_episode_over_several_rows,
    check_global_denominator,
    check_turn_unit,
    check_token_unit,
    check_reference_kl,
    check_reference_kl_bounds,
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


def test_more_trajectories_than_the_step_has_are_refused() -> None:
    with pytest.raises(RecordError, match="num_trajectories = 3"):
        run(losses.policy_loss, FOUR_SEQUENCES, num_trajectories=3)


def test_a_call_without_sampled_tokens_is_refused() -> None:
    with pytest.raises(RecordError, match="sampled tokens"):
        run(losses.policy_loss, [[None, None]])


def test_a_kl_weight_without_a_reference_is_refused() -> None:
    with pytest.raises(RecordError, match="needs ref_logprobs"):
        run(losses.policy_loss, FOUR_SEQUENCES, kl_coef=0.1)


# What is changed, the text before, the text after, and the loss that the four sequences then have, where the mistake is
# one of those whose value was derived by hand (None: only that some check fails).
MUTATIONS: list[tuple[str, str, str, float | None]] = [
    ("sign flipped", "policy_term = -(weight", "policy_term = (weight", 0.4),
    ("token-level ratios", 'if unit == "token":', "if True:", -0.31875),
    ("no 1/|y| in the ratio", "(summed / num_tokens).exp()", "summed.exp()", -0.4375),
    (
        "mean over tokens instead of over episodes",
        "torch.reciprocal(num_tokens.double() * num_trajectories)[inverse]",
        "torch.full(inverse.shape, 1.0 / len(inverse), dtype=torch.float64)",
        -0.6,
    ),
    ("low and high clip swapped", "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_high, 1 + clip_low)", -0.45),
    ("max instead of min", "torch.minimum(ratio * adv", "torch.maximum(ratio * adv", -0.72855),
    ("no clip", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio", -0.65355),
    ("upper clip only", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(max=1 + clip_high)", None),
    ("lower clip only", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(min=1 - clip_low)", None),
    (
        "minimum of ratios instead of terms",
        "torch.minimum(ratio * advantage, clipped_ratio * advantage)",
        "torch.minimum(ratio, clipped_ratio) * advantage",
        None,
    ),
    ("mask dropped", "mask = action_mask", "mask = torch.ones_like(action_mask)", None),
    ("ratio upside down", "_unit_ratios(now.detach() - old,", "_unit_ratios(old - now.detach(),", None),
    ("unit ratio differentiated", "_unit_ratios(now.detach() - old,", "_unit_ratios(now - old,", None),
    ("no gradient", "torch.exp(now - now.detach())", "torch.exp(now.detach() - now.detach())", None),
    ("token ratio on top of the unit's", "torch.exp(now - now.detach())", "torch.exp(now - old)", None),
    ("rows of an episode not pooled", "trajectory_index[:, None]", "torch.arange(len(mask))[:, None]", None),
    ("local denominator", "num_tokens.double() * num_trajectories", "num_tokens.double() * len(num_tokens)", None),
    ("turns of different episodes pooled", "trajectory * (turn.max() + 1) + turn", "turn", None),
    ("unit turn ignored", "trajectory * (turn.max() + 1) + turn", "trajectory", None),
    ("gradient into old logprobs", "old_logprobs[mask].detach()", "old_logprobs[mask]", None),
    ("gradient into advantages", "advantages[mask].detach()", "advantages[mask]", None),
    ("gradient into the reference", "ref_logprobs[mask].detach()", "ref_logprobs[mask]", None),
    ("KL term left out", "LossOutput(policy_term + kl_term", "LossOutput(policy_term", None),
    ("KL term subtracted", "LossOutput(policy_term + kl_term", "LossOutput(policy_term - kl_term", None),
    ("k3 reversed", "k3(reference - now)", "k3(now - reference)", None),
    ("k2 instead of k3", "(torch.expm1(x) - x)", "(x * x / 2)", None),
    ("KL summed, not averaged", "(weight * per_token).sum()", "per_token.sum()", None),
    ("log-ratio of k3 not clamped", "log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "log_ratio", None),
    ("k3 not cut", ".clamp(max=MAX_K3)", "", None),
    ("lower clip counted whatever the sign", " & (advantage < 0)", "", None),
    ("upper clip counted whatever the sign", " & (advantage > 0)", "", None),
    ("k1 of the wrong sign", "old_k1=-old_log_ratio.sum()", "old_k1=old_log_ratio.sum()", None),
]


def mutant(before: str, after: str) -> Loss:
    """`policy_loss` of a copy of the module in which one piece of text, which occurs once or more, is replaced."""
    source = inspect.getsource(losses)
    assert before in source, f"{before!r} is no longer in losses.py: adapt the list"
    module = types.ModuleType("mutated_losses")
    module.__dict__["__name__"] = losses.__name__  # dataclasses look their module up by name
    exec(compile(source.replace(before, after), "mutated_losses.py", "exec"), module.__dict__)
    loss: Loss = module.__dict__["policy_loss"]
    return loss


def failing_checks(loss: Loss) -> list[str]:
    failed = []
    for check in CHECKS:
        try:
            check(loss)
        except Exception:  # a mutant may also crash, which is as red
            failed.append(check.__name__)
    return failed


@pytest.mark.slow
def test_every_listed_mistake_turns_a_golden_red(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing_checks(mutant("policy_loss", "policy_loss")) == [], "the unaltered copy is green"
    with capsys.disabled():
        print()
        for what, before, after, wrong_loss in MUTATIONS:
            altered = mutant(before, after)
            failed = failing_checks(altered)
            print(f"  {what}: {', '.join(failed) or 'NOT NOTICED'}")
            assert failed, f"mutation not noticed: {what}"
            if wrong_loss is not None:
                # the hand-derived values are given to five decimals
                assert run(altered, FOUR_SEQUENCES)[0].loss.item() == pytest.approx(wrong_loss, abs=5e-6), what
