"""Settings of a judging model: its endpoint, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from gspo_gym.base.keys import read_key
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.judge.asking import AskingSettings, Prices

Provider = Literal["openai", "groq", "gemini", "local"]
Mode = Literal["auto", "episode", "turn"]
StructuredOutput = Literal["auto", "schema", "text"]

# Base URL, the variable that holds the key, and what the API calls the longest answer.
_PROVIDERS = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY", "max_completion_tokens"),
    "groq": ("https://api.groq.com/openai/v1", "GROQ_API_KEY", "max_completion_tokens"),
    "gemini": ("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY", "max_tokens"),
    "local": (None, None, "max_tokens"),
}


@dataclass(frozen=True, slots=True)
class ModelJudgeSettings:
    """A judging model.

    Attributes:
        provider: "openai", "groq", "gemini"; or "local", which is any OpenAI-compatible endpoint at `base_url`.
        base_url: such as "http://127.0.0.1:8000/v1"; None: the provider's.
        api_key_env: the environment variable that holds the key; None: the provider's, and none for "local".
        mode: "episode": one call judges everything; "turn": one for each turn and one for the outcome; "auto": one
            while the transcript fits and the turns are few.
        structured_output: "schema": the endpoint must hold answers to a schema; "text": it is not asked to; "auto": it
            is, until it refuses. Answers are read with the same strictness in any case.
        temperature: of sampling; None: not sent.
        must_take_temperature: raise if the model refuses a temperature; otherwise it then samples at its default.
        max_output_tokens: of one answer, a reasoning model's reasoning included.
        max_transcript_chars: longer episodes are shortened by the rule in `transcript.py`.
        shuffles_criteria: show criteria in an order that follows from the episode's content, because models prefer the
            first; otherwise in the rubric's.
        sample: number of this judge among several samples of the same model; each has other seeds and cache entries.
        seed: of request seeds and of the order of criteria.
    """

    model: str
    provider: Provider = "local"
    base_url: str | None = None
    api_key_env: str | None = None
    mode: Mode = "auto"
    structured_output: StructuredOutput = "auto"
    temperature: float | None = 0.0
    must_take_temperature: bool = False
    max_output_tokens: int = 4096
    max_transcript_chars: int = 60_000
    show_reasoning: bool = False
    shuffles_criteria: bool = True
    sample: int = 0
    seed: int = 0
    prices: Prices = field(default_factory=Prices)
    asking: AskingSettings = field(default_factory=AskingSettings)

    def __post_init__(self) -> None:
        for name, known in (("provider", Provider), ("mode", Mode), ("structured_output", StructuredOutput)):
            if getattr(self, name) not in get_args(known):
                value = str(getattr(self, name))
                raise ConfigError(f"ModelJudgeSettings.{name}: {value!r}; {nearest_name(value, get_args(known))}")
        if not self.model:
            raise ConfigError("ModelJudgeSettings.model: expected a model's name, got an empty text")
        if self.temperature is not None and not self.temperature >= 0:
            raise ConfigError(f"ModelJudgeSettings.temperature: expected a number >= 0 or none, got {self.temperature}")
        if self.max_output_tokens < 1 or self.max_transcript_chars < 1:
            raise ConfigError(
                "ModelJudgeSettings: expected max_output_tokens >= 1 and max_transcript_chars >= 1, got "
                f"{self.max_output_tokens} and {self.max_transcript_chars}"
            )
        require_plain_url("ModelJudgeSettings.base_url", self.url)

    @property
    def url(self) -> str:
        """Return the base URL without a slash at the end; a ConfigError for a local judge without base_url."""
        url = self.base_url or _PROVIDERS[self.provider][0]
        if url is None:
            raise ConfigError(
                'ModelJudgeSettings.base_url: provider "local" needs one, such as http://127.0.0.1:8000/v1'
            )
        return url.rstrip("/")

    @property
    def name(self) -> str:
        """Return a name such as "openai:gpt-5-mini", with its number if it is not the first sample."""
        return f"{self.provider}:{self.model}" + (f"#{self.sample}" if self.sample else "")

    @property
    def max_tokens_field(self) -> str:
        return str(_PROVIDERS[self.provider][2])

    @property
    def cache_identity(self) -> list[Any]:
        """Return the settings that an answer depends on."""
        order = "shuffled" if self.shuffles_criteria else "given"
        return [self.url, self.model, self.temperature, self.max_output_tokens, order, self.sample, self.seed]

    def read_key(self) -> str | None:
        """Return the key from the environment; None if no variable is named, a ConfigError if it is not set."""
        return read_key(self.api_key_env or _PROVIDERS[self.provider][1], "the judging model's api_key_env")


def require_plain_url(where: str, url: str) -> None:
    """Raise a ConfigError for anything but an http(s) URL, and for one with a password, a query or a fragment."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError(f"{where}: expected no user or password in it; name a key's variable by api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{where}: expected http(s)://HOST[:PORT]/PATH, got {url!r}")
