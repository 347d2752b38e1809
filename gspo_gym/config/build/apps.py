"""Task apps of a configuration: the ids of their environments, their keys, and the settings sent to them."""

from __future__ import annotations

import importlib.util
from typing import Any

from gspo_gym.base.settings import read_key
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.sections import TaskSource
from gspo_gym.env.registry import resolve
from gspo_gym.errors import MissingExtraError, UnknownNameError


def environment_ids(config: RunConfig) -> tuple[str, ...]:
    """Return the environment id of each of `config.sources`, in the same order.

    An app's environment that is also registered here has the same id, because it is the same task. An environment that
    appears twice in a run gets a number.

    Raises:
        UnknownNameError: an environment that is to be played here is not registered.
    """
    ids: list[str] = []
    for source in config.sources:
        name = _environment_id(source)
        # The record says the id, and credit and reports group by it: two sources of a run must not share one.
        num_same = sum(environment_id.partition(" ")[0] == name for environment_id in ids)
        ids.append(f"{name} ({num_same + 1})" if num_same else name)
    return tuple(ids)


def check_apps(config: RunConfig) -> None:
    """Refuse task apps without the gateway's packages or their own keys; nothing is contacted.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigError: the variable for an app's key is not set.
    """
    apps = [source for source in config.sources if source.task_url is not None]
    if apps:
        check_gateway()
    for source in apps:
        own_key(source)


def check_gateway() -> None:
    """Refuse task apps without the packages of their gateway.

    Raises:
        MissingExtraError: a package is not installed.
    """
    if any(importlib.util.find_spec(package) is None for package in ("fastapi", "httpx", "uvicorn")):
        raise MissingExtraError("the gateway of task apps needs: pip install 'gspo-gym[apps]'")


def own_key(source: TaskSource) -> str | None:
    """Return the key in the variable that the source names; None if it names none."""
    return read_key(source.api_key_env, f"{source.key}.api_key_env")


def _environment_id(source: TaskSource) -> str:
    try:
        return resolve(source.env_name)
    except UnknownNameError:
        if source.task_url is None:
            raise  # to be played here, so it must be known here
        return source.env_name


def app_step_rewards(config: RunConfig) -> dict[str, Any]:
    """Return the settings of step rewards for a task app's env_config in training (Any: JSON).

    The result is {} unless decisions are rewarded, because other modes need nothing from the app. Without a configured
    strategy, none is sent.
    """
    settings = config.step_reward_settings
    if settings.mode != "decision_stepwise":
        return {}
    step_rewards: dict[str, Any] = {
        "enabled": True,
        "mode": settings.mode,
        "strategy": settings.strategy,
        "indicator_lambda": settings.indicator_lambda,
        "step_beta": settings.beta,
    }
    if settings.strategy == "per_achievement":
        # The limits belong to this strategy; an app might obey them in another one.
        step_rewards |= {"weights": dict(settings.weights), "k_limits": dict(settings.k_limits)}
    return {"step_rewards": {name: value for name, value in step_rewards.items() if value is not None}}
