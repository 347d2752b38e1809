"""A batch of trajectories -> optimizer steps on the policy. Not for publishing the weights."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from gspo_gym import seeding
from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.learning.batching import (
    LabelledBatch,
    TrainBatch,
    select_trajectories,
    split_microbatches,
    split_minibatches,
    to_device,
)
from gspo_gym.learning.collective import Collective, OneProcess, Record, device_of, gather, own_of, place_of
from gspo_gym.learning.correction import correct
from gspo_gym.learning.feedback import FeedbackTeacher, teacher_metrics
from gspo_gym.learning.health import EngineGap, PartFacts, Tally, batch_metrics
from gspo_gym.learning.logprobs import Against, LogprobComputer, TokenLogprobs
from gspo_gym.learning.losses import Denominators, LossOutput, TeacherScores, count_denominators, policy_loss
from gspo_gym.learning.optimizer import PolicyOptimizer
from gspo_gym.learning.reference import (
    Reference,
    ReferencePolicy,
    RemoteTeacher,
    Teacher,
    TeacherPolicy,
    check_same_reference,
)
from gspo_gym.learning.saved import SavedTensors, copy_state
from gspo_gym.learning.settings import (
    DEFAULT_LOGITS_BYTES,
    SAMPLER_KEYS,
    AdvantageSettings,
    CorrectionSettings,
    DistillationSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.shaping import AdvantageShaper
from gspo_gym.learning.supervised import RouterLoad, Routers, find_routers
from gspo_gym.learning.tokens import IgnoreTokens, TokenSink, TokenTerms
from gspo_gym.types import Sampling


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Report of one update; `health.METRICS` explains its `metrics`."""

    metrics: Mapping[str, float]
    num_steps: int
    num_nonfinite_steps: int


