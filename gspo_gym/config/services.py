"""The sections of a configuration file about machines, services and judges, and which of them this version can run.

All of it is read and checked, so that a file of the hosted trainer gets every answer at once. What needs machinery that
is not here yet is listed by `missing_machinery`; `refuse_to_run` is called before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from gspo_gym.errors import ConfigError
from gspo_gym.settings import Settings

_URL = re.compile(r"https?://(?P<user>[^/@\s]*@)?[^/@\s]+(/\S*)?")


class ServicesSection(Settings):
    """[services]: where a remote environment and a judge answer. Keys for them come from the environment variables."""

    task_url: str | None = Field(default=None, description="base URL of the task app that plays the episodes")
    judge_url: str | None = Field(default=None, description="base URL of the judge service")

    @field_validator("task_url", "judge_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        match = _URL.fullmatch(url)
        if match is None or match["user"]:
            raise ValueError("expected a URL that begins with http:// or https:// and holds no user or password")
        return url.rstrip("/")


class ComputeSection(Settings):
    """[compute]: the machine."""

    gpu_type: str | None = Field(
        default=None, min_length=1, description='part of the device\'s name, such as "H100"; another device is an error'
    )
    gpu_count: int = Field(ge=0, description="GPUs in all; 0: the processor, although there may be GPUs")
    nodes: int = Field(default=1, gt=0, description="machines")


class TopologySection(Settings):
    """[topology]: which GPUs do what; their sum is compute.gpu_count."""

    type: Literal["single_node_split"] = Field(
        default="single_node_split", description="disjoint sets of one machine's GPUs"
    )
    gpus_for_vllm: int = Field(gt=0, description="GPUs that generate")
    gpus_for_training: int = Field(gt=0, description="GPUs that learn")
    gpus_for_ref: int = Field(default=0, ge=0, description="GPUs that score the reference, with placement dedicated")
    tensor_parallel: int = Field(
        default=1, gt=0, description="GPUs that share each layer while generating; divides gpus_for_vllm"
    )


class VllmSection(Settings):
    """[vllm]: the vLLM server. Its presence is rollout.engine = "vllm"."""

    tensor_parallel_size: int = Field(default=1, gt=0, description="the same as topology.tensor_parallel")
    max_model_len: int = Field(default=8192, gt=1, description="tokens; rollout.max_model_len if that is absent")


class TrackingSection(Settings):
    """[tracking]: where metrics go besides metrics.jsonl."""

    report_to: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        default=(), description="sinks (which must be installed); a key for W&B is in WANDB_API_KEY"
    )
    wandb_project: str | None = Field(default=None, min_length=1, description="W&B only; absent: gspo-gym")
    wandb_tags: tuple[str, ...] = Field(default=(), description="W&B only: tags of the run")
    run_name: str | None = Field(
        default=None, min_length=1, description="W&B only: what it calls the run; absent: model.label"
    )


class RewardBlendSection(Settings):
    """[judge.reward_blend]: total = env * return + event * (sum of event scores) + outcome * (outcome score)."""

    env: float = Field(default=1.0, ge=0, description="weight of the environment's own return")
    event: float = Field(default=0.0, ge=0, description="weight of the sum of event scores, not normalised")
    outcome: float = Field(default=0.0, ge=0, description="weight of the outcome's score")


class JudgeOptionsSection(Settings):
    """[judge.options]: what is judged, by whom, and by which rubric."""

    event: bool | None = Field(default=None, description="score every turn; absent: not")
    outcome: bool | None = Field(default=None, description="score the episode as a whole; absent: not")
    provider: Literal["openai", "groq", "gemini", "local"] | None = Field(
        default=None, description="who serves the model; its key comes from the environment variables"
    )
    model: str | None = Field(default=None, min_length=1, description="the judging model")
    rubric_id: str | None = Field(default=None, min_length=1, description="a rubric that the judge knows")
    rubric_overrides: dict[str, Any] = Field(  # Any: a rubric has its own shape
        default={}, description="a rubric in the file: tables `event` and `outcome`"
    )
    tracks: tuple[str, ...] = Field(default=(), description="criteria whose id begins with one of these; empty: all")
    weights: dict[str, float] = Field(default={}, description="factor of each track's score; 1 if not named")
    max_concurrency: int | None = Field(default=None, gt=0, description="judge calls at once; absent: no limit")

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
        if weights and not any(weights.values()):
            raise ValueError("expected one weight > 0 at least, got zeros only")
        return weights


class JudgeSection(Settings):
    """[judge]: another model that scores episodes."""

    enabled: bool = Field(default=False, description="whether it scores; the section is checked in any case")
    type: Literal["synth"] | None = Field(default=None, description="the hosted judge's protocol, which is the only")
    timeout_s: float | None = Field(default=None, gt=0, description="seconds a call may take; absent: 30")
    reward_blend: RewardBlendSection | None = Field(default=None, description="[judge.reward_blend]")
    options: JudgeOptionsSection | None = Field(default=None, description="[judge.options]")


def missing_machinery(sections: Mapping[str, Any]) -> list[str]:
    """What a valid configuration asks for that this version does not have: one sentence a setting.

    `sections` are the configuration's by name (Any: records of many types, or None).
    """
    services, compute, judge = sections["services"], sections["compute"], sections["judge"]
    found = []
    if services is not None and services.task_url is not None:
        found.append("services.task_url: episodes are played by environments in this process, not by task apps")
    if services is not None and services.judge_url is not None:
        found.append("services.judge_url: there is no judge")
    if compute is not None and compute.gpu_count > 1:
        found.append(f"compute.gpu_count = {compute.gpu_count}: training takes 0 GPUs or 1")
    if compute is not None and compute.nodes > 1:
        found.append(f"compute.nodes = {compute.nodes}: training takes one machine")
    if sections["topology"] is not None:
        found.append("[topology]: generating and learning share one device")
    if sections["rollout"].engine == "vllm":
        why = "rollout.engine" if sections["vllm"] is None else "[vllm]"
        found.append(f'{why}: there is no vLLM engine; rollout.engine = "local" generates in this process')
    if sections["reference"].placement == "dedicated":
        found.append('reference.placement = "dedicated": there is no scoring server; "shared" scores in this process')
    if judge is not None and judge.enabled:
        found.append("judge.enabled: there is no judge")
    return found


def refuse_to_run(sections: Mapping[str, Any]) -> None:
    """Stop before anything is built if this version cannot run the configuration; see `missing_machinery`.

    Raises:
        ConfigError: lists everything that is missing.
    """
    found = missing_machinery(sections)
    if found:
        listed = "\n  ".join(found)
        raise ConfigError(
            "the configuration is valid, but asks for what this version does not have. Remove these to train in this "
            f"process:\n  {listed}"
        )
