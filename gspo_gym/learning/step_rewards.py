"""The settings of step rewards: which number each turn earns (`credit.py` computes it)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gspo_gym.base.settings import Settings


class StepRewardSettings(Settings):
    """Which number each turn earns; the hosted trainer's step rewards. Turns count from t = 0, T turns in all."""

    mode: Literal["off", "decision_stepwise", "env_sparse"] = Field(
        default="env_sparse",
        description=(
            "off: the episode's return on its last turn; env_sparse: the environment's own reward of each turn (the "
            "sum is the same); decision_stepwise: the events of each turn, in place of the environment's rewards"
        ),
    )
    kind: Literal["unique", "absolute"] = Field(
        default="unique",
        description=(
            "decision_stepwise counts the events of a turn that were not seen before in the episode, or all of it; "
            "per_achievement has k_limits instead"
        ),
    )
    strategy: Literal["consistent", "per_achievement"] | None = Field(
        default=None,
        description=(
            "absent: a turn earns its event count plus indicator_lambda if one is new; consistent: indicator_lambda "
            "if any event counts; per_achievement: indicator_lambda times the sum of the events' weights, each "
            "credited k_limits times at most (a lambda of 0 counts as 1 in both, as at the origin)"
        ),
    )
    indicator_lambda: float = Field(default=0.0, ge=0, description="see strategy")
    beta: float = Field(default=0.0, ge=0, description="a turn with a new event earns beta * (T - t) more")
    weights: dict[str, float] = Field(default={}, description="per_achievement: an event's weight; 1 if not named")
    k_limits: dict[str, int] = Field(
        default={},
        description="per_achievement: times per episode that an event is credited; 1 if not named, <= 0 no limit",
    )

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> StepRewardSettings:
        for name, reason in idle_step_rewards(self.mode, self.strategy).items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: has no effect, because {reason}; remove it")
        return self


def idle_step_rewards(mode: str, strategy: str | None) -> dict[str, str]:
    """Return the fields of `StepRewardSettings` that this mode and strategy do not read, each with the reason."""
    if mode != "decision_stepwise":
        names = [name for name in StepRewardSettings.model_fields if name != "mode"]
        return dict.fromkeys(names, f'mode "{mode}" looks at no events ("decision_stepwise" does)')
    if strategy == "per_achievement":
        return {"kind": 'strategy "per_achievement" limits repeats by k_limits (<= 0: no limit)'}
    return dict.fromkeys(("weights", "k_limits"), 'only strategy "per_achievement" reads it')
