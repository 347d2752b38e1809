"""The knobs between an episode's rewards and its advantages; `settings` has the others and hands these on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from gspo_gym.base.settings import Settings


class RewardSettings(Settings):
    """What becomes of rewards before episodes are compared: overlong episodes, clipping, KL in the reward."""

    clip: float | None = Field(
        default=None,
        gt=0,
        description=(
            "each episode's return (at level 'turn', each return-to-go) is cut to [-clip, clip]; absent: not (ROLL: "
            "reward_clip)"
        ),
    )
    overlong: Literal["keep", "mask", "penalize"] = Field(
        default="keep",
        description=(
            "an episode that a limit cut off (turns, context, or output tokens in its last turn): taken as it is, left "
            "out of the loss but not of the statistics, or its return lowered by overlong_penalty"
        ),
    )
    overlong_penalty: float = Field(default=1.0, gt=0, description="subtracted from the last turn's reward")
    kl_coef: float = Field(
        default=0.0,
        ge=0,
        description=(
            "beta of a token-level penalty in the reward: -beta * log(old / reference), summed from the token to the "
            "episode's end (ROLL: add_token_level_kl)"
        ),
    )
    kl_target: float | None = Field(
        default=None,
        gt=0,
        description="nats per token; beta is adapted towards it (arXiv 1909.08593, section 2.2); absent: beta is fixed",
    )
    kl_horizon: int = Field(
        default=10_000, gt=0, description="trajectories over which an adaptive beta changes by 20% at most"
    )

    @model_validator(mode="after")
    def _adaptive_beta_starts_above_0(self) -> RewardSettings:
        if self.kl_target is not None and self.kl_coef <= 0:
            raise ValueError("kl_target: adapts kl_coef, which is 0 and would stay 0; set kl_coef or remove kl_target")
        return self


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
        if self.mode != "decision_stepwise":
            names = ("kind", "strategy", "indicator_lambda", "beta", "weights", "k_limits")
            self._require_defaults(names, f"mode {self.mode!r} looks at no events (decision_stepwise does)")
        elif self.strategy == "per_achievement":
            self._require_defaults(("kind",), "strategy 'per_achievement' limits repeats by k_limits (<= 0: no limit)")
        else:
            self._require_defaults(("weights", "k_limits"), "only strategy 'per_achievement' reads it")
        return self

    def _require_defaults(self, names: Sequence[str], reason: str) -> None:
        fields = type(self).model_fields
        if ignored := [name for name in names if getattr(self, name) != fields[name].default]:
            raise ValueError(f"{ignored[0]}: has no effect, because {reason}; remove it")


class AdvantageSettings(Settings):
    """Which episodes, turns or tokens did better than others, and by how much."""

    level: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description="one advantage per episode from its return (paper), or one per turn from its return-to-go",
    )
    baseline: Literal["group", "leave_one_out", "batch", "running", "none"] = Field(
        default="group",
        description=(
            "what is subtracted from a return: the mean of its group (paper), of its siblings, of the batch, of all "
            "returns so far, or nothing (REINFORCE); at level 'turn' the default is leave_one_out (`advantages.py`: "
            "of which returns-to-go)"
        ),
    )
    scale: Literal["group", "batch", "running", "none"] = Field(
        default="group",
        description=(
            "what it is divided by: the Bessel-corrected std of the group (paper), the batch, all so far, or 1; with "
            "baseline batch, running or none the default is the same word"
        ),
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="per turn, for return-to-go; must stay 1 at level 'trajectory'"
    )
    whiten: Literal["none", "tokens", "trajectories"] = Field(
        default="none",
        description=(
            "shift and scale the batch's advantages to mean 0 and variance 1, over its sampled tokens (ROLL: long "
            "episodes weigh more) or over its trajectories (AgileRL)"
        ),
    )
    clip: float | None = Field(
        default=None, gt=0, description="advantages are cut to [-clip, clip], after whitening; absent: not"
    )
    filter_eps: float | None = Field(
        default=None,
        ge=0,
        description="trajectories with |advantage| <= this leave the batch and its denominators; absent: all stay",
    )
    kl_shaping_coef: float = Field(
        default=0.0,
        ge=0,
        description=(
            "beta of A_it = A_i + beta * (mean_t kl_it - kl_it), kl = log(old / reference), detached (AgileRL: "
            "use_kl_advantage_shaping)"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_follow(cls, values: Any) -> Any:  # Any: pydantic hands over whatever it was given
        if not isinstance(values, Mapping):
            return values
        filled = dict(values)
        if filled.get("level") == "turn":
            filled.setdefault("baseline", "leave_one_out")
        if filled.get("baseline") in ("batch", "running", "none"):
            filled.setdefault("scale", filled["baseline"])
        return filled

    @model_validator(mode="after")
    def _discount_needs_turns(self) -> AdvantageSettings:
        if self.level == "trajectory" and self.discount != 1.0:
            raise ValueError(
                f"discount is used at level 'turn' only (an episode's return is undiscounted), got {self.discount} at "
                "level 'trajectory'"
            )
        return self
