"""The manifest of a checkpoint: where it comes from, the sizes and digests of its files, and which are kept.

Written last: a folder with a manifest is complete. Every byte of a checkpoint is covered, the manifest's own too. Its
origin names the run and parent, and the configuration, packages and revision that made it. Light: reading a
configuration loads this file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Never

from pydantic import Field

from gspo_gym.base.files import replace_file, sync_tree
from gspo_gym.base.settings import Settings
from gspo_gym.errors import CheckpointError

_PACKAGES = ("gspo-gym", "torch", "transformers", "peft", "safetensors", "numpy", "bitsandbytes", "vllm")
MANIFEST = "manifest.json"
_SCHEMA_VERSION = 2  # 1 names no more of its origin than the run, and has no digest of itself
_MAX_BYTES = 64_000_000  # of a manifest: a hundred thousand files
_STEP_FOLDER = re.compile(r"step_(\d+)")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from.

    Attributes:
        run: the id of its run; None: it was saved without one.
        parent: {"run": id, "step": int} of the checkpoint that the run began from; None: it continues no other run.
        config: SHA-256 of the run's resolved configuration; None: not known.
        packages: versions by name.
        git: the revision of the checkout that saved it, ending in "-dirty" if that was changed; None: it was none.
    """

    run: str | None = None
    parent: Mapping[str, Any] | None = None
    config: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    git: str | None = None

    @classmethod
    def of_this_process(cls, config_toml: str, *, parent: Mapping[str, Any] | None = None) -> Origin:
        """Return what this process says of itself in the checkpoints of a run with this resolved configuration."""
        return cls(
            parent=parent,
            config=hashlib.sha256(config_toml.encode()).hexdigest(),
            packages={"python": platform.python_version(), **_versions()},
            git=git_revision(Path(__file__).parents[2]),
        )


def git_revision(folder: Path) -> str | None:
    """Return the revision of a checkout, ending in "-dirty" if it was changed; None for another folder, or no git."""
    if not (folder / ".git").exists():  # of a checkout around the folder, such as one with a .venv, nothing follows
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        step: after which it was saved.
        origin: where it comes from.
        files: {"bytes": int, "sha256": str} by path in the folder (Any: JSON).
        evaluation: the numbers of the step's evaluation; None: it has none.
    """

    step: int
    origin: Origin
    files: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None = None

    @property
    def run(self) -> str | None:
        """The id of its run; None: it was saved without one."""
        return self.origin.run


def seal(folder: Path, *, step: int, origin: Origin, evaluation: Mapping[str, Any] | None = None) -> None:
    """Force everything in the folder to the disk, and only then write the manifest that calls it complete."""
    sync_tree(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files
    }
    values = {
        "schema": _SCHEMA_VERSION,
        "step": step,
        **asdict(origin),
        "evaluation": None if evaluation is None else dict(evaluation),
        "files": entries,
    }
    replace_file(folder / MANIFEST, json.dumps({**values, "digest": _digest(values)}, indent=2) + "\n")


def verify(folder: Path, *, required: Collection[str] = ()) -> Manifest:
    """Compare a checkpoint's folder with its manifest: its step, the same files, byte for byte, no other, and no link.

    `required` are files that it must list.

    Raises:
        CheckpointError: the manifest is missing or unreadable, or a file is missing, not listed, cut or changed, or a
            pickle; names the file. Or the folder's name is another step's.
    """
    manifest = read_manifest(folder)
    require_own_name(folder, manifest)
    for name in sorted(set(required) - set(manifest.files)):
        raise CheckpointError(f"{folder / MANIFEST}: does not list {name}, which every checkpoint has")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link; a checkpoint has none")
        if not path.is_dir() and name not in manifest.files and name != MANIFEST:
            raise CheckpointError(f"{path}: does not belong to the checkpoint: {MANIFEST} does not list it; remove it")
    for name, entry in manifest.files.items():
        if name.lower().endswith(_PICKLES):
            raise CheckpointError(f"{folder / name}: may be a pickle, which runs code when it is read")
        _verify_file(folder / name, entry)
    return manifest


def require_own_name(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that is named after another step than its checkpoint was saved after; other names are free.

    Raises:
        CheckpointError: the folder was renamed.
    """
    if step_of(folder) not in (None, manifest.step):
        raise CheckpointError(
            f"{folder}: was saved after step {manifest.step}, as its manifest says; the folder was renamed"
        )


