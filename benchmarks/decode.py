"""Where sampling ends: `python -m benchmarks decode`.

Our engine beside a loop written by hand for this one architecture and shape, without requests, seeds, sessions or a
weight check: equal prompts, keys and values in place, nothing that stops early. And a token of episodes of 32 turns
beside one of 4 turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from rich.console import Console
from torch import Tensor

from benchmarks.engines import EpisodePlan, sample_episodes
from benchmarks.record import Value, render
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.errors import UsageError
from gspo_gym.policy.load import load_policy
from gspo_gym.seeding import generator

_PROMPT, _SAMPLED = 64, 128  # tokens of an episode of one turn
_PART = 16  # tokens sampled and observed a turn, in episodes of many
_MANY, _FEW = 32, 4  # turns


class Loop:
    """Qwen3 by hand. B = sequences, T = new tokens of each, H and K = query and key heads, D = head size.

    Args:
        model: a Qwen3ForCausalLM in float32 (Any: transformers is untyped).
    """

    def __init__(self, model: Any, num_sequences: int, max_length: int) -> None:
        config = model.config
        if config.model_type != "qwen3":
            raise UsageError(f"the loop by hand is of Qwen3, got a {config.model_type}; name another --model")
        self._model, self._eps, self._size = model, config.rms_norm_eps, config.head_dim
        shape = (config.num_hidden_layers, num_sequences, config.num_key_value_heads, max_length, config.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(max_length)[None])
        self._cos, self._sin = cos[0], sin[0]

    @torch.inference_mode()
    def sample(self, prompts: Tensor, num_tokens: int, seed: int) -> Tensor:
        """Return [B, num_tokens] tokens sampled after `prompts` [B, T] at temperature 1."""
        draws = torch.Generator().manual_seed(seed)
        logits, sampled, start = self.logits(prompts, 0), [], prompts.shape[1]
        for number in range(num_tokens):
            sampled.append(torch.multinomial(logits.softmax(-1), 1, generator=draws))
            if number + 1 < num_tokens:
                logits = self.logits(sampled[-1], start + number)
        return torch.cat(sampled, 1)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, start: int) -> Tensor:
        """Return the logits [B, V] after `token_ids` [B, T], which stand at `start` and are kept."""
        stop = start + token_ids.shape[1]
        cos, sin = self._cos[start:stop], self._sin[start:stop]
        x = self._model.model.embed_tokens(token_ids)
        for number, layer in enumerate(self._model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            h = self._norm(x, layer.input_layernorm)
            query, key, value = (
                project(h).unflatten(-1, (-1, self._size)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query = self._turned(self._norm(query, attention.q_norm), cos, sin)
            keys, values = self._keys[number, :, :, :stop], self._values[number, :, :, :stop]
            keys[:, :, start:] = self._turned(self._norm(key, attention.k_norm), cos, sin)
            values[:, :, start:] = value
            x = x + attention.o_proj(self._attend(query, keys, values))
            h = self._norm(x, layer.post_attention_layernorm)
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)).mul_(mlp.up_proj(h)))
        logits: Tensor = self._model.lm_head(self._norm(x[:, -1], self._model.model.norm))
        return logits

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], norm.weight, self._eps)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if query.shape[2] > 1:
            output = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:  # query heads of one key head as if they were positions, so that no key is repeated
            grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
            output = F.scaled_dot_product_attention(grouped, keys, values).flatten(1, 2).unsqueeze(2)
        return output.transpose(1, 2).flatten(2)


def make_episodes(num_episodes: int, *, num_turns: int, num_sampled: int, num_observed: int) -> list[EpisodePlan]:
    """Return episodes of equal shape, with prompts of their own; tokens are bytes."""
    plans = []
    for number in range(num_episodes):
        draws = generator(0, "decode", number)
        observations = tuple(tuple(draws.integers(0, 256, num_observed).tolist()) for _ in range(num_turns))
        prompt = tuple(draws.integers(0, 256, _PROMPT).tolist())
        plans.append(EpisodePlan(prompt, (num_sampled,) * num_turns, observations))
    return plans


def run_decode(base: str, *, repeats: int, nums_sequences: tuple[int, ...] = (64, 256)) -> list[Value]:
    """Measure and print; return costs beside those of the loop, and of the many turns beside the few.

    Raises:
        UsageError: the model is no Qwen3.
    """
    model = load_policy(base).model
    values = []
    for num in nums_sequences:
        name = f"{num} x {_SAMPLED} tokens, {base}"
        ours, by_hand = _rounds(_ours(model, num, 1, _SAMPLED), _by_hand(model, num), repeats)
        values.append(Value(name, ours, by_hand, "a loop by hand", goal=0.85))
    num = nums_sequences[0]
    many, few = _rounds(_ours(model, num, _MANY, _PART), _ours(model, num, _FEW, _PART), repeats)
    per_token = [tuple(1000 * seconds / (num * turns * _PART) for seconds in each) for each, turns in
                 ((many, _MANY), (few, _FEW))]  # fmt: skip
    name = f"a token of {num} episodes of {_MANY} turns, {base}"
    values.append(Value(name, per_token[0], per_token[1], f"of {_FEW} turns", unit="ms", goal=1 / 1.3))
    Console(width=160).print(f"medians of {repeats} round(s)", render(values))
    return values


def _ours(model: Any, num: int, num_turns: int, num_sampled: int) -> Callable[[], object]:
    num_observed = 0 if num_turns == 1 else _PART
    plans = make_episodes(num, num_turns=num_turns, num_sampled=num_sampled, num_observed=num_observed)

    async def play() -> None:
        engine = LocalEngine(model, max_model_len=plans[0].num_tokens + 1, max_batch_size=num)
        try:
            await sample_episodes(engine, plans)
        finally:
            await engine.close()

    return lambda: asyncio.run(play())


def _by_hand(model: Any, num: int) -> Callable[[], object]:
    plans = make_episodes(num, num_turns=1, num_sampled=_SAMPLED, num_observed=0)
    prompts = torch.tensor([plan.prompt for plan in plans])
    return lambda: Loop(model, num, _PROMPT + _SAMPLED).sample(prompts, _SAMPLED, seed=0)


def _rounds(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of both, which take turns, after a round that is not timed."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for work, kept in zip((ours, peer), seconds, strict=True):
            start = time.perf_counter()
            work()
            if number:
                kept.append(time.perf_counter() - start)
    return tuple(seconds[0]), tuple(seconds[1])
