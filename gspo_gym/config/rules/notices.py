"""Notices: settings that have no effect, or another one than it may seem, and are accepted all the same.

The hosted trainer's files cannot leave most of them out: step rewards, reference and lengths stand in every file, also
with the modes that do not use them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.base.settings import parse_seeds
from gspo_gym.config.apps import PolicyConfigSection
from gspo_gym.config.defaults import KL_TERMS
from gspo_gym.config.nested import POLICY_CONFIG
from gspo_gym.config.rules.judge import APP_KEYS_SAID_FOR_EACH_ROLLOUT
from gspo_gym.config.rules.objective import OTHER_KEYS, Rule, acts_with, default_of, no_effect
from gspo_gym.config.words import show
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.learning.settings import ReferenceSettings, StepRewardSettings

_POLICY_CONFIG = f"rollout.policy_config{OTHER_KEYS}"
_VISION = ("use_vision", "image_only_mode")


def _switch_wins(enabled: bool | None, mode: str | None) -> str | None:
    if enabled is not False or mode in (None, "off"):
        return None
    return f"false switches step rewards off, so that training.step_rewards_mode = {show(mode)} has no effect"


def _of_decisions(key: str, default: Any) -> Rule:
    """Return the notice about a key that acts in the mode decision_stepwise only, unless it has this default."""

    def check(value: Any, mode: str | None, enabled: bool | None) -> str | None:
        used = "off" if enabled is False else mode or default_of(StepRewardSettings, "mode")
        if value is None or value == default or used == "decision_stepwise":
            return None
        return f'has no effect with step rewards {show(used)}, only with "decision_stepwise"'

    return Rule((f"training.{key}", "training.step_rewards_mode", "training.step_rewards_enabled"), check)


def _reference_is_asked(placement: str, *weights: float) -> str | None:
    if placement == "none" or any(weight > 0 for weight in weights):
        return None
    return f"{show(placement)} has no effect without a KL term ({', '.join(KL_TERMS)}): nothing is loaded or started"


def _shorter_turns_count(max_turns: int | None, most: int) -> str | None:
    if max_turns is None or max_turns <= most:
        return None
    return f"{max_turns} is more than rollout.max_turns = {most}, at which episodes end"


def _cap_counts(accumulated: int | None, most: int | None) -> str | None:
    if accumulated is None or most is None or accumulated <= most:
        return None
    return f"{accumulated} is cut to training.max_accumulated_minibatch = {most}"


def _seeds_count(instances: int | None, seeds: tuple[int, ...] | list[int] | str | None) -> str | None:
    if instances is None or seeds is None or len(parse_seeds(seeds)) == instances:
        return None
    given = len(parse_seeds(seeds))
    played = f"the first {instances} are played" if instances < given else f"each of these {given} is played once"
    return f"{instances}, but evaluation.seeds has {given} seeds: {played}"


def _judge_is_on(url: str | None, has_judge: bool) -> str | None:
    if url is None or has_judge:
        return None
    return "is not asked without [judge] and enabled = true there"


def _weighs_a_judge(name: str) -> Rule:
    default = default_of(RewardBlend, name)

    def check(weight: float | None, enabled: bool | None) -> str | None:
        if enabled or weight is None or weight == default:
            return None
        return f"{weight:g} has no effect while judge.enabled is false: the environment's reward counts as it is"

    return Rule((f"judge.reward_blend.{name}", "judge.enabled"), check)


def _own_keys_are_spelled_right(others: Mapping[str, Any] | None) -> str | None:
    ours = [name for name in PolicyConfigSection.model_fields if name not in ("top_p", "top_k")]
    for name in others or {}:
        if meant := difflib.get_close_matches(name, ours, n=1, cutoff=0.8):
            return f"{name} is sent to the task app and nothing here reads it; did you mean {meant[0]!r}?"
    return None


def _each_rollout_has_its_own(others: Mapping[str, Any] | None) -> str | None:
    given = [name for name in APP_KEYS_SAID_FOR_EACH_ROLLOUT if name in (others or {})]
    if not given:
        return None
    return f"{', '.join(given)}: not sent as written, because every rollout is told where to ask the policy itself"


def _images_are_refused(others: Mapping[str, Any] | None) -> str | None:
    asked = [name for name in _VISION if (others or {}).get(name) is True]
    if not asked:
        return None
    return (
        f"{', '.join(asked)} = true is sent to the task app; the policy reads text, and calls with images are refused"
    )


def _both_score_steps(mode: str | None, enabled: bool | None, env_config: Mapping[str, Any]) -> str | None:
    theirs = env_config.get("step_rewards")
    if not isinstance(theirs, Mapping) or not isinstance(theirs.get("mode"), str):
        return None
    ours = "off" if enabled is False else mode or "off"
    used = theirs["mode"].lower() if theirs.get("enabled", True) is not False else "off"
    if used == ours:
        return None
    return f"{show(ours)} is what is learned from, and rollout.env_config.step_rewards asks for {show(used)}"


def _truncation_is_scored(score_truncated: bool, *asked: Any) -> str | None:
    given = [
        f"{name} = {value}" for name, value in zip(POLICY_CONFIG, asked, strict=True) if name in ("top_p", "top_k")
    ]
    if not score_truncated or all(text.endswith("None") for text in given):
        return None
    cut = ", ".join(text for text in given if not text.endswith("None"))
    return f"true: the learner scores under the same truncation as rollout.policy_config ({cut})"


NOTICE_RULES: Sequence[Rule] = (
    Rule(("training.step_rewards_enabled", "training.step_rewards_mode"), _switch_wins),
    _of_decisions("step_rewards_beta", 0.0),
    _of_decisions("step_rewards_indicator_lambda", 0.0),
    _of_decisions("step_rewards_strategy", None),
    _of_decisions("event_rewards_kind", None),
    *(
        acts_with(f"training.{name}", {}, "training.step_rewards_strategy", "per_achievement")
        for name in ("step_rewards_weights", "step_rewards_k_limits")
    ),
    no_effect(
        "training.event_rewards_kind",
        "unique",
        "training.step_rewards_strategy",
        lambda strategy: strategy != "per_achievement",
        "each event has its limit in step_rewards_k_limits; choose another strategy",
    ),
    Rule(("training.step_rewards_mode", "training.step_rewards_enabled", "rollout.env_config"), _both_score_steps),
    Rule(("reference.placement", *KL_TERMS), _reference_is_asked),
    *(
        acts_with(f"reference.{name}", default_of(ReferenceSettings, name), "reference.placement", "dedicated")
        for name in ("port", "tp", "health_max_wait_s", "health_interval_ms")
    ),
    Rule(("training.max_turns", "rollout.max_turns"), _shorter_turns_count),
    Rule(("training.gradient_accumulation_steps", "training.max_accumulated_minibatch"), _cap_counts),
    Rule(("evaluation.instances", "evaluation.seeds"), _seeds_count),
    Rule(("services.judge_url", "judge"), _judge_is_on),
    *(_weighs_a_judge(name) for name in RewardBlend.model_fields),
    Rule((_POLICY_CONFIG,), _own_keys_are_spelled_right),
    Rule((_POLICY_CONFIG,), _each_rollout_has_its_own),
    Rule((_POLICY_CONFIG,), _images_are_refused),
    Rule(
        ("training.score_truncated", *(f"rollout.policy_config.{name}" for name in POLICY_CONFIG)),
        _truncation_is_scored,
    ),
)