def is_complete(folder: Path) -> bool:
    """Return whether all files are there in full size: a crash can spoil nothing else."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except OSError:  # CheckpointError included
        return False


def step_of(folder: Path) -> int | None:
    """Return the step that a checkpoint's folder is named after; None for another name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return None if match is None else int(match[1])


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint's manifest says.

    Raises:
        CheckpointError: it is missing or damaged, or lists a file outside the folder.
    """
    path = folder / MANIFEST
    if not path.is_file():  # nor is it a pipe, on which reading would wait for ever
        raise CheckpointError(f"{path}: is missing; the checkpoint is not complete")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES} bytes, got {path.stat().st_size}")
        text = path.read_text(encoding="utf-8")
        values = parse_own_json(text.removesuffix("\n"))
        if values["schema"] not in (1, _SCHEMA_VERSION):
            raise CheckpointError(f"{path}: expected schema 1 or {_SCHEMA_VERSION}, got {values['schema']!r}")
        if not text.endswith("\n"):
            raise ValueError("its last line is cut")
        if values["schema"] > 1 and values.pop("digest") != _digest(values):
            raise ValueError("its contents were changed")
        return _manifest_of(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def parse_own_json(text: str) -> Any:
    """Return the values of JSON that was written with an indent of 2 and not changed since.

    Raises:
        ValueError: it is not JSON, or reads like one and was written differently: a key twice, a NaN, a number beyond
            float64.
        RecursionError: it is nested too deeply.
    """
    values = json.loads(text, parse_constant=_refuse_constant)
    if json.dumps(values, indent=2) != text:
        raise ValueError("it is not as it was written")
    return values


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number")


def _manifest_of(values: Mapping[str, Any]) -> Manifest:
    """Return what the values of a manifest say.

    Raises:
        CheckpointError: a file is listed that is none of the folder's.
        ValueError, TypeError, KeyError, AttributeError: they are no manifest's.
    """
    files = values["files"]
    for name, entry in files.items():
        path = PurePosixPath(name)
        if not path.parts or ".." in path.parts or path.is_absolute() or str(path) != name or not name.isprintable():
            raise CheckpointError(f"lists {name!r}, which is not a file of the checkpoint's folder")
        if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise ValueError(f"of {name}: expected its bytes and its SHA-256, got {entry!r}")
    if type(values["step"]) is not int or values["step"] < 0:
        raise ValueError(f"step: expected an integer >= 0, got {values['step']!r}")
    evaluation = values.get("evaluation")
    if evaluation is not None and not all(
        isinstance(number, int | float | str | None) for number in evaluation.values()
    ):
        raise ValueError(f"evaluation: expected numbers, got {evaluation!r}")
    origin = Origin(
        run=values.get("run"),
        parent=values.get("parent"),
        config=values.get("config"),
        packages=values.get("packages", {}),
        git=values.get("git"),
    )
    return Manifest(values["step"], origin, files, evaluation)


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing; the checkpoint is not complete")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{path}: expected {entry['bytes']} bytes, got {size}")
    digest = sha256_of(path)
    if digest != entry["sha256"]:
        raise CheckpointError(f"{path}: is damaged: expected SHA-256 {entry['sha256']}, got {digest}")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the digest of a file's content, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Numbers of an evaluation by name, and under "score" the name of the one that counts; JSON, hence Any.
Numbers = Mapping[str, Any]
EVALUATION_NUMBERS = ("score", "success_rate", "mean_return", "mean_env_return")


class RetentionSettings(Settings):
    """The keys of [training] that say which checkpoints stay on the disk."""

    keep_last: int = Field(default=2, gt=0, description="newest checkpoints that are kept")
    keep_best: int = Field(
        default=1,
        ge=0,
        description="checkpoints with the best evaluations that are kept besides, of those whose step was evaluated",
    )

    def kept(self, evaluations: Mapping[int, Numbers | None]) -> set[int]:
        """Return the steps whose checkpoints stay, given the evaluation of each step, None where there is none.

        >>> scores = {2: {"score": "success_rate", "success_rate": 0.9}, 4: None, 8: {"score": "success_rate"}}
        >>> sorted(RetentionSettings(keep_last=1).kept(scores))
        [2, 8]
        """
        steps = sorted(evaluations)
        return {*steps[-self.keep_last :], *self.best(evaluations)[: self.keep_best]}

    def best(self, evaluations: Mapping[int, Numbers | None]) -> list[int]:
        """Return the steps that have the metric, the best first; of equal ones the earlier."""
        numbers_by_step = {step: numbers for step, numbers in sorted(evaluations.items()) if numbers is not None}
        # What a run's scores are may be decided by a later evaluation than its first.
        metric = next((numbers["score"] for numbers in reversed(numbers_by_step.values())), "score")
        value_by_step = {step: numbers.get(metric) for step, numbers in numbers_by_step.items()}
        if metric == "success_rate":
            # Undecided episodes are no successes.
            value_by_step = {step: value or 0.0 for step, value in value_by_step.items()}
        ranking = sorted((-value, step) for step, value in value_by_step.items() if value is not None)
        return [step for _, step in ranking]


def weights_digest(folder: Path) -> str | None:
    """Return the SHA-256 of a model's weights: of its one file, or of the sorted list of several with their digests.

    A checkpoint's are those of its manifest, without the optimizer's state. None: the folder holds no safetensors.
    """
    if (folder / MANIFEST).is_file():
        digests = {name: entry["sha256"] for name, entry in read_manifest(folder).files.items() if _is_weights(name)}
    else:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
        digests = {name: sha256_of(folder / name) for name in names if _is_weights(name)}
    if len(digests) < 2:
        return next(iter(digests.values()), None)
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith("resume/")
