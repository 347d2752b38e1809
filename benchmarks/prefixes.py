"""Learning each shared token once against row by row: `python -m benchmarks prefixes [FILE...]`.

Two groups of 8 episodes of 256 tokens that share their first half, and the episodes of each FILE of a run's folder.
Both learners (`training.share_prefixes` true and false) make the same updates, in turn. `trie` is how many times fewer
tokens the trie holds than the rows, `padded` how many times fewer than the padded rows, and `reached` the speed as a
part of `trie`. `--model wide` is a Qwen3 of 28.5M weights with the tiny models' tokens: as in larger models, its time
goes into matrix products.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import Value
from gspo_gym.learning.batching import TokenBatch, TrainBatch, batch_tokens
from gspo_gym.learning.prefixes import build_trie
from gspo_gym.learning.settings import LossSettings, OptimizerSettings, UpdateSettings
from gspo_gym.learning.update import Learner
from gspo_gym.policy.load import load_policy
from gspo_gym.rollout.episode_files import load_episodes

WIDE = "wide"


def run_prefixes(base: str, files: list[str], *, repeats: int) -> list[Value]:
    """Measure and print; return the costs with shared prefixes beside those by rows."""
    model = wide_model() if base == WIDE else load_policy(base).model
    cases = {"2 groups of 8, half shared": make_groups(2, num_tokens=256)}
    cases |= {Path(file).name: batch_tokens(load_episodes(Path(file))) for file in files}
    table = Table("episodes", "rows s", "shared s", "speed", "padded", "trie", "reached")
    values = []
    for name, batch in cases.items():
        rounds = measure(model, with_advantages(batch), repeats=repeats)
        values.append(Value(f"learning from {name}, {base}", rounds["shared"], rounds["rows"], "row by row"))
        seconds = {kind: statistics.median(each) for kind, each in rounds.items()}
        speed = seconds["rows"] / seconds["shared"]
        num_trie = build_trie(batch.token_ids[:, :-1], batch.attention_mask[:, 1:]).num_tokens
        trie = int(batch.attention_mask[:, 1:].sum()) / num_trie
        padded = batch.attention_mask[:, 1:].numel() / num_trie
        numbers = (seconds["rows"], seconds["shared"], speed, padded, trie, speed / trie)
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    Console().print(f"{base}, float32; median of {repeats}")
    Console().print(table)
    return values


def wide_model() -> Any:
    """Return a model of hidden size 768 and 4 layers with random weights (Any: transformers is untyped)."""
    model = load_policy("tiny:qwen3-128-v2").model
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 12, "num_key_value_heads": 6}
    model.config.update({**sizes, "head_dim": 64})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(model.config).eval()


def make_groups(num_groups: int, *, num_tokens: int) -> TokenBatch:
    """Return groups of 8 rows; the members of a group share the first half and sample the second."""
    generator, half = torch.Generator().manual_seed(0), num_tokens // 2
    token_ids = torch.randint(0, 256, (8 * num_groups, num_tokens), generator=generator)
    token_ids[:, :half] = token_ids[::8, :half].repeat_interleave(8, 0)
    everywhere = torch.ones_like(token_ids, dtype=torch.bool)
    sampled = everywhere.clone()
    sampled[:, :half] = False
    turns = torch.where(sampled, 0, -1)
    return TokenBatch(token_ids, everywhere, sampled, turns, torch.arange(len(token_ids)), torch.zeros(token_ids.shape))


def with_advantages(batch: TokenBatch) -> TrainBatch:
    """Return the batch with an advantage of 1 or -1 for every other trajectory."""
    signs = 1.0 - 2.0 * (batch.trajectory_index % 2)
    return TrainBatch(
        batch.token_ids,
        batch.attention_mask,
        batch.action_mask,
        batch.turn_index,
        batch.trajectory_index,
        batch.rollout_logprobs,
        advantages=torch.where(batch.action_mask, signs[:, None], 0.0),
        is_masked=torch.zeros(len(signs), dtype=torch.bool),
    )


def measure(model: torch.nn.Module, batch: TrainBatch, *, repeats: int) -> Mapping[str, tuple[float, ...]]:
    """Return the seconds of an update in each round, by rows and with shared prefixes; they hardly move the weights."""
    learners = {
        name: Learner(
            copy.deepcopy(model),
            optimizer=OptimizerSettings(),
            loss=LossSettings(),
            update=UpdateSettings(learning_rate=1e-6, share_prefixes=is_shared),
        )
        for name, is_shared in (("rows", False), ("shared", True))
    }
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(repeats + 1):
        for name, learner in learners.items():
            start = time.perf_counter()
            learner.update(batch)
            seconds[name].append(time.perf_counter() - start)
    return {name: tuple(rounds[1:]) for name, rounds in seconds.items()}  # the first is not counted
