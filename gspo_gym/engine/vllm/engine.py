"""vLLM in this process as an engine: its scheduler and its model are in child processes, its interface is here.

Tried with vLLM 0.32 on the CPU; remarks on other devices are from its source. vLLM is imported when an engine starts,
and only in this folder. Prompt logprobs are not used, because they bypass the prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

from gspo_gym.base.leftovers import all_end_with_us, descendants, end_with_us, has_ended
from gspo_gym.engine.base import (
    Capabilities,
    EngineHealth,
    PauseMode,
    SamplingParams,
    UpdateKind,
    WeightUpdate,
    num_tokens_to_sample,
    refuse_schema,
    require_vocabulary,
    token_list,
)
from gspo_gym.engine.gate import GatedEngine
from gspo_gym.engine.vllm.adapters import Adapters, weights_folder
from gspo_gym.engine.vllm.commands import as_engine_error, commanding
from gspo_gym.engine.vllm.requests import completion_of, finish_reason_of, padding_ids, sampling_fields, versions_of
from gspo_gym.engine.vllm.settings import SessionRanks, VllmSettings, environment
from gspo_gym.engine.vllm.transfer import WeightTransfer
from gspo_gym.engine.vllm.worker import RELOAD_METHOD
from gspo_gym.errors import ConfigError, EngineError, MissingExtraError
from gspo_gym.types import Completion, TokenIds

# Every update has ten lines in vLLM's log, which would bury those of a run, unless the user has set this variable.
_LOG_LEVEL = "VLLM_LOGGING_LEVEL"

# sha256 of nothing. On the CPU vLLM repacks linear layers and empties the original, so their digests say nothing.
_EMPTY_DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

# For vLLM's processes to end by themselves; on the CPU they need more than vLLM's own 5 seconds.
_SHUTDOWN_SECONDS = 30.0


class VllmEngine(GatedEngine):
    """Samples with vLLM's `AsyncLLM`. It belongs to the event loop that it was started in.

    A prompt is salted with the weight version: keys and values computed under other weights are never found again, and
    turns of one version extend the cached prefix. In flight ("keep") a whole-model update drops the caches of requests,
    which are computed again under the new weights, and every token carries the version that sampled it; an adapter
    update leaves requests in flight on the adapter that they began with.

    Example::

        engine = await VllmEngine.start(VllmSettings(model="runs/policy", max_model_len=4096))
        completion = await engine.generate([72, 105], SamplingParams(max_tokens=5, stop_token_ids=(), seed=0))
        await engine.close()
    """

    def __init__(self, llm: Any, settings: VllmSettings) -> None:
        """Use `start`. `llm` is a running `AsyncLLM` (Any: untyped)."""
        super().__init__()
        self._llm = llm
        self._settings = settings
        self._vocab_size = int(llm.model_config.get_vocab_size())
        self._padding_ids = padding_ids(settings.num_token_ids, self._vocab_size)
        self._version = 0  # of what is loaded; ahead of the gate's from an update to its commit
        self._adapters = Adapters(llm)
        self._transfer = WeightTransfer(llm, settings) if settings.transfer != "files" else None
        self._ranks = SessionRanks(settings.data_parallel_size)
        self._request_ids = itertools.count()
        self._in_flight: set[asyncio.Task[Completion]] = set()
        self._is_asleep = False
        self._is_closed = False
        self._has_checksums = False
        self._processes: list[int] = []

    @classmethod
    async def start(cls, settings: VllmSettings) -> VllmEngine:
        """Start vLLM and load the model; takes ten seconds at least.

        Raises:
            MissingExtraError: vLLM is not installed.
            EngineError: it did not start.
        """
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise MissingExtraError(f"the vLLM engine needs: pip install 'gspo-gym[vllm]' ({error})") from error
        if _LOG_LEVEL not in os.environ:
            logging.getLogger("vllm").setLevel("ERROR")  # here; its processes are told by their environment
        with as_engine_error("vLLM did not start"), environment({**settings.environment(), _LOG_LEVEL: "ERROR"}):
            earlier = set(multiprocessing.active_children())
            with all_end_with_us():
                engine = cls(AsyncLLM.from_engine_args(AsyncEngineArgs(**settings.engine_args())), settings)
        # vLLM's processes outlive a killed parent: seen with two copies, minutes later.
        # Only vLLM's are told: an environment's worker that began meanwhile ends earlier, and its number is used again.
        for child in set(multiprocessing.active_children()) - earlier:
            assert child.pid is not None
            engine._processes += [child.pid, *descendants(child.pid)]
        for pid in engine._processes:
            end_with_us(pid)
        await engine._prepare()
        return engine

    @property
    def capabilities(self) -> Capabilities:
        # An engine with adapters takes only adapters: they would not fit a base model that is read again.
        kinds: tuple[UpdateKind, ...] = ("adapter",) if self._settings.max_lora_rank else ("full",)
        if self._transfer is not None:
            kinds += ("transfer",)
        return Capabilities(
            is_trainable=True,
            seeds_per_request=True,
            reuses_prefixes=self._settings.enable_prefix_caching,
            max_model_len=self._settings.max_model_len,
            update_kinds=kinds,
            pause_modes=("wait", "keep"),
            has_checksums=self._has_checksums,
            structured_output=self._settings.structured_output,
            can_sleep=True,
            num_copies=self._settings.data_parallel_size,
        )

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
            ConfigError: a temperature that vLLM does not have: in (0, 0.01) or above 2; a JSON schema without
                `VllmSettings.structured_output`, or `min_tokens` with it.
            ContextOverflowError: the prompt leaves no room for a single token.
            EngineTimeoutError, EnginePoisonedError: see `Engine.generate`.
            EngineError: a prompt token is not in the vocabulary, vLLM answered what cannot be true, gave the request
                up, or is closed or dead.
        """
        prompt = token_list(prompt_token_ids)
        max_new = num_tokens_to_sample(len(prompt), sampling, self._settings.max_model_len)
        require_vocabulary(min(prompt), max(prompt), self._vocab_size)
        if not self._settings.structured_output:
            refuse_schema(sampling, "VllmEngine without VllmSettings.structured_output")
        elif sampling.min_tokens > 0:
            raise ConfigError("SamplingParams.min_tokens: expected 0 with VllmSettings.structured_output, see there")
        fields = sampling_fields(sampling, max_new, padding_ids=self._padding_ids)
        rank = self._ranks.of(session_id)
        async with self._gate.admit(session_id, deadline_seconds):
            # A task of its own, which `close` can cancel without cancelling the caller.
            call = asyncio.ensure_future(self._sample(prompt, fields, sampling.stop_token_ids, rank))
            self._in_flight.add(call)
            try:
                return await call
            except asyncio.CancelledError:
                # Not the caller's cancellation but that of `close`.
                if call.cancelled() and self._is_closed and not _is_cancelled():
                    raise EngineError("the engine was closed") from None
                raise
            finally:
                self._in_flight.discard(call)

    async def end_session(self, session_id: str) -> None:
        """Forget which copy of the model has the session; its cache is the first to go when vLLM needs the room."""
        self._ranks.forget(session_id)

    async def pause(self, mode: PauseMode) -> None:
        """Admit no calls; requests in flight end first ("wait") or freeze ("keep"). Then no device is at work."""
        await super().pause(mode)
        async with commanding(self._llm, "pause"):
            # Caches are dropped by `apply_weights`, which knows whether what is in flight must be computed again.
            await self._llm.pause_generation(mode=mode, clear_cache=False)

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Read a whole model or an adapter from its folder, or take a model's tensors; see `Engine.apply_weights`.

        Raises:
            ConfigError: a kind that is not in the capabilities.
            EngineError: the engine is not paused or asleep, or the weights cannot be loaded.
        """
        self._require_kind(update)
        self._gate.require_paused()
        if self._is_asleep:
            raise EngineError("apply_weights: the engine is asleep; call wake_up first")
        async with commanding(self._llm, f"the weights of version {update.version} could not be loaded"):
            if update.kind == "adapter":
                await self._adapters.load(update)
            else:
                await self._replace_model(update)
            # Requests in flight and probes of the new weights go on from here. The gate lets no answer out before
            # `resume`, and no other calls in.
            self._version = update.version
            await self._let_run()

    async def checksums(self) -> Mapping[str, str]:
        """Return the sha256 of each tensor, by rank and vLLM's name; {} without `capabilities.has_checksums`.

        vLLM fuses tensors, so the digests can be compared with those of another vLLM engine, but not with files. On the
        CPU its linear layers are packed and have none: they must be attested by logprobs. Adapters have none.
        """
        if not self._has_checksums:
            return {}
        async with commanding(self._llm, "checksums"):
            return await self._digests()

    async def resume(self, version: int) -> None:
        """Commit; see `Engine.resume`. Without `apply_weights` before it, the weights go on under a new version."""
        self._gate.require_paused()
        if self._is_asleep:
            raise EngineError("resume: the engine is asleep; call wake_up first")
        async with commanding(self._llm, "resume"):
            self._version = version
            await self._let_run()
        self._gate.resume(version)

    async def sleep(self) -> None:
        """Lend the device to the learner: wait for calls in flight, then keep only the weights, in host memory.

        Until `wake_up` calls wait and weights cannot be applied. Without `VllmSettings.enable_sleep_mode`, as always on
        the CPU, no memory is given back.
        """
        self._gate.pause()
        await self._gate.drained()
        async with commanding(self._llm, "sleep"):
            await self._llm.sleep(level=1 if self._settings.enable_sleep_mode else 0, mode="wait")
        self._is_asleep = True

    async def wake_up(self) -> None:
        """Take the memory back and admit again, under the same weights.

        Raises:
            EngineError: it is not asleep, or does not wake up.
        """
        if not self._is_asleep:
            raise EngineError("wake_up: the engine is not asleep")
        async with commanding(self._llm, "wake_up"):
            is_awake = await self._llm.wake_up(None if self._settings.enable_sleep_mode else ["scheduling"])
        if not is_awake:
            raise EngineError("wake_up: vLLM did not get all of its memory back")
        self._is_asleep = False
        self._gate.resume(self._gate.weight_version)

    async def health(self) -> EngineHealth:
        """Return the state; see `Engine.health`."""
        is_dead = not self._is_closed and self._llm.errored
        return self._gate.health("vLLM's engine process died" if is_dead else None)

    async def close(self) -> None:
        """End vLLM's processes. Calls in flight, and all later ones, raise EngineError."""
        if self._is_closed:
            return
        self._is_closed = True
        self._gate.close()
        for call in self._in_flight:
            call.cancel()  # they would wait for answers that never come
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        if (handler := self._llm.output_handler) is not None:  # it would report the end as a failure
            handler.cancel()
            await asyncio.wait([handler])
        if self._transfer is not None:
            await self._transfer.close()
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_SECONDS)
        for pid in self._processes:
            has_ended(pid)
        # Let go of it while modules still exist: its `__del__` needs them.
        self._llm, self._adapters, self._transfer = None, Adapters(None), None

    async def _prepare(self) -> None:
        # Else `min_tokens` would also withhold the end tokens of generation_config.json, which no request stops at.
        self._llm.input_processor.generation_config_fields = {}
        try:
            async with commanding(self._llm, "vLLM did not start"):
                await self._llm.update_weight_version(str(self._version))
                self._has_checksums = self._settings.max_lora_rank == 0 and bool(await self._digests())
        except BaseException:
            await self.close()
            raise

    async def _sample(
        self, prompt: list[int], fields: dict[str, Any], stop_token_ids: tuple[int, ...], rank: int | None
    ) -> Completion:
        version = self._version  # a kept call may end under a later one
        adapter = self._adapters.begin()
        where, name = {"lora_request": adapter, "data_parallel_rank": rank}, f"gspo-gym-{next(self._request_ids)}"
        try:
            with as_engine_error("generate"):
                output = await _ask(self._llm, prompt, fields, request_id=name, salt=f"policy-v{version}", **where)
        finally:
            with contextlib.suppress(Exception):  # vLLM is dead, and the call has failed already
                await self._adapters.end(adapter)
        tokens = list(output.token_ids)
        # If there were fewer logprobs than tokens, each would be that of another token.
        if output.logprobs is None or list(output.logprobs.token_ids) != tokens:
            raise EngineError(f"vLLM: expected a logprob of each of {len(tokens)} sampled tokens, got others or none")
        reason = finish_reason_of(
            output.finish_reason, tokens, stop_token_ids=stop_token_ids, max_new=fields["max_tokens"]
        )
        # A request keeps its adapter to the end, and the weights under it never change.
        spans = None if self._settings.max_lora_rank else output.weight_versions
        versions = [version] * len(tokens) if self._settings.max_lora_rank else versions_of(spans, len(tokens))
        return completion_of(
            tokens, output.logprobs.logprobs, finish_reason=reason, versions=versions, vocab_size=self._vocab_size
        )

    async def _let_run(self) -> None:
        await self._llm.update_weight_version(str(self._version))
        await self._llm.resume_generation()

    async def _replace_model(self, update: WeightUpdate) -> None:
        if self._transfer is not None and update.tensors is not None:
            await self._transfer.send(update.tensors)
        else:
            assert update.folder is not None
            folder = weights_folder(update.folder, self._settings.model_folder)
            await self._llm.collective_rpc(RELOAD_METHOD, kwargs={"weights_path": str(folder)})
        # Also preempts what is frozen, which is computed again. Salted or not, nothing of the old weights is kept.
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM kept blocks of its prefix cache that were computed under earlier weights")

    async def _digests(self) -> dict[str, str]:
        digests: dict[str, str] = {}
        for worker in await self._llm.compute_weight_checksums():
            digests |= {name: digest for name, digest in worker.items() if digest != _EMPTY_DIGEST}
        return digests


async def _ask(llm: Any, prompt: list[int], fields: dict[str, Any], *, request_id: str, salt: str, **where: Any) -> Any:
    """Return vLLM's `CompletionOutput` (Any: untyped); `where` names adapter and copy. Cancelling aborts it."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    schema = fields.pop("structured_outputs", None)
    params = VllmSamplingParams(
        **fields,
        structured_outputs=None if schema is None else StructuredOutputsParams(**schema),
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    answers = llm.generate(tokens_input(prompt, cache_salt=salt), params, request_id, **where)
    # Closed here, because a generator that is dropped aborts its request only when it is collected.
    async with contextlib.aclosing(answers):
        outputs = [output async for answer in answers for output in answer.outputs]
    if len(outputs) != 1:
        raise EngineError(f"vLLM: expected one completion, got {len(outputs)}")
    return outputs[0]


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
