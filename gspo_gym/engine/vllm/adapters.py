"""The LoRA adapters that vLLM holds by version, and checks of staged weights before vLLM reads them.

vLLM would take too few tensors silently. An adapter is immutable: every version has a separate name, number and folder,
because vLLM caches by name and path, and re-reads an adapter that is loaded "in place" at every step. Calls in flight
keep the version that they began with; a version is removed when the last of them has ended and it is no longer current.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.vllm.commands import commanding
from gspo_gym.errors import EngineError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Adapters:
    """The loaded adapters by version, with the number of calls that use each.

    Attributes:
        current: vLLM's `LoRARequest` of the version that new calls use; None is the base model.
    """

    def __init__(self, llm: Any) -> None:
        """`llm` is vLLM's `AsyncLLM` (Any: untyped)."""
        self.current: Any = None
        self._llm = llm
        self._loaded: list[Any] = []
        self._in_flight: Counter[int] = Counter()
        self._next_id = 1

    async def load(self, update: WeightUpdate) -> None:
        """Load an adapter and use it for new calls.

        Raises:
            EngineError: there is no adapter in the folder, or vLLM refused it.
        """
        assert update.folder is not None
        folder = adapter_folder(update.folder)
        # Imported when it is used: vLLM takes seconds to load.
        from vllm.lora.request import LoRARequest

        # A fresh number even if a version is published twice: vLLM takes equal numbers for equal adapters.
        request = LoRARequest(f"policy-v{update.version}-{self._next_id}", self._next_id, str(folder))
        self._next_id += 1
        if not await self._llm.add_lora(request):
            raise EngineError(f"vLLM did not load the adapter of version {update.version} from {folder}")
        self._loaded.append(request)
        self.current = request
        await self._remove_unused()

    def begin(self) -> Any:
        """Return the adapter of a call that begins now."""
        if self.current is not None:
            self._in_flight[self.current.lora_int_id] += 1
        return self.current

    async def end(self, adapter: Any) -> None:
        """Count the end of a call that began with this adapter."""
        if adapter is None:
            return
        self._in_flight[adapter.lora_int_id] -= 1
        if adapter is not self.current:
            await self._remove_unused()

    async def _remove_unused(self) -> None:
        adapters = self._loaded
        unused = [one for one in adapters if one is not self.current and not self._in_flight[one.lora_int_id]]
        self._loaded = [one for one in adapters if one not in unused]
        for request in unused:
            del self._in_flight[request.lora_int_id]
        async with commanding(self._llm, "remove_lora"):
            for request in unused:
                await self._llm.remove_lora(request.lora_int_id)


def weights_folder(folder: Path, model_folder: Path | None) -> Path:
    """Return the absolute path of a staged model that has exactly the tensors of the served model.

    A reload keeps the old values of tensors that it does not find, and takes a path without a folder for the name of a
    repository. `model_folder` is the served model's; None if it is not known: then any weights are accepted.

    Raises:
        EngineError: names the tensors that are missing, unknown or of another shape.
    """
    path = folder.resolve()
    shapes = _shapes(path)
    if not shapes:
        raise EngineError(f"expected weights (*.safetensors) in {path}, got none")
    require_tensors(shapes, model_folder, where=str(path))
    return path


def require_tensors(shapes: Mapping[str, tuple[int, ...]], model_folder: Path | None, *, where: str) -> None:
    """Refuse weights that are not exactly the tensors of the served model, as far as that is known.

    Raises:
        EngineError: names their place, and the tensors that are missing, unknown or of another shape.
    """
    # Without a folder nothing is known to compare with.
    expected = _shapes(model_folder) if model_folder is not None else shapes
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        raise EngineError(
            f"{where}: expected the {len(expected)} tensors of {model_folder}; {len(wrong)} are missing, unknown or of "
            f"another shape, such as {wrong[0]}: expected {expected.get(wrong[0])}, got {shapes.get(wrong[0])}"
        )


def adapter_folder(folder: Path) -> Path:
    """Return the absolute path of a staged adapter (PEFT layout).

    Raises:
        EngineError: there is none.
    """
    path = folder.resolve()
    missing = [name for name in ADAPTER_FILES if not (path / name).is_file()]
    if missing:
        raise EngineError(f"expected an adapter (PEFT layout) in {path}, got no {missing[0]}")
    return path


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
