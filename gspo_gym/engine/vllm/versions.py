"""The names of a vLLM server's weights, and the versions behind them.

Every update gets a name that was never used before, on this server or by another client: it is the label of the
weights, the name of the adapter and the salt of the prefix cache in one. So a token's label proves the update that it
was sampled under, and nothing that was computed under other weights is ever found again.
"""

from __future__ import annotations

import uuid
from collections import Counter

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.endpoint.routes import Sampled, Served
from gspo_gym.engine.endpoint.wire import AnswerError
from gspo_gym.engine.vllm.adapters import adapter_folder
from gspo_gym.engine.vllm.control import VllmControl
from gspo_gym.errors import EngineError


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
