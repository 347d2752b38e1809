"""An engine in an actor of Ray: the driver's end, and the actor.

Weights go once into Ray's store of objects, from where each replica reads them. An actor that dies, or is silent for
too long, poisons the engine here: its calls end at once, and another must be put in its place (`rebuildable.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gspo_gym import errors
from gspo_gym.base.loops import retrieve_exception
from gspo_gym.cluster.actors import LIFE, START_SECONDS, Cluster
from gspo_gym.cluster.ray import reason_of
from gspo_gym.engine.base import (
    Capabilities,
    Engine,
    PauseMode,
    SamplingParams,
    TensorMeta,
    WeightUpdate,
    num_tokens_to_sample,
    token_list,
)
from gspo_gym.engine.gate import GatedEngine, probing
from gspo_gym.errors import EngineError, EngineLostError, GymError
from gspo_gym.types import Completion, TokenIds

_BUILD_SECONDS = 900.0  # to load a model, of a size that takes minutes
_CLOSE_SECONDS = 30.0  # for processes of the actor's own, such as vLLM's
_NUM_LOOKS = 5  # for a sign of life, before an actor is lost

Tensors = Mapping[str, torch.Tensor]
# Makes the engine by the driver's order (Any: JSON), on a model that gets the tensors.
Build = Callable[[Any, Tensors], Awaitable[Engine]]
_Refusal = tuple[str, str]  # the kind and the text of a GymError


class ReplicaLostError(EngineError):
    """An actor that was to sample was lost before it was up; another may come up."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica is started and watched.

    Attributes:
        role, number: of its place.
        build: makes its engine by `order`.
        silence_seconds: without an answer; then it is lost.
        step_seconds: for a step of an update; then it hangs.
    """

    role: str
    number: int
    build: Build
    order: Mapping[str, Any]
    silence_seconds: float
    step_seconds: float

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


class Shipment:
    """The weights of the update under way, as an object of Ray that all replicas read."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._lock = threading.Lock()  # replicas take an update at once, each in a thread
        self._update: WeightUpdate | None = None
        self._object: Any = None

    def of(self, update: WeightUpdate) -> Any:
        """Return the object (Any: Ray's) of an update's tensors, which are computed for the first that asks."""
        with self._lock:
            if update is not self._update:
                assert update.tensors is not None
                tensors = {name: tensor.detach().cpu() for name, tensor in update.tensors}
                self._update, self._object = update, self._ray.put(tensors)
            return self._object