class AnyLearner(Protocol):
    """The methods of `Learner`, whose work may be done in other processes."""

    def update(self, batch: TrainBatch, sink: TokenSink | None = None) -> UpdateReport: ...

    def copy_state(self) -> Callable[[Path], None]: ...

    def counters(self) -> dict[str, int | float]: ...

    def restore(self, tensors: SavedTensors, counters: Mapping[str, int | float]) -> None: ...

    def restore_parts(
        self,
        tensors: SavedTensors,
        counters: Mapping[str, int | float],
        *,
        with_optimizer: bool,
        with_step: bool,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """A micro-batch, on the learner's device.

    Attributes:
        dropout_seed: of the dropout masks that it is computed under every time.
        weight: of its loss; 0 where another process has the same part.
    """

    batch: TrainBatch
    dropout_seed: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Logprobs [B, T] that an update compares with.

    None: the engine's stand for the old ones; there is no reference, no teacher or an exact divergence, no baseline.
    """

    old: Tensor | None
    ref: Tensor | None
    teacher_log_ratios: Tensor | None = None
    teacher_kl: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """What a forward and backward pass of a micro-batch found; `logprobs` and `entropy` are [B, T]; all detached."""

    labels: _Labels
    logprobs: Tensor
    entropy: Tensor
    terms: TokenTerms
    facts: PartFacts


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """Data of one optimizer step: all of it in `batch` and the denominators, trajectories with a gradient in parts."""

    batch: TrainBatch
    denominators: Denominators
    parts: tuple[_Part, ...]


_IDLE_REFERENCE = (
    "reference: nothing compares with it, because loss.kl_coef, rewards.kl_coef and advantages.kl_shaping_coef are 0; "
    "set one, or remove the reference"
)


class Learner:
    """Learner of a policy by GSPO (`losses`), with its optimizer and, if a KL term asks for one, its reference.

    The model object is the caller's and is trained in place: a full model, or a model that peft has wrapped.

    Args:
        optimizer, loss, update, advantages, rewards, correction, reference: the settings; None: their defaults. Of the
            advantages' and rewards', only those that need logprobs or the whole batch are used (`shaping`).
        minibatch_size: most trajectories per optimizer step (the batch is split evenly); None takes the whole batch in
            one step with ratio 1 everywhere: no clip acts (the paper takes 4 steps a batch).
        rescores: other weights sampled; nothing is then compared with `rollout_logprobs`, which may be zeros.
        sampling: under whose temperature and truncation logprobs are computed; None: temperature 1.
        total_steps: optimizer steps of the whole run, for schedules that decay; None: not known.
        logits_bytes: see `LogprobComputer`.
        seed: of the division into minibatches and of dropout masks. clock: seconds, monotonic.
        reference_model, reference_policy: a frozen model as the reference, or one elsewhere; None: reference.source.
        distillation, teacher: how a frozen model of the same token ids is learned from, and that model, or what scores
            by it elsewhere; None: none.
        collective: the ranks that train the model together, each with the same arguments, batches and calls (`sink`
            apart); they return the same reports, but for the seconds. None: this process alone.
        on_step: called after each optimizer step with how many an update has taken, and of how many.

    Raises:
        ConfigError: settings that contradict each other or the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSettings,
        loss: LossSettings,
        update: UpdateSettings,
        minibatch_size: int | None = None,
        advantages: AdvantageSettings | None = None,
        rewards: RewardSettings | None = None,
        correction: CorrectionSettings | None = None,
        rescores: bool = False,
        reference: ReferenceSettings | None = None,
        sampling: Sampling | None = None,
        total_steps: int | None = None,
        seed: int = 0,
        reference_model: nn.Module | None = None,
        reference_policy: ReferencePolicy | None = None,
        distillation: DistillationSettings | None = None,
        teacher: nn.Module | TeacherPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
        logits_bytes: int = DEFAULT_LOGITS_BYTES,
        collective: Collective | None = None,
        on_step: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._model, self._collective = model, collective or OneProcess()
        _require_torch_optimizer(optimizer, self._collective)
        self._loss, self._settings, self._minibatch_size = loss, update, minibatch_size
        self._correction, self._rescores = correction or CorrectionSettings(), rescores
        if rescores:
            _require_no_comparison(self._correction)
        self._distillation = distillation
        self._reference_settings = reference or ReferenceSettings()
        self._shaper = AdvantageShaper(advantages or AdvantageSettings(), rewards or RewardSettings())
        self._seed, self._clock, self._num_updates, self._on_step = seed, clock, 0, on_step
        self._device, self._routers = device_of(model, self._collective), find_routers(model)
        rate = update.learning_rate
        self._optimizer = PolicyOptimizer(model, optimizer, learning_rate=rate, total_steps=total_steps)
        make = partial(
            LogprobComputer,
            sampling=sampling or Sampling(),
            logits_bytes=logits_bytes,
            entropy_has_gradient=loss.entropy_coef > 0,
            share_prefixes=_sharing(update, self._routers, self._collective),
            collective=self._collective,
        )
        self._computer = make(model)
        compares = loss.kl_coef > 0 or self._shaper.uses_reference
        if not compares and any(given is not None for given in (reference, reference_model, reference_policy)):
            raise ConfigError(_IDLE_REFERENCE)
        self._reference = reference_policy
        if compares and reference_policy is None:
            own = partial(Reference, model, self._reference_settings, computer=self._computer, make_computer=make)
            self._reference = own(given=reference_model)
        scored = self._computer if self._recomputes_old else None
        self._teacher = _new_teacher(model, distillation, teacher, scored, make, self._device)

    def update(self, batch: TrainBatch, sink: TokenSink | None = None) -> UpdateReport:
        """Train on a batch: `update_epochs` passes of one optimizer step per minibatch.

        Old and reference logprobs are computed first and stay fixed. Trajectories that are masked, and those with no
        advantage other than 0 while nothing else gives them a gradient, are not computed; they count in all
        denominators. `sink` is told of every pass; None: nothing is.

        Raises:
            NonFiniteError: too many steps in a row had a NaN or infinite loss or gradient; such a step is skipped.
        """
        started = self._clock()
        tally, router_load = Tally(self._loss), RouterLoad(self._routers)
        sink = sink or IgnoreTokens()
        begun = _with_feedback_read(self._teacher, sink.begin(batch), self._settings.max_tokens_per_microbatch)
        plan = self._plan(begun)
        orders = [self._order(len(plan), epoch) for epoch in range(self._settings.update_epochs)]
        # Before the first step the weights are the old ones: a minibatch without another pass is scored by that one.
        # With gradients kernels round otherwise, and a teacher that is the policy would not give 0.
        is_scored_apart = self._shaper.uses_reference or (self._teacher is not None and self._against is None)
        first = orders[0][:1] if len(orders) == 1 and not is_scored_apart else ()
        _prepare(self._teacher, [part.batch for minibatch in plan for part in minibatch.parts])
        plan = [minibatch if k in first else self._label(minibatch) for k, minibatch in enumerate(plan)]
        plan, shaping_metrics = self._shape(plan)
        labelled_at = self._clock()
        for done, number in enumerate(itertools.chain(*orders), 1):
            self._step(plan[number], tally, router_load, sink, is_first_epoch=done <= len(plan))
            self._on_step(done, len(plan) * len(orders))
        self._num_updates += 1
        every = self._reference_settings.update_every_n_iters
        if self._reference is not None and every and self._num_updates % every == 0:
            self._reference.refresh()
        trained = [part.batch for minibatch in plan for part in minibatch.parts]
        of_feedback = teacher_metrics(begun, trained) if isinstance(self._teacher, FeedbackTeacher) else {}
        metrics = {**tally.metrics(), **batch_metrics(batch, trained), **shaping_metrics, **of_feedback}
        metrics |= router_load.metrics(self._collective)
        metrics |= {"time/score_seconds": labelled_at - started, "time/train_seconds": self._clock() - labelled_at}
        return UpdateReport(metrics, tally.num_steps, tally.num_nonfinite_steps)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a restart needs besides the model's parameters and `counters()`; live: write them at once."""
        return {**self._optimizer.tensors(), **({} if self._reference is None else self._reference.tensors())}

    def copy_state(self) -> Callable[[Path], None]:
        """Copy `tensors()`, of several ranks this one's part; return what writes the copy. See `saved.copy_state`."""
        return copy_state(self.tensors(), **place_of(self._collective))

    def counters(self) -> dict[str, int | float]:
        return {**self._optimizer.counters(), **self._shaper.counters(), "learner.num_updates": self._num_updates}

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int | float]) -> None:
        """Go on bit for bit from `tensors()` and `counters()`, in a learner of the same settings; not the parameters.

        Raises:
            CheckpointError: the state of other parameters or of other settings, or an incomplete one.
        """
        if "learner.num_updates" not in counters:
            raise CheckpointError("the learner's counter 'learner.num_updates' is missing")
        check_same_reference(tensors, {} if self._reference is None else self._reference.tensors())
        self._shaper.restore(counters)
        self._optimizer.restore(tensors, counters)
        self._num_updates = int(counters["learner.num_updates"])
        if self._reference is not None:
            self._reference.restore(tensors)

    def restore_parts(
        self,
        tensors: Mapping[str, Tensor],
        counters: Mapping[str, int | float],
        *,
        with_optimizer: bool,
        with_step: bool,
    ) -> None:
        """Begin with parts of another learner's `tensors()` and `counters()`; a reference is this learner's own.

        Args:
            with_optimizer: take its moments, and the coefficient of a KL that adapts, if it does in both.
            with_step: take the numbers of its updates and optimizer steps, which seeds and schedule go by.

        Raises:
            CheckpointError: the state of other parameters or of another kind of optimizer.
        """
        attempts = dict.fromkeys(self._optimizer.counters(), 0)
        if with_step:
            attempts["optimizer.num_attempts"] = int(counters.get("optimizer.num_attempts", 0))
            self._num_updates = int(counters.get("learner.num_updates", 0))
        self._optimizer.restore(tensors if with_optimizer else {}, attempts)
        if with_optimizer:
            self._shaper.restore({name: counters.get(name, value) for name, value in self._shaper.counters().items()})

    def _plan(self, batch: TrainBatch) -> list[_Minibatch]:
        """Return the division of the batch into minibatches and micro-batches, drawn once per update."""
        # Every epoch trains on the micro-batches whose old logprobs were computed: between others, a change of padding
        # or kernel would pass for a change of the policy.
        generator = seeding.generator(self._seed, "minibatches", self._num_updates)
        with_advantage = not (self._has_other_terms or self._shaper.gives_advantages)
        plan: list[_Minibatch] = []
        for minibatch in split_minibatches(batch, self._minibatch_size, generator):
            counts = count_denominators(
                minibatch.action_mask,
                minibatch.turn_index,
                minibatch.trajectory_index,
                num_batch_tokens=batch.num_actions,
            )
            counts = dataclasses.replace(counts, num_taught=_num_taught(minibatch))
            kept = _trainable(minibatch, with_advantage=with_advantage)
            plan.append(
                _Minibatch(
                    minibatch, counts, self._parts(select_trajectories(minibatch, kept), len(plan)) if kept else ()
                )
            )
        return plan

    def _parts(self, batch: TrainBatch, minibatch: int) -> tuple[_Part, ...]:
        alike = self._computer.prefixes.pays(batch.token_ids, batch.attention_mask)
        num_ranks = 1 if self._computer.has_dropout else self._collective.world_size
        parts = _divide(batch, self._settings.max_tokens_per_microbatch, alike=alike, num_ranks=num_ranks)
        seeds = [seeding.child_seed(self._seed, "dropout", self._num_updates, minibatch, k) for k in range(len(parts))]
        return tuple(_Part(to_device(part, self._device), seed) for part, seed in zip(parts, seeds, strict=True))

    @property
    def _has_other_terms(self) -> bool:  # under which a token without an advantage has a gradient
        return self._loss.kl_coef > 0 or self._loss.entropy_coef > 0 or self._teacher is not None

    def _order(self, num_minibatches: int, epoch: int) -> list[int]:
        generator = seeding.generator(self._seed, "order", self._num_updates, epoch)
        return [int(number) for number in generator.permutation(num_minibatches)]

    def _own(self, parts: Sequence[_Part]) -> list[_Part]:
        return [
            part if counts else dataclasses.replace(part, weight=0.0)
            for part, counts in own_of(parts, self._collective)
        ]

    def _gather(self, own: Sequence[Record], parts: Sequence[_Part]) -> list[Record]:
        return gather(own, len(parts), self._collective, self._device)

    def _label(self, minibatch: _Minibatch) -> _Minibatch:
        labels = self._gather([self._labels(part) for part in self._own(minibatch.parts)], minibatch.parts)
        parts = [
            dataclasses.replace(part, batch=_labelled(part.batch, its_labels))
            for part, its_labels in zip(minibatch.parts, labels, strict=True)
        ]
        return dataclasses.replace(minibatch, parts=tuple(parts))

    def _labels(self, part: _Part) -> _Labels:
        batch, old = part.batch, None
        if self._recomputes_old:
            with torch.no_grad(), self._computer.adapter_dropout(part.dropout_seed):
                old = self._computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
        log_ratios, kl = (None, None) if self._teacher is None else self._teacher.compare(batch, old)
        return _Labels(old, self._reference_logprobs(batch), log_ratios, kl)

    def _reference_logprobs(self, batch: TrainBatch) -> Tensor | None:
        return None if self._reference is None else self._reference.logprobs(batch)

    def _shape(self, plan: Sequence[_Minibatch]) -> tuple[list[_Minibatch], Mapping[str, float]]:
        shaped = self._shaper.shape([part.batch for minibatch in plan for part in minibatch.parts])
        batches = iter(shaped.parts)
        return [
            dataclasses.replace(m, parts=tuple(dataclasses.replace(part, batch=next(batches)) for part in m.parts))
            for m in plan
        ], shaped.metrics

    def _step(
        self, minibatch: _Minibatch, tally: Tally, router_load: RouterLoad, sink: TokenSink, *, is_first_epoch: bool
    ) -> None:
        if not minibatch.parts or not _has_gradient(minibatch, self._loss, self._distillation):
            tally.add_empty_step()  # and no step: momentum alone would move the weights
            return
        # The learner's logprobs before the update are the old ones; where the engine's stand for these, the present
        # ones as long as no step was taken.
        knows_gap = not self._rescores and (is_first_epoch if self._recomputes_old else tally.num_steps == 0)
        self._optimizer.zero_grad()
        own = [
            self._backward(part, minibatch.denominators, router_load, with_gap=knows_gap)
            for part in self._own(minibatch.parts)
        ]
        passes = self._gather(own, minibatch.parts)
        facts = [one.facts for one in passes]
        # Of all parts: every process decides the same about the step.
        loss = sum(float(fact.loss.loss) for fact in facts)
        report = self._optimizer.step(loss)
        tally.add_step(facts, report)
        for part, one in zip(minibatch.parts, passes, strict=True):
            weights = None if one.facts.correction is None else one.facts.correction.weights
            sink.seen(_labelled(part.batch, one.labels), one.logprobs, one.entropy, one.terms, weights)
        sink.stepped(minibatch.batch, report)

    def _backward(self, part: _Part, denominators: Denominators, router_load: RouterLoad, *, with_gap: bool) -> _Pass:
        """Add the gradients of a micro-batch, labelled before or not."""
        batch = part.batch
        ref = None if isinstance(batch, LabelledBatch) else self._reference_logprobs(batch)
        with self._computer.adapter_dropout(part.dropout_seed):
            with router_load.watching(batch.attention_mask[:, :-1] & bool(part.weight)):
                inputs = batch.token_ids, batch.attention_mask, batch.action_mask
                computed = self._computer.compute(*inputs, against=self._against)
            now, entropy = computed.logprobs.detach(), computed.entropy.detach()
            if not isinstance(batch, LabelledBatch):
                batch = _labelled(batch, _Labels(now if self._recomputes_old else None, ref))
            correction = correct(batch, now, self._correction)
            weights = None if correction is None else correction.weights
            output = _loss(batch, computed, weights, self._loss, self._distillation, denominators)
            torch.autograd.backward(output.loss * part.weight)
        own = batch.old_logprobs if self._recomputes_old else now
        facts = PartFacts(output.stats, correction, EngineGap.of(batch, own, self._loss.unit) if with_gap else None)
        labels = _Labels(batch.old_logprobs, batch.ref_logprobs, batch.teacher_log_ratios, batch.teacher_kl)
        return _Pass(labels, now, entropy, output.tokens, facts)

    @property
    def _against(self) -> Against | None:
        return self._teacher.against if isinstance(self._teacher, Teacher) else None

    @property
    def _recomputes_old(self) -> bool:
        return self._correction.old_logprobs == "recompute"


