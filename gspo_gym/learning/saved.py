"""A learner's tensors in files: whole, or each rank's part of them. Any number of processes goes on from either.

    FOLDER/learner.safetensors                  of a learner in one process
    FOLDER/learner-00000-of-00002.safetensors   of ranks, one file each: their rows of the tensors that they share;
                                                what each rank holds whole is in the first one's

Each process reads the rows that it will hold, from whichever files have them. These are not torch's distributed
checkpoints, of which the default kind has a pickle, and the other meets other ranks in the thread that writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gspo_gym.base.files import sync, writing
from gspo_gym.errors import CheckpointError

_WHOLE = "learner.safetensors"
_PART = re.compile(r"learner-\d{5}-of-(\d{5})\.safetensors")
_FIRST_ROWS = "first_rows"  # of a part's metadata: the number of its first row, by name of the tensor
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}
# What a file that was made to look like a checkpoint's can raise in those that read it.
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    MemoryError,
    SafetensorError,
)


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the processor's memory. Two names of one tensor (tied weights) share a copy."""
    copies: dict[tuple[object, ...], Tensor] = {}
    copy_by_name = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr() or name, tensor.shape, tensor.stride(), tensor.dtype)
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        copy_by_name[name] = copies[place]
    return copy_by_name


def copy_state(tensors: Mapping[str, Tensor], *, rank: int = 0, num_ranks: int = 1) -> Callable[[Path], None]:
    """Copy tensors, of several ranks this one's part, and return what writes the copy into a folder, in any thread.

    That raises a StorageError where the disk refuses; it returns when the file is on the disk.
    """
    dtensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    own = {name: tensor for name, tensor in tensors.items() if name not in dtensors} if rank == 0 else {}
    first_rows = {name: rows_of(tensor).start for name, tensor in dtensors.items()}
    # A copy: on a CPU a part is a view of the live tensor.
    copies = copy_tensors({**own, **{name: tensor.to_local() for name, tensor in dtensors.items()}})
    file = _WHOLE if num_ranks == 1 else _part_file(rank, num_ranks)
    metadata = {} if num_ranks == 1 else {_FIRST_ROWS: json.dumps(first_rows)}
    return lambda folder: _write(folder / file, copies, metadata)


def rows_of(tensor: DTensor) -> slice:
    """Return the rows of the whole tensor that this rank holds."""
    rank, num_ranks, length = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size(), tensor.shape[0]
    size = -(-length // num_ranks)  # as torch.chunk, and so fully_shard, divides
    rows = slice(min(rank * size, length), min((rank + 1) * size, length))
    assert tensor.to_local().shape[0] == rows.stop - rows.start, "fully_shard divides the first axis evenly"
    return rows


def state_files(folder: Path) -> list[str]:
    """Return the names of the files that a learner's tensors in this folder must be in, whether or not they are."""
    parts = [match for path in folder.glob("learner-*") if (match := _PART.fullmatch(path.name))]
    if not parts or (folder / _WHOLE).exists():
        return [_WHOLE]
    num_ranks = max(int(match[1]) for match in parts)
    return [_part_file(rank, num_ranks) for rank in range(num_ranks)]


def _part_file(rank: int, num_ranks: int) -> str:
    return f"learner-{rank:05d}-of-{num_ranks:05d}.safetensors"


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    # Not by safetensors, which makes bytes of all tensors first: as much memory again, and meanwhile no other thread
    # runs, not even the one that gives signs of life. Wide numbers come first, so that all are aligned.
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, names = 0, sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor, begin = tensors[name], offset
        offset += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, offset],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with writing(path):
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in (tensors[name] for name in names if tensors[name].numel()):
                content: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # Any: no buffer, by numpy's types
                file.write(content)
        sync(path)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a tensor in a file.

    Attributes:
        offset: of its first byte in the file.
        first_row: its number in the whole tensor; None: the piece is the whole tensor.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int | None

    @property
    def begin(self) -> int:
        return self.first_row or 0

    @property
    def end(self) -> int:
        return self.begin + (self.shape[0] if self.shape else 1)

    def read(self, first: int, end: int) -> Tensor:
        """Return the rows `first` to `end`, counted in the whole tensor; a tensor without axes has one row."""
        shape = (end - first, *self.shape[1:]) if self.shape else ()
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        content = bytearray((end - first) * row)
        with self.path.open("rb") as file:
            file.seek(self.offset + (first - self.begin) * row)
            if file.readinto(content) != len(content):
                raise CheckpointError(f"{self.path}: is cut")
        if not content:
            return torch.empty(shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype).reshape(shape)


