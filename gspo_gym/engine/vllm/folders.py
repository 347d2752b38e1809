"""What must be there before vLLM is told to read weights or is handed them: it would take less without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gspo_gym.errors import EngineError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def weights_folder(folder: Path, model_folder: Path | None) -> Path:
    """The absolute path of a staged model with exactly the tensors of the model that is served.

    A reload keeps the old values of tensors that it does not find, and takes a path without a folder for the name of a
    repository. `model_folder` is the served model's, None if it is not known: then only that there are weights is seen.

    Raises:
        EngineError: names what is missing, unknown or of another shape.
    """
    staged = folder.resolve()
    found = _shapes(staged)
    if not found:
        raise EngineError(f"expected weights (*.safetensors) in {staged}, got none")
    require_tensors(found, model_folder, where=str(staged))
    return staged


def require_tensors(shapes: Mapping[str, tuple[int, ...]], model_folder: Path | None, *, where: str) -> None:
    """Refuse weights that are not exactly the tensors of the model that is served, as far as that is known.

    Raises:
        EngineError: names where they are, and what is missing, unknown or of another shape.
    """
    expected = _shapes(model_folder) if model_folder is not None else shapes
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        raise EngineError(
            f"{where}: expected the {len(expected)} tensors of {model_folder}; {len(wrong)} are missing, unknown or of "
            f"another shape, such as {wrong[0]}: expected {expected.get(wrong[0])}, got {shapes.get(wrong[0])}"
        )


def adapter_folder(folder: Path) -> Path:
    """The absolute path of a staged adapter (PEFT layout).

    Raises:
        EngineError: there is none.
    """
    staged = folder.resolve()
    missing = [name for name in ADAPTER_FILES if not (staged / name).is_file()]
    if missing:
        raise EngineError(f"expected an adapter (PEFT layout) in {staged}, got no {missing[0]}")
    return staged


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
