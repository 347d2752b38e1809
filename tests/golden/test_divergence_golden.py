"""Exact divergences of a policy from its teacher, by hand, and the loss that is made of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gspo_gym.errors import RecordError
from gspo_gym.learning.head import ChunkedHead, OutputHead
from gspo_gym.learning.losses import LossOutput, TeacherScores, count_denominators, policy_loss
from gspo_gym.learning.settings import DistillationSettings, LossSettings
from gspo_gym.types import Sampling

# Of three tokens. KL(S || T) = .6 ln 3 + .3 ln (3/7) = .404978, with the slopes p (ln p - ln q - KL) in the logits;
# KL(T || S) = .2 ln (1/3) + .7 ln (7/3) = .373386, with the slopes p - q.
POLICY, TEACHER = (0.6, 0.3, 0.1), (0.2, 0.7, 0.1)
REVERSE = 0.6 * math.log(3) + 0.3 * math.log(3 / 7)
FORWARD = 0.2 * math.log(1 / 3) + 0.7 * math.log(7 / 3)
BY_HAND = {
    "reverse_kl": (REVERSE, [0.6 * (math.log(3) - REVERSE), 0.3 * (math.log(3 / 7) - REVERSE), -0.1 * REVERSE]),
    "forward_kl": (FORWARD, [0.4, -0.4, 0.0]),
}


def head(*, temperature: float = 1.0, top_k: int = 0, **parts: Any) -> ChunkedHead:
    """A head whose logits are its hidden states."""
    identity = torch.nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        identity.weight.copy_(torch.eye(3))
    sampling = Sampling(temperature=temperature, top_k=top_k)
    return ChunkedHead(OutputHead(identity, **parts), 3, sampling, 1 << 20, entropy_has_gradient=False)


def logits_of(probs: tuple[float, ...], *, shift: float) -> torch.Tensor:
    return (torch.tensor([probs], dtype=torch.float64).log() + shift).requires_grad_()


@pytest.mark.parametrize("divergence", BY_HAND)
def test_value_and_gradient_are_those_derived_by_hand(divergence: Any) -> None:
    """Whatever the token that was sampled, the policy's temperature and its truncation."""
    assert (round(REVERSE, 6), round(FORWARD, 6)) == (0.404978, 0.373386)
    assert [round(slope, 6) for slope in BY_HAND["reverse_kl"][1]] == [0.416181, -0.375683, -0.040498]
    value, slopes = BY_HAND[divergence]
    for token, own in ((0, head()), (1, head(temperature=0.5)), (2, head(top_k=1))):
        policy, teacher = logits_of(POLICY, shift=2.0), logits_of(TEACHER, shift=-1.0)
        target = torch.tensor([token])
        result = own.diverge(policy, head(), teacher, target, divergence, drops_out=False)
        assert result.tolist() == pytest.approx([value], abs=1e-12)
        (3.0 * result).sum().backward()
        assert policy.grad is not None
        assert policy.grad[0].tolist() == pytest.approx([3.0 * slope for slope in slopes], abs=1e-12)
        assert teacher.grad is None, "the teacher is a constant"


@pytest.mark.parametrize("divergence", BY_HAND)
def test_ids_beyond_the_tokenizer_have_no_part(divergence: Any) -> None:
    """Of tokens 0 and 1, the policy has (2/3, 1/3), the teacher (2/9, 7/9)."""
    policy, teacher = logits_of(POLICY, shift=0.0), logits_of(TEACHER, shift=0.0)
    p, q = (2 / 3, 1 / 3), (2 / 9, 7 / 9)
    pair = (p, q) if divergence == "reverse_kl" else (q, p)
    expected = sum(a * math.log(a / b) for a, b in zip(*pair, strict=True))
    own = head(num_token_ids=2)
    result = own.diverge(policy, own, teacher, torch.tensor([0]), divergence, drops_out=False)
    assert result.item() == pytest.approx(expected, abs=1e-12)
    result.sum().backward()
    assert policy.grad is not None
    assert policy.grad[0, 2] == 0.0


NAN = math.nan
MASK = torch.tensor([[False, True, True, True]])


