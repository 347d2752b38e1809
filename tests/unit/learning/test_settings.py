"""What settings of learning are by themselves, as configs/README.md says, and which of them go together."""

from __future__ import annotations

from typing import Any

import pytest
from published_table import check_promises
from pydantic import ValidationError

from gspo_gym.base.settings import Settings
from gspo_gym.learning.settings import (
    SAMPLER_KEYS,
    AdvantageSettings,
    CorrectionSettings,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    SupervisedSettings,
    UpdateSettings,
)
from gspo_gym.learning.step_rewards import StepRewardSettings

KL_TERM = {"kl_estimator": "k1", "kl_clamp": 1.0, "kl_importance_weighted": True}
DECISIONS = {"mode": "decision_stepwise"}


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        (LossSettings, "loss"),
        (AdvantageSettings, "advantages"),
        (RewardSettings, "rewards"),
        (CorrectionSettings, "correction"),
        (ReferenceSettings, "reference"),
        (OptimizerSettings, "optimizer"),
        (LoraSettings, "training.lora"),
        (SupervisedSettings, "warmup"),
        (UpdateSettings, "training"),
    ],
)
def test_defaults_and_ranges_are_those_of_the_published_table(settings: type[Settings], section: str) -> None:
    assert check_promises(settings, section) == set(settings.model_fields)


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (LossSettings, {"aggregation": "dr_grpo", "norm_length": 1}),
        (LossSettings, {"clip_high": 0.25, "dual_clip": 1.3}),
        (LossSettings, {"kl_coef": 0.5, **KL_TERM}),
        (CorrectionSettings, {"level": "token"}),
        (CorrectionSettings, {"old_logprobs": "rollout"}),
        (OptimizerSettings, {"warmup_steps": 0.5}),
        (OptimizerSettings, {"warmup_steps": 1}),
        (RewardSettings, {"kl_coef": 0.5, "kl_target": 0.5}),
        (AdvantageSettings, {"level": "turn", "discount": 0.5}),
        (StepRewardSettings, {**DECISIONS, "strategy": "per_achievement", "weights": {"a": 2.0}}),
        (StepRewardSettings, {**DECISIONS, "kind": "absolute", "indicator_lambda": 0.5, "beta": 0.5}),
    ],
)
def test_settings_that_go_together_are_taken_as_they_are(settings: type[Settings], values: dict[str, Any]) -> None:
    assert {name: getattr(settings(**values), name) for name in values} == values


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (LossSettings, {"aggregation": "dr_grpo"}, "norm_length: aggregation 'dr_grpo' divides by it, got none"),
        (LossSettings, {"norm_length": 1}, "norm_length: has no effect with aggregation 'seq-mean-token-mean'"),
        (
            LossSettings,
            {"clip_high": 0.25, "dual_clip": 1.25},
            r"dual_clip: expected more than 1 .* = 1.25",
        ),
        (LossSettings, {"kl_estimator": "k1"}, "kl_estimator: has no effect, because kl_coef is 0"),
        (LossSettings, {"kl_clamp": 1.0}, "kl_clamp: has no effect, because kl_coef is 0"),
        (LossSettings, {"kl_importance_weighted": True}, "kl_importance_weighted: has no effect"),
        (CorrectionSettings, {"level": "token", "old_logprobs": "rollout"}, "level: 'token' compares recomputed"),
        (OptimizerSettings, {"betas": (1.0, 0.9)}, "betas"),
        (OptimizerSettings, {"betas": (0.9, -0.1)}, "betas"),
        (
            OptimizerSettings,
            {"warmup_steps": 1.5},
            "expected whole steps, or a fraction of all steps below 1, got 1.5",
        ),
        (RewardSettings, {"kl_target": 0.1}, "kl_target: adapts kl_coef, which is 0"),
        (AdvantageSettings, {"discount": 0.5}, "discount is used at level 'turn' only"),
        (StepRewardSettings, {"indicator_lambda": 1.0}, 'indicator_lambda: has no effect, because mode "env_sparse"'),
        (StepRewardSettings, {"mode": "off", "strategy": "consistent"}, 'strategy: has no effect, because mode "off"'),
        (StepRewardSettings, {"mode": "off", "beta": 1.0}, "beta: has no effect"),
        (
            StepRewardSettings,
            {**DECISIONS, "strategy": "per_achievement", "kind": "absolute"},
            "kind: has no effect, because .* k_limits",
        ),
        (
            StepRewardSettings,
            {**DECISIONS, "strategy": "consistent", "weights": {"wood": 2.0}},
            'weights: has no effect, because only strategy "per_achievement"',
        ),
        (StepRewardSettings, {**DECISIONS, "k_limits": {"wood": 2}}, "k_limits: has no effect"),
        # the origin takes any unknown name for consistent
        (StepRewardSettings, {**DECISIONS, "strategy": "per_decision"}, "consistent"),
        (StepRewardSettings, {"mode": "stepwise"}, "decision_stepwise"),
        (StepRewardSettings, {**DECISIONS, "beta": -1.0}, "greater than or equal to 0"),
        (LoraSettings, {"target_modules": []}, "a list of at least one module name"),
        (LoraSettings, {"target_modules": ["q_proj", "all-linear"]}, "takes no others beside it"),
        (LoraSettings, {"target_modules": 3}, "target_modules"),
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
        ({"mode": "mask", "low": 0.1}, False),
        ({"max_engine_gap": 0.1}, True),
        ({"old_logprobs": "rollout"}, True),
        ({"level": "turn"}, True),
        ({"off_policy_threshold": 0.1}, True),
    ],
)
def test_a_key_that_looks_at_the_samplers_logprobs_cannot_be_obeyed_without_them(values: Any, reads: bool) -> None:
    settings = CorrectionSettings(**values)
    assert any(settings.rescored_problem(name) for name in SAMPLER_KEYS) is reads


def test_defaults_follow_the_level_and_the_baseline() -> None:
    def chosen(**values: Any) -> tuple[str, str]:
        settings = AdvantageSettings(**values)
        return settings.baseline, settings.scale

    assert chosen() == ("group", "group")
    assert chosen(level="turn") == ("leave_one_out", "group")
    assert chosen(baseline="none") == ("none", "none")
    assert chosen(baseline="role") == ("role", "none")
    assert chosen(baseline="batch", scale="group") == ("batch", "group")
    assert chosen(level="turn", baseline="running") == ("running", "running")


def test_what_is_no_table_is_refused_as_what_was_given() -> None:
    with pytest.raises(ValidationError, match="input_value=3"):
        AdvantageSettings.model_validate(3)
