"""New weights for engines that do not share memory: immutable folders, one a version, or tensors handed over.

    ROOT/policy-v{N}/
        config.json, model*.safetensors, ...   all weights, transformers layout ("full"); a LoRA merged into its base
        adapter_config.json, adapter_model.safetensors     the LoRA alone, PEFT layout ("adapter")
        manifest.json                          size and SHA-256 of every file; written last

A path is never written twice: engines read lazily, and some reuse what they read at a path before. A folder is complete
or not there. Not for resuming a run, which needs the optimizer too (`checkpoints.py`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from gspo_gym.base.files import writing
from gspo_gym.base.leftovers import remove_folder, temporary_folder
from gspo_gym.engine.base import TensorMeta, TensorSource, UpdateKind, WeightUpdate, tensor_digest
from gspo_gym.errors import ConfigError, EngineError, StorageError, UsageError
from gspo_gym.policy.load import Policy, no_progress_bars
from gspo_gym.policy.lora import ADAPTER, is_adapter, require_deltas
from gspo_gym.policy.manifest import sha256_of
from gspo_gym.policy.quantization import is_quantized

MANIFEST = "manifest.json"
_MEMORY = Path("/dev/shm")


class Staging:
    """The folders of one run; one process writes.

    Args:
        policy: its weights are staged as they are when `stage` is called, and not changed.
        root: an empty folder, as `staging_root` gives it; removed by `close`.
        keep: versions that stay: the committed one, those that rollouts may still be sampled from, and one in the
            making, hence max_staleness + 2. An older one goes one commit later, because an engine may read lazily.
        dtype: "float32", "bfloat16" or "float16", the engine's; None writes weights as they are.
        max_shard_size: of a file of weights, as transformers writes it.
    """

    def __init__(
        self, policy: Policy, root: Path, *, keep: int = 2, dtype: str | None = None, max_shard_size: str = "5GB"
    ) -> None:
        if keep < 2:
            raise ConfigError(f"Staging.keep: expected at least 2 (the committed version and the next), got {keep}")
        self._policy = policy
        self._root = root
        self._keep = keep
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._max_shard_size = max_shard_size
        self._folder_by_version: dict[int, Path] = {}
        self._expired_versions: list[int] = []
        self._used_paths: set[Path] = set()

    @property
    def root(self) -> Path:
        return self._root

    def stage(self, version: int, kind: UpdateKind) -> WeightUpdate:
        """Write the policy's present weights; the folder is there when it is complete, or not at all.

        Raises:
            ConfigError: "adapter" of a policy without one, or "full" of quantized weights, which no merge gives back.
            UsageError: this version was staged before, or is not for a folder.
            EngineError: the disk refuses (full, read-only).
        """
        if kind not in ("full", "adapter"):
            raise UsageError(f"Staging.stage: weights of kind {kind!r} are not written into folders")
        target = self._root / f"policy-v{version}"
        if target in self._used_paths:
            raise UsageError(f"{target}: was staged before; a path is never written twice")
        draft = self._root / f".draft-{target.name}"
        try:
            with writing(target):
                self._root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(draft, ignore_errors=True)
                if kind == "adapter":
                    self._write_adapter(draft)
                else:
                    self._write_full(draft)
                files = _seal(draft, version, kind)
                draft.rename(target)
        except StorageError as error:
            shutil.rmtree(draft, ignore_errors=True)
            reason = str(error).removeprefix(f"{target}: cannot be written: ")
            raise EngineError(f"{target}: version {version} could not be staged: {reason}") from error
        self._used_paths.add(target)
        self._folder_by_version[version] = target
        return WeightUpdate(version, kind, target, files)

    def retire(self, committed: int) -> None:
        """Note that a version is committed: remove what expired at the commit before, and see what expires now."""
        for version in self._expired_versions:
            shutil.rmtree(self._folder_by_version.pop(version), ignore_errors=True)
        other_versions = [version for version in sorted(self._folder_by_version) if version != committed]
        self._expired_versions = other_versions[: max(len(other_versions) - (self._keep - 1), 0)]

    def close(self) -> None:
        """Remove everything."""
        remove_folder(self._root)

    def _write_adapter(self, folder: Path) -> None:
        model = self._policy.model
        if not is_adapter(model):
            raise ConfigError('stage: expected a policy with a LoRA adapter for an update of kind "adapter"')
        # The vocabulary is never resized; told so, PEFT need not look the base up.
        model.save_pretrained(folder, save_embedding_layers=False, selected_adapters=[ADAPTER])

    def _write_full(self, folder: Path) -> None:
        _require_whole(self._policy.model)
        write_full(self._policy, folder, dtype=self._dtype, max_shard_size=self._max_shard_size)


def write_full(policy: Policy, folder: Path, *, dtype: torch.dtype | None, max_shard_size: str = "5GB") -> None:
    """Write all weights of a policy in transformers layout; a LoRA is merged into copies.

    Quantized layers must have been replaced (`load.dequantize`); `dtype` None writes weights as they are.
    """
    model = policy.model
    base = model.get_base_model() if is_adapter(model) else model
    once = frozenset(_names_once(model))  # tied weights that are cast are no longer seen to be one
    weights = {name: _cast(tensor, dtype) for name, tensor in full_weights(model) if name in once}
    if is_quantized(model):  # transformers would write how it was quantized, too
        config = copy.deepcopy(base.config)
        del config.quantization_config
        with torch.device("meta"):
            base = type(base)(config)
    with no_progress_bars():
        base.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
    policy.tokenizer.save_pretrained(folder)
    if dtype is not None:
        _say_dtype(folder / "config.json", dtype)


class Handover:
    """The same interface for engines that take tensors from memory: nothing is written, nothing is kept.

    Args:
        policy: as `Staging`'s. An update has the weights of the time when it was made, and cannot be repeated when
            they have changed.
        dtype: as `Staging`'s.
        trained_only: for engines that have the rest; the weights are neither merged nor cast.
    """

    def __init__(self, policy: Policy, *, dtype: str | None = None, trained_only: bool = False) -> None:
        self._policy = policy
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._trained_only = trained_only

    def stage(self, version: int, kind: UpdateKind) -> WeightUpdate:
        """Return an update with the policy's present weights, read whenever it is iterated.

        Raises:
            ConfigError: quantized weights, which no merge gives back.
            UsageError: any other kind than "transfer".
        """
        if kind != "transfer":
            raise UsageError(f"Handover.stage: weights of kind {kind!r} are not handed over")
        tensors: TensorSource
        if self._trained_only:
            tensors = TrainedTensors(self._policy.model)
        else:
            _require_whole(self._policy.model)
            tensors = PolicyTensors(self._policy.model, self._dtype)
        return WeightUpdate(version, kind, tensors=tensors)

    def retire(self, committed: int) -> None:
        """Do nothing: nothing was kept."""

    def close(self) -> None:
        """Do nothing: nothing was written."""


class PolicyTensors:
    """The tensors that `Staging` would write, as a `TensorSource`: merged, cast, tied weights once, named as in files.

    Tensors that are neither merged nor cast are not copied. Where transformers holds tensors that the files have in
    parts (experts), those parts are made at once and not one after another.

    Args:
        model: a policy's (Any: untyped). Iterating refuses, at its begin and its end, if its weights are others now.
        dtype: of tensors of floating point; None leaves them as they are.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        self._model = model
        self._base = model.get_base_model() if is_adapter(model) else model
        self._dtype = dtype
        self._fingerprint = _fingerprint(model.parameters())
        self._names = frozenset(_names_once(model))
        plain = {
            name: torch.empty_like(tensor, device="meta", dtype=_cast_dtype(tensor, dtype))
            for name, tensor in _base_weights(model)
            if name in self._names
        }
        saved_tensors = revert_weight_conversion(self._base, plain)
        self._is_split = saved_tensors is not plain
        self._metadata = tuple(
            TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in saved_tensors.items()
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def metadata(self) -> Sequence[TensorMeta]:
        """Describe the tensors, in the order of iteration."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._require_unchanged()
        pairs = (
            (name, _cast(tensor, self._dtype)) for name, tensor in full_weights(self._model) if name in self._names
        )
        yield from revert_weight_conversion(self._base, dict(pairs)).items() if self._is_split else pairs
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        _require_same(_fingerprint(self._model.parameters()), self._fingerprint)


class TrainedTensors:
    """The trained tensors of a policy as a `TensorSource`, under their names in the model, and not copied.

    A replica that has the rest of the same model samples as one on the learner's own would: an adapter is not merged.
    Iterating refuses as `PolicyTensors` does.
    """

    def __init__(self, model: Any) -> None:  # Any: untyped
        self._model = model
        self._fingerprint = self._present()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def metadata(self) -> Sequence[TensorMeta]:
        """Describe the tensors, in the order of iteration."""
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._trained_tensors()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        _require_same(self._present(), self._fingerprint)
        yield from self._trained_tensors()
        _require_same(self._present(), self._fingerprint)

    def _trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.detach()) for name, p in self._model.named_parameters() if p.requires_grad)

    def _present(self) -> list[int]:
        return _fingerprint(tensor for _, tensor in self._trained_tensors())


def _require_same(fingerprint: Sequence[int], expected: Sequence[int]) -> None:
    if fingerprint != expected:
        raise EngineError(
            "the policy's weights were changed since this version of them was to be sent: they can only be sent as a "
            "new version"
        )


def full_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of a policy under the names of its base, detached; a LoRA is merged into copies (Any: untyped).

    Merged in the precision of the adapter (float32) and then rounded once to the base's, one at a time.
    """
    # Not PEFT's `merge_adapter`, which changes the model: `unmerge_adapter` does not give a 16-bit base back.
    deltas = dict(_deltas(model.get_base_model())) if is_adapter(model) else {}
    for name, tensor in _base_weights(model):
        if (delta := deltas.pop(name, None)) is None:
            yield name, tensor
        else:
            with torch.no_grad():
                merged_tensor = (tensor + delta()).to(tensor.dtype)
            yield name, merged_tensor
    if deltas:
        raise ConfigError(f"stage: the adapter's {sorted(deltas)[0]!r} is not among the weights of its base")


def _base_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    # Under the names that they have without an adapter.
    if not is_adapter(model):
        yield from ((name, tensor.detach()) for name, tensor in model.state_dict().items())
        return
    for name, tensor in model.get_base_model().state_dict().items():
        if "lora_" not in name:
            yield re.sub(r"(\.base_layer)+\.", ".", name), tensor.detach()


def _deltas(base: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    from peft.tuners.lora import LoraLayer  # here: it takes seconds to load, and full training needs none of it

    for path, layer in base.named_modules():
        if isinstance(layer, LoraLayer) and ADAPTER in layer.r:
            name = re.sub(r"(\.base_layer)+$", "", path)
            yield f"{name}.{getattr(layer, 'parameter_name', 'weight')}", partial(layer.get_delta_weight, ADAPTER)


def _names_once(model: Any) -> Iterator[str]:
    # One name for tied weights, such as head and embeddings. In the model's order embeddings come first: transformers
    # and vLLM expect this name of tied weights.
    seen_places = set()
    for name, tensor in _base_weights(model):
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in seen_places:
            yield name
        seen_places.add(place)


def _fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    # The sum of the bits as 64-bit words: other values would change it.
    # Reading all weights costs little beside sending them; torch's count of writes misses fused optimizers.
    return [int(total) for total in torch.stack([_sum_of_bits(tensor) for tensor in tensors]).tolist()]


def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().flatten()
    in_words = (flat.numel() * flat.element_size()) % 8 == (flat.storage_offset() * flat.element_size()) % 8 == 0
    return flat.view(torch.int64 if in_words else torch.uint8).sum()


def _require_whole(model: Any) -> None:
    if is_quantized(model):
        raise ConfigError(
            'stage: quantized weights cannot be sent whole; the engine must take an update of kind "adapter"'
        )
    if is_adapter(model):
        require_deltas(model)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(_cast_dtype(tensor, dtype))


def _cast_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def staging_root(run_folder: Path, *, in_memory: bool, num_bytes: int) -> Path:
    """Make a fresh folder for a run's staged weights; remove those of earlier processes of the same run.

    In memory if asked for, if this machine has such a file system and `num_bytes` take at most half of the free space
    there; else in the run's folder.
    """
    run = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()
    # In both places, because the setting may have changed between two starts.
    for above, prefix in ((_MEMORY, f"gspo_gym-{run}-"), (run_folder, ".weights-")):
        for leftover in above.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    if in_memory and _MEMORY.is_dir() and 2 * num_bytes <= shutil.disk_usage(_MEMORY).free:
        # A new name each time: an engine may outlive the process that wrote, and read again.
        return Path(temporary_folder(f"gspo_gym-{run}-", _MEMORY))
    run_folder.mkdir(parents=True, exist_ok=True)
    return Path(temporary_folder(".weights-", run_folder))


def num_weight_bytes(model: Any) -> int:
    """Return the bytes of all weights of a model (Any: untyped)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def tensor_digests(update: WeightUpdate) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each tensor, by name; equal digests of an engine prove equal tensors."""
    tensors = _staged_tensors(update.folder) if update.tensors is None else update.tensors
    return {name: tensor_digest(tensor) for name, tensor in tensors}


def verify_staged(update: WeightUpdate) -> None:
    """Compare every file of a staged folder, if the weights are in one, with what was written.

    Raises:
        EngineError: a file is missing or changed; names it.
    """
    for name, digest in update.checksums.items():
        assert update.folder is not None
        path = update.folder / name
        if not path.is_file() or sha256_of(path) != digest:
            raise EngineError(f"{path}: is missing or was changed after it was staged")


def _staged_tensors(folder: Path | None) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    assert folder is not None
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 not a mapping
                yield name, file.get_tensor(name)


def _seal(folder: Path, version: int, kind: UpdateKind) -> Mapping[str, str]:
    # Nothing is forced to the disk: what a power cut leaves is removed before the next process stages anything.
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    digests = {name: sha256_of(path) for name, path in files.items()}
    entries = {name: {"bytes": path.stat().st_size, "sha256": digests[name]} for name, path in files.items()}
    manifest = {"schema": 1, "version": version, "kind": kind, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return digests


def _say_dtype(path: Path, dtype: torch.dtype) -> None:
    # The config speaks of the weights as they are here, and these were cast.
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config), encoding="utf-8")