class SavedTensors(Mapping[str, Tensor]):
    """Tensors in files, on the CPU. Each is read when it is asked for; no file stays open.

    Attributes:
        folder: of the files.
    """

    def __init__(self, folder: Path, paths: Iterable[Path]) -> None:
        """Read the files' headers.

        Raises:
            CheckpointError: a file is missing or damaged, or rows of a tensor are missing or there twice.
        """
        self.folder = folder
        self._pieces: dict[str, list[_Piece]] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt"):  # which verifies the header
                    pass
                for name, piece in _read_header(path):
                    self._pieces.setdefault(name, []).append(piece)
            except UNREADABLE as error:
                raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: (piece.begin, piece.end))
            _require_whole(name, pieces)

    @classmethod
    def of_learner(cls, folder: Path) -> SavedTensors:
        """Return the tensors of a learner that were saved into a folder, by one process or several.

        Raises:
            CheckpointError: as above.
        """
        return cls(folder, [folder / name for name in state_files(folder)])

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole tensor, a copy.

        Raises:
            KeyError: there is none of this name. CheckpointError: its file is gone.
        """
        return self.rows(name, slice(0, self._pieces[name][-1].end))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        pieces = self._pieces[name]
        return (pieces[-1].end, *pieces[0].shape[1:]) if pieces[0].shape else ()

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a tensor, a copy; of one without axes, all of it.

        Raises:
            CheckpointError: a file is gone.
        """
        pieces = self._pieces[name]
        try:
            tensors = [
                piece.read(max(rows.start, piece.begin), min(rows.stop, piece.end))
                for piece in pieces
                if piece.begin < rows.stop and rows.start < piece.end
            ]
        except OSError as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {error}") from error
        if not tensors:
            return torch.empty((0, *pieces[0].shape[1:]), dtype=pieces[0].dtype)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def part_of(self, name: str, like: DTensor) -> DTensor:
        """Return this rank's part of a tensor, which is shared out as `like` is.

        Raises:
            CheckpointError: it has another shape than `like`, or a file is gone.
        """
        if self.shape(name) != tuple(like.shape):
            raise CheckpointError(f"{self.folder}: {name}: expected {list(like.shape)}, got {list(self.shape(name))}")
        return DTensor.from_local(
            self.rows(name, rows_of(like)).to(like.device),
            like.device_mesh,
            like.placements,
            run_check=False,  # a collective
            shape=like.shape,
            stride=like.stride(),
        )


class PartsOfTensors(Mapping[str, Tensor]):
    """Saved tensors of a learner as a rank takes them: of those that its model shares out, its part.

    They are named after parameters, such as `optimizer.exp_avg.PARAMETER`, and cut as these are; counts are not.
    """

    def __init__(self, saved: SavedTensors, model: nn.Module) -> None:
        self._saved_tensors, self._parameters = saved, dict[str, Tensor](model.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        rest = name
        while rest not in self._parameters and rest:
            rest = rest.partition(".")[2]
        like: Tensor | None = self._parameters.get(rest)
        if isinstance(like, DTensor) and self._saved_tensors.shape(name):
            return self._saved_tensors.part_of(name, like)
        return self._saved_tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved_tensors)

    def __len__(self) -> int:
        return len(self._saved_tensors)


def _read_header(path: Path) -> Iterator[tuple[str, _Piece]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    first_rows = json.loads(metadata.get(_FIRST_ROWS, "{}"))
    for name, entry in header.items():
        shape, first = tuple(entry["shape"]), first_rows.get(name)
        if first is not None and (type(first) is not int or first < 0 or not shape):
            raise ValueError(f"{name}: expected the number of its first row, got {first!r}")
        yield name, _Piece(path, 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]], shape, first)


def _require_whole(name: str, pieces: Sequence[_Piece]) -> None:
    """Raise a CheckpointError for pieces that are not one tensor."""
    first = pieces[0]
    if len(pieces) == 1 and first.first_row is None:
        return
    end = 0
    for piece in pieces:
        if piece.first_row != end or (piece.dtype, piece.shape[1:]) != (first.dtype, first.shape[1:]):
            raise CheckpointError(
                f"{piece.path}: {name}: expected rows from {end} on, as {first.dtype} and {list(first.shape[1:])}, got "
                f"row {piece.first_row} on, {piece.dtype} and {list(piece.shape[1:])}"
            )
        end = piece.end
