"""The learner's knobs. Torch-free, so that a config can be read anywhere; each default cites its source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gspo_gym.settings import Settings


class LossSettings(Settings):
    """GSPO and GSPO-token (arXiv 2507.18071), always in stop-gradient form."""

    unit: Literal["trajectory", "turn", "token"] = Field(
        default="trajectory",
        description=(
            "tokens that share one importance ratio: all sampled tokens of the trajectory (GSPO), of a turn, "
            "or one (GRPO)"
        ),
    )
    clip_low: float = Field(default=3e-4, gt=0, lt=1, description="ratio floor is 1 - clip_low (paper: 3e-4)")
    clip_high: float = Field(default=4e-4, gt=0, description="ratio ceiling is 1 + clip_high (paper: 4e-4)")
    kl_coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the k3 estimate of KL(policy || reference); 0 needs no reference (paper: 0)",
    )


class AdvantageSettings(Settings):
    """Group-relative advantages."""

    level: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description="one advantage per episode from its return (paper), or one per turn from its return-to-go",
    )
    normalize_std: bool = Field(
        default=True, description="divide by the group's standard deviation, Bessel-corrected (GRPO's and the paper's)"
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="per turn, for return-to-go; must stay 1 at level 'trajectory'"
    )

    @model_validator(mode="after")
    def _discount_needs_turns(self) -> AdvantageSettings:
        if self.level == "trajectory" and self.discount != 1.0:
            raise ValueError(
                f"discount is used at level 'turn' only (an episode's return is undiscounted), got {self.discount} at "
                "level 'trajectory'"
            )
        return self


class OptimizerSettings(Settings):
    """AdamW with linear warm-up, then a constant rate or a cosine decay to `min_lr_fraction`."""

    learning_rate: float = Field(gt=0, description="peak")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW moments")
    eps: float = Field(default=1e-8, gt=0, description="AdamW denominator")
    weight_decay: float = Field(
        default=0.0, ge=0, description="decoupled, on parameters of two or more dimensions only (not norms, not biases)"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="global L2 norm to which gradients are clipped")
    num_warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="of the learning rate after its linear warm-up"
    )
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1, description="of the peak, where the cosine ends")


class UpdateSettings(Settings):
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
    max_tokens_per_microbatch: int = Field(
        default=16384, gt=0, description="padded tokens per forward; gradients accumulate over micro-batches"
    )
    scoring_chunk_tokens: int = Field(
        default=1024, gt=0, description="sampled tokens whose [chunk, V] logits exist at once"
    )
    max_nonfinite_steps: int = Field(
        default=5, ge=0, description="steps in a row that may be skipped for a NaN or infinity before the run stops"
    )


class SupervisedSettings(Settings):
    """Warm-up on demonstrations: passes, batch and memory. The optimizer has its own settings."""

    num_epochs: int = Field(default=1, gt=0, description="passes over the demonstrations, reshuffled each time")
    batch_size: int = Field(default=32, gt=0, description="most trajectories per optimizer step")
    max_tokens_per_microbatch: int = Field(default=16384, gt=0, description="padded tokens per forward")
    scoring_chunk_tokens: int = Field(
        default=1024, gt=0, description="sampled tokens whose [chunk, V] logits exist at once"
    )
    max_nonfinite_steps: int = Field(
        default=5, ge=0, description="steps in a row that may be skipped for a NaN or infinity before the run stops"
    )


class LoraSettings(Settings):
    """A low-rank adapter on a frozen model (arXiv 2106.09685).

    There is no dropout: it would be on in one of the two passes that a ratio compares, and off in the other.
    """

    r: int = Field(default=16, gt=0, description="rank")
    alpha: float = Field(default=32, gt=0, description="the adapter's output is scaled by alpha / r")
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        default="all-linear", description="names of the adapted modules, or 'all-linear' (all but the output head)"
    )
