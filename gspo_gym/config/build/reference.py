"""The dedicated reference of a run: an actor of Ray, which has the present policy frozen."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import torch

from gspo_gym.base.leftovers import goes_with_us, remove_folder
from gspo_gym.cluster.ray import joined, require_ray
from gspo_gym.cluster.reference import RayReference
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import TopologySection, names_of, place, ray_address
from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import DEFAULT_LOGITS_BYTES
from gspo_gym.policy.load import Policy, save_policy
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
