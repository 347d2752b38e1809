"""Checkpoints of a model that is shared out over ranks: each writes its parts, and any number of ranks goes on.

    step_000020/
        rank-00000-of-00002.safetensors   parts of trained parameters and of the learner's tensors, one file a rank
        state.json                        {"counters": of the learner, "trainer": of the trainer}
        manifest.json                     size and SHA-256 of every file; written last

These are our own files and not torch's distributed checkpoints, of which the default kind has a pickle and the other
meets the other ranks in the thread that writes. Here ranks meet only before the first byte and after the last.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gspo_gym.base.files import sync, writing
from gspo_gym.errors import CheckpointError, GymError
from gspo_gym.learning.update import Learner
from gspo_gym.policy.load import Policy, save_policy
from gspo_gym.policy.manifest import Origin, parse_own_json, seal, verify

_STATE = "state.json"
_PARAMETER, _LEARNER = "parameter:", "learner:"


class ShardedCheckpoints:
    """The checkpoints of the ranks of torch's default process group, in a folder that all of them see.

    Every rank calls the same methods at the same time.
    """

    def __init__(self, folder: Path, *, origin: Origin | None = None) -> None:
        self._folder = folder
        self._origin = origin or Origin()
        self._thread = ThreadPoolExecutor(1)
        self._writing: tuple[int, Future[None]] | None = None

    def save(self, step: int, *, model: nn.Module, learner: Learner, trainer_state: Mapping[str, Any]) -> None:
        """Copy what this rank holds, and write it in the background; `finish` publishes it.

        Raises:
            CheckpointError: the checkpoint before this one could not be written, or `trainer_state` is not JSON.
        """
        self.finish()
        try:
            state = {"counters": dict(learner.counters()), "trainer": dict(trainer_state)}
            text = json.dumps(state, allow_nan=False, indent=2)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self._of(step)}: could not be saved: {error}") from error
        parts, first_rows = _copied_parts(model, learner)
        draft = self._draft(step)
        if dist.get_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        dist.barrier()  # before others put their files into it
        name = f"rank-{dist.get_rank():05d}-of-{dist.get_world_size():05d}.safetensors"
        self._writing = step, self._thread.submit(_write, draft, name, parts, first_rows, text)

    def finish(self) -> Path | None:
        """Return the folder of the checkpoint that was being written, when it is complete; None: there was none.

        Raises:
            CheckpointError: a rank could not write its parts; the checkpoint is gone.
        """
        if self._writing is None:
            return None
        (step, written), self._writing = self._writing, None
        target = self._of(step)
        error = written.exception()
        if self._any_rank(error is not None):
            if dist.get_rank() == 0:
                shutil.rmtree(self._draft(step), ignore_errors=True)
            raise CheckpointError(f"{target}: could not be saved: {error or 'another rank failed'}") from error
        failure: GymError | OSError | None = None
        if dist.get_rank() == 0:
            try:
                self._publish(step, target)
            except (GymError, OSError) as refused:
                failure = refused
        if self._any_rank(failure is not None):
            raise CheckpointError(f"{target}: could not be saved: {failure or 'rank 0 failed'}") from failure
        return target

    def _publish(self, step: int, target: Path) -> None:
        draft = self._draft(step)
        with writing(target):
            seal(draft, step=step, origin=self._origin)
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
            sync(self._folder)

    def _any_rank(self, failed: bool) -> bool:
        flag = torch.tensor(int(failed), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(flag)
        return bool(flag)

    def _of(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def _draft(self, step: int) -> Path:
        return self._folder / f".tmp_{self._of(step).name}"


def restore(folder: Path, *, model: nn.Module, learner: Learner) -> Mapping[str, Any]:
    """Go on bit for bit from a checkpoint of any number of ranks, each of which calls this; return the trainer's state.

    Model and learner are made as those of the checkpoint were, shared out over some ranks or whole.

    Raises:
        CheckpointError: it is incomplete or damaged, or of another model or other settings.
    """
    with _opened(folder) as saved:
        _read_parameters(saved, model)
        parameters = dict(model.named_parameters())
        tensors = {}
        for name in saved.names(_LEARNER):
            # `optimizer.exp_avg.PARAMETER`, `reference.PARAMETER`: cut as the parameter is, unless it is a count.
            own = max((own for own in parameters if name.endswith(f".{own}")), key=len, default=None)
            tensors[name] = saved.read(_LEARNER + name, None if own is None else parameters[own])
        learner.restore(tensors, saved.state["counters"])
        trainer: Mapping[str, Any] = saved.state["trainer"]
        return trainer


def export_policy(folder: Path, policy: Policy, target: Path) -> None:
    """Write the policy of a checkpoint into a folder that `load_policy` reads; in one process, without ranks.

    `policy` is loaded and adapted as the run's was, and takes the checkpoint's weights.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or of another model.
        StorageError: the disk refuses.
    """
    with _opened(folder) as saved:
        _read_parameters(saved, policy.model)
    save_policy(policy, target)


def _copied_parts(model: nn.Module, learner: Learner) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return copies of what this rank holds, and the first row that it holds of each that is shared out."""
    tensors = {_PARAMETER + name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    tensors |= {_LEARNER + name: tensor for name, tensor in learner.tensors().items()}
    parts, first_rows = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            first_rows[name] = _rows_of(tensor).start
            # A copy: on a CPU a part is a view of the live parameter.
            parts[name] = tensor.to_local().detach().to("cpu", copy=True).contiguous()
        elif dist.get_rank() == 0:  # every rank has the same
            parts[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return parts, first_rows


def _rows_of(tensor: DTensor) -> slice:
    """Return the rows of the whole tensor that this rank holds."""
    rank, num_ranks, length = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size(), tensor.shape[0]
    size = -(-length // num_ranks)  # as torch.chunk, and so fully_shard, divides
    rows = slice(min(rank * size, length), min((rank + 1) * size, length))
    assert tensor.to_local().shape[0] == rows.stop - rows.start, "fully_shard divides the first axis evenly"
    return rows


def _write(folder: Path, name: str, parts: Mapping[str, Tensor], first_rows: Mapping[str, int], state: str) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(parts), folder / name, metadata={"first_rows": json.dumps(dict(first_rows))})
        if name.startswith("rank-00000"):
            (folder / _STATE).write_text(state, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint's files (Any: safetensors and JSON are untyped).

    Attributes:
        pieces: by name, the file and the first row of each piece; None: the tensor is whole.
    """

    folder: Path
    state: Mapping[str, Any]
    pieces: Mapping[str, list[tuple[int | None, Any]]]

    def names(self, prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in self.pieces if name.startswith(prefix)]

    def read(self, name: str, like: Tensor | None) -> Tensor:
        """Return a tensor; if it was shared out and `like` is, this rank's part of it, as a DTensor.

        Raises:
            CheckpointError: it was shared out, and has another shape than `like`.
        """
        pieces = self.pieces[name]
        if pieces[0][0] is None:
            return pieces[0][1].get_tensor(name).clone()  # type: ignore[no-any-return]
        views = sorted(((first or 0, file.get_slice(name)) for first, file in pieces), key=lambda piece: piece[0])
        shape = [sum(view.get_shape()[0] for _, view in views), *views[0][1].get_shape()[1:]]
        if like is not None and shape != list(like.shape):
            raise CheckpointError(f"{self.folder}: {name}: expected {list(like.shape)}, got {shape}")
        if not isinstance(like, DTensor):
            return torch.cat([view[:] for _, view in views])
        rows = _rows_of(like)
        found = [
            view[max(rows.start - first, 0) : min(rows.stop - first, view.get_shape()[0])]
            for first, view in views
            if first < rows.stop and rows.start < first + view.get_shape()[0]
        ]
        local = torch.cat(found) if found else like.to_local().new_empty(0, *like.shape[1:])
        return DTensor.from_local(
            local.to(like.device),
            like.device_mesh,
            like.placements,
            run_check=False,  # a collective
            shape=like.shape,
            stride=like.stride(),
        )


def _collect(pieces: dict[str, list[tuple[int | None, Any]]], file: Any) -> None:
    first_rows = json.loads(file.metadata()["first_rows"])
    for name in file.keys():  # noqa: SIM118 - a file of safetensors is no mapping
        pieces.setdefault(name, []).append((first_rows.get(name), file))


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[_Saved]:
    verify(folder, required=(_STATE,))
    try:
        with contextlib.ExitStack() as stack:
            pieces: dict[str, list[tuple[int | None, Any]]] = {}
            paths = sorted(folder.glob("rank-*.safetensors"))
            for file in [stack.enter_context(safe_open(path, framework="pt")) for path in paths]:
                _collect(pieces, file)
            yield _Saved(folder, parse_own_json((folder / _STATE).read_text(encoding="utf-8")), pieces)
    except GymError:
        raise
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error


def _read_parameters(saved: _Saved, model: nn.Module) -> None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if differing := sorted(trained.keys() ^ set(saved.names(_PARAMETER))):
        raise CheckpointError(f"{saved.folder}: was saved of a model with other parameters: {differing[:3]} ...")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved.read(_PARAMETER + name, parameter))
