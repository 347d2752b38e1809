"""The frozen policies that a learner compares with: the reference of KL terms, and the teacher of a distillation.

In this process the reference is one of three things: the model with its adapter disabled, a frozen copy of the
adapter's tensors that is swapped in while the reference is asked, or a frozen copy of the whole model. Elsewhere, it is
a `ReferencePolicy` that the caller passes. The teacher is another model, in this process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.logprobs import Against, LogprobComputer
from gspo_gym.learning.settings import DistillationSettings, ReferenceSettings
from gspo_gym.types import Sampling


class ReferencePolicy(Protocol):
    """Interface of a learner to its reference, in this process or elsewhere."""

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return [B, T] of the sampled tokens, constants, on the batch's device; 0 where nothing was sampled."""
        ...

    def refresh(self) -> None:
        """Make the reference the policy as it is now."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what a restart needs, named `reference.<parameter>`; empty if the reference never changes."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors()` gave, among others; a CheckpointError for the copy of other parameters."""
        ...


class TeacherPolicy(Protocol):
    """Interface of a learner to a teacher that is not in this process."""

    def prepare(self, batches: Sequence[TokenBatch]) -> None:
        """Begin an update, whose batches these are: `logprobs` is called for each of them."""
        ...

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return [B, T] of the sampled tokens, at temperature 1 and of the whole vocabulary, constants, on the batch's
        device; 0 where nothing was sampled.
        """
        ...


class Reference:
    """Reference in this process.

    `make_computer` gives a computer of the same kind for another model; `given` is a frozen model of the caller's to
    use as it is, in place of what `settings.source` names. The computer's `collective` says whether ranks
    hold parts of the parameters; these stay where they are, and their values are exchanged.

    Raises:
        ConfigError: a source that the model does not have, or a refresh that the source cannot have.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ReferenceSettings,
        *,
        computer: LogprobComputer,
        make_computer: Callable[[nn.Module], LogprobComputer],
        given: nn.Module | None = None,
    ) -> None:
        self._model: Any = model  # Any: peft's disable_adapter is not part of nn.Module
        self._computer = computer
        self._is_shared_out = computer.collective.is_shared_out
        self._source = "given" if given is not None else _source(model, settings)
        if given is not None and (settings.source != "auto" or settings.update_every_n_iters):
            raise ConfigError(
                "reference_model: a model of one's own is used as it is; remove it, or leave the reference settings at "
                f"their defaults, got source {settings.source!r} and update_every_n_iters = "
                f"{settings.update_every_n_iters}"
            )
        self._frozen_copy: dict[str, Tensor] = {}  # the frozen copy, by the name of the model's parameter
        if self._swaps:
            self._frozen_copy = {name: p.detach().clone() for name, p in self._live().items()}
        elif self._source == "copy":
            given = copy.deepcopy(model)
            self._frozen_copy = {name: p.detach() for name, p in given.named_parameters()}
        if given is not None:
            self._computer = make_computer(given)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return [B, T] of the sampled tokens, constants; the adapter's dropout, if any, is off."""
        with self._in_place():
            return self._computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the reference the policy as it is now."""
        live = self._live()
        for name, tensor in self._frozen_copy.items():
            tensor.copy_(live[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the frozen copy, named `reference.<parameter>`; empty if the reference is the base or the caller's."""
        return {f"reference.{name}": tensor for name, tensor in self._frozen_copy.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors()` gave; a CheckpointError for the copy of other parameters."""
        check_same_reference(tensors, self.tensors())
        for name, tensor in self._frozen_copy.items():
            tensor.copy_(tensors[f"reference.{name}"])

    @property
    def _swaps(self) -> bool:  # a model that is shared out cannot be copied: a copy of it all takes its place, too
        return self._source == "adapter" or (self._source == "copy" and self._is_shared_out)

    def _live(self) -> dict[str, nn.Parameter]:
        # What a copy is made from: all, or the trained ones, which are the adapter.
        return {name: p for name, p in self._model.named_parameters() if self._source == "copy" or p.requires_grad}

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Put the reference in the place of the computer's model while inside."""
        if self._source == "base":
            with self._model.disable_adapter():
                yield
        elif self._swaps:
            self._swap()
            try:
                yield
            finally:
                self._swap()
        else:
            yield

    def _swap(self) -> None:  # by reference: nothing is copied, and the optimizer's parameters stay the same objects
        for name, parameter in self._live().items():
            if self._is_shared_out:  # torch gathers parameters from memory that it knows, whatever their `data` is
                policy_values = parameter.detach().clone()
                parameter.detach().copy_(self._frozen_copy[name])
                self._frozen_copy[name] = policy_values
                continue
            parameter.data, self._frozen_copy[name] = self._frozen_copy[name], parameter.data


class Teacher:
    """A frozen model that scores the policy's tokens, both at temperature 1 and of the whole vocabulary.

    Where the learner's old logprobs are just that, the policy's are these; elsewhere (another temperature, truncated
    sampling, an adapter's dropout, old logprobs of the engine) and for the baseline, it is scored once more.

    Attributes:
        against: what every pass over a batch computes its divergence from; None: the sampled token alone is compared,
            before the first pass.

    Args:
        model: the teacher, with the token ids of the policy; it is frozen here.
        policy: the model that is trained. computer: that of its old logprobs; None: the engine's stand for them.
        make_computer: gives a computer of a model at temperature 1.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: DistillationSettings,
        *,
        policy: nn.Module,
        computer: LogprobComputer | None,
        make_computer: Callable[[nn.Module], LogprobComputer],
    ) -> None:
        self._computer = make_computer(model.requires_grad_(False))
        self.against: Against | None = None
        if settings.divergence != "sampled":
            self.against = Against(self._computer, settings.divergence)
        self._has_baseline = settings.baseline
        is_scored_again = self.against is None and (settings.baseline or not _is_plain(computer))
        self._policy = make_computer(policy) if is_scored_again else None

    @torch.no_grad()
    def compare(self, batch: TokenBatch, old_logprobs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return [B, T] log(teacher / policy) of the sampled tokens, and KL(policy || teacher) with a baseline.

        None, None: every pass computes its own (`against`). `old_logprobs` [B, T] are the learner's, before an update;
        None: the engine's stand for them.
        """
        if self.against is not None:
            return None, None
        inputs = (batch.token_ids, batch.attention_mask, batch.action_mask)
        if self._policy is None:
            assert old_logprobs is not None
            return self._computer.compute(*inputs).logprobs - old_logprobs, None
        log_ratios, kl = self._policy.compare(self._computer, *inputs)
        return log_ratios, kl if self._has_baseline else None


class RemoteTeacher:
    """A `TeacherPolicy` that scores the policy's tokens: as `Teacher`, but of the sampled tokens only.

    Args:
        elsewhere: the teacher. policy, computer, make_computer: see `Teacher`.
    """

    def __init__(
        self,
        elsewhere: TeacherPolicy,
        *,
        policy: nn.Module,
        computer: LogprobComputer | None,
        make_computer: Callable[[nn.Module], LogprobComputer],
    ) -> None:
        self._elsewhere = elsewhere
        self._policy = None if _is_plain(computer) else make_computer(policy)

    def prepare(self, batches: Sequence[TokenBatch]) -> None:
        """Ask for all that `compare` will need in an update."""
        self._elsewhere.prepare(batches)

    @torch.no_grad()
    def compare(self, batch: TokenBatch, old_logprobs: Tensor | None) -> tuple[Tensor, None]:
        """Return [B, T] log(teacher / policy) of the sampled tokens; see `Teacher.compare`."""
        own = old_logprobs
        if self._policy is not None:
            own = self._policy.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
        assert own is not None
        return self._elsewhere.logprobs(batch) - own, None


def _is_plain(computer: LogprobComputer | None) -> bool:
    """Return whether a computer's logprobs are those at temperature 1, of the whole vocabulary and without dropout."""
    return computer is not None and not computer.has_dropout and computer.sampling == Sampling()


def check_same_reference(saved: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Raise a CheckpointError if the saved names that begin with "reference." are not those that are held."""
    names = {name for name in saved if name.startswith("reference.")}
    if names != set(held):
        raise CheckpointError(
            f"reference policy: {len(names)} parameters were saved, {len(held)} are held; was a kl_coef or the "
            "reference's source changed?"
        )


def _source(model: nn.Module, settings: ReferenceSettings) -> str:
    has_adapter = hasattr(model, "disable_adapter")
    source = settings.source
    if source == "auto":
        source = "adapter" if has_adapter else "copy"  # where the run starts: an adapter may have been trained before
    for key, problem in (
        ("source", settings.source_problem(has_adapter=has_adapter)),
        ("update_every_n_iters", settings.update_problem()),
    ):
        if problem is not None:
            raise ConfigError(f"reference.{key}: {problem}")
    return source
