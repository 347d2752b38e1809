"""[distillation]: how a teacher is learned from. Not for its arithmetic, which is in `losses.py` and `reference.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from gspo_gym.base.settings import Settings


class DistillationSettings(Settings):
    """[distillation]: a frozen teacher, which is learned from at every sampled token."""

    teacher: str = Field(
        min_length=1,
        description="a run, RUN@best, RUN@STEP, or what model.base takes; of the model's own vocabulary and merges",
    )
    coefficient: float = Field(
        default=1.0, gt=0, description="weight of the teacher's term, a mean over sampled tokens"
    )
    divergence: Literal["sampled", "reverse_kl", "forward_kl"] = Field(
        default="sampled",
        description=(
            "what is learned at a token: the log-ratio of the sampled one as its advantage, once a batch (Thinking "
            "Machines), or, of the whole vocabulary and anew in every pass, KL(policy || teacher) (TRL's GKD with beta "
            "1) or KL(teacher || policy) (beta 0)"
        ),
    )
    baseline: bool = Field(
        default=False,
        description=(
            "add KL(policy || teacher) at the token to its advantage, whose mean under the policy is then 0 "
            "(arXiv 2605.07865); the policy is scored once more; with divergence sampled only"
        ),
    )
    reward: bool = Field(
        default=True, description="learn from the rewards, too; false: from the teacher alone (Thinking Machines)"
    )

    @field_validator("teacher")
    @classmethod
    def _is_here(cls, name: str) -> str:
        if name.startswith(("http://", "https://")):
            raise ValueError(
                f"expected a model that loads here, got the endpoint {name}: name a folder, a run or a hub id"
            )
        return name

    @model_validator(mode="after")
    def _has_an_advantage(self) -> DistillationSettings:
        if self.baseline and self.divergence != "sampled":
            raise ValueError(
                "baseline: takes noise off the log-ratio of the sampled token, and "
                f'divergence = "{self.divergence}" has no such noise: remove this, or set that to "sampled"'
            )
        return self
