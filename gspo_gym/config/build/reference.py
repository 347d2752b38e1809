"""The served reference of a run: its process, if the run starts one, and the learner's settings for asking it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gspo_gym.base.leftovers import goes_with_us, remove_folder
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import names_of, place
from gspo_gym.errors import ConfigError
from gspo_gym.learning.update import scored_sampling
from gspo_gym.policy.load import Policy, save_policy
from gspo_gym.policy.quantization import is_quantized
from gspo_gym.policy.reference.client import ReferenceClient, ReferenceProcess, ServedReference
from gspo_gym.policy.reference.wire import ScoringSettings


@contextlib.contextmanager
def serving_reference(
    config: RunConfig, policy: Policy, device: str, num_threads: int | None = None
) -> Iterator[ServedReference | None]:
    """Yield the reference at a server; None if reference.placement is not "dedicated" or no KL term needs it.

    It is the present policy, with its adapter if it has one, or the model at [services] reference_url. `num_threads`
    are torch's in a server of our own; None: as many as here.

    Raises:
        ServiceError: the server cannot be reached or does not come up.
        ConfigError: it serves a model with another vocabulary, or the policy's weights are quantized.
    """
    if config.reference.placement != "dedicated" or not config.has_reference:
        yield None
        return
    services = config.services
    if services is not None and services.reference_url is not None:
        client = ReferenceClient(services.reference_url)
        _wait(config, client, policy)
        yield ServedReference(client, policy.model, scoring_settings(config), folder=None)
        return
    folder = config.run_folder / "reference"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    goes_with_us(folder)
    with _own_server(config, policy, device, folder, num_threads or torch.get_num_threads()) as client:
        yield ServedReference(client, policy.model, scoring_settings(config), folder=folder)


def scoring_settings(config: RunConfig) -> ScoringSettings:
    """Return the settings that score the learner's distribution."""
    sampling = scored_sampling(config.rollout.sampling, config.training)
    return ScoringSettings(sampling, logits_bytes=config.training.logits_bytes)


# The policy's weights go to the server as files, which it reads once.
@contextlib.contextmanager
def _own_server(
    config: RunConfig, policy: Policy, device: str, folder: Path, num_threads: int
) -> Iterator[ReferenceClient]:
    model = folder / "model"
    process: ReferenceProcess | None = None
    try:
        _save(policy, model)
        process = ReferenceProcess(
            _arguments(
                model=model,
                port=config.reference.port,
                dtype=config.model.dtype,
                device=torch.device(device).type,  # the first of those that it sees
                num_threads=num_threads,  # it decides in which order sums are taken
            ),
            log=config.run_folder / "reference_server.log",
            visible_gpus=_gpus(config),
        )
        # Its port is open on this machine: the token keeps other processes from changing the weights.
        client = ReferenceClient(
            f"http://127.0.0.1:{config.reference.port}", token=process.token, explain=process.explain
        )
        _wait(config, client, policy, process)
        shutil.rmtree(model)  # it is in the server's memory
        yield client
    finally:
        # Also if it did not come up, or the run fails.
        if process is not None:
            process.close()
        remove_folder(folder)


def _wait(config: RunConfig, client: ReferenceClient, policy: Policy, process: ReferenceProcess | None = None) -> None:
    # A process that ended is reported at once, not after health_max_wait_s.
    health = client.wait_until_healthy(
        max_wait_seconds=config.reference.health_max_wait_s,
        interval_seconds=config.reference.health_interval_ms / 1000,
        require_alive=(lambda: None) if process is None else process.require_alive,
        pid=None if process is None else process.pid,
    )
    _require_same_vocabulary(health, policy)


def _require_same_vocabulary(health: Mapping[str, Any], policy: Policy) -> None:
    size = policy.model.get_input_embeddings().weight.shape[0]
    if health["vocab_size"] != size:
        raise ConfigError(
            f"services.reference_url: {health.get('model')} knows {health['vocab_size']} tokens, {policy.base} knows "
            f"{size}; the reference must read the policy's tokens"
        )


def _save(policy: Policy, folder: Path) -> None:
    if is_quantized(policy.model):
        raise ConfigError(
            'reference.placement: "dedicated" would serve quantized weights, which cannot be written back as they '
            'are; set "shared"'
        )
    save_policy(policy, folder)


def _arguments(**options: object) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def _gpus(config: RunConfig) -> tuple[str, ...] | None:
    # Without a split the reference is on the learner's GPU, as this process sees it.
    if config.topology is None or (config.compute is not None and config.compute.gpu_count == 0):
        return None
    return names_of(place(config.topology, config.vllm).reference, os.environ)
