"""The learner's settings; each default cites its source. Without torch: a config can be read anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gspo_gym.base.settings import Settings
from gspo_gym.errors import ConfigError
from gspo_gym.learning.distillation import DistillationSettings as DistillationSettings
from gspo_gym.learning.surrogate_keys import surrogate_problem, with_following_clips

_ROUNDING = 1e-9  # of a product of a fraction and a number of steps; far above float64's, far below a step
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Positive = Annotated[float, Field(gt=0)]
# From here up, a clip on a sequence's ratio never acts: its logarithm is a mean over tokens, which stays within about
# 1e-3 of 0 (arXiv 2507.18071, section 5.1, clips at 3e-4 and 4e-4).
WIDE_CLIP = 0.05
# Aggregations in which a long episode weighs more than a short one.
LENGTH_WEIGHTED = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "bnpo", "dr_grpo", "dapo")

LearningRate = Annotated[
    float,
    Field(
        gt=0,
        le=1,
        description="peak; a step of AdamW moves each weight by about so much, so that 1 leaves nothing of it",
    ),
]


class LossSettings(Settings):
    """GSPO and GSPO-token (arXiv 2507.18071), always in stop-gradient form."""

    unit: Literal["trajectory", "segment", "turn", "token"] = Field(
        default="trajectory",
        description=(
            "tokens that share one importance ratio: all sampled tokens of the trajectory (GSPO), of a segment, of a "
            "turn, or one (GRPO)"
        ),
    )
    surrogate: Literal["clip", "cispo", "sapo", "gmpo", "dppo", "vespo"] = Field(
        default="clip",
        description=(
            "what is maximised of ratio and advantage: PPO's clipped minimum (paper), or what the other method of this "
            "name maximises; docs/explanations/surrogates.md has formulas and sources"
        ),
    )
    aggregation: Literal[
        "seq-mean-token-mean",
        "turn-mean-token-mean",
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "grpo",
        "bnpo",
        "dr_grpo",
        "dapo",
    ] = Field(
        default="seq-mean-token-mean",
        description=(
            "how token terms become one loss; see `losses.py` for each denominator (paper: seq-mean-token-mean, an "
            "episode weighs one)"
        ),
    )
    norm_length: int | None = Field(
        default=None,
        gt=0,
        description="tokens; the constant divisor of seq-mean-token-sum-norm and dr_grpo, which need it",
    )
    clip_low: float = Field(
        default=3e-4, gt=0, lt=1, description="ratio floor is 1 - clip_low (paper: 3e-4); dppo: of probabilities"
    )
    clip_high: float = Field(
        default=4e-4, gt=0, description="ratio ceiling is 1 + clip_high (paper: 4e-4); cispo: cap; dppo: as clip_low"
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description=(
            "for a negative advantage, the ratio counts as at most this, which is more than 1 + clip_high "
            "(arXiv 1912.09729; TRL: delta); absent: off"
        ),
    )
    sapo_temperatures: tuple[_Positive, _Positive] = Field(
        default=(1.0, 1.05),
        description="tau of surrogate sapo for positive and for negative advantages; with a larger one they fade "
        "sooner (arXiv 2511.20347: 1.0 and 1.05)",
    )
    kl_coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the estimate of KL(policy || reference) in the loss; 0: no such term (paper: 0)",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description=(
            "per token, x = log(policy / reference): k1 = x (its expected gradient is 0), k2 = x^2 / 2, "
            "k3 = exp(-x) - 1 + x (joschu.net/blog/kl-approx.html)"
        ),
    )
    kl_clamp: float = Field(
        default=10.0, gt=0, description="nats; largest |estimate| of one token; where it is cut it has no gradient"
    )
    kl_importance_weighted: bool = Field(
        default=False,
        description="multiply each token's estimate by its importance ratio (TRL: use_bias_correction_kl)",
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="weight of the entropy bonus (nats, aggregated as the loss is)"
    )

    @field_validator("sapo_temperatures", mode="before")
    @classmethod
    def _may_be_a_list(cls, value: Any) -> Any:  # Any: as read, also from the rules on a page, which are JSON
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="before")
    @classmethod
    def _clips_follow(cls, values: Any) -> Any:  # Any: pydantic hands over whatever it was given
        return with_following_clips(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _surrogate_fits(self) -> LossSettings:
        changed = [n for n, info in type(self).model_fields.items() if getattr(self, n) != info.default]
        if problem := surrogate_problem(self.surrogate, self.unit, changed):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _norm_length_belongs(self) -> LossSettings:
        needs = self.aggregation in ("seq-mean-token-sum-norm", "dr_grpo")
        if needs and self.norm_length is None:
            raise ValueError(f"norm_length: aggregation {self.aggregation!r} divides by it, got none")
        if not needs and self.norm_length is not None:
            raise ValueError(f"norm_length: has no effect with aggregation {self.aggregation!r}; remove it")
        return self

    @model_validator(mode="after")
    def _dual_clip_lies_above_the_clip_range(self) -> LossSettings:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip: expected more than 1 + loss.clip_high = {1 + self.clip_high:g}, where the other clip is, "
                f"got {self.dual_clip:g}"
            )
        return self

    @model_validator(mode="after")
    def _kl_keys_need_the_term(self) -> LossSettings:
        if self.kl_coef > 0:
            return self
        fields = type(self).model_fields
        for name in ("kl_estimator", "kl_clamp", "kl_importance_weighted"):
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"{name}: has no effect, because kl_coef is 0 (no such term); remove it or set kl_coef"
                )
        return self


class CorrectionSettings(Settings):
    """Correction for an engine with logprobs that are not quite the trainer's.

    w = old / rollout is the ratio between the trainer's and the engine's probability of a sampled token, under the same
    weights; 1 if both compute alike.
    """

    old_logprobs: Literal["recompute", "rollout"] = Field(
        default="recompute",
        description="old logprobs are scored by the trainer, or the engine's own are taken (the ratio then corrects)",
    )
    level: Literal["none", "token", "turn", "trajectory"] = Field(
        default="none",
        description="one w per token, or the geometric mean over a turn's or a trajectory's tokens (never the product)",
    )
    mode: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="w above `high` counts as `high`, or a token with w outside [low, high] is left out",
    )
    low: float = Field(default=0.5, ge=0, lt=1, description="a ratio; mode 'mask' only")
    high: float = Field(default=2.0, gt=1, description="a ratio")
    off_policy_threshold: float | None = Field(
        default=None,
        gt=0,
        description=(
            "nats per token; an episode with a negative advantage is left out where mean log(rollout / now) exceeds it "
            "(arXiv 2512.02556); absent: none is"
        ),
    )
    max_engine_gap: float | None = Field(
        default=None,
        gt=0,
        description=(
            "nats; an alarm where the two logprobs of a token sampled under the present weights differ by more, an "
            "error in the third batch in a row; absent: 1e-4, or in 16 bits a mean KL of 0.01; none where temperature "
            "aside the two are of different distributions by the settings"
        ),
    )

    def rescored_problem(self, name: str) -> str | None:
        """Return why a key of `SAMPLER_KEYS` cannot be obeyed where the learner's logprobs stand for the sampler's."""
        default = type(self).model_fields[name].default
        if getattr(self, name) == default:
            return None
        remedy = "remove this" if default is None else f'set "{default}"'
        return f"looks at the sampler's logprobs, which rollout.rescore = true replaces by the learner's: {remedy}"

    @model_validator(mode="after")
    def _corrects_a_recomputed_ratio(self) -> CorrectionSettings:
        if self.level != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f"level: {self.level!r} compares recomputed old logprobs with the engine's, but old_logprobs is "
                "'rollout': set one of them to its default"
            )
        return self


# What looks at the sampler's logprobs, of which an endpoint may give none.
SAMPLER_KEYS = ("old_logprobs", "level", "off_policy_threshold", "max_engine_gap")


class ReferenceSettings(Settings):
    """[reference]: the frozen policy that KL terms compare with."""

    placement: Literal["none", "shared", "dedicated"] = Field(
        default="none", description="shared: in this process; dedicated: in a process of its own, which Ray starts"
    )
    source: Literal["auto", "base", "adapter", "copy"] = Field(
        default="auto",
        description=(
            "auto: where the run starts, after the warm-up if there is one (adapter for LoRA, copy for full training); "
            "adapter: a frozen copy of the adapter (AgileRL: use_separate_reference_adapter); copy: a frozen copy of "
            "all weights; base: the model with its adapter disabled"
        ),
    )
    update_every_n_iters: int = Field(
        default=0, ge=0, description="iterations after which the reference becomes the present policy; 0: never"
    )

    def source_problem(self, *, has_adapter: bool) -> str | None:
        """Return why the source cannot be had of a model with or without an adapter; None if it can."""
        if has_adapter or self.source not in ("base", "adapter"):
            return None
        return f'"{self.source}" needs an adapter (model.trainer_mode "lora" or "qlora"): set "copy" or "auto"'

    def update_problem(self) -> str | None:
        """Return why the reference cannot become the present policy; None if it can, or never does."""
        if self.update_every_n_iters == 0 or self.source != "base":
            return None
        return (
            "cannot move the frozen weights under the adapter, which are this reference: set reference.source to "
            '"adapter" or "copy"'
        )


class OptimizerSettings(Settings):
    """[optimizer]: AdamW, but for the learning rate, which is training.learning_rate."""

    kind: Literal["adamw", "adamw_fused", "adamw_8bit", "paged_adamw_8bit"] = Field(
        default="adamw_fused",
        description=(
            "torch's AdamW in plain operations or in one fused kernel (on a CPU a third of the time), or bitsandbytes' "
            "with 8-bit moments for parameters of 4096 numbers and more (must be installed; paged needs CUDA)"
        ),
    )
    betas: tuple[_Beta, _Beta] = Field(default=(0.9, 0.95), description="AdamW moments")
    eps: float = Field(default=1e-8, gt=0, description="AdamW denominator")
    weight_decay: float = Field(
        default=0.0, ge=0, description="decoupled, on parameters of two or more dimensions only (not norms, not biases)"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="global L2 norm to which gradients are clipped")
    warmup_steps: int | float = Field(
        default=0,
        ge=0,
        description="optimizer steps of linear warm-up; a number below 1 is a fraction of all steps, rounded up (TRL: "
        "warmup_ratio)",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate after its linear warm-up"
    )
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1, description="of the peak, where the decay ends")

    @field_validator("warmup_steps")
    @classmethod
    def _warmup_is_whole(cls, steps: float) -> float:
        if steps >= 1 and steps != int(steps):
            raise ValueError(f"expected whole steps, or a fraction of all steps below 1, got {steps}")
        return steps

    def num_warmup_steps(self, total_steps: int | None) -> int:
        """Return the optimizer steps of linear warm-up: `warmup_steps`, or a fraction of all steps, rounded up.

        A product that is whole up to float64's rounding is taken as whole: 0.07 * 100 is 7 steps, although transformers
        makes 8 of its `warmup_ratio`.

        >>> OptimizerSettings(warmup_steps=0.1).num_warmup_steps(total_steps=31)
        4

        Raises:
            ConfigError: a fraction of an unknown number of steps.
        """
        if self.warmup_steps >= 1 or self.warmup_steps == 0:
            return int(self.warmup_steps)
        if total_steps is None:
            raise ConfigError("warmup_steps below 1 needs total_steps, the number of optimizer steps of the run")
        return math.ceil(self.warmup_steps * total_steps - _ROUNDING)

    def decay_problem(self, total_steps: int) -> str | None:
        """Return why a run of so many optimizer steps has no room for the schedule; None if it has."""
        if self.schedule == "constant" or total_steps > self.num_warmup_steps(total_steps):
            return None
        return (
            f"no step is left for the {self.schedule} decay: optimizer.warmup_steps = {self.warmup_steps:g}, and the "
            f"run has {total_steps} optimizer steps"
        )

    def at_constant_rate(self) -> OptimizerSettings:
        """Return the same optimizer with neither warm-up nor decay of the learning rate."""
        schedule_fields = {"warmup_steps", "schedule", "min_lr_fraction"}
        return OptimizerSettings(**self.model_dump(exclude=schedule_fields))


DEFAULT_LOGITS_BYTES = 512 << 20  # for the logits that exist at once, with what is made of them


class UpdateSettings(Settings):
    """The keys of [training] that say how one batch of trajectories becomes optimizer steps."""

    update_epochs: int = Field(default=1, gt=0, description="passes over the batch, old logprobs frozen")
    learning_rate: LearningRate
    max_tokens_per_microbatch: int = Field(
        default=16384, gt=0, description="padded tokens per forward; gradients accumulate over micro-batches"
    )
    share_prefixes: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "compute tokens that begin several rows of a micro-batch once, with the same gradients; auto: on a "
            "processor, where that saves a sixth of the tokens"
        ),
    )


class SupervisedSettings(Settings):
    """The keys of [warmup] that say how demonstrations are learned."""

    num_epochs: int = Field(default=1, gt=0, description="passes over the demonstrations, reshuffled each time")
    learning_rate: LearningRate
    batch_size: int = Field(default=32, gt=0, description="most trajectories per optimizer step")


class LoraSettings(Settings):
    """A low-rank adapter on a frozen model (arXiv 2106.09685)."""

    r: int = Field(default=16, gt=0, description="rank")
    alpha: float = Field(default=32, gt=0, description="the adapter's output is scaled by alpha / r")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description=(
            "probability, on the adapter's input while the learner scores old and present logprobs, with the same "
            "masks for both: a ratio compares weights, not masks (the hosted trainer has 0.1, AgileRL 0.05)"
        ),
    )
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        default="all-linear",
        description=(
            "names of the adapted modules, such as q_proj or self_attn.q_proj, or 'all-linear': every linear layer and "
            "the experts' fused matrices, but not the output head, embeddings or routers"
        ),
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names_modules(cls, value: Any) -> Any:  # Any: pydantic hands over whatever it was given
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        if list(value) == ["all-linear"]:
            return "all-linear"
        if "all-linear" in value:
            raise ValueError(f"'all-linear' stands for all modules and takes no others beside it, got {list(value)}")
        if not value:
            raise ValueError("expected 'all-linear' or a list of at least one module name, got []")
        return value


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
    overlong: Literal["keep", "mask"] | _Positive = Field(
        default="keep",
        description=(
            "an episode that a limit cut off (turns, context, or output tokens in its last turn): taken as it is, left "
            "out of the loss but not of the statistics, or, with a number > 0, its last turn's reward lowered by that"
        ),
    )
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
        description="nats per token; beta is adapted towards it, by 20% at most over 10000 trajectories (arXiv "
        "1909.08593, section 2.2); absent: beta is fixed",
    )

    @model_validator(mode="after")
    def _adaptive_beta_starts_above_0(self) -> RewardSettings:
        if self.kl_target is not None and self.kl_coef <= 0:
            raise ValueError("kl_target: adapts kl_coef, which is 0 and would stay 0; set kl_coef or remove kl_target")
        return self


class AdvantageSettings(Settings):
    """Which episodes, turns or tokens did better than others, and by how much."""

    level: Literal["trajectory", "turn", "auto"] = Field(
        default="trajectory",
        description=(
            "one advantage per episode from its return (paper), one per turn from its return-to-go, or auto: of these "
            "the one with the smaller mean square in the batch's other groups"
        ),
    )
    baseline: Literal["group", "leave_one_out", "batch", "running", "role", "none"] = Field(
        default="group",
        description=(
            "what is subtracted from a return: the mean of its group (paper), of its siblings, of the batch, of all "
            "returns so far, a moving mean of its environment's (RAE), or nothing (REINFORCE); leave_one_out is the "
            "default at levels 'turn' and 'auto' (`advantages.py`: of which returns-to-go)"
        ),
    )
    scale: Literal["group", "batch", "running", "mean", "none"] = Field(
        default="group",
        description=(
            "what it is divided by: the Bessel-corrected std of the group (paper), the batch, all so far, the group's "
            "mean (MaxRL; returns of 0 and 1), or 1; with baseline batch, running or none the default is the same "
            "word, with role none"
        ),
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="per turn, for return-to-go; must stay 1 at other levels than 'turn'"
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
        return with_following_defaults(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _fits_the_level(self) -> AdvantageSettings:
        if self.scale == "mean" and (self.baseline, self.level) != ("group", "trajectory"):
            raise ValueError(
                'scale: "mean" (MaxRL) needs baseline "group" at level "trajectory", got '
                f'"{self.baseline}" at "{self.level}"'
            )
        if self.level != "turn" and self.discount != 1.0:
            raise ValueError(
                f"discount is used at level 'turn' only (an episode's return is undiscounted), got {self.discount} at "
                f"level {self.level!r}"
            )
        if self.level == "auto" and {"running", "role"} & {self.baseline, self.scale}:
            raise ValueError(
                'level: "auto" has no "running" baseline or scale and no baseline "role", which are of one level; set '
                '"group"'
            )
        return self


def with_following_defaults(advantages: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of [advantages] (Any: unchecked) with the baseline that follows from the level, and its scale."""
    values = dict(advantages)
    if values.get("level") in ("turn", "auto") and values.get("baseline") is None:
        values["baseline"] = "leave_one_out"
    scales = {"batch": "batch", "running": "running", "role": "none", "none": "none"}
    if values.get("scale") is None and (scale := scales.get(str(values.get("baseline")))) is not None:
        values["scale"] = scale
    return values
