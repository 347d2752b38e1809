"""A learner whose work is done by ranks, as the trainer sees it, and what a rank does.

The driver keeps a whole model, in the processor's memory unless an engine samples from it; each rank, an actor of Ray,
holds a part of another one, built on torch's "meta" device. A batch and the new weights travel as Ray's objects: the
first rank gathers the trained parameters, and holds them whole for a moment. What else a checkpoint holds, the ranks
write and read themselves, each its part.

If a rank is lost, all are ended, and new ones go on from the newest sound checkpoint. They learn the batches since then
once more, from their files, and then the one that was being learned. Nothing is sampled again. Batches are kept as long
as the newest checkpoint but one would need them, so that a damaged one is passed over.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gspo_gym import errors
from gspo_gym.base.files import writing
from gspo_gym.base.leftovers import goes_with_us, remove_folder
from gspo_gym.cluster.actors import ASIDE, Actors, RanksLostError
from gspo_gym.cluster.sharding import whole
from gspo_gym.errors import CheckpointError, GymError, ServiceError
from gspo_gym.learning.batching import TrainBatch, tensors_of
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.saved import PartsOfTensors, SavedTensors
from gspo_gym.learning.tokens import TokenSink, TokenTable
from gspo_gym.learning.update import Learner, UpdateReport
from gspo_gym.policy.checkpoints import Checkpoint
from gspo_gym.policy.load import read_weights
from gspo_gym.policy.parallel import copy_into

_Result = TypeVar("_Result")
_UPDATES = "learner.num_updates"
_TABLE = "table."  # before the names of a token table's columns, beside the parameters'


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """What happens when ranks are lost.

    Attributes:
        group_timeout_seconds: for an answer of the ranks; then one hangs.
        max_restarts: in a row, without a batch that was learned.
    """

    group_timeout_seconds: float
    max_restarts: int


# Builds a rank's model from its number and the driver's order (Any: JSON); and its learner when the model has weights.
Build = Callable[[int, Any], tuple[nn.Module, Callable[[], Learner]]]


@dataclass(frozen=True, slots=True)
class Started:
    """Ranks that were started, as `LearnerRank`.

    Attributes:
        order: to build their model and learner.
        kept: lives as long as they do: the store by which they meet.
    """

    ranks: Actors
    order: Mapping[str, Any]
    kept: object


@dataclass(frozen=True, slots=True)
class _Learned:
    """A batch that the ranks were given.

    Attributes:
        number: of updates before it.
        file: holds it.
    """

    number: int
    file: Path


class LearnerOnRanks:
    """A learner in other processes, with the methods of `learning.update.Learner`.

    Args:
        model: gets the trained weights, in place. Its present ones are those that the ranks begin with.
        start: starts ranks that make room for the model in a checkpoint's folder, or one of the same shape as `model`
            (None).
        newest: returns the run's newest sound checkpoint, None without any, and raises a CheckpointError if all are
            damaged.
        num_saved: returns the number of updates in the oldest checkpoint that ranks may have to go on from, 0 without
            one.
        folder: for batches, until that checkpoint holds what was learned from them; removed when this process ends.
        settings: see `RecoverySettings`.
        on_restart: told the number of updates so far and why the ranks were lost, before new ones are started; in any
            thread.

    Raises:
        ServiceError: the ranks did not come up, again and again. GymError: they refuse the configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start: Callable[[str | None], Started],
        newest: Callable[[], Checkpoint | None],
        num_saved: Callable[[], int],
        folder: Path,
        settings: RecoverySettings,
        on_restart: Callable[[int, str], None] = lambda _, __: None,
    ) -> None:
        self._model, self._start, self._newest, self._num_saved = model, start, newest, num_saved
        self._folder, self._settings, self._on_restart = folder, settings, on_restart
        self._lock = threading.Lock()
        self._started: Started | None = None
        self._counters: dict[str, int | float] = {}
        self._log: list[_Learned] = []  # those that the newest checkpoint may not hold
        self._beginning: list[tuple[Any, ...]] = []  # what was restored, until a checkpoint holds it
        self._is_as_begun = True  # nothing has come back yet
        self._num_updates = 0  # that came back
        self._num_restarts = 0  # in a row
        self._lost_because = ""
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        goes_with_us(folder)
        try:
            try:
                self._begin()
            except RanksLostError as error:
                self._note_loss(error)
                self._surely(lambda: None)
        except BaseException:
            self.close()
            raise

    def update(self, batch: TrainBatch, sink: TokenSink | None = None) -> UpdateReport:
        """Train on a batch; see `Learner.update`. The model of this process has the new weights afterwards.

        Raises:
            NonFiniteError: as there. ServiceError: the ranks were lost too often. TypeError: `sink` is no TokenTable,
                of which alone the ranks can send the columns.
        """
        if not (sink is None or isinstance(sink, TokenTable)):
            raise TypeError(f"sink: expected a TokenTable or None with several ranks, got {type(sink).__name__}")
        with self._lock:
            self._forget_saved()
            entry = self._write(batch)
            report: UpdateReport = self._surely(lambda: self._learn(entry, sink, keeps=True))
            self._log.append(entry)
            self._num_updates, self._num_restarts = entry.number + 1, 0
        return report

    def copy_state(self) -> Callable[[Path], None]:
        """Have each rank copy its part of what a restart needs besides the model's parameters and `counters()`.

        Return what has the ranks write their copies into a folder, in any thread, while they go on; it returns when
        all files are on the disk, and raises a CheckpointError if a rank's disk refuses or a rank is lost.
        """
        with self._lock:
            return self._surely(self._ask_copies)

    @property
    def pids(self) -> list[int]:
        """The processes, by rank; none while others have to be started."""
        return [] if self._started is None else list(self._started.ranks.pids)

    def counters(self) -> dict[str, int | float]:
        return dict(self._counters)

    def restore(self, tensors: SavedTensors, counters: Mapping[str, int | float]) -> None:
        """Go on from what any number of processes saved; each rank reads its part. See `Learner.restore`."""
        self._begin_with((str(tensors.folder.absolute()), dict(counters), None))

    def restore_parts(
        self,
        tensors: SavedTensors,
        counters: Mapping[str, int | float],
        *,
        with_optimizer: bool,
        with_step: bool,
    ) -> None:
        """Begin with parts of another learner's; see `Learner.restore_parts`."""
        self._begin_with((str(tensors.folder.absolute()), dict(counters), (with_optimizer, with_step)))

    def close(self) -> None:
        """End the ranks. Closing twice is fine."""
        with self._lock:
            if self._started is not None:
                self._started.ranks.close()
            self._started = None
        remove_folder(self._folder)

    def _begin(self) -> None:
        self._bring_up(None)
        for saved in self._beginning:
            self._ask("restore", *saved)

    def _bring_up(self, checkpoint: Path | None) -> None:
        # By now, the model that the run began with may have been removed with its checkpoint.
        self._started = self._start(None if checkpoint is None else str(checkpoint))
        self._ask("build", self._started.order)
        # A rank's files give the shape alone. A warm-up may have moved the weights of the model here, and those below
        # an adapter need not be the files' ones. Only trained weights are older in a checkpoint than here.
        given = {
            name: tensor.detach().cpu()
            for name, tensor in _saved(self._model).items()
            if checkpoint is None or not tensor.requires_grad
        }
        self._ask("take_weights", given, None if checkpoint is None else str(checkpoint.absolute()))

    def _begin_with(self, saved: tuple[Any, ...]) -> None:
        with self._lock:
            self._beginning.append(saved)
            self._surely(lambda: self._ask("restore", *saved))
            self._num_updates = int(self._counters[_UPDATES])

    def _surely(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, with other ranks if these are lost.

        Raises:
            ServiceError: they were lost too often.
        """
        while True:
            try:
                if self._started is None:
                    self._recover()
                return work()
            except RanksLostError as error:
                self._note_loss(error)

    def _note_loss(self, error: RanksLostError) -> None:
        if self._started is not None:
            self._started.ranks.close()
        self._started = None
        self._num_restarts += 1
        if self._num_restarts > self._settings.max_restarts:
            raise ServiceError(
                f"the learner's ranks were lost {self._num_restarts} times in a row, and "
                f"topology.max_restarts = {self._settings.max_restarts}: {error}"
            ) from error
        self._lost_because = str(error)

    def _recover(self) -> None:
        lost = f"the learner's ranks were lost ({self._lost_because})"
        if self._is_as_begun:
            self._on_restart(self._num_updates, self._lost_because)
            self._begin()
            return
        try:
            checkpoint = self._newest()
        except CheckpointError as error:
            raise ServiceError(f"{lost}: {error}") from error
        if checkpoint is None:
            raise ServiceError(f"{lost} before the first checkpoint")
        missing = set(range(int(checkpoint.learner_counters[_UPDATES]), self._num_updates))
        missing -= {entry.number for entry in self._log}
        passed_over = "".join(f"; passed over a checkpoint: {reason}" for reason in checkpoint.damaged.values())
        if missing:
            raise ServiceError(
                f"{lost}, and the batches that were learned since {checkpoint.folder} are not kept any more: go on "
                f"with --resume, which samples them again{passed_over}"
            )
        self._on_restart(self._num_updates, self._lost_because + passed_over)
        try:
            self._bring_up(checkpoint.model_folder)
            folder = str(checkpoint.learner_tensors.folder.absolute())
            self._ask("restore", folder, dict(checkpoint.learner_counters), None)
        except CheckpointError as error:
            if not checkpoint.folder.exists():  # it made room for the newer one that was being written
                raise RanksLostError(str(error)) from error
            raise ServiceError(f"{lost}: {error}") from error
        for entry in self._log:
            if entry.number >= checkpoint.learner_counters[_UPDATES]:
                self._learn(entry, None, keeps=False)

    def _learn(self, entry: _Learned, table: TokenTable | None, *, keeps: bool) -> UpdateReport:
        update: Update
        update, held = self._ask("update", load_file(entry.file), keeps, table is not None)
        for name, parameter in _trained(self._model) if keeps else ():
            self._is_as_begun = False
            with torch.no_grad():
                copy_into(parameter, update.weights[name])
        if table is not None:
            table.unpack(update.columns, StepReport)
        return replace(update.report, metrics={**update.report.metrics, "memory/rank_mib": held / 2**20})

    def _ask_copies(self) -> Callable[[Path], None]:
        assert self._started is not None
        self._ask("copy")
        return partial(_have_written, self._started.ranks, self._settings.group_timeout_seconds)

    def _ask(self, method: str, *arguments: Any) -> tuple[Any, int]:
        """Have all ranks do something; return what rank 0 found (Any: it differs), and the most bytes that one holds.

        Raises:
            GymError: what all ranks raised. RanksLostError: one was lost, or they do not agree.
        """
        assert self._started is not None
        ranks = self._started.ranks
        answers: list[Answer] = ranks.ask(method, *arguments, max_seconds=self._settings.group_timeout_seconds)
        refusals = [answer.refusal for answer in answers]
        if any(refusal != refusals[0] for refusal in refusals):
            ranks.close()
            raise RanksLostError(f"the ranks do not agree: {refusals}")
        if refusals[0] is not None:
            kind, text = refusals[0]
            raise getattr(errors, kind)(text)
        self._counters = answers[0].counters
        return answers[0].result, max(answer.held_bytes for answer in answers)

    def _write(self, batch: TrainBatch) -> _Learned:
        number = int(self._counters[_UPDATES])
        file = self._folder / f"batch_{number:06d}.safetensors"
        _write_batch(batch, file)
        return _Learned(number, file)

    def _forget_saved(self) -> None:
        num_saved = self._num_saved()
        for entry in self._log:
            if entry.number < num_saved:
                entry.file.unlink(missing_ok=True)
        self._log = [entry for entry in self._log if entry.number >= num_saved]
        if not self._is_as_begun and num_saved:
            self._beginning = []


def _write_batch(batch: TrainBatch, file: Path) -> None:
    assert not batch.prompts, "a configuration with a teacher and several ranks is refused"
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors_of(batch).items()}, file)


def _have_written(ranks: Actors, max_seconds: float, folder: Path) -> None:
    try:
        refusals = ranks.ask("write", str(folder.absolute()), max_seconds=max_seconds, group=ASIDE)
    except RanksLostError as error:
        raise CheckpointError(f"{folder}: the learner's ranks were lost while they wrote: {error}") from error
    if refused := [f"rank {rank}: {refusal}" for rank, refusal in enumerate(refusals) if refusal is not None]:
        raise CheckpointError("; ".join(refused))


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _saved(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, and the buffers that are saved with them."""
    saved = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if name in saved}}