def _require_torch_optimizer(settings: OptimizerSettings, collective: Collective) -> None:
    if collective.is_shared_out and settings.kind not in ("adamw", "adamw_fused"):
        raise ConfigError(
            f"optimizer.kind: {settings.kind!r} cannot hold parts of parameters that ranks share; write 'adamw_fused'"
        )


def _require_no_comparison(correction: CorrectionSettings) -> None:
    for name in SAMPLER_KEYS:
        if (problem := correction.rescored_problem(name)) is not None:
            raise ConfigError(f"correction.{name}: {problem}")


def _sharing(update: UpdateSettings, routers: Routers, collective: Collective) -> bool | Literal["auto"]:
    if not routers.modules:
        return update.share_prefixes
    if collective.sequence is not None:
        raise ConfigError(
            "learner.sequence_parallel: the load of this model's routers is counted by row, and ranks would have parts "
            "of rows; set 1"
        )
    if update.share_prefixes is True:
        raise ConfigError(
            'training.share_prefixes: the load of this model\'s routers is counted by row; write false or "auto"'
        )
    return False


def _divide(batch: TrainBatch, max_tokens: int, *, alike: bool, num_ranks: int) -> list[TrainBatch]:
    """Return the micro-batches; for several ranks as many for each, as far as trajectories and `max_tokens` allow."""
    parts = split_microbatches(batch, max_tokens, keep_alike_together=alike)
    wanted = len(parts) + -len(parts) % num_ranks
    if wanted > len(parts):
        # The smallest, about, of which there are no more: no rank has more to do than others.
        size = int(batch.attention_mask.sum()) // wanted + 1
        while size < max_tokens and len(parts := split_microbatches(batch, size, keep_alike_together=alike)) > wanted:
            size += size // 10 + 1
    return parts