class ReplicaEngine(GatedEngine):
    """Samples in an actor. Made by `start`; it belongs to the event loop that it was started in.

    It promises what the engine there promises, but it never shares the learner's weights.
    """

    def __init__(self, cluster: Cluster, settings: ReplicaSettings, shipment: Shipment) -> None:
        super().__init__()
        self._ray, self._settings, self._shipment = cluster.ray, settings, shipment
        self._actor = cluster.start(settings.role, settings.number, SamplingActor, settings.build, groups=(LIFE,))
        self._capabilities: Capabilities | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lost: str | None = None

    @classmethod
    async def start(
        cls, cluster: Cluster, settings: ReplicaSettings, shipment: Shipment, tensors: Tensors
    ) -> ReplicaEngine:
        """Start the actor and its engine, whose model gets these tensors; cancelling ends what was begun.

        Raises:
            ReplicaLostError: it did not start. GymError: what building the engine raised.
        """
        engine = cls(cluster, settings, shipment)
        try:
            # Importing torch may keep a process from answering for longer than it may be silent afterwards.
            async with asyncio.timeout(START_SECONDS):
                await engine._life()
            engine._watching = asyncio.create_task(engine._watch())
            async with asyncio.timeout(_BUILD_SECONDS):
                capabilities = await engine._ask("start", settings.order, tensors)
        except (cluster.ray.exceptions.RayError, EngineLostError, TimeoutError) as error:
            engine._end()
            reason = reason_of(error) if isinstance(error, cluster.ray.exceptions.RayError) else str(error)
            raise ReplicaLostError(f"{settings.name} did not start: {reason or 'it was not up in time'}") from error
        except BaseException:
            engine._end()
            raise
        kinds = tuple(kind for kind in capabilities.update_kinds if kind != "shared")  # there is nothing to share here
        engine._capabilities = replace(capabilities, update_kinds=kinds, can_sleep=False)
        return engine

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None
        return self._capabilities

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion; see `Engine.generate`.

        Raises:
            EnginePoisonedError: also when the actor is lost.
        """
        num_tokens_to_sample(len(prompt_token_ids), sampling, self.capabilities.max_model_len)
        async with self._gate.admit(session_id, deadline_seconds):
            # While the gate is paused it admits probes only.
            completion: Completion = await self._ask(
                "generate", token_list(prompt_token_ids), sampling, session_id, self._gate.is_paused
            )
            return completion

    async def end_session(self, session_id: str) -> None:
        """Forget a session; unknown ones are fine."""
        self._actor.end_session.remote(session_id)

    async def forget_ended(self) -> None:
        """Use nothing of ended sessions again; see `Engine.forget_ended`."""
        self._actor.forget_ended.remote()

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update; see `Engine.pause`."""
        await super().pause(mode)
        await self._step("pause", mode)

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Send the tensors, or the name of a folder; see `Engine.apply_weights`."""
        self._require_kind(update)
        self._gate.require_paused()
        if update.folder is not None:
            await self._step("apply_weights", update.version, update.kind, str(update.folder), None)
            return
        try:
            async with asyncio.timeout(self._settings.step_seconds):
                tensors = await asyncio.to_thread(self._shipment.of, update)
        except Exception as error:  # such as torch's of a GPU without memory
            reason = f"{self._settings.name} did not get all tensors: {type(error).__name__}: {error}"
            self._note_loss(reason)
            raise EngineError(reason) from error
        await self._step("apply_weights", update.version, update.kind, None, tensors)

    async def checksums(self) -> Mapping[str, str]:
        """Return what the engine there returns; see `Engine.checksums`."""
        digests: Mapping[str, str] = await self._step("checksums")
        return digests

    async def resume(self, version: int) -> None:
        """Commit; see `Engine.resume`."""
        self._gate.require_paused()
        await self._step("resume", version)
        self._gate.resume(version)

    async def close(self) -> None:
        """End the actor. Calls in flight, and all later ones, raise EngineError."""
        await self._close_gate()
        if self._lost is None:
            # So that it ends its own processes first.
            with contextlib.suppress(GymError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._ask("close")
        self._end()

    def _end(self) -> None:
        self._lost = self._lost or "the engine is closed"
        if self._watching is not None:
            self._watching.cancel()
        self._ray.kill(self._actor, no_restart=True)

    async def _life(self) -> None:
        await self._actor.life.options(concurrency_group=LIFE).remote()

    async def _watch(self) -> None:
        seconds = self._settings.silence_seconds
        while self._lost is None:
            if (reason := await _reason_of_silence(self._life(), seconds, self._ray.exceptions.RayError)) is not None:
                self._note_loss(reason)
            await asyncio.sleep(seconds / _NUM_LOOKS)

    def _note_loss(self, reason: str) -> None:
        if self._lost is None:
            self._lost = f"{self._settings.name} is lost: {reason}"
            if self._gate.health().is_alive:  # else it was closed
                self._gate.poison(self._lost)
            self._ray.kill(self._actor, no_restart=True)

    async def _step(self, method: str, *arguments: Any) -> Any:
        """Return what a step of an update returned (Any: it differs).

        Raises:
            EngineError: what the engine raised, or the actor was lost or too late.
        """
        seconds = self._settings.step_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._ask(method, *arguments)
        except TimeoutError as error:
            raise EngineError(f"{self._settings.name} did not answer {method} within {seconds:g} seconds") from error

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self._lost is not None:
            raise EngineLostError(self._lost)
        call = getattr(self._actor, method).remote(*arguments)
        answer = asyncio.ensure_future(_answer_of(call))
        answer.add_done_callback(retrieve_exception)
        try:
            result, refusal = await answer
        except asyncio.CancelledError:
            self._ray.cancel(call)
            raise
        except self._ray.exceptions.RayError as error:
            self._note_loss(reason_of(error))
            raise EngineLostError(str(self._lost)) from error
        if refusal is not None:
            kind, text = refusal
            raise getattr(errors, kind)(text)
        return result


async def _reason_of_silence(life: Coroutine[Any, Any, None], seconds: float, lost: type[Exception]) -> str | None:
    """Return why a sign of life does not come; None: it came.

    The time is counted in looks, because this process does not hear either while it is paused itself.
    """
    answer = asyncio.ensure_future(life)
    try:
        for _ in range(_NUM_LOOKS):
            await asyncio.wait({answer}, timeout=seconds / _NUM_LOOKS)
            if answer.done():
                answer.result()
                return None
    except lost as error:
        return reason_of(error)
    finally:
        answer.cancel()
    return f"it was not heard of for {seconds:g} seconds"


async def _answer_of(call: Any) -> Any:
    return await call


def _refusal_of(error: Exception) -> _Refusal:
    is_ours = isinstance(error, GymError) and hasattr(errors, type(error).__name__)
    return (type(error).__name__, str(error)) if is_ours else ("EngineError", f"{type(error).__name__}: {error}")


class SamplingActor:
    """The actor: an engine. Each method returns its result, and why it was refused; None: it was not."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._engine: Engine

    async def life(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    async def start(self, order: Any, tensors: Tensors) -> tuple[Capabilities | None, _Refusal | None]:
        """Build the engine."""

        async def work() -> Capabilities:
            self._engine = await self._build(order, tensors)
            return self._engine.capabilities

        return await self._answer(work())

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, session_id: str | None, is_probe: bool
    ) -> tuple[Completion | None, _Refusal | None]:
        """Sample one completion."""
        with probing() if is_probe else contextlib.nullcontext():
            answer = await self._answer(self._engine.generate(prompt, sampling, session_id=session_id))
        if answer[1] is not None and not (await self._engine.health()).is_alive:
            os._exit(1)  # a dead engine is a lost process: the driver puts another in its place
        return answer

    async def end_session(self, session_id: str) -> None:
        """Forget a session."""
        await self._engine.end_session(session_id)

    async def forget_ended(self) -> None:
        """Use nothing of ended sessions again."""
        await self._engine.forget_ended()

    async def pause(self, mode: PauseMode) -> tuple[Any, _Refusal | None]:
        """Begin an update."""
        return await self._answer(self._engine.pause(mode))

    async def apply_weights(
        self, version: int, kind: Any, folder: str | None, tensors: Tensors | None
    ) -> tuple[Any, _Refusal | None]:
        """Take weights from a folder, or these."""
        source = None if tensors is None else _Received(tensors)
        update = WeightUpdate(version, kind, None if folder is None else Path(folder), tensors=source)
        return await self._answer(self._engine.apply_weights(update))

    async def checksums(self) -> tuple[Any, _Refusal | None]:
        """Return the digests of the engine's weights."""
        return await self._answer(self._engine.checksums())

    async def resume(self, version: int) -> tuple[Any, _Refusal | None]:
        """Commit."""
        return await self._answer(self._engine.resume(version))

    async def close(self) -> tuple[Any, _Refusal | None]:
        """End the engine's own processes."""
        return await self._answer(self._engine.close())

    async def _answer(self, work: Awaitable[Any]) -> tuple[Any, _Refusal | None]:
        try:
            return await work, None
        except Exception as error:
            return None, _refusal_of(error)


@dataclass(frozen=True, slots=True)
class _Received:
    """Tensors that have arrived, as a `TensorSource`."""

    tensors: Tensors

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def metadata(self) -> Sequence[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())
