"""The loss against a reference written as loops over tokens in plain Python floats: every combination of its options.

What is differentiated: at logprobs l0 the loss is, as a function of the logprobs l near l0 and of the entropies H,

    f(l, H) = sum_t a_t (- w_t min(min(r_t, c) A_t, clip(r_t) A_t) + kl_coef KL_t(l) - entropy_coef H_t),

with r_t = s_U(l0) * exp(l_t - l0_t), the unit's ratio s_U frozen at l0. Each term depends on its own token only, so
that the gradient of the loss at l0 must be the central difference of each token's term.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch

from gspo_gym.learning.losses import Denominators, count_denominators, policy_loss
from gspo_gym.learning.settings import LossSettings

CLIP_LOW, CLIP_HIGH, DUAL_CLIP, NORM_LENGTH = 0.08, 0.12, 1.25, 40
STEP = 1e-6  # of the differences; in float64 their error is about STEP ** 2 + 1e-16 / STEP = 1e-10
STEP_COUNTS = Denominators(num_trajectories=7, num_turns=50, num_tokens=123, num_batch_tokens=456)

UNITS = ["trajectory", "segment", "turn", "token"]
AGGREGATIONS = [
    "seq-mean-token-mean", "grpo", "turn-mean-token-mean", "token-mean", "bnpo", "dapo", "seq-mean-token-sum",
    "seq-mean-token-sum-norm", "dr_grpo",
]  # fmt: skip
NUM_SEEDS = 8
KL = [
    {},
    {"kl_coef": 0.3, "kl_estimator": "k1", "kl_clamp": 0.4},
    {"kl_coef": 0.3, "kl_estimator": "k2", "kl_clamp": 0.4},
    {"kl_coef": 0.3, "kl_estimator": "k3", "kl_clamp": 0.4},
    {"kl_coef": 0.3, "kl_estimator": "k3", "kl_clamp": 1000.0},
    {"kl_coef": 0.3, "kl_estimator": "k1", "kl_clamp": 1000.0, "kl_importance_weighted": True},
    {"kl_coef": 0.3, "kl_estimator": "k2", "kl_clamp": 1000.0, "kl_importance_weighted": True},
    {"kl_coef": 0.3, "kl_estimator": "k3", "kl_clamp": 0.4, "kl_importance_weighted": True},
]


def episodes(seed):
    """Five trajectories over nine rows of 14: rows in mixed order, ragged turns, masked tokens inside of turns, turn
    numbers that skip and repeat in other trajectories, advantages of both signs by turn, a row without sampled tokens
    and a trajectory (number 9) without any."""
    rng = np.random.default_rng(seed)
    trajectory_index = np.array([3, 0, 1, 0, 4, 1, 2, 0, 3, 9])
    B, T = len(trajectory_index), 14
    mask = rng.random((B, T)) < 0.6
    mask[:, 0] = False
    mask[2, 5:] = False  # a short row
    mask[:, 3] = True  # no other row without a sampled token
    mask[8:] = False
    turn = np.where(mask, 2 * (np.arange(T) // 4)[None, :] + 8 * (np.arange(B) % 2)[:, None], -1)
    old = -rng.random((B, T)) * 3
    # drifts by trajectory and turn move units out of the clip range, noise within a unit makes its tokens differ
    drift = np.array([0.3, -0.3, 0.0, 0.17, 0.02, 0, 0, 0, 0, 0])[trajectory_index][:, None]
    drift = drift + rng.normal(0, 0.15, (B, 20))
    now = old + np.take_along_axis(drift, np.maximum(turn, 0), 1) + rng.normal(0, 0.1, (B, T))
    by_turn = rng.normal(0, 1, (10, 20))
    by_turn[2, :] = 0.0  # an episode without a policy gradient
    w = np.where(rng.random((B, T)) < 0.2, 0.0, rng.uniform(0.5, 2.0, (B, T)))
    return {
        "mask": mask,
        "turn": turn,
        "row_of": trajectory_index,
        "A": np.where(mask, by_turn[trajectory_index[:, None], np.maximum(turn, 0)], 0.0),
        "old": old,
        "now": now,
        "ref": now + rng.normal(0, 0.5, (B, T)) + 25.0 * (rng.random((B, T)) < 0.05) * rng.choice([-1, 1], (B, T)),
        "H": rng.random((B, T)) * 2,
        "w": w,
    }


def sampled(e):
    return [(int(b), int(t)) for b, t in np.argwhere(e["mask"])]


def unit_of(e, b, t, unit):
    trajectory, turn = int(e["row_of"][b]), int(e["turn"][b, t])
    return {"trajectory": (trajectory,), "segment": (b,), "turn": (trajectory, turn), "token": (b, t)}[unit]


def reference_ratios(e, unit):
    """s of each unit, by collecting the log-ratios of its tokens."""
    collected = {}
    for b, t in sampled(e):
        collected.setdefault(unit_of(e, b, t, unit), []).append(e["now"][b, t] - e["old"][b, t])
    return {key: math.exp(sum(values) / len(values)) for key, values in collected.items()}


@functools.cache
def reference_shares(seed, aggregation):
    """What each token weighs."""
    e, counts, shares = episodes(seed), STEP_COUNTS, {}
    for b, t in sampled(e):
        same_episode = [place for place in sampled(e) if e["row_of"][place[0]] == e["row_of"][b]]
        same_turn = [place for place in same_episode if e["turn"][place] == e["turn"][b, t]]
        shares[b, t] = {
            "seq-mean-token-mean": 1 / counts.num_trajectories / len(same_episode),
            "grpo": 1 / counts.num_trajectories / len(same_episode),
            "turn-mean-token-mean": 1 / counts.num_turns / len(same_turn),
            "token-mean": 1 / counts.num_tokens,
            "bnpo": 1 / counts.num_tokens,
            "dapo": 1 / counts.num_batch_tokens,
            "seq-mean-token-sum": 1 / counts.num_trajectories,
            "seq-mean-token-sum-norm": 1 / counts.num_trajectories / NORM_LENGTH,
            "dr_grpo": 1 / counts.num_trajectories / NORM_LENGTH,
        }[aggregation]
    return shares


def reference_kl(x, settings):
    """x = log(now / reference)."""
    x = max(-20.0, min(20.0, x))
    estimate = {"k1": x, "k2": x**2 / 2, "k3": math.exp(-x) - 1 + x}[settings.kl_estimator]
    return max(-settings.kl_clamp, min(settings.kl_clamp, estimate))


def reference_term(e, place, ratio, settings, *, now, H):
    """The three terms of one token, before its share, with its logprob at `now` and its entropy at `H`."""
    A, w = float(e["A"][place]), float(e["w"][place])
    r = ratio * math.exp(now - e["now"][place])
    if A >= 0:
        objective = min(r, 1 + CLIP_HIGH) * A
    else:
        objective = max(r, 1 - CLIP_LOW) * A
        if settings.dual_clip is not None:
            objective = max(objective, settings.dual_clip * A)
    kl = 0.0
    if settings.kl_coef > 0:
        kl = reference_kl(now - float(e["ref"][place]), settings)
        if settings.kl_importance_weighted:
            kl *= r
    return -w * objective, settings.kl_coef * kl, -settings.entropy_coef * H


def reference_gradients(e, place, ratio, settings, *, now, H):
    """Central differences of a token's terms by its logprob and by its entropy."""

    def f(now, H):
        return sum(reference_term(e, place, ratio, settings, now=now, H=H))

    by_logprob = (f(now + STEP, H) - f(now - STEP, H)) / (2 * STEP)
    return by_logprob, (f(now, H + STEP) - f(now, H - STEP)) / (2 * STEP)


