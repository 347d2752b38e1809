"""[distillation]: who teaches, and how it is learned from. Not for the arithmetic: `losses.py`, `reference.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from gspo_gym.base.settings import Settings, checked_url

_SCHEMES = ("http://", "https://")


class DistillationSettings(Settings):
    """[distillation]: a teacher, which is learned from at every sampled token: a frozen model, here or behind an
    endpoint, or the policy itself with feedback in its prompt (`feedback.py`)."""

    teacher: str = Field(
        min_length=1,
        description="a run, RUN@best, RUN@STEP, or what model.base takes; or the URL, up to and with /v1, of an "
        "endpoint that gives logprobs of prompts (`gspo-gym models serve`, vLLM); of the model's own vocabulary and "
        "merges; or 'self': the policy before the update, which reads distillation.feedback in addition",
    )
    feedback: Literal["none", "environment", "judge", "sibling"] = Field(
        default="none",
        description="what the teacher 'self' reads before each turn (arXiv 2601.20802): the environment's answer to "
        "it, the judge's reasons about it, or a successful episode of the same task; turns without any are not learned "
        "from",
    )
    teacher_model: str | None = Field(
        default=None, min_length=1, description="its name at the endpoint; absent: the only one that it lists"
    )
    teacher_tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="what model.base takes, with the tokenizer of the endpoint's model, which proves its vocabulary; "
        "absent: as the endpoint says in /v1/models",
    )
    api_key_env: str | None = Field(
        default=None, min_length=1, description="environment variable with the endpoint's key; absent: none is sent"
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
    def _is_a_model_or_a_url(cls, name: str) -> str:
        if "://" not in name:
            return name
        if set(name) & set("?#"):
            raise ValueError("expected a URL without a query or a fragment: routes are appended to it")
        return checked_url(name)

    @model_validator(mode="after")
    def _self_reads_feedback(self) -> DistillationSettings:
        if self.is_self and self.feedback == "none":
            raise ValueError(
                "feedback: the teacher 'self' is the policy, and teaches nothing that it does not read; set "
                "'environment', 'judge' or 'sibling'"
            )
        if self.feedback != "none" and not self.is_self:
            raise ValueError(
                f"feedback: only the teacher 'self' reads feedback, got {self.feedback!r} with the teacher "
                f"{self.teacher!r}; remove it, or set teacher = 'self'"
            )
        return self

    @model_validator(mode="after")
    def _has_what_it_compares(self) -> DistillationSettings:
        for name, is_set in (("baseline", self.baseline), ("divergence", self.divergence != "sampled")):
            if is_set and self.is_self:
                raise ValueError(
                    f"{name}: is not computed for the teacher 'self', which reads other prompts than the policy; "
                    "remove it"
                )
            if is_set and self.is_endpoint:
                raise ValueError(
                    f"{name}: is a sum over the vocabulary, and an endpoint gives logprobs of the sampled tokens only: "
                    "remove it, or name a model that loads here in distillation.teacher"
                )
        if self.baseline and self.divergence != "sampled":
            raise ValueError(
                "baseline: takes noise off the log-ratio of the sampled token, and "
                f'divergence = "{self.divergence}" has no such noise: remove this, or set that to "sampled"'
            )
        return self

    @property
    def is_self(self) -> bool:
        """Return whether the policy is its own teacher."""
        return self.teacher == "self"

    @property
    def is_endpoint(self) -> bool:
        """Return whether the teacher is behind an endpoint, and not in this process."""
        return self.teacher.startswith(_SCHEMES)

    @property
    def is_model_here(self) -> bool:
        """Return whether the teacher is another model, which this process loads."""
        return not (self.is_self or self.is_endpoint)
