"""Where sampling ends: `python -m benchmarks decode`.

Our engine beside a loop written by hand for this one architecture and shape, without requests, seeds, sessions or a
weight check: equal prompts, keys and values in place, nothing that stops early. And a token of episodes of 32 turns
beside one of 4 turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from rich.console import Console
from torch import Tensor

from benchmarks.engines import EpisodePlan, Sample, measure, sample_with_local_engine
from benchmarks.record import Value, render
from gspo_gym.config.build.threads import computing_elsewhere
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


def sample_by_hand(model: Any, plans: Sequence[EpisodePlan]) -> int:
    """The loop, over equal episodes of one turn; returns tokens sampled."""
    num_tokens = plans[0].num_sampled[0]
    prompts = torch.tensor([plan.prompt for plan in plans])
    return Loop(model, len(plans), prompts.shape[1] + num_tokens).sample(prompts, num_tokens, seed=0).numel()


def run_decode(base: str, *, repeats: int, nums_sequences: tuple[int, ...] = (64, 256)) -> list[Value]:
    """Measure and print; return costs beside those of the loop, and of the many turns beside the few.

    Raises:
        UsageError: the model is no Qwen3.
    """
    with computing_elsewhere("cpu"):
        model = load_policy(base).model
    values = []
    for num in nums_sequences:
        plans = make_episodes(num, num_turns=1, num_sampled=_SAMPLED, num_observed=0)
        ours, by_hand = measure(model, plans, repeats=repeats, engines=_BOTH).values()
        name = f"{num} x {_SAMPLED} tokens, {base}"
        values.append(Value(name, ours.rounds, by_hand.rounds, "a loop by hand", goal=0.85))
    num = nums_sequences[0]
    many, few = (make_episodes(num, num_turns=turns, num_sampled=_PART, num_observed=_PART) for turns in (_MANY, _FEW))
    shapes: dict[str, Sample] = {
        "many": lambda model, _: sample_with_local_engine(model, many),
        "few": lambda model, _: sample_with_local_engine(model, few),
    }
    costs = [
        tuple(1000 * seconds / run.sampled_tokens for seconds in run.rounds)
        for run in measure(model, (), repeats=repeats, engines=shapes).values()
    ]
    name = f"a token of {num} episodes of {_MANY} turns, {base}"
    values.append(Value(name, costs[0], costs[1], f"of {_FEW} turns", unit="ms", goal=1 / 1.3))
    Console(width=160).print(f"medians of {repeats} round(s)", render(values))
    return values


_BOTH: Mapping[str, Sample] = {"ours": sample_with_local_engine, "by hand": sample_by_hand}
