"""Who teaches in [distillation]: a model in this process, one behind an endpoint, or the policy with feedback."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from gspo_gym.base.settings import Settings, checked_url

_SCHEMES = ("http://", "https://")


class TeacherSettings(Settings):
    """The keys of [distillation] that say which model teaches."""

    teacher: str = Field(
        min_length=1,
        description="a run, RUN@best, RUN@STEP, or what model.base takes; or the URL, up to and with /v1, of an "
        "endpoint that gives logprobs of prompts (`gspo-gym models serve`, vLLM); of the model's own vocabulary and "
        "merges; or 'self': the policy before the update, which reads distillation.feedback in addition",
    )
    feedback: Literal["none", "environment", "judge", "sibling"] = Field(
        default="none",
        description="what the teacher 'self' reads before each turn (arXiv 2601.20802): the environment's answer to it, "
        "the judge's reasons about it, or a successful episode of the same task; turns without any are not learned from",
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

    @field_validator("teacher")
    @classmethod
    def _is_a_model_or_a_url(cls, name: str) -> str:
        if not name.startswith(_SCHEMES):
            return name
        if set(name) & set("?#"):
            raise ValueError("expected a URL without a query or a fragment: routes are appended to it")
        return checked_url(name)

    @model_validator(mode="after")
    def _self_reads_feedback(self) -> TeacherSettings:
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

    @property
    def is_self(self) -> bool:
        """Return whether the policy is its own teacher."""
        return self.teacher == "self"

    @property
    def is_endpoint(self) -> bool:
        """Return whether the teacher is behind an endpoint, and not in this process."""
        return self.teacher.startswith(_SCHEMES)
