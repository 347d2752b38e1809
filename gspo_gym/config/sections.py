"""The sections of a configuration file that hold settings of several rooms, or of the policy's model.

A section is the settings record of its room (`[loss]` is `LossSettings`), or inherits from the records of several; a
room takes its part by `Settings.of`. `same` and `optional` show a field of another record under a key of a section.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from gspo_gym.base.settings import Settings, TomlTable, same
from gspo_gym.config.apps import MixtureEntry, PolicyConfigSection, WeightSyncSection
from gspo_gym.env.workers.limits import IsolationSettings
from gspo_gym.learning.settings import LoraSettings, StepRewardSettings, UpdateSettings
from gspo_gym.policy.retention import RetentionSettings
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.run.settings import BatchSettings, LoopSettings
from gspo_gym.types import SAMPLING_NAMES, Sampling

# Labels name folders: no separator, and no leading dot or dash, which shells and commands read otherwise.
_SAFE_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SOURCE = re.compile(rf"(?:(?:ft|rl|peft|fft|qft):)?(?P<label>{_SAFE_LABEL.pattern})(?::(?P<step>step_\d+))?")

# Where a configuration says what `RunSize` counts, in the order of its fields.
SIZE_KEYS = (
    "training.num_epochs",
    "training.iterations_per_epoch",
    "rollout.episodes_per_batch",
    "training.batch_size",
    "rollout.batches_per_step",
    "training.update_epochs",
    "training.gradient_accumulation_steps",
    "training.max_accumulated_minibatch",
)


def optional(settings: type[BaseModel], name: str) -> Any:
    """Return the definition of a field that may be left out: its default then counts."""
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

    type: Literal["online"] = Field(default="online", description="the model learns from its own episodes")
    method: Literal["policy_gradient", "ppo"] = Field(
        default="policy_gradient",
        description=(
            "neither has a value function; ppo says that the clip is meant to act, and so demands more than one "
            "optimizer step a batch"
        ),
    )
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
        description="hub id, folder, or tiny:NAME for a small model with random weights; this or source",
    )
    source: str | None = Field(
        default=None,
        description=(
            'instead of base: LABEL or "ft:LABEL", the last checkpoint of that run in run.folder, or '
            '"ft:LABEL:step_000100", that one (rl:, peft:, fft: and qft: are the same)'
        ),
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
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: as compute.gpu_count says; without it, cuda if there is one, else cpu"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, about a third more time"
    )
    torch_compile: bool = Field(default=False, description="compile the model's forward for scoring")
    liger_kernels: bool = Field(default=False, description="Liger's fused kernels (which must be installed)")

    @field_validator("label")
    @classmethod
    def _is_safe_file_name(cls, label: str) -> str:
        if not _SAFE_LABEL.fullmatch(label):
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
    engine: Literal["local", "vllm", "http"] = Field(
        default="local", description="what generates; local: transformers; http: servers whose weights never change"
    )
    rescore: bool = Field(
        default=False, description="train on an http engine's samples with the learner's logprobs; evaluate the learner"
    )
    max_turns: int = same(EpisodeLimits, "max_turns")
    ops: tuple[Literal["agent", "env"], ...] = Field(
        default=("agent", "env"),
        description=(
            "who acts: agent and env in turns; one pair is repeated max_turns times, a longer list ends the episode "
            "after its last pair"
        ),
    )
    max_output_tokens: int = same(EpisodeLimits, "max_output_tokens")
    min_output_tokens: int = Field(default=0, ge=0, description="tokens per turn before which no stop token is sampled")
    max_model_len: int = same(EpisodeLimits, "max_model_len")
    temperature: float = Field(
        default=1.0, gt=0, description="divides the logits; the learner scores under the same (1: the model's own)"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the fewest tokens that have this probability; 1: from all"
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
    batches_per_step: int = Field(default=1, gt=0, description="batches that are merged into one iteration's")
    max_concurrent_rollouts: int = same(PoolLimits, "max_concurrent_rollouts")

    @property
    def sampling(self) -> Sampling:
        """Return the parameters by which tokens are drawn."""
        drawn = {name: getattr(self, name) for name in SAMPLING_NAMES if name in type(self).model_fields}
        return Sampling(**drawn, min_tokens=self.min_output_tokens)

    @field_validator("ops")
    @classmethod
    def _take_turns(cls, ops: tuple[str, ...]) -> tuple[str, ...]:
        if not ops or ops != ("agent", "env") * (len(ops) // 2):
            raise ValueError(f'expected "agent" and "env" in turns, "agent" first, got {list(ops)}')
        return ops


class TrainingSection(RetentionSettings, LoopSettings, UpdateSettings, BatchSettings):
    """[training]: how much, and in which portions. An iteration is one batch of episodes and the updates on it."""

    step_rewards_enabled: bool | None = Field(
        default=None, description="false is step_rewards_mode off; true demands a mode; absent: as the mode says"
    )
    step_rewards_mode: Literal["off", "decision_stepwise", "env_sparse"] | None = optional(StepRewardSettings, "mode")
    step_rewards_beta: float | None = optional(StepRewardSettings, "beta")
    step_rewards_indicator_lambda: float | None = optional(StepRewardSettings, "indicator_lambda")
    step_rewards_strategy: Literal["consistent", "per_achievement"] | None = optional(StepRewardSettings, "strategy")
    step_rewards_weights: dict[str, float] = same(StepRewardSettings, "weights")
    step_rewards_k_limits: dict[str, int] = same(StepRewardSettings, "k_limits")
    event_rewards_kind: Literal["unique", "absolute"] | None = optional(StepRewardSettings, "kind")
    weight_sync: WeightSyncSection | None = Field(default=None, description="[training.weight_sync]")
    lora: LoraSettings | None = Field(default=None, description="[training.lora], with an adapter only")
