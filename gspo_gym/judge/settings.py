"""Settings of the judge: [judge] and its tables, with the models, the rubric and the weights of the scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from gspo_gym.base.settings import Settings, checked_url, read_key
from gspo_gym.errors import ConfigError
from gspo_gym.judge.asking import AskingSettings, Prices
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.judge.rubric_files import is_rubric_file

# Episodes that one call compares: longer answers are cut off, and of each episode less is shown.
MAX_COMPARED = 24
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Price = Annotated[float, Field(ge=0)]
# Base URL, the variable that holds the key, and what the API calls the longest answer.
_PROVIDERS = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY", "max_completion_tokens"),
    "groq": ("https://api.groq.com/openai/v1", "GROQ_API_KEY", "max_completion_tokens"),
    "gemini": ("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY", "max_tokens"),
    "local": (None, None, "max_tokens"),
}


class JudgeModelSettings(Settings):
    """Which model judges, or which function, and how it is asked."""

    provider: Literal["openai", "groq", "gemini", "local"] | None = Field(
        default=None, description="who serves the model; local: any server of the OpenAI protocol, at base_url"
    )
    model: str | None = Field(default=None, min_length=1, description="the judging model")
    base_url: str | None = Field(
        default=None, description="URL up to and with /v1 of another endpoint of that protocol; absent: the provider's"
    )
    api_key_env: str | None = Field(
        default=None,
        description="name of the variable that holds the key; absent: the provider's, such as GROQ_API_KEY",
    )
    python: str | None = Field(
        default=None, description='a function of yours in place of a model, as "module:function" (it runs here)'
    )
    temperature: float | None = Field(
        default=None, ge=0, description="of the judging model; absent: 0, or its own if it refuses to be told one"
    )
    max_output_tokens: int = Field(default=4096, gt=0, description="tokens that the judging model may write in a call")
    usd_per_million_tokens: tuple[Price, Price] | None = Field(
        default=None, description="US dollars a million tokens read, and a million written; absent: not known"
    )

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and set(url) & set("?#"):
            raise ValueError("expected a URL without a query or a fragment: routes are appended to it")
        return None if url is None else checked_url(url)

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError("expected the name of an environment variable, which holds the key")
        return name

    @field_validator("python")
    @classmethod
    def _is_a_function(cls, function: str | None) -> str | None:
        if function is not None and not _FUNCTION.fullmatch(function):
            raise ValueError(f'expected "module:function", got {function!r}')
        return function

    @property
    def url(self) -> str:
        """Return the base URL; a ConfigError for a local judge without base_url."""
        if (problem := self.url_problem()) is not None:
            raise ConfigError(f"provider: {problem}")
        return self.base_url or str(_PROVIDERS[self.provider or "local"][0])

    def url_problem(self) -> str | None:
        """Return why there is no base URL; None if there is one."""
        if self.base_url is not None or self.provider not in (None, "local"):
            return None
        return '"local" needs base_url, such as "http://127.0.0.1:8000/v1"'

    @property
    def max_tokens_field(self) -> str:
        return str(_PROVIDERS[self.provider or "local"][2])

    @property
    def prices(self) -> Prices:
        return Prices(*(self.usd_per_million_tokens or ()))

    def read_key(self) -> str | None:
        """Return the key from the environment; None if no variable is named, a ConfigError if it is not set."""
        return read_key(self.api_key_env or _PROVIDERS[self.provider or "local"][1], "the judging model's api_key_env")


class ReadingSettings(Settings):
    """What a judging model reads of an episode, and in how many calls."""

    mode: Literal["auto", "episode", "turn", "group"] = Field(
        default="auto",
        description="episode: one call for everything; turn: one for each turn and one for the outcome; auto: one "
        "while it fits; group: one call compares the episodes of a group (RULER), scores 0 to 1",
    )


class JudgeOptions(ReadingSettings, JudgeModelSettings):
    """[judge.options]: the judged parts, the judge and the rubric."""

    event: bool | None = Field(default=None, description="score every turn; absent: not")
    outcome: bool | None = Field(default=None, description="score the episode as a whole; absent: not")
    rubric_id: str | None = Field(
        default=None,
        min_length=1,
        description='the rubric: a YAML, TOML or JSON file, or the id of a bundled one ("support_desk/bundle@v1"); '
        "a judge at services.judge_url may know more ids",
    )
    rubric_overrides: dict[str, Any] = Field(  # Any: a rubric has its own shape
        default={}, description="over the rubric, or the whole of it: tables `event` and `outcome`"
    )
    tracks: tuple[str, ...] = Field(default=(), description="criteria whose id begins with one of these; empty: all")
    weights: dict[str, float] = Field(default={}, description="factor of each track's score; 1 if not named")
    samples: int = Field(default=1, gt=0, description="judgements of each judge; the score is their mean")
    max_concurrency: int | None = Field(default=None, gt=0, description="judge calls at once; absent: 8")
    max_calls: int | None = Field(
        default=None, gt=0, description="calls of the whole run, repeated ones included, then it stops; absent: any"
    )
    max_cost_usd: float | None = Field(
        default=None, gt=0, description="US dollars of the whole run, then it stops; needs prices; absent: any"
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="folder in which judgements are kept for later runs; absent: they are kept in memory",
    )

    @property
    def rubric_file(self) -> str | None:
        """Return the file that `rubric_id` names; None if it is an id, or absent."""
        return self.rubric_id if self.rubric_id is not None and is_rubric_file(self.rubric_id) else None

    @property
    def known_rubric(self) -> str | None:
        """Return the id that `rubric_id` is; None if it is a file, or absent."""
        return None if self.rubric_file else self.rubric_id

    @field_validator("rubric_overrides")
    @classmethod
    def _are_of_events_or_outcomes(cls, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        if wrong := sorted(set(overrides) - {"event", "outcome"}):
            raise ValueError(f"expected tables event and outcome, got {wrong[0]!r}")
        return overrides

    @field_validator("weights")
    @classmethod
    def _are_weights(cls, weights: Mapping[str, float]) -> Mapping[str, float]:
        if wrong := {track: weight for track, weight in weights.items() if weight < 0}:
            raise ValueError(f"expected numbers >= 0, got {wrong}")
        # A mean with these weights would divide by 0.
        if weights and not any(weights.values()):
            raise ValueError("expected one weight > 0 at least, got zeros only")
        return weights


class PanelEntry(JudgeModelSettings):
    """[[judge.panel]]: the judges of a panel, in place of the one in [judge.options]."""


class GoldSettings(Settings):
    """[judge.gold]: better judges, or labelled episodes, compared with the judge as often as the run evaluates."""

    panel: tuple[PanelEntry, ...] = Field(
        default=(),
        description="the gold judge, or several, whose scores are averaged: tables [[judge.gold.panel]], with the "
        "keys of [[judge.panel]]",
    )
    episodes: str | None = Field(
        default=None, min_length=1, description="instead of judges: a file of stored episodes, with labels"
    )
    labels: str | None = Field(default=None, min_length=1, description="their gold scores, as `judge audit` reads them")
    on_drift: Literal["warn", "stop"] = Field(
        default="warn", description="what an alarm does beside being recorded; stop: the run ends, and can be resumed"
    )


class JudgeSettings(Settings):
    """[judge]: another model that scores episodes."""

    enabled: bool = Field(default=False, description="whether it scores; the section is checked in any case")
    timeout_s: float | None = Field(default=None, gt=0, description="seconds a call may take; absent: 30")
    panel: tuple[PanelEntry, ...] = Field(
        default=(), description="several judges, whose scores are averaged: tables [[judge.panel]]"
    )
    reward_blend: RewardBlend | None = Field(default=None, description="[judge.reward_blend]")
    options: JudgeOptions | None = Field(default=None, description="[judge.options]")
    gold: GoldSettings | None = Field(default=None, description="[judge.gold]")

    @property
    def blend(self) -> RewardBlend:
        """[judge.reward_blend], or its defaults."""
        return self.reward_blend or RewardBlend()


@dataclass(frozen=True, slots=True)
class ModelJudgeSettings:
    """A judging model, and how it is asked.

    Attributes:
        model: which it is; it has a name.
        reading: what it reads of an episode.
        shuffles_criteria: show criteria in an order that follows from the episode's content, because models prefer the
            first; otherwise in the rubric's.
        max_transcript_chars: characters of an episode that it reads; longer ones are shortened.
        sample: number of this judge among several samples of the same model; each has other seeds and cache entries.
        seed: of request seeds and of the order of criteria.
    """

    model: JudgeModelSettings
    reading: ReadingSettings = field(default_factory=ReadingSettings)
    shuffles_criteria: bool = True
    max_transcript_chars: int = 60_000
    sample: int = 0
    seed: int = 0
    asking: AskingSettings = field(default_factory=AskingSettings)

    @property
    def name(self) -> str:
        """Return a name such as "openai:gpt-5-mini", with its number if it is not the first sample."""
        return f"{self.model.provider or 'local'}:{self.model.model}" + (f"#{self.sample}" if self.sample else "")

    @property
    def cache_identity(self) -> list[Any]:
        """Return the settings that an answer depends on."""
        model, order = self.model, "shuffled" if self.shuffles_criteria else "given"
        return [
            model.url, model.model, model.temperature or 0.0, model.max_output_tokens, order, self.sample, self.seed,
        ]  # fmt: skip
