"""New weights as immutable folders, one a version, complete or not there; read by engines that do not share memory.

    ROOT/policy-v{N}/
        config.json, model*.safetensors, ...   all weights, transformers layout ("full"); a LoRA merged into its base
        adapter_config.json, adapter_model.safetensors     the LoRA alone, PEFT layout ("adapter")
        manifest.json                          size and SHA-256 of every file; written last

A path is never written twice: engines read lazily, and some take what they read at a path before for what is there now.
Not for resuming a run, which needs the optimizer too (`checkpoints.py`). Called by `weight_sync`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_gym.engine.base import UpdateKind, WeightUpdate
from gspo_gym.errors import ConfigError, EngineError, UsageError
from gspo_gym.models import Policy, no_progress_bars
from gspo_gym.models_adapters import ADAPTER, is_adapter
from gspo_gym.models_quantization import is_quantized

MANIFEST = "manifest.json"
_MEMORY = Path("/dev/shm")


class Staging:
    """The folders of one run; one process writes.

    Args:
        policy: whose weights are staged, as they are when `stage` is called. They are not changed.
        root: a folder of its own, as `staging_root` gives it; removed by `close`.
        keep: versions that stay: the committed one, those that rollouts may still be sampled from, and one in the
            making, hence max_staleness + 2. An older one goes one commit later, for an engine may read lazily.
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
        self._staged: dict[int, Path] = {}
        self._expired: list[int] = []
        self._used: set[Path] = set()

    @property
    def root(self) -> Path:
        return self._root

    def stage(self, version: int, kind: UpdateKind) -> WeightUpdate:
        """Write the policy's present weights; the folder is there when it is complete, or not at all.

        Raises:
            ConfigError: "adapter" of a policy without one, or "full" of quantized weights, which no merge gives back.
            UsageError: this version was staged before, or is shared.
            EngineError: the disk refuses (full, read-only).
        """
        if kind == "shared":
            raise UsageError("Staging.stage: shared weights are not staged")
        target = self._root / f"policy-v{version}"
        if target in self._used:
            raise UsageError(f"{target}: was staged before; a path is never written twice")
        draft = self._root / f".draft-{target.name}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(draft, ignore_errors=True)
            if kind == "adapter":
                self._write_adapter(draft)
            else:
                self._write_full(draft)
            files = _seal(draft, version, kind)
            draft.rename(target)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise EngineError(f"{target}: version {version} could not be staged: {error}") from error
        self._used.add(target)
        self._staged[version] = target
        return WeightUpdate(version, kind, target, files)

    def retire(self, committed: int) -> None:
        """Note that a version is committed: remove what expired at the commit before, and see what expires now."""
        for version in self._expired:
            shutil.rmtree(self._staged.pop(version), ignore_errors=True)
        others = [version for version in sorted(self._staged) if version != committed]
        self._expired = others[: max(len(others) - (self._keep - 1), 0)]

    def close(self) -> None:
        """Remove everything."""
        self._staged.clear()
        self._expired.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def _write_adapter(self, folder: Path) -> None:
        model = self._policy.model
        if not is_adapter(model):
            raise ConfigError('stage: expected a policy with a LoRA adapter for an update of kind "adapter"')
        # The vocabulary is never resized; told so, PEFT need not look the base up.
        model.save_pretrained(folder, save_embedding_layers=False, selected_adapters=[ADAPTER])

    def _write_full(self, folder: Path) -> None:
        model = self._policy.model
        if is_quantized(model):
            raise ConfigError(
                'stage: quantized weights cannot be sent whole; the engine must take an update of kind "adapter"'
            )
        base = model.get_base_model() if is_adapter(model) else model
        weights = {name: self._cast(tensor) for name, tensor in full_weights(model)}
        with no_progress_bars():
            base.save_pretrained(folder, state_dict=weights, max_shard_size=self._max_shard_size)
        self._policy.tokenizer.save_pretrained(folder)
        if self._dtype is not None:
            _say_dtype(folder / "config.json", self._dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)


