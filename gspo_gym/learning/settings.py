"""The learner's knobs. Torch-free, so that a config can be read anywhere; each default cites its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gspo_gym.base.settings import Settings
from gspo_gym.learning.settings_rewards import AdvantageSettings as AdvantageSettings
from gspo_gym.learning.settings_rewards import RewardSettings as RewardSettings
from gspo_gym.learning.settings_rewards import StepRewardSettings as StepRewardSettings

_Beta = Annotated[float, Field(ge=0, lt=1)]


class LossSettings(Settings):
    """GSPO and GSPO-token (arXiv 2507.18071), always in stop-gradient form."""

    unit: Literal["trajectory", "segment", "turn", "token"] = Field(
        default="trajectory",
        description=(
            "tokens that share one importance ratio: all sampled tokens of the trajectory (GSPO), of a segment, of a "
            "turn, or one (GRPO)"
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
    clip_low: float = Field(default=3e-4, gt=0, lt=1, description="ratio floor is 1 - clip_low (paper: 3e-4)")
    clip_high: float = Field(default=4e-4, gt=0, description="ratio ceiling is 1 + clip_high (paper: 4e-4)")
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description=(
            "for a negative advantage, the ratio counts as at most this, which is at least 1 + clip_high "
            "(arXiv 1912.09729; TRL: delta); absent: off"
        ),
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
        if self.dual_clip is not None and self.dual_clip < 1 + self.clip_high:
            raise ValueError(
                f"dual_clip: expected at least 1 + clip_high = {1 + self.clip_high}, got {self.dual_clip}, which would "
                "cut ratios that the clip range allows"
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
    """What is done about an engine whose logprobs are not quite the trainer's.

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

    @property
    def reads_rollout_logprobs(self) -> bool:
        """Whether the loss depends on the engine's logprobs."""
        return self.old_logprobs == "rollout" or self.level != "none" or self.off_policy_threshold is not None

    @model_validator(mode="after")
    def _corrects_a_recomputed_ratio(self) -> CorrectionSettings:
        if self.level != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f"level: {self.level!r} compares recomputed old logprobs with the engine's, but old_logprobs is "
                "'rollout': set one of them to its default"
            )
        return self


class ReferenceSettings(Settings):
    """The frozen policy that KL terms compare with, in this process."""

    source: Literal["auto", "base", "adapter", "copy"] = Field(
        default="auto",
        description=(
            "auto: base for LoRA, copy for full training; base: the model with its adapter disabled; adapter: a frozen "
            "copy of the adapter (AgileRL: use_separate_reference_adapter); copy: a frozen copy of all weights"
        ),
    )
    update_every_n_iters: int = Field(
        default=0, ge=0, description="iterations after which the reference becomes the present policy; 0: never"
    )


class OptimizerSettings(Settings):
    """AdamW with linear warm-up, then a constant rate or a decay to `min_lr_fraction`."""

    learning_rate: float = Field(
        gt=0,
        le=1,
        description="peak; a step of AdamW moves each weight by about so much, so that 1 leaves nothing of it",
    )
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
    num_warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    warmup_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="of all optimizer steps, rounded up, instead of num_warmup_steps (TRL: warmup_ratio)",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate after its linear warm-up"
    )
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1, description="of the peak, where the decay ends")

    @model_validator(mode="after")
    def _warmup_is_said_once(self) -> OptimizerSettings:
        if self.warmup_fraction is not None and self.num_warmup_steps:
            raise ValueError(
                f"warmup_fraction: contradicts num_warmup_steps = {self.num_warmup_steps}; give one of them, got "
                f"{self.warmup_fraction}"
            )
        return self


class _StepSettings(Settings):
    """What any optimizer step, of reinforcement or of the warm-up, may take of memory and of patience."""

    max_tokens_per_microbatch: int = Field(
        default=16384, gt=0, description="padded tokens per forward; gradients accumulate over micro-batches"
    )
    scoring_chunk_tokens: int = Field(
        default=1024, gt=0, description="sampled tokens whose [chunk, V] logits exist at once"
    )
    max_nonfinite_steps: int = Field(
        default=5, ge=0, description="steps in a row that may be skipped for a NaN or infinity before the run stops"
    )


class UpdateSettings(_StepSettings):
    """How one batch of trajectories becomes optimizer steps."""

    minibatch_size: int | None = Field(
        default=None,
        gt=0,
        description=(
            "most trajectories per optimizer step (the batch is split evenly); None takes the whole batch in one step, "
            "whose ratio is 1 everywhere, so that no clip acts (the paper takes 4 steps a batch)"
        ),
    )
    num_epochs: int = Field(default=1, gt=0, description="passes over the batch, old logprobs frozen")
    score_truncated: bool = Field(
        default=False,
        description=(
            "score under the truncated and renormalised distribution that rollout.top_p, top_k and min_p sample from, "
            "with the sampled token always kept; False scores under the whole softmax"
        ),
    )


class SupervisedSettings(_StepSettings):
    """Warm-up on demonstrations: passes, batch and memory. The optimizer has its own settings."""

    num_epochs: int = Field(default=1, gt=0, description="passes over the demonstrations, reshuffled each time")
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
    on_mismatch: Literal["error", "merge"] = Field(
        default="error",
        description=(
            "for a model.base that is an adapter of another shape: refuse, or widen it to the larger rank and the "
            "union of the modules, changing nothing of what it computes (AgileRL: merge_lora_configs)"
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
