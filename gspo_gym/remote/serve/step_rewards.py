"""Step rewards on the app's side: what the achievements of a decision are worth, as a task app computes it.

A decision is one answer of the model with the steps that it sets off. `decision_rewards` counts achievements, for a
trainer that composes the reward itself (`learning/credit.py` does); `stepwise` holds a reward that is already composed.
The definitions and the names of the strategies are those of the task apps of the `synth-ai` package; its tables of
resource shaping belong to one game and are not here. Not the environment's own reward, which no setting here changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from gspo_gym.base.settings import Settings

_SAME_STRATEGY = {
    "": "consistent",
    "simple": "consistent",
    "consistent_stepwise": "consistent",
    "decision_consistent": "consistent",
    "per-achievement": "per_achievement",
    "perachievement": "per_achievement",
    "achievement_weighted": "per_achievement",
    "complex": "per_achievement",
}


class AppStepRewards(Settings):
    """`step_rewards` in a rollout's policy.config or env.config; the former wins. Unknown names are refused."""

    enabled: bool = Field(default=False, description="whether decisions are rewarded at all")
    mode: Literal["off", "decision_stepwise", "env_sparse"] = Field(
        default="off", description="only decision_stepwise is computed here; env_sparse is the step's own reward"
    )
    strategy: Literal["consistent", "per_achievement"] = Field(
        default="consistent", description="1 for a decision with any achievement, or the weights of them"
    )
    indicator_lambda: float = Field(default=0.0, ge=0, description="times the strategy's value; 0 counts as 1")
    step_beta: float = Field(default=0.0, description="of time shaping, which the trainer does; only repeated")
    weights: dict[str, float] = Field(default_factory=dict, description="of an achievement; 1 where none is given")
    k_limits: dict[str, int] = Field(
        default_factory=dict, description="how often an achievement counts in an episode; default 1, <= 0 always"
    )

    @field_validator("strategy", mode="before")
    @classmethod
    def _known_by_other_names(cls, value: Any) -> Any:
        return _SAME_STRATEGY.get(value.lower(), value.lower()) if isinstance(value, str) else value

    @property
    def is_active(self) -> bool:
        """Whether decisions carry rewards."""
        return self.enabled and self.mode == "decision_stepwise"


class DecisionRewards:
    """Counts the achievements of one episode, decision by decision.

    >>> rewards = DecisionRewards(AppStepRewards(enabled=True, mode="decision_stepwise", indicator_lambda=0.5))
    >>> rewards.of_decision(["wood", "drink"])["stepwise"]["reward"]
    0.5
    """

    def __init__(self, settings: AppStepRewards) -> None:
        self._settings = settings
        self._seen: dict[str, None] = {}  # in the order in which they were reached first
        self._counts: Counter[str] = Counter()
        self._stepwise: list[dict[str, Any]] = []

    def of_decision(self, events: Sequence[str]) -> dict[str, Any]:
        """`decision_rewards` and `stepwise` of the next decision, which reached these achievements (Any: JSON)."""
        settings, reached = self._settings, list(dict.fromkeys(events))
        unique = [name for name in reached if name not in self._seen]
        self._seen.update(dict.fromkeys(unique))
        indicator = int(bool(reached))
        base = float(indicator) if settings.strategy == "consistent" else self._weight_of(reached)
        stepwise = {
            "decision_index": len(self._stepwise),
            "indicator": indicator,
            "new_achievements": unique,
            "reward": (settings.indicator_lambda or 1.0) * base,
            "strategy": settings.strategy,
            "base_reward": base,
        }
        self._stepwise.append(stepwise)
        counted = {"turn": len(self._stepwise), "ach_delta": len(reached), "unique_delta": len(unique)}
        return {"decision_rewards": {**counted, "all": reached, "unique": unique}, "stepwise": stepwise}

    def samples(self) -> list[dict[str, Any]]:
        """`decision_samples` of a trajectory (Any: JSON)."""
        return [
            {
                "decision_index": one["decision_index"],
                "indicator": one["indicator"],
                "r_i": one["reward"],
                "base": one["base_reward"],
                "strategy": one["strategy"],
            }
            for one in self._stepwise
        ]

    def summary(self) -> dict[str, Any]:
        """`metrics.details.stepwise` (Any: JSON)."""
        settings = self._settings
        return {
            "indicator_sum": sum(one["indicator"] for one in self._stepwise),
            "reward_sum": self.reward_sum,
            "resource_reward": 0.0,
            "new_achievements_total": sum(len(one["new_achievements"]) for one in self._stepwise),
            "mode": settings.mode,
            "strategy": settings.strategy,
            "indicator_lambda": settings.indicator_lambda,
            "step_beta": settings.step_beta,
            "weights": dict(settings.weights),
            "k_limits": dict(settings.k_limits),
            "unique_achievements_total": len(self._seen),
            "unique_achievements": list(self._seen),
            "final_achievements": list(self._seen),
        }

    @property
    def reward_sum(self) -> float:
        """What all decisions so far are worth."""
        return float(sum(one["reward"] for one in self._stepwise))

    def _weight_of(self, reached: Sequence[str]) -> float:
        value = 0.0
        for name in reached:
            limit = self._settings.k_limits.get(name, 1)
            if limit <= 0 or self._counts[name] < limit:
                value += self._settings.weights.get(name, 1.0)
                self._counts[name] += 1
        return value


def step_rewards_of(policy_config: Mapping[str, Any], env_config: Mapping[str, Any]) -> AppStepRewards:
    """The settings in a rollout's request.

    Raises:
        pydantic.ValidationError: there are some, and one is unknown or wrong.
    """
    given = policy_config.get("step_rewards") or env_config.get("step_rewards") or {}
    return AppStepRewards.model_validate(given)
