"""The interface of an engine: token ids in, a `Completion` out, and weight updates as transactions.

Callers ask `capabilities`, never a class name. Engines are asynchronous because hundreds of episodes wait on one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import numpy as np

from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError
from gspo_gym.types import Completion, Sampling, TokenIds

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Sampling):
    """The parameters of one completion. There are no hidden defaults: these fields are all that is applied.

    Attributes:
        max_tokens: most tokens to sample, the stop token included.
        stop_token_ids: sampling any of these ends the completion; it is kept as the last token.
        seed: the same prompt, weights and seed sample the same tokens.
        json_schema: JSON text of a schema that the sampled text obeys, if it is not cut off; None: any text. Only where
            `Capabilities.structured_output`; logprobs are then of the narrowed distribution.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    json_schema: str | None = None

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        if self.max_tokens < 1:
            raise ConfigError(f"SamplingParams.max_tokens: expected at least 1, got {self.max_tokens}")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"SamplingParams.min_tokens: expected 0 <= min_tokens <= max_tokens = {self.max_tokens}, got "
                f"{self.min_tokens}"
            )

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        seed: int,
        json_schema: str | None = None,
    ) -> SamplingParams:
        """Return the parameters of one completion; it may be shorter than `sampling.min_tokens` if `max_tokens` is."""
        sampling_values = sampling.values() | {"min_tokens": min(sampling.min_tokens, max_tokens)}
        return cls(
            **sampling_values, max_tokens=max_tokens, stop_token_ids=stop_token_ids, seed=seed, json_schema=json_schema
        )


# The way by which new weights reach an engine: it shares the learner's ("shared"), reads a folder with all of them
# (transformers layout, "full") or a LoRA adapter (PEFT layout, "adapter"), or is handed all tensors ("transfer").
UpdateKind = Literal["shared", "full", "adapter", "transfer"]

