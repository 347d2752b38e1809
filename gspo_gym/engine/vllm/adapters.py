"""Versions of vLLM's weights: their names, the LoRA adapters that vLLM holds, and checks before vLLM gets new ones.

vLLM would take too few tensors silently. An adapter is immutable: every version has a separate name, number and folder,
because vLLM caches by name and path, and re-reads an adapter that is loaded "in place" at every step. Calls in flight
keep the version that they began with; a version is removed when the last of them has ended and it is no longer current.

Every update gets a name that was never used before, on this server or by another client: it is the label of the
weights, the name of the adapter and the salt of the prefix cache in one. So a token's label proves the update that it
was sampled under, and nothing that was computed under other weights is ever found again.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.endpoint.routes import Sampled, Served
from gspo_gym.engine.endpoint.wire import AnswerError
from gspo_gym.engine.vllm.control import VllmControl
from gspo_gym.engine.vllm.server import commanding
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
        unused = [one for one in self._loaded if one is not self.current and not self._in_flight[one.lora_int_id]]
        self._loaded = [one for one in self._loaded if one not in unused]
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
    staged = folder.resolve()
    found = _shapes(staged)
    if not found:
        raise EngineError(f"expected weights (*.safetensors) in {staged}, got none")
    require_tensors(found, model_folder, where=str(staged))
    return staged


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


class ServedVersions:
    """The names, from one update to the next.

    Args:
        control: changes them; None: they cannot be changed here.
        model: the name of the served model.
        label: the server's present name for its weights.
        has_adapters: updates are adapters; the weights of the served model never change.

    Attributes:
        current: the weights that sample requests that begin now.
    """

    def __init__(self, control: VllmControl | None, *, model: str, label: str, has_adapters: bool) -> None:
        self.current = Served(version=0, model=model, salt=new_name(0))
        self._control = control
        self._has_adapters = has_adapters
        self._versions = {label: 0}  # by label of the weights
        self._adapters: list[str] = []  # that the server knows
        self._in_flight: Counter[str] = Counter()  # by name of the adapter

    def begin(self) -> Served:
        """Begin a request; `end` follows."""
        self._in_flight[self.current.model] += 1
        return self.current

    async def end(self, served: Served) -> None:
        """End a request. An adapter that no request uses is unloaded, unless it is the current one."""
        self._in_flight[served.model] -= 1
        if served.model != self.current.model:
            await self._unload_unused()

    async def load_adapter(self, update: WeightUpdate) -> None:
        """Sample with this adapter from now on; requests in flight keep theirs.

        Raises:
            EngineError: there is none in the folder, or the server refused it.
        """
        assert self._control is not None
        assert update.folder is not None
        name = new_name(update.version)
        await self._control.load_adapter(name, adapter_folder(update.folder))
        self._adapters.append(name)
        self.current = Served(version=update.version, model=name, salt=name)
        await self._unload_unused()

    async def relabel(self, version: int) -> None:
        """Make this the version of the served model's weights, for all samples from now on."""
        name = new_name(version)
        self.current = Served(version=version, model=self.current.model, salt=name)
        if self._control is None:  # the same weights under the same label
            self._versions = dict.fromkeys(self._versions, version)
        elif not self._has_adapters:
            await self._control.set_version(name)
            self._versions[name] = version

    def versions_of(self, sampled: Sampled, served: Served) -> list[int]:
        """Return the version of each token of a sample.

        Raises:
            AnswerError: the spans do not cover the tokens one after another.
            EngineError: another client has changed the server's weights.
        """
        num_tokens = len(sampled.completion.token_ids)
        if not sampled.versions:  # a route that does not say; no request is in flight while weights change
            return [served.version] * num_tokens
        versions: list[int] = []
        for label, start, end in sampled.versions:
            if start != len(versions) or end <= start:
                break
            if label not in self._versions:
                raise EngineError(
                    f"the server samples with weights called {label!r}, which no update of ours put there: somebody "
                    "else changes them. One server serves one trainer"
                )
            versions += [self._versions[label]] * (end - start)
        if len(versions) != num_tokens:
            raise AnswerError(
                f"answer: expected weight versions of {num_tokens} tokens in a row, got {sampled.versions}"
            )
        return [served.version] * num_tokens if self._has_adapters else versions

    async def _unload_unused(self) -> None:
        assert self._control is not None
        unused = [name for name in self._adapters if name != self.current.model and not self._in_flight[name]]
        self._adapters = [name for name in self._adapters if name not in unused]
        for name in unused:
            del self._in_flight[name]
        for name in unused:
            await self._control.unload_adapter(name)


def new_name(version: int) -> str:
    """Return a name that no other update has; an identity, not randomness."""
    return f"policy-v{version}-{uuid.uuid4().hex[:12]}"
