"""The proof that each usual mistake in the loss turns a hand-derived number red.

The checks are those of `test_gspo_golden.py`, run on copies of the source in which one piece of text is replaced.
"""

from __future__ import annotations

import importlib.util
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.learning import losses

Loss = Callable[..., Any]

# Pieces of the source that several mistakes alter.
CLIP = "ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)"
LOG_RATIO = "return self.now.detach() - self.old"
OWN_GRADIENT = "torch.exp(tokens.now - tokens.now.detach())"
POLICY = "weight * tokens.correction * SURROGATES"
TERMS = "policy_term + kl_term + entropy_term"
EPISODE_MEAN = "N * trajectories.num_tokens[trajectories.of_token]"
TURN_MEAN = "M * turns.num_tokens[turns.of_token]"
DUAL_CLIP = "ratio.clamp(max=settings.dual_clip)"
TO_REFERENCE = "estimate_kl(tokens.reference - tokens.now,"
CUT = "estimate.clamp(-max_nats, max_nats)"
WEIGHTED_KL = "estimate = ratio * estimate"
ENTROPY = "return weight * tokens.entropy"

# What is changed, the text before, the text after, and the loss that the four sequences then have, where the mistake is
# one of those whose value was derived by hand (None: only that some check fails).
MUTATIONS: list[tuple[str, str, str, float | None]] = [
    # the surrogates beside PPO's
    ("CISPO without its cap", "ratios.s.detach().clamp(max=1 + settings.clip_high)", "ratios.s.detach()", None),
    ("CISPO's weight differentiated", "ratios.s.detach().clamp(max=1 +", "ratios.s.clamp(max=1 +", None),
    ("CISPO's cap is TRL's number", "clamp(max=1 + settings", "clamp(max=settings", None),
    ("SAPO's temperatures swapped", "masked_fill(gains,", "masked_fill(~gains,", None),
    ("SAPO not normalised", "4 / tau * torch", "torch", None),
    ("GMPO without a clip", "ratios.log_ratio.clamp(max=ceiling)", "ratios.log_ratio", None),
    ("GMPO's range in log space", "math.log1p(-settings.clip_low)", "-settings.clip_low", None),
    ("GMPO's sides swapped", "gains, ratios.log_ratio.clamp(max", "~gains, ratios.log_ratio.clamp(max", None),
    (
        "GMPO's clipped tokens keep their gradient",
        "+ clipped - clipped.detach()) * ratios.adv",
        ") * ratios.one * ratios.adv",
        None,
    ),
    ("DPPO without its region", "ratios.is_clipped, 0.0, weight", "ratios.is_clipped & False, 0.0, weight", None),
    ("DPPO by ratio", "place = 1 + tokens.now.detach().exp() - tokens.old.exp()", "place = ratio", None),
    ("DPPO's ratio without a bound", "clamp(max=MAX_DPPO_RATIO)", "clamp(max=1e9)", None),
    ("VESPO by the mean", "* ratios.units.num_tokens).clamp(*_V", "* 1).clamp(*_V", None),
    ("VESPO's pairs swapped", "loses = ratios.advantage < 0", "loses = ratios.advantage >= 0", None),
    # the objective and its ratio
    ("sign flipped", "policy_A = -(weight", "policy_A = (weight", 0.4),
    ("token-level ratios", "= tokens.trajectory\n", "= torch.arange(len(tokens.now))\n", -0.31875),
    ("no 1/|y| in the ratio", ", values) / self.num_tokens", ", values)", -0.4375),
    ("low and high clip swapped", CLIP, "ratio.clamp(1 - settings.clip_high, 1 + settings.clip_low)", -0.45),
    ("max instead of min", "torch.minimum(free * adv", "torch.maximum(free * adv", -0.72855),
    ("no clip", CLIP, "ratio", -0.65355),
    ("upper clip only", CLIP, "ratio.clamp(max=1 + settings.clip_high)", None),
    ("lower clip only", CLIP, "ratio.clamp(min=1 - settings.clip_low)", None),
    (
        "minimum of ratios instead of terms",
        "torch.minimum(free * advantage, clipped * advantage)",
        "torch.minimum(free, clipped) * advantage",
        None,
    ),
    ("mask dropped", "mask = action_mask", "mask = torch.ones_like(action_mask)", None),
    ("ratio upside down", LOG_RATIO, "return self.old - self.now.detach()", None),
    ("unit ratio differentiated", LOG_RATIO, "return self.now - self.old", None),
    ("no gradient", OWN_GRADIENT, "torch.exp(tokens.now.detach() - tokens.now.detach())", None),
    ("token ratio on top of the unit's", OWN_GRADIENT, "torch.exp(tokens.now - tokens.old)", None),
    ("log s not cut", "log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "log_ratio)", None),
    ("gradient into old logprobs", "constants(old_logprobs)", "old_logprobs[mask]", None),
    ("gradient into advantages", "constants(advantages)", "advantages[mask]", None),
    ("gradient into the reference", "constants(ref_logprobs)", "ref_logprobs[mask]", None),
    (
        "gradient into the correction",
        "constants(torch.ones_like(logprobs) if correction is None else correction)",
        "(torch.ones_like(logprobs) if correction is None else correction)[mask]",
        None,
    ),
    # units
    ("rows of an episode not pooled", "trajectory_index[:, None]", "torch.arange(len(mask))[:, None]", None),
    ("turns of different episodes pooled", "trajectory * (turn.max() + 1) + turn", "turn", None),
    (
        "turn treated as trajectory",
        "keys = turn_keys(tokens.trajectory, tokens.turn)",
        "keys = tokens.trajectory",
        None,
    ),
    ("segment treated as trajectory", "keys = tokens.row", "keys = tokens.trajectory", None),
    ("segment treated as turn", "keys = tokens.row", "keys = tokens.turn", None),
    (
        "token treated as trajectory",
        'case "token":\n',
        'case "token":\n            keys = tokens.trajectory\n        case "":\n',
        None,
    ),
    # aggregation
    ("mean over tokens instead of over episodes", EPISODE_MEAN, "num_tokens", -0.6),
    ("mean over the call's episodes", EPISODE_MEAN, EPISODE_MEAN.replace("N", "here[0]"), None),
    ("mean over the call's turns", TURN_MEAN, TURN_MEAN.replace("M", "here[1]"), None),
    ("mean over the call's tokens", "divisor * num_tokens", "divisor * here[2]", None),
    ("turn means over episodes", TURN_MEAN, TURN_MEAN.replace("M", "N"), None),
    ("turn sums", TURN_MEAN, "M", None),
    ("episode lengths in turn means", TURN_MEAN, "M * trajectories.num_tokens[trajectories.of_token]", None),
    ("dapo over the step's tokens", "divisor * denominators.num_batch_tokens", "divisor * num_tokens", None),
    ("bnpo over the batch's tokens", "divisor * num_tokens", "divisor * denominators.num_batch_tokens", None),
    ("token sums not divided by N", "divisor = divisor * N\n", "pass\n", None),
    ("constant length without N", "divisor * N * settings.norm_length", "divisor * settings.norm_length", None),
    ("constant length left out", "divisor * N * settings.norm_length", "divisor * N", None),
    # dual clip
    ("dual clip left out", DUAL_CLIP, "ratio", None),
    ("dual clip on the wrong sign", DUAL_CLIP, f"torch.where(advantage < 0, ratio, {DUAL_CLIP})", None),
    ("dual clip as a floor", DUAL_CLIP, "ratio.clamp(min=settings.dual_clip)", None),
    ("dual clip in place of the ceiling", CLIP, "ratio.clamp(1 - settings.clip_low, settings.dual_clip or 1.3)", None),
    # KL
    ("KL term left out", TERMS, "policy_term + entropy_term", None),
    ("KL term subtracted", TERMS, "policy_term - kl_term + entropy_term", None),
    ("KL reversed", TO_REFERENCE, "estimate_kl(tokens.now - tokens.reference,", None),
    ("KL without gradient", TO_REFERENCE, "estimate_kl(tokens.reference - tokens.now.detach(),", None),
    ("k2 instead of k3", "torch.expm1(x) - x", "x * x / 2", None),
    ("k3 instead of k2", "x * x / 2", "torch.expm1(x) - x", None),
    ("k2 without its half", "x * x / 2", "x * x", None),
    ("k1 of the wrong sign", "estimate = -x", "estimate = x", None),
    ("k1 made positive", "estimate = -x", "estimate = x.abs()", None),
    ("KL summed, not averaged", "return weight * estimate", "return estimate", None),
    ("log-ratio of KL not clamped", "log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "log_ratio", None),
    ("estimate not cut", CUT, "estimate", None),
    ("estimate not cut below", CUT, "estimate.clamp(max=max_nats)", None),
    ("kl_clamp ignored", "max_nats=settings.kl_clamp", "max_nats=math.inf", None),
    ("KL not importance-weighted", WEIGHTED_KL, "pass", None),
    ("KL always importance-weighted", "if settings.kl_importance_weighted:", "if True:", None),
    ("importance weight of KL without gradient", WEIGHTED_KL, "estimate = ratio.detach() * estimate", None),
    ("importance weight of KL clipped", WEIGHTED_KL, f"estimate = {CLIP} * estimate", None),
    # entropy
    ("entropy bonus left out", TERMS, "policy_term + kl_term", None),
    ("entropy punished", "entropy_term = -settings", "entropy_term = settings", None),
    ("entropy without gradient", ENTROPY, "return weight * tokens.entropy.detach()", None),
    ("entropy summed, not aggregated", ENTROPY, "return tokens.entropy", None),
    # correction
    ("correction left out", POLICY, "weight * SURROGATES", None),
    ("correction applied to KL", "return weight * estimate", "return weight * tokens.correction * estimate", None),
    ("correction applied to entropy", ENTROPY, "return weight * tokens.correction * tokens.entropy", None),
    ("correction normalised", POLICY, "weight * (tokens.correction / tokens.correction.mean()) * SURROGATES", None),
    (
        "correction inside of the clip",
        "ratios = Ratios(ratio,",
        "ratios = Ratios(ratio * tokens.correction,",
        None,
    ),
    ("correction as a mask only", POLICY, "weight * (tokens.correction > 0) * SURROGATES", None),
    # statistics
    ("lower clip counted whatever the sign", "settings.clip_low) & loses", "settings.clip_low)", None),
    ("upper clip counted whatever the sign", "settings.clip_high) & gains", "settings.clip_high)", None),
    ("dual clip counted whatever the sign", "dual_clip) & loses", "dual_clip)", None),
    (
        "clips of left-out tokens counted",
        "is_in_loss = tokens.correction > 0",
        "is_in_loss = tokens.correction >= 0",
        None,
    ),
    ("k1 to the old policy of the wrong sign", "old_k1=-log_ratio.sum()", "old_k1=log_ratio.sum()", None),
    ("k3 to the old policy reversed", "old_k3=k3(log_ratio)", "old_k3=k3(-log_ratio)", None),
    ("k1 to the reference of the wrong sign", "-to_reference.sum()", "to_reference.sum()", None),
    (
        "log s of rows instead of trajectories",
        "log_s = Pools.by(tokens.trajectory)",
        "log_s = Pools.by(tokens.row)",
        None,
    ),
]


def golden() -> types.ModuleType:
    """The module of the checks; test files are no package that could be imported from."""
    spec = importlib.util.spec_from_file_location("golden_checks", Path(__file__).with_name("test_gspo_golden.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutant(before: str, after: str) -> Loss:
    """`policy_loss` of a copy of the module in which a piece of text is replaced wherever it stands."""
    source = inspect.getsource(losses)
    assert before in source, f"{before!r} is no longer in losses.py: adapt the list"
    module = types.ModuleType("mutated_losses")
    module.__dict__["__name__"] = losses.__name__  # dataclasses look their module up by name
    exec(compile(source.replace(before, after), "mutated_losses.py", "exec"), module.__dict__)
    loss: Loss = module.__dict__["policy_loss"]
    return loss


def failing_checks(checks: list[Callable[[Loss], None]], loss: Loss) -> list[str]:
    failed = []
    for check in checks:
        try:
            check(loss)
        except Exception:  # a mutant may also crash, which is as red
            failed.append(check.__name__)
    return failed


@pytest.mark.nightly
def test_every_listed_mistake_turns_a_golden_red(capsys: pytest.CaptureFixture[str]) -> None:
    module = golden()
    assert failing_checks(module.CHECKS, mutant("policy_loss", "policy_loss")) == [], "the unaltered copy is green"
    with capsys.disabled():
        print(f"\n  {len(MUTATIONS)} mistakes, and the checks that notice them:")
        for what, before, after, wrong_loss in MUTATIONS:
            altered = mutant(before, after)
            failed = failing_checks(module.CHECKS, altered)
            print(f"  {what}: {', '.join(failed) or 'NOT NOTICED'}")
            assert failed, f"mutation not noticed: {what}"
            if wrong_loss is not None:
                # the hand-derived values are given to five decimals
                assert module.run(altered, module.FOUR_SEQUENCES)[0].loss.item() == pytest.approx(wrong_loss, abs=5e-6)
