"""Facts about the loss that need no reference implementation: what equals what, and what each option is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gspo_gym.errors import RecordError
from gspo_gym.learning.losses import Denominators, count_denominators, estimate_kl, k3, policy_loss, turn_keys
from gspo_gym.learning.settings import LossSettings

CLIP_LOW, CLIP_HIGH = 0.08, 0.12
UNITS = ["trajectory", "segment", "turn", "token"]
STEP = 1e-6  # of central differences; in float64 their error is about STEP ** 2 + 1e-16 / STEP = 1e-10


class Batch:
    """Rows of sampled tokens: trajectory and turns of each row are given, everything else is drawn.

    `turns` has one entry per row: the turn of each of its tokens, or -1 for a token that was not sampled. Logprobs are
    NaN where nothing was sampled.
    """

    def __init__(self, turns, trajectories, *, seed=0, drift=0.15):
        generator = torch.Generator().manual_seed(seed)
        width = 1 + max(len(row) for row in turns)
        self.turn = torch.tensor([[-1, *row, *[-1] * (width - 1 - len(row))] for row in turns])
        self.mask = self.turn >= 0
        self.trajectory = torch.tensor(trajectories)
        shape = self.turn.shape

        def draw(scale):
            values = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            return torch.where(self.mask, values, float("nan"))

        self.old, self.advantages = draw(1.0) - 3, draw(1.0)
        self.now = self.old + draw(drift)
        self.reference = self.now + draw(0.5)
        self.entropy = draw(1.0).abs()
        self.correction = draw(1.0).exp()

    def run(self, *, denominators=None, everything=False, correction=None, **settings):
        """The loss and its gradient [B, T]; `everything`: with KL, entropy bonus and correction on."""
        now = self.now.clone().requires_grad_(True)
        if everything:
            settings |= {"kl_coef": 0.3, "kl_importance_weighted": True, "entropy_coef": 0.1}
            correction = self.correction
        output = policy_loss(
            now,
            self.old,
            action_mask=self.mask,
            turn_index=self.turn,
            trajectory_index=self.trajectory,
            advantages=self.advantages,
            settings=LossSettings(**{"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH} | settings),
            denominators=denominators or count_denominators(self.mask, self.turn, self.trajectory),
            ref_logprobs=self.reference,
            entropy=self.entropy,
            correction=correction,
        )
        output.loss.backward()
        return output.loss.item(), now.grad, output.stats


def assert_same(first, second):
    """Loss and gradient up to the rounding of sums in another order."""
    assert first[0] == pytest.approx(second[0], abs=1e-14)
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=1e-14)


@pytest.fixture
def ragged():
    """Three trajectories in five rows, with masked tokens inside of turns, and a row without sampled tokens."""
    turns = [[0, 0, -1, 0, 1], [0, -1, -1], [2, 2, 3, -1, 3, 3], [-1, -1], [0, 1, 1]]
    return Batch(turns, [0, 1, 0, 1, 2])


# What equals what


def plain_gspo(batch, at, advantage_of):
    """Equations 5 and 7 of arXiv 2507.18071: one differentiable ratio and one term per trajectory, no stop-gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for i, A in enumerate(advantage_of):
        tokens = batch.mask & (batch.trajectory == i)[:, None]
        s = (at - batch.old)[tokens].mean().exp()
        total = total - torch.minimum(s * A, s.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * A)
    return total / len(advantage_of)