_AnyTeacher = Teacher | RemoteTeacher | FeedbackTeacher


def _new_teacher(
    policy: nn.Module,
    settings: DistillationSettings | None,
    model: nn.Module | TeacherPolicy | None,
    computer: LogprobComputer | None,
    make: partial[LogprobComputer],
    device: torch.device,
) -> _AnyTeacher | None:
    if settings is None:
        return None
    make_plain = partial(make, sampling=Sampling(), entropy_has_gradient=False)
    if settings.is_self:
        if model is not None:
            raise ConfigError("distillation.teacher: 'self' is the policy, and another model was passed as `teacher`")
        return FeedbackTeacher(make_plain(policy), scored=computer, device=device)
    if model is None:
        raise ConfigError("distillation: expected a teacher to learn from, got none; pass its model as `teacher`")
    if not isinstance(model, nn.Module):
        if settings.baseline or settings.divergence != "sampled":
            raise ConfigError("distillation: a sum over the vocabulary needs a teacher in this process")
        return RemoteTeacher(model, policy=policy, computer=computer, make_computer=make_plain)
    return Teacher(model, settings, policy=policy, computer=computer, make_computer=make_plain)


def _with_feedback_read(teacher: _AnyTeacher | None, batch: TrainBatch, max_tokens: int) -> TrainBatch:
    return teacher.read(batch, max_tokens=max_tokens) if isinstance(teacher, FeedbackTeacher) else batch