def run(e, settings, *, garbage=None):
    """The output, the gradient by the logprobs and by the entropies."""
    tensors = {key: torch.tensor(value) for key, value in e.items()}
    if garbage is not None:
        for name in ("now", "old", "ref", "A", "H", "w"):
            tensors[name] = torch.where(tensors["mask"], tensors[name], garbage)
    now, H = tensors["now"].requires_grad_(True), tensors["H"].requires_grad_(True)
    output = policy_loss(
        now,
        tensors["old"],
        action_mask=tensors["mask"],
        turn_index=tensors["turn"],
        trajectory_index=tensors["row_of"],
        advantages=tensors["A"],
        settings=settings,
        denominators=STEP_COUNTS,
        ref_logprobs=tensors["ref"] if settings.kl_coef > 0 else None,
        entropy=H,
        correction=tensors["w"],
    )
    output.loss.backward()
    return output, now.grad.numpy(), torch.zeros_like(H).numpy() if H.grad is None else H.grad.numpy()


def settings_of(unit, aggregation, **options):
    norm = {"norm_length": NORM_LENGTH} if aggregation in ("seq-mean-token-sum-norm", "dr_grpo") else {}
    return LossSettings(unit=unit, aggregation=aggregation, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, **norm, **options)


@pytest.mark.parametrize("kl", KL, ids=lambda kl: "-".join(str(value) for value in kl.values()) or "none")
@pytest.mark.parametrize("unit", UNITS)
def test_value_and_gradients_equal_the_loops_over_tokens(unit, kl):
    """Units x estimators and their bound x dual clip x entropy bonus x correction x aggregations."""
    for number, (dual_clip, entropy_coef, is_corrected) in enumerate(
        itertools.product([None, DUAL_CLIP], [0.0, 0.2], [True, False])
    ):
        e = episodes(number % NUM_SEEDS)
        if not is_corrected:
            e["w"] = np.ones_like(e["w"])
        options = {"dual_clip": dual_clip, "entropy_coef": entropy_coef} | kl
        settings = settings_of(unit, "seq-mean-token-mean", **options)
        ratios = reference_ratios(e, unit)
        terms, gradients = {}, {}
        for place in sampled(e):
            ratio = ratios[unit_of(e, *place, unit)]
            at = {"now": float(e["now"][place]), "H": float(e["H"][place])}
            terms[place] = sum(reference_term(e, place, ratio, settings, **at))
            gradients[place] = reference_gradients(e, place, ratio, settings, **at)
        for aggregation in AGGREGATIONS:
            output, by_logprob, by_entropy = run(e, settings_of(unit, aggregation, **options))
            shares = reference_shares(number % NUM_SEEDS, aggregation)
            what = f"{aggregation}, {options}, corrected: {is_corrected}"
            # 1e-12: some hundred roundings. 1e-8: of the differences; the largest terms are 1000 nats / N
            assert output.loss.item() == pytest.approx(
                sum(shares[p] * terms[p] for p in terms), rel=1e-12, abs=1e-12
            ), what
            expected = np.zeros((2, *by_logprob.shape))
            for place, gradient in gradients.items():
                expected[:, *place] = shares[place] * np.array(gradient)
            np.testing.assert_allclose(by_logprob, expected[0], rtol=1e-7, atol=1e-8, err_msg=what)
            np.testing.assert_allclose(by_entropy, expected[1], rtol=0, atol=1e-8, err_msg=what)