@pytest.mark.parametrize("seed", range(8))
def test_with_one_advantage_per_trajectory_the_token_form_is_plain_gspo(seed):
    turns = [[0, 0, -1, 0, 1], [0, -1, 0], [2, 2, 3, -1, 3, 3], [0, 1, 1], [0, 0]]
    batch = Batch(turns, [0, 1, 0, 2, 3], seed=seed, drift=0.25)
    advantage_of = torch.tensor(np.random.default_rng(seed).normal(0, 1, 4))
    batch.advantages = advantage_of[batch.trajectory][:, None].expand_as(batch.old)
    at = batch.now.clone().requires_grad_(True)
    expected = plain_gspo(batch, at, advantage_of)
    expected.backward()
    assert_same(batch.run(), (expected.item(), torch.where(batch.mask, at.grad, 0.0)))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("name", "alias"),
    [("grpo", "seq-mean-token-mean"), ("bnpo", "token-mean"), ("dr_grpo", "seq-mean-token-sum-norm")],
)
def test_the_names_of_trl_are_aliases(ragged, unit, name, alias):
    options = {"norm_length": 7} if name == "dr_grpo" else {}
    first = ragged.run(unit=unit, aggregation=name, everything=True, **options)
    second = ragged.run(unit=unit, aggregation=alias, everything=True, **options)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def test_dapo_over_one_step_is_the_token_mean(ragged):
    first, second = (ragged.run(aggregation=name, everything=True) for name in ("dapo", "token-mean"))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def test_dapo_over_the_steps_of_a_batch_sums_to_the_token_mean_of_the_batch():
    steps = [Batch([[0] * n for n in lengths], range(len(lengths)), seed=n) for n, lengths in enumerate([(5, 2), (3,)])]
    num_tokens = 10
    of_steps = [
        step.run(
            aggregation="dapo",
            denominators=count_denominators(step.mask, step.turn, step.trajectory, num_batch_tokens=num_tokens),
        )[0]
        for step in steps
    ]
    means = [step.run(aggregation="token-mean")[0] for step in steps]
    assert sum(of_steps) == pytest.approx((7 * means[0] + 3 * means[1]) / num_tokens, abs=1e-14)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "turn-mean-token-mean", "token-mean"])
def test_with_one_turn_in_each_episode_a_turn_is_a_trajectory(aggregation):
    batch = Batch([[3, 3, -1, 3], [0, -1, 0, 0, 0], [3]], [0, 1, 0])
    by_turn = batch.run(unit="turn", aggregation=aggregation, everything=True)
    assert_same(by_turn, batch.run(unit="trajectory", aggregation=aggregation, everything=True))
    over_turns = batch.run(unit="trajectory", aggregation="turn-mean-token-mean", everything=True)
    assert_same(over_turns, batch.run(unit="trajectory", aggregation="seq-mean-token-mean", everything=True))


def test_with_one_row_in_each_episode_a_segment_is_a_trajectory():
    batch = Batch([[0, 0, -1, 1], [0, -1, 1, 1, 2], [3]], [1, 2, 0])
    assert_same(batch.run(unit="segment", everything=True), batch.run(unit="trajectory", everything=True))


def test_with_one_turn_in_each_row_a_segment_is_a_turn():
    batch = Batch([[0, 0, -1, 0], [1, -1, 1], [2], [0, 0, 0]], [0, 0, 0, 1])
    assert_same(batch.run(unit="segment", everything=True), batch.run(unit="turn", everything=True))


def test_with_one_token_in_each_turn_a_turn_is_a_token():
    batch = Batch([[0, 1, -1, 2], [3, -1, 4], [0, 1]], [0, 0, 1])
    assert_same(batch.run(unit="turn", everything=True), batch.run(unit="token", everything=True))


def test_episodes_of_equal_length_weigh_the_same_under_every_mean():
    """Four tokens each: 1 / (N * 4) = 1 / tokens = 1 / (N * norm_length) with norm_length 4; turns have two each."""
    batch = Batch([[0, 0, 1, 1], [0, -1, 0, 1, -1, 1], [0, 0], [1, 1]], [0, 1, 2, 2])
    means = ["grpo", "bnpo", "dapo", "turn-mean-token-mean"]
    results = [batch.run(aggregation=name, everything=True) for name in means]
    results.append(batch.run(aggregation="dr_grpo", norm_length=4, everything=True))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("unit", UNITS)
def test_options_that_are_off_are_those_that_cannot_act(ragged, unit):
    plain = ragged.run(unit=unit)
    assert_same(ragged.run(unit=unit, correction=torch.ones_like(ragged.old)), plain)
    assert_same(ragged.run(unit=unit, dual_clip=1e6), plain)
    assert_same(ragged.run(unit=unit, kl_coef=1e-30, entropy_coef=1e-30), plain)


