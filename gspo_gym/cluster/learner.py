"""A learner whose work is done by ranks, as the trainer sees it, and what a rank does.

The driver keeps a whole model, in the processor's memory unless an engine samples from it; each rank holds a part of
another one. A batch travels to the ranks as safetensors, and the new weights come back one parameter at a time.

If a rank is lost, all are ended, and new ones go on from the newest checkpoint. They learn the batches since then once
more, from their files, and then the one that was being learned. Nothing is sampled again.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors.torch import load, save, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gspo_gym import errors
from gspo_gym.base.files import writing
from gspo_gym.base.leftovers import goes_with_us, remove_folder
from gspo_gym.base.ranks import Rank, Ranks, RanksLostError
from gspo_gym.cluster.sharding import whole
from gspo_gym.errors import CheckpointError, GymError, ServiceError
from gspo_gym.learning.batching import TrainBatch
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.tokens import TokenSink, TokenTable
from gspo_gym.learning.update import Learner, UpdateReport
from gspo_gym.policy.checkpoints import Checkpoint
from gspo_gym.policy.parallel import copy_into, part_of

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


@dataclass(frozen=True, slots=True)
class Started:
    """Ranks that were started.

    Attributes:
        order: to build their model and learner.
        kept: lives as long as they do: the store by which they meet.
    """

    ranks: Ranks
    order: Mapping[str, Any]
    kept: object


@dataclass(frozen=True, slots=True)
class _Learned:
    """A batch that the ranks were given.

    Attributes:
        number: of updates before it.
        file: holds it.
        learning_rate: that was set when it was learned; None: the configuration's.
    """

    number: int
    file: Path
    learning_rate: float | None


class LearnerOnRanks:
    """A learner in other processes, with the methods of `learning.update.Learner`.

    Args:
        model: gets the trained weights, in place. Its present ones are those that the ranks begin with.
        start: starts ranks that load the model in a checkpoint's folder, or one of the same shape as `model` (None).
        newest: returns the run's newest complete checkpoint, None without one, and raises a CheckpointError for a
            damaged one. num_saved: the number of updates in it, 0 without one.
        folder: for batches, until a checkpoint holds what was learned from them; removed when this process ends.
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
        self._learning_rate: float | None = None
        self._log: list[_Learned] = []  # those that the newest checkpoint may not hold
        self._beginning: list[Callable[[], None]] = []  # what was restored, until a checkpoint holds it
        self._is_as_begun = True  # nothing has come back yet
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

    def set_learning_rate(self, learning_rate: float) -> None:
        """Change the learning rate (of a schedule: its peak) from the next update on."""
        self._learning_rate = learning_rate

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
            self._num_restarts = 0
        return report

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a restart needs besides the model's parameters and `counters()`, whole."""
        with self._lock:
            return self._surely(self._ask_tensors)

    def counters(self) -> dict[str, int | float]:
        return dict(self._counters)

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int | float]) -> None:
        """Go on from `tensors()` and `counters()`; see `Learner.restore`."""
        self._begin_with({"do": "restore", "counters": dict(counters)}, tensors)

    def restore_parts(
        self,
        tensors: Mapping[str, Tensor],
        counters: Mapping[str, int | float],
        *,
        with_optimizer: bool,
        with_step: bool,
    ) -> None:
        """Begin with parts of another learner's; see `Learner.restore_parts`."""
        order = {"do": "restore", "counters": dict(counters), "parts": [with_optimizer, with_step]}
        self._begin_with(order, tensors)

    def close(self) -> None:
        """End the ranks. Closing twice is fine."""
        with self._lock:
            if self._started is not None:
                self._started.ranks.close()
            self._started = None
        remove_folder(self._folder)

    def _begin(self) -> None:
        self._bring_up(None)
        for restore in self._beginning:
            restore()

    def _bring_up(self, checkpoint: str | None) -> None:
        self._started = self._start(checkpoint)
        self._ask(self._started.order)
        # A rank's files give the shape. A warm-up may have moved the weights of the model here, and those below an
        # adapter need not be the files' ones. Only trained weights are older in a checkpoint than here.
        given = [
            (name, tensor)
            for name, tensor in _saved(self._model).items()
            if checkpoint is None or not tensor.requires_grad
        ]
        self._ask({"do": "weights"}, _packed(given), len(given))

    def _begin_with(self, order: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        def restore() -> None:
            self._ask(order, _packed(tensors.items()), len(tensors))

        with self._lock:
            self._beginning.append(restore)
            self._surely(restore)

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
        checkpoint = None
        if not self._is_as_begun:
            try:
                checkpoint = self._newest()
            except CheckpointError as error:
                raise ServiceError(f"{lost}, and the newest checkpoint is damaged: {error}") from error
            if checkpoint is None:
                raise ServiceError(f"{lost} before the first checkpoint")
        self._on_restart(int(self._counters.get(_UPDATES, 0)), self._lost_because)
        if checkpoint is None:
            self._begin()
            return
        self._bring_up(str(checkpoint.model_folder))
        counters = dict(checkpoint.learner_counters)
        tensors = checkpoint.learner_tensors
        self._ask({"do": "restore", "counters": counters}, _packed(tensors.items()), len(tensors))
        for entry in self._log:
            if entry.number >= counters[_UPDATES]:
                self._learn(entry, None, keeps=False)

    def _learn(self, entry: _Learned, table: TokenTable | None, *, keeps: bool) -> UpdateReport:
        order = {"do": "update", "rate": entry.learning_rate, "keeps": keeps, "tokens": table is not None}
        answer, bodies = self._ask(order, [entry.file.read_bytes()], 1)
        parameters, columns = dict(_trained(self._model)), {}
        for body in bodies:
            for name, tensor in load(body).items():
                if name.startswith(_TABLE):
                    columns[name.removeprefix(_TABLE)] = tensor.numpy()
                    continue
                self._is_as_begun = False
                with torch.no_grad():
                    copy_into(parameters[name], tensor)
        if table is not None:
            table.unpack(columns, StepReport)
        return UpdateReport(**answer["report"])

    def _ask_tensors(self) -> dict[str, Tensor]:
        _, bodies = self._ask({"do": "tensors"})
        return {name: tensor for body in bodies for name, tensor in load(body).items()}

    def _ask(
        self, order: Mapping[str, Any], bodies: Iterable[bytes] = (), num_bodies: int = 0
    ) -> tuple[Any, Iterator[bytes]]:
        """Have all ranks do something; return rank 0's answer (Any: JSON), and its bodies, which must all be read.

        Raises:
            GymError: what all ranks raised. RanksLostError: one was lost, or they do not agree.
        """
        assert self._started is not None
        ranks, most = self._started.ranks, self._settings.group_timeout_seconds
        ranks.send(order, bodies, num_bodies=num_bodies)
        answer, answered = ranks.receive(0, max_seconds=most)
        refusals = [answer["refusal"]]
        refusals += [ranks.receive(rank, max_seconds=most)[0]["refusal"] for rank in range(1, len(ranks.handles))]
        if any(refusal != refusals[0] for refusal in refusals):
            ranks.give_up(f"the ranks do not agree: {refusals}")
            raise RanksLostError(f"the ranks do not agree: {refusals}")
        if refusals[0] is not None:
            kind, text = refusals[0]
            raise getattr(errors, kind)(text)
        self._counters = answer.pop("counters")
        return answer, answered

    def _write(self, batch: TrainBatch) -> _Learned:
        number = int(self._counters[_UPDATES])
        file = self._folder / f"batch_{number:06d}.safetensors"
        given = {field.name: getattr(batch, field.name) for field in fields(TrainBatch)}
        with writing(file):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in given.items() if tensor is not None}, file)
        return _Learned(number, file, self._learning_rate)

    def _forget_saved(self) -> None:
        num_saved = self._num_saved()
        for entry in self._log:
            if entry.number < num_saved:
                entry.file.unlink(missing_ok=True)
        self._log = [entry for entry in self._log if entry.number >= num_saved]
        if not self._is_as_begun and num_saved:
            self._beginning = []


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _saved(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, and the buffers that are saved with them."""
    saved = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if name in saved}}


def _packed(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[bytes]:
    """Yield each tensor as safetensors, when it is asked for; every rank must take all of them."""
    for name, tensor in tensors:
        yield save({name: whole(tensor.detach()).cpu().contiguous()})


def follow(rank: Rank, build: Callable[[Any], tuple[nn.Module, Callable[[], Learner]]]) -> NoReturn:
    """Do what the driver says, until it is gone.

    `build` is given the first order (Any: JSON), and returns the model, of which this process holds a part, and what
    builds its learner. That is called when the model has the driver's weights, because a reference may copy them.
    """
    built: tuple[nn.Module, Callable[[], Learner]] | None = None
    learner: Learner | None = None
    while True:
        order, bodies = rank.receive()
        answer: dict[str, Any] = {"refusal": None}  # Any: JSON
        given: list[tuple[str, Tensor]] = []
        try:
            if built is None:
                built = build(order)
            elif learner is None:
                _take_weights(built[0], bodies)
                learner = built[1]()
            elif order["do"] == "update":
                answer["report"], given = _update(order, next(bodies), built[0], learner)
            elif order["do"] == "tensors":
                given = list(learner.tensors().items())
            else:
                _restore(order, bodies, built[0], learner)
        except GymError as error:
            answer["refusal"] = [type(error).__name__, str(error)]
        for _ in bodies:  # of an order that was refused
            pass
        answer["counters"] = {} if learner is None else learner.counters()
        if rank.rank == 0:
            rank.send(answer, _packed(given), num_bodies=len(given))
        else:
            rank.send(answer)
            for _ in _packed(given):  # rank 0 has the parts, too
                pass


def _update(
    order: Mapping[str, Any], body: bytes, model: nn.Module, learner: Learner
) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    if order["rate"] is not None:
        learner.set_learning_rate(order["rate"])
    table = TokenTable() if order["tokens"] else None
    report = learner.update(TrainBatch(**load(body)), table)
    given: list[tuple[str, Tensor]] = []
    if table is not None:
        given += [(f"{_TABLE}{name}", torch.from_numpy(column)) for name, column in table.pack().items()]
    return asdict(report), given + (_trained(model) if order["keeps"] else [])


@torch.no_grad()
def _take_weights(model: nn.Module, bodies: Iterable[bytes]) -> None:
    own = _saved(model)
    for body in bodies:
        for name, tensor in load(body).items():
            copy_into(own[name], tensor)


def _restore(order: Mapping[str, Any], bodies: Iterable[bytes], model: nn.Module, learner: Learner) -> None:
    tensors = {name: _shared_out(name, tensor, model) for body in bodies for name, tensor in load(body).items()}
    if "parts" not in order:
        learner.restore(tensors, order["counters"])
        return
    with_optimizer, with_step = order["parts"]
    learner.restore_parts(tensors, order["counters"], with_optimizer=with_optimizer, with_step=with_step)


def _shared_out(name: str, tensor: Tensor, model: nn.Module) -> Tensor:
    """Return this rank's part of a tensor of a parameter that is shared out; another one as it is."""
    for own, parameter in model.named_parameters():
        if name.endswith(f".{own}") and isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
            return part_of(tensor, parameter)
    return tensor
