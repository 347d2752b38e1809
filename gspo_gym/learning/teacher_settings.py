"""Where the teacher of [distillation] is: the keys that name it, in this process or behind an endpoint."""

from __future__ import annotations

from pydantic import Field, field_validator

from gspo_gym.base.settings import Settings, checked_url

_SCHEMES = ("http://", "https://")


class TeacherSettings(Settings):
    """The keys of [distillation] that say which model teaches."""

    teacher: str = Field(
        min_length=1,
        description="a run, RUN@best, RUN@STEP, or what model.base takes; or the URL, up to and with /v1, of an "
        "endpoint that gives logprobs of prompts (`gspo-gym models serve`, vLLM); of the model's own vocabulary and "
        "merges",
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

    @property
    def is_endpoint(self) -> bool:
        """Return whether the teacher is behind an endpoint, and not in this process."""
        return self.teacher.startswith(_SCHEMES)