def test_one_correction_for_all_tokens_scales_the_policy_term_alone(ragged):
    plain, corrected = (
        ragged.run(kl_coef=0.3)[2],
        ragged.run(kl_coef=0.3, correction=torch.full_like(ragged.old, 0.25))[2],
    )
    assert corrected.policy_loss.item() == pytest.approx(0.25 * plain.policy_loss.item(), abs=1e-15)
    assert corrected.kl_loss.item() == plain.kl_loss.item()


def test_turns_are_numbered_by_trajectory_and_then_by_turn():
    trajectory, turn = torch.tensor([0, 0, 1, 1, 1, 3, 3]), torch.tensor([0, 2, 0, 2, 2, 0, 1])
    keys = turn_keys(trajectory, turn)
    assert torch.unique(keys, return_inverse=True)[1].tolist() == [0, 1, 2, 3, 3, 4, 5]
    assert len(turn_keys(trajectory[:0], turn[:0])) == 0


# Who gets which gradient


def single(log_ratios, advantages, unit="trajectory", turns=None, **settings):
    """Gradient of the *objective* (minus the loss) for one trajectory, with clips that do not act."""
    batch = Batch([turns or [0] * len(log_ratios)], [0])
    batch.old = torch.zeros_like(batch.old)
    batch.now = torch.tensor([[0.0, *log_ratios]], dtype=torch.float64)
    batch.advantages = torch.tensor([[0.0, *advantages]], dtype=torch.float64)
    gradient = batch.run(unit=unit, **{"clip_low": 0.9, "clip_high": 9.0} | settings)[1]
    return (-gradient[0, 1:]).tolist()


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
    for unit in UNITS:
        assert single([0.0] * 4, [1, 1, -1, -1], unit, [0, 0, 1, 1]) == pytest.approx([0.25, 0.25, -0.25, -0.25])


def test_every_episode_weighs_one_however_long_it_is():
    """Episodes of 1, 10 and 100 tokens with the same advantage: gradients of each sum to the same."""
    for num_tokens in (1, 10, 100):
        assert sum(single([0.0] * num_tokens, [2.0] * num_tokens)) == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("unit", UNITS)
def test_beyond_its_clip_a_token_has_no_gradient(unit):
    """Log-ratios of +-0.5 with the advantage of the side that clips, and of -1 with a dual clip at 2 for e > 2."""
    options = {"clip_low": 0.2, "clip_high": 0.2}
    assert single([0.5] * 3, [1.0] * 3, unit, **options) == [0, 0, 0]
    assert single([-0.5] * 3, [-1.0] * 3, unit, **options) == [0, 0, 0]
    assert single([1.0] * 3, [-1.0] * 3, unit, dual_clip=2.0, **options) == [0, 0, 0]
    assert all(g < 0 for g in single([1.0] * 3, [-1.0] * 3, unit, **options))


def test_log_ratios_of_a_thousand_leave_loss_and_gradient_finite():
    for log_ratio, advantage in ((1e3, 1.0), (1e3, -1.0), (-1e3, 1.0), (-1e3, -1.0), (1e3, 0.0)):
        assert np.isfinite(single([log_ratio], [advantage])).all()


# The estimates of KL


def test_k3_is_accurate_where_one_minus_one_cancels():
    # x = 1e-4: x^2/2 + x^3/6; exp(x) - 1 - x in float32 would give 0 or 6e-8 or 1.2e-7
    assert k3(torch.tensor(1e-4)).item() == pytest.approx(1e-8 / 2 + 1e-12 / 6, rel=2e-3)


def test_the_statistic_of_k3_is_not_cut_where_one_token_decides_the_mean():
    # one token in 1000 at x = 5: (e^5 - 1 - 5) / 1000 = 0.1424 nats; cut at 10 nats it would be 0.01
    log_ratios = torch.cat([torch.zeros(999), torch.tensor([5.0])])
    assert k3(log_ratios).mean().item() == pytest.approx((math.exp(5) - 6) / 1000, rel=1e-6)
    assert k3(torch.tensor(40.0)).item() == pytest.approx(math.exp(20) - 21, rel=1e-9)  # 40 counts as 20


