"""Episodes played on a trainable engine, and how far its logprobs are from a plain forward of the learner's model.

Shared by the tests of engines. Knows nothing of how an engine computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gspo_gym.engine.base import Engine, PauseMode, SamplingParams, WeightUpdate
from gspo_gym.types import Completion

Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Turn:
    """One call of an episode: what went in and what came out."""

    prompt: list[int]
    completion: Completion


def plain_logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> Logprobs:
    """[T] logprobs of the sampled tokens by a plain forward of transformers: no cache, no batch, temperature 1."""
    tokens = torch.tensor([[*prompt, *sampled]], dtype=torch.long)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0].double(), dim=-1)
    return logprobs[torch.arange(len(prompt) - 1, tokens.shape[1] - 1), tokens[0, len(prompt) :]].numpy()


def worst_gap(model: Any, turns: Sequence[Turn]) -> float:
    """The largest difference between the engine's logprobs and those of a plain forward, nats."""
    gaps = [
        np.abs(plain_logprobs(model, turn.prompt, turn.completion.token_ids.tolist()) - turn.completion.logprobs).max()
        for turn in turns
    ]
    return float(max(gaps))


async def play(engine: Engine, seed: int, *, num_turns: int = 3, prompt_length: int = 140) -> list[Turn]:
    """An episode whose prompts extend each other; long enough for vLLM's blocks of 128 tokens on the CPU."""
    prompt = np.random.default_rng(seed).integers(0, 256, prompt_length).tolist()
    turns = []
    for number in range(num_turns):
        sampling = SamplingParams(max_tokens=24, stop_token_ids=(), seed=1000 * seed + number)
        completion = await engine.generate(prompt, sampling, session_id=f"episode-{seed}")
        turns.append(Turn(prompt, completion))
        prompt = [*prompt, *completion.token_ids.tolist(), 10, 20 + number]  # the last two: what an environment says
    return turns


async def play_many(engine: Engine, seeds: Sequence[int]) -> list[Turn]:
    """Episodes at once, all turns of all of them."""
    return [turn for turns in await asyncio.gather(*(play(engine, seed) for seed in seeds)) for turn in turns]


def nudge(model: Any, seed: int, scale: float = 0.02) -> None:
    """Add noise to all trainable weights, as an optimizer would, but more."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * scale)


async def publish(engine: Engine, update: WeightUpdate, mode: PauseMode = "wait") -> None:
    """The steps of an update, without attestation."""
    await engine.pause(mode)
    await engine.apply_weights(update)
    await engine.resume(update.version)
