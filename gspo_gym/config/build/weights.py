"""Builders of the weight sync, of the canary that attests new weights, and of the alarm on engine mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from gspo_gym.config.apps import WeightSyncSection
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import Engine, UpdateKind
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.learning.correction import MismatchAlarm
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.attestation import TOLERANCES, Canary, Score, canary_prompts
from gspo_gym.policy.load import Policy
from gspo_gym.policy.lora import is_adapter
from gspo_gym.policy.staging import Handover, Staging, num_weight_bytes, staging_root
from gspo_gym.policy.weight_sync import Target, WeightSync, choose_kind
from gspo_gym.run.recording import RunRecorder
from gspo_gym.types import Float32Array, Sampling


def build_weight_sync(config: RunConfig, policy: Policy, engine: Engine, recorder: RunRecorder) -> WeightSync:
    """Return the weight sync of [training.weight_sync]; an engine that can be rebuilt is, under the last weights.

    A canary is asked of every engine that holds separate weights.

    Raises:
        ConfigError: the engine takes new weights in no way that the settings allow.
    """
    asked, max_staleness = config.training.weight_sync or WeightSyncSection(), config.training.max_staleness
    kind = choose_kind(
        engine,
        is_adapter=is_adapter(policy.model),
        mode=asked.mode,
        direct=asked.direct,
        is_handed_over=asked.transfer != "files",
    )
    # Otherwise every update would wait for the longest request.
    in_flight = max_staleness > 0 and "keep" in engine.capabilities.pause_modes
    canary = build_canary(config, policy) if kind != "shared" or max_staleness > 0 else None
    if isinstance(engine, RoutedEngine) and canary is not None:
        engine.attest = canary.check  # of each replica, where a call would reach one of them
    rebuildable = engine if isinstance(engine, RebuildableEngine) else None
    weight_sync = WeightSync(
        [Target(engine, None if rebuildable is None else rebuildable.rebuild)],
        mode="keep" if in_flight else "wait",
        kind=kind,
        staging=_staging(config, policy, kind),
        canary=canary,
        verify_every_k=asked.verify_every_k,
        interval=config.training.weight_sync_interval,
        on_event=lambda name, values: recorder.event(name, values["version"], values),
    )
    # After a crash it comes up with the committed weights, not with those of the start.
    if rebuildable is not None:
        rebuildable.bring_up = weight_sync.restore
    if isinstance(engine, RoutedEngine):
        engine.set_rebuild(partial(_rebuild, weight_sync))
    return weight_sync


async def _rebuild(weight_sync: WeightSync, replica: Engine) -> None:
    # An excluded replica of another kind stays excluded.
    if isinstance(replica, RebuildableEngine):
        await replica.rebuild(weight_sync.restore)


def build_canary(config: RunConfig, policy: Policy) -> Canary:
    """Return a canary of fixed prompts at the rollouts' temperature, scored by the policy's own forward pass."""
    temperature = config.rollout.temperature
    return Canary(
        canary_prompts(policy.tokenizer.vocab_size, config.rollout.max_model_len),
        score=learner_score(policy.model, temperature),
        tolerance=max(TOLERANCES[dtype] for dtype in _dtypes(config)),
        temperature=temperature,
    )


def learner_score(model: nn.Module, temperature: float) -> Score:
    """Return a function that scores whole sequences under the model's present weights, not truncated."""
    computer = LogprobComputer(model, sampling=Sampling(temperature=temperature))
    device = next(model.parameters()).device

    @torch.no_grad()
    def score(rows: Sequence[Sequence[int]]) -> Sequence[Float32Array]:
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        attention = torch.arange(longest, device=device) < torch.tensor([[len(row)] for row in rows], device=device)
        actions = attention.clone()
        actions[:, 0] = False  # the first token has no logprob
        logprobs = computer.compute(ids, attention, actions).logprobs.float().cpu().numpy()
        return [values[1 : len(row)] for values, row in zip(logprobs, rows, strict=True)]

    return score


def build_alarm(config: RunConfig) -> MismatchAlarm | None:
    """Return the alarm of correction.max_engine_gap; None if it is absent and the logprobs differ on purpose."""
    # They do where other weights sample, where the engine truncates or reshapes a distribution that the learner scores
    # whole, and where an adapter's dropout acts while the learner scores.
    if config.rollout.rescore:
        return None
    rollout, lora, max_gap = config.rollout, config.training.lora, config.correction.max_engine_gap
    sampling = rollout.sampling
    has_dropout = lora is not None and lora.dropout > 0
    if max_gap is None and (
        sampling.is_reshaped or has_dropout or (sampling.is_truncated and not config.training.score_truncated)
    ):
        return None
    return MismatchAlarm(max_gap=max_gap, has_16_bits=set(_dtypes(config)) != {"float32"})


def _staging(config: RunConfig, policy: Policy, kind: UpdateKind) -> Staging | Handover | None:
    if kind == "shared":
        return None
    if kind == "transfer":
        return Handover(policy, dtype=_dtypes(config)[1])
    # Each version that a request in flight may have, and the next one.
    keep = config.training.max_staleness + 2
    num_bytes = (keep + 1) * num_weight_bytes(policy.model)  # the oldest goes one commit later
    in_memory = (config.training.weight_sync or WeightSyncSection()).direct
    root = staging_root(config.run_folder, in_memory=in_memory, num_bytes=num_bytes)
    return Staging(policy, root, keep=keep, dtype=_dtypes(config)[1])


def _dtypes(config: RunConfig) -> tuple[str, str]:
    own = config.model.dtype
    # vLLM may compute in another dtype than the learner's.
    return own, getattr(config.vllm, "dtype", None) or own
