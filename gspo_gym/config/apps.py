"""Sections about where episodes come from: [gateway], [rollout.policy_config], [[rollout.mixture]], and their sources.

A source is an environment in this process, or a task app that runs elsewhere and calls the model through the gateway.
[training.weight_sync] is here, too: how new weights reach the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from gspo_gym.base.files import as_toml_holds_it
from gspo_gym.base.keys import checked_url
from gspo_gym.base.settings import Settings, TomlTable, Url
from gspo_gym.errors import ConfigError

TASK_URL_VARIABLE = "TASK_APP_URL"  # over services.task_url of a file, under --task-url


class GatewaySection(Settings):
    """[gateway]: where task apps call the model; it runs beside the engine, and only with task apps.

    An app is handed a URL with an id that cannot be guessed, which is its only key.
    """

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to listen on; the default is reached from this machine only",
    )
    port: int = Field(default=0, ge=0, lt=65536, description="port to listen on; 0: any that is free")
    public_url: Url | None = Field(
        default=None,
        description="base URL under which apps reach the gateway (a tunnel, a proxy, a name); absent: host and port",
    )
    max_calls: int = Field(default=1000, gt=0, description="model calls of one rollout, beyond which they are refused")


class PolicyConfigSection(Settings):
    """[rollout.policy_config]: how the policy is asked; the hosted trainer's names for some of [rollout]'s keys.

    Other keys are a task app's own, and are sent to it as they stand; without a task app they are errors.
    """

    model_config = ConfigDict(extra="allow")

    system_prompt: str | None = Field(
        default=None, min_length=1, description="a system message before the environment's first messages"
    )
    temperature: float | None = Field(default=None, gt=0, description="as rollout.temperature, which it sets")
    top_p: float | None = Field(default=None, gt=0, le=1, description="as rollout.top_p, which it sets")
    top_k: int | None = Field(default=None, ge=0, description="as rollout.top_k, which it sets")
    max_tokens: int | None = Field(default=None, gt=0, description="as rollout.max_output_tokens, which it sets")
    chat_template_kwargs: TomlTable = Field(
        default={}, description="handed to the chat template, for example { enable_thinking = false }"
    )

    # Keys that are not ours are recorded in config.toml, too, so they are checked before the fields are.
    @model_validator(mode="before")
    @classmethod
    def _others_can_be_recorded(cls, values: Any) -> Any:  # Any: pydantic hands over whatever it was given
        if not isinstance(values, dict):
            return values
        others = {name: value for name, value in values.items() if name not in cls.model_fields}
        return {**values, **as_toml_holds_it(others)}

    @property
    def others(self) -> dict[str, Any]:
        """Return the keys that are not ours (Any: each app has its own)."""
        return dict(self.model_extra or {})


class MixtureEntry(Settings):
    """[[rollout.mixture]]: a further environment, and its share of the groups; the rest are rollout.env_name's."""

    env_name: str = Field(
        min_length=1, description="a registered environment, or MODULE:NAME; with task_url, the app's name of it"
    )
    share: float = Field(gt=0, lt=1, description="fraction of the groups; all entries' together are below 1")
    env_config: TomlTable = Field(
        default={}, description="keyword arguments of the environment's constructor, or what the app takes"
    )
    task_url: Url | None = Field(
        default=None, description="base URL of the task app that plays it; absent: it is played in this process"
    )
    api_key_env: str | None = Field(
        default=None,
        min_length=1,
        description="environment variable with that app's key; absent: ENVIRONMENT_API_KEY, as for services.task_url",
    )


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The origin of a part of the episodes.

    Attributes:
        env_name, env_config: the environment, as the configuration says.
        task_url: of the app that plays it; None: it is played here.
        share: fraction of the groups.
        api_key_env: environment variable with the app's key; None: the usual ones.
        key: of the table that gives it, for errors.
    """

    env_name: str
    env_config: Mapping[str, Any] = field(default_factory=dict)  # Any: each environment has its own
    task_url: str | None = None
    share: float = 1.0
    api_key_env: str | None = None
    key: str = "rollout"

    @property
    def url_key(self) -> str:
        """Return the key in `task_url`'s table."""
        return "services.task_url" if self.key == "rollout" else f"{self.key}.task_url"


def task_sources(
    env_name: str, env_config: Mapping[str, Any], task_url: str | None, mixture: tuple[MixtureEntry, ...]
) -> tuple[TaskSource, ...]:
    """Return all sources of a configuration, that of rollout.env_name first; their shares are 1 in sum."""
    others = tuple(TaskSource(**dict(entry), key=f"rollout.mixture.{number}") for number, entry in enumerate(mixture))
    return (TaskSource(env_name, env_config, task_url, 1 - sum(source.share for source in others)), *others)


def with_task_url(overrides: Sequence[str], given: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return the overrides with services.task_url from --task-url (`given`) or from the environment variable.

    The command line goes over the environment, and the environment over the file.

    Raises:
        ConfigError: the variable holds no URL.

    >>> with_task_url(["run.seed=1"], None, {"TASK_APP_URL": "http://127.0.0.1:8114"})
    ['services.task_url=http://127.0.0.1:8114', 'run.seed=1']
    """
    url = environment.get(TASK_URL_VARIABLE)
    if url:  # checked here, because an error about services.task_url would not name the variable
        try:
            checked_url(url)
        except ValueError as error:
            raise ConfigError(f"environment variable {TASK_URL_VARIABLE}: {error}") from None
    before = [f"services.task_url={url}"] if url else []
    after = [f"services.task_url={given}"] if given is not None else []
    return [*before, *overrides, *after]


class WeightSyncSection(Settings):
    """[training.weight_sync]: how new weights reach the engine. The local engine has the learner's own: no choice."""

    enable: bool = Field(default=True, description="whether the engine gets new weights at all: it must")
    targets: tuple[Literal["policy"], ...] = Field(default=("policy",), description="whose weights are sent")
    mode: Literal["direct", "full"] = Field(
        default="direct", description="an adapter alone where the engine takes adapters, or always all weights, merged"
    )
    direct: bool = Field(
        default=True, description="through memory (the learner's own, or /dev/shm), not through the run's folder"
    )
    verify_every_k: int = Field(
        default=0, ge=0, description="updates between checks of files and checksums, besides the canary's; 0: none"
    )
    transfer: Literal["files", "ipc", "nccl", "shared_memory"] = Field(
        default="files",
        description="how all weights reach vLLM in this process: as files that it reads, or handed over in memory: by "
        "CUDA IPC on the learner's own GPU, by NCCL to GPUs of [topology], or through this machine's memory; ipc and "
        "nccl were never run on a GPU, hence the default",
    )
