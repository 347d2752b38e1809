"""The loss against a reference written as loops over tokens in plain Python floats, and against plain GSPO.

What is differentiated: at logprobs l0 the surrogate is, as a function of the logprobs l near l0,

    f(l) = - 1/N sum_i 1/|y_i| sum_t min(r_t A_t, clip(r_t) A_t),   r_t = s_U(l0) * exp(l_t - l0_t),

with the unit's ratio s_U frozen at l0. The gradient of the loss at l0 must be that of f, given by central differences.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gspo_gym.learning.losses import k3, policy_loss

CLIP_LOW, CLIP_HIGH = 0.08, 0.12
STEP = 1e-6  # of the differences; in float64 their error is about STEP ** 2 + 1e-16 / STEP = 1e-10


def episodes(seed):
    """Five trajectories over eight rows of 14: rows in mixed order, ragged turns, masked tokens inside of turns, turn
    numbers that skip and repeat in other trajectories, advantages of both signs by turn."""
    rng = np.random.default_rng(seed)
    trajectory_index = np.array([3, 0, 1, 0, 4, 1, 2, 0])
    B, T = len(trajectory_index), 14
    mask = rng.random((B, T)) < 0.6
    mask[:, 0] = False
    mask[2, 5:] = False  # a short row
    mask[:, 3] = True  # no row without a sampled token
    turn = np.where(mask, 2 * (np.arange(T) // 4)[None, :] + 8 * (np.arange(B) % 2)[:, None], -1)
    old = -rng.random((B, T)) * 3
    # drifts by trajectory and turn move units out of the clip range, noise within a unit makes its tokens differ
    drift = np.array([0.3, -0.3, 0.0, 0.25, -0.2])[trajectory_index][:, None] + rng.normal(0, 0.15, (B, 20))
    now = old + np.take_along_axis(drift, np.maximum(turn, 0), 1) + rng.normal(0, 0.1, (B, T))
    reference = now + rng.normal(0, 0.5, (B, T))
    by_turn = rng.normal(0, 1, (5, 20))
    advantages = np.where(mask, by_turn[trajectory_index[:, None], np.maximum(turn, 0)], 0.0)
    episode = {"mask": mask, "turn": turn, "row_of": trajectory_index, "A": advantages}
    return episode | {"old": old, "now": now, "ref": reference}


def unit_of(e, b, t, unit):
    trajectory, turn = int(e["row_of"][b]), int(e["turn"][b, t])
    return {"trajectory": (trajectory,), "turn": (trajectory, turn), "token": (b, t)}[unit]


def reference_ratios(e, unit):
    """s of each unit, by collecting the log-ratios of its tokens."""
    collected = {}
    for b, t in zip(*np.nonzero(e["mask"]), strict=True):
        collected.setdefault(unit_of(e, b, t, unit), []).append(e["now"][b, t] - e["old"][b, t])
    return {key: math.exp(sum(values) / len(values)) for key, values in collected.items()}


def reference_loss(e, unit, *, at, num_trajectories, kl_coef):
    """f(at), one token at a time."""
    ratios = reference_ratios(e, unit)
    total = 0.0
    for i in sorted(set(e["row_of"].tolist())):
        tokens = [(b, t) for b, t in zip(*np.nonzero(e["mask"]), strict=True) if e["row_of"][b] == i]
        episode = 0.0
        for b, t in tokens:
            A = e["A"][b, t]
            ratio = ratios[unit_of(e, b, t, unit)] * math.exp(at[b, t] - e["now"][b, t])
            clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
            x = e["ref"][b, t] - at[b, t]
            episode += -min(ratio * A, clipped * A) + kl_coef * (math.exp(x) - 1 - x)
        total += episode / len(tokens)
    return total / num_trajectories


def by_differences(function, at, places):
    gradient = np.zeros_like(at)
    for place in places:
        up, down = at.copy(), at.copy()
        up[place] += STEP
        down[place] -= STEP
        gradient[place] = (function(up) - function(down)) / (2 * STEP)
    return gradient


def run(e, unit, *, num_trajectories=7, kl_coef=0.0, advantages=None, garbage=None):
    tensors = {key: torch.tensor(value) for key, value in e.items()}
    now, old, ref = tensors["now"], tensors["old"], tensors["ref"]
    if garbage is not None:
        now, old, ref = (torch.where(tensors["mask"], x, garbage) for x in (now, old, ref))
    now.requires_grad_(True)
    output = policy_loss(
        now,
        old,
        action_mask=tensors["mask"],
        turn_index=tensors["turn"],
        trajectory_index=tensors["row_of"],
        advantages=tensors["A"] if advantages is None else torch.tensor(advantages),
        unit=unit,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        num_trajectories=num_trajectories,
        ref_logprobs=ref if kl_coef else None,
        kl_coef=kl_coef,
    )
    output.loss.backward()
    return output, now.grad.numpy()


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_equal_the_loops_over_tokens(seed, unit, kl_coef):
    e = episodes(seed)
    output, gradient = run(e, unit, kl_coef=kl_coef)

    def f(at):
        return reference_loss(e, unit, at=at, num_trajectories=7, kl_coef=kl_coef)

    assert output.loss.item() == pytest.approx(f(e["now"]), abs=1e-12)
    places = [(int(b), int(t)) for b, t in np.argwhere(e["mask"])]
    np.testing.assert_allclose(gradient, by_differences(f, e["now"], places), rtol=0, atol=1e-8)
    assert not gradient[~e["mask"]].any()


@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
def test_the_loops_exercise_both_clips_and_every_free_side(unit):
    """The comparison above means something only if tokens of all kinds occur in it."""
    kinds = set()
    for seed in range(4):
        e = episodes(seed)
        ratios = reference_ratios(e, unit)
        for b, t in zip(*np.nonzero(e["mask"]), strict=True):
            s = ratios[unit_of(e, b, t, unit)]
            side = "low" if s < 1 - CLIP_LOW else "high" if s > 1 + CLIP_HIGH else "inside"
            assert min(abs(s - 1 + CLIP_LOW), abs(s - 1 - CLIP_HIGH)) > 2 * STEP, "differences would straddle a kink"
            kinds.add((side, e["A"][b, t] > 0))
    assert kinds == {(side, sign) for side in ("low", "inside", "high") for sign in (True, False)}


@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
def test_statistics_equal_the_loops_over_tokens(unit):
    e = episodes(0)
    stats = run(e, unit, kl_coef=0.3)[0].stats
    ratios = reference_ratios(e, unit)
    tokens = list(zip(*np.nonzero(e["mask"]), strict=True))
    low = sum(ratios[unit_of(e, b, t, unit)] < 1 - CLIP_LOW and e["A"][b, t] < 0 for b, t in tokens)
    high = sum(ratios[unit_of(e, b, t, unit)] > 1 + CLIP_HIGH and e["A"][b, t] > 0 for b, t in tokens)
    assert (int(stats.tokens_clipped_low), int(stats.tokens_clipped_high)) == (low, high)
    assert (stats.num_tokens, stats.num_trajectories) == (len(tokens), 5)
    assert sorted(stats.unit_ratios.tolist()) == pytest.approx(sorted(ratios.values()), abs=1e-12)
    d = [e["now"][b, t] - e["old"][b, t] for b, t in tokens]
    x = [e["ref"][b, t] - e["now"][b, t] for b, t in tokens]
    assert stats.old_k1.item() == pytest.approx(-sum(d), abs=1e-10)
    assert stats.old_k3.item() == pytest.approx(sum(math.exp(v) - 1 - v for v in d), abs=1e-10)
    assert stats.ref_k1.item() == pytest.approx(-sum(x), abs=1e-10)
    assert stats.ref_k3.item() == pytest.approx(sum(math.exp(v) - 1 - v for v in x), abs=1e-10)
    assert stats.policy_loss.item() + stats.kl_loss.item() == pytest.approx(run(e, unit, kl_coef=0.3)[0].loss.item())


def plain_gspo(e, at, A_of, num_trajectories):
    """Equations 5 and 7 of the paper: one differentiable ratio and one term per trajectory, no stop-gradient."""
    total = 0.0
    for i, A in A_of.items():
        tokens = [(b, t) for b, t in zip(*np.nonzero(e["mask"]), strict=True) if e["row_of"][b] == i]
        s = math.exp(sum(at[b, t] - e["old"][b, t] for b, t in tokens) / len(tokens))
        total += min(s * A, min(max(s, 1 - CLIP_LOW), 1 + CLIP_HIGH) * A)
    return -total / num_trajectories


@pytest.mark.parametrize("seed", range(6))
def test_with_one_advantage_per_trajectory_the_token_form_is_plain_gspo(seed):
    e = episodes(seed)
    A_of = dict(enumerate(np.random.default_rng(seed + 100).normal(0, 1, 5)))
    advantages = np.where(e["mask"], np.array([A_of[i] for i in e["row_of"].tolist()])[:, None], 0.0)
    output, gradient = run(e, "trajectory", advantages=advantages)
    assert output.loss.item() == pytest.approx(plain_gspo(e, e["now"], A_of, 7), abs=1e-12)
    places = [(int(b), int(t)) for b, t in np.argwhere(e["mask"])]
    expected = by_differences(lambda at: plain_gspo(e, at, A_of, 7), e["now"], places)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-8)


def single(log_ratios, advantages, unit="trajectory", turns=None):
    """Gradient of the *objective* (minus the loss) for one trajectory, with clips that do not act."""
    now = torch.tensor([[0.0, *log_ratios]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False] + [True] * len(log_ratios)])
    output = policy_loss(
        now,
        torch.zeros_like(now),
        action_mask=mask,
        turn_index=torch.tensor([[-1, *(turns or [0] * len(log_ratios))]]),
        trajectory_index=torch.tensor([0]),
        advantages=torch.tensor([[0.0, *advantages]], dtype=torch.float64),
        unit=unit,
        clip_low=0.9,
        clip_high=9.0,
        num_trajectories=1,
    )
    output.loss.backward()
    return (-now.grad[0, 1:]).tolist()


def test_turn_advantages_steer_their_own_turn_only():
    """Six tokens in three turns with advantages 1, -2, 1/2, and log-ratios of mean ln 0.988.

    Objective: mean of s A_t, so the gradient is s A_t / 6, here 0.165, -0.329, 0.082. A ratio differentiated through
    its mean would give every token the same s mean(A) / 6 = -0.0137.
    """
    log_ratios = [math.log(0.988) + d for d in (0.2, -0.1, -0.1, 0.3, -0.2, -0.1)]
    gradient = single(log_ratios, [1, 1, 1, -2, -2, 0.5], turns=[0, 0, 0, 1, 1, 2])
    s = 0.988
    assert gradient == pytest.approx([s / 6] * 3 + [-2 * s / 6] * 2 + [0.5 * s / 6], abs=1e-12)
    assert [round(g, 3) for g in gradient] == [0.165, 0.165, 0.165, -0.329, -0.329, 0.082]


def test_a_turn_without_an_advantage_has_no_gradient_beside_one_that_has():
    assert single([0.0] * 4, [0, 0, 3, 3]) == pytest.approx([0, 0, 0.75, 0.75], abs=1e-15)


def test_at_equal_policies_every_unit_gives_the_policy_gradient():
    """s = 1: advantage over token count, whatever the unit."""
    for unit in ("trajectory", "turn", "token"):
        assert single([0.0] * 4, [1, 1, -1, -1], unit, [0, 0, 1, 1]) == pytest.approx([0.25, 0.25, -0.25, -0.25])


def test_every_episode_weighs_one_however_long_it_is():
    """Episodes of 1, 10 and 100 tokens with the same advantage: gradients of each sum to the same."""
    for num_tokens in (1, 10, 100):
        assert sum(single([0.0] * num_tokens, [2.0] * num_tokens)) == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
def test_what_stands_outside_the_mask_changes_nothing(unit, garbage):
    e = episodes(1)
    clean, clean_gradient = run(e, unit, kl_coef=0.3)
    dirty, dirty_gradient = run(e, unit, kl_coef=0.3, garbage=garbage)
    assert dirty.loss.item() == clean.loss.item()
    assert np.array_equal(dirty_gradient, clean_gradient)


def test_a_nan_inside_the_mask_is_not_hidden():
    e = episodes(1)
    e["now"][0, 3] = float("nan")
    assert math.isnan(run(e, "trajectory")[0].loss.item())


@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
def test_float32_agrees_with_float64(unit):
    e = episodes(2)
    exact, exact_gradient = run(e, unit, kl_coef=0.3)
    single_precision = {
        key: value.astype(np.float32) if value.dtype == np.float64 else value for key, value in e.items()
    }
    output, gradient = run(single_precision, unit, kl_coef=0.3)
    assert output.loss.dtype == torch.float32
    # inputs of order 3 rounded at 6e-8, summed over some hundred tokens
    assert output.loss.item() == pytest.approx(exact.loss.item(), abs=2e-6)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=0, atol=2e-6)


def test_k3_is_accurate_where_one_minus_one_cancels():
    # x = 1e-4: x^2/2 + x^3/6; exp(x) - 1 - x in float32 would give 0 or 6e-8 or 1.2e-7
    assert k3(torch.tensor(1e-4)).item() == pytest.approx(1e-8 / 2 + 1e-12 / 6, rel=2e-3)


def test_k3_estimates_the_divergence_in_the_right_direction():
    """The expectation of k3 over p is KL(p || q) itself, for these two 0.635; reversed it would be 0.968."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.7, 0.2, 0.1], [0.2, 0.3, 0.5]))
    estimate = (p * k3(q.log() - p.log())).sum().item()
    assert estimate == pytest.approx(sum(p * (p / q).log()).item(), abs=1e-12)
    assert round(estimate, 3) == 0.635
