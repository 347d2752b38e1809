"""A learner whose work is done by ranks, as the trainer sees it, and what a rank does.

The driver keeps a whole model, in the processor's memory unless an engine samples from it; each rank holds a part of
another one. A batch travels to the ranks as safetensors, and the new weights come back one parameter at a time. What
else a checkpoint holds, the ranks write and read themselves, each its part.

If a rank is lost, all are ended, and new ones go on from the newest sound checkpoint. They learn the batches since then
once more, from their files, and then the one that was being learned. Nothing is sampled again.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
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
        self._beginning: list[Mapping[str, Any]] = []  # what was restored, until a checkpoint holds it
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
            return partial(_have_written, self._surely(self._ask_copies))

    def counters(self) -> dict[str, int | float]:
        return dict(self._counters)

    def restore(self, tensors: SavedTensors, counters: Mapping[str, int | float]) -> None:
        """Go on from what any number of processes saved; each rank reads its part. See `Learner.restore`."""
        self._begin_with(_order_to_restore(tensors, counters))

    def restore_parts(
        self,
        tensors: SavedTensors,
        counters: Mapping[str, int | float],
        *,
        with_optimizer: bool,
        with_step: bool,
    ) -> None:
        """Begin with parts of another learner's; see `Learner.restore_parts`."""
        self._begin_with({**_order_to_restore(tensors, counters), "parts": [with_optimizer, with_step]})

    def close(self) -> None:
        """End the ranks. Closing twice is fine."""
        with self._lock:
            if self._started is not None:
                self._started.ranks.close()
            self._started = None
        remove_folder(self._folder)

    def _begin(self) -> None:
        self._bring_up(None)
        for order in self._beginning:
            self._ask(order)

    def _bring_up(self, checkpoint: Path | None) -> None:
        # By now, the model that the run began with may have been removed with its checkpoint.
        self._started = self._start(None if checkpoint is None else str(checkpoint))
        self._ask(self._started.order)
        # A rank's files give the shape alone. A warm-up may have moved the weights of the model here, and those below
        # an adapter need not be the files' ones. Only trained weights are older in a checkpoint than here.
        given = [
            (name, tensor)
            for name, tensor in _saved(self._model).items()
            if checkpoint is None or not tensor.requires_grad
        ]
        trained = None if checkpoint is None else str(checkpoint.absolute())
        self._ask({"do": "weights", "trained": trained}, _packed(given), len(given))

    def _begin_with(self, order: Mapping[str, Any]) -> None:
        with self._lock:
            self._beginning.append(order)
            self._surely(lambda: self._ask(order))
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
            self._ask(_order_to_restore(checkpoint.learner_tensors, checkpoint.learner_counters))
        except CheckpointError as error:
            if not checkpoint.folder.exists():  # it made room for the newer one that was being written
                raise RanksLostError(str(error)) from error
            raise ServiceError(f"{lost}: {error}") from error
        for entry in self._log:
            if entry.number >= checkpoint.learner_counters[_UPDATES]:
                self._learn(entry, None, keeps=False)

    def _learn(self, entry: _Learned, table: TokenTable | None, *, keeps: bool) -> UpdateReport:
        order = {"do": "update", "keeps": keeps, "tokens": table is not None}
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
        report = UpdateReport(**answer["report"])
        return replace(report, metrics={**report.metrics, "memory/rank_mib": answer["held"] / 2**20})

    def _ask_copies(self) -> Ranks:
        assert self._started is not None
        self._ask({"do": "copy"})
        return self._started.ranks

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
        others = [ranks.receive(rank, max_seconds=most)[0] for rank in range(1, len(ranks.handles))]
        refusals = [each["refusal"] for each in (answer, *others)]
        answer["held"] = max(each["held"] for each in (answer, *others))
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
    given = {field.name: getattr(batch, field.name) for field in fields(TrainBatch)}
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in given.items() if tensor is not None}, file)


def _order_to_restore(tensors: SavedTensors, counters: Mapping[str, int | float]) -> dict[str, Any]:
    return {"do": "restore", "folder": str(tensors.folder.absolute()), "counters": dict(counters)}


def _have_written(ranks: Ranks, folder: Path) -> None:
    try:
        ranks.send_aside({"write": str(folder.absolute())})
        answers = [(rank, ranks.receive_aside(rank)["refusal"]) for rank in range(len(ranks.handles))]
    except RanksLostError as error:
        raise CheckpointError(f"{folder}: the learner's ranks were lost while they wrote: {error}") from error
    if refusals := [f"rank {rank}: {refusal}" for rank, refusal in answers if refusal is not None]:
        raise CheckpointError("; ".join(refusals))


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
    copies: deque[Callable[[Path], None]] = deque(maxlen=1)
    threading.Thread(target=_write_copies, args=(rank, copies), daemon=True).start()
    while True:
        order, bodies = rank.receive()
        answer: dict[str, Any] = {"refusal": None, "held": 0}  # Any: JSON
        given: list[tuple[str, Tensor]] = []
        try:
            if built is None:
                built = build(order)
            elif learner is None:
                _take_weights(built[0], bodies, order["trained"])
                learner = built[1]()
            elif order["do"] == "update":
                answer["report"], given = _update(order, next(bodies), built[0], learner)
                answer["held"] = _held_bytes(built[0], learner)
            elif order["do"] == "copy":
                copies.append(learner.copy_state())
            else:
                _restore(order, built[0], learner)
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
    table = TokenTable() if order["tokens"] else None
    report = learner.update(TrainBatch(**load(body)), table)
    given: list[tuple[str, Tensor]] = []
    if table is not None:
        given += [(f"{_TABLE}{name}", torch.from_numpy(column)) for name, column in table.pack().items()]
    return asdict(report), given + (_trained(model) if order["keeps"] else [])


def _held_bytes(model: nn.Module, learner: Learner) -> int:
    """Return the bytes of parameters, gradients and the learner's tensors in this process, when a step ends."""
    # The gradients are gone by now: each was as large as its parameter.
    trained = (parameter for _, parameter in _trained(model))
    tensors = (tensor.detach() for tensor in (*model.parameters(), *trained, *learner.tensors().values()))
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


@torch.no_grad()
def _take_weights(model: nn.Module, bodies: Iterable[bytes], trained: str | None) -> None:
    own = _saved(model)
    for body in bodies:
        for name, tensor in load(body).items():
            copy_into(own[name], tensor)
    if trained is not None:
        read_weights(model, Path(trained))


def _write_copies(rank: Rank, copies: deque[Callable[[Path], None]]) -> NoReturn:
    """Write the latest copy into the folder that the driver names, whenever it names one."""
    while True:
        folder, refusal = rank.receive_aside()["write"], None
        try:
            copies.pop()(Path(folder))
        except Exception as error:
            refusal = str(error)
        with contextlib.suppress(OSError):  # the driver is gone, and so is this process in a moment
            rank.send_aside({"refusal": refusal})


def _restore(order: Mapping[str, Any], model: nn.Module, learner: Learner) -> None:
    tensors = PartsOfTensors(SavedTensors.of_learner(Path(order["folder"])), model)
    if "parts" not in order:
        learner.restore(tensors, order["counters"])
        return
    with_optimizer, with_step = order["parts"]
    learner.restore_parts(tensors, order["counters"], with_optimizer=with_optimizer, with_step=with_step)