@dataclass(frozen=True, slots=True)
class Update:
    """What an update gave; rank 0's.

    Attributes:
        weights: the trained parameters, whole; {} if they are not wanted.
        columns: of a token table.
    """

    report: UpdateReport
    weights: Mapping[str, Tensor]
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says to an order.

    Attributes:
        result: what was found (Any: it differs); None but of rank 0.
        refusal: the kind and the text of a GymError; None: it was done.
        counters: the learner's.
        held_bytes: of parameters, gradients and the learner's tensors in this process, when a step ends.
    """

    result: Any
    refusal: tuple[str, str] | None
    counters: dict[str, int | float]
    held_bytes: int


class LearnerRank:
    """The actor: a rank of the learner. All ranks are asked the same at once; what `build` returns is in its docstring.

    `build` returns the model, of which this process holds a part, and what builds its learner. That is called when the
    model has the driver's weights, because a reference may copy them.
    """

    def __init__(self, rank: int, build: Build) -> None:
        self._rank, self._build = rank, build
        self._model: nn.Module
        self._make_learner: Callable[[], Learner]
        self._learner: Learner | None = None
        self._copies: deque[Callable[[Path], None]] = deque(maxlen=1)

    def life(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    def build(self, order: Any) -> Answer:
        """Build the model by the driver's order (Any: JSON)."""

        def work() -> None:
            self._model, self._make_learner = self._build(self._rank, order)

        return self._answer(work)

    @torch.no_grad()
    def take_weights(self, tensors: Mapping[str, Tensor], trained: str | None) -> Answer:
        """Take the driver's weights, and the trained ones of a checkpoint's folder; then build the learner."""

        def work() -> None:
            own = _saved(self._model)
            for name, tensor in tensors.items():
                copy_into(own[name], tensor)
            if trained is not None:
                read_weights(self._model, Path(trained))

        answer = self._answer(work)
        if answer.refusal is not None:
            return answer

        def make_learner() -> None:
            with torch.enable_grad():
                self._learner = self._make_learner()

        return self._answer(make_learner)

    def update(self, batch: Mapping[str, Any], keeps: bool, has_table: bool) -> Answer:  # Any: tensors, by field
        """Learn a batch."""

        def work() -> Update:
            table = TokenTable() if has_table else None
            assert self._learner is not None
            report = self._learner.update(TrainBatch(**batch), table)
            weights = {}
            for name, parameter in _trained(self._model) if keeps else ():
                full = whole(parameter.detach())  # of all parts: every rank must take part
                if self._rank == 0:
                    weights[name] = full.cpu()
            return Update(report, weights, {} if table is None else table.pack())

        return self._answer(work)

    def restore(self, folder: str, counters: Mapping[str, int | float], parts: tuple[bool, bool] | None) -> Answer:
        """Go on from what any number of ranks saved, or from parts of it."""

        def work() -> None:
            assert self._learner is not None
            tensors = PartsOfTensors(SavedTensors.of_learner(Path(folder)), self._model)
            if parts is None:
                self._learner.restore(tensors, counters)
                return
            with_optimizer, with_step = parts
            self._learner.restore_parts(tensors, counters, with_optimizer=with_optimizer, with_step=with_step)

        return self._answer(work)

    def copy(self) -> Answer:
        """Copy what `write` writes."""

        def work() -> None:
            assert self._learner is not None
            self._copies.append(self._learner.copy_state())

        return self._answer(work)

    def write(self, folder: str) -> str | None:
        """Write the latest copy into a folder, while the learner goes on; return why it could not."""
        try:
            self._copies.pop()(Path(folder))
        except Exception as error:
            return str(error)
        return None

    def _answer(self, work: Callable[[], Any]) -> Answer:
        result, refusal = None, None
        try:
            result = work()
        except GymError as error:
            refusal = type(error).__name__, str(error)
        counters = {} if self._learner is None else self._learner.counters()
        return Answer(result if self._rank == 0 else None, refusal, counters, self._held_bytes())

    def _held_bytes(self) -> int:
        if self._learner is None:
            return 0
        # The gradients are gone by now: each was as large as its parameter.
        trained = (parameter for _, parameter in _trained(self._model))
        tensors = (t.detach() for t in (*self._model.parameters(), *trained, *self._learner.tensors().values()))
        return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)
