"""Adapters: the LoRA versions that vLLM holds, and for how long.

An adapter is immutable: every version has a name, a number and a folder of its own, because vLLM caches by name and
path, and re-reads an adapter that is loaded "in place" at every step. Calls in flight keep the version that they began
with; a version is removed when the last of them has ended and it is no longer the current one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.vllm.commands import commanding
from gspo_gym.engine.vllm.folders import adapter_folder
from gspo_gym.errors import EngineError


class Adapters:
    """What is loaded, by version, and how many calls use it.

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
        """Make an adapter the one that new calls use.

        Raises:
            EngineError: there is no adapter in the folder, or vLLM refused it.
        """
        assert update.folder is not None
        folder = adapter_folder(update.folder)
        from vllm.lora.request import LoRARequest

        # A number of its own even if a version is published twice: vLLM takes equal numbers for equal adapters.
        request = LoRARequest(f"policy-v{update.version}-{self._next_id}", self._next_id, str(folder))
        self._next_id += 1
        if not await self._llm.add_lora(request):
            raise EngineError(f"vLLM did not load the adapter of version {update.version} from {folder}")
        self._loaded.append(request)
        self.current = request
        await self._remove_unused()

    def begin(self) -> Any:
        """The adapter of a call that begins now."""
        if self.current is not None:
            self._in_flight[self.current.lora_int_id] += 1
        return self.current

    async def end(self, adapter: Any) -> None:
        """A call that began with it has ended."""
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
