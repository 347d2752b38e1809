"""What is said and not refused: keys that the present modes do not need, and numbers that another one bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.config.run_config import RunConfig

Make = Callable[[dict[str, Any]], RunConfig]

DECISIONS = {"training.step_rewards_mode": "decision_stepwise"}
NO_DECISIONS = 'has no effect, because mode "env_sparse" looks at no events ("decision_stepwise" does)'
WARMUP = {"warmup": {"num_episodes": 4, "learning_rate": 1e-3}}
APP = {"services.task_url": "http://a"}

NOTICED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "reference without KL": (
        {"reference.placement": "dedicated"},
        ['reference.placement: "dedicated" has no effect without a KL term (loss.kl_coef, rewards.kl_coef, '
         "advantages.kl_shaping_coef): nothing is loaded or started"],
    ),
    "the hosted trainer's scoring server": (
        {"loss.kl_coef": 0.1, "reference.placement": "dedicated", "reference.port": 9000,
         "reference.health_interval_ms": 50, "reference.health_max_wait_s": 9},
        ["reference.port: has no effect: Ray reaches the reference, and says if it is lost",
         "reference.health_interval_ms: has no effect: Ray reaches the reference, and says if it is lost",
         "reference.health_max_wait_s: has no effect: Ray reaches the reference, and says if it is lost"],
    ),
    "the base as the reference after a warm-up": (
        {"model.trainer_mode": "lora", "loss.kl_coef": 0.1, "reference.source": "base", **WARMUP},
        ['reference.source: "base" is not where this run starts, because of [warmup]: the first KL is not 0, as with '
         '"auto"'],
    ),
    "step rewards switched off": (
        {"training.step_rewards_enabled": False, **DECISIONS},
        ["training.step_rewards_enabled: false switches step rewards off, so that training.step_rewards_mode = "
         '"decision_stepwise" has no effect'],
    ),
    "beta without events": ({"training.step_rewards_beta": 0.1}, [f"training.step_rewards_beta: {NO_DECISIONS}"]),
    "lambda of rewards that are off": (
        {"training.step_rewards_enabled": False, "training.step_rewards_indicator_lambda": 0.1},
        ['training.step_rewards_indicator_lambda: has no effect, because mode "off" looks at no '
         'events ("decision_stepwise" does)'],
    ),
    "strategy without events": (
        {"training.step_rewards_strategy": "consistent"}, [f"training.step_rewards_strategy: {NO_DECISIONS}"],
    ),
    "kind without events": (
        {"training.event_rewards_kind": "unique"}, [f"training.event_rewards_kind: {NO_DECISIONS}"],
    ),
    "kind beside limits": (
        {**DECISIONS, "training.event_rewards_kind": "absolute", "training.step_rewards_strategy": "per_achievement"},
        ['training.event_rewards_kind: has no effect, because strategy "per_achievement" limits repeats by k_limits '
         "(<= 0: no limit)"],
    ),
    "weights of another strategy": (
        {**DECISIONS, "training.step_rewards_weights": {"a": 2.0}},
        ['training.step_rewards_weights: has no effect, because only strategy "per_achievement" reads it'],
    ),
    "limits of another strategy": (
        {**DECISIONS, "training.step_rewards_strategy": "consistent", "training.step_rewards_k_limits": {"a": 2}},
        ['training.step_rewards_k_limits: has no effect, because only strategy "per_achievement" reads it'],
    ),
    "step rewards that the app is asked for and nobody learns from": (
        {**APP, "training.step_rewards_mode": "off",
         "rollout.env_config": {"step_rewards": {"enabled": True, "mode": "decision_stepwise"}}},
        ['training.step_rewards_mode: "off" is what is learned from, and rollout.env_config.step_rewards asks for '
         '"decision_stepwise"'],
    ),
    "accumulation beyond its cap": (
        {"training.gradient_accumulation_steps": 4, "training.max_accumulated_minibatch": 2},
        ["training.max_accumulated_minibatch: training.gradient_accumulation_steps = 4 is cut to 2"],
    ),
    "training longer than evaluation": (
        {"training.max_turns": 9},
        ["training.max_turns: 9 is more than rollout.max_turns = 8, at which episodes end"],
    ),
    "more seeds than instances": (
        {"evaluation.seeds": "0:10", "evaluation.instances": 3},
        ["evaluation.instances: 3, but evaluation.seeds has 10 seeds: the first 3 are played"],
    ),
    "fewer seeds than instances": (
        {"evaluation.seeds": "0:10", "evaluation.instances": 100},
        ["evaluation.instances: 100, but evaluation.seeds has 10 seeds: each of these 10 is played once"],
    ),
    "a judge's address without a judge": (
        {"services.judge_url": "http://j"},
        ["services.judge_url: is not asked without [judge] and enabled = true there"],
    ),
    "weights of a judge that is off": (
        {"judge.enabled": False, "judge.reward_blend": {"env": 0.5, "event": 0.3}},
        ["judge.reward_blend.env: 0.5 has no effect while judge.enabled is false: the environment's reward counts as "
         "it is",
         "judge.reward_blend.event: 0.3 has no effect while judge.enabled is false: the environment's reward counts as "
         "it is"],
    ),
    "a teacher beside truncated sampling": (
        {"distillation.teacher": "tiny:qwen3-64", "rollout.top_p": 0.9},
        ["distillation.teacher: is asked at temperature 1 and of the whole vocabulary, as the policy is for it; "
         "[rollout] samples from another distribution (temperature, top_p, top_k, min_p or a penalty), so that the "
         "mean of the teacher's advantages estimates no KL"],
    ),
    "nearly one of our keys, sent to an app": (
        {**APP, "rollout.policy_config": {"temperatur": 0.5}},
        ["rollout.policy_config: temperatur is sent to the task app and nothing here reads it; did you mean "
         "'temperature'?"],
    ),
    "a model that each rollout names": (
        {**APP, "rollout.policy_config": {"model": "m", "inference_url": "http://elsewhere"}},
        ["rollout.policy_config: model, inference_url: not sent as written, because every rollout is told where to ask "
         "the policy itself"],
    ),
    "images": (
        {**APP, "rollout.policy_config": {"use_vision": True}},
        ["rollout.policy_config: use_vision = true is sent to the task app; the policy reads text, and calls with "
         "images are refused"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTICED)
def test_what_has_no_effect_is_said_and_not_refused(case: str, make: Make) -> None:
    changes, expected = NOTICED[case]
    config = make(changes)
    assert [f"{notice.key}: {notice.text}" for notice in config.notices] == expected


@pytest.mark.parametrize("case", NOTICED)
def test_what_has_no_effect_is_the_same_as_if_it_were_not_there(case: str, make: Make) -> None:
    config = make(NOTICED[case][0])
    by_strategy = [{**DECISIONS, "training.step_rewards_strategy": name} for name in ("consistent", "per_achievement")]
    modes = [{}, {"training.step_rewards_mode": "off"}, DECISIONS, *by_strategy]
    assert config.step_reward_settings in [make(mode).step_reward_settings for mode in modes]


QUIET: dict[str, dict[str, Any]] = {
    "the smallest file": {},
    "all keys of decisions": {
        **DECISIONS, "training.step_rewards_beta": 0.1, "training.step_rewards_indicator_lambda": 0.5,
        "training.event_rewards_kind": "absolute",
        "rollout.env_config": {"step_rewards": {"enabled": True, "mode": "decision_stepwise"}},
    },
    "a reference that is asked": {"loss.kl_coef": 0.1, "reference.placement": "dedicated",
                                 "reference.health_max_wait_s": 180},
    "a base under a new adapter": {
        "model.trainer_mode": "lora", "loss.kl_coef": 0.1, "reference.source": "base",
    },
    "a reference after a warm-up": {"loss.kl_coef": 0.1, **WARMUP},
    "as many turns": {"training.max_turns": 8},
    "accumulation at its cap": {"training.gradient_accumulation_steps": 2, "training.max_accumulated_minibatch": 2},
    "as many seeds": {"evaluation.seeds": "0:100"},
    "a teacher of the sampled distribution": {"distillation.teacher": "tiny:qwen3-64"},
    "an app's own keys": {**APP, "rollout.policy_config": {"max_llm_calls": 3, "use_vision": False}},
}  # fmt: skip


@pytest.mark.parametrize("case", QUIET)
def test_what_acts_is_not_noticed(case: str, make: Make) -> None:
    assert make(QUIET[case]).notices == ()


def test_the_smaller_number_counts(make: Make) -> None:
    assert make({"training.max_turns": 9}).training_limits.max_turns == 8
    assert make({"evaluation.seeds": "5:15", "evaluation.instances": 3}).evaluation_seeds == (5, 6, 7)
    accumulated = make({"training.gradient_accumulation_steps": 4, "training.max_accumulated_minibatch": 2})
    assert accumulated.training.batch_size == 2 * 16


def test_a_reference_that_nothing_asks_for_is_none_for_the_learner(make: Make) -> None:
    idle = make({"reference.placement": "shared", "reference.source": "copy", "reference.update_every_n_iters": 3})
    assert not idle.has_reference
    assert make({"rewards.kl_coef": 0.1, "reference.source": "copy"}).has_reference