def test_k1_and_k3_estimate_the_divergence_in_the_right_direction():
    """The expectation over p is KL(p || q) itself, for these two 0.635; reversed, k3 would give 0.968."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.7, 0.2, 0.1], [0.2, 0.3, 0.5]))
    divergence = sum(p * (p / q).log()).item()
    assert round(divergence, 3) == 0.635
    for estimator in ("k1", "k3"):
        estimate = (p * estimate_kl(q.log() - p.log(), estimator, max_nats=10.0)).sum().item()
        assert estimate == pytest.approx(divergence, abs=1e-12)
    reversed_k3 = (p * estimate_kl(p.log() - q.log(), "k3", max_nats=10.0)).sum().item()
    assert round(reversed_k3, 3) == 0.968


def gradient_of_expectation(logits, p_old, q, **settings):
    """Gradient by the logits of the KL term's expectation over samples of p_old, by the loss with one token per
    outcome, its term scaled by the outcome's probability."""
    logprobs = torch.log_softmax(logits, 0)
    total = torch.zeros((), dtype=torch.float64)
    for outcome in range(len(p_old)):
        term = policy_loss(
            logprobs[outcome].reshape(1, 1),
            p_old.log()[outcome].reshape(1, 1),
            action_mask=torch.ones(1, 1, dtype=torch.bool),
            turn_index=torch.zeros(1, 1, dtype=torch.int64),
            trajectory_index=torch.zeros(1, dtype=torch.int64),
            advantages=torch.zeros(1, 1),
            settings=LossSettings(unit="token", kl_coef=1.0, kl_clamp=100.0, **settings),
            denominators=Denominators(1, 1, 1, 1),
            ref_logprobs=q.log()[outcome].reshape(1, 1),
        ).loss
        total = total + p_old[outcome] * term
    return torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_weighted_kl_has_the_gradient_of_the_divergence(estimator):
    """Samples of an older policy: weighted, the expected gradient is that of KL(p || q), where p is the present one. At
    p_old = p, k1 without the weight has none at all, and k2 has the right one (p = old)."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    p = torch.softmax(logits, 0)
    (expected,) = torch.autograd.grad((p * (p / q).log()).sum(), logits)
    p_old = torch.tensor([0.6, 0.25, 0.15], dtype=torch.float64)
    actual = gradient_of_expectation(logits, p_old, q, kl_estimator=estimator, kl_importance_weighted=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    on_policy = gradient_of_expectation(logits, p.detach(), q, kl_estimator="k1")
    torch.testing.assert_close(on_policy, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    on_policy = gradient_of_expectation(logits, p.detach(), q, kl_estimator="k2")
    torch.testing.assert_close(on_policy, expected, rtol=0, atol=1e-12)


# What is refused


def test_a_coefficient_without_its_tensor_is_refused(ragged):
    ragged.reference = ragged.entropy = None
    for coefficient, needed in (("kl_coef", "ref_logprobs"), ("entropy_coef", "entropy")):
        with pytest.raises(RecordError, match=f"{coefficient} 0.5 needs {needed}, got None"):
            ragged.run(**{coefficient: 0.5})


@pytest.mark.parametrize("counts", [(0, 1, 1, 1), (2, 1, 3, 3), (1, 3, 2, 3), (1, 1, 3, 2)])
def test_denominators_that_contradict_each_other_are_refused(counts):
    with pytest.raises(RecordError, match=r"num_turns <= num_tokens.*got " + ", ".join(map(str, counts))):
        Denominators(*counts)


def test_denominators_of_nothing_are_refused():
    with pytest.raises(RecordError, match="got 0, 0, 0, 0"):
        count_denominators(
            torch.zeros(2, 3, dtype=torch.bool), torch.full((2, 3), -1), torch.zeros(2, dtype=torch.int64)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dual_clip": 1.1, "clip_high": 0.2},
            r"expected more than 1 \+ loss.clip_high = 1.2, where the other clip is, got 1.1",
        ),
        ({"kl_estimator": "k2"}, "kl_estimator: has no effect, because kl_coef is 0"),
        ({"kl_clamp": 5.0}, "kl_clamp: has no effect"),
        ({"kl_importance_weighted": True}, "kl_importance_weighted: has no effect"),
        ({"aggregation": "dr_grpo"}, "norm_length: aggregation 'dr_grpo' divides by it, got none"),
        ({"norm_length": 5}, "norm_length: has no effect with aggregation 'seq-mean-token-mean'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LossSettings(**settings)


def test_the_dual_clips_of_roll_are_accepted():
    """1 + 2 * pg_clip: 1.4 at its default range, 1.0006 at 3e-4."""
    assert LossSettings(clip_low=0.2, clip_high=0.2, dual_clip=1 + 2 * 0.2).dual_clip == 1.4
    assert LossSettings(clip_low=3e-4, clip_high=4e-4, dual_clip=1 + 2 * 3e-4).dual_clip == 1.0006


def cut(d, A):  # d, a token's log-ratio, as GMPO counts it, with 0.8 and 1.1 as bounds of the ratio
    return min(d, math.log(1.1)) if A > 0 else max(d, math.log(0.8))


def cispo(A, s, **_):
    return min(s, 1.1) * A, min(s, 1.1) * A


def sapo(A, s, **_):
    tau = 1.5 if A > 0 else 2.5
    gate = 1 / (1 + math.exp(-tau * (s - 1)))
    return 4 / tau * gate * A, 4 * gate * (1 - gate) * s * A


def gmpo(A, unit, d, **_):
    g = math.exp(sum(cut(*token) for token in unit) / len(unit))
    return g * A, g * A if cut(d, A) == d else 0.0


def dppo(A, s, p, mu, **_):
    value = 0.0 if (p - mu > 0.004 and A > 0) or (mu - p > 0.002 and A < 0) else min(s, 20) * A
    return value, value


def vespo(A, unit, **_):
    w = max(1e-8, math.prod(math.exp(d) for d, _ in unit))
    weight = w**2 * math.exp(3 * (1 - w)) if A >= 0 else w**3 * math.exp(2 * (1 - w))
    return weight * A, weight * A


# The value that each maximises at a token and its slope, and the settings that say the same.
SURROGATES = {
    cispo: {"unit": "token", "clip_high": 0.1},
    sapo: {"unit": "turn", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5},
    gmpo: {"unit": "turn", "clip_low": 0.2, "clip_high": 0.1},
    dppo: {"unit": "token", "clip_low": 0.002, "clip_high": 0.004},
    vespo: {"unit": "trajectory"},
}


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("drift", [0.3, 6.0])  # beyond a ratio of 20, too
def test_each_surrogate_has_the_value_and_the_slope_of_its_formula(ragged, surrogate, drift):
    batch, options = ragged, SURROGATES[surrogate]
    batch.now = batch.old + drift / 0.15 * (batch.now - batch.old)
    settings = {"surrogate": surrogate.__name__, "aggregation": "token-mean", **options}
    now = batch.now.clone().requires_grad_(True)
    counts = count_denominators(batch.mask, batch.turn, batch.trajectory)
    tensors = {"action_mask": batch.mask, "turn_index": batch.turn, "trajectory_index": batch.trajectory}
    tensors |= {"advantages": batch.advantages}
    output = policy_loss(now, batch.old, **tensors, settings=LossSettings(**settings), denominators=counts)
    output.loss.backward()
    units, places = {}, [(b, t) for b, t in batch.mask.nonzero().tolist()]
    keys = {"token": lambda b, t: (b, t), "trajectory": lambda b, _: int(batch.trajectory[b])}
    keys["turn"] = lambda b, t: (int(batch.trajectory[b]), int(batch.turn[b, t]))
    d = {(b, t): float(batch.now[b, t] - batch.old[b, t]) for b, t in places}
    for place in places:
        units.setdefault(keys[options["unit"]](*place), []).append((d[place], float(batch.advantages[place])))
    values, slopes = [], torch.zeros_like(now)
    for place in places:
        unit = units[keys[options["unit"]](*place)]
        s = math.exp(sum(of_token for of_token, _ in unit) / len(unit))
        probabilities = {"p": float(batch.now[place].exp()), "mu": float(batch.old[place].exp())}
        value, slope = surrogate(float(batch.advantages[place]), s=s, unit=unit, d=d[place], **probabilities)
        values.append(value)
        slopes[place] = -slope / len(places)
    assert (-len(places) * output.tokens.share).tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(now.grad, slopes, rtol=1e-9, atol=1e-12)
