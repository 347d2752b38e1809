"""A transformers model in this process as an engine: the embedded default, on CPU or CUDA.

Continuous batching in a separate thread; the model is the learner's, weights and all. An episode's keys and values stay
between its turns, so a turn costs its new tokens only. Models that cannot be run so are run more slowly, not refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from gspo_gym.engine.base import (
    Capabilities,
    EngineHealth,
    PauseMode,
    SamplingParams,
    WeightUpdate,
    num_tokens_to_sample,
    refuse_schema,
    require_vocabulary,
    tensor_digest,
)
from gspo_gym.engine.gate import GatedEngine
from gspo_gym.engine.local.batch import Batch, Caching, Counters, Request
from gspo_gym.engine.local.batcher import Batcher, PackedModel
from gspo_gym.engine.local.plain_model import GeneralBatch, PlainModel
from gspo_gym.engine.local.rows import OBEYED
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.types import Completion, TokenIds

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RunPath:
    """The way in which an engine runs its model.

    Attributes:
        name: "packed": all tokens of a step in one forward pass, keys and values in the engine's slots. "general": the
            unchanged model, much slower with many requests at once.
        reason: why the model cannot be run packed; None if it is.
        caching: the part of a sequence that is kept; with "general", a new version of the weights may change it.
    """

    name: Literal["packed", "general"]
    reason: str | None
    caching: Caching


class LocalEngine(GatedEngine):
    """Samples from a transformers causal language model, many requests at once.

    Every token's logprob is computed in float32 from the logits that it was sampled from. The same prompt, weights and
    seed give the same tokens in any batch, up to rounding: the shape of a batch changes float32 logits by about 1e-6,
    so a draw that close to the boundary between two tokens may fall either way.

    >>> from gspo_gym.policy.load import load_policy
    >>> policy = load_policy("tiny:qwen3-64")
    >>> async def run() -> int:
    ...     engine = LocalEngine(policy.model, max_model_len=64)
    ...     sampling = SamplingParams(max_tokens=5, stop_token_ids=(), seed=0)
    ...     completion = await engine.generate([72, 105], sampling)
    ...     await engine.close()
    ...     return len(completion.token_ids)
    >>> asyncio.run(run())
    5
    """

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        max_batch_size: int = 256,
        device: str | torch.device | None = None,
        source: Any = None,
        takes_tensors: bool = False,
    ) -> None:
        """Share `model` and start the thread.

        Args:
            model: a transformers causal language model or a PEFT model around one (Any: both are untyped). Its modes,
                hooks and attention are left alone; its weights are read whenever something is sampled.
            max_model_len: longest prompt plus completion, in tokens. Memory for keys and values grows with use, up to
                `max_batch_size` sequences of this length.
            max_batch_size: most requests in work plus sessions kept between turns; further requests wait, and take the
                place of the session that has waited longest.
            device: that the model must be on; None: any.
            source: the learner's model, if `model` is a copy of it (equal names and shapes), which can sample while the
                learner changes the original; an update copies the weights. None: `model` is the learner's.
            takes_tensors: `model` is another learner's in all but its trained weights, which an update hands over. Not
                with `source`.

        Raises:
            ConfigError: the model is no causal language model, or cannot read so many tokens, or is not on that device.
        """
        super().__init__()
        if max_model_len < 2 or max_batch_size < 1:
            raise ConfigError(
                "LocalEngine: expected max_model_len >= 2 and max_batch_size >= 1, "
                f"got {max_model_len} and {max_batch_size}"
            )
        batch, self._reason = _run_model(model, max_model_len=max_model_len, max_batch_size=max_batch_size)
        shared_model = batch.shared
        if device is not None and torch.device(device).type != shared_model.device.type:
            raise ConfigError(f"LocalEngine: the model is on {shared_model.device}, expected {device}; move it first")
        self._max_model_len = max_model_len
        self._vocab_size = shared_model.vocab_size
        self._model, self._source, self._takes_tensors = model, source, takes_tensors
        self._worker = _Worker(batch)
        self._thread = threading.Thread(target=self._worker.run, name="gspo-gym-engine", daemon=True)
        self._thread.start()
        # Also when the engine is dropped without close(), and at the interpreter's exit.
        self._stop = weakref.finalize(self, _stop, self._worker, self._thread)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            is_trainable=True,
            seeds_per_request=True,
            reuses_prefixes=self._worker.batch.caching is Caching.TURNS,
            max_model_len=self._max_model_len,
            update_kinds=("transfer",) if self._takes_tensors else ("shared",),
            # The learner's own weights change before the update begins: what is frozen would be lost.
            pause_modes=("wait", "keep") if self._has_own_weights else ("wait",),
            has_checksums=self._takes_tensors,
        )

    @property
    def model(self) -> Any:
        """Return the model that samples (Any: transformers is untyped); use it within `compute` only."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids that the model reads."""
        return self._vocab_size

    @property
    def _has_own_weights(self) -> bool:
        return self._takes_tensors or self._source is not None

    @property
    def path(self) -> RunPath:
        """Return the way in which the model is run."""
        name: Literal["packed", "general"] = "packed" if self._reason is None else "general"
        return RunPath(name, self._reason, self._worker.batch.caching)

    @property
    def counters(self) -> Counters:
        """Return a copy of the counters."""
        return replace(self._worker.batch.counters)

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion; see `Engine.generate`.

        Sampling stops at `max_model_len` as at `max_tokens`. A session with a prompt that does not extend its earlier
        tokens only loses time: their common prefix is reused.

        Raises:
            ConfigError: there is a JSON schema, or a setting that is not obeyed here.
            ContextOverflowError: the prompt leaves no room for a single token.
            EngineTimeoutError, EnginePoisonedError: see `Engine.generate`.
            EngineError: the logits are not finite, the weights changed without an update, a prompt token is not in the
                vocabulary, or the engine is closed or dead.
        """
        refuse_schema(sampling, "LocalEngine")
        sampling.require_only(OBEYED, where="LocalEngine")
        max_new = num_tokens_to_sample(len(prompt_token_ids), sampling, self._max_model_len)
        prompt = np.asarray(prompt_token_ids, np.int32)
        require_vocabulary(prompt.min(), prompt.max(), self._vocab_size)
        request = Request(prompt, sampling, max_new, session_id)
        async with self._gate.admit(session_id, deadline_seconds):
            answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self._worker.post(lambda batch: batch.submit(request), key=request, future=answer)
            try:
                return await answer
            except asyncio.CancelledError:
                # The thread must not settle a future of a call that has gone, and its slot is needed.
                self._worker.forget(request)
                with contextlib.suppress(EngineError):  # closed or dead: nothing is held any more
                    self._worker.post(lambda batch: batch.cancel(request), at_once=True)
                raise

    async def end_session(self, session_id: str) -> None:
        """Free the keys and values kept for a session; unknown ones are fine."""
        self._worker.post(lambda batch: batch.end_session(session_id))

    async def forget_ended(self) -> None:
        """Use no keys and values of ended sessions again, not even for an equal beginning of a prompt."""
        with contextlib.suppress(EngineError):  # closed or dead: nothing is held any more
            self._worker.post(lambda batch: batch.forget_ended())

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update; with "keep", requests in flight stand still between two tokens; see `Engine.pause`."""
        await super().pause(mode)
        if mode == "keep":
            await self.compute(lambda: self._set_frozen(True))

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Take the learner's present weights, as `update.version`; everything computed under older ones is dropped.

        Requests that were kept go on, and read what they have again, under the new weights.

        Raises:
            EngineError: the engine is not paused, closed or dead, or the tensors are not the model's.
            ConfigError: the weights come by another way than the engine was made for.
        """
        if update.kind != (kind := "transfer" if self._takes_tensors else "shared"):
            raise ConfigError(f"LocalEngine: expected an update of kind {kind!r}, got {update.kind!r}")
        self._gate.require_paused()
        await self.compute(lambda: self._take(self._worker.batch, update))

    async def checksums(self) -> Mapping[str, str]:
        """Return the sha256 of each trained tensor by its name in the model, where an update hands them over."""
        if not self._takes_tensors:
            return {}
        return await self.compute(lambda: {name: tensor_digest(p) for name, p in trained_parameters(self._model)})

    async def resume(self, version: int) -> None:
        """Commit and admit again; see `Engine.resume`. What was kept goes on, also without new weights."""
        self._gate.require_paused()
        await self.compute(lambda: self._set_frozen(False))
        self._gate.resume(version)

    def _set_frozen(self, is_frozen: bool) -> None:
        self._worker.batch.is_frozen = is_frozen

    async def health(self) -> EngineHealth:
        """Return the state; see `Engine.health`."""
        return self._gate.health(self._worker.failure)

    def _take(self, batch: Batch, update: WeightUpdate) -> None:
        # In the engine's thread, between two steps: a step in work would read half of both.
        try:
            if update.tensors is not None:
                _copy_tensors(update.tensors, self._model)
            elif self._source is not None:
                _copy_weights(self._source, self._model)
            batch.update_weights(update.version)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    async def compute(self, work: Callable[[], _Result], /) -> _Result:
        """Return the result of `work`, which runs in the engine's thread between two steps, also if this is cancelled.

        Whatever computes on the processor beside the engine should do it here: every thread that computes has an OpenMP
        pool, and two pools on the same cores cost more than half of the speed.

        Raises:
            EngineError: the engine is closed or dead; besides, whatever `work` raises.
        """
        answer: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        key = object()

        def run(_: Batch) -> None:
            try:
                result: object = work()
            except BaseException as error:  # the caller's, whatever it is: the engine goes on
                result = _Raised(error)
            self._worker.settle([(key, result)])

        self._worker.post(run, key=key, future=answer)
        return await answer

    async def close(self) -> None:
        """Stop the thread. Requests in flight, and later calls, raise EngineError."""
        self._gate.close()
        await asyncio.to_thread(self._stop)  # joining would block the loop that its last results go to


@torch.no_grad()
def _copy_weights(source: Any, target: Any) -> None:
    state = source.state_dict()
    for name, tensor in target.state_dict().items():
        tensor.copy_(state[name])


def trained_parameters(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a model (Any: untyped) that a learner changes, each once and under its first name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


@torch.no_grad()
def _copy_tensors(tensors: Iterable[tuple[str, torch.Tensor]], model: Any) -> None:
    missing = dict(trained_parameters(model))
    for name, tensor in tensors:
        parameter = missing.pop(name, None)
        if parameter is None or parameter.shape != tensor.shape:
            raise EngineError(
                f"expected the trained tensors of the model, each once, got {name!r} {tuple(tensor.shape)}"
            )
        parameter.copy_(tensor)
    if missing:
        raise EngineError(f"expected all trained tensors of the model, got none for {sorted(missing)[0]!r}")


def _run_model(model: Any, *, max_model_len: int, max_batch_size: int) -> tuple[Batch, str | None]:
    try:
        packed_model = PackedModel(model, max_model_len=max_model_len)
        # Compared before anything is sampled: a model that does not keep its interface's promises gives wrong logprobs.
        packed_model.verify()
    except ConfigError as error:
        reason = str(error)
    else:
        return Batcher(packed_model, max_model_len=max_model_len, max_batch_size=max_batch_size), None
    plain = PlainModel(model, max_model_len=max_model_len)
    try:
        plain.verify()
    except ConfigError as error:
        raise ConfigError(f"LocalEngine: {error}. Nor can it be run packed: {reason}") from error
    _log.warning("%s; it is run in the slower, general way (caching: %s)", reason, plain.caching)
    return GeneralBatch(plain, max_batch_size=max_batch_size), reason


@dataclass(frozen=True, slots=True)
class _Raised:
    """The error of work that a caller had run in the thread."""

    error: BaseException


class _Worker:
    """The thread's side: takes commands between steps, runs the batch, hands results back once a step."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._condition = threading.Condition()
        self._posted_commands: list[Callable[[Batch], object]] = []  # in this pass of the event loop
        self._commands: deque[Callable[[Batch], object]] = deque()
        # By request, for its completion, or by command, for its end. Any: results of both kinds.
        self._futures: dict[object, asyncio.Future[Any]] = {}
        self._is_closing = False
        self._failure: BaseException | None = None
        self._telling: asyncio.AbstractEventLoop | None = None  # the loop that is about to wake the thread

    def post(
        self, command: Callable[[Batch], object], *, key: object = None, future: Any = None, at_once: bool = False
    ) -> None:
        """Queue a command for the thread, to be run between two steps; `key` names the future to be settled.

        Call it in an event loop. `at_once` tells the thread now, for a command that ends work.

        Raises:
            EngineError: the thread has ended.
        """
        with self._condition:
            if self._failure is not None:
                raise EngineError(f"the engine's thread died: {self._failure!r}") from self._failure
            if self._is_closing:
                raise EngineError("the engine is closed")
            if key is not None:
                self._futures[key] = future
            self._posted_commands.append(command)
        loop = asyncio.get_running_loop()
        if at_once:
            self._tell()
        elif self._telling is not loop:
            # After all that can run now: the episodes that one step woke get their next turns from one step again.
            self._telling = loop
            loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = None
        with self._condition:
            self._commands.extend(self._posted_commands)
            self._posted_commands.clear()
            self._condition.notify()

    def forget(self, key: object) -> None:
        """Drop the future that a key names, which is no longer awaited. Unknown keys are fine."""
        self._futures.pop(key, None)

    def settle(self, results: list[tuple[object, object]]) -> None:
        """Settle the futures of (key, result) pairs, with one wake-up for each of their event loops."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], object]]] = {}
        for key, result in results:
            future = self._futures.pop(key, None)
            if future is not None:
                by_loop.setdefault(future.get_loop(), []).append((future, result))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all that waited are gone
                loop.call_soon_threadsafe(_settle_in_loop, pairs)

    @property
    def failure(self) -> str | None:
        """The reason why the thread died; None if it did not."""
        with self._condition:
            return None if self._failure is None else f"the engine's thread died: {self._failure!r}"

    def close(self) -> None:
        """Let the thread end after its present step."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()

    def run(self) -> None:
        """Run steps and commands until `close`; the thread's function."""
        reason = "the engine was closed"
        try:
            if self.batch.shared.device.type == "cuda":
                torch.cuda.set_device(self.batch.shared.device)  # kernels that name no GPU use their thread's
            while self._take_commands():
                self.settle([(item.request, item.result) for item in self.batch.step()])
        except BaseException as error:  # calls that wait must get it, whatever it is
            reason = f"the engine's thread died: {error!r}"
            with self._condition:
                self._failure = error
        with self._condition:
            waiting = list(self._futures)
        self.settle([(key, EngineError(reason)) for key in waiting])

    def _take_commands(self) -> bool:
        """Wait for work and run the posted commands; return False when the thread must end."""
        with self._condition:
            while not (self._commands or self._is_closing or self.batch.has_work):
                self._condition.wait()
            commands, self._commands = self._commands, deque()
        if self._is_closing:
            # Commands that were posted before the close find their futures failed in `run`.
            return False
        for command in commands:
            command(self.batch)
        return True


def _settle_in_loop(pairs: list[tuple[asyncio.Future[Any], object]]) -> None:
    for future, result in pairs:
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(result, _Raised):
            future.set_exception(result.error)
        elif isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _stop(worker: _Worker, thread: threading.Thread) -> None:
    worker.close()
    if threading.current_thread() is not thread:  # the finalizer may run in the thread itself
        thread.join()
