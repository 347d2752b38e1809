"""From a turn's reward to the gradient of that turn's tokens, through every stage and without a mock.

Per-turn rewards -> discounted return-to-go -> leave-one-out baseline in which a finished sibling counts as 0 ->
advantages [B, T] -> GSPO-token. At the policy that sampled, s = 1, and a token's gradient is -A / (N |y_i|) with the
advantage A of its turn: each expected number is that.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.losses import Denominators, policy_loss
from gspo_gym.learning.settings import AdvantageSettings, LossSettings
from gspo_gym.learning.step_rewards import StepRewardSettings

TURN = AdvantageSettings(level="turn", scale="none", discount=0.5)
ROUNDING = 1e-6


def gradient_of(batch, *, unit, shift=0.0, clip=0.2):
    """[B, T] gradient of the loss by the logprobs now, which are `shift` above the old ones."""
    old = batch.rollout_logprobs.double()
    sampled = batch.action_mask
    turns = set(
        zip(
            batch.trajectory_index[:, None].expand_as(sampled)[sampled].tolist(),
            batch.turn_index[sampled].tolist(),
            strict=True,
        )
    )
    now = (old + shift).requires_grad_()
    output = policy_loss(
        now,
        old,
        action_mask=batch.action_mask,
        turn_index=batch.turn_index,
        trajectory_index=batch.trajectory_index,
        advantages=batch.advantages,
        settings=LossSettings(unit=unit, clip_low=clip, clip_high=clip),
        denominators=Denominators(
            num_trajectories=batch.num_trajectories,
            num_turns=len(turns),
            num_tokens=batch.num_actions,
            num_batch_tokens=batch.num_actions,
        ),
    )
    (gradient,) = torch.autograd.grad(output.loss, now)
    return gradient


@pytest.fixture
def ragged(make_trajectory, make_group):
    """Two episodes of three turns (in two segments) and of two, of 1 + 2 + 1 and 3 + 1 sampled tokens."""
    first = make_trajectory([0.0, 1.0, 2.0], observation=2, action=[1, 2, 1], num_segments=2)
    second = make_trajectory([1.0, 0.0], observation=1, action=[3, 1], seed=1)
    return make_group(first, second)


# Returns-to-go with discount 1/2: first (0 + 1/2 * 2, 1 + 1/2 * 2, 2) = (1, 2, 2); second (1, 0), and 0 when over.
# Each is the other's baseline: (1 - 1, 2 - 0, 2 - 0) and (1 - 1, 0 - 2).
ADVANTAGES = {(0, 0): 0.0, (0, 1): 2.0, (0, 2): 2.0, (1, 0): 0.0, (1, 1): -2.0}
NUM_SAMPLED = {0: 4, 1: 4}


def expected_gradient(batch, advantages, s=1.0):
    """-s A / (N |y_i|) at the tokens of each turn, 0 elsewhere; N = 2."""
    expected = torch.zeros_like(batch.advantages, dtype=torch.float64)
    for (trajectory, turn), advantage in advantages.items():
        tokens = (batch.trajectory_index[:, None] == trajectory) & (batch.turn_index == turn)
        expected[tokens] = -s * advantage / (2 * NUM_SAMPLED[trajectory])
    return expected


@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
def test_a_turns_reward_moves_the_tokens_before_it_and_no_others(ragged, unit):
    batch = build_batch([ragged], TURN).batch
    assert batch.token_ids.shape[0] == 3, "two rows of the first episode and one of the second"
    gradient = gradient_of(batch, unit=unit)
    assert torch.allclose(gradient, expected_gradient(batch, ADVANTAGES), atol=ROUNDING)
    # and, read off by hand: |A| / (N |y|) = 2 / 8 at the 2 + 1 tokens of the first episode's later turns (to be raised)
    # and at the one token of the second's last (to be lowered)
    assert sorted(gradient[gradient != 0].tolist()) == pytest.approx([-0.25] * 3 + [0.25], abs=ROUNDING)


@pytest.mark.parametrize("unit", ["trajectory", "turn", "token"])
def test_the_ratio_scales_every_turn_by_itself_once_the_policy_has_moved(ragged, unit):
    # every token's logprob rose by 0.1, so the geometric mean over any unit is exp(0.1) = 1.105, inside the clip of 0.2
    batch = build_batch([ragged], TURN).batch
    gradient = gradient_of(batch, unit=unit, shift=0.1)
    assert torch.allclose(gradient, expected_gradient(batch, ADVANTAGES, s=1.1051709), atol=ROUNDING)


def test_a_clip_that_binds_stops_the_turns_that_would_go_further_and_only_those(ragged):
    # s = 1.105 is above a ceiling of 1.05: positive advantages stop, negative ones go on
    batch = build_batch([ragged], TURN).batch
    gradient = gradient_of(batch, unit="trajectory", shift=0.1, clip=0.05)
    only_negative = {key: min(advantage, 0.0) for key, advantage in ADVANTAGES.items()}
    assert torch.allclose(gradient, expected_gradient(batch, only_negative, s=1.1051709), atol=ROUNDING)


def test_opposite_turns_of_one_episode_move_opposite_ways_where_pooled_credit_moves_none(make_trajectory, make_group):
    # both return 0: by turns the first should do its first turn and not its second, and the other the reverse
    group = make_group(make_trajectory([1.0, -1.0], action=2), make_trajectory([-1.0, 1.0], action=2, seed=1))
    # to go (0, -1) and (0, 1): the first turns are alike, although one earned 1 and one -1, because what followed made
    # up for it; so only the second turns differ
    by_turn = gradient_of(build_batch([group], TURN.model_copy(update={"discount": 1.0})).batch, unit="trajectory")
    assert by_turn[0][by_turn[0] != 0].tolist() == pytest.approx([2 / 8] * 2)
    assert by_turn[1][by_turn[1] != 0].tolist() == pytest.approx([-2 / 8] * 2)
    pooled = gradient_of(build_batch([group], AdvantageSettings()).batch, unit="trajectory")
    assert not pooled.any()


def test_events_steer_the_turn_that_reached_them(make_trajectory, make_group):
    trajectories = [make_trajectory([0.0, 0.0], action=1, seed=i) for i in range(2)]
    first, last = trajectories[0].turns
    turns = (first, dataclasses.replace(last, events=("wood",)))
    group = make_group(dataclasses.replace(trajectories[0], turns=turns), trajectories[1])
    step_rewards = StepRewardSettings(mode="decision_stepwise", indicator_lambda=0.5)
    settings = AdvantageSettings(level="turn", scale="none", discount=0.2)
    batch = build_batch([group], settings, step_rewards=step_rewards).batch
    # 1 + 0.5 at the second turn, 0.2 * 1.5 at the one before; the other earned nothing; N = 2, |y| = 2
    gradient = gradient_of(batch, unit="trajectory")
    assert gradient[0][batch.action_mask[0]].tolist() == pytest.approx([-0.3 / 4, -1.5 / 4], abs=ROUNDING)
    assert gradient[1][batch.action_mask[1]].tolist() == pytest.approx([0.3 / 4, 1.5 / 4], abs=ROUNDING)