# The fate of requests in flight when weights change: they finish under the old ones first ("wait"), or freeze and go on
# under the new ones, with everything that was computed under the old ones computed again ("keep").
PauseMode = Literal["wait", "keep"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The promises of an engine.

    Attributes:
        is_trainable: it returns exact token ids and the logprobs of the sampling distribution.
        seeds_per_request: `SamplingParams.seed` decides the sample.
        reuses_prefixes: a session's earlier tokens are not computed again.
        max_model_len: longest prompt plus completion, in tokens.
        logprob_mode: the distribution of the logprobs: the one sampled from ("processed"), the model's before
            temperature and truncation ("raw"), or there are none.
        reports_versions: `Completion.weight_version` is known for every token; otherwise it is -1.
        update_kinds: the ways by which new weights can reach it; () if its weights never change.
        pause_modes: what it can do with requests in flight.
        has_checksums: `checksums` answers, by which an update can be attested byte by byte.
        structured_output: `SamplingParams.json_schema` is obeyed.
        can_sleep: it is a `SleepingEngine`.
        num_copies: of the model, each with separate weights. A session stays with one, and `num_copies` sessions,
            begun one after another, reach them all.
    """

    is_trainable: bool
    seeds_per_request: bool
    reuses_prefixes: bool
    max_model_len: int
    logprob_mode: Literal["processed", "raw", "none"] = "processed"
    reports_versions: bool = True
    update_kinds: tuple[UpdateKind, ...] = ("shared",)
    pause_modes: tuple[PauseMode, ...] = ("wait",)
    has_checksums: bool = False
    structured_output: bool = False
    can_sleep: bool = False
    num_copies: int = 1


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The name, type and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of one version of a model.

    All of them, under the names that they have in the model's files; or, for an engine that was made with the rest, the
    trained ones, under the names that they have in the model. An EngineError, raised at the first of them and at the
    end, says that they are no longer there.
    """

    @property
    def device(self) -> torch.device: ...

    def metadata(self) -> Sequence[TensorMeta]:
        """Describe the tensors in the order of iteration, without computing any of them."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights, not yet in any engine. Those in a folder are written completely, and never written again.

    Attributes:
        version: that tokens sampled under them carry.
        kind: the way by which they reach the engine.
        folder: that holds them, for "full" and "adapter".
        checksums: sha256 of each file in the folder, by name; as `checksums` of the engine where it has them.
        tensors: to be handed over, for "transfer".
    """

    version: int
    kind: UpdateKind
    folder: Path | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    tensors: TensorSource | None = None

    def __post_init__(self) -> None:
        if (self.folder is not None) != (self.kind in ("full", "adapter")):
            raise ConfigError(
                f'WeightUpdate {self.version}: expected a folder with kind "full" or "adapter" and no other, got '
                f"{self.folder} with {self.kind!r}"
            )
        if (self.tensors is not None) != (self.kind == "transfer"):
            raise ConfigError(f'WeightUpdate {self.version}: expected tensors with kind "transfer" and no other')


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The state of an engine: `reason` says why it is dead or poisoned, None if it is neither."""

    is_alive: bool
    is_poisoned: bool
    num_in_flight: int
    weight_version: int
    reason: str | None = None


class Engine(Protocol):
    """The only place where a model generates.

    Weights change by a transaction of three steps, `pause`, `apply_weights` and `resume`, with an attestation before
    the last (`gspo_gym.policy.weight_sync`). A step that fails poisons the engine.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def weight_version(self) -> int:
        """The version that samples now: 0 at first, then the last one committed."""

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion; while the engine is paused, wait.

        `session_id` names the episode: prompts of one session usually extend each other, and an engine may keep what it
        computed. It never changes the result. Cancelling the call frees everything that it held.

        Raises:
            ContextOverflowError: the prompt leaves no room for a single token.
            EngineTimeoutError: no completion within `deadline_seconds`, waiting included.
            EnginePoisonedError: a weight update failed; the engine must be rebuilt.
            EngineError: anything else that kept it from answering.
        """

    async def abort(self, session_id: str) -> None:
        """Give up the session's calls in flight: they raise EngineError. Unknown sessions are fine."""

    async def end_session(self, session_id: str) -> None:
        """Forget a session; unknown ones are fine."""

    async def forget_ended(self) -> None:
        """Use nothing again that was computed for sessions which have ended.

        What is sampled next is then, to the last digit, what a fresh engine would sample. Engines that do not promise
        this, such as servers, do nothing. Never raises.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Begin an update: new calls wait until `resume`; `mode` decides the fate of those in flight.

        Raises:
            ConfigError: a mode that is not in the capabilities.
            EnginePoisonedError, EngineError: it is poisoned, closed or dead.
        """

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Load staged weights into the paused engine; nothing computed under earlier weights is used again.

        Afterwards, calls made within `gate.probing` are answered under the new weights, which attests them; all others
        wait for `resume`, and so do the answers of calls that were kept in flight.

        Raises:
            EngineError: it is not paused, or the weights cannot be loaded; the engine may then hold half of them.
        """

    async def checksums(self) -> Mapping[str, str]:
        """Return the digest of each tensor the engine holds, by name; {} unless `capabilities.has_checksums`."""

    async def resume(self, version: int) -> None:
        """Commit: calls go on, and their samples carry `version`.

        Raises:
            EnginePoisonedError: it was poisoned meanwhile.
        """

    def poison(self, reason: str) -> None:
        """Never answer again: every call, waiting or in flight or later, raises EnginePoisonedError."""

    async def health(self) -> EngineHealth:
        """Return the state of the engine; never raises."""

    async def close(self) -> None:
        """Release everything; later calls raise EngineError. Closing twice is fine."""


class SleepingEngine(Engine, Protocol):
    """An engine that can lend the learner the memory that it shares with it; see `Capabilities.can_sleep`."""

    async def sleep(self) -> None:
        """Wait for calls in flight, and give back memory; calls then wait until `wake_up`.

        Raises:
            EngineError: it is poisoned, closed or dead, or did not fall asleep; it must be rebuilt.
        """

    async def wake_up(self) -> None:
        """Take the memory back and admit calls again, under the same weights.

        Raises:
            EngineError: it is not asleep, or did not wake up; it must be rebuilt.
        """


def require_sleeping(engine: Engine) -> SleepingEngine:
    """Return the engine if it can sleep.

    Raises:
        ConfigError: it cannot.
    """
    if not engine.capabilities.can_sleep:
        raise ConfigError("expected an engine that can sleep (vLLM in this process), got one that cannot")
    return cast(SleepingEngine, engine)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the sha256 of a tensor's bytes."""
    import torch  # here: it is slow to load, and most of this file needs none

    # As bytes: numpy has no bfloat16.
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def token_list(token_ids: TokenIds) -> list[int]:
    """Return token ids as Python's integers, as JSON and vLLM want them."""
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else [int(token) for token in token_ids]


def refuse_schema(sampling: SamplingParams, engine: str) -> None:
    """Refuse a JSON schema, in engines without `Capabilities.structured_output`.

    Raises:
        ConfigError: there is a schema.
    """
    if sampling.json_schema is not None:
        raise ConfigError(
            f"{engine} cannot obey SamplingParams.json_schema: leave it out, or sample with vLLM and structured_output"
        )


def require_vocabulary(lowest: int, highest: int, vocab_size: int) -> None:
    """Refuse a prompt with tokens outside the vocabulary.

    Raises:
        EngineError: there are some.
    """
    if not 0 <= lowest <= highest < vocab_size:
        raise EngineError(f"generate: prompt tokens must be in [0, {vocab_size}), got {lowest}..{highest}")


def num_tokens_to_sample(prompt_length: int, sampling: SamplingParams, max_model_len: int) -> int:
    """Return how many tokens a request may sample: `max_tokens`, or the rest of the context if that is less.

    Raises:
        ContextOverflowError: the prompt leaves no room for a single token.
        EngineError: the prompt is empty, so there is nothing to sample from.

    >>> num_tokens_to_sample(10, SamplingParams(max_tokens=8, stop_token_ids=(), seed=0), max_model_len=16)
    6
    """
    if prompt_length < 1:
        # An empty prompt has no logits for a first token.
        raise EngineError("generate: expected a prompt of at least one token, got none")
    if prompt_length >= max_model_len:
        raise ContextOverflowError(
            f"generate: a prompt of {prompt_length} tokens leaves no room in a context of {max_model_len}"
        )
    return min(sampling.max_tokens, max_model_len - prompt_length)
