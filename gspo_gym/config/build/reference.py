"""The frozen models of a run: its dedicated reference, an actor of Ray, and the teacher of a distillation."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gspo_gym.base.leftovers import goes_with_us, remove_folder
from gspo_gym.base.settings import read_key
from gspo_gym.cluster.ray import joined, require_ray
from gspo_gym.cluster.reference import RayReference
from gspo_gym.config.build.teacher import FoundTeacher, new_endpoint_teacher, teachers_model
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import TopologySection, names_of, place, ray_address
from gspo_gym.errors import ConfigError
from gspo_gym.learning.reference import TeacherPolicy
from gspo_gym.learning.settings import DEFAULT_LOGITS_BYTES
from gspo_gym.policy.bases import known_context, parse_hub_id, whole_model_of
from gspo_gym.policy.load import Policy, load_policy, load_tokenizer, save_policy, vocabulary_digest
from gspo_gym.policy.quantization import is_quantized

_MAX_START_SECONDS = 1800.0  # to come up: a large model is read from a slow disk


def check_reference(config: RunConfig) -> None:
    """Raise a MissingExtraError if the reference needs Ray and it is not installed here."""
    if _is_dedicated(config):
        require_ray()


@contextlib.contextmanager
def dedicated_reference(
    config: RunConfig, policy: Policy, device: str, num_threads: int | None = None
) -> Iterator[RayReference | None]:
    """Yield the reference in a process of its own; None if the learner's process has it, or no KL term needs it.

    It is the present policy, with its adapter if it has one. `num_threads` are torch's there; None: as many as here.

    Raises:
        ConfigError: the policy's weights are quantized. MissingExtraError: Ray is not installed.
        ServiceError: Ray or the actor does not come up.
    """
    if not _is_dedicated(config):
        yield None
        return
    if is_quantized(policy.model):
        raise ConfigError(
            'reference.placement: "dedicated" would have quantized weights, which cannot be written as they are; set '
            '"shared"'
        )
    default = TopologySection.model_fields["heartbeat_seconds"].default
    silence_seconds = default if config.topology is None else config.topology.heartbeat_seconds
    with joined(ray_address()) as ray:
        folder = config.run_folder / "reference"
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        goes_with_us(folder)
        try:
            save_policy(policy, folder)
            reference = RayReference(
                ray,
                policy.model,
                folder.absolute(),
                max_wait_seconds=_MAX_START_SECONDS,
                silence_seconds=silence_seconds,
                dtype=config.model.dtype,
                device=torch.device(device).type,  # the first of those that it sees
                sampling=config.scored_sampling,
                logits_bytes=DEFAULT_LOGITS_BYTES,
                num_threads=num_threads or torch.get_num_threads(),
                visible_gpus=_gpus(config, device),
            )
        finally:
            remove_folder(folder)
        yield reference


def _is_dedicated(config: RunConfig) -> bool:
    return config.reference.placement == "dedicated" and config.has_reference


def _gpus(config: RunConfig, device: str) -> tuple[str, ...] | None:
    if torch.device(device).type == "cpu":
        return None
    # Without a split the reference is on the learner's GPU, as this process sees it.
    visible = (0,) if config.topology is None else place(config.sections).reference
    return names_of(visible, os.environ)


def check_teacher(config: RunConfig, base: str) -> None:
    """Refuse a teacher that is not there, reads too little, or does not have the vocabulary of the model `base`.

    No weights are read, and neither the hub nor an endpoint is asked; of an endpoint, only its key is looked for.

    Raises:
        UnknownNameError, CheckpointError: there is no such model. ConfigError: it does not fit.
    """
    if config.distillation is None or config.distillation.is_self:
        return
    if config.distillation.is_endpoint:
        read_key(config.distillation.api_key_env, "distillation.api_key_env")
        return
    teacher, needed = teachers_model(config).base, config.rollout.max_model_len
    _, most = known_context(teacher)
    if most is not None and most < needed:
        raise ConfigError(
            f"distillation.teacher: {teacher} reads {most} tokens, and rollout.max_model_len = {needed}: lower that"
        )
    if not any(parse_hub_id(whole_model_of(name)) for name in (teacher, base)):
        _require_same_vocabulary(teacher, load_tokenizer(teacher), load_tokenizer(base))


def load_teacher(
    config: RunConfig, policy: Policy, device: str, teacher: FoundTeacher | None = None
) -> nn.Module | TeacherPolicy | None:
    """Return the model of [distillation], in the policy's dtype, or what asks its endpoint; None without the section,
    or if the policy teaches.

    `teacher` is what the run began with; None: what the name means now.

    Raises:
        UnknownNameError, CheckpointError: there is no such model. ConfigError: its vocabulary is another one.
    """
    if config.distillation is None or config.distillation.is_self:
        return None
    if config.distillation.is_endpoint:
        endpoint = None if teacher is None else teacher.endpoint
        return endpoint or new_endpoint_teacher(config.distillation)
    model, base = config.model, teachers_model(config).base if teacher is None else teacher.facts["base"]
    other = load_policy(base, dtype=model.dtype, device=device, attn_implementation=model.attn_implementation)
    _require_same_vocabulary(base, other.tokenizer, policy.tokenizer)
    loaded: nn.Module = other.model
    return loaded


def _require_same_vocabulary(teacher: str, its_tokenizer: Any, tokenizer: Any) -> None:  # Any: transformers is untyped
    digests = [vocabulary_digest(each) for each in (its_tokenizer, tokenizer)]
    if digests[0] != digests[1]:
        raise ConfigError(
            f"distillation.teacher: {teacher} has another vocabulary than the model ({len(its_tokenizer.get_vocab())} "
            f"and {len(tokenizer.get_vocab())} tokens, SHA-256 {digests[0][:12]} and {digests[1][:12]}), so that ids "
            "mean other texts to it; take a teacher of the model's own family"
        )
