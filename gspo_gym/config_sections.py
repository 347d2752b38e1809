"""The sections of a configuration file, one record each: every key with its type, range, default and meaning.

Keys that govern one piece of code are defined beside that code (`learning/settings.py`, `rollout/limits.py`); `_same`
puts such a definition into a section here, so that there is one default and one range. What contradicts what is in
`config_rules.py`.
"""

from __future__ import annotations

import copy
import re
import tomllib
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, Field, field_validator

from gspo_gym.learning.settings import LoraSettings, OptimizerSettings, SupervisedSettings, UpdateSettings
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.seeding import FIRST_TRAINING_SEED
from gspo_gym.settings import Settings, parse_seeds

_SAFE_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _same(settings: type[BaseModel], name: str) -> Any:
    """The definition of a field of other settings; Any, because it stands where a field's default stands."""
    return copy.copy(settings.model_fields[name])


class RunSection(Settings):
    """[run]: what makes this run this one."""

    seed: int = Field(default=0, ge=0, description="everything random in the run derives from it")
    folder: str = Field(default="runs", min_length=1, description="runs are written into FOLDER/LABEL")


class AlgorithmSection(Settings):
    """[algorithm]: the method. `variety` also supplies defaults to [loss] and [advantages]; see `config_rules.py`."""

    type: Literal["online"] = Field(default="online", description="the model learns from its own episodes")
    method: Literal["policy_gradient"] = Field(default="policy_gradient", description="no value function")
    variety: Literal["gspo", "gspo_token", "grpo"] = Field(
        default="gspo",
        description=(
            "gspo: one importance ratio and one advantage per trajectory (arXiv 2507.18071, eq. 5-7); gspo_token: its "
            "token form (eq. 13-14), whose advantages may differ by turn; grpo: one ratio per token (arXiv 2402.03300)"
        ),
    )


class ModelSection(Settings):
    """[model]: the policy."""

    base: str = Field(min_length=1, description="hub id, folder, or tiny:NAME for a small model with random weights")
    trainer_mode: Literal["full", "lora"] = Field(
        default="full", description="train all weights, or a low-rank adapter ([training.lora]) on frozen ones"
    )
    label: str = Field(description="names the run's folder: letters, digits, '.', '_' and '-', at most 64")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the weights; trained ones stay float32, so bfloat16 needs lora"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if there is one, else cpu")

    @field_validator("label")
    @classmethod
    def _is_safe_file_name(cls, label: str) -> str:
        if not _SAFE_LABEL.fullmatch(label):
            raise ValueError(
                "expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first (it names a folder), got "
                f"{label!r}"
            )
        return label


class RolloutSection(Settings):
    """[rollout]: how episodes are played."""

    env_name: str = Field(min_length=1, description="a registered environment, or MODULE:NAME")
    env_config: dict[str, Any] = Field(  # Any: each environment has its own
        default={}, description="keyword arguments of the environment's constructor"
    )
    engine: Literal["local"] = Field(default="local", description="what generates; local: in this process")
    max_turns: int = _same(EpisodeLimits, "max_turns")
    max_output_tokens: int = _same(EpisodeLimits, "max_output_tokens")
    max_model_len: int = _same(EpisodeLimits, "max_model_len")
    temperature: float = Field(
        default=1.0, gt=0, description="divides the logits; the learner scores under the same (1: the model's own)"
    )
    episodes_per_batch: int = Field(
        gt=0, description="episodes per iteration, a multiple of training.group_size; episodes that fail are replaced"
    )
    max_concurrent_rollouts: int = _same(PoolLimits, "max_concurrent_rollouts")

    @field_validator("env_config")
    @classmethod
    def _as_toml_holds_it(cls, env_config: dict[str, Any]) -> dict[str, Any]:
        try:
            return tomllib.loads(tomli_w.dumps(env_config))
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"expected values that TOML can hold (config.toml will hold them): {error}") from error