def loss_of(
    teacher: TeacherScores, logprobs: torch.Tensor, *, mask: torch.Tensor = MASK, old: torch.Tensor | None = None,
    correction: torch.Tensor | None = None, **settings: Any,
) -> LossOutput:  # fmt: skip
    """The loss of one trajectory of one turn, whose tokens all have the advantage 1."""
    turns, owner = torch.zeros_like(mask, dtype=torch.long), torch.tensor([0])
    return policy_loss(
        logprobs,
        logprobs.detach() if old is None else old,
        action_mask=mask,
        turn_index=turns,
        trajectory_index=owner,
        advantages=torch.ones_like(logprobs),
        settings=LossSettings(**settings),
        denominators=count_denominators(mask, turns, owner, num_batch_tokens=12),
        correction=correction,
        teacher=teacher,
    )


def settings_of(**choices: Any) -> DistillationSettings:
    return DistillationSettings(teacher="t", **choices)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "dapo"])
@pytest.mark.parametrize("divergence", BY_HAND)
def test_the_loss_is_the_mean_over_sampled_tokens_times_coefficient_and_weight(
    divergence: Any, aggregation: Any
) -> None:
    """D = .3, .6, 1.2 with the weights 1, 0, 2 over three tokens, times .5: (.3 + 2 * 1.2) * .5 / 3 = .45. The token
    outside of the mask is NaN; a ratio of e^-1, and a probability that fell by more than .2, change nothing."""
    values = torch.tensor([[NAN, 0.3, 0.6, 1.2]], dtype=torch.float64, requires_grad=True)
    logprobs = torch.tensor([[NAN, -1.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[NAN, 1.0, 0.0, 2.0]], dtype=torch.float64)
    old = torch.tensor([[NAN, -0.1, -0.1, -0.8]], dtype=torch.float64)
    teacher = TeacherScores(settings_of(divergence=divergence, coefficient=0.5, reward=False), None, None, values)
    output = loss_of(teacher, logprobs, old=old, correction=weights, aggregation=aggregation)
    assert output.loss.item() == pytest.approx(0.45, abs=1e-12)
    assert output.tokens.share.tolist() == pytest.approx([0.05, 0.0, 0.4], abs=1e-12)
    assert output.tokens.divergence.tolist() == [0.3, 0.6, 1.2]
    stats = output.stats.teacher
    assert (stats.loss.item(), stats.divergence_sum.item()) == pytest.approx((0.45, 2.1), abs=1e-12)
    assert (stats.advantage_sum, stats.kl_sum, stats.num_dropped) == (None, None, None)
    output.loss.backward()
    assert values.grad is not None and logprobs.grad is not None  # noqa: PT018
    assert values.grad[0].tolist() == pytest.approx([0, 0.5 / 3, 0, 1 / 3], abs=1e-12)
    assert not logprobs.grad.any(), "the reward is not learned from"


@pytest.mark.parametrize("baseline", [False, True])
def test_the_gradient_of_the_reverse_kl_is_the_expected_one_of_the_sampled_log_ratio(baseline: bool) -> None:
    """At the policy that samples, over its three tokens; a token of the sampled kind is one draw of it."""
    one = torch.tensor([[True]])
    expected = torch.zeros(3, dtype=torch.float64)
    for token, p in enumerate(POLICY):
        logits = logits_of(POLICY, shift=0.5)
        log_ratio = torch.tensor([[math.log(TEACHER[token] / p)]], dtype=torch.float64)
        kl = torch.tensor([[REVERSE]], dtype=torch.float64) if baseline else None
        teacher = TeacherScores(settings_of(baseline=baseline, reward=False), log_ratio, kl)
        loss_of(teacher, logits.log_softmax(-1)[:, token : token + 1], mask=one).loss.backward()
        assert logits.grad is not None
        expected += p * logits.grad[0]
    logits = logits_of(POLICY, shift=0.5)
    exact = head().diverge(
        logits, head(), logits_of(TEACHER, shift=0.0), torch.tensor([0]), "reverse_kl", drops_out=False
    )
    teacher = TeacherScores(settings_of(divergence="reverse_kl", reward=False), None, None, exact[:, None])
    loss_of(teacher, logits.log_softmax(-1)[:, :1], mask=one).loss.backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("divergence", "missing"), [("sampled", "log_ratios"), ("forward_kl", "divergence")])
def test_scores_that_the_divergence_does_not_have_are_refused(divergence: Any, missing: str) -> None:
    teacher = TeacherScores(settings_of(divergence=divergence), None, None)
    with pytest.raises(RecordError, match=rf"divergence '{divergence}' needs teacher\.{missing}, got None"):
        loss_of(teacher, torch.zeros(1, 4))
