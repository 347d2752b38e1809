"""An engine in a process of its own: the driver's end, and what the process does.

The process is a rank of one (`base/ranks.py`), so that whatever starts ranks can start it: a shell on this machine, or
an actor on another. Calls and samples travel as JSON, weights one tensor at a time, as safetensors, from the learner's
memory into the engine's. A process that ends, or is silent for too long, poisons the engine here: its calls end at
once, and another must be put in its place (`rebuildable.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load, save

from gspo_gym import errors
from gspo_gym.base.loops import retrieve_exception, wait_until_ended
from gspo_gym.base.ranks import Handle, Patience, Rank, Ranks, RanksLostError, Start
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
from gspo_gym.types import Completion, FinishReason, TokenIds

_BUILD_SECONDS = 900.0  # to load a model, of a size that takes minutes
_CLOSE_SECONDS = 30.0  # for processes of the process's own, such as vLLM's
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class ProcessLostError(EngineError):
    """A process that was to sample has ended, or was silent, before it was up; another may come up."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How a process that samples is started and watched.

    Attributes:
        start: see `Ranks`.
        order: what its `serve` builds the engine by; JSON.
        name: of the process, for people.
        silence_seconds: without a sign of life; then it is lost.
        step_seconds: for a step of an update; then it hangs.
        host: of this machine, where the process can reach it.
        log: what it prints.
    """

    start: Start
    order: Mapping[str, Any]
    name: str
    silence_seconds: float
    step_seconds: float
    host: str = "127.0.0.1"
    log: Path | None = None


class ProcessEngine(GatedEngine):
    """Samples in another process. Made by `start`; it belongs to the event loop that it was started in.

    It promises what the engine there promises, but it never shares the learner's weights.
    """

    def __init__(self, settings: ProcessSettings) -> None:
        super().__init__()
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._ranks: Ranks | None = None
        self._capabilities: Capabilities | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by the number of what was asked (Any: JSON)
        self._orders: queue.Queue[_Order | None] = queue.Queue()
        self._calls: list[dict[str, Any]] = []  # of this pass of the event loop
        self._threads: list[threading.Thread] = []
        self._lost: str | None = None

    @classmethod
    async def start(cls, settings: ProcessSettings, tensors: NamedTensors) -> ProcessEngine:
        """Start the process and its engine, whose model gets these tensors; cancelling ends what was begun.

        Raises:
            ProcessLostError: it did not start. GymError: what building the engine raised.
        """
        engine = cls(settings)
        starting = _Starting(settings.start)
        work = asyncio.ensure_future(asyncio.to_thread(engine._begin, starting, tensors))
        work.add_done_callback(retrieve_exception)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            starting.give_up()
            with contextlib.suppress(asyncio.CancelledError):
                await wait_until_ended({work})
            await asyncio.to_thread(engine._end)
            raise
        except BaseException:
            await asyncio.to_thread(engine._end)
            raise
        return engine

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None
        return self._capabilities

    @property
    def handle(self) -> Handle:
        """The process."""
        assert self._ranks is not None
        return self._ranks.handles[0]

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
            EnginePoisonedError: also when the process is lost.
        """
        num_tokens_to_sample(len(prompt_token_ids), sampling, self.capabilities.max_model_len)
        call = {
            "prompt": token_list(prompt_token_ids),
            "sampling": {name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
            "session": session_id,
        }
        async with self._gate.admit(session_id, deadline_seconds):
            number, answer = self._expect()
            # While the gate is paused it admits probes only.
            self._post_call({**call, "number": number, "is_probe": self._gate.is_paused})
            try:
                return _completion(await answer)
            except asyncio.CancelledError:
                self._post_call({"number": number, "is_cancelled": True})
                raise
            finally:
                self._answers.pop(number, None)

    async def end_session(self, session_id: str) -> None:
        """Forget a session; unknown ones are fine."""
        self._post({"do": "end_session", "session": session_id})

    async def forget_ended(self) -> None:
        """Use nothing of ended sessions again; see `Engine.forget_ended`."""
        self._post({"do": "forget_ended"})

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update; see `Engine.pause`."""
        await super().pause(mode)
        await self._step({"do": "pause", "mode": mode})

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Send the tensors, one after the other, or the name of a folder; see `Engine.apply_weights`."""
        self._require_kind(update)
        self._gate.require_paused()
        head = {"do": "apply_weights", "kind": update.kind, "version": update.version}
        if update.folder is not None:
            await self._step({**head, "folder": str(update.folder)})
            return
        assert update.tensors is not None
        metas = update.tensors.metadata()
        described = [[meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)] for meta in metas]
        await self._step({**head, "tensors": described}, update.tensors, len(metas))

    async def checksums(self) -> Mapping[str, str]:
        """Return what the engine there returns; see `Engine.checksums`."""
        digests: Mapping[str, str] = await self._step({"do": "checksums"})
        return digests

    async def resume(self, version: int) -> None:
        """Commit; see `Engine.resume`."""
        self._gate.require_paused()
        await self._step({"do": "resume", "version": version})
        self._gate.resume(version)

    async def close(self) -> None:
        """End the process. Calls in flight, and all later ones, raise EngineError."""
        await self._close_gate()
        if self._lost is None and self._ranks is not None:
            # So that it ends its own processes first.
            with contextlib.suppress(GymError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._ask({"do": "close"})
        ending = asyncio.ensure_future(asyncio.to_thread(self._end))
        await wait_until_ended({ending})
        ending.result()

    def _begin(self, starting: _Starting, tensors: NamedTensors) -> None:
        """Bring the process up; this takes seconds, in a thread."""
        settings = self._settings
        try:
            self._ranks = ranks = Ranks(
                [starting],
                host=settings.host,
                patience=Patience(silence=settings.silence_seconds),
                on_loss=self._tell_loss,
                log=settings.log,
            )
            ranks.send({"order": settings.order}, _packed(tensors), num_bodies=len(tensors))
            answer, _ = ranks.receive(0, max_seconds=_BUILD_SECONDS)
        except RanksLostError as error:
            raise ProcessLostError(f"{settings.name} did not start: {error}") from error
        if answer["refusal"] is not None:
            raise _error_of(answer["refusal"])
        self._capabilities = _capabilities(answer["capabilities"])
        self._threads = [threading.Thread(target=work, args=(ranks,), daemon=True) for work in (self._send, self._hear)]
        for thread in self._threads:
            thread.start()

    def _end(self) -> None:
        """End the process and its threads, in a thread. Twice is fine."""
        self._orders.put(None)
        if self._ranks is not None:
            self._ranks.close()
        for thread in self._threads:
            thread.join()
        self._tell_loss("the engine is closed")

    def _send(self, ranks: Ranks) -> None:
        while (order := self._orders.get()) is not None:
            try:
                ranks.send(order.head, _packed(order.tensors), num_bodies=order.num_tensors)
            except RanksLostError:
                return
            # Of the tensors, such as torch's of a GPU without memory: the process waits for more of them, and the
            # update for the process.
            except Exception as error:
                ranks.give_up(f"{self._settings.name} did not get all tensors: {type(error).__name__}: {error}")
                return

    def _hear(self, ranks: Ranks) -> None:
        with contextlib.suppress(RanksLostError, RuntimeError):  # RuntimeError: the event loop is closed
            while True:
                answer, _ = ranks.receive(0)
                self._loop.call_soon_threadsafe(self._settle, answer["answers"])

    def _tell_loss(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._note_loss, reason)

    def _note_loss(self, reason: str) -> None:
        if self._lost is None:
            self._lost = f"{self._settings.name} is lost: {reason}"
            if self._gate.health().is_alive:  # else it was closed
                self._gate.poison(self._lost)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineLostError(self._lost))

    def _settle(self, answers: Sequence[Mapping[str, Any]]) -> None:
        for each in answers:
            answer = self._answers.get(each["number"])
            if answer is None or answer.done():  # cancelled meanwhile
                continue
            if each.get("refusal") is not None:
                answer.set_exception(_error_of(each["refusal"]))
            else:
                answer.set_result(each["result"])

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        number, answer = next(self._numbers), self._loop.create_future()
        self._answers[number] = answer
        return number, answer

    def _post_call(self, call: dict[str, Any]) -> None:
        # What this pass of the event loop calls travels together, and begins in one step of the engine there.
        if not self._calls:
            self._loop.call_soon(self._post_calls)
        self._calls.append(call)

    def _post_calls(self) -> None:
        calls, self._calls = self._calls, []
        if calls:
            self._orders.put(_Order({"do": "calls", "calls": calls}))

    def _post(self, head: Mapping[str, Any]) -> None:
        self._post_calls()  # in the order in which they were made
        self._orders.put(_Order(head))

    async def _step(
        self, head: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]] = (), num_tensors: int = 0
    ) -> Any:
        """Return the answer (Any: JSON) to a step of an update.

        Raises:
            EngineError: what the engine raised, or the process was lost or too late.
        """
        try:
            async with asyncio.timeout(self._settings.step_seconds):
                return await self._ask(head, tensors, num_tensors)
        except TimeoutError as error:
            seconds = self._settings.step_seconds
            reason = f"{self._settings.name} did not answer {head['do']} within {seconds:g} seconds"
            raise EngineError(reason) from error

    async def _ask(
        self, head: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]] = (), num_tensors: int = 0
    ) -> Any:
        if self._lost is not None:
            raise EngineLostError(self._lost)
        number, answer = self._expect()
        self._post_calls()
        self._orders.put(_Order({**head, "number": number}, tensors, num_tensors))
        try:
            return await answer
        finally:
            self._answers.pop(number, None)


