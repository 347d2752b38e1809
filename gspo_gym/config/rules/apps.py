"""Rules about task apps, the gateway and mixed batches."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.apps import PolicyConfigSection
from gspo_gym.config.rules.rule import OTHER_KEYS, Rule
from gspo_gym.config.words import show
from gspo_gym.env.workers.limits import IsolationSettings
from gspo_gym.errors import nearest_name

# What every rollout's policy.config is told by the trainer, whatever rollout.policy_config says.
APP_KEYS_SAID_FOR_EACH_ROLLOUT = ("model", "inference_url", "trace_correlation_id")

_SOURCES = ("services.task_url", "rollout.mixture")
Entries = Sequence[Mapping[str, Any]]  # as read, hence Any


def _shares_leave_some(mixture: Entries) -> str | None:
    total = sum(entry["share"] for entry in mixture)
    if total < 1:
        return None
    return f"expected shares below 1 in sum, got {total:g}: rollout.env_name gets the rest, and must get some"


def has_app(task_url: str | None, mixture: Entries) -> bool:
    """Whether a task app plays a part of the episodes."""
    return task_url is not None or any(entry.get("task_url") for entry in mixture)


def _keys_are_of_apps(mixture: Entries) -> str | None:
    for number, entry in enumerate(mixture):
        if entry.get("api_key_env") and not entry.get("task_url"):
            return f"api_key_env of entry {number} has no effect without a task_url there: give it, or remove this"
    return None


def _other_keys_have_a_reader(others: Mapping[str, Any] | None, task_url: str | None, mixture: Entries) -> str | None:
    if not others or has_app(task_url, mixture):
        return None
    name = next(iter(others))
    return f"{name}: unknown key; {nearest_name(name, PolicyConfigSection.model_fields)} (only a task app has others)"


def _gateway_has_an_app(is_given: bool, task_url: str | None, mixture: Entries) -> str | None:
    if not is_given or has_app(task_url, mixture):
        return None
    return "has no effect without a task app: give services.task_url, or remove this section"


def _schemas_come_from_an_app(
    is_obeyed: bool | None, min_tokens: int, task_url: str | None, mixture: Entries
) -> str | None:
    if not is_obeyed:
        return None
    if not has_app(task_url, mixture):
        return "has no effect without a task app, which alone asks for schemas: give services.task_url, or remove this"
    if min_tokens:
        return f"knows the model's own end tokens, which rollout.min_output_tokens = {min_tokens} would withhold: set 0"
    return None


def _apps_can_call(host: str | None, public_url: str | None) -> str | None:
    if host is None or public_url is not None or not _is_any_address(host):
        return None
    return f"{show(host)} is every address of this machine, and none to call: give gateway.public_url, too"


def _is_any_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _of_environments_here(name: str) -> Rule:
    default = IsolationSettings.model_fields[name].default

    def check(value: Any, task_url: str | None, mixture: Entries, has_warmup: bool) -> str | None:
        is_played_here = task_url is None or has_warmup or any(not entry.get("task_url") for entry in mixture)
        if is_played_here or value == default:
            return None
        return f"has no effect where task apps play all episodes: set {show(default)}"

    return Rule((f"rollout.{name}", *_SOURCES, "warmup"), check)


APP_RULES = (
    Rule((f"rollout.policy_config{OTHER_KEYS}", *_SOURCES), _other_keys_have_a_reader),
    Rule(("rollout.mixture",), _shares_leave_some),
    Rule(("rollout.mixture",), _keys_are_of_apps),
    Rule(("gateway", *_SOURCES), _gateway_has_an_app),
    Rule(("vllm.structured_output", "rollout.min_output_tokens", *_SOURCES), _schemas_come_from_an_app),
    Rule(("gateway.host", "gateway.public_url"), _apps_can_call),
    *(_of_environments_here(name) for name in ("isolation", "env_memory_limit_mb", "env_variables")),
)