class LimitsSection(Settings):
    """[limits]: when an episode or a group is given up; see `rollout/limits.py` for the order."""

    step_timeout_seconds: float = _same(EpisodeLimits, "step_timeout_seconds")
    episode_timeout_seconds: float = _same(EpisodeLimits, "episode_timeout_seconds")
    max_attempts: int = _same(PoolLimits, "max_attempts")
    min_group_fraction: float = _same(PoolLimits, "min_group_fraction")


class TrainingSection(Settings):
    """[training]: how much, and in which portions. An iteration is one batch of episodes and the updates on it."""

    num_epochs: int = Field(default=1, gt=0, description="iterations in all = num_epochs x iterations_per_epoch")
    iterations_per_epoch: int = Field(gt=0, description="batches of episodes per epoch")
    group_size: int = Field(
        gt=1, description="episodes of the same task, each other's baseline (at least 2; the paper's G)"
    )
    batch_size: int = Field(
        gt=0,
        description=(
            "trajectories per optimizer step, a divisor of rollout.episodes_per_batch; if equal to it, with one of "
            "update_epochs, the ratio is 1 everywhere and no clip acts (the paper takes 4 steps a batch)"
        ),
    )
    update_epochs: int = _same(UpdateSettings, "num_epochs")
    learning_rate: float = _same(OptimizerSettings, "learning_rate")
    max_tokens_per_microbatch: int = _same(UpdateSettings, "max_tokens_per_microbatch")
    scoring_chunk_tokens: int = _same(UpdateSettings, "scoring_chunk_tokens")
    max_nonfinite_steps: int = _same(UpdateSettings, "max_nonfinite_steps")
    log_interval: int = Field(default=1, gt=0, description="iterations between lines in metrics.jsonl")
    checkpoint_every_n_iters: int = Field(
        default=50, gt=0, description="iterations between checkpoints; the last one is saved in any case"
    )
    stop_at_success_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="an evaluation that reaches this success rate ends the run; absent: none does",
    )
    lora: LoraSettings | None = Field(default=None, description="[training.lora], with model.trainer_mode 'lora' only")


class OptimizerSection(Settings):
    """[optimizer]: AdamW, but for the learning rate, which is training.learning_rate."""

    betas: tuple[float, float] = _same(OptimizerSettings, "betas")
    eps: float = _same(OptimizerSettings, "eps")
    weight_decay: float = _same(OptimizerSettings, "weight_decay")
    max_grad_norm: float = _same(OptimizerSettings, "max_grad_norm")
    num_warmup_steps: int = _same(OptimizerSettings, "num_warmup_steps")
    schedule: Literal["constant", "cosine"] = _same(OptimizerSettings, "schedule")
    min_lr_fraction: float = _same(OptimizerSettings, "min_lr_fraction")


class EvaluationSection(Settings):
    """[evaluation]: seeded episodes without learning: before the first iteration, regularly, and after the last."""

    instances: int | None = Field(
        default=None, gt=0, description="number of evaluation seeds; without `seeds`, they are 0, 1, ..., instances - 1"
    )
    seeds: tuple[int, ...] | str | None = Field(
        default=None, description='a list of integers, or text like "0:100" (100 left out) or "1,5,20:25"'
    )
    every_n_iters: int = Field(default=10, gt=0, description="iterations between evaluations")
    temperature: float = Field(default=1.0, ge=0, description="divides the logits; 0 is greedy")

    @field_validator("seeds")
    @classmethod
    def _are_held_out_seeds(cls, seeds: tuple[int, ...] | str | None) -> tuple[int, ...] | str | None:
        if seeds is not None and max(parse_seeds(seeds)) >= FIRST_TRAINING_SEED:
            raise ValueError(
                f"expected seeds below 2**31 (from there up they are trained on), got {max(parse_seeds(seeds))}"
            )
        return seeds


class WarmupSection(Settings):
    """[warmup]: supervised learning of a scripted policy's episodes before reinforcement; without the section, none."""

    policy: str = Field(default="random", min_length=1, description="a name in the environment's `policies`")
    num_episodes: int = Field(gt=0, description="demonstrations that the policy plays")
    num_epochs: int = _same(SupervisedSettings, "num_epochs")
    learning_rate: float = _same(OptimizerSettings, "learning_rate")
    batch_size: int = _same(SupervisedSettings, "batch_size")