def is_cut(x, nats):
    """Whether k1, k2 and k3 of x = log(now / reference) have no gradient under this bound."""
    return [abs(x) > 20 or abs(estimate) > nats for estimate in (x, x * x / 2, math.exp(-x) - 1 + x)]


@pytest.mark.parametrize("unit", UNITS)
def test_the_loops_exercise_every_side_of_every_clip_and_no_kink(unit):
    """The comparison above means something only if tokens of all kinds occur in it, none within the differences' step
    of a place where the slope changes."""
    kinds, kl_kinds = set(), set()
    for seed in range(NUM_SEEDS):
        e = episodes(seed)
        ratios = reference_ratios(e, unit)
        for place in sampled(e):
            s = ratios[unit_of(e, *place, unit)]
            bounds = [1 - CLIP_LOW, 1 + CLIP_HIGH, DUAL_CLIP]
            assert min(abs(s - bound) for bound in bounds) > 2 * STEP, "differences would straddle a kink"
            kinds.add((sum(s > bound for bound in bounds), np.sign(e["A"][place])))
            x = e["now"][place] - e["ref"][place]
            for nats in (0.4, 1000.0):
                sides = {tuple(is_cut(x + sign * 2 * STEP, nats)) for sign in (1, -1)}
                assert len(sides) == 1, "differences would straddle a kink"
                kl_kinds |= {(nats, *cut) for cut in zip(("k1", "k2", "k3"), *sides, strict=True)}
    assert kinds >= set(itertools.product(range(4), (1, -1)))
    assert kl_kinds == set(itertools.product((0.4, 1000.0), ("k1", "k2", "k3"), (True, False)))


