"""A frozen copy of the policy in an actor of Ray, which scores the learner's batches for the KL terms.

It stands beside the learner, on a GPU or in a process of its own. Batches and weights travel as Ray's objects. It gives
the logprobs that `learning.reference.Reference` gives in the learner's process without shared prefixes, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gspo_gym.cluster.actors import LIFE
from gspo_gym.cluster.ray import reason_of
from gspo_gym.errors import CheckpointError, ServiceError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.reference import check_same_reference
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.lora import moving_parameters
from gspo_gym.types import Sampling

_SECONDS = 600.0  # for a micro-batch, or for other weights; what takes longer hangs
_PREFIX = "reference."  # before the names of its parameters in a checkpoint


class ScoringActor:
    """The actor: a frozen model.

    Args:
        folder: of the policy; see `load_policy`, also for `dtype` and `device`.
        sampling: whose distribution the logprobs are of. logits_bytes: see `LogprobComputer`.
        num_threads: of torch, which decides in which order sums are taken.
        visible_gpus: for CUDA_VISIBLE_DEVICES; None: those that Ray gives.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: str,
        device: str,
        sampling: Sampling,
        logits_bytes: int,
        num_threads: int,
        visible_gpus: Sequence[str] | None,
    ) -> None:
        if visible_gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus)
        torch.set_num_threads(num_threads)
        model = load_policy(folder, dtype=dtype, device=device).model
        for tensor in (*model.parameters(), *model.buffers()):
            # Out of the files, which stay mapped otherwise: they are removed, and kernels round by the alignment.
            tensor.data = tensor.data.clone()
        self._moving = moving_parameters(model)
        self._computer = LogprobComputer(model.requires_grad_(False), sampling=sampling, logits_bytes=logits_bytes)

    def life(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    @torch.no_grad()
    def score(self, token_ids: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        """Return [B, T] logprobs of the sampled tokens, on the processor."""
        device = next(iter(self._moving.values())).device
        inputs = [tensor.to(device) for tensor in (token_ids, attention_mask, action_mask)]
        return self._computer.compute(*inputs).logprobs.cpu()

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters that `replace` replaces: all, or an adapter's."""
        return {name: parameter.detach().cpu() for name, parameter in self._moving.items()}

    @torch.no_grad()
    def replace(self, parameters: Mapping[str, Tensor]) -> None:
        """Take other parameters."""
        for name, parameter in self._moving.items():
            parameter.copy_(parameters[name])


class RayReference:
    """The reference of a learner, in an actor; see `learning.reference.ReferencePolicy`.

    Args:
        ray: Ray's module (Any: untyped here).
        model: the policy that is trained; its parameters become the reference's in `refresh`.
        folder: of the policy, which is not read any more afterwards.
        max_wait_seconds: that the actor has to come up.
        silence_seconds: without a sign of life, after which it is lost.
        options: see `ScoringActor`.

    Attributes:
        pid: the actor's process.

    Raises:
        ServiceError: it does not come up.
    """

    def __init__(
        self,
        ray: Any,
        model: nn.Module,
        folder: Path,
        *,
        max_wait_seconds: float,
        silence_seconds: float,
        **options: Any,
    ) -> None:
        self._ray, self._model, self._silence_seconds = ray, model, silence_seconds
        actor_class = ray.remote(num_cpus=1, max_restarts=0, concurrency_groups={LIFE: 1})(ScoringActor)
        self._actor = actor_class.remote(str(folder), **options)
        self.pid = self._require_life(max_wait_seconds)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return [B, T] logprobs of the sampled tokens.

        Raises:
            ServiceError: the actor is lost, or refuses.
        """
        inputs = (batch.token_ids, batch.attention_mask, batch.action_mask)
        logprobs: Tensor = self._ask("score", *(tensor.cpu() for tensor in inputs))
        if not bool(torch.isfinite(logprobs).all()):  # they would reach the loss as a KL term
            raise ServiceError("the reference gave logprobs that are not finite")
        return logprobs.to(batch.token_ids.device)

    def refresh(self) -> None:
        """Make the reference the policy as it is now."""
        self._ask("replace", {name: p.detach().cpu() for name, p in moving_parameters(self._model).items()})

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the reference's parameters, named `reference.<parameter>`."""
        return {f"{_PREFIX}{name}": tensor for name, tensor in self._ask("parameters").items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the tensors of `tensors()`, also those of a reference in the learner's process.

        Raises:
            CheckpointError: the copy of other parameters. ServiceError: the actor is lost.
        """
        own = self.tensors()
        check_same_reference(tensors, own)
        if wrong := [name for name, tensor in own.items() if tensors[name].shape != tensor.shape]:
            raise CheckpointError(f"reference policy: {wrong[0]} has another shape")
        self._ask("replace", {name.removeprefix(_PREFIX): tensors[name] for name in own})

    def _ask(self, method: str, *arguments: object) -> Any:
        """Return what a method of the actor returns (Any: it differs)."""
        call = getattr(self._actor, method).remote(*arguments)
        for _ in range(math.ceil(_SECONDS / self._silence_seconds)):
            with contextlib.suppress(self._ray.exceptions.GetTimeoutError):
                return self._get(call, method, self._silence_seconds)
            self._require_life(self._silence_seconds)
        raise ServiceError(f"the reference's actor did not answer {method} within {_SECONDS:g} seconds")

    def _require_life(self, seconds: float) -> int:
        call = self._actor.life.options(concurrency_group=LIFE).remote()
        try:
            return int(self._get(call, "live", seconds))
        except self._ray.exceptions.GetTimeoutError as error:
            raise ServiceError(f"the reference's actor was not heard of for {seconds:g} seconds") from error

    def _get(self, call: Any, what: str, seconds: float) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call, timeout=seconds)
        except errors.GetTimeoutError:
            raise
        except errors.RayError as error:
            raise ServiceError(f"the reference's actor could not {what}: {reason_of(error)}") from error
