"""Which settings go together, at the edges of what is taken. Defaults and single ranges: `test_config_reference.py`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gspo_gym.learning.settings import CorrectionSettings, LoraSettings, LossSettings, OptimizerSettings, UpdateSettings
from gspo_gym.learning.settings_rewards import AdvantageSettings, RewardSettings, StepRewardSettings
from gspo_gym.settings import Settings

KL_TERM = {"kl_estimator": "k1", "kl_clamp": 1.0, "kl_importance_weighted": True}


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (LossSettings, {"aggregation": "dr_grpo", "norm_length": 1}),
        (LossSettings, {"clip_high": 0.25, "dual_clip": 1.25}),
        (LossSettings, {"kl_coef": 0.5, **KL_TERM}),
        (CorrectionSettings, {"level": "token"}),
        (CorrectionSettings, {"old_logprobs": "rollout"}),
        (OptimizerSettings, {"learning_rate": 1.0, "warmup_fraction": 0.5}),
        (OptimizerSettings, {"learning_rate": 1.0, "num_warmup_steps": 1}),
        (UpdateSettings, {"minibatch_size": 1}),
        (RewardSettings, {"kl_coef": 0.5, "kl_target": 0.5}),
        (AdvantageSettings, {"level": "turn", "discount": 0.5}),
        (StepRewardSettings, {"mode": "decision_stepwise", "strategy": "per_achievement", "weights": {"a": 2.0}}),
        (StepRewardSettings, {"mode": "decision_stepwise", "kind": "absolute"}),
    ],
)
def test_settings_that_go_together_are_taken_as_they_are(settings: type[Settings], values: dict[str, Any]) -> None:
    assert {name: getattr(settings(**values), name) for name in values} == values


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (LossSettings, {"aggregation": "dr_grpo"}, "norm_length: aggregation 'dr_grpo' divides by it, got none"),
        (LossSettings, {"norm_length": 1}, "norm_length: has no effect with aggregation 'seq-mean-token-mean'"),
        (LossSettings, {"clip_high": 0.25, "dual_clip": 1.2}, r"dual_clip: expected at least 1 \+ clip_high = 1.25"),
        (LossSettings, {"kl_estimator": "k1"}, "kl_estimator: has no effect, because kl_coef is 0"),
        (LossSettings, {"kl_clamp": 1.0}, "kl_clamp: has no effect, because kl_coef is 0"),
        (LossSettings, {"kl_importance_weighted": True}, "kl_importance_weighted: has no effect"),
        (CorrectionSettings, {"level": "token", "old_logprobs": "rollout"}, "level: 'token' compares recomputed"),
        (RewardSettings, {"kl_target": 0.1}, "kl_target: adapts kl_coef, which is 0"),
        (AdvantageSettings, {"discount": 0.5}, "discount is used at level 'turn' only"),
        (LoraSettings, {"target_modules": []}, "a list of at least one module name"),
        (LoraSettings, {"target_modules": ["q_proj", "all-linear"]}, "takes no others beside it"),
        (LoraSettings, {"target_modules": 3}, "target_modules"),
        (UpdateSettings, {"minibatch_size": 0}, "greater than 0"),
    ],
)
def test_a_setting_that_contradicts_another_is_refused(
    settings: type[Settings], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**values)


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ("all-linear", "all-linear"),
        (["all-linear"], "all-linear"),
        (("q_proj", "v_proj"), ("q_proj", "v_proj")),
    ],
)
def test_adapted_modules_are_all_or_named(given: Any, resolved: Any) -> None:
    assert LoraSettings(target_modules=given).target_modules == resolved


@pytest.mark.parametrize(
    ("values", "reads"),
    [
        ({}, False),
        ({"max_engine_gap": 0.1}, False),
        ({"old_logprobs": "rollout"}, True),
        ({"level": "turn"}, True),
        ({"off_policy_threshold": 0.1}, True),
    ],
)
def test_the_loss_depends_on_the_engines_logprobs_where_a_setting_uses_them(values: Any, reads: bool) -> None:
    assert CorrectionSettings(**values).reads_rollout_logprobs is reads
