"""Rules about training on the samples of an endpoint whose weights never change (rollout.rescore).

The learner's own logprobs take the place of the sampler's, which are zeros if the endpoint gives text only: nothing may
read the sampler's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.apps import WeightSyncSection
from gspo_gym.config.rules.judge import has_app
from gspo_gym.config.rules.objective import Rule, no_effect
from gspo_gym.config.words import show
from gspo_gym.learning.settings import CorrectionSettings


def _samples_are_an_endpoints(rescore: bool, engine: str) -> str | None:
    if not rescore or engine == "http":
        return None
    return (
        f"has no effect with rollout.engine {show(engine)}, which samples from the learner's own weights: set that to "
        '"http", or remove this'
    )


def _no_app_is_asked(rescore: bool, task_url: str | None, mixture: Sequence[Mapping[str, Any]]) -> str | None:
    # A gateway asks one engine, and with rescore training and evaluation have one each.
    if not rescore or not has_app(task_url, mixture):
        return None
    return "true trains on environments that are played here, not by task apps: remove services.task_url, or this"


def _of_the_sampler(name: str) -> Rule:
    """Return the rule that a key of [correction] keeps its default, which does not read the sampler's logprobs."""
    default = CorrectionSettings.model_fields[name].default

    def check(value: Any, rescore: bool) -> str | None:
        if not rescore or value == default:
            return None
        remedy = "remove this" if default is None else f"set {show(default)}"
        return f"looks at the sampler's logprobs, which rollout.rescore = true replaces by the learner's: {remedy}"

    return Rule((f"correction.{name}", "rollout.rescore"), check)


def _nothing_is_played_ahead(max_staleness: int, rescore: bool) -> str | None:
    if not rescore or max_staleness == 0:
        return None
    return (
        f"expected 0 with rollout.rescore = true, got {max_staleness}: the weights that sample have no version to be "
        "behind"
    )


def _of_sent_weights(key: str, default: Any) -> Rule:
    def check(value: Any, engine: str) -> str | None:
        if engine != "http" or value in (None, default):
            return None
        return f'has no effect with rollout.engine "http", which gets no weights: set {show(default)}, or remove this'

    return Rule((key, "rollout.engine"), check)


RESCORE_RULES = (
    no_effect("services.engine_model", None, "rollout.engine", lambda engine: engine == "http", 'set that to "http"'),
    Rule(("rollout.rescore", "rollout.engine"), _samples_are_an_endpoints),
    Rule(("rollout.rescore", "services.task_url", "rollout.mixture"), _no_app_is_asked),
    *(_of_the_sampler(name) for name in ("old_logprobs", "level", "off_policy_threshold", "max_engine_gap")),
    Rule(("training.max_staleness", "rollout.rescore"), _nothing_is_played_ahead),
    _of_sent_weights("training.weight_sync_interval", 1),
    *(
        _of_sent_weights(f"training.weight_sync.{name}", WeightSyncSection.model_fields[name].default)
        for name in ("mode", "direct", "verify_every_k")
    ),
)