@dataclass(frozen=True, slots=True)
class _Order:
    """A message, with tensors that are computed when they are sent."""

    head: Mapping[str, Any]
    tensors: Iterable[tuple[str, torch.Tensor]] = ()
    num_tensors: int = 0


class _Starting:
    """The start of a process that may be given up before it is up."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._is_given_up = False

    def __call__(self, environment: Mapping[str, str]) -> Handle:
        handle = self._start(environment)
        with self._lock:
            self._handle = handle
            if self._is_given_up:
                handle.kill()
        return handle

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            if self._handle is not None:
                self._handle.kill()


def _packed(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[bytes]:
    for name, tensor in tensors:
        yield save({name: tensor.detach().cpu().contiguous()})


def _completion(fields_: Mapping[str, Any]) -> Completion:
    return Completion(**{**fields_, "finish_reason": FinishReason(fields_["finish_reason"])})


def _capabilities(said: Mapping[str, Any]) -> Capabilities:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in said.items()}
    kinds = tuple(kind for kind in values["update_kinds"] if kind != "shared")  # there is nothing to share here
    return replace(Capabilities(**values), update_kinds=kinds, can_sleep=False)


def _refusal(error: Exception) -> list[str]:
    is_ours = isinstance(error, GymError) and hasattr(errors, type(error).__name__)
    return [type(error).__name__, str(error)] if is_ours else ["EngineError", f"{type(error).__name__}: {error}"]


def _error_of(refusal: Sequence[str]) -> GymError:
    kind, text = refusal
    error: GymError = getattr(errors, kind)(text)
    return error


# Makes the engine by the driver's order (Any: JSON), on a model that gets the tensors, each of which must be taken.
Build = Callable[[Any, Iterator[tuple[str, torch.Tensor]]], Awaitable[Engine]]


def serve(rank: Rank, build: Build) -> NoReturn:
    """Do what the driver says, until it is gone or the engine is dead."""
    try:
        asyncio.run(_Served(rank).run(build))
    except Exception as error:
        rank.end(f"{type(error).__name__}: {error}")
    rank.end("was closed")


class _Served:
    """The engine in this process, and the calls that it has."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._engine: Engine
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Mapping[str, Any]] = []  # of this pass of the event loop

    async def run(self, build: Build) -> None:
        order, bodies = await asyncio.to_thread(self._rank.receive)
        try:
            self._engine = await build(order["order"], _tensors_of(bodies))
        except GymError as error:
            self._rank.send({"refusal": _refusal(error)})
            await asyncio.to_thread(self._rank.receive)  # nothing comes: the driver ends this process
        self._rank.send({"refusal": None, "capabilities": asdict(self._engine.capabilities)})
        while True:
            order, bodies = await asyncio.to_thread(self._rank.receive)
            if order["do"] == "calls":
                for call in order["calls"]:
                    self._take(call)
            else:
                await self._do(order, bodies)

    def _take(self, call: Mapping[str, Any]) -> None:
        if "is_cancelled" in call:
            if (task := self._calls.get(call["number"])) is not None:
                task.cancel()
            return
        task = asyncio.create_task(self._generate(call))
        self._calls[call["number"]] = task
        task.add_done_callback(lambda _: self._calls.pop(call["number"]))

    async def _generate(self, call: Mapping[str, Any]) -> None:
        sampling = {**call["sampling"], "stop_token_ids": tuple(call["sampling"]["stop_token_ids"])}
        try:
            with probing() if call["is_probe"] else contextlib.nullcontext():
                completion = await self._engine.generate(
                    call["prompt"], SamplingParams(**sampling), session_id=call["session"]
                )
        except Exception as error:
            # A dead engine is a lost process: the driver puts another in its place.
            if not (await self._engine.health()).is_alive:
                self._rank.end(str(error))
            self._answer(call["number"], refusal=_refusal(error))
            return
        result = {
            "token_ids": completion.token_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
            "finish_reason": completion.finish_reason.value,
            "weight_version": completion.weight_version.tolist(),
        }
        self._answer(call["number"], result=result)

    async def _do(self, order: Mapping[str, Any], bodies: Iterator[bytes]) -> None:
        refusal, result = None, None
        try:
            result = await self._result_of(order, bodies)
        except Exception as error:
            refusal = _refusal(error)
        await asyncio.to_thread(lambda: [None for _ in bodies])  # of an order that was refused
        if "number" in order:
            self._answer(order["number"], result=result, refusal=refusal)

    async def _result_of(self, order: Mapping[str, Any], bodies: Iterator[bytes]) -> Any:
        """Return the JSON of what the engine answers."""
        engine = self._engine
        match order["do"]:
            case "end_session":
                await engine.end_session(order["session"])
            case "forget_ended":
                await engine.forget_ended()
            case "pause":
                await engine.pause(order["mode"])
            case "apply_weights":
                await engine.apply_weights(_update_of(order, bodies))
            case "checksums":
                return dict(await engine.checksums())
            case "resume":
                await engine.resume(order["version"])
            case "close":
                await engine.close()
        return None

    def _answer(self, number: int, **answer: Any) -> None:
        # What one step of the engine ended travels together.
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._send)
        self._answers.append({"number": number, **answer})

    def _send(self) -> None:
        answers, self._answers = self._answers, []
        self._rank.send({"answers": answers})


def _update_of(order: Mapping[str, Any], bodies: Iterator[bytes]) -> WeightUpdate:
    version, kind = order["version"], order["kind"]
    if "folder" in order:
        return WeightUpdate(version, kind, Path(order["folder"]))
    metas = [TensorMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in order["tensors"]]
    return WeightUpdate(version, kind, tensors=_Received(metas, bodies))


@dataclass(frozen=True, slots=True)
class _Received:
    """Tensors that arrive while they are iterated over, which can be done once, as a `TensorSource`."""

    metas: Sequence[TensorMeta]
    bodies: Iterator[bytes]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def metadata(self) -> Sequence[TensorMeta]:
        return self.metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return _tensors_of(self.bodies)


def _tensors_of(bodies: Iterator[bytes]) -> Iterator[tuple[str, torch.Tensor]]:
    for body in bodies:
        yield from load(body).items()