def reference_stats(e, unit):
    """The sums and counts of LossStats that are made of tokens."""
    ratios = reference_ratios(e, unit)
    s = {place: ratios[unit_of(e, *place, unit)] for place in sampled(e)}
    loses = [p for p in s if e["A"][p] < 0 and e["w"][p] > 0]
    gains = [p for p in s if e["A"][p] > 0 and e["w"][p] > 0]
    d = [e["now"][p] - e["old"][p] for p in s]
    x = [max(-20.0, min(20.0, e["ref"][p] - e["now"][p])) for p in s]
    return {
        "num_tokens": len(s),
        "num_trajectories": 5,
        "tokens_clipped_low": sum(s[p] < 1 - CLIP_LOW for p in loses),
        "tokens_clipped_high": sum(s[p] > 1 + CLIP_HIGH for p in gains),
        "tokens_dual_clipped": sum(s[p] > DUAL_CLIP for p in loses),
        "tokens_corrected": len(s),  # no weight of `episodes` is exactly 1
        "tokens_left_out": sum(e["w"][p] == 0 for p in s),
        "old_k1": -sum(d),
        "old_k3": sum(math.exp(v) - 1 - v for v in d),
        "ref_k1": sum(e["now"][p] - e["ref"][p] for p in s),
        "ref_k3": sum(math.exp(v) - 1 - v for v in x),
        "entropy_sum": sum(e["H"][p] for p in s),
    }


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seed", range(2))
def test_statistics_equal_the_loops_over_tokens(seed, unit):
    e = episodes(seed)
    options = {"dual_clip": DUAL_CLIP, "kl_coef": 0.3, "entropy_coef": 0.1}
    output = run(e, settings_of(unit, "token-mean", **options))[0]
    stats = output.stats
    for name, expected in reference_stats(e, unit).items():
        assert float(getattr(stats, name)) == pytest.approx(expected, rel=1e-12, abs=1e-9), name
    assert sorted(stats.unit_ratios.tolist()) == pytest.approx(sorted(reference_ratios(e, unit).values()), abs=1e-12)
    by_trajectory = sorted(math.log(s) for s in reference_ratios(e, "trajectory").values())
    assert sorted(stats.trajectory_log_ratios.tolist()) == pytest.approx(by_trajectory, abs=1e-12)
    parts = stats.policy_loss.item() + stats.kl_loss.item() + stats.entropy_loss.item()
    assert parts == pytest.approx(output.loss.item(), abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_denominators_are_counted_as_by_loops_over_tokens(seed):
    e = episodes(seed)
    places = sampled(e)
    turns = {(int(e["row_of"][b]), int(e["turn"][b, t])) for b, t in places}
    tensors = [torch.tensor(e[name]) for name in ("mask", "turn", "row_of")]
    expected = (5, len(turns), len(places))
    assert count_denominators(*tensors) == Denominators(*expected, num_batch_tokens=len(places))
    assert count_denominators(*tensors, num_batch_tokens=1000) == Denominators(*expected, num_batch_tokens=1000)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("unit", UNITS)
def test_what_stands_outside_the_mask_changes_nothing(unit, garbage):
    e = episodes(1)
    for aggregation in AGGREGATIONS:
        settings = settings_of(unit, aggregation, kl_coef=0.3, kl_importance_weighted=True, entropy_coef=0.1)
        clean, dirty = run(e, settings), run(e, settings, garbage=garbage)
        assert dirty[0].loss.item() == clean[0].loss.item()
        for actual, expected in zip(dirty[1:], clean[1:], strict=True):
            assert np.array_equal(actual, expected)
            assert not actual[~e["mask"]].any()


def test_a_nan_inside_the_mask_is_not_hidden():
    for name in ("now", "old", "A", "H", "w", "ref"):
        e = episodes(1)
        e[name][0, 3] = float("nan")
        settings = settings_of("trajectory", "grpo", kl_coef=0.3, entropy_coef=0.1)
        assert math.isnan(run(e, settings)[0].loss.item()), name


@pytest.mark.parametrize("unit", UNITS)
def test_float32_agrees_with_float64(unit):
    e = episodes(2)
    settings = settings_of(unit, "token-mean", dual_clip=DUAL_CLIP, kl_coef=0.3, entropy_coef=0.1)
    exact = run(e, settings)
    rounded = {key: value.astype(np.float32) if value.dtype == np.float64 else value for key, value in e.items()}
    output, *gradients = run(rounded, settings)
    assert output.loss.dtype == torch.float32
    # inputs of order 3 (references: 25) rounded at 6e-8, summed over some seventy tokens
    assert output.loss.item() == pytest.approx(exact[0].loss.item(), abs=2e-6)
    for actual, expected in zip(gradients, exact[1:], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