def _prepare(teacher: _AnyTeacher | None, batches: Sequence[TrainBatch]) -> None:
    if isinstance(teacher, RemoteTeacher):
        teacher.prepare(batches)


def _num_taught(minibatch: TrainBatch) -> int | None:
    """Return the tokens that a teacher with feedback speaks of, without those of masked trajectories; None: of all."""
    return None if minibatch.is_taught is None else int(minibatch.is_taught[~minibatch.is_masked].sum())


def _has_gradient(minibatch: _Minibatch, loss: LossSettings, distillation: DistillationSettings | None) -> bool:
    if loss.kl_coef > 0 or loss.entropy_coef > 0:
        return True
    # A teacher with feedback may have none about the turns of a minibatch; None: it speaks of all.
    if distillation is not None and minibatch.denominators.num_taught != 0:
        return True
    learns_from_rewards = distillation is None or distillation.reward
    return learns_from_rewards and any(bool(part.batch.advantages.any()) for part in minibatch.parts)


def _loss(
    batch: LabelledBatch,
    computed: TokenLogprobs,
    correction: Tensor | None,
    settings: LossSettings,
    distillation: DistillationSettings | None,
    denominators: Denominators,
) -> LossOutput:
    teacher = None
    if distillation is not None:
        scores = batch.teacher_log_ratios, batch.teacher_kl, computed.divergence, batch.is_taught
        teacher = TeacherScores(distillation, *scores)
    return policy_loss(
        computed.logprobs,
        batch.old_logprobs,
        action_mask=batch.action_mask,
        turn_index=batch.turn_index,
        trajectory_index=batch.trajectory_index,
        advantages=batch.advantages,
        settings=settings,
        denominators=denominators,
        ref_logprobs=batch.ref_logprobs,
        entropy=computed.entropy,
        correction=correction,
        teacher=teacher,
    )


def _labelled(part: TrainBatch, labels: _Labels) -> LabelledBatch:
    old = part.rollout_logprobs if labels.old is None else labels.old
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(TrainBatch)}
    return LabelledBatch(
        **fields,
        old_logprobs=old,
        ref_logprobs=labels.ref,
        teacher_log_ratios=labels.teacher_log_ratios,
        teacher_kl=labels.teacher_kl,
    )


def _trainable(batch: TrainBatch, *, with_advantage: bool) -> list[int]:
    """Return the trajectories that are not masked; with_advantage: only those with one other than 0 somewhere."""
    rows = ~batch.is_masked
    if with_advantage:
        rows &= batch.advantages.ne(0).any(1)
    return [int(trajectory) for trajectory in torch.unique(batch.trajectory_index[rows])]