def full_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights of a policy under the names of its base, each detached; a LoRA's are merged, and changed nowhere.

    Merged in the precision of the adapter (float32) and then rounded once to the base's. PEFT's own `merge_adapter`
    changes the model, and its `unmerge_adapter` does not give a 16-bit base back. (Any: models are untyped.)
    """
    if not is_adapter(model):
        yield from ((name, tensor.detach()) for name, tensor in model.state_dict().items())
        return
    base = model.get_base_model()
    deltas = dict(_deltas(base))
    for name, tensor in base.state_dict().items():
        if "lora_" in name:
            continue
        name = re.sub(r"(\.base_layer)+\.", ".", name)
        delta = deltas.pop(name, None)
        yield name, tensor.detach() if delta is None else (tensor.detach() + delta).to(tensor.dtype)
    if deltas:
        raise ConfigError(f"stage: the adapter's {sorted(deltas)[0]!r} is not among the weights of its base")


def _deltas(base: Any) -> Iterator[tuple[str, Tensor]]:
    """What the adapter adds to each matrix, by the matrix's name (Any: peft is untyped)."""
    from peft.tuners.lora import LoraLayer  # here: it takes seconds to load, and full training needs none of it

    for path, layer in base.named_modules():
        if isinstance(layer, LoraLayer) and ADAPTER in layer.r:
            name = re.sub(r"(\.base_layer)+$", "", path)
            with torch.no_grad():
                yield f"{name}.{getattr(layer, 'parameter_name', 'weight')}", layer.get_delta_weight(ADAPTER)


def staging_root(run_folder: Path, *, in_memory: bool, num_bytes: int) -> Path:
    """A fresh folder for a run's staged weights; what an earlier process of the same run left behind is removed.

    In memory if asked for, if this machine has such a file system and `num_bytes` take at most half of what is free
    there; else in the run's folder. Its name is new each time, for an engine may outlive the process that wrote.
    """
    run = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:16]
    for above, prefix in ((_MEMORY, f"gspo_gym-{run}-"), (run_folder, ".weights-")):
        for leftover in above.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    if in_memory and _MEMORY.is_dir() and 2 * num_bytes <= shutil.disk_usage(_MEMORY).free:
        return Path(tempfile.mkdtemp(prefix=f"gspo_gym-{run}-", dir=_MEMORY))
    run_folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".weights-", dir=run_folder))


def num_weight_bytes(model: Any) -> int:
    """What all weights of a model take (Any: untyped)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def tensor_digests(update: WeightUpdate) -> dict[str, str]:
    """SHA-256 of the bytes of each staged tensor, by name; an engine that says the same of its own holds just these."""
    from safetensors import safe_open

    digests = {}
    assert update.folder is not None
    for path in sorted(update.folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 not a mapping
                tensor = file.get_tensor(name).contiguous().flatten().view(torch.uint8)
                digests[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    return digests


def verify_staged(update: WeightUpdate) -> None:
    """Compare every file of a staged folder with what was written.

    Raises:
        EngineError: a file is missing or changed; names it.
    """
    assert update.folder is not None
    for name, digest in update.checksums.items():
        path = update.folder / name
        if not path.is_file() or _sha256(path) != digest:
            raise EngineError(f"{path}: is missing or was changed after it was staged")


def _seal(folder: Path, version: int, kind: UpdateKind) -> Mapping[str, str]:
    """Write the manifest and give the digest of every other file by name. Nothing is forced to the disk: what a power
    cut leaves is removed before the next process stages anything."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    digests = {name: _sha256(path) for name, path in files.items()}
    entries = {name: {"bytes": path.stat().st_size, "sha256": digests[name]} for name, path in files.items()}
    manifest = {"schema": 1, "version": version, "kind": kind, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return digests


def _say_dtype(path: Path, dtype: torch.dtype) -> None:
    """Make a config say in which precision the weights beside it are."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
