"""A rank of a learner on loopback, and the cases that ranks train: `python -m tests.support.learner_ranks`.

Rank 0 writes the weights of a case into `CASE.safetensors` and its reports' metrics into `CASE.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from gspo_gym.cluster.sharding import full_tensors, shard_model
from gspo_gym.learning.batching import TrainBatch, build_batch
from gspo_gym.learning.collective import Collective
from gspo_gym.learning.settings import (
    AdvantageSettings,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.update import Learner
from gspo_gym.policy.lora import add_lora
from gspo_gym.types import FinishReason, Outcome, Segment, Task, Trajectory, TrajectoryGroup, Turn

ROOT = Path(__file__).parents[2]
TASK = Task("test/Env-v0", 7)


@dataclass(frozen=True)
class Case:
    """A learner of a tiny model: what is trained, and under which settings."""

    vocab_size: int = 61
    is_tied: bool = True
    lora: Mapping[str, Any] | None = None
    kind: str = "qwen3"
    loss: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, Any] = field(default_factory=dict)
    advantages: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] | None = None
    minibatch_size: int | None = None
    checkpoints_layers: bool = False
    num_updates: int = 20


# 66 is divided by 2 and 3, 61 by neither. Two epochs, and micro-batches of about two trajectories.
_ACCUMULATES = {"max_tokens_per_microbatch": 40, "update_epochs": 2}
CASES = {
    "tied_uneven_kl": Case(
        loss={"kl_coef": 0.1}, reference={"update_every_n_iters": 3}, update=_ACCUMULATES, minibatch_size=6
    ),
    "untied_even": Case(66, is_tied=False, update=_ACCUMULATES, loss={"entropy_coef": 0.01}, checkpoints_layers=True),
    "tied_even_shared_prefixes": Case(66, update={"share_prefixes": True}),
    "untied_uneven_shaped": Case(
        is_tied=False, rewards={"kl_coef": 0.05}, advantages={"whiten": "tokens"}, reference={}, update=_ACCUMULATES
    ),
    "lora_tied_uneven_kl": Case(
        lora={"dropout": 0.1}, loss={"kl_coef": 0.1}, reference={"source": "base"}, update=_ACCUMULATES
    ),
    "lora_untied_uneven_adapter": Case(
        is_tied=False, lora={}, loss={"kl_coef": 0.1}, reference={"source": "adapter"}, update=_ACCUMULATES
    ),
}


def build_model(case: Case) -> Any:  # Any: transformers and peft are untyped
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        case.kind,
        vocab_size=case.vocab_size,
        tie_word_embeddings=case.is_tied,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,  # logits differ by some units, as a trained model's do
    )
    torch.default_generator.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    if case.lora is not None:
        model = add_lora(model, LoraSettings(r=4, alpha=8, **case.lora), seed=0)
    if case.checkpoints_layers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_learner(case: Case, model: Any, collective: Collective | None = None) -> Learner:
    return Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(**case.loss),
        update=UpdateSettings(**{"learning_rate": 1e-3} | dict(case.update)),
        minibatch_size=case.minibatch_size,
        rewards=RewardSettings(**case.rewards),
        advantages=AdvantageSettings(**case.advantages),
        reference=None if case.reference is None else ReferenceSettings(**case.reference),
        collective=collective,
    )


def build_batch_of(seed: int) -> TrainBatch:
    """Return a batch of three groups of four episodes, ragged; those of a group begin alike."""
    groups = []
    for g, returns in enumerate([(0.0, 1.0, 1.0, 3.0), (1.0, 1.0, 1.0, 1.0), (-1.0, 0.0, 0.5, 0.0)]):
        prompt = np.random.default_rng([seed, g]).integers(3, 61, 4)
        groups.append(TrajectoryGroup(TASK, tuple(_episode(prompt, i, seed, r) for i, r in enumerate(returns)), 4))
    batch = build_batch(groups, AdvantageSettings()).batch
    assert batch is not None
    return batch


def _episode(prompt: np.ndarray, number: int, seed: int, reward: float) -> Trajectory:
    generator = np.random.default_rng([seed, number, *prompt])
    sampled = 2 + (number + seed) % 3
    token_ids = np.concatenate([prompt, generator.integers(3, 61, sampled)])
    mask = np.arange(len(token_ids)) >= len(prompt)
    logprobs = np.where(mask, -generator.random(len(mask)) - 0.1, 0.0)
    segment = Segment(token_ids, mask, logprobs, np.where(mask, 0, -1), np.where(mask, 0, -1))
    turn = Turn(0, 0, (0, len(prompt)), (len(prompt), len(mask)), FinishReason.STOP, reward=reward)
    return Trajectory("t", 0, TASK, number, (segment,), (turn,), (), Outcome.TERMINATED)


def train(learner: Learner, num_updates: int, *, first: int = 0) -> list[dict[str, float]]:
    """Return each update's metrics, but for the seconds."""
    reports = [learner.update(build_batch_of(k)).metrics for k in range(first, first + num_updates)]
    return [{name: value for name, value in m.items() if not name.startswith("time/")} for m in reports]


def start_ranks(world_size: int, folder: Path, work: str, *arguments: str, max_seconds: float = 300) -> None:
    """Let as many processes do `work`, and wait; an AssertionError shows what one that failed has printed."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.learner_ranks", str(world_size), str(folder), work, *arguments]
    ranks = []
    for rank in range(world_size):
        with (folder / f"rank{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [*command[:3], str(rank), *command[3:]], cwd=ROOT, env=environment, stdout=log, stderr=log
                )
            )
    try:
        codes = [process.wait(max_seconds) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = [(folder / f"rank{rank}.log").read_text(errors="replace")[-3000:] for rank in range(world_size)]
    assert codes == [0] * world_size, "\n".join(logs)


def train_cases(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        case = CASES[name]
        model = build_model(case)
        learner = build_learner(case, model, shard_model(model))
        metrics = train(learner, case.num_updates)
        weights = {key: value.contiguous() for key, value in full_tensors(model)}
        if dist.get_rank() == 0:
            save_file(weights, folder / f"{name}.safetensors")
        (folder / f"{name}.rank{dist.get_rank()}.json").write_text(json.dumps(metrics))


WORKS: dict[str, Callable[[Path, Sequence[str]], None]] = {"train": train_cases}


def main(rank: str, world_size: str, folder: str, work: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=120),
    )
    WORKS[work](Path(folder), arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
